// SPDX-License-Identifier: MIT OR Apache-2.0
//! The Python package `gincomm`: an extension module, `gincomm._gin`.
//!
//! | module | holds |
//! | --- | --- |
//! | `network` | back ends and networks by name |
//! | `process` | the start of a job in this process: launchers, ids, threads |
//! | `rank`, `comm`, `window`, `stream` | the classes |
//! | `member`, `work` | communicators and streams, as other classes use them |
//! | `dlpack`, `dtype` | DLPack's structures, and types of elements |
//! | `tensor`, `region` | tensors of the program for kernels, and memory of gin as tensors |
//! | `argument`, `kernel` | kernels by name, and checked arguments |
//! | `triton` | device functions for kernels of Triton |
//! | `memory`, `allocator` | memory of gin by address, and torch's pluggable allocator |
//! | `error` | exceptions |
//! | `ep` | expert parallelism: the submodule `gincomm.ep` |
//! | `deadline` | time limits |
//! | `guard` | refusal after a fork, values that end without the interpreter lock, and waits |
//!
//! A crate with other kernels can build an extension of its own with [`fill`]: `docs/python.md` shows one.
#![warn(unreachable_pub)]

mod allocator;
mod argument;
mod comm;
mod deadline;
mod dlpack;
mod dtype;
mod ep;
mod error;
mod guard;
mod kernel;
mod member;
mod memory;
mod network;
mod process;
mod rank;
mod region;
mod stream;
mod tensor;
mod triton;
mod window;
mod work;

// Links the kernels.
use gin_examples_kernels as _;
use gin_kernels as _;

use pyo3::prelude::*;

/// Adds the classes, functions and exceptions to a Python module.
///
/// # Errors
/// An error of the interpreter.
pub fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("Error", py.get_type::<error::Error>())?;
    module.add("StateError", py.get_type::<error::StateError>())?;
    module.add("FaultError", py.get_type::<error::FaultError>())?;
    module.add_class::<rank::Rank>()?;
    module.add_class::<comm::Communicator>()?;
    module.add_class::<window::Window>()?;
    module.add_class::<work::Stream>()?;
    module.add_class::<kernel::Kernel>()?;
    module.add_class::<kernel::Module>()?;
    module.add_class::<deadline::Deadline>()?;
    module.add_function(wrap_pyfunction!(process::init, module)?)?;
    module.add_function(wrap_pyfunction!(rank::rank, module)?)?;
    module.add_function(wrap_pyfunction!(process::unique_id, module)?)?;
    module.add_function(wrap_pyfunction!(process::launch, module)?)?;
    module.add_function(wrap_pyfunction!(process::gpus, module)?)?;
    // Not by `add`, which would export it.
    module.setattr("_device_ir", wrap_pyfunction!(triton::_device_ir, module)?)?;
    ep::fill(module)
}

#[pymodule]
fn _gin(module: &Bound<'_, PyModule>) -> PyResult<()> {
    fill(module)
}
