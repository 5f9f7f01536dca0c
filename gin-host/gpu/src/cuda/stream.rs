// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams, events and launches.

use super::CudaDevice;
use super::context::Context;
use super::copy_stream::new_stream;
use super::deferred::{Deferred, Resource};
use super::driver::{BesideCaptures, RawHandle, check, describe, is_capturing, is_done, new_event, written};
use super::launches::{self, Before, Wanted, free_deferred};
use super::module::{Handle, Image};
use super::shape::Shape;
use crate::{Argument, Device, Event, Function, GpuError, Graph, LaunchConfig, Stream, WAIT_IN_CAPTURE, lock};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUevent, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode};
use gin_boot::rt;
use gin_device::kernel::{KernelEntry, LaunchStream};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Work of a GPU in order, on a stream that waits for no other stream, or on one of the program.
///
/// # Graphs
/// [`capture`](crate::Stream#method.capture) makes a graph whose kernels are checked and counted when it is launched.
/// If the program captures the stream by the driver itself, a launch becomes part of the program's graph. As always, a
/// cooperative launch is refused if it does not fit beside the kernels of that moment. Nothing is checked when such a
/// graph is launched, and its kernels are not in [`Device::running`]. A program that launches such graphs with waiting
/// kernels ensures that all of them fit at once. Before they have ended it drops nothing that they use and destroys no
/// communicator.
#[derive(Debug)]
pub struct CudaStream {
    device: Arc<CudaDevice>,
    raw: CUstream,
    /// Destroys it, if gin has made it.
    _owner: Option<Deferred>,
    /// The kernel that was launched last, for error texts.
    last: Mutex<String>,
    /// Its number, which no other stream of the process has.
    number: u64,
    order: Mutex<Order>,
    /// It was idle since the last launch.
    was_idle: AtomicBool,
}

/// The state of a stream. Locked while the stream gets work.
#[derive(Debug)]
struct Order {
    /// The launches that its next one follows; its own last launch, too.
    before: Before,
    capture: Capture,
    /// The kernels of a capture.
    captured: Vec<Captured>,
    /// It has had dependent kernels. An event between two of them would keep the second one from starting early.
    has_dependents: bool,
    /// No event was recorded behind the last launch.
    is_unmarked: bool,
}

/// The ways in which a stream can become part of a graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Capture {
    /// By a call of gin, which sets `Begun` before.
    None,
    /// One has been begun, here or on a stream for whose work this one waits, and was not seen to end.
    Begun,
    /// By the program, which has the handle, at any time.
    ByProgram,
}

/// A stream with several shapes of kernels is asked whether it is idle at every such launch.
const TRIM: u64 = 64;

/// A kernel that became part of a graph.
#[derive(Debug)]
struct Captured {
    wanted: Wanted,
    image: Arc<Image>,
}

/// The number of the next stream.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

