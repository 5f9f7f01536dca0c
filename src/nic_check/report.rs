// SPDX-License-Identifier: MIT OR Apache-2.0
//! The report of a NIC check, for an issue.

use gin_nic::Nic;
use gin_nic::hca::Link;
use gin_nic::loopback::{Check, names};
use serde::Serialize;
use std::fs;
use std::io::{self, Write};
use std::net::Ipv6Addr;

/// Name of the check that only software NICs have.
pub(super) const RULES: &str = "rules";

/// The capabilities of a NIC.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Abilities {
    send_queue_slots: u64,
    completion_queue_slots: u64,
    reads_under_way: u64,
    reads_answered: u64,
    message_bytes: u64,
    core_direct: bool,
    udp_source_ports: Option<(u16, u16)>,
}

/// The row of one check in the report.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct CheckRow {
    name: &'static str,
    passed: bool,
    took_ms: f64,
    /// The expected value, if the check saw another one.
    expected: Option<String>,
    seen: String,
}

/// The report of a NIC check.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    abi_version: u32,
    /// The NIC is a software NIC of this process, not hardware.
    software: bool,
    nic: String,
    /// Firmware version, as the operating system reports it.
    firmware: Option<String>,
    /// Board identifier, as the operating system reports it.
    board: Option<String>,
    /// Release of the operating system.
    kernel: Option<String>,
    port: u8,
    link: String,
    /// Local identifier, on InfiniBand.
    lid: Option<u16>,
    mtu: u32,
    gid_index: u32,
    gid: String,
    capabilities: Abilities,
    checks: Vec<CheckRow>,
    /// Checks that did not run because the queue pairs did not connect.
    not_tried: Vec<&'static str>,
    /// All checks ran and passed.
    pub(super) passed: bool,
}

/// Returns the first line of a system file, if it is not empty.
fn first_line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}

impl Report {
    pub(super) fn new(nic: &Nic, software: bool) -> Self {
        let (name, port, can, gid) = (&nic.name, nic.port, &nic.capabilities, nic.gid);
        let of_device =
            |file| if software { None } else { first_line(&format!("/sys/class/infiniband/{name}/{file}")) };
        Self {
            version: env!("CARGO_PKG_VERSION"),
            abi_version: gin_abi::ABI_VERSION,
            software,
            nic: name.clone(),
            firmware: of_device("fw_ver"),
            board: of_device("board_id"),
            kernel: first_line("/proc/sys/kernel/osrelease"),
            port: nic.config.port,
            link: port.link.to_string(),
            lid: (port.link == Link::InfiniBand).then_some(port.lid),
            mtu: nic.mtu().bytes(),
            gid_index: gid.index,
            gid: Ipv6Addr::from(gid.gid).to_string(),
            capabilities: Abilities {
                send_queue_slots: can.max_depth,
                completion_queue_slots: can.max_completions,
                reads_under_way: 1 << can.log_reads,
                reads_answered: 1 << can.log_answers,
                message_bytes: 1 << can.log_message,
                core_direct: can.core_direct,
                udp_source_ports: (port.link == Link::Ethernet).then(|| (*can.udp_ports.start(), *can.udp_ports.end())),
            },
            checks: Vec::new(),
            not_tried: Vec::new(),
            passed: false,
        }
    }

    /// Adds the result of a check and returns its row for printing.
    pub(super) fn add(&mut self, check: &Check) -> CheckRow {
        let (expected, seen) = match &check.outcome {
            Ok(seen) => (None, seen.clone()),
            Err(failed) => (Some(failed.expected.clone()), failed.seen.clone()),
        };
        let took_ms = (check.took.as_secs_f64() * 1e4).round() / 10.0;
        let row = CheckRow { name: check.name, passed: check.outcome.is_ok(), took_ms, expected, seen };
        self.checks.push(row.clone());
        row
    }

    /// Completes the report after the last check.
    pub(super) fn end(&mut self) -> &Self {
        let tried = |name: &&str| self.checks.iter().any(|check| check.name == *name);
        self.not_tried = names().filter(|name| !tried(name)).collect();
        self.passed = self.not_tried.is_empty() && self.checks.iter().all(|check| check.passed);
        self
    }

    pub(super) fn print_head(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "gin {}, shared layouts version {}: nic-check", self.version, self.abi_version)?;
        if self.software {
            writeln!(out, "SOFTWARE NIC: part of this process, no hardware")?;
        }
        let known = |what: &Option<String>| what.clone().unwrap_or_else(|| "unknown".to_owned());
        writeln!(out, "\n  NIC           {}", self.nic)?;
        if !self.software {
            writeln!(out, "  firmware      {}, board {}", known(&self.firmware), known(&self.board))?;
        }
        writeln!(out, "  kernel        {}", known(&self.kernel))?;
        let lid = self.lid.map_or(String::new(), |lid| format!(", LID {lid}"));
        writeln!(out, "  port          {}: {}{lid}, MTU {}", self.port, self.link, self.mtu)?;
        writeln!(out, "  GID           {}: {}", self.gid_index, self.gid)?;
        let can = &self.capabilities;
        writeln!(
            out,
            "  queues        send: up to {} slots, completion: up to {}",
            can.send_queue_slots, can.completion_queue_slots
        )?;
        writeln!(
            out,
            "  reads         {} outstanding as requester, {} as responder; messages of up to {} bytes",
            can.reads_under_way, can.reads_answered, can.message_bytes
        )?;
        writeln!(out, "  core-direct   {}", if can.core_direct { "yes" } else { "no" })?;
        if let Some((first, last)) = can.udp_source_ports {
            writeln!(out, "  UDP sources   {first} to {last}")?;
        }
        writeln!(out)
    }

    pub(super) fn print_tail(&self, out: &mut impl Write) -> io::Result<()> {
        if !self.not_tried.is_empty() {
            writeln!(out, "  did not run: {}", self.not_tried.join(", "))?;
        }
        let passed = self.checks.iter().filter(|check| check.passed).count();
        let all = self.checks.len() + self.not_tried.len();
        let whose = if self.software { " by a software NIC" } else { "" };
        let verdict = if self.passed { "" } else { ": FAILED" };
        writeln!(out, "\n{passed} of {all} checks passed{whose}{verdict}")
    }
}

impl CheckRow {
    pub(super) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let result = if self.passed { "ok" } else { "FAILED" };
        write!(out, "  {:<21}{result:<8}{:>9.1} ms  ", self.name, self.took_ms)?;
        match &self.expected {
            None => writeln!(out, "{}", self.seen),
            Some(expected) => writeln!(out, "expected {expected}; saw {}", self.seen),
        }
    }
}
