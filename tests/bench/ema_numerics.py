"""Errors of the averages against float64, as tables for docs/explanation/ema.md.

    python -m tests.bench.ema_numerics

1 000 updates of 10 000 elements along four paths. An error is relative L2: |average − exact| / |exact|. What is lost
is the share of the exact average's way that the average has not gone: 1 − ⟨average − its start, way⟩ / |way|².
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch

from ema_ckpt.ema.engines import cpu
from ema_ckpt.ema.engines.update_batch import UpdateBatch

UPDATES, NUMEL = 1000, 10_000
DECAYS = (0.9, 0.99, 0.999, 0.9999, 0.99999)
Path = Callable[[torch.Tensor], Iterator[torch.Tensor]]


def noise(start: torch.Tensor) -> Iterator[torch.Tensor]:
    """Independent N(0, 1) values."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        yield torch.randn(start.shape, generator=generator)


def walk(start: torch.Tensor) -> Iterator[torch.Tensor]:
    """Steps of 1e-4 · N(0, 1), as of an optimizer at its end."""
    generator = torch.Generator().manual_seed(2)
    position = start.double()
    for _ in range(UPDATES):
        position = position + 1e-4 * torch.randn(start.shape, generator=generator)
        yield position.float()


def target(start: torch.Tensor) -> Iterator[torch.Tensor]:
    """Constant, 1 % away from the start."""
    for _ in range(UPDATES):
        yield start * 1.01


def drift(start: torch.Tensor) -> Iterator[torch.Tensor]:
    """1e-4 further at each step."""
    for step in range(1, UPDATES + 1):
        yield (start.double() + 1e-4 * step).float()


PATHS: tuple[Path, ...] = (noise, walk, target, drift)
FORMS: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "float32, compensated": (torch.float32, True),
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
}


def measure(path: Path, decay: float, dtype: torch.dtype, compensate: bool) -> tuple[float, float]:
    """(relative L2 error, share of the way that is lost)."""
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    live = start.clone()
    residuals = [torch.zeros(NUMEL, dtype=torch.bfloat16)] if compensate else None
    shadow = start.to(dtype, copy=True)
    batch = UpdateBatch([shadow.clone()], [live], residuals)
    step, exact = cpu.prepare(batch), start.double()
    for value in path(start):
        live.copy_(value)
        step(1 - decay)
        exact.lerp_(value.double(), 1 - decay)
    error = (batch.averages[0].double() - exact).norm() / exact.norm()
    way, gone = exact - start.double(), batch.averages[0].double() - shadow.double()
    return float(error), float(1 - (gone @ way) / (way @ way))


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    for path in PATHS:
        print(f"\n{path.__name__}: {path.__doc__}\n")
        print(
            "| average | "
            + " | ".join(f"{decay}" for decay in DECAYS)
            + " |\n|---|"
            + "---|" * len(DECAYS)
        )
        for name, (dtype, compensate) in FORMS.items():
            cells = [measure(path, decay, dtype, compensate) for decay in DECAYS]
            print(
                f"| {name} | "
                + " | ".join(f"{error:.1e} ({max(lost, 0):.1%})" for error, lost in cells)
                + " |"
            )


if __name__ == "__main__":
    main()
