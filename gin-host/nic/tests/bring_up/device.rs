// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs whose rings lie in memory of a device.

use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::Completion;
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{self, Flags, Post, QueueNumber};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_nic::hca::Access;
use gin_nic::layout::QueueSpec;
use gin_nic::layout::Role;
use gin_nic::*;
use gin_soft_nic_host::{SoftConfig, SoftFabric};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[test]
fn queue_pairs_in_memory_of_a_device_carry_data_and_keep_it_alive() {
    let fabric = SoftFabric::default();
    let device = VirtualDevice::memory_only(0);
    let device: Arc<dyn Device> = device;
    let nic = Nic::open(Arc::new(fabric.add(SoftConfig::ethernet(0))), NicConfig::default()).unwrap();
    let spec = QueueSpec { role: Role::Sender, depth: 8, completions: 8, collapsed: false };
    let queues = DeviceQueues::new(&nic, &device, &[spec; 2], &|| false).unwrap();
    let me = NicPeer { rank: 0, host: "here".to_owned(), port: 1 };
    for (own, other) in [(0, 1), (1, 0)] {
        queues.connect(own, &me, &queues.address(other).unwrap(), &|| false).unwrap();
    }
    let window = Memory::new(&device, MemoryKind::Device, 64).unwrap().whole();
    window.write(0, &[42u64]).unwrap();
    let window = RegisteredSlice::new(&nic, window, Access::SIGNALS).unwrap();

    let info = *queues.infos().next().unwrap();
    let place = info.place.unwrap();
    let queue = QueueNumber::new(info.queue);
    let to = window.remote(8);
    let from = window.local(0, 8);
    let entry = wqe::write(Post { index: 0, queue, flags: Flags::COMPLETION }, to, from);
    queues.slab.write(place.ring, &entry).unwrap();
    let record = Record { receive: Be32::new(0), send: Record::send(1) };
    queues.slab.write(place.record, &[record]).unwrap();
    // Safety: the page is there as long as the queue pairs are.
    let doorbell = unsafe { AtomicU64::from_ptr(info.doorbell as usize as *mut u64) };
    doorbell.store(Doorbell::word(1, queue), Ordering::Release);
    fabric.settle();

    let mut completion = [Completion { words: [0; 8] }];
    queues.slab.read(place.completions, &mut completion).unwrap();
    assert!(completion[0].read(0, info.log_completions).unwrap().result.is_ok());
    let mut seen = [0u64; 2];
    window.slice.read(0, &mut seen).unwrap();
    assert_eq!(seen, [42, 42]);
    drop((queues, window, nic));
    assert_eq!(fabric.objects(), 0);
}
