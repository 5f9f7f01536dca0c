// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that post a request.

use crate::{AnyCoop, options, word};
use gin_abi::handle::CommHandle;
use gin_abi::{Deadline, FaultKind, FaultSubject, Operation, WindowData, WindowHandle};
use gin_device::prelude::{
    Any, Backend, Comm, ContextId, CounterId, Gdaki, Gin, Proxy, Rank, SignalAction, SignalId, VaSignal, Window,
    WindowRange,
};
use gin_device::{Fault, gin};

/// Makes a `Gin` for a back end with the options of a call.
pub(crate) trait Kind: Backend {
    fn with_options(comm: &Comm, context: u32, options: u32) -> Gin<Self>
    where
        Self: Sized;
}

impl Kind for Any {
    #[inline(always)]
    fn with_options(comm: &Comm, context: u32, options: u32) -> Gin<Self> {
        named(comm, context, options).route(options::route(options))
    }
}

impl Kind for Proxy {
    #[inline(always)]
    fn with_options(comm: &Comm, context: u32, options: u32) -> Gin<Self> {
        named(comm, context, options)
    }
}

impl Kind for Gdaki {
    #[inline(always)]
    fn with_options(comm: &Comm, context: u32, options: u32) -> Gin<Self> {
        named(comm, context, options)
    }
}

#[inline(always)]
fn named<B: Backend>(comm: &Comm, context: u32, options: u32) -> Gin<B> {
    let gin = Gin::<B>::with_backend(comm, ContextId::new(context));
    gin.shared_by(options::sharing(options)).ordered(options::order(options))
}

/// Returns the communicator behind the address of its handle's copy.
///
/// # Safety
/// - `comm` is the copy of a handle that the host made, whose communicator lives.
#[inline(always)]
pub(crate) unsafe fn comm_at(comm: u64) -> Comm {
    // Safety: the caller's promise.
    unsafe { Comm::from_handle(*(comm as usize as *const CommHandle)) }
}

/// Returns the window with this entry in the table of a communicator.
///
/// # Errors
/// [`FaultKind::UnknownWindow`] if the table has no such entry, or it holds no window.
#[inline(always)]
pub(crate) fn window_at(comm: &Comm, data: u64) -> Result<Window<u8>, Fault> {
    let handle = comm.handle();
    let place = data.wrapping_sub(handle.window_table);
    let id = (place as u32) / size_of::<WindowData>() as u32;
    let unknown = || Err(Fault::new(FaultKind::UnknownWindow, Operation::Address));
    if place >> 32 != 0 || id >= handle.windows || id * size_of::<WindowData>() as u32 != place as u32 {
        return unknown();
    }
    // Safety: an entry of the table, which the host keeps valid.
    let entry = unsafe { &*(data as usize as *const WindowData) };
    if entry.active == 0 {
        return unknown();
    }
    let handle = WindowHandle {
        base: entry.base,
        own_length: entry.length,
        // The table of lengths is looked up for each range.
        least_length: 0,
        data,
        id,
        flags: entry.flags,
        stride: entry.stride,
        rank: handle.rank,
        lsa_first: handle.lsa_first,
        lsa_reach: if entry.stride == 0 { 0 } else { handle.lsa_size },
    };
    // Safety: the host registered the window; bytes have no other conditions.
    Ok(unsafe { Window::from_handle(handle) })
}

/// Returns a range of the window with this entry.
#[inline(always)]
fn range_at(comm: &Comm, data: u64, offset: u64, bytes: u64) -> Result<WindowRange<u8>, Fault> {
    Ok(window_at(comm, data)?.range(offset as usize, bytes as usize))
}

/// The signal of a call: 0 and an id, or a window and an offset.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Id(SignalId),
    Va(VaSignal),
}

#[inline(always)]
pub(crate) fn target(comm: &Comm, window: u64, signal: u64) -> Result<Target, Fault> {
    if window != 0 {
        return Ok(Target::Va(window_at(comm, window)?.signal(signal)));
    }
    // An id of more than 32 bits is unknown, as the largest id is.
    Ok(Target::Id(SignalId::new(if signal >> 32 == 0 { signal as u32 } else { u32::MAX })))
}

/// Returns the action of a signal.
#[inline(always)]
fn action(comm: &Comm, options: u32, window: u64, signal: u64, amount: u64) -> Result<SignalAction, Fault> {
    let action = match target(comm, window, signal)? {
        Target::Id(id) => id.add(amount),
        Target::Va(va) => va.add(amount),
    };
    Ok(if options & options::WEAK != 0 { action.weak() } else { action })
}

/// Bit of a peer that the header passes if the team has no such rank. The other bits are the rank that was given.
const OUTSIDE: u32 = 1 << 31;

