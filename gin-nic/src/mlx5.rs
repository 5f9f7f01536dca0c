// SPDX-License-Identifier: MIT OR Apache-2.0
//! ConnectX NICs, through libibverbs and libmlx5.
//!
//! The libraries are opened when somebody asks for NICs, so programs do not need them; [`devices`] says what is missing
//! where there are none. No real NIC has been driven by this yet.

#[doc(hidden)]
#[doc(hidden)]
pub use gin_verbs::{
    ForeignField,
    mlx5::{FOREIGN_FIELDS, FOREIGN_NUMBERS, FOREIGN_SIZES},
};

use super::hca::{Access, DmaBuf, Domain, Extent, Handle, Hca, HcaError, Link, Port, Region, Uar, Umem};
use gin_abi::mlx5::bits::{Mailbox, View};
use gin_abi::mlx5::command::{Mtu, Status, capability, opcode};
use gin_abi::mlx5::mailbox::{CommandOut, HcaCap, QueryHcaCapIn, QueryHcaCapOut};
use gin_verbs::LoadError;
use gin_verbs::mlx5::{
    ACCESS, AddressAttributes, AddressHandle, CONTEXT_DEVX, Context, ContextAttributes, DV_AH, DV_PD, Device,
    DevxObject, DevxUar, DevxUmem, DevxUmemIn, DvAddress, DvDomain, DvObject, DvPair, Functions, LINK_ETHERNET,
    MemoryRegion, PORT_ACTIVE, PortAttributes, ProtectionDomain, UAR_TYPES, UMEM_DMABUF,
};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::{fmt, io};

/// Why there is no NIC to be driven.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Absent {
    /// A library cannot be opened.
    #[error("no mlx5 device: {library} cannot be opened ({reason}); it is part of rdma-core")]
    NoLibrary {
        /// The library.
        library: String,
        /// What the loader says.
        reason: String,
    },
    /// A library is too old.
    #[error("no mlx5 device: {library} has no function {name}; it is too old")]
    NoFunction {
        /// The library.
        library: String,
        /// What it lacks.
        name: String,
    },
    /// The kernel has no RDMA devices, or its driver for programs is not loaded.
    #[error("no mlx5 device: asking the kernel for RDMA devices failed: {}", io::Error::from_raw_os_error(*errno))]
    Kernel {
        /// The error of the operating system.
        errno: i32,
    },
    /// There are no RDMA devices.
    #[error("no mlx5 device: the kernel has no RDMA devices")]
    NoDevice,
    /// There are RDMA devices, but others.
    #[error("no mlx5 device: the RDMA devices here are others: {}", .0.join(", "))]
    OtherDevices(Vec<String>),
    /// There is no device of this name.
    #[error("no mlx5 device {name}; there are: {}", known.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// The device cannot be opened.
    #[error("mlx5 device {name} cannot be opened with devx: {}", io::Error::from_raw_os_error(*errno))]
    Closed {
        /// Its name.
        name: String,
        /// The error of the operating system: 13 (permission denied) is a matter of `/dev/infiniband`, 95 (not supported)
        /// of the firmware or the driver.
        errno: i32,
    },
    /// The device was opened but does not answer.
    #[error("mlx5 device {name} does not answer: {error}")]
    Silent {
        /// Its name.
        name: String,
        /// What happened.
        error: HcaError,
    },
}

impl From<LoadError> for Absent {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::NoLibrary { library, reason } => Self::NoLibrary { library, reason },
            LoadError::NoFunction { library, name } => Self::NoFunction { library, name },
        }
    }
}

/// Where the libraries are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Libraries {
    /// libibverbs: a path, or a name that the loader looks for.
    pub verbs: String,
    /// libmlx5, likewise.
    pub mlx5: String,
}

impl Default for Libraries {
    /// As every distribution names them.
    fn default() -> Self {
        Self { verbs: gin_verbs::LIBRARY.to_owned(), mlx5: "libmlx5.so.1".to_owned() }
    }
}

/// Names of the ConnectX NICs that this process can see.
///
/// # Errors
/// [`Absent`], if there are none.
pub fn devices(libraries: &Libraries) -> Result<Vec<String>, Absent> {
    let library = Functions::open(&libraries.verbs, &libraries.mlx5)?;
    Ok(DeviceList::of(&library)?.mlx5()?.into_iter().map(|(name, _)| name).collect())
}

