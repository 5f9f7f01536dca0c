// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is made with a device, each ended when it is dropped and kept from being used without what it needs.

use super::device::{Device, last_errno};
use super::key::{End, Port};
use crate::NetError;
use gin_verbs::Link;
use gin_verbs::verbs::{
    self as ffi, ACCESS, AddressAttributes, FLAG, GIVEN, GIVEN_STATE, Limits, Piece, QueueAttributes, QueueInit,
    RELIABLE, STATE,
};
use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::{fmt, io};

/// Why something cannot be done at this rank.
pub(super) fn local(what: &'static str, reason: impl fmt::Display) -> NetError {
    NetError::Local { what, reason: reason.to_string() }
}

pub(super) fn system(what: &'static str, errno: i32) -> NetError {
    local(what, io::Error::from_raw_os_error(errno))
}

pub(super) fn made<T>(what: &'static str, result: *mut T) -> Result<NonNull<T>, NetError> {
    NonNull::new(result).ok_or_else(|| system(what, last_errno()))
}

pub(super) fn check(what: &'static str, result: c_int) -> Result<(), NetError> {
    match result {
        0 => Ok(()),
        -1 => Err(system(what, last_errno())),
        errno => Err(system(what, errno.saturating_abs())),
    }
}

macro_rules! shown {
    ($($name:ident)*) => {
        $(
            // Safety: libibverbs locks what threads share, and the object is used by one thread at a time.
            unsafe impl Send for $name {}

            impl fmt::Debug for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.debug_struct(stringify!($name)).finish_non_exhaustive()
                }
            }
        )*
    };
}

pub(super) use shown;

shown! { Domain Completions Queue }

/// A protection domain.
pub(super) struct Domain {
    device: Arc<Device>,
    pub(super) domain: NonNull<ffi::ProtectionDomain>,
}

// Safety: libibverbs locks what threads share.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(device: &Arc<Device>) -> Result<Arc<Self>, NetError> {
        // Safety: the context is open.
        let domain = unsafe { (device.opened.functions.ibv_alloc_pd)(device.opened.context.as_ptr()) };
        Ok(Arc::new(Self { device: device.clone(), domain: made("making a protection domain", domain)? }))
    }

    /// What is told of its port.
    pub(super) fn port(&self, credits_key: u32, words_key: u32) -> Port {
        let Device { config, info, port, gid, mtu, .. } = &*self.device;
        let reads = info.reads_answered.min(config.reads).max(1);
        Port { link: port.link, mtu: *mtu, reads, lid: port.lid, gid: gid.bytes, credits_key, words_key }
    }

    pub(super) fn functions(&self) -> &ffi::Functions {
        &self.device.opened.functions
    }

    /// The driver's calls.
    fn operations(&self) -> &ffi::ContextOperations {
        // Safety: the context is open, and its table does not change.
        unsafe { &self.device.opened.context.as_ref().ops }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Safety: everything that was made with it kept it alive.
        unsafe { (self.functions().ibv_dealloc_pd)(self.domain.as_ptr()) };
    }
}

/// A completion queue.
pub(super) struct Completions {
    domain: Arc<Domain>,
    queue: NonNull<ffi::CompletionQueue>,
}

impl Completions {
    /// One of at least so many entries.
    pub(super) fn new(domain: &Arc<Domain>, entries: u32) -> Result<Self, NetError> {
        let context = domain.device.opened.context.as_ptr();
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let none = ptr::null_mut();
        // Safety: the context is open. Vector 0 is always there.
        let queue = unsafe { (domain.functions().ibv_create_cq)(context, entries, none, none, 0) };
        Ok(Self { domain: domain.clone(), queue: made("making a completion queue", queue)? })
    }

    /// Takes what is there, as much as there is room for.
    pub(super) fn poll<'a>(&self, room: &'a mut [ffi::WorkCompletion]) -> Result<&'a [ffi::WorkCompletion], NetError> {
        const WHAT: &str = "asking for completions";
        let poll = self.domain.operations().poll_cq.ok_or_else(|| local(WHAT, "the driver has no such call"))?;
        let most = c_int::try_from(room.len()).unwrap_or(c_int::MAX);
        // Safety: the queue is there, and so is the room.
        let count = unsafe { poll(self.queue.as_ptr(), most, room.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) => Ok(&room[..count.min(room.len())]),
            Err(_) => Err(local(WHAT, format_args!("the driver says {count}"))),
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // Safety: its owner ends the queue pairs that it serves first.
        unsafe { (self.domain.functions().ibv_destroy_cq)(self.queue.as_ptr()) };
    }
}

