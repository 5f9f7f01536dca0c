// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expert parallelism, `gincomm.ep`: the calls of `gin-ep` with tensors.
//!
//! | module | holds |
//! | --- | --- |
//! | `config` | sizes, elements, layouts |
//! | `state` | groups and slots, which the classes share |
//! | `group` | the methods of groups, and reports |
//! | `fused` | the parameters of kernels that contain dispatch and combine |
//! | `permuted` | memory for received rows in another layout |
//! | `slot` | a dispatch from its start to its end |
//! | `tokens` | the tensors of a dispatch and of a combine, checked |
//!
//! A dispatch of `gin-ep` borrows its slot. Python objects have the id of a detached dispatch instead, and `gin-ep`
//! refuses calls in another order.

pub(crate) mod config;
mod fused;
mod group;
mod permuted;
mod slot;
mod state;
mod tokens;

pub(crate) use fused::Part;
pub(crate) use slot::Rows;

use pyo3::prelude::*;

/// Adds the submodule `ep`.
pub(crate) fn fill(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "ep")?;
    module.add_class::<config::Element>()?;
    module.add_class::<config::GroupConfig>()?;
    module.add_class::<config::Layout>()?;
    module.add_class::<state::Group>()?;
    module.add_class::<group::Report>()?;
    module.add_class::<slot::Slot>()?;
    module.add_class::<tokens::Plan>()?;
    module.add_class::<slot::Sent>()?;
    module.add_class::<slot::Received>()?;
    module.add_class::<slot::PermutedRows>()?;
    module.add_class::<fused::Fused>()?;
    module.add_class::<fused::Parameter>()?;
    module.add_class::<tokens::Tokens>()?;
    module.add_class::<tokens::Combine>()?;
    module.add_class::<permuted::Permuted>()?;
    module.add_class::<crate::region::View>()?;
    parent.add_submodule(&module)
}
