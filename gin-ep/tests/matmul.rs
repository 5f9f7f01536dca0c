// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products that send and receive, against the oracle, bit for bit; their limits and faults.

#[path = "support/matmul.rs"]
mod support;

use gin_abi::{Deadline, FaultKind};
use gin_ep::{
    Code, Combine, Element, EpError, Experts, Group, GroupConfig, GroupedMatmul, Ids, Instructions, Layout, Matmul,
    MatmulConfig, Operands, OverlappedMatmul, Part, Permuted, Products, Rows, Scales, Tokens, Weights,
};
use gin_ep_kernels::matmul::{
    EXCHANGE, MULTIPLY, Product, ScaleTables, ep_all_gather_matmul, ep_all_gather_matmul_wgmma,
    ep_matmul_reduce_scatter, ep_matmul_reduce_scatter_wgmma, tile, warpgroups,
};
use gin_ep_oracle::{Batch, Routing, Shape, batch, factor};
use gin_gpu::{LaunchConfig, Memory, MemoryKind, MemorySlice};
use gin_host::comm::{Communicator, Requirements, WindowFlags};
use gin_host::world::{Rank, WorldConfig, WorldMode, launch};
use gin_testkit::rotation;
use support::{Arriving, Case, check, compare, elements};

/// Kinds of products, and instructions of kernels.
const FORMS: [(bool, Instructions); 4] = [
    (false, Instructions::Warps),
    (true, Instructions::Warps),
    (false, Instructions::Warpgroups),
    (true, Instructions::Warpgroups),
];

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
        for (scatters, instructions) in FORMS {
            let config = MatmulConfig::new(sizes.0 as u32, sizes.1 as u32, sizes.2 as u32).blocks(blocks);
            let config = config.deadline(Deadline::after_ms(60_000)).instructions(instructions);
            on_ranks(world(ranks), |rank, comm| {
                compare(rank, comm, &config, &Case { scatters, sizes, runs: 2, every: 1 })
            });
        }
    }
}

#[test]
fn products_of_all_shapes_have_the_bits_of_the_oracle() {
    let list = [
        (1, (37, 264, 72), 2),
        (2, (130, 264, 136), 2),
        (3, (130, 264, 8), 2),
        (3, (1, 8, 8), 1),
        (4, (5, 16, 200), 1),
    ];
    run(|ranks| WorldConfig::seeded(ranks, 5), &list);
}

#[test]
fn products_have_the_bits_of_the_oracle_in_real_time() {
    run(WorldConfig::threads, &[(2, (200, 16, 328), 3), (3, (33, 24, 64), 2)]);
}

#[test]
fn products_of_e4m3_with_scales_have_the_bits_of_the_oracle() {
    for (sizes, blocks) in [((200, 264, 256), 2), ((3, 136, 384), 1), ((1, 8, 128), 2)] {
        let config = MatmulConfig::new(sizes.0 as u32, sizes.1 as u32, sizes.2 as u32).blocks(blocks);
        on_ranks(WorldConfig::seeded(1, 5), |rank, comm| support::compare_e4m3(rank, comm, &config, sizes, 1));
    }
}

#[test]
fn products_of_experts_have_the_bits_of_the_oracle_also_where_rows_have_no_place() {
    for (ranks, experts, hidden, tokens, rows) in
        [(1, 3, 40, 20, 60), (2, 5, 24, 9, 54), (3, 4, 8, 6, 5), (4, 70, 16, 3, 36)]
    {
        let shape = Shape { ranks: ranks as usize, experts, topk: 3, hidden };
        let config = GroupConfig::new(experts as u32, hidden as u32, 3).tokens(tokens as u32).sms(2).threads(64);
        for instructions in [Instructions::Warps, Instructions::Warpgroups] {
            on_ranks(WorldConfig::seeded(ranks, 9), |rank, comm| {
                support::experts(rank, comm, &config, &shape, tokens, (rows, Some(2), instructions))
            });
        }
    }
}

