// SPDX-License-Identifier: MIT OR Apache-2.0
//! The calls of the driver that a launch makes, and the kernels that count as running, beside a stand-in for the
//! driver.
//!
//! Each test runs in a process of its own, which finds the stand-in.

use gin_gpu::cuda::{CudaDevice, CudaStream};
use gin_gpu::lane::Value;
use gin_gpu::{Device, Function, GpuError, KernelArg, LaunchConfig, Memory, MemoryKind, ModuleSource, Plain, Stream};
use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The environment variable with the name of the test that this process runs.
const CHILD: &str = "GIN_GPU_TEST_STAND_IN";

const TESTS: [(&str, fn()); 9] = [
    ("a_repeated_launch_on_a_stream_of_gin_makes_one_call", repeated),
    ("a_launch_on_a_stream_of_the_program_asks_for_a_capture_and_records_an_event", foreign),
    ("a_launch_finds_its_context_again_after_other_code_has_made_another_one_current", other_context),
    ("a_copy_and_the_value_that_announces_it_make_two_calls", announced),
    ("a_kernel_counts_until_it_has_ended_and_no_longer", counted),
    ("a_stream_that_joins_a_capture_puts_its_kernels_into_the_graph", joined),
    ("while_a_stream_is_captured_memory_and_modules_are_made_and_a_wait_for_it_is_refused", beside),
    ("memory_of_another_library_is_shared_whole_if_it_is_in_a_file", shared),
    ("a_kernel_of_an_old_architecture_is_no_dependent_one_on_a_new_gpu", older),
];

fn main() {
    if let Some(name) = std::env::var_os(CHILD) {
        let (_, test) = TESTS.into_iter().find(|(known, _)| name == *known).expect("a test of this name");
        return test();
    }
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in/cuda.rs");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let flags = ["--edition", "2024", "-O", "--crate-type", "cdylib", "--crate-name", "cuda", "-o"];
    run(Command::new(rustc).args(flags).arg(folder.path().join("libcuda.so")).arg(source)).unwrap();
    let trials = TESTS.map(|(name, _)| {
        let path = folder.path().to_owned();
        Trial::test(name, move || {
            run(Command::new(std::env::current_exe()?).env(CHILD, name).env("LD_LIBRARY_PATH", path))
        })
    });
    let conclusion = libtest_mimic::run(&Arguments::from_args(), trials.into());
    drop(folder);
    conclusion.exit();
}

fn run(command: &mut Command) -> Result<(), Failed> {
    let output = command.output()?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {text}").into()) }
}

/// Returns a function of the stand-in.
fn symbol<T: Copy>(name: &CStr) -> T {
    assert_eq!(size_of::<T>(), size_of::<usize>());
    // Safety: the library is loaded, and callers name the function's type.
    unsafe {
        let library = libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW);
        std::mem::transmute_copy(&libc::dlsym(library, name.as_ptr()))
    }
}

/// Checks that `work` makes no call that would break a capture.
fn calls_in_capture(work: impl FnOnce()) {
    let all: extern "C" fn(*mut u64) -> u64 = symbol(c"stand_in_all_calls");
    let mut broken = [0; 2];
    all(&raw mut broken[0]);
    work();
    all(&raw mut broken[1]);
    assert_eq!(broken, [0; 2], "calls that break a capture");
}

/// Returns the number of each call that `work` makes.
fn calls(work: impl FnOnce()) -> BTreeMap<&'static str, u64> {
    const NAMES: [&CStr; 13] = [
        c"cuCtxGetCurrent",
        c"cuCtxSetCurrent",
        c"cuEventCreate",
        c"cuEventQuery",
        c"cuEventRecord",
        c"cuGraphLaunch",
        c"cuLaunchKernel",
        c"cuLaunchKernelEx",
        c"cuMemcpyAsync",
        c"cuStreamBatchMemOp_v2",
        c"cuStreamIsCapturing",
        c"cuStreamQuery",
        c"cuThreadExchangeStreamCaptureMode",
    ];
    let count: unsafe extern "C" fn(*const c_char) -> u64 = symbol(c"stand_in_calls");
    let all: extern "C" fn(*mut u64) -> u64 = symbol(c"stand_in_all_calls");
    let mut broken = [0; 2];
    // Safety: the names end with 0.
    let counts = || NAMES.map(|name| unsafe { count(name.as_ptr()) });
    let (before, total) = (counts(), all(&raw mut broken[0]));
    work();
    let (after, total) = (counts(), all(&raw mut broken[1]) - total);
    assert_eq!(broken, [0; 2], "calls that break a capture");
    let each = NAMES.iter().zip(after.iter().zip(before)).map(|(name, (after, before))| (*name, after - before));
    let found: BTreeMap<_, _> =
        each.filter(|(_, calls)| *calls > 0).map(|(name, calls)| (name.to_str().unwrap(), calls)).collect();
    assert_eq!(found.values().sum::<u64>(), total, "other calls");
    found
}

