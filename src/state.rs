//! Where a training stands in its data, to go on from there another time.

use twinbuf_mmap::Plan;

/// A place between two batches: what [`Loader::state`](crate::Loader::state) says and
/// [`Loader::restore`](crate::Loader::restore) takes.
///
/// Save it with the model. The feature `serde` makes it `Serialize` and `Deserialize`; the names of its fields
/// are a stable format. It is the same for all ranks of a step: any rank's state restores any other's.
///
/// With [`Tail::Keep`](crate::Tail::Keep) a rank may have no batch in the last step. It has done that step when its
/// epoch has given `None`; until then its state is that after the step before. Rank 0 has a batch in every step.
///
/// ```
/// # use twinbuf::{BatchPlan, BoxError, Dataset, Loader, Plan};
/// # struct Zeros;
/// # impl Dataset for Zeros {
/// #     fn records(&self) -> u64 { 64 }
/// #     fn record_bytes(&self) -> usize { 4 }
/// #     fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> { Ok(out.len()) }
/// # }
/// # let loader = || Loader::builder(Zeros, Plan::builder(64).batch(8).build().unwrap()).build();
/// let first = loader()?;
/// for batch in first.epoch(3).take(2) {
///     let _ = batch?; // trained on
/// }
/// let state = first.state(); // saved
///
/// let second = loader()?; // another day
/// second.restore(&state)?;
/// let mut rest = second.epoch(state.epoch());
/// assert_eq!(rest.next().unwrap()?.step(), 2);
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct State {
    pub(crate) plan: Plan,
    /// Of the data set's records.
    pub(crate) record_bytes: u64,
    /// [`Dataset::fingerprint`](crate::Dataset::fingerprint).
    pub(crate) fingerprint: u64,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
}

impl State {
    /// The epoch that was begun last.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The batches of that epoch that the caller has received: the step of the next one. After its end, the steps
    /// of the rank that has the most.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// The plan whose batches they are.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }
}
