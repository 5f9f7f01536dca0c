// SPDX-License-Identifier: MIT OR Apache-2.0
//! A discrete-event simulation of messages that pass through servers.
//!
//! A server (a posting thread, a proxy, a link, a NIC) serves one message at a time, in the order in which they arrive.
//! Messages that arrive at the same time are served in the order of their numbers. Times are whole picoseconds, so a
//! result does not depend on the order of additions.
//!
//! This is an own engine of a hundred lines: `nexosim` and other crates schedule concurrent models that exchange typed
//! messages over ports. Queues, their order at equal times, and busy times would be as much code on top of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A time in picoseconds.
pub(super) type Ps = u64;

/// A server that a message passes, and the way to the next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stage {
    pub(super) server: usize,
    /// The time for which the message holds the server.
    pub(super) hold: Ps,
    /// The time from this server to the next one, or to the end.
    pub(super) latency: Ps,
    /// The next server begins when the first byte arrives, not the last one.
    pub(super) cut_through: bool,
}

/// A message, or a step of a kernel.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Message {
    pub(super) stages: Vec<Stage>,
    /// The numbers of the messages that end before this one begins.
    pub(super) after: Vec<usize>,
}

/// The result of a simulation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Outcome {
    /// The time when each message ended.
    pub(super) ends: Vec<Ps>,
    /// The time for which each server was held.
    pub(super) busy: Vec<Ps>,
}

impl Outcome {
    /// Returns the time when the last message ended.
    pub(super) fn end(&self) -> Ps {
        self.ends.iter().copied().max().unwrap_or(0)
    }
}

/// The progress of a message.
#[derive(Clone, Copy, Default)]
struct State {
    /// The number of messages that it still waits for.
    waits: usize,
    /// The earliest time when its last byte can arrive.
    tail: Ps,
}

/// Simulates messages over `servers` servers. Messages wait only for messages of lower numbers.
pub(super) fn simulate(servers: usize, messages: &[Message]) -> Outcome {
    let mut outcome = Outcome { ends: vec![0; messages.len()], busy: vec![0; servers] };
    let (mut free, mut events) = (vec![0; servers], BinaryHeap::new());
    let mut states = vec![State::default(); messages.len()];
    let mut followers = vec![Vec::new(); messages.len()];
    for (number, message) in messages.iter().enumerate() {
        states[number].waits = message.after.len();
        message.after.iter().for_each(|&earlier| followers[earlier].push(number));
        if message.after.is_empty() {
            events.push(Reverse((0, number, 0)));
        }
    }
    while let Some(Reverse((now, number, stage))) = events.pop() {
        let state = &mut states[number];
        let Some(&Stage { server, hold, latency, cut_through }) = messages[number].stages.get(stage) else {
            let end = now.max(state.tail);
            outcome.ends[number] = end;
            for &follower in &followers[number] {
                let waiting = &mut states[follower];
                (waiting.waits, waiting.tail) = (waiting.waits - 1, waiting.tail.max(end));
                if waiting.waits == 0 {
                    events.push(Reverse((waiting.tail, follower, 0)));
                }
            }
            continue;
        };
        let start = free[server].max(now);
        // The last byte leaves a server when the message has been served, and has arrived.
        let done = (start + hold).max(state.tail);
        (free[server], state.tail) = (done, done + latency);
        outcome.busy[server] += hold;
        let next = if cut_through { start } else { done } + latency;
        events.push(Reverse((next, number, stage + 1)));
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(server: usize, hold: Ps, latency: Ps) -> Stage {
        Stage { server, hold, latency, cut_through: false }
    }

    fn cut(server: usize, hold: Ps, latency: Ps) -> Stage {
        Stage { cut_through: true, ..stage(server, hold, latency) }
    }

    fn message(stages: &[Stage]) -> Message {
        Message { stages: stages.to_vec(), after: Vec::new() }
    }

    #[test]
    fn one_message_takes_its_latencies_and_once_the_time_of_the_slowest_link() {
        // Two links of equal rate: latency + size / rate, not twice.
        assert_eq!(simulate(2, &[message(&[cut(0, 1000, 70), cut(1, 1000, 0)])]).end(), 1070);
        // The second link is slower, or faster.
        assert_eq!(simulate(2, &[message(&[cut(0, 1000, 70), cut(1, 3000, 0)])]).end(), 3070);
        assert_eq!(simulate(2, &[message(&[cut(0, 1000, 70), cut(1, 10, 0)])]).end(), 1070);
        // A CPU thread passes a message on when it has finished with it.
        assert_eq!(simulate(2, &[message(&[stage(0, 1000, 70), stage(1, 3000, 5)])]).end(), 4075);
    }

    #[test]
    fn a_saturated_server_ends_after_the_sum_of_its_work() {
        // Faster servers before and after it add the work of one message each.
        let all: Vec<_> = (0..1000).map(|_| message(&[stage(0, 10, 3), stage(1, 100, 7), stage(2, 20, 0)])).collect();
        let outcome = simulate(3, &all);
        assert_eq!(outcome.end(), 10 + 3 + 1000 * 100 + 7 + 20);
        assert_eq!(outcome.busy, [1000 * 10, 1000 * 100, 1000 * 20]);
        assert!(outcome.ends.is_sorted());
    }

    #[test]
    fn every_message_ends_once_and_each_server_is_held_for_the_work_that_came_to_it() {
        let mut random = oorandom::Rand32::new(5);
        for _ in 0..200 {
            let servers = random.rand_range(1..6) as usize;
            let mut messages: Vec<Message> = Vec::new();
            for number in 0..random.rand_range(1..60) as usize {
                let stages = (0..random.rand_range(0..5)).map(|_| Stage {
                    server: random.rand_range(0..servers as u32) as usize,
                    hold: random.rand_range(0..50).into(),
                    latency: random.rand_range(0..50).into(),
                    cut_through: false,
                });
                let stages = stages.collect();
                let after = (0..number).filter(|_| random.rand_range(0..10) == 0).collect();
                messages.push(Message { stages, after });
            }
            let outcome = simulate(servers, &messages);
            let mut work = vec![0; servers];
            for (message, end) in messages.iter().zip(&outcome.ends) {
                let alone: Ps = message.stages.iter().map(|stage| stage.hold + stage.latency).sum();
                let begin = message.after.iter().map(|&earlier| outcome.ends[earlier]).max().unwrap_or(0);
                assert!(*end >= begin + alone, "{message:?} ended at {end}");
                message.stages.iter().for_each(|stage| work[stage.server] += stage.hold);
            }
            assert_eq!(outcome.busy, work);
            assert!(outcome.end() >= work.into_iter().max().unwrap());
            // The same messages give the same result.
            assert_eq!(simulate(servers, &messages), outcome);
        }
    }

    #[test]
    fn a_message_begins_when_all_messages_before_it_have_ended() {
        let mut messages = vec![message(&[stage(0, 10, 0)]), message(&[stage(1, 50, 0)]), message(&[stage(0, 1, 0)])];
        messages[2].after = vec![0, 1];
        assert_eq!(simulate(2, &messages).ends, [10, 50, 51]);
    }
}
