// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posting threads, in the shapes for which NCCL's figures are known.

use super::figure::{Figure, median};
use super::lab::{Lab, Shape};
use gin_gpu::{KernelArg, Memory};
use gin_host::comm::{CommError, Communicator};

/// The shape of the posting threads, and their number of posts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crowd {
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// Number of ranks that each thread posts to in turn.
    pub(super) peers: u32,
    /// Number of posts of each thread in a launch.
    pub(super) posts: u64,
}

impl Crowd {
    /// Returns the number of threads of all blocks.
    pub(super) fn members(&self) -> u32 {
        self.blocks * self.threads
    }

    /// Returns the number of posts of all threads in a launch.
    pub(super) fn all(&self) -> u64 {
        u64::from(self.members()) * self.posts
    }

    pub(super) fn text(&self) -> String {
        let plural = |count: u32, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let blocks = if self.blocks == 1 { String::new() } else { format!("{} blocks x ", self.blocks) };
        format!("{blocks}{}, {}", plural(self.threads, "thread"), plural(self.peers, "peer"))
    }
}

/// The times of a post by the repeats of one kernel, in nanoseconds.
#[derive(Default)]
pub(super) struct Posts {
    /// From the first block that began to the last that ended, divided by all posts.
    all: Vec<f64>,
    /// The median thread's time, divided by all posts.
    threads: Vec<f64>,
}

impl Posts {
    /// Launches a kernel of posts and adds its times if `counts`. `times` has a word for each thread.
    pub(super) fn launch(
        &mut self,
        lab: &Lab<'_>,
        (kernel, crowd): (&'static str, &Crowd),
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
        times: &Memory,
        counts: bool,
    ) -> Result<(), CommError> {
        let shape = Shape { kernel, blocks: crowd.blocks, threads: crowd.threads, waits: false, shared: 0 };
        let table = std::ptr::without_provenance_mut::<u64>(times.address() as usize);
        let arguments: Vec<&dyn KernelArg> = arguments.iter().copied().chain([&table as &dyn KernelArg]).collect();
        let launched = lab.timed(shape, comm, &arguments)?;
        let mut own = vec![0u64; crowd.members() as usize];
        times.read(0, &mut own)?;
        if counts {
            let own: Vec<f64> = own.into_iter().map(|ns| ns as f64).collect();
            self.all.push(launched.ns / crowd.all() as f64);
            self.threads.push(median(&own) / crowd.all() as f64);
        }
        Ok(())
    }

    /// Returns the figure of all repeats, of which there is at least one.
    pub(super) fn figure(&self, wrong: Option<u64>) -> Figure {
        Figure { median_thread: Some(median(&self.threads)), ..Figure::new(&self.all, wrong) }
    }
}

/// Returns the shapes: on a real GPU with `posts` posts per thread, on a virtual GPU smaller ones. `all` is the number
/// of blocks that fill the GPU.
pub(super) fn crowds(real: bool, all: u32, posts: [u64; 6]) -> [Crowd; 6] {
    let (shapes, posts) = if real {
        ([(1, 1, 1), (1, 32, 1), (1, 32, 8), (1, 256, 8), (all, 1, 8), (all, 32, 8)], posts)
    } else {
        ([(1, 1, 1), (1, 32, 1), (1, 32, 8), (1, 64, 8), (3, 1, 8), (2, 32, 8)], [4, 2, 2, 1, 3, 2])
    };
    std::array::from_fn(|index| {
        let ((blocks, threads, peers), posts) = (shapes[index], posts[index]);
        Crowd { blocks, threads, peers, posts }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crowds_are_named_by_what_they_are() {
        let names = crowds(true, 132, [1; 6]).map(|crowd| crowd.text());
        assert_eq!(names[0], "1 thread, 1 peer");
        assert_eq!(names[2], "32 threads, 8 peers");
        assert_eq!(names[5], "132 blocks x 32 threads, 8 peers");
    }
}
