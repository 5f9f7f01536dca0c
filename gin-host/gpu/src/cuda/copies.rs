// SPDX-License-Identifier: MIT OR Apache-2.0
//! The copies of a progress thread.

use super::CudaDevice;
use super::context::Context;
use super::copy_stream::{BUFFER, CopyStream, VALUES};
use super::deferred::{Resource, defer};
use super::driver::{self, BesideCaptures, check, is_done, new_event};
use crate::copier::{Copier, Ticket};
use crate::{GpuError, Memory, MemoryKind};
use cudarc::driver::sys::{
    self, CUevent, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUresult,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// The maximum number of values under way. Each has a place in the buffer until it is written.
const MAX_VALUES: u64 = VALUES / 8;

/// The maximum number of copies that one call starts. On two H100s (2026-11-24) one call for 64 copies between them
/// took 1.0 us of CPU time for each, and single calls 2.4 us.
const BATCH: usize = 64;

/// Copies to start by one call of the driver.
#[derive(Debug, Default)]
struct Batch {
    to: Vec<u64>,
    from: Vec<u64>,
    bytes: Vec<usize>,
}

/// Copies on a stream of their own, in order.
#[derive(Debug)]
pub(super) struct Copies {
    /// `None` only in `drop`.
    copy_stream: Option<CopyStream>,
    context: Arc<Context>,
    started: Ticket,
    done: Ticket,
    /// The copies that have a ticket, the one after `started`, and are not started yet.
    batch: Batch,
    /// The driver has `cuMemcpyBatchAsync_v2`: it is of CUDA 13 or later.
    batches: bool,
    /// The error of a batch that did not start.
    failed: Option<GpuError>,
    /// The copies that are under way.
    ends: VecDeque<(Ticket, CUevent)>,
    /// The unused events.
    spare: Vec<CUevent>,
    /// The number of values written so far.
    values: u64,
    /// For each value whose write is under way, the copy that writes it.
    writing: VecDeque<Ticket>,
}

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for Copies {}

impl Copies {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, GpuError> {
        Ok(Self {
            copy_stream: Some(CopyStream::take(context)?),
            context: context.clone(),
            started: 0,
            done: 0,
            batch: Batch::default(),
            batches: driver::start()? >= 13_000,
            failed: None,
            ends: VecDeque::new(),
            spare: Vec::new(),
            values: 0,
            writing: VecDeque::new(),
        })
    }

    fn copy_stream(&mut self) -> Result<&mut CopyStream, GpuError> {
        let missing = self.context.unsupported("copy after its end");
        self.copy_stream.as_mut().ok_or(missing)
    }

    /// Returns the GPU that holds the memory; `None` for memory of the host.
    fn holder(&self, memory: &Memory) -> Result<Option<Arc<Context>>, GpuError> {
        let device = memory.device().downcast::<CudaDevice>();
        let device = device.ok_or_else(|| self.context.unsupported("copy memory of another kind of device"))?;
        Ok((memory.kind() == MemoryKind::Device).then(|| device.context.clone()))
    }

    /// Marks the end of the copies that were started.
    fn mark(&mut self) -> Result<Ticket, GpuError> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => new_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?,
        };
        let stream = self.copy_stream()?.stream;
        // Safety: both are alive.
        if let Err(error) = check("record the end of a copy", unsafe { sys::cuEventRecord(event, stream) }) {
            self.spare.push(event);
            return Err(error);
        }
        self.started += 1;
        self.ends.push_back((self.started, event));
        Ok(self.started)
    }

    /// Adds a copy to the batch.
    fn add(&mut self, to: u64, from: u64, bytes: u64) -> Result<Ticket, GpuError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.batch.to.push(to);
        self.batch.from.push(from);
        self.batch.bytes.push(bytes as usize);
        let ticket = self.started + 1;
        if self.batch.to.len() >= BATCH {
            self.start()?;
        }
        Ok(ticket)
    }

    /// Starts the copies of the batch. If that fails, none of them is ever done.
    fn start(&mut self) -> Result<(), GpuError> {
        let Batch { mut to, mut from, mut bytes } = std::mem::take(&mut self.batch);
        let count = to.len();
        if count == 0 {
            return Ok(());
        }
        let stream = self.copy_stream()?.stream;
        let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let mut first = 0usize;
        let code = if count > 1 && self.batches {
            // Safety: the arrays have `count` elements, and one attribute from the first copy on; the callers of `copy`
            // and `store` promise that the memory is valid.
            unsafe {
                sys::cuMemcpyBatchAsync_v2(
                    to.as_mut_ptr(),
                    from.as_mut_ptr(),
                    bytes.as_mut_ptr(),
                    count,
                    &raw mut attributes,
                    &raw mut first,
                    1,
                    stream,
                )
            }
        } else {
            // Safety: as above.
            let mut codes = (0..count).map(|at| unsafe { sys::cuMemcpyAsync(to[at], from[at], bytes[at], stream) });
            codes.find(|code| *code != CUresult::CUDA_SUCCESS).unwrap_or(CUresult::CUDA_SUCCESS)
        };
        // Keeps the vectors' memory for the next batch.
        to.clear();
        from.clear();
        bytes.clear();
        self.batch = Batch { to, from, bytes };
        let started = check("copy between GPUs and host", code).and_then(|()| self.mark());
        if let Err(error) = started {
            self.failed = Some(error.clone());
            return Err(error);
        }
        Ok(())
    }

    /// Finds out which copies are done.
    fn look(&mut self) -> Result<(), GpuError> {
        self.context.enter()?;
        self.start()?;
        let _beside = BesideCaptures::begin();
        while let Some(&(ticket, event)) = self.ends.front() {
            // Safety: the event is alive.
            if !is_done("ask for the end of a copy", unsafe { sys::cuEventQuery(event) })? {
                break;
            }
            self.done = ticket;
            self.spare.push(event);
            self.ends.pop_front();
        }
        while self.writing.front().is_some_and(|&ticket| ticket <= self.done) {
            self.writing.pop_front();
        }
        Ok(())
    }
}

