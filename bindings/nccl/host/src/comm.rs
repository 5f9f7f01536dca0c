// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device communicators.

use crate::abi::{self, CommProperties, DevComm, DevCommRequirements, field};
use crate::library::enter;
use crate::{Library, NcclError, RawComm, TESTED};
use gin_device::internal::status::Status;
use gin_device::sys::{Global, GlobalWord};
use gin_device::{Fault, FaultKind, Operation};
use gin_gpu::cuda::CudaDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_nccl_device::handle::{CommHandle, DEV_COMM_BYTES};
use std::mem::size_of;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a status block.
const BLOCK: u64 = 64;

/// The objects that kernels need.
///
/// ```
/// use gin_nccl_host::Requirements;
///
/// let requirements = Requirements { signals: 2, ..Requirements::default() };
/// assert_eq!((requirements.contexts, requirements.counters, requirements.barriers), (1, 0, 0));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Requirements {
    /// Number of contexts, at least 1.
    pub contexts: u32,
    /// Number of signals of each context.
    pub signals: u32,
    /// Number of counters of each context.
    pub counters: u32,
    /// Number of barriers of all ranks.
    pub barriers: u32,
    /// Number of requests that a queue holds; 0 for NCCL's default.
    pub queue_depth: u32,
}

impl Default for Requirements {
    /// Returns one context, and nothing else.
    fn default() -> Self {
        Self { contexts: 1, signals: 0, counters: 0, barriers: 0, queue_depth: 0 }
    }
}

/// An `ncclDevComm`, with the status blocks of its kernels.
///
/// It must be dropped before its `ncclComm_t` is destroyed, after its kernels have ended.
#[derive(Debug)]
pub struct DeviceComm {
    library: Arc<Library>,
    device: Arc<CudaDevice>,
    comm: RawComm,
    dev_comm: DevComm,
    handle: CommHandle,
    /// Blocks of host and kernels in pinned memory.
    host: Arc<Memory>,
    /// The copy of the kernels' block in GPU memory.
    _copy: Arc<Memory>,
    posting: Mutex<()>,
}

// Safety: NCCL's communicator may be used by any thread, by one at a time, which `&mut` and the lock ensure.
unsafe impl Send for DeviceComm {}
// Safety: as above.
unsafe impl Sync for DeviceComm {}

impl DeviceComm {
    /// Creates a device communicator. All ranks call, with the same requirements.
    ///
    /// # Safety
    /// - `comm` is an `ncclComm_t` of this library on this GPU. It lives longer than the value, and no other thread
    ///   calls NCCL with it at the same time.
    ///
    /// # Errors
    /// [`NcclError::NoGin`] if NCCL has no network for it, [`NcclError::UnknownGin`], [`NcclError::Call`],
    /// [`NcclError::Fewer`], [`NcclError::Layout`].
    pub unsafe fn create(
        library: &Arc<Library>,
        device: &Arc<CudaDevice>,
        comm: RawComm,
        required: &Requirements,
    ) -> Result<Self, NcclError> {
        enter(device)?;
        // Safety: the caller's promise.
        let backend = unsafe { backend_of(library, comm)? };
        let requirements = requirements(required);
        // NCCL writes as many bytes as the version in the requirements has. The second element is room for a library
        // that has another opinion; the check of the layout finds it.
        let mut space: [DevComm; 2] = [[0; size_of::<DevComm>() / 8]; 2];
        // Safety: the caller's promise.
        let result = unsafe { (library.functions.dev_comm_create)(comm, &raw const requirements, space.as_mut_ptr()) };
        let dev_comm = space[0];
        library.check("ncclDevCommCreate", comm, result)?;
        match Self::with(library, device, comm, dev_comm, backend, required) {
            Ok(created) => Ok(created),
            Err(error) => {
                // Safety: it was created, and nothing uses it.
                unsafe { (library.functions.dev_comm_destroy)(comm, &raw const dev_comm) };
                Err(error)
            }
        }
    }

