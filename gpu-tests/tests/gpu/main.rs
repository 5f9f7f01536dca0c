// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests on real GPUs: the conformance suite, with ranks that share one GPU and with one GPU for each, by each route
//! and over each test network; its ability to notice mistakes there; effects that only hardware shows; and driver calls
//! beside a kernel that does not end.
//!
//! A GPU runs one trial at a time; several GPUs run trials concurrently, each in its process. Without a GPU all are
//! ignored, with the reason. A trial that hangs ends the run. With `GIN_GPU_JOURNAL=FILE` the results are kept in that
//! file, and the next run continues after it. After `GIN_GPU_SECONDS=N` seconds the remaining trials are ignored.

use gin_conformance::cases;
use gin_conformance::host::{Carrier, Net, Setup, SetupBackend, SetupRoute, SetupWindows};
use gin_conformance::processes::{Group, Processes, Verdict};
use gin_conformance::saboteurs::{self, Saboteur, Tally};
use gin_conformance::serve::serve;
use gin_gpu::Devices;
use gin_net::fabric::{Fabric, FabricConfig};
use gin_nic::DoorbellRelease;
use gin_soft_nic_host::SoftEngine;
use gpu_tests::ep;
use gpu_tests::gpus::{self, Gpus};
use gpu_tests::hardware;
use gpu_tests::journal::{Journal, Outcome};
use gpu_tests::matmul;
use gpu_tests::places::{self, Places};
use gpu_tests::primitives;
use gpu_tests::testbed::Testbed;
use gpu_tests::watchdog::{self, Watchdog};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Time limit of a trial. The first one of a module waits until the driver has compiled its kernels. `ptxas` takes 20 s
/// for the kernels of expert parallelism.
const TRIAL_LIMIT: Duration = Duration::from_secs(90);

/// Time limit of a trial with several processes, of which the first loads the kernels in each.
const PROCESS_LIMIT: Duration = Duration::from_secs(150);

/// CPUs that a trial keeps busy: up to four ranks, with their proxies or NICs.
const CPUS_OF_TRIAL: usize = 8;

/// Numbers of GPUs over which ranks are spread.
const COUNTS: [usize; 4] = [1, 2, 4, 8];

/// Ways to run the suite with a process for each GPU.
const PROCESS_WAYS: [(&str, Net, SetupRoute, SetupWindows); 5] = [
    ("network", Net::Plain, SetupRoute::Network, SetupWindows::Allocated),
    (FABRIC, Net::Plain, SetupRoute::Network, SetupWindows::Allocated),
    ("reorder", Net::Reorder, SetupRoute::Network, SetupWindows::Registered),
    ("auto", Net::Plain, SetupRoute::Auto, SetupWindows::Registered),
    ("lsa", Net::Plain, SetupRoute::Lsa, SetupWindows::Allocated),
];

/// The way over libfabric, by the provider `tcp` or that of `GIN_FABRIC_PROVIDER`.
const FABRIC: &str = "fabric";

/// Returns the carrier of [`FABRIC`]; the error says why there is none.
fn fabric() -> Result<Carrier, String> {
    let factory = Fabric::open(&FabricConfig::from_env()).map_err(|error| error.to_string())?.factory();
    Ok(Carrier::new(FABRIC, factory.clone(), factory))
}

/// Start of the name of a way whose processes all use the first GPU.
const ONE_GPU: &str = "one_gpu_";

/// Returns the setup of a group's process, which uses the GPU with the process's number, or the first one.
fn process_setup(way: &str, processes: Processes) -> Option<Setup> {
    static DEVICES: OnceLock<Result<Devices, String>> = OnceLock::new();
    let (ordinal, way) = match way.strip_prefix(ONE_GPU) {
        Some(way) => (0, way),
        None => (processes.rank() as usize, way),
    };
    let &(_, net, route, windows) = PROCESS_WAYS.iter().find(|(name, ..)| *name == way)?;
    // A process belongs to one group, whose ways all have the same GPU for it.
    let devices = DEVICES.get_or_init(|| gpus::devices(&[ordinal]));
    let devices = match devices {
        Ok(devices) => devices.clone(),
        Err(reason) => {
            eprintln!("process {}: {reason}", processes.rank());
            return None;
        }
    };
    let carrier = if way == FABRIC { fabric() } else { Ok(Carrier::default()) };
    let carrier = carrier.inspect_err(|error| eprintln!("process {}: {error}", processes.rank())).ok()?;
    let setup = Setup { devices: Some(devices), net, carrier, route, windows, ..Setup::threads() };
    Some(Setup { processes: Some(processes), ..setup })
}

