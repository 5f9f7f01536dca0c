// SPDX-License-Identifier: MIT OR Apache-2.0
//! Each error of NICs, ports and peers is reported by name, on every rank, and leaves nothing behind.

use crate::Hand;
use crate::common::{config, errors, peer, ranks};
use crate::disguise::{Disguised, Reaching};
use gin_abi::BackendKind;
use gin_abi::gdaki::{DOORBELL_GPU, DOORBELL_SYSTEM};
use gin_abi::mlx5::command::Mtu;
use gin_boot::{Bootstrap, BootstrapError, Channel};
use gin_gpu::{Device, Memory, MemoryKind};
use gin_host::comm::{Backend, CommConfig, CommError, Communicator, NicChoice, Requirements, WindowFlags};
use gin_nic::hca::Access;
use gin_nic::{DoorbellRelease, DoorbellSource};
use gin_nic::{Hca, Nic, NicConfig, NicError, RegisteredSlice};
use gin_soft_nic_host::{SoftConfig, SoftEngine, SoftFabric};
use gin_testkit::FailingHca;
use std::sync::Arc;
use std::time::Duration;

fn on(hca: impl Hca + 'static, settings: NicConfig) -> CommConfig {
    let nic = NicChoice::Hca(Arc::new(hca), settings);
    config(peer()).backend(Backend::Gdaki).nic(nic)
}

/// Returns the NIC's error.
fn nic(error: &CommError) -> &NicError {
    let CommError::Nic(error) = error else { panic!("{error:?}") };
    error
}

fn soft(config: SoftConfig) -> CommConfig {
    on(SoftFabric::default().add(config), NicConfig::default())
}

/// Returns the error of `initialise` on a single rank.
fn refused(config: &CommConfig, requirements: &Requirements) -> String {
    let initialise = |bootstrap, device| Communicator::new(bootstrap, device, config.clone()).initialise(requirements);
    errors(ranks(1, initialise)).remove(0).to_string()
}

#[test]
fn a_nic_or_a_port_that_is_unusable_is_named() {
    let with = |change: fn(&mut SoftConfig), settings: NicConfig| {
        let mut config = SoftConfig::ethernet(0);
        change(&mut config);
        let fabric = SoftFabric::default();
        let text = refused(&on(fabric.add(config), settings), &Requirements::default());
        assert_eq!(fabric.objects(), 0);
        text
    };
    let usual = NicConfig::default;
    assert_eq!(with(|config| config.ports[0].active = false, usual()), "soft_0: port 1 is down");
    let port = usual().port(2);
    assert_eq!(with(|_| {}, port), "soft_0: asking for the port: there is no port 2; there are 1 to 1");
    assert_eq!(with(|config| config.atomics = false, usual()), "soft_0 has no atomics");
    let text = with(|config| config.objects = 3, usual());
    assert!(text.contains("the NIC answered: out of resources"), "{text}");
}

#[test]
fn queues_that_are_too_long_or_no_power_of_two_are_refused_with_the_limit() {
    let with = |depth, log_max_queue| {
        let config = soft(SoftConfig { log_max_queue, ..SoftConfig::ethernet(0) });
        refused(&config, &Requirements::default().queue_depth(depth))
    };
    let text = "65536 entries of a queue that kernels fill were asked for; there can be 1 to 32768";
    assert_eq!(with(1 << 16, 15), text);
    assert_eq!(with(128, 6), "128 slots of a send queue were asked for; soft_0 has at most 64");
    assert_eq!(with(100, 15), "queue_depth must be a power of two; 100 was asked for");
    // A queue of one entry gets as many slots as it needs.
    let depth = ranks(1, |bootstrap, device| {
        let comm = Communicator::new(bootstrap, device, soft(SoftConfig::ethernet(0)));
        comm.initialise(&Requirements::default().queue_depth(1)).unwrap();
        Hand::new(&comm).pair(0, 0).depth_log2
    });
    assert_eq!(depth, [2]);
}

/// Returns the errors of two ranks with these NICs. Checks that no object is left.
fn two(nics: [SoftConfig; 2], change: impl Fn(u32, CommConfig) -> CommConfig + Sync) -> Vec<Result<(), CommError>> {
    let fabric = SoftFabric::default();
    let hcas = nics.map(|config| fabric.add(config));
    let results = ranks(2, |bootstrap, device| {
        let rank = bootstrap.rank();
        let config = change(rank, on(hcas[rank as usize].clone(), NicConfig::default()));
        Communicator::new(bootstrap, device, config).initialise(&Requirements::default())
    });
    assert_eq!(fabric.objects(), 0);
    results
}

