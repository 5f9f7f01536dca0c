// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a communicator comes up and ends.

use super::flat::{self, Flat};
use super::reach;
use super::resources::Resources;
use super::window::Registered;
use super::wire::{Reader, Writer, agree, garbled};
use super::{BootstrapError, Channel, CommError, Communicator, Requirements, State};
use crate::net::{Capabilities, Endpoint, Key, Network};
use crate::proxy::progress::Running;
use crate::proxy::{Answer, Command, Counters, Limits, Parts, Proxy, answer};
use crate::rt;
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS};
use gin_abi::{BackendKind, CommHandle};
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
    pub(super) handle: CommHandle,
    pub(super) stats: Vec<Arc<Counters>>,
    pub(super) windows: Vec<Option<Arc<Registered>>>,
    pub(super) flat: Flat,
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

    /// Waits until everything that kernels have posted is finished; the number of requests that are not after `limit`.
    pub(super) fn drain(&self, limit: Duration) -> Result<u64, CommError> {
        let heads = self.resources.claims()?;
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let until_ns = rt::clock_ns().saturating_add(limit);
        self.ask(|to| Command::Drain { heads, until_ns, to })
    }

    /// Has the proxy stop and waits until it is gone; it never blocks, so this is soon.
    fn stop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(running) = self.progress.take() {
            rt::wait_until(|| running.is_finished());
            running.join();
        }
    }
}

