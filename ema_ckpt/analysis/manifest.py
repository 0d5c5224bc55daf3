"""A manifest: SHA-256 of files by name, in the form that `sha256sum -c` reads.

Each line has 64 hex digits, a blank, a blank or `*`, and the name. A line whose name has a
backslash, line feed or carriage return begins with a backslash and has these escaped. Lines of
`sha256sum --tag` (`SHA256 (name) = digits`) are read too, and never written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import SourceError
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json

_BLOCK_NBYTES = 1 << 20
_PLAIN = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_TAGGED = re.compile(r"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escape: letter for letter, escape in _ESCAPES.items()}
_ESCAPE = re.compile(r"\\.?", re.DOTALL)


def format_manifest(digests: Mapping[str, str]) -> bytes:
    """Format the hex digits of each file, sorted by name."""
    lines = []
    for name in sorted(digests):
        escaped = "".join([_ESCAPES.get(letter, letter) for letter in name])
        mark = "" if escaped == name else "\\"
        lines.append(f"{mark}{digests[name]}  {escaped}\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


def parse_manifest(data: bytes, where: str) -> dict[str, str]:
    """Read the hex digits of each file; names begin at the checkpoint, a leading `./` aside.

    Raises:
        SourceError: `unreadable` for a line of another form, a name that stands twice with
            different digits, or nothing at all.
    """
    digests: dict[str, str] = {}
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").split("\n"), 1):
        text = line.removesuffix("\r")
        if not text or text.startswith("#"):
            continue
        name, digest = _parse_line(text, f"{where}: line {number}")
        if digests.setdefault(name, digest) != digest:
            message = f"{where}: line {number}: {name!r} stands twice, with different sums"
            raise SourceError("unreadable", message)
    if not digests:
        message = f"{where}: lists no file; expected lines as sha256sum writes them"
        raise SourceError("unreadable", message)
    return digests


def _parse_line(text: str, where: str) -> tuple[str, str]:
    plain, tagged = _PLAIN.fullmatch(text), _TAGGED.fullmatch(text)
    if plain is not None:
        mark, digest, name = plain.groups()
    elif tagged is not None:
        mark, name, digest = tagged.groups()
    else:
        message = "no line of sha256sum; expected 64 hex digits, two blanks and a name"
        raise SourceError("unreadable", f"{where}: {message}")
    if mark:
        name = _unescape(name, where)
    return name.removeprefix("./"), digest.lower()


def _unescape(name: str, where: str) -> str:
    for escape in _ESCAPE.findall(name):
        if escape not in _UNESCAPES:
            raise SourceError("unreadable", f"{where}: the name has the unknown escape {escape!r}")
    return _ESCAPE.sub(lambda match: _UNESCAPES[match[0]], name)


class _HashFile(NamedTuple):
    """Hash one file whole."""

    name: str
    nbytes: int


def hash_files(
    source: Files,
    sizes: Mapping[str, int],
    workers: Workers,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, str | SourceError]:
    """SHA-256 of each file of `sizes` (bytes by name) as hex digits, or the error of reading it."""
    work = _HashPass(source)
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    jobs = [_HashFile(name, nbytes) for name, nbytes in largest_first]
    executor.run(work, [jobs], workers, on_progress)
    return work.results


class _HashPass:
    """The work of hashing. `hashlib` and reads release the interpreter's lock."""

    def __init__(self, source: Files) -> None:
        self.results: dict[str, str | SourceError] = {}
        self._source = source

    def start_worker(self) -> Callable[[_HashFile], int]:
        block = memoryview(bytearray(_BLOCK_NBYTES))

        def hash_file(job: _HashFile) -> int:
            digest = hashlib.sha256()
            try:
                for part, start in _parts(block, job.nbytes):
                    self._source.read_into(job.name, start, part)
                    digest.update(part)
            except SourceError as error:
                self.results[job.name] = error
            else:
                self.results[job.name] = digest.hexdigest()
            return job.nbytes

        return hash_file

    def dump(self) -> bytes:
        rows = []
        for name, found in self.results.items():
            code = found.code if isinstance(found, SourceError) else None
            rows.append([name, code, str(found)])
        return dump_json(rows)

    def merge(self, dumped: bytes) -> None:
        for name, code, text in json.loads(dumped):
            self.results[name] = text if code is None else SourceError(code, text, file=name)

    def reset(self) -> None:
        self.results.clear()


def _parts(block: memoryview, nbytes: int) -> Iterator[tuple[memoryview, int]]:
    """Yield `block`, the last time cut to what is left, and the offset at which it is filled."""
    for start in range(0, nbytes, len(block)):
        yield block[: min(len(block), nbytes - start)], start
