// SPDX-License-Identifier: MIT OR Apache-2.0
//! Trials of products that send and receive while they multiply, against their oracle.

use crate::testbed::{DEADLINE, Testbed, Trial};
use gin_ep::{EpError, GroupConfig, Instructions, MatmulConfig, Scales};
use gin_ep_oracle::{Routing, Shape};
use gin_gpu::ModuleSource;
use gin_host::comm::{CommError, Communicator, Requirements};
use gin_host::world::{Rank, launch};
use support::{Arriving, Case, compare, experts};

#[expect(unreachable_pub, reason = "the tests of gin-ep include it too")]
#[path = "../../gin-ep/tests/support/matmul.rs"]
mod support;

/// The trials of this module, which run on any devices. Ranks form one LSA team.
pub const TRIALS: [Trial; 9] = [
    ("rows_that_are_gathered_meanwhile_have_the_products_of_the_oracle", |testbed| products(testbed, false)),
    ("products_that_are_scattered_meanwhile_have_the_sums_of_the_oracle", |testbed| products(testbed, true)),
    ("one_block_is_enough_to_multiply_send_and_receive", one_block),
    ("large_products_have_the_bits_of_the_oracle", large),
    ("products_of_experts_return_with_the_bits_of_the_oracle", returned),
    ("rows_are_multiplied_as_they_arrive_with_the_bits_of_the_oracle", arriving),
    ("products_of_e4m3_have_the_bits_of_the_oracle", scaled),
    ("products_of_experts_of_e4m3_return_with_the_bits_of_the_oracle", returned_scaled),
    ("rows_of_e4m3_are_multiplied_as_they_arrive_with_the_bits_of_the_oracle", arriving_scaled),
];

/// The instructions of the kernels. GPUs without `wgmma` multiply by the same kernels twice.
const FORMS: [Instructions; 2] = [Instructions::Warpgroups, Instructions::Warps];

/// Runs `test` on `ranks` ranks.
fn with(
    testbed: &Testbed,
    ranks: u32,
    test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync,
) -> Result<(), String> {
    let mut world = testbed.config();
    world.ranks = ranks;
    world.comm.lsa_size = None;
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        test(&rank, &comm)?;
        let fault = crate::testbed::fault(&rank, &comm);
        assert_eq!(fault, None);
        comm.destroy().map_err(|error: CommError| error.into())
    });
    outcome.map(drop).map_err(|error| error.to_string())
}

/// Runs products of these sizes, by as many blocks as the GPU has room for if `blocks` is `None`.
fn run(testbed: &Testbed, ranks: u32, blocks: Option<u32>, case: &Case) -> Result<(), String> {
    let (rows, columns, depth) = case.sizes;
    let config = MatmulConfig::new(rows as u32, columns as u32, depth as u32).deadline(DEADLINE);
    let config = blocks.map_or(config, |blocks| config.blocks(blocks));
    for instructions in FORMS {
        let config = config.instructions(instructions);
        with(testbed, ranks, |rank, comm| compare(rank, comm, &config, case))?;
    }
    Ok(())
}

fn products(testbed: &Testbed, scatters: bool) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let blocks = if is_real { None } else { Some(2) };
    for (ranks, sizes) in [(1, (129, 264, 72)), (2, (37, 16, 200)), (3, (1, 8, 8)), (4, (5, 24, 64))] {
        run(testbed, ranks, blocks, &Case { scatters, sizes, runs: 2, every: 1 })?;
    }
    if is_real {
        for ranks in [1, 2, 4] {
            run(testbed, ranks, None, &Case { scatters, sizes: (333, 520, 1000), runs: 6, every: 5 })?;
        }
    }
    Ok(())
}

fn one_block(testbed: &Testbed) -> Result<(), String> {
    for scatters in [false, true] {
        run(testbed, 2, Some(1), &Case { scatters, sizes: (130, 16, 72), runs: 2, every: 3 })?;
    }
    Ok(())
}

/// Products with several waves of blocks, many times, so that ranks run ahead of each other.
fn large(testbed: &Testbed) -> Result<(), String> {
    if testbed.devices.is_none() {
        return run(testbed, 2, Some(3), &Case { scatters: false, sizes: (140, 264, 64), runs: 1, every: 20 });
    }
    for scatters in [false, true] {
        run(testbed, 2, None, &Case { scatters, sizes: (2048, 2048, 1024), runs: 6, every: 511 })?;
    }
    Ok(())
}

fn returned(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let list = [(1, 3, 40, 20, 60), (2, 5, 24, 9, 54), (3, 4, 8, 6, 5)];
    let large = [(2, 16, 512, 300, 1800), (4, 70, 264, 100, 1200), (2, 8, 264, 64, 90)];
    for (ranks, experts_of_all, hidden, tokens, rows) in if is_real { large } else { list } {
        let shape = Shape { ranks: ranks as usize, experts: experts_of_all, topk: 3, hidden };
        let config = GroupConfig::new(experts_of_all as u32, hidden as u32, 3).tokens(tokens as u32).deadline(DEADLINE);
        let (config, blocks) = if is_real { (config, None) } else { (config.sms(2).threads(64), Some(2)) };
        for instructions in FORMS {
            with(testbed, ranks, |rank, comm| {
                experts(rank, comm, &config, &shape, tokens, (rows, blocks, instructions))
            })?;
        }
    }
    Ok(())
}

