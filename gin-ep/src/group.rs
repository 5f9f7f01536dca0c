// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups: the memory for rows, and the shape of launches.

use crate::config_exchange::{all_gather, exchange_config};
use crate::keep_alive::KeepAlive;
use crate::{Element, EpError, GroupConfig, Report, Slot};
use gin_abi::handle::{BackendKind, CAP_STRONG_SIGNALS, CAP_VA_SIGNALS};
use gin_ep_kernels::{Network, STATUS_WORDS, Sizes};
use gin_gpu::{Function, LaunchConfig, Memory, MemoryKind, MemorySlice, ModuleSource, Stream};
use gin_host::comm::{CommError, CommState, Communicator, DeviceComm, Window, WindowFlags};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The ranks of a communicator, with the memory for rows of tokens.
///
/// ```
/// use gin_ep::{Combine, EpError, Group, GroupConfig, Ids, Rows, Tokens};
/// use gin_gpu::{Memory, MemoryKind};
/// use gin_host::comm::Requirements;
/// use gin_host::world::{WorldConfig, launch};
///
/// let outputs = launch(WorldConfig::seeded(2, 7), |rank| -> Result<Vec<u16>, EpError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     let config = GroupConfig::new(2, 8, 1).tokens(4).sms(1).threads(32);
///     let group = Group::new(&comm, &config)?;
///     let memory = |bytes| Memory::new(rank.device(), MemoryKind::Device, bytes).map(|memory| memory.whole());
///     let (rows, ids, output) = (memory(16)?, memory(4)?, memory(16)?);
///     rows.write(0, &[0x3f80u16; 8])?; // one token: eight times 1
///     ids.write(0, &[1i32])?; // its expert is on rank 1
///     let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
///     let tokens = Tokens::new(&rows, Ids::I32(&ids), 1);
///     let received = slot.dispatch(&stream, &tokens)?.receive(&stream)?;
///     // The experts' kernels run here, and replace the rows. Without any, the rows return unchanged.
///     received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&output))?;
///     stream.synchronize()?;
///     assert_eq!(group.status()?, None);
///     let mut values = vec![0u16; 8];
///     output.read(0, &mut values)?;
///     drop(slot);
///     group.destroy()?;
///     comm.destroy()?;
///     Ok(values)
/// });
/// assert_eq!(outputs.unwrap(), [vec![0x3f80; 8], vec![0x3f80; 8]]);
/// ```
#[derive(Debug)]
pub struct Group {
    pub(crate) state: Arc<GroupState>,
}

/// The state of a group, which its slots share.
#[derive(Debug)]
pub(crate) struct GroupState {
    pub(crate) device: DeviceComm,
    pub(crate) arena: Window<u64>,
    /// The signals of ranks that loads and stores do not reach, if there are any.
    pub(crate) signals: Option<Signals>,
    pub(crate) slots: Vec<SlotState>,
    /// A number that no other group of the process has.
    pub(crate) number: u64,
    /// The number of kernels with blocks that wait which may share this rank's GPU: one for each slot of each rank.
    pub(crate) shares: u64,
    pub(crate) shape: LaunchConfig,
    /// The shape of a dispatch into a layout, or of one that reserves places.
    pub(crate) shape_into: LaunchConfig,
    pub(crate) element: Element,
    pub(crate) combine_at_source: bool,
    /// Bytes of a row of sums.
    pub(crate) sum_bytes: u32,
    /// The kernels may be launched as dependent ones.
    has_dependents: bool,
    pub(crate) permute: [Function; 5],
    pub(crate) metadata: Function,
    pub(crate) plan: Function,
    pub(crate) reserve: Function,
    pub(crate) dispatch: Function,
    pub(crate) dispatch_into: Function,
    pub(crate) dispatch_shared: Function,
    pub(crate) send_metadata: Function,
    pub(crate) send_rows: Function,
    pub(crate) combine: Function,
    pub(crate) reduce: Function,
    /// Ends after the memory, which is a part of it.
    pub(crate) comm: Communicator,
}

/// The number of groups that the process has made.
static GROUPS: AtomicU64 = AtomicU64::new(0);

