// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite notices mistakes: for each that gin can be told to make, some case must fail, and for the right
//! reason. A run that only gets no further proves little, so that does not count.
//!
//! One trial for each mistake, which prints the cases that caught it.

use gin_conformance::cases;
use gin_conformance::host::{Mistake, Net, Setup, judge};
use gin_conformance::scenario::{NO_END, WRONG_BYTES, WRONG_VALUE};
use gin_host::proxy::Sabotage;
use libtest_mimic::{Arguments, Failed, Trial};

/// A mistake, how it must show, and (parts of) the names of cases that are there to catch it.
struct Saboteur {
    name: &'static str,
    mistake: Mistake,
    sign: &'static str,
    catchers: &'static [&'static str],
}

fn saboteurs() -> Vec<Saboteur> {
    let mut list = vec![Saboteur {
        name: "kernels_that_reset_signals_by_storing_0",
        mistake: Mistake::ResetByStore,
        sign: WRONG_VALUE,
        catchers: &["an_engine_may_keep_the_sum_of_its_raises_itself_across_resets"],
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
            Sabotage::FlushEarly => (
                "a_flush_that_ends_early",
                WRONG_BYTES,
                &["a_source_may_change_after_a_flush", "a_get_of_every_size_is_visible", "a_token_waits_for"],
            ),
            Sabotage::CountBeforeSource => (
                "a_counter_before_the_source_is_read",
                WRONG_BYTES,
                &["a_source_may_change_after_its_counter", "counters_count_finished_reads_only"],
            ),
            Sabotage::ResetByStore => {
                ("a_proxy_that_stores_0_after_a_reset", WRONG_VALUE, &["a_raise_after_a_reset_counts"])
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

/// What the cases said.
#[derive(Default)]
struct Tally {
    right: Vec<String>,
    stuck: usize,
    other: usize,
}

impl Saboteur {
    fn prove(&self) -> Result<(), Failed> {
        let mut tally = Tally::default();
        let mut runs = 0;
        for (seed, net) in [(1, Net::Plain), (2, Net::Delay { ns: 20_000 })] {
            // A run that hangs is told of soon; without a mistake none comes near this.
            let setup = Setup { mistake: self.mistake, net, stall_steps: 2_000_000, ..Setup::seeded(seed) };
            for case in cases::all() {
                runs += 1;
                match judge(&case, &setup) {
                    Ok(()) => {}
                    Err(text) if text.contains(self.sign) => tally.right.push(case.name.clone()),
                    Err(text) if text.contains(NO_END) => tally.stuck += 1,
                    Err(_) => tally.other += 1,
                }
            }
        }
        let caught = tally.right.len();
        tally.right.sort();
        tally.right.dedup();
        let missed: Vec<_> =
            self.catchers.iter().filter(|part| !tally.right.iter().any(|name| name.contains(**part))).collect();
        println!(
            "{}: {caught} of {runs} runs fail with {}, {} get no further, {} fail otherwise; caught by {}{}",
            self.name,
            self.sign,
            tally.stuck,
            tally.other,
            tally.right.iter().take(6).map(String::as_str).collect::<Vec<_>>().join(", "),
            if tally.right.len() > 6 { ", ..." } else { "" },
        );
        if caught == 0 {
            return Err(format!("no case fails with {}", self.sign).into());
        }
        if missed.is_empty() { Ok(()) } else { Err(format!("these cases should have caught it: {missed:?}").into()) }
    }
}

fn main() {
    let mut trials: Vec<Trial> = saboteurs()
        .into_iter()
        .map(|saboteur| Trial::test(format!("the_suite_notices/{}", saboteur.name), move || saboteur.prove()))
        .collect();
    trials.push(Trial::test("without_a_mistake_the_same_runs_find_nothing", || {
        for (seed, net) in [(1, Net::Plain), (2, Net::Delay { ns: 20_000 })] {
            let setup = Setup { net, stall_steps: 2_000_000, ..Setup::seeded(seed) };
            for case in cases::all() {
                judge(&case, &setup).map_err(|error| format!("{}: {error}", case.name))?;
            }
        }
        Ok(())
    }));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
