// SPDX-License-Identifier: MIT OR Apache-2.0

//! Random sequences of calls with random handles, sizes and pointers: no call crashes, and each error has a text.

mod ep_calls;

use gin_abi::{CommHandle, WindowHandle};
use gin_capi::types::gin_status_t::GIN_OK;
use gin_capi::types::*;
use gin_capi::{comm::*, job::*, launch::*, status::*, window::*};
use proptest::prelude::*;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

const CONFIG: gin_config_t = gin_config_t {
    size: size_of::<gin_config_t>() as u32,
    abi: GIN_ABI_VERSION,
    device: 1,
    gpu: -1,
    network: 0,
    lsa_size: 0,
    network_only: 0,
    joining_ms: 1000,
    collective_ms: 1000,
    progress_threads: 0,
    survive_losses: 0,
    backend: 0,
    address: null(),
    nic: null(),
};

/// The handles that calls of a sequence have made, of all kinds, also closed ones.
#[derive(Default)]
struct Handles(Vec<u64>);

impl Handles {
    /// Chooses a handle: one that was made, one beside it, or a wild one.
    fn choose(&self, choice: u64) -> u64 {
        let known = || self.0[(choice >> 8) as usize % self.0.len()];
        match choice & 7 {
            _ if self.0.is_empty() => choice,
            0 => 0,
            1 => choice,
            2 => known() ^ 1 << (choice >> 40 & 63),
            _ => known(),
        }
    }
}

impl Handles {
    /// Chooses a handle, mostly one of a kind: the lowest byte.
    fn of_kind(&self, kind: u8, choice: u64) -> u64 {
        let known: Vec<u64> = self.0.iter().copied().filter(|id| *id as u8 == kind).collect();
        match known.len() as u64 {
            0 => self.choose(choice),
            _ if choice & 7 == 0 => self.choose(choice >> 3),
            // Later ones are more often open.
            count => known[(count - 1 - (choice >> 3) % count.min(3)) as usize],
        }
    }
}

/// Returns a configuration, of which one member may be wrong.
fn config(number: u64) -> gin_config_t {
    // A job of one rank waits for nobody.
    let good = gin_config_t { joining_ms: 100, address: c"127.0.0.1".as_ptr(), ..CONFIG };
    let some = (number >> 32) as u32;
    match number % 12 {
        0 => gin_config_t { size: some, ..good },
        1 => gin_config_t { abi: some, ..good },
        2 => gin_config_t { device: 3 + some % 9, ..good },
        3 => gin_config_t { gpu: -2 - (some % 9) as i32, ..good },
        4 => gin_config_t { network: 2 + some % 9, ..good },
        5 => gin_config_t { address: c"nowhere".as_ptr(), ..good },
        6 => gin_config_t { progress_threads: 257 + some % 9, ..good },
        8 => gin_config_t { backend: 3 + some % 9, ..good },
        9 => gin_config_t { backend: 1, nic: c"nowhere".as_ptr(), ..good },
        _ => good,
    }
}

/// Gives a single rank its own part. Fails for numbers that `user` points to, except 0.
unsafe extern "C" fn gathers(user: *mut c_void, own: *const c_void, bytes: usize, all: *mut c_void) -> i32 {
    // Safety: gin's promise, and that of the call.
    unsafe {
        all.cast::<u8>().copy_from_nonoverlapping(own.cast(), bytes);
        *user.cast()
    }
}

