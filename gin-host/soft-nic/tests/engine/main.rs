// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine executes posted entries, shows data no sooner than it must, and refuses what a NIC refuses.

mod properties;
mod world;

use gin_abi::mlx5::command::QpState;
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe::{self, Flags, Segment};
use gin_soft_nic::faults::Switch;
use gin_soft_nic::tables::Rights;
use gin_soft_nic::{Fault, FaultKind, Options, Progress, ViolationKind};
use world::{ALL, COMPLETION, QUEUE, REGION, SIZE, World};

const C: Flags = Flags::COMPLETION;
const N: Flags = Flags::NONE;

fn world() -> World {
    World::new(Options::default())
}

/// Fills the strict region of a side with a pattern.
fn pattern(world: &mut World, side: u32, count: u64) -> Vec<u8> {
    let bytes: Vec<u8> = (0..count).map(|at| (at * 7 + 3) as u8).collect();
    world.memory.put(World::place(side, false), &bytes);
    bytes
}

fn failed(syndrome: Syndrome) -> Option<u8> {
    Some(syndrome.code())
}

#[test]
fn a_write_arrives_and_completes_only_if_it_asks_for_it() {
    let mut world = world();
    let sent = pattern(&mut world, 0, 100);
    let entry = wqe::write(world.post(0, N), World::remote(1, false, 40), World::local(0, false, 0, 100));
    world.write(0, entry);
    world.ring(0);
    world.settle();
    assert_eq!(world.memory.bytes(World::place(1, false) + 40, 100), sent);
    assert_eq!(world.completion(0), None);
    world.write(0, wqe::nop(world.post(0, C)));
    world.ring(0);
    world.settle();
    let outcome = world.completion(0).expect("that of the nop");
    assert_eq!((outcome.index, outcome.queue, outcome.operation, outcome.result), (1, QUEUE, 0, Ok(0)));
}

#[test]
fn inline_bytes_and_no_others_are_written() {
    for count in 1..=8 {
        let mut world = world();
        world.memory.put(World::place(1, false), &[0xee; 16]);
        let entry = wqe::write_value(world.post(0, C), World::remote(1, false, 3), 0x1122_3344_5566_7788, count);
        world.write(0, entry);
        world.ring(0);
        world.settle();
        assert_eq!(world.syndromes(0), [None]);
        let seen = world.memory.bytes(World::place(1, false), 16);
        let value = 0x1122_3344_5566_7788u64.to_le_bytes();
        assert_eq!(&seen[3..3 + count as usize], &value[..count as usize]);
        assert!(seen[..3].iter().chain(&seen[3 + count as usize..]).all(|&byte| byte == 0xee));
    }
}

#[test]
fn data_of_a_read_comes_into_view_by_a_dump_that_is_executed_behind_it() {
    let mut world = world();
    let there = pattern(&mut world, 1, 64);
    let view = World::place(0, false) + 512;
    let read = wqe::read(world.post(0, C), World::remote(1, false, 0), World::local(0, false, 512, 64));
    world.write(0, read);
    world.ring(0);
    world.settle();
    assert_eq!(world.completion(0).map(|outcome| outcome.result), Some(Ok(64)));
    assert_eq!(world.memory.bytes(view, 64), [0; 64], "complete, but not in view");
    world.write(0, wqe::dump(world.post(0, C), World::local(0, false, 0, 1)));
    world.ring(0);
    world.settle();
    assert_eq!(world.memory.bytes(view, 64), there);
}

#[test]
fn a_dump_behind_a_read_needs_a_fence() {
    for (flags, visible) in [(C, false), (C.and(Flags::LOCAL_FENCE), false), (C.and(Flags::FENCE), true)] {
        let mut world = World::new(Options { delay: 10, ..Options::default() });
        let there = pattern(&mut world, 1, 64);
        let read = wqe::read(world.post(0, N), World::remote(1, false, 0), World::local(0, false, 512, 64));
        world.write(0, read);
        world.write(0, wqe::dump(world.post(0, flags), World::local(0, false, 0, 1)));
        world.ring(0);
        world.settle();
        assert_eq!(world.syndromes(0), [None]);
        assert_eq!(world.memory.bytes(World::place(0, false) + 512, 64) == there, visible, "{flags:?}");
    }
}

