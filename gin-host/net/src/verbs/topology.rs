// SPDX-License-Identifier: MIT OR Apache-2.0
//! Distance of RDMA devices to a GPU, as Linux reports it in `/sys`.
//!
//! The path of a device's folder there names all bridges above it. So the common beginning of two paths is the part of
//! the way that both devices share. A software device has no such folder; its location is that of its network
//! interface.

use std::cmp::Reverse;
use std::fs;
use std::path::Path;

/// Distance between two PCI devices, the nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, derive_more::Display)]
pub enum Distance {
    /// Both are below a shared bridge, so data need not pass the CPU.
    #[display("below a shared PCI bridge, {links} links away")]
    Bridge {
        /// Number of links up to that bridge and down again.
        links: u32,
    },
    /// Both are at the same host bridge of a CPU.
    #[display("at the same host bridge")]
    HostBridge,
    /// Both are at the same NUMA node.
    #[display("at the same NUMA node")]
    Node,
    /// They are at different NUMA nodes.
    #[display("at another NUMA node")]
    Far,
    /// The system does not report it, or one of them is a software device.
    #[display("at an unknown distance")]
    Unknown,
}

/// Location of a PCI device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PciPlace {
    /// The host bridge, the bridges below it, and the device.
    path: Vec<String>,
    /// The device's NUMA node, if the host has several.
    pub numa_node: Option<u32>,
}

impl PciPlace {
    /// Returns the location of the PCI device of this address, such as `0000:18:00.0`. `None` if the system does not
    /// report it.
    pub fn of_pci(address: &str) -> Option<Self> {
        Self::of_pci_in(Path::new("/sys"), address)
    }

    /// Returns the location of an RDMA device. `None` if it has no hardware, or the system does not report it.
    pub fn of_rdma(name: &str) -> Option<Self> {
        Self::of_rdma_in(Path::new("/sys"), name)
    }

    /// Works like [`of_pci`](Self::of_pci), with another folder in place of `/sys`.
    pub(super) fn of_pci_in(sys: &Path, address: &str) -> Option<Self> {
        // The GPU driver writes addresses in capitals, and some with a domain of eight digits.
        let address = address.trim().to_ascii_lowercase();
        let address = match address.split_once(':') {
            Some((domain, rest)) => format!("{:0>4}:{rest}", domain.trim_start_matches('0')),
            None => address,
        };
        is_address(&address).then(|| Self::of_folder(&sys.join("bus/pci/devices").join(&address))).flatten()
    }

    /// Works like [`of_rdma`](Self::of_rdma), with another folder in place of `/sys`.
    pub(super) fn of_rdma_in(sys: &Path, name: &str) -> Option<Self> {
        if !is_name(name) {
            return None;
        }
        let device = sys.join("class/infiniband").join(name);
        Self::of_folder(&device.join("device")).or_else(|| {
            // Soft-RoCE names its network interface in `parent`.
            let interface = fs::read_to_string(device.join("parent")).ok()?;
            let interface = interface.trim();
            is_name(interface).then(|| Self::of_folder(&sys.join("class/net").join(interface).join("device")))?
        })
    }

    fn of_folder(folder: &Path) -> Option<Self> {
        let folder = fs::canonicalize(folder).ok()?;
        let parts = folder.components().filter_map(|part| part.as_os_str().to_str());
        let is_root = |part: &str| part.strip_prefix("pci").is_some_and(|rest| rest.contains(':'));
        let path: Vec<String> = parts.filter(|part| is_address(part) || is_root(part)).map(str::to_owned).collect();
        path.iter().any(|part| is_address(part)).then_some(())?;
        // -1 if the host has only one node.
        let node = fs::read_to_string(folder.join("numa_node")).ok();
        let numa_node = node.and_then(|text| text.trim().parse().ok());
        Some(Self { path, numa_node })
    }

    /// Returns the device's address on the PCI bus.
    pub fn address(&self) -> &str {
        self.path.last().map_or("", String::as_str)
    }

