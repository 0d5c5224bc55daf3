"""What commands print: one JSON document, or text for people."""

from __future__ import annotations

import contextlib
import json as jsonlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ema_ckpt.cli.text import clean, terminal
from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.core.text import counted, format_size
from ema_ckpt.ops.results import WriteResult, as_json

if TYPE_CHECKING:
    from ema_ckpt.ops.results import InspectResult, VerifyResult

_REDRAW_S = 0.1


class Style(NamedTuple):
    """How to print: `--json`, `--quiet`."""

    json: bool = False
    quiet: bool = False

    @property
    def talks(self) -> bool:
        """Whether text for people is wanted."""
        return not self.json and not self.quiet


def document(value: object) -> None:
    """Print a result as one JSON document."""
    text = jsonlib.dumps(as_json(value), ensure_ascii=True, allow_nan=False)
    print(text)


def _warn(warnings: tuple[Diagnostic, ...], style: Style) -> None:
    if not style.quiet:
        for warning in warnings:
            print(f"Warning: {clean(warning.message)} [{warning.code}]", file=sys.stderr)


def written(result: WriteResult, style: Style) -> None:
    """What a writing verb did."""
    _warn(result.warnings, style)
    if style.json:
        document(result)
    if not style.talks:
        return
    for before, after in list(result.renamed.items())[:10]:
        print(f"renamed {clean(before)} -> {clean(after)}")
    if len(result.renamed) > 10:
        print(f"renamed {len(result.renamed) - 10} more")
    if result.filled:
        names = ", ".join(map(clean, result.filled[:10]))
        print(f"filled {counted(len(result.filled), 'tensor')} from the live tree: {names}")
    for item in result.skipped:
        print(f"skipped {clean(item.name)}: {item.reason}")
    for entry in result.files if result.dry_run or len(result.files) > 1 else ():
        print(
            f"{'would write' if result.dry_run else 'wrote'} {entry.path} ({format_size(entry.nbytes)})"
        )
    what = f"{counted(result.tensors, 'tensor')}, {format_size(result.nbytes)}"
    tree = "" if result.tree is None else f" of tree {result.tree!r}"
    verb = "would write" if result.dry_run else "wrote"
    print(f"{verb} {what}{tree} to {result.target} in {result.seconds:.2f} s")


def inspected(
    result: InspectResult, style: Style, tree: str | None, depth: int | None, shards: bool
) -> None:
    """What a checkpoint holds; on a terminal only of `tree`, where one is named."""
    _warn(result.warnings, style)
    if style.json:
        document(result)
    if style.talks:
        from ema_ckpt.cli.inspect_tables import print_inspected

        print_inspected(result, tree, depth, shards)


def verified(result: VerifyResult, style: Style) -> None:
    """What is wrong with a checkpoint, and what that makes of it."""
    _warn(result.warnings, style)
    if style.json:
        document(result)
    if not style.talks:
        return
    for problem in result.problems:
        print(f"{problem.code}: {clean(problem.message)}")
    checked = f"{format_size(result.checked_bytes)} of payload"
    if result.status == "damaged":
        checked = f"{counted(len(result.problems), 'problem')}; {checked} were compared"
    else:
        checked += " match their checksums"
    bare = f", {format_size(result.unchecked_bytes)} carry none" if result.unchecked_bytes else ""
    print(f"{result.status}: {checked}{bare}")


@contextlib.contextmanager
def progress(style: Style, doing: str = "writing") -> Iterator[Callable[[int], None] | None]:
    """A callback that is told finished bytes and shows them on a terminal; None elsewhere."""
    if not style.talks or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import FileSizeColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), FileSizeColumn(), TransferSpeedColumn())
    # Without a thread that redraws: a process that has one cannot be copied safely.
    with Progress(
        *columns, console=terminal(stderr=True), transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task(doing, total=None)
        drawn = 0.0

        def advance(nbytes: int) -> None:
            nonlocal drawn
            bar.advance(task, nbytes)
            if time.monotonic() - drawn >= _REDRAW_S:
                drawn = time.monotonic()
                bar.refresh()

        yield advance
