// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts of a round trip over the proxy: kernels, each with one more of the steps of gin's kernels.

use crate::{LATE, Limit, Marks, Plan, WRONG, payload, word};
use gin_abi::descriptor::WORDS;
use gin_abi::handle::QUEUE_NEAR;
use gin_abi::{ContextData, Deadline, Descriptor, RemoteSignal, SignalTarget, Transfer, WindowOffset};
use gin_device::internal::queue::{Producer, Queue, phase};
use gin_device::internal::signal_words::Words;
use gin_device::internal::status::Status;
use gin_device::prelude::*;
use gin_device::sys::{Global, GlobalWord, Memory, Word};

/// Posts a whole descriptor and polls the word in host memory.
const POSTS: u32 = 0;
/// Also releases to the system before.
const RELEASES: u32 = 1;
/// Also claims the slot and looks for room.
const CLAIMS: u32 = 2;
/// Also waits as gin does, with turns, status and deadline.
const WAITS: u32 = 3;
/// Also looks for the mailbox.
const DRAINS: u32 = 4;

/// # Safety
/// - The same as for the kernels.
#[inline(always)]
unsafe fn play<const STEPS: u32>(comm: &Comm, window: Window<u64>, plan: Plan, marks: Marks) {
    let limit = Limit::new(plan.limit_ns);
    let (handle, at) = (comm.handle(), |address| {
        // Safety: guaranteed by the kernel's caller: the addresses are those of valid words.
        unsafe { GlobalWord::new(address) }
    });
    // Safety: guaranteed by the kernel's caller.
    let data = unsafe { *(handle.context_table as usize as *const ContextData) };
    let queue: Queue<Global, WORDS> = Queue {
        slots: at(data.slots),
        producer_index: at(data.producer_index),
        near: at(data.producer_index + QUEUE_NEAR),
        consumer_index: at(data.consumer_index),
        completion_index: at(data.completion_index),
        oldest_incomplete: at(data.oldest_incomplete),
        depth_log2: data.depth_log2 as u32 & 31,
        depth_mask: data.depth_mask,
    };
    let status =
        Status { host: at(handle.host_status), kernel: at(handle.kernel_status), copy: at(handle.kernel_status_copy) };
    let producer = Producer { queue, status };
    let words = Words {
        gpu: None,
        nic: None,
        cpu: Some(at(data.signal_cpu)),
        near: at(data.signal_near),
        mailbox: (STEPS >= DRAINS && data.mailbox != 0).then(|| at(data.mailbox)),
    };
    // Safety: the window's word, which only CPU threads and this thread use.
    let here = unsafe { word(window.local_ptr()) };
    let destination = WindowOffset { window: window.handle().id, offset: 0 };
    let signal = RemoteSignal { target: SignalTarget::Id(0), amount: 1, strong: true };
    let (peer, first) = (comm.world().right().world(), comm.world().rank() == 0);
    plan.play(
        first,
        true,
        marks,
        |round| {
            let transfer = Transfer::PutValue { value: payload(round, 0), width_log2: 3, destination };
            let descriptor = Descriptor { peer, transfer, signal: Some(signal), counter: None, more: false }.encode();
            if STEPS >= RELEASES {
                Global::fence_release_sys();
            }
            if STEPS >= CLAIMS {
                let claim = |_| Some(producer.claim(true, 1, Sharing::Gpu));
                return producer.post(descriptor, claim, Deadline::NONE).is_ok();
            }
            // Only this thread posts, and waits for each answer: the slot is empty.
            let index = round - 1;
            let (phase, slot) = (phase(index, queue.depth_log2), index & queue.depth_mask as u64);
            let (slot, mut pair) = (queue.slots.at(slot * WORDS as u64), 0);
            while pair < WORDS {
                let (low, high) = (descriptor[pair] & !1 | phase, descriptor[pair + 1] & !1 | phase);
                slot.at(pair as u64).store_pair_relaxed_sys(low, high);
                pair += 2;
            }
            true
        },
        |round| {
            let there = if STEPS >= WAITS {
                words.wait(&status, round, u64::BITS, plan.deadline(), || {}).is_ok()
            } else {
                let there = limit.reached(at(data.signal_cpu), round);
                Global::fence_acquire_sys();
                there
            };
            marks.count(LATE, u64::from(!there));
            if plan.verifies() {
                marks.count(WRONG, u64::from(here.load_relaxed_sys() != payload(round, 0)));
            }
            there
        },
    );
}

macro_rules! parts {
    ($($name:ident $steps:ident $doc:literal;)*) => { $(
        #[doc = concat!("Posts a value with a signal and waits for the answer, repeatedly, by one thread: ", $doc, ".")]
        ///
        /// # Safety
        /// - Both ranks launch it with the same numbers, one thread each, resident, as ranks 0 and 1. No other kernel
        ///   has posted to the communicator. The first context of its table has a signal that CPU threads raise.
        ///   `window` has a word, `out` has [`MARKS`](crate::MARKS) words.
        #[kernel]
        pub unsafe fn $name(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
            // Safety: guaranteed by the kernel's caller.
            unsafe { play::<$steps>(&comm, window, plan, Marks::new(out)) };
        }
    )* };
}

parts! {
    part_posts POSTS "a whole descriptor, and a poll of the word in host memory";
    part_releases RELEASES "with a release to the system before the descriptor";
    part_claims CLAIMS "the same, and the slot is claimed, with a look for room";
    part_waits WAITS "the same, and the wait is gin's";
    part_drains DRAINS "the same, and the wait looks for the mailbox";
}
