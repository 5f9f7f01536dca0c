// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exceptions.

use gin_abi::{Fault, FaultKind, FaultSubject, fault::NONE};
use gin_boot::{BootstrapError, JobError, lock};
use gin_ep::EpError;
use gin_gpu::GpuError;
use gin_gpu::placement::PlacementError;
use gin_host::comm::{CommError, FaultReport};
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

create_exception!(gincomm, Error, PyRuntimeError, "An error of gin. Its text names the cause and the remedy.");
create_exception!(
    gincomm,
    StateError,
    Error,
    "A call that the present state refuses: too early, too late, or after a fork."
);
create_exception!(
    gincomm,
    FaultError,
    Error,
    "A fault that has ended the communicator, with all its fields as attributes: kind, operation, context, peer, subject, \
     subject_id, offset, expected, seen, deadline_ns, place, rank, host, peer_host, window, back_end, cause."
);

/// An error of Rust that has an exception.
pub(crate) trait Raised {
    /// Returns the exception.
    fn raised(self, py: Python<'_>) -> PyErr;
}

/// Results whose error becomes an exception.
pub(crate) trait OrRaise<T> {
    /// Returns the value, or the exception of the error.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: Raised> OrRaise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| error.raised(py))
    }
}

impl Raised for CommError {
    fn raised(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Ended { ref report, .. } if report.fault.kind() == FaultKind::Aborted => {
                aborted(py, self.to_string(), |text| fault(py, text, report))
            }
            Self::Ended { ref report, .. } => fault(py, self.to_string(), report),
            Self::Bootstrap(BootstrapError::Aborted { .. }) => aborted(py, self.to_string(), Error::new_err),
            Self::State { .. } | Self::Busy { .. } | Self::WindowGone { .. } => StateError::new_err(self.to_string()),
            Self::Gpu(error) => error.raised(py),
            other => Error::new_err(other.to_string()),
        }
    }
}

impl Raised for GpuError {
    fn raised(self, _: Python<'_>) -> PyErr {
        let text = self.to_string();
        match self {
            Self::ParameterCount { .. } | Self::ParameterSize { .. } | Self::ParameterType { .. } => {
                PyTypeError::new_err(text)
            }
            _ => Error::new_err(text),
        }
    }
}

impl Raised for EpError {
    fn raised(self, py: Python<'_>) -> PyErr {
        let text = in_python(&self.to_string());
        match self {
            Self::Limit { .. } | Self::Short { .. } | Self::Misaligned { .. } | Self::Unsuited { .. } => {
                PyValueError::new_err(text)
            }
            Self::Slot { .. } | Self::NotReceived { .. } | Self::NotEnded { .. } | Self::Ended { .. } => {
                StateError::new_err(text)
            }
            Self::Comm(error) => error.raised(py),
            Self::Gpu(error) => error.raised(py),
            _ => Error::new_err(text),
        }
    }
}

/// Returns a text of `gin-ep` with the names that Python has.
fn in_python(text: &str) -> String {
    let names = [
        ("`Element::Opaque` with `scale_bytes`", "`Element.opaque(row_bytes, scale_bytes)`"),
        ("`Tokens::scales`", "`scales=`"),
        ("`Rows::At`", "`rows=`"),
        ("`Rows::PermutedAt`", "`rows=(permuted, tensor)`"),
    ];
    names.iter().fold(text.to_owned(), |text, (rust, python)| text.replace(rust, python)).replace("::", ".")
}

macro_rules! plain {
    ($($error:ty),*) => { $(
        impl Raised for $error {
            fn raised(self, _: Python<'_>) -> PyErr {
                Error::new_err(self.to_string())
            }
        }
    )* };
}

plain!(JobError, PlacementError, std::io::Error);

impl Raised for BootstrapError {
    fn raised(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Aborted { .. } => aborted(py, self.to_string(), Error::new_err),
            other => Error::new_err(other.to_string()),
        }
    }
}

/// Returns the exception of a fault, with its fields.
pub(crate) fn fault(py: Python<'_>, text: String, report: &FaultReport) -> PyErr {
    let error = FaultError::new_err(text);
    match set_fields(error.value(py).as_any(), report) {
        Ok(()) => error,
        Err(other) => other,
    }
}

fn set_fields(value: &Bound<'_, PyAny>, report: &FaultReport) -> PyResult<()> {
    let FaultReport { rank, host, fault, peer_host, window, back_end, cause, .. } = report;
    let known = |number: u32| (number != NONE).then_some(number);
    let (subject, id, offset) = subject(fault);
    value.setattr("kind", format!("{:?}", fault.kind()))?;
    value.setattr("operation", fault.operation().to_string())?;
    value.setattr("context", known(fault.context()))?;
    value.setattr("peer", known(fault.peer()))?;
    value.setattr("subject", subject)?;
    value.setattr("subject_id", id)?;
    value.setattr("offset", offset)?;
    value.setattr("expected", fault.expected())?;
    value.setattr("seen", fault.seen())?;
    value.setattr("deadline_ns", fault.deadline().map(|deadline| deadline.ns()))?;
    value.setattr("place", fault.place().map(ToString::to_string))?;
    value.setattr("rank", rank)?;
    value.setattr("host", host)?;
    value.setattr("peer_host", peer_host.as_ref())?;
    value.setattr("window", window.as_ref())?;
    value.setattr("back_end", back_end)?;
    value.setattr("cause", cause.as_ref())
}

/// Returns the kind of a fault's subject, its id, and the offset in a window.
fn subject(fault: &Fault) -> (Option<&'static str>, Option<u32>, Option<u64>) {
    match fault.subject() {
        FaultSubject::Signal(id) => (Some("signal"), Some(id), None),
        FaultSubject::Counter(id) => (Some("counter"), Some(id), None),
        FaultSubject::Barrier(id) => (Some("barrier"), Some(id), None),
        FaultSubject::Window { id, offset } => (Some("window"), Some(id), Some(offset)),
        _ => (None, None, None),
    }
}

/// The first exception of one `gincomm.launch`, and its rank if a rank raised it. Exceptions of other ranks may be its
/// consequences.
pub(crate) type First = Mutex<Option<(Option<u32>, PyErr)>>;

thread_local! {
    /// The rank of this thread, and the first exception of its launch.
    pub(crate) static BODY: RefCell<Option<(u32, Arc<First>)>> = const { RefCell::new(None) };
}

/// Returns an exception that tells of an abort, with the exception of the rank of `gincomm.launch` that made the launch
/// abort all ranks, if one did, in its text and as its cause.
fn aborted(py: Python<'_>, text: String, make: impl FnOnce(String) -> PyErr) -> PyErr {
    let first = BODY.with_borrow(|body| {
        let (own, first) = body.as_ref()?;
        let first = lock(first);
        let (rank, error) = first.as_ref()?;
        (*rank != Some(*own)).then(|| (*rank, error.clone_ref(py)))
    });
    let Some((rank, error)) = first else { return make(text) };
    let by = rank.map_or_else(|| "the main thread".to_owned(), |rank| format!("rank {rank}"));
    let made = make(format!("{text}; the first exception was that of {by}, {}", short(&error.to_string())));
    made.set_cause(py, Some(error));
    made
}

/// Returns the first line of a text, and not more than 200 characters of it.
fn short(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(200).collect()
}
