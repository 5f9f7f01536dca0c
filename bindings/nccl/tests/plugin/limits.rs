// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranges, deregistration, failures, refusals, and the tables of later versions.

use crate::common::gpus::{Engine, Fault, GPUS, choose, current, gpus, own_gpus};
use crate::common::{Comm, Put, connect, init, listen, logged, logger, until};
use gin_nccl::abi::{Config, FLAG_NEVER_RESET, HANDLE_BYTES, PTR_CUDA, PTR_HOST};
use gin_nccl::gpus::Place;
use gin_nccl::{ncclRmaPlugin_v14, ncclRmaPlugin_v15, ncclRmaPlugin_v16};
use std::any::Any;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn ranges_are_checked_against_the_windows_of_both_ranks() {
    Engine::start(12);
    let comm = Comm::new(3);
    let (window, table) = (comm.register_each(&[4096, 1024, 4096], 0), comm.register(64, FLAG_NEVER_RESET));
    let (own, word) = (window.handles[0], table.handles[0]);
    let refused = [
        (Put::new((own, 0), (own, 1000), 32), "offset 1000, is not in the 1024 bytes that rank 1 has registered"),
        (Put::new((own, 4090), (own, 0), 8), "offset 4090, is not in the 4096 bytes that rank 0 has registered"),
        (Put::new((own, u64::MAX), (own, 0), 8), "offset 18446744073709551615"),
        (Put::new((own, 0), (own, 0), u64::MAX), "18446744073709551615 bytes at offset 0"),
        (Put::signal(word, 8, None), "the signal, 8 bytes at offset 64, is not in the 64 bytes"),
        (Put { signal: Some((word, 12, None)), ..Put::signal(word, 0, None) }, "no signal can be at offset 12"),
        (Put::new((null_mut(), 0), (own, 0), 8), "without a handle of both windows"),
        (Put { context: 2, ..Put::signal(word, 0, None) }, "context 2 of 2"),
    ];
    for (put, reason) in refused {
        let (code, _) = comm.put(0, 1, &put);
        assert!(code != 0, "{reason}");
        assert!(logged(&["rank 0: put of", "to rank 1", reason]), "{reason}");
    }
    let (code, _) = comm.put(0, 3, &Put::signal(word, 0, None));
    assert!(code != 0 && logged(&["to rank 3: the communicator has 3 ranks"]));
    assert!(comm.has_failed(0) && !comm.has_failed(1) && !comm.has_failed(2));
    // The whole of a smaller window, and no bytes past its end, are right. So is another rank's larger window.
    for (to, put) in [
        (1, Put::new((own, 0), (own, 1000), 24)),
        (1, Put::new((own, 4096), (own, 9999), 0).and(word, 7, None)),
        (2, Put::new((own, 0), (own, 4064), 32)),
    ] {
        comm.wait(0, comm.post(0, to, &put));
    }
    assert_eq!(table.word(1, 7), 1);
    comm.end(&[&window, &table]);
}

#[test]
fn transfers_of_more_than_a_gibibyte_are_split() {
    const BYTES: u64 = 5 << 30;
    let engine = Engine::start(13);
    let comm = Comm::new(2);
    // Addresses of no memory: no copy is carried out.
    let (start, keep) = (1 << 50, Arc::new(()) as Arc<dyn Any + Send + Sync>);
    let mut handles = Vec::new();
    for rank in 0..2 {
        let address = start + rank as u64 * 2 * BYTES;
        gpus().place(address, BYTES, Place::Gpu(comm.first_gpu + rank), &keep);
        let handle = comm.register_at(rank, address, BYTES, PTR_CUDA, 0);
        handles.push(handle);
    }
    engine.hold(true);
    let part = |offset| (handles[0], offset);
    let request = comm.post(0, 1, &Put::new(part(0), part(1), BYTES - 1));
    let copies = engine.discard();
    let first = start + 2 * BYTES + 1;
    let expected: Vec<_> = (0..5).map(|index| (first + (index << 30), (1 << 30) - u64::from(index == 4))).collect();
    assert_eq!(copies, expected);
    comm.wait(0, request);
    engine.hold(false);
    comm.deregister_all(&handles);
    comm.end(&[]);
}

#[test]
fn memory_is_deregistered_when_no_copy_uses_it_and_refused_from_then_on() {
    let engine = Engine::start(14);
    let comm = Comm::new(2);
    let (window, table) = comm.register_with_table(4096);
    engine.hold(true);
    let part = (window.handles[0], 0);
    comm.post(0, 1, &Put::new(part, part, 4096).and(table.handles[0], 0, None));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (comm, window) = (&comm, &window);
            // Rank 1 gives back the window into which rank 0 puts.
            assert_eq!(comm.deregister(1, window.handles[1]), 0);
            done.store(true, Ordering::SeqCst);
        });
        until("the window is closed", || {
            let (code, _) = comm.put(0, 1, &Put::new(part, part, 8));
            code != 0
        });
        assert!(!done.load(Ordering::SeqCst), "a copy is still under way");
        engine.hold(false);
    });
    assert!(logged(&["rank 0: put of 8 bytes to rank 1: rank 1 has deregistered"]));
    assert_eq!((table.word(1, 0), comm.deregister(0, window.handles[0])), (1, 0));
    comm.end(&[&table]);
}

