// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits, reads, flushes, barriers, pointers and reports.

use crate::ops::{Kind, Target, comm_at, peer_at, target, window_at};
use crate::{AnyCoop, Followed, Value, options, word};
use gin_abi::{Deadline, FaultKind, Operation};
use gin_device::Fault;
use gin_device::gin::FlushToken;
use gin_device::prelude::{
    Any, BarrierSession, BarrierTeam, Comm, Coop, CounterId, CounterView, Fence, Gdaki, Gin, Proxy, SignalId,
    SignalView,
};

/// The arguments that every call has.
#[derive(Clone, Copy)]
struct Call {
    comm: u64,
    context: u32,
    options: u32,
}

/// Runs `work` with the communicator and the context.
#[inline(always)]
unsafe fn with<B: Kind, T>(call: Call, work: impl FnOnce(&Comm, Gin<B>) -> Result<T, Fault>) -> Result<T, Fault> {
    // Safety: the caller's promise.
    let comm = unsafe { comm_at(call.comm) };
    comm.check_abi()?;
    work(&comm, B::with_options(&comm, call.context, call.options))
}

#[inline(always)]
fn view(comm: &Comm, window: u64, signal: u64, bits: u32) -> Result<SignalView, Fault> {
    Ok(match target(comm, window, signal)? {
        Target::Id(id) => id.bits(bits),
        Target::Va(va) => va.bits(bits),
    })
}

#[inline(always)]
fn value(outcome: Result<u64, Fault>) -> Value {
    match outcome {
        Ok(value) => Value { value, fault: 0 },
        Err(fault) => Value { value: 0, fault: word::word(fault) },
    }
}

#[inline(always)]
fn counter(id: u32, bits: u32) -> CounterView {
    CounterId::new(id).bits(bits)
}

/// Runs `work` with the threads of `coop` too, and returns the word of its fault.
#[inline(always)]
unsafe fn together<B: Kind>(
    call: Call,
    coop: u64,
    work: impl FnOnce(&AnyCoop, &Comm, Gin<B>) -> Result<(), Fault>,
) -> u64 {
    // Safety: the caller's promise, here and below.
    match unsafe { AnyCoop::new(coop) } {
        Ok(coop) => word::of(unsafe { with(call, |comm, gin| work(&coop, comm, gin)) }),
        Err(fault) => word::word(fault),
    }
}

/// Looks for a fault of the communicator if a call asks for it.
#[inline(always)]
fn look(coop: &AnyCoop, comm: &Comm, options: u32) -> Result<(), Fault> {
    if options & options::LOOK != 0 { coop.lead(|| comm.fault().map_or(Ok(()), Err)) } else { Ok(()) }
}

/// Defines functions that all threads of a coop call, for a back end.
macro_rules! calls {
    (
        $backend:ty, $which:literal;
        $($name:ident($($arg:ident: $ty:ty),*) |$coop:ident, $comm:ident, $gin:ident| $work:expr, $doc:literal;)*
    ) => { $(
        #[doc = concat!($doc, $which, ".")]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(
            comm: u64,
            context: u32,
            options: u32,
            coop: u64,
            $($arg: $ty),*
        ) -> u64 {
            // Safety: the caller's promise.
            unsafe {
                together(Call { comm, context, options }, coop, |$coop, $comm: &Comm, $gin: Gin<$backend>| {
                    look($coop, $comm, options)?;
                    $work
                })
            }
        }
    )* };
}

/// Defines functions that return a value and wait for nothing, for a back end.
macro_rules! values {
    (
        $backend:ty, $which:literal;
        $($name:ident($($arg:ident: $ty:ty),*) |$comm:ident, $gin:ident| $work:expr, $doc:literal;)*
    ) => { $(
        #[doc = concat!($doc, $which, ".")]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(comm: u64, context: u32, options: u32, $($arg: $ty),*) -> Value {
            // Safety: the caller's promise.
            value(unsafe { with(Call { comm, context, options }, |$comm: &Comm, $gin: Gin<$backend>| $work) })
        }
    )* };
}

