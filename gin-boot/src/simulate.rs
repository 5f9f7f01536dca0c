// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many ranks as tasks of one thread, to measure how the bootstrap grows with their number.

use super::beat::Beats;
use super::io::{Start, Wishes, run};
use super::message::Round;
use super::node::{MAX_BYTES, Node};
use super::{JOB, JOINING, Rendezvous, TcpConfig, check, id, system};
use crate::BootstrapError;
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
    /// From its begin to when the last rank had it.
    pub time: Duration,
    /// Bytes that rank 0 sent and received, as TCP carries them.
    pub rank_0: u64,
    /// The same, of the rank with the most of them.
    pub most: u64,
    /// The same, of all ranks, over their number.
    pub mean: u64,
}

/// The costs of the steps of a simulated job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Simulated {
    /// All ranks came, and knew that they had.
    pub join: Step,
    /// A collective operation to which each rank gives nothing; the median of several in time.
    pub barrier: Step,
    /// A collective operation to which each rank gives `bytes` bytes.
    pub gather: Step,
}

struct Job {
    nodes: Vec<Arc<Node>>,
    before: Vec<u64>,
}

impl Job {
    /// Returns the costs of all ranks since the last step.
    fn step(&mut self, begun: Instant) -> Step {
        let time = begun.elapsed();
        let now: Vec<u64> = self.nodes.iter().map(|node| node.traffic.both()).collect();
        let moved: Vec<u64> = now.iter().zip(&self.before).map(|(now, before)| now - before).collect();
        self.before = now;
        let mean = moved.iter().sum::<u64>() / moved.len() as u64;
        Step { time, rank_0: moved[0], most: moved.iter().copied().max().unwrap_or(0), mean }
    }

    /// Has all ranks meet.
    async fn meet(&mut self, round: Round, bytes: &[u8]) -> Result<Step, BootstrapError> {
        let begun = Instant::now();
        for node in &self.nodes {
            node.give(round, bytes);
        }
        for node in &self.nodes {
            let all = wait(node, round).await?;
            if all.len() != self.nodes.len() || all.iter().any(|given| given != bytes) {
                return Err(system("simulate ranks", "a rank got what nobody gave"));
            }
        }
        Ok(self.step(begun))
    }
}

/// Waits for the result of a collective operation.
async fn wait(node: &Node, round: Round) -> Result<Vec<Vec<u8>>, BootstrapError> {
    loop {
        let mut changed = pin!(node.changed.notified());
        changed.as_mut().enable();
        if let Some(outcome) = node.look(round) {
            return outcome;
        }
        changed.await;
    }
}

/// Runs a job of `ranks` ranks as tasks of one thread of this process, over the loopback: they join, meet `barriers`
/// times, and meet once where each gives `bytes` bytes. Each rank has the sockets and the work that it has as a
/// process.
///
/// # Errors
/// An error of the bootstrap; [`BootstrapError::System`] if a process may not have about 4 descriptors for each rank.
pub fn simulate(ranks: u32, barriers: u32, bytes: usize) -> Result<Simulated, BootstrapError> {
    check(0, ranks)?;
    if bytes > MAX_BYTES {
        return Err(BootstrapError::TooLong { bytes: bytes as u64, limit: MAX_BYTES as u64 });
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| system("serve connections", error))?;
    runtime.block_on(job(ranks, barriers, bytes))
}

async fn job(ranks: u32, barriers: u32, bytes: usize) -> Result<Simulated, BootstrapError> {
    // With one thread for all of them silence says nothing of a rank.
    let hour = Duration::from_secs(3600);
    let address = Some(Ipv4Addr::LOCALHOST.into());
    let config = TcpConfig { address, silence: hour, ..TcpConfig::default() };
    let rendezvous = Rendezvous::new(config.clone())?;
    let (id, mut listener) = (rendezvous.id, Some(rendezvous.listener));
    let key = id.secret().key().clone();
    let mut job = Job { nodes: Vec::new(), before: vec![0; ranks as usize] };
    let (mut tasks, mut all) = (JoinSet::new(), Vec::new());
    let beats = Beats::here();
    let begun = Instant::now();
    for rank in 0..ranks {
        let instance = id::random().map_err(|error| system("make random numbers", error))?;
        let (node, connects) = Node::new(rank, ranks, instance);
        let wishes = Wishes::default();
        let start = listener.take().map_or_else(|| Start::Connect(id.addresses().to_vec()), Start::Listen);
        tasks.spawn(run(node.clone(), connects, key.clone(), config.clone(), start, wishes.clone(), beats.clone()));
        node.give(JOINING, &[]);
        job.nodes.push(node);
        all.push(wishes);
    }
    for (node, wishes) in job.nodes.iter().zip(&all) {
        wait(node, JOINING).await?;
        wishes.joined.store(true, Ordering::Release);
    }
    let join = job.step(begun);
    let mut steps = Vec::new();
    for number in 0..barriers.max(1) {
        steps.push(job.meet(Round { channel: JOB, number: number.into() }, &[]).await?);
    }
    steps.sort_by_key(|step| step.time);
    let barrier = steps[steps.len() / 2];
    let gather = job.meet(Round { channel: JOB, number: u64::MAX }, &vec![0x5a; bytes]).await?;
    for (node, wishes) in job.nodes.iter().zip(&all) {
        wishes.leave.store(true, Ordering::Release);
        node.posted.notify_one();
    }
    while tasks.join_next().await.is_some() {}
    Ok(Simulated { join, barrier, gather })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_0_has_no_more_to_do_than_others_in_a_collective_and_little_at_joining() {
        for ranks in [2, 33, 100] {
            let told = simulate(ranks, 3, 1000).unwrap();
            let given = u64::from(ranks) * 1000;
            // Each rank gets what all others give, and passes it on along at most two edges.
            assert!(told.gather.rank_0 >= given - 1000);
            assert!(told.gather.most <= 4 * given, "{told:?}");
            assert!(told.gather.rank_0 <= told.gather.most);
            assert!(told.join.rank_0 <= 1500 * u64::from(ranks), "{told:?}");
        }
    }
}
