//! Headers that are wrong, and files that are not as long as their headers say, give their own
//! errors: all fields are compared.

use std::path::Path;

use crate::asked::write;
use twinbuf_mmap::{Cut, DType, Error, RaggedRecords, Records};

type Open = fn(&[&Path]) -> Result<Records, Error>;

/// Bytes of a file, and the message of the error that they must give, with `P` for the path. Where it ends in `..`, the
/// words of another crate follow.
type Case = (Vec<u8>, &'static str);

/// The message for data at this byte that is not as long as the header says.
fn cut(at: u64, wanted: u64, found: u64) -> &'static str {
    let problem = "P: cut off or grown, by the length of the data";
    format!("{problem} at byte {at}: wanted {wanted} bytes, found {found}").leak()
}

fn short(wanted: u64, found: u64) -> &'static str {
    format!("P: ends inside its header: wanted at least {wanted} bytes, found {found}").leak()
}

/// The message for a header whose length is at this byte.
fn too_long(at: u64, most: u64, found: u64) -> &'static str {
    let problem = "P: too long a header, by the length at byte";
    format!("{problem} {at}: wanted at most {most} bytes, found {found}").leak()
}

/// Each file is opened behind a good one: the path in the error must be that of the bad file.
fn check(open: Open, good: &[u8], table: &[Case]) {
    let folder = tempfile::tempdir().unwrap();
    let (first, path) = (folder.path().join("first"), folder.path().join("file"));
    std::fs::write(&first, good).unwrap();
    assert_eq!(open(&[&first]).unwrap().len(), 3);
    for (bytes, wanted) in table {
        std::fs::write(&path, bytes).unwrap();
        let error = open(&[&first, &path]).expect_err(wanted);
        let quoted = format!("{path:?}");
        let found = format!("{error:?}").replace(&quoted, "P");
        match wanted.strip_suffix("..") {
            Some(wanted) => assert!(found.starts_with(wanted), "{found}"),
            None => assert_eq!(found, *wanted),
        }
        let message = error.to_string();
        assert!(message.starts_with(&format!("{quoted}: ")) && !message.contains('\n'), "{message}");
        assert!(message.len() < 400 + quoted.len(), "{message}");
    }
}

#[test]
fn llm_c() {
    fn shard(header: &[i32], data: usize) -> Vec<u8> {
        let mut header = header.to_vec();
        header.resize(256, 0);
        let mut file = header.into_iter().flat_map(i32::to_le_bytes).collect::<Vec<u8>>();
        file.resize(1024 + data, 1);
        file
    }
    let other = |magic: i32| -> &'static str {
        let wanted = "20240520 or 20240801";
        format!("P: another format, by the magic at byte 0: wanted {wanted}, found {magic}").leak()
    };
    let good = shard(&[20_240_520, 1, 3], 6);
    let mut big_endian = good.clone();
    big_endian.chunks_exact_mut(4).take(256).for_each(<[u8]>::reverse);
    let table = [
        (vec![], short(1024, 0)),
        (good[..1023].to_vec(), short(1024, 1023)),
        (good[..1024].to_vec(), cut(1024, 6, 0)),
        (good[..1029].to_vec(), cut(1024, 6, 5)),
        (shard(&[20_240_520, 1, 3], 7), cut(1024, 6, 7)),
        (shard(&[20_240_520, 1, i32::MAX], 6), cut(1024, 4_294_967_294, 6)),
        (shard(&[20_240_801, 7, i32::MAX], 6), cut(1024, 8_589_934_588, 6)),
        (shard(&[20_240_520, 1, 0], 0), "P: holds no record: wanted at least 2 bytes, found 0"),
        (shard(&[20_240_520, 1, 0], 6), cut(1024, 0, 6)),
        (shard(&[20_240_520, 1, -3], 6), "P: bad header at byte 8: wanted a number of tokens, found -3"),
        // The evaluation files of llm.c, a headerless file, and a machine of the other byte order.
        (shard(&[20_240_522, 1, 3], 6), other(20_240_522)),
        (shard(&[0, 1, 3], 6), other(0)),
        (big_endian, other(-1_999_096_831)),
        (shard(&[20_240_520, 2, 3], 6), "P: unknown version at byte 4: wanted 1, found 2"),
        (shard(&[20_240_520, 7, 3], 12), "P: unknown version at byte 4: wanted 1, found 7"),
        (shard(&[20_240_801, 1, 3], 6), "P: unknown version at byte 4: wanted 7, found 1"),
    ];
    check(|paths| Records::open_llm_c(paths, Cut::Rows), &good, &table);
}

