// SPDX-License-Identifier: MIT OR Apache-2.0
//! One operation of a script, and the entry that a thread logs for it.

use bytemuck::{Pod, Zeroable};

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $code:literal;)* }) => {
        $(#[$meta])*
        #[repr(u32)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name { $($(#[$doc])* $variant = $code,)* }

        impl $name {
            /// Returns the variant with this code.
            #[inline(always)]
            pub const fn from_code(code: u32) -> Option<Self> {
                match code { $($code => Some($name::$variant),)* _ => None }
            }
        }
    };
}

codes! {
    /// The effect of an operation. An operation ignores the fields of [`Op`] that its code does not mention.
    Code {
        /// Does nothing.
        Nop = 0;
        /// Writes pattern `value`, from the pattern's byte `source_offset` on, to `bytes` bytes at `offset` of own
        /// window `window`.
        Fill = 1;
        /// Compares these bytes with the same pattern; logs the number of bytes that differ and the index of the first.
        Check = 2;
        /// Puts `bytes` bytes from `source_offset` of own window `source_window` to `offset` of window `window` at the
        /// peer.
        Put = 3;
        /// Puts the low `bytes` (1, 2, 4 or 8) bytes of `value`.
        PutValue = 4;
        /// Gets `bytes` bytes from `source_offset` of window `source_window` at the peer to `offset` of own window
        /// `window`.
        Get = 5;
        /// Raises a signal without data.
        Signal = 6;
        /// Flushes the context.
        Flush = 7;
        /// Takes a flush token for the peer.
        FlushAsync = 8;
        /// Waits for the last token.
        WaitToken = 9;
        /// Waits for the signal to reach `value`.
        WaitSignal = 10;
        /// Logs the signal.
        ReadSignal = 11;
        /// Resets the signal.
        ResetSignal = 12;
        /// Waits for the counter to reach `value`.
        WaitCounter = 13;
        /// Logs the counter.
        ReadCounter = 14;
        /// Resets the counter.
        ResetCounter = 15;
        /// Adds `value` to the shadow.
        IncreaseShadow = 16;
        /// Logs the shadow.
        ReadShadow = 17;
        /// Waits for the signal to meet its shadow.
        MeetShadow = 18;
        /// Waits for the signal to pass its shadow by `value`; logs the shadow before and the difference.
        FollowShadow = 19;
        /// Passes barrier `value` of team `team`, with fence `fence`.
        Barrier = 20;
        /// Passes the barrier in two steps, arrive and wait, with a pause of `source_offset` nanoseconds between them.
        BarrierSplit = 21;
        /// Pauses for `value` nanoseconds.
        Pause = 22;
        /// Synchronizes the block. Every group of the block needs this operation at the same position of its program.
        BlockSync = 23;
        /// Reports `value` as the kernel's own error.
        Report = 24;
        /// Logs the fault of the communicator, if there is one.
        Fault = 25;
        /// Raises the peer's own word of the signal with this GPU's atomics, as an LSA raise does.
        RaiseByGpu = 26;
        /// Looks up the pointer `offset` bytes into own window `window` with `find_window`; logs the id and the offset
        /// found.
        FindWindow = 27;
        /// Loads 8 bytes through a symmetric pointer to the LSA peer's window `window` at `offset`; logs them.
        LoadPeer = 28;
        /// Stores `value`, the sum of this engine's raises so far, to the peer's own word of the signal that GPUs
        /// raise. An engine that keeps the sum itself does the same.
        WriteTotal = 29;
        /// Logs the size of the team and the caller's rank in it.
        ReadTeam = 30;
        /// Raises a signal without data, by `signal_all_routes`.
        SignalAllRoutes = 31;
        /// Passes combined barrier `value`, with fence `fence`.
        CombinedBarrier = 32;
        /// Copies `bytes` from `source_offset` of own window `source_window` to `offset` of the LSA peer's window
        /// `window`.
        CopyFrom = 33;
        /// Copies `bytes` from `source_offset` of the LSA peer's window `source_window` to `offset` of own window
        /// `window`.
        CopyTo = 34;
        /// Reduces `value` into the LSA peer's window `window` at `offset`. `amount` is the code of the [`Reduction`];
        /// the word has `bytes` bytes, 4 or 8.
        Reduce = 35;
        /// Reads `bytes` bytes, 4 or 8, at `offset` of own window `window`; logs them.
        Read = 36;
        /// Sends the [`Message`](crate::script::Message) at `source_offset` of own window `source_window` to the LSA
        /// peer, through window `window`. If `bytes` is not 0, it is the number of elements.
        Send = 37;
        /// Receives a message from the LSA peer, in the same way; `source_window` gets it.
        Receive = 38;
        /// Waits until puts to the peer have arrived.
        Quiet = 39;
        /// Waits until puts to all peers have arrived.
        QuietAll = 40;
        /// Raises a signal without data, by `signal_all_contexts`.
        SignalAllContexts = 41;
        /// Adds `value` to the word of 8 bytes at `offset` of the LSA peer's window `window`; the thread that adds logs
        /// the value before.
        FetchAdd = 42;
        /// Stores `value` in that word if it is `amount`; the thread that stores logs the value before.
        CompareSwap = 43;
    }
}