#[inline(always)]
pub(crate) fn peer_at(comm: &Comm, peer: u32) -> Result<Rank, Fault> {
    let ranks = comm.world().size();
    if peer < ranks {
        // Safety: the communicator has that many ranks.
        return Ok(unsafe { Rank::new_unchecked(peer) });
    }
    let fault = Fault::new(FaultKind::UnknownRank, Operation::Address);
    // The size of the team is not known here.
    let (max, given) = if peer & OUTSIDE == 0 { (ranks, peer) } else { (0, peer & !OUTSIDE) };
    let none = peer == gin_abi::fault::NONE;
    Err(if none { fault } else { fault.with_values(FaultSubject::None, max.into(), given.into()) })
}

/// The arguments that every post has.
#[derive(Clone, Copy)]
struct Call {
    comm: u64,
    context: u32,
    options: u32,
    coop: u64,
    peer: u32,
    deadline: u64,
}

/// The signal of a post.
#[derive(Clone, Copy)]
struct Raise {
    window: u64,
    signal: u64,
    amount: u64,
}

/// Sets the options that all posts share, and issues the post.
macro_rules! issue {
    ($post:expr, $call:expr, $counter:expr) => {{
        let Call { options, coop, deadline, .. } = $call;
        let mut post = $post.deadline(Deadline::after_ns(deadline));
        post = post.released(options::given(options)).required(options::required(options));
        if options & options::MORE != 0 {
            post = post.more();
        }
        if options & options::COUNTER != 0 {
            post = post.counter(CounterId::new($counter));
        }
        // Safety: the caller's promise.
        post.issue(&unsafe { AnyCoop::new(coop)? })
    }};
}

#[inline(always)]
unsafe fn put<B: Kind>(
    call: Call,
    (to, to_offset): (u64, u64),
    (from, from_offset): (u64, u64),
    bytes: u64,
    raise: Raise,
    counter: u32,
) -> Result<(), Fault> {
    // Safety: the caller's promise.
    let comm = unsafe { comm_at(call.comm) };
    comm.check_abi()?;
    let gin = B::with_options(&comm, call.context, call.options);
    let to = range_at(&comm, to, to_offset, bytes)?;
    let mut post = gin.put(peer_at(&comm, call.peer)?, to, range_at(&comm, from, from_offset, bytes)?);
    if call.options & options::SIGNAL != 0 {
        post = post.signal(action(&comm, call.options, raise.window, raise.signal, raise.amount)?);
    }
    issue!(post, call, counter)
}

#[inline(always)]
unsafe fn put_value<B: Kind>(
    call: Call,
    (to, offset): (u64, u64),
    (value, bytes): (u64, u32),
    raise: Raise,
) -> Result<(), Fault> {
    // Safety: the caller's promise.
    let comm = unsafe { comm_at(call.comm) };
    comm.check_abi()?;
    let gin = B::with_options(&comm, call.context, call.options);
    let (window, peer) = (window_at(&comm, to)?, peer_at(&comm, call.peer)?);
    let mut post: gin::PutValue<'_, B> = match bytes {
        1 => gin.put_value(peer, window.range_as(offset, 1)?, value as u8),
        2 => gin.put_value(peer, window.range_as(offset, 1)?, value as u16),
        4 => gin.put_value(peer, window.range_as(offset, 1)?, value as u32),
        8 => gin.put_value(peer, window.range_as(offset, 1)?, value),
        _ => return Err(Fault::new(FaultKind::BadWidth, Operation::PutValue)),
    };
    if call.options & options::SIGNAL != 0 {
        post = post.signal(action(&comm, call.options, raise.window, raise.signal, raise.amount)?);
    }
    issue!(post, call, 0)
}

#[inline(always)]
unsafe fn get<B: Kind>(
    call: Call,
    (from, from_offset): (u64, u64),
    (to, to_offset): (u64, u64),
    bytes: u64,
) -> Result<(), Fault> {
    // Safety: the caller's promise.
    let comm = unsafe { comm_at(call.comm) };
    comm.check_abi()?;
    let gin = B::with_options(&comm, call.context, call.options);
    let to = range_at(&comm, to, to_offset, bytes)?;
    let post = gin.get(peer_at(&comm, call.peer)?, to, range_at(&comm, from, from_offset, bytes)?);
    issue!(post, call, 0)
}

#[inline(always)]
unsafe fn signal<B: Kind>(call: Call, raise: Raise) -> Result<(), Fault> {
    // Safety: the caller's promise.
    let comm = unsafe { comm_at(call.comm) };
    comm.check_abi()?;
    let gin = B::with_options(&comm, call.context, call.options);
    let (peer, action) =
        (peer_at(&comm, call.peer)?, action(&comm, call.options, raise.window, raise.signal, raise.amount)?);
    let post = if call.options & options::ALL_ROUTES != 0 {
        gin.signal_all_routes(peer, action)
    } else {
        gin.signal(peer, action)
    };
    issue!(post, call, 0)
}

