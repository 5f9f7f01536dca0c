// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes the job that follows a running one: of the ranks that remain after losses, or with processes that join.
//!
//! [`door`](crate::door) says how its ranks meet.

use crate::address::listen;
use crate::door::{Call, Roll, longest_pause};
use crate::error::{CHECK, refused, system};
use crate::id::{self, MAX_ADDRESSES, Root, Secret};
use crate::io::{Start, cause_of};
use crate::link::{Link, LinkError, Traffic, connect};
use crate::message::{Answer, Hello, Knock, VERSION};
use crate::tcp::{Origin, check, runtime};
use crate::{BootstrapError, TcpBootstrap, TcpConfig, UniqueId, millis, rt};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout_at};

/// The first pause between knocks.
const PAUSE: Duration = Duration::from_millis(2);

/// The plan of a rank of the running job for the next one.
struct Plan {
    name: [u8; 32],
    /// This rank's number in the running job and in the next one.
    own: (u32, u32),
    /// The same of the first rank that remains. It admits.
    first: (u32, u32),
    /// The number of ranks of the next job, and its ranks that join, in order.
    ranks: u32,
    joining: Vec<u32>,
}

impl TcpBootstrap {
    /// Makes a job of the ranks that remain without `lost`, in the same order; the new ranks count from 0. All
    /// remaining ranks call it with the same ranks, listed in any order. It waits for them, at most `joining`. After
    /// that the old job has no use, and can be dropped.
    ///
    /// A rank of `lost` that is still alive takes no part, because communicators of the new job have windows and keys
    /// of their own.
    ///
    /// ```
    /// use gin_boot::{Bootstrap, Rendezvous, TcpConfig};
    /// use std::time::Duration;
    ///
    /// let config = TcpConfig::default().address(Some([127, 0, 0, 1].into()));
    /// let alone = Rendezvous::new(config)?.join(1)?;
    /// let next = alone.without(&[], Duration::from_secs(60))?;
    /// assert_eq!((next.rank(), next.ranks()), (0, 1));
    /// # Ok::<(), gin_boot::BootstrapError>(())
    /// ```
    ///
    /// # Errors
    /// - [`BootstrapError::NoSuchRank`]: `lost` names an unknown rank.
    /// - [`BootstrapError::Lost`]: `lost` names this rank.
    /// - [`BootstrapError::Timeout`] or [`BootstrapError::Unreachable`]: other ranks do not join, for example because
    ///   they name other ranks or are lost too. The error names them by their new numbers. The caller can try again
    ///   with more ranks.
    pub fn without(&self, lost: &[u32], joining: Duration) -> Result<Self, BootstrapError> {
        let node = &self.inner.node;
        let lost = sorted(lost);
        lost.iter().try_for_each(|&rank| check(rank, node.ranks))?;
        let left: Vec<u32> = (0..node.ranks).filter(|rank| lost.binary_search(rank).is_err()).collect();
        let Ok(rank) = left.binary_search(&node.rank) else { return Err(node.left_out()) };
        let plan = Plan {
            name: self.inner.secret.plan(&lost, &[]),
            own: (node.rank, rank as u32),
            first: (left[0], 0),
            ranks: left.len() as u32,
            joining: Vec::new(),
        };
        self.next(&plan, joining)
    }

