//! Checkpoint files survive concurrent savers that are killed.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;

use crate::common::forked::{forked, limit_files};
use crate::common::{Reads, folder, in_order, names, nothing};
use twinbuf::{Checkpoint, Error, Loader};

fn checkpoint() -> Checkpoint {
    let mut loader = Loader::builder(Reads(64, 4, nothing), in_order(64, 8)).build().unwrap();
    loader.epoch(0).next().unwrap().unwrap().checkpoint()
}

/// A path in a folder of its own.
fn place() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = folder();
    let path = folder.path().join("checkpoint.json");
    (folder, path)
}

const PATH: &str = "TWINBUF_TEST_CHECKPOINT";
const THREADS: usize = 4;

/// A child process: saves to one path from several threads until it is killed, and reports each save.
#[test]
#[ignore = "started by the other test"]
fn saver() {
    let Some(path) = std::env::var_os(PATH) else { return };
    let checkpoint = checkpoint();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let saved = checkpoint.save(&path);
                    let told = match &saved {
                        Ok(()) => std::io::stderr().write_all(b"."),
                        Err(error) => std::io::stderr().write_all(format!("!{error:?}!").as_bytes()),
                    };
                    if saved.is_err() || told.is_err() {
                        return;
                    }
                }
            });
        }
    });
}

#[test]
fn a_file_that_is_saved_by_many_and_killed_always_loads() {
    let kills: usize = std::env::var("TWINBUF_TEST_KILLS")
        .map_or_else(|_| twinbuf_testing::extent(5, 20), |kills| kills.parse().unwrap());
    let (folder, path) = place();
    let expected = checkpoint();
    let spawn = || -> Child {
        let mut saver = Command::new(std::env::current_exe().unwrap());
        saver.args(["--exact", "checkpoint::saver", "--ignored", "--nocapture"]).env(PATH, &path);
        saver.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for kill in 0..kills {
        let mut children: Vec<Child> = (0..4).map(|_| spawn()).collect();
        // Each child is killed after a different number of saves.
        for (i, child) in children.iter_mut().enumerate() {
            let mut told = vec![0; (kill * 7 + i * 13) % 41 + 1];
            child.stderr.as_mut().unwrap().read_exact(&mut told).unwrap();
            child.kill().unwrap();
            assert!(told.iter().all(|&byte| byte == b'.'), "{}", String::from_utf8_lossy(&told));
        }
        for mut child in children {
            child.wait().unwrap();
        }
        let found = Checkpoint::load_or_start(&path).unwrap_or_else(|error| panic!("kill {kill}: {error:?}"));
        assert_eq!(found, expected, "kill {kill}");
    }
    expected.save(&path).unwrap();
    assert_eq!(
        names(folder.path()),
        ["checkpoint.json"],
        "what the killed ones left is removed by the next save"
    );
}

#[test]
fn a_save_that_fails_leaves_the_file_as_it_was_and_nothing_else() {
    let (folder, path) = place();
    // A file cannot replace a folder of that name.
    std::fs::create_dir(&path).unwrap();
    let error = format!("{:?}", checkpoint().save(&path).unwrap_err());
    assert!(error.contains("checkpoint.json"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    let error = checkpoint().save(folder.path().join("nowhere/checkpoint.json")).unwrap_err();
    assert!(matches!(error, Error::CheckpointFile { .. }), "{error:?}");
    assert!(format!("{error:?}").contains("No such file"), "{error:?}");
    assert!(checkpoint().save("..").is_err());
    // Files in the same folder that are not this file's temporary files stay.
    let others = ["checkpoint.json.tmp", ".other.json.1.twinbuf-tmp", ".checkpoint.json.swp"]
        .map(|name| folder.path().join(name));
    for path in &others {
        std::fs::write(path, "kept").unwrap();
    }
    std::fs::remove_dir(&path).unwrap();
    checkpoint().save(&path).unwrap();
    assert!(others.iter().all(|path| path.exists()));
}

#[test]
fn a_link_to_nothing_is_not_a_start() {
    let (_folder, path) = place();
    std::os::unix::fs::symlink("unmounted/checkpoint.json", &path).unwrap();
    let error = Checkpoint::load_or_start(&path).unwrap_err();
    assert!(matches!(error, Error::CheckpointFile { .. }), "{error:?}");
    checkpoint().save(&path).unwrap();
    assert_eq!(Checkpoint::load_or_start(&path).unwrap(), checkpoint());
}

/// No signal ends the process.
#[test]
fn a_limit_on_the_size_of_files_leaves_the_file_as_it_was() {
    let (folder, path) = place();
    Checkpoint::start().save(&path).unwrap();
    let checkpoint = checkpoint();
    assert!(forked(|| {
        limit_files(100);
        matches!(checkpoint.save(&path), Err(Error::CheckpointFile { .. }))
    }));
    assert_eq!(Checkpoint::load_or_start(&path).unwrap(), Checkpoint::start());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// The path of the working folder need not lead to it.
#[cfg(unix)]
#[test]
fn a_checkpoint_is_saved_where_no_folder_above_may_be_searched() {
    use std::fs::{Permissions, create_dir, set_permissions};
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let above = tempfile::tempdir().unwrap();
    let here = above.path().join("here");
    create_dir(&here).unwrap();
    assert!(forked(|| {
        std::env::set_current_dir(&here).unwrap();
        set_permissions(above.path(), Permissions::from_mode(0o0)).unwrap();
        // Root may search any folder. SAFETY: takes no pointer.
        if unsafe { libc::geteuid() } == 0 {
            chown(".", Some(65534), None).unwrap();
            // SAFETY: takes no pointer.
            assert_eq!(unsafe { libc::setuid(65534) }, 0);
        }
        assert!(here.metadata().is_err());
        Checkpoint::start().save("c.json").is_ok()
    }));
    set_permissions(above.path(), Permissions::from_mode(0o700)).unwrap();
}
