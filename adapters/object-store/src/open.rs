//! Opens objects: their list, their headers, where the records are.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;

use bytes::Bytes;
use futures_util::{StreamExt, TryFutureExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, ObjectStoreScheme, parse_url_opts};
use tokio::runtime::Builder;
use tokio::task::unconstrained;
use twinbuf::{BoxError, Records, mmap};
use url::Url;

use crate::client::{Client, Object};
use crate::error::{Error, Kind};
use crate::options::Options;
use crate::{Objects, Shard};

impl Objects {
    /// Opens the objects below a URL that ends with `/`, the single object of another URL, or those
    /// below it that [`names`](Options::names) lists.
    ///
    /// Requests the first [`header_bytes`](Options::header_bytes) of each object, and calls `open` with sparse files that
    /// have these bytes and the objects' sizes, but no other content. Their paths end with the objects' paths (with the
    /// last 255 bytes of a longer part), and sort as the objects do. `open` is an opener of [`Records`] that reads no more
    /// than headers: `|files| Records::open(files, 4096)`, `|files| Records::open_npy(files, Cut::Rows)`. The files are
    /// removed afterwards.
    ///
    /// # Errors
    ///
    /// - [`Kind::Open`], [`Kind::Empty`]: the URL, its store, the list of the objects, a temporary file, or a file of
    ///   `open`'s own.
    /// - [`Kind::Format`]: the error of `open`.
    /// - The errors of requests.
    pub fn open(
        url: &str,
        options: Options,
        open: impl FnOnce(&[PathBuf]) -> Result<Records, mmap::Error>,
    ) -> Result<Self, Error> {
        // In no text are a query, which may be a signature, and a password: no store takes them from the URL. `?` and `#` may
        // be in a password if a `@` follows. Without a `:` before a `@`, but for that of `://`, there is none.
        let (start, rest) = url.split_at(url.find(['?', '#']).unwrap_or(url.len()));
        let mut parsed = Url::parse(start);
        let _ = parsed.as_mut().map(|url| url.set_password(None));
        let (front, end) = start.rsplit_once('@').unwrap_or(("", start));
        let secret = front.matches(':').count() > usize::from(front.contains("://"));
        let text = parsed.as_ref().map_or(if secret { end } else { start }, Url::as_str);
        let url = if rest.contains('@') { "the URL" } else { text };
        let failed = |source: BoxError| Error { url: url.to_string(), range: 0..0, kind: Kind::Open(source) };
        let found = parsed.clone().map_err(BoxError::from).and_then(|url| parse(url, &options));
        let (store, base, root) = found.map_err(failed)?;
        let (runtime, own) = match options.runtime.clone() {
            Some(runtime) => (runtime, None),
            None => {
                let build = |()| Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build();
                let own = can_start(WORKERS).and_then(build).map_err(|error| failed(error.into()))?;
                (own.handle().clone(), Some(own))
            }
        };
        let (process, counters) = (std::process::id(), Default::default());
        let client = Arc::new(Client { store, root, runtime, own, process, options, counters });
        // `unconstrained`: see `read`.
        let found = unconstrained(client.runtime.spawn(find(client.clone(), url.to_string(), base)));
        let heads = pollster::block_on(found).unwrap_or_else(|_| Err(client.ended()))?;
        let (_folder, files) = copies(&heads).map_err(|error| failed(error.into()))?;
        let records = open(&files).map_err(|source| {
            let bytes = client.options.header_bytes;
            let mut text = format!("{source} (of each object the first {bytes} bytes were read)");
            for (file, (object, _)) in files.iter().zip(&heads) {
                text = text.replace(&format!("{file:?}"), &format!("{:?}", client.url(&object.path)));
            }
            Error { url: url.to_string(), range: 0..0, kind: Kind::Format(text, Box::new(source)) }
        })?;
        let objects = files.into_iter().zip(heads.into_iter().map(|(object, _)| Arc::new(object)));
        let shards = shards(&records, &objects.collect()).map_err(failed)?;
        let element = records.is_typed().then(|| (records.dtype(), records.shape().to_vec()));
        Ok(Self { client, blocks: Arc::default(), shards, record: records.record_bytes(), element })
    }
}

/// The threads of a runtime that is not the caller's.
const WORKERS: usize = 2;

/// Starts as many threads and ends them: where one cannot start, tokio panics, or its runtime does not end.
fn can_start(threads: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let _closed = gate.lock();
        let wait = || drop(gate.lock());
        (0..threads).try_for_each(|_| thread::Builder::new().spawn_scoped(scope, wait).map(drop))
    })
}

