// SPDX-License-Identifier: MIT OR Apache-2.0

//! The installed libraries, and programs that are built against them. Without the tool of a trial it is reported as
//! ignored.

mod common;

use common::{HERE, compiler, library, run, try_run};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Compiles programs by the flags of the pkg-config file, statically, and by the commands of docs/c.md.
fn programs() -> Completion {
    let folder = tempfile::tempdir().expect("make a folder");
    let prefix = common::installed(folder.path(), folder.path());
    let installed = |path: &str| prefix.join(path).display().to_string();

    // The shared library, by the flags of the pkg-config file.
    let values = fs::read_to_string(installed("lib/pkgconfig/gin.pc")).expect("read gin.pc");
    assert!(values.starts_with("# SPDX") && values.contains("prefix=/opt/gin\n"), "{values}");
    let value = |name: &str| {
        let line = values.lines().find_map(|line| line.strip_prefix(name)).expect("gin.pc has the name");
        line.replace("${includedir}", &installed("include")).replace("${libdir}", &installed("lib"))
    };
    let flags = format!("{} {}", value("Cflags: "), value("Libs: "));
    let program = installed("virtual");
    let mut compile = compiler(true);
    compile.args([&format!("{HERE}/../../examples/cuda-cpp/virtual.cpp"), "-o", &program, "-pthread"]);
    run(compile.args(flags.split_whitespace()));
    run(Command::new(&program).arg("2").env("LD_LIBRARY_PATH", installed("lib")));

    // The static library.
    let program = installed("put");
    let mut compile = compiler(false);
    compile.args([&format!("{HERE}/tests/c/put.c"), "-o", &program, &installed("lib/libgin.a"), "-pthread"]);
    run(compile.args(value("Libs.private: ").split_whitespace()));
    run(&mut Command::new(&program));

    // A C program whose kernel is in C++, by the commands of docs/c.md.
    let object = |source: &str, cpp: bool| {
        let (from, to) = (format!("{HERE}/../../examples/c/{source}"), installed(&format!("{source}.o")));
        run(compiler(cpp).args(["-c", &from, "-o", &to]));
        to
    };
    let (kernel, main, program) = (object("pass.cpp", true), object("put.c", false), installed("put_in_c"));
    run(compiler(true).args([&kernel, &main, "-o", &program]).args(flags.split_whitespace()));
    let said = run(Command::new(&program).env("LD_LIBRARY_PATH", installed("lib")));
    assert_eq!(said, "rank 0 of 1 has received 1\n");
    Completion::Completed
}

/// A cargo that compiles an empty library with the options that the script passes to the linker.
const CARGO: &str = r#"#!/bin/sh
set -e
mkdir -p "$CARGO_TARGET_DIR/release"
cd "$CARGO_TARGET_DIR"
case "$*" in
*staticlib*) : >release/libgin_capi.a ;;
*)
    while [ "$1" != -- ]; do shift; done
    shift
    rustc --crate-name gin_capi --crate-type cdylib "$@" -o release/libgin_capi.so empty.rs
    ;;
esac
"#;

