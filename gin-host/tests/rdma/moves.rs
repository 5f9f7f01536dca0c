// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests that succeed, and requests that fail.

use super::Body;
use super::pair::{BYTES, Plan, ended, ensure, get, pair, put, raise, spoil, until};
use super::ports::everywhere;
use gin_abi::{SignalTarget, Transfer, WindowOffset};
use gin_net::verbs::{GpuMemory, SignalsBy, VerbsConfig};
use gin_net::{NetError, Network};
use libtest_mimic::Failed;
use std::time::{Duration, Instant};

pub const TRIALS: &[(&str, Body)] = &[
    ("puts_gets_and_values_arrive_at_the_peer_and_at_the_rank_itself", everything),
    ("a_signal_comes_behind_all_that_was_put_before_it", order),
    ("memory_goes_through_host_memory_where_that_is_chosen", through_host_memory),
    ("a_signal_behind_a_get_comes_when_the_data_has_landed", fenced),
    ("more_signals_than_buffers_are_held_back_and_none_is_lost", credits),
    ("more_requests_than_entries_are_taken_and_all_end", backlog),
    ("entries_without_room_for_bytes_fetch_them", not_inline),
    ("arrivals_are_made_visible_by_a_read_over_the_loop_back_connection", visible),
    ("a_wrong_key_fails_its_request_and_later_ones_of_its_connection_only", wrong_key),
    ("a_part_that_its_rank_has_deregistered_is_refused", deregistered),
    ("a_window_is_let_go_once_requests_that_use_it_have_ended", in_use),
    ("a_range_past_the_end_is_refused_and_so_is_a_strong_signal_behind_it", out_of_range),
    ("a_peer_that_is_gone_is_lost_in_time", gone),
    ("a_peer_that_is_gone_is_noticed_by_a_sender_that_waits_for_its_credit", gone_without_credit),
    ("a_queue_pair_in_error_fails_what_is_under_way_and_all_that_follows", in_error),
];

/// Returns timeouts that lose a peer within 0.5 s.
fn soon() -> VerbsConfig {
    VerbsConfig::default().timeout(14).ask_after(Duration::from_millis(100))
}

/// Time after which a lost peer is reported. Soft-RoCE's timer may be late on a slow machine.
const SOON: Duration = Duration::from_secs(10);

fn everything(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&Plan::new(devices))?;
    let bytes = [sides[0].fill(1)?, sides[1].fill(2)?];
    let half = BYTES as u64 / 2;
    for peer in [0, 1] {
        let own = &bytes[0];
        let before = sides[peer as usize].read(0, BYTES)?;
        let ids = [
            sides[0].put(peer, 100, half + 7, 50_001),
            sides[0].put(peer, 5, half + 100_000, 1),
            sides[0].post(1, put(0, half + 200_000, 70_000), None, peer),
        ];
        let value = Transfer::PutValue {
            value: 0x1122_3344_5566_7788,
            width_log2: 2,
            destination: WindowOffset { window: 0, offset: half + 400_000 },
        };
        let value = sides[0].post(0, value, None, peer);
        let nothing = sides[0].put(peer, 0, 0, 0);
        until(&mut sides, "end", |[side, _]| {
            ids.iter().chain([&value, &nothing]).all(|id| side.outcome(*id).is_some())
        })?;
        for (id, outcome) in &sides[0].completions {
            ensure(outcome.is_ok(), || format!("request {id}: {outcome:?}"))?;
        }
        let half = half as usize;
        let mut expected = before;
        expected[half + 7..half + 50_008].copy_from_slice(&own[100..50_101]);
        expected[half + 100_000] = own[5];
        expected[half + 200_000..half + 270_000].copy_from_slice(&own[..70_000]);
        expected[half + 400_000..half + 400_004].copy_from_slice(&0x5566_7788u32.to_le_bytes());
        ensure(sides[peer as usize].read(0, BYTES)? == expected, || format!("wrong bytes at rank {peer}"))?;
        // Gets the bytes back from the peer.
        let got = sides[0].post(0, get(half as u64 + 200_000, 3, 70_000), None, peer);
        until(&mut sides, "get", |[side, _]| side.outcome(got).is_some())?;
        ensure(sides[0].outcome(got) == Some(Ok(())), || format!("{:?}", sides[0].outcome(got)))?;
        ensure(sides[0].read(3, 70_000)? == own[..70_000], || format!("a get from rank {peer} returned other bytes"))?;
        sides[0].memory.write(0, own)?;
        sides[0].completions.clear();
    }
    ensure(sides[1].read(0, 1000)? == bytes[1][..1000], || "bytes without a put have changed".to_owned())?;
    until(&mut sides, "quiet", |sides| sides.iter().all(|side| side.network.is_quiet()))?;
    Ok(())
}

