// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that are processes.

use crate::address::{default_address, listen};
use crate::beat;
use crate::board::Board;
use crate::collective::{Gathered, MAX_BYTES};
use crate::door::{DOORS, Door, Doors, Kept};
use crate::error::{CHECK, refused, show_wait, system};
use crate::id::{self, Root, Secret, UniqueId};
use crate::io::{LINGERING, Start, run};
use crate::message::CollectiveId;
use crate::node::{JOINING, Node};
use crate::{Bootstrap, BootstrapError, Channel, JOB, host_name, millis, rt, wire};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

crate::config! {
    /// How a rank joins a job, and how it notices that other ranks are lost.
    ///
    /// ```
    /// use gin_boot::TcpConfig;
    /// use std::time::Duration;
    ///
    /// let config = TcpConfig::default().joining(Duration::from_secs(60));
    /// assert_eq!((config.joining.as_secs(), config.silence.as_secs()), (60, 10));
    /// ```
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct TcpConfig {
        /// The address at which this rank listens. By default rank 0 takes the address of the default route (IPv4
        /// before IPv6, the loopback without either). Other ranks take the address from which they reach rank 0.
        pub address: Option<IpAddr> = None,
        /// The time that all ranks have to join; 5 minutes by default.
        pub joining: Duration = Duration::from_secs(300),
        /// The time for which a collective waits for ranks that are alive; for ever by default.
        pub collective_timeout: Option<Duration> = None,
        /// The time after which a rank that sends nothing is lost; 10 s by default, at least 100 ms. Each rank sends
        /// something four times in this time. Time in which this rank itself did not run does not count. A rank of this
        /// host that waits for a CPU is not lost.
        pub silence: Duration = Duration::from_secs(10),
        /// The time after which, and then the interval at which, a rank that waits reports the missing ranks
        /// (`tracing`, level info); 5 s by default, at least 100 ms.
        pub progress: Duration = Duration::from_secs(5),
    }
}

/// The shortest time after which a rank is silent or reports.
const SHORTEST: Duration = Duration::from_millis(100);

/// The longest time after which a rank that waits in a collective tells the others that it waits.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the end of a collective waits for neighbours that receive slowly.
const FLUSH: Duration = Duration::from_secs(1);

/// Refuses numbers that no job has.
pub(crate) fn check(rank: u32, ranks: u32) -> Result<(), BootstrapError> {
    let limit = gin_abi::MAX_RANKS;
    match ranks {
        _ if ranks == 0 || ranks > limit => Err(BootstrapError::Ranks { ranks, limit }),
        _ if rank >= ranks => Err(BootstrapError::NoSuchRank { rank, ranks }),
        _ => Ok(()),
    }
}

/// Refuses more bytes than a rank may give to one collective.
pub(crate) fn check_length(bytes: usize) -> Result<(), BootstrapError> {
    let (bytes, limit) = (bytes as u64, MAX_BYTES as u64);
    if bytes > limit { Err(BootstrapError::TooLong { bytes, limit }) } else { Ok(()) }
}

/// Makes the runtime of one thread, which serves connections.
pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Rank 0 before it has joined: it listens.
///
/// The example of the [crate](crate) uses it.
#[derive(Debug)]
pub struct Rendezvous {
    pub(crate) listener: TcpListener,
    id: UniqueId,
    config: TcpConfig,
}

impl Rendezvous {
    /// Listens at a free port. Other ranks can connect from now on; they wait until this rank [joins](Self::join).
    ///
    /// # Errors
    /// [`BootstrapError::System`] if this machine does not have the address, or the system gives no socket or no random
    /// numbers.
    pub fn new(config: TcpConfig) -> Result<Self, BootstrapError> {
        let listener = listen((config.address.unwrap_or_else(default_address), 0).into())?;
        let address = listener.local_addr().map_err(system("listen"))?;
        let id = UniqueId::random(vec![address]).map_err(system("make a secret"))?;
        Ok(Self { listener, id, config })
    }

    /// Returns the id with which the other ranks join.
    pub fn id(&self) -> &UniqueId {
        &self.id
    }

    /// Joins as rank 0 of `ranks`. Waits for all ranks.
    ///
    /// # Errors
    /// As [`TcpBootstrap::join`].
    pub fn join(self, ranks: u32) -> Result<TcpBootstrap, BootstrapError> {
        let (start, root) = (Start::Listen(self.listener), self.id.root);
        TcpBootstrap::join_as(0, ranks, &root.secret(), self.config, start, Origin::First(root, None))
    }
}