/// Defines the waits and reads for a back end.
macro_rules! waits {
    (
        $backend:ty, $which:literal, $flush:ident, $flush_async:ident, $wait:ident, $wait_signal:ident, $read_signal:ident,
        $wait_counter:ident, $read_counter:ident, $meet:ident, $follow:ident, $quiet:ident, $quiet_all:ident
    ) => {
        calls! {
            $backend, $which;
            $flush(deadline: u64) |coop, comm, gin| gin.flush(coop, Deadline::after_ns(deadline)),
                "Waits until all earlier operations of the context are complete";
            $wait(peer: u32, position: u64, deadline: u64) |coop, comm, gin| {
                let token = FlushToken::from_parts(position, peer_at(comm, peer)?);
                gin.wait(coop, token, Deadline::after_ns(deadline))
            }, "Waits until the operations before a position are complete";
            $quiet(peer: u32, deadline: u64) |coop, comm, gin|
                gin.quiet(coop, peer_at(comm, peer)?, Deadline::after_ns(deadline)),
                "Waits until all earlier puts of the context to the peer have arrived";
            $quiet_all(deadline: u64) |coop, comm, gin| gin.quiet_all(coop, Deadline::after_ns(deadline)),
                "Waits until all earlier puts of the context have arrived";
            $wait_signal(signal_window: u64, signal: u64, least: u64, bits: u32, deadline: u64) |coop, comm, gin| {
                let view = view(comm, signal_window, signal, bits)?;
                gin.wait_signal(coop, view, least, Deadline::after_ns(deadline))
            }, "Waits until a signal is at or past `least`";
            $wait_counter(id: u32, least: u64, bits: u32, deadline: u64) |coop, comm, gin|
                gin.wait_counter(coop, counter(id, bits), least, Deadline::after_ns(deadline)),
                "Waits until a counter is at or past `least`";
            $meet(signal: u32, bits: u32, deadline: u64) |coop, comm, gin|
                gin.wait_signal_meet_shadow(coop, SignalId::new(signal).bits(bits), Deadline::after_ns(deadline)),
                "Waits until a signal is at or past its shadow";
        }

        values! {
            $backend, $which;
            $flush_async(peer: u32) |comm, gin| Ok(gin.flush_async(peer_at(comm, peer)?)?.position()),
                "Returns the position of the operations posted to `peer` until now";
            $read_signal(signal_window: u64, signal: u64, bits: u32) |comm, gin|
                gin.read_signal(view(comm, signal_window, signal, bits)?),
                "Returns the value of a signal";
            $read_counter(id: u32, bits: u32) |_comm, gin| gin.read_counter(counter(id, bits)),
                "Returns the value of a counter";
        }

        #[doc = concat!("Waits until a signal is `least_delta` past its shadow, which then follows it", $which, ".")]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $follow(
            comm: u64,
            context: u32,
            options: u32,
            coop: u64,
            signal: u32,
            bits: u32,
            least_delta: u64,
            deadline: u64,
        ) -> Followed {
            // Safety: the caller's promise, here and below.
            let coop = match unsafe { AnyCoop::new(coop) } {
                Ok(coop) => coop,
                Err(fault) => return Followed { before: 0, delta: 0, fault: word::word(fault) },
            };
            let work = |_: &Comm, gin: Gin<$backend>| {
                let view = SignalId::new(signal).bits(bits);
                gin.wait_signal_follow_shadow(&coop, view, least_delta, Deadline::after_ns(deadline))
            };
            match unsafe { with(Call { comm, context, options }, work) } {
                Ok((before, delta)) => Followed { before, delta, fault: 0 },
                Err(fault) => Followed { before: 0, delta: 0, fault: word::word(fault) },
            }
        }
    };
}

