// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices, memory, streams and launches of the virtual GPU.

use gin_abi::ABI_VERSION;
use gin_device::coop::{block_in_grid, grid_dim};
use gin_device::kernel::{KernelEntry, KernelParam};
use gin_device::prelude::*;
use gin_gpu::virt::{VirtualDevice, function};
use gin_gpu::{Argument, Device, Function, GpuError, Limits, Memory, MemoryKind, ModuleSource, Plain, check_launch};
use gin_gpu::{KernelArg, LaunchConfig, Stream};
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::{Rank as WorldRank, WorldConfig, launch};
use std::sync::Arc;

/// Stores the thread's index and the parameters, combined into one number.
///
/// # Safety
/// - `out` has a word for each thread of the grid.
#[kernel(launch_bounds(64))]
pub unsafe fn host_test_store(out: *mut u64, base: u64, factor: u32, scale: f32) {
    let index = block_in_grid() as u64 * Block.size() as u64 + Block.rank() as u64;
    let value = base + index * u64::from(factor) + scale as u64 + u64::from(grid_dim().count());
    // Safety: the caller keeps the kernel's conditions.
    unsafe { out.add(index as usize).write(value) };
}

/// Ends the grid with an error.
///
/// # Safety
/// - None.
#[kernel]
pub unsafe fn host_test_trap() {
    gin_device::sys::trap();
}

/// Sums dynamic shared memory after filling it.
///
/// # Safety
/// - `out` is one word.
#[kernel]
pub unsafe fn host_test_dynamic(out: *mut u64) {
    let (start, bytes) = (gin_device::shared::dynamic(), gin_device::shared::dynamic_bytes());
    for i in Block.stripe(bytes) {
        // Safety: the address is in the block's shared memory.
        unsafe { start.add(i).write(1) };
    }
    Block.sync();
    if Block.rank() == 0 {
        // Safety: as above, and the caller keeps the kernel's conditions.
        unsafe { out.write((0..bytes).map(|i| u64::from(start.add(i).read())).sum()) };
    }
}

fn on_one_rank<T: Send>(body: impl Fn(&WorldRank) -> T + Sync) -> T {
    let config = WorldConfig::seeded(1, 5).resident_blocks(4);
    let result = launch(config, |rank| -> Result<T, GpuError> { Ok(body(&rank)) });
    result.unwrap_or_else(|error| panic!("{error}")).remove(0)
}

fn try_launch(kernel: &str, config: LaunchConfig, arguments: &[&dyn KernelArg]) -> Result<(), GpuError> {
    let arguments: Vec<Argument> = arguments.iter().map(|argument| argument.argument()).collect();
    on_one_rank(|rank| {
        let stream = rank.stream().unwrap();
        let kernel = rank.kernel(kernel)?;
        let arguments: Vec<&dyn KernelArg> = arguments.iter().map(|argument| argument as &dyn KernelArg).collect();
        // Safety: these launches are refused, or take no pointers.
        unsafe { stream.launch(&kernel, config, &arguments)? };
        stream.synchronize()
    })
}

const NULL: *mut u64 = std::ptr::null_mut();

#[test]
fn parameters_arrive_in_every_thread_of_every_block() {
    on_one_rank(|rank| {
        let memory = Memory::new(rank.device(), MemoryKind::Device, 96 * 8).unwrap();
        let stream = rank.stream().unwrap();
        let kernel = rank.kernel("host_test_store").unwrap();
        let out = memory.address() as usize as *mut u64;
        // Safety: one word for each thread.
        unsafe { stream.launch(&kernel, LaunchConfig::new(3, 32), &[&out, &1000u64, &7u32, &2.5f32]).unwrap() };
        stream.synchronize().unwrap();
        let mut values = [0u64; 96];
        memory.read(0, &mut values).unwrap();
        let expected: Vec<u64> = (0..96).map(|index| 1000 + index * 7 + 2 + 3).collect();
        assert_eq!(values[..], expected);
        assert!(stream.is_idle().unwrap());
        assert_eq!(rank.device().running(), 0);
    });
}

#[test]
fn an_unknown_kernel_is_refused_with_similar_names() {
    let error = on_one_rank(|rank| rank.kernel("host_test_stor").unwrap_err());
    let GpuError::UnknownKernel { name, similar } = &error else { panic!("{error:?}") };
    assert_eq!((name.as_str(), similar[0].as_str()), ("host_test_stor", "`host_test_store`"));
    assert!(error.to_string().contains("`host_test_store`"), "{error}");
}

