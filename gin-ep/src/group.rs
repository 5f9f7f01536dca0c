// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups: the memory for rows, and the shape of launches.

use crate::in_use::InUse;
use crate::meet::{gathered, meet};
use crate::{Element, EpError, GroupConfig, Lane, Report};
use gin_ep_kernels::{Code, STATUS_WORDS};
use gin_gpu::{Function, LaunchConfig, Memory, MemoryKind, MemorySlice, ModuleSource, Stream};
use gin_host::comm::{Communicator, DeviceComm, Window, WindowFlags};
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

impl LaneState {
    /// Keeps memory for kernels that a call will launch on a stream, which follow those of all calls before.
    pub(crate) fn keep(&self, stream: &Arc<dyn Stream>, memory: &[&MemorySlice]) -> Result<(), EpError> {
        gin_gpu::lock(&self.in_use).keep(stream, memory)
    }

    /// Waits for the lane's kernels. They end by their deadlines.
    pub(crate) fn settle(&self) {
        gin_gpu::lock(&self.in_use).settle();
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        self.lanes.iter().for_each(LaneState::settle);
    }
}

impl<'c> Group<'c> {
    /// Allocates the memory of a group. Collective: all ranks pass the same configuration.
    ///
    /// # Errors
    /// [`EpError::Limit`], [`EpError::Differs`], [`EpError::NotReachable`], or an error of communicator or device.
    pub fn new(comm: &'c Communicator, config: &GroupConfig) -> Result<Self, EpError> {
        let (ranks, gpu) = (comm.ranks(), comm.gpu());
        let sizes = config.sizes(ranks)?;
        let (device, sharing) = meet(comm, &format!("{config:?}"))?;
        let lane_bytes = sizes.lane_bytes();
        let arena = comm.alloc_window::<u64>((lane_bytes * u64::from(config.lanes) / 8) as usize, WindowFlags::NONE)?;
        let arena = arena.named("gin-ep");
        let lane = |number: u32| -> Result<LaneState, EpError> {
            let status = Memory::new(gpu, MemoryKind::Pinned, 8 * STATUS_WORDS)?;
            let (first, deadline) = (u64::from(number) * lane_bytes, config.deadline);
            let params = gin_ep_kernels::Lane::new(sizes, first, status.address(), deadline);
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
        let shape = LaunchConfig::new(1, config.block()).dynamic_shared(sizes.shared_bytes());
        let kernels = gpu.load(ModuleSource::Linked)?;
        let (plan, (dispatch, combine)) = (kernels.function("ep_plan")?, config.kernels());
        let (dispatch, combine) = (kernels.function(dispatch)?, kernels.function(combine)?);
        let mut most = config.blocks.map_or(u64::MAX, u64::from);
        for kernel in [&dispatch, &combine] {
            most = most.min(gpu.resident_blocks(kernel, &shape)? / sharing);
        }
        if sharing > 1 {
            // A kernel that gin has not loaded may not start on a processor with a waiting block, because the two
            // divide its memory into L1 and shared memory differently. So each rank leaves processors to the others.
            // With this much shared memory one block fits on a processor.
            let alone = shape.dynamic_shared(gpu.limits().dynamic_shared / 4 * 3);
            most = most.min(gpu.resident_blocks(&dispatch, &alone)? / sharing);
        }
        let most = most.min(config.useful_blocks(&sizes));
        let blocks = config.grid.unwrap_or(most.clamp(1, 65_535) as u32);
        let shape = LaunchConfig::new(blocks, config.block()).dynamic_shared(shape.dynamic_shared);
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
