//! `twinbuf-object-store-server ROOT DELAY_MS`: prints its address and serves the folders of ROOT
//! as buckets, until its standard input ends.
//!
//! It is s3s-fs for reads, heads and lists, but s3s-fs reads the whole object and computes its MD5 for each range. Here
//! reads remember the ETag until the file changes. Each answer to a read waits for DELAY_MS first. As in s3s-fs,
//! `If-Match` has no effect. Requests may be signed, with the access key `x` and the secret `x`. A line on the standard
//! input is answered by the number of reads and of their bytes since the line before.

use std::collections::HashMap;
use std::io::SeekFrom;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::SimpleAuth;
use s3s::dto::{
    ETag, GetObjectInput, GetObjectOutput, HeadObjectInput, HeadObjectOutput, ListObjectsV2Input,
    ListObjectsV2Output, StreamingBlob, Timestamp,
};
use s3s::service::S3ServiceBuilder;
use s3s::{S3, S3Request, S3Response, S3Result};
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio_util::io::ReaderStream;

/// Anyone may read, with and without a signature.
struct Anyone;

#[async_trait::async_trait]
impl S3Access for Anyone {
    async fn check(&self, _: &mut S3AccessContext<'_>) -> S3Result<()> {
        Ok(())
    }
}

/// A file's path, its time of change and its size.
type File = (PathBuf, SystemTime, u64);

static READS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

struct Server {
    files: s3s_fs::FileSystem,
    root: PathBuf,
    delay: Duration,
    tags: Mutex<HashMap<File, ETag>>,
}

#[async_trait::async_trait]
impl S3 for Server {
    async fn get_object(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        tokio::time::sleep(self.delay).await;
        let path = self.root.join(&req.input.bucket).join(&req.input.key);
        let Ok(mut file) = tokio::fs::File::open(&path).await else {
            return self.files.get_object(req).await;
        };
        let meta = file.metadata().await.map_err(s3s::S3Error::internal_error)?;
        let (modified, size) = (meta.modified().map_err(s3s::S3Error::internal_error)?, meta.len());
        let key = (path, modified, size);
        let known = self.tags.lock().unwrap().get(&key).cloned();
        let Some(tag) = known else {
            let response = self.files.get_object(req).await?;
            count(response.output.content_length.unwrap_or(0) as u64);
            if let Some(tag) = response.output.e_tag.clone() {
                self.tags.lock().unwrap().insert(key, tag);
            }
            return Ok(response);
        };
        let range = match req.input.range {
            Some(range) => range.check(size)?,
            None => 0..size,
        };
        file.seek(SeekFrom::Start(range.start)).await.map_err(s3s::S3Error::internal_error)?;
        let len = range.end - range.start;
        count(len);
        let body = ReaderStream::with_capacity(file.take(len), len.min(256 << 10) as usize);
        Ok(S3Response::new(GetObjectOutput {
            body: Some(StreamingBlob::wrap(body)),
            content_length: Some(len as i64),
            content_range: req.input.range.map(|_| format!("bytes {}-{}/{size}", range.start, range.end - 1)),
            e_tag: Some(tag),
            last_modified: Some(Timestamp::from(modified)),
            ..GetObjectOutput::default()
        }))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        self.files.head_object(req).await
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        self.files.list_objects_v2(req).await
    }
}

fn count(bytes: u64) {
    READS.fetch_add(1, Relaxed);
    BYTES.fetch_add(bytes, Relaxed);
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(root), Some(delay)) = (args.next(), args.next()) else {
        return Err("wanted a folder and a delay in milliseconds".into());
    };
    let files = s3s_fs::FileSystem::new(&root).map_err(|error| format!("{error:?}"))?;
    let delay = Duration::from_millis(delay.parse()?);
    let mut builder =
        S3ServiceBuilder::new(Server { files, root: root.into(), delay, tags: Mutex::default() });
    builder.set_auth(SimpleAuth::from_single("x", "x"));
    builder.set_access(Anyone);
    let service = builder.build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    std::thread::spawn(|| {
        for _ in std::io::stdin().lines() {
            println!("{} {}", READS.swap(0, Relaxed), BYTES.swap(0, Relaxed));
        }
        std::process::exit(0);
    });
    loop {
        let (socket, _) = listener.accept().await?;
        let service = service.clone();
        tokio::spawn(async move {
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}
