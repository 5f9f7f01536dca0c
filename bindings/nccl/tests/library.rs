// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shared library, as NCCL loads it.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::process::Command;

fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let found = program.parent().unwrap().join("libgin_nccl.so");
    assert!(found.is_file(), "{} does not exist", found.display());
    found
}

#[test]
fn the_library_has_its_tables_and_stays_loaded_when_nccl_closes_it() {
    // `RTLD_NOLOAD` of Linux.
    const NO_LOAD: c_int = 4;
    let path = library();
    // Safety: the library's initialisers are those of Rust's standard library.
    unsafe {
        let plugin = Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL).unwrap();
        for (name, title, size) in [
            ("ncclGinPlugin_v14", c"gin-gdaki", 136),
            ("ncclRmaPlugin_v14", c"gin", 168),
            ("ncclRmaPlugin_v15", c"gin", 168),
            ("ncclRmaPlugin_v16", c"gin", 176),
        ] {
            let table = plugin.get::<*const *const c_char>(name.as_bytes()).unwrap();
            let words = std::slice::from_raw_parts(*table, size / 8);
            assert_eq!(CStr::from_ptr(words[0]), title);
            assert!(words.iter().all(|word| !word.is_null()), "{name}");
        }
        plugin.close().unwrap();
        Library::open(Some(&path), RTLD_NOW | NO_LOAD).expect("the library is still loaded").close().unwrap();
    }
}

#[test]
fn the_library_exports_nothing_else() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().last()).collect();
    names.sort_unstable();
    assert_eq!(names, ["ncclGinPlugin_v14", "ncclRmaPlugin_v14", "ncclRmaPlugin_v15", "ncclRmaPlugin_v16"]);
}
