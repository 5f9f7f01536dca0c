// SPDX-License-Identifier: MIT OR Apache-2.0
//! The environment variables by which launchers describe a job.

use super::io::Start;
use super::{IdError, MIN_SECRET, Secret, TcpBootstrap, TcpConfig, UniqueId, check, default_address, listen, slurm};
use crate::BootstrapError;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::time::Duration;

/// Where variables come from: the environment, or a table in tests.
type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The launcher of the processes of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Launcher {
    /// `gin launch`, or a person or script that sets `GIN_RANK` and what belongs to it.
    Gin,
    /// `torchrun`.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Slurm's `srun`.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gin => "GIN_RANK",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Slurm => "Slurm",
        })
    }
}

/// An error in the variables that describe a job.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// One that is needed is not set.
    #[error("{variable} is not set: {launcher} was found to have started this process; {advice}")]
    Missing {
        /// The variable.
        variable: &'static str,
        /// The launcher of the process.
        launcher: Launcher,
        /// The values that it can have.
        advice: &'static str,
    },
    /// One has a value that it cannot have. Secrets are not repeated.
    #[error("{variable}: {problem}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// The error, and the possible values.
        problem: String,
    },
    /// The job has more than one host, as far as is known, and no secret.
    #[error(
        "this job has no secret, and its {ranks} ranks are not known to be on one host: set GIN_SECRET_FILE to a file of \
         yours that all ranks can read (openssl rand -hex 16 > FILE; chmod 600 FILE), or GIN_SECRET; GIN_INSECURE=1 lets \
         any process that reaches the port join and end the job"
    )]
    NoSecret {
        /// Number of ranks.
        ranks: u32,
    },
    /// Without a secret a job on one host meets at the loopback only.
    #[error(
        "this job has no secret and would listen at {address}, which other hosts may reach: leave GIN_ADDR and \
         GIN_INTERFACE away or at 127.0.0.1, or set GIN_SECRET or GIN_SECRET_FILE"
    )]
    NotLoopback {
        /// Where.
        address: IpAddr,
    },
    /// The ranks cannot meet.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
}

fn value(variable: &'static str, problem: impl Into<String>) -> JobError {
    JobError::Value { variable, problem: problem.into() }
}

/// Where rank 0 is.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Place {
    Id(UniqueId),
    /// A name or an address, and a port.
    Host(String, u16),
}

/// One process of a job, as its launcher describes it.
///
/// `docs/bootstrap.md` has the table of variables.
#[derive(Debug)]
pub struct Job {
    launcher: Launcher,
    rank: u32,
    ranks: u32,
    local_rank: Option<u32>,
    local_ranks: Option<u32>,
    place: Place,
    secret: Secret,
    /// This has a secret, or does without by wish.
    open: bool,
    interface: Option<IpAddr>,
    silence: Option<Duration>,
    /// A socket of the launcher's that listens already.
    listening: Mutex<Option<RawFd>>,
}

/// The values of a launcher's own variables.
struct LauncherValues {
    launcher: Launcher,
    rank: u32,
    ranks: u32,
    local_rank: Option<u32>,
    local_ranks: Option<u32>,
}

