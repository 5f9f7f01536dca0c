// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite over libfabric, on virtual GPUs.
//!
//! | trials | ranks and provider |
//! | --- | --- |
//! | `fabric/hosts/` | two processes over `tcp`, each in its own network namespace, or over the loopback interface |
//! | `fabric/shm/` | two processes over `shm`, where signals wait for delivery |
//! | `fabric/PROVIDER/` | threads, over models of providers whose hardware is rare ([`libfabric_double`]) |
//! | `fabric/PROVIDER-gpu/` | the same, over models that reach memory of GPUs, in which all windows are |
//! | `fabric/staged/` | the same, over a model that does not reach the GPUs, so that data goes through host memory |
//! | `fabric/all_NAME/` | threads, only with `GIN_ALL_WAYS` |
//!
//! All but the last run a few cases in a few seconds; with `GIN_ALL_WAYS` all of them. Namespaces need root. Processes
//! count as hosts: loads and stores do not reach the other. Without libfabric there is one trial, which is ignored with
//! the reason.

use gin_conformance::cases;
use gin_conformance::host::{Carrier, Setup};
use gin_conformance::processes::{Group, Processes, Verdict};
use gin_conformance::serve::serve;
use gin_net::fabric::{Fabric, FabricConfig};
use gin_testkit::{PROVIDERS, PROVIDERS_FOR_GPUS, libfabric_double};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit of a case in processes. A case that does not hang takes far less.
const LIMIT: Duration = Duration::from_secs(120);

/// Variable that names the network interface of a process in a namespace.
const DOMAIN: &str = "GIN_FABRIC_DOMAIN";

/// The selected cases: transfers, order, the queue, signals of both kinds, and faults.
const SELECTED: [&str; 12] = [
    "a_put_of_every_size_arrives_before_its_signal_by_warp",
    "a_value_of_each_width_arrives_and_touches_nothing_else_by_block",
    "a_get_of_every_size_is_visible_after_a_flush_by_warp",
    "a_rank_puts_to_itself",
    "contexts_up_to_64_carry_puts_independently",
    "increments_and_additions_strong_and_weak_sum_up_by_warp",
    "blocks_of_many_threads_post_together",
    "many_threads_put_to_one_peer_through_queues_of_depth_2_and_4",
    "signals_at_addresses_can_be_reset_between_phases",
    "gets_have_arrived_after_a_flush_while_other_threads_post",
    "abort_ends_a_wait_of_each_kind_by_warp",
    "a_fault_of_another_rank_ends_a_wait_of_each_kind_by_warp",
];

fn config(provider: &str) -> FabricConfig {
    // Ranks share this machine's CPUs with other tests.
    FabricConfig::from_env().provider(provider.to_owned()).lost_after(Duration::from_secs(60))
}

fn carrier(name: &'static str, config: &FabricConfig) -> Result<Carrier, String> {
    let factory = Fabric::open(config).map_err(|error| error.to_string())?.factory();
    Ok(Carrier::new(name, factory.clone(), factory))
}

fn setup(carrier: Carrier) -> Setup {
    Setup { carrier, patience: 100, ..Setup::threads() }
}

/// Returns the setup of a group's process.
fn process(way: &str, processes: Processes) -> Option<Setup> {
    let (name, provider) = [("hosts", "tcp"), ("shm", "shm")].into_iter().find(|(name, _)| *name == way)?;
    let carrier = carrier(name, &config(provider)).inspect_err(|error| eprintln!("{error}")).ok()?;
    Some(Setup { processes: Some(processes), apart: true, ..setup(carrier) })
}

/// Two network namespaces that a cable connects.
struct Namespaces([String; 2]);

impl Namespaces {
    fn new() -> Result<Self, String> {
        let names = [0, 1].map(|rank| format!("gin-{}-{rank}", std::process::id()));
        let made = Self(names);
        let [a, b] = &made.0;
        let commands = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add gin0 netns {a} type veth peer name gin1 netns {b}"),
            format!("-n {a} address add {}/24 dev gin0", address(0)),
            format!("-n {b} address add {}/24 dev gin1", address(1)),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
            format!("-n {a} link set gin0 up"),
            format!("-n {b} link set gin1 up"),
        ];
        for command in commands {
            ip(&command)?;
        }
        // Until the kernel has noticed the cable, providers do not offer the interface.
        let until = Instant::now() + Duration::from_secs(5);
        for (name, link) in [(a, "gin0"), (b, "gin1")] {
            while !ip(&format!("-n {name} link show {link}"))?.contains("state UP") {
                if Instant::now() > until {
                    return Err(format!("the interface {link} does not come up"));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(made)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            // It does not exist if its creation failed.
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

/// Returns the address of a rank on the cable.
fn address(rank: u32) -> String {
    format!("10.255.7.{}", rank + 1)
}

fn ip(arguments: &str) -> Result<String, String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("ip {arguments}: {}", text.trim()))
    }
}

/// Returns a group of two processes, in two namespaces if there are some.
fn hosts(namespaces: Option<&Namespaces>) -> Group {
    let Some(Namespaces(names)) = namespaces else { return Group::new(2, LIMIT) };
    let names = names.clone();
    Group::started_by(2, LIMIT, move |rank, variables| {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &names[rank as usize]]).arg(std::env::current_exe()?);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.env("GIN_SUITE_ADDRESS", address(rank)).env(DOMAIN, format!("gin{rank}"));
        Ok(command)
    })
}

