//! The loader as burn uses it: epochs, errors, devices, slices.

use std::error::Error as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use burn::data::dataloader::{DataLoader, Progress, split::split_dataloader};
use burn::data::dataset::DatasetError;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use twinbuf::mmap::{PlanError, RecordList};
use twinbuf::transform::Convert;
use twinbuf::{Batch, BatchIndices, BoxError, Dataset, LastBatch, Loader, Plan, Records};
use twinbuf_burn::{BurnLoader, Error, tensor_data};

/// Record `i` is the number `i`; at most one cannot be read.
#[derive(Clone)]
struct Source {
    records: u64,
    bad: Option<u64>,
}

fn source(records: u64) -> Source {
    Source { records, bad: None }
}

impl Dataset for Source {
    fn records(&self) -> u64 {
        self.records
    }

    fn record_bytes(&self) -> usize {
        4
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        for (record, out) in batch.runs().flatten().zip(out.chunks_exact_mut(4)) {
            if self.bad == Some(record) {
                return Err(format!("record {record} is bad").into());
            }
            out.copy_from_slice(&u32::try_from(record)?.to_ne_bytes());
        }
        Ok(out.len())
    }
}

fn numbers(batch: Batch, _: &Device) -> Result<Vec<u32>, BoxError> {
    Ok(batch.cast::<u32>()?.to_vec())
}

fn shuffled(records: u64, batch: u64, tail: LastBatch) -> Plan {
    let order = twinbuf::Shuffle::Full;
    Plan::builder(records).batch(batch).shuffle(order).seed(7).last_batch(tail).build().unwrap()
}

/// Batches in the order of the records.
fn plan(records: u64, batch: u64) -> Plan {
    Plan::builder(records).batch(batch).build().unwrap()
}

fn loader(source: Source, plan: Plan) -> BurnLoader<Source, Vec<u32>> {
    BurnLoader::builder(source, plan, numbers).build(&Device::flex()).unwrap()
}

fn epoch(loader: &dyn DataLoader<Vec<u32>>) -> Vec<Vec<u32>> {
    loader.iter().map(Result::unwrap).collect()
}

/// The batches of an epoch as the plan has them.
fn planned(plan: &Plan, epoch: u64) -> Vec<Vec<u32>> {
    planned_from(plan, epoch, 0)
}

/// The same of a slice that begins at this record.
fn planned_from(plan: &Plan, epoch: u64, first: u32) -> Vec<Vec<u32>> {
    let records = |step| {
        plan.batch(epoch, step).unwrap().runs().flatten().map(|record| first + record as u32).collect()
    };
    (0..plan.steps(0)).map(records).collect()
}

/// The error that an item has for burn.
fn inner(error: &DatasetError) -> &Error {
    error.source().and_then(|source| source.downcast_ref()).expect("an error of this crate")
}

#[test]
fn each_iterator_is_the_next_epoch() {
    for tail in [LastBatch::Drop, LastBatch::Keep, LastBatch::Wrap] {
        let plan = shuffled(10, 4, tail);
        let loader = loader(source(10), plan.clone());
        for number in 0..3 {
            assert_eq!(epoch(&loader), planned(&plan, number), "{tail:?}");
        }
        assert_ne!(planned(&plan, 0), planned(&plan, 1));
    }
}

#[test]
fn an_epoch_left_early_counts() {
    let plan = shuffled(40, 4, LastBatch::Drop);
    let loader =
        BurnLoader::builder(source(40), plan.clone(), numbers).first_epoch(5).build(&Device::flex()).unwrap();
    assert_eq!(loader.iter().next().unwrap().unwrap(), planned(&plan, 5)[0]);
    drop(loader.iter());
    assert_eq!(epoch(&loader), planned(&plan, 7));
}

#[test]
fn items_are_counted() {
    for (tail, items) in [(LastBatch::Drop, 8), (LastBatch::Keep, 10), (LastBatch::Wrap, 12)] {
        let loader = loader(source(10), shuffled(10, 4, tail));
        assert_eq!(loader.num_items(), items, "{tail:?}");
        let mut iterator = loader.iter();
        let mut seen = 0;
        let progress = |found: Progress| (found.items_processed, found.items_total, found.unit);
        assert_eq!(progress(iterator.progress()), (0, items, Some("items".to_string())));
        while let Some(batch) = iterator.next() {
            seen += batch.unwrap().len();
            assert_eq!(iterator.progress().items_processed, seen);
        }
        assert!(iterator.progress().is_completed(), "{tail:?}");
        assert!(iterator.next().is_none());
    }
    // The size of a batch grows after ten steps.
    let plan = Plan::builder(100).batches([(10, 4), (u64::MAX, 8)]).build().unwrap();
    let grows = loader(source(100), plan);
    assert_eq!((grows.num_items(), epoch(&grows).concat().len()), (96, 96));
    // With more ranks than records, the last has none.
    let plan = Plan::builder(2).rank(2, 3).last_batch(LastBatch::Keep).build().unwrap();
    let loader = loader(source(2), plan);
    assert_eq!((loader.num_items(), epoch(&loader).len()), (0, 0));
}

