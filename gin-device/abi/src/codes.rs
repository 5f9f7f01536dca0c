// SPDX-License-Identifier: MIT OR Apache-2.0
//! Enumerations whose variants have a code in memory and a description.

/// Declares enumerations: `Name: REPRESENTATION as CODE { Variant = code, "description"; ... }`.
macro_rules! codes {
    ($($(#[$meta:meta])* $name:ident: $repr:ident as $code:ident {
        $($(#[$doc:meta])* $variant:ident = $value:literal, $text:literal;)*
    })*) => {$(
        $(#[$meta])*
        #[repr($repr)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum $name { $($(#[$doc])* $variant = $value,)* }

        impl $name {
            /// Every variant, in the order of its code.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the variant with this code, if there is one.
            pub const fn from_code(code: $code) -> Option<Self> {
                match code { $($value => Some(Self::$variant),)* _ => None }
            }

            /// Returns the code that stands for this variant in memory.
            #[inline(always)]
            pub const fn code(self) -> $code {
                self as $code
            }

            /// Returns the description in words.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        #[cfg(not(target_arch = "nvptx64"))]
        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.text())
            }
        }
    )*};
}
pub(crate) use codes;
