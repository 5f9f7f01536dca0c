// SPDX-License-Identifier: MIT OR Apache-2.0
//! RDMA devices: what there are, and one that is opened.

use super::config::{PortName, VerbsConfig};
use super::info::{DeviceInfo, Gid, GidKind, NoDevice, PortInfo};
use super::objects::Domain;
use super::region::{Reach, Region, Way};
use super::topology::Place;
use crate::NetError;
use gin_abi::mlx5::command::Mtu;
use gin_gpu::MemorySlice;
use gin_verbs::Link;
use gin_verbs::verbs::{self as ffi, ATOMICS, Functions, LINK_ETHERNET, PORT_ACTIVE, PortAttributes};
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, fs, io};

/// The RDMA devices that this process can use, each with the reason if it cannot be asked.
///
/// # Errors
/// [`NoDevice`], if there are none.
pub fn probe(library: &str) -> Result<Vec<Result<DeviceInfo, NoDevice>>, NoDevice> {
    let functions = Arc::new(Functions::open(library)?);
    let list = List::of(&functions)?;
    let all = list.devices()?;
    Ok(all.iter().map(|(name, device)| Opened::open(&functions, name, *device)?.info()).collect())
}

/// The kernel's list of RDMA devices.
struct List<'a> {
    functions: &'a Functions,
    first: NonNull<*mut ffi::Device>,
    count: usize,
}

impl<'a> List<'a> {
    fn of(functions: &'a Functions) -> Result<Self, NoDevice> {
        let mut count: c_int = 0;
        // Safety: `count` may be written.
        let first = unsafe { (functions.ibv_get_device_list)(&raw mut count) };
        match NonNull::new(first) {
            Some(first) => Ok(Self { functions, first, count: usize::try_from(count).unwrap_or(0) }),
            None => Err(NoDevice::Kernel { errno: last_errno() }),
        }
    }

    fn devices(&self) -> Result<Vec<(String, *mut ffi::Device)>, NoDevice> {
        // Safety: the library says how many there are, and keeps them until the list is freed.
        let all = unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) };
        // Safety: devices of the list; a name is a string that lives as long.
        let named = all.iter().map(|&device| unsafe {
            (CStr::from_ptr((self.functions.ibv_get_device_name)(device)).to_string_lossy().into_owned(), device)
        });
        let named: Vec<_> = named.collect();
        if named.is_empty() { Err(NoDevice::None) } else { Ok(named) }
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // Safety: it came from the library and is not used any more.
        unsafe { (self.functions.ibv_free_device_list)(self.first.as_ptr()) };
    }
}

pub(super) fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// A device that is open.
pub(super) struct Opened {
    pub(super) functions: Arc<Functions>,
    pub(super) context: NonNull<ffi::Context>,
    name: String,
}

// Safety: libibverbs locks what threads share.
unsafe impl Send for Opened {}
// Safety: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // Safety: everything that was made with it kept it alive.
        unsafe { (self.functions.ibv_close_device)(self.context.as_ptr()) };
    }
}

impl Opened {
    /// `device`: of a list that is there still.
    fn open(functions: &Arc<Functions>, name: &str, device: *mut ffi::Device) -> Result<Self, NoDevice> {
        // Safety: a device of the list.
        let context = NonNull::new(unsafe { (functions.ibv_open_device)(device) });
        let failed = || NoDevice::Failed { name: name.to_owned(), call: "ibv_open_device", errno: last_errno() };
        Ok(Self { functions: functions.clone(), context: context.ok_or_else(failed)?, name: name.to_owned() })
    }

    fn check(&self, call: &'static str, result: c_int) -> Result<(), NoDevice> {
        let errno = match result {
            0 => return Ok(()),
            -1 => last_errno(),
            errno => errno.saturating_abs(),
        };
        Err(NoDevice::Failed { name: self.name.clone(), call, errno })
    }

    fn info(&self) -> Result<DeviceInfo, NoDevice> {
        // Safety: a structure of numbers.
        let mut attributes: ffi::DeviceAttributes = unsafe { std::mem::zeroed() };
        // Safety: the context is open, and there is at least the room that the library writes.
        self.check("ibv_query_device", unsafe {
            (self.functions.ibv_query_device)(self.context.as_ptr(), &raw mut attributes)
        })?;
        let number = |number: c_int| u32::try_from(number).unwrap_or(0);
        let few = |count: c_int| u8::try_from(count.clamp(0, 255)).unwrap_or(0);
        Ok(DeviceInfo {
            name: self.name.clone(),
            ports: (1..=attributes.phys_port_cnt).map(|port| self.port(port)).collect::<Result<_, _>>()?,
            max_entries: number(attributes.max_qp_wr),
            max_completions: number(attributes.max_cqe),
            reads_answered: few(attributes.max_qp_rd_atom),
            reads_asked: few(attributes.max_qp_init_rd_atom),
            has_atomics: attributes.atomic_cap != ATOMICS[0],
            place: Place::of_rdma(&self.name),
        })
    }

