// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cases. Each name is the sentence that the case proves.
//!
//! | module | cases about |
//! | --- | --- |
//! | `transfer` | bytes: puts, values and gets of every size, by every coop |
//! | `signals`, `ordering` | raises, widths, resets; promised orders |
//! | `completion`, `quiet` | counters, flushes and tokens; waits for arrival |
//! | `sync` | barriers and teams |
//! | `routes`, `inbox`, `atomics` | loads and stores, network; small messages; fetching atomics |
//! | `contention` | many threads that post at a time, also to full queues |
//! | `faults` | a full queue, which waits and loses nothing; ends of waits |
//! | `endings` | ends of waits |
//! | `arguments` | wrong arguments |
//! | `wrap`, `limits`, `corners` | numbers that wrap; many and no ids; empty transfers and the like |
//! | `nics` | queue pairs that kernels drive |

mod arguments;
mod atomics;
mod completion;
mod contention;
mod corners;
mod endings;
mod faults;
mod inbox;
mod limits;
mod nics;
mod ordering;
mod quiet;
mod routes;
mod signals;
mod sync;
mod transfer;
mod wrap;

use crate::host::{Setup, SetupBackend, SetupRoute};
use crate::scenario::{CoopKind, Outcome, Scenario, WRONG_BYTES};
use std::boxed::Box;
use std::format;
use std::string::String;
use std::vec::Vec;

/// Result of a case; the text says what went wrong.
pub type Verdict = Result<(), String>;

/// One case.
pub struct Case {
    /// The sentence that the case proves, its words joined by underscores.
    pub name: String,
    /// Set if the case is about the network: queues, requests and their results.
    pub network: bool,
    /// Set if the case is about networks with fewer abilities than others; a device-driven NIC is not one of them.
    pub weak: bool,
    /// Set if the case is about device-driven NIC queue pairs.
    pub nic: bool,
    /// Runs the case on a setup.
    pub run: Box<dyn Fn(&Setup) -> Verdict + Send + Sync>,
}

impl Case {
    /// Runs the case; the error says how to repeat it.
    ///
    /// # Errors
    /// Returns what the case found wrong, with the setup.
    pub fn judge(&self, setup: &Setup) -> Verdict {
        (self.run)(setup).map_err(|error| {
            let repeat = setup.repeat.as_ref().map_or(String::new(), |command| format!("\n  repeat: {command}"));
            format!("{error}\n  on: {}{repeat}", setup.name())
        })
    }
}

/// A list of cases under construction.
#[derive(Default)]
pub(crate) struct List(Vec<Case>);

impl List {
    /// Adds a case.
    pub(crate) fn case(&mut self, name: &str, run: impl Fn(&Setup) -> Verdict + Send + Sync + 'static) {
        self.0.push(Case { name: name.into(), network: false, weak: false, nic: false, run: Box::new(run) });
    }

    /// Adds a case about the network.
    pub(crate) fn network_case(&mut self, name: &str, run: impl Fn(&Setup) -> Verdict + Send + Sync + 'static) {
        self.0.push(Case { name: name.into(), network: true, weak: false, nic: false, run: Box::new(run) });
    }

    /// Adds a case about networks with fewer abilities than others.
    pub(crate) fn weak_case(&mut self, name: &str, run: impl Fn(&Setup) -> Verdict + Send + Sync + 'static) {
        self.0.push(Case { name: name.into(), network: true, weak: true, nic: false, run: Box::new(run) });
    }

    /// Adds a case about device-driven NIC queue pairs.
    pub(crate) fn nic_case(&mut self, name: &str, run: impl Fn(&Setup) -> Verdict + Send + Sync + 'static) {
        self.0.push(Case { name: name.into(), network: true, weak: false, nic: true, run: Box::new(run) });
    }

    /// Adds a case about loads and stores beside a network with fewer abilities.
    pub(crate) fn weak_lsa_case(&mut self, name: &str, run: impl Fn(&Setup) -> Verdict + Send + Sync + 'static) {
        self.0.push(Case { name: name.into(), network: false, weak: true, nic: false, run: Box::new(run) });
    }

    /// Adds a case about the network for each kind of group.
    pub(crate) fn network_per_coop(
        &mut self,
        name: &str,
        run: impl Fn(&Setup, CoopKind) -> Verdict + Send + Sync + Copy + 'static,
    ) {
        let first = self.0.len();
        self.per_coop(name, run);
        self.0[first..].iter_mut().for_each(|case| case.network = true);
    }

    /// Adds a case for each kind of group.
    pub(crate) fn per_coop(
        &mut self,
        name: &str,
        run: impl Fn(&Setup, CoopKind) -> Verdict + Send + Sync + Copy + 'static,
    ) {
        for coop in CoopKind::ALL {
            let name = format!("{name}_by_{}", coop.name());
            // A kernel with one back end compiled in knows the network only.
            let network = matches!(coop, CoopKind::ThreadNamed | CoopKind::BlockNamed);
            self.0.push(Case {
                name,
                network,
                weak: false,
                nic: false,
                run: Box::new(move |setup: &Setup| run(setup, coop)),
            });
        }
    }
}

/// Runs a scenario and checks that every operation succeeded.
pub(crate) fn run_ok(setup: &Setup, scenario: &Scenario) -> Result<Outcome, String> {
    let outcome = setup.run(scenario)?;
    outcome.check_ok(scenario)?;
    Ok(outcome)
}

/// Checks bytes `range` of a window.
pub(crate) fn expect_bytes(
    outcome: &Outcome,
    rank: u32,
    window: usize,
    offset: usize,
    expected: impl IntoIterator<Item = u8>,
) -> Verdict {
    let memory = &outcome.windows[rank as usize][window];
    for (index, byte) in expected.into_iter().enumerate() {
        match memory.get(offset + index) {
            Some(seen) if *seen == byte => {}
            seen => {
                return Err(format!(
                    "{WRONG_BYTES}: rank {rank}, window {window}, byte {}: expected {byte:#04x}, got {seen:?}",
                    offset + index
                ));
            }
        }
    }
    Ok(())
}

/// Returns `len` bytes of pattern `seed`.
pub(crate) fn pattern(seed: u64, len: u64) -> impl Iterator<Item = u8> {
    (0..len).map(move |index| crate::op::pattern(seed, index))
}

/// Returns the cases that apply to a setup with this back end and route, in a fixed order.
#[must_use]
pub fn for_setup(backend: SetupBackend, route: SetupRoute) -> Vec<Case> {
    let says = |case: &Case| {
        let backend_has = match backend {
            SetupBackend::Proxy => !case.nic,
            SetupBackend::Gdaki => !case.weak,
        };
        backend_has && (route == SetupRoute::Network || !case.network)
    };
    every().into_iter().filter(says).collect()
}

/// Returns all cases for the proxy, in a fixed order.
#[must_use]
pub fn all() -> Vec<Case> {
    for_setup(SetupBackend::Proxy, SetupRoute::Network)
}

/// Returns all cases of all back ends, in a fixed order.
#[must_use]
pub fn every() -> Vec<Case> {
    let mut list = List::default();
    transfer::add(&mut list);
    completion::add(&mut list);
    contention::add(&mut list);
    signals::add(&mut list);
    ordering::add(&mut list);
    quiet::add(&mut list);
    routes::add(&mut list);
    atomics::add(&mut list);
    inbox::add(&mut list);
    sync::add(&mut list);
    wrap::add(&mut list);
    arguments::add(&mut list);
    corners::add(&mut list);
    limits::add(&mut list);
    faults::add(&mut list);
    endings::add(&mut list);
    nics::add(&mut list);
    list.0
}
