// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as plain threads, and a host-side poster that stands in for a kernel.
#![allow(dead_code, reason = "each test binary uses its part")]

use gin_abi::descriptor::{Descriptor, RemoteSignal, SignalTarget, Transfer, WORDS, WindowOffset};
use gin_abi::handle::{NEAR_WORDS, QUEUE_NEAR};
use gin_abi::{CommHandle, ContextData, Deadline};
use gin_boot::{Bootstrap, BootstrapError, InProcess};
use gin_device::gin::{Order, Sharing};
use gin_device::internal::queue::{Producer, Queue};
use gin_device::internal::signal_words::Words;
use gin_device::internal::status::{Status, WaitError};
use gin_device::sys::{Global, GlobalWord};
use gin_gpu::Device;
use gin_gpu::virt::VirtualDevice;
use gin_host::comm::{CommConfig, CommError, Communicator, Requirements};
use gin_net::peer::PeerNetwork;
use gin_net::{Endpoint, Network, NetworkFactory};
use std::sync::Arc;
use std::time::Duration;

/// Ample for a busy machine. Only a wait that hangs takes this long.
pub const LIMIT: Deadline = Deadline::after_ms(20_000);

pub fn peer() -> NetworkFactory {
    network(|endpoint| Box::new(PeerNetwork::new(endpoint)))
}

pub fn network(make: impl Fn(&Endpoint) -> Box<dyn Network> + Send + Sync + 'static) -> NetworkFactory {
    Arc::new(make)
}

pub fn config(network: NetworkFactory) -> CommConfig {
    let limit = Duration::from_secs(20);
    CommConfig::default().connecting(limit).drain(limit).seed(1).network(network)
}

