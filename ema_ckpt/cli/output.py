"""What commands print: one JSON document, or text for people."""

from __future__ import annotations

import json as jsonlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO

from ema_ckpt.core.display import displayed
from ema_ckpt.core.text import counted, format_size

if TYPE_CHECKING:
    from rich.console import Console

    from ema_ckpt.core.catalog import Diagnostic
    from ema_ckpt.ops.results.verify import ManifestResult, VerifyResult
    from ema_ckpt.ops.results.write import AppliedRules, WriteResult

_UNLIMITED_COLUMNS = 100_000
_MAX_PROBLEMS = 40
_MAX_LINES = 10
_COMMAND = re.compile("`[^`]*`")
_JOINT = "\0"  # in no line that is printed
_VERDICT_COLOURS = {"sound": "1;32", "unproven": "1;33", "damaged": "1;31"}


class Style(NamedTuple):
    """How to print: `--json`, `--quiet`."""

    json: bool = False
    quiet: bool = False

    @property
    def talks(self) -> bool:
        """Whether to print text for people."""
        return not self.json and not self.quiet


def clean(text: str) -> str:
    """Return text from a checkpoint or a path as one printable line without credentials."""
    return displayed(text)


def markup(text: str) -> str:
    """Clean `text` and escape what rich would take for markup."""
    from rich.markup import escape

    return escape(clean(text))


def terminal(*, stderr: bool = False) -> Console:
    """Return a console: no styles if `NO_COLOR` is set, no width limit if not on a terminal."""
    from rich.console import Console

    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else _UNLIMITED_COLUMNS
    return Console(
        stderr=stderr,
        soft_wrap=True,
        highlight=False,
        emoji=False,  # `:name:` is a part of a tensor's name; its table takes long to load, too
        color_system=colours,
        width=width,
    )


def print_result(result: object, style: Style, warnings: Sequence[Diagnostic] = ()) -> None:
    """Print warnings to stderr, and with `--json` the result as one JSON document."""
    if not style.quiet:
        for line in warning_lines(warnings):
            print(fitted(line, sys.stderr), file=sys.stderr)
    if style.json:
        from ema_ckpt.ops.results.as_json import as_json

        print(jsonlib.dumps(as_json(result), ensure_ascii=True, allow_nan=False))


def print_written(result: WriteResult, style: Style) -> None:
    """Print the result of a writing verb."""
    print_result(result, style, result.warnings)
    if not style.talks:
        return
    print_changes(result)
    verb = "would write" if result.dry_run else "wrote"
    if result.dry_run or len(result.files) > 1:
        for entry in result.files:
            line = f"{verb} {clean(entry.path)} ({format_size(entry.nbytes)})"
            print(fitted(line, sys.stdout))
    payload = f"{counted(result.tensors, 'tensor')}, {format_size(result.nbytes)}"
    tree = "" if result.tree is None else f" of tree {result.tree!r}"
    line = clean(f"{verb} {payload}{tree} to {result.target} in {result.seconds:.2f} s")
    print(fitted(line, sys.stdout))


def print_changes(result: WriteResult) -> None:
    """Print what was renamed, filled, tied and skipped: the first of each, and a count."""
    ties = [f"tied {dropped} -> {kept}, stored once" for dropped, kept in result.ties.items()]
    filled = [f"filled {name} from the live tree" for name in result.filled]
    skipped = [f"skipped {item.name}: {item.reason}" for item in result.skipped]
    quantized = [f"dequantized {one.name} ({one.scheme})" for one in result.dequantized or ()]
    for lines in (quantized, *_renamed(result), ties, filled, skipped):
        for line in _first(lines):
            print(fitted(clean(line), sys.stdout))


def _renamed(result: WriteResult) -> tuple[list[str], list[str]]:
    """Return what rules changed, and what was renamed beside that, a line each."""
    by_rules: list[str] = []
    told: set[str] = set()
    if result.rules is not None:
        by_rules += rule_lines(result.rules)
        told = {name for change in result.rules.changes for name in change.before}
    renamed = [f"renamed {a} -> {b}" for a, b in result.renamed.items() if a not in told]
    return by_rules, renamed


