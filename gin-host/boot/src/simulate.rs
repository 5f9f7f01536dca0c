// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs many ranks as tasks of one thread, to measure how the cost of the bootstrap grows with their number.

use crate::address::listen;
use crate::beat::Beats;
use crate::collective::Gathered;
use crate::door::{Call, DOORS, Door, Roll};
use crate::error::{CHECK, system};
use crate::io::{Start, run};
use crate::message::{CollectiveId, Knock};
use crate::node::JOINING;
use crate::node::Node;
use crate::regroup::Visit;
use crate::tcp::{check, check_length, describe, runtime};
use crate::{BootstrapError, JOB, Rendezvous, TcpConfig, UniqueId, id};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// The cost of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Step {
    /// The time from the begin of the step until the last rank has completed it.
    pub time: Duration,
    /// The bytes that rank 0 sent and received, as TCP carries them.
    pub rank_0: u64,
    /// The same of the rank with the maximum.
    pub max: u64,
    /// The same of all ranks, divided by their number.
    pub mean: u64,
}

/// The costs of the steps of a simulated job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Simulated {
    /// All ranks join: they connect, and run the two collectives of [`TcpBootstrap::join`](crate::TcpBootstrap::join).
    pub join: Step,
    /// A collective to which each rank gives nothing: the median of several, by time.
    pub barrier: Step,
    /// A collective to which each rank gives `bytes` bytes.
    pub gather: Step,
    /// The time in which processes that join a running job of one rank, as all other ranks, get their places at its
    /// door.
    pub door: Duration,
}

struct Job {
    nodes: Vec<Arc<Node>>,
    before: Vec<u64>,
}

impl Job {
    /// Returns the costs of all ranks since the last step.
    fn step(&mut self, begun: Instant) -> Step {
        let time = begun.elapsed();
        let now: Vec<u64> =
            self.nodes.iter().map(|node| node.traffic.bytes()).map(|(sent, received)| sent + received).collect();
        let moved: Vec<u64> = now.iter().zip(&self.before).map(|(now, before)| now - before).collect();
        self.before = now;
        let mean = moved.iter().sum::<u64>() / moved.len() as u64;
        Step { time, rank_0: moved[0], max: moved.iter().copied().max().unwrap_or(0), mean }
    }

    /// Runs one collective of all ranks. Returns its costs.
    async fn all_gather(&mut self, id: CollectiveId, bytes: &[u8]) -> Result<Step, BootstrapError> {
        let begun = Instant::now();
        self.exchange(id, bytes).await?;
        Ok(self.step(begun))
    }

    /// Runs one collective of all ranks.
    async fn exchange(&self, id: CollectiveId, bytes: &[u8]) -> Result<(), BootstrapError> {
        for node in &self.nodes {
            node.give(id, bytes);
        }
        for node in &self.nodes {
            let all = wait(node, id).await?;
            let same = |all: Vec<Vec<u8>>| all.len() == self.nodes.len() && all.iter().all(|given| given == bytes);
            let right = if bytes.is_empty() { all.is_empty() } else { same(all.parts()) };
            if !right {
                return Err(system("simulate ranks")("a rank received bytes that no rank gave"));
            }
        }
        Ok(())
    }
}

/// Waits for the result of a collective.
async fn wait(node: &Node, id: CollectiveId) -> Result<Gathered, BootstrapError> {
    loop {
        let mut changed = pin!(node.changed.notified());
        changed.as_mut().enable();
        if let Some(outcome) = node.result(id) {
            return outcome;
        }
        changed.await;
    }
}

/// Runs a job of `ranks` ranks as tasks of one thread of this process, over the loopback. They join, run `barriers`
/// barriers, and run one collective to which each rank gives `bytes` bytes. Each rank has the sockets and the work of a
/// rank that is a process.
///
/// # Errors
/// An error of the bootstrap. [`BootstrapError::System`] if the process may not open about 4 descriptors for each rank.
pub fn simulate(ranks: u32, barriers: u32, bytes: usize) -> Result<Simulated, BootstrapError> {
    check(0, ranks)?;
    check_length(bytes)?;
    runtime().map_err(system("serve connections"))?.block_on(job(ranks, barriers, bytes))
}

