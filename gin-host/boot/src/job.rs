// SPDX-License-Identifier: MIT OR Apache-2.0
//! The environment variables with which launchers describe a job.

use crate::address::{default_address, listen};
use crate::error::{CHECK, system};
use crate::id::{MIN_SECRET, Root};
use crate::io::Start;
use crate::tcp::{Origin, check};
use crate::{BootstrapError, IdError, TcpBootstrap, TcpConfig, UniqueId, lock, slurm};
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::num::NonZeroU16;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::sync::Mutex;
use std::time::Duration;

/// The source of variables: the environment, or a table in tests.
type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The launcher of the processes of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, derive_more::Display)]
#[non_exhaustive]
pub enum Launcher {
    /// `gin launch`, or a person or script that sets `GIN_RANK` and the variables that belong to it.
    #[display("GIN_RANK")]
    Gin,
    /// `torchrun`.
    #[display("torchrun")]
    Torchrun,
    /// Open MPI's `mpirun`.
    #[display("Open MPI")]
    OpenMpi,
    /// Slurm's `srun`.
    #[display("Slurm")]
    Slurm,
}

/// An error in the variables that describe a job.
///
/// ```
/// let variables = |name: &str| (name == "GIN_RANK").then(|| "1".to_owned());
/// let error = gin_boot::Job::from_variables(&variables).unwrap_err();
/// assert!(error.to_string().starts_with("GIN_RANKS is not set"));
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// A required variable is not set.
    #[error("{variable} is not set: {launcher} was found to have started this process; {advice}")]
    Missing {
        /// The variable.
        variable: &'static str,
        /// The launcher of the process.
        launcher: Launcher,
        /// The advice on its value.
        advice: &'static str,
    },
    /// A variable has an invalid value. Secrets are not repeated.
    #[error("{variable}: {problem}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// The error, and the possible values.
        problem: String,
    },
    /// The job has no secret, and its ranks are not known to be on one host.
    #[error(
        "this job has no secret, and its {ranks} ranks are not known to be on one host: set GIN_SECRET_FILE to a file of \
         yours that all ranks can read (openssl rand -hex 16 > FILE; chmod 600 FILE), or GIN_SECRET; GIN_INSECURE=1 lets \
         any process that reaches the port join and end the job"
    )]
    NoSecret {
        /// The number of ranks.
        ranks: u32,
    },
    /// The job has no secret, and would use an address that is not the loopback.
    #[error(
        "this job has no secret and would listen at {address}, which other hosts may reach: leave GIN_ADDR and \
         GIN_INTERFACE away or at 127.0.0.1, or set GIN_SECRET or GIN_SECRET_FILE"
    )]
    NotLoopback {
        /// The address.
        address: IpAddr,
    },
    /// The bootstrap failed.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
}

gin_abi::debug_as_display!(JobError);

/// Returns the error of a variable with an invalid value.
fn value(variable: &'static str, problem: impl Into<String>) -> JobError {
    JobError::Value { variable, problem: problem.into() }
}

/// The address of rank 0.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Rank0 {
    Id(UniqueId),
    /// A name or an address, and a port with its origin in words.
    Host(String, u16, &'static str),
}

