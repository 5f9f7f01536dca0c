// SPDX-License-Identifier: MIT OR Apache-2.0
//! The section of `gin info` on RDMA devices.

#[cfg(any(feature = "cuda", test))]
use gin_net::NetError;
use gin_net::verbs::{DeviceInfo, GidKind, PortInfo, Ports, VerbsConfig, probe};
#[cfg(any(feature = "cuda", test))]
use gin_net::verbs::{GpuMemory, Way as Path};
use serde::Serialize;

/// The devices and ports that libibverbs lists, and the ports that each GPU would use.
#[derive(Debug, Serialize)]
pub(super) struct Rdma {
    /// The reason why there is no device.
    pub(super) none: Option<String>,
    pub(super) library: Option<String>,
    /// The devices, or the reason why one cannot be described.
    pub(super) devices: Vec<Result<Device, String>>,
    /// The ports in use, or the reason why none can be used.
    pub(super) used: Result<Used, String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) pci_address: Option<String>,
    pub(super) numa_node: Option<u32>,
    pub(super) has_atomics: bool,
    pub(super) ports: Vec<Port>,
}

#[derive(Debug, Serialize)]
pub(super) struct Port {
    number: u8,
    is_up: bool,
    link: String,
    /// The rate in Gb/s, if it is known.
    rate_gb_s: Option<f64>,
    mtu: Option<u32>,
    /// The address in use.
    gid: Option<Gid>,
}

#[derive(Debug, Serialize)]
struct Gid {
    index: u32,
    address: String,
    is_roce_v2: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct Used {
    /// The ports of rank 0 on a virtual GPU.
    pub(super) by_virtual_gpu: String,
    pub(super) by_gpus: Vec<OfGpu>,
}

/// The ports that a GPU would use.
#[derive(Debug, Serialize)]
pub(super) struct OfGpu {
    pub(super) gpu: usize,
    pub(super) ports: String,
    pub(super) memory: Vec<Way>,
}

/// The path from a port to a GPU's memory.
#[derive(Debug, Serialize)]
pub(super) struct Way {
    pub(super) port: String,
    pub(super) way: String,
}

impl Rdma {
    /// Returns what libibverbs lists, or the reason why it lists nothing.
    pub(super) fn find() -> Self {
        let none =
            |reason: String| Self { used: Err(reason.clone()), none: Some(reason), library: None, devices: Vec::new() };
        let config = match VerbsConfig::from_env() {
            Ok(config) => config,
            // `gin info` shows the error of an invalid variable; a run fails with it.
            Err(error) => return none(error.to_string()),
        };
        let found = match probe(&config.library) {
            Ok(found) => found,
            Err(error) => return none(error.to_string()),
        };
        let device = |info: Result<DeviceInfo, _>| match info {
            Ok(info) => Ok(Device::of(&info, &config)),
            Err(error) => Err(ToString::to_string(&error)),
        };
        let used = |ports: Ports| Used { by_virtual_gpu: ports.choose(None, 0).to_string(), by_gpus: of_gpus(&ports) };
        Self {
            none: None,
            devices: found.into_iter().map(device).collect(),
            used: Ports::open(&config).map(used).map_err(|error| error.to_string()),
            library: Some(config.library),
        }
    }
}

impl Device {
    fn of(info: &DeviceInfo, config: &VerbsConfig) -> Self {
        Self {
            name: info.name.clone(),
            pci_address: info.place.as_ref().map(|place| place.address().to_string()),
            numa_node: info.place.as_ref().and_then(|place| place.numa_node),
            has_atomics: info.has_atomics,
            ports: info.ports.iter().map(|port| Port::of(port, config)).collect(),
        }
    }
}

impl Port {
    fn of(port: &PortInfo, config: &VerbsConfig) -> Self {
        let gid = port.address(config).map(|gid| Gid {
            index: gid.index,
            address: gid.to_string(),
            is_roce_v2: gid.kind == GidKind::RoceV2,
        });
        Self {
            number: port.number,
            is_up: port.is_up,
            link: port.link.to_string(),
            rate_gb_s: (port.rate > 0).then_some(port.rate as f64 / 1000.0),
            mtu: port.mtu.map(|mtu| mtu.bytes()),
            gid,
        }
    }

