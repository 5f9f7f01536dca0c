// SPDX-License-Identifier: MIT OR Apache-2.0

//! Device functions of a user's crate, for kernels in CUDA C++.

#![no_std]

use gin_device::prelude::*;

/// Sends a value to the right neighbour, and returns the value of the left one; 0 after a fault, which it reports.
/// `u64::MAX` if the host is of another gin.
///
/// # Safety
/// - One thread of each rank calls, once. The communicator has a signal, and the window is of this communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn own_shift(comm: &Comm, words: &Window<u64>, value: u64, deadline: Deadline) -> u64 {
    if comm.check_abi().is_err() {
        return u64::MAX;
    }
    let gin = Gin::new(comm, ContextId::new(0));
    let put = gin.put_value(comm.world().right(), words.at(0), value).signal(SignalId::new(0).inc());
    match put.issue(&Thread).and_then(|()| gin.wait_signal(&Thread, SignalId::new(0), 1, deadline)) {
        Ok(()) => words.read(0),
        Err(fault) => {
            comm.report(fault);
            0
        }
    }
}
