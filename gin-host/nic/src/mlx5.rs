// SPDX-License-Identifier: MIT OR Apache-2.0
//! ConnectX NICs, through libibverbs and libmlx5.
//!
//! [`devices`] and [`Mlx5::open`] open the libraries, so programs start without them. [`Absent`] names the missing
//! part. This module has not driven a real NIC yet.

pub use gin_verbs::LoadError;

use super::hca::{Access, DmaBuf, Domain, Extent, Handle, Hca, HcaError, Port, Region, Uar, Umem};
use super::open::table;
use gin_abi::mlx5::bits::View;
use gin_abi::mlx5::command::{Mtu, Status, capability};
use gin_abi::mlx5::mailbox::{CommandOut, HcaCap, QueryHcaCapOut};
use gin_verbs::mlx5dv::{
    DevxObject, DevxUar, DevxUmem, DevxUmemIn, DvAddressHandle, DvContextAttributes, DvObject, DvPair,
    DvProtectionDomain, MLX5DV_CONTEXT_FLAGS_DEVX, MLX5DV_OBJ_AH, MLX5DV_OBJ_PD, MLX5DV_UAR_ALLOC_TYPE_BF,
    MLX5DV_UAR_ALLOC_TYPE_NC, MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED, MLX5DV_UMEM_MASK_DMABUF, Mlx5dv,
};
use gin_verbs::verbs::{AddressHandle, AddressHandleAttributes, MemoryRegion, ProtectionDomain, Verbs, VerbsDevice};
use gin_verbs::{CallError, DeviceList, OpenDevice, check, non_null};
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// The reason why no NIC is usable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Absent {
    /// A library cannot be used.
    #[error("no mlx5 device: {0}")]
    Library(#[from] LoadError),
    /// The kernel has no RDMA support, or its `ib_uverbs` module is not loaded.
    #[error("no mlx5 device: asking the kernel for RDMA devices failed: {}", gin_verbs::explain(*errno))]
    Kernel {
        /// The error number of the operating system.
        errno: i32,
    },
    /// The kernel has no RDMA devices.
    #[error("no mlx5 device: the kernel has no RDMA devices")]
    NoDevice,
    /// The RDMA devices are not ConnectX NICs.
    #[error("no mlx5 device: libmlx5 does not support the RDMA devices {}", .0.join(", "))]
    OtherDevices(Vec<String>),
    /// No ConnectX NIC has this name.
    #[error("no mlx5 device {name}; there are: {}", known.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// The names of the ConnectX NICs.
        known: Vec<String>,
    },
    /// The device cannot be opened.
    #[error("mlx5 device {name} cannot be opened with devx: {}", gin_verbs::explain(*errno))]
    Closed {
        /// Its name.
        name: String,
        /// The error number of the operating system. 13 (permission denied): this process may not open
        /// `/dev/infiniband`. 95 (not supported): the firmware or the driver lacks DevX.
        errno: i32,
    },
    /// The device was opened but does not answer.
    #[error("mlx5 device {name} does not answer: {error}")]
    Silent {
        /// Its name.
        name: String,
        /// The error of the first command.
        error: HcaError,
    },
}

/// The paths of the libraries, or names that the loader searches for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Libraries {
    /// libibverbs.
    pub verbs: String,
    /// libmlx5.
    pub mlx5: String,
}

impl Default for Libraries {
    /// Returns the names that all distributions use.
    fn default() -> Self {
        Self { verbs: gin_verbs::verbs::LIBRARY.to_owned(), mlx5: gin_verbs::mlx5dv::LIBRARY.to_owned() }
    }
}

impl Libraries {
    fn open(&self) -> Result<(Arc<Verbs>, Mlx5dv), Absent> {
        let (verbs, dv) = (Verbs::open(&self.verbs)?, Mlx5dv::open(&self.mlx5)?);
        if verbs.ibv_reg_mr_iova2.is_none() {
            let (library, name) = (self.verbs.clone(), "ibv_reg_mr_iova2".to_owned());
            return Err(LoadError::NoFunction { library, name }.into());
        }
        Ok((Arc::new(verbs), dv))
    }
}