fn order(devices: &[String; 2]) -> Result<(), Failed> {
    in_order(&Plan::new(devices))
}

fn through_host_memory(devices: &[String; 2]) -> Result<(), Failed> {
    let config = VerbsConfig::default().gpu_memory(GpuMemory::Host);
    let plan = Plan { config, ..Plan::new(devices) };
    in_order(&plan)?;
    let mut sides = pair(&plan)?;
    ensure(sides[0].network.describe().contains("through host memory"), || sides[0].network.describe())?;
    everywhere(&mut sides, 2)?;
    until(&mut sides, "quiet", |sides| sides.iter().all(|side| side.network.is_quiet()))?;
    ensure(sides.iter_mut().all(|side| side.network.deregister(0)), || {
        "the network keeps a window after deregister".to_owned()
    })?;
    // Ranks learn of NICs that raise signals only if these do not raise them too early.
    let error = pair(&Plan { by: [SignalsBy::Nic; 2], ..plan })
        .err()
        .map(|error| error.message().unwrap_or_default().to_owned());
    ensure(error.as_ref().is_some_and(|error| error.contains("through host memory")), || format!("{error:?}"))
}

fn in_order(plan: &Plan) -> Result<(), Failed> {
    let mut sides = pair(plan)?;
    for round in 0..20u64 {
        let bytes = sides[0].fill(round)?;
        for part in 0..16 {
            sides[0].put(1, part * 65_536, part * 65_536, 65_536);
        }
        sides[0].post(0, Transfer::Nothing, Some(raise(3, round + 1)), 1);
        let seen = round as usize + 1;
        until(&mut sides, "signal", |[_, side]| side.signals.len() == seen)?;
        let arrival = sides[1].signals[round as usize];
        let right = (arrival.context, arrival.from, arrival.target, arrival.amount);
        ensure(right == (0, 0, SignalTarget::Id(3), round + 1), || format!("{arrival:?}"))?;
        sides[1].network.make_visible()?;
        ensure(sides[1].read(0, BYTES)? == bytes, || format!("round {round}: the signal overtook its data"))?;
        // Waits for completions, so that the source may change.
        until(&mut sides, "quiet", |[side, _]| side.network.is_quiet())?;
    }
    Ok(())
}

fn fenced(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&Plan::new(devices))?;
    let bytes = sides[1].fill(9)?;
    let id = sides[0].post(0, get(0, 0, BYTES as u64 / 2), Some(raise(0, 1)), 1);
    until(&mut sides, "signal", |[_, side]| side.signals.len() == 1)?;
    ensure(sides[0].read(0, BYTES / 2)? == bytes[..BYTES / 2], || "the signal overtook its data".to_owned())?;
    until(&mut sides, "end", |[side, _]| side.outcome(id) == Some(Ok(())))?;
    Ok(())
}

fn credits(devices: &[String; 2]) -> Result<(), Failed> {
    for signal_depth in [2, 5] {
        let config = VerbsConfig::default().signal_depth(signal_depth);
        let mut sides = pair(&Plan { config, ..Plan::new(devices) })?;
        let count = 500;
        for number in 0..count {
            sides[0].post(0, Transfer::Nothing, Some(raise(number as u32 % 8, number + 1)), 1);
        }
        // The receiver takes no signals.
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(300) {
            sides[0].poll();
        }
        let sent = sides[0].completions.len();
        ensure(sent <= signal_depth as usize, || format!("{sent} sent, {signal_depth} buffers"))?;
        until(&mut sides, "signals", |[_, side]| side.signals.len() == count as usize)?;
        for (number, arrival) in (0..).zip(&sides[1].signals) {
            let right = arrival.target == SignalTarget::Id(number as u32 % 8) && arrival.amount == number + 1;
            ensure(right, || format!("signal {number} is {arrival:?}"))?;
        }
        until(&mut sides, "ends", |[side, _]| side.completions.len() == count as usize)?;
        ensure(sides[0].completions.iter().all(|(_, outcome)| outcome.is_ok()), || "a request failed".to_owned())?;
    }
    Ok(())
}

