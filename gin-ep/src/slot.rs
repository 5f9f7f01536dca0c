// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slots: dispatch, receive, combine.

use crate::group::SlotState;
use crate::grouped::{Experts, GroupedMatmul, Products};
use crate::{Combine, EpError, Group, Layout, OverlappedMatmul, Permuted, Plan, Rows, Tokens, View};
use gin_ep_kernels as kernels;
use gin_ep_kernels::{RECEIVE, SEND};
use gin_gpu::{Function, KernelArg, LaunchConfig, Memory, MemoryKind, MemorySlice, Plain, Stream};
use gin_host::comm::{DeviceComm, Window};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One dispatch at a time. The slot lends itself to [`Sent`] and [`Received`], so a second dispatch before the first
/// has ended does not compile:
///
/// ```compile_fail,E0499
/// # use gin_ep::{EpError, Slot, Tokens};
/// # use gin_gpu::Stream;
/// # use std::sync::Arc;
/// fn twice(slot: &mut Slot<'_>, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<(), EpError> {
///     let first = slot.dispatch(stream, tokens)?;
///     let second = slot.dispatch(stream, tokens)?;
///     first.receive(stream)?;
///     Ok(())
/// }
/// ```
///
/// Nor does a receive without a dispatch:
///
/// ```compile_fail,E0599
/// # use gin_ep::{EpError, Slot};
/// # use gin_gpu::Stream;
/// # use std::sync::Arc;
/// fn nothing(slot: &mut Slot<'_>, stream: &Arc<dyn Stream>) -> Result<(), EpError> {
///     slot.receive(stream)?;
///     Ok(())
/// }
/// ```
///
/// Calls of one slot take one stream, or streams that events order. The slot keeps the memory of its calls. When it is
/// dropped it waits for its kernels.
#[derive(Debug)]
pub struct Slot<'g> {
    group: &'g Group<'g>,
    number: u32,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.state().settle();
        self.state().taken.store(false, Ordering::Release);
    }
}

impl<'g> Slot<'g> {
    pub(crate) fn new(group: &'g Group<'_>, number: u32) -> Self {
        Self { group, number }
    }

