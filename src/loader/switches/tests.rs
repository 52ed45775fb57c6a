use super::*;
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

fn from(vars: &[(&str, &str)]) -> Result<Switches, Error> {
    Switches::from_vars(None, vars.iter().copied())
}

fn for_loader(loader: &str, vars: &[(&str, &str)]) -> Result<Switches, Error> {
    Switches::from_vars(Some(loader), vars.iter().copied())
}

#[test]
fn variables_of_others_set_nothing() {
    assert_eq!(from(&[]).unwrap(), Switches::default());
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
    assert_eq!(from(&others).unwrap(), Switches::default());
}

#[test]
fn every_value_that_is_taken() {
    for (value, expected) in [
        ("1", true),
        ("on", true),
        ("true", true),
        ("ON", true),
        ("True", true),
        (" 1\n", true),
        ("0", false),
        ("off", false),
        ("false", false),
        ("OFF", false),
        ("0 ", false),
    ] {
        assert_eq!(from(&[("TWINBUF_OVERLAP", value)]).unwrap().overlap, Some(expected), "{value:?}");
        assert_eq!(from(&[("TWINBUF_HINTS", value)]).unwrap().hints, Some(expected), "{value:?}");
        let copy_stream = from(&[("TWINBUF_COPY_STREAM", value)]).unwrap().copy_stream;
        assert_eq!(copy_stream, Some(expected), "{value:?}");
    }
    for depth in [1, 2, 9, usize::MAX] {
        assert_eq!(from(&[("TWINBUF_DEPTH", &depth.to_string())]).unwrap().depth, Some(depth));
    }
    for workers in [1, 2, MAX_WORKERS] {
        assert_eq!(from(&[("TWINBUF_WORKERS", &workers.to_string())]).unwrap().workers, Some(workers));
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
        assert_eq!(from(&[("TWINBUF_BREAKDOWN", value)]).unwrap().breakdown, Some(every), "{value:?}");
    }
    for path in ["", "trace.json", " a path/with spaces ", "on"] {
        assert_eq!(from(&[("TWINBUF_TRACE", path)]).unwrap().trace, Some(PathBuf::from(path)));
    }
    let one = from(&[("TWINBUF_DEPTH", "4"), ("X", "y")]).unwrap();
    assert_eq!(one, Switches { depth: Some(4), ..Switches::default() });
}

