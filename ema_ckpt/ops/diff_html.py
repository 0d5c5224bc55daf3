"""A comparison as one HTML page that needs nothing else: no network, no fonts, no other files.

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
from ema_ckpt.ops.diff_html_charts import Curve, curves, depth_chart, histogram
from ema_ckpt.ops.results import DiffResult, DiffTensor
from ema_ckpt.storage.files import local_path
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
    """Where a page called `path` will lie, symbolic links followed: there is nothing, or a regular
    file.

    Raises:
        TargetError: `target-is-source` for a file of `sources`, or a place inside one of them;
            `not-found` without a parent directory; `usage` for what is no regular file, and where
            nothing can be written.
        UsageError: `usage` for URLs, the current directory and those above it, and mount points.
    """
    try:
        target = resolve_target(path)
        check_place(
            target,
            [place for source in sources if (place := local_path(source.resolved)) is not None],
        )
    except (TargetError, UsageError) as error:
        raise type(error)(error.code, f"--html {error}") from None
    if os.path.lexists(target):
        status = os.lstat(target)
        if not stat.S_ISREG(status.st_mode):
            raise TargetError(
                "usage", f"--html {target}: is not a regular file and is never replaced"
            )
        if any(os.path.samestat(status, own) for source in sources for own in _files(source)):
            raise TargetError(
                "target-is-source", f"--html {target}: is compared itself; write to another file"
            )
    return target


def _files(source: Catalog) -> Iterator[os.stat_result]:
    """The files of a checkpoint that lie on this machine."""
    root = local_path(source.source.root)
    if root is not None:
        for name in source.files:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(root, name))


def write_page(
    path: str | os.PathLike[str], result: DiffResult, sources: Sequence[Catalog]
) -> None:
    """Write the page to the file `path`, replacing one that is there.

    Raises:
        TargetError: `usage` if it cannot be written, and what `check_page` raises.
    """
    target = check_page(path, sources)
    try:
        with tempfile.TemporaryDirectory(prefix=".ema-ckpt-page-", dir=target.parent) as folder:
            draft = Path(folder, "page")
            draft.write_text(page(result), encoding="utf-8")
            os.replace(draft, target)
    except OSError as error:
        raise TargetError(
            "usage", f"--html {target}: cannot be written: {error.strerror}"
        ) from None


def page(result: DiffResult) -> str:
    """The whole document."""
    found = curves(result.tensors)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(_title(result))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
        *_head(result),
        *_findings(result),
        *_charts(result, found),
        *_one_sided(result),
        *_table(result),
        f"</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _text(text: str) -> str:
    """Text for HTML; what cannot be printed is written as an escape."""
    shown = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return escape(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    )


def _title(result: DiffResult) -> str:
    return f"{result.tree_a or 'a'} against {result.tree_b or 'b'}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _head(result: DiffResult) -> Iterator[str]:
    summary = result.summary
    numel = sum(tensor.numel for tensor in result.tensors)
    yield f"<h1>{_text(_title(result))}</h1>"
    yield f'<p class="sides"><b>a</b> tree {_text(repr(result.tree_a))} of {_text(result.a)}<br>'
    yield f"<b>b</b> tree {_text(repr(result.tree_b))} of {_text(result.b)}</p>"
    tiles = (
        ("relative L2", _number(summary.rel_l2)),
        ("max |a−b|", _number(summary.max_abs)),
        ("1 − cosine", _number(1 - summary.cosine)),
        ("elements changed", f"{summary.changed / numel:.2%}" if numel else "–"),
        ("tensors identical", f"{result.identical} of {result.compared}"),
    )
    yield '<dl class="tiles">'
    yield from (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
    yield "</dl>"


def _findings(result: DiffResult) -> Iterator[str]:
    if not result.findings:
        yield '<p class="quiet">No findings.</p>'
        return
    yield '<ul class="findings">'
    for finding in result.findings:
        kind = "note" if finding.code == "ema-partial" else "warning"
        yield f'<li class="{kind}"><b>{_text(finding.code)}</b> {_text(finding.message)}</li>'
    yield "</ul>"


def _charts(result: DiffResult, found: tuple[Curve, ...]) -> Iterator[str]:
    spread = histogram(result.tensors)
    if spread:
        yield f"<section><h2>Tensors by relative L2</h2>\n{spread}</section>"
    if found:
        yield f"<section><h2>Over depth</h2>\n{depth_chart(found)}"
        items = (
            f'<li><i class="s{number}"></i>{_text(curve.label)}</li>'
            for number, curve in enumerate(found)
        )
        yield f'<ul class="legend">{"".join(items)}</ul></section>'


def _one_sided(result: DiffResult) -> Iterator[str]:
    lists = [
        (f"{counted(len(names), 'name')} only in {side}", names)
        for side, names in (("a", result.only_in_a), ("b", result.only_in_b))
    ]
    shapes = tuple(f"{m.name}: {list(m.a.shape)} and {list(m.b.shape)}" for m in result.mismatched)
    for title, names in (*lists, (counted(len(shapes), "shape differs", "shapes differ"), shapes)):
        if names:
            items = "".join(f"<li>{_text(name)}</li>" for name in names)
            yield f"<details><summary>{title}</summary><ul>{items}</ul></details>"


def _table(result: DiffResult) -> Iterator[str]:
    yield "<section><h2>Tensors</h2>"
    field = '<input id="filter" type="search" placeholder="part of a name">'
    yield f'<p><label>Filter {field}</label> <span id="count"></span></p>'
    yield '<div class="scroll"><table id="tensors"><thead><tr>'
    for at, (name, kind) in enumerate(_COLUMNS):
        yield f'<th scope="col" aria-sort="none"><button data-column="{at}" data-kind="{kind}">{name}</button></th>'
    yield "</tr></thead><tbody>"
    ranked = sorted(
        result.tensors, key=lambda t: math.inf if math.isnan(t.rel_l2) else t.rel_l2, reverse=True
    )
    yield from map(_row, ranked)
    yield "</tbody></table></div></section>"


def _row(tensor: DiffTensor) -> str:
    share = tensor.changed / tensor.numel if tensor.numel else 0.0
    numbers = (
        (tensor.numel, f"{tensor.numel:,}"),
        (tensor.rel_l2, _number(tensor.rel_l2)),
        (tensor.max_abs, _number(tensor.max_abs)),
        (tensor.mean_abs, _number(tensor.mean_abs)),
        (1 - tensor.cosine, _number(1 - tensor.cosine)),
        (share, f"{share:.1%}"),
        *(
            (count, str(count))
            for count in (tensor.nan_a, tensor.nan_b, tensor.inf_a, tensor.inf_b)
        ),
    )
    cells = "".join(
        f'<td data-value="{"" if math.isnan(v) else repr(v)}">{text}</td>' for v, text in numbers
    )
    return f'<tr><th scope="row">{_text(tensor.name)}</th>{cells}</tr>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --soft: #5d6b7a; --line: #d9dfe6; --paper: #fff; --fill: #f4f6f8;
  --bar: #3b6fb6; --warn: #a94f00; --warn-fill: #fff4e5;
  --s0: #3b6fb6; --s1: #c8553d; --s2: #2f8f6b; --s3: #8a5bb5;
  --s4: #b8860b; --s5: #4aa3a2; --s6: #b0457a; --s7: #6b7a8a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa8b6; --line: #36414d; --paper: #14191f;
  --fill: #1d242c; --bar: #6ea0e0; --warn: #ffb366; --warn-fill: #33261a;
  --s0: #6ea0e0; --s1: #ee8c76; --s2: #5cc39c; --s3: #b993e0;
  --s4: #dcb347; --s5: #78c9c8; --s6: #e07fae; --s7: #a1afbd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
.sides { color: var(--soft); margin: 0 0 16px; overflow-wrap: anywhere; } .quiet { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 0 0 16px; }
.tiles div { background: var(--fill); border-radius: 8px; padding: 10px 14px; min-width: 130px; }
.tiles dt { color: var(--soft); font-size: 13px; } .tiles dd { margin: 0; font-size: 20px; font-weight: 600; }
.findings { list-style: none; padding: 0; margin: 0; }
.findings li { border-left: 4px solid var(--soft); background: var(--fill); padding: 8px 12px; margin: 0 0 8px;
  border-radius: 0 6px 6px 0; overflow-wrap: anywhere; }
.findings .warning { border-color: var(--warn); background: var(--warn-fill); }
.findings .warning b { color: var(--warn); }
svg { width: 100%; height: auto; display: block; } .grid { stroke: var(--line); } .bar { fill: var(--bar); }
.tick, .axis { fill: var(--soft); font-size: 12px; } .line { fill: none; stroke-width: 2; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); } .s7 { --c: var(--s7); }
.line { stroke: var(--c); } .dot { fill: var(--c); } .bar:hover, .dot:hover { opacity: .7; }
.legend { list-style: none; padding: 0; margin: 8px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px;
  font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; background: var(--c);
  margin-right: 6px; vertical-align: -1px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
tbody th, thead th:first-child { text-align: left; font-weight: 400; }
tbody th { font-family: ui-monospace, monospace; }
thead th { position: sticky; top: 0; background: var(--paper); }
th button { all: unset; cursor: pointer; font-weight: 600; color: var(--soft); }
th button:focus-visible { outline: 2px solid var(--bar); }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
input { font: inherit; padding: 4px 8px; border: 1px solid var(--line); border-radius: 6px; background: var(--paper);
  color: var(--ink); min-width: 260px; }
#count { color: var(--soft); margin-left: 8px; } details { margin: 8px 0; overflow-wrap: anywhere; }
"""

