// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of collectives that lose a rank: ranks without sockets, whose messages arrive in an order that a seed chooses.

use super::*;
use oorandom::Rand32;
use std::collections::VecDeque;

const ID: CollectiveId = CollectiveId { channel: 3, number: 0 };

/// The ranks of a job, and the messages that have not arrived: by rank and edge of the sender.
struct World {
    nodes: Vec<Arc<Node>>,
    outgoing: Vec<[Option<Outgoing>; EDGES]>,
    queues: Vec<[VecDeque<Message>; EDGES]>,
    /// Receives no message any more.
    deaf: Option<u32>,
    random: Rand32,
}

impl World {
    fn new(ranks: u32, seed: u64) -> Self {
        let nodes: Vec<_> = (0..ranks).map(|rank| Node::new(rank, ranks, [rank as u8; 16]).0).collect();
        let outgoing = nodes.iter().map(|node| std::array::from_fn(|edge| node.edge_up(edge))).collect();
        let queues = nodes.iter().map(|_| Default::default()).collect();
        Self { nodes, outgoing, queues, deaf: None, random: Rand32::new(seed) }
    }

    /// Lets a message arrive. Returns false if none is under way.
    fn step(&mut self) -> bool {
        let mut ready = Vec::new();
        for rank in 0..self.nodes.len() {
            for edge in 0..EDGES {
                let queue = &mut self.queues[rank][edge];
                if let Some(outgoing) = &mut self.outgoing[rank][edge] {
                    queue.extend(std::iter::from_fn(|| outgoing.try_recv().ok()));
                }
                if !queue.is_empty() {
                    ready.push((rank, edge));
                }
            }
        }
        if ready.is_empty() {
            return false;
        }
        let (rank, edge) = ready[self.random.rand_range(0..ready.len() as u32) as usize];
        let message = self.queues[rank][edge].pop_front().unwrap();
        let to = self.nodes[rank].neighbour(edge).unwrap();
        if Some(to) != self.deaf {
            let node = &self.nodes[to as usize];
            let back = node.place.towards(rank as u32).unwrap();
            node.receive(back, message).unwrap();
        }
        true
    }

    /// Ends a rank as a killed process ends: its neighbours receive a part of its last messages, then its end.
    fn kill(&mut self, rank: u32) {
        self.deaf = Some(rank);
        for edge in 0..EDGES {
            let Some(neighbour) = self.nodes[rank as usize].neighbour(edge) else { continue };
            let mut outgoing = self.outgoing[rank as usize][edge].take().unwrap();
            let mut queue = std::mem::take(&mut self.queues[rank as usize][edge]);
            queue.extend(std::iter::from_fn(|| outgoing.try_recv().ok()));
            queue.truncate(self.random.rand_range(0..queue.len() as u32 + 1) as usize);
            let node = self.nodes[neighbour as usize].clone();
            let back = node.place.towards(rank).unwrap();
            queue.into_iter().for_each(|message| node.receive(back, message).unwrap());
            node.edge_lost(back, LossCause::Closed);
        }
    }

    /// Lets a rank leave in order.
    fn leave(&mut self, rank: u32) {
        self.nodes[rank as usize].leave();
        self.deaf = Some(rank);
    }

    /// Lets a neighbour of a rank count it as silent, and close the connection. The rank is alive.
    fn silence(&mut self, rank: u32) {
        let neighbours: Vec<_> =
            (0..EDGES).filter(|&edge| self.nodes[rank as usize].neighbour(edge).is_some()).collect();
        let edge = neighbours[self.random.rand_range(0..neighbours.len() as u32) as usize];
        let other = self.nodes[self.nodes[rank as usize].neighbour(edge).unwrap() as usize].clone();
        let back = other.place.towards(rank).unwrap();
        other.edge_lost(back, LossCause::Silent { ms: 1 });
        // Messages of the rank do not arrive any more. Messages to it do, and then the end.
        self.outgoing[rank as usize][edge] = None;
        self.queues[rank as usize][edge].clear();
        let mut outgoing = self.outgoing[other.rank as usize][back].take().unwrap();
        let mut queue = std::mem::take(&mut self.queues[other.rank as usize][back]);
        queue.extend(std::iter::from_fn(|| outgoing.try_recv().ok()));
        let node = self.nodes[rank as usize].clone();
        queue.into_iter().for_each(|message| node.receive(edge, message).unwrap());
        node.edge_lost(edge, LossCause::Closed);
    }

    fn result(&self, rank: u32) -> Option<Result<Vec<Vec<u8>>, BootstrapError>> {
        self.nodes[rank as usize].result(ID).map(|outcome| outcome.map(|all| all.parts()))
    }
}

/// Returns the bytes of a rank, which are empty for some ranks.
fn bytes(rank: u32, barrier: bool) -> Vec<u8> {
    vec![rank as u8; if barrier { 0 } else { rank as usize % 5 }]
}

