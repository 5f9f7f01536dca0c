// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments of a launch.

use crate::Parameter;
use bytemuck::Pod;
use gin_abi::{CommHandle, Deadline};
use gin_device::Comm;
use gin_device::kernel::KernelParam;
use std::any::{TypeId, type_name};
use std::mem::MaybeUninit;

/// The bytes of a value, aligned to 16. Most are few, and need no allocation.
#[derive(Clone, Debug)]
enum Words {
    Few([MaybeUninit<u128>; FEW]),
    Many(Vec<MaybeUninit<u128>>),
}

const FEW: usize = 4;

/// The bytes of one argument, aligned to 16.
#[derive(Clone, Debug)]
pub struct Argument {
    words: Words,
    bytes: usize,
    type_name: &'static str,
    type_id: TypeId,
}

impl Argument {
    /// Makes an argument for a parameter of type `P` of the bytes of `value`, which has the same layout.
    pub fn of<P: 'static>(value: impl Pod) -> Self {
        let bytes = bytemuck::bytes_of(&value);
        // Safety: the bytes are those of the value.
        unsafe { Self::copied(bytes.as_ptr(), bytes.len(), type_name::<P>(), TypeId::of::<P>()) }
    }

    /// Makes an argument of a value of the parameter's type.
    pub fn value<P: Copy + 'static>(value: P) -> Self {
        // Safety: the bytes are those of the value.
        unsafe { Self::copied((&raw const value).cast(), size_of::<P>(), type_name::<P>(), TypeId::of::<P>()) }
    }

    /// Makes an argument for a parameter of a kernel.
    ///
    /// # Safety
    /// - `value` points to a value of the parameter's type.
    pub(crate) unsafe fn of_param(parameter: &KernelParam, value: *const u8) -> Self {
        // Safety: the caller's promise.
        unsafe { Self::copied(value, parameter.size, parameter.type_name, parameter.type_id) }
    }

    /// Makes an argument for a parameter of the bytes of a program in another language, whose promise replaces the
    /// check of types. A launch still checks the size.
    #[doc(hidden)]
    pub fn of_bytes(parameter: &Parameter, bytes: &[u8]) -> Self {
        let type_id = parameter.type_id.unwrap_or(TypeId::of::<u8>());
        // Safety: the bytes are those of the slice.
        unsafe { Self::copied(bytes.as_ptr(), bytes.len(), "bytes", type_id) }
    }

    /// # Safety
    /// - `value` points to `bytes` bytes, which may be padding.
    unsafe fn copied(value: *const u8, bytes: usize, type_name: &'static str, type_id: TypeId) -> Self {
        let mut words = match bytes.div_ceil(16) {
            ..=FEW => Words::Few([MaybeUninit::uninit(); FEW]),
            many => Words::Many(vec![MaybeUninit::uninit(); many]),
        };
        let to = match &mut words {
            Words::Few(words) => words.as_mut_ptr(),
            Words::Many(words) => words.as_mut_ptr(),
        };
        // Safety: the words are at least as many bytes, and the caller's promise.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(value, bytes) };
        Self { words, bytes, type_name, type_id }
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the first byte, until it moves.
    pub fn as_ptr(&self) -> *const u8 {
        match &self.words {
            Words::Few(words) => words.as_ptr().cast(),
            Words::Many(words) => words.as_ptr().cast(),
        }
    }

    /// Returns the name of the parameter's type.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }

    /// Returns the parameter's type.
    pub fn type_id(&self) -> TypeId {
        self.type_id
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
        Argument::of::<T>(self.0)
    }
}

macro_rules! plain {
    ($($ty:ty),*) => { $(
        impl KernelArg for $ty {
            fn argument(&self) -> Argument {
                Argument::of::<Self>(*self)
            }
        }
    )* };
}

impl KernelArg for CommHandle {
    fn argument(&self) -> Argument {
        Argument::of::<Comm>(*self)
    }
}

plain!(u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64, Deadline);

macro_rules! pointers {
    ($($pointer:ty),*) => { $(
        impl<T: 'static> KernelArg for $pointer {
            fn argument(&self) -> Argument {
                Argument::of::<Self>(self.addr())
            }
        }
    )* };
}

pointers!(*const T, *mut T);
