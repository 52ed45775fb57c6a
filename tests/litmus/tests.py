"""The litmus tests of the ring's protocol: its steps (`core/src/state.rs`), their orderings, and forbidden outcomes.

Each test runs unchanged (`strong`: no bad outcome, no data race), then with weakened orderings. `weak` lists the
changes that at least one model must notice, `keeps` those that change nothing, with the reason.
"""

from dataclasses import dataclass, field

from steps import LANGUAGES, Cas, If, Load, Read, Rmw, Set, Store, Write

# The word of a slot: `core/src/state.rs`.
# Without TX_ODD and RX_ODD: the exchange that sets TX_GONE and RX_GONE also sets these. The bits have other positions.
FULL, LAP, WAITER, CANCELLED, TX_GONE, TX_DONE, _, RX_GONE = (1 << n for n in range(8))
STICKY = TX_GONE | TX_DONE | RX_GONE
EVEN, ODD = 0, LAP

# The word of a waker cell: `core/src/waker.rs`.
LAST, REGISTERED, TAKING, AGAIN = (1 << n for n in range(4))

ORDERS = {
    # core/src/raw.rs
    'load': 'acq',  # SlotRef::state
    'commit': 'rel',  # SlotRef::hand_over, by its caller
    'cancel': 'rel',
    'release': 'rel',
    'failure': 'acq',  # all three
    'announce': 'rlx',  # SlotRef::announce
    'announce_failure': 'acq',
    'end': 'rel',  # RingRef::end
    # core/src/waker.rs
    'register_load': 'acq',  # take_back
    'take_back': 'rlx',
    'take_back_failure': 'acq',
    'publish': 'acqrel',  # register
    'publish_failure': 'rlx',
    'take': 'acqrel',  # take, with something registered
    'nothing': 'acqrel',  # take, with nothing registered
    'again': 'acqrel',  # take, with a wake under way and a newer registration
    'take_failure': 'rlx',
    'emptied': 'rel',  # take, its end
    'emptied_failure': 'rlx',
    # core/src/raw.rs, Share
    'share': 'rlx',
    'drop': 'acqrel',
    'count': 'rlx',  # is_all_with
    # What users and systems do around the ring.
    'lock': 'acq',
    'unlock': 'rel',
    'event': 'rel',  # SEV, made of a store
    'event_seen': 'acq',  # WFE
    'tell': 'rel',  # a thread joined, a task woken
    'told': 'acq',
    # Not an ordering: the word for which the producer, on an odd lap, takes the slot.
    'free_for': ODD,
    # Not an ordering: whether a commit of a reserved slot, or the release of a kept one, wakes both sides.
    'both': 1,
}


@dataclass
class Test:
    doc: str
    init: dict
    threads: list
    bad: str
    weak: list
    keeps: list = field(default_factory=list)  # of (change, reason)
    languages: tuple = LANGUAGES

    def variants(self):
        """Names and changed orderings, the strong form first."""
        yield 'strong', {}
        for change in [*self.weak, *(change for change, _ in self.keeps)]:
            yield variant(change), change


def variant(change):
    return '+'.join(f'{name}-{setting}' for name, setting in change.items())


TESTS = {}


def test(name, doc, init, *threads, bad, weak=(), keeps=(), languages=LANGUAGES):
    assert name not in TESTS
    threads = [list(flat(thread)) for thread in threads]
    TESTS[name] = Test(doc, init, threads, bad, list(weak), list(keeps), languages)


def flat(steps):
    for step in steps if isinstance(steps, (list, tuple)) else [steps]:
        if isinstance(step, (list, tuple)):
            yield from flat(step)
        else:
            yield step


# ---------------------------------------------------------------------------------------------------------------------
# The steps. Results are in registers: `ok` (the exchange succeeded), `old` (what it replaced or found).


def when(reg, value, *then, otherwise=()):
    return If(reg, value, list(flat(then)), list(flat(otherwise)))


def look(reg, word='w'):
    return Load(reg, word, 'load')


# The failure orderings shared by several exchanges.
FAILURE = dict(commit='failure', cancel='failure', release='failure', nothing='take_failure', again='take_failure')


def exchange(order, new, *seen, word='w', n='', then=()):
    """A hand-off's loop: one attempt for each state that it may find."""
    ok, old = f'ok{n}', f'old{n}'
    first, *rest = seen
    retry = when(old, rest[0], exchange(order, new, *rest, word=word, n=n, then=then)) if rest else []
    step = [Cas(ok, old, word, first, new(first), order, FAILURE.get(order, f'{order}_failure'))]
    return step + ([when(ok, 1, then, otherwise=[retry])] if then else [when(ok, 0, retry)] if rest else [])


def commit(*seen, lap=EVEN, **kwargs):
    return exchange('commit', lambda w: w & STICKY | FULL | lap, *seen or (EVEN,), **kwargs)


def cancel(*seen, lap=EVEN, **kwargs):
    return exchange('cancel', lambda w: w & STICKY | FULL | CANCELLED | lap, *seen, **kwargs)


def release(*seen, lap=EVEN, **kwargs):
    return exchange('release', lambda w: w & STICKY | lap ^ LAP, *seen, **kwargs)


