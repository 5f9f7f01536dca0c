// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that loads and stores do not reach: rows go there by puts, and flags by signals.
//!
//! Such a rank is *remote* here. A dispatch stores the rows for it into a region of this rank's own part of the arena.
//! The last block puts the region as a whole, and raises a signal behind it. A combine does the same with the rows that
//! go back.
//!
//! *A signal has the value of a flag.* A strong signal covers the earlier puts of its context to its peer, and a put of
//! a value does not, so a flag must be a signal. A signal is raised by a difference: that of the new flag and the
//! last one, of which the sender keeps the value. Flags of one word only grow, because epochs do, so the difference is
//! an increment, modulo 2^64. The receiver sees the sum: the last flag. Nothing resets it. A difference depends on
//! nothing but this rank's own words, so the sum is right after any silence.

use crate::arena::{Arena, Reach, lane_index};
use crate::params::{MASKED, Regions, Sizes, SlotParams, UNSENT, load};
use crate::protocol::{Flag, PUSHED, flag};
use crate::status::{self, Code};
use gin_device::prelude::*;
use gin_device::sys::{GlobalWord, Word};

/// The rows and flags of one slot for ranks that loads and stores do not reach: a parameter of the kernels, which the
/// host makes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Network {
    /// The first rank of this rank's LSA team.
    near_first: u32,
    /// Number of ranks of the team.
    near: u32,
    /// The context of all puts and signals.
    context: u32,
    /// The first word of the slot in the window of signals.
    signal: u32,
    /// The value of all flags before the first dispatch.
    base: u64,
    /// Offset in the arena of the words with the flags that this rank raised last.
    raised: u64,
    /// The address of the handles of two windows, arena and signals, in memory of the GPU.
    windows: u64,
    rows: Regions,
    meta: Regions,
    back: Regions,
}

/// The post of a put as a function. Its code is long, and one warp of a grid runs it: a module has it once for each
/// back end. Arguments are words, because a structure would be passed on the stack.
mod outlined {
    use gin_device::prelude::*;

    /// Puts and raises, as [`Routed::post`](super::Routed::post). `place` has the context in its upper half, the rank
    /// in its lower one.
    ///
    /// # Safety
    /// - `comm` is the address of the copy of a communicator's handle, `windows` that of the handles of arena and
    ///   signals of a group of it. The communicator has the rank.
    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "see above")]
    pub(super) unsafe fn post<B: Backend>(
        comm: u64,
        windows: u64,
        place: u64,
        at: u64,
        from: u64,
        bytes: u64,
        signal: u64,
        by: u64,
        deadline: Deadline,
    ) -> bool {
        let (comm, windows) = (comm as usize as *const Comm, windows as usize as *const [Window<u64>; 2]);
        // Safety: the caller's promise, here and below.
        let (comm, [arena, signals]) = unsafe { (*comm, *windows) };
        let to = unsafe { Rank::new_unchecked(place as u32) };
        let gin = Gin::<B>::with_backend(&comm, ContextId::new((place >> 32) as u32));
        let words = |offset: u64| arena.range((offset / 8) as usize, (bytes / 8) as usize);
        let put = gin.put(to, words(at), words(from)).deadline(deadline);
        let put = if by == 0 { put } else { put.signal(signals.signal(8 * signal).add(by)) };
        put.issue(&Thread).is_ok()
    }
}

/// Signals of a slot for each rank: a flag for each buffer of sent rows, and one for returned rows.
const FLAGS: u64 = 3;
const RETURNED: u64 = 2;
/// In place of the number of a signal: the flag is a word.
const NO_SIGNAL: u64 = u64::MAX;

