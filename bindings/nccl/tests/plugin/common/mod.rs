// SPDX-License-Identifier: MIT OR Apache-2.0
//! The role of NCCL: it calls a table, with a thread for nobody, and has memory on each rank's GPU.

pub(crate) mod gpus;

use gin_gpu::{Memory, lock};
use gin_nccl::abi::{Config, FLAG_NEVER_RESET, HANDLE_BYTES, Logger, PTR_CUDA, PTR_HOST, SIGNAL_ADD, SIGNAL_INC};
use gin_nccl::ncclRmaPlugin_v14;
use gpus::{choose, current, gpus, own_gpus};
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) type Pointer = *mut c_void;

/// The lines of the log.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Takes a line of the log. The plugin passes one text for the format `gin: %s`.
unsafe extern "C" fn log(_: c_int, _: c_ulong, _: *const c_char, _: c_int, format: *const c_char, text: *const c_char) {
    // Safety: the plugin passes two strings.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert_eq!(format, c"gin: %s");
    lock(&LINES).push(text.to_string_lossy().into_owned());
}

/// Returns whether the log has a line with all of these parts.
pub(crate) fn logged(parts: &[&str]) -> bool {
    lock(&LINES).iter().any(|line| parts.iter().all(|part| line.contains(part)))
}

/// Returns NCCL's function for the log.
pub(crate) fn logger() -> Logger {
    let log: unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char) = log;
    // Safety: on Linux a function with variable arguments finds pointers where others do.
    unsafe { std::mem::transmute(log) }
}

pub(crate) fn init() -> c_int {
    gpus();
    let mut context = null_mut();
    // Safety: the table's functions, with valid pointers.
    unsafe { (ncclRmaPlugin_v14.start.init)(&raw mut context, 7, Some(logger())) }
}

/// The ranks of a communicator in this process. Methods take their index here; a peer is a rank.
pub(crate) struct Comm {
    pub(crate) first_gpu: usize,
    /// The number of ranks of a GPU.
    share: usize,
    pub(crate) colls: Vec<Pointer>,
    pub(crate) contexts: Vec<Pointer>,
}

// Safety: NCCL uses them on several threads.
unsafe impl Sync for Comm {}
// Safety: as above.
unsafe impl Send for Comm {}

/// Memory that all ranks have registered, and the handles.
pub(crate) struct Registered {
    pub(crate) memory: Vec<Arc<Memory>>,
    pub(crate) handles: Vec<Pointer>,
}

// Safety: as above.
unsafe impl Sync for Registered {}
// Safety: as above.
unsafe impl Send for Registered {}

impl Registered {
    pub(crate) fn word(&self, rank: usize, index: u64) -> u64 {
        let mut word = [0];
        self.memory[rank].read(index * 8, &mut word).unwrap();
        word[0]
    }
}

/// A rank that listens.
pub(crate) struct Listening {
    pub(crate) handle: [u8; HANDLE_BYTES],
    object: Pointer,
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Safety: the table's function, with the object of `listen`.
        assert_eq!(unsafe { (ncclRmaPlugin_v14.control.close_listen)(self.object) }, 0);
    }
}

/// Listens once on each of the GPUs.
pub(crate) fn listen(gpus: impl Iterator<Item = usize>) -> Vec<Listening> {
    let one = |gpu| {
        choose(Some(gpu));
        let (mut handle, mut object) = ([0u8; HANDLE_BYTES], null_mut());
        // Safety: the table's functions, with valid pointers. NCCL passes any context.
        let code =
            unsafe { (ncclRmaPlugin_v14.control.listen)(null_mut(), 0, handle.as_mut_ptr().cast(), &raw mut object) };
        assert_eq!(code, 0);
        Listening { handle, object }
    };
    gpus.map(one).collect()
}

/// Connects a rank. Returns the code and the communicator.
pub(crate) fn connect(handles: &[[u8; HANDLE_BYTES]], rank: usize, listening: &Listening) -> (c_int, Pointer) {
    let pointers: Vec<*const c_void> = handles.iter().map(|handle| handle.as_ptr().cast()).collect();
    let (count, mut coll) = (handles.len() as c_int, null_mut());
    let connect = ncclRmaPlugin_v14.control.connect;
    // Safety: as above.
    let code = unsafe { connect(null_mut(), pointers.as_ptr(), count, rank as c_int, listening.object, &raw mut coll) };
    (code, coll)
}

impl Comm {
    /// Makes a communicator whose ranks are all in this process, each with a GPU.
    pub(crate) fn new(ranks: usize) -> Self {
        Self::shared(ranks, 1)
    }

    /// Makes a communicator whose ranks are all in this process, `share` of them on each GPU.
    pub(crate) fn shared(ranks: usize, share: usize) -> Self {
        Self::with(0, ranks, share, |own| own)
    }

