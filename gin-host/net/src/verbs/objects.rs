// SPDX-License-Identifier: MIT OR Apache-2.0
//! RAII wrappers for protection domain, completion queue and queue pair; each keeps its parents alive.

use super::device::RdmaDevice;
use super::key::{End, PublishedPort};
use crate::NetError;
use gin_verbs::verbs::{
    self, AddressHandleAttributes, ContextOperations, IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN,
    IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX,
    IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT,
    IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, IBV_SEND_INLINE, IBV_SEND_SIGNALED, Link,
    ProtectionDomain, QueuePairAttributes, QueuePairCapabilities, QueuePairInitAttributes, ReceiveWorkRequest,
    ScatterGatherEntry, SendWorkRequest, Verbs, WorkCompletion,
};
use gin_verbs::{Access, CallError, check, non_null};
use std::ffi::c_int;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Returns the error of an operation that failed at this rank.
pub(super) fn local(what: &'static str, reason: impl fmt::Display) -> NetError {
    NetError::Local { what, reason: reason.to_string() }
}

impl From<CallError> for NetError {
    fn from(error: CallError) -> Self {
        local(error.call, error.reason())
    }
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    device: Arc<RdmaDevice>,
    pub(super) domain: NonNull<ProtectionDomain>,
}

// Safety: libibverbs locks what threads share.
unsafe impl Send for Domain {}
// Safety: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(device: &Arc<RdmaDevice>) -> Result<Arc<Self>, NetError> {
        // Safety: the context is open.
        let domain = unsafe { (device.open.verbs.ibv_alloc_pd)(device.open.context().as_ptr()) };
        Ok(Arc::new(Self { device: device.clone(), domain: non_null("making a protection domain", domain)? }))
    }

    /// Returns what this rank publishes of its port.
    pub(super) fn port(&self, credits_key: u32, words_key: u32) -> PublishedPort {
        let RdmaDevice { config, info, port, gid, mtu, .. } = &*self.device;
        let reads = info.reads_answered.min(config.reads).max(1);
        PublishedPort { link: port.link, mtu: mtu.code(), reads, lid: port.lid, gid: gid.bytes, credits_key, words_key }
    }

    pub(super) fn verbs(&self) -> &Verbs {
        &self.device.open.verbs
    }

    /// Returns the driver's functions.
    fn operations(&self) -> &ContextOperations {
        // Safety: the context is open, and its table does not change.
        unsafe { &self.device.open.context().as_ref().ops }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Safety: every object of the domain kept it alive, so none is left.
        unsafe { (self.verbs().ibv_dealloc_pd)(self.domain.as_ptr()) };
    }
}

fn no_function(what: &'static str) -> NetError {
    local(what, "the driver has no such function")
}

/// Maximum number of completions taken from a queue at a time.
const TAKE: usize = 32;

/// How often one poll asks a queue, so that the proxy returns to its other work.
const ROUNDS: usize = 4;

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    domain: Arc<Domain>,
    queue: NonNull<verbs::CompletionQueue>,
}

// Safety: libibverbs locks what threads share, and one thread at a time uses the queue.
unsafe impl Send for CompletionQueue {}

impl CompletionQueue {
    /// Creates a queue of at least `entries` entries.
    pub(super) fn new(domain: &Arc<Domain>, entries: u32) -> Result<Self, NetError> {
        let context = domain.device.open.context().as_ptr();
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let none = ptr::null_mut();
        // Safety: the context is open. Every device has vector 0.
        let queue = unsafe { (domain.verbs().ibv_create_cq)(context, entries, none, none, 0) };
        Ok(Self { domain: domain.clone(), queue: non_null("making a completion queue", queue)? })
    }

    /// Takes the completions that have arrived, as far as there is room.
    pub(super) fn poll<'a>(&self, room: &'a mut [WorkCompletion]) -> Result<&'a [WorkCompletion], NetError> {
        const WHAT: &str = "asking for completions";
        let poll = self.domain.operations().poll_cq.ok_or_else(|| no_function(WHAT))?;
        let max = c_int::try_from(room.len()).unwrap_or(c_int::MAX);
        // Safety: the queue exists, and `room` has `max` entries.
        let count = unsafe { poll(self.queue.as_ptr(), max, room.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) => Ok(&room[..count.min(room.len())]),
            Err(_) => Err(local(WHAT, format_args!("the driver returned {count}"))),
        }
    }

    /// Takes the completions that have arrived, up to a limit.
    pub(super) fn take(&self, mut handle: impl FnMut(&WorkCompletion)) -> Result<(), NetError> {
        let mut room = [WorkCompletion::default(); TAKE];
        for _ in 0..ROUNDS {
            let taken = self.poll(&mut room)?;
            taken.iter().for_each(&mut handle);
            if taken.len() < TAKE {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // Safety: its owner destroys the queue's queue pairs first.
        unsafe { (self.domain.verbs().ibv_destroy_cq)(self.queue.as_ptr()) };
    }
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    domain: Arc<Domain>,
    queue: NonNull<verbs::QueuePair>,
    initial_psn: u32,
    /// Maximum bytes that an entry holds itself.
    inline: u32,
}

// Safety: libibverbs locks what threads share, and one thread at a time uses the queue pair.
unsafe impl Send for QueuePair {}

/// Sizes of a queue pair, in entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Depths {
    pub(super) send: u32,
    pub(super) receive: u32,
}

