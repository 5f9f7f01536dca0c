// SPDX-License-Identifier: MIT OR Apache-2.0
//! The words that the models share, and the exploration of models.
//!
//! A model is a sentence about a protocol and a program of two or three threads that would falsify it. loom runs the
//! program in every interleaving, up to a bound of preemptions, and with every value that a relaxed load may return.

pub mod ep;
pub mod faults;
pub mod gdaki;
pub mod inbox;
pub mod mailbox;
pub mod matmul;
pub mod orders;
pub mod print;
pub mod queue;
pub mod signals;
#[cfg(target_os = "linux")]
mod stacks;
pub mod status;

use gin_abi::{Deadline, Fault, FaultKind, Operation};
use gin_device::internal::host_word;
use gin_device::internal::order::{Scope, Sharing, release};
use gin_device::internal::queue::{Consumer, Producer, Queue};
use gin_device::internal::signal_words::Words;
use gin_device::internal::status::{Status, WaitError};
use gin_device::sys::loom::{Arena, Loom, LoomWord, begin, mutated};
use gin_device::sys::{Memory, Word};
use loom::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Number of words of a slot: one pair, so that a request can be torn.
pub const N: usize = 2;

/// Returns every model with its name.
pub fn all() -> Vec<(&'static str, fn())> {
    [
        status::MODELS,
        signals::MODELS,
        inbox::MODELS,
        mailbox::MODELS,
        queue::MODELS,
        gdaki::MODELS,
        gdaki::contention::MODELS,
        gdaki::alone::MODELS,
        orders::MODELS,
        print::MODELS,
        faults::MODELS,
        ep::MODELS,
        matmul::MODELS,
    ]
    .concat()
}

