// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that the system refuses names the limit that it met.

use gin_gpu::flat::FlatRange;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::process::Command;
use std::sync::Arc;

#[test]
fn memory_past_the_limit_of_addresses_names_it() {
    const CHILD: &str = "GIN_GPU_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let test = ["--exact", "memory_past_the_limit_of_addresses_names_it", "--nocapture"];
        let output = command.args(test).env(CHILD, "1").output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
        return;
    }
    let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    let limit = pages * rustix::param::page_size() as u64 + (64 << 20);
    setrlimit(Resource::As, Rlimit { current: Some(limit), ..getrlimit(Resource::As) }).unwrap();

    let texts = [
        Memory::new(&device, MemoryKind::Device, 128 << 20).unwrap_err().to_string(),
        Memory::shared(&device, MemoryKind::Device, 128 << 20).unwrap_err().to_string(),
        FlatRange::reserve(&*device, 2).unwrap_err().to_string(),
    ];
    for text in texts {
        let expected = format!("the process's limit of {limit} bytes of addresses");
        assert!(text.contains(&expected) && text.contains("`ulimit -v`"), "{text}");
    }
    Memory::new(&device, MemoryKind::Device, 1 << 20).unwrap();
}

#[test]
fn memory_that_no_machine_has_names_the_machines() {
    let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
    let text = Memory::new(&device, MemoryKind::Device, 1 << 60).unwrap_err().to_string();
    let one_of = ["bytes of memory and swap", "the memory cgroup of this process allows", "limit of"];
    assert!(one_of.iter().any(|words| text.contains(words)), "{text}");
}
