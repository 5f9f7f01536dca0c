// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels that execute scripts, one for each kind of thread group.

mod lsa;

pub use lsa::Message;

use crate::op::{Code, Entry, NONE, Op, pattern};
use bytemuck::{Pod, Zeroable};
use gin_abi::handle::NEAR_WORDS;
use gin_abi::{COUNTER_BITS, ContextData, FaultSubject, SIGNAL_BITS, WindowData, WindowHandle};
use gin_device::internal::host_word::SPARE;
use gin_device::prelude::*;
use gin_device::sys::{self, GlobalWord, Word};

/// A script kernel's argument: tables in device memory.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Script {
    /// Address of the `WindowHandle`s of the windows that operations name by index.
    pub windows: u64,
    /// Address of all operations, [`Op`].
    pub operations: u64,
    /// Address of two words for each group of the grid: index of its first operation, and number of operations.
    pub programs: u64,
    /// Address of the log: `stride` entries ([`Entry`]) for each thread of the grid.
    pub log: u64,
    /// Entries per thread.
    pub stride: u64,
    /// Number of windows.
    pub window_count: u32,
    /// [`STOP_AT_ERROR`], [`RESET_BY_STORE`], [`ROUTE_LSA`], [`ROUTE_NETWORK`].
    pub flags: u32,
}

/// Flag: a group leaves its program at the first `Err`.
pub const STOP_AT_ERROR: u32 = 1;
/// Flag: resets of signals store 0 in their words. This is a mistake, to prove that the suite notices it.
pub const RESET_BY_STORE: u32 = 2;
/// Flag: operations that name no route use loads and stores.
pub const ROUTE_LSA: u32 = 4;
/// Flag: operations that name no route use the network.
pub const ROUTE_NETWORK: u32 = 8;

/// Threads of a [`Tile`] in `script_tile`.
pub const TILE: u32 = 8;
/// Odd lanes of each warp. The groups of `script_lanes` are these lanes and the even ones.
pub const ODD_LANES: u32 = 0xaaaa_aaaa;
/// Warps of a span in `script_span`.
pub const SPAN_WARPS: u32 = 2;

/// Longest nap of a pause, in nanoseconds.
const LONGEST_NAP: u64 = 20_000;

/// Result of one operation.
type Step = Result<(u64, u64), Fault>;

/// Returns `Ok` with two zeros. A function, because a constant would be stored in memory and loaded from there.
#[inline(always)]
fn done() -> Step {
    Ok((0, 0))
}

/// Runs the program of group number `group`. All threads of the group call it.
#[inline(always)]
unsafe fn run<B: Routed, C: Coop>(comm: &Comm, script: &Script, coop: &C, group: u64) {
    // Safety: the kernel promises one program for each group and one row of the log for each thread.
    let (first, count, log) = unsafe {
        let thread = block_in_grid() as u64 * Block.size() as u64 + Block.rank() as u64;
        let program = (script.programs as usize as *const u64).add(2 * group as usize);
        (
            program.read(),
            program.add(1).read(),
            (script.log as usize as *mut Entry).add((thread * script.stride) as usize),
        )
    };
    let mut token = None;
    let mut index = 0;
    while index < count {
        // Safety: as above.
        let op = unsafe { &*(script.operations as usize as *const Op).add((first + index) as usize) };
        let step = operation(&B::gin(comm, script, op), comm, script, coop, op, &mut token);
        let entry = match step {
            Ok((value, second)) => Entry { outcome: 1, fault: [0; gin_abi::fault::WORDS], value, second },
            Err(fault) => Entry { outcome: 2, fault: fault.to_words(), value: 0, second: 0 },
        };
        // Safety: as above.
        unsafe { log.add(index as usize).write(entry) };
        if step.is_err() && script.flags & STOP_AT_ERROR != 0 {
            break;
        }
        index += 1;
    }
}

#[inline(always)]
fn window(script: &Script, index: u32) -> Window<u8> {
    let index = if index < script.window_count { index } else { 0 };
    // Safety: the table's handles are those of registered windows.
    unsafe { Window::from_handle((script.windows as usize as *const WindowHandle).add(index as usize).read()) }
}

