// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that a GPU and a NIC share: doorbell pages that kernels store to, and memory that the NIC registers as a file
//! or by its address.

use crate::Hand;
use crate::common::{config, errors, peer, ranks};
use crate::disguise::{Disguised, Driver, Part, Reaching, Registration, Shared};
use gin_gpu::{GpuError, Memory, MemoryKind};
use gin_host::comm::{Backend, CommConfig, CommError, Communicator, NicChoice, Requirements, WindowFlags};
use gin_nic::{DoorbellSource, Doorbells};
use gin_nic::{FileRefusal, Hca, NicConfig, NicError};
use gin_soft_nic_host::{SoftConfig, SoftFabric};
use gin_testkit::FailingHca;
use std::sync::Arc;

/// Two contexts, so that there are four queue pairs between two ranks.
fn requirements() -> Requirements {
    Requirements::default().contexts(2).queue_depth(16)
}

fn on(hca: Arc<dyn Hca>, doorbells: Doorbells) -> CommConfig {
    let nic = NicChoice::Hca(hca, NicConfig::default());
    config(peer()).backend(Backend::Gdaki).nic(nic).doorbells(doorbells)
}

/// Runs `body` with the communicators of two ranks, each with a NIC and a device. Checks afterwards that the NICs have
/// no objects and that no rule was broken.
fn pair<T: Send>(
    drivers: &[Shared; 2],
    doorbells: Doorbells,
    change: impl Fn(&mut Reaching),
    body: impl Fn(u32, &Communicator) -> T + Sync,
) -> Vec<Result<T, CommError>> {
    let fabric = SoftFabric::default();
    let hcas = [0, 1].map(|rank| {
        let mut hca = Reaching::new(fabric.add(SoftConfig { dma_buf: true, ..SoftConfig::ethernet(rank) }));
        change(&mut hca);
        Arc::new(hca)
    });
    let server = fabric.serve().unwrap();
    let results = ranks(2, |bootstrap, _| {
        let rank = bootstrap.rank();
        let device = Arc::new(Disguised::with(rank, &drivers[rank as usize]));
        let comm = Communicator::new(bootstrap, device, on(hcas[rank as usize].clone(), doorbells));
        comm.initialise(&requirements())?;
        let result = body(rank, &comm);
        comm.destroy()?;
        Ok(result)
    });
    drop(server);
    for driver in drivers {
        let mut driver = driver.lock();
        assert_eq!(driver.mapped, Vec::<u64>::new());
        driver.deferred.clear();
    }
    assert_eq!((fabric.objects(), fabric.violations()), (0, (None, 0)));
    results
}

/// Raises a signal of the other rank by both contexts, and waits for its own.
fn signals(rank: u32, comm: &Communicator) {
    let hand = Hand::new(comm);
    for context in 0..2 {
        hand.signal(context, 1 - rank, 2, 5);
        hand.ring(context, 1 - rank);
    }
    (0..2).for_each(|context| hand.wait(context, 2, 5));
}

/// Returns whether doorbells are stores to pages of a NIC, not to words that the host polls.
fn on_pages(comm: &Communicator) -> bool {
    let hand = Hand::new(comm);
    (0..2).all(|context| (0..2).all(|peer| hand.pair(context, peer).doorbell % 4096 == 0x800))
}

#[test]
fn kernels_of_a_gpu_ring_themselves_where_its_driver_maps_the_pages() {
    for doorbells in [Doorbells::Automatic, Doorbells::Gpu] {
        let drivers = [Shared::mapping(), Shared::mapping()];
        let results = pair(
            &drivers,
            doorbells,
            |_| {},
            |rank, comm| {
                assert_eq!(comm.doorbell_source(), Ok(Some(DoorbellSource::Kernels)));
                assert!(on_pages(comm));
                // A page of a software NIC serves one queue pair.
                assert_eq!(drivers[rank as usize].lock().mapped.len(), 4);
                signals(rank, comm);
            },
        );
        assert_eq!(results, [Ok(()), Ok(())]);
    }
}

