"""What was read of a rank file as JSON, by which one process tells another.

Tensors, shards and plain values are sent. A file that holds anything else, or is no zip, is not: it
is read by the process that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ema_ckpt.core.box import Box
from ema_ckpt.core.catalog import Files, Nesting
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef
from ema_ckpt.formats.pickle.typed_values import Device, Layout, PathText, Size
from ema_ckpt.formats.rank_files.merger import RankFile
from ema_ckpt.formats.torch_file.reader import Content
from ema_ckpt.formats.torch_file.sharded_tensors import ShardRef
from ema_ckpt.formats.torch_zip.reader import Archive, Record, Window

_SCALARS = (str, int, float, bool, type(None))
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", Size: "size"}
_TEXTS: dict[str, type[str]] = {"device": Device, "layout": Layout, "path": PathText}
_TEXT_KINDS = {kind: name for name, kind in _TEXTS.items()}
_MAX_DEPTH = 100


class NotSentError(Exception):
    """A file holds what is not sent."""


def to_json(file: RankFile) -> list[object]:
    """Return a file as lists and plain values. Raises `NotSentError`."""
    content, archive = file.content, file.content.archive
    if not content.is_zip:
        raise NotSentError
    window = archive.window
    encoder = _Encoder(content.nbytes + 64)
    leaves = [[path, encoder.encode(value)] for path, value in file.leaves.items()]
    keys = [[path, encoder.encode(key)] for path, key in file.nesting.keys.items()]
    records = [*archive.records.items()]
    place = [window.offset, window.nbytes, archive.trailing_nbytes]
    form = [content.nbytes, content.is_big_endian]
    return [file.name, place, records, form, leaves, keys, [*file.nesting.tuples]]


def from_json(source: Files, sent: Any) -> RankFile:
    """Return the file that `to_json` described. Reads the ends of its archive."""
    name, (offset, window_nbytes, trailing), stored, (nbytes, is_big_endian), *rest = sent
    sent_leaves, sent_keys, tuples = rest
    records = {key: Record(*record) for key, record in stored}
    archive = Archive(name, records, Window(source, name, offset, window_nbytes), trailing)
    leaves = {tuple(path): _decode(value) for path, value in sent_leaves}
    keys = {tuple(path): _decode(key) for path, key in sent_keys}
    content = Content(None, archive, nbytes, is_big_endian, is_zip=True)
    nesting = Nesting(keys, frozenset(map(tuple, tuples)))
    return RankFile.of(name, content, leaves, nesting)


class _Encoder:
    """Encodes values that count at most `budget`, one that is shared at each reference."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def encode(self, value: object, depth: int = 0) -> object:
        kind = type(value)
        self._budget -= 1
        if self._budget < 0 or depth > _MAX_DEPTH:
            raise NotSentError
        if kind in _SCALARS:
            return value
        if isinstance(value, TensorRef):
            return ["tensor", *_tensor_fields(value)]
        if isinstance(value, ShardRef):
            shards = [[*box, _tensor_fields(ref)] for box, ref in value.shards]
            return ["shards", value.dtype.name, value.shape, shards, value.ranks]
        return self._encode_plain(value, depth)

    def _encode_plain(self, value: object, depth: int) -> object:
        """Encode bytes and containers, but none of a class that is derived from theirs."""
        kind = type(value)
        if kind in _TEXT_KINDS:
            return [_TEXT_KINDS[kind], str(value)]
        if kind is bytes and isinstance(value, bytes):
            return ["bytes", value.decode("latin-1")]
        if kind is dict and isinstance(value, dict):
            parts = [part for item in value.items() for part in item]
            return ["dict", *self._encode_all(parts, depth)]
        if kind in _SEQUENCES and isinstance(value, list | tuple):
            return [_SEQUENCES[kind], *self._encode_all(value, depth)]
        raise NotSentError

    def _encode_all(self, values: Sequence[object], depth: int) -> list[object]:
        return [self.encode(value, depth + 1) for value in values]


def _tensor_fields(ref: TensorRef) -> tuple[object, ...]:
    storage = ref.storage
    dtype = None if storage.dtype is None else storage.dtype.name
    place = (storage.key, dtype, storage.numel)
    return (*place, ref.dtype.name, ref.start, ref.shape, ref.strides)


def _decode(value: Any) -> object:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "tensor":
        return _tensor(parts)
    if kind == "shards":
        dtype, shape, sent, ranks = parts
        shards = [
            (Box(tuple(offsets), tuple(sizes)), _tensor(fields)) for offsets, sizes, fields in sent
        ]
        return ShardRef(by_name(dtype), tuple(shape), tuple(shards), ranks)
    if kind == "bytes":
        return parts[0].encode("latin-1")
    if kind in _TEXTS:
        return _TEXTS[kind](parts[0])
    values = [_decode(part) for part in parts]
    if kind == "dict":
        return dict(zip(values[::2], values[1::2], strict=True))
    sequences: dict[str, type[tuple[object, ...]]] = {"tuple": tuple, "size": Size}
    return sequences[kind](values) if kind in sequences else values


def _tensor(fields: Sequence[Any]) -> TensorRef:
    key, stored, numel, dtype, start, shape, strides = fields
    storage = StorageRef(key, None if stored is None else by_name(stored), numel)
    return TensorRef(storage, by_name(dtype), start, tuple(shape), tuple(strides))
