// SPDX-License-Identifier: MIT OR Apache-2.0
//! RAII wrappers of libfabric's objects.

use super::provider::{Fabric, explain};
use crate::NetError;
use gin_gpu::registry::random;
use gin_gpu::{DeviceKind, MemoryKind, MemorySlice};
use gin_verbs::fabric::{
    Completion, DomainObject, EndpointObject, ErrorCompletion, FI_ADDR_UNSPEC, FI_AV_MAP, FI_AV_TABLE,
    FI_CQ_FORMAT_MSG, FI_DELIVERY_COMPLETE, FI_EAGAIN, FI_EAVAIL, FI_ENABLE, FI_HMEM_CUDA, FI_MR_ENDPOINT, FI_MR_LOCAL,
    FI_MR_PROV_KEY, FI_MR_VIRT_ADDR, FI_OPT_CUDA_API_PERMITTED, FI_OPT_ENDPOINT, FI_READ, FI_RECV, FI_REMOTE_READ,
    FI_REMOTE_WRITE, FI_TRANSMIT, FI_WAIT_NONE, FI_WRITE, FabricObject, MemoryAttributes, MemoryObject, Object,
    QueueAttributes, QueueObject, Range, RemoteMessage, RemoteRange, VectorAttributes, VectorObject,
};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a slot's data: a message or a value.
pub(super) const DATA: usize = 64;

/// An object, which is closed when it is dropped.
struct Handle<T>(NonNull<T>);

impl<T> Handle<T> {
    /// Calls a function that stores a new object, of a type that begins with [`Object`].
    fn made(fabric: &Fabric, what: &'static str, make: impl FnOnce(*mut *mut T) -> c_int) -> Result<Self, NetError> {
        let mut object = ptr::null_mut();
        match (make(&raw mut object), NonNull::new(object)) {
            (0, Some(object)) => Ok(Self(object)),
            (error, _) => Err(failed(fabric, what, error)),
        }
    }

    fn object(&self) -> *mut Object {
        self.0.as_ptr().cast()
    }

    fn get(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        // Safety: made by the library, and closed once. Owners drop an object before the objects that it uses.
        unsafe { ((*(*self.object()).ops).close)(self.object()) };
    }
}

fn failed(fabric: &Fabric, what: &'static str, error: c_int) -> NetError {
    let reason =
        format!("{} (provider {}, {})", explain(&fabric.library, error), fabric.offer.provider, fabric.offer.domain);
    NetError::Local { what, reason }
}

/// A domain of a provider, which owns all other objects of a rank. Dropped in this order.
pub(super) struct Domain {
    domain: Handle<DomainObject>,
    _fabric: Handle<FabricObject>,
    pub(super) fabric: Arc<Fabric>,
}

// Safety: one thread at a time uses a rank's objects, which is what FI_THREAD_DOMAIN asks for. No object belongs to a
// thread. Shared references are to numbers that do not change.
unsafe impl Send for Domain {}
// Safety: as above.
unsafe impl Sync for Domain {}

/// Memory that peers reach, or that operations of this rank use.
pub(super) struct Region {
    _memory: Handle<MemoryObject>,
    pub(super) key: u64,
    /// The memory is a GPU's.
    pub(super) in_gpu: bool,
    /// Descriptor for operations of this rank; null if the provider does not ask for it.
    descriptor: *mut c_void,
    domain: Arc<Domain>,
}

// Safety: as for `Domain`.
unsafe impl Send for Region {}

impl Region {
    /// Returns what peers pass as the place of the first byte, whose address is `address`.
    pub(super) fn base(&self, address: u64) -> u64 {
        if self.domain.fabric.offer.has(FI_MR_VIRT_ADDR) { address } else { 0 }
    }
}

/// State of an outstanding operation, or of a posted buffer, which the provider writes.
#[repr(C, align(64))]
struct Slot {
    /// `struct fi_context2`
    context: [u64; 8],
    data: [u8; DATA],
}

