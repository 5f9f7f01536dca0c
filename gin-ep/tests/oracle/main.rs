// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch and combine against the oracle, bit for bit.

mod elements;
mod graphs;
mod groups;
mod layouts;
mod progress;
mod reports;
mod shapes;
mod sums;
#[path = "../support/mod.rs"]
mod support;

use gin_ep::{EpError, GroupConfig};
use gin_ep_oracle::{Routing, Shape};
use gin_host::comm::{Communicator, Requirements};
use gin_host::world::{Rank, WorldConfig, launch};
use support::{Pair, pairs};

/// Runs `test` on all ranks of a world.
fn on_ranks(world: WorldConfig, test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync) {
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        test(&rank, &comm)?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

/// Runs pairs on all ranks of a world.
fn run(world: WorldConfig, config: GroupConfig, shape: Shape, max: usize, list: &[Pair]) {
    on_ranks(world, |rank, comm| pairs(rank, comm, &config, &shape, max, list));
}

/// Returns the configuration for a shape.
fn config(shape: &Shape, tokens: u32) -> GroupConfig {
    let config = GroupConfig::new(shape.experts as u32, shape.hidden as u32, shape.topk as u32);
    config.tokens(tokens).sms(2).threads(64)
}

const COUNTS: &[usize] = &[37, 0, 1, 64];

fn pair(routing: Routing) -> Pair {
    Pair { routing, counts: COUNTS, alternative: false }
}
