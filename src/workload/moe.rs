// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload moe, a mixture of experts: gate, dispatch, experts, combine.

use super::{Check, Job, Launched, Plan, Refused, Traffic, Watched, limits, reference};
use gin_ep::{Combine, EpError, Group, GroupConfig, Ids, Rows, Slot, Tokens};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, per_rank};
use gin_gpu::{Function, GpuError, LaunchConfig, Memory, MemoryKind, MemorySlice, Stream};
use gin_host::comm::CommError;
use gin_host::comm::{Requirements, Routes};
use gin_host::world::Rank;
use gin_kernels::moe::score;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a token's row, if `--bytes` is not less.
const ROW_BYTES: u64 = 1024;
/// Number of experts of each rank.
const EXPERTS: u32 = 8;
/// Number of experts of a token.
const TOPK: u32 = 4;
/// Number of data sets that iterations use in turn. The dispatch has two buffers for rows, so three data sets show a
/// row that stayed from an earlier dispatch.
const SETS: u64 = 3;
/// Maximum number of iterations until the results are checked. Each has memory of its own for its output.
const BETWEEN_CHECKS: usize = 32;

pub(super) struct Moe<'a> {
    plan: &'a Plan,
    shape: Shape,
    /// Number of tokens of a rank.
    tokens: u32,
    config: GroupConfig,
}

impl<'a> Moe<'a> {
    /// Prepares the workload.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) fn new(plan: &'a Plan) -> Result<Self, Refused> {
        let (shape, tokens, config) = check(plan)?;
        Ok(Self { plan, shape, tokens, config })
    }
}

/// Returns the sizes, the number of tokens of a rank, and the configuration of the group.
///
/// # Errors
/// Refuses sizes that are not a whole number of rows, that exceed the limits of a group, or the memory of this machine.
pub(super) fn check(plan: &Plan) -> Result<(Shape, u32, GroupConfig), Refused> {
    let (ranks, bytes, blocks, threads) = (plan.ranks, plan.sizes.bytes, plan.sizes.blocks, plan.sizes.threads);
    let row_bytes = bytes.min(ROW_BYTES);
    if bytes == 0 || !row_bytes.is_multiple_of(16) || !bytes.is_multiple_of(row_bytes) {
        return Err(Refused(format!(
            "--bytes {bytes}: moe has tokens with rows of {ROW_BYTES} bytes; use a multiple of {ROW_BYTES}, or for one \
             shorter row a multiple of 16"
        )));
    }
    // More tokens, ranks or threads than a group takes are refused with its limits.
    let limit = |error: EpError| {
        Refused(format!("--ranks {ranks}, --bytes {bytes}, --blocks {blocks}, --threads {threads}: moe: {error}"))
    };
    let tokens = u32::try_from(bytes / row_bytes).unwrap_or(u32::MAX);
    let (experts, hidden) = (EXPERTS.saturating_mul(ranks), (row_bytes / 2) as u32);
    let config = GroupConfig::new(experts, hidden, TOPK).tokens(tokens).sms(blocks).threads(threads);
    let config = config.deadline(plan.deadline);
    // Several hosts have LSA teams that are not known yet, so this is the least.
    let near = if plan.routes == Routes::Network { 1 } else { ranks };
    let group = config.network_footprint(ranks, near).map_err(limit)?;
    // The data sets on the device and on the host, the outputs, and a copy of one.
    let set = 2 * bytes + u64::from(tokens) * u64::from(4 * experts + 8 * TOPK);
    let outputs = plan.sizes.iters.min(BETWEEN_CHECKS as u64) + 1;
    limits::check_memory(plan, 0, u128::from(group) + 2 * u128::from(SETS * set) + u128::from(outputs * bytes))?;
    let [ranks, experts, topk, hidden] = [ranks, experts, TOPK, hidden].map(|number| number as usize);
    Ok((Shape { ranks, experts, topk, hidden }, tokens, config))
}

