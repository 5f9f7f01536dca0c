use gin_nccl_host::gpu::cuda::{CudaDevice, device_count};
use gin_nccl_host::gpu::{Device, LaunchConfig, ModuleSource};
use gin_nccl_host::{Deadline, DeviceComm, Kernel, Library, Requirements, UniqueId, Window};
use std::sync::Arc;
use std::thread;

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

type Error = Box<dyn std::error::Error + Send + Sync>;

const LEN: usize = 1000;

/// Runs the kernel on one rank, and returns its first element.
fn on_rank(library: &Arc<Library>, id: UniqueId, rank: u32, ranks: u32) -> Result<u32, Error> {
    let device = CudaDevice::new(rank as usize, &[PTX])?;
    let nccl = library.init_rank(&device, id, rank, ranks)?;
    let run = || -> Result<u32, Error> {
        let requirements = Requirements { signals: 1, counters: 1, ..Requirements::default() };
        // Safety: the communicator is of this GPU, and is destroyed below.
        let comm = unsafe { DeviceComm::create(library, &device, nccl, &requirements)? };
        let module = device.load(ModuleSource::Linked)?;
        let kernel = Kernel::of(&device, &*module, "add_left")?;
        let stream = device.stream()?;
        let (mine, theirs) = (Window::new(&comm, 4 * LEN as u64)?, Window::new(&comm, 4 * LEN as u64)?);
        mine.write(0, &[rank + 1; LEN])?;
        let (shape, limit) = (LaunchConfig::new(1, 256), Deadline::after_ms(10_000));
        // Safety: the kernel's parameters, one block on every rank; the windows live until the stream is done.
        unsafe { kernel.launch(&*stream, shape, &[&comm, &mine, &theirs, &limit])? };
        stream.synchronize()?;
        if let Some(fault) = comm.check()? {
            return Err(fault.to_string().into());
        }
        let mut sums = [0; LEN];
        mine.read(0, &mut sums)?;
        Ok(sums[0])
    };
    let sum = run();
    // Safety: all that was made of it is gone.
    unsafe { library.destroy(nccl)? };
    sum
}

fn main() -> Result<(), Error> {
    let ranks = device_count()? as u32;
    let library = Library::open()?;
    let id = library.unique_id()?;
    // A rank on each GPU, each in its own thread.
    let sums: Result<Vec<u32>, Error> = thread::scope(|scope| {
        let library = &library;
        let start = |rank| scope.spawn(move || on_rank(library, id, rank, ranks));
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a rank panicked")?).collect()
    });
    println!("sums: {:?}", sums?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use gin_host::prelude::*;
    use my_program_kernels::add_left;

    /// Runs the same source on virtual GPUs, through gin's own device functions.
    #[test]
    fn every_seed_adds_the_elements_of_the_left_neighbour() {
        for seed in 1..=5 {
            let sums = launch(WorldConfig::seeded(3, seed).races(true), |rank| -> Result<u32, CommError> {
                let comm = rank.communicator(&Requirements::default().signals(1).counters(1))?;
                let mine = comm.alloc_window::<u32>(super::LEN, WindowFlags::NONE)?;
                let theirs = comm.alloc_window::<u32>(super::LEN, WindowFlags::NONE)?;
                mine.fill(rank.rank() + 1)?;
                let (stream, limit) = (rank.stream()?, gin_host::comm::Deadline::after_ms(1000));
                let shape = LaunchConfig::new(1, 256).cooperative();
                // Safety: one block on every rank; the windows live until the stream is done.
                unsafe { add_left::launch(&stream, shape, &comm.device()?, &mine, &theirs, limit)? };
                stream.synchronize()?;
                comm.check("add")?;
                let sum = mine.read_all()?[0];
                comm.destroy()?;
                Ok(sum)
            });
            assert_eq!(sums.unwrap(), [1 + 3, 2 + 1, 3 + 2]);
        }
    }
}
