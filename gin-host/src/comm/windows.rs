// SPDX-License-Identifier: MIT OR Apache-2.0
//! How windows come and go.

use super::gdaki::RemotePart;
use super::live::Live;
use super::reach;
use super::window::{Registered, Window, WindowFlags};
use super::wire::{decode, encode, garbled};
use super::{CommError, Communicator};
use crate::proxy::{Command, WindowInfo};
use bytemuck::Pod;
use gin_abi::handle::{ENGINE_CPU, ENGINE_GPU, ENGINE_NIC, NEAR_WORDS, STRIDE_SHIFT};
use gin_abi::{WindowData, WindowHandle};
use gin_device::internal::host_word;
use gin_gpu::flat::FlatPlace;
use gin_gpu::share;
use gin_gpu::{Device, GpuError, Memory, MemoryKind, MemorySlice};
use gin_net::{Key, LocalWindow, NetError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers of the windows of this process.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Longest window, so that no sum of offset and length overflows.
const MAX_BYTES: u64 = gin_abi::descriptor::MAX_OFFSET;

/// A window of this rank before the others have registered theirs.
struct Prepared {
    id: u32,
    memory: MemorySlice,
    stride: u32,
    plane_cpu: Option<Arc<Memory>>,
    plane_gpu: Option<Arc<Memory>>,
    plane_near: Option<Arc<Memory>>,
    key: Key,
    /// The NIC's name of the own part, if kernels drive a NIC and the part has bytes; else 0.
    nic_key: RemotePart,
}

/// The other ranks' parts of a window that kernels of this rank reach.
#[derive(Default)]
struct Peers {
    /// By world rank: address of the part, 0 where it cannot be reached.
    windows: Vec<u64>,
    /// The same of the plane of words that GPUs raise.
    planes: Vec<u64>,
    /// Keeps the memory behind those addresses.
    memory: Vec<Arc<Memory>>,
}

impl Peers {
    /// Adds the next rank, whose part starts at `offset` of `memory`; both keys are of memory that it made known.
    /// Memory of another process comes to be where `place` says for its length.
    fn add(
        &mut self,
        device: &Arc<dyn Device>,
        (rank, near): (u32, bool),
        (memory, offset): (&[u8], u64),
        plane: &[u8],
        place: impl FnOnce(u64) -> Result<Option<FlatPlace>, String>,
    ) -> Result<(), CommError> {
        let mut address = |found: Result<Arc<Memory>, CommError>| -> Result<u64, CommError> {
            let memory = found?;
            memory.check_reach(&**device)?;
            let address = memory.address();
            self.memory.push(memory);
            Ok(address)
        };
        let (mut window, mut words) = (0, 0);
        if near && !memory.is_empty() {
            window = address(reach::take_memory_at(rank, memory, device, place))? + offset;
        }
        if near && !plane.is_empty() {
            words = address(reach::take_memory(rank, plane, device))?;
        }
        self.windows.push(window);
        self.planes.push(words);
        Ok(())
    }
}

/// Elements of a window that are looked at together.
const CHUNK: usize = 1 << 16;

/// Has signals at words of a window begin at 0 whatever the words hold: they are what the NIC raises.
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
    /// All ranks have let go of a window of this memory: unless another one has it, they have let go of the memory.
    fn let_go_of(&self, memory: &Arc<Memory>) {
        if !self.windows.iter().flatten().any(|window| Arc::ptr_eq(window.memory.memory(), memory)) {
            memory.exposure().remove(&self.sharers);
        }
    }

    /// Has kernels and the NIC forget a window.
    fn forget_window(&self, id: u32) -> Result<(), GpuError> {
        let closed = self.gdaki.as_ref().map_or(Ok(()), |gdaki| gdaki.close_window(id));
        self.resources.clear_window(id).and(closed)
    }
}

fn address(memory: &Option<Arc<Memory>>) -> u64 {
    memory.as_ref().map_or(0, |memory| memory.address())
}

