// SPDX-License-Identifier: MIT OR Apache-2.0
//! How processes meet: over TCP, with a secret.
//!
//! One rank listens ([`Rendezvous`]) and hands out its [`UniqueId`]; the others join with it ([`TcpBootstrap::join`]):
//!
//! ```
//! use gin_boot::{Rendezvous, TcpBootstrap, TcpConfig};
//! use gin_boot::Bootstrap;
//!
//! let config = TcpConfig { address: Some([127, 0, 0, 1].into()), ..TcpConfig::default() };
//! let rendezvous = Rendezvous::new(config.clone())?;
//! let id = rendezvous.id().to_string(); // for the other processes, by a way that nobody else reads
//!
//! let other = std::thread::spawn(move || {
//!     let rank = TcpBootstrap::join(&id.parse().unwrap(), 1, 2, config)?;
//!     rank.all_gather(b"one")
//! });
//! let rank = rendezvous.join(2)?;
//! assert_eq!(rank.all_gather(b"zero")?, [&b"zero"[..], b"one"]);
//! assert_eq!(other.join().unwrap()?, [&b"zero"[..], b"one"]);
//! # Ok::<(), gin_boot::BootstrapError>(())
//! ```
//!
//! # What goes where
//!
//! Ranks are the nodes of a binary tree; each has at most three connections, on which both sides proved that they know
//! the secret (Noise, `NNpsk0_25519_ChaChaPoly_BLAKE2s`) and everything is encrypted. The bytes that a rank gives to a
//! collective operation go along each edge once. So n ranks that give b bytes each put n·b bytes on each edge, and rank
//! 0 has no more to do than others. To join, each rank speaks with rank 0 for a moment (about 300 bytes).
//!
//! # Ends of a collective operation
//!
//! | event | collective operations end with | boards of communicators get |
//! | --- | --- | --- |
//! | [`abort`](crate::Bootstrap::abort) of a rank | `Aborted`, on all ranks | nothing |
//! | a rank's last handle is dropped | `Lost`, if it did not come to the collective operation | nothing |
//! | a process ends, or its connection breaks | `Lost`, if it or a rank behind it did not come | [`PeerLost`](gin_abi::FaultKind::PeerLost) with the rank as peer |
//! | nothing is heard of a rank for [`silence`](TcpConfig::silence) | the same | the same |
//!
//! Faults that a rank posts on its [`Board`] are on the boards of all ranks a few milliseconds later.
//!
//! A rank that does not know the secret costs the others nothing but the time of a refusal: at most 128 such
//! connections are open at a time, each for at most 5 s, and they make room for others after 1 s.

/// Defines methods that set a field each, for configurations that may get more fields.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    ($($(#[$attribute:meta])* $name:ident: $type:ty,)*) => {
        $($(#[$attribute])*
        #[doc = concat!("Sets the field `", stringify!($name), "`.")]
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name;
            self
        })*
    };
}

mod beat;
pub mod board;
mod bootstrap;
mod id;
mod io;
mod job;
mod link;
mod message;
mod node;
pub mod rt;
mod shrink;
mod simulate;
mod slurm;
mod tree;
#[doc(hidden)]
pub mod wire;

#[doc(hidden)]
pub use bootstrap::on_host;
pub use bootstrap::{Bootstrap, BootstrapError, Channel, InProcess, LossCause};
pub use id::{IdError, MIN_SECRET, Secret, UniqueId};
pub use job::{Job, JobError, Launcher};
pub use simulate::{Simulated, Step, simulate};

use beat::BeatThread;
use board::Board;
use io::{LINGERING, Start, Wishes};
use message::Round;
use node::{MAX_BYTES, Node};
use shrink::Spares;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The job's own channel; communicators count from 1.
const JOB: u64 = 0;

/// The collective operation after which all ranks are there.
const JOINING: Round = Round { channel: u64::MAX, number: 0 };