    /// Makes a communicator. This process has `ranks` ranks from `first` on; `gather` returns the handles of all.
    pub(crate) fn gathered(
        first: usize,
        ranks: usize,
        gather: impl FnOnce(Vec<[u8; HANDLE_BYTES]>) -> Vec<[u8; HANDLE_BYTES]>,
    ) -> Self {
        Self::with(first, ranks, 1, gather)
    }

    fn with(
        first: usize,
        ranks: usize,
        share: usize,
        gather: impl FnOnce(Vec<[u8; HANDLE_BYTES]>) -> Vec<[u8; HANDLE_BYTES]>,
    ) -> Self {
        assert_eq!(init(), 0);
        let first_gpu = own_gpus(ranks.div_ceil(share));
        let gpu = |rank: usize| first_gpu + rank / share;
        let listening = listen((0..ranks).map(gpu));
        let handles = gather(listening.iter().map(|one| one.handle).collect());
        let (mut colls, mut contexts) = (Vec::new(), Vec::new());
        for (rank, listening) in listening.iter().enumerate() {
            choose(Some(gpu(rank)));
            let (code, coll) = connect(&handles, first + rank, listening);
            assert_eq!((code, current()), (0, Some(gpu(rank))));
            let (config, mut context) = (Config { contexts: 2, traffic_class: -1, rank_stride: 1 }, null_mut());
            // Safety: as above.
            let code = unsafe { (ncclRmaPlugin_v14.control.create_context)(coll, &raw const config, &raw mut context) };
            assert_eq!(code, 0);
            colls.push(coll);
            contexts.push(context);
        }
        Self { first_gpu, share, colls, contexts }
    }

    /// Returns the GPU of a rank of this process.
    fn gpu(&self, rank: usize) -> usize {
        self.first_gpu + rank / self.share
    }

    pub(crate) fn ranks(&self) -> usize {
        self.colls.len()
    }

    pub(crate) fn try_register_at(
        &self,
        rank: usize,
        address: u64,
        bytes: u64,
        kind: c_int,
        flags: u64,
    ) -> (c_int, Pointer) {
        choose(Some(self.gpu(rank)));
        let (data, mut handle) = (std::ptr::with_exposed_provenance_mut(address as usize), null_mut());
        let register = ncclRmaPlugin_v14.control.reg_mr_sym;
        // Safety: as above; callers keep the memory.
        let code = unsafe { register(self.colls[rank], data, bytes as usize, kind, flags, &raw mut handle) };
        assert_eq!(current(), Some(self.gpu(rank)));
        (code, handle)
    }

    /// Registers memory, which must succeed.
    pub(crate) fn register_at(&self, rank: usize, address: u64, bytes: u64, kind: c_int, flags: u64) -> Pointer {
        let (code, handle) = self.try_register_at(rank, address, bytes, kind, flags);
        assert_eq!(code, 0);
        assert!(!handle.is_null());
        handle
    }

    /// Allocates and registers memory on each rank, of this many bytes.
    pub(crate) fn register_each(&self, bytes: &[u64], flags: u64) -> Registered {
        // NCCL allocates tables of signals so that no other process can map them.
        let shared = flags & FLAG_NEVER_RESET == 0;
        let allocate = |(rank, &bytes): (usize, &u64)| gpus().allocate(self.gpu(rank), bytes, shared);
        let memory: Vec<_> = bytes.iter().enumerate().map(allocate).collect();
        let register = |(rank, memory): (usize, &Arc<Memory>)| {
            self.register_at(rank, memory.address(), memory.bytes(), PTR_CUDA, flags)
        };
        let handles = memory.iter().enumerate().map(register).collect();
        Registered { memory, handles }
    }

    pub(crate) fn register(&self, bytes: u64, flags: u64) -> Registered {
        self.register_each(&vec![bytes; self.ranks()], flags)
    }

    /// Allocates and registers a window of this many bytes and a table of 8 signals on each rank.
    pub(crate) fn register_with_table(&self, bytes: u64) -> (Registered, Registered) {
        (self.register(bytes, 0), self.register(64, FLAG_NEVER_RESET))
    }

    /// Registers a few words of the host on one rank, which all others follow with a word of their own.
    pub(crate) fn register_host(&self, words: &mut [Vec<u64>]) -> Vec<Pointer> {
        let register = |(rank, words): (usize, &mut Vec<u64>)| {
            let address = words.as_mut_ptr().expose_provenance() as u64;
            self.register_at(rank, address, words.len() as u64 * 8, PTR_HOST, 0)
        };
        words.iter_mut().enumerate().map(register).collect()
    }

    pub(crate) fn deregister(&self, rank: usize, handle: Pointer) -> c_int {
        // Safety: as above.
        unsafe { (ncclRmaPlugin_v14.control.dereg_mr_sym)(self.colls[rank], handle) }
    }