impl Depths {
    /// Returns the number of slots for data of send entries: a power of two, because entry numbers wrap at 2^32.
    pub(super) fn send_slots(self) -> u32 {
        self.send.next_power_of_two()
    }

    /// Returns the slot of an entry. No other outstanding entry has it: at most `send` entries are outstanding, and
    /// their numbers are consecutive.
    pub(super) fn send_slot(self, number: u32) -> u32 {
        number % self.send_slots()
    }
}

/// Outcome of posting a chain. An error carries the number of requests that were posted before it.
pub(super) type Posted = Result<(), (usize, NetError)>;

impl QueuePair {
    /// Creates a queue pair with these completion queues for sends and receives. `initial_psn` has 24 bits.
    pub(super) fn new(
        domain: &Arc<Domain>,
        (sends, receives): (&CompletionQueue, &CompletionQueue),
        depths: Depths,
        initial_psn: u32,
    ) -> Result<Self, NetError> {
        let wanted = domain.device.config.inline;
        let create = |inline: u32| {
            let cap = QueuePairCapabilities {
                max_send_wr: depths.send,
                max_recv_wr: depths.receive,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            };
            let mut init = QueuePairInitAttributes {
                send_cq: sends.queue.as_ptr(),
                recv_cq: receives.queue.as_ptr(),
                cap,
                qp_type: IBV_QPT_RC,
                ..QueuePairInitAttributes::default()
            };
            // Safety: the domain and both completion queues exist; the library may write `init`.
            let queue = unsafe { (domain.verbs().ibv_create_qp)(domain.domain.as_ptr(), &raw mut init) };
            non_null("making a queue pair", queue).map(|queue| (queue, init.cap.max_inline_data.min(inline)))
        };
        let (queue, inline) = match create(wanted) {
            Err(_) if wanted > 0 => create(0)?,
            created => created?,
        };
        Ok(Self { domain: domain.clone(), queue, initial_psn, inline })
    }

    /// Returns what the peer needs to know to connect.
    pub(super) fn end(&self) -> End {
        // Safety: the queue pair exists.
        End { queue: unsafe { self.queue.as_ref() }.qp_num, initial_psn: self.initial_psn }
    }

    /// Returns the flag for a request of `bytes` bytes whose entry may hold them.
    pub(super) fn inline(&self, bytes: usize) -> u32 {
        if bytes <= self.inline as usize { IBV_SEND_INLINE } else { 0 }
    }

    /// Sets the attributes that `mask` selects.
    fn modify(&self, what: &'static str, mut attributes: QueuePairAttributes, mask: c_int) -> Result<(), NetError> {
        // Safety: the queue pair exists.
        let result = unsafe { (self.domain.verbs().ibv_modify_qp)(self.queue.as_ptr(), &raw mut attributes, mask) };
        Ok(check(what, result)?)
    }