// Safety: a stream may be used from any thread, from several at the same time.
unsafe impl Send for CudaStream {}
// Safety: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn new(device: Arc<CudaDevice>, priority: i32) -> Result<Self, GpuError> {
        device.context.enter()?;
        let raw = new_stream(priority)?;
        let owner = Some(Deferred::new(&device.context, Resource::Stream(raw)));
        Ok(Self::with(device, raw, owner))
    }

    fn with(device: Arc<CudaDevice>, raw: CUstream, owner: Option<Deferred>) -> Self {
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let order = Order {
            before: Before::from([(number, 0)]),
            capture: if owner.is_some() { Capture::None } else { Capture::ByProgram },
            captured: Vec::new(),
            has_dependents: false,
            is_unmarked: false,
        };
        let (last, order, was_idle) = (Mutex::default(), Mutex::new(order), AtomicBool::new(false));
        Self { raw, _owner: owner, device, last, number, order, was_idle }
    }

    /// Uses a stream of the program, which keeps it alive.
    pub(super) fn foreign(device: Arc<CudaDevice>, raw: CUstream) -> Self {
        Self::with(device, raw, None)
    }

    /// Returns the stream of a GPU behind a stream, if it is one.
    pub fn of(stream: &dyn Stream) -> Option<&Self> {
        (stream as &dyn Any).downcast_ref()
    }

    /// Returns its handle in the driver, a `CUstream`; valid as long as this. From then on a launch makes two more
    /// calls of the driver, because the program may capture the stream.
    pub fn raw(&self) -> RawHandle {
        let mut order = lock(&self.order);
        // It fails only if the context has failed, and then nothing runs any more.
        let _ = self.mark(&mut order);
        order.capture = Capture::ByProgram;
        self.raw.cast()
    }

    /// Returns whether work becomes part of a graph now.
    fn is_captured(&self, order: &mut Order) -> Result<bool, GpuError> {
        if order.capture == Capture::None {
            return Ok(false);
        }
        if self.raw.is_null() {
            // The default stream cannot be captured, and the current context may have another one.
            return Ok(false);
        }
        let is_captured = is_capturing(self.raw)?;
        if !is_captured && order.capture == Capture::Begun {
            order.capture = Capture::None;
        }
        Ok(is_captured)
    }

    /// Records the end of the launches, if that is not done yet, before anything else that they would seem to last for.
    fn mark(&self, order: &mut Order) -> Result<(), GpuError> {
        if order.is_unmarked && order.capture == Capture::None {
            launches::mark(&self.device.context, self.number)?;
            order.is_unmarked = false;
        }
        Ok(())
    }

    /// Launches kernels. `captured`: they become part of a graph. Returns whether the first may run beside the one
    /// before it.
    fn start(
        &self,
        order: &mut Order,
        captured: bool,
        kernels: &[Wanted],
        start: impl Fn(bool) -> CUresult,
    ) -> Result<bool, GpuError> {
        let last = order.before.entry(self.number).or_insert(0);
        *last += 1;
        let trims = self.was_idle.load(Ordering::Relaxed) || last.is_multiple_of(TRIM);
        let unmarked = order.has_dependents || order.capture == Capture::None;
        let launch = launches::Launch {
            context: &self.device.context,
            owner: self.device.id,
            stream: self.raw,
            number: self.number,
            before: &order.before,
            kernels,
            captured,
            unmarked,
            trims,
        };
        let overlaps = launches::launch(&launch, start)?;
        if !captured {
            order.is_unmarked = unmarked;
            self.was_idle.store(false, Ordering::Relaxed);
        }
        Ok(overlaps)
    }

    fn failed(&self, failure: DriverError) -> GpuError {
        GpuError::Kernel { kernel: lock(&self.last).clone(), reason: describe(failure) }
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if lock(&self.order).is_unmarked {
            // It fails only if the context has failed, and then nothing runs any more.
            let _ = launches::mark(&self.device.context, self.number);
        }
    }
}

impl Stream for CudaStream {
    fn device(&self) -> Arc<dyn Device> {
        self.device.clone()
    }

    unsafe fn enqueue(
        &self,
        function: &Function,
        config: LaunchConfig,
        arguments: Vec<Argument>,
    ) -> Result<(), GpuError> {
        let context = &self.device.context;
        let handle = function.handle.downcast_ref::<Handle>().filter(|handle| handle.ordinal == context.ordinal);
        let Some(handle) = handle else {
            return Err(context.unsupported("run a kernel that was loaded for another device"));
        };
        if config.dependent {
            handle.check_dependent(&function.name)?;
        }
        // On every thread an event tells whether the default stream is idle; dependent kernels have none between them.
        let config = LaunchConfig { dependent: config.dependent && !self.raw.is_null(), ..config };
        let fit = handle.fit(&config)?;
        let LaunchConfig { cooperative, dependent, .. } = config;
        let wanted = Wanted { blocks: config.blocks(), fit, cooperative, dependent, local: handle.local() };
        let mut order = lock(&self.order);
        lock(&self.last).clone_from(&function.name);
        // The driver copies the values before it returns.
        let mut few = [std::ptr::null_mut(); 16];
        let mut many = Vec::new();
        let values: &mut [*mut core::ffi::c_void] = match few.get_mut(..arguments.len()) {
            Some(few) => few,
            None => {
                many.resize(arguments.len(), std::ptr::null_mut());
                &mut many
            }
        };
        values.iter_mut().zip(&arguments).for_each(|(value, argument)| *value = argument.as_ptr().cast_mut().cast());
        let values = values.as_mut_ptr();
        let captured = self.is_captured(&mut order)?;
        order.has_dependents |= dependent && !captured;
        let overlaps = self.start(&mut order, captured, &[wanted], |overlaps| {
            let shape = Shape::new(&LaunchConfig { dependent: overlaps, ..config }, self.raw);
            // Safety: the caller promised that the values are the kernel's parameters; the rest lives until the call
            // returns.
            unsafe { sys::cuLaunchKernelEx(&raw const shape.config, handle.raw(), values, std::ptr::null_mut()) }
        })?;
        if captured {
            let wanted = Wanted { dependent: overlaps, ..wanted };
            order.captured.push(Captured { wanted, image: handle.image.clone() });
        }
        Ok(())
    }

