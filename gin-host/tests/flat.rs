// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows whose parts have fixed distances, and windows whose parts are at arbitrary addresses.

mod common;

use common::{config, peer, with_comm};
use gin_gpu::GpuError;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{CommError, Requirements, WindowFlags};

/// Returns the address of each rank's part, by rank.
fn addresses(comm: &gin_host::comm::Communicator, own: u64) -> Vec<u64> {
    let all = comm.bootstrap().all_gather(&own.to_le_bytes()).unwrap();
    all.iter().map(|bytes| u64::from_le_bytes(bytes.as_slice().try_into().unwrap())).collect()
}

#[test]
fn parts_of_an_allocated_window_lie_at_a_fixed_distance_whatever_their_lengths() {
    with_comm(3, &config(peer()), &Requirements::default(), |comm| {
        let rank = comm.rank();
        for lengths in [[0, 1, 2], [5000, 0, 1], [0, 0, 0], [7, 7, 7]] {
            let window = comm.alloc_window::<u64>(lengths[rank as usize], WindowFlags::NONE).unwrap();
            let stride = window.stride().unwrap();
            assert!(stride.is_power_of_two() && stride.is_multiple_of(1 << 32));
            let all = addresses(comm, window.handle().base);
            assert_eq!((all[1] - all[0], all[2] - all[1]), (stride, stride), "{lengths:?}");
            let handle = window.handle();
            assert_eq!(u64::from(handle.stride) << 32, stride);
            assert_eq!((handle.rank, handle.lsa_first, handle.lsa_reach), (rank, 0, 3));
            assert_eq!(window.read_all().unwrap(), vec![0; lengths[rank as usize]]);
            window.fill(u64::MAX).unwrap();
        }
        comm.destroy().unwrap();
    });
}

#[test]
fn each_team_has_addresses_of_its_own() {
    let config = config(peer()).lsa_size(Some(2));
    with_comm(4, &config, &Requirements::default(), |comm| {
        let window = comm.alloc_window::<u8>(1, WindowFlags::SIGNALS).unwrap();
        let (handle, first) = (window.handle(), comm.rank() / 2 * 2);
        assert_eq!((handle.rank, handle.lsa_first, handle.lsa_reach), (comm.rank(), first, 2));
        let all = addresses(comm, handle.base);
        assert_eq!(all[first as usize + 1] - all[first as usize], window.stride().unwrap());
        comm.destroy().unwrap();
    });
}

#[test]
fn memory_of_the_user_lies_where_it_is() {
    with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let memory = Memory::new(comm.gpu(), MemoryKind::Device, 64).unwrap();
        let window = comm.register::<u8>(&memory.slice(8..16).unwrap(), WindowFlags::NONE).unwrap();
        let handle = window.handle();
        assert_eq!((handle.base, handle.stride, handle.lsa_reach), (memory.address() + 8, 0, 0));
        assert_eq!(window.stride(), None);
        comm.destroy().unwrap();
    });
}

#[test]
fn a_place_is_used_again_only_when_it_is_free_on_all_ranks() {
    with_comm(3, &config(peer()), &Requirements::default(), |comm| {
        let alloc = || comm.alloc_window::<u8>(100, WindowFlags::NONE).unwrap();
        let base = |window: &gin_host::comm::Window<u8>| window.handle().base;
        let (first, second) = (alloc(), alloc());
        let place = base(&first);
        assert!(base(&second) > place);
        first.fill(7).unwrap();
        // Rank 1 keeps only its own part.
        let held = (comm.rank() == 1).then(|| first.memory().clone());
        comm.deregister(&first).unwrap();
        drop(first);
        comm.bootstrap().barrier().unwrap();
        let third = alloc();
        assert!(base(&third) > base(&second), "rank 1 still uses the first position");
        if let Some(held) = &held {
            let mut bytes = [0u8; 100];
            held.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [7; 100], "its bytes are unchanged");
        }
        drop(held);
        comm.bootstrap().barrier().unwrap();
        let fourth = alloc();
        assert_eq!(base(&fourth), place, "the position is free on every rank now");
        assert_eq!(fourth.read_all().unwrap(), [0; 100], "the memory is zero again");
        comm.destroy().unwrap();
    });
}

#[test]
fn a_window_that_finds_no_place_is_refused_on_all_ranks_and_costs_nothing() {
    with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let small = comm.alloc_window::<u8>(1, WindowFlags::NONE).unwrap();
        let stride = small.stride().unwrap();
        for bytes in [[u64::MAX; 2], [stride, 1], [0, stride - 1]] {
            let len = usize::try_from(bytes[comm.rank() as usize]).unwrap();
            let error = comm.alloc_window::<u8>(len, WindowFlags::NONE).unwrap_err();
            let CommError::NoPlace { bytes: longest, longest: free, stride: all } = error else {
                panic!("{error:?}");
            };
            assert_eq!((longest, all), (bytes[0].max(bytes[1]), stride));
            assert!(free < stride && free + (1 << 20) > stride, "{free} of {stride} bytes");
        }
        let again = comm.alloc_window::<u8>(10, WindowFlags::NONE).unwrap();
        assert_eq!(again.id(), 1);
        comm.destroy().unwrap();
    });
}

#[test]
fn ranks_of_which_one_allocates_and_one_registers_learn_so() {
    with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let error = if comm.rank() == 0 {
            comm.alloc_window::<u8>(8, WindowFlags::NONE).unwrap_err()
        } else {
            let memory = Memory::new(comm.gpu(), MemoryKind::Device, 8).unwrap();
            comm.register::<u8>(&memory.whole(), WindowFlags::NONE).unwrap_err()
        };
        let (other, calls) = (1 - comm.rank(), ["allocate a window", "register a window"]);
        let expected = CommError::OutOfStep {
            rank: other,
            theirs: calls[other as usize].to_owned(),
            own: calls[comm.rank() as usize],
        };
        assert_eq!(error, expected);
    });
}

#[test]
fn memory_that_the_program_has_becomes_a_window_and_stays_the_programs() {
    let mut parts = [[5u64; 8]; 2];
    let addresses = parts.each_mut().map(|part| part.as_mut_ptr().expose_provenance() as u64);
    with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let device = comm.gpu().downcast::<VirtualDevice>().unwrap();
        let own = addresses[comm.rank() as usize];
        for (address, bytes) in [(0, 8), (own, 0)] {
            // Safety: the import is refused.
            let error = unsafe { device.import_memory(address, bytes) }.unwrap_err();
            assert!(matches!(&error, GpuError::Foreign { .. }), "{error}");
            assert!(error.to_string().contains("virtual GPU") && error.to_string().contains("no bytes"), "{error}");
        }
        // Safety: the array outlives the communicators, and no other code uses it meanwhile.
        let memory = unsafe { device.import_memory(own, 64) }.unwrap();
        let window = comm.register::<u64>(&memory.slice(8..64).unwrap(), WindowFlags::NONE).unwrap();
        assert_eq!((window.handle().base, window.stride()), (own + 8, None));
        assert_eq!(window.read_all().unwrap(), [5; 7], "its bytes are unchanged");
        window.write(0, &[u64::from(comm.rank())]).unwrap();
        assert!(matches!(
            comm.register::<u64>(&memory.slice(0..16).unwrap(), WindowFlags::NONE),
            Err(CommError::AlreadyRegistered { .. })
        ));
        comm.destroy().unwrap();
    });
    assert_eq!(parts.map(|part| part[..3].to_vec()), [[5, 0, 5], [5, 1, 5]]);
}
