// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where processes ask for a place in the job that follows a running one.
//!
//! A job's ranks never change: ranks that join or are lost make another job, with its own tree and secret. Before that
//! job joins, its ranks must agree on it, and a job that has lost a rank can complete no collective. So each process
//! has a door: a socket that it keeps from job to job. All ranks know the addresses of all doors.
//!
//! The remaining ranks of a running job call with one plan: the ranks that are left out, and the ranks that join. The
//! first of them admits, and the others and the processes that join knock at its door until all have knocked. Each then
//! gets the new job's secret and the address of its rank 0, and joins as ranks of a first job do. The running job takes
//! no part in that, so it goes on if the next one does not begin.
//!
//! Doors use the secret with which the first job began. So a process needs no more than that secret and an address.

use crate::greet::{GREETING, accept, limited};
use crate::id::{Root, Secret};
use crate::link::{Link, Traffic};
use crate::lock;
use crate::message::{Answer, CollectiveId, Hello, Knock};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The collective by which ranks exchange the addresses of their doors.
pub(super) const DOORS: CollectiveId = CollectiveId { channel: u64::MAX, number: 1 };

/// Returns the longest pause between knocks. It grows with the ranks of the next job, because all knock at one door.
pub(super) fn longest_pause(ranks: u32) -> Duration {
    Duration::from_millis(100) + Duration::from_micros(500) * ranks
}

/// The number of longest pauses after which a process that joins, and does not knock again, counts as gone.
const FRESH: u32 = 20;

/// The door of a process.
#[derive(Debug)]
pub(super) struct Door {
    /// The root of the first job's secret, and that secret.
    pub(super) root: Root,
    pub(super) secret: Secret,
    /// At the first one all other ranks find this process. At the second one rank 0 of the first job has listened.
    pub(super) listeners: Vec<TcpListener>,
    /// The call that is under way.
    call: Mutex<Option<Call>>,
}

/// A call of this process for another job.
#[derive(Debug)]
pub(super) enum Call {
    /// Another rank admits, at this door.
    Elsewhere(SocketAddr),
    /// This rank admits.
    Here(Roll),
}

/// The processes that have a place in the next job, as the rank that admits counts them.
#[derive(Debug)]
pub(super) struct Roll {
    pub(super) plan: [u8; 32],
    pub(super) ranks: u32,
    /// The ranks that join, in order.
    pub(super) joining: Vec<u32>,
    /// The rank that admits.
    pub(super) own: u32,
    /// The secret of the next job.
    pub(super) secret: Secret,
    /// The address of rank 0 of the next job, when it is known.
    pub(super) rank_0: Option<SocketAddr>,
    /// The instance of each rank that has knocked, and the time of its last knock.
    pub(super) knocked: BTreeMap<u32, ([u8; 16], Instant)>,
    /// All have knocked: places are given for good.
    pub(super) whole: bool,
}

impl Roll {
    /// Returns whether a rank has knocked, and has not gone away since. Of the ranks of the running job it is enough
    /// that they knocked once: that job finds out if they are lost.
    fn has(&self, rank: u32) -> bool {
        let max = FRESH * longest_pause(self.ranks);
        let is_fresh = |seen: Instant| seen.elapsed() < max || self.joining.binary_search(&rank).is_err();
        rank == self.own || self.knocked.get(&rank).is_some_and(|&(_, seen)| self.whole || is_fresh(seen))
    }

    /// Returns the ranks that have not knocked.
    pub(super) fn missing(&self) -> Vec<u32> {
        (0..self.ranks).filter(|&rank| !self.has(rank)).collect()
    }

    fn answer(&mut self, knock: &Knock) -> Answer {
        let Knock { rank, ranks, instance, plan, listens } = *knock;
        let joins = self.joining.binary_search(&rank).is_ok();
        match plan {
            // A place of a later call may have this number.
            None if !joins => return Answer::NotNow,
            None if ranks != self.ranks => return Answer::Ranks(self.ranks),
            None if rank == 0 && listens.is_none() => return Answer::Unexpected,
            None => {}
            Some(plan) if plan != self.plan || joins || rank >= self.ranks || rank == self.own => {
                return Answer::NotNow;
            }
            Some(_) => {}
        }
        if self.has(rank) && self.knocked.get(&rank).is_some_and(|&(other, _)| other != instance) {
            return Answer::Duplicate;
        }
        self.knocked.insert(rank, (instance, Instant::now()));
        if joins && rank == 0 {
            self.rank_0 = listens;
        }
        let missing = self.missing();
        self.whole |= missing.is_empty();
        match self.rank_0 {
            Some(address) if self.whole => Answer::Meet { secret: self.secret.clone(), address },
            _ => Answer::Pending { count: missing.len() as u32, missing },
        }
    }
}

/// Keeps a call open at a door until it is dropped.
pub(super) struct Calling<'a>(&'a Door);

impl Calling<'_> {
    /// Runs `look` on the roll of a rank that admits.
    pub(super) fn roll<T>(&self, look: impl FnOnce(&mut Roll) -> T) -> Option<T> {
        match lock(&self.0.call).as_mut() {
            Some(Call::Here(roll)) => Some(look(roll)),
            _ => None,
        }
    }
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        *lock(&self.0.call) = None;
    }
}