#[test]
fn a_request_waits_for_a_rank_that_is_still_registering() {
    Engine::start(15);
    let comm = Comm::new(2);
    let memory = gpus().allocate(comm.first_gpu, 64, false);
    let own = comm.register_at(0, memory.address(), 64, PTR_CUDA, 0);
    let other = gpus().allocate(comm.first_gpu + 1, 64, false);
    let own_raw = own.expose_provenance();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let own = std::ptr::with_exposed_provenance_mut(own_raw);
            memory.write(0, &[9u64]).unwrap();
            comm.wait(0, comm.post(0, 1, &Put::new((own, 0), (own, 8), 8)));
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        comm.register_at(1, other.address(), 64, PTR_CUDA, 0);
    });
    let mut words = [0u64; 2];
    other.read(0, &mut words).unwrap();
    assert_eq!(words, [0, 9]);
    comm.end(&[]);
}

#[test]
fn a_context_ends_with_requests_under_way() {
    Engine::start(16);
    let comm = Comm::new(2);
    let (window, table) = comm.register_with_table(1 << 20);
    for rank in 0..2 {
        let part = (window.handles[rank], 0);
        for _ in 0..50 {
            comm.post(rank, 1 - rank, &Put::new(part, part, 1 << 19).and(table.handles[rank], 0, None));
        }
    }
    // NCCL asks for none of them.
    comm.end(&[&window, &table]);
}

#[test]
fn a_failed_gpu_is_reported_with_the_rank_and_the_peer() {
    let engine = Engine::start(17);
    let comm = Comm::new(2);
    let (window, table) = comm.register_with_table(64);
    engine.fault(Some(Fault::Error));
    let part = (window.handles[0], 0);
    let (code, _) = comm.put(0, 1, &Put::new(part, part, 64).and(table.handles[0], 0, None));
    assert!(code != 0 && comm.has_failed(0) && !comm.has_failed(1));
    assert!(logged(&["rank 0: put of 64 bytes with signal to rank 1: virtual GPU cannot work after a fault"]));
    engine.fault(None);

    engine.fault(Some(Fault::Broken));
    let part = (window.handles[1], 0);
    let request = comm.post(1, 0, &Put::new(part, part, 64));
    // NCCL calls the progress function all the time.
    until("the failure is found", || comm.progress(1) != 0);
    assert!(comm.has_failed(1) && !comm.is_done(1, request));
    assert!(logged(&["rank 1: copies to rank 0: virtual GPU cannot go on"]));
    engine.fault(None);
    comm.wait(1, request);
    comm.end(&[&window, &table]);
}

#[test]
fn a_panic_becomes_an_error_and_the_plugin_goes_on() {
    let engine = Engine::start(18);
    let comm = Comm::new(2);
    let (window, table) = comm.register_with_table(64);
    let part = (window.handles[0], 0);
    let put = Put::new(part, part, 64).and(table.handles[0], 0, None);
    engine.fault(Some(Fault::Panic));
    let (code, _) = comm.put(0, 1, &put);
    engine.fault(None);
    assert_eq!(code, 3);
    assert!(logged(&["iputSignal: a panic in the plugin"]));
    comm.wait(0, comm.post(0, 1, &put));
    assert_eq!(table.word(1, 0), 1);
    comm.end(&[&window, &table]);
}

#[test]
fn ranks_of_other_processes_plugins_and_gpus_without_peer_access_are_refused_with_the_reason() {
    assert_eq!(init(), 0);
    Engine::start(19);
    let first = own_gpus(2);
    let refuse = |change: &dyn Fn(&mut [u8; HANDLE_BYTES]), reason: &str| {
        let mut listening = listen(first..first + 2);
        change(&mut listening[1].handle);
        let (code, coll) = connect(&listening.iter().map(|one| one.handle).collect::<Vec<_>>(), 0, &listening[0]);
        assert!(code != 0 && coll.is_null());
        assert!(logged(&["connect: ", reason]), "{reason}");
    };
    refuse(&|handle| handle[10] ^= 1, "rank 1 is in another process: its process has ended, or runs on another host");
    let no_key = |handle: &mut [u8; HANDLE_BYTES]| {
        handle[10] ^= 1;
        handle[40..64].fill(0);
    };
    refuse(&no_key, "rank 1 is in another process: it cannot share memory");
    refuse(&|handle| handle[0] = 0, "rank 1 has another RMA plugin, or another version");
    let far = (GPUS as u64 - 1).to_le_bytes();
    refuse(&|handle| handle[32..40].copy_from_slice(&far), "has no peer access to GPU 255 of rank 1");
    choose(None);
    let (mut handle, mut object) = ([0u8; HANDLE_BYTES], null_mut());
    // Safety: the table's functions, with valid pointers.
    let code =
        unsafe { (ncclRmaPlugin_v14.control.listen)(null_mut(), 0, handle.as_mut_ptr().cast(), &raw mut object) };
    assert!(code != 0 && logged(&["listen: ", "has chosen no GPU"]));
}

