// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages of a workload, and the servers that they pass.
//!
//! # Representative nodes
//!
//! All ranks run the same program, and the order of peers depends on their distance. So a shift of all ranks by one
//! node changes nothing: it maps messages to messages and servers to servers. Servers at the same place
//! of their nodes therefore have the same history. So the ranks of one node stand for all: a message to another node
//! passes the server at the same place of this node, where the same message of another node arrives at the same time.
//! That is exact, and a test compares it with a simulation of all ranks.
//!
//! `gin-ep` posts to remote ranks in the order of their numbers, from 0 on. So receivers with low numbers get their
//! bytes first, and the last receivers wait longest. The model does not have that.

use super::engine::{Message, Outcome, Ps, Stage, simulate};
use super::parameters::{Figure, Parameters, ps, transfer};
use crate::cli::Order;

/// The way of puts to ranks that loads and stores do not reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Path {
    /// The proxy posts to a NIC.
    Proxy,
    /// One thread of each context posts to a NIC.
    Gdaki,
    /// All blocks of the kernel post to a NIC.
    GdakiGrid,
    /// The proxy copies between the GPUs of a host.
    Copies,
}

/// The network between nodes. Each rank has a NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Topology {
    /// Each NIC reaches each other one; between rails over one switch more.
    Full,
    /// NICs reach the NICs of their own rail only. A rank first passes bytes for another rail to the rank of its node
    /// on that rail, which sends the bytes of its whole node together.
    Rails,
}

/// The number of servers of a rank beside the threads that post.
const SERVERS: usize = 5;

/// A workload on some ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Flow {
    pub(super) ranks: usize,
    /// Ranks that reach each other by loads and stores.
    pub(super) node: usize,
    pub(super) path: Path,
    pub(super) topology: Topology,
    pub(super) order: Order,
    /// Contexts whose threads post at the same time.
    pub(super) contexts: usize,
    /// The bytes for each peer.
    pub(super) bytes: f64,
    /// The puts for each peer over the network; the last one has the signal. The others carry the bytes.
    pub(super) puts: usize,
    /// One thread puts to one peer of the node after the other, instead of all blocks to all at once.
    pub(super) one_by_one: bool,
}

/// The kinds of servers, for reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Kernel,
    Proxy,
    Nvlink,
    Nic,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Proxy => "proxy",
            Self::Nvlink => "NVLink",
            Self::Nic => "NIC",
        }
    }
}

/// The result of a flow.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Simulated {
    pub(super) end: Ps,
    /// The kind of the server that was held longest, and the part of the time.
    pub(super) busiest: (Kind, f64),
    /// The puts of each rank over the network.
    pub(super) network_puts: usize,
}

impl Flow {
    /// Simulates the ranks of one node, which stand for all.
    pub(super) fn simulate(&self, parameters: &Parameters) -> Simulated {
        self.simulate_ranks(parameters, self.node)
    }

    /// Returns the rank to which a rank sends in a step from 1 on.
    fn peer(&self, from: usize, step: usize) -> usize {
        let Self { ranks, node, order, .. } = *self;
        match order {
            Order::Next => (from + step) % ranks,
            Order::Place => (from / node * node + step / node * node) % ranks + (from + step) % node,
        }
    }

    /// Simulates the first `ranks` ranks.
    pub(super) fn simulate_ranks(&self, parameters: &Parameters, ranks: usize) -> Simulated {
        let build = Build { flow: self, parameters, span: ranks };
        let messages = build.messages();
        let outcome = simulate(ranks * (SERVERS + self.contexts), &messages);
        let network_puts = match self.topology {
            _ if self.ranks <= self.node && self.path != Path::Copies => 0,
            Topology::Rails => (self.ranks / self.node - 1) * self.puts,
            Topology::Full => (self.ranks - if self.path == Path::Copies { 1 } else { self.node }) * self.puts,
        };
        Simulated { end: outcome.end(), busiest: build.busiest(&outcome), network_puts }
    }
}

/// The servers of a rank, by their places.
const PROXY: usize = 0;
const LINK_OUT: usize = 1;
const LINK_IN: usize = 2;
const NIC_OUT: usize = 3;
const NIC_IN: usize = 4;
const POST: usize = SERVERS;

struct Build<'a> {
    flow: &'a Flow,
    parameters: &'a Parameters,
    /// The number of simulated ranks; rank `r` is simulated by `r % span`.
    span: usize,
}

