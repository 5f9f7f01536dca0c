// SPDX-License-Identifier: MIT OR Apache-2.0
//! The coroutines and OS threads of a world.

use std::fmt;
use std::sync::Arc;

/// A coroutine or OS thread of a world.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Actor {
    /// The host function of a rank.
    Host {
        /// Index of the function in the list given to `World::run`.
        rank: u32,
    },
    /// A service.
    Service {
        /// Name of the service.
        name: Arc<str>,
    },
    /// A thread of a grid.
    Thread {
        /// Device that runs the grid.
        rank: u32,
        /// Name of the grid.
        grid: Arc<str>,
        /// Number of the grid on its device, in the order of the launches, from 1.
        launch: u32,
        /// Linear index of the block, x fastest.
        block: u64,
        /// Linear index of the thread in its block, x fastest.
        thread: u32,
    },
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Actor::Host { rank } => write!(f, "host of rank {rank}"),
            Actor::Service { name } => write!(f, "service `{name}`"),
            Actor::Thread { rank, grid, launch, block, thread } => {
                write!(f, "rank {rank}, grid `{grid}` (launch {launch}), block {block}, thread {thread}")
            }
        }
    }
}
