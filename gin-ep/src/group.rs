// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups: the memory for rows, and the shape of launches.

use crate::{Element, EpError, GroupConfig, Lane, Report};
use gin_ep_kernels::{Code, STATUS_WORDS};
use gin_gpu::{
    DeviceKind, Event, Function, GpuError, LaunchConfig, Memory, MemoryKind, MemorySlice, ModuleSource, Stream,
};
use gin_host::comm::{CommError, Communicator, DeviceComm, Window, WindowFlags};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
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
///     let (stream, mut lane) = (rank.stream()?, group.lane(0)?);
///     let tokens = Tokens::new(&rows, Ids::I32(&ids), 1);
///     let received = lane.dispatch(&stream, &tokens)?.receive(&stream)?;
///     // The experts' kernels run here, and replace the rows. Without any, the rows come back.
///     received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&output))?;
///     stream.synchronize()?;
///     assert_eq!(group.status()?, None);
///     let mut values = vec![0u16; 8];
///     output.read(0, &mut values)?;
///     drop(lane);
///     group.destroy()?;
///     comm.destroy()?;
///     Ok(values)
/// });
/// assert_eq!(outputs.unwrap(), [vec![0x3f80; 8], vec![0x3f80; 8]]);
/// ```
#[derive(Debug)]
pub struct Group<'c> {
    pub(crate) comm: &'c Communicator,
    pub(crate) device: DeviceComm,
    pub(crate) arena: Window<u64>,
    pub(crate) lanes: Vec<LaneState>,
    pub(crate) shape: LaunchConfig,
    pub(crate) element: Element,
    pub(crate) at_source: bool,
    pub(crate) arrange: [Function; 3],
    pub(crate) plan: Function,
    pub(crate) dispatch: Function,
    pub(crate) combine: Function,
}

/// The state of a lane in its group.
#[derive(Debug)]
pub(crate) struct LaneState {
    pub(crate) params: gin_ep_kernels::Lane,
    pub(crate) taken: AtomicBool,
    /// Memory for the plan of each dispatch, if it makes one.
    pub(crate) plan: Option<MemorySlice>,
    status: Arc<Memory>,
    in_use: Mutex<InUse>,
}

/// Streams and memory that kernels of a lane may use.
#[derive(Debug, Default)]
struct InUse {
    streams: Vec<Arc<dyn Stream>>,
    /// Memory, each with the number of the last call that uses it.
    memory: Vec<(u64, MemorySlice)>,
    /// The number of calls.
    calls: u64,
    /// Events after the kernels of a call and of all before, oldest first.
    marks: VecDeque<(u64, Box<dyn Event>)>,
    /// The number of slices that were added since the last mark.
    unmarked: usize,
}

/// The number of slices at which a lane marks its stream.
const MARK_AT: usize = 16;

impl LaneState {
    /// Keeps memory for kernels that a call will launch on a stream, which follow those of all calls before.
    pub(crate) fn keep(&self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        let mut in_use = gin_gpu::lock(&self.in_use);
        if !in_use.streams.iter().any(|kept| Arc::ptr_eq(kept, stream)) {
            in_use.streams.push(stream.clone());
        }
        in_use.let_go(stream)?;
        in_use.calls += 1;
        let calls = in_use.calls;
        let same = |kept: &MemorySlice, new: &MemorySlice| {
            Arc::ptr_eq(kept.memory(), new.memory()) && (kept.offset(), kept.bytes()) == (new.offset(), new.bytes())
        };
        for new in memory {
            match in_use.memory.iter_mut().find(|(_, kept)| same(kept, new)) {
                Some((last, _)) => *last = calls,
                None => {
                    in_use.memory.push((calls, (*new).clone()));
                    in_use.unmarked += 1;
                }
            }
        }
        Ok(())
    }

    /// Waits for the lane's kernels. They end by their deadlines.
    pub(crate) fn settle(&self) {
        gin_gpu::lock(&self.in_use).settle();
    }
}

impl InUse {
    /// Lets go of memory whose kernels have ended, and marks the stream if much was added since the last time.
    fn let_go(&mut self, stream: &Arc<dyn Stream>) -> Result<(), GpuError> {
        if self.marks.is_empty() && self.unmarked < MARK_AT {
            return Ok(());
        }
        // While a stream is captured nothing can be asked, and its kernels run later.
        if self.streams.iter().try_fold(false, |any, stream| Ok::<_, GpuError>(any | stream.is_capturing()?))? {
            return Ok(());
        }
        if self.unmarked >= MARK_AT {
            self.marks.push_back((self.calls, stream.record()?));
            self.unmarked = 0;
        }
        while let Some((calls, mark)) = self.marks.front() {
            if !mark.is_done()? {
                break;
            }
            let ended = *calls;
            self.memory.retain(|(last, _)| *last > ended);
            self.marks.pop_front();
        }
        Ok(())
    }

