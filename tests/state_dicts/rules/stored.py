"""Checkpoints in memory whose tensors are cut at random, and some of whose chunks are stored with strides."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Catalog, Chunk, Payload, Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.reading.box_reader import BoxReader, locate
from tests.catalogs import Memory


class Cut(Memory):
    """Chunks in memory, one a file; `strides` of those that are no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: dict[str, tuple[int, ...]] = {}

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        return tuple(
            Payload(c.file, 0, len(self.data[c.file]), self.strides.get(c.file))
            for c in tensor.chunks
        )


def boxes(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    """Cut a shape at random places of random axes."""
    pieces = [whole(shape)]
    for _ in range(rng.randrange(4)):
        box = pieces.pop(rng.randrange(len(pieces)))
        axes = [axis for axis, size in enumerate(box.sizes) if size > 1]
        if not axes:
            pieces.append(box)
            continue
        axis = rng.choice(axes)
        at = rng.randrange(1, box.sizes[axis])
        for start, length in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += start
            sizes[axis] = length
            pieces.append(Box(tuple(offsets), tuple(sizes)))
    rng.shuffle(pieces)
    return pieces


def catalog_of(
    tensors: Mapping[str, torch.Tensor], rng: random.Random, *, strided: bool
) -> Catalog:
    """A checkpoint of these tensors under plain names."""
    files = Cut()
    stored = []
    for name, tensor in tensors.items():
        chunks = []
        for number, box in enumerate(boxes(tuple(tensor.shape), rng)):
            file = f"{name}-{number}"
            piece = tensor[box.slices()].contiguous()
            if strided and piece.dim() > 1 and rng.random() < 0.3:
                piece = piece.transpose(0, 1).contiguous()
                files.strides[file] = piece.transpose(0, 1).stride()
            files.data[file] = piece.numpy().tobytes()
            chunks.append(Chunk(box.offsets, box.sizes, file, 0, len(files.data[file])))
        dtype = by_name(str(tensor.dtype))
        stored.append(Tensor(name, (name,), tuple(tensor.shape), dtype, tuple(chunks)))
    return Catalog(
        "memory",
        "memory",
        "safetensors",
        tuple(stored),
        (),
        files,
        files,
        nested=False,  # type: ignore[arg-type]
    )


def read(catalog: Catalog, tensor: Tensor, block_nbytes: int = 64) -> torch.Tensor:
    """The values of a tensor, through the reader that all verbs use."""
    dtype = getattr(torch, tensor.dtype.name)
    if not tensor.numel:
        return torch.empty(tensor.shape, dtype=dtype)
    data = bytearray(tensor.nbytes)
    BoxReader(block_nbytes).read(locate(catalog, tensor), memoryview(data))
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
