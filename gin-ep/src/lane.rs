// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lanes: dispatch, receive, combine.

use crate::group::LaneState;
use crate::{EpError, Group};
use gin_ep_kernels as kernels;
use gin_ep_kernels::{RECEIVE, SEND, WIDE_IDS};
use gin_gpu::{KernelArg, LaunchConfig, MemorySlice, Plain, Stream};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The ids of tokens' experts: `topk` for each token, in memory of the device. A negative id is none.
#[derive(Clone, Copy, Debug)]
pub enum Ids<'a> {
    /// Of 32 bits.
    I32(&'a MemorySlice),
    /// Of 64 bits.
    I64(&'a MemorySlice),
}

/// The number of tokens of a dispatch.
#[derive(Clone, Copy, Debug)]
pub enum Number<'a> {
    /// This many.
    Is(u32),
    /// As many as this word in memory of the device, a `u32`, says when the kernel runs.
    At(&'a MemorySlice),
}

impl From<u32> for Number<'_> {
    fn from(count: u32) -> Self {
        Self::Is(count)
    }
}

/// The tokens of a rank's dispatch, in memory of the device.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    rows: &'a MemorySlice,
    ids: Ids<'a>,
    weights: Option<&'a MemorySlice>,
    count: Number<'a>,
}

impl<'a> Tokens<'a> {
    /// Makes them of rows, ids and their number. All weights are 1.
    pub fn new(rows: &'a MemorySlice, ids: Ids<'a>, count: impl Into<Number<'a>>) -> Self {
        Self { rows, ids, weights: None, count: count.into() }
    }

    /// Sets the number of tokens.
    #[must_use]
    pub fn count(mut self, count: impl Into<Number<'a>>) -> Self {
        self.count = count.into();
        self
    }

    /// Sets the weights: an `f32` for each id. The receiving ranks get them with the rows.
    #[must_use]
    pub fn weights(mut self, weights: &'a MemorySlice) -> Self {
        self.weights = Some(weights);
        self
    }
}

/// The rows that a combine returns.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// The received rows, which the experts have replaced.
    InPlace,
    /// Rows in the places of the received ones: for each rank as many as the group has tokens.
    At(&'a MemorySlice),
}

/// One dispatch at a time. The lane lends itself to [`Sent`] and [`Received`], so a second dispatch before the first
/// has ended does not compile:
///
/// ```compile_fail,E0499
/// # use gin_ep::{EpError, Lane, Tokens};
/// # use gin_gpu::Stream;
/// # use std::sync::Arc;
/// fn twice(lane: &mut Lane<'_>, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<(), EpError> {
///     let first = lane.dispatch(stream, tokens)?;
///     let second = lane.dispatch(stream, tokens)?;
///     first.receive(stream)?;
///     Ok(())
/// }
/// ```
///
/// Calls of one lane take one stream, or streams that events order. The lane keeps the memory of its calls. When it is
/// dropped it waits for its kernels.
#[derive(Debug)]
pub struct Lane<'g> {
    group: &'g Group<'g>,
    number: u32,
    is_unheard: bool,
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        self.state().settle();
        self.state().taken.store(false, Ordering::Release);
    }
}

/// Returns the address of memory after a check of length and alignment.
fn address(what: &'static str, memory: &MemorySlice, needed: u64, align: u64) -> Result<u64, EpError> {
    let (address, given) = (memory.address(), memory.bytes());
    if given < needed {
        return Err(EpError::Short { what, given, needed });
    }
    if !address.is_multiple_of(align) {
        return Err(EpError::Misaligned { what, address, align });
    }
    Ok(address)
}

impl<'g> Lane<'g> {
    pub(crate) fn new(group: &'g Group<'_>, number: u32) -> Self {
        Self { group, number, is_unheard: false }
    }

