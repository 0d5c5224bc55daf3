"""The record in a safetensors header, without the names, dtypes and shapes that stand there anyway.

The plain record (`formats.sidecar`) repeats every name, and so doubles a header: half as many
names fit. Where it does not fit it is written in this form, in which lists run along the tensors
of the header, in its order. Instead of `digests`, `order` and the `paths` of these tensors:

    {"version": 2,
     "header": "crc32:8hex"      of those names, dtypes and shapes; another means another header
     "crc32s": base64 of 32-bit little-endian numbers, or absent where no digest would fit
     "order": [place, count, …]  runs of tensors as the state dict has them
     "names": [place, count, …]  runs of tensors, ties and objects together, if they lie mixed
     "cuts": [[cut, count], …]}  how each name falls into its path

A cut has the length of every part but the last, with `i` before a number: `1,i2,` cuts `a.10.b`
into `("a", 10, "b")`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ema_ckpt.core.crc import crc32
from ema_ckpt.formats import sidecar

VERSION = 2
_SHARED = ("keys", "tuples", "objects", "ties", "crc32")  # as in the plain form


class Entry(NamedTuple):
    """A tensor as a header has it; `dtype` is torch's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def compact(document: Mapping[str, Any], entries: Sequence[Entry], *, has_digests: bool) -> str:
    """Write the plain `document` of `entries`, the tensors of a header, in this form."""
    place = {entry.name: index for index, entry in enumerate(entries)}
    digests, paths = document["digests"], dict(document.get("paths", {}))
    short: dict[str, Any] = {"version": VERSION, "header": sidecar.crc_text(crc_of(entries))}
    if has_digests:
        short["crc32s"] = _packed_crcs(digests, entries)
    short["order"] = _runs([place[name] for name in digests])
    if "order" in document:
        among = {name: index for index, name in enumerate(_names_of(document, digests))}
        short["names"] = _runs([among[name] for name in document["order"]])
    if "paths" in document:
        cuts = [_take_cut(entry.name, paths) for entry in entries]
        short["cuts"] = [[cut, len(list(group))] for cut, group in groupby(cuts)]
        short["paths"] = paths
    for key in _SHARED:
        if key in document:
            short[key] = document[key]
    return sidecar.dump(short)


def is_compact(document: object) -> bool:
    """Whether a document is in this form."""
    return isinstance(document, dict) and document.get("version") == VERSION


def expand(document: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """Restore the plain document; its `sequence` has the tensors in order, with or without digests.

    Raises:
        ValueError, KeyError, TypeError: if nothing compacts to this.
    """
    ordered = [entries[place] for place in _places(document["order"], len(entries))]
    plain: dict[str, Any] = {"version": sidecar.VERSION}
    plain["sequence"] = [entry.name for entry in ordered]
    plain["digests"] = _digests(document, entries)
    for key in _SHARED:
        if key in document:
            plain[key] = document[key]
    if "paths" in document:
        plain["paths"] = document["paths"] | dict(_cut_paths(document["cuts"], entries))
    if "names" in document:
        among = _names_of(document, plain["sequence"])
        plain["order"] = [among[place] for place in _places(document["names"], len(among))]
    return plain


def crc_of(entries: Iterable[Entry]) -> int:
    """CRC-32 of names, dtypes and shapes of a header.

    A record has it to tell whether another program has changed the tensors, and kept the record.
    """
    crc = 0
    for entry in entries:
        crc = crc32(repr((entry.name, entry.dtype, list(entry.shape))).encode(), crc)
    return crc


def _packed_crcs(digests: Mapping[str, Any], entries: Iterable[Entry]) -> str:
    crcs = [int(digests[entry.name]["crc32"][-8:], 16) for entry in entries]
    return base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode("ascii")


def _digests(document: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, object]:
    if "crc32s" not in document:
        return {}
    packed = base64.b64decode(document["crc32s"], validate=True)
    if len(packed) != 4 * len(entries):
        raise ValueError(f"{len(packed)} bytes of checksums of {len(entries)} tensors")
    digests: dict[str, object] = {}
    for entry, crc in zip(entries, struct.unpack(f"<{len(entries)}I", packed), strict=True):
        value = {"crc32": f"crc32:{crc:08x}", "dtype": entry.dtype, "shape": entry.shape}
        digests[entry.name] = value
    return digests


def _names_of(document: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Return all names of a record in the order that the plain form has without `order`."""
    objects = [item["name"] for item in document.get("objects", [])]
    return [*tensors, *document.get("ties", {}), *objects]


def _runs(places: Iterable[int]) -> list[int]:
    """Join places that follow one another: first place, count, first place, count, …"""
    runs: list[int] = []
    for place in places:
        if runs and place == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [place, 1]
    return runs


def _places(runs: Sequence[int], total: int) -> list[int]:
    """List the places of runs, which name each of `total` places once."""
    places: list[int] = []
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        if first < 0 or count < 1 or len(places) + count > total:
            raise ValueError(f"a run of {count} from {first}")
        places += range(first, first + count)
    if len(places) != total or len(set(places)) != total or (places and max(places) >= total):
        raise ValueError(f"runs of {len(places)} places of {total}")
    return places


def _take_cut(name: str, paths: dict[str, Any]) -> str:
    """Take the path of a name out of `paths` and return its cut, if a cut can tell it."""
    path = paths.get(name)
    if path is None or ".".join(map(str, path)) != name:
        return ""
    del paths[name]
    marks = ["i" if isinstance(part, int) else "" for part in path]
    lengths = [str(len(str(part))) for part in path[:-1]]
    return "".join([f"{mark}{n}," for mark, n in zip(marks, lengths, strict=False)]) + marks[-1]


def _cut_paths(cuts: Sequence[Any], entries: Sequence[Entry]) -> Iterator[tuple[str, list[object]]]:
    """Yield the names that have a cut, with their paths."""
    rest = iter(entries)
    for cut, count in cuts:
        marks = cut.split(",")
        for _ in range(count):
            entry = next(rest, None)
            if entry is None:
                raise ValueError("cuts of more names than there are")
            if cut:
                yield entry.name, _cut(entry.name, marks)


def _cut(name: str, marks: Sequence[str]) -> list[object]:
    parts: list[object] = []
    start = 0
    for index, mark in enumerate(marks):
        is_last = index == len(marks) - 1
        length = len(name) - start if is_last else int(mark.removeprefix("i"))
        text = name[start : start + length]
        start += length + 1
        parts.append(int(text) if mark.startswith("i") else text)
    if ".".join(map(str, parts)) != name:
        raise ValueError(f"{name!r} cannot be cut at {marks}")
    return parts
