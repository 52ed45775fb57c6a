//! S3's protocol: a real server (`server/`) on a folder, and a proxy in front of it that fails at chosen requests.
//!
//! `ci/objects.sh` builds the server and sets `OBJECTS_SERVER`. Without it, these tests check nothing.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::{BackoffConfig, RetryConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use twinbuf::{BoxError, LastBatch, Loader, Plan, Records, Shuffle};
use twinbuf_object_store::{Error, Kind, Objects, Options};

const RECORD: usize = 100;

/// What the proxy does with a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Passes it on.
    None,
    /// Answers 503.
    Unavailable,
    /// Closes the connection after this many bytes of the answer.
    Cut(usize),
    /// Answers with one byte less, and a `Content-Length` that agrees.
    Short,
    /// Does not answer.
    Hang,
}

type Faults = Arc<Mutex<Box<dyn Fn(usize) -> Fault + Send>>>;

/// A server, a proxy, and three objects of 20 records.
struct Server {
    folder: tempfile::TempDir,
    server: Child,
    proxy: String,
    /// The fault of the n-th read of an object, and their number.
    faults: Faults,
    reads: Arc<AtomicUsize>,
    _runtime: Runtime,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.server.kill().and_then(|()| self.server.wait());
    }
}

fn bytes(seed: u64) -> Vec<u8> {
    (0..20 * RECORD as u64).map(|at| ((at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

impl Server {
    /// `None` without `OBJECTS_SERVER`.
    fn start() -> Result<Option<Self>, BoxError> {
        let Some(program) = std::env::var_os("OBJECTS_SERVER") else {
            println!("not checked: no OBJECTS_SERVER");
            return Ok(None);
        };
        let folder = tempfile::tempdir()?;
        fs::create_dir_all(folder.path().join("bucket/train"))?;
        for index in 0..3 {
            fs::write(folder.path().join(format!("bucket/train/{index}")), bytes(index))?;
        }
        let mut command = Command::new(program);
        let mut server =
            command.arg(folder.path()).arg("0").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut address = String::new();
        BufReader::new(server.stdout.take().ok_or("no output")?).read_line(&mut address)?;
        let runtime = Runtime::new()?;
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let proxy = format!("http://{}", listener.local_addr()?);
        let faults: Faults = Arc::new(Mutex::new(Box::new(|_| Fault::None)));
        let reads = Arc::new(AtomicUsize::new(0));
        let (shared, counter, address) = (faults.clone(), reads.clone(), address.trim().to_string());
        runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, address.clone(), shared.clone(), counter.clone()));
            }
        });
        Ok(Some(Self { folder, server, proxy, faults, reads, _runtime: runtime }))
    }

    fn fail(&self, fault: impl Fn(usize) -> Fault + Send + 'static) {
        *self.faults.lock().unwrap() = Box::new(fault);
        self.reads.store(0, SeqCst);
    }

    fn open(&self, options: Options) -> Result<Objects, BoxError> {
        let backoff = BackoffConfig { init_backoff: Duration::from_millis(1), ..BackoffConfig::default() };
        let retry = RetryConfig { max_retries: 3, backoff, ..RetryConfig::default() };
        let store =
            AmazonS3Builder::new().with_bucket_name("bucket").with_endpoint(&self.proxy).with_region("x");
        let store = store
            .with_allow_http(true)
            .with_access_key_id("x")
            .with_secret_access_key("x")
            .with_retry(retry)
            .build()?;
        let options = Options { store: Some(Arc::new(store)), gap: 0, ..options };
        Ok(Objects::open("s3://bucket/train/", options, |files| Records::open(files, RECORD))?)
    }

    fn path(&self, index: u64) -> PathBuf {
        self.folder.path().join(format!("bucket/train/{index}"))
    }
}

