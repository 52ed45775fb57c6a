#[cfg(unix)]
#[allow(dead_code)] // a part of it is for other tests
#[path = "../../../tests/common/forked.rs"]
mod forked;

use super::*;
use crate::pipe::options::Options;
use crate::{BatchIndices, BoxError, Dataset, Loader, Plan};

struct Zeros;

impl Dataset for Zeros {
    fn records(&self) -> u64 {
        8
    }

    fn record_bytes(&self) -> usize {
        1
    }

    fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        Ok(out.len())
    }
}

/// A builder with several options that differ from the defaults.
fn code() -> LoaderBuilder {
    let mut code = Loader::builder(Zeros, Plan::builder(8).batch(1).build().unwrap())
        .overlap(false)
        .depth(3)
        .hints(false)
        .trace("code.json");
    code.options.copy_stream = false;
    code
}

fn from(vars: &[(&str, &str)]) -> Result<LoaderBuilder, Error> {
    code().with_vars(vars.iter().copied())
}

fn for_loader(loader: &str, vars: &[(&str, &str)]) -> Result<LoaderBuilder, Error> {
    code().name(loader).with_vars(vars.iter().copied())
}

type Set = (bool, bool, usize, Option<usize>, bool, Option<Trace>, bool);

/// The options that the environment sets, except for the memory limit.
fn options(builder: &LoaderBuilder) -> Set {
    let (options, own) = (&builder.options, &builder.own);
    let Options { overlap, copy_stream, trace, breakdown, .. } = options.clone();
    (overlap, copy_stream, own.workers, own.depth, own.hints, trace, breakdown.is_on())
}

#[test]
fn variables_of_others_set_nothing() {
    assert_eq!(options(&from(&[]).unwrap()), options(&code()));
    let others = [
        ("HOME", "/root"),
        ("OVERLAP", "maybe"),
        ("TWINBUF", "?"),
        ("TWINBUF_STRESS_SEED", "x"),
        ("TWINBUF_TEST_CASE", "x"),
        ("TWINBUF_CUDA_DRIVER", "x"),
        ("TWINBUF_VALID_OVERLAP", "of a loader with this name"),
        ("TWINBUF_VALID_2_COPY_STREAM", "of a loader with this name"),
    ];
    assert_eq!(options(&from(&others).unwrap()), options(&code()));
}

#[test]
fn every_value_that_is_taken() {
    let on = ["1", "on", "true", "ON", "True", " 1\n"].map(|value| (value, true));
    let off = ["0", "off", "false", "OFF", "0 "].map(|value| (value, false));
    for (value, expected) in on.into_iter().chain(off) {
        let mut before = code().overlap(!expected).hints(!expected);
        before.options.copy_stream = !expected;
        let names = ["TWINBUF_OVERLAP", "TWINBUF_HINTS", "TWINBUF_COPY_STREAM"];
        let after = before.with_vars(names.map(|name| (name, value))).unwrap();
        let (options, own) = (&after.options, &after.own);
        assert_eq!([options.overlap, own.hints, options.copy_stream], [expected; 3], "{value:?}");
    }
    for depth in [1, 2, 9, usize::MAX] {
        assert_eq!(from(&[("TWINBUF_DEPTH", &depth.to_string())]).unwrap().own.depth, Some(depth));
    }
    for workers in [1, 2, MAX_WORKERS] {
        assert_eq!(from(&[("TWINBUF_WORKERS", &workers.to_string())]).unwrap().own.workers, workers);
    }
    for (value, every) in [
        ("on", 100),
        ("True", 100),
        ("1", 1), // logs every step; "2" logs every other step
        ("2", 2),
        (" 50 ", 50),
        ("18446744073709551615", u64::MAX),
        ("0", 0),
        ("off", 0),
    ] {
        let breakdown = from(&[("TWINBUF_BREAKDOWN", value)]).unwrap().options.breakdown;
        assert_eq!(breakdown.is_on(), every > 0, "{value:?}");
        assert_eq!(parse("", value.as_ref(), "", super::every).unwrap(), every, "{value:?}");
    }
    for path in ["trace.json", " a path/with spaces ", "on"] {
        assert_eq!(from(&[("TWINBUF_TRACE", path)]).unwrap().options.trace, Some(Trace::new(path)));
    }
    let one = from(&[("TWINBUF_DEPTH", "4"), ("X", "y")]).unwrap();
    assert_eq!(options(&one), options(&code().depth(4)));
}

