// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables of the engine, which the host changes while no kernel uses them.

use super::reason::{Answer, Reason};
use super::{HcaError, no_engine};
use gin_gpu::{Device, GpuError, Memory, MemoryKind};
use gin_soft_nic::kernel;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Elements of plain data with the layout of C.
#[derive(Debug)]
pub(super) enum Table<T> {
    /// Ordinary memory.
    Own(Vec<T>),
    /// Pinned memory, from which a kernel copies.
    Pinned(Pinned<T>),
}

/// Elements in pinned memory, with room for a copy in device memory.
#[derive(Debug)]
pub(super) struct Pinned<T> {
    home: Arc<Memory>,
    here: Arc<Memory>,
    count: usize,
    of: PhantomData<T>,
}

impl<T: Copy> Table<T> {
    /// Moves the elements to pinned memory with room for `capacity` elements.
    ///
    /// # Errors
    /// An error of the device.
    pub(super) fn pin(&mut self, device: &Arc<dyn Device>, capacity: usize) -> Result<(), GpuError> {
        let capacity = capacity.max(self.len());
        let new = |kind| Memory::new(device, kind, (capacity * size_of::<T>()) as u64);
        let (home, here) = (new(MemoryKind::Pinned)?, new(MemoryKind::Device)?);
        let mut pinned = Pinned { home, here, count: 0, of: PhantomData };
        for &element in self.iter() {
            pinned.add(element);
        }
        *self = Self::Pinned(pinned);
        Ok(())
    }

    /// Adds an element.
    ///
    /// # Errors
    /// [`Reason::Full`].
    pub(super) fn push(&mut self, element: T) -> Answer<()> {
        match self {
            Self::Own(elements) => elements.push(element),
            Self::Pinned(pinned) => {
                Reason::Full.refuse_if(((pinned.count + 1) * size_of::<T>()) as u64 > pinned.home.bytes())?;
                pinned.add(element);
            }
        }
        Ok(())
    }

    /// Returns the addresses by which a kernel finds the table.
    ///
    /// # Errors
    /// If it was not pinned.
    pub(super) fn place(&self) -> Result<kernel::Table, HcaError> {
        match self {
            Self::Own(_) => Err(no_engine("a table is not where a kernel reaches it")),
            Self::Pinned(Pinned { home, here, count, .. }) => {
                Ok(kernel::Table { home: home.address(), here: here.address(), count: *count as u64 })
            }
        }
    }
}

impl<T> Pinned<T> {
    fn start(&self) -> *mut T {
        std::ptr::with_exposed_provenance_mut(self.home.address() as usize)
    }

    /// Checks that there is room for one more element.
    fn add(&mut self, element: T) {
        // Safety: within the allocation, which is aligned to 256. No other code uses it while no kernel runs.
        unsafe { self.start().add(self.count).write(element) };
        self.count += 1;
    }
}

impl<T> Deref for Table<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Own(elements) => elements,
            // Safety: the elements are initialised. A kernel that used them in between stored valid elements.
            Self::Pinned(pinned) => unsafe { std::slice::from_raw_parts(pinned.start(), pinned.count) },
        }
    }
}

impl<T> DerefMut for Table<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Own(elements) => elements,
            // Safety: as above. Only the owner of the table uses it while no kernel runs.
            Self::Pinned(pinned) => unsafe { std::slice::from_raw_parts_mut(pinned.start(), pinned.count) },
        }
    }
}