/// A file with this header, and so many bytes of data.
fn npy_of(header: &str, data: usize) -> Vec<u8> {
    crate::asked::npy(1, header, &vec![1; data])
}

#[test]
fn npy() {
    use npy_of as file;

    fn array(descr: &str, shape: &str, data: usize) -> Vec<u8> {
        file(&format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"), data)
    }
    /// The good file with these bytes at this place.
    fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut file = array("'<i2'", "(3, 2)", 12);
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    }
    const KEYS: &str = "'descr', 'fortran_order' and 'shape', each once";
    let bad = |offset, wanted, found: &str| -> &'static str {
        let found = if found.is_empty() { String::new() } else { format!(", found {found}") };
        format!("P: bad header at byte {offset}: wanted {wanted}{found}").leak()
    };
    let shape = |wanted, found| -> &'static str {
        format!("P: no records in this shape: wanted {wanted}, found {found}").leak()
    };
    const KNOWN: &str = "wanted bool, integers of 8 to 64 bits, floats of 16 to 64 bits, or complex numbers";
    const OBJECTS: &str = "it holds Python objects: save numbers of one type, such as `x.astype('<f4')`";
    const TEXT: &str = "text has no fixed meaning as numbers: save token ids";
    const FIELDS: &str = "[('a', '<f4'), ('b', '<i8', (2,))]";
    let unsupported = |found: &str, advice: &str| -> &'static str {
        let found = if found.is_empty() { String::new() } else { format!(", found {found}") };
        format!("P: unsupported type at byte 20{found}: {advice}").leak()
    };
    // What numpy can save otherwise: the call that does.
    let save = |array: &str| format!("save it with `numpy.save(path, {array})`");
    let bits = |bits| format!("save its bits with `numpy.save(path, x.view(numpy.uint{bits}))`");
    let each_field = "save each field separately with `numpy.save(path, x[name])`";
    let big_endian = |found| -> &'static str {
        let advice = save("x.astype(x.dtype.newbyteorder('<'))");
        format!("P: big-endian numbers at byte 20: wanted little-endian, found {found}: {advice}").leak()
    };
    let fortran = "P: Fortran order at byte 44: wanted C order, in which each row is one piece: ";
    let fortran = format!("{fortran}{}", save("numpy.ascontiguousarray(x)"));
    let number = "a number from 0 to 2^64 - 1";
    let magic = r"P: another format, by the magic at byte 0: wanted \x93NUMPY, found PK\x03\x04PY";
    let large = |found| shape("fewer than 2^64 bytes", found);
    let good = array("'<i2'", "(3, 2)", 12);
    assert_eq!(good.len(), 10 + 57 + 12);
    let table = [
        // The start.
        (vec![], short(8, 0)),
        (good[..7].to_vec(), short(8, 7)),
        (good[..9].to_vec(), short(10, 9)),
        (with(6, &[2])[..11].to_vec(), short(12, 11)),
        (good[..66].to_vec(), short(67, 66)),
        (with(0, b"PK\x03\x04"), magic),
        (with(6, &[0]), "P: unknown version at byte 6: wanted 1.0, 2.0 or 3.0, found 0.0"),
        (with(6, &[4]), "P: unknown version at byte 6: wanted 1.0, 2.0 or 3.0, found 4.0"),
        (with(7, &[1]), "P: unknown version at byte 6: wanted 1.0, 2.0 or 3.0, found 1.1"),
        // Lengths of the header.
        (with(8, &[0, 1]), short(266, 79)),
        (with(8, &[0xFF; 2]), too_long(8, 10_000, 65_535)),
        (with(6, &[2, 0, 0xFF, 0xFF, 0xFF, 0xFF]), too_long(8, 10_000, 4_294_967_295)),
        (with(8, &[0, 0]), bad(10, "a dictionary", "")),
        (with(8, &[56, 0]), bad(66, "`,` or `}`", "")),
        // Lengths of the data.
        (good[..67].to_vec(), cut(67, 12, 0)),
        (good[..78].to_vec(), cut(67, 12, 11)),
        (array("'<i2'", "(3, 2)", 13), cut(67, 12, 13)),
        (array("'<i2'", "(4, 2)", 12), cut(67, 16, 12)),
        (array("'<i2'", "(4611686018427387904, 2)", 0), large("[4611686018427387904, 2]")),
        (array("'|i1'", "(18446744073709551615,)", 3), cut(84, 18_446_744_073_709_551_615, 3)),
        (array("'<i2'", "(18446744073709551615,)", 0), large("[18446744073709551615]")),
        // Shapes that cannot be records.
        (array("'<i2'", "()", 2), shape("at least one axis", "[]")),
        (array("'<i2'", "(3, 0)", 0), shape("no empty rows", "[3, 0]")),
        (array("'<i2'", "(18446744073709551615, 0)", 0), shape("no empty rows", "[18446744073709551615, 0]")),
        (array("'<i2'", "(0, 9223372036854775808)", 0), large("[0, 9223372036854775808]")),
        (array("'<i2'", "(0, 3)", 0), "P: holds no record: wanted at least 6 bytes, found 0"),
        // The dictionary.
        (file("", 0), bad(10, "a dictionary", "")),
        (file("[]", 0), bad(10, "a dictionary", "[]")),
        (file("{}", 0), bad(12, KEYS, "")),
        (file("{\n}\x01\n", 0), bad(13, "nothing after the dictionary", "\\u{1}\\n")),
        (file("{'descr': '<i2', 'shape': (3,)}", 6), bad(41, KEYS, "")),
        (file("{'descr': '<i2', 'descr': '<i2'}", 6), bad(27, KEYS, "'descr': '<i2'}")),
        (file("{'other': 1}", 6), bad(11, KEYS, "'other': 1}")),
        (file("{descr: 1}", 6), bad(11, "a string", "descr: 1}")),
        (file("{'descr", 6), bad(11, "a string", "'descr")),
        (file("{'descr\"", 6), bad(11, "a string", "'descr\"")),
        (file("{'shape' 1}", 6), bad(19, "`:`", "1}")),
        (file("{'fortran_order': 0}", 6), bad(28, "`True` or `False`", "0}")),
        (file("{'shape': 3}", 6), bad(20, "a tuple", "3}")),
        (file("{'shape': (3)}", 6), bad(22, "`,`", ")}")),
        (file("{'shape': (,)}", 6), bad(21, number, ",)}")),
        (file("{'shape': (3, -2)}", 6), bad(24, number, "-2)}")),
        (file("{'shape': (18446744073709551616,)}", 6), bad(21, number, "18446744073709551616,)}")),
        (file("{'shape': (3 2)}", 6), bad(23, "`,`", "2)}")),
        (file("{'shape': (3, 2", 6), bad(25, "`,` or `)`", "")),
        (file("{'shape': (3,", 6), bad(23, number, "")),
        (file("{'descr': 1}", 6), bad(20, "a string", "1}")),
        (file(&format!("{{'{}", "é".repeat(300)), 0), bad(11, "a string", &format!("'{}", "é".repeat(99)))),
        // Types, whatever the length of the data.
        (array("'>i2'", "(3,)", 6), big_endian(">i2")),
        (array("'>c16'", "(3,)", 48), big_endian(">c16")),
        (array("'>f8'", "(3,)", 0), big_endian(">f8")),
        (array("'|i2'", "(3,)", 6), unsupported("|i2", KNOWN)),
        (array("'=i2'", "(3,)", 6), unsupported("=i2", KNOWN)),
        (array("'<f3'", "(3,)", 9), unsupported("<f3", KNOWN)),
        (array("'SUSE'", "(3,)", 9), unsupported("SUSE", KNOWN)),
        (array("'\n'", "(3,)", 6), unsupported("\\n", KNOWN)),
        (array("''", "(3,)", 6), unsupported("", KNOWN)),
        (array("'<f1'", "(3,)", 6), unsupported("<f1", &save("x.astype('<f8')"))),
        (array("'<f12'", "(3,)", 36), unsupported("<f12", &save("x.astype('<f8')"))),
        (array("'<f16'", "(3,)", 0), unsupported("<f16", &save("x.astype('<f8')"))),
        (array("'<V2'", "(3,)", 6), unsupported("<V2", &format!("if it is bfloat16, {}", bits(16)))),
        (array("'|V1'", "(3,)", 3), unsupported("|V1", &format!("if it is an 8-bit float, {}", bits(8)))),
        (array("'<M8[D]'", "(3,)", 24), unsupported("<M8[D]", &save("x.view(numpy.int64)"))),
        (array("'<m8[ns]'", "(3,)", 24), unsupported("<m8[ns]", &save("x.view(numpy.int64)"))),
        (array("'|O'", "(3,)", 6), unsupported("|O", OBJECTS)),
        (array("'|O8'", "(3,)", 24), unsupported("|O8", OBJECTS)),
        (array("'|S5'", "(3,)", 15), unsupported("|S5", TEXT)),
        (array("'<U2'", "(3,)", 24), unsupported("<U2", TEXT)),
        (array(FIELDS, "(3,)", 60), unsupported(FIELDS, each_field)),
        (file("{'descr': [('a', '<i2')]}", 6), unsupported("[('a', '<i2')]", each_field)),
        (file("{'descr': '<i2', 'fortran_order': True, 'shape': (3, 2)}", 0), fortran.leak()),
    ];
    check(|paths| Records::open_npy(paths, Cut::Rows), &good, &table);
}