#[test]
fn peers_that_do_not_go_together_are_named_with_host_and_port() {
    let results = two([SoftConfig::ethernet(0), SoftConfig::infiniband(1)], |_, config| config);
    let texts: Vec<String> = errors(results).iter().map(ToString::to_string).collect();
    assert!(
        texts[0].starts_with("rank 1 (host ")
            && texts[0].ends_with(", port 1) is on InfiniBand, this rank on Ethernet")
    );
    assert!(
        texts[1].starts_with("rank 0 (host ")
            && texts[1].ends_with(", port 1) is on Ethernet, this rank on InfiniBand")
    );
}

#[test]
fn peers_with_other_mtus_agree_on_the_smaller_one() {
    let mut small = SoftConfig::ethernet(1);
    small.ports[0].mtu = Mtu::B1024;
    assert_eq!(two([SoftConfig::ethernet(0), small], |_, config| config), [Ok(()), Ok(())]);
}

#[test]
fn ranks_with_different_back_ends_learn_so() {
    let results = two([SoftConfig::ethernet(0), SoftConfig::ethernet(1)], |rank, config| {
        if rank == 0 { config } else { config.backend(Backend::Proxy) }
    });
    let expected = |rank, theirs, own| CommError::Disagreement { what: "backend", rank, theirs, own };
    assert_eq!(errors(results), [expected(1, 1, 2), expected(0, 2, 1)]);
}

#[test]
fn a_deadline_that_has_passed_is_reported_with_the_step() {
    let late = |rank, config: CommConfig| if rank == 0 { config.connecting(Duration::ZERO) } else { config };
    let errors = errors(two([SoftConfig::ethernet(0), SoftConfig::ethernet(1)], late));
    assert!(matches!(nic(&errors[0]), NicError::Deadline { .. }), "{:?}", errors[0]);
    let CommError::OtherRank { rank: 0, reason } = &errors[1] else { panic!("{errors:?}") };
    assert_eq!(reason, "soft_0: registering the memory of the rings: the deadline passed");
}

/// A bootstrap that gives the addresses of rank 1 another version.
#[derive(Debug)]
struct Newer(Arc<dyn Bootstrap>);

impl Bootstrap for Newer {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn ranks(&self) -> u32 {
        self.0.ranks()
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let mut all = self.0.all_gather(bytes)?;
        // Version 3, Ethernet, MTU 4096.
        let begin = [3, 0, 0, 0, 1, 5];
        for at in 0..all[1].len().saturating_sub(begin.len()) {
            if all[1][at..].starts_with(&begin) {
                all[1][at] = 9;
            }
        }
        Ok(all)
    }

    fn channel(&self, communicator: u64) -> Arc<dyn Channel> {
        self.0.channel(communicator)
    }

    fn abort(&self) {
        self.0.abort();
    }
}

#[test]
fn a_peer_of_another_version_is_named() {
    let fabric = SoftFabric::default();
    let hcas = [0, 1].map(|rank| fabric.add(SoftConfig::ethernet(rank)));
    let results = ranks(2, |bootstrap, device| {
        let config = on(hcas[bootstrap.rank() as usize].clone(), NicConfig::default());
        Communicator::new(Arc::new(Newer(bootstrap)), device, config).initialise(&Requirements::default())
    });
    let text = errors(results)[0].to_string();
    assert!(
        text.starts_with("rank 1 (host ") && text.ends_with("speaks version 9 of the exchange, this rank 3"),
        "{text}"
    );
    assert_eq!(fabric.objects(), 0);
}

