//! numpy's `.npy`: a magic string, a version, and a Python dictionary that describes the array.
//!
//! The parser is written here, because the crates that have one (npyz, ndarray-npy) need many more
//! crates for the dictionary.

use std::ops::Range;
use std::path::Path;

use super::{Array, checked, excerpt, little, open};
use crate::file::DataFile;
use crate::{Cut, DType, Error, Options, Records};

/// The first bytes of a file. The version follows: major, minor.
const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// The longest dictionary in bytes. numpy reads no longer one by default (`_MAX_HEADER_SIZE` in its
/// `numpy/lib/_format_impl.py`). A plain array needs about 100 bytes.
const LONGEST: u64 = 10_000;

impl Records {
    /// Opens arrays saved by `numpy.save`: `.npy` version 1.0, 2.0 or 3.0. `cut` sets how rows become records; a row
    /// is one entry along the first axis.
    ///
    /// The array must be in C order, or have at most one axis whose length is not 1. Supported types are `bool`, `int8`
    /// to `int64`, `uint8` to `uint64`, `float16` to `float64`, `complex64` and `complex128`. If there are several
    /// files, only the length of the first axis may differ. numpy documents the format in `numpy.lib.format`.
    ///
    /// # Errors
    ///
    /// - [`Error::Format`]: the header is invalid, or exceeds 10 000 bytes, numpy's default limit; the elements have
    ///   another type, such as text, dates, objects, structures or `longdouble`, or are big-endian; the array is in
    ///   another order, has no axis, empty rows or 2^64 bytes or more; or its size does not match the size of the file.
    /// - [`Error::Mixed`]: the rows of a file differ in type or shape from the first file.
    /// - [`Error::TooShort`], [`Error::ZeroRecord`], [`Error::ZeroStride`]: a file contains less than one record, or
    ///   the window or the stride is 0.
    /// - The remaining errors of [`Options::open`](crate::Options::open), without [`Error::Ragged`]; [`Error::Read`],
    ///   [`Error::Truncated`]: a header cannot be read.
    ///
    /// ```
    /// use twinbuf_mmap::{Cut, DType, Plan, Records};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("x.npy");
    /// // As numpy.save writes numpy.array([[1, 2], [3, 4], [5, 6]], dtype=numpy.float32).
    /// let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }";
    /// let mut file = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    /// file.extend(format!("{header:117}\n").bytes());
    /// file.extend([1_f32, 2.0, 3.0, 4.0, 5.0, 6.0].into_iter().flat_map(f32::to_le_bytes));
    /// std::fs::write(&path, &file)?;
    ///
    /// let records = Records::open_npy([&path], Cut::Rows)?;
    /// assert_eq!(records.len(), 3);
    /// assert_eq!((records.dtype(), records.shape()), (DType::F32, &[2][..]));
    ///
    /// // A buffer of numbers is aligned for them, so its bytes can be read into as they are.
    /// let batch = Plan::builder(3).batch(3).build()?.batch(0, 0).unwrap();
    /// let mut numbers = vec![0_f32; 6];
    /// records.read(&batch, bytemuck::cast_slice_mut(&mut numbers))?;
    /// assert_eq!(numbers, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_npy(paths: impl IntoIterator<Item: AsRef<Path>>, cut: Cut) -> Result<Self, Error> {
        Self::options().open_npy(paths, cut)
    }
}

impl Options {
    /// Opens files as [`Records::open_npy`] does, with these options.
    ///
    /// # Errors
    ///
    /// The errors of [`Records::open_npy`].
    pub fn open_npy(self, paths: impl IntoIterator<Item: AsRef<Path>>, cut: Cut) -> Result<Records, Error> {
        open(self, paths, cut, |file| parse(file, &(0..file.len)))
    }
}

