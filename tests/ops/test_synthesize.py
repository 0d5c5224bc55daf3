"""synthesize: sums equal torch's in float64, post-hoc averages equal those tracked in training, any layout and format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ema_ckpt
from ema_ckpt import EmaCkptError, SourceError, UsageError, synthesize
from ema_ckpt.analysis.phema import Profile, solve
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import PowerFunction
from tests.checkpoints import save_dcp

REPO = Path(__file__).parents[2]
STEPS = 512
EVERY = 64
TRACKED = (0.05, 0.10)
TARGETS = (0.06, 0.08, 0.12)


@pytest.fixture(scope="module")
def tracked(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Path], dict[float, dict[str, torch.Tensor]]]:
    """A run that keeps two profiles, saved eight times, and beside them tracks the profiles to be synthesized."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3))
    kept = {width: ShardedEMA(model, decay=PowerFunction(width)) for width in (*TRACKED, *TARGETS)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    paths = []
    for step in range(1, STEPS + 1):
        loss = (model(torch.randn(16, 6)) - torch.ones(16, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for ema in kept.values():
            ema.update()
        if step % EVERY == 0:
            state = {
                f"ema_{index}": kept[width].state_dict() for index, width in enumerate(TRACKED)
            }
            paths.append(save_dcp(folder / f"step_{step}", {"model": model.state_dict(), **state}))
    averages = {
        w: {n: t.clone() for n, t in kept[w].state_dict()["weights"].items()} for w in TARGETS
    }
    return paths, averages


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    names = sorted(a)
    x, y = (torch.cat([side[n].double().reshape(-1) for n in names]) for side in (a, b))
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("width", TARGETS)
def test_a_profile_that_was_not_tracked(width: float, tracked, tmp_path: Path) -> None:
    """The reconstruction is near the average that training itself kept; the best snapshot is far from it."""
    paths, averages = tracked
    out = tmp_path / "out.safetensors"
    written = synthesize(paths, out, sigma_rel=width, tree=("ema_0", "ema_1"))
    found = load_file(out)
    error = distance(found, averages[width])
    nearest = []
    for tree in ("ema_0", "ema_1"):
        with ema_ckpt.open(paths[-1]) as ckpt:
            nearest.append(distance(ckpt.state_dict(tree), averages[width]))
    print(f"sigma_rel {width}: reconstruction {error:.2e}, nearest snapshot {min(nearest):.2e}")
    assert error < 2e-3
    assert error < 0.2 * min(nearest)
    assert (written.tensors, written.format) == (4, "safetensors")


def test_weights_come_from_the_recorded_profiles(tracked, tmp_path: Path) -> None:
    paths, _ = tracked
    trees = ("ema_0", "ema_1")
    synthesize(paths, tmp_path / "a.safetensors", sigma_rel=0.08, tree=trees)
    profiles = [Profile(EVERY * (1 + i // 2), TRACKED[i % 2]) for i in range(2 * len(paths))]
    synthesize(
        paths, tmp_path / "b.safetensors", weights=solve(profiles, Profile(STEPS, 0.08)), tree=trees
    )
    widths, steps = [p.sigma_rel for p in profiles], [p.time for p in profiles]
    synthesize(
        paths,
        tmp_path / "c.safetensors",
        sigma_rel=0.08,
        sigma_rels=widths,
        steps=steps,
        tree=trees,
    )
    first = (tmp_path / "a.safetensors").read_bytes()
    assert (
        first
        == (tmp_path / "b.safetensors").read_bytes()
        == (tmp_path / "c.safetensors").read_bytes()
    )


def test_one_profile_over_time(tracked, tmp_path: Path) -> None:
    """Of one tracked profile, later snapshots alone; no --tree where a checkpoint has one EMA."""
    paths, _ = tracked
    singles = []
    for path in paths:
        with ema_ckpt.open(path) as ckpt:
            state = ckpt.state_dict("ema_1")
        step = int(path.name.rpartition("_")[2])
        config = json.dumps(
            {
                "version": 1,
                "schedule": {"kind": "power-function", "sigma_rel": 0.10, "unit": "updates"},
            }
        )
        ema = {
            "weights": state,
            "num_updates": torch.tensor(step),
            "samples_seen": torch.tensor(0),
            "config": config,
        }
        singles.append(save_dcp(tmp_path / path.name, {"ema": ema}))
    synthesize(singles, tmp_path / "out.pt", sigma_rel=0.10)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert distance(loaded, state) < 1e-6


def test_samples_are_a_unit_of_time(tmp_path: Path) -> None:
    paths = []
    for seen in (1000, 3000):
        config = json.dumps(
            {"schedule": {"kind": "power-function", "sigma_rel": 0.1, "unit": "samples"}}
        )
        ema = {
            "weights": {"w": torch.full((3,), float(seen))},
            "num_updates": torch.tensor(7),
            "samples_seen": torch.tensor(seen),
            "config": config,
        }
        paths.append(save_dcp(tmp_path / str(seen), {"ema": ema}))
    synthesize(paths, tmp_path / "o.safetensors", sigma_rel=0.07)
    a, b = solve([Profile(1000, 0.1), Profile(3000, 0.1)], Profile(3000, 0.07))
    assert load_file(tmp_path / "o.safetensors")["w"].tolist() == pytest.approx(
        [a * 1000 + b * 3000] * 3, rel=1e-6
    )


# ---------------------------------------------------------------- sums


def test_layouts_and_formats_of_the_snapshots_may_differ(fixtures: Path, tmp_path: Path) -> None:
    """The same run's averages in rows, a grid, a file and shards, each with a weight."""
    source = fixtures / "dcp" / "fsdp2-w4"
    ema_ckpt.consolidate(source, tmp_path / "b.safetensors")
    ema_ckpt.consolidate(source, tmp_path / "c.pt")
    ema_ckpt.reshard(source, tmp_path / "d", world_size=3)
    scaled = {name: tensor * 3 for name, tensor in load_file(tmp_path / "b.safetensors").items()}
    save_file(scaled, tmp_path / "e.safetensors")
    places = [
        source,
        tmp_path / "b.safetensors",
        tmp_path / "c.pt",
        tmp_path / "d",
        tmp_path / "e.safetensors",
    ]
    weights = [0.3, 0.1, -0.2, 0.4, 0.4]
    written = synthesize(places, tmp_path / "out.safetensors", weights=weights, threads=3)
    original, found = load_file(tmp_path / "b.safetensors"), load_file(tmp_path / "out.safetensors")
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        parts = [tensor.double()] * 4 + [scaled[name].double()]
        expected = sum(w * p for w, p in zip(weights, parts, strict=True)).float()
        assert torch.equal(found[name], expected)
    assert written.warnings == ()
    assert ema_ckpt.verify(tmp_path / "out.safetensors").status == "sound"


@pytest.mark.parametrize(
    ("target", "form"),
    [
        ("hf", {"max_shard_size": 500}),
        ("x.pt", {}),
        ("x.safetensors", {}),
        ("dcp", {"to": "dcp", "world_size": 3}),
    ],
)
def test_every_format_can_be_written(
    target: str, form: dict[str, Any], fixtures: Path, tmp_path: Path
) -> None:
    source = fixtures / "dcp" / "fsdp2-tp-2x2-uneven"
    out = tmp_path / target
    synthesize([source, source], out, weights=[0.25, 0.75], **form)
    assert ema_ckpt.verify(out).status == "sound"
    result = ema_ckpt.diff(source, out)
    assert (result.compared, result.summary.changed, result.mismatched, result.only_in_a) == (
        len(result.tensors),
        0,
        (),
        (),
    )


def test_large_tensors_by_several_workers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1111, 1013), torch.randn(1111, 1013)
    save_file({"w": a}, tmp_path / "a.safetensors")
    save_dcp(tmp_path / "b", {"model": {"w": b.t().contiguous().t()}})
    out = tmp_path / "o.safetensors"
    synthesize(
        [tmp_path / "a.safetensors", tmp_path / "b"],
        out,
        weights=[0.6, 0.4],
        threads=4,
        dtype="bf16",
    )
    expected = (a.double() * 0.6 + b.double() * 0.4).float().bfloat16()
    assert torch.equal(load_file(out)["w"], expected)


def test_integers_come_from_the_last(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        save_file(
            {
                "w": torch.full((2,), float(value)),
                "n": torch.tensor(2**60 + value),
                "m": torch.tensor([value > 1]),
            },
            tmp_path / f"{name}.safetensors",
        )
    synthesize(
        [tmp_path / "a.safetensors", tmp_path / "b.safetensors"],
        tmp_path / "o.safetensors",
        weights=[0.5, 0.5],
    )
    found = load_file(tmp_path / "o.safetensors")
    assert (found["w"].tolist(), int(found["n"]), found["m"].tolist()) == (
        [1.5, 1.5],
        2**60 + 2,
        [True],
    )


def test_writer_options_are_those_of_all_writers(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "dcp" / "fsdp2-w4"
    pair = [source, source]
    options = {
        "match": ["up.*"],
        "rename": ["up.=block."],
        "dtype": "bf16",
        "keep_dtype": ["up.bias"],
    }
    planned = synthesize(pair, tmp_path / "o.safetensors", weights=[1, 0], dry_run=True, **options)
    assert planned.dry_run
    assert not (tmp_path / "o.safetensors").exists()
    synthesize(pair, tmp_path / "o.safetensors", weights=[1, 0], **options)
    found = load_file(tmp_path / "o.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "block.weight": torch.bfloat16,
        "block.bias": torch.float32,
    }
    with pytest.raises(EmaCkptError) as caught:
        synthesize(pair, tmp_path / "o.safetensors", weights=[1, 0])
    assert caught.value.code == "target-exists"
    with pytest.raises(EmaCkptError) as caught:
        synthesize(
            [tmp_path / "o.safetensors"], tmp_path / "o.safetensors", weights=[1], overwrite=True
        )
    assert caught.value.code == "target-is-source"


# ---------------------------------------------------------------- refusals


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    for name, value in (("a", 1.0), ("b", 3.0)):
        save_file({"w": torch.full((4,), value)}, tmp_path / f"{name}.safetensors")
    return [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


def test_weights_that_do_not_sum_to_one_are_used_and_told(pair: list[Path], tmp_path: Path) -> None:
    written = synthesize(pair, tmp_path / "o.safetensors", weights=[1.0, 1.0])
    assert load_file(tmp_path / "o.safetensors")["w"].tolist() == [4.0] * 4
    assert [w.code for w in written.warnings] == ["weights-sum"]


@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 6e4), ("bfloat16", 3e38), ("float32", 3e38)]
)
def test_sums_beyond_the_stored_type_are_told(dtype: str, large: float, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    state = {
        "fits": torch.ones(3, dtype=kind),
        "over": torch.tensor([large, 1.0, -large], dtype=kind),
        "infinite": torch.tensor([float("inf"), 1.0], dtype=kind),
    }
    for name in ("a", "b"):
        save_file(state, tmp_path / f"{name}.safetensors")
    sources, out = (
        [tmp_path / "a.safetensors", tmp_path / "b.safetensors"],
        tmp_path / "o.safetensors",
    )
    written = synthesize(sources, out, weights=[1.0, 1.0], rename={"over": "x"})
    assert load_file(out)["x"].tolist() == [float("inf"), 2.0, float("-inf")]
    told = [w.message for w in written.warnings if w.code == "overflow"]
    assert told == [f"2 finite sums of 'x' became infinite in {dtype}; use smaller weights"]


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cast", ["fp32", "bf16", "fp16"])
def test_a_cast_sum_is_rounded_once(stored: str, cast: str, tmp_path: Path) -> None:
    names, states, sources = ("w", "kept", "left"), [], [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in sources:
        states.append({name: torch.randn(5000).to(getattr(torch, stored)) for name in names})
        torch.save(states[-1], path)
    first, second = states
    sums = {name: first[name].double() * 0.4 + second[name].double() * 0.6 for name in names}
    factors = {"weights": [0.4, 0.6], "dtype": cast, "keep_dtype": ["kept"], "exclude": ["left"]}
    synthesize(sources, tmp_path / "o.pt", rename={"w": "x"}, **factors)
    found = torch.load(tmp_path / "o.pt")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[cast]
    assert found.keys() == {"x", "kept"}
    torch.testing.assert_close(found["x"], sums["w"].to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(found["kept"], sums["kept"].to(first["kept"].dtype), rtol=0, atol=0)


def test_a_cast_keeps_sums_that_the_stored_type_could_not(tmp_path: Path) -> None:
    source = tmp_path / "a.safetensors"
    save_file({"w": torch.full((3,), 6e4, dtype=torch.float16)}, source)
    out = tmp_path / "o.safetensors"
    written = synthesize([source, source], out, weights=[2.0, -1.0], dtype="fp32")
    assert load_file(out)["w"].tolist() == [6e4] * 3
    written = synthesize([source, source], out, weights=[2.0, 0.0], dtype="fp32", overwrite=True)
    assert load_file(out)["w"].tolist() == [120000.0] * 3
    assert "overflow" not in [warning.code for warning in written.warnings]


def test_a_sum_that_the_cast_makes_infinite_is_told(tmp_path: Path) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "o.safetensors"
    save_file({"w": torch.full((3,), 1e5)}, source)
    written = synthesize([source, source], out, weights=[0.5, 0.5], dtype="fp16")
    told = [warning.message for warning in written.warnings if warning.code == "overflow"]
    assert told == ["3 finite sums of 'w' became infinite in float16; use another --dtype"]


def test_a_profile_out_of_reach_is_told(pair: list[Path], tmp_path: Path) -> None:
    written = synthesize(
        pair, tmp_path / "o.safetensors", sigma_rel=0.01, sigma_rels=[0.1, 0.1], steps=[10, 20]
    )
    assert [w.code for w in written.warnings] == ["profile-missed"]


@pytest.mark.parametrize(
    ("dtype", "other_width", "is_told"),
    [
        ("float32", 0.05 + 1e-8, True),
        ("bfloat16", 0.0501, True),
        ("bfloat16", 0.1, False),
        ("float64", 0.05 + 1e-8, False),
    ],
)
def test_rounding_that_weights_of_opposite_signs_make_visible_is_told(
    dtype: str, other_width: float, is_told: bool, tmp_path: Path
) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    exact = [1 + torch.rand(5000, dtype=torch.float64, generator=generator)] * 2
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, value, shift in zip(paths, exact, (0.0, 3e-3), strict=True):
        save_file({"w": (value + shift).to(kind)}, path)
    written = synthesize(
        paths,
        tmp_path / "o.safetensors",
        sigma_rel=0.052,
        sigma_rels=[0.05, other_width],
        steps=[1000, 1000],
    )
    told = [w.message for w in written.warnings if w.code == "rounding-amplified"]
    weights = [snapshot.weight for snapshot in written.snapshots]
    expected = weights[0] * exact[0] + weights[1] * (exact[1] + 3e-3)
    result = load_file(tmp_path / "o.safetensors")["w"].double()
    relative = float(((result - expected) / exact[0]).square().mean().sqrt())
    assert bool(told) is is_told
    if is_told:
        figure = float(told[0].split(" to ")[1].split(" of ")[0])
        assert figure / 10 < relative < figure
    else:
        assert relative < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one of --sigma-rel"),
        ({"sigma_rel": 0.1, "weights": [0.5, 0.5]}, "one of --sigma-rel"),
        ({"weights": [1.0]}, "1 number for 2 snapshots"),
        ({"weights": [1.0, float("nan")]}, "finite"),
        ({"weights": [1e308, 1e308]}, "not finite"),
        ({"weights": [0.5, 0.5], "steps": [1, 2]}, "go with --sigma-rel"),
        ({"sigma_rel": 0.1}, "records no power-function schedule"),
        ({"sigma_rel": 0.1, "sigma_rels": [0.1, 0.2]}, "records no step"),
        ({"sigma_rel": 0.1, "sigma_rels": [0.1], "steps": [1, 2]}, "1 number for 2"),
        ({"sigma_rel": 0.1, "sigma_rels": [0.1, 0.1], "steps": [5, 5]}, "give each once"),
        ({"sigma_rel": 0.5, "sigma_rels": [0.1, 0.1], "steps": [5, 6]}, "0.2887"),
        ({"sigma_rel": 1e-300, "sigma_rels": [0.1, 0.1], "steps": [5, 6]}, "1e-06 to 0.2887"),
        ({"sigma_rel": 0.1, "sigma_rels": [1e-160, 0.1], "steps": [5, 6]}, "1e-06 to 0.2887"),
        ({"weights": [0.5, 0.5], "to": "zip"}, "--to zip"),
        ({"weights": [0.5, 0.5], "to": "dcp"}, "ending"),
        ({"weights": [0.5, 0.5], "world_size": 2}, "--world-size"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: dict, message: str, pair: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        synthesize(pair, tmp_path / "o.safetensors", **arguments)
    assert caught.value.code == "usage"
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize("change", ["name", "shape", "kind"])
def test_snapshots_of_other_models_are_refused(
    change: str, pair: list[Path], tmp_path: Path
) -> None:
    state = {
        "name": {"x": torch.ones(4)},
        "shape": {"w": torch.ones(2, 2)},
        "kind": {"w": torch.ones(4, dtype=torch.int32)},
    }[change]
    save_file(state, tmp_path / "c.safetensors")
    with pytest.raises(UsageError):
        synthesize(
            [pair[0], tmp_path / "c.safetensors"], tmp_path / "o.safetensors", weights=[0.5, 0.5]
        )


def test_a_damaged_snapshot_stops_it(fixtures: Path, tmp_path: Path) -> None:
    """A flipped bit in a tensor, and in a storage of which the sum reads a part only."""
    base, bad = fixtures / "nasty" / "base", fixtures / "nasty" / "flipped-byte"
    with pytest.raises(SourceError) as caught:
        synthesize([base, bad], tmp_path / "o.safetensors", weights=[0.5, 0.5])
    assert (caught.value.code, caught.value.tensor) == ("checksum", "ema.weights.w")
    assert list(tmp_path.iterdir()) == []
    synthesize([base, bad], tmp_path / "o.safetensors", weights=[0.5, 0.5], no_verify=True)


def test_a_hostile_config_is_not_run(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMA_CKPT_MARKER", str(tmp_path / "marker"))
    bad = fixtures / "nasty" / "hostile-ema-config"
    with pytest.raises(ema_ckpt.UnsafeError):
        synthesize([bad], tmp_path / "o.safetensors", sigma_rel=0.1)
    synthesize([bad], tmp_path / "o.safetensors", weights=[1.0])  # asks for no object
    assert not (tmp_path / "marker").exists()


# ---------------------------------------------------------------- the command


def test_the_command(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    command = [
        sys.executable,
        "-m",
        "ema_ckpt",
        "synthesize",
        *map(str, pair),
        str(out),
        "--weights",
        "-0.5,1.5",
        "--json",
    ]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert (document["target"], document["tensors"], document["nbytes"]) == (str(out), 1, 16)
    assert load_file(out)["w"].tolist() == [4.0] * 4
    ended = subprocess.run(
        [*command[:-2], "x,y"], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "numbers with commas" in ended.stderr


def test_torch_is_not_imported(pair: list[Path], tmp_path: Path) -> None:
    code = (
        f"import sys, ema_ckpt; ema_ckpt.synthesize({list(map(str, pair))!r}, {str(tmp_path / 'o.safetensors')!r}, "
        "sigma_rel=0.08, sigma_rels=[0.05, 0.1], steps=[9, 9]); print('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "False"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32])
def test_sums_that_no_type_holds_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        torch.save(
            {"w": torch.full((4,), value).to(dtype), "v": torch.full((2,), value)},
            tmp_path / f"{name}.pt",
        )
    sources, out = [tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "o.pt"
    with pytest.raises(UsageError, match="tensor 'w' is") as caught:
        synthesize(sources, out, weights=[0.5, 0.5])
    assert caught.value.code == "unsupported"
    assert not out.exists()
    synthesize(sources, out, weights=[0.5, 0.5], exclude=["w"])
    assert torch.load(out)["v"].tolist() == [1.5, 1.5]


def test_text_that_the_headers_have_alike_is_kept(tmp_path: Path) -> None:
    """As a trainer of adapters writes it; what differs holds for no sum of them."""
    sources = []
    for number in (1, 2):
        text = {"format": "pt", "ss_network_dim": "4", "sshs_model_hash": f"{number}"}
        sources.append(tmp_path / f"{number}.safetensors")
        save_file({"w": torch.full((2,), float(number))}, sources[-1], text)
    out = tmp_path / "out.safetensors"
    result = synthesize(sources, out, weights=[0.5, 0.5])
    with safe_open(out, "pt") as opened:
        text = opened.metadata()
    assert text.pop("ema_ckpt") and text == {"format": "pt", "ss_network_dim": "4"}
    assert [item.name for item in result.skipped] == ["__metadata__.sshs_model_hash"]
    with pytest.raises(UsageError, match="sshs_model_hash"):
        synthesize(sources, tmp_path / "strict.safetensors", weights=[0.5, 0.5], strict=True)
    result = synthesize(sources, tmp_path / "out.pt", weights=[0.5, 0.5])
    names = sorted(item.name for item in result.skipped)
    assert names == ["__metadata__.ss_network_dim", "__metadata__.sshs_model_hash"]


def test_one_path_is_no_list_of_snapshots(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one path"):
        synthesize(str(pair[0]), tmp_path / "o.pt", weights=[1.0])  # type: ignore[arg-type]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_model_comes_out_under_all_its_names(tmp_path: Path) -> None:
    model = Tied()
    ema = ShardedEMA(model, 0.5)
    for step in (1, 2):
        with torch.no_grad():
            model.embed.weight.fill_(step)
        ema.update()
        ema_ckpt.save(tmp_path / f"step_{step}", model=model, ema=ema)
    ema_ckpt.consolidate(tmp_path / "step_2", tmp_path / "b.pt")
    for other in (tmp_path / "step_2", tmp_path / "b.pt"):
        out = tmp_path / f"{other.name}-sum.pt"
        synthesize([tmp_path / "step_1", other], out, weights=[0.25, 0.75])
        Tied().load_state_dict(found := torch.load(out))
        with ema_ckpt.open(tmp_path / "step_1") as first:
            expected = (
                0.25 * first["ema.weights.embed.weight"]
                + 0.75 * torch.load(tmp_path / "b.pt")["embed.weight"]
            )
        assert torch.allclose(found["head.weight"], expected)
