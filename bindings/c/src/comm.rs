// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators, their faults and statistics.

use crate::job::{Job, Nics};
use crate::status::{Failure, call, check_size, fill, input, output};
use crate::table;
use crate::types::gin_status_t::GIN_ERROR_BUSY;
use crate::types::{
    GIN_FAULT_TEXT_BYTES, gin_comm_t, gin_fault_t, gin_job_t, gin_requirements_t, gin_stats_t, gin_status_t,
};
use gin_abi::{CommHandle, FaultSubject};
use gin_host::comm::{CommState, Communicator, Requirements};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// One rank's member of a communicator.
pub(crate) struct Comm {
    pub(crate) inner: Communicator,
    /// The parameter of kernels. The communicator has it too, but gives it to one thread at a time.
    handle: CommHandle,
    /// Shared by calls that launch kernels of gin, exclusive for the call that frees what these use.
    gate: RwLock<()>,
    /// The software NICs that its kernels drive. They end after the communicator.
    _nics: Option<Arc<Nics>>,
}

impl table::Handled for Comm {
    const KIND: table::Kind = table::Kind::Comm;
}

impl Comm {
    /// Lets no thread destroy the communicator while the guard lives.
    pub(crate) fn launching(&self) -> Result<RwLockReadGuard<'_, ()>, Failure> {
        self.gate.try_read().map_err(|_| Failure::new(GIN_ERROR_BUSY, "another thread destroys the communicator"))
    }

    /// Lets no thread launch kernels of gin while the guard lives.
    fn ending(&self) -> Result<RwLockWriteGuard<'_, ()>, Failure> {
        let text =
            "another thread launches kernels of gin with the communicator, or destroys it: let its call end first";
        self.gate.try_write().map_err(|_| Failure::new(GIN_ERROR_BUSY, text))
    }

    /// Returns the parameter of kernels, if the communicator has not ended. Any thread may call.
    pub(crate) fn handle(&self) -> Option<&CommHandle> {
        matches!(self.inner.state(), CommState::Active | CommState::Aborted).then_some(&self.handle)
    }
}

fn requirements(asked: *const gin_requirements_t) -> Result<Requirements, Failure> {
    let asked = input(asked, "requirements")?;
    check_size::<gin_requirements_t>(asked.size, "requirements", "GIN_REQUIREMENTS_INIT")?;
    Ok(Requirements::default()
        .contexts(asked.contexts)
        .signals(asked.signals)
        .counters(asked.counters)
        .queue_depth(asked.queue_depth)
        .world_barriers(asked.world_barriers)
        .rail_barriers(asked.rail_barriers)
        .lsa_barriers(asked.lsa_barriers)
        .windows(asked.windows)
        .max_outstanding_per_peer(asked.max_outstanding_per_peer))
}

/// Creates a communicator of all ranks of the job. Collective: all ranks pass the same requirements.
///
/// gin's own threads carry out the requests of kernels from now on; the program calls nothing for that, unless
/// `progress_threads` of the job's configuration is `GIN_PROGRESS_MANUAL`.
///
/// The caller owns the handle. It ends the communicator with `gin_comm_destroy`, or with `gin_comm_release`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_comm_create(
    job: gin_job_t,
    requirements: *const gin_requirements_t,
    comm: *mut gin_comm_t,
) -> gin_status_t {
    call("gin_comm_create", || {
        let (job, comm) = (table::get::<Job>(job.id)?, output(comm, "comm")?);
        let inner = Communicator::new(job.bootstrap.clone(), job.device.clone(), job.config.clone());
        inner.initialise(&self::requirements(requirements)?)?;
        let handle = inner.device()?.handle();
        comm.write(gin_comm_t {
            id: table::insert(Arc::new(Comm { inner, handle, gate: RwLock::new(()), _nics: job.nics.clone() }))?,
        });
        Ok(())
    })
}

/// Returns the bytes that pass the communicator to a kernel. They are valid until the communicator ends.
///
/// A kernel takes them by value: as `gin_device_comm_t` in C++, as `Comm` in Rust. The program launches it by its own
/// runtime, or by `gin_launch`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_comm_device(comm: gin_comm_t, device: *mut CommHandle) -> gin_status_t {
    call("gin_comm_device", || {
        let (comm, device) = (table::get::<Comm>(comm.id)?, output(device, "device")?);
        device.write(comm.inner.device()?.handle());
        Ok(())
    })
}

/// Returns an error with the fault if one has ended the communicator. Programs call this after a kernel has run. Prints
/// the lines of these kernels, too. Does not wait.
#[unsafe(no_mangle)]
pub extern "C" fn gin_comm_check(comm: gin_comm_t) -> gin_status_t {
    call("gin_comm_check", || Ok(table::get::<Comm>(comm.id)?.inner.check("go on")?))
}

