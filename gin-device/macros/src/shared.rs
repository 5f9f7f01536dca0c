// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expansion of `shared!`.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use std::sync::atomic::{AtomicU32, Ordering};
use syn::{Attribute, Ident, Result, Token, Type, Visibility};

struct Declaration {
    attributes: Vec<Attribute>,
    visibility: Visibility,
    name: Ident,
    ty: Type,
}

impl syn::parse::Parse for Declaration {
    fn parse(input: syn::parse::ParseStream<'_>) -> Result<Self> {
        let attributes = input.call(Attribute::parse_outer)?;
        let visibility = input.parse()?;
        input.parse::<Token![static]>()?;
        let name = input.parse()?;
        input.parse::<Token![:]>()?;
        let ty = input.parse()?;
        input.parse::<Token![;]>()?;
        Ok(Self { attributes, visibility, name, ty })
    }
}

pub(crate) fn expand(item: TokenStream) -> Result<TokenStream> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let Declaration { attributes, visibility, name, ty } = syn::parse2(item)?;
    // PTX symbols are global: the crate's name and a running number distinguish two declarations.
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let package = std::env::var("CARGO_CRATE_NAME").unwrap_or_default();
    let symbol = format!("gin_shared_{package}_{number}_{name}");
    let declaration = format!(".shared .align {{align}} .b8 {symbol}[{{bytes}}];");
    let address = format!("{{{{ .reg .u64 gin_t; mov.u64 gin_t, {symbol}; cvta.shared.u64 {{p}}, gin_t; }}}}");
    let place = format!("mov.u32 {{a}}, {symbol};");
    let hidden = format_ident!("__Shared_{}", name);
    Ok(quote! {
        #[cfg(target_arch = "nvptx64")]
        ::core::arch::global_asm!(
            #declaration, align = const ::core::mem::align_of::<#ty>(), bytes = const ::core::mem::size_of::<#ty>(),
        );

        #[doc(hidden)]
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        #visibility struct #hidden;

        #(#attributes)*
        #visibility const #name: #hidden = #hidden;

        impl ::gin_device::shared::Declaration for #hidden {
            type Value = #ty;
        }

        #[allow(dead_code, reason = "a declaration is used by pointer or as an array")]
        impl #hidden {
            /// Returns the elements of the block's copy, of a declaration of an array.
            #[inline(always)]
            #visibility fn array<T: ::gin_device::bytemuck::Pod, const N: usize>(self) -> ::gin_device::shared::SharedArray<T>
            where
                Self: ::gin_device::shared::Declaration<Value = [T; N]>,
            {
                #[cfg(target_arch = "nvptx64")]
                let address: u32 = {
                    let address;
                    // Safety: takes the address of a variable.
                    unsafe { ::core::arch::asm!(#place, a = out(reg32) address, options(pure, nomem, nostack, preserves_flags)) }
                    address
                };
                #[cfg(not(target_arch = "nvptx64"))]
                let address = self.as_mut_ptr().cast();
                // Safety: the declaration has N elements there, aligned as the type.
                unsafe { ::gin_device::shared::SharedArray::new(::gin_device::sys::shared::Address::new(address), N) }
            }

            /// Returns the block's copy; zeroed on a CPU, not initialised on a GPU.
            #[inline(always)]
            #visibility fn as_mut_ptr(self) -> *mut #ty {
                const { ::core::assert!(::core::mem::align_of::<#ty>() <= 16, "shared memory is aligned to 16 bytes at most") }
                #[cfg(target_arch = "nvptx64")]
                {
                    let address: u64;
                    // Safety: takes the address of a variable.
                    unsafe { ::core::arch::asm!(#address, p = out(reg64) address, options(nomem, nostack, preserves_flags)) }
                    address as usize as *mut #ty
                }
                #[cfg(not(target_arch = "nvptx64"))]
                {
                    static KEY: u8 = 0;
                    ::gin_device::shared::cpu(
                        &raw const KEY as usize, ::core::mem::size_of::<#ty>(), ::core::mem::align_of::<#ty>(),
                    )
                    .cast()
                }
            }
        }
    })
}
