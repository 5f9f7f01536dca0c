// SPDX-License-Identifier: MIT OR Apache-2.0
//! Received rows in other layouts.

use crate::{EpError, Group};
use gin_device::kernel::LaunchArg;
use gin_ep_kernels as kernels;
use gin_ep_kernels::Sizes;
use gin_ep_kernels::permute::{EXPERT_MAJOR_PACKED, EXPERT_MAJOR_PADDED, FLAT};
use gin_gpu::{Argument, KernelArg, Memory, MemoryKind, MemorySlice};

/// A layout of received rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// One row for each received one, rank-major: by source and token, without gaps. With
    /// [`max_rows`](crate::GroupConfig::max_rows) received rows lie so, and nothing is copied. Then there is a gap
    /// where places are kept for a silent rank.
    Flat,
    /// `[expert][source][token]`: one row for each id whose expert is on this rank, in zones with room for all tokens.
    ExpertMajorPadded,
    /// Zones of experts, one row for each id, by source, token and position of the id. The first row of a zone is a
    /// multiple of `align`, a power of two; zeros fill the gaps.
    ExpertMajorPacked {
        /// Number of rows.
        align: u32,
    },
    /// The places of [`ExpertMajorPacked`](Self::ExpertMajorPacked) rows without gaps, and for each of them the
    /// received row: nothing is copied.
    ExpertMajorIndices,
}

/// Received rows, or a [`Permuted`] of them, as a parameter of kernels. It has no functions on the host, because
/// it may hold addresses of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct View<P>(pub(crate) P);

impl<P: Copy + 'static> KernelArg for View<P> {
    fn argument(&self) -> Argument {
        Argument::value(self.0)
    }
}

macro_rules! launch_arg {
    ($($param:ty),*) => { $(
        impl LaunchArg<$param> for View<$param> {
            unsafe fn into_param(self) -> $param {
                self.0
            }
        }
    )* };
}

launch_arg!(kernels::ReceivedRows, kernels::PermutedRows);

/// Memory for received rows in a [`Layout`].
#[derive(Debug)]
pub struct Permuted {
    pub(crate) layout: Layout,
    pub(crate) sizes: Sizes,
    pub(crate) capacity: u32,
    rows: Option<MemorySlice>,
    source_info: MemorySlice,
    row_map: MemorySlice,
    counts: MemorySlice,
}

impl Permuted {
    /// Allocates memory for at most `rows` rows; a padded layout has a row for each token of each rank and expert,
    /// whatever `rows` is. If more rows arrive, the first ones have places, and the group's status reports
    /// [`Code::TooManyRows`](crate::Code::TooManyRows).
    ///
    /// # Errors
    /// [`EpError::Limit`], or an error of the device.
    pub fn new(group: &Group, layout: Layout, rows: u32) -> Result<Self, EpError> {
        let sizes = group.sizes();
        let experts = u64::from(sizes.local());
        let capacity = match layout {
            Layout::ExpertMajorPadded => experts * sizes.room(),
            _ => rows.into(),
        };
        // The places are words, and the last one stands for none.
        let max = u64::from(u32::MAX - 1);
        if capacity == 0 || capacity > max {
            let limit = if capacity == 0 { "at least 1".to_owned() } else { format!("at most {max}") };
            return Err(EpError::Limit { what: "the number of rows of a layout", given: capacity, limit });
        }
        if let Layout::ExpertMajorPacked { align } = layout
            && !(align.is_power_of_two() && align <= 1 << 16)
        {
            let limit = "a power of two, at most 65536".to_owned();
            return Err(EpError::Limit { what: "the alignment of zones", given: align.into(), limit });
        }
        // Kernels add up rows and gaps of all zones in a word.
        if let Layout::ExpertMajorPacked { .. } | Layout::ExpertMajorIndices = layout {
            let align = if let Layout::ExpertMajorPacked { align } = layout { u64::from(align) } else { 1 };
            let given = sizes.room() * u64::from(sizes.topk) + experts * (align - 1);
            if given > u64::from(u32::MAX) {
                let limit = format!("at most {}; set less for `align`, tokens or `max_rows`", u32::MAX);
                return Err(EpError::Limit {
                    what: "the number of rows and gaps that a layout can have",
                    given,
                    limit,
                });
            }
        }
        let memory = |bytes: u64| -> Result<MemorySlice, EpError> {
            Ok(Memory::new(group.state.comm.gpu(), MemoryKind::Device, bytes.next_multiple_of(16))?.whole())
        };
        let each = if layout == Layout::Flat { 1 } else { u64::from(sizes.topk) };
        let counts = match layout {
            Layout::Flat => 0,
            Layout::ExpertMajorPadded => experts * u64::from(sizes.ranks),
            Layout::ExpertMajorPacked { .. } | Layout::ExpertMajorIndices => 2 * experts,
        };
        let part_counts = if layout == Layout::Flat { 0 } else { kernels::part_counts(&sizes) };
        Ok(Self {
            layout,
            sizes,
            capacity: capacity as u32,
            rows: match layout {
                Layout::ExpertMajorIndices => None,
                // They are where they were received.
                Layout::Flat if sizes.is_shared() => None,
                _ => Some(memory(capacity * u64::from(sizes.row_bytes))?),
            },
            source_info: memory(4 * capacity)?,
            row_map: memory(4 * sizes.room() * each)?,
            // Kernels count rows of parts behind them.
            counts: memory(4 * (1 + counts + part_counts))?.memory().slice(0..4 * (1 + counts))?,
        })
    }

