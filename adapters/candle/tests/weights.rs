//! Weights: the same bytes as candle's own loaders, and products in the slot.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use candle_core::CpuStorage::{F4, F6E2M3, F6E3M2, F8E8M0};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor, gguf_file};
use candle_core::{DType, Device, Module, Storage, Tensor, safetensors};
use twinbuf::mmap::ReadMode;
use twinbuf::stream::{Group, Tensors};
use twinbuf::{BoxError, Error, mmap};
use twinbuf_candle::{TensorError, linear, load, weight};

const CPU: Device = Device::Cpu;

/// A `safetensors` file: name, type, shape and bytes of each tensor. The data begins at any multiple of 8.
fn write(path: &Path, tensors: &[(&str, &str, Vec<usize>, usize)]) -> Result<(), BoxError> {
    let (mut header, mut end) = (Vec::new(), 0);
    for (name, dtype, shape, bytes) in tensors {
        let range = format!("{end},{}", end + bytes);
        header.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{range}]}}"#));
        end += bytes;
    }
    let header = format!("{{{}}}", header.join(","));
    let header = format!("{header:width$}", width = header.len().next_multiple_of(8));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    // No pattern of a block's length, and no NaN, which is not equal to itself.
    file.extend((0..end).map(|at| (at * 7 + at / 251) as u8 & 0x3f));
    Ok(std::fs::write(path, file)?)
}

/// In `target`, where files can be read past the page cache.
fn folder() -> std::io::Result<tempfile::TempDir> {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))
}

/// Drops a file's pages, to have it read past the page cache.
fn evict(path: &PathBuf) -> Result<(), BoxError> {
    let records = twinbuf::Records::open([path], 1)?;
    Ok(records.ranges().evict()?)
}

#[test]
fn a_checkpoint_is_what_candle_loads() -> Result<(), BoxError> {
    let folder = folder()?;
    // Small ones, and ones of several reads.
    let large = (9 << 20) + 40;
    let first = [
        ("u8", "U8", vec![7], 7),
        ("odd", "U8", vec![large + 1], large + 1),
        ("i16", "I16", vec![3, 5], 30),
        ("u16", "U16", vec![5], 10),
        ("u32", "U32", vec![4], 16),
        ("i32", "I32", vec![2, 2], 16),
        ("i64", "I64", vec![3], 24),
        ("none", "F32", vec![0, 4], 0),
    ];
    let second = [
        ("f16", "F16", vec![large / 2], large),
        ("bf16", "BF16", vec![3, 1 << 20], 6 << 20),
        ("f32", "F32", vec![large / 4], large),
        ("f64", "F64", vec![], 8),
        ("e4m3", "F8_E4M3", vec![9], 9),
        ("f4", "F4", vec![4], 2),
        ("f6", "F6_E2M3", vec![4], 3),
        ("f6.b", "F6_E3M2", vec![4], 3),
        ("scale", "F8_E8M0", vec![3], 3),
    ];
    let paths = [folder.path().join("a.safetensors"), folder.path().join("b.safetensors")];
    write(&paths[0], &first)?;
    write(&paths[1], &second)?;
    let mut wanted = safetensors::load(&paths[0], &CPU)?;
    wanted.extend(safetensors::load(&paths[1], &CPU)?);
    let model = Tensors::open(&paths)?;
    for cold in [false, true] {
        if cold {
            paths.iter().try_for_each(evict)?;
        }
        let found = load(&model, &CPU)?;
        assert_eq!(found.len(), first.len() + second.len());
        for (name, tensor) in &found {
            same(name, tensor, &wanted[name])?;
        }
    }
    // The same through slots, and one tensor of a layer.
    let mut layers =
        twinbuf::stream(model.groups_by(|name| (name != "none").then_some(name.len()))?).build()?;
    for layer in layers.pass() {
        for view in layer?.tensors() {
            same(view.name(), &weight(&view, &CPU)?, &wanted[view.name()])?;
        }
    }
    Ok(())
}