/// Slots, whose addresses do not change.
pub(super) struct Slots {
    /// Before the slots: dropped in this order.
    region: Option<Region>,
    slots: Box<[UnsafeCell<Slot>]>,
}

// Safety: numbers and bytes.
unsafe impl Send for Slots {}

impl Slots {
    fn context(&self, index: usize) -> *mut c_void {
        self.slots[index].get().cast()
    }

    /// Returns the index of the slot whose context an operation has.
    fn index(&self, context: *mut c_void) -> Option<usize> {
        let offset = (context as usize).checked_sub(self.slots.as_ptr() as usize)?;
        let index = offset / size_of::<Slot>();
        (index < self.slots.len()).then_some(index)
    }

    fn data(&self, index: usize) -> *mut u8 {
        // Safety: in range of the slot.
        unsafe { (&raw mut (*self.slots[index].get()).data).cast() }
    }

    /// Returns the data of a slot whose operation is complete.
    pub(super) fn read(&self, index: usize) -> [u8; DATA] {
        // Safety: the provider does not write the slot any more.
        unsafe { *self.data(index).cast::<[u8; DATA]>() }
    }

    fn write(&mut self, index: usize, bytes: &[u8]) {
        let count = bytes.len().min(DATA);
        // Safety: in range of the slot, which no operation uses.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.data(index), count) };
    }

    fn descriptor(&self) -> *mut c_void {
        self.region.as_ref().map_or(ptr::null_mut(), |region| region.descriptor)
    }
}

/// The result of posting an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Posted {
    Yes,
    /// The provider has no room now.
    Later,
    /// It waits for earlier operations.
    Behind,
    /// The provider refuses it with this error number.
    No(c_int),
}

impl Posted {
    fn of(result: isize) -> Self {
        match result {
            0 => Self::Yes,
            result if result == -FI_EAGAIN => Self::Later,
            error => Self::No(error.unsigned_abs() as c_int),
        }
    }
}

/// A completion: the slot, the received bytes, and the error number and the provider's one if the operation failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ended {
    pub(super) slot: usize,
    pub(super) bytes: usize,
    pub(super) error: Option<(c_int, c_int)>,
}

/// A rank's endpoint, with what it uses. Dropped in this order.
pub(super) struct EndpointHandle {
    /// `None` once it is shut.
    endpoint: Option<Handle<EndpointObject>>,
    pub(super) slots: Slots,
    queue: Handle<QueueObject>,
    vector: Handle<VectorObject>,
    pub(super) domain: Arc<Domain>,
}

// Safety: as for `Domain`.
unsafe impl Send for EndpointHandle {}

impl Drop for EndpointHandle {
    fn drop(&mut self) {
        if self.binds_memory() {
            self.slots.region = None;
        }
    }
}

/// The endpoints in shared memory of this process: the number in use, and the ones that no rank uses any more.
static SHARED: Mutex<(usize, Vec<EndpointHandle>)> = Mutex::new((0, Vec::new()));

