// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs are brought up on software NICs, carry data, and leave nothing behind when a step fails.

use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::command::QpState;
use gin_abi::mlx5::cqe::{self, Completion, Outcome, Syndrome};
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::mailbox::Ads;
use gin_abi::mlx5::wqe::{self, Flags, Local, Post, QueueNumber, Remote, Segment};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemoryKind, MemorySlice};
use gin_nic::hca::Hca;
use gin_nic::hca::{Access, Extent, Handle, HcaError};
use gin_nic::layout::{PAGE, QueueSpec, Role};
use gin_nic::*;
use gin_soft_nic::Options;
use gin_soft_nic_host::{SoftConfig, SoftFabric, SoftHca};
use gin_testkit::FailingHca;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const NEVER: Expired<'static> = &|| false;

fn peer(rank: u32) -> NicPeer {
    NicPeer { rank, host: format!("node{rank}"), port: 1 }
}

fn device() -> Arc<dyn Device> {
    VirtualDevice::memory_only(0)
}

/// Returns memory that begins a page.
fn page() -> MemorySlice {
    let memory = Memory::new(&device(), MemoryKind::Pinned, 2 * PAGE).unwrap();
    let first = memory.address().next_multiple_of(PAGE) - memory.address();
    memory.slice(first..first + PAGE).unwrap()
}

fn word_at(slice: &MemorySlice, offset: u64) -> &AtomicU64 {
    assert!(offset.is_multiple_of(8) && offset < slice.bytes());
    // Safety: an aligned word of memory of this process, which the slice keeps.
    unsafe { AtomicU64::from_ptr((slice.address() + offset) as usize as *mut u64) }
}

const SENDER: QueueSpec = QueueSpec { role: Role::Sender, depth: 16, completions: 16, collapsed: false };
const MASTER: QueueSpec = QueueSpec { role: Role::Master, ..SENDER };
const RESPONDER: QueueSpec = QueueSpec { role: Role::Responder, depth: 0, completions: 0, collapsed: false };

/// A rank with queue pairs and registered memory.
struct Side {
    set: DeviceQueues,
    region: RegisteredSlice,
    /// Entries posted and completions seen, by queue pair.
    posted: Vec<Cell<u64>>,
    seen: Vec<Cell<u64>>,
    /// Words that the host passes on, if it does.
    words: Option<Vec<AtomicU64>>,
}

impl Side {
    fn new(nic: &Arc<Nic>, specs: &[QueueSpec]) -> Self {
        let set = DeviceQueues::new(nic, &device(), specs, NEVER).unwrap();
        let region = RegisteredSlice::new(nic, page(), Access::SIGNALS).unwrap();
        let counts = || specs.iter().map(|_| Cell::new(0)).collect();
        Self { set, region, posted: counts(), seen: counts(), words: None }
    }

    fn info(&self, index: usize) -> QueueInfo {
        *self.set.infos().nth(index).unwrap()
    }

    fn post<const N: usize>(&self, index: usize, entry: impl Fn(Post) -> [Segment; N]) {
        let info = self.info(index);
        let place = info.place.unwrap();
        let number = self.posted[index].get();
        let queue = QueueNumber::new(info.queue);
        let entry = entry(Post { index: number, queue, flags: Flags::COMPLETION });
        let slot = place.ring + number % (1 << info.log_depth) * 64;
        for (at, word) in entry.iter().flat_map(|segment| segment.words).enumerate() {
            word_at(&self.set.slab, slot + 8 * at as u64).store(word, Ordering::Relaxed);
        }
        self.posted[index].set(number + 1);
        let record = Record { receive: Be32::new(0), send: Record::send(number + 1) };
        word_at(&self.set.slab, place.record).store(bytemuck::cast(record), Ordering::Release);
        // Safety: the page is there as long as the set is.
        let doorbell = unsafe { AtomicU64::from_ptr(self.doorbell(index) as usize as *mut u64) };
        doorbell.store(Doorbell::word(number + 1, queue), Ordering::Release);
    }