/// The kernel's list of RDMA devices.
struct DeviceList<'a> {
    library: &'a Functions,
    first: NonNull<*mut Device>,
    count: usize,
}

impl<'a> DeviceList<'a> {
    fn of(library: &'a Functions) -> Result<Self, Absent> {
        let mut count: c_int = 0;
        // Safety: `count` may be written.
        let first = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        match NonNull::new(first) {
            Some(first) => Ok(Self { library, first, count: usize::try_from(count).unwrap_or(0) }),
            None => Err(Absent::Kernel { errno: last_errno() }),
        }
    }

    /// Those of mlx5.
    fn mlx5(&self) -> Result<Vec<(String, *mut Device)>, Absent> {
        // Safety: the library says how many there are, and keeps them until the list is freed.
        let all = unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) };
        // Safety: devices of the list; a name is a string that lives as long.
        let named = all.iter().map(|&device| unsafe {
            let name = CStr::from_ptr((self.library.ibv_get_device_name)(device)).to_string_lossy().into_owned();
            (name, device, (self.library.mlx5dv_is_supported)(device))
        });
        let (ours, others): (Vec<_>, Vec<_>) = named.partition(|(.., ours)| *ours);
        if ours.is_empty() {
            let others: Vec<String> = others.into_iter().map(|(name, ..)| name).collect();
            return Err(if others.is_empty() { Absent::NoDevice } else { Absent::OtherDevices(others) });
        }
        Ok(ours.into_iter().map(|(name, device, _)| (name, device)).collect())
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // Safety: it came from the library and is not used any more.
        unsafe { (self.library.ibv_free_device_list)(self.first.as_ptr()) };
    }
}

/// A ConnectX NIC.
pub struct Mlx5 {
    library: Functions,
    context: NonNull<Context>,
    name: String,
    ports: u8,
}

// Safety: libibverbs and libmlx5 lock what threads share.
unsafe impl Send for Mlx5 {}
// Safety: as above.
unsafe impl Sync for Mlx5 {}

impl fmt::Debug for Mlx5 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mlx5").field("name", &self.name).field("ports", &self.ports).finish_non_exhaustive()
    }
}

impl Drop for Mlx5 {
    fn drop(&mut self) {
        // Safety: everything that was made with it kept it alive.
        unsafe { (self.library.ibv_close_device)(self.context.as_ptr()) };
    }
}

impl Mlx5 {
    /// Opens the NIC of this name.
    ///
    /// # Errors
    /// [`Absent`].
    pub fn open(libraries: &Libraries, name: &str) -> Result<Arc<Self>, Absent> {
        let library = Functions::open(&libraries.verbs, &libraries.mlx5)?;
        let context = {
            let list = DeviceList::of(&library)?;
            let known = list.mlx5()?;
            let Some((_, device)) = known.iter().find(|(known, _)| known == name) else {
                let known = known.into_iter().map(|(known, _)| known).collect();
                return Err(Absent::Unknown { name: name.to_owned(), known });
            };
            let mut attributes = ContextAttributes { flags: CONTEXT_DEVX, comp_mask: 0 };
            // Safety: a device of the list, which is there still.
            let context = unsafe { (library.mlx5dv_open_device)(*device, &raw mut attributes) };
            NonNull::new(context).ok_or_else(|| Absent::Closed { name: name.to_owned(), errno: last_errno() })?
        };
        let mut nic = Self { library, context, name: name.to_owned(), ports: 0 };
        nic.ports = nic.count_ports().map_err(|error| Absent::Silent { name: name.to_owned(), error })?;
        Ok(Arc::new(nic))
    }

    fn count_ports(&self) -> Result<u8, HcaError> {
        let mut command = Mailbox::<QueryHcaCapIn>::new();
        command.set(QueryHcaCapIn::OPCODE, opcode::QUERY_HCA_CAP).set(QueryHcaCapIn::OP_MOD, capability::GENERAL);
        let mut answer = Mailbox::<QueryHcaCapOut>::new();
        self.command(command.bytes()?, answer.bytes_mut())?;
        Ok(answer.get(QueryHcaCapOut::GENERAL.field(HcaCap::NUM_PORTS)) as u8)
    }

