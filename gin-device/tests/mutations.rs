// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutations: weakens or swaps each place in the sources whose order matters, and requires that some model fails.
//!
//! `sites` finds the places in the sources. For each place, this program starts itself once more with the mutation in
//! an environment variable, and that process runs the models until one fails. [`NOT_OBSERVABLE`] lists the places whose
//! mutation no model can catch, each with the reason and with an argument for its correctness. It is an error if a
//! model catches a mutation of that list, or if no model passes a place.

mod model;
#[path = "model/sites.rs"]
mod sites;

use gin_device::sys::loom::{Mutation, hits, mutate};
use libtest_mimic::{Arguments, Failed, Trial};
use sites::{Site, scan, scan_file};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// A place whose mutation the models cannot catch.
struct NotObservable {
    /// The key of the place.
    site: &'static str,
    /// The reason why loom does not see it.
    reason: &'static str,
    /// The argument that the code is correct and needs the place.
    argument: &'static str,
    /// Its form on a GPU.
    ptx: &'static str,
}

const NOT_OBSERVABLE: &[NotObservable] = &[NotObservable {
    site: "status.rs look: fence_acquire_sys",
    reason: "a thread with another thread's value also loads the host's word, which is then not older than the value seen here, and fences again",
    argument: "with it the following release also covers the writes before the fault, so that no thread depends on that load",
    ptx: "fence.acquire.sys: CCTL.IVALL",
}];

/// The environment variable with the mutation, for the second process.
const VARIABLE: &str = "GIN_MUTATION";
/// The environment variable that limits the second process to a search with one preemption fewer.
const FEWER_VARIABLE: &str = "GIN_MUTATION_FEWER";
/// The environment variable that makes every search thorough. Most of the additional searches find no failure; they
/// take minutes.
const ALL_VARIABLE: &str = "GIN_ALL_WAYS";
/// The environment variable that limits the second process to the models of one thread alone.
const ALONE_VARIABLE: &str = "GIN_MUTATION_ALONE";
/// The places that such a thread needs too, by the beginning of their keys. These models alone must catch them.
const ALONE: &str = "backend/gdaki/pair.rs ring: ";

