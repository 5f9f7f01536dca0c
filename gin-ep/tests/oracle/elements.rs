// SPDX-License-Identifier: MIT OR Apache-2.0
//! Elements of rows, and their scales.

use crate::support::{self, Input};
use crate::{config, on_ranks};
use gin_device::prelude::*;
use gin_ep::{Element, Group, Scales};
use gin_ep_kernels::POWERS;
use gin_ep_kernels::internal::scale_and_factor;
use gin_ep_oracle::{Batch, Shape, narrow, quantized};
use gin_host::world::WorldConfig;

#[test]
fn all_elements_go_there_and_back_with_their_scales() {
    for element in [
        Element::Bf16,
        Element::F16,
        Element::F32,
        Element::E4m3(Scales::F32),
        Element::E4m3(Scales::F32Powers),
        Element::E4m3(Scales::Ue8m0),
        Element::Opaque { row_bytes: 80, scale_bytes: 0 },
        Element::Opaque { row_bytes: 2064, scale_bytes: 7 },
        Element::Opaque { row_bytes: 16, scale_bytes: 300 },
    ] {
        for (ranks, hidden) in [(2, 128), (3, 1152)] {
            let shape = Shape { ranks, experts: 8, topk: 3, hidden };
            let config = config(&shape, 9);
            on_ranks(WorldConfig::seeded(ranks as u32, 4), |rank, comm| {
                support::element(rank, comm, &config, element, &shape, 9)?;
                // With bias and old sums, of BF16.
                let has_f32 = !matches!(element, Element::F16 | Element::F32);
                if has_f32 { support::element(rank, comm, &config.combine_f32(), element, &shape, 9) } else { Ok(()) }
            });
        }
    }
}

#[test]
fn zeros_and_tiny_elements_become_fp8_with_the_least_scale() {
    let shape = Shape { ranks: 1, experts: 1, topk: 1, hidden: 512 };
    // Blocks of zeros, of less than the least magnitude of a scale, of that, and of more.
    let row: Vec<u16> = (0..512).map(|at| narrow([0.0, 3e-6, 1e-4, -2.5][at / 128] * (at % 7) as f32 / 6.0)).collect();
    for scales in [Scales::F32, Scales::F32Powers, Scales::Ue8m0] {
        on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
            let group = Group::new(comm, &config(&shape, 1).element(Element::E4m3(scales)))?;
            let (input, stream, mut slot) = (Input::new(rank, &shape, 1)?, rank.stream()?, group.slot(0)?);
            input.write(&Batch { rows: row.clone(), experts: vec![0], weights: vec![1.0] }, false)?;
            let received = slot.exchange(&stream, &input.tokens(1, false))?;
            stream.synchronize()?;
            let found = received.fetch()?.remove(0).remove(0);
            let (elements, values) = quantized(&row, scales != Scales::F32);
            let bytes = |scale: f32| match scales {
                Scales::Ue8m0 => vec![(scale.to_bits() >> 23) as u8],
                _ => scale.to_le_bytes().to_vec(),
            };
            assert_eq!(
                (found.row, found.scales),
                (elements, values.into_iter().flat_map(bytes).collect()),
                "{scales:?}"
            );
            received.release();
            drop(slot);
            group.destroy()
        });
    }
}

#[test]
fn scales_and_factors_of_fp8_are_the_quotients_of_all_magnitudes() {
    let bits = |(scale, factor): (f32, f32)| (scale.to_bits(), factor.to_bits());
    for max in (0..=0x7f80).map(|bits| Bf16::from_bits(bits).to_f32().max(1e-4)) {
        assert_eq!(bits(scale_and_factor(max, 0)), bits((max / 448.0, 448.0 / max)), "{max}");
        let power = Ue8m0::from_f32_up(max / 448.0).to_f32();
        assert_eq!(bits(scale_and_factor(max, POWERS)), bits((power, 1.0 / power)), "{max}");
    }
}
