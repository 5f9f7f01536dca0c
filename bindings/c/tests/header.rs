// SPDX-License-Identifier: MIT OR Apache-2.0

//! The header `gin.h`, and the list of symbols and layouts, are those of the sources. `GIN_BLESS=1` writes both anew.

mod common;

use common::{HERE, compiler, library, run};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const HEADER: &str = r#"
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The host library of gin; docs/c.md is the page for users. cbindgen made this file from bindings/c/src: do not edit it.
//
// Every function returns a gin_status_t, except gin_last_error, gin_status_name, gin_version and gin_abi. After an error
// gin_last_error() returns the text, for the calling thread. An output is written only on success. Each handle is
// checked: a null, closed or foreign one is GIN_ERROR_HANDLE. A pointer is checked for null and alignment, and for nothing
// more; it must stay valid during the call.
//
// Any thread may call any function. While a call on a communicator waits for other ranks, other calls on it return
// GIN_ERROR_BUSY, except abort, check, fault and progress. A collective call is one that all ranks make together.
//
// No panic and no exception leaves the library. It installs no signal handler, except for virtual GPUs: that of SIGSEGV
// explains an overflow of a kernel's stack, and passes other faults on to the handler of the program; that of SIGQUIT
// prints what waits, and is not installed if the program handles or ignores the signal. In the child of a fork every call
// returns GIN_ERROR_FORK.
"#;

const AFTER_INCLUDES: &str = r#"
/// The defaults of a `gin_config_t`.
#define GIN_CONFIG_INIT { sizeof(gin_config_t), GIN_ABI_VERSION, 0, -1, 0, 0, 0, 300000, GIN_FOREVER, 0, 0, 0, NULL, NULL }

/// The defaults of a `gin_requirements_t`.
#define GIN_REQUIREMENTS_INIT { sizeof(gin_requirements_t), 1, 16, 16, 256, 0, 0, 0, 64, 1024 }

/// The defaults of a `gin_ep_config_t`: 128 tokens, one slot, BF16, a deadline of a second. `experts`, `hidden` and
/// `topk` have none.
#define GIN_EP_CONFIG_INIT { sizeof(gin_ep_config_t), 0, 0, 0, 128, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1000 }

/// No memory.
#define GIN_MEMORY_NULL { NULL, 0 }

/// The defaults of a `gin_ep_tokens_t`: no token, ids of 32 bits.
#define GIN_EP_TOKENS_INIT \
    { sizeof(gin_ep_tokens_t), 0, 32, 0, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, \
      GIN_MEMORY_NULL, GIN_NULL }

/// The defaults of a `gin_ep_combine_t`: the received rows, sums from zero.
#define GIN_EP_COMBINE_INIT \
    { sizeof(gin_ep_combine_t), 0, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_NULL, 0, 0 }

/// The defaults of a `gin_ep_experts_t`: products return to the ranks of their tokens.
#define GIN_EP_EXPERTS_INIT \
    { sizeof(gin_ep_experts_t), 0, GIN_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL }

/// The defaults of a `gin_ep_permuted_into_t`: the memory of gin.
#define GIN_EP_PERMUTED_INTO_INIT \
    { sizeof(gin_ep_permuted_into_t), 0, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL }

/// The defaults of a `gin_ep_metadata_t`: nothing is stored.
#define GIN_EP_METADATA_INIT \
    { sizeof(gin_ep_metadata_t), 0, 32, 0, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, \
      GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL }

/// A null handle of any type.
#define GIN_NULL { 0 }

/// Returns the status of `call` from the calling function, if it is an error.
#define GIN_TRY(call) \
    do { \
        gin_status_t gin_try_status = (call); \
        if (gin_try_status != GIN_OK) return gin_try_status; \
    } while (0)
"#;

