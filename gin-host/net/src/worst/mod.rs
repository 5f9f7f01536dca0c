// SPDX-License-Identifier: MIT OR Apache-2.0
//! The worst network that the contract allows, for programs on virtual GPUs.
//!
//! Each part wraps any other network and does what the [guarantees](crate#guarantees) allow and most networks do not
//! do. All choices come from the seed of the [`Endpoint`].
//!
//! | part | does |
//! | --- | --- |
//! | [`Delay`] | delays requests, and keeps the order of each context and peer |
//! | [`Reorder`] | reorders everything that the contract does not order |
//! | [`Withhold`] | withholds arrived bytes from the GPU until they are made visible, as a NIC may |
//! | [`Trickle`] | accepts few requests at a time |

mod delay;
mod reorder;
mod trickle;
mod withhold;

pub use delay::Delay;
pub use reorder::Reorder;
pub use trickle::Trickle;
pub use withhold::Withhold;

use crate::peer::PeerNetwork;
use crate::{Endpoint, Network};
use std::time::Duration;

/// The longest delay of a request by the network of [`network`].
const DELAY: Duration = Duration::from_micros(5);
/// The maximum number of requests that it takes in one call.
const ROOM: usize = 3;

/// Makes the endpoint of a rank in a network within this process that delays, reorders and withholds all that the
/// contract does not promise.
///
/// ```
/// use gin_net::{Endpoint, Network, worst};
///
/// let network = worst::network(&Endpoint { rank: 0, ranks: 2, seed: 7, gpu: None });
/// assert!(network.capabilities().needs_make_visible);
/// ```
#[must_use]
pub fn network(endpoint: &Endpoint) -> Box<dyn Network> {
    let late = Delay::new(PeerNetwork::new(endpoint), endpoint, DELAY);
    Box::new(Reorder::new(Withhold::new(Trickle::new(late, ROOM), endpoint.rank), endpoint))
}
