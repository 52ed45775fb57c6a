//! Records of objects in memory: the bytes, the requests, what is refused.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use twinbuf::mmap::{self, Cut};
use twinbuf::{BatchIndices, BoxError, Dataset, LastBatch, Loader, Plan, Records, Shuffle};
use twinbuf_object_store::{Error, Kind, Objects, Options};

/// Bytes that tell where they are.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

/// An array of 16-bit numbers as numpy saves it.
fn npy(rows: usize, columns: usize, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '<u2', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let mut file = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    file.extend(format!("{header:117}\n").bytes());
    file.extend(data);
    file
}

fn put(store: &Arc<InMemory>, path: &str, data: Vec<u8>) -> Result<(), BoxError> {
    pollster::block_on(store.put(&Path::parse(path)?, data.into()))?;
    Ok(())
}

fn options(store: &Arc<InMemory>) -> Options {
    Options { store: Some(store.clone()), ..Options::default() }
}

/// Three objects of 40, 25 and 60 records of 100 bytes, each after 16 others.
fn three() -> Result<(Arc<InMemory>, Objects), BoxError> {
    let store = Arc::new(InMemory::new());
    for (index, records) in [(0, 40), (1, 25), (2, 60)] {
        put(&store, &format!("train/{index}.bin"), bytes(index, 16 + records * 100))?;
    }
    let objects = open(options(&store))?;
    Ok((store, objects))
}

/// The same objects with other options.
fn open(options: Options) -> Result<Objects, Error> {
    Objects::open("memory:///train/", options, |files| Records::options().header(16).open(files, 100))
}

fn batch(plan: Plan) -> Result<BatchIndices, BoxError> {
    Ok(plan.batch(0, 0).ok_or("no batch")?)
}

/// Reads records in this order with these options; returns the requests and the bytes received.
fn read(options: Options, list: Vec<u64>) -> Result<(u64, u64), BoxError> {
    let mut objects = Objects::open("memory:///train/", options, |files| Records::open(files, 100))?;
    let plan =
        Plan::builder(list.len() as u64).batch(list.len() as u64).build()?.with_records(list.clone())?;
    let mut out = vec![0; list.len() * 100];
    Dataset::read(&mut objects, &batch(plan)?, &mut out)?;
    let wanted: Vec<u8> =
        list.iter().flat_map(|&record| bytes(0, 12500)[record as usize * 100..][..100].to_vec()).collect();
    assert_eq!(out, wanted);
    let stats = objects.stats();
    assert_eq!(stats.used, out.len() as u64);
    Ok((stats.requests, stats.bytes))
}

/// The same batches as from files, in several orders, with one worker and four, at both of two ranks.
#[test]
fn batches_are_those_of_files() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let paths: Vec<PathBuf> = (0..3).map(|index| folder.path().join(index.to_string())).collect();
    let store = Arc::new(InMemory::new());
    for (index, path) in (0..).zip(&paths) {
        let file = npy(30 + index, 50, &bytes(index as u64, (30 + index) * 100));
        fs::write(path, &file)?;
        put(&store, &format!("a b/{index}.npy"), file)?;
    }
    for cut in [Cut::Rows, Cut::Windows { rows: 3, stride: 2 }, Cut::Windows { rows: 2, stride: 5 }] {
        let files = Arc::new(Records::open_npy(&paths, cut)?);
        let open = |files: &[PathBuf]| Records::open_npy(files, cut);
        let objects = Objects::open(
            "memory:///a%20b/",
            Options { header_bytes: 128, gap: 150, request_bytes: 700, ..options(&store) },
            open,
        )?;
        assert_eq!((objects.len(), objects.element()), (files.len(), Dataset::element(&files)));
        let window = |(chunk_records, window_chunks)| Shuffle::Window { chunk_records, window_chunks };
        let windows = [(5, 3), (1, 4), (40, 2), (7, 100)].map(window);
        for shuffle in [Shuffle::None, Shuffle::Full].into_iter().chain(windows) {
            for (rank, workers) in [(0, 1), (1, 4)] {
                let plan = Plan::builder(files.len()).batch(7).shuffle(shuffle).rank(rank, 2);
                let plan = plan.last_batch(LastBatch::Wrap).build()?;
                let mut wanted = Loader::builder(files.clone(), plan.clone()).build()?;
                let mut found = Loader::builder(objects.clone(), plan).workers(workers).build()?;
                for (found, wanted) in found.epochs(0..2).zip(wanted.epochs(0..2)) {
                    assert_eq!(found?[..], wanted?[..], "{cut:?} {shuffle:?} {workers}");
                }
            }
        }
    }
    Ok(())
}