fn generated() -> String {
    let source = |name: &str| format!("{HERE}/src/{name}.rs");
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        pragma_once: true,
        cpp_compat: true,
        line_length: 110,
        documentation_style: cbindgen::DocumentationStyle::C99,
        header: Some(HEADER.trim().to_owned()),
        after_includes: Some(AFTER_INCLUDES.to_owned()),
        ..Default::default()
    };
    config.export.rename.insert("CommHandle".to_owned(), "gin_device_comm_t".to_owned());
    config.export.rename.insert("WindowHandle".to_owned(), "gin_device_window_t".to_owned());
    config.export.include = [
        "gin_backend_t",
        "gin_device_kind_t",
        "gin_ep_code_t",
        "gin_ep_element_t",
        "gin_ep_layout_t",
        "gin_network_t",
        "gin_status_t",
    ]
    .map(str::to_owned)
    .to_vec();
    config.export.rename.insert("WindowData".to_owned(), "gin_device_window_entry_t".to_owned());
    config.export.include.push("WindowData".to_owned());
    // Constants and types of the layouts that C does not need.
    config.export.exclude = [
        "StatusBlock",
        "ContextData",
        "BackendKind",
        "FaultRecord",
        "ENGINE_GPU",
        "ENGINE_NIC",
        "ENGINE_CPU",
        "CAP_STRONG_SIGNALS",
        "CAP_VA_SIGNALS",
        "CAP_MULTIMEM",
        "CAP_COMPLETION_IS_ARRIVAL",
        "NEAR_WORDS",
        "QUEUE_NEAR",
        "STRIDE_SHIFT",
        "WINDOW_SIGNALS",
    ]
    .map(str::to_owned)
    .to_vec();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for name in [
        "types",
        "status",
        "job",
        "comm",
        "window",
        "launch",
        "graph",
        "ep/types",
        "ep/group",
        "ep/slot",
        "ep/permuted",
        "ep/product",
    ] {
        builder = builder.with_src(source(name));
    }
    builder = builder.with_src(format!("{HERE}/../../gin-device/abi/src/handle.rs"));
    let mut text = Vec::new();
    builder.generate().expect("cbindgen reads the sources").write(&mut text);
    let text = String::from_utf8(text).expect("the header is UTF-8");
    // Links of rustdoc, and sections that repeat the head of the file.
    let text = text.replace("\n//\n// # Safety\n// - As the crate's docs say.", "");
    let text = text.replace("// # Safety\n// - As the crate's docs say; ", "// The caller ensures: ");
    let text = text.replace("// # Safety\n// - As the crate's docs say. ", "// The caller ensures: ");
    // A section's lines are indented as those of its list.
    text.replace("\n//   ", "\n// ").replace("[`", "`").replace("`]", "`")
}

/// Compares a file with its content as it should be, or writes it.
fn compare(path: &str, fresh: &str) {
    let path = Path::new(HERE).join(path);
    if std::env::var_os("GIN_BLESS").is_some() {
        std::fs::write(&path, fresh).expect("write the file");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    let first = kept.lines().zip(fresh.lines()).find(|(kept, fresh)| kept != fresh);
    assert!(kept == fresh, "{} is not of these sources, first at {first:?}: run with GIN_BLESS=1", path.display());
}

#[test]
fn the_header_is_that_of_the_sources() {
    compare("include/gin.h", &generated());
}

#[test]
fn every_function_returns_a_status_but_four_that_cannot_fail() {
    let header = generated();
    let (mut functions, mut others) = (0, BTreeSet::new());
    for line in header.lines().filter(|line| !line.starts_with([' ', '/', '#']) && !line.starts_with("typedef")) {
        let Some((before, _)) = line.split_once('(') else { continue };
        let name = before.rsplit([' ', '*']).next().unwrap_or_default();
        functions += 1;
        if before.strip_suffix(name).map(str::trim) != Some("gin_status_t") {
            others.insert(name.to_owned());
        }
    }
    assert!(functions > 40, "{functions} functions");
    assert_eq!(others, ["gin_abi", "gin_last_error", "gin_status_name", "gin_version"].map(str::to_owned).into());
}

/// Returns the size, the alignment and the offsets of all structs of the header, as the C compiler lays them out.
fn layouts() -> String {
    let header = generated();
    let mut source = String::from("#include \"gin.h\"\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {\n");
    for of_struct in header.split("\ntypedef struct ").skip(1) {
        let (name, rest) = of_struct.split_once(" {\n").expect("a struct has a body");
        let (body, _) = rest.split_once("\n}").expect("a body ends");
        let size = "printf(\"%s: size %zu, alignment %zu\\n\"";
        writeln!(source, "{size}, \"{name}\", sizeof({name}), _Alignof({name}));").expect("write");
        let fields = body.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        for field in fields {
            let declared = field.split(['[', ';']).next().unwrap_or_default();
            let field = declared.rsplit([' ', '*']).next().unwrap_or_default();
            writeln!(source, "printf(\"  %s at %zu\\n\", \"{field}\", offsetof({name}, {field}));").expect("write");
        }
    }
    source += "return 0;\n}\n";
    let folder = tempfile::tempdir().expect("make a folder");
    let [file, program] = ["layouts.c", "layouts"].map(|name| folder.path().join(name));
    std::fs::write(&file, source).expect("write a source");
    run(compiler(false).arg(&file).arg("-o").arg(&program));
    run(&mut Command::new(&program))
}

#[test]
fn the_shared_library_exports_the_listed_symbols_and_no_others_and_structs_have_the_listed_layouts() {
    let names = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library("libgin_capi.so")));
    let names: BTreeSet<&str> = names.lines().filter_map(|line| line.split_whitespace().last()).collect();
    let list: String = names.iter().map(|name| format!("{name}\n")).collect();
    compare("symbols.txt", &(list + &layouts()));
    assert!(names.iter().all(|name| name.starts_with("gin_")), "{names:?}");
}
