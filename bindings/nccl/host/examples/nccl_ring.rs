// SPDX-License-Identifier: MIT OR Apache-2.0

//! Runs the kernels of gin-nccl-kernels on communicators of NCCL, and lets them exchange with the same kernels in CUDA
//! C++: `nccl_ring RUST.cubin [CPP.cubin [RANKS]]`.
//!
//! Without a number there is one rank for each GPU, or two that share the only GPU. Ranks are threads. Each case has
//! new communicators and windows, whose signals begin at 0. The kernels compare every word that arrives. The last line
//! is `PASSED`, or the exit status is 1.

use cudarc::driver::sys;
use gin_device::{Deadline, FaultKind};
use gin_gpu::cuda::{CudaDevice, CudaStream, device_count};
use gin_gpu::{Device, KernelArg, LaunchConfig, Memory, MemoryKind, ModuleSource, Stream};
use gin_nccl_host::{DeviceComm, Kernel, Library, NcclError, RawComm, Requirements, UniqueId, Window};
use std::ffi::{CString, c_void};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Words of a block of the ring: 1 MiB, and an odd rest.
const WORDS: usize = (1 << 17) + 3;
const ROUNDS: u64 = 50;
/// A case takes milliseconds.
const DEADLINE: Deadline = Deadline::after_ms(20_000);
const LIMIT: Duration = Duration::from_secs(60);
const THREADS: u32 = 256;

/// Variables for ranks that share a GPU: NCCL refuses them without the first. By the second each stream has a queue, so
/// that no kernel is in a queue behind one that waits for it.
const SHARED: [(&str, &str); 2] = [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// The kernels of a rank in a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Language {
    Rust,
    Cpp,
}

/// Returns the language of a rank.
type Languages = fn(u32) -> Language;

#[derive(Clone, Copy, Debug)]
enum Case {
    Ring,
    Fetch,
    AllToAll,
    /// Rank 0 alone launches, and its wait ends by the deadline.
    Alone,
    /// Rank 0 alone launches without a deadline, and the host aborts.
    Abort,
}

/// The modules, as files.
struct Modules {
    rust: Vec<u8>,
    cpp: Option<Vec<u8>>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => {
            println!("PASSED");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Fallible<()> {
    for (name, value) in SHARED {
        // Safety: this process has no other thread yet.
        unsafe { std::env::set_var(name, value) };
    }
    let mut args = std::env::args().skip(1);
    let rust = args.next().ok_or("usage: nccl_ring RUST.cubin [CPP.cubin [RANKS]]")?;
    let cpp = args.next();
    let gpus = device_count()? as u32;
    let ranks = args.next().map_or(Ok(gpus.max(2)), |ranks| ranks.parse())?;
    if ranks < 2 || gpus == 0 {
        return Err(format!("{ranks} ranks on {gpus} GPUs; at least 2 ranks and a GPU are needed").into());
    }
    let modules = Modules { rust: std::fs::read(&rust)?, cpp: cpp.map(std::fs::read).transpose()? };
    let library = Library::open()?;
    println!("NCCL {}, {ranks} ranks, GPUs: {}", library.version(), ranks.min(gpus));

    let (all_rust, all_cpp): (Languages, Languages) = (|_| Language::Rust, |_| Language::Cpp);
    let (even_rust, odd_rust): (Languages, Languages) = (
        |rank| if rank % 2 == 0 { Language::Rust } else { Language::Cpp },
        |rank| if rank % 2 == 0 { Language::Cpp } else { Language::Rust },
    );
    let mut cases = vec![("Rust", all_rust)];
    if modules.cpp.is_some() {
        cases.extend([
            ("C++", all_cpp),
            ("even ranks Rust, odd ranks C++", even_rust),
            ("even ranks C++, odd ranks Rust", odd_rust),
        ]);
    }
    for case in [Case::Ring, Case::Fetch, Case::AllToAll] {
        for (name, languages) in &cases {
            let time = job(&library, &modules, (ranks, gpus), case, *languages)?;
            println!("{case:?}, {name}: {ROUNDS} rounds in {time:.1?}");
        }
    }
    for case in [Case::Alone, Case::Abort] {
        let time = job(&library, &modules, (ranks, gpus), case, all_rust)?;
        println!("{case:?}: the wait ended after {time:.1?}");
    }
    Ok(())
}

/// Runs a case, a rank in each thread. Returns the longest time of a kernel.
fn job(
    library: &Arc<Library>,
    modules: &Modules,
    (ranks, gpus): (u32, u32),
    case: Case,
    languages: Languages,
) -> Fallible<Duration> {
    let (id, ready, ended) = (library.unique_id()?, AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        let (ready, ended) = (&ready, &ended);
        let start = |rank| {
            let place = Place { library, modules, gpu: rank % gpus, rank, ranks, ready, ended };
            scope.spawn(move || place.run(id, case, languages(rank)))
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        let mut longest = Duration::ZERO;
        for (rank, thread) in threads.into_iter().enumerate() {
            let time = thread.join().map_err(|_| format!("{case:?}: the thread of rank {rank} panicked"))?;
            longest = longest.max(time.map_err(|error| format!("{case:?}, rank {rank}: {error}"))?);
        }
        Ok(longest)
    })
}

/// The place of a rank in a case.
struct Place<'a> {
    library: &'a Arc<Library>,
    modules: &'a Modules,
    gpu: u32,
    rank: u32,
    ranks: u32,
    /// The number of ranks that may launch.
    ready: &'a AtomicU32,
    /// The number of ranks whose kernels have ended.
    ended: &'a AtomicU32,
}

impl Place<'_> {
    fn run(&self, id: UniqueId, case: Case, language: Language) -> Fallible<Duration> {
        let device = CudaDevice::with_limit(self.gpu as usize, &[], Some(LIMIT))?;
        let stream = device.stream()?;
        let comm = self.library.init_rank(&device, id, self.rank, self.ranks)?;
        let time = on_comm(self, &device, &stream, comm, case, language);
        // Safety: all that was made of it is gone.
        unsafe { self.library.destroy(comm)? };
        time
    }