/// Passes one request on, with its fault. Connections are used once.
async fn pass(
    mut client: TcpStream,
    server: String,
    faults: Faults,
    reads: Arc<AtomicUsize>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(client.read_u8().await?);
    }
    let text = String::from_utf8_lossy(&head).replacen("\r\n", "\r\nConnection: close\r\n", 1);
    let ranged = text.to_ascii_lowercase().contains("\r\nrange:");
    let fault = if ranged { faults.lock().unwrap()(reads.fetch_add(1, SeqCst)) } else { Fault::None };
    let mut answer = Vec::new();
    match fault {
        Fault::Hang => return std::future::pending().await,
        Fault::Unavailable => {
            answer = b"HTTP/1.1 503 Slow\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec();
        }
        _ => {
            let mut server = TcpStream::connect(server).await?;
            server.write_all(text.as_bytes()).await?;
            server.read_to_end(&mut answer).await?;
        }
    }
    match fault {
        Fault::Cut(bytes) => answer.truncate(bytes),
        Fault::Short => {
            let at = answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap_or_default();
            let head = String::from_utf8_lossy(&answer[..at]).to_ascii_lowercase();
            let len = answer.len() - at - 4;
            let head =
                head.replace(&format!("content-length: {len}"), &format!("content-length: {}", len - 1));
            answer.pop();
            answer.splice(..at, head.replacen("http", "HTTP", 1).into_bytes());
        }
        _ => {}
    }
    client.write_all(&answer).await
}

/// Loads an epoch of four batches an object. Returns the batches before the error.
fn epoch(objects: Objects, workers: usize) -> Result<(Vec<Vec<u8>>, Option<twinbuf::Error>), BoxError> {
    let plan = Plan::builder(objects.len()).batch(5).build()?;
    let mut loader = Loader::builder(objects, plan).workers(workers).build()?;
    let mut batches = Vec::new();
    for batch in loader.epoch(0) {
        match batch {
            Ok(batch) => batches.push(batch.to_vec()),
            Err(error) => return Ok((batches, Some(error))),
        }
    }
    Ok((batches, None))
}

fn wanted() -> Vec<Vec<u8>> {
    (0..3).flat_map(|index| bytes(index).chunks(5 * RECORD).map(<[u8]>::to_vec).collect::<Vec<_>>()).collect()
}

fn typed(error: twinbuf::Error) -> Result<Error, BoxError> {
    match error {
        twinbuf::Error::Load { source, .. } => Ok(*source.downcast()?),
        error => Err(error.into()),
    }
}

/// Every read of an epoch fails once, and is tried again. Then it always fails: one error, after the batches before it.
#[test]
fn faults_at_every_request() -> Result<(), BoxError> {
    let Some(server) = Server::start()? else { return Ok(()) };
    let objects = server.open(Options::default())?;
    let wanted = wanted();
    for fault in
        [Fault::Unavailable, Fault::Cut(0), Fault::Cut(90), Fault::Cut(240), Fault::Cut(600), Fault::Short]
    {
        for at in 0..12 {
            for once in [true, false] {
                server.fail(move |read| if read == at || (read > at && !once) { fault } else { Fault::None });
                let (found, error) = epoch(objects.clone(), if once { 3 } else { 1 })?;
                // The second try asks for what is left: after a late cut it needs no third.
                if (once || fault == Fault::Cut(600)) && fault != Fault::Short {
                    assert!(error.is_none() && found == wanted, "{fault:?} {at}: {error:?}");
                    continue;
                }
                let error = typed(error.ok_or_else(|| format!("{fault:?} {at} {once}: no error"))?)?;
                assert_eq!(found[..], wanted[..found.len()], "{fault:?} {at}");
                assert!(once || found.len() == at, "{fault:?} {at}: {}", found.len());
                let object = found.len() / 4;
                assert!(
                    error.url == format!("s3://bucket/train/{object}")
                        && error.range.end - error.range.start == 500
                );
                match error.kind {
                    Kind::Length(499) if fault == Fault::Short => {}
                    Kind::Request(_) if fault != Fault::Short => {}
                    kind => return Err(format!("{fault:?} {at}: {kind}").into()),
                }
            }
        }
    }
    assert!(server.open(Options::default()).is_err(), "the opening fails too");
    Ok(())
}

/// By names, as HTTP has no lists, and with the settings of the URL's store.
#[test]
fn http_reads_names() -> Result<(), BoxError> {
    let Some(server) = Server::start()? else { return Ok(()) };
    fs::write(server.folder.path().join("bucket/train/é [1]%23#"), bytes(7))?;
    let names = ["1", "é [1]%23#", "0"].map(String::from).into();
    let options =
        Options { names, settings: vec![("allow_http".into(), "true".into())], ..Options::default() };
    let url = format!("{}/bucket/train/", server.proxy);
    let (found, error) = epoch(Objects::open(&url, options, |files| Records::open(files, RECORD))?, 2)?;
    assert!(error.is_none() && found.concat() == [bytes(1), bytes(7), bytes(0)].concat());
    Ok(())
}