    fn doorbell(&self, index: usize) -> u64 {
        self.words.as_ref().map_or(self.info(index).doorbell, |words| (&raw const words[index]) as u64)
    }

    fn completion(&self, index: usize) -> Option<Outcome> {
        let info = self.info(index);
        let number = self.seen[index].get();
        let at = info.place.unwrap().completions + number % (1 << info.log_completions) * cqe::BYTES;
        let words = std::array::from_fn(|word| word_at(&self.set.slab, at + 8 * word as u64).load(Ordering::Acquire));
        let outcome = Completion { words }.read(number, info.log_completions).ok()?;
        self.seen[index].set(number + 1);
        Some(outcome)
    }

    fn remote(&self, offset: u64) -> Remote {
        self.region.remote(offset)
    }

    fn local(&self, offset: u64, bytes: u32) -> Local {
        self.region.local(offset, bytes.into())
    }
}

fn open(hca: SoftHca) -> Arc<Nic> {
    Nic::open(Arc::new(hca), NicConfig::default()).unwrap()
}

fn connect(a: &Side, b: &Side, index: usize) {
    for (side, other, rank) in [(a, b, 1), (b, a, 0)] {
        let bytes = other.set.address(index).unwrap().to_bytes();
        let address = Address::from_bytes(&bytes, &peer(rank)).unwrap();
        side.set.connect(index, &peer(rank), &address, NEVER).unwrap();
    }
}

/// A configuration of both kinds of network.
type Config = fn(u16) -> SoftConfig;
const NETWORKS: [Config; 2] = [SoftConfig::ethernet, SoftConfig::infiniband];

#[test]
fn queue_pairs_come_up_and_carry_data_on_both_networks() {
    for config in NETWORKS {
        let fabric = SoftFabric::default();
        let nics = [0, 1].map(|rank| open(fabric.add(config(rank))));
        let [a, b] = [0, 1].map(|rank| Side::new(&nics[rank], &[SENDER, RESPONDER]));
        connect(&a, &b, 0);
        assert_eq!(a.set.state(0), Ok(QpState::ReadyToSend));
        assert_eq!(a.set.state(1), Ok(QpState::Init));
        word_at(&a.region.slice, 64).store(0x1234_5678_9abc_def0, Ordering::Relaxed);
        a.post(0, |post| wqe::write(post, b.remote(8), a.local(64, 8)));
        fabric.settle();
        a.post(0, |post| wqe::fetch_add(post, b.remote(16), 7, a.local(0, 8)));
        fabric.settle();
        assert_eq!(word_at(&b.region.slice, 8).load(Ordering::Acquire), 0x1234_5678_9abc_def0);
        assert_eq!(word_at(&b.region.slice, 16).load(Ordering::Acquire), 7);
        for index in 0..2 {
            let outcome = a.completion(0).unwrap();
            assert_eq!((outcome.index, outcome.result.is_ok()), (index, true));
        }
        assert_eq!(fabric.violations(), (None, 0));
        drop((a, b, nics));
        assert_eq!(fabric.objects(), 0);
    }
}

#[test]
fn a_thread_serves_doorbells_of_many_queue_pairs() {
    let fabric = SoftFabric::new(Options { delay: 7, seed: 3, ..Options::default() });
    let nics = [0, 1].map(|rank| open(fabric.add(SoftConfig::ethernet(rank))));
    let [a, b] = [0, 1].map(|rank| Side::new(&nics[rank], &[SENDER; 4]));
    (0..4).for_each(|index| connect(&a, &b, index));
    let server = fabric.serve().unwrap();
    for round in 0..100 {
        for index in 0..4 {
            a.post(index, |post| wqe::fetch_add(post, b.remote(8 * index as u64), 1, a.local(512, 8)));
        }
        for index in 0..4 {
            let outcome = std::iter::repeat_with(|| a.completion(index)).flatten().next().unwrap();
            assert!(outcome.result.is_ok(), "round {round}: {outcome:?}");
        }
    }
    drop(server);
    assert!((0..4).all(|index| word_at(&b.region.slice, 8 * index).load(Ordering::Acquire) == 100));
}