#[test]
fn data_of_a_relaxed_region_comes_into_view_by_a_strict_write_of_its_queue_pair_only() {
    let mut world = world();
    let sent = pattern(&mut world, 0, 32);
    let view = World::place(1, true);
    let write = wqe::write(world.post(0, C), World::remote(1, true, 0), World::local(0, false, 0, 32));
    world.write(0, write);
    world.ring(0);
    world.settle();
    assert_eq!(world.syndromes(0), [None]);
    assert_eq!(world.memory.bytes(view, 32), [0; 32], "complete, but not in view");
    // None of these changes anything: another write to the relaxed region, an atomic on it, a strict write of the other
    // direction.
    let entry = wqe::write_value(world.post(0, C), World::remote(1, true, 256), 1, 8);
    world.write(0, entry);
    let entry = wqe::fetch_add(world.post(0, C), World::remote(1, true, 512), 1, World::local(0, false, 512, 8));
    world.write(0, entry);
    world.ring(0);
    let entry = wqe::write_value(world.post(1, C), World::remote(0, false, 256), 1, 8);
    world.write(1, entry);
    world.ring(1);
    world.settle();
    assert_eq!(world.memory.bytes(view, 32), [0; 32]);
    let entry = wqe::fetch_add(world.post(0, C), World::remote(1, false, 0), 5, World::local(0, false, 512, 8));
    world.write(0, entry);
    world.ring(0);
    world.settle();
    assert_eq!(world.memory.bytes(view, 32), sent);
    assert_eq!(world.memory.word(World::place(1, false)), 5);
}

#[test]
fn the_source_of_a_held_write_may_change() {
    let mut world = world();
    let sent = pattern(&mut world, 0, 32);
    let write = wqe::write(world.post(0, C), World::remote(1, true, 0), World::local(0, false, 0, 32));
    world.write(0, write);
    world.ring(0);
    world.settle();
    world.memory.put(World::place(0, false), &[0xff; 32]);
    let entry = wqe::write_value(world.post(0, C), World::remote(1, false, 0), 1, 8);
    world.write(0, entry);
    world.ring(0);
    world.settle();
    assert_eq!(world.memory.bytes(World::place(1, true), 32), sent);
}

#[test]
fn a_nic_that_reads_sees_what_it_wrote_before() {
    let mut world = world();
    let sent = pattern(&mut world, 0, 32);
    let write = wqe::write(world.post(0, C), World::remote(1, true, 0), World::local(0, false, 0, 32));
    world.write(0, write);
    let read = wqe::read(world.post(0, C), World::remote(1, true, 0), World::local(0, true, 0, 32));
    world.write(0, read);
    let entry = wqe::dump(world.post(0, C.and(Flags::FENCE)), World::local(0, false, 0, 1));
    world.write(0, entry);
    world.ring(0);
    world.settle();
    assert_eq!(world.memory.bytes(World::place(0, true), 32), sent);
}

#[test]
fn what_a_nic_received_is_what_it_sends_on_and_adds_to() {
    let mut world = world();
    let entry = wqe::write_value(world.post(0, N), World::remote(1, true, 0), 40, 8);
    world.write(0, entry);
    let entry = wqe::fetch_add(world.post(0, C), World::remote(1, true, 0), 2, World::local(0, false, 128, 8));
    world.write(0, entry);
    let entry = wqe::write_value(world.post(0, C), World::remote(1, true, 8), 9, 8);
    world.write(0, entry);
    world.ring(0);
    world.settle();
    assert_eq!(world.memory.word(World::place(1, true)), 42);
    assert_eq!(world.memory.word(World::place(1, true) + 8), 0, "not in view, but there for the NIC");
    let entry = wqe::write(world.post(1, C), World::remote(0, false, 256), World::local(1, true, 8, 8));
    world.write(1, entry);
    world.ring(1);
    world.settle();
    assert_eq!(world.memory.word(World::place(0, false) + 256), 9);
}

