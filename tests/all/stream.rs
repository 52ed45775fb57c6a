//! Streams of tensors: every byte, in several orders, with groups that are kept and groups that are read each pass;
//! and what happens when groups are held, passes given up and files cut.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::model::{Model, SIZES};
use crate::common::{more_than_memory, until};
use twinbuf::loader::MemoryLimit;
use twinbuf::mmap::ReadMode;
use twinbuf::pipe::Items;
use twinbuf::stream::{Group, StreamBuilder, TensorStream, Tensors};
use twinbuf::{Error, mmap, stream};

/// Bytes for reads past the page cache. A limit counts all of them.
const LANES: u64 = mmap::Reader::<mmap::Groups>::MEMORY;

/// Every way to read, each checked for three passes.
#[test]
fn every_byte_in_every_way() {
    let model = Model::new(&SIZES);
    for mode in [ReadMode::Auto, ReadMode::Pread, ReadMode::Direct] {
        for (cycle, overlap, depth) in
            [(true, true, 2), (false, true, 2), (true, false, 2), (true, false, 1), (true, true, 4)]
        {
            for keep in [0, 1, 3, 5, 6] {
                let builder = stream(model.groups()).read_mode(mode).overlap(overlap).depth(depth).keep(keep);
                let builder = if cycle { builder.cycle() } else { builder };
                let mut layers = match builder.build() {
                    Err(error @ Error::Open(_)) if mode == ReadMode::Direct => {
                        return eprintln!("not checked: {error}");
                    }
                    layers => layers.unwrap(),
                };
                assert_eq!(layers.kept(), keep);
                for pass in 0..3 {
                    let of_pass = |group: &Group| assert_eq!(group.pass(), pass);
                    let groups = layers.pass().map(|group| group.inspect(of_pass));
                    model.check_all(groups, 0..SIZES.len());
                }
                // What was kept was read once. In a cycle more may have been read ahead.
                let loads = layers.report().loads;
                let streamed = (SIZES.len() - keep) as u64;
                let least = SIZES.len() as u64 + 2 * streamed;
                assert!((least..=least + depth as u64).contains(&loads), "{loads} loads, keep {keep}");
                layers.close().unwrap();
            }
        }
    }
}

#[test]
fn any_order_and_no_gap_between_passes() {
    let model = Model::new(&SIZES);
    for keep in [0, 2] {
        let back_and_forth =
            |pass: u64, step: usize| if pass % 2 == 0 { step } else { SIZES.len() - 1 - step };
        let mut layers = stream(model.groups()).cycle().order(back_and_forth).keep(keep).build().unwrap();
        for pass in 0..4 {
            model.check_all(layers.pass(), (0..SIZES.len()).map(|step| back_and_forth(pass, step)));
        }
    }
    // The first group of the next pass is read while nobody asks for it.
    let mut layers = stream(model.groups()).cycle().build().unwrap();
    layers.pass().for_each(drop);
    until(|| layers.report().loads >= SIZES.len() as u64 + 2);
}

#[test]
fn an_order_that_is_none_is_refused() {
    let model = Model::new(&SIZES);
    for order in [|_, _| 0, |_, step| step + 1] {
        let mut layers = stream(model.groups()).cycle().order(order).build().unwrap();
        let mut pass = layers.pass();
        let error = pass.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::Option { option: "order", .. }), "{error}");
        assert!(pass.next().is_none());
        drop(pass);
        drop(layers.pass());
        assert!(Items::lent(&mut layers).next().is_none(), "the error is the pass's that was left");
    }
}

#[test]
fn a_pass_after_one_with_an_order_that_is_none_has_its_groups() {
    let model = Model::new(&SIZES);
    // The reading thread, which asks first, ends its order there. The caller must not find another one.
    for (asked, once) in [(0, false), (1, false), (0, true), (1, true)] {
        let wrong = AtomicBool::new(true);
        let order = move |pass, step| match pass == 1 && wrong.fetch_and(!once, Ordering::Relaxed) {
            true => SIZES.len(),
            false => step,
        };
        let mut layers = stream(model.groups()).cycle().order(order).build().unwrap();
        assert_eq!(layers.pass().map(Result::unwrap).count(), SIZES.len());
        assert_eq!(layers.pass().take(asked).filter(Result::is_err).count(), asked);
        for _ in 0..2 {
            model.check_all(layers.pass(), 0..SIZES.len());
        }
    }
}

