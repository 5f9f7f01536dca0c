// SPDX-License-Identifier: MIT OR Apache-2.0
//! Time limits.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::time::Duration;

/// Returns a number of seconds as a time. `name` names it in errors.
pub(crate) fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    let max = Duration::MAX.as_secs();
    let refuse = |_| PyValueError::new_err(format!("{name} = {value}: pass a number of seconds, 0 to {max}"));
    Duration::try_from_secs_f64(value).map_err(refuse)
}

/// Time limit of a wait in a kernel, from the start of that wait.
#[pyclass(frozen, eq, from_py_object, module = "gincomm")]
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Deadline(pub(crate) gin_abi::Deadline);

#[pymethods]
impl Deadline {
    #[new]
    fn new(seconds: f64) -> PyResult<Self> {
        Ok(Self(self::seconds("deadline", seconds)?.into()))
    }

    /// No time limit. An abort or a fault still ends the wait.
    #[classattr]
    const NONE: Self = Self(gin_abi::Deadline::NONE);

    /// Returns the limit in nanoseconds.
    #[getter]
    fn ns(&self) -> u64 {
        self.0.ns()
    }

    fn __repr__(&self) -> String {
        format!("<gincomm.Deadline: {}>", self.0)
    }
}