/// Returns the names of the ConnectX NICs that this process can see.
///
/// # Errors
/// [`Absent`], if there are none.
pub fn devices(libraries: &Libraries) -> Result<Vec<String>, Absent> {
    let (verbs, dv) = libraries.open()?;
    Ok(supported(&device_list(&verbs)?, &dv)?.into_iter().map(|(name, _)| name).collect())
}

fn device_list(verbs: &Verbs) -> Result<DeviceList<'_>, Absent> {
    DeviceList::new(verbs).map_err(|CallError { errno, .. }| Absent::Kernel { errno })
}

/// Returns the devices of the list that libmlx5 supports.
fn supported(list: &DeviceList<'_>, dv: &Mlx5dv) -> Result<Vec<(String, *mut VerbsDevice)>, Absent> {
    // Safety: devices of the list.
    let is_supported = |device: &(_, *mut VerbsDevice)| unsafe { (dv.mlx5dv_is_supported)(device.1) };
    let (supported, others): (Vec<_>, Vec<_>) = list.devices().iter().cloned().partition(is_supported);
    match (supported.is_empty(), others.is_empty()) {
        (true, true) => Err(Absent::NoDevice),
        (true, false) => Err(Absent::OtherDevices(others.into_iter().map(|(name, _)| name).collect())),
        (false, _) => Ok(supported),
    }
}

/// A ConnectX NIC.
#[derive(derive_more::Debug)]
pub struct Mlx5 {
    // Before the library: closed first.
    device: OpenDevice,
    #[debug(skip)]
    dv: Mlx5dv,
    ports: u8,
}

impl Mlx5 {
    /// Opens the NIC with this name.
    ///
    /// # Errors
    /// [`Absent`].
    pub fn open(libraries: &Libraries, name: &str) -> Result<Arc<Self>, Absent> {
        let (verbs, dv) = libraries.open()?;
        let device = {
            let list = device_list(&verbs)?;
            let known = supported(&list, &dv)?;
            let Some((_, device)) = known.iter().find(|(known, _)| known == name) else {
                let known = known.into_iter().map(|(known, _)| known).collect();
                return Err(Absent::Unknown { name: name.to_owned(), known });
            };
            let mut attributes = DvContextAttributes { flags: MLX5DV_CONTEXT_FLAGS_DEVX, comp_mask: 0 };
            // Safety: a device of the list, which is not dropped yet. Only the result closes the context.
            let device = unsafe {
                let context = (dv.mlx5dv_open_device)(*device, &raw mut attributes);
                OpenDevice::new(&verbs, name, "mlx5dv_open_device", context)
            };
            device.map_err(|CallError { errno, .. }| Absent::Closed { name: name.to_owned(), errno })?
        };
        let mut nic = Self { device, dv, ports: 0 };
        let answer = table(&nic, capability::GENERAL);
        let answer = answer.map_err(|error| Absent::Silent { name: name.to_owned(), error })?;
        nic.ports = answer.get(QueryHcaCapOut::GENERAL.field(HcaCap::NUM_PORTS)) as u8;
        Ok(Arc::new(nic))
    }

    /// Makes libmlx5 describe the objects that `kinds` selects (`MLX5DV_OBJ_*`).
    ///
    /// # Safety
    /// - Each selected pair has an object and room for its description, of the types that belong to the kind.
    unsafe fn describe(&self, mut objects: DvObject, kinds: u64) -> Result<(), HcaError> {
        // Safety: the caller's promise.
        Ok(check("mlx5dv_init_obj", unsafe { (self.dv.mlx5dv_init_obj)(&raw mut objects, kinds) })?)
    }
}

impl From<CallError> for HcaError {
    fn from(CallError { call, errno }: CallError) -> Self {
        Self::System { call, errno }
    }
}

