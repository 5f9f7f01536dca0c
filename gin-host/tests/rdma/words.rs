// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signals that the NIC raises by itself.

use super::Body;
use super::pair::{BYTES, Plan, Side, ensure, get, pair, port, put, raise, until};
use gin_abi::{RemoteSignal, SignalTarget, Transfer};
use gin_net::Network;
use gin_net::verbs::SignalsBy;
use libtest_mimic::Failed;

pub const TRIALS: &[(&str, Body)] = &[
    ("a_nic_raises_signals_behind_all_that_was_put_before_them", behind),
    ("what_several_ranks_add_to_a_word_is_all_there", several),
    ("signals_that_a_nic_raises_need_no_help_of_the_receiver", alone),
    ("a_nic_raises_a_signal_behind_a_get_when_the_data_has_landed", fenced),
    ("a_nic_raises_words_of_a_window_that_takes_signals", at_addresses),
    ("a_rank_whose_proxy_raises_signals_gets_messages", messages),
    ("with_several_ports_words_of_windows_are_raised_by_the_proxy_in_order", several_ports),
];

fn plan(devices: &[String; 2]) -> Plan {
    Plan { by: [SignalsBy::Nic; 2], ..Plan::new(devices) }
}

fn at(window: u32, offset: u64, amount: u64) -> RemoteSignal {
    RemoteSignal { target: SignalTarget::Address { window, offset }, amount, strong: true }
}

/// Checks that no signal arrived as a message.
fn no_messages(sides: &[Side; 2]) -> Result<(), Failed> {
    ensure(sides.iter().all(|side| side.signals.is_empty()), || format!("{:?}", sides[1].signals))
}

fn behind(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&plan(devices))?;
    let described = sides[0].network.describe();
    ensure(described.ends_with("signals raised by the NIC"), || described.clone())?;
    for round in 0..100u64 {
        let bytes = sides[0].fill(round)?;
        for part in 0..4 {
            sides[0].put(1, part * 5000, part * 5000, 5000);
        }
        sides[0].post(0, put(20_000, 20_000, 100), Some(raise(3, 7)), 1);
        // A rank that sees the word sees the bytes, without any other call.
        until(&mut sides, "word", |[_, other]| other.word(0, 3) == 7 * (round + 1))?;
        ensure(sides[1].read(0, 20_100)? == bytes[..20_100], || format!("wrong bytes in round {round}"))?;
        until(&mut sides, "ends", |[side, _]| side.network.is_quiet())?;
    }
    for (id, outcome) in &sides[0].completions {
        ensure(outcome.is_ok(), || format!("request {id}: {outcome:?}"))?;
    }
    // Other signals are unchanged, in both contexts.
    for (context, id) in (0..2).flat_map(|context| (0..8).map(move |id| (context, id))) {
        let value = sides[1].word(context, id);
        ensure((context, id) == (0, 3) || value == 0, || format!("signal {id} of context {context} is {value}"))?;
    }
    no_messages(&sides)
}

fn several(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&plan(devices))?;
    for _ in 0..150 {
        for side in &mut sides {
            side.post(1, Transfer::Nothing, Some(raise(7, (1 << 40) + 3)), 1);
        }
    }
    let all = 300 * ((1 << 40) + 3);
    until(&mut sides, "sum", |[_, other]| other.word(1, 7) == all)?;
    until(&mut sides, "ends", |sides| sides.iter().all(|side| side.network.is_quiet()))?;
    ensure(sides[1].word(1, 7) == all, || format!("{}", sides[1].word(1, 7)))?;
    no_messages(&sides)
}

fn alone(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&plan(devices))?;
    // Far more signals than buffers for messages; the receiver never polls.
    let ids: Vec<u64> = (0..500).map(|_| sides[0].post(0, Transfer::Nothing, Some(raise(0, 1)), 1)).collect();
    let begin = std::time::Instant::now();
    while sides[0].outcome(ids[499]).is_none() {
        ensure(begin.elapsed() < std::time::Duration::from_secs(60), || "the last request has not ended".to_owned())?;
        sides[0].poll();
    }
    ensure(sides[1].word(0, 0) == 500, || format!("{}", sides[1].word(0, 0)))?;
    ensure(ids.iter().all(|id| sides[0].outcome(*id) == Some(Ok(()))), || "a request failed".to_owned())
}