#[test]
fn wrong_parameters_are_refused_with_count_position_and_sizes() {
    let config = LaunchConfig::new(1, 32);
    let few = try_launch("host_test_store", config, &[&NULL, &1u64]).unwrap_err();
    assert_eq!(few.to_string(), "kernel `host_test_store` takes 4 parameters (out, base, factor, scale); 2 were given");
    let many = try_launch("host_test_trap", config, &[&1u32]).unwrap_err();
    assert!(matches!(many, GpuError::ParameterCount { expected: 0, given: 1, .. }), "{many:?}");
    let size = try_launch("host_test_store", config, &[&NULL, &1u64, &7u64, &2.5f32]).unwrap_err();
    assert_eq!(
        size.to_string(),
        "parameter 2 of kernel `host_test_store`, `factor: u32`, has 4 bytes; a `u64` of 8 bytes was given",
    );
    let plain = try_launch("host_test_store", config, &[&NULL, &Plain([1u64; 3]), &7u32, &2.5f32]).unwrap_err();
    assert!(matches!(plain, GpuError::ParameterSize { position: 1, expected: 8, given: 24, .. }), "{plain:?}");
}

/// Does nothing.
///
/// # Safety
/// - None.
#[kernel]
pub unsafe fn host_test_types(comm: Comm, window: gin_device::Window<u32>, factor: f32, deadline: Deadline) {
    let _ = (comm, window, factor, deadline);
}

#[test]
fn arguments_of_another_type_of_the_same_size_are_refused_with_both_types() {
    let outcome = launch(WorldConfig::seeded(1, 5), |rank| -> Result<[String; 4], CommError> {
        let comm = rank.communicator(&Requirements::default())?;
        let (words, longs) =
            (comm.alloc_window::<u32>(8, WindowFlags::NONE)?, comm.alloc_window(8, WindowFlags::NONE)?);
        let (stream, kernel, handle) = (rank.stream()?, rank.kernel("host_test_types")?, comm.device()?);
        let refused = |window: &dyn KernelArg, factor: &dyn KernelArg, deadline: &dyn KernelArg| {
            let arguments = [&handle, window, factor, deadline];
            // Safety: the kernel does nothing.
            unsafe { stream.launch(&kernel, LaunchConfig::new(1, 1), &arguments) }.unwrap_err().to_string()
        };
        let limit = Deadline::after_ms(1);
        let texts = [
            refused(&gin_host::comm::Window::<u64>::clone(&longs), &1f32, &limit),
            refused(&words, &1u32, &limit),
            refused(&words, &1f32, &1u64),
            refused(&words, &Plain([0u8; 4]), &limit),
        ];
        // Safety: as above.
        unsafe { stream.launch(&kernel, LaunchConfig::new(1, 1), &[&handle, &words, &1f32, &limit])? };
        stream.synchronize()?;
        comm.destroy()?;
        Ok(texts)
    });
    let [window, factor, deadline, plain] = outcome.unwrap().remove(0);
    let of = "of kernel `host_test_types` is";
    assert_eq!(
        window,
        format!("parameter 1 {of} `window: gin_device::Window<u32>`; a `gin_device::window::Window<u64>` was given")
    );
    assert_eq!(factor, format!("parameter 2 {of} `factor: f32`; a `u32` was given"));
    assert_eq!(deadline, format!("parameter 3 {of} `deadline: Deadline`; a `u64` was given"));
    assert_eq!(plain, format!("parameter 2 {of} `factor: f32`; a `[u8; 4]` was given"));
}

/// # Safety
/// - As [`host_test_store`].
unsafe fn store(stream: &dyn Stream, threads: u32, out: *mut u64) -> Result<(), GpuError> {
    // Safety: the caller's promise.
    unsafe { host_test_store::launch(stream, LaunchConfig::new(1, threads), out, 1000, 7, 2.5) }
}

#[test]
fn a_typed_launch_passes_its_arguments_and_checks_the_shape() {
    on_one_rank(|rank| {
        let memory = Memory::new(rank.device(), MemoryKind::Device, 32 * 8).unwrap();
        let stream = rank.stream().unwrap();
        let out = memory.address() as usize as *mut u64;
        // Safety: one word for each thread.
        unsafe { host_test_store::launch(&stream, LaunchConfig::new(1, 32), out, 1000, 7, 2.5).unwrap() };
        stream.synchronize().unwrap();
        let mut values = [0u64; 32];
        memory.read(0, &mut values).unwrap();
        let expected: Vec<u64> = (0..32).map(|index| 1000 + index * 7 + 2 + 1).collect();
        assert_eq!(values[..], expected);
        // Safety: the launch is refused.
        let past = unsafe { store(&*stream, 65, out) };
        assert!(matches!(past, Err(GpuError::LaunchLimit { asked: 65, limit: 64, .. })), "{past:?}");
    });
}

