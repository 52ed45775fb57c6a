//! Requests: ranges of objects, on threads that wait for them.

use std::future::Future;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

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
    pub(crate) root: String,
    /// The runtime, unless `options` has the caller's.
    pub(crate) own: Option<Runtime>,
    pub(crate) options: Options,
    /// Requests, bytes received, bytes used.
    pub(crate) counters: [AtomicU64; 3],
}

/// An object's tag, and the bytes of a range of it, in parts.
pub(crate) type Got = (String, Vec<Bytes>);

/// A request's index and the bytes of its range.
pub(crate) type Answer = Result<(usize, Vec<Bytes>), Error>;

impl Drop for Client {
    /// Does not wait for requests that hang. The thread may be one of another runtime, which must not block.
    fn drop(&mut self) {
        if let Some(own) = self.own.take() {
            own.shutdown_background();
        }
    }
}

impl Client {
    /// Starts a future on the runtime. It ends early if the set is dropped.
    fn start(&self, future: impl Future<Output = ()> + Send + 'static) -> JoinSet<()> {
        let own = self.own.as_ref().map(Runtime::handle);
        let mut tasks = JoinSet::new();
        if let Some(handle) = self.options.runtime.as_ref().or(own) {
            tasks.spawn_on(future, handle);
        }
        tasks
    }

    /// Runs a future on the runtime, and waits for it. Works in an asynchronous context, where tokio refuses to block.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        future: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let (sender, receiver) = mpsc::channel();
        let _tasks = self.start(async move { drop(sender.send(future.await)) });
        receiver.recv().unwrap_or_else(|_| Err(self.ended()))
    }

    /// Requests ranges of objects, several at a time. The receiver gets each request's index and bytes when it has ended: to
    /// wake a thread for each part costs more than to copy later. After an error it gets nothing more. The requests end
    /// when the set of tasks is dropped.
    pub(crate) fn fetch(
        self: &Arc<Self>,
        ranges: Vec<(Arc<Object>, Range<u64>)>,
    ) -> (mpsc::Receiver<Answer>, JoinSet<()>) {
        let (sender, receiver) = mpsc::channel();
        let client = self.clone();
        let all = async move {
            let requests = ranges.into_iter().enumerate().map(|(request, (object, range))| {
                let client = client.clone();
                async move { client.get(&object, range).await.map(|(_, parts)| (request, parts)) }
            });
            let mut ends = stream::iter(requests).buffer_unordered(client.options.requests.max(1));
            while let Some(end) = ends.next().await {
                let failed = end.is_err();
                if sender.send(end).is_err() || failed {
                    return;
                }
            }
        };
        (receiver, self.start(all))
    }

    /// Requests a range of an object.
    pub(crate) async fn get(&self, object: &Object, range: Range<u64>) -> Result<Got, Error> {
        let limit = self.options.timeout;
        let got = tokio::time::timeout(limit, self.get_untimed(object, &range)).await;
        got.unwrap_or(Err(Kind::Timeout(limit))).map_err(|kind| Error { url: self.url(object), range, kind })
    }

    async fn get_untimed(&self, object: &Object, range: &Range<u64>) -> Result<Got, Kind> {
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
        let options = GetOptions { range: Some(range.clone().into()), if_match, ..GetOptions::default() };
        let response = self.store.get_opts(&object.path, options).await.map_err(failed)?;
        let ObjectMeta { e_tag, size, last_modified, .. } = response.meta.clone();
        let tag = e_tag.unwrap_or_else(|| last_modified.to_rfc3339());
        // A store may ignore the condition.
        if size != object.size || object.tag.as_ref().is_some_and(|wanted| *wanted != tag) {
            return Err(changed(format!("{tag} of {size} bytes")));
        }
        let parts: Vec<Bytes> = response.into_stream().try_collect().await.map_err(failed)?;
        let len = parts.iter().map(|part| part.len() as u64).sum();
        if len == range.end - range.start { Ok((tag, parts)) } else { Err(Kind::Length(len)) }
    }

    pub(crate) fn url(&self, object: &Object) -> String {
        format!("{}{}", self.root, object.path)
    }

    /// The error after the end of the runtime.
    pub(crate) fn ended(&self) -> Error {
        Error { url: self.root.clone(), range: 0..0, kind: Kind::Runtime }
    }
}
