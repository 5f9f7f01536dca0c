// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that goes through host memory: two endpoints that are driven by hand, over a network of this process.

use gin_abi::{RemoteSignal, SignalTarget, Transfer, WindowOffset};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_net::peer::PeerNetwork;
use gin_net::staged::{Staged, Staging};
use gin_net::{Endpoint, Event, Key, LocalSignals, LocalWindow, NetError, Network, Notice, Request};
use gin_testkit::{FailOnDemand, FailSwitch, Failure, Withhold};
use std::sync::Arc;

const BYTES: u64 = 4096;
/// Polls after which something that has not happened does not.
const POLLS: u32 = 100_000;

type Net = Staged<FailOnDemand<Withhold<PeerNetwork>>>;

struct Side {
    network: Net,
    memory: Arc<Memory>,
    events: Vec<Event>,
    /// Kept as a communicator keeps it.
    _words: Arc<Memory>,
}

impl Side {
    fn poll(&mut self) {
        self.network.poll(&mut self.events);
    }

    fn post(&mut self, id: u64, transfer: Transfer, signal: Option<RemoteSignal>) {
        let request = Request { id, context: 0, peer: 1, transfer, signal, notice: None, more: false };
        assert_eq!(self.network.post(&[request]), 1);
    }

    /// Tells the peer's endpoint something past this one.
    fn tell(&mut self, id: u64, notice: Notice) {
        let (transfer, notice) = (Transfer::Nothing, Some(notice));
        let request = Request { id, context: 0, peer: 1, transfer, signal: None, notice, more: false };
        assert_eq!(self.network.inner().post(&[request]), 1);
    }

    fn outcome(&self, id: u64) -> Option<&Result<(), NetError>> {
        self.events.iter().find_map(|event| match event {
            Event::Completion { id: other, outcome } if *other == id => Some(outcome),
            _ => None,
        })
    }

    fn signals(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Signal(_))).count()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES as usize];
        self.memory.read(0, &mut bytes).unwrap();
        bytes
    }
}

/// Rank 0, whose memory goes through host memory if so said, and rank 1 likewise; window 0 of both holds numbers that
/// count from 0 and from 100.
fn pair(staged: [bool; 2], switch: &FailSwitch) -> [Side; 2] {
    let side = |rank: u32| {
        let device: Arc<dyn Device> = VirtualDevice::memory_only(rank);
        let endpoint = Endpoint { rank, ranks: 2, seed: 1, gpu: None };
        // Only what rank 0 does fails.
        let switch = if rank == 0 { switch.clone() } else { FailSwitch::new() };
        let below = FailOnDemand::new(Withhold::new(PeerNetwork::new(&endpoint), rank), switch);
        let staging = if staged[rank as usize] { Staging::Always("a test requires it") } else { Staging::Never };
        let memory = Memory::new(&device, MemoryKind::Device, BYTES).unwrap();
        let bytes: Vec<u8> = (0..BYTES).map(|at| (at as u8 % 100) + 100 * rank as u8).collect();
        memory.write(0, &bytes).unwrap();
        let words = Memory::new(&device, MemoryKind::Pinned, 64).unwrap();
        Side { network: Staged::new(below, rank, staging), memory, events: Vec::new(), _words: words }
    };
    let mut sides = [side(0), side(1)];
    let signals = |side: &mut Side| {
        let signals =
            LocalSignals { memory: side._words.clone(), nic: None, contexts: 1, per_context: 8, mailbox: None };
        side.network.register_signals(&signals).unwrap()
    };
    let keys: Vec<Key> = sides.iter_mut().map(signals).collect();
    sides.iter_mut().for_each(|side| side.network.connect_signals(&keys).unwrap());
    let window = |side: &mut Side| {
        let window = LocalWindow { id: 0, memory: side.memory.whole(), plane: None, nic: false };
        side.network.register(&window).unwrap()
    };
    let keys: Vec<Key> = sides.iter_mut().map(window).collect();
    sides.iter_mut().for_each(|side| side.network.connect(0, &keys).unwrap());
    sides
}

fn until(sides: &mut [Side; 2], done: impl Fn(&[Side; 2]) -> bool) {
    for _ in 0..POLLS {
        if done(sides) {
            return;
        }
        sides.iter_mut().for_each(Side::poll);
    }
    panic!("it does not happen: {:?} and {:?}", sides[0].events, sides[1].events);
}

