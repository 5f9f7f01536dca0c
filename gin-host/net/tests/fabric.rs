// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two endpoints over libfabric, driven by hand: in this process, and one of them in a child process that dies.
//! [`libfabric_double`] models providers whose hardware is rare.
//!
//! Ignored without libfabric; `scripts/setup.sh` installs it. With `GIN_FABRIC_TIMES`, one trial also compares times
//! with libfabric's `fi_pingpong` (Debian: `libfabric-bin`).

use gin_abi::{RemoteSignal, SignalTarget, Transfer, WindowOffset};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_net::fabric::{Fabric, FabricConfig, FabricNetwork, NoFabric, probe};
use gin_net::staged::{Staged, Staging};
use gin_net::{Endpoint, Event, Key, LocalSignals, LocalWindow, NetError, Network, Request, SignalArrival};
use gin_testkit::{PROVIDERS, PROVIDERS_FOR_GPUS, libfabric_double};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of window 0 of each rank, longer than a message.
const BYTES: u64 = 6 << 20;
const CONTEXTS: u32 = 2;
const PER_CONTEXT: u32 = 8;
/// Ample: every event that is due arrives much sooner.
const LIMIT: Duration = Duration::from_secs(60);
/// Signal that the child process echoes, with a value.
const ECHO: u32 = 5;
const VALUE: Transfer =
    Transfer::PutValue { value: 7, width_log2: 3, destination: WindowOffset { window: 0, offset: 0 } };
/// Variable that makes this program the peer of a test.
const PEER: &str = "GIN_FABRIC_PEER";

/// One rank.
struct Side {
    network: Staged<FabricNetwork>,
    memory: Arc<Memory>,
    /// Kept as a communicator keeps them.
    words: Arc<Memory>,
    completions: Vec<(u64, Result<(), NetError>)>,
    signals: Vec<SignalArrival>,
    next: u64,
}

impl Side {
    fn new(config: &FabricConfig, rank: u32, staging: Staging) -> Result<Self, Failed> {
        let device: Arc<dyn Device> = VirtualDevice::memory_only(rank);
        let endpoint = Endpoint { rank, ranks: 2, seed: 1, gpu: None };
        let fabric = Fabric::open(config)?;
        let network = match config.virtual_gpus {
            true => FabricNetwork::staged(&fabric, &endpoint),
            false => Staged::new(FabricNetwork::new(&fabric, &endpoint), rank, staging),
        };
        let memory = Memory::new(&device, MemoryKind::Device, BYTES)?;
        let words = Memory::new(&device, MemoryKind::Pinned, 8 * u64::from(CONTEXTS * PER_CONTEXT))?;
        Ok(Self { network, memory, words, completions: Vec::new(), signals: Vec::new(), next: 0 })
    }

    fn hello(&mut self) -> Result<Key, Failed> {
        let memory = self.words.clone();
        let signals = LocalSignals { memory, nic: None, contexts: CONTEXTS, per_context: PER_CONTEXT, mailbox: None };
        Ok(self.network.register_signals(&signals)?)
    }

    fn window(&mut self) -> Result<Key, Failed> {
        let plane = Memory::new(self.memory.device(), MemoryKind::Pinned, BYTES)?;
        let window = LocalWindow { id: 0, memory: self.memory.whole(), plane: Some(plane), nic: false };
        Ok(self.network.register(&window)?)
    }

    fn poll(&mut self) {
        let mut events = Vec::new();
        self.network.poll(&mut events);
        // As the proxy does, before it raises a signal or completes a get.
        if !events.is_empty() && self.network.capabilities().needs_make_visible {
            self.network.make_visible().expect("the endpoint reads its own memory");
        }
        for event in events {
            match event {
                Event::Completion { id, outcome } => self.completions.push((id, outcome)),
                Event::Signal(arrival) => self.signals.push(arrival),
                Event::Notice(arrival) => panic!("unexpected notice {arrival:?}"),
            }
        }
    }

    /// Posts a request, polling until the network accepts it. Returns its id.
    fn post(&mut self, context: u32, transfer: Transfer, signal: Option<RemoteSignal>, peer: u32) -> u64 {
        let id = self.next;
        self.next += 1;
        let request = Request { id, context, peer, transfer, signal, notice: None, more: false };
        let begin = Instant::now();
        while self.network.post(&[request]) == 0 {
            assert!(begin.elapsed() < LIMIT, "the network does not accept request {id}");
            self.poll();
        }
        id
    }

