// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shares memory between ranks: in one process by a table, between processes of a host as files.
//!
//! A process with shared memory listens on a Unix socket. The socket's abstract name is the random name of the process.
//! The key of memory contains that name, the number of the memory, and a random secret that only owners of a key know.
//! A process that connects sends the secret and the number, and receives the file. Keys go through the bootstrap, which
//! is encrypted.
//!
//! Names are public, so any process in the network namespace can connect. The server closes connections of other users
//! before it reads a byte. It answers up to `AT_ONCE` other connections at a time. Each has `ASKING` to complete,
//! at whatever pace it sends its bytes.
//!
//! A mapping is reused as long as it has a user, so no memory has two addresses in a process.

pub mod life;
mod peer;

use crate::flat::FlatPlace;
use crate::registry::{KEY_BYTES, Key, KeyError, Missing, Registry, process, random};
use crate::{Device, DeviceKind, Memory, MemoryKind, MemorySharing, SharedFile, lock};
use bytemuck::{Pod, Zeroable};
use gin_virtual::usual_setting;
use peer::{Peer, is_ours, reach, socket_name, uninterrupted};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

/// The memory whose keys were published.
static MEMORIES: Registry<Memory> = Registry::new();

/// The memory of other processes, by the key without its secret.
static MAPPED: Mutex<BTreeMap<[u8; KEY_BYTES], Arc<Import>>> = Mutex::new(BTreeMap::new());

/// Memory of another process.
#[derive(Debug, Default)]
struct Import {
    /// Locked by the thread that requests the memory, so that no memory is mapped twice.
    request: Mutex<()>,
    /// The memory while it is mapped in this process. Never locked for long, so that mapped memory is found without
    /// waiting.
    memory: Mutex<Weak<Memory>>,
}

/// The time that a process has to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The reason for which no process answers under a name of this network namespace.
const UNREACHED: &str = "its process has ended, or runs on another host";
/// The time for a request and its answer, together.
const ASKING: Duration = Duration::from_secs(2);
/// The maximum number of requests that are answered at a time.
const AT_ONCE: usize = 64;

/// The bytes of a request: the secret, then the number of the memory, 0 for none.
const QUESTION: usize = 24;
/// The bytes of an answer: the result, the kind of memory, its length.
const ANSWER: usize = 10;

/// The result of a request.
mod outcome {
    pub(super) const HERE: u8 = 1;
    pub(super) const GONE: u8 = 2;
    pub(super) const FAILED: u8 = 3;
}

/// Starts the server of this process when it is first needed; it runs until the process ends. Returns its secret.
fn server() -> Result<[u8; 16], String> {
    static SECRET: OnceLock<Result<[u8; 16], String>> = OnceLock::new();
    let start = || -> io::Result<[u8; 16]> {
        let secret = random();
        let (to, from) = mpsc::channel();
        std::thread::Builder::new().name("gin-share".to_owned()).spawn(move || match listen() {
            Ok((runtime, listener)) => {
                let _ = to.send(Ok(()));
                runtime.block_on(serve(listener, secret));
            }
            Err(error) => drop(to.send(Err(error))),
        })?;
        from.recv().unwrap_or_else(|_| Err(io::Error::other("its thread has ended")))?;
        Ok(secret)
    };
    let refused = |error: io::Error| {
        let setting = usual_setting(&error).map_or(String::new(), |setting| format!(": {setting}"));
        format!("no socket to share memory by: {error}{setting}")
    };
    SECRET.get_or_init(|| start().map_err(refused)).clone()
}

/// Makes the socket of this process, and the runtime that serves it on the calling thread.
fn listen() -> io::Result<(Runtime, UnixListener)> {
    let listener = net::UnixListener::bind_addr(&SocketAddr::from_abstract_name(socket_name(&process()))?)?;
    listener.set_nonblocking(true)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let inside = runtime.enter();
    let listener = UnixListener::from_std(listener)?;
    drop(inside);
    Ok((runtime, listener))
}