    /// Returns the distance to another device.
    pub fn distance(&self, other: &Self) -> Distance {
        let shared = self.path.iter().zip(&other.path).take_while(|(own, other)| own == other).count();
        if self.path[..shared].iter().any(|part| is_address(part)) {
            let links = self.path.len() + other.path.len() - 2 * shared;
            return Distance::Bridge { links: links as u32 };
        }
        match (shared, self.numa_node, other.numa_node) {
            (1.., ..) => Distance::HostBridge,
            (0, Some(own), Some(other)) if own != other => Distance::Far,
            (0, Some(_), Some(_)) | (0, None, None) => Distance::Node,
            (0, ..) => Distance::Unknown,
        }
    }
}

/// Returns whether a text is a PCI address, such as `0000:18:00.0`.
fn is_address(part: &str) -> bool {
    let mut fields = part.split([':', '.']);
    let mut field = |digits: std::ops::RangeInclusive<usize>| {
        fields.next().is_some_and(|field| digits.contains(&field.len()) && field.bytes().all(|d| d.is_ascii_hexdigit()))
    };
    let right = field(4..=8) && field(2..=2) && field(2..=2) && field(1..=1);
    right && fields.next().is_none() && part.rfind(':') < part.find('.')
}

/// Returns whether a text is a name in a folder, and does not lead elsewhere.
fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains('/')
}

/// A port to choose from.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) place: Option<PciPlace>,
    /// Rate in bits per microsecond.
    pub(super) rate: u64,
}