/// The state of a slot in its group.
#[derive(Debug)]
pub(crate) struct SlotState {
    params: gin_ep_kernels::SlotParams,
    /// The number of dispatches that calls began, by which they use two buffers in turn.
    dispatches: AtomicU64,
    /// The parameter of kernels for ranks that loads and stores do not reach, if there are any.
    pub(crate) network: Option<Network>,
    pub(crate) taken: AtomicBool,
    /// A dispatch was sent and not received.
    pub(crate) is_unheard: AtomicBool,
    /// Memory for the plan of each dispatch, if it makes one.
    pub(crate) plan: Option<MemorySlice>,
    status: Arc<Memory>,
    keep_alive: Mutex<KeepAlive>,
}

impl SlotState {
    /// Returns the parameter of the kernels of the dispatch that began last.
    pub(crate) fn params(&self) -> gin_ep_kernels::SlotParams {
        self.params.in_buffer(self.dispatches.load(Ordering::Relaxed))
    }

    /// Begins a dispatch, in the buffer that the one before did not use. A captured dispatch keeps its buffer in all
    /// replays, so the host knows all addresses. All ranks begin the same dispatches, captured or not.
    pub(crate) fn begin_dispatch(&self) {
        self.dispatches.fetch_add(1, Ordering::Relaxed);
    }

    /// Begins a call, whose kernels follow the kernels of all calls before, and keeps memory for it.
    pub(crate) fn begin(&self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        gin_gpu::lock(&self.keep_alive).begin(stream, memory)
    }

    /// Keeps more memory for the call that began last.
    pub(crate) fn extend(&self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        gin_gpu::lock(&self.keep_alive).extend(stream, memory)
    }

    /// Returns the report of the slot, which has this number, until [`Group::status`] has read it.
    fn report(&self, slot: u32) -> Option<Report> {
        // Safety: the block lives as long as `self`.
        let (code, [rank, expert, seen, limit]) = unsafe { gin_ep_kernels::reported(self.status.address()) }?;
        Some(Report { slot, code, rank: rank as u32, expert, seen, limit })
    }

    /// Refuses a call that begins a dispatch while nobody has read a report. It loads a word, and waits for nothing.
    pub(crate) fn check_read(&self, slot: u32) -> Result<(), EpError> {
        self.report(slot).map_or(Ok(()), |report| Err(EpError::Unread(report)))
    }

    /// Waits for the slot's kernels. They end by their deadlines.
    pub(crate) fn settle(&self) {
        gin_gpu::lock(&self.keep_alive).settle();
    }
}

/// Checks that a communicator is not destroyed. Kernels would read memory that it has freed.
pub(crate) fn check_usable(comm: &Communicator, call: &'static str) -> Result<(), EpError> {
    match comm.state() {
        state @ CommState::Destroyed => Err(CommError::State { call, state }.into()),
        _ => Ok(()),
    }
}

impl Drop for GroupState {
    fn drop(&mut self) {
        self.slots.iter().for_each(SlotState::settle);
    }
}