fn announced() {
    let device = CudaDevice::new(0, &[]).unwrap();
    let (mut lane, mut other) = (device.lane().unwrap(), device.lane().unwrap());
    let words = [5u64, 0, 0, 0].map(AtomicU64::new);
    let at = |index: usize| words[index].as_ptr().expose_provenance() as u64;
    let all = || words.each_ref().map(|word| word.load(Ordering::SeqCst));
    let values = |value| [Value::Small { to: at(3), value: 7 }, Value::Word { to: at(2), value }];
    // Safety of all: the words exist until the end.
    let mut ends = Vec::new();
    let made = calls(|| unsafe {
        lane.copy(at(1), at(0), 8).unwrap();
        ends.push(lane.finish(&values(1)).unwrap());
    });
    assert_eq!(made, [("cuMemcpyAsync", 1), ("cuStreamBatchMemOp_v2", 1)].into());
    assert_eq!(all(), [5, 5, 1, 7]);
    assert!(lane.mark().has_reached(ends[0]) && !lane.mark().has_reached(ends[0] + 1));
    // Another lane waits for this end, and for no later one.
    other.wait(lane.mark(), ends[0]).unwrap();
    // The driver gets waits with the next work, and the stand-in refuses a wait that would not end.
    other.wait(lane.mark(), ends[0] + 1).unwrap();
    assert!(unsafe { other.finish(&[]) }.is_err());
    let made = calls(|| unsafe {
        other.add(at(2), 4).unwrap();
        other.finish(&[]).unwrap();
    });
    assert_eq!((made, all()[2]), ([("cuLaunchKernel", 1), ("cuStreamBatchMemOp_v2", 1)].into(), 5));
    // The other GPU is current.
    let enter: unsafe extern "C" fn(*mut c_void) -> c_int = symbol(c"cuCtxSetCurrent");
    unsafe {
        enter(CudaDevice::new(1, &[]).unwrap().raw_context());
        lane.finish(&values(9)).unwrap();
    }
    assert_eq!(all()[2], 9);
    // A later lane of the same stream goes on with its numbers: other threads may still wait for an earlier end.
    let last = other.mark().reached();
    drop(other);
    let mut later = device.lane().unwrap();
    assert_eq!(unsafe { later.finish(&[]) }, Ok(last + 1));
}

