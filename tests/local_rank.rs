//! The device of a rank, on the software driver. Alone in its process, because it sets environment variables.

#![cfg(target_os = "linux")]

use twinbuf::Error;
use twinbuf::loader::context_from_env;
use twinbuf_cuda_sim::{Options, Sim};

#[test]
fn the_device_is_that_of_the_local_rank() {
    let _sim = Sim::start(Options::seeded(1));
    let set = |name: &str, value: &str| {
        // SAFETY: no other thread reads the environment: this is the only test of the process.
        unsafe { std::env::set_var(name, value) }
    };
    assert_eq!(context_from_env().unwrap().ordinal(), 0);
    set("SLURM_LOCALID", "0");
    assert_eq!(context_from_env().unwrap().ordinal(), 0);
    // One device: each process sees only its device, as the first one.
    set("LOCAL_RANK", "3");
    assert_eq!(context_from_env().unwrap().ordinal(), 0);
    set("LOCAL_RANK", "gpu");
    let error = context_from_env().unwrap_err();
    assert!(matches!(error, Error::Switch { .. }), "{error}");
    assert_eq!(error.to_string(), "environment: LOCAL_RANK: wanted the number of a device, found \"gpu\"");
}
