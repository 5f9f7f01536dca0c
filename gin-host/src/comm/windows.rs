// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registration and deregistration of windows.

use super::gdaki::RemotePart;
use super::live::Live;
use super::reach;
use super::symmetric::OwnPart;
use super::window::{Registered, Window, WindowFlags};
use super::wire::same;
use super::{CommError, Communicator};
use crate::proxy::{Command, Waiting, WindowInfo};
use bytemuck::Pod;
use gin_abi::handle::{ENGINE_CPU, ENGINE_GPU, ENGINE_NIC, NEAR_WORDS, STRIDE_SHIFT};
use gin_abi::{CommHandle, SignalTarget, WindowData, WindowHandle};
use gin_device::exec::watch;
use gin_device::internal::host_word;
use gin_gpu::flat::FlatPlace;
use gin_gpu::share;
use gin_gpu::{GpuError, Memory, MemoryKind, MemorySlice};
use gin_net::{Key, LocalWindow, NetError};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of the next window of this process.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// The maximum number of bytes of a window, so that no sum of offset and length overflows.
const MAX_BYTES: u64 = gin_abi::descriptor::MAX_OFFSET;

/// Returns the error of memory for the signals of a window of `bytes` bytes.
fn for_signals(error: GpuError, bytes: u64) -> GpuError {
    match error {
        GpuError::OutOfMemory { bytes: asked, kind, reason } => {
            let purpose = format!(
                "they are for the signals of a window of {bytes} bytes; a window without signals needs none, so register \
                 only the part whose words are signals"
            );
            GpuError::OutOfMemory { bytes: asked, kind, reason: format!("{reason}; {purpose}") }
        }
        error => error,
    }
}

/// This rank's part of a window before the ranks exchange messages.
struct Prepared {
    part: Part,
    memory: MemorySlice,
    stride: u32,
    plane_cpu: Option<Arc<Memory>>,
    plane_gpu: Option<Arc<Memory>>,
    plane_near: Option<Arc<Memory>>,
}

/// The message of a rank about its part of a window.
#[derive(Serialize, Deserialize)]
struct Part {
    id: u32,
    flags: u32,
    bytes: u64,
    /// Key of the memory that contains the part.
    memory: Vec<u8>,
    /// The first byte of the part in that memory.
    offset: u64,
    /// Key of the words that GPUs raise. Empty if there are none.
    plane: Vec<u8>,
    key: Vec<u8>,
    /// The part as work-queue entries name it, if kernels drive a NIC and the part has bytes; else 0.
    nic_key: RemotePart,
}

/// The number of words that are read at a time.
const CHUNK: usize = 1 << 16;

/// Makes signals at words of a window begin at 0, whatever the words contain, if the NIC raises these words.
fn begin_at(window: &MemorySlice, near: &Memory) -> Result<(), GpuError> {
    let words = window.bytes() / 8;
    for first in (0..words).step_by(CHUNK) {
        let mut held = vec![0u64; CHUNK.min((words - first) as usize)];
        window.read(8 * first, &mut held)?;
        if held.iter().all(|&word| word == 0) {
            continue;
        }
        let mut beside = vec![0u64; held.len() * NEAR_WORDS as usize];
        for (near, &word) in beside.chunks_exact_mut(NEAR_WORDS as usize).zip(&held) {
            near[host_word::SPARE as usize] = word;
        }
        near.write(8 * NEAR_WORDS * first, &beside)?;
    }
    Ok(())
}

impl Live {
    /// Ends the exposure of this memory to other ranks, unless another window contains it. All ranks have closed a
    /// window of the memory.
    fn let_go_of(&self, memory: &Arc<Memory>) {
        if !self.windows.iter().flatten().any(|window| Arc::ptr_eq(window.memory.memory(), memory)) {
            memory.exposure().remove(&self.sharers);
        }
    }

    /// Removes a window from the tables of kernels and NIC.
    fn forget_window(&self, id: u32) -> Result<(), GpuError> {
        let closed = self.gdaki.as_ref().map_or(Ok(()), |gdaki| gdaki.close_window(id));
        self.resources.clear_window(id).and(closed)
    }
}