/// With `cycle` the reading thread asks ahead: the panic was the error of the first pass, also of a program that never begins
/// the pass whose order panics.
#[test]
fn a_panic_of_an_order_is_the_error_of_its_pass() {
    let model = Model::new(&SIZES);
    for cycle in [false, true] {
        let order = |pass: u64, step| {
            assert!(pass != 2, "on purpose");
            step
        };
        let builder = stream(model.groups()).order(order);
        let mut layers = if cycle { builder.cycle() } else { builder }.build().unwrap();
        for pass in 0..4 {
            let mut groups = layers.pass();
            if pass != 2 {
                model.check_all(groups, 0..SIZES.len());
                continue;
            }
            let error = groups.next().unwrap().unwrap_err();
            assert!(matches!(error, Error::Option { option: "order", .. }), "{error}");
            let text = error.to_string();
            assert!(text.ends_with("once in pass 2, found a panic: on purpose"), "{text}");
            assert!(groups.next().is_none());
        }
        layers.close().unwrap();
    }
}

/// The usual order with a state: both sides have the same for a pass, or one would wait for groups that do not come.
#[test]
fn an_order_is_called_once_for_a_pass() {
    let model = Model::new(&SIZES);
    let calls = Arc::new(Mutex::new(Vec::new()));
    let (state, seen) = (Arc::new(Mutex::new((0..SIZES.len()).collect::<Vec<_>>())), calls.clone());
    let order = move |pass: u64, step: usize| {
        let (mut order, mut calls) = (state.lock().unwrap(), seen.lock().unwrap());
        if step == 0 {
            calls.push(pass);
            order.rotate_left(1 + calls.len() % 5);
        }
        order[step]
    };
    for cycle in [false, true] {
        let builder = stream(model.groups()).order(order.clone());
        let mut layers = if cycle { builder.cycle() } else { builder }.build().unwrap();
        for pass in 0..40 {
            let mut found: Vec<_> = layers.pass().map(|group| group.unwrap().number()).collect();
            found.sort_unstable();
            assert!(found.into_iter().eq(0..SIZES.len()), "pass {pass}");
        }
        drop(layers);
        let asked = std::mem::take(&mut *calls.lock().unwrap());
        assert!(asked.iter().take(40).copied().eq(0..40), "{asked:?}");
    }
}

#[test]
fn an_order_may_wait_until_the_pass_before_has_begun() {
    // So large that what is asked for ahead reaches no further than the next pass.
    let model = Model::new(&[2_200_000; 4]);
    // The passes that have begun, and the last one whose order was asked for.
    let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let shared = counts.clone();
    let order = move |pass: u64, step: usize| {
        shared[1].fetch_max(pass, Ordering::Relaxed);
        until(|| shared[0].load(Ordering::Relaxed) >= pass); // the caller can begin the pass before
        step
    };
    let mut layers = stream(model.groups()).depth(6).cycle().order(order).build().unwrap();
    let [begun, asked] = &*counts;
    for pass in 0..5 {
        // All groups of this pass have been read, and the reading thread waits in the order of the next.
        until(|| pass == 0 || asked.load(Ordering::Relaxed) > pass);
        let groups = layers.pass();
        begun.store(pass + 1, Ordering::Relaxed);
        assert_eq!(groups.map(Result::unwrap).count(), 4);
    }
    // The drop waits for the reading thread.
    begun.store(u64::MAX, Ordering::Relaxed);
}