impl EndpointHandle {
    /// Opens an endpoint with this many slots, for `ranks` peers.
    pub(super) fn new(fabric: &Arc<Fabric>, slots: usize, ranks: u32) -> Result<Self, NetError> {
        let info = fabric.info();
        // Safety (all calls of the library here): the objects exist, the structures have the types that the headers
        // declare, and the library copies what it keeps.
        let parent = Handle::<FabricObject>::made(fabric, "opening the provider", |made| unsafe {
            (fabric.library.fi_fabric)((*info).fabric_attr, made, ptr::null_mut())
        })?;
        let domain = Handle::<DomainObject>::made(fabric, "opening the provider's domain", |made| unsafe {
            ((*(*parent.get()).ops).domain)(parent.get(), info, made, ptr::null_mut())
        })?;
        let domain = Arc::new(Domain { domain, _fabric: parent, fabric: fabric.clone() });
        let raw = domain.domain.get();
        // Safety: the library filled it.
        let table = unsafe { (*(*info).domain_attr).av_type } == FI_AV_TABLE;
        let mut vector = VectorAttributes::default();
        vector.r#type = if table { FI_AV_TABLE } else { FI_AV_MAP };
        vector.count = ranks as usize;
        let vector = Handle::<VectorObject>::made(fabric, "opening an address vector", |made| unsafe {
            ((*(*raw).ops).av_open)(raw, &raw mut vector, made, ptr::null_mut())
        })?;
        let mut queue = QueueAttributes::default();
        queue.size = slots;
        (queue.format, queue.wait_obj) = (FI_CQ_FORMAT_MSG, FI_WAIT_NONE);
        let queue = Handle::<QueueObject>::made(fabric, "opening a completion queue", |made| unsafe {
            ((*(*raw).ops).cq_open)(raw, &raw mut queue, made, ptr::null_mut())
        })?;
        let endpoint = Handle::<EndpointObject>::made(fabric, "opening an endpoint", |made| unsafe {
            ((*(*raw).ops).endpoint)(raw, info, made, ptr::null_mut())
        })?;
        let check = |what, error| if error == 0 { Ok(()) } else { Err(failed(fabric, what, error)) };
        unsafe {
            let operations = &*(*endpoint.object()).ops;
            check("binding the address vector", (operations.bind)(endpoint.object(), vector.object(), 0))?;
            let flags = FI_TRANSMIT | FI_RECV;
            check("binding the completion queue", (operations.bind)(endpoint.object(), queue.object(), flags))?;
            if fabric.offer.reaches_gpus {
                let (permitted, bytes) = (false, size_of::<bool>());
                let value = (&raw const permitted).cast();
                let setopt = (*(*endpoint.get()).ops).setopt;
                let error = setopt(endpoint.object(), FI_OPT_ENDPOINT, FI_OPT_CUDA_API_PERMITTED, value, bytes);
                check("forbidding calls of CUDA (FI_OPT_CUDA_API_PERMITTED)", error)?;
            }
            check("enabling the endpoint", (operations.control)(endpoint.object(), FI_ENABLE, ptr::null_mut()))?;
        }
        let empty = || UnsafeCell::new(Slot { context: [0; 8], data: [0; DATA] });
        let slots = Slots { region: None, slots: (0..slots).map(|_| empty()).collect() };
        let mut made = Self { endpoint: Some(endpoint), slots, queue, vector, domain };
        if fabric.offer.has(FI_MR_LOCAL) {
            let bytes = size_of_val(&*made.slots.slots) as u64;
            let first = made.slots.slots.as_ptr() as u64;
            let access = FI_TRANSMIT | FI_RECV | FI_READ | FI_WRITE;
            // Safety: `slots` drops the region before the memory.
            made.slots.region = Some(unsafe { made.register((first, bytes), access, None) }?);
        }
        if fabric.offer.is_shared_memory {
            SHARED.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
        }
        Ok(made)
    }

    /// Registers memory for writes and reads of peers and of this rank.
    ///
    /// # Safety
    /// - The memory stays as long as the region.
    pub(super) unsafe fn register_window(&self, slice: &MemorySlice) -> Result<Region, NetError> {
        let access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        // Safety: the caller's promise.
        unsafe { self.register((slice.address(), slice.bytes()), access, self.gpu(slice)?) }
    }

    /// Returns CUDA's number of the GPU whose memory this is, if the provider must register it as such.
    fn gpu(&self, slice: &MemorySlice) -> Result<Option<c_int>, NetError> {
        let Fabric { offer, config, .. } = &*self.domain.fabric;
        let device = slice.memory().device();
        if !offer.reaches_gpus || slice.memory().kind() != MemoryKind::Device {
            return Ok(None);
        }
        if device.kind() == DeviceKind::Virtual {
            return Ok(config.virtual_gpus.then_some(0));
        }
        // The provider asks CUDA for the pages, in the context of the calling thread.
        let entered = device.nic_access().map_or(Ok(None), |access| access.enter_cuda());
        entered.map_err(|error| NetError::Local { what: "registering memory of a GPU", reason: error.to_string() })
    }

