// SPDX-License-Identifier: MIT OR Apache-2.0
//! One GPU of the process, shared by all ranks on it: its context and its properties.

use super::driver::{BesideCaptures, check, handle, written};
use super::info::{self, device_count};
use crate::{GpuError, Limits, lock};
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUresult,
};
use std::cell::Cell;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};

thread_local! {
    /// The address of the context that gin made current last on this thread. Other code of the thread may have made
    /// another one current since.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// A GPU. It is opened once and kept until the process ends, as its primary context is.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) ordinal: usize,
    pub(super) name: String,
    /// Compute capability times 10.
    pub(super) capability: u32,
    pub(super) sms: u32,
    pub(super) limits: Limits,
    /// The bytes of a granule of memory at addresses of gin's choice; `None` if the GPU has ordinary memory only.
    pub(super) granularity: Option<u64>,
    /// A NIC can reach memory at addresses of gin's choice.
    pub(super) nic_reaches: bool,
    /// Its memory can be exported as files that drivers share.
    pub(super) dma_buf: bool,
    /// The context's handle in the driver.
    pub(super) raw: CUcontext,
    /// The GPU's number in the driver.
    pub(super) device: CUdevice,
    /// The numbers of the other GPUs whose memory this one reaches.
    neighbours: Mutex<Vec<usize>>,
    /// The numbers of the neighbours whose memory kernels of this GPU reach with atomics.
    friends: Mutex<Vec<usize>>,
    /// The number of device objects that use it: ranks, if each has one.
    pub(super) users: AtomicU32,
}

// Safety: a context may be made current on any thread, on several at the same time.
unsafe impl Send for Context {}
// Safety: as above.
unsafe impl Sync for Context {}

/// The GPUs that were opened.
static ALL: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());

impl Context {
    /// Returns GPU number `ordinal`.
    pub(super) fn get(ordinal: usize) -> Result<Arc<Self>, GpuError> {
        let there = device_count()?;
        if ordinal >= there {
            return Err(GpuError::NoSuchDevice { ordinal, there });
        }
        let mut all = lock(&ALL);
        if let Some(known) = all.iter().find(|known| known.ordinal == ordinal) {
            return Ok(known.clone());
        }
        let new = Arc::new(Self::open(ordinal)?);
        for other in all.iter() {
            new.befriend(other)?;
            other.befriend(&new)?;
        }
        all.push(new.clone());
        Ok(new)
    }

    /// Returns the GPUs that were opened.
    pub(super) fn all() -> Vec<Arc<Self>> {
        lock(&ALL).clone()
    }

    fn open(ordinal: usize) -> Result<Self, GpuError> {
        let device = info::device(ordinal)?;
        // Without this flag each launch that needs more local memory than the last one would wait for running kernels.
        let flags = sys::CUctx_flags::CU_CTX_SCHED_AUTO as u32 | sys::CUctx_flags::CU_CTX_LMEM_RESIZE_TO_MAX as u32;
        // Safety: takes no pointers. It fails if the context is already in use with flags of other code.
        let _ = unsafe { sys::cuDevicePrimaryCtxSetFlags_v2(device, flags) };
        // Safety: writes one pointer; released when the process ends.
        let retain = |context| unsafe { sys::cuDevicePrimaryCtxRetain(context, device) };
        let raw = handle("open a GPU's context", retain)?;
        let attribute = |attribute| info::attribute(device, attribute);
        let capability = info::capability(device)?;
        let limits = Limits {
            dynamic_shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            // The portable number. A kernel with more needs an attribute.
            cluster_blocks: if capability >= 90 { 8 } else { 1 },
            ..Limits::CUDA
        };
        let mut context = Self {
            ordinal,
            name: info::name(device)?,
            capability,
            sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            limits,
            granularity: None,
            nic_reaches: false,
            dma_buf: attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? != 0,
            raw,
            device,
            neighbours: Mutex::default(),
            friends: Mutex::default(),
            users: AtomicU32::new(0),
        };
        for needed in [
            Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
            Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
            Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH,
        ] {
            if attribute(needed)? == 0 {
                let what = "be used: it lacks unified addresses, mapped host memory or cooperative launches";
                return Err(context.unsupported(what));
            }
        }
        if attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0 {
            let nic = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
            context.nic_reaches = attribute(nic)? != 0;
            context.enter()?;
            let properties = context.memory_properties();
            let which = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
            // Safety: writes one integer.
            let ask = |to| unsafe { sys::cuMemGetAllocationGranularity(to, &raw const properties, which) };
            context.granularity = Some(written("ask for the granularity of memory", 0, ask)? as u64);
        }
        Ok(context)
    }

