// SPDX-License-Identifier: MIT OR Apache-2.0

//! The device types over a network of this test in the place of NCCL: the functions that a kernel is linked with on a
//! GPU, on CPU threads. Requests of a rank to a peer arrive in their order and late; others in any order.

use gin_device::internal::status::Status;
use gin_device::sys::{Global, GlobalWord};
use gin_nccl_device::handle::{CommHandle, WindowHandle};
use gin_nccl_device::nccl::{BarrierSession, Comm, Gin, Window};
use gin_nccl_device::prelude::{
    BarrierTeam, ContextId, CounterId, Deadline, Fault, FaultKind, Fence, Gdaki, Operation, Proxy, Rank, Scope,
    Sharing, SignalId, Thread,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

const RANKS: usize = 3;
const SIGNALS: usize = 16;
/// The first signal of the barriers.
const BARRIERS: u32 = 4;
/// `1 << NCCL_GIN_TYPE_PROXY`.
const PROXY: u32 = 4;

/// A request in flight.
enum Request {
    Put { to: u64, from: u64, bytes: u64 },
    Get { to: u64, from: u64, bytes: u64 },
    Value { to: u64, value: u64, bytes: u64 },
    Raise { signal: usize, amount: u64 },
}

/// One rank: its signals, and its ways to all ranks.
struct RankState {
    signals: [AtomicU64; SIGNALS],
    shadows: [AtomicU64; SIGNALS],
    counter: AtomicU64,
    /// Gets in flight.
    gets: AtomicU64,
    ways: Vec<Mutex<Sender<Vec<Request>>>>,
    /// The arguments of the last call.
    last: Mutex<Vec<u64>>,
    status: [AtomicU64; 24],
}

/// The ranks of a job. A communicator's first word is the address of its rank's state.
struct Job {
    ranks: Vec<Arc<RankState>>,
}

impl Job {
    /// Makes the ranks, and a thread for each pair that carries its requests out.
    fn new(seed: u64) -> Self {
        gin_virtual::install();
        let mut ends = Vec::new();
        let ranks: Vec<Arc<RankState>> = (0..RANKS)
            .map(|_| {
                let (ways, receivers): (Vec<_>, Vec<_>) = (0..RANKS).map(|_| channel()).unzip();
                ends.push(receivers);
                Arc::new(RankState {
                    signals: Default::default(),
                    shadows: Default::default(),
                    counter: AtomicU64::new(0),
                    gets: AtomicU64::new(0),
                    ways: ways.into_iter().map(Mutex::new).collect(),
                    last: Mutex::default(),
                    status: Default::default(),
                })
            })
            .collect();
        for (rank, receivers) in ends.into_iter().enumerate() {
            for (peer, requests) in receivers.into_iter().enumerate() {
                let (sender, receiver) = (Arc::downgrade(&ranks[rank]), ranks[peer].clone());
                let mut random = oorandom::Rand32::new(seed * 100 + (rank * RANKS + peer) as u64);
                thread::spawn(move || {
                    for request in requests {
                        thread::sleep(Duration::from_micros(u64::from(random.rand_range(0..60))));
                        for part in request {
                            let Some(sender) = sender.upgrade() else { return };
                            part.carry_out(&sender, &receiver);
                        }
                    }
                });
            }
        }
        Self { ranks }
    }

    fn comm(&self, rank: usize) -> Comm {
        let state = &self.ranks[rank];
        let mut dev_comm = [0; 32];
        dev_comm[0] = Arc::as_ptr(state).addr() as u64;
        let block = |index: usize| state.status.as_ptr().addr() as u64 + 64 * index as u64;
        let handle = CommHandle {
            dev_comm,
            host_status: block(0),
            kernel_status: block(1),
            kernel_status_copy: block(2),
            rank: rank as u32,
            ranks: RANKS as u32,
            lsa_rank: 0,
            lsa_size: 1,
            contexts: 2,
            signals: BARRIERS,
            counters: 1,
            barriers: 1,
            backend: PROXY,
            reserved: 0,
        };
        // Safety: the job outlives the communicators of its tests.
        unsafe { Comm::from_handle(handle) }
    }

    fn abort(&self, rank: usize) {
        let word = |index: usize| self.ranks[rank].status.as_ptr().addr() as u64 + 64 * index as u64;
        // Safety: the words of the state.
        let status: Status<Global> = unsafe {
            Status { host: GlobalWord::new(word(0)), kernel: GlobalWord::new(word(1)), copy: GlobalWord::new(word(2)) }
        };
        status.post(Fault::new(FaultKind::Aborted, Operation::None));
    }
}

impl Request {
    fn carry_out(self, sender: &RankState, receiver: &RankState) {
        match self {
            // Safety: the tests put between windows that live longer.
            Self::Put { to, from, bytes } => unsafe {
                std::ptr::copy_nonoverlapping(from as usize as *const u8, to as usize as *mut u8, bytes as usize);
                sender.counter.fetch_add(1, Ordering::Release);
            },
            // Safety: as above.
            Self::Get { to, from, bytes } => unsafe {
                std::ptr::copy_nonoverlapping(from as usize as *const u8, to as usize as *mut u8, bytes as usize);
                sender.gets.fetch_sub(1, Ordering::Release);
            },
            // Safety: as above; words are stored whole.
            Self::Value { to, value, bytes } => unsafe {
                assert_eq!(bytes, 8);
                (*(to as usize as *const AtomicU64)).store(value, Ordering::Relaxed);
            },
            Self::Raise { signal, amount } => {
                receiver.signals[signal].fetch_add(amount, Ordering::Release);
            }
        }
    }
}

/// Returns the state of the calling rank.
///
/// # Safety
/// - `comm` is of [`Job::comm`].
unsafe fn state<'a>(comm: *const c_void) -> &'a RankState {
    // Safety: the caller's promise.
    unsafe { &*(*comm.cast::<u64>() as usize as *const RankState) }
}

fn post(state: &RankState, peer: u32, mut parts: Vec<Request>, raise: Option<(u32, u64)>) {
    parts.extend(raise.map(|(signal, amount)| Request::Raise { signal: signal as usize, amount }));
    state.ways[peer as usize].lock().unwrap().send(parts).unwrap();
}

/// Returns the address of a byte of a window at a peer: the window is a table of addresses.
fn place(window: *const c_void, peer: u32, offset: u64) -> u64 {
    // Safety: the tests make the tables.
    unsafe { *window.cast::<u64>().add(peer as usize) + offset }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_put(
    comm: *const c_void,
    context: u32,
    mask: u32,
    sharing: u32,
    peer: u32,
    to: *const c_void,
    to_offset: u64,
    from: *const c_void,
    from_offset: u64,
    bytes: u64,
    has_signal: bool,
    signal: u32,
    amount: u64,
    has_counter: bool,
    counter: u32,
    given: u32,
    required: u32,
    options: u32,
) {
    // Safety: a communicator of a job.
    let state = unsafe { state(comm) };
    let numbers = [context, mask, sharing, peer, signal, counter, given, required, options].map(u64::from);
    let rest = [to_offset, from_offset, bytes, amount, has_signal.into(), has_counter.into()];
    *state.last.lock().unwrap() = [&numbers[..], &rest].concat();
    let me = state.ways.len() as u64; // The table's last entry is the own part.
    let put = Request::Put { to: place(to, peer, to_offset), from: place(from, me as u32, from_offset), bytes };
    post(state, peer, vec![put], has_signal.then_some((signal, amount)));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_get(
    comm: *const c_void,
    context: u32,
    mask: u32,
    sharing: u32,
    peer: u32,
    there: *const c_void,
    there_offset: u64,
    here: *const c_void,
    here_offset: u64,
    bytes: u64,
    options: u32,
) {
    // Safety: a communicator of a job.
    let state = unsafe { state(comm) };
    let numbers = [context, mask, sharing, peer, options].map(u64::from);
    *state.last.lock().unwrap() = [&numbers[..], &[there_offset, here_offset, bytes]].concat();
    let me = state.ways.len() as u32; // The table's last entry is the own part.
    let get = Request::Get { to: place(here, me, here_offset), from: place(there, peer, there_offset), bytes };
    state.gets.fetch_add(1, Ordering::Relaxed);
    post(state, peer, vec![get], None);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_put_value(
    comm: *const c_void,
    _context: u32,
    _mask: u32,
    _sharing: u32,
    peer: u32,
    to: *const c_void,
    to_offset: u64,
    value: u64,
    bytes: u64,
    has_signal: bool,
    signal: u32,
    amount: u64,
    _given: u32,
    _required: u32,
    _options: u32,
) {
    let put = Request::Value { to: place(to, peer, to_offset), value, bytes };
    // Safety: a communicator of a job.
    post(unsafe { state(comm) }, peer, vec![put], has_signal.then_some((signal, amount)));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_signal(
    comm: *const c_void,
    _context: u32,
    _mask: u32,
    _sharing: u32,
    peer: u32,
    signal: u32,
    amount: u64,
    _given: u32,
    _required: u32,
    _options: u32,
) {
    // Safety: a communicator of a job.
    post(unsafe { state(comm) }, peer, Vec::new(), Some((signal, amount)));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_flush(comm: *const c_void, _context: u32, _mask: u32, _order: u32) {
    // Safety: a communicator of a job.
    while unsafe { state(comm) }.gets.load(Ordering::Acquire) != 0 {
        thread::yield_now();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_read_signal(comm: *const c_void, _: u32, _: u32, signal: u32, bits: u32, _: u32) -> u64 {
    // Safety: a communicator of a job.
    let value = unsafe { state(comm) }.signals[signal as usize].load(Ordering::Relaxed);
    if bits == 64 { value } else { value & ((1 << bits) - 1) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_read_counter(comm: *const c_void, _: u32, _: u32, _: u32, bits: u32, _: u32) -> u64 {
    // Safety: a communicator of a job.
    unsafe { state(comm) }.counter.load(Ordering::Relaxed) & ((1 << bits) - 1)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_reset_signal(comm: *const c_void, _: u32, _: u32, signal: u32) {
    // Safety: a communicator of a job.
    unsafe { state(comm) }.signals[signal as usize].store(0, Ordering::Relaxed);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_reset_counter(comm: *const c_void, _: u32, _: u32, _: u32) {
    // Safety: a communicator of a job.
    unsafe { state(comm) }.counter.store(0, Ordering::Relaxed);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_signal_shadow(comm: *const c_void, _: u32, _: u32, signal: u32) -> *mut u64 {
    // Safety: a communicator of a job.
    unsafe { state(comm) }.shadows[signal as usize].as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gin_nccl_world_barrier(_comm: *const c_void) -> u32 {
    BARRIERS
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NCCL's name")]
unsafe extern "C" fn ncclGetLsaPointer(window: *const c_void, offset: u64, lsa_rank: u32) -> *mut c_void {
    place(window, lsa_rank, offset) as usize as *mut c_void
}

/// A window of words: a part for each rank. The parts are never freed, because a request may still be in flight when
/// its test ends.
struct Words {
    parts: Vec<&'static [AtomicU64]>,
    /// For each rank, the addresses of all parts, then that of its own.
    tables: Vec<Vec<u64>>,
}

impl Words {
    fn new(len: usize) -> Self {
        let part = |_| &*Vec::leak((0..len).map(|_| AtomicU64::new(0)).collect());
        let parts: Vec<&[AtomicU64]> = (0..RANKS).map(part).collect();
        let addresses: Vec<u64> = parts.iter().map(|part| part.as_ptr().addr() as u64).collect();
        let tables = (0..RANKS).map(|rank| [&addresses[..], &[addresses[rank]]].concat()).collect();
        Self { parts, tables }
    }

    fn window(&self, rank: usize) -> Window<u64> {
        let handle = WindowHandle {
            window: self.tables[rank].as_ptr().addr() as u64,
            base: self.parts[rank].as_ptr().addr() as u64,
            bytes: 8 * self.parts[rank].len() as u64,
            lsa_first: rank as u32,
            lsa_size: 1,
        };
        // Safety: the words outlive the window.
        unsafe { Window::from_handle(handle) }
    }
}

const SOON: Deadline = Deadline::after_ms(50);
const LATE: Deadline = Deadline::after_ms(20_000);

/// Runs `work` for each rank in a thread.
fn on_ranks(work: impl Fn(usize) -> Result<(), Fault> + Sync) {
    thread::scope(|scope| {
        let work = &work;
        for rank in 0..RANKS {
            scope.spawn(move || work(rank).unwrap_or_else(|fault| panic!("rank {rank}: {fault}")));
        }
    });
}

#[test]
fn after_a_barrier_the_values_of_all_ranks_have_arrived_in_every_round() {
    for seed in 0..3 {
        let (job, words) = (Job::new(seed), Words::new(2 * RANKS));
        on_ranks(|rank| {
            let (comm, window) = (job.comm(rank), words.window(rank));
            let gin = Gin::new(&comm, ContextId::new(0));
            let mut barrier = BarrierSession::new(&gin, BarrierTeam::World, 0)?;
            for round in 1..=100 {
                let half = RANKS * (round as usize & 1);
                for step in 0..RANKS as u32 {
                    gin.put_value(comm.world().after(step), window.at(half + rank), round).issue(&Thread)?;
                }
                barrier.sync(&Thread, Fence::Put, LATE)?;
                for from in 0..RANKS {
                    let seen = words.parts[rank][half + from].load(Ordering::Relaxed);
                    assert_eq!(seen, round, "rank {rank} from {from}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_barrier_that_a_rank_misses_ends_at_the_deadline_and_is_refused_afterwards() {
    let job = Job::new(7);
    let comm = job.comm(1);
    let gin = Gin::new(&comm, ContextId::new(0));
    let mut barrier = BarrierSession::new(&gin, BarrierTeam::World, 0).unwrap();
    let fault = barrier.sync(&Thread, Fence::None, SOON).unwrap_err();
    assert_eq!((fault.kind(), fault.peer(), fault.expected(), fault.seen()), (FaultKind::Timeout, 2, 1, 0));
    assert_eq!(barrier.sync(&Thread, Fence::None, SOON).unwrap_err().kind(), FaultKind::BarrierBroken);
    for (team, index) in [(BarrierTeam::World, 1), (BarrierTeam::Lsa, 0), (BarrierTeam::Rail, 0)] {
        let fault = BarrierSession::new(&gin, team, index).unwrap_err();
        assert_eq!(fault.kind(), FaultKind::UnknownBarrier);
    }
}

#[test]
fn a_put_arrives_before_its_signal_and_counts_when_it_has_left() {
    let (job, to, from) = (Job::new(1), Words::new(64), Words::new(64));
    for (index, word) in from.parts[0].iter().enumerate() {
        word.store(100 + index as u64, Ordering::Relaxed);
    }
    let (sender, receiver) = (job.comm(0), job.comm(2));
    let (gin, at) = (Gin::new(&sender, ContextId::new(1)), Gin::new(&receiver, ContextId::new(1)));
    let put = gin.put(sender.world().left(), to.window(0).range(8, 16), from.window(0).range(4, 16));
    put.signal(SignalId::new(3).add(5)).counter(CounterId::new(0)).more().issue(&Thread).unwrap();
    at.wait_signal(&Thread, SignalId::new(3), 5, LATE).unwrap();
    for index in 0..16 {
        assert_eq!(to.parts[2][8 + index].load(Ordering::Relaxed), 104 + index as u64);
    }
    assert_eq!((at.read_signal(SignalId::new(3)).unwrap(), at.read_signal(SignalId::new(3).bits(2)).unwrap()), (5, 1));
    gin.wait_counter(&Thread, CounterId::new(0), 1, LATE).unwrap();
    at.reset_signal(SignalId::new(3)).unwrap();
    gin.reset_counter(CounterId::new(0)).unwrap();
    assert_eq!((at.read_signal(SignalId::new(3)).unwrap(), gin.read_counter(CounterId::new(0)).unwrap()), (0, 0));
    // Context, mask of proxy and GDAKI, sharing, peer, signal, counter, scopes, `AggregateRequests`; offsets, bytes,
    // amount, and the two flags.
    let expected = [1, 12, 0, 2, 3, 0, 10, 0, 2, 64, 32, 128, 5, 1, 1];
    assert_eq!(*job.ranks[0].last.lock().unwrap(), expected);
    let narrow = Gin::<Proxy>::with_backend(&sender, ContextId::new(0)).shared_by(Sharing::Thread);
    let put = narrow.put(sender.world().right(), to.window(0).at(0), from.window(0).at(0));
    put.released(Scope::Block).required(Scope::Gpu).issue(&Thread).unwrap();
    assert_eq!(job.ranks[0].last.lock().unwrap()[..9], [0, 4, 2, 1, 0, 0, 2, 1, 0]);
}

#[test]
fn a_get_is_visible_after_a_flush_and_after_a_barrier_with_a_get_fence() {
    let (job, words, copies) = (Job::new(4), Words::new(8), Words::new(8));
    on_ranks(|rank| {
        let (comm, from, to) = (job.comm(rank), words.window(rank), copies.window(rank));
        let gin = Gin::new(&comm, ContextId::new(0));
        let mut barrier = BarrierSession::new(&gin, BarrierTeam::World, 0)?;
        let (peer, seen) = (comm.world().right(), |index: usize| copies.parts[rank][index].load(Ordering::Relaxed));
        let expected = |round: u64| 100 * round + u64::from(peer.world());
        for round in 1..=30 {
            words.parts[rank][2].store(100 * round + rank as u64, Ordering::Relaxed);
            barrier.sync(&Thread, Fence::None, LATE)?;
            gin.get(peer, to.range(3, 1), from.range(2, 1)).issue(&Thread)?;
            gin.flush(&Thread)?;
            assert_eq!(seen(3), expected(round));
            gin.get(peer, to.range(4, 1), from.range(2, 1)).more().issue(&Thread)?;
            barrier.sync(&Thread, Fence::Get, LATE)?;
            assert_eq!(seen(4), expected(round));
            barrier.sync(&Thread, Fence::None, LATE)?;
        }
        Ok(())
    });
    // Context, mask of proxy and GDAKI, sharing, peer, `AggregateRequests`; offsets there and here, bytes.
    assert_eq!(*job.ranks[1].last.lock().unwrap(), [0, 12, 0, 2, 2, 16, 32, 8]);
}

#[test]
fn waits_end_by_deadline_and_by_abort_and_count_on_a_circle() {
    let job = Job::new(2);
    let comm = job.comm(0);
    let gin = Gin::new(&comm, ContextId::new(0));
    let signal = SignalId::new(1);
    job.ranks[0].signals[1].store(3, Ordering::Relaxed);
    let fault = gin.wait_signal(&Thread, signal, 4, SOON).unwrap_err();
    assert_eq!((fault.kind(), fault.expected(), fault.seen()), (FaultKind::Timeout, 4, 3));
    // 3 is 5 past 14 on a circle of 16 values, and 14 is not past 3.
    gin.wait_signal(&Thread, signal.bits(4), 14, SOON).unwrap();
    assert_eq!(gin.wait_signal(&Thread, signal.bits(4), 4, SOON).unwrap_err().kind(), FaultKind::Timeout);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| gin.wait_counter(&Thread, CounterId::new(0), 1, Deadline::NONE));
        thread::sleep(Duration::from_millis(20));
        job.abort(0);
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), FaultKind::Aborted);
    });
    assert_eq!(gin.flush(&Thread).unwrap_err().kind(), FaultKind::Aborted);
}

#[test]
fn wrong_arguments_are_faults_and_nothing_is_posted() {
    let (job, words) = (Job::new(3), Words::new(8));
    let (comm, window) = (job.comm(0), words.window(0));
    let gin = Gin::new(&comm, ContextId::new(0));
    let peer = comm.world().right();
    let whole = window.range(0, 8);
    let kind = |result: Result<(), Fault>| result.unwrap_err().kind();
    assert_eq!(kind(gin.put(peer, window.range(1, 8), whole).issue(&Thread)), FaultKind::OutOfRange);
    assert_eq!(kind(gin.put(peer, whole, window.range(usize::MAX, 2)).issue(&Thread)), FaultKind::OutOfRange);
    assert_eq!(kind(gin.put(peer, whole, window.range(0, 4)).issue(&Thread)), FaultKind::LengthMismatch);
    assert_eq!(kind(gin.get(peer, window.range(1, 8), whole).issue(&Thread)), FaultKind::OutOfRange);
    assert_eq!(kind(gin.get(peer, whole, window.range(8, 1)).issue(&Thread)), FaultKind::OutOfRange);
    assert_eq!(kind(gin.get(peer, window.range(0, 4), whole).issue(&Thread)), FaultKind::LengthMismatch);
    assert_eq!(kind(gin.put_value(peer, window.at(8), 1).issue(&Thread)), FaultKind::OutOfRange);
    assert_eq!(kind(gin.put_value(peer, whole, 1).issue(&Thread)), FaultKind::LengthMismatch);
    let (bad_signal, bad_counter) = (SignalId::new(BARRIERS), CounterId::new(1));
    assert_eq!(kind(gin.signal(peer, bad_signal.inc()).issue(&Thread)), FaultKind::UnknownSignal);
    assert_eq!(kind(gin.put(peer, whole, whole).counter(bad_counter).issue(&Thread)), FaultKind::UnknownCounter);
    assert_eq!(kind(gin.wait_signal(&Thread, bad_signal, 1, SOON)), FaultKind::UnknownSignal);
    assert_eq!(kind(gin.read_counter(CounterId::new(0).bits(57)).map(|_| ())), FaultKind::BadWidth);
    assert_eq!(kind(Gin::new(&comm, ContextId::new(2)).flush(&Thread)), FaultKind::UnknownContext);
    let gdaki = Gin::<Gdaki>::with_backend(&comm, ContextId::new(0));
    assert_eq!(kind(gdaki.signal(peer, SignalId::new(0).inc()).issue(&Thread)), FaultKind::NoBackend);
    // Safety: only the check of the team.
    let outside = unsafe { Rank::new_unchecked(1) };
    assert_eq!(window.peer_ptr(outside).unwrap_err().kind(), FaultKind::NotReachable);
    assert_eq!(window.peer_ptr(comm.world().me()).unwrap(), window.local_ptr());
    assert!(job.ranks[0].last.lock().unwrap().is_empty());
}
