// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slots, and the launches of their kernels.

use crate::group::{GroupState, SlotState, check_usable};
use crate::{Combine, EpError, Layout, Permuted, Plan, Rows, Tokens, View};
#[cfg(doc)]
use crate::{Received, Sent};
use gin_ep_kernels as kernels;
use gin_ep_kernels::{RECEIVE, SEND};
use gin_gpu::{Function, KernelArg, LaunchConfig, Memory, MemoryKind, MemorySlice, Plain, Stream};
use gin_host::comm::{DeviceComm, Window};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of detached dispatches of the process.
static DISPATCHES: AtomicU64 = AtomicU64::new(0);

/// The id of a dispatch that was detached from the borrow of its slot: [`Sent::detach`], [`Received::detach`].
///
/// [`Slot::sent`] and [`Slot::received`] return the dispatch for a call. When that value is dropped, the dispatch goes
/// on. It ends by `combine` or `release`, also if they fail, or by a failed `receive`. Until then the slot refuses
/// other dispatches; from then on it refuses the id. No two detached dispatches of a process have the same id.
///
/// ```
/// use gin_ep::{EpError, Group, GroupConfig, Ids, Tokens};
/// use gin_gpu::{Memory, MemoryKind};
/// use gin_host::comm::Requirements;
/// use gin_host::world::{WorldConfig, launch};
///
/// launch(WorldConfig::seeded(1, 7), |rank| -> Result<(), EpError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     let group = Group::new(&comm, &GroupConfig::new(1, 8, 1).tokens(4).sms(1).threads(32))?;
///     let (rows, stream, mut slot) =
///         (Memory::new(rank.device(), MemoryKind::Device, 16)?.whole(), rank.stream()?, group.slot(0)?);
///     let tokens = Tokens::new(&rows, Ids::I32(&rows), 1);
///     let id = slot.exchange(&stream, &tokens)?.detach();
///     assert_eq!(slot.exchange(&stream, &tokens).err(), Some(EpError::NotEnded { slot: 0 }));
///     slot.received(id)?.release();
///     assert_eq!(slot.received(id).err(), Some(EpError::Ended { slot: 0 }));
///     slot.exchange(&stream, &tokens)?.release();
///     drop(slot);
///     group.destroy()?;
///     Ok(comm.destroy()?)
/// })
/// .unwrap();
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[must_use = "the slot takes no other dispatch before this one is combined or released"]
pub struct DispatchId(u64);

/// A dispatch that was detached.
#[derive(Debug)]
pub(crate) struct Detached {
    pub(crate) id: DispatchId,
    pub(crate) tokens: kernels::TokenParams,
    pub(crate) is_received: bool,
}

/// One dispatch at a time. [`Sent`] and [`Received`] borrow the slot, so a second dispatch before the first has ended
/// does not compile:
///
/// ```compile_fail,E0499
/// # use gin_ep::{EpError, Slot, Tokens};
/// # use gin_gpu::Stream;
/// # use std::sync::Arc;
/// fn twice(slot: &mut Slot, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<(), EpError> {
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
/// fn nothing(slot: &mut Slot, stream: &Arc<dyn Stream>) -> Result<(), EpError> {
///     slot.receive(stream)?;
///     Ok(())
/// }
/// ```
///
/// A slot has a share of its group and its communicator, so it borrows neither. A program that cannot store a borrow of
/// the slot [detaches](Received::detach) the dispatch; then the slot makes these checks at run time.
///
/// Calls of one slot take one stream, or streams that events order. The slot keeps the memory of its calls. When it is
/// dropped it waits for its kernels.
#[derive(Debug)]
pub struct Slot {
    pub(crate) group: Arc<GroupState>,
    pub(crate) number: u32,
    /// The dispatch that was detached and has not ended.
    pub(crate) detached: Option<Detached>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.state().settle();
        self.state().taken.store(false, Ordering::Release);
    }
}

impl Slot {
    pub(crate) fn new(group: Arc<GroupState>, number: u32) -> Self {
        Self { group, number, detached: None }
    }

    pub(crate) fn state(&self) -> &SlotState {
        &self.group.slots[self.number as usize]
    }

    /// Checks that no detached dispatch of the slot is in flight.
    ///
    /// # Errors
    /// [`EpError::NotReceived`], [`EpError::NotEnded`].
    pub fn check_idle(&self) -> Result<(), EpError> {
        let slot = self.number;
        match &self.detached {
            None => Ok(()),
            Some(Detached { is_received: false, .. }) => Err(EpError::NotReceived { slot }),
            Some(Detached { is_received: true, .. }) => Err(EpError::NotEnded { slot }),
        }
    }

