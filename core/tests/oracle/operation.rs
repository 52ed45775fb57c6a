//! The operations of a ring's user, and their encoding as bytes.

use std::sync::LazyLock;

/// One operation of a ring's user. An operation that is impossible at that point (its handle is gone, or nothing would
/// end its wait) is skipped. An index of a live guard wraps around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Ask for the next slot. If there is one, write to it and continue as `Then` says.
    Acquire(Call, Then),
    /// End the write that `Then::Hold` began.
    EndWrite(Then),
    /// `fill`. Its closure may panic.
    Fill {
        panics: bool,
    },
    /// Ask for the next filled slot. If there is one, read and write it and continue as `Use` says.
    Receive(Call, Use),
    /// Release the `k`th kept slot.
    Release(u8),
    /// Write to the `k`th kept slot.
    Write(u8),
    /// Forget the `k`th kept slot.
    LeakKept(u8),
    /// Commit the `k`th reserved slot.
    CommitReserved(u8),
    /// Cancel the `k`th reserved slot.
    DropReserved(u8),
    /// Write to the `k`th reserved slot.
    WriteReserved(u8),
    /// Forget the `k`th reserved slot.
    LeakReserved(u8),
    /// Try to reunite the producer with the consumer of another ring: refused.
    ReuniteOther,
    Finish,
    DropProducer,
    DropConsumer,
    LeakProducer,
    LeakConsumer,
    /// Reunite the two handles; if that succeeds, make a ring of the slots again.
    Reunite,
    /// Drop both handles and all guards. Split a borrowed ring again; replace an owned one with a new one.
    Restart,
    /// Ask the producer for what the consumer left unread, and write to it.
    Unread,
}

/// How a slot is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Try,
    Block,
    /// Wait for this many ticks of the world's clock.
    Ticks(u8),
    /// Wait with a timeout too long for the clock.
    Forever,
    /// Poll as this task.
    Poll(u8),
    /// Poll a future once as this task, and drop it.
    Await(u8),
}

/// How an acquired slot is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Commit,
    Reserve,
    Drop,
    Leak,
    /// Keep it while everything except the producer continues, up to `EndWrite`.
    Hold,
}

/// How a received slot is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Release,
    Keep,
    Leak,
}

/// The ring at the start of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    /// 1 to 4.
    pub(crate) depth: usize,
    /// A `HeapRing`, whose handles own it, instead of a `Ring`.
    pub(crate) heap: bool,
}

impl Operation {
    /// All operations, the simple ones first, because a failing sequence shrinks towards them. The index of an
    /// operation is its byte.
    pub(crate) fn all() -> &'static [Operation] {
        static ALL: LazyLock<Vec<Operation>> = LazyLock::new(Operation::list);
        &ALL
    }

    fn list() -> Vec<Operation> {
        const CALLS: [Call; 9] = [
            Call::Try,
            Call::Block,
            Call::Ticks(0),
            Call::Ticks(2),
            Call::Forever,
            Call::Poll(0),
            Call::Poll(1),
            Call::Await(0),
            Call::Await(1),
        ];
        const THENS: [Then; 5] = [Then::Commit, Then::Reserve, Then::Hold, Then::Drop, Then::Leak];
        let mut all = Vec::new();
        for then in THENS {
            all.extend(CALLS.map(|call| Self::Acquire(call, then)));
        }
        for then in [Use::Release, Use::Keep, Use::Leak] {
            all.extend(CALLS.map(|call| Self::Receive(call, then)));
        }
        all.extend(THENS.into_iter().filter(|&then| then != Then::Hold).map(Self::EndWrite));
        all.extend([false, true].map(|panics| Self::Fill { panics }));
        all.extend((0..4).flat_map(|k| [Self::Release(k), Self::Write(k)]));
        all.extend(
            (0..4).flat_map(|k| [Self::CommitReserved(k), Self::DropReserved(k), Self::WriteReserved(k)]),
        );
        all.extend([Self::LeakKept(0), Self::LeakReserved(0), Self::LeakReserved(1), Self::ReuniteOther]);
        all.extend(Self::ENDINGS);
        all.push(Self::Unread); // behind the others, whose bytes the corpus has
        all
    }

    /// The operations that take a handle away. They must be much rarer than the others, or a sequence ends early.
    pub(crate) const ENDINGS: [Operation; 7] = [
        Self::Finish,
        Self::DropProducer,
        Self::DropConsumer,
        Self::LeakProducer,
        Self::LeakConsumer,
        Self::Reunite,
        Self::Restart,
    ];

    /// Decodes a ring and its operations from bytes, one byte each. Any bytes are valid.
    pub(crate) fn decode(bytes: &[u8]) -> (Start, Vec<Operation>) {
        let all = Self::all();
        let (&start, bytes) = bytes.split_first().unwrap_or((&1, &[]));
        let start = Start { depth: usize::from(start & 3) + 1, heap: start & 4 != 0 };
        (start, bytes.iter().map(|&byte| all[usize::from(byte) % all.len()]).collect())
    }

    /// Encodes a ring and its operations as bytes, for the corpus.
    pub(crate) fn encode(start: Start, operations: &[Operation]) -> Vec<u8> {
        let all = Self::all();
        let byte = |operation| all.iter().position(|other| other == operation);
        let bytes = operations.iter().map(|operation| byte(operation).expect("all has every operation"));
        let start = start.depth - 1 + usize::from(start.heap) * 4;
        [start].into_iter().chain(bytes).map(|byte| u8::try_from(byte).expect("a byte each")).collect()
    }
}
