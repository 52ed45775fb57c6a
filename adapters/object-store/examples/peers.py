"""Samples a second, requests and bytes over S3's protocol: twinbuf with the recipe beside others.

    pip install twinbuf torch obstore s3fs mosaicml-streaming litdata
    python examples/peers.py server/target/release/twinbuf-object-store-server [KIB [MIB]]

The server delays each read by 30 ms. Records of KIB KiB (64), MIB MiB of them (256), four workers. A `DataLoader` over
s3fs and the recipe shuffle all records. MosaicML's streaming and litdata have a format of their own, whose files of 64 MB
they copy to the disk, and shuffle the records of a few files.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BATCH = 64


def twinbuf(size, count):
    import obstore
    import twinbuf as tb

    names = {}
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    keys = {
        key.lower(): os.environ[key]
        for key in ("AWS_ENDPOINT", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }
    store = obstore.store.from_url("s3://bucket/raw", config=keys, client_options={"allow_http": True})
    rows = names["Rows"](store, "uint8", (size,), header=0)
    plan = tb.Plan(rows, batch=BATCH, shuffle="full", seed=1)
    return sum(len(batch) for batch in tb.Loader(rows, plan, workers=4))


class Rows:
    """A data set over s3fs, opened in each process."""

    def __init__(self, size, count):
        self.size, self.count, self.store = size, count, None

    def __len__(self):
        return self.count

    def __getitems__(self, indices):
        import s3fs

        if self.store is None:
            self.store = s3fs.S3FileSystem(key="x", secret="x", endpoint_url=os.environ["AWS_ENDPOINT"])
            self.paths = sorted(self.store.ls("bucket/raw"))
            self.each = self.store.info(self.paths[0])["size"] // self.size
        paths = [self.paths[index // self.each] for index in indices]
        starts = [index % self.each * self.size for index in indices]
        parts = self.store.cat_ranges(paths, starts, [start + self.size for start in starts])
        return [np.frombuffer(part, dtype=np.uint8) for part in parts]


def s3fs_loader(size, count):
    import torch

    options = {"batch_size": BATCH, "shuffle": True, "num_workers": 4, "multiprocessing_context": "spawn"}
    return sum(len(batch) for batch in torch.utils.data.DataLoader(Rows(size, count), **options))


def mosaicml(size, count):
    import streaming
    import torch

    with tempfile.TemporaryDirectory() as local:
        data = streaming.StreamingDataset(
            remote="s3://bucket/mosaicml", local=local, shuffle=True, batch_size=BATCH, num_canonical_nodes=1
        )
        return sum(len(batch["x"]) for batch in torch.utils.data.DataLoader(data, BATCH, num_workers=4))


def litdata_loader(size, count):
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the server has no TLS
    with tempfile.TemporaryDirectory() as local:
        options = {"endpoint_url": os.environ["AWS_ENDPOINT"]}
        data = litdata.StreamingDataset(
            "s3://bucket/litdata", cache_dir=local, shuffle=True, storage_options=options
        )
        loader = litdata.StreamingDataLoader(
            data, batch_size=BATCH, num_workers=4, multiprocessing_context="fork"
        )
        return sum(len(batch) for batch in loader)


def sample(path):
    return np.fromfile(path[0], np.uint8, path[1], offset=path[2])


def write_others(bucket, size, count):
    """The same records in the formats of MosaicML's streaming and litdata, if they are installed."""
    rows = [(str(bucket / f"raw/{i % 8}"), size, i // 8 * size) for i in range(count // 8 * 8)]
    try:
        import streaming

        with streaming.MDSWriter(out=str(bucket / "mosaicml"), columns={"x": "bytes"}) as out:
            for row in rows:
                out.write({"x": sample(row).tobytes()})
    except ImportError:
        pass
    try:
        import litdata

        litdata.optimize(sample, rows, str(bucket / "litdata"), chunk_bytes="64MB", num_workers=1)
    except ImportError:
        pass


def write(bucket, size, count):
    (bucket / "raw").mkdir(parents=True)
    for index in range(8):
        (bucket / f"raw/{index}").write_bytes(np.random.default_rng(index).bytes(count // 8 * size))


if __name__ == "__main__":
    server = sys.argv[1]
    size = int(sys.argv[2] if len(sys.argv) > 2 else 64) << 10
    count = (int(sys.argv[3] if len(sys.argv) > 3 else 256) << 20) // size
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "bucket"), size, count)
        write_others(Path(folder, "bucket"), size, count)
        process = subprocess.Popen(
            [server, folder, "30"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        url = f"http://{process.stdout.readline().strip()}"
        os.environ |= {"AWS_ENDPOINT": url, "AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url}
        os.environ |= {
            "AWS_REGION": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
        }
        ways = [("twinbuf", twinbuf), ("DataLoader over s3fs", s3fs_loader)]
        ways += [("MosaicML streaming", mosaicml), ("litdata", litdata_loader)]
        for name, run in ways:
            try:
                for _ in range(2):  # the first one computes the server's ETags
                    process.stdin.write("\n")
                    process.stdin.flush()
                    process.stdout.readline()
                    start = time.perf_counter()
                    found = run(size, count)
                    seconds = time.perf_counter() - start
                process.stdin.write("\n")
                process.stdin.flush()
                reads, read = map(int, process.stdout.readline().split())
                rate = f"{found / seconds:.0f} a second, {reads} reads, {read >> 20} MiB"
                print(f"{name}: {found} of {count} samples, {rate}", flush=True)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[-300:]}", flush=True)
        print(f"load of the machine: {Path('/proc/loadavg').read_text().strip()}")
        process.kill()
