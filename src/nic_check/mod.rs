// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin nic-check`: checks that a NIC executes the requests that kernels post.

mod report;

use crate::cli::{End, Failure, Format, NicCheck, Refused, SoftLink};
use gin_abi::mlx5::cqe::Syndrome;
use gin_nic::loopback::{self, Check, Failed};
use gin_nic::mlx5::Libraries;
use gin_nic::{Mlx5, Nic, NicConfig, probe};
use gin_soft_nic_host::{Fault, FaultKind};
use gin_soft_nic_host::{SoftConfig, SoftFabric};
use report::Report;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// Code of the acknowledgement timeout, 0.3 s: with seven retries the NIC reports a missing acknowledgement before a
/// check's deadline passes.
const ACK_TIMEOUT: u8 = 16;

/// Checks a NIC and prints the report. The table form prints each line as soon as its check ends.
///
/// # Errors
/// Refuses with the reason if it finds no NIC to check; returns the error of the writer.
pub(crate) fn run(arguments: &NicCheck, out: &mut impl Write) -> Result<End, Failure> {
    let config = NicConfig::default().port(arguments.port).gid_index(arguments.gid).ack_timeout(ACK_TIMEOUT);
    let Some(link) = arguments.soft else {
        return examine(&hardware(arguments, &config).map_err(refused)?, None, arguments, out);
    };
    let fabric = SoftFabric::default();
    let software = match link {
        SoftLink::Ethernet => SoftConfig::ethernet(0),
        SoftLink::Infiniband => SoftConfig::infiniband(0),
    };
    let nic = Nic::open(Arc::new(fabric.add(software)), config).map_err(refused)?;
    if let Some(entry) = arguments.fault_at {
        let kind = FaultKind::Fail(Syndrome::RemoteOperation);
        fabric.inject(Fault { device: None, queue: None, entry, kind })?;
    }
    let _server = fabric.serve()?;
    examine(&nic, Some(&fabric), arguments, out)
}

/// Opens the NIC that the arguments name.
fn hardware(arguments: &NicCheck, config: &NicConfig) -> Result<Arc<Nic>, Failure> {
    match &arguments.nic {
        Some(name) => Ok(Nic::open(Mlx5::open(&Libraries::default(), name)?, config.clone())?),
        None => first(config),
    }
}

/// Returns the refusal of a NIC or port that this machine lacks.
fn refused(reason: impl ToString) -> Failure {
    Refused(reason.to_string()).into()
}

/// Opens the first NIC of this host that can serve GPUs.
fn first(config: &NicConfig) -> Result<Arc<Nic>, Failure> {
    let mut refusals = Vec::new();
    for found in probe(&Libraries::default(), config)? {
        match found.nic {
            Ok(nic) => return Ok(nic),
            Err(_) => refusals.push(found.to_string()),
        }
    }
    Err(refusals.join("; ").into())
}

fn examine(
    nic: &Arc<Nic>,
    software: Option<&SoftFabric>,
    arguments: &NicCheck,
    out: &mut impl Write,
) -> Result<End, Failure> {
    let mut report = Report::new(nic, software.is_some());
    let json = arguments.format == Format::Json;
    let mut written = if json { Ok(()) } else { report.print_head(out) };
    let mut note = |check: &Check| {
        let check = report.add(check);
        if !json && written.is_ok() {
            written = check.print(out).and_then(|()| out.flush());
        }
    };
    loopback::check(nic, Duration::from_millis(arguments.deadline_ms), &mut note);
    if let Some(fabric) = software {
        note(&rules(fabric));
    }
    written?;
    if json {
        serde_json::to_writer(&mut *out, report.end())?;
        writeln!(out)?;
    } else {
        report.end().print_tail(out)?;
    }
    Ok(if report.passed { End::Right } else { End::Wrong })
}

/// Returns the check that only a software NIC has: its user kept the rules for which hardware defines no behaviour when
/// they are broken.
fn rules(fabric: &SoftFabric) -> Check {
    let outcome = match fabric.violations() {
        (None, _) => Ok("no doorbell, record or entry was out of order".to_owned()),
        (Some(first), count) => {
            let expected = "no broken rule of the software NIC".to_owned();
            let at = format!("queue {}: expected {}, found {}", first.queue, first.expected, first.seen);
            Err(Failed { expected, seen: format!("{count} broken rules, the first: {:?} at {at}", first.kind) })
        }
    };
    Check { name: report::RULES, outcome, took: Duration::ZERO }
}
