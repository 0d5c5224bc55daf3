"""What an EMA tree says of itself: how often it was updated, with which decay. Small reads, safe
pickles.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ema_ckpt.core.catalog import Catalog, Object, Payload, Tensor
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import EMA, LIVE
from ema_ckpt.state_dicts.tree import Tree

_MAX_NBYTES = 64 * 1024
_MARKS = frozenset({"swapped", "is_swapped", "ema_swapped"})
_COUNTERS = ("num_updates", "n_averaged", "optimization_step", "step")
# The only types that a counter or decay is stored as; bfloat16 is the upper half of a float32.
_CODES = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "uint8": "<B",
}


@dataclass(frozen=True, slots=True)
class EmaSettings:
    """Settings of one EMA tree; None where the checkpoint does not tell.

    `schedule` is as it was stored: plain JSON values. `dtype` is torch's name for the averages'
        type, or `mixed`.
    """

    num_updates: int | None = None
    decay: float | None = None
    schedule: object = None
    dtype: str | None = None


def ema_settings(catalog: Catalog, tree: Tree, *, open_objects: bool = True) -> EmaSettings:
    """Read the settings of an EMA tree, at most 64 KiB of each entry.

    Without `open_objects` no pickled object of the checkpoint is opened; what is told by one stays
    None.

    Raises:
        SourceError: a settings tensor cannot be read or does not match its checksum.
        UnsafeError: `unsafe-pickle` if a settings object would call anything.
    """
    entries = tree.settings
    config: dict[str, object] = {}
    for name, entry in entries.items():
        head, _, key = name.partition(".")
        if head == "config":
            value = _value(catalog, entry, open_objects)
            config.update(_document(value) if not key else {key: value})
    counters = (
        _value(catalog, entries[name], open_objects) for name in _COUNTERS if name in entries
    )
    decay = (
        _value(catalog, entries["decay"], open_objects)
        if "decay" in entries
        else config.get("decay")
    )
    told = config.get(
        "num_updates", config.get("decay_steps")
    )  # DistEMA counts its steps in the configuration
    counted = next((value for value in counters if _is_count(value)), told)
    return EmaSettings(
        num_updates=_count(counted),
        decay=float(decay)
        if isinstance(decay, (int, float)) and not isinstance(decay, bool)
        else None,
        schedule=config.get("schedule", _ramp(config)),
        dtype=_dtype(tree),
    )


def samples_seen(catalog: Catalog, tree: Tree) -> int | None:
    """Samples that the updates of an EMA tree counted, for schedules in that unit.

    Raises:
        SourceError, UnsafeError: as for the other settings.
    """
    entry = tree.settings.get("samples_seen")
    return None if entry is None else _count(_value(catalog, entry, True))


def exchange_marks(catalog: Catalog, known: Sequence[Tree]) -> list[Tensor | Object]:
    """Entries that tell, if true, that averages and live weights lay in each other's place when
    they were saved.

    Only beside the trees or among an average's settings: weights, and a user's own values, may bear
    any name.
    """
    weights = {id(tensor) for tree in known if tree.role == LIVE for tensor in tree.tensors}
    homes = {"", *(tree.name for tree in known if tree.role == EMA)}
    found = []
    for item in chain[Tensor | Object](catalog.tensors, catalog.objects):
        if str(item.path[-1]).rpartition(".")[2] in _MARKS and id(item) not in weights:
            home = ".".join(map(str, item.path)).rpartition(".")[0]
            found += [item] if home in homes else []
    return found


def _ramp(config: Mapping[str, object]) -> dict[str, object] | None:
    """The warm-up of DistEMA's configuration as a schedule of this package; its first two calls
    both count as 0.
    """
    if config.get("warmup") is not True:
        return None
    kept = {
        key: config[key] for key in ("decay", "inv_gamma", "power", "min_decay") if key in config
    }
    after = config.get("update_after_step", 0)
    return {"kind": "warmup", **kept, "start": after + 1 if isinstance(after, int) else 1}


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) and _is_count(value) else None


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1


def _document(value: object) -> dict[str, object]:
    """A configuration: one JSON document, or a dictionary."""
    if isinstance(value, (str, bytes)):
        import json

        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def _dtype(tree: Tree) -> str | None:
    names = {
        tensor.dtype.name
        for tensor in tree.named.values()
        if tensor.dtype.kind not in ("int", "bool")
    }
    return "mixed" if len(names) > 1 else next(iter(names), None)


def _value(catalog: Catalog, entry: Tensor | Object, open_objects: bool) -> object:
    if isinstance(entry, Tensor):
        return _scalar(catalog, entry)
    if entry.is_inline:
        return catalog.reader.load(entry)
    return catalog.reader.load(entry) if open_objects and entry.nbytes <= _MAX_NBYTES else None


def _scalar(catalog: Catalog, tensor: Tensor) -> object:
    """The value of a tensor of one element, its storage checked against the checksum recorded."""
    decode = _decoder(tensor.dtype.name)
    if decode is None or tensor.numel != 1:
        return None
    held = next((index for index, chunk in enumerate(tensor.chunks) if 0 not in chunk.sizes), None)
    if held is None:
        raise SourceError(
            "hole", f"{tensor.name!r}: no chunk holds its element", tensor=tensor.name
        )
    payload = catalog.reader.payloads(tensor)[held]
    itemsize = tensor.dtype.itemsize
    return decode(_checked(catalog, tensor, payload)[payload.start * itemsize :][:itemsize])


def _checked(catalog: Catalog, tensor: Tensor, payload: Payload) -> bytes:
    if payload.nbytes > _MAX_NBYTES:
        message = f"{payload.file}: the setting {tensor.name!r} is one element of {payload.nbytes} bytes; not read"
        raise SourceError("unsupported", message, tensor=tensor.name, file=payload.file)
    data = catalog.source.read(payload.file, payload.offset, payload.nbytes)
    if payload.crc is not None and crc32(data) != payload.crc:
        message = f"{payload.file}: {tensor.name!r} does not match its CRC-32 {payload.crc:08x}: the file is damaged"
        raise SourceError("checksum", message, tensor=tensor.name, file=payload.file)
    return data


def _decoder(dtype: str) -> Callable[[bytes], object] | None:
    if dtype == "bfloat16":
        return lambda data: _shortest("<f", b"\0\0" + data)
    code = _CODES.get(dtype)
    if code is None:
        return None
    if code in ("<f", "<e"):
        return lambda data: _shortest(code, data)
    return lambda data: struct.unpack(code, data)[0]


def _shortest(code: str, data: bytes) -> float:
    """The number with the fewest digits that the type rounds to these bytes: 0.9999 and not
    0.9998999834.
    """
    value = float(struct.unpack(code, data)[0])
    for count in range(1, 10):
        short = float(f"{value:.{count}g}")
        if _rounds_to(code, short, data):
            return short
    return value


def _rounds_to(code: str, value: float, data: bytes) -> bool:
    try:
        return struct.pack(code, value) == data
    except (OverflowError, ValueError):
        return False
