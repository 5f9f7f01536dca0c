// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fresh memory of a virtual GPU takes no pages of the machine before something writes to it. The only test of its
//! process, because it looks at the memory of the process.

use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::{WorldConfig, launch};

const BYTES: u64 = 2 << 30;

/// Returns the resident bytes of this process.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

#[test]
fn large_memory_of_a_seeded_world_is_zero_and_untouched() {
    // The race detector takes memory for each access that it records.
    let grown = launch(WorldConfig::seeded(2, 1).races(false), |rank| -> Result<u64, CommError> {
        let comm = rank.communicator(&Requirements::default())?;
        let before = resident();
        let memory = Memory::new(rank.device(), MemoryKind::Device, BYTES)?;
        // Each element with a signal takes more words beside it.
        let window = comm.alloc_window::<u64>((BYTES / 1024) as usize, WindowFlags::SIGNALS)?;
        let grown = resident().saturating_sub(before);
        assert!(memory.address().is_multiple_of(256));
        let mut last = [1u64; 4];
        memory.read(BYTES - 32, &mut last)?;
        assert_eq!((last, window.read_all()?.iter().max()), ([0; 4], Some(&0)));
        memory.write(BYTES - 32, &[7u64; 4])?;
        comm.destroy()?;
        Ok(grown)
    });
    for (grown, rank) in grown.unwrap().into_iter().zip(0..) {
        assert!(grown < 64 << 20, "rank {rank}: {grown} bytes are resident of {BYTES} fresh ones");
    }
}