def announce(seen, n=''):
    return exchange('announce', lambda w: w | WAITER, seen, n=n)


def end(reg, bits, word='w'):
    return Rmw('or', reg, word, bits, 'end')


# For tests with too many executions on LSE: its `CAS` may also write if it fails.
WITHOUT_LSE = tuple(language for language in LANGUAGES if language != 'LSE')

# ---------------------------------------------------------------------------------------------------------------------
# A value is published.

LOAD, COMMIT, RELEASE, CANCEL, END = ({name: 'rlx'} for name in ('load', 'commit', 'release', 'cancel', 'end'))

test(
    'publish',
    'The consumer finds FULL and reads the value.',
    {'w': 0, 'v': 0},
    [look('s'), when('s', EVEN, Write('v', 1), commit())],
    [look('r'), when('r', FULL, Read('x', 'v'))],
    bad='1:r=1 /\\ 1:x=0',
    weak=[LOAD, COMMIT],
)

test(
    'publish-announced',
    'As `publish`; the producer has added WAITER since, as it waits for the same slot.',
    {'w': 0, 'v': 0},
    [Write('v', 1), commit(then=announce(FULL, n=2))],
    [look('r'), when('r', FULL | WAITER, Read('x', 'v'))],
    bad='1:r=5 /\\ 1:x=0',
    weak=[LOAD, COMMIT],
)

test(
    'publish-ended',
    'As `publish`; the producer has ended since.',
    {'w': 0, 'v': 0},
    [Write('v', 1), commit(then=[end('g', TX_GONE)])],
    [look('r'), when('r', FULL | TX_GONE, Read('x', 'v'))],
    bad='1:r=17 /\\ 1:x=0',
    weak=[LOAD, COMMIT | END],
    keeps=[(COMMIT, 'the end releases too'), (END, 'its exchange continues the release sequence of the commit')],
)

test(
    'publish-out-of-order',
    'Two reserved slots, the second committed first: with the first, the consumer gets both.',
    {'w0': 0, 'w1': 0, 'v0': 0, 'v1': 0},
    [Write('v0', 1), Write('v1', 1), commit(word='w1', n=1), commit(word='w0', n=0)],
    [look('r0', 'w0'), when('r0', FULL, Read('x0', 'v0'), look('r1', 'w1'), when('r1', FULL, Read('x1', 'v1')))],
    bad='1:r0=1 /\\ (1:x0=0 \\/ (0:ok1=1 /\\ 1:r1=0) \\/ 1:x1=0)',
    weak=[LOAD, COMMIT],
)

test(
    'publish-two-threads',
    'Two reserved slots, committed by two threads in either order; the consumer reads in the order of the ring.',
    {'w0': 0, 'w1': 0, 'v0': 0, 'v1': 0},
    [Write('v0', 1), commit(word='w0')],
    [Write('v1', 1), commit(word='w1')],
    [look('r0', 'w0'), when('r0', FULL, Read('x0', 'v0'), look('r1', 'w1'), when('r1', FULL, Read('x1', 'v1')))],
    bad='2:r0=1 /\\ (2:x0=0 \\/ 2:x1=0)',
    weak=[LOAD, COMMIT],
)

# A slot comes back.

test(
    'recycle',
    'The second fill does not overtake the read of the first.',
    {'w': FULL, 'v': 1},
    [look('r'), when('r', FULL, Read('x', 'v'), release(FULL))],
    [look('s'), when('s', ODD, Write('v', 2), commit(ODD, lap=ODD))],
    bad='0:x=2',
    weak=[LOAD, RELEASE],
)

test(
    'recycle-mut',
    'The producer gets the value back as the consumer left it (`DerefMut`).',
    {'w': FULL, 'v': 1},
    [look('r'), when('r', FULL, Write('v', 5), release(FULL))],
    [look('s'), when('s', ODD, Read('y', 'v'), Write('v', 2))],
    bad='1:s=2 /\\ (1:y=1 \\/ v=5)',
    weak=[LOAD, RELEASE],
)

test(
    'recycle-retry',
    'As `recycle`; the release fails once, because the producer has announced itself.',
    {'w': FULL, 'v': 1},
    [look('r'), when('r', FULL, Read('x', 'v'), release(FULL, FULL | WAITER))],
    [announce(FULL), look('s'), when('s', ODD, Write('v', 2))],
    bad='0:x=2',
    weak=[LOAD, RELEASE],
)

test(
    'recycle-found',
    'As `recycle`; the free slot is found by the failed announcement.',
    {'w': FULL, 'v': 1},
    [look('r'), when('r', FULL, Read('x', 'v'), release(FULL))],
    [announce(FULL), when('ok', 0, when('old', ODD, Write('v', 2)))],
    bad='0:x=2',
    weak=[{'announce_failure': 'rlx'}, RELEASE],
)

test(
    'recycle-held',
    'A kept guard is released as the consumer, a lap ahead, announces itself: it finds the next commit, and its value.',
    {'w': FULL, 'v': 1},
    [announce(FULL), when('ok', 0, when('old', FULL | LAP, Read('x', 'v')))],
    [Read('y', 'v'), release(FULL)],
    [look('s'), when('s', ODD, Write('v', 2), commit(ODD, lap=ODD))],
    bad='0:x=1 \\/ 1:y=2',
    weak=[LOAD, RELEASE, COMMIT, {'announce_failure': 'rlx'}],
    languages=WITHOUT_LSE,
)