impl GroupState {
    fn new(comm: &Communicator, config: &GroupConfig) -> Result<Self, EpError> {
        let (ranks, gpu) = (comm.ranks(), comm.gpu());
        let sizes = config.sizes(ranks)?;
        let (device, sharing) = exchange_config(comm, &config.values())?;
        let remote = Routed::of(comm, &device, config, &sizes)?;
        if remote.is_some() {
            config.is_near_only()?;
        }
        let threads = config.block_over(remote.is_some())?;
        let (slot_bytes, remote_bytes) = (sizes.slot_bytes(), remote.as_ref().map_or(0, |remote| remote.slot_bytes));
        let bytes = (slot_bytes + remote_bytes) * u64::from(config.slots);
        let arena = comm.alloc_window::<u64>((bytes / 8) as usize, WindowFlags::NONE)?;
        let arena = arena.named("gin-ep");
        let signals = remote.as_ref().map(|remote| Signals::new(comm, &arena, remote.signals)).transpose()?;
        let slot = |number: u32| -> Result<SlotState, EpError> {
            let status = Memory::new(gpu, MemoryKind::Pinned, 8 * STATUS_WORDS)?;
            let (first, deadline) = (u64::from(number) * slot_bytes, config.deadline);
            let params = gin_ep_kernels::SlotParams::new(sizes, first, status.address(), deadline);
            // Behind the memory of all slots for ranks that loads and stores reach.
            let first = u64::from(config.slots) * slot_bytes + u64::from(number) * remote_bytes;
            let network =
                remote.as_ref().zip(signals.as_ref()).map(|(remote, signals)| remote.slot(number, first, signals));
            let plan =
                config.has_plan().then(|| Memory::new(gpu, MemoryKind::Device, sizes.plan_bytes())).transpose()?;
            let plan = plan.map(|memory| memory.whole());
            Ok(SlotState {
                params,
                dispatches: AtomicU64::new(0),
                network,
                taken: AtomicBool::new(false),
                is_unheard: AtomicBool::new(false),
                plan,
                status,
                keep_alive: Mutex::default(),
            })
        };
        let slots = (0..config.slots).map(slot).collect::<Result<Vec<_>, _>>()?;
        if config.first_epoch != 0 {
            let mut words = vec![0u64; sizes.words() as usize];
            gin_ep_kernels::reset(&sizes, &mut words, config.first_epoch);
            for slot in &slots {
                arena.write((slot.params.first / 8) as usize, &words)?;
                if let Some(network) = &slot.network {
                    let words = vec![network.base(); Network::signals(&sizes) as usize];
                    arena.write((network.first() / 8) as usize, &words)?;
                }
            }
            // No rank sends before all have written.
            all_gather(comm, &[])?;
        }
        let kernels = gpu.load(ModuleSource::Linked)?;
        let [dispatch, into, in_shared, send_rows, combine, reduce] =
            config.kernels(remote.as_ref().map(|remote| remote.backend));
        let (plan, reserve) = (kernels.function("ep_plan")?, kernels.function("ep_reserve")?);
        let (send_metadata, send_rows) = (kernels.function("ep_send_metadata")?, kernels.function(&send_rows)?);
        let (dispatch, combine) = (kernels.function(&dispatch)?, kernels.function(&combine)?);
        let dispatch_shared = kernels.function(&in_shared)?;
        let (dispatch_into, reduce) = (kernels.function(&into)?, kernels.function(&reduce)?);
        // Blocks wait for ranks, and for each slot another rank may be first. So each kernel leaves places to the
        // kernels of other slots, and of other ranks on the GPU.
        let shares = sharing * u64::from(config.slots);
        let of_kernels = |kernels: &[&Function], threads: u32| -> Result<LaunchConfig, EpError> {
            let shape = LaunchConfig::new(1, threads).dynamic_shared(sizes.shared_bytes());
            let mut max = config.blocks.map_or(u64::MAX, u64::from);
            for kernel in kernels {
                max = max.min(gpu.resident_blocks(kernel, &shape)? / shares);
            }
            if sharing > 1 {
                // A kernel that gin has not loaded may not start on an SM with a waiting block, because the two
                // divide its memory into L1 and shared memory differently. So each rank leaves SMs to the others.
                // With this much shared memory one block fits on an SM.
                let alone = shape.dynamic_shared(gpu.limits().dynamic_shared / 4 * 3);
                max = max.min(gpu.resident_blocks(kernels[0], &alone)? / shares);
            }
            let max = max.min(config.useful_blocks(&sizes));
            let blocks = config.grid.unwrap_or(max.clamp(1, 65_535) as u32);
            Ok(LaunchConfig::new(blocks, threads).dynamic_shared(sizes.shared_bytes()))
        };
        let shape = of_kernels(&[&dispatch, &combine], threads)?;
        let shape_into =
            of_kernels(&[&dispatch_into, &dispatch_shared], threads.min(gin_ep_kernels::MAX_NETWORK_THREADS))?;
        let (element, combine_at_source) = (config.element, config.combine_at_source);
        let sum_bytes = if config.combine_f32 { sizes.combine_bytes / 2 } else { sizes.combine_bytes };
        let permute = |part: &str| kernels.function(&format!("ep_permute_{part}"));
        let [count, assign, details] = [permute("count")?, permute("assign")?, permute("details")?];
        let metadata = permute("metadata")?;
        let permute = [count, assign, permute("copy")?, permute("arriving")?, details];
        Ok(Self {
            device,
            arena,
            signals,
            slots,
            number: GROUPS.fetch_add(1, Ordering::Relaxed),
            shares,
            shape,
            shape_into,
            element,
            combine_at_source,
            sum_bytes,
            has_dependents: gpu.allows_dependent(&send_rows),
            permute,
            metadata,
            plan,
            reserve,
            dispatch,
            dispatch_into,
            dispatch_shared,
            send_metadata,
            send_rows,
            combine,
            reduce,
            comm: comm.clone(),
        })
    }

