// SPDX-License-Identifier: MIT OR Apache-2.0
//! Definitions of configurations.

/// Defines a configuration: a struct that may gain fields, with the default of each field and a setter for it.
///
/// ```
/// gin_boot::config! {
///     /// The shape of a ring.
///     #[derive(Clone, Debug)]
///     pub struct RingConfig {
///         /// Number of entries.
///         pub entries: u32 = 128,
///         /// Name of the ring.
///         pub name: String = "ring".to_owned(),
///     }
/// }
///
/// let config = RingConfig::default().entries(64);
/// assert_eq!((config.entries, &*config.name), (64, "ring"));
/// ```
#[macro_export]
macro_rules! config {
    (
        $(#[$about:meta])*
        pub struct $config:ident { $($(#[$attribute:meta])* pub $field:ident: $type:ty = $default:expr,)* }
    ) => {
        $(#[$about])*
        #[non_exhaustive]
        pub struct $config {
            $($(#[$attribute])* pub $field: $type,)*
        }

        impl $config {
            $(
                #[doc = concat!("Sets the field `", stringify!($field), "`:")]
                ///
                $(#[$attribute])*
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }

        impl Default for $config {
            #[allow(unused_doc_comments, reason = "an attribute of a field may switch the field off")]
            fn default() -> Self {
                Self { $($(#[$attribute])* $field: $default,)* }
            }
        }
    };
}