/// The thread that makes the order of a pass does not exist there, so the order would never be made.
#[test]
#[cfg(unix)]
fn a_process_that_is_forked_while_an_order_is_made_is_told() {
    let model = Model::new(&SIZES);
    let [asked, forked] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (tells, waits) = (asked.clone(), forked.clone());
    let order = move |pass, step| {
        if pass == 1 {
            tells.store(true, Ordering::Relaxed);
            until(|| waits.load(Ordering::Relaxed));
        }
        step
    };
    let mut layers = stream(model.groups()).cycle().order(order).build().unwrap();
    let first = layers.pass();
    until(|| asked.load(Ordering::Relaxed));
    drop(first);
    assert!(crate::common::forked::forked(|| {
        let mut second = layers.pass();
        let told =
            second.size_hint() == (1, Some(1)) && matches!(second.next(), Some(Err(Error::Forked { .. })));
        told && second.next().is_none()
    }));
    forked.store(true, Ordering::Relaxed);
    model.check_all(layers.pass(), 0..SIZES.len());
}

/// An order that returns another result to another thread: a group has its own number and bytes all the same.
#[test]
fn an_order_that_changes_gives_no_group_another_name() {
    let model = Model::new(&SIZES);
    for keep in [0, 2, SIZES.len()] {
        let caller = thread::current().id();
        let order = move |_, step| (step + usize::from(thread::current().id() != caller)) % SIZES.len();
        let mut layers = stream(model.groups()).keep(keep).order(order).build().unwrap();
        for _ in 0..4 {
            layers.pass().map(Result::unwrap).for_each(|group| model.check(&group, group.number()));
        }
    }
    // Two of eight groups are read in a pass. The reading is 20 passes ahead, so the order is called again for a pass.
    let (model, caller, again) =
        (Model::new(&[3000; 8]), thread::current().id(), Arc::new(AtomicBool::new(false)));
    let asked = again.clone();
    let order = move |pass, step| {
        let here = thread::current().id() == caller;
        asked.fetch_or(here && pass == 1, Ordering::Relaxed);
        (step + usize::from(!here)) % 8
    };
    let mut layers = stream(model.groups()).keep(6).depth(40).cycle().order(order).build().unwrap();
    layers.pass().map(Result::unwrap).for_each(|group| model.check(&group, group.number()));
    until(|| layers.report().loads >= 8 + 40);
    let mut differs = false;
    for (step, group) in layers.pass().map(Result::unwrap).enumerate() {
        model.check(&group, group.number());
        differs |= group.number() != step;
    }
    assert!(differs, "the caller's order is that of the reading thread");
    assert!(again.load(Ordering::Relaxed), "the order of a pass so far behind is kept");
}

#[test]
fn groups_outlive_their_stream() {
    fn both<T: Send + Sync>() {}
    both::<Group>();
    let model = Model::new(&SIZES);
    let builder = || stream(model.groups()).held_timeout(Duration::from_millis(30));
    for (depth, overlap) in [(2, true), (3, true), (2, false), (1, false)] {
        let mut layers = builder().depth(depth).overlap(overlap).build().unwrap();
        let held: Vec<Group> = layers.pass().take(depth).map(Result::unwrap).collect();
        layers.close().unwrap();
        held.iter().enumerate().for_each(|(number, group)| model.check(group, number));
    }
    // Those that stay in memory have no slot, so any number of them may be held.
    let mut layers = builder().keep(SIZES.len()).build().unwrap();
    let held: Vec<Group> = layers.pass().map(Result::unwrap).collect();
    drop(layers);
    held.iter().enumerate().for_each(|(number, group)| model.check(group, number));
}

/// Otherwise the next pass would wait for what nobody reads.
#[test]
fn an_iterator_without_a_pass_is_over_at_once() {
    let model = Model::new(&SIZES);
    for (cycle, left) in [(false, 0), (true, 0), (true, 2), (true, SIZES.len())] {
        let builder = stream(model.groups());
        let mut layers = if cycle { builder.cycle() } else { builder }.build().unwrap();
        for _ in 0..3 {
            let none = Items::lent(&mut layers);
            assert_eq!(none.size_hint(), (0, Some(0)));
            assert_eq!(none.count(), 0);
            layers.pass().take(left).for_each(|group| drop(group.unwrap()));
            assert_eq!(Items::lent(&mut layers).count(), 0);
            model.check_all(layers.pass(), 0..SIZES.len());
        }
    }
}

