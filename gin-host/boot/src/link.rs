// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection of two processes that know the same secret: Noise, `NNpsk0_25519_ChaChaPoly_BLAKE2s`.
//!
//! On the wire, each side sends eight bytes that name protocol and version, then a handshake message, then frames.
//! Handshake messages and frames begin with their length in two bytes, high byte first. A length of 0 instead of a
//! handshake message refuses the key. A frame is read only after decryption has proved three properties: a peer with
//! the key sent it, it was not changed, and it is in the order of sending.

use crate::LossCause;
use crate::id::Secret;
use crate::message::{FRAME, VERSION};
use crate::wire::{decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use snow::{Builder, HandshakeState, StatelessTransportState};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Handle;
use tokio::time::timeout;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// The first bytes that each side sends.
const PREAMBLE: [u8; 8] = [b'g', b'i', b'n', b'-', b'b', b'o', b't', VERSION];

/// The bytes of a handshake message: an ephemeral key and a tag.
const HANDSHAKE: usize = 32 + TAG;

const TAG: usize = 16;

/// The reason for which there is no connection, or it has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Late(&'static str),
    #[error("what listens there is not gin: it sends `{}`", .0.escape_ascii())]
    NotGin(Vec<u8>),
    #[error("the peer speaks version {0} of the protocol, this rank version {VERSION}")]
    Version(u8),
    #[error("the peer has another secret")]
    Key,
    #[error("the peer sent what it must not")]
    Malformed,
    #[error("the peer closed the connection")]
    Closed,
}

impl LinkError {
    /// Names a closed connection in one way, whether the peer has read all bytes or not.
    fn or_closed(self) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        match self {
            Self::Io(error)
                if matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof) =>
            {
                Self::Closed
            }
            error => error,
        }
    }
}

/// The cause of the loss of a rank when the connection to it has ended.
impl From<LinkError> for LossCause {
    fn from(error: LinkError) -> Self {
        // A killed process with unread bytes in its sockets ends its connections by an error.
        match error.or_closed() {
            LinkError::Closed => Self::Closed,
            error => Self::Failed { reason: error.to_string() },
        }
    }
}

impl From<snow::Error> for LinkError {
    fn from(_: snow::Error) -> Self {
        Self::Malformed
    }
}

/// The bytes that went over connections, as TCP carries them.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    /// Returns the bytes sent and the bytes received.
    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// Adds bytes that were sent, and bytes that were received.
    fn add(&self, sent: usize, received: usize) {
        self.sent.fetch_add(sent as u64, Ordering::Relaxed);
        self.received.fetch_add(received as u64, Ordering::Relaxed);
    }
}

/// The bytes that each side sends until there is a connection.
const BEGIN: usize = PREAMBLE.len() + 2 + HANDSHAKE;

/// The time limit of each step by which a connection opens.
const STEP: Duration = Duration::from_secs(5);

/// Takes one step of opening a connection. `late` is the error after 5 s, in words.
pub(super) async fn step<T>(
    late: &'static str,
    work: impl Future<Output = Result<T, LinkError>>,
) -> Result<T, LinkError> {
    timeout(STEP, work).await.unwrap_or(Err(LinkError::Late(late)))
}

/// Connects to an address.
pub(super) async fn connect(address: SocketAddr) -> Result<TcpStream, LinkError> {
    step("nothing there accepts the connection within 5 s", async { Ok(TcpStream::connect(address).await?) }).await
}

/// Reads the first bytes of the peer, up to the first one that gin does not send.
async fn preamble(stream: &mut TcpStream) -> Result<[u8; 8], LinkError> {
    let mut bytes = [0; 8];
    let mut length = 0;
    while length < 8 {
        match stream.read(&mut bytes[length..]).await? {
            0 => return Err(LinkError::Closed),
            count => length += count,
        }
        let named = length.min(7);
        if bytes[..named] != PREAMBLE[..named] {
            return Err(LinkError::NotGin(bytes[..length].to_vec()));
        }
    }
    Ok(bytes)
}

/// Reads exactly `N` bytes.
async fn exactly<const N: usize>(stream: &mut TcpStream) -> Result<[u8; N], LinkError> {
    let mut bytes = [0; N];
    match stream.read_exact(&mut bytes).await {
        Ok(_) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(LinkError::Closed),
        Err(error) => Err(error.into()),
    }
}

