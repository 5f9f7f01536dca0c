// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which tokens go to which ranks, counted by each block for itself.

use crate::lane::{Lane, Tokens};
use crate::status::{self, Code};
use gin_device::prelude::*;

/// The routing of all tokens, in the block's dynamic shared memory: for each 32 tokens a word for each rank, with a bit
/// for each token that goes there, and a word for tokens that are dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routes {
    bits: SharedArray<u32>,
    ranks: u32,
    /// Number of tokens that take part.
    pub(crate) tokens: u32,
}

impl Routes {
    /// Counts. All threads of the block call.
    #[inline(always)]
    pub(crate) fn new(arena: u64, lane: &Lane, tokens: &Tokens) -> Self {
        let sizes = &lane.sizes;
        let given = tokens.number();
        let number = given.min(sizes.tokens);
        let (ranks, local) = (sizes.ranks, sizes.local());
        let words = (number.div_ceil(32) * (ranks + 1)) as usize;
        let bits = shared::dynamic_array::<u32>(0, words);
        for word in Block.stripe(words) {
            bits.write(word, 0);
        }
        let first_block = block_in_grid() == 0;
        if given > number && first_block && Block.elect() {
            status::report(arena, lane, Code::TooManyTokens, 0, 0, given.into(), number.into());
        }
        Block.sync();
        for index in Block.stripe((number * sizes.topk) as usize) {
            let (id, token) = (tokens.id(index), index as u32 / sizes.topk);
            if id < 0 {
                continue;
            }
            let is_known = (id as u32) < sizes.experts;
            if !is_known && first_block {
                status::report(arena, lane, Code::UnknownExpert, 0, id as u32, token.into(), sizes.experts.into());
            }
            let to = if is_known { id as u32 / local } else { ranks };
            bits.or((token / 32 * (ranks + 1) + to) as usize, 1 << (token % 32));
        }
        Block.sync();
        Self { bits, ranks, tokens: number }
    }

    /// Returns the tokens of a group of 32 that go to a rank, as bits.
    #[inline(always)]
    fn group(&self, group: u32, rank: u32) -> u32 {
        let first = group * (self.ranks + 1);
        self.bits.read((first + rank) as usize) & !self.bits.read((first + self.ranks) as usize)
    }

    /// Returns whether a token goes to a rank.
    #[inline(always)]
    pub(crate) fn goes(&self, token: u32, rank: u32) -> bool {
        self.group(token / 32, rank) >> (token % 32) & 1 != 0
    }

    /// Returns the number of tokens before `token` that go to a rank.
    #[inline(always)]
    pub(crate) fn before(&self, token: u32, rank: u32) -> u32 {
        let mut count = 0;
        for group in 0..token / 32 {
            count += self.group(group, rank).count_ones();
        }
        if !token.is_multiple_of(32) {
            count += (self.group(token / 32, rank) & ((1 << (token % 32)) - 1)).count_ones();
        }
        count
    }
}
