// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of products: by the instructions that the device has.

use crate::EpError;
use gin_ep_kernels::matmul::{tile, warpgroups};
use gin_gpu::{Device, Function, LaunchConfig, Memory, MemoryKind, MemorySlice, ModuleSource};
use std::sync::Arc;

/// The instructions by which kernels multiply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(hidden)]
pub enum Instructions {
    /// `mma.sync`.
    Warps,
    /// `wgmma`, if the kernels that the device loads have it, or else `mma.sync`.
    Warpgroups,
}

/// A kernel of products and its shape.
#[derive(Debug)]
pub(crate) struct Multiplier {
    pub(crate) kernel: Function,
    pub(crate) shape: LaunchConfig,
    /// Memory for the maps of each block, once for each launch that may run at the same time; empty if the kernel makes
    /// no maps.
    maps: Option<MemorySlice>,
    launches: u64,
}

/// Returns memory for the maps of launches.
fn memory(gpu: &Arc<dyn Device>, launches: u64, blocks: u32) -> Result<MemorySlice, EpError> {
    let bytes = launches * u64::from(blocks) * u64::from(warpgroups::MAPS_BYTES);
    Ok(Memory::new(gpu, MemoryKind::Device, bytes)?.whole())
}

impl Multiplier {
    /// Loads the kernel `name`, or its form by warpgroups, for at most `blocks` blocks, of which `sharing` launches
    /// divide the device. `launches` may run at the same time.
    pub(crate) fn new(
        gpu: &Arc<dyn Device>,
        name: &str,
        instructions: Instructions,
        (blocks, sharing, launches): (Option<u32>, u64, u64),
    ) -> Result<Self, EpError> {
        let module = gpu.load(ModuleSource::Linked)?;
        let by_warpgroups = format!("{name}_wgmma");
        let has_warpgroups = instructions == Instructions::Warpgroups && module.names().contains(&by_warpgroups);
        let (name, threads, shared) = if has_warpgroups {
            (by_warpgroups.as_str(), warpgroups::THREADS, warpgroups::SHARED_BYTES)
        } else if name.ends_with("_e4m3") {
            let remedy = "FP8 products need an H100 or H200; make BF16 of the factors for other GPUs";
            return Err(EpError::Unsuited { what: "products of E4M3 on a GPU without `wgmma`", remedy });
        } else {
            (name, tile::THREADS, tile::SHARED_BYTES)
        };
        let kernel = module.function(name)?;
        let shape = |blocks: u32| LaunchConfig::new(blocks, threads).dynamic_shared(shared);
        let max = gpu.resident_blocks(&kernel, &shape(1))? / sharing;
        let blocks = max.min(blocks.map_or(u64::MAX, u64::from)).clamp(1, 65_535) as u32;
        let maps = if has_warpgroups { Some(memory(gpu, launches, blocks)?) } else { None };
        Ok(Self { kernel, shape: shape(blocks), launches, maps })
    }

    /// Sets the number of blocks, also to more than can run at the same time.
    pub(crate) fn grid(self, blocks: u32) -> Result<Self, EpError> {
        let mut shape = self.shape;
        shape.grid = LaunchConfig::new(blocks, 1).grid;
        let maps = match &self.maps {
            Some(maps) => Some(memory(maps.memory().device(), self.launches, blocks)?),
            None => None,
        };
        Ok(Self { shape, maps, ..self })
    }

    /// Returns the address of the maps of a launch; 0 if the kernel makes none.
    pub(crate) fn maps(&self, launch: u32) -> u64 {
        let bytes = self.shape.blocks() * u64::from(warpgroups::MAPS_BYTES);
        self.maps.as_ref().map_or(0, |maps| maps.address() + u64::from(launch) * bytes)
    }

    /// Returns the memory that launches use.
    pub(crate) fn used(&self) -> Option<&MemorySlice> {
        self.maps.as_ref()
    }
}
