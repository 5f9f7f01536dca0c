// SPDX-License-Identifier: MIT OR Apache-2.0
//! The GDAKI table, driven as NCCL's host code and NVIDIA's device code drive it.

mod comm;
mod doca;
mod nvidia;

use crate::common::{logged, until};
use comm::{CONFIG, Job, Rank, connect, init, listen, pattern};
use doca::{Extra, Place, Ring, Signal, Window, load, load_half};
use gin_nccl::abi::{HANDLE_BYTES, PTR_CUDA, PTR_HOST, Properties};
use gin_nccl::gdaki::abi::{FLAG_STRICT_ORDER, GinConfig, GinProperties};
use gin_nccl::ncclGinPlugin_v14 as TABLE;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

const INVALID_ARGUMENT: i32 = 4;
const INTERNAL_ERROR: i32 = 3;

#[test]
fn the_properties_make_nccl_take_kernels_that_drive_queue_pairs() {
    let (mut count, mut gin) = (0, GinProperties::default());
    let mut properties = MaybeUninit::<Properties>::uninit();
    // Safety: the table's functions, with valid pointers.
    let properties = unsafe {
        assert_eq!((TABLE.start.devices)(&raw mut count), 0);
        assert_eq!((TABLE.get_gin_properties)(&raw mut gin), 0);
        assert_eq!((TABLE.get_properties)(0, properties.as_mut_ptr()), 0);
        assert_eq!((TABLE.get_properties)(0, null_mut()), INVALID_ARGUMENT);
        properties.assume_init()
    };
    assert_eq!((count, properties.net_device_type, properties.net_device_version), (1, 3, 200));
    assert!(gin.supports_strong_signals && gin.supports_va_signals);
    // Safety: both names are strings.
    let names = unsafe { [properties.name, TABLE.start.name].map(|name| CStr::from_ptr(name)) };
    assert_eq!(names, [c"gin-gdaki"; 2], "the RMA plugin has another name");
}

#[test]
fn device_code_finds_queue_pairs_tables_and_keys_at_their_offsets() {
    for version in [1, 2] {
        let config = GinConfig { backend_version: version, queue_depth: 100, ..CONFIG };
        Job::new(3).run(|own| {
            let contexts = own.try_create(&config).unwrap();
            let handle = contexts.handle;
            assert_eq!((handle.net_device_type, handle.net_device_version, handle.needs_proxy_progress), (3, 200, 1));
            let mut numbers = Vec::new();
            for (index, context) in (0..2).map(|index| (index, contexts.get(index))) {
                for queue in (0..3).flat_map(|peer| [context.queue(peer), context.companion(peer)]) {
                    let number = queue.number();
                    numbers.push(number);
                    assert_eq!(queue.depth(), 128, "rounded up");
                    assert_eq!((0..3).map(|word| load(queue.0 + 8 * word)).sum::<u64>(), 0);
                    assert_eq!(load_half(queue.0 + 28), number << 8);
                    for segments in 0..=5 {
                        assert_eq!(u32::from_be(load_half(queue.0 + 32 + 4 * segments)), number << 8 | segments as u32);
                    }
                    assert_eq!((load_half(queue.0 + 56), load_half(queue.0 + 60) >> 16), (0, 127));
                    assert!([64, 72, 80, 160, 176].iter().all(|&at| load(queue.0 + at) != 0));
                    assert!(load(queue.0 + 80).is_multiple_of(8) && load(queue.0 + 64).is_multiple_of(4096));
                    assert_eq!([288, 292].map(|at| load_half(queue.0 + at)), [2, 2]);
                    let completions = queue.0 + 160;
                    assert_eq!([12, 32, 36].map(|at| load_half(completions + at)), [128, 127, 64]);
                    assert_eq!((load(completions + 24), load(completions + 40)), (0, 0));
                    let ring = load(completions);
                    assert!((0..128).all(|slot| load(ring + 64 * slot + 56) == 0xf1f1_f1f1_f1f1_f1f1));
                    assert_eq!(queue.poll(0), None);
                }
                for (table, count) in [(16, 3), (40, 4)] {
                    assert_eq!(u64::from(load_half(context.address + table + 20)), count * index);
                    let first = load(contexts.get(0).address + table);
                    assert_eq!(load(context.address + table), first + 8 * count * index);
                    // The own key for remote and for local access.
                    let keys = load(context.address + table + 8);
                    assert_eq!(load_half(keys + 4 * own.rank as u64), load_half(context.address + table + 16));
                }
            }
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), 12, "each queue pair has its own number");
            own.meet();
            contexts.destroy();
        });
    }
}

