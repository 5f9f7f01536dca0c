// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection of two processes that know the same secret: Noise, `NNpsk0_25519_ChaChaPoly_BLAKE2s`.
//!
//! On the wire: eight bytes from each side, which name protocol and version; two handshake messages; then frames. Each
//! of these but the first begins with its length in two bytes, high byte first. A length of 0 in place of a handshake
//! message says that the key is not taken. Nothing of a frame is looked at before it is known to come from a peer with
//! the key, as it was sent and in the order in which it was sent.

use super::id::Key;
use super::message::{FRAME, VERSION, Whole};
use crate::LossCause;
use snow::{Builder, HandshakeState, StatelessTransportState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Handle;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// The first bytes of each side.
const PREAMBLE: [u8; 8] = [b'g', b'i', b'n', b'-', b'b', b'o', b't', VERSION];

/// Bytes of a handshake message: an ephemeral key and a tag.
const HANDSHAKE: usize = 32 + TAG;

const TAG: usize = 16;

/// Why there is no connection, or no longer.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the peer does not speak gin's protocol")]
    NotGin,
    #[error("the peer speaks version {0} of the protocol, this rank version {VERSION}")]
    Version(u8),
    #[error("the peer has another secret")]
    Key,
    #[error("the peer sent what it must not")]
    Malformed,
    #[error("the peer closed the connection")]
    Closed,
}

/// The meaning, for a rank, of the end of the connection to it.
impl From<LinkError> for LossCause {
    fn from(error: LinkError) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        match error {
            LinkError::Closed => Self::Closed,
            // A process that is killed with something unread in its sockets is seen like this.
            LinkError::Io(error)
                if matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof) =>
            {
                Self::Closed
            }
            error => Self::Failed { reason: error.to_string() },
        }
    }
}

impl From<snow::Error> for LinkError {
    fn from(_: snow::Error) -> Self {
        Self::Malformed
    }
}

/// Bytes that went over connections, as TCP carries them.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    /// Bytes sent, and bytes received.
    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// Both together.
    pub(super) fn both(&self) -> u64 {
        let (sent, received) = self.bytes();
        sent + received
    }

    fn sends(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn receives(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Bytes that each side sends until there is a connection.
const BEGIN: usize = PREAMBLE.len() + 2 + HANDSHAKE;

/// Reads exactly `N` bytes.
async fn exactly<const N: usize>(stream: &mut TcpStream) -> Result<[u8; N], LinkError> {
    let mut bytes = [0; N];
    match stream.read_exact(&mut bytes).await {
        Ok(_) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(LinkError::Closed),
        Err(error) => Err(error.into()),
    }
}

/// Looks at what the peer sends first.
fn check(preamble: [u8; 8]) -> Result<(), LinkError> {
    match (preamble[..7] == PREAMBLE[..7], preamble[7]) {
        (false, _) => Err(LinkError::NotGin),
        (true, VERSION) => Ok(()),
        (true, version) => Err(LinkError::Version(version)),
    }
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
        traffic.sends(BEGIN);
        traffic.receives(BEGIN);
        let noise = Arc::new(noise.into_stateless_transport_mode()?);
        let (read, write) = stream.into_split();
        Ok(Self {
            inbound: Inbound {
                half: read,
                noise: noise.clone(),
                nonce: 0,
                sealed: Vec::new(),
                plain: Vec::new(),
                traffic: traffic.clone(),
            },
            outbound: Outbound { half: write, noise, nonce: 0, sealed: Vec::new(), traffic: traffic.clone() },
        })
    }

    /// Has another runtime serve it.
    pub(super) fn onto(mut self, runtime: &Handle) -> io::Result<Self> {
        let stream = self.inbound.half.reunite(self.outbound.half).map_err(io::Error::other)?.into_std()?;
        let _entered = runtime.enter();
        (self.inbound.half, self.outbound.half) = TcpStream::from_std(stream)?.into_split();
        Ok(self)
    }

    /// Returns whether both ends have one address: then they are in one network namespace, and so on one system.
    pub(super) fn is_local(&self) -> bool {
        match (self.inbound.half.local_addr(), self.inbound.half.peer_addr()) {
            (Ok(own), Ok(peer)) => own.ip() == peer.ip(),
            _ => false,
        }
    }

    /// As the side that connected.
    pub(super) async fn connect(mut stream: TcpStream, key: &Key, traffic: &Arc<Traffic>) -> Result<Self, LinkError> {
        stream.set_nodelay(true)?;
        stream.write_all(&PREAMBLE).await?;
        check(exactly(&mut stream).await?)?;
        let mut noise = builder(key)?.build_initiator()?;
        send_handshake(&mut stream, &mut noise).await?;
        take_handshake(&mut stream, &mut noise).await?;
        Self::new(stream, noise, traffic)
    }

    /// As the side that was connected to. The peer is not known to have the key before it has sent a frame.
    pub(super) async fn accept(mut stream: TcpStream, key: &Key, traffic: &Arc<Traffic>) -> Result<Self, LinkError> {
        stream.set_nodelay(true)?;
        let heard = exactly(&mut stream).await?;
        // A peer that speaks another protocol gets no answer.
        if heard[..7] == PREAMBLE[..7] {
            stream.write_all(&PREAMBLE).await?;
        }
        check(heard)?;
        let mut noise = builder(key)?.build_responder()?;
        if let Err(error) = take_handshake(&mut stream, &mut noise).await {
            if matches!(error, LinkError::Key) {
                let _ = stream.write_all(&[0, 0]).await;
            }
            return Err(error);
        }
        send_handshake(&mut stream, &mut noise).await?;
        Self::new(stream, noise, traffic)
    }

    pub(super) async fn send<T: Whole>(&mut self, message: &T) -> Result<(), LinkError> {
        self.outbound.frame(&message.to_bytes()).await
    }

    pub(super) async fn take<T: Whole>(&mut self) -> Result<T, LinkError> {
        let frame = self.inbound.frame().await?.ok_or(LinkError::Closed)?;
        T::from_bytes(frame).ok_or(LinkError::Malformed)
    }
}

fn builder(key: &Key) -> Result<Builder<'_>, LinkError> {
    let pattern = PATTERN.parse().map_err(LinkError::from)?;
    Ok(Builder::new(pattern).prologue(&PREAMBLE)?.psk(0, &key.0)?)
}

