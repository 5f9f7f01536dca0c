// SPDX-License-Identifier: MIT OR Apache-2.0
//! The words by which blocks and ranks agree, generic over the memory. Each claim that a fence here serves stands
//! beside the call; `docs/ep.md` has all of them in one place, with what models show.

use gin_device::Deadline;
use gin_device::internal::status::{Status, WaitError};
use gin_device::sys::{Memory, Word};

/// Returns the number of the words of a dispatch's launch: there are two sets, and a launch clears the other one.
#[inline(always)]
pub const fn launch_words(epoch: u64) -> u64 {
    epoch & 1
}

/// [`last_use`]: a rank may still read the rows.
const OCCUPIED: u64 = 2;

/// Returns the word of the slot's state with its last buffer, 0 or 1, and whether the dispatch there was combined. The
/// lowest bit is the buffer.
#[inline(always)]
pub const fn last_use(buffer: u64, is_combined: bool) -> u64 {
    if is_combined { buffer } else { buffer | OCCUPIED }
}

/// Returns whether other ranks may still read rows in this buffer, so that a dispatch must hear from them before it
/// stores rows there. `last` is the word of [`last_use`] before it.
///
/// They do not if the last dispatch used the other buffer: this rank has received that one, and each rank had given up
/// all older rows before it sent its own. Nor if the last dispatch was combined: each rank had given up the received
/// rows before it raised its flag for the returned ones.
#[inline(always)]
pub const fn is_occupied(last: u64, buffer: u64) -> bool {
    // Halves, so that one register has the word until then.
    last as u32 == last_use(buffer, false) as u32
}

/// The words of one launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch<M: Memory> {
    /// Number of blocks that have started.
    started: M::Word,
    /// Number of blocks that have sent.
    sent: M::Word,
    /// Number of units of the rest that were taken.
    taken: M::Word,
}

/// The state of a block after it has sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sent {
    /// All blocks have sent, and the caller sees what they did.
    pub is_last: bool,
    /// All blocks have started, so the block may wait.
    pub may_wait: bool,
}

impl<M: Memory> Launch<M> {
    /// Returns the words from `first` on.
    #[inline(always)]
    pub fn new(first: M::Word) -> Self {
        Self { started: first, sent: first.at(1), taken: first.at(2) }
    }

    /// Stores 0 to all words. No block uses them.
    #[inline(always)]
    pub fn clear(&self) {
        self.started.store_relaxed_gpu(0);
        self.sent.store_relaxed_gpu(0);
        self.taken.store_relaxed_gpu(0);
    }

    /// Counts a block that starts. Returns the number of blocks that had started before.
    #[inline(always)]
    pub fn start(&self) -> u64 {
        self.started.add_relaxed_gpu(1)
    }

    /// Counts a block that has sent. Its threads have met the caller.
    ///
    /// Ordering: release, for the last block also acquire, at GPU scope. That is enough for stores to other GPUs too:
    /// what the last block releases at system scope afterwards covers all that it has acquired.
    #[inline(always)]
    pub fn finish(&self, blocks: u64) -> Sent {
        // The only block has met its threads, and has no other one to hear from.
        if blocks == 1 {
            return Sent { is_last: true, may_wait: true };
        }
        M::fence_release_gpu();
        let started = self.started.load_relaxed_gpu();
        let is_last = self.count(blocks);
        // All blocks have started if all have sent, though the load may be older than that.
        Sent { is_last, may_wait: started == blocks || is_last }
    }

    /// Counts a block as [`finish`](Self::finish), where no block waits. Returns whether it is the last one.
    #[inline(always)]
    pub fn finish_without_wait(&self, blocks: u64) -> bool {
        blocks == 1 || {
            M::fence_release_gpu();
            self.count(blocks)
        }
    }

    #[inline(always)]
    fn count(&self, blocks: u64) -> bool {
        let is_last = self.sent.add_relaxed_gpu(1) == blocks - 1;
        if is_last {
            M::fence_acquire_gpu();
        }
        is_last
    }

