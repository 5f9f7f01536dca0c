// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layouts, and the places of rows in large memory.

use crate::support::{self, Input, Pair, compare, experts};
use crate::{config, on_ranks, run};
use gin_ep::{Combine, Group, Layout, Permuted, Rows};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, per_rank};
use gin_host::world::WorldConfig;

#[test]
fn all_layouts_have_the_rows_of_the_oracle_in_its_order() {
    for layout in [
        Layout::Flat,
        Layout::ExpertMajorPadded,
        Layout::ExpertMajorPacked { align: 1 },
        Layout::ExpertMajorPacked { align: 8 },
    ] {
        // More rows than threads; more experts than a block places at a time.
        for (ranks, experts, topk) in [(1, 3, 2), (3, 7, 4), (4, 3, 3), (1, 1100, 3)] {
            let shape = Shape { ranks, experts, topk, hidden: 24 };
            let config = config(&shape, 40).threads(32);
            on_ranks(WorldConfig::seeded(ranks as u32, 8), |rank, comm| {
                support::layouts::layout(rank, comm, &config, layout, &shape, 40)
            });
        }
    }
    let shape = Shape { ranks: 2, experts: 5, topk: 3, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 8), |rank, comm| {
        support::layouts::small_layouts(rank, comm, &config(&shape, 12), &shape, 12)
    });
}

#[test]
fn rows_lie_in_an_arena_of_32_gib() {
    // The regions of rank 1 and of buffer 1 lie past 4 GiB. Few pages are touched.
    let shape = Shape { ranks: 2, experts: 2, topk: 2, hidden: 32_768 };
    let config = config(&shape, 65_536);
    assert!(config.footprint(2).unwrap() > 32 << 30);
    on_ranks(WorldConfig::seeded(2, 2), |rank, comm| {
        let me = rank.rank() as usize;
        let group = Group::new(comm, &config)?;
        let (input, stream, mut slot) = (Input::new(rank, &shape, 3)?, rank.stream()?, group.slot(0)?);
        for number in 0..4 {
            let batches: Vec<Batch> =
                (0..2).map(|rank| batch(&shape, Routing::Uniform, number, rank, 3 - rank)).collect();
            input.write(&batches[me], false)?;
            let received = slot.exchange(&stream, &input.tokens(3 - me, false))?;
            stream.synchronize()?;
            compare(&received, &shape, &batches, me)?;
            experts(rank, &stream, &shape, &received)?;
            received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
            stream.synchronize()?;
            let expected = per_rank(&shape, &batches[me], &[], Experts);
            input.compare(&expected, format_args!("pair {number}"))?;
        }
        assert_eq!(group.status()?, None);
        drop(slot);
        group.destroy()
    });
}

#[test]
fn a_padded_layout_past_4_gib_has_each_row_in_its_zone() {
    // Each rank has 8 GiB of zones, of which few pages are touched: also free threads make them well within a deadline.
    let shape = Shape { ranks: 2, experts: 128, topk: 2, hidden: 8192 };
    for world in [WorldConfig::seeded(2, 2), WorldConfig::threads(2)] {
        on_ranks(world, |rank, comm| {
            let me = rank.rank() as usize;
            let group = Group::new(comm, &config(&shape, 4096))?;
            let to = Permuted::new(&group, Layout::ExpertMajorPadded, 0)?;
            let all = to.rows().expect("a padded layout has rows");
            assert_eq!(all.bytes(), 8 << 30);
            let (input, stream, mut slot) = (Input::new(rank, &shape, 3)?, rank.stream()?, group.slot(0)?);
            let mut mine = batch(&shape, Routing::Uniform, 1, me, 3);
            // The last expert of each rank.
            mine.experts = [63, 127].repeat(3);
            input.write(&mine, false)?;
            let mut received = slot.exchange(&stream, &input.tokens(3, false))?;
            received.permute(&stream, &to)?;
            stream.synchronize()?;
            for (source, rows) in received.fetch()?.iter().enumerate() {
                assert_eq!(rows.len(), 3);
                let zone = (63 * 2 + source) as u64 * 4096;
                for (row, expected) in (zone..).zip(rows) {
                    let mut found = vec![0u8; expected.row.len()];
                    all.read(row * found.len() as u64, &mut found)?;
                    assert!(found == expected.row, "row {row} of rank {me}");
                }
            }
            received.release();
            assert_eq!(group.status()?, None);
            drop(slot);
            group.destroy()
        });
    }
}

#[test]
fn all_tokens_that_a_rank_may_have_find_their_places() {
    // Groups of tokens fit into shared memory several times over with 1 rank, and not at once with 16.
    let all = Shape { ranks: 1, experts: 3, topk: 1, hidden: 8 };
    let pairs = |tokens| [Pair { routing: Routing::Uniform, counts: tokens, alternative: false }];
    run(WorldConfig::seeded(1, 2), config(&all, 65_536).threads(512), all, 65_536, &pairs(&[65_536]));
    let many = Shape { ranks: 16, experts: 40, topk: 2, hidden: 8 };
    let counts = &[13_000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
    run(WorldConfig::seeded(16, 2), config(&many, 13_000).sms(1).threads(512), many, 13_000, &pairs(counts));
}
