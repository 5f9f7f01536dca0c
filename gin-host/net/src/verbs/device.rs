// SPDX-License-Identifier: MIT OR Apache-2.0
//! The RDMA devices of this host, and an open one.

use super::config::{PortName, VerbsConfig};
use super::info::{DeviceInfo, Gid, GidKind, NoRdmaDevice, PortInfo};
use super::topology::PciPlace;
use gin_abi::mlx5::command::Mtu;
use gin_verbs::verbs::{DeviceAttributes, IBV_ATOMIC_NONE, VerbsDevice};
use gin_verbs::{CallError, DeviceList, OpenDevice, Verbs, check};
use std::ffi::c_int;
use std::fs;
use std::sync::Arc;

/// Returns the RDMA devices that this process can use. A device that does not answer is replaced by the reason.
///
/// # Errors
/// [`NoRdmaDevice`], if there are none.
pub fn probe(library: &str) -> Result<Vec<Result<DeviceInfo, NoRdmaDevice>>, NoRdmaDevice> {
    let verbs = Arc::new(Verbs::open(library)?);
    let list = devices(&verbs)?;
    Ok(list.devices().iter().map(|(name, device)| info(&open(&verbs, name, *device)?)).collect())
}

/// Returns the kernel's list of devices, which is not empty.
fn devices(verbs: &Verbs) -> Result<DeviceList<'_>, NoRdmaDevice> {
    let list = DeviceList::new(verbs).map_err(|CallError { errno, .. }| NoRdmaDevice::Kernel { errno })?;
    if list.devices().is_empty() { Err(NoRdmaDevice::None) } else { Ok(list) }
}

fn failed(name: &str) -> impl Fn(CallError) -> NoRdmaDevice {
    move |CallError { call, errno }| NoRdmaDevice::Failed { name: name.to_owned(), call, errno }
}

/// Opens a device, which belongs to a list that still exists.
fn open(verbs: &Arc<Verbs>, name: &str, device: *mut VerbsDevice) -> Result<OpenDevice, NoRdmaDevice> {
    // Safety: a device of a list; only the result closes the context.
    let open = unsafe { OpenDevice::new(verbs, name, "ibv_open_device", (verbs.ibv_open_device)(device)) };
    open.map_err(failed(name))
}

fn info(device: &OpenDevice) -> Result<DeviceInfo, NoRdmaDevice> {
    let mut attributes = DeviceAttributes::default();
    // Safety: the context is open, and `attributes` has at least the room that the library writes.
    let result = unsafe { (device.verbs.ibv_query_device)(device.context().as_ptr(), &raw mut attributes) };
    check("ibv_query_device", result).map_err(failed(&device.name))?;
    let number = |number: c_int| u32::try_from(number).unwrap_or(0);
    let few = |count: c_int| u8::try_from(count.clamp(0, 255)).unwrap_or(0);
    Ok(DeviceInfo {
        name: device.name.clone(),
        ports: (1..=attributes.phys_port_cnt).map(|number| port(device, number)).collect::<Result<_, _>>()?,
        max_entries: number(attributes.max_qp_wr),
        max_completions: number(attributes.max_cqe),
        reads_answered: few(attributes.max_qp_rd_atom),
        reads_asked: few(attributes.max_qp_init_rd_atom),
        has_atomics: attributes.atomic_cap != IBV_ATOMIC_NONE,
        place: PciPlace::of_rdma(&device.name),
    })
}

fn port(device: &OpenDevice, number: u8) -> Result<PortInfo, NoRdmaDevice> {
    let attributes = device.port(number).map_err(failed(&device.name))?;
    let file =
        |file: &str| fs::read_to_string(format!("/sys/class/infiniband/{}/ports/{number}/{file}", device.name)).ok();
    // libibverbs has no public function for the kind of a GID; the kernel reports it.
    let kind = |index: u32| match file(&format!("gid_attrs/types/{index}")).as_deref().map(str::trim) {
        Some("RoCE v2") => GidKind::RoceV2,
        Some("IB/RoCE v1") => GidKind::InfiniBand,
        _ => GidKind::Unknown,
    };
    let gids = (0..u32::try_from(attributes.gid_tbl_len).unwrap_or(0)).filter_map(|index| {
        let bytes = device.gid(number, index).ok().filter(|bytes| *bytes != [0; 16])?;
        Some(Gid { index, bytes, kind: kind(index) })
    });
    Ok(PortInfo {
        number,
        is_up: attributes.is_active(),
        link: attributes.link(),
        mtu: Mtu::from_code(attributes.active_mtu.into()),
        max_message: u64::from(attributes.max_msg_sz),
        rate: file("rate").as_deref().and_then(rate).unwrap_or(0),
        lid: attributes.lid,
        gids: gids.collect(),
    })
}

/// Parses the kernel's text for a port's rate, such as `2.5 Gb/sec (1X SDR)`, into bits per microsecond.
fn rate(text: &str) -> Option<u64> {
    let (number, unit) = text.trim().split_once(' ')?;
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let tenths = part.bytes().next().filter(u8::is_ascii_digit)? - b'0';
    let whole = whole.parse::<u64>().ok()?.checked_mul(1000)?;
    unit.starts_with("Gb/sec").then(|| whole.saturating_add(100 * u64::from(tenths)))
}

/// An open device, and the port of it that connections use. Networks of several ranks can share it.
#[derive(Debug)]
pub struct RdmaDevice {
    pub(super) open: OpenDevice,
    /// The device's attributes.
    pub info: DeviceInfo,
    /// The port's attributes.
    pub port: PortInfo,
    /// The GID that connections use.
    pub gid: Gid,
    /// The size of the largest packet.
    pub mtu: Mtu,
    /// The configuration of connections.
    pub config: VerbsConfig,
}