#[test]
fn a_responder_answers_without_rings_and_a_master_waits_for_another_queue() {
    let fabric = SoftFabric::default();
    let nic = open(fabric.add(SoftConfig::ethernet(0)));
    let far = open(fabric.add(SoftConfig::ethernet(1)));
    // A companion, its responder on the same NIC, and the queue whose completions it counts.
    let side = Side::new(&nic, &[SENDER, MASTER, RESPONDER]);
    let other = Side::new(&far, &[SENDER]);
    for (from, index, to, theirs, rank) in
        [(&side, 0, &other, 0, 1), (&other, 0, &side, 0, 0), (&side, 1, &side, 2, 0), (&side, 2, &side, 1, 0)]
    {
        from.set.connect(index, &peer(rank), &to.set.address(theirs).unwrap(), NEVER).unwrap();
    }
    assert_eq!(side.set.state(2), Ok(QpState::ReadyToReceive));
    let first = side.info(0).completion_queue;
    side.post(1, |post| wqe::wait(post, first, 0));
    fabric.settle();
    side.post(1, |post| wqe::fetch_add(post, side.remote(128), 1, side.local(0, 8)));
    fabric.settle();
    assert_eq!(word_at(&side.region.slice, 128).load(Ordering::Acquire), 0, "nothing to count yet");
    side.post(0, |post| wqe::write_value(post, other.remote(0), 5, 8));
    fabric.settle();
    assert_eq!(word_at(&side.region.slice, 128).load(Ordering::Acquire), 1);
    assert_eq!(fabric.violations(), (None, 0));
    let info = side.info(2);
    assert_eq!((info.place, info.doorbell), (None, 0));
}

#[test]
fn whichever_call_fails_the_error_names_it_and_nothing_is_left() {
    for config in NETWORKS {
        let specs = [SENDER, MASTER, RESPONDER, SENDER];
        let mut calls = 0;
        loop {
            let fabric = SoftFabric::default();
            let far = open(fabric.add(config(1)));
            let other = Side::new(&far, &specs);
            let before = fabric.objects();
            let failing = Arc::new(FailingHca::new(Arc::new(fabric.add(config(0))), calls));
            let outcome = bring_up(failing.clone(), &specs, &other);
            assert_eq!(fabric.objects(), before, "after call {calls}");
            match outcome {
                Ok(()) => {
                    assert!(!failing.has_failed(), "call {calls} failed and nobody noticed");
                    break;
                }
                Err(DeviceQueueError::Nic(NicError::Step { nic, peer, step, source })) => {
                    assert!(matches!(source, HcaError::System { errno: 5, .. }), "{source}");
                    assert_eq!(nic, "soft_0");
                    let late = matches!(step, Step::NextHop | Step::ReadyToReceive | Step::ReadyToSend);
                    assert_eq!(peer.is_some(), late, "{step}");
                }
                Err(other) => panic!("call {calls}: {other}"),
            }
            calls += 1;
        }
        // Capabilities, domain, region, rings; pages, queues and states of four queue pairs; three steps to each peer.
        assert!(calls > 25, "only {calls} calls were made");
    }
}

/// Everything from a closed NIC to connected queue pairs.
fn bring_up(hca: Arc<dyn Hca>, specs: &[QueueSpec], other: &Side) -> Result<(), DeviceQueueError> {
    let nic = Nic::open(hca, NicConfig::default())?;
    let _region = RegisteredSlice::new(&nic, page(), Access::PAYLOAD)?;
    let set = DeviceQueues::new(&nic, &device(), specs, NEVER)?;
    for index in 0..specs.len() {
        set.connect(index, &peer(1), &other.set.address(index).unwrap(), NEVER)?;
        set.state(index)?;
    }
    assert_eq!(nic.take_failures(), []);
    Ok(())
}