impl Door {
    /// Opens a call. A process has one at a time.
    pub(super) fn call(&self, call: Call) -> Calling<'_> {
        *lock(&self.call) = Some(call);
        Calling(self)
    }

    /// Returns the answer to a knock.
    pub(super) fn answer(&self, knock: &Knock) -> Answer {
        match lock(&self.call).as_mut() {
            None => Answer::NotNow,
            Some(Call::Elsewhere(address)) => Answer::Elsewhere(*address),
            Some(Call::Here(roll)) => roll.answer(knock),
        }
    }

    /// Serves one of the sockets.
    pub(super) async fn serve(self: Arc<Self>, listener: TcpListener, rank: u32) {
        let listener = listener.set_nonblocking(true).and_then(|()| tokio::net::TcpListener::from_std(listener));
        let listener = match listener {
            Ok(listener) => listener,
            Err(error) => return tracing::warn!(rank, %error, "no process can join the job that follows this one"),
        };
        let traffic = Arc::new(Traffic::default());
        accept(listener, rank, move |stream| {
            let (door, traffic) = (self.clone(), traffic.clone());
            limited(GREETING, async move {
                let mut link = Link::accept(stream, &door.secret, &traffic).await?;
                let answer = match link.receive().await? {
                    Hello::Knock(knock) => door.answer(&knock),
                    _ => Answer::Unexpected,
                };
                link.send(&answer).await
            })
        })
        .await;
    }
}

/// The door of this process, and the addresses of all doors, by rank.
#[derive(Debug)]
pub(super) struct Doors {
    pub(super) own: Arc<Door>,
    pub(super) all: Vec<SocketAddr>,
}

/// The state of a process before it joins, from which it makes its door.
#[derive(Debug)]
pub(super) enum Kept {
    /// It has no door: the root of the secret, and the socket at which it listens as rank 0 of a first job.
    Nothing(Root, Option<TcpListener>),
    /// Its door.
    Door(Arc<Door>),
}

impl Door {
    /// Makes a door of the socket at which all other ranks find the process, and that of rank 0 of the first job.
    pub(super) fn new(root: Root, listeners: Vec<TcpListener>) -> Self {
        Self { secret: root.secret(), root, listeners, call: Mutex::new(None) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knock(rank: u32, instance: u8) -> Knock {
        Knock { rank, ranks: 4, instance: [instance; 16], plan: None, listens: None }
    }

    /// Returns a roll of ranks 0, which admits, and 1, with 2 and 3, which join.
    fn roll() -> Roll {
        Roll {
            plan: [1; 32],
            ranks: 4,
            joining: vec![2, 3],
            own: 0,
            secret: Root::insecure().secret(),
            rank_0: Some(([127, 0, 0, 1], 1).into()),
            knocked: BTreeMap::new(),
            whole: false,
        }
    }

    /// Makes the last knock of a rank older than the time after which a process counts as gone.
    fn age(roll: &mut Roll, rank: u32) {
        let knocked = &mut roll.knocked.get_mut(&rank).unwrap().1;
        *knocked = knocked.checked_sub(2 * FRESH * longest_pause(4)).unwrap();
    }

    fn pending(missing: &[u32]) -> Answer {
        Answer::Pending { missing: missing.to_vec(), count: missing.len() as u32 }
    }

    #[test]
    fn a_process_that_has_gone_before_all_have_a_place_makes_room_for_another_one() {
        let mut roll = roll();
        assert_eq!(roll.answer(&knock(2, 7)), pending(&[1, 3]));
        assert_eq!(roll.answer(&knock(2, 8)), Answer::Duplicate);
        age(&mut roll, 2);
        assert_eq!(roll.answer(&knock(3, 9)), pending(&[1, 2]));
        assert_eq!(roll.answer(&knock(2, 8)), pending(&[1]));
        // A rank of the running job knocks once, and places are then given for good.
        let old = Knock { plan: Some([1; 32]), ..knock(1, 1) };
        assert!(matches!(roll.answer(&old), Answer::Meet { .. }));
        for rank in [1, 2, 3] {
            age(&mut roll, rank);
        }
        assert!(matches!(roll.answer(&knock(3, 9)), Answer::Meet { .. }));
        assert_eq!(roll.answer(&knock(2, 7)), Answer::Duplicate);
    }

    #[test]
    fn only_ranks_of_the_plan_and_processes_that_it_names_have_a_place() {
        let mut roll = roll();
        let old = |rank, plan| Knock { plan: Some([plan; 32]), ..knock(rank, 1) };
        // Another plan, a rank that was replaced, the rank that admits, and a rank that stays.
        for knock in [old(1, 2), old(2, 1), old(0, 1), old(4, 1), knock(1, 1)] {
            assert_eq!(roll.answer(&knock), Answer::NotNow, "{knock:?}");
        }
        assert_eq!(roll.answer(&Knock { ranks: 5, ..knock(2, 7) }), Answer::Ranks(4));
        assert_eq!(roll.missing(), [1, 2, 3]);
    }

    #[test]
    fn nobody_has_a_place_before_rank_0_listens() {
        let address = ([127, 0, 0, 1], 9).into();
        let mut roll = Roll { own: 1, joining: vec![0, 2, 3], rank_0: None, ..roll() };
        assert_eq!(roll.answer(&knock(2, 7)), pending(&[0, 3]));
        assert_eq!(roll.answer(&knock(3, 7)), pending(&[0]));
        assert_eq!(roll.answer(&knock(0, 7)), Answer::Unexpected);
        let meet = Answer::Meet { secret: Root::insecure().secret(), address };
        assert_eq!(roll.answer(&Knock { listens: Some(address), ..knock(0, 7) }), meet);
        assert_eq!(roll.answer(&knock(2, 7)), meet);
    }
}