    /// Makes a job with processes that join as the ranks `joining`. A number of this job is the place of a lost rank,
    /// which the new process takes. Higher numbers are new ranks: they follow the ranks of this job without a gap. The
    /// ranks of this job keep their numbers.
    ///
    /// All ranks of this job that `joining` does not name call it, at a point of their choosing, with the same numbers
    /// in any order. The new processes call [`join_running`](Self::join_running), before or after that. The call waits
    /// for all of them, at most `within`. This job works until it is dropped.
    ///
    /// A rank of `joining` that is still alive takes no part, as in [`without`](Self::without).
    ///
    /// ```
    /// use gin_boot::{Bootstrap, Rendezvous, TcpBootstrap, TcpConfig};
    /// use std::time::Duration;
    ///
    /// let config = TcpConfig::default().address(Some([127, 0, 0, 1].into()));
    /// let rendezvous = Rendezvous::new(config.clone())?;
    /// let id = rendezvous.id().clone();
    /// let job = rendezvous.join(1)?;
    /// let other = std::thread::spawn(move || TcpBootstrap::join_running(&id, 1, 2, config)?.all_gather(b"new"));
    /// let job = job.grow(&[1], Duration::from_secs(60))?;
    /// assert_eq!(job.all_gather(b"old")?, [&b"old"[..], b"new"]);
    /// assert_eq!(other.join().unwrap()?, [&b"old"[..], b"new"]);
    /// # Ok::<(), gin_boot::BootstrapError>(())
    /// ```
    ///
    /// # Errors
    /// After an error this job is as before, and the caller can try again.
    /// - [`BootstrapError::NoSuchRank`]: the new ranks leave a gap. [`BootstrapError::Ranks`]: they are too many.
    /// - [`BootstrapError::Lost`]: `joining` names this rank.
    /// - [`BootstrapError::Timeout`] names the ranks that did not call, or did not join, in time.
    /// - [`BootstrapError::Unreachable`]: this rank could not reach another one in time.
    pub fn grow(&self, joining: &[u32], within: Duration) -> Result<Self, BootstrapError> {
        let node = &self.inner.node;
        let joining = sorted(joining);
        let more = joining.iter().filter(|&&rank| rank >= node.ranks).count();
        let ranks = node.ranks.saturating_add(more as u32);
        check(node.rank, ranks)?;
        joining.iter().try_for_each(|&rank| check(rank, ranks))?;
        let remains = |rank: &u32| joining.binary_search(rank).is_err();
        if !remains(&node.rank) {
            return Err(node.left_out());
        }
        let first = (0..node.ranks).find(remains).unwrap_or(node.rank);
        let name = self.inner.secret.plan(&[], &joining);
        self.next(&Plan { name, own: (node.rank, node.rank), first: (first, first), ranks, joining }, within)
    }

    /// Joins a running job as one of the ranks that its ranks name in [`grow`](Self::grow). `ranks` is the number of
    /// ranks after that. Waits for that call, at most [`joining`](TcpConfig::joining), and for all ranks.
    ///
    /// The id of the first job serves as long as its rank 0 is still a rank. Any rank returns the [current
    /// id](Self::id).
    ///
    /// # Errors
    /// - [`BootstrapError::NotAdmitted`]: the job runs, and did not call for this rank in time.
    /// - [`BootstrapError::Duplicate`] and [`BootstrapError::RanksDiffer`], at once: another process joins with this
    ///   number, or the call has another number of ranks.
    /// - Otherwise as [`join`](Self::join).
    pub fn join_running(id: &UniqueId, rank: u32, ranks: u32, config: TcpConfig) -> Result<Self, BootstrapError> {
        Self::enter(id.addresses().to_vec(), id.root.clone(), rank, ranks, config)
    }

    /// Does the same with addresses and the root of the secret.
    pub(crate) fn enter(
        addresses: Vec<SocketAddr>,
        root: Root,
        rank: u32,
        ranks: u32,
        config: TcpConfig,
    ) -> Result<Self, BootstrapError> {
        check(rank, ranks)?;
        let instance = id::random().map_err(system("make random numbers"))?;
        let knock = Knock { rank, ranks, instance, plan: None, listens: None };
        let visit = Visit::new(knock, root.secret(), addresses, None, config.clone());
        let (begun, within) = (visit.begun, config.joining);
        let place = apart(visit.enter())?;
        let config = config.joining(within.saturating_sub(begun.elapsed()));
        Self::join_as(rank, ranks, &place.secret, config, place.start, Origin::Running(root))
    }

    /// Returns the id with which processes can [join](Self::join_running) this job while it runs: its
    /// [addresses](Self::addresses), and the secret of the first job. **A process that reads it can join.**
    pub fn id(&self) -> UniqueId {
        UniqueId::new(self.doors.own.root.clone(), self.addresses())
    }