impl Copier for Copies {
    unsafe fn copy(&mut self, to: (&Memory, u64), from: (&Memory, u64), bytes: u64) -> Result<Ticket, GpuError> {
        self.context.enter()?;
        let (to, to_address, from, from_address) = (self.holder(to.0)?, to.1, self.holder(from.0)?, from.1);
        let within = match (&to, &from) {
            (Some(to), Some(from)) => to.ordinal == from.ordinal,
            (None, None) => true,
            _ => false,
        };
        if !within {
            return self.add(to_address, from_address, bytes);
        }
        // A copy within the GPU would need an SM, and perhaps none is free. The chunks follow each other in the
        // stream, so one buffer is enough.
        self.start()?;
        let copies = self.copy_stream()?;
        let buffer = copies.buffer;
        for at in (0..bytes).step_by(BUFFER as usize) {
            let chunk = BUFFER.min(bytes - at);
            // Safety: the caller's promise; the buffer lives as long as the copy stream.
            unsafe {
                copies.start(buffer, from_address + at, chunk)?;
                copies.start(to_address + at, buffer, chunk)?;
            }
        }
        self.mark()
    }

    unsafe fn store(&mut self, to: (&Memory, u64), value: u64, bytes: u64) -> Result<Ticket, GpuError> {
        if self.writing.len() as u64 >= MAX_VALUES {
            self.look()?;
        }
        if self.writing.len() as u64 >= MAX_VALUES {
            return Err(self.context.unsupported("hold more values that are on their way"));
        }
        self.context.enter()?;
        // Also refuses memory of another kind of device.
        self.holder(to.0)?;
        let slot = self.values % MAX_VALUES;
        let copies = self.copy_stream()?;
        let place = copies.buffer + BUFFER + slot * 8;
        // Safety: no copy uses this place of the copy stream's buffer, because its last value is written.
        unsafe { (place as usize as *mut u64).write_volatile(value.to_le()) };
        let ticket = self.add(to.1, place, bytes.min(8))?;
        self.values += 1;
        self.writing.push_back(ticket);
        Ok(ticket)
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, GpuError> {
        if ticket > self.done {
            self.look()?;
        }
        match &self.failed {
            Some(error) if ticket > self.started => Err(error.clone()),
            _ => Ok(ticket <= self.done),
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let events = self.ends.drain(..).map(|(_, event)| event).chain(self.spare.drain(..));
        for event in events {
            defer(&self.context, Resource::Event(event));
        }
        if let Some(copies) = self.copy_stream.take() {
            defer(&self.context, Resource::CopyStream(copies));
        }
    }
}