/// The library has its soname, which programs that are linked with it ask for, and which is installed.
fn soname() -> Completion {
    let folder = tempfile::tempdir().expect("make a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("empty.rs"), "").expect("write a source");
    // A file that this process has open for writing cannot be executed, nor while a child of another thread has it.
    run(Command::new("sh").args(["-c", "printf %s \"$0\" >\"$1\"; chmod +x \"$1\"", CARGO, &path("cargo")]));
    let mut install = Command::new(format!("{HERE}/../../scripts/install.sh"));
    install.env("CARGO", path("cargo")).env("CARGO_TARGET_DIR", folder.path()).env_remove("LIBRARIES");
    run(install.env("DESTDIR", folder.path()).env("PREFIX", "/"));
    let dynamic = |file: &str| run(Command::new("readelf").args(["-d", file]));

    let version = env!("CARGO_PKG_VERSION").rsplit_once('.').expect("a version has three numbers").0;
    let name = format!("libgin.so.{version}");
    let said = dynamic(&path("lib/libgin.so"));
    assert!(said.contains(&format!("Library soname: [{name}]")), "{said}");
    fs::write(path("main.c"), "int main(void) { return 0; }\n").expect("write a source");
    let mut compile = compiler(false);
    compile.args([&path("main.c"), "-o", &path("main"), "-Wl,--no-as-needed"]);
    run(compile.args([&format!("-L{}", path("lib")), "-lgin"]));
    let said = dynamic(&path("main"));
    assert!(
        said.contains(&format!("Shared library: [{name}]")) && Path::new(&path("lib")).join(name).exists(),
        "{said}"
    );
    Completion::Completed
}

/// Writes the program that docs/c.md prints for the virtual GPU into a folder. Returns its path.
fn program_of_the_docs(folder: &Path) -> PathBuf {
    let docs = fs::read_to_string(format!("{HERE}/../../docs/c.md")).expect("read the page");
    let printed = docs.split("```cpp\n").nth(1).and_then(|rest| rest.split("```").next()).expect("it has a program");
    let source = folder.join("pass.cpp");
    fs::write(&source, printed).expect("write a source");
    source
}

fn docs() -> Completion {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = folder.path().join("pass");
    let mut compile = compiler(true);
    compile.arg(program_of_the_docs(folder.path())).arg("-o").arg(&program);
    run(compile.arg(library("libgin_capi.so")).arg("-pthread"));
    let said = run(&mut Command::new(&program));
    assert!(said.contains("rank 0: passed\n") && said.contains("rank 1: passed\n"), "{said}");
    Completion::Completed
}

/// Compiles all operations in two units without a warning, links them, and runs the program.
fn warnings(compiler: &str) -> Completion {
    if Command::new(compiler).arg("--version").output().is_err() {
        return Completion::ignored_with(format!("there is no {compiler}; scripts/setup.sh installs one"));
    }
    let folder = tempfile::tempdir().expect("make a folder");
    let compile = |standard: &str, options: &[&str]| {
        let mut command = Command::new(compiler);
        command.args([&format!("-std={standard}"), "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion"]);
        command.args(["-Werror", &format!("-I{HERE}/include")]).args(options).current_dir(folder.path());
        run(command.arg(format!("{HERE}/tests/c/warnings.cpp")));
    };
    for standard in ["c++20", "c++2b"] {
        compile(standard, &["-fsyntax-only"]);
    }
    compile("c++17", &["-c", "-o", "first.o", "-DMAIN"]);
    compile("c++17", &["-c", "-o", "second.o", "-DUNIT=second"]);
    let program = folder.path().join("program");
    let objects = ["first.o", "second.o"].map(|name| folder.path().join(name));
    run(Command::new(compiler).args(objects).arg(library("libgin_capi.so")).arg("-o").arg(&program));
    run(&mut Command::new(&program));
    Completion::Completed
}

/// A program in C99, without a warning.
fn c99() -> Completion {
    let folder = tempfile::tempdir().expect("make a folder");
    let [source, program] = ["c99.c", "c99"].map(|name| folder.path().join(name));
    let text = "#include \"gin.h\"\n#include <stdio.h>\nstatic gin_status_t run(void) {\n    gin_config_t config = GIN_CONFIG_INIT;\n    \
                gin_ep_config_t sizes = GIN_EP_CONFIG_INIT;\n    gin_ep_tokens_t tokens = GIN_EP_TOKENS_INIT;\n    \
                gin_ep_combine_t combine = GIN_EP_COMBINE_INIT;\n    uint64_t bytes = 0;\n    \
                gin_job_t job = GIN_NULL;\n    config.device = GIN_DEVICE_VIRTUAL;\n    GIN_TRY(gin_job_local(&config, \
                1, &job));\n    GIN_TRY(gin_job_close(job));\n    sizes.experts = sizes.topk = 2;\n    \
                sizes.hidden = 8;\n    GIN_TRY(gin_ep_footprint(&sizes, 2, 0, &bytes));\n    \
                if (tokens.size + combine.size > bytes) return GIN_ERROR_STATE;\n    puts(\"passed\");\n    \
                return GIN_OK;\n}\nint main(void) { return run() == GIN_OK ? 0 : 1; }\n";
    fs::write(&source, text).expect("write a source");
    let mut compile = compiler(false);
    compile.args(["-std=c99", "-Wshadow", "-Wconversion"]).arg(&source).arg("-o").arg(&program);
    run(compile.arg(library("libgin_capi.so")));
    assert_eq!(run(&mut Command::new(&program)), "passed\n");
    Completion::Completed
}

fn pkg_config() -> Completion {
    if let Err(error) = Command::new("pkg-config").arg("--version").output() {
        return Completion::ignored_with(format!("pkg-config: {error}"));
    }
    let folder = tempfile::tempdir().expect("make a folder");
    let installed = common::installed(folder.path(), folder.path());
    let mut ask = Command::new("pkg-config");
    // The libraries were installed below another root.
    ask.arg(format!("--define-variable=prefix={}", installed.display())).args(["--cflags", "--libs", "gin"]);
    let said = run(ask.env("PKG_CONFIG_PATH", installed.join("lib/pkgconfig")));
    assert!(said.contains("-lgin"), "{said}");
    // In a folder that is not the project's.
    let mut compile = Command::new("c++");
    compile.current_dir(folder.path()).args(["-std=c++17", "-pthread", "-o", "pass"]);
    run(compile.arg(program_of_the_docs(folder.path())).args(said.split_whitespace()));
    let said = run(Command::new(folder.path().join("pass")).env("LD_LIBRARY_PATH", installed.join("lib")));
    assert!(said.contains("passed"), "{said}");
    Completion::Completed
}

fn cmake() -> Completion {
    let cmake = match common::cmake() {
        Ok(cmake) => cmake,
        Err(reason) => return Completion::ignored_with(reason),
    };
    let folder = tempfile::tempdir().expect("make a folder");
    let prefix = common::installed(folder.path(), folder.path());
    let build = common::by_cmake(&cmake, &prefix, &["-DCMAKE_CUDA_COMPILER="]);
    run(Command::new(build.join("virtual")).arg("2"));

    // Another project, in another folder, which asks for components.
    let project = folder.path().join("project");
    fs::create_dir(&project).expect("make a folder");
    program_of_the_docs(&project);
    let configure = |component: &str| {
        let text = format!(
            "cmake_minimum_required(VERSION 3.18)\nproject(mine LANGUAGES CXX)\nfind_package(gin REQUIRED COMPONENTS \
             {component})\nfind_package(Threads REQUIRED)\nadd_executable(pass pass.cpp)\n\
             target_compile_features(pass PRIVATE cxx_std_17)\n\
             target_link_libraries(pass PRIVATE gin::host Threads::Threads)\n"
        );
        fs::write(project.join("CMakeLists.txt"), text).expect("write a project");
        let mut configure = Command::new(&cmake);
        configure.arg("-S").arg(&project).arg("-B").arg(project.join("build"));
        try_run(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())))
    };
    let words = |said: String| said.split_whitespace().collect::<Vec<_>>().join(" ");
    let said = words(configure("device").expect_err("there are no device functions"));
    assert!(said.contains("has no device functions for CUDA C++") && said.contains("`make device-lib`"), "{said}");
    let said = words(configure("divice").expect_err("there is no such component"));
    assert!(said.contains("gin has no component `divice`: there are host, host_static and device."), "{said}");
    configure("host").expect("the library is installed");
    run(Command::new(&cmake).arg("--build").arg(project.join("build")));
    let said = run(&mut Command::new(project.join("build/pass")));
    assert!(said.contains("passed"), "{said}");
    Completion::Completed
}

