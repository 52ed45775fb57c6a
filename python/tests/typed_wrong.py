"""Lines that raise, each with a mark: mypy and pyright, both strict, refuse these and no others."""

# pyright: strict

import numpy as np

import twinbuf as tb

data = tb.Records.open_npy("a.npy")
plan = tb.Plan(data, 4)


def inputs(batch: tb.Batch) -> dict[str, int]:
    return {"input_ids": len(batch)}


for item in tb.Loader(data, plan, map=inputs):
    print(item.indices)  # wrong
for batch in tb.Loader(data, plan).epochs(np.int64(2)):
    print(batch["input_ids"])  # wrong
loader: tb.Loader[tb.Batch] = tb.Loader(data, plan, map=inputs)  # wrong