    fn state(&self) -> &'g LaneState {
        &self.group.lanes[self.number as usize]
    }

    /// Sends the rows. They are read in the order of the stream; the call returns at once.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::NotReceived`], an error of the device.
    pub fn dispatch(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<Sent<'_>, EpError> {
        let tokens = self.start(stream, tokens, SEND)?;
        self.is_unheard = true;
        Ok(Sent { ended: Ended { lane: self, tokens } })
    }

    /// Sends the rows and waits for those of all ranks, in one kernel. It takes less time than two.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn exchange(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<Received<'_>, EpError> {
        let tokens = self.start(stream, tokens, SEND | RECEIVE)?;
        Ok(Received { ended: Ended { lane: self, tokens } })
    }

    fn start(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: &Tokens<'_>,
        phases: u32,
    ) -> Result<kernels::Tokens, EpError> {
        if self.is_unheard {
            return Err(EpError::NotReceived { lane: self.number });
        }
        let sizes = &self.state().params.sizes;
        // With a number on the device, memory for the most is needed.
        let most = match tokens.count {
            Number::Is(count) => u64::from(count.min(sizes.tokens)),
            Number::At(_) => sizes.tokens.into(),
        };
        let ids = most * u64::from(sizes.topk);
        let mut params = kernels::Tokens {
            rows: address("the memory of rows", tokens.rows, most * u64::from(sizes.row_bytes), 16)?,
            ids: 0,
            weights: 0,
            count_at: 0,
            count: 0,
            flags: 0,
        };
        let memory = match tokens.ids {
            Ids::I32(memory) => {
                params.ids = address("the memory of ids", memory, 4 * ids, 4)?;
                memory
            }
            Ids::I64(memory) => {
                (params.ids, params.flags) = (address("the memory of ids", memory, 8 * ids, 8)?, WIDE_IDS);
                memory
            }
        };
        let mut used = vec![tokens.rows, memory];
        if let Some(weights) = tokens.weights {
            params.weights = address("the memory of weights", weights, 4 * ids, 4)?;
            used.push(weights);
        }
        match tokens.count {
            Number::Is(count) => params.count = count,
            Number::At(memory) => {
                params.count_at = address("the memory of the number of tokens", memory, 4, 4)?;
                used.push(memory);
            }
        }
        self.state().keep(stream, &used)?;
        self.launch_dispatch(stream, self.group.shape, params, phases)?;
        Ok(params)
    }

    fn launch_dispatch(
        &self,
        stream: &Arc<dyn Stream>,
        shape: LaunchConfig,
        tokens: kernels::Tokens,
        phases: u32,
    ) -> Result<(), EpError> {
        let group = self.group;
        let (lane, tokens) = (Plain(self.state().params), Plain(tokens));
        let arguments: [&dyn KernelArg; 5] = [&group.device, &group.arena, &lane, &tokens, &phases];
        // Safety: arena and lane are the communicator's, the memory of the tokens was checked and is kept, and the lane
        // lends itself, so that its kernels follow each other.
        unsafe { stream.launch(&group.dispatch, shape, &arguments)? };
        Ok(())
    }
}

/// A lane with its dispatch.
#[derive(Debug)]
struct Ended<'l> {
    lane: &'l mut dyn Lent,
    tokens: kernels::Tokens,
}

/// A lane without the lifetime of its group, which a value that borrows the lane need not name.
trait Lent: std::fmt::Debug {
    fn receive(&mut self, stream: &Arc<dyn Stream>, tokens: kernels::Tokens) -> Result<(), EpError>;
    fn state(&self) -> &LaneState;
    fn arena(&self) -> &gin_host::comm::Window<u64>;
    fn combine(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: kernels::Tokens,
        rows: Rows<'_>,
        output: &MemorySlice,
    ) -> Result<(), EpError>;
}