/// An error and its causes, each on its own line.
fn causes(error: &(dyn std::error::Error + 'static)) -> Vec<String> {
    let mut lines = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        lines.push(error.to_string());
        next = error.source();
    }
    lines
}

#[test]
fn an_error_is_an_item_and_the_last() {
    let loader = loader(Source { records: 12, bad: Some(9) }, plan(12, 4));
    for number in 0..2 {
        let items: Vec<_> = loader.iter().collect();
        assert_eq!(items.len(), 3, "two batches and the error");
        assert_eq!(items[1].as_ref().unwrap(), &[4, 5, 6, 7]);
        let error = items[2].as_ref().unwrap_err();
        let line = format!("epoch {number}, step 2: the batch could not be read");
        assert_eq!(causes(error).first(), Some(&line));
        assert_eq!(causes(error).last().map(String::as_str), Some("record 9 is bad"));
        let Error::Loader(source) = inner(error) else { panic!("{error}") };
        assert!(matches!(&**source, twinbuf::Error::Load { at, .. } if at.step == Some(2)));
    }
}

#[test]
fn a_file_that_is_cut_off_is_named() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("records.bin");
    std::fs::write(&path, [7; 64])?;
    let data = Arc::new(Records::open([&path], 4)?);
    let plan = plan(data.len(), 4);
    let loader = BurnLoader::builder(data, plan, |batch, _| Ok(batch.len())).build(&Device::flex())?;
    std::fs::OpenOptions::new().write(true).open(&path)?.set_len(20)?;
    let items: Vec<_> = loader.iter().collect();
    let [Ok(_), Err(error)] = &items[..] else { panic!("{}", items.len()) };
    assert!(causes(error).last().unwrap().contains("records.bin"), "{error}");
    Ok(())
}

#[test]
fn what_the_function_refuses_ends_the_epoch() {
    let refuse = |batch: Batch, _: &Device| match batch.step() {
        1 => Err("too dark".into()),
        step => Ok(step),
    };
    let loader = BurnLoader::builder(source(12), plan(12, 4), refuse).build(&Device::flex()).unwrap();
    let items: Vec<_> = loader.iter().collect();
    let [Ok(_), Err(error)] = &items[..] else { panic!("{}", items.len()) };
    assert_eq!(error.to_string(), "epoch 0, step 1: too dark");
    assert!(matches!(inner(error), Error::Make { epoch: 0, step: 1, .. }));
}

#[test]
fn bad_options_are_refused_when_it_is_built() {
    let depth = BurnLoader::builder(source(12), plan(12, 4), numbers).options(|loader| loader.depth(0));
    assert!(depth.build(&Device::flex()).unwrap_err().to_string().contains("depth"));
    let records = BurnLoader::builder(source(11), plan(12, 4), numbers);
    assert!(records.build(&Device::flex()).unwrap_err().to_string().contains("plan"));
}

/// A loader, and the number of loaders that it has built so far.
fn counted(plan: Plan) -> (BurnLoader<Source, Vec<u32>>, Arc<AtomicUsize>) {
    let built = Arc::new(AtomicUsize::new(0));
    let count = built.clone();
    let loader = BurnLoader::builder(source(plan.records()), plan.clone(), numbers)
        .options(move |loader| {
            count.fetch_add(1, Ordering::Relaxed);
            loader.memory_limit(1 << 20)
        })
        .build(&Device::flex())
        .unwrap();
    (loader, built)
}

#[test]
fn a_loader_is_kept_between_epochs() {
    let plan = shuffled(10, 4, LastBatch::Keep);
    let (loader, built) = counted(plan.clone());
    epoch(&loader);
    drop(loader.iter().next());
    epoch(&loader);
    assert_eq!(built.load(Ordering::Relaxed), 1);
    let report = loader.report().expect("no iterator is alive");
    assert_eq!((report.epochs, report.batches), (3, 3 + 1 + 3));
}

