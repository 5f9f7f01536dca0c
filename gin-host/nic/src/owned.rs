// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects of a NIC that a drop destroys.

use super::hca::{Handle, Hca, HcaError};
use gin_gpu::{MemorySlice, lock};
use std::sync::{Arc, Mutex};

/// A function of a NIC that destroys an object of one kind.
pub(super) type End = fn(&(dyn Hca + 'static), Handle) -> Result<(), HcaError>;

/// A NIC, and its errors for objects that it did not destroy.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    pub(super) hca: Arc<dyn Hca>,
    failures: Arc<Mutex<Vec<HcaError>>>,
}

impl Owner {
    pub(super) fn new(hca: Arc<dyn Hca>) -> Self {
        Self { hca, failures: Arc::default() }
    }

    pub(super) fn own(&self, handle: Handle, end: End) -> Owned {
        Owned { owner: self.clone(), handle, end }
    }

    /// Returns the number of objects that were not destroyed, and whose errors were not returned yet.
    pub(super) fn failures(&self) -> usize {
        lock(&self.failures).len()
    }

    pub(super) fn take_failures(&self) -> Vec<HcaError> {
        std::mem::take(&mut lock(&self.failures))
    }
}

/// An object of a NIC.
#[derive(Debug)]
pub(super) struct Owned {
    owner: Owner,
    handle: Handle,
    end: End,
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Err(error) = (self.end)(&*self.owner.hca, self.handle) {
            lock(&self.owner.failures).push(error);
        }
    }
}

/// Objects that are destroyed in the reverse order of their creation, then the memory that they use. A shared object is
/// destroyed with its last owner.
#[derive(Debug)]
pub(super) struct Stack {
    objects: Vec<Arc<Owned>>,
    memory: MemorySlice,
    owner: Owner,
}

impl Stack {
    pub(super) fn new(owner: &Owner, memory: MemorySlice) -> Self {
        Self { objects: Vec::new(), memory, owner: owner.clone() }
    }

    pub(super) fn push(&mut self, object: impl Into<Arc<Owned>>) {
        self.objects.push(object.into());
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let before = self.owner.failures();
        while self.objects.pop().is_some() {}
        if self.owner.failures() != before {
            // The NIC may write to the memory of an object that was not destroyed, as long as the process lives.
            std::mem::forget(self.memory.clone());
        }
    }
}
