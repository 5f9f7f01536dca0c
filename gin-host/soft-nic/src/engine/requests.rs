// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests: the checks by both NICs, and the effects in memory.

use super::{NO_ANSWER, Refusal, Tables};
use crate::faults::Mistake;
use crate::held::{Held, Reason, Source};
use crate::memory::Memory;
use crate::tables::{Answer, Region, Rights, Stage};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe::{Local, Remote, Work};

fn region<'t>(tables: &'t Tables<'_>, key: Be32, device: u32, domain: u32) -> Option<&'t Region> {
    let region = tables.regions.get(key.get() as usize >> 8)?;
    (region.live && region.key == key.get() && region.device == device && region.domain == domain).then_some(region)
}

/// Returns the place of a local range.
pub(super) fn local_range(
    tables: &Tables<'_>,
    number: u32,
    local: Local,
    bytes: u64,
    written: bool,
) -> Result<u64, Syndrome> {
    let queue = tables.queues.get(number as usize).ok_or(Syndrome::LocalOperation)?;
    let region = region(tables, local.key, queue.device, queue.domain).ok_or(Syndrome::LocalProtection)?;
    if written && !region.rights.local_write {
        return Err(Syndrome::LocalProtection);
    }
    region.place(local.address, bytes).ok_or(Syndrome::LocalProtection)
}

/// Returns the place of a remote range, whether writes to it have relaxed order, and the peer's queue pair.
fn remote_range(
    tables: &Tables<'_>,
    number: u32,
    remote: Remote,
    bytes: u64,
    right: impl Fn(Rights) -> bool,
) -> Result<(u64, bool, u32), Refusal> {
    let refuse = |syndrome| Err(Refusal { syndrome, peer_breaks: true });
    let own = tables.queues.get(number as usize).ok_or(NO_ANSWER)?;
    let peer = tables.queues.get(own.peer as usize).ok_or(NO_ANSWER)?;
    // The peer drops a packet from another sender than it expects, and does not acknowledge one with another sequence
    // number.
    let connected = peer.device == own.peer_device && peer.peer == number && peer.peer_device == own.device;
    let in_sequence = peer.initial_receive_psn == own.initial_send_psn;
    if !peer.answers() || !connected || !in_sequence || peer.mtu != own.mtu {
        return Err(NO_ANSWER);
    }
    if !right(peer.rights) {
        return refuse(Syndrome::RemoteInvalidRequest);
    }
    let Some(region) = region(tables, remote.key, peer.device, peer.domain) else {
        return refuse(Syndrome::RemoteAccess);
    };
    match region.place(remote.address, bytes) {
        Some(place) if right(region.rights) => Ok((place, region.relaxed, own.peer)),
        _ => refuse(Syndrome::RemoteAccess),
    }
}

/// Performs the checks of the sender's NIC before it sends anything.
pub(super) fn request(tables: &Tables<'_>, number: u32, work: Work) -> Result<(), Refusal> {
    let local = |syndrome| Refusal { syndrome, peer_breaks: false };
    let longest = tables.queues.get(number as usize).map_or(0, |queue| 1u64 << queue.log_message.min(31));
    let (range, written) = match work {
        Work::Write { from, bytes, .. } => (Some((from, bytes)), false),
        Work::Read { to, bytes, .. } => (Some((to, bytes)), true),
        Work::FetchAdd { old, .. } if old.bytes == 8 => (Some((old, 8)), true),
        Work::FetchAdd { .. } => return Err(local(Syndrome::LocalLength)),
        _ => (None, false),
    };
    let Some((range, bytes)) = range else { return Ok(()) };
    if bytes > longest {
        return Err(local(Syndrome::LocalLength));
    }
    local_range(tables, number, range, bytes, written).map(|_| ()).map_err(local)
}

