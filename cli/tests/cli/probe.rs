//! `twinbuf probe`: what it measures, and the lines that it proposes.

use std::fs;

use serde_json::Value;
use twinbuf::Records;

use super::{Run, has, json, samples, text, twinbuf, with_pages};

/// Returns the first run, of several, whose loads were all short compared with 5 ms of compute. Other programs on the
/// machine may make them longer.
fn quiet<T>(run: impl Fn() -> T, longest_load_ms: impl Fn(&T) -> f64) -> Option<T> {
    let found = (0..20).map(|_| run()).find(|found| longest_load_ms(found) < 1.0);
    if found.is_none() {
        eprintln!("not checked: a machine that is never quiet for as long as a load takes");
    }
    found
}

#[test]
fn probe_measures_and_says_what_it_measured() {
    let folder = samples();
    let arguments = "probe data.bin --record-bytes 100 --batch 10 --compute-ms 5";
    let run = || text(&folder, &format!("{arguments} --steps 4"));
    let (found, there) = with_pages(&folder.path().join("data.bin"), run);
    has(
        &found,
        &[
            "100 records of 100 B; 4 batches of 10 records (1000 B) measured, of 10 an epoch, in 3 rounds\n",
            "compute ",
            "\nepoch  ",
            "\nfirst  ",
            "\nlater  ",
            "\n    let mut loader = Loader::builder(data, plan)",
        ],
    );
    let cached = "WARNING: 100 % was in the page cache: the disk was not measured; --cold drops it first\n";
    assert_eq!(found.contains(cached), there.resident == there.pages, "{there:?}: {found}");
    for order in ["sequential", "chunks:20", "window:10,3", "full"] {
        let run = || json(&folder, &format!("{arguments} --json --rounds 2 --order {order}"));
        let found = run();
        assert_eq!((&found["steps"], &found["rounds"]), (&10.into(), &2.into()), "all there are: {found}");
        assert!(found["compute_s"].as_f64().unwrap() >= 0.005, "{found}");
        for epoch in ["first", "second"] {
            let [wall, wait] = ["wall_s", "wait_s"].map(|figure| found[epoch][figure].as_f64().unwrap());
            assert!(wall >= 0.05 && wait < wall, "{found}");
        }
        let longest_load = |found: &Value| found["second"]["load_s"].as_f64().unwrap() * 1e3;
        if let Some(found) = quiet(run, longest_load) {
            assert_eq!(found["second"]["verdict"], "ComputeBound", "{found}");
        }
    }
    // Files whose header describes the records, and sequences of tokens.
    for arguments in [
        "images.npy",
        "tokens.bin --sequence 9",
        "data.bin --dtype u16 --sequence 100",
        "two.safetensors --tensor x",
        "data.bin --dtype u16",
    ] {
        has(&text(&folder, &format!("probe --compute-ms 0 --batch 2 {arguments}")), &["\nlater  "]);
    }
}

#[test]
fn probe_prints_the_lines_of_a_program() {
    let folder = samples();
    let arguments = "probe --compute-ms 1 --batch 2 tokens.bin --sequence 9 --order window:4,2";
    let found = text(&folder, arguments);
    has(
        &found,
        &[
            // 100 tokens: sequences of 10, one every 9.
            "11 records of 20 B; ",
            "\n    let data = Records::",
            "open_llm_c([\"tokens.bin\"], Cut::sequence(9))?;\n",
            "\n    let plan = Plan::builder(data.len()).batch(2)\
             .shuffle(Shuffle::Window { chunk_records: 4, window_chunks: 2 }).seed(42).build()?;\n",
            "\n    let mut loader = Loader::builder(data, plan)",
        ],
    );
    let found = json(&folder, "probe images.npy --compute-ms 0 --batch 2 --json");
    has(
        found["lines"][0].as_str().unwrap(),
        &["let data = Records::", "open_npy([\"images.npy\"], Cut::Rows)?"],
    );
}

