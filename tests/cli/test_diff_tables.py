"""What `diff` and `verify` print for people: columns that keep their place, colours, counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ema_ckpt.cli.diff_tables import module_table, summary_line, top_lines
from ema_ckpt.cli.output import Style, print_verified
from ema_ckpt.ops.diff import diff
from ema_ckpt.ops.results.diff import DiffResult
from ema_ckpt.ops.verify import verify
from tests.checkpoints import torch_at

MARKUP = re.compile(r"\[/?[a-z ]*\]")


@pytest.fixture
def result(tmp_path: Path) -> DiffResult:
    """Ten layers whose difference grows tenfold each, and one that is equal."""
    names = [f"model.layers.{i}.self_attention.query_projection.weight" for i in range(5)]
    live = {name: torch.ones(8, 8) for name in [*names, "same"]}
    ema = {name: live[name] * (1 + 10.0 ** (i - 5)) for i, name in enumerate(names)}
    path = torch_at(tmp_path / "run.pt", {"model": live, "ema": {**ema, "same": live["same"]}})
    return diff(path)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_modules_have_fixed_columns(result: DiffResult, width: int) -> None:
    head, *rows = [MARKUP.sub("", line) for line in module_table(result, width)]
    assert "bars from 1e-06 to 1, logarithmic" in head
    assert all(len(row) <= width for row in rows)
    starts = {re.search("[█·]", row).start() for row in rows}  # type: ignore[union-attr]
    assert len(starts) == 1
    cells = {row.split()[0]: row.count("█") for row in rows}
    assert cells["same"] == 0
    layers = [row.count("█") for row in rows if "e-0" in row or "0.1" in row]
    assert max(layers) <= 20


@pytest.mark.parametrize("width", [80, 200])
def test_tensors_have_their_name_left_and_no_idle_columns(result: DiffResult, width: int) -> None:
    head, *rows = [MARKUP.sub("", line) for line in top_lines(result.tensors, 4, width)]
    assert head.split()[0] == "tensor"
    assert "NaN" not in head
    assert len(rows) == 4
    assert all(len(row) == len(head) <= width for row in rows)
    assert len({row.split()[0] for row in rows}) == 4
    assert ("…" in "".join(rows)) == (width == 80)
    assert rows[0].split()[1] == "0.1"


def test_columns_of_nan_come_when_there_are_some(tmp_path: Path) -> None:
    live = {"w": torch.ones(3), "v": torch.ones(3)}
    path = torch_at(
        tmp_path / "run.pt", {"model": live, "ema": {**live, "v": live["v"] * torch.nan}}
    )
    head, *rows = [MARKUP.sub("", line) for line in top_lines(diff(path).tensors, 9, 200)]
    assert "NaN, Inf of a" in head
    assert "NaN, Inf of b" not in head
    assert rows[0].split()[0] == "v"


def test_many_problems_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = torch_at(tmp_path / "a.pt", {f"w{i}": torch.ones(2) for i in range(100)})
    b = torch_at(tmp_path / "b.pt", {f"w{i}": torch.zeros(2) for i in range(100)})
    verified = verify(b, against=a)
    assert len(verified.problems) == 100
    print_verified(verified, Style())
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("checksum: ") for line in lines) == 40
    assert lines[-2] == "… 60 more problems, which --json lists"
    assert lines[-1].startswith("damaged: 100 problems;")


@pytest.mark.parametrize(("plain", "shown"), [(False, "\x1b[1;32msound\x1b[0m"), (True, "sound: ")])
def test_the_verdict_is_coloured_on_a_terminal(
    fixtures: Path, tmp_path: Path, plain: bool, shown: str
) -> None:
    import pty

    near, far = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    if plain:
        environment["NO_COLOR"] = "1"
    command = [sys.executable, "-m", "ema_ckpt", "verify", str(fixtures / "tiny-lm")]
    process = subprocess.Popen(command, stdout=far, env=environment)
    os.close(far)
    assert process.wait(timeout=60) == 0
    text = os.read(near, 65536).decode()
    os.close(near)
    assert shown in text
    assert ("\x1b" in text) != plain


def test_nothing_compared_has_no_totals(tmp_path: Path) -> None:
    paths = [torch_at(tmp_path / f"{name}.pt", {name: torch.ones(2)}) for name in ("x", "yy")]
    assert (
        summary_line(diff(*paths))
        == "no tensor compared; 0 shapes differ, 1 name only in a, 1 only in b"
    )
