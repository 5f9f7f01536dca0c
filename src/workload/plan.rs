// SPDX-License-Identifier: MIT OR Apache-2.0
//! The runs that the arguments and the job of this process determine.

use super::network::Over;
use super::run_device::{RunDevice, RunDevices, run_devices};
use super::shape;
use crate::cli::{self, Beside, Mode, Network, Options, Refused, SizeArgs, Sizes, Workload};
use crate::trace::Clock;
use gin_abi::Deadline;
use gin_host::comm::{Backend, Routes};
use gin_net::NetworkFactory;

/// This process as one rank of a job.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// Number of ranks of the job.
    pub ranks: u32,
    /// The rank's number among the ranks of its host.
    pub local_rank: u32,
    /// Number of ranks of its host.
    pub local_ranks: u32,
}

/// One run of a workload, with a value for each option.
#[derive(Clone)]
pub(crate) struct Plan {
    /// The workload.
    pub workload: Workload,
    /// The devices of the ranks.
    pub device: RunDevice,
    /// Number of ranks.
    pub ranks: u32,
    /// How virtual GPUs run.
    pub mode: Mode,
    /// Seed of their schedule.
    pub seed: u64,
    /// Maximum number of resident blocks of a virtual GPU; `None` stands for its default.
    pub resident_blocks: Option<u32>,
    /// The back end.
    pub backend: Backend,
    /// The network of the proxies; `None` stands for copies between ranks of one host.
    pub network: Option<NetworkFactory>,
    /// Kernels drive software NICs.
    pub software_nics: bool,
    /// How operations reach their peers.
    pub routes: Routes,
    /// Refuse to run if loads and stores do not reach all peers.
    pub lsa_only: bool,
    /// The amount of work.
    pub sizes: Sizes,
    /// The arguments about it.
    pub asked: SizeArgs,
    /// Time limit of a wait in a kernel.
    pub deadline: Deadline,
    /// The report contains the statistics of the communicators.
    pub stats: bool,
    /// The ranks are processes; otherwise threads of this process.
    pub processes: bool,
    /// The library that runs in turns with the workload.
    pub beside: Option<Beside>,
}

impl Plan {
    /// Chooses again what the arguments leave open, after a change of the device, the ranks or the size.
    fn resize(&mut self) {
        self.sizes = shape::sizes(&self.asked, self.workload, &self.device, self.ranks, self.routes);
    }

    /// Returns the clock that the run's kernels read.
    pub(crate) fn clock(&self) -> Clock {
        match (&self.device, self.mode) {
            (RunDevice::Virtual, Mode::Seeded) => Clock::Virtual,
            (RunDevice::Virtual, _) => Clock::Host,
            (RunDevice::Cuda(_), _) => Clock::Gpu,
        }
    }
}

/// The runs of one command.
#[derive(Clone)]
pub(crate) struct Plans {
    /// The runs, in their order.
    pub all: Vec<Plan>,
    /// A note for people on the choice of devices; `None` if the arguments made it.
    pub note: Option<String>,
}

impl Plans {
    /// Returns the runs of the workloads on each chosen device, over each chosen route. With `every`, the defaults are
    /// all available kinds of devices and all routes. `process`: this process is one rank of a job.
    ///
    /// # Errors
    /// Refuses options that the job, the devices or the network do not support.
    pub(crate) fn resolve(
        workloads: &[Workload],
        options: &Options,
        every: bool,
        process: Option<Process>,
    ) -> Result<Self, Refused> {
        let (over, mode) = match process {
            None => alone(options),
            Some(process) => in_job(options, process)?,
        };
        let RunDevices { all: devices, note } = run_devices(options, every)?;
        let backend = match options.backend {
            cli::Backend::Auto => Backend::Auto,
            cli::Backend::Proxy => Backend::Proxy,
            cli::Backend::Gdaki => Backend::Gdaki,
        };
        let (network, about_network) = over.open(mode, backend)?;
        let note = Some([note, about_network].into_iter().flatten().collect::<Vec<_>>().join("; "));
        let note = note.filter(|note| !note.is_empty());
        let runs = |routes| match options.route {
            None => every || routes == Routes::Network,
            Some(cli::Route::Network) => routes == Routes::Network,
            Some(cli::Route::Auto | cli::Route::Lsa) => routes == Routes::Automatic,
        };
        let lsa_only = options.route == Some(cli::Route::Lsa);
        let software = |device: &RunDevice| {
            backend == Backend::Gdaki && (options.network == Network::Software || matches!(device, RunDevice::Virtual))
        };
        if let Some(text) = ignored(options, process.map_or(options.ranks(), |process| process.ranks)) {
            return Err(Refused(text));
        }
        let mut plans = Self { all: Vec::new(), note };
        for device in &devices {
            for routes in [Routes::Network, Routes::Automatic].into_iter().filter(|&routes| runs(routes)) {
                plans.all.extend(workloads.iter().map(|&workload| Plan {
                    workload,
                    device: device.clone(),
                    ranks: options.ranks(),
                    mode,
                    seed: options.seed.unwrap_or(1),
                    resident_blocks: options.resident_blocks,
                    backend,
                    network: network.clone(),
                    software_nics: software(device),
                    routes,
                    lsa_only,
                    sizes: shape::sizes(&options.sizes, workload, device, options.ranks(), routes),
                    asked: options.sizes,
                    deadline: Deadline::after_ms(options.deadline_ms),
                    stats: options.stats,
                    processes: false,
                    beside: None,
                }));
            }
        }
        Ok(match process {
            None => plans,
            Some(process) => plans.of_process(process),
        })
    }