#[test]
fn experts_that_multiply_rows_as_they_arrive_have_the_bits_of_the_steps_in_sequence() {
    let routings = [Routing::Uniform, Routing::Holes, Routing::One(1), Routing::None, Routing::Local, Routing::Repeats];
    let (warps, warpgroups) = (Instructions::Warps, Instructions::Warpgroups);
    let cases = [
        (warps, 1, 3, 16, &[150][..], 2),
        (warps, 2, 5, 24, &[9, 40], 1),
        (warps, 2, 2, 264, &[3], 2),
        (warps, 3, 4, 8, &[30, 0, 7], 3),
        (warps, 5, 70, 16, &[3, 4], 2),
        (warpgroups, 1, 3, 72, &[150], 2),
        (warpgroups, 2, 5, 24, &[9, 40], 1),
        (warpgroups, 2, 2, 264, &[3], 2),
        (warpgroups, 3, 4, 8, &[30, 0, 7], 3),
    ];
    for (instructions, ranks, experts, hidden, tokens, blocks) in rotation(0, cases) {
        let shape = Shape { ranks: ranks as usize, experts, topk: 3, hidden };
        let max = *tokens.iter().max().expect("one") as u32;
        let config = GroupConfig::new(experts as u32, hidden as u32, 3).tokens(max).sms(2).threads(64);
        let config = config.deadline(Deadline::after_ms(60_000));
        let few = if hidden > 100 { 1..3 } else { 0..routings.len() };
        let case = Arriving { blocks: Some(blocks), pairs: 2, instructions, ..Arriving::of(tokens, &routings[few]) };
        on_ranks(WorldConfig::seeded(ranks, 9), |rank, comm| {
            support::arriving(rank, comm, &config, &shape, &case).map(drop)
        });
    }
}

#[test]
fn experts_of_e4m3_have_the_bits_of_the_oracle_also_where_rows_have_no_place() {
    let cases =
        [(1, 3, 128, 20, 60, Scales::F32), (2, 5, 256, 9, 54, Scales::F32Powers), (3, 4, 128, 6, 5, Scales::F32)];
    for (ranks, experts, hidden, tokens, rows, scales) in rotation(0, cases) {
        let shape = Shape { ranks: ranks as usize, experts, topk: 3, hidden };
        let config = GroupConfig::new(experts as u32, hidden as u32, 3).tokens(tokens as u32).sms(2).threads(64);
        on_ranks(WorldConfig::seeded(ranks, 9), |rank, comm| {
            support::experts_e4m3(rank, comm, &config, &shape, tokens, (rows, Some(2), scales))
        });
    }
}

#[test]
fn experts_that_multiply_rows_of_e4m3_as_they_arrive_have_the_bits_of_the_steps_in_sequence() {
    let routings = [Routing::Uniform, Routing::Holes, Routing::Repeats];
    let cases = [
        (1, 3, 128, &[150][..], 2, Scales::F32Powers),
        (2, 5, 256, &[9, 40], 1, Scales::F32),
        (3, 4, 128, &[30, 0, 7], 3, Scales::F32),
    ];
    for (ranks, experts, hidden, tokens, blocks, scales) in rotation(0, cases) {
        let shape = Shape { ranks, experts, topk: 3, hidden };
        let max = *tokens.iter().max().expect("one") as u32;
        let config = GroupConfig::new(experts as u32, hidden as u32, 3).tokens(max).sms(2).threads(64);
        let config = config.deadline(Deadline::after_ms(60_000));
        let e4m3 = Some(scales);
        let case = Arriving { blocks: Some(blocks), pairs: 2, e4m3, ..Arriving::of(tokens, &routings) };
        on_ranks(WorldConfig::seeded(ranks as u32, 9), |rank, comm| {
            support::arriving(rank, comm, &config, &shape, &case).map(drop)
        });
    }
}

#[test]
fn tiles_of_own_rows_are_multiplied_while_a_rank_is_late() {
    // With one expert of all, its tiles are taken in part, also within a column of tiles.
    let (one, several) = (&[Routing::One(0)][..], &[Routing::Uniform, Routing::Local][..]);
    let (warps, warpgroups) = (Instructions::Warps, Instructions::Warpgroups);
    let cases = [
        (warps, 16, one, 800_000, 2..7),
        (warps, 264, one, 10_000_000, 2..14),
        (warps, 16, several, 50_000_000, 8..15),
        (warpgroups, 264, one, 250_000, 2..14),
        (warpgroups, 16, several, 50_000_000, 8..15),
    ];
    for (instructions, hidden, routings, ns, expected) in rotation(0, cases) {
        let shape = Shape { ranks: 2, experts: 4, topk: 3, hidden };
        let config = GroupConfig::new(4, hidden as u32, 3).tokens(300).sms(2).threads(64);
        let config = config.deadline(Deadline::after_ms(60_000));
        let case = Arriving { blocks: Some(3), late: Some((1, ns)), instructions, ..Arriving::of(&[300], routings) };
        on_ranks(WorldConfig::seeded(2, 3), |rank, comm| {
            let taken = support::arriving(rank, comm, &config, &shape, &case)?;
            println!("{ns} ns: rank {} took {taken} tiles early", rank.rank());
            assert!(rank.rank() == 1 || expected.contains(&taken), "{taken} tiles in {ns} ns, not {expected:?}");
            Ok(())
        });
    }
}

