// SPDX-License-Identifier: MIT OR Apache-2.0
//! The section of `gin info` on libfabric.

use gin_net::fabric::{Fabric as Provider, FabricConfig, Offer, probe};
use serde::Serialize;
use std::io::{self, Write};

/// The providers of libfabric, and the one in use.
#[derive(Debug, Serialize)]
pub(super) struct Fabric {
    /// The version of the library, or the reason why there is none.
    library: Result<String, String>,
    providers: Vec<Found>,
    /// The provider and domain in use, or the reason why there is none.
    used: Result<Used, String>,
}

/// The provider in use.
#[derive(Debug, Serialize)]
struct Used {
    #[serde(flatten)]
    found: Found,
    /// How memory of GPUs travels: `direct`, or `staged` through host memory.
    gpu_memory: &'static str,
    /// The reason if it is staged.
    staged: Option<String>,
}

/// A provider with a domain.
#[derive(Debug, Serialize)]
struct Found {
    provider: String,
    domain: String,
    network: String,
    /// A signal travels behind the data that it covers; otherwise it waits until the data is delivered.
    in_order: bool,
}

impl From<&Offer> for Found {
    fn from(offer: &Offer) -> Self {
        let Offer { provider, domain, network, in_order, .. } = offer.clone();
        Self { provider, domain, network, in_order }
    }
}

impl From<&Provider> for Used {
    fn from(provider: &Provider) -> Self {
        let staged = provider.staged.clone();
        let gpu_memory = if staged.is_some() { "staged" } else { "direct" };
        Self { found: Found::from(&provider.offer), gpu_memory, staged }
    }
}

impl Fabric {
    /// Returns what libfabric lists, or the reason why it lists nothing.
    pub(super) fn find() -> Self {
        let config = FabricConfig::from_env();
        match probe(&config.library) {
            Err(error) => {
                let error = error.to_string();
                Self { library: Err(error.clone()), providers: Vec::new(), used: Err(error) }
            }
            Ok((version, offers)) => Self {
                library: Ok(format!("{}, version {version}", config.library)),
                providers: offers.iter().map(Found::from).collect(),
                used: Provider::open(&config).map(|provider| Used::from(&*provider)).map_err(|error| error.to_string()),
            },
        }
    }

    /// Prints it as text.
    pub(super) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "\nlibfabric (network `fabric` of the proxy)")?;
        match &self.library {
            Err(reason) => return writeln!(out, "  {reason}"),
            Ok(library) => writeln!(out, "  libfabric: {library}")?,
        }
        for Found { provider, domain, network, in_order } in &self.providers {
            let order = if *in_order { "signals behind data" } else { "signals after delivery" };
            writeln!(out, "  {provider}: {domain}, {network}, {order}")?;
        }
        match &self.used {
            Ok(Used { found: Found { provider, domain, .. }, gpu_memory, staged }) => {
                let reason = staged.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
                writeln!(out, "  in use: {provider} over {domain}; `GIN_FABRIC_PROVIDER` names another")?;
                writeln!(out, "  memory of GPUs: {gpu_memory}{reason}")
            }
            Err(reason) => writeln!(out, "  none can be used: {reason}"),
        }
    }
}
