// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shape of a launch: as the driver takes it, and how many of its blocks a GPU holds.

use super::context::Context;
use super::driver::written;
use super::launches::Fit;
use crate::{GpuError, LaunchConfig};
use cudarc::driver::sys::{self, CUfunction, CUstream};
use gin_device::exec::Dim3;

/// A launch's shape as the driver takes it.
pub(super) struct Shape {
    /// The configuration contains the address of these.
    _attributes: Vec<sys::CUlaunchAttribute>,
    pub(super) config: sys::CUlaunchConfig,
}

impl Shape {
    pub(super) fn new(config: &LaunchConfig, stream: CUstream) -> Self {
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = Vec::new();
        if config.cooperative {
            let value = sys::CUlaunchAttributeValue { cooperative: 1 };
            attributes.push(attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value));
        }
        if config.dependent {
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes.push(attribute(id, value));
        }
        // Left out without clusters, because GPUs without clusters refuse it.
        if config.cluster_blocks() > 1 {
            let Dim3 { x, y, z } = config.cluster;
            let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            let value = sys::CUlaunchAttributeValue { clusterDim: cluster };
            attributes.push(attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value));
        }
        let config = sys::CUlaunchConfig {
            gridDimX: config.grid.x,
            gridDimY: config.grid.y,
            gridDimZ: config.grid.z,
            blockDimX: config.block.x,
            blockDimY: config.block.y,
            blockDimZ: config.block.z,
            sharedMemBytes: config.dynamic_shared,
            hStream: stream,
            attrs: if attributes.is_empty() { std::ptr::null_mut() } else { attributes.as_mut_ptr() },
            numAttrs: attributes.len() as u32,
        };
        Self { _attributes: attributes, config }
    }
}

/// Returns how many blocks of a shape the GPU holds.
pub(super) fn fit(context: &Context, function: CUfunction, config: &LaunchConfig) -> Result<Fit, GpuError> {
    context.enter()?;
    let (threads, shared) = (config.threads() as i32, config.dynamic_shared as usize);
    // Safety: writes one integer; the function's module is loaded.
    let ask = |blocks| unsafe { sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared) };
    let blocks = written("ask how many blocks fit", 0, ask)?;
    let (per_sm, cluster) = (blocks as u64, config.cluster_blocks());
    if cluster <= 1 {
        return Ok(Fit { per_sm, cluster, clusters: u64::from(context.sms) * per_sm });
    }
    // gin itself checks the cooperative case.
    let alone = LaunchConfig { cooperative: false, dependent: false, ..*config };
    let shape = Shape::new(&alone, std::ptr::null_mut());
    // Safety: writes one integer; the shape is alive.
    let ask = |clusters| unsafe { sys::cuOccupancyMaxActiveClusters(clusters, function, &raw const shape.config) };
    let clusters = written("ask how many clusters fit", 0, ask)?;
    Ok(Fit { per_sm, cluster, clusters: clusters as u64 })
}