/// Neighbours are one request, also over a gap; another object, a far record and a large batch are more.
#[test]
fn requests_are_merged() -> Result<(), BoxError> {
    let store = Arc::new(InMemory::new());
    let all = bytes(0, 12500);
    put(&store, "train/a", all[..5000].to_vec())?;
    put(&store, "train/b", all[5000..].to_vec())?;
    for (list, gap, request_bytes, requests, wanted) in [
        ((0..125).collect(), 0, 8192, 16, (2, 12500)),
        ((40..60).rev().collect(), 0, 8192, 16, (2, 2000)),
        ((0..125).collect(), 0, 1000, 16, (13, 12500)),
        ((0..125).collect(), 0, 10, 1, (125, 12500)),
        ((0..125).collect(), 0, 10, usize::MAX, (125, 12500)),
        (vec![0, 2, 3, 9], 99, 8192, 16, (3, 400)),
        (vec![0, 2, 3, 9], 100, 8192, 16, (2, 500)),
        (vec![9, 3, 2, 0], 1000, 8192, 0, (1, 1000)),
        (vec![7, 8, 7, 7], 0, 1, 16, (2, 200)),
    ] {
        let found = read(Options { gap, request_bytes, requests, ..options(&store) }, list)?;
        assert_eq!(found, wanted, "{gap} {request_bytes}");
    }
    Ok(())
}

/// All ranks and workers together request the chunks of a window once, whole or in parts, and keep them for one epoch.
#[test]
fn chunks_of_a_window_are_requested_once() -> Result<(), BoxError> {
    let (store, _) = three()?;
    let shuffle = Shuffle::Window { chunk_records: 10, window_chunks: 4 };
    // A chunk with the end of an object, or of all records, is two requests; so is one of two ranks. The epoch's last batch, of
    // one rank, has records of its own.
    for (workers, ranks, request_bytes, most) in
        [(1, 1, 1000, 16), (4, 1, 1000, 16), (2, 2, 1000, 23), (1, 1, 300, 56)]
    {
        let (mut requests, mut bytes) = (0, 0);
        for rank in 0..ranks {
            let objects = open(Options { request_bytes, gap: 0, ..options(&store) })?;
            let plan = Plan::builder(125).batch(5).shuffle(shuffle).rank(rank, ranks);
            let plan = plan.last_batch(LastBatch::Keep).build()?;
            let mut loader = Loader::builder(objects.clone(), plan).workers(workers).build()?;
            for batch in loader.epoch(0) {
                batch?;
            }
            requests += objects.stats().requests;
            bytes += objects.stats().bytes;
        }
        assert_eq!(bytes, 12500, "{workers} {ranks} {request_bytes}");
        assert!((13..=most).contains(&requests), "{requests}: {workers} {ranks} {request_bytes}");
    }
    Ok(())
}

/// Also those of windows with gaps between them, which a chunk has too.
#[test]
fn chunks_with_gaps_are_requested_once() -> Result<(), BoxError> {
    let store = Arc::new(InMemory::new());
    put(&store, "train/a.npy", npy(2000, 50, &bytes(0, 200_000)))?;
    let cut = Cut::Windows { rows: 2, stride: 20 };
    let objects = Objects::open("memory:///train/", options(&store), |files| Records::open_npy(files, cut))?;
    let shuffle = Shuffle::Window { chunk_records: 5, window_chunks: 10 };
    let plan = Plan::builder(objects.len()).batch(5).shuffle(shuffle).build()?;
    let mut loader = Loader::builder(objects.clone(), plan).build()?;
    for batch in loader.epoch(0) {
        batch?;
    }
    // The chunks of an epoch do not begin with the first record.
    assert_eq!((objects.len(), objects.stats().requests), (100, 21));
    Ok(())
}

