// SPDX-License-Identifier: MIT OR Apache-2.0
//! Received rows in other layouts.

use crate::tokens::address;
use crate::{EpError, Group};
use gin_device::kernel::LaunchArg;
use gin_ep_kernels as kernels;
use gin_ep_kernels::Sizes;
use gin_ep_kernels::permute::{EXPERT_MAJOR_FIXED, EXPERT_MAJOR_PACKED, EXPERT_MAJOR_PADDED, FLAT};
use gin_gpu::{Argument, KernelArg, Memory, MemoryKind, MemorySlice};

/// A layout of received rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// One row for each received one, rank-major: by source and token, without gaps. With
    /// [`max_rows`](crate::GroupConfig::max_rows) received rows lie so, and nothing is copied. Then there is a gap
    /// where places are kept for a silent rank.
    Flat,
    /// `[source][row]`: one row for each received one, by token, in zones with room for all tokens of a rank.
    RankMajorPadded,
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
    /// `[expert][row]`: one row for each id, by source, token and position of the id, without gaps. The zone of an
    /// expert has room for as many rows as a rank may receive: for each rank the tokens of the group, or
    /// [`max_rows`](crate::GroupConfig::max_rows). The layout also has the rows' tokens, and scales as columns.
    ExpertMajorFixed,
}

impl Layout {
    /// Returns whether there is a row for each id.
    pub(crate) const fn is_expert_major(self) -> bool {
        !matches!(self, Self::Flat | Self::RankMajorPadded)
    }

    /// Returns whether zones have room for all rows that may arrive.
    const fn has_fixed_places(self) -> bool {
        matches!(self, Self::RankMajorPadded | Self::ExpertMajorPadded | Self::ExpertMajorFixed)
    }
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
#[derive(Clone, Debug)]
pub struct Permuted {
    pub(crate) layout: Layout,
    pub(crate) sizes: Sizes,
    pub(crate) capacity: u32,
    rows: Option<MemorySlice>,
    scales: Option<MemorySlice>,
    tokens: Option<MemorySlice>,
    source_info: MemorySlice,
    row_map: MemorySlice,
    counts: MemorySlice,
    /// Counts of parts, if the layout is expert-major.
    parts: MemorySlice,
}

/// Memory of a program in which kernels store a layout, in place of the memory of a [`Permuted`]. `None` keeps the
/// latter.
#[derive(Clone, Copy, Default, Debug)]
pub struct PermutedMemory<'a> {
    /// The [rows](Permuted::rows), at a multiple of 16 bytes.
    pub rows: Option<&'a MemorySlice>,
    /// The [scales](Permuted::scales), at a multiple of 4 bytes.
    pub scales: Option<&'a MemorySlice>,
    /// The [tokens](Permuted::tokens), at a multiple of 4 bytes.
    pub tokens: Option<&'a MemorySlice>,
    /// The [counts](Permuted::counts), at a multiple of 8 bytes.
    pub counts: Option<&'a MemorySlice>,
}

impl Permuted {
    /// Allocates memory for at most `rows` rows; a padded or fixed layout has room for all rows that may arrive,
    /// whatever `rows` is. If more rows arrive, the first ones have places, and the group's status reports
    /// [`Code::TooManyRows`](crate::Code::TooManyRows).
    ///
    /// # Errors
    /// [`EpError::Limit`], or an error of the device.
    pub fn new(group: &Group, layout: Layout, rows: u32) -> Result<Self, EpError> {
        let mut permuted = Self::without_rows(group, layout, rows)?;
        let (sizes, capacity) = (permuted.sizes, u64::from(permuted.capacity));
        let is_fixed = layout == Layout::ExpertMajorFixed;
        // Otherwise they are where they were received.
        if permuted.copies() {
            permuted.rows = Some(memory(group, capacity * u64::from(sizes.row_bytes))?);
        }
        if is_fixed && sizes.scale_bytes != 0 {
            permuted.check_scales()?;
            permuted.scales = Some(memory(group, capacity * u64::from(sizes.scale_bytes))?);
        }
        if is_fixed {
            permuted.tokens = Some(memory(group, 4 * capacity)?);
        }
        Ok(permuted)
    }

