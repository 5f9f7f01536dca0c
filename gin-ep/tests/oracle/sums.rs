// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums of the returned rows.

use crate::support::{self, Input, experts};
use crate::{config, on_ranks};
use gin_ep::{Combine, Element, EpError, Group, GroupConfig, Ids, Layout, Permuted, Rows, Tokens};
use gin_ep_oracle::{Batch, Shape, narrow};
use gin_gpu::{Memory, MemoryKind};
use gin_host::world::{Rank, WorldConfig};

/// Terms whose sum is 0 in this order, since the first one swallows the second, and 1 if the second comes last.
const TERMS: [f32; 3] = [16_777_216.0, 1.0, -16_777_216.0];
/// Terms, their weights, and their sum, which has its last bit only if product and sum are rounded once.
const CLOSE: [f32; 3] = [-1.0, 1.0 + 1.0 / 4096.0, 0.0];
const FACTORS: [f32; 3] = [1.0, 1.0 + 1.0 / 4096.0, 1.0];
const REMAINS: f32 = 1.0 / 2048.0 + 1.0 / 16_777_216.0;

#[test]
fn sums_have_the_order_of_the_ids_and_round_each_product_once() {
    let memory = |rank: &Rank, values: &[f32]| -> Result<_, EpError> {
        let memory = Memory::new(rank.device(), MemoryKind::Device, 32 * values.len() as u64)?.whole();
        memory.write(0, &values.iter().flat_map(|&value| [value; 8]).collect::<Vec<_>>())?;
        Ok(memory)
    };
    // The order in which the ids name the ranks, which each have a row.
    on_ranks(WorldConfig::seeded(3, 5), |rank, comm| {
        let config = GroupConfig::new(3, 8, 3).tokens(1).element(Element::F32).sms(1).threads(32);
        let (group, stream) = (Group::new(comm, &config)?, rank.stream()?);
        let (row, output) = (memory(rank, &[1.0])?, memory(rank, &[9.0])?);
        let ids = Memory::new(rank.device(), MemoryKind::Device, 12)?.whole();
        let mut slot = group.slot(0)?;
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            ids.write(0, &order.map(|id: i32| id))?;
            let position = order.iter().position(|&id| id == rank.rank() as i32).expect("each rank has an id");
            let rows = memory(rank, &[TERMS[position]; 3])?;
            let received = slot.exchange(&stream, &Tokens::new(&row, Ids::I32(&ids), 1))?;
            received.combine(&stream, Rows::At(&rows), &Combine::reduced().into(&output))?;
            stream.synchronize()?;
            let mut found = [9f32; 8];
            output.read(0, &mut found)?;
            assert_eq!(found, [0.0; 8], "{order:?}");
        }
        drop(slot);
        group.destroy()
    });
    // The order of the ids, at the source and on the rank of the experts.
    on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
        let config = GroupConfig::new(3, 8, 3).tokens(1).element(Element::F32).sms(1).threads(32);
        let (row, output, stream) = (memory(rank, &[1.0])?, memory(rank, &[9.0])?, rank.stream()?);
        let new = || -> Result<_, EpError> { Ok(Memory::new(rank.device(), MemoryKind::Device, 12)?.whole()) };
        let (ids, weights) = (new()?, new()?);
        for order in [[0usize, 1, 2], [2, 0, 1], [1, 2, 0]] {
            ids.write(0, &order.map(|id| id as i32))?;
            for (factors, terms, expected) in [([1.0f32; 3], TERMS, 0.0), (FACTORS, CLOSE, REMAINS)] {
                weights.write(0, &factors)?;
                let tokens = Tokens::new(&row, Ids::I32(&ids), 1).weights(&weights);
                let check = |what: &str| -> Result<(), EpError> {
                    stream.synchronize()?;
                    let mut found = [9f32; 8];
                    output.read(0, &mut found)?;
                    assert_eq!(found, [expected; 8], "{what} {order:?}");
                    Ok(())
                };
                let group = Group::new(comm, &config.combine_at_source())?;
                let mut slot = group.slot(0)?;
                let received = slot.exchange(&stream, &tokens)?;
                let rows = memory(rank, &terms)?;
                received.combine(&stream, Rows::At(&rows), &Combine::weighted(&weights).into(&output))?;
                check("at the source")?;
                drop(slot);
                group.destroy()?;

                let group = Group::new(comm, &config)?;
                let (to, mut slot) =
                    (Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, 3)?, group.slot(0)?);
                let mut received = slot.exchange(&stream, &tokens)?;
                received.permute(&stream, &to)?;
                // One row for each expert, by its number.
                let mut by_expert = [0f32; 3];
                order.iter().zip(terms).for_each(|(&id, term)| by_expert[id] = term);
                let rows = memory(rank, &by_expert)?;
                received.reduce(&stream, Rows::PermutedAt(&to, &rows))?;
                received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&output))?;
                check("on the rank of the experts")?;
                drop(slot);
                group.destroy()?;
            }
        }
        Ok(())
    });
}

#[test]
fn rows_for_each_id_come_back_and_are_added_up_with_weights() {
    for (ranks, experts, topk, hidden) in [(1, 4, 1, 8), (3, 7, 5, 48), (2, 8, 32, 1032)] {
        let shape = Shape { ranks, experts, topk, hidden };
        let config = config(&shape, 12);
        on_ranks(WorldConfig::seeded(ranks as u32, 9), |rank, comm| {
            support::combine_at_source(rank, comm, &config, &shape, 12)
        });
    }
}

#[test]
fn a_sum_of_fp32_rows_is_rounded_once() {
    let shape = Shape { ranks: 2, experts: 4, topk: 3, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 1), |rank, comm| {
        // Rank 0 makes 3 + 31 * 4.375 = 138.625 of 3, rank 1 0.71875. From 128 on, BF16 are integers.
        for (config, sum) in [(config(&shape, 1), 140.0), (config(&shape, 1).combine_f32(), 139.0)] {
            let rows = vec![narrow(3.0); 8];
            let mine = Batch { rows, experts: vec![0, 1, 2], weights: vec![1.0, 31.0, 0.125] };
            let group = Group::new(comm, &config)?;
            let input = Input::new(rank, &shape, 1)?;
            input.write(&mine, false)?;
            let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
            let received = slot.exchange(&stream, &input.tokens(1, false))?;
            let made = support::experts_f32(rank, &stream, &shape, &received, 1)?;
            experts(rank, &stream, &shape, &received)?;
            let is_wide = group.sizes().combine_bytes == 32;
            let rows = if is_wide { Rows::At(&made) } else { Rows::InPlace };
            received.combine(&stream, rows, &Combine::reduced().into(&input.output))?;
            stream.synchronize()?;
            let mut found = [0u16; 8];
            input.output.read(0, &mut found)?;
            assert_eq!(found, [narrow(sum); 8]);
            assert_eq!(group.status()?, None);
            drop(slot);
            group.destroy()?;
        }
        Ok(())
    });
}
