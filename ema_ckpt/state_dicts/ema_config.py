"""The settings an EMA tree records: its counters, decay, schedule and tied names."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeGuard

from ema_ckpt.core.catalog import Catalog, Object, Tensor
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import SourceError, UsageError
from ema_ckpt.core.names import EMA, LIVE
from ema_ckpt.state_dicts.tree import Tree, of_role

COUNTERS = ("num_updates", "n_averaged", "optimization_step", "step", "steps")
"""Settings that count the updates, by precedence."""

_MAX_NBYTES = 64 * 1024
_MAX_BITS = 64
_MAX_DEPTH = 8
_MAX_PLACES = 100_000  # of a schedule: more than 64 KiB have unless they repeat themselves
_SWAP_MARKS = frozenset({"swapped", "is_swapped", "ema_swapped"})
# The only types that a counter or decay is stored as; bfloat16 is the upper half of a float32.
_CODES = {
    "float64": "<d",
    "float32": "<f",
    "bfloat16": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "uint8": "<B",
}


@dataclass(frozen=True, slots=True)
class EmaConfig:
    """Settings of one EMA tree; None where the checkpoint does not record one.

    Attributes:
        schedule: plain JSON values, as stored.
        dtype: torch's name for the type of the averages, or `mixed`.
        raw: the whole configuration, by key.
    """

    num_updates: int | None = None
    decay: float | None = None
    schedule: object = None
    dtype: str | None = None
    raw: Mapping[str, object] = field(default_factory=dict, compare=False)


def read_ema_config(catalog: Catalog, tree: Tree, *, open_objects: bool = True) -> EmaConfig:
    """Read the settings of an EMA tree, at most 64 KiB of each entry.

    Without `open_objects` no pickled object is opened, and what it records stays None.

    Raises:
        SourceError: a settings tensor cannot be read or does not match its checksum.
        UnsafeError: `unsafe-pickle` if a settings object would call anything.
    """
    settings = tree.settings
    raw = _read_config(catalog, settings, open_objects)
    decay = raw.get("decay")
    if "decay" in settings:
        decay = _read_value(catalog, settings["decay"], open_objects)
    schedule = raw.get("schedule")
    if "schedule" not in raw and raw.get("warmup") is True:
        schedule = _warmup_schedule(raw)
    dtypes = {t.dtype.name for t in tree.named.values() if not t.dtype.is_discrete}
    return EmaConfig(
        num_updates=_read_count(catalog, settings, raw, open_objects),
        decay=float(decay) if _is_number(decay) else None,
        schedule=_as_plain(schedule),
        dtype="mixed" if len(dtypes) > 1 else "".join(dtypes) or None,
        raw=raw,
    )


def _read_count(
    catalog: Catalog,
    settings: Mapping[str, Tensor | Object],
    raw: Mapping[str, object],
    open_objects: bool,
) -> int | None:
    """Read how many updates the first counter among the settings says, else the configuration."""
    for name in COUNTERS:
        if name in settings:
            count = _as_count(_read_value(catalog, settings[name], open_objects))
            if count is not None:
                return count
    # DistEMA counts its steps in the configuration.
    return _as_count(raw.get("num_updates", raw.get("decay_steps")))


def _read_config(
    catalog: Catalog, settings: Mapping[str, Tensor | Object], open_objects: bool
) -> dict[str, object]:
    raw: dict[str, object] = {}
    for name, entry in settings.items():
        head, _, key = name.partition(".")
        if head == "config":
            value = _read_value(catalog, entry, open_objects)
            raw.update({key: value} if key else parse_config(value))
    return raw


def read_samples_seen(catalog: Catalog, tree: Tree) -> int | None:
    """Read how many samples the updates of an EMA tree counted, for schedules in that unit.

    Raises:
        SourceError, UnsafeError: as for the other settings.
    """
    entry = tree.settings.get("samples_seen")
    return None if entry is None else _as_count(_read_value(catalog, entry, True))


def parse_config(value: object) -> dict[str, object]:
    """Parse a configuration: one JSON document, or a dictionary; {} for anything else."""
    if isinstance(value, (str, bytes)):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    if not isinstance(value, Mapping):
        return {}
    return {key: item for key, item in value.items() if isinstance(key, str)}


def _is_huge(value: object) -> bool:
    """Whether a value is an integer beyond 64 bits: no setting, and Python may not print it."""
    return isinstance(value, int) and value.bit_length() >= _MAX_BITS


def _as_plain(value: object) -> Any:
    """Keep what JSON has, as a schedule is shown there; None for all else, deep nesting, and a
    value that refers to the same parts over and over.
    """
    places = iter(range(_MAX_PLACES))
    plain = _part_as_plain(value, places, _MAX_DEPTH)
    return None if next(places, None) is None else plain


def _part_as_plain(value: Any, places: Iterator[int], depth: int) -> Any:
    if next(places, None) is None:
        return None
    if isinstance(value, Mapping) and depth:
        parts = {k: item for k, item in value.items() if isinstance(k, str)}
        return {k: _part_as_plain(item, places, depth - 1) for k, item in parts.items()}
    if isinstance(value, list | tuple) and depth:
        return [_part_as_plain(item, places, depth - 1) for item in value]
    is_plain = isinstance(value, int | float | str) and not _is_huge(value)
    return value if is_plain else None


def with_tied_names(catalog: Catalog, tree: Tree) -> Tree:
    """List each averaged weight of `tree` under every name that the configuration records for it.

    A tied weight is averaged once; `tied` in the configuration lists its other names, under which a
    strict load expects it too, and which a live weight must not fill.
    """
    entry = tree.settings.get("config")
    if tree.role != EMA or tree.problem is not None or not isinstance(entry, Object):
        return tree
    try:
        tied = parse_config(_read_value(catalog, entry, True)).get("tied")
    except (SourceError, UsageError):  # a configuration that cannot be read safely ties nothing
        return tree
    if not isinstance(tied, Mapping) or not tied:
        return tree
    named: dict[str, Tensor] = {}
    for name, tensor in tree.named.items():
        named[name] = tensor
        others = tied.get(name)
        if not isinstance(others, (list, tuple)):
            continue
        for other in others:
            if isinstance(other, str) and other not in tree.named:
                named[other] = tensor
    return replace(tree, named=named)


def swap_marks(catalog: Catalog, trees: Sequence[Tree]) -> list[Tensor | Object]:
    """List entries that say, if true, that averages and live weights were saved while swapped.

    Only beside the trees or among an average's settings: weights, and a user's own values, may bear
    any name.
    """
    weights = set(map(id, chain.from_iterable(tree.tensors for tree in of_role(trees, LIVE))))
    parents = {"", *(tree.name for tree in of_role(trees, EMA))}
    marks = []
    for item in chain[Tensor | Object](catalog.tensors, catalog.objects):
        parent, _, last = ".".join(map(str, item.path)).rpartition(".")
        if last in _SWAP_MARKS and parent in parents and id(item) not in weights:
            marks.append(item)
    return marks


def _warmup_schedule(raw: Mapping[str, object]) -> dict[str, object]:
    """DistEMA's warm-up as a schedule of this package; its first two calls both count as 0."""
    schedule: dict[str, object] = {"kind": "warmup"}
    for key in ("decay", "inv_gamma", "power", "min_decay"):
        if key in raw:
            schedule[key] = raw[key]
    after = raw.get("update_after_step", 0)
    schedule["start"] = after + 1 if isinstance(after, int) else 1
    return schedule