    /// Returns addresses at which processes can [join](Self::join_running) this job while it runs: of the first 16
    /// ranks that are not known to have left or to be lost.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let gone = self.inner.node.gone();
        let alive = (0..).zip(&self.doors.all).filter(|(rank, _)| !gone.contains(rank));
        alive.map(|(_, &address)| address).take(MAX_ADDRESSES).collect()
    }

    /// Returns the ranks that this rank knows to be lost, in order. Ranks that left in an orderly way are not among
    /// them.
    pub fn lost(&self) -> Vec<u32> {
        self.inner.node.lost()
    }

    /// Meets the other ranks of a plan, and joins the next job with them.
    fn next(&self, plan: &Plan, within: Duration) -> Result<Self, BootstrapError> {
        let (inner, door, begun) = (&self.inner, &self.doors.own, Instant::now());
        let address = self.doors.all[plan.first.0 as usize];
        let (_calling, place) = if plan.own == plan.first {
            let secret = Secret::random().map_err(system("make random numbers"))?;
            let listener = (plan.own.1 == 0).then(|| listen((address.ip(), 0).into())).transpose()?;
            let rank_0 = listener.as_ref().map(TcpListener::local_addr).transpose().map_err(system("listen"))?;
            let calling = door.call(Call::Here(Roll {
                plan: plan.name,
                ranks: plan.ranks,
                joining: plan.joining.clone(),
                own: plan.own.1,
                secret: secret.clone(),
                rank_0,
                knocked: BTreeMap::new(),
                whole: plan.ranks == 1,
            }));
            let met = rt::wait_for("the ranks of the next job", || {
                let (whole, rank_0) = calling.roll(|roll| (roll.whole, roll.rank_0))?;
                if !whole && begun.elapsed() < within {
                    return None;
                }
                let missing = || calling.roll(|roll| roll.missing()).unwrap_or_default();
                let late = || BootstrapError::Timeout { missing: missing(), waited_ms: millis(begun.elapsed()) };
                Some(rank_0.filter(|_| whole).ok_or_else(late))
            });
            let rank_0 = met.unwrap_or_else(|| Err(inner.node.unserved()))?;
            (calling, Place { secret, start: start(listener, rank_0) })
        } else {
            let knock = Knock {
                rank: plan.own.1,
                ranks: plan.ranks,
                instance: inner.node.instance,
                plan: Some(plan.name),
                listens: None,
            };
            let config = inner.config.clone().joining(within);
            let visit = Visit::new(knock, door.secret.clone(), vec![address], Some(plan.first.1), config);
            (door.call(Call::Elsewhere(address)), apart(visit.enter())?)
        };
        let config = inner.config.clone().joining(within.saturating_sub(begun.elapsed()));
        Self::join_as(plan.own.1, plan.ranks, &place.secret, config, place.start, Origin::Next(door.clone()))
    }
}

/// Returns ranks in order, each once.
fn sorted(ranks: &[u32]) -> Vec<u32> {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Returns the way in which a rank of the next job begins: rank 0 has a socket.
fn start(listener: Option<TcpListener>, rank_0: SocketAddr) -> Start {
    let connect = || Start::Connect { addresses: vec![rank_0], remedy: CHECK.to_owned() };
    listener.map_or_else(connect, Start::Listen)
}

/// Runs work on a thread, because a thread of a virtual world must wait without blocking it.
fn apart<T: Send + 'static>(
    work: impl Future<Output = Result<T, BootstrapError>> + Send + 'static,
) -> Result<T, BootstrapError> {
    let runtime = runtime().map_err(refused("knock"))?;
    let (to, from) = mpsc::channel();
    let run = move || drop(to.send(runtime.block_on(work)));
    std::thread::Builder::new().name("gin-boot-knock".to_owned()).spawn(run).map_err(refused("knock"))?;
    let ended = || system("knock")("the thread has ended");
    let outcome = rt::wait_for("the ranks of the next job", || match from.try_recv() {
        Ok(outcome) => Some(outcome),
        Err(TryRecvError::Empty) => None,
        Err(TryRecvError::Disconnected) => Some(Err(ended())),
    });
    outcome.unwrap_or_else(|| Err(ended()))
}

/// A place in the next job.
pub(super) struct Place {
    secret: Secret,
    start: Start,
}