impl Lent for Lane<'_> {
    fn receive(&mut self, stream: &Arc<dyn Stream>, tokens: kernels::Tokens) -> Result<(), EpError> {
        self.state().keep(stream, &[])?;
        // One warp waits.
        self.launch_dispatch(stream, LaunchConfig::new(1, 32), tokens, RECEIVE)?;
        self.is_unheard = false;
        Ok(())
    }

    fn state(&self) -> &LaneState {
        Lane::state(self)
    }

    fn arena(&self) -> &gin_host::comm::Window<u64> {
        &self.group.arena
    }

    fn combine(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: kernels::Tokens,
        rows: Rows<'_>,
        output: &MemorySlice,
    ) -> Result<(), EpError> {
        let (group, params) = (self.group, Lane::state(self).params);
        let sizes = &params.sizes;
        let row_bytes = u64::from(sizes.row_bytes);
        let most = if tokens.count_at == 0 { tokens.count.min(sizes.tokens) } else { sizes.tokens };
        let to = address("the memory of the output", output, u64::from(most) * row_bytes, 16)?;
        let mut used = vec![output];
        let from = match rows {
            Rows::InPlace => 0,
            Rows::At(memory) => {
                used.push(memory);
                address("the memory of returned rows", memory, sizes.room() * row_bytes, 16)?
            }
        };
        Lane::state(self).keep(stream, &used)?;
        let (lane, tokens) = (Plain(params), Plain(tokens));
        let arguments: [&dyn KernelArg; 6] = [&group.device, &group.arena, &lane, &tokens, &from, &to];
        // Safety: as for the dispatch.
        unsafe { stream.launch(&group.combine, group.shape, &arguments)? };
        Ok(())
    }
}

/// A dispatch that was sent. Until it is received, the lane takes no other.
#[derive(Debug)]
#[must_use = "the lane takes no other dispatch before this one is received"]
pub struct Sent<'l> {
    ended: Ended<'l>,
}

impl<'l> Sent<'l> {
    /// Waits, in the order of the stream, for the rows of all ranks. The call returns at once.
    ///
    /// # Errors
    /// An error of the device.
    pub fn receive(self, stream: &Arc<dyn Stream>) -> Result<Received<'l>, EpError> {
        self.ended.lane.receive(stream, self.ended.tokens)?;
        Ok(Received { ended: self.ended })
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
    /// The elements: BF16 as bits.
    pub row: Vec<u16>,
}

/// A dispatch that was received.
#[derive(Debug)]
pub struct Received<'l> {
    ended: Ended<'l>,
}

impl Received<'_> {
    /// Returns the received rows for kernels, which get it as a parameter. They run after the receive and before the
    /// combine, in the order of the stream.
    pub fn view(&self) -> kernels::Received {
        let lane = &self.ended.lane;
        // Safety: the group made the lane for this arena.
        unsafe { kernels::Received::new(lane.state().params, lane.arena().memory().address()) }
    }

    /// Gives the rows up without a combine, as dropping does.
    pub fn release(self) {}

    /// Copies the rows to the host, for tests and tools: for each source its rows. The stream is done.
    ///
    /// # Errors
    /// An error of the device.
    pub fn fetch(&self) -> Result<Vec<Vec<ReceivedRow>>, EpError> {
        let (params, arena) = (&self.ended.lane.state().params, self.ended.lane.arena().memory());
        let (sizes, mut all) = (&params.sizes, Vec::new());
        let places = kernels::Places::new(params, {
            let mut word = [0u64];
            arena.read(params.first + 8 * kernels::EPOCH_WORD, &mut word)?;
            word[0]
        });
        for source in 0..sizes.ranks {
            let mut count = [0u64];
            arena.read(places.got(source), &mut count)?;
            let mut rows = Vec::new();
            for row in 0..count[0] {
                let mut elements = vec![0u16; sizes.row_bytes as usize / 2];
                arena.read(places.rows(source) + row * u64::from(sizes.row_bytes), &mut elements)?;
                let mut meta = vec![0u32; sizes.meta_bytes() as usize / 4];
                arena.read(places.meta(source) + row * u64::from(sizes.meta_bytes()), &mut meta)?;
                let (topk, token) = (sizes.topk as usize, meta[0]);
                let experts = meta[1..=topk].iter().map(|&word| word as i32).collect();
                let weights = meta[1 + topk..][..topk].iter().map(|&word| f32::from_bits(word)).collect();
                rows.push(ReceivedRow { token, experts, weights, row: elements });
            }
            all.push(rows);
        }
        Ok(all)
    }

    /// Returns a row for each received one, and stores the sums of the rows that come back, one for each of this rank's
    /// tokens: in FP32, in the order in which a token's ids name the ranks first, rounded once. A token without experts
    /// gets zeros.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, an error of the device.
    pub fn combine(self, stream: &Arc<dyn Stream>, rows: Rows<'_>, output: &MemorySlice) -> Result<(), EpError> {
        self.ended.lane.combine(stream, self.ended.tokens, rows, output)
    }
}