    /// Allocates memory as [`new`](Self::new), but for rows, scales and tokens. Kernels store the counts and the rows'
    /// places and source infos, and copy no row, unless [`with_memory`](Self::with_memory) adds memory for them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn without_rows(group: &Group, layout: Layout, rows: u32) -> Result<Self, EpError> {
        let sizes = group.sizes();
        let capacity = capacity(&sizes, layout, rows)?;
        let experts = u64::from(sizes.local());
        let (each, part_counts) =
            if layout.is_expert_major() { (u64::from(sizes.topk), kernels::part_counts(&sizes)) } else { (1, 0) };
        let counts = match layout {
            Layout::Flat => 1,
            Layout::RankMajorPadded => 1 + u64::from(sizes.ranks),
            Layout::ExpertMajorPadded => 1 + experts * u64::from(sizes.ranks),
            Layout::ExpertMajorPacked { .. } | Layout::ExpertMajorIndices => 1 + 2 * experts,
            Layout::ExpertMajorFixed => 2 + 2 * experts * (1 + u64::from(sizes.ranks)),
        };
        Ok(Self {
            layout,
            sizes,
            capacity,
            rows: None,
            scales: None,
            tokens: None,
            source_info: memory(group, 4 * u64::from(capacity))?,
            row_map: memory(group, 4 * sizes.room() * each)?,
            counts: memory(group, 4 * counts)?.memory().slice(0..4 * counts)?,
            parts: memory(group, 4 * part_counts.max(1))?,
        })
    }

    /// Returns the same layout for at most `rows` rows, so that memory of the program and returned rows may have as
    /// few. The places of rows are in memory that both share.
    ///
    /// # Errors
    /// [`EpError::Limit`] for more rows than this has, [`EpError::Unsuited`] for a layout of zones with fixed places.
    pub fn with_capacity(&self, rows: u32) -> Result<Self, EpError> {
        if self.layout.has_fixed_places() {
            let what = "another number of rows for a layout whose zones have fixed places";
            return Err(EpError::Unsuited { what, remedy: "use a flat or packed layout" });
        }
        if rows > self.capacity {
            let (what, limit) = ("the number of rows of a layout", format!("at most {}", self.capacity));
            return Err(EpError::Limit { what, given: rows.into(), limit });
        }
        Ok(Self { capacity: rows, ..self.clone() })
    }

    /// Returns the same layout in memory of the program. The places of rows are in memory that both share, so a combine
    /// takes either, after the dispatch into any of them.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`] for memory that the layout does
    /// not use, [`EpError::Limit`] for scales whose bytes are no multiple of 4.
    pub fn with_memory(&self, memory: &PermutedMemory<'_>) -> Result<Self, EpError> {
        let (sizes, capacity) = (&self.sizes, u64::from(self.capacity));
        let (rows, scales) = (memory.rows.or(self.rows.as_ref()), memory.scales.or(self.scales.as_ref()));
        if memory.rows.is_some() && !self.copies() {
            let what = "memory for rows of a layout that copies none";
            return Err(EpError::Unsuited { what, remedy: "leave it out, or use another layout" });
        }
        if (memory.tokens.is_some() || memory.scales.is_some()) && self.layout != Layout::ExpertMajorFixed {
            let what = "memory for tokens or scales of a layout that does not store them";
            return Err(EpError::Unsuited { what, remedy: "leave it out, or use the layout with fixed zones" });
        }
        if memory.scales.is_some() && sizes.scale_bytes == 0 {
            let what = "memory for scales in a group whose rows have none";
            return Err(EpError::Unsuited { what, remedy: "leave it out, or configure an `Element` with scales" });
        }
        if (memory.tokens.is_some() || memory.scales.is_some()) && rows.is_none() {
            let what = "memory for tokens or scales of rows that are not copied";
            return Err(EpError::Unsuited { what, remedy: "add memory for the rows" });
        }
        for (what, slice, needed, align) in [
            ("the memory of permuted rows", memory.rows, capacity * u64::from(sizes.row_bytes), 16),
            ("the memory of permuted scales", memory.scales, capacity * u64::from(sizes.scale_bytes), 4),
            ("the memory of the tokens of permuted rows", memory.tokens, 4 * capacity, 4),
            ("the memory of the counts of a layout", memory.counts, self.counts.bytes(), 8),
        ] {
            slice.map(|slice| address(what, slice, needed, align)).transpose()?;
        }
        if memory.scales.is_some() {
            self.check_scales()?;
        }
        Ok(Self {
            rows: rows.cloned(),
            scales: scales.cloned(),
            tokens: memory.tokens.or(self.tokens.as_ref()).cloned(),
            counts: memory.counts.unwrap_or(&self.counts).clone(),
            ..self.clone()
        })
    }

    /// Checks that scales are whole words, of which a fixed layout has columns.
    fn check_scales(&self) -> Result<(), EpError> {
        if self.sizes.scale_bytes.is_multiple_of(4) {
            return Ok(());
        }
        let (what, given) = ("the number of bytes of the scales of a row", u64::from(self.sizes.scale_bytes));
        let limit = "a multiple of 4 in the layout with fixed zones, which has columns of words".to_owned();
        Err(EpError::Limit { what, given, limit })
    }

    /// Returns whether the layout has copies of the rows, if there is memory for them.
    fn copies(&self) -> bool {
        self.layout != Layout::ExpertMajorIndices && !self.is_received()
    }

    /// Returns the layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the memory of the rows; `None` for indices alone, or if the layout is flat and all sources share a
    /// region: then they are [there](crate::Received::region).
    pub fn rows(&self) -> Option<&MemorySlice> {
        self.rows.as_ref()
    }

    /// Returns the memory of the rows' scales, if the layout is fixed and its rows have scales: `[expert][word][row]`,
    /// where a row's scales are words of 4 bytes, and [`rows`](Self::rows) has `[expert][row]`. So the words of one row
    /// are as far from each other as zones have rows.
    pub fn scales(&self) -> Option<&MemorySlice> {
        self.scales.as_ref()
    }

    /// Returns the memory of a word for each row, if the layout is fixed: the number of the row's token at its source.
    /// Only the rows below the counts have one.
    pub fn tokens(&self) -> Option<&MemorySlice> {
        self.tokens.as_ref()
    }

    /// Returns the memory of a word for each row: `source << 21 | row << 5 | k`, its source, received row and position
    /// of the id; `u32::MAX` for a gap. In a padded or fixed layout only the rows below the counts have them.
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
    /// each source if the layout is padded, then for each expert the number of its first row, if it is packed or fixed.
    /// A flat layout has the first only, a rank-major padded one then the number of rows from each source. In a fixed
    /// layout of `n` experts, pairs of words follow from word `2 + 2 * n` on: for each expert and source the number of
    /// its rows, and the number of its first row in the zone. The word before them has no meaning. The stream is done.
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
            parts: self.parts.address(),
            scales: self.scales.as_ref().map_or(0, MemorySlice::address),
            tokens: self.tokens.as_ref().map_or(0, MemorySlice::address),
            capacity: self.capacity,
            align: if let Layout::ExpertMajorPacked { align } = self.layout { align } else { 1 },
            zone: match self.layout {
                Layout::RankMajorPadded | Layout::ExpertMajorPadded => self.sizes.tokens,
                Layout::ExpertMajorFixed => self.sizes.room() as u32,
                _ => 0,
            },
            kind: match self.layout {
                Layout::Flat | Layout::RankMajorPadded => FLAT,
                Layout::ExpertMajorPadded => EXPERT_MAJOR_PADDED,
                Layout::ExpertMajorPacked { .. } | Layout::ExpertMajorIndices => EXPERT_MAJOR_PACKED,
                Layout::ExpertMajorFixed => EXPERT_MAJOR_FIXED,
            },
            experts: self.sizes.local(),
        };
        // Safety: the memory was made for these sizes, which the group has.
        unsafe { kernels::PermutedRows::new(received, layout) }
    }

    /// Returns the memory that kernels use.
    pub(crate) fn used(&self) -> Vec<&MemorySlice> {
        let own = [&self.source_info, &self.row_map, &self.counts, &self.parts];
        self.rows.iter().chain(&self.scales).chain(&self.tokens).chain(own).collect()
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
        self.layout.is_expert_major()
    }
}