    fn outcome(&self, id: u64) -> Option<&Result<(), NetError>> {
        self.completions.iter().find(|(other, _)| *other == id).map(|(_, outcome)| outcome)
    }

    /// Fills the window with bytes that depend on the seed.
    fn fill(&self, seed: u64) -> Result<Vec<u8>, Failed> {
        let byte = |at: u64| ((at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        let bytes: Vec<u8> = (0..BYTES).map(byte).collect();
        self.memory.write(0, &bytes)?;
        Ok(bytes)
    }

    fn read(&self) -> Result<Vec<u8>, Failed> {
        let mut bytes = vec![0; BYTES as usize];
        self.memory.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

fn at(offset: u64) -> WindowOffset {
    WindowOffset { window: 0, offset }
}

fn put(from: u64, to: u64, bytes: u64) -> Transfer {
    Transfer::Put { source: at(from), destination: at(to), bytes }
}

fn get(from: u64, to: u64, bytes: u64) -> Transfer {
    Transfer::Get { source: at(from), destination: at(to), bytes }
}

fn raise(id: u32, amount: u64) -> Option<RemoteSignal> {
    Some(RemoteSignal { target: SignalTarget::Id(id), amount, strong: true })
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(why().into()) }
}

fn until(sides: &mut [Side], what: &str, done: impl Fn(&[Side]) -> bool) -> Result<(), Failed> {
    let begin = Instant::now();
    while !done(sides) {
        sides.iter_mut().for_each(Side::poll);
        let of = |side: &Side| format!("{:?} {:?}", side.completions, side.signals);
        ensure(begin.elapsed() < LIMIT, || format!("no {what}: {:?}", sides.iter().map(of).collect::<Vec<_>>()))?;
    }
    Ok(())
}

fn connect(
    sides: &mut [Side],
    hellos: &[Key],
    windows: impl FnOnce(&mut [Side]) -> Result<Vec<Key>, Failed>,
) -> Result<(), Failed> {
    for side in sides.iter_mut() {
        side.network.connect_signals(hellos)?;
    }
    let keys = windows(sides)?;
    for side in sides {
        side.network.connect(0, &keys)?;
    }
    Ok(())
}

/// Two ranks of this process. `spoil` changes the key of rank 1's window.
fn pair(config: &FabricConfig, staging: &Staging, spoil: fn(&mut Vec<u8>)) -> Result<Vec<Side>, Failed> {
    let mut sides = vec![Side::new(config, 0, staging.clone())?, Side::new(config, 1, staging.clone())?];
    let hellos = sides.iter_mut().map(Side::hello).collect::<Result<Vec<_>, _>>()?;
    connect(&mut sides, &hellos, |sides| {
        let mut keys = sides.iter_mut().map(Side::window).collect::<Result<Vec<_>, _>>()?;
        spoil(&mut keys[1].0);
        Ok(keys)
    })?;
    Ok(sides)
}

fn plain(config: &FabricConfig) -> Result<Vec<Side>, Failed> {
    pair(config, &Staging::Never, |_| {})
}

fn everything(config: &FabricConfig) -> Result<(), Failed> {
    let ways = [Staging::Never, Staging::Always("a test requires it")];
    // Memory of virtual GPUs goes one way only.
    for staging in &ways[usize::from(config.virtual_gpus)..] {
        let mut sides = pair(config, staging, |_| {})?;
        sides[1].fill(2)?;
        for peer in [1, 0] {
            let own = sides[0].fill(1)?;
            let mut expected = sides[peer as usize].read()?;
            let half = BYTES / 2;
            let max = sides[0].network.capabilities().max_message.min(half - 500_000);
            let value = Transfer::PutValue { value: 0x1122_3344_5566_7788, width_log2: 2, destination: at(half + 3) };
            let ids = [
                sides[0].post(0, put(100, half + 500_000, max), raise(2, 1), peer),
                sides[0].post(0, put(5, half + 100_000, 1), None, peer),
                sides[0].post(1, put(0, half + 200_000, 70_000), raise(3, 4), peer),
                sides[0].post(0, value, raise(1, 9), peer),
                sides[0].post(0, put(0, 0, 0), None, peer),
            ];
            until(&mut sides, "end", |sides| {
                ids.iter().all(|id| sides[0].outcome(*id).is_some()) && sides[peer as usize].signals.len() == 3
            })?;
            ensure(ids.iter().all(|id| sides[0].outcome(*id) == Some(&Ok(()))), || {
                format!("{:?}", sides[0].completions)
            })?;
            let mut expect =
                |at: u64, bytes: &[u8]| expected[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
            expect(half + 500_000, &own[100..100 + max as usize]);
            expect(half + 100_000, &own[5..6]);
            expect(half + 200_000, &own[..70_000]);
            expect(half + 3, &0x5566_7788u32.to_le_bytes());
            ensure(sides[peer as usize].read()? == expected, || format!("wrong bytes at rank {peer}"))?;
            sides[peer as usize].signals.clear();
            // Gets the bytes back from the peer.
            let got = sides[0].post(0, get(half + 200_000, 3, 70_000), None, peer);
            until(&mut sides, "get", |sides| sides[0].outcome(got).is_some())?;
            ensure(sides[0].outcome(got) == Some(&Ok(())), || format!("{:?}", sides[0].outcome(got)))?;
            ensure(sides[0].read()?[3..70_003] == own[..70_000], || format!("other bytes got from rank {peer}"))?;
        }
        until(&mut sides, "rest", |sides| sides.iter().all(|side| side.network.is_quiet()))?;
        ensure(sides.iter_mut().all(|side| side.network.deregister(0)), || "a window is kept".to_owned())?;
        let refused = sides[0].post(0, put(0, 0, 8), None, 1);
        until(&mut sides, "refusal", |sides| sides[0].outcome(refused).is_some())?;
        let error = sides[0].outcome(refused);
        ensure(matches!(error, Some(Err(NetError::UnknownWindow { .. }))), || format!("{error:?}"))?;
    }
    Ok(())
}

fn order(config: &FabricConfig) -> Result<(), Failed> {
    let mut sides = plain(config)?;
    for round in 0..10u64 {
        let bytes = sides[0].fill(round)?;
        for part in 0..24 {
            let length = BYTES / 24;
            sides[0].post(0, put(part * length, part * length, length), None, 1);
        }
        sides[0].post(0, Transfer::Nothing, raise(3, round + 1), 1);
        until(&mut sides, "signal", |sides| sides[1].signals.len() == round as usize + 1)?;
        ensure(sides[1].read()? == bytes, || format!("round {round}: the signal overtook its data"))?;
    }
    Ok(())
}

/// The peer gets no signal, and makes nothing visible.
fn quiet(config: &FabricConfig) -> Result<(), Failed> {
    let mut sides = plain(config)?;
    for round in 0..10u64 {
        let bytes = sides[0].fill(round)?;
        for part in 0..3 {
            let length = BYTES / 3;
            let id = sides[0].post(0, put(part * length, part * length, length), None, 1);
            until(&mut sides, "put", |sides| sides[0].outcome(id) == Some(&Ok(())))?;
        }
        let id = sides[0].post(0, Transfer::Nothing, None, 1);
        until(&mut sides, "quiet", |sides| sides[0].outcome(id) == Some(&Ok(())))?;
        ensure(sides[1].read()? == bytes, || format!("round {round}: data is not at the peer after a quiet"))?;
    }
    Ok(())
}

/// Memory of a GPU goes directly over the models that reach it without CUDA, and else through host memory.
fn gpus(config: &FabricConfig) -> Result<(), Failed> {
    let sides = plain(&config.clone().virtual_gpus(true))?;
    let text = sides[0].network.describe();
    let expected = match config.provider.as_str() {
        "efa-gpu" | "cxi-gpu" | "opx-gpu" => ", memory of the device direct",
        "efa" | "opx" => "(FI_OPT_CUDA_API_PERMITTED) failed: Invalid argument",
        "cxi" => "(the provider cxi does not reach it (no FI_HMEM))",
        "strange" => "(FI_OPT_CUDA_API_PERMITTED) failed: Operation not supported",
        _ => "memory of the device through host memory (",
    };
    ensure(text.contains(expected), || text.clone())?;
    Ok(())
}

/// The library or the provider of one rank reaches GPUs, that of the other does not.
fn mixed(config: &FabricConfig) -> Result<(), Failed> {
    let of = |rank: u32| config.clone().provider(["opx", "opx-gpu"][rank as usize].to_owned()).virtual_gpus(true);
    let mut sides =
        [0, 1].map(|rank| Side::new(&of(rank), rank, Staging::Never)).into_iter().collect::<Result<Vec<_>, _>>()?;
    let hellos = sides.iter_mut().map(Side::hello).collect::<Result<Vec<_>, _>>()?;
    connect(&mut sides, &hellos, |sides| sides.iter_mut().map(Side::window).collect())?;
    for round in 0..10 {
        let (from, to) = (round % 2, 1 - round % 2);
        let bytes = sides[from].fill(round as u64)?;
        for transfer in [put(0, 0, BYTES / 2), put(BYTES / 2, BYTES / 2, BYTES / 2), Transfer::Nothing] {
            let id = sides[from].post(0, transfer, None, to as u32);
            until(&mut sides, "end", |sides| sides[from].outcome(id) == Some(&Ok(())))?;
        }
        ensure(sides[to].read()? == bytes, || format!("round {round}: data is not at rank {to} after a quiet"))?;
    }
    let caps = sides.iter().map(|side| side.network.capabilities());
    ensure(caps.into_iter().all(|caps| !caps.completes_on_arrival()), || "a quiet would not be posted".to_owned())
}

fn many(config: &FabricConfig) -> Result<(), Failed> {
    const COUNT: u64 = 3000;
    let mut sides = plain(config)?;
    // The receiver does not poll meanwhile.
    let before = Instant::now();
    let mut ids = Vec::new();
    for number in 0..COUNT {
        let request = Request {
            id: number,
            context: (number % 2) as u32,
            peer: 1,
            transfer: put(number, number, 1),
            signal: raise(1, number),
            notice: None,
            more: false,
        };
        while sides[0].network.post(&[request]) == 0 {
            sides[0].poll();
            if before.elapsed() > Duration::from_millis(200) {
                sides[1].poll();
            }
        }
        ids.push(number);
    }
    until(&mut sides, "end", |sides| {
        sides[1].signals.len() == COUNT as usize && sides[0].completions.len() == COUNT as usize
    })?;
    for context in 0..2 {
        let amounts = sides[1].signals.iter().filter(|signal| signal.context == context).map(|signal| signal.amount);
        let expected = (0..COUNT).filter(|number| number % 2 == u64::from(context));
        ensure(amounts.eq(expected), || format!("signals of context {context} are lost or out of order"))?;
    }
    ensure(sides[0].completions.iter().all(|(_, outcome)| outcome.is_ok()), || format!("{:?}", sides[0].completions))
}

fn refused(config: &FabricConfig) -> Result<(), Failed> {
    let mut sides = plain(config)?;
    let past = sides[0].post(0, put(0, BYTES - 4, 8), raise(0, 1), 1);
    let behind = sides[0].post(0, Transfer::Nothing, raise(0, 2), 1);
    let other = sides[0].post(1, put(0, 0, 8), raise(0, 3), 1);
    let unknown = sides[0].post(1, Transfer::Nothing, raise(PER_CONTEXT, 1), 1);
    until(&mut sides, "end", |sides| sides[0].completions.len() == 4 && !sides[1].signals.is_empty())?;
    let outcome = |id| sides[0].outcome(id).cloned();
    ensure(matches!(outcome(past), Some(Err(NetError::OutOfRange { .. }))), || format!("{:?}", outcome(past)))?;
    ensure(
        outcome(behind) == Some(Err(NetError::Failed { context: "request behind a failed one", peer: 1, status: 0 })),
        || format!("{:?}", outcome(behind)),
    )?;
    ensure(outcome(other) == Some(Ok(())), || format!("{:?}", outcome(other)))?;
    ensure(matches!(outcome(unknown), Some(Err(NetError::UnknownSignal { .. }))), || {
        format!("{:?}", outcome(unknown))
    })?;
    ensure(sides[1].signals.iter().all(|signal| signal.amount == 3), || format!("{:?}", sides[1].signals))
}

/// A put with a key that the peer does not have, as a stranger's or one of a window that is gone.
fn wrong_key(config: &FabricConfig) -> Result<(), Failed> {
    // The lowest bit of the last byte of the key, before a boolean: changes the value but not the length.
    let mut sides = pair(config, &Staging::Never, |key| {
        let last = key.len() - 2;
        key[last] ^= 1;
    })?;
    let before = sides[1].read()?;
    sides[0].fill(5)?;
    let ids = [sides[0].post(0, put(0, 0, 100), raise(0, 1), 1), sides[0].post(0, Transfer::Nothing, raise(0, 2), 1)];
    until(&mut sides, "end", |sides| ids.iter().all(|id| sides[0].outcome(*id).is_some()))?;
    for id in ids {
        ensure(sides[0].outcome(id).is_some_and(Result::is_err), || format!("{:?}", sides[0].completions))?;
    }
    let until = Instant::now() + Duration::from_millis(50);
    while Instant::now() < until {
        sides.iter_mut().for_each(Side::poll);
    }
    ensure(sides[1].read()? == before, || "bytes arrived without a key".to_owned())?;
    ensure(sides[1].signals.is_empty(), || format!("{:?} covers data that did not arrive", sides[1].signals))
}

/// A rank in a child process.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Peer {
    fn signal(&self, signal: Signal) -> Result<(), Failed> {
        let pid = Pid::from_child(&self.0);
        Ok(kill_process(pid, signal)?)
    }
}

fn to_text(key: &Key) -> String {
    key.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_text(text: &str) -> Key {
    let text = text.trim();
    Key((0..text.len() / 2).filter_map(|at| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()).collect())
}

/// This rank, and one in a child process, which polls until it is killed.
fn with_child(config: &FabricConfig) -> Result<(Vec<Side>, Peer), Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(PEER, &config.provider).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut peer = Peer(command.spawn()?);
    let (mut to, from) = (peer.0.stdin.take().ok_or("no input")?, peer.0.stdout.take().ok_or("no output")?);
    let mut lines = BufReader::new(from).lines();
    let mut exchange = |own: Key| -> Result<Vec<Key>, Failed> {
        writeln!(to, "{}", to_text(&own))?;
        let other = lines.next().ok_or("the peer has ended")??;
        Ok(vec![own, from_text(&other)])
    };
    let mut sides = vec![Side::new(config, 0, Staging::Never)?];
    let own = sides[0].hello()?;
    let hellos = exchange(own)?;
    connect(&mut sides, &hellos, |sides| exchange(sides[0].window()?))?;
    // The peer polls once it has answered.
    let id = sides[0].post(0, put(0, 0, 1000), raise(1, 1), 1);
    until(&mut sides, "first put", |sides| sides[0].outcome(id) == Some(&Ok(())))?;
    drop(to);
    Ok((sides, peer))
}

/// The rank of a child process.
fn serve(provider: &str) -> Result<(), Failed> {
    let config = FabricConfig::default().provider(provider.to_owned());
    let mut lines = std::io::stdin().lock().lines();
    let mut exchange = |own: Key| -> Result<Vec<Key>, Failed> {
        println!("{}", to_text(&own));
        let other = lines.next().ok_or("the test has ended")??;
        Ok(vec![from_text(&other), own])
    };
    let mut sides = vec![Side::new(&config, 1, Staging::Never)?];
    let own = sides[0].hello()?;
    let hellos = exchange(own)?;
    connect(&mut sides, &hellos, |sides| exchange(sides[0].window()?))?;
    loop {
        sides[0].poll();
        for arrival in std::mem::take(&mut sides[0].signals) {
            if arrival.target == SignalTarget::Id(ECHO) {
                sides[0].post(0, VALUE, raise(ECHO, 1), 0);
                sides[0].completions.clear();
            }
        }
    }
}

/// Returns the microseconds for each transfer of `fi_pingpong` between two processes of this host.
fn pingpong(provider: &str, bytes: u64, rounds: u32) -> Result<f64, Failed> {
    let size = format!("-p {provider} -e rdm -S {bytes} -I {rounds}");
    let mut server = Command::new("fi_pingpong");
    server.args(size.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = Peer(server.spawn()?);
    std::thread::sleep(Duration::from_secs(1));
    let output = Command::new("fi_pingpong").args(size.split(' ')).arg("127.0.0.1").output()?;
    server.0.wait()?;
    let text = String::from_utf8(output.stdout)?;
    // Bytes, sent, acknowledged, total, time, MB/s, us for each transfer, millions of transfers a second.
    let time = text.lines().last().and_then(|line| line.split_whitespace().nth(6)?.parse().ok());
    time.ok_or_else(|| format!("fi_pingpong: {text}{}", String::from_utf8_lossy(&output.stderr)).into())
}

/// Compares a value with its signal there and back, and puts of 1 MiB, with `fi_pingpong` in the same run. Each is
/// measured three times in turns; the best counts, because other programs use the CPUs too.
fn times(config: &FabricConfig) -> Result<(), Failed> {
    const ROUNDS: u32 = 3000;
    const PUTS: u32 = 200;
    let config = config.clone().lost_after(Duration::from_secs(10));
    let [mut value, mut other_value, mut put_time, mut other_put] = [f64::MAX; 4];
    for _ in 0..3 {
        let (mut sides, peer) = with_child(&config)?;
        let begin = Instant::now();
        for round in 0..ROUNDS as usize {
            sides[0].post(0, VALUE, raise(ECHO, 1), 1);
            until(&mut sides, "echo", |sides| sides[0].signals.len() > round)?;
        }
        value = value.min(begin.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS));
        until(&mut sides, "rest", |sides| sides[0].network.is_quiet())?;
        sides[0].completions.clear();
        let begin = Instant::now();
        for _ in 0..PUTS {
            sides[0].post(0, put(0, 0, 1 << 20), None, 1);
        }
        until(&mut sides, "puts", |sides| sides[0].completions.len() == PUTS as usize)?;
        put_time = put_time.min(begin.elapsed().as_secs_f64() * 1e6 / f64::from(PUTS));
        drop(peer);
        other_value = other_value.min(2.0 * pingpong(&config.provider, 8, ROUNDS)?);
        other_put = other_put.min(pingpong(&config.provider, 1 << 20, PUTS)?);
    }
    println!(
        "{}: 8 bytes and back {value:.1} us, fi_pingpong {other_value:.1} us; 1 MiB {put_time:.0} us, fi_pingpong \
         {other_put:.0} us",
        config.provider
    );
    ensure(value <= 2.0 * other_value, || format!("{value} us is more than twice {other_value} us"))?;
    ensure(put_time <= 1.3 * other_put, || format!("{put_time} us is more than 1.3 times {other_put} us"))
}

fn gone(config: &FabricConfig) -> Result<(), Failed> {
    let (mut sides, mut peer) = with_child(config)?;
    peer.signal(Signal::KILL)?;
    peer.0.wait()?;
    lost(&mut sides)
}

fn silent(config: &FabricConfig) -> Result<(), Failed> {
    let (mut sides, peer) = with_child(config)?;
    peer.signal(Signal::STOP)?;
    lost(&mut sides)
}

/// Checks that all requests to the peer fail in time, and that the window is let go.
fn lost(sides: &mut [Side]) -> Result<(), Failed> {
    let begin = Instant::now();
    let first = sides[0].next;
    for number in 0..20 {
        sides[0].post(0, put(0, 0, BYTES / 2), raise(1, number), 1);
    }
    let last = sides[0].next - 1;
    let got = sides[0].post(1, get(0, 0, 100_000), None, 1);
    until(sides, "loss", |sides| (first..=got).all(|id| sides[0].outcome(id).is_some()))?;
    let took = begin.elapsed();
    ensure(took < Duration::from_secs(5), || format!("lost after {took:?}"))?;
    ensure(matches!(sides[0].outcome(last), Some(Err(NetError::PeerLost { peer: 1, .. }))), || {
        format!("{:?}", sides[0].outcome(last))
    })?;
    let later = sides[0].post(0, put(0, 0, 8), None, 1);
    until(sides, "end", |sides| sides[0].outcome(later).is_some())?;
    ensure(matches!(sides[0].outcome(later), Some(Err(NetError::PeerLost { .. }))), || {
        format!("{:?}", sides[0].outcome(later))
    })?;
    ensure(sides[0].network.is_quiet() && sides[0].network.deregister(0), || "the window is kept".to_owned())
}

/// The provider still holds operations of the window when it is given back.
fn ended(config: &FabricConfig) -> Result<(), Failed> {
    let mut sides = plain(config)?;
    for number in 0..20 {
        sides[0].post(0, put(number * 1000, number * 1000, 1000), None, 1);
    }
    sides.truncate(1);
    let is_lost = |(_, outcome): &(u64, Result<(), NetError>)| matches!(outcome, Err(NetError::PeerLost { .. }));
    until(&mut sides, "loss", |sides| sides[0].completions.iter().any(is_lost))?;
    ensure(sides[0].network.deregister(0), || "the window is kept".to_owned())?;
    let later = sides[0].post(0, Transfer::Nothing, raise(0, 1), 1);
    until(&mut sides, "end", |sides| sides[0].outcome(later).is_some())?;
    ensure(sides[0].outcome(later).is_some_and(Result::is_err), || format!("{:?}", sides[0].outcome(later)))
}

fn no_provider(config: &FabricConfig) -> Result<(), Failed> {
    let config = config.clone().domain(Some("eth99".to_owned()));
    let error = Fabric::open(&config).err();
    ensure(matches!(error, Some(NoFabric::NoProvider { .. })), || format!("{error:?}"))?;
    let text = error.map(|error| error.to_string()).unwrap_or_default();
    ensure(text.contains("`eth99`") && text.contains("fi_info"), || text.clone())
}

type Body = fn(&FabricConfig) -> Result<(), Failed>;

const TRIALS: &[(&str, Body)] = &[
    ("puts_gets_values_and_signals_arrive_at_the_peer_and_at_the_rank_itself", everything),
    ("a_signal_comes_behind_all_that_was_put_before_it", order),
    ("data_is_at_the_peer_after_a_quiet_without_a_signal", quiet),
    ("memory_of_gpus_goes_directly_or_through_host_memory_and_the_reason_is_named", gpus),
    ("signals_come_once_each_and_in_order_though_the_receiver_is_slow", many),
    ("a_range_past_the_end_is_refused_and_so_is_a_signal_behind_it", refused),
    ("a_put_with_a_wrong_key_arrives_nowhere_and_raises_nothing", wrong_key),
    ("a_window_can_be_given_back_after_its_peer_has_ended", ended),
    ("a_peer_that_is_killed_is_lost_in_time", gone),
    ("a_peer_that_is_stopped_is_lost_in_time", silent),
    ("a_domain_that_does_not_exist_is_named", no_provider),
];

fn main() -> ExitCode {
    if let Ok(provider) = std::env::var(PEER) {
        let code = serve(&provider).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        return code;
    }
    let mut arguments = Arguments::from_args();
    let mut trials = Vec::new();
    let config = FabricConfig::from_env().lost_after(Duration::from_millis(400));
    match probe(&config.library) {
        Err(error) => {
            let ignored = move || Ok(Completion::ignored_with(error.to_string()));
            trials.push(Trial::ignorable_test("fabric", ignored));
        }
        Ok(_) => {
            for (way, provider, unordered) in [("tcp", "tcp", false), ("unordered", "tcp", true), ("shm", "shm", false)]
            {
                let config = config.clone().provider(provider.to_owned()).unordered(unordered);
                if std::env::var_os("GIN_FABRIC_TIMES").is_some() && !unordered {
                    let config = config.clone();
                    trials.push(Trial::test(format!("{way}/times"), move || times(&config)));
                }
                // A peer that ends or stops while it holds a lock of `shm` keeps its peers spinning in the provider.
                for (name, body) in TRIALS.iter().filter(|(name, _)| way != "shm" || !name.contains("_is_lost_")) {
                    let config = config.clone();
                    trials.push(Trial::test(format!("{way}/{name}"), move || body(&config)));
                }
            }
        }
    }
    match libfabric_double(Path::new(env!("CARGO_TARGET_TMPDIR"))) {
        Err(reason) => {
            let ignored = move || Ok(Completion::ignored_with(reason));
            trials.push(Trial::ignorable_test("double", ignored));
        }
        Ok(library) => {
            let config = config.library(library.to_string_lossy().into_owned()).lost_after(LIMIT);
            let mix = config.clone();
            trials.push(Trial::test("mix/a_rank_whose_gpu_is_staged_and_one_whose_is_not_exchange_data", move || {
                mixed(&mix)
            }));
            // All its endpoints are in one process.
            for (name, body) in TRIALS.iter().filter(|(name, _)| !name.contains("_is_lost_")) {
                for provider in PROVIDERS.into_iter().chain(PROVIDERS_FOR_GPUS) {
                    let in_gpus = PROVIDERS_FOR_GPUS.contains(&provider);
                    let config = config.clone().provider(provider.to_owned()).virtual_gpus(in_gpus);
                    trials.push(Trial::test(format!("{provider}/{name}"), move || body(&config)));
                }
            }
        }
    }
    // A peer that another test keeps from running would count as lost.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}