/// Returns the fault that ended the communicator. `found` is 1 if there is one; else 0, and `fault` is not written.
/// Does not wait.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_comm_fault(comm: gin_comm_t, found: *mut u32, fault: *mut gin_fault_t) -> gin_status_t {
    call("gin_comm_fault", || {
        let (comm, found, out) = (table::get::<Comm>(comm.id)?, output(found, "found")?, output(fault, "fault")?);
        let report = comm.inner.fault_report();
        found.write(report.is_some().into());
        let Some(report) = report else { return Ok(()) };
        let fault = report.fault;
        let (subject, id, offset) = match fault.subject() {
            FaultSubject::Signal(id) => (1, id, 0),
            FaultSubject::Counter(id) => (2, id, 0),
            FaultSubject::Barrier(id) => (3, id, 0),
            FaultSubject::Window { id, offset } => (4, id, offset),
            _ => (0, 0, 0),
        };
        let mut fault = gin_fault_t {
            rank: report.rank,
            kind: fault.kind() as u32,
            operation: fault.operation() as u32,
            context: fault.context(),
            peer: fault.peer(),
            subject,
            id,
            reserved: 0,
            offset,
            expected: fault.expected(),
            seen: fault.seen(),
            text: [0; GIN_FAULT_TEXT_BYTES],
        };
        fill(&mut fault.text, &report.to_string());
        out.write(fault);
        Ok(())
    })
}

/// Ends every wait of the communicator, on all ranks. A rank notices within about 50 us. Does not wait. A second call
/// has no effect.
#[unsafe(no_mangle)]
pub extern "C" fn gin_comm_abort(comm: gin_comm_t) -> gin_status_t {
    call("gin_comm_abort", || Ok(table::get::<Comm>(comm.id)?.inner.abort()?))
}

/// Carries out the requests of kernels that are ready, if `progress_threads` of the job's configuration is
/// `GIN_PROGRESS_MANUAL`; else there is nothing to do. `worked`, unless it is null, is 1 if there was anything to
/// do, else 0. Does not wait for other ranks. It does so for all communicators of the same handle of a job.
///
/// Calls of gin that wait do the same meanwhile, for the communicators that their thread has called before. While no
/// thread makes such a call, requests of this rank stay in their queues, and its kernels do not learn of faults of
/// other ranks.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_comm_progress(comm: gin_comm_t, worked: *mut u32) -> gin_status_t {
    call("gin_comm_progress", || {
        let comm = table::get::<Comm>(comm.id)?;
        let out = if worked.is_null() { None } else { Some(output(worked, "worked")?) };
        let did = comm.inner.progress()?;
        if let Some(out) = out {
            out.write(did.into());
        }
        Ok(())
    })
}

/// Returns the statistics of a context, also while kernels run.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_comm_stats(comm: gin_comm_t, context: u32, stats: *mut gin_stats_t) -> gin_status_t {
    call("gin_comm_stats", || {
        let (comm, out) = (table::get::<Comm>(comm.id)?, output(stats, "stats")?);
        let all = comm.inner.stats()?;
        let Some(stats) = all.get(context as usize) else {
            return Err(Failure::argument(format!("there is no context {context}: there are {}", all.len())));
        };
        out.write(gin_stats_t {
            accepted: stats.accepted,
            finished: stats.finished,
            failed: stats.failed,
            puts: stats.puts,
            values: stats.values,
            gets: stats.gets,
            put_bytes: stats.put_bytes,
            get_bytes: stats.get_bytes,
            signals: stats.signals,
            posted: stats.posted,
            completions: stats.completions,
            stalls: stats.stalls,
            retries: stats.retries,
            deepest: stats.deepest,
        });
        Ok(())
    })
}

/// Ends the communicator in an orderly way, and closes the handle. Collective, unless a fault or an abort has ended the
/// communicator. Waits for unfinished requests; refuses while a kernel runs. After an error the handle stays open.
///
/// The handles of its windows stay open, and can only be closed.
#[unsafe(no_mangle)]
pub extern "C" fn gin_comm_destroy(comm: gin_comm_t) -> gin_status_t {
    call("gin_comm_destroy", || {
        let found = table::get::<Comm>(comm.id)?;
        let _ending = found.ending()?;
        found.inner.destroy()?;
        table::remove::<Comm>(comm.id).map(drop)
    })
}

/// Closes the handle. If the communicator is active, aborts it first: waits end on all ranks. Not collective.
#[unsafe(no_mangle)]
pub extern "C" fn gin_comm_release(comm: gin_comm_t) -> gin_status_t {
    call("gin_comm_release", || {
        let found = table::get::<Comm>(comm.id)?;
        if found.inner.state() == CommState::Active {
            found.inner.abort()?;
        }
        table::remove::<Comm>(comm.id).map(drop)
    })
}
