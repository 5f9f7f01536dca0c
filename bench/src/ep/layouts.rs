// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch and combine of expert-major layouts, and of groups whose sources share a region, beside the rank-major
//! dispatch and the exchange without routing.

use super::bed::{Bed, chain};
use super::{LARGE, MODEL, comm_error};
use crate::figure::Figure;
use crate::table::{Kind, Row, Table};
use crate::{Bench, Failure, end};
use gin_ep::{Combine, EpError, Group, Layout, Permuted, Received, Rows, Slot};
use gin_ep_oracle::Shape;
use gin_host::comm::Requirements;
use gin_host::world::Rank;

/// The calls that are measured, in the order of [`Times::calls`].
const CALLS: [&str; 10] = [
    "dispatch, rank-major",
    "dispatch, padded",
    "dispatch and combine, padded",
    "dispatch, packed",
    "dispatch and combine, packed",
    "dispatch, fixed",
    "dispatch and combine, fixed",
    "dispatch, packed after an exchange",
    "dispatch with max_rows",
    "dispatch and combine with max_rows",
];

/// Figures of a rank for one number of tokens.
#[derive(Default, serde::Serialize, serde::Deserialize)]
struct Times {
    calls: [Vec<f64>; CALLS.len()],
    floor: Vec<f64>,
    wrong: u64,
}

/// Measures expert-major dispatches and pairs between two ranks, or all of a job.
pub(in super::super) fn layouts(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let ranks = bench.job.as_ref().map_or(2, |job| job.ranks());
    let (experts, topk, hidden) = bench.pick(MODEL, (16, 4, 128));
    let shape = Shape { ranks: ranks as usize, experts, topk, hidden };
    let sizes = bench.pick(&[1, 8, 128, 512, LARGE][..], &[1, 8]);
    let all = bench.on_ranks(bench.world(ranks)?, |rank| {
        let measure = |&tokens: &usize| times(bench, rank, &shape, tokens).map_err(comm_error);
        sizes.iter().map(measure).collect::<Result<Vec<_>, _>>()
    })?;
    let mut rows = Vec::new();
    for (index, tokens) in sizes.iter().enumerate() {
        let of: Vec<&Times> = all.iter().map(|times| &times[index]).collect();
        // A call is done when the last rank is.
        let slowest = |get: &dyn Fn(&Times) -> &Vec<f64>| -> Vec<f64> {
            let repeats = of.iter().map(|times| get(times).len()).min().unwrap_or(0);
            (0..repeats).map(|repeat| of.iter().map(|times| get(times)[repeat]).fold(0.0, f64::max)).collect()
        };
        let wrong = of.iter().map(|times| times.wrong).sum();
        let floor = slowest(&|times| &times.floor);
        for (call, what) in CALLS.iter().enumerate() {
            let figure = Figure::new(&slowest(&|times| &times.calls[call]), Some(wrong));
            // The table of all measurements has the padded layout at one size, as it must fit a screen.
            let row = Row::new(format!("{what}, {tokens} tokens"), figure, "us");
            let row = row.main(*tokens == 8 && (1..3).contains(&call));
            rows.push(row.beside(Kind::Other, "exchange", Figure::new(&floor, None), None, None));
        }
    }
    let mut table = bench.table("Expert parallelism, expert-major and max_rows", ranks, rows);
    table.notes.push(format!("{experts} experts, {topk} of them for a token, rows of {hidden} BF16"));
    table.notes.push("exchange: a row for each rank of a token to known places, one flag a rank".to_owned());
    Ok(vec![table])
}

/// Measures a number of tokens on a rank.
fn times(bench: &Bench, rank: &Rank, shape: &Shape, tokens: usize) -> Result<Times, EpError> {
    let comm = rank.communicator(&Requirements::default())?;
    let bed = Bed::new(bench, rank, &comm, shape, tokens)?;
    let (there, stream) = (bed.jobs(false, false)?, &bed.stream);
    let floor_shape = bed.best(&there)?;
    let all = (shape.ranks * tokens) as u32;
    let (major, shared) =
        (Group::new(&comm, &bed.config().combine_at_source())?, Group::new(&comm, &bed.config().max_rows(all))?);
    let rows = bed.ids_here().max(1) as u32;
    let padded = Permuted::new(&major, Layout::ExpertMajorPadded, 0)?;
    let packed = Permuted::new(&major, Layout::ExpertMajorPacked { align: 1 }, rows)?;
    let fixed = Permuted::new(&major, Layout::ExpertMajorFixed, 0)?;
    let (mut slot, mut shared_slot) = (major.slot(0)?, shared.slot(0)?);
    let (input, by_id, reduced) =
        (bed.input(), Combine::plain().into(&bed.output), Combine::reduced().into(&bed.output));
    let time = |call: &mut dyn FnMut() -> Result<(), EpError>| chain(rank, stream, bed.length(), call);
    let into = |slot: &mut Slot, to: &Permuted| -> Result<(), EpError> {
        slot.exchange_into(stream, &input, to)?.0.release();
        Ok(())
    };
    let pair = |slot: &mut Slot, to: &Permuted| -> Result<(), EpError> {
        slot.exchange_into(stream, &input, to)?.0.combine(stream, Rows::Permuted(to), &by_id)
    };
    let mut times = Times::default();
    for to in [&padded, &packed, &fixed] {
        // The experts leave the rows as they are.
        pair(&mut slot, to)?;
        stream.synchronize()?;
        times.wrong += bed.wrong_layout(to)? + bed.wrong_sums_of_ids()?;
    }
    shared_slot.exchange(stream, &input)?.combine(stream, Rows::InPlace, &reduced)?;
    stream.synchronize()?;
    for _ in 0..bench.launches.min(bench.pick(9, 1)) {
        let measured = [
            time(&mut || slot.exchange(stream, &input).map(Received::release))?,
            time(&mut || into(&mut slot, &padded))?,
            time(&mut || pair(&mut slot, &padded))?,
            time(&mut || into(&mut slot, &packed))?,
            time(&mut || pair(&mut slot, &packed))?,
            time(&mut || into(&mut slot, &fixed))?,
            time(&mut || pair(&mut slot, &fixed))?,
            time(&mut || {
                let mut received = slot.exchange(stream, &input)?;
                received.permute(stream, &packed)?;
                received.release();
                Ok(())
            })?,
            time(&mut || shared_slot.exchange(stream, &input).map(Received::release))?,
            time(&mut || shared_slot.exchange(stream, &input)?.combine(stream, Rows::InPlace, &reduced))?,
        ];
        for (of_call, time) in times.calls.iter_mut().zip(measured) {
            of_call.push(time);
        }
        times.floor.push(time(&mut || bed.floor(&there, 2 * shape.hidden, floor_shape))?);
    }
    times.wrong += u64::from(major.status()?.is_some()) + u64::from(shared.status()?.is_some());
    drop((slot, shared_slot));
    major.destroy()?;
    shared.destroy()?;
    comm.check("bench")?;
    drop(bed);
    end(rank, &comm)?;
    Ok(times)
}
