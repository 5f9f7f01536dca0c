// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutations: each place in the sources whose order matters is weakened, or turned round, and some model must fail.
//!
//! The list of places is made from the sources (`sites`). For each, this program starts itself once more with
//! the mutation in an environment variable; that process runs the models until one fails. A place that no model can
//! tell is in [`NOT_OBSERVABLE`], with the reason and with what makes it right; an entry there that a model does catch
//! is an error, and so is a place that no model passes.

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

/// A place that the models cannot tell from a weaker one.
struct NotObservable {
    /// Key of the place.
    site: &'static str,
    /// Why loom does not see it.
    reason: &'static str,
    /// Why the code is right, and needs it.
    argument: &'static str,
    /// The form of it on a GPU.
    ptx: &'static str,
}

const NOT_OBSERVABLE: &[NotObservable] = &[
    NotObservable {
        site: "status.rs look: fence_acquire_sys",
        reason: "a thread with the value of another loads the host's word too, which is then not older than what was seen here, and fences again",
        argument: "with it the release that follows also covers what came before the fault, so that nobody depends on that load",
        ptx: "fence.acquire.sys: CCTL.IVALL",
    },
    NotObservable {
        site: "backend/gdaki/pair.rs carry: fence_release_gpu",
        reason: "stores of doorbells are exchanges in the models, which take their places in the order in which they are made",
        argument: "it keeps the doorbell before the token, whose next taker stores its doorbell after a branch on having it",
        ptx: "fence.release.gpu: MEMBAR.ALL.GPU",
    },
];

/// Tells the second process what to change.
const VARIABLE: &str = "GIN_MUTATION";
/// Tells it to search with a preemption fewer only.
const FEWER_VARIABLE: &str = "GIN_MUTATION_FEWER";
/// Has every search be thorough, where most are that find nothing: takes minutes more.
const ALL_VARIABLE: &str = "GIN_ALL_WAYS";

fn main() -> ExitCode {
    if let Ok(mutation) = std::env::var(VARIABLE) {
        return run_models(parse(&mutation));
    }
    let sites = scan(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let mut trials = vec![
        Trial::test("the scanner finds every ordered operation and nothing else", scanner),
        // With all their preemptions they run as tests of their own.
        Trial::test("without a mutation all models pass", || match verdict(None, false)? {
            Verdict::Survived { .. } => Ok(()),
            Verdict::Caught(model) => Err(format!("{model} fails").into()),
        }),
    ];
    let keys: Vec<_> = sites.iter().map(|site| site.key.clone()).collect();
    trials.push(Trial::test("the table of what is not observable names places that there are", move || {
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
    trials.extend(sites.into_iter().map(|site| Trial::test(site.key.clone(), move || check(&site))));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs the models with this site mutated and judges the outcome.
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
    /// This model failed.
    Caught(String),
    /// None failed; the place was passed so often.
    Survived { hits: u32 },
}

/// Runs the models in another process. `thorough`: with as many preemptions as they allow, if fewer find nothing.
fn verdict(mutation: Option<&Mutation>, thorough: bool) -> Result<Verdict, Failed> {
    let text = match mutation {
        None => "none".to_owned(),
        Some(Mutation::Weaken { file, line }) => format!("weaken|{file}|{line}"),
        Some(Mutation::Swap(name)) => format!("swap|{name}"),
    };
    let mut command = Command::new(std::env::current_exe()?);
    if !thorough {
        command.env(FEWER_VARIABLE, "");
    }
    let output = command.env(VARIABLE, text).output()?;
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

/// All models, those first that are about a file of the sources.
fn all_about(file: &str) -> Vec<(&'static str, fn())> {
    let (status, signals, queue) = (model::status::MODELS, model::signals::MODELS, model::queue::MODELS);
    if file.contains("/gdaki/") {
        // No other models pass there.
        [model::gdaki::MODELS, model::gdaki::contention::MODELS].concat()
    } else if file.ends_with("/orders.rs") {
        model::orders::MODELS.to_vec()
    } else if file.contains("/queue/") {
        [queue, status, signals].concat()
    } else if file.ends_with("/status.rs") {
        [status, queue, signals].concat()
    } else {
        [signals, queue, status].concat()
    }
}

/// In the second process: runs the models until one fails, and says on standard output what happened.
fn run_models(mutation: Option<Mutation>) -> ExitCode {
    static PASSED: Mutex<u32> = Mutex::new(0);
    // A panic inside a model leaves its other threads behind half-way, so nothing is run after it.
    std::panic::set_hook(Box::new(|info| {
        if info.payload_as_str().is_some() {
            println!("failed {}", *PASSED.lock().expect("one thread") + hits());
            eprintln!("{info}");
            std::process::exit(1);
        }
    }));
    let models = match &mutation {
        Some(Mutation::Weaken { file, .. }) => all_about(file),
        Some(Mutation::Swap(_)) => all_about("/queue/"),
        None => model::all(),
    };
    // Few preemptions first: the number of ways grows with each of them.
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
    let found = scan_file("a/b.rs", text);
    if found == expected { Ok(()) } else { Err(format!("{found:#?}").into()) }
}
