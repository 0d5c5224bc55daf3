"""Rules in the writing verbs, over optimizer state: each form it is stored in, what is refused, what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ema_ckpt import EmaCkptError, consolidate, convert, reshard, verify
from ema_ckpt.ops.results.write import WriteResult
from tests.checkpoints import save_dcp

FUSE = "[[rule]]\nfrom = ['{l}.q', '{l}.k']\nto = '{l}.qk'\nsteps = [{ concatenate = 0 }]\n"
RENAME = "[[rule]]\nfrom = '{l}.{kind:q|k}'\nto = 'blocks.{l}.{kind}'\n"
TURN = "[[rule]]\nfrom = '{l}.q'\nto = '{l}.q'\nsteps = [{ transpose = [0, 1] }]\n"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = [f"{layer}.{kind}" for layer in range(2) for kind in ("q", "k")] + ["bias"]
    shapes = [(3,) if name == "bias" else (2, 3) for name in names]
    return {n: torch.randn(s, generator=generator) for n, s in zip(names, shapes, strict=True)}


def state() -> dict[str, dict[str, Any]]:
    """What AdamW keeps, with a step of its own for what no rule takes."""
    moments, squares = weights(1), weights(2)
    return {
        name: {
            "step": torch.tensor(9.0 if name == "bias" else 4.0),
            "exp_avg": moments[name],
            "exp_avg_sq": squares[name],
        }
        for name in moments
    }


def nested(**changes: Any) -> dict[str, Any]:
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": ["bias"]},
        {"lr": torch.tensor(0.2), "betas": (0.9, 0.99), "params": ["0.q", "0.k", "1.q", "1.k"]},
    ]
    return {"state": state(), "param_groups": groups, **changes}


def flattened() -> dict[str, Any]:
    flat = {f"state.{n}.{key}": v for n, entries in state().items() for key, v in entries.items()}
    for name in weights():
        flat[f"param_groups.{name}.lr"] = 0.1
        flat[f"param_groups.{name}.betas"] = (0.9, 0.99)
    return flat


def fused(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {f"{n}.qk": torch.cat([named[f"{n}.q"], named[f"{n}.k"]]) for n in range(2)}
    return {**made, "bias": named["bias"]}


def source(folder: Path, form: str, optimizer: Mapping[str, Any], **more: Any) -> Path:
    tree = {"model": weights(), "optimizer": optimizer, **more}
    if form == "dcp":
        return save_dcp(folder / "run", tree)
    torch.save(tree, folder / "run.pt")
    if form == "safetensors":
        convert(folder / "run.pt", folder / "run.safetensors")
        return folder / "run.safetensors"
    return folder / "run.pt"


def apply(path: Path, text: str, **options: Any) -> tuple[WriteResult, dict[str, Any]]:
    """Convert by rules to a torch file; the result and what torch loads of it."""
    (path.parent / "rules.toml").write_text(text)
    target = path.parent / "out.pt"
    result = convert(path, target, rules=path.parent / "rules.toml", overwrite=True, **options)
    return result, torch.load(target, weights_only=True)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


FORMS = ["dcp", "torch", "safetensors"]


@pytest.mark.parametrize("form", FORMS)
def test_nested_state_and_its_groups(form: str, tmp_path: Path) -> None:
    run = source(tmp_path, form, nested())
    result, loaded = apply(run, FUSE, strict=True)
    found = loaded["optimizer"]
    assert same({n: e["exp_avg"] for n, e in found["state"].items()}, fused(weights(1)))
    assert same({n: e["exp_avg_sq"] for n, e in found["state"].items()}, fused(weights(2)))
    steps = {n: float(entries["step"]) for n, entries in found["state"].items()}
    assert steps == {"0.qk": 4.0, "1.qk": 4.0, "bias": 9.0}
    assert [group["params"] for group in found["param_groups"]] == [["bias"], ["0.qk", "1.qk"]]
    assert found["param_groups"][1]["betas"] == (0.9, 0.99)
    assert result.renamed["optimizer.state.1.k.exp_avg"] == "optimizer.state.1.qk.exp_avg"
    rules = tmp_path / "rules.toml"
    assert verify(tmp_path / "out.pt", against=run, rules=rules).status == "sound"
    back = tmp_path / "back.pt"
    convert(tmp_path / "out.pt", back, rules=rules, inverse=True, strict=True)
    again = torch.load(back, weights_only=True)["optimizer"]
    assert same({n: e["exp_avg"] for n, e in again["state"].items()}, weights(1))
    assert [len({e["step"].data_ptr() for e in again["state"].values()})] == [5]  # no ties
    assert again["param_groups"] == nested()["param_groups"]


@pytest.mark.parametrize("form", FORMS)
def test_flattened_state_and_its_options(form: str, tmp_path: Path) -> None:
    run = source(tmp_path, form, flattened())
    result, loaded = apply(run, RENAME + FUSE.replace("{l}", "blocks.{l}"), strict=True)
    assert (
        result.renamed["optimizer.param_groups.1.k.lr"] == "optimizer.param_groups.blocks.1.qk.lr"
    )
    moments = {n: t for n, t in fused(weights(1)).items() if n != "bias"}
    expected = {f"state.blocks.{n}.exp_avg": value for n, value in moments.items()}
    found = loaded["optimizer"]
    assert same({n: found[n] for n in expected}, expected)
    assert found["param_groups.blocks.0.qk.betas"] == (0.9, 0.99)
    assert not [name for name in found if name.startswith(("state.0", "param_groups.0"))]
    reshard(run, tmp_path / "on-2", 2, rules=tmp_path / "rules.toml", strict=True)
    checked = verify(tmp_path / "on-2", against=run, rules=tmp_path / "rules.toml")
    assert checked.status == "sound"


def test_a_list_of_optimizers_below_their_classes(tmp_path: Path) -> None:
    more = {"optimizers": {"AdamW": nested()}}
    torch.save({"model": weights(), **more}, tmp_path / "run.pt")
    _, loaded = apply(tmp_path / "run.pt", FUSE, strict=True)
    assert loaded["optimizers"]["AdamW"]["state"].keys() == fused(weights()).keys()


def test_each_optimizer_finds_the_weights_it_steps(tmp_path: Path) -> None:
    """Parameters of three models have the same names, and other shapes; rules leave the critic as it is."""
    trees: dict[str, Any] = {}
    for copies, name in enumerate(("generator", "net", "critic"), 1):
        wide = {key: torch.cat([value] * copies) for key, value in weights(copies).items()}
        trees[name] = wide
        trees[f"{name}_optimizer"] = {"state": {key: {"exp_avg": v + 1} for key, v in wide.items()}}
    torch.save(trees, tmp_path / "run.pt")
    _, loaded = apply(tmp_path / "run.pt", FUSE, strict=True)
    for name in ("generator", "net"):
        state = loaded[f"{name}_optimizer"]["state"]
        wide = {key: value + 1 for key, value in trees[name].items()}
        assert same({key: entries["exp_avg"] for key, entries in state.items()}, fused(wide))
    assert same(loaded["critic"], trees["critic"])
    assert loaded["critic_optimizer"]["state"].keys() == trees["critic"].keys()


def without(name: str, key: str) -> dict[str, Any]:
    changed = state()
    del changed[name][key]
    return nested(state=changed)


def with_step(name: str, step: object) -> dict[str, Any]:
    changed = state()
    changed[name]["step"] = step
    return nested(state=changed)


def in_other_group(lr: float) -> dict[str, Any]:
    groups = [{"lr": 0.1, "params": ["bias", "0.q", "1.q", "1.k"]}, {"lr": lr, "params": ["0.k"]}]
    return nested(param_groups=groups)


def flattened_with(name: str, value: object) -> dict[str, Any]:
    return {**flattened(), name: value}


REFUSED = {
    "a moment": (without("1.k", "exp_avg"), r"has 'exp_avg' of '1\.q' and not of '1\.k'"),
    "a step": (with_step("0.k", torch.tensor(5.0)), r"'0\.qk' is made of '0\.q' and '0\.k', whose 'step'"),
    "a type": (with_step("0.k", 4.0), "'step' in the optimizer differ"),
    "a group": (in_other_group(0.2), r"'0\.q' and '0\.k', whose 'lr' in the optimizer differ: 0\.1 and 0\.2"),
    "an option": (flattened_with("param_groups.0.k.lr", 0.3), r"whose 'lr' .* 0\.1 and 0\.3"),
    "a dtype": (
        nested(state=state() | {"0.k": {**state()["0.k"], "exp_avg": weights(1)["0.k"].double()}}),
        "different types",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_parts_that_differ_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    optimizer, message = REFUSED[kind]
    run = source(tmp_path, "torch", optimizer)
    with pytest.raises(EmaCkptError, match=message) as found:
        apply(run, FUSE)
    assert "\n" not in str(found.value)
    assert str(tmp_path / "rules.toml") in str(found.value)
    assert not (tmp_path / "out.pt").exists()
    _, loaded = apply(run, FUSE, tree="model")  # without the optimizer they are no matter
    assert same(loaded["model"], fused(weights()))
    consolidate(run, tmp_path / "w.safetensors", tree="model", rules=tmp_path / "rules.toml")
    checked = verify(tmp_path / "w.safetensors", against=run, rules=tmp_path / "rules.toml")
    assert checked.status == "sound"


def test_groups_that_are_alike_are_joined(tmp_path: Path) -> None:
    run = source(tmp_path, "torch", in_other_group(0.1))
    _, loaded = apply(run, FUSE, strict=True)
    groups = loaded["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [["bias", "0.qk", "1.qk"]]


def test_dropped_parameters_take_their_state_along(tmp_path: Path) -> None:
    run = source(tmp_path, "dcp", nested())
    result, loaded = apply(run, "[[rule]]\ndrop = 'bias'\n")
    found = loaded["optimizer"]
    assert found["state"].keys() == weights().keys() - {"bias"}
    (group,) = found["param_groups"]
    assert group["params"] == ["0.q", "0.k", "1.q", "1.k"]
    assert float(group["lr"]) == pytest.approx(0.2)
    reasons = {item.name: item.reason for item in result.skipped}
    assert "dropped by rule 1 of" in reasons["optimizer.state.bias.step"]
    assert reasons["optimizer.param_groups.0.lr"] == "all parameters of its group are dropped"
    assert "optimizer.param_groups.1.lr" not in reasons


def test_a_constant_has_no_state_and_that_is_said(tmp_path: Path) -> None:
    run = source(tmp_path, "torch", nested())
    text = "[[rule]]\nconstant = 0\nto = '{l}.b'\nlike = '{l}.q'\n"
    result, loaded = apply(run, text)
    assert loaded["model"].keys() - weights().keys() == {"0.b", "1.b"}
    assert loaded["optimizer"]["state"].keys() == weights().keys()
    (warning,) = [w for w in result.warnings if w.code == "no-optimizer-state"]
    assert "'0.b' and '1.b'" in warning.message or "'0.b', '1.b'" in warning.message
    joined = f"{text}[[rule]]\nfrom = ['{{l}}.q', '{{l}}.b']\nto = '{{l}}.qb'\nsteps = [{{ concatenate = 0 }}]\n"
    with pytest.raises(EmaCkptError, match=r"of '0\.q' and not of a constant"):
        apply(run, joined)


def factored() -> dict[str, Any]:
    """What Adafactor keeps of matrices, and what it keeps of vectors."""
    kept: dict[str, dict[str, torch.Tensor]] = {"bias": {"variance": weights(3)["bias"]}}
    for name, value in weights(3).items():
        if name != "bias":
            kept[name] = {"row_var": value[:, :1], "col_var": value[:1], "exp_avg": value}
    return {"state": kept}


def test_state_of_another_shape_takes_new_names_and_no_new_layout(tmp_path: Path) -> None:
    run = source(tmp_path, "torch", factored())
    _, loaded = apply(run, RENAME, strict=True)
    found = loaded["optimizer"]["state"]
    for name, entries in factored()["state"].items():
        renamed = name if name == "bias" else f"blocks.{name}"
        assert same(found[renamed], entries)
    result, loaded = apply(run, TURN)
    assert loaded["optimizer"]["state"].keys() == {"bias", "0.k", "1.k"}
    left_out = {item.name for item in result.skipped}
    kinds = ("row_var", "col_var", "exp_avg")
    assert left_out == {f"optimizer.state.{n}.q.{kind}" for n in range(2) for kind in kinds}
    with pytest.raises(EmaCkptError, match=r"--strict: 6 items would be left out"):
        apply(run, TURN, strict=True)


@pytest.mark.parametrize("name", ["0.q", "other"])
def test_an_optimizer_of_other_weights_is_left_out(name: str, tmp_path: Path) -> None:
    changed = {key: value for key, value in state().items() if key != name}
    changed["x.y"] = state()["bias"]
    run = source(tmp_path, "torch", {"state": changed})
    result, loaded = apply(run, FUSE)
    assert "optimizer" not in loaded
    (reason,) = {item.reason for item in result.skipped}
    assert "the checkpoint has no weight 'x.y'" in reason
    with pytest.raises(EmaCkptError, match=r"no weight 'x\.y'"):
        apply(run, FUSE, tree="optimizer")


def test_an_optimizer_alone_is_written_by_rules(tmp_path: Path) -> None:
    run = source(tmp_path, "dcp", nested())
    _, loaded = apply(run, FUSE, tree="optimizer", strict=True)
    assert loaded.keys() == {"optimizer"}
    moments = {n: e["exp_avg"] for n, e in loaded["optimizer"]["state"].items()}
    assert same(moments, fused(weights(1)))


def test_state_that_is_not_tensors_goes_along(tmp_path: Path) -> None:
    """Numbers, None and tuples of tensors below a parameter: its tuples stay tuples under a new name."""
    kept = {name: {"count": 3, "buffer": None, "pair": (value, value[:1])} for name, value in weights(4).items()}  # fmt: skip
    run = source(tmp_path, "torch", {"state": kept})
    _, loaded = apply(run, RENAME, strict=True)
    entries = loaded["optimizer"]["state"]["blocks.0.q"]
    assert (entries["count"], entries["buffer"], type(entries["pair"])) == (3, None, tuple)
    assert torch.equal(entries["pair"][1], weights(4)["0.q"][:1])


def by_position() -> dict[str, Any]:
    parameters = [torch.nn.Parameter(value) for value in weights().values()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_an_optimizer_by_position_is_said_to_be_left_out(form: str, tmp_path: Path) -> None:
    """Once for the tree by `convert`, and by `verify` of the copy, which was not compared with it."""
    run = source(tmp_path, form, by_position())
    result, loaded = apply(run, FUSE)
    assert "optimizer" not in loaded
    (warning,) = [w for w in result.warnings if w.code == "left-out"]
    assert "tree 'optimizer' is left out" in warning.message
    assert "stored by position" in warning.message
    assert "--tree" in warning.message
    result, _ = apply(run, FUSE, tree="model")
    assert not [w for w in result.warnings if w.code == "left-out"]
    checked = verify(tmp_path / "out.pt", against=run, rules=tmp_path / "rules.toml")
    assert checked.status == "sound"
    (warning,) = [w for w in checked.warnings if w.code == "left-out"]
    assert "tree 'optimizer'" in warning.message
    assert "is not compared" in warning.message
    plain = convert(run, tmp_path / "plain.pt")
    assert not [w for w in plain.warnings if w.code == "left-out"]
    checked = verify(tmp_path / "plain.pt", against=run)
    assert not [w for w in checked.warnings if w.code == "left-out"]