#[test]
fn where_a_page_is_refused_the_host_rings_for_all_and_says_why() {
    for max_pages in 0..5 {
        let refusing = Shared::new(Driver { shift: Some(0), max_pages, ..Driver::default() });
        let drivers = [Shared::mapping(), refusing];
        let results = pair(
            &drivers,
            Doorbells::Automatic,
            |_| {},
            |rank, comm| {
                let refused = GpuError::Driver { context: "map a page", reason: "not permitted".to_owned() };
                let all = rank == 0 || max_pages >= 4;
                let doorbell_source = if all { DoorbellSource::Kernels } else { DoorbellSource::Host(Some(refused)) };
                assert_eq!(comm.doorbell_source(), Ok(Some(doorbell_source)));
                assert_eq!(on_pages(comm), all);
                if !all {
                    assert_eq!(drivers[1].lock().mapped, Vec::<u64>::new(), "either all pages are mapped or none");
                }
                signals(rank, comm);
            },
        );
        assert_eq!(results, [Ok(()), Ok(())]);
    }
}

#[test]
fn the_host_rings_where_it_is_asked_to_and_no_page_is_mapped() {
    let drivers = [Shared::mapping(), Shared::mapping()];
    let results = pair(
        &drivers,
        Doorbells::Host,
        |_| {},
        |rank, comm| {
            assert_eq!(comm.doorbell_source(), Ok(Some(DoorbellSource::Host(None))));
            assert!(!on_pages(comm));
            signals(rank, comm);
        },
    );
    assert_eq!(results, [Ok(()), Ok(())]);
    assert!(drivers.iter().all(|driver| driver.lock().asked == 0));
}

#[test]
fn kernels_that_must_ring_and_cannot_are_an_error_with_the_reason() {
    let drivers = [Shared::mapping(), Shared::new(Driver { shift: Some(0), max_pages: 2, ..Driver::default() })];
    let errors = errors(pair(&drivers, Doorbells::Gpu, |_| {}, |_, _| ()));
    let text = "kernels of a GPU cannot ring the doorbells of soft_1: map a page: not permitted";
    assert_eq!(errors[1].to_string(), text);
    assert!(matches!(&errors[1], CommError::Nic(error) if matches!(**error, NicError::Doorbells { .. })));
    assert_eq!(errors[0], CommError::OtherRank { rank: 1, reason: text.to_owned() });
}

