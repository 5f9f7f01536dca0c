// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random programs have the effect on memory that a simple model predicts; random bytes do no harm.

use crate::world::{COMPLETION, REGION, SIZE, World};
use gin_abi::mlx5::wqe::{self, Flags, Segment};
use gin_soft_nic::{Memory, Options};
use proptest::prelude::*;

/// Length of the part of a region that each operation touches.
const PART: u64 = 64;

#[derive(Clone, Copy, Debug)]
enum Step {
    Write { side: u32, to_relaxed: bool, part: u64, bytes: u32, value: u8 },
    Value { side: u32, part: u64, bytes: u32, value: u64 },
    Add { side: u32, amount: u64 },
    Read { side: u32, part: u64, bytes: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    let (side, part, bytes) = (0u32..2, 0..8u64, 1..=PART as u32);
    prop_oneof![
        (side.clone(), any::<bool>(), part.clone(), bytes.clone(), any::<u8>())
            .prop_map(|(side, to_relaxed, part, bytes, value)| Step::Write { side, to_relaxed, part, bytes, value }),
        (side.clone(), part.clone(), 1u32..=8, any::<u64>()).prop_map(|(side, part, bytes, value)| Step::Value {
            side,
            part,
            bytes,
            value
        }),
        (side.clone(), any::<u64>()).prop_map(|(side, amount)| Step::Add { side, amount }),
        (side, part, bytes).prop_map(|(side, part, bytes)| Step::Read { side, part, bytes }),
    ]
}

// Parts of each region: 8 that the peer writes to, 8 that its owner sends from, 8 that it reads into, words.
const SOURCES: u64 = 8 * PART;
const READS: u64 = 16 * PART;
const WORDS: u64 = 24 * PART;
const OLD: u64 = 24 * PART + 8;

/// The expected contents of the four regions, `[side][relaxed]`.
type Model = [[Vec<u8>; 2]; 2];

/// Posts one operation and applies its effect to the model. Each is complete before the next of its queue pair that
/// touches the same bytes, since all fence.
fn carry_out(world: &mut World, model: &mut Model, step: Step) {
    let both = Flags::COMPLETION.and(Flags::FENCE);
    match step {
        Step::Write { side, to_relaxed, part, bytes, value } => {
            let from = SOURCES + part * PART;
            let data = vec![value; bytes as usize];
            world.memory.put(World::place(side, false) + from, &data);
            model[side as usize][0][from as usize..][..data.len()].copy_from_slice(&data);
            let to = World::remote(1 - side, to_relaxed, part * PART);
            let entry = wqe::write(world.post(side, both), to, World::local(side, false, from, bytes));
            world.write(side, entry);
            let there = &mut model[1 - side as usize][usize::from(to_relaxed)];
            there[(part * PART) as usize..][..data.len()].copy_from_slice(&data);
        }
        Step::Value { side, part, bytes, value } => {
            let to = World::remote(1 - side, true, part * PART);
            let entry = wqe::write_value(world.post(side, both), to, value, bytes);
            world.write(side, entry);
            let data = &value.to_le_bytes()[..bytes as usize];
            model[1 - side as usize][1][(part * PART) as usize..][..data.len()].copy_from_slice(data);
        }
        Step::Add { side, amount } => {
            let (word, old) = (World::remote(1 - side, false, WORDS), World::local(side, false, OLD, 8));
            let entry = wqe::fetch_add(world.post(side, both), word, amount, old);
            world.write(side, entry);
            let there = &mut model[1 - side as usize][0][WORDS as usize..][..8];
            let before = u64::from_le_bytes((&*there).try_into().expect("8 bytes"));
            there.copy_from_slice(&before.wrapping_add(amount).to_le_bytes());
            model[side as usize][0][OLD as usize..][..8].copy_from_slice(&before.to_le_bytes());
        }
        Step::Read { side, part, bytes } => {
            let (from, to) = (World::remote(1 - side, true, part * PART), READS + part * PART);
            let entry = wqe::read(world.post(side, both), from, World::local(side, false, to, bytes));
            world.write(side, entry);
            let data = model[1 - side as usize][1][(part * PART) as usize..][..bytes as usize].to_vec();
            model[side as usize][0][to as usize..][..data.len()].copy_from_slice(&data);
        }
    }
    world.ring(match step {
        Step::Write { side, .. } | Step::Value { side, .. } | Step::Add { side, .. } | Step::Read { side, .. } => side,
    });
    world.settle();
}

/// Returns the bytes of all four regions.
fn regions(world: &World) -> Model {
    [0u32, 1].map(|side| [false, true].map(|relaxed| world.memory.bytes(World::place(side, relaxed), REGION).to_vec()))
}

proptest! {
    #[test]
    fn random_programs_do_to_every_byte_what_a_model_says(
        steps in proptest::collection::vec(step(), 1..40), delay in 0u64..6, seed in prop_oneof![Just(0u64), any::<u64>()],
    ) {
        let mut world = World::new(Options { delay, seed, ..Options::default() });
        let mut model: Model = regions(&world);
        let mut completions = [0; 2];
        for step in steps {
            carry_out(&mut world, &mut model, step);
            for side in 0..2u32 {
                while let Some(outcome) = world.completion(side) {
                    prop_assert!(outcome.result.is_ok(), "{:?}", outcome);
                    prop_assert_eq!(u64::from(outcome.index), completions[side as usize]);
                    completions[side as usize] += 1;
                }
            }
        }
        prop_assert_eq!(completions, world.next, "each entry has its completion");
        // These operations push everything into view.
        for side in 0..2u32 {
            let entry = wqe::dump(world.post(side, Flags::COMPLETION), World::local(side, false, 0, 1));
            world.write(side, entry);
            let (word, old) = (World::remote(1 - side, false, WORDS), World::local(side, false, OLD + 8, 8));
            let entry = wqe::fetch_add(world.post(side, Flags::COMPLETION), word, 0, old);
            world.write(side, entry);
            world.ring(side);
            world.settle();
        }
        for side in 0..2u32 {
            let word = world.memory.word(World::place(1 - side, false) + WORDS);
            model[side as usize][0][(OLD + 8) as usize..][..8].copy_from_slice(&word.to_le_bytes());
        }
        prop_assert!(regions(&world) == model);
        prop_assert_eq!(world.engine.violations().1, 0);
    }

    #[test]
    fn random_bytes_in_a_ring_touch_nothing_but_regions(
        slots in proptest::collection::vec(any::<[[u64; 2]; 4]>(), 1..8), heads: bool, seed: u64,
    ) {
        let mut world = World::new(Options { seed, ..Options::default() });
        let before = world.memory.0.clone();
        let count = slots.len() as u64;
        for (index, slot) in slots.iter().enumerate() {
            let mut slot = slot.map(|words| Segment { words });
            if heads {
                // A valid head, so that the engine decodes the rest.
                let nop = wqe::nop(world.post(0, Flags::NONE))[0];
                let operation = [0u64, 0x08, 0x0f, 0x10, 0x12, 0x23][index % 6];
                let segments = [1u64, 3, 2, 3, 4, 2][index % 6];
                slot[0].words[0] = nop.words[0] & !(0xff << 24 | 0xff << 56) | operation << 24 | segments << 56;
                slot[0].words[1] = nop.words[1];
            }
            world.write(0, slot);
        }
        world.ring(0);
        world.settle();
        let outcomes = world.syndromes(0);
        prop_assert!(outcomes.len() as u64 <= count.min(SIZE));
        let ring_and_record = 0x408;
        prop_assert!(world.memory.bytes(ring_and_record, 0x3f8) == &before[ring_and_record as usize..][..0x3f8]);
        prop_assert!(world.completions[COMPLETION as usize].produced <= count);
    }

    #[test]
    fn random_doorbells_break_a_queue_pair_but_nothing_else(words in proptest::collection::vec(any::<(u16, u16)>(), 1..20)) {
        let mut world = World::new(Options::default());
        for _ in 0..SIZE {
            world.write(0, wqe::nop(world.post(0, Flags::NONE)));
        }
        for (record, end) in words {
            world.record(0, u64::from(record % 16));
            world.ring_with(0, u64::from(end % 16));
            world.settle();
            let queue = *world.queue(0);
            prop_assert!(queue.finished <= queue.started && queue.started <= queue.posted);
            prop_assert!(queue.posted - queue.finished <= SIZE);
        }
        prop_assert!(world.memory.load_u64(World::place(1, false)) == 0);
    }
}