#[test]
fn a_pass_may_be_given_up_anywhere() {
    let model = Model::new(&SIZES);
    for cycle in [false, true] {
        for keep in [0, 2, 6] {
            let builder = stream(model.groups()).keep(keep);
            let mut layers = if cycle { builder.cycle() } else { builder }.build().unwrap();
            // A pass may own its stream, and gives it back.
            for (taken, owns) in
                [1, 0, 4, 6, 2, 3, 5].into_iter().zip([false, true, true].into_iter().cycle())
            {
                let take = |pass: &mut Items<'_, TensorStream>| {
                    (0..taken).for_each(|number| model.check(&pass.next().unwrap().unwrap(), number));
                };
                if owns {
                    let mut pass = layers.into_pass();
                    take(&mut pass);
                    layers = pass.into_front().unwrap();
                } else {
                    take(&mut layers.pass());
                }
            }
            let all: Vec<usize> = layers.pass().map(|group| group.unwrap().number()).collect();
            assert_eq!(all, [0, 1, 2, 3, 4, 5]);
            layers.close().unwrap();
        }
    }
}

#[test]
fn a_file_that_is_cut_is_a_typed_error() {
    let model = Model::new(&[3_000_000; 4]);
    let end = std::fs::metadata(&model.path).unwrap().len();
    let mut layers: Vec<_> = [ReadMode::Pread, ReadMode::Direct]
        .into_iter()
        .filter_map(|mode| stream(model.groups()).name("weights").cycle().read_mode(mode).build().ok())
        .collect();
    std::fs::File::options().write(true).open(&model.path).unwrap().set_len(end - 7_000_000).unwrap();
    for layers in &mut layers {
        for _again in 0..2 {
            let mut pass = layers.pass();
            for number in 0..2 {
                model.check(&pass.next().unwrap().unwrap(), number);
            }
            let error = pass.next().unwrap().unwrap_err();
            let Error::Load { at, source } = &error else { panic!("{error}") };
            assert_eq!((at.loader.as_deref(), at.step), (Some("weights"), Some(2)));
            let source = source.downcast_ref::<mmap::Error>();
            let found =
                matches!(source, Some(mmap::Error::Truncated { offset, .. }) if *offset == end - 7_000_000);
            assert!(found, "{error}");
            assert!(pass.next().is_none());
        }
    }
}

#[test]
fn the_limit_counts_all_of_it() {
    let model = Model::new(&[500_000; 8]);
    let groups = model.groups();
    let layer = groups.bytes(0).max(groups.bytes(1)) as u64;
    let build = |limit: u64, set: &dyn Fn(StreamBuilder) -> StreamBuilder| {
        let limit = MemoryLimit::new(limit);
        let built = set(stream(model.groups()).cycle().memory_limit(&limit)).build();
        (built, limit)
    };
    let (refused, limit) = build(LANES + layer, &|builder| builder);
    let error = refused.unwrap_err();
    assert!(matches!(error, Error::Memory { wanted, .. } if wanted > limit.taken()), "{error}");
    assert_eq!(limit.taken(), 0);
    // Sizes differ by up to a page from layer to layer.
    let page = 4096 * 8;
    for (room, kept) in [(2, 0), (3, 0), (4, 1), (6, 3), (8, 8), (9, 8)] {
        let (layers, limit) = build(LANES + room * layer + page, &|builder| builder);
        let mut layers = layers.unwrap();
        assert_eq!(layers.kept(), kept, "{room} layers");
        assert!(limit.taken() <= LANES + room * layer + page);
        let mut last = None;
        for _pass in 0..3 {
            for (number, group) in layers.pass().enumerate() {
                let group = group.unwrap();
                model.check(&group, number);
                last = Some(group);
            }
        }
        let taken = limit.taken();
        drop(layers);
        assert_eq!(limit.taken(), taken, "the last group counts");
        drop(last);
        assert_eq!(limit.taken(), 0);
    }
    let (layers, _) = build(LANES + 9 * layer, &|builder| builder.keep(1));
    assert_eq!(layers.unwrap().kept(), 1);
}