/// How a rank joins a job, and how it knows that others are gone.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TcpConfig {
    /// The address that this rank listens at. By default rank 0 takes that of the default route (IPv4 before IPv6, the
    /// loopback without either), other ranks the one from which they reach rank 0.
    pub address: Option<IpAddr>,
    /// How long all ranks may take to come; 5 minutes by default.
    pub joining: Duration,
    /// How long a collective operation waits for ranks that are alive; for ever by default.
    pub collective_timeout: Option<Duration>,
    /// A rank of which nothing was heard for so long is lost; 10 s by default, at least 100 ms. Each says something
    /// four times as often. Time in which this rank did not run itself does not count, and a rank of this host that
    /// waits for a processor is not lost.
    pub silence: Duration,
    /// After how long, and then how often, a rank that waits for others reports the missing ones (`tracing`, level
    /// info); 5 s by default, at least 100 ms.
    pub progress: Duration,
}

impl TcpConfig {
    setters! {
        address: Option<IpAddr>,
        joining: Duration,
        collective_timeout: Option<Duration>,
        silence: Duration,
        progress: Duration,
    }
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            address: None,
            joining: Duration::from_secs(300),
            collective_timeout: None,
            silence: Duration::from_secs(10),
            progress: Duration::from_secs(5),
        }
    }
}

/// Shortest time after which somebody is called silent.
const SHORTEST: Duration = Duration::from_millis(100);

/// How long the end of a collective operation waits for neighbours that are slow to receive.
const FLUSH: Duration = Duration::from_secs(1);

/// Returns the error of a system call.
fn system(what: &'static str, error: impl ToString) -> BootstrapError {
    BootstrapError::System { what, reason: error.to_string() }
}