/// Checks the version in the first bytes of the peer.
fn check([.., version]: [u8; 8]) -> Result<(), LinkError> {
    if version == VERSION { Ok(()) } else { Err(LinkError::Version(version)) }
}

async fn send_handshake(stream: &mut TcpStream, noise: &mut HandshakeState) -> Result<(), LinkError> {
    let mut bytes = [0; 2 + HANDSHAKE];
    bytes[1] = HANDSHAKE as u8;
    noise.write_message(&[], &mut bytes[2..])?;
    Ok(stream.write_all(&bytes).await?)
}

async fn take_handshake(stream: &mut TcpStream, noise: &mut HandshakeState) -> Result<(), LinkError> {
    match usize::from(u16::from_be_bytes(exactly(stream).await?)) {
        0 => return Err(LinkError::Key),
        HANDSHAKE => {}
        _ => return Err(LinkError::Malformed),
    }
    let bytes: [u8; HANDSHAKE] = exactly(stream).await?;
    noise.read_message(&bytes, &mut []).map(drop).map_err(|_| LinkError::Key)
}

/// A connection.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
}

impl Link {
    fn new(stream: TcpStream, noise: HandshakeState, traffic: &Arc<Traffic>) -> Result<Self, LinkError> {
        traffic.add(BEGIN, BEGIN);
        let noise = Arc::new(noise.into_stateless_transport_mode()?);
        let (read, write) = stream.into_split();
        let inbound = Sealed { noise: noise.clone(), nonce: 0, bytes: Vec::new(), traffic: traffic.clone() };
        let outbound = Sealed { noise, nonce: 0, bytes: Vec::new(), traffic: traffic.clone() };
        let inbound = Inbound { half: read, sealed: inbound, plain: Vec::new() };
        Ok(Self { inbound, outbound: Outbound { half: write, sealed: outbound } })
    }

    /// Moves the connection to another runtime.
    pub(super) fn onto(mut self, runtime: &Handle) -> io::Result<Self> {
        let stream = self.inbound.half.reunite(self.outbound.half).map_err(io::Error::other)?.into_std()?;
        let _entered = runtime.enter();
        (self.inbound.half, self.outbound.half) = TcpStream::from_std(stream)?.into_split();
        Ok(self)
    }

    /// Returns whether both ends have the same address. Then they are in one network namespace, and so on one system.
    pub(super) fn is_local(&self) -> bool {
        match (self.inbound.half.local_addr(), self.inbound.half.peer_addr()) {
            (Ok(own), Ok(peer)) => own.ip() == peer.ip(),
            _ => false,
        }
    }

    /// Opens a connection, as the side that connected.
    pub(super) async fn connect(
        mut stream: TcpStream,
        secret: &Secret,
        traffic: &Arc<Traffic>,
    ) -> Result<Self, LinkError> {
        stream.set_nodelay(true)?;
        let greet = async {
            stream.write_all(&PREAMBLE).await?;
            preamble(&mut stream).await
        };
        check(step("what listens there sends nothing within 5 s", greet).await.map_err(LinkError::or_closed)?)?;
        let mut noise = builder(secret)?.build_initiator()?;
        send_handshake(&mut stream, &mut noise).await?;
        step("the peer sends no key within 5 s", take_handshake(&mut stream, &mut noise)).await?;
        Self::new(stream, noise, traffic)
    }

    /// Opens a connection, as the side that was connected to. The peer has proved that it has the key only when a frame
    /// of it has arrived.
    pub(super) async fn accept(
        mut stream: TcpStream,
        secret: &Secret,
        traffic: &Arc<Traffic>,
    ) -> Result<Self, LinkError> {
        stream.set_nodelay(true)?;
        // A peer of another protocol gets no answer.
        let heard = preamble(&mut stream).await?;
        stream.write_all(&PREAMBLE).await?;
        check(heard)?;
        let mut noise = builder(secret)?.build_responder()?;
        if let Err(error) = take_handshake(&mut stream, &mut noise).await {
            if matches!(error, LinkError::Key) {
                let _ = stream.write_all(&[0, 0]).await;
            }
            return Err(error);
        }
        send_handshake(&mut stream, &mut noise).await?;
        Self::new(stream, noise, traffic)
    }

