// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opening a library and looking up its functions.

use crate::LoadError;
use libloading::Library;
use std::ffi::c_void;

/// Opens a library by its path, or by a name that the loader searches for.
pub(crate) fn open(file: &str) -> Result<Library, LoadError> {
    // Safety: any program may load rdma-core's libraries; their initialisers only register drivers.
    unsafe { Library::new(file) }
        .map_err(|error| LoadError::NoLibrary { library: file.to_owned(), reason: error.to_string() })
}

/// Returns the address of a function.
pub(crate) fn find(library: &Library, file: &str, name: &str) -> Result<*mut c_void, LoadError> {
    // Safety: the caller uses the address under the type that the header declares for the name.
    let found = unsafe { library.get::<*mut c_void>(name) };
    let missing = |_| LoadError::NoFunction { library: file.to_owned(), name: name.to_owned() };
    found.map(|symbol| *symbol).map_err(missing)
}

/// Defines the table of a library's functions, as C declares them. A function marked `#[optional]` is absent from older
/// versions.
macro_rules! functions {
    (
        $(#[$doc:meta])*
        pub struct $table:ident { $($(#[$optional:ident])? fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)* }
    ) => {
        $(#[$doc])*
        pub struct $table {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub $name: $crate::library::functions!(
                    @type $($optional)? unsafe extern "C" fn($($argument),*) $(-> $result)?
                ),
            )*
            // Keeps the library open as long as its functions can be called.
            _library: libloading::Library,
        }

        impl $table {
            /// Opens the library by its path, or by a name that the loader searches for, and looks up the functions.
            ///
            /// # Errors
            /// [`LoadError`](crate::LoadError): the library cannot be opened, or lacks a function that is not optional.
            pub fn open(file: &str) -> Result<Self, $crate::LoadError> {
                let library = $crate::library::open(file)?;
                Ok(Self {
                    $($name: $crate::library::functions!(
                        @found
                        [unsafe extern "C" fn($($argument),*) $(-> $result)?]
                        $($optional)? $crate::library::find(&library, file, stringify!($name))
                    ),)*
                    _library: library,
                })
            }
        }
    };
    (@type $function:ty) => { $function };
    (@type optional $function:ty) => { Option<$function> };
    // Safety of both: the headers declare these types.
    (@found [$function:ty] optional $found:expr) => {
        $found.ok().map(|found| unsafe { std::mem::transmute::<*mut std::ffi::c_void, $function>(found) })
    };
    (@found [$function:ty] $found:expr) => {
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, $function>($found?) }
    };
}
pub(crate) use functions;
