// SPDX-License-Identifier: MIT OR Apache-2.0
//! Trials of expert parallelism, against its oracle.

use crate::hardware::{Testbed, Trial};
use gin_ep::{EpError, GroupConfig};
use gin_ep_oracle::{Routing, Shape};
use gin_host::comm::{CommError, Requirements};
use gin_host::world::launch;
use support::{Pair, pairs};

#[expect(unreachable_pub, reason = "the tests of gin-ep include it too")]
#[path = "../../gin-ep/tests/support/mod.rs"]
mod support;

/// The trials of this module, which run on any devices. Ranks form one LSA team.
pub const TRIALS: [Trial; 3] = [
    ("rows_go_to_their_experts_and_back_with_the_bits_of_the_oracle", small),
    ("whole_batches_go_to_their_experts_and_back_with_the_bits_of_the_oracle", large),
    ("one_block_is_enough_to_dispatch_and_combine", |testbed| {
        on(testbed, 3, |config| config.sms(1), (60, 4, 200), 64, &[pair(Routing::Uniform), pair(Routing::Repeats)])
    }),
];

fn pair(routing: Routing) -> Pair {
    Pair { routing, counts: &[37, 0, 1, 128], alternative: false }
}

/// Runs pairs with `sizes`: experts, ids of a token, elements of a row.
fn on(
    testbed: &Testbed,
    ranks: u32,
    change: impl Fn(GroupConfig) -> GroupConfig + Sync,
    (experts, topk, hidden): (u32, u32, u32),
    tokens: u32,
    list: &[Pair],
) -> Result<(), String> {
    let shape =
        Shape { ranks: ranks as usize, experts: experts as usize, topk: topk as usize, hidden: hidden as usize };
    // A virtual GPU on a busy machine takes long.
    let config = GroupConfig::new(experts, hidden, topk).tokens(tokens).deadline(crate::hardware::DEADLINE);
    let config = change(config);
    let mut world = testbed.config();
    world.ranks = ranks;
    world.comm.lsa_size = None;
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        pairs(&rank, &comm, &config, &shape, tokens as usize, list)?;
        let fault = crate::hardware::fault(&rank, &comm);
        assert_eq!(fault, None);
        comm.destroy().map_err(|error: CommError| error.into())
    });
    outcome.map(drop).map_err(|error| error.to_string())
}

fn small(testbed: &Testbed) -> Result<(), String> {
    let most = |config: GroupConfig| if testbed.devices.is_some() { config } else { config.sms(2).threads(64) };
    for (ranks, sizes) in [(1, (8, 2, 8)), (2, (60, 8, 1000)), (3, (257, 4, 16)), (4, (8, 32, 2880))] {
        let list = [
            pair(Routing::Uniform),
            Pair { alternative: true, ..pair(Routing::Holes) },
            pair(Routing::Zipf),
            pair(Routing::None),
            pair(Routing::One(sizes.0 - 1)),
            Pair { alternative: true, ..pair(Routing::Local) },
            pair(Routing::Repeats),
        ];
        let (experts, topk, hidden) = sizes;
        // Hundreds of elements take seconds on virtual GPUs.
        let hidden = if testbed.devices.is_some() { hidden } else { hidden.min(64) };
        on(testbed, ranks, most, (experts, topk, hidden), 128, &list)?;
    }
    Ok(())
}

fn large(testbed: &Testbed) -> Result<(), String> {
    if testbed.devices.is_none() {
        return on(testbed, 2, |config| config.sms(2).threads(64), (256, 8, 264), 32, &[pair(Routing::Uniform)]);
    }
    let list: Vec<Pair> =
        (0..40).map(|number| Pair { alternative: number % 2 == 0, ..pair(Routing::Uniform) }).collect();
    for ranks in [1, 2, 4] {
        on(testbed, ranks, |config| config, (256, 8, 7168), 128, &list)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trials_pass_on_virtual_gpus() {
        for (name, trial) in TRIALS {
            trial(&Testbed::simulated()).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}
