// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections that have not yet proved that they have the secret.

use crate::error::usual_cause;
use crate::link::LinkError;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// The time in which a connection must prove that it has the secret.
pub(crate) const GREETING: Duration = Duration::from_secs(5);

/// The maximum number of connections at a time that have not proved it.
const STRANGERS: usize = 128;

/// The time that such a connection has before another one may take its place.
const SURE: Duration = Duration::from_secs(1);

/// The pauses between attempts to connect or to accept: the first and the longest.
pub(crate) const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// Runs the work with a time limit.
pub(crate) async fn limited<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, LinkError>>,
) -> Result<T, LinkError> {
    timeout(limit, work).await.unwrap_or_else(|_| Err(LinkError::Io(std::io::ErrorKind::TimedOut.into())))
}

/// Accepts connections, and greets each one in a task.
pub(crate) async fn accept<T>(listener: TcpListener, rank: u32, greet: impl Fn(TcpStream) -> T)
where
    T: Future<Output = Result<(), LinkError>> + Send + 'static,
{
    // With the time when each began; the oldest first.
    let mut strangers: VecDeque<(Instant, AbortHandle)> = VecDeque::new();
    let mut tasks = JoinSet::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // For example too many descriptors are open. Others may be closed meanwhile.
                tracing::warn!(rank, "cannot accept a connection: {error}{}", usual_cause(&error));
                sleep(PAUSES.1).await;
                continue;
            }
        };
        loop {
            while tasks.try_join_next().is_some() {}
            strangers.retain(|(_, task)| !task.is_finished());
            match strangers.front() {
                Some((since, task)) if strangers.len() >= STRANGERS => match SURE.checked_sub(since.elapsed()) {
                    // A peer that knows the secret has proved it long ago.
                    None => task.abort(),
                    Some(left) => sleep(left.min(PAUSES.0)).await,
                },
                _ => break,
            }
            tokio::task::yield_now().await;
        }
        let greeting = greet(stream);
        let task = tasks.spawn(async move {
            if let Err(error) = greeting.await {
                tracing::debug!(rank, %error, "a connection failed before it was an edge");
            }
        });
        strangers.push_back((Instant::now(), task));
    }
}
