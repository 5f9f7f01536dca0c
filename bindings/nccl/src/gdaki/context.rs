// SPDX-License-Identifier: MIT OR Apache-2.0
//! The contexts of a device communicator: queue pairs, signals and counters, and their description in GPU memory.

use super::abi::{DEVICE_GIN_GDAKI, DeviceHandle, GDAKI_VERSION, GinConfig};
use super::coll::{Coll, internal, key_part, keys};
use super::group::Parts;
use super::layout::{GpuContext, QueuePair, Words};
use crate::contact::PATIENCE;
use crate::failure::Failure;
use bytemuck::{Pod, bytes_of, cast_slice};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::command::QpState;
use gin_gpu::Memory;
use gin_nic::hca::Access;
use gin_nic::{Address, DEPTHS, DeviceQueues, NicPeer, QueueInfo, QueueSpec, RegisteredExtent, Role};
use std::sync::Arc;
use std::time::Instant;

/// The depth of queues for which the program asks for none: that of NCCL's own back end.
const DEPTH: u32 = 128;
/// The smallest depth: a put with signal takes two slots at a time.
const MIN_DEPTH: u32 = 4;
/// The alignment of arrays in GPU memory.
const ALIGN: usize = 128;

/// The numbers that NCCL asks for, checked.
#[derive(Clone, Copy, Debug)]
struct Shape {
    contexts: usize,
    signals: u32,
    counters: u32,
    depth: u32,
    version: i32,
    ranks: usize,
    rank: usize,
}

impl Shape {
    fn new(config: &GinConfig, ranks: usize, rank: usize) -> Result<Self, Failure> {
        let count = |what: &str, asked: i32| {
            u32::try_from(asked).map_err(|_| Failure::argument(format!("{asked} {what}; ask for 0 or more")))
        };
        let (signals, counters) = (count("signals", config.signals)?, count("counters", config.counters)?);
        let contexts = count("contexts", config.contexts)?;
        if contexts == 0 {
            return Err(Failure::argument("0 contexts; ask for 1 or more"));
        }
        // The words of all contexts share a region, in which device code counts by 32 bits.
        for (what, each) in [("signals", signals), ("counters", counters)] {
            if each.checked_mul(contexts).is_none() {
                let text = format!("{each} {what} in each of {contexts} contexts; the limit is 2^32 - 1 in all");
                return Err(Failure::argument(text));
            }
        }
        let depth = match count("slots of a queue", config.queue_depth)? {
            0 => DEPTH,
            asked if u64::from(asked) < DEPTHS.end => asked.next_power_of_two().max(MIN_DEPTH),
            asked => {
                let text = format!("a queue of {asked} slots; the limit is {}", DEPTHS.end - 1);
                return Err(Failure::argument(text));
            }
        };
        let version = config.backend_version;
        if GpuContext::bytes(version).is_none() {
            let text = format!(
                "version {version} of GDAKI's device code; this plugin supports 1 and 2. Compile the program with the \
                 headers of NCCL 2.30.3 or later"
            );
            return Err(Failure::argument(text));
        }
        Ok(Self { contexts: contexts as usize, signals, counters, depth, version, ranks, rank })
    }

    /// Returns the queue pairs of one context, in this order: one to each rank; the responder of the own rank's; one to
    /// raise counters behind each of them; the responders of these.
    ///
    /// NVIDIA's host code means to create the ones that raise counters as core-direct masters. These are masters.
    fn specs(&self) -> Vec<QueueSpec> {
        let spec = |role| QueueSpec { role, depth: self.depth, completions: self.depth, collapsed: false };
        let mut specs = vec![spec(Role::Sender); self.ranks];
        specs.push(spec(Role::Responder));
        if self.counters > 0 {
            specs.extend(vec![spec(Role::Master); self.ranks]);
            specs.extend(vec![spec(Role::Responder); self.ranks]);
        }
        specs
    }

    /// Returns the indices of a queue pair and its responder of the own rank, for all such.
    fn loops(&self) -> Vec<(usize, usize)> {
        let mut all = vec![(self.rank, self.ranks)];
        if self.counters > 0 {
            let first = self.ranks + 1;
            all.extend((0..self.ranks).map(|peer| (first + peer, first + self.ranks + peer)));
        }
        all
    }

