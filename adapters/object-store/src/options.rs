//! How objects are found and requested.

use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use tokio::runtime::Handle;

/// How objects are found, opened and requested: `Options { gap: 0, ..Options::default() }`.
pub struct Options {
    /// Settings of the store: credentials, region, endpoint, timeouts, such as `("aws_region", "eu-central-1")`. The names
    /// are `object_store`'s configuration keys, in lower case or as environment variables; others are ignored. Default:
    /// none. To take `AWS_ACCESS_KEY_ID` and its like from the environment, choose the variables that begin with `AWS_`:
    /// plain names, such as `TIMEOUT` and `ENDPOINT`, are keys too.
    pub settings: Vec<(String, String)>,
    /// A store that the caller has built, for example with another `RetryConfig`. The URL then only gives the path. Default:
    /// the store of the URL, which retries a failed request up to 10 times within 3 minutes.
    pub store: Option<Arc<dyn ObjectStore>>,
    /// The caller's runtime, for all requests. It needs its own threads (`new_multi_thread`), timers and I/O. A task of this
    /// runtime must not open the objects or read a batch itself: the requests may wait for it, and it for them, for ever.
    /// Default: a runtime with two threads for these objects.
    pub runtime: Option<Handle>,
    /// The names of the objects below the URL, in the order of their records: as the store lists them, not
    /// percent-encoded as in a URL. HTTP servers without WebDAV have no lists and need them for more than one. Default:
    /// none: the URL's object or, if the URL ends with `/`, all below it that are not empty, in the order of their names.
    pub names: Vec<String>,
    /// The number of bytes at the start of each object that hold its header. Default: 64 KiB.
    pub header_bytes: u64,
    /// The largest gap in bytes between two records of a batch that one request bridges. Its bytes are thrown away. A
    /// gap is cheaper than a request up to about delay × bandwidth / requests in flight. Gaps between the chunks of
    /// [`Shuffle::Window`](twinbuf::Shuffle::Window) are not bridged. Default: 64 KiB.
    pub gap: u64,
    /// The number of bytes above which neighbours, or a chunk of [`Shuffle::Window`](twinbuf::Shuffle::Window), become
    /// separate requests, which can use separate connections. A record is always one request. Default: 8 MiB.
    pub request_bytes: u64,
    /// The number of requests of one batch, or of the opening, in flight, at least 1. Each worker of the loader loads a
    /// batch. Default: 16.
    pub requests: usize,
    /// The time limit of one request, with its retries and its body. Default: 3 minutes.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            settings: Vec::new(),
            store: None,
            runtime: None,
            names: Vec::new(),
            header_bytes: 64 << 10,
            gap: 64 << 10,
            request_bytes: 8 << 20,
            requests: 16,
            timeout: Duration::from_secs(180),
        }
    }
}