fn backlog(devices: &[String; 2]) -> Result<(), Failed> {
    let config = VerbsConfig::default().send_depth(4).backlog(3).completion_every(3);
    let mut sides = pair(&Plan { config, ..Plan::new(devices) })?;
    let bytes = sides[0].fill(4)?;
    let count = 400u64;
    for number in 0..count {
        // Both contexts, with and without a signal.
        let signal = (number % 3 == 0).then(|| raise(1, 1));
        sides[0].post(number as u32 % 2, put(number * 100, number * 100, 100), signal, 1);
        sides[1].poll();
    }
    until(&mut sides, "ends", |[side, _]| side.completions.len() as u64 == count)?;
    ensure(sides[0].completions.iter().all(|(_, outcome)| outcome.is_ok()), || "a request failed".to_owned())?;
    until(&mut sides, "signals", |[_, side]| side.signals.len() as u64 == count.div_ceil(3))?;
    ensure(sides[1].read(0, 40_000)? == bytes[..40_000], || "wrong bytes".to_owned())
}

fn not_inline(devices: &[String; 2]) -> Result<(), Failed> {
    let config = VerbsConfig::default().inline(0);
    let mut sides = pair(&Plan { config, ..Plan::new(devices) })?;
    for number in 0..300u64 {
        let value = Transfer::PutValue {
            value: number,
            width_log2: 3,
            destination: WindowOffset { window: 0, offset: 8 * number },
        };
        sides[0].post(0, value, Some(raise(2, number)), 1);
        sides[1].poll();
    }
    until(&mut sides, "signals", |[_, side]| side.signals.len() == 300)?;
    let expected: Vec<u8> = (0..300u64).flat_map(u64::to_le_bytes).collect();
    ensure(sides[1].read(0, 2400)? == expected, || "wrong values".to_owned())?;
    let sum: u64 = sides[1].signals.iter().map(|arrival| arrival.amount).sum();
    ensure(sum == 299 * 150, || format!("the amounts sum up to {sum}"))
}

fn visible(devices: &[String; 2]) -> Result<(), Failed> {
    let config = VerbsConfig::default().always_read_back(true);
    let mut sides = pair(&Plan { config, ..Plan::new(devices) })?;
    for side in &mut sides {
        for _ in 0..20 {
            side.network.make_visible()?;
        }
    }
    // The region is deregistered, so there is nothing to make visible.
    ensure(sides[0].network.deregister(0), || "the network keeps an unused window after deregister".to_owned())?;
    Ok(sides[0].network.make_visible()?)
}

/// Returns whether the outcome is that of a key that the peer's NIC refuses.
fn is_refusal(outcome: &Result<(), NetError>) -> bool {
    matches!(outcome, Err(NetError::Failed { context: "access to the peer's memory", peer: 1, status }) if status & 0xff == 10)
}

