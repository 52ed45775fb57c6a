//! The device's times on the host's clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use twinbuf_cuda_sim::{Options, Sim};

use crate::cu::{self, Current, Stream};
use crate::driver::Driver;
use crate::lent::page_locked;
use crate::slot::DeviceBuf;
use crate::time::Clock;

/// Sets the clocks a second apart, to simulate drift.
#[test]
fn a_copy_begins_after_it_was_issued_and_ends_before_now_whatever_the_clocks_drift() {
    let _sim = Sim::start(Options::default());
    let ctx = crate::context(0).unwrap();
    let _current = Current::enter(&ctx).unwrap();
    let stream = Arc::new(Stream::new(&ctx, true).unwrap());
    let mut clock = Clock::new(Driver::load().unwrap(), &stream).unwrap();
    let right = clock.at;
    let second = Duration::from_secs(1);
    let source = page_locked(&ctx, 4096).unwrap();
    let mut slot = DeviceBuf::<()>::new(&stream, 4096, true).unwrap();
    for (name, at) in [("behind", right - second), ("right", right), ("ahead", right + second)] {
        clock.at = at;
        let issued = Instant::now();
        let start = slot.start.as_ref().unwrap().raw();
        let (copied, raw) = (slot.copied.raw(), stream.raw());
        slot.len = 4096;
        // SAFETY: both exist until the stream has been synchronized.
        unsafe { cu::record(start, raw) }.unwrap();
        // SAFETY: as above, and both ranges have `len` bytes.
        unsafe { cu::copy_to_device(slot.address, source.start.as_ptr(), slot.len, raw) }.unwrap();
        // SAFETY: as above.
        unsafe { cu::record(copied, raw) }.unwrap();
        // SAFETY: as above.
        unsafe { cu::synchronize(raw) }.unwrap();
        // SAFETY: both events exist, are for timing, and were recorded.
        let time = unsafe { clock.time(start, copied, issued) }.unwrap().unwrap();
        assert!(time.took > Duration::ZERO, "{name}");
        assert!(issued <= time.start, "{name}: {:?} too early", issued - time.start);
        let end = time.start + time.took;
        let now = Instant::now();
        assert!(end <= now, "{name}: {:?} too late", end - now);
    }
}