    fn with(
        library: &Arc<Library>,
        device: &Arc<CudaDevice>,
        comm: RawComm,
        dev_comm: DevComm,
        backend: u32,
        required: &Requirements,
    ) -> Result<Self, NcclError> {
        check_layout(&dev_comm)?;
        let given = [
            ("contexts", required.contexts, field::CONTEXTS),
            ("signals", required.signals, field::SIGNALS),
            ("counters", required.counters, field::COUNTERS),
        ];
        for (what, required, offset) in given {
            let given = abi::read(&dev_comm, offset);
            if given < required {
                return Err(NcclError::Fewer { what, required, given });
            }
        }
        let any: Arc<dyn Device> = device.clone();
        let host = Memory::new(&any, MemoryKind::Pinned, 2 * BLOCK)?;
        let copy = Memory::new(&any, MemoryKind::Device, BLOCK)?;
        let mut words = [0; DEV_COMM_BYTES / 8];
        words[..dev_comm.len()].copy_from_slice(&dev_comm);
        // NCCL's own waits then end when the host posts a fault: the low half of the block's first word becomes 1.
        words[field::ABORT_FLAG_WORD] = host.address();
        let handle = CommHandle {
            dev_comm: words,
            host_status: host.address(),
            kernel_status: host.address() + BLOCK,
            kernel_status_copy: copy.address(),
            rank: abi::read(&dev_comm, field::RANK),
            ranks: abi::read(&dev_comm, field::RANKS),
            lsa_rank: abi::read(&dev_comm, field::LSA_RANK),
            lsa_size: abi::read(&dev_comm, field::LSA_SIZE),
            contexts: abi::read(&dev_comm, field::CONTEXTS),
            signals: required.signals,
            counters: required.counters,
            barriers: required.barriers,
            backend,
            reserved: 0,
        };
        let (library, device) = (library.clone(), device.clone());
        Ok(Self { library, device, comm, dev_comm, handle, host, _copy: copy, posting: Mutex::new(()) })
    }

    /// Returns the kernel parameter.
    pub fn handle(&self) -> &CommHandle {
        &self.handle
    }

    /// Returns NCCL's own structure, to pass it to a kernel in C++.
    pub fn dev_comm(&self) -> &[u64] {
        &self.dev_comm
    }

    /// Returns the rank and the number of ranks.
    pub fn rank(&self) -> (u32, u32) {
        (self.handle.rank, self.handle.ranks)
    }

    pub(crate) fn library(&self) -> &Arc<Library> {
        &self.library
    }

    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    pub(crate) fn comm(&self) -> RawComm {
        self.comm
    }

    /// Returns the fault that a kernel of this rank reported, or that ended its waits.
    pub fn fault(&self) -> Option<Fault> {
        let status = self.status();
        status.reported().or_else(|| status.host_fault())
    }

    /// Ends the waits of this rank's kernels with [`FaultKind::Aborted`], also waits inside NCCL's functions.
    pub fn abort(&self) {
        let _one = self.posting.lock().unwrap_or_else(PoisonError::into_inner);
        self.status().post(Fault::new(FaultKind::Aborted, Operation::None));
    }

    /// Checks that no kernel of this rank has reported a fault, and that NCCL has found none.
    ///
    /// # Errors
    /// [`NcclError::Call`] with NCCL's error.
    pub fn check(&self) -> Result<Option<Fault>, NcclError> {
        // Safety: the communicator outlives this value.
        unsafe { self.library.check_async(self.comm)? };
        Ok(self.fault())
    }

    /// Returns the status blocks. The CPU does not read the copy in GPU memory.
    fn status(&self) -> Status<Global> {
        // Safety: pinned memory, which lives as long as this value.
        unsafe {
            Status {
                host: GlobalWord::new(self.handle.host_status),
                kernel: GlobalWord::new(self.handle.kernel_status),
                copy: GlobalWord::new(self.host.address()),
            }
        }
    }
}

impl Drop for DeviceComm {
    fn drop(&mut self) {
        if enter(&self.device).is_ok() {
            // Safety: it was created, and its kernels have ended. NCCL's log has a failure.
            unsafe { (self.library.functions.dev_comm_destroy)(self.comm, &raw const self.dev_comm) };
        }
    }
}

/// Returns `1 << ncclGinType_t` of the communicator's back end.
///
/// # Safety
/// - The communicator is alive.
unsafe fn backend_of(library: &Library, comm: RawComm) -> Result<u32, NcclError> {
    let mut properties = CommProperties {
        size: size_of::<CommProperties>(),
        magic: abi::MAGIC,
        version: TESTED,
        rank: 0,
        ranks: 0,
        cuda_device: 0,
        nvml_device: 0,
        device_api: false,
        multimem: false,
        gin_type: 0,
        lsa_teams: 0,
        host_rma: false,
        railed_gin_type: 0,
    };
    // Safety: the caller's promise.
    let result = unsafe { (library.functions.properties)(comm, &raw mut properties) };
    library.check("ncclCommQueryProperties", comm, result)?;
    match properties.gin_type {
        0 => Err(NcclError::NoGin),
        known @ (2 | 3) => Ok(1 << known),
        other => Err(NcclError::UnknownGin(other)),
    }
}

