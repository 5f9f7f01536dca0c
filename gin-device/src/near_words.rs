// SPDX-License-Identifier: MIT OR Apache-2.0
//! The words in GPU memory of a [word in host memory](crate::host_word).

/// Index of the near word with the last value read.
pub const SEEN: u64 = 0;
/// Index of the near word with the state of the turn.
pub const TURN: u64 = 1;
/// Index of a near word for other use: the baseline of a signal or counter, the guess at a queue's consumer index.
pub const SPARE: u64 = 2;
/// Index of the near word that is 1 once a thread wants values in [`SEEN`].
pub const WANTED: u64 = 3;
/// Index of the near word with the value of the host word when some wait for a signal or counter ended, or at the
/// beginning.
pub const LAST: u64 = 4;
/// Index of the near word that kernels raise when they drain a signal from the mailbox.
pub const MAIL: u64 = 5;
/// Number of near words of a word in host memory.
pub const WORDS: u64 = gin_abi::handle::NEAR_WORDS;
