//! Copies: of one size, plain ones and through an uploader; by depth, beside a program of cudarc's alone; and how long a
//! small one takes.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtrMut, result, sys,
};
use twinbuf_cuda::{Copied, Uploader};

use super::measure::{
    Source, beside_uploads, fill, median, quantiles, rates, receive, rounds, seconds, upload, write_combined,
};
use super::{Extent, Line, Result, entry};

/// One size: plain copies from three kinds of memory, and the same bytes through an uploader.
pub(crate) fn copies(ctx: &Arc<CudaContext>, extent: &Extent, size: usize) -> Result<Value> {
    let stream = ctx.new_stream()?;
    let mut target = stream.alloc_zeros::<u8>(size)?;
    let count = extent.count(size);
    let mut plain = |source: &Source| fill(&mut target, source, &stream, count);
    let mut beside = |flags: u32, uploader: Uploader| -> Result<Value> {
        let source = Source::pinned(size, flags)?;
        uploads(uploader, extent, size, count, || plain(&source))
    };
    let pinned = beside(0, Uploader::new(ctx, size))?;
    let lent = Uploader::new(ctx, size).host_slots(write_combined(size)?);
    let write_combined = beside(sys::CU_MEMHOSTALLOC_WRITECOMBINED, lent)?;
    let source = Source::Pageable(vec![1; size]);
    let pageable = rounds(extent.rounds, || plain(&source))?;
    Ok(json!({
        "pinned": pinned,
        "write_combined": write_combined,
        "pageable": { "plain": rates(size * count, pageable) },
        "plain_gaps": plain_gaps(&stream, &mut target, size, count)?,
    }))
}

/// The gaps between copies that are enqueued at once, with the events that an uploader records around each. The rest of
/// the uploader's gaps is its own share.
fn plain_gaps(
    stream: &Arc<CudaStream>,
    target: &mut CudaSlice<u8>,
    size: usize,
    count: usize,
) -> Result<Value> {
    type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
    // The first version of this function; every driver has it. `CudaEvent::elapsed_ms`, built for CUDA 13, calls the
    // second version and panics with drivers before 12.8.
    // SAFETY: the driver has been loaded.
    let driver = unsafe { sys::culib() };
    // SAFETY: the type is that of the function of this name in cuda.h.
    let elapsed = unsafe { driver.get::<ElapsedTime>("cuEventElapsedTime") }?;
    let source = Source::pinned(size, 0)?;
    let (address, _record) = target.device_ptr_mut(stream);
    let event = |flags| Ok::<_, Box<dyn Error>>(stream.context().new_event(Some(flags))?);
    let mut events = Vec::new();
    for _ in 0..count.clamp(2, 512) {
        let start = event(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        events.push((start, event(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC)?));
    }
    for (start, copied) in &events {
        start.record(stream)?;
        // SAFETY: both are `size` bytes long, and are there until the stream has been waited for.
        unsafe { result::memcpy_htod_async(address, source.bytes(), stream.cu_stream()) }?;
        copied.record(stream)?;
    }
    stream.synchronize()?;
    let gap = |pair: &[(CudaEvent, CudaEvent)]| {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is valid for the call; both events exist, are for timing, and were recorded.
        unsafe { elapsed(&raw mut milliseconds, pair[0].1.cu_event(), pair[1].0.cu_event()) }.result()?;
        Ok(f64::from(milliseconds) / 1e3)
    };
    Ok(quantiles(events.windows(2).map(gap).collect::<Result<_>>()?))
}

/// Alternates rounds of `plain` with rounds of the same bytes through the ring: host slots are committed unchanged,
/// leases dropped at once. Also returns the gaps between the ring's copies.
pub(crate) fn uploads(
    uploader: Uploader,
    extent: &Extent,
    size: usize,
    count: usize,
    mut plain: impl FnMut() -> Result<()>,
) -> Result<Value> {
    let log = Arc::new(Mutex::new(Vec::<Copied>::new()));
    let copied = log.clone();
    let log_copy = move |copy| copied.lock().unwrap_or_else(PoisonError::into_inner).push(copy);
    let (mut slots, batches) = uploader.on_copied(log_copy).build::<()>()?;
    let (mut plains, mut rings) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| -> Result<()> {
        // Both are dropped in here, before the scope waits: the reader then ends, whatever fails.
        let mut batches = batches;
        let (go, wanted) = mpsc::channel::<()>();
        scope.spawn(move || {
            // One round at a time: its copies must not overlap the plain ones.
            for () in wanted {
                (0..count).try_for_each(|_| slots.acquire()?.commit(size, ()))?;
            }
            slots.finish();
            Ok::<(), twinbuf_cuda::Error>(())
        });
        let mut ring = || {
            go.send(()).map_err(|_| "the reader has ended")?;
            receive(&mut batches, count)
        };
        plain()?; // not counted: first touches
        seconds(&mut ring)?;
        for _ in 0..extent.rounds {
            plains.push(seconds(&mut plain)?);
            rings.push(seconds(&mut ring)?);
        }
        Ok(())
    })?;
    let log = log.lock().unwrap_or_else(PoisonError::into_inner);
    let within_a_round = log.windows(2).filter(|pair| pair[1].seq % count as u64 != 0);
    let gaps = within_a_round
        .map(|pair| pair[1].time.start.saturating_duration_since(pair[0].time.start + pair[0].time.took))
        .map(|gap| gap.as_secs_f64())
        .collect();
    let mut figures = quantiles(gaps);
    figures["uploader_over_plain"] =
        median(plains.iter().zip(&rings).map(|(plain, ring)| plain / ring).collect()).into();
    figures["plain"] = rates(size * count, plains);
    figures["uploader"] = rates(size * count, rings);
    Ok(figures)
}