    /// Sends a message that is a whole frame.
    pub(super) async fn send(&mut self, message: &impl Serialize) -> Result<(), LinkError> {
        self.outbound.frame(&encode(message)).await
    }

    /// Sends a message that opens a connection, and receives the answer.
    pub(super) async fn ask<T: DeserializeOwned>(&mut self, message: &impl Serialize) -> Result<T, LinkError> {
        self.send(message).await?;
        step("the peer does not answer within 5 s", self.receive()).await
    }

    /// Receives a message that is a whole frame.
    pub(super) async fn receive<T: DeserializeOwned>(&mut self) -> Result<T, LinkError> {
        decode(self.inbound.frame().await?.ok_or(LinkError::Closed)?).ok_or(LinkError::Malformed)
    }
}

fn builder(secret: &Secret) -> Result<Builder<'_>, LinkError> {
    Ok(Builder::new(PATTERN.parse()?).prologue(&PREAMBLE)?.psk(0, &secret.0)?)
}

/// The encryption of one direction.
#[derive(Debug)]
struct Sealed {
    noise: Arc<StatelessTransportState>,
    nonce: u64,
    /// A frame, encrypted.
    bytes: Vec<u8>,
    traffic: Arc<Traffic>,
}

/// The stream from the peer.
#[derive(Debug)]
pub(super) struct Inbound {
    half: OwnedReadHalf,
    sealed: Sealed,
    plain: Vec<u8>,
}

impl Inbound {
    /// Returns the next frame; `None` if the peer has closed its side between two frames.
    pub(super) async fn frame(&mut self) -> Result<Option<&[u8]>, LinkError> {
        let mut length = [0; 2];
        if self.half.read(&mut length[..1]).await? == 0 {
            return Ok(None);
        }
        self.half.read_exact(&mut length[1..]).await?;
        let length = usize::from(u16::from_be_bytes(length));
        let Some(plain) = length.checked_sub(TAG) else { return Err(LinkError::Malformed) };
        let Self { half, sealed, .. } = self;
        sealed.bytes.resize(length, 0);
        self.plain.resize(plain, 0);
        half.read_exact(&mut sealed.bytes).await?;
        sealed.noise.read_message(sealed.nonce, &sealed.bytes, &mut self.plain)?;
        sealed.nonce += 1;
        sealed.traffic.add(0, 2 + length);
        Ok(Some(&self.plain))
    }
}

/// The stream to the peer.
#[derive(Debug)]
pub(super) struct Outbound {
    half: OwnedWriteHalf,
    sealed: Sealed,
}

impl Outbound {
    /// Sends a frame of at most [`FRAME`] bytes.
    pub(super) async fn frame(&mut self, plain: &[u8]) -> Result<(), LinkError> {
        if plain.len() > FRAME {
            return Err(LinkError::Malformed);
        }
        let length = plain.len() + TAG;
        let Self { half, sealed } = self;
        sealed.bytes.resize(2 + length, 0);
        // It fits, because `FRAME` and the tag fit into 16 bits.
        sealed.bytes[..2].copy_from_slice(&(length as u16).to_be_bytes());
        sealed.noise.write_message(sealed.nonce, plain, &mut sealed.bytes[2..])?;
        sealed.nonce += 1;
        half.write_all(&sealed.bytes).await?;
        sealed.traffic.add(sealed.bytes.len(), 0);
        Ok(())
    }

