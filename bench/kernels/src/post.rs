// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts without waiting for completion: the cost of issuing one.
//!
//! Each thread repeatedly puts [`BYTES`] bytes with a signal. Its peers take turns, and neighbouring threads begin with
//! different ones.

use crate::{END, Marks, START, succeeded};
use gin_device::prelude::*;
use gin_device::sys::data::{store_weak_pair, store_weak_u64};
use gin_device::sys::{self, Global, GlobalWord, Memory, Word};

/// Number of bytes of a put.
pub const BYTES: usize = 64;

/// Returns the number of the calling thread in the grid.
#[inline(always)]
pub(crate) fn thread() -> usize {
    block_in_grid() as usize * Block.size() as usize + Block.rank() as usize
}

/// The writes before a post.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fresh {
    /// No write and no release.
    Nothing,
    /// 16 bytes are written but not released.
    Unreleased,
    /// 16 bytes are written and released to the GPU.
    Gpu,
    /// 16 bytes are written and released to the system.
    System,
}

/// The words that a kernel of posts writes: the marks of its block, and a table of one word for each thread.
#[derive(Clone, Copy)]
pub(crate) struct Times {
    pub(crate) marks: Marks,
    /// The calling thread's word: the time of its posts, in nanoseconds.
    own: *mut u64,
}

impl Times {
    /// # Safety
    /// - `times` has a word for each thread of the grid, `out` has [`MARKS`](crate::MARKS) words for each block; nobody
    ///   else uses them meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn new(times: *mut u64, out: *mut u64) -> Self {
        // Safety: guaranteed by the caller.
        Self { marks: unsafe { Marks::new(out) }, own: times.wrapping_add(thread()) }
    }
}

/// Posts `posts` times, as long as posts succeed. One thread of the block records the start and the end of the block,
/// each thread its own time. `mine` is 16 bytes of the thread's, which it writes before each post.
#[inline(always)]
pub(crate) fn time(posts: u64, times: Times, fresh: Fresh, mine: *mut u64, mut post: impl FnMut(u64) -> bool) {
    let marks = times.marks;
    Block.sync();
    let begun = sys::clock_ns();
    if Block.elect() {
        marks.now(START);
    }
    let mut number = 0;
    while number < posts {
        if fresh != Fresh::Nothing {
            // Safety: the thread's own part.
            unsafe { store_weak_pair(mine, number, number) };
        }
        if !post(number) {
            break;
        }
        number += 1;
    }
    // Safety: the thread's own word.
    unsafe { store_weak_u64(times.own, sys::clock_ns().wrapping_sub(begun)) };
    Block.sync();
    if Block.elect() {
        marks.now(END);
    }
}

#[inline(always)]
fn put<B: Backend>(
    comm: &Comm,
    window: Window<u64>,
    posts: u64,
    peers: u32,
    times: Times,
    (fresh, sharing): (Fresh, Sharing),
) {
    let gin = Gin::<B>::with_backend(comm, ContextId::new(0)).shared_by(sharing);
    let place = thread() * (BYTES / 8);
    let mine = window.local_ptr().wrapping_add(place);
    let range = window.range(place, BYTES / 8);
    let mut peer = thread() as u32 % peers;
    time(posts, times, fresh, mine, |_| {
        // Safety: guaranteed by the kernel's caller: there are that many ranks.
        let to = unsafe { Rank::new_unchecked(peer) };
        let put = gin.put(to, range, range).signal(SignalId::new(0).inc());
        let put = match fresh {
            Fresh::Nothing | Fresh::Unreleased => put.released(Scope::System),
            Fresh::Gpu => put.required(Scope::Gpu),
            Fresh::System => put,
        };
        peer = if peer + 1 == peers { 0 } else { peer + 1 };
        succeeded(comm, put.issue(&Thread))
    });
}