fn arriving(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let routings = [Routing::Uniform, Routing::Holes, Routing::One(1), Routing::None, Routing::Zipf, Routing::Repeats];
    let list = [(2, 4, 16, &[150, 20][..]), (3, 5, 8, &[9, 0, 30])];
    let large = [(1, 8, 264, &[700][..]), (2, 4, 520, &[400, 500]), (4, 70, 264, &[300, 0, 150]), (3, 5, 64, &[7])];
    for (ranks, experts_of_all, hidden, tokens) in if is_real { &large[..] } else { &list } {
        let shape = Shape { ranks: *ranks as usize, experts: *experts_of_all, topk: 3, hidden: *hidden };
        let max = tokens.iter().copied().max().unwrap_or(0) as u32;
        let config = GroupConfig::new(*experts_of_all as u32, *hidden as u32, 3).tokens(max).deadline(DEADLINE);
        let (config, blocks) = if is_real { (config, None) } else { (config.sms(2).threads(64), Some(2)) };
        // Real ranks run ahead of each other, and the last one is late.
        let (pairs, late) = if is_real { (20, Some((shape.ranks - 1, 1_000_000))) } else { (1, None) };
        for late in if is_real { vec![None, late] } else { vec![None] } {
            for instructions in FORMS {
                let case = Arriving { blocks, pairs, late, instructions, ..Arriving::of(tokens, &routings) };
                with(testbed, *ranks, |rank, comm| {
                    let taken = support::arriving(rank, comm, &config, &shape, &case)?;
                    println!("rank {} took {taken} tiles before all rows were there: {case:?}", rank.rank());
                    Ok(())
                })?;
            }
        }
    }
    Ok(())
}

/// Runs a test of products of E4M3. Other GPUs than H100 and H200 must refuse them.
fn with_e4m3(
    testbed: &Testbed,
    ranks: u32,
    test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync,
) -> Result<(), String> {
    with(testbed, ranks, |rank, comm| match test(rank, comm) {
        Err(EpError::Unsuited { what: "products of E4M3 on a GPU without `wgmma`", .. })
            if !rank.device().load(ModuleSource::Linked)?.names().contains(&"ep_matmul_e4m3_wgmma".to_owned()) =>
        {
            println!("rank {}: this GPU has no products of E4M3", rank.rank());
            Ok(())
        }
        outcome => outcome,
    })
}

fn scaled(testbed: &Testbed) -> Result<(), String> {
    let list = [((200, 264, 256), 1), ((3, 136, 384), 1)];
    let large = [((200, 264, 256), 1), ((2048, 2048, 1024), 511), ((1000, 520, 4096), 99)];
    for (sizes, every) in if testbed.devices.is_some() { &large[..] } else { &list } {
        let config = MatmulConfig::new(sizes.0 as u32, sizes.1 as u32, sizes.2 as u32).deadline(DEADLINE);
        let config = if testbed.devices.is_some() { config } else { config.blocks(2) };
        with_e4m3(testbed, 1, |rank, comm| support::compare_e4m3(rank, comm, &config, *sizes, *every))?;
    }
    Ok(())
}

// Scales are powers of two, so that the elements are whole numbers of few bits, and a GPU's sums are exact.
const SCALES: Scales = Scales::F32Powers;

fn returned_scaled(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let (list, large) = ([(1, 3, 128, 20, 60), (2, 4, 128, 6, 5)], [(2, 16, 512, 300, 1800), (4, 70, 384, 100, 1200)]);
    for (ranks, experts_of_all, hidden, tokens, rows) in if is_real { large } else { list } {
        let shape = Shape { ranks: ranks as usize, experts: experts_of_all, topk: 3, hidden };
        let config = GroupConfig::new(experts_of_all as u32, hidden as u32, 3).tokens(tokens as u32).deadline(DEADLINE);
        let (config, blocks) = if is_real { (config, None) } else { (config.sms(2).threads(64), Some(2)) };
        with_e4m3(testbed, ranks, |rank, comm| {
            support::experts_e4m3(rank, comm, &config, &shape, tokens, (rows, blocks, SCALES))
        })?;
    }
    Ok(())
}

fn arriving_scaled(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let routings = [Routing::Uniform, Routing::Holes, Routing::One(1), Routing::Repeats];
    let list = [(2, 4, 128, &[30, 20][..])];
    let large = [(1, 8, 384, &[700][..]), (2, 4, 512, &[400, 500]), (4, 70, 256, &[300, 0, 150])];
    for (ranks, experts_of_all, hidden, tokens) in if is_real { &large[..] } else { &list } {
        let shape = Shape { ranks: *ranks as usize, experts: *experts_of_all, topk: 3, hidden: *hidden };
        let max = tokens.iter().copied().max().unwrap_or(0) as u32;
        let config = GroupConfig::new(*experts_of_all as u32, *hidden as u32, 3).tokens(max).deadline(DEADLINE);
        let (config, blocks) = if is_real { (config, None) } else { (config.sms(2).threads(64), Some(2)) };
        let pairs = if is_real { 20 } else { 1 };
        let case = Arriving { blocks, pairs, e4m3: Some(SCALES), ..Arriving::of(tokens, &routings) };
        with_e4m3(testbed, *ranks, |rank, comm| support::arriving(rank, comm, &config, &shape, &case).map(drop))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_testkit::rotation;

    #[test]
    fn the_trials_pass_on_virtual_gpus() {
        for (name, trial) in rotation(0, TRIALS) {
            trial(&Testbed::simulated()).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}
