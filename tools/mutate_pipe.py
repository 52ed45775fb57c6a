#!/usr/bin/env python3
"""Breaks the pipe (src/pipe) in one place at a time and runs its tests. They must notice.

    python3 tools/mutate_pipe.py            all mutants; exit status 1 if one survives that has no excuse (an hour)
    python3 tools/mutate_pipe.py --only X   only mutants whose description matches the regular expression X
    python3 tools/mutate_pipe.py --list     only says what would be tried, and checks that each text is there once
    python3 tools/mutate_pipe.py --log F    appends each verdict to the file F, and skips the mutants that it has

What kills a mutant, and where it is made, is as in mutate_cuda.py.
"""

import sys

import mutate_cuda

# Quick ones first. What follows a program's name filters its tests.
TESTS = ["all pipe::", "all author::", "all promises::", "twinbuf-shuttle-pipe:histories", "all generate::", "all workers::", "all histories::", "all stuck::", "all waiting::", "all report::", "process"]

TIMEOUT_S = 40  # four times what the slowest takes, which waits for 10 s; the others take 3 s on a busy machine

TURN, WORKER, MOD, RING, ITEMS, PLAIN = (
    f"{name}.rs" for name in ("turn", "worker", "mod", "ring", "items", "plain")
)
# (file in src/pipe, what, the text, present once, its replacement)
MUTANTS = [
    # The turn.
    (TURN, "the caller waits for the turn", "Err(TryLockError::WouldBlock) if patience == Patience::None => return Take::InUse,", "Err(TryLockError::WouldBlock) if false => return Take::InUse,"),
    (TURN, "a unit is taken without a free slot", "if !R::wait_free(producer, None) {", "if !R::wait_free(producer, None) && false {"),
    (TURN, "a closed pipe starts units", "            if mail.closed {\n                return Take::Idle;", "            if mail.closed && false {\n                return Take::Idle;"),
    (TURN, "only the first order is fetched", "if let Some(new) = mail.posted.take() {", "if let Some(new) = mail.posted.take().filter(|_| mail.call < 2) {"),
    (TURN, "more is started than is granted", "} else if mail.stops == 0 && mail.started < mail.granted {", "} else if mail.stops == 0 && mail.started <= mail.granted {"),
    (TURN, "a started unit is not counted", "                mail.started = seq + 1;\n", ""),
    (TURN, "a load is not counted", "self.loads.fetch_add(1, Ordering::Relaxed);", "();"),
    (TURN, "a panic of the order unwinds", "                let next = caught(|| posted.order.next());\n                if", "                let next = Ok::<_, String>(posted.order.next());\n                if"),
    (TURN, "the end of a counted order takes a slot", "if matches!(next, Ok(None)) && seq >= posted.length {", "if matches!(next, Ok(None)) && seq > posted.length {"),
    (TURN, "the end of an order that is not counted takes no slot", "if matches!(next, Ok(None)) && seq >= posted.length {", "if matches!(next, Ok(None)) {"),
    (TURN, "the end of the order is a unit that was started", "(mail.started, mail.stops) = (seq, mail.stops + 1);", "mail.stops += 1;"),
    (TURN, "after its end the order is asked again", "(mail.started, mail.stops) = (seq, mail.stops + 1);", "mail.started = seq;"),
    (TURN, "a unit has the number of the next one", "header.ticket = Ticket { generation: call, seq, place };", "header.ticket = Ticket { generation: call, seq: seq + 1, place };"),
    (TURN, "a unit has no call", "header.ticket = Ticket { generation: call, seq, place };", "header.ticket = Ticket { generation: call & 1, seq, place };"),
    (WORKER, "no worker rests", "self.rests && times.end", "false && times.end"),
    (WORKER, "each worker rests", "self.rests && times.end", "times.end"),
    (TURN, "who is patient leaves", "} else if patience == Patience::Idle {", "} else if false {"),
    (TURN, "a clock runs once", "        mail.clock = false;\n", ""),
    (TURN, "a clock runs on after a close", ".filter(|_| !mail.closed)", ".filter(|_| true)"),
    (TURN, "a task is woken before its time", "            if rest.is_zero() {\n                let over", "            if true {\n                let over"),
    (TURN, "a task is not woken at its time", "over.into_iter().for_each(|(_, waker)| waker.wake())", "drop(over)"),
    (TURN, "the task of an earlier poll is woken", "        let old = mail.held.replace(task);", "        let old = mail.held.clone();\n        mail.held.get_or_insert(task);"),
    (TURN, "no clock runs", "        if !runs {", "        if runs {"),
    (TURN, "a task that waits no more is woken", "let old = lock(&self.mail).held.take();", "let old = None::<(Instant, Waker)>;"),
    (TURN, "a call has the number of the one before", "        mail.call += 1;\n", ""),
    (TURN, "a call goes on counting", "(mail.started, mail.granted, mail.stops, mail.resumed) = (0, granted, 0, Instant::now());", "(mail.granted, mail.stops, mail.resumed) = (granted, 0, Instant::now());"),
    (TURN, "a call begins without leave", "(mail.started, mail.granted, mail.stops, mail.resumed) = (0, granted, 0, Instant::now());", "(mail.started, mail.granted, mail.stops, mail.resumed) = (0, granted.min(1), 0, Instant::now());"),
    (TURN, "a call wakes nobody", "        self.posted.notify_all();\n        self.guard(\"order\", || drop(old));\n        call", "        self.guard(\"order\", || drop(old));\n        call"),
    (TURN, "leave is not given", "        (mail.granted, mail.resumed) = (granted, resumed);\n", "        mail.resumed = resumed;\n        let _ = granted;\n"),
    (TURN, "leave wakes nobody", "        (mail.granted, mail.resumed) = (granted, resumed);\n        drop(mail);\n        self.posted.notify_all();", "        (mail.granted, mail.resumed) = (granted, resumed);\n        drop(mail);"),
    (TURN, "leave is not taken back", "        mail.granted = mail.granted.min(mail.started);\n        mail.started\n", "        mail.started\n"),
    (TURN, "a unit that failed stops nothing", "        if mail.call == call {\n            mail.stops += 1;", "        if mail.call == call && false {\n            mail.stops += 1;"),
    (TURN, "a unit of an earlier call stops this one", "        if mail.call == call {\n            mail.stops += 1;", "        if mail.call >= call {\n            mail.stops += 1;"),
    (TURN, "a close is not told", "        lock(&self.mail).closed = true;\n", ""),
    (TURN, "a close wakes nobody", "        lock(&self.mail).closed = true;\n        self.posted.notify_all();", "        lock(&self.mail).closed = true;"),
    (TURN, "nobody waits for the workers", "rest, |mail| mail.alive > most);\n        let (mail, _) = waited.unwrap_or_else(PoisonError::into_inner);\n        mail.alive <= most\n", "rest, |_| false);\n        let (_mail, _) = waited.unwrap_or_else(PoisonError::into_inner);\n        let _ = most;\n        true\n"),
    (TURN, "a limit of a close is not kept", "until.map_or(FOREVER, |until| until.saturating_duration_since(Instant::now()))", "until.map_or(FOREVER, |_| FOREVER)"),
    (TURN, "a worker that leaves is not told", "        lock(&self.mail).alive -= 1;\n        self.left.notify_all();", "        lock(&self.mail).alive -= 1;"),
    (TURN, "each worker that leaves ends the pipe", "        let last = mail.running == 0;", "        let last = mail.running < 9;"),
    (TURN, "the last worker leaves the producer", "            self.end();\n", ""),
    (WORKER, "a panic of a source unwinds", "        let filled = caught(|| {\n            let Some(unit) = unit else { return Ok(Content::End) };\n            let _entered = span.enter();\n            let mut filling = shared.filling(lane.index, *ticket, load, who);\n            source.fill(unit, slot, &mut filling).map_err(Box::new)\n        });\n", "        let filled = Ok::<_, String>((|| {\n            let Some(unit) = unit else { return Ok(Content::End) };\n            let _entered = span.enter();\n            let mut filling = shared.filling(lane.index, *ticket, load, who);\n            source.fill(unit, slot, &mut filling).map_err(Box::new)\n        })());\n"),
    (WORKER, "what is read is not forgotten", "            shared.does(self.index, None);\n", ""),
    (WORKER, "what is read is not told", "        shared.does(self.index, Some(Doing { ticket, since: now, place: None }));\n", ""),
    # Driven workers.
    (WORKER, "a driver that fills is not waited for", "        mem::forget(inside);\n", "        drop(inside);\n"),
    (WORKER, "a driver that has nothing to fill is waited for", "                return Poll::Pending;", "                mem::forget(inside);\n                return Poll::Pending;"),
    (WORKER, "a driver that has filled is waited for", "            let _inside = Inside(&*self.shared);\n", ""),
    (WORKER, "a driver does not see the close", "if waits || shared.is_closed() {", "if waits {"),
    (WORKER, "a suspended fill is handed over", "        mem::forget(self);", "        drop(self);"),
    (WORKER, "a forgotten fill is committed", "            self.worker.end(Err(error));\n        }\n    }\n}\n\ndebug", "            drop(error);\n            self.worker.end(Ok(Content::Bytes(0)));\n        }\n    }\n}\n\ndebug"),
    (WORKER, "a driver that is dropped is not counted out", "        if !self.left {\n            self.shared.enter();\n            self.shared.leave();\n        }", "        if !self.left {}"),
    (MOD, "a close waits for an idle driver", "let idle = self.shared.is_idle();", "let idle = false;"),
    (TURN, "of what is read the last is told", "doing.min_by_key(|doing| (doing.ticket.generation, doing.ticket.seq))", "doing.max_by_key(|doing| (doing.ticket.generation, doing.ticket.seq))"),
    # The caller.
    (MOD, "a unit of an earlier call is delivered", "if (ticket.generation, ticket.seq) == expected {", "if ticket.seq == expected.1 {"),
    (MOD, "units are delivered out of order", "if (ticket.generation, ticket.seq) == expected {", "if ticket.generation == expected.0 || ticket.seq == expected.1 {"),
    (MOD, "a received unit is not counted", "        self.received += 1;\n", ""),
    (MOD, "a call counts what was received before it", "(self.received, self.stopped) = (0, None);", "self.stopped = None;"),
    (MOD, "a blocking wait takes a held slot for an empty one", "        if !matches!(waiting, Waiting::Block) {", "        if true {"),
    (MOD, "a held slot is an error at once", "if since.elapsed() < *held_timeout {", "if false {"),
    (MOD, "a held slot is waited for without end", "if since.elapsed() < *held_timeout {", "if true {"),
    (MOD, "a slot counts as held since an earlier item", "&& running.held_since.take().is_some() {", "&& running.held_since.is_some() {"),
    (MOD, "a drop after a task waits as long as any", "running.limit = if matches!(waiting, Waiting::Poll(_)) { TASK_LIMIT } else { END_LIMIT };", "running.limit = END_LIMIT;"),
    (MOD, "a drop does not end the workers", "        if self.consumer.is_some() {\n            self.end", "        if self.consumer.is_some() && false {\n            self.end"),
    (MOD, "the consumer stays while the workers end", "        let consumer = consumer.take();\n", "        let consumer = None::<R::Consumer>;\n"),
    (MOD, "a worker waits for itself", "usize::from(own), until", "0, until"),
    (MOD, "a worker joins itself", ".filter(|thread| thread.thread().id() != here)", ".filter(|_| true)"),
    (MOD, "a close hears no error", "let unheard = running.unheard(call, until);", "let unheard = running.unheard(call, until).filter(|_| false);"),
    (MOD, "a close hears the errors of earlier calls", "let heard = header.ticket.generation == call;", "let heard = header.ticket.generation <= call;"),
    (MOD, "a close after a unit that is missing is one in time", "        if !running.end(until.map(", "        if false && !running.end(until.map("),
    (MOD, "a close without time waits for no thread", "until.map(|until| soon.unwrap_or(until).max(until))", "until"),
    (MOD, "without overlap a unit that is there is not received", "own.fill(shared, unit, Some(start.unwrap_or_else(Instant::now)));\n                    return None;", "own.fill(shared, unit, Some(start.unwrap_or_else(Instant::now)));\n                    return Some(Received::Gone);"),
    (MOD, "without overlap a held slot is not waited for", "let by = waiting.release_by(&mut self.held_since, self.held_timeout);", "let by = None::<Instant>;"),
    (MOD, "a caller that helps loses what it finds", "                Received::Held => return None,\n                found => return Some(found),", "                Received::Held => return None,\n                found => drop(found),"),
    (MOD, "a caller helps although fills wait for a disk", "if !own.pays(shared) {", "if !own.pays(shared) && false {"),
    (MOD, "a caller helps with a long fill although its unit comes soon", " || took >= HELP_LIMIT && soon() {", " {"),
    (MOD, "a caller never helps with a long fill", "took >= HELP_LIMIT && soon()", "took >= HELP_LIMIT"),
    (MOD, "a caller helps with fills that take longer than it may wait", "took >= rest || ", ""),
    (MOD, "an order that panicked has no name", "Error::Panicked { who, message, .. } => Error::Panicked { at, who, message },", "Error::Panicked { who, message, .. } => Error::Panicked { at: At { step: None, ..at }, who, message },"),
    # The ring of host slots.
    (RING, "a unit outlives its item", "        drop(self.0.header.take());\n", ""),
    (RING, "a task takes a held slot for an empty one", "Poll::Pending if consumer.is_held() => Received::Held,", "Poll::Pending if false => Received::Held,"),
    (RING, "a release is not noted", "        self.0.header.load.freed = Some(Freed { number: self.0.seq(), at: Instant::now() });\n", ""),
    (TURN, "a release is not passed on", "Header::new(resumed, header.load.freed)", "Header::new(resumed, None)"),
    # The iterator, and the pipe's own front end.
    (ITEMS, "an end is no end", "        self.ended = true;\n        if !self", "        if !self"),
    (ITEMS, "a drop does not tell that the iteration was left", "    fn drop(&mut self) {\n        if !self.ended {", "    fn drop(&mut self) {\n        if !self.ended && false {"),
    (ITEMS, "in another process units are waited for", "        if front.pipe().is_orphaned() {", "        if false {"),
    (PLAIN, "an order whose length is known has an end", "(least, Some(most)) if least == most => Some(least as u64),", "(least, Some(most)) if least == most && most == 0 => Some(least as u64),"),
    (PLAIN, "what was left goes on being filled", "        self.retract();\n    }", "    }"),
    (PLAIN, "an error ends the iteration for ever", "        self.ended = false;\n", ""),
    # What an author's code does, and calls out of turn.
    (TURN, "a failure stops no unit that is granted later", "} else if mail.stops == 0 && mail.started < mail.granted {", "} else if mail.started < mail.granted {"),
    (TURN, "an order that ends late stops a later call", "                    if mail.call == call {\n                        (mail.started", "                    if mail.call >= call {\n                        (mail.started"),
    (TURN, "a panic of a drop ends the worker", "        if let Err(message) = caught(call) {", "        if let Err(message) = Ok::<(), String>(call()) {"),
    (TURN, "a panic of a drop is told nobody", "            lock(&self.mail).fault.get_or_insert((who, message));", "            let _ = (who, message);"),
    (TURN, "a panic of a drop is told twice", "lock(&self.mail).fault.take() } else", "lock(&self.mail).fault.clone() } else"),
    (TURN, "a panic of a drop waits for the close", "mail.fault.is_some());", "false);"),
    (TURN, "an order that is too short is at its end", "        if !there {\n            return Some(\"fewer\");\n        }\n", "        if !there {\n            return None;\n        }\n"),
    (TURN, "an order that is too long is cut off", "        more.then_some(\"more\")", "        more.then_some(\"more\").filter(|_| false)"),
    (TURN, "behind the last unit the order is asked again", "                if seq + 1 == posted.length || header", "                if false || header"),
    (TURN, "a clock that could not end runs no more", "self.guard(\"waker\", || over.into_iter().for_each(|(_, waker)| waker.wake()));", "over.into_iter().for_each(|(_, waker)| waker.wake());"),
    (TURN, "a call begins with the failures of the one before", "(0, granted, 0, Instant::now());", "(0, granted, mail.stops, Instant::now());"),
    (TURN, "a call waits since the one before", "(mail.started, mail.granted, mail.stops, mail.resumed) = (0, granted, 0, Instant::now());", "(mail.started, mail.granted, mail.stops) = (0, granted, 0);"),
    (TURN, "of two calls the later fill is told", "(doing.ticket.generation, doing.ticket.seq))", "doing.ticket.seq)"),
    (TURN, "an order is not dropped with the pipe", "        let posted = lock(&self.mail).posted.take();\n        self.guard(\"order\", || drop(posted));\n        self.forget_task();", "        self.forget_task();"),
    (TURN, "a task is remembered by a pipe that ended", "        self.guard(\"order\", || drop(posted));\n        self.forget_task();", "        self.guard(\"order\", || drop(posted));"),
    (TURN, "the sum of the bytes overflows", "self.times.bytes.saturating_add(bytes)", "self.times.bytes + bytes"),
    (MOD, "a unit that was passed over stops the others", "                self.running.shared.pass_over();\n", ""),
    (MOD, "a resumption passes over what the caller has not heard of", "        if self.stopped == Some(Stopped::Failed) {", "        if self.stopped != Some(Stopped::Ended) {"),
    (MOD, "the end of a source stops no later unit", "if self.stopped == Some(Stopped::Failed) {", "if self.stopped.is_some() {"),
    (MOD, "a failed unit is not remembered", "            self.stopped = Some(if result.is_ok() { Stopped::Ended } else { Stopped::Failed });\n", ""),
    (MOD, "a close tells no panic of a drop", ".or(fault)", ".or(fault.filter(|_| false))"),
    (MOD, "a close tells no error of a hook", ".or(failed)", ".or(failed.filter(|_| false))"),
    (MOD, "a call that finds nobody tells no panic", "self.running.shared.fault(&at).unwrap_or(Error::ThreadGone { at })", "Error::ThreadGone { at }"),
    (MOD, "a task is woken too late", "shared.wake_at(since + *held_timeout", "shared.wake_at(Instant::now() + *held_timeout"),
    (WORKER, "what failed before its fill is filled", "        if !header.is_to_fill() {\n", "        if header.unit.is_none() {\n"),
    (WORKER, "what failed before its fill is driven", "            if header.is_to_fill() {\n", "            if header.unit.is_some() {\n"),
    (RING, "a panic of a slot's drop is swallowed", "            resume_unwind(Box::new(message));\n", "            drop(message);\n"),
    (RING, "an error that nobody received outlives its slot", "mem::replace(&mut self.result, Ok(Content::End)))", "Ok(Content::End))"),
    (PLAIN, "units named by rounds overflow", "epoch.saturating_add(seq)", "epoch + seq"),
    (PLAIN, "a call that was not begun waits", "} else if self.call == 0 {", "} else if false {"),
    (PLAIN, "a call waits for what was not granted", "self.received >= self.begun.granted {", "self.received > self.begun.granted {"),
    (PLAIN, "a call waits for workers that nobody drives", "!driven.is_empty() && threads.is_empty() {", "false {"),
    (PLAIN, "a call goes on after its end", "} else if self.stopped.is_some() {", "} else if false {"),
    (PLAIN, "an empty order is not looked at", "length == Some(0) && units.next().is_some()", "length == Some(0) && false"),
    (PLAIN, "a caller has no source of its own", "            helper,\n", "            helper: helper.filter(|_| false),\n"),
    (PLAIN, "a unit that failed is not passed over", "        pipe.pass_over();\n", ""),
]

