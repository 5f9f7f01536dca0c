// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expert parallelism, `gincomm.ep`: the calls of `gin-ep` with tensors.
//!
//! | module | holds |
//! | --- | --- |
//! | `config` | sizes, elements, layouts |
//! | `group` | groups, reports, and the memory of tensors |
//! | `fused` | the parameters of kernels that contain dispatch and combine |
//! | `slot` | slots, and a dispatch from its start to its end |
//! | `tokens` | the tensors of a dispatch and of a combine, checked |
//! | `view` | received rows and permuted rows as tensors |
//!
//! A dispatch of `gin-ep` borrows its slot. Python objects have the id of a detached dispatch instead, and `gin-ep`
//! refuses calls in another order.

pub(crate) mod config;
mod fused;
mod group;
mod slot;
mod tokens;
mod view;

pub(crate) use fused::Part;
pub(crate) use slot::Rows;
pub(crate) use view::View;

use pyo3::prelude::*;

/// Adds the submodule `ep`.
pub(crate) fn fill(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "ep")?;
    module.add_class::<config::Element>()?;
    module.add_class::<config::GroupConfig>()?;
    module.add_class::<config::Layout>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<group::Report>()?;
    module.add_class::<slot::Slot>()?;
    module.add_class::<slot::Plan>()?;
    module.add_class::<slot::Sent>()?;
    module.add_class::<slot::Received>()?;
    module.add_class::<slot::PermutedRows>()?;
    module.add_class::<fused::Fused>()?;
    module.add_class::<fused::Parameter>()?;
    module.add_class::<tokens::Tokens>()?;
    module.add_class::<tokens::Combine>()?;
    module.add_class::<view::Permuted>()?;
    module.add_class::<view::View>()?;
    parent.add_submodule(&module)
}
