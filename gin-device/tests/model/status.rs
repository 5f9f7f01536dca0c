// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of the status blocks: abort, faults of the host, faults that kernels report.

use super::{Reached, Setup, World, explore, fault, models};
use gin_abi::{Deadline, Fault};
use gin_device::internal::status::WaitError;
use gin_device::sys::Memory;
use gin_device::sys::loom::Loom;
use loom::thread;
use std::sync::Arc;

fn cells(cells: usize) -> Setup {
    Setup { cells, ..Setup::default() }
}

/// Waits for an event that never happens.
fn wait_in_vain(world: &World) -> Fault {
    world.fault_of(world.status.poll(Deadline::NONE, || false))
}

/// Writes to cell `number`, then reports fault `number`.
fn report(world: &World, number: u64) {
    world.cells[number as usize].write(number + 100);
    world.status.report(fault(number));
}

/// Checks that a fault is whole and one of `numbers`, and reads the cell written before it. Returns its number.
fn reported(world: &World, seen: Fault, numbers: std::ops::Range<u64>) -> u64 {
    let number = numbers.into_iter().find(|&number| fault(number) == seen);
    let number = number.unwrap_or_else(|| panic!("torn record: {seen:?}"));
    assert_eq!(world.cells[number as usize].read(), number + 100, "what was written before the fault");
    number
}

models! {
    fn an_abort_by_the_host_ends_every_wait_of_every_kernel_thread_with_the_whole_record() {
        explore(3, || {
            let world = World::new(cells(1));
            let waiters = [0, 1].map(|_| {
                let world = world.clone();
                thread::spawn(move || reported(&world, wait_in_vain(&world), 0..1))
            });
            world.cells[0].write(100);
            world.status.post(fault(0));
            for waiter in waiters {
                waiter.join().unwrap();
            }
        });
    }

    fn of_two_kernel_threads_that_report_at_once_one_wins_and_all_read_its_whole_record() {
        let won = [Reached::new("first reporter wins"), Reached::new("second reporter wins")];
        let marks = won.clone();
        explore(3, move || {
            let world = World::new(cells(2));
            let reporters = [0, 1].map(|number| {
                let world = world.clone();
                thread::spawn(move || {
                    report(&world, number);
                    // The other thread's record may not be whole yet.
                    let seen = wait_in_vain(&world);
                    (0..2).find(|&number| fault(number) == seen).expect("a whole record")
                })
            });
            let [one, two] = reporters.map(|reporter| reporter.join().unwrap());
            assert_eq!(one, two, "two winners");
            marks[one as usize].mark();
            assert_eq!(world.status.reported(), Some(fault(one)), "what the host reads");
        });
        won.iter().for_each(Reached::check);
    }

    fn a_report_of_a_kernel_ends_the_waits_of_others_and_shows_earlier_writes() {
        explore(3, || {
            let world = World::new(cells(2));
            let spawn = |run: fn(&World)| {
                let world: Arc<World> = world.clone();
                thread::spawn(move || run(&world))
            };
            let reporter = spawn(|world| report(world, 0));
            let waiter = spawn(|world| {
                reported(world, wait_in_vain(world), 0..1);
            });
            // The host reads its own copy.
            let seen = loop {
                if let Some(fault) = world.status.reported() {
                    break fault;
                }
                Loom::pause(0);
            };
            reported(&world, seen, 0..1);
            reporter.join().unwrap();
            waiter.join().unwrap();
        });
    }

    fn a_fault_of_the_host_and_one_of_a_kernel_at_once_give_one_of_the_two_whole() {
        let seen = [Reached::new("fault of the host"), Reached::new("fault of the kernel")];
        let marks = seen.clone();
        explore(3, move || {
            let world = World::new(cells(2));
            let reporter = {
                let world = world.clone();
                thread::spawn(move || report(&world, 1))
            };
            let waiter = {
                let world = world.clone();
                thread::spawn(move || reported(&world, wait_in_vain(&world), 0..2))
            };
            world.cells[0].write(100);
            world.status.post(fault(0));
            marks[waiter.join().unwrap() as usize].mark();
            reporter.join().unwrap();
            assert_eq!(world.status.host_fault(), Some(fault(0)));
            assert_eq!(world.status.reported(), Some(fault(1)));
        });
        seen.iter().for_each(Reached::check);
    }

    fn another_thread_of_the_host_reads_the_whole_fault_that_was_posted_first() {
        explore(3, || {
            let world = World::new(cells(1));
            let poster = {
                let world = world.clone();
                thread::spawn(move || {
                    world.cells[0].write(100);
                    world.status.post(fault(0));
                    world.status.post(fault(1));
                })
            };
            let seen = loop {
                if let Some(fault) = world.status.host_fault() {
                    break fault;
                }
                Loom::pause(0);
            };
            reported(&world, seen, 0..1);
            poster.join().unwrap();
            assert_eq!(world.status.host_fault(), Some(fault(0)), "the first one stays");
        });
    }

    fn a_fault_that_one_thread_finds_in_the_host_block_reaches_the_others_whole() {
        explore(3, || {
            let world = World::new(cells(1));
            let looking = {
                let world = world.clone();
                thread::spawn(move || {
                    while !world.status.look() {
                        Loom::pause(0);
                    }
                })
            };
            let told = {
                let world = world.clone();
                thread::spawn(move || {
                    while world.status.check_near().is_ok() {
                        Loom::pause(0);
                    }
                    reported(&world, world.status.cause(), 0..1);
                })
            };
            world.cells[0].write(100);
            world.status.post(fault(0));
            looking.join().unwrap();
            told.join().unwrap();
        });
    }

    fn an_awaited_value_counts_even_if_there_is_a_fault_too() {
        explore(3, || {
            let world = World::new(cells(0));
            let host = {
                let world = world.clone();
                thread::spawn(move || world.status.post(fault(0)))
            };
            assert_eq!(world.status.poll(Deadline::after_ns(0), || true), Ok(()));
            match world.status.poll(Deadline::after_ns(0), || false) {
                Err(WaitError::Deadline) => {}
                other => assert_eq!(world.fault_of(other), fault(0)),
            }
            host.join().unwrap();
        });
    }
}
