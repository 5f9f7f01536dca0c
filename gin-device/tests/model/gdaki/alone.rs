// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of posts by the only thread that uses a queue pair.

use super::World;
use crate::model::{await_word, explore, models};
use gin_abi::Deadline;
use gin_device::gin::Sharing;
use gin_device::sys::Word;
use loom::thread;

impl World {
    fn post_alone(&self, cell: usize, more: bool) {
        self.post_as(cell, Sharing::Thread, more, Deadline::NONE).unwrap();
    }
}

models! {
    fn entries_of_one_thread_alone_are_whole_and_overwrite_none() {
        for to_gpu in [false, true] {
            explore(2, move || {
                let world = World::releasing(1, 0, 4, to_gpu);
                let poster = {
                    let world = world.clone();
                    thread::spawn(move || {
                        (0..4).for_each(|cell| world.post_alone(cell, false));
                        world.finish();
                    })
                };
                let mut nic = world.nic();
                nic.serve(1);
                poster.join().unwrap();
                assert_eq!(nic.cells, [0, 1, 2, 3]);
            });
        }
    }

    fn one_thread_alone_rings_for_what_it_holds_back_when_the_queue_is_full() {
        explore(2, || {
            let world = World::new(1, 0, 4);
            let poster = {
                let world = world.clone();
                thread::spawn(move || {
                    (0..3).for_each(|cell| world.post_alone(cell, true));
                    world.post_alone(3, false);
                    world.finish();
                })
            };
            let mut nic = world.nic();
            nic.serve(1);
            poster.join().unwrap();
            assert_eq!(nic.cells, [0, 1, 2, 3]);
        });
    }

    fn one_thread_alone_hands_the_queue_over() {
        // The second one posts alone too, or as one of several.
        for sharing in [Sharing::Thread, Sharing::Gpu] {
            explore(2, move || {
                let world = World::new(1, 0, 3);
                let over = world.pair.status.kernel.at(1);
                let first = {
                    let world = world.clone();
                    thread::spawn(move || {
                        world.post_alone(0, false);
                        world.post_alone(1, true);
                        over.store_release_gpu(1);
                        world.finish();
                    })
                };
                let second = {
                    let world = world.clone();
                    thread::spawn(move || {
                        await_word(over);
                        world.post_as(2, sharing, false, Deadline::NONE).unwrap();
                        world.finish();
                    })
                };
                let mut nic = world.nic();
                nic.serve(2);
                first.join().unwrap();
                second.join().unwrap();
                assert_eq!(nic.cells, [0, 1, 2]);
            });
        }
    }
}
