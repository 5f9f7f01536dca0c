// SPDX-License-Identifier: MIT OR Apache-2.0
//! `docs/public-items.txt` lists exactly the facade's public items.

use std::collections::BTreeSet;
use syn::{Item, UseTree, Visibility};

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

/// Collects the public items of a module.
fn items(list: &[Item], module: &str, found: &mut BTreeSet<String>) {
    for item in list {
        match item {
            Item::Use(item) if matches!(item.vis, Visibility::Public(_)) => names(&item.tree, module, found),
            Item::Mod(item) if matches!(item.vis, Visibility::Public(_)) => {
                let (_, list) = item.content.as_ref().expect("the facade's modules are written in lib.rs");
                items(list, &format!("{module}::{}", item.ident), found);
            }
            _ => {}
        }
    }
}

#[test]
fn the_public_items_are_those_that_the_file_lists() {
    let file = syn::parse_file(include_str!("../src/lib.rs")).expect("lib.rs is valid Rust");
    let mut found = BTreeSet::new();
    items(&file.items, "gin", &mut found);
    let listed: BTreeSet<String> = include_str!("../docs/public-items.txt").lines().map(str::to_owned).collect();
    let missing: Vec<_> = found.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "the facade changed: add {missing:#?} to docs/public-items.txt, remove {gone:#?}, and add the change to CHANGELOG.md"
    );
}
