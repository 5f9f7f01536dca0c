// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that are threads, or coroutines, of one process.

use crate::board::Board;
use crate::{Bootstrap, BootstrapError, Channel, JOB, LossCause, host_name, lock, millis, rt};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

/// The state that all ranks share.
#[derive(Debug, Default)]
struct Hub {
    /// By channel and number.
    collectives: HashMap<(u64, u64), Collective>,
    /// By rank.
    gone: Vec<bool>,
    aborted: Option<u32>,
    boards: HashMap<u64, Weak<Board>>,
}

/// The bytes that ranks have given to a collective.
#[derive(Debug)]
struct Collective {
    parts: Vec<Option<Vec<u8>>>,
    /// The number of ranks that have received the result.
    received: u32,
}

/// One rank's end of one channel.
#[derive(Debug)]
struct ChannelEnd {
    rank: u32,
    ranks: u32,
    channel: u64,
    /// The number of the next collective.
    next: AtomicU64,
    timeout: Option<Duration>,
    hub: Arc<Mutex<Hub>>,
}

impl ChannelEnd {
    // Held for a few operations and never while waiting or looking at the clock: with ranks as coroutines of one thread
    // no other rank runs then.
    fn hub(&self) -> MutexGuard<'_, Hub> {
        lock(&self.hub)
    }

    /// Returns the end of another channel of the same rank.
    fn open(&self, channel: u64) -> Self {
        Self { channel, next: AtomicU64::new(0), hub: self.hub.clone(), ..*self }
    }

    /// Returns the error of a rank that has left.
    fn left(rank: u32) -> BootstrapError {
        BootstrapError::Lost { rank, host: host_name(), cause: LossCause::Left }
    }

    fn all_gather(&self, bytes: &[u8], ended: impl Fn() -> bool) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let key = (self.channel, self.next.fetch_add(1, Ordering::Relaxed));
        let empty = || Collective { parts: vec![None; self.ranks as usize], received: 0 };
        self.hub().collectives.entry(key).or_insert_with(empty).parts[self.rank as usize] = Some(bytes.to_vec());
        let start = rt::clock_ns();
        let outcome = rt::wait_for("the other ranks, in a collective call", || {
            let waited = Duration::from_nanos(rt::clock_ns().wrapping_sub(start));
            match self.result(key, waited) {
                Some(Ok(parts)) => Some(Ok(parts)),
                // The end of the communicator says more than the departure of a rank after it.
                _ if ended() => Some(Err(BootstrapError::Ended)),
                other => other,
            }
        });
        outcome.unwrap_or_else(|| Err(Self::left(self.rank)))
    }

    /// Returns the result of a collective, if it has one.
    fn result(&self, key: (u64, u64), waited: Duration) -> Option<Result<Vec<Vec<u8>>, BootstrapError>> {
        let mut hub = self.hub();
        let collective = hub.collectives.get_mut(&key)?;
        let missing: Vec<u32> =
            (0..).zip(&collective.parts).filter(|(_, part)| part.is_none()).map(|(rank, _)| rank).collect();
        if missing.is_empty() {
            collective.received += 1;
            let parts = collective.parts.clone();
            if collective.received == self.ranks {
                hub.collectives.remove(&key);
            }
            return Some(Ok(parts.into_iter().flatten().collect()));
        }
        if let Some(rank) = hub.aborted {
            return Some(Err(BootstrapError::Aborted { rank }));
        }
        if let Some(&rank) = missing.iter().find(|&&rank| hub.gone[rank as usize]) {
            return Some(Err(Self::left(rank)));
        }
        let late = self.timeout.is_some_and(|timeout| waited >= timeout);
        late.then(|| Err(BootstrapError::Timeout { missing, waited_ms: millis(waited) }))
    }
}

/// A rank that is a thread, or a coroutine, of this process.
///
/// ```
/// use gin_boot::{Bootstrap, InProcess};
///
/// let mut ranks = InProcess::job(2)?;
/// let one = ranks.pop().unwrap();
/// let other = std::thread::spawn(move || one.all_gather(b"one"));
/// assert_eq!(ranks[0].all_gather(b"zero")?, [&b"zero"[..], b"one"]);
/// other.join().unwrap()?;
/// # Ok::<(), gin_boot::BootstrapError>(())
/// ```
#[derive(Debug)]
pub struct InProcess(ChannelEnd);

impl InProcess {
    /// Makes a job of `ranks` ranks. Returns one value for each rank, by rank.
    ///
    /// # Errors
    /// [`BootstrapError::Ranks`].
    pub fn job(ranks: u32) -> Result<Vec<Self>, BootstrapError> {
        crate::tcp::check(0, ranks)?;
        let hub = Arc::new(Mutex::new(Hub { gone: vec![false; ranks as usize], ..Hub::default() }));
        let first = ChannelEnd { rank: 0, ranks, channel: JOB, next: AtomicU64::new(0), timeout: None, hub };
        Ok((0..ranks).map(|rank| Self(ChannelEnd { rank, ..first.open(JOB) })).collect())
    }

    /// Limits the time for which a collective waits for other ranks; by default it waits for ever.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.0.timeout = Some(timeout);
        self
    }
}

impl Bootstrap for InProcess {
    fn rank(&self) -> u32 {
        self.0.rank
    }

    fn ranks(&self) -> u32 {
        self.0.ranks
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.0.all_gather(bytes, || false)
    }

    fn channel(&self, communicator: u64) -> Arc<dyn Channel> {
        let mut hub = self.0.hub();
        hub.boards.retain(|_, board| board.strong_count() > 0);
        let known = hub.boards.get(&communicator).and_then(Weak::upgrade);
        let board = known.unwrap_or_else(|| Arc::new(Board::new(self.0.ranks)));
        hub.boards.insert(communicator, Arc::downgrade(&board));
        Arc::new(InProcessChannel { end: self.0.open(communicator), board })
    }

    fn abort(&self) {
        self.0.hub().aborted.get_or_insert(self.0.rank);
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.0.hub().gone[self.0.rank as usize] = true;
    }
}

#[derive(Debug)]
struct InProcessChannel {
    end: ChannelEnd,
    board: Arc<Board>,
}

impl Channel for InProcessChannel {
    fn board(&self) -> &Arc<Board> {
        &self.board
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.end.all_gather(bytes, || self.board.count() != 0)
    }
}

impl Drop for InProcessChannel {
    fn drop(&mut self) {
        // The last rank removes the collectives that were never completed.
        if Arc::strong_count(&self.board) == 1 {
            self.end.hub().collectives.retain(|(channel, _), _| *channel != self.end.channel);
        }
    }
}