#[inline(always)]
fn va(script: &Script, op: &Op) -> VaSignal {
    window(script, op.signal).signal(op.signal_offset)
}

#[inline(always)]
fn action(script: &Script, op: &Op) -> Option<SignalAction> {
    if op.signal == NONE {
        return None;
    }
    let action = if op.signal_at_address != 0 {
        va(script, op).add(op.amount)
    } else if op.amount == 1 {
        SignalId::new(op.signal).inc()
    } else {
        SignalId::new(op.signal).add(op.amount)
    };
    Some(if op.weak != 0 { action.weak() } else { action })
}

#[inline(always)]
fn view(script: &Script, op: &Op) -> SignalView {
    let bits = if op.bits == 0 { SIGNAL_BITS } else { op.bits };
    if op.signal_at_address != 0 { va(script, op).bits(bits) } else { SignalId::new(op.signal).bits(bits) }
}

#[inline(always)]
fn counter(op: &Op) -> CounterView {
    CounterId::new(op.counter).bits(if op.bits == 0 { COUNTER_BITS } else { op.bits })
}

#[inline(always)]
fn scope(code: u32) -> Scope {
    match code {
        0 => Scope::Thread,
        1 => Scope::Block,
        2 => Scope::Gpu,
        _ => Scope::System,
    }
}

#[inline(always)]
fn team(comm: &Comm, op: &Op) -> Team {
    match op.team {
        1 => comm.lsa(),
        2 => comm.rail(),
        _ => comm.world(),
    }
}

macro_rules! options {
    ($post:expr, $script:expr, $op:expr, signal) => {{
        let post = $post;
        let post = match action($script, $op) {
            Some(action) => post.signal(action),
            None => post,
        };
        options!(post, $script, $op)
    }};
    ($post:expr, $script:expr, $op:expr) => {{
        let op: &Op = $op;
        let post = $post.released(scope(op.given)).deadline(Deadline::after_ns(op.deadline));
        let post = if op.required != 0 { post.required(Scope::Gpu) } else { post };
        let post = if op.counter != NONE { post.counter(CounterId::new(op.counter)) } else { post };
        if op.more != 0 { post.more() } else { post }
    }};
}

/// Issues a post, at once or prepared. A prepared one is issued twice if it has neither signal nor counter, so that
/// nobody can tell.
macro_rules! issue {
    ($post:expr, $coop:expr, $op:expr) => {{
        let (post, op): (_, &Op) = ($post, $op);
        if op.prepared == 0 {
            post.issue($coop)?;
        } else {
            let post = post.prepare()?;
            if op.signal == NONE && op.counter == NONE {
                post.issue($coop)?;
            }
            post.issue($coop)?;
        }
    }};
}

/// A back end that can build the operation's context with the operation's route.
trait Routed: Backend {
    fn gin(comm: &Comm, script: &Script, op: &Op) -> Gin<Self>;
}

