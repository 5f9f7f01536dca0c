// SPDX-License-Identifier: MIT OR Apache-2.0
//! The network of a communicator whose kernels drive the NIC. The proxy gets no requests there; it only passes faults
//! on.

use super::{Capabilities, Event, Key, LocalSignals, LocalWindow, NetError, Network, Request};

/// A network that carries no requests.
#[derive(Debug)]
pub struct Nothing {
    capabilities: Capabilities,
    refused: Vec<Event>,
}

impl Nothing {
    /// Makes the network with the capabilities of the NIC.
    pub fn new(capabilities: Capabilities) -> Self {
        Self { capabilities, refused: Vec::new() }
    }
}

impl Network for Nothing {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn register_signals(&mut self, _signals: &LocalSignals) -> Result<Key, NetError> {
        Ok(Key::default())
    }

    fn connect_signals(&mut self, _keys: &[Key]) -> Result<(), NetError> {
        Ok(())
    }

    fn register(&mut self, _window: &LocalWindow) -> Result<Key, NetError> {
        Ok(Key::default())
    }

    fn connect(&mut self, _window: u32, _keys: &[Key]) -> Result<(), NetError> {
        Ok(())
    }

    fn deregister(&mut self, _window: u32) -> bool {
        true
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        // Only an invalid descriptor leads to a request.
        self.refused.extend(requests.iter().map(|&Request { id, peer, .. }| Event::Completion {
            id,
            outcome: Err(NetError::Failed { context: "request to a proxy that serves none", peer, status: 0 }),
        }));
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        events.append(&mut self.refused);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Endpoint;
    use super::super::peer::PeerNetwork;
    use super::*;
    use gin_abi::Transfer;

    #[test]
    fn a_stray_request_is_taken_and_fails() {
        let peer = PeerNetwork::new(&Endpoint { rank: 0, ranks: 2, seed: 0, gpu: None });
        let mut nothing = Nothing::new(peer.capabilities());
        let stray = Request {
            id: 7,
            context: 0,
            peer: 1,
            transfer: Transfer::Nothing,
            signal: None,
            notice: None,
            more: false,
        };
        assert_eq!(nothing.post(&[stray]), 1);
        let mut events = Vec::new();
        nothing.poll(&mut events);
        assert!(
            matches!(&events[..], [Event::Completion { id: 7, outcome: Err(NetError::Failed { peer: 1, .. }) }]),
            "{events:?}"
        );
        nothing.poll(&mut events);
        assert_eq!(events.len(), 1, "once");
    }
}