#[test]
fn atomics_add_and_bring_the_old_value() {
    let mut world = world();
    world.memory.put(World::place(1, false) + 8, &u64::MAX.to_le_bytes());
    for amount in [3, 4] {
        let old = World::local(0, false, 128, 8);
        let entry = wqe::fetch_add(world.post(0, C), World::remote(1, false, 8), amount, old);
        world.write(0, entry);
    }
    world.ring(0);
    world.settle();
    assert_eq!(world.memory.word(World::place(1, false) + 8), 6);
    assert_eq!(world.memory.word(World::place(0, false) + 128), 2);
    assert_eq!(world.completion(0).map(|outcome| outcome.result), Some(Ok(8)));
}

#[test]
fn a_fence_waits_for_reads_and_atomics_and_others_overtake_them() {
    let order = |flags: Flags| {
        let mut world = World::new(Options { delay: 5, ..Options::default() });
        world.memory.put(World::place(1, false), &7u64.to_le_bytes());
        let read = wqe::read(world.post(0, N), World::remote(1, false, 0), World::local(0, true, 0, 8));
        world.write(0, read);
        // Changes, at the peer, the data that the read returns.
        let entry = wqe::write_value(world.post(0, flags), World::remote(1, false, 0), 9, 8);
        world.write(0, entry);
        world.write(0, wqe::dump(world.post(0, C.and(Flags::FENCE)), World::local(0, false, 0, 1)));
        world.ring(0);
        world.settle();
        assert_eq!(world.syndromes(0), [None]);
        world.memory.word(World::place(0, true))
    };
    assert_eq!(order(Flags::FENCE), 7);
    assert_eq!(order(N), 9, "without a fence a read may see what comes later");
}

#[test]
fn no_more_reads_are_under_way_than_the_queue_pair_may_have() {
    let mut world = World::new(Options { delay: 50, ..Options::default() });
    world.queue(0).reads = 2;
    for at in 0..4 {
        let read = wqe::read(world.post(0, C), World::remote(1, false, 0), World::local(0, true, 64 * at, 8));
        world.write(0, read);
    }
    world.ring(0);
    for _ in 0..20 {
        world.step();
    }
    assert_eq!(world.queue(0).started, 2);
    world.settle();
    assert_eq!(world.syndromes(0), [None; 4]);
}

#[test]
fn completions_are_in_order_and_owners_flip_from_round_to_round() {
    let mut world = World::new(Options { delay: 3, seed: 9, ..Options::default() });
    for round in 0..40u64 {
        for _ in 0..SIZE / 2 {
            let entry = wqe::fetch_add(world.post(0, C), World::remote(1, false, 0), 1, World::local(0, false, 64, 8));
            world.write(0, entry);
        }
        world.ring(0);
        world.settle();
        for at in 0..SIZE / 2 {
            let outcome = world.completion(0).expect("a completion");
            assert_eq!(u64::from(outcome.index), round * SIZE / 2 + at);
        }
        assert_eq!(world.completion(0), None);
    }
}

#[test]
fn indices_pass_two_to_the_sixteen() {
    let mut world = world();
    while world.next[0] < (1 << 16) + 3 * SIZE {
        for _ in 0..SIZE {
            world.write(0, wqe::nop(world.post(0, C)));
        }
        world.ring(0);
        world.settle();
        assert_eq!(world.syndromes(0), [None; SIZE as usize]);
    }
    assert_eq!(world.engine.violations().1, 0);
}

