// SPDX-License-Identifier: MIT OR Apache-2.0
//! A lane of a GPU: a stream of copies and of memory operations, which copy engines and the front end of the GPU do.

use super::CudaDevice;
use super::context::Context;
use super::copy_stream::{host_alloc, new_stream};
use super::deferred::{Deferred, Resource};
use super::driver::{BesideCaptures, check, handle, is_done};
use super::info;
use super::launches::free_deferred;
use super::resident::Hold;
use crate::copier::Ticket;
use crate::lane::{Lane, MAX_VALUES, Mark, Value};
use crate::shared::pointer;
use crate::{GpuError, lock};
use cudarc::driver::sys::{
    self, CUdevice_attribute, CUfunction, CUstream, CUstreamBatchMemOpParams as Operation,
    CUstreamBatchMemOpType as Kind, CUstreamWaitValue_flags, CUstreamWriteValue_flags,
};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::{Arc, Mutex};

/// A kernel of one thread that adds to a word. It is PTX of the oldest GPU with virtual memory, because the driver
/// compiles it for each newer one; so a program needs no compiler of kernels for it.
const ADD: &CStr = c"
.version 6.0
.target sm_70
.address_size 64
.visible .entry gin_lane_add(.param .u64 word, .param .u64 amount)
{
    .reg .u64 %to, %value;
    ld.param.u64 %to, [word];
    ld.param.u64 %value, [amount];
    fence.acq_rel.sys;
    red.relaxed.sys.global.add.u64 [%to], %value;
    ret;
}
";

/// The priority of a lane's stream: the first. On two H100s (2026-11-27) a copy with its signal and the same back took
/// 1 to 5 % less time than with the usual priority.
const FIRST: i32 = i32::MIN;

/// The kernel on each GPU that has a lane, by number. It stays loaded until the process ends.
static ADDERS: Mutex<BTreeMap<usize, Adder>> = Mutex::new(BTreeMap::new());

/// A function of the driver.
#[derive(Clone, Copy, Debug)]
struct Adder(CUfunction);

// Safety: a handle of the driver, which any thread may use.
unsafe impl Send for Adder {}

impl Adder {
    /// Returns the kernel for a GPU. The context must be current.
    fn of(context: &Context) -> Result<Self, GpuError> {
        let mut all = lock(&ADDERS);
        if let Some(adder) = all.get(&context.ordinal) {
            return Ok(*adder);
        }
        // The driver waits for running kernels before it loads a module.
        let _hold = Hold::new();
        // Safety: the text ends with a zero byte; the call writes a pointer.
        let module = handle("load the kernel that raises signals", |module| unsafe {
            sys::cuModuleLoadData(module, ADD.as_ptr().cast())
        })?;
        let name = c"gin_lane_add";
        // Safety: the module is loaded; the call writes a pointer.
        let function = handle("find the kernel that raises signals", |function| unsafe {
            sys::cuModuleGetFunction(function, module, name.as_ptr())
        })?;
        // Safety: as above. Otherwise the first launch would load it, perhaps while a kernel waits for it.
        check("load a kernel", unsafe { sys::cuFuncLoad(function) })?;
        let adder = Self(function);
        all.insert(context.ordinal, adder);
        Ok(adder)
    }
}

/// The distance of the words of two marks: a cache line, because a thread polls one while GPUs write others.
const WORD: usize = 64;

/// The bytes of words that are allocated together.
const WORDS: usize = 64 << 10;

/// The words for marks that no lane has, in pinned memory that is never freed. They only grow: the next lane goes on
/// with the numbers of the last one, because other threads may still ask for an earlier end.
static UNUSED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Returns an unused word. The context must be current.
fn unused_word() -> Result<u64, GpuError> {
    let mut unused = lock(&UNUSED);
    if unused.is_empty() {
        let start = host_alloc(WORDS as u64)?;
        // Safety: these bytes were just allocated.
        unsafe { std::ptr::write_bytes(pointer(start).cast::<u8>(), 0, WORDS) };
        unused.extend((start..start + WORDS as u64).step_by(WORD));
    }
    Ok(unused.pop().unwrap_or_default())
}

/// Copies and memory operations of one stream.
#[derive(derive_more::Debug)]
pub(super) struct CudaLane {
    context: Arc<Context>,
    stream: CUstream,
    /// Destroys the stream.
    _owner: Deferred,
    mark: Arc<Mark>,
    last: Ticket,
    adder: Adder,
    /// Waits that the stream gets with its next work, because each call of the driver takes a microsecond.
    #[debug(skip)]
    batch: Vec<Operation>,
}

/// The maximum number of waits that are kept.
const MAX_WAITS: usize = 8;

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for CudaLane {}