impl Routed for Any {
    #[inline(always)]
    fn gin(comm: &Comm, script: &Script, op: &Op) -> Gin<Self> {
        Gin::new(comm, ContextId::new(op.context)).route(match (op.route, script.flags & (ROUTE_LSA | ROUTE_NETWORK)) {
            (1, _) => Route::Auto,
            (2, _) | (0, ROUTE_LSA) => Route::Lsa,
            (3, _) | (0, ROUTE_NETWORK) => Route::Network,
            _ => Route::Auto,
        })
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl Routed for Gdaki {
    #[inline(always)]
    fn gin(comm: &Comm, _: &Script, op: &Op) -> Gin<Self> {
        Gin::with_backend(comm, ContextId::new(op.context))
    }
}

impl Routed for Proxy {
    #[inline(always)]
    fn gin(comm: &Comm, _: &Script, op: &Op) -> Gin<Self> {
        Gin::with_backend(comm, ContextId::new(op.context))
    }
}

#[inline(always)]
fn operation<B: Backend, C: Coop>(
    gin: &Gin<B>,
    comm: &Comm,
    script: &Script,
    coop: &C,
    op: &Op,
    token: &mut Option<FlushToken>,
) -> Step {
    let Some(code) = Code::from_code(op.code) else {
        return Err(Fault::new(FaultKind::Reported, Operation::None).with_values(
            FaultSubject::None,
            0,
            op.code as u64,
        ));
    };
    let deadline = Deadline::after_ns(op.deadline);
    let gin = gin.shared_by(match op.sharing {
        1 => Sharing::Block,
        2 => Sharing::Thread,
        _ => Sharing::Gpu,
    });
    let gin = gin.ordered(if op.required != 0 { Order::Relaxed } else { Order::Acquire });
    match code {
        Code::Nop => done(),
        Code::Fill => {
            let to = window(script, op.window);
            for i in coop.stripe(op.bytes as usize) {
                to.write(op.offset as usize + i, pattern(op.value, op.source_offset + i as u64));
            }
            coop.sync();
            done()
        }
        Code::Check => {
            let from = window(script, op.window);
            let (mut wrong, mut first) = (0, u64::MAX);
            for i in 0..op.bytes {
                if from.read((op.offset + i) as usize) != pattern(op.value, op.source_offset + i) {
                    wrong += 1;
                    first = first.min(i);
                }
            }
            coop.sync();
            Ok((wrong, first))
        }
        Code::Put => put(&gin, comm, script, coop, op),
        Code::PutValue => put_value(&gin, comm, script, coop, op),
        Code::Get => get(&gin, comm, script, coop, op),
        Code::Signal | Code::SignalAllRoutes => signal(&gin, comm, script, coop, op, code == Code::SignalAllRoutes),
        Code::Flush => {
            gin.flush(coop, deadline)?;
            done()
        }
        Code::Quiet | Code::QuietAll | Code::SignalAllContexts => quiet(&gin, comm, script, coop, op, code),
        Code::FlushAsync => {
            *token = Some(gin.flush_async(team(comm, op).member(op.peer)?)?);
            done()
        }
        Code::WaitToken => {
            if let Some(token) = *token {
                gin.wait(coop, token, deadline)?;
            }
            done()
        }
        Code::WaitSignal => {
            if op.prepared == 0 {
                gin.wait_signal(coop, view(script, op), op.value, deadline)?;
            } else {
                gin.prepare_wait(view(script, op))?.wait(coop, op.value, deadline)?;
            }
            done()
        }
        Code::ReadSignal => Ok((gin.read_signal(view(script, op))?, 0)),
        Code::ResetSignal => {
            // Every thread resets. That is harmless, and the sync keeps late threads from resetting after the next
            // raise.
            let outcome = gin.reset_signal(view(script, op));
            if script.flags & RESET_BY_STORE != 0 && outcome.is_ok() {
                coop.sync();
                reset_by_store(comm, script, op);
            }
            coop.sync();
            outcome.map(|()| (0, 0))
        }
        Code::WaitCounter => {
            gin.wait_counter(coop, counter(op), op.value, deadline)?;
            done()
        }
        Code::ReadCounter => Ok((gin.read_counter(counter(op))?, 0)),
        Code::ResetCounter => {
            let outcome = gin.reset_counter(counter(op));
            coop.sync();
            outcome.map(|()| (0, 0))
        }
        Code::IncreaseShadow => {
            let outcome =
                if coop.elect() { gin.increase_signal_shadow(SignalId::new(op.signal), op.value) } else { Ok(()) };
            coop.agree(outcome)?;
            done()
        }
        Code::ReadShadow => Ok((gin.signal_shadow(SignalId::new(op.signal))?, 0)),
        Code::MeetShadow => {
            gin.wait_signal_meet_shadow(coop, view(script, op), deadline)?;
            done()
        }
        Code::FollowShadow => gin.wait_signal_follow_shadow(coop, view(script, op), op.value, deadline),
        Code::Barrier | Code::BarrierSplit => barrier(&gin, coop, op, code == Code::BarrierSplit),
        Code::CombinedBarrier => {
            let barrier = CombinedBarrier::new(&gin, op.value as u32)?;
            let mut barrier = if op.fence & 4 != 0 { barrier.all_contexts() } else { barrier };
            barrier.sync(coop, fence(op), deadline)?;
            done()
        }
        Code::CopyFrom | Code::CopyTo => {
            let peer = team(comm, op).member(op.peer)?;
            let (to, from) = (window(script, op.window), window(script, op.source_window));
            let (offset, source, bytes) = (op.offset as usize, op.source_offset as usize, op.bytes as usize);
            if code == Code::CopyFrom {
                to.peer(peer)?.copy_from(coop, offset, from.range(source, bytes))?;
            } else {
                from.peer(peer)?.copy_to(coop, source, to.range(offset, bytes))?;
            }
            done()
        }
        Code::Send | Code::Receive => lsa::mail(comm, script, coop, op, code == Code::Send),
        Code::Reduce => lsa::reduce(comm, script, coop, op),
        Code::FetchAdd | Code::CompareSwap => lsa::fetch(comm, script, coop, op, code == Code::CompareSwap),
        Code::Read => {
            let own = window(script, op.window);
            let mut value = 0;
            for byte in 0..op.bytes {
                value |= (own.read((op.offset + byte) as usize) as u64) << (8 * byte);
            }
            Ok((value, 0))
        }
        Code::Pause => {
            pause(op.value);
            done()
        }
        Code::BlockSync => {
            Block.sync();
            done()
        }
        Code::Report => {
            if coop.elect() {
                comm.report_code(op.value);
            }
            done()
        }
        Code::Fault => match comm.fault() {
            Some(fault) => Err(fault),
            None => done(),
        },
        Code::RaiseByGpu | Code::WriteTotal => raise_by_gpu(comm, coop, op, code == Code::WriteTotal),
        Code::ReadTeam => {
            let team = team(comm, op);
            Ok((team.size() as u64, team.rank() as u64))
        }
        Code::FindWindow => {
            let own = window(script, op.window);
            let (handle, offset) = comm.find_window(own.local_ptr().wrapping_add(op.offset as usize))?;
            Ok((handle.id as u64, offset))
        }
        Code::LoadPeer => {
            let peer = team(comm, op).member(op.peer)?;
            let from = window(script, op.window).symmetric(op.offset as usize) + 0;
            let mut value = 0u64;
            let address = from.peer_ptr(peer)?;
            for byte in 0..8 {
                // Safety: the script promises 8 bytes at this address that no thread writes meanwhile.
                value |= (unsafe { address.add(byte).read_volatile() } as u64) << (8 * byte);
            }
            Ok((value, 0))
        }
    }
}

// On CPUs it and its like are functions, because LLVM takes more than twice as long for one function of all operations.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
fn put<B: Backend, C: Coop>(gin: &Gin<B>, comm: &Comm, script: &Script, coop: &C, op: &Op) -> Step {
    let peer = team(comm, op).member(op.peer)?;
    let to = window(script, op.window).range(op.offset as usize, op.bytes as usize);
    let from = window(script, op.source_window).range(op.source_offset as usize, op.bytes as usize);
    issue!(options!(gin.put(peer, to, from), script, op, signal), coop, op);
    done()
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
fn get<B: Backend, C: Coop>(gin: &Gin<B>, comm: &Comm, script: &Script, coop: &C, op: &Op) -> Step {
    let peer = team(comm, op).member(op.peer)?;
    let to = window(script, op.window).range(op.offset as usize, op.bytes as usize);
    let from = window(script, op.source_window).range(op.source_offset as usize, op.bytes as usize);
    issue!(options!(gin.get(peer, to, from), script, op), coop, op);
    done()
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
fn signal<B: Backend, C: Coop>(
    gin: &Gin<B>,
    comm: &Comm,
    script: &Script,
    coop: &C,
    op: &Op,
    all_routes: bool,
) -> Step {
    let peer = team(comm, op).member(op.peer)?;
    let Some(action) = action(script, op) else { return done() };
    // One post serves both, because each further call compiles all of its code once more.
    let post = if all_routes { gin.signal_all_routes(peer, action) } else { gin.signal(peer, action) };
    issue!(options!(post, script, op), coop, op);
    done()
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
fn quiet<B: Backend, C: Coop>(gin: &Gin<B>, comm: &Comm, script: &Script, coop: &C, op: &Op, code: Code) -> Step {
    let deadline = Deadline::after_ns(op.deadline);
    if code == Code::QuietAll {
        gin.quiet_all(coop, deadline)?;
        return done();
    }
    let peer = team(comm, op).member(op.peer)?;
    match action(script, op) {
        Some(action) => gin.signal_all_contexts(coop, peer, action, deadline)?,
        None => gin.quiet(coop, peer, deadline)?,
    }
    done()
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
fn put_value<B: Backend, C: Coop>(gin: &Gin<B>, comm: &Comm, script: &Script, coop: &C, op: &Op) -> Step {
    let peer = team(comm, op).member(op.peer)?;
    let to = window(script, op.window);
    // A window of bytes accepts any offset here; the front end checks the value's own alignment.
    let post = match op.bytes {
        1 => gin.put_value(peer, to.range_as::<u8>(op.offset, 1)?, op.value as u8),
        2 => gin.put_value(peer, to.range_as::<u16>(op.offset, 1)?, op.value as u16),
        4 => gin.put_value(peer, to.range_as::<u32>(op.offset, 1)?, op.value as u32),
        _ => gin.put_value(peer, to.range_as::<u64>(op.offset, 1)?, op.value),
    };
    issue!(options!(post, script, op, signal), coop, op);
    done()
}

#[inline(always)]
fn fence(op: &Op) -> Fence {
    match op.fence & 3 {
        0 => Fence::None,
        1 => Fence::Put,
        2 => Fence::Get,
        _ => Fence::PutGet,
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
fn barrier<B: Backend, C: Coop>(gin: &Gin<B>, coop: &C, op: &Op, split: bool) -> Step {
    let team = match op.team {
        1 => BarrierTeam::Lsa,
        2 => BarrierTeam::Rail,
        _ => BarrierTeam::World,
    };
    let fence = fence(op);
    let deadline = Deadline::after_ns(op.deadline);
    let session = BarrierSession::new(gin, team, op.value as u32)?;
    let session = if op.fence & 4 != 0 { session.all_contexts() } else { session };
    let mut session = if op.fence & 8 != 0 { session.all_routes() } else { session };
    // `sync` consists of these two calls.
    session.arrive(coop, fence, deadline)?;
    if split {
        pause(op.source_offset);
    }
    session.wait(coop, deadline)?;
    done()
}

#[inline(always)]
fn pause(ns: u64) {
    let start = sys::clock_ns();
    loop {
        let passed = sys::clock_ns().wrapping_sub(start);
        if passed >= ns {
            return;
        }
        let left = ns - passed;
        sys::pause(if left < LONGEST_NAP { left as u32 } else { LONGEST_NAP as u32 });
    }
}

#[inline(always)]
fn context_data(comm: &Comm, op: &Op) -> *const ContextData {
    (comm.handle().context_table as usize as *const ContextData).wrapping_add(op.context as usize)
}

/// Adds to the word of the peer's signal that GPUs raise, as an LSA route does. If `total` is set, stores the value
/// instead.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
fn raise_by_gpu<C: Coop>(comm: &Comm, coop: &C, op: &Op, total: bool) -> Step {
    let peer = team(comm, op).member(op.peer)?;
    let (tables, index) = (comm.handle().peer_signals, op.context * comm.handle().ranks + peer.world());
    let table = match tables {
        0 => 0,
        // Safety: the script names a context that exists, and the peer is a rank.
        peers => unsafe { *(peers as usize as *const u64).wrapping_add(index as usize) },
    };
    if table == 0 {
        return Err(Fault::new(FaultKind::NotReachable, Operation::Signal).with_peer(peer.world()));
    }
    coop.sync();
    if coop.elect() {
        // Safety: the table has a word for each signal; the script names one that exists.
        let word = unsafe { GlobalWord::new(table + 8 * op.signal as u64) };
        if total {
            word.store_release_sys(op.value);
        } else {
            word.add_release_sys(op.amount);
        }
    }
    coop.sync();
    done()
}

/// Resets a signal wrongly, as a mistake on purpose: stores 0 in every word of the signal, including words of other
/// engines.
#[inline(always)]
fn reset_by_store(comm: &Comm, script: &Script, op: &Op) {
    // Safety: the script names a context and a signal that exist, or a word of a window with signals.
    unsafe {
        let data = &*context_data(comm, op);
        let (words, near, index) = if op.signal_at_address != 0 {
            let window = window(script, op.signal);
            let planes = &*(window.handle().data as usize as *const WindowData);
            ([planes.va_gpu, 0, planes.va_cpu, 0], planes.va_near, op.signal_offset / 8)
        } else {
            let id = op.signal as u64;
            ([data.signal_gpu, data.signal_nic, data.signal_cpu, data.signal_shadow], data.signal_near, id)
        };
        let mut word = 0;
        while word < 4 {
            if words[word] != 0 {
                GlobalWord::new(words[word] + 8 * index).store_relaxed_sys(0);
            }
            word += 1;
        }
        GlobalWord::new(near + 8 * (NEAR_WORDS * index + SPARE)).store_relaxed_sys(0);
    }
}

macro_rules! script_kernel {
    ($(#[$doc:meta])* $name:ident, |$comm:ident, $script:ident| $body:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// - The tables of the script are as [`Script`] describes, in memory of this device, and the conditions of its
        ///   operations hold.
        #[kernel]
        pub unsafe fn $name(comm: Comm, script: Script) {
            let ($comm, $script) = (&comm, &script);
            // Safety: the caller keeps the conditions above.
            unsafe { $body }
        }
    };
}

/// Returns the group's number in the grid: each block has `per_block` groups, and `group` is the number in the block.
#[inline(always)]
fn number(per_block: u32, group: u32) -> u64 {
    block_in_grid() as u64 * per_block as u64 + group as u64
}

script_kernel! {
    /// Every thread is a group.
    script_thread, |comm, script| run::<Any, _>(comm, script, &Thread, number(Block.size(), Block.rank()))
}

script_kernel! {
    /// Every thread is a group; only the proxy back end is compiled in.
    script_thread_proxy, |comm, script| run::<Proxy, _>(comm, script, &Thread, number(Block.size(), Block.rank()))
}

script_kernel! {
    /// Every thread is a group; only GDAKI is compiled in. Not built for GPUs: inlining GDAKI at each operation of a
    /// script would take minutes to compile.
    #[cfg(not(target_arch = "nvptx64"))]
    script_thread_gdaki, |comm, script| run::<Gdaki, _>(comm, script, &Thread, number(Block.size(), Block.rank()))
}

script_kernel! {
    /// Tiles of [`TILE`] threads are groups. The block's size must be a multiple of it.
    script_tile, |comm, script| {
        run::<Any, _>(comm, script, &Tile::<TILE>, number(Block.size() / TILE, Block.rank() / TILE))
    }
}

script_kernel! {
    /// Warps are groups.
    script_warp, |comm, script| {
        run::<Any, _>(comm, script, &Warp, number(Block.size().div_ceil(32), Block.rank() / 32))
    }
}

script_kernel! {
    /// The even and the odd lanes of each warp are groups. The block's size must be a multiple of 32.
    script_lanes, |comm, script| {
        let odd = gin_device::coop::lane() & 1;
        let lanes = Lanes::new(if odd == 1 { ODD_LANES } else { !ODD_LANES });
        run::<Any, _>(comm, script, &lanes, number(Block.size() / 16, 2 * (Block.rank() / 32) + odd))
    }
}

script_kernel! {
    /// Spans of [`SPAN_WARPS`] warps are groups. The block's size must be a multiple of a span's, and it has at most 15
    /// groups.
    script_span, |comm, script| {
        let group = Block.rank() / (32 * SPAN_WARPS);
        if let Some(span) = WarpSpan::new(group * SPAN_WARPS, SPAN_WARPS, 1 + group) {
            run::<Any, _>(comm, script, &span, number(Block.size() / (32 * SPAN_WARPS), group));
        }
    }
}

script_kernel! {
    /// A block is a group.
    script_block, |comm, script| run::<Any, _>(comm, script, &Block, number(1, 0))
}

script_kernel! {
    /// A block is a group; only the proxy back end is compiled in.
    script_block_proxy, |comm, script| run::<Proxy, _>(comm, script, &Block, number(1, 0))
}

script_kernel! {
    /// A block is a group; only GDAKI is compiled in. Not built for GPUs: inlining GDAKI at each operation of a script
    /// would take minutes to compile.
    #[cfg(not(target_arch = "nvptx64"))]
    script_block_gdaki, |comm, script| run::<Gdaki, _>(comm, script, &Block, number(1, 0))
}