/// Adds the suite with a process for each of `count` GPUs, or with `count` processes on the first GPU.
fn add_processes(trials: &mut Vec<GpuTrial>, count: usize, one_gpu: bool, run: &Run) {
    let group = Arc::new(Group::new(count as u32, PROCESS_LIMIT));
    let (prefix, start) = if one_gpu { ("cuda/1_gpu", ONE_GPU) } else { ("cuda", "") };
    // On one GPU processes take turns, and memory of another process is on the same GPU.
    let on_one = |way: &str| ["network", "lsa"].contains(&way) || way == FABRIC && count == 2;
    let ways = PROCESS_WAYS.iter().filter(|(way, ..)| !one_gpu || on_one(way));
    let no_fabric = fabric().err();
    for &(way, _, route, _) in ways {
        for case in cases::for_setup(SetupBackend::Proxy, route) {
            let (group, run, way_name) = (group.clone(), run.clone(), format!("{start}{way}"));
            let missing = no_fabric.clone().filter(|_| way == FABRIC);
            let name = format!("{prefix}/{count}_processes/{way}/{}", case.name);
            let body = Box::new(move || {
                if run.is_over() {
                    return Ok(over());
                }
                if let Some(reason) = missing {
                    return Ok(Completion::ignored_with(reason));
                }
                match group.run(&way_name, &case.name) {
                    Verdict::Passed => Ok(Completion::Completed),
                    Verdict::Skipped(reason) => Ok(Completion::ignored_with(reason)),
                    Verdict::Failed(text) => Err(text.into()),
                }
            });
            trials.push(GpuTrial { name, gpus: if one_gpu { 1 } else { count }, body });
        }
    }
}

