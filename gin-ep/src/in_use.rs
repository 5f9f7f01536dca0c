// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of calls, kept until their kernels have ended.

use crate::EpError;
use gin_gpu::{GpuError, MemorySlice, Stream};
use std::sync::Arc;

/// Streams and memory that kernels may use.
#[derive(Debug, Default)]
pub(crate) struct InUse {
    streams: Vec<Arc<dyn Stream>>,
    memory: Vec<MemorySlice>,
}

/// The number of memory slices from which a call looks whether the streams are done, and from which it waits for them.
const LOOK_AT: usize = 64;
const WAIT_AT: usize = 1024;

impl InUse {
    /// Keeps memory for kernels that a call will launch on a stream.
    pub(crate) fn keep(&mut self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        let same = |kept: &MemorySlice, new: &MemorySlice| {
            Arc::ptr_eq(kept.memory(), new.memory()) && (kept.offset(), kept.bytes()) == (new.offset(), new.bytes())
        };
        for new in memory {
            if self.memory.iter().any(|kept| same(kept, new)) {
                continue;
            }
            let number = self.memory.len();
            let is_idle =
                || self.streams.iter().try_fold(true, |idle, stream| Ok::<_, GpuError>(idle & stream.is_idle()?));
            if number >= WAIT_AT || number >= LOOK_AT && is_idle()? {
                self.settle();
            }
            self.memory.push((*new).clone());
        }
        if !self.streams.iter().any(|kept| Arc::ptr_eq(kept, stream)) {
            self.streams.push(stream.clone());
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
    }
}