/// The address from which this machine would reach others. No packet is sent.
fn default_address() -> IpAddr {
    let route = |bind: IpAddr, to: IpAddr| {
        let socket = UdpSocket::bind((bind, 0)).ok()?;
        // Addresses for documentation: nobody has them, and they are reached by the default route.
        socket.connect((to, 9)).ok()?;
        socket.local_addr().ok().map(|own| own.ip()).filter(|ip| !ip.is_unspecified())
    };
    route(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into())
        .or_else(|| route(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()))
        .unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// Refuses numbers that no job has.
fn check(rank: u32, ranks: u32) -> Result<(), BootstrapError> {
    let limit = gin_abi::MAX_RANKS;
    if ranks == 0 || ranks > limit {
        return Err(BootstrapError::Ranks { ranks, limit });
    }
    if rank >= ranks {
        return Err(BootstrapError::NoSuchRank { rank, ranks });
    }
    Ok(())
}

/// Rank 0 before it has joined: it listens.
#[derive(Debug)]
pub struct Rendezvous {
    listener: TcpListener,
    id: UniqueId,
    config: TcpConfig,
}

impl Rendezvous {
    /// Listens at a free port. Others can come from now on; they wait until this rank [joins](Self::join).
    ///
    /// # Errors
    /// [`BootstrapError::System`] if the address is none of this machine, or the system gives no socket or no random
    /// numbers.
    pub fn new(config: TcpConfig) -> Result<Self, BootstrapError> {
        let ip = config.address.unwrap_or_else(default_address);
        let listener = listen((ip, 0).into())?;
        let address = listener.local_addr().map_err(|error| system("listen", error))?;
        let id = UniqueId::random(vec![address]).map_err(|error| system("make a secret", error))?;
        Ok(Self { listener, id, config })
    }

    /// Returns the id that the other ranks join with.
    pub fn id(&self) -> &UniqueId {
        &self.id
    }

    /// Joins as rank 0 of `ranks`. Waits for all ranks.
    ///
    /// # Errors
    /// As [`TcpBootstrap::join`].
    pub fn join(self, ranks: u32) -> Result<TcpBootstrap, BootstrapError> {
        TcpBootstrap::begin(0, ranks, &self.id.secret(), self.config, Start::Listen(self.listener))?.wait()
    }
}

/// The socket, for programs that start rank 0 as a process of its own: left open in that process, and named by its
/// number in `GIN_LISTEN_FD` beside the id in `GIN_UNIQUE_ID`, it serves [`Job`].
impl AsFd for Rendezvous {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Listens, with room for many that come at once.
fn listen(address: SocketAddr) -> Result<TcpListener, BootstrapError> {
    let listener = TcpListener::bind(address)
        .map_err(|error| BootstrapError::System { what: "listen", reason: format!("{address}: {error}") })?;
    rustix::net::listen(&listener, 4096).map_err(|error| system("listen", error))?;
    Ok(listener)
}

/// Ranks that are processes, on one host or many.
///
/// It has two threads of its own: one sends heartbeats and listens for those of others, one deals with messages. The
/// job's end is orderly for a rank when this value and all channels of it are dropped; that waits for the neighbours to
/// have taken what was sent, at most a few seconds.
#[derive(Debug)]
pub struct TcpBootstrap {
    inner: Arc<Inner>,
    rounds: AtomicU64,
    hosts: Vec<String>,
    /// The names that tell hosts apart, by rank: see [`this_system`].
    systems: Vec<String>,
    spares: Spares,
}

/// The state that the bootstrap and its channels share.
#[derive(Debug)]
struct Inner {
    node: Arc<Node>,
    secret: Secret,
    config: TcpConfig,
    wishes: Wishes,
    /// Hears when the thread has ended.
    ended: std::sync::Mutex<mpsc::Receiver<()>>,
}

impl TcpBootstrap {
    /// Joins the job with this id as one rank of `ranks` that is not rank 0, which [listens](Rendezvous::join). Waits
    /// for all ranks.
    ///
    /// # Errors
    /// [`BootstrapError::Timeout`] names the ranks that did not come; [`BootstrapError::Unreachable`] if rank 0, or a
    /// neighbour, was not to be reached in time; [`BootstrapError::Secret`], [`BootstrapError::Version`],
    /// [`BootstrapError::RanksDiffer`] and [`BootstrapError::Duplicate`] at once, if the others refuse this rank;
    /// [`BootstrapError::Ranks`] and [`BootstrapError::NoSuchRank`] for numbers that no job has.
    pub fn join(id: &UniqueId, rank: u32, ranks: u32, config: TcpConfig) -> Result<Self, BootstrapError> {
        if rank == 0 {
            return Err(BootstrapError::Duplicate { rank });
        }
        Self::begin(rank, ranks, &id.secret(), config, Start::Connect(id.addresses().to_vec()))?.wait()
    }

    /// Starts the threads that do it.
    fn begin(
        rank: u32,
        ranks: u32,
        secret: &Secret,
        config: TcpConfig,
        start: Start,
    ) -> Result<Joining, BootstrapError> {
        check(rank, ranks)?;
        let (silence, progress) = (config.silence.max(SHORTEST), config.progress.max(SHORTEST));
        let config = TcpConfig { silence, progress, ..config };
        let instance = id::random().map_err(|error| system("make random numbers", error))?;
        let (node, connects) = Node::new(rank, ranks, instance);
        let wishes = Wishes::default();
        let beats = BeatThread::start(rank).map_err(|error| system("send heartbeats", error))?;
        let (key, to) = (secret.key().clone(), beats.beats.clone());
        let run = io::run(node.clone(), connects, key, config.clone(), start, wishes.clone(), to);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| system("serve connections", error))?;
        let (end, ended) = mpsc::channel();
        let served = node.clone();
        std::thread::Builder::new()
            .name(format!("gin-boot-{rank}"))
            .spawn(move || {
                // Dropped when the thread ends, however it does.
                let _ended = Ended(served, end);
                let _beats = beats;
                runtime.block_on(run);
            })
            .map_err(|error| system("serve connections", error))?;
        Ok(Joining {
            inner: Arc::new(Inner { node, secret: secret.clone(), config, wishes, ended: ended.into() }),
            begun: Instant::now(),
        })
    }

    /// Name of the host of each rank, by rank, as its system has it.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Bytes that this rank has sent, and that it has received, to meet and to tell others of faults.
    pub fn traffic(&self) -> (u64, u64) {
        self.inner.node.traffic.bytes()
    }

    /// This rank's number among the ranks of its host, in the order of ranks.
    pub fn local_rank(&self) -> u32 {
        let rank = self.inner.node.rank as usize;
        self.systems[..rank].iter().filter(|system| **system == self.systems[rank]).count() as u32
    }

    /// How many ranks its host has.
    pub fn local_ranks(&self) -> u32 {
        let own = &self.systems[self.inner.node.rank as usize];
        self.systems.iter().filter(|system| *system == own).count() as u32
    }
}

/// Wakes threads that wait for the thread's end, when it is dropped.
struct Ended(Arc<Node>, #[expect(dead_code, reason = "dropping it wakes the other end")] mpsc::Sender<()>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.fail(system("serve connections", "the thread has ended"));
    }
}