    /// Returns the memory of the rows; `None` for indices alone, or if the layout is flat and all sources share a
    /// region: then they are [there](crate::Received::region).
    pub fn rows(&self) -> Option<&MemorySlice> {
        self.rows.as_ref()
    }

    /// Returns the memory of a word for each row: `source << 21 | row << 5 | k`, its source, received row and position
    /// of the id; `u32::MAX` for a gap. In a padded layout only the rows below the counts have them.
    pub fn source_info(&self) -> &MemorySlice {
        &self.source_info
    }

    /// Returns the memory of the words that [`fetch_counts`](Self::fetch_counts) copies, for kernels.
    pub fn counts(&self) -> &MemorySlice {
        &self.counts
    }

    /// Returns the maximum number of rows.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Copies the number of rows with gaps to the host, then for each expert of this rank the number of its rows, from
    /// each source if the layout is padded, then for each expert the number of its first row, if it is packed. A flat
    /// layout has the first only. The stream is done.
    ///
    /// # Errors
    /// An error of the device.
    pub fn fetch_counts(&self) -> Result<Vec<u32>, EpError> {
        let mut words = vec![0u32; (self.counts.bytes() / 4) as usize];
        self.counts.read(0, &mut words)?;
        Ok(words)
    }

    /// Checks that it was made for a group with these sizes.
    pub(crate) fn check(&self, sizes: &Sizes) -> Result<(), EpError> {
        if self.sizes == *sizes {
            return Ok(());
        }
        let remedy = "make one for this group";
        Err(EpError::Unsuited { what: "permuted rows of a group with other sizes", remedy })
    }

    /// Returns the parameter of kernels. `region` is the address of the received rows, if all sources share a region.
    pub(crate) fn view(&self, received: kernels::ReceivedRows, region: Option<u64>) -> kernels::PermutedRows {
        let rows = self.rows.as_ref().map(MemorySlice::address);
        let layout = kernels::permute::LayoutMemory {
            rows: rows.or(region.filter(|_| self.is_received())).unwrap_or(0),
            source_info: self.source_info.address(),
            row_map: self.row_map.address(),
            counts: self.counts.address(),
            capacity: self.capacity,
            align: if let Layout::ExpertMajorPacked { align } = self.layout { align } else { 1 },
            kind: match self.layout {
                Layout::Flat => FLAT,
                Layout::ExpertMajorPadded => EXPERT_MAJOR_PADDED,
                Layout::ExpertMajorPacked { .. } | Layout::ExpertMajorIndices => EXPERT_MAJOR_PACKED,
            },
            experts: self.sizes.local(),
        };
        // Safety: the memory was made for these sizes, which the group has.
        unsafe { kernels::PermutedRows::new(received, layout) }
    }

    /// Returns the memory that kernels use.
    pub(crate) fn used(&self) -> Vec<&MemorySlice> {
        self.rows.iter().chain([&self.source_info, &self.row_map, &self.counts]).collect()
    }

    /// Returns the address of the places.
    pub(crate) fn row_map(&self) -> u64 {
        self.row_map.address()
    }

    /// Returns whether the rows are the received ones, not copies.
    pub(crate) fn is_received(&self) -> bool {
        self.layout == Layout::Flat && self.sizes.is_shared()
    }

    /// Returns whether there is a row for each id.
    pub(crate) fn is_expert_major(&self) -> bool {
        self.layout != Layout::Flat
    }
}
