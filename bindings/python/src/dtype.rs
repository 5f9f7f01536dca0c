// SPDX-License-Identifier: MIT OR Apache-2.0
//! Types of elements.

use gin_abi::WindowHandle;
use gin_device::bytemuck::Pod;
use gin_device::prelude::{Bf16, E4m3, E5m2, F16};
use gin_gpu::Argument;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::any::TypeId;

/// The ways in which kernels name a type of elements.
pub(crate) struct Typed {
    pub(crate) window: fn(WindowHandle) -> Argument,
    pub(crate) mutable: (TypeId, fn(u64) -> Argument),
    pub(crate) constant: (TypeId, fn(u64) -> Argument),
}

impl Typed {
    fn of<T: Pod>() -> Self {
        Self {
            window: Argument::of::<gin_device::Window<T>>,
            mutable: (TypeId::of::<*mut T>(), |address| Argument::of::<*mut T>(address as usize)),
            constant: (TypeId::of::<*const T>(), |address| Argument::of::<*const T>(address as usize)),
        }
    }
}

/// The type of an element as DLPack describes it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DlType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) slots: u16,
}

impl DlType {
    /// Returns the name, as NumPy and torch have it.
    pub(crate) fn name(self) -> String {
        let Self { code, bits, slots } = self;
        let name = match code {
            _ if let Some(known) = DType::of_dlpack(self) => return known.name().to_owned(),
            0 => format!("int{bits}"),
            1 => format!("uint{bits}"),
            2 => format!("float{bits}"),
            5 => format!("complex{bits}"),
            6 => "bool".to_owned(),
            _ => format!("DLPack type {code} of {bits} bits"),
        };
        if slots == 1 { name } else { format!("{slots} times {name}") }
    }
}

macro_rules! types {
    ($($variant:ident: $name:literal, $ty:ty, $code:literal;)*) => {
        /// The type of a window's or a tensor's elements.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum DType { $($variant),* }

        impl DType {
            pub(crate) const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the name, as NumPy and torch have it.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// Returns the bytes of an element.
            pub(crate) fn bytes(self) -> u64 {
                match self { $(Self::$variant => size_of::<$ty>() as u64),* }
            }

            pub(crate) fn dlpack(self) -> DlType {
                match self {
                    $(Self::$variant => DlType { code: $code, bits: 8 * size_of::<$ty>() as u8, slots: 1 }),*
                }
            }

            /// Returns the ways in which kernels name this type.
            pub(crate) fn typed(self) -> Typed {
                match self { $(Self::$variant => Typed::of::<$ty>()),* }
            }
        }
    };
}

types! {
    Uint8: "uint8", u8, 1;
    Int8: "int8", i8, 0;
    Uint16: "uint16", u16, 1;
    Int16: "int16", i16, 0;
    Uint32: "uint32", u32, 1;
    Int32: "int32", i32, 0;
    Uint64: "uint64", u64, 1;
    Int64: "int64", i64, 0;
    Float32: "float32", f32, 2;
    Float64: "float64", f64, 2;
    Float16: "float16", F16, 2;
    Bfloat16: "bfloat16", Bf16, 4;
    Float8E4m3: "float8_e4m3fn", E4m3, 10;
    Float8E5m2: "float8_e5m2", E5m2, 12;
}

impl DType {
    pub(crate) fn of_dlpack(found: DlType) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.dlpack() == found)
    }

    /// Returns the type that a Python value names: a text, or a dtype of NumPy or torch.
    pub(crate) fn named(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text = match value.extract::<String>() {
            Ok(text) => text,
            // A dtype of NumPy has `name`, its scalar types have `__name__`, and torch prints `torch.float32`.
            Err(_) => ["name", "__name__"]
                .iter()
                .find_map(|name| value.getattr(*name).ok()?.extract::<String>().ok())
                .map_or_else(|| value.str().map(|text| text.to_string()), Ok)?,
        };
        let name = text.strip_prefix("torch.").unwrap_or(&text);
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|dtype| dtype.name()).collect();
            PyTypeError::new_err(format!("`{name}` is no type of elements: there are {}", names.join(", ")))
        })
    }
}
