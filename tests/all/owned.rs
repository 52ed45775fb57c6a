//! Epochs that own their loader: returned from functions, sent to threads, awaited as streams.

use std::future::poll_fn;
use std::pin::Pin;
use std::thread;

use crate::common::{RECORD, files, open, plan};
use futures_core::Stream;
use twinbuf::loader::Epochs;
use twinbuf::{Batch, BoxError, Checkpoint, Dataset, Error, Loader, Records};

fn loader() -> (tempfile::TempDir, Loader) {
    let (dir, paths) = files(&[40]);
    let loader = Loader::builder(open(&paths), plan(40, 4)).depth(3).build().unwrap();
    (dir, loader)
}

/// A program's function that hides its data behind a stream.
fn batches(loader: Loader) -> impl Stream<Item = Result<Batch, Error>> + Send + Unpin + 'static {
    loader.into_epochs(0..3)
}

#[test]
fn a_function_returns_epochs_and_another_thread_iterates() {
    let (_dir, mut reference) = loader();
    let expected: Vec<Vec<u8>> = reference.epochs(0..3).map(|batch| batch.unwrap().to_vec()).collect();
    let (_dir, loader) = loader();
    let mut stream = batches(loader);
    let found = thread::spawn(move || {
        let mut found = Vec::new();
        while let Some(batch) = pollster::block_on(poll_fn(|cx| Pin::new(&mut stream).poll_next(cx))) {
            found.push(batch.unwrap().to_vec());
        }
        found
    });
    assert!(found.join().unwrap() == expected);
}

#[test]
fn the_loader_comes_back() {
    let (_dir, loader) = loader();
    let mut epochs: Epochs<'static> = loader.into_epochs(0..2);
    let first = epochs.by_ref().take(13).map(|batch| batch.unwrap().checkpoint()).last().unwrap();
    assert_eq!(epochs.report().batches, 13);
    let mut loader = epochs.into_front().unwrap();
    assert_eq!(loader.checkpoint(), first);
    assert_eq!(loader.epoch(5).count(), 10);
    assert!(loader.epoch(5).into_front().is_none(), "it was only lent");
    let mut rest = loader.into_epochs_from(&first, 2).unwrap();
    assert_eq!(rest.next().unwrap().unwrap().step(), 3);
    assert_eq!(rest.count(), 6);
    // If the checkpoint does not fit, the loader is returned.
    let (_dir, paths) = files(&[8]);
    let other = Loader::builder(open(&paths), plan(8, 4)).build().unwrap();
    let (other, error) = *other.into_epochs_from(&first, 2).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
    assert_eq!(other.into_epochs_from(&Checkpoint::start(), 1).unwrap().count(), 2);
}

#[test]
fn data_sets_of_any_kind_are_chosen_when_the_program_runs() {
    let (_dir, paths) = files(&[8, 4]);
    let choose = |files: usize| -> Box<dyn Dataset> { Box::new(open(&paths[..files])) };
    for (files, records) in [(1, 8), (2, 12)] {
        let mut loader = Loader::builder(choose(files), plan(records, 4)).workers(2).build().unwrap();
        assert_eq!(loader.epoch(0).map(Result::unwrap).count() as u64, records / 4);
    }
    let fields: Vec<Records> = (0..3).map(|_| Records::open(&paths, RECORD).unwrap()).collect();
    let mut loader = Loader::builder(fields, plan(12, 4)).build().unwrap();
    let batch = loader.epoch(0).next().unwrap().unwrap();
    assert_eq!(batch.field_count(), 3);
    assert_eq!(batch.field::<u8>(0).unwrap(), batch.field::<u8>(2).unwrap());
}

#[test]
fn a_generator_without_a_hook_or_with_one_that_may_be_sent_is_sent() -> Result<(), BoxError> {
    let make = |round: u64, slot: &mut u64| {
        *slot = round;
        Ok::<(), BoxError>(())
    };
    let (tell, published) = std::sync::mpsc::channel();
    let mut generator = twinbuf::generate(make).before(move |round| tell.send(round)).build()?;
    let rounds = thread::spawn(move || generator.rounds(5).map(|round| *round.unwrap()).collect::<Vec<_>>());
    assert_eq!(rounds.join().unwrap(), [0, 1, 2, 3, 4]);
    assert!(published.try_iter().eq(0..5));
    Ok(())
}