impl Job {
    /// The job that this process was started for; `None` if it was started by itself.
    ///
    /// Of several launchers' variables those of `GIN_RANK` count, then those of torchrun, Open MPI, Slurm.
    ///
    /// # Errors
    /// [`JobError`] names the variable, and says what to do.
    pub fn from_env() -> Result<Option<Self>, JobError> {
        Self::from_variables(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// The same, from other variables than this process's.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variables: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, JobError> {
        // An empty variable is as good as none: scripts unset them so.
        let variables: Variables<'_> = &|name| variables(name).filter(|value| !value.is_empty());
        let Some(told) = told(variables)? else { return Ok(None) };
        let LauncherValues { launcher, rank, ranks, local_rank, local_ranks } = told;
        match check(rank, ranks) {
            Ok(()) => {}
            Err(error) => return Err(value(rank_variable(launcher), error.to_string())),
        }
        let one_host = local_ranks == Some(ranks);
        let place = match variables("GIN_UNIQUE_ID") {
            Some(id) => {
                // The error does not repeat the id.
                let id = id.parse().map_err(|error: IdError| value("GIN_UNIQUE_ID", error.to_string()))?;
                for other in ["GIN_ADDR", "GIN_PORT", "GIN_SECRET", "GIN_SECRET_FILE"] {
                    if variables(other).is_some() {
                        return Err(value("GIN_UNIQUE_ID", format!("{other} is set too, which is part of the id")));
                    }
                }
                Place::Id(id)
            }
            None => Place::Host(host(variables, launcher, one_host)?, port(variables, launcher)?),
        };
        let (secret, open) = match &place {
            Place::Id(id) => (id.secret(), false),
            Place::Host(..) => match secret(variables)? {
                Some(secret) => (secret, false),
                None if insecure(variables)? => (Secret::insecure(), false),
                None if one_host => (Secret::insecure(), true),
                None => return Err(JobError::NoSecret { ranks }),
            },
        };
        let listening = match (rank, number(variables, "GIN_LISTEN_FD")?) {
            (0, Some(fd)) => Some(RawFd::try_from(fd).map_err(|_| value("GIN_LISTEN_FD", "it is no descriptor"))?),
            _ => None,
        };
        let interface = variables("GIN_INTERFACE").map(|name| interface(&name)).transpose()?;
        let silence = match number(variables, "GIN_SILENCE_MS")? {
            Some(ms) if ms < 100 => return Err(value("GIN_SILENCE_MS", format!("{ms} ms are too few: at least 100"))),
            ms => ms.map(|ms| Duration::from_millis(ms.into())),
        };
        let listening = Mutex::new(listening);
        Ok(Some(Self {
            launcher,
            rank,
            ranks,
            local_rank,
            local_ranks,
            place,
            secret,
            open,
            interface,
            silence,
            listening,
        }))
    }

    /// Returns its launcher.
    pub fn launcher(&self) -> Launcher {
        self.launcher
    }

    /// World rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The rank's number among those of its host, as the launcher counts; [`TcpBootstrap::local_rank`] counts for
    /// itself.
    pub fn local_rank(&self) -> Option<u32> {
        self.local_rank
    }

    /// How many ranks its host has, if the launcher says so.
    pub fn local_ranks(&self) -> Option<u32> {
        self.local_ranks
    }

    /// Name of this host, as its system has it.
    pub fn host(&self) -> String {
        super::host_name()
    }

    /// Meets the other ranks. Waits for all of them. `config`: its address, unless `GIN_INTERFACE` says otherwise, and
    /// its silence, unless `GIN_SILENCE_MS` does.
    ///
    /// # Errors
    /// [`JobError::NotLoopback`]; [`JobError::Value`] for a name that is not to be resolved;
    /// [`JobError::Bootstrap`] as [`TcpBootstrap::join`].
    pub fn bootstrap(&self, mut config: TcpConfig) -> Result<TcpBootstrap, JobError> {
        config.address = self.interface.or(config.address);
        config.silence = self.silence.unwrap_or(config.silence);
        let addresses = match &self.place {
            Place::Id(id) => id.addresses().to_vec(),
            Place::Host(name, port) => {
                let resolved = (name.as_str(), *port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
                resolved.map_err(|error| {
                    let problem = format!("`{name}`, the host of rank 0, has no address: {error}");
                    value("GIN_ADDR", problem)
                })?
            }
        };
        if self.open {
            let own = config.address.into_iter().chain(addresses.iter().map(SocketAddr::ip));
            if let Some(address) = own.into_iter().find(|ip| !ip.is_loopback()) {
                return Err(JobError::NotLoopback { address });
            }
        }
        let start = if self.rank == 0 {
            Start::Listen(self.listen(&addresses, config.address)?)
        } else {
            // A host often has its own name for the loopback, where others do not reach it.
            let by_name = matches!(self.place, Place::Host(..)) && self.local_ranks != Some(self.ranks);
            if by_name && config.address.is_none() && addresses.iter().all(|address| address.ip().is_loopback()) {
                config.address = Some(default_address());
            }
            Start::Connect(addresses)
        };
        Ok(TcpBootstrap::begin(self.rank, self.ranks, &self.secret, config, start)?.wait()?)
    }

    /// The socket at which rank 0 listens.
    fn listen(&self, addresses: &[SocketAddr], own: Option<IpAddr>) -> Result<TcpListener, JobError> {
        let taken = self.listening.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(fd) = taken {
            return inherited(fd, addresses);
        }
        let port = addresses.first().map_or(0, SocketAddr::port);
        let mut places = Vec::new();
        match (own, &self.place) {
            (Some(ip), _) => places.push(SocketAddr::new(ip, port)),
            // A name may stand for the loopback here, and for something else on other hosts.
            (None, Place::Host(name, _)) if self.local_ranks != Some(self.ranks) && name.parse::<IpAddr>().is_err() => {
                places.push((Ipv6Addr::UNSPECIFIED, port).into());
                places.push((Ipv4Addr::UNSPECIFIED, port).into());
            }
            _ => places.extend_from_slice(addresses),
        }
        let mut outcome = Err(BootstrapError::System { what: "listen", reason: "there is no address".into() });
        for place in places {
            outcome = listen(place);
            if outcome.is_ok() {
                break;
            }
        }
        Ok(outcome?)
    }
}

/// Takes over a socket that the launcher has left open.
fn inherited(fd: RawFd, addresses: &[SocketAddr]) -> Result<TcpListener, JobError> {
    let refused = |problem: &str| value("GIN_LISTEN_FD", format!("{fd}: {problem}"));
    if fd < 3 || rustix_listens(fd) != Some(true) {
        return Err(refused("it is no socket that listens; `gin launch` sets this variable, nobody else should"));
    }
    // Safety: the descriptor is open and a listening socket, so it is what the launcher left for this purpose: nothing
    // of this process has opened one at an address of the id, which is checked next; and it is taken once.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let listener = TcpListener::from(owned);
    let local = listener.local_addr().map_err(|error| refused(&error.to_string()))?;
    if !addresses.contains(&local) {
        // Its owner keeps it.
        std::mem::forget(listener);
        return Err(refused("it listens somewhere else than the id says"));
    }
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::CLOEXEC).map_err(|error| refused(&error.to_string()))?;
    rustix::net::listen(&listener, 4096).map_err(|error| refused(&error.to_string()))?;
    Ok(listener)
}

/// Returns whether a descriptor is a socket that listens; `None` if it is not open, or no socket.
fn rustix_listens(fd: RawFd) -> Option<bool> {
    // Looked at by name first: one that is not open must not be borrowed.
    let target = fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
    if !target.to_string_lossy().starts_with("socket:") {
        return None;
    }
    // Safety: it is open; it is borrowed for one call.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    rustix::net::sockopt::socket_acceptconn(borrowed).ok()
}

/// The variable that has the rank.
fn rank_variable(launcher: Launcher) -> &'static str {
    match launcher {
        Launcher::Gin => "GIN_RANK",
        Launcher::Torchrun => "RANK",
        Launcher::OpenMpi => "OMPI_COMM_WORLD_RANK",
        Launcher::Slurm => "SLURM_PROCID",
    }
}