/// Objects with other bytes of the same size, with fewer, and removed ones.
#[test]
fn changes_are_errors() -> Result<(), BoxError> {
    for len in [6016, 1000, 500, 0] {
        let (store, objects) = three()?;
        let plan = Plan::builder(objects.len()).batch(5).build()?;
        let mut loader = Loader::builder(objects, plan).depth(2).build()?;
        let mut epochs = loader.epoch(0);
        assert_eq!(epochs.next().ok_or("no batch")??[..], bytes(0, 516)[16..]);
        match len {
            0 => pollster::block_on(store.delete(&Path::from("train/2.bin")))?,
            len => put(&store, "train/2.bin", bytes(9, len))?,
        }
        let error = epochs.find_map(Result::err).ok_or("no error")?;
        assert!(epochs.next().is_none());
        let text = format!("{error:?}");
        let start = "epoch 0, step 13: the batch could not be read: memory:///train/2.bin, bytes 16..516: ";
        let reason = text.strip_prefix(start).ok_or_else(|| text.clone())?;
        let wanted = if len == 0 { "removed while open" } else { "changed while open: wanted" };
        assert!(reason.starts_with(wanted), "{text}");
        let twinbuf::Error::Load { source, .. } = error else { return Err(text.into()) };
        assert_eq!(source.downcast::<Error>()?.range, 16..516);
    }
    Ok(())
}

#[test]
fn openings_fail_with_the_url() -> Result<(), BoxError> {
    let (store, mut objects) = three()?;
    assert_eq!(objects.name(), "3 objects of memory:///");
    assert_eq!(objects.locator().ok_or("none")?(65), Some(("memory:///train/2.bin".into(), 16)));
    assert_ne!(objects.fingerprint()?, 0);
    let text = |url: &str, names: &[&str], open: &dyn Fn(&[PathBuf]) -> Result<Records, mmap::Error>| {
        let names = names.iter().map(ToString::to_string).collect();
        match Objects::open(url, Options { names, ..options(&store) }, |files| open(files)) {
            Ok(objects) => format!("{} records", objects.len()),
            Err(error) => format!("{error}: {}", error.kind),
        }
    };
    let npy = |files: &[PathBuf]| Records::open_npy(files, Cut::Rows);
    let raw = |files: &[PathBuf]| Records::open(files, 2516);
    assert_eq!(text("memory:///train/1.bin", &[], &raw), "1 records");
    assert_eq!(text("memory:///train/", &["1.bin", "1.bin"], &raw), "2 records");
    // Objects of a single record are read as any other, also with requests of any length.
    let names = vec!["1.bin".into(); 2];
    let two = Options { names, request_bytes: u64::MAX, ..options(&store) };
    let two = Objects::open("memory:///train/", two, raw)?;
    for shuffle in [Shuffle::Full, Shuffle::Window { chunk_records: 1, window_chunks: 2 }] {
        let mut loader = Loader::builder(two.clone(), Plan::builder(2).shuffle(shuffle).build()?).build()?;
        for batch in loader.epoch(0) {
            assert_eq!(batch?[..], bytes(1, 2516));
        }
    }
    let header = text("memory:///train/", &[], &npy);
    let wanted = "memory:///train/: \"memory:///train/0.bin\": another format, by the magic at byte 0";
    assert!(header.starts_with(wanted), "{header}");
    assert_eq!(text("memory:///test/", &[], &raw), "memory:///test/: wanted at least one object, found none");
    assert_eq!(text("memory:///train/x", &[], &raw), "memory:///train/x: the objects could not be opened");
    assert_eq!(text("train", &[], &raw), "train: the objects could not be opened");
    // A scheme without a store, and no URL: an `@` is a part of its path.
    for url in ["gopher://a/b", "s3://my bucket/a@b"] {
        let error = Objects::open(url, Options::default(), raw).err().ok_or("opened")?;
        assert_eq!(format!("{error}: {}", error.kind), format!("{url}: the objects could not be opened"));
    }
    Ok(())
}