/// Returns the firmware's refusal, which is more exact than the driver's error number.
fn refused(output: &[u8]) -> Result<(), HcaError> {
    let Some(answer) = View::<CommandOut>::new(output) else { return Ok(()) };
    let status = answer.get(CommandOut::STATUS);
    if status == Status::Ok.code() {
        return Ok(());
    }
    Err(HcaError::Refused { status: status as u8, syndrome: answer.get(CommandOut::SYNDROME) as u32 })
}

fn pointer<T>(handle: Handle) -> *mut T {
    handle.0 as usize as *mut T
}

fn handle<T>(object: NonNull<T>) -> Handle {
    Handle(object.as_ptr() as usize as u64)
}

fn missing(library: &str, function: &str) -> HcaError {
    let reason = format!("{library} has no function {function}; it is too old");
    HcaError::Unsupported { what: "registering this memory", reason }
}

impl Hca for Mlx5 {
    fn name(&self) -> String {
        self.device.name.clone()
    }

    fn shares_doorbells(&self) -> bool {
        true
    }

    fn reaches(&self, _: &dyn gin_gpu::Device) -> bool {
        true
    }

    fn command(&self, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        // Safety: both slices outlive the call.
        let result = unsafe {
            let (to, from) = (output.as_mut_ptr().cast(), input.as_ptr().cast());
            (self.dv.mlx5dv_devx_general_cmd)(self.device.context().as_ptr(), from, input.len(), to, output.len())
        };
        refused(output)?;
        Ok(check("mlx5dv_devx_general_cmd", result)?)
    }

    fn create(&self, input: &[u8], output: &mut [u8]) -> Result<Handle, HcaError> {
        // Safety: both slices outlive the call.
        let object = unsafe {
            let (to, from) = (output.as_mut_ptr().cast(), input.as_ptr().cast());
            (self.dv.mlx5dv_devx_obj_create)(self.device.context().as_ptr(), from, input.len(), to, output.len())
        };
        // Reads `errno` before another call changes it.
        let object = non_null("mlx5dv_devx_obj_create", object);
        refused(output)?;
        Ok(handle(object?))
    }

    fn modify(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        let object: *mut DevxObject = pointer(object);
        // Safety: an object that `create` returned. Both slices outlive the call.
        let result = unsafe {
            let (to, from) = (output.as_mut_ptr().cast(), input.as_ptr().cast());
            (self.dv.mlx5dv_devx_obj_modify)(object, from, input.len(), to, output.len())
        };
        refused(output)?;
        Ok(check("mlx5dv_devx_obj_modify", result)?)
    }

    fn query(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        let object: *mut DevxObject = pointer(object);
        // Safety: an object that `create` returned. Both slices outlive the call.
        let result = unsafe {
            let (to, from) = (output.as_mut_ptr().cast(), input.as_ptr().cast());
            (self.dv.mlx5dv_devx_obj_query)(object, from, input.len(), to, output.len())
        };
        refused(output)?;
        Ok(check("mlx5dv_devx_obj_query", result)?)
    }

    fn destroy(&self, object: Handle) -> Result<(), HcaError> {
        // Safety: an object that `create` returned.
        Ok(check("mlx5dv_devx_obj_destroy", unsafe { (self.dv.mlx5dv_devx_obj_destroy)(pointer(object)) })?)
    }

    fn allocate_domain(&self) -> Result<Domain, HcaError> {
        // Safety: the context is open.
        let domain =
            non_null("ibv_alloc_pd", unsafe { (self.device.verbs.ibv_alloc_pd)(self.device.context().as_ptr()) })?;
        let mut out = DvProtectionDomain::default();
        let pd = DvPair { input: domain.as_ptr().cast(), output: (&raw mut out).cast() };
        // Safety: `pd` has a protection domain, and room for its description.
        if let Err(error) = unsafe { self.describe(DvObject { pd, ..DvObject::default() }, MLX5DV_OBJ_PD) } {
            self.free_domain(handle(domain))?;
            return Err(error);
        }
        Ok(Domain { handle: handle(domain), number: out.pdn })
    }

