// SPDX-License-Identifier: MIT OR Apache-2.0
//! The start of a communicator.

use super::gdaki::{self, Gdaki};
use super::live::{Live, until};
use super::reach;
use super::report::ActiveBackend;
use super::resources::{Engines, Resources};
use super::symmetric::{self, Flat, Offered, PeerRange};
use super::wire::{agree, decode, encode, garbled};
use super::{Backend, ChosenBackend, CommError, Communicator, Requirements, Routes};
use crate::proxy::progress::Together;
use crate::proxy::{Counters, Limits, Parts, Proxy};
use gin_abi::BackendKind;
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS};
use gin_boot::Channel;
use gin_gpu::quarantine::{Process, Sharers};
use gin_gpu::share;
use gin_net::nothing::Nothing;
use gin_net::{Capabilities, Endpoint, Key, Network, Raises};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

/// The number of this process's next communicator.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl Communicator {
    /// Carries out the steps of `initialise`.
    pub(super) fn bring_up(&self, requirements: &Requirements) -> Result<Live, CommError> {
        const CALL: &str = "initialise";
        let Met { lsa_size, chosen, processes } =
            self.meet(CALL, self.config.backend.choose(&*self.device, &self.config.nic))?;
        let own = self.numbers(requirements, lsa_size, &chosen);
        let prepared = chosen.and_then(|chosen| self.prepare(requirements, lsa_size, chosen));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let message = prepared.as_ref().map_err(CommError::clone).map(|prepared| prepared.message(number, &own));
        let all = self.exchange(CALL, message)?;
        let mut prepared = prepared?;
        let heard = (0..).zip(&all).map(|(rank, message)| Heard::read(rank, message, &own));
        let heard = heard.collect::<Result<Vec<_>, _>>()?;
        let channel = self.bootstrap.channel(heard[0].number);
        let connected = self.connect(&mut prepared, heard, lsa_size);
        let board = channel.board().clone();
        self.exchange("finish initialising", connected.map(|()| Vec::new()))?;
        let over = prepared.network.describe();
        // From here on nothing fails on one rank only, except for a thread that the system refuses.
        let live = self.start(requirements, lsa_size, prepared, channel, processes);
        let started = live.as_ref().map(|_| Vec::new()).map_err(CommError::clone);
        self.exchange("start", started)?;
        // Set once: a communicator becomes active at most once.
        let _ = self.shared.board.set(board);
        if let Ok(live) = &live {
            let Live { backend, lsa_size, .. } = *live;
            let (network, contexts) = (live.capabilities.name, requirements.contexts);
            let rank = self.rank();
            tracing::debug!(rank, number, ?backend, network, over, lsa_size, contexts, "communicator is up");
            let _ = self.shared.backend.set(ActiveBackend { backend, network, lsa_size });
            let _ = self.shared.resources.set(Arc::downgrade(&live.resources));
        }
        live
    }

    /// Exchanges outcomes with all ranks, before the communicator has a channel.
    fn exchange(&self, call: &'static str, own: Result<Vec<u8>, CommError>) -> Result<Vec<Vec<u8>>, CommError> {
        agree(|bytes| self.bootstrap.all_gather(bytes), call, own)
    }

    /// Finds out which ranks reach each other, and with [`Backend::Auto`] whether all ranks can drive a NIC.
    /// Collective.
    fn meet(&self, call: &'static str, chosen: Result<ChosenBackend, CommError>) -> Result<Met, CommError> {
        // The device stays published until all ranks have looked.
        let offered = reach::offer_device(&self.device, self.is_across());
        let key = offered.as_ref().map(|(_, key)| key.0.clone()).map_err(CommError::clone);
        let keys = self.exchange(call, key)?;
        let mut row = reach::row(&self.device, &keys);
        row.push(u8::from(matches!(chosen, Ok(ChosenBackend::Gdaki(_)))));
        let mut rows = self.exchange(call, Ok(row))?;
        let drive: Vec<_> = rows.iter_mut().map(Vec::pop).collect();
        let chosen = match self.config.backend {
            Backend::Auto if drive.contains(&Some(0)) => Ok(ChosenBackend::Proxy),
            _ => chosen,
        };
        let (lsa_size, processes) = (reach::team_size(&rows, self.config.lsa_size)?, reach::processes(&keys)?);
        Ok(Met { lsa_size, chosen, processes })
    }

    /// Returns the numbers that must be equal on all ranks.
    fn numbers(
        &self,
        requirements: &Requirements,
        lsa_size: u32,
        chosen: &Result<ChosenBackend, CommError>,
    ) -> Vec<(&'static str, u64)> {
        let mut numbers = requirements.named().to_vec();
        numbers.push(("lsa_size", u64::from(lsa_size)));
        numbers.push(("routes", self.config.routes as u64));
        numbers.push(("backend", chosen.as_ref().map_or(0, |chosen| chosen.kind() as u64)));
        numbers
    }

    /// Prepares this rank's own part, before the ranks exchange messages.
    fn prepare(
        &self,
        requirements: &Requirements,
        lsa_size: u32,
        chosen: ChosenBackend,
    ) -> Result<Prepared, CommError> {
        let (rank, ranks) = (self.rank(), self.ranks());
        requirements.check(ranks, lsa_size)?;
        requirements.check_connections(ranks, lsa_size, self.config.routes)?;
        let mut network: Box<dyn Network> = match &chosen {
            ChosenBackend::Proxy => {
                let gpu = self.device.pci_address();
                (self.config.network)(&Endpoint { rank, ranks, seed: self.config.seed, gpu })
            }
            ChosenBackend::Gdaki(nic) => Box::new(Nothing::new(gdaki::capabilities(nic))),
        };
        let (backend, capabilities) = (chosen.kind(), network.capabilities());
        requirements.check_network(&capabilities)?;
        let gpu = lsa_size > 1 && self.config.routes == Routes::Automatic;
        let gdaki = backend == BackendKind::Gdaki;
        let engines = Engines { gpu, nic: gdaki || capabilities.raises == Raises::Nic, cpu: !gdaki };
        let across = self.is_across();
        let resources = Resources::new(&self.device, requirements, (ranks, lsa_size), engines, across)?;
        let signals = resources.local_signals().map(|signals| network.register_signals(&signals));
        let key = signals.transpose()?.unwrap_or_default();
        let gdaki = match chosen {
            ChosenBackend::Proxy => None,
            ChosenBackend::Gdaki(nic) => {
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

    /// Connects this rank to the other ranks by their messages.
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

    /// Starts the proxy.
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
            backend,
            rank,
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
                // At most the limit of ids, by the check of the requirements.
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
            _memory: Arc::new((resources.clone(), gdaki.clone())),
        };
        // Safety: the words lie in `resources`, which the proxy keeps alive, as it does the doorbells. The queues were
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
}

/// The findings of [`Communicator::meet`].
struct Met {
    lsa_size: u32,
    chosen: Result<ChosenBackend, CommError>,
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
    /// Each rank is a separate process.
    across: bool,
}

impl Prepared {
    /// Returns the message for the other ranks, which [`Heard::read`] reads.
    fn message(&self, number: u64, own: &[(&'static str, u64)]) -> Vec<u8> {
        let signals = self.resources.signals_gpu.as_ref().map(|memory| share::offer(memory).0).unwrap_or_default();
        let own: Vec<u64> = own.iter().map(|(_, value)| *value).collect();
        let gdaki = self.gdaki.as_ref().map(|gdaki| gdaki.offer()).unwrap_or_default();
        let range = symmetric::key(&self.flat);
        encode(&(number, signals, &self.key.0, Offered::new(&self.flat, &range, self.across), own, gdaki))
    }
}

/// The message of another rank.
struct Heard<'a> {
    /// The number that it proposes for the communicator.
    number: u64,
    /// Key of the signal words that GPUs raise. Empty if there are none.
    signals: &'a [u8],
    key: Key,
    flat: PeerRange,
    gdaki: &'a [u8],
}

impl<'a> Heard<'a> {
    /// Reads the message of `rank`. `own`: the numbers that must be equal on all ranks.
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