/// Declares models. Each is a test, and an entry of `MODELS` for the mutation tests.
macro_rules! models {
    ($($(#[$meta:meta])* fn $name:ident() $body:block)*) => {
        $($(#[$meta])* fn $name() $body)*

        pub const MODELS: &[(&str, fn())] = &[$((stringify!($name), $name)),*];

        mod tests {
            $(#[test] fn $name() { super::$name() })*
        }
    };
}
pub(crate) use models;

/// The number of preemptions that each model has fewer, for a short first search.
pub static FEWER: AtomicUsize = AtomicUsize::new(0);

/// The environment variable with the number of preemptions that each model has more, for a longer search.
const MORE_VARIABLE: &str = "GIN_MODEL_MORE_PREEMPTIONS";

/// Runs a model in every way with up to `preemptions` preemptions, and prints the number of ways.
pub fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let runs = Arc::new(AtomicU64::new(0));
    let counted = runs.clone();
    let mut builder = loom::model::Builder::new();
    builder.max_threads = 4;
    builder.max_branches = 2_000;
    let more = std::env::var(MORE_VARIABLE).map_or(0, |more| more.parse().expect("a number of preemptions"));
    let less = FEWER.load(Ordering::Relaxed);
    builder.preemption_bound = Some((preemptions + more).saturating_sub(less));
    begin();
    let start = std::time::Instant::now();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{} runs in {:.1} s", runs.load(Ordering::Relaxed), start.elapsed().as_secs_f32());
}

/// An event that must happen in at least one run. Otherwise the model proves less than its name states.
#[derive(Clone)]
pub struct Reached(&'static str, Arc<AtomicBool>);

impl Reached {
    pub fn new(what: &'static str) -> Self {
        Self(what, Arc::default())
    }

    pub fn mark(&self) {
        self.1.store(true, Ordering::Relaxed);
    }

    /// Checks that the event happened, after all runs. Does not check mutated protocols, for which only failures count,
    /// nor a search with fewer preemptions.
    pub fn check(&self) {
        let partial = mutated() || FEWER.load(Ordering::Relaxed) != 0;
        assert!(partial || self.1.load(Ordering::Relaxed), "no run reached: {}", self.0);
    }
}

/// A cell of plain memory: loom fails a run in which two accesses to it are not ordered.
pub struct Cell(UnsafeCell<u64>);

// Safety: loom checks each access and panics on a race.
unsafe impl Sync for Cell {}

impl Cell {
    pub fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    pub fn write(&self, value: u64) {
        // Safety: loom panics if another access is not ordered with this one.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    pub fn read(&self) -> u64 {
        // Safety: as above.
        self.0.with(|cell| unsafe { *cell })
    }
}

/// The parameters of a world.
#[derive(Default)]
pub struct Setup {
    pub depth_log2: u32,
    /// The first index of the queue.
    pub first: u64,
    /// Number of peers in the table of oldest incomplete requests.
    pub peers: u64,
    /// Initial words of each signal: those of GPUs, the NIC and CPU threads, and the baseline.
    pub signals: Vec<[Option<u64>; 4]>,
    /// Number of cells of plain memory.
    pub cells: usize,
}

/// One queue, the status blocks, some signals and some plain memory.
pub struct World {
    pub queue: Queue<Loom, N>,
    pub status: Status<Loom>,
    pub signals: Vec<Words<Loom>>,
    pub cells: Vec<Cell>,
    first: u64,
    // The handles above point into the arena.
    _arena: Arena,
}

impl World {
    pub fn new(setup: Setup) -> Arc<Self> {
        const STATUS_WORDS: usize = 8;
        let slots = N << setup.depth_log2;
        let near = slots + 4;
        let oldest = near + (2 + setup.peers as usize) * host_word::WORDS as usize;
        let status = oldest + setup.peers as usize;
        let signals = status + 3 * STATUS_WORDS;
        let near_signals = signals + 3 * setup.signals.len();
        let word = |value: &Option<u64>| value.unwrap_or(0);
        let values = std::iter::repeat_n(0, signals)
            .chain(setup.signals.iter().flat_map(|values| values[..3].iter().map(word).collect::<Vec<_>>()))
            .chain(setup.signals.iter().flat_map(|values| [0, 0, word(&values[3]), 0, word(&values[2]), 0, 0, 0]));
        let arena = Arena::new(values);
        let queue = Queue {
            slots: arena.word(0),
            producer_index: arena.word(slots),
            near: arena.word(near),
            consumer_index: arena.word(slots + 2),
            completion_index: arena.word(slots + 3),
            // Not used without peers, because then there is no queue.
            oldest_incomplete: arena.word(oldest - usize::from(setup.peers == 0)),
            depth_log2: setup.depth_log2,
            depth_mask: (1 << setup.depth_log2) - 1,
        };
        if setup.peers > 0 {
            queue.initialise(setup.first, setup.peers);
        }
        let block = |index| arena.word(status + index * STATUS_WORDS);
        let words = setup.signals.iter().enumerate().map(|(index, values)| {
            let word = |engine: usize| values[engine].map(|_| arena.word(signals + 3 * index + engine));
            let near = arena.word(near_signals + host_word::WORDS as usize * index);
            Words { gpu: word(0), nic: word(1), cpu: word(2), near, mailbox: None }
        });
        Arc::new(Self {
            queue,
            status: Status { host: block(0), kernel: block(1), copy: block(2) },
            signals: words.collect(),
            cells: (0..setup.cells).map(|_| Cell::new()).collect(),
            first: setup.first,
            _arena: arena,
        })
    }

    /// Returns the fault that ended a wait.
    pub fn fault_of<T: std::fmt::Debug>(&self, outcome: Result<T, WaitError>) -> Fault {
        assert_eq!(outcome.err(), Some(WaitError::Fault));
        self.status.cause()
    }

    pub fn producer(&self) -> Producer<Loom, N> {
        Producer { queue: self.queue, status: self.status }
    }

    pub fn consumer(&self) -> Consumer<Loom, N> {
        // Safety: the queue was initialised for `first`; each model has one consumer at a time.
        unsafe { Consumer::new(self.queue, self.first) }
    }

    /// Returns the request that names cell `cell`. Its words differ from those of every other request.
    pub fn request(&self, cell: usize) -> [u64; N] {
        let tag = (cell as u64 + 1) << 1;
        [tag, !tag & !1]
    }

    /// Returns the cell of a request, and checks that the request is whole.
    pub fn cell_of(&self, index: u64, words: [u64; N]) -> usize {
        let (low, high) = (words[0] & !1, words[1] & !1);
        assert_eq!(high, !low & !1, "request {index} is torn");
        (low >> 1) as usize - 1
    }

    /// Fills cell `cell` and releases it, as the front end does with payload.
    pub fn write(&self, cell: usize) {
        self.cells[cell].write(cell as u64 + 100);
        release::<Loom>(Scope::Thread, Scope::System);
    }

    /// Fills cell `cell` and posts a request that names it. Returns the request's index.
    pub fn post(&self, cell: usize) -> u64 {
        let producer = self.producer();
        self.write(cell);
        let index = producer.claim(true, 1, Sharing::Gpu);
        self.fill(index, self.request(cell), Deadline::NONE).expect("nothing stops a fill");
        index
    }

    /// Fills a claimed slot.
    pub fn fill(&self, index: u64, words: [u64; N], deadline: Deadline) -> Result<u64, WaitError> {
        let posted = self.producer().post(words, |_| Some(index), deadline);
        posted.map_err(|(stop, claimed)| {
            assert_eq!(claimed, Some(index));
            stop
        })
    }

    /// Looks for room once; if there is room, claims a slot and fills it. An error has the index of a claimed slot.
    pub fn post_now(&self, cell: usize) -> Result<u64, (WaitError, Option<u64>)> {
        self.post_within(cell, Deadline::after_ns(0))
    }

    /// Claims a slot once there is room, and fills it. An error has the index of a claimed slot.
    pub fn post_within(&self, cell: usize, deadline: Deadline) -> Result<u64, (WaitError, Option<u64>)> {
        let producer = self.producer();
        producer.post(self.request(cell), |seen| producer.claim_if_room(0, seen, Sharing::Gpu), deadline)
    }

    /// Waits for the next request and checks it and its payload. Does not take it.
    pub fn next(&self, consumer: &Consumer<Loom, N>) -> usize {
        let cell = self.next_cell(consumer);
        assert_eq!(self.cells[cell].read(), cell as u64 + 100, "payload of request {}", consumer.head());
        cell
    }

    /// Waits for the next request and checks it, but not its payload. Does not take it.
    pub fn next_cell(&self, consumer: &Consumer<Loom, N>) -> usize {
        loop {
            if let Some(words) = consumer.peek() {
                return self.cell_of(consumer.head(), words);
            }
            Loom::pause(0);
        }
    }
}

/// Returns a fault whose words all differ and depend on `seed`.
pub fn fault(seed: u64) -> Fault {
    Fault::new(FaultKind::Network, Operation::Put).with_context(seed as u32).with_peer(seed as u32 + 10).with_values(
        gin_abi::FaultSubject::Signal(seed as u32),
        seed + 20,
        seed + 30,
    )
}

/// Loads a word with acquire until it is not `0`. The threads of a model synchronise by it.
pub fn await_word(word: LoomWord) {
    while word.load_acquire_sys() == 0 {
        Loom::pause(0);
    }
}