# Laps: N = 1. Each lap comes back to the same word.

test(
    'two-laps',
    'Two laps: the consumer gets each value once, in order.',
    {'w': 0, 'v': 0},
    [Write('v', 1), commit(then=[look('s'), when('s', ODD, Write('v', 2), commit(ODD, lap=ODD, n=2))])],
    [
        look('r'),
        when('r', FULL, Read('x', 'v'), release(FULL, then=[look('q'), when('q', FULL | LAP, Read('y', 'v'))])),
    ],
    bad='1:r=3 \\/ (1:r=1 /\\ (1:x=0 \\/ 1:x=2)) \\/ (1:ok=1 /\\ 1:q=1) \\/ (1:q=3 /\\ (1:y=0 \\/ 1:y=1))',
    weak=[LOAD, RELEASE, COMMIT],
)

test(
    'lap-reserved',
    'The producer, a lap ahead, does not touch the slot that it reserved and another thread still fills.',
    {'w': 0, 'v': 0},
    [look('s'), when('s', 'free_for', Write('v', 3))],
    [Write('v', 1), commit()],
    [look('r'), when('r', FULL, Read('x', 'v'), release(FULL))],
    bad='2:x=3 \\/ (0:s=2 /\\ v=1)',
    weak=[LOAD, COMMIT, RELEASE, {'free_for': EVEN}],
)

test(
    'lap-leaked-read',
    'A read guard that is never released: the consumer, a lap later, does not find FULL of its lap.',
    {'w': 0, 'v': 0},
    [Write('v', 1), commit(then=[look('s'), when('s', ODD, Write('v', 2), commit(ODD, lap=ODD, n=2))])],
    [look('r'), when('r', FULL, look('q'))],
    bad='1:r=1 /\\ 1:q=3',
    keeps=[(LOAD | COMMIT | {'failure': 'rlx'}, 'one word, in its modification order')],
)

# A reserved slot is dropped without a commit.

test(
    'cancel',
    'The producer gets a cancelled slot back once the thread that cancelled it is done with the value.',
    {'w': 0, 'v': 0},
    [look('s'), when('s', ODD, Read('y', 'v'), Write('v', 2))],
    [Write('v', 1), cancel(EVEN)],
    [look('r'), when('r', FULL | CANCELLED, release(FULL | CANCELLED))],
    bad='0:s=2 /\\ (0:y=0 \\/ v=1)',
    weak=[LOAD, CANCEL],
    keeps=[
        (RELEASE, 'the consumer has not touched the value; its exchange continues the release sequence of the cancel')
    ],
)

test(
    'cancel-then-value',
    'The consumer skips a cancelled slot and reads the next one; the thread that cancelled has committed it before.',
    {'w0': 0, 'w1': 0, 'v1': 0},
    [Write('v1', 1), commit(word='w1', n=1), cancel(EVEN, word='w0', n=0)],
    [
        look('r0', 'w0'),
        when(
            'r0',
            FULL | CANCELLED,
            release(FULL | CANCELLED, word='w0'),
            look('r1', 'w1'),
            when('r1', FULL, Read('x1', 'v1')),
        ),
    ],
    bad='1:r0=9 /\\ ((0:ok1=1 /\\ 1:r1=0) \\/ 1:x1=0)',
    weak=[LOAD, COMMIT | CANCEL],
    keeps=[(COMMIT, 'the cancel behind it releases the value too')],
)

# The end.

test(
    'end-error',
    'The consumer finds TX_GONE and reads what the producer left before.',
    {'w': 0, 'e': 0},
    [Write('e', 1), end('g', TX_GONE)],
    [look('r'), when('r', TX_GONE, Read('x', 'e'))],
    bad='1:r=16 /\\ 1:x=0',
    weak=[LOAD, END],
)

test(
    'end-found-by-commit',
    'A commit returns `Closed`: what the consumer left before is visible.',
    {'w': 0, 'e': 0},
    [Write('e', 1), end('g', RX_GONE)],
    [look('s'), when('s', EVEN, commit(EVEN, RX_GONE), when('ok', 1, when('old', RX_GONE, Read('x', 'e'))))],
    bad='1:old=128 /\\ 1:ok=1 /\\ 1:x=0',
    weak=[{'failure': 'rlx'}, END],
)

test(
    'end-kept-by-release',
    'A release keeps TX_GONE, which the consumer reads one lap later.',
    {'w': FULL, 'e': 0},
    [Write('e', 1), end('g', TX_GONE)],
    [
        look('r'),
        when(
            'r', FULL, release(FULL, FULL | TX_GONE), when('ok', 1, look('q'), when('q', ODD | TX_GONE, Read('x', 'e')))
        ),
    ],
    bad='1:q=18 /\\ 1:x=0',
    # `failure` alone: the language forbids it, an AArch64 with LSE and LDAPR does not (see README.md).
    weak=[END, LOAD | {'failure': 'rlx'}, {'failure': 'rlx'}],
)

