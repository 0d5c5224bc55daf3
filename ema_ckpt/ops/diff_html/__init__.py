"""HTML page of a comparison: one file, with nothing loaded from elsewhere.

Charts and table are in the page itself; its only script sorts and filters the table.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.errors import TargetError, UsageError
from ema_ckpt.core.text import counted
from ema_ckpt.ops.diff_html.charts import curves, depth_chart, histogram
from ema_ckpt.ops.results.diff import DiffResult, DiffTensor
from ema_ckpt.storage.files import local_paths
from ema_ckpt.writing.preflight import check_place, resolve_target

# Nothing may be loaded from anywhere, whatever a tensor is called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_COLUMNS = (
    ("tensor", "text"),
    ("elements", "number"),
    ("rel L2", "number"),
    ("max |a−b|", "number"),
    ("mean |a−b|", "number"),
    ("1 − cosine", "number"),
    ("changed", "number"),
    ("NaN a", "number"),
    ("NaN b", "number"),
    ("Inf a", "number"),
    ("Inf b", "number"),
)


def check_page(path: str | os.PathLike[str], sources: Sequence[Catalog]) -> Path:
    """Resolve the path of the page; only nothing or a regular file may be there.

    Raises:
        TargetError: `target-is-source` for a file of `sources`, or a place inside one of them;
            `usage` for what is no regular file, and where nothing can be written.
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
    return target


def _local_files(source: Catalog) -> Iterator[os.stat_result]:
    for root in local_paths([source.source.root]):
        for name in source.files:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(root, name))


def write_page(
    path: str | os.PathLike[str], result: DiffResult, sources: Sequence[Catalog]
) -> None:
    """Write the page, replacing one that is there.

    Raises:
        TargetError: `usage` if it cannot be written, and as `check_page`.
    """
    target = check_page(path, sources)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ema-ckpt-page-", dir=target.parent) as folder:
            draft = Path(folder, "page")
            draft.write_text(page(result), encoding="utf-8")
            os.replace(draft, target)
    except OSError as error:
        message = f"--html {target}: cannot be written: {error.strerror}"
        raise TargetError("usage", message) from None


def page(result: DiffResult) -> str:
    """Return the whole document."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    title = _text(f"{result.tree_a or 'a'} against {result.tree_b or 'b'}")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>",
        f"<h1>{title}</h1>",
        *summary_section(result),
        *findings_section(result),
        *charts_section(result),
        *unpaired_section(result),
        *table_section(result),
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


def summary_section(result: DiffResult) -> Iterator[str]:
    """Yield the sides and the numbers over all tensors."""
    summary = result.summary
    numel = sum(tensor.numel for tensor in result.tensors)
    a, b = (_text(repr(tree)) for tree in (result.tree_a, result.tree_b))
    yield f'<p class="sides"><b>a</b> tree {a} of {_text(result.resolved_a)}<br>'
    yield f"<b>b</b> tree {b} of {_text(result.resolved_b)}</p>"
    tiles = (
        ("relative L2", _number(summary.rel_l2)),
        ("max |a−b|", _number(summary.max_abs)),
        ("1 − cosine", _number(1 - summary.cosine)),
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
        yield f"<section><h2>Tensors by relative L2</h2>\n{distribution}</section>"
    lines = curves(result.tensors)
    if lines:
        yield f"<section><h2>Over depth</h2>\n{depth_chart(lines)}"
        legend = ""
        for number, curve in enumerate(lines):
            legend += f'<li><i class="s{number}"></i>{_text(curve.label)}</li>'
        yield f'<ul class="legend">{legend}</ul></section>'


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


def table_section(result: DiffResult) -> Iterator[str]:
    """Yield the table of tensors, largest relative L2 first."""
    yield "<section><h2>Tensors</h2>"
    field = '<input id="filter" type="search" placeholder="part of a name">'
    yield f'<p><label>Filter {field}</label> <span id="count"></span></p>'
    yield '<div class="scroll"><table id="tensors"><thead><tr>'
    for column, (name, kind) in enumerate(_COLUMNS):
        button = f'<button data-column="{column}" data-kind="{kind}">{name}</button>'
        yield f'<th scope="col" aria-sort="none">{button}</th>'
    yield "</tr></thead><tbody>"
    yield from map(
        table_row,
        sorted(
            result.tensors,
            key=lambda t: math.inf if math.isnan(t.rel_l2) else t.rel_l2,
            reverse=True,
        ),
    )
    yield "</tbody></table></div></section>"


def table_row(tensor: DiffTensor) -> str:
    """Return the row of one tensor."""
    share = tensor.changed / tensor.numel if tensor.numel else 0.0
    distances = (tensor.rel_l2, tensor.max_abs, tensor.mean_abs, 1 - tensor.cosine)
    counts = (tensor.nan_a, tensor.nan_b, tensor.inf_a, tensor.inf_b)
    numbers = [
        (tensor.numel, f"{tensor.numel:,}"),
        *((value, _number(value)) for value in distances),
        (share, f"{share:.1%}"),
        *((count, str(count)) for count in counts),
    ]
    cells = ""
    for value, text in numbers:
        cells += f'<td data-value="{"" if math.isnan(value) else repr(value)}">{text}</td>'
    return f'<tr><th scope="row">{_text(tensor.name)}</th>{cells}</tr>'
