// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a wait may last.

use bytemuck::{Pod, Zeroable};

/// How long a wait may last: a duration counted from the start of that wait, or [`NONE`](Self::NONE).
///
/// It is a duration and not a point in time, so that a kernel that is replayed later (a CUDA graph, say) has its full
/// time again. `NONE` means no limit of its own: abort and detected faults end such a wait all the same.
///
/// ```
/// use gin_abi::Deadline;
/// assert_eq!(Deadline::after_ms(2), Deadline::after_ns(2_000_000));
/// assert!(Deadline::NONE.is_none());
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
pub struct Deadline(u64);

impl Deadline {
    /// No limit of its own.
    pub const NONE: Self = Self(u64::MAX);

    /// Ends after this many nanoseconds; with 0 at the first look at the clock.
    #[inline(always)]
    #[must_use]
    pub const fn after_ns(ns: u64) -> Self {
        Self(ns)
    }

    /// Ends after this many microseconds.
    #[inline(always)]
    #[must_use]
    pub const fn after_us(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }

    /// Ends after this many milliseconds.
    #[inline(always)]
    #[must_use]
    pub const fn after_ms(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }

    /// Whether there is no limit.
    #[inline(always)]
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == u64::MAX
    }

    /// Whether a wait that has lasted `elapsed` nanoseconds must end.
    #[inline(always)]
    #[must_use]
    pub const fn is_over(self, elapsed: u64) -> bool {
        elapsed >= self.0 && self.0 != u64::MAX
    }

    /// The limit in nanoseconds, `u64::MAX` if there is none.
    #[inline(always)]
    #[must_use]
    pub const fn ns(self) -> u64 {
        self.0
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl From<core::time::Duration> for Deadline {
    fn from(duration: core::time::Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}
