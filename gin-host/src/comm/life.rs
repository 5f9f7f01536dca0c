// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a communicator comes up and ends.

use super::gdaki::{self, Gdaki};
use super::reach;
use super::report::Place;
use super::resources::{Engines, Resources};
use super::symmetric::{self, Flat, Offered, PeerRange};
use super::window::Registered;
use super::wire::{agree, concerned, decode, encode, garbled};
use super::{Backend, Chosen, CommError, Communicator, Requirements, Routes, State};
use crate::proxy::progress::{Running, Together};
use crate::proxy::{Answer, Command, Counters, Limits, Parts, Proxy, answer};
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS};
use gin_abi::{BackendKind, CommHandle, FaultKind};
use gin_boot::rt;
use gin_boot::{BootstrapError, Channel};
use gin_gpu::quarantine::{Process, Sharers};
use gin_gpu::share;
use gin_net::nothing::Nothing;
use gin_net::{Capabilities, Endpoint, Fetch, Key, Network, Raises};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

/// Numbers of the communicators of this process.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// An active communicator.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) backend: BackendKind,
    pub(super) capabilities: Capabilities,
    pub(super) lsa_size: u32,
    pub(super) resources: Arc<Resources>,
    /// There if kernels drive a NIC.
    pub(super) gdaki: Option<Arc<Gdaki>>,
    pub(super) handle: CommHandle,
    pub(super) stats: Vec<Arc<Counters>>,
    pub(super) windows: Vec<Option<Arc<Registered>>>,
    pub(super) flat: Flat,
    /// Gets the data that windows of other ranks need before they are connected.
    pub(super) fetch: Option<Fetch>,
    /// The processes of its ranks.
    pub(super) sharers: Arc<Sharers>,
    channel: Arc<dyn Channel>,
    commands: Sender<Command>,
    progress: Option<Running>,
}

impl Live {
    /// Asks the proxy something and waits for its answer.
    pub(super) fn ask<T>(&self, command: impl FnOnce(mpsc::SyncSender<T>) -> Command) -> Result<T, CommError> {
        let (to, from): (_, Answer<T>) = answer();
        self.commands.send(command(to)).map_err(|_| CommError::ProxyGone)?;
        let mut outcome = Ok(None);
        rt::wait_until(|| {
            outcome = from.get();
            !matches!(outcome, Ok(None))
        });
        outcome.ok().flatten().ok_or(CommError::ProxyGone)
    }

    /// Waits until everything that kernels have posted is finished; the number of requests that are not after `limit`,
    /// or when a fault has ended the communicator.
    pub(super) fn drain(&self, limit: Duration) -> Result<u64, CommError> {
        let until_ns = after(limit);
        if let Some(gdaki) = &self.gdaki {
            match gdaki.drain(&|| rt::clock_ns() >= until_ns || self.channel.board().count() != 0)? {
                Ok(0) => {}
                Ok(left) => return Ok(left),
                // It ends the communicator; the caller learns that when the ranks agree.
                Err(fault) => self.channel.board().post(self.handle.rank, fault),
            }
        }
        let heads = self.resources.claims()?;
        self.ask(|to| Command::Drain { heads, until_ns, to })
    }

    /// Has the proxy stop and waits until it is gone; it never blocks, so this is soon.
    fn stop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(running) = self.progress.take() {
            rt::wait_until(|| running.is_finished());
            running.join();
            self.sharers.close();
        }
    }
}

