// SPDX-License-Identifier: MIT OR Apache-2.0
//! The role of NCCL's host code: a thread for each rank, and a progress thread for its contexts.

use super::doca::{Context, Window};
use super::nvidia;
use crate::common::gpus::{choose, gpus, own_gpus};
use crate::common::{Pointer, logger, until};
use gin_gpu::Memory;
use gin_nccl::abi::{HANDLE_BYTES, PTR_CUDA};
use gin_nccl::gdaki::abi::{DeviceHandle, GinConfig};
use gin_nccl::ncclGinPlugin_v14 as TABLE;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The numbers of most tests: small, so that rings wrap.
pub(crate) const CONFIG: GinConfig = GinConfig {
    signals: 4,
    counters: 3,
    contexts: 2,
    queue_depth: 4,
    traffic_class: -1,
    backend_version: 2,
    rank_stride: 1,
};

/// The ranks of a communicator: NCCL's bootstrap.
pub(crate) struct Job {
    pub(crate) first_gpu: usize,
    handles: Vec<[u8; HANDLE_BYTES]>,
    met: AtomicUsize,
}

impl Job {
    pub(crate) fn new(ranks: usize) -> Self {
        init();
        let first_gpu = own_gpus(ranks);
        let handles = (0..ranks).map(|rank| listen(first_gpu + rank)).collect();
        Self { first_gpu, handles, met: AtomicUsize::new(0) }
    }

    /// Runs a function on a thread for each rank.
    pub(crate) fn run(&self, work: impl Fn(&Rank<'_>) + Sync) {
        std::thread::scope(|scope| {
            for rank in 0..self.handles.len() {
                let work = &work;
                scope.spawn(move || {
                    choose(Some(self.first_gpu + rank));
                    let (code, coll) = connect(&self.handles, rank);
                    assert_eq!(code, 0);
                    let own = Rank { rank, job: self, coll };
                    work(&own);
                    own.meet();
                    // Safety: the table's function, with an object of it.
                    assert_eq!(unsafe { (TABLE.close_coll)(coll) }, 0);
                });
            }
        });
    }
}

pub(crate) fn init() {
    gpus();
    let mut context = null_mut();
    // Safety of all below: the table's functions, with valid pointers.
    assert_eq!(unsafe { (TABLE.start.init)(&raw mut context, 7, Some(logger())) }, 0);
}

pub(crate) fn listen(gpu: usize) -> [u8; HANDLE_BYTES] {
    choose(Some(gpu));
    let (mut handle, mut object) = ([0u8; HANDLE_BYTES], null_mut());
    // Safety: as above.
    unsafe {
        assert_eq!((TABLE.listen)(null_mut(), 0, handle.as_mut_ptr().cast(), &raw mut object), 0);
        assert_eq!((TABLE.close_listen)(object), 0);
    }
    handle
}

pub(crate) fn connect(handles: &[[u8; HANDLE_BYTES]], rank: usize) -> (c_int, Pointer) {
    let pointers: Vec<*const c_void> = handles.iter().map(|handle| handle.as_ptr().cast()).collect();
    let (count, mut coll) = (handles.len() as c_int, null_mut());
    // Safety: as above.
    let code =
        unsafe { (TABLE.connect)(null_mut(), pointers.as_ptr(), count, rank as c_int, null_mut(), &raw mut coll) };
    (code, coll)
}

/// A rank, on its thread.
pub(crate) struct Rank<'a> {
    pub(crate) rank: usize,
    job: &'a Job,
    pub(crate) coll: Pointer,
}

/// A registered window of a rank.
pub(crate) struct Registered {
    pub(crate) memory: Arc<Memory>,
    pub(crate) window: Window,
    handle: Pointer,
}

impl Registered {
    pub(crate) fn fill(&self, offset: u64, bytes: u64, seed: u64) {
        self.memory.write(offset, &pattern(bytes, seed)).unwrap();
    }

    pub(crate) fn has(&self, offset: u64, bytes: u64, seed: u64) -> bool {
        self.bytes(offset, bytes) == pattern(bytes, seed)
    }

    pub(crate) fn bytes(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let mut seen = vec![0u8; bytes as usize];
        self.memory.read(offset, &mut seen).unwrap();
        seen
    }
}