    /// Returns the sizes for kernels, which all slots have.
    pub(crate) fn sizes(&self) -> gin_ep_kernels::Sizes {
        self.slots[0].params.sizes
    }

    /// Returns whether loads and stores reach all ranks.
    pub(crate) fn is_near(&self) -> bool {
        self.signals.is_none()
    }

    /// Returns whether one kernel exchanges rows into an expert-major layout.
    pub(crate) fn expands(&self) -> bool {
        gin_ep_kernels::expands(&self.sizes())
    }

    /// Returns the shape of a kernel of a call with several kernels, which begins by `let_dependents_start` as they do.
    ///
    /// Only where sources share a region: there it saves time in graphs. In other launches it costs time of the host,
    /// because a dependent kernel is not a repeated one.
    pub(crate) fn following(&self, shape: LaunchConfig) -> LaunchConfig {
        if self.sizes().is_shared() && self.has_dependents { shape.dependent() } else { shape }
    }

    /// Returns the shapes of the kernels that send rows and copy them as they arrive, at the same time. Few SMs
    /// can send as fast as links take rows.
    pub(crate) fn shapes_arriving(&self) -> [LaunchConfig; 2] {
        let (blocks, threads) = (self.shape.blocks() as u32, self.shape.threads() as u32);
        let senders = (blocks / 4).max(blocks.min(32) / 2).max(1);
        let fewer = threads.min(gin_ep_kernels::MAX_NETWORK_THREADS);
        let shape = |blocks: u32| LaunchConfig::new(blocks * (threads / fewer), fewer);
        let (sends, copies) = (shape(senders).dynamic_shared(self.shape.dynamic_shared), shape(blocks));
        [sends, if self.has_dependents { copies.dependent() } else { copies }]
    }

    /// Refuses a call on all slots while one of them is lent.
    fn check_not_lent(&self) -> Result<(), EpError> {
        match (0..).zip(&self.slots).find(|(_, state)| state.taken.load(Ordering::Acquire)) {
            Some((slot, _)) => Err(EpError::Slot { slot, reason: "in use: drop it first".to_owned() }),
            None => Ok(()),
        }
    }
}

impl Group {
    /// Allocates the memory of a group. Collective: all ranks pass the same configuration. The group and its slots keep
    /// the communicator.
    ///
    /// # Errors
    /// [`EpError::Limit`], [`EpError::Differs`], [`EpError::Unsuited`], or an error of communicator or device.
    pub fn new(comm: &Communicator, config: &GroupConfig) -> Result<Self, EpError> {
        Ok(Self { state: Arc::new(GroupState::new(comm, config)?) })
    }

    /// Lends a slot, until that is dropped. Its dispatches and combines follow each other; other slots are independent.
    ///
    /// # Errors
    /// [`EpError::Slot`] if there is no such slot, or it is lent already.
    pub fn slot(&self, slot: u32) -> Result<Slot, EpError> {
        let Some(state) = self.state.slots.get(slot as usize) else {
            let reason = format!("not there: the group has {}", self.state.slots.len());
            return Err(EpError::Slot { slot, reason });
        };
        if state.taken.swap(true, Ordering::Acquire) {
            let reason = "in use: an earlier call returned it; keep that slot, or drop it first".to_owned();
            return Err(EpError::Slot { slot, reason });
        }
        Ok(Slot::new(self.state.clone(), slot))
    }