fn wrong_key(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&Plan { spoil: Some(spoil), ..Plan::new(devices) })?;
    let before = sides[1].fill(6)?;
    sides[0].fill(7)?;
    let fine = sides[0].post(0, Transfer::Nothing, Some(raise(0, 1)), 1);
    let wrong = sides[0].post(0, put(0, 0, 100), Some(raise(0, 10)), 1);
    let behind = sides[0].post(0, Transfer::Nothing, Some(raise(0, 100)), 1);
    let other = sides[0].post(1, Transfer::Nothing, Some(raise(0, 1000)), 1);
    until(&mut sides, "ends", |[side, _]| side.completions.len() == 4)?;
    let outcome = |id| sides[0].outcome(id).unwrap_or(Ok(()));
    ensure(outcome(fine).is_ok() && outcome(other).is_ok(), || format!("{:?}", sides[0].completions))?;
    ensure(is_refusal(&outcome(wrong)), || format!("{:?}", outcome(wrong)))?;
    ensure(outcome(behind).is_err(), || "a request behind a failed one was executed".to_owned())?;
    let late = sides[0].put(1, 0, 0, 8);
    let (late, _) = ended(&mut sides[0], late)?;
    ensure(late.is_err(), || "a later request was executed".to_owned())?;
    until(&mut sides, "signals", |[_, side]| side.signals.len() == 2)?;
    let sum: u64 = sides[1].signals.iter().map(|arrival| arrival.amount).sum();
    ensure(sum == 1001, || format!("the raises sum up to {sum}"))?;
    ensure(sides[1].read(0, BYTES)? == before, || "the put has changed something".to_owned())
}

fn deregistered(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&Plan::new(devices))?;
    let before = sides[1].fill(3)?;
    sides[0].fill(8)?;
    ensure(sides[1].network.deregister(0), || "the network keeps an unused window after deregister".to_owned())?;
    let id = sides[0].put(1, 0, 0, 1000);
    until(&mut sides, "end", |[side, _]| side.outcome(id).is_some())?;
    let outcome = sides[0].outcome(id).unwrap_or(Ok(()));
    ensure(is_refusal(&outcome), || format!("{outcome:?}"))?;
    ensure(sides[1].read(0, BYTES)? == before, || "the put has changed something".to_owned())?;
    // This rank's own requests fail too.
    let own = sides[1].put(1, 0, 0, 1);
    let (own, _) = ended(&mut sides[1], own)?;
    ensure(own == Err(NetError::UnknownWindow { window: 0, rank: 1 }), || format!("{own:?}"))
}

fn in_use(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&Plan::new(devices))?;
    let ids: Vec<u64> = (0..8).map(|_| sides[0].put(1, 0, 0, BYTES as u64)).collect();
    let mut was_kept = false;
    let begin = Instant::now();
    while !sides[0].network.deregister(0) {
        was_kept = true;
        ensure(begin.elapsed() < SOON, || "the network never releases the window".to_owned())?;
        sides[0].poll();
    }
    ensure(was_kept, || "the window was never in use: 8 MiB were put too fast".to_owned())?;
    // Requests whose entries were posted succeed; later ones are refused.
    until(&mut sides, "ends", |[side, _]| side.completions.len() == ids.len())?;
    let refused = Err(NetError::UnknownWindow { window: 0, rank: 1 });
    let local = Err(NetError::UnknownWindow { window: 0, rank: 0 });
    for (id, outcome) in &sides[0].completions {
        ensure([&Ok(()), &refused, &local].contains(&outcome), || format!("request {id}: {outcome:?}"))?;
    }
    Ok(())
}

fn out_of_range(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&Plan::new(devices))?;
    let (end, length) = (BYTES as u64 + 1, BYTES as u64);
    let past = sides[0].put(1, 0, 1, BYTES as u64);
    let strong = sides[0].post(0, Transfer::Nothing, Some(raise(0, 1)), 1);
    let no_signal = sides[0].post(1, Transfer::Nothing, Some(raise(8, 1)), 1);
    let no_rank = sides[0].put(2, 0, 0, 1);
    until(&mut sides, "ends", |[side, _]| side.completions.len() == 4)?;
    let outcome = |id| sides[0].outcome(id).unwrap_or(Ok(()));
    let expected = NetError::OutOfRange { window: 0, rank: 1, end, length };
    ensure(outcome(past) == Err(expected), || format!("{:?}", outcome(past)))?;
    ensure(outcome(strong).is_err(), || "the signal covers a refused put".to_owned())?;
    let unknown = NetError::UnknownSignal { rank: 1, signal: SignalTarget::Id(8) };
    ensure(outcome(no_signal) == Err(unknown), || format!("{:?}", outcome(no_signal)))?;
    ensure(outcome(no_rank).is_err(), || "a request to a third rank succeeded".to_owned())?;
    ensure(sides[1].signals.is_empty(), || format!("{:?}", sides[1].signals))
}

