// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;

#[test]
fn what_runs_takes_the_most_room_that_it_may() {
    let fit = |per_sm, cluster, clusters| Fit { per_sm, cluster, clusters };
    let room = |running: &[&[Blocks]], fit: Fit| {
        let pairs = |stream: &&[Blocks]| stream.iter().map(|&blocks| [blocks, NONE]).collect::<Vec<_>>();
        let running: Vec<Vec<Pair>> = running.iter().map(pairs).collect();
        let taken = taken(running.iter().map(Vec::as_slice), fit);
        fit.clusters.saturating_sub(taken).saturating_mul(fit.cluster)
    };
    for (running, fit, expected) in [
        // 132 SMs.
        (&[][..], fit(2, 1, 264), 264),
        (&[(4, 2)], fit(2, 1, 264), 260),
        // One block that fills an SM takes both places of it.
        (&[(4, 1)], fit(2, 1, 264), 256),
        (&[(4, 32)], fit(2, 1, 264), 260),
        (&[(1000, 1), (1000, 1)], fit(2, 1, 264), 0),
        (&[(u64::MAX, 1), (u64::MAX, 1)], fit(2, 1, 264), 0),
        // Each of them may be in the way of another cluster.
        (&[], fit(1, 4, 32), 128),
        (&[(3, 1)], fit(1, 4, 32), 116),
        (&[(40, 1)], fit(1, 4, 32), 0),
        (&[(2, 1)], fit(0, 1, 0), 0),
    ] {
        let each: Vec<&[Blocks]> = running.chunks(1).collect();
        assert_eq!(room(&each, fit), expected, "{running:?}, {fit:?}");
    }
    // Those of one stream run one after another.
    assert_eq!(room(&[&[(100, 2), (4, 1)]], fit(2, 1, 264)), 164);
}

fn entry(stream: u64, last: u64, shapes: &[Blocks]) -> Running {
    Running {
        ordinal: 0,
        owner: 1,
        stream,
        last: AtomicU64::new(last),
        ended: None,
        asks: None,
        shapes: shapes.iter().map(|&blocks| [blocks, NONE]).collect(),
        newest: AtomicUsize::new(0),
        meets: BTreeSet::new(),
    }
}

#[test]
fn a_dependent_kernel_takes_room_beside_the_one_before_it_and_no_other() {
    let fit = Fit { per_sm: 2, cluster: 1, clusters: 264 };
    let kernel = |blocks, dependent| Wanted { blocks, fit, cooperative: false, dependent, local: 0 };
    let takes = |launches: &[(Wanted, bool)]| {
        let mut running = entry(7, 0, &[]);
        launches.iter().for_each(|(kernel, overlaps)| running.follow(&[*kernel], *overlaps));
        taken([running.shapes.as_slice()].into_iter(), fit)
    };
    let (large, small, next) = (kernel(40, false), kernel(10, false), kernel(20, true));
    assert_eq!(takes(&[(next, true)]), 20, "nothing is before it");
    assert_eq!(takes(&[(large, false), (next, true)]), 60);
    assert_eq!(takes(&[(large, false), (next, false)]), 40, "it was launched in order");
    assert_eq!(takes(&[(large, false), (small, false), (next, true)]), 40, "30 for the last two");
    assert_eq!(takes(&[(large, false), (next, true), (next, true), (next, true)]), 60);
    assert_eq!(takes(&[(kernel(200, false), false), (kernel(200, true), true)]), 264, "all that there is");
    // The kernels of a graph: the first follows what is before the graph, which has ended.
    let mut graph = entry(7, 0, &[]);
    graph.follow(&[large], false);
    graph.follow(&[next, small, next], false);
    assert_eq!(graph.shapes, [[(40, 2), NONE], [(20, 2), NONE], [(10, 2), NONE], [(20, 2), (10, 2)]]);
}

