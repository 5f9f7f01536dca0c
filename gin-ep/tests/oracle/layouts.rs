// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layouts, and the places of rows in large memory.

use crate::support::{self, Input, Pair, compare, experts};
use crate::{config, on_ranks, run};
use gin_ep::{Combine, Element, Group, Ids, Layout, MetadataMemory, Permuted, PermutedMemory, Rows, Scales, Tokens};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, per_rank};
use gin_gpu::{Memory, MemoryKind};
use gin_host::world::WorldConfig;
use gin_testkit::rotation;

#[test]
fn all_layouts_have_the_rows_of_the_oracle_in_its_order() {
    for layout in [
        Layout::Flat,
        Layout::RankMajorPadded,
        Layout::ExpertMajorPadded,
        Layout::ExpertMajorPacked { align: 1 },
        Layout::ExpertMajorPacked { align: 8 },
        Layout::ExpertMajorFixed,
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
    // So much room that rows are copied as they arrive.
    let shape = Shape { ranks: 2, experts: 3, topk: 1, hidden: 24 };
    on_ranks(WorldConfig::seeded(2, 8), |rank, comm| {
        support::layouts::layout(rank, comm, &config(&shape, 2049), Layout::RankMajorPadded, &shape, 2049)
    });
    let shape = Shape { ranks: 2, experts: 5, topk: 3, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 8), |rank, comm| {
        support::layouts::small_layouts(rank, comm, &config(&shape, 12), &shape, 12)
    });
}

#[test]
fn metadata_is_stored_at_the_places_of_rows() {
    for layout in [
        Layout::Flat,
        Layout::RankMajorPadded,
        Layout::ExpertMajorPadded,
        Layout::ExpertMajorPacked { align: 8 },
        Layout::ExpertMajorFixed,
    ] {
        let opaque = Element::Opaque { row_bytes: 16, scale_bytes: 300 };
        for element in [Element::Bf16, Element::E4m3(Scales::F32), opaque] {
            for (ranks, experts) in [(1, 2), (3, 7), (4, 3)] {
                let shape = Shape { ranks, experts, topk: 3, hidden: 512 };
                on_ranks(WorldConfig::seeded(ranks as u32, 8), |rank, comm| {
                    let config = config(&shape, 12).threads(64);
                    support::metadata::metadata(rank, comm, &config, (layout, element), &shape, 12)
                });
            }
        }
    }
}

#[test]
fn memory_of_metadata_that_a_layout_does_not_use_is_refused() {
    let shape = Shape { ranks: 1, experts: 2, topk: 2, hidden: 8 };
    on_ranks(WorldConfig::seeded(1, 8), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4))?;
        let memory = Memory::new(rank.device(), MemoryKind::Device, 256)?.whole();
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let ids = Memory::new(rank.device(), MemoryKind::Device, 32)?.whole();
        let tokens = Tokens::new(&memory, Ids::I32(&ids), 1);
        let [flat, major, listed] = [Layout::Flat, Layout::ExpertMajorFixed, Layout::ExpertMajorIndices]
            .map(|layout| Permuted::new(&group, layout, 8));
        let (flat, major, listed) = (flat?, major?, listed?);
        let mut received = slot.exchange(&stream, &tokens)?;
        let of = Some(&memory);
        let short = memory.memory().slice(0..4)?;
        let odd = memory.memory().slice(2..250)?;
        let none = MetadataMemory::default();
        for (to, into, text) in [
            (&listed, none, "metadata of a layout without rows"),
            (&major, MetadataMemory { experts: of, ..none }, "experts of an expert-major layout"),
            (&flat, MetadataMemory { offsets: of, ..none }, "the zones of experts of a layout that has none"),
            (&flat, MetadataMemory { scales: of, ..none }, "scales in a group whose rows have none"),
            (&flat, MetadataMemory { tokens: Some(&short), ..none }, "the memory of the tokens of rows"),
            (&flat, MetadataMemory { weights: Some(&odd), ..none }, "the memory of the weights of rows"),
        ] {
            let error = received.store_metadata(&stream, to, &into).expect_err("it is refused").to_string();
            assert!(error.contains(text), "{text}: {error}");
        }
        received.release();
        stream.synchronize()?;
        drop(slot);
        group.destroy()
    });
}