/// An object with such a name is found by its URL and by the name that the store lists, in memory and in files. Its URL in
/// errors opens it.
#[test]
fn names_with_special_characters() -> Result<(), BoxError> {
    let names = ["a#b", "a%23b", "c[0]", "%41", "é", "~", "*", "?", "{}", "|", "\"", "\\", "x y"];
    let encoded = [
        "a%23b", "a%2523b", "c[0]", "%2541", "%C3%A9", "~", "*", "%3F", "%7B%7D", "|", "%22", "%5C", "x%20y",
    ];
    let folder = tempfile::Builder::new().prefix("é [1]%20").tempdir()?;
    let store = Arc::new(InMemory::new());
    for (index, name) in (0..).zip(names) {
        put(&store, &format!("d é/{name}"), vec![index; 8])?;
        put(&store, name, vec![index; 8])?;
        fs::write(folder.path().join(name), [index; 8])?;
    }
    let url = url::Url::from_directory_path(folder.path()).map_err(|()| "no URL")?;
    let open = |url: &str, names: Vec<String>, in_memory: bool| {
        let store = if in_memory { options(&store) } else { Options::default() };
        Objects::open(url, Options { names, ..store }, |files| Records::open(files, 8))
    };
    for (base, in_memory) in [("memory:///d%20%C3%A9/", true), ("memory:///", true), (url.as_str(), false)] {
        let wanted: Vec<u8> = (0..13).flat_map(|index| [index; 8]).collect();
        let listed = open(base, names.map(String::from).into(), in_memory)?;
        let found: Vec<Objects> = encoded
            .map(|name| open(&format!("{base}{name}"), Vec::new(), in_memory))
            .into_iter()
            .collect::<Result<_, _>>()?;
        let bytes = |objects: &Objects| {
            let mut out = vec![0; 8 * usize::try_from(objects.len())?];
            let plan = Plan::builder(objects.len()).batch(objects.len()).build()?;
            Dataset::read(&mut objects.clone(), &batch(plan)?, &mut out)?;
            Ok::<_, BoxError>(out)
        };
        assert_eq!(bytes(&listed)?, wanted, "{base}");
        assert_eq!(found.iter().map(bytes).collect::<Result<Vec<_>, _>>()?.concat(), wanted, "{base}");
        for (index, one) in (0..).zip(&found) {
            let place = |objects: &Objects, record| {
                let (url, offset) = objects.locator().and_then(|locator| locator(record)).ok_or("none")?;
                assert_eq!(offset, 0);
                Ok::<_, BoxError>(url.display().to_string())
            };
            let url = place(one, 0)?;
            assert_eq!(url, place(&listed, index)?);
            assert_eq!(bytes(&open(&url, Vec::new(), in_memory)?)?, [index as u8; 8], "{url}");
            assert_eq!(one.name(), listed.name().replace("13 objects", "1 objects"));
        }
    }
    assert_eq!(open("memory:///d%20%C3%A9/%C3%A9", Vec::new(), true)?.name(), "1 objects of memory:///");
    for name in ["..", "a//b"] {
        let error = open("memory:///d/", vec![name.into()], true).err().ok_or("opened")?;
        assert!(matches!(error.kind, Kind::Open(_)), "{error:?}");
    }
    let error =
        Objects::open("memory:///d%20%C3%A9/", options(&store), |files| Records::open_npy(files, Cut::Rows));
    let text = error.err().ok_or("opened")?.kind.to_string();
    assert!(text.starts_with("\"memory:///d%20%C3%A9/%22\": "), "{text}");
    Ok(())
}