/// A process that knocks until it has a place.
pub(super) struct Visit {
    knock: Knock,
    secret: Secret,
    /// Addresses of doors, of which it tries one after another.
    addresses: Vec<SocketAddr>,
    /// The rank that admits, if this process knows it: then it is a rank of the running job.
    first: Option<u32>,
    config: TcpConfig,
    begun: Instant,
    /// The socket at which it listens, if it joins as rank 0.
    listener: Option<TcpListener>,
    /// The ranks for which the rank that admits has waited last.
    pending: Option<Vec<u32>>,
    /// A rank of the job answered when this process last knocked.
    is_running: bool,
}

/// The outcome of one knock.
enum Knocked {
    Place(Secret, SocketAddr),
    Elsewhere(SocketAddr),
    Pending,
    NotNow,
    Failed(LinkError),
    /// The time was over before the answer.
    Late,
}

impl Visit {
    pub(super) fn new(
        knock: Knock,
        secret: Secret,
        addresses: Vec<SocketAddr>,
        first: Option<u32>,
        config: TcpConfig,
    ) -> Self {
        let (begun, listener) = (Instant::now(), None);
        Self { knock, secret, addresses, first, config, begun, listener, pending: None, is_running: false }
    }

    /// Knocks until there is a place, an error that does not pass, or the end of the time.
    pub(super) async fn enter(mut self) -> Result<Place, BootstrapError> {
        let all = self.addresses.clone();
        let (mut pause, mut reported) = (PAUSE, self.begun);
        loop {
            let (mut failed, mut keys, mut is_running) = (Vec::new(), 0, None);
            let at = std::mem::replace(&mut self.addresses, all.clone());
            let mut next: Vec<SocketAddr> = at.into_iter().rev().collect();
            let mut tried = Vec::new();
            while let Some(address) = next.pop() {
                tried.push(address);
                match self.try_enter(address).await? {
                    Knocked::Place(secret, rank_0) => {
                        return Ok(Place { secret, start: start(self.listener, rank_0) });
                    }
                    Knocked::Elsewhere(other) if !tried.contains(&other) => next.push(other),
                    Knocked::Elsewhere(_) | Knocked::NotNow => is_running = Some(true),
                    Knocked::Pending => {
                        // A place lapses if this process does not knock here often, so it tries no other address.
                        self.addresses = vec![address];
                        (next, is_running) = (Vec::new(), Some(true));
                    }
                    Knocked::Failed(error) => {
                        keys += usize::from(matches!(error, LinkError::Key));
                        failed.push(format!("at {address}: {error}{}", cause_of(&error, address)));
                        is_running = is_running.or(Some(false));
                    }
                    Knocked::Late => failed.push(format!("at {address}: no answer within the time to join")),
                }
            }
            // At one of several addresses another job may listen by now.
            if keys == tried.len() {
                return Err(BootstrapError::Secret);
            }
            self.is_running = is_running.unwrap_or(self.is_running);
            if self.begun.elapsed() >= self.config.joining {
                return Err(self.late(&failed.join("; ")));
            }
            if reported.elapsed() >= self.config.progress {
                reported = Instant::now();
                let waited = self.begun.elapsed().as_secs();
                tracing::info!(rank = self.knock.rank, "has knocked for {waited} s: {}", self.late(&failed.join("; ")));
            }
            sleep(pause.min(self.config.joining.saturating_sub(self.begun.elapsed()))).await;
            pause = (pause * 2).min(longest_pause(self.knock.ranks));
        }
    }

    /// Returns the error at the end of the time.
    fn late(&self, failed: &str) -> BootstrapError {
        let (&Knock { rank, ranks, .. }, waited_ms) = (&self.knock, millis(self.begun.elapsed()));
        match (&self.pending, self.first) {
            (Some(missing), _) => BootstrapError::Timeout { missing: missing.clone(), waited_ms },
            (None, _) if !self.is_running => {
                BootstrapError::Unreachable { reason: format!("rank {rank} cannot reach the job {failed}; {CHECK}") }
            }
            (None, Some(first)) => BootstrapError::Timeout { missing: vec![first], waited_ms },
            (None, None) => BootstrapError::NotAdmitted { rank, ranks, waited_ms },
        }
    }