#[test]
fn an_entry_waits_for_the_completion_that_it_names() {
    let mut world = world();
    world.queue(0).master = true;
    // Waits for the second completion of a queue of the same NIC, which another queue pair uses.
    let mut other = *world.queue(1);
    other.device = 0;
    other.domain = 10;
    world.queues[6] = other;
    world.completions[3] = world.completions[COMPLETION as usize + 1];
    world.completions[3].device = 0;
    world.write(0, wqe::wait(world.post(0, N), 3, 1));
    world.write(0, wqe::nop(world.post(0, C)));
    world.ring(0);
    world.settle();
    assert_eq!(world.syndromes(0), []);
    world.completions[3].produced = 1;
    world.settle();
    assert_eq!(world.syndromes(0), []);
    world.completions[3].produced = 2;
    world.settle();
    assert_eq!(world.syndromes(0), [None]);
    // Numbers wrap at 2^24.
    world.completions[3].produced = (1 << 24) + 1;
    world.write(0, wqe::wait(world.post(0, C), 3, (1 << 24) - 1));
    world.write(0, wqe::wait(world.post(0, C), 3, (1 << 24) + 1));
    world.ring(0);
    world.settle();
    assert_eq!(world.syndromes(0), [None]);
}

#[test]
fn only_a_core_direct_master_waits_by_default() {
    for (needs, expected) in [(true, failed(Syndrome::LocalOperation)), (false, None)] {
        let mut world = World::new(Options { wait_needs_master: needs, ..Options::default() });
        world.completions[COMPLETION as usize].produced = 1;
        world.seen[0] = 1;
        world.write(0, wqe::wait(world.post(0, C), COMPLETION, 0));
        world.ring(0);
        world.settle();
        assert_eq!(world.syndromes(0), [expected]);
        assert_eq!(world.engine.violations().0.map(|first| first.kind), needs.then_some(ViolationKind::NotMaster));
    }
}

/// Writes and announces a NOP as device code of DOCA GPUNetIO does, up to the first doorbell.
fn ring_early(world: &mut World) -> u64 {
    world.write(0, wqe::nop(world.post(0, C)));
    let end = world.next[0];
    world.ring_with(0, end);
    end
}

#[test]
fn an_early_doorbell_is_a_violation_or_held_until_the_record_has_caught_up() {
    for early_doorbells in [false, true] {
        let mut world = World::new(Options { early_doorbells, ..Options::default() });
        for round in 0..3 * SIZE {
            let end = ring_early(&mut world);
            world.settle();
            if !early_doorbells {
                let first = world.engine.violations().0.map(|first| (first.kind, first.expected, first.seen));
                assert_eq!(first, Some((ViolationKind::DoorbellBeforeRecord, 1, 0)));
                break;
            }
            assert_eq!(world.syndromes(0), [], "entry {round} began before its record");
            world.record(0, end);
            // Some device code rings again, and the engine must not need it.
            if round % 2 == 0 {
                world.ring_with(0, end);
            }
            world.settle();
            assert_eq!(world.syndromes(0), [None], "round {round}");
            assert_eq!(world.engine.violations().1, 0);
        }
    }
}

#[test]
fn an_early_doorbell_for_too_many_entries_is_refused_at_once() {
    let mut world = World::new(Options { early_doorbells: true, ..Options::default() });
    world.queue(0).stalled = true;
    for _ in 0..SIZE {
        world.write(0, wqe::nop(world.post(0, C)));
    }
    world.ring(0);
    world.settle();
    ring_early(&mut world);
    assert_eq!(world.engine.violations().0.map(|first| first.kind), Some(ViolationKind::Overwritten));
}