test(
    'end-after-commit',
    'The producer commits, then ends: the consumer does not find the end in the place of the commit.',
    {'w': 0, 'v': 0},
    [Write('v', 1), commit(), end('g', TX_GONE)],
    [look('r')],
    bad='0:ok=1 /\\ 1:r=16',
    keeps=[(LOAD | COMMIT | END, 'one word, in its modification order')],
)

test(
    'end-late-commit',
    'The producer ends while a slot is reserved; its commit comes before or after. FULL comes with the value.',
    {'w': 0, 'v': 0},
    [end('g', TX_GONE)],
    [Write('v', 1), commit(EVEN, TX_GONE)],
    [
        look('r'),
        when('r', TX_GONE, look('r')),
        when('r', FULL, Read('x', 'v')),
        when('r', FULL | TX_GONE, Read('x', 'v')),
    ],
    bad='2:x=0',
    weak=[LOAD, COMMIT],
    keeps=[(END, 'its exchange continues the release sequence of the commit')],
)

test(
    'end-late-commit-finish',
    'As `end-late-commit`, by `finish`, which leaves the next slot: the value arrives, then what was left before the end.',
    {'w0': 0, 'w1': 0, 'v': 0, 'e': 0},
    [Write('e', 1), end('g0', TX_GONE | TX_DONE, 'w0'), end('g1', TX_GONE | TX_DONE, 'w1')],
    [Write('v', 1), commit(EVEN, TX_GONE | TX_DONE, word='w0')],
    [
        look('r0', 'w0'),
        when('r0', FULL | TX_GONE | TX_DONE, Read('x', 'v'), Read('y', 'e')),
        when('r0', FULL, Read('x', 'v'), look('r1', 'w1'), when('r1', TX_GONE | TX_DONE, Read('y', 'e'))),
    ],
    bad='2:x=0 \\/ 2:y=0',
    weak=[LOAD, COMMIT, END],
)

test(
    'end-bits',
    'A handle ends while a slot is committed: no bit is lost.',
    {'w': 0},
    [end('g', RX_GONE)],
    [commit(EVEN, RX_GONE)],
    bad='1:ok=1 /\\ ~(0:g=98) /\\ ~(w=129)',
    weak=[{'end': 'torn'}, {'commit': 'torn'}],
    keeps=[(END | COMMIT | {'failure': 'rlx'}, 'one word, in its modification order')],
)

# Waiting.

test(
    'wait-commit',
    'A waiter announces itself, or finds the commit; the commit replaces WAITER, and wakes.',
    {'w': 0},
    [announce(EVEN)],
    [commit(EVEN, WAITER)],
    bad='0:ok=1 /\\ 1:ok=1 /\\ 1:old=0',
    weak=[{'announce': 'torn'}, {'commit': 'torn'}],
    keeps=[(COMMIT | {'failure': 'rlx', 'announce_failure': 'rlx'}, 'one word, in its modification order')],
)

test(
    'wait-held',
    'A kept guard is released, then the slot committed: the consumer announces itself again, or finds it; each wakes.',
    {'w': FULL},
    [announce(FULL), when('ok', 0, when('old', ODD, announce(ODD, n=2)))],
    [release(FULL, FULL | WAITER, then=commit(ODD, ODD | WAITER, lap=ODD, n=2))],
    bad='(0:ok=1 /\\ 1:ok=1 /\\ 1:old=1) \\/ (0:ok2=1 /\\ 1:ok2=1 /\\ 1:old2=2)',
    weak=[{'announce': 'torn'}, {'release': 'torn'}, {'commit': 'torn'}],
    keeps=[
        (RELEASE | COMMIT | {'failure': 'rlx', 'announce_failure': 'rlx'}, 'one word, in its modification order')
    ],
    languages=('C', 'A64'),
)

test(
    'wait-end',
    'A waiter announces itself, or finds the end; the end finds WAITER, and wakes.',
    {'w': FULL},
    [end('g', RX_GONE)],
    [announce(FULL)],
    bad='1:ok=1 /\\ 0:g=1',
    weak=[{'end': 'torn'}, {'announce': 'torn'}],
    keeps=[(END, 'one word, in its modification order')],
)

test(
    'wait-finds-value',
    'The failed announcement finds FULL: the value is there.',
    {'w': 0, 'v': 0},
    [Write('v', 1), commit()],
    [announce(EVEN), when('ok', 0, when('old', FULL, Read('x', 'v')))],
    bad='1:ok=0 /\\ 1:old=1 /\\ 1:x=0',
    weak=[{'announce_failure': 'rlx'}, COMMIT],
)

LOCKED = [Rmw('swap', 'lk', 'l', 1, 'lock')]

