"""Read a Hugging Face index: `{"metadata": {"total_size"}, "weight_map": {name: file}}`.

Its shards are safetensors files, or torch files of `pytorch_model.bin.index.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from ema_ckpt.core.catalog import Diagnostic, Files, Problem
from ema_ckpt.core.errors import SourceError, about
from ema_ckpt.core.text import shown
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.safetensors.header import is_text_map
from ema_ckpt.storage.files import safe_name

_COUNTED = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})(\.\w+)", re.ASCII | re.DOTALL)
_SHOWN = 10


class _ShardSet(NamedTuple):
    """Files that are counted together, `PREFIX-00001-of-00002ENDING`."""

    prefix: str
    digits: int
    total: int
    ending: str

    def name(self, number: int) -> str:
        """Name the file of that number."""
        return f"{self.prefix}-{number:0{self.digits}}-of-{self.total:0{self.digits}}{self.ending}"


def read_index(source: Files, index: str) -> tuple[dict[str, str], int | None]:
    """Read the file of each name, and the total bytes if the index tells them.

    Raises:
        SourceError: `bad-header`. UnsafeError: `unsafe-path`.
    """
    document = sidecar.load_json(source.read(index, 0, source.size(index)), index)
    if not isinstance(document, dict):
        document = {}
    weight_map = document.get("weight_map")
    if not is_text_map(weight_map):
        raise SourceError("bad-header", f"{index}: no weight_map from names to files", file=index)
    for file in set(weight_map.values()):
        safe_name(file)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers count in floats; what no count can be (1e999) is not compared.
    is_count = isinstance(total, int | float) and 0 <= total < 2**63
    return weight_map, int(total) if is_count else None  # type: ignore[arg-type]


def names_by_file(weight_map: Mapping[str, str]) -> dict[str, set[str]]:
    """Names that each file should hold, files in the order of the index."""
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, set()).add(name)
    return names


@contextmanager
def open_indexed(file: str, names: set[str], problems: list[Problem]) -> Iterator[None]:
    """Add the error of a file that cannot be opened to `problems`, with what it should hold."""
    try:
        yield
    except SourceError as error:
        held = f"it should hold {shown(sorted(names))}"
        problems.append(Problem.of(about(error, file=file, remedy=held)))


def check_names(index: str, file: str, found: set[str], expected: set[str]) -> Iterator[Problem]:
    """Compare the names in a file with those that the index places there."""
    lacking, extra = sorted(expected - found), sorted(found - expected)
    problems = [f"lacks {shown(lacking)}"] if lacking else []
    if extra:
        problems.append(f"holds {shown(extra)}, which the index places elsewhere or nowhere")
    if problems:
        message = f"{file} {' and '.join(problems)}, against {index}"
        yield Problem("index-mismatch", (lacking + extra)[0], file, message)


def lacking_shards(index: str, files: Iterable[str]) -> tuple[list[str], list[Diagnostic]]:
    """Find shards that are counted with those an index names, and that it does not name itself.

    Returns the first of them, and a warning of each set: their tensors are lost to whoever follows
    the index.
    """
    numbers: dict[_ShardSet, set[int]] = {}
    for file in files:
        match = _COUNTED.fullmatch(file)
        if match:
            counted = _ShardSet(match[1], len(match[2]), int(match[3]), match[4])
            numbers.setdefault(counted, set()).add(int(match[2]))
    lacking: list[str] = []
    warnings: list[Diagnostic] = []
    for shards, found in numbers.items():
        first = 0 if 0 in found else 1  # some count from 0
        last = min(shards.total, len(found) + _SHOWN)
        names = [shards.name(n) for n in range(first, first + last) if n not in found]
        if names:
            lacking += names
            message = f"{index} names {len(found)} of the {shards.total} shards that"
            message = f"{message} {shards.name(min(found))!r} is one of, and leaves out"
            warnings.append(Diagnostic("left-out", f"{message} {shown(names)}"))
    return lacking, warnings