    fn begin_capture(&self) -> Result<(), GpuError> {
        let mut order = lock(&self.order);
        self.device.context.enter()?;
        launches::mark(&self.device.context, self.number)?;
        order.is_unmarked = false;
        if order.capture == Capture::None {
            order.capture = Capture::Begun;
        }
        order.captured.clear();
        // Other threads of the program, other ranks for example, call the driver as before.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // Safety: the stream is alive.
        check("begin a graph", unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) })
    }

    fn end_capture(&self) -> Result<Box<dyn Graph>, GpuError> {
        let context = &self.device.context;
        context.enter()?;
        let null = std::ptr::null_mut();
        // Safety: the stream is alive; the call writes a pointer.
        let graph = written("end a graph", null, |graph| unsafe { sys::cuStreamEndCapture(self.raw, graph) })?;
        // Safety: the graph is alive; the call writes a pointer.
        let make = |made| unsafe { sys::cuGraphInstantiateWithFlags(made, graph, 0) };
        let made = written("make a graph", std::ptr::null_mut(), make);
        // Safety: nothing else has the graph.
        check("end a graph", unsafe { sys::cuGraphDestroy(graph) })?;
        let raw = made?;
        let captured = std::mem::take(&mut lock(&self.order).captured);
        let (kernels, images) = captured.into_iter().map(|kernel| (kernel.wanted, kernel.image)).unzip();
        let owner = Deferred::new(context, Resource::Graph(raw));
        Ok(Box::new(CudaGraph { raw, ordinal: context.ordinal, kernels, _owner: owner, _images: images }))
    }

    unsafe fn replay(&self, graph: &dyn Graph) -> Result<(), GpuError> {
        let context = &self.device.context;
        let graph = (graph as &dyn Any).downcast_ref::<CudaGraph>();
        let Some(graph) = graph.filter(|graph| graph.ordinal == context.ordinal) else {
            return Err(context.unsupported("launch a graph of another device"));
        };
        let mut order = lock(&self.order);
        "a graph".clone_into(&mut lock(&self.last));
        let captured = self.is_captured(&mut order)?;
        // Safety: both are alive.
        let start = |_| unsafe { sys::cuGraphLaunch(graph.raw, self.raw) };
        self.start(&mut order, captured, &graph.kernels, start).map(drop)
    }

    unsafe fn copy(&self, destination: u64, source: u64, bytes: u64) -> Result<(), GpuError> {
        self.mark(&mut lock(&self.order))?;
        self.device.context.enter()?;
        // Safety: the caller's promise.
        let code = unsafe { sys::cuMemcpyAsync(destination, source, bytes as usize, self.raw) };
        check("copy in a stream", code)
    }

    fn record(&self) -> Result<Box<dyn Event>, GpuError> {
        self.device.context.enter()?;
        let raw = new_event(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        let context = self.device.context.clone();
        let mut order = lock(&self.order);
        let (owner, is_captured) = (Deferred::new(&context, Resource::Event(raw)), self.is_captured(&mut order)?);
        let event = CudaEvent { raw, owner, context, before: order.before.clone(), is_captured };
        // Safety: both are alive.
        check("record an event", unsafe { sys::cuEventRecord(raw, self.raw) })?;
        Ok(Box::new(event))
    }

    fn wait_for(&self, event: &dyn Event) -> Result<(), GpuError> {
        let Some(event) = (event as &dyn Any).downcast_ref::<CudaEvent>() else {
            return Err(self.device.context.unsupported("wait for an event of another kind of device"));
        };
        let mut order = lock(&self.order);
        self.mark(&mut order)?;
        if event.is_captured && order.capture == Capture::None {
            order.capture = Capture::Begun;
        }
        self.device.context.enter()?;
        // Safety: both are alive.
        check("wait for an event", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })?;
        for (&stream, &last) in &event.before {
            let known = order.before.entry(stream).or_insert(0);
            *known = last.max(*known);
        }
        Ok(())
    }

    fn is_capturing(&self) -> Result<bool, GpuError> {
        self.device.context.enter()?;
        self.is_captured(&mut lock(&self.order))
    }

    fn is_idle(&self) -> Result<bool, GpuError> {
        if self.is_capturing()? {
            return Err(self.device.context.unsupported(WAIT_IN_CAPTURE));
        }
        let _beside = BesideCaptures::begin();
        // Safety: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            CUresult::CUDA_SUCCESS => {
                self.was_idle.store(true, Ordering::Relaxed);
                Ok(true)
            }
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => Err(self.failed(DriverError(code))),
        }
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        // A driver call that waits could delay calls of other ranks, for which this one waits.
        let start = Instant::now();
        let mut outcome = Ok(true);
        rt::wait_until_named("the work of its stream", || {
            outcome = self.is_idle();
            let late = self.device.limit.is_some_and(|limit| start.elapsed() > limit);
            outcome != Ok(false) || late
        });
        free_deferred();
        match outcome {
            Ok(true) => Ok(()),
            Ok(false) => {
                let reason = format!("it has not ended after {:.0?}", start.elapsed());
                Err(GpuError::Kernel { kernel: lock(&self.last).clone(), reason })
            }
            Err(error) => Err(error),
        }
    }
}

