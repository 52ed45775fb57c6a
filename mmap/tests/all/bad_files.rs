//! Files that cannot be used give their own errors, with the fields that say where and why.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use crate::asked::write;
use twinbuf_mmap::{Cut, DType, Error, Plan, Records};

/// These openers refuse `path` in the same way: `check` sees each error.
pub(crate) fn refused_by_all(path: &Path, check: impl Fn(&Error)) {
    type Opener = fn(&Path) -> Result<(), Error>;
    let openers: &[Opener] = &[
        |path| Records::open([path], 1).map(drop),
        |path| Records::open_headerless([path], DType::U8, Cut::Rows).map(drop),
        |path| Records::open_llm_c([path], Cut::Rows).map(drop),
        |path| Records::open_npy([path], Cut::Rows).map(drop),
        #[cfg(feature = "safetensors")]
        |path| Records::open_safetensors([path], "x", Cut::Rows).map(drop),
        #[cfg(feature = "safetensors")]
        |path| Records::open_safetensors_each(path, Cut::Rows).map(drop),
        #[cfg(feature = "safetensors")]
        |path| twinbuf_mmap::Tensors::open([path]).map(drop),
        #[cfg(feature = "npz")]
        |path| Records::open_npz([path], "x", Cut::Rows).map(drop),
    ];
    for &open in openers {
        // In a second thread: opening a FIFO without a writer can wait for ever.
        let (sender, receiver) = std::sync::mpsc::channel();
        let opened = path.to_owned();
        std::thread::spawn(move || sender.send(open(&opened)));
        let result = receiver.recv_timeout(std::time::Duration::from_secs(300)).expect("open must not wait");
        check(&result.expect_err("should be refused"));
    }
}

fn refused(paths: &[&Path], record_bytes: usize) -> Error {
    Records::open(paths, record_bytes).expect_err("should be refused")
}

#[test]
fn what_cannot_be_opened() {
    let folder = tempfile::tempdir().unwrap();
    let files = [("good", 64), ("empty", 0), ("short", 31), ("odd", 70)];
    let [good, empty, short, ragged] = files.map(|(name, len)| write(folder.path(), name, vec![1; len]));
    let missing = folder.path().join("missing");
    let below_a_file = good.join("below");

    type Check = fn(&Error, &Path) -> bool;
    let table: [(&Path, usize, Check, &str); 7] = [
        (&good, 0, |e, _| matches!(e, Error::ZeroRecord), "a record needs at least one byte, found 0"),
        (&missing, 32, |e, at| matches!(e, Error::NotFound { path } if path == at), "no such file"),
        (
            folder.path(),
            32,
            |e, at| matches!(e, Error::NotAFile { path, found: "directory" } if path == at),
            "wanted a regular file, found a directory",
        ),
        (
            &below_a_file,
            32,
            // Windows finds no such path; Unix reports that a part of it is not a folder.
            |e, at| matches!(e, Error::Open { path, .. } | Error::NotFound { path } if path == at),
            if cfg!(windows) { "no such file" } else { "cannot be opened" },
        ),
        (
            &empty,
            32,
            |e, at| matches!(e, Error::TooShort { path, wanted: 32, found: 0 } if path == at),
            "holds no record: wanted at least 32 bytes, found 0",
        ),
        (
            &short,
            32,
            |e, at| matches!(e, Error::TooShort { path, wanted: 32, found: 31 } if path == at),
            "holds no record: wanted at least 32 bytes, found 31",
        ),
        (
            &ragged,
            32,
            |e, at| matches!(e, Error::Ragged { path, offset: 64, wanted: 32, found: 6 } if path == at),
            "the last record or element, at byte 64, is not whole: wanted 32 bytes, found 6: check its size, ",
        ),
    ];
    for (path, record_bytes, check, words) in table {
        // Behind a good file: the path in the error must be the bad one's.
        let error = refused(&[&good, path], record_bytes);
        assert!(check(&error, path), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(words) && !message.contains('\n'), "{message}");
        assert!(record_bytes == 0 || message.starts_with(&format!("{path:?}: ")), "{message}");
    }
    assert!(matches!(refused(&[], 32), Error::NoPaths));
    // `Options::partial` has no effect on numbers without a header.
    let opened = Records::options().partial(true).open_headerless([&ragged], DType::F64, Cut::Rows);
    let error = opened.unwrap_err();
    assert!(matches!(error, Error::Ragged { offset: 64, wanted: 8, found: 6, .. }), "{error:?}");
    assert!(!error.to_string().contains("partial"), "{error}");
}

