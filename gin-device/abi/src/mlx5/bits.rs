// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fields of command mailboxes.
//!
//! A command is a string of big-endian bits. A [`Layout`] is a table of fields. Each row gives the width of a field and
//! its first bit, counted from the most significant bit of byte 0. Setters ([`Mailbox::set`]), getters
//! ([`Mailbox::get`], [`View::get`]) and the checks of the tests all use that one row. A field belongs to its layout by
//! type, so it cannot be used with another. A layout inside another is a [`Part`].
//!
//! ```
//! use gin_abi::mlx5::bits::Mailbox;
//! use gin_abi::mlx5::mailbox::{Ads, CreateQpIn, Qpc};
//!
//! let path = CreateQpIn::QPC.part(Qpc::PRIMARY_ADDRESS_PATH);
//! let mut mailbox = Mailbox::<CreateQpIn>::new();
//! mailbox.set(CreateQpIn::OPCODE, 0x500).set(path.field(Ads::RLID), 7);
//! assert_eq!(mailbox.get(path.field(Ads::RLID)), 7);
//! assert_eq!(&mailbox.bytes()?[..2], [5, 0]);
//! mailbox.set(path.field(Ads::RLID), 0x1_0000); // 16 bits wide
//! assert!(mailbox.bytes().is_err());
//! # Ok::<(), gin_abi::mlx5::bits::TooWide>(())
//! ```

use core::fmt;
use core::marker::PhantomData;

/// A table of fields.
pub trait Layout: Copy + 'static {
    /// Name in Linux' `mlx5_ifc.h`, without the common prefix `mlx5_ifc_` and suffix `_bits`.
    const NAME: &'static str;
    /// Length in bytes.
    const LENGTH: usize;
    /// Fields and parts.
    const ROWS: &'static [Row];
    /// Byte array of this length.
    type Bytes: Copy + AsRef<[u8]> + AsMut<[u8]>;
    /// An array of zeros.
    const ZERO: Self::Bytes;
}

/// A row of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Name in Linux' `mlx5_ifc.h`.
    pub name: &'static str,
    /// First bit.
    pub offset: u32,
    /// Width in bits.
    pub width: u32,
    /// Number, string of bytes, or another layout.
    pub kind: RowKind,
}

impl Row {
    /// Returns the number at this place in `bytes`, at most 64 bits. Bits past the end of `bytes` are 0.
    pub fn get(&self, bytes: &[u8]) -> u64 {
        read_bits(bytes, self.offset, self.width)
    }

    /// Stores a number at this place. Bits that do not fit, and bits past the end of `bytes`, are dropped.
    pub fn set(&self, bytes: &mut [u8], value: u64) {
        write_bits(bytes, self.offset, self.width, value);
    }
}

/// The type of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowKind {
    /// A number of at most 64 bits.
    Number,
    /// A string of bytes.
    Bytes,
    /// The layout of this name.
    Part(&'static str),
}

/// A number of at most 64 bits in a layout.
pub struct Field<L> {
    offset: u32,
    width: u32,
    name: &'static str,
    layout: PhantomData<fn() -> L>,
}

/// A string of `N` bytes in a layout.
pub struct ByteField<L, const N: usize> {
    offset: u32,
    layout: PhantomData<fn() -> L>,
}

/// A layout inside another.
pub struct Part<L, P> {
    offset: u32,
    layouts: PhantomData<fn() -> (L, P)>,
}

impl<L> Clone for Field<L> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<L> Copy for Field<L> {}
impl<L, const N: usize> Clone for ByteField<L, N> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<L, const N: usize> Copy for ByteField<L, N> {}
impl<L, P> Clone for Part<L, P> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<L, P> Copy for Part<L, P> {}

impl<L> fmt::Debug for Field<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bits at {})", self.name, self.width, self.offset)
    }
}

impl<L> Field<L> {
    pub(crate) const fn new(name: &'static str, offset: u32, width: u32) -> Self {
        assert!(width > 0 && width <= 64, "a number has 1 to 64 bits");
        Self { offset, width, name, layout: PhantomData }
    }

    /// Returns the first bit.
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// Returns the width in bits.
    pub const fn width(self) -> u32 {
        self.width
    }

    /// Returns the largest number that fits.
    pub const fn max(self) -> u64 {
        crate::mask(self.width)
    }
}

impl<L, const N: usize> ByteField<L, N> {
    pub(crate) const fn new(offset: u32) -> Self {
        assert!(offset.is_multiple_of(8), "a string begins with a byte");
        Self { offset, layout: PhantomData }
    }
}

impl<L: Layout, P: Layout> Part<L, P> {
    pub(crate) const fn new(offset: u32) -> Self {
        assert!(offset.is_multiple_of(8), "a layout begins with a byte");
        Self { offset, layouts: PhantomData }
    }

