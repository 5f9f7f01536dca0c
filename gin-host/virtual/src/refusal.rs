// SPDX-License-Identifier: MIT OR Apache-2.0
//! The limits of the system behind a refused reservation.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use rustix::process::{Resource, getrlimit};

/// Returns the system's error for a refused reservation of `bytes` bytes, and the limit that it met, if it met one. For
/// a call that is forbidden it names the settings that usually forbid it.
///
/// The limits are those of addresses (`ulimit -v`), of data (`ulimit -d`), of mappings (`vm.max_map_count`) and of
/// memory that may be promised (`vm.overcommit_memory`).
///
/// ```
/// let cause = std::io::ErrorKind::OutOfMemory.into();
/// let text = gin_virtual::explain_refusal(&cause, 1 << 60);
/// assert!(text.starts_with("out of memory: "), "{text}");
/// ```
pub fn explain_refusal(cause: &io::Error, bytes: u64) -> String {
    if let Some(setting) = usual_setting(cause) {
        return format!("{cause}: {setting}");
    }
    // The C library reports a thread whose stack the system refuses as EAGAIN.
    if !matches!(cause.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock) {
        return cause.to_string();
    }
    match met_limit(bytes) {
        Some(limit) => format!("{cause}: {limit}"),
        None => cause.to_string(),
    }
}

/// Returns the setting that usually makes the system refuse a call with this error, whatever the call.
///
/// ```
/// let forbidden = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
/// assert!(gin_virtual::usual_setting(&forbidden).unwrap().contains("seccomp"));
/// assert_eq!(gin_virtual::usual_setting(&std::io::ErrorKind::NotFound.into()), None);
/// ```
pub fn usual_setting(cause: &io::Error) -> Option<&'static str> {
    match (cause.kind(), cause.raw_os_error()) {
        (io::ErrorKind::PermissionDenied, _) => {
            Some("a seccomp filter or a security module (SELinux, AppArmor) of this container usually forbids it")
        }
        (_, Some(libc::ENOSYS)) => Some("the kernel, or the sandbox of this container, does not have this call"),
        (_, Some(libc::EMFILE)) => Some("the process has as many open files as it may; raise it with `ulimit -n`"),
        (_, Some(libc::ENFILE)) => {
            Some("the system has as many open files as it may; raise it with `sysctl fs.file-max`")
        }
        _ => None,
    }
}

/// Returns the first limit that `bytes` more bytes, or one more mapping, would exceed.
fn met_limit(bytes: u64) -> Option<String> {
    let page = rustix::param::page_size() as u64;
    let statm = read("/proc/self/statm").unwrap_or_default();
    // Field 0 is the size of all mappings, field 5 that of private writable ones, in pages.
    let in_use = |field| statm.split(' ').nth(field)?.trim().parse::<u64>().ok()?.checked_mul(page);
    let past = |resource, field| {
        let (limit, used) = (getrlimit(resource).current?, in_use(field)?);
        (used.saturating_add(bytes) > limit).then_some((limit, used))
    };
    if let Some((limit, used)) = past(Resource::As, 0) {
        return Some(format!(
            "{bytes} bytes more would exceed the process's limit of {limit} bytes of addresses, of which it uses {used}; \
             raise it with `ulimit -v` (RLIMIT_AS)"
        ));
    }
    if let Some((limit, used)) = past(Resource::Data, 5) {
        return Some(format!(
            "{bytes} bytes more would exceed the process's limit of {limit} bytes of data, of which it uses {used}; raise \
             it with `ulimit -d` (RLIMIT_DATA)"
        ));
    }
    // A reservation makes a mapping or two; a page of the kernel's own is listed too.
    let mappings = lines("/proc/self/maps").unwrap_or(0);
    if let Some(limit) = number("/proc/sys/vm/max_map_count").filter(|limit| mappings + 3 > *limit) {
        return Some(format!(
            "the process has {mappings} mappings, and the limit is {limit}; raise it with `sysctl vm.max_map_count=NUMBER`"
        ));
    }
    let meminfo = read("/proc/meminfo").unwrap_or_default();
    let of = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    match (number("/proc/sys/vm/overcommit_memory"), of("CommitLimit"), of("Committed_AS")) {
        (Some(2), Some(limit), Some(used)) if used.saturating_add(bytes) > limit => {
            return Some(format!(
                "{bytes} bytes more would exceed the {limit} bytes that the system promises, of which {used} are taken; \
                 set `sysctl vm.overcommit_memory=0`, or raise `vm.overcommit_ratio`"
            ));
        }
        _ => {}
    }
    let all = of("MemTotal")?.saturating_add(of("SwapTotal")?);
    (bytes > all).then(|| format!("{bytes} bytes are more than the machine's {all} bytes of memory and swap"))
}

/// Returns the bytes that the smallest memory cgroup around this process allows, and the file that says so; `None`
/// without such a limit.
///
/// The kernel checks this limit when pages are first touched, and then ends the process without a word. So a
/// reservation that can never be touched in full is refused before.
pub fn memory_cgroup() -> Option<(u64, String)> {
    smallest_limit(Path::new("/sys/fs/cgroup"), &read("/proc/self/cgroup")?)
}

/// Finds the limit in the cgroups at `root`, by the text of `/proc/self/cgroup`.
fn smallest_limit(root: &Path, cgroups: &str) -> Option<(u64, String)> {
    let limits = cgroups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let (root, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join(controllers), "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        // In a container the path may be the one that the host sees; then only the root is there.
        let above = Path::new(path.trim_start_matches('/')).ancestors().map(|part| root.join(part).join(file));
        above.filter_map(|file| Some((number(&file)?, file.display().to_string()))).collect()
    });
    // Version 1 writes "no limit" as the largest multiple of pages.
    limits.filter(|(limit, _)| *limit < 1 << 62).min()
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Counts lines without memory for the file: a million mappings are 70 MB of text, which needs a mapping itself.
fn lines(path: &str) -> Option<u64> {
    let (mut file, mut buffer, mut count) = (fs::File::open(path).ok()?, [0; 4096], 0);
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(count),
            bytes => count += buffer[..bytes].iter().filter(|byte| **byte == b'\n').count() as u64,
        }
    }
}

fn number(path: impl AsRef<Path>) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_of_the_cgroups_around_a_process_counts_in_both_versions() {
        let root = std::env::temp_dir().join(format!("gin-virtual-cgroup-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("a/memory.max", "2000\n");
        write("a/b/memory.max", "max\n");
        write("memory/c/memory.limit_in_bytes", "1500\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        let found = |text: &str| smallest_limit(&root, text).map(|(limit, _)| limit);
        assert_eq!(found("0::/a/b\n"), Some(2000));
        assert_eq!(found("0::/\n"), None);
        assert_eq!(found("5:memory:/c/d\n0::/a\n"), Some(1500));
        assert_eq!(found("5:memory:/x\n4:cpu:/a\n"), None);
        fs::remove_dir_all(&root).unwrap();
    }
}