/// The stream from the peer.
#[derive(Debug)]
pub(super) struct Inbound {
    half: OwnedReadHalf,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
    sealed: Vec<u8>,
    plain: Vec<u8>,
    traffic: Arc<Traffic>,
}

impl Inbound {
    /// The next frame; `None` when the peer has closed its side between two frames.
    pub(super) async fn frame(&mut self) -> Result<Option<&[u8]>, LinkError> {
        let mut length = [0; 2];
        if self.half.read(&mut length[..1]).await? == 0 {
            return Ok(None);
        }
        self.half.read_exact(&mut length[1..]).await?;
        let length = usize::from(u16::from_be_bytes(length));
        let Some(plain) = length.checked_sub(TAG) else { return Err(LinkError::Malformed) };
        self.sealed.resize(length, 0);
        self.plain.resize(plain, 0);
        self.half.read_exact(&mut self.sealed).await?;
        self.noise.read_message(self.nonce, &self.sealed, &mut self.plain)?;
        self.nonce += 1;
        self.traffic.receives(2 + length);
        Ok(Some(&self.plain))
    }
}

/// The stream to the peer.
#[derive(Debug)]
pub(super) struct Outbound {
    half: OwnedWriteHalf,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
    sealed: Vec<u8>,
    traffic: Arc<Traffic>,
}

impl Outbound {
    /// Sends a frame of at most [`FRAME`] bytes.
    pub(super) async fn frame(&mut self, plain: &[u8]) -> Result<(), LinkError> {
        if plain.len() > FRAME {
            return Err(LinkError::Malformed);
        }
        let length = plain.len() + TAG;
        self.sealed.resize(2 + length, 0);
        // It fits: that is what `FRAME` is.
        self.sealed[..2].copy_from_slice(&(length as u16).to_be_bytes());
        self.noise.write_message(self.nonce, plain, &mut self.sealed[2..])?;
        self.nonce += 1;
        self.half.write_all(&self.sealed).await?;
        self.traffic.sends(self.sealed.len());
        Ok(())
    }

    /// Says that nothing more comes.
    pub(super) async fn finish(&mut self) -> Result<(), LinkError> {
        Ok(self.half.shutdown().await?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::id::Secret;
    use super::*;
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
        Secret::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn frames_of_every_size_arrive_as_they_were_sent() {
        let key = secret("the same on both sides");
        let sizes = [0, 1, 1000, FRAME];
        let (sent, received) = pair(
            async |stream| {
                let mut link = Link::connect(stream, key.key(), &Arc::default()).await?;
                for size in sizes {
                    link.outbound.frame(&vec![7; size]).await?;
                }
                assert!(matches!(link.outbound.frame(&vec![7; FRAME + 1]).await, Err(LinkError::Malformed)));
                link.outbound.finish().await
            },
            async |stream| {
                let mut link = Link::accept(stream, key.key(), &Arc::default()).await?;
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
            async |stream| {
                Link::connect(stream, secret("what one side believes").key(), &Arc::default()).await.map(drop)
            },
            async |stream| {
                Link::accept(stream, secret("what the other believes").key(), &Arc::default()).await.map(drop)
            },
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
            async |stream| Link::accept(stream, Secret::insecure().key(), &Arc::default()).await.map(drop),
        );
        assert!(matches!(server, Err(LinkError::Version(version)) if version == VERSION + 1), "{server:?}");
        assert_eq!(heard, PREAMBLE);
        let (client, ()) = pair(
            async |stream| Link::connect(stream, Secret::insecure().key(), &Arc::default()).await.map(drop),
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
            let key = Secret::insecure();
            let (client, server) = pair(
                async |stream| {
                    let mut link = Link::connect(stream, key.key(), &Arc::default()).await?;
                    let mut frames = Vec::new();
                    for (nonce, text) in (0..).zip([b"first", b"secnd", b"third"]) {
                        let mut sealed = vec![0; 2 + text.len() + TAG];
                        sealed[1] = (text.len() + TAG) as u8;
                        link.outbound.noise.write_message(nonce, text, &mut sealed[2..])?;
                        frames.push(sealed);
                    }
                    damage(&mut frames);
                    link.outbound.half.write_all(&frames.concat()).await?;
                    Ok::<_, LinkError>(link)
                },
                async |stream| {
                    let mut link = Link::accept(stream, key.key(), &Arc::default()).await?;
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
