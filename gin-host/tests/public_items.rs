// SPDX-License-Identifier: MIT OR Apache-2.0
//! `docs/public-items.txt` lists exactly the public items of the covered crates that their documentation shows. Names
//! that a macro makes inside a crate are not in the list.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, Meta, UseTree, Visibility};

/// The crates, and the folders of their sources from this one's.
const CRATES: [(&str, &str); 4] = [
    ("gin_device", "../gin-device/src"),
    ("gin_ep", "../gin-ep/src"),
    ("gin_ep_kernels", "../gin-ep/kernels/src"),
    ("gin_host", "src"),
];

/// A module: its path, the folder of its child modules, and its items.
struct Module {
    path: String,
    folder: PathBuf,
    items: Vec<Item>,
}

impl Module {
    fn read(path: String, file: &Path) -> Self {
        let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let folder = match file.file_name().and_then(|name| name.to_str()) {
            Some("lib.rs" | "mod.rs") => file.parent().map(Path::to_owned),
            _ => Some(file.with_extension("")),
        };
        let items = syn::parse_file(&text).expect("the file is valid Rust").items;
        Self { path, folder: folder.expect("a file is in a folder"), items }
    }

    /// Returns the module `name` in this one, which it declares with or without a body.
    fn child(&self, name: &str, body: Option<&[Item]>) -> Self {
        let (path, folder) = (format!("{}::{name}", self.path), self.folder.join(name));
        match body {
            Some(items) => Self { path, folder, items: items.to_vec() },
            None => {
                let file = self.folder.join(format!("{name}.rs"));
                let file = if file.exists() { file } else { folder.join("mod.rs") };
                Self::read(path, &file)
            }
        }
    }

    /// Returns the private module whose items a `pub use` with `*` shows in this one.
    fn private(&self, name: &str) -> Self {
        let is_it = |item: &&Item| matches!(item, Item::Mod(item) if item.ident == name);
        let Some(Item::Mod(item)) = self.items.iter().find(is_it) else {
            panic!("{} has a `pub use` with `*` of {name}, which is no module in it: name the items", self.path)
        };
        let child = self.child(name, item.content.as_ref().map(|(_, items)| items.as_slice()));
        Self { path: self.path.clone(), ..child }
    }

    /// Collects the names that a `use` makes public.
    fn names(&self, tree: &UseTree, found: &mut BTreeSet<String>) {
        match tree {
            UseTree::Path(path) => match &*path.tree {
                UseTree::Glob(_) => self.private(&path.ident.to_string()).collect(found),
                tree => self.names(tree, found),
            },
            UseTree::Name(name) => drop(found.insert(format!("{}::{}", self.path, name.ident))),
            UseTree::Rename(rename) => drop(found.insert(format!("{}::{}", self.path, rename.rename))),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.names(tree, found)),
            UseTree::Glob(_) => panic!("{} has a `pub use` with `*`: name the items", self.path),
        }
    }

    /// Collects the public items.
    fn collect(&self, found: &mut BTreeSet<String>) {
        for item in &self.items {
            let (visibility, attributes, name) = match item {
                Item::Use(item) if is_shown(&item.vis, &item.attrs) => {
                    self.names(&item.tree, found);
                    continue;
                }
                Item::Mod(item) if is_shown(&item.vis, &item.attrs) => {
                    let body = item.content.as_ref().map(|(_, items)| items.as_slice());
                    self.child(&item.ident.to_string(), body).collect(found);
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
                found.insert(format!("{}::{name}", self.path));
            }
        }
    }
}

/// Returns whether the documentation shows an item. It is made on a host, without tests and models.
fn is_shown(visibility: &Visibility, attributes: &[Attribute]) -> bool {
    let hides = |attribute: &Attribute| {
        let Meta::List(list) = &attribute.meta else { return false };
        let text = list.tokens.to_string().replace(' ', "");
        if attribute.path().is_ident("doc") {
            return text == "hidden";
        }
        let is_other = text == "target_arch=\"nvptx64\"" || text.contains("test") || text.contains("loom");
        attribute.path().is_ident("cfg") && is_other
    };
    matches!(visibility, Visibility::Public(_)) && !attributes.iter().any(hides)
}

#[test]
fn the_public_items_are_those_that_the_file_lists() {
    let mut found = BTreeSet::new();
    for (name, folder) in CRATES {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join("lib.rs");
        Module::read(name.to_owned(), &file).collect(&mut found);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/public-items.txt");
    if std::env::var_os("GIN_BLESS").is_some() {
        let text: String = found.iter().map(|name| format!("{name}\n")).collect();
        std::fs::write(&path, text).expect("write the list");
    }
    let text = std::fs::read_to_string(&path).expect("read the list");
    let listed: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    let missing: Vec<_> = found.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "the crates changed: add {missing:#?} to docs/public-items.txt, remove {gone:#?}, and add the change to \
         CHANGELOG.md; with GIN_BLESS=1 the test writes the list"
    );
}
