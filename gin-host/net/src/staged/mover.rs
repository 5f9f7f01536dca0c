// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between a device's memory and the host memory of staged windows.

use super::Started;
use crate::NetError;
use gin_device::exec::watch::{self, Event};
use gin_gpu::copier::{Copier, Ticket};
use gin_gpu::copy::copy_shared;
use gin_gpu::{Device, GpuError, Memory};
use std::collections::VecDeque;

/// The engine that copies. Copies end in the order in which they started.
#[derive(Debug)]
pub(super) enum Mover {
    /// The CPU, which reaches all memory. It makes one copy at a time, between other work.
    Cpu(ByCpu),
    /// The device.
    Copier(Box<dyn Copier>),
}

/// The copies that the CPU will make.
#[derive(Debug, Default)]
pub(super) struct ByCpu {
    /// Destination, source, bytes.
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
    /// - Both ranges are in allocations that stay alive until the copy is done, or `self` is dropped.
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
            watch::event(Event::Copy { to, from, bytes });
            // Safety: the promise of the caller of `copy`. Other accesses are atomic.
            unsafe { copy_shared(to, from, bytes) };
            copies.waiting.pop_front();
            copies.done += 1;
        }
    }

    /// Returns whether a copy, if there is one, is done, and visible to kernels that acquire a word raised from now on.
    pub(super) fn is_done(&mut self, copy: &Option<Started>) -> Result<bool, NetError> {
        let Some(Started { ticket, .. }) = *copy else { return Ok(true) };
        match self {
            Self::Cpu(copies) => Ok(ticket <= copies.done),
            Self::Copier(copier) => copier.is_done(ticket).map_err(|error| failed(&error)),
        }
    }
}
