//! Any sequence of operations does what the oracle foretells.

mod oracle;

use oracle::Operation;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence};

/// Operations that go on with a ring, and now and then one that takes a handle away.
fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let mut plain = Operation::all().to_vec();
    plain.retain(|operation| !Operation::ENDINGS.contains(operation));
    let receives: Vec<_> =
        plain.iter().copied().filter(|operation| matches!(operation, Operation::Receive(_))).collect();
    // A third each, or the many ways to acquire would leave few slots to anything else.
    let operation = prop_oneof![
        9 => select(plain),
        4 => select(receives),
        4 => (0..3u8).prop_map(Operation::Release),
        1 => select(&Operation::ENDINGS[..]),
    ];
    prop::collection::vec(operation, 0..48)
}

proptest! {
    #![proptest_config(Config {
        cases: 4000,
        // A path of its own: the default asks for a `src` directory beside the test.
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("tests/property.seeds"))),
        ..Config::default()
    })]

    #[test]
    fn does_what_the_oracle_foretells(depth in 1..=3usize, operations in operations()) {
        let bytes = Operation::encode(depth, &operations);
        prop_assert_eq!(Operation::decode(&bytes), (depth, operations));
        oracle::replay(&bytes);
    }
}
