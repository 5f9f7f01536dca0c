// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expansion of `gin_println!`.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{Error, Expr, Ident, LitStr, Result, Token};

/// As in `gin_abi::print`, which this crate does not link; tests of `gin-host` compare them.
const TEXT_BYTES: usize = 96;
const MAX_ARGUMENTS: usize = 7;
const PLAIN: u8 = 1;
const HEX: u8 = 2;
const PREFIXED_HEX: u8 = 3;
const DECIMALS: u8 = 11;

struct Arguments {
    comm: Expr,
    text: LitStr,
    values: Vec<Expr>,
}

impl syn::parse::Parse for Arguments {
    fn parse(input: syn::parse::ParseStream<'_>) -> Result<Self> {
        let comm = input.parse()?;
        if input.is_empty() {
            return Err(input.error("`gin_println!` takes a communicator and a text: `gin_println!(comm, \"{}\", x)`"));
        }
        input.parse::<Token![,]>()?;
        let text = input.parse()?;
        let mut values = Vec::new();
        while !input.is_empty() {
            input.parse::<Token![,]>()?;
            if !input.is_empty() {
                values.push(input.parse()?);
            }
        }
        Ok(Self { comm, text, values })
    }
}

/// Returns the byte that stands for an argument of this form.
fn form(spec: &str) -> Option<u8> {
    match spec {
        "" => Some(PLAIN),
        "x" => Some(HEX),
        "#x" => Some(PREFIXED_HEX),
        _ => {
            let digit = spec.strip_prefix('.').and_then(|digits| digits.parse::<u8>().ok())?;
            (spec.len() == 2).then_some(DECIMALS + digit)
        }
    }
}

/// Returns the bytes of a text, with a byte for each argument, and the arguments in their order.
fn read(text: &LitStr, values: Vec<Expr>) -> Result<(Vec<u8>, Vec<Expr>)> {
    let error = |message: String| Error::new(text.span(), message);
    let (mut bytes, mut arguments, mut positional) = (Vec::new(), Vec::new(), values.into_iter());
    let value = text.value();
    let mut chars = value.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '{' if chars.peek() == Some(&'{') => bytes.push(b'{'),
            '}' if chars.peek() == Some(&'}') => bytes.push(b'}'),
            '}' => return Err(error("unmatched `}`: write `}}` for a brace".into())),
            '{' => {
                let inner: String = chars.by_ref().take_while(|&c| c != '}').collect();
                let (name, spec) = inner.split_once(':').unwrap_or((&inner, ""));
                let form = form(spec).ok_or_else(|| {
                    error(format!(
                        "`{{{inner}}}` is not known here: there are `{{}}`, `{{:x}}`, `{{:#x}}` and `{{:.3}}`"
                    ))
                })?;
                bytes.push(form);
                arguments.push(if name.is_empty() {
                    positional.next().ok_or_else(|| error("there are more `{}` than values".into()))?
                } else {
                    let name: Ident = syn::parse_str(name).map_err(|_| {
                        error(format!("`{name}` is not a name; name variables or count on their order"))
                    })?;
                    let name = Ident::new(&name.to_string(), text.span());
                    syn::parse_quote!(#name)
                });
                continue;
            }
            // Bytes below 32 stand for arguments.
            '\n' | '\t' => bytes.push(c as u8),
            c if c < ' ' => return Err(error(format!("the text has the control character {c:?}"))),
            c => {
                bytes.extend(c.encode_utf8(&mut [0; 4]).bytes());
                continue;
            }
        }
        if c == '{' || c == '}' {
            chars.next();
        }
    }
    if positional.next().is_some() {
        return Err(error("there are more values than `{}`".into()));
    }
    if bytes.len() > TEXT_BYTES {
        return Err(error(format!("the text has {} bytes; a line has room for {TEXT_BYTES}", bytes.len())));
    }
    if arguments.len() > MAX_ARGUMENTS {
        return Err(error(format!("there are {} values; a line has room for {MAX_ARGUMENTS}", arguments.len())));
    }
    Ok((bytes, arguments))
}

pub(crate) fn expand(item: TokenStream) -> Result<TokenStream> {
    let Arguments { comm, text, values } = syn::parse2(item)?;
    let (bytes, arguments) = read(&text, values)?;
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    // A text of fewer words ends with a word that begins with 0.
    let words: Vec<u64> =
        if bytes.len() < TEXT_BYTES { words.chain([0]).take(TEXT_BYTES / 8).collect() } else { words.collect() };
    let words = (0_u64..).zip(words).map(|(number, word)| quote!(line.text(#number, #word);));
    let names: Vec<Ident> = (0..arguments.len()).map(|number| format_ident!("value{number}")).collect();
    let count = arguments.len() as u64;
    let kinds = names.iter().enumerate().map(|(number, name)| {
        let shift = 8 * (number as u32 + 1);
        quote!(| ::gin_device::print::kind(&#name) << #shift)
    });
    let stores = (0_u64..).zip(&names).map(|(number, name)| quote!(line.argument(#number, #name);));
    Ok(quote! {
        if ::gin_device::print::ENABLED {
            // A `match`, so that temporary values live as long as they are used.
            match (&#comm, (#(#arguments,)*)) {
                (comm, (#(#names,)*)) => {
                    let kinds = #count #(#kinds)*;
                    if let ::core::option::Option::Some(line) = ::gin_device::print::Line::begin(comm, kinds) {
                        #(#words)*
                        #(#stores)*
                        line.end();
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(item: &str) -> String {
        match expand(item.parse().unwrap()) {
            Ok(tokens) => panic!("accepted: {tokens}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn texts_that_a_line_cannot_have_are_refused_with_the_reason() {
        assert!(error("comm").contains("a communicator and a text"));
        assert!(error("comm, \"{}\"").contains("more `{}` than values"));
        assert!(error("comm, \"\", 1").contains("more values than `{}`"));
        assert!(error("comm, \"{:?}\", 1").contains("`{:?}` is not known here"));
        assert!(error("comm, \"{:.12}\", 1.0").contains("`{:.12}` is not known here"));
        assert!(error("comm, \"}\"").contains("unmatched"));
        assert!(error(&format!("comm, \"{}\"", "a".repeat(97))).contains("97 bytes; a line has room for 96"));
        assert!(error(&format!("comm, \"{}\" {}", "{}".repeat(8), ", 1".repeat(8))).contains("8 values"));
    }

    #[test]
    fn a_text_has_a_byte_for_each_argument_and_single_braces() {
        let text = LitStr::new("{{{}}} {x:#x} {:.2}é", proc_macro2::Span::call_site());
        let (bytes, arguments) = read(&text, vec![syn::parse_quote!(1), syn::parse_quote!(2.0)]).unwrap();
        assert_eq!(bytes, "{\u{1}} \u{3} \u{d}é".as_bytes());
        assert_eq!(arguments.len(), 3);
    }
}
