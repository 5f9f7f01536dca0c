// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that a run reports wrong results, over a network that loses the bytes of some puts.

use super::plan::default_plan;
use super::{Plan, Plans, Watch, run};
use crate::cli::{End, Format, Sizes, Workload, default_options};
use crate::command::{Printed, run_plans};
use gin_abi::Transfer;
use gin_host::comm::{CommConfig, Routes};
use gin_net::{Capabilities, Event, Fetch, Key, LocalSignals, LocalWindow, NetError, Network, Request};
use std::sync::Arc;

/// A network that loses the bytes of every third put and raises its signal.
#[derive(Debug)]
struct Lossy {
    inner: Box<dyn Network>,
    puts: u64,
}

impl Network for Lossy {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        self.inner.register_signals(signals)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        self.inner.connect_signals(keys)
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        self.inner.register(window)
    }

    fn fetch(&self) -> Option<Fetch> {
        self.inner.fetch()
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        self.inner.connect(window, keys)
    }

    fn deregister(&mut self, window: u32) -> bool {
        self.inner.deregister(window)
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let Some(mut request) = requests.first().copied() else { return 0 };
        let is_put = matches!(request.transfer, Transfer::Put { .. } | Transfer::PutValue { .. });
        if is_put && self.puts % 3 == 2 {
            request.transfer = Transfer::Nothing;
        }
        let taken = self.inner.post(&[request]);
        self.puts += u64::from(is_put && taken == 1);
        taken
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.inner.poll(events);
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        self.inner.make_visible()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

/// Returns the run of `workload` with few elements, whose requests all take the network.
fn plan(workload: Workload) -> Plan {
    let sizes =
        Sizes { bytes: 4096, contexts: 1, blocks: 1, threads: 32, iters: 2, warmup: 1, check: true, repeats: 1 };
    Plan { workload, ranks: 3, routes: Routes::Network, sizes, ..default_plan() }
}

/// Returns the same run over a network that loses bytes.
fn lossy(plan: Plan) -> Plan {
    let network = CommConfig::default().network;
    let lossy = move |endpoint: &_| -> Box<dyn Network> { Box::new(Lossy { inner: network(endpoint), puts: 0 }) };
    Plan { network: Some(Arc::new(lossy)), ..plan }
}

#[test]
fn lost_bytes_make_a_run_wrong_and_the_report_shows_the_first_difference() {
    for workload in [Workload::Ring, Workload::Alltoall, Workload::Halo] {
        let right = run(&plan(workload), None, &Watch::default()).unwrap();
        assert!(right.verified == Some(true) && right.errors == 0 && right.first_difference.is_none(), "{right:?}");
        let wrong = run(&lossy(plan(workload)), None, &Watch::default()).unwrap();
        assert!(wrong.verified == Some(false) && wrong.errors > 0, "{wrong:?}");
        let difference = wrong.first_difference.as_deref().unwrap_or_default();
        assert!(difference.starts_with("rank ") && difference.contains("expected "), "{difference}");
    }
}

#[test]
fn one_wrong_run_among_right_runs_makes_the_command_end_wrong_after_all_results() {
    let end = |all: Vec<Plan>| {
        let (runs, mut out) = (all.len(), Vec::new());
        let end = run_plans(&Plans { all, note: None }, &Printed::of(&default_options(), Format::Json), None, &mut out)
            .unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.lines().count(), runs, "{text}");
        (end, text.matches("\"verified\":false").count())
    };
    let right = || plan(Workload::Ring);
    assert_eq!(end(vec![right(), right()]), (End::Right, 0));
    assert_eq!(end(vec![right(), lossy(right()), right()]), (End::Wrong, 1));
}