fn fenced(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&plan(devices))?;
    for round in 0..10 {
        let bytes = sides[1].fill(round)?;
        sides[0].memory.write(0, &vec![0u8; BYTES])?;
        sides[0].post(0, get(0, 0, 200_000), Some(raise(1, 1)), 1);
        until(&mut sides, "word", |[_, other]| other.word(0, 1) == round + 1)?;
        ensure(sides[0].read(0, 200_000)? == bytes[..200_000], || format!("wrong bytes in round {round}"))?;
    }
    no_messages(&sides)
}

fn at_addresses(devices: &[String; 2]) -> Result<(), Failed> {
    let mut sides = pair(&plan(devices))?;
    sides[1].memory.write(0, &[5u64; 8])?;
    for _ in 0..20 {
        sides[0].post(0, Transfer::Nothing, Some(at(0, 16, 2)), 1);
        sides[0].post(1, Transfer::Nothing, Some(at(0, 16, 1)), 1);
    }
    let words = |side: &Side| {
        let mut words = [0u64; 8];
        side.memory.read(0, &mut words).map(|()| words)
    };
    until(&mut sides, "word", |[_, other]| words(other).is_ok_and(|words| words[2] == 65))?;
    ensure(words(&sides[1])? == [5, 5, 65, 5, 5, 5, 5, 5], || format!("{:?}", words(&sides[1])))?;
    let wrong = sides[0].post(0, Transfer::Nothing, Some(at(0, BYTES as u64, 1)), 1);
    until(&mut sides, "end", |[side, _]| side.outcome(wrong).is_some())?;
    ensure(sides[0].outcome(wrong).is_some_and(|outcome| outcome.is_err()), || {
        "a signal past the end of the window succeeded".to_owned()
    })?;
    no_messages(&sides)
}

fn messages(devices: &[String; 2]) -> Result<(), Failed> {
    for by in [[SignalsBy::Nic, SignalsBy::Proxy], [SignalsBy::Proxy, SignalsBy::Nic]] {
        let mut sides = pair(&Plan { by, ..Plan::new(devices) })?;
        sides[0].post(0, Transfer::Nothing, Some(raise(2, 9)), 1);
        sides[1].post(0, Transfer::Nothing, Some(raise(4, 1)), 0);
        until(&mut sides, "signals", |sides| sides.iter().all(|side| side.signals.len() == 1))?;
        let [first, second] = &sides;
        ensure(first.word(0, 4) == 0 && second.word(0, 2) == 0, || {
            format!("a NIC has raised a word although signals are raised by {by:?}")
        })?;
    }
    Ok(())
}

fn several_ports(devices: &[String; 2]) -> Result<(), Failed> {
    let [first, second] = devices;
    let ports = [vec![port(first), port(second)], vec![port(second), port(first)]];
    let mut sides = pair(&Plan { ports, ..plan(devices) })?;
    for context in 0..2 {
        sides[0].post(context, Transfer::Nothing, Some(raise(0, 1)), 1);
    }
    until(&mut sides, "words", |[_, other]| other.word(0, 0) == 1 && other.word(1, 0) == 1)?;
    no_messages(&sides)?;
    // Two NICs would not be atomic to each other at that address. From then on all signals are sent as messages, so
    // that none overtakes another.
    sides[0].post(1, Transfer::Nothing, Some(at(0, 8, 4)), 1);
    sides[0].post(1, Transfer::Nothing, Some(raise(0, 5)), 1);
    sides[0].post(0, Transfer::Nothing, Some(raise(0, 6)), 1);
    until(&mut sides, "signals", |[_, other]| other.signals.len() == 2 && other.word(0, 0) == 7)?;
    let amounts: Vec<u64> = sides[1].signals.iter().map(|signal| signal.amount).collect();
    ensure(amounts == [4, 5] && sides[1].word(1, 0) == 1, || format!("{amounts:?}"))
}
