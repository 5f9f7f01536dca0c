// SPDX-License-Identifier: MIT OR Apache-2.0

//! A user's kernels: only the device crate and its attribute, no feature and no panic handler.

#![no_std]

use gin_device::prelude::*;

/// A parameter and an element of a type of the crate.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Range {
    start: u32,
    len: u32,
}

shared! { static SCRATCH: [u32; 32]; }

/// Passes the barrier of the grid, then copies a range that `ranges` holds for each block.
///
/// # Safety
/// - The handles are valid; `word` is 0.
#[kernel]
pub unsafe fn copy_ranges(comm: Comm, ranges: Window<Range>, whole: Range, word: *mut u64, deadline: Deadline) {
    // SAFETY: guaranteed by the caller.
    let mut barrier = unsafe { GridBarrier::new(&comm, word) };
    if let Err(fault) = barrier.sync(deadline) {
        return comm.report(fault);
    }
    let mine = ranges.read((block_in_grid() % grid_dim().count()) as usize);
    if thread_in_block() < mine.len.min(whole.len) && lane() < WARP_SIZE {
        ranges.write(block_index().x as usize, Range { start: block_dim().x + thread_index().y, ..mine });
    }
}

/// Keeps a word in shared memory, puts `len` elements to the right neighbour and raises signal 0 there.
///
/// # Safety
/// - The handles are valid.
#[kernel(launch_bounds(128, 4))]
pub unsafe fn pass_on(comm: Comm, to: Window<u32>, from: Window<u32>, len: usize) {
    let scratch = SCRATCH.as_mut_ptr().cast::<u32>();
    // SAFETY: the first of 32 words.
    unsafe { scratch.write_volatile(1) };
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    let put = gin.put(comm.world().right(), to.range(0, len), from.range(0, len));
    if let Err(fault) = put.signal(SignalId::new(0).inc()).issue(&Thread) {
        comm.report(fault);
    }
}

/// Prints a line of each kind of value.
///
/// # Safety
/// - The handles are valid.
#[kernel]
pub unsafe fn prints(comm: Comm, words: Window<u32>) {
    gin_println!(comm, "{} {:#x} {} {}", words.len(), words.read(0), 0.5_f32, "a text");
}

/// Kernels of many puts.
#[cfg(feature = "many-puts")]
mod puts {
    use gin_device::prelude::*;

    /// Makes a kernel of five puts in a closure, and one whose puts are in functions, closures, loops and branches.
    macro_rules! puts {
        ($five:ident, $spread:ident, $backend:ty) => {
            /// Puts to five ranks and waits for five, in each round.
            ///
            /// # Safety
            /// - The handles are valid.
            #[kernel]
            pub unsafe fn $five(comm: Comm, to: Window<u32>, from: Window<u32>, rounds: u64, deadline: Deadline) {
                let gin = Gin::<$backend>::with_backend(&comm, ContextId::new(0));
                let (world, arrived, len) = (comm.world(), SignalId::new(0), from.len() / 5);
                let exchange = || -> Result<(), Fault> {
                    for round in 1..=rounds {
                        let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|part| from.range(part * len, len));
                        gin.put(world.right(), to.range(0, len), a).signal(arrived.inc()).issue(&Block)?;
                        gin.put(world.left(), to.range(len, len), b).signal(arrived.inc()).issue(&Block)?;
                        gin.put(world.after(2), to.range(2 * len, len), c).signal(arrived.inc()).issue(&Block)?;
                        gin.put(world.after(3), to.range(3 * len, len), d).signal(arrived.inc()).issue(&Block)?;
                        gin.put(world.after(4), to.range(4 * len, len), e).signal(arrived.inc()).issue(&Block)?;
                        gin.wait_signal(&Block, arrived, 5 * round, deadline)?;
                    }
                    Ok(())
                };
                if let Err(fault) = exchange() {
                    comm.report(fault);
                }
            }

            /// Puts in deep loops and behind several branches.
            ///
            /// # Safety
            /// - The handles are valid.
            #[kernel]
            pub unsafe fn $spread(comm: Comm, to: Window<u32>, from: Window<u32>, rounds: u64, deadline: Deadline) {
                let gin = Gin::<$backend>::with_backend(&comm, ContextId::new(0));
                if let Err(fault) = spread(&gin, to, from, rounds, deadline) {
                    comm.report(fault);
                }
            }
        };
    }

    puts!(five_puts_any, spread_puts_any, gin_device::backend::Any);
    puts!(five_puts_proxy, spread_puts_proxy, Proxy);

    /// Puts in deep loops and behind several branches.
    fn spread<B: Backend>(
        gin: &Gin<B>,
        to: Window<u32>,
        from: Window<u32>,
        rounds: u64,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let (world, len) = (gin.comm().world(), from.len() / 8);
        let [near, far, rare] = [0, 1, 2].map(SignalId::new);
        let put = |peer: Rank, part: usize, signal: SignalId| {
            gin.put(peer, to.range(part * len, len), from.range(part * len, len)).signal(signal.inc()).issue(&Block)
        };
        let three = |distance: u32, part: usize| -> Result<(), Fault> {
            put(world.after(distance), part, near)?;
            put(world.after(distance + 1), part + 1, far)?;
            put(world.after(distance + 2), part + 2, far)
        };
        for round in 1..=rounds {
            for distance in 1..=world.size() {
                for part in 0..4 {
                    three(distance, part)?;
                }
            }
            gin.wait_signal(&Block, near, round, deadline)?;
            put(world.right(), 4, near)?;
            gin.wait_signal(&Block, far, round, deadline)?;
            if from.read(0) == 1 && from.read(1) == 2 && from.read(2) == 3 && from.read(3) == 4 && from.read(4) == 5 {
                put(world.me(), 5, rare)?;
                if from.read(5) == 6 && from.read(6) == 7 {
                    three(3, 5)?;
                }
            }
        }
        gin.flush(&Block, deadline)
    }
}
