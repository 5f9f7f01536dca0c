// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration by environment variables.

use super::config::{GpuMemory, SignalsBy, VerbsConfig};
use gin_abi::mlx5::command::Mtu;
use std::ffi::OsString;
use std::str::FromStr;

/// An environment variable that [`VerbsConfig::from_env`] reads.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Its valid values, for people.
    pub values: &'static str,
    /// Sets the value, without surrounding spaces; returns false if it is invalid.
    set: fn(&mut VerbsConfig, &str) -> bool,
}

/// An environment variable has an invalid value.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value} is invalid; use {values}")]
pub struct WrongVariable {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// Its valid values.
    pub values: &'static str,
}

/// All variables.
pub const VARIABLES: &[Variable] = &[
    Variable {
        name: "GIN_VERBS_PORTS",
        values: "names of devices separated by commas, each with a port if needed: mlx5_0,mlx5_1:2",
        set: |config, text| {
            let names = text.split(',').map(|name| name.trim().parse()).collect::<Result<Vec<_>, _>>();
            names.map(|names| config.ports = names).is_ok()
        },
    },
    Variable {
        name: "GIN_VERBS_MAX_PORTS",
        values: "a number of ports, 1 or more",
        set: |config, text| put(&mut config.max_ports, text),
    },
    Variable {
        name: "GIN_VERBS_GID_INDEX",
        values: "an index in the port's GID table, 0 to 255",
        set: |config, text| put(config.gid_index.get_or_insert_default(), text),
    },
    Variable {
        name: "GIN_VERBS_MTU",
        values: "bytes of a packet: 256, 512, 1024, 2048 or 4096",
        set: |config, text| {
            let bytes: Option<u64> = text.parse().ok();
            config.mtu = Mtu::ALL.iter().copied().find(|mtu| Some(u64::from(mtu.bytes())) == bytes);
            config.mtu.is_some()
        },
    },
    Variable {
        name: "GIN_VERBS_TRAFFIC_CLASS",
        values: "a number from 0 to 255",
        set: |config, text| put(&mut config.traffic_class, text),
    },
    Variable {
        name: "GIN_VERBS_SERVICE_LEVEL",
        values: "a number from 0 to 15",
        set: |config, text| put(&mut config.service_level, text),
    },
    Variable {
        name: "GIN_VERBS_HOP_LIMIT",
        values: "a number from 0 to 255",
        set: |config, text| put(&mut config.hop_limit, text),
    },
    Variable {
        name: "GIN_VERBS_TIMEOUT",
        values: "a number from 1 to 31: the NIC waits for acknowledgements 4.096 us times 2 to this power",
        set: |config, text| put(&mut config.timeout, text),
    },
    Variable {
        name: "GIN_VERBS_RETRIES",
        values: "a number from 0 to 7",
        set: |config, text| put(&mut config.retries, text),
    },
    Variable {
        name: "GIN_VERBS_SIGNALS",
        values: "the engine that raises signals: auto, proxy or nic",
        set: |config, text| {
            let names = [("auto", SignalsBy::Automatic), ("proxy", SignalsBy::Proxy), ("nic", SignalsBy::Nic)];
            put_named(&mut config.signals, text, names)
        },
    },
    Variable {
        name: "GIN_VERBS_GPU_MEMORY",
        values: "how NICs reach memory of GPUs: auto, nic or host",
        set: |config, text| {
            let names = [("auto", GpuMemory::Automatic), ("nic", GpuMemory::Nic), ("host", GpuMemory::Host)];
            put_named(&mut config.gpu_memory, text, names)
        },
    },
    Variable {
        name: "GIN_VERBS_LIBRARY",
        values: "a path of libibverbs, or a name that the loader searches for",
        set: |config, text| put(&mut config.library, text),
    },
];

/// Parses a value and stores it; refuses a sign.
fn put<T: FromStr>(place: &mut T, text: &str) -> bool {
    let value = text.parse().ok().filter(|_| !text.starts_with('+'));
    value.map(|value| *place = value).is_some()
}

fn put_named<T, const N: usize>(place: &mut T, text: &str, names: [(&str, T); N]) -> bool {
    let found = names.into_iter().find(|(name, _)| *name == text);
    found.map(|(_, value)| *place = value).is_some()
}

