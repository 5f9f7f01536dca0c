// SPDX-License-Identifier: MIT OR Apache-2.0
//! The back end of libibverbs and libmlx5: brings up and releases a stand-in for the libraries, which is compiled
//! against rdma-core's headers, and checks that errors name what is missing.
//!
//! Tests that need the headers or a C compiler are ignored without them; `scripts/setup.sh` installs them.

#[path = "../../../verbs/tests/common/c.rs"]
mod c;

use c::compile;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_nic::hca::{Access, DmaBuf, Extent, Hca, HcaError};
use gin_nic::mlx5::{Libraries, devices};
use gin_nic::{Absent, DeviceQueues, Mlx5, Nic, NicConfig, NicError, NicPeer, QueueSpec, RegisteredSlice, Role, probe};
use libloading::Library;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

fn main() {
    let missing = missing();
    let trial = |name: &str, run: fn() -> Result<(), Failed>| {
        let missing = missing.clone();
        Trial::ignorable_test(name, move || match missing {
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => run().map(|()| Completion::Completed),
        })
    };
    let trials = vec![
        Trial::test("a_missing_library_is_named", no_library),
        Trial::test("asking_for_devices_here_has_an_answer", here),
        trial("a_library_without_the_functions_is_named", no_function),
        trial("each_reason_for_no_device_has_its_error", no_device),
        trial("queue_pairs_are_created_and_destroyed_through_the_libraries", comes_up),
        trial("device_memory_is_registered_as_a_file", dma_buf),
        trial("a_refusal_of_the_firmware_is_reported_with_its_status", refusal),
        trial("older_kernels_have_other_doorbell_pages", doorbell_pages),
        trial("an_unreachable_peer_is_named", unreachable),
        trial("the_probe_describes_each_nic_or_says_why_it_cannot_be_used", probed),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Returns why the stand-in cannot be compiled here, if so.
fn missing() -> Option<String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Some("compiled on x86-64 Linux only".to_owned());
    }
    let probe = || -> Result<(), String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let source = folder.path().join("probe.c");
        fs::write(&source, "#include <infiniband/mlx5dv.h>\n").map_err(|error| error.to_string())?;
        compile(&source, &folder.path().join("probe.o"), &["-c"])
            .map_err(|_| "no infiniband/mlx5dv.h, or no C compiler: run scripts/setup.sh".to_owned())
    };
    probe().err()
}

/// The stand-in, with its own state.
struct Stub {
    library: Library,
    path: PathBuf,
    _folder: TempDir,
}

impl Stub {
    fn new(mode: i32) -> Result<Self, Failed> {
        let folder = tempfile::tempdir()?;
        // In its own folder it is another library for the loader.
        let path = folder.path().join("stub.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mlx5/stub.c");
        compile(&source, &path, &["-shared", "-fPIC", "-Wno-unused"])?;
        // Safety: the library was just compiled and has no initialisers.
        let library = unsafe { Library::new(&path) }?;
        // Safety: the type is that of the function in `stub.c`.
        unsafe { library.get::<unsafe extern "C" fn(i32)>(b"stub_mode")?(mode) };
        Ok(Self { library, path, _folder: folder })
    }

    fn libraries(&self) -> Libraries {
        let path = self.path.to_string_lossy().into_owned();
        Libraries { verbs: path.clone(), mlx5: path }
    }

    fn open(&self) -> Result<Arc<Mlx5>, Absent> {
        Mlx5::open(&self.libraries(), "mlx5_0")
    }

    /// Calls a function of the stand-in.
    fn ask(&self, function: &str) -> u32 {
        // Safety: the type is that of the function in `stub.c`.
        unsafe { self.library.get::<unsafe extern "C" fn() -> u32>(function).expect("a function")() }
    }
}

// As in `stub.c`.
const WORKS: i32 = 0;
const PORT_DOWN: i32 = 6;
const REFUSES: i32 = 7;
const NO_DMA_BUF: i32 = 8;
const NO_DEDICATED: i32 = 9;

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(why().into()) }
}

fn equal<T: PartialEq + std::fmt::Debug>(found: T, expected: T) -> Result<(), Failed> {
    ensure(found == expected, || format!("{found:?} is not {expected:?}"))
}

fn no_library() -> Result<(), Failed> {
    let libraries = Libraries { verbs: "libnowhere.so.1".to_owned(), ..Libraries::default() };
    let Err(absent) = devices(&libraries) else { return Err("there is one".into()) };
    let text = absent.to_string();
    ensure(text.starts_with("no mlx5 device: libnowhere.so.1 cannot be opened ("), || text.clone())?;
    ensure(text.ends_with("it is part of rdma-core"), || text.clone())
}