/// Each rank puts to each, itself too, and looks at the bytes when their signal has risen.
fn puts_with_signals(ranks: usize, config: &GinConfig, sizes: &[u32], rounds: u64, flags: u64) {
    let slot = u64::from(*sizes.iter().max().unwrap()).next_multiple_of(64);
    Job::new(ranks).run(|own| {
        let own_window = own.register(slot * ranks as u64 * 2, flags);
        own.with_contexts(config, |contexts| {
            let (all, rank) = (ranks as u64, own.rank as u64);
            for round in 0..rounds {
                let context = contexts.get(round % config.contexts as u64);
                let bytes = sizes[round as usize % sizes.len()];
                own_window.fill(slot * all, bytes.into(), round * all + rank);
                for peer in (0..ranks).map(|step| (own.rank + step) % ranks) {
                    let to = own_window.window.remote(peer, slot * rank);
                    let from = own_window.window.local(slot * all);
                    let amount = if round % 2 == 0 { 1 } else { 1 << 32 };
                    context.put(peer, to, from, bytes, Extra::signal(1, amount));
                }
                let signal = context.signal_word(1);
                let expected = (0..=round)
                    .filter(|earlier| earlier % config.contexts as u64 == round % config.contexts as u64)
                    .map(|earlier| if earlier % 2 == 0 { all } else { all << 32 })
                    .sum::<u64>();
                until(&format!("signal {expected:#x} of rank {rank}, round {round}"), || {
                    signal.load(Ordering::Acquire) == expected
                });
                for peer in 0..all {
                    let seed = round * all + peer;
                    assert!(own_window.has(slot * peer, bytes.into(), seed), "round {round} from {peer} to {rank}");
                }
                own.meet();
            }
            assert!(!contexts.has_failed());
        });
        own.deregister(own_window);
    });
}

#[test]
fn a_signal_comes_after_the_bytes_of_its_put_between_two_ranks() {
    puts_with_signals(2, &CONFIG, &[8, 1, 4096, 70_001], 60, 0);
}

#[test]
fn four_ranks_put_to_all_while_rings_wrap() {
    puts_with_signals(4, &GinConfig { contexts: 3, counters: 0, ..CONFIG }, &[64, 0, 8], 40, 0);
}

#[test]
fn windows_in_strict_order_and_the_default_depth_work_as_well() {
    puts_with_signals(2, &GinConfig { queue_depth: 0, contexts: 1, ..CONFIG }, &[16], 300, FLAG_STRICT_ORDER);
}

#[test]
fn indices_of_entries_pass_two_to_the_sixteen() {
    Job::new(1).run(|own| {
        own.with_contexts(&GinConfig { queue_depth: 64, ..CONFIG }, |contexts| {
            let context = contexts.get(0);
            for _ in 0..(1 << 16) + 200 {
                context.signal(0, Extra::signal(2, 1));
            }
            assert_eq!(context.flush(0), Ok(()));
            assert_eq!(context.signal_word(2).load(Ordering::Acquire), (1 << 16) + 200);
        });
    });
}

#[test]
fn values_of_every_width_arrive_and_nothing_beside_them() {
    Job::new(2).run(|own| {
        let window = own.register(4096, 0);
        own.with_contexts(&CONFIG, |contexts| {
            let (context, peer) = (contexts.get(1), 1 - own.rank);
            let value = 0x8877_6655_4433_2211u64.to_le_bytes();
            for (round, width) in [8, 1, 4, 2, 8].into_iter().enumerate() {
                let at = 64 * round as u64 + 16;
                context.put_value(peer, window.window.remote(peer, at), &value[..width], Extra::signal(0, 5));
                until("the signal", || context.signal_word(0).load(Ordering::Acquire) == 5 * (round as u64 + 1));
                let mut expected = vec![0; 24];
                expected[8..8 + width].copy_from_slice(&value[..width]);
                assert_eq!(window.bytes(at - 8, 24), expected, "{width} bytes");
                own.meet();
            }
        });
        own.deregister(window);
    });
}

