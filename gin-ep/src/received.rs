// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatches in flight: sent, received.

use crate::grouped::{Experts, GroupedMatmul, Products};
use crate::slot::{Detached, DispatchId, Slot};
use crate::{Combine, EpError, OverlappedMatmul, Permuted, Rows, View, Weights};
use gin_ep_kernels as kernels;
use gin_ep_kernels::RECEIVE;
use gin_gpu::{KernelArg, LaunchConfig, MemorySlice, Plain, Stream};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A dispatch that was sent. Until it is received, the slot takes no other. Dropping it warns:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use gin_ep::{EpError, Slot, Tokens};
/// # use gin_gpu::Stream;
/// # use std::sync::Arc;
/// fn unheard(slot: &mut Slot, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<(), EpError> {
///     slot.dispatch(stream, tokens)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
#[must_use = "the slot takes no other dispatch before this one is received"]
pub struct Sent<'l> {
    pub(crate) slot: &'l mut Slot,
    pub(crate) tokens: kernels::TokenParams,
}

impl<'l> Sent<'l> {
    /// Waits, in the order of the stream, for the rows of all ranks. The call returns at once.
    ///
    /// # Errors
    /// An error of the device.
    pub fn receive(self, stream: &Arc<dyn Stream>) -> Result<Received<'l>, EpError> {
        let Self { slot, tokens } = self;
        // A dispatch whose receive fails has ended.
        let detached = slot.detached.take();
        slot.extend(stream, &[])?;
        // One warp waits.
        slot.launch_dispatch(stream, &slot.group.dispatch, LaunchConfig::new(1, 32), tokens, RECEIVE)?;
        Ok(received(slot, tokens, detached))
    }

    /// Ends the borrow of the slot, not the dispatch. [`Slot::sent`] returns the dispatch.
    pub fn detach(self) -> DispatchId {
        self.slot.detach(self.tokens, false)
    }

    /// Waits, in the order of the stream, for the rows of all ranks, and multiplies the rows of each expert by its
    /// weights as they arrive. The products return to the ranks of their tokens as they are done, so a
    /// [`combine`](Received::combine) of [`Rows::Returned`] follows. `weights` are as in
    /// [`Experts::new`], with a row of inner elements as long as a received row; with rows of E4M3 they are
    /// [`Weights::e4m3`]. The call returns at once.
    ///
    /// The bits are the same as by [`receive`](Self::receive), [`Received::permute`] and [`Received::multiply`].
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`] for products of another group:
    /// then the rows are received and given up. An error of the device.
    pub fn multiply<'a>(
        self,
        stream: &Arc<dyn Stream>,
        early: &'a OverlappedMatmul,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Received<'l>, EpError> {
        let (params, used) = match early.params((self.slot.group.number, self.slot.number), weights.into()) {
            Ok(params) => params,
            Err(error) => {
                self.receive(stream)?.release();
                return Err(error);
            }
        };
        let Self { slot, tokens } = self;
        let detached = slot.detached.take();
        slot.extend(stream, &used)?;
        let (group, view) = (&slot.group, View(slot.view()));
        let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &view, &Plain(params)];
        // Safety: arena and slot are the communicator's, the memory was checked and is kept, the dispatch was sent and
        // not received, and kernels of a stream follow each other.
        unsafe { stream.launch(&early.multiplier.kernel, early.multiplier.shape, &arguments)? };
        Ok(received(slot, tokens, detached))
    }
}

/// Returns a dispatch whose rows were received, detached if it was.
fn received(slot: &mut Slot, tokens: kernels::TokenParams, detached: Option<Detached>) -> Received<'_> {
    slot.state().is_unheard.store(false, Ordering::Relaxed);
    slot.detached = detached.map(|detached| Detached { is_received: true, ..detached });
    Received { slot, tokens }
}

/// A row that was received, as a copy for the host.
#[derive(Clone, PartialEq, Debug)]
pub struct ReceivedRow {
    /// The number of its token at the source.
    pub token: u32,
    /// For each id the number of its expert on this rank, or -1.
    pub experts: Vec<i32>,
    /// For each id its weight; 0 where `experts` is -1.
    pub weights: Vec<f32>,
    /// The bytes of the row.
    pub row: Vec<u8>,
    /// The bytes of its scales.
    pub scales: Vec<u8>,
}

/// A dispatch that was received. [`combine`](Self::combine) and [`release`](Self::release) end it:
///
/// ```compile_fail,E0382
/// # use gin_ep::{Combine, EpError, Received, Rows};
/// # use gin_gpu::Stream;
/// # use std::sync::Arc;
/// fn combined(received: Received<'_>, stream: &Arc<dyn Stream>, sums: &Combine<'_>) -> Result<(), EpError> {
///     received.combine(stream, Rows::InPlace, sums)?;
///     received.view();
///     Ok(())
/// }
/// ```
///
/// ```compile_fail,E0382
/// # use gin_ep::Received;
/// fn released(received: Received<'_>) {
///     received.release();
///     received.view();
/// }
/// ```
#[derive(Debug)]
pub struct Received<'l> {
    pub(crate) slot: &'l mut Slot,
    pub(crate) tokens: kernels::TokenParams,
}