fn main() -> ExitCode {
    if let Ok(mutation) = std::env::var(VARIABLE) {
        return run_models(parse(&mutation));
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sites = scan(&here.join("src"), "gin-device/src");
    sites.extend(scan(&here.join("../gin-ep/kernels/src"), "gin-ep/kernels/src"));
    let mut trials = vec![
        Trial::test("the scanner finds every ordered operation and no other", scanner),
        // With all their preemptions they run as tests of their own.
        Trial::test("without a mutation all models pass", || match verdict(None, false)? {
            Verdict::Survived { .. } => Ok(()),
            Verdict::Caught(model) => Err(format!("{model} fails").into()),
        }),
    ];
    let keys: Vec<_> = sites.iter().map(|site| site.key.clone()).collect();
    trials.push(Trial::test("the table of unobservable places names places in the sources", move || {
        for entry in NOT_OBSERVABLE {
            if !keys.iter().any(|key| key == entry.site) {
                return Err(format!("{:?} is not in the sources; there are {keys:#?}", entry.site).into());
            }
            if [entry.reason, entry.argument, entry.ptx].contains(&"") {
                return Err(format!("{:?} lacks its reason, argument or PTX", entry.site).into());
            }
        }
        Ok(())
    }));
    for site in sites.iter().filter(|site| site.key.starts_with(ALONE)) {
        let (name, mutation) = (format!("{} by one thread alone", site.key), site.mutation.clone());
        trials.push(Trial::test(name, move || match run(Some(&mutation), &[ALONE_VARIABLE])? {
            Verdict::Caught(_) => Ok(()),
            Verdict::Survived { hits } => Err(format!("no model fails, though they pass here {hits} times").into()),
        }));
    }
    trials.extend(sites.into_iter().map(|site| Trial::test(site.key.clone(), move || check(&site))));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs the models with this site mutated and checks the verdict.
fn check(site: &Site) -> Result<(), Failed> {
    let known = NOT_OBSERVABLE.iter().find(|entry| entry.site == site.key);
    let thorough = known.is_none() || std::env::var_os(ALL_VARIABLE).is_some();
    match (verdict(Some(&site.mutation), thorough)?, known) {
        (Verdict::Caught(model), None) => {
            println!("{} is caught by {model}", site.key);
            Ok(())
        }
        (Verdict::Caught(model), Some(_)) => Err(format!("listed as not observable, but {model} catches it").into()),
        (Verdict::Survived { hits: 0 }, _) => Err("no model passes this place".into()),
        (Verdict::Survived { .. }, Some(entry)) => {
            println!("{} is not observable: {}; {} ({})", site.key, entry.reason, entry.argument, entry.ptx);
            Ok(())
        }
        (Verdict::Survived { hits }, None) => Err(format!("no model fails, though they pass here {hits} times").into()),
    }
}

enum Verdict {
    /// The model with this name failed.
    Caught(String),
    /// No model failed. The models passed the place this many times.
    Survived { hits: u32 },
}

/// Runs the models in another process. `thorough`: if a search with fewer preemptions finds no failure, searches with
/// all preemptions.
fn verdict(mutation: Option<&Mutation>, thorough: bool) -> Result<Verdict, Failed> {
    run(mutation, if thorough { &[] } else { &[FEWER_VARIABLE] })
}

/// Runs the models in another process with these environment variables.
fn run(mutation: Option<&Mutation>, variables: &[&str]) -> Result<Verdict, Failed> {
    let text = match mutation {
        None => "none".to_owned(),
        Some(Mutation::Weaken { file, line }) => format!("weaken|{file}|{line}"),
        Some(Mutation::Swap(name)) => format!("swap|{name}"),
    };
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.env(VARIABLE, text).envs(variables.iter().map(|variable| (variable, ""))).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = |start: &str| text.lines().rev().find_map(|line| line.strip_prefix(start)).map(str::to_owned);
    if let Some(hits) = last("survived ") {
        return Ok(Verdict::Survived { hits: hits.parse()? });
    }
    let (model, failed) = (last("model "), last("failed "));
    match (model, failed) {
        (Some(model), Some(hits)) if mutation.is_none() || hits != "0" => Ok(Verdict::Caught(model)),
        (model, _) => {
            let error = String::from_utf8_lossy(&output.stderr);
            Err(format!("{model:?} ended with {} and no verdict\n{text}{error}", output.status).into())
        }
    }
}

fn parse(text: &str) -> Option<Mutation> {
    let parts: Vec<_> = text.split('|').collect();
    match parts[..] {
        ["weaken", file, line] => {
            Some(Mutation::Weaken { file: file.to_owned(), line: line.parse().expect("a line number") })
        }
        ["swap", name] => Some(Mutation::Swap(name.to_owned())),
        _ => None,
    }
}

/// Returns all models that may pass a file of the sources, those about that file first.
fn all_about(file: &str) -> Vec<(&'static str, fn())> {
    let (status, signals, queue) = (model::status::MODELS, model::signals::MODELS, model::queue::MODELS);
    if file.contains("/gdaki/") {
        // No other models pass these files.
        [model::gdaki::MODELS, model::gdaki::contention::MODELS, model::gdaki::alone::MODELS].concat()
    } else if file.starts_with("gin-ep/kernels/src/matmul/") {
        model::matmul::MODELS.to_vec()
    } else if file.starts_with("gin-ep/") {
        model::ep::MODELS.to_vec()
    } else if file.ends_with("/fault.rs") {
        model::faults::MODELS.to_vec()
    } else if file.ends_with("/inbox.rs") {
        model::inbox::MODELS.to_vec()
    } else if file.ends_with("/mailbox.rs") {
        model::mailbox::MODELS.to_vec()
    } else if file.ends_with("/orders.rs") {
        model::orders::MODELS.to_vec()
    } else if file.ends_with("/print.rs") {
        model::print::MODELS.to_vec()
    } else if file.contains("/queue/") {
        [queue, status, signals].concat()
    } else if file.ends_with("/status.rs") {
        [status, queue, signals].concat()
    } else {
        [signals, queue, status].concat()
    }
}

/// Runs the models until one fails, in the second process. Prints the result to standard output.
fn run_models(mutation: Option<Mutation>) -> ExitCode {
    static PASSED: Mutex<u32> = Mutex::new(0);
    // A panic inside a model abandons its other threads, so no model runs after it.
    std::panic::set_hook(Box::new(|info| {
        if info.payload_as_str().is_some() {
            println!("failed {}", *PASSED.lock().expect("one thread") + hits());
            eprintln!("{info}");
            std::process::exit(1);
        }
    }));
    let models = match &mutation {
        _ if std::env::var_os(ALONE_VARIABLE).is_some() => model::gdaki::alone::MODELS.to_vec(),
        Some(Mutation::Weaken { file, .. }) => all_about(file),
        Some(Mutation::Swap(_)) => all_about("/queue/"),
        None => model::all(),
    };
    // Few preemptions first, because the number of ways grows with each preemption.
    let searches: &[usize] = if std::env::var_os(FEWER_VARIABLE).is_some() { &[1] } else { &[1, 0] };
    for &fewer in searches {
        model::FEWER.store(fewer, Ordering::Relaxed);
        for (name, model) in &models {
            println!("model {name}");
            mutate(mutation.clone());
            model();
            *PASSED.lock().expect("one thread") += hits();
        }
    }
    println!("survived {}", *PASSED.lock().expect("one thread"));
    ExitCode::SUCCESS
}

fn scanner() -> Result<(), Failed> {
    let text = r#"
        fn first(&self) {
            word.load_relaxed_sys(); // not word.load_acquire_sys()
            word
                .store_release_gpu(1);
            M::fence_acquire_sys();
            M::fence_acquire_sys();
        }
        pub(crate) fn second<T>() {
            ordered! {
                "this before that":
                { word.add_release_sys(2); } then { release::<M>(); acquire_sys(); }
            }
        }
        #[cfg(test)]
        fn third() { M::fence_acquire_sys(); }
    "#;
    let weaken = |key: &str, line| Site {
        key: key.to_owned(),
        mutation: Mutation::Weaken { file: "gin-device/src/a/b.rs".to_owned(), line },
    };
    let expected = [
        weaken("a/b.rs first: store_release_gpu", 5),
        weaken("a/b.rs first: fence_acquire_sys #1", 6),
        weaken("a/b.rs first: fence_acquire_sys #2", 7),
        Site {
            key: "a/b.rs second: \"this before that\"".to_owned(),
            mutation: Mutation::Swap("this before that".to_owned()),
        },
        weaken("a/b.rs second: add_release_sys", 12),
    ];
    let found = scan_file("gin-device/src", "a/b.rs", text);
    if found == expected { Ok(()) } else { Err(format!("{found:#?}").into()) }
}
