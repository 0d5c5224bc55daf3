"""Boxes of stored tensors, and stored objects, as host values: whatever the format, and without
running code.
"""

from __future__ import annotations

import datetime
import io
import pathlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.checksums import ChecksumVerifier
from ema_ckpt.reading.overlaps import BoxReader, RowBlocks, contiguous_ranges, find_overlaps

_BAND_NBYTES = 8 << 20


class Source:
    """A catalog from which tensors are read box by box. Whatever is read whole is compared with its
    checksum.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._checks = ChecksumVerifier(catalog.source, enabled=True)
        self._bands = BoxReader(catalog.source, self._checks, _BAND_NBYTES)

    def read(self, tensor: Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """One host tensor for each box, in the stored dtype.

        Raises:
            SourceError: `missing-file truncated-file checksum hole …`, naming tensor and file.
        """
        kind = dtype_of(tensor)
        found = [torch.empty(box.sizes, dtype=kind) for box in boxes]
        if any(box.numel for box in boxes):
            picked = prove(tensor)
            payloads = self.catalog.reader.payloads(tensor)
            for box, into in zip(boxes, found, strict=True):
                if box.numel:
                    self._fill(
                        tensor, find_overlaps(tensor, payloads, picked, box), box, _bytes_of(into)
                    )
        return found

    def read_whole(self, tensor: Tensor) -> torch.Tensor:
        """The whole tensor on the host."""
        return self.read(tensor, [whole(tensor.shape)])[0]

    def load(self, item: Object) -> Any:
        """A stored object.

        Raises:
            SourceError: `unsafe-pickle` if it needs more than plain values and tensors.
        """
        if item.is_inline:
            return item.inline
        if self.catalog.format != "dcp":
            return self.catalog.reader.load(item)
        data = self.catalog.source.read(item.file, item.offset, item.nbytes)
        try:
            return load_plain(data)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SourceError(
                "unsafe-pickle",
                f"{item.file}: object {item.name!r} holds more than plain values: {reason}",
                file=item.file,
            ) from error

    def _fill(self, tensor: Tensor, shares: Sequence[Any], box: Box, out: memoryview) -> None:
        itemsize = tensor.dtype.itemsize
        runs = contiguous_ranges(shares, box, itemsize)
        if runs is None:
            cutter, at = RowBlocks(box, itemsize, _BAND_NBYTES), 0
            for index in range(cutter.count):
                band = cutter.band(index)
                nbytes = band.numel * itemsize
                self._bands.read(tensor, shares, band, out[at : at + nbytes])
                at += nbytes
            return
        for run in runs:
            part = out[run.dest : run.dest + run.nbytes]
            self.catalog.source.read_into(run.payload.file, run.payload.offset + run.start, part)
            self._checks.read(tensor.name, run.payload, run.start, run.nbytes, crc32(part))


def load_plain(data: bytes) -> Any:
    """What `torch.save` wrote, if it is made of plain values: those of torch's own list, of NumPy
    and of time.

    Raises:
        Exception: of whatever class torch chose: it needs anything else.
    """
    with torch.serialization.safe_globals(_harmless()):
        return torch.load(io.BytesIO(data), weights_only=True)


@cache
def _harmless() -> list[Any]:
    """Constructors that make a value of their arguments and do nothing else."""
    import numpy

    array = numpy.empty(0)
    rebuild, scalar = array.__reduce__()[0], numpy.float64().__reduce__()[0]
    dtypes = [kind for name, kind in vars(numpy.dtypes).items() if name.endswith("DType")]
    paths = [type(pathlib.Path()), type(pathlib.PurePath())]
    times = [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone]
    # Transformer Engine's modules keep their extra state in a BytesIO.
    return [rebuild, scalar, numpy.ndarray, numpy.dtype, *dtypes, *paths, *times, io.BytesIO]


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The torch type of a stored tensor.

    Raises:
        SourceError: `unsupported`: this release of torch has no such type.
    """
    found = getattr(torch, tensor.dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise SourceError(
            "unsupported",
            f"{tensor.name!r}: this torch has no {tensor.dtype.name}",
            tensor=tensor.name,
        )
    return found


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(data)