#[test]
fn memory_is_for_all_loaders_together_or_for_one() {
    let limit = |builder: LoaderBuilder| builder.own.memory_limit.unwrap();
    // The limit, and how much of it is taken.
    let left = |of: MemoryLimit| match of.take(u64::MAX, &"") {
        Err(Error::Memory { limit, taken, .. }) => (limit, taken),
        _ => panic!("wanted an error"),
    };
    for (value, bytes) in [("1000", 1000), ("64KiB", 64 << 10), (" 512 mib ", 512 << 20), ("2GiB", 2 << 30)] {
        assert_eq!(left(limit(from(&[("TWINBUF_MEMORY", value)]).unwrap())), (bytes, 0), "{value:?}");
    }
    for value in ["", "-1", "1.5GiB", "MiB", "1 TiB", "17179869184GiB", "1k"] {
        let error = from(&[("TWINBUF_MEMORY", value)]).unwrap_err();
        assert!(matches!(error, Error::Switch { .. }), "{value:?}: {error}");
    }
    let vars = [("TWINBUF_MEMORY", "1GiB"), ("TWINBUF_VALID_MEMORY", "1MiB")];
    let of = |loader| limit(for_loader(loader, &vars).unwrap());
    let taken = ["train", "valid"].map(|loader| of(loader).take(7, &"").unwrap());
    let lefts = ["train", "test", "valid"].map(|loader| left(of(loader)));
    assert_eq!(lefts, [(1 << 30, 7), (1 << 30, 7), (1 << 20, 0)]);
    #[cfg(unix)]
    assert!(forked::forked(|| left(of("train")) == (1 << 30, 0)), "its parent's loaders are not its own");
    drop(taken);
}