/// Runs `body` as each of `count` ranks. Returns the results by rank.
pub fn ranks<T: Send>(count: u32, body: impl Fn(Arc<dyn Bootstrap>, Arc<dyn Device>) -> T + Sync) -> Vec<T> {
    let job = InProcess::job(count).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = job
            .into_iter()
            .map(|bootstrap| {
                let body = &body;
                scope.spawn(move || {
                    let bootstrap = bootstrap.with_timeout(Duration::from_secs(20));
                    let device: Arc<dyn Device> = VirtualDevice::memory_only(bootstrap.rank());
                    body(Arc::new(bootstrap), device)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `body` with each of `count` ranks' communicators.
pub fn with_comm<T: Send>(
    count: u32,
    config: &CommConfig,
    requirements: &Requirements,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    ranks(count, |bootstrap, device| {
        let comm = Communicator::new(bootstrap, device, config.clone());
        comm.initialise(requirements).unwrap();
        body(&comm)
    })
}

/// Posts to the queues of a communicator as its kernels do.
#[derive(Clone, Copy)]
pub struct Poster {
    handle: CommHandle,
}

impl Poster {
    pub fn new(comm: &Communicator) -> Self {
        Self { handle: comm.device().unwrap().handle() }
    }

    fn data(&self, context: u32) -> ContextData {
        assert!(context < self.handle.contexts);
        // Safety: the table has an entry for each context; the communicator outlives the test's body.
        unsafe { *(self.handle.context_table as usize as *const ContextData).add(context as usize) }
    }

    pub fn status(&self) -> Status<Global> {
        // Safety: the handle's addresses are valid.
        unsafe {
            Status {
                host: GlobalWord::new(self.handle.host_status),
                kernel: GlobalWord::new(self.handle.kernel_status),
                copy: GlobalWord::new(self.handle.kernel_status_copy),
            }
        }
    }

    pub fn producer(&self, context: u32) -> Producer<Global, WORDS> {
        let data = self.data(context);
        // Safety: as above.
        unsafe {
            let queue = Queue {
                slots: GlobalWord::new(data.slots),
                producer_index: GlobalWord::new(data.producer_index),
                near: GlobalWord::new(data.producer_index + QUEUE_NEAR),
                consumer_index: GlobalWord::new(data.consumer_index),
                completion_index: GlobalWord::new(data.completion_index),
                oldest_incomplete: GlobalWord::new(data.oldest_incomplete),
                depth_log2: data.depth_log2.into(),
                depth_mask: data.depth_mask,
            };
            Producer { queue, status: self.status() }
        }
    }

    pub fn post(&self, context: u32, request: Descriptor) -> Result<(), WaitError> {
        self.post_words(context, request.encode())
    }

    pub fn post_words(&self, context: u32, words: [u64; WORDS]) -> Result<(), WaitError> {
        let producer = self.producer(context);
        let posted = producer.post(words, |seen| producer.claim_if_room(0, seen, Sharing::Gpu), LIMIT);
        posted.map(|_| ()).map_err(|(stop, _)| stop)
    }

    pub fn flush(&self, context: u32) -> Result<(), WaitError> {
        let producer = self.producer(context);
        producer.wait_all(producer.position(), LIMIT, Order::Acquire)
    }

    pub fn flush_peer(&self, context: u32, peer: u32) -> Result<(), WaitError> {
        let producer = self.producer(context);
        producer.wait_peer(peer, producer.position(), LIMIT, Order::Acquire)
    }

    fn signal_words(&self, context: u32, id: u32) -> Words<Global> {
        let (data, offset) = (self.data(context), 8 * u64::from(id));
        // Safety: as above.
        unsafe {
            Words {
                gpu: (data.signal_gpu != 0).then(|| GlobalWord::new(data.signal_gpu + offset)),
                nic: None,
                cpu: Some(GlobalWord::new(data.signal_cpu + offset)),
                near: GlobalWord::new(data.signal_near + NEAR_WORDS * offset),
                mailbox: (data.mailbox != 0).then(|| GlobalWord::new(data.mailbox)),
            }
        }
    }

    pub fn wait_signal(&self, context: u32, id: u32, least: u64) -> Result<u64, WaitError> {
        self.signal_words(context, id).wait(&self.status(), least, 64, LIMIT, || {}).map_err(|(stop, _)| stop)
    }

    pub fn signal(&self, context: u32, id: u32) -> u64 {
        self.signal_words(context, id).read(64)
    }

    fn counter_words(&self, context: u32, id: u32) -> Words<Global> {
        let (data, offset) = (self.data(context), 8 * u64::from(id));
        // Safety: as above.
        unsafe {
            Words {
                gpu: None,
                nic: None,
                cpu: Some(GlobalWord::new(data.counters + offset)),
                near: GlobalWord::new(data.counter_near + NEAR_WORDS * offset),
                mailbox: None,
            }
        }
    }

    pub fn wait_counter(&self, context: u32, id: u32, least: u64) -> Result<u64, WaitError> {
        self.counter_words(context, id).wait(&self.status(), least, 56, LIMIT, || {}).map_err(|(stop, _)| stop)
    }

    pub fn counter(&self, context: u32, id: u32) -> u64 {
        self.counter_words(context, id).read(56)
    }
}

/// Returns a request without signal or counter.
pub fn request(peer: u32, transfer: Transfer) -> Descriptor {
    Descriptor { peer, transfer, signal: None, counter: None, more: false }
}

/// Returns a put of `bytes` bytes from `from` to `to`, each a window and an offset.
pub fn put(peer: u32, to: (u32, u64), from: (u32, u64), bytes: u64) -> Descriptor {
    let transfer = Transfer::Put {
        source: WindowOffset { window: from.0, offset: from.1 },
        destination: WindowOffset { window: to.0, offset: to.1 },
        bytes,
    };
    request(peer, transfer)
}

pub fn get(peer: u32, to: (u32, u64), from: (u32, u64), bytes: u64) -> Descriptor {
    let transfer = Transfer::Get {
        source: WindowOffset { window: from.0, offset: from.1 },
        destination: WindowOffset { window: to.0, offset: to.1 },
        bytes,
    };
    request(peer, transfer)
}

pub fn strong(id: u32, amount: u64) -> Option<RemoteSignal> {
    Some(RemoteSignal { target: SignalTarget::Id(id), amount, strong: true })
}

pub fn weak(id: u32, amount: u64) -> Option<RemoteSignal> {
    Some(RemoteSignal { target: SignalTarget::Id(id), amount, strong: false })
}

/// Returns the errors of all ranks.
pub fn errors<T: std::fmt::Debug>(results: Vec<Result<T, CommError>>) -> Vec<CommError> {
    results.into_iter().map(|result| result.unwrap_err()).collect()
}

pub fn is_bootstrap(error: &CommError) -> bool {
    matches!(error, CommError::Bootstrap(BootstrapError::Lost { .. } | BootstrapError::Aborted { .. }))
}

impl Poster {
    /// Resets signal `id` and counter `id` of a context.
    pub fn reset(&self, context: u32, id: u32) {
        self.signal_words(context, id).reset();
        self.counter_words(context, id).reset();
    }

    /// Waits for the signal at byte `offset` of a window.
    pub fn wait_va<T: bytemuck::Pod>(
        &self,
        window: &gin_host::comm::Window<T>,
        offset: u64,
        least: u64,
    ) -> Result<u64, WaitError> {
        // Safety: the window is registered, and the offset is in it.
        let words = unsafe {
            let data = &*(window.handle().data as usize as *const gin_abi::WindowData);
            let word = |plane: u64| (plane != 0).then(|| GlobalWord::new(plane + offset));
            Words {
                gpu: word(data.va_gpu),
                nic: None,
                cpu: word(data.va_cpu),
                near: GlobalWord::new(data.va_near + NEAR_WORDS * offset),
                mailbox: None,
            }
        };
        words.wait(&self.status(), least, 64, LIMIT, || {}).map_err(|(stop, _)| stop)
    }
}