/// A queue pair.
pub(super) struct Queue {
    domain: Arc<Domain>,
    queue: NonNull<ffi::Queue>,
    first_packet: u32,
    /// Most bytes that an entry holds itself.
    inline: u32,
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Depths {
    pub(super) send: u32,
    pub(super) receive: u32,
}

impl Depths {
    /// Slots for what entries send: a power of two, as the numbers of entries wrap at 2^32.
    pub(super) fn send_slots(self) -> u32 {
        self.send.next_power_of_two()
    }

    /// The slot of an entry. No other entry under way has it, as at most `send` are, whose numbers follow each other.
    pub(super) fn send_slot(self, number: u32) -> u32 {
        number % self.send_slots()
    }
}

/// The outcome of posting a chain: how many were posted, and the error that kept the rest from it.
pub(super) type Posted = Result<(), (usize, NetError)>;

impl Queue {
    /// One whose completions go there; `first_packet` has 24 bits.
    pub(super) fn new(
        domain: &Arc<Domain>,
        (sends, receives): (&Completions, &Completions),
        depths: Depths,
        first_packet: u32,
    ) -> Result<Self, NetError> {
        let wanted = domain.device.config.inline;
        let create = |inline: u32| {
            let cap = Limits {
                max_send_wr: depths.send,
                max_recv_wr: depths.receive,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            };
            let mut init = QueueInit {
                qp_context: ptr::null_mut(),
                send_cq: sends.queue.as_ptr(),
                recv_cq: receives.queue.as_ptr(),
                srq: ptr::null_mut(),
                cap,
                qp_type: RELIABLE,
                sq_sig_all: 0,
            };
            // Safety: the domain and both completion queues are there; `init` may be written.
            let queue = unsafe { (domain.functions().ibv_create_qp)(domain.domain.as_ptr(), &raw mut init) };
            made("making a queue pair", queue).map(|queue| (queue, init.cap.max_inline_data.min(inline)))
        };
        let (queue, inline) = match create(wanted) {
            Err(_) if wanted > 0 => create(0)?,
            made => made?,
        };
        Ok(Self { domain: domain.clone(), queue, first_packet, inline })
    }

    /// What the other end needs to know.
    pub(super) fn end(&self) -> End {
        // Safety: the queue pair is there.
        End { queue: unsafe { self.queue.as_ref() }.qp_num, first_packet: self.first_packet }
    }

    /// The flag for a request of so many bytes that may be held by its entry.
    pub(super) fn inline(&self, bytes: usize) -> u32 {
        if bytes <= self.inline as usize { FLAG[2] } else { 0 }
    }

    fn modify(&self, what: &'static str, attributes: &mut QueueAttributes, given: c_int) -> Result<(), NetError> {
        // Safety: the queue pair is there.
        check(what, unsafe { (self.domain.functions().ibv_modify_qp)(self.queue.as_ptr(), attributes, given) })
    }

    /// Lets it have receive buffers.
    pub(super) fn begin(&self) -> Result<(), NetError> {
        let [_, remote_write, remote_read, remote_atomic, _] = ACCESS;
        let remote_atomic = if self.domain.device.info.has_atomics { remote_atomic } else { 0 };
        let mut attributes = QueueAttributes {
            qp_state: STATE[0],
            port_num: self.domain.device.port.number,
            qp_access_flags: remote_write | remote_read | remote_atomic,
            ..QueueAttributes::default()
        };
        self.modify("readying a queue pair", &mut attributes, GIVEN[0])
    }

