// SPDX-License-Identifier: MIT OR Apache-2.0
//! Providers of libfabric, and what they offer.

use super::config::FabricConfig;
use gin_verbs::LoadError;
use gin_verbs::fabric::{
    FI_CONTEXT, FI_CONTEXT2, FI_EP_RDM, FI_HMEM, FI_MR_ALLOCATED, FI_MR_ENDPOINT, FI_MR_HMEM, FI_MR_LOCAL,
    FI_MR_PROV_KEY, FI_MR_VIRT_ADDR, FI_MSG, FI_ORDER_SAW, FI_RM_ENABLED, FI_RMA, FI_SOCKADDR_IN, FI_SOCKADDR_IN6,
    FI_THREAD_DOMAIN, Info, Libfabric, VERSION, VERSION_FOR_GPUS,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

/// Registration modes that gin provides for.
const MR_MODES: c_int = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;

/// Providers whose message arrives only after the data of all earlier writes to the same peer: they send both over one
/// stream or one reliable connection. The order of messages that others promise is that of their headers only.
const IN_ORDER: [&str; 3] = ["tcp", "net", "verbs"];

/// Why there is no network over libfabric.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoFabric {
    /// The library cannot be opened.
    #[error("{library} cannot be opened ({reason}); install libfabric (Debian and Ubuntu: the package libfabric1)")]
    NoLibrary {
        /// Name or path of the library.
        library: String,
        /// The loader's reason.
        reason: String,
    },
    /// The library is too old, or does not answer.
    #[error("{reason}")]
    Unusable {
        /// The reason.
        reason: String,
    },
    /// No provider of that name offers what gin needs.
    #[error(
        "no provider `{provider}`{} with reliable endpoints (FI_EP_RDM) for messages and remote memory; `fi_info -t \
         FI_EP_RDM` lists providers and domains",
        domain.as_ref().map_or(String::new(), |domain| format!(" and domain `{domain}`"))
    )]
    NoProvider {
        /// Name of the provider.
        provider: String,
        /// Name of the domain, if one was asked for.
        domain: Option<String>,
    },
}

impl From<LoadError> for NoFabric {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::NoLibrary { library, reason } => Self::NoLibrary { library, reason },
            error => Self::Unusable { reason: error.to_string() },
        }
    }
}

/// An offer of a provider: its abilities and its demands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Name of the provider, such as `tcp;ofi_rxm`.
    pub provider: String,
    /// Name of the domain, such as a network interface.
    pub domain: String,
    /// Name of the network, such as a subnet.
    pub network: String,
    /// A signal's message arrives after the data of earlier puts. Otherwise a signal waits until they are delivered.
    pub in_order: bool,
    /// Maximum length of a message in bytes.
    pub max_message: u64,
    /// NICs reach memory of GPUs (`FI_HMEM`), without calls of CUDA. Otherwise it goes through host memory.
    pub reaches_gpus: bool,
    pub(super) protocol: u32,
    pub(super) mr_mode: c_int,
    pub(super) key_bytes: usize,
    pub(super) sends: usize,
    pub(super) receives: usize,
    /// Endpoints of a process use each other's memory, so one must not end before the others.
    pub(super) is_shared_memory: bool,
    /// Preference among the offers of a provider; the smallest first.
    distance: u8,
}

impl Offer {
    /// # Safety
    /// - The library made `info`.
    unsafe fn of(info: &Info) -> Self {
        // Safety: the library fills all parts of its answers.
        let (tx, rx, ep, domain, fabric) =
            unsafe { (&*info.tx_attr, &*info.rx_attr, &*info.ep_attr, &*info.domain_attr, &*info.fabric_attr) };
        // Safety: strings of the library, or null.
        let text = |text: *mut c_char| match text.is_null() {
            true => String::new(),
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        let address = match info.src_addr.is_null() {
            true => &[],
            // Safety: the library says how long it is.
            false => unsafe { std::slice::from_raw_parts(info.src_addr.cast::<u8>(), info.src_addrlen) },
        };
        let provider = text(fabric.prov_name);
        let core = provider.split(';').next().unwrap_or_default();
        Self {
            in_order: IN_ORDER.contains(&core) && tx.msg_order & rx.msg_order & FI_ORDER_SAW != 0,
            is_shared_memory: core == "shm",
            domain: text(domain.name),
            network: text(fabric.name),
            max_message: ep.max_msg_size as u64,
            reaches_gpus: info.caps & FI_HMEM != 0,
            protocol: ep.protocol,
            mr_mode: domain.mr_mode,
            key_bytes: domain.mr_key_size,
            sends: tx.size,
            receives: rx.size,
            distance: distance(info.addr_format, address),
            provider,
        }
    }

    pub(super) fn has(&self, mode: c_int) -> bool {
        self.mr_mode & mode != 0
    }
}

/// Returns how far from being reachable by other hosts an address is. An address that is no IP address counts as
/// reachable.
fn distance(format: u32, address: &[u8]) -> u8 {
    match (format, address) {
        // `sockaddr_in`: family, port, address.
        (FI_SOCKADDR_IN, [_, _, _, _, 127, ..]) => 3,
        // `sockaddr_in6`: family, port, flow, address.
        (FI_SOCKADDR_IN6, [_, _, _, _, _, _, _, _, 0xfe, 0x80..=0xbf, ..]) => 2,
        (FI_SOCKADDR_IN6, [_, _, _, _, _, _, _, _, rest @ ..]) => {
            let loopback = rest.get(..16).is_some_and(|ip| ip[..15].iter().all(|byte| *byte == 0) && ip[15] == 1);
            if loopback { 3 } else { 1 }
        }
        _ => 0,
    }
}

/// A list of offers of the library.
struct Answer<'a> {
    library: &'a Libfabric,
    first: *mut Info,
}