waits!(
    Any,
    "",
    gin_flush,
    gin_flush_async,
    gin_wait,
    gin_wait_signal,
    gin_read_signal,
    gin_wait_counter,
    gin_read_counter,
    gin_wait_signal_meet_shadow,
    gin_wait_signal_follow_shadow,
    gin_quiet,
    gin_quiet_all
);
waits!(
    Proxy,
    ", by the proxy alone",
    gin_flush_proxy,
    gin_flush_async_proxy,
    gin_wait_proxy,
    gin_wait_signal_proxy,
    gin_read_signal_proxy,
    gin_wait_counter_proxy,
    gin_read_counter_proxy,
    gin_wait_signal_meet_shadow_proxy,
    gin_wait_signal_follow_shadow_proxy,
    gin_quiet_proxy,
    gin_quiet_all_proxy
);
waits!(
    Gdaki,
    ", by a NIC that kernels drive",
    gin_flush_gdaki,
    gin_flush_async_gdaki,
    gin_wait_gdaki,
    gin_wait_signal_gdaki,
    gin_read_signal_gdaki,
    gin_wait_counter_gdaki,
    gin_read_counter_gdaki,
    gin_wait_signal_meet_shadow_gdaki,
    gin_wait_signal_follow_shadow_gdaki,
    gin_quiet_gdaki,
    gin_quiet_all_gdaki
);

/// Sets a signal to 0. No operation that raises it may be under way.
///
/// # Safety
/// - As the module's docs say.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_reset_signal(comm: u64, context: u32, signal_window: u64, signal: u64) -> u64 {
    let work = |comm: &Comm, gin: Gin<Any>| gin.reset_signal(view(comm, signal_window, signal, gin_abi::SIGNAL_BITS)?);
    // Safety: the caller's promise.
    word::of(unsafe { with(Call { comm, context, options: 0 }, work) })
}

/// Sets a counter to 0. No operation that raises it may be under way.
///
/// # Safety
/// - As the module's docs say.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_reset_counter(comm: u64, context: u32, id: u32) -> u64 {
    let work = |_: &Comm, gin: Gin<Any>| gin.reset_counter(CounterId::new(id));
    // Safety: the caller's promise.
    word::of(unsafe { with(Call { comm, context, options: 0 }, work) })
}

/// Returns the shadow of a signal.
///
/// # Safety
/// - As the module's docs say.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_signal_shadow(comm: u64, context: u32, signal: u32) -> Value {
    let work = |_: &Comm, gin: Gin<Any>| gin.signal_shadow(SignalId::new(signal));
    // Safety: the caller's promise.
    value(unsafe { with(Call { comm, context, options: 0 }, work) })
}

/// Adds to the shadow of a signal.
///
/// # Safety
/// - As the module's docs say.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_increase_signal_shadow(comm: u64, context: u32, signal: u32, delta: u64) -> u64 {
    let work = |_: &Comm, gin: Gin<Any>| gin.increase_signal_shadow(SignalId::new(signal), delta);
    // Safety: the caller's promise.
    word::of(unsafe { with(Call { comm, context, options: 0 }, work) })
}

/// Runs `work` with a session of barrier `index` of a team (0 world, 1 rail, 2 LSA).
#[inline(always)]
unsafe fn meet(
    call: Call,
    coop: u64,
    (team, index, fence): (u32, u32, u32),
    work: impl FnOnce(&mut BarrierSession<Any>, &AnyCoop, Fence) -> Result<(), Fault>,
) -> u64 {
    let work = |coop: &AnyCoop, _: &Comm, gin: Gin<Any>| {
        let team = match team {
            0 => BarrierTeam::World,
            1 => BarrierTeam::Rail,
            2 => BarrierTeam::Lsa,
            _ => return Err(Fault::new(FaultKind::UnknownBarrier, Operation::Barrier)),
        };
        let fence = match fence & 3 {
            0 => Fence::None,
            1 => Fence::Put,
            2 => Fence::Get,
            _ => Fence::PutGet,
        };
        let mut session = BarrierSession::new(&gin, team, index)?.released(options::given(call.options));
        if call.options & options::ALL_CONTEXTS != 0 {
            session = session.all_contexts();
        }
        if call.options & options::ALL_ROUTES != 0 {
            session = session.all_routes();
        }
        work(&mut session, coop, fence)
    };
    // Safety: the caller's promise.
    unsafe { together(call, coop, work) }
}