/// Returns the name of this host, as its system has it.
#[doc(hidden)]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Tells this host from others, also from one that has the same name: the name, and the number of this boot.
fn this_system() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{}\n{}", host_name(), boot.trim())
}

/// A rank that waits for the others.
struct Joining {
    inner: Arc<Inner>,
    begun: Instant,
}

impl Joining {
    fn wait(self) -> Result<TcpBootstrap, BootstrapError> {
        let node = &self.inner.node;
        node.give(JOINING, this_system().as_bytes());
        // The tasks keep the time; this is for the case that they do not.
        let limit = self.inner.config.joining.saturating_add(Duration::from_secs(20));
        let mut outcome = None;
        rt::wait_until(|| {
            if self.begun.elapsed() > limit {
                node.give_up_joining(limit);
            }
            outcome = node.look(JOINING);
            outcome.is_some()
        });
        let hosts = match outcome {
            Some(Ok(hosts)) => hosts,
            Some(Err(BootstrapError::Timeout { missing, .. })) => {
                return Err(BootstrapError::Timeout { missing, waited_ms: millis(self.begun.elapsed()) });
            }
            Some(Err(error)) => return Err(error),
            None => return Err(node.unserved()),
        };
        self.inner.wishes.joined.store(true, Ordering::Release);
        let systems: Vec<String> = hosts.iter().map(|host| String::from_utf8_lossy(host).into_owned()).collect();
        let name = |system: &String| system.split_once('\n').map_or(&**system, |(name, _)| name).to_owned();
        let hosts: Vec<String> = systems.iter().map(name).collect();
        let _ = node.hosts.set(hosts.clone());
        let spares = Spares::exchange(&self.inner)?;
        Ok(TcpBootstrap { inner: self.inner, rounds: AtomicU64::new(0), hosts, systems, spares })
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Inner {
    fn gather(&self, round: Round, bytes: &[u8], ended: impl Fn() -> bool) -> Result<Vec<Vec<u8>>, BootstrapError> {
        if bytes.len() > MAX_BYTES {
            return Err(BootstrapError::TooLong { bytes: bytes.len() as u64, limit: MAX_BYTES as u64 });
        }
        self.node.give(round, bytes);
        let begun = Instant::now();
        let mut told = begun;
        let mut outcome = None;
        rt::wait_until(|| {
            // That a communicator has ended says more than that a rank left after it.
            outcome = match self.node.look(round) {
                Some(Ok(all)) => Some(Ok(all)),
                other if ended() => {
                    if other.is_none() {
                        self.node.give_up(round, begun.elapsed());
                    }
                    Some(Err(BootstrapError::Ended))
                }
                None if self.config.collective_timeout.is_some_and(|limit| begun.elapsed() >= limit) => {
                    Some(Err(self.node.give_up(round, begun.elapsed())))
                }
                other => other,
            };
            if outcome.is_none() && told.elapsed() >= self.config.progress {
                told = Instant::now();
                let missing = self.node.missing(round);
                let (rank, waited) = (self.node.rank, begun.elapsed().as_secs());
                tracing::info!(rank, waited, count = missing.len(), ranks = %show_ranks(&missing), "waiting for ranks");
            }
            outcome.is_some()
        });
        if matches!(outcome, Some(Ok(_))) {
            self.flush();
        }
        outcome.unwrap_or_else(|| Err(self.node.unserved()))
    }

    /// Waits until the system has taken all that other ranks need from this rank, so that a process that ends at once,
    /// after its last collective operation, does not spoil it for them. A neighbour that takes nothing is not waited
    /// for.
    fn flush(&self) {
        let (queued, begun) = (self.node.queued(), Instant::now());
        rt::wait_until(|| self.node.has_sent(&queued) || begun.elapsed() > FLUSH);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let joined = self.wishes.joined.load(Ordering::Acquire);
        self.wishes.leave.store(true, Ordering::Release);
        self.node.posted.notify_one();
        // One that never joined has nothing to say that somebody needs, and while a panic unwinds nobody is waited for.
        if joined && !std::thread::panicking() {
            let ended = self.ended.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
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

    fn is_across_processes(&self) -> bool {
        true
    }

    fn host(&self, rank: u32) -> String {
        self.hosts.get(rank as usize).cloned().unwrap_or_default()
    }

    fn rank(&self) -> u32 {
        self.inner.node.rank
    }

    fn ranks(&self) -> u32 {
        self.inner.node.ranks
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let round = Round { channel: JOB, number: self.rounds.fetch_add(1, Ordering::Relaxed) };
        self.inner.gather(round, bytes, || false)
    }

    fn channel(&self, communicator: u64) -> Arc<dyn Channel> {
        let board = self.inner.node.open(communicator);
        Arc::new(TcpChannel { inner: self.inner.clone(), channel: communicator, rounds: AtomicU64::new(0), board })
    }

    fn abort(&self) {
        self.inner.node.abort();
    }
}

#[derive(Debug)]
struct TcpChannel {
    inner: Arc<Inner>,
    channel: u64,
    rounds: AtomicU64,
    board: Arc<Board>,
}

impl Channel for TcpChannel {
    fn board(&self) -> &Arc<Board> {
        &self.board
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let round = Round { channel: self.channel, number: self.rounds.fetch_add(1, Ordering::Relaxed) };
        self.inner.gather(round, bytes, || self.board.count() != 0)
    }
}

impl Drop for TcpChannel {
    fn drop(&mut self) {
        self.inner.node.close(self.channel);
    }
}

/// Ranks in order as people write them, at most 20 groups of them: `3, 5-9 and 20 more`.
pub(crate) fn show_ranks(ranks: &[u32]) -> String {
    let mut text = String::new();
    let (mut at, mut groups) = (0, 0);
    while at < ranks.len() {
        if groups == 20 {
            let _ = write!(text, " and {} more", ranks.len() - at);
            break;
        }
        let run = (at..ranks.len()).take_while(|&next| ranks[next] - ranks[at] == (next - at) as u32).count();
        let comma = if groups == 0 { "" } else { ", " };
        let (first, last) = (ranks[at], ranks[at + run - 1]);
        let _ = match run {
            1 => write!(text, "{comma}{first}"),
            2 => write!(text, "{comma}{first}, {last}"),
            _ => write!(text, "{comma}{first}-{last}"),
        };
        (at, groups) = (at + run, groups + 1);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_whose_messages_wait_to_be_dealt_with_is_not_lost() {
        let silence = Duration::from_millis(500);
        let address = Some(Ipv4Addr::LOCALHOST.into());
        let config = TcpConfig { address, silence, ..TcpConfig::default() };
        let first = Rendezvous::new(config.clone()).unwrap();
        let id = first.id().clone();
        let second = std::thread::spawn(move || TcpBootstrap::join(&id, 1, 2, config).unwrap());
        let (first, second) = (first.join(2).unwrap(), second.join().unwrap());
        std::thread::scope(|scope| {
            let held = second.inner.node.state();
            // Its message waits at the second rank.
            let met = scope.spawn(|| first.barrier());
            std::thread::sleep(4 * silence);
            drop(held);
            second.barrier().unwrap();
            met.join().unwrap().unwrap();
        });
        assert_eq!((first.lost(), second.lost()), (vec![], vec![]));
    }
}
