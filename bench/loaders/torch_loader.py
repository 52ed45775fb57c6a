"""PyTorch's DataLoader over a numpy memmap, as a subject of this benchmark (see src/work.rs for what that is).

    torch_loader.py WORKERS --kind tokens|images --data FILE --order FILE|sequential [--batch N] [--epochs E]
                    [--compute-us U] [--decode-us U] [--verify] [--fail FAULT@STEP]

How it is set up:

- A whole batch is one item: `batch_size=None`, and the sampler yields arrays of indices ("Disable automatic batching"
  in the documentation of torch.utils.data). So there is one call a batch, and no collation of items.
- A worker copies from the map into the shared memory in which the batch is handed over, as torch's own
  `default_collate` does in a worker; a tensor from elsewhere would be copied there on its way.
- `persistent_workers=True`, so that processes are started once and not once an epoch; `prefetch_factor=2`, the default.
- Token ids become int32, as an embedding takes them.

`batch_sampler` with `__getitems__`, and the sharing strategy `file_system`, were tried on shuffled images and could not
be told apart from this, on a busy machine.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

# Tokens of a window, of which the first of the next window is the last.
WINDOW = 1024 + 1

# kind: number of the file, bytes before the first record, shape of a record, numbers from one record to the next,
# number of the batch, records of a batch.
KINDS = {
    "tokens": ("<u2", 1024, (WINDOW,), WINDOW - 1, torch.int32, 64),
    "images": ("u1", 0, (224, 224, 3), 224 * 224 * 3, torch.uint8, 32),
}


class Records(Dataset):
    """The records of the file; an item is a batch, and its index the array of its records' numbers."""

    def __init__(self, kind, path):
        number, header, shape, step, self.dtype, _ = KINDS[kind]
        # As a plain array: each slice of a `memmap` is made by slow code of its own.
        numbers = np.asarray(np.memmap(path, dtype=number, mode="r", offset=header))
        count = (len(numbers) - int(np.prod(shape))) // step + 1
        strides = (step * numbers.itemsize, *np.empty(shape, number).strides)
        self.records = np.lib.stride_tricks.as_strided(numbers, (count, *shape), strides, writeable=False)
        # The first record of the batch that fails, and how.
        self.fails_at, self.fault = None, None
        # CPU time a record.
        self.decode_s = 0.0

    def __len__(self):
        return len(self.records)

    def __getitem__(self, indices):
        if self.fails_at == indices[0]:
            self.fail()
        end = time.thread_time() + self.decode_s * len(indices)
        while self.decode_s and time.thread_time() < end:
            pass
        batch = self.room((len(indices), *self.records.shape[1:]))
        if batch.dtype == torch.int32:
            # Not `take`, which would copy the whole map, as its windows overlap.
            batch.numpy()[...] = self.records[indices]
        else:
            # With mode "raise" it would take a copy more; the indices are right.
            self.records.take(indices, axis=0, out=batch.numpy(), mode="clip")
        return batch

    def room(self, shape):
        """Memory for a batch: in a worker, where the caller sees it too."""
        if get_worker_info() is None:
            return torch.empty(shape, dtype=self.dtype)
        empty = torch.empty(0, dtype=self.dtype)
        return empty.new(empty._typed_storage()._new_shared(int(np.prod(shape)))).resize_(*shape)

    def fail(self):
        if self.fault == "panic":
            raise RuntimeError("a fault that was asked for")
        if get_worker_info() is None:
            raise SystemExit("--fail kill: there is no worker that could be killed")
        os.kill(os.getpid(), signal.SIGKILL)


