"""Nanoseconds of the steps that values go through in memory, where they stay in a core's second-level cache.

    python tests/bench/kernels.py

The least of many short runs of wall time, on a busy machine too. What `synthesize`, `--dequantize` and rules that
transpose cannot be faster than with numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from measure import machine, table

from ema_ckpt.analysis.accumulator import BLOCK_NUMEL, Accumulator
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.reading.cast import Caster
from ema_ckpt.reading.quantized.codes import Memory, decoded, look_up

NUMEL = 64 << 10
REPEATS = 400


def least(step: Callable[[], object], values: int) -> str:
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return f"{min(seconds) / values * 1e9:.2f}"


def main() -> None:
    generator = np.random.default_rng(0)
    single, half = by_name("float32"), by_name("bfloat16")
    values = generator.random(BLOCK_NUMEL, np.float32)
    sums, memory, caster = Accumulator(), Memory(), Caster(single, half)
    total = sums.begin(values.size)
    raw = generator.integers(0, 256, NUMEL // 2, np.uint8)
    codes = generator.integers(0, 120, NUMEL, np.uint8)
    scales = generator.random((NUMEL // 128, 1), np.float32)
    wide = values[:NUMEL].reshape(-1, 128)
    scaled, rounded = np.empty_like(wide), np.empty(values.size, np.float32)
    pairs = generator.integers(0, 2**31, 65536).astype(np.uint32)
    positions, found = raw.astype(np.intp), np.empty(raw.size, np.uint32)
    # Rows longer by a cache line or two, as the reader keeps them.
    stored = generator.integers(0, 65536, (128, 1024 + 32)).astype(np.uint16)[:, :1024]
    turned = np.empty((1024, 128), np.uint16)
    rows = [["step", "ns a value"]]

    def add(name: str, step: Callable[[], object], count: int = NUMEL) -> None:
        rows.append([name, least(step, count)])

    add("float32 widened, weighted and added in float64",
        lambda: sums.add(total, values, single, 0.1, is_first=False), values.size)  # fmt: skip
    add("a sum rounded to float32", lambda: sums.round_into(total, single, rounded), values.size)
    add(
        "two codes of four bits and a scale looked up",
        lambda: look_up(pairs, positions, found, memory),
    )
    add("packed int4 unpacked to float32", lambda: decoded(raw, "packed_int4", memory))
    add("float8_e4m3fn to float32", lambda: decoded(codes, "float8_e4m3fn", memory))
    add("float32 times the scales of groups of 128", lambda: np.multiply(wide, scales, out=scaled))
    add("float32 rounded to bfloat16, and looked over", lambda: caster.cast(values[:NUMEL]))
    add("bfloat16 transposed", lambda: np.copyto(turned, stored.T), stored.size)
    add("bfloat16 copied", lambda: np.copyto(turned.reshape(stored.shape), stored), stored.size)
    print(machine(), end="\n\n")
    print(table(rows))


if __name__ == "__main__":
    main()
