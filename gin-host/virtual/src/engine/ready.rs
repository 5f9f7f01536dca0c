// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tasks that can run, and the schedules that choose among them.

use std::collections::VecDeque;

use oorandom::Rand32;

use super::TaskKey;
use crate::config::Schedule;

/// Largest number of choices for which one thread is passed over, or one warp preferred.
const EPOCH_CHOICES: u32 = 4096;
/// Longest virtual time for which one thread is passed over.
const EPOCH_NS: u64 = 200_000;
/// One in this many choices begins a new epoch.
const EPOCH_CHANCE: u32 = 64;
/// Number of accesses of one turn under round robin.
const ROUND_ROBIN_SLICE: u32 = 8;

/// A task that can run. `warp` is 0 for hosts and services, else unique to the warp.
#[derive(Clone, Copy)]
pub(super) struct ReadyTask {
    pub(super) key: TaskKey,
    pub(super) warp: u64,
}

struct Held {
    entry: ReadyTask,
    until_ns: u64,
}

/// The set of tasks that can run.
pub(super) struct Ready {
    schedule: Schedule,
    rng: Rand32,
    quantum: Option<u32>,
    /// Tasks under round robin.
    queue: VecDeque<ReadyTask>,
    /// Tasks under all other schedules.
    bag: Vec<ReadyTask>,
    /// Tasks of the preferred warp.
    ahead: VecDeque<ReadyTask>,
    preferred: u64,
    /// Number of choices left in the epoch.
    left: u32,
    victim: TaskKey,
    held: Option<Held>,
}

impl Ready {
    /// Creates an empty set. `quantum` fixes the length of a turn.
    pub(super) fn new(schedule: Schedule, mut rng: Rand32, quantum: Option<u32>) -> Self {
        let schedule = match schedule {
            Schedule::Mixed => Schedule::PLAIN[rng.rand_range(0..4) as usize],
            plain => plain,
        };
        Ready {
            schedule,
            rng,
            quantum,
            queue: VecDeque::new(),
            bag: Vec::new(),
            ahead: VecDeque::new(),
            preferred: 0,
            left: 0,
            victim: TaskKey::NONE,
            held: None,
        }
    }

    pub(super) fn rng(&mut self) -> &mut Rand32 {
        &mut self.rng
    }

    pub(super) fn push(&mut self, entry: ReadyTask, now: u64) {
        if self.schedule == Schedule::RoundRobin {
            self.queue.push_back(entry);
        } else if entry.key == self.victim && self.left > 0 {
            self.held = Some(Held { entry, until_ns: now + EPOCH_NS });
        } else if entry.warp != 0 && entry.warp == self.preferred {
            self.ahead.push_back(entry);
        } else {
            self.bag.push(entry);
        }
    }

    /// Returns the task that runs next. `idle_until` is the time at which the next sleeper wakes. A task that is held
    /// back runs if the clock would otherwise have to pass the end of its epoch.
    pub(super) fn pop(&mut self, now: u64, idle_until: Option<u64>) -> Option<ReadyTask> {
        match self.schedule {
            Schedule::RoundRobin => self.queue.pop_front(),
            Schedule::Starve => self.pop_starve(now, idle_until),
            Schedule::WarpAhead => self.pop_ahead(),
            Schedule::Random | Schedule::Mixed => self.draw(),
        }
    }

    fn draw(&mut self) -> Option<ReadyTask> {
        let len = self.bag.len() as u32;
        (len > 0).then(|| {
            let at = self.rng.rand_range(0..len) as usize;
            self.bag.swap_remove(at)
        })
    }

    fn pop_starve(&mut self, now: u64, idle_until: Option<u64>) -> Option<ReadyTask> {
        self.left = self.left.saturating_sub(1);
        if let Some(held) = &self.held {
            let nobody_else = self.bag.is_empty() && idle_until.is_none_or(|wake| wake > held.until_ns);
            if self.left == 0 || now >= held.until_ns || nobody_else {
                self.victim = TaskKey::NONE;
                self.left = 0;
                return self.held.take().map(|held| held.entry);
            }
        }
        let entry = self.draw()?;
        if self.left == 0 && entry.warp != 0 && self.rng.rand_range(0..EPOCH_CHANCE) == 0 {
            self.victim = entry.key;
            self.left = EPOCH_CHOICES;
            self.held = Some(Held { entry, until_ns: now + EPOCH_NS });
            return self.pop_starve(now, idle_until);
        }
        Some(entry)
    }