/// Returns the number of rows of a layout, if it is within the limits.
fn capacity(sizes: &Sizes, layout: Layout, rows: u32) -> Result<u32, EpError> {
    let experts = u64::from(sizes.local());
    let capacity = match layout {
        Layout::RankMajorPadded => u64::from(sizes.ranks) * u64::from(sizes.tokens),
        Layout::ExpertMajorPadded | Layout::ExpertMajorFixed => experts * sizes.room(),
        _ => rows.into(),
    };
    // The places are words, and the last one stands for none.
    let max = u64::from(u32::MAX - 1);
    if capacity == 0 || capacity > max {
        let limit = if capacity == 0 { "at least 1".to_owned() } else { format!("at most {max}") };
        return Err(EpError::Limit { what: "the number of rows of a layout", given: capacity, limit });
    }
    let align = if let Layout::ExpertMajorPacked { align } = layout { align } else { 1 };
    if !align.is_power_of_two() || align > 1 << 16 {
        let limit = "a power of two, at most 65536".to_owned();
        return Err(EpError::Limit { what: "the alignment of zones", given: align.into(), limit });
    }
    // Kernels add up rows and gaps of all zones in a word.
    let given = sizes.room() * u64::from(sizes.topk) + experts * u64::from(align - 1);
    if let Layout::ExpertMajorPacked { .. } | Layout::ExpertMajorIndices = layout
        && given > u64::from(u32::MAX)
    {
        let limit = format!("at most {}; set less for `align`, tokens or `max_rows`", u32::MAX);
        return Err(EpError::Limit { what: "the number of rows and gaps that a layout can have", given, limit });
    }
    Ok(capacity as u32)
}

/// Allocates memory of a layout on a group's device.
fn memory(group: &Group, bytes: u64) -> Result<MemorySlice, EpError> {
    Ok(Memory::new(group.state.comm.gpu(), MemoryKind::Device, bytes.next_multiple_of(16))?.whole())
}