#[test]
fn one_resident_block_of_many_multiplies_all_rows_as_they_arrive() {
    let shape = Shape { ranks: 3, experts: 4, topk: 3, hidden: 16 };
    let config = GroupConfig::new(4, 16, 3).tokens(150).sms(2).threads(64).deadline(Deadline::after_ms(60_000));
    let (warps, warpgroups, late) = (Instructions::Warps, Instructions::Warpgroups, Some((2, 10_000_000)));
    for (seed, late, instructions) in [(1, None, warps), (2, late, warps), (1, None, warpgroups), (2, late, warpgroups)]
    {
        let routings = [Routing::One(1), Routing::Zipf];
        let case = Arriving { grid: Some(5), late, instructions, ..Arriving::of(&[150, 20], &routings) };
        on_ranks(WorldConfig::seeded(3, seed).resident_blocks(1), |rank, comm| {
            support::arriving(rank, comm, &config, &shape, &case).map(drop)
        });
    }
}

#[test]
fn one_resident_block_of_many_is_enough() {
    let (rows, columns, depth) = (130, 16, 72);
    for (scatters, instructions) in FORMS {
        on_ranks(WorldConfig::seeded(2, 4).resident_blocks(1), |rank, comm| {
            let memory = |elements: u32| -> Result<_, EpError> {
                Ok(Memory::new(rank.device(), MemoryKind::Device, 2 * u64::from(elements))?.whole())
            };
            let (a, b) = (memory(2 * rows * depth)?, memory(columns * depth)?);
            let results = [memory(2 * rows * columns)?, memory(2 * rows * columns)?];
            let factor = |number: u32, key: u64| -> Vec<u16> {
                (0..number as usize).map(|at| factor(key + u64::from(rank.rank()), 0, at)).collect()
            };
            a.write(0, &factor(2 * rows * depth, 0))?;
            b.write(0, &factor(columns * depth, 9))?;
            for result in &results {
                result.write(0, &vec![0u16; 4 * rows as usize * columns as usize / 2])?;
            }
            let (make, kernel_row) = if scatters {
                (Matmul::reduce_scatter as fn(_, _) -> _, columns)
            } else {
                (Matmul::all_gather as _, depth)
            };
            let deadline = Deadline::after_ms(60_000);
            let config = MatmulConfig::new(rows, columns, depth).deadline(deadline).instructions(instructions);
            let (matmul, stream): (Matmul, _) = (make(comm, &config)?, rank.stream()?);
            matmul.run(&stream, Part::Fused, &Operands::new(&a, &b, &results[0]))?;
            // More blocks than may be resident: they run one after the other.
            let maps = memory(5 * warpgroups::MAPS_BYTES / 2)?;
            let product = Product {
                maps: maps.address(),
                scales: ScaleTables::default(),
                a: a.address(),
                b: b.address(),
                c: results[1].address(),
                partial: 0,
                rows,
                columns,
                depth,
                parts: EXCHANGE | MULTIPLY,
                deadline,
            };
            let words = product.window_bytes(2, 2 * u64::from(kernel_row)) / 8;
            let window = comm.alloc_window::<u64>(words as usize, WindowFlags::NONE)?;
            let by_warps = LaunchConfig::new(5, tile::THREADS).dynamic_shared(tile::SHARED_BYTES);
            let by_warpgroups = LaunchConfig::new(5, warpgroups::THREADS).dynamic_shared(warpgroups::SHARED_BYTES);
            let device = comm.device()?;
            // Safety: the window is one for the product, and the memory has its sizes.
            unsafe {
                match (scatters, instructions) {
                    (false, Instructions::Warps) => {
                        ep_all_gather_matmul::launch(&stream, by_warps, &device, &window, product)?;
                    }
                    (true, Instructions::Warps) => {
                        ep_matmul_reduce_scatter::launch(&stream, by_warps, &device, &window, product)?;
                    }
                    (false, Instructions::Warpgroups) => {
                        ep_all_gather_matmul_wgmma::launch(&stream, by_warpgroups, &device, &window, product)?;
                    }
                    (true, Instructions::Warpgroups) => {
                        ep_matmul_reduce_scatter_wgmma::launch(&stream, by_warpgroups, &device, &window, product)?;
                    }
                }
            }
            stream.synchronize()?;
            comm.check("matmul")?;
            let mut found = [vec![0u16; 2 * (rows * columns) as usize], vec![1u16; 2 * (rows * columns) as usize]];
            for (result, found) in results.iter().zip(&mut found) {
                result.read(0, found)?;
            }
            assert!(found[0] == found[1] && found[0].iter().any(|&element| element != 0));
            matmul.destroy()
        });
    }
}

