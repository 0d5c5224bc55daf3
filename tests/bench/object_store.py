"""Consolidation from S3 to S3 against a bare copy of the same bytes with the same client, on one host.

    python tests/bench/object_store.py                        # 1 GB, 5 runs of each, mixed
    python tests/bench/object_store.py --quick                # 0.1 GB, 1 run: does it work at all

Needs the extra `remote` (s3fs, and nanio, a small S3 server that keeps objects as files). The script writes a DCP
checkpoint of four rank files to the server and then times, each in a process of its own:

    bare copy     ranges of the four files are fetched by W threads (`cat_file`) and sent as parts of one object
                  (`upload_part`); nothing is checked. The fastest W of 2, 4 and 8 counts.
    ema-ckpt      `consolidate s3://…/step_1 s3://…/ema.safetensors`: checksums compared, digests written
    interpreter   `import s3fs` and one request: what the memory figure is compared with

Server and client share the processors, so the rates say nothing about a network; their ratio is what is meant.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Contender, machine, race, table

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TARGET = "bucket/runs/step_1", "bucket/ema.safetensors"
COPY = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
import s3fs
store, workers, part = s3fs.S3FileSystem(), int(sys.argv[1]), 8 << 20
files = [(path, store.size(path)) for path in sorted(store.find("{SOURCE}")) if path.endswith(".distcp")]
ranges = [(path, at, min(at + part, n)) for path, n in files for at in range(0, n, part)]
ranges.sort(key=lambda one: one[2] - one[1] < 5 << 20)
place = dict(Bucket="bucket", Key="{TARGET}".partition("/")[2])
place["UploadId"] = store.call_s3("create_multipart_upload", **place)["UploadId"]
def copy(number, path, start, end):
    data = store.cat_file(path, start=start, end=end)
    answer = store.call_s3("upload_part", **place, PartNumber=number, Body=BytesIO(data))
    return dict(PartNumber=number, ETag=answer["ETag"])
whole = [one for one in ranges if one[2] - one[1] >= 5 << 20]
with ThreadPoolExecutor(workers) as pool:
    parts = list(pool.map(lambda pair: copy(pair[0], *pair[1]), enumerate(whole, 1)))
store.call_s3("complete_multipart_upload", **place, MultipartUpload=dict(Parts=parts))
"""
IDLE = f"import s3fs; s3fs.S3FileSystem().ls('{SOURCE}')"


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ema-ckpt-bench-") as scratch:
        folder = Path(scratch)
        server = _start_server(folder)
        try:
            nbytes = _make_source(folder, options.size)
            contenders = _contenders(options.runs)
            race(contenders, _make_room, folder / "log")
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # its workers too
            server.wait()
    print(_headline())
    print(_report(contenders, nbytes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=1.0, metavar="GB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", help="where the server keeps its objects")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.size, options.runs = 0.1, 1
    return options


def _start_server(folder: Path) -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    keys = {"ACCESS_KEY": "benchmark-access-key", "SECRET_KEY": "benchmark-secret-key-of-nobody"}
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(folder / "objects")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "2"]
    command += ["--log-level", "error", "--no-access-log"]
    server = subprocess.Popen(
        command,
        env={**os.environ, **{f"NANIO_{k}": v for k, v in keys.items()}},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.environ |= {
        "AWS_ACCESS_KEY_ID": keys["ACCESS_KEY"],
        "AWS_SECRET_ACCESS_KEY": keys["SECRET_KEY"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "PYTHONPATH": str(ROOT),
    }
    import s3fs

    for _ in range(100):
        try:
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
            return server
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def _make_source(folder: Path, gigabytes: float) -> int:
    """Write a checkpoint of four ranks to the server; return the bytes of its tensors."""
    import torch
    import torch.distributed.checkpoint as dcp

    import ema_ckpt

    rows = int(gigabytes * 1e9 / 4 / 4096 / 20)
    weights = {f"layers.{i}.weight": torch.randn(rows, 4096) for i in range(20)}
    state = {"ema": {"weights": weights, "num_updates": torch.tensor(1)}}
    dcp.save(state, checkpoint_id=str(folder / "source"))
    ema_ckpt.reshard(folder / "source", f"s3://{SOURCE}", 4)
    return sum(tensor.numel() * 4 for tensor in weights.values())


def _make_room() -> None:
    import s3fs

    store = s3fs.S3FileSystem(skip_instance_cache=True)
    if store.exists(TARGET):
        store.rm_file(TARGET)


def _contenders(runs: int) -> list[Contender]:
    python = [sys.executable, "-W", "ignore"]
    ours = [*python, "-m", "ema_ckpt", "consolidate", f"s3://{SOURCE}", f"s3://{TARGET}"]
    copies = [
        Contender(f"bare copy, {w} threads", [*python, "-c", COPY, str(w)], runs=runs)
        for w in (2, 4, 8)
    ]
    return [
        *copies,
        Contender("ema-ckpt consolidate", ours, runs=runs),
        Contender("interpreter", [*python, "-c", IDLE], runs=runs),
    ]


def _headline() -> str:
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("s3fs", "botocore", "nanio")
    ]
    facts = machine()
    where = f"{facts['cpu']}, {facts['memory']}, Linux {facts['kernel']}, Python {facts['python']}"
    load = os.getloadavg()[0]
    return f"{where}; {', '.join(versions)}; load {load:.1f}\n"


def _report(contenders: list[Contender], nbytes: int) -> str:
    *copies, ours, idle = contenders
    rows = [["", "median s", "MB/s", "CPU s", "peak RSS over the interpreter, MiB"]]
    for one in (*copies, ours):
        over = (one.peak_mb - idle.peak_mb) * 1e6 / (1 << 20)
        rate = nbytes / one.seconds / 1e6
        rows.append(
            [one.name, f"{one.seconds:.1f}", f"{rate:.0f}", f"{one.cpu_seconds:.1f}", f"{over:.0f}"]
        )
    best = min(copies, key=lambda one: one.seconds)
    ratios = [a.seconds / b.seconds for a, b in zip(best.results, ours.results, strict=True)]
    lines = [table(rows), ""]
    lines.append(f"rate of ema-ckpt over that of {best.name}: {best.seconds / ours.seconds:.2f}")
    lines.append(
        f"each run: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; median {statistics.median(ratios):.2f}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