/// The socket, for a program that starts rank 0 as a child process. The program leaves the socket open in that process
/// and sets `GIN_LISTEN_FD` to its number, beside the id in `GIN_UNIQUE_ID`; [`Job`](crate::Job) takes it from there.
impl AsFd for Rendezvous {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// A rank that is a process; the ranks of the job are on one host or many.
///
/// It has two threads. One sends heartbeats and receives those of its neighbours; the other handles messages.
///
/// The rank leaves in an orderly way when this value and all its channels are dropped. The drop waits a few seconds at
/// most, until the neighbours have received what was sent.
#[derive(Debug)]
pub struct TcpBootstrap {
    pub(crate) inner: Arc<Inner>,
    /// The number of the next collective.
    next: AtomicU64,
    /// The systems of the ranks, by rank.
    systems: Vec<System>,
    /// The numbers that a launcher gave the ranks among those of their host, by rank, where all ranks are on one host.
    given: Vec<Option<u32>>,
    pub(crate) doors: Doors,
}

/// The state that the bootstrap and its channels share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) node: Arc<Node>,
    pub(crate) secret: Secret,
    pub(crate) config: TcpConfig,
    /// The runtime that serves connections.
    pub(crate) handle: Handle,
    /// Disconnected when the thread has ended.
    ended: Mutex<mpsc::Receiver<()>>,
}

/// How a process comes to join a job.
#[derive(Debug)]
pub(crate) enum Origin {
    /// It starts with the job. The root of the job's secret, and the number that the launcher gave this rank among all
    /// ranks of its host, if all are on one host.
    First(Root, Option<u32>),
    /// It joins a running job, whose first job had a secret of this root.
    Running(Root),
    /// It was a rank of the job before, and has this door.
    Next(Arc<Door>),
}

impl Origin {
    /// Returns the launcher's number, and what the process has for its door.
    fn parts(self, start: &Start) -> Result<(Option<u32>, Kept), BootstrapError> {
        Ok(match (self, start) {
            (Self::First(root, local_rank), Start::Listen(listener)) => {
                let first = listener.try_clone().map_err(system("listen"))?;
                (local_rank, Kept::Nothing(root, Some(first)))
            }
            (Self::First(root, local_rank), Start::Connect { .. }) => (local_rank, Kept::Nothing(root, None)),
            (Self::Running(root), _) => (None, Kept::Nothing(root, None)),
            (Self::Next(door), _) => (None, Kept::Door(door)),
        })
    }
}

impl TcpBootstrap {
    /// Joins the job with this id as one rank of `ranks`, but not as rank 0, which [listens](Rendezvous::join). Waits
    /// for all ranks.
    ///
    /// # Errors
    /// - [`BootstrapError::Timeout`] names the ranks that did not join.
    /// - [`BootstrapError::Unreachable`]: this rank could not reach rank 0, or a neighbour, in time.
    /// - [`BootstrapError::Secret`], [`BootstrapError::Version`], [`BootstrapError::RanksDiffer`] and
    ///   [`BootstrapError::Duplicate`], at once: the other ranks refuse this rank.
    /// - [`BootstrapError::Ranks`] and [`BootstrapError::NoSuchRank`]: numbers that no job has.
    pub fn join(id: &UniqueId, rank: u32, ranks: u32, config: TcpConfig) -> Result<Self, BootstrapError> {
        if rank == 0 {
            return Err(BootstrapError::Duplicate { rank });
        }
        let start = Start::Connect { addresses: id.addresses().to_vec(), remedy: CHECK.to_owned() };
        Self::join_as(rank, ranks, &id.root.secret(), config, start, Origin::First(id.root.clone(), None))
    }

    /// Starts the threads of a rank and waits for all ranks.
    pub(crate) fn join_as(
        rank: u32,
        ranks: u32,
        secret: &Secret,
        mut config: TcpConfig,
        start: Start,
        origin: Origin,
    ) -> Result<Self, BootstrapError> {
        check(rank, ranks)?;
        (config.silence, config.progress) = (config.silence.max(SHORTEST), config.progress.max(SHORTEST));
        let (local_rank, kept) = origin.parts(&start)?;
        let instance = id::random().map_err(system("make random numbers"))?;
        let (node, connects) = Node::new(rank, ranks, instance);
        let (beats, beating) = beat::start(rank).map_err(refused("send heartbeats"))?;
        let run = run(node.clone(), connects, secret.clone(), config.clone(), start, beats);
        let runtime = runtime().map_err(refused("serve connections"))?;
        let (end, ended) = mpsc::channel();
        let (served, handle) = (node.clone(), runtime.handle().clone());
        let serve = move || {
            // Dropped when the thread ends, also by a panic.
            let _ended = Ended(served, end);
            let _beating = beating;
            runtime.block_on(run);
        };
        let thread = std::thread::Builder::new().name(format!("gin-boot-{rank}")).spawn(serve);
        thread.map_err(refused("serve connections"))?;
        let inner = Inner { node, secret: secret.clone(), config, handle, ended: ended.into() };
        inner.join(Instant::now(), local_rank, kept)
    }

