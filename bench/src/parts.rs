// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts of a round trip over the proxy. From bare trips to gin, each row puts one part of gin in the place of its
//! bare twin.

use super::figure::Figure;
use super::lab::{Lab, Play, Rounds, Shape};
use super::proxy::{RANKS, both, word};
use super::table::{Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_abi::descriptor::WORDS;
use gin_abi::handle::{NEAR_WORDS, QUEUE_NEAR};
use gin_abi::{ContextData, Descriptor, Transfer};
use gin_boot::rt;
use gin_device::internal::mailbox::{self, Entry, Sender, Value};
use gin_device::internal::queue::phase;
use gin_device::sys::{Global, Memory as _, Word};
use gin_gpu::{GpuError, KernelArg, Memory, MemoryKind};
use gin_host::comm::{CommError, Communicator, Requirements, Routes, WindowFlags};
use gin_host::proxy::Turn;
use gin_host::proxy::progress::{Progress, Running, Step, Work};
use gin_host::world::Rank;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The CPU side of a round trip.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Server {
    /// A thread that only polls the queue, stores the value and raises the signal.
    Bare,
    /// The same, but it hands value and signal to the receiver's mailbox.
    BareMailbox,
    /// gin's proxy, stepped in a loop without anything between two steps.
    Stepped,
    /// gin's proxy on its progress thread.
    Gin,
}

/// A round trip of known parts.
#[derive(Clone, Copy, Debug)]
struct Part {
    what: &'static str,
    kernel: &'static str,
    server: Server,
    memory: MemoryKind,
}

/// Returns the parts, from bare ones to gin's.
const fn parts() -> [Part; 13] {
    const fn part(what: &'static str, kernel: &'static str, server: Server) -> Part {
        Part { what, kernel, server, memory: MemoryKind::Pinned }
    }
    const fn in_gpu(what: &'static str, server: Server) -> Part {
        Part { what, kernel: "bench_proxy_ping", server, memory: MemoryKind::Device }
    }
    [
        part("bare kernel that posts a whole descriptor, bare thread", "part_posts", Server::Bare),
        part("and releases before", "part_releases", Server::Bare),
        part("and claims its slot", "part_claims", Server::Bare),
        part("and waits as gin does", "part_waits", Server::Bare),
        part("and looks for the mailbox", "part_drains", Server::Bare),
        part("gin's kernel, bare thread", "bench_proxy_ping", Server::Bare),
        part("bare kernel, gin's proxy in a loop", "part_posts", Server::Stepped),
        part("bare kernel, gin's progress thread", "part_posts", Server::Gin),
        part("gin's kernel, gin's proxy in a loop", "bench_proxy_ping", Server::Stepped),
        part("gin's kernel, gin's progress thread", "bench_proxy_ping", Server::Gin),
        in_gpu("GPU memory: gin's kernel, bare thread with a mailbox", Server::BareMailbox),
        in_gpu("GPU memory: gin's kernel, gin's proxy in a loop", Server::Stepped),
        in_gpu("GPU memory: gin's kernel, gin's progress thread", Server::Gin),
    ]
}

/// Work that is stepped often before its engine has a turn, which finds it always busy.
struct Often(Work);

impl Step for Often {
    fn step(&mut self) -> Turn {
        for _ in 0..64 {
            if self.0.step() == Turn::Finished {
                return Turn::Finished;
            }
        }
        Turn::Worked
    }

    fn broke(&mut self) {
        self.0.broke();
    }
}

/// An engine that steps work [often](Often).
#[derive(Debug)]
struct Loop(Arc<dyn Progress>);

impl Progress for Loop {
    fn start(&self, name: &str, work: Work) -> std::io::Result<Running> {
        self.0.start(name, Box::new(Often(work)))
    }
}

/// log2 of the number of slots of a queue, as communicators have by default.
const DEPTH_LOG2: u32 = 8;
/// Words of a cache line of a GPU.
const LINE: u64 = 16;

/// A context without a proxy: the words that kernels use, in the layout of a communicator's context.
struct Context {
    table: Arc<Memory>,
    _near: Arc<Memory>,
    pinned: Arc<Memory>,
}

/// Places of the words in pinned memory. The slots come first.
const CONSUMER: u64 = (WORDS as u64) << DEPTH_LOG2;
const COMPLETION: u64 = CONSUMER + LINE;
const OLDEST: u64 = COMPLETION + LINE;
const SIGNAL: u64 = OLDEST + LINE;
const MAILBOX: u64 = SIGNAL + LINE;

impl Context {
    fn new(lab: &Lab<'_>) -> Result<Self, CommError> {
        // All words of a new queue, a new signal and a new mailbox are 0, except the addresses.
        let pinned = lab.memory(MemoryKind::Pinned, MAILBOX + mailbox::pinned_words::<Global>())?;
        let queue_words = QUEUE_NEAR / 8 + (2 + u64::from(RANKS)) * NEAR_WORDS;
        let (mail, signal_near) = (queue_words, queue_words + mailbox::SIGNALS);
        let shadow = signal_near + NEAR_WORDS;
        let near = lab.memory(MemoryKind::Device, shadow + 1)?;
        let (at_pinned, at_near) = (|place: u64| pinned.address() + 8 * place, |place: u64| near.address() + 8 * place);
        near.write(8 * (mail + mailbox::PINNED), &[at_pinned(MAILBOX)])?;
        let data = ContextData {
            producer_index: at_near(0),
            consumer_index: at_pinned(CONSUMER),
            slots: at_pinned(0),
            depth_log2: DEPTH_LOG2 as u16,
            depth_mask: (1 << DEPTH_LOG2) - 1,
            oldest_incomplete: at_pinned(OLDEST),
            completion_index: at_pinned(COMPLETION),
            signal_cpu: at_pinned(SIGNAL),
            signal_near: at_near(signal_near),
            signal_shadow: at_near(shadow),
            mailbox: at_near(mail),
            ..bytemuck::Zeroable::zeroed()
        };
        let table = lab.memory(MemoryKind::Device, size_of::<ContextData>() as u64 / 8)?;
        table.write(0, &[data])?;
        Ok(Self { table, _near: near, pinned })
    }

    fn at(&self, place: u64) -> u64 {
        self.pinned.address() + 8 * place
    }
}

/// The bare thread of a rank.
struct Bare {
    slots: u64,
    consumer_index: u64,
    /// The other rank's signal and value.
    signal: u64,
    value: u64,
    /// The other rank's mailbox, if it gets the value by that.
    mailbox: Option<Sender<Global>>,
    /// Index of the next request.
    next: u64,
    stop: Arc<AtomicBool>,
}

impl Bare {
    /// Carries out the next request if all of it is there.
    fn poll(&mut self) {
        let slot = word(self.slots).at((self.next & ((1 << DEPTH_LOG2) - 1)) * WORDS as u64);
        let (phase, mut words) = (phase(self.next, DEPTH_LOG2), [0; WORDS]);
        for (at, into) in (0..).zip(&mut words) {
            *into = slot.at(at).load_relaxed_sys();
            if *into & 1 != phase {
                return;
            }
        }
        Global::fence_acquire_sys();
        // Words of another kind carry nothing, and then the other rank's kernel finds a wrong value or none.
        let Ok(Descriptor { transfer: Transfer::PutValue { value, width_log2, .. }, .. }) = Descriptor::decode(&words)
        else {
            return;
        };
        match &self.mailbox {
            None => {
                word(self.value).store_relaxed_sys(value);
                word(self.signal).add_release_sys(1);
            }
            Some(mailbox) => {
                let value = Some(Value { address: self.value, value, width_log2 });
                if mailbox.post(&Entry { value, signal: Some((0, 1)) }).is_none() {
                    return mailbox.want();
                }
            }
        }
        self.next += 1;
        word(self.consumer_index).store_release_sys(self.next);
    }
}

impl Step for Bare {
    fn step(&mut self) -> Turn {
        for _ in 0..64 {
            self.poll();
        }
        if self.stop.load(Ordering::Acquire) { Turn::Finished } else { Turn::Worked }
    }

    fn broke(&mut self) {}
}

/// Measures the round trip of one part. Collective.
fn trip(lab: &Lab<'_>, part: &Part, rounds: &Rounds) -> Result<Figure, CommError> {
    let rank = lab.rank;
    let config = rank.comm_config().clone();
    let config = match part.server {
        Server::Stepped => config.progress(Arc::new(Loop(rank.comm_config().progress.clone()))),
        Server::Bare | Server::BareMailbox | Server::Gin => config,
    };
    let comm = Communicator::new(rank.bootstrap().clone(), rank.device().clone(), config);
    comm.initialise(&Requirements::default().signals(1).counters(0).queue_depth(1 << DEPTH_LOG2))?;
    let memory = lab.memory(part.memory, 1)?;
    let window = comm.register::<u64>(&memory.whole(), WindowFlags::NONE)?;
    let (mut handle, context, stop) = (comm.device()?.handle(), Context::new(lab)?, Arc::new(AtomicBool::new(false)));
    let own = [context.at(SIGNAL), context.at(MAILBOX), memory.address()];
    let all = rank.bootstrap().all_gather(bytemuck::cast_slice(&own))?;
    let [signal, mailbox, value]: [u64; 3] = bytemuck::pod_read_unaligned(&all[1 - rank.rank() as usize]);
    let running = match part.server {
        Server::Stepped | Server::Gin => None,
        Server::Bare | Server::BareMailbox => {
            handle.context_table = context.table.address();
            let bare = Bare {
                slots: context.at(0),
                consumer_index: context.at(CONSUMER),
                signal,
                value,
                mailbox: (part.server == Server::BareMailbox).then(|| Sender { pinned: word(mailbox) }),
                next: 0,
                stop: stop.clone(),
            };
            let running = rank.comm_config().progress.start("gin-bench", Box::new(bare));
            let failed =
                |error: std::io::Error| GpuError::Driver { context: "start a thread", reason: error.to_string() };
            Some(running.map_err(failed)?)
        }
    };
    let (before, arguments): (_, [&dyn KernelArg; 2]) = (Cell::new(0), [&handle, &window]);
    let shape = Shape::one(part.kernel, 1);
    let play = Play { shape, comm: Some(&comm), arguments: &arguments, before: &before, module: None };
    let figures = lab.play(&[play], rounds, true);
    // The other rank's kernel waits for this rank's thread until here.
    rank.barrier()?;
    stop.store(true, Ordering::Release);
    if let Some(running) = running {
        rt::wait_until_named("the end of a thread", || running.is_finished());
        running.join();
    }
    // The other rank's thread uses this rank's memory until here.
    drop(window);
    end(rank, &comm)?;
    Ok(figures?[0])
}

/// Measures the parts of a round trip over the proxy.
pub(super) fn trips(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let rounds = bench.long_rounds();
    let (repeats, rounds) = (rounds.launches, Rounds { launches: 1, ..rounds });
    let parts = parts();
    let measure = |rank: &Rank| -> Result<Vec<Vec<Figure>>, CommError> {
        let (lab, mut all) = (Lab::new(rank)?, vec![Vec::new(); parts.len()]);
        // All ranks have loaded their kernels before any kernel waits.
        rank.barrier()?;
        for _ in 0..repeats {
            for (part, figures) in parts.iter().zip(&mut all) {
                figures.push(trip(&lab, part, &rounds)?);
            }
        }
        Ok(all)
    };
    let mut config = bench.world(RANKS)?;
    config.comm.routes = Routes::Network;
    let ranks = bench.on_ranks(config, measure)?;
    let [first, second] = &ranks[..] else { return Err("a rank returned no figures".into()) };
    let rows = parts.iter().zip(first.iter().zip(second));
    let rows = rows.map(|(part, (one, other))| Row::new(part.what, both(one, other), "us"));
    let mut table = bench.table("Proxy round trip, in parts", RANKS, rows.collect());
    table.notes.push("Values to pinned memory, if a row does not say otherwise".to_owned());
    Ok(vec![table])
}
