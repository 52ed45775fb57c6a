//! Plans survive being saved, in a format that stays as it is; impossible and unknown ones are refused.

use std::time::Duration;

use twinbuf_mmap::{LastBatch, Plan, ReadStats, Residency, Shuffle};

/// The format in the documentation of [`Plan`]; saved jobs have it on their disks.
const GOLDEN: &str = r#"{"first":5,"records":1000,"batch":10,"seed":7,"shuffle":{"chunks":{"records":50}},"rank":1,"world":4,"last_batch":"keep"}"#;

#[test]
fn golden() {
    let plan = Plan::builder(1000).batch(10).seed(7).rank(1, 4).last_batch(LastBatch::Keep);
    let plan = plan.shuffle(Shuffle::Chunks { records: 50 }).build().unwrap().with_records(5..1005).unwrap();
    assert_eq!(serde_json::to_string(&plan).unwrap(), GOLDEN);
    assert_eq!(serde_json::from_str::<Plan>(GOLDEN).unwrap(), plan);
    let plan = Plan::builder(1000).batches([(20, 5), (30, 8), (1, 10)]).build().unwrap();
    let saved = r#"{"first":0,"records":1000,"batch":10,"batches":[[20,5],[30,8]],"seed":0,"shuffle":"none","rank":0,"world":1,"last_batch":"drop"}"#;
    assert_eq!(serde_json::to_string(&plan).unwrap(), saved);
    assert_eq!(serde_json::from_str::<Plan>(saved).unwrap(), plan);
}

#[test]
fn every_shuffle_and_tail_comes_back() {
    let orders = [
        (Shuffle::None, r#""none""#),
        (Shuffle::Chunks { records: u64::MAX }, r#"{"chunks":{"records":18446744073709551615}}"#),
        (Shuffle::Full, r#""full""#),
        (
            Shuffle::Window { chunk_records: 7, window_chunks: 64 },
            r#"{"window":{"chunk_records":7,"window_chunks":64}}"#,
        ),
    ];
    let tails =
        [(LastBatch::Drop, r#""drop""#), (LastBatch::Keep, r#""keep""#), (LastBatch::Wrap, r#""wrap""#)];
    for (order, saved) in orders {
        assert_eq!(serde_json::to_string(&order).unwrap(), saved);
        assert_eq!(serde_json::from_str::<Shuffle>(saved).unwrap(), order);
        for (tail, saved) in tails {
            assert_eq!(serde_json::to_string(&tail).unwrap(), saved);
            assert_eq!(serde_json::from_str::<LastBatch>(saved).unwrap(), tail);
            let plan = Plan::builder(1 << 40).shuffle(order).last_batch(tail);
            let plan = if order == Shuffle::None { plan } else { plan.seed(u64::MAX) }.build().unwrap();
            let saved = serde_json::to_string(&plan).unwrap();
            assert_eq!(serde_json::from_str::<Plan>(&saved).unwrap(), plan, "{saved}");
        }
    }
}

/// What is changed in [`GOLDEN`], and what is said of it. A saved plan is checked as a new one is.
#[test]
fn refused() {
    let cases = [
        (r#""records":1000"#, r#""records":0"#, "a plan needs at least one record, found 0"),
        (
            r#"{"chunks":{"records":50}}"#,
            r#""none""#,
            "the seed 7 has no effect, because the plan does not shuffle: set `shuffle`, or leave out the seed",
        ),
        (
            r#""first":5"#,
            r#""first":18446744073709551000"#,
            "1000 records from 18446744073709551000 on end past 2^64",
        ),
        (r#""rank":1"#, r#""rank":4"#, "the rank must be below the world size 4, found 4"),
        (r#""seed":7"#, r#""seed":7,"sed":8"#, "unknown field `sed`"),
        (r#""seed":7,"#, "", "missing field `seed`"),
        (r#""seed":7"#, r#""seed":-7"#, "invalid value: integer `-7`, expected u64"),
        (r#""seed":7"#, r#""seed":7,"seed":7"#, "duplicate field `seed`"),
        (r#""keep""#, r#""kept""#, "unknown variant `kept`, expected one of `drop`, `keep`, `wrap`"),
        (r#"{"records":50}"#, r#"{"records":50,"bytes":1}"#, "unknown field `bytes`, expected `records`"),
    ];
    for (from, to, wanted) in cases {
        let text = GOLDEN.replacen(from, to, 1);
        assert_ne!(text, GOLDEN);
        let error = serde_json::from_str::<Plan>(&text).unwrap_err().to_string();
        assert!(error.starts_with(wanted), "{text}: {error}");
    }
}

#[test]
fn figures() {
    let mut stats = ReadStats::default();
    (stats.bytes, stats.disk, stats.hinted, stats.hints, stats.failed) = (6, 5, 3, 2, 1);
    stats.hint_time = Duration::new(4, 5);
    assert_eq!(
        serde_json::to_string(&stats).unwrap(),
        r#"{"bytes":6,"disk":5,"hinted":3,"hints":2,"failed":1,"hint_time":{"secs":4,"nanos":5}}"#
    );
    let residency = Residency { pages: 8, resident: 7 };
    assert_eq!(serde_json::to_string(&residency).unwrap(), r#"{"pages":8,"resident":7}"#);
}
