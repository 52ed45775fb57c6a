//! What the environment may say, and what it hears when it says anything else.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use twinbuf::{Error, MAX_HOST_DEPTH, SwitchError, Switches};

fn of(vars: &[(&str, &str)]) -> Result<Switches, SwitchError> {
    Switches::from_vars(vars.iter().copied())
}

#[test]
fn nothing_said() {
    assert_eq!(of(&[]), Ok(Switches::default()));
    let others = [
        ("HOME", "/root"),
        ("OVERLAP", "maybe"),
        ("TWINBUF", "?"),
        ("TWINBUF_", ""),
        ("TWINBUF_STRESS_SEED", "x"),
        ("TWINBUF_SPARSE_MODE", "x"),
        ("TWINBUF_CUDA_SIM", "x"),
        ("TWINBUF_DEVICE_DEPTH", "x"),
    ];
    assert_eq!(of(&others), Ok(Switches::default()), "somebody else's");
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
        assert_eq!(of(&[("TWINBUF_OVERLAP", value)]).unwrap().overlap, Some(expected), "{value:?}");
        assert_eq!(of(&[("TWINBUF_HINTS", value)]).unwrap().hints, Some(expected), "{value:?}");
        let every = if expected { 100 } else { 0 };
        assert_eq!(of(&[("TWINBUF_BREAKDOWN", value)]).unwrap().breakdown, Some(every), "{value:?}");
    }
    for depth in 1..=MAX_HOST_DEPTH {
        assert_eq!(of(&[("TWINBUF_DEPTH", &depth.to_string())]).unwrap().depth, Some(depth));
    }
    for (value, every) in [("2", 2), (" 50 ", 50), ("18446744073709551615", u64::MAX)] {
        assert_eq!(of(&[("TWINBUF_BREAKDOWN", value)]).unwrap().breakdown, Some(every));
    }
    for path in ["", "trace.json", " a path/with spaces ", "on"] {
        assert_eq!(of(&[("TWINBUF_TRACE", path)]).unwrap().trace, Some(PathBuf::from(path)));
    }
    let one = of(&[("TWINBUF_DEPTH", "4"), ("X", "y")]).unwrap();
    assert_eq!(
        (one.overlap, one.depth, one.hints, one.trace, one.breakdown),
        (None, Some(4), None, None, None)
    );
}

#[test]
fn every_other_value_is_an_error() {
    let switch = "1, on or true, or 0, off or false";
    let depth = &*format!("a whole number from 1 to {MAX_HOST_DEPTH}");
    let every = "1, on or true, or 0, off or false, or every how many steps";
    for (name, wanted, bad) in [
        ("TWINBUF_OVERLAP", switch, &["", " ", "2", "yes", "no", "-1", "on off", "1.0", "١"][..]),
        ("TWINBUF_HINTS", switch, &["", "yes", "offf", "10"]),
        ("TWINBUF_DEPTH", depth, &["", "0", "9", "-1", "two", "2.0", "0x2", "18446744073709551616"]),
        ("TWINBUF_BREAKDOWN", every, &["", "-1", "00", "every", "1.5", "18446744073709551616"]),
    ] {
        for value in bad {
            let error = of(&[("TWINBUF_TRACE", "t"), (name, value)]).unwrap_err();
            assert_eq!(error, SwitchError::Value { name, wanted: wanted.into(), found: value.into() });
            assert_eq!(error.to_string(), format!("environment: {name}: wanted {wanted}, found {value:?}"));
        }
    }
}

#[test]
fn a_name_with_a_slip_is_an_error_that_says_what_was_meant() {
    for (name, meant) in [
        ("TWINBUF_OVERLP", "TWINBUF_OVERLAP"),
        ("TWINBUF_OVRLP", "TWINBUF_OVERLAP"),
        ("TWINBUF_OVERLAPP", "TWINBUF_OVERLAP"),
        ("TWINBUF_OVRELAP", "TWINBUF_OVERLAP"),
        ("TWINBUF_DEPHT", "TWINBUF_DEPTH"),
        ("TWINBUF_DEPT", "TWINBUF_DEPTH"),
        ("TWINBUF_HINT", "TWINBUF_HINTS"),
        ("TWINBUF_TRACES", "TWINBUF_TRACE"),
        ("TWINBUF_BRAEKDOWN", "TWINBUF_BREAKDOWN"),
        ("TWINBUF_BREAK_DOWN", "TWINBUF_BREAKDOWN"),
        ("twinbuf_overlap", "TWINBUF_OVERLAP"),
        ("TWINBUFF_DEPTH", "TWINBUF_DEPTH"),
        ("TWIBUF_TRACE", "TWINBUF_TRACE"),
        ("TWINBUFOVERLAP", "TWINBUF_OVERLAP"),
        ("TWINBUF-HINTS", "TWINBUF_HINTS"),
    ] {
        let error = of(&[(name, "1")]).unwrap_err();
        assert_eq!(error, SwitchError::Unknown { name: name.into(), meant });
        assert_eq!(
            error.to_string(),
            format!("environment: {name} is no switch: wanted {meant}, or a name that is not so like it")
        );
        assert!(matches!(Error::from(error), Error::Switch(_)));
    }
}

#[test]
#[cfg(unix)]
fn what_is_no_utf_8_is_an_error_but_in_a_path() {
    use std::os::unix::ffi::OsStrExt;

    let bytes = OsStr::from_bytes(b"o\xffn");
    for name in ["TWINBUF_OVERLAP", "TWINBUF_DEPTH", "TWINBUF_HINTS", "TWINBUF_BREAKDOWN"] {
        let error = Switches::from_vars([(name, bytes)]).unwrap_err();
        let SwitchError::Value { name: of, found, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*of, found), (name, &OsString::from(bytes)));
        assert!(error.to_string().ends_with(r#"found "o\xFFn""#), "{error}");
    }
    let path = Switches::from_vars([("TWINBUF_TRACE", bytes)]).unwrap().trace;
    assert_eq!(path, Some(PathBuf::from(bytes)));
    // A name that is none has no switch's meaning, and does no harm.
    assert_eq!(Switches::from_vars([(bytes, bytes)]), Ok(Switches::default()));
    let slip = [OsStr::from_bytes(b"TWINBUF_HIN\xffTS")];
    assert!(matches!(Switches::from_vars(slip.map(|name| (name, bytes))), Err(SwitchError::Unknown { .. })));
}