_SCRIPT = """
const body = document.querySelector("#tensors tbody"), rows = [...body.rows];
const heads = [...document.querySelectorAll("#tensors thead th")];
const filter = document.querySelector("#filter"), count = document.querySelector("#count");
function key(row, column, kind) {
  const cell = row.cells[column];
  if (kind === "text") return cell.textContent;
  return cell.dataset.value === "" ? Infinity : Number(cell.dataset.value);
}
function sort(column, kind) {
  const head = heads[column], down = head.getAttribute("aria-sort") !== "descending" && kind !== "text"
    || head.getAttribute("aria-sort") === "ascending";
  heads.forEach(h => h.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const keyed = rows.map(row => [key(row, column, kind), row]);
  keyed.sort((p, q) => (p[0] < q[0] ? -1 : p[0] > q[0] ? 1 : 0) * (down ? -1 : 1));
  body.append(...keyed.map(pair => pair[1]));
}
function show() {
  const text = filter.value.toLowerCase();
  let shown = 0;
  for (const row of rows) { row.hidden = !row.cells[0].textContent.toLowerCase().includes(text); shown += !row.hidden; }
  count.textContent = shown + " of " + rows.length;
}
for (const button of document.querySelectorAll("#tensors button"))
  button.addEventListener("click", () => sort(Number(button.dataset.column), button.dataset.kind));
filter.addEventListener("input", show);
heads[2].setAttribute("aria-sort", "descending");
show();
"""