#[test]
fn launches_past_a_limit_are_refused_with_the_number_and_the_limit() {
    let figures = |config| match try_launch("host_test_store", config, &[&NULL, &1u64, &7u32, &2.5f32]).unwrap_err() {
        GpuError::LaunchLimit { asked, limit, .. } => (asked, limit),
        other => panic!("{other:?}"),
    };
    assert_eq!(figures(LaunchConfig::new(1, 65)), (65, 64), "the kernel's own bound");
    assert_eq!(figures(LaunchConfig::new(1, 1025)), (1025, 64));
    assert_eq!(figures(LaunchConfig::new(u32::MAX, 1)), (u64::from(u32::MAX), i32::MAX as u64));
    assert_eq!(figures(LaunchConfig::new(1, 1).dynamic_shared(300 << 10)), (300 << 10, 227 << 10));
    let trap = |config| try_launch("host_test_trap", config, &[]).unwrap_err();
    assert!(matches!(trap(LaunchConfig::new(1, 1025)), GpuError::LaunchLimit { asked: 1025, limit: 1024, .. }));
    assert!(matches!(trap(LaunchConfig::new(0, 1)), GpuError::EmptyLaunch { what: "grid", .. }));
    assert!(matches!(trap(LaunchConfig::new(1, 0)), GpuError::EmptyLaunch { what: "block", .. }));
    let cooperative = trap(LaunchConfig::new(5, 1).cooperative());
    assert!(matches!(cooperative, GpuError::NotResident { blocks: 5, resident: 4, .. }), "{cooperative:?}");
    let both = trap(LaunchConfig::new(1, 1).cooperative().dependent()).to_string();
    assert_eq!(
        both,
        "kernel `host_test_trap` cannot be launched as a dependent one: it is cooperative as well; leave `cooperative` or \
         `dependent` out"
    );
}

#[test]
fn clusters_are_checked_and_the_virtual_gpu_has_none() {
    let refused = |config: LaunchConfig| try_launch("host_test_trap", config, &[]).unwrap_err().to_string();
    let text = refused(LaunchConfig::new(4, 1).cluster(2));
    assert_eq!(text, "a cluster's number of blocks of 2 is past the limit of 1 of virtual GPU 0");
    assert_eq!(refused(LaunchConfig::new(4, 1).cluster(0)), "cluster is empty: 0 x 1 x 1");
    let function = Function {
        name: "kernel".to_owned(),
        parameters: Vec::new(),
        max_threads: None,
        abi: gin_abi::ABI_VERSION,
        handle: Arc::new(()),
    };
    let mut limits = Limits::CUDA;
    limits.cluster_blocks = 8;
    let check = |config: LaunchConfig| check_launch(&function, &config, &[], &limits, || "a GPU".to_owned());
    for (blocks, cluster) in [(4, 1), (4, 2), (16, 8)] {
        assert_eq!(check(LaunchConfig::new(blocks, 1).cluster(cluster)), Ok(()), "{blocks} blocks");
    }
    let uneven = check(LaunchConfig::new(6, 1).cluster(4));
    assert_eq!(uneven, Err(GpuError::UnevenClusters { grid: 6, cluster: 4 }));
    assert!(matches!(check(LaunchConfig::new(16, 1).cluster(16)), Err(GpuError::LaunchLimit { limit: 8, .. })));
    let mut tall = LaunchConfig::new(4, 1);
    tall.cluster.y = 2;
    assert_eq!(check(tall), Err(GpuError::UnevenClusters { grid: 1, cluster: 2 }));
}

#[test]
fn a_kernel_of_another_version_of_the_layouts_is_refused_with_both_versions() {
    static ENTRY: KernelEntry = KernelEntry {
        name: "old",
        module: "tests",
        abi: ABI_VERSION + 1,
        params: &[KernelParam::new::<u32>("x", "u32")],
        launch_bounds: None,
        call: nothing,
    };
    unsafe fn nothing(_: *const *const u8) {}
    let error = on_one_rank(|rank| {
        // Safety: the kernel does nothing.
        unsafe { rank.stream().unwrap().launch(&function(&ENTRY), LaunchConfig::new(1, 1), &[&1u32]) }.unwrap_err()
    });
    let expected =
        GpuError::AbiMismatch { kernel: "old".to_owned(), kernel_abi: ABI_VERSION + 1, host_abi: ABI_VERSION };
    assert_eq!(error, expected);
}

#[test]
fn a_kernel_that_traps_is_reported_at_synchronisation_once() {
    on_one_rank(|rank| {
        let stream = rank.stream().unwrap();
        let kernel = rank.kernel("host_test_trap").unwrap();
        // Safety: the kernel has no requirements.
        unsafe { stream.launch(&kernel, LaunchConfig::new(1, 2), &[]).unwrap() };
        let error = stream.synchronize().unwrap_err();
        assert!(matches!(&error, GpuError::Kernel { kernel, .. } if kernel == "host_test_trap"), "{error:?}");
        stream.synchronize().unwrap();
    });
}

