//! One epoch as burn iterates it.

use std::sync::Arc;

use burn_core::data::dataloader::{DataLoaderIterator, Progress};
use burn_core::data::dataset::DatasetError;
use burn_core::tensor::Device;
use twinbuf::loader::{Epochs, Fields};

use crate::{Error, Part};

enum State {
    Running(Epochs<'static>),
    /// The epoch could not begin.
    Failed(Error),
    Ended,
}

pub(crate) struct Iter<'a, D, O> {
    part: &'a Part<D, O>,
    device: &'a Device,
    state: State,
    done: usize,
}

impl<'a, D: Fields + Clone + Send + Sync + 'static, O> Iter<'a, D, O> {
    pub(crate) fn new(part: &'a Part<D, O>, device: &'a Device, epoch: u64) -> Self {
        let state = match part.take() {
            Ok(Some(loader)) => State::Running(loader.into_epochs(epoch..epoch.saturating_add(1))),
            Ok(None) => State::Ended,
            Err(error) => State::Failed(error),
        };
        Self { part, device, state, done: 0 }
    }
}

impl<D, O> Iterator for Iter<'_, D, O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut running = match std::mem::replace(&mut self.state, State::Ended) {
            State::Running(running) => running,
            State::Failed(error) => return Some(Err(DatasetError::new(error))),
            State::Ended => return None,
        };
        let item = running.next().map(|batch| {
            let batch = batch.map_err(|source| Error::Loader(Arc::new(source)))?;
            let (epoch, step) = (batch.epoch(), batch.step());
            let records = usize::try_from(batch.plan().len()).unwrap_or(usize::MAX);
            let item = (self.part.common.make)(batch, self.device).map_err(|source| Error::Make {
                epoch,
                step,
                source: Arc::new(source),
            })?;
            Ok((item, records))
        });
        match item {
            Some(Ok((item, records))) => {
                self.done += records;
                self.state = State::Running(running);
                Some(Ok(item))
            }
            // This drops the loader too: the cause of the error may last.
            Some(Err(error)) => Some(Err(DatasetError::new::<Error>(error))),
            None => {
                running.into_front().into_iter().for_each(|loader| self.part.keep(loader));
                None
            }
        }
    }
}

impl<D, O> DataLoaderIterator<O> for Iter<'_, D, O> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.part.items(), Some("items".to_string()))
    }
}

impl<D, O> Drop for Iter<'_, D, O> {
    fn drop(&mut self) {
        if let State::Running(running) = std::mem::replace(&mut self.state, State::Ended) {
            running.into_front().into_iter().for_each(|loader| self.part.keep(loader));
        }
    }
}