/// Returns an error of gin-ep as one of the communicator.
fn comm_error(error: EpError) -> CommError {
    match error {
        EpError::Comm(error) => error,
        EpError::Gpu(error) => error.into(),
        other => failed(other.to_string()),
    }
}

fn failed(reason: String) -> CommError {
    GpuError::Kernel { kernel: "moe".to_owned(), reason }.into()
}

/// Returns the address of memory as kernels take it.
fn pointer<T>(memory: &MemorySlice) -> *mut T {
    std::ptr::with_exposed_provenance_mut(memory.address() as usize)
}

/// The tokens of a rank: memory of the device, and the results that they must have.
struct Set {
    rows: MemorySlice,
    scores: MemorySlice,
    ids: MemorySlice,
    weights: MemorySlice,
    /// The tokens with the ids and weights that the gate must choose.
    batch: Batch,
    output: Vec<u16>,
}

impl Moe<'_> {
    fn set(&self, rank: &Rank, number: u32) -> Result<Set, CommError> {
        let (shape, tokens, me) = (&self.shape, self.tokens as usize, rank.rank());
        let memory = |words: usize| -> Result<MemorySlice, CommError> {
            Ok(Memory::new(rank.device(), MemoryKind::Device, 4 * words as u64)?.whole())
        };
        let mut batch = gin_ep_oracle::batch(shape, Routing::None, number.into(), me as usize, tokens);
        let scores = |token: u32| (0..shape.experts as u32).map(move |expert| score(me, token, expert, number));
        let all: Vec<f32> = (0..self.tokens).flat_map(scores).collect();
        (batch.experts, batch.weights) = reference::moe_gate(&all, shape.experts, shape.topk);
        let output = per_rank(shape, &batch, &[], Experts);
        let set = Set {
            rows: memory(batch.rows.len() / 2)?,
            scores: memory(all.len())?,
            ids: memory(batch.experts.len())?,
            weights: memory(batch.weights.len())?,
            batch,
            output,
        };
        set.rows.write(0, &set.batch.rows)?;
        set.scores.write(0, &all)?;
        Ok(set)
    }

    /// Launches the kernels of an iteration.
    fn iterate(&self, run: &mut Running<'_>, set: &Set, output: &MemorySlice) -> Result<(), EpError> {
        let Running { rank, stream, gate, experts, slot } = run;
        let (shape, config) = (&self.shape, LaunchConfig::new(self.plan.sizes.blocks, self.plan.sizes.threads));
        let [numbers, topk, hidden, local] =
            [shape.experts, shape.topk, shape.hidden, shape.local()].map(|number| number as u32);
        let (scores, ids, weights) = (pointer::<f32>(&set.scores), pointer::<i32>(&set.ids), pointer(&set.weights));
        let weights: *mut f32 = weights;
        // Safety: the memory has these elements for each token, and outlives the kernels: the caller synchronizes.
        unsafe {
            stream.launch(gate, config, &[&scores.cast_const(), &ids, &weights, &self.tokens, &numbers, &topk])?;
        }
        let tokens = Tokens::new(&set.rows, Ids::I32(&set.ids), self.tokens).weights(&set.weights);
        let received = slot.exchange(stream, &tokens)?;
        // Safety: after the receive and before the combine, on their stream.
        unsafe { stream.launch(experts, config, &[&received.view(), &rank.rank(), &local, &hidden])? };
        received.combine(stream, Rows::InPlace, &Combine::reduced().into(output))
    }

    fn check_gate(&self, rank: u32, set: &Set, check: &mut Check) -> Result<(), CommError> {
        let (mut ids, mut weights) = (set.batch.experts.clone(), set.batch.weights.clone());
        set.ids.read(0, &mut ids)?;
        set.weights.read(0, &mut weights)?;
        compare_gate(rank, self.shape.topk, (&ids, &weights), &set.batch, check);
        Ok(())
    }
}

