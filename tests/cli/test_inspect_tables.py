"""What commands print for people: tables, and the lines around them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from ema_ckpt.cli.diff_tables import print_diff
from ema_ckpt.cli.inspect_tables import print_inspected
from ema_ckpt.cli.name_columns import elide
from ema_ckpt.cli.object_lines import object_lines, value_text
from ema_ckpt.cli.output import Style, print_verified, print_written
from ema_ckpt.ops.consolidate import consolidate
from ema_ckpt.ops.diff import diff
from ema_ckpt.ops.inspect import inspect_with_values
from ema_ckpt.ops.verify import verify
from tests.checkpoints import ema, torch_at, weights

STATE = {
    "model": {**weights(), "note": "live"},
    "ema": ema(),
    "app": {"optim": {"state": {"w": torch.ones(2)}}, "extra": {"seen": 7}},
    "step": 3,
}


CONFIG = f"ema: config {value_text(STATE['ema']['config'])}"  # type: ignore[index]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return torch_at(tmp_path / "run.pt", STATE)


def drawn(capsys: pytest.CaptureFixture[str], path: Path, tree: str | None = None) -> list[str]:
    """The lines that `inspect` prints, without the one that names the checkpoint."""
    result, values = inspect_with_values(path, tree, (), 100)
    print_inspected(result, tree, 2, False, values)
    return capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize(
    ("tree", "rows", "objects"),
    [
        (
            None,
            ["'model'", "'ema'", "'app.optim'", "'app.extra'", "''"],
            ["model: note 'live'", CONFIG, "app.extra: seen 7", "step 3"],
        ),
        ("model", ["'model'"], ["model: note 'live'"]),
        ("ema", ["'ema'"], [CONFIG]),
        ("optim", ["'app.optim'"], []),
        ("app.extra", ["'app.extra'"], ["app.extra: seen 7"]),
        ("app", ["'app.optim'", "'app.extra'"], ["app.extra: seen 7"]),
        ("", ["''"], ["step 3"]),
        ("model.layer", ["'model.layer'"], []),
        ("ema.weights", ["'ema.weights'"], []),
    ],
)
def test_a_tree_is_drawn_alone(
    capsys: pytest.CaptureFixture[str],
    run: Path,
    tree: str | None,
    rows: list[str],
    objects: list[str],
) -> None:
    lines = drawn(capsys, run, tree)
    assert lines[0].split() == ["tree", "role", "tensors", "elements", "bytes", "dtypes"]
    assert [line.split()[0] for line in lines[1 : 1 + len(rows)]] == rows
    shown = lines[lines.index("objects") + 1 :] if objects else []
    assert [line.strip() for line in shown] == objects
    assert ("objects" in lines) == bool(objects)
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
        ({"kind": "constant", "decay": 0.9}, "constant"),
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


def test_colons_in_names_make_no_emoji(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"a:dog:b": {"w": torch.ones(2)}, "x:cat:y": {"w": torch.ones(2)}}
    lines = drawn(capsys, torch_at(tmp_path / "run.pt", state))
    assert "a:dog:b" in "".join(lines) and "x:cat:y" in "".join(lines)


def test_counters_stand_apart_from_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "model": {"logit_scale": torch.tensor(1.0), "bn.num_batches_tracked": torch.tensor(3)},
        "ema": {"weights": {"logit_scale": torch.tensor(1.0)}, "num_updates": torch.tensor(7)},
        "optimizer": {"state": {i: {"step": torch.tensor(1.0)} for i in range(3)}},
    }
    lines = drawn(capsys, torch_at(tmp_path / "run.pt", state))
    assert [line.strip("│├└─ ") for line in lines if "counters" in line] == [
        "counters: bn.num_batches_tracked",
        "counters: num_updates",
        "counters: 3 × step",
    ]
    assert sum("logit_scale float32 scalar, 4 B" in line for line in lines) == 2


def test_shapes_of_many_tensors_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {f"m.layers.{i}.{name}": torch.ones(3, i // 4 + 1) for i in range(24) for name in "ab"}
    lines = drawn(capsys, torch_at(tmp_path / "run.pt", {"model": model}))
    (line,) = [line for line in lines if "layers" in line]
    assert line.endswith(
        "48 tensors, 2.02 kB: 8 of 3×1, 8 of 3×2, 8 of 3×3, 8 of 3×4, 16 of other shapes"
    )


def test_objects_are_folded_by_container() -> None:
    names = [f"opt.param_groups.{i}.{key}" for i in range(30) for key in ("lr", "betas", "params")]
    values = {
        name: {"lr": 0.001, "betas": (0.9, 0.999)}.get(name.rpartition(".")[2], list(range(99)))
        for name in names
    }
    lines = list(object_lines([*names, "x\x1b"], values))
    assert lines[0] == (
        "opt.param_groups.0: lr 0.001, betas (0.9, 0.999), params [0, 1, 2, 3, 4, 5, … 99 in all]"
    )
    assert lines[-1] == "… and 31 objects more, which --json names"
    assert len(lines) == 21


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1,), "(1,)"),
        ([], "[]"),
        ({"a": [1, 2]}, "{'a': [1, 2]}"),
        ("\x1b[31m", "'\\x1b[31m'"),
        ("x" * 1000, "'" + "x" * 23 + "…" + "x" * 11 + "' (1,002 characters)"),
        (["a" * 40, "b" * 40, "c"], "['" + "a" * 40 + "', … 3 in all]"),
    ],
)
def test_values_are_short(value: object, text: str) -> None:
    assert value_text(value) == text


def test_objects_behind_a_url_are_named_and_not_read(
    fixtures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, values = inspect_with_values(f"file://{fixtures / 'tiny-lm'}", None, (), 100)
    assert values == {}
    print_inspected(result, None, 2, False, values)
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("objects (values are not read from a URL)") + 1] == "  ema: config"


@pytest.mark.parametrize(
    ("names", "width"),
    [
        ([f"model.layers.{i}.self_attn.q_proj.weight" for i in range(40)], 24),
        ([f"model.layers.0.experts.{i}.w1.weight" for i in range(40)], 20),
        ([f"{c}.a.very.long.name.with.the.same.end" for c in "abc"], 20),
        ([f"the.same.start.and.middle.of.a.name.{c}" for c in "abc"], 20),
        (["short", "other"], 20),
    ],
)
def test_elided_names_never_look_alike(names: list[str], width: int) -> None:
    cut = elide(names, width)
    assert len(set(cut)) == len(names)
    assert all(len(name) <= width for name in cut)
    for name, full in zip(cut, names, strict=True):
        head, _, tail = name.partition("…")
        assert full.startswith(head)
        assert full.endswith(tail)


def test_names_are_cut_between_components_where_that_tells_them_apart() -> None:
    names = [
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.10.mlp.gate_proj.weight",
        "head.weight",
    ]
    assert elide(names, 31) == [
        "…layers.1.mlp.gate_proj.weight",
        "…layers.10.mlp.gate_proj.weight",
        "head.weight",
    ]
    assert elide(["model.a.layers.1.weight", "lm.b.layers.2.weight"], 15) == [
        "model.…1.weight",
        "lm.b.…2.weight",
    ]
    assert elide(["left.layers.1.weight", "right.layers.1.weight"], 12) == [
        "left….weight",
        "righ….weight",
    ]


def test_names_that_no_width_tells_apart_are_whole() -> None:
    names = [f"{'a' * 30}{c}{'b' * 30}" for c in "xyz"]
    assert elide(names, 20) == names


def test_long_names_of_trees_are_folded_not_cut(tmp_path: Path) -> None:
    from rich.console import Console

    from ema_ckpt.cli.inspect_tables import tree_table

    names = [f"{'a_long_prefix_' * 6}{i}" for i in range(2)]
    path = torch_at(tmp_path / "run.pt", {name: {"w": torch.ones(2)} for name in names})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(tree_table(inspect_with_values(path, None, (), 0)[0]))
    shown = console.export_text()
    assert "…" not in shown
    first = "".join(line[:40].split(" ")[0] for line in shown.splitlines()[1:])
    assert all(repr(name) in first for name in names)


def test_a_name_of_thousands_of_parts_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [".".join("a" * parts) for parts in (1, 3, 1200, 5000)]
    path = torch_at(tmp_path / "deep.pt", {f"{name}.w": torch.ones(1) for name in names})
    result, values = inspect_with_values(path, None, (), 100)
    print_inspected(result, None, 3000, False, values)
    assert "4 tensors" in capsys.readouterr().out