async fn job(ranks: u32, barriers: u32, bytes: usize) -> Result<Simulated, BootstrapError> {
    // All ranks run on one thread, so silence does not mean that a rank is lost.
    let hour = Duration::from_secs(3600);
    let config = TcpConfig::default().address(Some(Ipv4Addr::LOCALHOST.into())).silence(hour);
    let rendezvous = Rendezvous::new(config.clone())?;
    let (id, mut listener) = (rendezvous.id().clone(), Some(rendezvous.listener));
    let door = visits(ranks).await?;
    let mut job = Job { nodes: Vec::new(), before: vec![0; ranks as usize] };
    let mut tasks = JoinSet::new();
    let beats = Beats::here();
    let own = describe(None);
    let begun = Instant::now();
    for rank in 0..ranks {
        let instance = id::random().map_err(system("make random numbers"))?;
        let (node, connects) = Node::new(rank, ranks, instance);
        let connect = || Start::Connect { addresses: id.addresses().to_vec(), remedy: CHECK.to_owned() };
        let start = listener.take().map_or_else(connect, Start::Listen);
        tasks.spawn(run(node.clone(), connects, id.root.secret(), config.clone(), start, beats.clone()));
        node.give(JOINING, &own);
        job.nodes.push(node);
    }
    for node in &job.nodes {
        wait(node, JOINING).await?;
        node.joined.store(true, Ordering::Release);
    }
    // The simulated ranks have no doors, and exchange the address of rank 0.
    let address = id.addresses()[0].to_string();
    job.exchange(DOORS, address.as_bytes()).await?;
    let join = job.step(begun);
    let mut steps = Vec::new();
    for number in 0..barriers.max(1) {
        steps.push(job.all_gather(CollectiveId { channel: JOB, number: number.into() }, &[]).await?);
    }
    steps.sort_by_key(|step| step.time);
    let barrier = steps[steps.len() / 2];
    let gather = job.all_gather(CollectiveId { channel: JOB, number: u64::MAX }, &vec![0x5a; bytes]).await?;
    for node in &job.nodes {
        node.leaving.store(true, Ordering::Release);
        node.posted.notify_one();
    }
    while tasks.join_next().await.is_some() {}
    Ok(Simulated { join, barrier, gather, door })
}

/// Has processes knock at the door of rank 0, for all other ranks of the next job. Returns the time until all have a
/// place.
async fn visits(ranks: u32) -> Result<Duration, BootstrapError> {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into())?;
    let address = listener.local_addr().map_err(system("listen"))?;
    let root = UniqueId::random(vec![address]).map_err(system("make a secret"))?.root;
    let door = Arc::new(Door::new(root.clone(), Vec::new()));
    let _calling = door.call(Call::Here(Roll {
        plan: [0; 32],
        ranks,
        joining: (1..ranks).collect(),
        own: 0,
        secret: root.secret(),
        rank_0: Some(address),
        knocked: BTreeMap::new(),
        whole: ranks == 1,
    }));
    let mut all = JoinSet::new();
    let serving = tokio::spawn(door.clone().serve(listener, 0));
    let begun = Instant::now();
    for rank in 1..ranks {
        let instance = id::random().map_err(system("make random numbers"))?;
        let knock = Knock { rank, ranks, instance, plan: None, listens: None };
        let config = TcpConfig::default();
        all.spawn(Visit::new(knock, root.secret(), vec![address], None, config).enter());
    }
    while let Some(entered) = all.join_next().await {
        entered.map_err(system("knock"))??;
    }
    serving.abort();
    Ok(begun.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_0_has_no_more_to_do_than_others_and_a_barrier_costs_the_same_for_any_number_of_ranks() {
        for ranks in [2, 33, 100] {
            let costs = simulate(ranks, 3, 1000).unwrap();
            let given = u64::from(ranks) * 1004;
            // A rank receives the bytes of all from its parent and sends them to two children. A child of rank 0 also
            // receives and sends the bytes of half of the ranks.
            assert!(costs.gather.rank_0 >= given - 1004);
            assert!(costs.gather.max <= 4 * given + 1000, "{costs:?}");
            assert!(costs.gather.rank_0 <= costs.gather.max);
            // A barrier is one message in each direction along three edges at most, however many ranks there are.
            assert!(costs.barrier.max <= 200, "{costs:?}");
            assert!(costs.join.rank_0 <= 1500 * u64::from(ranks), "{costs:?}");
        }
    }
}
