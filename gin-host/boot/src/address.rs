// SPDX-License-Identifier: MIT OR Apache-2.0
//! The addresses at which ranks listen.

use crate::BootstrapError;
use crate::error::{refused, system, usual_cause};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};

/// Returns the address from which this machine reaches other hosts. Sends no packet.
pub(crate) fn default_address() -> IpAddr {
    let route = |bind: IpAddr, to: IpAddr| {
        let socket = UdpSocket::bind((bind, 0)).ok()?;
        // Addresses for documentation: no host has them, and the default route leads to them.
        socket.connect((to, 9)).ok()?;
        socket.local_addr().ok().map(|own| own.ip()).filter(|ip| !ip.is_unspecified())
    };
    route(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into())
        .or_else(|| route(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()))
        .unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// Listens, with a queue for many ranks that connect at the same time.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener, BootstrapError> {
    let listener = TcpListener::bind(address)
        .map_err(|error| system("listen")(format!("{address}: {error}{}", usual_cause(&error))))?;
    rustix::net::listen(&listener, 4096).map_err(refused("listen"))?;
    Ok(listener)
}