#[test]
fn two_iterators_at_once() {
    let plan = shuffled(10, 4, LastBatch::Keep);
    let (loader, built) = counted(plan.clone());
    let (mut first, mut second) = (loader.iter(), loader.iter());
    assert!(loader.report().is_none());
    for (first_wanted, second_wanted) in planned(&plan, 0).into_iter().zip(planned(&plan, 1)) {
        assert_eq!(first.next().unwrap().unwrap(), first_wanted);
        assert_eq!(second.next().unwrap().unwrap(), second_wanted);
    }
    drop((first, second));
    assert_eq!(built.load(Ordering::Relaxed), 2);
}

/// Tells of each read of the records from 8 on, which then waits for the lock.
#[derive(Clone)]
struct Gated(Source, mpsc::Sender<()>, Arc<Mutex<()>>);

impl Dataset for Gated {
    fn records(&self) -> u64 {
        self.0.records()
    }

    fn record_bytes(&self) -> usize {
        self.0.record_bytes()
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        if batch.runs().flatten().any(|record| record >= 8) {
            // The other end is gone when the test has seen enough.
            let _ = self.1.send(());
            drop(self.2.lock());
        }
        self.0.read(batch, out)
    }
}

#[test]
fn a_loader_that_is_one_too_many_still_reads_and_nobody_waits_for_it() {
    let ((waits, read), gate) = (mpsc::channel(), Arc::new(Mutex::new(())));
    let data = Gated(source(12), waits, gate.clone());
    let loader = BurnLoader::builder(data, plan(12, 4), numbers).build(&Device::flex()).unwrap();
    let closed = gate.lock().unwrap();
    let batches = || loader.report().map(|report| report.batches);
    let mut first = loader.iter();
    std::thread::scope(|scope| {
        let (made, both) = mpsc::channel();
        let (kept, one) = mpsc::channel();
        let loader = &loader;
        scope.spawn(move || {
            let second = loader.iter();
            made.send(()).unwrap();
            one.recv().unwrap();
            // Its loader replaces the idle one of `first`, whose thread is reading a batch.
            drop(second);
        });
        both.recv().unwrap();
        first.next().unwrap().unwrap();
        read.recv().unwrap();
        drop(first);
        kept.send(()).unwrap();
        while batches() != Some(0) {
            std::thread::yield_now();
        }
        drop(closed);
    });
}

#[test]
fn threads_share_it() {
    let plan = shuffled(100, 4, LastBatch::Keep);
    let loader: Arc<dyn DataLoader<Vec<u32>>> = Arc::new(loader(source(100), plan.clone()));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let loader = loader.clone();
            std::thread::spawn(move || epoch(&*loader))
        })
        .collect();
    let mut found: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let mut wanted: Vec<_> = (0..4).map(|number| planned(&plan, number)).collect();
    found.sort();
    wanted.sort();
    assert_eq!(found, wanted);
}

#[test]
fn another_device_goes_on_from_the_same_epoch() {
    let plan = shuffled(10, 4, LastBatch::Keep);
    // The `==` of devices ignores autodiff: compare `is_autodiff`.
    let on = |batch: Batch, device: &Device| Ok((numbers(batch, device)?, device.is_autodiff()));
    let loader = BurnLoader::builder(source(10), plan.clone(), on).build(&Device::flex()).unwrap();
    loader.iter().for_each(drop);
    let moved = loader.to_device(&Device::flex().autodiff());
    for (found, wanted) in moved.iter().map(Result::unwrap).zip(planned(&plan, 1)) {
        assert_eq!(found, (wanted, true));
    }
    assert_eq!(loader.iter().next().unwrap().unwrap(), (planned(&plan, 1)[0].clone(), false));
}

#[test]
fn slices_cover_the_records_and_do_not_meet() {
    let keep = [(103, 8, 4), (103, 8, 3), (5, 2, 2), (3, 2, 5)].map(|sizes| (LastBatch::Keep, sizes));
    // More items than records.
    let wrap = [(10, 4, 2), (9, 8, 4), (3, 8, 3), (1, 4, 3)].map(|sizes| (LastBatch::Wrap, sizes));
    for (tail, (records, batch, devices)) in keep.into_iter().chain(wrap) {
        let whole: Arc<dyn DataLoader<Vec<u32>>> =
            Arc::new(loader(source(records), shuffled(records, batch, tail)));
        let slices = split_dataloader(whole, &vec![Device::flex(); devices]);
        assert_eq!(slices.len(), devices);
        for _ in 0..2 {
            let mut all = Vec::new();
            for slice in &slices {
                let items = epoch(&**slice);
                let full = items.iter().all(|items| items.len() as u64 == batch);
                assert!(full || tail == LastBatch::Keep, "{records} over {devices}");
                let mut items = items.concat();
                assert_eq!(items.len(), slice.num_items());
                items.sort_unstable();
                if tail == LastBatch::Wrap {
                    items.dedup();
                }
                all.extend(items);
            }
            assert!(all.into_iter().eq(0..u32::try_from(records).unwrap()), "{records} over {devices}");
        }
    }
}