    /// Runs the next collective of the job.
    fn gather(&self, bytes: &[u8]) -> Result<Gathered, BootstrapError> {
        let id = CollectiveId { channel: JOB, number: self.next.fetch_add(1, Ordering::Relaxed) };
        self.inner.gather(id, bytes, || false)
    }

    /// Returns the name that the host of each rank has in its system, by rank.
    pub fn hosts(&self) -> &[String] {
        self.inner.node.hosts.get().map_or(&[], Vec::as_slice)
    }

    /// Returns the bytes that this rank has sent and has received for collectives and reports of faults.
    pub fn traffic(&self) -> (u64, u64) {
        self.inner.node.traffic.bytes()
    }

    /// Returns this rank's number among the ranks of its host, in the order of ranks.
    pub fn local_rank(&self) -> u32 {
        self.beside(self.inner.node.rank as usize)
    }

    /// Returns the number of ranks of this rank's host.
    pub fn local_ranks(&self) -> u32 {
        self.beside(self.systems.len())
    }

    /// Returns the first two ranks to which a launcher gave one number, and the number.
    pub(crate) fn same_local_rank(&self) -> Option<(usize, usize, u32)> {
        let mut all = self.given.iter().enumerate();
        all.find_map(|(second, number)| {
            let number = (*number)?;
            let first = self.given[..second].iter().position(|other| *other == Some(number))?;
            Some((first, second, number))
        })
    }

    /// Returns how many of the first `count` ranks are on this rank's host.
    fn beside(&self, count: usize) -> u32 {
        let own = &self.systems[self.inner.node.rank as usize];
        self.systems[..count].iter().filter(|system| *system == own).count() as u32
    }
}

/// Wakes threads that wait for the end of the rank's thread, when it is dropped.
struct Ended(Arc<Node>, #[expect(dead_code, reason = "dropping it wakes the other end")] mpsc::Sender<()>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.fail(system("serve connections")("the thread has ended"));
    }
}

/// The properties that ranks of one host share. Ranks in different network namespaces are on different hosts.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct System {
    name: String,
    /// The identifier of this boot; empty where `/proc` does not show it.
    boot: String,
    /// The network namespace; 0 where `/proc` does not show it.
    network: u64,
}

impl System {
    /// Returns this process's system.
    fn this() -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let network = std::fs::metadata("/proc/self/ns/net").map_or(0, |file| file.ino());
        Self { name: host_name(), boot: boot.trim().to_owned(), network }
    }

    /// Returns the distinct names of systems. Its time grows with the ranks and the square of the hosts.
    fn names(all: &[Self]) -> Vec<String> {
        let mut names: HashMap<&Self, String> = HashMap::new();
        let mut hosts: Vec<Self> = Vec::new();
        for system in all {
            if names.insert(system, String::new()).is_none() {
                hosts.push(system.clone());
            }
        }
        for (system, name) in &mut names {
            *name = system.distinct_name(&hosts);
        }
        all.iter().map(|system| names[system].clone()).collect()
    }

    /// Returns the name of the host, with what distinguishes it from another one of the same name among `all`.
    fn distinct_name(&self, all: &[Self]) -> String {
        let Self { name, boot, network } = self;
        let mut same = all.iter().filter(|other| other.name == *name);
        match same.find(|other| *other != self) {
            None => name.clone(),
            Some(_) if boot.is_empty() || all.iter().all(|other| other.name != *name || other.boot == *boot) => {
                format!("{name} (network namespace {network})")
            }
            Some(_) => format!("{name} (boot {boot}, network namespace {network})"),
        }
    }
}

/// Returns the bytes by which this rank describes its host when it joins.
pub(crate) fn describe(local_rank: Option<u32>) -> Vec<u8> {
    wire::encode(&(System::this(), local_rank))
}

