//! Checks that any sequence of operations does what the oracle predicts.
//!
//! `PROPTEST_CASES` sets the number of sequences. The long run:
//!
//! ```sh
//! PROPTEST_CASES=1000000 cargo test --release -p twinbuf-core --test all property
//! ```

use crate::oracle::{Operation, Start};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence};

fn those(which: impl Fn(&Operation) -> bool) -> impl Strategy<Value = Operation> {
    select(Operation::all().iter().copied().filter(which).collect::<Vec<_>>())
}

/// Mostly operations that keep a ring running, with an occasional one that takes a handle away.
fn operations() -> impl Strategy<Value = Vec<Operation>> {
    // Weighted: otherwise the many ways to acquire would leave few slots for anything else.
    let operation = prop_oneof![
        8 => those(|operation| !Operation::ENDINGS.contains(operation)),
        4 => those(|operation| matches!(operation, Operation::Receive(..))),
        4 => those(|operation| matches!(operation, Operation::Release(_))),
        2 => those(|operation| matches!(operation, Operation::CommitReserved(_) | Operation::DropReserved(_))),
        1 => those(|operation| matches!(operation, Operation::EndWrite(_))),
        1 => select(&Operation::ENDINGS[..]),
    ];
    prop::collection::vec(operation, 0..48)
}

fn start() -> impl Strategy<Value = Start> {
    (1..=4usize, any::<bool>()).prop_map(|(depth, heap)| Start { depth, heap })
}

proptest! {
    #![proptest_config(Config {
        cases: 4000,
        // An explicit path: the default requires a `src` directory next to the test.
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("tests/property.seeds"))),
        ..Config::default()
    })]

    #[test]
    fn does_what_the_oracle_foretells(start in start(), operations in operations()) {
        let bytes = Operation::encode(start, &operations);
        prop_assert_eq!(Operation::decode(&bytes), (start, operations));
        crate::oracle::replay(&bytes);
    }
}
