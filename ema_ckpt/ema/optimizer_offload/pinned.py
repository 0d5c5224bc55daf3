"""Page-locked host memory of exact size, which a device copies from and to by itself."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from itertools import accumulate

import torch

from ema_ckpt.core.errors import StateError

# Of elements: whatever their size, every tensor begins where a copy of 16 bytes may begin.
_ALIGNMENT = 64


def pinned_zeros(shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[torch.Tensor]:
    """Allocate zeros of each shape, one after the other in one slab of page-locked memory.

    Slabs of the same shapes have their tensors at the same elements, whatever their dtypes. torch's
    own pinned allocator rounds sizes up to a power of two.

    Raises:
        StateError: the system does not let so much memory be locked.
    """
    lengths = [-(-shape.numel() // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
    starts = [0, *accumulate(lengths)]
    if not starts[-1]:
        return [torch.zeros(shape, dtype=dtype) for shape in shapes]
    slab = torch.frombuffer(_Locked(starts[-1] * dtype.itemsize), dtype=dtype)
    return [
        slab[start : start + shape.numel()].view(shape)
        for start, shape in zip(starts, shapes, strict=False)
    ]


class _Locked(mmap.mmap):
    """Anonymous pages that CUDA has locked, until the last tensor in them is gone."""

    def __new__(cls, nbytes: int) -> _Locked:
        pages = super().__new__(cls, -1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        pages.address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = int(runtime.cudaHostRegister(pages.address, nbytes, 0))
        if result:
            pages.address = 0
            raise StateError(
                "no-memory",
                f"{nbytes} bytes of host memory could not be locked for the offloaded average (CUDA"
                f" error {result}): raise the limit of locked memory, or leave offload out",
            )
        return pages

    address: int = 0

    def __init__(self, nbytes: int) -> None:
        del nbytes

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