# What -> why no test can kill it.
EXCUSES = {
    "the end of the order is a unit that was started": "no unit starts behind the end, and nobody reads the number of a call that ended",
}

# What -> the test that is tried before all others.
FIRST = {
    "a release is not noted": "--lib pipe::ring",
    "a release is not passed on": "--lib pipe::tests",
    "a caller that helps loses what it finds": "--lib pipe::tests",
    "a caller helps although fills wait for a disk": "--lib pipe::tests",
    "a caller helps with fills that take longer than it may wait": "--lib pipe::tests",
    "a caller helps with a long fill although its unit comes soon": "--lib pipe::tests",
    "a caller never helps with a long fill": "--lib pipe::tests",
    "no worker rests": "--lib pipe::tests",
    "each worker rests": "--lib pipe::tests",
    "a unit of an earlier call stops this one": "twinbuf-shuttle-pipe:histories earlier",
    "the caller waits for the turn": "--lib pipe::tests",
    "a clock runs on after a close": "--lib pipe::tests",
    "a task is woken before its time": "--lib pipe::tests",
    **dict.fromkeys((what for _, what, *_ in MUTANTS[-36:]), "all author::"),
    "a task is remembered by a pipe that ended": "all pipe::",
    "the end of a source stops no later unit": "all pipe::",
    "a task is woken too late": "--lib pipe::turn",
    "a call waits since the one before": "--lib pipe::tests",
    "a clock that could not end runs no more": "--lib pipe::tests",
    "behind the last unit the order is asked again": "all pipe::",
    "of two calls the later fill is told": "all pipe::",
}

if __name__ == "__main__":
    tests_of = lambda _, what: [*([FIRST[what]] if what in FIRST else []), *TESTS]
    sys.exit(mutate_cuda.main(__doc__, "twinbuf", "src/pipe", MUTANTS, EXCUSES, tests_of, TIMEOUT_S))
