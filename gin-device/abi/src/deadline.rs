// SPDX-License-Identifier: MIT OR Apache-2.0
//! Time limits of waits.

use bytemuck::{Pod, Zeroable};

/// Time limit of a wait: a duration counted from the start of that wait, or [`NONE`](Self::NONE).
///
/// It is a duration and not a point in time, so a kernel that is replayed later (from a CUDA graph, say) has its full
/// time again. `NONE` sets no limit. Abort and detected faults still end such a wait.
///
/// ```
/// use gin_abi::Deadline;
/// assert_eq!(Deadline::after_ms(2), Deadline::after_ns(2_000_000));
/// assert!(Deadline::after_us(1).is_over(1_000));
/// assert!(Deadline::NONE.is_none() && !Deadline::NONE.is_over(u64::MAX));
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
pub struct Deadline(u64);

impl Deadline {
    /// No time limit.
    pub const NONE: Self = Self(u64::MAX);

    /// Returns a limit in nanoseconds. A wait with limit 0 ends at its first look at the clock.
    #[inline(always)]
    #[must_use]
    pub const fn after_ns(ns: u64) -> Self {
        Self(ns)
    }

    /// Returns a limit in microseconds.
    #[inline(always)]
    #[must_use]
    pub const fn after_us(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }

    /// Returns a limit in milliseconds.
    #[inline(always)]
    #[must_use]
    pub const fn after_ms(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }

    /// Returns true if there is no limit.
    #[inline(always)]
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == u64::MAX
    }

    /// Returns true if a wait that has lasted `elapsed` nanoseconds must end.
    #[inline(always)]
    #[must_use]
    pub const fn is_over(self, elapsed: u64) -> bool {
        elapsed >= self.0 && self.0 != u64::MAX
    }

    /// Returns the limit in nanoseconds, `u64::MAX` if there is none.
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

/// Writes the limit in the largest unit in which it is a whole number.
///
/// ```
/// use gin_abi::Deadline;
/// assert_eq!(Deadline::after_ms(1500).to_string(), "1500 ms");
/// assert_eq!(Deadline::NONE.to_string(), "no limit");
/// ```
#[cfg(not(target_arch = "nvptx64"))]
impl core::fmt::Display for Deadline {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
        match (self.is_none(), units.into_iter().find(|(unit, _)| self.0 != 0 && self.0.is_multiple_of(*unit))) {
            (true, _) => f.write_str("no limit"),
            (_, Some((unit, name))) => write!(f, "{} {name}", self.0 / unit),
            (_, None) => write!(f, "{} ns", self.0),
        }
    }
}