/// Defines the functions of barriers.
macro_rules! barriers {
    ($($name:ident |$session:ident, $coop:ident, $fence:ident, $deadline:ident| $work:expr, $doc:literal;)*) => { $(
        #[doc = $doc]
        ///
        /// # Safety
        /// - As the module's docs say.
        #[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(
            comm: u64,
            context: u32,
            options: u32,
            coop: u64,
            team: u32,
            index: u32,
            fence: u32,
            deadline: u64,
        ) -> u64 {
            let (call, $deadline) = (Call { comm, context, options }, Deadline::after_ns(deadline));
            // Safety: the caller's promise.
            unsafe { meet(call, coop, (team, index, fence), |$session, $coop, $fence| $work) }
        }
    )* };
}

barriers! {
    gin_barrier |session, coop, fence, deadline| session.sync(coop, fence, deadline),
        "Meets the ranks of a team (0 world, 1 rail, 2 LSA) in barrier `index`. Bit 0 of `fence`: puts to this rank are \
         visible afterwards; bit 1: gets of this rank have arrived, and sources of puts may be reused.";
    gin_barrier_arrive |session, coop, fence, deadline| session.arrive(coop, fence, deadline),
        "Arrives as `gin_barrier` does, and does not wait for the other ranks.";
    gin_barrier_wait |session, coop, fence, deadline|
        session.resume(coop, fence).and_then(|()| session.wait(coop, deadline)),
        "Waits for the ranks of a barrier after `gin_barrier_arrive` with the same arguments.";
}

/// Returns the address at which this rank's kernels load and store the byte at `offset` of a peer's window.
///
/// # Safety
/// - As the module's docs say.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_peer_pointer(comm: u64, window: u64, offset: u64, peer: u32) -> Value {
    let work = |comm: &Comm, _: Gin<Any>| {
        let (window, peer) = (window_at(comm, window)?, peer_at(comm, peer)?);
        window.range(offset as usize, 1).check_on(peer)?;
        Ok((window.peer_ptr(peer)?.addr() as u64).wrapping_add(offset))
    };
    // Safety: the caller's promise.
    value(unsafe { with(Call { comm, context: 0, options: 0 }, work) })
}

/// Reports a fault to the host. It ends every wait of the communicator, on all ranks.
///
/// # Safety
/// - As the module's docs say; `fault` is a fault of this kernel.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_report(comm: u64, fault: u64) {
    if fault != 0 {
        // Safety: the caller's promise.
        unsafe { comm_at(comm) }.report(word::fault(fault));
    }
}

/// Reports an error of the kernel's own, with a code of its choice.
///
/// # Safety
/// - As the module's docs say.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_report_code(comm: u64, code: u64) {
    // Safety: the caller's promise.
    unsafe { comm_at(comm) }.report_code(code);
}

/// Returns the abort or fault of the communicator, 0 if there is none.
///
/// # Safety
/// - As the module's docs say.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_comm_fault_word(comm: u64) -> u64 {
    // Safety: the caller's promise.
    unsafe { comm_at(comm) }.fault().map_or(0, word::word)
}

/// Waits for all threads of a coop. It orders their memory. Returns at once if the word is no group.
///
/// # Safety
/// - As the module's docs say.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn gin_coop_sync(coop: u64) -> u64 {
    // Safety: the caller's promise.
    word::of(unsafe { AnyCoop::new(coop) }.map(|coop| coop.sync()))
}
