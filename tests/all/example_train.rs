//! The main job as a user runs it: its output, and its messages for invalid input.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::common::folder;

/// Runs the example in this folder with these arguments, which have no spaces.
fn train(folder: &Path, arguments: &str) -> Output {
    crate::common::example("train").args(arguments.split(' ')).current_dir(folder).output().unwrap()
}

fn data(folder: &Path, bytes: usize) {
    // A deterministic text: the model can learn it.
    let line = b"the quick brown fox jumps over the lazy dog; ";
    let bytes: Vec<u8> = line.iter().copied().cycle().take(bytes).collect();
    std::fs::write(folder.join("data.bin"), bytes).unwrap();
}

#[test]
fn the_same_batches_and_loss_in_every_mode_and_at_every_depth() {
    let folder = folder();
    data(folder.path(), 3 << 20);
    let (json, trace) = (folder.path().join("figures.json"), folder.path().join("trace.json"));
    let mut seen = Vec::new();
    for depth in ["2", "3", "4"] {
        let arguments =
            "--data data.bin --batch 128 --rounds 2 --epochs 2 --json figures.json --trace trace.json";
        let output = train(folder.path(), &format!("{arguments} --depth {depth}"));
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        assert!(stdout.contains("same batches and same loss in every run"), "{stdout}");
        assert!(output.stderr.is_empty(), "no progress bar in a pipe");
        let figures: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
        for figure in ["ideal_s", "gain_possible", "gain_reached"] {
            assert!(figures[figure].as_f64().unwrap() > 0.0, "{figure}");
        }
        let runs = figures["runs"].as_array().unwrap();
        let modes: Vec<&str> = runs.iter().map(|run| run["mode"].as_str().unwrap()).collect();
        assert_eq!(modes, ["serial", "double", "double+willneed"].repeat(2));
        for run in runs {
            assert_eq!(run["batches"], 48, "24 batches, 2 epochs");
            assert_eq!(run["io_ops"], 48);
            for time in ["epoch_s", "load_s", "compute_s", "wait_s"] {
                assert!(run[time].as_f64().unwrap() >= 0.0, "{time}");
            }
            seen.push((run["order_hash"].clone(), run["final_loss"].as_f64().unwrap().to_bits()));
        }
        let events: Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
        assert!(events.as_array().unwrap().iter().any(|event| event["name"] == "train"));
    }
    assert_eq!(seen.len(), 18);
    seen.dedup();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(f64::from_bits(seen[0].1) < 5.0, "it has learned something: ln 256 is 5.55");
}

#[test]
fn another_seed_is_another_order() {
    let folder = folder();
    data(folder.path(), 1 << 20);
    let json = folder.path().join("figures.json");
    let hash = |seed: &str| {
        let arguments = "--data data.bin --batch 16 --rounds 1 --mode double --compute-ms 0.1 --json figures.json --trace trace.json";
        let output = train(folder.path(), &format!("{arguments} --seed {seed}"));
        assert!(output.status.success());
        let figures: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(figures["runs"][0]["final_loss"], Value::Null, "a busy loop has no loss");
        assert_eq!(figures["gain_reached"], Value::Null, "nothing to compare with");
        figures["runs"][0]["order_hash"].clone()
    };
    assert_eq!(hash("1"), hash("1"));
    assert_ne!(hash("1"), hash("2"));
}

#[test]
fn bad_input_is_one_clear_line_and_exit_code_2() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("empty"), b"").unwrap();
    std::fs::write(path("short"), vec![0; 5000]).unwrap();
    std::fs::write(path("secret"), vec![0; 5000]).unwrap();
    let mut cases = vec![
        (path("missing"), "missing"),
        (path("empty"), "empty"),
        (path("short"), "wanted at least 4194304 bytes (one batch of 4096 records), found 4096"),
        (folder.path().to_path_buf(), "directory"),
    ];
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path("secret"), std::fs::Permissions::from_mode(0o000)).unwrap();
        if std::fs::File::open(path("secret")).is_err() {
            cases.push((path("secret"), "ermission")); // root may read everything
        }
    }
    for (data, says) in cases {
        let output = train(folder.path(), &format!("--data {}", data.display()));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.contains(says) && stderr.contains(data.to_str().unwrap()), "{stderr}");
    }
    let output = train(folder.path(), "--compute-ms -1");
    assert_eq!(output.status.code(), Some(2));
    let most = u64::MAX;
    for arguments in [format!("--batch {most} --rounds 1"), "--batch 1 --depth 0".to_string()] {
        let output =
            train(folder.path(), &format!("--data short {arguments} --epochs {most} --trace trace.json"));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
    }
}