test(
    'wait-futex',
    'A futex (a lock, a queue, a comparison) whose word is read Relaxed: no thread sleeps in a queue found empty.',
    {'w': 0, 'l': 0, 'q': 0},
    [
        announce(EVEN),
        when(
            'ok',
            1,
            LOCKED,
            when('lk', 0, Load('m', 'w', 'rlx'), when('m', WAITER, Write('q', 1)), Store('l', 0, 'unlock')),
        ),
    ],
    [
        commit(EVEN, WAITER),
        when('ok', 1, when('old', WAITER, LOCKED, when('lk', 0, Read('y', 'q'), Store('l', 0, 'unlock')))),
    ],
    bad='0:m=4 /\\ 1:lk=0 /\\ 1:y=0',
    weak=[{'lock': 'rlx'}, {'unlock': 'rlx'}],
    keeps=[(COMMIT | {'failure': 'rlx'}, "the lock's own ordering is enough")],
)

test(
    'wait-event',
    'WFE and SEV, as an event register: a waiter that takes the event finds the word changed.',
    {'w': WAITER, 'ev': 0},
    [Load('e', 'ev', 'event_seen'), when('e', 1, look('m'))],
    [commit(WAITER), Store('ev', 1, 'event')],
    bad='0:e=1 /\\ 0:m=4 /\\ 1:ok=1',
    weak=[{'event': 'rlx'}, {'event_seen': 'rlx'}],
)

# The waker cell. `c` is its word, `k0` and `k1` are its places; 0 is no waker.

PUBLISH, TAKE, NOTHING, AGAIN_, EMPTIED = 'publish', 'take', 'nothing', 'again', 'emptied'


def cell(order, seen, new, n, *more):
    """An exchange of the cell's word, and, if it fails, of (seen, new) in `more`."""
    pairs = dict([(seen, new), *more])
    return exchange(order, pairs.get, *pairs, word='c', n=n)


def publish(seen, new, *more, n='p'):
    return cell('publish', seen, new, n, *more)


def empty(place, reg):
    return [Read(reg, place), Write(place, 0)]


# A wake that finds the registration in place 0, and a registration there that is followed by a look.
WAKE = [cell('take', REGISTERED, TAKING, 't'), when('okt', 1, empty('k0', 'y'), cell('emptied', TAKING, 0, 'e'))]
REGISTER_AND_LOOK = [
    Load('t', 'c', 'register_load'),
    when('t', 0, Write('k0', 2), publish(0, REGISTERED), when('okp', 1, look('s'))),
]

test(
    'cell-taken',
    'A wake finds a registration: it finds the waker.',
    {'c': 0, 'k0': 0},
    [Write('k0', 1), publish(0, REGISTERED)],
    WAKE,
    bad='0:okp=1 /\\ 1:okt=1 /\\ (1:y=0 \\/ k0=1)',
    weak=[{'publish': 'acq'}, {'take': 'rel'}],
    keeps=[(EMPTIED_ := {'emptied': 'rlx'}, 'no registration follows')],
)

test(
    'cell-reused',
    'A registration after a wake: the new waker is neither taken early nor wiped out.',
    {'c': REGISTERED, 'k0': 1},
    [Load('s', 'c', 'register_load'), when('s', 0, Write('k0', 2), publish(0, REGISTERED))],
    WAKE,
    bad='0:s=0 /\\ (1:y=2 \\/ k0=0)',
    weak=[EMPTIED_, {'register_load': 'rlx'}],
)

test(
    'cell-reused-failed',
    'As `cell-reused`; the registrant fails to take its registration back, and finds that a wake has taken it.',
    {'c': REGISTERED, 'k0': 1},
    [cell('take_back', REGISTERED, 0, 'b'), when('okb', 0, when('oldb', 0, Write('k0', 2), publish(0, REGISTERED)))],
    WAKE,
    bad='0:okb=0 /\\ 0:oldb=0 /\\ (1:y=2 \\/ k0=0)',
    weak=[EMPTIED_, {'take_back_failure': 'rlx'}],
)

test(
    'cell-reused-while-taking',
    'A place that one wake has emptied is written again while the next wake empties the other place.',
    {'c': TAKING | REGISTERED, 'k0': 1, 'k1': 2},
    [
        Load('s', 'c', 'register_load'),
        when('s', TAKING | LAST, Write('k0', 3), publish(TAKING | LAST, TAKING | LAST | REGISTERED)),
    ],
    [empty('k0', 'x'), cell('emptied', TAKING | REGISTERED, REGISTERED | LAST, 'e')],
    [cell('take', REGISTERED | LAST, TAKING | LAST, 't')],
    bad='0:s=5 /\\ (1:x=3 \\/ k0=0)',
    weak=[EMPTIED_, {'register_load': 'rlx'}],
    keeps=[({'take': 'rlx'}, 'for this place: the take continues the release sequence of the wake before')],
)

test(
    'cell-taken-back',
    'A registrant takes its registration back and replaces the waker, or finds it taken and uses the other place.',
    {'c': REGISTERED, 'k0': 1, 'k1': 0},
    [
        cell('take_back', REGISTERED, 0, 'b'),
        when(
            'okb',
            1,
            Write('k0', 2),
            publish(0, REGISTERED),
            otherwise=[when('oldb', TAKING, Write('k1', 2), publish(TAKING, TAKING | REGISTERED))],
        ),
    ],
    [cell('take', REGISTERED, TAKING, 't'), when('okt', 1, empty('k0', 'y'))],
    bad='1:okt=1 /\\ ((0:okb=1 /\\ (1:y=1 \\/ k0=2)) \\/ (0:oldb=4 /\\ 0:okb=0 /\\ 1:y=2))',
    weak=[{'publish': 'acq'}, {'take': 'rel'}, {'take_back': 'torn'}],
)

