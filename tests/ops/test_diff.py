"""diff: numbers against torch in float64, findings from real runs, any layout against any layout."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ema_ckpt
from ema_ckpt import UsageError, diff, save
from ema_ckpt.ema.manager import ShardedEMA
from tests.checkpoints import save_dcp

REPO = Path(__file__).parents[2]


def codes(result) -> list[str]:
    return [finding.code for finding in result.findings]


def train(
    *,
    updates: int = 20,
    dtype: torch.dtype = torch.float32,
    seed_again: bool = False,
    poison: bool = False,
) -> dict[str, object]:
    """A real run on a small network; its model and EMA as they would be saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    ema = ShardedEMA(model, decay=0.9, dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(20):
        loss = (model(torch.randn(32, 8)) - torch.ones(32, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < updates:
            ema.update()
    if seed_again:  # what a resume does that restores the model and makes a new EMA of it
        ema = ShardedEMA(model, decay=0.9)
        ema.update()
    if poison:
        with torch.no_grad():
            next(model.parameters())[0, 0] = math.nan
    return {"model": model.state_dict(), "ema": ema.state_dict()}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run, saved."""
    return save_dcp(tmp_path_factory.mktemp("runs") / "healthy", train())


# ---------------------------------------------------------------- numbers


def oracle(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    x, y = a.to(torch.float64).reshape(-1), b.to(torch.float64).reshape(-1)
    d = x - y
    return {
        "rel_l2": float(d.norm() / y.norm()) if d.any() else 0.0,
        "max_abs": float(d.abs().max()),
        "mean_abs": float(d.abs().mean()),
        "cosine": float(x @ y / (x.norm() * y.norm())) if x.any() or y.any() else 1.0,
        "changed": int((x != y).sum()),
    }


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2-w1",
        "fsdp2-w4",
        "fsdp2-w8",
        "fsdp2-tp-2x2",
        "fsdp2-tp-2x2-uneven",
        "hsdp-2x2",
        "shard1-w4",
        "fsdp1-w4",
        "no-collectives-w2",
    ],
)
def test_every_layout_gives_the_numbers_of_torch(name: str, fixtures: Path) -> None:
    with ema_ckpt.open(fixtures / "dcp" / name) as ckpt:
        averages, live = ckpt.state_dict("ema"), ckpt.state_dict("model")
    result = diff(fixtures / "dcp" / name)
    assert (result.tree_a, result.tree_b) == ("ema", "model")
    assert result.compared == len(result.tensors) > 0
    for entry in result.tensors:
        expected = oracle(averages[entry.name], live[entry.name])
        for key, value in expected.items():
            assert getattr(entry, key) == pytest.approx(value, rel=1e-12), (entry.name, key)
    names = [entry.name for entry in result.tensors]
    whole = oracle(
        *(torch.cat([side[n].double().reshape(-1) for n in names]) for side in (averages, live))
    )
    assert result.summary.rel_l2 == pytest.approx(whole["rel_l2"], rel=1e-12)
    assert result.summary.cosine == pytest.approx(whole["cosine"], rel=1e-12)
    assert result.summary.max_abs == pytest.approx(whole["max_abs"], rel=1e-12)
    assert result.summary.changed == whole["changed"]


def test_numbers_of_a_trained_language_model(fixtures: Path) -> None:
    with ema_ckpt.open(fixtures / "tiny-lm") as ckpt:
        averages, live = ckpt.state_dict("ema"), ckpt.state_dict("model")
    result = diff(fixtures / "tiny-lm", threads=1)
    for entry in result.tensors:
        for key, value in oracle(averages[entry.name], live[entry.name]).items():
            assert getattr(entry, key) == pytest.approx(value, rel=1e-12)
    assert result == diff(fixtures / "tiny-lm", threads=3, max_memory="4MiB")
    assert result.findings == ()


def test_layouts_and_formats_against_each_other(fixtures: Path, tmp_path: Path) -> None:
    """The same averages in rows, a grid, a file and shards: nothing differs, whatever is compared with what."""
    source = fixtures / "dcp" / "fsdp2-w4"
    ema_ckpt.consolidate(source, tmp_path / "a.safetensors")
    ema_ckpt.consolidate(source, tmp_path / "b.pt")
    ema_ckpt.consolidate(source, tmp_path / "hf", max_shard_size=300)
    ema_ckpt.reshard(source, tmp_path / "three", world_size=3)
    places = [
        source,
        tmp_path / "a.safetensors",
        tmp_path / "b.pt",
        tmp_path / "hf",
        tmp_path / "three",
    ]
    for a in places:
        for b in places:
            result = diff(a, b)
            assert result.compared == result.identical == 5
            assert not result.differs
            assert codes(result) == []
            assert (result.summary.rel_l2, result.summary.cosine) == (0.0, 1.0)


def test_statistics_for_tables_are_no_part_of_the_json(fixtures: Path) -> None:
    result = diff(fixtures / "tiny-lm")
    assert set(result.pair_stats) == {tensor.name for tensor in result.tensors}
    assert "pair_stats" not in dataclasses.asdict(result)
    assert "pair_stats" not in repr(result)


def test_dtypes_may_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    w = torch.randn(300, 7)
    save_file({"w": w}, tmp_path / "a.safetensors")
    save_file({"w": w.bfloat16()}, tmp_path / "b.safetensors")
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (result.mismatched, result.compared) == ((), 1)
    assert result.tensors[0].rel_l2 == pytest.approx(oracle(w, w.bfloat16())["rel_l2"], rel=1e-12)


def test_all_dtypes_from_files(fixtures: Path) -> None:
    path = fixtures / "dcp" / "dtypes-w2"
    result = diff(path, path)
    assert result.compared == result.identical > 15
    mixed = diff(path, fixtures / "safetensors" / "dtypes.safetensors")
    assert {entry.name for entry in mixed.tensors if entry.changed} == set()


def test_strided_and_odd_shapes(fixtures: Path) -> None:
    for name in ("dcp/strided-w1", "dcp/strided-w2", "odd/odd-shapes", "torch/views.pt"):
        with ema_ckpt.open(fixtures / name) as ckpt:
            tree = next(iter(ckpt.trees))
        result = diff(fixtures / name, fixtures / name, tree, tree)
        assert result.identical == result.compared > 0
        assert not result.differs


def test_undefined_is_null(tmp_path: Path) -> None:
    a = {
        "nan": torch.tensor([1.0, math.nan]),
        "same": torch.tensor([math.nan, 2.0]),
        "zero": torch.zeros(3),
        "half": torch.ones(2),
        "none": torch.zeros(0, 4),
    }
    b = {
        "nan": torch.tensor([1.0, 2.0]),
        "same": torch.tensor([math.nan, 2.0]),
        "zero": torch.zeros(3),
        "half": torch.zeros(2),
        "none": torch.zeros(0, 4),
    }
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    ended = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    document = json.loads(ended.stdout, parse_constant=pytest.fail)
    by_name = {entry["name"]: entry for entry in document["tensors"]}
    picked = {
        name: tuple(entry[k] for k in ("rel_l2", "cosine", "max_abs", "changed"))
        for name, entry in by_name.items()
    }
    assert picked == {
        "nan": (None, None, None, 1),
        "same": (0.0, 1.0, 0.0, 0),
        "zero": (0.0, 1.0, 0.0, 0),
        "half": (None, None, 1.0, 2),
        "none": (0.0, 1.0, 0.0, 0),
    }
    assert document["summary"]["rel_l2"] is None
    assert [f["code"] for f in document["findings"]] == ["non-finite", "non-finite"]


# ---------------------------------------------------------------- pairing


def test_names_on_one_side_and_other_shapes(tmp_path: Path) -> None:
    save_file(
        {"x": torch.ones(2), "y": torch.ones(3), "z": torch.ones(2, 2)}, tmp_path / "a.safetensors"
    )
    save_file(
        {"x": torch.ones(2), "z": torch.ones(4), "w": torch.ones(1)}, tmp_path / "b.safetensors"
    )
    result = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (result.only_in_a, result.only_in_b) == (("y",), ("w",))
    (found,) = result.mismatched
    assert (found.name, found.a.shape, found.b.shape, found.a.dtype) == (
        "z",
        (2, 2),
        (4,),
        "float32",
    )
    assert (result.compared, result.identical, result.differs) == (1, 1, True)
    assert codes(result) == ["keys-differ"]


def test_equal_values_of_other_bits_or_types_are_told(tmp_path: Path) -> None:
    nan = torch.tensor([0x7FC00000], dtype=torch.int32)
    a = {
        "same": torch.ones(2),
        "zero": torch.tensor([0.0]),
        "nan": nan.view(torch.float32),
        "wide": torch.ones(3),
        "none": torch.ones(0),
        "truth": torch.tensor([1], dtype=torch.uint8).view(torch.bool),
    }
    b = {
        "same": torch.ones(2),
        "zero": torch.tensor([-0.0]),
        "nan": (nan + 1).view(torch.float32),
        "wide": torch.ones(3, dtype=torch.float64),
        "none": torch.ones(0, dtype=torch.int64),
        "truth": torch.tensor([2], dtype=torch.uint8).view(torch.bool),
    }
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    for state, path in zip((a, b), paths, strict=True):
        torch.save(state, path)
    found = diff(*paths)
    assert (found.identical, found.same_bits, found.summary.changed) == (6, 1, 0)
    printed = run(*paths).stdout
    assert "6 tensors compared, 6 identical in value, 5 of them not in bits or dtype" in printed
    assert json.loads(run(*paths, "--json").stdout)["same_bits"] == 1
    assert diff(paths[0], paths[0]).same_bits is None


def test_generator_is_paired_with_its_own_average(tmp_path: Path) -> None:
    state = {
        name: {"w": torch.full((2,), value)}
        for name, value in (("generator", 1.0), ("generator_ema", 2.0), ("critic", 5.0))
    }
    path = save_dcp(tmp_path / "c", state)
    result = diff(path)
    assert (result.tree_a, result.tree_b) == ("generator_ema", "generator")
    assert result.tensors[0].rel_l2 == 1.0
    other = diff(path, tree="generator_ema", against="critic")
    assert (other.tree_b, other.tensors[0].max_abs) == ("critic", 3.0)


def test_wrapper_prefixes_do_not_part_names(tmp_path: Path) -> None:
    plain = {"layer.weight": torch.ones(3)}
    state = {
        "model": {"_orig_mod.module.layer.weight": torch.ones(3)},
        "ema": {"weights": plain, "num_updates": torch.tensor(3)},
    }
    result = diff(save_dcp(tmp_path / "c", state))
    assert [entry.name for entry in result.tensors] == ["layer.weight"]


def test_what_cannot_be_paired_is_refused(tmp_path: Path, run_dir: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "live.safetensors")
    with pytest.raises(UsageError, match="no EMA") as caught:
        diff(tmp_path / "live.safetensors")
    assert caught.value.code == "unknown-tree"
    with pytest.raises(UsageError) as caught:
        diff(run_dir, against="nope")
    assert caught.value.code == "unknown-tree"
    two = save_dcp(
        tmp_path / "two", {name: {"w": torch.ones(2)} for name in ("model", "ema", "net_ema")}
    )
    with pytest.raises(UsageError) as caught:
        diff(two)
    assert caught.value.code == "ambiguous-tree"
    assert f"ema-ckpt diff {two} --tree ema" in str(caught.value)
    with pytest.raises(UsageError, match="--against net_ema"):
        diff(run_dir, two)


# ---------------------------------------------------------------- findings, each with and without


def test_a_healthy_run_is_silent(run_dir: Path) -> None:
    result = diff(run_dir)
    assert codes(result) == []
    assert result.differs


def test_an_ema_that_was_never_updated(tmp_path: Path, run_dir: Path) -> None:
    result = diff(save_dcp(tmp_path / "c", train(updates=0)))
    assert codes(result) == ["ema-stalled"]
    assert "update()" in result.findings[0].message


def test_an_ema_seeded_again_at_resume(tmp_path: Path) -> None:
    state = train(seed_again=True)
    result = diff(save_dcp(tmp_path / "c", state))
    assert codes(result) == ["ema-equals-live"]
    # Equal and never updated is what every run begins with: that is told as stalled alone.
    state["ema"]["num_updates"] = torch.tensor(0)
    assert codes(diff(save_dcp(tmp_path / "d", state))) == ["ema-stalled"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_ema_in_low_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    state = train()
    state["ema"]["weights"] = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in state["ema"]["weights"].items()
    }
    result = diff(save_dcp(tmp_path / "c", state))
    assert codes(result) == ["ema-low-precision"]


def test_an_ema_of_another_model(tmp_path: Path) -> None:
    state, other = train(), train()
    torch.manual_seed(9)
    state["model"] = {
        name: torch.randn_like(value) if value.is_floating_point() else value
        for name, value in other["model"].items()
    }
    assert codes(diff(save_dcp(tmp_path / "c", state))) == ["ema-unrelated"]
    state["model"] = {
        name: value.new_zeros(value.numel() + 1) for name, value in other["model"].items()
    }
    result = diff(save_dcp(tmp_path / "d", state))
    assert codes(result) == ["ema-unrelated"]
    assert result.compared == 0
    state["model"] = {f"other.{name}": value for name, value in other["model"].items()}
    assert "ema-unrelated" in codes(diff(save_dcp(tmp_path / "e", state)))


def test_exchanged_and_marked(tmp_path: Path) -> None:
    state = train()
    for mark, expected in ((True, ["ema-swapped"]), (False, [])):
        state["swapped"] = torch.tensor(mark)
        assert codes(diff(save_dcp(tmp_path / f"c{mark}", state))) == expected
        torch.save({**state, "swapped": mark}, tmp_path / f"{mark}.pt")
        assert codes(diff(tmp_path / f"{mark}.pt")) == expected


def test_names_that_look_like_a_mark_of_exchange_are_none(tmp_path: Path) -> None:
    state = train()
    state["model"] = {**state["model"], "is_swapped": torch.tensor(True)}
    torch.save({**state, "extra": {"swapped": True}}, tmp_path / "c.pt")
    assert "ema-swapped" not in codes(diff(tmp_path / "c.pt"))
    torch.save({**state, "ema": {**state["ema"], "swapped": True}}, tmp_path / "d.pt")
    assert "ema-swapped" in codes(diff(tmp_path / "d.pt"))


def test_nan_in_the_live_weights(tmp_path: Path) -> None:
    result = diff(save_dcp(tmp_path / "c", train(poison=True)))
    assert codes(result) == ["non-finite"]
    assert "'0.weight'" in result.findings[0].message
    assert [(entry.name, entry.nan_a, entry.nan_b) for entry in result.tensors if entry.nan_b] == [
        ("0.weight", 0, 1)
    ]


def test_names_that_only_the_ema_has(tmp_path: Path) -> None:
    state = train()
    state["ema"]["weights"]["old.weight"] = torch.ones(2)
    result = diff(save_dcp(tmp_path / "c", state))
    assert codes(result) == ["keys-differ"]
    assert result.only_in_a == ("old.weight",)


def test_names_that_the_ema_lacks(tmp_path: Path) -> None:
    state = train()
    del state["ema"]["weights"]["3.bias"]
    result = diff(save_dcp(tmp_path / "c", state))
    assert codes(result) == ["ema-partial"]
    assert result.only_in_b == ("3.bias",)
    assert "--fill" in result.findings[0].message


# ---------------------------------------------------------------- the command


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ema_ckpt", "diff", *map(str, arguments)]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)


def test_exit_codes(run_dir: Path, tmp_path: Path) -> None:
    assert run(run_dir).returncode == 0
    assert run(run_dir, "--exit-code").returncode == 1
    assert run(run_dir, run_dir, "--exit-code").returncode == 0
    assert run(run_dir, "--exit-code", "--atol", 100).returncode == 0
    assert run(run_dir, "--atol", -1).returncode == 2
    assert run(tmp_path / "absent").returncode == 2
    state = load_file_of(run_dir)
    save_file(state, tmp_path / "a.safetensors")
    state.pop(next(iter(state)))
    save_file(state, tmp_path / "b.safetensors")
    assert (
        run(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--exit-code").returncode == 1
    )


def load_file_of(path: Path) -> dict[str, torch.Tensor]:
    ema_ckpt.consolidate(path, path.parent / "whole.safetensors", "model", overwrite=True)
    return load_file(path.parent / "whole.safetensors")


def test_json_document(run_dir: Path) -> None:
    ended = run(run_dir, "--json", "--top", 1)
    document = json.loads(ended.stdout)
    assert set(document) == {
        "a", "b", "resolved_a", "resolved_b", "warnings", "tree_a", "tree_b", "compared", "identical", "only_in_a", "only_in_b", "mismatched", "tensors",
        "summary", "findings",
    }  # fmt: skip
    assert set(document["summary"]) == {"rel_l2", "max_abs", "cosine", "changed"}
    keys = [
        "name",
        "numel",
        "rel_l2",
        "max_abs",
        "mean_abs",
        "cosine",
        "changed",
        "nan_a",
        "nan_b",
        "inf_a",
        "inf_b",
    ]
    assert list(document["tensors"][0]) == keys
    assert len(document["tensors"]) == document["compared"] == 9


def test_text_for_people(run_dir: Path) -> None:
    text = run(run_dir, "--top", 2).stdout
    assert "9 tensors compared" in text
    assert re.search(r"^all .* 9 tensors$", text, re.MULTILINE)
    assert "█" in text
    listed = text[text.index("rel L2  max") :].splitlines()[1:]
    assert len(listed) == 2
    assert run(run_dir, "-q").stdout == ""


def test_hostile_names_are_shown_harmlessly(tmp_path: Path) -> None:
    name = "evil\x1b[31m[bold]\nname"
    save_file({name: torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({name: torch.zeros(2)}, tmp_path / "b.safetensors")
    text = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout
    assert "\x1b" not in text
    assert "evil\\x1b[31m[bold]\\nname" in text


def test_torch_is_not_imported(fixtures: Path) -> None:
    code = f"import sys, ema_ckpt; ema_ckpt.diff({str(fixtures / 'tiny-lm')!r}); print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "False"


def test_large_tensors_take_the_fast_way_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ema_ckpt.ops.diff.FAST_NUMEL", 1000)
    torch.manual_seed(1)
    w = torch.randn(517, 1033)
    near = w + 1e-3 * torch.randn_like(w)
    for name, kind in (("f", torch.float32), ("h", torch.bfloat16)):
        save_file({"w": w}, tmp_path / "a.safetensors")
        save_file({"w": near.to(kind)}, tmp_path / f"{name}.safetensors")
        (entry,) = diff(tmp_path / "a.safetensors", tmp_path / f"{name}.safetensors").tensors
        expected = oracle(w, near.to(kind))
        assert entry.rel_l2 == pytest.approx(expected["rel_l2"], rel=1e-7)
        assert entry.cosine == pytest.approx(expected["cosine"], rel=1e-7)
        assert entry.mean_abs == pytest.approx(expected["mean_abs"], rel=1e-7)
        assert entry.changed == expected["changed"]


DAMAGE = {
    "missing-file": "missing-file",
    "hole": "hole",
    "truncated-by-half": "truncated-file",
    "hostile-metadata": "unsafe-pickle",
    "hostile-tensor-item": "unsafe-pickle",
    "hostile.pt": "unsafe-pickle",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error(
    damage: str, fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMA_CKPT_MARKER", str(tmp_path / "marker"))
    path = fixtures / "nasty" / damage
    with pytest.raises(ema_ckpt.SourceError) as caught:
        diff(path, path, *(("model", "model") if damage.endswith(".pt") else ()))
    assert caught.value.code == DAMAGE[damage]
    assert not (tmp_path / "marker").exists()


def test_objects_of_a_dcp_are_not_opened(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMA_CKPT_MARKER", str(tmp_path / "marker"))
    for name in ("hostile-object-item", "hostile-ema-config"):
        assert diff(fixtures / "nasty" / name).compared == 2
    assert not (tmp_path / "marker").exists()


def test_a_tied_weight_is_compared_under_both_names(tmp_path: Path) -> None:
    """An EMA keeps it once; nothing is missing from it, and `--fill` would do harm."""
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(7, 3), "head": torch.nn.Linear(3, 7, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    ema = ShardedEMA(model, 0.5)
    with torch.no_grad():
        model["embed"].weight.add_(1)
    ema.update()
    save(tmp_path / "step", model=model, ema=ema)
    result = diff(tmp_path / "step")
    assert result.only_in_a == result.only_in_b == ()
    assert {entry.name for entry in result.tensors} == {"embed.weight", "head.weight"}
    assert "ema-partial" not in {finding.code for finding in result.findings}


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_weight_that_the_live_tree_ties_is_compared_under_both_names(
    wrapper: str, tmp_path: Path
) -> None:
    """Where `consolidate` gives it the average under both."""
    weight = torch.randn(3, 2)
    live = {f"{wrapper}{name}": weight for name in ("embed.weight", "head.weight")}
    torch.save({"model": live, "ema": {"embed.weight": weight + 1}}, tmp_path / "a.pt")
    ema_ckpt.consolidate(tmp_path / "a.pt", tmp_path / "b.pt")
    beside, copy = diff(tmp_path / "a.pt"), diff(tmp_path / "a.pt", tmp_path / "b.pt")
    for result in (beside, copy):
        assert result.only_in_a == result.only_in_b == ()
        assert {entry.name for entry in result.tensors} == {"embed.weight", "head.weight"}
    assert copy.identical == 2