fn all_ways() -> bool {
    std::env::var_os("GIN_ALL_WAYS").is_some()
}

/// Adds cases for a group of two processes: the selected ones, or all.
fn across(trials: &mut Vec<Trial>, way: &'static str, group: Group, selected: &[&str]) {
    let group = Arc::new(group);
    for case in cases::all().into_iter().filter(|case| all_ways() || selected.contains(&&*case.name)) {
        let group = group.clone();
        trials.push(Trial::ignorable_test(format!("fabric/{way}/{}", case.name), move || {
            match group.run(way, case.name.as_ref()) {
                Verdict::Passed => Ok(Completion::Completed),
                Verdict::Skipped(reason) => Ok(Completion::ignored_with(reason)),
                Verdict::Failed(text) => Err(text.into()),
            }
        }));
    }
}

/// Adds cases for ranks as threads over each provider of [`libfabric_double`]: the selected ones, or all.
fn over_doubles(trials: &mut Vec<Trial>) {
    let library = match libfabric_double(Path::new(env!("CARGO_TARGET_TMPDIR"))) {
        Ok(library) => library.to_string_lossy().into_owned(),
        Err(reason) => {
            let ignored = move || Ok(Completion::ignored_with(reason));
            trials.push(Trial::ignorable_test("fabric/double", ignored));
            return;
        }
    };
    let hosts = PROVIDERS.map(|provider| (provider, provider, false));
    let gpus = PROVIDERS_FOR_GPUS.map(|provider| (provider, provider, true));
    for (way, provider, in_gpus) in hosts.into_iter().chain(gpus).chain([("staged", PROVIDERS[0], true)]) {
        let config = config(provider).library(library.clone()).virtual_gpus(in_gpus);
        let carrier = carrier(way, &config).expect("the library has it");
        // A network that stages registers host memory, and these models take all windows to be in GPUs.
        let stages = |name: &str| name.ends_with("on_a_network_that_stages");
        let fits = |name: &str| !PROVIDERS_FOR_GPUS.contains(&provider) || !stages(name);
        let wanted = |name: &str| fits(name) && (all_ways() || SELECTED.contains(&name));
        for case in cases::all().into_iter().filter(|case| wanted(&case.name)) {
            let (setup, name) = (setup(carrier.clone()), format!("fabric/{way}/{}", case.name));
            trials.push(Trial::test(name, move || case.judge(&setup).map_err(Failed::from)));
        }
    }
}

fn main() -> ExitCode {
    if let Some(code) = serve(process) {
        return code;
    }
    for name in SELECTED {
        assert!(cases::all().iter().any(|case| case.name == name), "there is no case {name}");
    }
    let mut arguments = Arguments::from_args();
    let mut trials = Vec::new();
    let mut namespaces = None;
    over_doubles(&mut trials);
    match carrier("tcp", &config("tcp")) {
        Err(error) => {
            let ignored = move || Ok(Completion::ignored_with(error.clone()));
            trials.push(Trial::ignorable_test("fabric", ignored));
        }
        Ok(tcp) => {
            if !arguments.list {
                namespaces =
                    Namespaces::new().inspect_err(|error| eprintln!("over the loopback interface: {error}")).ok();
            }
            across(&mut trials, "hosts", hosts(namespaces.as_ref()), &SELECTED);
            across(&mut trials, "shm", Group::new(2, LIMIT), &SELECTED[..4]);
            if all_ways() {
                let mut ways = vec![("all_tcp", Ok(tcp))];
                ways.push(("all_unordered", carrier("tcp, unordered", &config("tcp").unordered(true))));
                ways.push(("all_shm", carrier("shm", &config("shm"))));
                for (way, carrier) in ways {
                    let carrier = match carrier {
                        Ok(carrier) => carrier,
                        Err(error) => {
                            let failed = move || Err(Failed::from(error));
                            trials.push(Trial::test(format!("fabric/{way}"), failed));
                            continue;
                        }
                    };
                    for case in cases::all() {
                        let (setup, name) = (setup(carrier.clone()), format!("fabric/{way}/{}", case.name));
                        trials.push(Trial::test(name, move || case.judge(&setup).map_err(Failed::from)));
                    }
                }
            }
        }
    }
    // Each case already has several threads or processes.
    arguments.test_threads.get_or_insert(1);
    let code = libtest_mimic::run(&arguments, trials).exit_code();
    drop(namespaces);
    code
}