test(
    'cell-newer-while-taking',
    'A registration during a wake goes to the other place; the next wake finds it there.',
    {'c': TAKING, 'k0': 1, 'k1': 0},
    [Write('k1', 2), publish(TAKING, TAKING | REGISTERED, (0, REGISTERED | LAST))],
    [empty('k0', 'x'), cell('emptied', TAKING, 0, 'e', (TAKING | REGISTERED, REGISTERED | LAST))],
    [cell('take', REGISTERED | LAST, TAKING | LAST, 't'), when('okt', 1, empty('k1', 'y'))],
    bad='0:okp=1 /\\ 2:okt=1 /\\ (2:y=0 \\/ k1=2)',
    weak=[{'publish': 'acq'}, {'take': 'rel'}, {'emptied': 'torn'}],
    keeps=[(EMPTIED_, 'its exchange continues the release sequence of the publication')],
    languages=WITHOUT_LSE,
)

test(
    'cell-again',
    'A second wake during a wake, for a newer registration: the first goes round once more and finds that one.',
    {'c': TAKING, 'k0': 1, 'k1': 0},
    [Write('k1', 2), publish(TAKING, TAKING | REGISTERED)],
    [
        cell('emptied', TAKING | REGISTERED | AGAIN, REGISTERED | LAST, 'e'),
        when('oke', 1, cell('take', REGISTERED | LAST, TAKING | LAST, 't'), when('okt', 1, empty('k1', 'y'))),
    ],
    [cell('again', TAKING | REGISTERED, TAKING | REGISTERED | AGAIN, 'g')],
    bad='1:okt=1 /\\ (1:y=0 \\/ k1=2)',
    weak=[{'publish': 'acq'}, {'take': 'rel'}],
    keeps=[
        ({'again': 'rlx', 'emptied': 'rlx'}, 'for the waker: both continue the release sequence of the publication')
    ],
)

# The wake came first in the cell's word, so the task must find the change of the slot's word.

SAW = 'the task registered and sleeps, though the wake came before the registration'

test(
    'cell-wake-first',
    'A wake finds nothing registered: the registration after it is followed by a look that finds the change.',
    {'w': WAITER, 'c': 0},
    [publish(0, REGISTERED), when('okp', 1, look('s'))],
    [commit(WAITER), when('ok', 1, cell('nothing', 0, 0, 'n'))],
    bad='0:okp=1 /\\ 0:s=4 /\\ 1:okn=1',
    weak=[{'nothing': 'acq'}, {'nothing': 'load'}, {'publish': 'rel'}],
    keeps=[
        (LOAD, 'the registration acquires'),
        (COMMIT, 'the wake releases'),
        ({'nothing': 'rel'}, 'nothing is taken'),
    ],
)

test(
    'cell-wake-first-announce',
    'As `cell-wake-first`; the look is the announcement, which then fails.',
    {'w': 0, 'c': 0},
    [publish(0, REGISTERED), when('okp', 1, announce(EVEN))],
    [commit(EVEN, WAITER), when('ok', 1, when('old', WAITER, cell('nothing', 0, 0, 'n')))],
    bad='0:okp=1 /\\ 0:ok=1 /\\ 1:okn=1 /\\ 1:ok=1 /\\ 1:old=4',
    # Visible only where loads may be reordered with later stores (c20-lb).
    weak=[{'nothing': 'acq'}, {'publish': 'rel'}],
)

test(
    'cell-wake-first-taking',
    'As `cell-wake-first`; another wake is under way, which leaves its own registration, and ends before or after.',
    {'w': WAITER, 'c': TAKING},
    [publish(TAKING, TAKING | REGISTERED, (0, REGISTERED | LAST)), when('okp', 1, look('s'))],
    [cell('emptied', TAKING, 0, 'e')],
    [commit(WAITER), when('ok', 1, cell('nothing', TAKING, TAKING, 'n'))],
    bad='0:okp=1 /\\ 0:s=4 /\\ 2:okn=1',
    weak=[{'nothing': 'acq'}, {'nothing': 'load'}, {'publish': 'rel'}],
    keeps=[(EMPTIED_, 'its exchange continues the release sequence of the wake')],
    languages=WITHOUT_LSE,
)

test(
    'cell-take-first',
    'A wake takes a registration; a newer one, made meanwhile, is followed by a look that finds the change.',
    {'w': WAITER, 'c': REGISTERED, 'k0': 1, 'k1': 0},
    [
        Load('t', 'c', 'register_load'),
        when('t', TAKING, Write('k1', 2), publish(TAKING, TAKING | REGISTERED), when('okp', 1, look('s'))),
    ],
    [commit(WAITER), when('ok', 1, cell('take', REGISTERED, TAKING, 't'))],
    bad='0:okp=1 /\\ 0:s=4 /\\ 1:okt=1',
    weak=[{'take': 'acq'}, {'publish': 'rel', 'register_load': 'rlx'}],
    keeps=[
        ({'publish': 'rel'}, 'here the load before has acquired the take'),
        ({'register_load': 'rlx'}, 'the publication acquires'),
    ],
)

