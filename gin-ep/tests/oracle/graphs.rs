// SPDX-License-Identifier: MIT OR Apache-2.0
//! Graphs of a slot's calls.

use crate::support::{self, Input, experts};
use crate::{config, on_ranks};
use gin_ep::{Code, Combine, EpError, Group, Report, Rows};
use gin_ep_oracle::{Experts, Routing, Shape, batch, per_rank};
use gin_host::world::WorldConfig;

#[test]
fn a_graph_replays_with_other_counts_ids_and_rows() {
    let shape = Shape { ranks: 2, experts: 5, topk: 2, hidden: 8 };
    let config = config(&shape, 5).threads(32);
    on_ranks(WorldConfig::seeded(2, 3), |rank, comm| support::replays(rank, comm, &config, &shape, 5, 1_000));
}

#[test]
fn a_graph_and_its_memory_are_dropped_and_later_calls_are_right() {
    let shape = Shape { ranks: 2, experts: 5, topk: 2, hidden: 8 };
    let config = config(&shape, 5).threads(32);
    on_ranks(WorldConfig::seeded(2, 3), |rank, comm| {
        let (me, group) = (rank.rank() as usize, Group::new(comm, &config)?);
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        for number in 0..60 {
            let mine = batch(&shape, Routing::Uniform, number, me, 5);
            let input = Input::new(rank, &shape, 5)?;
            input.write(&mine, false)?;
            let mut layer = || -> Result<(), EpError> {
                let received = slot.exchange(&stream, &input.tokens(5, false))?;
                experts(rank, &stream, &shape, &received)?;
                received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))
            };
            if number % 5 == 0 {
                let graph = stream.capture(&mut layer)?;
                // Safety: memory and group outlive the graph, and all ranks replay theirs.
                unsafe { stream.replay(&*graph)? };
                stream.synchronize()?;
            } else {
                layer()?;
                stream.synchronize()?;
            }
            let mut found = vec![0u16; mine.rows.len()];
            input.output.read(0, &mut found)?;
            assert!(per_rank(&shape, &mine, &[], Experts) == found, "call {number}: the output of rank {me} differs");
        }
        assert_eq!((group.status()?, group.masked(0)?), (None, 0));

        // A capture may look for a report, and is refused while nobody has read one.
        let input = Input::new(rank, &shape, 5)?;
        input.write(&batch(&shape, Routing::Uniform, 1, me, 5), false)?;
        input.ids.write(0, &[99i32])?;
        let mut exchange = || slot.exchange(&stream, &input.tokens(5, false)).map(drop);
        let graph = stream.capture(&mut exchange)?;
        // Safety: as above.
        unsafe { stream.replay(&*graph)? };
        stream.synchronize()?;
        let refused = stream.capture(&mut exchange).map(drop).unwrap_err();
        assert!(matches!(refused, EpError::Unread(Report { code: Code::UnknownExpert, expert: 99, .. })), "{refused}");
        assert!(group.status()?.is_some());
        stream.capture(&mut exchange)?;
        drop((graph, slot));
        group.destroy()
    });
}