fn requirements(required: &Requirements) -> DevCommRequirements {
    DevCommRequirements {
        size: size_of::<DevCommRequirements>(),
        magic: abi::MAGIC,
        version: TESTED,
        resources: std::ptr::null_mut(),
        teams: std::ptr::null_mut(),
        lsa_multimem: false,
        barriers: 0,
        lsa_barriers: 0,
        rail_gin_barriers: 0,
        lsa_ll_blocks: 0,
        lsa_ll_slots: 0,
        gin_force_enable: false,
        gin_contexts: required.contexts.max(1) as i32,
        gin_signals: required.signals as i32,
        gin_counters: required.counters as i32,
        gin_connection: abi::CONNECTION_FULL,
        gin_exclusive_contexts: false,
        gin_queue_depth: required.queue_depth as i32,
        gin_traffic_class: abi::UNDEFINED,
        world_gin_barriers: required.barriers as i32,
        gin_strong_signals: true,
        // Kernels raise signals with an id alone.
        gin_va_signals: false,
    }
}

/// Checks the fields of the structure that have a known value.
fn check_layout(dev_comm: &DevComm) -> Result<(), NcclError> {
    let (magic, version) = (abi::read(dev_comm, field::MAGIC), abi::read(dev_comm, field::VERSION));
    let (rank, ranks) = (abi::read(dev_comm, field::RANK), abi::read(dev_comm, field::RANKS));
    let (lsa_rank, lsa_size) = (abi::read(dev_comm, field::LSA_RANK), abi::read(dev_comm, field::LSA_SIZE));
    let reason = if magic != abi::MAGIC {
        format!("its first word is {magic:#x}, not {:#x}", abi::MAGIC)
    } else if rank >= ranks || lsa_rank >= lsa_size || lsa_size > ranks {
        format!("rank {rank} of {ranks}, {lsa_rank} of {lsa_size} in the LSA team")
    } else if dev_comm[field::ABORT_FLAG_WORD] != 0 {
        format!("a program's communicator has the abort flag {:#x}", dev_comm[field::ABORT_FLAG_WORD])
    } else {
        return Ok(());
    };
    Err(NcclError::Layout { reason: format!("{reason}, version field {version}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid() -> DevComm {
        let mut words = [0; 30];
        words[0] = u64::from(abi::MAGIC) | u64::from(TESTED) << 32;
        words[1] = 1 | 2 << 32; // rank 1 of 2
        words[2] = 1 << 32; // LSA rank 1
        words[3] = 2; // of 2
        words
    }

    #[test]
    fn a_structure_of_another_layout_is_refused() {
        assert!(check_layout(&valid()).is_ok());
        let faults: [(usize, u64, &str); 4] = [
            (0, 7, "0x7"),
            (1, 2 | 2 << 32, "rank 2 of 2"),
            (3, 3, "1 of 3 in the LSA team"),
            (field::ABORT_FLAG_WORD, 0x1000, "abort flag 0x1000"),
        ];
        for (word, value, part) in faults {
            let mut words = valid();
            words[word] = value;
            let text = check_layout(&words).unwrap_err().to_string();
            assert!(text.contains(part) && text.contains("2.30.7"), "{text}");
        }
    }

    #[test]
    fn nccl_gets_the_version_of_the_device_functions_and_as_much_as_was_required() {
        let required = Requirements { contexts: 0, signals: 3, counters: 4, barriers: 5, queue_depth: 64 };
        let made = requirements(&required);
        assert_eq!((made.magic, made.version, made.size), (abi::MAGIC, TESTED, 96));
        assert_eq!((made.gin_contexts, made.gin_signals, made.gin_counters), (1, 3, 4));
        assert_eq!((made.world_gin_barriers, made.gin_queue_depth, made.gin_connection), (5, 64, 1));
        assert!(made.gin_strong_signals && made.gin_traffic_class == i32::MIN);
    }
}
