//! One epoch as burn iterates it.

use std::sync::Arc;

use burn_core::data::dataloader::{DataLoaderIterator, Progress};
use burn_core::data::dataset::DatasetError;
use burn_core::tensor::Device;
use self_cell::MutBorrow;
use twinbuf::loader::Epochs;
use twinbuf::{Dataset, Loader};

use crate::{Error, Part};

type Epoch<'l> = Epochs<'l>;

self_cell::self_cell!(
    /// A loader and an epoch of it, which borrows it.
    struct Running {
        owner: MutBorrow<Loader>,
        #[not_covariant]
        dependent: Epoch,
    }
);

enum State {
    Running(Running),
    /// It could not begin.
    Failed(Error),
    Ended,
}

pub(crate) struct Iter<'a, D, O> {
    part: &'a Part<D, O>,
    device: &'a Device,
    state: State,
    done: usize,
}

impl<'a, D: Dataset + Clone + Sync + 'static, O> Iter<'a, D, O> {
    pub(crate) fn new(part: &'a Part<D, O>, device: &'a Device, epoch: u64) -> Self {
        let state = match part.take() {
            Ok(Some(loader)) => State::Running(Running::new(MutBorrow::new(loader), |loader| {
                loader.borrow_mut().epoch(epoch)
            })),
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
        let item = running.with_dependent_mut(|_, epoch| {
            epoch.next().map(|batch| {
                let batch = batch.map_err(|source| Error::Loader(Arc::new(source)))?;
                let (epoch, step) = (batch.epoch(), batch.step());
                let records = usize::try_from(batch.plan().len()).unwrap_or(usize::MAX);
                let item = (self.part.common.make)(batch, self.device).map_err(|source| Error::Make {
                    epoch,
                    step,
                    source: Arc::new(source),
                })?;
                Ok((item, records))
            })
        });
        match item {
            Some(Ok((item, records))) => {
                self.done += records;
                self.state = State::Running(running);
                Some(Ok(item))
            }
            // The loader goes too: what broke it may last.
            Some(Err(error)) => Some(Err(DatasetError::new::<Error>(error))),
            None => {
                self.part.keep(running.into_owner().into_inner());
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
            self.part.keep(running.into_owner().into_inner());
        }
    }
}