    /// Knocks once.
    ///
    /// # Errors
    /// An error that does not pass.
    async fn try_enter(&mut self, address: SocketAddr) -> Result<Knocked, BootstrapError> {
        let end = self.begun.checked_add(self.config.joining).map(tokio::time::Instant::from_std);
        let answer = match end {
            Some(end) => timeout_at(end, self.ask(address)).await,
            None => Ok(self.ask(address).await),
        };
        let Ok(answer) = answer else { return Ok(Knocked::Late) };
        Ok(match answer {
            Ok(Answer::Meet { secret, address }) => Knocked::Place(secret, address),
            Ok(Answer::Elsewhere(other)) => Knocked::Elsewhere(other),
            Ok(Answer::Pending { missing, .. }) => {
                self.pending = Some(missing);
                Knocked::Pending
            }
            Ok(Answer::Duplicate) => return Err(BootstrapError::Duplicate { rank: self.knock.rank }),
            Ok(Answer::Ranks(theirs)) => return Err(BootstrapError::RanksDiffer { own: self.knock.ranks, theirs }),
            Ok(_) => Knocked::NotNow,
            Err(LinkError::Version(theirs)) => {
                return Err(BootstrapError::Version { own: VERSION.into(), theirs: theirs.into() });
            }
            Err(error) => Knocked::Failed(error),
        })
    }

    async fn ask(&mut self, address: SocketAddr) -> Result<Answer, LinkError> {
        let stream = connect(address).await?;
        if self.first.is_none() && self.knock.rank == 0 && self.listener.is_none() {
            let ip = self.config.address.map_or_else(|| stream.local_addr().map(|own| own.ip()), Ok)?;
            let listener = listen((ip, 0).into()).map_err(std::io::Error::other)?;
            self.knock.listens = Some(listener.local_addr()?);
            self.listener = Some(listener);
        }
        let mut link = Link::connect(stream, &self.secret, &Arc::new(Traffic::default())).await?;
        link.ask(&Hello::Knock(self.knock.clone())).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bootstrap, Rendezvous};
    use std::thread;

    #[test]
    fn a_process_that_dies_after_it_has_a_place_ends_the_call_in_time_and_the_old_job_goes_on() {
        let config = TcpConfig::default().address(Some([127, 0, 0, 1].into()));
        let within = Duration::from_secs(2);
        let rendezvous = Rendezvous::new(config.clone()).unwrap();
        let id = rendezvous.id().clone();
        let second = thread::spawn({
            let (id, config) = (id.clone(), config.clone());
            move || TcpBootstrap::join(&id, 1, 2, config).unwrap()
        });
        let old = [rendezvous.join(2).unwrap(), second.join().unwrap()];
        // It takes the place of a new rank, and of one that all others would join at.
        for (joining, callers) in [(2, &old[..]), (0, &old[1..])] {
            let ranks = 2 + u32::from(joining == 2);
            thread::scope(|scope| {
                let calls: Vec<_> =
                    callers.iter().map(|rank| scope.spawn(move || rank.grow(&[joining], within))).collect();
                let knock = Knock { rank: joining, ranks, instance: [7; 16], plan: None, listens: None };
                let addresses = old[1].addresses();
                let visit = Visit::new(knock, id.root.secret(), addresses, None, config.clone().joining(within));
                drop(apart(visit.enter()).unwrap());
                for call in calls {
                    let begun = Instant::now();
                    let error = call.join().unwrap().unwrap_err();
                    let named = match (joining, &error) {
                        (2, BootstrapError::Timeout { missing, .. }) => missing == &[2],
                        (0, BootstrapError::Unreachable { .. }) => true,
                        _ => false,
                    };
                    assert!(named && begun.elapsed() < 5 * within, "{error}");
                }
            });
            thread::scope(|scope| {
                let barrier = scope.spawn(|| old[0].barrier());
                assert_eq!((old[1].barrier(), barrier.join().unwrap()), (Ok(()), Ok(())));
            });
        }
    }
}