#[test]
fn any_failed_call_of_a_nic_is_reported_to_all_ranks_and_nothing_is_left() {
    let requirements = Requirements::default().contexts(2);
    for call in 0.. {
        let fabric = SoftFabric::default();
        let hcas = [0, 1].map(|rank| fabric.add(SoftConfig::ethernet(rank)));
        let failing = Arc::new(FailingHca::new(Arc::new(hcas[1].clone()), call));
        let results = ranks(2, |bootstrap, device| {
            let hca: Arc<dyn Hca> = if bootstrap.rank() == 1 { failing.clone() } else { Arc::new(hcas[0].clone()) };
            let nic = NicChoice::Hca(hca, NicConfig::default());
            let config = config(peer()).backend(Backend::Gdaki).nic(nic);
            let comm = Communicator::new(bootstrap, device, config);
            comm.initialise(&requirements)?;
            comm.alloc_window::<u64>(5, WindowFlags::NONE)?;
            comm.destroy()
        });
        assert_eq!(fabric.objects(), 0, "after call {call}");
        if !failing.has_failed() {
            assert_eq!(results, [Ok(()), Ok(())]);
            assert!(call > 40, "only {call} calls were made");
            break;
        }
        let errors = errors(results);
        assert!(matches!(nic(&errors[1]), NicError::Step { nic, .. } if nic == "soft_1"), "{:?}", errors[1]);
        assert!(matches!(&errors[0], CommError::OtherRank { rank: 1, reason } if reason.contains("soft_1")));
    }
}

#[test]
fn a_window_that_one_nic_does_not_take_is_forgotten_by_all_and_its_place_is_free_again() {
    let fabric = SoftFabric::default();
    let hcas = [0, 1].map(|rank| fabric.add(SoftConfig::ethernet(rank)));
    ranks(2, |bootstrap, device| {
        let hca = hcas[bootstrap.rank() as usize].clone();
        let comm = Communicator::new(bootstrap.clone(), device, on(hca, NicConfig::default()));
        comm.initialise(&Requirements::default()).unwrap();
        let first = comm.alloc_window::<u64>(5, WindowFlags::NONE).unwrap();
        let before = fabric.objects();
        bootstrap.barrier().unwrap();
        if bootstrap.rank() == 1 {
            fabric.change(&hcas[1], |config| config.objects = 0);
        }
        bootstrap.barrier().unwrap();
        let error = comm.alloc_window::<u64>(5, WindowFlags::SIGNALS).unwrap_err();
        match bootstrap.rank() {
            0 => assert!(matches!(&error, CommError::OtherRank { rank: 1, .. }), "{error}"),
            _ => assert!(matches!(nic(&error), NicError::Step { .. }), "{error}"),
        }
        bootstrap.barrier().unwrap();
        assert_eq!(fabric.objects(), before);
        bootstrap.barrier().unwrap();
        if bootstrap.rank() == 1 {
            fabric.change(&hcas[1], |config| config.objects = 1000);
        }
        bootstrap.barrier().unwrap();
        let second = comm.alloc_window::<u64>(5, WindowFlags::SIGNALS).unwrap();
        assert_eq!(second.id(), first.id() + 1);
        comm.destroy().unwrap();
    });
    assert_eq!(fabric.objects(), 0);
}

#[test]
fn a_software_nic_is_taken_only_on_request() {
    ranks(1, |bootstrap, device| {
        let config = soft(SoftConfig::ethernet(0)).backend(Backend::Auto);
        let comm = Communicator::new(bootstrap, device, config);
        comm.initialise(&Requirements::default()).unwrap();
        assert_eq!((comm.backend(), comm.nic().unwrap().is_none()), (Ok(BackendKind::Proxy), true));
        comm.destroy().unwrap();
    });
}

#[test]
fn memory_that_a_nic_does_not_reach_is_refused_and_auto_takes_the_proxy() {
    let device = Disguised::new(0);
    let fabric = SoftFabric::default();
    let nic = NicChoice::Hca(Arc::new(fabric.add(SoftConfig::ethernet(0))), NicConfig::default());
    let error = Backend::Gdaki.choose(&device, &nic).unwrap_err();
    assert_eq!(error.to_string(), "soft_0 does not reach device memory of a GPU");
    assert!(Backend::Auto.choose(&device, &nic).unwrap().is_none());
    assert_eq!(fabric.objects(), 0);
}