#[test]
fn whichever_step_the_deadline_meets_is_named_and_nothing_is_left() {
    let specs = [SENDER, RESPONDER];
    let mut steps = Vec::new();
    for allowed in 0.. {
        let fabric = SoftFabric::default();
        let nics = [0, 1].map(|rank| open(fabric.add(SoftConfig::ethernet(rank))));
        let other = Side::new(&nics[1], &specs);
        let before = fabric.objects();
        let left = Cell::new(allowed);
        let expired = || {
            let now = left.get();
            left.set(now.max(1) - 1);
            now == 0
        };
        let outcome = DeviceQueues::new(&nics[0], &device(), &specs, &expired)
            .and_then(|set| Ok(set.connect(0, &peer(1), &other.set.address(0).unwrap(), &expired).map(|()| set)?));
        match outcome {
            Ok(_) => break,
            Err(DeviceQueueError::Nic(NicError::Deadline { step, peer, .. })) => {
                let late = matches!(step, Step::NextHop | Step::ReadyToReceive | Step::ReadyToSend);
                assert_eq!(peer.is_some(), late);
                steps.push(step);
            }
            Err(error) => panic!("{error}"),
        }
        assert_eq!(fabric.objects(), before);
    }
    let each = [
        Step::Rings,
        Step::DoorbellPage,
        Step::CompletionQueue,
        Step::QueuePair,
        Step::Init,
        Step::NextHop,
        Step::ReadyToReceive,
        Step::ReadyToSend,
    ];
    assert!(each.iter().all(|step| steps.contains(step)), "{steps:?}");
}

#[test]
fn a_nic_that_is_not_enough_is_refused_with_the_reason() {
    let refuse = |config: SoftConfig, settings: NicConfig| {
        let fabric = SoftFabric::default();
        let error = Nic::open(Arc::new(fabric.add(config)), settings).expect_err("a refusal").to_string();
        assert_eq!(fabric.objects(), 0);
        error
    };
    let with = |change: fn(&mut SoftConfig)| {
        let mut config = SoftConfig::ethernet(0);
        change(&mut config);
        refuse(config, NicConfig::default())
    };
    assert_eq!(with(|config| config.ports[0].active = false), "soft_0: port 1 is down");
    assert_eq!(with(|config| config.reliable = false), "soft_0 has no reliable connections");
    assert_eq!(with(|config| config.atomics = false), "soft_0 has no atomics");
    assert_eq!(with(|config| config.ignore_overrun = false), "soft_0 has no completion queues that ignore overruns");
    assert_eq!(
        with(|config| config.ports[0].gids.clear()),
        "soft_0: port 1: it has no GID of RoCE v2: has it an address?"
    );
    let text = "soft_0: making a protection domain: the NIC answered: out of resources";
    assert!(with(|config| config.objects = 0).starts_with(text));
    let settings = |port, gid_index| NicConfig::default().port(port).gid_index(gid_index);
    let ethernet = |settings| refuse(SoftConfig::ethernet(0), settings);
    assert_eq!(ethernet(settings(2, None)), "soft_0: asking for the port: there is no port 2; there are 1 to 1");
    assert_eq!(ethernet(settings(0, None)), "soft_0: asking for the port: there is no port 0; there are 1 to 1");
    assert_eq!(ethernet(settings(1, Some(2))), "soft_0: port 1: GID 2 is not of RoCE v2");
    assert_eq!(ethernet(settings(1, Some(9))), "soft_0: port 1: there is no GID 9, only 4");
    let mut lost = SoftConfig::infiniband(0);
    lost.ports[0].lid = 0;
    let text = "soft_0: port 1: it has no local identifier: is there a subnet manager?";
    assert_eq!(refuse(lost, NicConfig::default()), text);
}

#[test]
fn the_gid_is_the_first_that_stands_for_an_ipv4_address() {
    let fabric = SoftFabric::default();
    let mut config = SoftConfig::ethernet(0);
    config.ports[0].gids.insert(0, gin_soft_nic_host::SoftGid { gid: [0; 16], version: 2 });
    assert_eq!(open(fabric.add(config)).gid.index, 4);
    let mut config = SoftConfig::ethernet(1);
    config.ports[0].gids.truncate(2);
    config.ports[0].gids.insert(0, gin_soft_nic_host::SoftGid { gid: [0; 16], version: 2 });
    assert_eq!(open(fabric.add(config)).gid.index, 2, "one of IPv6, if there is no other");
}