#[test]
fn reserved_bytes_are_refused_or_ignored_in_every_entry() {
    for ignore_reserved in [false, true] {
        for kind in 0..6 {
            let mut world = World::new(Options { ignore_reserved, wait_needs_master: false, ..Options::default() });
            world.memory.put(World::place(0, false), &[7; 8]);
            let (remote, local) = (World::remote(1, false, 0), World::local(0, false, 0, 8));
            let mut slot = wqe::Slot::default();
            let entry: &[Segment] = match kind {
                0 => &wqe::nop(world.post(0, C)),
                1 => &wqe::write(world.post(0, C), remote, local),
                2 => &wqe::read(world.post(0, C), remote, local),
                3 => &wqe::fetch_add(world.post(0, C), remote, 5, local),
                4 => &wqe::wait(world.post(0, C), COMPLETION, 0xff_ffff),
                _ => &wqe::dump(world.post(0, C), local),
            };
            slot[..entry.len()].copy_from_slice(entry);
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut slot);
            // Signature, stream and immediate, then the reserved bytes of the segments.
            bytes[8..11].fill(0xa5);
            bytes[12..16].fill(0xa5);
            match kind {
                1 | 2 => bytes[28..32].fill(0xa5),
                3 => {
                    bytes[28..32].fill(0xa5);
                    bytes[40..48].fill(0xa5);
                }
                4 => bytes[16..24].fill(0xa5),
                _ => {}
            }
            world.write(0, slot);
            world.ring(0);
            world.settle();
            let expected = if ignore_reserved { None } else { failed(Syndrome::LocalOperation) };
            assert_eq!(world.syndromes(0), [expected], "entry {kind}");
            assert_eq!(world.engine.violations().1, u64::from(!ignore_reserved));
            if ignore_reserved && kind == 3 {
                assert_eq!(world.memory.word(World::place(1, false)), 5);
            }
        }
    }
}

#[test]
fn a_dump_without_a_fence_shows_the_data_of_earlier_reads_only_if_it_waits_for_them() {
    for dump_waits_for_reads in [false, true] {
        let mut world = World::new(Options { delay: 7, dump_waits_for_reads, ..Options::default() });
        let there = pattern(&mut world, 1, 64);
        let read = wqe::read(world.post(0, C), World::remote(1, false, 0), World::local(0, false, 512, 64));
        world.write(0, read);
        world.write(0, wqe::dump(world.post(0, C), World::local(0, false, 0, 1)));
        world.ring(0);
        world.settle();
        assert_eq!(world.syndromes(0), [None; 2]);
        let seen = world.memory.bytes(World::place(0, false) + 512, 64) == there;
        assert_eq!(seen, dump_waits_for_reads);
    }
}

#[test]
fn waiting_for_a_queue_that_is_not_there_fails() {
    for number in [0, 7, COMPLETION + 1] {
        let mut world = world();
        world.queue(0).master = true;
        world.write(0, wqe::wait(world.post(0, N), number, 0));
        world.ring(0);
        world.settle();
        assert_eq!(world.syndromes(0), [failed(Syndrome::LocalOperation)], "queue {number}");
    }
}

/// Posts one entry after `change`, with another entry behind it. Returns the syndromes and the states of the two queue
/// pairs.
fn refusal<const K: usize>(
    change: impl Fn(&mut World),
    entry: impl Fn(&World) -> [Segment; K],
) -> (Vec<Option<u8>>, QpState, QpState) {
    let mut world = world();
    change(&mut world);
    let entry = entry(&world);
    world.write(0, entry);
    world.write(0, wqe::nop(world.post(0, N)));
    world.ring(0);
    world.settle();
    let syndromes = world.syndromes(0);
    (syndromes, world.queue(0).state, world.queue(1).state)
}

