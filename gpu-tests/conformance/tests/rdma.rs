// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite on virtual GPUs over RDMA devices, with one trial for each case and way to run it.
//!
//! | trials | ranks are |
//! | --- | --- |
//! | `rdma/plain/`, `rdma/withhold/`, `rdma/worst/` | threads, over the network unchanged and with the tests' behaviour on top |
//! | `rdma/smoke/` | threads, a selection of cases |
//! | `rdma/processes/` | two processes |
//! | `rdma/hosts/` | processes in two virtual machines, booted by this program; only if `GIN_RDMA_HOSTS` is set |
//!
//! `GIN_VERBS_DEVICES=a,b` names the devices. All ranks use all of them, and rank `n` begins with the `n`th; the
//! default is the first device that is up. The variables of `VerbsConfig::from_env` configure them. Without a device
//! there is one trial, which is ignored with the reason. `scripts/soft-roce.sh` runs this program in a virtual machine
//! with devices.

use gin_conformance::cases;
use gin_conformance::host::{Carrier, Net, Setup};
use gin_conformance::processes::{Group, Processes, Verdict};
use gin_conformance::scenario::CoopKind;
use gin_conformance::serve::serve;
use gin_net::verbs::{RdmaDevice, SignalsBy, VerbsConfig, VerbsNetwork};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Time limit of a case in processes. A case that does not hang takes far less.
const LIMIT: Duration = Duration::from_secs(240);

fn devices(config: &VerbsConfig) -> Result<Vec<Arc<RdmaDevice>>, String> {
    let named = std::env::var("GIN_VERBS_DEVICES").unwrap_or_default();
    let names: Vec<&str> = named.split(',').filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        return Ok(vec![RdmaDevice::open(config).map_err(|error| error.to_string())?]);
    }
    let open = |name: &&str| RdmaDevice::open(&config.clone().device(Some((*name).to_owned())));
    names.iter().map(open).collect::<Result<_, _>>().map_err(|error| error.to_string())
}

/// Returns a setup with threads over the devices. A virtual machine without hardware support is slow.
fn setup(carrier: &Carrier) -> Setup {
    Setup { carrier: carrier.clone(), patience: 100, ..Setup::threads() }
}

fn carrier() -> Result<Carrier, String> {
    let config = VerbsConfig::from_env().map_err(|error| error.to_string())?;
    let factory = |config| Ok::<_, String>(VerbsNetwork::factory(&devices(config)?));
    Ok(Carrier::new("verbs", factory(&config)?, factory(&config.clone().signals(SignalsBy::Proxy))?))
}

/// Returns the setup of a group's process.
fn process(way: &str, processes: Processes) -> Option<Setup> {
    ["processes", "hosts"].contains(&way).then_some(())?;
    Some(Setup { processes: Some(processes), apart: way == "hosts", ..setup(&carrier().ok()?) })
}

/// Returns whether a case's kernels load from and store to memory of other ranks, which does not work between hosts.
fn loads_and_stores(name: &str) -> bool {
    let words = ["lsa", "route", "loads", "bulk", "engine", "team", "rail", "combined", "a_raise_after_a_reset"];
    words.iter().any(|word| name.contains(word))
}

/// Adds the cases for a group of two processes. `shared` is set if each process reaches the other's memory.
fn across(trials: &mut Vec<Trial>, way: &'static str, group: Group, shared: bool) {
    let group = Arc::new(group);
    for case in cases::all().into_iter().filter(|case| shared || !loads_and_stores(&case.name)) {
        let group = group.clone();
        trials.push(Trial::ignorable_test(format!("rdma/{way}/{}", case.name), move || {
            match group.run(way, case.name.as_ref()) {
                Verdict::Passed => Ok(Completion::Completed),
                Verdict::Skipped(reason) => Ok(Completion::ignored_with(reason)),
                Verdict::Failed(text) => Err(text.into()),
            }
        }));
    }
}

/// Selects, of cases for every kind of group, the one for warps, and of the others all except those on networks of
/// tests.
fn is_smoke(name: &str) -> bool {
    let coop = name.rsplit_once("_by_").map(|(_, coop)| coop);
    match CoopKind::ALL.into_iter().find(|kind| Some(kind.name()) == coop) {
        Some(kind) => kind == CoopKind::Warp,
        None => !name.contains("_on_a_network_that_"),
    }
}

/// Returns a group of two virtual machines.
fn hosts() -> Result<Group, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/soft-roce.sh");
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    // Each boot uses another virtual wire.
    let number = AtomicU32::new(0);
    Ok(Group::started_by(2, LIMIT, move |rank, variables| {
        let boot = number.fetch_add(1, Ordering::Relaxed) / 2;
        let wire = std::env::temp_dir().join(format!("gin-wire-{}-{boot}", std::process::id()));
        let mut command = Command::new(&script);
        command.args(["--input", "--seconds", "3600", "--host", &(rank + 1).to_string()]).arg(wire);
        if rank > 0 {
            // Only one machine prints its facts.
            command.arg("--no-facts");
        }
        let address = ("GIN_SUITE_ADDRESS", format!("10.8.0.{}", rank + 1));
        let devices = ("GIN_VERBS_DEVICES", "rxe3".to_owned());
        for (name, value) in variables.iter().chain([&address, &devices]) {
            command.arg("--env").arg(format!("{name}={value}"));
        }
        command.arg("--").arg(&program);
        Ok(command)
    }))
}

fn main() -> ExitCode {
    if let Some(code) = serve(process) {
        return code;
    }
    let mut arguments = Arguments::from_args();
    let mut trials = Vec::new();
    if std::env::var_os("GIN_RDMA_HOSTS").is_some() {
        match hosts() {
            Ok(group) => across(&mut trials, "hosts", group, false),
            Err(error) => trials.push(Trial::test("rdma/hosts", move || Err(Failed::from(error)))),
        }
    }
    match carrier() {
        Ok(carrier) => {
            for (way, net, named_backend) in
                [("plain", Net::Plain, false), ("withhold", Net::Withhold, false), ("worst", Net::Worst, true)]
            {
                let setup = Setup { net, named_backend, ..setup(&carrier) };
                for case in cases::all() {
                    let (setup, name) = (setup.clone(), format!("rdma/{way}/{}", case.name));
                    trials.push(Trial::test(name, move || case.judge(&setup).map_err(Failed::from)));
                }
            }
            let setup = setup(&carrier);
            for case in cases::all().into_iter().filter(|case| is_smoke(&case.name)) {
                let (setup, name) = (setup.clone(), format!("rdma/smoke/{}", case.name));
                trials.push(Trial::test(name, move || case.judge(&setup).map_err(Failed::from)));
            }
            across(&mut trials, "processes", Group::new(2, LIMIT), true);
        }
        Err(error) => {
            let ignored = move || Ok(Completion::ignored_with(error.clone()));
            trials.push(Trial::ignorable_test("rdma", ignored));
        }
    }
    // Each case already has several threads or processes.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}