/// The files have the names of the objects, with their folders, and sort as they are listed: one object's name may be another
/// one's folder, and names may be too long for files.
#[test]
fn files_are_named_and_sorted_as_the_objects() -> Result<(), BoxError> {
    let store = Arc::new(InMemory::new());
    let long = "é".repeat(200);
    let mut names = vec!["x/a".into(), "x/a/b".into(), "x/b/b".into(), format!("x/{long}/{long}.bin")];
    names.extend((0..8).map(|index| format!("x/{}/b", 7 - index)));
    names.extend(["x/0/b", "x/0/c/d"].map(String::from));
    for (index, name) in (0..).zip(&names) {
        put(&store, name, vec![index; 8])?;
    }
    let names: Vec<String> = names.into_iter().map(|name| name[2..].into()).collect();
    let open = |files: &[PathBuf]| {
        assert!(files.is_sorted(), "{files:?}");
        for (file, name) in files.iter().zip(&names) {
            assert!(file.ends_with(format!("x/{name}")) || name.contains(&long), "{file:?}");
        }
        let parts: Vec<_> = files[3].iter().rev().take(2).map(|part| part.to_str().unwrap_or("")).collect();
        assert!(long.ends_with(parts[1]) && format!("{long}.bin").ends_with(parts[0]), "{parts:?}");
        let valid = files.iter().filter(|file| file.parent().is_some_and(|folder| folder.ends_with("x/b")));
        assert_eq!(valid.count(), 1);
        // A folder is made once, unless the order or a file is in its way.
        let [.., first, again, deep] = files else { unreachable!() };
        assert!(first.parent() != again.parent() && again.parent() == deep.ancestors().nth(2), "{files:?}");
        Records::open(files, 8)
    };
    let options = Options { names: names.clone(), ..options(&store) };
    assert_eq!(Objects::open("memory:///x/", options, open)?.len(), 14);
    Ok(())
}

/// As an empty file: no range of it can be requested.
#[test]
fn an_empty_object_with_a_name_has_no_record() -> Result<(), BoxError> {
    let (store, _) = three()?;
    put(&store, "train/empty", Vec::new())?;
    let open = |names: &[&str], skip| {
        let names = names.iter().map(ToString::to_string).collect();
        let open = |files: &[PathBuf]| Records::options().skip_short(skip).open(files, 4);
        Objects::open("memory:///train/", Options { names, ..options(&store) }, open)
    };
    assert_eq!(open(&["0.bin", "empty", "1.bin"], true)?.len(), 1004 + 629);
    let error = open(&["0.bin", "empty"], false).err().ok_or("opened")?;
    let wanted = "\"memory:///train/empty\": holds no record: wanted at least 4 bytes, found 0";
    assert!(error.kind.to_string().starts_with(wanted), "{}", error.kind);
    assert!(matches!(error.kind, Kind::Format(..)));
    Ok(())
}

/// Its records would be counted, but no object has them.
#[test]
fn a_file_of_the_openers_own_is_refused() -> Result<(), BoxError> {
    let (store, _) = three()?;
    let folder = tempfile::tempdir()?;
    let own = folder.path().join("own");
    fs::write(&own, [0; 216])?;
    for (at, whole) in [(0, true), (1, true), (3, true), (0, false)] {
        let open = |files: &[PathBuf]| {
            let mut files = if whole { files.to_vec() } else { Vec::new() };
            files.insert(at, own.clone());
            Records::options().header(16).open(files, 100)
        };
        let error = Objects::open("memory:///train/", options(&store), open).err().ok_or("opened")?;
        let Kind::Open(source) = error.kind else { return Err(error.into()) };
        assert_eq!(source.to_string(), format!("{own:?}: not an object's file"));
    }
    Ok(())
}

/// Where files may not be as large as an object: no signal ends the process. Where no thread can start: no panic, and no thread
/// is waited for that did not start.
#[test]
#[cfg(target_os = "linux")]
fn what_the_system_refuses_is_an_error() -> Result<(), BoxError> {
    if std::env::var_os("REFUSED").is_some() {
        let error = three().err().ok_or("opened")?.downcast::<Error>()?;
        assert!(matches!(error.kind, Kind::Open(_)), "{error}: {}", error.kind);
        return Ok(());
    }
    // The largest object has 6016 bytes; a block has 512 or 1024. No machine has as much memory for a stack; the test then runs
    // on the main thread.
    for limit in ["ulimit -f 5", "export RUST_MIN_STACK=1000000000000000"] {
        let child = std::process::Command::new("sh")
            .args(["-c", &format!("{limit} && exec \"$0\" --exact what_the_system_refuses_is_an_error")])
            .arg(std::env::current_exe()?)
            .env("REFUSED", "")
            .output()?;
        assert!(child.status.success(), "{limit}: {child:?}");
    }
    Ok(())
}