impl Communicator {
    /// The steps of `initialise`.
    pub(super) fn bring_up(&self, requirements: &Requirements) -> Result<Live, CommError> {
        const CALL: &str = "initialise";
        let Met { lsa_size, chosen, processes } =
            self.meet(CALL, self.config.backend.choose(&*self.device, &self.config.nic))?;
        let own = self.numbers(requirements, lsa_size, &chosen);
        let prepared = chosen.and_then(|chosen| self.prepare(requirements, lsa_size, chosen));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let message = prepared.as_ref().map_err(CommError::clone).map(|prepared| prepared.message(number, &own));
        let all = agree(|bytes| self.bootstrap.all_gather(bytes), CALL, message)?;
        let mut prepared = prepared?;
        let heard = (0..).zip(&all).map(|(rank, message)| Heard::read(rank, message, &own));
        let heard = heard.collect::<Result<Vec<_>, _>>()?;
        let channel = self.bootstrap.channel(heard[0].number);
        let connected = self.connect(&mut prepared, heard, lsa_size);
        let board = channel.board().clone();
        agree(|bytes| self.bootstrap.all_gather(bytes), "finish initialising", connected.map(|()| Vec::new()))?;
        let over = prepared.network.describe();
        // From here on nothing can fail on one rank only, but for a thread that the system refuses.
        let live = self.start(requirements, lsa_size, prepared, channel, processes);
        let started = live.as_ref().map(|_| Vec::new()).map_err(CommError::clone);
        agree(|bytes| self.bootstrap.all_gather(bytes), "start", started)?;
        // Set once: a communicator becomes active at most once.
        let _ = self.shared.board.set(board);
        if let Ok(live) = &live {
            let Live { backend, lsa_size, .. } = *live;
            let (network, contexts) = (live.capabilities.name, requirements.contexts);
            let rank = self.rank();
            tracing::debug!(rank, number, ?backend, network, over, lsa_size, contexts, "communicator is up");
            let _ = self.shared.place.set(Place { backend, network, lsa_size });
            let _ = self.shared.resources.set(Arc::downgrade(&live.resources));
        }
        live
    }

    /// Finds out which ranks reach each other, and whether all can drive a NIC where that is left open; the size of LSA
    /// teams, what serves the communicator, and which processes the ranks are. Collective.
    fn meet(&self, call: &'static str, chosen: Result<Chosen, CommError>) -> Result<Met, CommError> {
        let gather = |bytes: Vec<u8>| agree(|bytes| self.bootstrap.all_gather(bytes), call, Ok(bytes));
        // Kept until all have looked.
        let offered = reach::offer_device(&self.device, self.is_across());
        let key = offered.as_ref().map(|(_, key)| key.0.clone()).map_err(CommError::clone);
        let keys = agree(|bytes| self.bootstrap.all_gather(bytes), call, key)?;
        let mut row = reach::row(&self.device, &keys);
        row.push(u8::from(matches!(chosen, Ok(Chosen::Gdaki(_)))));
        let mut rows = gather(row)?;
        let drive: Vec<_> = rows.iter_mut().map(Vec::pop).collect();
        let chosen = match self.config.backend {
            Backend::Auto if drive.contains(&Some(0)) => Ok(Chosen::Proxy),
            _ => chosen,
        };
        let (lsa_size, processes) = (reach::team_size(&rows, self.config.lsa_size)?, reach::processes(&keys)?);
        Ok(Met { lsa_size, chosen, processes })
    }

    /// Returns the numbers that all ranks must ask for alike.
    fn numbers(
        &self,
        requirements: &Requirements,
        lsa_size: u32,
        chosen: &Result<Chosen, CommError>,
    ) -> Vec<(&'static str, u64)> {
        let mut numbers = requirements.named().to_vec();
        numbers.push(("lsa_size", u64::from(lsa_size)));
        numbers.push(("routes", self.config.routes as u64));
        numbers.push(("backend", chosen.as_ref().map_or(0, |chosen| chosen.kind() as u64)));
        numbers
    }