    /// What libmlx5 knows of an object beside its handle.
    fn describe(&self, what: (usize, u64), object: *mut c_void, out: *mut c_void) -> Result<(), HcaError> {
        let mut pairs = DvObject([DvPair { input: ptr::null_mut(), output: ptr::null_mut() }; 7]);
        pairs.0[what.0] = DvPair { input: object, output: out };
        // Safety: the callers pass an object and room of the types that go with `what`.
        check("mlx5dv_init_obj", unsafe { (self.library.mlx5dv_init_obj)(&raw mut pairs, what.1) })
    }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The outcome of a function that returns 0, or an error number of either sign, or -1 with the number in `errno`.
fn check(call: &'static str, result: c_int) -> Result<(), HcaError> {
    match result {
        0 => Ok(()),
        -1 => Err(HcaError::System { call, errno: last_errno() }),
        errno => Err(HcaError::System { call, errno: errno.saturating_abs() }),
    }
}

/// The outcome of a function that returns a pointer, or null with the number in `errno`.
fn made<T>(call: &'static str, result: *mut T) -> Result<NonNull<T>, HcaError> {
    NonNull::new(result).ok_or_else(|| HcaError::System { call, errno: last_errno() })
}

/// What the firmware says, before what the driver makes of it.
fn refused(output: &[u8]) -> Result<(), HcaError> {
    let Some(answer) = View::<CommandOut>::new(output) else { return Ok(()) };
    let status = answer.get(CommandOut::STATUS);
    if status == Status::Ok.code() {
        return Ok(());
    }
    Err(HcaError::Refused { status: status as u8, syndrome: answer.get(CommandOut::SYNDROME) as u32 })
}

fn access_flags(access: Access) -> u32 {
    let wanted =
        [access.local_write, access.remote_write, access.remote_read, access.remote_atomic, access.relaxed_ordering];
    wanted.iter().zip(ACCESS).filter(|(wanted, _)| **wanted).map(|(_, flag)| flag).sum()
}

fn pointer<T>(handle: Handle) -> *mut T {
    handle.0 as usize as *mut T
}

fn handle<T>(object: NonNull<T>) -> Handle {
    Handle(object.as_ptr() as usize as u64)
}

fn no_dma_buf(library: &'static str) -> HcaError {
    let reason = format!("{library} is too old for DMA-BUF");
    HcaError::Unsupported { what: "memory of a device", reason }
}

impl Hca for Mlx5 {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn shares_doorbells(&self) -> bool {
        true
    }

    fn reaches(&self, _: &dyn gin_gpu::Device) -> bool {
        true
    }

    fn command(&self, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        // Safety: both slices are there during the call.
        let result = unsafe {
            let (to, from) = (output.as_mut_ptr().cast(), input.as_ptr().cast());
            (self.library.mlx5dv_devx_general_cmd)(self.context.as_ptr(), from, input.len(), to, output.len())
        };
        refused(output).and(check("mlx5dv_devx_general_cmd", result))
    }

    fn create(&self, input: &[u8], output: &mut [u8]) -> Result<Handle, HcaError> {
        // Safety: both slices are there during the call.
        let object = unsafe {
            let (to, from) = (output.as_mut_ptr().cast(), input.as_ptr().cast());
            (self.library.mlx5dv_devx_obj_create)(self.context.as_ptr(), from, input.len(), to, output.len())
        };
        // Before another call changes it.
        let object = made("mlx5dv_devx_obj_create", object);
        refused(output)?;
        object.map(handle)
    }

    fn modify(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        let object: *mut DevxObject = pointer(object);
        // Safety: an object that `create` gave; both slices are there during the call.
        let result = unsafe {
            let (to, from) = (output.as_mut_ptr().cast(), input.as_ptr().cast());
            (self.library.mlx5dv_devx_obj_modify)(object, from, input.len(), to, output.len())
        };
        refused(output).and(check("mlx5dv_devx_obj_modify", result))
    }

    fn query(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        let object: *mut DevxObject = pointer(object);
        // Safety: an object that `create` gave; both slices are there during the call.
        let result = unsafe {
            let (to, from) = (output.as_mut_ptr().cast(), input.as_ptr().cast());
            (self.library.mlx5dv_devx_obj_query)(object, from, input.len(), to, output.len())
        };
        refused(output).and(check("mlx5dv_devx_obj_query", result))
    }

