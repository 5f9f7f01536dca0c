// SPDX-License-Identifier: MIT OR Apache-2.0
//! Grids of more blocks than fit on the device at a time.

use gin_conformance::host::Setup;
use gin_conformance::op::Op;
use gin_conformance::scenario::{CoopKind, NO_END, Scenario};
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    let seeded = || Setup::seeded(1);
    vec![
        Trial::test("virtual/a_grid_that_does_not_fit_is_refused_with_the_figures", move || refused(&seeded())),
        Trial::test("virtual/blocks_that_wait_for_blocks_that_never_start_are_named", move || named(&seeded())),
        Trial::test("virtual/blocks_that_wait_for_nobody_run_one_after_the_other", move || in_turn(&seeded())),
    ]
}

/// Returns a grid of five blocks in which block 0 waits for a signal that block 4 raises.
fn chain() -> Scenario {
    let mut scenario = Scenario::new(1).coop(CoopKind::Warp).shape(5, 32);
    for block in 0..5 {
        let program = if block == 4 { vec![Op::raise(0, 0)] } else { vec![Op::wait_signal(0, 1)] };
        scenario = scenario.on_group(0, block, program);
    }
    scenario
}

fn says(text: &str, parts: &[&str]) -> Result<(), Failed> {
    match parts.iter().find(|part| !text.contains(**part)) {
        None => Ok(()),
        Some(part) => Err(format!("expected `{part}` in: {text}").into()),
    }
}

fn refused(setup: &Setup) -> Result<(), Failed> {
    setup.run_resident(&chain(), 5)?.check_ok(&chain())?;
    match setup.run_resident(&chain(), 4) {
        Err(text) => says(&text, &["cooperative", "5 blocks", "4 of this shape"]),
        Ok(_) => Err("five blocks ran where only four fit".into()),
    }
}

fn named(setup: &Setup) -> Result<(), Failed> {
    // No other rank works, so a small limit suffices.
    let setup = Setup { stall_steps: 200_000, ..setup.clone() };
    let scenario = Scenario { cooperative: false, ..chain() };
    match setup.run_resident(&scenario, 4) {
        Err(text) => says(
            &text,
            &[
                NO_END,
                "script_warp",
                "blocks 0 to 3",
                "pausing in a polling loop",
                "block 4 of 5 not started",
                "4 blocks are resident",
            ],
        ),
        Ok(_) => Err("a block that waited for a block that cannot start continued".into()),
    }
}

fn in_turn(setup: &Setup) -> Result<(), Failed> {
    let blocks = 7;
    let mut scenario = Scenario::new(2).coop(CoopKind::Block).shape(blocks, 64);
    scenario.cooperative = false;
    for block in 0..blocks {
        let place = 8 * u64::from(block);
        scenario =
            scenario.on_group(0, block, vec![Op::put_value(1, 8, place + 1).to(1, place).signal(0), Op::flush()]);
    }
    // Block 6 runs last.
    let scenario = scenario.on_group(1, blocks - 1, vec![Op::wait_signal(0, u64::from(blocks))]);
    for resident in [1, 3] {
        let outcome = setup.run_resident(&scenario, resident)?;
        outcome.check_ok(&scenario)?;
        let bytes: Vec<u8> = (0..u64::from(blocks)).flat_map(|block| (8 * block + 1).to_le_bytes()).collect();
        if outcome.windows[1][1][..bytes.len()] != bytes {
            return Err(format!("with {resident} resident blocks some raises are missing").into());
        }
    }
    Ok(())
}
