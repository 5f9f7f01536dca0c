// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that use several ports.

use super::Body;
use super::pair::{BYTES, Plan, Side, ensure, get, pair, port, put, raise, until};
use gin_net::verbs::{NoRdmaDevice, PortName, Ports, VerbsConfig};
use libtest_mimic::Failed;
use std::fs;
use std::thread;
use std::time::Duration;

pub const TRIALS: &[(&str, Body)] = &[
    ("contexts_take_the_ports_of_their_rank_in_turn", in_turn),
    ("ranks_with_different_numbers_of_ports_reach_each_other", uneven),
    ("ports_are_opened_as_they_are_named_and_ranks_begin_with_different_ones", named),
];

/// Returns the packets that a device has sent, if its driver counts them.
///
/// The system gives all readers the same values for `lifespan` milliseconds, so this function waits that long first.
fn packets(device: &str) -> Option<u64> {
    let counter = |name: &str| -> Option<u64> {
        let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/{name}");
        fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    // The system rounds to ticks of up to 10 ms.
    thread::sleep(Duration::from_millis(counter("lifespan").unwrap_or(10) + 20));
    counter("sent_pkts")
}

/// Puts with a signal from rank 0 to rank 1, and gets back, in each context, and compares the bytes.
pub fn everywhere(sides: &mut [Side; 2], contexts: u32) -> Result<(), Failed> {
    let bytes = sides[0].fill(3)?;
    for context in 0..contexts {
        sides[1].memory.write(0, &vec![0u8; BYTES])?;
        let [there, back] = [100_000, 300_000];
        let seen = sides[1].signals.len() + 1;
        let id = sides[0].post(context, put(0, there, 100_000), Some(raise(context, 5)), 1);
        until(sides, "signal", |[side, other]| side.outcome(id).is_some() && other.signals.len() == seen)?;
        ensure(sides[0].outcome(id) == Some(Ok(())), || format!("{:?}", sides[0].outcome(id)))?;
        ensure(sides[1].signals[seen - 1].context == context, || format!("{:?}", sides[1].signals))?;
        ensure(sides[1].read(there, 100_000)? == bytes[..100_000], || format!("wrong bytes in context {context}"))?;
        let id = sides[0].post(context, get(there, back, 100_000), None, 1);
        until(sides, "get", |[side, _]| side.outcome(id).is_some())?;
        ensure(sides[0].outcome(id) == Some(Ok(())), || format!("{:?}", sides[0].outcome(id)))?;
        ensure(sides[0].read(back, 100_000)? == bytes[..100_000], || {
            format!("wrong bytes of the get in context {context}")
        })?;
        sides[0].memory.write(0, &bytes)?;
    }
    Ok(())
}

fn in_turn(devices: &[String; 2]) -> Result<(), Failed> {
    let [first, second] = devices;
    let config = VerbsConfig::default().always_read_back(true);
    let ports = [vec![port(first), port(second)], vec![port(second), port(first)]];
    let mut sides = pair(&Plan { ports, config, ..Plan::new(devices) })?;
    everywhere(&mut sides, 2)?;
    for side in &mut sides {
        // Makes data of both ports visible.
        gin_net::Network::make_visible(&mut side.network)?;
    }
    let (Some(_), true) = (packets(first), first != second) else { return Ok(()) };
    // Data leaves by the port of its context; the other direction has a few acknowledgements only.
    for (context, own, other) in [(0, first, second), (1, second, first)] {
        let count = || [own, other].map(|device| packets(device).unwrap_or(0));
        let before = count();
        let id = sides[0].post(context, put(0, 0, 500_000), None, 1);
        until(&mut sides, "end", |[side, _]| side.outcome(id).is_some())?;
        let after = count();
        let sent = [after[0] - before[0], after[1] - before[1]];
        println!("context {context}: {} packets by {own}, {} by {other}", sent[0], sent[1]);
        ensure(sent[0] > 100 && sent[0] > 3 * sent[1], || format!("context {context} used port {other}: {sent:?}"))?;
    }
    Ok(())
}

fn uneven(devices: &[String; 2]) -> Result<(), Failed> {
    let [first, second] = devices;
    for ports in [[vec![first], vec![second, first]], [vec![first, second, first], vec![second]]] {
        let ports = ports.map(|names| names.into_iter().map(|name| port(name)).collect());
        everywhere(&mut pair(&Plan { ports, ..Plan::new(devices) })?, 2)?;
    }
    Ok(())
}

fn named(devices: &[String; 2]) -> Result<(), Failed> {
    let [first, second] = devices;
    let names = vec![format!("{first}:1").parse::<PortName>()?, port(second)];
    let ports = Ports::open(&VerbsConfig::default().ports(names))?;
    let shown = |rank| ports.choose(None, rank).to_string();
    ensure(shown(0) == format!("{first}:1, {second}:1"), || shown(0))?;
    ensure(shown(1) == format!("{second}:1, {first}:1"), || shown(1))?;
    let refused = |name: &str| Ports::open(&VerbsConfig::default().ports(vec![port(name)])).err();
    let error = refused("nothing_0");
    ensure(matches!(error, Some(NoRdmaDevice::Unknown { .. })), || format!("{error:?}"))?;
    let missing = PortName { port: Some(9), ..port(first) };
    let error = Ports::open(&VerbsConfig::default().ports(vec![missing])).err();
    ensure(matches!(error, Some(NoRdmaDevice::NoPort { port: Some(9), .. })), || format!("{error:?}"))?;
    let all = Ports::open(&VerbsConfig::default())?;
    for rank in 0..8 {
        let chosen = all.choose(Some("0000:00:00.0"), rank);
        ensure((1..=4).contains(&chosen.ports.len()), || {
            format!("{} ports of {}", chosen.ports.len(), all.all().len())
        })?;
    }
    println!("rank 0 uses {}, rank 1 {}", all.choose(None, 0), all.choose(None, 1));
    Ok(())
}
