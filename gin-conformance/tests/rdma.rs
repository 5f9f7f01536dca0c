// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite on virtual GPUs, whose ranks are threads, over RDMA devices: one trial for each case.
//!
//! `GIN_VERBS_DEVICES=a,b` names the devices, rank `n` uses the `n`th of them; by default the first that is up. Without
//! a device there is one trial, which is ignored with the reason. `scripts/soft-roce.sh` runs this in a virtual machine
//! that has devices.

use gin_conformance::cases;
use gin_conformance::host::{Carrier, Net, Setup, judge};
use gin_host::net::verbs::{Device, NoDevice, Verbs, VerbsConfig};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::sync::Arc;

fn devices() -> Result<Vec<Arc<Device>>, NoDevice> {
    let named = std::env::var("GIN_VERBS_DEVICES").unwrap_or_default();
    let names: Vec<&str> = named.split(',').filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        return Ok(vec![Device::open(&VerbsConfig::default())?]);
    }
    let open = |name: &&str| Device::open(&VerbsConfig { device: Some((*name).to_owned()), ..VerbsConfig::default() });
    names.iter().map(open).collect()
}

fn main() {
    let devices = match devices() {
        Ok(devices) => devices,
        Err(error) => {
            let ignored = move || Ok(Completion::ignored_with(error.to_string()));
            libtest_mimic::run(&Arguments::from_args(), vec![Trial::ignorable_test("rdma", ignored)]).exit();
        }
    };
    let carrier = Carrier::new("verbs", Verbs::factory(&devices));
    let mut trials = Vec::new();
    for (way, net, named_backend) in
        [("plain", Net::Plain, false), ("withhold", Net::Withhold, false), ("worst", Net::Worst, true)]
    {
        // A virtual machine without hardware support is slow.
        let setup = Setup { net, named_backend, carrier: carrier.clone(), patience: 100, ..Setup::threads() };
        for case in cases::all() {
            let (setup, name) = (setup.clone(), format!("rdma/{way}/{}", case.name));
            let run = move || judge(&case, &setup).map_err(Failed::from);

            trials.push(Trial::test(name, run));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
