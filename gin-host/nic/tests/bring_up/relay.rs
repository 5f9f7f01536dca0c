// SPDX-License-Identifier: MIT OR Apache-2.0
//! A relay passes doorbells on.

use gin_nic::hca::Hca;
use gin_nic::*;
use gin_soft_nic_host::{SoftConfig, SoftFabric};
use gin_testkit::FailingHca;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[test]
fn each_new_word_is_passed_on_once_and_to_its_own_doorbell() {
    let words: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
    let address = |index: usize| (&raw const words[index]) as u64;
    let lines = [RelayLine { from: address(0), to: address(2) }, RelayLine { from: address(1), to: address(3) }];
    let hca = SoftFabric::default().add(SoftConfig::ethernet(0));
    let nic = Nic::open(Arc::new(hca), NicConfig::default()).unwrap();
    // Safety: the words outlive the relay; this NIC's doorbells are words of the process.
    let mut relay = unsafe { DoorbellRelay::new(&nic, lines) };
    let seen = |index: usize| words[index].swap(0, Ordering::Relaxed);
    assert!(!relay.step(), "nothing was stored yet");
    words[1].store(7, Ordering::Relaxed);
    assert!(relay.step());
    assert_eq!((seen(2), seen(3)), (0, 7));
    assert!(!relay.step());
    assert_eq!((seen(2), seen(3)), (0, 0));
    words[0].store(1, Ordering::Relaxed);
    words[1].store(8, Ordering::Relaxed);
    assert!(relay.step());
    assert_eq!((seen(2), seen(3)), (1, 8));
}

#[test]
fn a_nic_that_cannot_be_rung_is_rung_again() {
    let hca: Arc<dyn Hca> = Arc::new(SoftFabric::default().add(SoftConfig::ethernet(0)));
    let uar = hca.allocate_uar().unwrap();
    let deaf = FailingHca::at_doorbells(hca.clone(), 2);
    let nic = Nic::open(Arc::new(deaf), NicConfig::default()).unwrap();
    let from = AtomicU64::new(9);
    let line = RelayLine { from: (&raw const from) as u64, to: uar.doorbell };
    // Safety: word and page outlive the relay.
    let mut relay = unsafe { DoorbellRelay::new(&nic, [line]) };
    // Safety: a word of the page.
    let seen = || unsafe { AtomicU64::from_ptr(uar.doorbell as usize as *mut u64) }.load(Ordering::Relaxed);
    for rung in [0, 0, 9] {
        assert!(relay.step());
        assert_eq!(seen(), rung);
    }
    assert!(!relay.step(), "it was rung");
    drop(relay);
    hca.free_uar(uar.handle).unwrap();
}