async fn serve(listener: UnixListener, secret: [u8; 16]) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        match listener.accept().await {
            Ok((connection, _)) if is_ours(&connection) => {
                // Each place becomes free, because each request has a deadline.
                let place = places.clone().acquire_owned().await;
                tokio::spawn(async move {
                    // A peer whose request fails finds the connection closed, and reports it.
                    let _ = timeout(ASKING, answer(connection, secret)).await;
                    drop(place);
                });
            }
            // The peer runs as another user: its connection is closed.
            Ok(_) => {}
            // For example too many files are open. Others may be closed soon.
            Err(_) => sleep(Duration::from_millis(1)).await,
        }
    }
}

async fn answer(mut connection: UnixStream, secret: [u8; 16]) -> io::Result<()> {
    let mut question = [0; QUESTION];
    connection.read_exact(&mut question).await?;
    let (said, token) = question.split_first_chunk::<16>().expect("it is longer");
    if *said != secret {
        return Ok(());
    }
    let token = u64::from_le_bytes(*token.first_chunk().expect("8 bytes are left"));
    let mut answer = [0; ANSWER];
    answer[0] = match MEMORIES.get(token).map(|memory| memory.file()) {
        Some(Some(Ok(shared))) => {
            answer[0] = outcome::HERE;
            answer[1] = u8::from(shared.kind == MemoryKind::Pinned);
            answer[2..].copy_from_slice(&shared.bytes.to_le_bytes());
            // The socket takes these few bytes in one call.
            return connection.async_io(Interest::WRITABLE, || send(&connection, &answer, &shared.file)).await;
        }
        Some(Some(Err(_)) | None) => outcome::FAILED,
        None if token == 0 => outcome::HERE,
        None => outcome::GONE,
    };
    connection.write_all(&answer).await
}