class Meter:
    """Times what the loader does, and computes on its batches."""

    def __init__(self, args):
        self.args = args
        # For all that was asked for, and for the batches received.
        self.waited_s, self.wait_s = 0.0, 0.0
        self.first_wait_s, self.first_s, self.last = 0.0, 0.0, 0.0
        self.first_cpu_s, self.last_cpu_s = 0.0, 0.0
        self.batches, self.digest, self.sum = 0, 0, 0

    def ready(self):
        """Everything is open: waits for the go."""
        print("ready", flush=True)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.cpu_before_s = usage.ru_utime + usage.ru_stime
        sys.stdin.readline()
        self.started = time.monotonic()

    def wait(self, call, *args):
        """What `call` returns; the time that it takes is the caller's wait."""
        asked = time.monotonic()
        try:
            return call(*args)
        finally:
            self.waited_s += time.monotonic() - asked

    def take(self, batch):
        """Uses a batch: reads one number of every record, and is busy for the time to compute."""
        got = time.monotonic()
        self.wait_s = self.waited_s
        if self.batches == 0:
            self.first_s, self.first_wait_s = got - self.started, self.wait_s
            self.first_cpu_s = self.cpu()
        if len(batch) != self.args.batch:
            raise ValueError(f"a batch: wanted {self.args.batch} records, found {len(batch)}")
        records = batch.numpy().reshape(len(batch), -1)
        records[:, records.shape[1] // 2].sum()
        if self.args.verify:
            self.verify(records)
        if self.args.fail == ("truncate", self.batches):
            os.truncate(self.args.data, os.path.getsize(self.args.data) // 2)
        self.batches += 1
        if self.args.compute_us:
            rest = got + self.args.compute_us / 1e6 - time.monotonic()
            if rest > 0:
                time.sleep(rest)
        self.last = time.monotonic()

    def cpu(self):
        """CPU time so far, that of the workers included."""
        # The clock of another process, as clock_getcpuclockid(3) makes it.
        clocks = [~worker.pid << 3 | 2 for worker in multiprocessing.active_children()]
        return time.process_time() + sum(map(time.clock_gettime, clocks))

    def end(self):
        """After the last batch, while there are workers."""
        self.last_cpu_s = self.cpu()

    def verify(self, records):
        if self.args.kind == "tokens":
            numbers = np.ascontiguousarray(records[:, :4].astype("<u2")).view("<u8")
        else:
            numbers = np.ascontiguousarray(records[:, :8]).view("<u8")
        for number in numbers.ravel().tolist():
            self.digest = (self.digest * 6364136223846793005 + number + 1) % 2**64
        self.sum = (self.sum + int(records.sum(dtype=np.uint64))) % 2**64

    def outcome(self, error):
        verify = self.args.verify
        return {
            "samples": self.batches * self.args.batch,
            "batches": self.batches,
            "wall_s": self.last - self.started if self.batches else 0.0,
            "wait_s": self.wait_s,
            "cpu_s": self.last_cpu_s - self.first_cpu_s,
            "first_wait_s": self.first_wait_s,
            "first_s": self.first_s,
            "cpu_before_s": self.cpu_before_s,
            "digest": f"{self.digest:016x}" if verify else None,
            "sum": self.sum if verify else None,
            "error": error,
        }


def parse():
    def fault(text):
        name, step = text.split("@")
        if name not in ("panic", "kill", "truncate"):
            raise ValueError(text)
        return name, int(step)

    parser = argparse.ArgumentParser()
    parser.add_argument("workers", type=int)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--order", required=True)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--compute-us", type=int, default=0)
    parser.add_argument("--decode-us", type=int, default=0)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--fail", type=fault)
    args = parser.parse_args()
    args.batch = args.batch or KINDS[args.kind][-1]
    return args


def batches_of(args, count):
    """The numbers of the records of each batch; those that fill no whole batch are left out."""
    order = np.arange(count) if args.order == "sequential" else np.fromfile(args.order, "<u8").astype(np.int64)
    if len(order) != count:
        raise ValueError(f"the order: wanted {count} records, found {len(order)}")
    return order[: count // args.batch * args.batch].reshape(-1, args.batch)


def run(args, meter):
    dataset = Records(args.kind, args.data)
    dataset.decode_s = args.decode_us / 1e6
    batches = batches_of(args, len(dataset))
    if args.fail and args.fail[0] != "truncate":
        dataset.fault, dataset.fails_at = args.fail[0], batches[args.fail[1]][0]
    processes = {"persistent_workers": True, "prefetch_factor": 2} if args.workers else {}
    loader = DataLoader(dataset, batch_size=None, sampler=batches, num_workers=args.workers, **processes)
    meter.ready()
    for _ in range(args.epochs):
        epoch = meter.wait(iter, loader)
        while (batch := meter.wait(next, epoch, None)) is not None:
            meter.take(batch)
    meter.end()
    # The loader goes here, and with it its workers, which it waits for.


def main():
    args = parse()
    meter = Meter(args)
    error = None
    try:
        run(args, meter)
    except Exception as caught:
        # Without the trace in between, and the same in each run.
        first, *rest = str(caught).strip().splitlines() or [""]
        words = " ... ".join([f"{type(caught).__name__}: {first}", *rest[-1:]])
        error = re.sub(r"pid(\(s\))? [0-9, ]+", r"pid\1 ...", words)
    print(json.dumps(meter.outcome(error)), flush=True)


if __name__ == "__main__":
    main()