impl Build<'_> {
    fn server(&self, rank: usize, place: usize) -> usize {
        rank % self.span * (SERVERS + self.flow.contexts) + place
    }

    /// Returns the kind of the busiest server, and the part of the time for which it was held.
    fn busiest(&self, outcome: &Outcome) -> (Kind, f64) {
        let each = SERVERS + self.flow.contexts;
        let (index, busy) = outcome.busy.iter().copied().enumerate().max_by_key(|&(_, busy)| busy).unwrap_or_default();
        let kind = match index % each {
            PROXY => Kind::Proxy,
            LINK_OUT | LINK_IN => Kind::Nvlink,
            NIC_OUT | NIC_IN => Kind::Nic,
            _ => Kind::Kernel,
        };
        (kind, busy as f64 / outcome.end().max(1) as f64)
    }

    fn messages(&self) -> Vec<Message> {
        let mut messages = Vec::new();
        let rails = self.flow.topology == Topology::Rails && self.flow.ranks > self.flow.node;
        // For each place of a node: the messages from the node's ranks, which a rank sends on together.
        let mut arrived = vec![Vec::new(); self.span];
        for step in 1..self.flow.ranks {
            for from in 0..self.span {
                let to = self.flow.peer(from, step);
                let local = to / self.flow.node == from / self.flow.node;
                if local && self.flow.path != Path::Copies {
                    if rails {
                        arrived[to % self.span].push(messages.len());
                    }
                    // With rails a message carries the bytes for all nodes.
                    let nodes = if rails { self.flow.ranks / self.flow.node } else { 1 };
                    messages.push(Message { stages: self.within(from, to, nodes), after: Vec::new() });
                } else if !rails {
                    let puts = self.puts(from, to, step, self.flow.bytes);
                    messages.extend(puts.into_iter().map(|stages| Message { stages, after: Vec::new() }));
                }
            }
        }
        if rails {
            let nodes = self.flow.ranks / self.flow.node;
            for step in 1..nodes {
                for (from, earlier) in arrived.iter().enumerate() {
                    let to = (from + step * self.flow.node) % self.flow.ranks;
                    let bytes = self.flow.bytes * self.flow.node as f64;
                    for stages in self.puts(from, to, step, bytes) {
                        messages.push(Message { stages, after: earlier.clone() });
                    }
                }
            }
        }
        messages
    }

    /// Returns the way of a put by loads and stores of the bytes for `nodes` ranks.
    fn within(&self, from: usize, to: usize, nodes: usize) -> Vec<Stage> {
        let Parameters { lsa_put_ns, nvlink_gb_s, .. } = self.parameters;
        let hold = transfer(self.flow.bytes * nodes as f64, nvlink_gb_s);
        let mut stages = Vec::new();
        if self.flow.one_by_one {
            stages.push(Stage {
                server: self.server(from, POST),
                hold: ps(lsa_put_ns.value),
                latency: 0,
                cut_through: false,
            });
        }
        stages.extend(self.link((from, LINK_OUT), (to, LINK_IN), hold, 0));
        stages
    }

    /// Returns the ways of the puts to a rank over the network: the bytes, then a signal with the last put.
    fn puts(&self, from: usize, to: usize, step: usize, bytes: f64) -> Vec<Vec<Stage>> {
        let bytes = |put: usize| if put == 0 { bytes } else { 0.0 };
        (0..self.flow.puts).map(|put| self.put(from, to, step, bytes(put))).collect()
    }

    /// Returns the way of one put over the network.
    fn put(&self, from: usize, to: usize, step: usize, bytes: f64) -> Vec<Stage> {
        let all = self.parameters;
        let thread = |place: usize, figure: &Figure, latency: Ps| Stage {
            server: self.server(from, place),
            hold: ps(figure.value),
            latency,
            cut_through: false,
        };
        let post = POST + step % self.flow.contexts;
        let after_proxy = ps(all.proxy_latency_ns.value);
        let mut stages = match self.flow.path {
            Path::Proxy => {
                vec![thread(post, &all.proxy_issue_ns, 0), thread(PROXY, &all.proxy_put_ns, after_proxy)]
            }
            Path::Gdaki => vec![thread(post, &all.gdaki_issue_ns, 0)],
            Path::GdakiGrid => vec![thread(POST, &all.gdaki_grid_issue_ns, 0)],
            Path::Copies => {
                vec![thread(post, &all.proxy_issue_ns, 0), thread(PROXY, &all.copy_put_ns, after_proxy)]
            }
        };
        if self.flow.path == Path::Copies {
            stages.extend(self.link((from, LINK_OUT), (to, LINK_IN), transfer(bytes, &all.copy_gb_s), 0));
        } else {
            let other_rail = from % self.flow.node != to % self.flow.node;
            let latency = all.network_latency_ns.value + if other_rail { all.spine_latency_ns.value } else { 0.0 };
            let hold = transfer(bytes, &all.nic_gb_s).max(ps(all.nic_message_ns.value));
            stages.extend(self.link((from, NIC_OUT), (to, NIC_IN), hold, ps(latency)));
        }
        stages
    }

    /// Returns the two ends of a link.
    fn link(&self, out: (usize, usize), into: (usize, usize), hold: Ps, latency: Ps) -> [Stage; 2] {
        let end = |(rank, place), latency| Stage { server: self.server(rank, place), hold, latency, cut_through: true };
        [end(out, latency), end(into, 0)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::parameters::DEFAULTS;
    use super::*;

    fn parameters() -> Parameters {
        Parameters::parse("defaults", DEFAULTS).unwrap()
    }

    fn flow(ranks: usize, path: Path) -> Flow {
        let topology = Topology::Full;
        let order = Order::Next;
        Flow { ranks, node: 8, path, topology, order, contexts: 1, bytes: 4096.0, puts: 1, one_by_one: true }
    }

    #[test]
    fn one_node_stands_for_all_exactly() {
        for path in [Path::Proxy, Path::Gdaki, Path::GdakiGrid] {
            for topology in [Topology::Full, Topology::Rails] {
                for (ranks, puts, contexts, bytes) in [(16, 1, 1, 8.0), (32, 2, 1, 1e5), (64, 1, 4, 4096.0)] {
                    let order = if puts == 2 { Order::Place } else { Order::Next };
                    let flow = Flow { topology, order, puts, contexts, bytes, ..flow(ranks, path) };
                    let (one, all) = (flow.simulate(&parameters()), flow.simulate_ranks(&parameters(), ranks));
                    assert_eq!(one.end, all.end, "{flow:?}");
                    assert_eq!(one.busiest, all.busiest, "{flow:?}");
                }
            }
        }
    }

    #[test]
    fn a_put_between_two_nodes_of_one_rank_takes_the_sum_of_its_parts() {
        let all = parameters();
        let flow = Flow { node: 1, bytes: 5e6, ..flow(2, Path::Proxy) };
        let ns = all.proxy_issue_ns.value
            + all.proxy_put_ns.value
            + all.proxy_latency_ns.value
            + all.network_latency_ns.value
            + 5e6 / all.nic_gb_s.value;
        assert_eq!(flow.simulate(&all).end, ps(ns));
        let ns = all.gdaki_issue_ns.value + all.network_latency_ns.value + 5e6 / all.nic_gb_s.value;
        assert_eq!(Flow { path: Path::Gdaki, ..flow }.simulate(&all).end, ps(ns));
    }

    #[test]
    fn small_puts_saturate_the_proxy_and_large_ones_the_nic() {
        let all = parameters();
        let small = flow(512, Path::Proxy).simulate(&all);
        assert_eq!((small.busiest.0, small.network_puts), (Kind::Proxy, 504));
        // 504 puts through one thread, and the way of the last one.
        let least = ps(504.0 * all.proxy_put_ns.value);
        let way = ps(all.proxy_latency_ns.value + 2.0 * all.network_latency_ns.value + 8.0 * all.lsa_put_ns.value);
        assert!((least..least + way + ps(2000.0)).contains(&small.end), "{small:?}");
        let large = Flow { bytes: 1e6, ..flow(512, Path::Proxy) }.simulate(&all);
        assert_eq!(large.busiest.0, Kind::Nic);
        assert!(large.busiest.1 > 0.9, "{large:?}");
        // Without the proxy the kernel's thread is next.
        assert_eq!(flow(512, Path::Gdaki).simulate(&all).busiest.0, Kind::Kernel);
    }

    #[test]
    fn a_rank_sends_once_to_each_other_one_in_both_orders() {
        for order in [Order::Next, Order::Place] {
            for (ranks, node) in [(8, 8), (24, 8), (4, 1), (6, 2)] {
                let flow = Flow { order, node, ..flow(ranks, Path::Proxy) };
                for from in 0..ranks {
                    let mut all: Vec<_> = (1..ranks).map(|step| flow.peer(from, step)).collect();
                    all.sort_unstable();
                    assert_eq!(all, (0..ranks).filter(|&rank| rank != from).collect::<Vec<_>>(), "{flow:?} {from}");
                }
            }
        }
    }

    #[test]
    fn ranks_that_begin_at_their_own_place_do_not_send_to_one_rank_at_the_same_time() {
        let next = Flow { bytes: 1e6, one_by_one: false, ..flow(16, Path::GdakiGrid) };
        let place = Flow { order: Order::Place, ..next };
        let (next, place) = (next.simulate(&parameters()), place.simulate(&parameters()));
        assert!(next.busiest.1 < 0.6 && place.busiest.1 > 0.9, "{next:?} {place:?}");
    }

    #[test]
    fn rails_send_fewer_and_larger_puts() {
        let all = parameters();
        let rails = Flow { topology: Topology::Rails, ..flow(512, Path::Proxy) };
        let (rails, full) = (rails.simulate(&all), flow(512, Path::Proxy).simulate(&all));
        assert_eq!((rails.network_puts, full.network_puts), (63, 504));
        assert!(rails.end < full.end / 3);
        // In one node there is no network.
        for path in [Path::Proxy, Path::Gdaki] {
            assert_eq!(flow(8, path).simulate(&all).network_puts, 0);
        }
    }
}