/// Joins a job of one process by an id that was made for it, or by another one.
///
/// # Safety
/// - As that of `gin_job_join`.
unsafe fn join(choice: u64, number: u64, made: *mut gin_job_t) -> gin_status_t {
    let (config, mut id) = (config(number), gin_unique_id_t { text: [choice as _; GIN_UNIQUE_ID_BYTES] });
    // Safety: the caller's promise.
    unsafe {
        match choice % 4 {
            0 => {
                for (to, byte) in id.text.iter_mut().zip(b"gin1:127.0.0.1:1:\0") {
                    *to = *byte as _;
                }
            }
            1 => {
                let status = gin_unique_id_create(&config, if number & 16 == 0 { null_mut() } else { &mut id });
                if status != GIN_OK {
                    return status;
                }
            }
            _ => id.text[choice as usize % GIN_UNIQUE_ID_BYTES] = 0,
        }
        let (rank, ranks) =
            if choice % 4 == 1 { (0, 1) } else { ((number >> 8) as u32 % 3, (number >> 16) as u32 % 3) };
        let join = if number & 32 == 0 { gin_job_join } else { gin_job_join_running };
        join(&config, &id, rank, ranks, made)
    }
}

/// The number of calls that are not of expert parallelism, and of all calls.
const OTHERS: u8 = 48;
const CALLS: u8 = OTHERS + ep_calls::CALLS;