/// Compares the choices of the gate with those of the host, bit for bit.
fn compare_gate(rank: u32, topk: usize, (ids, weights): (&[i32], &[f32]), batch: &Batch, check: &mut Check) {
    let expected = batch.experts.iter().zip(&batch.weights);
    for (place, (found, expected)) in ids.iter().zip(weights).zip(expected).enumerate() {
        if (found.0, found.1.to_bits()) != (expected.0, expected.1.to_bits()) {
            check.wrong(1, || {
                let (token, k) = (place / topk, place % topk);
                format!(
                    "rank {rank}, token {token}, choice {k}: expert {} with weight {}, expected {} with {}",
                    found.0, found.1, expected.0, expected.1
                )
            });
        }
    }
}

/// Compares the output of an iteration with the one computed on the host, bit for bit.
fn compare_output(rank: u32, iteration: u64, hidden: usize, found: &[u16], expected: &[u16], check: &mut Check) {
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        if found != expected {
            check.wrong(1, || {
                let (token, element) = (place / hidden, place % hidden);
                format!(
                    "rank {rank}, iteration {iteration}, token {token}, element {element}: {found:#06x}, expected \
                     {expected:#06x} (BF16)"
                )
            });
        }
    }
}

/// The kernels of a launch, and their stream.
struct Running<'l> {
    rank: &'l Rank,
    stream: &'l Arc<dyn Stream>,
    gate: Function,
    experts: Function,
    slot: Slot,
}

