"""What is fuzzed: each parser with inputs to begin from, over files that are in memory alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.dcp import metadata
from ema_ckpt.formats.dcp.consistency import find_mismatches
from ema_ckpt.formats.dcp.reader import open_dcp
from ema_ckpt.formats.pickle.tensors import load_tensor, load_value
from ema_ckpt.formats.rank_files.reader import open_rankfiles
from ema_ckpt.formats.safetensors import compact_record
from ema_ckpt.formats.safetensors.reader import open_safetensors
from ema_ckpt.formats.torch_file.reader import open_torchfile
from ema_ckpt.formats.torch_zip.reader import read_archive
from ema_ckpt.state_dicts.tree import list_trees

FIXTURES = Path(__file__).parents[2] / "fixtures"
MAX_NBYTES = 1 << 16
ENTRIES = [compact_record.Entry(f"m.{i}.w", "float32", (i, 2)) for i in range(4)]


class MemoryFiles:
    """Files of a checkpoint, in memory: whoever opens a real one is found out."""

    root = "memory"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def _file(self, name: str) -> bytes:
        if name not in self._files:
            raise SourceError("missing-file", f"{name}: no such file", file=name)
        return self._files[name]

    def size(self, name: str) -> int:
        return len(self._file(name))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        data = self._file(name)
        if not 0 <= offset <= offset + nbytes <= len(data):
            raise SourceError("truncated-file", f"{name}: too short", file=name)
        return data[offset : offset + nbytes]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(name, offset, len(buffer))

    def listing(self) -> list[str]:
        return sorted(self._files)

    def close(self) -> None:
        pass


class Target(NamedTuple):
    """A parser, and inputs that it reads. Other errors than `EmaCkptError` are finds."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


def _look_through(catalog) -> None:
    """Do with a catalog what verbs do before they read payload."""
    for step in (lambda: list_trees(catalog), catalog.find_mismatches):
        try:
            step()
        except EmaCkptError:
            pass
    for tensor in catalog.tensors[:50]:
        try:
            prove(tensor)
            catalog.reader.payloads(tensor)
        except EmaCkptError:
            pass
    for item in catalog.objects[:50]:
        try:
            catalog.reader.load(item)
        except EmaCkptError:
            pass


def _safetensors(data: bytes) -> None:
    files = MemoryFiles({"a.safetensors": data})
    _look_through(open_safetensors(files, ("a.safetensors",), "p", "p", lenient=True))


def _index(data: bytes) -> None:
    name = "model.safetensors.index.json"
    files = MemoryFiles({**_shards(), name: data})
    _look_through(open_safetensors(files, (name,), "p", "p", lenient=True))


@cache
def _shards() -> dict[str, bytes]:
    folder = FIXTURES / "hf" / "sharded"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def _archive(data: bytes) -> None:
    archive = read_archive(MemoryFiles({"a.pt": data}), "a.pt", 0, len(data))
    for name in list(archive.records)[:50]:
        archive.read(name)


def _torch_file(data: bytes) -> None:
    _look_through(open_torchfile(MemoryFiles({"a.pt": data}), ("a.pt",), "p", "p"))


def _pickle(data: bytes) -> None:
    for read in (load_tensor, load_value):
        try:
            read(data, "data.pkl")
        except EmaCkptError:
            pass


def _metadata(data: bytes) -> None:
    limit = metadata._COLUMNS_FROM_NBYTES
    for columns_from in (limit, 0):  # as a small file is read, and as a large one is
        metadata._COLUMNS_FROM_NBYTES = columns_from
        try:
            parsed = metadata.parse(data, ".metadata")
        finally:
            metadata._COLUMNS_FROM_NBYTES = limit
        find_mismatches([parsed], ())
        files = MemoryFiles({".metadata": data})
        _look_through(open_dcp(files, (".metadata",), "p", "p", [parsed]))


def _rank_files(data: bytes) -> None:
    files = MemoryFiles({"s_rank_0.pt": data, "s_rank_1.pt": _other_rank()})
    _look_through(open_rankfiles(files, ("s_rank_0.pt", "s_rank_1.pt"), "p", "p", lenient=True))


@cache
def _other_rank() -> bytes:
    return _small("rank-files/replicas/*")[1]


def _record(data: bytes) -> None:
    try:
        sidecar.parse(data, "f", [])  # a checksum that differs is listed, and does not end it
    except EmaCkptError:
        pass
    document = sidecar.load_json(data, "f")
    if compact_record.is_compact(document):
        sidecar.parse_document(lambda: compact_record.expand(document, ENTRIES), "f")


def _small(*patterns: str) -> list[bytes]:
    paths = [path for pattern in patterns for path in sorted(FIXTURES.glob(pattern))]
    files = [path for path in paths if path.is_file() and 0 < path.stat().st_size <= MAX_NBYTES]
    return [path.read_bytes() for path in files]


def _pickles() -> list[bytes]:
    found = []
    for data in _small("torch/*", "nasty/*.pt", "rank-files/*/*"):
        try:
            archive = read_archive(MemoryFiles({"a": data}), "a", 0, len(data))
            found.append(archive.read("data.pkl"))
        except EmaCkptError:
            continue
    return found


def _records() -> list[bytes]:
    digests = {
        e.name: {"crc32": "crc32:0000000f", "dtype": e.dtype, "shape": list(e.shape)}
        for e in ENTRIES
    }
    paths = {"m.1.w": ["m", 1, "w"], "m.2.w": ["m", "2", "w"]}
    plain = {
        "version": 1,
        "digests": digests,
        "paths": paths,
        "keys": [[["m", 1], 1]],
        "tuples": [["m"]],
    }
    plain |= {
        "objects": [{"name": "o", "path": ["o"], "value": {"$dict": [[1, {"$tuple": [1.5, {"$float": "nan"}]}]]}}],
        "ties": {"t": "m.1.w"}, "order": ["o", "m.3.w", "m.2.w", "m.1.w", "m.0.w", "t"],
        "describes": {".metadata": "crc32:00000001"}, "chunks": {"f": [[0, "crc32:00000002"]]},
    }  # fmt: skip
    compact = compact_record.compact(plain, ENTRIES, has_digests=True)
    return [json.dumps(plain).encode(), sidecar.dump(plain).encode(), compact.encode()]


TARGETS = {
    "safetensors header": Target(_safetensors, lambda: _small("safetensors/*", "nasty/*.safetensors")),
    "index": Target(_index, lambda: _small("hf/*/*.index.json", "nasty/hf-*/*.json")),
    "zip directory": Target(_archive, lambda: _small("torch/*", "nasty/*.pt", "dcp/fsdp2-w1/*.distcp")),
    "torch file": Target(_torch_file, lambda: _small("torch/*", "nasty/*.pt")),
    "data.pkl": Target(_pickle, _pickles),
    ".metadata": Target(_metadata, lambda: _small("dcp/*/.metadata", "nasty/*/.metadata")),
    "rank files": Target(_rank_files, lambda: _small("rank-files/*/*")),
    "record": Target(_record, _records),
}  # fmt: skip
