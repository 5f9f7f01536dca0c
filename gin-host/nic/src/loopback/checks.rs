// SPDX-License-Identifier: MIT OR Apache-2.0
//! The checks of a NIC.

use super::{BYTES, DEPTH, Deadline, INTERVAL, Loopback, Nic, bytes_at, is_of, show, word_at};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::command::QpState;
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe::{self, Flags, Remote};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// The result of a check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Check {
    /// The name, one of [`names`].
    pub name: &'static str,
    /// The correct observation, or the error.
    pub outcome: Result<String, Failed>,
    /// The time that it took, including the bring-up and the destruction of its queue pair.
    pub took: Duration,
}

/// The error of a check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failed {
    /// The expected value.
    pub expected: String,
    /// The observed value.
    pub seen: String,
}

type Done = Result<String, Box<Failed>>;

/// A check on a new queue pair.
type Body = fn(&mut Loopback) -> Done;

/// The checks. Each has a new queue pair, so that a failed check does not affect the others.
const BODIES: [(&str, Body); 10] = [
    ("bring-up", bring_up),
    ("nop", nop),
    ("write", write),
    ("inline write", inline_write),
    ("read and dump", read_and_dump),
    ("fetch-and-add", fetch_and_add),
    ("signal after data", signal_after_data),
    ("completion interval", completion_interval),
    ("index past 2^16", index_past_16_bits),
    ("wrong remote key", wrong_remote_key),
];
const RELEASE: &str = "release";

/// Returns the names of all checks, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    BODIES.into_iter().map(|(name, _)| name).chain([RELEASE])
}

/// Checks a NIC by queue pairs of its own. Each check ends after `deadline`, except that commands to the firmware have
/// no time limit. Calls `report` after each check. If a queue pair does not come up, the checks and the list end there.
pub fn check(nic: &Arc<Nic>, deadline: Duration, report: &mut dyn FnMut(&Check)) -> Vec<Check> {
    check_but(nic, deadline, &[], report)
}

/// Does the same without the checks of these names.
pub fn check_but(nic: &Arc<Nic>, deadline: Duration, but: &[&str], report: &mut dyn FnMut(&Check)) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut note = |name, begun: Instant, outcome: Result<String, Box<Failed>>| {
        let check = Check { name, outcome: outcome.map_err(|failed| *failed), took: begun.elapsed() };
        report(&check);
        checks.push(check);
    };
    for (name, body) in BODIES.into_iter().filter(|(name, _)| !but.contains(name)) {
        let begun = Instant::now();
        let made = Loopback::new(nic, Deadline::new(deadline));
        let up = made.is_ok();
        // This destroys the queue pair.
        let outcome =
            made.map_err(|error| failed("queue pairs that come up", error)).and_then(|mut pair| body(&mut pair));
        note(name, begun, outcome);
        if !up {
            return checks;
        }
    }
    let begun = Instant::now();
    let left: Vec<String> = nic.take_failures().iter().map(ToString::to_string).collect();
    let outcome = if left.is_empty() {
        Ok("all objects are destroyed".to_owned())
    } else {
        Err(failed("all objects to be destroyed", left.join("; ")))
    };
    note(RELEASE, begun, outcome);
    checks
}

fn failed(expected: impl Into<String>, seen: impl ToString) -> Box<Failed> {
    Box::new(Failed { expected: expected.into(), seen: seen.to_string() })
}

