"""The step `torch` of the pack for a GPU (tools/gpu.sh): the same batches sent by plain copies, by pinned ones, by what
overlaps in torch itself (a `DataLoader` with workers and pinned memory, a prefetcher on a side stream), and by
`twinbuf.prefetch`, in turn. Then tensors of the device, written by a `twinbuf.Writer` behind the loop, and in the loop. Each
figure is a line of JSON. Needs torch with a device; without, one line says so."""

import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time


def line(**figures):
    print(json.dumps({"section": "torch", **figures}), flush=True)


try:
    import numpy
    import torch

    import twinbuf

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no device")
except Exception as error:  # whatever keeps it from being measured
    line(error=f"{type(error).__name__}: {error}")
    sys.exit(0)

quick = "--quick" in sys.argv
BATCHES, ROUNDS = (8, 2) if quick else (40, 5)
LOAD_S = 0.002 if quick else 0.02
BYTES = (1 if quick else 64) << 20


def batches():
    """In place of reading: a sleep, and bytes that are the batch's own."""
    for i in range(BATCHES):
        time.sleep(LOAD_S)
        yield torch.full((BYTES,), i, dtype=torch.uint8)


def train(batch):
    """As long as the load, on the device; then the sum is read back, as a loss is."""
    torch.cuda._sleep(int(LOAD_S * 1.5e9))
    return int(batch.sum(dtype=torch.int64))


def epoch(source):
    began, total = time.perf_counter(), 0
    for batch in source:
        total += train(batch)
    wanted = sum(range(BATCHES)) * BYTES
    if total != wanted:
        raise RuntimeError(f"the sum of all bytes: wanted {wanted}, found {total}")
    return time.perf_counter() - began


class Batches(torch.utils.data.IterableDataset):
    """The batches of one worker: every second of them, with two."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for i, batch in enumerate(range(BATCHES)):
            if i % worker.num_workers == worker.id:
                time.sleep(LOAD_S)
                yield torch.full((BYTES,), batch, dtype=torch.uint8)


def data_loader():
    """Two worker processes, and torch's thread that pins; the copy is asynchronous."""
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=2, pin_memory=True, prefetch_factor=2)
    return (batch.to("cuda", non_blocking=True) for batch in loader)


def make(made):
    for batch in batches():
        made.put(batch)
    made.put(None)


def side_stream():
    """The prefetcher of many training scripts: the next batch is copied on its own stream while this one is in use. The
    batches come from a thread, as they do with `twinbuf.prefetch`."""
    made = queue.Queue(maxsize=2)
    threading.Thread(target=make, args=(made,), daemon=True).start()
    copies = torch.cuda.Stream()

    def start():
        batch = made.get()
        if batch is None:
            return None
        with torch.cuda.stream(copies):
            return batch.pin_memory().to("cuda", non_blocking=True)

    following = start()
    while (batch := following) is not None:
        torch.cuda.current_stream().wait_stream(copies)
        batch.record_stream(torch.cuda.current_stream())
        following = start()
        yield batch


ways = {
    "plain": lambda: (batch.to("cuda") for batch in batches()),
    "pinned": lambda: (batch.pin_memory().to("cuda", non_blocking=True) for batch in batches()),
    "DataLoader": data_loader,
    "side stream": side_stream,
    "prefetch": lambda: twinbuf.prefetch(batches(), device="cuda"),
}
line(torch=torch.__version__, device=torch.cuda.get_device_name(), bytes=BYTES, batches=BATCHES, load=BATCHES * LOAD_S)
walls = {way: [] for way in ways}
for round_ in range(ROUNDS + 1):
    for way, source in ways.items():
        try:
            wall = epoch(source())
        except Exception as error:
            line(way=way, error=f"{type(error).__name__}: {error}")
            continue
        if round_:  # the first one is not counted: first touches
            walls[way].append(wall)
            line(way=way, round=round_, wall=wall)
for way, found in walls.items():
    if found:
        line(way=way, wall_median=statistics.median(found), min=min(found), max=max(found))

ROWS, ROW = (4, BYTES // 4) if quick else (16, BYTES // 4)


def rows():
    """Made on the device, and changed there as soon as the loop has appended them."""
    for i in range(ROWS):
        torch.cuda._sleep(int(LOAD_S * 1.5e9))
        row = torch.full((1, ROW), i, dtype=torch.int32, device="cuda")
        yield row
        row.fill_(-1)


def behind(path):
    with twinbuf.Writer(path, "int32", (ROW,)) as out:
        for row in rows():
            out.append(row)


def in_turn(path):
    with open(path, "wb") as out:
        numpy.lib.format.write_array_header_1_0(
            out, {"descr": "<i4", "fortran_order": False, "shape": (ROWS, ROW)}
        )
        for row in rows():
            out.write(row.cpu().numpy())
        out.flush()
        os.fsync(out.fileno())


walls = {write: [] for write in (behind, in_turn)}
data = os.path.join(os.environ.get("out", "."), "data")  # which the pack leaves out
os.makedirs(data, exist_ok=True)
with tempfile.TemporaryDirectory(dir=data) as folder:
    for round_ in range(min(ROUNDS, 3) + 1):
        for write, found in walls.items():
            path = os.path.join(folder, "rows.npy")
            try:
                began = time.perf_counter()
                write(path)
                wall = time.perf_counter() - began
                written = numpy.load(path, mmap_mode="r")
                if any((row != i).any() for i, row in enumerate(written)) or len(written) != ROWS:
                    raise RuntimeError("the file has other rows")
            except Exception as error:
                line(written=write.__name__, error=f"{type(error).__name__}: {error}")
                continue
            if round_:
                found.append(wall)
for write, found in walls.items():
    if found:
        line(
            written=write.__name__, bytes=ROWS * ROW * 4, wall_median=statistics.median(found), min=min(found), max=max(found)
        )
