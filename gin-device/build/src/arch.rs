// SPDX-License-Identifier: MIT OR Apache-2.0

//! GPU architectures, and the PTX version for each.

use std::fmt;
use std::str::FromStr;

/// Newest PTX version that a module may have: the driver of CUDA 13.0 (580.x) accepts no later one.
pub const MAX_PTX_VERSION: (u32, u32) = (9, 0);

/// A GPU architecture that kernels are compiled for.
///
/// The architecture determines the PTX version. sm_80 to sm_89 get 8.2, the first with `st.mmio`; it lacks
/// `fence.acquire`, as those GPUs do. sm_90 and sm_100 get 8.6, the first with `fence.acquire` and `fence.release`.
/// Later architectures get the oldest version that LLVM allows for them.
///
/// ```
/// use gin_build::Arch;
/// assert_eq!("sm_90".parse(), Ok(Arch::Sm90));
/// assert_eq!(Arch::Sm90.compute_name(), "compute_90");
/// assert!("sm_42".parse::<Arch>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Arch {
    /// A100.
    Sm80,
    /// A10, A40, RTX 30.
    Sm86,
    /// L4, L40, RTX 40.
    Sm89,
    /// H100, H200; runs on every later GPU as well.
    Sm90,
    /// H100, H200 with the instructions that only they have.
    Sm90a,
    /// B100, B200.
    Sm100,
    /// B100, B200 with the instructions that only they have.
    Sm100a,
    /// B300.
    Sm103,
    /// RTX 50, RTX PRO 6000.
    Sm120,
}

impl Arch {
    /// All known architectures, oldest first.
    pub const ALL: [Arch; 9] = [
        Arch::Sm80,
        Arch::Sm86,
        Arch::Sm89,
        Arch::Sm90,
        Arch::Sm90a,
        Arch::Sm100,
        Arch::Sm100a,
        Arch::Sm103,
        Arch::Sm120,
    ];

    /// Returns the name that `ptxas -arch` and `-Ctarget-cpu` take, such as `sm_90`.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm86 => "sm_86",
            Arch::Sm89 => "sm_89",
            Arch::Sm90 => "sm_90",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100 => "sm_100",
            Arch::Sm100a => "sm_100a",
            Arch::Sm103 => "sm_103",
            Arch::Sm120 => "sm_120",
        }
    }

    /// Returns the name that libNVVM takes, such as `compute_90`.
    pub fn compute_name(self) -> String {
        self.name().replacen("sm_", "compute_", 1)
    }

    /// Returns the LLVM feature that sets the PTX version, or `None` where LLVM's own minimum is right.
    pub(crate) const fn ptx_feature(self) -> Option<&'static str> {
        match self {
            Arch::Sm80 | Arch::Sm86 | Arch::Sm89 => Some("+ptx82"),
            Arch::Sm90 | Arch::Sm90a | Arch::Sm100 | Arch::Sm100a => Some("+ptx86"),
            Arch::Sm103 | Arch::Sm120 => None,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Error: the name is none of [`Arch::ALL`].
#[derive(Clone, PartialEq, Eq)]
pub struct UnknownArch(pub String);

impl fmt::Display for UnknownArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown GPU architecture `{}`; known are", self.0)?;
        for arch in Arch::ALL {
            write!(f, " {arch}")?;
        }
        Ok(())
    }
}

impl std::error::Error for UnknownArch {}

impl FromStr for Arch {
    type Err = UnknownArch;

    fn from_str(name: &str) -> Result<Self, UnknownArch> {
        Arch::ALL.into_iter().find(|arch| arch.name() == name).ok_or_else(|| UnknownArch(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_architecture_is_parsed_from_its_own_name() {
        for arch in Arch::ALL {
            assert_eq!(arch.name().parse(), Ok(arch));
        }
    }

    #[test]
    fn an_unknown_architecture_is_refused_with_the_list_of_known_ones() {
        let text = "sm_42".parse::<Arch>().unwrap_err().to_string();
        assert!(text.contains("`sm_42`") && text.contains(" sm_80 ") && text.ends_with(" sm_120"), "{text}");
    }
}
