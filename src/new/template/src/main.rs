use gin_host::comm::Deadline;
use gin_host::prelude::*;
use my_program_kernels::sum_of_left;
use std::error::Error;

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// Runs the kernel on three ranks with 1000 elements each. Returns each rank's sum.
fn sums(config: WorldConfig) -> Result<Vec<u64>, Box<dyn Error>> {
    let sums = launch(config, |rank| -> Result<u64, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        let mine = comm.alloc_window::<u32>(1000, WindowFlags::NONE)?;
        let theirs = comm.alloc_window::<u32>(1000, WindowFlags::NONE)?;
        mine.fill(rank.rank() + 1)?;
        let sum = Memory::new(rank.device(), MemoryKind::Device, 8)?;

        let stream = rank.stream()?;
        let (shape, limit) = (LaunchConfig::new(1, 256).cooperative(), Deadline::after_ms(1000));
        let address = sum.address() as usize as *mut u64;
        // Safety: one block on every rank; windows and memory live until the stream is done.
        unsafe { sum_of_left::launch(&stream, shape, &comm.device()?, &mine, &theirs, address, limit)? };
        stream.synchronize()?;
        comm.check("add up")?;
        let mut result = [0];
        sum.read(0, &mut result)?;
        comm.destroy()?;
        Ok(result[0])
    })?;
    Ok(sums)
}

fn main() -> Result<(), Box<dyn Error>> {
    // The GPUs of this machine, or virtual GPUs if it has none.
    let config = WorldConfig::auto(3, &[PTX])?;
    println!("on {}", config.choice);
    println!("sums: {:?}", sums(config)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs on virtual GPUs with several seeds: by loads and stores, then over the worst network that gin's contract
    /// allows. The detector of data races looks on.
    #[test]
    fn every_seed_adds_up_the_elements_of_the_left_neighbour() -> Result<(), Box<dyn Error>> {
        for seed in 1..=5 {
            let config = WorldConfig::seeded(3, seed).races(true);
            for config in [config.clone(), config.worst_network()] {
                assert_eq!(sums(config)?, [3000, 1000, 2000]);
            }
        }
        Ok(())
    }

    /// Runs on the GPUs of this machine, if it has any.
    #[test]
    fn each_gpu_adds_up_the_elements_of_its_left_neighbour() -> Result<(), Box<dyn Error>> {
        assert_eq!(sums(WorldConfig::auto(3, &[PTX])?)?, [3000, 1000, 2000]);
        Ok(())
    }
}