    fn state(&self) -> &'g SlotState {
        &self.group.slots[self.number as usize]
    }

    /// Returns the number of dispatches that the slot has made. No kernel of it runs.
    ///
    /// # Errors
    /// An error of the device.
    #[doc(hidden)]
    pub fn epoch(&self) -> Result<u64, EpError> {
        let mut word = [0u64];
        self.group.arena.memory().read(self.state().params.first + 8 * kernels::EPOCH_WORD, &mut word)?;
        Ok(word[0])
    }

    /// Sends the rows. They are read in the order of the stream; the call returns at once.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Limit`] for more tokens than the group has
    /// room for, [`EpError::NotReceived`], [`EpError::Unread`], an error of the device.
    pub fn dispatch(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<Sent<'_>, EpError> {
        let tokens = self.start(stream, tokens, SEND)?;
        self.state().is_unheard.store(true, Ordering::Relaxed);
        Ok(Sent { ended: Ended { slot: self, tokens } })
    }

    /// Sends the rows and waits for those of all ranks, in one kernel. It takes less time than two.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn exchange(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<Received<'_>, EpError> {
        let tokens = self.start(stream, tokens, SEND | RECEIVE)?;
        Ok(Received { ended: Ended { slot: self, tokens } })
    }

    /// Sends the rows, waits for those of all ranks, and puts them into another layout as they arrive. Returns the
    /// parameter by which kernels find them there, too. All ranks call it, each with any layout.
    ///
    /// The result is that of [`exchange`](Self::exchange) and [`Received::permute`], in less time. Where a rank has
    /// room for at most 4096 received rows, one kernel exchanges them into an expert-major layout. Otherwise the ranks
    /// tell each other the ids of their rows first, and copy the rows that have arrived while they wait for others.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`EpError::Unsuited`] for permuted rows of another group, or if loads and
    /// stores do not reach all ranks.
    pub fn exchange_into(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: &Tokens<'_>,
        to: &Permuted,
    ) -> Result<(Received<'_>, View<kernels::PermutedRows>), EpError> {
        let group = self.group;
        if !group.is_near() {
            let what = "an exchange into a layout in a group with ranks that loads and stores do not reach";
            return Err(EpError::Unsuited { what, remedy: "call `exchange` and `Received::permute`" });
        }
        let view = self.permuted(to)?;
        let tokens = self.prepare(stream, tokens)?;
        if group.expands() {
            if to.is_expert_major() {
                Slot::state(self).extend(stream, &to.used())?;
                let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &Plain(tokens), &View(view)];
                // Safety: as for a dispatch, and the memory is that of the permuted rows and is kept.
                unsafe { stream.launch(&group.dispatch_into, group.following(group.shape_into), &arguments)? };
            } else {
                self.launch_dispatch(stream, &group.dispatch, group.following(group.shape), tokens, SEND | RECEIVE)?;
                self.permute(stream, to, view, None)?;
            }
            return Ok((Received { ended: Ended { slot: self, tokens } }, View(view)));
        }
        let slot = Plain(self.state().params);
        let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &slot, &Plain(tokens)];
        // Safety: as for a dispatch.
        unsafe { stream.launch(&group.send_metadata, group.following(group.shape), &arguments)? };
        self.permute(stream, to, view, Some(tokens))?;
        Ok((Received { ended: Ended { slot: self, tokens } }, View(view)))
    }

    /// Counts the tokens for each rank once, for dispatches of the same ids. A dispatch with a plan does not count, and
    /// does not report tokens that were dropped.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn plan(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<Plan, EpError> {
        self.state().check_read(self.number)?;
        let sizes = self.state().params.sizes;
        let bytes = sizes.plan_bytes();
        let memory = Memory::new(self.group.comm.gpu(), MemoryKind::Device, bytes)?.whole();
        let (params, mut used) = tokens.check(&sizes, self.group.element)?;
        used.push(&memory);
        self.state().begin(stream, &used)?;
        self.launch_plan(stream, params, &memory)?;
        let max = if params.count_at == 0 { params.count.min(sizes.tokens) } else { sizes.tokens };
        Ok(Plan { memory, sizes, max })
    }

    fn launch_plan(
        &self,
        stream: &Arc<dyn Stream>,
        tokens: kernels::TokenParams,
        memory: &MemorySlice,
    ) -> Result<(), EpError> {
        let state = self.state();
        let threads = self.group.shape.threads();
        let warps = state.params.sizes.tokens.div_ceil(32);
        let blocks = warps.div_ceil(threads as u32 / 32).min(1024);
        let (slot, tokens, to) = (Plain(state.params), Plain(tokens), memory.address());
        let arguments: [&dyn KernelArg; 4] = [&self.group.arena, &slot, &tokens, &to];
        // Safety: the memory has the bytes of a plan and is kept, and the slot's kernels follow each other.
        unsafe { stream.launch(&self.group.plan, LaunchConfig::new(blocks, threads as u32), &arguments)? };
        Ok(())
    }

    fn launch_reserve(&self, stream: &Arc<dyn Stream>, plan: u64) -> Result<(), EpError> {
        let (group, slot) = (self.group, Plain(self.state().params));
        let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &slot, &plan];
        let shape = group.following(LaunchConfig::new(1, group.shape.threads() as u32));
        // Safety: arena and slot are the communicator's, the plan is kept, and the slot's kernels follow each other.
        unsafe { stream.launch(&group.reserve, shape, &arguments)? };
        Ok(())
    }

    fn start(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: &Tokens<'_>,
        phases: u32,
    ) -> Result<kernels::TokenParams, EpError> {
        let group = self.group;
        let reserves = self.state().params.sizes.reserves();
        let params = if reserves { self.check(stream, tokens)? } else { self.prepare(stream, tokens)? };
        let (kernel, shape) =
            if reserves { (&group.dispatch_shared, group.shape_into) } else { (&group.dispatch, group.shape) };
        self.launch_dispatch(stream, kernel, group.following(shape), params, phases)?;
        Ok(params)
    }

    /// Checks and keeps the memory of tokens.
    fn check(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<kernels::TokenParams, EpError> {
        if self.state().is_unheard.load(Ordering::Relaxed) {
            return Err(EpError::NotReceived { slot: self.number });
        }
        self.state().check_read(self.number)?;
        let (params, used) = tokens.check(&self.state().params.sizes, self.group.element)?;
        self.state().begin(stream, &used)?;
        Ok(params)
    }

    /// Checks and keeps the memory of tokens, and finds out where their rows go.
    fn prepare(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<kernels::TokenParams, EpError> {
        let mut params = self.check(stream, tokens)?;
        let state = self.state();
        if let (Some(plan), 0) = (&state.plan, params.plan) {
            self.launch_plan(stream, params, plan)?;
            params.plan = plan.address();
        }
        if state.params.sizes.is_shared() {
            self.launch_reserve(stream, params.plan)?;
        }
        Ok(params)
    }

    /// Returns the parameters of a kernel of yours that contains a dispatch and its combine, and keeps their memory for
    /// the stream. The kernel calls [`kernels::dispatch`] with [`SEND`] and [`RECEIVE`], then [`kernels::combine`].
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch) and [`Received::combine`].
    pub fn fuse(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: &Tokens<'_>,
        rows: Rows<'_>,
        combine: &Combine<'_>,
    ) -> Result<Fused<'_>, EpError> {
        if self.state().is_unheard.load(Ordering::Relaxed) {
            return Err(EpError::NotReceived { slot: self.number });
        }
        self.state().check_read(self.number)?;
        if self.state().params.sizes.is_shared() {
            let what = "a kernel with dispatch and combine in a group with `max_rows`";
            return Err(EpError::Unsuited { what, remedy: "call `dispatch` and `combine`" });
        }
        if self.group.signals.is_some() {
            let what = "a kernel with dispatch and combine in a group with ranks that loads and stores do not reach";
            return Err(EpError::Unsuited { what, remedy: "call `dispatch` and `combine`" });
        }
        let (group, state) = (self.group, self.state());
        let slot = state.params;
        let (tokens, mut used) = tokens.check(&slot.sizes, group.element)?;
        let (sums, others) = combine.check(group, &tokens, rows)?;
        used.extend(others);
        state.begin(stream, &used)?;
        let shared = group.shape.dynamic_shared;
        Ok(Fused { comm: &group.device, arena: &group.arena, slot, tokens, sums, shared })
    }

    /// Sends no rows, and waits for those of all ranks, which also send none. They need not be received.
    pub(crate) fn exchange_nothing(&self, stream: &Arc<dyn Stream>) -> Result<(), EpError> {
        self.state().begin(stream, &[])?;
        let nothing = bytemuck::Zeroable::zeroed();
        self.launch_dispatch(
            stream,
            &self.group.dispatch,
            LaunchConfig::new(1, 32).dynamic_shared(self.group.shape.dynamic_shared),
            nothing,
            SEND | RECEIVE,
        )
    }

    fn launch_dispatch(
        &self,
        stream: &Arc<dyn Stream>,
        kernel: &Function,
        shape: LaunchConfig,
        tokens: kernels::TokenParams,
        phases: u32,
    ) -> Result<(), EpError> {
        let group = self.group;
        let (slot, tokens) = (Plain(self.state().params), Plain(tokens));
        let mut arguments: Vec<&dyn KernelArg> = vec![&group.device, &group.arena, &slot, &tokens, &phases];
        let network = self.state().network.map(Plain);
        arguments.extend(network_arguments(group, network.as_ref()));
        // Safety: arena and slot are the communicator's, the memory of the tokens was checked and is kept, and the slot
        // lends itself, so that its kernels follow each other.
        unsafe { stream.launch(kernel, shape, &arguments)? };
        Ok(())
    }
}

