// SPDX-License-Identifier: MIT OR Apache-2.0
//! Defaults of a run: blocks, threads, contexts and iterations, by device, route and size.

use super::RunDevice;
use crate::cli::{SizeArgs, Sizes, Workload};
use gin_host::comm::Routes;

/// Maximum number of blocks of all ranks on one GPU. A GPU that holds fewer lowers it.
const MAX_BLOCKS: u64 = 128;
/// Bytes for which a grid that loads and stores has one more block. Smaller sizes have fewer blocks, because each block
/// sends and awaits signals.
const BYTES_FOR_A_BLOCK: u64 = 16 << 10;
/// Bytes for which the grids of moe have one more block, and their minimum: a dispatch of few tokens takes as many.
const BYTES_OF_A_TOKEN: u64 = 1 << 10;
const MIN_BLOCKS_OF_MOE: u64 = 16;
/// Bytes for which a grid has one more block over the network, where each block puts its share at once.
const BYTES_OF_A_PUT: u64 = 256 << 10;
/// Maximum number of blocks over the network, and of contexts.
const MAX_PUTS: u64 = 32;
const MAX_CONTEXTS: u64 = 8;
/// Bytes that the iterations of a launch move together, and the limits of their number: a launch takes milliseconds, so
/// that its start does not count.
const BYTES_OF_A_LAUNCH: u64 = 1 << 30;
const ITERATIONS: (u64, u64) = (20, 1000);

/// Returns the sizes of a run.
pub(super) fn sizes(asked: &SizeArgs, workload: Workload, device: &RunDevice, ranks: u32, routes: Routes) -> Sizes {
    let (near, bytes) = (routes == Routes::Automatic, asked.bytes);
    let (contexts, blocks, threads, iters) = match device {
        RunDevice::Virtual => (1, 2, 64, 10),
        RunDevice::Cuda(gpus) => {
            let room = (MAX_BLOCKS / u64::from(gpus.max_on_one(ranks))).max(1);
            let total = if workload == Workload::Alltoall { bytes.saturating_mul(ranks.into()) } else { bytes };
            let blocks = match (workload, near) {
                (Workload::Ring | Workload::Alltoall, false) => bytes.div_ceil(BYTES_OF_A_PUT).clamp(1, MAX_PUTS),
                (Workload::Moe, _) => bytes.div_ceil(BYTES_OF_A_TOKEN).clamp(MIN_BLOCKS_OF_MOE, MAX_BLOCKS),
                _ => total.div_ceil(BYTES_FOR_A_BLOCK).clamp(1, MAX_BLOCKS),
            };
            let blocks = blocks.min(room);
            let contexts = if near { 1 } else { blocks.min(MAX_CONTEXTS) };
            // As many as the registers of the kernels allow.
            let threads = match (workload, near) {
                (Workload::Moe, true) => 512,
                (Workload::Alltoall, _) => 384,
                _ => 256,
            };
            let iters = (BYTES_OF_A_LAUNCH / total.max(1)).clamp(ITERATIONS.0, ITERATIONS.1);
            (contexts as u32, blocks as u32, threads, iters)
        }
    };
    Sizes {
        bytes,
        contexts: asked.contexts.unwrap_or(contexts),
        blocks: asked.blocks.unwrap_or(blocks),
        threads: asked.threads.unwrap_or(threads),
        iters: asked.iters.unwrap_or(iters),
        warmup: asked.warmup,
        check: asked.check == 1,
        repeats: asked.repeats,
    }
}
