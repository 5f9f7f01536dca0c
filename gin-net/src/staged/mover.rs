// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between a device's memory and the host memory in its place.

use crate::NetError;
use gin_gpu::copier::{Copier, Ticket};
use gin_gpu::copy::copy_shared;
use gin_gpu::{Device, GpuError, Memory};
use std::collections::VecDeque;

/// The engine that copies. Copies end in the order in which they were started.
#[derive(Debug)]
pub(super) enum Mover {
    /// The CPU, which reaches all memory: one copy each time that there is other work too.
    Cpu(ByCpu),
    /// The device.
    Copier(Box<dyn Copier>),
}

/// Copies that the CPU has to make.
#[derive(Debug, Default)]
pub(super) struct ByCpu {
    /// To, from, bytes.
    waiting: VecDeque<(u64, u64, u64)>,
    done: Ticket,
}

fn failed(error: &GpuError) -> NetError {
    NetError::Local { what: "copying between a GPU and host memory", reason: error.to_string() }
}

impl Mover {
    pub(super) fn of(device: &dyn Device) -> Result<Self, NetError> {
        let copier = device.copier().map_err(|error| failed(&error))?;
        Ok(copier.map_or_else(|| Self::Cpu(ByCpu::default()), Self::Copier))
    }

    /// Starts a copy.
    ///
    /// # Safety
    /// - Both ranges lie in their allocations, which stay alive until the copy is done, or this is dropped.
    pub(super) unsafe fn copy(
        &mut self,
        to: (&Memory, u64),
        from: (&Memory, u64),
        bytes: u64,
    ) -> Result<Ticket, NetError> {
        match self {
            Self::Cpu(copies) => {
                copies.waiting.push_back((to.1, from.1, bytes));
                Ok(copies.done + copies.waiting.len() as Ticket)
            }
            // Safety: the caller's promise.
            Self::Copier(copier) => unsafe { copier.copy(to, from, bytes) }.map_err(|error| failed(&error)),
        }
    }

    /// Makes progress.
    pub(super) fn work(&mut self) {
        if let Self::Cpu(copies) = self
            && let Some(&(to, from, bytes)) = copies.waiting.front()
        {
            // Safety: the code that started it has promised that; accesses of others are atomic.
            unsafe { copy_shared(to, from, bytes) };
            copies.waiting.pop_front();
            copies.done += 1;
        }
    }

    /// Returns whether a copy is done, and in view of kernels that acquire a word raised from now on.
    pub(super) fn is_done(&mut self, copy: Ticket) -> Result<bool, NetError> {
        match self {
            Self::Cpu(copies) => Ok(copy <= copies.done),
            Self::Copier(copier) => copier.is_done(copy).map_err(|error| failed(&error)),
        }
    }
}
