// SPDX-License-Identifier: MIT OR Apache-2.0
//! Symmetric pointers are equal if and only if they name the same element of the same window.

use bytemuck::Zeroable;
use gin_abi::WindowHandle;
use gin_device::prelude::*;

fn window(id: u32, base: u64) -> Window<u32> {
    // Safety: no access is made through the window.
    unsafe { Window::from_handle(WindowHandle { id, base, own_length: 4096, ..WindowHandle::zeroed() }) }
}

#[test]
fn pointers_are_equal_if_window_and_element_are() {
    let (one, two) = (window(1, 0x1000), window(2, 0x1000));
    assert!(one.symmetric(5) == one.symmetric(5));
    assert!(one.symmetric(5) == one.symmetric(2) + 3 && one.symmetric(5) == one.symmetric(7) - 2);
    assert!(one.symmetric(5) != one.symmetric(6));
    assert!(one.symmetric(5) != two.symmetric(5));
    // The same window has another address on another rank.
    assert!(one.symmetric(5) == window(1, 0x2000).symmetric(5));
}