fn shared() {
    // The stand-in's memory, which nothing touches: the first is in a file.
    const MAPPED: (u64, u64) = (1 << 40, 4 << 20);
    const PLAIN: (u64, u64) = (2 << 40, 1 << 20);
    let device = CudaDevice::new(0, &[]).unwrap();
    // Safety of all: nothing reads or writes the memory.
    let part = unsafe { device.import_shared(MAPPED.0 + 4096, 8192, None) }.unwrap();
    assert_eq!((part.address(), part.bytes(), part.offset()), (MAPPED.0 + 4096, 8192, 4096));
    let whole = part.memory();
    assert_eq!((whole.address(), whole.bytes(), whole.kind()), (MAPPED.0, MAPPED.1, MemoryKind::Device));
    let file = whole.file().expect("other processes map it").unwrap();
    assert_eq!(file.bytes, MAPPED.1, "they map all of it");
    for (address, bytes, reason) in [
        (MAPPED.0 + 4096, MAPPED.1, "it is not all in one allocation"),
        (PLAIN.0, 8, "allocate it by ncclMemAlloc"),
        (64, 8, "no other process can map it"),
    ] {
        let error = unsafe { device.import_shared(address, bytes, None) }.unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    // Ranks that are threads need no file, and neither does memory that has none.
    let is_in_file = |address, across| {
        let keep = Arc::new(7);
        let part = unsafe { device.import_for_ranks(address, 8, Some(keep.clone()), across) }.unwrap();
        assert_eq!((part.address(), part.bytes(), Arc::strong_count(&keep)), (address, 8, 2));
        part.memory().file().is_some()
    };
    assert_eq!(
        [(MAPPED.0, true), (MAPPED.0, false), (PLAIN.0, true)].map(|(at, across)| is_in_file(at, across)),
        [true, false, false]
    );
}

/// A rank of GPU 0.
struct Rank {
    device: Arc<CudaDevice>,
    kernel: Function,
}

impl Rank {
    fn new() -> Self {
        static IMAGE: &[u8] = &gin_abi::ABI_VERSION.to_ne_bytes();
        let device = CudaDevice::new(0, &[]).unwrap();
        let kernel = device.load(ModuleSource::Cubin(IMAGE)).unwrap().function("step").unwrap();
        Self { device, kernel }
    }

    fn stream(&self) -> Arc<dyn Stream> {
        self.device.stream().unwrap()
    }

    /// Returns a stream of the program, and its handle.
    fn foreign(&self) -> (Arc<dyn Stream>, *mut c_void) {
        let create: unsafe extern "C" fn(*mut *mut c_void, u32, i32) -> c_int = symbol(c"cuStreamCreateWithPriority");
        let enter: unsafe extern "C" fn(*mut c_void) -> c_int = symbol(c"cuCtxSetCurrent");
        let mut raw = std::ptr::null_mut();
        // Safety: the handles are the stand-in's, and streams of it live for ever.
        unsafe {
            enter(self.device.raw_context());
            create(&raw mut raw, 0, 0);
            (self.device.stream_from_raw(raw).unwrap(), raw)
        }
    }

    fn try_launch(&self, stream: &Arc<dyn Stream>, config: LaunchConfig) -> Result<(), GpuError> {
        let (comm, window) = (Plain([0u64; 21]), Plain([0u64; 7]));
        let arguments: [&dyn KernelArg; 7] = [&comm, &window, &0u64, &0u64, &0u32, &0u32, &0u64];
        // Safety: the kernel does nothing.
        unsafe { stream.launch(&self.kernel, config, &arguments) }
    }

    fn launch(&self, stream: &Arc<dyn Stream>, blocks: u32) {
        self.try_launch(stream, LaunchConfig::new(blocks, 1024)).unwrap();
    }

    /// Returns whether a cooperative kernel of all blocks that the GPU holds, less this number, is launched.
    fn has_room(&self, less: u32) -> bool {
        let stream = self.stream();
        match self.try_launch(&stream, LaunchConfig::new(132 - less, 1024).cooperative()) {
            Ok(()) => {
                end(&stream);
                true
            }
            Err(GpuError::NotResident { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Ends the kernels of a stream of gin without a look at its handle through [`CudaStream::raw`].
fn end(stream: &Arc<dyn Stream>) {
    end_raw(handle(stream));
}

/// Returns the handle of a stream, which its debug text has.
fn handle(stream: &Arc<dyn Stream>) -> *mut c_void {
    let text = format!("{stream:?}");
    let digits = text.split("Stream(0x").nth(1).unwrap().split(')').next().unwrap();
    std::ptr::with_exposed_provenance_mut(usize::from_str_radix(digits, 16).unwrap())
}

fn end_raw(stream: *mut c_void) {
    let end: extern "C" fn(*mut c_void) = symbol(c"stand_in_end");
    end(stream);
}

const ONE_CALL: [(&str, u64); 1] = [("cuLaunchKernelEx", 10)];

fn repeated() {
    let (rank, other) = (Rank::new(), Rank::new());
    let (stream, second) = (rank.stream(), other.stream());
    let ten = || (0..10).for_each(|_| rank.launch(&stream, 4));
    rank.launch(&stream, 4);
    assert_eq!(calls(ten), ONE_CALL.into());
    // Kernels of several shapes in turn.
    rank.launch(&stream, 9);
    let in_turn = || [4, 9].repeat(5).into_iter().for_each(|blocks| rank.launch(&stream, blocks));
    assert_eq!(calls(in_turn), ONE_CALL.into());
    // Another rank of the GPU has kernels.
    other.launch(&second, 7);
    rank.launch(&stream, 4);
    assert_eq!(calls(ten), ONE_CALL.into());
    assert_eq!(calls(|| (0..10).for_each(|_| other.launch(&second, 7))), ONE_CALL.into());
    // Kernels that must be resident together.
    [&stream, &second].into_iter().for_each(end);
    let together = || rank.try_launch(&stream, LaunchConfig::new(132, 1024).cooperative()).unwrap();
    together();
    assert_eq!(calls(|| (0..10).for_each(|_| together())), ONE_CALL.into());
    end(&stream);
    let graph = stream.capture(|| rank.try_launch(&stream, LaunchConfig::new(4, 1024))).unwrap();
    // Safety: the kernel does nothing.
    let replay = || unsafe { stream.replay(&*graph).unwrap() };
    replay();
    assert_eq!(calls(|| (0..10).for_each(|_| replay())), [("cuGraphLaunch", 10)].into());
    end(&stream);
}

/// The stand-in is sm_90. It names no architecture of its kernels, which counts as an older one.
fn older() {
    let rank = Rank::new();
    let (stream, shape) = (rank.stream(), LaunchConfig::new(4, 1024));
    assert_eq!(rank.device.capability(), 90);
    assert!(!rank.device.allows_dependent(&rank.kernel));
    let refused = rank.try_launch(&stream, shape.dependent());
    assert!(matches!(refused, Err(GpuError::NotDependent { .. })), "{refused:?}");
    rank.try_launch(&stream, shape).unwrap();
    end(&stream);
}

fn foreign() {
    let rank = Rank::new();
    let (foreign, raw) = rank.foreign();
    let shown = rank.stream();
    let known = CudaStream::of(&*shown).unwrap().raw();
    for (stream, raw) in [(foreign, raw), (shown, known)] {
        rank.launch(&stream, 4);
        let ten = calls(|| (0..10).for_each(|_| rank.launch(&stream, 4)));
        assert_eq!(ten, [("cuEventRecord", 10), ("cuLaunchKernelEx", 10), ("cuStreamIsCapturing", 10)].into());
        // The program captures it meanwhile.
        let begin: unsafe extern "C" fn(*mut c_void, c_int) -> c_int = symbol(c"cuStreamBeginCapture_v2");
        let finish: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int = symbol(c"cuStreamEndCapture");
        // Safety: the stand-in's stream.
        unsafe { begin(raw, 0) };
        assert_eq!(calls(|| rank.launch(&stream, 9)).get("cuEventRecord"), None);
        assert_eq!(rank.device.running(), 1);
        assert!(rank.has_room(4) && !rank.has_room(3), "the captured kernel is not counted");
        // Safety: as above.
        unsafe { finish(raw, &mut std::ptr::null_mut()) };
        end_raw(raw);
        assert_eq!(rank.device.running(), 0);
    }
}

fn beside() {
    let rank = Rank::new();
    let (foreign, raw) = rank.foreign();
    let other = rank.stream();
    let begin: unsafe extern "C" fn(*mut c_void, c_int) -> c_int = symbol(c"cuStreamBeginCapture_v2");
    let finish: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int = symbol(c"cuStreamEndCapture");
    // Safety: the stand-in's stream.
    unsafe { begin(raw, 0) };
    calls_in_capture(|| {
        let device: Arc<dyn Device> = rank.device.clone();
        for kind in [MemoryKind::Device, MemoryKind::Pinned] {
            let memory = Memory::new(&device, kind, 64).unwrap();
            memory.write(0, &[7u64]).unwrap();
            let mut word = [0u64];
            memory.read(0, &mut word).unwrap();
            assert_eq!(word, [7]);
        }
        drop(Rank::new());
        let _both = (device.lane().unwrap(), device.copier().unwrap());
        let refused = foreign.synchronize();
        assert!(matches!(refused, Err(GpuError::Unsupported { .. })), "{refused:?}");
        rank.launch(&other, 4);
        end(&other);
        other.synchronize().unwrap();
        rank.launch(&foreign, 4);
    });
    // Safety: as above.
    unsafe { finish(raw, &mut std::ptr::null_mut()) };
    foreign.synchronize().unwrap();
}

fn other_context() {
    let (rank, far) = (Rank::new(), CudaDevice::new(1, &[]).unwrap());
    let stream = rank.stream();
    rank.launch(&stream, 4);
    let enter: unsafe extern "C" fn(*mut c_void) -> c_int = symbol(c"cuCtxSetCurrent");
    for context in [far.raw_context(), std::ptr::null_mut()] {
        // Safety: takes any context.
        unsafe { enter(context) };
        let once = calls(|| rank.launch(&stream, 4));
        assert_eq!(once, [("cuCtxGetCurrent", 1), ("cuCtxSetCurrent", 1), ("cuLaunchKernelEx", 2)].into());
        assert_eq!(calls(|| rank.launch(&stream, 4)), [("cuLaunchKernelEx", 1)].into());
    }
    // A thread that has made no call, and calls of gin for the other GPU.
    let once = std::thread::scope(|scope| scope.spawn(|| calls(|| rank.launch(&stream, 4))).join().unwrap());
    assert_eq!(once, [("cuCtxSetCurrent", 1), ("cuLaunchKernelEx", 1)].into());
    far.stream().unwrap();
    assert_eq!(calls(|| rank.launch(&stream, 4)), [("cuCtxSetCurrent", 1), ("cuLaunchKernelEx", 1)].into());
    end(&stream);
}

fn counted() {
    let rank = Rank::new();
    let device: Arc<dyn Device> = rank.device.clone();
    let memory = Memory::new(&device, MemoryKind::Device, 64).unwrap();
    let (stream, other) = (rank.stream(), rank.stream());
    assert!(rank.has_room(0));
    (0..3).for_each(|_| rank.launch(&stream, 4));
    assert!(!rank.has_room(3) && rank.has_room(4));
    // A shape that the stream no longer runs, since it was idle.
    rank.launch(&stream, 40);
    assert!(!rank.has_room(39) && rank.has_room(40));
    end(&stream);
    assert!(stream.is_idle().unwrap());
    rank.launch(&stream, 4);
    assert!(!rank.has_room(3) && rank.has_room(4));
    // The program does not ask the stream: a launch finds out.
    rank.launch(&stream, 40);
    for _ in 0..64 {
        end(&stream);
        rank.launch(&stream, 4);
    }
    assert!(!rank.has_room(3) && rank.has_room(4));
    end(&stream);
    assert!(rank.has_room(0));
    // Work behind the kernel does not count for it: copies, and a wait for another stream.
    for waits in [true, false] {
        rank.launch(&other, 1);
        rank.launch(&stream, 4);
        if waits {
            stream.wait_for(&*other.record().unwrap()).unwrap();
        } else {
            // Safety: memory of the stand-in.
            unsafe { stream.copy(memory.address(), memory.address() + 32, 32).unwrap() };
        }
        assert!(!rank.has_room(4));
        // The end of the kernel, not of what follows.
        let one: extern "C" fn(*mut c_void, u64) = symbol(c"stand_in_end_one");
        one(handle(&stream), 1);
        assert!(!stream.is_idle().unwrap());
        assert!(!rank.has_room(0) && rank.has_room(1));
        [&stream, &other].into_iter().for_each(end);
    }
    // A stream that is gone, and memory that its kernel may use.
    rank.launch(&stream, 4);
    let raw = handle(&stream);
    drop((stream, memory));
    assert_eq!(rank.device.running(), 1);
    assert!(!rank.has_room(3));
    end_raw(raw);
    assert_eq!(rank.device.running(), 0);
}

fn joined() {
    let rank = Rank::new();
    let (first, second) = (rank.stream(), rank.stream());
    [&first, &second].into_iter().for_each(|stream| rank.launch(stream, 4));
    let graph = first.capture(|| -> Result<(), GpuError> {
        second.wait_for(&*first.record()?)?;
        assert!(first.is_capturing()? && second.is_capturing()?);
        // Its kernel is not counted, and the ones before the capture are.
        rank.launch(&second, 30);
        assert_eq!(rank.device.running(), 2);
        assert!(!rank.has_room(7) && rank.has_room(8));
        first.wait_for(&*second.record()?)?;
        // The driver ends both.
        let finish: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int = symbol(c"cuStreamEndCapture");
        // Safety: the stand-in's stream.
        unsafe { finish(handle(&second), &mut std::ptr::null_mut()) };
        Ok(())
    });
    drop(graph.unwrap());
    for stream in [&first, &second] {
        rank.launch(stream, 4);
        assert_eq!(calls(|| (0..10).for_each(|_| rank.launch(stream, 4))), ONE_CALL.into());
        end(stream);
    }
}