impl RdmaDevice {
    /// Opens the device that the configuration names, or the first that has a port which is up.
    ///
    /// # Errors
    /// [`NoRdmaDevice`].
    pub fn open(config: &VerbsConfig) -> Result<Arc<Self>, NoRdmaDevice> {
        let named = config.device.iter().map(|device| PortName { device: device.clone(), port: config.port });
        let found = Self::find(config, &named.collect::<Vec<_>>(), config.port, true)?;
        found.into_iter().next().ok_or_else(|| NoRdmaDevice::NoPort { port: config.port, known: Vec::new() })
    }

    /// Opens ports that are up. `named` lists the ports, in order; each must exist. If it is empty, opens the ports of
    /// all devices, with this number if there is one. `one`: opens only the first.
    pub(super) fn find(
        config: &VerbsConfig,
        named: &[PortName],
        number: Option<u8>,
        one: bool,
    ) -> Result<Vec<Arc<Self>>, NoRdmaDevice> {
        if let Some((what, number, range)) = config.wrong() {
            return Err(NoRdmaDevice::Config { what, number, range });
        }
        let verbs = Arc::new(Verbs::open(&config.library)?);
        let list = devices(&verbs)?;
        let known: Vec<String> = list.devices().iter().map(|(name, _)| name.clone()).collect();
        let any = known.iter().map(|name| PortName { device: name.clone(), port: number }).collect::<Vec<_>>();
        let wanted = if named.is_empty() { &any } else { named };
        let mut found: Vec<Arc<Self>> = Vec::new();
        for PortName { device: name, port } in wanted {
            let Some((_, device)) = list.devices().iter().find(|(other, _)| other == name) else {
                return Err(NoRdmaDevice::Unknown { name: name.clone(), known });
            };
            let open = || open(&verbs, name, *device);
            let info = match open().and_then(|device| info(&device)) {
                // Skips a device that the configuration does not name; another one may work.
                Err(_) if named.is_empty() => continue,
                info => info?,
            };
            let usable = |up: &&PortInfo| up.is_up && port.is_none_or(|number| number == up.number);
            let before = found.len();
            for port in info.ports.iter().filter(usable) {
                match Self::of(open()?, info.clone(), port.clone(), config) {
                    Err(_) if named.is_empty() && !one => {}
                    device => found.push(Arc::new(device?)),
                }
                if one {
                    return Ok(found);
                }
            }
            if found.len() == before && !named.is_empty() {
                return Err(NoRdmaDevice::NoPort { port: *port, known: vec![name.clone()] });
            }
        }
        if found.is_empty() { Err(NoRdmaDevice::NoPort { port: number, known }) } else { Ok(found) }
    }

    fn of(open: OpenDevice, info: DeviceInfo, port: PortInfo, config: &VerbsConfig) -> Result<Self, NoRdmaDevice> {
        let missing = || NoRdmaDevice::NoAddress {
            name: info.name.clone(),
            port: port.number,
            index: config.gid_index.unwrap_or(0),
        };
        let gid = port.address(config).ok_or_else(missing)?;
        // An unknown code means a larger packet than any known code.
        let mtu = port.mtu.unwrap_or(Mtu::B4096);
        let mtu = config.mtu.map_or(mtu, |wanted| wanted.min(mtu));
        Ok(Self { open, info, port, gid, mtu, config: config.clone() })
    }

    /// Returns the device's name and the number of the port.
    pub fn name(&self) -> PortName {
        PortName { device: self.info.name.clone(), port: Some(self.port.number) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named() {
        let error = probe("libnowhere.so.1").unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, NoRdmaDevice::Library(_)), "{text}");
        assert!(text.starts_with("no RDMA device: libnowhere.so.1 cannot be opened ("), "{text}");
        assert!(text.ends_with("it is part of rdma-core"), "{text}");
        let config = VerbsConfig::default().library("libnowhere.so.1".to_owned());
        assert_eq!(RdmaDevice::open(&config).unwrap_err().to_string(), text);
    }

    #[test]
    fn a_library_without_the_functions_is_named() {
        // Every program has this library open.
        let error = probe("libc.so.6").unwrap_err();
        assert_eq!(error.to_string(), "no RDMA device: libc.so.6 has no function ibv_get_device_list; it is too old");
    }

    #[test]
    fn a_number_out_of_range_is_refused_before_anything_is_opened() {
        let config = VerbsConfig::default().library("libnowhere.so.1".to_owned()).timeout(0);
        let text = RdmaDevice::open(&config).unwrap_err().to_string();
        assert_eq!(text, "no RDMA device: timeout 0 is out of range; use 1 to 31");
    }

    #[test]
    fn asking_for_devices_here_has_an_answer() {
        // The host may have a library and devices, or not.
        match probe(gin_verbs::verbs::LIBRARY) {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(error) => assert!(error.to_string().starts_with("no RDMA device: "), "{error}"),
        }
    }

    #[test]
    fn rates_are_parsed_as_the_kernel_writes_them() {
        let texts = ["400 Gb/sec (4X NDR)\n", "2.5 Gb/sec (1X SDR)", "100 Gb/sec"];
        assert_eq!(texts.map(rate), [Some(400_000), Some(2500), Some(100_000)]);
        for text in ["", "400", "x Gb/sec", "4.x Gb/sec", "4 MB/sec", "99999999999999999999 Gb/sec"] {
            assert_eq!(rate(text), None, "{text}");
        }
    }
}