impl Communicator {
    /// Allocates device memory for `len` elements on this rank and registers it. Collective; ranks may ask for
    /// different lengths, 0 included. The elements are zero at first.
    ///
    /// The parts of an LSA team's ranks lie at a fixed distance, [`Window::stride`], if their devices can do that; then
    /// each takes a whole number of the device's [granules](gin_gpu::MemorySharing::granularity).
    ///
    /// # Errors
    /// As [`register`](Self::register); [`CommError::NoPlace`] if no addresses are left for a window of that length;
    /// [`CommError::Gpu`] with [`GpuError::Addresses`] if there were none when the communicator
    /// came up, or [`GpuError::OutOfMemory`].
    pub fn alloc_window<T: Pod>(&self, len: usize, flags: WindowFlags) -> Result<Window<T>, CommError> {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        const CALL: &str = "allocate a window";
        let work = |live: &mut Live| {
            let memory = self.window_memory(live, bytes)?;
            let stride = live.flat.as_ref().ok().and_then(Option::as_ref).map_or(0, |range| range.handle_stride());
            self.register_outcome(live, memory.map(|memory| memory.whole()), stride, flags)
        };
        self.traced(CALL, || self.with_live(CALL, work))
    }

    /// Registers memory of this rank as its part of a window. Collective, and another call than
    /// [`alloc_window`](Self::alloc_window); ranks may bring different lengths, 0 included.
    ///
    /// # Errors
    /// [`CommError::State`] or [`CommError::Ended`] unless the communicator is active; [`CommError::Misaligned`];
    /// [`CommError::AlreadyRegistered`] if part of the memory is in a window of this communicator;
    /// [`CommError::NotRegistrable`] for memory of another device; [`CommError::Nic`] for pinned memory where kernels
    /// drive a NIC ([`NicError::HostWindow`](gin_nic::NicError::HostWindow)); [`CommError::Gpu`] if a rank of the LSA
    /// team does not reach memory that another one has [from elsewhere](GpuError::Foreign); [`CommError::Limit`] if
    /// there are as many windows as were asked for; [`CommError::Disagreement`] if ranks use different flags;
    /// [`CommError::OtherRank`] if another rank failed.
    pub fn register<T: Pod>(&self, memory: &MemorySlice, flags: WindowFlags) -> Result<Window<T>, CommError> {
        const CALL: &str = "register a window";
        self.traced(CALL, || self.with_live(CALL, |live| self.register_outcome(live, Ok(memory.clone()), 0, flags)))
    }