/// Groups that the caller holds leave their slots, as far as the limit has room, and the pass goes on.
#[test]
fn a_group_may_leave_its_slot() {
    let model = Model::new(&SIZES);
    let groups = model.groups();
    let slot = (0..groups.len()).map(|group| groups.bytes(group)).max().unwrap_or_default() as u64;
    let limit = MemoryLimit::new(LANES + 4 * slot);
    let built = stream(groups).cycle().keep(0).memory_limit(&limit).build().unwrap();
    let mut groups = built.into_pass();
    let mut kept: Vec<Group> = Vec::new();
    for number in 0..2 {
        let mut group = groups.next().unwrap().unwrap();
        assert!(group.leave_slot().unwrap());
        assert!(!group.leave_slot().unwrap(), "it has left");
        model.check(&group, number);
        kept.push(group);
    }
    let mut third = groups.next().unwrap().unwrap();
    let refused = third.leave_slot().unwrap_err();
    assert!(matches!(refused, Error::Memory { .. }), "{refused}");
    drop(third);
    assert_eq!(groups.count(), SIZES.len() - 3);
    kept.iter().enumerate().for_each(|(number, group)| model.check(group, number));
    drop(kept);
    assert_eq!(limit.taken(), 0);
}

#[test]
fn what_fits_is_read_once() {
    let model = Model::new(&[300_000; 5]);
    for mode in [ReadMode::Auto, ReadMode::Direct] {
        let Ok(mut layers) = stream(model.groups()).cycle().read_mode(mode).memory_limit(1 << 30).build()
        else {
            continue;
        };
        layers.pass().for_each(|group| drop(group.unwrap()));
        let first = layers.report();
        for _pass in 0..2 {
            model.check_all(layers.pass(), 0..5);
        }
        let report = layers.report();
        assert_eq!((report.loads, report.reading.bytes), (first.loads, first.reading.bytes));
        assert_eq!(report.reading.disk, first.reading.disk);
        assert!(report.reading.bytes >= 3_000_000);
        // Passes are epochs; a group that is kept has no slot.
        assert_eq!((report.epochs, report.batches), (3, 5));
        assert!(mode == ReadMode::Direct || format!("{report:#}").contains("page cache"), "{report:#}");
        let page = report.html();
        assert!(page.contains("<svg") && !page.contains("workers"), "a stream has one thread: {page}");
    }
}

#[test]
fn tensors_are_found_by_name_and_type() {
    let model = Model::new(&[5, 6]);
    let tensors = Tensors::open([&model.path]).unwrap();
    let both = tensors.groups([["m.0.mlp.up", "m.1.mlp.up", "m.0.down"]]).unwrap();
    let mut layers = stream(both).build().unwrap();
    let group = layers.pass().next().unwrap().unwrap();
    let names: Vec<_> = group.tensors().map(|view| view.name()).collect();
    assert_eq!(names, ["m.0.mlp.up", "m.1.mlp.up", "m.0.down"]);
    assert_eq!(group.tensor("down").unwrap().cast::<f32>().unwrap(), [0.0; 4]);
    assert_eq!(group.tensor("down").unwrap().cast::<u8>().unwrap().len(), 16);
    for name in ["up", "p", "", "m.1.down", "m"] {
        let error = group.tensor(name).unwrap_err();
        assert!(matches!(&error, Error::Tensor { name: found, .. } if found == name), "{error}");
    }
    let error = group.tensor("m.0.mlp.up").unwrap().cast::<f32>().unwrap_err();
    assert_eq!(error.to_string(), "epoch 0, step 0: tensor \"m.0.mlp.up\": wanted bf16 [5], found f32");
    let error = group.tensor("m.0.mlp.up").unwrap().cast::<[u16; 2]>().unwrap_err();
    assert!(matches!(&error, Error::Tensor { found, .. } if found == "10 bytes"), "{error}");
}