    /// Returns the sizes for kernels, which all slots have.
    pub fn sizes(&self) -> gin_ep_kernels::Sizes {
        self.state.sizes()
    }

    /// Returns whether [`Slot::exchange_into`] puts rows into an expert-major layout in the kernel of the dispatch. For
    /// other ranks such a call is the same as [`Slot::exchange`]. All ranks of a group get the same result.
    pub fn expands(&self) -> bool {
        self.state.is_near() && self.state.expands()
    }

    /// Returns the number of blocks of a launch.
    pub fn blocks(&self) -> u64 {
        self.state.shape.blocks()
    }

    /// Returns the first error of each slot's kernels since the last call, the one of the first such slot. The slot's
    /// stream is done.
    ///
    /// # Errors
    /// An error of the device.
    pub fn status(&self) -> Result<Option<Report>, EpError> {
        for (slot, state) in (0..).zip(&self.state.slots) {
            let Some(report) = state.report(slot) else { continue };
            state.status.write(0, &[0u64; 5])?;
            self.state.arena.write((state.params.first / 8 + gin_ep_kernels::CLAIMED_WORD) as usize, &[0])?;
            return Ok(Some(report));
        }
        Ok(None)
    }

    /// Returns the ranks that a slot goes on without, as bits.
    ///
    /// # Errors
    /// [`EpError::Slot`], or an error of the device.
    pub fn masked(&self, slot: u32) -> Result<u64, EpError> {
        let Some(state) = self.state.slots.get(slot as usize) else {
            return Err(EpError::Slot { slot, reason: "not there".to_owned() });
        };
        let word = |index: u64| -> Result<u64, EpError> {
            let mut word = [0u64];
            self.state.arena.read((state.params.first / 8 + index) as usize, &mut word)?;
            Ok(word[0])
        };
        Ok(word(gin_ep_kernels::MASKED_WORD)? | word(gin_ep_kernels::UNSENT_WORD)?)
    }

    /// Lets all ranks take part again, in all slots. Collective; no kernel of the group runs on any rank, and no slot
    /// is lent.
    ///
    /// # Errors
    /// [`EpError::Slot`] if a slot is lent; an error of communicator or device.
    pub fn readmit(&self) -> Result<(), EpError> {
        self.state.check_not_lent()?;
        // The ranks may have made different numbers of dispatches. All begin again after the maximum.
        let mut epochs = vec![0u64; self.state.slots.len()];
        for (state, epoch) in self.state.slots.iter().zip(&mut epochs) {
            let mut word = [0u64];
            self.state.arena.read((state.params.first / 8 + gin_ep_kernels::EPOCH_WORD) as usize, &mut word)?;
            *epoch = word[0];
        }
        let all = all_gather(&self.state.comm, bytemuck::cast_slice(&epochs))?;
        for (slot, state) in self.state.slots.iter().enumerate() {
            let of_rank = |bytes: &Vec<u8>| {
                let word = bytes.get(8 * slot..8 * slot + 8)?;
                Some(u64::from_le_bytes(word.try_into().ok()?))
            };
            let max = all.iter().filter_map(of_rank).max().unwrap_or(0);
            let mut words = vec![0u64; state.params.sizes.words() as usize];
            gin_ep_kernels::reset(&state.params.sizes, &mut words, max);
            // A report that nobody has read stays, and no other is written over it.
            words[gin_ep_kernels::CLAIMED_WORD as usize] = state.report(slot as u32).is_some().into();
            self.state.arena.write((state.params.first / 8) as usize, &words)?;
            state.is_unheard.store(false, Ordering::Relaxed);
            // The ranks may have begun different numbers.
            state.dispatches.store(0, Ordering::Relaxed);
        }
        // No rank sends before all have reset their words.
        all_gather(&self.state.comm, &[])?;
        if self.state.signals.is_some() {
            self.overtake()?;
        }
        Ok(())
    }

