"""The step `torch` of the pack for a GPU (tools/gpu.sh): the same batches sent by plain copies, by pinned ones, and by
`twinbuf.prefetch`, in turn. Each figure is a line of JSON. Needs torch with a device; without, one line says so."""

import json
import statistics
import sys
import time


def line(**figures):
    print(json.dumps({"section": "torch", **figures}), flush=True)


try:
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


ways = {
    "plain": lambda: (batch.to("cuda") for batch in batches()),
    "pinned": lambda: (batch.pin_memory().to("cuda", non_blocking=True) for batch in batches()),
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
