// SPDX-License-Identifier: MIT OR Apache-2.0
//! The communicator, as a kernel sees it.

use crate::fault::{self, Fault};
use crate::status::Status;
use crate::sys::bulk::Mbarrier;
use crate::sys::{self, Global, GlobalWord};
use crate::team::{Rank, Team};
use gin_abi::{CommHandle, ContextData, Deadline, FaultKind, FaultSubject, Operation, WindowData, WindowHandle};

/// A communicator: a kernel parameter that the host makes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Comm(CommHandle);

impl Comm {
    /// Wraps a handle that the host made.
    ///
    /// # Safety
    /// - The host library made the handle, for this rank. Its communicator lives as long as the value is used.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn from_handle(handle: CommHandle) -> Self {
        Self(handle)
    }

    /// Reads the copy of a handle in GPU memory.
    ///
    /// # Safety
    /// - `address` is a [`copy`](CommHandle::copy), and its communicator lives as long as the value is used.
    #[inline(always)]
    pub(crate) unsafe fn copied(address: u64) -> Self {
        // Safety: the caller's promise.
        Self(unsafe { *(address as usize as *const CommHandle) })
    }

    /// Returns the handle.
    #[inline(always)]
    #[must_use]
    pub const fn handle(&self) -> &CommHandle {
        &self.0
    }

    /// Checks that this code has the layouts of the host that made the communicator. The host compares kernels itself;
    /// a device function that kernels in CUDA C++ call begins with this check, and returns if it fails.
    ///
    /// # Errors
    /// [`FaultKind::AbiMismatch`]. No other call on the communicator is sound then, [`report`](Self::report) included.
    ///
    /// ```
    /// use gin_abi::{ABI_VERSION, CommHandle, FaultKind};
    ///
    /// // Safety: the handle is all numbers, and only the check uses it.
    /// let of = |abi| unsafe { gin_device::Comm::from_handle(CommHandle { abi, ..std::mem::zeroed() }) };
    /// assert!(of(ABI_VERSION).check_abi().is_ok());
    /// assert_eq!(of(ABI_VERSION + 1).check_abi().unwrap_err().kind(), FaultKind::AbiMismatch);
    /// ```
    #[inline(always)]
    pub fn check_abi(&self) -> Result<(), Fault> {
        if self.0.abi == gin_abi::ABI_VERSION {
            Ok(())
        } else {
            Err(Fault::new(FaultKind::AbiMismatch, Operation::None))
        }
    }

    /// Returns the team of all ranks.
    #[inline(always)]
    #[must_use]
    pub fn world(&self) -> Team {
        Team::new(0, 1, self.ranks(), self.rank())
    }

    /// Returns the team of ranks that reach each other by loads and stores.
    #[inline(always)]
    #[must_use]
    pub fn lsa(&self) -> Team {
        let (size, rank) = (sys::narrow(self.0.lsa_size), sys::narrow(self.0.lsa_rank));
        Team::new(self.rank() - rank, 1, size, rank)
    }

    /// Returns the team of ranks with the caller's place in their LSA teams.
    #[inline(always)]
    #[must_use]
    pub fn rail(&self) -> Team {
        let (size, rank) = (sys::narrow(self.0.lsa_size), sys::narrow(self.0.lsa_rank));
        Team::new(rank, size, self.ranks() / size, self.rank() / size)
    }

    #[inline(always)]
    fn rank(&self) -> u32 {
        sys::narrow(self.0.rank)
    }

    #[inline(always)]
    fn ranks(&self) -> u32 {
        sys::narrow(self.0.ranks)
    }

    #[inline(always)]
    pub(crate) fn backend(&self) -> u32 {
        sys::narrow(self.0.backend)
    }

    /// Returns whether operations on [`Route::Auto`](crate::gin::Route::Auto) reach a rank by loads and stores: it is
    /// in the LSA team, and the communicator was not made to take the network to all ranks.
    #[inline(always)]
    #[must_use]
    pub fn lsa_reaches(&self, rank: Rank) -> bool {
        rank.world().wrapping_sub(sys::narrow(self.0.lsa_first)) < sys::narrow(self.0.lsa_reach)
    }

    /// Returns the number of ranks that operations reach by loads and stores, this rank included; 0 without such a
    /// route.
    #[inline(always)]
    pub(crate) fn lsa_reach(&self) -> u32 {
        sys::narrow(self.0.lsa_reach)
    }

    /// Returns the number of contexts that the proxy serves.
    #[inline(always)]
    pub(crate) fn proxy_contexts(&self) -> u32 {
        sys::narrow(self.0.proxy_contexts)
    }

    /// Returns the number of contexts in which kernels drive the NIC.
    #[inline(always)]
    pub(crate) fn gdaki_contexts(&self) -> u32 {
        sys::narrow(self.0.gdaki_contexts)
    }

    /// Returns the number of strong signals per context.
    #[inline(always)]
    pub(crate) fn strong_signals(&self) -> u32 {
        sys::narrow(self.0.strong_signals)
    }

    #[inline(always)]
    pub(crate) fn capabilities(&self) -> u32 {
        sys::narrow(self.0.capabilities)
    }

    /// Returns whether windows have multimem addresses (NVLink SHARP). Always false so far; see
    /// [`gin_abi::handle::CAP_MULTIMEM`].
    #[inline(always)]
    #[must_use]
    pub fn has_multimem(&self) -> bool {
        self.capabilities() & gin_abi::handle::CAP_MULTIMEM != 0
    }

    #[inline(always)]
    pub(crate) fn engines(&self) -> u32 {
        sys::narrow(self.0.engines)
    }

    /// Returns the number of contexts.
    #[inline(always)]
    #[must_use]
    pub fn contexts(&self) -> u32 {
        sys::narrow(self.0.contexts)
    }

    /// Returns the number of signals with an id, per context.
    #[inline(always)]
    #[must_use]
    pub fn signals(&self) -> u32 {
        sys::narrow(self.0.signals)
    }

    /// Returns the number of counters per context.
    #[inline(always)]
    #[must_use]
    pub fn counters(&self) -> u32 {
        sys::narrow(self.0.counters)
    }

    /// Reports a fault to the host. It ends every wait of this communicator, on this rank at once and on all ranks
    /// through the host. The first report of a rank stays; later ones are dropped.
    #[inline(always)]
    pub fn report(&self, fault: Fault) {
        self.status().report(fault);
        if sys::narrow(self.0.trap_on_fault) != 0 {
            sys::trap();
        }
    }

    /// Reports an error of the kernel's own, with a code of its choice; see [`report`](Self::report).
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn report_code(&self, code: u64) {
        self.report(fault::new(FaultKind::Reported, Operation::None).with_values(FaultSubject::None, 0, code));
    }

    /// Returns the abort or fault of this communicator, if there is one. Reads host memory: about a microsecond on a
    /// GPU.
    #[inline(always)]
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        self.status().fault()
    }

    /// Waits until the phase of this parity of an mbarrier is complete, by the calling thread alone.
    ///
    /// Ordering: the thread sees the bytes of the copies of that phase, and what threads did before they arrived.
    ///
    /// # Errors
    /// [`FaultKind::Timeout`]; the fault or abort that ended the wait.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait_mbarrier(&self, barrier: Mbarrier, parity: u32, deadline: Deadline) -> Result<(), Fault> {
        let status = self.status();
        status.poll(deadline, || barrier.try_wait(parity)).map_err(|stop| {
            let timeout = fault::new(FaultKind::Timeout, Operation::Barrier);
            // 0 expected tells it from a barrier of blocks.
            status.explain(stop, timeout, FaultSubject::None, deadline, 0, 0)
        })
    }

    /// Returns the window that has the byte at `address` of the caller's own memory, and the byte's offset in it.
    ///
    /// # Errors
    /// [`FaultKind::UnknownWindow`] if no registered window has it.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn find_window(&self, address: *const u8) -> Result<(WindowHandle, u64), Fault> {
        let mut id = 0;
        while id < self.0.windows {
            // Safety: the handle's table has `windows` entries.
            let data = unsafe { &*self.window_data(id) };
            let offset = (address as usize as u64).wrapping_sub(data.base);
            if data.active != 0 && offset < data.length {
                let data_address = self.window_data(id) as usize as u64;
                let handle = WindowHandle {
                    base: data.base,
                    own_length: data.length,
                    least_length: 0,
                    data: data_address,
                    id,
                    flags: data.flags,
                    stride: data.stride,
                    rank: self.0.rank,
                    lsa_first: self.0.lsa_first,
                    lsa_reach: if data.stride != 0 { self.0.lsa_size } else { 0 },
                };
                return Ok((handle, offset));
            }
            id += 1;
        }
        let fault = fault::new(FaultKind::UnknownWindow, Operation::Address);
        Err(fault.with_values(FaultSubject::None, 0, address as usize as u64))
    }

    #[inline(always)]
    fn window_data(&self, id: u32) -> *const WindowData {
        (self.0.window_table as usize as *const WindowData).wrapping_add(id as usize)
    }

    #[inline(always)]
    pub(crate) fn status(&self) -> Status<Global> {
        // Safety: the caller of `from_handle` promised that the handle's addresses are valid.
        unsafe {
            Status {
                host: GlobalWord::new(self.0.host_status),
                kernel: GlobalWord::new(self.0.kernel_status),
                copy: GlobalWord::new(self.0.kernel_status_copy),
            }
        }
    }

    /// Returns the data of a context. It may be read only if the context exists.
    #[inline(always)]
    pub(crate) fn context_data(&self, context: u32) -> *const ContextData {
        (self.0.context_table as usize as *const ContextData).wrapping_add(context as usize)
    }
}