    /// Returns the same runs as one rank of a job.
    pub(crate) fn of_process(mut self, process: Process) -> Self {
        for plan in &mut self.all {
            (plan.ranks, plan.processes) = (process.ranks, true);
            plan.device = plan.device.clone().of_process(process.local_rank, process.local_ranks);
            plan.resize();
        }
        self
    }

    /// Returns the same runs once for each of these sizes, or as they are if there is none.
    pub(crate) fn sweep(mut self, sizes: &[u64]) -> Self {
        if !sizes.is_empty() {
            let all = self.all.iter().flat_map(|plan| {
                sizes.iter().map(|&bytes| {
                    let mut plan = Plan { asked: SizeArgs { bytes, ..plan.asked }, ..plan.clone() };
                    plan.resize();
                    plan
                })
            });
            self.all = all.collect();
        }
        self
    }

    /// Returns the same runs in turns with another library.
    pub(crate) fn beside(mut self, beside: Option<Beside>) -> Self {
        self.all.iter_mut().for_each(|plan| plan.beside = beside);
        self
    }

    /// Returns the same runs with one launch each, and `factor` times as many iterations.
    pub(crate) fn longer(mut self, factor: u64) -> Self {
        for Plan { sizes, .. } in &mut self.all {
            (sizes.iters, sizes.repeats) = (sizes.iters.saturating_mul(factor), 1);
        }
        self
    }
}

/// Returns the refusal of the first option that another one makes ineffective.
fn ignored(options: &Options, ranks: u32) -> Option<String> {
    let lsa_only = options.route == Some(cli::Route::Lsa);
    let gdaki = options.backend == cli::Backend::Gdaki;
    let network = match options.network {
        Network::Auto => None,
        Network::Peer => Some("--network peer"),
        Network::Verbs => Some("--network verbs"),
        Network::Fabric => Some("--network fabric"),
        Network::Software => Some("--network software"),
    };
    match (lsa_only, network) {
        (true, Some(network)) => {
            Some(format!("{network}: with --route lsa no operation takes the network; leave it out"))
        }
        (true, None) if gdaki => {
            Some("--backend gdaki: with --route lsa no operation takes the back end; leave it out".to_owned())
        }
        (true, None) if ranks == 1 => {
            Some("--route lsa: a single rank has no peer; use more --ranks or leave it out".to_owned())
        }
        (false, Some("--network peer")) if gdaki => {
            let text =
                "--network peer: with --backend gdaki the kernels drive NICs, and no proxy has a network; leave it out";
            Some(text.to_owned())
        }
        (false, Some("--network software")) if !gdaki => {
            Some("--network software: only kernels drive software NICs; add --backend gdaki".to_owned())
        }
        _ => None,
    }
}

/// Returns for ranks that are threads of this process what connects them, and the mode of virtual GPUs.
fn alone(options: &Options) -> (Over, Mode) {
    let over = match options.network {
        Network::Verbs => Over::Verbs,
        Network::Fabric => Over::Fabric,
        Network::Auto | Network::Peer | Network::Software => Over::Copies,
    };
    // Only copies run in virtual time.
    (over, options.mode.unwrap_or(if over == Over::Copies { Mode::Seeded } else { Mode::Threads }))
}

/// Returns the same for ranks that are processes: copies connect ranks of one host, a network ranks of several hosts.
///
/// # Errors
/// Refuses a different number of ranks, options that ranks in separate processes do not support, and a network that
/// does not connect hosts if the ranks are on several.
fn in_job(options: &Options, process: Process) -> Result<(Over, Mode), Refused> {
    let refuse = |text: String| Err(Refused(text));
    let Process { ranks, local_ranks, .. } = process;
    if let Some(asked) = options.ranks.filter(|&asked| asked != ranks) {
        return refuse(format!("--ranks {asked}: the job of this process has {ranks} ranks; leave the option out"));
    }
    if options.mode == Some(Mode::Seeded) {
        let text =
            "--mode seeded: the ranks of this job are processes, which cannot run in turns; leave the option out";
        return refuse(text.to_owned());
    }
    if options.backend == cli::Backend::Gdaki {
        let text = "--backend gdaki: the ranks of this job are processes, and software NICs serve one process only; \
                    leave the option out";
        return refuse(text.to_owned());
    }
    let over = match (options.network, local_ranks == ranks) {
        (Network::Software, _) => {
            return refuse(
                "--network software: the ranks of this job are processes, and software NICs serve one process only; \
                           leave the option out"
                    .to_owned(),
            );
        }
        (Network::Auto | Network::Peer, true) => Over::Copies,
        (Network::Auto, false) => Over::Hosts,
        (Network::Verbs, _) => Over::Verbs,
        (Network::Fabric, _) => Over::Fabric,
        (Network::Peer, false) => {
            let text = "--network peer: the ranks of this job are on several hosts, and this network connects ranks of one \
                        host only; leave the option out, or use --network verbs or fabric";
            return refuse(text.to_owned());
        }
    };
    Ok((over, Mode::Threads))
}