/// The system lets root read everything; then this test runs itself again as the user `nobody`.
#[cfg(unix)]
#[test]
fn a_file_without_permission() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "secret", [1; 64]);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o000)).unwrap();
    if File::open(&path).is_err() {
        refused_by_all(&path, |error| {
            assert!(matches!(error, Error::PermissionDenied { path: at } if *at == path), "{error:?}");
        });
        return;
    }
    let Some(mut again) = crate::common::this_program() else { return };
    again.args(["--exact", "bad_files::a_file_without_permission"]).uid(65534).gid(65534).current_dir("/");
    // That may be root's alone.
    again.env_remove("TMPDIR");
    match again.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
        }
        Err(error) => {
            eprintln!("not checked: this user may read everything, and `nobody` cannot run: {error}");
        }
    }
}

#[test]
fn missing_folders_and_special_files_are_refused_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    refused_by_all(&missing, |error| {
        assert!(matches!(error, Error::NotFound { path } if *path == missing), "{error:?}");
    });
    let mut others = vec![(folder.path().to_owned(), "directory")];
    #[cfg(unix)]
    let _listener = {
        let [fifo, socket] = ["fifo", "socket"].map(|name| folder.path().join(name));
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        others.extend([(fifo, "FIFO"), (socket, "socket"), ("/dev/null".into(), "device")]);
        listener
    };
    for (path, kind) in others {
        refused_by_all(&path, |error| {
            let Error::NotAFile { path: at, found } = error else { panic!("{error:?}") };
            assert_eq!((at, *found), (&path, kind));
        });
    }
}

/// Every epoch reads the file that was opened; a new open finds the file that is there now.
#[cfg(unix)]
#[test]
fn deleted_or_replaced_between_epochs() {
    let folder = tempfile::tempdir().unwrap();
    let [deleted, replaced] = ["deleted", "replaced"].map(|name| {
        let mut shard = [20_240_520, 1, 100].map(i32::to_le_bytes).concat();
        shard.resize(1024, 0);
        shard.extend((0..100_u16).flat_map(u16::to_le_bytes));
        write(folder.path(), name, shard)
    });
    let open = || Records::open_llm_c([&deleted, &replaced], Cut::sequence(9));
    let records = Arc::new(open().unwrap());
    let plan = Plan::builder(records.len()).batch(records.len()).build().unwrap();
    let epoch = |epoch| {
        let batch = plan.batch(epoch, 0).unwrap();
        let mut bytes = [0; 22 * 10 * 2];
        let (stats, read) = crate::asked::read_and_ask(&records, &batch, &mut bytes);
        assert_eq!((stats.failed, read.unwrap()), (0, bytes.len()));
        bytes.chunks_exact(2).map(|token| u16::from_le_bytes([token[0], token[1]])).collect::<Vec<u16>>()
    };
    let windows = (0..11_u16).flat_map(|window| 9 * window..9 * window + 10);
    let expected: Vec<u16> = windows.clone().chain(windows).collect();
    assert_eq!(epoch(0), expected);

    std::fs::remove_file(&deleted).unwrap();
    let other = write(folder.path(), "other", [7; 50]);
    std::fs::rename(&other, &replaced).unwrap();
    assert_eq!(epoch(1), expected);

    let error = open().unwrap_err();
    assert!(matches!(&error, Error::NotFound { path } if *path == deleted), "{error:?}");
    let error = Records::open_llm_c([&replaced], Cut::Rows).unwrap_err();
    let wanted = format!("{replaced:?}: ends inside its header: wanted at least 1024 bytes, found 50");
    assert_eq!(error.to_string(), wanted);
}
