// SPDX-License-Identifier: MIT OR Apache-2.0
//! The requirements of a communicator, checked against the limits.

use super::{CommError, Routes};
use gin_abi::{MAX_CONTEXTS, MAX_IDS};
use gin_net::Capabilities;

/// The maximum number of descriptors in a queue.
pub const MAX_QUEUE_DEPTH: u32 = 1 << 20;

/// The maximum number of unfinished requests of one context to one peer that a proxy accepts.
pub const MAX_OUTSTANDING: u32 = 1 << 20;

/// The maximum number of bytes of one message.
pub const MAX_MESSAGE: u64 = 1 << 30;

/// The maximum number of lines of kernels that wait to be printed.
pub const MAX_PRINT_LINES: u32 = 1 << 16;

/// The ranks that kernels reach over the network with the back end GDAKI. A proxy always reaches all ranks.
///
/// ```
/// use gin_host::comm::{ConnectionType, Requirements};
///
/// let requirements = Requirements::default().contexts(4).connections(ConnectionType::Rail).rail_barriers(1);
/// assert_eq!((requirements.contexts, requirements.signals), (4, 16));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum ConnectionType {
    /// All ranks. Each context has a queue pair to each rank.
    #[default]
    All,
    /// The ranks with the same place in their LSA teams, including the own rank. Each context has a queue pair to each
    /// of these. For kernels that reach other ranks by loads and stores, or through a rank of their LSA team.
    ///
    /// A post over the network to any other rank fails with [`gin_abi::FaultKind::NotConnected`], also a
    /// `signal_all_routes` to a peer of the LSA team. `initialise` refuses barriers that would need such posts, on
    /// every back end.
    Rail,
}

impl ConnectionType {
    /// Returns the distance between connected ranks.
    pub(super) fn step(self, lsa_size: u32) -> u32 {
        match self {
            Self::All => 1,
            Self::Rail => lsa_size,
        }
    }
}

gin_gpu::config! {
    /// The size of a communicator and the features that it needs. All ranks pass the same values.
    ///
    /// ```
    /// use gin_host::comm::Requirements;
    ///
    /// let requirements = Requirements::default().signals(64).counters(8).lsa_barriers(1);
    /// assert_eq!((requirements.queue_depth, requirements.windows), (256, 64));
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Requirements {
        /// The number of contexts, 1 to [`MAX_CONTEXTS`]; 1 by default.
        pub contexts: u32 = 1,
        /// The number of signals of a context; 16 by default.
        pub signals: u32 = 16,
        /// The number of counters of a context; 16 by default.
        pub counters: u32 = 16,
        /// The number of descriptors in the queue of a context: a power of two, 1 to [`MAX_QUEUE_DEPTH`]; 256 by
        /// default.
        pub queue_depth: u32 = 256,
        /// The ranks that kernels reach over the network.
        pub connections: ConnectionType = ConnectionType::All,
        /// The number of barriers over all ranks.
        pub world_barriers: u32 = 0,
        /// The number of barriers over the ranks with the same place in their LSA teams.
        pub rail_barriers: u32 = 0,
        /// The number of barriers over the LSA team.
        pub lsa_barriers: u32 = 0,
        /// The maximum number of unfinished requests of one context to one peer, 1 to [`MAX_OUTSTANDING`]; 1024 by
        /// default. A further request to that peer stays in the queue and holds up the requests behind it.
        pub max_outstanding_per_peer: u32 = 1024,
        /// The maximum number of bytes of one message, 1 to [`MAX_MESSAGE`]. A longer put or get becomes several
        /// messages. The network may have a smaller limit.
        pub max_message: u64 = MAX_MESSAGE,
        /// The maximum number of windows registered at the same time, 1 to [`gin_abi::MAX_WINDOWS`]; 64 by default.
        pub windows: u32 = 64,
        /// The maximum number of lines of kernels ([`gin_println!`](gin_device::gin_println)) that wait to be printed:
        /// 0, or a power of two up to [`MAX_PRINT_LINES`]; 1024 by default. Each takes 256 bytes of pinned memory.
        pub print_lines: u32 = 1024,
        /// Refuses a network without strong signals.
        pub strong_signals: bool = false,
        /// Refuses a network without signals at window addresses.
        pub va_signals: bool = false,
        /// The index of the first descriptor, for tests of wrap-around.
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
    /// Returns the number of signals of a context, including those of barriers. Barriers have the ids from `signals`
    /// on: world, rail, LSA, with one signal for each member of the team of each barrier.
    pub(crate) fn all_signals(&self, ranks: u32, lsa_size: u32) -> u64 {
        let barriers = |count: u32, members: u32| u64::from(count) * u64::from(members);
        u64::from(self.signals)
            + barriers(self.world_barriers, ranks)
            + barriers(self.rail_barriers, ranks / lsa_size)
            + barriers(self.lsa_barriers, lsa_size)
    }

    /// Returns the number of barriers of all kinds.
    pub(crate) fn barriers(&self) -> u64 {
        u64::from(self.world_barriers) + u64::from(self.rail_barriers) + u64::from(self.lsa_barriers)
    }

    /// Checks all numbers against their limits.
    ///
    /// # Errors
    /// The first number past its limit.
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
        limit("lines of kernels", u64::from(self.print_lines), 0, u64::from(MAX_PRINT_LINES))?;
        if self.print_lines != 0 && !self.print_lines.is_power_of_two() {
            return Err(CommError::NotPowerOfTwo { what: "print_lines", asked: u64::from(self.print_lines) });
        }
        limit("windows", u64::from(self.windows), 1, u64::from(gin_abi::MAX_WINDOWS))
    }

    /// Checks that kernels reach all ranks of the barriers.
    ///
    /// # Errors
    /// [`CommError::NotConnected`].
    pub(crate) fn check_connections(&self, ranks: u32, lsa_size: u32, routes: Routes) -> Result<(), CommError> {
        if self.connections == ConnectionType::All {
            return Ok(());
        }
        // Loads and stores reach the rest of the LSA team.
        let near = if routes == Routes::Automatic { lsa_size } else { 1 };
        let meet = |what, count: u32, needed, reached| match count > 0 && reached < needed {
            true => Err(CommError::NotConnected { what, needed, reached }),
            false => Ok(()),
        };
        meet("world", self.world_barriers, ranks, ranks / lsa_size + near - 1)?;
        meet("LSA", self.lsa_barriers, lsa_size, near)
    }

    /// Checks that the network has all required features.
    ///
    /// # Errors
    /// [`CommError::Capability`].
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

    /// Returns all numbers with their names, to compare ranks.
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