    /// Waits until all puts of earlier dispatches and combines have arrived, of this rank and at it. Collective.
    ///
    /// A put to a rank that was silent may still be in flight, and the next one to the same place might overtake it.
    /// A rank that has received an empty dispatch has received all that its sources put before. It sends a second one
    /// after that, so a rank that receives it knows that its own puts have arrived there.
    fn overtake(&self) -> Result<(), EpError> {
        let stream = self.state.comm.gpu().stream()?;
        for number in 0..self.state.slots.len() as u32 {
            let slot = self.slot(number)?;
            slot.exchange_nothing(&stream)?;
            slot.exchange_nothing(&stream)?;
        }
        Ok(stream.synchronize()?)
    }

    /// Frees the memory. Collective; no slot is lent. Waits for this rank's kernels of the group. A group that is
    /// dropped leaves its memory to the communicator.
    ///
    /// # Errors
    /// [`EpError::Slot`] if a slot is lent: then this rank does not take part, and leaves the memory to the
    /// communicator. An error of the communicator. [`EpError::Unread`] if nobody has read a report of the kernels: then
    /// the memory is freed all the same.
    pub fn destroy(self) -> Result<(), EpError> {
        // From here on nobody can lend a slot.
        self.state.check_not_lent()?;
        self.state.slots.iter().for_each(SlotState::settle);
        // All ranks deregister both windows, also if the first fails.
        let signals = self.state.signals.as_ref().map_or(Ok(()), |signals| self.state.comm.deregister(&signals.window));
        self.state.comm.deregister(&self.state.arena)?;
        signals?;
        (0..).zip(&self.state.slots).try_for_each(|(slot, state)| state.check_read(slot))
    }
}

/// The signals of ranks that loads and stores do not reach.
#[derive(Debug)]
pub(crate) struct Signals {
    pub(crate) window: Window<u64>,
    /// The handles of the arena and of this window, for kernels.
    handles: Arc<Memory>,
}

impl Signals {
    fn new(comm: &Communicator, arena: &Window<u64>, signals: usize) -> Result<Self, EpError> {
        let window = comm.alloc_window::<u64>(signals, WindowFlags::SIGNALS)?.named("gin-ep signals");
        let words = [arena.handle(), window.handle()];
        let handles = Memory::new(comm.gpu(), MemoryKind::Device, size_of_val(&words) as u64)?;
        handles.write(0, &words)?;
        Ok(Self { window, handles })
    }
}

/// The part of a group for ranks that loads and stores do not reach.
struct Routed<'a> {
    sizes: &'a Sizes,
    backend: BackendKind,
    /// The first rank of this rank's LSA team, and their number.
    near: (u32, u32),
    /// Number of contexts of the communicator, which slots take in turn.
    contexts: u32,
    epoch: u64,
    slot_bytes: u64,
    /// Number of signals of all slots.
    signals: usize,
}

impl<'a> Routed<'a> {
    /// Returns that part, if there are such ranks.
    fn of(
        comm: &Communicator,
        device: &DeviceComm,
        config: &GroupConfig,
        sizes: &'a Sizes,
    ) -> Result<Option<Self>, EpError> {
        let handle = device.handle();
        let near = (handle.rank - handle.lsa_rank, handle.lsa_size);
        if near.1 == sizes.ranks {
            return Ok(None);
        }
        let needed = CAP_STRONG_SIGNALS | CAP_VA_SIGNALS;
        if handle.capabilities & needed != needed {
            let what = "a group over a network without strong signals at addresses of windows";
            return Err(EpError::Unsuited { what, remedy: "use a network that has them" });
        }
        let signals = Network::signals(sizes) as usize * config.slots as usize;
        let (epoch, slot_bytes) = (config.first_epoch, Network::slot_bytes(sizes, near.1));
        let (backend, contexts) = (comm.backend()?, handle.contexts);
        Ok(Some(Self { sizes, backend, near, contexts, epoch, slot_bytes, signals }))
    }

    /// Returns the parameter of slot `number`, whose memory begins at byte `first` of the arena.
    fn slot(&self, number: u32, first: u64, signals: &Signals) -> Network {
        let place = (signals.handles.address(), number % self.contexts);
        Network::new(self.sizes, number, first, self.near, place, self.epoch)
    }
}
