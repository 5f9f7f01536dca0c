// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of calls, kept until their kernels have ended.

use crate::EpError;
use gin_gpu::{Event, GpuError, MemorySlice, Stream};
use std::collections::VecDeque;
use std::sync::Arc;

/// Streams and memory that kernels may use.
///
/// A call [begins](Self::begin) and may [go on](Self::extend): a dispatch, then the kernels between it and its combine,
/// then the combine are one call. Later kernels of a call read memory that was kept for its first one, so memory of a
/// call is kept at least until the next call begins.
#[derive(Debug, Default)]
pub(crate) struct KeepAlive {
    streams: Vec<Arc<dyn Stream>>,
    /// Memory, each with the number of the last call that uses it, or [`CAPTURED`].
    memory: Vec<(u64, MemorySlice)>,
    /// The number of calls.
    calls: u64,
    /// Events after the kernels of a call and of all before, oldest first.
    marks: VecDeque<(u64, Box<dyn Event>)>,
    /// The number of slices that were added since the last mark.
    unmarked: usize,
}

/// In place of the number of a call: a graph has it, and may be replayed until [`KeepAlive::settle`].
const CAPTURED: u64 = u64::MAX;

/// The number of slices at which a stream is marked.
const MARK_AT: usize = 16;

impl KeepAlive {
    /// Begins a call, whose kernels follow the kernels of all calls before, and keeps memory for it.
    pub(crate) fn begin(&mut self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        self.note(stream);
        self.let_go(stream)?;
        self.calls += 1;
        self.extend(stream, memory)
    }

    fn note(&mut self, stream: &Arc<dyn Stream>) {
        if !self.streams.iter().any(|kept| Arc::ptr_eq(kept, stream)) {
            self.streams.push(stream.clone());
        }
    }

    /// Keeps more memory for the call that began last.
    pub(crate) fn extend(&mut self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        self.note(stream);
        let call = if stream.is_capturing()? { CAPTURED } else { self.calls };
        let same = |kept: &MemorySlice, new: &MemorySlice| {
            Arc::ptr_eq(kept.memory(), new.memory()) && (kept.offset(), kept.bytes()) == (new.offset(), new.bytes())
        };
        // The program keeps the rest by itself.
        for new in memory.iter().filter(|slice| slice.memory().is_owner()) {
            match self.memory.iter_mut().find(|(_, kept)| same(kept, new)) {
                Some((last, _)) => *last = call.max(*last),
                None => {
                    self.memory.push((call, (*new).clone()));
                    self.unmarked += usize::from(call != CAPTURED);
                }
            }
        }
        Ok(())
    }

    /// Lets go of memory whose kernels have ended, and marks the stream if much was added since the last time.
    fn let_go(&mut self, stream: &Arc<dyn Stream>) -> Result<(), GpuError> {
        if self.marks.is_empty() && self.unmarked < MARK_AT {
            return Ok(());
        }
        // While a stream is captured nothing can be asked, and its kernels run later.
        if self.streams.iter().try_fold(false, |any, stream| Ok::<_, GpuError>(any | stream.is_capturing()?))? {
            return Ok(());
        }
        if self.unmarked >= MARK_AT {
            self.marks.push_back((self.calls, stream.record()?));
            self.unmarked = 0;
        }
        while let Some((calls, mark)) = self.marks.front() {
            if !mark.is_done()? {
                break;
            }
            let ended = *calls;
            self.memory.retain(|(last, _)| *last > ended);
            self.marks.pop_front();
        }
        Ok(())
    }

    /// Waits for the kernels. They end by their deadlines.
    pub(crate) fn settle(&mut self) {
        for stream in self.streams.drain(..) {
            // The caller gets the error of a kernel when it synchronises, too. Then the kernel has ended as well.
            let _ = stream.synchronize();
        }
        self.memory.clear();
        self.marks.clear();
        self.unmarked = 0;
    }
}
