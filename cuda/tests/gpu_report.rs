//! The GPU report runs to its end, on the software driver: that its figures are there, never what they are.
#![cfg(target_os = "linux")]

#[allow(dead_code)]
#[path = "../examples/gpu_report.rs"]
mod gpu_report;

use twinbuf_cuda_sim::{Installed, Options, Sim};

#[test]
fn the_report_has_every_figure() {
    let _sim = Sim::start(Options { delay_us: 0, pieces: 1, ..Options::default() });
    let report = gpu_report::run(&gpu_report::Extent::quick()).unwrap();
    assert_eq!(report["copies"].as_array().unwrap().len(), 2);
    for copies in report["copies"].as_array().unwrap() {
        for (kind, figure) in [
            ("plain_pinned", "median"),
            ("plain_write_combined", "median"),
            ("plain_pageable", "median"),
            ("uploader_pinned", "gap_median"),
            ("uploader_write_combined", "gap_p99"),
        ] {
            assert!(copies[kind][figure].is_f64(), "{kind}: {copies}");
        }
        assert!(copies["uploader_pinned"]["gb_s"]["median"].is_f64(), "{copies}");
    }
    assert!(report["overlap"]["hidden"].is_f64(), "{report}");
    for pipeline in report["pipelines"].as_array().unwrap() {
        assert!(pipeline["serial"].is_f64() && pipeline["overlapped"].is_f64(), "{pipeline}");
    }
}

#[test]
fn without_a_device_it_is_one_line() {
    let _sim = Sim::start(Options { installed: Installed::NoDevice, ..Options::default() });
    let error = gpu_report::run(&gpu_report::Extent::quick()).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
}