#[test]
fn a_signal_in_a_window_covers_earlier_puts_of_its_queue_pair() {
    Job::new(2).run(|own| {
        let (payload, words) = (own.register(1 << 16, 0), own.register(64, FLAG_STRICT_ORDER));
        own.with_contexts(&CONFIG, |contexts| {
            let (context, peer) = (contexts.get(0), 1 - own.rank);
            for round in 1..30 {
                payload.fill(1 << 15, 1 << 12, round);
                for part in 0..4 {
                    let offset = part << 10;
                    let from = payload.window.local((1 << 15) + offset);
                    context.put(peer, payload.window.remote(peer, offset), from, 1 << 10, Extra::default());
                }
                let signal = Some((Signal::At(words.window, 24), 3));
                context.signal(peer, Extra { signal, ..Extra::default() });
                let word = doca::word(words.memory.address() + 24);
                until("the signal", || word.load(Ordering::Acquire) == 3 * round);
                assert!(payload.has(0, 1 << 12, round));
                own.meet();
            }
        });
        own.deregister(words);
        own.deregister(payload);
    });
}

#[test]
fn data_of_gets_is_there_after_a_flush() {
    for ranks in [1, 2, 4] {
        Job::new(ranks).run(|own| {
            let window = own.register(1 << 16, 0);
            window.fill(0, 1 << 12, own.rank as u64);
            own.meet();
            own.with_contexts(&CONFIG, |contexts| {
                let context = contexts.get(0);
                for (round, peer) in (0..20u64).flat_map(|round| (0..ranks).map(move |peer| (round, peer))) {
                    let to = (1 << 14) + ((peer as u64) << 12);
                    window.memory.write(to, &[0u8; 1 << 12]).unwrap();
                    for part in 0..4 {
                        let (offset, bytes) = ((part << 10) + round, (1 << 10) - 32);
                        let from = window.window.remote(peer, offset);
                        // The flush may announce the last get, so that its entry is right behind.
                        let ring = if part == 3 && round % 2 == 1 { Ring::Not } else { Ring::Whole };
                        context.get(peer, from, window.window.local(to + offset), bytes, ring);
                    }
                    // Without a look at the completions of the gets.
                    assert_eq!(context.flush(peer), Ok(()));
                    let expected = pattern(1 << 12, peer as u64);
                    for part in 0..4 {
                        let (first, bytes) = ((part << 10) + round, (1 << 10) - 32);
                        let there = &expected[first as usize..][..bytes as usize];
                        assert_eq!(window.bytes(to + first, bytes), there, "round {round} from {peer}, part {part}");
                    }
                }
                own.meet();
            });
            own.deregister(window);
        });
    }
}

#[test]
fn a_counter_rises_when_the_source_may_change() {
    Job::new(2).run(|own| {
        let window = own.register(1 << 18, 0);
        own.with_contexts(&CONFIG, |contexts| {
            let (context, peer) = (contexts.get(1), 1 - own.rank);
            for round in 1..40u64 {
                let bytes = if round % 3 == 0 { 0 } else { 1 << 16 };
                window.fill(1 << 17, bytes, round);
                let (to, from) = (window.window.remote(peer, 0), window.window.local(1 << 17));
                let signal = Some((Signal::Indexed(3), 1));
                context.put(peer, to, from, bytes as u32, Extra { signal, ..Extra::counter(2) });
                until("the counter", || context.counter_word(2).load(Ordering::Acquire) == round);
                window.fill(1 << 17, bytes, !round);
                until("the signal", || context.signal_word(3).load(Ordering::Acquire) == round);
                assert!(window.has(0, bytes, round), "round {round}");
                own.meet();
            }
            assert_eq!([0, 1].map(|other| context.counter_word(other).load(Ordering::Relaxed)), [0, 0]);
            assert_eq!(contexts.get(0).counter_word(2).load(Ordering::Relaxed), 0, "a word of another context");
        });
        own.deregister(window);
    });
}

