"""Laying out a file that `torch.load(weights_only=True, mmap=True)` reads: a stored zip, payloads
64-aligned.

Members, in order: `data.pkl`, `byteorder`, `data/0`, `data/1` …, `version`, and `ema_ckpt.json`
    with digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ema_ckpt.core.box import row_major_strides, whole
from ema_ckpt.core.catalog import Nesting, Object
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import TargetError
from ema_ckpt.core.write_plan import HeaderBytes, OutputTensor, WriteItem, keep_first
from ema_ckpt.formats import sidecar as record
from ema_ckpt.formats.nesting import renest
from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef
from ema_ckpt.formats.pickle.writer import dumps
from ema_ckpt.formats.torch_zip.writer import Member, ZipLayout

_FOLDER = "archive"


@dataclass(frozen=True)
class TorchWritePlan:
    """One torch file. `stored` are the entries with a payload of their own, `keeper` names that of
    each entry.
    """

    entries: tuple[OutputTensor, ...]
    stored: tuple[OutputTensor, ...]
    keeper: Mapping[str, str]
    pickle: bytes

    @cached_property
    def _zip(self) -> ZipLayout:
        payloads = [
            Member(f"data/{index}", entry.nbytes) for index, entry in enumerate(self.stored)
        ]
        return ZipLayout(
            _FOLDER,
            [
                Member("data.pkl", len(self.pickle), self.pickle),
                Member("byteorder", 6, b"little"),
                *payloads,
                Member("version", 2, b"3\n"),
                Member(record.SIDECAR, len(self._record({}))),
            ],
        )

    @property
    def files(self) -> Mapping[str, int]:
        """The one file."""
        return {"": self._zip.nbytes}

    @cached_property
    def items(self) -> Sequence[WriteItem]:
        """One piece for each storage."""
        offsets = self._zip.offsets[2:]
        return tuple(
            WriteItem(entry, whole(entry.source.shape), "", offset)
            for entry, offset in zip(self.stored, offsets, strict=False)
        )

    def header_bytes(self, crcs: Sequence[int], digests: Mapping[str, int]) -> Iterator[HeaderBytes]:
        """Local headers, small records and the central directory."""
        own = self._record(digests)
        yield HeaderBytes("", self._zip.offsets[-1], own)
        for offset, data in self._zip.header_bytes([*crcs, crc32(own)]):
            yield HeaderBytes("", offset, data)

    def _record(self, digests: Mapping[str, int]) -> bytes:
        complete = {entry.name: digests.get(self.keeper[entry.name], 0) for entry in self.entries}
        return record.dump(self.entries, complete).encode("utf-8")


def lay_out(
    entries: Sequence[OutputTensor],
    *,
    nesting: Nesting | None = None,
    objects: Sequence[Object] = (),
    expand_ties: bool = False,
) -> TorchWritePlan:
    """One torch file.

    Args:
        nesting: None for a flat `{name: tensor}`; else containers are made from the paths of
            entries and objects.
        objects: inline plain objects; without nesting they lie at the top under their names.
        expand_ties: give a tensor that shares its storage a copy of its own.

    Raises:
        TargetError: `unsupported` for an object that is not plain or a name that is no Unicode,
            `name-collision` if two entries meet.
    """
    entries = tuple(entries)
    _refuse_unfit(entries, objects)
    stored, ties = (list(entries), {}) if expand_ties else keep_first(entries)
    keeper = {entry.name: ties.get(entry.name, entry.name) for entry in entries}
    keys = {entry.name: str(index) for index, entry in enumerate(stored)}
    leaves: list[tuple[tuple[str | int, ...], object]] = [
        (
            entry.path if nesting is not None else (entry.name,),
            _ref(entry, keys[keeper[entry.name]]),
        )
        for entry in entries
    ]
    leaves += [
        (item.path if nesting is not None else (item.name,), item.inline) for item in objects
    ]
    pickle = dumps(renest(leaves, nesting or Nesting()))
    return TorchWritePlan(entries, tuple(stored), keeper, pickle)


def _ref(entry: OutputTensor, key: str) -> TensorRef:
    shape = entry.source.shape
    typed = entry.dtype if entry.dtype.storage_class else None
    storage = StorageRef(key, typed, entry.source.numel if typed else entry.nbytes)
    return TensorRef(storage, entry.dtype, 0, shape, row_major_strides(shape))


def _refuse_unfit(entries: Sequence[OutputTensor], objects: Sequence[Object]) -> None:
    for item in objects:
        try:
            dumps(item.inline)
        except TypeError as error:
            message = f"object {item.name!r} does not fit into a torch file: {error}; leave it out with --exclude"
            raise TargetError("unsupported", message, tensor=item.name) from None
    for entry in entries:
        if not record.is_unicode(entry.name):
            message = f"a torch file cannot store a tensor of the name {entry.name!r}; rename it with --rename"
            raise TargetError("unsupported", message, tensor=entry.name)
