// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine of software NICs as a kernel, on a virtual GPU.

use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::{self, Completion};
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{self, Flags, Local, Post, QueueNumber, Remote, SLOT_BYTES};
use gin_gpu::{Memory, MemoryKind};
use gin_host::world::{Rank, WorldConfig, WorldMode, launch};
use gin_nic::hca::{Access, Hca};
use gin_nic::{DeviceQueues, Nic, NicConfig, NicPeer, QueueSpec, RegisteredSlice, Role};
use gin_soft_nic::{Fault, FaultKind, Options};
use gin_soft_nic_host::{SoftConfig, SoftEngine, SoftFabric};
use gin_virtual::{Schedule, SeededConfig};
use std::error::Error;
use std::sync::Arc;

/// Slots of the ring.
const DEPTH: u64 = 8;
/// Number of bytes that are written: more than one thread copies by itself, and no multiple of any unit.
const BYTES: u64 = 5003;

/// One of two queue pairs that are connected to each other.
struct Poster {
    fabric: SoftFabric,
    hca: Arc<dyn Hca>,
    queues: DeviceQueues,
    posted: u64,
}

impl Poster {
    /// Posts an entry, and steps until the NIC has completed it. Returns whether it succeeded.
    fn post<const N: usize>(&mut self, entry: impl Fn(Post) -> [wqe::Segment; N]) -> Result<bool, Box<dyn Error>> {
        let info = *self.queues.infos().next().ok_or("no queue pair")?;
        let (place, queue) = (info.place.ok_or("the queue pair has no rings")?, QueueNumber::new(info.queue));
        let (index, slab) = (self.posted, &self.queues.slab);
        self.posted += 1;
        slab.write(place.ring + index % DEPTH * SLOT_BYTES, &entry(Post { index, queue, flags: Flags::COMPLETION }))?;
        slab.write(place.record, &[Record { receive: Be32::new(0), send: Record::send(self.posted) }])?;
        // Safety: the doorbell lives as long as the queue pairs.
        unsafe { self.hca.ring(info.doorbell, Doorbell::word(self.posted, queue)) }?;
        let mut completion = [Completion { words: [0; 8] }];
        let mut outcome = None;
        let ended = gin_virtual::block_on(|| {
            self.fabric.step();
            let read = slab.read(place.completions + index % DEPTH * cqe::BYTES, &mut completion);
            outcome = completion[0].read(index, info.log_completions).ok();
            read.is_err() || outcome.is_some() || self.fabric.failure().is_some()
        });
        if let (true, Some(failure)) = (ended, self.fabric.failure()) {
            return Err(failure.into());
        }
        Ok(outcome.ok_or("no completion arrived")?.result.is_ok())
    }
}

fn check(rank: &Rank) -> Result<(), Box<dyn Error>> {
    let device = rank.device();
    let fabric = SoftFabric::new(Options::default());
    let hca: Arc<dyn Hca> = Arc::new(fabric.add(SoftConfig::ethernet(0)));
    fabric.place(SoftEngine::Kernel, device)?;
    let nic = Nic::open(hca.clone(), NicConfig::default())?;
    let depth = DEPTH as u32;
    let spec = QueueSpec { role: Role::Sender, depth, completions: depth, collapsed: false };
    let queues = DeviceQueues::new(&nic, device, &[spec; 2], &|| false)?;
    let me = NicPeer { rank: 0, host: "here".to_owned(), port: 1 };
    for (own, other) in [(0, 1), (1, 0)] {
        let address = queues.address(other).ok_or("a sender has an address")?;
        queues.connect(own, &me, &address, &|| false)?;
    }
    let window = Memory::new(device, MemoryKind::Device, 4 * BYTES)?.whole();
    let sent: Vec<u8> = (0..BYTES).map(|index| (index * 7 + 3) as u8).collect();
    window.write(1, &sent)?;
    let window = RegisteredSlice::new(&nic, window, Access::SIGNALS)?;
    let (word, landed) = (3 * BYTES.next_multiple_of(8), 2 * BYTES);
    let start = window.start;
    let remote = |offset| Remote { address: start + offset, key: Be32::new(window.remote_key) };
    let local = |offset, bytes| Local { address: start + offset, key: Be32::new(window.local_key), bytes };
    let mut poster = Poster { fabric: fabric.clone(), hca, queues, posted: 0 };

    // Posts more entries than slots. In between the kernel is parked, by commands and on request.
    for round in 1..=DEPTH {
        assert!(poster.post(|head| wqe::write(head, remote(landed), local(1, BYTES as u32)))?);
        assert!(poster.post(|head| wqe::fetch_add(head, remote(word), 5, local(word + 8, 8)))?);
        let (mut arrived, mut sum) = (vec![0; BYTES as usize], [0u64]);
        window.slice.read(landed, &mut arrived)?;
        window.slice.read(word, &mut sum)?;
        assert_eq!((arrived == sent, sum), (true, [5 * round]), "round {round}");
        window.slice.write(landed, &vec![0u8; BYTES as usize])?;
        match round {
            2 => drop(RegisteredSlice::new(&nic, window.slice.clone(), Access::PAYLOAD)?),
            4 => {
                let parked = fabric.park();
                gin_virtual::block_on(|| device.running() == 0);
                (0..100).for_each(|_| {
                    fabric.step();
                });
                assert_eq!(device.running(), 0, "the kernel stays parked");
                drop(parked);
            }
            _ => {}
        }
    }
    assert_eq!(fabric.violations(), (None, 0));
    let fault = Fault { device: None, queue: None, entry: 0, kind: FaultKind::Drop };
    fabric.inject(fault)?;
    assert!(!poster.post(|head| wqe::write(head, remote(landed), local(1, 8)))?, "the engine dropped the request");
    drop((poster, window, nic));
    assert_eq!(fabric.objects(), 0);
    drop(fabric);
    gin_virtual::block_on(|| device.running() == 0);
    Ok(())
}

#[test]
fn the_engine_runs_as_a_kernel_and_continues_after_it_was_parked() {
    // Uses schedules that take turns. A schedule that starves the one thread of the engine, while others poll for
    // orders, takes minutes.
    let seeded = |seed| {
        let mut config = WorldConfig::seeded(1, seed);
        config.mode = WorldMode::Seeded(SeededConfig { schedule: Schedule::RoundRobin, ..SeededConfig::new(seed) });
        config
    };
    for config in [seeded(3), WorldConfig::threads(1)] {
        launch(config, |rank| check(&rank).map_err(|error| error.to_string())).unwrap();
    }
}