    fn port(&self, number: u8) -> Result<PortInfo, NoDevice> {
        let mut attributes = PortAttributes::empty();
        // Safety: the context is open, and there is more room than the library writes.
        self.check("ibv_query_port", unsafe {
            (self.functions.ibv_query_port)(self.context.as_ptr(), number, &raw mut attributes)
        })?;
        let mut gids = Vec::new();
        for index in 0..u32::try_from(attributes.gid_tbl_len).unwrap_or(0) {
            let mut bytes = [0; 16];
            // Safety: the context is open, and `bytes` may be written.
            let result = unsafe {
                (self.functions.ibv_query_gid)(self.context.as_ptr(), number, index as c_int, &raw mut bytes)
            };
            if result == 0 && bytes != [0; 16] {
                gids.push(Gid { index, bytes, kind: self.gid_kind(number, index) });
            }
        }
        Ok(PortInfo {
            number,
            is_up: attributes.state == PORT_ACTIVE,
            link: if attributes.link_layer == LINK_ETHERNET { Link::Ethernet } else { Link::InfiniBand },
            mtu: Mtu::from_code(attributes.active_mtu.into()),
            max_message: u64::from(attributes.max_msg_sz),
            rate: self.told(number, "rate").as_deref().and_then(rate).unwrap_or(0),
            lid: attributes.lid,
            gids,
        })
    }

    /// What the kernel's folder of a port says.
    fn told(&self, port: u8, file: &str) -> Option<String> {
        fs::read_to_string(format!("/sys/class/infiniband/{}/ports/{port}/{file}", self.name)).ok()
    }

    /// The library has no public function that says it; the kernel does.
    fn gid_kind(&self, port: u8, index: u32) -> GidKind {
        match self.told(port, &format!("gid_attrs/types/{index}")).as_deref().map(str::trim) {
            Some("RoCE v2") => GidKind::RoceV2,
            Some("IB/RoCE v1") => GidKind::InfiniBand,
            _ => GidKind::Unknown,
        }
    }
}

/// What the kernel says of a port's rate, such as `2.5 Gb/sec (1X SDR)`, in bits in a microsecond.
fn rate(text: &str) -> Option<u64> {
    let (number, unit) = text.trim().split_once(' ')?;
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let tenths = part.bytes().next().filter(u8::is_ascii_digit)? - b'0';
    let whole = whole.parse::<u64>().ok()?.checked_mul(1000)?;
    unit.starts_with("Gb/sec").then(|| whole.saturating_add(100 * u64::from(tenths)))
}

/// A device that is open, and the port of it that is used. Networks of several ranks can share it.
pub struct Device {
    pub(super) opened: Opened,
    pub(super) info: DeviceInfo,
    pub(super) port: PortInfo,
    pub(super) gid: Gid,
    pub(super) mtu: Mtu,
    pub(super) config: VerbsConfig,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.port.number;
        f.debug_struct("Device").field("name", &self.info.name).field("port", &port).finish_non_exhaustive()
    }
}

impl Device {
    /// Opens the device that the configuration names, or the first that has a port which is up.
    ///
    /// # Errors
    /// [`NoDevice`].
    pub fn open(config: &VerbsConfig) -> Result<Arc<Self>, NoDevice> {
        let named = config.device.iter().map(|device| PortName { device: device.clone(), port: config.port });
        let found = Self::find(config, &named.collect::<Vec<_>>(), config.port, true)?;
        found.into_iter().next().ok_or_else(|| NoDevice::NoPort { port: config.port, known: Vec::new() })
    }

