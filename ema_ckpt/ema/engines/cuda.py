"""The engine for CUDA: one launch over all local shards, with the weight on the device.

Bit-equal to `torch._foreach_lerp_` on float32 parameters, and to it on `p.float()` for others. All
else (float64, complex, parameters that are not contiguous, no Triton) goes to torch's multi-tensor
kernels.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ema_ckpt.ema.engines import foreach, stochastic
from ema_ckpt.ema.engines.noise import Position
from ema_ckpt.ema.engines.update_batch import Step, UpdateBatch

# Elements per program, and its warps.
BLOCK_NUMEL = 2048
WARPS = 4

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """Values that change from call to call, on the device, where a CUDA graph reads them."""

    weight: Tensor  # float32, 0-dim; 0 leaves all as it is
    call: Tensor  # int64, 0-dim: the number of the call, for stochastic rounding
    replays: Tensor  # int64, 0-dim: recorded updates that were replayed

    @classmethod
    def on(cls, device: torch.device) -> Control:
        """Make controls of weight 0."""
        number = torch.zeros((), dtype=torch.int64, device=device)
        return cls(torch.zeros((), dtype=torch.float32, device=device), number, number.clone())


class TritonStep:
    """A step over a batch that the kernel serves."""

    def __init__(self, batch: UpdateBatch, control: Control | None = None) -> None:
        self.device = batch.params[0].device
        with torch.cuda.device(self.device):
            self.control = control or Control.on(self.device)
            self._batch = batch  # the table holds bare addresses
            self._flag = torch.zeros((), dtype=torch.int32, device=self.device)
            self._launch_kernel = self._kernel_launcher()
            # of weight 0: compiles and loads the kernel, which cannot be done under capture
            self.launch()

    def __call__(self, weight: float) -> None:
        with torch.cuda.device(self.device):
            self.set(weight)
            self.launch()

    def set(self, weight: float) -> None:
        """Set the weight of the launches to come."""
        self.control.weight.fill_(weight)
        if self._batch.noise is not None:
            self.control.call.fill_(self._batch.noise.call())

    def record(self) -> None:
        """Launch under capture, and count each replay."""
        self.control.replays.add_(1)
        self.launch()

    def launch(self) -> None:
        """Move all averages by the weight that was set, on the batch's device."""
        if self._batch.nonfinite_count is not None:
            self._flag.zero_()
        self._launch_kernel()

    def _kernel_launcher(self) -> Any:
        from ema_ckpt.ema.engines import cuda_kernels as kernels

        batch, control = self._batch, self.control
        rows, table = _tables(batch)
        if self.device.type == "cuda":
            # Pinned, a copy to the device makes no one wait.
            rows = rows.pin_memory().to(self.device, non_blocking=True)
            table = table.pin_memory().to(self.device, non_blocking=True)
        # without `skip` the kernel does not touch the count
        count = control.replays if batch.nonfinite_count is None else batch.nonfinite_count
        seed = 0 if batch.noise is None else batch.noise.seed & (1 << 63) - 1
        arguments = (rows, table, control.weight, self._flag, count, control.call, seed)
        options: dict[str, Any] = {
            "shadow_type": _triton_dtype(batch.averages[0]),
            "param_type": _triton_dtype(batch.params[0]),
            "block_numel": BLOCK_NUMEL,
            "columns": kernels.COLUMNS,
            "compensate": batch.residuals is not None,
            "skip": batch.nonfinite_count is not None,
            "stochastic": batch.noise is not None,
            "num_warps": WARPS,
            "enable_fp_fusion": False,
        }
        kernel: Any = kernels.move
        grid = (len(rows),)
        return lambda: kernel[grid](*arguments, **options)


def prepare(batch: UpdateBatch) -> Step:
    """Return a step over a batch on one CUDA device."""
    contiguous, strided = [], []
    for index, param in enumerate(batch.params):
        if param.is_contiguous():
            contiguous.append(index)
        else:
            strided.append(index)
    if not serves(batch) or not contiguous:
        return _prepare_without_triton(batch)
    if not strided:
        return TritonStep(batch)
    kernel_step = TritonStep(batch.subset(contiguous))
    torch_step = _prepare_without_triton(batch.subset(strided))

    def both(weight: float) -> None:
        kernel_step(weight)
        torch_step(weight)

    return both


def serves(batch: UpdateBatch) -> bool:
    """Return whether the kernel has these dtypes and is installed; strides are the caller's."""
    return batch.averages[0].dtype in _FLOATS and batch.params[0].dtype in _FLOATS and _installed()


@cache
def _installed() -> bool:
    if find_spec("triton") is not None:
        return True
    warnings.warn(
        "Triton is not installed: averages on CUDA are moved by torch's multi-tensor kernels, which"
        " is slower for bfloat16 parameters and cannot be recorded into CUDA graphs",
        stacklevel=2,
    )
    return False


def _prepare_without_triton(batch: UpdateBatch) -> Step:
    if batch.noise is None:
        return foreach.prepare(batch)
    return stochastic.prepare(batch, batch.noise)


def _tables(batch: UpdateBatch) -> tuple[Tensor, Tensor]:
    """Return the table row of each block, int32, and the table, a row per tensor; on the host."""
    counts = [-(-average.numel() // BLOCK_NUMEL) for average in batch.averages]
    addresses = [0] * len(counts)
    if batch.residuals is not None:
        addresses = [residual.data_ptr() for residual in batch.residuals]
    positions = [Position(0, 1, 1, 0)] * len(counts)
    if batch.noise is not None:
        positions = list(batch.noise.positions)
    table = []
    first_block = 0
    for average, param, residual, position, count in zip(
        batch.averages, batch.params, addresses, positions, counts, strict=True
    ):
        row = [average.data_ptr(), param.data_ptr(), residual, average.numel(), first_block]
        row += [position.base, position.first, position.run, position.stride, position.tensor]
        table.append(row)
        first_block += count
    numbers = torch.arange(len(counts), dtype=torch.int32)
    rows = torch.repeat_interleave(numbers, torch.tensor(counts))
    return rows, torch.tensor(table, dtype=torch.int64)


def _triton_dtype(tensor: Tensor) -> Any:
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

    triton_dtypes: tuple[Any, ...] = (tl.float32, tl.bfloat16, tl.float16)
    return triton_dtypes[_FLOATS.index(tensor.dtype)]
