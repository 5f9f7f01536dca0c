// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expansion of `#[kernel]`.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote};
use syn::spanned::Spanned;
use syn::{Error, FnArg, ItemFn, LitInt, Pat, Result, ReturnType, Token, Type};

/// Largest number of threads of a block: CUDA's limit for every architecture.
const MAX_THREADS: u32 = 1024;

#[derive(Default)]
struct Arguments {
    launch_bounds: Option<(u32, u32)>,
}

impl syn::parse::Parse for Arguments {
    fn parse(input: syn::parse::ParseStream<'_>) -> Result<Self> {
        if input.is_empty() {
            return Ok(Self::default());
        }
        let name: syn::Ident = input.parse()?;
        if name != "launch_bounds" {
            return Err(Error::new(
                name.span(),
                "expected `launch_bounds(max_threads)` or `launch_bounds(max_threads, min_blocks)`",
            ));
        }
        let content;
        syn::parenthesized!(content in input);
        let numbers = content.parse_terminated(LitInt::parse, Token![,])?;
        let value = |index: usize| numbers.get(index).map(LitInt::base10_parse::<u32>).transpose();
        let (Some(threads), blocks, None) = (value(0)?, value(1)?, value(2)?) else {
            return Err(Error::new(name.span(), "`launch_bounds` takes one or two numbers"));
        };
        if threads == 0 || threads > MAX_THREADS || blocks == Some(0) {
            return Err(Error::new(
                numbers.span(),
                format!("a block has 1 to {MAX_THREADS} threads, and an SM at least 1 block"),
            ));
        }
        Ok(Self { launch_bounds: Some((threads, blocks.unwrap_or(1))) })
    }
}

