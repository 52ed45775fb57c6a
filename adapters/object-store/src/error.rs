//! The error of objects: where, and why.

use std::ops::Range;
use std::time::Duration;

use twinbuf::BoxError;

/// Why objects could not be opened or read: where, with the reason as its source.
///
/// A loader returns it as the source of [`twinbuf::Error::Load`]: `source.downcast_ref::<Error>()`.
#[derive(Debug, thiserror::Error)]
#[error("{url}{}", bytes(.range))]
pub struct Error {
    /// The URL of the object. If all objects are concerned: the URL that was opened, or its part before their paths.
    pub url: String,
    /// The bytes that were requested. Empty if the error does not concern a request for bytes of an object.
    pub range: Range<u64>,
    /// The reason.
    #[source]
    pub kind: Kind,
}

/// The reason of an [`Error`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Kind {
    /// The URL is not that of a store whose feature is on, the store cannot be made with the settings, the objects
    /// cannot be listed or found, a file or a thread cannot be made, or the opener opened a file of its own. The source
    /// is `object_store`'s error, the parser's or the system's, or a text.
    #[error("the objects could not be opened")]
    Open(#[source] BoxError),
    /// There are no objects below the URL, or all of them are empty.
    #[error("wanted at least one object, found none")]
    Empty,
    /// The opener failed, for example because the objects do not have the requested format. The text has the URLs of
    /// the objects, the error the paths of temporary files.
    #[error("{0}")]
    Format(String, Box<twinbuf::mmap::Error>),
    /// The object was replaced or truncated after it was found. ETag (of a store without: the time of the last change)
    /// and size then, and now. `found` is `another` if the store only told that the ETag differs.
    #[error("changed while open: wanted {wanted}, found {found}")]
    #[allow(missing_docs)]
    Changed { wanted: String, found: String },
    /// The answer has neither ETag nor time of change (1970-01-01 is none), so a replaced object could not be told from this
    /// one.
    #[error("wanted an ETag or a time of change, found neither: take a server that sends one")]
    Untagged,
    /// The object was removed after it was found.
    #[error("removed while open")]
    Removed,
    /// The request failed, after the store's retries.
    #[error("the request failed")]
    Request(#[source] object_store::Error),
    /// The response had this number of bytes, not those requested.
    #[error("found {0} bytes")]
    Length(u64),
    /// The request did not end within this time.
    #[error("no end within {:.3} s", .0.as_secs_f64())]
    Timeout(Duration),
    /// The runtime of the requests has ended: the caller's, or a task panicked. Or this process was forked from the one that
    /// opened the objects: it does not have the threads of the runtime.
    #[error("the runtime of the requests has ended, or is that of another process")]
    Runtime,
}

fn bytes(range: &Range<u64>) -> String {
    if range.is_empty() { String::new() } else { format!(", bytes {range:?}") }
}
