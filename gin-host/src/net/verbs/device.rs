// SPDX-License-Identifier: MIT OR Apache-2.0
//! RDMA devices: what there are, and one that is opened.

use super::config::VerbsConfig;
use super::ffi::{self, Functions, LINK_ETHERNET, LoadError, PORT_ACTIVE, PortAttributes};
use crate::nic::hca::Link;
use gin_abi::mlx5::command::Mtu;
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, fs, io};

/// Why there is no device to be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoDevice {
    /// A number of the configuration is out of its range.
    #[error("no RDMA device: a {what} of {number} cannot be; it is {range}")]
    Config {
        /// Which number.
        what: &'static str,
        /// The number.
        number: u64,
        /// What it can be.
        range: &'static str,
    },
    /// libibverbs cannot be opened.
    #[error("no RDMA device: {library} cannot be opened ({reason}); it is part of rdma-core")]
    NoLibrary {
        /// The library.
        library: String,
        /// What the loader says.
        reason: String,
    },
    /// libibverbs is too old.
    #[error("no RDMA device: {library} has no function {name}; it is too old")]
    NoFunction {
        /// The library.
        library: String,
        /// What it lacks.
        name: String,
    },
    /// The kernel has no RDMA devices, or its driver for programs is not loaded.
    #[error("no RDMA device: asking the kernel for devices failed: {}", io::Error::from_raw_os_error(*errno))]
    Kernel {
        /// The error of the operating system.
        errno: i32,
    },
    /// There are no RDMA devices.
    #[error("no RDMA device: the kernel has none")]
    None,
    /// There is no device of this name.
    #[error("no RDMA device {name}; there are: {}", known.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// No port can be used.
    #[error("no RDMA device with a port that is up{}; there are: {}", wanted(*port), known.join(", "))]
    NoPort {
        /// The port that was asked for.
        port: Option<u8>,
        /// The devices that were looked at.
        known: Vec<String>,
    },
    /// A port has no such address.
    #[error("port {port} of RDMA device {name} has no address of index {index}")]
    NoAddress {
        /// The device.
        name: String,
        /// The port.
        port: u8,
        /// The index.
        index: u32,
    },
    /// A device does not do what it should.
    #[error("RDMA device {name}: {call} failed: {}", io::Error::from_raw_os_error(*errno))]
    Failed {
        /// The device.
        name: String,
        /// The function.
        call: &'static str,
        /// The error of the operating system: 13 (permission denied) is a matter of `/dev/infiniband`.
        errno: i32,
    },
}

fn wanted(port: Option<u8>) -> String {
    port.map_or_else(String::new, |port| format!(" and has number {port}"))
}

impl From<LoadError> for NoDevice {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::NoLibrary { library, reason } => Self::NoLibrary { library, reason },
            LoadError::NoFunction { library, name } => Self::NoFunction { library, name },
        }
    }
}

/// What an address of a port is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidKind {
    /// Of InfiniBand, or of RoCE v1: packets are not routed by IP.
    InfiniBand,
    /// Of RoCE v2: packets are UDP.
    RoceV2,
    /// The kernel does not say.
    Unknown,
}

/// An address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid {
    /// Its index in the port's table.
    pub index: u32,
    /// The address.
    pub bytes: [u8; 16],
    /// What it is.
    pub kind: GidKind,
}

impl Gid {
    /// How well it serves: less is better.
    fn rank(&self) -> u32 {
        let is_ipv4 = self.bytes[..10] == [0; 10] && self.bytes[10..12] == [0xff; 2];
        let is_link_local = self.bytes[..2] == [0xfe, 0x80];
        match self.kind {
            GidKind::RoceV2 if is_ipv4 => 0,
            GidKind::RoceV2 if !is_link_local => 1,
            GidKind::RoceV2 => 2,
            GidKind::Unknown | GidKind::InfiniBand => 3,
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::net::Ipv6Addr::from(self.bytes))
    }
}