    /// Takes the next unit of the rest.
    #[inline(always)]
    pub fn take(&self) -> u64 {
        self.taken.add_relaxed_gpu(1)
    }
}

/// Counts `number` of the `of` rows of a tile, or one of the `of` blocks of a grid, which have been sent and whose
/// threads have met the caller. Returns whether they were the last ones of this launch; then the caller may raise their
/// flag. The counter was 0 at first.
///
/// Ordering: as [`Launch::finish`].
#[inline(always)]
pub fn count<M: Memory>(counter: M::Word, number: u64, of: u64) -> bool {
    M::fence_release_gpu();
    let is_last = counter.add_relaxed_gpu(number).wrapping_add(number).is_multiple_of(of);
    if is_last {
        M::fence_acquire_gpu();
    }
    is_last
}

/// Returns the value of a flag: the lower half of an epoch, and the number of rows that the flag covers. One word has
/// both, so that no store of a number has to arrive before the flag may be raised.
#[inline(always)]
pub const fn flag(epoch: u64, rows: u32) -> u64 {
    epoch << 32 | rows as u64
}

/// The number of rows in a flag for returned rows: their rank has stored them to their source.
pub const PUSHED: u32 = 0;
/// The same: the rows are where their source put them, and it may load them from there.
pub const IN_PLACE: u32 = 1;

/// Raises a flag after all writes that the caller made or has seen.
#[inline(always)]
pub fn raise<M: Memory>(word: M::Word, epoch: u64, rows: u32) {
    M::fence_release_sys();
    word.store_relaxed_sys(flag(epoch, rows));
}

/// A flag that a rank waits for: a word of its own memory, or a signal with the same value.
pub trait Flag {
    /// Returns the value now, relaxed.
    fn look(&self) -> u64;
}

impl<W: Word> Flag for W {
    #[inline(always)]
    fn look(&self) -> u64 {
        self.load_relaxed_sys()
    }
}

/// Waits for a flag. Returns its number of rows. An error has its last epoch.
///
/// Ordering: acquire, at system scope.
#[inline(always)]
pub fn wait<M: Memory>(
    status: &Status<M>,
    deadline: Deadline,
    flag: impl Flag + Copy,
    epoch: u64,
) -> Result<u32, (WaitError, u64)> {
    wait_for::<M>(status, deadline, flag, epoch, 0)
}

/// Waits, as [`wait`], until a flag of the epoch has at least `number`.
#[inline(always)]
pub fn wait_for<M: Memory>(
    status: &Status<M>,
    deadline: Deadline,
    flag: impl Flag + Copy,
    epoch: u64,
    number: u32,
) -> Result<u32, (WaitError, u64)> {
    let mut seen = 0;
    let waited = status.poll(deadline, || {
        seen = flag.look();
        reached(seen, epoch) && ((seen >> 32) as u32 != epoch as u32 || seen as u32 >= number)
    });
    if let Err(stop) = waited {
        return Err((stop, seen >> 32));
    }
    M::fence_acquire_sys();
    Ok(seen as u32)
}

/// Returns whether a flag is at or past an epoch, on the circle of 2^32 values.
#[inline(always)]
pub const fn reached(flag: u64, epoch: u64) -> bool {
    ((flag >> 32) as u32).wrapping_sub(epoch as u32) < 1 << 31
}

/// Returns whether a silent rank no longer uses the rows that it sent in an epoch, nor what came in place of them:
/// `announced` is the flag by which it begins the next one, after it has received the sums of this one.
///
/// Ordering: acquire, at system scope.
#[inline(always)]
pub fn is_over<M: Memory>(announced: M::Word, epoch: u64) -> bool {
    let seen = announced.load_relaxed_sys();
    M::fence_acquire_sys();
    reached(seen, epoch.wrapping_add(1))
}