/// A variable that, if it is set, is a number.
fn number(variables: Variables<'_>, variable: &'static str) -> Result<Option<u32>, JobError> {
    let Some(text) = variables(variable) else { return Ok(None) };
    let problem = || value(variable, format!("`{text}` is not a number from 0 to {}", u32::MAX));
    text.trim().parse().map(Some).map_err(|_| problem())
}

fn told(variables: Variables<'_>) -> Result<Option<LauncherValues>, JobError> {
    let number = |variable| number(variables, variable);
    let needed = |launcher, variable, advice| number(variable)?.ok_or(JobError::Missing { variable, launcher, advice });
    const RANKS: &str = "set it to the number of ranks of the job";
    let is_set = |variable: &str| variables(variable).is_some();
    let told = if let Some(rank) = number("GIN_RANK")? {
        let launcher = Launcher::Gin;
        let ranks = needed(launcher, "GIN_RANKS", RANKS)?;
        let (local_rank, local_ranks) = (number("GIN_LOCAL_RANK")?, number("GIN_LOCAL_RANKS")?);
        LauncherValues { launcher, rank, ranks, local_rank, local_ranks }
    } else if is_set("RANK") && is_set("WORLD_SIZE") {
        let launcher = Launcher::Torchrun;
        let (rank, ranks) = (needed(launcher, "RANK", "")?, needed(launcher, "WORLD_SIZE", RANKS)?);
        let (local_rank, local_ranks) = (number("LOCAL_RANK")?, number("LOCAL_WORLD_SIZE")?);
        LauncherValues { launcher, rank, ranks, local_rank, local_ranks }
    } else if let Some(rank) = number("OMPI_COMM_WORLD_RANK")? {
        let launcher = Launcher::OpenMpi;
        let ranks = needed(launcher, "OMPI_COMM_WORLD_SIZE", RANKS)?;
        let local_rank = number("OMPI_COMM_WORLD_LOCAL_RANK")?;
        LauncherValues { launcher, rank, ranks, local_rank, local_ranks: number("OMPI_COMM_WORLD_LOCAL_SIZE")? }
    } else if is_set("SLURM_PROCID") && is_set("SLURM_STEP_NODELIST") {
        // Without the second a batch script runs, which is one process, whatever the number of tasks.
        let launcher = Launcher::Slurm;
        let rank = needed(launcher, "SLURM_PROCID", "")?;
        let ranks = match number("SLURM_STEP_NUM_TASKS")? {
            Some(ranks) => ranks,
            None => needed(launcher, "SLURM_NTASKS", RANKS)?,
        };
        let per_node = variables("SLURM_STEP_TASKS_PER_NODE");
        let local_ranks = match (number("SLURM_NODEID")?, per_node) {
            (Some(node), Some(list)) => slurm::tasks_of_node(&list, node),
            _ => None,
        };
        LauncherValues { launcher, rank, ranks, local_rank: number("SLURM_LOCALID")?, local_ranks }
    } else {
        return Ok(None);
    };
    Ok(Some(told))
}