#[test]
fn each_refusal_has_the_syndrome_of_hardware_and_breaks_what_hardware_breaks() {
    let both = |syndrome| (vec![failed(syndrome), failed(Syndrome::Flushed)], QpState::Error, QpState::Error);
    let sender = |syndrome| (vec![failed(syndrome), failed(Syndrome::Flushed)], QpState::Error, QpState::ReadyToSend);
    let same = |_: &mut World| {};
    let write = |offset: u64, bytes: u32| {
        move |world: &World| {
            wqe::write(world.post(0, N), World::remote(1, false, offset), World::local(0, false, 0, bytes))
        }
    };
    let add = |offset: u64, bytes: u32| {
        move |world: &World| {
            let old = World::local(0, false, 0, bytes);
            wqe::fetch_add(world.post(0, N), World::remote(1, false, offset), 1, old)
        }
    };
    let read = |world: &World| wqe::read(world.post(0, N), World::remote(1, false, 0), World::local(0, true, 0, 8));
    let without = |rights: Rights| {
        move |world: &mut World| {
            world.region(1, false).rights = rights;
            world.region(1, true).rights = rights;
        }
    };

    // The peer's region: key, bounds, rights, domain.
    assert_eq!(refusal(|world| world.region(1, false).live = false, write(0, 8)), both(Syndrome::RemoteAccess));
    assert_eq!(refusal(|world| world.region(1, false).key ^= 1, write(0, 8)), both(Syndrome::RemoteAccess));
    assert_eq!(refusal(|world| world.region(1, false).domain = 1, write(0, 8)), both(Syndrome::RemoteAccess));
    assert_eq!(refusal(same, write(REGION - 7, 8)), both(Syndrome::RemoteAccess));
    assert_eq!(refusal(same, write(u64::MAX - 0x7000_0000, 8)), both(Syndrome::RemoteAccess));
    assert_eq!(refusal(without(Rights { remote_write: false, ..ALL }), write(0, 8)), both(Syndrome::RemoteAccess));
    assert_eq!(refusal(without(Rights { remote_atomic: false, ..ALL }), add(0, 8)), both(Syndrome::RemoteAccess));
    assert_eq!(refusal(without(Rights { remote_read: false, ..ALL }), read), both(Syndrome::RemoteAccess));
    // Permissions of the peer's queue pair, and alignment.
    let no_rights = |world: &mut World| world.queue(1).rights = Rights::default();
    assert_eq!(refusal(no_rights, write(0, 8)), both(Syndrome::RemoteInvalidRequest));
    assert_eq!(refusal(no_rights, add(0, 8)), both(Syndrome::RemoteInvalidRequest));
    assert_eq!(refusal(no_rights, read), both(Syndrome::RemoteInvalidRequest));
    assert_eq!(refusal(same, add(4, 8)), both(Syndrome::RemoteInvalidRequest));
    // This end: key, bounds, rights, length.
    assert_eq!(refusal(|world| world.region(0, false).live = false, write(0, 8)), sender(Syndrome::LocalProtection));
    assert_eq!(refusal(same, write(0, REGION as u32 + 1)), sender(Syndrome::LocalProtection));
    let read_only = |world: &mut World| {
        world.region(0, true).rights.local_write = false;
        world.region(0, false).rights.local_write = false;
    };
    assert_eq!(refusal(read_only, read), sender(Syndrome::LocalProtection));
    assert_eq!(refusal(read_only, add(0, 8)), sender(Syndrome::LocalProtection));
    assert_eq!(refusal(same, add(0, 4)), sender(Syndrome::LocalLength));
    assert_eq!(refusal(|world| world.queue(0).log_message = 4, write(0, 17)), sender(Syndrome::LocalLength));
    assert_eq!(refusal(same, write(0, 0)), sender(Syndrome::LocalLength), "a length of 0 is 2 GiB");
    // No peer: destroyed, not ready, connected to another.
    assert_eq!(refusal(|world| world.queue(1).live = false, write(0, 8)), sender(Syndrome::RetryExceeded));
    assert_eq!(refusal(|world| world.queue(0).peer = 77, write(0, 8)), sender(Syndrome::RetryExceeded));
    assert_eq!(refusal(|world| world.queue(0).peer_device = 7, write(0, 8)), sender(Syndrome::RetryExceeded));
    assert_eq!(refusal(|world| world.queue(1).peer_device = 7, write(0, 8)), sender(Syndrome::RetryExceeded));
    assert_eq!(refusal(|world| world.queue(1).mtu = 4096, write(0, 8)), sender(Syndrome::RetryExceeded));
    assert_eq!(refusal(|world| world.queue(1).peer = 77, write(0, 8)), sender(Syndrome::RetryExceeded));
    assert_eq!(refusal(|world| world.queue(1).initial_receive_psn = 1, write(0, 8)), sender(Syndrome::RetryExceeded));
    assert_eq!(refusal(|world| world.queue(0).initial_send_psn = 1, read), sender(Syndrome::RetryExceeded));
    let (syndromes, ..) = refusal(|world| world.queue(1).state = QpState::Init, read);
    assert_eq!(syndromes[0], failed(Syndrome::RetryExceeded));
}

