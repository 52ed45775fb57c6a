//! What a subscriber of the `tracing` crate receives from a loader.

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use common::{RECORD, Reads, nothing, plan};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use twinbuf::Loader;

/// A recorded span.
#[derive(Clone, Debug, Default)]
struct Seen {
    name: &'static str,
    parent: Option<u64>,
    fields: BTreeMap<&'static str, u64>,
    entered_on: Vec<ThreadId>,
    exits: usize,
    closed: bool,
}

impl Visit for Seen {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.fields.insert(field.name(), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        panic!("{field} is no number: {value:?}");
    }
}

/// Keeps every span of the target `twinbuf`.
#[derive(Clone, Default)]
struct Listener {
    spans: Arc<Mutex<BTreeMap<u64, Seen>>>,
    last: Arc<AtomicU64>,
}

impl Listener {
    fn on(&self, id: &Id, change: impl FnOnce(&mut Seen)) {
        change(self.spans.lock().unwrap().get_mut(&id.into_u64()).unwrap());
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "twinbuf" && *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        // Relaxed: only different numbers are wanted.
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let mut seen = Seen { name: span.metadata().name(), ..Seen::default() };
        seen.parent = span.parent().map(Id::into_u64);
        // An epoch belongs to the caller's current span; the others do not depend on the thread.
        assert_eq!(span.is_contextual(), seen.name == "epoch", "{seen:?}");
        span.record(&mut seen);
        self.spans.lock().unwrap().insert(id, seen);
        Id::from_u64(id)
    }

    fn record(&self, id: &Id, found: &Record<'_>) {
        self.on(id, |span| found.record(span));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        panic!("{event:?}");
    }

    fn enter(&self, id: &Id) {
        self.on(id, |span| span.entered_on.push(std::thread::current().id()));
    }

    fn exit(&self, id: &Id) {
        self.on(id, |span| span.exits += 1);
    }

    fn try_close(&self, id: Id) -> bool {
        self.on(&id, |span| span.closed = true);
        true
    }
}

/// One test, because the subscriber is global to the process: a thread's subscriber would not see the reading
/// thread.
#[test]
fn spans_of_epochs_loads_and_waits() {
    let listener = Listener::default();
    tracing::subscriber::set_global_default(listener.clone()).unwrap();
    for overlap in [false, true] {
        listener.spans.lock().unwrap().clear();
        // 3 batches of 8 records and one of 6.
        let dataset = Reads(30, RECORD, nothing);
        let mut loader = Loader::builder(dataset, plan(30, 8)).overlap(overlap).build().unwrap();
        for epoch in [5, 6] {
            assert_eq!(loader.epoch(epoch).count(), 4);
        }
        loader.close().unwrap();

        let here = std::thread::current().id();
        let spans = listener.spans.lock().unwrap().clone();
        let named = |name: &str| spans.values().filter(|span| span.name == name).cloned().collect::<Vec<_>>();
        assert!(spans.values().all(|span| span.closed && span.entered_on.len() == span.exits));

        let epochs = named("epoch");
        assert_eq!(epochs.iter().map(|span| span.fields["epoch"]).collect::<Vec<_>>(), [5, 6]);
        // Between two batches the caller may enter and leave other spans.
        assert!(epochs.iter().all(|span| span.entered_on.is_empty() && span.parent.is_none()));

        let places = [5, 6].into_iter().flat_map(|epoch| (0..4).map(move |step| (epoch, step)));
        let waits = named("wait");
        assert_eq!(waits.len(), 8);
        for (span, place) in waits.iter().zip(places.clone()) {
            assert_eq!((span.fields["epoch"], span.fields["step"]), place);
            assert_eq!(span.entered_on, [here]);
            assert_eq!(spans[&span.parent.unwrap()].fields["epoch"], place.0);
        }

        let loads = named("load");
        assert_eq!(loads.len(), 8);
        for (span, place) in loads.iter().zip(places) {
            assert_eq!((span.fields["epoch"], span.fields["step"]), place);
            let records = if place.1 == 3 { 6 } else { 8 };
            assert_eq!(span.fields["bytes"], records * RECORD as u64);
            assert_eq!(span.parent, None);
            assert_eq!(span.entered_on.len(), 1);
            assert_eq!(span.entered_on[0] == here, !overlap, "on the thread that reads");
        }
    }
}
