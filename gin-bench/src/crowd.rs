// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posting threads, in the shapes for which NCCL's figures are known.

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