/// Chooses the ports of a rank, in the order of its contexts: those nearest to its GPU, of these the fastest, at most
/// `max`. Returns their indices and their distance, if known. If the GPU's location is unknown, all ports are equally
/// near. Among equally good ports, ranks start with different ones, so that ranks with one context do not all use the
/// first.
pub(super) fn choose(
    gpu: Option<&PciPlace>,
    ports: &[Candidate],
    rank: u32,
    max: usize,
) -> (Vec<usize>, Option<Distance>) {
    let distance = |port: &Candidate| match (gpu, &port.place) {
        (Some(gpu), Some(place)) => gpu.distance(place),
        _ => Distance::Unknown,
    };
    let merits: Vec<_> = ports.iter().map(|port| (distance(port), Reverse(port.rate))).collect();
    let best = merits.iter().min();
    let mut chosen: Vec<usize> = (0..ports.len()).filter(|&port| Some(&merits[port]) == best).collect();
    if !chosen.is_empty() {
        let first = rank as usize % chosen.len();
        chosen.rotate_left(first);
    }
    chosen.truncate(max.max(1));
    (chosen, best.map(|(distance, _)| *distance).filter(|nearest| *nearest != Distance::Unknown))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A folder that imitates `/sys`.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        /// Adds a PCI device below these bridges.
        fn pci(&self, path: &str, node: i32) -> &Self {
            let folder = self.0.path().join("devices").join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("numa_node"), format!("{node}\n")).unwrap();
            let links = self.0.path().join("bus/pci/devices");
            fs::create_dir_all(&links).unwrap();
            symlink(&folder, links.join(path.rsplit('/').next().unwrap())).unwrap();
            self
        }

        /// Adds an RDMA device of that PCI device.
        fn rdma(&self, name: &str, path: &str) -> &Self {
            let folder = self.0.path().join("class/infiniband").join(name);
            fs::create_dir_all(&folder).unwrap();
            symlink(self.0.path().join("devices").join(path), folder.join("device")).unwrap();
            self
        }

        /// Adds a software device with this network interface, which belongs to a PCI device or to none.
        fn soft(&self, name: &str, interface: &str, path: Option<&str>) -> &Self {
            let folder = self.0.path().join("class/infiniband").join(name);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("parent"), format!("{interface}\n")).unwrap();
            let interface = self.0.path().join("class/net").join(interface);
            fs::create_dir_all(&interface).unwrap();
            if let Some(path) = path {
                symlink(self.0.path().join("devices").join(path), interface.join("device")).unwrap();
            }
            self
        }

        fn gpu(&self, address: &str) -> Option<PciPlace> {
            PciPlace::of_pci_in(self.0.path(), address)
        }

        fn port(&self, name: &str) -> Option<PciPlace> {
            PciPlace::of_rdma_in(self.0.path(), name)
        }

        /// Returns the names of the ports that a rank with this GPU uses.
        fn chosen<'a>(&self, gpu: &str, ports: &[&'a str], rank: u32, max: usize) -> Vec<&'a str> {
            let rate = |port: &str| if port.ends_with("slow") { 25_000 } else { 400_000 };
            let ports_there: Vec<Candidate> =
                ports.iter().map(|port| Candidate { place: self.port(port), rate: rate(port) }).collect();
            let (chosen, _) = choose(self.gpu(gpu).as_ref(), &ports_there, rank, max);
            chosen.into_iter().map(|port| ports[port]).collect()
        }
    }

    /// Imitates a server for 8 GPUs: two sockets with two switches each; each switch has a NIC and two GPUs.
    fn server() -> Sys {
        let sys = Sys::new();
        for (switch, node) in [(0x10, 0), (0x40, 0), (0x80, 1), (0xc0, 1)] {
            let up = format!("pci0000:{switch:02x}/0000:{switch:02x}:01.0/0000:{:02x}:00.0", switch + 1);
            let below =
                |port: u32| format!("{up}/0000:{:02x}:{port:02x}.0/0000:{:02x}:00.0", switch + 2, switch + 3 + port);
            sys.pci(&below(0), node).pci(&below(1), node).pci(&below(2), node);
            sys.rdma(&format!("mlx5_{switch:02x}"), &below(2));
        }
        // One more for storage, at the first socket's own bridge.
        sys.pci("pci0000:00/0000:00:02.0/0000:01:00.0", 0);
        sys.rdma("mlx5_00", "pci0000:00/0000:00:02.0/0000:01:00.0");
        sys
    }

    const PORTS: [&str; 5] = ["mlx5_00", "mlx5_10", "mlx5_40", "mlx5_80", "mlx5_c0"];

    #[test]
    fn distances_follow_bridges_and_nodes() {
        let sys = server();
        let distance = |gpu: &str, port: &str| sys.gpu(gpu).unwrap().distance(&sys.port(port).unwrap());
        assert_eq!(distance("0000:13:00.0", "mlx5_10"), Distance::Bridge { links: 4 });
        assert_eq!(distance("0000:13:00.0", "mlx5_40"), Distance::Node);
        assert_eq!(distance("0000:13:00.0", "mlx5_80"), Distance::Far);
        let sys = Sys::new();
        sys.pci("pci0000:00/0000:00:03.0", -1).pci("pci0000:00/0000:00:04.0", -1).pci("pci0000:80/0000:80:04.0", -1);
        sys.rdma("a", "pci0000:00/0000:00:04.0").rdma("b", "pci0000:80/0000:80:04.0");
        let gpu = sys.gpu("0000:00:03.0").unwrap();
        assert_eq!(gpu.distance(&sys.port("a").unwrap()), Distance::HostBridge);
        assert_eq!(gpu.distance(&sys.port("b").unwrap()), Distance::Node, "the host has only one node");
        let unlike = PciPlace { numa_node: Some(0), ..sys.port("b").unwrap() };
        assert_eq!(gpu.distance(&unlike), Distance::Unknown);
        let order = [
            Distance::Bridge { links: 2 },
            Distance::Bridge { links: 4 },
            Distance::HostBridge,
            Distance::Node,
            Distance::Far,
            Distance::Unknown,
        ];
        assert!(order.is_sorted_by(|nearer, farther| nearer < farther));
    }

    #[test]
    fn a_gpu_uses_the_port_at_its_own_switch() {
        let sys = server();
        for (gpu, port) in [("0000:13:00.0", 1), ("0000:14:00.0", 1), ("0000:43:00.0", 2), ("0000:C4:00.0", 4)] {
            for rank in 0..4 {
                assert_eq!(sys.chosen(gpu, &PORTS, rank, 4), [PORTS[port]], "{gpu} of rank {rank}");
            }
        }
        // The GPU driver writes some domains with eight digits.
        assert_eq!(sys.chosen("00000000:84:00.0", &PORTS, 0, 4), ["mlx5_80"]);
    }

    #[test]
    fn equally_near_ports_are_all_used_and_ranks_start_with_different_ones() {
        let sys = server();
        // The nearest of the ports that may be used.
        let ports = ["mlx5_00", "mlx5_40", "mlx5_80"];
        assert_eq!(sys.chosen("0000:13:00.0", &ports, 0, 4), ["mlx5_00", "mlx5_40"]);
        assert_eq!(sys.chosen("0000:14:00.0", &ports, 1, 4), ["mlx5_40", "mlx5_00"]);
        assert_eq!(sys.chosen("0000:14:00.0", &ports, 1, 1), ["mlx5_40"]);
        assert_eq!(sys.chosen("0000:83:00.0", &["mlx5_40", "mlx5_00"], 2, 4), ["mlx5_40", "mlx5_00"], "both are far");
    }

    #[test]
    fn of_equally_near_ports_the_fastest_are_used() {
        let sys = server();
        let beside = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:03.0/0000:16:00.0";
        sys.pci(beside, 0).rdma("mlx5_slow", beside);
        assert_eq!(sys.chosen("0000:13:00.0", &["mlx5_slow", "mlx5_10"], 0, 4), ["mlx5_10"]);
        assert_eq!(
            sys.chosen("0000:13:00.0", &["mlx5_slow", "mlx5_40"], 0, 4),
            ["mlx5_slow"],
            "distance decides before rate"
        );
        assert_eq!(sys.chosen("", &["mlx5_slow", "mlx5_40"], 0, 4), ["mlx5_40"]);
    }

    #[test]
    fn without_a_gpu_on_the_bus_all_ports_are_used_in_turn() {
        let sys = server();
        assert_eq!(sys.chosen("", &PORTS, 0, 5), PORTS);
        assert_eq!(sys.chosen("", &PORTS, 6, 2), ["mlx5_10", "mlx5_40"]);
        let (chosen, nearest) = choose(None, &[Candidate { place: sys.port("mlx5_00"), rate: 1 }], 3, 4);
        assert_eq!((chosen, nearest), (vec![0], None));
        assert_eq!(choose(None, &[], 3, 4), (vec![], None));
    }

    #[test]
    fn a_software_port_has_the_location_of_its_interface() {
        let sys = server();
        let path = "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:02.0/0000:85:00.0";
        sys.soft("rxe0", "eth0", Some(path)).soft("rxe1", "dummy0", None);
        assert_eq!(sys.port("rxe0").unwrap().address(), "0000:85:00.0");
        assert_eq!(sys.port("rxe1"), None);
        assert_eq!(sys.chosen("0000:13:00.0", &["rxe1", "rxe0", "mlx5_40"], 0, 4), ["mlx5_40"]);
        assert_eq!(
            sys.chosen("0000:13:00.0", &["rxe1", "rxe0"], 0, 4),
            ["rxe0"],
            "a port without a location comes last"
        );
    }

    #[test]
    fn invalid_addresses_and_names_lead_to_no_file() {
        let sys = server();
        for address in ["", "..", "0000:13:00.0/..", "0000:13:00", "0000:13:00.0.0", "0000.13:00:0", "gpu"] {
            assert_eq!(sys.gpu(address), None, "{address}");
        }
        for name in ["", "..", "mlx5_00/../mlx5_10", "nothing"] {
            assert_eq!(sys.port(name), None, "{name}");
        }
    }
}
