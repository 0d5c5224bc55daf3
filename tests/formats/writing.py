"""Carry out a `WritePlan` in the plainest way: every payload from memory, every frame behind it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.write_plan import OutputTensor, WritePlan, all_header_bytes


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major little-endian bytes of a tensor, by way of torch alone."""
    flat = (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
    )
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def entry(
    name: str, tensor: torch.Tensor, path: tuple[str | int, ...] | None = None, storage=None
) -> OutputTensor:
    """An entry that writes `tensor` as it is."""
    dtype = by_name(str(tensor.dtype))
    source = Tensor(name, path or (name,), tuple(tensor.shape), dtype, (), storage)
    return OutputTensor(name, path or (name,), source, dtype)


def entries(tensors: Mapping[str, torch.Tensor]) -> list[OutputTensor]:
    """Entries for a flat state dict."""
    return [entry(name, tensor) for name, tensor in tensors.items()]


def write(target: WritePlan, out: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `target` to the file or directory `out`, and hold it to the sizes it announced."""
    if set(target.files) != {""}:
        out.mkdir(parents=True, exist_ok=True)
    images = {file: bytearray(nbytes) for file, nbytes in target.files.items()}
    crcs, digests = [], {}
    for piece in target.items:
        data = raw_bytes(tensors[piece.output.name])
        assert len(data) == piece.nbytes
        images[piece.file][piece.offset : piece.offset + len(data)] = data
        crcs.append(zlib.crc32(data))
        digests[piece.output.name] = crcs[-1]
    for frame in all_header_bytes(target, crcs, digests):
        assert frame.offset + len(frame.data) <= len(images[frame.file])
        images[frame.file][frame.offset : frame.offset + len(frame.data)] = frame.data
    for file, image in images.items():
        assert len(image) == target.files[file]
        (out / file if file else out).write_bytes(image)


def read(catalog: Catalog, name: str) -> torch.Tensor:
    """A tensor of a catalog, rebuilt from its payload's strides by torch; its CRC is checked where there is one."""
    tensor = next(item for item in catalog.tensors if item.name == name)
    (payload,) = catalog.reader.payloads(tensor)
    data = bytearray(catalog.source.read(payload.file, payload.offset, payload.nbytes))
    assert payload.crc is None or zlib.crc32(data) == payload.crc
    dtype = getattr(torch, tensor.dtype.name)
    if not tensor.numel:
        return torch.empty(tensor.shape, dtype=dtype)
    storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    flat = torch.empty(0, dtype=dtype).set_(storage)
    strides = payload.strides
    if strides is None:
        return flat[payload.start : payload.start + tensor.numel].reshape(tensor.shape)
    return flat.as_strided(tensor.shape, strides, payload.start)
