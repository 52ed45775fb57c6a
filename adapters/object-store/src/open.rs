//! Opens objects: their list, their headers, where the records are.

use std::collections::HashMap;
use std::fs::{self, File};
use std::future::ready;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, ObjectStoreScheme, parse_url_opts};
use tokio::runtime::Builder;
use twinbuf::{BoxError, Records, mmap};
use url::Url;

use crate::client::{Client, Object};
use crate::error::{Error, Kind};
use crate::options::Options;
use crate::{Objects, Shard};

impl Objects {
    /// Opens the objects below a URL that ends with `/`, or the single object of another URL.
    ///
    /// Requests the first [`header_bytes`](Options::header_bytes) of each object, and calls `open` with sparse files that
    /// have these bytes and the objects' sizes, but no other content. `open` is an opener of [`Records`] that reads no
    /// more than headers: `|files| Records::open(files, 4096)`, `|files| Records::open_npy(files, Cut::Rows)`. The files
    /// are removed afterwards.
    ///
    /// # Errors
    ///
    /// - [`Kind::Open`], [`Kind::Empty`]: the URL, its store, the list of the objects.
    /// - [`Kind::Format`]: the error of `open`.
    /// - The errors of requests.
    pub fn open(
        url: &str,
        options: Options,
        open: impl FnOnce(&[PathBuf]) -> Result<Records, mmap::Error>,
    ) -> Result<Self, Error> {
        let failed = |source: BoxError| Error { url: url.to_string(), range: 0..0, kind: Kind::Open(source) };
        let (store, base) = parse(url, &options).map_err(failed)?;
        let root = url.strip_suffix('/').unwrap_or(url);
        let root = root.strip_suffix(base.as_ref()).unwrap_or(root);
        let root = if root.ends_with('/') { root.to_string() } else { format!("{root}/") };
        let own = match &options.runtime {
            Some(_) => None,
            None => Some(Builder::new_multi_thread().worker_threads(2).enable_all().build()),
        };
        let own = own.transpose().map_err(|error| failed(error.into()))?;
        let client = Arc::new(Client { store, root, own, options, counters: Default::default() });
        let found = find(client.clone(), url.to_string(), base);
        let heads = client.wait(found)?;
        let (folder, files) = copies(&heads).map_err(|error| failed(error.into()))?;
        let records = open(&files).map_err(|source| {
            let text = source.to_string().replace(&format!("{}/", folder.path().display()), &client.root);
            Error { url: url.to_string(), range: 0..0, kind: Kind::Format(text, Box::new(source)) }
        })?;
        let objects = files.into_iter().zip(heads.into_iter().map(|(object, _)| Arc::new(object)));
        let (shards, record) = (shards(&records, &objects.collect()), records.record_bytes());
        let element = records.is_typed().then(|| (records.dtype(), records.shape().to_vec()));
        Ok(Self { client, shards: shards.into(), record, element })
    }
}

/// The store of a URL, and the path in it.
fn parse(url: &str, options: &Options) -> Result<(Arc<dyn ObjectStore>, Path), BoxError> {
    let url = Url::parse(url)?;
    if let Some(store) = &options.store {
        let known = ObjectStoreScheme::parse(&url).map(|(_, path)| path);
        return Ok((store.clone(), known.or_else(|_| Path::from_url_path(url.path()))?));
    }
    let settings = options.settings.iter().map(|(key, value)| (key.to_ascii_lowercase(), value));
    let (store, path) = parse_url_opts(&url, settings)?;
    Ok((store.into(), path))
}

/// The objects with their first bytes: those with `names` below `base`, `base` itself, or all below it.
async fn find(client: Arc<Client>, url: String, base: Path) -> Result<Vec<(Object, Vec<u8>)>, Error> {
    let failed = |source| Error { url: url.clone(), range: 0..0, kind: Kind::Open(Box::new(source)) };
    let (client, store, parallel) = (&client, &client.store, client.options.requests.max(1));
    let mut names = client.options.names.clone();
    if names.is_empty() && !url.ends_with('/') {
        names.push(String::new());
    }
    let mut found: Vec<ObjectMeta> = if names.is_empty() {
        store.list(Some(&base)).try_filter(|meta| ready(meta.size > 0)).try_collect().await.map_err(failed)?
    } else {
        let paths: Vec<_> = names.iter().map(|name| Path::from(format!("{base}/{name}"))).collect();
        let heads = stream::iter(paths).map(|path| async move { store.head(&path).await });
        heads.buffered(parallel).try_collect().await.map_err(failed)?
    };
    if names.is_empty() {
        found.sort_by(|a, b| a.location.cmp(&b.location));
    }
    if found.is_empty() {
        return Err(Error { url, range: 0..0, kind: Kind::Empty });
    }
    let heads = stream::iter(found).map(|meta| async move {
        let range = 0..client.options.header_bytes.clamp(1, meta.size.max(1));
        let mut object = Object { path: meta.location, size: meta.size, tag: None };
        let (tag, parts) = client.get(&object, range).await?;
        object.tag = Some(tag);
        Ok((object, parts.concat()))
    });
    heads.buffered(parallel).try_collect().await
}

/// Sparse files that have the objects' sizes and first bytes.
fn copies(heads: &[(Object, Vec<u8>)]) -> io::Result<(tempfile::TempDir, Vec<PathBuf>)> {
    let folder = tempfile::tempdir()?;
    let copy = |(object, head): &(Object, Vec<u8>)| {
        let path = folder.path().join(object.path.as_ref());
        fs::create_dir_all(path.parent().unwrap_or(folder.path()))?;
        let mut file = File::create(&path)?;
        file.write_all(head)?;
        file.set_len(object.size)?;
        Ok::<_, io::Error>(path)
    };
    let files = heads.iter().map(copy).collect::<Result<_, _>>()?;
    Ok((folder, files))
}

/// Where the records of each object are.
fn shards(records: &Records, objects: &HashMap<PathBuf, Arc<Object>>) -> Vec<Shard> {
    // The opener may have skipped some files.
    let shards = records.shards().iter().filter_map(|shard| {
        let (object, records_here) = (objects.get(shard.path())?.clone(), shard.records());
        let first = records.locate(records_here.start)?.offset;
        let next =
            records.locate(records_here.start + 1).filter(|_| records_here.end - records_here.start > 1);
        Some(Shard {
            object,
            records: records_here,
            first,
            stride: next.map_or(0, |next| next.offset - first),
        })
    });
    shards.collect()
}