/// Makes one call. Returns its status.
fn call(handles: &mut Handles, which: u8, choice: u64, number: u64) -> gin_status_t {
    if let Some(which) = which.checked_sub(OTHERS) {
        return ep_calls::call(handles, which, choice, number);
    }
    let id = handles.choose(choice);
    let (comm, window, stream) = (gin_comm_t { id }, gin_window_t { id }, gin_stream_t { id });
    let (job, module, kernel) = (gin_job_t { id }, gin_module_t { id }, gin_kernel_t { id });
    let (small, mut bytes) = (number % 5000, [0u8; 64]);
    let requirements = gin_requirements_t {
        size: size_of::<gin_requirements_t>() as u32 + u32::from(number.is_multiple_of(9)),
        contexts: (number >> 8) as u32 % 4,
        signals: (number >> 16) as u32 % 5,
        counters: 1,
        queue_depth: 1 << (number >> 24 & 7),
        world_barriers: 0,
        rail_barriers: 0,
        lsa_barriers: 1,
        windows: 4,
        max_outstanding_per_peer: 8,
    };
    let mut made = 0u64;
    // Safety: pointers are null, or to values of these types that live during the call. Windows over memory of the
    // program are never registered.
    let status = unsafe {
        match which {
            0 => {
                let progress_threads = if number & 4 == 0 { 0 } else { GIN_PROGRESS_MANUAL };
                let backend = if number & 8 == 0 { 0 } else { gin_backend_t::GIN_BACKEND_GDAKI_SOFT as u32 };
                let config = gin_config_t { progress_threads, backend, ..CONFIG };
                gin_job_local(&config, (number % 2) as u32, (&raw mut made).cast())
            }
            1 => gin_comm_create(job, &requirements, (&raw mut made).cast()),
            2 => gin_window_alloc(comm, small, (number >> 20) as u32 & 3, (&raw mut made).cast()),
            3 => gin_stream_create(job, (&raw mut made).cast()),
            4 => gin_module_load(job, null(), 0, (&raw mut made).cast()),
            5 => gin_module_kernel(module, c"no_kernel".as_ptr(), (&raw mut made).cast()),
            6 => gin_window_write(window, number, bytes.as_ptr().cast(), small % 65),
            7 => gin_window_read(window, small, bytes.as_mut_ptr().cast(), small % 65),
            8 => gin_window_read(window, 0, null_mut(), number),
            9 => {
                let mut device = std::mem::zeroed::<CommHandle>();
                gin_comm_device(comm, &mut device)
            }
            10 => {
                let mut device = std::mem::zeroed::<WindowHandle>();
                gin_window_device(window, &mut device)
            }
            11 => gin_comm_abort(comm),
            12 => gin_comm_check(comm),
            13 => {
                let (mut found, mut fault) = (0, std::mem::zeroed());
                gin_comm_fault(comm, &mut found, &mut fault)
            }
            14 => {
                let mut stats = gin_stats_t::default();
                gin_comm_stats(comm, number as u32, &mut stats)
            }
            15 => gin_comm_destroy(comm),
            16 => gin_comm_release(comm),
            17 => gin_window_close(window),
            18 => gin_stream_synchronize(stream),
            19 => gin_stream_close(stream),
            20 => gin_module_close(module),
            21 => gin_kernel_close(kernel),
            22 => gin_job_barrier(job),
            23 => gin_job_close(job),
            24 => gin_launch(stream, kernel, null(), null(), number as usize),
            25 => gin_job_all_gather(
                job,
                bytes.as_ptr().cast(),
                (number % 65) as usize,
                bytes.as_mut_ptr().cast::<c_void>(),
            ),
            26 => gin_job_rank(job, null_mut(), null_mut()),
            27 => gin_window_memory(window, null_mut(), std::ptr::without_provenance_mut(1)),
            28 => gin_job_local(null(), 1, null_mut()),
            29 => gin_stream_from_cuda(job, null_mut(), (&raw mut made).cast()),
            30 => gin_module_load(job, bytes.as_ptr().cast(), (number % 65) as usize, (&raw mut made).cast()),
            31 => gin_job_abort(job),
            32 => {
                let (mut lost, mut count) = ([0u32; 4], 0);
                gin_job_lost(job, lost.as_mut_ptr(), (number % 5) as usize, &mut count)
            }
            33 => {
                gin_job_without(job, [number as u32].as_ptr(), (number >> 40 & 1) as usize, 10, (&raw mut made).cast())
            }
            34 => {
                let device = std::mem::zeroed::<CommHandle>();
                gin_device_comm_check(std::ptr::from_ref(&device).byte_add((number % 9) as usize & 1))
            }
            35 => gin_device_window_check(null()),
            36 => gin_kernel_of_function(None, null(), null(), 0, (&raw mut made).cast()),
            37 => gin_window_release(window),
            38 => gin_comm_progress(comm, null_mut()),
            39 => join(choice, number, (&raw mut made).cast()),
            40 => gin_job_from_env(&config(number), (&raw mut made).cast()),
            41 => {
                let mut code = ((number >> 20) as i32 & 1) * number as i32;
                // Rank 0 of two ranks would wait for the other.
                let (rank, ranks) = [(0, 1), (1, 2), (1, 1), (number as u32 | 2, 2), (0, 0)][choice as usize % 5];
                let gather = (choice & 64 == 0).then_some(gathers as unsafe extern "C" fn(_, _, _, _) -> _);
                gin_job_over(&config(number), rank, ranks, gather, (&raw mut code).cast(), (&raw mut made).cast())
            }
            42 => {
                let mut kind = 0u32;
                gin_job_device(job, if number & 1 == 0 { &mut kind } else { null_mut() })
            }
            43 => gin_check_abi(number as u32 % (2 * GIN_ABI_VERSION)),
            44 => {
                assert!(!CStr::from_ptr(gin_status_name(number as u32 % 20)).is_empty());
                GIN_OK
            }
            45 => gin_job_grow(job, [number as u32].as_ptr(), (number >> 40 & 1) as usize, 10, (&raw mut made).cast()),
            46 => {
                let mut id = gin_unique_id_t { text: [0; GIN_UNIQUE_ID_BYTES] };
                gin_job_id(job, if number & 1 == 0 { &mut id } else { null_mut() })
            }
            _ => gin_window_register(comm, null_mut(), number, 0, (&raw mut made).cast()),
        }
    };
    if made != 0 {
        handles.0.push(made);
    }
    status
}

/// The calls that close a handle of each kind; an object of another one refuses. Slots first, for their group.
const CLOSE: [u8; 13] = [
    OTHERS + ep_calls::SLOT_CLOSE,
    OTHERS + ep_calls::GROUP_RELEASE,
    OTHERS + ep_calls::PERMUTED_CLOSE,
    OTHERS + ep_calls::PLAN_CLOSE,
    OTHERS + ep_calls::GRAPH_CLOSE,
    OTHERS + ep_calls::GROUPED_CLOSE,
    OTHERS + ep_calls::OVERLAPPED_CLOSE,
    15,
    17,
    19,
    20,
    21,
    23,
];