impl LaunchStream for CudaStream {
    type Config = LaunchConfig;
    type Error = GpuError;

    unsafe fn launch_entry(
        &self,
        kernel: &'static KernelEntry,
        config: LaunchConfig,
        params: &[*const u8],
    ) -> Result<(), GpuError> {
        let stream: &dyn Stream = self;
        // Safety: the caller's promise.
        unsafe { stream.launch_entry(kernel, config, params) }
    }
}

/// Captured work that the driver can launch.
#[derive(Debug)]
struct CudaGraph {
    raw: CUgraphExec,
    ordinal: usize,
    kernels: Vec<Wanted>,
    /// Frees it before the modules of its kernels.
    _owner: Deferred,
    _images: Vec<Arc<Image>>,
}

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for CudaGraph {}
// Safety: as above.
unsafe impl Sync for CudaGraph {}

impl Graph for CudaGraph {}

#[derive(Debug)]
struct CudaEvent {
    context: Arc<Context>,
    /// The launches before it.
    before: Before,
    /// A stream that waits for it becomes part of a graph.
    is_captured: bool,
    raw: CUevent,
    owner: Deferred,
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // A program may go on for days and never wait for its streams, which would free what was deferred.
        if self.is_done() == Ok(true) {
            self.owner.free_now();
        }
    }
}

// Safety: an event may be used from any thread.
unsafe impl Send for CudaEvent {}
// Safety: as above.
unsafe impl Sync for CudaEvent {}

impl Event for CudaEvent {
    fn is_done(&self) -> Result<bool, GpuError> {
        self.context.enter()?;
        let _beside = BesideCaptures::begin();
        // Safety: the event is alive.
        is_done("ask for an event", unsafe { sys::cuEventQuery(self.raw) })
    }

    fn since(&self, earlier: &dyn Event) -> Option<u64> {
        let earlier = (earlier as &dyn Any).downcast_ref::<Self>()?;
        self.context.enter().ok()?;
        // Safety: writes one number; both events are alive.
        let ask = |milliseconds| unsafe { sys::cuEventElapsedTime_v2(milliseconds, earlier.raw, self.raw) };
        written("ask for a time", 0f32, ask).ok().map(|milliseconds| (f64::from(milliseconds) * 1e6) as u64)
    }
}
