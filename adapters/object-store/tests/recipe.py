"""Runs the recipe of the README and the example `train` on the server: tests/recipe.py SERVER TRAIN"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import obstore
import twinbuf as tb

recipe = re.search(r"```python\n(.*?)```", Path(__file__).parents[1].joinpath("README.md").read_text(), re.DOTALL)[1]
names = {}
exec(recipe, names)

with tempfile.TemporaryDirectory() as folder:
    bucket = Path(folder, "bucket/train")
    bucket.mkdir(parents=True)
    features = np.random.default_rng(1).normal(size=(3000, 64))
    rows = np.column_stack([features, features @ np.linspace(-1, 1, 64)]).astype(np.float32)
    for index, part in enumerate(np.split(rows, 3)):
        np.save(bucket / f"{index}.npy", part)
    server = subprocess.Popen([sys.argv[1], folder, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        settings = {"aws_endpoint": f"http://{server.stdout.readline().strip()}", "aws_region": "x"}
        settings["aws_skip_signature"] = "true"
        store = obstore.store.from_url("s3://bucket/train", config=settings, client_options={"allow_http": True})
        found = names["Rows"](store, "float32", (65,))
        plan = tb.Plan(found, batch=100, shuffle="full", seed=3)
        batches = [np.array(batch) for batch in tb.Loader(found, plan, workers=4)]
        assert np.array_equal(np.sort(np.concatenate(batches), axis=0), np.sort(rows, axis=0))
        assert not np.array_equal(np.concatenate(batches), rows)
        environment = os.environ | {name.upper(): value for name, value in settings.items()}
        # A variable of another program, which has the name of a setting.
        environment |= {"AWS_ALLOW_HTTP": "true", "TIMEOUT": "30"}
        command = [sys.argv[2], "s3://bucket/train/"]
        run = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
        assert len(losses) == 5 and losses[-1] < 1e-6 < losses[0], run.stdout
    finally:
        server.kill()
