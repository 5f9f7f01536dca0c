// SPDX-License-Identifier: MIT OR Apache-2.0
//! `docs/public-items.txt` lists exactly the public items of the crate that its documentation shows.

use std::collections::BTreeSet;
use syn::{Attribute, Item, UseTree, Visibility};

/// Collects the names that a `use` makes public.
fn names(tree: &UseTree, module: &str, found: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) => names(&path.tree, module, found),
        UseTree::Name(name) => drop(found.insert(format!("{module}::{}", name.ident))),
        UseTree::Rename(rename) => drop(found.insert(format!("{module}::{}", rename.rename))),
        UseTree::Group(group) => group.items.iter().for_each(|tree| names(tree, module, found)),
        UseTree::Glob(_) => panic!("{module} has a `pub use` with `*`: name the items"),
    }
}

fn is_shown(visibility: &Visibility, attributes: &[Attribute]) -> bool {
    let hides = |attribute: &Attribute| {
        attribute.path().is_ident("doc") && attribute.parse_args::<syn::Ident>().is_ok_and(|word| word == "hidden")
    };
    matches!(visibility, Visibility::Public(_)) && !attributes.iter().any(hides)
}

/// Collects the public items of a module.
fn items(list: &[Item], module: &str, found: &mut BTreeSet<String>) {
    for item in list {
        let (visibility, attributes, name) = match item {
            Item::Use(item) if is_shown(&item.vis, &item.attrs) => {
                names(&item.tree, module, found);
                continue;
            }
            Item::Mod(item) if is_shown(&item.vis, &item.attrs) => {
                let inner = format!("{module}::{}", item.ident);
                match (&item.content, inner.as_str()) {
                    (Some((_, list)), _) => items(list, &inner, found),
                    (None, "gin_host::comm") => items(&parsed(include_str!("../src/comm/mod.rs")), &inner, found),
                    (None, _) => panic!("{inner} is in a file that this test does not read"),
                }
                continue;
            }
            Item::Const(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Enum(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Fn(item) => (&item.vis, &item.attrs, &item.sig.ident),
            Item::Static(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Struct(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Trait(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Type(item) => (&item.vis, &item.attrs, &item.ident),
            _ => continue,
        };
        if is_shown(visibility, attributes) {
            found.insert(format!("{module}::{name}"));
        }
    }
}

fn parsed(text: &str) -> Vec<Item> {
    syn::parse_file(text).expect("the file is valid Rust").items
}

#[test]
fn the_public_items_are_those_that_the_file_lists() {
    let mut found = BTreeSet::new();
    items(&parsed(include_str!("../src/lib.rs")), "gin_host", &mut found);
    let listed: BTreeSet<String> = include_str!("../../docs/public-items.txt").lines().map(str::to_owned).collect();
    let missing: Vec<_> = found.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "the crate changed: add {missing:#?} to docs/public-items.txt, remove {gone:#?}, and add the change to CHANGELOG.md"
    );
}
