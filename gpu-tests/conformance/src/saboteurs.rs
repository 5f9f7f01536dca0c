// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mistakes that gin makes on purpose, and the cases that must notice them. The suite proves only what it would notice.

use crate::cases::{self, Case};
use crate::host::{Mistake, Setup};
use crate::scenario::{NO_END, WRONG_BYTES, WRONG_VALUE};
use gin_testkit::Sabotage;
use std::format;
use std::string::String;
use std::vec;
use std::vec::Vec;

/// A mistake, the sign by which it must show, and the cases that must catch it.
#[derive(Clone, Copy, Debug)]
pub struct Saboteur {
    /// Name of the mistake.
    pub name: &'static str,
    /// The mistake.
    pub mistake: Mistake,
    /// Text that a case must report to count as having noticed the mistake for the right reason.
    pub sign: &'static str,
    /// Parts of case names; one case of each part must notice the mistake.
    pub catchers: &'static [&'static str],
}

/// Returns all mistakes.
#[must_use]
pub fn all() -> Vec<Saboteur> {
    let mut list = vec![Saboteur {
        name: "kernels_that_reset_signals_by_storing_0",
        mistake: Mistake::ResetByStore,
        sign: WRONG_VALUE,
        catchers: &["an_engine_may_keep_the_sum_of_its_raises_itself_across_resets", "a_raise_after_a_reset_counts"],
    }];
    for sabotage in Sabotage::ALL {
        let (name, sign, catchers): (_, _, &[&str]) = match sabotage {
            Sabotage::None => continue,
            Sabotage::SignalBeforePayload => (
                "a_signal_before_its_payload",
                WRONG_BYTES,
                &["a_put_of_every_size_arrives_before_its_signal", "a_weak_signal_covers_its_own_put"],
            ),
            Sabotage::LosePut => (
                "a_lost_put",
                WRONG_BYTES,
                &["a_put_of_every_size_arrives_before_its_signal", "many_threads_put_to_one"],
            ),
            Sabotage::RaiseTwice => {
                ("a_signal_raised_twice", WRONG_VALUE, &["increments_and_additions", "raises_from_many_ranks"])
            }
            // One mistake ends both flushes and counters early; each has its own cases that must catch it.
            Sabotage::CompleteEarly => {
                list.push(Saboteur {
                    name: "a_flush_that_ends_early",
                    mistake: Mistake::Proxy(sabotage),
                    sign: WRONG_BYTES,
                    catchers: &[
                        "a_source_may_change_after_a_flush",
                        "a_get_of_every_size_is_visible",
                        "a_token_waits_for",
                        "puts_have_arrived_after_a_quiet",
                    ],
                });
                (
                    "a_counter_before_the_source_is_read",
                    WRONG_BYTES,
                    &["a_source_may_change_after_its_counter", "counters_count_finished_reads_only"],
                )
            }
            Sabotage::DropMakeVisible => (
                "payload_that_is_never_made_visible",
                WRONG_BYTES,
                &["a_strong_signal_covers_all_earlier_puts_on_a_network_that_withholds", "gets_and_flushes_hold"],
            ),
        };
        list.push(Saboteur { name, mistake: Mistake::Proxy(sabotage), sign, catchers });
    }
    list
}

/// Returns the mistakes of software NICs behind device-driven queue pairs.
#[must_use]
pub fn of_nics() -> Vec<Saboteur> {
    use gin_soft_nic::Mistake as Nic;
    let of = |mistake| -> (&'static str, &'static str, &'static [&'static str]) {
        match mistake {
            Nic::None => ("nothing", NO_END, &[]),
            Nic::IgnoreDumps => {
                ("reads_that_no_dump_brings_into_view", WRONG_BYTES, &["a_get_of_every_size_is_visible"])
            }
            Nic::RelaxAll => (
                "signals_that_overtake_what_they_cover",
                WRONG_BYTES,
                &[
                    "a_put_of_every_size_arrives_before_its_signal",
                    "a_strong_signal_covers_all_earlier_puts",
                    "puts_have_arrived_after_a_quiet",
                ],
            ),
            Nic::AddTwice => {
                ("atomics_that_add_twice", WRONG_VALUE, &["increments_and_additions", "raises_from_many_ranks"])
            }
            Nic::LoseWrites => {
                ("writes_that_never_land", WRONG_BYTES, &["a_put_of_every_size_arrives_before_its_signal"])
            }
        }
    };
    let saboteur = |mistake| {
        let (name, sign, catchers) = of(mistake);
        Saboteur { name, mistake: Mistake::Nic(mistake), sign, catchers }
    };
    Nic::ALL.into_iter().map(saboteur).collect()
}

/// Results of the cases that ran with a mistake.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    /// Names of the cases that noticed the mistake for the right reason.
    pub right: Vec<String>,
    /// Number of runs that made no progress.
    pub stuck: usize,
    /// Texts of the runs that failed for other reasons.
    pub other: Vec<String>,
    /// Number of all runs.
    pub runs: usize,
}

impl Saboteur {
    /// Runs a case with the mistake and counts its result.
    pub fn run(&self, case: &Case, setup: &Setup, tally: &mut Tally) {
        tally.runs += 1;
        match case.judge(&Setup { mistake: self.mistake, ..setup.clone() }) {
            Ok(()) => {}
            Err(text) if text.contains(self.sign) => tally.right.push(case.name.clone()),
            Err(text) if text.contains(NO_END) => tally.stuck += 1,
            Err(text) => tally.other.push(format!("{}: {text}", case.name)),
        }
    }

    /// Summarizes the runs.
    ///
    /// # Errors
    /// Returns an error if a case that must notice the mistake did not.
    pub fn verdict(&self, mut tally: Tally) -> Result<String, String> {
        let caught = tally.right.len();
        tally.right.sort();
        tally.right.dedup();
        let first: Vec<&str> = tally.right.iter().take(6).map(String::as_str).collect();
        let text = format!(
            "{}: {caught} of {} runs fail with {}, {} make no progress, {} fail otherwise; caught by {}{}",
            self.name,
            tally.runs,
            self.sign,
            tally.stuck,
            tally.other.len(),
            first.join(", "),
            if tally.right.len() > first.len() { ", ..." } else { "" },
        );
        let unnoticed = |part: &&&str| !tally.right.iter().any(|name| name.contains(**part));
        let missed: Vec<&&str> = self.catchers.iter().filter(unnoticed).collect();
        if missed.is_empty() { Ok(text) } else { Err(format!("{text}; these cases should have caught it: {missed:?}")) }
    }

    /// Returns all cases that must catch the mistake.
    #[must_use]
    pub fn cases(&self) -> Vec<Case> {
        let concerns = |case: &Case| self.catchers.iter().any(|part| case.name.contains(part));
        cases::every().into_iter().filter(concerns).collect()
    }
}