/// No panic: the caller's thread reads too.
#[test]
#[cfg(target_os = "linux")]
fn a_checkpoint_is_read_where_no_thread_can_start() -> Result<(), BoxError> {
    if std::env::var_os("NO_THREADS").is_some() {
        let folder = folder()?;
        let path = folder.path().join("x.safetensors");
        write(&path, &[("x", "U8", vec![9 << 20], 9 << 20)])?;
        let found = load(&Tensors::open([&path])?, &CPU)?;
        return same("x", &found["x"], &safetensors::load(&path, &CPU)?["x"]);
    }
    // No machine has as much memory for a stack; the test then runs on the main thread.
    let child = std::process::Command::new(std::env::current_exe()?)
        .args(["--exact", "a_checkpoint_is_read_where_no_thread_can_start"])
        .envs([("NO_THREADS", ""), ("RUST_MIN_STACK", "1000000000000000")])
        .output()?;
    assert!(child.status.success(), "{child:?}");
    Ok(())
}

/// Checks that two tensors have the same type, shape and bytes: it compares the files that candle saves. For the
/// types that candle cannot save, it compares the bytes and the debug text.
fn same(name: &str, found: &Tensor, wanted: &Tensor) -> Result<(), BoxError> {
    let file = |tensor: &Tensor| -> Result<Vec<u8>, BoxError> {
        if let Storage::Cpu(F4(bytes) | F6E2M3(bytes) | F6E3M2(bytes) | F8E8M0(bytes)) =
            &*tensor.storage_and_layout().0
        {
            return Ok([bytes, format!("{tensor:?}").as_bytes()].concat());
        }
        let file = tempfile::NamedTempFile::new()?;
        tensor.save_safetensors("x", file.path())?;
        Ok(std::fs::read(file.path())?)
    };
    assert!(file(found)? == file(wanted)?, "{name}: {found:?}, wanted {wanted:?}");
    Ok(())
}

#[test]
fn what_cannot_be_loaded_is_an_error() -> Result<(), BoxError> {
    let folder = folder()?;
    let path = folder.path().join("model.safetensors");
    write(&path, &[("a", "F32", vec![2], 8), ("complex", "C64", vec![1], 8)])?;
    match load(&Tensors::open([&path])?, &CPU) {
        Err(TensorError::Weight { name, found }) => assert_eq!((&*name, &*found), ("complex", "c64 [1]")),
        other => panic!("{other:?}"),
    }
    // Cut off in the second of three tensors of several reads.
    let length = 9 << 20;
    write(&path, &["a", "b", "c"].map(|name| (name, "U8", vec![length], length)))?;
    let model = Tensors::open([&path])?;
    std::fs::OpenOptions::new().write(true).open(&path)?.set_len(12 << 20)?;
    for cold in [false, true] {
        if cold {
            evict(&path)?;
        }
        match load(&model, &CPU) {
            Err(TensorError::Batch(Error::Open(mmap::Error::Truncated { path: found, .. }))) => {
                assert_eq!(found, path);
            }
            other => panic!("{other:?}"),
        }
    }
    Ok(())
}