    /// Counts this rank and waits for the others: before the first launch, and after the last kernel. A call of NCCL in
    /// between could wait for a kernel, which waits for the rank that calls.
    fn wait_for_all(&self, count: &AtomicU32) -> Fallible<()> {
        count.fetch_add(1, Ordering::AcqRel);
        let start = Instant::now();
        while count.load(Ordering::Acquire) < self.ranks {
            if start.elapsed() > LIMIT {
                return Err(format!("some ranks have not come this far after {LIMIT:?}").into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn on_comm(
    place: &Place<'_>,
    device: &Arc<CudaDevice>,
    stream: &Arc<dyn Stream>,
    comm: RawComm,
    case: Case,
    language: Language,
) -> Fallible<Duration> {
    let requirements = Requirements { signals: 2, counters: 1, barriers: 1, ..Requirements::default() };
    // Safety: the communicator is of this GPU, and lives longer.
    let comm = unsafe { DeviceComm::create(place.library, device, comm, &requirements)? };
    let (rank, ranks) = comm.rank();
    let words = if matches!(case, Case::AllToAll) { 2 * ranks as usize } else { WORDS };
    let (receive, send) = (Window::new(&comm, 8 * words as u64)?, Window::new(&comm, 8 * words as u64)?);
    receive.write(0, &vec![0u64; words])?;
    send.write(0, &vec![0u64; words])?;
    // Loads and allocations come before any kernel that waits.
    let rust = device.load(ModuleSource::Cubin(&place.modules.rust))?;
    let name = match case {
        Case::AllToAll => "all_to_all",
        Case::Fetch => "fetch",
        Case::Ring | Case::Alone | Case::Abort => "ring",
    };
    let kernel = match (language, &place.modules.cpp) {
        (Language::Rust, _) => Program::Rust(Kernel::of(device, &*rust, name)?),
        (Language::Cpp, Some(image)) => Program::Cpp(Cpp::load(image, name)?),
        (Language::Cpp, None) => return Err("there is no module in C++".into()),
    };
    let wrong = Memory::new(&(device.clone() as Arc<dyn Device>), MemoryKind::Device, 8)?;
    stream.synchronize()?;
    place.wait_for_all(place.ready)?;

    let start = Instant::now();
    let launch = Launch { stream, comm: &comm, receive: &receive, send: &send, words, wrong: wrong.address() };
    match case {
        Case::Ring | Case::Fetch | Case::AllToAll => launch.start(&kernel, case, DEADLINE)?,
        Case::Alone if rank == 0 => launch.start(&kernel, case, Deadline::after_ms(200))?,
        Case::Abort if rank == 0 => {
            launch.start(&kernel, case, Deadline::NONE)?;
            thread::sleep(Duration::from_millis(200));
            comm.abort();
        }
        _ => {}
    }
    stream.synchronize()?;
    let time = start.elapsed();
    place.wait_for_all(place.ended)?;
    // Windows live until no rank puts into them. A rank alone has put long before its wait ended.
    meet(&comm)?;

    let fault = comm.check()?;
    let expected = match case {
        Case::Alone if rank == 0 => Some(FaultKind::Timeout),
        Case::Abort if rank == 0 => Some(FaultKind::Aborted),
        _ => None,
    };
    if fault.as_ref().map(|fault| fault.kind()) != expected {
        let text = fault.map_or("no fault".to_owned(), |fault| fault.to_string());
        return Err(format!("{language:?}: expected the fault {expected:?}, found: {text}").into());
    }
    let mut first = [0u64];
    wrong.read(0, &mut first)?;
    if first[0] != 0 {
        return Err(format!("C++ found a wrong word at index {}", first[0] - 1).into());
    }
    Ok(time)
}

/// Waits until all ranks have come this far: a registration returns then.
fn meet(comm: &DeviceComm) -> Result<(), NcclError> {
    Window::new(comm, 4096).map(drop)
}

/// A kernel of a case.
enum Program {
    Rust(Kernel),
    Cpp(Cpp),
}

/// The objects of a launch.
struct Launch<'a> {
    stream: &'a Arc<dyn Stream>,
    comm: &'a DeviceComm,
    receive: &'a Window<'a>,
    send: &'a Window<'a>,
    words: usize,
    /// The word for the first wrong index that a kernel in C++ finds.
    wrong: u64,
}

impl Launch<'_> {
    fn start(&self, program: &Program, case: Case, deadline: Deadline) -> Fallible<()> {
        match program {
            Program::Rust(kernel) => self.rust(kernel, case, deadline),
            Program::Cpp(kernel) => self.cpp(kernel, case),
        }
    }

    fn rust(&self, kernel: &Kernel, case: Case, deadline: Deadline) -> Fallible<()> {
        let Self { comm, receive, send, words, .. } = self;
        let arguments: Vec<&dyn KernelArg> = match case {
            Case::AllToAll => vec![*comm, *receive, &ROUNDS, &deadline],
            _ => vec![*comm, *receive, *send, words, &ROUNDS, &deadline],
        };
        // Safety: the kernel's parameters; one block on each rank; the windows live until the stream is synchronised.
        unsafe { kernel.launch(&**self.stream, LaunchConfig::new(1, THREADS), &arguments)? };
        Ok(())
    }

    fn cpp(&self, kernel: &Cpp, case: Case) -> Fallible<()> {
        let (receive, send) = (self.receive.handle(), self.send.handle());
        let argument = |value: &u64| std::ptr::from_ref(value).cast_mut().cast::<c_void>();
        let comm = self.comm.dev_comm().as_ptr().cast_mut().cast::<c_void>();
        let (length, wrong) = (self.words as u64, &self.wrong);
        let mut arguments = match case {
            Case::AllToAll => [&receive.window, &receive.base, &ROUNDS, wrong].map(argument).to_vec(),
            _ => {
                let windows = [&receive.window, &send.window, &receive.base, &send.base, &length, &ROUNDS, wrong];
                windows.map(argument).to_vec()
            }
        };
        arguments.insert(0, comm);
        kernel.launch(self.stream, &mut arguments)
    }
}

/// A kernel in C++, whose module has none of gin's variables and stays loaded.
struct Cpp(sys::CUfunction);

impl Cpp {
    /// Loads the kernel `cpp_` and `name`, also its code: a later load would wait for the kernels that run then.
    fn load(image: &[u8], name: &str) -> Fallible<Self> {
        let name = CString::new(format!("cpp_{name}"))?;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // Safety: the file of a module; the GPU's context is current since the communicator was made.
        unsafe {
            sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()).result()?;
            sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()).result()?;
            sys::cuFuncLoad(function).result()?;
        }
        Ok(Self(function))
    }

    fn launch(&self, stream: &Arc<dyn Stream>, arguments: &mut [*mut c_void]) -> Fallible<()> {
        let stream = CudaStream::of(&**stream).ok_or("the stream is not a GPU's")?.raw();
        let (arguments, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
        // Safety: the function is loaded; the arguments are the kernel's parameters, which the driver copies.
        unsafe { sys::cuLaunchKernel(self.0, 1, 1, 1, THREADS, 1, 1, 0, stream.cast(), arguments, none).result()? };
        Ok(())
    }
}
