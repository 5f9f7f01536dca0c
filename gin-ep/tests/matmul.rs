// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products that send and receive, against the oracle, bit for bit; their limits and faults.

#[path = "support/matmul.rs"]
mod support;

use gin_abi::{Deadline, FaultKind};
use gin_ep::{EpError, GroupConfig, Matmul, MatmulConfig, Operands, Part};
use gin_ep_oracle::Shape;
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{Communicator, Requirements};
use gin_host::world::{Mode, Rank, WorldConfig, launch};
use support::{Case, compare};

/// Runs `test` on all ranks of a world.
fn on_ranks(world: WorldConfig, test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync) {
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        test(&rank, &comm)?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

fn run(world: impl Fn(u32) -> WorldConfig, list: &[(u32, (usize, usize, usize), u32)]) {
    for &(ranks, sizes, blocks) in list {
        for scatters in [false, true] {
            let config = MatmulConfig::new(sizes.0 as u32, sizes.1 as u32, sizes.2 as u32).blocks(blocks);
            let config = config.deadline(Deadline::after_ms(60_000));
            on_ranks(world(ranks), |rank, comm| {
                compare(rank, comm, &config, &Case { scatters, sizes, runs: 2, every: 1 })
            });
        }
    }
}

#[test]
fn products_of_all_shapes_have_the_bits_of_the_oracle() {
    let list = [(1, (37, 264, 72), 2), (2, (130, 264, 136), 2), (3, (1, 8, 8), 1), (4, (5, 16, 200), 1)];
    run(|ranks| WorldConfig::seeded(ranks, 5), &list);
}

#[test]
fn products_have_the_bits_of_the_oracle_in_real_time() {
    run(WorldConfig::threads, &[(2, (200, 16, 328), 3), (3, (33, 24, 64), 2)]);
}

#[test]
fn products_of_experts_have_the_bits_of_the_oracle_also_where_rows_have_no_place() {
    for (ranks, experts, hidden, tokens, rows) in
        [(1, 3, 40, 20, 60), (2, 5, 24, 9, 54), (3, 4, 8, 6, 5), (4, 70, 16, 3, 36)]
    {
        let shape = Shape { ranks: ranks as usize, experts, topk: 3, hidden };
        let config = GroupConfig::new(experts as u32, hidden as u32, 3).tokens(tokens as u32).sms(2).threads(64);
        on_ranks(WorldConfig::seeded(ranks, 9), |rank, comm| {
            support::experts(rank, comm, &config, &shape, tokens, (rows, Some(2)))
        });
    }
}

#[test]
fn nothing_races() {
    let races = |ranks: u32| {
        let mut world = WorldConfig::seeded(ranks, 1);
        let Mode::Seeded(seeded) = world.mode else { unreachable!("the mode of a seeded world") };
        world.mode = Mode::Seeded(seeded.races(true));
        world
    };
    run(races, &[(2, (33, 16, 72), 2), (3, (2, 8, 8), 1)]);
    let shape = Shape { ranks: 2, experts: 3, topk: 3, hidden: 16 };
    let config = GroupConfig::new(3, 16, 3).tokens(5).sms(2).threads(64);
    on_ranks(races(2), |rank, comm| support::experts(rank, comm, &config, &shape, 5, (30, Some(2))));
}

#[test]
fn a_rank_that_does_not_come_ends_the_others_wait_with_a_fault() {
    for scatters in [false, true] {
        let outcome = launch(WorldConfig::seeded(2, 3), |rank| -> Result<(), EpError> {
            let comm = rank.communicator(&Requirements::default())?;
            let make = if scatters { Matmul::reduce_scatter } else { Matmul::all_gather };
            let config = MatmulConfig::new(8, 8, 8).blocks(1).deadline(Deadline::after_ms(20));
            let (matmul, stream) = (make(&comm, &config)?, rank.stream()?);
            let memory = || Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, 256)?.whole());
            let (a, b, c) = (memory()?, memory()?, memory()?);
            if rank.rank() == 0 {
                // The second launch ends at once.
                for _ in 0..2 {
                    matmul.run(&stream, Part::Fused, &Operands::new(&a, &b, &c))?;
                    stream.synchronize()?;
                    let fault = comm.fault().expect("a fault").fault;
                    assert_eq!((fault.kind(), fault.peer()), (FaultKind::Timeout, 1));
                }
            }
            rank.barrier()?;
            Ok(())
        });
        outcome.unwrap();
    }
}

#[test]
fn sizes_and_memory_outside_the_limits_are_refused_with_the_figure() {
    on_ranks(WorldConfig::seeded(1, 1), |rank, comm| {
        let refused = |rows, columns, depth| Matmul::all_gather(comm, &MatmulConfig::new(rows, columns, depth)).err();
        let text = |error: Option<EpError>| error.map(|error| error.to_string());
        assert_eq!(
            text(refused(8, 12, 8)).as_deref(),
            Some("the number of columns is 12; the limit is a multiple of 8, 1 to 1048576")
        );
        assert_eq!(
            text(refused(0, 8, 8)).as_deref(),
            Some("the number of rows of a rank is 0; the limit is 1 to 1048576")
        );
        assert!(text(refused(8, 8, 4)).is_some_and(|text| text.starts_with("the number of inner elements is 4;")));
        let none = MatmulConfig::new(8, 8, 8).blocks(0);
        assert!(text(Matmul::all_gather(comm, &none).err()).is_some_and(|text| text.contains("at least 1")));

        let (matmul, stream) = (Matmul::reduce_scatter(comm, &MatmulConfig::new(8, 8, 8).blocks(1))?, rank.stream()?);
        let memory = |bytes| Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, bytes)?.whole());
        let (large, small) = (memory(128)?, memory(112)?);
        let short = matmul.run(&stream, Part::Fused, &Operands::new(&large, &large, &small));
        assert!(matches!(short, Err(EpError::Short { what: "the memory of the result", given: 112, needed: 128 })));
        let parts = matmul.run(&stream, Part::Multiply, &Operands::new(&large, &large, &large));
        assert!(matches!(parts, Err(EpError::Unsuited { .. })));
        matmul.destroy()
    });
}