#[test]
fn a_launch_repeats_others_if_its_shapes_and_all_beside_it_are_known() {
    let fit = Fit { per_sm: 2, cluster: 1, clusters: 264 };
    let kernel = |blocks| Wanted { blocks, fit, cooperative: false, dependent: false, local: 0 };
    let own = entry(7, 2, &[(4, 2)]);
    assert_eq!(own.repeats(&[kernel(4)], true), Some(0));
    assert_eq!(own.repeats(&[kernel(5)], false), None, "another shape");
    assert_eq!(own.repeats(&[], false), None, "an empty graph");
    let own = entry(7, 2, &[(4, 2), (9, 2)]);
    assert_eq!(own.repeats(&[kernel(9), kernel(4), kernel(9)], false), Some(1));
    assert_eq!(own.repeats(&[kernel(4)], true), None, "the larger kernel may have ended");

    let mut state = State::new();
    let known = |state: &State, before: &[(u64, u64)]| {
        state.running[0].meets_all(state.beside(0, &before.iter().copied().collect()))
    };
    state.running.push(entry(7, 2, &[(4, 2)]));
    // A stream that may run beside it, on another GPU or on the same one.
    state.running.push(Running { ordinal: 16, ..entry(8, 5, &[(1, 1)]) });
    assert!(known(&state, &[(7, 3)]));
    state.running[1].ordinal = 0;
    assert!(!known(&state, &[(7, 3)]), "another stream");
    assert!(!known(&state, &[(7, 3), (8, 4)]), "a later launch of it");
    assert!(known(&state, &[(7, 3), (8, 5)]), "ordered");
    state.running[0].meets.insert(8);
    assert!(!known(&state, &[(7, 3)]), "the other one does not count this one");
    state.running[1].meets.insert(7);
    assert!(known(&state, &[(7, 3)]));
}

#[test]
fn more_streams_than_kernels_run_at_a_time_count_only_where_they_meet() {
    let mut state = State::new();
    let before = |known: &[(u64, u64)]| known.iter().copied().collect::<Before>();
    state.running.extend((0..2 * MAX_KERNELS as u64).map(|stream| entry(stream, 1, &[(1, 1)])));
    assert_eq!(state.max_beside(0, &before(&[])), 1, "each follows the one before it, by events");
    // The even ones meet.
    let even: BTreeSet<u64> = (0..2 * MAX_KERNELS as u64).step_by(2).collect();
    for running in state.running.iter_mut().filter(|running| even.contains(&running.stream)) {
        running.meets.clone_from(&even);
    }
    assert_eq!(state.max_beside(0, &before(&[])), MAX_KERNELS);
    assert_eq!(state.max_beside(0, &before(&[(0, 1)])), MAX_KERNELS - 1, "it follows one of them");
    assert_eq!(state.max_beside(1, &before(&[])), 0, "another GPU");
}

#[test]
fn a_dependent_kernel_follows_a_repeated_one() {
    let fit = Fit { per_sm: 2, cluster: 1, clusters: 264 };
    let mut running = entry(7, 0, &[(40, 2), (10, 2)]);
    running.newest.store(1, Ordering::Relaxed);
    running.follow(&[Wanted { blocks: 20, fit, cooperative: false, dependent: true, local: 0 }], true);
    assert_eq!(running.shapes[2..], [[(20, 2), (10, 2)]]);
    assert_eq!(running.newest.into_inner(), 2);
}

#[test]
fn streams_that_meet_directly_or_through_others_are_one_group() {
    let of = |pairs: &[(u32, u32)]| {
        let meets = |&a: &u32, &b: &u32| pairs.contains(&(a, b)) || pairs.contains(&(b, a));
        let mut groups = groups(1..=5, meets);
        groups.iter_mut().for_each(|group| group.sort());
        groups.sort();
        groups
    };
    assert_eq!(of(&[]), [[1], [2], [3], [4], [5]]);
    assert_eq!(of(&[(1, 3), (2, 5)]), [vec![1, 3], vec![2, 5], vec![4]]);
    // The last one joins groups that were apart.
    assert_eq!(of(&[(1, 5), (2, 5), (3, 4)]), [vec![1, 2, 5], vec![3, 4]]);
}