#[test]
fn fixed_zones_have_rows_tokens_and_columns_of_scales() {
    let elements = [
        Element::Bf16,
        Element::F32,
        Element::E4m3(Scales::F32),
        Element::E4m3(Scales::F32Powers),
        Element::E4m3(Scales::Ue8m0),
        Element::Opaque { row_bytes: 2064, scale_bytes: 8 },
        Element::Opaque { row_bytes: 16, scale_bytes: 300 },
    ];
    for (number, element) in elements.into_iter().enumerate() {
        // One kernel; several, with more experts than a block places at a time, or with so much room that a row's
        // metadata is sent before the row.
        let sizes = [(1, 2, 12), (3, 7, 12), (4, 3, 12), (1, 1100, 12), (2, 4, 2049)];
        for (ranks, experts, tokens) in rotation(number, sizes) {
            let shape = Shape { ranks, experts, topk: 3, hidden: 512 };
            on_ranks(WorldConfig::seeded(ranks as u32, 8), |rank, comm| {
                support::fixed::details(rank, comm, &config(&shape, tokens), element, &shape, 12)
            });
        }
    }
}

#[test]
fn memory_that_does_not_suit_a_layout_is_refused() {
    let shape = Shape { ranks: 1, experts: 2, topk: 1, hidden: 128 };
    on_ranks(WorldConfig::seeded(1, 2), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4).element(Element::E4m3(Scales::Ue8m0)))?;
        let fixed = Permuted::without_rows(&group, Layout::ExpertMajorFixed, 0)?;
        let packed = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, 8)?;
        let listed = Permuted::new(&group, Layout::ExpertMajorIndices, 8)?;
        let memory = Memory::new(rank.device(), MemoryKind::Device, 8 * 128)?;
        let (all, short, odd) = (memory.whole(), memory.slice(0..16)?, memory.slice(4..48)?);
        let none = PermutedMemory::default();
        for (to, memory, text) in [
            (&fixed, PermutedMemory { rows: Some(&short), ..none }, "the memory of permuted rows has 16 bytes, 1024"),
            (&fixed, PermutedMemory { counts: Some(&odd), ..none }, "the counts of a layout begins 4 bytes past"),
            (&fixed, PermutedMemory { counts: Some(&short), ..none }, "the counts of a layout has 16 bytes, 40 are"),
            (&fixed, PermutedMemory { tokens: Some(&all), ..none }, "not copied: add memory for the rows"),
            (&fixed, PermutedMemory { rows: Some(&all), tokens: Some(&short), ..none }, "has 16 bytes, 32 are needed"),
            (
                &fixed,
                PermutedMemory { rows: Some(&all), scales: Some(&all), ..none },
                "is 1; the limit is a multiple of 4",
            ),
            (&packed, PermutedMemory { tokens: Some(&all), ..none }, "use the layout with fixed zones"),
            (&listed, PermutedMemory { rows: Some(&all), ..none }, "copies none: leave it out"),
        ] {
            let error = to.with_memory(&memory).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(text), "{error:?} is not about {text:?}");
        }
        for (to, rows, text) in [
            (&packed, 9, "the number of rows of a layout is 9; the limit is at most 8"),
            (&fixed, 1, "use a flat or packed layout"),
        ] {
            let error = to.with_capacity(rows).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(text), "{error:?} is not about {text:?}");
        }
        let error = Permuted::new(&group, Layout::ExpertMajorFixed, 0).err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("a multiple of 4 in the layout with fixed zones")));
        group.destroy()
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
    const MANY: [usize; 16] = [13_000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
    for (experts, topk, sms, counts) in rotation(0, [(3, 1, 2, &[65_536][..]), (40, 2, 1, &MANY)]) {
        let shape = Shape { ranks: counts.len(), experts, topk, hidden: 8 };
        let config = config(&shape, counts[0] as u32).sms(sms).threads(512);
        let pair = Pair { routing: Routing::Uniform, counts, alternative: false };
        run(WorldConfig::seeded(counts.len() as u32, 2), config, shape, counts[0], &[pair]);
    }
}
