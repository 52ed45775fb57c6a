//! The fuzz target `plan` without a fuzzer and on any toolchain: its saved corpus, and random bytes.

#[path = "../fuzz_bodies/plan.rs"]
mod body;

use std::fs;
use std::path::Path;

use proptest::prelude::*;

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

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any order on any rank: each record of an epoch as often as [`LastBatch`](twinbuf_mmap::LastBatch) says.
    #[test]
    fn any_bytes_are_a_plan_that_holds_or_an_error(bytes in prop::collection::vec(any::<u8>(), 8..12)) {
        body::plan(&bytes);
    }
}
