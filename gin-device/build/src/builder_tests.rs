// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::folders::target_above;

#[test]
fn the_variable_replaces_the_architectures_that_ship() {
    let with = |value: &str| {
        let vars = [("GIN_ARCHS".into(), value.into())].into();
        archs_of(&Environment { vars, ..Environment::default() })
    };
    assert_eq!(archs_of(&Environment::default()).unwrap(), SHIPPED);
    assert_eq!(with("").unwrap(), SHIPPED);
    assert_eq!(with("sm_90, sm_100a").unwrap(), [Arch::Sm90, Arch::Sm100a]);
    let text = with("sm_90,sm_42").unwrap_err().to_string();
    assert!(text.starts_with("GIN_ARCHS=sm_90,sm_42 cannot be used: ") && text.contains("`sm_42`"), "{text}");
}

#[test]
fn kernels_are_embedded_by_build_scripts_only() {
    let error = KernelBuilder::new("kernels").arch(Arch::Sm90).embed_in(&Environment::default(), "ptx").unwrap_err();
    assert!(error.to_string().contains("only build scripts have it"), "{error}");
}

#[test]
fn nested_builds_of_all_packages_share_one_target_folder() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("target");
    let out = target.join("debug/build/gin-0123456789abcdef/out");
    fs::create_dir_all(&out).unwrap();
    assert_eq!(target_above(&out), target);
    // With `--target`, builds are one level deeper; the mark identifies the folder.
    let out = target.join("x86_64-unknown-linux-gnu/debug/build/gin-0123456789abcdef/out");
    fs::create_dir_all(&out).unwrap();
    fs::write(target.join("CACHEDIR.TAG"), "").unwrap();
    assert_eq!(target_above(&out), target);
    assert_eq!(target_above(Path::new("/somewhere/else")), Path::new("/somewhere/else"));
}