pub(crate) fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(31) ^ seed.wrapping_mul(0x9e37) >> 3 ^ seed) as u8).collect()
}

/// The contexts of a device communicator.
pub(crate) struct Contexts {
    pub(crate) object: Pointer,
    pub(crate) handle: DeviceHandle,
    stride: u64,
    rank: usize,
    ranks: usize,
}

impl Contexts {
    pub(crate) fn get(&self, index: u64) -> Context {
        let first = self.handle.handle.addr() as u64;
        let job = (first, index, self.ranks);
        // NCCL's code of today has the newest layout.
        let code = nvidia::code().filter(|_| self.stride == 88);
        Context { address: first + self.stride * index, rank: self.rank, job, code }
    }

    pub(crate) fn progress(&self) -> c_int {
        // Safety: as above.
        unsafe { (TABLE.gin_progress)(self.object) }
    }

    pub(crate) fn has_failed(&self) -> bool {
        let mut failed = false;
        // Safety: as above.
        assert_eq!(unsafe { (TABLE.query_last_error)(self.object, &raw mut failed) }, 0);
        failed
    }

    pub(crate) fn destroy(self) {
        // Safety: as above; no kernel uses them any more.
        assert_eq!(unsafe { (TABLE.destroy_context)(self.object) }, 0);
    }
}

impl Rank<'_> {
    pub(crate) fn ranks(&self) -> usize {
        self.job.handles.len()
    }

    /// Waits for all ranks, for 20 s at most.
    pub(crate) fn meet(&self) {
        let met = &self.job.met;
        let end = (met.fetch_add(1, Ordering::AcqRel) / self.ranks() + 1) * self.ranks();
        until("all ranks meet", || met.load(Ordering::Acquire) >= end);
    }

    pub(crate) fn try_register(&self, address: u64, bytes: u64, kind: c_int, flags: u64) -> (c_int, Pointer, u64) {
        let (data, mut handle, mut window) =
            (std::ptr::with_exposed_provenance_mut(address as usize), null_mut(), null_mut());
        // Safety: as above; callers keep the memory.
        let code = unsafe {
            (TABLE.reg_mr_sym)(self.coll, data, bytes as usize, kind, flags, &raw mut handle, &raw mut window)
        };
        (code, handle, window.addr() as u64)
    }

    pub(crate) fn register(&self, bytes: u64, flags: u64) -> Registered {
        let memory = gpus().allocate(self.job.first_gpu + self.rank, bytes, true);
        let (code, handle, window) = self.try_register(memory.address(), bytes, PTR_CUDA, flags);
        assert_eq!(code, 0);
        Registered { memory, window: Window(window), handle }
    }

    pub(crate) fn deregister(&self, registered: Registered) {
        // Safety: as above.
        assert_eq!(unsafe { (TABLE.dereg_mr_sym)(self.coll, registered.handle) }, 0);
    }

    pub(crate) fn try_create(&self, config: &GinConfig) -> Result<Contexts, c_int> {
        let (mut object, mut handle) = (null_mut(), null_mut());
        // Safety of both: as above.
        let code = unsafe { (TABLE.create_context)(self.coll, config, &raw mut object, &raw mut handle) };
        if code != 0 {
            return Err(code);
        }
        let stride = if config.backend_version == 1 { 72 } else { 88 };
        Ok(Contexts { object, handle: unsafe { *handle }, stride, rank: self.rank, ranks: self.ranks() })
    }

    /// Creates contexts, and runs a function while a progress thread steps the engine.
    pub(crate) fn with_contexts(&self, config: &GinConfig, work: impl FnOnce(&Contexts)) {
        let contexts = self.try_create(config).unwrap();
        let (stop, object) = (AtomicBool::new(false), contexts.object.expose_provenance());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // Safety: as above.
                    let code = unsafe { (TABLE.gin_progress)(std::ptr::with_exposed_provenance_mut(object)) };
                    assert_eq!(code, 0);
                    std::thread::yield_now();
                }
            });
            let _stop = StopGuard(&stop);
            work(&contexts);
            self.meet();
        });
        contexts.destroy();
    }
}

/// Ends a progress thread, also after a panic.
struct StopGuard<'a>(&'a AtomicBool);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