    /// Opens ports that are up: those that are named, in that order, each of which must be there, or all, with this number;
    /// perhaps only the first.
    pub(super) fn find(
        config: &VerbsConfig,
        named: &[PortName],
        number: Option<u8>,
        one: bool,
    ) -> Result<Vec<Arc<Self>>, NoDevice> {
        if let Some((what, number, range)) = config.wrong() {
            return Err(NoDevice::Config { what, number, range });
        }
        let functions = Arc::new(Functions::open(&config.library)?);
        let list = List::of(&functions)?;
        let all = list.devices()?;
        let known: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
        let any = known.iter().map(|name| PortName { device: name.clone(), port: number }).collect::<Vec<_>>();
        let wanted = if named.is_empty() { &any } else { named };
        let mut found: Vec<Arc<Self>> = Vec::new();
        for PortName { device: name, port } in wanted {
            let Some((_, device)) = all.iter().find(|(other, _)| other == name) else {
                return Err(NoDevice::Unknown { name: name.clone(), known });
            };
            let open = || Opened::open(&functions, name, *device);
            let info = match open().and_then(|opened| opened.info()) {
                // Another one may do, unless it was asked for.
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
                return Err(NoDevice::NoPort { port: *port, known: vec![name.clone()] });
            }
        }
        if found.is_empty() { Err(NoDevice::NoPort { port: number, known }) } else { Ok(found) }
    }

    fn of(opened: Opened, info: DeviceInfo, port: PortInfo, config: &VerbsConfig) -> Result<Self, NoDevice> {
        let missing =
            || NoDevice::NoAddress { name: info.name.clone(), port: port.number, index: config.gid_index.unwrap_or(0) };
        let gid = port.address(config).ok_or_else(missing)?;
        // A code that is not known stands for more than is known.
        let mtu = port.mtu.unwrap_or(Mtu::B4096);
        let mtu = config.mtu.map_or(mtu, |wanted| if wanted.bytes() < mtu.bytes() { wanted } else { mtu });
        Ok(Self { opened, info, port, gid, mtu, config: config.clone() })
    }

    /// Registers memory and lets it go again, to see how the NIC reaches it, and whether it adds to words there.
    ///
    /// # Errors
    /// [`NetError::Local`](crate::NetError::Local), with the reason why it does not.
    pub fn reach(self: &Arc<Self>, memory: &MemorySlice) -> Result<(Way, bool), NetError> {
        let domain = Domain::new(self)?;
        // Safety: the region is gone before this returns.
        let register = |reach| unsafe { Region::of_slice(&domain, memory, reach) }.map(|region| region.way());
        match register(Reach::PeersAdd) {
            Ok(way) if self.info.has_atomics => Ok((way, true)),
            _ => register(Reach::Peers).map(|way| (way, false)),
        }
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Its name, and the number of the port that is used.
    pub fn name(&self) -> PortName {
        PortName { device: self.info.name.clone(), port: Some(self.port.number) }
    }

    /// The port that is used.
    pub fn port(&self) -> &PortInfo {
        &self.port
    }

    /// The port's address that is used.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// The largest packet.
    pub fn mtu(&self) -> Mtu {
        self.mtu
    }

    /// How connections work.
    pub fn config(&self) -> &VerbsConfig {
        &self.config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let error = probe("libnowhere.so.1").unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, NoDevice::NoLibrary { .. }), "{text}");
        assert!(text.starts_with("no RDMA device: libnowhere.so.1 cannot be opened ("), "{text}");
        assert!(text.ends_with("it is part of rdma-core"), "{text}");
        let config = VerbsConfig { library: "libnowhere.so.1".to_owned(), ..VerbsConfig::default() };
        assert_eq!(Device::open(&config).unwrap_err().to_string(), text);
    }

    #[test]
    fn a_library_without_the_functions_is_named() {
        // Every program has it open.
        let error = probe("libc.so.6").unwrap_err();
        assert_eq!(error.to_string(), "no RDMA device: libc.so.6 has no function ibv_get_device_list; it is too old");
    }

    #[test]
    fn a_configuration_that_cannot_be_is_refused_before_anything_is_opened() {
        let config = VerbsConfig { library: "libnowhere.so.1".to_owned(), timeout: 0, ..VerbsConfig::default() };
        let text = Device::open(&config).unwrap_err().to_string();
        assert_eq!(text, "no RDMA device: a timeout of 0 cannot be; it is 1 to 31");
    }

    #[test]
    fn asking_for_devices_here_has_an_answer() {
        // Whether there is a library or a device is not for a test to say.
        match probe(gin_verbs::LIBRARY) {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(error) => assert!(error.to_string().starts_with("no RDMA device: "), "{error}"),
        }
    }

    #[test]
    fn rates_are_read_as_the_kernel_says_them() {
        let texts = ["400 Gb/sec (4X NDR)\n", "2.5 Gb/sec (1X SDR)", "100 Gb/sec"];
        assert_eq!(texts.map(rate), [Some(400_000), Some(2500), Some(100_000)]);
        for text in ["", "400", "x Gb/sec", "4.x Gb/sec", "4 MB/sec", "99999999999999999999 Gb/sec"] {
            assert_eq!(rate(text), None, "{text}");
        }
    }
}
