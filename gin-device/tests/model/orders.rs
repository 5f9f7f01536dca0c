// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of orders to other warps of a block.

use super::{Setup, World, explore, models};
use gin_device::internal::orders::{Order, Orders, WORDS};
use gin_device::sys::Memory;
use gin_device::sys::loom::{Arena, Loom};
use loom::thread;

/// Gives `orders_given` orders to `helpers` helpers. Each order has one cell to read and one cell for each helper.
fn work(orders_given: u64, helpers: u64) {
    let world = World::new(Setup { cells: (orders_given * (1 + helpers)) as usize, ..Setup::default() });
    let arena = Arena::new(vec![0; WORDS as usize]);
    let orders = Orders::<Loom>::new(arena.word(0));
    let order = move |number: u64| {
        let from = number * (1 + helpers);
        Order { to: from + 1, from, bytes: number + 1 }
    };
    let threads: Vec<_> = (0..helpers)
        .map(|helper| {
            let world = world.clone();
            thread::spawn(move || {
                for number in 0..orders_given {
                    while !orders.is_given(number) {
                        Loom::pause(0);
                    }
                    let seen = orders.read();
                    assert_eq!(seen, order(number), "a torn order");
                    let value = world.cells[seen.from as usize].read();
                    world.cells[(seen.to + helper) as usize].write(value + helper);
                    orders.carried_out();
                }
            })
        })
        .collect();
    for number in 0..orders_given {
        let given = order(number);
        world.cells[given.from as usize].write(100 + number);
        orders.give(number + 1, given);
        orders.wait(number + 1, helpers);
        for helper in 0..helpers {
            assert_eq!(world.cells[(given.to + helper) as usize].read(), 100 + number + helper);
        }
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

models! {
    fn a_helper_sees_the_bytes_of_its_order_and_the_giver_sees_the_helpers_writes() {
        explore(2, || work(2, 1));
    }

    fn an_order_is_carried_out_when_all_helpers_have() {
        explore(2, || work(1, 2));
    }
}