#[test]
fn limits_and_memory_are_checked_before_anything_is_made() {
    let fabric = SoftFabric::default();
    let mut config = SoftConfig::ethernet(0);
    (config.log_max_queue, config.core_direct) = (6, false);
    let hca = fabric.add(config);
    let nic = open(hca.clone());
    let refuse = |spec: QueueSpec| {
        let made = DeviceQueues::new(&nic, &device(), &[spec], NEVER);
        assert_eq!(fabric.objects(), 1, "the domain");
        made.expect_err("a refusal").to_string()
    };
    let deep = QueueSpec { depth: 128, ..SENDER };
    assert_eq!(refuse(deep), "128 slots of a send queue were asked for; soft_0 has at most 64");
    let odd = QueueSpec { depth: 100, ..SENDER };
    assert_eq!(refuse(odd), "the depth of a send queue must be a power of two; 100 was asked for");
    assert_eq!(refuse(MASTER), "soft_0 has no entries that wait for completion queues");
    let page = page();
    let file = Some(gin_nic::hca::DmaBuf { file: 3, offset: 0 });
    let extent = Extent { address: page.address(), bytes: page.bytes(), dma_buf: file };
    // Safety: nothing is registered.
    let refused = unsafe { hca.register_umem(&extent, Access::RINGS) }.unwrap_err();
    assert_eq!(refused.to_string(), "memory of a device is not supported: soft_0 has no DMA-BUF support");
}

#[test]
fn peers_of_another_kind_or_version_are_refused_by_name() {
    let fabric = SoftFabric::default();
    let nics = [open(fabric.add(SoftConfig::ethernet(0))), open(fabric.add(SoftConfig::infiniband(1)))];
    let [a, b] = [0, 1].map(|rank: usize| Side::new(&nics[rank], &[SENDER]));
    let error = a.set.connect(0, &peer(1), &b.set.address(0).unwrap(), NEVER).unwrap_err();
    assert_eq!(error.to_string(), "rank 1 (host node1, port 1) is on InfiniBand, this rank on Ethernet");
    // An address that nobody has.
    let mut address = a.set.address(0).unwrap();
    address.gid = [7; 16];
    let error = a.set.connect(0, &peer(1), &address, NEVER).unwrap_err();
    assert!(
        error.to_string().starts_with("soft_0: resolving the address of the peer for rank 1 (host node1, port 1): ")
    );
    assert_eq!(a.set.state(0), Ok(QpState::Init));
}

#[test]
fn connections_begin_with_packet_numbers_of_their_own_that_both_ends_know() {
    let fabric = SoftFabric::default();
    let nics = [0, 1].map(|rank| open(fabric.add(SoftConfig::ethernet(rank))));
    let [a, b] = [0, 1].map(|rank: usize| Side::new(&nics[rank], &[SENDER; 3]));
    let mut first = Vec::new();
    for index in 0..3 {
        connect(&a, &b, index);
        let [a, b] = [&a, &b].map(|side| fabric.queue(side.info(index).queue).unwrap());
        assert_eq!((a.initial_send_psn, b.initial_send_psn), (b.initial_receive_psn, a.initial_receive_psn));
        first.extend([a.initial_send_psn, b.initial_send_psn]);
    }
    // All six are the same by chance once in 2^120 runs.
    assert!(first.iter().any(|number| *number != first[0]), "{first:?}");
}

#[test]
fn a_peer_that_begins_with_another_packet_number_is_noticed() {
    let fabric = SoftFabric::default();
    let nics = [0, 1].map(|rank| open(fabric.add(SoftConfig::ethernet(rank))));
    let [a, b] = [0, 1].map(|rank: usize| Side::new(&nics[rank], &[SENDER]));
    let mut wrong = a.set.address(0).unwrap();
    wrong.initial_psn ^= 1;
    a.set.connect(0, &peer(1), &b.set.address(0).unwrap(), NEVER).unwrap();
    b.set.connect(0, &peer(0), &wrong, NEVER).unwrap();
    a.post(0, |post| wqe::write_value(post, b.remote(0), 5, 8));
    fabric.settle();
    assert_eq!(a.completion(0).unwrap().result.unwrap_err().syndrome, Syndrome::RetryExceeded.code());
}

