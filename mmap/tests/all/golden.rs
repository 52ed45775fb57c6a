//! Files that numpy and safetensors made, or `make.py` as llm.c and nanoGPT do, are read equal to what those read.
//!
//! `fixtures/make.py` wrote them and what is expected; it need not run for the tests.

use std::path::{Path, PathBuf};

use twinbuf_mmap::{Cut, DType, Error, Plan, Records, Shuffle};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The lines of a table that `make.py` wrote, without those that need a missing feature.
fn table(name: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(fixture(name)).unwrap();
    let lines = text.lines().map(|line| line.split('\t').map(String::from).collect());
    lines.filter(|line: &Vec<String>| cfg!(feature = "safetensors") || line[1] == "-").collect()
}

fn cut(text: &str) -> Cut {
    match text.split_once(':') {
        Some((rows, stride)) => Cut::Windows { rows: rows.parse().unwrap(), stride: stride.parse().unwrap() },
        None => Cut::Rows,
    }
}

/// `tensor` is for safetensors only.
fn open(file: &str, tensor: &str, cut: Cut) -> Result<Records, Error> {
    let path = fixture(file);
    match file {
        "train16.bin" => Records::open_headerless([path], DType::U16, cut),
        "train32.bin" => Records::open_headerless([path], DType::U32, cut),
        _ if file.ends_with(".bin") => Records::open_llm_c([path], cut),
        _ if file.ends_with(".npy") => Records::open_npy([path], cut),
        #[cfg(feature = "safetensors")]
        _ => Records::open_safetensors([path], tensor, cut),
        #[cfg(not(feature = "safetensors"))]
        _ => panic!("{tensor}"),
    }
}

#[test]
fn what_the_packages_read() {
    let table = table("expected.txt");
    assert!(table.len() >= 30);
    for line in table {
        let [file, tensor, windows, dtype, shape, count, hex] = &line[..] else { panic!("{line:?}") };
        let records = open(file, tensor, cut(windows)).unwrap_or_else(|error| panic!("{error}"));
        let case = format!("{file} {tensor} {windows}");
        assert_eq!(records.dtype().to_string(), *dtype, "{case}");
        let axes: Vec<usize> = shape.split_terminator(',').map(|axis| axis.parse().unwrap()).collect();
        assert_eq!(records.shape(), axes, "{case}");
        assert_eq!(records.record_bytes(), axes.iter().product::<usize>() * records.dtype().size(), "{case}");
        assert_eq!(records.len().to_string(), *count, "{case}");

        let digit = |byte: u8| u8::try_from(char::from(byte).to_digit(16).unwrap()).unwrap();
        let expected: Vec<u8> =
            hex.as_bytes().chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect();
        assert_eq!(records.bytes(), expected.len() as u64, "{case}");
        for order in [Shuffle::None, Shuffle::Full] {
            let plan = Plan::builder(records.len()).batch(records.len()).shuffle(order).build().unwrap();
            // Windows overlap in the file, and follow each other in what is expected.
            let size = records.record_bytes();
            let wanted = |record| &expected[record * size..][..size];
            crate::asked::compare(&records, &plan, &format!("{case}, {order:?}"), wanted);
        }
    }
}

#[test]
fn what_is_valid_and_yet_not_supported() {
    let table = table("refused.txt");
    assert!(table.len() >= 9);
    for line in table {
        let [file, tensor, wanted] = &line[..] else { panic!("{line:?}") };
        let error = open(file, tensor, Cut::Rows).expect_err(file);
        let start = format!("{:?}: {wanted}", fixture(file));
        assert!(error.to_string().starts_with(&start), "{file} {tensor}: {error}");
    }
}