    fn pop_ahead(&mut self) -> Option<ReadyTask> {
        if self.left > 0 {
            self.left -= 1;
            if let Some(entry) = self.ahead.pop_front() {
                return Some(entry);
            }
        } else if self.preferred != 0 {
            self.preferred = 0;
            self.bag.extend(self.ahead.drain(..));
        }
        let entry = self.draw()?;
        if self.left == 0 && entry.warp != 0 && self.rng.rand_range(0..EPOCH_CHANCE) == 0 {
            self.preferred = entry.warp;
            self.left = EPOCH_CHOICES;
        }
        Some(entry)
    }

    /// Returns the number of switch points that the chosen task may pass before the next choice.
    pub(super) fn slice(&mut self) -> u32 {
        if let Some(quantum) = self.quantum {
            return quantum;
        }
        if self.schedule == Schedule::RoundRobin {
            return ROUND_ROBIN_SLICE;
        }
        let draw = self.rng.rand_u32();
        let length = draw >> 8;
        match draw & 3 {
            0 => 0,
            1 => length & 3,
            2 => length & 15,
            _ => length & 127,
        }
    }

    /// Returns the length of a nap for which a task asked for `ns`.
    pub(super) fn nap(&mut self, ns: u64) -> u64 {
        if self.schedule == Schedule::RoundRobin || self.quantum.is_some() {
            return ns;
        }
        let spread = u32::try_from(ns / 2).unwrap_or(u32::MAX - 1);
        ns + u64::from(self.rng.rand_range(0..spread + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREADS: u32 = 64;

    fn entry(id: u32) -> ReadyTask {
        ReadyTask { key: TaskKey { id, generation: 1 }, warp: 100 + u64::from(id / 32) }
    }

    fn ready(schedule: Schedule, seed: u64) -> Ready {
        let mut ready = Ready::new(schedule, Rand32::new(seed), None);
        (0..THREADS).for_each(|id| ready.push(entry(id), 0));
        ready
    }

    /// Lets 64 threads of two warps run for `choices` choices. Passes the number of times each was chosen to `look`,
    /// choice by choice.
    fn play(schedule: Schedule, seed: u64, choices: u64, mut look: impl FnMut(&[u64; THREADS as usize])) {
        let mut ready = ready(schedule, seed);
        let mut counts = [0; THREADS as usize];
        for now in 0..choices {
            let chosen = ready.pop(now, None).expect("a task can always run");
            counts[chosen.key.id as usize] += 1;
            ready.push(chosen, now);
            look(&counts);
        }
    }

    #[test]
    fn every_ready_coroutine_is_chosen_exactly_once_under_every_policy() {
        for schedule in Schedule::PLAIN {
            for seed in 0..20 {
                let mut ready = ready(schedule, seed);
                let mut seen: Vec<u32> = std::iter::from_fn(|| ready.pop(0, None)).map(|entry| entry.key.id).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..THREADS).collect::<Vec<_>>(), "{schedule:?}, seed {seed}");
            }
        }
    }

    #[test]
    fn round_robin_chooses_everyone_in_turn() {
        play(Schedule::RoundRobin, 1, 1000, |counts| {
            assert!(counts.iter().max() <= counts.iter().min().map(|least| least + 1).as_ref());
        });
    }

    #[test]
    fn starving_passes_one_thread_over_for_thousands_of_choices_and_then_lets_it_run() {
        let (mut longest, mut last) = (0, [(0, 0); THREADS as usize]);
        let mut now = 0;
        play(Schedule::Starve, 1, 100_000, |counts| {
            now += 1;
            for (count, last) in counts.iter().zip(&mut last) {
                if last.0 != *count {
                    longest = longest.max(now - last.1);
                    *last = (*count, now);
                }
            }
        });
        assert!((u64::from(EPOCH_CHOICES) / 2..u64::from(EPOCH_CHOICES) * 2).contains(&longest), "{longest}");
    }

    #[test]
    fn a_task_held_back_runs_when_the_clock_would_pass_the_end_of_its_epoch() {
        let mut ready = ready(Schedule::Starve, 3);
        while ready.held.is_none() {
            let chosen = ready.pop(0, None).expect("a task can always run");
            ready.push(chosen, 0);
        }
        while !ready.bag.is_empty() {
            ready.pop(0, Some(EPOCH_NS - 1));
        }
        assert!(ready.pop(0, Some(EPOCH_NS - 1)).is_none());
        assert!(ready.pop(0, Some(EPOCH_NS + 1)).is_some());
    }

    #[test]
    fn a_warp_ahead_is_chosen_thousands_of_times_more_than_the_other() {
        let mut ahead = 0;
        play(Schedule::WarpAhead, 1, 20_000, |counts| {
            let [first, second]: [u64; 2] = [counts[..32].iter().sum(), counts[32..].iter().sum()];
            ahead = ahead.max(first.abs_diff(second));
        });
        assert!(ahead > u64::from(EPOCH_CHOICES) / 2, "{ahead}");
    }
}
