// SPDX-License-Identifier: MIT OR Apache-2.0
//! The replacement of `driver` in builds without real GPUs: no device has an engine.

use gin_gpu::Device;
use gin_gpu::GpuError;
use std::time::Duration;

pub(super) fn sms(_: &dyn Device) -> Option<u32> {
    None
}

pub(super) fn capability(_: &dyn Device) -> Option<u32> {
    None
}

pub(super) fn ordinal(_: &dyn Device) -> Option<usize> {
    None
}

/// The engine of a GPU. This type has no values.
#[derive(Debug)]
pub(super) enum Engine {}

impl Engine {
    pub(super) fn of(_: &dyn Device) -> Result<Option<Self>, GpuError> {
        Ok(None)
    }

    pub(super) fn of_number(_: &dyn Device, _: usize) -> Result<Option<Self>, GpuError> {
        Ok(None)
    }

    pub(super) fn enter(&self) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) unsafe fn copy(&self, _: u64, _: u64, _: usize) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) unsafe fn copies(&self, _: &mut [u64], _: &mut [u64], _: usize, _: bool) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) unsafe fn value(&self, _: u64, _: u64) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) unsafe fn values(&self, _: [u64; 2], _: u64) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) fn mark(&self) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) fn is_done(&self) -> Result<bool, GpuError> {
        match *self {}
    }

    pub(super) fn finish(&self, _: Duration) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) unsafe fn time_copies(
        &self,
        _: (usize, u64),
        _: u64,
        _: usize,
        _: u64,
        _: Duration,
    ) -> Result<f64, GpuError> {
        match *self {}
    }
}