/// Returns the last parameters of kernels that post to a network.
fn network_arguments<'a>(group: &'a Group<'_>, network: Option<&'a Plain<kernels::Network>>) -> Vec<&'a dyn KernelArg> {
    match (&group.signals, network) {
        (Some(signals), Some(network)) => vec![&signals.window, network],
        _ => Vec::new(),
    }
}

/// The parameters of a kernel that contains a dispatch and its combine, in the order in which these take them.
#[derive(Debug)]
pub struct Fused<'l> {
    /// The communicator.
    pub comm: &'l DeviceComm,
    /// The memory of the group.
    pub arena: &'l Window<u64>,
    /// The slot.
    pub slot: kernels::SlotParams,
    /// The tokens.
    pub tokens: kernels::TokenParams,
    /// The rows that come back, and their sums.
    pub sums: kernels::Sums,
    /// Bytes of dynamic shared memory that the dispatch needs.
    pub shared: u32,
}

/// A slot with its dispatch.
#[derive(Debug)]
struct Ended<'l> {
    slot: &'l mut dyn Lent,
    tokens: kernels::TokenParams,
}

/// A slot without the lifetime of its group, which a value that borrows the slot need not name.
trait Lent: std::fmt::Debug + Send {
    fn permute(
        &mut self,
        stream: &Arc<dyn Stream>,
        to: &Permuted,
        view: kernels::PermutedRows,
        arriving: Option<kernels::TokenParams>,
    ) -> Result<(), EpError>;
    fn reduce(&mut self, stream: &Arc<dyn Stream>, rows: Rows<'_>, view: kernels::ReceivedRows) -> Result<(), EpError>;
    fn receive(&mut self, stream: &Arc<dyn Stream>, tokens: kernels::TokenParams) -> Result<(), EpError>;
    fn multiply(
        &mut self,
        stream: &Arc<dyn Stream>,
        early: &OverlappedMatmul,
        weights: &MemorySlice,
    ) -> Result<(), EpError>;
    fn state(&self) -> &SlotState;
    fn number(&self) -> u32;
    fn device(&self) -> &DeviceComm;
    fn arena(&self) -> &gin_host::comm::Window<u64>;
    fn combine(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: kernels::TokenParams,
        rows: Rows<'_>,
        combine: &Combine<'_>,
    ) -> Result<(), EpError>;

    /// Returns the received rows.
    fn view(&self) -> kernels::ReceivedRows {
        // Safety: the group made the slot for this arena.
        unsafe { kernels::ReceivedRows::new(self.state().params, self.arena().memory().address()) }
    }

    /// Does what [`Received::region`] does.
    fn region(&self) -> Result<Option<MemorySlice>, EpError> {
        let (slot, arena) = (&self.state().params, self.arena().memory());
        if !slot.sizes.is_shared() {
            return Ok(None);
        }
        let first = arena.offset() + kernels::SlotOffsets::new(slot, 0).rows(0);
        let bytes = u64::from(slot.sizes.max_rows) * u64::from(slot.sizes.pitch);
        Ok(Some(arena.memory().slice(first..first + bytes)?))
    }

    /// Checks permuted rows, and returns the parameter of kernels for them.
    fn permuted(&self, to: &Permuted) -> Result<kernels::PermutedRows, EpError> {
        to.check(&self.state().params.sizes)?;
        let region = self.region()?.map(|region| region.address());
        Ok(to.view(self.view(), region))
    }
}

impl Lent for Slot<'_> {
    /// Launches the kernels of a layout. The metadata of rows that are `arriving` was received; they are sent by a
    /// kernel among these.
    fn permute(
        &mut self,
        stream: &Arc<dyn Stream>,
        to: &Permuted,
        view: kernels::PermutedRows,
        arriving: Option<kernels::TokenParams>,
    ) -> Result<(), EpError> {
        let (group, params) = (self.group, Slot::state(self).params);
        Slot::state(self).extend(stream, &to.used())?;
        let shape = group.following(LaunchConfig::new(group.shape.blocks() as u32, group.shape.threads() as u32));
        let [count, assign, copy, copy_arriving] = &group.permute;
        let (view, slot) = (View(view), Plain(params));
        // Safety of all launches: the rows or their metadata were received, the memory is that of the permuted rows and
        // is kept, and kernels of a stream follow each other.
        if to.layout != Layout::Flat {
            unsafe { stream.launch(count, shape, &[&view])? };
        }
        unsafe { stream.launch(assign, shape, &[&view])? };
        if let Some(tokens) = arriving {
            let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &slot, &Plain(tokens)];
            let [sends, copies] = group.shapes_arriving();
            unsafe { stream.launch(&group.send_rows, sends, &arguments)? };
            let arguments: [&dyn KernelArg; 3] = [&group.device, &group.arena, &view];
            unsafe { stream.launch(copy_arriving, group.following(copies), &arguments)? };
        } else if to.rows().is_some() {
            unsafe { stream.launch(copy, shape, &[&view])? };
        }
        Ok(())
    }

    fn reduce(&mut self, stream: &Arc<dyn Stream>, rows: Rows<'_>, view: kernels::ReceivedRows) -> Result<(), EpError> {
        let group = self.group;
        let (to, rows, used) = rows.of_experts(group)?;
        Slot::state(self).extend(stream, &used)?;
        let shape = LaunchConfig::new(group.shape.blocks() as u32, group.shape.threads() as u32);
        let arguments: [&dyn KernelArg; 2] = [&View(to.view(view, None)), &rows];
        // Safety: as for a layout, and the received rows have room for the sums.
        unsafe { stream.launch(&group.reduce, shape, &arguments)? };
        Ok(())
    }

    fn receive(&mut self, stream: &Arc<dyn Stream>, tokens: kernels::TokenParams) -> Result<(), EpError> {
        self.state().extend(stream, &[])?;
        // One warp waits.
        self.launch_dispatch(stream, &self.group.dispatch, LaunchConfig::new(1, 32), tokens, RECEIVE)?;
        Slot::state(self).is_unheard.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn multiply(
        &mut self,
        stream: &Arc<dyn Stream>,
        early: &OverlappedMatmul,
        weights: &MemorySlice,
    ) -> Result<(), EpError> {
        let (group, state) = (self.group, Slot::state(self));
        let (params, used) = early.params((group.number, self.number), weights)?;
        state.extend(stream, &used)?;
        let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &View(Lent::view(self)), &Plain(params)];
        // Safety: arena and slot are the communicator's, the memory was checked and is kept, the dispatch was sent and
        // not received, and kernels of a stream follow each other.
        unsafe { stream.launch(&early.multiplier.kernel, early.multiplier.shape, &arguments)? };
        Slot::state(self).is_unheard.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn state(&self) -> &SlotState {
        Slot::state(self)
    }

    fn number(&self) -> u32 {
        self.number
    }

    fn device(&self) -> &DeviceComm {
        &self.group.device
    }

    fn arena(&self) -> &gin_host::comm::Window<u64> {
        &self.group.arena
    }

    fn combine(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: kernels::TokenParams,
        rows: Rows<'_>,
        combine: &Combine<'_>,
    ) -> Result<(), EpError> {
        let (group, params) = (self.group, Slot::state(self).params);
        let (sums, used) = combine.check(group, &tokens, rows)?;
        Slot::state(self).extend(stream, &used)?;
        let (slot, tokens, sums) = (Plain(params), Plain(tokens), Plain(sums));
        let mut arguments: Vec<&dyn KernelArg> = vec![&group.device, &group.arena, &slot, &tokens, &sums];
        let network = Slot::state(self).network.map(Plain);
        arguments.extend(network_arguments(group, network.as_ref()));
        // Safety: as for the dispatch.
        unsafe { stream.launch(&group.combine, group.shape, &arguments)? };
        Ok(())
    }
}