    /// Registers memory of the host, or of a GPU.
    ///
    /// # Safety
    /// - The memory stays as long as the region.
    unsafe fn register(
        &self,
        (address, bytes): (u64, u64),
        access: u64,
        gpu: Option<c_int>,
    ) -> Result<Region, NetError> {
        const WHAT: &str = "registering memory";
        let fabric = &self.domain.fabric;
        let raw = self.domain.domain.get();
        let [low, high] = bytemuck::cast::<_, [u64; 2]>(random());
        // A key that no peer can guess, as long as the provider takes. Not all ones, which stands for no key.
        let mask = if fabric.offer.key_bytes >= 8 { u64::MAX } else { (1 << (8 * fabric.offer.key_bytes)) - 1 };
        let asked = if fabric.offer.has(FI_MR_PROV_KEY) { 0 } else { (low ^ high) & (mask >> 1) };
        let (first, length, domain) = (address as usize as *mut c_void, bytes as usize, self.domain.domain.object());
        let memory = Handle::<MemoryObject>::made(fabric, WHAT, |made| unsafe {
            let functions = &*(*raw).mr;
            let Some(gpu) = gpu else {
                return (functions.reg)(domain, first, length, access, 0, asked, 0, made, ptr::null_mut());
            };
            let range = Range { base: first, len: length };
            let mut attributes = MemoryAttributes::default();
            (attributes.mr_iov, attributes.iov_count) = (&raw const range, 1);
            (attributes.access, attributes.requested_key) = (access, asked);
            (attributes.iface, attributes.cuda) = (FI_HMEM_CUDA, gpu);
            (functions.regattr)(domain, &raw const attributes, 0, made)
        })?;
        if let Some(endpoint) = self.endpoint.as_ref().filter(|_| self.binds_memory()) {
            // Safety: both objects exist.
            let error = unsafe {
                let operations = &*(*memory.object()).ops;
                match (operations.bind)(memory.object(), endpoint.object(), 0) {
                    0 => (operations.control)(memory.object(), FI_ENABLE, ptr::null_mut()),
                    error => error,
                }
            };
            if error != 0 {
                return Err(failed(fabric, WHAT, error));
            }
        }
        // Safety: the library has filled it.
        let MemoryObject { mem_desc, key, .. } = unsafe { memory.0.as_ref() };
        // Operations on memory of a GPU name it, whether or not the provider asks for host memory too (FI_MR_HMEM).
        let named = fabric.offer.has(FI_MR_LOCAL) || gpu.is_some();
        let descriptor = if named { *mem_desc } else { ptr::null_mut() };
        Ok(Region { key: *key, in_gpu: gpu.is_some(), descriptor, _memory: memory, domain: self.domain.clone() })
    }

    /// Returns the endpoint's address in the provider's format.
    pub(super) fn address(&self) -> Result<Vec<u8>, NetError> {
        let mut bytes = vec![0u8; 512];
        let mut length = bytes.len();
        let error = match &self.endpoint {
            None => -(FI_EAGAIN as c_int),
            // Safety: the library writes at most `length` bytes, and what it wrote to `length`.
            Some(endpoint) => unsafe {
                let name = (*(*endpoint.get()).cm).getname;
                name(endpoint.object(), bytes.as_mut_ptr().cast(), &raw mut length)
            },
        };
        if error != 0 || length > bytes.len() {
            return Err(failed(&self.domain.fabric, "asking for the endpoint's address", error));
        }
        bytes.truncate(length);
        Ok(bytes)
    }

    /// Adds a peer's address; returns the number that stands for it. `None` if the provider cannot read it.
    pub(super) fn insert(&self, address: &[u8]) -> Option<u64> {
        // More room than any provider's format needs.
        let mut bytes = address.to_vec();
        bytes.resize(bytes.len().max(512), 0);
        let mut peer = FI_ADDR_UNSPEC;
        // Safety: the vector exists, and the library reads one address.
        let inserted = unsafe {
            let insert = (*(*self.vector.get()).ops).insert;
            insert(self.vector.get(), bytes.as_ptr().cast(), 1, &raw mut peer, 0, ptr::null_mut())
        };
        (inserted == 1 && peer != FI_ADDR_UNSPEC).then_some(peer)
    }

