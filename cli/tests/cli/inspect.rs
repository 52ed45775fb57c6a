//! `twinbuf inspect`: each format, and models of many tensors.

use std::fs;
use std::process::Command;

use serde_json::Value;
use twinbuf_testing::safetensors;

use super::{Run, has, json, samples, span, text, twinbuf, with_pages};

#[test]
fn inspect_tells_each_format() {
    let folder = samples();
    for (arguments, expected) in [
        (
            "images.npy",
            &["npy (an array by numpy), 272 B", "6 records of f32 [3, 2], 24 B, together 144 B"][..],
        ),
        (
            "two.safetensors",
            &[
                "safetensors",
                "x: 5 records of f32 [3], 12 B, together 60 B",
                "s: no records:",
                "at least one axis",
            ],
        ),
        (
            "two.npz",
            &[
                "npz (a zip archive of arrays by numpy), ",
                "  array       x: no records: ",
                "the array is compressed: wanted \"x\" stored",
                "  array       y: 6 records of f32 [3, 2], 24 B, together 144 B",
            ],
        ),
        // A record of a sequence begins in the one before it, and none fits behind the last.
        ("ten.bin --dtype u8 --sequence 3", &["3 records of 4 B, together 12 B\n"]),
        ("ten.bin --dtype u8 --sequence 4", &["2 records of 5 B, together 10 B; left over: 1 byte\n"]),
        ("ten.bin --dtype u16 --sequence 1", &["4 records of u16 [2], 4 B, together 16 B\n"]),
        ("two.safetensors --sequence 2", &["x: 2 records of f32 [3, 3], 36 B, together 72 B"]),
        ("two.safetensors --sequence 5", &["x: no records: "]),
        ("two.npz --sequence 1", &["y: 5 records of f32 [2, 3, 2], 48 B, together 240 B"]),
        (
            "images.npy --sequence 4",
            &["records     1 record of f32 [5, 3, 2], 120 B, together 120 B; left over: 24 bytes\n"],
        ),
        ("images.npy --sequence 1", &["records     5 records of f32 [2, 3, 2], 48 B, together 240 B"]),
        ("model.pt", &["  array       none\n"]),
        ("tokens.bin", &["tokens with llm.c's header", "100 records of one u16, 2 B, together 200 B"]),
        ("data.bin", &["raw, 9.8 KiB", "10000 records of 1 B"]),
        ("data.bin --record-bytes 300", &["33 records of 300 B, together 9.7 KiB; left over: 100 bytes"]),
        ("data.bin --dtype f64", &["1250 records of one f64, 8 B"]),
        ("tokens.bin --record-bytes 1224", &["raw", "1 record of 1224 B"]),
        ("data.bin tokens.bin", &["data.bin\n", "tokens.bin\n", "2 files, 11.0 KiB"]),
    ] {
        has(&text(&folder, &format!("inspect {arguments}")), expected);
    }
    let images = folder.path().join("images.npy");
    let (found, there) = with_pages(&images, || text(&folder, "inspect images.npy"));
    has(&found, &[&format!("page cache  {} of 1 pages", there.resident)]);
    let arguments = "inspect --json images.npy two.safetensors";
    let (found, there) = with_pages(&images, || json(&folder, arguments));
    assert_eq!(found[0]["format"], "npy");
    assert_eq!(found[0]["arrays"][0]["shape"], serde_json::json!([3, 2]));
    assert_eq!(found[0]["page_cache"], serde_json::json!({ "pages": 1, "resident": there.resident }));
    assert_eq!(found[1]["arrays"][1]["tensor"], "x");
    assert_eq!(found[1]["arrays"][1]["records"], 5);
}

/// A limit of the process leaves no room to map the file.
#[test]
#[cfg(target_os = "linux")]
fn the_page_cache_of_a_huge_file_is_unknown_for_a_reason() {
    let folder = samples();
    fs::File::create(folder.path().join("large.bin")).unwrap().set_len(1 << 40).unwrap();
    let run = Command::new("sh")
        .args(["-c", "ulimit -v 1000000 && exec \"$0\" inspect large.bin", env!("CARGO_BIN_EXE_twinbuf")])
        .current_dir(&folder)
        .output();
    let Run { code, stdout, stderr } = run.unwrap().into();
    assert_eq!(code, Some(0), "{stderr}");
    has(&stdout, &["page cache  unknown: ", "mmap failed: ", "(os error 12)"]);
}

/// More bytes together than a `u64` counts. Files in memory may be as long as that needs.
#[test]
#[cfg(target_os = "linux")]
fn the_bytes_of_huge_files_are_added_up() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let path = folder.path().join("huge");
    if fs::File::create(&path).and_then(|file| file.set_len(i64::MAX as u64)).is_ok() {
        has(&text(&folder, "inspect huge huge huge"), &["\n3 files, 16777216.0 TiB\n"]);
    }
}

/// A count high enough that a look at the header for each of them would take minutes.
#[test]
fn inspect_tells_all_tensors_of_a_model() {
    const TENSORS: usize = 5000;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let rows = |i| 2 + i % 7;
    let tensors = (0..TENSORS).map(|i| (format!("t{i:04}"), "F32", [rows(i), 3], rows(i) * 12));
    let file = safetensors(tensors, std::iter::repeat(0));
    fs::write(folder.path().join("model.safetensors"), file).unwrap();
    let found = text(&folder, "inspect model.safetensors");
    let lines = found.lines().filter(|line| line.starts_with("  tensor"));
    assert_eq!(lines.clone().count(), TENSORS);
    for (i, line) in lines.enumerate() {
        let (rows, bytes) = (rows(i), rows(i) * 12);
        assert_eq!(
            line,
            format!("  tensor      t{i:04}: {rows} records of f32 [3], 12 B, together {bytes} B")
        );
    }
    let Run { stderr, .. } = twinbuf(&folder, "probe model.safetensors --batch 1 --compute-ms 0");
    assert!(stderr.ends_with(", t0014, t0015 and 4984 more\n"), "{stderr}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_path_that_is_no_utf_8_is_written_as_json_as_well_as_it_can_be() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join(OsStr::from_bytes(b"a\xffb"));
    fs::write(&path, span("train", [0, 1], [0, 9], [0, 0])).unwrap();
    for command in ["inspect", "trace"] {
        let program =
            Command::new(env!("CARGO_BIN_EXE_twinbuf")).args([command, "--json"]).arg(&path).output();
        let Run { code, stdout, stderr } = program.unwrap().into();
        assert_eq!(code, Some(0), "{command}: {stderr}");
        let found: Value = serde_json::from_str(&stdout).unwrap();
        let named = if command == "inspect" { &found[0]["path"] } else { &found["open_files"][0] };
        assert!(named.as_str().unwrap().ends_with("a\u{fffd}b"), "{found}");
    }
}