    fn settle(&mut self) {
        for stream in self.streams.drain(..) {
            // The caller gets the error of a kernel when it synchronises, too. Then the kernel has ended as well.
            let _ = stream.synchronize();
        }
        self.memory.clear();
        self.marks.clear();
        self.unmarked = 0;
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        self.lanes.iter().for_each(LaneState::settle);
    }
}

/// Returns the bytes that each rank passes. Collective.
fn gathered(comm: &Communicator, mine: &[u8]) -> Result<Vec<Vec<u8>>, EpError> {
    comm.bootstrap().all_gather(mine).map_err(|error| EpError::Comm(CommError::from(error)))
}

impl<'c> Group<'c> {
    /// Allocates the memory of a group. Collective: all ranks pass the same configuration.
    ///
    /// # Errors
    /// [`EpError::Limit`], [`EpError::Differs`], [`EpError::NotReachable`], or an error of communicator or device.
    pub fn new(comm: &'c Communicator, config: &GroupConfig) -> Result<Self, EpError> {
        let (ranks, device) = (comm.ranks(), comm.device()?);
        let sizes = config.sizes(ranks)?;
        let gpu = comm.gpu();
        let place = format!("{}/{}", comm.bootstrap().host(comm.rank()), gpu.pci_address().unwrap_or_default());
        let ours = format!("{config:?}");
        let all = gathered(comm, format!("{place}\n{ours}").as_bytes())?;
        let all: Vec<String> = all.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
        for (rank, text) in all.iter().enumerate() {
            let theirs = text.split_once('\n').map_or("", |(_, theirs)| theirs);
            // Some values need not agree, but one rule is simpler than two.
            if theirs != ours {
                return Err(EpError::Differs { rank: rank as u32, theirs: theirs.to_owned(), ours });
            }
        }
        let reached = device.handle().lsa_size;
        if reached != ranks {
            return Err(EpError::NotReachable { reached, ranks });
        }
        let lane_bytes = sizes.lane_bytes();
        let arena = comm.alloc_window::<u64>((lane_bytes * u64::from(config.lanes) / 8) as usize, WindowFlags::NONE)?;
        let arena = arena.named("gin-ep");
        let lane = |number: u32| -> Result<LaneState, EpError> {
            let status = Memory::new(gpu, MemoryKind::Pinned, 8 * STATUS_WORDS)?;
            let (first, deadline) = (u64::from(number) * lane_bytes, config.deadline);
            let params = gin_ep_kernels::Lane { sizes, first, status: status.address(), deadline };
            let plan =
                config.has_plan().then(|| Memory::new(gpu, MemoryKind::Device, sizes.plan_bytes())).transpose()?;
            let plan = plan.map(|memory| memory.whole());
            Ok(LaneState { params, taken: AtomicBool::new(false), plan, status, in_use: Mutex::default() })
        };
        let lanes = (0..config.lanes).map(lane).collect::<Result<Vec<_>, _>>()?;
        if config.first_epoch != 0 {
            let mut words = vec![0u64; sizes.words() as usize];
            gin_ep_kernels::reset(&sizes, &mut words, config.first_epoch);
            for lane in &lanes {
                arena.write((lane.params.first / 8) as usize, &words)?;
            }
            // No rank sends before all have written.
            gathered(comm, &[])?;
        }
        // Ranks that share a GPU share its processors, so that each of them always has room for a block.
        let sharing = match gpu.kind() {
            DeviceKind::Cuda => all.iter().filter(|text| text.starts_with(&format!("{place}\n"))).count() as u64,
            DeviceKind::Virtual => 1,
        };
        let shape = LaunchConfig::new(1, config.threads).dynamic_shared(sizes.shared_bytes());
        let kernels = gpu.load(ModuleSource::Linked)?;
        let (plan, (dispatch, combine)) = (kernels.function("ep_plan")?, config.kernels());
        let (dispatch, combine) = (kernels.function(dispatch)?, kernels.function(combine)?);
        let mut most = config.blocks.map_or(u64::MAX, u64::from);
        for kernel in [&dispatch, &combine] {
            most = most.min(gpu.resident_blocks(kernel, &shape)? / sharing);
        }
        let most = most.min(config.useful_blocks(&sizes));
        let blocks = config.grid.unwrap_or(most.clamp(1, 65_535) as u32);
        let shape = LaunchConfig::new(blocks, config.threads).dynamic_shared(shape.dynamic_shared);
        let (element, at_source) = (config.element, config.at_source);
        let arrange = |part: &str| kernels.function(&format!("ep_arrange_{part}"));
        let arrange = [arrange("count")?, arrange("place")?, arrange("copy")?];
        Ok(Self { comm, device, arena, lanes, shape, element, at_source, arrange, plan, dispatch, combine })
    }