/// Name or address of rank 0's host.
fn host(variables: Variables<'_>, launcher: Launcher, one_host: bool) -> Result<String, JobError> {
    const ADVICE: &str = "set it to the name or address of rank 0's host, the same for all ranks, or set GIN_UNIQUE_ID";
    if let Some(host) = variables("GIN_ADDR") {
        return Ok(host);
    }
    if launcher == Launcher::Torchrun
        && let Some(host) = variables("MASTER_ADDR")
    {
        return Ok(host);
    }
    if one_host {
        return Ok("127.0.0.1".to_owned());
    }
    match (launcher, variables("SLURM_STEP_NODELIST")) {
        (Launcher::Slurm, Some(list)) => slurm::first_host(&list).ok_or_else(|| {
            let advice = "set GIN_ADDR to the name or address of rank 0's host";
            value("SLURM_STEP_NODELIST", format!("`{list}` is not a list of hosts as Slurm writes them; {advice}"))
        }),
        (Launcher::Torchrun, _) => Err(JobError::Missing {
            variable: "MASTER_ADDR",
            launcher,
            advice: "set it, or GIN_ADDR, to rank 0's host",
        }),
        _ => Err(JobError::Missing { variable: "GIN_ADDR", launcher, advice: ADVICE }),
    }
}

