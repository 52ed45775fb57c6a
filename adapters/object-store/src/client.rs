//! Requests: ranges of objects.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore};
use tokio::runtime::{Handle, Runtime};
use url::Url;

use crate::error::{Error, Kind};
use crate::options::Options;

/// An object as it was when it was opened.
pub(crate) struct Object {
    pub(crate) path: Path,
    pub(crate) size: u64,
    /// Which content it is: its ETag, or if the store has none, the time of its last change. `None` before the first
    /// request.
    pub(crate) tag: Option<String>,
}

/// The store, and what is the same for all requests.
pub(crate) struct Client {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The URL in front of an object's path.
    pub(crate) root: Url,
    /// The runtime of the requests.
    pub(crate) runtime: Handle,
    /// The same, unless it is the caller's.
    pub(crate) own: Option<Runtime>,
    /// The process that has its threads.
    pub(crate) process: u32,
    pub(crate) options: Options,
    /// Requests, bytes received, bytes used.
    pub(crate) counters: [AtomicU64; 3],
}

impl Drop for Client {
    /// Does not wait for requests that hang. The thread may be one of another runtime, which must not block.
    fn drop(&mut self) {
        if let Some(own) = self.own.take() {
            own.shutdown_background();
        }
    }
}

impl Client {
    /// Requests a range of an object. Returns the object's tag too.
    pub(crate) async fn get(&self, object: &Object, range: Range<u64>) -> Result<(String, Bytes), Error> {
        let got = self.timed(self.get_untimed(object, &range)).await;
        got.map_err(|kind| Error { url: self.url(&object.path), range, kind })
    }

    pub(crate) async fn timed<T>(&self, request: impl Future<Output = Result<T, Kind>>) -> Result<T, Kind> {
        let limit = self.options.timeout;
        tokio::time::timeout(limit, request).await.unwrap_or(Err(Kind::Timeout(limit)))
    }

    async fn get_untimed(&self, object: &Object, range: &Range<u64>) -> Result<(String, Bytes), Kind> {
        let changed = |found| {
            let wanted = format!("{} of {} bytes", object.tag.as_deref().unwrap_or("an object"), object.size);
            Kind::Changed { wanted, found }
        };
        let failed = |source| match source {
            object_store::Error::NotFound { .. } => Kind::Removed,
            object_store::Error::Precondition { .. } => changed("another".to_string()),
            source => Kind::Request(source),
        };
        // Only a strong ETag can match (RFC 9110, 13.1.1). Others are compared below.
        let if_match = object.tag.clone().filter(|tag| tag.starts_with('"'));
        // An empty object has no range: all of it is requested.
        let part = Some(range.clone().into()).filter(|_| !range.is_empty());
        let options = GetOptions { range: part, if_match, ..GetOptions::default() };
        let response = self.store.get_opts(&object.path, options).await.map_err(failed)?;
        let ObjectMeta { e_tag, size, last_modified, .. } = response.meta.clone();
        // `object_store` gives 1970 for an answer without a time.
        let time = || (last_modified.timestamp() != 0).then(|| last_modified.to_rfc3339());
        let tag = e_tag.or_else(time).ok_or(Kind::Untagged)?;
        // A store may ignore the condition.
        if size != object.size || object.tag.as_ref().is_some_and(|wanted| *wanted != tag) {
            return Err(changed(format!("{tag} of {size} bytes")));
        }
        let bytes = response.bytes().await.map_err(failed)?;
        let len = bytes.len() as u64;
        if len == range.end - range.start { Ok((tag, bytes)) } else { Err(Kind::Length(len)) }
    }

    pub(crate) fn url(&self, path: &Path) -> String {
        let mut url = self.root.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path.parts());
        }
        url.into()
    }

    /// The error after the end of the runtime.
    pub(crate) fn ended(&self) -> Error {
        Error { url: self.root.to_string(), range: 0..0, kind: Kind::Runtime }
    }
}