    /// Connects it to one end of another rank's.
    pub(super) fn connect(&self, peer: &Port, end: End) -> Result<(), NetError> {
        let Device { config, info, port, gid, mtu, .. } = &*self.domain.device;
        let near = port.link == Link::InfiniBand && peer.lid != 0 && peer.gid[..8] == gid.bytes[..8];
        let mtu = if peer.mtu.bytes() < mtu.bytes() { peer.mtu } else { *mtu };
        let mut attributes = QueueAttributes {
            qp_state: STATE[1],
            path_mtu: mtu.code() as u32,
            dest_qp_num: end.queue,
            rq_psn: end.first_packet,
            max_dest_rd_atomic: info.reads_answered.min(config.reads),
            // 0.64 ms. It does not come to this: there is a buffer for each signal.
            min_rnr_timer: 12,
            ah_attr: AddressAttributes {
                dgid: peer.gid,
                sgid_index: gid.index as u8,
                hop_limit: config.hop_limit,
                traffic_class: config.traffic_class,
                dlid: peer.lid,
                sl: config.service_level,
                is_global: u8::from(!near),
                port_num: port.number,
                ..AddressAttributes::default()
            },
            ..QueueAttributes::default()
        };
        self.modify("connecting a queue pair", &mut attributes, GIVEN[1])?;
        let mut attributes = QueueAttributes {
            qp_state: STATE[2],
            timeout: config.timeout,
            retry_cnt: config.retries,
            rnr_retry: 6,
            sq_psn: self.first_packet,
            max_rd_atomic: info.reads_asked.min(peer.reads).min(config.reads).max(1),
            ..QueueAttributes::default()
        };
        self.modify("starting a queue pair", &mut attributes, GIVEN[2])
    }

    /// Has all its requests end with an error.
    pub(super) fn fail(&self) -> Result<(), NetError> {
        let mut attributes = QueueAttributes { qp_state: STATE[3], ..QueueAttributes::default() };
        self.modify("ending a queue pair", &mut attributes, GIVEN_STATE)
    }

    /// Posts requests, in order, with one doorbell.
    ///
    /// # Safety
    /// - Their pieces lie in regions of this rank that stay until the requests are complete, or are held by the entries.
    pub(super) unsafe fn post(&self, chain: &mut Chain) -> Posted {
        let Some(first) = chain.link() else { return Ok(()) };
        const WHAT: &str = "posting requests";
        let post = self.domain.operations().post_send.ok_or_else(|| (0, local(WHAT, "the driver has no such call")))?;
        let mut bad = ptr::null_mut();
        // Safety: the queue pair is there, the chain is linked; the rest is the caller's promise.
        let result = unsafe { post(self.queue.as_ptr(), first, &raw mut bad) };
        check(WHAT, result).map_err(|error| {
            let place = chain.requests.iter().position(|request| ptr::eq(request, bad));
            (place.unwrap_or(0), error)
        })
    }

    /// Posts one receive buffer, called `id`.
    ///
    /// # Safety
    /// - The piece lies in a region of this rank that stays until the buffer is used or the queue pair is gone.
    pub(super) unsafe fn receive(&self, id: u64, mut piece: Piece) -> Result<(), NetError> {
        const WHAT: &str = "posting a receive buffer";
        let post = self.domain.operations().post_recv.ok_or_else(|| local(WHAT, "the driver has no such call"))?;
        let mut request = ffi::ReceiveRequest { wr_id: id, next: ptr::null_mut(), sg_list: &raw mut piece, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // Safety: the queue pair is there, as is the request during the call; the rest is the caller's promise.
        check(WHAT, unsafe { post(self.queue.as_ptr(), &raw mut request, &raw mut bad) })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Safety: its owner drops it before its completion queues. The NIC is done with its memory afterwards.
        unsafe { (self.domain.functions().ibv_destroy_qp)(self.queue.as_ptr()) };
    }
}

/// Requests to be posted together.
#[derive(Debug, Default)]
pub(super) struct Chain {
    requests: Vec<ffi::SendRequest>,
    pieces: Vec<Option<Piece>>,
}

// Safety: its pointers are null but during a call.
unsafe impl Send for Chain {}

impl Chain {
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn push(&mut self, request: ffi::SendRequest, piece: Option<Piece>) {
        self.requests.push(request);
        self.pieces.push(piece);
    }

    /// Asks for a completion of the last.
    pub(super) fn signal_last(&mut self) {
        if let Some(last) = self.requests.last_mut() {
            last.send_flags |= FLAG[1];
        }
    }

    pub(super) fn clear(&mut self) {
        self.requests.clear();
        self.pieces.clear();
    }

    /// Connects them; the first, if there is one.
    fn link(&mut self) -> Option<*mut ffi::SendRequest> {
        let count = self.requests.len();
        let first = self.requests.as_mut_ptr();
        for (index, piece) in self.pieces.iter_mut().enumerate() {
            // Safety: `index` is in range, as both lists are of the same length.
            let request = unsafe { &mut *first.add(index) };
            if let Some(piece) = piece {
                request.sg_list = piece;
                request.num_sge = 1;
            }
            if index + 1 < count {
                request.next = first.wrapping_add(index + 1);
            }
        }
        (count > 0).then_some(first)
    }
}