/// Makes all blocks agree whether a rank took part in an epoch. The first that asks decides.
#[inline(always)]
pub fn agree<M: Memory>(verdict: M::Word, epoch: u64, took_part: bool) -> bool {
    let mine = epoch << 1 | u64::from(took_part);
    let mut seen = verdict.load_relaxed_gpu();
    while seen >> 1 != epoch << 1 >> 1 {
        let before = verdict.cas_relaxed_gpu(seen, mine);
        if before == seen {
            return took_part;
        }
        seen = before;
    }
    seen & 1 != 0
}

/// Returns whether a block that has seen a flag must [`agree`] with the others: one of them may have given up.
///
/// No block of a combine begins to wait before `since`, so none gives up before `deadline` has passed since then. A
/// block that saw the flag earlier therefore knows that the others will see it too. A quarter of the time is left for
/// clocks that differ and for the others' next look.
#[inline(always)]
pub fn must_agree<M: Memory>(since: u64, deadline: Deadline) -> bool {
    let waited = M::clock_ns().wrapping_sub(since);
    deadline.is_over(waited.saturating_add(waited / 3))
}

/// Waits for a flag, as [`wait`], in each of several blocks, which must agree whether the rank took part. An error
/// means that it did not, for all blocks.
///
/// Ordering: as [`wait`].
#[inline(always)]
pub fn wait_together<M: Memory>(
    status: &Status<M>,
    deadline: Deadline,
    flag: impl Flag + Copy,
    verdict: M::Word,
    epoch: u64,
    since: u64,
) -> Result<u32, (WaitError, u64)> {
    let mut within = deadline;
    loop {
        let waited = wait(status, within, flag, epoch);
        if within != deadline || waited.is_ok() && !must_agree::<M>(since, deadline) {
            return waited;
        }
        match (agree::<M>(verdict, epoch, waited.is_ok()), waited) {
            // Another block has seen the flag, so this one will.
            (true, Err(_)) if !deadline.is_none() => within = Deadline::NONE,
            (false, Ok(_)) => return Err((WaitError::Deadline, epoch)),
            (_, waited) => return waited,
        }
    }
}

/// Tells the blocks of the launch that this one has stored for each source whether it took part in an epoch, and the
/// number of its rows.
#[inline(always)]
pub fn decide<M: Memory>(decided: M::Word, epoch: u64) {
    M::fence_release_gpu();
    decided.store_relaxed_gpu(epoch);
}

/// Waits for a flag in a block that does not [`decide`]. Returns the number of rows that the deciding block has, or
/// will have, in the word `rows`; 0 if an abort or a fault ended the wait.
///
/// The deciding block begins to wait after all blocks were counted, so after `since`, when this one was not. It gives
/// up no earlier than `deadline` later. So it will see a flag that this block has seen before, as in [`must_agree`].
/// Otherwise this block waits for the decision. That block runs, and waits for ranks alone, up to its deadline.
///
/// Ordering: as [`wait`].
#[inline(always)]
pub fn wait_or_follow<M: Memory>(
    status: &Status<M>,
    deadline: Deadline,
    flag: impl Flag + Copy,
    (decided, rows): (M::Word, M::Word),
    epoch: u64,
    since: u64,
) -> u32 {
    if let Ok(seen) = wait(status, deadline, flag, epoch)
        && !must_agree::<M>(since, deadline)
    {
        return seen;
    }
    // No other launch stores this epoch.
    if status.poll(Deadline::NONE, || decided.load_relaxed_gpu() == epoch).is_err() {
        return 0;
    }
    // The deciding block acquired the rows before it released its decision.
    M::fence_acquire_gpu();
    rows.load_relaxed_gpu() as u32
}

/// Writes a report of four words after its code, if no other is there. While the kernel runs, the host may see the code
/// before the words: nothing here orders them.
#[inline(always)]
pub fn report<M: Memory>(claimed: M::Word, first: M::Word, code: u64, words: [u64; 4]) {
    if claimed.cas_relaxed_gpu(0, 1) != 0 {
        return;
    }
    first.at(1).store_relaxed_sys(words[0]);
    first.at(2).store_relaxed_sys(words[1]);
    first.at(3).store_relaxed_sys(words[2]);
    first.at(4).store_relaxed_sys(words[3]);
    first.store_relaxed_sys(code);
}
