//! Replays the saved corpus of the fuzz target `handoff`, without a fuzzer and on any toolchain.

use std::fs;
use std::path::Path;

use crate::oracle::Operation;

#[test]
fn the_saved_corpus_runs_clean() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/handoff");
    let mut missing = Operation::all().to_vec();
    for entry in fs::read_dir(&folder).expect("the corpus is in the repository") {
        let path = entry.expect("a readable folder").path();
        println!("{}", path.display()); // shown if this one fails
        let bytes = fs::read(&path).expect("a readable file");
        crate::oracle::replay(&bytes);
        let (_, operations) = Operation::decode(&bytes);
        missing.retain(|operation| !operations.contains(operation));
    }
    assert!(missing.is_empty(), "a corpus that never does {missing:?}");
}
