// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shape of a launch, and the checks before it.

use super::{Argument, Function, GpuError, Limits};
use gin_abi::ABI_VERSION;
use gin_device::exec::Dim3;

/// The shape of a launch.
///
/// ```
/// use gin_gpu::LaunchConfig;
/// let config = LaunchConfig::new(8, 256).dynamic_shared(1024).cluster(2);
/// assert_eq!((config.blocks(), config.threads(), config.cluster_blocks()), (8, 256, 2));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LaunchConfig {
    /// The blocks.
    pub grid: Dim3,
    /// The threads of a block.
    pub block: Dim3,
    /// The bytes of dynamic shared memory of a block.
    pub dynamic_shared: u32,
    /// Refuses the launch unless all blocks can be resident at once. Blocks that wait for each other need that.
    pub cooperative: bool,
    /// The kernel may start before the one before it on the stream has ended: see [`dependent`](Self::dependent).
    pub dependent: bool,
    /// The blocks of a cluster, which run on neighbouring SMs at the same time. Each extent of the grid is a
    /// multiple of the cluster's extent. 1 in each direction means no clusters. The virtual GPU has no clusters, and no
    /// memory that the blocks of a cluster share.
    pub cluster: Dim3,
}

impl LaunchConfig {
    /// Makes the shape of `blocks` blocks of `threads` threads, in a row.
    pub fn new(blocks: u32, threads: u32) -> Self {
        let row = |x| Dim3 { x, y: 1, z: 1 };
        let (grid, block, cluster) = (row(blocks), row(threads), row(1));
        Self { grid, block, dynamic_shared: 0, cooperative: false, dependent: false, cluster }
    }

    /// Sets the bytes of dynamic shared memory of a block.
    #[must_use]
    pub fn dynamic_shared(mut self, bytes: u32) -> Self {
        self.dynamic_shared = bytes;
        self
    }

    /// Refuses the launch unless all blocks can be resident at once.
    #[must_use]
    pub fn cooperative(mut self) -> Self {
        self.cooperative = true;
        self
    }

    /// Lets the kernel start before the kernel before it on the stream has ended: as soon as each block of that has
    /// ended or called [`let_dependents_start`]. CUDA calls this programmatic dependent launch. Every thread of the
    /// kernel calls [`wait_for_predecessor`], before it accesses memory that the earlier kernel uses.
    ///
    /// The kernel starts in order all the same while ranks share the GPU or other streams have kernels on it, because
    /// blocks that wait could take the places that these need. A launch of both this and `cooperative` is refused, and
    /// so is a GPU, or a kernel compiled for one, that is older than sm_90.
    ///
    /// [`let_dependents_start`]: gin_device::sys::let_dependents_start
    /// [`wait_for_predecessor`]: gin_device::sys::wait_for_predecessor
    #[must_use]
    pub fn dependent(mut self) -> Self {
        self.dependent = true;
        self
    }

    /// Sets clusters of `blocks` blocks in a row.
    #[must_use]
    pub fn cluster(mut self, blocks: u32) -> Self {
        self.cluster = Dim3 { x: blocks, y: 1, z: 1 };
        self
    }

    /// Returns the number of blocks of a cluster.
    pub fn cluster_blocks(&self) -> u64 {
        count(self.cluster)
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> u64 {
        count(self.grid)
    }

    /// Returns the number of threads of a block.
    pub fn threads(&self) -> u64 {
        count(self.block)
    }
}

/// Returns the extents in each direction.
fn extents(Dim3 { x, y, z }: Dim3) -> [u32; 3] {
    [x, y, z]
}

fn count(extent: Dim3) -> u64 {
    // Three 32-bit factors overflow 64 bits only far past every limit.
    extents(extent).into_iter().map(u64::from).fold(1, u64::saturating_mul)
}

/// Checks a launch against the kernel and the limits of the device. Only an error asks for the `device`'s name.
///
/// # Errors
/// An error with the first value that does not fit, and its limit.
pub fn check_launch(
    function: &Function,
    config: &LaunchConfig,
    arguments: &[Argument],
    limits: &Limits,
    device: impl Fn() -> String,
) -> Result<(), GpuError> {
    if function.abi != ABI_VERSION {
        return Err(GpuError::AbiMismatch {
            kernel: function.name.clone(),
            kernel_abi: function.abi,
            host_abi: ABI_VERSION,
        });
    }
    if arguments.len() != function.parameters.len() {
        let names: Vec<&str> = function.parameters.iter().map(|parameter| parameter.name.as_str()).collect();
        return Err(GpuError::ParameterCount {
            kernel: function.name.clone(),
            expected: function.parameters.len(),
            given: arguments.len(),
            names: names.join(", "),
        });
    }
    for (position, (parameter, argument)) in function.parameters.iter().zip(arguments).enumerate() {
        if parameter.size != argument.bytes() {
            return Err(GpuError::ParameterSize {
                kernel: function.name.clone(),
                position,
                name: parameter.name.clone(),
                type_name: parameter.type_name.clone(),
                expected: parameter.size,
                given: argument.bytes(),
                given_type: argument.type_name(),
            });
        }
        if parameter.type_id.is_some_and(|expected| expected != argument.type_id()) {
            return Err(GpuError::ParameterType {
                kernel: function.name.clone(),
                position,
                name: parameter.name.clone(),
                type_name: parameter.type_name.clone(),
                given_type: argument.type_name(),
            });
        }
    }
    if config.dependent && config.cooperative {
        let reason = "it is cooperative as well; leave `cooperative` or `dependent` out".to_owned();
        return Err(GpuError::NotDependent { kernel: function.name.clone(), reason });
    }
    for (what, extent) in [("grid", config.grid), ("block", config.block), ("cluster", config.cluster)] {
        if count(extent) == 0 {
            return Err(GpuError::EmptyLaunch { what, x: extent.x, y: extent.y, z: extent.z });
        }
    }
    fn limit(what: &'static str, asked: u64, limit: u64, whose: impl Fn() -> String) -> Result<(), GpuError> {
        if asked > limit { Err(GpuError::LaunchLimit { what, asked, limit, whose: whose() }) } else { Ok(()) }
    }
    if let Some(bound) = function.max_threads {
        limit("a block size", config.threads(), u64::from(bound), || format!("kernel `{}`", function.name))?;
    }
    limit("a block size", config.threads(), u64::from(limits.threads_per_block), &device)?;
    for (what, extent, max) in
        [("a block extent", config.block, limits.block), ("a grid extent", config.grid, limits.grid)]
    {
        for (asked, max) in extents(extent).into_iter().zip(max) {
            limit(what, u64::from(asked), u64::from(max), &device)?;
        }
    }
    limit("a cluster's number of blocks", config.cluster_blocks(), u64::from(limits.cluster_blocks), &device)?;
    for (grid, cluster) in extents(config.grid).into_iter().zip(extents(config.cluster)) {
        if !grid.is_multiple_of(cluster) {
            return Err(GpuError::UnevenClusters { grid, cluster });
        }
    }
    limit("dynamic shared memory", u64::from(config.dynamic_shared), u64::from(limits.dynamic_shared), &device)
}

/// Returns the error of an unknown name, with the most similar names, at most three.
pub(super) fn unknown<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> GpuError {
    let mut known: Vec<(usize, &str)> = known.map(|other| (strsim::levenshtein(name, other), other)).collect();
    known.sort_unstable();
    known.dedup();
    let similar = known.into_iter().take(3).map(|(_, other)| format!("`{other}`")).collect();
    GpuError::UnknownKernel { name: name.to_owned(), similar }
}