    /// `stride`: that of handles, if the parts of the team's ranks lie at a fixed distance.
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
        let id = prepared.as_ref().ok().map(|prepared| prepared.id);
        match self.join_window(live, prepared, flags) {
            Ok(registered) => {
                live.windows[registered.handle.id as usize] = Some(registered.clone());
                Ok(Window::new(registered))
            }
            Err(error) => {
                if let Some(id) = id {
                    live.forget_window(id)?;
                    live.ask(|to| Command::Close { window: id, to })?;
                }
                Err(error)
            }
        }
    }

    /// This rank's own part, before it meets the others.
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
        let plane = |kind| Memory::for_ranks(&self.device, kind, plane_bytes, self.is_across());
        let plane_near = || Memory::new(&self.device, MemoryKind::Device, NEAR_WORDS * plane_bytes);
        let engine = |engine| live.handle.engines & engine != 0;
        let (plane_cpu, plane_gpu, plane_near) = if flags.signals {
            let plane = |there: bool, kind| there.then(|| plane(kind)).transpose();
            let near = plane_near()?;
            if engine(ENGINE_NIC) {
                begin_at(&memory, &near)?;
            }
            (plane(engine(ENGINE_CPU), MemoryKind::Pinned)?, plane(engine(ENGINE_GPU), MemoryKind::Device)?, Some(near))
        } else {
            (None, None, None)
        };
        let id = id as u32;
        let nic = flags.signals && engine(ENGINE_NIC);
        let window = LocalWindow { id, memory: memory.clone(), plane: plane_cpu.clone(), nic };
        let key = live.ask(|to| Command::Register { window, to })??;
        // Last, as nobody would take it back.
        let nic_key = match &live.gdaki {
            Some(gdaki) => gdaki.register(id, &memory, flags.signals)?,
            None => RemotePart::default(),
        };
        Ok(Prepared { id, memory, stride, plane_cpu, plane_gpu, plane_near, key, nic_key })
    }

    /// The part that all ranks do together.
    fn join_window(
        &self,
        live: &Live,
        prepared: Result<Prepared, CommError>,
        flags: WindowFlags,
    ) -> Result<Arc<Registered>, CommError> {
        const CALL: &str = "register a window";
        let message = prepared.as_ref().map_err(CommError::clone).map(|prepared| {
            let memory = share::offer(prepared.memory.memory()).0;
            let plane = prepared.plane_gpu.as_ref().map(|plane| share::offer(plane).0).unwrap_or_default();
            let (bytes, offset) = (prepared.memory.bytes(), prepared.memory.offset());
            encode(&(prepared.id, flags.bits(), bytes, offset, memory, plane, &prepared.key.0, prepared.nic_key))
        });
        let all = self.agree(live, CALL, message)?;
        let prepared = prepared?;
        let id = prepared.id;
        let (mut lengths, mut keys, mut nic_keys) = (Vec::new(), Vec::new(), Vec::new());
        let mut peers = Peers::default();
        let mut taken = Ok(());
        for (rank, message) in (0..).zip(&all) {
            type Message<'a> = (u32, u32, u64, u64, &'a [u8], &'a [u8], &'a [u8], RemotePart);
            let read = decode::<Message<'_>>(message).ok_or_else(|| garbled(rank))?;
            let (their_id, their_flags, bytes, offset, memory, plane, key, nic_key) = read;
            for (what, own, theirs) in [("window id", id, their_id), ("window flags", flags.bits(), their_flags)] {
                if theirs != own {
                    return Err(CommError::Disagreement { what, rank, theirs: theirs.into(), own: own.into() });
                }
            }
            lengths.push(bytes);
            keys.push(Key(key.to_vec()));
            nic_keys.push(nic_key);
            let near = rank / live.lsa_size == self.rank() / live.lsa_size;
            let place = |bytes| self.peer_place(live, &prepared, rank, bytes);
            taken = taken.and_then(|()| peers.add(&self.device, (rank, near), (memory, offset), plane, place));
        }
        let opened = taken.and_then(|()| match &live.gdaki {
            Some(gdaki) => Ok(gdaki.open_window(id, &nic_keys)?),
            None => Ok(()),
        });
        let connected = opened.and_then(|()| self.connect_window(live, prepared, flags, lengths, peers, keys));
        // Nobody uses the window before all can serve it.
        self.agree(live, "connect a window", connected.as_ref().map(|_| Vec::new()).map_err(CommError::clone))?;
        connected
    }

    fn connect_window(
        &self,
        live: &Live,
        prepared: Prepared,
        flags: WindowFlags,
        lengths: Vec<u64>,
        peers: Peers,
        keys: Vec<Key>,
    ) -> Result<Arc<Registered>, CommError> {
        let Prepared { id, memory, stride, plane_cpu, plane_gpu, plane_near, .. } = prepared;
        if stride != 0 {
            self.check_distances(live, memory.address(), stride, &peers.windows)?;
        }
        let table = |words: &[u64]| -> Result<Arc<Memory>, CommError> {
            let table = Memory::new(&self.device, MemoryKind::Device, size_of_val(words) as u64)?;
            table.write(0, words)?;
            Ok(table)
        };
        let lengths_table = Some(table(&lengths)?);
        let peers_table = Some(table(&peers.windows)?);
        let planes_table = if plane_gpu.is_some() { Some(table(&peers.planes)?) } else { None };
        let data = WindowData {
            active: 1,
            flags: flags.bits(),
            base: memory.address(),
            length: memory.bytes(),
            lengths: address(&lengths_table),
            peers: address(&peers_table),
            va_gpu: address(&plane_gpu),
            va_cpu: address(&plane_cpu),
            va_near: address(&plane_near),
            peer_va_gpu: address(&planes_table),
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
            lsa_first: self.rank() - self.rank() % live.lsa_size,
            lsa_reach: if stride == 0 { 0 } else { live.lsa_size },
        };
        let info = WindowInfo { lengths: lengths.clone(), signals: flags.signals, plane: plane_cpu.clone(), uses: 0 };
        // By this thread, as another process may have to be asked, which the proxy must not wait for.
        let fetch = |fetch: gin_net::Fetch| -> Result<Vec<_>, NetError> {
            (0..).zip(&keys).map(|(rank, key)| fetch(rank, key, &self.device)).collect()
        };
        let fetched = live.fetch.map(fetch).transpose()?;
        live.ask(|to| Command::Connect { window: id, keys, info, to })??;
        drop(fetched);
        let beside = [plane_cpu, plane_gpu, plane_near, lengths_table, peers_table, planes_table];
        Ok(Arc::new(Registered {
            handle,
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            memory,
            lengths,
            _beside: beside.into_iter().flatten().chain(peers.memory).collect(),
        }))
    }

    /// Where the part of a rank of the team has to be mapped that is another process, for handles with a stride;
    /// `bytes`: length of its memory.
    fn peer_place(&self, live: &Live, own: &Prepared, rank: u32, bytes: u64) -> Result<Option<FlatPlace>, String> {
        let (Ok(Some(range)), true) = (&live.flat, own.stride != 0) else { return Ok(None) };
        let (slot, there) = (self.rank() % live.lsa_size, rank % live.lsa_size);
        let offset = range.offset(slot, own.memory.address()).ok_or("the own part is not in its slot")?;
        let room = bytes.max(1).checked_next_multiple_of(self.device.granularity()).ok_or("it is too long")?;
        let place = range.take(there, offset, room);
        place.map(Some).map_err(|error| format!("it cannot be mapped where kernels look for it: {error}"))
    }

    /// Makes sure that the parts of the team's ranks, which start at `peers`, are where kernels will take them to be.
    fn check_distances(&self, live: &Live, own: u64, stride: u32, peers: &[u64]) -> Result<(), CommError> {
        let first = self.rank() - self.rank() % live.lsa_size;
        for (rank, &there) in (0u32..).zip(peers).skip(first as usize).take(live.lsa_size as usize) {
            let distance = u64::from(rank.wrapping_sub(self.rank()).wrapping_mul(stride)) << STRIDE_SHIFT;
            if there != own.wrapping_add(distance) {
                let reason = format!("its part of the window is at {there:#x}, not at the distance agreed upon");
                return Err(CommError::OtherRank { rank, reason });
            }
        }
        Ok(())
    }

    /// Ends a window: from now on requests that name it are refused with a fault. Collective. Requests under way are
    /// finished first.
    ///
    /// # Errors
    /// [`CommError::WindowGone`] if it is not registered with this communicator; [`CommError::KernelsRunning`] if a
    /// kernel runs on a device of the job; [`CommError::InFlight`] if requests do not finish in time. The window stays
    /// then.
    pub fn deregister<T: Pod>(&self, window: &Window<T>) -> Result<(), CommError> {
        const CALL: &str = "deregister a window";
        let work = |live: &mut Live| {
            let id = window.id();
            let entry = live.windows.get(id as usize).and_then(Option::as_ref);
            let known = entry.is_some_and(|entry| entry.serial == window.inner.serial);
            let own = if known { Ok(encode(&id)) } else { Err(CommError::WindowGone { window: id }) };
            let all = self.agree(live, CALL, own)?;
            for (rank, theirs) in (0..).zip(&all) {
                let theirs: u32 = decode(theirs).ok_or_else(|| garbled(rank))?;
                if theirs != id {
                    let (theirs, own) = (theirs.into(), id.into());
                    return Err(CommError::Disagreement { what: "window id", rank, theirs, own });
                }
            }
            self.settle(CALL, live)?;
            live.windows[id as usize] = None;
            let cleared = live.forget_window(id).map_err(CommError::from);
            let closed = live.ask(|to| Command::Close { window: id, to });
            // Nobody goes on, and perhaps frees the memory, before all have let go of it.
            self.agree(live, "close a window", cleared.and(closed).map(|()| Vec::new()))?;
            live.let_go_of(window.memory().memory());
            Ok(())
        };
        self.traced(CALL, || self.with_live(CALL, work))
    }
}