#[test]
fn without_a_time_out_a_lost_peer_is_waited_for_until_the_queue_pair_is_stopped() {
    let mut world = world();
    world.queue(0).ack_timeout = 0;
    world.queue(1).live = false;
    let entry = wqe::write_value(world.post(0, N), World::remote(1, false, 0), 1, 8);
    world.write(0, entry);
    world.ring(0);
    world.settle();
    assert_eq!(world.syndromes(0), []);
    world.queue(0).state = QpState::Error;
    world.settle();
    assert_eq!(world.syndromes(0), [failed(Syndrome::Flushed)]);
}

#[test]
fn a_peer_that_vanishes_while_a_read_is_under_way_is_noticed() {
    let mut world = World::new(Options { delay: 5, ..Options::default() });
    let read = wqe::read(world.post(0, N), World::remote(1, false, 0), World::local(0, false, 0, 8));
    world.write(0, read);
    world.ring(0);
    assert_eq!(world.step(), Progress::Moved);
    world.queue(1).live = false;
    world.settle();
    assert_eq!(world.syndromes(0), [failed(Syndrome::RetryExceeded)]);
}

#[test]
fn what_is_posted_to_a_broken_queue_pair_is_flushed() {
    let mut world = world();
    world.queue(0).state = QpState::Error;
    for _ in 0..3 {
        world.write(0, wqe::nop(world.post(0, N)));
        world.ring(0);
    }
    world.settle();
    assert_eq!(world.syndromes(0), [failed(Syndrome::Flushed); 3]);
    assert_eq!(world.engine.violations().1, 0);
}

#[test]
fn switches_make_entries_fail_once() {
    let run = |kind| {
        let mut world = World::new(Options { delay: 10, ..Options::default() });
        world.faults = vec![Switch::on(Fault { device: None, queue: Some(QUEUE), entry: 1, kind })];
        for _ in 0..3 {
            let entry = wqe::fetch_add(world.post(0, C), World::remote(1, false, 0), 1, World::local(0, false, 64, 8));
            world.write(0, entry);
        }
        world.ring(0);
        world.settle();
        assert!(!world.faults[0].is_on(), "it happened");
        (world.syndromes(0), world.memory.word(World::place(1, false)))
    };
    let (bad, flushed) = (failed(Syndrome::RetryExceeded), failed(Syndrome::Flushed));
    let (syndromes, value) = run(FaultKind::Drop);
    assert_eq!((syndromes, value), (vec![None, bad, flushed], 1), "nor does what comes behind it arrive");
    // The next entry began before the failure was known. It took effect and is flushed all the same.
    let (syndromes, value) = run(FaultKind::LoseAnswer);
    assert_eq!((syndromes, value), (vec![None, bad, flushed], 3));
    assert_eq!(run(FaultKind::Delay(100)), (vec![None; 3], 3));
    let (syndromes, _) = run(FaultKind::Fail(Syndrome::NotReadyExceeded));
    assert_eq!(syndromes, [None, failed(Syndrome::NotReadyExceeded), flushed]);
}

/// Returns the first violation of a world with one entry written, after `ring`, and its completions.
fn violation(ring: impl Fn(&mut World)) -> (Option<ViolationKind>, Vec<Option<u8>>) {
    let mut world = world();
    for _ in 0..2 {
        world.write(0, wqe::nop(world.post(0, C)));
    }
    world.ring(0);
    world.settle();
    assert_eq!(world.syndromes(0), [None; 2]);
    world.write(0, wqe::nop(world.post(0, C)));
    ring(&mut world);
    world.settle();
    (world.engine.violations().0.map(|first| first.kind), world.syndromes(0))
}