fn put(from: u64, to: u64, bytes: u64) -> Transfer {
    Transfer::Put {
        source: WindowOffset { window: 0, offset: from },
        destination: WindowOffset { window: 0, offset: to },
        bytes,
    }
}

fn get(from: u64, to: u64, bytes: u64) -> Transfer {
    Transfer::Get {
        source: WindowOffset { window: 0, offset: from },
        destination: WindowOffset { window: 0, offset: to },
        bytes,
    }
}

const SIGNAL: RemoteSignal = RemoteSignal { target: SignalTarget::Id(3), amount: 7, strong: true };

const EACH: [[bool; 2]; 4] = [[false, false], [true, false], [false, true], [true, true]];

#[test]
fn puts_and_values_are_in_the_window_when_their_signal_arrives() {
    for staged in EACH {
        let mut sides = pair(staged, &FailSwitch::new());
        sides[0].post(1, put(10, 1000, 500), None);
        sides[0].post(2, put(700, 2001, 1), None);
        let value =
            Transfer::PutValue { value: 0x0807, width_log2: 1, destination: WindowOffset { window: 0, offset: 64 } };
        sides[0].post(3, value, Some(SIGNAL));
        let mut expected = sides[1].bytes();
        expected[1000..1500].copy_from_slice(&sides[0].bytes()[10..510]);
        expected[2001] = sides[0].bytes()[700];
        expected[64..66].copy_from_slice(&[7, 8]);
        until(&mut sides, |sides| sides[1].signals() == 1);
        // As the proxy does, before it raises the signal.
        sides[1].network.make_visible().unwrap();
        assert_eq!(sides[1].bytes(), expected, "{staged:?}");
        until(&mut sides, |sides| (1..4).all(|id| sides[0].outcome(id) == Some(&Ok(()))));
        assert!(sides.iter().all(|side| side.network.is_quiet()));
    }
}

#[test]
fn what_was_got_is_in_the_window_when_it_is_complete() {
    for staged in EACH {
        let mut sides = pair(staged, &FailSwitch::new());
        sides[0].post(1, get(3, 2000, 777), None);
        let mut expected = sides[0].bytes();
        expected[2000..2777].copy_from_slice(&sides[1].bytes()[3..780]);
        until(&mut sides, |sides| sides[0].outcome(1).is_some());
        assert_eq!(sides[0].outcome(1), Some(&Ok(())), "{staged:?}");
        sides[0].network.make_visible().unwrap();
        assert_eq!(sides[0].bytes(), expected, "{staged:?}");
    }
}

#[test]
fn a_get_behind_a_put_to_the_same_bytes_brings_what_was_put_and_loses_nothing() {
    let mut sides = pair([true; 2], &FailSwitch::new());
    sides[0].post(1, put(0, 1000, 100), None);
    sides[0].post(2, get(1000, 3000, 100), None);
    until(&mut sides, |sides| sides[0].outcome(1).is_some() && sides[0].outcome(2).is_some());
    sides[0].network.make_visible().unwrap();
    let (own, there) = (sides[0].bytes(), sides[1].bytes());
    assert_eq!(own[3000..3100], own[..100], "got");
    assert_eq!(there[1000..1100], own[..100], "put");
}

#[test]
fn many_requests_are_complete_once_each_also_when_few_are_taken() {
    let mut sides = pair([true; 2], &FailSwitch::new());
    let mut next = 0;
    while next < 5000 {
        let at = next % 40 * 100;
        let transfer = if next % 3 == 0 { get(at, at, 96) } else { put(at, at, 96) };
        let request = Request {
            id: next,
            context: 0,
            peer: 1,
            transfer,
            signal: (next % 3 == 1).then_some(SIGNAL),
            notice: None,
            more: true,
        };
        next += sides[0].network.post(&[request]) as u64;
        sides.iter_mut().for_each(Side::poll);
    }
    until(&mut sides, |sides| sides[0].events.len() == 5000 && sides[1].signals() == 1667);
    let mut ids: Vec<u64> = (0..5000).filter(|id| sides[0].outcome(*id) == Some(&Ok(()))).collect();
    ids.dedup();
    assert_eq!(ids.len(), 5000);
    assert!(sides.iter_mut().all(|side| side.network.is_quiet() && side.network.deregister(0)));
}