codes! {
    /// A reduction.
    Reduction {
        /// Sum.
        Add = 0;
        /// Bitwise and.
        And = 1;
        /// Bitwise or.
        Or = 2;
        /// Minimum.
        Min = 3;
        /// Maximum.
        Max = 4;
        /// Sum of 4-byte floats.
        AddFloat = 5;
    }
}

/// Means no counter, or no signal.
pub const NONE: u32 = u32::MAX;

/// One operation. Plain data, stored in device memory.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct Op {
    /// A [`Code`].
    pub code: u32,
    /// Number of the context.
    pub context: u32,
    /// Threads that share the context: 0 GPU, 1 block, 2 thread.
    pub sharing: u32,
    /// Team in which `peer` is a rank and which a barrier synchronizes: 0 world, 1 LSA, 2 rail.
    pub team: u32,
    /// Rank of the peer in the team.
    pub peer: u32,
    /// Destination window: index in the script's table.
    pub window: u32,
    /// Source window.
    pub source_window: u32,
    /// Signal id, [`NONE`] for none, or index of the signal's window if `signal_at_address` is set.
    pub signal: u32,
    /// 1 if the signal is a word of a window.
    pub signal_at_address: u32,
    /// 1 if the signal is weak.
    pub weak: u32,
    /// Number of bits of the signal or counter that are compared; 0 for all.
    pub bits: u32,
    /// Counter id, or [`NONE`].
    pub counter: u32,
    /// Scope to which the caller has released memory already: 0 thread, 1 block, 2 GPU, 3 system.
    pub given: u32,
    /// 1 to hint that more requests follow.
    pub more: u32,
    /// Fence of a barrier: 0 none, 1 put, 2 get, 3 both. 4 is added for all contexts, 8 for all routes.
    pub fence: u32,
    /// In a post: scope to which memory must be released, 0 system, 1 GPU. In a wait, a read or a flush: 1 if it does
    /// not acquire.
    pub required: u32,
    /// Route: 0 the setup's, 1 automatic, 2 LSA, 3 the network.
    pub route: u32,
    /// 1 if a post or a wait for a signal is prepared first.
    pub prepared: u32,
    /// Offset in the destination window in bytes.
    pub offset: u64,
    /// Offset in the source window in bytes.
    pub source_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Offset of the signal in its window in bytes.
    pub signal_offset: u64,
    /// Amount that is added to the signal.
    pub amount: u64,
    /// Value that the operation puts, waits for or fills with; see [`Code`].
    pub value: u64,
    /// Deadline in nanoseconds; `u64::MAX` for none.
    pub deadline: u64,
}

const _: () = assert!(size_of::<Op>() == 128);

impl Op {
    /// Returns an operation with this code and nothing else set: context 0, no signal, no counter, no deadline.
    #[must_use]
    pub const fn new(code: Code) -> Self {
        Self {
            code: code as u32,
            context: 0,
            sharing: 0,
            team: 0,
            peer: 0,
            window: 0,
            source_window: 0,
            signal: NONE,
            signal_at_address: 0,
            weak: 0,
            bits: 0,
            counter: NONE,
            given: 0,
            more: 0,
            fence: 0,
            required: 0,
            route: 0,
            prepared: 0,
            offset: 0,
            source_offset: 0,
            bytes: 0,
            signal_offset: 0,
            amount: 1,
            value: 0,
            deadline: u64::MAX,
        }
    }
}

