// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups, layouts and plans, as the calls of this module use them.

use super::types::{gin_ep_permuted_t, gin_memory_t};
use crate::comm::Comm;
use crate::status::{Failure, input};
use crate::table;
use crate::window::import;
use gin_boot::lock;
use gin_ep_kernels::Sizes;
use gin_gpu::{Device, Memory, MemoryKind, MemorySlice};
use std::sync::{Arc, Mutex, Weak};

/// The part of a group that its slots, plans and layouts need.
pub(crate) struct Core {
    pub(crate) comm: Arc<Comm>,
    pub(crate) sizes: Sizes,
    pub(crate) combine_at_source: bool,
    pub(crate) known: Known,
}

impl Core {
    /// Refuses a stream of another rank.
    pub(crate) fn check_device(&self, stream: &dyn Device) -> Result<(), Failure> {
        let own = &**self.comm.inner.gpu();
        // Ranks that share a GPU have separate device objects.
        if std::ptr::addr_eq(own, stream) {
            return Ok(());
        }
        let (own, other) = (own.name(), stream.name());
        Err(Failure::argument(format!(
            "`stream` is of another rank, on {other}; the group is of a rank on {own}: pass a stream of the group's rank"
        )))
    }

    pub(crate) fn memory(&self, given: &gin_memory_t, what: &str) -> Result<MemorySlice, Failure> {
        self.known.take(&**self.comm.inner.gpu(), given, what)
    }

    pub(crate) fn optional(&self, given: &gin_memory_t, what: &str) -> Result<Option<MemorySlice>, Failure> {
        let is_none = given.data.is_null() && given.bytes == 0;
        (!is_none).then(|| self.memory(given, what)).transpose()
    }

    /// Returns the memory of rows at a pointer, which may be null.
    pub(crate) fn rows_at(&self, rows: *const gin_memory_t) -> Result<Option<MemorySlice>, Failure> {
        if rows.is_null() { Ok(None) } else { self.optional(input(rows, "rows")?, "rows") }
    }

    /// Returns a layout of this group.
    pub(crate) fn layout(self: &Arc<Self>, permuted: gin_ep_permuted_t) -> Result<Arc<Permuted>, Failure> {
        let found = table::get::<Permuted>(permuted.id)?;
        self.check_own(&found.core, "layout", permuted.id)?;
        Ok(found)
    }

    pub(crate) fn check_own(self: &Arc<Self>, other: &Arc<Self>, what: &str, id: u64) -> Result<(), Failure> {
        if Arc::ptr_eq(self, other) {
            return Ok(());
        }
        Err(Failure::argument(format!("{what} {id:#x} is of another group: make one for this group")))
    }
}

/// The memory of the program that slots of a group may still use. The same address and length are the same object, so a
/// slot keeps it once.
pub(crate) struct Known {
    memory: Mutex<Vec<Weak<Memory>>>,
    /// Stands for memory without bytes.
    none: Arc<Memory>,
}

impl Known {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self, Failure> {
        Ok(Self { memory: Mutex::default(), none: Memory::new(device, MemoryKind::Device, 16)? })
    }

    /// Returns the object of memory of the program, which has the name `what` in errors.
    fn take(&self, device: &dyn Device, given: &gin_memory_t, what: &str) -> Result<MemorySlice, Failure> {
        let (address, bytes) = (given.data.expose_provenance() as u64, given.bytes);
        if bytes == 0 {
            return Ok(self.none.slice(0..0)?);
        }
        if address == 0 {
            let text = format!("`{what}` is null and has {bytes} bytes: pass an address, or 0 bytes");
            return Err(Failure::argument(text));
        }
        if address.checked_add(bytes).is_none() {
            let text = format!("`{what}` has {bytes} bytes, which end past the last address: pass its length in bytes");
            return Err(Failure::argument(text));
        }
        let mut known = lock(&self.memory);
        let same = |memory: &Arc<Memory>| (memory.address(), memory.bytes()) == (address, bytes);
        if let Some(memory) = known.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(memory.whole());
        }
        let memory = import(device, address, bytes).map_err(|failure| failure.of(what))?;
        known.retain(|memory| memory.strong_count() > 0);
        known.push(Arc::downgrade(&memory));
        Ok(memory.whole())
    }
}

/// Memory for received rows in a layout.
pub(crate) struct Permuted {
    pub(crate) core: Arc<Core>,
    pub(crate) inner: gin_ep::Permuted,
}

impl table::Handled for Permuted {
    const KIND: table::Kind = table::Kind::EpPermuted;
}

/// A plan of tokens.
pub(crate) struct Plan {
    pub(crate) core: Arc<Core>,
    pub(crate) inner: gin_ep::Plan,
}

impl table::Handled for Plan {
    const KIND: table::Kind = table::Kind::EpPlan;
}