/// What numpy reads as the same dictionary.
#[test]
fn npy_in_other_words() {
    let folder = tempfile::tempdir().unwrap();
    for header in [
        "{'descr':'<i2','fortran_order':False,'shape':(3,2)}",
        "{'shape': (3, 2, ), 'fortran_order': False, 'descr': '<i2', }     \n",
        " {\t\"descr\" : \"<i2\" , \"fortran_order\" : False , \"shape\" : ( 3 , 2 ) } \r\n\n",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (3L, 2L), }",
    ] {
        let path = write(folder.path(), "x.npy", crate::asked::npy(3, header, &[7; 12]));
        let records = Records::open_npy([&path], Cut::Rows).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((records.len(), records.shape(), records.record_bytes()), (3, &[2][..], 4));
    }
}

/// Julia and MATLAB write `fortran_order: True` for every array. With one long axis its bytes are the same in both orders.
#[test]
fn npy_in_fortran_order_with_one_long_axis() {
    let folder = tempfile::tempdir().unwrap();
    let open = |shape: &str, data| {
        let header = format!("{{'descr': '<i2', 'fortran_order': True, 'shape': {shape}, }}");
        let path = write(folder.path(), "x.npy", npy_of(&header, data));
        Records::open_npy([&path], Cut::Rows).map(|records| (records.len(), records.shape().to_vec()))
    };
    for (shape, data, rows, row) in [
        ("(3,)", 6, 3, &[][..]),
        ("(1,)", 2, 1, &[]),
        ("(3, 1)", 6, 3, &[1]),
        ("(1, 3)", 6, 1, &[3]),
        ("(1, 1, 4, 1)", 8, 1, &[1, 4, 1]),
    ] {
        assert_eq!(open(shape, data).unwrap(), (rows, row.to_vec()), "{shape}");
    }
    for (shape, data) in [("(3, 2)", 12), ("(1, 2, 2)", 8), ("(2, 1, 2)", 8)] {
        let message = open(shape, data).unwrap_err().to_string();
        assert!(message.contains(": Fortran order at byte 44: "), "{shape}: {message}");
    }
    // What is wrong with these is not the order.
    assert!(matches!(open("()", 2), Err(Error::Format { problem: "no records in this shape", .. })));
    assert!(matches!(open("(0,)", 0), Err(Error::TooShort { .. })));
}