/// Reads the header of an array that is in the part `part` of the file.
pub(super) fn parse(file: &DataFile, part: &Range<u64>) -> Result<Array, Error> {
    let header = |start: usize, len| file.header_within(part, start as u64, len);
    let start = header(0, MAGIC.len() + 2)?;
    let (magic, version) = start.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(file.bad_magic(part.start, "\\x93NUMPY", magic.escape_ascii().to_string()));
    }
    // Version 2 widened the header's length from 16 to 32 bits. Version 3 is version 2 with UTF-8 in place of Latin-1.
    let offset = start.len();
    let width = match *version {
        [1, 0] => 2,
        [2 | 3, 0] => 4,
        _ => {
            let found = format!("{}.{}", version[0], version[1]);
            return Err(file.bad_version(part.start + MAGIC.len() as u64, "1.0, 2.0 or 3.0", found));
        }
    };
    let text = offset + width;
    let length = file.header_len(part.start + offset as u64, LONGEST, little(&header(offset, width)?))?;
    let header = header(text, length)?;
    let end = part.start + (text + length) as u64;
    let (dtype, shape) = Parser { file, rest: &header, end }.dictionary()?;
    checked(file, part.end, Array { offset: end, dtype, shape })
}

/// Parses the dictionary from front to back. Every error has the offset in the file.
struct Parser<'a> {
    file: &'a DataFile,
    /// What is left to parse.
    rest: &'a [u8],
    /// The offset in the file of the end of the dictionary.
    end: u64,
}

impl<'a> Parser<'a> {
    /// Parses the three entries, each once and in any order, and nothing else.
    fn dictionary(&mut self) -> Result<(DType, Vec<u64>), Error> {
        let (mut dtype, mut fortran, mut shape) = (None, None, None);
        self.expect(b'{', "a dictionary")?;
        while !self.accept(b'}') {
            self.space();
            let key = self.rest;
            match self.string()? {
                b"descr" if dtype.is_none() => dtype = Some(self.value(Self::dtype)?),
                b"fortran_order" if fortran.is_none() => fortran = Some(self.value(Self::true_at)?),
                b"shape" if shape.is_none() => shape = Some(self.value(Self::shape)?),
                _ => {
                    self.rest = key;
                    return Err(self.bad("'descr', 'fortran_order' and 'shape', each once"));
                }
            }
            if !self.accept(b',') {
                self.expect(b'}', "`,` or `}`")?;
                break;
            }
        }
        self.space();
        if !self.rest.is_empty() {
            return Err(self.bad("nothing after the dictionary"));
        }
        let (Some(dtype), Some(fortran), Some(shape)) = (dtype, fortran, shape) else {
            return Err(self.bad("'descr', 'fortran_order' and 'shape', each once"));
        };
        // If at most one axis has a length other than 1, both orders have the same bytes. numpy then writes `False`.
        // Libraries that write `True` for every array (NPZ.jl, npy-matlab) also write it for such an array.
        if let Some(at) = fortran.filter(|_| shape.iter().filter(|&&axis| axis != 1).count() > 1) {
            let wanted = "C order, in which each row is one piece";
            let advice = "save it with `numpy.save(path, numpy.ascontiguousarray(x))`";
            return Err(self.file.bad("Fortran order", Some(at), wanted, "", advice));
        }
        Ok((dtype, shape))
    }