test(
    'cell-emptied-first',
    'As `cell-take-first`; the registration comes after the end of that wake.',
    {'w': WAITER, 'c': REGISTERED, 'k0': 1},
    REGISTER_AND_LOOK,
    [
        commit(WAITER),
        when('ok', 1, WAKE),
    ],
    bad='0:okp=1 /\\ 0:s=4 /\\ 1:oke=1',
    weak=[EMPTIED_ | {'take': 'acq'}, {'publish': 'rel', 'register_load': 'rlx'}],
    keeps=[({'take': 'acq'}, 'here the end of the wake releases')],
)

test(
    'cell-left-to-first',
    'A second wake during a wake, nothing newer registered: the task that the first wakes finds the second change.',
    {'w': WAITER, 'c': TAKING, 'k0': 1, 'wk': 0},
    [
        Load('f', 'wk', 'told'),
        when('f', 1, REGISTER_AND_LOOK),
    ],
    [empty('k0', 'y'), cell('emptied', TAKING, 0, 'e'), when('oke', 1, Store('wk', 1, 'tell'))],
    [commit(WAITER), when('ok', 1, cell('nothing', TAKING, TAKING, 'n'))],
    bad='0:okp=1 /\\ 0:s=4 /\\ 2:okn=1',
    weak=[{'nothing': 'acq'}, {'emptied': 'torn'}, {'publish': 'rel', 'register_load': 'rlx'}],
    keeps=[({'register_load': 'rlx'}, 'for the look: the publication acquires')],
    languages=WITHOUT_LSE,
)

test(
    'cell-again-woken',
    'As `cell-again`: the task that the second round wakes finds the second change, even before it registers.',
    {'w': WAITER, 'c': TAKING | REGISTERED, 'k1': 1, 'wk': 0},
    [Load('f', 'wk', 'told'), when('f', 1, look('s'))],
    [
        cell('emptied', TAKING | REGISTERED | AGAIN, REGISTERED | LAST, 'e'),
        when(
            'oke',
            1,
            cell('take', REGISTERED | LAST, TAKING | LAST, 't'),
            when('okt', 1, empty('k1', 'y'), Store('wk', 1, 'tell')),
        ),
    ],
    [commit(WAITER), when('ok', 1, cell('again', TAKING | REGISTERED, TAKING | REGISTERED | AGAIN, 'g'))],
    bad='0:f=1 /\\ 0:s=4 /\\ 2:okg=1',
    weak=[{'again': 'acq'}, {'take': 'rel'}],
    languages=WITHOUT_LSE,
)

test(
    'cell-again-taken-back',
    'The second wake has asked for another round; a registrant takes its registration back and finds the change.',
    {'w': WAITER, 'c': TAKING | REGISTERED, 'k1': 1},
    [
        cell('take_back', TAKING | REGISTERED | AGAIN, TAKING | AGAIN, 'b'),
        when(
            'okb',
            1,
            Write('k1', 2),
            publish(TAKING | AGAIN, TAKING | REGISTERED | AGAIN),
            when('okp', 1, look('s')),
        ),
    ],
    [commit(WAITER), when('ok', 1, cell('again', TAKING | REGISTERED, TAKING | REGISTERED | AGAIN, 'g'))],
    bad='0:okp=1 /\\ 0:s=4',
    weak=[{'again': 'acq'}, {'publish': 'rel'}],
    keeps=[({'again': 'rel'}, 'nothing is taken')],
)

test(
    'cell-both',
    'Producer and consumer wait for one slot with one WAITER: its commit, or the release of a kept guard, wakes both.',
    {'w': 0, 'c': 0},
    [publish(0, REGISTERED), when('okp', 1, look('s'))],
    [announce(EVEN)],
    [
        commit(EVEN, WAITER),
        when('ok', 1, when('old', WAITER, Set('okn', 1), when('both', 1, cell('nothing', 0, 0, 'n')))),
    ],
    bad='0:okp=1 /\\ 0:s=4 /\\ 2:ok=1 /\\ 2:old=4 /\\ 2:okn=1',
    weak=[{'nothing': 'acq'}, {'publish': 'rel'}, {'both': 0}],
    languages=WITHOUT_LSE,
)

# Register and wake as a whole, two threads. Too many executions for the models of the machines.


def register(registered):
    """Leaves the first load out: instead, the failed exchange finds that a wake has begun or ended."""
    to_k0 = [Write('k0', 2), publish(0, REGISTERED)]
    to_k1 = [Write('k1', 2), publish(TAKING, TAKING | REGISTERED, (0, REGISTERED | LAST))]
    if not registered:
        return to_k0
    taken = [when('oldb', TAKING, to_k1), when('oldb', 0, to_k0)]
    return [cell('take_back', REGISTERED, 0, 'b'), when('okb', 1, to_k0, otherwise=taken)]