/// The values of a launcher's own variables.
#[derive(Debug)]
struct LauncherValues {
    launcher: Launcher,
    /// The variables, as in [`LAUNCHERS`].
    names: [&'static str; 4],
    rank: u32,
    ranks: u32,
    local_rank: Option<u32>,
    local_ranks: Option<u32>,
}

/// One process of a job, as its launcher describes it. `docs/bootstrap.md` has the table of variables.
///
/// ```
/// let variables = |name: &str| match name {
///     "GIN_RANK" => Some("1".to_owned()),
///     "GIN_RANKS" => Some("2".to_owned()),
///     "GIN_UNIQUE_ID" => Some("gin1:000102030405060708090a0b0c0d0e0f@127.0.0.1:4000".to_owned()),
///     _ => None,
/// };
/// let job = gin_boot::Job::from_variables(&variables)?.expect("the variables describe a job");
/// assert_eq!((job.rank(), job.ranks(), job.local_rank()), (1, 2, None));
/// # Ok::<(), gin_boot::JobError>(())
/// ```
#[derive(Debug)]
pub struct Job {
    values: LauncherValues,
    rank_0: Rank0,
    root: Root,
    /// The job has no secret, and nobody asked for that: it stays on the loopback.
    open: bool,
    interface: Option<IpAddr>,
    silence: Option<Duration>,
    /// The job runs already.
    is_running: bool,
    /// A socket that the launcher has left open and that listens already.
    listening: Mutex<Option<RawFd>>,
}

impl Job {
    /// Returns the job for which a launcher started this process; `None` if no launcher did.
    ///
    /// If the variables of several launchers are set, `GIN_RANK` counts first, then torchrun, Open MPI, Slurm.
    ///
    /// # Errors
    /// [`JobError`] names the variable and the remedy.
    pub fn from_env() -> Result<Option<Self>, JobError> {
        Self::from_variables(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Does the same as [`from_env`](Self::from_env) with other variables.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variables: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, JobError> {
        // An empty variable counts as unset, because scripts unset variables in that way.
        let variables: Variables<'_> = &|name| variables(name).filter(|value| !value.is_empty());
        let Some(values) = launched(variables)? else { return Ok(None) };
        let LauncherValues { launcher, rank, ranks, .. } = values;
        let one_host = values.local_ranks == Some(ranks);
        let rank_0 = match variables("GIN_UNIQUE_ID") {
            Some(id) => {
                // The error does not repeat the id.
                let id = id.parse().map_err(|error: IdError| value("GIN_UNIQUE_ID", error.to_string()))?;
                for other in ["GIN_ADDR", "GIN_PORT", "GIN_SECRET", "GIN_SECRET_FILE"] {
                    if variables(other).is_some() {
                        return Err(value("GIN_UNIQUE_ID", format!("{other} is set too, which is part of the id")));
                    }
                }
                Rank0::Id(id)
            }
            None => {
                let host = host(variables, launcher, one_host)?;
                let (port, origin) = port(variables, launcher)?;
                Rank0::Host(host, port, origin)
            }
        };
        let (root, open) = match &rank_0 {
            Rank0::Id(id) => (id.root.clone(), false),
            Rank0::Host(..) => match secret(variables)? {
                Some(root) => (root, false),
                None if is_set(variables, "GIN_INSECURE", "a job without a secret")? => (Root::insecure(), false),
                None if one_host => (Root::insecure(), true),
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
        let is_running = is_set(variables, "GIN_JOIN", "a process that joins a running job")?;
        let listening = Mutex::new(listening);
        Ok(Some(Self { values, rank_0, root, open, interface, silence, is_running, listening }))
    }

    /// Returns the launcher.
    pub fn launcher(&self) -> Launcher {
        self.values.launcher
    }

    /// Returns the world rank.
    pub fn rank(&self) -> u32 {
        self.values.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.values.ranks
    }

    /// Returns the rank's number among the ranks of its host, if the launcher sets it. [`TcpBootstrap::local_rank`]
    /// counts by itself.
    pub fn local_rank(&self) -> Option<u32> {
        self.values.local_rank
    }

    /// Returns the number of ranks of its host, if the launcher sets it.
    pub fn local_ranks(&self) -> Option<u32> {
        self.values.local_ranks
    }

    /// Returns whether the job runs already (`GIN_JOIN`): its ranks call [`grow`](TcpBootstrap::grow) with this number.
    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Joins the other ranks and waits for all of them. `GIN_INTERFACE` overrides the address of `config`, and
    /// `GIN_SILENCE_MS` its silence. If the job [runs already](Self::is_running), does the same as
    /// [`join_running`](Self::join_running).
    ///
    /// # Errors
    /// [`JobError::NotLoopback`]; [`JobError::Value`] for a name that has no address; [`JobError::Bootstrap`] as
    /// [`TcpBootstrap::join`].
    pub fn bootstrap(&self, config: TcpConfig) -> Result<TcpBootstrap, JobError> {
        if self.is_running {
            return self.join_running(config);
        }
        let (addresses, mut config) = self.places(config)?;
        let start = if self.values.rank == 0 {
            Start::Listen(self.listen(&addresses, config.address)?)
        } else {
            // The name of rank 0's host often means the loopback on that host, where other hosts do not reach it.
            let by_name = matches!(self.rank_0, Rank0::Host(..)) && self.values.local_ranks != Some(self.values.ranks);
            if by_name && config.address.is_none() && addresses.iter().all(|address| address.ip().is_loopback()) {
                config.address = Some(default_address());
            }
            Start::Connect { addresses, remedy: format!("{CHECK}{}", self.port_remedy()) }
        };
        let LauncherValues { rank, ranks, names, local_rank, local_ranks, .. } = self.values;
        // Two launchers of one job on one host number their ranks each from 0.
        let local_rank = local_rank.filter(|_| local_ranks == Some(ranks));
        let origin = Origin::First(self.root.clone(), local_rank);
        let bootstrap = TcpBootstrap::join_as(rank, ranks, &self.root.secret(), config, start, origin)?;
        if let Some((first, second, both)) = bootstrap.same_local_rank() {
            let problem = format!(
                "ranks {first} and {second} both have {both}, and by {} all {ranks} ranks are on one host: give each its \
                 own number, from 0",
                names[3]
            );
            return Err(value(names[2], problem));
        }
        Ok(bootstrap)
    }

    /// Joins the running job that the variables describe, as one of the ranks that its ranks name in
    /// [`grow`](TcpBootstrap::grow). The variables have the rank of this process and the number of ranks after that.
    ///
    /// # Errors
    /// As [`bootstrap`](Self::bootstrap), and [`JobError::Bootstrap`] as [`TcpBootstrap::join_running`].
    pub fn join_running(&self, config: TcpConfig) -> Result<TcpBootstrap, JobError> {
        let (addresses, config) = self.places(config)?;
        let LauncherValues { rank, ranks, .. } = self.values;
        Ok(TcpBootstrap::enter(addresses, self.root.clone(), rank, ranks, config)?)
    }

    /// Returns the addresses of rank 0, and the configuration with the values of variables.
    fn places(&self, mut config: TcpConfig) -> Result<(Vec<SocketAddr>, TcpConfig), JobError> {
        config.address = self.interface.or(config.address);
        config.silence = self.silence.unwrap_or(config.silence);
        let addresses = match &self.rank_0 {
            Rank0::Id(id) => id.addresses().to_vec(),
            Rank0::Host(name, port, _) => {
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
        Ok((addresses, config))
    }

    /// Returns the socket at which rank 0 listens.
    fn listen(&self, addresses: &[SocketAddr], own: Option<IpAddr>) -> Result<TcpListener, JobError> {
        let inherited_fd = lock(&self.listening).take();
        if let Some(fd) = inherited_fd {
            return inherited(fd, addresses);
        }
        let port = addresses.first().map_or(0, SocketAddr::port);
        let mut own_addresses = Vec::new();
        match (own, &self.rank_0) {
            (Some(ip), _) => own_addresses.push(SocketAddr::new(ip, port)),
            // A name may mean the loopback here, and another address on other hosts.
            (None, Rank0::Host(name, ..))
                if self.values.local_ranks != Some(self.values.ranks) && name.parse::<IpAddr>().is_err() =>
            {
                own_addresses.push((Ipv6Addr::UNSPECIFIED, port).into());
                own_addresses.push((Ipv4Addr::UNSPECIFIED, port).into());
            }
            _ => own_addresses.extend_from_slice(addresses),
        }
        let mut outcome = Err(system("listen")("there is no address"));
        for address in own_addresses {
            outcome = listen(address);
            if outcome.is_ok() {
                break;
            }
        }
        Ok(outcome.map_err(|error| match error {
            BootstrapError::System { what, reason } => {
                BootstrapError::System { what, reason: format!("{reason}{}", self.port_remedy()) }
            }
            error => error,
        })?)
    }

    /// Returns where rank 0's port comes from and how to choose another one, for the end of an error; empty if the id
    /// has the port.
    fn port_remedy(&self) -> String {
        match &self.rank_0 {
            Rank0::Id(_) => String::new(),
            Rank0::Host(_, port, origin) => {
                format!(
                    "; port {port} is {origin}: if another program has it, set GIN_PORT to a port that is free on rank \
                     0's host, the same for all ranks"
                )
            }
        }
    }
}

/// Takes over a socket that the launcher has left open.
fn inherited(fd: RawFd, addresses: &[SocketAddr]) -> Result<TcpListener, JobError> {
    let refused = |problem: &str| value("GIN_LISTEN_FD", format!("{fd}: {problem}"));
    if fd < 3 || !listens(fd) {
        return Err(refused("it is no socket that listens; `gin launch` sets this variable, nobody else should"));
    }
    // Safety: the descriptor is open and a listening socket, so the launcher left it for this purpose: no code of this
    // process has opened a socket at an address of the id, which is checked next. It is taken once.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let listener = TcpListener::from(owned);
    let local = listener.local_addr().map_err(|error| refused(&error.to_string()))?;
    if !addresses.contains(&local) {
        // The owner keeps the socket.
        std::mem::forget(listener);
        return Err(refused("it listens somewhere else than the id says"));
    }
    let set = rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::CLOEXEC);
    let set = set.and_then(|()| rustix::net::listen(&listener, 4096));
    set.map(|()| listener).map_err(|error| refused(&error.to_string()))
}

/// Returns whether a descriptor is a socket that listens.
fn listens(fd: RawFd) -> bool {
    // Safety: the call only reads flags, and fails for a number that is no open descriptor. A descriptor that is not
    // open must not be borrowed, so this comes first.
    let is_open = unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    // Safety: it is open, and is borrowed for one call.
    is_open && rustix::net::sockopt::socket_acceptconn(unsafe { BorrowedFd::borrow_raw(fd) }) == Ok(true)
}

/// Returns the value of a variable, which must be `what`; `None` if it is not set.
fn parsed<T: FromStr>(variables: Variables<'_>, variable: &'static str, what: &str) -> Result<Option<T>, JobError> {
    let Some(text) = variables(variable) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| value(variable, format!("`{text}` is not {what}")))
}

/// Returns the number in a variable; `None` if it is not set.
fn number(variables: Variables<'_>, variable: &'static str) -> Result<Option<u32>, JobError> {
    parsed(variables, variable, "a number from 0 to 4294967295")
}

const OPEN_MPI: [&str; 4] =
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];

/// The variables of each launcher: the rank, the number of ranks, the number of the rank on its host, and the ranks of
/// its host. The first launcher whose variables are set counts.
const LAUNCHERS: [(Launcher, [&str; 4]); 4] = [
    (Launcher::Gin, ["GIN_RANK", "GIN_RANKS", "GIN_LOCAL_RANK", "GIN_LOCAL_RANKS"]),
    (Launcher::Torchrun, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
    (Launcher::OpenMpi, OPEN_MPI),
    (Launcher::Slurm, ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]),
];

/// Reads the variables of the launcher; `None` if no launcher has set its variables.
fn launched(variables: Variables<'_>) -> Result<Option<LauncherValues>, JobError> {
    let is_launcher = |(launcher, [rank, ranks, ..]): &(Launcher, [&'static str; 4])| {
        let second = match launcher {
            Launcher::Torchrun => ranks,
            // Without it a batch script runs, which is one process, whatever the number of tasks.
            Launcher::Slurm => "SLURM_STEP_NODELIST",
            Launcher::Gin | Launcher::OpenMpi => rank,
        };
        variables(rank).is_some() && variables(second).is_some()
    };
    let Some((launcher, names)) = LAUNCHERS.into_iter().find(is_launcher) else { return Ok(None) };
    let number = |variable| number(variables, variable);
    let needed = |variable| {
        let advice = "set it to the number of ranks of the job";
        number(variable)?.ok_or(JobError::Missing { variable, launcher, advice })
    };
    let step = if launcher == Launcher::Slurm { number("SLURM_STEP_NUM_TASKS")? } else { None };
    let (rank, ranks) = (needed(names[0])?, step.map_or_else(|| needed(names[1]), Ok)?);
    check(rank, ranks).map_err(|error| value(names[0], error.to_string()))?;
    let local_ranks = match launcher {
        Launcher::Slurm => match (number("SLURM_NODEID")?, variables(names[3])) {
            (Some(node), Some(list)) => slurm::tasks_of_node(&list, node),
            _ => None,
        },
        _ => number(names[3])?,
    };
    let local_rank = number(names[2])?;
    if let (Some(own), Some(count)) = (local_rank, local_ranks)
        && own >= count
    {
        let problem = format!("{own}, but this host has {count} ranks by {}: they count from 0", names[3]);
        return Err(value(names[2], problem));
    }
    Ok(Some(LauncherValues { launcher, names, rank, ranks, local_rank, local_ranks }))
}

/// Returns the name or address in a variable, without the brackets of an IPv6 address.
fn address(variable: &'static str, text: &str) -> Result<String, JobError> {
    let name = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let plain = name.split('%').next().unwrap_or_default();
    match plain.parse::<IpAddr>() {
        Ok(IpAddr::V6(ip)) if ip.is_unicast_link_local() || plain != name => {
            let advice = "use an address without `%`, as `ip -6 address show scope global` lists them, or a name";
            Err(value(
                variable,
                format!("`{text}` is valid on one link only, and other ranks may have another: {advice}"),
            ))
        }
        Ok(_) => Ok(name.to_owned()),
        Err(_) if name.contains([':', '[', ']']) => {
            Err(value(variable, format!("`{text}` is neither a name nor an address; a port belongs in GIN_PORT")))
        }
        Err(_) => Ok(name.to_owned()),
    }
}

/// Returns the name or address of rank 0's host.
fn host(variables: Variables<'_>, launcher: Launcher, one_host: bool) -> Result<String, JobError> {
    const ADVICE: &str = "set it to the name or address of rank 0's host, the same for all ranks, or set GIN_UNIQUE_ID";
    let master = || variables("MASTER_ADDR").filter(|_| launcher == Launcher::Torchrun);
    if let Some(host) = variables("GIN_ADDR") {
        return address("GIN_ADDR", &host);
    }
    if let Some(host) = master() {
        return address("MASTER_ADDR", &host);
    }
    if one_host {
        return Ok("127.0.0.1".to_owned());
    }
    match (launcher, variables("SLURM_STEP_NODELIST")) {
        (Launcher::Slurm, Some(list)) => slurm::first_host(&list).ok_or_else(|| {
            let advice = "set GIN_ADDR to the name or address of rank 0's host";
            value("SLURM_STEP_NODELIST", format!("`{list}` is not a list of hosts as Slurm writes them; {advice}"))
        }),
        (Launcher::Torchrun, _) => {
            let advice = "set it, or GIN_ADDR, to rank 0's host";
            Err(JobError::Missing { variable: "MASTER_ADDR", launcher, advice })
        }
        _ => Err(JobError::Missing { variable: "GIN_ADDR", launcher, advice: ADVICE }),
    }
}

/// Returns the port at which rank 0 listens, and its origin in words.
fn port(variables: Variables<'_>, launcher: Launcher) -> Result<(u16, &'static str), JobError> {
    let parse = |variable| parsed::<NonZeroU16>(variables, variable, "a port, a number from 1 to 65535");
    if let Some(port) = parse("GIN_PORT")? {
        return Ok((port.get(), "the value of GIN_PORT"));
    }
    let advice = "set it to a port that is free on rank 0's host, the same for all ranks";
    let missing = JobError::Missing { variable: "GIN_PORT", launcher, advice };
    match launcher {
        // The store of torchrun uses its own port.
        Launcher::Torchrun => parse("MASTER_PORT")?
            .ok_or(missing)?
            .checked_add(1)
            .map(|port| (port.get(), "MASTER_PORT + 1, since GIN_PORT is not set"))
            .ok_or_else(|| value("MASTER_PORT", "there is no port after 65535: set GIN_PORT")),
        // All ranks of a step compute the same port, other steps most likely another one. It is none of the ports that
        // the system gives by itself (32768 and up).
        Launcher::Slurm => {
            let step = number(variables, "SLURM_JOB_ID")?.ok_or(missing)?;
            let part = number(variables, "SLURM_STEP_ID")?.unwrap_or(0);
            let port = 20_000 + (step.wrapping_mul(31).wrapping_add(part) % 12_000) as u16;
            Ok((port, "computed from SLURM_JOB_ID and SLURM_STEP_ID, since GIN_PORT is not set"))
        }
        Launcher::Gin | Launcher::OpenMpi => Err(missing),
    }
}

/// Returns whether a variable is 1. `what` says for what, in errors.
fn is_set(variables: Variables<'_>, variable: &'static str, what: &str) -> Result<bool, JobError> {
    match variables(variable).as_deref() {
        None | Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(_) => Err(value(variable, format!("it can be 1, for {what}, or 0"))),
    }
}

/// Returns the root of the secret of the variables, if they have one.
fn secret(variables: Variables<'_>) -> Result<Option<Root>, JobError> {
    let (variable, text) = match (variables("GIN_SECRET"), variables("GIN_SECRET_FILE")) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => return Err(value("GIN_SECRET", "GIN_SECRET_FILE is set too: set one of them")),
        (Some(text), None) => ("GIN_SECRET", text.trim().as_bytes().to_vec()),
        (None, Some(path)) => {
            let text = secret_file(&path).map_err(|problem| value("GIN_SECRET_FILE", format!("{path}: {problem}")))?;
            ("GIN_SECRET_FILE", text)
        }
    };
    Root::new(text.trim_ascii()).map(Some).map_err(|bytes| {
        let advice = "openssl rand -hex 16 makes one";
        value(variable, format!("a secret has at least {MIN_SECRET} bytes, this one has {bytes}; {advice}"))
    })
}

/// Returns the content of a file that only its owner can read.
fn secret_file(path: &str) -> Result<Vec<u8>, String> {
    const LONGEST: u64 = 4096;
    let text = |error: std::io::Error| error.to_string();
    // Checked before it is opened, because opening a pipe waits.
    if !fs::metadata(path).map_err(text)?.is_file() {
        return Err("it is not a file".to_owned());
    }
    let mut file = File::open(path).map_err(text)?;
    let about = file.metadata().map_err(text)?;
    let mode = about.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!("other users can read or change it (mode {mode:03o}): chmod 600 {path}"));
    }
    if about.len() > LONGEST {
        return Err(format!("it has {} bytes, a secret at most {LONGEST}", about.len()));
    }
    let mut bytes = Vec::new();
    file.by_ref().take(LONGEST).read_to_end(&mut bytes).map_err(text)?;
    Ok(bytes)
}

/// Returns the address of an interface, given by its name or by one of its addresses; IPv4 before IPv6.
fn interface(name: &str) -> Result<IpAddr, JobError> {
    if let Ok(ip) = name.parse() {
        return Ok(ip);
    }
    let all = if_addrs::get_if_addrs().map_err(|error| value("GIN_INTERFACE", error.to_string()))?;
    // A link-local address is useless to a peer that does not name the link.
    let usable = |ip: &IpAddr| !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let own = all.iter().filter(|found| found.name == name).map(|found| found.ip()).filter(usable);
    own.min_by_key(IpAddr::is_ipv6).ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|found| found.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        value("GIN_INTERFACE", format!("`{name}` is no interface with an address; there are {}", names.join(", ")))
    })
}