/// Returns a byte that differs from its neighbours, and from round to round.
fn pattern(round: u64, at: u64) -> u8 {
    // Knuth's multiplicative hash: the top bits depend on all others.
    ((at + 1 + round * 0x1_0001).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn fill(bytes: &[AtomicU8], value: impl Fn(u64) -> u8) {
    bytes.iter().zip(0..).for_each(|(byte, at)| byte.store(value(at), Ordering::Relaxed));
}

/// Returns the first wrong byte, in words.
fn difference(bytes: &[AtomicU8], value: impl Fn(u64) -> u8) -> Option<(String, String)> {
    let pairs = bytes.iter().zip(0..).map(|(byte, at)| (at, byte.load(Ordering::Relaxed), value(at)));
    let (at, seen, expected) = pairs.into_iter().find(|(_, seen, expected)| seen != expected)?;
    let of = bytes.len();
    Some((format!("byte {at} of {of} to be {expected:#04x}"), format!("{seen:#04x}")))
}

fn same(what: &str, bytes: &[AtomicU8], value: impl Fn(u64) -> u8) -> Result<(), Box<Failed>> {
    match difference(bytes, value) {
        None => Ok(()),
        Some((expected, seen)) => Err(failed(format!("{what}: {expected}"), seen)),
    }
}

/// Waits until the bytes are right, then checks them as [`same`] does. A completion says that the peer has accepted a
/// write, not that its memory shows the data.
fn soon(pair: &Loopback, what: &str, bytes: &[AtomicU8], value: impl Fn(u64) -> u8 + Copy) -> Result<(), Box<Failed>> {
    pair.wait(|| difference(bytes, value).is_none());
    same(what, bytes, value)
}

fn bring_up(pair: &mut Loopback) -> Done {
    let expected = [QpState::ReadyToSend, QpState::ReadyToReceive];
    for (index, (expected, end)) in expected.into_iter().zip(["sender", "responder"]).enumerate() {
        let seen = pair.state(index);
        if seen != Ok(expected) {
            let seen = seen.map_or_else(|error| error, |state| state.text().to_owned());
            return Err(failed(format!("{end}: {}", expected.text()), seen));
        }
    }
    Ok(format!("queue pair {:#x} is ready to send", pair.info.queue))
}

fn nop(pair: &mut Loopback) -> Done {
    pair.post(Flags::COMPLETION, wqe::nop)?;
    pair.finish()?;
    Ok("completed".to_owned())
}

/// A length of several packets that is no multiple of a word.
const LENGTHS: [u64; 4] = [1, 8, 4097, 30_001];

fn write(pair: &mut Loopback) -> Done {
    let (from, to) = (pair.payload.clone(), pair.words.clone());
    for (round, bytes) in (0..).zip(LENGTHS) {
        let (source, target) = (3 + round, 64 + round);
        fill(bytes_at(&to, 0, BYTES), |_| 0xee);
        fill(bytes_at(&from, source, bytes), |at| pattern(round, at));
        pair.post(Flags::COMPLETION, |post| wqe::write(post, to.remote(target), from.local(source, bytes)))?;
        pair.finish()?;
        let written = target..target + bytes;
        let value = |at| if written.contains(&at) { pattern(round, at - target) } else { 0xee };
        soon(pair, &format!("write of {bytes} bytes at {target}, and all around"), bytes_at(&to, 0, BYTES), value)?;
    }
    Ok(format!("{LENGTHS:?} bytes"))
}

fn inline_write(pair: &mut Loopback) -> Done {
    let to = pair.words.clone();
    let value = 0x8877_6655_4433_2211u64;
    let words = [0x0403_0201, 0x0807_0605, 0x0c0b_0a09, 0x100f_0e0d, 0x1413_1211, 0x1817_1615, 0x1c1b_1a19u32];
    let small = (1..=8).map(|bytes| (bytes, value.to_le_bytes().to_vec()));
    let large = (13..=wqe::MAX_INLINE_BYTES).map(|bytes| (bytes, (1..=28).collect()));
    let all: Vec<(u32, Vec<u8>)> = small.chain(large).collect();
    for (target, (bytes, source)) in (5..).zip(&all) {
        fill(bytes_at(&to, 0, 128), |_| 0xee);
        if *bytes <= 8 {
            pair.post(Flags::COMPLETION, |post| wqe::write_value(post, to.remote(target), value, *bytes))?;
        } else {
            pair.post(Flags::COMPLETION, |post| wqe::write_words(post, to.remote(target), words, *bytes))?;
        }
        pair.finish()?;
        let written = target..target + u64::from(*bytes);
        let value = |at| if written.contains(&at) { source[(at - target) as usize] } else { 0xee };
        let what = format!("write of {bytes} bytes in the entry at {target}, and around");
        soon(pair, &what, bytes_at(&to, 0, 128), value)?;
    }
    Ok("1 to 8 and 13 to 28 bytes".to_owned())
}

fn read_and_dump(pair: &mut Loopback) -> Done {
    let (from, to, unused) = (pair.words.clone(), pair.payload.clone(), pair.words.local(BYTES - 8, 8));
    for (round, bytes) in (0..).zip(LENGTHS) {
        let (source, target) = (9 + round, 32 + round);
        fill(bytes_at(&to, 0, BYTES), |_| 0xee);
        fill(bytes_at(&from, source, bytes), |at| pattern(round, at));
        pair.post(Flags::NONE, |post| wqe::read(post, from.remote(source), to.local(target, bytes)))?;
        pair.post(Flags::COMPLETION.and(Flags::FENCE), |post| wqe::dump(post, unused))?;
        pair.finish()?;
        let read = target..target + bytes;
        let value = |at| if read.contains(&at) { pattern(round, at - target) } else { 0xee };
        same(&format!("read of {bytes} bytes to {target}, and all around"), bytes_at(&to, 0, BYTES), value)?;
    }
    Ok(format!("{LENGTHS:?} bytes, in view when the dump is complete"))
}

fn fetch_and_add(pair: &mut Loopback) -> Done {
    let words = pair.words.clone();
    let (word, old) = (words.remote(128), words.local(256, 8));
    // The sum carries through every byte, so a wrong byte order shows.
    let mut value = 0xffu64;
    word_at(&words.slice, 128).store(value, Ordering::Relaxed);
    for amount in [1, 0xff00, 0xffff_0000, 0xffff_ffff_0000_0000u64, 0x0102_0304_0506_0708] {
        pair.post(Flags::COMPLETION, |post| wqe::fetch_add(post, word, amount, old))?;
        pair.finish()?;
        let sum = value.wrapping_add(amount);
        let seen =
            || (word_at(&words.slice, 256).load(Ordering::Acquire), word_at(&words.slice, 128).load(Ordering::Acquire));
        pair.wait(|| seen() == (value, sum));
        let (old, new) = seen();
        if (old, new) != (value, sum) {
            let expected = format!("adding {amount:#x} to {value:#x}: the old value, and {sum:#x} in memory");
            return Err(failed(expected, format!("{old:#x} as the old value, {new:#x} in memory")));
        }
        value = sum;
    }
    Ok(format!("5 sums, the last {value:#x}"))
}

/// The rounds of [`signal_after_data`].
const SIGNALS: u64 = 64;

fn signal_after_data(pair: &mut Loopback) -> Done {
    let (data, words) = (pair.payload.clone(), pair.words.clone());
    let (bytes, half) = (20_000, BYTES / 2);
    let (word, old) = (words.remote(8), words.local(16, 8));
    word_at(&words.slice, 8).store(0, Ordering::Relaxed);
    for round in 1..=SIGNALS {
        fill(bytes_at(&data, 0, bytes), |at| pattern(round, at));
        pair.post(Flags::NONE, |post| wqe::write(post, data.remote(half), data.local(0, bytes)))?;
        pair.post(Flags::NONE, |post| wqe::fetch_add(post, word, 1, old))?;
        pair.ring();
        loop {
            let seen = word_at(&words.slice, 8).load(Ordering::Acquire);
            if seen == round {
                break;
            }
            if seen > round || pair.until.passed() {
                return Err(failed(format!("signal {round}"), format!("{seen}, {}", pair.late())));
            }
            // After an error the signal would never arrive.
            pair.attend()?;
            std::thread::yield_now();
        }
        same(&format!("data of signal {round}, once it is seen"), bytes_at(&data, half, bytes), |at| {
            pattern(round, at)
        })?;
    }
    pair.post(Flags::COMPLETION, wqe::nop)?;
    pair.finish()?;
    Ok(format!("{SIGNALS} signals, each with {bytes} bytes in view before it"))
}

fn completion_interval(pair: &mut Loopback) -> Done {
    let to = pair.words.clone();
    for value in 1..=DEPTH {
        pair.post(Flags::NONE, |post| wqe::write_value(post, to.remote(0), value, 8))?;
    }
    pair.finish()?;
    if let Some(more) = pair.poll() {
        let seen = more.map_or_else(|code| format!("code {code:#x}"), |outcome| show(&outcome));
        return Err(failed(format!("{} completions and no more", DEPTH / INTERVAL), seen));
    }
    pair.wait(|| word_at(&to.slice, 0).load(Ordering::Acquire) == DEPTH);
    match word_at(&to.slice, 0).load(Ordering::Acquire) {
        DEPTH => Ok(format!("{DEPTH} entries, {} completions", pair.consumer_index)),
        seen => Err(failed(format!("what entry {} wrote, {DEPTH}", DEPTH - 1), seen)),
    }
}

fn index_past_16_bits(pair: &mut Loopback) -> Done {
    let entries = (1 << 16) + 4 * DEPTH;
    while pair.posted < entries {
        for _ in 0..INTERVAL {
            pair.post(Flags::NONE, wqe::nop)?;
        }
        pair.ring();
    }
    pair.finish()?;
    Ok(format!("{entries} entries in a queue of {DEPTH}, {} completions", pair.consumer_index))
}

fn wrong_remote_key(pair: &mut Loopback) -> Done {
    let (to, queue) = (pair.words.clone(), pair.info.queue);
    fill(bytes_at(&to, 0, 64), |_| 0xee);
    // The low 8 bits of a key are chosen at registration, and the NIC compares them.
    let key = Be32::new(to.remote_key ^ 0x5a);
    pair.post(Flags::NONE, |post| wqe::write_value(post, Remote { key, ..to.remote(0) }, 1, 8))?;
    pair.post(Flags::COMPLETION, |post| wqe::write_value(post, to.remote(8), 1, 8))?;
    for (index, syndrome) in [(0, Syndrome::RemoteAccess), (1, Syndrome::Flushed)] {
        let expected = || {
            let (text, code) = (syndrome.text(), syndrome.code());
            format!("queue pair {queue:#x}: completion of entry {index}: error: {text} (syndrome {code:#x})")
        };
        let outcome = pair.completion(&expected)?;
        let right = outcome.result.is_err_and(|failure| failure.syndrome == syndrome.code());
        if !right || !is_of(&outcome, queue, index) {
            return Err(failed(expected(), show(&outcome)));
        }
    }
    pair.wait(|| pair.state(0) == Ok(QpState::Error));
    match pair.state(0) {
        Ok(QpState::Error) => {}
        Ok(state) => return Err(failed("queue pair in the state error", state.text())),
        Err(error) => return Err(failed("queue pair in the state error", error)),
    }
    same("memory behind the wrong key, and of the entry that was flushed", bytes_at(&to, 0, 64), |_| 0xee)?;
    Ok(format!("{}, then flushed, queue pair in error", Syndrome::RemoteAccess.text()))
}
