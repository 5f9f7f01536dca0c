// SPDX-License-Identifier: MIT OR Apache-2.0
//! The structures of DLPack 1.1, by which tensors cross the border without a copy. An owner hands out a capsule. The
//! consumer renames the capsule, owns its tensor from then on, and calls the deleter once.

use crate::dtype::DlType;
use gin_gpu::{Device, DeviceKind};
use pyo3::prelude::*;
use std::ffi::{CStr, c_void};

pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
pub(crate) const CUDA_HOST: i32 = 3;

pub(crate) const PLAIN: &CStr = c"dltensor";
pub(crate) const PLAIN_USED: &CStr = c"used_dltensor";
pub(crate) const VERSIONED: &CStr = c"dltensor_versioned";
pub(crate) const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

pub(crate) const READ_ONLY: u64 = 1;

/// The stream of a consumer that wants no order from the producer.
pub(crate) const UNORDERED: i64 = -1;

/// Returns whether the reader of a tensor wants to find what earlier kernels write. The argument is that of
/// `__dlpack__`.
pub(crate) fn is_ordered(stream: Option<&Bound<'_, PyAny>>) -> bool {
    stream.is_none_or(|stream| stream.extract::<i64>().ok() != Some(UNORDERED))
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlDevice {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DlType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

#[repr(C)]
pub(crate) struct Managed {
    pub(crate) tensor: DlTensor,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

#[repr(C)]
pub(crate) struct ManagedVersioned {
    pub(crate) version: Version,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    pub(crate) flags: u64,
    pub(crate) tensor: DlTensor,
}

/// Returns the name of a DLPack device.
pub(crate) fn device_name(DlDevice { kind, id }: DlDevice) -> String {
    match kind {
        CPU => "cpu".to_owned(),
        CUDA => format!("cuda:{id}"),
        CUDA_HOST => "pinned host memory".to_owned(),
        other => format!("DLPack device {other}:{id}"),
    }
}

/// Returns the DLPack device of tensors that kernels of `device` reach.
pub(crate) fn dlpack_device(device: &dyn Device) -> (i32, i32) {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gin_gpu::cuda::CudaDevice::of(device) {
        return (CUDA, gpu.ordinal() as i32);
    }
    debug_assert_eq!(device.kind(), DeviceKind::Virtual);
    (CPU, 0)
}

/// Returns the numbers of elements between neighbours of a contiguous tensor.
pub(crate) fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension] * shape[dimension].max(1);
    }
    strides
}

/// Returns the number of elements of a shape, if it is one.
pub(crate) fn elements(shape: &[i64]) -> Option<u64> {
    shape.iter().try_fold(1_u64, |product, &extent| product.checked_mul(u64::try_from(extent).ok()?))
}