impl<'a> Answer<'a> {
    /// Asks for offers of a provider, or of all, that reach memory of GPUs or need not. Empty if there are none.
    fn ask(library: &'a Libfabric, provider: Option<&str>, gpus: bool) -> Result<Self, NoFabric> {
        let unusable = |reason: &str| NoFabric::Unusable { reason: reason.to_owned() };
        let name = provider.map(CString::new).transpose().map_err(|_| unusable("a provider's name has a zero byte"))?;
        // Safety: null stands for a new, empty structure.
        let hints = unsafe { (library.fi_dupinfo)(ptr::null()) };
        let Some(mut hints) = NonNull::new(hints) else { return Err(unusable("libfabric has no memory")) };
        let mut first = ptr::null_mut();
        let (version, caps, modes) = if gpus { (VERSION_FOR_GPUS, FI_HMEM, FI_MR_HMEM) } else { (VERSION, 0, 0) };
        // Safety: the library has just made the structure with all its parts. It frees strings in it, so the name is
        // taken out again before.
        let error = unsafe {
            let info = hints.as_mut();
            (info.caps, info.mode) = (FI_MSG | FI_RMA | caps, FI_CONTEXT | FI_CONTEXT2);
            (*info.ep_attr).r#type = FI_EP_RDM;
            (*info.domain_attr).mr_mode = MR_MODES | modes;
            (*info.domain_attr).threading = FI_THREAD_DOMAIN;
            (*info.domain_attr).resource_mgmt = FI_RM_ENABLED;
            (*info.fabric_attr).prov_name = name.as_ref().map_or(ptr::null_mut(), |name| name.as_ptr().cast_mut());
            let error = (library.fi_getinfo)(version, ptr::null(), ptr::null(), 0, info, &raw mut first);
            (*info.fabric_attr).prov_name = ptr::null_mut();
            (library.fi_freeinfo)(info);
            error
        };
        match error {
            0 => Ok(Self { library, first }),
            error if error == -gin_verbs::fabric::FI_ENODATA => Ok(Self { library, first: ptr::null_mut() }),
            error => Err(unusable(&format!("fi_getinfo failed: {}", explain(library, error)))),
        }
    }

    /// Returns each offer with the structure that holds it.
    fn offers(&self) -> Vec<(Offer, *const Info)> {
        let mut offers = Vec::new();
        let mut next = self.first.cast_const();
        // Safety: a list of the library, which it keeps until `drop`.
        while let Some(info) = unsafe { next.as_ref() } {
            offers.push((unsafe { Offer::of(info) }, next));
            next = info.next;
        }
        offers
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        if !self.first.is_null() {
            // Safety: the library made it, and nothing uses it any more.
            unsafe { (self.library.fi_freeinfo)(self.first) };
        }
    }
}

/// Returns the library's text for an error number of either sign.
pub(super) fn explain(library: &Libfabric, error: c_int) -> String {
    // Safety: returns a string for every number.
    let text = unsafe { CStr::from_ptr((library.fi_strerror)(error.saturating_abs())) };
    text.to_string_lossy().into_owned()
}