    fn free_domain(&self, domain: Handle) -> Result<(), HcaError> {
        let domain: *mut ProtectionDomain = pointer(domain);
        // Safety: an object that `allocate_domain` returned.
        Ok(check("ibv_dealloc_pd", unsafe { (self.device.verbs.ibv_dealloc_pd)(domain) })?)
    }

    unsafe fn register_region(
        &self,
        domain: &Domain,
        memory: &Extent,
        start: u64,
        access: Access,
    ) -> Result<Region, HcaError> {
        let (domain, bytes) = (pointer(domain.handle), memory.bytes as usize);
        let flags = access.bits();
        let region = match memory.dma_buf {
            Some(DmaBuf { file, offset }) => {
                let register =
                    self.device.verbs.ibv_reg_dmabuf_mr.ok_or_else(|| missing("libibverbs", "ibv_reg_dmabuf_mr"))?;
                // Safety: an object that `allocate_domain` returned. The rest is the caller's promise.
                let region = unsafe { register(domain, offset, bytes, start, file, flags as c_int) };
                non_null("ibv_reg_dmabuf_mr", region)?
            }
            None => {
                let register =
                    self.device.verbs.ibv_reg_mr_iova2.ok_or_else(|| missing("libibverbs", "ibv_reg_mr_iova2"))?;
                let first = memory.address as usize as *mut c_void;
                // Safety: as above.
                let region = unsafe { register(domain, first, bytes, start, flags) };
                non_null("ibv_reg_mr_iova2", region)?
            }
        };
        // Safety: the library has just created it.
        let MemoryRegion { lkey, rkey, .. } = unsafe { region.as_ref() };
        Ok(Region { handle: handle(region), local_key: *lkey, remote_key: *rkey })
    }

    fn deregister_region(&self, region: Handle) -> Result<(), HcaError> {
        // Safety: an object that `register_region` returned.
        Ok(check("ibv_dereg_mr", unsafe { (self.device.verbs.ibv_dereg_mr)(pointer(region)) })?)
    }

    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Result<Umem, HcaError> {
        let (context, bytes) = (self.device.context().as_ptr(), memory.bytes as usize);
        let umem = match memory.dma_buf {
            Some(DmaBuf { file, offset }) => {
                let register =
                    self.dv.mlx5dv_devx_umem_reg_ex.ok_or_else(|| missing("libmlx5", "mlx5dv_devx_umem_reg_ex"))?;
                let mut input = DevxUmemIn {
                    // For a file: the offset.
                    addr: offset as usize as *mut c_void,
                    size: bytes,
                    access: access.bits(),
                    pgsz_bitmap: rustix::param::page_size() as u64,
                    comp_mask: MLX5DV_UMEM_MASK_DMABUF,
                    dmabuf_fd: file,
                };
                // Safety: the context is open. The rest is the caller's promise.
                non_null("mlx5dv_devx_umem_reg_ex", unsafe { register(context, &raw mut input) })?
            }
            None => {
                let first = memory.address as usize as *mut c_void;
                let register = self.dv.mlx5dv_devx_umem_reg;
                // Safety: as above.
                non_null("mlx5dv_devx_umem_reg", unsafe { register(context, first, bytes, access.bits()) })?
            }
        };
        // Safety: the library has just created it.
        let DevxUmem { umem_id } = unsafe { umem.as_ref() };
        Ok(Umem { handle: handle(umem), number: *umem_id })
    }

    fn deregister_umem(&self, umem: Handle) -> Result<(), HcaError> {
        // Safety: an object that `register_umem` returned.
        Ok(check("mlx5dv_devx_umem_dereg", unsafe { (self.dv.mlx5dv_devx_umem_dereg)(pointer(umem)) })?)
    }