#[test]
fn a_loader_with_a_name_has_switches_of_its_own() {
    let vars = [
        ("TWINBUF_VALID_OVERLAP", "0"),
        ("TWINBUF_OVERLAP", "1"),
        ("TWINBUF_DEPTH", "3"),
        ("TWINBUF_TRAIN_DEPTH", "4"),
    ];
    let of = |loader: &str| {
        let builder = for_loader(loader, &vars).unwrap();
        (builder.options.overlap, builder.own.depth)
    };
    assert_eq!(of("valid"), (false, Some(3)));
    assert_eq!(of("train"), (true, Some(4)));
    assert_eq!(of("held-out"), (true, Some(3)));
    let held = [("TWINBUF_HELD_OUT_HINTS", "off"), ("TWINBUF_HINTS", "on")];
    assert!(!for_loader("held-out", &held).unwrap().own.hints);
    // A value for all loaders is checked even if one for this loader wins, and an empty path wins too.
    let bad = [("TWINBUF_VALID_DEPTH", "3"), ("TWINBUF_DEPTH", "many")];
    assert!(for_loader("valid", &bad).is_err());
    let none = [("TWINBUF_VALID_TRACE", ""), ("TWINBUF_TRACE", "trace.json")];
    assert_eq!(for_loader("valid", &none).unwrap().options.trace, None);
    let own = [("TWINBUF_VALID_TRACE", "trace.json"), ("TWINBUF_TRACE", "")];
    assert_eq!(for_loader("valid", &own).unwrap().options.trace, Some(Trace::new("trace.json")));
    // The error names the variable. Only the loader that the variable names reads its value.
    let bad = [("TWINBUF_VALID_DEPTH", "many")];
    let error = for_loader("valid", &bad).unwrap_err().to_string();
    assert_eq!(error, r#"environment: TWINBUF_VALID_DEPTH: wanted a whole number from 1, found "many""#);
    assert_eq!(options(&for_loader("train", &bad).unwrap()), options(&code()));
}

#[test]
fn every_other_value_is_an_error() {
    let depth = "a whole number from 1";
    let steps = "a number of steps, or on or true, or 0, off or false";
    for (switch, values, bad) in [
        ("TWINBUF_OVERLAP", ON_OR_OFF, &["", " ", "2", "yes", "no", "-1", "on off", "1.0", "١"][..]),
        ("TWINBUF_HINTS", ON_OR_OFF, &["", "yes", "offf", "10"]),
        ("TWINBUF_COPY_STREAM", ON_OR_OFF, &["", "yes", "default"]),
        ("TWINBUF_WORKERS", "a whole number from 1 to 64", &["", "0", "65", "-1", "two"]),
        ("TWINBUF_DEPTH", depth, &["", "0", "-1", "two", "2.0", "0x2", "18446744073709551616"]),
        ("TWINBUF_BREAKDOWN", steps, &["", "-1", "00", "every", "1.5", "18446744073709551616"]),
    ] {
        for value in bad {
            let error = from(&[("TWINBUF_TRACE", "t"), (switch, value)]).unwrap_err();
            let Error::Switch { name, wanted, found } = &error else { panic!("{error:?}") };
            assert_eq!((&**name, &**wanted, found), (switch, values, &OsString::from(value)));
            assert_eq!(error.to_string(), format!("environment: {name}: wanted {wanted}, found {value:?}"));
        }
    }
}

#[test]
fn an_unknown_switch_is_refused() {
    for slip in
        ["TWINBUF_OVERLP", "TWINBUF_HOST_DEPTH", "TWINBUF_PREFETCH", "TWINBUF_", "TWINBUF_VALID_OVERLP"]
    {
        let error = from(&[(slip, "1")]).unwrap_err();
        assert_eq!(error.to_string(), format!("environment: there is no switch {slip}"));
    }
}

#[test]
#[cfg(unix)]
fn a_value_that_is_not_utf_8_is_an_error_except_in_a_path() {
    use std::os::unix::ffi::OsStrExt;

    let bytes = OsStr::from_bytes(b"o\xffn");
    for switch in ["TWINBUF_OVERLAP", "TWINBUF_DEPTH", "TWINBUF_HINTS", "TWINBUF_BREAKDOWN"] {
        let error = code().with_vars([(switch, bytes)]).unwrap_err();
        let Error::Switch { name, found, .. } = &error else { panic!("{error:?}") };
        assert_eq!((&**name, found), (switch, &OsString::from(bytes)));
        assert!(error.to_string().ends_with(r#"found "o\xFFn""#), "{error}");
    }
    let trace = code().with_vars([("TWINBUF_TRACE", bytes)]).unwrap().options.trace;
    assert_eq!(trace, Some(Trace::new(bytes)));
    assert_eq!(options(&code().with_vars([(bytes, bytes)]).unwrap()), options(&code()));
    let slip = [OsStr::from_bytes(b"TWINBUF_HIN\xffTS")];
    let error = code().with_vars(slip.map(|name| (name, bytes))).unwrap_err();
    assert!(matches!(error, Error::UnknownSwitch { .. }), "{error:?}");
}

#[test]
fn the_environment_wins_over_the_code() {
    let with = |vars: &[(&str, &str)]| from(vars).unwrap();
    let builder = with(&[
        ("TWINBUF_OVERLAP", "1"),
        ("TWINBUF_COPY_STREAM", "1"),
        ("TWINBUF_DEPTH", "5"),
        ("TWINBUF_HINTS", "on"),
        ("TWINBUF_TRACE", "environment.json"),
        ("TWINBUF_BREAKDOWN", "1"),
    ]);
    let trace = Some(Trace::new("environment.json"));
    assert_eq!(options(&builder), (true, true, 1, Some(5), true, trace, true));
    assert_eq!(with(&[("TWINBUF_TRACE", "")]).options.trace, None);
    let more = code().trace(Trace::new("code.json").epochs(9));
    let more = more.with_vars([("TWINBUF_TRACE", "environment.json")]).unwrap();
    assert_eq!(more.options.trace, Some(Trace::new("environment.json").epochs(9)), "the code's epochs");
    let on = code().breakdown(Breakdown::every(7));
    assert!(!on.with_vars([("TWINBUF_BREAKDOWN", "0")]).unwrap().options.breakdown.is_on());
}

#[test]
fn wanted_slots_are_those_of_the_environment() {
    let wanted = |vars: &[(&str, &str)]| {
        let plan = Plan::builder(8).batch(4).build().unwrap();
        let builder = Loader::builder(Zeros, plan).name("valid").depth(3).workers(2);
        let builder = builder.with_vars(vars.iter().copied()).unwrap();
        builder.wanted_slots().unwrap().0
    };
    assert_eq!(wanted(&[]), 3);
    assert_eq!(wanted(&[("TWINBUF_DEPTH", "5")]), 5);
    assert_eq!(wanted(&[("TWINBUF_DEPTH", "8"), ("TWINBUF_WORKERS", "7")]), 8);
    assert_eq!(wanted(&[("TWINBUF_WORKERS", "7")]), 9, "the depth of the code was for its workers");
    assert_eq!(wanted(&[("TWINBUF_WORKERS", "2")]), 3, "the same number");
    let back = [("TWINBUF_WORKERS", "7"), ("TWINBUF_VALID_WORKERS", "2")];
    assert_eq!(wanted(&back), 3, "the same number in the end");
    assert_eq!(wanted(&[("TWINBUF_OVERLAP", "off")]), 3);
    assert_eq!(wanted(&[("TWINBUF_BREAKDOWN", "on")]), 3, "what is timed does not overlap");
}

#[test]
fn each_rank_has_a_trace_of_its_own() {
    let traced = |rank, world, path: &str| {
        let plan = Plan::builder(8).batch(1).rank(rank, world).build().unwrap();
        let builder = Loader::builder(Zeros, plan).with_vars([("TWINBUF_TRACE", path)]);
        builder.unwrap().options.trace
    };
    for (rank, world, path, expected) in [
        (0, 1, "trace.json", "trace.json"),
        (0, 2, "trace.json", "trace.rank0.json"),
        (3, 4, "a.folder/run.2/trace.json", "a.folder/run.2/trace.rank3.json"),
        (3, 4, "../trace", "../trace.rank3"),
        (3, 4, ".trace", ".trace.rank3"),
        (3, 4, "trace.7.json", "trace.7.rank3.json"),
    ] {
        assert_eq!(traced(rank, world, path), Some(Trace::new(expected)), "{path}, {rank} of {world}");
    }
    assert_eq!(traced(3, 4, ""), None, "still no trace");
}