def wake(registered):
    """A wake that finds a registration, or first an empty cell."""
    take = cell('take', REGISTERED, TAKING, 't')
    return [
        take if registered else [cell('nothing', 0, 0, 'n'), when('okn', 0, take)],
        when('okt', 1, empty('k0', 'y'), cell('emptied', TAKING, 0, 'e', (TAKING | REGISTERED, REGISTERED | LAST))),
    ]


WHOLE = [
    {'publish': 'acq'},
    {'take': 'rel'},
    {'nothing': 'acq', 'take': 'acq'},
    {'publish': 'rel', 'take_back_failure': 'rlx'},
]

test(
    'cell-whole-announce',
    'A task registers in an empty cell and announces itself; the commit wakes. The task is not left asleep.',
    {'w': 0, 'c': 0, 'k0': 0},
    [register(0), when('okp', 1, announce(EVEN))],
    [commit(EVEN, WAITER), when('ok', 1, when('old', WAITER, wake(0)))],
    bad='0:okp=1 /\\ 0:ok=1 /\\ 1:ok=1 /\\ 1:old=4 /\\ ~(1:y=2)',
    weak=WHOLE,
    languages=('C',),
)

test(
    'cell-whole-leftover',
    'As `cell-whole-announce`; WAITER was there before, so the task only looks.',
    {'w': WAITER, 'c': 0, 'k0': 0},
    [register(0), when('okp', 1, look('s'))],
    [commit(WAITER), when('ok', 1, wake(0))],
    bad='0:okp=1 /\\ 0:s=4 /\\ 1:ok=1 /\\ ~(1:y=2)',
    weak=WHOLE,
    languages=('C',),
)

test(
    'cell-whole-registered',
    'As `cell-whole-leftover`, from an older registration in place 0, which the wake may take.',
    {'w': WAITER, 'c': REGISTERED, 'k0': 1, 'k1': 0},
    [register(1), when('okp', 1, look('s'))],
    [commit(WAITER), when('ok', 1, wake(1))],
    bad='0:okp=1 /\\ 0:s=4 /\\ 1:ok=1 /\\ 1:okt=1 /\\ ~(1:y=2)',
    weak=WHOLE,
    languages=('C',),
)

# Freeing. `n` is the count of shares; the last owner writes 9 over everything.


def let_go(*then, n='d'):
    return [Rmw('add', n, 'n', -1, 'drop'), when(n, 1, then)]


DROP_ACQ, DROP_REL, DROP = ({'drop': order} for order in ('acq', 'rel', 'rlx'))

test(
    'free-handles',
    'The ring is freed by the second of its handles, not while the other one uses it.',
    {'n': 2, 'u': 0, 'v': 0},
    [Read('x', 'u'), let_go(Read('y', 'v'), Write('u', 9), Write('v', 9))],
    [Write('v', 1), let_go(Write('u', 9), Write('v', 9))],
    bad='0:x=9 \\/ 0:y=0 \\/ (v=1 /\\ (0:d=1 \\/ 1:d=1))',
    weak=[DROP_ACQ, DROP_REL, DROP],
)

test(
    'free-share',
    'A handle makes a share while the other handle gives up its own: the ring is freed once, by the last of the three.',
    {'n': 2, 'u': 0, 'v': 0},
    [
        Rmw('add', 'm', 'n', 1, 'share'),
        let_go(Write('u', 9), Write('v', 9)),
        Read('x', 'u'),
        let_go(Write('u', 9), Write('v', 9), n='f'),
    ],
    [Write('v', 1), let_go(Write('u', 9), Write('v', 9))],
    bad='~(0:m=98 \\/ 0:d=98 \\/ 0:f=98 \\/ 1:d=98) /\\ (0:x=9 \\/ ~(v=9))',
    weak=[{'share': 'torn'}, {'drop': 'torn'}, DROP_ACQ, DROP_REL, DROP],
)

test(
    'free-guard',
    'A guard on another thread reads, releases, wakes (reads the waker) and drops its share; the ring is alive.',
    {'n': 2, 'w': FULL, 'v': 1, 'k': 1},
    [Read('x', 'v'), release(FULL), Read('y', 'k'), let_go(Write('v', 9), Write('k', 9))],
    [look('r'), let_go(Write('v', 9), Write('k', 9), Store('w', 9, 'rlx'))],
    bad='0:x=9 \\/ 0:y=9 \\/ (0:ok=0 /\\ 0:old=9)',
    weak=[DROP_ACQ, DROP_REL, DROP],
)

test(
    'free-reunite',
    '`reunite` finds two shares, drops one and takes the slots with the other; no guard is still at work.',
    {'n': 3, 'w': FULL, 'v': 1},
    [
        Load('m', 'n', 'count'),
        when(
            'm',
            2,
            Rmw('add', 'd', 'n', -1, 'drop'),
            when('d', 2, Read('z', 'v'), Write('v', 9), Store('w', 9, 'rlx')),
        ),
    ],
    [Read('x', 'v'), Write('v', 5), release(FULL), Rmw('add', 'd', 'n', -1, 'drop')],
    bad='1:x=9 \\/ (1:ok=0 /\\ 1:old=9) \\/ (0:d=2 /\\ (0:z=1 \\/ v=5))',
    weak=[DROP_ACQ, DROP_REL, DROP],
)
