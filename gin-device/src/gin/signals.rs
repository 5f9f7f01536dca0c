// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that read, wait for and reset the caller's signals and their shadows.

use super::completion::{self, ended, is_time_to_look};
use super::{Core, Gin};
use crate::backend::Backend;
use crate::coop::{Coop, lead};
use crate::fault::{self, Fault, Unmet};
use crate::host_word;
use crate::signal::{Signal, SignalId, SignalView, VaSignal};
use crate::signal_words::Words;
use crate::sys::{self, Global, GlobalWord, Word};
use gin_abi::handle::{ENGINE_CPU, ENGINE_GPU, ENGINE_NIC, WINDOW_SIGNALS};
use gin_abi::{Deadline, FaultKind, Operation, SIGNAL_BITS, WindowData, mask};

/// Returns word `index` of the table at `table` if `engines` has `engine`, and so there is a table.
///
/// # Safety
/// - The table is valid and longer than `index`.
#[inline(always)]
unsafe fn word(engines: u32, engine: u32, table: u64, index: u64) -> Option<GlobalWord> {
    // Safety: the caller's promise.
    (engines & engine != 0).then(|| unsafe { GlobalWord::new(table + 8 * index) })
}

/// Returns words and shadow of a signal, for barriers, whose ids are past the user's ids.
#[inline(always)]
pub(crate) fn signal_tables(core: &Core, id: u32) -> (Words<Global>, GlobalWord) {
    (signal_words(core, id), shadow_word(core, id))
}

/// Returns the words of a signal that exists.
#[inline(always)]
fn signal_words(core: &Core, id: u32) -> Words<Global> {
    let engines = core.comm().engines();
    // Safety: the context and the id were checked; the host keeps a valid table for each engine.
    unsafe {
        let data = core.data();
        let (gpu, nic) = sys::read_pair(&raw const (*data).signal_gpu);
        let (cpu, near) = sys::read_pair(&raw const (*data).signal_cpu);
        let mailbox = sys::read_word(&raw const (*data).mailbox);
        let id = id as u64;
        Words {
            gpu: word(engines, ENGINE_GPU, gpu, id),
            nic: word(engines, ENGINE_NIC, nic, id),
            cpu: word(engines, ENGINE_CPU, cpu, id),
            near: GlobalWord::new(near + 8 * host_word::WORDS * id),
            mailbox: (mailbox != 0).then(|| GlobalWord::new(mailbox)),
        }
    }
}

/// Returns the shadow of a signal that exists.
#[inline(always)]
fn shadow_word(core: &Core, id: u32) -> GlobalWord {
    // Safety: as above.
    unsafe { GlobalWord::new(sys::read_word(&raw const (*core.data()).signal_shadow) + 8 * id as u64) }
}

/// Returns the table entry of a signal's window. It is valid while the window is registered.
#[inline(always)]
fn window_data(va: &VaSignal) -> *const WindowData {
    va.window.data as usize as *const WindowData
}