#[test]
fn a_page_of_several_queue_pairs_is_mapped_once_and_found_where_the_device_has_it() {
    const DOORBELL: u64 = 0x7777_0000_0800;
    const SHIFT: u64 = 1 << 50;
    let driver = || Shared::new(Driver { shift: Some(SHIFT), max_pages: 1, ..Driver::default() });
    let drivers = [driver(), driver()];
    let results = pair(
        &drivers,
        Doorbells::Gpu,
        |hca| hca.doorbell = Some(DOORBELL),
        |rank, comm| {
            let hand = Hand::new(comm);
            for (context, peer) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                assert_eq!(hand.pair(context, peer).doorbell, DOORBELL + SHIFT);
            }
            let driver = drivers[rank as usize].lock();
            assert_eq!((driver.asked, &driver.mapped), (1, &vec![DOORBELL - 0x800]));
        },
    );
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn the_host_rings_for_entries_never_announced_at_its_own_address_of_the_page() {
    // Addresses where the device finds the pages have no memory behind them.
    let driver = || Shared::new(Driver { shift: Some(1 << 50), max_pages: 4, ..Driver::default() });
    let results = pair(
        &[driver(), driver()],
        Doorbells::Gpu,
        |_| {},
        |rank, comm| {
            // Visible at once, as no request has a signal.
            let window = comm.alloc_window::<u64>(4, WindowFlags::SIGNALS).unwrap();
            window.write(0, &[7 + u64::from(rank), 0, 0, 0]).unwrap();
            let handle = window.handle();
            Hand::new(comm).put((1, 1 - rank), (&handle, 8), (&handle, 0), 8, None);
            comm.deregister(&comm.alloc_window::<u8>(1, WindowFlags::NONE).unwrap()).unwrap();
            assert_eq!(window.read_all().unwrap()[..2], [7 + u64::from(rank), 8 - u64::from(rank)]);
        },
    );
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn doorbells_in_memory_that_devices_reach_anyway_are_not_mapped() {
    let drivers = [Shared::default(), Shared::default()];
    let results = pair(
        &drivers,
        Doorbells::Gpu,
        |hca| hca.in_memory = true,
        |rank, comm| {
            assert_eq!(comm.doorbell_source(), Ok(Some(DoorbellSource::Kernels)));
            assert!(on_pages(comm));
            signals(rank, comm);
        },
    );
    assert_eq!(results, [Ok(()), Ok(())]);
    assert!(drivers.iter().all(|driver| driver.lock().asked == 0));
}

#[test]
fn the_nics_pages_stay_until_they_are_taken_from_the_device() {
    let fabric = SoftFabric::default();
    let driver = Shared::mapping();
    let hca = Arc::new(Reaching::new(fabric.add(SoftConfig::ethernet(0))));
    ranks(1, |bootstrap, _| {
        let device = Arc::new(Disguised::with(0, &driver));
        let comm = Communicator::new(bootstrap, device, on(hca.clone(), Doorbells::Automatic));
        comm.initialise(&requirements()).unwrap();
        comm.destroy().unwrap();
    });
    assert_eq!((driver.lock().mapped.len(), fabric.objects()), (0, 2), "the doorbell pages of two queue pairs");
    driver.lock().deferred.clear();
    assert_eq!(fabric.objects(), 0);
}

#[test]
fn whichever_call_of_a_nic_fails_no_page_stays_mapped_and_no_object_stays() {
    for call in 0.. {
        let (fabric, driver) = (SoftFabric::default(), Shared::mapping());
        let soft = fabric.add(SoftConfig { dma_buf: true, ..SoftConfig::ethernet(0) });
        let failing = Arc::new(FailingHca::new(Arc::new(Reaching::new(soft)), call));
        let results = ranks(1, |bootstrap, _| {
            let device = Arc::new(Disguised::with(0, &driver));
            let comm = Communicator::new(bootstrap, device, on(failing.clone(), Doorbells::Gpu));
            comm.initialise(&requirements())?;
            comm.destroy()
        });
        driver.lock().deferred.clear();
        assert_eq!((driver.lock().mapped.len(), fabric.objects()), (0, 0), "after call {call}");
        if !failing.has_failed() {
            assert_eq!(results, [Ok(())]);
            assert!(call > 20, "only {call} calls were made");
            break;
        }
    }
}

#[test]
fn a_nic_names_the_engine_that_would_ring_for_a_device() {
    let fabric = SoftFabric::default();
    let hca = Reaching::new(fabric.add(SoftConfig::ethernet(0)));
    let nic = gin_nic::Nic::open(Arc::new(hca), NicConfig::default()).unwrap();
    let before = fabric.objects();
    let driver = Shared::mapping();
    assert_eq!(nic.doorbell_source(&Disguised::with(0, &driver)), Ok(DoorbellSource::Kernels));
    driver.lock().deferred.clear();
    let unsupported = GpuError::Driver { context: "map a page", reason: "not permitted".to_owned() };
    let doorbell_source = nic.doorbell_source(&Disguised::new(0)).unwrap();
    assert_eq!(doorbell_source.to_string(), "the host: map a page: not permitted");
    assert_eq!(doorbell_source, DoorbellSource::Host(Some(unsupported)));
    assert_eq!(fabric.objects(), before);
}

/// Registers windows and memory for rings on one rank. Returns the ways in which the NIC registered them, and the
/// result of `initialise` or the window.
fn registrations(driver: &Shared, dma_buf: bool, by_address: bool) -> (Vec<Part>, Result<(), CommError>) {
    let fabric = SoftFabric::default();
    let mut hca = Reaching::new(fabric.add(SoftConfig { dma_buf, ..SoftConfig::ethernet(0) }));
    hca.by_address = by_address;
    let hca = Arc::new(hca);
    let mut results = ranks(1, |bootstrap, _| {
        let device = Arc::new(Disguised::with(0, driver));
        let comm = Communicator::new(bootstrap, device, on(hca.clone(), Doorbells::Host));
        comm.initialise(&requirements())?;
        let memory = Memory::new(comm.gpu(), MemoryKind::Device, 3 * 4096)?;
        let first = memory.address().next_multiple_of(4096) - memory.address();
        // A part of one page, and parts of two.
        for range in [0x100..0x208, 0xff8..0x1010] {
            let window =
                comm.register::<u64>(&memory.slice(first + range.start..first + range.end)?, WindowFlags::NONE)?;
            assert!(driver.files_are_closed());
            let part = hca.registered().pop().unwrap();
            assert_eq!(
                (part.address % 4096, part.bytes),
                (range.start, range.end - range.start),
                "the registration covers no more than the window"
            );
            comm.deregister(&window)?;
        }
        assert!(driver.files_are_closed());
        comm.destroy()
    });
    assert_eq!(fabric.objects(), 0);
    (hca.registered(), results.remove(0))
}

/// Number of registrations: the sink, rings of two contexts, signals, two windows.
const REGISTRATIONS: usize = 6;

fn exporting() -> Shared {
    Shared::new(Driver { exports: true, ..Driver::default() })
}

#[test]
fn memory_of_a_gpu_is_registered_as_a_file_where_both_can_do_that() {
    let driver = exporting();
    let (parts, result) = registrations(&driver, true, true);
    assert_eq!((result, parts.len()), (Ok(()), REGISTRATIONS));
    for part in &parts {
        assert_eq!(part.registration, Registration::File { offset: part.address % 4096 }, "{part:?}");
    }
    assert!(driver.files_are_closed());
    let files: Vec<_> = driver.lock().files.iter().map(|(_, address, bytes)| (*address, *bytes)).collect();
    assert_eq!(files, parts.iter().map(|part| (part.address, part.bytes)).collect::<Vec<_>>());
}

#[test]
fn memory_of_a_gpu_is_registered_by_its_address_where_gpu_or_nic_have_no_files() {
    for (driver, dma_buf) in [(Shared::default(), true), (exporting(), false)] {
        let (parts, result) = registrations(&driver, dma_buf, true);
        assert_eq!((result, parts.len()), (Ok(()), REGISTRATIONS));
        assert!(parts.iter().all(|part| part.registration == Registration::Address));
        assert!(driver.files_are_closed());
    }
}

#[test]
fn memory_that_a_nic_takes_in_neither_way_is_refused_with_both_reasons() {
    for (driver, dma_buf, reason) in [
        (Shared::default(), true, "a GPU cannot give files"),
        (exporting(), false, "memory of a device is not supported: soft_0 has no DMA-BUF support"),
    ] {
        let (parts, result) = registrations(&driver, dma_buf, false);
        assert_eq!(parts, []);
        let error = result.unwrap_err();
        let text = format!(
            "soft_0: registering memory: memory of a GPU can be reached neither as a DMA-BUF file ({reason}) nor by its \
             address (taking memory by its address failed: Bad address (os error 14); that needs the module nvidia-peermem)"
        );
        assert_eq!(error.to_string(), text);
        let CommError::Nic(error) = error else { panic!("{error}") };
        let NicError::Unreached { by_file, .. } = *error else { panic!("{error}") };
        assert_eq!(matches!(*by_file, FileRefusal::Device(_)), dma_buf);
        assert!(driver.files_are_closed());
    }
}