#[test]
fn memory_that_is_not_of_its_type_is_refused() {
    Engine::start(20);
    let comm = Comm::new(2);
    let mut words = vec![0u64; 8];
    let address = words.as_mut_ptr().expose_provenance() as u64;
    comm.register_at(0, address, 64, PTR_HOST, 0);
    for (address, bytes, kind, reason) in [
        (address, 64, PTR_CUDA, "not memory of a GPU"),
        (address, 0, PTR_HOST, "no memory to register"),
        (0, 64, PTR_HOST, "no memory to register"),
        (address, 64, 4, "a type of memory"),
    ] {
        let (code, handle) = comm.try_register_at(0, address, bytes, kind, 0);
        assert!(code != 0 && handle.is_null());
        assert!(logged(&["regMrSym: rank 0", reason]), "{reason}");
    }
    assert!(!comm.has_failed(0), "requests go on");
    comm.end(&[]);
}

#[test]
fn calls_leave_the_gpu_of_their_thread_as_it_was() {
    Engine::start(21);
    // Each call makes other GPUs the current one for a while. `connect` and `register` check the GPU, too.
    let comm = Comm::new(3);
    let window = comm.register(64, 0);
    choose(Some(comm.first_gpu + 1));
    let before = current();
    assert_eq!((init(), comm.deregister(0, window.handles[0]), current()), (0, 0, before));
    choose(None);
    assert_eq!((comm.deregister(1, window.handles[1]), current()), (0, None));
}

#[test]
fn the_tables_of_later_versions_do_the_same() {
    Engine::start(22);
    let comm = Comm::new(2);
    let (window, table) = comm.register_with_table(64);
    window.memory[0].write(0, &[4u64]).unwrap();
    let (own, word, context) = (window.handles[0], table.handles[0], comm.contexts[0]);
    let (mut context_object, mut flushes) = (null_mut(), true);
    let config = Config { contexts: 1, traffic_class: 0, rank_stride: 1 };
    // Safety of all: the table's functions, with valid pointers.
    unsafe {
        assert_eq!((ncclRmaPlugin_v15.start.init)(&raw mut context_object, 1, Some(logger())), 0);
        assert_eq!((ncclRmaPlugin_v16.start.init)(&raw mut context_object, 1, Some(logger())), 0);
        assert_eq!((ncclRmaPlugin_v16.get_rma_properties)(comm.colls[0], &raw mut flushes), 0);
        assert!(!flushes);
        let create = ncclRmaPlugin_v16.control.create_context;
        assert_eq!(create(comm.colls[0], &raw const config, &raw mut context_object), 0);
        assert_eq!((ncclRmaPlugin_v16.control.destroy_context)(context_object), 0);
        for (round, data) in [ncclRmaPlugin_v15.data, ncclRmaPlugin_v16.data].iter().enumerate() {
            let offset = 8 * (round as u64 + 1);
            let mut request = null_mut();
            assert_eq!((data.iput)(context, 0, 0, own, 8, offset, own, 1, 1, &raw mut request), 0);
            comm.wait(0, request);
            let put = data.iput_signal;
            assert_eq!(put(context, 1, 0, own, 8, 32, own, 1, 0, word, 2, 2, false, 1, &raw mut request), 0);
            comm.wait(0, request);
            assert_eq!((data.iget)(context, 0, 32, own, 8, 40, own, 1, 0, &raw mut request), 0);
            comm.wait(0, request);
            assert_eq!((window.word(1, offset / 8), window.word(0, 5)), (4, 4));
            assert_eq!(table.word(1, 0), 2 * (round as u64 + 1));
        }
    }
    comm.end(&[&window, &table]);
}

#[test]
fn null_pointers_are_errors() {
    gpus();
    // Safety: the functions check for null.
    unsafe {
        let table = &ncclRmaPlugin_v14;
        assert_ne!((table.start.devices)(null_mut()), 0);
        assert_ne!((table.control.get_properties)(0, null_mut()), 0);
        assert_ne!((table.control.close_coll)(null_mut()), 0);
        assert_ne!((table.control.destroy_context)(null_mut()), 0);
        assert_ne!((table.completion.test)(null_mut(), null_mut(), null_mut()), 0);
        assert_ne!((table.completion.rma_progress)(null_mut()), 0);
        let mut request = null_mut();
        assert_ne!((table.data.iput)(null_mut(), 0, 0, null_mut(), 8, 0, null_mut(), 0, &raw mut request), 0);
    }
}