    /// Returns whether regions are bound to the endpoint (`FI_MR_ENDPOINT`). Then it ends only after all of them: `cxi`
    /// refuses to close it before.
    pub(super) fn binds_memory(&self) -> bool {
        self.domain.fabric.offer.has(FI_MR_ENDPOINT)
    }

    /// Ends all operations: afterwards the provider accesses no memory of this rank any more. In shared memory the
    /// peers access it, not the provider, and a peer's access to memory that is gone fails.
    pub(super) fn shut(&mut self) {
        if !self.domain.fabric.offer.is_shared_memory {
            if self.binds_memory() {
                self.slots.region = None;
            }
            self.endpoint = None;
        }
    }

    /// Ends the endpoint. The provider `shm` of libfabric 1.17 maps the endpoints of a process once for all of them,
    /// and crashes if it still uses one that has ended. So the last endpoint ends them all.
    pub(super) fn end(self) {
        if !self.domain.fabric.offer.is_shared_memory {
            return;
        }
        let unused = {
            let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
            shared.0 -= 1;
            shared.1.push(self);
            if shared.0 == 0 { std::mem::take(&mut shared.1) } else { Vec::new() }
        };
        drop(unused);
    }

    pub(super) fn is_shut(&self) -> bool {
        self.endpoint.is_none()
    }

    /// Posts a slot for an arriving message.
    pub(super) fn receive(&mut self, slot: usize) -> Posted {
        let Some(endpoint) = &self.endpoint else { return Posted::Later };
        let (data, descriptor, context) = (self.slots.data(slot), self.slots.descriptor(), self.slots.context(slot));
        // Safety: the slot lives until the endpoint has ended, and nothing else uses it until it is complete.
        Posted::of(unsafe {
            let receive = (*(*endpoint.get()).msg).recv;
            receive(endpoint.get(), data.cast(), DATA, descriptor, FI_ADDR_UNSPEC, context)
        })
    }

    /// Sends a message of at most [`DATA`] bytes. The completion says that the provider has taken it.
    pub(super) fn send(&mut self, slot: usize, peer: u64, message: &[u8]) -> Posted {
        self.slots.write(slot, message);
        let Some(endpoint) = &self.endpoint else { return Posted::Later };
        let (data, descriptor, context) = (self.slots.data(slot), self.slots.descriptor(), self.slots.context(slot));
        // Safety: as above.
        Posted::of(unsafe {
            let send = (*(*endpoint.get()).msg).send;
            send(endpoint.get(), data.cast_const().cast(), message.len(), descriptor, peer, context)
        })
    }

    /// Writes a value of at most 8 bytes to a peer's memory.
    pub(super) fn write_value(&mut self, slot: usize, peer: u64, value: &[u8], at: (u64, u64)) -> Posted {
        self.slots.write(slot, value);
        let (first, descriptor) = (self.slots.data(slot), self.slots.descriptor());
        // Safety: the slot's own data.
        unsafe { self.write_from(slot, peer, (first.cast(), value.len(), descriptor), at) }
    }

    /// Reads a byte of a peer's memory, from this place and with this key, into the slot. Nothing uses the byte.
    pub(super) fn read_byte(&mut self, slot: usize, peer: u64, (place, key): (u64, u64)) -> Posted {
        let Some(endpoint) = &self.endpoint else { return Posted::Later };
        let (data, descriptor, context) = (self.slots.data(slot), self.slots.descriptor(), self.slots.context(slot));
        // Safety: the slot's own data.
        Posted::of(unsafe {
            let read = (*(*endpoint.get()).rma).read;
            read(endpoint.get(), data.cast(), 1, descriptor, peer, place, key, context)
        })
    }

