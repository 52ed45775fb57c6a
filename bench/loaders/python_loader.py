"""Loaders for Python, all but twinbuf over a numpy mapping, as subjects of this benchmark (src/work.rs defines a subject).

    python_loader.py twinbuf|torch|spdl|grain|dataloader_rs WORKERS

Each line of JSON starts a run, such as {"kind": "images", "data": FILE, "order": null, "batch": 32, "epochs": 1,
"train_us": 0, "verify": false}.

Their setup:

- A whole batch is one item, made of an array of record numbers. So there is one call per batch, and no collation
  of records.
- torch: `batch_size=None` and a sampler of index arrays ("Disable automatic batching" in the documentation of
  torch.utils.data). A worker copies from the mapping into the shared memory of the batch, like torch's
  `default_collate` in a worker. With workers, `persistent_workers=True`: processes are started once, not once per
  epoch, and `prefetch_factor=2`, the default.
- spdl: one stage with `concurrency=WORKERS` in a thread pool of the same size and `output_order="input"`, as its
  documentation advises for functions that release the GIL, like the copy. The sink is the default, 3 batches.
- grain: `ReadOptions(num_threads=WORKERS)`; 16 threads are its default. The buffer has one batch more than there are
  threads: the default of 500 is for records of a few KiB.
- dataloader_rs: `num_workers` threads and `prefetch_depth=2`, the default.
- Token ids become 32 bits wide, as an embedding takes them.

`batch_sampler` with `__getitems__`, and the sharing strategy `file_system`, were tried for torch on shuffled images,
on a busy machine: no difference was measurable.
"""

import gc
import json
import multiprocessing
import re
import sys
import time

import numpy as np

# Tokens of a window. The first token of the next window is the last one of this window.
WINDOW = 1024 + 1

# kind: number of the file, bytes before the first record, shape of a record, numbers from one record to the next,
# number of the batch.
KINDS = {
    "tokens": ("<u2", 1024, (WINDOW,), WINDOW - 1, np.int32),
    "images": ("u1", 0, (224, 224, 3), 224 * 224 * 3, np.uint8),
}


class Records:
    """The records of the file; an item is a batch."""

    def __init__(self, work):
        number, header, shape, step, self.dtype = KINDS[work["kind"]]
        # A plain array: slicing a `memmap` runs slow Python code.
        numbers = np.asarray(np.memmap(work["data"], dtype=number, mode="r", offset=header))
        count = (len(numbers) - int(np.prod(shape))) // step + 1
        strides = (step * numbers.itemsize, *np.empty(shape, number).strides)
        self.records = np.lib.stride_tricks.as_strided(numbers, (count, *shape), strides, writeable=False)

    def read(self, indices, out=None):
        """The batch of these records: in `out`, or in a new array."""
        if out is None:
            out = np.empty((len(indices), *self.records.shape[1:]), self.dtype)
        if out.dtype == np.int32:
            # Not `take`: it would copy the whole map, because its windows overlap.
            out[...] = self.records[indices]
        else:
            # Mode "raise" would make one more copy; the indices are valid.
            self.records.take(indices, axis=0, out=out, mode="clip")
        return out