#[test]
fn a_counter_does_not_rise_before_the_completion_that_it_waits_for() {
    Job::new(1).run(|own| {
        let window = own.register(4096, 0);
        let contexts = own.try_create(&CONFIG).unwrap();
        let (context, window_places) = (contexts.get(0), window.window);
        let steps = || (0..50).for_each(|_| assert_eq!(contexts.progress(), 0));
        for round in 1..10u64 {
            let extra = Extra { ring: Ring::Not, ..Extra::counter(1) };
            let last = context.put(0, window_places.remote(0, 0), window_places.local(2048), 64, extra);
            context.companion(0).announce(2 * round);
            steps();
            assert_eq!(context.counter_word(1).load(Ordering::Relaxed), round - 1, "before its put");
            context.queue(0).announce(round);
            steps();
            assert_eq!(context.queue(0).poll(last), Some(Ok(())));
            assert_eq!(context.counter_word(1).load(Ordering::Relaxed), round);
        }
        contexts.destroy();
        own.deregister(window);
    });
}

#[test]
fn device_communicators_and_windows_come_and_go_in_any_order() {
    Job::new(2).run(|own| {
        let early = own.register(4096, 0);
        own.with_contexts(&CONFIG, |first| {
            let late = own.register(4096, 0);
            let second = own.try_create(&GinConfig { counters: 0, ..CONFIG }).unwrap();
            let peer = 1 - own.rank;
            for (contexts, window, signal) in [(&second, &early, 1), (first, &late, 2)] {
                window.fill(2048, 256, signal);
                let (to, from) = (window.window.remote(peer, 0), window.window.local(2048));
                contexts.get(1).put(peer, to, from, 256, Extra::signal(signal, 1));
                let word = contexts.get(1).signal_word(signal);
                until("the signal", || word.load(Ordering::Acquire) == 1);
                assert!(window.has(0, 256, signal));
            }
            own.meet();
            own.deregister(late);
            second.destroy();
            own.meet();
            first.get(0).signal(peer, Extra::signal(0, 7));
            until("the signal", || first.get(0).signal_word(0).load(Ordering::Acquire) == 7);
        });
        own.deregister(early);
    });
}

#[test]
fn threads_share_a_queue_pair() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 100;
    Job::new(2).run(|own| {
        let window = own.register(4096, 0);
        // Room for the entries that each thread has not announced: device code waits for ever without it.
        own.with_contexts(&GinConfig { queue_depth: 32, ..CONFIG }, |contexts| {
            let (context, peer) = (contexts.get(0), 1 - own.rank);
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let window = window.window;
                    scope.spawn(move || {
                        for round in 0..ROUNDS {
                            let (to, from) = (window.remote(peer, 8 * thread), window.local(2048));
                            // Every other put waits for the doorbell of a later one.
                            let ring = if round % 2 == 0 { Ring::Not } else { Ring::Whole };
                            context.put(peer, to, from, 8, Extra { ring, ..Extra::signal(thread, 1) });
                        }
                        context.flush(peer).unwrap();
                    });
                }
            });
            for thread in 0..THREADS {
                let signal = context.signal_word(thread);
                until("all signals", || signal.load(Ordering::Acquire) == ROUNDS);
            }
        });
        own.deregister(window);
    });
}

#[test]
fn an_entry_does_not_begin_before_its_record_is_stored() {
    Job::new(1).run(|own| {
        let contexts = own.try_create(&CONFIG).unwrap();
        let context = contexts.get(0);
        let steps = || (0..50).for_each(|_| assert_eq!(contexts.progress(), 0));
        let last = context.signal(0, Extra { ring: Ring::FirstOnly, ..Extra::signal(0, 9) });
        steps();
        assert_eq!((context.queue(0).poll(last), context.signal_word(0).load(Ordering::Relaxed)), (None, 0));
        context.queue(0).record(last + 1);
        steps();
        assert_eq!(context.queue(0).poll(last), Some(Ok(())));
        assert_eq!(context.signal_word(0).load(Ordering::Relaxed), 9);
        contexts.destroy();
    });
}

