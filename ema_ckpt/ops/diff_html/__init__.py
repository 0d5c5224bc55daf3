"""HTML page of a comparison: one file, with nothing loaded from elsewhere.

Charts and table are in the page itself; its only script sorts and filters the table.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from ema_ckpt import __version__
from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.errors import EmaCkptError, TargetError, UsageError
from ema_ckpt.core.names import EMA
from ema_ckpt.core.text import counted
from ema_ckpt.ops.diff_html.charts import (
    MAX_CURVES,
    Curve,
    curves,
    depth_chart,
    histogram,
    line_sample,
)
from ema_ckpt.ops.diff_pairing import Pairing, Side
from ema_ckpt.ops.draft_file import draft_beside
from ema_ckpt.ops.results.diff import DiffResult, DiffTensor
from ema_ckpt.state_dicts.ema_config import read_ema_config
from ema_ckpt.storage.files import local_paths
from ema_ckpt.writing.preflight import check_place, resolve_target

# Nothing may be loaded from anywhere, whatever a tensor is called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_COLUMNS = (
    "rel L2", "max |a−b|", "mean |a−b|", "1 − cosine", "changed", "shape", "elements",
)  # fmt: skip
_PAGE_NAMES = (".html", ".htm")
_PAGE_STARTS = (b"<!doctype html", b"<html")
_NON_FINITE_COLUMNS = ("NaN a", "NaN b", "Inf a", "Inf b")
_SETTINGS = ("num_updates", "decay", "dtype")


def check_page(path: str | os.PathLike[str], sources: Sequence[Catalog]) -> Path:
    """Resolve the path of the page; only nothing, an empty file or a page may be there.

    Raises:
        TargetError: `target-is-source` for a file of `sources`, or a place inside one of them;
            `target-exists` for a file that is no page; `usage` for what is no regular file, and
            where nothing can be written.
        UsageError: `usage` for URLs, the current directory and those above it, and mount points.
    """
    try:
        target = resolve_target(path)
        check_place(target, local_paths(source.resolved for source in sources))
    except (TargetError, UsageError) as error:
        raise type(error)(error.code, f"--html {error}") from None
    if not os.path.lexists(target):
        return target
    status = os.lstat(target)
    if not stat.S_ISREG(status.st_mode):
        message = f"--html {target}: is not a regular file and is never replaced"
        raise TargetError("usage", message)
    for source in sources:
        if any(os.path.samestat(status, file) for file in _local_files(source)):
            message = f"--html {target}: is compared itself; write to another file"
            raise TargetError("target-is-source", message)
    if not _is_page(target, status.st_size):
        # `diff --html old.pt new.pt` takes the first checkpoint for the place of the page.
        message = f"--html {target}: there is a file that is no HTML page; name a new file"
        raise TargetError("target-exists", f"{message}, as in --html report.html")
    return target


def _is_page(file: Path, nbytes: int) -> bool:
    """Whether a file has the name of a page, or is empty, or begins as a page does."""
    if not nbytes or file.suffix.lower() in _PAGE_NAMES:
        return True
    try:
        with open(file, "rb") as opened:
            start = opened.read(64)
    except OSError:  # what cannot be looked at is not replaced
        return False
    return start.lstrip().lower().startswith(_PAGE_STARTS)


def _local_files(source: Catalog) -> Iterator[os.stat_result]:
    for root in local_paths([source.source.root]):
        for name in source.files:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(root, name))


@dataclass(frozen=True, slots=True)
class Sides:
    """What the page tells of the two sides beside the result: shapes by name, settings of EMAs."""

    shapes: Mapping[str, Sequence[int]]
    settings: tuple[str, str]

    @classmethod
    def of(cls, a: Side, b: Side, pairing: Pairing) -> Sides:
        """Describe both sides; settings that cannot be read are left out."""
        shapes = {name: tensor.shape for name, tensor, _ in pairing.pairs}
        return cls(shapes, (_settings_of(a), _settings_of(b)))


def _settings_of(side: Side) -> str:
    """Return counter, decay and dtype of an EMA as text; nothing for another tree."""
    if side.tree.role != EMA:
        return ""
    try:
        config = read_ema_config(side.catalog, side.tree)
    except EmaCkptError:
        return ""
    values = [(name, getattr(config, name)) for name in _SETTINGS]
    return "".join(f", {name} {value}" for name, value in values if value is not None)


def write_page(
    path: str | os.PathLike[str], result: DiffResult, a: Side, b: Side, pairing: Pairing
) -> None:
    """Write the page, replacing one that is there.

    Raises:
        TargetError: `usage` if it cannot be written, and as `check_page`.
    """
    target = check_page(path, (a.catalog, b.catalog))
    text = page(result, Sides.of(a, b, pairing))
    try:
        with draft_beside(target, text.encode()) as draft:
            os.replace(draft, target)
    except OSError as error:
        message = f"--html {target}: cannot be written: {error.strerror}"
        raise TargetError("usage", message) from None


def page(result: DiffResult, sides: Sides) -> str:
    """Return the whole document."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    title = _text(f"{result.tree_a or 'a'} against {result.tree_b or 'b'}")
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>",
        f"<h1>{title}</h1>",
        *summary_section(result, sides),
        *findings_section(result),
        *charts_section(result),
        *unpaired_section(result),
        *table_section(result, sides),
        f'<p class="quiet">ema_ckpt {__version__}, {now}</p>',
        f"</main>\n<script>{script}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _text(text: str) -> str:
    """Escape text for HTML, and everything that is not printable."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return escape(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in safe)
    )


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def summary_section(result: DiffResult, sides: Sides) -> Iterator[str]:
    """Yield the sides and the numbers over all tensors."""
    summary = result.summary
    numel = sum(tensor.numel for tensor in result.tensors)
    a, b = (_text(repr(tree)) for tree in (result.tree_a, result.tree_b))
    of_a, of_b = map(_text, sides.settings)
    yield f'<p class="sides"><b>a</b> tree {a} of {_text(result.resolved_a)}{of_a}<br>'
    yield f"<b>b</b> tree {b} of {_text(result.resolved_b)}{of_b}</p>"
    tiles = (
        ("relative L2", _number(summary.rel_l2 if result.compared else math.nan)),
        ("max |a−b|", _number(summary.max_abs if result.compared else math.nan)),
        ("1 − cosine", _number(1 - summary.cosine if result.compared else math.nan)),
        ("elements changed", f"{summary.changed / numel:.2%}" if numel else "–"),
        ("tensors identical", f"{result.identical} of {result.compared}"),
    )
    yield '<dl class="tiles">'
    for name, value in tiles:
        yield f"<div><dt>{name}</dt><dd>{value}</dd></div>"
    yield "</dl>"


def findings_section(result: DiffResult) -> Iterator[str]:
    """Yield the findings."""
    if not result.findings:
        yield '<p class="quiet">No findings.</p>'
        return
    yield '<ul class="findings">'
    for finding in result.findings:
        kind = "note" if finding.code == "ema-partial" else "warning"
        yield f'<li class="{kind}"><b>{_text(finding.code)}</b> {_text(finding.message)}</li>'
    yield "</ul>"


def charts_section(result: DiffResult) -> Iterator[str]:
    """Yield the histogram and the curves over depth."""
    distribution = histogram(result.tensors)
    if distribution:
        yield "<section><h2>Tensors by relative L2</h2>"
        yield f'<div class="scroll">{distribution}</div></section>'
    yield from _depth_section(curves(result.tensors))


def _depth_section(every: Sequence[Curve]) -> Iterator[str]:
    if not every:
        return
    lines = every[:MAX_CURVES]
    yield f'<section><h2>Over depth</h2>\n<div class="scroll">{depth_chart(lines)}</div>'
    legend = ""
    for number, curve in enumerate(lines):
        legend += f"<li>{line_sample(number)}{_text(curve.label)}</li>"
    yield f'<ul class="legend">{legend}</ul>'
    if len(every) > len(lines):
        kinds = f"{len(lines)} of {len(every)} kinds of tensors are drawn"
        yield f'<p class="quiet">{kinds}: those in most layers that differ most.</p>'
    yield "</section>"


def unpaired_section(result: DiffResult) -> Iterator[str]:
    """Yield the names without a partner of equal shape."""
    shapes = [f"{m.name}: {list(m.a.shape)} and {list(m.b.shape)}" for m in result.mismatched]
    lists = (
        (f"{counted(len(result.only_in_a), 'name')} only in a", result.only_in_a),
        (f"{counted(len(result.only_in_b), 'name')} only in b", result.only_in_b),
        (counted(len(shapes), "shape differs", "shapes differ"), shapes),
    )
    for title, names in lists:
        if names:
            items = "".join(f"<li>{_text(name)}</li>" for name in names)
            yield f"<details><summary>{title}</summary><ul>{items}</ul></details>"


def table_section(result: DiffResult, sides: Sides) -> Iterator[str]:
    """Yield the table of tensors, largest relative L2 first; counts of NaN and Inf if there are."""
    has_non_finite = any(any(_non_finite(tensor)) for tensor in result.tensors)
    columns = [*_COLUMNS, *(_NON_FINITE_COLUMNS if has_non_finite else ())]
    yield "<section><h2>Tensors</h2>"
    field = '<input id="filter" type="search" placeholder="part of a name">'
    yield f'<p><label>Filter {field}</label> <span id="count"></span></p>'
    yield '<div class="scroll"><table id="tensors"><thead><tr>'
    for column, name in enumerate(["tensor", *columns]):
        kind = "text" if name == "tensor" else "number"
        button = f'<button data-column="{column}" data-kind="{kind}">{name}</button>'
        yield f'<th scope="col" aria-sort="none">{button}</th>'
    yield "</tr></thead><tbody>"
    for tensor in sorted(result.tensors, key=_rank, reverse=True):
        yield table_row(tensor, sides.shapes[tensor.name], has_non_finite)
    yield "</tbody></table></div></section>"


def _rank(tensor: DiffTensor) -> float:
    return math.inf if math.isnan(tensor.rel_l2) else tensor.rel_l2


def _non_finite(tensor: DiffTensor) -> tuple[int, int, int, int]:
    return (tensor.nan_a, tensor.nan_b, tensor.inf_a, tensor.inf_b)


def table_row(tensor: DiffTensor, shape: Sequence[int], has_non_finite: bool) -> str:
    """Return the row of one tensor."""
    share = tensor.changed / tensor.numel if tensor.numel else 0.0
    distances = (tensor.rel_l2, tensor.max_abs, tensor.mean_abs, 1 - tensor.cosine)
    numbers: list[tuple[float, str]] = [
        *((value, _number(value)) for value in distances),
        (share, f"{share:.1%}"),
        (len(shape), " × ".join(map(str, shape)) or "scalar"),
        (tensor.numel, f"{tensor.numel:,}"),
    ]
    if has_non_finite:
        numbers += [(count, str(count)) for count in _non_finite(tensor)]
    cells = ""
    for value, text in numbers:
        cells += f'<td data-value="{"" if math.isnan(value) else repr(value)}">{text}</td>'
    name = _text(tensor.name).replace(".", ".<wbr>")  # where a narrow screen may break it
    return f'<tr><th scope="row">{name}</th>{cells}</tr>'