#[test]
fn options_that_cannot_work_are_refused() {
    let model = Model::new(&[5]);
    let none = Tensors::open([&model.path]).unwrap().groups_by(|_| None::<u8>).unwrap();
    assert!(matches!(stream(none).build(), Err(Error::Option { option: "groups", .. })));
    for depth in [0, 1] {
        let built = stream(model.groups()).depth(depth).build();
        assert!(matches!(built, Err(Error::Option { option: "depth", .. })));
    }
    #[cfg(target_pointer_width = "64")]
    for depth in [1 << 31, 1 << 40, 1 << 62, usize::MAX] {
        let error = stream(model.groups()).depth(depth).build().unwrap_err();
        assert!(more_than_memory(&error, "depth", depth, 4096).starts_with("slots of 162 bytes"), "{error}");
    }
}

/// The step of an error is the place in the pass, also of a pass in which kept groups go without a slot.
#[test]
fn an_error_has_the_place_in_the_pass() {
    // Three of eight are kept: 2, 5 and 7.
    let (all, streamed) = ([3000; 8], [0, 1, 3, 4, 6]);
    let at = |error: &Error| match error {
        Error::Tensor { at, .. }
        | Error::Load { at, .. }
        | Error::SlotHeld { at, .. }
        | Error::Panicked { at, .. } => (at.epoch, at.step),
        error => panic!("{error}"),
    };
    let cut = |model: &Model, group: u64| {
        let file = std::fs::File::options().write(true).open(&model.path).unwrap();
        let bytes = 2 * 3000 + 16;
        let header = file.metadata().unwrap().len() - 8 * bytes;
        file.set_len(header + group * bytes + bytes / 2).unwrap();
    };
    for overlap in [true, false] {
        let model = Model::new(&all);
        let trace = model.path.with_extension("json");
        let builder = || stream(model.groups()).keep(3).overlap(overlap).read_mode(ReadMode::Pread);
        let mut layers = builder().trace(&trace).build().unwrap();
        for pass in 0..3 {
            for (step, group) in layers.pass().enumerate() {
                let error = group.unwrap().tensor("none").unwrap_err();
                assert_eq!(at(&error), (pass, Some(step as u64)));
            }
        }
        layers.close().unwrap();
        let events = crate::common::trace::events(&trace);
        for name in ["disk_load", "train"] {
            let events = events.iter().filter(|event| event["name"] == name && event["args"]["epoch"] == 2);
            let steps: Vec<_> = events.map(|event| event["args"]["step"].as_u64().unwrap()).collect();
            assert_eq!(steps, streamed, "{name}, overlap {overlap}");
        }

        let mut layers = builder().held_timeout(Duration::from_millis(20)).build().unwrap();
        layers.pass().for_each(|group| drop(group.unwrap()));
        let mut pass = layers.pass();
        let held: Vec<Group> = (0..3).map(|_| pass.next().unwrap().unwrap()).collect();
        let error = pass.next().unwrap().unwrap_err();
        assert_eq!(at(&error), (1, Some(3)), "{error}");
        let words = "found it held by what the caller received earlier: drop that, or raise `depth`";
        assert!(error.to_string().ends_with(words), "{error}");
        drop((held, pass));

        let mut layers = builder().build().unwrap();
        let mut back = builder().order(|_, step| 7 - step).build().unwrap();
        for layers in [&mut layers, &mut back] {
            layers.pass().for_each(|group| drop(group.unwrap()));
        }
        cut(&model, 4);
        let places = [(layers, 4), (back, 1)].map(|(mut layers, step)| {
            let found: Vec<_> =
                layers.pass().map(|group| group.map(drop).map_err(|error| at(&error))).collect();
            assert_eq!(found.len(), step + 1, "overlap {overlap}");
            (found.into_iter().last().unwrap().unwrap_err(), (1, Some(step as u64)))
        });
        places.iter().for_each(|(found, wanted)| assert_eq!(found, wanted, "overlap {overlap}"));
    }
    // An error that the caller did not wait for.
    let model = Model::new(&all);
    let builder = || stream(model.groups()).keep(3).read_mode(ReadMode::Pread).depth(8);
    let mut layers = builder().build().unwrap();
    layers.pass().for_each(|group| drop(group.unwrap()));
    cut(&model, 4);
    let mut pass = layers.pass();
    drop(pass.next().unwrap().unwrap());
    until(|| pass.report().loads >= 8 + 4);
    drop(pass);
    assert_eq!(at(&layers.close().unwrap_err()), (1, Some(4)));
}