#[test]
fn a_put_without_a_signal_is_visible_some_time_after_its_completion() {
    Job::new(2).run(|own| {
        let window = own.register(4096, 0);
        own.with_contexts(&CONFIG, |contexts| {
            let (context, peer) = (contexts.get(0), 1 - own.rank);
            window.fill(2048, 512, own.rank as u64);
            context.put(peer, window.window.remote(peer, 0), window.window.local(2048), 512, Extra::default());
            assert_eq!(context.flush(peer), Ok(()));
            until("the bytes", || window.has(0, 512, peer as u64));
        });
        own.deregister(window);
    });
}

/// Posts one entry, which must fail, in context 0 of rank 0. Context 1 and rank 1's other context must go on.
fn refused(what: &str, post: impl Fn(&Rank<'_>, doca::Context, [Window; 2]) + Sync) {
    Job::new(2).run(|own| {
        let (first, second) = (own.register(4096, 0), own.register(64, 0));
        own.with_contexts(&CONFIG, |contexts| {
            if own.rank == 0 {
                let played = contexts.get(0).played();
                post(own, played, [first.window, second.window]);
                assert!(played.flush(1).is_err(), "{what} was carried out");
                until("the failure is known", || contexts.has_failed());
                contexts.get(1).signal(1, Extra::signal(0, 1));
                assert_eq!(contexts.get(1).flush(1), Ok(()));
            } else {
                until("the other context's signal", || contexts.get(1).signal_word(0).load(Ordering::Acquire) == 1);
                assert_eq!(first.bytes(0, 4096), [0; 4096], "{what} had an effect");
            }
        });
        own.deregister(second);
        own.deregister(first);
    });
}

#[test]
fn what_a_nic_refuses_fails_its_queue_pair_only() {
    let put = |own: &Rank<'_>, context: doca::Context, to: Place, from: Place, bytes| {
        assert_eq!(own.rank, 0);
        context.put(1, to, from, bytes, Extra::default());
    };
    refused("a put past the end of the window", |own, context, [window, _]| {
        put(own, context, window.remote(1, 4090), window.local(0), 8);
    });
    refused("a put from past the end of the window", |own, context, [window, _]| {
        put(own, context, window.remote(1, 0), window.local(4090), 8);
    });
    refused("a put with the key of a smaller window", |own, context, [_, small]| {
        put(own, context, small.remote(1, 128), small.local(0), 8);
    });
    refused("a put with the key of another rank", |own, context, [window, _]| {
        put(own, context, window.remote(0, 0), window.local(0), 8);
    });
    refused("a put with a key that was never given", |own, context, [window, _]| {
        let to = Place { key: 0x0101_0101, ..window.remote(1, 0) };
        put(own, context, to, window.local(0), 8);
    });
    refused("a signal past the table", |own, context, _| {
        assert_eq!(own.rank, 0);
        context.signal(1, Extra::signal(8, 1));
    });
    refused("a signal at an odd address", |own, context, [window, _]| {
        assert_eq!(own.rank, 0);
        context.signal(1, Extra { signal: Some((Signal::At(window, 12), 1)), ..Extra::default() });
    });
}

#[test]
fn a_put_to_a_rank_whose_contexts_are_gone_fails() {
    Job::new(2).run(|own| {
        let window = own.register(4096, 0);
        let contexts = own.try_create(&CONFIG).unwrap();
        own.meet();
        if own.rank == 1 {
            contexts.destroy();
            own.meet();
        } else {
            own.meet();
            let context = contexts.get(0);
            let last = context.put(1, window.window.remote(1, 0), window.window.local(0), 8, Extra::default());
            let mut outcome = None;
            until("the failure", || {
                assert_eq!(contexts.progress(), 0);
                outcome = context.queue(1).poll(last);
                outcome.is_some()
            });
            assert_eq!(outcome, Some(Err(doca::Failed)));
            assert!(contexts.has_failed());
            contexts.destroy();
        }
        own.meet();
        own.deregister(window);
    });
}