/// The store of a URL, the path in it, and the URL without that path, which ends with `/`.
fn parse(mut url: Url, options: &Options) -> Result<(Arc<dyn ObjectStore>, Path, Url), BoxError> {
    let (store, path) = if let Some(store) = &options.store {
        let known = ObjectStoreScheme::parse(&url).map(|(_, path)| path);
        (store.clone(), known.or_else(|_| Path::from_url_path(url.path()))?)
    } else {
        let settings = options.settings.iter().map(|(key, value)| (key.to_ascii_lowercase(), value));
        let (store, path) = parse_url_opts(&url, settings)?;
        (store.into(), path)
    };
    // A URL without a hierarchy, such as `store:name`, stays whole.
    if let Ok(mut segments) = url.path_segments_mut() {
        path.parts().fold(segments.pop_if_empty(), |segments, _| segments.pop()).push("");
    }
    Ok((store, path, url))
}

/// The objects with their first bytes: those with `names` below `base`, `base` itself, or all below it.
async fn find(client: Arc<Client>, url: String, base: Path) -> Result<Vec<(Object, Bytes)>, Error> {
    let failed = |kind| Error { url: url.clone(), range: 0..0, kind };
    let open = |source: object_store::Error| Kind::Open(source.into());
    let (client, store, parallel) = (&client, &client.store, client.options.requests.max(1));
    // Names and `base` are as the store lists them: `Path::from` would encode them once more.
    let names = client.options.names.iter().map(|name| Path::parse(format!("{base}/{name}")));
    let mut paths: Vec<Path> = names.collect::<Result<_, _>>().map_err(|error| failed(open(error.into())))?;
    if paths.is_empty() && !url.ends_with('/') {
        paths.push(base.clone());
    }
    let found: Vec<ObjectMeta> = if paths.is_empty() {
        let (mut all, mut list) = (Vec::new(), store.list(Some(&base)).map_err(open));
        while let Some(meta) = client.timed(list.try_next()).await.map_err(failed)? {
            all.extend(Some(meta).filter(|meta| meta.size > 0));
        }
        all.sort_by(|a, b| a.location.cmp(&b.location));
        all
    } else {
        let head = |path| async move {
            let found = client.timed(store.head(&path).map_err(open)).await;
            found.map_err(|kind| Error { url: client.url(&path), range: 0..0, kind })
        };
        stream::iter(paths).map(head).buffered(parallel).try_collect().await?
    };
    if found.is_empty() {
        return Err(Error { url, range: 0..0, kind: Kind::Empty });
    }
    let heads = stream::iter(found).map(|meta| async move {
        let range = 0..client.options.header_bytes.max(1).min(meta.size);
        let mut object = Object { path: meta.location, size: meta.size, tag: None };
        let (tag, head) = client.get(&object, range).await?;
        object.tag = Some(tag);
        Ok((object, head))
    });
    heads.buffered(parallel).try_collect().await
}

/// Makes sparse files that have the objects' sizes, names and first bytes, and sort as the objects do: below a folder with a
/// number, and where the order or the name of an earlier file is in the way, below one with a higher number.
fn copies(heads: &[(Object, Bytes)]) -> io::Result<(tempfile::TempDir, Vec<PathBuf>)> {
    let (folder, mut files) = (tempfile::tempdir()?, Vec::new());
    let (mut root, mut last) = (0, PathBuf::new());
    for (index, (object, head)) in heads.iter().enumerate() {
        twinbuf::write::check_size(object.size).map_err(|(_, error)| error)?;
        let name: PathBuf = object.path.parts().map(|part| cut(part.as_ref()).to_owned()).collect();
        let make = |root: usize| {
            let path: PathBuf = folder.path().join(format!("{root:020}")).iter().chain(&name).collect();
            fs::create_dir_all(path.parent().unwrap_or(&path))?;
            let mut file = File::create_new(&path)?;
            file.write_all(head)?;
            file.set_len(object.size).map(|()| path)
        };
        let made = (root != index && last < name).then(|| make(root)).and_then(Result::ok);
        root = if made.is_some() { root } else { index };
        files.push(made.map_or_else(|| make(root), Ok)?);
        last = name;
    }
    Ok((folder, files))
}

/// The end of a name: file systems take up to 255 bytes.
fn cut(name: &str) -> &str {
    (name.len().saturating_sub(255)..).find_map(|at| name.get(at..)).unwrap_or_default()
}

/// Where the records of each object are.
fn shards(records: &Records, objects: &HashMap<PathBuf, Arc<Object>>) -> Result<Arc<[Shard]>, BoxError> {
    let offset = |record| records.locate(record).map_or(0, |found| found.offset);
    // The opener may have skipped some files.
    let shards = records.shards().iter().map(|shard| {
        let (path, records) = (shard.path(), shard.records());
        let object = objects.get(path).cloned().ok_or_else(|| format!("{path:?}: not an object's file"))?;
        // The second record, or the first one again if there is no second.
        let [first, second] = [records.start, (records.start + 1).min(records.end - 1)].map(offset);
        // With one record, no stride is needed: any but 0 does.
        Ok(Shard { object, records, first, stride: (second - first).max(1) })
    });
    shards.collect()
}