/// The threads of the requests stay in the parent. A forked process is told so, and reads what it opens itself.
#[test]
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "no safe function forks")]
fn a_forked_process_does_not_wait_for_its_parents_threads() -> Result<(), BoxError> {
    unsafe extern "C" {
        safe fn fork() -> i32;
        safe fn alarm(seconds: u32) -> u32;
        safe fn _exit(code: i32) -> !;
        fn waitpid(child: i32, status: *mut i32, options: i32) -> i32;
    }
    if std::env::var_os("ALONE").is_none() {
        // No other test may hold a lock at the fork.
        let mut child = std::process::Command::new(std::env::current_exe()?);
        let name = "a_forked_process_does_not_wait_for_its_parents_threads";
        let child = child.args(["--exact", name]).env("ALONE", "").output()?;
        assert!(child.status.success(), "{child:?}");
        return Ok(());
    }
    let (store, mut objects) = three()?;
    let (plan, mut out) = (Plan::builder(125).build()?, [0; 100]);
    let one = batch(plan.clone())?;
    assert_eq!(Dataset::read(&mut objects, &one, &mut out)?, 100);
    let child = fork();
    if child == 0 {
        let reads = || {
            let mut found = Vec::new();
            for overlap in [false, true] {
                let mut loader = Loader::builder(objects.clone(), plan.clone()).overlap(overlap).build()?;
                found.extend(loader.epoch(0).next());
            }
            drop(objects);
            Dataset::read(&mut open(options(&store))?, &one, &mut out)?;
            let found =
                found.into_iter().filter_map(Result::err).map(typed).collect::<Result<Vec<_>, _>>()?;
            Ok::<_, BoxError>(
                found.len() == 2 && found.iter().all(|error| matches!(error.kind, Kind::Runtime)),
            )
        };
        // Ends a wait without end.
        alarm(60);
        _exit(if matches!(reads(), Ok(true)) { 0 } else { 1 })
    }
    let mut status = 0;
    // SAFETY: the kernel writes to `status`, a live local.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(Dataset::read(&mut objects, &one, &mut out)?, 100);
    Ok(())
}

fn typed(error: twinbuf::Error) -> Result<Error, BoxError> {
    match error {
        twinbuf::Error::Load { source, .. } => Ok(*source.downcast()?),
        error => Err(error.into()),
    }
}

/// In an asynchronous context, without threads of the loader's; on a runtime of the caller's, also after its end.
#[test]
fn runtimes() -> Result<(), BoxError> {
    let runtime = tokio::runtime::Runtime::new()?;
    // A task of tokio must yield after 128 answers. These openings, and then these requests, are more: they hung.
    let handle = runtime.handle().clone();
    let read = move || {
        let (store, mut objects) = three()?;
        for _ in 0..130 {
            objects = open(Options { runtime: Some(handle.clone()), ..options(&store) })?;
        }
        let mut loader = Loader::builder(objects, Plan::builder(125).build()?).overlap(false).build()?;
        for batch in loader.epochs(0..2) {
            batch?;
        }
        Ok::<_, BoxError>(())
    };
    let tasks = tokio::runtime::Runtime::new()?;
    tasks.block_on(async { read() })?;
    tasks.block_on(tasks.spawn(async move { read() }))??;
    let (store, _) = three()?;
    let options = Options { runtime: Some(runtime.handle().clone()), ..options(&store) };
    let mut objects = open(options)?;
    let (one, mut out) = (batch(Plan::builder(125).build()?)?, [0; 100]);
    assert_eq!(Dataset::read(&mut objects, &one, &mut out)?, 100);
    drop(runtime);
    let error = Dataset::read(&mut objects, &one, &mut out).err().ok_or("read without a runtime")?;
    assert!(matches!(error.downcast::<Error>()?.kind, Kind::Runtime));
    Ok(())
}
