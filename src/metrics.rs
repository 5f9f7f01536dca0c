// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metrics of a run in the text format of Prometheus (OpenMetrics), over HTTP.

use crate::cli::{Failure, Refused};
use crate::workload::Watch;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Time limit for each read and write of a connection: one at a time is served.
const LIMIT: Duration = Duration::from_secs(2);

/// Longest head of a request, in bytes.
const LONGEST: usize = 8 << 10;

/// Returns the address for a rank of a host: the ranks have consecutive ports. The system chooses each port for port 0.
///
/// # Errors
/// Refuses a port past the last one.
pub(crate) fn address_of(address: SocketAddr, local_rank: u32) -> Result<SocketAddr, Refused> {
    let offset = if address.port() == 0 { 0 } else { local_rank };
    match u16::try_from(u32::from(address.port()) + offset) {
        Ok(port) => Ok(SocketAddr::new(address.ip(), port)),
        Err(_) => Err(Refused(format!(
            "--metrics {address}: rank {local_rank} of this host would have a port past 65535; use a lower one"
        ))),
    }
}

/// Serves the metrics of a run at an address until the command ends, by a thread of its own. Returns the address.
///
/// # Errors
/// Refuses an address that cannot be bound; returns the system's error if it refuses a thread.
pub(crate) fn serve(address: SocketAddr, watch: Arc<Watch>) -> Result<SocketAddr, Failure> {
    let refuse =
        |error: io::Error| Refused(format!("--metrics {address}: cannot listen there: {error}; use another one"));
    let listener = TcpListener::bind(address).map_err(refuse)?;
    let bound = listener.local_addr()?;
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics(watch)));
    let serve = move || {
        for stream in listener.incoming() {
            // A connection that failed concerns its peer alone.
            let _ = stream.and_then(|stream| answer(stream, &registry));
        }
    };
    std::thread::Builder::new().name("gin-metrics".to_owned()).spawn(serve)?;
    Ok(bound)
}

/// Reads the head of a request and returns its first line.
fn first_line(stream: &mut TcpStream) -> io::Result<String> {
    let (mut head, mut bytes) = (Vec::new(), [0; 1024]);
    while head.len() < LONGEST && !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut bytes)? {
            0 => break,
            count => head.extend_from_slice(&bytes[..count]),
        }
    }
    let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}

/// Answers one request.
fn answer(mut stream: TcpStream, registry: &Registry) -> io::Result<()> {
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let line = first_line(&mut stream)?;
    let mut words = line.split(' ');
    let (status, body) = match (words.next(), words.next().map(|path| path.split('?').next())) {
        (Some("GET"), Some(Some("/metrics"))) => {
            let mut text = String::new();
            encode(&mut text, registry).map_err(io::Error::other)?;
            ("200 OK", text)
        }
        (Some("GET"), Some(_)) => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "the only method is GET\n".to_owned()),
    };
    let kind = match status {
        "200 OK" => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        _ => "text/plain; charset=utf-8",
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// The statistics of a run as metrics: one for each statistic, with rank, context and peer as labels.
#[derive(Debug)]
struct Metrics(Arc<Watch>);

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let text = "Launches of the workload that ended";
        let mut launches = encoder.encode_descriptor("gin_launches", text, None, MetricType::Counter)?;
        launches.encode_counter::<NoLabelSet, _, u64>(&(self.0.launches().floor() as u64), None)?;
        let rows: Vec<_> = self.0.stats().into_iter().map(|(place, stats)| (place, stats.named())).collect();
        let names = gin_host::comm::Stats::default().named().into_iter().map(|(name, _)| name);
        for (column, name) in names.enumerate() {
            // The only one that may fall is a maximum.
            let kind = if name == "deepest" { MetricType::Gauge } else { MetricType::Counter };
            let text = format!("Statistic `{name}` of the proxy by rank, context and peer; see docs/observing.md");
            let name = format!("gin_proxy_{name}");
            let mut metric = encoder.encode_descriptor(&name, &text, None, kind)?;
            for ((rank, context, peer), named) in &rows {
                let labels = [("rank", *rank), ("context", *context), ("peer", *peer)];
                let value = named[column].1;
                let mut family = metric.encode_family(&labels)?;
                match kind {
                    MetricType::Gauge => family.encode_gauge(&i64::try_from(value).unwrap_or(i64::MAX))?,
                    _ => family.encode_counter::<NoLabelSet, _, u64>(&value, None)?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::parse_address;

    #[test]
    fn a_port_alone_is_one_of_the_loopback_and_other_interfaces_are_named() {
        assert_eq!(parse_address("9464").unwrap().to_string(), "127.0.0.1:9464");
        assert_eq!(parse_address("0.0.0.0:1").unwrap().to_string(), "0.0.0.0:1");
        assert_eq!(parse_address("[::1]:80").unwrap().to_string(), "[::1]:80");
        for text in ["", "localhost", "1.2.3.4", "70000", "-1"] {
            assert!(parse_address(text).unwrap_err().contains("0.0.0.0:9464"), "{text}");
        }
    }

    #[test]
    fn ranks_of_a_host_have_consecutive_ports() {
        let address = |text: &str, rank| address_of(parse_address(text).unwrap(), rank);
        assert_eq!(address("9464", 3).unwrap().port(), 9467);
        assert_eq!(address("0", 3).unwrap().port(), 0);
        let Err(Refused(text)) = address("65534", 2) else { panic!("accepted") };
        assert!(text.contains("--metrics 127.0.0.1:65534") && text.contains("rank 2"), "{text}");
    }

    fn get(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn the_endpoint_serves_its_metrics_and_refuses_the_rest() {
        let address = serve(parse_address("0").unwrap(), Arc::default()).unwrap();
        let text = get(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("# EOF\n"), "{text}");
        for line in ["# TYPE gin_launches counter", "gin_launches_total 0", "# TYPE gin_proxy_deepest gauge"] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(get(address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(get(address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        // A peer that hangs up without a request.
        drop(TcpStream::connect(address).unwrap());
        assert!(get(address, "GET /metrics HTTP/1.1\r\n\r\n").contains(" 200 OK"), "it still serves");
        let Err(error) = serve(address, Arc::default()) else { panic!("bound twice") };
        assert!(error.is::<Refused>() && error.to_string().contains(&format!("--metrics {address}")), "{error}");
    }
}