impl VerbsConfig {
    /// Returns the defaults, replaced by the values of [environment variables](VARIABLES). An empty variable counts as
    /// unset.
    ///
    /// # Errors
    /// [`WrongVariable`]: a variable has an invalid value.
    pub fn from_env() -> Result<Self, WrongVariable> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Self, WrongVariable> {
        let mut config = Self::default();
        for variable in VARIABLES {
            let Some(value) = get(variable.name) else { continue };
            let text = value.to_string_lossy();
            let text = text.trim();
            if text.is_empty() {
                continue;
            }
            // A number may fit its type and still be out of range.
            if !(variable.set)(&mut config, text) || config.wrong().is_some() {
                let (name, values) = (variable.name, variable.values);
                return Err(WrongVariable { name, value: text.to_owned(), values });
            }
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<VerbsConfig, WrongVariable> {
        VerbsConfig::from_variables(|name| {
            pairs.iter().find(|(other, _)| *other == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn without_variables_the_defaults_hold() {
        assert_eq!(with(&[]), Ok(VerbsConfig::default()));
        let empty: Vec<(&str, &str)> = VARIABLES.iter().map(|variable| (variable.name, " ")).collect();
        assert_eq!(with(&empty), Ok(VerbsConfig::default()));
    }

    #[test]
    fn each_variable_sets_its_field() {
        let config = with(&[
            ("GIN_VERBS_PORTS", "mlx5_0, mlx5_1:2"),
            ("GIN_VERBS_MAX_PORTS", "2"),
            ("GIN_VERBS_GID_INDEX", "3"),
            ("GIN_VERBS_MTU", "2048"),
            ("GIN_VERBS_TRAFFIC_CLASS", "106"),
            ("GIN_VERBS_SERVICE_LEVEL", "5"),
            ("GIN_VERBS_HOP_LIMIT", "32"),
            ("GIN_VERBS_TIMEOUT", "18"),
            ("GIN_VERBS_RETRIES", "7"),
            ("GIN_VERBS_SIGNALS", "nic"),
            ("GIN_VERBS_GPU_MEMORY", "host"),
            ("GIN_VERBS_LIBRARY", "/opt/libibverbs.so.1"),
        ]);
        let expected = VerbsConfig::default()
            .ports(vec!["mlx5_0".parse().unwrap(), "mlx5_1:2".parse().unwrap()])
            .max_ports(2)
            .gid_index(Some(3))
            .mtu(Some(Mtu::B2048))
            .traffic_class(106)
            .service_level(5)
            .hop_limit(32)
            .timeout(18)
            .retries(7)
            .signals(SignalsBy::Nic)
            .gpu_memory(GpuMemory::Host)
            .library("/opt/libibverbs.so.1".to_owned());
        assert_eq!(config, Ok(expected));
    }

    #[test]
    fn an_invalid_value_is_refused_with_its_variable_and_the_valid_values() {
        let wrong = [
            ("GIN_VERBS_PORTS", "mlx5_0,"),
            ("GIN_VERBS_PORTS", "mlx5_0:x"),
            ("GIN_VERBS_MAX_PORTS", "0"),
            ("GIN_VERBS_GID_INDEX", "256"),
            ("GIN_VERBS_GID_INDEX", "-1"),
            ("GIN_VERBS_MTU", "1500"),
            ("GIN_VERBS_TRAFFIC_CLASS", "256"),
            ("GIN_VERBS_SERVICE_LEVEL", "16"),
            ("GIN_VERBS_HOP_LIMIT", "many"),
            ("GIN_VERBS_TIMEOUT", "0"),
            ("GIN_VERBS_TIMEOUT", "+3"),
            ("GIN_VERBS_TIMEOUT", "2 s"),
            ("GIN_VERBS_RETRIES", "8"),
            ("GIN_VERBS_SIGNALS", "gpu"),
            ("GIN_VERBS_GPU_MEMORY", "dmabuf"),
        ];
        for (name, value) in wrong {
            let text = with(&[(name, value)]).unwrap_err().to_string();
            assert!(text.starts_with(&format!("{name}={value} is invalid; use ")), "{text}");
        }
        let text = with(&[("GIN_VERBS_TIMEOUT", "32")]).unwrap_err().to_string();
        assert!(text.starts_with("GIN_VERBS_TIMEOUT=32 is invalid; use a number from 1 to 31"), "{text}");
    }

    #[test]
    fn the_documentation_lists_every_variable() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/rdma.md");
        let text = std::fs::read_to_string(file).unwrap();
        for variable in VARIABLES {
            assert!(text.contains(&format!("| `{}` |", variable.name)), "{} is not in {file}", variable.name);
        }
    }
}