    /// Returns the index of the address of a context's queue pair to a rank among the parts of a rank.
    fn part(&self, context: usize, peer: usize) -> usize {
        KEYS + context * self.ranks + peer
    }
}

/// The keys that a rank passes before its addresses: of its signals and of its counters.
const KEYS: usize = 2;

/// Words of the GPU that NICs raise.
#[derive(Debug)]
struct Raised {
    // Deregistered before it is freed.
    region: RegisteredExtent,
    memory: Arc<Memory>,
}

impl Raised {
    fn new(coll: &Coll, count: u32) -> Result<Self, Failure> {
        let memory = coll.memory(&vec![0u64; count.max(1) as usize])?;
        // Safety: the memory is dropped after the region, and the GPUs of the process reach it.
        let region = unsafe { coll.region(memory.address(), memory.bytes(), Access::SIGNALS)? };
        Ok(Self { region, memory })
    }

    /// Describes the words of a context.
    fn words(&self, keys: u64, offset: u32) -> Words {
        let buffer = self.memory.address() + 8 * u64::from(offset);
        Words { buffer, keys, local_key: Be32::new(self.region.local_key), offset }
    }
}

/// The objects of this rank, before they are connected.
struct Own {
    sets: Vec<DeviceQueues>,
    signals: Raised,
    counters: Raised,
    sink: Raised,
}

impl Own {
    fn new(coll: &Coll, shape: &Shape) -> Result<Self, Failure> {
        let device = coll.machine.gpus.device(coll.gpu).map_err(Failure::cuda)?;
        let (specs, start) = (shape.specs(), Instant::now());
        let set = |_| DeviceQueues::new(&coll.nic, &device, &specs, &|| start.elapsed() > PATIENCE).map_err(internal);
        let contexts = shape.contexts as u32;
        Ok(Self {
            sets: (0..shape.contexts).map(set).collect::<Result<_, _>>()?,
            signals: Raised::new(coll, shape.signals * contexts)?,
            counters: Raised::new(coll, shape.counters * contexts)?,
            sink: Raised::new(coll, 1)?,
        })
    }

    /// Returns what peers need: the keys, then the addresses by context and peer.
    fn parts(&self, shape: &Shape) -> Parts {
        let keys = [&self.signals, &self.counters].map(|words| key_part(words.region.remote_key));
        let addresses = self.sets.iter().flat_map(|set| (0..shape.ranks).filter_map(|peer| set.address(peer)));
        keys.into_iter().chain(addresses.map(|address| address.to_bytes())).collect()
    }