/// Returns the number of sequences: 60, or as many as `GIN_CAPI_CASES` says.
fn cases() -> u32 {
    std::env::var("GIN_CAPI_CASES").map_or(60, |cases| cases.parse().expect("GIN_CAPI_CASES is a number"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_of_calls_crashes_and_each_error_has_a_text(
        calls in proptest::collection::vec((0u8..CALLS, any::<u64>(), any::<u64>()), 1..60),
    ) {
        let mut handles = Handles::default();
        // A job, a communicator with one context, a window, a stream, a module: later calls close them in any order.
        prop_assert_eq!(call(&mut handles, 0, 0, 1), GIN_OK);
        let job = handles.0[0];
        prop_assert_eq!(call(&mut handles, 1, 3, 0x101), GIN_OK);
        let comm = handles.0[1];
        for (which, id) in [(2, comm), (3, job), (4, job), (OTHERS, comm)] {
            let mut one = Handles(vec![id]);
            prop_assert_eq!(call(&mut one, which, 3, 100), GIN_OK, "{}", text());
            handles.0.extend(&one.0[1..]);
        }
        for (which, choice, number) in calls {
            let status = call(&mut handles, which, choice, number);
            if status != GIN_OK {
                // Safety: the text lives until this thread's next error.
                let text = unsafe { CStr::from_ptr(gin_last_error()) }.to_string_lossy().into_owned();
                prop_assert!(text.starts_with("gin_") && text.len() > 20 && is_for_people(&text), "call {which}: {text}");
                prop_assert!(status != gin_status_t::GIN_ERROR_INTERNAL, "call {which}: {text}");
            }
        }
        // The rest is closed by kind: a communicator whose kernels run would stay, and slots wait for their kernels.
        for close in CLOSE {
            for &id in &handles.0 {
                let status = call(&mut Handles(vec![id]), close, 3, 0);
                prop_assert!(status != gin_status_t::GIN_ERROR_BUSY, "call {close}: {}", text());
            }
        }
    }

    #[test]
    fn a_wild_handle_is_never_an_object(id in any::<u64>()) {
        let _ = (gin_job_barrier(gin_job_t { id }), gin_comm_abort(gin_comm_t { id }));
        prop_assert_eq!(gin_stream_close(gin_stream_t { id }), gin_status_t::GIN_ERROR_HANDLE);
    }
}

/// Returns whether an error speaks to the caller: it has no value in the form for debugging, and no number in
/// hexadecimal digits but an address, a handle or flags that the caller gave.
fn is_for_people(text: &str) -> bool {
    let own_address = text.starts_with("gin_window_register: ");
    let kinds = [
        "handle",
        "job",
        "communicator",
        "window",
        "stream",
        "module",
        "kernel",
        "flags are",
        "graph",
        "group",
        "slot",
        "plan",
        "product",
        "layout",
    ];
    let is_handle = |before: &str| kinds.iter().any(|kind| before.ends_with(&format!("{kind} ")));
    let foreign = !own_address && text.match_indices("0x").any(|(at, _)| !is_handle(&text[..at]));
    text.len() <= 600 && !text.contains("Mutex") && !text.contains("{ ") && !foreign
}

/// Each function of the header that can fail fails in some way, with a text for people.
#[test]
fn every_function_fails_with_a_text_for_people() {
    // Of 44 the outcome is a name, 11 and 31 fail only for handles that do not exist.
    for which in (0..CALLS).filter(|which| *which != 44) {
        let mut handles = Handles::default();
        assert_eq!(call(&mut handles, 0, 0, 1), GIN_OK);
        let job = handles.0[0];
        assert_eq!(call(&mut handles, 1, 3, 0x101), GIN_OK);
        let comm = handles.0[1];
        let mut texts = std::collections::BTreeSet::new();
        for (choice, number) in
            (0..6).flat_map(|choice| (0..40).map(move |number| (choice, number * 0x1_0101_0101_0101)))
        {
            // A handle of either kind, and none.
            for handle in [Some(job), Some(comm), None] {
                // An object that is closed here is no more there for the next call.
                if handle.is_some() && [15, 16, 23].contains(&which) {
                    continue;
                }
                let mut one = Handles(handle.into_iter().collect());
                let known = one.0.len();
                if call(&mut one, which, if handle.is_some() { 3 } else { choice }, number) != GIN_OK {
                    // Safety: the text lives until this thread's next error.
                    texts.insert(unsafe { CStr::from_ptr(gin_last_error()) }.to_string_lossy().into_owned());
                }
                for made in one.0.split_off(known) {
                    for close in CLOSE {
                        let _ = call(&mut Handles(vec![made]), close, 3, 0);
                    }
                }
            }
        }
        assert!(!texts.is_empty(), "call {which} has never failed");
        for text in texts {
            assert!(text.starts_with("gin_") && is_for_people(&text), "call {which}: {text}");
        }
        let _ = (gin_comm_destroy(gin_comm_t { id: comm }), gin_job_close(gin_job_t { id: job }));
    }
}

/// The random sequences reach the calls that make jobs of processes.
#[test]
fn jobs_of_one_process_are_made_over_an_id_and_an_all_gather() {
    let mut handles = Handles::default();
    for (which, choice, number) in [(39, 1, 19), (41, 0, 7)] {
        assert_eq!(call(&mut handles, which, choice, number), GIN_OK);
    }
    for (id, number) in handles.0.iter().zip(0..) {
        let mut one = Handles(vec![*id]);
        assert_eq!(call(&mut one, 42, 3, number * 2), GIN_OK);
        assert_eq!(call(&mut one, 23, 3, 0), GIN_OK);
    }
    assert_eq!(handles.0.len(), 2);
}

/// The random sequences reach dispatches and combines that succeed.
#[test]
fn calls_of_the_sequences_exchange_and_combine_rows() {
    let mut handles = Handles::default();
    for (which, choice, number) in ep_calls::one_dispatch() {
        assert_eq!(call(&mut handles, which, choice, number), GIN_OK, "call {which}: {}", text());
    }
    for &id in &handles.0 {
        for close in CLOSE {
            let _ = call(&mut Handles(vec![id]), close, 1, 0);
        }
    }
}

/// Programs with a thread for each rank launch while others ask for their communicators.
#[test]
fn a_check_of_a_communicator_does_not_refuse_its_owners_calls() {
    let mut handles = Handles::default();
    assert_eq!(call(&mut handles, 0, 0, 1), GIN_OK);
    assert_eq!(call(&mut handles, 1, 3, 0x101), GIN_OK);
    let (job, comm) = (gin_job_t { id: handles.0[0] }, gin_comm_t { id: handles.0[1] });
    let read = || {
        // Safety: zeros are a value of this type, which the call writes.
        unsafe {
            let mut handle = std::mem::zeroed::<CommHandle>();
            (gin_comm_device(comm, &raw mut handle), handle)
        }
    };
    let (status, handle) = read();
    assert_eq!(status, GIN_OK);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..300_000 {
                // Safety: reads a value of this type.
                assert_eq!(unsafe { gin_device_comm_check(&raw const handle) }, GIN_OK);
            }
        });
        for _ in 0..300_000 {
            assert_eq!(read().0, GIN_OK);
        }
    });
    assert_eq!(gin_comm_destroy(comm), GIN_OK);
    // Safety: reads a value of this type.
    assert_eq!(unsafe { gin_device_comm_check(&raw const handle) }, gin_status_t::GIN_ERROR_HANDLE);
    assert_eq!(gin_job_close(job), GIN_OK);
}

