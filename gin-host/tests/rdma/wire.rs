// SPDX-License-Identifier: MIT OR Apache-2.0
//! A wire that loses and delays packets, and is cut. Each trial first runs `ib_write_bw` of perftest under the same
//! conditions and prints its result. Where the driver itself fails, gin must end with an error in time.

use super::pair::{Plan, ended, ensure, pair, put, raise, until};
use gin_abi::Transfer;
use gin_net::verbs::VerbsConfig;
use gin_net::{NetError, Network};
use libtest_mimic::Failed;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

type Body = fn(&[String; 2], &Wire) -> Result<(), Failed>;

pub const TRIALS: &[(&str, Body)] = &[
    ("wire/all_arrives_in_order_over_a_good_wire", |devices, wire| {
        wire.log("good", devices);
        stream(devices, 40, false)
    }),
    ("wire/all_arrives_in_order_though_1_packet_in_100_is_lost", |devices, wire| {
        let _bad = wire.worsen(&["loss", "1%"])?;
        wire.log("1 % lost", devices);
        stream(devices, 20, true)
    }),
    ("wire/all_arrives_in_order_though_1_packet_in_20_is_lost_or_ends_with_an_error", |devices, wire| {
        let _bad = wire.worsen(&["loss", "5%"])?;
        wire.log("5 % lost", devices);
        stream(devices, 10, true)
    }),
    ("wire/all_arrives_in_order_though_late", |devices, wire| {
        let _bad = wire.worsen(&["delay", "5ms"])?;
        wire.log("5 ms late", devices);
        stream(devices, 10, false)
    }),
    // Packets overtake each other then, from which Soft-RoCE of Linux 6.1 does not always recover.
    ("wire/all_arrives_in_order_or_ends_with_an_error_where_packets_overtake_each_other", |devices, wire| {
        let _bad = wire.worsen(&["delay", "5ms", "2ms"])?;
        wire.log("5 ms late, more or less 2", devices);
        stream(devices, 10, true)
    }),
    ("wire/a_cut_wire_loses_the_peer_in_time", cut),
    ("wire/a_wire_that_is_cut_for_a_second_loses_nothing", moment),
    ("wire/a_port_that_goes_down_ends_what_is_under_way", down),
];

/// Two interfaces that are joined.
pub struct Wire {
    names: [String; 2],
    /// Runs `tc` commands, one a line. While threads poll on all CPUs of a slow machine, starting a program takes
    /// seconds.
    tc: Mutex<Tc>,
}

struct Tc {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Drop for Tc {
    fn drop(&mut self) {
        // The process ends at the end of its input.
        self.input.take();
        let _ = self.child.wait();
    }
}

/// Restores the wire when dropped.
pub struct Worse<'a> {
    wire: &'a Wire,
    is_down: bool,
}

impl Drop for Worse<'_> {
    fn drop(&mut self) {
        // If that fails, the next trial fails and reports it.
        let _ = match self.is_down {
            true => run("ip", &["link", "set", &self.wire.names[0], "up"]),
            false => self.wire.tell(|name| format!("qdisc del dev {name} root")),
        };
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), Failed> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.success(), || format!("{program} {}: {text}", arguments.join(" ")))
}

impl Wire {
    pub fn new(interfaces: &str) -> Result<Self, Failed> {
        let names: Vec<String> = interfaces.split(',').map(str::to_owned).collect();
        let names = names.try_into().map_err(|_| "GIN_VERBS_WIRE must name two interfaces")?;
        let mut command = Command::new("tc");
        command.args(["-force", "-batch", "-"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take().ok_or("a pipe is missing")?);
        let output = BufReader::new(output);
        Ok(Self { names, tc: Mutex::new(Tc { child, input, output }) })
    }

    /// Runs a command for each interface.
    fn tell(&self, line: impl Fn(&str) -> String) -> Result<(), Failed> {
        // The answer to the last command shows that `tc` has executed all of them.
        let lines = self.names.iter().map(|name| line(name) + "\n").chain(["qdisc show dev lo\n".to_owned()]);
        let lines: String = lines.collect();
        let mut tc = self.tc.lock().unwrap_or_else(PoisonError::into_inner);
        tc.input.as_mut().ok_or("a pipe is missing")?.write_all(lines.as_bytes())?;
        let mut answer = String::new();
        tc.output.read_line(&mut answer)?;
        ensure(answer.starts_with("qdisc"), || format!("tc: {answer}"))
    }

    /// Degrades the wire in both directions.
    pub fn worsen(&self, how: &[&str]) -> Result<Worse<'_>, Failed> {
        self.tell(|name| format!("qdisc replace dev {name} root netem {}", how.join(" ")))?;
        Ok(Worse { wire: self, is_down: false })
    }