#[test]
fn nothing_races() {
    let races = |ranks: u32| {
        let mut world = WorldConfig::seeded(ranks, 1);
        let WorldMode::Seeded(seeded) = world.mode else { unreachable!("the mode of a seeded world") };
        world.mode = WorldMode::Seeded(seeded.races(true));
        world
    };
    run(races, &[(2, (33, 16, 72), 2), (3, (2, 8, 8), 1)]);
    for instructions in [Instructions::Warps, Instructions::Warpgroups] {
        let shape = Shape { ranks: 2, experts: 3, topk: 3, hidden: 16 };
        let config = GroupConfig::new(3, 16, 3).tokens(5).sms(2).threads(64);
        on_ranks(races(2), |rank, comm| support::experts(rank, comm, &config, &shape, 5, (30, Some(2), instructions)));
        let shape = Shape { ranks: 2, experts: 12, topk: 3, hidden: 8 };
        let config = GroupConfig::new(12, 8, 3).tokens(70).sms(2).threads(64);
        let several = [Routing::Uniform, Routing::One(11)];
        let case = Arriving { blocks: Some(3), instructions, ..Arriving::of(&[70], &several) };
        on_ranks(races(2), |rank, comm| support::arriving(rank, comm, &config, &shape, &case).map(drop));
        let shape = Shape { ranks: 2, experts: 2, topk: 2, hidden: 128 };
        let config = GroupConfig::new(2, 128, 2).tokens(5).sms(2).threads(64);
        let e4m3 = (instructions == Instructions::Warpgroups).then_some(Scales::F32);
        let case = Arriving { blocks: Some(2), instructions, e4m3, ..Arriving::of(&[5], &several[..1]) };
        on_ranks(races(2), |rank, comm| support::arriving(rank, comm, &config, &shape, &case).map(drop));
        // More rows than threads.
        let shape = Shape { ranks: 1, experts: 2, topk: 1, hidden: 8 };
        let config = GroupConfig::new(2, 8, 1).tokens(600).sms(2).threads(64);
        let case = Arriving { blocks: Some(2), instructions, ..Arriving::of(&[600], &[Routing::Uniform]) };
        on_ranks(races(1), |rank, comm| support::arriving(rank, comm, &config, &shape, &case).map(drop));
    }
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

/// Returns a rank's ids and weights of tokens, and memory with rows, ids, weights, the experts' weights, and for sums.
fn small(rank: &Rank, shape: &Shape, tokens: usize) -> Result<(Batch, [MemorySlice; 5]), EpError> {
    let (me, hidden) = (rank.rank() as usize, shape.hidden);
    let memory = |elements: usize| -> Result<MemorySlice, EpError> {
        Ok(Memory::new(rank.device(), MemoryKind::Device, 2 * elements as u64)?.whole())
    };
    let rows = |key: u64, first: usize, number: usize| -> Vec<u16> {
        (first..first + number).flat_map(|row| elements(shape, key, row)).collect()
    };
    let (columns, ids) = (shape.local() * hidden, tokens * shape.topk);
    let mine = batch(&Shape { hidden: 1, ..*shape }, Routing::Uniform, 3, me, tokens);
    let all = [memory(tokens * hidden)?, memory(2 * ids)?, memory(2 * ids)?, memory(columns * hidden)?];
    all[0].write(0, &rows(2, me * tokens, tokens))?;
    all[1].write(0, &mine.experts)?;
    all[2].write(0, &mine.weights)?;
    all[3].write(0, &rows(1, me * columns, columns))?;
    let [x, ids, scales, weights] = all;
    Ok((mine, [x, ids, scales, weights, memory(tokens * hidden)?]))
}

#[test]
fn slots_on_two_streams_multiply_rows_with_one_kernel_also_in_a_graph() {
    let (tokens, shape) = (140, Shape { ranks: 2, experts: 2, topk: 2, hidden: 8 });
    let config = GroupConfig::new(2, 8, 2).tokens(140).sms(2).threads(32).combine_at_source().slots(2);
    let config = config.deadline(Deadline::after_ms(60_000));
    on_ranks(WorldConfig::seeded(2, 8), |rank, comm| {
        let me = rank.rank() as usize;
        let group = Group::new(comm, &config)?;
        let early = OverlappedMatmul::new(&group, Some(2))?;
        let (mine, [x, ids, scales, weights, output]) = small(rank, &shape, tokens)?;
        let (_, [.., other]) = small(rank, &shape, tokens)?;
        let outputs = [&output, &other];
        let streams = [rank.stream()?, rank.stream()?];
        let mut slots = [group.slot(0)?, group.slot(1)?];
        let input = Tokens::new(&x, Ids::I32(&ids), tokens as u32);
        let mut graphs = Vec::new();
        for ((slot, stream), output) in slots.iter_mut().zip(&streams).zip(outputs) {
            let mut pair = || -> Result<(), EpError> {
                let received = slot.dispatch(stream, &input)?.multiply(stream, &early, &weights)?;
                received.combine(stream, Rows::Returned, &Combine::weighted(&scales).into(output))
            };
            pair()?;
            graphs.push(stream.capture(pair)?);
        }
        for _ in 0..3 {
            for (stream, graph) in streams.iter().zip(&graphs) {
                // Safety: memory and group outlive the graph, and all ranks replay theirs as often.
                unsafe { stream.replay(&**graph)? };
            }
        }
        for (stream, output) in streams.iter().zip(outputs) {
            stream.synchronize()?;
            let mut found = vec![0u16; tokens * shape.hidden];
            output.read(0, &mut found)?;
            check(
                &shape,
                (Routing::Uniform, None),
                me,
                &mine,
                |token| elements(&shape, 2, me * tokens + token),
                &found,
            );
        }
        comm.check("experts")?;
        assert_eq!(group.status()?, None);
        drop((graphs, slots));
        group.destroy()
    });
}

#[test]
fn a_silent_rank_is_left_out_of_products_of_rows_that_arrive_and_may_come_back() {
    const SILENT: usize = 2;
    let (tokens, shape) = (5, Shape { ranks: 3, experts: 6, topk: 3, hidden: 8 });
    let config =
        GroupConfig::new(6, 8, 3).tokens(5).sms(2).threads(32).combine_at_source().deadline(Deadline::after_ms(20));
    on_ranks(WorldConfig::seeded(3, 6), |rank, comm| {
        let (me, local) = (rank.rank() as usize, shape.local());
        let group = Group::new(comm, &config)?;
        let (early, stream) = (OverlappedMatmul::new(&group, Some(2))?, rank.stream()?);
        let (mine, [x, ids, scales, weights, output]) = small(rank, &shape, tokens)?;
        let row = |token: usize| elements(&shape, 2, me * tokens + token);
        // Runs a pair, and compares it with the sums without this rank.
        let pair = |silent: Option<usize>| -> Result<(), EpError> {
            let mut slot = group.slot(0)?;
            let sent = slot.dispatch(&stream, &Tokens::new(&x, Ids::I32(&ids), tokens as u32))?;
            let received = sent.multiply(&stream, &early, &weights)?;
            received.combine(&stream, Rows::Returned, &Combine::weighted(&scales).into(&output))?;
            stream.synchronize()?;
            let mut found = vec![0u16; tokens * 8];
            output.read(0, &mut found)?;
            let mut expected = mine.clone();
            for id in &mut expected.experts {
                *id = if silent.is_some_and(|silent| *id as usize / local == silent) { -1 } else { *id };
            }
            check(&shape, (Routing::Uniform, None), me, &expected, row, &found);
            Ok(())
        };
        if me != SILENT {
            for number in 0..3 {
                pair(Some(SILENT))?;
                let report = group.status()?.map(|report| (report.code, report.rank as usize));
                assert_eq!(report, (number == 0).then_some((Code::Silent, SILENT)));
                assert_eq!(group.masked(0)?, 1 << SILENT);
            }
        }
        rank.barrier()?;
        group.readmit()?;
        for _ in 0..2 {
            pair(None)?;
            assert_eq!((group.status()?, group.masked(0)?), (None, 0));
        }
        group.destroy()
    });
}

#[test]
fn products_of_rows_that_arrive_are_refused_where_they_do_not_fit() {
    on_ranks(WorldConfig::seeded(1, 1), |rank, comm| {
        let text = |error: Option<EpError>| error.map(|error| error.to_string()).unwrap_or_default();
        let config = GroupConfig::new(2, 8, 1).tokens(4).sms(1).threads(32).deadline(Deadline::after_ms(60_000));
        let refused = |config: &GroupConfig| -> Result<String, EpError> {
            let group = Group::new(comm, config)?;
            let error = text(OverlappedMatmul::new(&group, None).err());
            group.destroy()?;
            Ok(error)
        };
        assert!(refused(&config)?.contains("combine_at_source"));
        assert!(refused(&config.combine_at_source().element(Element::F16))?.contains("BF16"));
        let e4m3 = GroupConfig::new(2, 128, 1).tokens(4).sms(1).threads(32).combine_at_source();
        let ue8m0 = refused(&e4m3.element(Element::E4m3(Scales::Ue8m0)))?;
        assert!(ue8m0.contains("not BF16, or E4M3 with FP32 scales"), "{ue8m0}");
        let opaque = Element::Opaque { row_bytes: 16, scale_bytes: 0 };
        assert!(refused(&config.combine_at_source().element(opaque))?.contains("received rows that are not BF16"));

        let groups = [Group::new(comm, &config.combine_at_source())?, Group::new(comm, &config.combine_at_source())?];
        let early = [OverlappedMatmul::new(&groups[0], Some(1))?, OverlappedMatmul::new(&groups[1], Some(1))?];
        let memory = |bytes| Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, bytes)?.whole());
        let (rows, ids, weights, short) = (memory(64)?, memory(16)?, memory(256)?, memory(240)?);
        let (stream, mut slot) = (rank.stream()?, groups[0].slot(0)?);
        let tokens = Tokens::new(&rows, Ids::I32(&ids), 4);
        // The slot works after each refusal.
        let error = slot.dispatch(&stream, &tokens)?.multiply(&stream, &early[1], &weights).err();
        assert!(text(error).contains("another group"));
        let error = slot.dispatch(&stream, &tokens)?.multiply(&stream, &early[0], &short).err();
        let what = "the memory of the experts' weights";
        assert!(matches!(error, Some(EpError::Short { what: w, given: 240, needed: 256 }) if w == what));
        slot.dispatch(&stream, &tokens)?.multiply(&stream, &early[0], &weights)?.release();
        stream.synchronize()?;
        comm.check("experts")?;
        drop(slot);
        groups.into_iter().try_for_each(Group::destroy)
    });
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

