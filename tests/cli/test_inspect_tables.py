"""What commands print for people: tables, and the lines around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ema_ckpt.cli.diff_tables import print_diff
from ema_ckpt.cli.inspect_tables import print_inspected
from ema_ckpt.cli.output import Style, print_verified, print_written
from ema_ckpt.ops.consolidate import consolidate
from ema_ckpt.ops.diff import diff
from ema_ckpt.ops.inspect import inspect
from ema_ckpt.ops.verify import verify
from tests.checkpoints import ema, torch_at, weights

STATE = {
    "model": {**weights(), "note": "live"},
    "ema": ema(),
    "app": {"optim": {"state": {"w": torch.ones(2)}}, "extra": {"seen": 7}},
    "step": 3,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return torch_at(tmp_path / "run.pt", STATE)


def drawn(capsys: pytest.CaptureFixture[str], path: Path, tree: str | None = None) -> list[str]:
    """The lines that `inspect` prints, without the one that names the checkpoint."""
    print_inspected(inspect(path, tree), tree, 2, False)
    return capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize(
    ("tree", "rows", "objects"),
    [
        (
            None,
            ["'model'", "'ema'", "'app.optim'", "'app.extra'", "''"],
            "objects: model.note, ema.config, app.extra.seen, step",
        ),
        ("model", ["'model'"], "objects: model.note"),
        ("ema", ["'ema'"], "objects: ema.config"),
        ("optim", ["'app.optim'"], None),
        ("app.extra", ["'app.extra'"], "objects: app.extra.seen"),
        ("app", ["'app.optim'", "'app.extra'"], "objects: app.extra.seen"),
        ("", ["''"], "objects: step"),
        ("model.layer", ["'model.layer'"], None),
        ("ema.weights", ["'ema.weights'"], None),
    ],
)
def test_a_tree_is_drawn_alone(
    capsys: pytest.CaptureFixture[str],
    run: Path,
    tree: str | None,
    rows: list[str],
    objects: str | None,
) -> None:
    lines = drawn(capsys, run, tree)
    assert lines[0].split() == ["tree", "role", "tensors", "elements", "bytes", "dtypes"]
    assert [line.split()[0] for line in lines[1 : 1 + len(rows)]] == rows
    assert [line for line in lines if line.startswith("objects")] == (
        [] if objects is None else [objects]
    )
    assert any(line.startswith("EMA 'ema'") for line in lines) == (
        tree in (None, "ema", "ema.weights")
    )
    assert not any(line.startswith("'") for line in lines[1 + len(rows) :])


def test_a_path_below_a_tree_has_totals_of_its_own(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    assert drawn(capsys, run, "model.layer")[1].split() == [
        "'model.layer'",
        "live",
        "1",
        "6",
        "24",
        "B",
        "float32",
        "×",
        "1",
    ]


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (
            {"kind": "warmup", "decay": 0.9999, "inv_gamma": 1.0, "power": 2 / 3},
            "Warmup(decay=0.9999, inv_gamma=1.0, power=0.6667)",
        ),
        ({"kind": "constant", "decay": 0.99999987}, "Constant(decay=0.99999987)"),
        ({"kind": "half-life", "n": 2000, "unit": "samples"}, "HalfLife(n=2000, unit='samples')"),
        ({"kind": "power-function", "sigma_rel": 0.05}, "PowerFunction(sigma_rel=0.05)"),
        ({"kind": ["odd\x1b"], "n": float("nan")}, "['odd\\x1b'](n=nan)"),
        ({"decay": 0.0}, "Schedule(decay=0.0)"),
        ("cosine", "cosine"),
        (0.5, "0.5"),
    ],
)
def test_a_schedule_reads_like_a_call(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, schedule: object, text: str
) -> None:
    config = json.dumps({"version": 1, "decay": 0.9, "schedule": schedule})
    path = torch_at(tmp_path / "run.pt", {"ema": {**ema(), "config": config}})
    (line,) = [line for line in drawn(capsys, path) if line.startswith("EMA")]
    assert f", schedule {text}, dtype float32" in line


def test_one_of_a_kind_is_no_plural(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = torch_at(tmp_path / "run.pt", {"w": torch.ones(1)})
    print_written(consolidate(path, tmp_path / "out.pt"), Style())
    (path.parent / "out.pt").write_bytes(b"PK")
    print_verified(verify(path.parent / "out.pt"), Style())
    print_diff(diff(path, path), 3)
    printed = capsys.readouterr().out
    assert "wrote 1 tensor, 4 B" in printed
    assert "damaged: 1 problem;" in printed
    assert "1 tensor compared, 1 identical" in printed
    assert "0 of 1 element changed" in printed


def test_shapes_are_shown_without_shards(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join(drawn(capsys, run, "model"))
    assert "b float32 2, 8 B" in lines
    assert "w float32 2 × 3, 24 B" in lines