#[test]
fn memory_of_a_window_is_out_of_reach_once_it_is_deregistered() {
    Job::new(2).run(|own| {
        let (kept, gone) = (own.register(4096, 0), own.register(4096, 0));
        let stale = [gone.window.remote(1, 0), gone.window.local(0)];
        own.with_contexts(&CONFIG, |contexts| {
            own.meet();
            own.deregister(gone);
            own.meet();
            if own.rank == 0 {
                let context = contexts.get(0).played();
                context.put(1, stale[0], kept.window.local(0), 8, Extra::default());
                assert!(context.flush(1).is_err());
            }
            own.meet();
        });
        own.deregister(kept);
    });
}

#[test]
fn a_mistake_of_device_code_is_in_the_log() {
    Job::new(1).run(|own| {
        let contexts = own.try_create(&CONFIG).unwrap();
        let queue = contexts.get(0).queue(0);
        // Announces an entry that was never written.
        queue.record(1);
        let high = u64::from(load_half(queue.0 + 32)) << 32;
        doca::word(load(queue.0 + 80)).store(u64::from((1u32 << 8).to_be()) | high, Ordering::Release);
        (0..50).for_each(|_| assert_eq!(contexts.progress(), 0));
        assert!(logged(&["queue pair", "is broken, because device code did what no NIC allows: BadEntry"]));
        assert!(contexts.has_failed());
        contexts.destroy();
    });
}

#[test]
fn numbers_that_no_context_has_are_refused_on_all_ranks() {
    let bad = [
        (GinConfig { contexts: 0, ..CONFIG }, "0 contexts; ask for 1 or more"),
        (GinConfig { contexts: -1, ..CONFIG }, "-1 contexts"),
        (GinConfig { signals: -2, ..CONFIG }, "-2 signals"),
        (GinConfig { counters: -3, ..CONFIG }, "-3 counters"),
        (GinConfig { signals: i32::MAX, contexts: 9, ..CONFIG }, "signals in each of 9 contexts"),
        (GinConfig { queue_depth: 1 << 16, ..CONFIG }, "a queue of 65536 slots; the limit is 32768"),
        (GinConfig { queue_depth: -4, ..CONFIG }, "-4 slots of a queue"),
        (GinConfig { backend_version: 0, ..CONFIG }, "version 0 of GDAKI's device code"),
        (GinConfig { backend_version: 3, ..CONFIG }, "version 3 of GDAKI's device code"),
    ];
    Job::new(2).run(|own| {
        for (config, text) in bad {
            // Rank 1 asks for what is right, and learns of the failure of rank 0.
            let config = if own.rank == 0 { config } else { CONFIG };
            let expected = if own.rank == 0 { INVALID_ARGUMENT } else { INTERNAL_ERROR };
            assert_eq!(own.try_create(&config).err(), Some(expected), "{text}");
            assert!(logged(&["createContext", "rank 0", text]));
        }
        let contexts = own.try_create(&CONFIG).unwrap();
        own.meet();
        contexts.destroy();
    });
    assert!(logged(&["rank 1: creating contexts: rank 0 has failed", "0 contexts"]));
}

#[test]
fn memory_that_no_nic_can_have_is_refused_on_all_ranks() {
    let on_the_cpu = vec![0u64; 64];
    let cpu = on_the_cpu.as_ptr().expose_provenance() as u64;
    Job::new(2).run(|own| {
        let window = own.register(4096, 0);
        let good = window.memory.address();
        for (address, bytes, kind) in [
            (0, 64, PTR_CUDA),
            (good, 0, PTR_CUDA),
            (good, u64::MAX, PTR_CUDA),
            (cpu, 512, PTR_CUDA),
            (cpu, 512, PTR_HOST),
            (good, 64, 9),
        ] {
            let asked = if own.rank == 0 { (address, bytes, kind) } else { (good, 64, PTR_CUDA) };
            let expected = if own.rank == 0 { INVALID_ARGUMENT } else { INTERNAL_ERROR };
            assert_eq!(own.try_register(asked.0, asked.1, asked.2, 0).0, expected);
        }
        own.meet();
        own.deregister(window);
    });
    assert!(logged(&["regMrSym", "no GPU reaches it; register memory of a GPU or pinned memory"]));
}