    /// Deregisters the memory of each rank.
    pub(crate) fn deregister_all(&self, handles: &[Pointer]) {
        handles.iter().enumerate().for_each(|(rank, &handle)| assert_eq!(self.deregister(rank, handle), 0));
    }

    pub(crate) fn put(&self, rank: usize, to: usize, part: &Put) -> (c_int, Pointer) {
        let Put { from, to: destination, bytes, signal, context } = *part;
        let mut request = null_mut();
        let (own, peer) = (self.contexts[rank], to as u32);
        let ((source, source_offset), (target, target_offset)) = (from, destination);
        let data = &ncclRmaPlugin_v14.data;
        // Safety: as above.
        let code = unsafe {
            match signal {
                None => (data.iput)(
                    own,
                    context,
                    source_offset,
                    source,
                    bytes as usize,
                    target_offset,
                    target,
                    peer,
                    &raw mut request,
                ),
                Some((word, offset, add)) => (data.iput_signal)(
                    own,
                    context,
                    source_offset,
                    source,
                    bytes as usize,
                    target_offset,
                    target,
                    peer,
                    offset,
                    word,
                    add.unwrap_or(99),
                    if add.is_some() { SIGNAL_ADD } else { SIGNAL_INC },
                    true,
                    &raw mut request,
                ),
            }
        };
        (code, request)
    }

    pub(crate) fn get(&self, rank: usize, of: usize, from: (Pointer, u64), to: (Pointer, u64), bytes: u64) -> Pointer {
        let mut request = null_mut();
        let (own, peer, bytes) = (self.contexts[rank], of as u32, bytes as usize);
        let get = ncclRmaPlugin_v14.data.iget;
        // Safety: as above.
        assert_eq!(unsafe { get(own, 0, from.1, from.0, bytes, to.1, to.0, peer, &raw mut request) }, 0);
        request
    }

    pub(crate) fn is_done(&self, rank: usize, request: Pointer) -> bool {
        let mut done = 7;
        // Safety: as above.
        assert_eq!(unsafe { (ncclRmaPlugin_v14.completion.test)(self.colls[rank], request, &raw mut done) }, 0);
        done == 1
    }

    pub(crate) fn wait(&self, rank: usize, request: Pointer) {
        until("a request is done", || self.is_done(rank, request));
    }

    /// Puts without a fault, and returns the request.
    pub(crate) fn post(&self, rank: usize, to: usize, part: &Put) -> Pointer {
        let (code, request) = self.put(rank, to, part);
        assert_eq!(code, 0);
        assert!(!request.is_null());
        request
    }

    pub(crate) fn progress(&self, rank: usize) -> c_int {
        // Safety: as above.
        unsafe { (ncclRmaPlugin_v14.completion.rma_progress)(self.contexts[rank]) }
    }

    pub(crate) fn has_failed(&self, rank: usize) -> bool {
        let mut failed = false;
        let query = ncclRmaPlugin_v14.completion.query_last_error;
        // Safety: as above.
        assert_eq!(unsafe { query(self.contexts[rank], &raw mut failed) }, 0);
        failed
    }

    /// Ends the communicator as NCCL does: contexts first, then windows, then the connection.
    pub(crate) fn end(self, registered: &[&Registered]) {
        for &context in &self.contexts {
            // Safety of both: as above, and not used any more.
            assert_eq!(unsafe { (ncclRmaPlugin_v14.control.destroy_context)(context) }, 0);
        }
        for all in registered {
            self.deregister_all(&all.handles);
        }
        for &coll in &self.colls {
            assert_eq!(unsafe { (ncclRmaPlugin_v14.control.close_coll)(coll) }, 0);
        }
    }
}

/// The arguments of a put. A signal is a handle, an offset, and the amount of an addition; `None` increments.
#[derive(Clone, Copy)]
pub(crate) struct Put {
    pub(crate) from: (Pointer, u64),
    pub(crate) to: (Pointer, u64),
    pub(crate) bytes: u64,
    pub(crate) signal: Option<(Pointer, u64, Option<u64>)>,
    pub(crate) context: c_int,
}

impl Put {
    pub(crate) fn new(from: (Pointer, u64), to: (Pointer, u64), bytes: u64) -> Self {
        Self { from, to, bytes, signal: None, context: 0 }
    }

    /// A signal alone, as NCCL asks for one.
    pub(crate) fn signal(word: Pointer, index: u64, add: Option<u64>) -> Self {
        Self::new((null_mut(), 0), (null_mut(), 0), 0).and(word, index, add)
    }

    pub(crate) fn and(self, word: Pointer, index: u64, add: Option<u64>) -> Self {
        Self { signal: Some((word, index * 8, add)), ..self }
    }
}

/// Waits until a condition holds, for 20 s at most.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::yield_now();
    }
}