    /// Blocks all packets, though both ports stay up.
    pub fn cut(&self) -> Result<Worse<'_>, Failed> {
        self.worsen(&["loss", "100%"])
    }

    /// Takes one port down.
    fn down(&self) -> Result<Worse<'_>, Failed> {
        let worse = Worse { wire: self, is_down: true };
        run("ip", &["link", "set", &self.names[0], "down"])?;
        Ok(worse)
    }

    /// Returns the number of packets that have left so far.
    fn packets(&self) -> u64 {
        let count = |interface: &String| {
            let path = format!("/sys/class/net/{interface}/statistics/tx_packets");
            std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        self.names.iter().map(count).sum()
    }

    /// Prints the result of another program under the same conditions.
    fn log(&self, name: &str, devices: &[String; 2]) {
        let common = ["-x", "1", "-s", "65536", "-n", "50", "-F", "-d"];
        let Ok(mut server) = run_quietly(Command::new("ib_write_bw").args(common).arg(&devices[0])).spawn() else {
            println!("wire {name}: ib_write_bw is missing, so there is no comparison");
            return;
        };
        std::thread::sleep(Duration::from_secs(1));
        let begin = Instant::now();
        let client = run_quietly(Command::new("ib_write_bw").args(common).arg(&devices[1]).arg("127.0.0.1")).spawn();
        let mut said = "does not start".to_owned();
        if let Ok(mut client) = client {
            said = loop {
                match client.try_wait() {
                    Ok(Some(status)) => break format!("{status} after {:?}", begin.elapsed()),
                    Ok(None) if begin.elapsed() < Duration::from_secs(20) => {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    _ => break format!("not finished after {:?}", begin.elapsed()),
                }
            };
            let _ = client.kill();
            let _ = client.wait();
        }
        let _ = server.kill();
        let _ = server.wait();
        println!("wire {name}: ib_write_bw, 50 writes of 64 KiB: {said}");
    }
}

fn run_quietly(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// Streams rounds of 8 puts of 32 KiB and a signal. The receiver compares all bytes of each round before the next
/// begins. If errors are allowed, one ends the stream, and everything that was signalled before has arrived.
fn stream(devices: &[String; 2], rounds: u64, may_fail: bool) -> Result<(), Failed> {
    let mut sides = pair(&Plan::new(devices))?;
    let begin = Instant::now();
    for round in 0..rounds {
        let bytes = sides[0].fill(round)?;
        let mut last = 0;
        for part in 0..8 {
            last = sides[0].put(1, part * 32_768, part * 32_768, 32_768);
        }
        let signal = sides[0].post(0, Transfer::Nothing, Some(raise(0, 1)), 1);
        let seen = round as usize + 1;
        until(&mut sides, "signal", |[first, second]| {
            second.signals.len() == seen || first.outcome(signal).is_some_and(|outcome| outcome.is_err())
        })?;
        if sides[1].signals.len() == seen {
            ensure(sides[1].read(0, 8 * 32_768)? == bytes[..8 * 32_768], || format!("wrong bytes in round {round}"))?;
            until(&mut sides, "ends", |[side, _]| side.outcome(last).is_some() && side.outcome(signal).is_some())?;
        }
        if let Some((id, Err(error))) = sides[0].completions.iter().find(|(_, outcome)| outcome.is_err()) {
            println!("round {round}: request {id}: {error}");
            ensure(may_fail, || format!("request {id}: {error}"))?;
            return Ok(());
        }
    }
    println!("{rounds} rounds of 256 KiB in {:?}", begin.elapsed());
    Ok(())
}

fn cut(devices: &[String; 2], wire: &Wire) -> Result<(), Failed> {
    let config = VerbsConfig::default().timeout(14);
    let mut sides = pair(&Plan { config: config.clone(), ..Plan::new(devices) })?;
    let packets = wire.packets();
    let fine = sides[0].put(1, 0, 0, 100_000);
    ensure(ended(&mut sides[0], fine)?.0.is_ok(), || "the wire was cut before the test".to_owned())?;
    let packets = wire.packets() - packets;
    ensure(packets >= 100, || {
        format!("100,000 bytes took only {packets} packets on this wire: they use another path")
    })?;
    let _cut = wire.cut()?;
    for side in [0, 1] {
        let id = sides[side].put(1 - side as u32, 0, 0, 100);
        let (outcome, took) = ended(&mut sides[side], id)?;
        println!("rank {side}: {outcome:?} after {took:?}, expected after {:?}", config.lost_after());
        ensure(matches!(outcome, Err(NetError::PeerLost { .. })), || format!("{outcome:?}"))?;
        ensure(took < Duration::from_secs(10), || format!("after {took:?}"))?;
        ensure(sides[side].network.deregister(0), || "the network keeps the window after deregister".to_owned())?;
    }
    Ok(())
}

fn down(devices: &[String; 2], wire: &Wire) -> Result<(), Failed> {
    let config = VerbsConfig::default().timeout(14);
    let mut sides = pair(&Plan { config, ..Plan::new(devices) })?;
    let _down = wire.down()?;
    for side in [0, 1] {
        let id = sides[side].put(1 - side as u32, 0, 0, 100);
        let (outcome, took) = ended(&mut sides[side], id)?;
        println!("rank {side}: {outcome:?} after {took:?}");
        ensure(outcome.is_err() && took < Duration::from_secs(10), || format!("{outcome:?} after {took:?}"))?;
    }
    Ok(())
}

fn moment(devices: &[String; 2], wire: &Wire) -> Result<(), Failed> {
    // A cut may last longer on a slow machine.
    let config = VerbsConfig::default().timeout(18);
    let mut sides = pair(&Plan { config, ..Plan::new(devices) })?;
    let bytes = sides[0].fill(5)?;
    let cut = wire.cut()?;
    let ids: Vec<u64> = (0..4).map(|part| sides[0].post(0, put(part * 1000, part * 1000, 1000), None, 1)).collect();
    let signal = sides[0].post(0, Transfer::Nothing, Some(raise(0, 1)), 1);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(1) {
        sides[0].poll();
    }
    drop(cut);
    let took = until(&mut sides, "end", |[side, _]| side.outcome(signal).is_some())?;
    let outcome = sides[0].outcome(signal);
    println!("after a cut of 1 s: {outcome:?} {took:?} later");
    ensure(outcome == Some(Ok(())), || format!("{outcome:?}"))?;
    until(&mut sides, "signal", |[_, side]| side.signals.len() == 1)?;
    ensure(sides[1].read(0, 4000)? == bytes[..4000], || "wrong bytes".to_owned())?;
    ensure(ids.iter().all(|id| sides[0].outcome(*id) == Some(Ok(()))), || "a put is missing".to_owned())
}