/// A port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it is up.
    pub is_up: bool,
    /// What it is part of.
    pub link: Link,
    /// Largest packet now; `None` if the device says what is not known here.
    pub mtu: Option<Mtu>,
    /// Most bytes of one message.
    pub max_message: u64,
    /// Local identifier, on InfiniBand.
    pub lid: u16,
    /// Its addresses.
    pub gids: Vec<Gid>,
}

/// A device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its ports.
    pub ports: Vec<PortInfo>,
    /// Most entries of a send or receive queue.
    pub max_entries: u32,
    /// Most entries of a completion queue.
    pub max_completions: u32,
    /// Reads at a time that a queue pair answers.
    pub reads_answered: u8,
    /// Reads at a time that a queue pair asks for.
    pub reads_asked: u8,
}

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
            lid: attributes.lid,
            gids,
        })
    }

    /// The library has no public function that says it; the kernel does.
    fn gid_kind(&self, port: u8, index: u32) -> GidKind {
        let path = format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs/types/{index}", self.name);
        match fs::read_to_string(path).as_deref().map(str::trim) {
            Ok("RoCE v2") => GidKind::RoceV2,
            Ok("IB/RoCE v1") => GidKind::InfiniBand,
            _ => GidKind::Unknown,
        }
    }
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
        if let Some((what, number, range)) = config.wrong() {
            return Err(NoDevice::Config { what, number, range });
        }
        let functions = Arc::new(Functions::open(&config.library)?);
        let list = List::of(&functions)?;
        let all = list.devices()?;
        let mut known: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
        if let Some(name) = &config.device {
            if !known.contains(name) {
                return Err(NoDevice::Unknown { name: name.clone(), known });
            }
            known = vec![name.clone()];
        }
        for (name, device) in all.iter().filter(|(name, _)| known.contains(name)) {
            let opened = match Opened::open(&functions, name, *device) {
                // Another one may do, unless it was asked for.
                Err(_) if config.device.is_none() => continue,
                opened => opened?,
            };
            let info = opened.info()?;
            let usable = |port: &&PortInfo| port.is_up && config.port.is_none_or(|number| number == port.number);
            let Some(port) = info.ports.iter().find(usable).cloned() else { continue };
            return Self::of(opened, info, port, config).map(Arc::new);
        }
        Err(NoDevice::NoPort { port: config.port, known })
    }

    fn of(opened: Opened, info: DeviceInfo, port: PortInfo, config: &VerbsConfig) -> Result<Self, NoDevice> {
        let gid = match (config.gid_index, port.link) {
            (Some(index), _) => port.gids.iter().find(|gid| gid.index == index),
            (None, Link::InfiniBand) => port.gids.first(),
            // The first of the best.
            (None, Link::Ethernet) => port.gids.iter().filter(|gid| gid.index <= 255).min_by_key(|gid| gid.rank()),
        };
        let missing =
            || NoDevice::NoAddress { name: info.name.clone(), port: port.number, index: config.gid_index.unwrap_or(0) };
        let gid = *gid.ok_or_else(missing)?;
        // A code that is not known stands for more than is known.
        let mtu = port.mtu.unwrap_or(Mtu::B4096);
        let mtu = config.mtu.map_or(mtu, |wanted| if wanted.bytes() < mtu.bytes() { wanted } else { mtu });
        Ok(Self { opened, info, port, gid, mtu, config: config.clone() })
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
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
        match probe(crate::ibverbs::LIBRARY) {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(error) => assert!(error.to_string().starts_with("no RDMA device: "), "{error}"),
        }
    }

    #[test]
    fn addresses_of_roce_v2_and_ipv4_serve_best() {
        let gid = |bytes, kind| Gid { index: 0, bytes, kind };
        let ipv4 = std::net::Ipv4Addr::new(10, 7, 0, 1).to_ipv6_mapped().octets();
        let global = [0x20, 1, 13, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        let mut local = global;
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        let order = [
            gid(ipv4, GidKind::RoceV2),
            gid(global, GidKind::RoceV2),
            gid(local, GidKind::RoceV2),
            gid(ipv4, GidKind::InfiniBand),
        ];
        assert!(order.is_sorted_by(|better, worse| better.rank() < worse.rank()));
        assert_eq!(order[0].to_string(), "::ffff:10.7.0.1");
    }
}
