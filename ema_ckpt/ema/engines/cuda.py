"""The engine for CUDA: one launch over all local shards, with the weight on the device.

Bit-equal to `torch._foreach_lerp_` on float32 parameters, and to it on `p.float()` for others. What
the kernel does not serve (float64, complex, parameters that are not contiguous), and everything
where Triton is not installed, goes to torch's multi-tensor kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ema_ckpt.ema.engines import foreach, stochastic
from ema_ckpt.ema.engines.lists import Step, UpdateBatch
from ema_ckpt.ema.engines.noise import Position

# Elements per program, and its warps.
BLOCK_NUMEL = 2048
WARPS = 4

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """What changes from call to call, on the device: a launch reads it there, so that a CUDA graph
    can be replayed.
    """

    weight: torch.Tensor  # float32, 0-dim; 0 leaves all as it is
    call: torch.Tensor  # int64, 0-dim: the number of the call, for stochastic rounding
    replays: torch.Tensor  # int64, 0-dim: recorded updates that were replayed

    @classmethod
    def on(cls, device: torch.device) -> Control:
        """Controls of weight 0."""
        number = torch.zeros((), dtype=torch.int64, device=device)
        return cls(torch.zeros((), dtype=torch.float32, device=device), number, number.clone())


class TritonStep:
    """A step over lists that the kernel serves."""

    def __init__(self, lists: UpdateBatch, control: Control | None = None) -> None:
        self.device = lists.params[0].device
        with torch.cuda.device(self.device):
            self.control = control or Control.on(self.device)
            self._lists = lists  # the table holds bare addresses
            self._flag = torch.zeros((), dtype=torch.int32, device=self.device)
            blocks, table = _tables(lists)
            self._blocks, self._table = _sent(blocks, self.device), _sent(table, self.device)
            self._grid = (len(blocks),)
            self._launcher = self._made_launcher()
            # of weight 0: compiles and loads the kernel, which cannot be done under capture
            self.launch()

    def __call__(self, weight: float) -> None:
        with torch.cuda.device(self.device):
            self.set(weight)
            self.launch()

    def set(self, weight: float) -> None:
        """Set the weight of the launches to come."""
        self.control.weight.fill_(weight)
        if self._lists.noise is not None:
            self.control.call.fill_(self._lists.noise.call())

    def record(self) -> None:
        """Launch under capture, and count each replay."""
        self.control.replays.add_(1)
        self.launch()

    def launch(self) -> None:
        """Move all averages by the weight that was set; the current device must be the lists'."""
        if self._lists.events is not None:
            self._flag.zero_()
        self._launcher()

    def _made_launcher(self) -> Any:
        from ema_ckpt.ema.engines import cuda_kernels as kernels

        lists, control = self._lists, self.control
        events = (
            control.replays if lists.events is None else lists.events
        )  # without SKIP it is not touched
        seed = 0 if lists.noise is None else lists.noise.seed & (1 << 63) - 1
        arguments = (
            self._blocks,
            self._table,
            control.weight,
            self._flag,
            events,
            control.call,
            seed,
        )
        options: dict[str, Any] = {
            "shadow_type": _dtype_of(lists.shadows[0]),
            "param_type": _dtype_of(lists.params[0]),
            "block_numel": BLOCK_NUMEL,
            "columns": kernels.COLUMNS,
            "compensate": lists.residuals is not None,
            "skip": lists.events is not None,
            "stochastic": lists.noise is not None,
            "num_warps": WARPS,
            "enable_fp_fusion": False,
        }
        launcher: Any = kernels.move
        grid = self._grid
        return lambda: launcher[grid](*arguments, **options)


def prepare(lists: UpdateBatch) -> Step:
    """A step over `lists` on one CUDA device."""
    contiguous = [i for i, param in enumerate(lists.params) if param.is_contiguous()]
    if not serves(lists) or not contiguous:
        return _without_triton(lists)
    if len(contiguous) == len(lists.params):
        return TritonStep(lists)
    rest = sorted(set(range(len(lists.params))).difference(contiguous))
    steps: list[Step] = [TritonStep(lists.subset(contiguous)), _without_triton(lists.subset(rest))]

    def both(weight: float) -> None:
        for step in steps:
            step(weight)

    return both


def serves(lists: UpdateBatch) -> bool:
    """Whether the kernel does this arithmetic, and is there. Strides are looked at by the
    caller.
    """
    return lists.shadows[0].dtype in _FLOATS and lists.params[0].dtype in _FLOATS and _installed()


@cache
def _installed() -> bool:
    if find_spec("triton") is not None:
        return True
    warnings.warn(
        "Triton is not installed: averages on CUDA are moved by torch's multi-tensor kernels, which is slower for"
        " bfloat16 parameters and cannot be recorded into CUDA graphs",
        stacklevel=2,
    )
    return False


def _without_triton(lists: UpdateBatch) -> Step:
    return foreach.prepare(lists) if lists.noise is None else stochastic.prepare(lists, lists.noise)


def _tables(lists: UpdateBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of each block, int32, and the rows, one per tensor; on the host."""
    counts = [-(-shadow.numel() // BLOCK_NUMEL) for shadow in lists.shadows]
    addresses = (
        [0] * len(counts) if lists.residuals is None else [r.data_ptr() for r in lists.residuals]
    )
    nowhere = Position(0, 1, 1, 0)
    places = [nowhere] * len(counts) if lists.noise is None else lists.noise.positions
    rows = []
    first = 0
    for shadow, param, residual, place, count in zip(
        lists.shadows, lists.params, addresses, places, counts, strict=True
    ):
        row = [shadow.data_ptr(), param.data_ptr(), residual, shadow.numel(), first]
        rows.append([*row, place.base, place.first, place.run, place.stride, place.tensor])
        first += count
    numbers = torch.arange(len(counts), dtype=torch.int32)
    return torch.repeat_interleave(numbers, torch.tensor(counts)), torch.tensor(
        rows, dtype=torch.int64
    )


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned, a copy to the device makes no one wait.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _dtype_of(tensor: torch.Tensor) -> Any:
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

    names: Sequence[tuple[torch.dtype, Any]] = list(
        zip(_FLOATS, (tl.float32, tl.bfloat16, tl.float16), strict=True)
    )
    return dict(names)[tensor.dtype]
