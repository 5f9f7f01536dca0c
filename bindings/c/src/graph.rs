// SPDX-License-Identifier: MIT OR Apache-2.0
//! Captures of streams, and graphs.

use crate::launch::Stream;
use crate::status::{call, output};
use crate::table;
use crate::types::{gin_graph_t, gin_status_t, gin_stream_t};
use std::sync::Arc;

/// Captured work of a stream.
pub(crate) struct Graph {
    inner: Box<dyn gin_gpu::Graph>,
}

impl table::Handled for Graph {
    const KIND: table::Kind = table::Kind::Graph;
}

/// Begins a graph: until `gin_stream_end_capture`, launches on the stream become part of it and do not run.
///
/// On a GPU the program may as well capture a stream by the calls of CUDA.
#[unsafe(no_mangle)]
pub extern "C" fn gin_stream_begin_capture(stream: gin_stream_t) -> gin_status_t {
    call("gin_stream_begin_capture", || Ok(table::get::<Stream>(stream.id)?.inner.begin_capture()?))
}

/// Ends a graph. The caller closes the handle with `gin_graph_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_stream_end_capture(stream: gin_stream_t, graph: *mut gin_graph_t) -> gin_status_t {
    call("gin_stream_end_capture", || {
        let (stream, graph) = (table::get::<Stream>(stream.id)?, output(graph, "graph")?);
        let inner = stream.inner.end_capture()?;
        graph.write(gin_graph_t { id: table::insert(Arc::new(Graph { inner }))? });
        Ok(())
    })
}

/// Launches a graph, in the order of the stream. The stream is of the device on which the graph was captured. Does not
/// wait.
///
/// # Safety
/// - As the crate's docs say; the memory and the objects of the captured calls live until the graph has run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_graph_launch(graph: gin_graph_t, stream: gin_stream_t) -> gin_status_t {
    call("gin_graph_launch", || {
        let (graph, stream) = (table::get::<Graph>(graph.id)?, table::get::<Stream>(stream.id)?);
        // Safety: the caller's promise.
        unsafe { stream.inner.replay(&*graph.inner)? };
        Ok(())
    })
}

/// Closes the handle. Launches go on.
#[unsafe(no_mangle)]
pub extern "C" fn gin_graph_close(graph: gin_graph_t) -> gin_status_t {
    call("gin_graph_close", || table::remove::<Graph>(graph.id).map(drop))
}