    fn allocate_uar(&self) -> Result<Uar, HcaError> {
        let mut last = HcaError::NoObject(Handle(0));
        // The preferred kind first.
        for kind in [MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED, MLX5DV_UAR_ALLOC_TYPE_NC, MLX5DV_UAR_ALLOC_TYPE_BF] {
            // Safety: the context is open.
            let uar = unsafe { (self.dv.mlx5dv_devx_alloc_uar)(self.device.context().as_ptr(), kind) };
            match non_null("mlx5dv_devx_alloc_uar", uar) {
                Ok(uar) => {
                    // Safety: the library has just created it.
                    let DevxUar { reg_addr, page_id, .. } = unsafe { uar.as_ref() };
                    return Ok(Uar { handle: handle(uar), number: *page_id, doorbell: *reg_addr as usize as u64 });
                }
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    fn free_uar(&self, uar: Handle) -> Result<(), HcaError> {
        // Safety: an object that `allocate_uar` returned.
        unsafe { (self.dv.mlx5dv_devx_free_uar)(pointer(uar)) };
        Ok(())
    }

    fn event_queue(&self) -> Result<u32, HcaError> {
        let mut number = 0;
        // Safety: the context is open, and `number` may be written. Vector 0 always exists.
        let result = unsafe { (self.dv.mlx5dv_devx_query_eqn)(self.device.context().as_ptr(), 0, &raw mut number) };
        check("mlx5dv_devx_query_eqn", result)?;
        Ok(number)
    }

    fn port(&self, port: u8) -> Result<Port, HcaError> {
        if port == 0 || port > self.ports {
            return Err(HcaError::NoPort { port, ports: self.ports });
        }
        let attributes = self.device.port(port)?;
        let mtu = Mtu::from_code(attributes.active_mtu.into()).ok_or_else(|| HcaError::Unsupported {
            what: "MTU of the port",
            reason: format!("its code is {}", attributes.active_mtu),
        })?;
        Ok(Port {
            active: attributes.is_active(),
            link: attributes.link(),
            mtu,
            lid: attributes.lid,
            gids: u32::try_from(attributes.gid_tbl_len).unwrap_or(0),
        })
    }

    fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], HcaError> {
        Ok(self.device.gid(port, index)?)
    }

    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Result<[u8; 6], HcaError> {
        let sgid_index = u8::try_from(gid_index).map_err(|_| HcaError::Unsupported {
            what: "GID past 255",
            reason: "address handles have 8 bits for its index".to_owned(),
        })?;
        let mut attributes = AddressHandleAttributes {
            dgid: gid,
            sgid_index,
            hop_limit: 255,
            is_global: 1,
            port_num: port,
            ..AddressHandleAttributes::default()
        };
        // The kernel resolves the address when it creates a handle.
        // Safety: an object that `allocate_domain` returned.
        let address: NonNull<AddressHandle> = non_null("ibv_create_ah", unsafe {
            (self.device.verbs.ibv_create_ah)(pointer(domain.handle), &raw mut attributes)
        })?;
        let mut out = DvAddressHandle { av: ptr::null(), comp_mask: 0 };
        let ah = DvPair { input: address.as_ptr().cast(), output: (&raw mut out).cast() };
        // Safety: `ah` has an address handle, and room for its description.
        let described = unsafe { self.describe(DvObject { ah, ..DvObject::default() }, MLX5DV_OBJ_AH) };
        // Safety: the library points into the handle, which is not destroyed yet.
        let found = described.map(|()| unsafe { out.av.as_ref() }.map(|vector| vector.rmac));
        // Safety: the handle is not used any more.
        let destroyed = check("ibv_destroy_ah", unsafe { (self.device.verbs.ibv_destroy_ah)(address.as_ptr()) });
        let hop = found?.ok_or(HcaError::Unsupported {
            what: "address of the next hop",
            reason: "libmlx5 does not return it".to_owned(),
        });
        destroyed?;
        hop
    }
}