impl Inner {
    /// Waits for the other ranks.
    fn join(self, begun: Instant, local_rank: Option<u32>, kept: Kept) -> Result<TcpBootstrap, BootstrapError> {
        let node = &self.node;
        node.give(JOINING, &describe(local_rank));
        // The tasks keep the time. This limit is for the case that they do not.
        let limit = self.config.joining.saturating_add(Duration::from_secs(20));
        let outcome = rt::wait_for("the other ranks, which join the job", || {
            self.announce(JOINING, begun, Some(self.config.joining));
            if begun.elapsed() > limit {
                node.give_up_joining(limit);
            }
            node.result(JOINING)
        });
        let given = outcome.unwrap_or_else(|| Err(node.unserved())).map_err(|error| match error {
            BootstrapError::Timeout { missing, .. } => {
                BootstrapError::Timeout { missing, waited_ms: millis(begun.elapsed()) }
            }
            error => error,
        })?;
        node.joined.store(true, Ordering::Release);
        let read = |(rank, bytes): (usize, &Vec<u8>)| {
            let unread = || system("join")(format!("rank {rank} does not describe its host"));
            wire::decode::<(System, Option<u32>)>(bytes).ok_or_else(unread)
        };
        let given: Vec<_> = given.parts().iter().enumerate().map(read).collect::<Result<_, _>>()?;
        let (systems, given): (Vec<System>, _) = given.into_iter().unzip();
        let _ = node.hosts.set(System::names(&systems));
        let doors = self.open_doors(kept)?;
        Ok(TcpBootstrap { inner: Arc::new(self), next: AtomicU64::new(0), systems, given, doors })
    }

    /// Opens the door of this process, unless it has one, and exchanges its address with the other ranks.
    fn open_doors(&self, kept: Kept) -> Result<Doors, BootstrapError> {
        let (own, served) = match kept {
            // The socket of rank 0 is served by the first job as long as that lasts.
            Kept::Nothing(root, first) => (Arc::new(self.new_door(root, first)?), 1),
            Kept::Door(door) => (door, usize::MAX),
        };
        for listener in own.listeners.iter().take(served) {
            let listener = listener.try_clone().map_err(system("listen"))?;
            self.handle.spawn(own.clone().serve(listener, self.node.rank));
        }
        let _ = self.node.door.set(own.clone());
        let address = own.listeners[0].local_addr().map_err(system("listen"))?;
        let texts = self.gather(DOORS, address.to_string().as_bytes(), || false)?.parts();
        let read = |(rank, text): (usize, &Vec<u8>)| {
            let address = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
            address.ok_or_else(|| system("exchange addresses")(format!("rank {rank} listens at no address")))
        };
        Ok(Doors { all: texts.iter().enumerate().map(read).collect::<Result<_, _>>()?, own })
    }

    fn new_door(&self, root: Root, first: Option<TcpListener>) -> Result<Door, BootstrapError> {
        let node = &self.node;
        // A rank without neighbours may arrive here before its thread has set the address.
        rt::wait_until_named("its own address", || node.ip.get().is_some() || node.failed().is_some());
        let unknown = || node.failed().unwrap_or_else(|| system("listen")("this rank has no address"));
        let ip = *node.ip.get().ok_or_else(unknown)?;
        Ok(Door::new(root, std::iter::once(listen((ip, 0).into())?).chain(first).collect()))
    }

    pub(crate) fn gather(
        &self,
        id: CollectiveId,
        bytes: &[u8],
        ended: impl Fn() -> bool,
    ) -> Result<Gathered, BootstrapError> {
        check_length(bytes.len())?;
        self.node.give(id, bytes);
        let begun = Instant::now();
        let mut reported = begun;
        let outcome = rt::wait_for("the other ranks, in a collective call", || {
            self.announce(id, begun, self.config.collective_timeout);
            // The end of a communicator says more than the departure of a rank after it.
            let outcome = match self.node.result(id) {
                Some(Ok(all)) => Some(Ok(all)),
                other if ended() => {
                    if other.is_none() {
                        self.node.give_up(id, begun.elapsed());
                    }
                    Some(Err(BootstrapError::Ended))
                }
                None if self.config.collective_timeout.is_some_and(|limit| begun.elapsed() >= limit) => {
                    Some(Err(self.node.give_up(id, begun.elapsed())))
                }
                other => other,
            };
            if outcome.is_none() && reported.elapsed() >= self.config.progress {
                reported = Instant::now();
                let missing = self.node.missing(id);
                let wait = show_wait(self.node.rank, self.node.ranks, begun.elapsed(), &missing, missing.len());
                tracing::info!("in a collective call, {wait}");
            }
            outcome
        });
        if matches!(outcome, Some(Ok(_))) {
            self.flush();
        }
        outcome.unwrap_or_else(|| Err(self.node.unserved()))
    }

    /// Tells the other ranks that this rank waits in a collective, after a while: well before a report or an error of
    /// this rank or another one names the missing ranks.
    fn announce(&self, id: CollectiveId, begun: Instant, limit: Option<Duration>) {
        let first = limit.map_or(self.config.progress, |limit| limit.min(self.config.progress));
        if begun.elapsed() >= PATIENCE.min(first / 2) {
            self.node.announce(id);
        }
    }