#[test]
fn work_of_a_stream_runs_in_order_and_another_stream_waits_for_an_event() {
    on_one_rank(|rank| {
        let memory = Memory::new(rank.device(), MemoryKind::Device, 64 * 8).unwrap();
        let (first, second) = (rank.stream().unwrap(), rank.stream().unwrap());
        let kernel = rank.kernel("host_test_store").unwrap();
        let out = memory.address() as usize as *mut u64;
        let start = first.record().unwrap();
        for base in [100u64, 200] {
            // Safety: 32 words.
            unsafe { first.launch(&kernel, LaunchConfig::new(1, 32), &[&out, &base, &0u32, &0f32]).unwrap() };
        }
        let end = first.record().unwrap();
        second.wait_for(&*end).unwrap();
        // Safety: two halves of one allocation.
        unsafe { second.copy(memory.address() + 256, memory.address(), 256).unwrap() };
        second.synchronize().unwrap();
        assert!(end.is_done().unwrap() && start.is_done().unwrap());
        assert!(end.since(&*start).is_some_and(|ns| ns > 0));
        let mut values = [0u64; 64];
        memory.read(0, &mut values).unwrap();
        assert_eq!(values, [201; 64]);
    });
}

#[test]
fn a_capture_refuses_to_wait_for_its_stream_and_goes_on() {
    on_one_rank(|rank| {
        let (stream, sum) = (rank.stream().unwrap(), Memory::new(rank.device(), MemoryKind::Device, 8).unwrap());
        let kernel = rank.kernel("host_test_store").unwrap();
        let (out, base, factor, scale) = (sum.address() as usize as *mut u64, 5u64, 0u32, 0f32);
        let arguments: [&dyn KernelArg; 4] = [&out, &base, &factor, &scale];
        let graph = stream.capture(|| {
            // Safety: the kernel stores one word.
            unsafe { stream.launch(&kernel, LaunchConfig::new(1, 1), &arguments)? };
            let refused = stream.synchronize().unwrap_err().to_string();
            assert!(refused.contains("wait before the capture, or after a launch of the graph"), "{refused}");
            Ok::<_, GpuError>(())
        });
        // Safety: as above.
        unsafe { stream.replay(&*graph.unwrap()).unwrap() };
        stream.synchronize().unwrap();
        let mut word = [0u64];
        sum.read(0, &mut word).unwrap();
        assert_eq!(word, [6]);
    });
}

#[test]
fn dynamic_shared_memory_has_the_size_that_was_asked_for() {
    on_one_rank(|rank| {
        let memory = Memory::new(rank.device(), MemoryKind::Device, 8).unwrap();
        let stream = rank.stream().unwrap();
        let out = memory.address() as usize as *mut u64;
        let config = LaunchConfig::new(1, 32).dynamic_shared(1000);
        // Safety: one word.
        unsafe { stream.launch(&rank.kernel("host_test_dynamic").unwrap(), config, &[&out]).unwrap() };
        stream.synchronize().unwrap();
        let mut sum = [0u64];
        memory.read(0, &mut sum).unwrap();
        assert_eq!(sum, [1000]);
    });
}

#[test]
fn accesses_past_an_allocation_are_refused_with_the_figures() {
    let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
    let memory = Memory::new(&device, MemoryKind::Pinned, 16).unwrap();
    assert_eq!(memory.address() % 256, 0);
    let error = |offset, end| GpuError::OutOfRange { offset, end, length: 16 };
    assert_eq!(memory.write(9, &[0u64]).unwrap_err(), error(9, 17));
    assert_eq!(memory.read(u64::MAX, &mut [0u8; 2]).unwrap_err(), error(u64::MAX, u64::MAX));
    assert_eq!(memory.slice(8..17).unwrap_err(), error(8, 17));
    let backwards = std::ops::Range { start: 8, end: 4 };
    assert!(memory.slice(backwards).is_err());
    let slice = memory.slice(8..16).unwrap();
    assert_eq!(slice.write(1, &[0u64]).unwrap_err(), GpuError::OutOfRange { offset: 1, end: 9, length: 8 });
    slice.write(0, &[7u64]).unwrap();
    let mut words = [0u64; 2];
    memory.read(0, &mut words).unwrap();
    assert_eq!(words, [0, 7]);
    let huge = Memory::new(&device, MemoryKind::Device, u64::MAX).unwrap_err();
    assert!(matches!(huge, GpuError::OutOfMemory { bytes: u64::MAX, kind: MemoryKind::Device, .. }));
    assert!(matches!(device.load(ModuleSource::Ptx("")), Err(GpuError::Unsupported { .. })));
    let stream = device.stream().unwrap();
    assert!(matches!(stream.record(), Err(GpuError::Unsupported { .. })));
}
