// SPDX-License-Identifier: MIT OR Apache-2.0
//! The communicator, as a kernel sees it.

use crate::handle::{CommHandle, LAYOUT_VERSION};
use core::ffi::c_void;
use gin_device::internal::status::Status;
use gin_device::sys::{Global, GlobalWord};
use gin_device::team::Team;
use gin_device::{Fault, FaultKind, FaultSubject, Operation};

/// The version of the layouts that this module was compiled with. The host checks it when it loads the module.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
#[used]
static gin_nccl_layout: u32 = LAYOUT_VERSION;
#[cfg(not(target_arch = "nvptx64"))]
const _: u32 = LAYOUT_VERSION;

/// A communicator of NCCL: a kernel parameter that `gin-nccl-host` makes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Comm(CommHandle);

impl Comm {
    /// Wraps a handle that the host made.
    ///
    /// # Safety
    /// - `gin-nccl-host` made the handle, for this rank. Its communicator lives as long as the value is used.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn from_handle(handle: CommHandle) -> Self {
        Self(handle)
    }

    #[inline(always)]
    pub(crate) fn handle(&self) -> &CommHandle {
        &self.0
    }

    /// Returns the address of NCCL's `ncclDevComm`.
    #[inline(always)]
    pub(crate) fn dev_comm(&self) -> *const c_void {
        self.0.dev_comm.as_ptr().cast()
    }

    /// Returns the team of all ranks.
    #[inline(always)]
    #[must_use]
    pub fn world(&self) -> Team {
        Team::new(0, 1, self.0.ranks, self.0.rank)
    }

    /// Returns the team of ranks that reach each other by loads and stores.
    #[inline(always)]
    #[must_use]
    pub fn lsa(&self) -> Team {
        Team::new(self.0.rank - self.0.lsa_rank, 1, self.0.lsa_size, self.0.lsa_rank)
    }

    /// Returns the team of ranks with the caller's place in their LSA teams.
    #[inline(always)]
    #[must_use]
    pub fn rail(&self) -> Team {
        let (size, rank) = (self.0.lsa_size, self.0.lsa_rank);
        Team::new(rank, size, self.0.ranks / size, self.0.rank / size)
    }

    /// Returns the number of contexts.
    #[inline(always)]
    #[must_use]
    pub fn contexts(&self) -> u32 {
        self.0.contexts
    }

    /// Returns the number of signals with an id, per context.
    #[inline(always)]
    #[must_use]
    pub fn signals(&self) -> u32 {
        self.0.signals
    }

    /// Returns the number of counters per context.
    #[inline(always)]
    #[must_use]
    pub fn counters(&self) -> u32 {
        self.0.counters
    }

    /// Reports a fault to the host. It ends every wait of this communicator on this rank that has a deadline or polls
    /// the status. The first report of a rank stays; later ones are dropped.
    #[inline(always)]
    pub fn report(&self, fault: Fault) {
        self.status().report(fault);
    }

    /// Reports an error of the kernel's own, with a code of its choice; see [`report`](Self::report).
    #[inline(always)]
    pub fn report_code(&self, code: u64) {
        let fault = Fault::new(FaultKind::Reported, Operation::None);
        self.report(fault.with_values(FaultSubject::None, 0, code));
    }

    /// Returns the abort or fault of this communicator, if there is one. Reads host memory: about a microsecond on a
    /// GPU.
    #[inline(always)]
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        self.status().fault()
    }

    #[inline(always)]
    pub(crate) fn status(&self) -> Status<Global> {
        // Safety: the host made the handle; the blocks live as long as the communicator.
        unsafe {
            Status {
                host: GlobalWord::new(self.0.host_status),
                kernel: GlobalWord::new(self.0.kernel_status),
                copy: GlobalWord::new(self.0.kernel_status_copy),
            }
        }
    }
}
