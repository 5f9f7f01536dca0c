// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metadata of rows in layouts, in memory of the program.

use super::fixed::{bytes, filled, with_tokens};
use super::layouts::expected_rows;
use super::{reaches_all, sent_row};
use gin_ep::{Element, EpError, Group, GroupConfig, Layout, MetadataMemory, Permuted};
use gin_ep_oracle::{Batch, Routing, Shape, batch, expert_major, flat};
use gin_host::comm::Communicator;
use gin_host::world::Rank;

/// The number of the first expert that `experts` gets in these tests.
const FIRST: u32 = 700;
const KEPT: u32 = 0xa5a5_a5a5;

/// The words that memory of metadata must have.
struct Words {
    experts: Vec<u32>,
    weights: Vec<u32>,
    scales: Vec<u32>,
    tokens: Vec<u32>,
    counts: Vec<u32>,
    offsets: Vec<u32>,
    zones: Vec<u32>,
    total: Vec<u32>,
}

/// Returns the expected words of a layout of which `places` are the places of rows in the order of the oracle.
fn expected(
    (layout, element): (Layout, Element),
    shape: &Shape,
    batches: &[Batch],
    me: usize,
    (capacity, scale_words): (usize, usize),
    places: &[usize],
) -> Words {
    let is_flat = matches!(layout, Layout::Flat | Layout::RankMajorPadded);
    let each = if is_flat { shape.topk } else { 1 };
    let kept = |words: usize| vec![KEPT; words];
    let mut words = Words {
        experts: kept(capacity * each),
        weights: kept(capacity * each),
        scales: kept(capacity * scale_words),
        tokens: kept(capacity),
        counts: Vec::new(),
        offsets: Vec::new(),
        zones: Vec::new(),
        total: vec![capacity as u32],
    };
    // Source, token, experts and weights of each row.
    let rows: Vec<(usize, usize, Vec<i32>, Vec<f32>)> = if is_flat {
        let rows = flat(shape, batches, me);
        words.counts = (0..shape.ranks).map(|of| rows.iter().filter(|row| row.source == of).count() as u32).collect();
        if layout == Layout::Flat {
            words.total = vec![rows.len() as u32];
        }
        rows.into_iter().map(|row| (row.source, row.token, row.experts, row.weights)).collect()
    } else {
        let zones = expert_major(shape, batches, me, 1);
        words.counts = zones.iter().map(|zone| zone.rows.len() as u32).collect();
        if let Layout::ExpertMajorPacked { align } = layout {
            let zones = expert_major(shape, batches, me, align as usize);
            words.offsets = zones.iter().map(|zone| zone.first as u32).collect();
            words.zones = zones.iter().map(|zone| zone.padded as u32).collect();
            words.total = vec![words.zones.iter().sum()];
        } else if layout == Layout::ExpertMajorFixed {
            let room = capacity / shape.local();
            words.offsets = (0..shape.local()).map(|expert| (expert * room) as u32).collect();
            words.zones = vec![room as u32; shape.local()];
        }
        let rows = zones.into_iter().flat_map(|zone| zone.rows);
        rows.map(|row| (row.source, row.token, Vec::new(), vec![row.weight])).collect()
    };
    assert_eq!(rows.len(), places.len());
    for ((source, token, experts, weights), &place) in rows.into_iter().zip(places) {
        for (k, weight) in weights.iter().enumerate() {
            words.weights[place * each + k] = weight.to_bits();
        }
        for (k, &expert) in experts.iter().enumerate() {
            words.experts[place * each + k] = if expert < 0 { u32::MAX } else { expert as u32 + FIRST };
        }
        words.tokens[place] = token as u32;
        let (_, scales) = sent_row(element, batches[source].row(shape, token), source, token);
        let scales = scales.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes")));
        words.scales[place * scale_words..][..scale_words].copy_from_slice(&scales.collect::<Vec<_>>());
    }
    words
}