/// As many slots on either side.
const DEPTHS: [usize; 4] = [1, 2, 4, 8];

/// The same bytes, alternately by hand and through uploaders.
pub(crate) fn depths(ctx: &Arc<CudaContext>, extent: &Extent, size: usize) -> Result<Value> {
    let count = extent.count(size);
    let mut ways: Vec<Box<dyn FnMut() -> Result<()>>> = Vec::new();
    for streams in [1, 2] {
        let mut by_hand = ByHand::new(ctx, size, streams)?;
        ways.push(Box::new(move || by_hand.copy(count)));
    }
    for depth in DEPTHS {
        let mut sides = Uploader::new(ctx, size).host_depth(depth).device_depth(depth).build()?;
        ways.push(Box::new(move || upload(&mut sides, size, count)));
    }
    let mut times = vec![Vec::new(); ways.len()];
    // The first round is not counted: first touches.
    for round in 0..=extent.rounds {
        for (way, times) in ways.iter_mut().zip(&mut times) {
            let took = seconds(way)?;
            times.extend((round > 0).then_some(took));
        }
    }
    let mut times = times.into_iter();
    let (one, two) = (times.next().unwrap_or_default(), times.next().unwrap_or_default());
    let by_depth: Vec<Value> = DEPTHS
        .into_iter()
        .zip(times)
        .map(|(depth, times)| {
            let ratio = median(one.iter().zip(&times).map(|(hand, ring)| hand / ring).collect());
            json!({ "depth": depth, "uploader": rates(size * count, times), "over_one_stream": ratio })
        })
        .collect();
    Ok(json!({
        "cudarc_one_stream": rates(size * count, one),
        "cudarc_two_streams": rates(size * count, two),
        "depths": by_depth,
    }))
}

/// Double buffering by hand with cudarc's safe calls: two page-locked buffers, on one stream or two.
struct ByHand {
    streams: Vec<Arc<twinbuf_cuda::cudarc::driver::CudaStream>>,
    sources: Vec<twinbuf_cuda::cudarc::driver::PinnedHostSlice<u8>>,
    targets: Vec<twinbuf_cuda::cudarc::driver::CudaSlice<u8>>,
}

impl ByHand {
    fn new(ctx: &Arc<CudaContext>, size: usize, streams: usize) -> Result<Self> {
        let streams = (0..streams).map(|_| ctx.new_stream()).collect::<std::result::Result<Vec<_>, _>>()?;
        let (mut sources, mut targets) = (Vec::new(), Vec::new());
        for i in 0..2 {
            // SAFETY: set below.
            let mut source = unsafe { ctx.alloc_pinned::<u8>(size) }?;
            source.as_mut_slice()?.fill(1);
            sources.push(source);
            targets.push(streams[i % streams.len()].alloc_zeros::<u8>(size)?);
        }
        Ok(Self { streams, sources, targets })
    }

    fn copy(&mut self, count: usize) -> Result<()> {
        for i in 0..count {
            let source = &mut self.sources[i % 2];
            // Waits until its last copy is done: now it could be filled.
            source.as_mut_slice()?;
            self.streams[i % self.streams.len()].memcpy_htod(source, &mut self.targets[i % 2])?;
        }
        for stream in &self.streams {
            stream.synchronize()?;
        }
        Ok(())
    }
}

/// The bytes of a small copy.
const SMALL: usize = 4096;

pub(crate) fn latency(ctx: &Arc<CudaContext>, extent: &Extent, line: Line<'_>) {
    line(entry("beside", "nothing", small(ctx, extent)));
    line(entry("beside", "an idle uploader", beside_idle(ctx, extent)));
    line(entry("beside", "a busy uploader", beside_busy(ctx, extent)));
    line(small_upload(ctx, extent));
}

/// The number of copies, one after another.
fn small_copies(extent: &Extent) -> usize {
    100 * extent.rounds
}

fn small(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let stream = ctx.new_stream()?;
    let source = Source::pinned(SMALL, 0)?;
    let mut target = stream.alloc_zeros::<u8>(SMALL)?;
    let times = rounds(small_copies(extent), || fill(&mut target, &source, &stream, 1))?;
    Ok(json!({ "plain_4k": median(times) }))
}

fn beside_idle(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let sides = Uploader::new(ctx, extent.at_most(64 << 20)?).build::<()>()?;
    let figures = small(ctx, extent);
    drop(sides);
    figures
}

fn beside_busy(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let size = extent.at_most(64 << 20)?;
    beside_uploads(Uploader::new(ctx, size).build()?, size, || small(ctx, extent))
}

fn small_upload(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let (mut slots, mut batches) = Uploader::new(ctx, SMALL).build::<()>()?;
    let mut times = Vec::new();
    for round in 0..=small_copies(extent) {
        let slot = slots.acquire()?;
        let took = seconds(|| {
            slot.commit(SMALL, ())?;
            receive(&mut batches, 1)
        })?;
        times.extend((round > 0).then_some(took));
    }
    Ok(json!({ "uploader_4k": median(times) }))
}