    /// This rank's own part, before it meets the others.
    fn prepare(&self, requirements: &Requirements, lsa_size: u32, chosen: Chosen) -> Result<Prepared, CommError> {
        let (rank, ranks) = (self.rank(), self.ranks());
        requirements.check(ranks, lsa_size)?;
        requirements.check_connections(ranks, lsa_size, self.config.routes)?;
        let mut network: Box<dyn Network> = match &chosen {
            Chosen::Proxy => {
                let gpu = self.device.pci_address();
                (self.config.network)(&Endpoint { rank, ranks, seed: self.config.seed, gpu })
            }
            Chosen::Gdaki(nic) => Box::new(Nothing::new(gdaki::capabilities(nic))),
        };
        let (backend, capabilities) = (chosen.kind(), network.capabilities());
        requirements.check_network(&capabilities)?;
        let gpu = lsa_size > 1 && self.config.routes == Routes::Automatic;
        let gdaki = backend == BackendKind::Gdaki;
        let engines = Engines { gpu, nic: gdaki || capabilities.raises == Raises::Nic, cpu: !gdaki };
        let across = self.is_across();
        let resources = Resources::new(&self.device, requirements, ranks, lsa_size, engines, across)?;
        let signals = resources.local_signals().map(|signals| network.register_signals(&signals));
        let key = signals.transpose()?.unwrap_or_default();
        let gdaki = match chosen {
            Chosen::Proxy => None,
            Chosen::Gdaki(nic) => {
                let doorbells = (self.config.doorbells, self.config.release);
                let expired = until(self.config.connecting);
                let place = (rank, ranks, lsa_size);
                let gdaki = Gdaki::new(nic, &self.device, requirements, place, &resources, doorbells, &expired)?;
                Some(Arc::new(gdaki))
            }
        };
        let flat = symmetric::offer(&*self.device, rank, lsa_size, across);
        Ok(Prepared { backend, network, capabilities, resources, gdaki, key, flat, across })
    }

    /// Takes what the other ranks say.
    fn connect(&self, prepared: &mut Prepared, heard: Vec<Heard<'_>>, lsa_size: u32) -> Result<(), CommError> {
        let rank = self.rank();
        let offers: Vec<&[u8]> = heard.iter().map(|heard| heard.gdaki).collect();
        let (mut keys, mut peer_signals) = (Vec::new(), Vec::new());
        for (other, heard) in (0..).zip(heard) {
            let near = other / lsa_size == rank / lsa_size;
            if near && other != rank {
                let own = std::mem::replace(&mut prepared.flat, Ok(None));
                prepared.flat = heard.flat.join(own, other, other.is_multiple_of(lsa_size), self.is_across());
            }
            keys.push(heard.key);
            let raised = near && !heard.signals.is_empty();
            let taken = raised.then(|| reach::take_memory(other, heard.signals, &self.device));
            peer_signals.push(taken.transpose()?);
        }
        prepared.network.connect_signals(&keys)?;
        let gdaki = prepared.gdaki.as_ref();
        if let Some(gdaki) = gdaki {
            gdaki.connect(&offers, &until(self.config.connecting))?;
        }
        let busy = |context| gdaki.map_or(0, |gdaki| gdaki.busy(context));
        Ok(prepared.resources.fill_tables(peer_signals, busy)?)
    }

    fn start(
        &self,
        requirements: &Requirements,
        lsa_size: u32,
        prepared: Prepared,
        channel: Arc<dyn Channel>,
        processes: Vec<Process>,
    ) -> Result<Live, CommError> {
        let Prepared { backend, network, capabilities, resources, gdaki, flat, .. } = prepared;
        let (rank, ranks) = (self.rank(), self.ranks());
        let (resources, fetch) = (Arc::new(resources), network.fetch());
        let stats: Vec<Arc<Counters>> = (0..requirements.contexts).map(|_| Arc::new(Counters::new(ranks))).collect();
        let bits = |has, bit| if has { bit } else { 0 };
        let handle = resources.handle(
            requirements,
            backend,
            rank,
            lsa_size,
            bits(capabilities.strong_signals, CAP_STRONG_SIGNALS) | bits(capabilities.va_signals, CAP_VA_SIGNALS),
            self.config.trap_on_fault,
        );
        let handle = gdaki.as_ref().map_or(handle, |gdaki| gdaki.handle(handle));
        let sharers = Sharers::new(channel.board().clone(), processes);
        let (commands, receiver) = mpsc::channel();
        let parts = Parts {
            limits: Limits {
                rank,
                ranks,
                // At most the limit of ids: it was checked.
                signals: requirements.all_signals(ranks, lsa_size) as u32,
                counters: requirements.counters,
                capabilities,
                windows: (0..requirements.windows).map(|_| None).collect(),
            },
            contexts: resources.context_parts(
                &stats,
                #[cfg(feature = "reset-by-store")]
                (self.device.kind() == gin_gpu::DeviceKind::Virtual),
            ),
            first_index: requirements.first_index,
            max_outstanding: requirements.max_outstanding_per_peer as usize,
            max_message: requirements.max_message.min(capabilities.max_message),
            status: resources.status(),
            board: channel.board().clone(),
            network,
            commands: receiver,
            #[cfg(feature = "reset-by-store")]
            resets_by_store: self.config.resets_by_store,
            memory: Arc::new((resources.clone(), gdaki.clone())),
        };
        // Safety: the words lie in `resources`, which the proxy keeps alive, as it does the doorbells; the queues were
        // initialised for this index, and this is their only proxy.
        let proxy = unsafe { Proxy::new(parts) };
        let beside = gdaki.as_ref().and_then(|gdaki| gdaki.relay()).into_iter().collect();
        let name = format!("gin-proxy-{rank}");
        let progress = self
            .config
            .progress
            .start(&name, Box::new(Together::new(proxy, beside)))
            .map_err(|error| CommError::Backend { backend, reason: format!("no progress thread: {error}") })?;
        Ok(Live {
            backend,
            capabilities,
            lsa_size,
            resources,
            gdaki,
            handle,
            stats,
            windows: (0..requirements.windows).map(|_| None).collect(),
            flat,
            fetch,
            sharers,
            channel,
            commands,
            progress: Some(progress),
        })
    }