/// Returns this thread's text of its last error.
fn text() -> String {
    // Safety: the text lives until this thread's next error.
    unsafe { CStr::from_ptr(gin_last_error()) }.to_string_lossy().into_owned()
}

#[test]
fn the_text_of_an_error_is_that_of_its_thread() {
    assert_eq!(gin_stream_close(gin_stream_t { id: 0 }), gin_status_t::GIN_ERROR_HANDLE);
    let own = text();
    let other = std::thread::spawn(|| {
        let before = text();
        assert_eq!(gin_comm_check(gin_comm_t { id: 0 }), gin_status_t::GIN_ERROR_HANDLE);
        (before, text())
    });
    let (before, after) = other.join().expect("the thread has ended");
    assert!(own.starts_with("gin_stream_close") && after.starts_with("gin_comm_check"), "{own}; {after}");
    assert_eq!((before, text()), (String::new(), own));
}

#[test]
fn calls_beside_one_that_waits_for_other_ranks_are_busy_but_four() {
    let requirements = gin_requirements_t {
        size: size_of::<gin_requirements_t>() as u32,
        contexts: 1,
        signals: 1,
        counters: 1,
        queue_depth: 8,
        world_barriers: 0,
        rail_barriers: 0,
        lsa_barriers: 0,
        windows: 4,
        max_outstanding_per_peer: 8,
    };
    let create = |job: gin_job_t| {
        let mut comm = gin_comm_t { id: 0 };
        // Safety: pointers to values of these types.
        (unsafe { gin_comm_create(job, &requirements, &mut comm) }, comm)
    };
    let alloc = |comm: gin_comm_t| {
        let mut window = gin_window_t { id: 0 };
        // Safety: as above.
        unsafe { gin_window_alloc(comm, 64, 0, &mut window) }
    };
    let stats = |comm: gin_comm_t| {
        let mut stats = gin_stats_t::default();
        // Safety: as above.
        unsafe { gin_comm_stats(comm, 0, &mut stats) }
    };
    let mut jobs = [gin_job_t { id: 0 }; 2];
    let config = gin_config_t { collective_ms: 60_000, ..CONFIG };
    // Safety: pointers to values of these types.
    assert_eq!(unsafe { gin_job_local(&config, 2, jobs.as_mut_ptr()) }, GIN_OK);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| create(jobs[1]));
        let (status, comm) = create(jobs[0]);
        let (of_other, other) = other.join().expect("the thread has ended");
        assert_eq!((status, of_other), (GIN_OK, GIN_OK));
        // Rank 0 waits for rank 1 until that makes the call, too, then until an abort.
        for aborts in [false, true] {
            // A call of the other thread, which asks below, may refuse it at first.
            let waiting = scope.spawn(move || {
                loop {
                    let status = alloc(comm);
                    if status != gin_status_t::GIN_ERROR_BUSY {
                        return status;
                    }
                }
            });
            while stats(comm) == GIN_OK {
                std::thread::yield_now();
            }
            // Safety: pointers to values of these types.
            let busy = unsafe {
                let mut device = std::mem::zeroed::<CommHandle>();
                [stats(comm), alloc(comm), gin_comm_device(comm, &mut device), gin_comm_destroy(comm)]
            };
            assert_eq!(busy, [gin_status_t::GIN_ERROR_BUSY; 4], "{}", text());
            let mut found = 1;
            // Safety: as above.
            let answers = unsafe {
                let mut fault = std::mem::zeroed();
                [
                    gin_comm_check(comm),
                    gin_comm_fault(comm, &mut found, &mut fault),
                    gin_comm_progress(comm, null_mut()),
                ]
            };
            assert_eq!((answers, found), ([GIN_OK; 3], 0), "{}", text());
            let expected = if aborts {
                assert_eq!(gin_comm_abort(comm), GIN_OK);
                gin_status_t::GIN_ERROR_ENDED
            } else {
                assert_eq!(alloc(other), GIN_OK);
                GIN_OK
            };
            assert_eq!(waiting.join().expect("the thread has ended"), expected);
        }
        assert_eq!([gin_comm_destroy(comm), gin_comm_destroy(other)], [GIN_OK; 2]);
    });
    assert_eq!(jobs.map(|job| gin_job_close(job)), [GIN_OK; 2]);
}