fn main() -> ExitCode {
    if let Some(code) = serve(process_setup) {
        return code;
    }
    let found = gpus::find();
    if places::is_worker() {
        let run = Run { journal: None, watchdog: Watchdog::start(TRIAL_LIMIT), end: None };
        let trials = all(&found, &run).into_iter().map(|trial| (trial.name, trial.body));
        let mut bodies: HashMap<String, GpuBody> = trials.collect();
        places::serve(|name| bodies.remove(name).ok_or_else(|| Failed::from("there is no such trial"))?());
        return ExitCode::SUCCESS;
    }
    let mut arguments = Arguments::from_args();
    let found = if arguments.list { Err("only names are listed".to_owned()) } else { found };
    if !arguments.list {
        match &found {
            Ok(gpus) => println!("{}", gpus.text),
            Err(reason) => println!("All trials are ignored: {reason}"),
        }
    }
    // Ranks of a trial, their proxies and NICs are threads that poll.
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let gpus = found.as_ref().map_or(1, |gpus| gpus.count);
    let at_once = gpus.min(cpus / CPUS_OF_TRIAL).max(1);
    arguments.test_threads = Some(at_once);
    let places = Arc::new(Places::new(gpus.max(1)));
    let journal = std::env::var_os("GIN_GPU_JOURNAL").map(|path| match Journal::open(Path::new(&path)) {
        Ok(journal) => Arc::new(journal),
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            std::process::exit(2);
        }
    });
    let watchdog = Watchdog::start(TRIAL_LIMIT);
    let seconds = std::env::var("GIN_GPU_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let run = Run { journal, watchdog, end };
    let trials = all(&found, &run).into_iter().map(|trial| {
        let (places, run) = (places.clone(), run.clone());
        Trial::ignorable_test(trial.name.clone(), move || run.place(&places, trial))
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// Returns all trials, which all are ignored if no GPUs were found.
fn all(found: &Result<Gpus, String>, run: &Run) -> Vec<GpuTrial> {
    let mut trials = Vec::new();
    for count in COUNTS {
        add(&mut trials, count, found, run);
        // One process for each GPU.
        if count > 1 && found.as_ref().is_ok_and(|gpus| gpus.count >= count) {
            add_processes(&mut trials, count, false, run);
        }
        if count == 1 && found.is_ok() {
            for processes in [2, 3] {
                add_processes(&mut trials, processes, true, run);
            }
        }
    }
    trials
}

/// A trial on GPUs.
struct GpuTrial {
    name: String,
    gpus: usize,
    body: GpuBody,
}

/// Runs a trial in this process.
type GpuBody = Box<dyn FnOnce() -> Result<Completion, Failed> + Send>;

/// Says that a trial did not run.
fn over() -> Completion {
    Completion::ignored_with("the time limit of this run is over")
}

/// The environment of all trials: watchdog, journal and time limit.
#[derive(Clone)]
struct Run {
    journal: Option<Arc<Journal>>,
    watchdog: Watchdog,
    end: Option<Instant>,
}

impl Run {
    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() > end)
    }

    /// Runs a trial on the first of these places that is free, here or in a worker.
    fn place(&self, places: &Places, trial: GpuTrial) -> Result<Completion, Failed> {
        let name = trial.name;
        places.run(trial.gpus, trial.body, |worker| {
            let known = self.journal.as_ref().and_then(|journal| journal.known(&name)).cloned();
            match known {
                Some(outcome) => return outcome.map(|()| Completion::Completed).map_err(Failed::from),
                None if self.is_over() => return Ok(over()),
                None => {}
            }
            let mut completion = Completion::Completed;
            let mut ask = || worker.ask(&name).map(|result| completion = result);
            let failed = |failure: Option<String>| {
                failure.unwrap_or_else(|| {
                    eprintln!("{name} ended the process of its GPUs");
                    std::process::exit(watchdog::STATUS);
                })
            };
            let outcome = match &self.journal {
                Some(journal) => journal.run(&name, || ask().map_err(failed)),
                None => ask().map_err(failed),
            };
            outcome.map(|()| completion).map_err(Failed::from)
        })
    }

    /// Runs a trial in this process.
    fn trial(&self, name: &str, gpus: &[usize], trial: impl FnOnce() -> Outcome) -> Result<Completion, Failed> {
        let new = self.journal.as_ref().is_none_or(|journal| journal.known(name).is_none());
        if new && self.is_over() {
            return Ok(over());
        }
        let watched = || self.watchdog.watch(name, trial);
        let Some(journal) = &self.journal else {
            return watched().map(|()| Completion::Completed).map_err(Failed::from);
        };
        let outcome = journal.run(name, watched);
        if let (true, Err(error)) = (new, &outcome)
            && !gpus::work(gpus)
        {
            eprintln!("{name} failed, and this process cannot use the GPU any more: {error}");
            std::process::exit(watchdog::STATUS);
        }
        outcome.map(|()| Completion::Completed).map_err(Failed::from)
    }
}

fn add(trials: &mut Vec<GpuTrial>, count: usize, found: &Result<Gpus, String>, run: &Run) {
    let (prefix, there) = (format!("cuda/{count}_gpu"), found.as_ref().map_or(0, |gpus| gpus.count));
    // Without any GPU, one count stands for all.
    let missing = there < count;
    if missing && (there > 0 || count > 1) {
        return;
    }
    let gpus: Arc<[usize]> = (0..count).collect();
    // Trials on missing GPUs are ignored; trials on GPUs that cannot be used fail.
    let devices = match found {
        Ok(_) => Ok(gpus::devices(&gpus)),
        Err(reason) => Err(reason.clone()),
    };
    let mut add = |name: String, body: Body| {
        let (own, gpus, devices, run) = (name.clone(), gpus.clone(), devices.clone(), run.clone());
        let body = Box::new(move || {
            let devices = match devices {
                Ok(devices) => devices?,
                Err(reason) => return Ok(Completion::ignored_with(reason)),
            };
            run.trial(&own, &gpus, || body(&gpus, devices))
        });
        trials.push(GpuTrial { name, gpus: count, body });
    };
    for (text, route, windows) in [
        ("", SetupRoute::Network, SetupWindows::Allocated),
        ("auto/", SetupRoute::Auto, SetupWindows::Registered),
        ("lsa/", SetupRoute::Lsa, SetupWindows::Allocated),
    ] {
        for case in cases::for_setup(SetupBackend::Proxy, route) {
            let name = format!("{prefix}/{text}{}", case.name);
            let setup = move |devices| Setup { devices: Some(devices), route, windows, ..Setup::threads() };
            add(name, Box::new(move |_, devices| case.judge(&setup(devices))));
        }
    }
    for (text, net) in NETWORKS {
        for case in cases::for_setup(SetupBackend::Proxy, SetupRoute::Network) {
            let name = format!("{prefix}/{text}/{}", case.name);
            let setup = move |devices| Setup { devices: Some(devices), net, ..Setup::threads() };
            add(name, Box::new(move |_, devices| case.judge(&setup(devices))));
        }
    }
    for (text, engine) in ENGINES {
        let setup = move |devices, net| {
            let backend = SetupBackend::Gdaki;
            Setup { devices: Some(devices), backend, engine, net, ..Setup::threads() }
        };
        for (net_text, net, release) in NIC_WAYS {
            // Rings that a CPU reads are in pinned memory, which no release to the GPU covers.
            if release == DoorbellRelease::Gpu && engine != SoftEngine::Kernel {
                continue;
            }
            // Scripts with GDAKI inlined take too long to compile for GPUs.
            let named = |case: &cases::Case| case.name.ends_with("_named");
            let all = cases::for_setup(SetupBackend::Gdaki, SetupRoute::Network);
            for case in all.into_iter().filter(|case| !named(case)) {
                let name = format!("{prefix}/{text}{net_text}/{}", case.name);
                let setup = move |devices| Setup { release, ..setup(devices, net) };
                add(name, Box::new(move |_, devices| case.judge(&setup(devices))));
            }
        }
        for (trial_name, trial) in hardware::NIC_TRIALS {
            let name = format!("{prefix}/{text}/hardware/{trial_name}");
            let trial = move |gpus: &[usize], devices| trial(&Testbed::real(devices, gpus.len()).driving(engine));
            add(name, Box::new(trial));
        }
        for (trial_name, trial) in ep::NETWORK_TRIALS {
            let trial = move |gpus: &[usize], devices| trial(&Testbed::real(devices, gpus.len()).driving(engine));
            add(format!("{prefix}/{text}/ep/{trial_name}"), Box::new(trial));
        }
        for saboteur in saboteurs::of_nics() {
            let name = format!("{prefix}/{text}/the_suite_notices/{}", saboteur.name);
            add(name, Box::new(move |_, devices| notices(&saboteur, &setup(devices, Net::Plain))));
        }
    }
    for saboteur in saboteurs::all() {
        let name = format!("{prefix}/the_suite_notices/{}", saboteur.name);
        let setup = |devices| Setup { devices: Some(devices), ..Setup::threads() };
        add(name, Box::new(move |_, devices| notices(&saboteur, &setup(devices))));
    }
    for (name, trial) in hardware::TRIALS {
        add(
            format!("{prefix}/hardware/{name}"),
            Box::new(move |gpus, devices| trial(&Testbed::real(devices, gpus.len()))),
        );
    }
    for (name, trial) in primitives::TRIALS {
        let trial = move |gpus: &[usize], devices| trial(&Testbed::real(devices, gpus.len()));
        add(format!("{prefix}/primitives/{name}"), Box::new(trial));
    }
    for (name, trial) in ep::TRIALS.into_iter().chain(ep::NETWORK_TRIALS) {
        let trial = move |gpus: &[usize], devices| trial(&Testbed::real(devices, gpus.len()));
        add(format!("{prefix}/ep/{name}"), Box::new(trial));
    }
    for (name, trial) in matmul::TRIALS {
        let trial = move |gpus: &[usize], devices| trial(&Testbed::real(devices, gpus.len()));
        add(format!("{prefix}/matmul/{name}"), Box::new(trial));
    }
    for (name, trial) in RAW {
        add(format!("{prefix}/hardware/{name}"), Box::new(trial));
    }
    #[cfg(feature = "cuda")]
    {
        let name = format!("{prefix}/hardware/ranks_and_windows_of_nccl_are_those_of_gin_between_its_collectives");
        match gpu_tests::nccl::find() {
            Ok(()) => add(name, Box::new(gpu_tests::nccl::meets)),
            Err(reason) => {
                let body = Box::new(move || Ok(Completion::ignored_with(reason)));
                trials.push(GpuTrial { name, gpus: count, body });
            }
        }
    }
}

/// The networks that use the contract's liberties as far as they go.
const NETWORKS: [(&str, Net); 5] = [
    ("delay", Net::Delay { ns: 10_000 }),
    ("reorder", Net::Reorder),
    ("withhold", Net::Withhold),
    ("worst", Net::Worst),
    ("staged", Net::Staged),
];

/// Engines of NICs behind device-driven queue pairs.
const ENGINES: [(&str, SoftEngine); 2] = [("gdaki_thread", SoftEngine::Thread), ("gdaki_kernel", SoftEngine::Kernel)];

/// Ways to run the suite over device-driven NIC queue pairs.
const NIC_WAYS: [(&str, Net, DoorbellRelease); 3] = [
    ("", Net::Plain, DoorbellRelease::System),
    ("_worst", Net::Worst, DoorbellRelease::System),
    ("_released_to_gpu", Net::Plain, DoorbellRelease::Gpu),
];

/// Number of runs in which a case may notice a mistake, because real time decides.
const TRIES: usize = 5;

/// Checks that the cases that must notice a mistake do.
fn notices(saboteur: &Saboteur, setup: &Setup) -> Outcome {
    let mut tally = Tally::default();
    for _ in 0..TRIES {
        for net in [Net::Plain, Net::Delay { ns: 20_000 }] {
            let setup = setup.with_network(net);
            for case in saboteur.cases() {
                if !tally.right.contains(&case.name) {
                    saboteur.run(&case, &setup, &mut tally);
                }
            }
        }
        if saboteur.verdict(tally.clone()).is_ok() {
            break;
        }
    }
    println!("{}", saboteur.verdict(tally)?);
    Ok(())
}

/// Body of a trial, which runs on GPUs.
type Body = Box<dyn FnOnce(&[usize], Devices) -> Outcome + Send>;

/// Name and body of a trial that calls the driver itself.
type RawTrial = (&'static str, fn(&[usize], Devices) -> Outcome);

/// Trials that call the driver themselves.
#[cfg(feature = "cuda")]
const RAW: [RawTrial; 11] = [
    ("a_module_is_unloaded_and_loaded_again_between_kernels", gpu_tests::raw::reload),
    ("ptx_is_compiled_if_the_driver_refuses_the_machine_code", gpu_tests::raw::refused_code),
    ("a_captured_graph_communicates_each_time_that_it_is_launched", gpu_tests::raw::graph),
    ("calls_made_while_kernels_run_do_not_wait_for_them", gpu_tests::calls::calls),
    ("stream_memory_and_module_of_another_program_are_shared_and_stay_its_own", gpu_tests::interop::share),
    ("memory_of_another_program_that_cannot_be_a_window_is_refused_with_the_reason", gpu_tests::interop::refused),
    ("memory_that_a_peer_does_not_reach_is_refused_on_all_ranks", gpu_tests::interop::unreached),
    ("a_launch_through_gin_into_a_captured_stream_becomes_part_of_the_graph", gpu_tests::interop::captured),
    ("frees_reloads_and_grids_of_full_size_happen_while_nics_have_a_kernel", gpu_tests::parking::parks),
    ("memory_is_a_file_for_a_nic_and_pages_are_mapped_or_refused", gpu_tests::sharing::shares),
    ("clusters_run_whole_and_those_that_do_not_fit_are_refused", gpu_tests::interop::clusters),
];

/// Empty in a build without a driver to call.
#[cfg(not(feature = "cuda"))]
const RAW: [RawTrial; 0] = [];