    /// Ends the communicator and frees what it has. Collective if it is active: then requests under way are finished
    /// first. One that was aborted, or that a fault ended, can be destroyed by each rank by itself.
    ///
    /// # Errors
    /// [`CommError::State`] if it is destroyed already; [`CommError::KernelsRunning`] if kernels run on a device of the
    /// job; [`CommError::InFlight`] if requests do not finish in time. It stays as it was then.
    pub fn destroy(&self) -> Result<(), CommError> {
        const CALL: &str = "destroy";
        self.seen(CALL, || self.end(CALL))
    }

    fn end(&self, call: &'static str) -> Result<(), CommError> {
        let mut live = self.enter(call)?;
        let state = self.shared.state();
        match state {
            State::Uninitialised => {
                self.shared.set(State::Destroyed);
                return Ok(());
            }
            State::Initialising | State::Destroyed => return Err(CommError::State { call, state }),
            State::Active => match live.as_ref().map_or(Ok(()), |live| self.settle(call, live)) {
                // It ended meanwhile: nobody has to agree any more.
                Err(CommError::Ended { .. }) => self.no_kernels(call)?,
                settled => {
                    settled?;
                    if let Some(Live { windows, sharers, .. }) = live.as_ref() {
                        windows.iter().flatten().for_each(|window| window.memory.memory().exposure().remove(sharers));
                    }
                }
            },
            State::Aborted => self.no_kernels(call)?,
        }
        if let Some(mut live) = live.take() {
            live.stop();
        }
        self.shared.set(State::Destroyed);
        Ok(())
    }

    /// # Errors
    /// [`CommError::KernelsRunning`] if kernels run on this rank's device.
    pub(super) fn no_kernels(&self, call: &'static str) -> Result<(), CommError> {
        match self.device.running() as u64 {
            0 => Ok(()),
            kernels => Err(CommError::KernelsRunning { call, rank: self.rank(), kernels }),
        }
    }

    /// Exchanges outcomes with all ranks of the active communicator.
    pub(super) fn agree(
        &self,
        live: &Live,
        call: &'static str,
        own: Result<Vec<u8>, CommError>,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        match (agree(|bytes| live.channel.all_gather(bytes), call, own), live.channel.board().first()) {
            (Err(CommError::Bootstrap(BootstrapError::Ended)), Some(notice)) => Err(self.ended(call, notice)),
            // All have met, as the rank that is lost gave its part before.
            (Err(error), Some(notice))
                if notice.fault.kind == FaultKind::PeerLost && concerned(&error) == Some(notice.fault.peer) =>
            {
                Err(self.ended(call, notice))
            }
            (outcome, _) => outcome,
        }
    }

