// SPDX-License-Identifier: MIT OR Apache-2.0
//! libibverbs: how it is opened at run time, and the structures that [`nic::mlx5`](crate::nic::mlx5) and
//! [`net::verbs`](crate::net::verbs) both use.
//!
//! Only fields that are used have names. Tests compare their places with rdma-core's headers.

#![warn(unreachable_pub)]
#![allow(missing_docs)]

pub mod mlx5;
pub mod verbs;

use libloading::Library;
use std::ffi::{c_int, c_void};
use std::fmt;

/// Name of libibverbs in every distribution.
pub const LIBRARY: &str = "libibverbs.so.1";

/// Why a library cannot be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LoadError {
    /// It cannot be opened.
    NoLibrary { library: String, reason: String },
    /// It is too old.
    NoFunction { library: String, name: String },
}

/// A library that was opened.
pub struct Loaded {
    library: Library,
    file: String,
}

impl Loaded {
    pub fn open(file: &str) -> Result<Self, LoadError> {
        // Safety: rdma-core's libraries may be loaded by any program; their initialisers do no more than register drivers.
        let library = unsafe { Library::new(file) };
        let file = file.to_owned();
        match library {
            Ok(library) => Ok(Self { library, file }),
            Err(error) => Err(LoadError::NoLibrary { library: file, reason: error.to_string() }),
        }
    }

    pub fn find(&self, name: &str) -> Result<*mut c_void, LoadError> {
        // Safety: the address is only used under the type that the header declares for the name.
        let found = unsafe { self.library.get::<*mut c_void>(name) };
        let missing = |_| LoadError::NoFunction { library: self.file.clone(), name: name.to_owned() };
        found.map(|symbol| *symbol).map_err(missing)
    }
}

/// Defines `Functions`, which are looked up in the fields of a structure `Libraries` of the same module: the field, `?`
/// with the word `optional` for what older versions lack, the function as C declares it.
macro_rules! functions {
    ($($library:ident $(? $optional:ident)? $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that are used, and the libraries that they are in.
        pub struct Functions {
            $(pub $name: $crate::functions!(
                @type $($optional)? unsafe extern "C" fn($($argument),*) $(-> $result)?
            ),)*
            // They stay open as long as somebody can call into them.
            _libraries: Libraries,
        }

        impl Functions {
            /// Looks them up.
            pub fn find(libraries: Libraries) -> Result<Self, $crate::LoadError> {
                Ok(Self {
                    $($name: $crate::functions!(
                        @found
                        [unsafe extern "C" fn($($argument),*) $(-> $result)?]
                        $($optional)? libraries.$library.find(stringify!($name))
                    ),)*
                    _libraries: libraries,
                })
            }
        }
    };
    (@type $function:ty) => { $function };
    (@type optional $function:ty) => { Option<$function> };
    // Safety of both: the types are those that the headers declare.
    (@found [$function:ty] optional $found:expr) => {
        $found.ok().map(|found| unsafe { std::mem::transmute::<*mut std::ffi::c_void, $function>(found) })
    };
    (@found [$function:ty] $found:expr) => {
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, $function>($found?) }
    };
}
pub(crate) use functions;

/// `struct ibv_device`, opaque.
#[repr(C)]
pub struct Device(c_void);
/// `struct ibv_pd`, opaque.
#[repr(C)]
pub struct ProtectionDomain(c_void);

/// `struct ibv_mr`
#[repr(C)]
pub struct MemoryRegion {
    _before: [u64; 4],
    _handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_port_attr`, with room for what later versions add.
#[repr(C)]
pub struct PortAttributes {
    pub state: u32,
    _max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub max_msg_sz: u32,
    _counters: [u32; 2],
    _pkey_tbl_len: u16,
    pub lid: u16,
    _sm_lid: u16,
    _small: [u8; 8],
    pub link_layer: u8,
    _after: [u8; 81],
}

impl PortAttributes {
    /// All zero.
    pub fn empty() -> Self {
        // Safety: a structure of numbers.
        unsafe { std::mem::zeroed() }
    }
}

/// `struct ibv_ah_attr`, which begins with a union of 8-byte words.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub struct AddressAttributes {
    pub dgid: [u8; 16],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub _pad: u8,
    pub dlid: u16,
    pub sl: u8,
    pub _src_path_bits: u8,
    pub _static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `IBV_PORT_ACTIVE`
pub const PORT_ACTIVE: u32 = 4;
/// `IBV_LINK_LAYER_ETHERNET`
pub const LINK_ETHERNET: u8 = 2;
/// `IBV_ACCESS_*`: local write, remote write, remote read, remote atomic, relaxed ordering.
pub const ACCESS: [u32; 5] = [1, 1 << 1, 1 << 2, 1 << 3, 1 << 20];

/// What joins a port to the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Link {
    /// InfiniBand: ports have local identifiers.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
        })
    }
}

/// A field of a structure of rdma-core's, as it is taken to be here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForeignField {
    /// The structure, as C names it.
    pub structure: &'static str,
    /// The field, as C names it.
    pub field: &'static str,
    /// Its offset in bytes.
    pub offset: usize,
    /// Its size in bytes.
    pub size: usize,
}

/// The size of a field.
pub const fn size<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Defines `FOREIGN_FIELDS`.
macro_rules! foreign {
    ($($name:ident = $structure:literal { $($ours:ident = $field:literal),* })*) => {
        /// Fields that are read or written here, for a test that compares them with rdma-core's headers.
        pub const FOREIGN_FIELDS: &[$crate::ForeignField] = &[$($($crate::ForeignField {
            structure: $structure,
            field: $field,
            offset: std::mem::offset_of!($name, $ours),
            size: $crate::size(|structure: &$name| &structure.$ours),
        },)*)*];
    };
}
pub(crate) use foreign;