#[test]
fn ranks_in_different_steps_learn_of_each_other() {
    Job::new(2).run(|own| {
        let code = if own.rank == 0 { own.try_create(&CONFIG).err() } else { Some(own.try_register(8, 8, 2, 0).0) };
        assert!(matches!(code, Some(INTERNAL_ERROR | INVALID_ARGUMENT)), "{code:?}");
    });
}

#[test]
fn handles_of_others_are_refused() {
    init();
    let gpu = crate::common::gpus::own_gpus(2);
    let good = [listen(gpu), listen(gpu + 1)];
    let changed = |at: usize| {
        let mut handle = good[1];
        handle[at] ^= 1;
        connect(&[good[0], handle], 0).0
    };
    assert_eq!(changed(0), INVALID_ARGUMENT);
    assert!(logged(&["connect", "rank 1 has another GIN plugin, or another version of this one"]));
    assert_eq!(changed(8), INVALID_ARGUMENT);
    assert!(logged(&["rank 1 is in another process; queue pairs of the software NIC serve one process"]));
    assert_eq!(connect(&good, 2).0, INVALID_ARGUMENT);
    assert_eq!(connect(&[], 0).0, INVALID_ARGUMENT);
    let null = [null_mut::<u8>().cast_const().cast(), good[1].as_ptr().cast()];
    let mut coll = null_mut();
    // Safety of all: valid pointers, or null.
    unsafe {
        assert_eq!((TABLE.connect)(null_mut(), null.as_ptr(), 2, 0, null_mut(), &raw mut coll), INVALID_ARGUMENT);
        assert_eq!((TABLE.connect)(null_mut(), std::ptr::null(), 2, 0, null_mut(), &raw mut coll), INVALID_ARGUMENT);
        assert_eq!((TABLE.connect)(null_mut(), null.as_ptr(), -2, 0, null_mut(), &raw mut coll), INVALID_ARGUMENT);
    }
    crate::common::gpus::choose(None);
    let (mut handle, mut object) = ([0u8; HANDLE_BYTES], null_mut());
    // Safety: valid pointers.
    let code = unsafe { (TABLE.listen)(null_mut(), 0, handle.as_mut_ptr().cast(), &raw mut object) };
    assert_eq!(code, INVALID_ARGUMENT, "no GPU is chosen");
}

#[test]
fn null_pointers_are_refused_by_every_function() {
    init();
    let (mut flag, mut pointer, mut handle) = (false, null_mut(), null_mut());
    // Safety: null pointers, or valid ones.
    unsafe {
        for function in [TABLE.destroy_context, TABLE.close_coll, TABLE.close_listen, TABLE.gin_progress] {
            assert_eq!(function(null_mut()), INVALID_ARGUMENT);
        }
        assert_eq!((TABLE.query_last_error)(null_mut(), &raw mut flag), INVALID_ARGUMENT);
        assert_eq!((TABLE.dereg_mr_sym)(null_mut(), null_mut()), INVALID_ARGUMENT);
        assert_eq!((TABLE.create_context)(null_mut(), &CONFIG, &raw mut pointer, &raw mut handle), INVALID_ARGUMENT);
        let code = (TABLE.reg_mr_sym)(null_mut(), null_mut(), 8, 2, 0, &raw mut pointer, &raw mut pointer);
        assert_eq!(code, INVALID_ARGUMENT);
        assert_eq!((TABLE.get_gin_properties)(null_mut()), INVALID_ARGUMENT);
        assert_eq!((TABLE.start.devices)(null_mut()), INVALID_ARGUMENT);
        assert_eq!((TABLE.finalize)(null_mut()), 0);
    }
}