/// The port at which rank 0 listens.
fn port(variables: Variables<'_>, launcher: Launcher) -> Result<u16, JobError> {
    let parse = |variable: &'static str| -> Result<Option<u16>, JobError> {
        let Some(text) = variables(variable) else { return Ok(None) };
        let port = text.trim().parse().ok().filter(|&port| port != 0);
        port.map(Some).ok_or_else(|| value(variable, format!("`{text}` is not a port, a number from 1 to 65535")))
    };
    if let Some(port) = parse("GIN_PORT")? {
        return Ok(port);
    }
    let advice = "set it to a port that is free on rank 0's host, the same for all ranks";
    let missing = JobError::Missing { variable: "GIN_PORT", launcher, advice };
    match launcher {
        // Its own port is taken by its store.
        Launcher::Torchrun => parse("MASTER_PORT")?
            .ok_or(missing)?
            .checked_add(1)
            .ok_or_else(|| value("MASTER_PORT", "there is no port after 65535: set GIN_PORT")),
        // All ranks of a step compute the same, other steps most likely another one, and none from which the system
        // takes ports by itself (32768 and up).
        Launcher::Slurm => {
            let step = number(variables, "SLURM_JOB_ID")?.ok_or(missing)?;
            let part = number(variables, "SLURM_STEP_ID")?.unwrap_or(0);
            Ok(20_000 + (step.wrapping_mul(31).wrapping_add(part) % 12_000) as u16)
        }
        Launcher::Gin | Launcher::OpenMpi => Err(missing),
    }
}

fn insecure(variables: Variables<'_>) -> Result<bool, JobError> {
    match variables("GIN_INSECURE").as_deref() {
        None | Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(_) => Err(value("GIN_INSECURE", "it can be 1, for a job without a secret, or 0")),
    }
}

fn secret(variables: Variables<'_>) -> Result<Option<Secret>, JobError> {
    let short = |variable: &'static str| {
        move |bytes: usize| {
            let advice = "openssl rand -hex 16 makes one";
            value(variable, format!("a secret has at least {MIN_SECRET} bytes, this one has {bytes}; {advice}"))
        }
    };
    match (variables("GIN_SECRET"), variables("GIN_SECRET_FILE")) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => Err(value("GIN_SECRET", "GIN_SECRET_FILE is set too: set one of them")),
        (Some(text), None) => Secret::new(text.trim().as_bytes()).map(Some).map_err(short("GIN_SECRET")),
        (None, Some(path)) => {
            let text = secret_file(&path).map_err(|problem| value("GIN_SECRET_FILE", format!("{path}: {problem}")))?;
            Secret::new(text.trim_ascii()).map(Some).map_err(short("GIN_SECRET_FILE"))
        }
    }
}

/// Returns the content of a file that only its owner can read.
fn secret_file(path: &str) -> Result<Vec<u8>, String> {
    const LONGEST: u64 = 4096;
    let told = |error: std::io::Error| error.to_string();
    // Before it is opened, which waits if it is a pipe.
    if !fs::metadata(path).map_err(told)?.is_file() {
        return Err("it is not a file".to_owned());
    }
    let mut file = File::open(path).map_err(told)?;
    let about = file.metadata().map_err(told)?;
    let mode = about.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!("other users can read or change it (mode {mode:03o}): chmod 600 {path}"));
    }
    if about.len() > LONGEST {
        return Err(format!("it has {} bytes, a secret at most {LONGEST}", about.len()));
    }
    let mut bytes = Vec::new();
    file.by_ref().take(LONGEST).read_to_end(&mut bytes).map_err(told)?;
    Ok(bytes)
}

/// The address of an interface, given by its name or by one of its addresses; IPv4 before IPv6.
fn interface(name: &str) -> Result<IpAddr, JobError> {
    if let Ok(ip) = name.parse() {
        return Ok(ip);
    }
    let all = if_addrs::get_if_addrs().map_err(|error| value("GIN_INTERFACE", error.to_string()))?;
    // An address of one link only is useless to a peer that does not name the link.
    let usable = |ip: &IpAddr| !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let mut own: Vec<IpAddr> = all.iter().filter(|found| found.name == name).map(|found| found.ip()).collect();
    own.retain(usable);
    own.sort_by_key(IpAddr::is_ipv6);
    own.first().copied().ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|found| found.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        value("GIN_INTERFACE", format!("`{name}` is no interface with an address; there are {}", names.join(", ")))
    })
}
