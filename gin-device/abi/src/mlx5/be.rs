// SPDX-License-Identifier: MIT OR Apache-2.0
//! Big-endian numbers, stored as the bytes of memory.

use bytemuck::{Pod, Zeroable};

macro_rules! big_endian {
    ($($(#[$meta:meta])* $name:ident: $native:ty;)*) => {$(
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Pod, Zeroable)]
        pub struct $name($native);

        impl $name {
            /// Converts a native number to big-endian form.
            #[inline(always)]
            pub const fn new(value: $native) -> Self {
                Self(value.to_be())
            }

            /// Wraps the value that a native load of the memory returns.
            #[inline(always)]
            pub const fn from_memory(raw: $native) -> Self {
                Self(raw)
            }

            /// Returns the native number.
            #[inline(always)]
            pub const fn get(self) -> $native {
                <$native>::from_be(self.0)
            }

            /// Returns the value that a native store must write to memory.
            #[inline(always)]
            pub const fn memory(self) -> $native {
                self.0
            }
        }
    )*};
}

big_endian! {
    /// 16 bits, most significant byte first.
    ///
    /// ```
    /// use gin_abi::mlx5::be::Be16;
    /// assert_eq!(bytemuck::bytes_of(&Be16::new(0x0102)), [1, 2]);
    /// ```
    Be16: u16;
    /// 32 bits, most significant byte first. Keys of memory regions are kept in this form, so that a kernel need not
    /// swap their bytes.
    ///
    /// ```
    /// use gin_abi::mlx5::be::Be32;
    /// let key = Be32::new(0x0102_0304);
    /// assert_eq!(bytemuck::bytes_of(&key), [1, 2, 3, 4]);
    /// assert_eq!(Be32::from_memory(key.memory()).get(), 0x0102_0304);
    /// ```
    Be32: u32;
    /// 64 bits, most significant byte first.
    Be64: u64;
}

const _: () = assert!(size_of::<Be16>() == 2 && align_of::<Be16>() == 2);
const _: () = assert!(size_of::<Be32>() == 4 && align_of::<Be32>() == 4);
const _: () = assert!(size_of::<Be64>() == 8 && align_of::<Be64>() == 8);
