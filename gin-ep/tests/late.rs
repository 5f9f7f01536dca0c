// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that are late by random times. `GIN_SEEDS` sets the number of worlds of each way, `GIN_SEED` the first one.

#[path = "support/mod.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod support;

use gin_abi::Deadline;
use gin_boot::rt::{clock_ns, wait_until};
use gin_ep::{Combine, EpError, Group, GroupConfig, Layout, Permuted, Rows};
use gin_ep_oracle::{Experts, Routing, Shape, batch, per_rank};
use gin_host::comm::Requirements;
use gin_host::world::{WorldConfig, launch};
use gin_net::peer::PeerNetwork;
use gin_testkit::{Reorder, Withhold};
use std::sync::atomic::{AtomicU32, Ordering};
use support::{Input, experts};

/// How long a rank waits for another.
const PATIENCE_NS: u64 = 2_000_000;
const SHAPE: Shape = Shape { ranks: 3, experts: 6, topk: 3, hidden: 8 };

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Exchange,
    ExchangeInto,
    /// Dispatch and receive, with a pause between them.
    Parts,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    Near,
    Network,
    /// A network that reorders and withholds.
    Worst,
}

#[derive(Clone, Copy, Debug)]
struct Way {
    route: Route,
    call: Call,
    shares_region: bool,
    stores_rows: bool,
}

fn ways() -> Vec<Way> {
    let mut ways = Vec::new();
    for call in [Call::Exchange, Call::ExchangeInto, Call::Parts] {
        for (shares_region, stores_rows) in [(false, false), (false, true), (true, false)] {
            ways.push(Way { route: Route::Near, call, shares_region, stores_rows });
        }
    }
    for route in [Route::Network, Route::Worst] {
        ways.extend([false, true].map(|stores_rows| Way {
            route,
            call: Call::Parts,
            shares_region: false,
            stores_rows,
        }));
    }
    ways
}

/// Runs pairs of which each rank makes some too late. Returns how often a rank went on without another.
fn late(seed: u64, way: Way) -> u32 {
    let masks = AtomicU32::new(0);
    let world = WorldConfig::seeded(3, seed);
    let world = match way.route {
        Route::Near => world,
        Route::Network => world.lsa_size(1),
        Route::Worst => world.lsa_size(1).network(|endpoint| {
            Box::new(Reorder::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank), endpoint))
        }),
    };
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let me = rank.rank() as usize;
        let comm = rank.communicator(&Requirements::default())?;
        let config = GroupConfig::new(6, 8, 3).tokens(8).sms(2).threads(32).deadline(Deadline::after_ns(PATIENCE_NS));
        let config = if way.shares_region { config.max_rows(24) } else { config };
        let group = Group::new(&comm, &config)?;
        let input = Input::new(&rank, &SHAPE, 8)?;
        let to = Permuted::new(&group, Layout::ExpertMajorPadded, 0)?;
        let stream = rank.stream()?;
        let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (me as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mut random = |of: u64| {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            (word >> 20) % of
        };
        for number in 0..6 {
            let mine = batch(&SHAPE, Routing::Uniform, seed * 100 + number, me, 3);
            input.write(&mine, false)?;
            let mut slot = group.slot(0)?;
            let mut pause = || {
                let tenths = [0, 0, 0, 5, 7, 8, 9, 10, 11, 12, 20, 21, 30, 31][random(14) as usize];
                let ns = PATIENCE_NS / 10 * tenths + random(PATIENCE_NS / 20);
                let start = clock_ns();
                wait_until(|| clock_ns() - start > ns);
            };
            pause();
            let tokens = input.tokens(3, false);
            let received = match way.call {
                Call::Exchange => slot.exchange(&stream, &tokens)?,
                Call::ExchangeInto => slot.exchange_into(&stream, &tokens, &to)?.0,
                Call::Parts => {
                    let sent = slot.dispatch(&stream, &tokens)?;
                    stream.synchronize()?;
                    pause();
                    sent.receive(&stream)?
                }
            };
            if way.call == Call::ExchangeInto {
                // All blocks took the same ranks for present.
                stream.synchronize()?;
                let rows = received.fetch()?;
                let of = |expert: usize, source: usize| {
                    let ids = rows[source].iter().flat_map(|row| &row.experts);
                    ids.filter(|&&local| local == expert as i32).count() as u32
                };
                let expected: Vec<u32> = (0..6).map(|zone| of(zone / 3, zone % 3)).collect();
                assert_eq!(to.fetch_counts()?[1..], expected, "seed {seed}, {way:?}, pair {number}: rank {me}");
            }
            experts(&rank, &stream, &SHAPE, &received)?;
            if number % 2 == 0 {
                stream.synchronize()?;
                pause();
            }
            let rows = way.stores_rows.then(|| support::copied(&rank, &stream, &received, &SHAPE, 8)).transpose()?;
            let rows = rows.as_ref().map_or(Rows::InPlace, Rows::At);
            received.combine(&stream, rows, &Combine::reduced().into(&input.output))?;
            stream.synchronize()?;
            drop(slot);
            let (report, masked) = (group.status()?, group.masked(0)?);
            masks.fetch_add(masked.count_ones(), Ordering::Relaxed);
            let silent: Vec<usize> = (0..3).filter(|rank| masked >> rank & 1 != 0).collect();
            let expected = per_rank(&SHAPE, &mine, &silent, Experts);
            input.compare(
                &expected,
                format_args!("seed {seed}, {way:?}, pair {number}: without {silent:?}: {report:?}"),
            )?;
            if number == 3 {
                rank.barrier()?;
                group.readmit()?;
                assert_eq!(group.masked(0)?, 0);
            }
        }
        rank.barrier()?;
        group.destroy()?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap_or_else(|error| panic!("seed {seed}, {way:?}: {error}"));
    masks.into_inner()
}

#[test]
fn sums_lack_masked_ranks_and_no_others_however_late_ranks_are() {
    let from_env = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let (first, seeds) = (from_env("GIN_SEED").unwrap_or(0), from_env("GIN_SEEDS").unwrap_or(5));
    let mut masks = 0;
    for seed in first..first + seeds {
        masks += ways().into_iter().map(|way| late(seed, way)).sum::<u32>();
    }
    assert!(masks > 0, "no rank was late enough");
}