/// Constructors and modifiers for the operations that cases use often.
#[cfg(not(target_arch = "nvptx64"))]
impl Op {
    /// Puts `bytes` bytes to `peer`: from offset 0 of window 0 to offset 0 of window 1, unless a modifier changes that.
    #[must_use]
    pub const fn put(peer: u32, bytes: u64) -> Self {
        Self { peer, bytes, window: 1, ..Self::new(Code::Put) }
    }

    /// Puts the low `bytes` bytes of `value` to offset 0 of window 1 at `peer`.
    #[must_use]
    pub const fn put_value(peer: u32, bytes: u64, value: u64) -> Self {
        Self { peer, bytes, value, window: 1, ..Self::new(Code::PutValue) }
    }

    /// Sets the route: 1 automatic, 2 LSA, 3 the network.
    #[must_use]
    pub const fn route(mut self, route: u32) -> Self {
        self.route = route;
        self
    }

    /// Gets `bytes` bytes from `peer`: from offset 0 of its window 0 to offset 0 of own window 1.
    #[must_use]
    pub const fn get(peer: u32, bytes: u64) -> Self {
        Self { peer, bytes, window: 1, ..Self::new(Code::Get) }
    }

    /// Raises signal `signal` of `peer` by one.
    #[must_use]
    pub const fn raise(peer: u32, signal: u32) -> Self {
        Self { peer, signal, ..Self::new(Code::Signal) }
    }

    /// Waits until signal `signal` is at least `least`.
    #[must_use]
    pub const fn wait_signal(signal: u32, least: u64) -> Self {
        Self { signal, value: least, ..Self::new(Code::WaitSignal) }
    }

    /// Reads signal `signal`.
    #[must_use]
    pub const fn read_signal(signal: u32) -> Self {
        Self { signal, ..Self::new(Code::ReadSignal) }
    }

    /// Resets signal `signal`.
    #[must_use]
    pub const fn reset_signal(signal: u32) -> Self {
        Self { signal, ..Self::new(Code::ResetSignal) }
    }

    /// Waits until counter `counter` is at least `least`.
    #[must_use]
    pub const fn wait_counter(counter: u32, least: u64) -> Self {
        Self { counter, value: least, ..Self::new(Code::WaitCounter) }
    }

    /// Reads counter `counter`.
    #[must_use]
    pub const fn read_counter(counter: u32) -> Self {
        Self { counter, ..Self::new(Code::ReadCounter) }
    }

    /// Flushes the context.
    #[must_use]
    pub const fn flush() -> Self {
        Self::new(Code::Flush)
    }

    /// Waits until puts to `peer` have arrived.
    #[must_use]
    pub const fn quiet(peer: u32) -> Self {
        Self { peer, ..Self::new(Code::Quiet) }
    }

    /// Waits until puts to all peers have arrived.
    #[must_use]
    pub const fn quiet_all() -> Self {
        Self::new(Code::QuietAll)
    }

    /// Raises signal `signal` of `peer` by one, after the puts of all contexts.
    #[must_use]
    pub const fn signal_all_contexts(peer: u32, signal: u32) -> Self {
        Self { peer, signal, ..Self::new(Code::SignalAllContexts) }
    }

    /// Writes pattern `seed` into `bytes` bytes of own window `window` at `offset`.
    #[must_use]
    pub const fn fill(window: u32, offset: u64, bytes: u64, seed: u64) -> Self {
        Self { window, offset, bytes, value: seed, ..Self::new(Code::Fill) }
    }

    /// Compares `bytes` bytes of own window `window` at `offset` with pattern `seed`.
    #[must_use]
    pub const fn check(window: u32, offset: u64, bytes: u64, seed: u64) -> Self {
        Self { window, offset, bytes, value: seed, ..Self::new(Code::Check) }
    }

    /// Compares `bytes` bytes of own window `window` at `offset` with pattern `seed`, from the pattern's byte `from`
    /// on.
    #[must_use]
    pub const fn check_from(window: u32, offset: u64, bytes: u64, seed: u64, from: u64) -> Self {
        Self { source_offset: from, ..Self::check(window, offset, bytes, seed) }
    }

    /// Takes a flush token for `peer`.
    #[must_use]
    pub const fn flush_async(peer: u32) -> Self {
        Self { peer, ..Self::new(Code::FlushAsync) }
    }

    /// Waits for the last token.
    #[must_use]
    pub const fn wait_token() -> Self {
        Self::new(Code::WaitToken)
    }

    /// Synchronizes the block.
    #[must_use]
    pub const fn block_sync() -> Self {
        Self::new(Code::BlockSync)
    }