    /// Makes sure, together with all ranks, that no kernel runs and no request is under way. Collective.
    pub(super) fn settle(&self, call: &'static str, live: &Live) -> Result<(), CommError> {
        // First the kernels of all ranks: while one runs, requests may come up again after they were counted.
        self.agree(live, call, self.no_kernels(call).map(|()| Vec::new()))?;
        // The second time each rank deals with what came from others that finished after it had.
        for _ in 0..2 {
            let limit = self.config.drain;
            let drained = live.drain(limit).and_then(|requests| {
                let waited_ms = limit.as_millis() as u64;
                match (requests, live.channel.board().first()) {
                    (0, _) => Ok(Vec::new()),
                    // They may stay under way because of it.
                    (_, Some(notice)) => Err(self.ended(call, notice)),
                    (_, None) => Err(CommError::InFlight { call, rank: self.rank(), requests, waited_ms }),
                }
            });
            match (self.agree(live, call, drained), live.channel.board().first()) {
                // That rank knew of the fault before it came; now this one does.
                (Err(CommError::OtherRank { .. }), Some(notice)) => return Err(self.ended(call, notice)),
                (outcome, _) => drop(outcome?),
            }
        }
        Ok(())
    }
}

/// The time after so long.
fn after(limit: Duration) -> u64 {
    rt::clock_ns().saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns whether that time is over.
fn until(limit: Duration) -> impl Fn() -> bool {
    let until_ns = after(limit);
    move || rt::clock_ns() >= until_ns
}

/// The first findings of ranks about each other.
struct Met {
    lsa_size: u32,
    chosen: Result<Chosen, CommError>,
    /// By rank.
    processes: Vec<Process>,
}

/// The parts of a rank before the ranks exchange messages.
struct Prepared {
    backend: BackendKind,
    network: Box<dyn Network>,
    capabilities: Capabilities,
    resources: Resources,
    gdaki: Option<Arc<Gdaki>>,
    key: Key,
    /// The error of a failed reservation matters only when a window is allocated.
    flat: Flat,
    /// Ranks are processes of their own.
    across: bool,
}

impl Prepared {
    /// Returns the message for the other ranks; [`Heard::read`] reads it.
    fn message(&self, number: u64, own: &[(&'static str, u64)]) -> Vec<u8> {
        let signals = self.resources.signals_gpu().map(|memory| share::offer(memory).0).unwrap_or_default();
        let own: Vec<u64> = own.iter().map(|(_, value)| *value).collect();
        let gdaki = self.gdaki.as_ref().map(|gdaki| gdaki.offer()).unwrap_or_default();
        let range = symmetric::key(&self.flat);
        encode(&(number, signals, &self.key.0, Offered::new(&self.flat, &range, self.across), own, gdaki))
    }
}

/// The message of another rank.
struct Heard<'a> {
    /// Its number for the communicator.
    number: u64,
    /// Key of the signal words that GPUs raise.
    signals: &'a [u8],
    key: Key,
    flat: PeerRange,
    gdaki: &'a [u8],
}

impl<'a> Heard<'a> {
    /// Reads the message of `rank`. `own`: the numbers that all must ask for alike.
    fn read(rank: u32, message: &'a [u8], own: &[(&'static str, u64)]) -> Result<Self, CommError> {
        type Message<'a> = (u64, &'a [u8], &'a [u8], Offered<'a>, Vec<u64>, &'a [u8]);
        let read = decode::<Message<'_>>(message).filter(|message| message.4.len() == own.len());
        let (number, signals, key, flat, values, gdaki) = read.ok_or_else(|| garbled(rank))?;
        for (&(what, own), theirs) in own.iter().zip(values) {
            if theirs != own {
                return Err(CommError::Disagreement { what, rank, theirs, own });
            }
        }
        Ok(Self { number, signals, key: Key(key.to_vec()), flat: flat.take(rank), gdaki })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let Some(mut live) = self.live.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take() else {
            return;
        };
        self.shared.abort();
        self.shared.set(State::Destroyed);
        if self.device.running() > 0 {
            // Kernels may look at the tables until they have noticed the abort; nothing tells when that is.
            std::mem::forget((live.resources.clone(), live.gdaki.clone()));
            for window in live.windows.iter().flatten() {
                std::mem::forget(window.clone());
            }
        }
        let _ = live.commands.send(Command::Stop);
        // While a panic unwinds nobody is waited for: the proxy owns what it uses and ends by itself.
        if !std::thread::panicking() {
            live.stop();
        }
    }
}