#[test]
fn auto_takes_gdaki_only_where_every_rank_can_drive_a_nic_and_the_host_rings_for_gpus() {
    for all in [true, false] {
        let fabric = SoftFabric::default();
        let hcas = [0, 1].map(|rank| fabric.add(SoftConfig::ethernet(rank)));
        let server = fabric.serve().unwrap();
        ranks(2, |bootstrap, _| {
            let (rank, hca) = (bootstrap.rank(), hcas[bootstrap.rank() as usize].clone());
            let hca: Arc<dyn Hca> = if all || rank == 0 { Arc::new(Reaching::new(hca)) } else { Arc::new(hca) };
            let config = config(peer()).nic(NicChoice::Hca(hca, NicConfig::default()));
            let device = Arc::new(Disguised::new(rank));
            let comm = Communicator::new(bootstrap, device, config);
            comm.initialise(&Requirements::default()).unwrap();
            assert_eq!(comm.backend(), Ok(if all { BackendKind::Gdaki } else { BackendKind::Proxy }));
            if all {
                let hand = Hand::new(&comm);
                assert!(matches!(comm.doorbell_source(), Ok(Some(DoorbellSource::Host(Some(_))))));
                hand.signal(0, 1 - rank, 2, 5);
                hand.ring(0, 1 - rank);
                hand.wait(0, 2, 5);
            }
            comm.destroy().unwrap();
        });
        drop(server);
        assert_eq!((fabric.objects(), fabric.violations()), (0, (None, 0)));
    }
}

#[test]
fn a_software_nic_takes_memory_of_gpus_that_its_engines_device_reaches_only() {
    for engine in [SoftEngine::Process, SoftEngine::Thread] {
        let fabric = SoftFabric::default();
        let device: Arc<dyn Device> = Arc::new(Disguised::new(0));
        fabric.place(engine, &device).unwrap();
        let nic = Nic::open(Arc::new(fabric.add(SoftConfig::ethernet(0))), NicConfig::default()).unwrap();
        let other: Arc<dyn Device> = Arc::new(Disguised::new(1));
        let memory = Memory::new(&other, MemoryKind::Device, 64).unwrap();
        let refused = RegisteredSlice::new(&nic, memory.whole(), Access::PAYLOAD).unwrap_err();
        assert!(matches!(&refused, NicError::Memory { device, .. } if device == "a GPU"), "{engine:?}: {refused}");
        let pinned = Memory::new(&other, MemoryKind::Pinned, 64).unwrap();
        RegisteredSlice::new(&nic, pinned.whole(), Access::PAYLOAD).unwrap();
    }
}

#[test]
fn pinned_memory_is_no_window_and_no_send_queue_of_kernels_that_release_to_the_gpu() {
    let released = |release, hca: &gin_soft_nic_host::SoftHca| on(hca.clone(), NicConfig::default()).release(release);
    let fabric = SoftFabric::default();
    let hca = fabric.add(SoftConfig::ethernet(0));
    for release in [DoorbellRelease::System, DoorbellRelease::Gpu] {
        ranks(1, |bootstrap, device| {
            let comm = Communicator::new(bootstrap, device, released(release, &hca));
            comm.initialise(&Requirements::default()).unwrap();
            let scope = match release {
                DoorbellRelease::System => DOORBELL_SYSTEM,
                DoorbellRelease::Gpu => DOORBELL_GPU,
            };
            assert_eq!(Hand::new(&comm).pair(0, 0).doorbell_scope, scope);
            let pinned = Memory::new(comm.gpu(), MemoryKind::Pinned, 64).unwrap();
            // The words of signals are in the GPU, and nothing orders a NIC's writes there with those to the host.
            for flags in [WindowFlags::NONE, WindowFlags::SIGNALS] {
                let refused = comm.register::<u64>(&pinned.whole(), flags).map(drop).unwrap_err();
                assert_eq!(
                    nic(&refused).to_string(),
                    "kernels drive soft_0, which does not order data in host memory with signals in the GPU, but the window \
                     lies in pinned host memory: allocate it in the GPU, or choose the proxy back end"
                );
            }
            drop(comm.alloc_window::<u64>(8, WindowFlags::SIGNALS).unwrap());
            comm.destroy().unwrap();
        });
    }
    // A CPU thread reads entries in host memory.
    let fabric = SoftFabric::default();
    let device: Arc<dyn Device> = Arc::new(Disguised::new(0));
    fabric.place(SoftEngine::Thread, &device).unwrap();
    let hca = fabric.add(SoftConfig::ethernet(0));
    let text = ranks(1, |bootstrap, _| {
        let comm = Communicator::new(bootstrap, device.clone(), released(DoorbellRelease::Gpu, &hca));
        comm.initialise(&Requirements::default()).unwrap_err().to_string()
    });
    assert!(text[0].contains("but the send queue lies in pinned host memory"), "{text:?}");
}