impl<B: Backend> Gin<B> {
    /// Checks a signal of the caller's.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn check(&self, view: SignalView, operation: Operation) -> Result<(), Fault> {
        let signals = self.core().comm().signals();
        fault::check!(self.core().fault(FaultKind::BadDescriptor, operation), |judge| {
            self.core().judge(&mut judge);
            let unmet = |kind| Unmet::new(kind).of(view.subject());
            judge.condition(view.bits != 0 && view.bits <= SIGNAL_BITS, || {
                unmet(FaultKind::BadWidth).values(SIGNAL_BITS as u64, view.bits as u64)
            });
            match view.signal {
                Signal::Id(id) => {
                    judge.condition(id < signals, || unmet(FaultKind::UnknownSignal).values(signals as u64, id as u64))
                }
                Signal::Va(va) => {
                    // Safety: a window handle's table entry is valid while the window is registered.
                    let length = unsafe { (*window_data(&va)).length };
                    judge.condition(va.window.flags & WINDOW_SIGNALS != 0, || unmet(FaultKind::NoVaSignals));
                    judge.condition(va.offset.is_multiple_of(8), || unmet(FaultKind::Misaligned).values(8, va.offset));
                    judge.condition(va.end() <= length, || unmet(FaultKind::OutOfRange).values(length, va.end()));
                }
            }
        })
    }

    /// Returns the words of a signal that was checked.
    ///
    /// Not one function with the check: the words of a `Result` have no value on the ways of its faults, and such
    /// registers stay live round the loops of a kernel.
    #[inline(always)]
    fn words(&self, view: SignalView) -> Words<Global> {
        let core = self.core();
        match view.signal {
            Signal::Id(id) => signal_words(core, id),
            Signal::Va(va) => {
                let (engines, index) = (core.comm().engines(), va.offset / 8);
                // Safety: in range; a window with signals has a plane for each engine.
                unsafe {
                    let data = &*window_data(&va);
                    Words {
                        gpu: word(engines, ENGINE_GPU, data.va_gpu, index),
                        nic: word(engines, ENGINE_NIC, data.base, index),
                        cpu: word(engines, ENGINE_CPU, data.va_cpu, index),
                        near: GlobalWord::new(data.va_near + 8 * host_word::WORDS * index),
                        // CPU threads themselves raise signals at addresses.
                        mailbox: None,
                    }
                }
            }
        }
    }

    /// Returns the value of a signal now, modulo 2^bits. Every thread reads for itself.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// The invalid argument: [`FaultKind::UnknownContext`], [`FaultKind::UnknownSignal`], [`FaultKind::BadWidth`],
    /// [`FaultKind::NoVaSignals`], [`FaultKind::OutOfRange`], [`FaultKind::Misaligned`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn read_signal(&self, signal: impl Into<SignalView>) -> Result<u64, Fault> {
        let view = signal.into();
        self.check(view, Operation::WaitSignal)?;
        Ok(completion::read(self.core(), &self.words(view), view.bits))
    }

    /// Waits until a signal is at or past `least`, on a circle of 2^bits values.
    ///
    /// All threads of `coop` call; one polls. Conditions:
    /// - All raises are increments.
    /// - Their sum is less than 2^(bits - 1) between the last reset, or any earlier wait, and the awaited value.
    /// - There is no reset while raises are in flight.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise: the puts that the signal
    /// covers are visible.
    ///
    /// # Errors
    /// [`FaultKind::Timeout`] with the values expected and seen; the fault or abort that ended the wait; the fault of a
    /// wrong argument.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait_signal(
        &self,
        coop: &impl Coop,
        signal: impl Into<SignalView>,
        least: u64,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let view = signal.into();
        lead!(coop, self.wait_once(view, least, deadline))
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn wait_once(&self, view: SignalView, least: u64, deadline: Deadline) -> Result<(), Fault> {
        self.check(view, Operation::WaitSignal)?;
        let (words, due) = (self.words(view), is_time_to_look());
        // Without loads and stores, few signals have a word that GPUs raise.
        if B::LSA && words.come_soon(self.core().order(), view.bits, least, due) {
            return Ok(());
        }
        self.wait_for(view, &words, least, deadline, due).map(|_| ())
    }

    /// Checks a signal and finds its words, so that it can be waited for many times. Each thread of the coop that will
    /// wait prepares the wait; see [`Post::prepare`](super::post::Post::prepare).
    ///
    /// # Errors
    /// The fault of a wrong argument, as [`read_signal`](Self::read_signal).
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn prepare_wait(&self, signal: impl Into<SignalView>) -> Result<PreparedWait<'_, B>, Fault> {
        let view = signal.into();
        self.check(view, Operation::WaitSignal)?;
        Ok(PreparedWait { gin: self, view, words: self.words(view) })
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn wait_here(&self, view: SignalView, least: u64, deadline: Deadline) -> Result<u64, Fault> {
        self.check(view, Operation::WaitSignal)?;
        self.wait_for(view, &self.words(view), least, deadline, false)
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn wait_for(
        &self,
        view: SignalView,
        words: &Words<Global>,
        least: u64,
        deadline: Deadline,
        due: bool,
    ) -> Result<u64, Fault> {
        waits!(Some(self.core().fault(FaultKind::Timeout, Operation::WaitSignal).with_values(
            view.subject(),
            least,
            0
        )));
        completion::wait::<B>(self.core(), words, least, view.bits, deadline, due).map_err(|(stop, seen)| {
            ended(self.core(), stop, Operation::WaitSignal, view.subject(), deadline, (least, seen))
        })
    }

    /// Sets a signal to 0, and its shadow if it has an id, in every calling thread. No raise may be in flight.
    ///
    /// The words keep their values; the baseline moves. Threads that use the signal afterwards must be synchronised
    /// with this one.
    ///
    /// # Errors
    /// As [`read_signal`](Self::read_signal).
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn reset_signal(&self, signal: impl Into<SignalView>) -> Result<(), Fault> {
        let view = signal.into();
        self.check(view, Operation::Reset)?;
        self.words(view).reset();
        if let Signal::Id(id) = view.signal {
            shadow_word(self.core(), id).store_relaxed_gpu(0);
        }
        Ok(())
    }

    /// Returns the shadow of a signal: a word of this rank's own in which it counts the value that it expects.
    ///
    /// Only [`increase_signal_shadow`](Self::increase_signal_shadow),
    /// [`wait_signal_follow_shadow`](Self::wait_signal_follow_shadow) and [`reset_signal`](Self::reset_signal) change
    /// it.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`], [`FaultKind::UnknownSignal`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn signal_shadow(&self, signal: SignalId) -> Result<u64, Fault> {
        Ok(self.shadow(signal.into())?.load_relaxed_gpu())
    }

    /// Adds to the shadow of a signal. Several threads of one block may add at the same time.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`], [`FaultKind::UnknownSignal`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn increase_signal_shadow(&self, signal: SignalId, delta: u64) -> Result<(), Fault> {
        self.shadow(signal.into())?.add_relaxed_cta(delta);
        Ok(())
    }

    /// Waits until a signal is at or past its shadow. All threads of `coop` call; one polls.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// As [`wait_signal`](Self::wait_signal); [`FaultKind::UnknownSignal`] for a signal at a window address, which has
    /// no shadow.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait_signal_meet_shadow(
        &self,
        coop: &impl Coop,
        signal: impl Into<SignalView>,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let view = signal.into();
        lead!(coop, self.meet_here(view, deadline))
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn meet_here(&self, view: SignalView, deadline: Deadline) -> Result<(), Fault> {
        let shadow = self.shadow(view)?;
        self.wait_here(view, shadow.load_relaxed_gpu() & mask(view.bits), deadline).map(|_| ())
    }

    /// Waits until a signal is at least `least_delta` past its shadow, then moves the shadow to the value seen.
    ///
    /// Returns the shadow before and the distance it moved, both modulo 2^bits, in all threads of `coop`.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// As [`wait_signal_meet_shadow`](Self::wait_signal_meet_shadow). The shadow stays as it was.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait_signal_follow_shadow(
        &self,
        coop: &impl Coop,
        signal: impl Into<SignalView>,
        least_delta: u64,
        deadline: Deadline,
    ) -> Result<(u64, u64), Fault> {
        let view = signal.into();
        let mut moved = (0, 0);
        lead!(coop, self.follow_here(view, least_delta, deadline).map(|by| moved = by))?;
        Ok((coop.broadcast(moved.0, 0), coop.broadcast(moved.1, 0)))
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn follow_here(&self, view: SignalView, least_delta: u64, deadline: Deadline) -> Result<(u64, u64), Fault> {
        let shadow = self.shadow(view)?;
        let old = shadow.load_relaxed_gpu();
        let value = self.wait_here(view, old.wrapping_add(least_delta) & mask(view.bits), deadline)?;
        let delta = value.wrapping_sub(old) & mask(view.bits);
        shadow.store_relaxed_gpu(old.wrapping_add(delta));
        Ok((old & mask(view.bits), delta))
    }

    /// Returns the shadow of a signal, after a check.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn shadow(&self, view: SignalView) -> Result<GlobalWord, Fault> {
        // A signal at a window address has no id and no shadow.
        let id = if let Signal::Id(id) = view.signal { id } else { u32::MAX };
        let signals = self.core().comm().signals();
        fault::check!(self.core().fault(FaultKind::BadDescriptor, Operation::WaitSignal), |judge| {
            self.core().judge(&mut judge);
            judge.condition(id < signals, || {
                Unmet::new(FaultKind::UnknownSignal).of(view.subject()).values(signals as u64, id as u64)
            });
        })?;
        Ok(shadow_word(self.core(), id))
    }
}

/// A signal that was checked, with its words: [`Gin::prepare_wait`] makes it. It may be waited for any number of times.
#[derive(Clone, Copy, Debug)]
pub struct PreparedWait<'a, B: Backend> {
    gin: &'a Gin<B>,
    view: SignalView,
    words: Words<Global>,
}

impl<B: Backend> PreparedWait<'_, B> {
    /// Waits as [`Gin::wait_signal`], without its checks. All threads of `coop` call; one polls.
    ///
    /// # Errors
    /// [`FaultKind::Timeout`] with the values expected and seen; the fault or abort that ended the wait.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait(&self, coop: &impl Coop, least: u64, deadline: Deadline) -> Result<(), Fault> {
        let (gin, view, words) = (self.gin, self.view, &self.words);
        coop.sync();
        let due = is_time_to_look();
        let late = coop.elect() && !words.come_soon(gin.core().order(), view.bits, least, due);
        if !coop.sync_or(late) {
            return Ok(());
        }
        let mine = if coop.elect() { gin.wait_for(view, words, least, deadline, due).map(|_| ()) } else { Ok(()) };
        fault::here(coop.agree_led(mine))
    }
}
