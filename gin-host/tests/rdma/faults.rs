// SPDX-License-Identifier: MIT OR Apache-2.0
//! Faults through all layers between two kernels in two processes: communicators, proxies and the network. Each fault
//! ends every wait that depends on it in time, with an error that names the rank and the cause, in the kernel and on
//! the host. An independent communicator continues. After a fault that heals, all data has arrived.

use super::machines::run_trials;
use super::members::{Ended, Hosts, Pair, Seen, Words, ended_since};
use super::pair::ensure;
use super::pulse::{Plan, Wrong};
use super::wire::Wire;
use gin_abi::FaultKind;
use libtest_mimic::{Arguments, Failed};
use rustix::process::Signal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

type Body = fn(&[String; 2], &Wire) -> Result<(), Failed>;

pub const TRIALS: &[(&str, Body)] = &[
    ("faults/pulses_go_round_though_1_packet_in_100_is_lost", |devices, wire| {
        heals(devices, |pair| {
            let _bad = wire.worsen(&["loss", "1%"])?;
            rounds(pair, 30)?;
            Ok(Instant::now())
        })
    }),
    ("faults/pulses_go_round_though_1_packet_in_20_is_lost_or_end_with_an_error", |devices, wire| {
        worse(devices, wire, &["loss", "5%"])
    }),
    ("faults/pulses_go_round_though_late", |devices, wire| {
        heals(devices, |pair| {
            let _bad = wire.worsen(&["delay", "5ms"])?;
            rounds(pair, 20)?;
            Ok(Instant::now())
        })
    }),
    ("faults/pulses_go_round_where_packets_overtake_each_other_or_end_with_an_error", |devices, wire| {
        worse(devices, wire, &["delay", "5ms", "2ms"])
    }),
    ("faults/a_wire_that_is_cut_for_a_second_loses_nothing", |devices, wire| {
        heals(devices, |pair| {
            let cut = wire.cut()?;
            a_second(pair)?;
            drop(cut);
            let healed = Instant::now();
            rounds(pair, 5)?;
            Ok(healed)
        })
    }),
    ("faults/a_process_that_is_stopped_for_a_second_loses_nothing", |devices, _| {
        heals(devices, |pair| {
            pair.signal(1, Signal::STOP)?;
            a_second(pair)?;
            pair.signal(1, Signal::CONT)?;
            let healed = Instant::now();
            rounds(pair, 5)?;
            Ok(healed)
        })
    }),
    ("faults/a_cut_wire_ends_waits_on_both_sides", |devices, wire| {
        let pair = Pair::start(devices, watched)?;
        pair.going()?;
        let begin = Instant::now();
        let _cut = wire.cut()?;
        both_learn(&pair, begin, &[FaultKind::PeerLost])
    }),
    ("faults/a_killed_process_ends_the_waits_of_the_other", |devices, _| {
        let pair = Pair::start(devices, watched)?;
        pair.going()?;
        let begin = Instant::now();
        pair.signal(1, Signal::KILL)?;
        first_learns(&pair.words[0], begin)
    }),
    ("faults/a_process_that_stays_stopped_is_lost_and_learns_so_when_it_goes_on", |devices, _| {
        let soon = |plan: Plan| Plan { silence: Duration::from_secs(3), ..watched(plan) };
        let pair = Pair::start(devices, soon)?;
        pair.going()?;
        let begin = Instant::now();
        pair.signal(1, Signal::STOP)?;
        first_learns(&pair.words[0], begin)?;
        let begin = Instant::now();
        pair.signal(1, Signal::CONT)?;
        let (at, text) = pair.words[1].hear("ended", LIMIT)?;
        println!("rank 1 after {:?}: {text}", at.saturating_duration_since(begin));
        // The rank may receive the report that it was itself taken for lost.
        let ended = Ended::read(&text)?;
        let is_lost = |seen: Option<Seen>| seen.is_some_and(|seen| seen.kind == FaultKind::PeerLost);
        ensure(ended.wrong == 0 && is_lost(ended.device) && is_lost(ended.host), || text.clone())?;
        pair.words[1].hear("destroyed", LIMIT).map(drop)
    }),
    ("faults/a_queue_pair_in_error_ends_waits_on_both_sides", |devices, _| broken(devices, 0, Wrong::Queue(1))),
    ("faults/a_part_that_its_rank_deregisters_early_ends_waits_on_both_sides", |devices, _| {
        broken(devices, 1, Wrong::Early)
    }),
    ("faults/a_wrong_key_ends_waits_on_both_sides", |devices, _| {
        let wrong = |plan: Plan| match plan.rank {
            0 => Plan { wrong: Wrong::Key, ..watched(plan) },
            _ => plan,
        };
        let pair = Pair::start(devices, wrong)?;
        both_learn(&pair, Instant::now(), &[FaultKind::Network])
    }),
];