fn here() -> Result<(), Failed> {
    // The host may have a library and devices, or not.
    match devices(&Libraries::default()) {
        Ok(names) => ensure(!names.is_empty(), || "an empty list".to_owned()),
        Err(absent) => ensure(absent.to_string().starts_with("no mlx5 device: "), || absent.to_string()),
    }
}

fn no_function() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let (source, path) = (folder.path().join("empty.c"), folder.path().join("empty.so"));
    fs::write(&source, "int nothing;\n")?;
    compile(&source, &path, &["-shared", "-fPIC"])?;
    let path = path.to_string_lossy().into_owned();
    let Err(absent) = devices(&Libraries { verbs: path.clone(), mlx5: path }) else { return Err("a device".into()) };
    let text = "has no function ibv_get_device_list; it is too old";
    ensure(matches!(absent, Absent::Library(_)) && absent.to_string().ends_with(text), || absent.to_string())
}

fn no_device() -> Result<(), Failed> {
    let open = |mode: i32| -> Result<String, Failed> {
        let stub = Stub::new(mode)?;
        let outcome = stub.open();
        equal(stub.ask("stub_objects"), 0)?;
        outcome.map_or_else(|absent| Ok(absent.to_string()), |_| Err("a device".into()))
    };
    let system = |errno| std::io::Error::from_raw_os_error(errno);
    equal(open(1)?, format!("no mlx5 device: asking the kernel for RDMA devices failed: {}", system(38)))?;
    equal(open(2)?, "no mlx5 device: the kernel has no RDMA devices".to_owned())?;
    equal(open(3)?, "no mlx5 device: libmlx5 does not support the RDMA devices rxe0".to_owned())?;
    equal(open(4)?, format!("mlx5 device mlx5_0 cannot be opened with devx: {}", gin_verbs::explain(13)))?;
    equal(open(5)?, format!("mlx5 device mlx5_0 cannot be opened with devx: {}", gin_verbs::explain(95)))?;
    let stub = Stub::new(WORKS)?;
    equal(devices(&stub.libraries()), Ok(vec!["mlx5_0".to_owned()]))?;
    let unknown = Mlx5::open(&stub.libraries(), "mlx5_7").map(|_| ()).map_err(|absent| absent.to_string());
    equal(unknown, Err("no mlx5 device mlx5_7; there are: mlx5_0".to_owned()))?;
    let down = Stub::new(PORT_DOWN)?;
    let refused = Nic::open(down.open()?, NicConfig::default()).map(|_| ()).map_err(|error| error.to_string());
    equal(refused, Err("mlx5_0: port 1 is down".to_owned()))?;
    equal(down.ask("stub_objects"), 0)
}

const SPECS: [QueueSpec; 3] = [
    QueueSpec { role: Role::Sender, depth: 64, completions: 64, collapsed: false },
    QueueSpec { role: Role::Master, depth: 64, completions: 64, collapsed: true },
    QueueSpec { role: Role::Responder, depth: 0, completions: 0, collapsed: false },
];

fn peer() -> NicPeer {
    NicPeer { rank: 4, host: "elsewhere".to_owned(), port: 1 }
}

fn device() -> Arc<dyn Device> {
    VirtualDevice::memory_only(0)
}

fn comes_up() -> Result<(), Failed> {
    let stub = Stub::new(WORKS)?;
    let nic = Nic::open(stub.open()?, NicConfig::default())?;
    equal((nic.name.as_str(), nic.gid.index, nic.mtu().bytes()), ("mlx5_0", 1, 2048))?;
    equal(nic.capabilities.udp_ports.clone(), 0xc000..=0xffff)?;
    let memory = Memory::new(&device(), MemoryKind::Pinned, 16)?.slice(7..16)?;
    let start = memory.address() as u32 % 4096;
    let region = RegisteredSlice::new(&nic, memory, Access::PAYLOAD)?;
    equal((region.local_key, region.remote_key), (0x1100 + start, 0x2209))?;
    equal(stub.ask("stub_access"), 1 | 2 | 4 | 8 | 1 << 20)?;
    let set = DeviceQueues::new(&nic, &device(), &SPECS, &|| false)?;
    equal(stub.ask("stub_access"), 1)?;
    let infos: Vec<_> = set.infos().copied().collect();
    ensure(infos.windows(2).all(|pair| pair[0].queue < pair[1].queue), || format!("{infos:?}"))?;
    // One page serves all queue pairs.
    ensure(infos[0].doorbell == infos[1].doorbell && infos[0].doorbell != 0, || format!("{infos:?}"))?;
    let address = set.address(0).ok_or("an address")?;
    for index in 0..SPECS.len() {
        set.connect(index, &peer(), &address, &|| false)?;
    }
    // Context, domain, region, umem, page, three completion queues and three queue pairs.
    equal(stub.ask("stub_objects"), 11)?;
    drop((set, region));
    equal(stub.ask("stub_objects"), 2)?;
    equal(nic.take_failures(), Vec::new())?;
    drop(nic);
    equal(stub.ask("stub_objects"), 0)
}