/// The all-gather over MPI of docs/c.md compiles and works, with an MPI of one rank.
fn mpi() -> Completion {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = folder.path().join("mpi");
    let mut compile = compiler(false);
    compile.arg(format!("-I{HERE}/tests/c/mpi")).arg(format!("{HERE}/../../examples/c/mpi.c"));
    run(compile.arg("-o").arg(&program).arg(library("libgin_capi.so")));
    assert_eq!(run(Command::new(&program).arg("127.0.0.1")), "rank 0 of 1: passed\n");
    let [source, docs] = ["examples/c/mpi.c", "docs/c.md"]
        .map(|file| fs::read_to_string(format!("{HERE}/../../{file}")).expect("read a text"));
    let function = source.split("\n\n").find(|part| part.contains("MPI_Allgather(")).expect("it has the function");
    assert!(docs.contains(function), "docs/c.md has another all-gather than the example");
    Completion::Completed
}

type Check = fn() -> Completion;

fn main() -> ExitCode {
    let trials: [(&str, Check); 9] = [
        ("the_program_that_the_docs_print_compiles_and_runs", docs),
        ("headers_give_no_warning::g++", || warnings("g++")),
        ("headers_give_no_warning::clang++", || warnings("clang++")),
        ("a_program_in_c99_gives_no_warning", c99),
        ("programs_compile_against_the_installed_libraries", programs),
        ("programs_ask_for_the_soname_of_the_installed_library", soname),
        ("pkg_config_knows_the_installed_library", pkg_config),
        ("cmake_finds_the_installed_package", cmake),
        ("a_job_meets_over_mpi", mpi),
    ];
    let trial =
        |(name, run): (&'static str, fn() -> Completion)| Trial::ignorable_test(name, move || Ok::<_, Failed>(run()));
    libtest_mimic::run(&Arguments::from_args(), trials.into_iter().map(trial).collect()).exit_code()
}