#[test]
fn every_rank_has_an_outcome_after_a_loss_at_any_time_and_it_is_right() {
    let (mut completed, mut failed) = (0, 0);
    for seed in 0..6000 {
        let mut random = Rand32::new(seed);
        let ranks = random.rand_range(2..20);
        let (lost, barrier) = (random.rand_range(0..ranks), random.rand_range(0..2) == 0);
        let mut world = World::new(ranks, seed);
        let mut order: Vec<u32> = (0..ranks).collect();
        for last in (1..ranks as usize).rev() {
            order.swap(last, random.rand_range(0..last as u32 + 1) as usize);
        }
        // The loss comes after some ranks have given, and after some messages have arrived.
        let (before, steps) = (random.rand_range(0..ranks + 1) as usize, random.rand_range(0..5 * ranks));
        for &rank in &order[..before] {
            world.nodes[rank as usize].give(ID, &bytes(rank, barrier));
        }
        (0..steps).take_while(|_| world.step()).count();
        let gave = order[..before].contains(&lost);
        let all: Vec<_> = (0..ranks).map(|rank| bytes(rank, barrier)).collect();
        let early: Vec<_> = (0..ranks).map(|rank| world.result(rank)).collect();
        let cause = match seed % 3 {
            0 => {
                world.kill(lost);
                LossCause::Closed
            }
            1 => {
                world.leave(lost);
                LossCause::Left
            }
            _ => {
                world.silence(lost);
                LossCause::Silent { ms: 1 }
            }
        };
        for &rank in order[before..].iter().filter(|&&rank| rank != lost) {
            world.nodes[rank as usize].give(ID, &bytes(rank, barrier));
        }
        while world.step() {}
        let root_is_whole = early[0].is_some();
        for rank in (0..ranks).filter(|&rank| rank != lost) {
            let outcome = early[rank as usize].clone().or_else(|| world.result(rank));
            let outcome = outcome.unwrap_or_else(|| panic!("seed {seed}: rank {rank} of {ranks} waits for ever"));
            match outcome {
                Ok(parts) => {
                    assert!(gave, "seed {seed}: complete without the bytes of rank {lost}");
                    assert_eq!(parts, all, "seed {seed}");
                    completed += 1;
                }
                Err(error) => {
                    assert_eq!(error, BootstrapError::Lost { rank: lost, host: String::new(), cause: cause.clone() });
                    // A rank that reaches rank 0 without the lost rank has what rank 0 has.
                    let below = world.nodes[lost as usize].place.subtree.contains(&rank);
                    assert!(below || !root_is_whole, "seed {seed}: rank {rank} failed without need");
                    failed += 1;
                }
            }
        }
    }
    assert!(completed > 5000 && failed > 5000, "{completed} completed, {failed} failed");
}

#[test]
fn a_rank_that_gave_and_is_lost_fails_no_rank_that_reaches_rank_0_without_it() {
    // Rank 1 has the ranks 1 to 4 below it, rank 5 the ranks 5 to 7.
    let mut world = World::new(8, 1);
    assert_eq!(world.nodes[1].place.subtree, 1..5);
    for rank in 1..5 {
        world.nodes[rank].give(ID, b"x");
    }
    while world.step() {}
    world.kill(1);
    while world.step() {}
    for rank in 5..8 {
        world.nodes[rank].give(ID, b"x");
        assert_eq!(world.result(rank as u32), None);
    }
    world.nodes[0].give(ID, b"x");
    while world.step() {}
    for rank in [0, 5, 6, 7] {
        assert!(matches!(world.result(rank), Some(Ok(_))), "rank {rank}");
    }
    for rank in 2..5 {
        assert!(matches!(world.result(rank), Some(Err(BootstrapError::Lost { rank: 1, .. }))), "rank {rank}");
    }
    // The next collective misses its bytes.
    let next = CollectiveId { number: 1, ..ID };
    world.nodes[7].give(next, b"x");
    assert!(matches!(world.nodes[7].result(next), Some(Err(BootstrapError::Lost { rank: 1, .. }))));
}

#[test]
fn a_rank_that_gives_up_still_relays() {
    let mut world = World::new(8, 2);
    world.nodes[1].give(ID, b"x");
    let error = world.nodes[1].give_up(ID, Duration::ZERO);
    assert!(matches!(error, BootstrapError::Timeout { missing, .. } if missing == [0, 2, 3, 4, 5, 6, 7]));
    world.nodes[1].close(ID.channel);
    for rank in (0..8).filter(|&rank| rank != 1) {
        world.nodes[rank].give(ID, b"x");
    }
    while world.step() {}
    for rank in (0..8).filter(|&rank| rank != 1) {
        assert_eq!(world.result(rank), Some(Ok(vec![b"x".to_vec(); 8])), "rank {rank}");
    }
    assert!(world.nodes.iter().all(|node| node.state().collectives.is_empty()));
}

#[test]
fn ranks_that_wait_are_not_missing_and_news_of_them_keeps_nothing_after_the_end() {
    let mut world = World::new(8, 3);
    for rank in (0..8).filter(|&rank| rank != 4) {
        world.nodes[rank].give(ID, b"");
        world.nodes[rank].announce(ID);
        world.nodes[rank].announce(ID);
    }
    while world.step() {}
    for rank in (0..8).filter(|&rank| rank != 4) {
        assert_eq!(world.nodes[rank].missing(ID), [4], "rank {rank}");
    }
    // A rank that comes late knows the others, too.
    world.nodes[4].give(ID, b"");
    assert_eq!(world.nodes[4].missing(ID), []);
    let late = Message::Waits { id: ID, rank: 7 };
    while world.step() {}
    for rank in 0..8 {
        assert_eq!(world.result(rank), Some(Ok(vec![Vec::new(); 8])));
        let node = &world.nodes[rank as usize];
        if let Some(edge) = node.place.towards(7) {
            node.receive(edge, late.clone()).unwrap();
        }
        assert!(node.state().collectives.is_empty());
    }
}