fn address(memory: &Option<Arc<Memory>>) -> u64 {
    memory.as_ref().map_or(0, |memory| memory.address())
}

impl Communicator {
    /// Allocates device memory for `len` elements on this rank and registers it. Collective. Ranks may pass different
    /// lengths, including 0. The elements are zero at first.
    ///
    /// The parts of an LSA team's ranks are at a fixed distance, [`Window::stride`], if their devices support that.
    /// Then each part takes a whole number of the device's [granules](gin_gpu::MemorySharing::granularity).
    ///
    /// # Errors
    /// As [`register`](Self::register), and
    /// - [`CommError::NoPlace`] if no addresses are left for a window of that length.
    /// - [`CommError::Gpu`] with [`GpuError::Addresses`] if the communicator could not reserve addresses when it was
    ///   initialised, or with [`GpuError::OutOfMemory`].
    pub fn alloc_window<T: Pod>(&self, len: usize, flags: WindowFlags) -> Result<Window<T>, CommError> {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        const CALL: &str = "allocate a window";
        let work = |live: &mut Live| {
            let across = self.is_across();
            let part = OwnPart { device: &self.device, flat: &live.flat, handle: live.handle, bytes, across };
            let all = self.agree(live, CALL, part.wish())?;
            let memory = part.memory(all);
            let stride = live.flat.as_ref().ok().and_then(Option::as_ref).map_or(0, |range| range.handle_stride());
            self.register_outcome(live, memory.map(|memory| memory.whole()), stride, flags)
        };
        self.traced(CALL, || self.with_live(CALL, work))
    }

    /// Registers memory of this rank as its part of a window. Collective, and not the same collective call as
    /// [`alloc_window`](Self::alloc_window). Ranks may pass different lengths, including 0.
    ///
    /// # Errors
    /// - [`CommError::State`] or [`CommError::Ended`] unless the communicator is active.
    /// - [`CommError::Misaligned`] if the memory is not aligned for `T`, or to 8 bytes for signals.
    /// - [`CommError::AlreadyRegistered`] if part of the memory is in a window of this communicator.
    /// - [`CommError::NotRegistrable`] for memory of another device.
    /// - [`CommError::Nic`] with [`NicError::HostWindow`](gin_nic::NicError::HostWindow) for pinned memory if kernels
    ///   drive a NIC.
    /// - [`CommError::Gpu`] with [`GpuError::Foreign`] if a rank of the LSA team does not reach imported memory of
    ///   another.
    /// - [`CommError::Limit`] if the communicator has its maximum number of windows already.
    /// - [`CommError::Disagreement`] if ranks pass different flags.
    /// - [`CommError::OtherRank`] if another rank failed.
    pub fn register<T: Pod>(&self, memory: &MemorySlice, flags: WindowFlags) -> Result<Window<T>, CommError> {
        const CALL: &str = "register a window";
        self.traced(CALL, || self.with_live(CALL, |live| self.register_outcome(live, Ok(memory.clone()), 0, flags)))
    }

    /// Registers this rank's part, or takes part with the error of its allocation. `stride`: the stride of the handle,
    /// if the parts of the team's ranks are at a fixed distance.
    fn register_outcome<T: Pod>(
        &self,
        live: &mut Live,
        memory: Result<MemorySlice, CommError>,
        stride: u32,
        flags: WindowFlags,
    ) -> Result<Window<T>, CommError> {
        const { assert!(size_of::<T>() != 0, "a window's elements have a size") };
        let align = if flags.signals { align_of::<T>().max(8) } else { align_of::<T>() };
        let prepared = memory.and_then(|memory| self.prepare_window(live, memory, stride, align as u64, flags));
        let id = prepared.as_ref().ok().map(|prepared| prepared.part.id);
        match self.join_window(live, prepared, flags) {
            Ok(registered) => {
                live.windows[registered.handle.id as usize] = Some(registered.clone());
                Ok(Window::new(registered))
            }
            Err(error) => {
                if let Some(id) = id {
                    live.forget_window(id)?;
                    live.ask(|to| Command::Wait(Waiting::Close { window: id, to }))?;
                }
                Err(error)
            }
        }
    }