/// Executes a request as the peer's NIC does.
pub(super) fn carry_out(
    tables: &Tables<'_>,
    number: u32,
    work: Work,
    mistake: Mistake,
    held: &mut Held<'_>,
    memory: &mut impl Memory,
) -> Result<Answer, Refusal> {
    match work {
        Work::Write { to, from, bytes } => {
            let (to, relaxed, peer) = remote_range(tables, number, to, bytes, |rights| rights.remote_write)?;
            // The range was valid when the request was checked.
            let from = local_range(tables, number, from, bytes, false)
                .map_err(|syndrome| Refusal { syndrome, peer_breaks: false })?;
            held.release_range(memory, from, bytes);
            if mistake != Mistake::LoseWrites || bytes <= 8 {
                land(memory, held, (to, relaxed, peer), Source::Memory(from), bytes);
            }
            Ok(Answer::Acknowledged)
        }
        Work::WriteInline { to, bytes, words } => {
            let bytes = u64::from(bytes);
            let place = remote_range(tables, number, to, bytes, |rights| rights.remote_write)?;
            land(memory, held, place, Source::Inline(words), bytes);
            Ok(Answer::Acknowledged)
        }
        Work::Read { from, to, bytes } => {
            remote_range(tables, number, from, bytes, |rights| rights.remote_read)?;
            Ok(Answer::Data { from, to, bytes })
        }
        Work::FetchAdd { word, amount, old } => {
            let right = |rights: Rights| rights.remote_atomic;
            let (place, relaxed, peer) = remote_range(tables, number, word, 8, right)?;
            if !place.is_multiple_of(8) || !word.address.is_multiple_of(8) {
                return Err(Refusal { syndrome: Syndrome::RemoteInvalidRequest, peer_breaks: true });
            }
            if !relaxed && mistake != Mistake::RelaxAll {
                held.release_of(memory, Reason::Write(peer));
            }
            let amount = if mistake == Mistake::AddTwice { amount.wrapping_mul(2) } else { amount };
            held.release_range(memory, place, 8);
            // Payload that is in place becomes visible before the word changes.
            memory.fence_release();
            Ok(Answer::Old { to: old, value: memory.fetch_add(place, amount) })
        }
        Work::Nop | Work::Wait { .. } | Work::Dump { .. } => Ok(Answer::Acknowledged),
    }
}

/// Writes to the peer's memory, or holds the write back.
fn land(
    memory: &mut impl Memory,
    held: &mut Held<'_>,
    (to, relaxed, peer): (u64, bool, u32),
    from: Source,
    bytes: u64,
) {
    if relaxed {
        return held.hold(memory, Reason::Write(peer), to, from, bytes);
    }
    held.release_of(memory, Reason::Write(peer));
    held.release_range(memory, to, bytes);
    memory.fence_release();
    from.copy(memory, to, bytes);
}

/// Processes an answer.
pub(super) fn answered(
    number: u32,
    answer: Answer,
    tables: &Tables<'_>,
    held: &mut Held<'_>,
    memory: &mut impl Memory,
) -> Stage {
    // A range that existed when the request was made may be gone by now.
    let access = |to, bytes| {
        local_range(tables, number, to, bytes, true)
            .map_err(|_| Stage::Failed { syndrome: Syndrome::LocalAccess, vendor: 0 })
    };
    match answer {
        Answer::Acknowledged => Stage::Done { bytes: 0 },
        Answer::Refused { syndrome, vendor } => Stage::Failed { syndrome, vendor },
        Answer::Data { from, to, bytes } => {
            let source = match remote_range(tables, number, from, bytes, |rights| rights.remote_read) {
                Ok((source, ..)) => source,
                Err(refusal) => return Stage::Failed { syndrome: refusal.syndrome, vendor: 0 },
            };
            let to = match access(to, bytes) {
                Ok(to) => to,
                Err(failed) => return failed,
            };
            held.release_range(memory, source, bytes);
            held.hold(memory, Reason::Read(number), to, Source::Memory(source), bytes);
            Stage::Done { bytes: bytes as u32 }
        }
        Answer::Old { to, value } => match access(to, 8) {
            Ok(to) => {
                memory.store_words(to, [value as u32, (value >> 32) as u32, 0, 0, 0, 0, 0], 8);
                Stage::Done { bytes: 8 }
            }
            Err(failed) => failed,
        },
    }
}
