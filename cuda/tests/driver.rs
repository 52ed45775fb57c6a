//! No driver, a stub, a driver without a device, a library that is no driver: four errors, each in a separate process,
//! because a driver stays loaded.
#![cfg(target_os = "linux")]

use std::ffi::OsString;
use std::process::{Command, Output};

use twinbuf_cuda::{Error, context};
use twinbuf_cuda_sim::{DRIVER_VARIABLE, Installed, Options, Sim};

const CASE: &str = "TWINBUF_TEST_CASE";

/// The child process. A panic aborts it, as with `panic = "abort"`, even if something catches the panic.
#[test]
#[ignore = "started by the other tests"]
fn child() {
    let case = std::env::var(CASE).expect("started by the other tests");
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        std::process::abort();
    }));
    let installed = match case.as_str() {
        "stub" => Some(Installed::Stub),
        "no device" => Some(Installed::NoDevice),
        "a device" => Some(Installed::Device),
        _ => None,
    };
    let _sim = installed.map(|installed| Sim::start(Options { installed, ..Options::default() }));
    for _ in 0..2 {
        match context(0) {
            Ok(_) => println!("found a device"),
            Err(error) => println!("{error:?}\n{error}"),
        }
    }
    println!("and number 7: {:?}", context(7).err());
}

fn run(case: &str, environment: &[(&str, OsString)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child", "--ignored", "--nocapture"]).env(CASE, case).env_remove(DRIVER_VARIABLE);
    child.envs(environment.iter().cloned());
    let Output { status, stdout, stderr } = child.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{case}: {status}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

/// Whether this machine has a driver, which cannot be hidden from the child processes.
fn has_driver() -> bool {
    // SAFETY: the CUDA driver may be loaded at any time.
    ["libcuda.so", "libcuda.so.1"].iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok())
}

#[test]
fn a_device_is_found_and_a_number_beyond_is_an_error() {
    let found = run("a device", &[]);
    assert_eq!(found.matches("found a device").count(), 2, "{found}");
    assert!(
        found.contains(r#"number 7: Some(Option { option: "ordinal", wanted: "0 to 0", found: "7" })"#),
        "{found}"
    );
}

#[test]
fn no_driver_is_an_error_with_the_names_tried() {
    if has_driver() {
        println!("not tested: this machine has a driver");
        return;
    }
    let found = run("no driver", &[]);
    assert!(found.contains("NoDriver"), "{found}");
    // Each includes the system's message.
    assert!(
        found.contains("no CUDA driver found; tried libcuda.so (cannot open shared object file"),
        "{found}"
    );
    assert!(found.contains(", libcuda.so.1 (cannot open shared object file"), "{found}");
}

#[test]
fn a_stub_is_an_error() {
    let found = run("stub", &[]);
    // A driver of the machine, which is found behind the stub, refuses number 7 before cudarc is asked.
    let wanted = if has_driver() { 2 } else { 3 };
    assert!(found.matches(r#"StubDriver { library: "libcuda.so" }"#).count() >= wanted, "{found}");
    assert!(found.contains("found the toolkit's stub"), "{found}");
}

#[test]
fn a_driver_without_a_device_is_an_error() {
    let found = run("no device", &[]);
    assert_eq!(found.matches(r#"NoDevice { library: "libcuda.so" }"#).count(), 3, "{found}");
    assert!(found.contains("found no device"), "{found}");
}

#[test]
fn a_library_that_is_no_driver_is_an_error() {
    let libraries =
        ["/lib/x86_64-linux-gnu/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6", "/lib64/libm.so.6"];
    let Some(library) = libraries.iter().find(|path| std::path::Path::new(path).exists()) else {
        println!("not tested: no library at hand that could stand in for one");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(library, folder.path().join("libcuda.so")).unwrap();
    let found = run("no driver at all", &[("LD_LIBRARY_PATH", folder.path().into())]);
    assert!(found.contains(r#"NotADriver { library: "libcuda.so", function: "cuInit" }"#), "{found}");
}

/// The toolkit's stub is found first, as with a folder of stubs in the path; behind it is a driver.
#[test]
fn a_stub_does_not_end_the_search_and_what_is_loaded_comes_first() {
    let folder = tempfile::tempdir().unwrap();
    // A driver, as far as this crate calls it: each function returns the code.
    let library = |path: &str, name: &str, code: u32| {
        let at = folder.path().join(path);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        let source = folder.path().join("driver.c");
        let functions = ["cuInit", "cuEventElapsedTime", "cuGetErrorName", "cuCtxGetCurrent"];
        let mut body: String =
            functions.iter().map(|function| format!("int {function}() {{ return {code}; }}\n")).collect();
        body += &format!("int cuDeviceGetCount(int *count) {{ *count = 1; return {code}; }}\n");
        std::fs::write(&source, body).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC"]).arg(format!("-Wl,-soname,{name}")).arg("-o").arg(&at).arg(&source);
        cc.status().is_ok_and(|status| status.success()).then_some(at)
    };
    let Some(_stub) = library("stubs/libcuda.so", "libcuda.so.1", 34) else {
        println!("not tested: no C compiler");
        return;
    };
    library("drivers/libcuda.so.1", "libcuda.so.1", 100).unwrap();
    let path = |folders: &[&str]| {
        let folders = folders.iter().map(|name| folder.path().join(name));
        ("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap())
    };
    let behind = run("a driver behind a stub", &[path(&["stubs", "drivers"])]);
    assert!(behind.contains(r#"NoDevice { library: "libcuda.so.1" }"#), "{behind}");
    // cudarc, which loads the first name itself, has the stub: that is said, and nothing panics.
    library("working/libcuda.so.1", "libcuda.so.1", 0).unwrap();
    let working = run("a working driver behind a stub", &[path(&["stubs", "working"])]);
    assert!(working.contains(r#"StubDriver { library: "libcuda.so" }"#), "{working}");
    let alone = run("a stub alone", &[path(&["stubs"])]);
    assert!(alone.contains(r#"StubDriver { library: "libcuda.so" }"#) || has_driver(), "{alone}");
    // A program that is linked to the driver, as with cudarc's feature `dynamic-linking`, and another one in the path.
    library("others/libcuda.so", "libcuda.so", 999).unwrap();
    let preloaded = ("LD_PRELOAD", folder.path().join("drivers/libcuda.so.1").into());
    let loaded = run("a driver that is loaded", &[preloaded, path(&["others"])]);
    assert!(loaded.contains(r#"NoDevice { library: "libcuda.so.1" }"#), "{loaded}");
}

#[test]
fn the_error_without_a_driver_is_a_sentence() {
    let tried =
        vec![("a.so".to_string(), "not there".to_string()), ("b.so".to_string(), "nor there".to_string())];
    assert_eq!(
        Error::NoDriver { tried }.to_string(),
        "no CUDA driver found; tried a.so (not there), b.so (nor there): install the NVIDIA driver, or make it visible to \
         this container"
    );
}
