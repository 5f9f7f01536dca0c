// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration of the network, and the environment variables that set it.

use std::ffi::OsString;
use std::time::Duration;

/// Name of the provider that is used by default.
pub const DEFAULT_PROVIDER: &str = "tcp";

gin_gpu::config! {
    /// Configuration of a network over libfabric. All ranks should use the same provider.
    ///
    /// ```
    /// use gin_net::fabric::FabricConfig;
    ///
    /// let config = FabricConfig::default().provider("shm".to_owned());
    /// assert_eq!((config.provider.as_str(), config.domain), ("shm", None));
    /// ```
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct FabricConfig {
        /// Path of libfabric, or a name that the loader searches for. Default: `libfabric.so.1`.
        pub library: String = gin_verbs::fabric::LIBRARY.to_owned(),
        /// Provider, by the name that `fi_info -l` lists. Default: `tcp`.
        pub provider: String = DEFAULT_PROVIDER.to_owned(),
        /// Domain of the provider: for `tcp` a network interface, such as `eth0`. Default: the first that other hosts
        /// can reach by an IPv4 address, else by an IPv6 address, else the first.
        pub domain: Option<String> = None,
        /// Time after which a peer is lost if none of the outstanding requests to it completes. Default: 10 s.
        pub lost_after: Duration = Duration::from_secs(10),
        /// Outstanding operations of the rank, at least 4; limited by the provider. Default: 512.
        pub depth: usize = 512,
        /// Maximum length of a message in bytes, at least 8; limited by the provider. Default: 4 MiB.
        pub max_message: u64 = 4 << 20,
        /// Takes the provider to promise no order. Signals then wait until the data before them has been delivered. For
        /// tests. Default: false.
        pub unordered: bool = false,
        /// Takes memory of virtual GPUs to be memory of a GPU of CUDA: the provider reaches it as such, or it goes
        /// through host memory. For tests. Default: false.
        pub virtual_gpus: bool = false,
    }
}

/// Environment variables that [`FabricConfig::from_env`] reads, each with its meaning.
pub const VARIABLES: [(&str, &str); 3] = [
    ("GIN_FABRIC_PROVIDER", "the provider, as `fi_info -l` names it: tcp, shm, efa"),
    ("GIN_FABRIC_DOMAIN", "the provider's domain: for tcp a network interface, such as eth0"),
    ("GIN_FABRIC_LIBRARY", "a path of libfabric, or a name that the loader searches for"),
];

impl FabricConfig {
    /// Returns the defaults, replaced by the values of [environment variables](VARIABLES). An empty variable counts as
    /// unset. Any text is valid: [`Fabric::open`](super::Fabric::open) refuses a provider or a domain that does not
    /// exist.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(get: impl Fn(&str) -> Option<OsString>) -> Self {
        let [provider, domain, library] = VARIABLES.map(|(name, _)| {
            let text = get(name)?.to_string_lossy().trim().to_owned();
            (!text.is_empty()).then_some(text)
        });
        let default = Self::default();
        Self {
            provider: provider.unwrap_or(default.provider),
            domain,
            library: library.unwrap_or(default.library),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_variable_sets_its_field_and_an_empty_one_none() {
        let set = FabricConfig::from_variables(|name| Some(OsString::from(format!(" {name} "))));
        let expected = FabricConfig::default()
            .provider("GIN_FABRIC_PROVIDER".to_owned())
            .domain(Some("GIN_FABRIC_DOMAIN".to_owned()))
            .library("GIN_FABRIC_LIBRARY".to_owned());
        assert_eq!(set, expected);
        assert_eq!(FabricConfig::from_variables(|_| Some(OsString::from(" "))), FabricConfig::default());
        assert_eq!(FabricConfig::from_variables(|_| None), FabricConfig::default());
    }

    #[test]
    fn the_documentation_lists_every_variable() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/fabric.md");
        let text = std::fs::read_to_string(file).unwrap();
        for (name, _) in VARIABLES {
            assert!(text.contains(&format!("| `{name}` |")), "{name} is not in {file}");
        }
    }
}
