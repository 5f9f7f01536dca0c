// SPDX-License-Identifier: MIT OR Apache-2.0
//! The start of a communicator.

use super::gdaki::{self, Gdaki};
use super::live::{Live, until};
use super::print::Printer;
use super::reach;
use super::resources::{Resources, when};
use super::state::Active;
use super::symmetric::{self, Flat, Offered};
use super::wire::{agree, garbled, same};
use super::{Backend, CommError, Communicator, Requirements, Routes};
use crate::proxy::progress::Together;
use crate::proxy::{Counters, Limits, Parts, Proxy};
use gin_abi::handle::{ENGINE_CPU, ENGINE_GPU, ENGINE_NIC};
use gin_abi::{BackendKind, CommHandle};
use gin_boot::Channel;
use gin_gpu::quarantine::{Process, Sharers};
use gin_gpu::share;
use gin_net::nothing::Nothing;
use gin_net::{Capabilities, Endpoint, Key, Network, Raises};
use gin_nic::Nic;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

/// The number of this process's next communicator.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl Communicator {
    /// Carries out the steps of `initialise`.
    pub(super) fn bring_up(&self, requirements: &Requirements) -> Result<Live, CommError> {
        const CALL: &str = "initialise";
        let Met { lsa_size, chosen, processes } = self.meet(CALL)?;
        // The numbers that must be equal on all ranks.
        let mut own = requirements.named().to_vec();
        let backend = chosen.as_ref().map_or(0, |nic| 1 + u64::from(nic.is_some()));
        own.extend([("lsa_size", lsa_size.into()), ("routes", self.config.routes as u64), ("backend", backend)]);
        let numbers = own.iter().map(|(_, value)| *value).collect();
        let prepared = chosen.and_then(|chosen| self.prepare(requirements, lsa_size, chosen, numbers));
        let offers = self.exchange::<Offer>(CALL, prepared.as_ref().map(|prepared| &prepared.offer))?;
        let mut prepared = prepared?;
        let number = prepared.offer.number;
        for (rank, offer) in (0..).zip(&offers) {
            own.iter().zip(&offer.numbers).try_for_each(|(&(what, own), &theirs)| same(what, rank, theirs, own))?;
            if offer.numbers.len() != own.len() || offer.gdaki.is_some() != prepared.gdaki.is_some() {
                return Err(garbled(rank));
            }
        }
        let agreed = offers[0].number;
        let channel = self.bootstrap.channel(agreed);
        if self.config.survive_losses {
            channel.board().survive_losses();
        }
        let connected = self.connect(&mut prepared, offers, lsa_size);
        self.exchange::<()>("finish initialising", connected.as_ref())?;
        let over = prepared.network.describe();
        // From here on nothing fails on one rank only, except for a thread that the system refuses.
        prepared.resources.watch(agreed, self.rank());
        let live = self.start(requirements, lsa_size, prepared, channel, processes);
        self.exchange::<()>("start", live.as_ref().map(drop))?;
        let live = live?;
        let Live { backend, handle: CommHandle { lsa_size, contexts, .. }, .. } = live;
        let network = live.capabilities.name;
        tracing::debug!(rank = self.rank(), number, ?backend, network, over, lsa_size, contexts, "communicator is up");
        let (board, resources) = (live.channel.board().clone(), Arc::downgrade(&live.resources));
        // Set once: a communicator becomes active at most once.
        let printer = live.printer.clone();
        let caller = self.config.progress.manual().cloned();
        let _ = self.shared.active.set(Active { board, resources, printer, backend, network, lsa_size, caller });
        Ok(live)
    }

    /// Exchanges outcomes with all ranks, before the communicator has a channel.
    fn exchange<T: DeserializeOwned>(
        &self,
        call: &'static str,
        own: Result<impl Serialize, &CommError>,
    ) -> Result<Vec<T>, CommError> {
        agree(|bytes| self.bootstrap.all_gather(bytes), call, own)
    }

    /// Finds out which ranks reach each other, and with [`Backend::Auto`] whether all ranks can drive a NIC.
    /// Collective.
    fn meet(&self, call: &'static str) -> Result<Met, CommError> {
        let chosen = self.config.backend.choose(&*self.device, &self.config.nic);
        // The device stays published until all ranks have looked.
        let offered = reach::offer_device(&self.device, self.is_across());
        let keys: Vec<Vec<u8>> = self.exchange(call, offered.as_ref().map(|(_, key)| &key.0))?;
        let drives = matches!(chosen, Ok(Some(_)));
        let found = self.exchange::<(Vec<bool>, bool)>(call, Ok((reach::row(&self.device, &keys), drives)))?;
        let (rows, drive): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        let chosen = match self.config.backend {
            Backend::Auto if drive.contains(&false) => Ok(None),
            _ => chosen,
        };
        let (lsa_size, processes) = (reach::team_size(&rows, self.config.lsa_size)?, reach::processes(&keys)?);
        Ok(Met { lsa_size, chosen, processes })
    }

    /// Prepares this rank's own part, before the ranks exchange messages.
    fn prepare(
        &self,
        requirements: &Requirements,
        lsa_size: u32,
        chosen: Option<Arc<Nic>>,
        numbers: Vec<u64>,
    ) -> Result<Prepared, CommError> {
        let (rank, ranks) = (self.rank(), self.ranks());
        requirements.check(ranks, lsa_size)?;
        requirements.check_connections(ranks, lsa_size, self.config.routes)?;
        let mut network: Box<dyn Network> = match &chosen {
            None => {
                let gpu = self.device.pci_address();
                (self.config.network)(&Endpoint { rank, ranks, seed: self.config.seed, gpu })
            }
            Some(nic) => Box::new(Nothing::new(gdaki::capabilities(nic))),
        };
        let capabilities = network.capabilities();
        requirements.check_network(&capabilities)?;
        let gpu = lsa_size > 1 && self.config.routes == Routes::Automatic;
        let gdaki = chosen.is_some();
        let nic = gdaki || capabilities.raises == Raises::Nic;
        let engines = when(gpu, ENGINE_GPU) | when(nic, ENGINE_NIC) | when(!gdaki, ENGINE_CPU);
        let across = self.is_across();
        let has_mailbox = capabilities.mailbox;
        let resources = Resources::new(&self.device, requirements, (ranks, lsa_size), engines, has_mailbox, across)?;
        let signals = resources.local_signals().map(|signals| network.register_signals(&signals));
        let key = signals.transpose()?.unwrap_or_default();
        let gdaki = match chosen {
            None => None,
            Some(nic) => {
                let doorbells = (self.config.doorbells, self.config.release);
                let expired = until(self.config.connecting);
                let place = (rank, ranks, lsa_size);
                let gdaki = Gdaki::new(nic, &self.device, requirements, place, &resources, doorbells, &expired)?;
                Some(Arc::new(gdaki))
            }
        };
        let flat = symmetric::offer(&*self.device, rank, lsa_size, across);
        let offer = Offer {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            signals: resources.signals_gpu.as_ref().map(|memory| share::offer(memory).0).unwrap_or_default(),
            key: key.0,
            flat: Offered::new(&flat, across),
            numbers,
            gdaki: gdaki.as_ref().map(|gdaki| gdaki.offer()),
        };
        Ok(Prepared { offer, network, capabilities, resources, gdaki, flat })
    }

    /// Connects this rank to the other ranks by their messages.
    fn connect(&self, prepared: &mut Prepared, offers: Vec<Offer>, lsa_size: u32) -> Result<(), CommError> {
        let rank = self.rank();
        let (mut keys, mut peer_signals, mut gdaki_offers) = (Vec::new(), Vec::new(), Vec::new());
        for (other, offer) in (0..).zip(offers) {
            let near = other / lsa_size == rank / lsa_size;
            if near && other != rank {
                let own = std::mem::replace(&mut prepared.flat, Ok(None));
                prepared.flat = offer.flat.join(own, other, other.is_multiple_of(lsa_size), self.is_across());
            }
            keys.push(Key(offer.key));
            let raised = near && !offer.signals.is_empty();
            let taken = raised.then(|| reach::take_memory(other, &offer.signals, &self.device));
            peer_signals.push(taken.transpose()?);
            gdaki_offers.extend(offer.gdaki);
        }
        prepared.network.connect_signals(&keys)?;
        let gdaki = prepared.gdaki.as_ref();
        if let Some(gdaki) = gdaki {
            gdaki.connect(&gdaki_offers, prepared.resources.copy(), &until(self.config.connecting))?;
        }
        let busy = |context| gdaki.map_or(0, |gdaki| gdaki.queues.busy(context));
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
        let Prepared { network, capabilities, resources, gdaki, flat, .. } = prepared;
        let backend = if gdaki.is_some() { BackendKind::Gdaki } else { BackendKind::Proxy };
        let (rank, ranks) = (self.rank(), self.ranks());
        let (resources, fetch) = (Arc::new(resources), network.fetch());
        let stats: Vec<Arc<Counters>> = (0..requirements.contexts).map(|_| Arc::new(Counters::new(ranks))).collect();
        let handle = resources.handle(backend, rank, &capabilities, self.config.trap_on_fault);
        let handle = gdaki.as_ref().map_or(handle, |gdaki| gdaki.handle(handle));
        resources.fill_copy(handle)?;
        let sharers = Sharers::new(channel.board().clone(), processes);
        let (commands, receiver) = mpsc::channel();
        let printer = resources.lines().map(|ring| Arc::new(Printer::new(ring, rank, self.config.print_to.clone())));
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
            contexts: resources.context_parts(&stats),
            first_index: requirements.first_index,
            max_outstanding: requirements.max_outstanding_per_peer as usize,
            max_message: requirements.max_message.min(capabilities.max_message),
            status: resources.status(),
            board: channel.board().clone(),
            network,
            commands: receiver,
            printer: printer.clone(),
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
            printer,
            progress: Some(progress),
        })
    }
}

/// The findings of [`Communicator::meet`].
struct Met {
    lsa_size: u32,
    chosen: Result<Option<Arc<Nic>>, CommError>,
    /// By rank.
    processes: Vec<Process>,
}

/// The parts of a rank before the ranks exchange messages.
struct Prepared {
    offer: Offer,
    network: Box<dyn Network>,
    capabilities: Capabilities,
    resources: Resources,
    gdaki: Option<Arc<Gdaki>>,
    /// The error of a failed reservation matters only when a window is allocated.
    flat: Flat,
}

/// The message of a rank about its parts.
#[derive(Serialize, Deserialize)]
struct Offer {
    /// The number that it proposes for the communicator.
    number: u64,
    /// Key of the signal words that GPUs raise. Empty if there are none.
    signals: Vec<u8>,
    key: Vec<u8>,
    flat: Offered,
    /// The numbers that must be equal on all ranks.
    numbers: Vec<u64>,
    gdaki: Option<gdaki::Offer>,
}
