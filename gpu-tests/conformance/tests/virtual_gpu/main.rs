// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite on the virtual GPU, with one trial for each case and way to run it.
//!
//! `GIN_SEED=n` uses that seed in all seeded ways. `GIN_SEEDS=m` uses `m` consecutive seeds. With `GIN_ALL_WAYS` set,
//! every schedule is combined with every network, and there are more ways with threads. `GIN_ROTATION=n` runs a third
//! ([`in_rotation`]). A trial that fails prints the command that repeats it.

mod residency;

use gin_conformance::cases::{self, Case};
use gin_conformance::host::{Carrier, Net, Setup, SetupBackend, SetupRoute, SetupWindows};
use gin_nic::DoorbellRelease;
use gin_testkit::{in_rotation, number_from_env};
use gin_virtual::Schedule;
use libtest_mimic::{Arguments, Failed, Trial};

/// A way to run all cases, and its name.
type Way = (String, Setup);

/// Combinations of schedules, networks and clocks, in which each occurs a few times.
fn ways() -> Vec<Way> {
    let mut ways = Vec::new();
    let schedules = [
        ("round_robin", Schedule::RoundRobin),
        ("random", Schedule::Random),
        ("starve", Schedule::Starve),
        ("warp_ahead", Schedule::WarpAhead),
    ];
    let networks = [
        ("plain", Net::Plain),
        ("delay", Net::Delay { ns: 10_000 }),
        ("reorder", Net::Reorder),
        ("withhold", Net::Withhold),
        ("worst", Net::Worst),
    ];
    let mut seed = 0;
    let all = std::env::var_os("GIN_ALL_WAYS").is_some();
    for (row, (schedule_name, schedule)) in schedules.into_iter().enumerate() {
        for (column, (name, net)) in networks.into_iter().enumerate() {
            seed += 1;
            // Two networks with each schedule, and one or two schedules with each network.
            if !all && ![0, 3].contains(&((row + column) % networks.len())) {
                continue;
            }
            // Some of them use the fewest resident blocks, and kernels with one back end compiled in.
            let (resident_blocks, named_backend) = ((seed % 3 == 0).then_some(1), seed % 2 == 0);
            let windows = if seed % 4 < 2 { SetupWindows::Allocated } else { SetupWindows::Registered };
            let setup = Setup { schedule, net, resident_blocks, named_backend, windows, ..Setup::seeded(seed) };
            ways.push((format!("{schedule_name}_{name}"), setup));
        }
    }
    for (name, schedule, net, route) in [
        ("random_staged", Schedule::Random, Net::Staged, SetupRoute::Network),
        ("random_plain_auto", Schedule::Random, Net::Plain, SetupRoute::Auto),
        ("random_plain_lsa", Schedule::Random, Net::Plain, SetupRoute::Lsa),
        ("starve_worst_auto", Schedule::Starve, Net::Worst, SetupRoute::Auto),
        ("warp_ahead_delay_lsa", Schedule::WarpAhead, Net::Delay { ns: 10_000 }, SetupRoute::Lsa),
    ] {
        seed += 1;
        // Both kinds of window with each route.
        let windows = if net == Net::Plain { SetupWindows::Allocated } else { SetupWindows::Registered };
        ways.push((name.to_owned(), Setup { schedule, net, route, windows, ..Setup::seeded(seed) }));
    }
    for (name, schedule, net, route) in [
        ("late_random_plain", Schedule::Random, Net::Plain, SetupRoute::Network),
        ("late_starve_plain_auto", Schedule::Starve, Net::Plain, SetupRoute::Auto),
        ("late_warp_ahead_worst", Schedule::WarpAhead, Net::Worst, SetupRoute::Network),
    ] {
        seed += 1;
        ways.push((name.to_owned(), Setup { schedule, net, route, carrier: Carrier::late(), ..Setup::seeded(seed) }));
    }
    for (name, schedule, net, route) in [
        ("gdaki_round_robin_plain", Schedule::RoundRobin, Net::Plain, SetupRoute::Network),
        ("gdaki_warp_ahead_worst", Schedule::WarpAhead, Net::Worst, SetupRoute::Network),
        ("gdaki_starve_delay", Schedule::Starve, Net::Delay { ns: 10_000 }, SetupRoute::Network),
        ("gdaki_random_plain_auto", Schedule::Random, Net::Plain, SetupRoute::Auto),
        ("gdaki_random_reorder_lsa", Schedule::Random, Net::Reorder, SetupRoute::Lsa),
    ] {
        seed += 1;
        let named_backend = seed % 2 == 0;
        let windows = if net == Net::Plain { SetupWindows::Allocated } else { SetupWindows::Registered };
        let backend = SetupBackend::Gdaki;
        let release = if net == Net::Reorder { DoorbellRelease::Gpu } else { DoorbellRelease::System };
        ways.push((
            name.to_owned(),
            Setup { schedule, net, backend, release, route, windows, named_backend, ..Setup::seeded(seed) },
        ));
    }
    for (name, net, release) in [
        ("gdaki_threads_worst", Net::Worst, DoorbellRelease::Gpu),
        ("gdaki_threads_plain", Net::Plain, DoorbellRelease::System),
    ]
    .into_iter()
    .take(if all { 2 } else { 1 })
    {
        ways.push((name.to_owned(), Setup { net, backend: SetupBackend::Gdaki, release, ..Setup::threads() }));
    }
    ways.push(("threads_plain_auto".to_owned(), Setup { route: SetupRoute::Auto, ..Setup::threads() }));
    // Ways with threads take the most time.
    if all {
        ways.push(("late_threads_plain".to_owned(), Setup { carrier: Carrier::late(), ..Setup::threads() }));
    }
    for (name, net) in networks.into_iter().filter(|(_, net)| all || matches!(net, Net::Plain | Net::Worst)) {
        ways.push((format!("threads_{name}"), Setup { net, named_backend: name == "worst", ..Setup::threads() }));
    }
    ways
}