impl Network {
    /// Makes the parameter of slot `number`, whose memory begins at byte `first` of the arena. This rank is in a team
    /// of `near` ranks, the first of which is `near_first`. `windows` is the address of the handles of arena and
    /// signals, in memory of the GPU. The slots have made `epoch` dispatches.
    #[must_use]
    pub const fn new(
        sizes: &Sizes,
        number: u32,
        first: u64,
        (near_first, near): (u32, u32),
        (windows, context): (u64, u32),
        epoch: u64,
    ) -> Self {
        let remote = sizes.ranks - near;
        let rows = Regions::of(sizes, remote, first + 8 * Self::words(sizes), sizes.row_bytes as u64);
        let meta = Regions::of(sizes, remote, rows.end(), sizes.meta_bytes as u64);
        let back = Regions::of(sizes, remote, meta.end(), sizes.combine_rows as u64 * sizes.combine_bytes as u64);
        let signal = number * FLAGS as u32 * sizes.ranks;
        Self { near_first, near, context, signal, base: flag(epoch, 0), raised: first, windows, rows, meta, back }
    }

    /// Returns the bytes that a slot takes in the arena besides [`Sizes::slot_bytes`], on a rank with this many ranks
    /// in its team.
    #[must_use]
    pub const fn slot_bytes(sizes: &Sizes, near: u32) -> u64 {
        let remote = (sizes.ranks - near) as u64 * sizes.tokens as u64;
        let back = sizes.combine_rows as u64 * sizes.combine_bytes as u64;
        8 * Self::words(sizes) + remote * (2 * (sizes.row_bytes as u64 + sizes.meta_bytes as u64) + back)
    }

    const fn words(sizes: &Sizes) -> u64 {
        (FLAGS * sizes.ranks as u64).next_multiple_of(2)
    }

    /// Returns the number of signals of a slot. It is also the number of words with the flags that this rank raised
    /// last, at the beginning of the slot's memory.
    #[must_use]
    pub const fn signals(sizes: &Sizes) -> u64 {
        FLAGS * sizes.ranks as u64
    }

    /// Returns the first byte of the slot's memory in the arena.
    #[must_use]
    pub const fn first(&self) -> u64 {
        self.raised
    }

    /// Returns the value of all flags before the first dispatch.
    #[must_use]
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Returns the number of a rank among the ranks that loads and stores do not reach.
    #[inline(always)]
    const fn remote(&self, rank: u32) -> u32 {
        if rank < self.near_first { rank } else { rank - self.near }
    }
}

/// Loads and stores reach the ranks of this rank's team; others are remote.
#[derive(Clone, Copy)]
pub(crate) struct Routed<'a, B: Backend> {
    gin: Gin<B>,
    signals: &'a Window<u64>,
    network: &'a Network,
}

/// A flag that a remote rank raises, or one of a rank that is not remote.
#[derive(Clone, Copy)]
pub(crate) struct RoutedFlag<'a, B: Backend> {
    route: Routed<'a, B>,
    word: GlobalWord,
    /// The number of the signal, or [`NO_SIGNAL`].
    signal: u64,
}

impl<B: Backend> Flag for RoutedFlag<'_, B> {
    #[inline(always)]
    fn look(&self) -> u64 {
        if self.signal == NO_SIGNAL {
            return self.word.look();
        }
        let signal = self.route.signals.signal(8 * self.signal);
        // The signals are those of the group, so there is no fault.
        self.route.gin.read_signal(signal).map_or(0, |sum| sum.wrapping_add(self.route.network.base))
    }
}

impl<'a, B: Backend> Routed<'a, B> {
    #[inline(always)]
    pub(crate) fn new(comm: &Comm, signals: &'a Window<u64>, network: &'a Network) -> Self {
        let gin = Gin::<B>::with_backend(comm, ContextId::new(network.context)).ordered(Order::Relaxed);
        Self { gin, signals, network }
    }

    /// Returns the number of the signal of a flag that `rank` raises at its peers, or its peers at `rank`.
    #[inline(always)]
    fn signal(&self, which: u64, rank: u32) -> u64 {
        u64::from(self.network.signal) + which * self.ranks() + u64::from(rank)
    }

    #[inline(always)]
    fn ranks(&self) -> u64 {
        u64::from(self.gin.comm().world().size())
    }