    /// Returns the port as text.
    pub(super) fn line(&self) -> String {
        let state = if self.is_up { "up" } else { "down" };
        let mtu = self.mtu.map_or("unknown".to_owned(), |mtu| mtu.to_string());
        let rate = self.rate_gb_s.map_or("unknown rate".to_owned(), |rate| format!("{rate} Gb/s"));
        let address = match &self.gid {
            Some(Gid { index, address, is_roce_v2 }) => {
                format!("GID {index}: {address}{}", if *is_roce_v2 { " (RoCE v2)" } else { "" })
            }
            None => "no usable GID".to_owned(),
        };
        format!("port {}: {state}, {}, {rate}, MTU {mtu}, {address}", self.number, self.link)
    }
}

/// Returns for each GPU the ports that it would use, and the path from each port to its memory.
#[cfg(feature = "cuda")]
fn of_gpus(ports: &Ports) -> Vec<OfGpu> {
    use gin_gpu::cuda::{CudaDevice, gpus};
    use gin_gpu::{Device, GpuError, Memory, MemoryKind};
    use std::sync::Arc;
    let of_gpu = |gpu: gin_gpu::cuda::GpuInfo| {
        let chosen = ports.choose(Some(&gpu.pci_address), gpu.ordinal as u32);
        let memory = CudaDevice::new(gpu.ordinal, &[]).and_then(|device| -> Result<Arc<Memory>, GpuError> {
            let device: Arc<dyn Device> = device;
            Memory::new(&device, MemoryKind::Device, 1 << 21)
        });
        let way = |port: &Arc<gin_net::verbs::RdmaDevice>| {
            let way = match &memory {
                Ok(memory) => way(port.config.gpu_memory, port.reach(&memory.whole())),
                Err(error) => format!("unknown: {error}"),
            };
            Way { port: port.name().to_string(), way }
        };
        OfGpu { gpu: gpu.ordinal, ports: chosen.to_string(), memory: chosen.ports.iter().map(way).collect() }
    };
    // Without a GPU there is none; the section on devices says why.
    gpus().into_iter().flatten().map(of_gpu).collect()
}

/// Returns nothing: this build supports no GPUs.
#[cfg(not(feature = "cuda"))]
fn of_gpus(_ports: &Ports) -> Vec<OfGpu> {
    Vec::new()
}

/// Describes the path from a port to a GPU's memory, by the configured choice and the result of the probe.
#[cfg(any(feature = "cuda", test))]
fn way(chosen: GpuMemory, found: Result<(Path, bool), NetError>) -> String {
    match (chosen, found) {
        (GpuMemory::Host, _) => "through pinned host memory, as configured; the proxy raises signals".to_owned(),
        (_, Ok((way, true))) => format!("{way}; the NIC can raise signals there"),
        (_, Ok((way, false))) => format!("{way}; the proxy raises signals"),
        (GpuMemory::Automatic, Err(error)) => {
            format!("through pinned host memory, because {error}; the proxy raises signals")
        }
        (GpuMemory::Nic, Err(error)) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_net::verbs::Gid;
    use gin_nic::hca::Link;

    #[test]
    fn the_way_to_memory_of_a_gpu_is_shown_with_its_reason() {
        let refused = || Err(NetError::Local { what: "registering memory", reason: "no".to_owned() });
        assert_eq!(way(GpuMemory::Automatic, Ok((Path::DmaBuf, false))), "as a DMA-BUF file; the proxy raises signals");
        let text = way(GpuMemory::Automatic, refused());
        assert_eq!(text, "through pinned host memory, because registering memory failed: no; the proxy raises signals");
        assert_eq!(way(GpuMemory::Nic, refused()), "registering memory failed: no", "no other path was allowed");
        assert!(
            way(GpuMemory::Host, Ok((Path::DmaBuf, true))).starts_with("through pinned host memory, as configured")
        );
    }

    fn line(port: &PortInfo, config: &VerbsConfig) -> String {
        Port::of(port, config).line()
    }

    #[test]
    fn a_port_is_shown_with_its_state_its_rate_and_the_address_that_is_used() {
        let ipv4 = std::net::Ipv4Addr::new(10, 7, 0, 1).to_ipv6_mapped().octets();
        let gid = |index, kind| Gid { index, bytes: ipv4, kind };
        let mut port = PortInfo {
            number: 1,
            is_up: true,
            link: Link::Ethernet,
            mtu: None,
            max_message: 1 << 30,
            rate: 2500,
            lid: 0,
            gids: vec![gid(0, GidKind::InfiniBand), gid(1, GidKind::RoceV2)],
        };
        let config = VerbsConfig::default();
        let text = line(&port, &config);
        assert_eq!(text, "port 1: up, Ethernet, 2.5 Gb/s, MTU unknown, GID 1: ::ffff:10.7.0.1 (RoCE v2)");
        let other = line(&port, &config.clone().gid_index(Some(7)));
        assert!(other.ends_with("no usable GID"), "{other}");
        (port.is_up, port.rate) = (false, 0);
        let text = line(&port, &config);
        assert!(text.starts_with("port 1: down, Ethernet, unknown rate"), "{text}");
    }
}
