// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program that `gin bench nccl` runs: `gin-nccl-bench GPU GPU REPEATS LIMIT_MS`. Equal numbers share a GPU.
//!
//! It prints one line: [`RESULT`] and a JSON object with the figures of NCCL and of gin. NCCL may print other lines.

mod over_nccl;

use gin_host::world::WorldConfig;
use gin_nccl_bench::{Fallible, Figures, Plan, RANKS, over_gin};
use gin_nccl_host::Library;
use serde::Serialize;
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// The first word of the line with the figures.
const RESULT: &str = "gin-nccl-bench:";

/// Variables for ranks that share a GPU: NCCL refuses them without the first. By the second each stream has a queue, so
/// that no kernel is in a queue behind one that waits for it.
const SHARED: [(&str, &str); 2] = [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

#[expect(unreachable_pub, reason = "other crates include such a table in a public module")]
mod gin_kernels {
    include!(concat!(env!("OUT_DIR"), "/gin.rs"));
}

#[expect(unreachable_pub, reason = "as above")]
mod nccl_kernels {
    include!(concat!(env!("OUT_DIR"), "/nccl.rs"));
}

/// The figures of a run.
#[derive(Serialize)]
struct Report {
    /// NCCL's version, such as 2.30.7.
    version: String,
    /// NCCL's back end: `proxy` or `GDAKI`.
    backend: &'static str,
    nccl: Figures,
    gin: Figures,
}

/// The arguments.
#[derive(Clone, Copy)]
struct Arguments {
    gpus: [usize; RANKS as usize],
    plan: Plan,
}

impl Arguments {
    fn read() -> Option<Self> {
        let all: Vec<u64> = std::env::args().skip(1).map(|text| text.parse().ok()).collect::<Option<_>>()?;
        let &[first, second, repeats, limit] = &all[..] else { return None };
        let plan = Plan::new(repeats as usize, Duration::from_millis(limit));
        (repeats > 0 && limit > 0).then_some(Self { gpus: [first as usize, second as usize], plan })
    }
}

fn main() -> ExitCode {
    let Some(arguments) = Arguments::read() else {
        eprintln!("usage: gin-nccl-bench GPU GPU REPEATS LIMIT_MS; `gin bench nccl` runs it");
        return ExitCode::from(2);
    };
    if arguments.gpus[0] == arguments.gpus[1] {
        for (name, value) in SHARED {
            // Safety: this process has no other thread yet.
            unsafe { std::env::set_var(name, value) };
        }
    }
    // Some calls of NCCL have no limit, so this thread waits at most as long as all launches and the set-up may take.
    let (done, result) = channel();
    // Nobody receives after the limit.
    thread::spawn(move || _ = done.send(run(arguments)));
    let limit = arguments.plan.limit.saturating_mul(10 + 3 * (arguments.plan.repeats as u32 + 1));
    let report = match result.recv_timeout(limit) {
        Ok(report) => report,
        Err(_) => Err(format!("the ranks have not ended after {limit:?}; NCCL_DEBUG=INFO shows what NCCL does").into()),
    };
    match report.and_then(|report| Ok(serde_json::to_string(&report)?)) {
        Ok(line) => {
            println!("{RESULT} {line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("gin-nccl-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(Arguments { gpus, plan }: Arguments) -> Fallible<Report> {
    let library = Library::open()?;
    let (nccl, backend, plan) = over_nccl::measure(&library, nccl_kernels::PTX, gpus, plan)?;
    // gin's ranks exist only now, so that no progress thread of one side takes time from the other.
    let mut config = WorldConfig::threads(RANKS);
    config.devices = Some(gin_gpu::cuda::devices(&gpus, &[gin_kernels::PTX], Some(plan.limit * 2))?);
    config.collective_timeout = Some(plan.limit * 4);
    Ok(Report { version: library.version_text(), backend, nccl, gin: over_gin(config, plan)? })
}