#[test]
fn doorbells_are_checked_against_their_record_and_what_came_before() {
    let ring = |record: u64, end: u64| {
        move |world: &mut World| {
            world.record(0, record);
            world.ring_with(0, end);
        }
    };
    assert_eq!(violation(ring(3, 3)), (None, vec![None]));
    assert_eq!(violation(ring(3, 2)), (None, vec![]), "nothing new");
    assert_eq!(violation(ring(2, 3)).0, Some(ViolationKind::DoorbellBeforeRecord));
    assert_eq!(violation(ring(2, 3)).1, [failed(Syndrome::Flushed)], "a waiting thread sees a completion");
    assert_eq!(violation(ring(3, 1)).0, Some(ViolationKind::DoorbellRange));
    assert_eq!(violation(ring(1, 3)).0, Some(ViolationKind::RecordRange));
    assert_eq!(violation(ring(3 + 4 * SIZE, 3 + 4 * SIZE)).0, Some(ViolationKind::DoorbellRange));
    let stray = |world: &mut World| {
        world.queues.swap(QUEUE as usize, 7);
        world.ring(0);
        world.queues.swap(QUEUE as usize, 7);
    };
    assert_eq!(violation(stray).0, Some(ViolationKind::UnknownQueue));
    let early = |world: &mut World| {
        world.queue(0).state = QpState::ReadyToReceive;
        world.ring(0);
    };
    assert_eq!(violation(early).0, Some(ViolationKind::NotReady));
}

#[test]
fn an_entry_over_one_that_is_not_complete_is_noticed() {
    let mut world = world();
    world.queue(1).live = false;
    world.queue(0).ack_timeout = 0;
    let entry = wqe::write_value(world.post(0, N), World::remote(1, false, 0), 1, 8);
    world.write(0, entry);
    world.ring(0);
    world.settle();
    for _ in 0..SIZE {
        world.write(0, wqe::nop(world.post(0, N)));
    }
    world.ring(0);
    assert_eq!(world.engine.violations().0.map(|first| first.kind), Some(ViolationKind::Overwritten));
}

#[test]
fn an_announced_slot_that_was_not_written_is_noticed() {
    let mut world = world();
    for _ in 0..SIZE {
        world.write(0, wqe::nop(world.post(0, C)));
    }
    world.ring(0);
    world.settle();
    assert_eq!(world.syndromes(0), [None; SIZE as usize]);
    // The slot still holds the entry of the previous round.
    world.record(0, SIZE + 1);
    world.ring_with(0, SIZE + 1);
    world.settle();
    assert_eq!(world.syndromes(0), [failed(Syndrome::LocalOperation)]);
    let first = world.engine.violations().0.expect("a violation");
    assert_eq!((first.kind, first.expected, first.seen), (ViolationKind::BadEntry, SIZE, 0));
}

#[test]
fn a_completion_queue_without_room_is_noticed_where_overruns_count() {
    let mut world = world();
    let record = World::place(0, false);
    world.completions[COMPLETION as usize].record = record;
    for _ in 0..2 {
        for _ in 0..SIZE {
            world.write(0, wqe::nop(world.post(0, C)));
        }
        world.ring(0);
        world.settle();
    }
    assert_eq!(world.engine.violations().0.map(|first| first.kind), Some(ViolationKind::Overrun));
}

#[test]
fn a_collapsed_queue_has_its_last_completion_in_slot_0() {
    let mut world = world();
    world.completions[COMPLETION as usize].collapsed = true;
    for _ in 0..3 {
        world.write(0, wqe::nop(world.post(0, C)));
    }
    world.ring(0);
    world.settle();
    let outcome = world.completion(0).expect("in slot 0");
    assert_eq!(outcome.index, 2);
    assert_eq!(world.completion(0), None);
}

#[test]
fn a_queue_pair_that_is_reset_begins_at_index_0() {
    let mut world = world();
    world.write(0, wqe::nop(world.post(0, C)));
    world.ring(0);
    world.settle();
    world.queue(0).reset();
    assert_eq!(world.queue(0).state, QpState::Reset);
    world.queue(0).state = QpState::ReadyToSend;
    world.next[0] = 0;
    world.write(0, wqe::nop(world.post(0, C)));
    world.ring(0);
    world.settle();
    assert_eq!(world.syndromes(0), [None; 2]);
    assert_eq!(world.engine.violations().1, 0);
}