    /// Writes memory of a region to a peer's memory, at this place and with this key. It completes when the peer's
    /// memory has the data.
    ///
    /// # Safety
    /// - The range is in the region, which stays registered until the operation is complete.
    pub(super) unsafe fn write(
        &mut self,
        slot: usize,
        peer: u64,
        (region, address, bytes): (&Region, u64, u64),
        at: (u64, u64),
    ) -> Posted {
        let from = (address as usize as *mut c_void, bytes as usize, region.descriptor);
        // Safety: the caller's promise.
        unsafe { self.write_from(slot, peer, from, at) }
    }

    /// # Safety
    /// - As [`write`](Self::write).
    unsafe fn write_from(
        &mut self,
        slot: usize,
        peer: u64,
        (base, len, mut descriptor): (*mut c_void, usize, *mut c_void),
        (addr, key): (u64, u64),
    ) -> Posted {
        let Some(endpoint) = &self.endpoint else { return Posted::Later };
        let (source, target) = (Range { base, len }, RemoteRange { addr, len, key });
        let message = RemoteMessage {
            msg_iov: &raw const source,
            desc: &raw mut descriptor,
            iov_count: 1,
            addr: peer,
            rma_iov: &raw const target,
            rma_iov_count: 1,
            context: self.slots.context(slot),
            data: 0,
        };
        // Safety: the caller's promise; the library copies the structures.
        Posted::of(unsafe {
            ((*(*endpoint.get()).rma).writemsg)(endpoint.get(), &raw const message, FI_DELIVERY_COMPLETE)
        })
    }

    /// Reads a peer's memory, from this place and with this key, into memory of a region.
    ///
    /// # Safety
    /// - As [`write`](Self::write).
    pub(super) unsafe fn read(
        &mut self,
        slot: usize,
        peer: u64,
        (region, address, bytes): (&Region, u64, u64),
        (place, key): (u64, u64),
    ) -> Posted {
        let Some(endpoint) = &self.endpoint else { return Posted::Later };
        let (base, context) = (address as usize as *mut c_void, self.slots.context(slot));
        // Safety: the caller's promise.
        Posted::of(unsafe {
            let read = (*(*endpoint.get()).rma).read;
            read(endpoint.get(), base, bytes as usize, region.descriptor, peer, place, key, context)
        })
    }

    /// Makes progress, and appends completions. Returns false if there may be more.
    ///
    /// # Errors
    /// The queue cannot be read, so no operation will ever complete.
    pub(super) fn take(&mut self, ended: &mut Vec<Ended>) -> Result<bool, NetError> {
        if self.endpoint.is_none() {
            return Ok(true);
        }
        let mut completions = [Completion::default(); 64];
        let queue = self.queue.get();
        // Safety: the library writes at most as many entries, in the format that the queue was opened with.
        let result = unsafe { ((*(*queue).ops).read)(queue, completions.as_mut_ptr().cast(), completions.len()) };
        if result == -FI_EAGAIN {
            return Ok(true);
        }
        if result == -FI_EAVAIL {
            let mut error = ErrorCompletion::default();
            // Safety: the structure has at least the room that the library writes.
            let read = unsafe { ((*(*queue).ops).readerr)(queue, &raw mut error, 0) };
            // An error of no operation has no context.
            if read > 0
                && let Some(slot) = self.slots.index(error.op_context)
            {
                let number = if error.err == 0 { error.prov_errno } else { error.err };
                ended.push(Ended { slot, bytes: 0, error: Some((number, error.prov_errno)) });
            }
            return Ok(read <= 0);
        }
        let Ok(count) = usize::try_from(result) else {
            return Err(failed(&self.domain.fabric, "reading the completion queue", result as c_int));
        };
        for Completion { op_context, len, .. } in &completions[..count.min(completions.len())] {
            if let Some(slot) = self.slots.index(*op_context) {
                ended.push(Ended { slot, bytes: *len, error: None });
            }
        }
        Ok(count < completions.len())
    }
}