    /// Prepares this rank's part, before the ranks exchange messages.
    fn prepare_window(
        &self,
        live: &Live,
        memory: MemorySlice,
        stride: u32,
        align: u64,
        flags: WindowFlags,
    ) -> Result<Prepared, CommError> {
        let (start, bytes) = (memory.address(), memory.bytes());
        let end = start + bytes;
        if bytes > MAX_BYTES {
            return Err(CommError::Limit { what: "bytes of a window", asked: bytes, least: 0, limit: MAX_BYTES });
        }
        if !start.is_multiple_of(align) {
            return Err(CommError::Misaligned { address: start, align });
        }
        if !Arc::ptr_eq(memory.memory().device(), &self.device) {
            return Err(CommError::NotRegistrable { reason: "it belongs to another device than the communicator's" });
        }
        for window in live.windows.iter().flatten() {
            let other = window.memory.address();
            let overlap = start < other + window.memory.bytes() && other < end;
            if overlap && bytes > 0 {
                return Err(CommError::AlreadyRegistered { address: start, end, window: window.handle.id });
            }
        }
        if self.is_across() {
            memory.memory().exposure().add(&live.sharers)?;
        }
        let Some(id) = live.windows.iter().position(Option::is_none) else {
            let limit = live.windows.len() as u64;
            return Err(CommError::Limit { what: "windows", asked: limit + 1, least: 1, limit });
        };
        let plane_bytes = bytes.next_multiple_of(8);
        let raises = |engine| flags.signals && live.handle.engines & engine != 0;
        let plane = |engine, kind| {
            let plane = || Memory::for_ranks(&self.device, kind, plane_bytes, self.is_across());
            raises(engine).then(plane).transpose().map_err(|error| for_signals(error, bytes))
        };
        let near = || Memory::new(&self.device, MemoryKind::Device, NEAR_WORDS * plane_bytes);
        let plane_near = || near().map_err(|error| for_signals(error, bytes));
        let plane_near = flags.signals.then(plane_near).transpose()?;
        let nic = raises(ENGINE_NIC);
        if let Some(near) = plane_near.as_ref().filter(|_| nic) {
            begin_at(&memory, near)?;
        }
        let (plane_cpu, plane_gpu) = (plane(ENGINE_CPU, MemoryKind::Pinned)?, plane(ENGINE_GPU, MemoryKind::Device)?);
        let id = id as u32;
        let window = LocalWindow { id, memory: memory.clone(), plane: plane_cpu.clone(), nic };
        let key = live.ask(|to| Command::Register { window, to })??;
        // Last, because no later step that fails would undo it.
        let nic_key = live.gdaki.as_ref().map(|gdaki| gdaki.register(id, &memory, flags.signals)).transpose()?;
        let part = Part {
            id,
            flags: flags.bits(),
            bytes,
            memory: share::offer(memory.memory()).0,
            offset: memory.offset(),
            plane: plane_gpu.as_ref().map(|plane| share::offer(plane).0).unwrap_or_default(),
            key: key.0,
            nic_key: nic_key.unwrap_or_default(),
        };
        Ok(Prepared { part, memory, stride, plane_cpu, plane_gpu, plane_near })
    }

    /// Exchanges messages about the parts and connects them. Collective.
    fn join_window(
        &self,
        live: &Live,
        prepared: Result<Prepared, CommError>,
        flags: WindowFlags,
    ) -> Result<Arc<Registered>, CommError> {
        const CALL: &str = "register a window";
        let parts = self.agree::<Part>(live, CALL, prepared.as_ref().map(|prepared| &prepared.part))?;
        let prepared = prepared?;
        let own = &prepared.part;
        for (rank, part) in (0..).zip(&parts) {
            same("window id", rank, part.id.into(), own.id.into())?;
            same("window flags", rank, part.flags.into(), own.flags.into())?;
        }
        let connected = self.connect_window(live, prepared, flags, parts);
        // No rank uses the window before all ranks can serve it.
        self.agree::<()>(live, "connect a window", connected.as_ref().map(drop))?;
        connected
    }