#[test]
fn a_slice_is_the_plan_over_its_records() {
    let whole = loader(source(100), shuffled(100, 4, LastBatch::Keep));
    let slice = whole.slice(10, 40);
    let inner = slice.slice(5, 25);
    for (slice, first, records) in [(slice, 10, 30), (inner, 15, 20)] {
        for number in 0..2 {
            let plan = shuffled(records, 4, LastBatch::Keep);
            assert_eq!(epoch(&*slice), planned_from(&plan, number, first));
        }
    }
    // A slice that begins at record 0.
    assert_eq!(epoch(&*whole.slice(0, 30)), planned(&shuffled(30, 4, LastBatch::Keep), 0));
}

#[test]
fn slices_of_a_list_have_its_records() {
    let even: Vec<u64> = (0..100).step_by(10).collect();
    for list in [even, vec![7, 3, 99, 3, 50, 51, 52]] {
        let numbers: Vec<u32> = list.iter().map(|&record| u32::try_from(record).unwrap()).collect();
        let plan = |numbers: &[u32]| {
            let list: RecordList = numbers.iter().copied().map(u64::from).collect();
            Plan::builder(100).records(list).batch(2).last_batch(LastBatch::Keep).build().unwrap()
        };
        let whole = loader(source(100), plan(&numbers));
        for (start, end) in [(0, 4), (4, numbers.len()), (0, numbers.len()), (3, 3)] {
            assert_eq!(epoch(&*whole.slice(start, end)).concat(), numbers[start..end], "{start}..{end}");
        }
        assert_eq!(epoch(&*whole.slice(1, 6).slice(2, 4)).concat(), numbers[3..5]);
    }
}

#[test]
fn the_last_slice_has_what_the_plan_drops() {
    let drop = |records| shuffled(records, 4, LastBatch::Drop);
    let whole = loader(source(103), drop(103));
    assert_eq!(whole.num_items(), 100);
    for (end, records) in [(99, 49), (100, 53)] {
        assert_eq!(epoch(&*whole.slice(50, end)), planned_from(&drop(records), 0, 50));
    }
}

#[test]
fn slices_of_files() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let paths = [folder.path().join("0.bin"), folder.path().join("1.bin")];
    for (path, numbers) in paths.iter().zip([0..10_u16, 10..30]) {
        std::fs::write(path, numbers.flat_map(u16::to_le_bytes).collect::<Vec<u8>>())?;
    }
    let data = Arc::new(Records::open(&paths, 2)?);
    let plan = shuffled(30, 4, LastBatch::Keep);
    // With a transform.
    let loader = BurnLoader::builder(data, plan.clone(), numbers)
        .options(|loader| loader.transform(Convert::U16ToU32))
        .build(&Device::flex())?;
    let mut found = epoch(&*loader.slice(7, 25)).concat();
    found.sort_unstable();
    assert!(found.into_iter().eq(7..25));
    Ok(())
}

#[test]
fn slices_that_are_not_there() {
    let refused = |loader: &dyn DataLoader<Vec<u32>>| {
        assert_eq!(loader.num_items(), 0);
        let items: Vec<_> = loader.iter().collect();
        assert_eq!(items.len(), 1, "the error");
        let error = items.into_iter().next().unwrap().unwrap_err();
        (inner(&error).clone(), error.to_string())
    };
    let whole = loader(source(10), shuffled(10, 4, LastBatch::Drop));
    for (start, end) in [(0, 9), (8, 9), (3, 2), (0, usize::MAX)] {
        let (error, text) = refused(&*whole.slice(start, end));
        assert!(matches!(error, Error::Slice { items: 8, ranks: 1, .. }), "{text}");
        // A slice of that slice has the same error.
        assert_eq!(refused(&*whole.slice(start, end).slice(0, 0)).1, text);
    }
    // Fewer records than a batch, and the tail is dropped: not an empty epoch.
    let (error, text) = refused(&*whole.slice(0, 3));
    assert!(matches!(error, Error::Plan(PlanError::NoStep { records: 3, batch: 4, .. })), "{text}");
    // No record at all was asked for.
    assert_eq!(epoch(&*whole.slice(2, 2)).len(), 0);

    let plan = Plan::builder(10).batch(2).rank(1, 2).build().unwrap();
    let (error, text) = refused(&*loader(source(10), plan.clone()).slice(0, 2));
    assert!(matches!(error, Error::Slice { ranks: 2, .. }));
    assert!(text.contains("one rank"), "{text}");
}

