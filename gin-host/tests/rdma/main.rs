// SPDX-License-Identifier: MIT OR Apache-2.0
//! The network `verbs` on RDMA devices, without proxy and kernels: arrivals, withheld data, and failing requests.
//!
//! `GIN_VERBS_DEVICES=a,b` names the devices of ranks 0 and 1; by default both use the first device that is up. Without
//! a device there is one trial, which is ignored with the reason. `GIN_VERBS_WIRE=a,b` names two network interfaces
//! below the devices, whose packets the trials lose, delay and cut (`tc`, `ip`). Without it those trials are ignored.
//! The virtual machine of `scripts/soft-roce.sh` has all of these.

mod faults;
#[path = "../common/machines.rs"]
mod machines;
mod members;
mod moves;
mod pair;
mod ports;
mod pulse;
mod wire;
mod words;

use gin_net::verbs::{NoRdmaDevice, RdmaDevice, VerbsConfig, probe};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::process::ExitCode;

/// Returns the names of the devices of two ranks.
fn devices() -> Result<[String; 2], NoRdmaDevice> {
    let named = std::env::var("GIN_VERBS_DEVICES").unwrap_or_default();
    let mut names = named.split(',').filter(|name| !name.is_empty()).map(str::to_owned);
    match (names.next(), names.next()) {
        (Some(first), Some(second)) => Ok([first, second]),
        (Some(both), None) => Ok([both.clone(), both]),
        _ => {
            let name = RdmaDevice::open(&VerbsConfig::default())?.info.name.clone();
            Ok([name.clone(), name])
        }
    }
}

type Body = fn(&[String; 2]) -> Result<(), Failed>;

fn main() -> ExitCode {
    if let Some(code) = pulse::serve() {
        return code;
    }
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    if std::env::var_os("GIN_RDMA_HOSTS").is_some() {
        return faults::on_hosts(&arguments);
    }
    let devices = match devices() {
        Ok(devices) => devices,
        Err(error) => {
            let ignored = move || Ok(Completion::ignored_with(error.to_string()));
            return libtest_mimic::run(&arguments, vec![Trial::ignorable_test("rdma", ignored)]).exit_code();
        }
    };
    let mut trials = Vec::new();
    for (name, body) in moves::TRIALS {
        let devices = devices.clone();
        let body: Body = *body;
        trials.push(Trial::test(*name, move || body(&devices)));
    }
    for (name, body) in ports::TRIALS.iter().chain(words::TRIALS) {
        let devices = devices.clone();
        let body: Body = *body;
        trials.push(Trial::test(*name, move || body(&devices)));
    }
    trials.push(Trial::test("the_probe_tells_ports_packets_and_addresses", probed));
    let interfaces = std::env::var("GIN_VERBS_WIRE").ok();
    for (name, body) in wire::TRIALS.iter().chain(faults::TRIALS) {
        let (devices, interfaces) = (devices.clone(), interfaces.clone());
        trials.push(Trial::ignorable_test(*name, move || {
            let Some(interfaces) = &interfaces else {
                return Ok(Completion::ignored_with("GIN_VERBS_WIRE names no interfaces"));
            };
            body(&devices, &wire::Wire::new(interfaces)?).map(|()| Completion::Completed)
        }));
    }
    // The trials share the wire, so they run one after another.
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn probed() -> Result<(), Failed> {
    for info in probe(&VerbsConfig::default().library)? {
        let info = info?;
        for port in &info.ports {
            let gids: Vec<String> = port.gids.iter().map(|gid| format!("{gid} ({:?})", gid.kind)).collect();
            let mtu = port.mtu.map_or(0, |mtu| mtu.bytes());
            println!("{} port {}: up {}, packets of {mtu}, {}", info.name, port.number, port.is_up, gids.join(", "));
            pair::ensure(!port.is_up || (mtu >= 256 && !gids.is_empty()), || format!("{info:?}"))?;
        }
        pair::ensure(info.max_completions > 0 && info.reads_answered > 0, || format!("{info:?}"))?;
    }
    Ok(())
}