/// A dispatch that was sent. Until it is received, the slot takes no other. Dropping it warns:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use gin_ep::{EpError, Slot, Tokens};
/// # use gin_gpu::Stream;
/// # use std::sync::Arc;
/// fn unheard(slot: &mut Slot<'_>, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<(), EpError> {
///     slot.dispatch(stream, tokens)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
#[must_use = "the slot takes no other dispatch before this one is received"]
pub struct Sent<'l> {
    ended: Ended<'l>,
}

impl<'l> Sent<'l> {
    /// Waits, in the order of the stream, for the rows of all ranks. The call returns at once.
    ///
    /// # Errors
    /// An error of the device.
    pub fn receive(self, stream: &Arc<dyn Stream>) -> Result<Received<'l>, EpError> {
        self.ended.slot.receive(stream, self.ended.tokens)?;
        Ok(Received { ended: self.ended })
    }

    /// Waits, in the order of the stream, for the rows of all ranks, and multiplies those of each expert by its weights
    /// as they arrive. The products return to the ranks of their tokens as they are done, so a
    /// [`combine`](Received::combine) of [`Rows::Returned`] follows. `weights` are as in
    /// [`Experts::new`], with a row of inner elements as long as a received row. The call returns at once.
    ///
    /// The bits are those of [`receive`](Self::receive), [`Received::permute`] and [`Received::multiply`].
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`] for products of another group:
    /// then the rows are received and given up. An error of the device.
    pub fn multiply(
        self,
        stream: &Arc<dyn Stream>,
        early: &OverlappedMatmul,
        weights: &MemorySlice,
    ) -> Result<Received<'l>, EpError> {
        match self.ended.slot.multiply(stream, early, weights) {
            Ok(()) => Ok(Received { ended: self.ended }),
            Err(error @ (EpError::Short { .. } | EpError::Misaligned { .. } | EpError::Unsuited { .. })) => {
                self.receive(stream)?;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }
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
    ended: Ended<'l>,
}

impl Received<'_> {
    /// Returns the received rows for kernels, which get it as a parameter. They run after the receive and before the
    /// combine, in the order of the stream.
    pub fn view(&self) -> View<kernels::ReceivedRows> {
        View(self.ended.slot.view())
    }

    /// Returns the arena, and where in it the rows are if this is dispatch `epoch`, for programs that cannot pass the
    /// view to their kernels.
    #[doc(hidden)]
    pub fn offsets(&self, epoch: u64) -> (&MemorySlice, kernels::SlotOffsets) {
        let slot = &self.ended.slot;
        (slot.arena().memory(), kernels::SlotOffsets::new(&slot.state().params, epoch))
    }

    /// Puts the rows into another layout, in the order of the stream. Returns the parameter by which kernels find them.
    ///
    /// # Errors
    /// [`EpError::Unsuited`] for permuted rows of another group; an error of the device.
    pub fn permute(&mut self, stream: &Arc<dyn Stream>, to: &Permuted) -> Result<View<kernels::PermutedRows>, EpError> {
        let view = self.ended.slot.permuted(to)?;
        self.ended.slot.permute(stream, to, view, None)?;
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
        let view = self.ended.slot.view();
        self.ended.slot.reduce(stream, rows, view)
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
        let (slot, view) = (&self.ended.slot, self.ended.slot.view());
        let received = (view, &slot.state().params.sizes);
        let (layout, params, used) = experts.check((grouped, slot.number()), received, products)?;
        slot.state().extend(stream, &used)?;
        let arguments: [&dyn KernelArg; 4] = [slot.device(), slot.arena(), &View(layout), &Plain(params)];
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
        self.ended.slot.region()
    }

    /// Gives the rows up without a combine, as dropping does.
    pub fn release(self) {}

    /// Copies the rows to the host, for tests and tools: for each source its rows. The stream is done.
    ///
    /// # Errors
    /// An error of the device.
    pub fn fetch(&self) -> Result<Vec<Vec<ReceivedRow>>, EpError> {
        let (params, arena) = (&self.ended.slot.state().params, self.ended.slot.arena().memory());
        let (sizes, mut all) = (&params.sizes, Vec::new());
        let offsets = kernels::SlotOffsets::new(params, {
            let mut word = [0u64];
            arena.read(params.first + 8 * kernels::EPOCH_WORD, &mut word)?;
            word[0]
        });
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

    /// Returns rows for each received one, and stores the sums of the rows that come back, one for each of this rank's
    /// tokens. A token without experts gets zeros, or bias and old output.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`], an error of the device.
    pub fn combine(self, stream: &Arc<dyn Stream>, rows: Rows<'_>, combine: &Combine<'_>) -> Result<(), EpError> {
        self.ended.slot.combine(stream, self.ended.tokens, rows, combine)
    }
}