#[cfg(feature = "safetensors")]
#[test]
fn safetensors() {
    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.resize(file.len() + data, 1);
        file
    }
    fn tensor(dtype: &str, shape: &str, end: &str, data: usize) -> Vec<u8> {
        file(&format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#), data)
    }
    fn length(length: u64) -> Vec<u8> {
        let mut file = length.to_le_bytes().to_vec();
        file.extend(b"{}");
        file
    }
    let bad = "P: bad header at byte 8: wanted the description of tensors that follow each other, found ..";
    // Eight tensors whose offsets and the header's length are more than 2^64 together.
    let (most, mut at, mut tensors) = ((1_u64 << 61) - 1, 0, String::new());
    for name in ["x", "b", "c", "d", "e", "f", "g", "h"] {
        let end = at + most;
        tensors += &format!(r#","{name}":{{"dtype":"U8","shape":[{most}],"data_offsets":[{at},{end}]}}"#);
        at = end;
    }
    let huge = file(&format!("{{{}}}", &tensors[1..]), 16);
    let huge_end = huge.len() as u64 - 16;
    let good = tensor("I16", "[3,2]", "12", 12);
    let data = good.len() - 12;
    assert_eq!(data, 8 + 57);
    let table = [
        (vec![], short(8, 0)),
        (good[..7].to_vec(), short(8, 7)),
        (good[..64].to_vec(), short(65, 64)),
        (length(3), short(11, 10)),
        (length(100_000_000), short(100_000_008, 10)),
        (length(100_000_001), too_long(0, 100_000_000, 100_000_001)),
        (length(u64::MAX), too_long(0, 100_000_000, u64::MAX)),
        (good[..data].to_vec(), cut(65, 12, 0)),
        (good[..data + 11].to_vec(), cut(65, 12, 11)),
        (tensor("I16", "[3,2]", "12", 13), cut(65, 12, 13)),
        (huge, cut(huge_end, u64::MAX - 7, 16)),
        (file("{}", 0), "P: no such tensor or array: wanted \"x\", found []"),
        (file("", 0), bad),
        (file("no", 0), bad),
        (tensor("I16", "[3,3]", "12", 12), bad),
        (tensor("I16", "[3,2]", "-1", 12), bad),
        (tensor("I8", "[18446744073709551615,2]", "12", 12), bad),
        // A gap before the tensor, two that overlap, one that ends before it begins, nesting, and no text.
        (file(r#"{"x":{"dtype":"I8","shape":[3],"data_offsets":[1,4]}}"#, 4), bad),
        (
            file(
                r#"{"x":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},
                    "y":{"dtype":"I8","shape":[2],"data_offsets":[1,3]}}"#,
                3,
            ),
            bad,
        ),
        (file(r#"{"x":{"dtype":"I8","shape":[3],"data_offsets":[3,0]}}"#, 3), bad),
        (file(&"[".repeat(100_000), 0), bad),
        (file(&r#"{"x":"#.repeat(1000), 0), bad),
        ([&[2, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFE][..]].concat(), bad),
        (tensor("I24", "[3,2]", "12", 12), bad),
        (tensor("F4", "[3]", "1", 1), bad),
        (tensor("F8_E8M0", "[3]", "3", 3), "P: unsupported type at byte 8, found F8_E8M0: .."),
        (tensor("F32", "[]", "4", 4), "P: no records in this shape: wanted at least one axis, found []"),
        (tensor("F32", "[3,0]", "0", 0), "P: no records in this shape: wanted no empty rows, found [3, 0]"),
        (tensor("F32", "[0,3]", "0", 0), "P: holds no record: wanted at least 12 bytes, found 0"),
        (
            file(
                r#"{"b\n":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},
                    "a":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}"#,
                2,
            ),
            "P: no such tensor or array: wanted \"x\", found [\"a\", \"b\\n\"]",
        ),
    ];
    check(|paths| Records::open_safetensors(paths, "x", Cut::Rows), &good, &table);
}

/// A model has thousands of tensors: the message has the first few, the error has all.
#[cfg(feature = "safetensors")]
#[test]
fn many_names() {
    let tensors = (0..1000).map(|i| (format!("t{i:04}"), "U8", [1], 1));
    let file = twinbuf_testing::safetensors(tensors, [0; 1000]);
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "model.safetensors", file);
    let error = Records::open_safetensors([&path], "t1000", Cut::Rows).unwrap_err();
    let Error::NoTensor { found, .. } = &error else { panic!("{error:?}") };
    assert_eq!((found.len(), &*found[0], &*found[999]), (1000, "t0000", "t0999"));
    let message = error.to_string();
    assert!(message.ends_with("\"t0015\"] and 984 more"), "{message}");
    assert!(message.contains("no such tensor or array: wanted \"t1000\", found [\"t0000\", "), "{message}");
}

fn number(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// The fronts of files of other formats, and the advice for each.
fn foreign() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let at = |place: usize, magic: &[u8]| [&vec![b'a'; place], magic].concat();
    let idx: Vec<u8> = [0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 18].into();
    let lines = "{\"text\": \"A caf\u{e9} at the end of the street.\"}\n".repeat(30).into_bytes();
    vec![
        ("numpy's .npy", b"\x93NUMPY\x01\x00".to_vec(), "`Records::open_npy`"),
        ("llm.c's tokens", number(&[20_240_520, 1, 3]), "`Records::open_llm_c`"),
        ("llm.c's tokens", number(&[20_240_801, 7, 3]), "`Records::open_llm_c`"),
        ("llm.c's evaluation data", number(&[20_240_522, 1]), "many lengths"),
        ("safetensors", b"\x10\0\0\0\0\0\0\0{\"x\":{".to_vec(), "`Records::open_safetensors`"),
        ("GGUF", b"GGUF\x03\0\0\0".to_vec(), "`Tensors::open`"),
        ("Megatron-LM's index", b"MMIDIDX\0\0\x01\0".to_vec(), "`RaggedRecords::open_megatron`"),
        ("IDX (MNIST)", idx, "header(16)"),
        ("zip", b"PK\x03\x04\x14\0".to_vec(), "numpy.load"),
        ("gzip", b"\x1f\x8b\x08\0\0\0\0\0\x02\x03".to_vec(), "decompress"),
        ("zstd", b"\x28\xb5\x2f\xfd\x04".to_vec(), "decompress"),
        ("xz", b"\xfd7zXZ\0\0\x04".to_vec(), "decompress"),
        ("bzip2", b"BZh91AY&SY\x05".to_vec(), "decompress"),
        ("LZ4", b"\x04\x22\x4d\x18\x64".to_vec(), "decompress"),
        ("7z", b"7z\xbc\xaf\x27\x1c\0\x04".to_vec(), "unpack"),
        ("tar", at(257, b"ustar\0"), "unpack"),
        ("HDF5", b"\x89HDF\r\n\x1a\n".to_vec(), "h5py"),
        ("Parquet", b"PAR1\x15".to_vec(), "read_table"),
        ("Arrow IPC", b"ARROW1\0\0".to_vec(), "to_numpy"),
        ("Arrow IPC", number(&[-1, 120, 16, 0x0A_0000]), "to_numpy"),
        ("TFRecord", b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\x0a\x16".to_vec(), "numpy.save"),
        ("pickle", b"\x80\x04\x95\x10".to_vec(), "numpy.save"),
        ("pickle", b"\x80\x02}q\0(X\x05\0\0\0".to_vec(), "numpy.save"),
        ("SQLite", b"SQLite format 3\0\x10\0".to_vec(), "numpy.save"),
        ("LMDB", [&[0; 16][..], &0xBEEF_C0DE_u32.to_le_bytes()].concat(), "numpy.save"),
        ("PNG", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec(), "decode"),
        ("JPEG", b"\xff\xd8\xff\xe0\0\x10JFIF".to_vec(), "decode"),
        ("GIF", b"GIF89a\x01\0".to_vec(), "decode"),
        ("RIFF", b"RIFF\x24\0\0\0WEBPVP8 ".to_vec(), "decode"),
        ("MP4", b"\0\0\0\x18ftypisom".to_vec(), "decode"),
        ("Ogg", b"OggS\0\x02\0\0".to_vec(), "decode"),
        ("FLAC", b"fLaC\0\0\0\x22".to_vec(), "decode"),
        ("PDF", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n".to_vec(), "no records"),
        ("ELF", b"\x7fELF\x02\x01\x01\0".to_vec(), "no records"),
        ("JSON", lines, "tokenize"),
        ("text", "Once upon a time, in a caf\u{e9},\n\tthere was.\r\n".repeat(40).into_bytes(), "tokenize"),
        // Labels, one a place.
        ("text", "1,2,3\n".repeat(200).into_bytes(), "tokenize"),
        ("text", "0\n1\n1\n0\n2\n".repeat(200).into_bytes(), "tokenize"),
        // As `numpy.savetxt` writes numbers: words of 24 letters.
        (
            "text",
            (1..99).map(|n| format!("{:.18}e-01 ", 9.876 / f64::from(n))).collect::<String>().into_bytes(),
            "tokenize",
        ),
        ("text", (0..200).map(|n| format!("{n},{}\n", n * n)).collect::<String>().into_bytes(), "tokenize"),
    ]
}

/// `open_headerless` refuses a file that starts like one of another format, with advice in the error. It accepts text
/// and JSON as `DType::U8`, and files whose first bytes are only similar.
#[test]
fn known_formats_are_no_bare_numbers() {
    fn front(bytes: &[u8]) -> Vec<u8> {
        let mut file = bytes.to_vec();
        file.resize(1024, 0);
        file
    }
    let tar = |magic: &[u8]| [&[b'a'; 257][..], magic].concat();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.bin");
    let open_as = |file: &[u8], dtype| {
        Records::open_headerless([write(folder.path(), "train.bin", front(file))], dtype, Cut::Rows)
    };
    let open = |file: &[u8]| open_as(file, DType::U16);
    let mut taken = Vec::new();
    for (name, file, advice) in foreign() {
        match open(&file) {
            Ok(_) => taken.push(name),
            Err(error) => {
                let message = error.to_string();
                assert!(matches!(error, Error::Format { problem: "another format", .. }), "{message}");
                assert!(message.contains(name) && message.contains(advice), "{name}: {message}");
            }
        }
    }
    assert!(taken.is_empty(), "taken for tokens: {taken:?}");
    // Models of bytes are trained on text.
    for (name, file, _) in foreign() {
        assert_eq!(open_as(&file, DType::U8).is_ok(), ["JSON", "text"].contains(&name), "{name}");
    }
    let text = "Once upon a time".repeat(10);
    for near in [
        b"\x93NUMPX\x01\x00".to_vec(),
        number(&[20_240_520, 2, 3]),
        number(&[20_240_801, 1, 3]),
        // A header longer than the file, and one that is no JSON.
        b"\x10\0\0\0\0\0\0\x01{\"x\":{".to_vec(),
        b"\x10\0\0\0\0\0\0\0[\"x\":{".to_vec(),
        b"\x1f\x8b\x07\0\0\0\0\0\x02\x03".to_vec(),
        b"\x1f\x8b\x08\0\0\0\0\0\x02\x7f".to_vec(),
        b"PAR2".to_vec(),
        tar(b"ustax"),
        b"GGUF\x04\x05\0\0".to_vec(),
        // Axes that do not give the file's size, another checksum, and text with a 0 in it.
        vec![0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 19],
        b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x23\x0a\x16".to_vec(),
        number(&[-1, -1, -1]),
        [text.as_bytes(), &[0], text.as_bytes()].concat(),
        // Temperatures of a wall, with letters alone and with spaces; millimeters, with line ends; a sensor of 14 bits.
        (0..512_u16).flat_map(|at| (29_275 - at % 32).to_le_bytes()).collect(),
        (0..512_u16).flat_map(|at| (29_216 + at * 7 % 95).to_le_bytes()).collect(),
        (0..512_u16).flat_map(|at| (2640 + at * 7 % 40).to_le_bytes()).collect(),
        (0..512_u16).flat_map(|at| (8224 + at * 7 % 95).to_le_bytes()).collect(),
        // Three sensors in turn. Pixels of 8 bits, made 16 bits wide.
        (0..512_u16)
            .flat_map(|at| ([8272, 24_864, 2640][usize::from(at % 3)] + at * 7 % 14).to_le_bytes())
            .collect(),
        (0..512_u16).flat_map(|at| (257 * (32 + at * 7 % 95)).to_le_bytes()).collect(),
        (0..512_u16).flat_map(|token| (token * 97 % 50_257).to_le_bytes()).collect(),
        Vec::new(),
    ] {
        assert_eq!(open(&near).unwrap().len(), 512, "{near:?}");
    }
    // A header that is skipped may be of any format. What is compressed has no numbers behind it.
    for (name, file, advice) in foreign() {
        std::fs::write(&path, [&file, &front(&[])[..]].concat()).unwrap();
        let options = Records::options().header(file.len() as u64);
        let records = options.open_headerless([&path], DType::U16, Cut::Rows);
        assert_eq!(records.is_ok(), advice != "decompress", "{name}");
    }
    // Shorter than any header.
    std::fs::write(&path, [0x1f, 0x8b]).unwrap();
    assert_eq!(Records::open_headerless([&path], DType::U16, Cut::Rows).unwrap().len(), 1);
}

/// What a clone without Git LFS has in place of a large file.
#[test]
fn a_pointer_of_git_lfs_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let pointer = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 988097824\n",
        "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    );
    std::fs::write(&path, &pointer).unwrap();
    std::fs::write(path.with_extension("idx"), &pointer).unwrap();
    let data = write(folder.path(), "data.bin", [7; 400]);
    std::fs::write(data.with_extension("idx"), &pointer).unwrap();
    let named = |error: &Error| {
        let message = error.to_string();
        assert!(message.contains("Git LFS") && message.contains("`git lfs pull`"), "{message}");
    };
    crate::bad_files::refused_by_all(&path, named);
    named(&RaggedRecords::open_indexed([(&path, &path)]).expect_err("a pointer"));
    named(&RaggedRecords::open_megatron([&data]).expect_err("a pointer"));
}

/// A pattern and a folder in place of files: the message names the function that expands them.
#[test]
fn what_names_several_files_is_expanded_by_a_function() {
    let folder = tempfile::tempdir().unwrap();
    for source in
        [folder.path().join("*.bin"), folder.path().join("shard-[0-9].bin"), folder.path().to_owned()]
    {
        let message = Records::open_llm_c([&source], Cut::Rows).unwrap_err().to_string();
        assert!(message.contains("`files()`"), "{message}");
    }
    let missing = Records::open_llm_c([folder.path().join("0.bin")], Cut::Rows).unwrap_err();
    assert!(!missing.to_string().contains("files()"), "{missing}");
}