#[test]
fn products_of_e4m3_are_refused_where_they_do_not_fit() {
    let text = |error: Option<EpError>| error.map(|error| error.to_string()).unwrap_or_default();
    let config = MatmulConfig::new(8, 136, 128).e4m3().blocks(1);
    on_ranks(WorldConfig::seeded(2, 1), |_, comm| {
        assert!(text(Matmul::all_gather(comm, &config).err()).contains("on one rank"));
        assert!(text(Matmul::all_gather(comm, &MatmulConfig::new(8, 8, 72).e4m3()).err()).contains("multiple of 128"));
        Ok(())
    });
    on_ranks(WorldConfig::seeded(1, 1), |rank, comm| {
        assert!(text(Matmul::reduce_scatter(comm, &config).err()).contains("on one rank"));
        let warps = config.instructions(Instructions::Warps);
        assert!(text(Matmul::all_gather(comm, &warps).err()).contains("FP8 products need an H100 or H200"));
        let memory = |bytes| Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, bytes)?.whole());
        let (a, b, c, scales) = (memory(8 * 128)?, memory(136 * 128)?, memory(2 * 8 * 136)?, memory(32)?);
        let (matmul, stream) = (Matmul::all_gather(comm, &config)?, rank.stream()?);
        let operands = Operands::new(&a, &b, &c);
        let run = |operands: Operands<'_>| text(matmul.run(&stream, Part::Fused, &operands).err());
        assert!(run(operands).contains("without scales"));
        let small = memory(4)?;
        assert!(run(operands.scales(&scales, &small)).contains("the memory of the scales of weights"));
        assert!(run(operands.scales(&small, &scales)).contains("the memory of the scales of rows"));
        assert_eq!(run(operands.scales(&scales, &scales)), "");
        stream.synchronize()?;
        matmul.destroy()?;
        let bf16 = Matmul::all_gather(comm, &MatmulConfig::new(8, 8, 8).blocks(1))?;
        let error = bf16.run(&stream, Part::Fused, &operands.scales(&scales, &scales)).err();
        assert!(text(error).contains("a product of BF16 with scales"));
        bf16.destroy()
    });
}

