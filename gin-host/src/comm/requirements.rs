// SPDX-License-Identifier: MIT OR Apache-2.0
//! The requirements of a communicator, checked against the limits.

use super::{CommError, Routes};
use gin_abi::{MAX_CONTEXTS, MAX_IDS};
use gin_net::Capabilities;

/// Most descriptors in a queue.
pub const MAX_QUEUE_DEPTH: u32 = 1 << 20;

/// Most unfinished requests to one peer that a proxy keeps for one context.
pub const MAX_OUTSTANDING: u32 = 1 << 20;

/// Most bytes of one message.
pub const MAX_MESSAGE: u64 = 1 << 30;

/// Which ranks kernels reach over the network, where they drive a NIC themselves. A proxy reaches all in either case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Connections {
    /// All ranks: for each context a queue pair to each.
    #[default]
    All,
    /// The ranks with the same place in their LSA teams, the own one among them: for each context a queue pair to each
    /// of those. For kernels that reach others by loads and stores, or by way of a rank of their LSA team.
    ///
    /// A post over the network to another rank is refused ([`gin_abi::FaultKind::NotConnected`]), also a
    /// `signal_all_routes` to a peer of the LSA team. Barriers whose arrivals would need it are refused, on every back
    /// end, when the communicator is initialised.
    Rail,
}

impl Connections {
    /// Ranks that differ by a multiple of this are connected.
    pub(super) fn step(self, lsa_size: u32) -> u32 {
        match self {
            Self::All => 1,
            Self::Rail => lsa_size,
        }
    }
}

gin_gpu::config! {
    /// The requirements of a communicator. All ranks ask for the same.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Requirements {
        /// Contexts, 1 to [`MAX_CONTEXTS`].
        pub contexts: u32 = 1,
        /// Signals per context.
        pub signals: u32 = 16,
        /// Counters per context.
        pub counters: u32 = 16,
        /// Descriptors in the queue of a context: a power of two, 1 to [`MAX_QUEUE_DEPTH`].
        pub queue_depth: u32 = 256,
        /// Which ranks kernels reach over the network.
        pub connections: Connections = Connections::All,
        /// Barriers over all ranks.
        pub world_barriers: u32 = 0,
        /// Barriers over the ranks with the same place in their LSA teams.
        pub rail_barriers: u32 = 0,
        /// Barriers over the LSA team.
        pub lsa_barriers: u32 = 0,
        /// Unfinished requests to one peer that the proxy keeps for one context; with more, that peer holds up the
        /// queue. 1 to [`MAX_OUTSTANDING`].
        pub max_outstanding_per_peer: u32 = 1024,
        /// Most bytes of one message, 1 to [`MAX_MESSAGE`]; a longer put or get is several. The network may have a
        /// smaller limit.
        pub max_message: u64 = MAX_MESSAGE,
        /// Windows that may be registered at the same time, 1 to [`gin_abi::MAX_WINDOWS`].
        pub windows: u32 = 64,
        /// Refuse a network without strong signals.
        pub strong_signals: bool = false,
        /// Refuse a network without signals at window addresses.
        pub va_signals: bool = false,
        /// Index of the first descriptor, for tests of wrap-around.
        #[doc(hidden)]
        pub first_index: u64 = 0,
        /// The first value of the words of all signals, for tests of wrap-around.
        #[doc(hidden)]
        pub first_signal: u64 = 0,
        /// The first value of the words of all counters, for tests of wrap-around.
        #[doc(hidden)]
        pub first_counter: u64 = 0,
    }
}

impl Requirements {
    /// Signals per context with those of the barriers, which have the ids from `signals` on: world, rail, LSA; one for
    /// each member of the team of each barrier.
    pub(crate) fn all_signals(&self, ranks: u32, lsa_size: u32) -> u64 {
        let barriers = |count: u32, members: u32| u64::from(count) * u64::from(members);
        u64::from(self.signals)
            + barriers(self.world_barriers, ranks)
            + barriers(self.rail_barriers, ranks / lsa_size)
            + barriers(self.lsa_barriers, lsa_size)
    }