#[test]
fn ranges_past_the_end_are_refused_though_there_is_memory() {
    let mut sides = pair([true; 2], &FailSwitch::new());
    let past = |rank| Some(Err(NetError::OutOfRange { window: 0, rank, end: BYTES + 1, length: BYTES }));
    sides[0].post(1, put(0, BYTES - 9, 10), None);
    sides[0].post(2, put(BYTES - 9, 0, 10), None);
    sides[0].post(3, get(BYTES - 9, 0, 10), None);
    sides[0].post(4, get(0, BYTES - 9, 10), None);
    sides[0].post(5, Transfer::Nothing, Some(SIGNAL));
    until(&mut sides, |sides| sides[0].events.len() == 5);
    let outcomes: Vec<_> = (1..5).map(|id| sides[0].outcome(id).cloned()).collect();
    assert_eq!(outcomes, [past(1), past(0), past(1), past(0)]);
    // Bytes that did not arrive are never signalled.
    assert!(matches!(sides[0].outcome(5), Some(Err(NetError::Failed { .. }))), "{:?}", sides[0].outcome(5));
    assert_eq!(sides[1].signals(), 0);
}

#[test]
fn what_the_owner_has_closed_is_not_got() {
    let mut sides = pair([false, true], &FailSwitch::new());
    assert!(sides[1].network.deregister(0));
    sides[0].post(1, get(0, 0, 8), None);
    until(&mut sides, |sides| sides[0].outcome(1).is_some());
    assert!(matches!(sides[0].outcome(1), Some(Err(NetError::Failed { peer: 1, .. }))), "{:?}", sides[0].outcome(1));
}

#[test]
fn a_put_into_a_closed_window_is_never_signalled() {
    let mut sides = pair([false, true], &FailSwitch::new());
    sides[0].post(1, put(0, 0, 8), Some(SIGNAL));
    (0..10).for_each(|_| sides[0].poll());
    let _ = sides[1].network.deregister(0);
    sides[1].poll();
    assert_eq!(sides[1].signals(), 1, "whether it counts is said when what has arrived is made visible");
    let told = sides[1].signals() > 0 && sides[1].network.make_visible().is_ok();
    assert!(!told, "{:?}", sides[1].events);
    until(&mut sides, |sides| sides[0].outcome(1).is_some());
    assert!(matches!(sides[0].outcome(1), Some(Err(NetError::Failed { peer: 1, .. }))), "{:?}", sides[0].outcome(1));
}

#[test]
fn a_window_stays_until_copies_of_it_have_ended() {
    let mut sides = pair([true, false], &FailSwitch::new());
    sides[0].post(1, put(0, 0, 8), None);
    assert!(!sides[0].network.deregister(0), "a copy out of it has not been made");
    until(&mut sides, |sides| sides[0].outcome(1) == Some(&Ok(())));
    assert!(sides[0].network.deregister(0));
    sides[0].post(2, put(0, 0, 8), None);
    until(&mut sides, |sides| sides[0].outcome(2).is_some());
    assert!(matches!(sides[0].outcome(2), Some(Err(NetError::UnknownWindow { .. }))), "{:?}", sides[0].outcome(2));
}

#[test]
fn a_failed_request_below_fails_what_is_behind_it() {
    for staged in [[true, false], [false, true], [true, true]] {
        let switch = FailSwitch::new();
        let mut sides = pair(staged, &switch);
        switch.fail_after(0, Failure::Status(5));
        sides[0].post(1, put(0, 0, 8), None);
        sides[0].post(2, put(8, 8, 8), Some(SIGNAL));
        until(&mut sides, |sides| sides[0].outcome(1).is_some() && sides[0].outcome(2).is_some());
        assert!(matches!(sides[0].outcome(1), Some(Err(NetError::Failed { status: 5, .. }))), "{staged:?}");
        assert!(sides[0].outcome(2).is_some_and(Result::is_err), "{staged:?}");
        assert_eq!(sides[1].signals(), 0, "{staged:?}");
    }
}