    /// Waits until the system has taken all bytes that other ranks need from this rank. So a process that ends right
    /// after its last collective does not break it for other ranks. Does not wait for a neighbour that takes nothing.
    fn flush(&self) {
        let (queued, begun) = (self.node.queued(), Instant::now());
        rt::wait_until_named("messages to leave", || self.node.has_sent(&queued) || begun.elapsed() > FLUSH);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let joined = self.node.joined.load(Ordering::Acquire);
        self.node.leaving.store(true, Ordering::Release);
        self.node.posted.notify_one();
        // A rank that never joined has sent nothing that another rank needs. While a panic unwinds, this waits for no
        // rank.
        if joined && !std::thread::panicking() {
            let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
            let _ = ended.recv_timeout(LINGERING + Duration::from_secs(1));
        }
    }
}

impl Bootstrap for TcpBootstrap {
    fn lost(&self) -> Vec<u32> {
        self.lost()
    }

    fn without(&self, lost: &[u32], joining: Duration) -> Result<Arc<dyn Bootstrap>, BootstrapError> {
        Ok(Arc::new(self.without(lost, joining)?))
    }

    fn grow(&self, joining: &[u32], within: Duration) -> Result<Arc<dyn Bootstrap>, BootstrapError> {
        Ok(Arc::new(self.grow(joining, within)?))
    }

    fn id(&self) -> Option<UniqueId> {
        Some(self.id())
    }

    fn is_across_processes(&self) -> bool {
        true
    }

    fn host(&self, rank: u32) -> String {
        self.inner.node.host(rank)
    }

    fn rank(&self) -> u32 {
        self.inner.node.rank
    }

    fn ranks(&self) -> u32 {
        self.inner.node.ranks
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.gather(bytes).map(|all| all.parts())
    }

    fn barrier(&self) -> Result<(), BootstrapError> {
        self.gather(&[]).map(drop)
    }

    fn channel(&self, communicator: u64) -> Arc<dyn Channel> {
        let board = self.inner.node.open(communicator);
        Arc::new(TcpChannel { inner: self.inner.clone(), channel: communicator, next: AtomicU64::new(0), board })
    }

    fn abort(&self) {
        self.inner.node.abort();
    }
}

#[derive(Debug)]
struct TcpChannel {
    inner: Arc<Inner>,
    channel: u64,
    /// The number of the next collective.
    next: AtomicU64,
    board: Arc<Board>,
}

impl Channel for TcpChannel {
    fn board(&self) -> &Arc<Board> {
        &self.board
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let id = CollectiveId { channel: self.channel, number: self.next.fetch_add(1, Ordering::Relaxed) };
        self.inner.gather(id, bytes, || self.board.count() != 0).map(|all| all.parts())
    }
}

impl Drop for TcpChannel {
    fn drop(&mut self) {
        self.inner.node.close(self.channel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_namespaces_and_boots_with_one_host_name_are_different_hosts() {
        let system = |name: &str, boot: &str, network| System { name: name.into(), boot: boot.into(), network };
        let names = System::names;
        let here = System::this();
        assert_ne!(here.network, 0);
        assert_eq!(names(&[here.clone(), here.clone()]), [host_name(), host_name()]);
        assert_eq!(
            names(&[system("a", "x", 1), system("a", "x", 2), system("b", "x", 3)]),
            ["a (network namespace 1)", "a (network namespace 2)", "b"]
        );
        assert_eq!(
            names(&[system("a", "x", 1), system("a", "y", 1)]),
            ["a (boot x, network namespace 1)", "a (boot y, network namespace 1)"]
        );
    }

    #[test]
    fn a_rank_whose_messages_wait_to_be_handled_is_not_lost() {
        let silence = Duration::from_millis(500);
        let config = TcpConfig::default().address(Some([127, 0, 0, 1].into())).silence(silence);
        let first = Rendezvous::new(config.clone()).unwrap();
        let id = first.id().clone();
        let second = std::thread::spawn(move || TcpBootstrap::join(&id, 1, 2, config).unwrap());
        let (first, second) = (first.join(2).unwrap(), second.join().unwrap());
        std::thread::scope(|scope| {
            let held = second.inner.node.state();
            // Its message waits at the second rank.
            let barrier = scope.spawn(|| first.barrier());
            std::thread::sleep(4 * silence);
            drop(held);
            second.barrier().unwrap();
            barrier.join().unwrap().unwrap();
        });
        assert_eq!((first.lost(), second.lost()), (vec![], vec![]));
    }
}