impl CudaLane {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, GpuError> {
        if info::attribute(context.device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)? == 0
        {
            return Err(context.unsupported("write words of 8 bytes in the order of a stream"));
        }
        free_deferred();
        context.enter()?;
        let adder = Adder::of(context)?;
        let stream = new_stream(FIRST)?;
        let owner = Deferred::new(context, Resource::Stream(stream));
        // Safety: the word is never freed, and only the one lane that has it writes it, each time a larger number.
        let mark = Arc::new(unsafe { Mark::new(unused_word()?, Arc::new(())) });
        let last = mark.reached();
        // No call after this one allocates.
        let batch = Vec::with_capacity(MAX_WAITS + MAX_VALUES + 1);
        Ok(Self { context: context.clone(), stream, _owner: owner, mark, last, adder, batch })
    }

    /// Puts waits, and the writes behind them, on the stream.
    fn operate(&mut self) -> Result<(), GpuError> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let (count, first) = (self.batch.len() as u32, self.batch.as_mut_ptr());
        // Safety: there are as many operations, and callers of `finish` promise that the words exist.
        let code = self.context.call(|| unsafe { sys::cuStreamBatchMemOp_v2(self.stream, count, first, 0) });
        self.batch.clear();
        check("write values in the order of a stream", code)
    }

    fn start(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), GpuError> {
        self.operate()?;
        // Safety: the promise of the callers of `copy` and `store`.
        let code = self.context.call(|| unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, self.stream) });
        check("copy between GPUs", code)
    }
}

/// Returns an operation without effect.
fn none() -> Operation {
    Operation { pad: [0; 6] }
}

/// Returns the write of a word of 4 or 8 bytes, behind a barrier for all earlier work of the stream. A driver of CUDA
/// 13.0 refuses writes without the barrier on H100 (2026-11-27).
fn write(kind: Kind, to: u64, value: u64) -> Operation {
    let mut operation = none();
    operation.writeValue = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st {
        operation: kind,
        address: to,
        __bindgen_anon_1: sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 {
            value64: value,
        },
        flags: CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32,
        alias: 0,
    };
    operation
}

impl Lane for CudaLane {
    fn mark(&self) -> &Arc<Mark> {
        &self.mark
    }

    unsafe fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), GpuError> {
        self.start(to, from, bytes)
    }

    unsafe fn store(&mut self, to: u64, bytes: &[u8]) -> Result<(), GpuError> {
        // The driver has taken the bytes of ordinary host memory when the call returns.
        self.start(to, bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64)
    }

    unsafe fn add(&mut self, mut word: u64, mut amount: u64) -> Result<(), GpuError> {
        self.operate()?;
        let mut values = [(&raw mut word).cast(), (&raw mut amount).cast()];
        let (values, none) = (values.as_mut_ptr(), std::ptr::null_mut());
        // Safety: the kernel takes these two values, which the driver copies.
        let launch = || unsafe { sys::cuLaunchKernel(self.adder.0, 1, 1, 1, 1, 1, 1, 0, self.stream, values, none) };
        check("raise a signal by a kernel", self.context.call(launch))
    }

    fn wait(&mut self, mark: &Mark, ticket: Ticket) -> Result<(), GpuError> {
        let mut operation = none();
        operation.waitValue = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st {
            operation: Kind::CU_STREAM_MEM_OP_WAIT_VALUE_64,
            address: mark.address(),
            __bindgen_anon_1: sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 {
                value64: ticket,
            },
            flags: CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32,
            alias: 0,
        };
        if self.batch.len() == MAX_WAITS {
            self.operate()?;
        }
        self.batch.push(operation);
        Ok(())
    }

    unsafe fn finish(&mut self, values: &[Value]) -> Result<Ticket, GpuError> {
        if values.len() > MAX_VALUES {
            return Err(self.context.unsupported("write more than three values at an end"));
        }
        self.batch.extend(values.iter().map(|value| match *value {
            Value::Small { to, value } => write(Kind::CU_STREAM_MEM_OP_WRITE_VALUE_32, to, value.into()),
            Value::Word { to, value } => write(Kind::CU_STREAM_MEM_OP_WRITE_VALUE_64, to, value),
        }));
        let end = self.last + 1;
        self.batch.push(write(Kind::CU_STREAM_MEM_OP_WRITE_VALUE_64, self.mark.address(), end));
        self.operate()?;
        self.last = end;
        Ok(end)
    }

    fn check(&self) -> Result<(), GpuError> {
        let _beside = BesideCaptures::begin();
        // Safety: the stream is alive.
        let code = self.context.call(|| unsafe { sys::cuStreamQuery(self.stream) });
        is_done("copy between GPUs or write a value", code).map(drop)
    }
}

impl Drop for CudaLane {
    fn drop(&mut self) {
        // A word that the lane will still write is never used again.
        if self.mark.has_reached(self.last) {
            lock(&UNUSED).push(self.mark.address());
        }
    }
}

impl CudaDevice {
    /// Makes a lane.
    pub(super) fn new_lane(&self) -> Result<Box<dyn Lane>, GpuError> {
        Ok(Box::new(CudaLane::new(&self.context)?))
    }
}