#[test]
fn tensors_on_the_device() -> Result<(), BoxError> {
    let tensors = |batch: Batch, device: &Device| {
        let numbers: Vec<i32> = batch.cast::<i32>()?.to_vec();
        let shape = [numbers.len(), 1];
        Ok(Tensor::<2, Int>::from_data(TensorData::new(numbers, shape), device))
    };
    let loader = BurnLoader::builder(source(6), plan(6, 3), tensors).build(&Device::flex())?;
    let found: Vec<_> = loader.iter().map(Result::unwrap).collect();
    // At the end: a tensor that still looked into a buffer of the loader would show a later batch.
    for (tensor, wanted) in found.into_iter().zip([[0, 1, 2], [3, 4, 5]]) {
        assert_eq!(tensor.dims(), [3, 1]);
        assert_eq!(tensor.into_data().try_to_vec::<i32>()?, wanted);
    }
    Ok(())
}

/// A tensor of the batch's own bytes, and where they are.
fn in_place(batch: Batch, device: &Device) -> Result<(Tensor<1, Int>, usize), BoxError> {
    let (at, len) = (batch.as_ptr().addr(), batch.len() / 4);
    let mut data = tensor_data(batch, [len], DType::I32)?;
    device.staging([&mut data].into_iter());
    Ok((Tensor::from_data(data, device), at))
}

#[test]
fn a_tensor_uses_the_slot_itself() -> Result<(), BoxError> {
    let loader = BurnLoader::builder(source(20), plan(20, 4), in_place).build(&Device::flex())?;
    let mut first = 0;
    for item in loader.iter() {
        let (tensor, at) = item?;
        // A tensor that writes copies first: the slot stays as it was.
        let doubled = (tensor.clone() * 2).into_data();
        let data = tensor.into_data();
        assert_eq!(data.bytes().as_ptr().addr(), at, "no copy on the way into the tensor and out");
        let wanted: Vec<i32> = (first..first + 4).collect();
        assert_eq!(data.try_to_vec::<i32>()?, wanted);
        assert_eq!(doubled.try_to_vec::<i32>()?, wanted.iter().map(|n| n * 2).collect::<Vec<_>>());
        first += 4;
    }
    assert_eq!(first, 20);
    Ok(())
}

#[test]
fn a_tensor_that_is_kept_keeps_its_slot() -> Result<(), BoxError> {
    let loader = BurnLoader::builder(source(20), plan(20, 4), in_place)
        .options(|loader| loader.held_timeout(std::time::Duration::from_millis(1)))
        .build(&Device::flex())?;
    let mut items: Vec<_> = loader.iter().collect();
    let error = items.pop().unwrap().unwrap_err();
    assert!(causes(&error).concat().contains("depth"), "{error}");
    // Items that were received do not change.
    for (step, item) in (0..).zip(items) {
        let found = item?.0.into_data().try_to_vec::<i32>()?;
        assert_eq!(found, (4 * step..4 * step + 4).collect::<Vec<_>>());
    }
    Ok(())
}

#[test]
fn data_of_another_length_is_refused() -> Result<(), BoxError> {
    let wrong = |batch: Batch, _: &Device| Ok(tensor_data(batch, [5], DType::I32)?);
    let loader = BurnLoader::builder(source(4), plan(4, 4), wrong).build(&Device::flex())?;
    let items: Vec<_> = loader.iter().collect();
    assert!(items.len() == 1 && items[0].is_err());
    Ok(())
}

#[test]
fn a_pair_of_data_sets_is_iterated() -> Result<(), BoxError> {
    let pair = |batch: Batch, _: &Device| {
        let (a, b) = batch.fields::<(u32, u32)>()?;
        Ok(a.iter().zip(b).map(|(a, b)| (*a, *b)).collect::<Vec<_>>())
    };
    let loader = BurnLoader::builder((source(6), source(6)), plan(6, 3), pair).build(&Device::flex())?;
    let found = loader.iter().map(Result::unwrap).collect::<Vec<_>>().concat();
    assert_eq!(found, (0..6).map(|i| (i, i)).collect::<Vec<_>>());
    assert_eq!(loader.slice(3, 6).iter().map(Result::unwrap).next(), Some(vec![(3, 3), (4, 4), (5, 5)]));
    Ok(())
}

#[test]
fn the_loader_may_be_sent() {
    fn sent<T: Send>() {}
    fn shared<T: Send + Sync>() {}
    sent::<Loader>();
    shared::<BurnLoader<Arc<Records>, Tensor<2>>>();
    shared::<Error>();
}