/// Matrices of 64 rows of 256, of types for which candle has a kernel.
fn matrices() -> Result<Vec<(String, QTensor)>, BoxError> {
    use GgmlDType::{BF16, F16, F32, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    let numbers =
        Tensor::from_iter((0..64 * 256).map(|i| (i as f32 * 0.7).sin()), &CPU)?.reshape((64, 256))?;
    let quantized = |dtype| Ok((format!("layer.0.{dtype:?}"), QTensor::quantize(&numbers, dtype)?));
    [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K]
        .map(quantized)
        .into_iter()
        .collect()
}

fn only_layer(path: &Path) -> Result<Arc<Group>, BoxError> {
    let groups = Tensors::open([path])?.groups_by(|_| Some(()))?;
    let group = twinbuf::stream(groups).build()?.pass().next().expect("a group")?;
    Ok(Arc::new(group))
}

#[test]
fn products_in_the_slot_are_those_of_candles_own_matrices() -> Result<(), BoxError> {
    let folder = folder()?;
    let path = folder.path().join("model.gguf");
    let matrices = matrices()?;
    let listed: Vec<_> = matrices.iter().map(|(name, matrix)| (&**name, matrix)).collect();
    gguf_file::write(&mut std::fs::File::create(&path)?, &[], &listed)?;
    let layer = only_layer(&path)?;
    let mut file = std::fs::File::open(&path)?;
    let content = gguf_file::Content::read(&mut file)?;
    // One row, as when tokens are generated, and several, as in a prompt.
    for rows in [1, 5, 33] {
        let x =
            Tensor::from_iter((0..rows * 256).map(|i| (i as f32 * 0.3).cos()), &CPU)?.reshape((rows, 256))?;
        for (name, _) in &matrices {
            let wanted = QMatMul::QTensor(Arc::new(content.tensor(&mut file, name, &CPU)?));
            let found = linear(&layer, name)?;
            for x in [x.clone(), x.to_dtype(DType::F16)?] {
                same(name, &found.forward(&x)?, &wanted.forward(&x)?)?;
            }
            let ids = Tensor::new(&[63u32, 0, 7], &CPU)?;
            same(name, &found.embedding(&ids)?, &wanted.embedding(&ids)?)?;
            assert!(found.embedding(&Tensor::new(&[64u32], &CPU)?).is_err(), "{name}");
            let dequantized = |matrix: &QMatMul| match matrix {
                QMatMul::QTensor(matrix) => matrix.dequantize(&CPU),
                _ => panic!("{name} was copied"),
            };
            same(name, &dequantized(&found)?, &dequantized(&wanted)?)?;
        }
    }
    Ok(())
}

#[test]
fn a_matrix_keeps_its_slot() -> Result<(), BoxError> {
    let folder = folder()?;
    let path = folder.path().join("model.safetensors");
    let names: Vec<String> = (0..4).map(|layer| format!("layers.{layer}.up")).collect();
    write(&path, &[0, 1, 2, 3].map(|layer| (&*names[layer], "F32", vec![8, 4], 128)))?;
    let wanted = safetensors::load(&path, &CPU)?;
    let x = Tensor::new(&[[1f32, 2.0, 3.0, 4.0]], &CPU)?;
    for mode in [ReadMode::Auto, ReadMode::Direct] {
        let layers = Tensors::open([&path])?.groups_by(|name| Some(name.to_owned()))?;
        let mut layers =
            twinbuf::stream(layers).read_mode(mode).held_timeout(Duration::from_millis(20)).build()?;
        let mut pass = layers.pass();
        let matrix = linear(&Arc::new(pass.next().expect("the first")?), "up")?;
        drop(pass.next().expect("the second")?);
        // The third would need the slot.
        assert!(matches!(pass.next(), Some(Err(Error::SlotHeld { .. }))));
        let wanted = x.matmul(&wanted["layers.0.up"].t()?)?;
        assert_eq!(matrix.forward(&x)?.to_vec2::<f32>()?, wanted.to_vec2::<f32>()?);
        drop((pass, matrix));
        let matrix = |layer| Ok::<_, BoxError>(linear(&Arc::new(layer?), "up").map(drop)?);
        assert_eq!(layers.pass().map(matrix).filter(Result::is_ok).count(), 4);
    }
    Ok(())
}

#[test]
fn what_is_no_matrix_is_an_error() -> Result<(), BoxError> {
    let folder = folder()?;
    let path = folder.path().join("model.safetensors");
    write(
        &path,
        &[("m.a", "I32", vec![2, 2], 16), ("m.b", "F32", vec![2, 2], 16), ("m.one", "F32", vec![], 4)],
    )?;
    let layer = only_layer(&path)?;
    assert!(matches!(linear(&layer, "a"), Err(TensorError::Weight { .. })));
    assert!(matches!(linear(&layer, "one"), Err(TensorError::Candle(_))));
    assert!(matches!(linear(&layer, "c"), Err(TensorError::Batch(Error::Tensor { .. }))));
    // A file whose alignment is 1, with a block at an odd byte.
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut file =
        [b"GGUF".to_vec(), 3u32.to_le_bytes().to_vec(), [1u64, 1].map(u64::to_le_bytes).concat()].concat();
    file.extend([text("general.alignment"), [4u32, 1].map(u32::to_le_bytes).concat(), text("m.ab")].concat());
    let (dimensions, offset) =
        ([2u32.to_le_bytes().to_vec(), [32u64, 1].map(u64::to_le_bytes).concat()], 0u64);
    let q8_0 = 8u32.to_le_bytes();
    file.extend([&dimensions.concat()[..], &q8_0, &offset.to_le_bytes(), &[0; 34]].concat());
    assert_eq!((file.len() - 34) % 2, 1);
    std::fs::write(&path, file)?;
    let error = linear(&only_layer(&path)?, "ab").err().ok_or("a matrix")?;
    let wanted = "m.ab: wanted a type that candle has, found Q8_0 [1, 32] with bytes that are not aligned or not its shape's";
    assert!(matches!(error, TensorError::Weight { .. }));
    assert_eq!(error.to_string(), wanted);
    Ok(())
}
