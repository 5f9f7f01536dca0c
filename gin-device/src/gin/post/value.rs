// SPDX-License-Identifier: MIT OR Apache-2.0
//! Values that fit into a request.

use bytemuck::Pod;

mod sealed {
    pub trait Sealed {}
}

/// A value that fits into a request: an integer or float of 1, 2, 4 or 8 bytes.
pub trait Value: Pod + sealed::Sealed {
    /// Returns the value's bytes in the low bits.
    #[doc(hidden)]
    fn to_word(self) -> u64;
}

macro_rules! values {
    ($($ty:ty as $bits:ty),*) => { $(
        impl sealed::Sealed for $ty {}
        impl Value for $ty {
            #[inline(always)]
            fn to_word(self) -> u64 {
                <$bits>::from_le_bytes(self.to_le_bytes()) as u64
            }
        }
    )* };
}

values!(
    u8 as u8, i8 as u8, u16 as u16, i16 as u16, u32 as u32, i32 as u32, u64 as u64, i64 as u64, f32 as u32, f64 as u64
);