    /// Returns the field of the inner layout as a field of the outer one.
    pub const fn field(self, inner: Field<P>) -> Field<L> {
        Field { offset: self.offset + inner.offset, width: inner.width, name: inner.name, layout: PhantomData }
    }

    /// Returns the string of bytes of the inner layout as one of the outer layout.
    pub const fn bytes<const N: usize>(self, inner: ByteField<P, N>) -> ByteField<L, N> {
        ByteField { offset: self.offset + inner.offset, layout: PhantomData }
    }

    /// Returns the layout inside the inner one as a part of the outer layout.
    pub const fn part<Q: Layout>(self, inner: Part<P, Q>) -> Part<L, Q> {
        Part { offset: self.offset + inner.offset, layouts: PhantomData }
    }
}

/// Error: a number does not fit into its field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooWide {
    /// Name of the layout.
    pub layout: &'static str,
    /// Name of the field.
    pub field: &'static str,
    /// Width of the field in bits.
    pub width: u32,
    /// The number.
    pub value: u64,
}

impl fmt::Display for TooWide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layout, field, width, value } = self;
        write!(f, "{value} does not fit into the {width} bits of {field} of {layout}")
    }
}

impl core::error::Error for TooWide {}

fn read_bits(bytes: &[u8], offset: u32, width: u32) -> u64 {
    (offset..offset + width).fold(0, |value, bit| {
        let byte = bytes.get(bit as usize / 8).copied().unwrap_or(0);
        value << 1 | u64::from(byte >> (7 - bit % 8) & 1)
    })
}

fn write_bits(bytes: &mut [u8], offset: u32, width: u32, value: u64) {
    for (place, bit) in (offset..offset + width).rev().enumerate() {
        if let Some(byte) = bytes.get_mut(bit as usize / 8) {
            let shift = 7 - bit % 8;
            *byte = *byte & !(1 << shift) | ((value >> place) as u8 & 1) << shift;
        }
    }
}

/// A command or an answer with the layout `L`, zero where nothing was set.
#[derive(Clone, Copy)]
pub struct Mailbox<L: Layout> {
    bytes: L::Bytes,
    error: Option<TooWide>,
}

impl<L: Layout> Default for Mailbox<L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<L: Layout> fmt::Debug for Mailbox<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {{", L::NAME)?;
        for row in L::ROWS.iter().filter(|row| row.kind == RowKind::Number) {
            let value = row.get(self.bytes.as_ref());
            if value != 0 {
                write!(f, " {}: {value:#x}", row.name)?;
            }
        }
        f.write_str(" }")
    }
}

impl<L: Layout> Mailbox<L> {
    /// Returns a mailbox of zeros.
    pub const fn new() -> Self {
        Self { bytes: L::ZERO, error: None }
    }

    /// Sets a field. If the number does not fit, the field keeps its value, and [`bytes`](Self::bytes) reports the
    /// error.
    pub fn set(&mut self, field: Field<L>, value: u64) -> &mut Self {
        if value <= field.max() {
            write_bits(self.bytes.as_mut(), field.offset, field.width, value);
        } else if self.error.is_none() {
            self.error = Some(TooWide { layout: L::NAME, field: field.name, width: field.width, value });
        }
        self
    }

    /// Sets a string of bytes.
    pub fn set_bytes<const N: usize>(&mut self, field: ByteField<L, N>, value: [u8; N]) -> &mut Self {
        let at = field.offset as usize / 8;
        if let Some(place) = self.bytes.as_mut().get_mut(at..at + N) {
            place.copy_from_slice(&value);
        }
        self
    }

    /// Sets a whole part.
    pub fn set_part<P: Layout>(&mut self, part: Part<L, P>, value: &Mailbox<P>) -> &mut Self {
        let at = part.offset as usize / 8;
        if let Some(place) = self.bytes.as_mut().get_mut(at..at + P::LENGTH) {
            place.copy_from_slice(value.bytes.as_ref());
        }
        self.error = self.error.or(value.error);
        self
    }

    /// Returns a field.
    pub fn get(&self, field: Field<L>) -> u64 {
        self.view().get(field)
    }

    /// Returns a view to read from.
    pub fn view(&self) -> View<'_, L> {
        View { bytes: self.bytes.as_ref(), layout: PhantomData }
    }

    /// Returns the bytes to send.
    ///
    /// # Errors
    /// Fails with the first number that did not fit into its field.
    pub fn bytes(&self) -> Result<&[u8], TooWide> {
        match self.error {
            None => Ok(self.bytes.as_ref()),
            Some(error) => Err(error),
        }
    }

    /// Returns the buffer that an answer is written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.as_mut()
    }
}