    /// Number of barriers of all kinds.
    pub(crate) fn barriers(&self) -> u64 {
        u64::from(self.world_barriers) + u64::from(self.rail_barriers) + u64::from(self.lsa_barriers)
    }

    /// # Errors
    /// The first number that is past its limit.
    pub(crate) fn check(&self, ranks: u32, lsa_size: u32) -> Result<(), CommError> {
        if lsa_size == 0 || !ranks.is_multiple_of(lsa_size) {
            return Err(CommError::LsaSize { lsa_size, ranks });
        }
        let limit = |what, asked, least, limit| {
            if asked < least || asked > limit { Err(CommError::Limit { what, asked, least, limit }) } else { Ok(()) }
        };
        limit("contexts", u64::from(self.contexts), 1, u64::from(MAX_CONTEXTS))?;
        limit("descriptors a queue", u64::from(self.queue_depth), 1, u64::from(MAX_QUEUE_DEPTH))?;
        if !self.queue_depth.is_power_of_two() {
            return Err(CommError::NotPowerOfTwo { what: "queue_depth", asked: u64::from(self.queue_depth) });
        }
        limit("counters a context", u64::from(self.counters), 0, u64::from(MAX_IDS))?;
        limit("signals a context", u64::from(self.signals), 0, u64::from(MAX_IDS))?;
        let all = self.all_signals(ranks, lsa_size);
        limit("signals a context, with those of barriers,", all, 0, u64::from(MAX_IDS))?;
        limit("outstanding requests a peer", u64::from(self.max_outstanding_per_peer), 1, u64::from(MAX_OUTSTANDING))?;
        limit("bytes a message", self.max_message, 1, MAX_MESSAGE)?;
        limit("windows", u64::from(self.windows), 1, u64::from(gin_abi::MAX_WINDOWS))
    }

    /// # Errors
    /// [`CommError::NotConnected`] for barriers that cannot meet.
    pub(crate) fn check_connections(&self, ranks: u32, lsa_size: u32, routes: Routes) -> Result<(), CommError> {
        if self.connections == Connections::All {
            return Ok(());
        }
        // By loads and stores also the rest of the LSA team.
        let near = if routes == Routes::Automatic { lsa_size } else { 1 };
        let meet = |what, count: u32, needed, reached| match count > 0 && reached < needed {
            true => Err(CommError::NotConnected { what, needed, reached }),
            false => Ok(()),
        };
        meet("world", self.world_barriers, ranks, ranks / lsa_size + near - 1)?;
        meet("LSA", self.lsa_barriers, lsa_size, near)
    }

    /// # Errors
    /// Checks that the network has all required features.
    pub(crate) fn check_network(&self, network: &Capabilities) -> Result<(), CommError> {
        let lacks = |what| Err(CommError::Capability { network: network.name, what });
        if self.strong_signals && !network.strong_signals {
            return lacks("strong signals");
        }
        if self.va_signals && !network.va_signals {
            return lacks("signals at window addresses");
        }
        if !network.strong_signals && !network.completion_is_arrival {
            return lacks("way to signal behind a long put");
        }
        Ok(())
    }

    /// All numbers with their names, for comparing ranks.
    pub(crate) fn named(&self) -> [(&'static str, u64); 16] {
        [
            ("contexts", u64::from(self.contexts)),
            ("signals", u64::from(self.signals)),
            ("counters", u64::from(self.counters)),
            ("queue_depth", u64::from(self.queue_depth)),
            ("connections", self.connections as u64),
            ("world_barriers", u64::from(self.world_barriers)),
            ("rail_barriers", u64::from(self.rail_barriers)),
            ("lsa_barriers", u64::from(self.lsa_barriers)),
            ("max_outstanding_per_peer", u64::from(self.max_outstanding_per_peer)),
            ("max_message", self.max_message),
            ("windows", u64::from(self.windows)),
            ("strong_signals", u64::from(self.strong_signals)),
            ("va_signals", u64::from(self.va_signals)),
            ("first_index", self.first_index),
            ("first_signal", self.first_signal),
            ("first_counter", self.first_counter),
        ]
    }
}