/// Opens the library by its path, or by a name that the loader searches for. It stays open until the process ends,
/// because it takes half a second to find its providers.
pub(super) fn load(file: &str) -> Result<Arc<Libfabric>, NoFabric> {
    static OPEN: Mutex<BTreeMap<String, Arc<Libfabric>>> = Mutex::new(BTreeMap::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = open.get(file) {
        return Ok(library.clone());
    }
    let library = Arc::new(Libfabric::open(file)?);
    open.insert(file.to_owned(), library.clone());
    Ok(library)
}

/// Returns the version of a library, and the offers of its providers, one for each provider and domain.
///
/// # Errors
/// [`NoFabric`]: the library cannot be opened, or does not answer.
pub fn probe(library: &str) -> Result<(String, Vec<Offer>), NoFabric> {
    let library = load(library)?;
    // Safety: has no condition.
    let version = unsafe { (library.fi_version)() };
    let mut seen = BTreeSet::new();
    let answer = Answer::ask(&library, None, false)?;
    let mut offers: Vec<Offer> = answer.offers().into_iter().map(|(offer, _)| offer).collect();
    offers.sort_by_key(|offer| offer.distance);
    offers.retain(|offer| seen.insert((offer.provider.clone(), offer.domain.clone())));
    Ok((format!("{}.{}", version >> 16, version & 0xffff), offers))
}

/// A provider of libfabric, from which the ranks of this process make their endpoints.
#[derive(derive_more::Debug)]
pub struct Fabric {
    /// The offer.
    pub offer: Offer,
    /// The configuration.
    pub config: FabricConfig,
    /// Why memory of GPUs goes through host memory; `None` if NICs reach it.
    pub staged: Option<String>,
    #[debug(skip)]
    info: NonNull<Info>,
    #[debug(skip)]
    pub(super) library: Arc<Libfabric>,
}

// Safety: the structure is only read, and the library locks what threads share.
unsafe impl Send for Fabric {}
// Safety: as above.
unsafe impl Sync for Fabric {}

impl Fabric {
    /// Returns the nearest offer of the configured provider and domain.
    pub(super) fn find(library: &Arc<Libfabric>, config: &FabricConfig, gpus: bool) -> Result<Option<Self>, NoFabric> {
        let answer = Answer::ask(library, Some(&config.provider), gpus)?;
        let mut offers = answer.offers();
        offers.retain(|(offer, _)| config.domain.as_ref().is_none_or(|domain| *domain == offer.domain));
        let Some((offer, info)) = offers.into_iter().min_by_key(|(offer, _)| offer.distance) else { return Ok(None) };
        // Safety: an offer of the library, which the copy outlives.
        let copy = unsafe { (library.fi_dupinfo)(info) };
        let no_memory = || NoFabric::Unusable { reason: "libfabric has no memory".to_owned() };
        // Order is defined only between transfers to the same kind of memory (fi_cq(3), memory domains), and a message
        // goes to host memory.
        let in_order = offer.in_order && !config.unordered && !gpus;
        let offer = Offer { in_order, reaches_gpus: gpus, ..offer };
        let info = NonNull::new(copy).ok_or_else(no_memory)?;
        Ok(Some(Self { offer, config: config.clone(), staged: None, info, library: library.clone() }))
    }

    /// Returns the offer as the library takes it.
    pub(super) fn info(&self) -> *mut Info {
        self.info.as_ptr()
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // Safety: the library made it, and endpoints keep this structure alive.
        unsafe { (self.library.fi_freeinfo)(self.info.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_other_hosts_reach_is_preferred() {
        let v6 = |ip: [u8; 16]| [&[10, 0, 0, 0, 0, 0, 0, 0][..], &ip].concat();
        let mut loopback = [0; 16];
        loopback[15] = 1;
        let mut link = [0; 16];
        (link[0], link[1]) = (0xfe, 0x80);
        assert_eq!(distance(FI_SOCKADDR_IN, &[2, 0, 0, 0, 10, 0, 0, 1]), 0);
        assert_eq!(distance(FI_SOCKADDR_IN6, &v6([0xfd; 16])), 1);
        assert_eq!(distance(FI_SOCKADDR_IN6, &v6(link)), 2);
        assert_eq!(distance(FI_SOCKADDR_IN6, &v6(loopback)), 3);
        assert_eq!(distance(FI_SOCKADDR_IN, &[2, 0, 0, 0, 127, 0, 0, 1]), 3);
    }

    #[test]
    fn without_the_library_one_sentence_says_what_to_install() {
        let config = FabricConfig::default().library("libfabric-of-nobody.so".to_owned());
        let text = Fabric::open(&config).unwrap_err().to_string();
        assert!(text.starts_with("libfabric-of-nobody.so cannot be opened"), "{text}");
        assert!(text.ends_with("the package libfabric1)") && !text.contains('\n'), "{text}");
    }
}
