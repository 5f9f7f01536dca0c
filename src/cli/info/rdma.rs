// SPDX-License-Identifier: MIT OR Apache-2.0
//! The section of `gin info` on RDMA devices.

use super::Failure;
#[cfg(any(feature = "cuda", test))]
use gin_net::NetError;
use gin_net::verbs::{DeviceInfo, GidKind, PortInfo, Ports, VerbsConfig, probe};
#[cfg(any(feature = "cuda", test))]
use gin_net::verbs::{GpuMemory, Way};
use std::io::Write;

/// Prints the devices and ports that libibverbs lists, and the ports that each GPU would use. If it finds none, prints
/// the reason.
pub(super) fn print(out: &mut impl Write) -> Result<(), Failure> {
    writeln!(out, "\nRDMA (network `verbs` of the proxy)")?;
    let config = match VerbsConfig::from_env() {
        Ok(config) => config,
        // `gin info` shows the error of an invalid variable; a run fails with it.
        Err(error) => return Ok(writeln!(out, "  {error}")?),
    };
    match probe(&config.library) {
        Ok(found) => {
            writeln!(out, "  libibverbs: {}", config.library)?;
            for info in found {
                match info {
                    Ok(info) => print_device(out, &info, &config)?,
                    Err(error) => writeln!(out, "  {error}")?,
                }
            }
        }
        Err(error) => return Ok(writeln!(out, "  {error}")?),
    }
    match Ports::open(&config) {
        Ok(ports) => {
            writeln!(out, "  virtual GPU: rank 0 uses {}", ports.choose(None, 0))?;
            print_gpus(out, &ports)
        }
        Err(error) => Ok(writeln!(out, "  none can be used: {error}")?),
    }
}

fn print_device(out: &mut impl Write, info: &DeviceInfo, config: &VerbsConfig) -> Result<(), Failure> {
    let place = match &info.place {
        Some(place) => {
            let node = place.numa_node.map_or("unknown".to_owned(), |node| node.to_string());
            format!("PCI {}, NUMA node {node}", place.address())
        }
        None => "not on the PCI bus".to_owned(),
    };
    let atomics = if info.has_atomics { "atomics" } else { "no atomics" };
    writeln!(out, "  {}: {place}, {atomics}", info.name)?;
    for port in &info.ports {
        writeln!(out, "    {}", port_line(port, config))?;
    }
    Ok(())
}

fn port_line(port: &PortInfo, config: &VerbsConfig) -> String {
    let state = if port.is_up { "up" } else { "down" };
    let mtu = port.mtu.map_or("unknown".to_owned(), |mtu| mtu.bytes().to_string());
    let rate = match port.rate {
        0 => "unknown rate".to_owned(),
        rate => format!("{} Gb/s", rate as f64 / 1000.0),
    };
    let address = match port.address(config) {
        Some(gid) => {
            let kind = match gid.kind {
                GidKind::RoceV2 => " (RoCE v2)",
                GidKind::InfiniBand | GidKind::Unknown => "",
            };
            format!("GID {}: {gid}{kind}", gid.index)
        }
        None => "no usable GID".to_owned(),
    };
    format!("port {}: {state}, {}, {rate}, MTU {mtu}, {address}", port.number, port.link)
}

/// Prints for each GPU the ports that it would use, and the path from each port to its memory.
#[cfg(feature = "cuda")]
fn print_gpus(out: &mut impl Write, ports: &Ports) -> Result<(), Failure> {
    use gin_gpu::cuda::{CudaDevice, gpus};
    use gin_gpu::{Device, GpuError, Memory, MemoryKind};
    use std::sync::Arc;
    // Without a GPU this prints no line; the section on devices says why there is none.
    for gpu in gpus().into_iter().flatten() {
        let chosen = ports.choose(Some(&gpu.pci_address), gpu.ordinal as u32);
        writeln!(out, "  GPU {}: rank {} uses {chosen}", gpu.ordinal, gpu.ordinal)?;
        let memory = CudaDevice::new(gpu.ordinal, &[]).and_then(|device| -> Result<Arc<Memory>, GpuError> {
            let device: Arc<dyn Device> = device;
            Memory::new(&device, MemoryKind::Device, 1 << 21)
        });
        for port in &chosen.ports {
            let way = match &memory {
                Ok(memory) => way(port.config.gpu_memory, port.reach(&memory.whole())),
                Err(error) => format!("unknown: {error}"),
            };
            writeln!(out, "    its memory, for {}: {way}", port.name())?;
        }
    }
    Ok(())
}

/// Describes the path from a port to a GPU's memory, by the configured choice and the result of the probe.
#[cfg(any(feature = "cuda", test))]
fn way(chosen: GpuMemory, found: Result<(Way, bool), NetError>) -> String {
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

/// Prints nothing: this build supports no GPUs.
#[cfg(not(feature = "cuda"))]
fn print_gpus(_out: &mut impl Write, _ports: &Ports) -> Result<(), Failure> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_net::verbs::Gid;
    use gin_nic::hca::Link;

    #[test]
    fn the_way_to_memory_of_a_gpu_is_shown_with_its_reason() {
        let refused = || Err(NetError::Local { what: "registering memory", reason: "no".to_owned() });
        assert_eq!(way(GpuMemory::Automatic, Ok((Way::DmaBuf, false))), "as a DMA-BUF file; the proxy raises signals");
        let text = way(GpuMemory::Automatic, refused());
        assert_eq!(text, "through pinned host memory, because registering memory failed: no; the proxy raises signals");
        assert_eq!(way(GpuMemory::Nic, refused()), "registering memory failed: no", "no other path was allowed");
        assert!(way(GpuMemory::Host, Ok((Way::DmaBuf, true))).starts_with("through pinned host memory, as configured"));
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
        let text = port_line(&port, &config);
        assert_eq!(text, "port 1: up, Ethernet, 2.5 Gb/s, MTU unknown, GID 1: ::ffff:10.7.0.1 (RoCE v2)");
        let other = port_line(&port, &config.clone().gid_index(Some(7)));
        assert!(other.ends_with("no usable GID"), "{other}");
        (port.is_up, port.rate) = (false, 0);
        let text = port_line(&port, &config);
        assert!(text.starts_with("port 1: down, Ethernet, unknown rate"), "{text}");
    }
}