/// Does the least that a post takes: claims a slot by an atomic in GPU memory, and stores 64 bytes to it.
#[inline(always)]
fn bare(slots: *mut u64, producer: *mut u64, mask: u64, data: *mut u64, posts: u64, times: Times, fresh: Fresh) {
    // Safety: guaranteed by the kernels' callers.
    let (slots, producer) = unsafe { (crate::word(slots), crate::word(producer)) };
    let mine = data.wrapping_add(thread() * (BYTES / 8));
    time(posts, times, fresh, mine, |post| {
        match fresh {
            Fresh::Nothing | Fresh::Unreleased => {}
            Fresh::Gpu => Global::fence_release_gpu(),
            Fresh::System => Global::fence_release_sys(),
        }
        let index = producer.add_relaxed_gpu(1);
        let slot: GlobalWord = slots.at((index & mask) * 8);
        let mut pair = 0;
        while pair < 4 {
            slot.at(2 * pair).store_pair_relaxed_sys(index, post);
            pair += 1;
        }
        true
    });
}

macro_rules! kernels {
    ($($put:ident $bare:ident $fresh:ident $doc:literal;)*) => { $(
        #[doc = concat!("Each thread posts `posts` puts with a signal to `peers` ranks, ", $doc, ".")]
        ///
        /// # Safety
        /// - There are `peers` ranks. `window` has [`BYTES`] bytes and `times` a word for each thread. `out` has
        ///   [`MARKS`](crate::MARKS) words for each block.
        #[kernel]
        pub unsafe fn $put(
            comm: Comm,
            window: Window<u64>,
            posts: u64,
            peers: u32,
            times: *mut u64,
            out: *mut u64,
        ) {
            // Safety: guaranteed by the kernel's caller.
            put::<Proxy>(&comm, window, posts, peers, unsafe { Times::new(times, out) }, (Fresh::$fresh, Sharing::Gpu));
        }

        #[doc = concat!("Each thread claims and fills `posts` slots, ", $doc, ".")]
        ///
        /// # Safety
        /// - `slots` has 8 words for each of `mask + 1` slots, a power of two. `producer` is a word. `data` has
        ///   [`BYTES`] bytes and `times` a word for each thread. `out` has [`MARKS`](crate::MARKS) words for each
        ///   block.
        #[kernel]
        pub unsafe fn $bare(
            slots: *mut u64,
            producer: *mut u64,
            mask: u64,
            data: *mut u64,
            posts: u64,
            times: *mut u64,
            out: *mut u64,
        ) {
            // Safety: guaranteed by the kernel's caller.
            bare(slots, producer, mask, data, posts, unsafe { Times::new(times, out) }, Fresh::$fresh);
        }
    )* };
}

kernels! {
    bench_post_nothing bare_post_nothing Nothing "with nothing to release";
    bench_post_unreleased bare_post_unreleased Unreleased "after writing 16 bytes that are not released";
    bench_post_gpu bare_post_gpu Gpu "after writing 16 bytes, released to the GPU";
    bench_post_system bare_post_system System "after writing 16 bytes, released to the system";
}

/// Each thread posts `posts` puts with a signal to `peers` ranks, with nothing to release, by device-driven NIC queue
/// pairs.
///
/// # Safety
/// - The same as for the kernels of the proxy.
#[kernel]
pub unsafe fn bench_gdaki(comm: Comm, window: Window<u64>, posts: u64, peers: u32, times: *mut u64, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    put::<Gdaki>(&comm, window, posts, peers, unsafe { Times::new(times, out) }, (Fresh::Nothing, Sharing::Gpu));
}

/// Does the same as [`bench_gdaki`] by one thread, the only one that uses the context.
///
/// # Safety
/// - The same, and the grid is one thread.
#[kernel]
pub unsafe fn bench_gdaki_alone(
    comm: Comm,
    window: Window<u64>,
    posts: u64,
    peers: u32,
    times: *mut u64,
    out: *mut u64,
) {
    // Safety: guaranteed by the kernel's caller.
    put::<Gdaki>(&comm, window, posts, peers, unsafe { Times::new(times, out) }, (Fresh::Nothing, Sharing::Thread));
}