type OnHosts = fn(&mut Hosts) -> Result<(), Failed>;

/// Runs on two machines, where losses on the wire also affect the bootstrap's traffic. The last trial switches one
/// machine off.
const ON_HOSTS: &[(&str, OnHosts)] = &[
    ("hosts/pulses_go_round_though_1_packet_in_100_is_lost", |hosts| {
        let (words, stop) = hosts.start(|plan| watched(plan.patient()))?;
        words[0].hear("beside", LIMIT)?;
        let begin = Instant::now();
        hosts.machines.tell_both("tc qdisc replace dev eth0 root netem loss 1%")?;
        let more = more_rounds(&words, 30);
        let healed = Instant::now();
        hosts.machines.tell_both("tc qdisc del dev eth0 root")?;
        more?;
        hosts.machines.tell(0, &format!("touch {}", stop.display()))?;
        well(&words, ended_since(&words, Instant::now(), LIMIT)?, begin, healed)
    }),
    ("hosts/a_wire_that_is_cut_for_a_second_loses_nothing", |hosts| {
        let (words, stop) = hosts.start(|plan| watched(plan.patient()))?;
        words[0].hear("beside", LIMIT)?;
        let begin = Instant::now();
        hosts
            .machines
            .tell_both("tc qdisc replace dev eth0 root netem loss 100%; sleep 1; tc qdisc del dev eth0 root")?;
        more_rounds(&words, 10)?;
        let healed = Instant::now();
        hosts.machines.tell(0, &format!("touch {}", stop.display()))?;
        well(&words, ended_since(&words, Instant::now(), LIMIT)?, begin, healed)
    }),
    ("hosts/a_cut_wire_ends_waits_on_both_sides", |hosts| cut_hosts(hosts, false)),
    ("hosts/a_cut_wire_ends_the_waits_of_a_rank_that_only_waits", |hosts| cut_hosts(hosts, true)),
    ("hosts/a_killed_process_ends_the_waits_of_the_other", |hosts| {
        let (words, _) = hosts.start(watched)?;
        let begin = Instant::now();
        hosts.machines.tell(1, "kill -9 $rank")?;
        first_learns(&words[0], begin)
    }),
    ("hosts/a_machine_without_power_ends_the_waits_of_the_other", |hosts| {
        let (words, _) = hosts.start(watched)?;
        let begin = hosts.machines.power_off(1)?;
        first_learns(&words[0], begin)
    }),
];

/// Runs trials on two virtual machines, which the first of them boots.
pub fn on_hosts(arguments: &Arguments) -> ExitCode {
    run_trials(arguments, Hosts::boot, ON_HOSTS)
}

/// Ample time, on a slow machine, for an event that is due within ten seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// Time after which every rank knows a fault. The network loses a peer after 1.9 s, the bootstrap after the chosen
/// silence of 3 or 10 s, and the emulation is slow.
const LEARNED: Duration = Duration::from_secs(20);

impl Plan {
    /// Makes the plan tolerate a silence of a second or two.
    fn patient(self) -> Self {
        Self { timeout: 18, silence: Duration::from_secs(30), ..self }
    }
}

/// Gives rank 0 an independent communicator.
fn watched(plan: Plan) -> Plan {
    Plan { bystander: plan.rank == 0, ..plan }
}

/// Waits for `rounds` rounds from now on.
fn more_rounds(words: &[Words; 2], rounds: u64) -> Result<(), Failed> {
    let (now, mut first) = (Instant::now(), None);
    loop {
        let (at, round) = words[0].hear("round", 2 * LIMIT)?;
        let round: u64 = round.parse()?;
        if at >= now && round >= *first.get_or_insert(round) + rounds {
            return Ok(());
        }
        if at < now {
            first = Some(round);
        }
    }
}

fn rounds(pair: &Pair, rounds: u64) -> Result<(), Failed> {
    more_rounds(&pair.words, rounds)
}

/// Waits for a second and, on a slow machine, until the independent communicator has made a round since. Waits no
/// longer than a [patient](Plan::patient) network does.
fn a_second(pair: &Pair) -> Result<(), Failed> {
    let begin = Instant::now();
    std::thread::sleep(Duration::from_secs(1));
    while pair.words[0].hear("beside", Duration::from_secs(4))?.0 < begin {}
    Ok(())
}

/// Checks that both ranks ended without a fault, and that the independent communicator continued from the begin of the
/// fault until it was healed, and afterwards.
fn well(words: &[Words; 2], ended: [(Duration, Ended); 2], begin: Instant, healed: Instant) -> Result<(), Failed> {
    ensure(ended.iter().all(|(_, ended)| ended.is_well()), || format!("{ended:?}"))?;
    went_on(words, begin, healed)?;
    aftermath(&words[0])
}

