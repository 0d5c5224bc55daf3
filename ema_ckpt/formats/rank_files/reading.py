"""Read the files of all ranks, in several processes where that pays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.formats.rank_files.merger import RankFile
from ema_ckpt.formats.rank_files.sent_file import NotSentError, from_json, to_json
from ema_ckpt.formats.torch_file.lenient import LenientGlobals, check_discarded
from ema_ckpt.formats.torch_file.reader import read_content, read_leaves
from ema_ckpt.formats.torch_file.sharded_tensors import SubclassReader
from ema_ckpt.runtime.executor import Workers, dump_json, run

_SECONDS_PER_BYTE = 0.15e-6  # of a pickle


def read_file(source: Files, name: str) -> RankFile:
    """Read the pickle and the directory of one rank's file.

    Raises:
        SourceError, UnsafeError: whatever reading a torch file may raise.
    """
    lenient = LenientGlobals(SubclassReader())
    content = read_content(source, name, lenient)
    leaves, nesting = read_leaves(content)
    check_discarded(lenient.unsafe, [value for _, value in leaves], name)
    return RankFile.of(name, content, dict(leaves), nesting)


def read_ahead(source: Files, names: Sequence[str], most: int) -> Mapping[str, RankFile]:
    """Read files in up to `most` processes, where the first of them tells that it pays.

    Returns those that were read: none where one process reads them all, and not those that it
    takes the caller's own reading to say something about, such as what is wrong with them.
    """
    if most < 2 or len(names) < 2:
        return {}
    try:
        first = read_file(source, names[0])
        to_json(first)
    except (EmaCkptError, NotSentError):
        return {}
    work = _Reading(source, names)
    work.files[names[0]] = first
    workers = Workers.fit(most, 0.0, first.content.nbytes * len(names) * _SECONDS_PER_BYTE)
    if workers.processes:
        run(work, [[_File(number, 0) for number in range(1, len(names))]], workers)
    return work.files


class _File(NamedTuple):
    """A file to be read, by its number; how long its pickle is shows when it is read."""

    number: int
    nbytes: int


class _Reading:
    """Reads files, and lists those that could be read."""

    def __init__(self, source: Files, names: Sequence[str]) -> None:
        self.files: dict[str, RankFile] = {}
        self._source = source
        self._names = names

    def start_worker(self) -> Callable[[_File], int]:
        return self._read

    def _read(self, job: _File) -> int:
        name = self._names[job.number]
        try:
            self.files[name] = read_file(self._source, name)
        except EmaCkptError:
            pass  # it is read again in its turn, which raises it
        return job.nbytes

    def dump(self) -> bytes:
        sent = []
        for name in self._names[1:]:
            if name in self.files:
                try:
                    sent.append(to_json(self.files[name]))
                except NotSentError:
                    continue
        return dump_json(sent)

    def merge(self, dumped: bytes) -> None:
        for sent in json.loads(dumped):
            file = from_json(self._source, sent)
            self.files[file.name] = file

    def reset(self) -> None:
        for name in self._names[1:]:
            self.files.pop(name, None)