fn dma_buf() -> Result<(), Failed> {
    let file = Extent { address: 0x7000_0000_0000, bytes: 1 << 20, dma_buf: Some(DmaBuf { file: 99, offset: 8192 }) };
    let stub = Stub::new(WORKS)?;
    let nic = stub.open()?;
    let domain = nic.allocate_domain()?;
    // Safety: the stand-in accesses no memory.
    let (region, umem) =
        unsafe { (nic.register_region(&domain, &file, 0, Access::PAYLOAD)?, nic.register_umem(&file, Access::RINGS)?) };
    equal((region.local_key, region.remote_key), (8192, 99))?;
    nic.deregister_region(region.handle)?;
    nic.deregister_umem(umem.handle)?;

    let stub = Stub::new(NO_DMA_BUF)?;
    let nic = stub.open()?;
    let domain = nic.allocate_domain()?;
    // Safety: the stand-in accesses no memory.
    let refused = unsafe { nic.register_region(&domain, &file, 0, Access::PAYLOAD) };
    let Err(error) = refused else { return Err("it was registered".into()) };
    let system = std::io::Error::from_raw_os_error(95);
    equal(error.to_string(), format!("ibv_reg_dmabuf_mr failed: {system}"))?;
    // Safety: the stand-in accesses no memory.
    let refused = unsafe { nic.register_umem(&file, Access::RINGS) };
    ensure(refused.is_err() && stub.ask("stub_objects") == 2, || format!("{refused:?}"))
}

fn refusal() -> Result<(), Failed> {
    let stub = Stub::new(REFUSES)?;
    let nic = Nic::open(stub.open()?, NicConfig::default())?;
    let refused = DeviceQueues::new(&nic, &device(), &SPECS, &|| false);
    let Err(error) = refused else { return Err("it was made".into()) };
    let text = "mlx5_0: making a completion queue: the NIC answered: bad parameter (status 0x3, syndrome 0xabcdef)";
    equal(error.to_string(), text.to_owned())?;
    equal(stub.ask("stub_objects"), 2)
}

fn doorbell_pages() -> Result<(), Failed> {
    for (mode, kind) in [(WORKS, 1 << 31), (NO_DEDICATED, 1)] {
        let stub = Stub::new(mode)?;
        let nic = stub.open()?;
        let page = nic.allocate_uar()?;
        equal((stub.ask("stub_uar"), page.number), (kind, 0x33))?;
        nic.free_uar(page.handle)?;
    }
    Ok(())
}

fn unreachable() -> Result<(), Failed> {
    let stub = Stub::new(WORKS)?;
    let nic = Nic::open(stub.open()?, NicConfig::default())?;
    let set = DeviceQueues::new(&nic, &device(), &SPECS, &|| false)?;
    let mut address = set.address(0).ok_or("an address")?;
    address.gid = [0xee; 16];
    let Err(error) = set.connect(0, &peer(), &address, &|| false) else { return Err("connected".into()) };
    let NicError::Step { peer: Some(named), source: HcaError::System { call, errno }, .. } = &error else {
        return Err(error.into());
    };
    equal((named, *call, *errno), (&peer(), "ibv_create_ah", 113))
}

fn probed() -> Result<(), Failed> {
    let lines = |mode, config: NicConfig| -> Result<Vec<String>, Failed> {
        let stub = Stub::new(mode)?;
        let found = probe(&stub.libraries(), &config)?;
        let lines = found.iter().map(ToString::to_string).collect();
        drop(found);
        equal(stub.ask("stub_objects"), 0)?;
        Ok(lines)
    };
    let good = lines(WORKS, NicConfig::default())?;
    equal(good, vec!["mlx5_0: Ethernet, MTU 2048, queues of up to 32768 entries".to_owned()])?;
    let down = lines(PORT_DOWN, NicConfig::default())?;
    equal(down, vec!["mlx5_0: cannot serve GPUs: mlx5_0: port 1 is down".to_owned()])?;
    let system = gin_verbs::explain(13);
    let shut = lines(4, NicConfig::default())?;
    let text = format!("mlx5_0: cannot serve GPUs: mlx5 device mlx5_0 cannot be opened with devx: {system}");
    equal(shut, vec![text])?;
    let other = lines(WORKS, NicConfig::default().port(3))?;
    let text = "mlx5_0: cannot serve GPUs: mlx5_0: asking for the port: there is no port 3; there are 1 to 1";
    equal(other, vec![text.to_owned()])
}