    /// Connects the parts of all ranks, by rank.
    fn connect_window(
        &self,
        live: &Live,
        prepared: Prepared,
        flags: WindowFlags,
        parts: Vec<Part>,
    ) -> Result<Arc<Registered>, CommError> {
        // The addresses at which kernels of this rank reach parts, and planes of words that GPUs raise, by loads and
        // stores; 0 for a rank that they do not reach. `held` keeps the memory at these addresses alive.
        let (mut windows, mut planes, mut held) = (Vec::new(), Vec::new(), Vec::new());
        let mut reached = |memory: Arc<Memory>| -> Result<u64, CommError> {
            memory.check_reach(&*self.device)?;
            let address = memory.address();
            held.push(memory);
            Ok(address)
        };
        for (rank, part) in (0..).zip(&parts) {
            let near = rank / live.handle.lsa_size == self.rank() / live.handle.lsa_size;
            let (mut window, mut plane) = (0, 0);
            if near && !part.memory.is_empty() {
                let place = |bytes| self.peer_place(live, &prepared, rank, bytes);
                window = reached(reach::take_memory_at(rank, &part.memory, &self.device, place)?)? + part.offset;
            }
            if near && !part.plane.is_empty() {
                plane = reached(reach::take_memory(rank, &part.plane, &self.device)?)?;
            }
            windows.push(window);
            planes.push(plane);
        }
        let Prepared { part: Part { id, .. }, memory, stride, plane_cpu, plane_gpu, plane_near } = prepared;
        if let Some(gdaki) = &live.gdaki {
            gdaki.open_window(id, parts.iter().map(|part| part.nic_key))?;
        }
        if stride != 0 {
            self.check_distances(live, memory.address(), stride, &windows)?;
        }
        let lengths: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
        let keys = parts.into_iter().map(|part| Key(part.key)).collect::<Vec<_>>();
        let words = [&lengths[..], &windows, &planes].concat();
        let tables = Memory::new(&self.device, MemoryKind::Device, size_of_val(&words[..]) as u64)?;
        tables.write(0, &words)?;
        let [lengths_table, peers_table, planes_table] =
            [0, 1, 2].map(|table| tables.address() + table * size_of_val(&lengths[..]) as u64);
        let data = WindowData {
            active: 1,
            flags: flags.bits(),
            base: memory.address(),
            length: memory.bytes(),
            lengths: lengths_table,
            peers: peers_table,
            va_gpu: address(&plane_gpu),
            va_cpu: address(&plane_cpu),
            va_near: address(&plane_near),
            peer_va_gpu: if plane_gpu.is_some() { planes_table } else { 0 },
            stride,
            reserved: 0,
        };
        live.resources.set_window(id, data)?;
        let handle = WindowHandle {
            base: memory.address(),
            own_length: memory.bytes(),
            least_length: lengths.iter().copied().min().unwrap_or(0),
            data: live.resources.window_data(id),
            id,
            flags: flags.bits(),
            stride,
            rank: self.rank(),
            lsa_first: live.handle.lsa_first,
            lsa_reach: if stride == 0 { 0 } else { live.handle.lsa_size },
        };
        let info = WindowInfo { lengths: lengths.clone(), signals: flags.signals, plane: plane_cpu.clone() };
        // On this thread, because it may wait for another process, and the proxy must not wait.
        let fetch = |fetch: gin_net::Fetch| -> Result<Vec<_>, NetError> {
            (0..).zip(&keys).map(|(rank, key)| fetch(rank, key, &self.device)).collect()
        };
        let fetched = live.fetch.map(fetch).transpose()?;
        live.ask(|to| Command::Connect { window: id, keys, info, to })??;
        drop(fetched);
        self.shared.names.forget(id);
        let (address, bytes) = (memory.address(), memory.bytes());
        let (rank, table) = (self.rank(), live.handle.context_table);
        watch::event(watch::Event::Window { address, bytes, window: id, rank, table });
        if let Some(plane) = &plane_cpu {
            watch::event(watch::Event::Signals(watch::Signals {
                table,
                rank,
                context: 0,
                first: SignalTarget::Address { window: id, offset: 0 },
                address: plane.address(),
                stride: 8,
                count: bytes / 8,
            }));
        }
        let beside = [plane_cpu, plane_gpu, plane_near, Some(tables)];
        Ok(Arc::new(Registered {
            handle,
            names: self.shared.names.clone(),
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            memory,
            lengths,
            _beside: beside.into_iter().flatten().chain(held).collect(),
        }))
    }