def rule_lines(rules: AppliedRules) -> Iterator[str]:
    """Yield what became of what by rules; of many names the first and the last."""
    for change in rules.changes:
        yield f"rules {_few(change.before)} -> {_few(change.after)}"


def _few(names: Sequence[str]) -> str:
    if not names:
        return "a constant"
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, … {counted(len(names) - 2, 'name')} …, {names[-1]}"


def warning_lines(warnings: Sequence[Diagnostic]) -> Iterator[str]:
    """Yield the first warnings of each code, and how many more of that code there are."""
    by_code: dict[str, list[str]] = {}
    for warning in warnings:
        line = f"Warning: {clean(warning.message)} [{warning.code}]"
        by_code.setdefault(warning.code, []).append(line)
    for lines in by_code.values():
        yield from _first(lines)


def _first(lines: Sequence[str]) -> list[str]:
    """Return the first lines, the last of them a count if there are more."""
    hidden = len(lines) - _MAX_LINES
    if hidden <= 1:
        return list(lines)
    word = lines[0].partition(" ")[0].replace("Warning:", "warnings")
    return [*lines[:_MAX_LINES], f"… {hidden} more {word}, which --json lists"]


def fitted(line: str, stream: TextIO) -> str:
    """Break a line between words where a terminal would break it anywhere.

    A command in backquotes, which is to be copied, stays on one line.
    """
    if not stream.isatty():
        return line
    from ema_ckpt.cli.name_columns import wrap

    joined = _COMMAND.sub(lambda found: found[0].replace(" ", _JOINT), line)
    return wrap(joined, get_terminal_size().columns).replace(_JOINT, " ")


def print_verified(result: VerifyResult, style: Style) -> None:
    """Print the problems of a checkpoint and the verdict."""
    print_result(result, style, result.warnings)
    if not style.talks:
        return
    for problem in result.problems[:_MAX_PROBLEMS]:
        line = fitted(f"{problem.code}: {clean(problem.message)}", sys.stdout)
        print(_coloured(problem.code, "31") + line.removeprefix(problem.code))
    hidden = len(result.problems) - _MAX_PROBLEMS
    if hidden > 0:
        print(f"… {counted(hidden, 'more problem', 'more problems')}, which --json lists")
    verdict = fitted(f"{result.status}: {clean(_summary(result))}", sys.stdout)
    colour = _VERDICT_COLOURS[result.status]
    print(_coloured(result.status, colour) + verdict.removeprefix(result.status))


def _summary(result: VerifyResult) -> str:
    """Say what was compared, and what was not."""
    from ema_ckpt.ops.results.verify import GateResult

    gate = result if isinstance(result, GateResult) else None
    is_quick = gate is not None and gate.quick
    checked = f"{format_size(result.checked_bytes)} of payload"
    if result.status == "damaged":
        parts = [counted(len(result.problems), "problem")]
        parts += [] if is_quick else [f"{checked} were compared"]
    elif is_quick:
        parts = ["files, sizes, headers and settings are right"]
    else:
        parts = [f"{checked} match their checksums"]
    if result.unchecked_bytes:
        unchecked = format_size(result.unchecked_bytes)
        parts.append(f"{unchecked} of payload not read" if is_quick else f"{unchecked} carry none")
    if gate is not None and gate.manifest is not None:
        parts.append(_told(gate.manifest))
    return "; ".join(parts)


def _told(manifest: ManifestResult) -> str:
    files = counted(manifest.files, "file")
    if manifest.written:
        return f"wrote {manifest.path}, with the digests of {files}"
    left = f", which leaves out {len(manifest.uncovered)}" if manifest.uncovered else ""
    return f"{files} match {manifest.path}{left}"


def _coloured(text: str, colour: str) -> str:
    """Colour text on a terminal; rich would take longer to import than a small check takes."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain or not sys.stdout.isatty() else f"\x1b[{colour}m{text}\x1b[0m"