class Trainer:
    """A training step that takes CPU time: many small products."""

    def __init__(self, step_s):
        self.numbers = np.linspace(0, 1, 48 * 48, dtype=np.float32).reshape(48, 48)
        self.out = np.empty_like(self.numbers)
        self.products = 100
        # The fastest of several: a disturbed step here would make all of them short.
        product = min(self.step() for _ in range(10)) / self.products
        self.products = max(1, round(step_s / product))
        begun, steps = time.monotonic(), []
        while len(steps) < 10 or time.monotonic() < begun + 0.05:
            steps.append(self.step())
        self.alone_s = sorted(steps)[len(steps) // 2]

    def step(self):
        begun = time.monotonic()
        for _ in range(self.products):
            np.matmul(self.numbers, self.numbers, out=self.out)
        return time.monotonic() - begun


class Meter:
    """Times what the loader does, and computes on its batches."""

    def __init__(self, work):
        self.work, self.trainer = work, None
        self.started, self.cpu_before_s = 0.0, 0.0
        # The total of all requests, also of those that brought no batch.
        self.waited_s = 0.0
        self.digest, self.sum, self.batches, self.steps_s = 0, 0, 0, 0.0
        self.found = dict.fromkeys(("first_s", "wall_s", "wait_s", "cpu_s", "step_alone_s"), 0.0)

    def ready(self):
        """Reports that everything is open, and waits for the start."""
        if self.work["train_us"]:
            self.trainer = Trainer(self.work["train_us"] / 1e6)
            self.found["step_alone_s"] = self.trainer.alone_s
        print("ready", flush=True)
        sys.stdin.readline()
        self.started, self.cpu_before_s = time.monotonic(), self.cpu()

    def wait(self, call, *args):
        """Returns the result of `call`; its duration is the caller's wait."""
        asked = time.monotonic()
        try:
            return call(*args)
        finally:
            self.waited_s += time.monotonic() - asked

    def take(self, batch):
        """Uses a batch: reads one number of every record, then trains."""
        if self.batches == 0:
            self.found["first_s"] = time.monotonic() - self.started
        self.found["wait_s"] = self.waited_s
        if len(batch) != self.work["batch"]:
            raise ValueError(f"a batch: wanted {self.work['batch']} records, found {len(batch)}")
        records = np.asarray(batch).reshape(len(batch), -1)
        records[:, records.shape[1] // 2].sum()
        if self.work["verify"]:
            self.verify(records)
        if self.trainer:
            self.steps_s += self.trainer.step()
        self.found["wall_s"] = time.monotonic() - self.started
        self.batches += 1

    def cpu(self):
        """CPU time so far, including the workers'."""
        # The clock of another process, computed like clock_getcpuclockid(3).
        clocks = [~worker.pid << 3 | 2 for worker in multiprocessing.active_children()]
        return time.process_time() + sum(map(time.clock_gettime, clocks))

    def end(self):
        """Called after the last batch, while the workers still exist."""
        self.found["cpu_s"] = self.cpu() - self.cpu_before_s

    def verify(self, records):
        if self.work["kind"] == "tokens":
            numbers = np.ascontiguousarray(records[:, :4].astype("<u2")).view("<u8")
        else:
            numbers = np.ascontiguousarray(records[:, :8]).view("<u8")
        for number in numbers.ravel().tolist():
            self.digest = (self.digest * 6364136223846793005 + number + 1) % 2**64
        self.sum = (self.sum + int(records.sum(dtype=np.uint64))) % 2**64

    def outcome(self, error):
        verify = self.work["verify"]
        return {
            **self.found,
            "batches": self.batches,
            "step_s": self.steps_s / max(1, self.batches),
            "digest": f"{self.digest:016x}" if verify else None,
            "sum": self.sum if verify else None,
            "error": error,
        }


def batches_of(work, count):
    """The record numbers of each batch, without those that do not fill a whole batch."""
    order = np.fromfile(work["order"], "<u8").astype(np.int64) if work["order"] else np.arange(count)
    if len(order) != count:
        raise ValueError(f"the order: wanted {count} records, found {len(order)}")
    return order[: count // work["batch"] * work["batch"]].reshape(-1, work["batch"])


def use_torch(work, workers):
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info

    records = Records(work)

    class Items(Dataset):
        def __len__(self):
            return len(records.records)

        def __getitem__(self, indices):
            shape = (len(indices), *records.records.shape[1:])
            dtype = torch.int32 if records.dtype is np.int32 else torch.uint8
            if get_worker_info() is None:
                batch = torch.empty(shape, dtype=dtype)
            else:
                empty = torch.empty(0, dtype=dtype)
                batch = empty.new(empty._typed_storage()._new_shared(int(np.prod(shape)))).resize_(*shape)
            records.read(indices, batch.numpy())
            return batch

    options = {"persistent_workers": True, "prefetch_factor": 2} if workers else {}
    batches = batches_of(work, len(records.records))
    loader = DataLoader(Items(), batch_size=None, sampler=batches, num_workers=workers, **options)
    return lambda: (batch for _ in range(work["epochs"]) for batch in loader)


def use_spdl(work, workers):
    from spdl.pipeline import PipelineBuilder

    records = Records(work)
    batches = batches_of(work, len(records.records))

    def stream():
        # One pipeline for all epochs, like `repeat_source`: its start and end take tens of milliseconds.
        builder = PipelineBuilder().add_source([batch for _ in range(work["epochs"]) for batch in batches])
        builder = builder.pipe(records.read, concurrency=workers, output_order="input").add_sink()
        pipeline = builder.build(num_threads=workers)
        with pipeline.auto_stop():
            yield from pipeline

    return stream


def use_grain(work, workers):
    import grain

    records = Records(work)
    batches = batches_of(work, len(records.records))
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers + 1)
    dataset = grain.MapDataset.source(list(batches)).repeat(work["epochs"]).map(records.read)
    return lambda: dataset.to_iter_dataset(options)


def use_dataloader_rs(work, workers):
    from dataloader_rs import PyDataloader, PyDataset

    records = Records(work)
    batches = batches_of(work, len(records.records))

    class Items(PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return records.read(batches[index])

    loader = PyDataloader(Items(), num_workers=workers, prefetch_depth=2, collate_fn=lambda items: items[0])
    return lambda: (batch for _ in range(work["epochs"]) for batch in loader)


def use_twinbuf(work, workers):
    import twinbuf

    _, _, shape, _, _ = KINDS[work["kind"]]
    if work["kind"] == "tokens":
        data = twinbuf.Records.open_llm_c(work["data"]).windows(WINDOW, WINDOW - 1).to("int32")
    else:
        data = twinbuf.Records.open(work["data"], int(np.prod(shape)))
    # The order of `work["order"]`, which twinbuf has made.
    shuffle = {"shuffle": "full", "seed": 42} if work["order"] else {}
    plan = twinbuf.Plan(data, work["batch"], **shuffle)

    def stream():
        loader = twinbuf.Loader(data, plan, workers=workers)
        for _ in range(work["epochs"]):
            for batch in loader.epoch(0):
                yield batch.numpy()

    return stream


USES = {"twinbuf": use_twinbuf, "torch": use_torch, "spdl": use_spdl, "grain": use_grain, "dataloader_rs": use_dataloader_rs}


def run(use, workers, work, meter):
    stream = use(work, workers)
    meter.ready()
    # For all epochs. `stream` keeps the loader and thus its workers; the meter reads their CPU time at the end.
    batches = meter.wait(iter, stream())
    while (batch := meter.wait(next, batches, None)) is not None:
        meter.take(batch)
    meter.end()
    # The loader is dropped here, and its workers with it.


def maps(file):
    with open("/proc/self/maps") as maps:
        return any(line.endswith(f" {file}\n") for line in maps)


def main():
    library, workers = sys.argv[1], int(sys.argv[2])
    __import__(library)
    for line in sys.stdin:
        work = json.loads(line)
        meter, error = Meter(work), None
        try:
            run(USES[library], workers, work, meter)
        except Exception as caught:
            # Without the traceback, and the same in each run.
            first, *rest = str(caught).strip().splitlines() or [""]
            words = " ... ".join([f"{type(caught).__name__}: {first}", *rest[-1:]])
            error = re.sub(r"pid(\(s\))? [0-9, ]+", r"pid\1 ...", words)
        # No page of the file may stay mapped. A thread of dataloader_rs releases the data set some time after its loader
        # is gone. A class is a reference cycle, so a collection before that would not free it.
        until = time.monotonic() + 1
        gc.collect()
        while maps(work["data"]) and time.monotonic() < until:
            time.sleep(0.001)
            gc.collect()
        print(json.dumps(meter.outcome(error)), flush=True)


if __name__ == "__main__":
    main()