/// Returns the run of `gin run ring` without options.
#[cfg(test)]
pub(crate) fn default_plan() -> Plan {
    let options = Options { device: cli::DeviceChoice::Virtual, ..cli::default_options() };
    let Ok(plans) = Plans::resolve(&[Workload::Ring], &options, false, None) else { panic!("refused") };
    plans.all[0].clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{DeviceChoice, default_options};

    fn process(ranks: u32, local_ranks: u32) -> Process {
        Process { ranks, local_rank: 0, local_ranks }
    }

    #[test]
    fn the_job_determines_the_number_of_ranks() {
        let ranks = |given| {
            let options = Options { ranks: given, device: DeviceChoice::Virtual, ..default_options() };
            Plans::resolve(&[Workload::Ring], &options, false, Some(process(7, 7)))
                .map(|plans| plans.all[0].ranks)
                .map_err(|Refused(text)| text)
        };
        assert_eq!((ranks(None), ranks(Some(7))), (Ok(7), Ok(7)));
        let text = ranks(Some(4)).unwrap_err();
        assert!(text.contains("--ranks 4") && text.contains("has 7"), "{text}");
        assert_eq!(default_plan().ranks, 4);
    }

    #[test]
    fn options_that_processes_do_not_support_are_refused() {
        let seeded = Options { mode: Some(Mode::Seeded), ..default_options() };
        let gdaki = Options { backend: cli::Backend::Gdaki, ..default_options() };
        for (options, word) in [(seeded, "--mode"), (gdaki, "--backend")] {
            let Refused(text) = in_job(&options, process(2, 2)).unwrap_err();
            assert!(text.starts_with(word) && text.contains("processes"), "{text}");
        }
    }

    #[test]
    fn options_that_would_have_no_effect_are_refused_with_the_one_that_makes_them_ineffective() {
        let lsa = || Options { route: Some(cli::Route::Lsa), ..default_options() };
        let gdaki = || Options { backend: cli::Backend::Gdaki, ..default_options() };
        for (options, option, because) in [
            (Options { network: Network::Peer, ..lsa() }, "--network peer", "--route lsa"),
            (Options { network: Network::Verbs, ..lsa() }, "--network verbs", "--route lsa"),
            (Options { backend: cli::Backend::Gdaki, ..lsa() }, "--backend gdaki", "--route lsa"),
            (Options { network: Network::Peer, ..gdaki() }, "--network peer", "--backend gdaki"),
            (Options { network: Network::Software, ..default_options() }, "--network software", "--backend gdaki"),
            (Options { ranks: Some(1), ..lsa() }, "--route lsa", "no peer"),
        ] {
            let text = ignored(&options, options.ranks()).unwrap();
            assert!(text.starts_with(option) && text.contains(because), "{text}");
        }
        for options in [gdaki(), Options { network: Network::Peer, ..default_options() }] {
            assert_eq!(ignored(&options, options.ranks()), None);
        }
    }

    #[test]
    fn ranks_of_one_host_copy_and_ranks_of_several_hosts_use_a_network() {
        let over = |network, local_ranks| in_job(&Options { network, ..default_options() }, process(2, local_ranks));
        for (network, local_ranks, expected) in [
            (Network::Auto, 2, Over::Copies),
            (Network::Auto, 1, Over::Hosts),
            (Network::Peer, 2, Over::Copies),
            (Network::Verbs, 2, Over::Verbs),
            (Network::Verbs, 1, Over::Verbs),
            (Network::Fabric, 2, Over::Fabric),
            (Network::Fabric, 1, Over::Fabric),
        ] {
            assert_eq!(over(network, local_ranks).unwrap(), (expected, Mode::Threads), "{network:?}");
        }
        let Refused(text) = over(Network::Peer, 1).unwrap_err();
        assert!(text.starts_with("--network peer") && text.contains("--network verbs"), "{text}");
    }

    #[test]
    fn virtual_gpus_run_in_virtual_time_unless_a_network_connects_them() {
        for (network, mode, expected) in [
            (Network::Auto, None, (Over::Copies, Mode::Seeded)),
            (Network::Peer, Some(Mode::Threads), (Over::Copies, Mode::Threads)),
            (Network::Verbs, None, (Over::Verbs, Mode::Threads)),
            (Network::Verbs, Some(Mode::Seeded), (Over::Verbs, Mode::Seeded)),
            (Network::Fabric, None, (Over::Fabric, Mode::Threads)),
        ] {
            assert_eq!(alone(&Options { network, mode, ..default_options() }), expected, "{network:?}, {mode:?}");
        }
    }
}