impl Job for Moe<'_> {
    fn requirements(&self) -> Requirements {
        Requirements::default().contexts(self.plan.sizes.contexts)
    }

    /// Returns 0 if dispatch and combine load and store. Over a network a dispatch makes two puts for each other rank,
    /// and a combine one.
    fn operations(&self) -> f64 {
        match self.plan.routes {
            Routes::Automatic => 0.0,
            Routes::Network => 3.0 * f64::from(self.plan.ranks - 1),
        }
    }

    fn traffic(&self) -> Traffic {
        let ranks = f64::from(self.plan.ranks);
        // A row for each expert of each token, there and back.
        let rows = 2.0 * f64::from(self.tokens) * f64::from(TOPK);
        Traffic { bytes: rows * 2.0 * self.shape.hidden as f64, factor: (ranks - 1.0) / ranks }
    }

    fn launch(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Launched, CommError> {
        let (plan, me) = (self.plan, rank.rank());
        let iters = plan.sizes.iters;
        let sets = (0..SETS.min(iters) as u32).map(|set| self.set(rank, set)).collect::<Result<Vec<_>, _>>()?;
        let output = || Memory::new(rank.device(), MemoryKind::Device, plan.sizes.bytes).map(|memory| memory.whole());
        let outputs = (0..iters.min(BETWEEN_CHECKS as u64)).map(|_| output()).collect::<Result<Vec<_>, _>>()?;
        let group = Group::new(comm, &self.config).map_err(comm_error)?;
        let stream = &rank.stream()?;
        let (gate, experts) = (rank.kernel("moe_gate")?, rank.kernel("moe_experts")?);
        let slot = group.slot(0).map_err(comm_error)?;
        let mut run = Running { rank, stream, gate, experts, slot };
        let (mut time, mut check) = (Duration::ZERO, Check::default());
        for _ in 0..plan.sizes.warmup {
            self.iterate(&mut run, &sets[0], &outputs[0]).map_err(comm_error)?;
        }
        for first in (0..iters).step_by(BETWEEN_CHECKS) {
            let all = || {
                (first..iters).zip(&outputs).map(|(number, output)| (number, &sets[(number % SETS) as usize], output))
            };
            time += plan.timed(rank, comm, stream, || {
                all().try_for_each(|(_, set, output)| self.iterate(&mut run, set, output)).map_err(comm_error)
            })?;
            // The loss of a rank is a fault of the communicator, too, and that says more.
            comm.check("run")?;
            if let Some(report) = group.status().map_err(comm_error)? {
                return Err(failed(report.to_string()));
            }
            if !plan.sizes.check {
                continue;
            }
            let mut found = vec![0u16; plan.sizes.bytes as usize / 2];
            for (number, set, output) in all() {
                output.read(0, &mut found)?;
                compare_output(me, number, self.shape.hidden, &found, &set.output, &mut check);
            }
            for set in &sets {
                self.check_gate(me, set, &mut check)?;
            }
        }
        drop(run);
        group.destroy().map_err(comm_error)?;
        Ok(Launched { time, check, nccl: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Workload;
    use crate::workload::plan::default_plan;

    fn plan(change: impl FnOnce(&mut Plan)) -> Plan {
        let mut plan = Plan { workload: Workload::Moe, routes: Routes::Automatic, ..default_plan() };
        change(&mut plan);
        plan
    }

    fn refusal(change: impl FnOnce(&mut Plan)) -> String {
        match check(&plan(change)) {
            Ok(_) => panic!("accepted"),
            Err(Refused(text)) => text,
        }
    }

    #[test]
    fn sizes_outside_the_limits_are_refused_with_the_option_and_the_limit() {
        let (shape, tokens, _) = check(&plan(|_| {})).unwrap_or_else(|Refused(text)| panic!("{text}"));
        assert_eq!((shape.experts, shape.hidden, tokens), (32, 512, 16));
        for (text, parts) in [
            (refusal(|plan| plan.ranks = 65), ["--ranks 65", "at most 64"]),
            (refusal(|plan| plan.sizes.threads = 1024), ["--threads 1024", "at most 512"]),
            (
                refusal(|plan| (plan.sizes.threads, plan.routes) = (512, Routes::Network)),
                ["--threads 512", "at most 256"],
            ),
            (refusal(|plan| plan.sizes.threads = 33), ["--threads 33", "a multiple of 32"]),
            (refusal(|plan| plan.sizes.bytes = 65_537 << 10), ["--bytes 67109888", "at most 65536"]),
            (refusal(|plan| plan.sizes.bytes = 1 << 60), ["number of tokens", "at most 65536"]),
            (refusal(|plan| plan.sizes.bytes = 1040), ["--bytes 1040", "a multiple of 1024"]),
            (refusal(|plan| plan.sizes.bytes = 24), ["--bytes 24", "a multiple of 16"]),
            (refusal(|plan| plan.sizes.bytes = 0), ["--bytes 0", "a multiple of 16"]),
        ] {
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
        check(&plan(|plan| (plan.ranks, plan.routes) = (1, Routes::Network))).unwrap();
    }

    #[test]
    fn each_wrong_bit_of_gate_and_output_counts_and_the_first_one_is_named() {
        let batch = Batch { rows: Vec::new(), experts: vec![3, 1, 2, 0], weights: vec![0.5, 0.5, 0.75, 0.25] };
        let mut check = Check::default();
        compare_gate(1, 2, (&batch.experts, &batch.weights), &batch, &mut check);
        compare_output(1, 7, 2, &[1, 2, 3, 4], &[1, 2, 3, 4], &mut check);
        assert_eq!(check.errors, 0);
        compare_gate(1, 2, (&[3, 1, 0, 2], &[0.5, -0.0, 0.75, 0.25]), &batch, &mut check);
        assert_eq!(check.errors, 3);
        assert_eq!(
            check.first.as_deref(),
            Some("rank 1, token 0, choice 1: expert 1 with weight -0, expected 1 with 0.5")
        );
        let mut check = Check::default();
        compare_output(1, 7, 2, &[1, 2, 3, 9], &[1, 2, 3, 4], &mut check);
        let first = "rank 1, iteration 7, token 1, element 1: 0x0009, expected 0x0004 (BF16)";
        assert_eq!((check.errors, check.first.as_deref()), (1, Some(first)));
    }
}