    /// Enters the state in which the queue pair takes receive buffers.
    pub(super) fn begin(&self) -> Result<(), NetError> {
        let atomic = if self.domain.device.info.has_atomics { Access::REMOTE_ATOMIC } else { Access::empty() };
        let attributes = QueuePairAttributes {
            qp_state: IBV_QPS_INIT,
            port_num: self.domain.device.port.number,
            qp_access_flags: (Access::REMOTE_WRITE | Access::REMOTE_READ | atomic).bits(),
            ..QueuePairAttributes::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify("readying a queue pair", attributes, mask)
    }

    /// Connects the queue pair to that of another rank.
    pub(super) fn connect(&self, peer: &PublishedPort, end: End) -> Result<(), NetError> {
        let RdmaDevice { config, info, port, gid, mtu, .. } = &*self.domain.device;
        let same_subnet = port.link == Link::InfiniBand && peer.lid != 0 && peer.gid[..8] == gid.bytes[..8];
        let attributes = QueuePairAttributes {
            qp_state: IBV_QPS_RTR,
            // Larger packets have larger codes.
            path_mtu: mtu.code().min(peer.mtu) as u32,
            dest_qp_num: end.queue,
            rq_psn: end.initial_psn,
            max_dest_rd_atomic: info.reads_answered.min(config.reads),
            // 0.64 ms. Never used in practice: each signal has a buffer.
            min_rnr_timer: 12,
            ah_attr: AddressHandleAttributes {
                dgid: peer.gid,
                sgid_index: gid.index as u8,
                hop_limit: config.hop_limit,
                traffic_class: config.traffic_class,
                dlid: peer.lid,
                sl: config.service_level,
                is_global: u8::from(!same_subnet),
                port_num: port.number,
                ..AddressHandleAttributes::default()
            },
            ..QueuePairAttributes::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify("connecting a queue pair", attributes, mask)?;
        let attributes = QueuePairAttributes {
            qp_state: IBV_QPS_RTS,
            timeout: config.timeout,
            retry_cnt: config.retries,
            rnr_retry: 6,
            sq_psn: self.initial_psn,
            max_rd_atomic: info.reads_asked.min(peer.reads).min(config.reads).max(1),
            ..QueuePairAttributes::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("starting a queue pair", attributes, mask)
    }

    /// Puts the queue pair into error, so that all its requests complete with an error.
    pub(super) fn fail(&self) -> Result<(), NetError> {
        let attributes = QueuePairAttributes { qp_state: IBV_QPS_ERR, ..QueuePairAttributes::default() };
        self.modify("ending a queue pair", attributes, IBV_QP_STATE)
    }

    /// Posts requests, in order, with one doorbell.
    ///
    /// # Safety
    /// - Each scatter-gather entry is in a region of this rank that stays until the request completes, or the request
    ///   holds the data itself.
    pub(super) unsafe fn post(&self, chain: &mut Chain) -> Posted {
        let Some(first) = chain.link() else { return Ok(()) };
        const WHAT: &str = "posting requests";
        let post = self.domain.operations().post_send.ok_or_else(|| (0, no_function(WHAT)))?;
        let mut bad = ptr::null_mut();
        // Safety: the queue pair exists, and the chain is linked; the rest is the caller's promise.
        let result = unsafe { post(self.queue.as_ptr(), first, &raw mut bad) };
        check(WHAT, result).map_err(|error| {
            let posted = chain.requests.iter().position(|request| ptr::eq(request, bad));
            (posted.unwrap_or(0), error.into())
        })
    }

    /// Posts one receive buffer, whose completion carries `id`.
    ///
    /// # Safety
    /// - The scatter-gather entry is in a region of this rank that stays until the buffer is used or the queue pair is
    ///   gone.
    pub(super) unsafe fn receive(&self, id: u64, mut sge: ScatterGatherEntry) -> Result<(), NetError> {
        const WHAT: &str = "posting a receive buffer";
        let post = self.domain.operations().post_recv.ok_or_else(|| no_function(WHAT))?;
        let mut request =
            ReceiveWorkRequest { wr_id: id, sg_list: &raw mut sge, num_sge: 1, ..ReceiveWorkRequest::default() };
        let mut bad = ptr::null_mut();
        // Safety: the queue pair exists, and the request outlives the call; the rest is the caller's promise.
        Ok(check(WHAT, unsafe { post(self.queue.as_ptr(), &raw mut request, &raw mut bad) })?)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // Safety: its owner drops it before its completion queues. Afterwards the NIC no longer uses its memory.
        unsafe { (self.domain.verbs().ibv_destroy_qp)(self.queue.as_ptr()) };
    }
}

/// Send requests to post together.
#[derive(Debug, Default)]
pub(super) struct Chain {
    requests: Vec<SendWorkRequest>,
    entries: Vec<ScatterGatherEntry>,
}

// Safety: its pointers point into its own lists; `link` sets them before each use.
unsafe impl Send for Chain {}

impl Chain {
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn push(&mut self, request: SendWorkRequest, entry: ScatterGatherEntry) {
        self.requests.push(request);
        self.entries.push(entry);
    }

    /// Asks for a completion of the last request.
    pub(super) fn signal_last(&mut self) {
        if let Some(last) = self.requests.last_mut() {
            last.send_flags |= IBV_SEND_SIGNALED;
        }
    }

    pub(super) fn clear(&mut self) {
        self.requests.clear();
        self.entries.clear();
    }

    /// Links the requests to each other and to their scatter-gather entries; returns the first request, if there is
    /// one.
    fn link(&mut self) -> Option<*mut SendWorkRequest> {
        let count = self.requests.len();
        let first = self.requests.as_mut_ptr();
        for (index, entry) in self.entries.iter_mut().enumerate() {
            // Safety: `index` is in range, as both lists have the same length.
            let request = unsafe { &mut *first.add(index) };
            (request.sg_list, request.num_sge) = (entry, 1);
            if index + 1 < count {
                request.next = first.wrapping_add(index + 1);
            }
        }
        (count > 0).then_some(first)
    }
}