#[test]
fn who_waits_for_an_answer_learns_that_the_peer_is_gone() {
    for transfer in [get(0, 0, 8), put(0, 0, 8)] {
        let switch = FailSwitch::new();
        let mut sides = pair([false, true], &switch);
        sides[0].post(1, transfer, None);
        // It has asked, or told, and the peer does not answer: it is not polled.
        (0..10).for_each(|_| sides[0].poll());
        switch.fail_peer(1, Failure::PeerLost);
        let begin = std::time::Instant::now();
        while sides[0].outcome(1).is_none() {
            assert!(begin.elapsed().as_secs() < 60, "nobody says so");
            sides[0].poll();
        }
        let outcome = sides[0].outcome(1);
        assert!(matches!(outcome, Some(Err(NetError::PeerLost { peer: 1, .. }))), "{outcome:?}");
    }
}

#[test]
fn a_put_is_complete_once_it_is_in_the_window() {
    for staged in EACH {
        let mut sides = pair(staged, &FailSwitch::new());
        sides[0].post(1, put(10, 1000, 500), None);
        let mut expected = sides[1].bytes();
        expected[1000..1500].copy_from_slice(&sides[0].bytes()[10..510]);
        // One step after the other, so that it is looked at as soon as it is complete.
        while sides[0].outcome(1).is_none() {
            sides[1].poll();
            sides[0].poll();
        }
        if staged[1] {
            assert_eq!(sides[1].bytes(), expected, "{staged:?}");
        }
        sides[1].poll();
        sides[1].network.make_visible().unwrap();
        assert_eq!(sides[1].bytes(), expected, "{staged:?}");
    }
}

#[test]
fn notices_that_nobody_sent_for_change_nothing() {
    let mut sides = pair([true; 2], &FailSwitch::new());
    let strange = [
        Notice::Ready { tag: 1, found: true },
        Notice::Ready { tag: 99, found: false },
        Notice::Wanted { window: 0, offset: u64::MAX - 9, bytes: 5, tag: 1 },
        Notice::Wanted { window: 0, offset: u64::MAX - 9, bytes: 50, tag: 2 },
        Notice::Wanted { window: u32::MAX, offset: 0, bytes: 1, tag: 3 },
        Notice::Alive,
    ];
    for (id, notice) in (1..).zip(strange) {
        sides[0].tell(id, notice);
    }
    let before = sides[1].bytes();
    sides[0].post(3, Transfer::Nothing, Some(SIGNAL));
    until(&mut sides, |sides| sides[1].signals() == 1);
    assert_eq!(sides[1].bytes(), before);
    sides[1].network.make_visible().unwrap();
}

#[test]
fn what_is_said_to_have_arrived_where_nothing_can_is_a_fault() {
    for (window, offset, bytes) in [(0, u64::MAX - 9, 5), (0, BYTES, 1), (7, 0, 1), (u32::MAX, 0, 0)] {
        let mut sides = pair([true; 2], &FailSwitch::new());
        sides[0].tell(1, Notice::Arrived { window, offset, bytes, tag: 5 });
        sides[0].post(2, Transfer::Nothing, Some(SIGNAL));
        until(&mut sides, |sides| sides[1].signals() == 1);
        let seen = sides[1].network.make_visible();
        let as_it_is = matches!(seen, Err(NetError::OutOfRange { .. } | NetError::UnknownWindow { .. }));
        assert!(as_it_is, "{window}, {offset}, {bytes}: {seen:?}");
    }
}

#[test]
fn a_network_that_carries_no_notices_is_refused_with_the_reason() {
    let endpoint = Endpoint { rank: 0, ranks: 2, seed: 1, gpu: None };
    let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
    let memory = Memory::new(&device, MemoryKind::Pinned, 64).unwrap();
    let signals = LocalSignals { memory, nic: None, contexts: 1, per_context: 8, mailbox: None };
    let mut network =
        Staged::new(PeerNetwork::new(&endpoint), 0, Staging::Unless(Arc::new(|_| Err("it is far".to_owned()))));
    let error = network.register_signals(&signals).unwrap_err().to_string();
    assert!(error.contains("host memory") && error.contains("it is far"), "{error}");
    assert!(network.describe().contains("it is far"), "{}", network.describe());
}