    /// Connects all queue pairs.
    fn connect(&self, shape: &Shape, all: &[Parts]) -> Result<(), Failure> {
        let start = Instant::now();
        let expired = || start.elapsed() > PATIENCE;
        let name = |rank: usize| NicPeer { rank: rank as u32, host: "this one".to_owned(), port: 1 };
        for (context, set) in self.sets.iter().enumerate() {
            for (peer, parts) in all.iter().enumerate().filter(|&(peer, _)| peer != shape.rank) {
                let bytes = parts.get(shape.part(context, shape.rank)).map_or(&[][..], Vec::as_slice);
                let address = Address::from_bytes(bytes, &name(peer)).map_err(internal)?;
                set.connect(peer, &name(peer), &address, &expired).map_err(internal)?;
            }
            for (queue, responder) in shape.loops() {
                for (from, to) in [(queue, responder), (responder, queue)] {
                    let address = set.address(to).ok_or_else(|| internal("a queue pair has vanished"))?;
                    set.connect(from, &name(shape.rank), &address, &expired).map_err(internal)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the bytes in GPU memory that describe everything to device code, for an image at this address. The array
    /// of contexts comes first.
    fn image(&self, shape: &Shape, base: u64, signal_keys: &[u32], counter_keys: &[u32]) -> Vec<u8> {
        let stride = GpuContext::bytes(shape.version).unwrap_or_default();
        let mut image = Image { bytes: vec![0; shape.contexts * stride], base };
        let (signal_keys, counter_keys) = (image.add(signal_keys), image.add(counter_keys));
        for (context, set) in self.sets.iter().enumerate() {
            let all: Vec<&QueueInfo> = set.infos().collect();
            let mut queues = |first: usize| {
                let infos = all.iter().skip(first).take(shape.ranks);
                let described = infos
                    .filter_map(|info| Some(QueuePair::new(info, &info.place?, set.slab.address())))
                    .collect::<Vec<_>>();
                image.add(&described)
            };
            let mut described = GpuContext::new();
            described.queues = queues(0);
            described.companions = if shape.counters > 0 { queues(shape.ranks + 1) } else { 0 };
            described.counters = self.counters.words(counter_keys, context as u32 * shape.counters);
            described.signals = self.signals.words(signal_keys, context as u32 * shape.signals);
            described.sink_key = Be32::new(self.sink.region.local_key);
            described.last_issued_get = image.add(&vec![0u64; shape.ranks]);
            described.last_visible_get = image.add(&vec![0u64; shape.ranks]);
            image.bytes[context * stride..][..stride].copy_from_slice(&bytes_of(&described)[..stride]);
        }
        image.bytes
    }
}

/// Bytes for GPU memory at an address.
struct Image {
    bytes: Vec<u8>,
    base: u64,
}

impl Image {
    /// Adds an array. Returns its address.
    fn add<T: Pod>(&mut self, all: &[T]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        let address = self.base + self.bytes.len() as u64;
        self.bytes.extend_from_slice(cast_slice(all));
        address
    }
}

/// The contexts of a device communicator of a rank.
#[derive(Debug)]
pub(super) struct Contexts {
    /// The handle that NCCL passes to kernels.
    pub(super) handle: DeviceHandle,
    /// The numbers of the queue pairs to which kernels post.
    queues: Vec<u32>,
    // Destroyed before their memory.
    _sets: Vec<DeviceQueues>,
    _words: [Raised; 3],
    _image: Arc<Memory>,
    pub(super) coll: Arc<Coll>,
}

impl Contexts {
    /// Creates contexts together with all ranks.
    pub(super) fn new(coll: &Arc<Coll>, config: &GinConfig) -> Result<Self, Failure> {
        let shape = Shape::new(config, coll.ranks(), coll.rank);
        let own = shape.and_then(|shape| Ok((shape, Own::new(coll, &shape)?)));
        let ((shape, own), all) = coll.gather_with("creating contexts", own, |(shape, own)| own.parts(shape))?;
        let image = own.connect(&shape, &all).and_then(|()| {
            let (signals, counters) = (keys(&all, 0)?, keys(&all, 1)?);
            let bytes = own.image(&shape, 0, &signals, &counters).len();
            let memory = coll.memory(&vec![0u8; bytes])?;
            let image = own.image(&shape, memory.address(), &signals, &counters);
            memory.write(0, &image).map_err(Failure::cuda)?;
            Ok(memory)
        });
        // A request to a rank that is not connected yet would fail.
        let (image, _) = coll.gather_with("connecting queue pairs", image, |_| Parts::new())?;
        let handle = DeviceHandle {
            net_device_type: DEVICE_GIN_GDAKI,
            net_device_version: GDAKI_VERSION,
            handle: std::ptr::with_exposed_provenance_mut(image.address() as usize),
            size: 0,
            needs_proxy_progress: 1,
        };
        let Own { sets, signals, counters, sink } = own;
        let posts = |info: &&QueueInfo| info.role != Role::Responder;
        let queues = sets.iter().flat_map(|set| set.infos().filter(posts)).map(|info| info.queue).collect();
        let words = [signals, counters, sink];
        Ok(Self { handle, queues, _sets: sets, _words: words, _image: image, coll: coll.clone() })
    }

    /// Returns whether a queue pair has failed.
    pub(super) fn has_failed(&self) -> bool {
        let fabric = &self.coll.group.fabric;
        let is_broken = |&number: &u32| fabric.queue(number).is_none_or(|queue| queue.state == QpState::Error);
        fabric.failure().is_some() || self.queues.iter().any(is_broken)
    }
}