impl Communicator {
    /// The steps of `initialise`.
    pub(super) fn bring_up(&self, requirements: &Requirements) -> Result<Live, CommError> {
        const CALL: &str = "initialise";
        let rank = self.rank();
        let lsa_size = self.meet(CALL)?;
        let prepared = self.prepare(requirements, lsa_size);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = self.numbers(requirements, lsa_size);
        let message = prepared.as_ref().map_err(CommError::clone).map(|prepared| {
            let mut message = Writer::default();
            let signals = prepared.resources.signals_gpu().map(|memory| reach::offer_memory(memory).0);
            message.word(number).bytes(&signals.unwrap_or_default()).bytes(&prepared.key.0);
            flat::write(&mut message, &prepared.flat);
            for (_, value) in &own {
                message.word(*value);
            }
            message.0
        });
        let all = agree(|bytes| self.bootstrap.all_gather(bytes), CALL, message)?;
        let mut prepared = prepared?;
        let (mut keys, mut peer_signals, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        for (other, message) in (0..).zip(&all) {
            let mut reader = Reader(message);
            let first = (|| Some((reader.word()?, reader.bytes()?, reader.bytes()?)))();
            let (number, signals, key) = first.ok_or_else(|| garbled(other))?;
            let theirs = flat::take(other, &mut reader).ok_or_else(|| garbled(other))?;
            if other == rank - rank % lsa_size && other != rank {
                prepared.flat = theirs;
            }
            for (what, value) in &own {
                let theirs = reader.word().ok_or_else(|| garbled(other))?;
                if theirs != *value {
                    return Err(CommError::Disagreement { what, rank: other, theirs, own: *value });
                }
            }
            numbers.push(number);
            keys.push(Key(key.to_vec()));
            let near = other / lsa_size == rank / lsa_size && !signals.is_empty();
            peer_signals.push(if near { Some((other, signals)) } else { None });
        }
        let taken: Result<Vec<_>, CommError> = peer_signals
            .into_iter()
            .map(|signals| signals.map(|(other, key)| reach::take_memory(other, key)).transpose())
            .collect();
        let connected = (prepared.network.connect_signals(&keys).map_err(CommError::from))
            .and_then(|()| Ok(prepared.resources.fill_tables(taken?)?));
        let channel = self.bootstrap.channel(numbers[0]);
        let board = channel.board().clone();
        agree(|bytes| self.bootstrap.all_gather(bytes), "finish initialising", connected.map(|()| Vec::new()))?;
        // From here on nothing can fail on one rank only, but for a thread that the system refuses.
        let live = self.start(requirements, lsa_size, prepared, channel);
        let started = live.as_ref().map(|_| Vec::new()).map_err(CommError::clone);
        agree(|bytes| self.bootstrap.all_gather(bytes), "start", started)?;
        // Set once: a communicator becomes active at most once.
        let _ = self.shared.board.set(board);
        if let Ok(live) = &live {
            let _ = self.shared.resources.set(Arc::downgrade(&live.resources));
        }
        live
    }

    /// Finds out which ranks reach each other; the size of LSA teams. Collective.
    fn meet(&self, call: &'static str) -> Result<u32, CommError> {
        let gather = |bytes: Vec<u8>| agree(|bytes| self.bootstrap.all_gather(bytes), call, Ok(bytes));
        // Kept until all have looked.
        let (_place, key) = reach::offer_device(&self.device);
        let keys = gather(key.0)?;
        let rows = gather(reach::row(&self.device, &keys))?;
        reach::team_size(&rows, self.config.lsa_size)
    }

    /// What all ranks must ask for alike.
    fn numbers(&self, requirements: &Requirements, lsa_size: u32) -> Vec<(&'static str, u64)> {
        let mut numbers = requirements.named().to_vec();
        numbers.push(("lsa_size", u64::from(lsa_size)));
        numbers.push(("routes", self.config.routes as u64));
        numbers.push(("backend", self.config.backend.choose().map_or(0, |backend| backend as u64)));
        numbers
    }

    /// This rank's own part, before it meets the others.
    fn prepare(&self, requirements: &Requirements, lsa_size: u32) -> Result<Prepared, CommError> {
        requirements.check(self.ranks(), lsa_size)?;
        let backend = self.config.backend.choose()?;
        let endpoint = Endpoint { rank: self.rank(), ranks: self.ranks(), seed: self.config.seed };
        let mut network = (self.config.network)(&endpoint);
        let capabilities = network.capabilities();
        requirements.check_network(&capabilities)?;
        let resources = Resources::new(&self.device, requirements, self.ranks(), lsa_size, self.config.routes)?;
        let key = network.register_signals(&resources.local_signals())?;
        let flat = flat::offer(&*self.device, self.rank(), lsa_size);
        Ok(Prepared { backend, network, capabilities, resources, key, flat })
    }

    fn start(
        &self,
        requirements: &Requirements,
        lsa_size: u32,
        prepared: Prepared,
        channel: Arc<dyn Channel>,
    ) -> Result<Live, CommError> {
        let Prepared { backend, network, capabilities, resources, flat, .. } = prepared;
        let (rank, ranks) = (self.rank(), self.ranks());
        let resources = Arc::new(resources);
        let stats: Vec<Arc<Counters>> = (0..requirements.contexts).map(|_| Arc::default()).collect();
        let bits = |has, bit| if has { bit } else { 0 };
        let handle = resources.handle(
            requirements,
            backend,
            rank,
            lsa_size,
            bits(capabilities.strong_signals, CAP_STRONG_SIGNALS) | bits(capabilities.va_signals, CAP_VA_SIGNALS),
            self.config.trap_on_fault,
        );
        let (commands, receiver) = mpsc::channel();
        let cpu_reaches_device = self.device.kind() == crate::gpu::DeviceKind::Virtual;
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
            contexts: resources.context_parts(&stats, cpu_reaches_device),
            first_index: requirements.first_index,
            max_outstanding: requirements.max_outstanding_per_peer as usize,
            max_message: requirements.max_message.min(capabilities.max_message),
            status: resources.status(),
            board: channel.board().clone(),
            network,
            commands: receiver,
            sabotage: self.config.sabotage,
            memory: resources.clone(),
        };
        // Safety: the words lie in `resources`, which the proxy keeps alive; the queues were initialised for this index,
        // and this is their only proxy.
        let proxy = unsafe { Proxy::new(parts) };
        let name = format!("gin-proxy-{rank}");
        let progress = self
            .config
            .progress
            .start(&name, Box::new(proxy))
            .map_err(|error| CommError::Backend { backend, reason: format!("no progress thread: {error}") })?;
        Ok(Live {
            backend,
            capabilities,
            lsa_size,
            resources,
            handle,
            stats,
            windows: (0..requirements.windows).map(|_| None).collect(),
            flat,
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
        let mut live = self.enter(CALL)?;
        let state = self.shared.state();
        match state {
            State::Uninitialised => {
                self.shared.set(State::Destroyed);
                return Ok(());
            }
            State::Initialising | State::Destroyed => return Err(CommError::State { call: CALL, state }),
            State::Active => match live.as_ref().map_or(Ok(()), |live| self.settle(CALL, live)) {
                // It ended meanwhile: nobody has to agree any more.
                Err(CommError::Ended { .. }) => self.no_kernels(CALL)?,
                settled => settled?,
            },
            State::Aborted => self.no_kernels(CALL)?,
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
            (Err(CommError::Bootstrap(BootstrapError::Ended)), Some(notice)) => {
                Err(CommError::Ended { call, rank: notice.rank, fault: notice.fault })
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
                if requests == 0 {
                    Ok(Vec::new())
                } else {
                    Err(CommError::InFlight { call, rank: self.rank(), requests, waited_ms })
                }
            });
            self.agree(live, call, drained)?;
        }
        Ok(())
    }
}

/// What a rank has before it meets the others.
struct Prepared {
    backend: BackendKind,
    network: Box<dyn Network>,
    capabilities: Capabilities,
    resources: Resources,
    key: Key,
    /// Why there are no addresses for windows matters only to who allocates one.
    flat: Flat,
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
            std::mem::forget(live.resources.clone());
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
