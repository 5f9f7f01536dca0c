// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two endpoints of the network `verbs`, driven by the test: no proxy, no kernels.

use gin_abi::{RemoteSignal, SignalTarget, Transfer, WindowOffset};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device as Gpu, Memory, MemoryKind};
use gin_net::staged::Staged;
use gin_net::verbs::{PortName, Ports, SignalsBy, VerbsConfig, VerbsNetwork};
use gin_net::{Endpoint, Event, Key, LocalSignals, LocalWindow, NetError, Network, Raises, Request, SignalArrival};
use libtest_mimic::Failed;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of window 0 of each rank.
pub const BYTES: usize = 1 << 20;

/// Ample: every event that is due arrives much sooner.
const LIMIT: Duration = Duration::from_secs(60);

/// One rank.
pub struct Side {
    pub network: Staged<VerbsNetwork>,
    pub memory: Arc<Memory>,
    pub completions: Vec<(u64, Result<(), NetError>)>,
    pub signals: Vec<SignalArrival>,
    // Kept alive as a communicator keeps them.
    signal_words: Arc<Memory>,
    nic_words: Arc<Memory>,
    next: u64,
}

impl Side {
    /// Polls the network and records its events.
    pub fn poll(&mut self) {
        let mut events = Vec::new();
        self.network.poll(&mut events);
        for event in events {
            match event {
                Event::Completion { id, outcome } => self.completions.push((id, outcome)),
                Event::Signal(arrival) => self.signals.push(arrival),
                Event::Notice(arrival) => panic!("unexpected notice {arrival:?}"),
            }
        }
    }

    /// Posts a request, polling until the network accepts it. Returns its id.
    pub fn post(&mut self, context: u32, transfer: Transfer, signal: Option<RemoteSignal>, peer: u32) -> u64 {
        let id = self.next;
        self.next += 1;
        let request = Request { id, context, peer, transfer, signal, notice: None, more: false };
        let begin = Instant::now();
        while self.network.post(&[request]) == 0 {
            assert!(begin.elapsed() < LIMIT, "the network does not accept request {id}");
            self.poll();
        }
        id
    }

    pub fn put(&mut self, peer: u32, from: u64, to: u64, bytes: u64) -> u64 {
        self.post(0, put(from, to, bytes), None, peer)
    }

    /// Returns the outcome of a request.
    pub fn outcome(&self, id: u64) -> Option<Result<(), NetError>> {
        self.completions.iter().find(|(other, _)| *other == id).map(|(_, outcome)| outcome.clone())
    }

    /// Returns a word that the NIC raises.
    pub fn word(&self, context: u32, id: u32) -> u64 {
        let mut word = [0u64];
        self.nic_words.read(u64::from(8 * (8 * context + id)), &mut word).map_or(0, |()| word[0])
    }

    pub fn fill(&self, seed: u64) -> Result<Vec<u8>, Failed> {
        let bytes: Vec<u8> = (0..BYTES as u64).map(|at| pattern(seed, at)).collect();
        self.memory.write(0, &bytes)?;
        Ok(bytes)
    }

    pub fn read(&self, at: u64, bytes: usize) -> Result<Vec<u8>, Failed> {
        let mut read = vec![0u8; bytes];
        self.memory.read(at, &mut read)?;
        Ok(read)
    }
}

pub fn put(source_offset: u64, destination_offset: u64, bytes: u64) -> Transfer {
    Transfer::Put {
        source: WindowOffset { window: 0, offset: source_offset },
        destination: WindowOffset { window: 0, offset: destination_offset },
        bytes,
    }
}

pub fn get(source_offset: u64, destination_offset: u64, bytes: u64) -> Transfer {
    Transfer::Get {
        source: WindowOffset { window: 0, offset: source_offset },
        destination: WindowOffset { window: 0, offset: destination_offset },
        bytes,
    }
}

pub fn raise(id: u32, amount: u64) -> RemoteSignal {
    RemoteSignal { target: SignalTarget::Id(id), amount, strong: true }
}

