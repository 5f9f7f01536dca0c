// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments of a launch.

use bytemuck::Pod;
use gin_abi::{CommHandle, Deadline, WindowHandle};

/// The bytes of one argument, aligned to 16.
#[derive(Clone, Debug)]
pub struct Argument {
    words: Vec<u128>,
    bytes: usize,
    type_name: &'static str,
}

impl Argument {
    /// Makes an argument of the bytes of `value`.
    pub fn plain<T: Pod>(value: T, type_name: &'static str) -> Self {
        let mut words = vec![0u128; size_of::<T>().div_ceil(16).max(1)];
        bytemuck::cast_slice_mut::<u128, u8>(&mut words)[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
        Self { words, bytes: size_of::<T>(), type_name }
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }

    /// Returns the name of the value's type.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }
}

/// A value that can be passed to a kernel.
///
/// Integers, floats, raw pointers, [`Deadline`], communicators (`gin_device::Comm` in the kernel), windows
/// (`gin_device::Window<T>`), and any other plain value as [`Plain`].
///
/// ```
/// use gin_gpu::KernelArg;
/// assert_eq!((7u64.argument().type_name(), 7u64.argument().bytes()), ("u64", 8));
/// ```
pub trait KernelArg {
    /// Returns the bytes of the value.
    fn argument(&self) -> Argument;
}

impl KernelArg for Argument {
    fn argument(&self) -> Argument {
        self.clone()
    }
}

/// A plain value of a type of the program.
///
/// ```
/// use gin_gpu::{KernelArg, Plain};
/// assert_eq!((5u32.argument().bytes(), Plain([0u16; 5]).argument().bytes()), (4, 10));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Plain<T: Pod>(pub T);

impl<T: Pod> KernelArg for Plain<T> {
    fn argument(&self) -> Argument {
        Argument::plain(self.0, std::any::type_name::<T>())
    }
}

macro_rules! plain {
    ($($ty:ty),*) => { $(
        impl KernelArg for $ty {
            fn argument(&self) -> Argument {
                Argument::plain(*self, stringify!($ty))
            }
        }
    )* };
}

plain!(u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64, Deadline, CommHandle, WindowHandle);

macro_rules! pointers {
    ($($pointer:ty),*) => { $(
        impl<T> KernelArg for $pointer {
            fn argument(&self) -> Argument {
                Argument::plain(self.addr(), std::any::type_name::<Self>())
            }
        }
    )* };
}

pointers!(*const T, *mut T);