    /// Ends this direction of the connection.
    pub(super) async fn finish(&mut self) -> Result<(), LinkError> {
        Ok(self.half.shutdown().await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Root;
    use tokio::net::TcpListener;

    /// Runs both sides on one thread.
    fn pair<A, B>(client: impl AsyncFnOnce(TcpStream) -> A, server: impl AsyncFnOnce(TcpStream) -> B) -> (A, B) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::join!(async { client(TcpStream::connect(address).await.unwrap()).await }, async {
                server(listener.accept().await.unwrap().0).await
            })
        })
    }

    fn secret(text: &str) -> Secret {
        Root::new(text.as_bytes()).unwrap().secret()
    }

    #[test]
    fn frames_of_every_size_arrive_as_they_were_sent() {
        let key = secret("the same on both sides");
        let sizes = [0, 1, 1000, FRAME];
        let (sent, received) = pair(
            async |stream| {
                let mut link = Link::connect(stream, &key, &Arc::default()).await?;
                for size in sizes {
                    link.outbound.frame(&vec![7; size]).await?;
                }
                assert!(matches!(link.outbound.frame(&vec![7; FRAME + 1]).await, Err(LinkError::Malformed)));
                link.outbound.finish().await
            },
            async |stream| {
                let mut link = Link::accept(stream, &key, &Arc::default()).await?;
                for size in sizes {
                    assert_eq!(link.inbound.frame().await?, Some(&vec![7; size][..]));
                }
                assert_eq!(link.inbound.frame().await?, None);
                Ok::<_, LinkError>(())
            },
        );
        sent.unwrap();
        received.unwrap();
    }

    #[test]
    fn both_sides_learn_that_the_secrets_differ() {
        let (client, server) = pair(
            async |stream| Link::connect(stream, &secret("what one side believes"), &Arc::default()).await.map(drop),
            async |stream| Link::accept(stream, &secret("what the other believes"), &Arc::default()).await.map(drop),
        );
        assert!(matches!(client, Err(LinkError::Key)), "{client:?}");
        assert!(matches!(server, Err(LinkError::Key)), "{server:?}");
    }

    #[test]
    fn both_sides_learn_that_versions_differ() {
        let (heard, server) = pair(
            async |mut stream| {
                let mut other = PREAMBLE;
                other[7] = VERSION + 1;
                stream.write_all(&other).await.unwrap();
                exactly::<8>(&mut stream).await.unwrap()
            },
            async |stream| Link::accept(stream, &Root::insecure().secret(), &Arc::default()).await.map(drop),
        );
        assert!(matches!(server, Err(LinkError::Version(version)) if version == VERSION + 1), "{server:?}");
        assert_eq!(heard, PREAMBLE);
        let (client, ()) = pair(
            async |stream| Link::connect(stream, &Root::insecure().secret(), &Arc::default()).await.map(drop),
            async |mut stream| {
                let mut other = PREAMBLE;
                other[7] = VERSION + 1;
                stream.write_all(&other).await.unwrap();
                let _ = exactly::<8>(&mut stream).await;
            },
        );
        assert!(matches!(client, Err(LinkError::Version(_))), "{client:?}");
    }

    #[test]
    fn a_frame_that_was_changed_repeated_or_left_out_ends_the_connection() {
        // Damages to the sealed frames 0, 1, 2 on their way.
        let damages: [fn(&mut Vec<Vec<u8>>); 4] = [
            |frames| frames[1][5] ^= 1,
            |frames| frames[1] = frames[0].clone(),
            |frames| drop(frames.remove(1)),
            |frames| frames.swap(1, 2),
        ];
        for damage in damages {
            let key = Root::insecure().secret();
            let (client, server) = pair(
                async |stream| {
                    let mut link = Link::connect(stream, &key, &Arc::default()).await?;
                    let mut frames = Vec::new();
                    for (nonce, text) in (0..).zip([b"first", b"secnd", b"third"]) {
                        let mut sealed = vec![0; 2 + text.len() + TAG];
                        sealed[1] = (text.len() + TAG) as u8;
                        link.outbound.sealed.noise.write_message(nonce, text, &mut sealed[2..])?;
                        frames.push(sealed);
                    }
                    damage(&mut frames);
                    link.outbound.half.write_all(&frames.concat()).await?;
                    Ok::<_, LinkError>(link)
                },
                async |stream| {
                    let mut link = Link::accept(stream, &key, &Arc::default()).await?;
                    assert_eq!(link.inbound.frame().await?, Some(&b"first"[..]));
                    let second = link.inbound.frame().await.map(|frame| frame.map(<[u8]>::to_vec));
                    assert!(matches!(second, Err(LinkError::Malformed)), "{second:?}");
                    Ok::<_, LinkError>(())
                },
            );
            drop(client.unwrap());
            server.unwrap();
        }
    }
}