/// Runs a case with `seeds` consecutive seeds from the setup's on, or once if the setup has no seed.
fn judge_seeds(case: &Case, setup: &Setup, name: &str, seeds: u64) -> Result<(), Failed> {
    let repeat =
        |variable: &str| format!("{variable}cargo test -p gin-conformance --test virtual_gpu -- --exact {name}");
    let Some(first) = setup.seed else {
        return Ok(case.judge(&Setup { repeat: Some(repeat("")), ..setup.clone() })?);
    };
    // Many runs that hang would take hours. A run that does not hang stays far below this.
    let stall_steps = if seeds > 1 { 2_000_000 } else { setup.stall_steps };
    let mut failures = Vec::new();
    for seed in (0..seeds).map(|number| first.wrapping_add(number)) {
        let repeat = Some(repeat(&format!("GIN_SEED={seed} ")));
        if let Err(text) = case.judge(&Setup { seed: Some(seed), stall_steps, repeat, ..setup.clone() }) {
            failures.push((seed, text));
        }
    }
    let Some((_, text)) = failures.first() else { return Ok(()) };
    if seeds == 1 {
        return Err(text.into());
    }
    let list = failures.iter().map(|(seed, text)| format!("\n  {seed}: {}", text.lines().next().unwrap_or_default()));
    Err(format!("{} of {seeds} seeds fail:{}\nthe first failure: {text}", failures.len(), list.collect::<String>())
        .into())
}

fn main() {
    let (seed, seeds) = (number_from_env("GIN_SEED"), number_from_env("GIN_SEEDS").unwrap_or(1));
    let mut trials = residency::trials();
    for (index, (way, mut setup)) in ways().into_iter().enumerate() {
        if setup.seed.is_some() && seed.is_some() {
            setup.seed = seed;
        }
        for (number, case) in cases::for_setup(setup.backend, setup.route).into_iter().enumerate() {
            if !in_rotation(index, number) {
                continue;
            }
            let (name, setup) = (format!("virtual/{way}/{}", case.name), setup.clone());
            trials.push(Trial::test(name.clone(), move || judge_seeds(&case, &setup, &name, seeds)));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
