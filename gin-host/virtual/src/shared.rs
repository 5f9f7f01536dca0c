// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared memory of a block.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use gin_device::exec::SharedKey;

/// Largest shared memory of a block, static and dynamic together, in bytes (CUDA C++ programming guide, compute
/// capability 9.0).
pub const SHARED_LIMIT: usize = 227 << 10;
/// Largest static shared memory of a block, in bytes: `ptxas` refuses more. Dynamic shared memory may reach
/// [`SHARED_LIMIT`].
pub const STATIC_SHARED_LIMIT: usize = 48 << 10;

/// Byte that fills dynamic shared memory when a block starts. As on a GPU, a kernel may not rely on its contents.
const DYNAMIC_FILL: u8 = 0xcd;
/// The key of dynamic shared memory. The others are addresses.
const DYNAMIC_KEY: usize = 0;
const DYNAMIC_ALIGN: usize = 128;

struct Segment {
    key: usize,
    pointer: NonNull<u8>,
    layout: Layout,
    /// The bytes as the engine of bulk copies knows them, once one uses the segment.
    shown: Option<Vec<u128>>,
}

impl Segment {
    /// Returns the bytes as the engine of bulk copies knows them: at first the bytes that the segment was filled with.
    /// Their address is that of the segment modulo 16.
    fn shown(&mut self) -> *mut u8 {
        let fill = if self.key == DYNAMIC_KEY { DYNAMIC_FILL } else { 0 };
        let units = self.layout.size().div_ceil(16) + 1;
        let shown = self.shown.get_or_insert_with(|| vec![u128::from_ne_bytes([fill; 16]); units]);
        shown.as_mut_ptr().cast::<u8>().wrapping_add(self.pointer.as_ptr().addr() % 16)
    }

    /// Returns the offset of an address, if the segment has this many bytes there.
    fn offset(&self, address: u64, bytes: usize) -> Option<usize> {
        let offset = (address as usize).checked_sub(self.pointer.as_ptr().expose_provenance())?;
        (offset < self.layout.size() && bytes <= self.layout.size() - offset).then_some(offset)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Safety: `pointer` was allocated with this layout.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) }
    }
}

/// The shared memory of one block: its static segments by key, and the dynamic segment.
#[derive(Default)]
pub(crate) struct SharedSegments {
    segments: Vec<Segment>,
    dynamic: Option<(Segment, usize)>,
    /// Bytes of the static segments, with the gaps of their alignment.
    bytes: usize,
}

impl SharedSegments {
    /// Allocates `bytes` bytes of dynamic shared memory. The caller has checked the limit.
    pub(crate) fn with_dynamic(bytes: usize) -> Self {
        let mut segments = SharedSegments::default();
        if bytes > 0 {
            // An invalid layout cannot occur: size and alignment are small and valid.
            let Ok(layout) = Layout::from_size_align(bytes, DYNAMIC_ALIGN) else { return SharedSegments::default() };
            // Safety: the size is not zero.
            let Some(pointer) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
            // Safety: `bytes` bytes were just allocated here.
            unsafe { pointer.write_bytes(DYNAMIC_FILL, bytes) };
            segments.dynamic = Some((Segment { key: DYNAMIC_KEY, pointer, layout, shown: None }, bytes));
        }
        segments
    }

    pub(crate) fn dynamic(&self) -> (*mut u8, usize) {
        match &self.dynamic {
            Some((segment, bytes)) => (segment.pointer.as_ptr(), *bytes),
            None => (NonNull::<u128>::dangling().as_ptr().cast(), 0),
        }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Segment> {
        self.segments.iter_mut().chain(self.dynamic.as_mut().map(|(segment, _)| segment))
    }

    /// Returns whether this many bytes at an address are shared memory.
    pub(crate) fn contains(&mut self, address: u64, bytes: u32) -> bool {
        self.all().any(|segment| segment.offset(address, bytes as usize).is_some())
    }

    /// Shows the engine of bulk copies all bytes as they are now.
    pub(crate) fn show(&mut self) {
        for segment in self.all() {
            let (bytes, from) = (segment.layout.size(), segment.pointer.as_ptr());
            let to = segment.shown();
            // Safety: both have these bytes, and nothing changes them meanwhile.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
        }
    }

    /// Returns the address of the engine's own copy of the bytes at `address`, which [is shared memory](Self::contains)
    /// and a multiple of 16.
    pub(crate) fn shown(&mut self, address: u64) -> u64 {
        let found = self.all().find_map(|segment| segment.offset(address, 1).map(|offset| (segment, offset)));
        let Some((segment, offset)) = found else { unreachable!("a copy was checked when it started") };
        segment.shown().expose_provenance() as u64 + offset as u64
    }

    /// Returns the segment of this key, zeroed when it is new.
    pub(crate) fn get(&mut self, SharedKey { key, bytes, align }: SharedKey) -> Result<*mut u8, String> {
        if let Some(segment) = self.segments.iter().find(|segment| segment.key == key) {
            if segment.layout.size() != bytes.max(1) || segment.layout.align() != align {
                let (had, had_align) = (segment.layout.size(), segment.layout.align());
                return Err(format!(
                    "static shared memory of {bytes} bytes aligned to {align} was declared with {had} bytes aligned to {had_align} before"
                ));
            }
            return Ok(segment.pointer.as_ptr());
        }
        let Ok(layout) = Layout::from_size_align(bytes.max(1), align) else {
            return Err(format!("static shared memory of {bytes} bytes cannot be aligned to {align}"));
        };
        let had = self.bytes;
        let total = had.next_multiple_of(align).saturating_add(bytes);
        if total > STATIC_SHARED_LIMIT {
            return Err(format!(
                "{total} bytes of static shared memory in a block ({bytes} more than {had}), the limit is \
                 {STATIC_SHARED_LIMIT}; the launch may ask for dynamic shared memory up to {SHARED_LIMIT} bytes"
            ));
        }
        let dynamic = self.dynamic().1;
        if total + dynamic > SHARED_LIMIT {
            return Err(format!(
                "{total} bytes of static and {dynamic} bytes of dynamic shared memory in a block, the limit of both \
                 together is {SHARED_LIMIT}"
            ));
        }
        // Safety: the size is not zero.
        let Some(pointer) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        self.bytes = total;
        self.segments.push(Segment { key, pointer, layout, shown: None });
        Ok(pointer.as_ptr())
    }
}
