//! `twinbuf inspect`: each format, and models of many tensors.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

use super::{has, json, samples, text, twinbuf, with_pages};

#[test]
fn inspect_tells_each_format() {
    let folder = samples();
    let folder = folder.path();
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
        ("model.pt", &["  array       none\n"]),
        ("tokens.bin", &["tokens with llm.c's header", "100 records of one u16, 2 B, together 200 B"]),
        ("data.bin", &["raw, 9.8 KiB", "10000 records of 1 B"]),
        ("data.bin --record-bytes 300", &["33 records of 300 B, together 9.7 KiB; 100 bytes are left over"]),
        ("data.bin --dtype f64", &["1250 records of one f64, 8 B"]),
        ("tokens.bin --record-bytes 1224", &["raw", "1 record of 1224 B"]),
        ("data.bin tokens.bin", &["data.bin\n", "tokens.bin\n", "2 files, 11.0 KiB"]),
    ] {
        has(&text(folder, &format!("inspect {arguments}")), expected);
    }
    let images = folder.join("images.npy");
    let (found, there) = with_pages(&images, || text(folder, "inspect images.npy"));
    has(&found, &[&format!("page cache  {} of 1 pages", there.resident)]);
    let arguments = "inspect --json images.npy two.safetensors";
    let (found, there) = with_pages(&images, || json(folder, arguments));
    assert_eq!(found[0]["format"], "npy");
    assert_eq!(found[0]["arrays"][0]["shape"], serde_json::json!([3, 2]));
    assert_eq!(found[0]["page_cache"], serde_json::json!({ "pages": 1, "resident": there.resident }));
    assert_eq!(found[1]["arrays"][1]["tensor"], "x");
    assert_eq!(found[1]["arrays"][1]["records"], 5);
}

/// A count high enough that a look at the header for each of them would take minutes.
#[test]
fn inspect_tells_all_tensors_of_a_model() {
    const TENSORS: usize = 5000;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let (mut entries, mut lines, mut end) = (Vec::new(), Vec::new(), 0);
    for i in 0..TENSORS {
        let (rows, start) = (2 + i % 7, end);
        end += rows * 12;
        entries.push(format!(
            r#""t{i:04}":{{"dtype":"F32","shape":[{rows},3],"data_offsets":[{start},{end}]}}"#
        ));
        lines.push(format!(
            "  tensor      t{i:04}: {rows} records of f32 [3], 12 B, together {} B",
            rows * 12
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; end]].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    let found = text(folder, "inspect model.safetensors");
    let tensors: Vec<&str> = found.lines().filter(|line| line.starts_with("  tensor")).collect();
    assert_eq!(tensors, lines);
    let Output { stderr, .. } = twinbuf(folder, "probe model.safetensors --batch 1 --compute-ms 0");
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(stderr.ends_with(", t0014, t0015 and 4984 more\n"), "{stderr}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_path_that_is_no_utf_8_is_written_as_json_as_well_as_it_can_be() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join(OsStr::from_bytes(b"a\xffb"));
    let span = r#"{"name":"train","ph":"X","pid":0,"tid":1,"ts":0,"dur":9,"args":{"epoch":0,"step":0}}"#;
    fs::write(&path, span).unwrap();
    for command in ["inspect", "trace"] {
        let program =
            Command::new(env!("CARGO_BIN_EXE_twinbuf")).args([command, "--json"]).arg(&path).output();
        let Output { status, stdout, stderr } = program.unwrap();
        assert!(status.success(), "{command}: {}", String::from_utf8_lossy(&stderr));
        let found: Value = serde_json::from_slice(&stdout).unwrap();
        let named = if command == "inspect" { &found[0]["path"] } else { &found["open_files"][0] };
        assert!(named.as_str().unwrap().ends_with("a\u{fffd}b"), "{found}");
    }
}