#[test]
fn experts_of_e4m3_are_refused_where_they_do_not_fit() {
    on_ranks(WorldConfig::seeded(1, 1), |rank, comm| {
        let text = |error: Option<EpError>| error.map(|error| error.to_string()).unwrap_or_default();
        let memory = |bytes| Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, bytes)?.whole());
        let config = GroupConfig::new(2, 128, 1).tokens(4).sms(1).threads(32).combine_at_source();
        let config = config.deadline(Deadline::after_ms(60_000)).element(Element::E4m3(Scales::F32));
        let group = Group::new(comm, &config)?;
        assert!(text(GroupedMatmul::e4m3(&group, 72, None).err()).contains("a multiple of 128"));
        let by_warps = OverlappedMatmul::by(Instructions::Warps, &group, None).err();
        assert!(text(by_warps).contains("FP8 products need an H100 or H200"));
        let early = OverlappedMatmul::new(&group, Some(1))?;
        let grouped = [GroupedMatmul::e4m3(&group, 128, Some(1))?, GroupedMatmul::e4m3(&group, 256, Some(1))?];
        let permuted = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, 4)?;
        let (x, ids, output) = (memory(4 * 256)?, memory(16)?, memory(4 * 256)?);
        // Two experts with 128 columns of up to 256 elements, and a scale for each 128.
        let (weights, scales, short) = (memory(2 * 128 * 256)?, memory(16)?, memory(4)?);
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let tokens = Tokens::new(&x, Ids::I32(&ids), 4);
        for (by, expected) in [
            (Weights::from(&weights), "a product of E4M3 without scales"),
            (Weights::e4m3(&weights, &short), "the memory of the scales of weights"),
        ] {
            let error = slot.dispatch(&stream, &tokens)?.multiply(&stream, &early, by).err();
            assert!(text(error).contains(expected), "{expected}");
        }
        let mut received = slot.exchange(&stream, &tokens)?;
        received.permute(&stream, &permuted)?;
        let wide = memory(4 * 256)?;
        let factors = Experts::new(&permuted, &wide, &weights);
        for (grouped, factors, expected) in [
            (&grouped[0], factors, "a product of E4M3 without scales"),
            (&grouped[0], factors.scales(None, &short), "the memory of the scales of weights"),
            (&grouped[0], factors.scales(&short, &scales), "the memory of the scales of rows"),
            (&grouped[1], factors.scales(None, &scales), "the scales of received rows"),
            (&grouped[0], factors.scales(None, &scales), ""),
        ] {
            let error = text(received.multiply(&stream, grouped, &factors, Products::At(&output)).err());
            assert!(error.contains(expected) && error.is_empty() == expected.is_empty(), "{expected}: {error}");
        }
        received.release();
        stream.synchronize()?;
        comm.check("experts")?;
        drop(slot);
        group.destroy()
    });
}

/// Its kernel would read memory that the communicator has freed.
#[test]
fn a_product_is_refused_after_the_end_of_its_communicator() {
    let outcome = launch(WorldConfig::seeded(1, 1), |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let (product, stream) = (Matmul::all_gather(&comm, &MatmulConfig::new(8, 8, 8))?, rank.stream()?);
        let memory = Memory::new(rank.device(), MemoryKind::Device, 128)?.whole();
        let operands = Operands::new(&memory, &memory, &memory);
        comm.destroy()?;
        let outcome = product.run(&stream, Part::Fused, &operands);
        assert_eq!(outcome.unwrap_err().to_string(), "cannot multiply: the communicator is destroyed");
        Ok(())
    });
    outcome.unwrap();
}