    #[inline(always)]
    fn flag(&self, word: GlobalWord, which: u64, source: u32) -> RoutedFlag<'a, B> {
        let signal = if self.is_remote(source) { self.signal(which, source) } else { NO_SIGNAL };
        RoutedFlag { route: *self, word, signal }
    }

    /// Puts `bytes` bytes of this rank's part of the arena, from offset `from` on, to offset `at` of a rank's part, and
    /// raises a signal there by `by`, unless that is 0, after all earlier puts. Returns whether it was posted.
    #[inline(always)]
    fn post(&self, slot: &SlotParams, to: u32, (at, from, bytes): (u64, u64, u64), (signal, by): (u64, u64)) -> bool {
        let (comm, windows) = (self.gin.comm().handle().copy, self.network.windows);
        let place = u64::from(self.network.context) << 32 | u64::from(to);
        // Safety: the host made all of them for each other.
        unsafe { outlined::post::<B>(comm, windows, place, at, from, bytes, signal, by, slot.deadline) }
    }

    #[inline(always)]
    fn put(&self, slot: &SlotParams, to: u32, range: (u64, u64, u64)) -> bool {
        self.post(slot, to, range, (0, 0))
    }

    /// Puts and raises a flag.
    #[inline(always)]
    fn put_last(
        &self,
        arena: &Arena<Self>,
        slot: &SlotParams,
        to: u32,
        range: (u64, u64, u64),
        (which, value): (u64, u64),
    ) -> bool {
        // Only this thread uses the word, and kernels of a slot follow each other.
        let raised = arena.word(self.network.raised + 8 * (which * self.ranks() + u64::from(to)));
        let by = value.wrapping_sub(raised.load_relaxed_gpu());
        let is_posted = self.post(slot, to, range, (self.signal(which, arena.rank()), by));
        if is_posted {
            raised.store_relaxed_gpu(value);
        }
        is_posted
    }

    /// Reports a rank to which nothing could be posted, and marks it in a word of the slot's state.
    #[inline(always)]
    fn is_unsent(&self, arena: &Arena<Self>, slot: &SlotParams, to: u32, epoch: u64, word: u64) {
        status::report(arena.here(), slot, self.unsent_code(), to, 0, u64::from(epoch as u32), 0);
        arena.word(slot.word(word)).red_or_relaxed_gpu(1 << to);
    }

    #[inline(always)]
    fn unsent_code(&self) -> Code {
        if self.gin.comm().fault().is_some() { Code::Stopped } else { Code::Unsent }
    }
}

impl<'a, B: Backend> Reach for Routed<'a, B> {
    type Flag = RoutedFlag<'a, B>;

    #[inline(always)]
    fn masked(arena: &Arena<Self>, slot: &SlotParams) -> u64 {
        arena.word(slot.word(MASKED)).load_relaxed_gpu() | arena.word(slot.word(UNSENT)).load_relaxed_gpu()
    }

    #[inline(always)]
    fn is_remote(&self, rank: u32) -> bool {
        rank.wrapping_sub(self.network.near_first) >= self.network.near
    }