#[test]
fn peers_agree_on_the_smaller_mtu() {
    let fabric = SoftFabric::default();
    let mut small = SoftConfig::ethernet(1);
    small.ports[0].mtu = gin_abi::mlx5::command::Mtu::B1024;
    let nics = [open(fabric.add(SoftConfig::ethernet(0))), open(fabric.add(small))];
    let [a, b] = [0, 1].map(|rank: usize| Side::new(&nics[rank], &[SENDER]));
    connect(&a, &b, 0);
    for side in [&a, &b] {
        assert_eq!(fabric.queue(side.info(0).queue).unwrap().mtu, 1024);
    }
    a.post(0, |post| wqe::write_value(post, b.remote(0), 5, 8));
    fabric.settle();
    assert!(a.completion(0).unwrap().result.is_ok());
}

#[test]
fn connections_have_ports_of_their_own() {
    let fabric = SoftFabric::default();
    let nic = open(fabric.add(SoftConfig::ethernet(0)));
    let ports: std::collections::BTreeSet<u16> = (1..=64).map(|queue| nic.udp_port(queue, queue + 1)).collect();
    assert!(ports.len() > 60, "{} ports for 64 connections", ports.len());
    assert!(ports.iter().all(|port| nic.capabilities.udp_ports.contains(port)));
}

#[test]
fn another_subnet_or_a_setting_gives_a_global_route_header() {
    let fabric = SoftFabric::default();
    let header = |global_header: bool, prefix: u8| {
        let config = NicConfig::default().global_header(global_header);
        let nic = Nic::open(Arc::new(fabric.add(SoftConfig::infiniband(0))), config).unwrap();
        let side = Side::new(&nic, &[SENDER]);
        let mut address = side.set.address(0).unwrap();
        address.gid[0] ^= prefix;
        let path = side.set.path(1, &peer(1), &address, NEVER).unwrap();
        (path.get(Ads::GRH), path.view().get_bytes(Ads::RGID_RIP) == address.gid, path.get(Ads::HOP_LIMIT))
    };
    assert_eq!(header(false, 0), (0, false, 0));
    assert_eq!(header(true, 0), (1, true, 255));
    assert_eq!(header(false, 1), (1, true, 255));
}

#[test]
fn a_lost_peer_ends_what_was_posted_to_it() {
    let fabric = SoftFabric::default();
    let nics = [0, 1].map(|rank| open(fabric.add(SoftConfig::infiniband(rank))));
    let [a, b] = [0, 1].map(|rank: usize| Side::new(&nics[rank], &[SENDER]));
    connect(&a, &b, 0);
    let there = b.remote(0);
    drop(b);
    a.post(0, |post| wqe::write_value(post, there, 5, 8));
    fabric.settle();
    let failure = a.completion(0).unwrap().result.unwrap_err();
    assert_eq!(failure.syndrome, Syndrome::RetryExceeded.code());
    assert_eq!(a.set.state(0), Ok(QpState::Error));
}

#[test]
fn an_object_that_does_not_end_is_reported() {
    let fabric = SoftFabric::default();
    let hca = fabric.add(SoftConfig::ethernet(0));
    let nic = open(hca.clone());
    let side = Side::new(&nic, &[SENDER]);
    // Somebody ends the domain's last user behind the owner's back.
    let stolen = (1..100).map(Handle).find(|handle| hca.destroy(*handle).is_ok()).expect("the queue pair");
    drop(side);
    assert_eq!(nic.take_failures(), [HcaError::NoObject(stolen)]);
    assert_eq!(nic.take_failures(), []);
}