    fn destroy(&self, object: Handle) -> Result<(), HcaError> {
        // Safety: an object that `create` gave.
        check("mlx5dv_devx_obj_destroy", unsafe { (self.library.mlx5dv_devx_obj_destroy)(pointer(object)) })
    }

    fn allocate_domain(&self) -> Result<Domain, HcaError> {
        // Safety: the context is open.
        let domain = made("ibv_alloc_pd", unsafe { (self.library.ibv_alloc_pd)(self.context.as_ptr()) })?;
        let mut out = DvDomain::default();
        if let Err(error) = self.describe(DV_PD, domain.as_ptr().cast(), (&raw mut out).cast()) {
            self.free_domain(handle(domain))?;
            return Err(error);
        }
        Ok(Domain { handle: handle(domain), number: out.pdn })
    }

    fn free_domain(&self, domain: Handle) -> Result<(), HcaError> {
        let domain: *mut ProtectionDomain = pointer(domain);
        // Safety: an object that `allocate_domain` gave.
        check("ibv_dealloc_pd", unsafe { (self.library.ibv_dealloc_pd)(domain) })
    }

    unsafe fn register_region(
        &self,
        domain: &Domain,
        memory: &Extent,
        start: u64,
        access: Access,
    ) -> Result<Region, HcaError> {
        let (domain, bytes) = (pointer(domain.handle), memory.bytes as usize);
        let flags = access_flags(access);
        let region = match memory.dma_buf {
            Some(DmaBuf { file, offset }) => {
                let register = self.library.ibv_reg_dmabuf_mr.ok_or_else(|| no_dma_buf("libibverbs"))?;
                // Safety: an object that `allocate_domain` gave; the rest is the caller's promise.
                let region = unsafe { register(domain, offset, bytes, start, file, flags as c_int) };
                made("ibv_reg_dmabuf_mr", region)?
            }
            None => {
                let first = memory.address as usize as *mut c_void;
                // Safety: as above.
                let region = unsafe { (self.library.ibv_reg_mr_iova2)(domain, first, bytes, start, flags) };
                made("ibv_reg_mr_iova2", region)?
            }
        };
        // Safety: the library just made it.
        let MemoryRegion { lkey, rkey, .. } = unsafe { region.as_ref() };
        Ok(Region { handle: handle(region), local_key: *lkey, remote_key: *rkey })
    }

    fn deregister_region(&self, region: Handle) -> Result<(), HcaError> {
        // Safety: an object that `register_region` gave.
        check("ibv_dereg_mr", unsafe { (self.library.ibv_dereg_mr)(pointer(region)) })
    }

    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Result<Umem, HcaError> {
        let (context, bytes) = (self.context.as_ptr(), memory.bytes as usize);
        let umem = match memory.dma_buf {
            Some(DmaBuf { file, offset }) => {
                let register = self.library.mlx5dv_devx_umem_reg_ex.ok_or_else(|| no_dma_buf("libmlx5"))?;
                let mut input = DevxUmemIn {
                    // Of a file this is the offset.
                    addr: offset as usize as *mut c_void,
                    size: bytes,
                    access: access_flags(access),
                    pgsz_bitmap: rustix::param::page_size() as u64,
                    comp_mask: UMEM_DMABUF,
                    dmabuf_fd: file,
                };
                // Safety: the context is open; the rest is the caller's promise.
                made("mlx5dv_devx_umem_reg_ex", unsafe { register(context, &raw mut input) })?
            }
            None => {
                let first = memory.address as usize as *mut c_void;
                let register = self.library.mlx5dv_devx_umem_reg;
                // Safety: as above.
                made("mlx5dv_devx_umem_reg", unsafe { register(context, first, bytes, access_flags(access)) })?
            }
        };
        // Safety: the library just made it.
        let DevxUmem { umem_id } = unsafe { umem.as_ref() };
        Ok(Umem { handle: handle(umem), number: *umem_id })
    }

