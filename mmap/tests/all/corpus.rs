//! Replays the saved corpus of the fuzz target `plan`, without a fuzzer and on any toolchain.

#[path = "../fuzz_bodies/plan.rs"]
mod body;

use std::fs;
use std::path::Path;

#[test]
fn the_saved_corpus_of_plans_runs_clean() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/plan");
    let mut replayed = 0;
    for entry in fs::read_dir(&folder).expect("the corpus is in the repository") {
        let path = entry.expect("a readable folder").path();
        println!("{}", path.display()); // shown if this one fails
        body::plan(&fs::read(&path).expect("a readable file"));
        replayed += 1;
    }
    assert!(replayed >= 40, "only {replayed} inputs");
}
