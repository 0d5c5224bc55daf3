"""One target under atheris: `python -m tests.fuzz.guided TARGET INPUTS SECONDS`, as run.py starts it."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ema_ckpt"]):
    from tests.fuzz.run import Guard, save_find, warmed
    from tests.fuzz.targets import MAX_NBYTES, TARGETS


def main() -> None:
    name, inputs, seconds = sys.argv[1], sys.argv[2], sys.argv[3]
    target, guard = TARGETS[name], Guard()
    seeds = warmed(target)
    count, started = 0, time.monotonic()

    def run_one(data: bytes) -> None:
        nonlocal count
        count += 1
        if count % 50_000 == 0:
            print(f"{name}: {count} inputs in {time.monotonic() - started:.0f} s", flush=True)
        try:
            guard.run(target, data)
        except BaseException as error:
            save_find(name, data, error)
            raise

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(seeds):
            Path(folder, str(number)).write_bytes(data)
        options = [
            f"-runs={inputs}",
            f"-max_total_time={seconds}",
            f"-max_len={MAX_NBYTES}",
            "-verbosity=0",
        ]
        atheris.Setup([sys.argv[0], *options, "-timeout=10", "-rss_limit_mb=3000", folder], run_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