fn pattern(seed: u64, at: u64) -> u8 {
    ((at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Returns the name of all ports of a device.
pub fn port(device: &str) -> PortName {
    PortName { device: device.to_owned(), port: None }
}

/// Changes a window's key to one that its rank does not have.
pub fn spoil(key: &mut [u8]) {
    // Three booleans of a byte each follow the remote key of the last port. The lowest bit of the key's last byte
    // changes its value, but not its length.
    let last = key.len() - 4;
    key[last] ^= 1;
}

/// Configuration of a pair.
pub struct Plan {
    pub config: VerbsConfig,
    /// Names of the ports of each rank.
    pub ports: [Vec<PortName>; 2],
    /// Engines that raise the signals of each rank. If the NIC does, window 0 also accepts signals.
    pub by: [SignalsBy; 2],
    /// Changes one rank's key of window 0 before the other receives it.
    pub spoil: Option<fn(&mut [u8])>,
}

impl Plan {
    pub fn new(devices: &[String; 2]) -> Self {
        Self {
            config: VerbsConfig::default(),
            ports: devices.each_ref().map(|name| vec![port(name)]),
            by: Default::default(),
            spoil: None,
        }
    }
}

/// Creates two connected ranks with two contexts, signals 0 to 7 and window 0.
pub fn pair(plan: &Plan) -> Result<[Side; 2], Failed> {
    let mut sides = Vec::new();
    for (rank, names) in (0..).zip(&plan.ports) {
        let config = plan.config.clone().ports(names.clone()).signals(plan.by[rank as usize]);
        let ports = Ports::open(&config)?;
        let gpu: Arc<dyn Gpu> = VirtualDevice::memory_only(rank);
        sides.push(Side {
            network: VerbsNetwork::staged(ports.all(), &Endpoint { rank, ranks: 2, seed: 1, gpu: None }),
            memory: Memory::new(&gpu, MemoryKind::Device, BYTES as u64)?,
            completions: Vec::new(),
            signals: Vec::new(),
            signal_words: Memory::new(&gpu, MemoryKind::Pinned, 2 * 8 * 8)?,
            nic_words: Memory::new(&gpu, MemoryKind::Device, 2 * 8 * 8)?,
            next: 0,
        });
    }
    let keys = sides.iter_mut().map(|side| {
        let nic = (side.network.capabilities().raises == Raises::Nic).then(|| side.nic_words.clone());
        let signals =
            LocalSignals { memory: side.signal_words.clone(), nic, contexts: 2, per_context: 8, mailbox: None };
        side.network.register_signals(&signals)
    });
    let keys = keys.collect::<Result<Vec<Key>, _>>()?;
    for side in &mut sides {
        side.network.connect_signals(&keys)?;
    }
    let keys = sides.iter_mut().map(|side| {
        let nic = side.network.capabilities().raises == Raises::Nic;
        // No rank raises words of this plane here.
        let plane = nic.then(|| side.signal_words.clone());
        let window = LocalWindow { id: 0, memory: side.memory.whole(), plane, nic };
        side.network.register(&window)
    });
    let mut keys = keys.collect::<Result<Vec<Key>, _>>()?;
    sides[1].network.connect(0, &keys)?;
    if let Some(spoil) = plan.spoil {
        spoil(&mut keys[1].0);
    }
    sides[0].network.connect(0, &keys)?;
    sides.try_into().map_err(|_| "expected two sides".into())
}

/// Polls both sides until `done`. Returns the elapsed time.
pub fn until(sides: &mut [Side; 2], what: &str, done: impl Fn(&[Side; 2]) -> bool) -> Result<Duration, Failed> {
    let begin = Instant::now();
    while !done(sides) {
        if begin.elapsed() > LIMIT {
            let [first, second] = &*sides;
            let (sent, arrived) = (first.completions.len(), second.signals.len());
            return Err(format!("no {what} after {LIMIT:?}: {sent} completions, {arrived} signals").into());
        }
        sides.iter_mut().for_each(Side::poll);
    }
    Ok(begin.elapsed())
}

/// Polls only the first side until a request has ended. Returns its outcome and the elapsed time.
pub fn ended(side: &mut Side, id: u64) -> Result<(Result<(), NetError>, Duration), Failed> {
    let begin = Instant::now();
    loop {
        if let Some(outcome) = side.outcome(id) {
            return Ok((outcome, begin.elapsed()));
        }
        if begin.elapsed() > LIMIT {
            return Err(format!("request {id} has not ended after {LIMIT:?}").into());
        }
        side.poll();
        std::thread::yield_now();
    }
}

pub fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(why().into()) }
}
