// SPDX-License-Identifier: MIT OR Apache-2.0
//! The report of a stack overflow, or of a null pointer: a signal handler that names the coroutine.
//!
//! The handler ends the process. Unwinding out of it, or leaving the coroutine behind, is not safe: its code may hold
//! a lock of the allocator, or be anywhere else.

use std::io::Write;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use corosensei::stack::Stack as _;
use libc::{SA_ONSTACK, SA_SIGINFO, SIG_DFL, SIG_IGN, SIGSEGV, c_int, c_void, sigaction, siginfo_t, stack_t};

use crate::actor::Actor;
use crate::hooks::engine;
use crate::stack::{Stack, give_stack, take_stack};

/// Size of the stack on which the handler runs, in bytes: the CPU's state and a line of text must fit.
const HANDLER_STACK: usize = 64 << 10;

/// A signal stack of this OS thread, until dropped. The stack of a coroutine that overflowed has no room.
pub(crate) struct SignalStack {
    stack: Option<Stack>,
    before: stack_t,
}

impl SignalStack {
    /// Installs the handler and a signal stack. Without memory for that stack, an overflow is not explained.
    pub(crate) fn new() -> Option<Self> {
        install();
        let stack = take_stack(HANDLER_STACK).ok()?;
        let lowest = std::ptr::with_exposed_provenance_mut(stack.base().get() - HANDLER_STACK);
        let new = stack_t { ss_sp: lowest, ss_flags: 0, ss_size: HANDLER_STACK };
        let mut before = stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // Safety: the stack lives until `drop` has put the previous one back.
        if unsafe { libc::sigaltstack(&new, &mut before) } != 0 {
            give_stack(stack);
            return None;
        }
        Some(SignalStack { stack: Some(stack), before })
    }
}

impl Drop for SignalStack {
    fn drop(&mut self) {
        // Safety: this is the thread's previous signal stack, and the value was not sent to another thread.
        let restored = unsafe { libc::sigaltstack(&self.before, std::ptr::null_mut()) } == 0;
        match self.stack.take() {
            Some(stack) if restored => give_stack(stack),
            stack => std::mem::forget(stack),
        }
    }
}

/// The action that the handler replaced.
static BEFORE: OnceLock<sigaction> = OnceLock::new();

fn install() {
    BEFORE.get_or_init(|| {
        let mut before = MaybeUninit::<sigaction>::zeroed();
        // Safety: the action is plain old data, for which zeros are valid. The handler reads `BEFORE` only after a
        // fault, and no coroutine runs before this function returns.
        unsafe {
            let mut new: sigaction = MaybeUninit::zeroed().assume_init();
            new.sa_sigaction = on_fault as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
            new.sa_flags = SA_SIGINFO | SA_ONSTACK;
            libc::sigaction(SIGSEGV, &new, before.as_mut_ptr());
            before.assume_init()
        }
    });
}

/// Handles SIGSEGV. It calls only functions that are safe in a signal handler: it neither locks nor allocates.
extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // Safety: the kernel passes the information of a fault, or of the sender of a signal.
    let (address, is_sent) = unsafe { ((*info).si_addr() as usize, (*info).si_code <= 0) };
    let faulted = engine().filter(|_| !is_sent);
    if let Some(fault) = faulted.and_then(|engine| engine.fault_at(address)) {
        let mut text = [0; 1024];
        let mut rest = &mut text[..];
        // A name that is too long is cut off.
        let _ = writeln!(rest, "gin-virtual: {fault}");
        let length = 1024 - rest.len();
        // Safety: the bytes are initialised.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), length) };
        if let Explained::Overflow { .. } = fault {
            // Safety: it has no precondition.
            unsafe { libc::abort() };
        }
    }
    chain(signal, info, context, is_sent);
}

/// Lets the previous action handle another fault, or a signal that was sent. Returning from here repeats the
/// access that faulted; nothing repeats a signal that was sent.
fn chain(signal: c_int, info: *mut siginfo_t, context: *mut c_void, is_sent: bool) {
    // Safety: zeros are the default action.
    let default: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    let before = BEFORE.get().unwrap_or(&default);
    match before.sa_sigaction {
        SIG_IGN if is_sent => {}
        SIG_DFL | SIG_IGN => {
            // The kernel does not let a program ignore a fault either.
            // Safety: it sets the default action.
            unsafe { libc::sigaction(signal, &default, std::ptr::null_mut()) };
            if is_sent {
                // Safety: it has no precondition. The signal is blocked until the handler returns.
                unsafe { libc::raise(signal) };
            }
        }
        handler if before.sa_flags & SA_SIGINFO != 0 => {
            // Safety: the flag says that the function has this type.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // Safety: without the flag the function has this type.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// A fault that the handler explains.
pub(crate) enum Explained {
    /// A coroutine touched its guard page.
    Overflow { actor: Actor, bytes: usize, seed: u64 },
    /// A device thread used a null pointer.
    Null { actor: Actor, address: usize, seed: u64 },
}

impl std::fmt::Display for Explained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Explained::Overflow { actor, bytes, seed } => {
                let setting = match actor {
                    Actor::Thread { .. } => "`DeviceConfig::stack_bytes` (`device` of a `WorldConfig`)",
                    Actor::Host { .. } | Actor::Service { .. } => "`SeededConfig::host_stack_bytes`",
                };
                write!(
                    f,
                    "{actor} overflowed its stack of {bytes} bytes (seed {seed}). Set {setting} to more, or keep less on \
                     the stack. Ending the process."
                )
            }
            Explained::Null { actor, address, seed } => write!(
                f,
                "{actor} used a null pointer, at address {address} (seed {seed}). The pointer to a peer's part of a \
                 window is null if loads and stores do not reach the peer; compare it with null first. Ending the process."
            ),
        }
    }
}