impl Received<'_> {
    /// Returns the received rows for kernels, which get it as a parameter. They run after the receive and before the
    /// combine, in the order of the stream.
    /// If the dispatch was captured in a graph, its rows have the same addresses in all replays.
    pub fn view(&self) -> View<kernels::ReceivedRows> {
        View(self.slot.view())
    }

    /// Ends the borrow of the slot, not the dispatch. [`Slot::received`] returns the dispatch.
    pub fn detach(self) -> DispatchId {
        self.slot.detach(self.tokens, true)
    }

    /// Returns the arena, and where in it the rows are, for programs that cannot pass the view to their kernels. All
    /// replays of a captured dispatch store their rows there.
    #[doc(hidden)]
    pub fn offsets(&self) -> (&MemorySlice, kernels::SlotOffsets) {
        let slot = &self.slot;
        (slot.group.arena.memory(), kernels::SlotOffsets::new(&slot.state().params()))
    }

    /// Puts the rows into another layout, in the order of the stream. Returns the parameter by which kernels find them.
    ///
    /// # Errors
    /// [`EpError::Unsuited`] for permuted rows of another group; an error of the device.
    pub fn permute(&mut self, stream: &Arc<dyn Stream>, to: &Permuted) -> Result<View<kernels::PermutedRows>, EpError> {
        let view = self.slot.permuted(to)?;
        self.slot.launch_permute(stream, to, view, None)?;
        Ok(View(view))
    }

    /// Adds up, for each received row, what this rank's experts made of it: expert-major permuted rows,
    /// [`Rows::Permuted`] or [`Rows::PermutedAt`], each times its weight, in the order of the ids, by `fma` in FP32,
    /// rounded once, or, with [`combine_f32`](crate::GroupConfig::combine_f32), not rounded. The experts' rows have the
    /// elements of the output. The sums replace the received rows, and [`combine`](Self::combine) returns them by
    /// [`Rows::InPlace`].
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`], an error of the device.
    pub fn reduce(&mut self, stream: &Arc<dyn Stream>, rows: Rows<'_>) -> Result<(), EpError> {
        let (group, view) = (&*self.slot.group, self.slot.view());
        let (to, rows, used) = rows.of_experts(group)?;
        self.slot.extend(stream, &used)?;
        let shape = LaunchConfig::new(group.shape.blocks() as u32, group.shape.threads() as u32);
        let arguments: [&dyn KernelArg; 2] = [&View(to.view(view, None)), &rows];
        // Safety: as for a layout, and the received rows have room for the sums.
        unsafe { stream.launch(&group.reduce, shape, &arguments)? };
        Ok(())
    }

    /// Multiplies the rows of each expert by its weights, in the order of the stream, and returns the products to the
    /// ranks of their tokens as they are done, or stores them here. [`combine`](Self::combine) follows, with
    /// [`Rows::Returned`] or [`Rows::PermutedAt`]; both give the same bits.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`] for permuted rows of another
    /// group or layout, an error of the device.
    pub fn multiply(
        &mut self,
        stream: &Arc<dyn Stream>,
        grouped: &GroupedMatmul,
        experts: &Experts<'_>,
        products: Products<'_>,
    ) -> Result<(), EpError> {
        let (slot, group) = (&self.slot, &self.slot.group);
        let received = (slot.view(), &group.sizes());
        let (layout, params, used) = experts.check((grouped, slot.number), received, products)?;
        slot.extend(stream, &used)?;
        let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &View(layout), &Plain(params)];
        // Safety: arena and slot are the communicator's, the memory was checked and is kept, the rows are received and
        // not yet combined, and kernels of a stream follow each other.
        unsafe { stream.launch(&grouped.multiplier.kernel, grouped.multiplier.shape, &arguments)? };
        Ok(())
    }

    /// Returns the memory of the received rows, if all sources share a region: [`GroupConfig::max_rows`] rows, each
    /// with the bytes of the longer one of a row there and a row back. `None` otherwise.
    ///
    /// # Errors
    /// An error of the device.
    ///
    /// [`GroupConfig::max_rows`]: crate::GroupConfig::max_rows
    pub fn region(&self) -> Result<Option<MemorySlice>, EpError> {
        self.slot.region()
    }

    /// Gives the rows up without a combine, as dropping does if the dispatch is not detached.
    pub fn release(self) {
        self.slot.detached = None;
    }

    /// Copies the rows to the host, for tests and tools: for each source its rows. The stream is done.
    ///
    /// # Errors
    /// An error of the device.
    pub fn fetch(&self) -> Result<Vec<Vec<ReceivedRow>>, EpError> {
        let (params, arena) = (&self.slot.state().params(), self.slot.group.arena.memory());
        let (sizes, mut all) = (&params.sizes, Vec::new());
        let offsets = kernels::SlotOffsets::new(params);
        for source in 0..sizes.ranks {
            let mut count = [0u64];
            arena.read(offsets.got(source), &mut count)?;
            let (number, topk) = (count[0] as usize, sizes.topk as usize);
            let (row_bytes, meta_words) = (sizes.row_bytes as usize, sizes.meta_bytes as usize / 4);
            let pitch = sizes.pitch as usize;
            let (mut bytes, mut meta) = (vec![0u8; number * pitch], vec![0u32; number * meta_words]);
            let mut first = [0u64];
            if let Some(offset) = offsets.offset(source) {
                arena.read(offset, &mut first)?;
            }
            let first = first[0] & u64::from(u32::MAX);
            if number > 0 {
                arena.read(offsets.rows(source) + first * u64::from(sizes.pitch), &mut bytes)?;
                arena.read(offsets.meta(source) + first * u64::from(sizes.meta_bytes), &mut meta)?;
            }
            let row = |(row, meta): (&[u8], &[u32])| {
                let experts = meta[1..=topk].iter().map(|&word| word as i32).collect();
                let weights = meta[1 + topk..][..topk].iter().map(|&word| f32::from_bits(word)).collect();
                let scales = &bytemuck::cast_slice::<u32, u8>(meta)[sizes.scales_at() as usize..];
                let scales = scales[..sizes.scale_bytes as usize].to_vec();
                ReceivedRow { token: meta[0], experts, weights, row: row[..row_bytes].to_vec(), scales }
            };
            let rows = bytes.chunks_exact(pitch).zip(meta.chunks_exact(meta_words)).map(row).collect();
            all.push(rows);
        }
        Ok(all)
    }

    /// Returns rows for each received one, and stores the sums of the returned rows, one for each of this rank's
    /// tokens. A token without experts gets zeros, or bias and old output.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`], an error of the device.
    pub fn combine(self, stream: &Arc<dyn Stream>, rows: Rows<'_>, combine: &Combine<'_>) -> Result<(), EpError> {
        let Self { slot, tokens } = self;
        slot.detached = None;
        let (group, params) = (&*slot.group, slot.state().params());
        let (sums, used) = combine.check(group, &tokens, rows)?;
        slot.extend(stream, &used)?;
        let (params, tokens, sums) = (Plain(params), Plain(tokens), Plain(sums));
        let mut arguments: Vec<&dyn KernelArg> = vec![&group.device, &group.arena, &params, &tokens, &sums];
        let network = slot.state().network.map(Plain);
        arguments.extend(slot.network_arguments(network.as_ref()));
        // Safety: as for the dispatch.
        unsafe { stream.launch(&group.combine, group.shape, &arguments)? };
        Ok(())
    }
}