/// With `--html *.bin` the shell names a file of data as the page.
#[test]
fn a_page_replaces_a_page_and_nothing_else() {
    let folder = samples();
    let arguments = "probe data.bin --record-bytes 100 --batch 10 --compute-ms 0 --rounds 1";
    let probe = |page| twinbuf(&folder, &format!("{arguments} --html {page}"));
    let before = fs::read(folder.path().join("data.bin")).unwrap();
    has(&probe("data.bin").stderr, &["data.bin: wanted a page to write over"]);
    assert_eq!(fs::read(folder.path().join("data.bin")).unwrap(), before);
    let out = folder.path().join("page.html");
    for there in [None, Some(""), Some("<!DOCTYPE html>\n<p>an older page")] {
        there.into_iter().for_each(|there| fs::write(&out, there).unwrap());
        assert_eq!(probe("page.html").code, Some(0));
        let page = fs::read_to_string(&out).unwrap();
        assert!(page.ends_with("</html>\n"), "in place of {there:?}");
        assert!(page.matches("<title>train").count() > 10, "{page}");
    }
    has(&probe("no/such/folder.html").stderr, &["no/such/folder.html: "]);
    // Before anything is measured: records of 1 TiB would be an error then.
    fs::File::create(folder.path().join("large.bin")).unwrap().set_len(1 << 40).unwrap();
    let large = "probe large.bin --record-bytes 1099511627776 --batch 1 --compute-ms 0 --html";
    has(&twinbuf(&folder, &format!("{large} page.html")).stderr, &["option `depth`"]);
    for page in ["data.bin", "no/page.html", ".", "page/", "page/."] {
        has(&twinbuf(&folder, &format!("{large} {page}")).stderr, &[&format!("twinbuf: {page}: ")]);
    }
}

/// No signal ends the program.
#[test]
#[cfg(unix)]
fn a_limit_on_the_size_of_files_leaves_the_page() {
    let folder = samples();
    let page = "<!DOCTYPE html>\n<p>an older page";
    fs::write(folder.path().join("page.html"), page).unwrap();
    let arguments = "data.bin --record-bytes 100 --batch 10 --compute-ms 0 --rounds 1 --html";
    let limited = |page| {
        let limited = format!("ulimit -f 1 && exec \"$0\" probe {arguments} {page}");
        let run = std::process::Command::new("sh")
            .args(["-c", &limited, env!("CARGO_BIN_EXE_twinbuf")])
            .current_dir(&folder)
            .output();
        Run::from(run.unwrap())
    };
    let Run { code, stderr, .. } = limited("page.html");
    assert_eq!(code, Some(2), "{stderr}");
    has(&stderr, &["page.html: File too large"]);
    assert_eq!(fs::read_to_string(folder.path().join("page.html")).unwrap(), page);
    // A pipe has no size.
    let Run { code, stdout, stderr } = limited("/dev/stdout");
    assert_eq!((code, stdout.contains("</html>")), (Some(0), true), "{stderr}");
}

#[test]
#[cfg(target_os = "linux")]
fn probe_evicts_if_it_is_told_to() {
    let folder = samples();
    let arguments = "probe data.bin --record-bytes 100 --batch 10 --compute-ms 0 --cold";
    // A file system in memory keeps every page, and `probe` then prints a warning.
    let file = folder.path().join("data.bin");
    let records = Records::open([&file], 100).unwrap();
    records.evict().unwrap();
    let expected = match records.residency().unwrap().resident {
        0 => "first from a cold page cache",
        _ => "WARNING: 100 % could not be dropped",
    };
    drop(records);
    assert_eq!(fs::read(&file).unwrap().len(), 10_000, "in the cache again");
    has(&text(&folder, arguments), &[expected]);
}

/// The loader reads files that are larger than the memory past the page cache.
#[test]
#[cfg(target_os = "linux")]
fn probe_says_that_files_larger_than_the_memory_are_read_past_the_page_cache() {
    let folder = samples();
    // Sparse: it takes no space.
    fs::File::create(folder.path().join("large.bin")).unwrap().set_len(1 << 40).unwrap();
    let arguments = "probe large.bin --record-bytes 4096 --batch 10 --compute-ms 0 --steps 4 --rounds 1";
    has(&text(&folder, arguments), &["past the page cache\n"]);
}

#[test]
#[cfg(target_os = "linux")]
fn probe_reads_past_the_page_cache_if_it_is_told_to() {
    let folder = samples();
    let arguments = "probe data.bin --record-bytes 100 --batch 10 --compute-ms 0 --direct";
    // Not every file system has direct I/O. `probe` then prints an error.
    let Run { code, stdout, stderr } = twinbuf(&folder, arguments);
    if code == Some(0) {
        has(&stdout, &["past the page cache\n", "\nlater  "]);
    } else {
        has(&stderr, &["data.bin", "open(O_DIRECT)"]);
    }
}