    /// Parses the colon, and then the value with `read`.
    fn value<T>(&mut self, read: fn(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        self.expect(b':', "`:`")?;
        self.space();
        read(self)
    }

    /// Parses numpy's name of the type: byte order, kind and bytes.
    fn dtype(&mut self) -> Result<DType, Error> {
        let (at, rest) = (self.at(), self.rest);
        if matches!(rest.first(), Some(b'[' | b'(')) {
            // A list stands for a structure, a tuple for a type with a shape of its own: neither is supported. The list
            // ends at the last `]`, because no other value has one.
            let end = rest.iter().rposition(|&byte| byte == b']').map_or(rest.len(), |last| last + 1);
            return Err(self.unsupported(&rest[..end], at));
        }
        let name = self.string()?;
        let known = |dtype: &DType| {
            let letter = format!("{dtype}").as_bytes()[0];
            // numpy has no names for these three types.
            let named = !matches!(dtype, DType::Bf16 | DType::F8E4M3 | DType::F8E5M2);
            named && name.get(1..) == Some(format!("{}{}", char::from(letter), dtype.size()).as_bytes())
        };
        let (Some(order), Some(dtype)) = (name.first(), DType::ALL.into_iter().find(known)) else {
            return Err(self.unsupported(name, at));
        };
        match order {
            b'<' => Ok(dtype),
            b'|' if dtype.size() == 1 => Ok(dtype),
            b'>' if dtype.size() > 1 => {
                let advice = "save it with `numpy.save(path, x.astype(x.dtype.newbyteorder('<')))`";
                Err(self.file.bad("big-endian numbers", Some(at), "little-endian", excerpt(name), advice))
            }
            _ => Err(self.unsupported(name, at)),
        }
    }

    /// Parses `True` or `False`. Returns the offset of `True` in the file.
    fn true_at(&mut self) -> Result<Option<u64>, Error> {
        for (word, at) in [(&b"False"[..], None), (b"True", Some(self.at()))] {
            if let Some(rest) = self.rest.strip_prefix(word) {
                self.rest = rest;
                return Ok(at);
            }
        }
        Err(self.bad("`True` or `False`"))
    }

    /// Parses a tuple of numbers. As in Python, a single number needs a comma after it.
    fn shape(&mut self) -> Result<Vec<u64>, Error> {
        let mut shape = Vec::new();
        self.expect(b'(', "a tuple")?;
        while !self.accept(b')') {
            self.space();
            shape.push(self.number()?);
            if !self.accept(b',') {
                if shape.len() == 1 {
                    return Err(self.bad("`,`"));
                }
                self.expect(b')', "`,` or `)`")?;
                break;
            }
        }
        Ok(shape)
    }

    fn number(&mut self) -> Result<u64, Error> {
        let digits = self.rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = self.rest.split_at(digits);
        let Some(number) = std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()) else {
            return Err(self.bad("a number from 0 to 2^64 - 1"));
        };
        // Python 2 wrote an `L` after long integers. numpy drops it too (`_filter_header`).
        self.rest = rest.strip_prefix(b"L").unwrap_or(rest);
        Ok(number)
    }

    /// Parses the text between two quotes. Escapes are not needed: numpy writes none here, and text with a backslash is
    /// an unknown key or type.
    fn string(&mut self) -> Result<&'a [u8], Error> {
        let found = self.rest.split_first().and_then(|(quote, rest)| {
            let len = rest.iter().position(|byte| byte == quote)?;
            matches!(quote, b'\'' | b'"').then(|| rest.split_at(len))
        });
        let (string, rest) = found.ok_or_else(|| self.bad("a string"))?;
        self.rest = &rest[1..];
        Ok(string)
    }

    fn space(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    /// Skips space, and then `byte` if it comes next. Returns whether it did.
    fn accept(&mut self, byte: u8) -> bool {
        self.space();
        let rest = self.rest.strip_prefix(&[byte]);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, byte: u8, wanted: &'static str) -> Result<(), Error> {
        if self.accept(byte) { Ok(()) } else { Err(self.bad(wanted)) }
    }

    /// The offset in the file of what is left.
    fn at(&self) -> u64 {
        self.end - self.rest.len() as u64
    }

    fn bad(&self, wanted: &'static str) -> Error {
        self.file.bad_header(self.at(), wanted, self.rest)
    }

    fn unsupported(&self, name: &[u8], at: u64) -> Error {
        self.file.unsupported(at, excerpt(name), advice(name))
    }
}

/// Returns what to do with an array `x` of a type that is not supported. `name` is numpy's name of the type: byte
/// order, kind and bytes.
const fn advice(name: &[u8]) -> &'static str {
    match name {
        [_, b'V', b'2'] => "if it is bfloat16, save its bits with `numpy.save(path, x.view(numpy.uint16))`",
        [_, b'V', b'1'] => {
            "if it is an 8-bit float, save its bits with `numpy.save(path, x.view(numpy.uint8))`"
        }
        [b'<' | b'>', b'f', b'1', ..] => "save it with `numpy.save(path, x.astype('<f8'))`",
        [b'[', ..] => "save each field separately with `numpy.save(path, x[name])`",
        [b'<' | b'>', b'M' | b'm', b'8', ..] => "save it with `numpy.save(path, x.view(numpy.int64))`",
        [b'|', b'O'] | [b'|', b'O', b'8'] => {
            "it holds Python objects: save numbers of one type, such as `x.astype('<f4')`"
        }
        [b'<' | b'>' | b'|', b'U' | b'S' | b'a', b'0'..=b'9', ..] => {
            "text has no fixed meaning as numbers: save token ids"
        }
        _ => "wanted bool, integers of 8 to 64 bits, floats of 16 to 64 bits, or complex numbers",
    }
}