    /// Returns the place at which to map the `bytes` bytes of a team rank that is another process, for handles with a
    /// stride.
    fn peer_place(&self, live: &Live, own: &Prepared, rank: u32, bytes: u64) -> Result<Option<FlatPlace>, String> {
        let (Ok(Some(range)), true) = (&live.flat, own.stride != 0) else { return Ok(None) };
        let (slot, there) = (live.handle.lsa_rank, rank % live.handle.lsa_size);
        let offset = range.offset(slot, own.memory.address()).ok_or("the own part is not in its slot")?;
        let room = bytes.max(1).checked_next_multiple_of(self.device.granularity()).ok_or("it is too long")?;
        let place = range.take(there, offset, room);
        place.map(Some).map_err(|error| format!("it cannot be mapped where kernels look for it: {error}"))
    }

    /// Checks that the parts of the team's ranks, which start at `peers`, are at the addresses that kernels compute.
    fn check_distances(&self, live: &Live, own: u64, stride: u32, peers: &[u64]) -> Result<(), CommError> {
        let CommHandle { lsa_first, lsa_size, .. } = live.handle;
        for (rank, &there) in (0u32..).zip(peers).skip(lsa_first as usize).take(lsa_size as usize) {
            let distance = u64::from(rank.wrapping_sub(self.rank()).wrapping_mul(stride)) << STRIDE_SHIFT;
            if there != own.wrapping_add(distance) {
                let reason = format!("its part of the window is at {there:#x}, not at the agreed distance");
                return Err(CommError::OtherRank { rank, reason });
            }
        }
        Ok(())
    }

    /// Deregisters a window. Collective. Posted requests are finished first; a later request that names the window
    /// fails with a fault.
    ///
    /// # Errors
    /// The window stays registered.
    /// - [`CommError::WindowGone`] if it is not registered with this communicator.
    /// - [`CommError::KernelsRunning`] if a kernel runs on a device of the job.
    /// - [`CommError::InFlight`] if requests do not finish in time.
    pub fn deregister<T: Pod>(&self, window: &Window<T>) -> Result<(), CommError> {
        const CALL: &str = "deregister a window";
        let work = |live: &mut Live| {
            let id = window.id();
            let entry = live.windows.get(id as usize).and_then(Option::as_ref);
            let known = entry.is_some_and(|entry| entry.serial == window.inner.serial);
            let own = if known { Ok(id) } else { Err(CommError::WindowGone { window: id }) };
            for (rank, theirs) in (0..).zip(self.agree::<u32>(live, CALL, own.as_ref())?) {
                same("window id", rank, theirs.into(), id.into())?;
            }
            self.settle(CALL, live)?;
            live.windows[id as usize] = None;
            let cleared = live.forget_window(id).map_err(CommError::from);
            let closed = live.ask(|to| Command::Wait(Waiting::Close { window: id, to }));
            // No rank returns, and perhaps frees the memory, before all ranks have closed the window.
            self.agree::<()>(live, "close a window", cleared.and(closed).as_ref())?;
            live.let_go_of(window.memory().memory());
            let (address, bytes) = (window.memory().address(), window.memory().bytes());
            watch::event(watch::Event::Forget { address, bytes });
            Ok(())
        };
        self.traced(CALL, || self.with_live(CALL, work))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_signals_that_is_refused_names_its_purpose() {
        let refused = || GpuError::OutOfMemory { bytes: 72 << 20, kind: MemoryKind::Device, reason: "full".to_owned() };
        let text = for_signals(refused(), 8 << 20).to_string();
        let start =
            "cannot allocate 75497472 bytes of device memory: full; they are for the signals of a window of 8388608";
        assert!(text.starts_with(start), "{text}");
    }
}