    fn deregister_umem(&self, umem: Handle) -> Result<(), HcaError> {
        // Safety: an object that `register_umem` gave.
        check("mlx5dv_devx_umem_dereg", unsafe { (self.library.mlx5dv_devx_umem_dereg)(pointer(umem)) })
    }

    fn allocate_uar(&self) -> Result<Uar, HcaError> {
        let mut last = HcaError::NoObject(Handle(0));
        for kind in UAR_TYPES {
            // Safety: the context is open.
            let uar = unsafe { (self.library.mlx5dv_devx_alloc_uar)(self.context.as_ptr(), kind) };
            match made("mlx5dv_devx_alloc_uar", uar) {
                Ok(uar) => {
                    // Safety: the library just made it.
                    let DevxUar { reg_addr, page_id, .. } = unsafe { uar.as_ref() };
                    return Ok(Uar { handle: handle(uar), number: *page_id, doorbell: *reg_addr as usize as u64 });
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn free_uar(&self, uar: Handle) -> Result<(), HcaError> {
        // Safety: an object that `allocate_uar` gave.
        unsafe { (self.library.mlx5dv_devx_free_uar)(pointer(uar)) };
        Ok(())
    }

    fn event_queue(&self) -> Result<u32, HcaError> {
        let mut number = 0;
        // Safety: the context is open, and `number` may be written. Vector 0 is always there.
        let result = unsafe { (self.library.mlx5dv_devx_query_eqn)(self.context.as_ptr(), 0, &raw mut number) };
        check("mlx5dv_devx_query_eqn", result).map(|()| number)
    }

    fn port(&self, port: u8) -> Result<Port, HcaError> {
        if port == 0 || port > self.ports {
            return Err(HcaError::NoPort { port, ports: self.ports });
        }
        let mut attributes = PortAttributes::empty();
        // Safety: the context is open, and there is more room than the library writes.
        check("ibv_query_port", unsafe {
            (self.library.ibv_query_port)(self.context.as_ptr(), port, &raw mut attributes)
        })?;
        let mtu = Mtu::from_code(attributes.active_mtu.into()).ok_or_else(|| HcaError::Unsupported {
            what: "MTU of the port",
            reason: format!("its code is {}", attributes.active_mtu),
        })?;
        Ok(Port {
            active: attributes.state == PORT_ACTIVE,
            link: if attributes.link_layer == LINK_ETHERNET { Link::Ethernet } else { Link::InfiniBand },
            mtu,
            lid: attributes.lid,
            gids: u32::try_from(attributes.gid_tbl_len).unwrap_or(0),
        })
    }

    fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], HcaError> {
        let mut gid = [0; 16];
        // Safety: the context is open, and `gid` may be written.
        let result = unsafe { (self.library.ibv_query_gid)(self.context.as_ptr(), port, index as c_int, &raw mut gid) };
        check("ibv_query_gid", result).map(|()| gid)
    }

    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Result<[u8; 6], HcaError> {
        let sgid_index = u8::try_from(gid_index).map_err(|_| HcaError::Unsupported {
            what: "GID past 255",
            reason: "address handles have 8 bits for its index".to_owned(),
        })?;
        let mut attributes = AddressAttributes {
            dgid: gid,
            sgid_index,
            hop_limit: 255,
            is_global: 1,
            port_num: port,
            ..AddressAttributes::default()
        };
        // The kernel resolves the address when a handle is made.
        // Safety: an object that `allocate_domain` gave.
        let address: NonNull<AddressHandle> = made("ibv_create_ah", unsafe {
            (self.library.ibv_create_ah)(pointer(domain.handle), &raw mut attributes)
        })?;
        let mut out = DvAddress { av: ptr::null(), comp_mask: 0 };
        let described = self.describe(DV_AH, address.as_ptr().cast(), (&raw mut out).cast());
        // Safety: the library points into the handle, which is there still.
        let found = described.map(|()| unsafe { out.av.as_ref() }.map(|vector| vector.rmac));
        // Safety: it is not used any more.
        let ended = check("ibv_destroy_ah", unsafe { (self.library.ibv_destroy_ah)(address.as_ptr()) });
        let hop = found?.ok_or(HcaError::Unsupported {
            what: "address of the next hop",
            reason: "libmlx5 does not tell it".to_owned(),
        });
        ended.and(hop)
    }
}
