// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of the protocols among kernels, proxies and hosts, explored by loom.
//!
//! Run them by `cargo test -p gin-device --test loom_models`; `-- --nocapture` shows the number of runs of each. With
//! `GIN_MODEL_MORE_PREEMPTIONS=1` the search is deeper, and takes from minutes to hours.

mod model;

use gin_device::sys::Word;
use gin_device::sys::loom::Arena;
use std::sync::Arc;

#[test]
fn a_load_hides_no_order_of_others_accesses_from_the_search() {
    let seen = [model::Reached::new("load before the store"), model::Reached::new("load after the store")];
    let marks = seen.clone();
    model::explore(2, move || {
        let arena = Arc::new(Arena::new([0]));
        let other = {
            let arena = arena.clone();
            loom::thread::spawn(move || {
                arena.word(0).load_relaxed_sys();
                arena.word(0).store_relaxed_sys(1);
            })
        };
        marks[arena.word(0).load_relaxed_sys() as usize].mark();
        other.join().unwrap();
    });
    seen.iter().for_each(model::Reached::check);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_dispatch_in_the_buffer_of_a_released_one_that_hears_from_no_rank_overwrites_rows_too_early() {
    use model::ep::{Back, Dispatches, ranks};
    model::explore(2, || ranks(Dispatches { waits: |_, _| false, ..Dispatches::new(|_| Back::Not, |_| 0) }));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_receiver_that_does_not_await_all_numbers_gives_a_place_away_too_early() {
    model::explore(2, || model::ep::shared(1));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn products_with_one_buffer_overwrite_rows_too_early() {
    model::explore(2, || model::matmul::ranks(3, |_| 0));
}

#[test]
fn no_two_models_have_the_same_name() {
    let mut names: Vec<_> = model::all().into_iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count);
}