/// Rejects signatures that a PTX entry cannot have. The expansion asserts the layout of parameters.
fn check(function: &ItemFn) -> Result<()> {
    let signature = &function.sig;
    if signature.unsafety.is_none() {
        return Err(Error::new(
            signature.fn_token.span(),
            "a kernel must be `unsafe fn`: its caller must guarantee that its pointers and windows are valid",
        ));
    }
    if !signature.generics.params.is_empty() {
        return Err(Error::new(
            signature.generics.span(),
            "a kernel cannot be generic: call a generic function from it",
        ));
    }
    if let Some(token) = &signature.asyncness {
        return Err(Error::new(token.span(), "a kernel cannot be async"));
    }
    if let ReturnType::Type(_, ty) = &signature.output {
        return Err(Error::new(ty.span(), "a kernel returns nothing: report errors through `Comm::report`"));
    }
    for input in &signature.inputs {
        let FnArg::Typed(parameter) = input else {
            return Err(Error::new(input.span(), "a kernel cannot be a method"));
        };
        if !matches!(*parameter.pat, Pat::Ident(_)) {
            return Err(Error::new(parameter.pat.span(), "a kernel's parameter needs a plain name"));
        }
        match &*parameter.ty {
            Type::Reference(_) => {
                return Err(Error::new(
                    parameter.ty.span(),
                    "a kernel cannot take references: the compiler would assume that no one else writes to the memory; take a `Window` or a raw pointer",
                ));
            }
            Type::Slice(_) => {
                return Err(Error::new(
                    parameter.ty.span(),
                    "a kernel cannot take slices: take a pointer and a length",
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

pub(crate) fn expand(arguments: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let arguments: Arguments = syn::parse2(arguments)?;
    let function: ItemFn = syn::parse2(item)?;
    check(&function)?;

    let (attributes, visibility, block) = (&function.attrs, &function.vis, &function.block);
    let (name, inputs) = (&function.sig.ident, &function.sig.inputs);
    let (mut types, mut parameters) = (Vec::new(), Vec::new());
    for input in inputs {
        let FnArg::Typed(parameter) = input else { continue };
        let Pat::Ident(pattern) = &*parameter.pat else { continue };
        types.push(&*parameter.ty);
        parameters.push(&pattern.ident);
    }
    let names = parameters.iter().map(ToString::to_string);
    let type_names = types.iter().map(|ty| {
        let text = ty.to_token_stream().to_string().replace(' ', "");
        text.replace("*mut", "*mut ").replace("*const", "*const ")
    });
    let values: Vec<_> = (types.iter().enumerate())
        .map(|(index, ty)| quote!(unsafe { (*params.add(#index)).cast::<#ty>().read_unaligned() }))
        .collect();
    let bounds = match arguments.launch_bounds {
        Some((threads, blocks)) => quote!(::core::option::Option::Some((#threads, #blocks))),
        None => quote!(::core::option::Option::None),
    };
    let marker = arguments.launch_bounds.map(|(threads, blocks)| {
        let text = format!("// gin.launch_bounds {name} {threads} {blocks}");
        quote! {
            #[cfg(target_arch = "nvptx64")]
            ::core::arch::global_asm!(#text);
        }
    });
    let entry = format_ident!("__GIN_KERNEL_{}", name);
    let text = name.to_string();
    // These cannot be mistaken for parameters of the kernel.
    let (stream, config) = (Ident::new("stream", Span::mixed_site()), Ident::new("config", Span::mixed_site()));
    // The launcher's type is hidden from documentation, because links to the kernel would be ambiguous.
    Ok(quote! {
        #[cfg(target_arch = "nvptx64")]
        #(#attributes)*
        #[unsafe(no_mangle)]
        #visibility unsafe extern "ptx-kernel" fn #name(#inputs) #block

        #marker

        #[cfg(not(target_arch = "nvptx64"))]
        #(#attributes)*
        #visibility unsafe fn #name(#inputs) #block

        #[cfg(not(target_arch = "nvptx64"))]
        #[doc(hidden)]
        #[allow(dead_code, non_camel_case_types, reason = "it has the kernel's name, and not each program launches it")]
        #visibility enum #name {}

        #[cfg(not(target_arch = "nvptx64"))]
        const _: () = {
            #[allow(dead_code, reason = "not each program launches it")]
            #[allow(clippy::missing_safety_doc, reason = "clippy does not see it if `macro_rules` made the kernel")]
            #[allow(clippy::too_many_arguments, reason = "the kernel has as many")]
            impl #name {
                /// Launches the kernel, after a check of the shape against the limits of kernel and device.
                ///
                /// # Safety
                /// - The conditions in the kernel's own `# Safety` section hold until it has ended; communicators and
                ///   windows among the arguments are alive until then.
                ///
                /// # Errors
                /// An error of the device; nothing runs then.
                #visibility unsafe fn launch<GinStream: ::gin_device::kernel::LaunchStream + ?Sized>(
                    #stream: &GinStream,
                    #config: GinStream::Config,
                    #(#parameters: impl ::gin_device::kernel::LaunchArg<#types>),*
                ) -> ::core::result::Result<(), GinStream::Error> {
                    unsafe {
                        #(let #parameters: #types = ::gin_device::kernel::LaunchArg::into_param(#parameters);)*
                        let values: &[*const u8] = &[#((&raw const #parameters).cast::<u8>()),*];
                        ::gin_device::kernel::LaunchStream::launch_entry(#stream, &#entry, #config, values)
                    }
                }
            }

            #[allow(non_upper_case_globals)]
            #[::gin_device::__private::linkme::distributed_slice(::gin_device::kernel::KERNELS)]
            #[linkme(crate = ::gin_device::__private::linkme)]
            static #entry: ::gin_device::kernel::KernelEntry = ::gin_device::kernel::KernelEntry {
                name: #text,
                module: ::core::module_path!(),
                abi: ::gin_device::__private::ABI_VERSION,
                params: &[#(::gin_device::kernel::KernelParam::new::<#types>(#names, #type_names),)*],
                launch_bounds: #bounds,
                call: {
                    unsafe fn call(params: *const *const u8) {
                        let _ = params;
                        unsafe { #name(#(#values),*) }
                    }
                    call
                },
            };
        };
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(arguments: &str, item: &str) -> String {
        match expand(arguments.parse().unwrap(), item.parse().unwrap()) {
            Ok(tokens) => panic!("accepted: {tokens}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn what_a_ptx_entry_cannot_take_is_refused_with_the_reason() {
        assert!(error("", "fn k() {}").contains("unsafe fn"));
        assert!(error("", "unsafe fn k<T: Copy>(x: T) {}").contains("generic"));
        let docs = include_str!("../../../docs/kernels.md").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(docs.contains(&error("", "unsafe fn k(x: &u32) {}")), "the traps name the text for references");
        assert!(error("", "unsafe fn k() -> u32 { 0 }").contains("report"));
        assert!(error("", "unsafe fn k((a, b): (u32, u32)) {}").contains("plain name"));
        assert!(error("", "unsafe fn k(self) {}").contains("method"));
    }

    #[test]
    fn launch_bounds_outside_the_limits_are_refused() {
        assert!(error("launch_bounds(2048)", "unsafe fn k() {}").contains("1024"));
        assert!(error("launch_bounds(0)", "unsafe fn k() {}").contains("1024"));
        assert!(error("launch_bounds(1, 2, 3)", "unsafe fn k() {}").contains("one or two"));
        assert!(error("cluster(2)", "unsafe fn k() {}").contains("launch_bounds"));
    }
}
