// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads two of Slurm's compressed lists.

/// Returns the first host of a list such as `n[03-05,9],login` or `rack[1-2]n[01-16]`; `None` for any other text.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        rest = &rest[end..];
        if !rest.starts_with('[') {
            break;
        }
        let (numbers, after) = rest[1..].split_once(']')?;
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let range = |item: &str| item.split_once('-').map_or(digits(item), |(low, high)| digits(low) && digits(high));
        if !numbers.split(',').all(range) {
            return None;
        }
        host.push_str(&numbers[..numbers.find([',', '-']).unwrap_or(numbers.len())]);
        rest = after;
    }
    let name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    ((rest.is_empty() || rest.starts_with(',')) && !host.is_empty() && host.bytes().all(name)).then_some(host)
}

/// Returns the number of tasks of the node with this index, from a list such as `4(x2),3`; `None` if the list does not
/// have it.
pub(super) fn tasks_of_node(list: &str, node: u32) -> Option<u32> {
    let mut first = 0_u32;
    for item in list.split(',') {
        let (tasks, nodes) = match item.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse::<u32>().ok()?),
            None => (item, 1),
        };
        let tasks = tasks.parse().ok()?;
        first = first.checked_add(nodes)?;
        if node < first {
            return Some(tasks);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_host_of_every_form_of_list_is_found() {
        for (list, host) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("n[03-05,9]", "n03"),
            ("n[9,03-05]", "n9"),
            ("n[007]", "n007"),
            ("gpu-a[1-4],gpu-b[1-4]", "gpu-a1"),
            ("rack[1-2]n[01-16]", "rack1n01"),
            ("n[1-2]-ib.cluster.example", "n1-ib.cluster.example"),
            ("login,n[1-4]", "login"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for list in ["", ",n1", "n[", "n[1", "n1]", "n[]", "n[1-]", "n[-2]", "n[a-b]", "n[1,]", "n 1", "n;1", "n[1]]"] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    #[test]
    fn tasks_of_each_node_are_found() {
        let of = |list: &str| (0..4).map(|node| tasks_of_node(list, node)).collect::<Vec<_>>();
        assert_eq!(of("4"), [Some(4), None, None, None]);
        assert_eq!(of("4(x2),3"), [Some(4), Some(4), Some(3), None]);
        assert_eq!(of("1,2(x3)"), [Some(1), Some(2), Some(2), Some(2)]);
        for list in ["", "x", "4(x", "4(x2", "(x2)", "4(x4294967295),1(x4294967295)"] {
            let _ = of(list);
        }
        assert_eq!(tasks_of_node("4(x2", 0), None);
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_or_not(text in "[n0-9,x()\\[\\]-]{0,20}", node: u32) {
            let _ = first_host(&text);
            let _ = tasks_of_node(&text, node);
        }
    }
}