/// Bytes that another party wrote, read by the layout `L`.
///
/// ```
/// use gin_abi::mlx5::bits::View;
/// use gin_abi::mlx5::mailbox::CommandOut;
///
/// let answer = [0x50, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0];
/// let view = View::<CommandOut>::new(&answer).unwrap();
/// assert_eq!((view.get(CommandOut::STATUS), view.get(CommandOut::SYNDROME)), (0x50, 7));
/// assert!(View::<CommandOut>::new(&answer[..15]).is_none());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct View<'a, L> {
    bytes: &'a [u8],
    layout: PhantomData<fn() -> L>,
}

impl<'a, L: Layout> View<'a, L> {
    /// Views the first bytes of `bytes`; returns `None` if the layout is longer.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        bytes.get(..L::LENGTH).map(|bytes| Self { bytes, layout: PhantomData })
    }

    /// Returns a field.
    pub fn get(self, field: Field<L>) -> u64 {
        read_bits(self.bytes, field.offset, field.width)
    }

    /// Returns a string of bytes.
    pub fn get_bytes<const N: usize>(self, field: ByteField<L, N>) -> [u8; N] {
        let at = field.offset as usize / 8;
        let mut value = [0; N];
        if let Some(place) = self.bytes.get(at..at + N) {
            value.copy_from_slice(place);
        }
        value
    }

    /// Returns a view of a part.
    pub fn part<P: Layout>(self, part: Part<L, P>) -> View<'a, P> {
        let at = part.offset as usize / 8;
        // The tables place every part within its layout, and a test checks it.
        View { bytes: self.bytes.get(at..at + P::LENGTH).unwrap_or(&[]), layout: PhantomData }
    }

    /// Returns the bytes.
    pub fn bytes(self) -> &'a [u8] {
        self.bytes
    }
}

macro_rules! layouts {
    ($($(#[$meta:meta])* $name:ident: $ifc:literal, $length:literal {
        $($(#[$doc:meta])* $field:ident: $kind:ident $(<$inner:ident>)? $row:literal, $offset:literal, $width:literal;)*
    })*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug)]
            pub enum $name {}

            impl $name {
                $($(#[$doc])* pub const $field: layouts!(@type $name $kind $($inner)? $width) =
                    layouts!(@new $kind $row, $offset, $width);)*
            }

            impl $crate::mlx5::bits::Layout for $name {
                const NAME: &'static str = $ifc;
                const LENGTH: usize = $length;
                const ROWS: &'static [$crate::mlx5::bits::Row] = &[$($crate::mlx5::bits::Row {
                    name: $row,
                    offset: $offset,
                    width: $width,
                    kind: layouts!(@kind $kind $($inner)?),
                },)*];
                type Bytes = [u8; $length];
                const ZERO: Self::Bytes = [0; $length];
            }
        )*

        /// A layout's table, under its name.
        #[derive(Clone, Copy, Debug)]
        pub struct Table {
            /// Name in Linux' `mlx5_ifc.h`, without the common prefix `mlx5_ifc_` and suffix `_bits`.
            pub name: &'static str,
            /// Length in bytes.
            pub length: usize,
            /// Fields and parts.
            pub rows: &'static [$crate::mlx5::bits::Row],
        }

        /// Every table of this module.
        pub const TABLES: &[Table] = &[$(Table {
            name: <$name as $crate::mlx5::bits::Layout>::NAME,
            length: <$name as $crate::mlx5::bits::Layout>::LENGTH,
            rows: <$name as $crate::mlx5::bits::Layout>::ROWS,
        },)*];
    };
    (@type $name:ident number $width:literal) => { $crate::mlx5::bits::Field<$name> };
    (@type $name:ident bytes $width:literal) => { $crate::mlx5::bits::ByteField<$name, { $width / 8 }> };
    (@type $name:ident part $inner:ident $width:literal) => { $crate::mlx5::bits::Part<$name, $inner> };
    (@new number $row:literal, $offset:literal, $width:literal) => {
        $crate::mlx5::bits::Field::new($row, $offset, $width)
    };
    (@new bytes $row:literal, $offset:literal, $width:literal) => { $crate::mlx5::bits::ByteField::new($offset) };
    (@new part $row:literal, $offset:literal, $width:literal) => { $crate::mlx5::bits::Part::new($offset) };
    (@kind number) => { $crate::mlx5::bits::RowKind::Number };
    (@kind bytes) => { $crate::mlx5::bits::RowKind::Bytes };
    (@kind part $inner:ident) => {
        $crate::mlx5::bits::RowKind::Part(<$inner as $crate::mlx5::bits::Layout>::NAME)
    };
}
pub(super) use layouts;