    /// Returns the properties of memory of this GPU at an address of gin's choice.
    pub(super) fn memory_properties(&self) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            // No other process imports it.
            requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(self.nic_reaches),
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    pub(super) fn location(&self) -> CUmemLocation {
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.device }
    }

    /// Returns the descriptions by which this GPU, and every other one that can, may read and write memory of this one.
    pub(super) fn access(&self) -> Vec<CUmemAccessDesc> {
        let all = lock(&ALL);
        let near =
            all.iter().filter(|other| other.ordinal != self.ordinal && lock(&other.neighbours).contains(&self.ordinal));
        near.map(|other| other.own_access()).chain([self.own_access()]).collect()
    }

    /// Returns the description by which this GPU may read and write memory.
    pub(super) fn own_access(&self) -> CUmemAccessDesc {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        CUmemAccessDesc { location: self.location(), flags }
    }

    /// Makes this the context of the calling thread.
    pub(super) fn enter(&self) -> Result<(), GpuError> {
        // Safety: the context is alive until the process ends.
        check("make a GPU's context current", unsafe { sys::cuCtxSetCurrent(self.raw) })?;
        CURRENT.set(self.raw.addr());
        Ok(())
    }

    /// Makes a call whose handles are all of this context. If other code of the thread has made another one current,
    /// the driver may refuse the call, which then has done nothing.
    pub(super) fn call(&self, call: impl Fn() -> CUresult) -> CUresult {
        if CURRENT.get() == self.raw.addr() {
            let code = call();
            if code == CUresult::CUDA_SUCCESS || self.is_current() {
                return code;
            }
        }
        // Safety: as above.
        match unsafe { sys::cuCtxSetCurrent(self.raw) } {
            CUresult::CUDA_SUCCESS => {
                CURRENT.set(self.raw.addr());
                call()
            }
            code => code,
        }
    }

    fn is_current(&self) -> bool {
        let mut current = std::ptr::null_mut();
        // Safety: writes one pointer.
        unsafe { sys::cuCtxGetCurrent(&raw mut current) == CUresult::CUDA_SUCCESS && current == self.raw }
    }

    /// Lets this GPU reach memory of `other`, if the hardware can. Then copies between them take the direct way.
    /// Kernels use it only if the hardware also has atomics on it.
    fn befriend(&self, other: &Self) -> Result<(), GpuError> {
        if !info::reaches(self.device, other.device)? {
            return Ok(());
        }
        self.enter()?;
        let _beside = BesideCaptures::begin();
        // Safety: the context is alive until the process ends.
        match unsafe { sys::cuCtxEnablePeerAccess(other.raw, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            code => check("let a GPU reach another one", code)?,
        }
        lock(&self.neighbours).push(other.ordinal);
        if info::has_atomics(self.device, other.device)? {
            lock(&self.friends).push(other.ordinal);
        }
        Ok(())
    }

    /// Returns whether kernels of this GPU reach memory of `other`, with atomics.
    pub(super) fn reaches(&self, other: &Self) -> bool {
        self.ordinal == other.ordinal || lock(&self.friends).contains(&other.ordinal)
    }

    /// Returns whether this GPU reaches memory of `other` that was allocated in the usual way, perhaps without atomics.
    pub(super) fn copies_reach(&self, other: &Self) -> bool {
        self.ordinal == other.ordinal || lock(&self.neighbours).contains(&other.ordinal)
    }

    /// Returns the error of an operation that the GPU cannot do.
    pub(super) fn unsupported(&self, what: &'static str) -> GpuError {
        GpuError::Unsupported { device: self.full_name(), what }
    }

    /// Returns its name and number.
    pub(super) fn full_name(&self) -> String {
        format!("{} (GPU {})", self.name, self.ordinal)
    }
}