    /// Detaches a dispatch, or leaves one detached that was before.
    pub(crate) fn detach(&mut self, tokens: kernels::TokenParams, is_received: bool) -> DispatchId {
        let new = || DispatchId(DISPATCHES.fetch_add(1, Ordering::Relaxed));
        let id = self.detached.as_ref().map_or_else(new, |detached| detached.id);
        self.detached = Some(Detached { id, tokens, is_received });
        id
    }

    /// Counts the tokens for each rank once, for dispatches of the same ids. A dispatch with a plan does not count, and
    /// does not report tokens that were dropped.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn plan(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<Plan, EpError> {
        self.check_idle()?;
        self.state().check_read(self.number)?;
        let sizes = self.state().params().sizes;
        let bytes = sizes.plan_bytes();
        let memory = Memory::new(self.group.comm.gpu(), MemoryKind::Device, bytes)?.whole();
        let (params, mut used) = tokens.check(&sizes, self.group.element)?;
        used.push(&memory);
        self.begin(stream, &used)?;
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
        let warps = state.params().sizes.tokens.div_ceil(32);
        let blocks = warps.div_ceil(threads as u32 / 32).min(1024);
        let (slot, tokens, to) = (Plain(state.params()), Plain(tokens), memory.address());
        let arguments: [&dyn KernelArg; 4] = [&self.group.arena, &slot, &tokens, &to];
        // Safety: the memory has the bytes of a plan and is kept, and the slot's kernels follow each other.
        unsafe { stream.launch(&self.group.plan, LaunchConfig::new(blocks, threads as u32), &arguments)? };
        Ok(())
    }

    fn launch_reserve(&self, stream: &Arc<dyn Stream>, plan: u64) -> Result<(), EpError> {
        let (group, slot) = (&self.group, Plain(self.state().params()));
        let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &slot, &plan];
        let shape = group.following(LaunchConfig::new(1, group.shape.threads() as u32));
        // Safety: arena and slot are the communicator's, the plan is kept, and the slot's kernels follow each other.
        unsafe { stream.launch(&group.reserve, shape, &arguments)? };
        Ok(())
    }

    /// Checks that the slot takes a dispatch.
    fn check_ready(&self) -> Result<(), EpError> {
        self.check_idle()?;
        if self.state().is_unheard.load(Ordering::Relaxed) {
            return Err(EpError::NotReceived { slot: self.number });
        }
        self.state().check_read(self.number)
    }

    /// Begins a call, and keeps memory for it.
    fn begin(&self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        check_usable(&self.group.comm, "use a group")?;
        self.state().begin(stream, memory)
    }

    /// Keeps more memory for the call that began last, and launches next.
    pub(crate) fn extend(&self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        check_usable(&self.group.comm, "use a group")?;
        self.state().extend(stream, memory)
    }

    /// Checks and keeps the memory of tokens.
    pub(crate) fn check(&self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<kernels::TokenParams, EpError> {
        self.check_ready()?;
        let (params, used) = tokens.check(&self.state().params().sizes, self.group.element)?;
        self.begin(stream, &used)?;
        self.state().begin_dispatch();
        Ok(params)
    }

    /// Checks and keeps the memory of tokens, and finds out where their rows go.
    pub(crate) fn prepare(
        &self,
        stream: &Arc<dyn Stream>,
        tokens: &Tokens<'_>,
    ) -> Result<kernels::TokenParams, EpError> {
        let mut params = self.check(stream, tokens)?;
        let state = self.state();
        if let (Some(plan), 0) = (&state.plan, params.plan) {
            self.launch_plan(stream, params, plan)?;
            params.plan = plan.address();
        }
        if state.params().sizes.is_shared() {
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
        self.check_ready()?;
        if self.state().params().sizes.is_shared() {
            let what = "a kernel with dispatch and combine in a group with `max_rows`";
            return Err(EpError::Unsuited { what, remedy: "call `dispatch` and `combine`" });
        }
        if self.group.signals.is_some() {
            let what = "a kernel with dispatch and combine in a group with ranks that loads and stores do not reach";
            return Err(EpError::Unsuited { what, remedy: "call `dispatch` and `combine`" });
        }
        let group = &*self.group;
        let (tokens, mut used) = tokens.check(&group.sizes(), group.element)?;
        let (sums, others) = combine.check(group, &tokens, rows)?;
        used.extend(others);
        self.begin(stream, &used)?;
        self.state().begin_dispatch();
        let slot = self.state().params();
        let shared = group.shape.dynamic_shared;
        Ok(Fused { comm: &group.device, arena: &group.arena, slot, tokens, sums, shared })
    }

    /// Exchanges no rows with all ranks, which also send none. Needs no receive.
    pub(crate) fn exchange_nothing(&self, stream: &Arc<dyn Stream>) -> Result<(), EpError> {
        self.begin(stream, &[])?;
        self.state().begin_dispatch();
        let nothing = bytemuck::Zeroable::zeroed();
        self.launch_dispatch(
            stream,
            &self.group.dispatch,
            LaunchConfig::new(1, 32).dynamic_shared(self.group.shape.dynamic_shared),
            nothing,
            SEND | RECEIVE,
        )
    }

    pub(crate) fn launch_dispatch(
        &self,
        stream: &Arc<dyn Stream>,
        kernel: &Function,
        shape: LaunchConfig,
        tokens: kernels::TokenParams,
        phases: u32,
    ) -> Result<(), EpError> {
        let group = &self.group;
        let (slot, tokens) = (Plain(self.state().params()), Plain(tokens));
        let mut arguments: Vec<&dyn KernelArg> = vec![&group.device, &group.arena, &slot, &tokens, &phases];
        let network = self.state().network.map(Plain);
        arguments.extend(self.network_arguments(network.as_ref()));
        // Safety: arena and slot are the communicator's, the memory of the tokens was checked and is kept, and one
        // value at a time has the slot, so that its kernels follow each other.
        unsafe { stream.launch(kernel, shape, &arguments)? };
        Ok(())
    }

    /// Returns the last parameters of kernels that post to a network.
    pub(crate) fn network_arguments<'a>(
        &'a self,
        network: Option<&'a Plain<kernels::Network>>,
    ) -> Vec<&'a dyn KernelArg> {
        match (&self.group.signals, network) {
            (Some(signals), Some(network)) => vec![&signals.window, network],
            _ => Vec::new(),
        }
    }

    /// Launches the kernels of a layout. The metadata of rows that are `arriving` was received; they are sent by a
    /// kernel among these.
    pub(crate) fn launch_permute(
        &self,
        stream: &Arc<dyn Stream>,
        to: &Permuted,
        view: kernels::PermutedRows,
        arriving: Option<kernels::TokenParams>,
    ) -> Result<(), EpError> {
        let (group, params) = (&self.group, self.state().params());
        self.extend(stream, &to.used())?;
        let shape = group.following(LaunchConfig::new(group.shape.blocks() as u32, group.shape.threads() as u32));
        let [count, assign, copy, copy_arriving, details] = &group.permute;
        let (view, slot) = (View(view), Plain(params));
        // Safety of all launches: the rows or their metadata were received, the memory is that of the permuted rows and
        // is kept, and kernels of a stream follow each other.
        if to.is_expert_major() {
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
        if to.layout == Layout::ExpertMajorFixed {
            unsafe { stream.launch(details, shape, &[&view])? };
        }
        Ok(())
    }

    /// Returns the received rows.
    pub(crate) fn view(&self) -> kernels::ReceivedRows {
        // Safety: the group made the slot for this arena.
        unsafe { kernels::ReceivedRows::new(self.state().params(), self.group.arena.memory().address()) }
    }

    /// Returns the memory of the received rows, if all sources share a region.
    pub(crate) fn region(&self) -> Result<Option<MemorySlice>, EpError> {
        let (slot, arena) = (&self.state().params(), self.group.arena.memory());
        if !slot.sizes.is_shared() {
            return Ok(None);
        }
        let first = arena.offset() + kernels::SlotOffsets::new(slot).rows(0);
        let bytes = u64::from(slot.sizes.max_rows) * u64::from(slot.sizes.pitch);
        Ok(Some(arena.memory().slice(first..first + bytes)?))
    }

    /// Checks permuted rows, and returns the parameter of kernels for them.
    pub(crate) fn permuted(&self, to: &Permuted) -> Result<kernels::PermutedRows, EpError> {
        to.check(&self.state().params().sizes)?;
        let region = self.region()?.map(|region| region.address());
        Ok(to.view(self.view(), region))
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
    /// The returned rows, and their sums.
    pub sums: kernels::Sums,
    /// Bytes of dynamic shared memory that the dispatch needs.
    pub shared: u32,
}