#[test]
fn the_host_rings_for_a_gpu_that_cannot() {
    let fabric = SoftFabric::default();
    let nics = [0, 1].map(|rank| open(fabric.add(SoftConfig::ethernet(rank))));
    let [mut a, b] = [0, 1].map(|rank: usize| Side::new(&nics[rank], &[SENDER; 3]));
    (0..3).for_each(|index| connect(&a, &b, index));
    a.words = Some((0..3).map(|_| AtomicU64::new(0)).collect());
    let lines = (0..3).map(|index| RelayLine { from: a.doorbell(index), to: a.info(index).doorbell });
    // Safety: the words and the pages outlive the relay.
    let mut relay = unsafe { DoorbellRelay::new(&nics[0], lines) };
    for round in 1..=40 {
        for index in 0..3 {
            for _ in 0..2 {
                a.post(index, |post| wqe::fetch_add(post, b.remote(8 * index as u64), 1, a.local(512, 8)));
            }
        }
        fabric.settle();
        assert_eq!(a.completion(0), None, "nobody rang");
        assert!(relay.step());
        fabric.settle();
        for index in 0..3 {
            // One doorbell for two entries.
            assert!((0..2).all(|_| a.completion(index).is_some_and(|outcome| outcome.result.is_ok())));
            assert_eq!(word_at(&b.region.slice, 8 * index as u64).load(Ordering::Acquire), 2 * round);
        }
    }
    assert_eq!(fabric.violations(), (None, 0));
}

#[test]
fn queues_are_made_as_they_were_asked_for() {
    let fabric = SoftFabric::default();
    let nic = open(fabric.add(SoftConfig::ethernet(0)));
    let side = Side::new(&nic, &[QueueSpec { depth: 64, completions: 8, collapsed: true, ..SENDER }, MASTER]);
    side.set.connect(0, &peer(0), &side.set.address(1).unwrap(), NEVER).unwrap();
    let (first, second) = (side.info(0), side.info(1));
    let queue = fabric.queue(first.queue).unwrap();
    assert_eq!((queue.log_size, queue.reads, queue.ack_timeout, queue.master), (6, 16, 20, false));
    assert!(queue.rights.remote_read && queue.rights.remote_write && queue.rights.remote_atomic);
    assert!(fabric.queue(second.queue).unwrap().master);
    let completions = [first, second].map(|info| fabric.completion_queue(info.completion_queue).unwrap());
    assert_eq!(completions.map(|queue| (queue.log_size, queue.collapsed)), [(3, true), (4, false)]);
    assert_eq!(completions.map(|queue| queue.record), [0; 2], "overruns are ignored");
}

#[test]
fn behind_a_port_that_goes_down_nobody_answers() {
    let fabric = SoftFabric::default();
    let hcas = [0, 1].map(|rank| fabric.add(SoftConfig::ethernet(rank)));
    let nics = hcas.clone().map(open);
    let [a, b] = [0, 1].map(|rank: usize| Side::new(&nics[rank], &[SENDER]));
    b.set.connect(0, &peer(0), &a.set.address(0).unwrap(), NEVER).unwrap();
    fabric.change(&hcas[0], |config| config.ports[0].active = false);
    a.set.connect(0, &peer(1), &b.set.address(0).unwrap(), NEVER).unwrap();
    a.post(0, |post| wqe::write_value(post, b.remote(0), 5, 8));
    fabric.settle();
    assert_eq!(a.completion(0).unwrap().result.unwrap_err().syndrome, Syndrome::RetryExceeded.code());
}

#[test]
fn what_was_on_its_way_is_there_when_a_registration_has_ended() {
    let fabric = SoftFabric::default();
    let nics = [0, 1].map(|rank| open(fabric.add(SoftConfig::ethernet(rank))));
    let [a, b] = [0, 1].map(|rank: usize| Side::new(&nics[rank], &[SENDER]));
    connect(&a, &b, 0);
    let window = page();
    let region = RegisteredSlice::new(&nics[1], window.clone(), Access::PAYLOAD).unwrap();
    let there = region.remote(64);
    a.post(0, |post| wqe::write_value(post, there, 5, 8));
    fabric.settle();
    assert!(a.completion(0).unwrap().result.is_ok());
    assert_eq!(word_at(&window, 64).load(Ordering::Acquire), 0, "complete, but not in view");
    drop(region);
    assert_eq!(word_at(&window, 64).load(Ordering::Acquire), 5);
}