fn is_lost(outcome: &Result<(), NetError>) -> bool {
    matches!(outcome, Err(NetError::PeerLost { peer: 1, .. }))
}

fn gone(devices: &[String; 2]) -> Result<(), Failed> {
    let [mut first, second] = pair(&Plan { config: soon(), ..Plan::new(devices) })?;
    let fine = first.put(1, 0, 0, 100);
    ensure(ended(&mut first, fine)?.0.is_ok(), || "the first put failed".to_owned())?;
    drop(second);
    let ids = [first.put(1, 0, 0, 100), first.post(0, Transfer::Nothing, Some(raise(0, 1)), 1)];
    for id in ids {
        let (outcome, took) = ended(&mut first, id)?;
        println!("{outcome:?} after {took:?}");
        ensure(is_lost(&outcome), || format!("{outcome:?}"))?;
        ensure(took < SOON, || format!("after {took:?}"))?;
    }
    let late = first.put(1, 0, 0, 100);
    ensure(is_lost(&ended(&mut first, late)?.0), || "a later request does not report the cause".to_owned())?;
    ensure(first.network.deregister(0), || "the network keeps the window after deregister".to_owned())
}

fn gone_without_credit(devices: &[String; 2]) -> Result<(), Failed> {
    let config = soon().signal_depth(2);
    let [mut first, second] = pair(&Plan { config, ..Plan::new(devices) })?;
    let ids: Vec<u64> = (0..3).map(|_| first.post(0, Transfer::Nothing, Some(raise(0, 1)), 1)).collect();
    ensure(ended(&mut first, ids[1])?.0.is_ok(), || "the receiver has buffers for two signals".to_owned())?;
    // A proxy that is only slow is not lost.
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(500) {
        first.poll();
    }
    ensure(first.outcome(ids[2]).is_none(), || format!("{:?}", first.outcome(ids[2])))?;
    drop(second);
    let (outcome, took) = ended(&mut first, ids[2])?;
    println!("{outcome:?} after {took:?}");
    ensure(is_lost(&outcome) && took < SOON, || format!("{outcome:?} after {took:?}"))
}

fn in_error(devices: &[String; 2]) -> Result<(), Failed> {
    // Posts more than the queue holds without polling for completions: however fast the device is, some requests
    // remain.
    let config = soon().send_depth(4);
    let mut sides = pair(&Plan { config, ..Plan::new(devices) })?;
    let under_way: Vec<u64> = (0..8).map(|_| sides[0].put(1, 0, 0, BYTES as u64)).collect();
    sides[0].network.inner().force_error(0, 1);
    let late = sides[0].post(0, Transfer::Nothing, Some(raise(0, 1)), 1);
    until(&mut sides, "ends", |[side, _]| side.completions.len() == 9)?;
    let failed: Vec<bool> =
        under_way.iter().map(|id| sides[0].outcome(*id).is_some_and(|outcome| outcome.is_err())).collect();
    ensure(failed.is_sorted() && failed[7], || format!("of the puts these failed: {failed:?}"))?;
    ensure(sides[0].outcome(late).is_some_and(|outcome| outcome.is_err()), || "the signal was sent".to_owned())?;
    ensure(sides[1].signals.is_empty(), || format!("{:?}", sides[1].signals))?;
    // The other context continues, and so do other connections in the other direction.
    let other = sides[0].post(1, put(0, 0, 100), Some(raise(0, 1)), 1);
    until(&mut sides, "end", |[side, other_side]| side.outcome(other).is_some() && other_side.signals.len() == 1)?;
    ensure(sides[0].outcome(other) == Some(Ok(())), || format!("{:?}", sides[0].outcome(other)))?;
    // The peer's end is not in error itself: its requests find no peer.
    let (outcome, took) = {
        let id = sides[1].put(0, 0, 0, 100);
        ended(&mut sides[1], id)?
    };
    ensure(outcome.is_err() && took < SOON, || format!("{outcome:?} after {took:?}"))
}