#[inline(always)]
unsafe fn signal_all_contexts<B: Kind>(call: Call, raise: Raise) -> Result<(), Fault> {
    // Safety: the caller's promise, here and below.
    let comm = unsafe { comm_at(call.comm) };
    comm.check_abi()?;
    let gin = B::with_options(&comm, call.context, call.options);
    let action = action(&comm, call.options, raise.window, raise.signal, raise.amount)?;
    let (peer, coop) = (peer_at(&comm, call.peer)?, unsafe { AnyCoop::new(call.coop)? });
    gin.signal_all_contexts(&coop, peer, action, Deadline::after_ns(call.deadline))
}

/// Defines the posts for a back end.
macro_rules! posts {
    (
        $backend:ty, $which:literal, $put:ident, $put_value:ident, $get:ident, $signal:ident, $signal_all_contexts:ident
    ) => {
        #[doc = concat!("Writes `bytes` bytes of an own window to a window of the peer", $which, ".")]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $put(
            comm: u64,
            context: u32,
            options: u32,
            coop: u64,
            peer: u32,
            counter: u32,
            to: u64,
            to_offset: u64,
            from: u64,
            from_offset: u64,
            bytes: u64,
            signal_window: u64,
            signal: u64,
            amount: u64,
            deadline: u64,
        ) -> u64 {
            let call = Call { comm, context, options, coop, peer, deadline };
            let raise = Raise { window: signal_window, signal, amount };
            // Safety: the caller's promise.
            word::of(unsafe { put::<$backend>(call, (to, to_offset), (from, from_offset), bytes, raise, counter) })
        }

        #[doc = concat!("Writes a value of 1, 2, 4 or 8 bytes to a window of the peer", $which, ".")]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $put_value(
            comm: u64,
            context: u32,
            options: u32,
            coop: u64,
            peer: u32,
            bytes: u32,
            to: u64,
            to_offset: u64,
            value: u64,
            signal_window: u64,
            signal: u64,
            amount: u64,
            deadline: u64,
        ) -> u64 {
            let call = Call { comm, context, options, coop, peer, deadline };
            let raise = Raise { window: signal_window, signal, amount };
            // Safety: the caller's promise.
            word::of(unsafe { put_value::<$backend>(call, (to, to_offset), (value, bytes), raise) })
        }

        #[doc = concat!("Reads `bytes` bytes of a window of the peer into an own window", $which, ".")]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $get(
            comm: u64,
            context: u32,
            options: u32,
            coop: u64,
            peer: u32,
            from: u64,
            from_offset: u64,
            to: u64,
            to_offset: u64,
            bytes: u64,
            deadline: u64,
        ) -> u64 {
            let call = Call { comm, context, options, coop, peer, deadline };
            // Safety: the caller's promise.
            word::of(unsafe { get::<$backend>(call, (from, from_offset), (to, to_offset), bytes) })
        }

        #[doc = concat!("Raises a signal of the peer", $which, ".")]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $signal(
            comm: u64,
            context: u32,
            options: u32,
            coop: u64,
            peer: u32,
            signal_window: u64,
            signal: u64,
            amount: u64,
            deadline: u64,
        ) -> u64 {
            let call = Call { comm, context, options, coop, peer, deadline };
            // Safety: the caller's promise.
            word::of(unsafe { self::signal::<$backend>(call, Raise { window: signal_window, signal, amount }) })
        }

        #[doc = concat!("Raises a signal of the peer after the puts of all contexts", $which, ".")]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $signal_all_contexts(
            comm: u64,
            context: u32,
            options: u32,
            coop: u64,
            peer: u32,
            signal_window: u64,
            signal: u64,
            amount: u64,
            deadline: u64,
        ) -> u64 {
            let call = Call { comm, context, options, coop, peer, deadline };
            let raise = Raise { window: signal_window, signal, amount };
            // Safety: the caller's promise.
            word::of(unsafe { self::signal_all_contexts::<$backend>(call, raise) })
        }
    };
}

posts!(Any, "", gin_put, gin_put_value, gin_get, gin_signal, gin_signal_all_contexts);
posts!(
    Proxy,
    ", by the proxy alone",
    gin_put_proxy,
    gin_put_value_proxy,
    gin_get_proxy,
    gin_signal_proxy,
    gin_signal_all_contexts_proxy
);
posts!(
    Gdaki,
    ", by a NIC that kernels drive",
    gin_put_gdaki,
    gin_put_value_gdaki,
    gin_get_gdaki,
    gin_signal_gdaki,
    gin_signal_all_contexts_gdaki
);