/// The server ignores `If-Match`.
#[test]
fn objects_change_in_mid_epoch() -> Result<(), BoxError> {
    let Some(server) = Server::start()? else { return Ok(()) };
    for change in 0..4 {
        fs::write(server.path(2), bytes(2))?;
        let objects = server.open(Options::default())?;
        let plan = Plan::builder(objects.len()).batch(5).build()?;
        let mut loader = Loader::builder(objects, plan).depth(2).build()?;
        let mut epochs = loader.epoch(0);
        assert_eq!(epochs.next().ok_or("no batch")??[..], wanted()[0]);
        match change {
            0 => fs::write(server.path(2), bytes(9))?,
            1 => fs::write(server.path(2), &bytes(2)[..700])?,
            2 => fs::write(server.path(2), [])?,
            _ => fs::remove_file(server.path(2))?,
        }
        let error = typed(epochs.find_map(Result::err).ok_or("no error")?)?;
        assert!(error.url == "s3://bucket/train/2" && error.range == (0..500), "{error}");
        match error.kind {
            Kind::Changed { .. } if change < 2 => {}
            Kind::Request(_) if change == 2 => {}
            Kind::Removed if change == 3 => {}
            kind => return Err(format!("{change}: {kind}").into()),
        }
    }
    Ok(())
}

#[test]
fn a_server_hangs() -> Result<(), BoxError> {
    let Some(server) = Server::start()? else { return Ok(()) };
    let objects = server.open(Options { timeout: Duration::from_millis(300), ..Options::default() })?;
    server.fail(|read| if read == 5 { Fault::Hang } else { Fault::None });
    let (found, error) = epoch(objects, 1)?;
    let error = typed(error.ok_or("no error")?)?;
    assert!(
        found.len() == 5 && matches!(error.kind, Kind::Timeout(_)) && error.range == (500..1000),
        "{error}"
    );

    let objects = server.open(Options::default())?;
    server.fail(|_| Fault::Hang);
    let plan = Plan::builder(objects.len()).batch(5).build()?;
    let mut loader = Loader::builder(objects, plan).build()?;
    let mut epochs = loader.epoch(0);
    assert!(epochs.next_timeout(Duration::from_millis(50)).is_pending());
    while server.reads.load(SeqCst) == 0 {
        std::thread::yield_now();
    }
    drop(epochs);
    let text = loader.close_timeout(Duration::from_millis(50)).err().ok_or("closed")?.to_string();
    assert!(text.contains("s3://bucket/train/0 at byte 0"), "{text}");
    Ok(())
}

/// Two ranks stop after some steps; three go on, each record once. With another object they do not.
#[test]
fn another_number_of_ranks_resumes() -> Result<(), BoxError> {
    let Some(server) = Server::start()? else { return Ok(()) };
    let objects = server.open(Options::default())?;
    let plan =
        Plan::builder(objects.len()).batch(4).shuffle(Shuffle::Full).seed(5).last_batch(LastBatch::Keep);
    let plan = plan.rank(0, 2).build()?;
    let (mut seen, mut checkpoint) = (Vec::new(), None);
    for rank in 0..2 {
        let mut loader = Loader::builder(objects.clone(), plan.with_rank(rank, 2)?).workers(2).build()?;
        for batch in loader.epoch(0).take(3) {
            let batch = batch?;
            seen.extend(batch.chunks(RECORD).map(<[u8]>::to_vec));
            checkpoint = Some(batch.checkpoint());
        }
    }
    let checkpoint = checkpoint.ok_or("no batch")?;
    for rank in 0..3 {
        let mut loader = Loader::builder(objects.clone(), plan.with_rank(rank, 3)?).workers(2).build()?;
        for batch in loader.epochs_from(&checkpoint, 1)? {
            seen.extend(batch?.chunks(RECORD).map(<[u8]>::to_vec));
        }
    }
    let mut all: Vec<Vec<u8>> = wanted().concat().chunks(RECORD).map(<[u8]>::to_vec).collect();
    seen.sort();
    all.sort();
    assert_eq!(seen, all);
    fs::write(server.path(1), bytes(7))?;
    let mut changed = Loader::builder(server.open(Options::default())?, plan).build()?;
    let refused = changed.epochs_from(&checkpoint, 1).err().ok_or("resumed with other content")?;
    assert!(matches!(refused, twinbuf::Error::Checkpoint { .. }), "{refused}");
    Ok(())
}