/// Stores the metadata of rows in a layout, and compares all words with the oracle, also the words that must stay.
pub fn metadata(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    (layout, element): (Layout, Element),
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, &config.element(element))?;
    let (sizes, topk) = (group.sizes(), shape.topk as u64);
    let to = Permuted::new(&group, layout, (shape.ranks * max * shape.topk + 16 * shape.local()) as u32)?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let (rows, is_flat) = (u64::from(to.capacity()), matches!(layout, Layout::Flat | Layout::RankMajorPadded));
    let scale_words = sizes.scale_bytes as usize / 4;
    let ways: &[bool] = if reaches_all(comm, shape)? { &[false, true] } else { &[false] };
    for (number, &arrives) in ways.iter().cycle().take(3 * ways.len()).enumerate() {
        let routing = [Routing::Uniform, Routing::Holes, Routing::None][number / ways.len()];
        let make = |rank: usize| batch(shape, routing, number as u64, rank, max - rank % 2);
        let batches: Vec<Batch> = (0..shape.ranks).map(make).collect();
        let of_words = |count: u64| filled(rank, 4 * count);
        let each = if is_flat { topk } else { 1 };
        let numbers = if is_flat { shape.ranks } else { shape.local() };
        let (experts, weights) = (of_words(rows * each)?, of_words(rows * each)?);
        let (scales, tokens) = (of_words(rows * scale_words as u64)?, of_words(rows)?);
        let (counts, offsets) = (of_words(numbers as u64)?, of_words(numbers as u64)?);
        let (zones, total) = (of_words(numbers as u64)?, of_words(1)?);
        let has_zones = matches!(layout, Layout::ExpertMajorPacked { .. } | Layout::ExpertMajorFixed);
        // Each second dispatch gets ids of 64 bits.
        let is_wide = number % 2 == 1;
        let wide_experts = of_words(2 * rows * each)?;
        let into = MetadataMemory {
            experts: is_flat.then_some(if is_wide { &wide_experts } else { &experts }),
            weights: Some(&weights),
            scales: (scale_words != 0).then_some(&scales),
            tokens: Some(&tokens),
            counts: Some(&counts),
            offsets: has_zones.then_some(&offsets),
            zones: has_zones.then_some(&zones),
            total: Some(&total),
            first_expert: FIRST,
            is_wide,
        };
        with_tokens(rank, shape, element, &batches[me], |given| {
            let mut received = if arrives {
                slot.exchange_into(&stream, given, &to)?.0
            } else {
                let mut received = slot.exchange(&stream, given)?;
                received.permute(&stream, &to)?;
                received
            };
            received.store_metadata(&stream, &to, &into)?;
            received.release();
            Ok(stream.synchronize()?)
        })?;
        let places: Vec<usize> = match layout {
            Layout::ExpertMajorPacked { align } => {
                let zones = expert_major(shape, &batches, me, align as usize);
                zones.iter().flat_map(|zone| zone.first..zone.first + zone.rows.len()).collect()
            }
            _ => expected_rows(layout, shape, &batches, me, max).0.into_iter().map(|(place, _)| place).collect(),
        };
        let sizes = (rows as usize, scale_words);
        let mut words = expected((layout, element), shape, &batches, me, sizes, &places);
        if is_wide {
            // Places without a row keep their bytes; -1 has 64 bits.
            let halves = |&word: &u32| [word, if word == u32::MAX || word == KEPT { word } else { 0 }];
            words.experts = words.experts.iter().flat_map(halves).collect();
        }
        for (what, memory, words) in [
            ("experts", if is_wide { &wide_experts } else { &experts }, &words.experts),
            ("weights", &weights, &words.weights),
            ("scales", &scales, &words.scales),
            ("tokens", &tokens, &words.tokens),
            ("counts", &counts, &words.counts),
            ("offsets", &offsets, &words.offsets),
            ("zones", &zones, &words.zones),
            ("total", &total, &words.total),
        ] {
            let found = bytes(memory)?;
            let found = found.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes")));
            let found: Vec<u32> = found.take(words.len()).collect();
            assert_eq!(&found, words, "{what} of {layout:?}, {element:?}, {routing:?} at {me}");
        }
    }
    assert_eq!(group.status()?, None);
    drop(slot);
    group.destroy()
}