def _is_number(value: object) -> TypeGuard[int | float]:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and not _is_huge(value)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a setting is a whole number that something can have counted to."""
    return type(value) is int and not _is_huge(value)


def _as_count(value: object) -> int | None:
    count = int(value) if _is_number(value) and value == value // 1 else None
    return None if _is_huge(count) else count


def _read_value(catalog: Catalog, entry: Tensor | Object, open_objects: bool) -> object:
    if isinstance(entry, Tensor):
        return read_scalar(catalog, entry)
    if entry.is_inline or (open_objects and entry.nbytes <= _MAX_NBYTES):
        return catalog.reader.load(entry)
    return None


def read_scalar(catalog: Catalog, tensor: Tensor) -> object:
    """Read a tensor of one element and check its storage against the recorded checksum.

    Raises:
        SourceError: `hole checksum`, or `unsupported` for an element of a large storage.
    """
    name, dtype = tensor.name, tensor.dtype
    if dtype.name not in _CODES or tensor.numel != 1:
        return None
    stored = [index for index, chunk in enumerate(tensor.chunks) if 0 not in chunk.sizes]
    if not stored:
        raise SourceError("hole", f"{name!r}: no chunk holds its element", tensor=name)
    payload = catalog.reader.payloads(tensor)[stored[0]]
    file = payload.file
    if payload.nbytes > _MAX_NBYTES:
        message = f"{file}: the setting {name!r} is one element of {payload.nbytes} bytes; not read"
        raise SourceError("unsupported", message, tensor=name, file=file)
    data = catalog.source.read(file, payload.offset, payload.nbytes)
    if payload.crc is not None and crc32(data) != payload.crc:
        message = f"{file}: {name!r} does not match its CRC-32 {payload.crc:08x}"
        raise SourceError("checksum", f"{message}: the file is damaged", tensor=name, file=file)
    return _decode(dtype.name, data[payload.start * dtype.itemsize :][: dtype.itemsize])


def _decode(dtype: str, data: bytes) -> int | float:
    """Decode one element; of a short float, the number of fewest digits that is stored as `data`.

    That is 0.9999, not 0.9998999834.
    """
    code = _CODES[dtype]
    if dtype == "bfloat16":
        data = b"\0\0" + data
    value: int | float = struct.unpack(code, data)[0]
    if code not in ("<f", "<e"):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack(code, short) == data:
                return short
        except (OverflowError, ValueError):  # rounded up to more than the type holds
            continue
    return value
