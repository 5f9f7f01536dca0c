// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stream and memory of the program's own CUDA calls, here by `cudarc`. The kernel is that of `ring_all_reduce`.
//!
//! ```text
//!   the program                        gin
//!   cuMemAlloc --- address, bytes ---> import_memory --> register: windows `data`, `inbox`
//!   cuStreamCreate --- CUstream -----> stream_from_raw -> launch
//!   cuMemcpyHtoD  -> data                                  |  ring_all_reduce
//!   cuMemcpyDtoH <-- data  <-------------------------------'
//! ```
//!
//! Memory and stream stay the program's: gin frees neither. Virtual GPUs have no CUDA, so without a GPU this example is
//! skipped.

use crate::Skipped;
use gin_host::prelude::*;
use std::error::Error;

/// Adds up vectors in memory of the program, on a stream of the program.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    if config.devices.is_none() {
        return Err(Skipped(format!("it needs a GPU; here are {}", config.choice)).into());
    }
    #[cfg(feature = "cuda")]
    return on_gpus(config);
    #[cfg(not(feature = "cuda"))]
    Err(Skipped("it was built without the feature `cuda`".to_owned()).into())
}

// ANCHOR: program
#[cfg(feature = "cuda")]
fn on_gpus(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    use crate::expect;
    use crate::ring_all_reduce::{CHUNK, expected, input};
    use cudarc::driver::{CudaContext, result};
    use gin_examples_kernels::ring_all_reduce::ring_all_reduce;
    use gin_host::comm::Deadline;
    use gin_host::device::cuda::CudaDevice;

    let ranks = config.ranks;
    let (len, bytes) = (ranks as usize * CHUNK, (ranks as usize * CHUNK * 4) as u64);
    let found = launch(config, |rank| -> Result<Vec<f32>, Box<dyn Error + Send + Sync>> {
        let device = CudaDevice::of(&**rank.device()).ok_or("the rank has no GPU")?;
        // The program's own handles. gin and cudarc both use the GPU's primary context.
        let context = CudaContext::new(device.ordinal())?;
        let own = context.new_stream()?;
        let values: Vec<f32> = (0..len).map(|index| input(rank.rank(), index)).collect();
        // Safety: the memory is as long as both windows, written before it is read, and freed below.
        let address = unsafe {
            let address = result::malloc_sync(2 * bytes as usize)?;
            result::memcpy_htod_sync(address, &values)?;
            address
        };

        let comm = rank.communicator(&Requirements::default().signals(1))?;
        // Safety: memory and stream live until the end of this function, when gin uses neither any more.
        let (memory, stream) =
            unsafe { (device.import_memory(address, 2 * bytes)?, device.stream_from_raw(own.cu_stream().cast())?) };
        let data = comm.register::<f32>(&memory.slice(0..bytes)?, WindowFlags::NONE)?;
        let inbox = comm.register::<f32>(&memory.slice(bytes..2 * bytes)?, WindowFlags::NONE)?;
        let (shape, limit) = (LaunchConfig::new(1, 256).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the windows live until the stream is done.
        unsafe { ring_all_reduce::launch(&stream, shape, &comm.device()?, &data, &inbox, limit)? };
        stream.synchronize()?;
        comm.check("reduce")?;
        // `destroy` is collective: after it no rank's kernel runs, and no rank uses this memory.
        comm.destroy()?;
        drop((data, inbox, memory, comm, stream));
        rank.barrier()?;

        let mut sums = vec![0.0; len];
        // Safety: the vector is as long as the data; the memory was allocated above, and is freed once.
        unsafe {
            result::memcpy_dtoh_sync(&mut sums, address)?;
            result::free_sync(address)?;
        }
        Ok(sums)
    })?;
    for (rank, found) in found.iter().enumerate() {
        expect(&format!("the sums on rank {rank}"), found, &expected(ranks))?;
    }
    Ok(format!("{len} sums on each of {ranks} ranks, in memory of the program"))
}
// ANCHOR_END: program