#[test]
fn memory_is_for_all_loaders_together_or_for_one() {
    for (value, bytes) in [("1000", 1000), ("64KiB", 64 << 10), (" 512 mib ", 512 << 20), ("2GiB", 2 << 30)] {
        assert_eq!(from(&[("TWINBUF_MEMORY", value)]).unwrap().memory, Some((bytes, true)), "{value:?}");
    }
    for value in ["", "-1", "1.5GiB", "MiB", "1 TiB", "17179869184GiB", "1k"] {
        let error = from(&[("TWINBUF_MEMORY", value)]).unwrap_err();
        assert!(matches!(error, Error::Switch { .. }), "{value:?}: {error}");
    }
    let vars = [("TWINBUF_MEMORY", "1GiB"), ("TWINBUF_VALID_MEMORY", "1MiB")];
    assert_eq!(for_loader("train", &vars).unwrap().memory, Some((1 << 30, true)));
    assert_eq!(for_loader("valid", &vars).unwrap().memory, Some((1 << 20, false)));
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
        let Switches { overlap, depth, .. } = for_loader(loader, &vars).unwrap();
        (overlap, depth)
    };
    assert_eq!(of("valid"), (Some(false), Some(3)));
    assert_eq!(of("train"), (Some(true), Some(4)));
    assert_eq!(of("held-out"), (Some(true), Some(3)));
    let held = [("TWINBUF_HELD_OUT_HINTS", "off"), ("TWINBUF_HINTS", "on")];
    assert_eq!(for_loader("held-out", &held).unwrap().hints, Some(false));
    // The error names the variable. Only the loader that the variable names reads its value.
    let bad = [("TWINBUF_VALID_DEPTH", "many")];
    let error = for_loader("valid", &bad).unwrap_err().to_string();
    assert_eq!(error, r#"environment: TWINBUF_VALID_DEPTH: wanted a whole number from 1, found "many""#);
    assert_eq!(for_loader("train", &bad).unwrap(), Switches::default());
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
        let error = Switches::from_vars(None, [(switch, bytes)]).unwrap_err();
        let Error::Switch { name, found, .. } = &error else { panic!("{error:?}") };
        assert_eq!((&**name, found), (switch, &OsString::from(bytes)));
        assert!(error.to_string().ends_with(r#"found "o\xFFn""#), "{error}");
    }
    let path = Switches::from_vars(None, [("TWINBUF_TRACE", bytes)]).unwrap().trace;
    assert_eq!(path, Some(PathBuf::from(bytes)));
    assert_eq!(Switches::from_vars(None, [(bytes, bytes)]).unwrap(), Switches::default());
    let slip = [OsStr::from_bytes(b"TWINBUF_HIN\xffTS")];
    let error = Switches::from_vars(None, slip.map(|name| (name, bytes))).unwrap_err();
    assert!(matches!(error, Error::UnknownSwitch { .. }), "{error:?}");
}

#[test]
fn the_environment_wins_over_the_code() {
    let code = || {
        Loader::builder(Zeros, Plan::builder(8).batch(1).build().unwrap())
            .overlap(false)
            .depth(3)
            .hints(false)
            .trace("code.json")
    };
    let with = |vars: &[(&str, &str)]| code().apply(from(vars).unwrap());
    let options = |b: &LoaderBuilder| {
        let (o, own) = (&b.options, &b.own);
        (o.overlap, o.copy_stream, own.depth, own.hints, o.trace.clone(), o.breakdown.is_on())
    };
    assert_eq!(options(&with(&[])), options(&code()));
    let builder = with(&[
        ("TWINBUF_OVERLAP", "1"),
        ("TWINBUF_COPY_STREAM", "0"),
        ("TWINBUF_DEPTH", "5"),
        ("TWINBUF_HINTS", "on"),
        ("TWINBUF_TRACE", "environment.json"),
        ("TWINBUF_BREAKDOWN", "1"),
    ]);
    let trace = Some(Trace::new("environment.json"));
    assert_eq!(options(&builder), (true, false, Some(5), true, trace, true));
    assert_eq!(with(&[("TWINBUF_TRACE", "")]).options.trace, None);
    let more = code().trace(Trace::new("code.json").epochs(9));
    let more = more.apply(Switches { trace: Some("environment.json".into()), ..Switches::default() });
    assert_eq!(more.options.trace, Some(Trace::new("environment.json").epochs(9)), "the code's epochs");
    let on = code().breakdown(Breakdown::every(7));
    assert!(!on.apply(Switches { breakdown: Some(0), ..Switches::default() }).options.breakdown.is_on());
}

#[test]
fn wanted_slots_are_those_of_the_environment() {
    let wanted = |vars: &[(&str, &str)]| {
        let plan = Plan::builder(8).batch(4).build().unwrap();
        let builder = Loader::builder(Zeros, plan).depth(3).workers(2).apply(from(vars).unwrap());
        builder.wanted_slots().unwrap().0
    };
    assert_eq!(wanted(&[]), 3);
    assert_eq!(wanted(&[("TWINBUF_DEPTH", "5")]), 5);
    assert_eq!(wanted(&[("TWINBUF_DEPTH", "8"), ("TWINBUF_WORKERS", "7")]), 8);
    assert_eq!(wanted(&[("TWINBUF_WORKERS", "7")]), 9, "the depth of the code was for its workers");
    assert_eq!(wanted(&[("TWINBUF_OVERLAP", "off")]), 3);
    assert_eq!(wanted(&[("TWINBUF_BREAKDOWN", "on")]), 3, "what is timed does not overlap");
}

#[test]
fn each_rank_has_a_trace_of_its_own() {
    let traced = |rank, world, path: &str| {
        let plan = Plan::builder(8).batch(1).rank(rank, world).build().unwrap();
        let switches = Switches { trace: Some(path.into()), ..Switches::default() };
        Loader::builder(Zeros, plan).apply(switches).options.trace
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