    /// Lends a lane. Its dispatches and combines follow each other; other lanes are independent.
    ///
    /// # Errors
    /// [`EpError::Lane`] if there is no such lane, or it is lent already.
    pub fn lane(&self, lane: u32) -> Result<Lane<'_>, EpError> {
        let Some(state) = self.lanes.get(lane as usize) else {
            let reason = format!("not there: the group has {}", self.lanes.len());
            return Err(EpError::Lane { lane, reason });
        };
        if state.taken.swap(true, Ordering::Acquire) {
            return Err(EpError::Lane { lane, reason: "in use".to_owned() });
        }
        Ok(Lane::new(self, lane))
    }

    /// Returns the sizes for kernels, which all lanes have.
    pub fn sizes(&self) -> gin_ep_kernels::Sizes {
        self.lanes[0].params.sizes
    }

    /// Returns the number of blocks of a launch.
    pub fn blocks(&self) -> u64 {
        self.shape.blocks()
    }

    /// Returns the first error of each lane's kernels since the last call, the one of the first such lane. The lane's
    /// stream is done.
    ///
    /// # Errors
    /// An error of the device.
    pub fn status(&self) -> Result<Option<Report>, EpError> {
        for (lane, state) in self.lanes.iter().enumerate() {
            let mut words = [0u64; 5];
            state.status.read(0, &mut words)?;
            let [code, rank, expert, seen, limit] = words;
            let Some(code) = Code::from_word(code) else { continue };
            state.status.write(0, &[0u64; 5])?;
            self.arena.write((state.params.first / 8 + gin_ep_kernels::CLAIMED_WORD) as usize, &[0])?;
            let (lane, rank, expert) = (lane as u32, rank as u32, expert as u32);
            return Ok(Some(Report { lane, code, rank, expert, seen, limit }));
        }
        Ok(None)
    }

    /// Returns the ranks that a lane goes on without, as bits.
    ///
    /// # Errors
    /// [`EpError::Lane`], or an error of the device.
    pub fn masked(&self, lane: u32) -> Result<u64, EpError> {
        let Some(state) = self.lanes.get(lane as usize) else {
            return Err(EpError::Lane { lane, reason: "not there".to_owned() });
        };
        let mut word = [0u64];
        self.arena.read((state.params.first / 8 + gin_ep_kernels::MASKED_WORD) as usize, &mut word)?;
        Ok(word[0])
    }

    /// Lets all ranks take part again, in all lanes. Collective; no kernel of the group runs on any rank, and no lane
    /// is lent.
    ///
    /// # Errors
    /// [`EpError::Lane`] if a lane is lent; an error of communicator or device.
    pub fn readmit(&self) -> Result<(), EpError> {
        for (lane, state) in self.lanes.iter().enumerate() {
            if state.taken.load(Ordering::Acquire) {
                return Err(EpError::Lane { lane: lane as u32, reason: "in use".to_owned() });
            }
        }
        // The ranks may have made different numbers of dispatches. All begin again after the most.
        let mut epochs = vec![0u64; self.lanes.len()];
        for (state, epoch) in self.lanes.iter().zip(&mut epochs) {
            let mut word = [0u64];
            self.arena.read((state.params.first / 8 + gin_ep_kernels::EPOCH_WORD) as usize, &mut word)?;
            *epoch = word[0];
        }
        let all = gathered(self.comm, bytemuck::cast_slice(&epochs))?;
        for (lane, state) in self.lanes.iter().enumerate() {
            let of_rank = |bytes: &Vec<u8>| {
                let word = bytes.get(8 * lane..8 * lane + 8)?;
                Some(u64::from_le_bytes(word.try_into().ok()?))
            };
            let most = all.iter().filter_map(of_rank).max().unwrap_or(0);
            let mut words = vec![0u64; state.params.sizes.words() as usize];
            gin_ep_kernels::reset(&state.params.sizes, &mut words, most);
            self.arena.write((state.params.first / 8) as usize, &words)?;
        }
        // No rank sends before all have reset their words.
        gathered(self.comm, &[])?;
        Ok(())
    }

    /// Frees the memory. Collective. Waits for this rank's kernels of the group. A group that is dropped leaves its
    /// memory to the communicator.
    ///
    /// # Errors
    /// An error of the communicator.
    pub fn destroy(self) -> Result<(), EpError> {
        self.lanes.iter().for_each(LaneState::settle);
        Ok(self.comm.deregister(&self.arena)?)
    }
}