/// Sends an answer, and a file with it.
fn send(connection: &UnixStream, answer: &[u8; ANSWER], file: &OwnedFd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    assert!(beside.push(SendAncillaryMessage::ScmRights(&files)), "there is room for one file");
    sendmsg(connection, &[IoSlice::new(answer)], &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Sends a request to a process. Returns its answer, and the file that arrived with it.
fn ask(key: &SharedKey, token: [u8; 8]) -> Result<([u8; ANSWER], Option<OwnedFd>), String> {
    let question = [&key.secret[..], &token].concat();
    let unanswered = || {
        let seconds = ASKING.as_secs();
        format!(
            "its process gives no answer: it has another key, waited {seconds} s for this one, or takes it for another \
             user's"
        )
    };
    let unreached = |error: io::Error| match error.kind() {
        io::ErrorKind::ConnectionRefused => UNREACHED.to_owned(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => unanswered(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => {
            format!("its process did not answer within {} s", PATIENCE.as_secs())
        }
        _ => {
            let setting = usual_setting(&error).map_or(String::new(), |setting| format!(": {setting}"));
            format!("its process cannot be asked: {error}{setting}")
        }
    };
    let mut connection = reach(&key.process, PATIENCE).map_err(unreached)?;
    // Checked before the secret is sent: another user may have taken the name of a process that has ended.
    let peer = Peer::of(&connection).map_err(unreached)?;
    peer.check()?;
    let asked = life::Known::open(peer.pid);
    connection.write_all(&question).map_err(unreached)?;
    let (mut answer, mut space) = ([0; ANSWER], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let receive = || recvmsg(&connection, &mut [IoSliceMut::new(&mut answer)], &mut beside, RecvFlags::CMSG_CLOEXEC);
    let got = uninterrupted(PATIENCE, receive).map_err(unreached)?;
    let mut files = beside.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let file = files.next();
    if got.bytes != ANSWER {
        return Err(unanswered());
    }
    // It has answered, so it is alive, and the file that was opened before belongs to it.
    life::met(key.process, asked);
    Ok((answer, file))
}

/// The key of memory of another process.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SharedKey {
    process: [u8; 16],
    token: [u8; 8],
    secret: [u8; 16],
}

/// The bytes of a key of memory that other processes can map.
const SHARED_KEY_BYTES: usize = size_of::<SharedKey>();

/// Makes memory known to other ranks, as long as it lives: to ranks of this process, and to ranks of other processes of
/// the host if it is in a file.
pub fn offer(memory: &Arc<Memory>) -> Key {
    let publish = || {
        let mut key = MEMORIES.publish(memory);
        // Without a socket only this process knows it. Another process cannot map it, and reports the reason.
        if memory.file().is_some()
            && let Ok(secret) = server()
        {
            key.0.extend_from_slice(&secret);
        }
        key
    };
    memory.key(publish).clone()
}

/// Returns the memory of a key of `rank`. Maps memory of another process so that `device` reaches it, at `place` if
/// there is one.
///
/// # Errors
/// [`KeyError`].
pub fn take(
    rank: u32,
    key: &[u8],
    device: &Arc<dyn Device>,
    place: impl FnOnce(u64) -> Result<Option<FlatPlace>, String>,
) -> Result<Arc<Memory>, KeyError> {
    look(rank, key, || import(key, device, place))
}

/// Returns the memory of a key of `rank` if this process has it or has mapped it. Does not wait and asks no process.
///
/// # Errors
/// [`KeyError`].
pub fn find(rank: u32, key: &[u8]) -> Result<Arc<Memory>, KeyError> {
    look(rank, key, || mapped(key).ok_or_else(|| "its memory has not been mapped here".to_owned()))
}

/// Returns memory of this process, or what `elsewhere` returns for a key of another process.
fn look(
    rank: u32,
    key: &[u8],
    elsewhere: impl FnOnce() -> Result<Arc<Memory>, String>,
) -> Result<Arc<Memory>, KeyError> {
    let found = match MEMORIES.look(key) {
        Err(Missing::Elsewhere) => elsewhere(),
        found => found.map_err(|missing| missing.to_string()),
    };
    found.map_err(|reason| KeyError { rank, reason })
}

/// Returns memory of another process that is mapped here.
fn mapped(key: &[u8]) -> Option<Arc<Memory>> {
    let import = lock(&MAPPED).get(key.first_chunk::<KEY_BYTES>()?)?.clone();
    lock(&import.memory).upgrade()
}

/// Returns memory of another process, which is requested and mapped unless it is mapped already.
fn import(
    key: &[u8],
    device: &Arc<dyn Device>,
    place: impl FnOnce(u64) -> Result<Option<FlatPlace>, String>,
) -> Result<Arc<Memory>, String> {
    let elsewhere = || Missing::Elsewhere.to_string();
    let shared: SharedKey = bytemuck::try_pod_read_unaligned(key).map_err(|_| elsewhere())?;
    let name = *key.first_chunk::<KEY_BYTES>().ok_or_else(elsewhere)?;
    let mut mapped = lock(&MAPPED);
    mapped.retain(|_, import| Arc::strong_count(import) > 1 || lock(&import.memory).strong_count() > 0);
    let import = mapped.entry(name).or_default().clone();
    drop(mapped);
    // The thread that asks has a deadline.
    let _request = lock(&import.request);
    if let Some(memory) = lock(&import.memory).upgrade() {
        return Ok(memory);
    }
    let (answer, file) = ask(&shared, shared.token)?;
    let (kind, bytes) = (answer[1], u64::from_le_bytes(*answer[2..].first_chunk().expect("8 bytes are left")));
    let file = match (answer[0], file) {
        (outcome::HERE, Some(file)) => file,
        (outcome::GONE, _) => return Err(Missing::Gone.to_string()),
        _ => return Err("its process cannot give the memory as a file".to_owned()),
    };
    let kind = if kind == 0 { MemoryKind::Device } else { MemoryKind::Pinned };
    let memory = Memory::imported(device, SharedFile { file, bytes, kind }, place(bytes)?);
    let memory = memory.map_err(|error| error.to_string())?;
    *lock(&import.memory) = Arc::downgrade(&memory);
    Ok(memory)
}

/// Checks that the process of this key answers. Returns the reason if it does not.
fn greet(key: &SharedKey) -> Result<(), String> {
    match ask(key, [0; 8])? {
        ([outcome::HERE, ..], _) => Ok(()),
        _ => Err("its process answers something else".to_owned()),
    }
}

/// Returns the bytes that describe a device to other processes. They follow its key in this process.
///
/// # Errors
/// The reason for which other processes cannot get memory of this one.
pub fn describe(device: &dyn Device) -> Result<Vec<u8>, String> {
    let mut bytes = server()?.to_vec();
    bytes.push(device.kind() as u8);
    bytes.extend(device.sharing().map(MemorySharing::identity).unwrap_or_default());
    Ok(bytes)
}

/// Returns whether `device` reaches the device that another process described by these bytes, which begin with the key.
pub fn reaches(device: &dyn Device, described: &[u8]) -> bool {
    let Some((key, device_bytes)) = described.split_at_checked(SHARED_KEY_BYTES) else { return false };
    let Some((kind, identity)) = device_bytes.split_first() else { return false };
    let kinds = [DeviceKind::Virtual, DeviceKind::Cuda];
    let Some(kind) = kinds.into_iter().find(|known| *known as u8 == *kind) else { return false };
    let Ok(key) = bytemuck::try_pod_read_unaligned(key) else { return false };
    if !device.sharing().is_some_and(|sharing| sharing.reaches_elsewhere(kind, identity)) {
        return false;
    }
    let greeted = greet(&key);
    if let Some(reason) = greeted.as_ref().err().filter(|reason| *reason != UNREACHED) {
        tracing::warn!(reason, "memory of another process of this host cannot be mapped");
    }
    greeted.is_ok()
}

#[cfg(test)]
mod tests {
    mod neighbours;

    use super::*;
    use crate::virt::VirtualDevice;

    fn device() -> Arc<dyn Device> {
        VirtualDevice::memory_only(0)
    }

    /// Maps memory as another process does: without the table of this one.
    fn elsewhere(key: &[u8]) -> Result<Arc<Memory>, String> {
        import(key, &device(), |_| Ok(None))
    }

    #[test]
    fn memory_in_a_file_is_mapped_once_and_shows_the_same_bytes() {
        let memory = Memory::shared(&device(), MemoryKind::Pinned, 24).unwrap();
        memory.write(0, &[1u64, 2, 3]).unwrap();
        let key = offer(&memory);
        assert_eq!((key.0.len(), &key), (SHARED_KEY_BYTES, &offer(&memory)));
        let mapped = elsewhere(&key.0).unwrap();
        assert_ne!(mapped.address(), memory.address());
        assert_eq!((mapped.bytes(), mapped.kind()), (24, MemoryKind::Pinned));
        mapped.write(8, &[7u64]).unwrap();
        let mut words = [0u64; 3];
        memory.read(0, &mut words).unwrap();
        assert_eq!(words, [1, 7, 3]);
        assert!(Arc::ptr_eq(&mapped, &elsewhere(&key.0).unwrap()));
        assert!(Arc::ptr_eq(&memory, &take(0, &key.0, &device(), |_| Ok(None)).unwrap()));
        // A mapping outlives the memory. Without a mapping the memory is gone.
        drop(memory);
        assert!(elsewhere(&key.0).is_ok());
        drop(mapped);
        assert_eq!(elsewhere(&key.0).unwrap_err(), "its memory is gone");
    }

    #[test]
    fn who_does_not_know_the_secret_gets_nothing() {
        let memory = Memory::shared(&device(), MemoryKind::Device, 8).unwrap();
        let mut key = offer(&memory).0;
        *key.last_mut().unwrap() ^= 1;
        assert!(elsewhere(&key).unwrap_err().contains("another key"));
        let mut unknown = offer(&memory).0;
        unknown[..16].copy_from_slice(&random());
        assert!(elsewhere(&unknown).unwrap_err().contains("another host"));
        for length in 0..SHARED_KEY_BYTES {
            assert!(elsewhere(&key[..length]).is_err());
        }
    }

    #[test]
    fn what_is_mapped_is_found_while_a_process_that_does_not_answer_is_asked() {
        let name = random();
        let stopped =
            net::UnixListener::bind_addr(&SocketAddr::from_abstract_name(socket_name(&name)).unwrap()).unwrap();
        let memory = Memory::shared(&device(), MemoryKind::Device, 8).unwrap();
        let key = offer(&memory).0;
        let here = elsewhere(&key).unwrap();
        let mut silent = key.clone();
        silent[..16].copy_from_slice(&name);
        let other = silent.clone();
        let asking = std::thread::spawn(move || elsewhere(&other).unwrap_err());
        let (connection, _) = stopped.accept().unwrap();
        assert!(Arc::ptr_eq(&super::mapped(&key).unwrap(), &here));
        assert!(find(3, &silent).is_err(), "it is not waited for either");
        drop(connection);
        let error = asking.join().unwrap();
        assert!(error.contains("its process"), "{error}");
        drop(stopped);
        // A program that another test starts has a copy of the socket until it runs.
        let ended = (0..100).any(|_| {
            let ended = elsewhere(&silent).unwrap_err().contains("has ended");
            ended || {
                std::thread::sleep(Duration::from_millis(10));
                false
            }
        });
        assert!(ended, "the next request is answered");
    }

    #[test]
    fn a_request_survives_signals() {
        extern "C" fn ignore(_: libc::c_int) {}
        // Safety: without SA_RESTART; the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore as *const () as usize;
            assert_eq!(libc::sigaction(libc::SIGURG, &action, std::ptr::null_mut()), 0);
        }
        let name = random();
        let address = SocketAddr::from_abstract_name(socket_name(&name)).unwrap();
        let silent = net::UnixListener::bind_addr(&address).unwrap();
        let (sender, receiver) = mpsc::channel();
        let asking = std::thread::spawn(move || {
            // Safety: it has no arguments.
            sender.send(unsafe { libc::pthread_self() }).unwrap();
            ask(&SharedKey { process: name, token: [0; 8], secret: [0; 16] }, [0; 8]).unwrap_err()
        });
        let (thread, connection) = (receiver.recv().unwrap(), silent.accept().unwrap());
        for _ in 0..20 {
            // Safety: the thread waits for the answer.
            assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGURG) }, 0);
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(connection);
        let error = asking.join().unwrap();
        assert!(error.contains("gives no answer"), "{error}");
    }

    #[test]
    fn memory_in_no_file_says_how_to_allocate_it() {
        let memory = Memory::new(&device(), MemoryKind::Device, 8).unwrap();
        let key = offer(&memory);
        assert_eq!(key.0.len(), KEY_BYTES);
        assert!(elsewhere(&key.0).unwrap_err().contains("Memory::shared"));
        assert!(take(3, &key.0, &device(), |_| Ok(None)).is_ok(), "ranks of this process find it");
    }

    #[test]
    fn devices_of_other_processes_are_reached_if_these_answer() {
        let mut described = MEMORIES.publish(&Memory::new(&device(), MemoryKind::Device, 8).unwrap()).0;
        described.extend(describe(&*device()).unwrap());
        assert!(reaches(&*device(), &described));
        let mut other = described.clone();
        other[0] ^= 1;
        assert!(!reaches(&*device(), &other), "nobody listens there");
        described[SHARED_KEY_BYTES] = DeviceKind::Cuda as u8;
        assert!(!reaches(&*device(), &described), "a virtual GPU does not reach a real one");
        for length in 0..SHARED_KEY_BYTES {
            assert!(!reaches(&*device(), &described[..length]));
        }
    }
}