fn went_on(words: &[Words; 2], begin: Instant, healed: Instant) -> Result<(), Failed> {
    let rounds = words[0].beside_between(begin, healed);
    println!("{rounds} rounds of the independent communicator within {:?}", healed.saturating_duration_since(begin));
    ensure(rounds > 0, || "the independent communicator made no round during the fault".to_owned())
}

/// Checks that pulses continue after `act`, which returns the time of its end, and that both ranks end without a fault.
fn heals(devices: &[String; 2], act: impl FnOnce(&Pair) -> Result<Instant, Failed>) -> Result<(), Failed> {
    let pair = Pair::start(devices, |plan| watched(plan.patient()))?;
    pair.going()?;
    pair.words[0].hear("beside", LIMIT)?;
    let begin = Instant::now();
    let healed = act(&pair)?;
    pair.tell_to_stop()?;
    well(&pair.words, pair.ended_since(Instant::now(), LIMIT)?, begin, healed)
}

/// The same over a wire that may be too bad for the network.
fn worse(devices: &[String; 2], wire: &Wire, how: &[&str]) -> Result<(), Failed> {
    let pair = Pair::start(devices, watched)?;
    pair.going()?;
    pair.words[0].hear("beside", LIMIT)?;
    let _bad = wire.worsen(how)?;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(20) {
        match pair.words[0].hear("round", Duration::from_secs(20) - begin.elapsed()) {
            Ok(_) => {}
            // The rank has ended, or makes no progress for now.
            Err(_) => break,
        }
    }
    drop(_bad);
    let healed = Instant::now();
    pair.tell_to_stop()?;
    let ended = pair.ended(LIMIT)?;
    went_on(&pair.words, begin, healed)?;
    if ended.iter().all(Ended::is_well) {
        return aftermath(&pair.words[0]);
    }
    println!("over a wire with {how:?}: {ended:?}");
    let reported =
        (0..).zip(&ended).all(|(rank, ended)| ended.reports(rank, &[FaultKind::PeerLost, FaultKind::Network]));
    ensure(reported, || format!("{ended:?}"))?;
    aftermath(&pair.words[0])
}

/// Checks that the independent communicator continues, and that the failed one can be destroyed.
fn aftermath(words: &Words) -> Result<(), Failed> {
    words.hear("others go on", 2 * LIMIT)?;
    words.hear("destroyed", LIMIT)?;
    words.hear("others ended well", LIMIT).map(drop)
}

fn both_learn(pair: &Pair, begin: Instant, kinds: &[FaultKind]) -> Result<(), Failed> {
    let ended = pair.ended_since(begin, LIMIT)?;
    for (rank, (took, ended)) in (0..).zip(ended) {
        ensure(ended.reports(rank, kinds), || format!("rank {rank}: {ended:?}"))?;
        ensure(took < LEARNED, || format!("rank {rank}: after {took:?}"))?;
    }
    aftermath(&pair.words[0])?;
    pair.words[1].hear("destroyed", LIMIT).map(drop)
}

/// Checks that rank 0 learns that rank 1 is lost.
fn first_learns(words: &Words, begin: Instant) -> Result<(), Failed> {
    let (at, text) = words.hear("ended", LIMIT)?;
    let took = at.saturating_duration_since(begin);
    println!("rank 0 after {took:?}: {text}");
    ensure(Ended::read(&text)?.reports(0, &[FaultKind::PeerLost]), || text.clone())?;
    ensure(took < LEARNED, || format!("after {took:?}"))?;
    aftermath(words)
}

/// Breaks a part of one rank's own network while pulses are under way.
fn broken(devices: &[String; 2], whose: u32, wrong: Wrong) -> Result<(), Failed> {
    let plan = |plan: Plan| match plan.rank == whose {
        true => Plan { wrong, ..watched(plan) },
        false => watched(plan),
    };
    let pair = Pair::start(devices, plan)?;
    pair.going()?;
    // The next post finds the defect, on either side; the peer finds it after the network's retries.
    both_learn(&pair, pair.pull()?, &[FaultKind::Network, FaultKind::UnknownWindow, FaultKind::PeerLost])
}

fn cut_hosts(hosts: &mut Hosts, one_way: bool) -> Result<(), Failed> {
    let plan = |plan: Plan| Plan { bystander: true, one_way, silence: Duration::from_secs(5), ..plan };
    let (words, _) = hosts.start(plan)?;
    let begin = hosts.machines.tell_both("tc qdisc replace dev eth0 root netem loss 100%")?;
    let ended = ended_since(&words, begin, LIMIT);
    let rest = words.iter().try_for_each(aftermath);
    hosts.machines.tell_both("tc qdisc del dev eth0 root")?;
    for (rank, (took, ended)) in (0..).zip(ended?) {
        ensure(ended.reports(rank, &[FaultKind::PeerLost]), || format!("rank {rank}: {ended:?}"))?;
        ensure(took < LEARNED, || format!("rank {rank}: after {took:?}"))?;
    }
    rest
}