    #[inline(always)]
    fn sent(&self, word: GlobalWord, buffer: u64, source: u32) -> RoutedFlag<'a, B> {
        self.flag(word, buffer, source)
    }

    #[inline(always)]
    fn returned(&self, word: GlobalWord, source: u32) -> RoutedFlag<'a, B> {
        self.flag(word, RETURNED, source)
    }

    #[inline(always)]
    fn staged(&self, buffer: u64, rank: u32) -> (u64, u64) {
        let remote = self.network.remote(rank);
        (self.network.rows.at(buffer, remote), self.network.meta.at(buffer, remote))
    }

    #[inline(always)]
    fn staged_back(&self, rank: u32) -> u64 {
        self.network.back.at(0, self.network.remote(rank))
    }

    #[inline(always)]
    fn send(arena: &Arena<Self>, slot: &SlotParams, epoch: u64, masked: u64, count: impl Fn(u32) -> u32) {
        let (route, sizes) = (&arena.route, &slot.sizes);
        // Only one lane posts, here and below. Where several did and the queue was full, a lane stayed behind on GPUs
        // (docs/log/2026-11-25.md).
        if lane_index() != 0 {
            return;
        }
        // The combine goes on without the ranks of `UNSENT`, too.
        arena.word(slot.word(MASKED)).red_or_relaxed_gpu(masked);
        for to in 0..sizes.ranks {
            if !route.is_remote(to) || masked >> to & 1 != 0 {
                continue;
            }
            let (count, (rows, meta)) = (count(to), route.staged(slot.buffer, to));
            let of = |at: u64, from: u64, bytes: u32| (at, from, u64::from(count) * u64::from(bytes));
            let rows = of(slot.rows(arena.rank()), rows, sizes.row_bytes);
            let meta = of(slot.meta(arena.rank()), meta, sizes.meta_bytes);
            let is_sent = (count == 0 || route.put(slot, to, rows))
                && route.put_last(arena, slot, to, meta, (slot.buffer, flag(epoch, count)));
            if !is_sent {
                route.is_unsent(arena, slot, to, epoch, MASKED);
            }
        }
    }

    #[inline(always)]
    fn give_back(arena: &Arena<Self>, slot: &SlotParams, epoch: u64, masked: u64, is_in_place: bool) {
        let (route, sizes, each) = (&arena.route, &slot.sizes, slot.sizes.combine_rows);
        let (bytes, at) = (u64::from(sizes.combine_bytes), slot.returned(arena.rank()));
        for to in 0..sizes.ranks {
            if !route.is_remote(to) || masked >> to & 1 != 0 {
                continue;
            }
            let got = arena.word(slot.got(to)).load_relaxed_gpu() as u32;
            let mut is_sent = true;
            if each > 1 {
                // Not all ids of a row are of this rank, so only runs of rows go together.
                let (rows, mut first) = (got * each, 0);
                while first < rows {
                    let index = first + lane_index();
                    let meta = arena.here() + slot.meta(to) + u64::from(index / each) * u64::from(sizes.meta_bytes);
                    // Safety: the metadata of a received row.
                    let goes = index < rows && unsafe { load(meta + 4 + 4 * u64::from(index % each)) } as i32 >= 0;
                    let mut goes = u64::from(Warp.ballot(goes));
                    while goes != 0 && lane_index() == 0 {
                        let start = goes.trailing_zeros();
                        let number = (goes >> start).trailing_ones();
                        let offset = u64::from(first + start) * bytes;
                        let range = (at + offset, route.staged_back(to) + offset, u64::from(number) * bytes);
                        is_sent &= route.put(slot, to, range);
                        // The lowest run of bits.
                        goes &= goes + (1 << start);
                    }
                    Warp.sync();
                    first += WARP_SIZE;
                }
            }
            if lane_index() == 0 {
                let from = if is_in_place { slot.rows(to) } else { route.staged_back(to) };
                let range = (at, from, if each > 1 { 0 } else { u64::from(got) * bytes });
                let value = (RETURNED, flag(epoch, PUSHED));
                if !is_sent || !route.put_last(arena, slot, to, range, value) {
                    route.is_unsent(arena, slot, to, epoch, UNSENT);
                }
            }
        }
    }

    #[inline(always)]
    fn give_nothing_back(arena: &Arena<Self>, slot: &SlotParams, epoch: u64, masked: u64) {
        let route = &arena.route;
        if lane_index() != 0 {
            return;
        }
        for to in 0..slot.sizes.ranks {
            if !route.is_remote(to) || masked >> to & 1 != 0 {
                continue;
            }
            let range = (slot.returned(arena.rank()), route.staged_back(to), 0);
            if !route.put_last(arena, slot, to, range, (RETURNED, flag(epoch, PUSHED))) {
                // The rank waits in vain, and sends nothing here. It is in no mask yet, as blocks start at different
                // times and would not agree.
                status::report(arena.here(), slot, route.unsent_code(), to, 0, u64::from(epoch as u32), 0);
            }
        }
    }
}