    /// Does nothing.
    #[must_use]
    pub const fn nop() -> Self {
        Self::new(Code::Nop)
    }

    /// Reports `value` as the kernel's own error.
    #[must_use]
    pub const fn report(value: u64) -> Self {
        Self { value, ..Self::new(Code::Report) }
    }

    /// Pauses for `ns` nanoseconds.
    #[must_use]
    pub const fn pause(ns: u64) -> Self {
        Self { value: ns, ..Self::new(Code::Pause) }
    }

    /// Passes world barrier 0 with a fence for puts.
    #[must_use]
    pub const fn barrier() -> Self {
        Self { fence: 1, ..Self::new(Code::Barrier) }
    }

    /// Sets the destination, or the memory that is read or checked, to this window and offset.
    #[must_use]
    pub const fn to(mut self, window: u32, offset: u64) -> Self {
        (self.window, self.offset) = (window, offset);
        self
    }

    /// Sets the source to this window and offset.
    #[must_use]
    pub const fn from(mut self, window: u32, offset: u64) -> Self {
        (self.source_window, self.source_offset) = (window, offset);
        self
    }

    /// Adds an increment of signal `signal`.
    #[must_use]
    pub const fn signal(mut self, signal: u32) -> Self {
        self.signal = signal;
        self
    }

    /// Makes the signal the word at `offset` of window `window`.
    #[must_use]
    pub const fn at_address(mut self, window: u32, offset: u64) -> Self {
        (self.signal, self.signal_at_address, self.signal_offset) = (window, 1, offset);
        self
    }

    /// Adds `amount` to the signal instead of 1.
    #[must_use]
    pub const fn add(mut self, amount: u64) -> Self {
        self.amount = amount;
        self
    }

    /// Makes the signal weak.
    #[must_use]
    pub const fn weak(mut self) -> Self {
        self.weak = 1;
        self
    }

    /// Adds counter `counter`.
    #[must_use]
    pub const fn counter(mut self, counter: u32) -> Self {
        self.counter = counter;
        self
    }

    /// Sets the context to `context`.
    #[must_use]
    pub const fn context(mut self, context: u32) -> Self {
        self.context = context;
        self
    }

    /// Compares only the low `bits` bits.
    #[must_use]
    pub const fn bits(mut self, bits: u32) -> Self {
        self.bits = bits;
        self
    }

    /// Sets a deadline of `us` microseconds.
    #[must_use]
    pub const fn deadline_us(mut self, us: u64) -> Self {
        self.deadline = us * 1000;
        self
    }

    /// Sets the threads that share the context: 0 GPU, 1 block, 2 thread.
    #[must_use]
    pub const fn sharing(mut self, sharing: u32) -> Self {
        self.sharing = sharing;
        self
    }

    /// Makes a wait, a read or a flush not acquire.
    #[must_use]
    pub const fn relaxed(mut self) -> Self {
        self.required = 1;
        self
    }

    /// Sets a barrier's fence: 0 none, 1 put, 2 get, 3 both. 4 is added for all contexts.
    #[must_use]
    pub const fn fence(mut self, fence: u32) -> Self {
        self.fence = fence;
        self
    }

    /// Prepares the post or the wait before it is made.
    #[must_use]
    pub const fn prepared(mut self) -> Self {
        self.prepared = 1;
        self
    }

    /// Hints that more requests follow.
    #[must_use]
    pub const fn more(mut self) -> Self {
        self.more = 1;
        self
    }

    /// Sets the team of the operation's ranks: 0 world, 1 LSA, 2 rail.
    #[must_use]
    pub const fn team(mut self, team: u32) -> Self {
        self.team = team;
        self
    }
}

/// A thread's result of one operation.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct Entry {
    /// 0 if the thread did not reach the operation, 1 for `Ok`, 2 for `Err`.
    pub outcome: u64,
    /// Fault of an `Err`, by `Fault::to_words`.
    pub fault: [u64; gin_abi::fault::WORDS],
    /// First value.
    pub value: u64,
    /// Second value.
    pub second: u64,
}

const _: () = assert!(size_of::<Entry>() == 72);

/// Returns byte `index` of pattern `seed`.
#[inline(always)]
#[must_use]
pub const fn pattern(seed: u64, index: u64) -> u8 {
    let mixed = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(index.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    (mixed >> 40) as u8
}
