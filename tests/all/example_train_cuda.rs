//! The main job with the upload stage, as a user runs it: with and without a driver.

use std::path::Path;
use std::process::Output;

/// Runs it with the driver of this folder.
fn train(arguments: &[&str], driver: Option<&Path>) -> Output {
    let mut command = crate::common::example("train_cuda");
    command.args(arguments).envs(driver.map(|folder| ("LD_LIBRARY_PATH", folder))).output().unwrap()
}

#[test]
fn without_a_driver_it_says_so_in_one_line() {
    let output = train(&[], None);
    let stderr = String::from_utf8(output.stderr).unwrap();
    if output.status.success() {
        return; // there is a device here
    }
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(2), b"".as_slice()), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("train_cuda: no CUDA driver found; tried libcuda.so ("), "{stderr}");
}

#[test]
fn with_a_driver_every_run_reads_the_same_batches() {
    let bytes = (0..300 << 10_u32).map(|i: u32| (i.wrapping_mul(i) >> 7).to_le_bytes()[0]);
    let (folder, data) = crate::common::written("data.bin", bytes);
    twinbuf_cuda_sim::install(folder.path()).unwrap();
    let data = data.to_str().unwrap();
    let arguments = ["--data", data, "--batch", "32", "--rounds", "2", "--compute-ms", "0"];
    let output = train(&arguments, Some(folder.path()));
    let (stdout, stderr) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("10 batches of 32 KiB an epoch"), "{stdout}");
    assert!(stdout.ends_with("same batches in every run\n"), "{stdout}");
    assert_eq!(stdout.matches("order ").count(), 4, "{stdout}");

    // A batch that no memory holds. It is as large as the data, so it needs all of it.
    let batch = (1u64 << 54).to_string();
    let output = train(&["--data", data, "--batch", &batch, "--compute-ms", "0"], Some(folder.path()));
    let (stdout, stderr) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{stderr}");
    assert!(stdout.contains("1 batches of"), "{stdout}");

    let output = train(&["--data", data, "--compute-ms=-1"], Some(folder.path()));
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("train_cuda: --compute-ms: wanted 0"));
}
