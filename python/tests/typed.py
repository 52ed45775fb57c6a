"""A program as its types see it: checked by mypy and pyright, both strict, and not run."""

# pyright: strict

import numpy as np

import twinbuf as tb

data = tb.Records.open_npy(["a.npy"]).to("float32", mean=0.5, std=[0.2, 0.3, 0.4], planar=True)
count = np.int64(32)
plan = tb.Plan({"x": data}, count, shuffle=tb.Window(np.int32(64)), seed=np.uint64(3), rank="env")
loader = tb.Loader(
    {"x": data}, plan, name="train", depth=np.int8(2), memory_limit=np.int64(1 << 30), breakdown=100
)
epochs = loader.epochs(np.int64(3))
print(len(epochs), loader.plan.indices(np.int64(0), np.int64(1)))
for batch in epochs:
    step: int = batch.step
    print(step, len(batch), batch.indices.shape, batch.torch())
first = data[np.int64(0)].shape
model = tb.Tensors.open("model.safetensors")
for layer in tb.stream(model, lambda name: name.split(".")[0], depth=np.int64(2), memory_limit=1 << 30):
    print(layer.number, [tensor.shape for tensor in layer.torch().values()], model["a"].shape)
schedule = tb.Plan(data, [(1000, 32), (np.int64(4000), np.int64(64))])
print(schedule.steps(np.int64(1)))
for number in tb.prefetch([1, 2], depth=np.int64(2)):
    print(number + 1)
for made in tb.generate(lambda number: float(number), rounds=np.int64(2)):
    print(made.is_integer())
rounds = tb.generate(lambda number: number)
print(next(rounds) + 1, rounds.report().advice, loader.drop_last, plan.drop_last)
rounds.close()
print(loader.report().advice, loader.state_dict(), loader.batch_size, len(loader.dataset))


def inputs(batch: tb.Batch) -> dict[str, int]:
    return {"input_ids": len(batch)}


def first_of(loader: tb.Loader[dict[str, int]]) -> int:
    return next(iter(loader))["input_ids"]


mapped = tb.Loader(data, plan, map=inputs)
print(first_of(mapped), [item["input_ids"] + 1 for item in mapped.epochs(2)])
