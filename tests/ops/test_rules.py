"""Rules in the writing verbs and in `verify --against`: names, layouts, what is refused and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ema_ckpt import (
    EmaCkptError,
    consolidate,
    convert,
    inspect,
    load_rules,
    reshard,
    restore,
    synthesize,
    verify,
)
from ema_ckpt.cli.main import main
from tests.checkpoints import save_dcp

EXPERTS = """
[[rule]]
from = ["{p:.*}.experts.{e}.w1.weight", "{p:.*}.experts.{e}.w3.weight"]
to = "{p}.experts.gate_up"
steps = [{ stack = "e" }, { concatenate = 1 }]

[[rule]]
from = "{p:.*}.experts.{e}.w2.weight"
to = "{p}.experts.down"
steps = [{ stack = "e" }, { transpose = [1, 2] }]
"""


def rules_file(folder: Path, text: str = EXPERTS) -> Path:
    file = folder / "rules.toml"
    file.write_text(text)
    return file


def experts(seed: int = 0, members: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    named = {"embed.weight": torch.randn(5, 4, generator=generator)}
    for layer in range(2):
        for expert in range(members):
            for name, shape in (("w1", (6, 4)), ("w2", (4, 6)), ("w3", (6, 4))):
                full = f"layers.{layer}.experts.{expert}.{name}.weight"
                named[full] = torch.randn(shape, generator=generator)
    return named


def fused(named: dict[str, torch.Tensor], members: int = 3) -> dict[str, torch.Tensor]:
    """What torch makes of the experts."""
    made = {"embed.weight": named["embed.weight"]}
    for layer in range(2):
        stacked = {}
        for name in ("w1", "w2", "w3"):
            parts = [named[f"layers.{layer}.experts.{e}.{name}.weight"] for e in range(members)]
            stacked[name] = torch.stack(parts)
        made[f"layers.{layer}.experts.gate_up"] = torch.cat([stacked["w1"], stacked["w3"]], 1)
        made[f"layers.{layer}.experts.down"] = stacked["w2"].transpose(1, 2)
    return made


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def training(folder: Path, tied: bool = False) -> Path:
    """A DCP checkpoint of live weights, their average, and an optimizer."""
    config: dict[str, object] = {"version": 1, "decay": 0.9}
    if tied:
        config["tied"] = {"embed.weight": ["head.weight"]}
    live = experts(1)
    state = {name: {"exp_avg": value} for name, value in experts(3).items()}
    tree = {
        "model": live,
        "ema": {
            "weights": experts(2),
            "num_updates": torch.tensor(4),
            "samples_seen": torch.tensor(0),
            "config": json.dumps(config),
        },
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": list(live)}]},
    }
    return save_dcp(folder / "run", tree)


def test_consolidate_takes_rules(tmp_path: Path) -> None:
    run, rules = training(tmp_path), rules_file(tmp_path)
    out = tmp_path / "ema.safetensors"
    result = consolidate(run, out, rules=rules)
    assert same(load_file(out), fused(experts(2)))
    assert result.renamed["layers.1.experts.2.w3.weight"] == "layers.1.experts.gate_up"
    assert result.rules is not None
    assert len(result.rules.changes) == 4
    assert verify(out, against=run, rules=rules).status == "sound"
    assert verify(out, against=run).status == "damaged"


def test_convert_takes_rules_to_every_weight_tree(tmp_path: Path) -> None:
    run, rules = training(tmp_path), rules_file(tmp_path)
    result = convert(run, tmp_path / "all.pt", rules=load_rules(rules))
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(loaded["model"], fused(experts(1)))
    assert same(loaded["ema"]["weights"], fused(experts(2)))
    assert loaded["ema"]["num_updates"] == 4
    state = loaded["optimizer"]["state"]
    assert state.keys() == fused(experts(1)).keys()
    assert same({n: entries["exp_avg"] for n, entries in state.items()}, fused(experts(3)))
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1, "params": list(fused(experts(1)))}]
    assert result.skipped == ()


def test_the_inverse_leads_back_through_every_format(tmp_path: Path) -> None:
    run, rules = training(tmp_path), rules_file(tmp_path)
    source = tmp_path / "model.safetensors"
    consolidate(run, source, tree="model")
    for name in ("a.safetensors", "a.pt", "hf", "dcp"):
        there, back = tmp_path / name, tmp_path / f"back-{name}.safetensors"
        form = {"hf": "safetensors", "dcp": "dcp"}.get(name)
        convert(source, there, to=form, rules=rules)
        convert(there, back, rules=rules, inverse=True)
        assert same(load_file(back), experts(1))
        assert verify(there, against=source, rules=rules).status == "sound"
        assert verify(back, against=there, rules=rules, inverse=True).status == "sound"


def test_reshard_cuts_what_was_cut(tmp_path: Path) -> None:
    run, rules = training(tmp_path), rules_file(tmp_path)
    reshard(run, tmp_path / "on-3", 3, rules=rules)
    consolidate(tmp_path / "on-3", tmp_path / "ema.safetensors")
    assert same(load_file(tmp_path / "ema.safetensors"), fused(experts(2)))
    sizes = [(tmp_path / "on-3" / f"__{rank}_0.distcp").stat().st_size for rank in range(3)]
    assert min(sizes) > 0.5 * max(sizes)


def test_synthesize_takes_rules(tmp_path: Path) -> None:
    rules = rules_file(
        tmp_path, EXPERTS + "[[rule]]\nconstant = 2\nto = 'bias'\nlike = 'embed.weight'\n"
    )
    paths = []
    for seed in range(2):
        paths.append(tmp_path / f"{seed}.safetensors")
        save_file(experts(seed), paths[-1])
    synthesize(paths, tmp_path / "mean.safetensors", tree="", weights=(0.25, 0.75), rules=rules)
    mean = {n: torch.lerp(experts(0)[n].double(), experts(1)[n].double(), 0.75) for n in experts()}
    found = load_file(tmp_path / "mean.safetensors")
    assert torch.equal(found.pop("bias"), torch.full((5, 4), 2.0))
    for name, value in fused(mean).items():
        assert torch.allclose(found[name].double(), value, atol=1e-7)


def test_casts_and_names_come_after_rules(tmp_path: Path) -> None:
    run, rules = training(tmp_path), rules_file(tmp_path)
    out = tmp_path / "out.safetensors"
    result = consolidate(
        run, out, rules=rules, match="*.experts.*", exclude="*.1.*", keep_dtype="*.down", dtype="bf16",
        rename=["layers=blocks"],
    )  # fmt: skip
    found = load_file(out)
    expected = fused(experts(2))
    assert found.keys() == {"blocks.0.experts.gate_up", "blocks.0.experts.down"}
    assert torch.equal(found["blocks.0.experts.down"], expected["layers.0.experts.down"])
    assert torch.equal(
        found["blocks.0.experts.gate_up"], expected["layers.0.experts.gate_up"].bfloat16()
    )
    assert result.renamed["layers.0.experts.0.w2.weight"] == "blocks.0.experts.down"
    assert not any(name.startswith("layers.1") for name in result.renamed)


def test_a_group_takes_filled_members(tmp_path: Path) -> None:
    averages = {n: t for n, t in experts(2).items() if not n.endswith("w3.weight")}
    tree = {"model": experts(1), "ema": {"weights": averages, "num_updates": torch.tensor(1)}}
    run, rules = save_dcp(tmp_path / "run", tree), rules_file(tmp_path)
    with pytest.raises(
        EmaCkptError, match=r"rule 1: .*3 of 3 members are missing: '.*\.w3\.weight'"
    ) as found:
        consolidate(run, tmp_path / "a.safetensors", rules=rules)
    assert found.value.code == "incomplete"
    result = consolidate(run, tmp_path / "a.safetensors", rules=rules, fill=True)
    mixed = {n: averages.get(n, t) for n, t in experts(1).items()}
    assert same(load_file(tmp_path / "a.safetensors"), fused(mixed))
    assert set(result.filled) == {f"layers.{layer}.experts.gate_up" for layer in range(2)}


def test_tied_names_are_renamed_too(tmp_path: Path) -> None:
    run = training(tmp_path, tied=True)
    text = "[[rule]]\nfrom = 'embed.weight'\nto = 'wte'\n[[rule]]\nfrom = 'head.weight'\nto = 'out'\noptional = true\n"
    rules = rules_file(tmp_path, text)
    reshard(run, tmp_path / "renamed", 1, rules=rules)
    consolidate(tmp_path / "renamed", tmp_path / "later.safetensors")
    consolidate(run, tmp_path / "at-once.safetensors", rules=rules)
    later = load_file(tmp_path / "later.safetensors")
    assert torch.equal(later["wte"], experts(2)["embed.weight"])
    assert torch.equal(later["out"], later["wte"])
    assert same(later, load_file(tmp_path / "at-once.safetensors"))


WRONG = {
    "[[rule]]\nfrom = 'nothing'\nto = 'b'": ("empty-selection", "rule 1 (nothing -> b) fits no name"),
    "[[rule]]\nfrom = 'a.{x}'\nto = 'b.{x}'\noptional = true": ("empty-selection", "fits no name"),
    "[[rule]]\nfrom = 'embed.weight'\nto = 'layers.0.experts.0.w1.weight'": ("name-collision", "two tensors"),
    "[[rule]]\nfrom = 'layers.{l}.{r:.*}'\nto = 'all.{r}'\none_way = true": ("name-collision", "two tensors"),
    "[[rule]]\nfrom = ['embed.weight', 'embed.bias']\nto = ['a', 'b']": ("incomplete", "'embed.bias' is missing"),
    "[[rule]]\nfrom = ['layers.0.experts.0.w1.weight', 'embed.weight']\nto = 'a'\n"
    "steps = [{ concatenate = 1 }]": ("usage", "shapes do not fit"),
    "[[rule]]\nfrom = ['layers.0.experts.0.w1.weight', 'embed.weight']\nto = 'a'\n"
    "steps = [{ concatenate = 0 }]": ("usage", "sizes = [1, 1] says; give sizes = [6, 5]"),
    "[[rule]]\nfrom = ['layers.0.experts.0.w1.weight', 'embed.weight']\nto = 'a'\n"
    "steps = [{ concatenate = 0, groups = 2 }]": ("usage", "give the sizes that they have to each other"),
    "[[rule]]\nfrom = 'embed.{k}'\nto = 'wte.{k}'\n[[rule]]\nfrom = 'embed.weight'\nto = 'a'": (
        "empty-selection", "each sees the names that those before it made"),
    "[[rule]]\nfrom = 'embed.weight'\nto = ['a', 'b']\nsteps = [{ split = 0 }]": ("usage", "does not divide"),
    "[[rule]]\nfrom = 'embed.weight'\nto = 'a'\nsteps = [{ transpose = [0, 2] }]": ("usage", "no axis 2"),
    "[[rule]]\nfrom = 'embed.weight'\nto = 'a'\nsteps = [{ unflatten = 0, sizes = [2, -1] }]": ("usage", "is not"),
    "[[rule]]\nfrom = 'layers.{l}.experts.{e}.w1.weight'\nto = 'l.{l}'\n"
    "steps = [{ stack = 'e', count = 4 }]": ("incomplete", "1 of 4 members are missing"),
    "[[rule]]\nfrom = 'layers.{l}.experts.{e}.w1.weight'\nto = 'l.{l}'\n"
    "steps = [{ stack = 'e', count = 2 }]": ("usage", "count = 2"),
    "[[rule]]\nconstant = 1\nto = 'embed.weight'\nshape = [2]\ndtype = 'int8'": ("name-collision", "two tensors"),
    "[[rule]]\nconstant = 1.5\nto = 'a'\nshape = [2]\ndtype = 'int8'": ("usage", "1.5 is no value of int8"),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_refused(text: str, tmp_path: Path) -> None:
    save_file(experts(), tmp_path / "a.safetensors")
    file, (code, message) = rules_file(tmp_path, text), WRONG[text]
    with pytest.raises(EmaCkptError) as found:
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=file)
    assert (found.value.code, message in str(found.value)) == (code, True), str(found.value)
    assert str(file) in str(found.value)
    assert not (tmp_path / "b.safetensors").exists()


def test_the_other_direction_is_named(tmp_path: Path) -> None:
    """Rules that fit nothing may be wanted the other way round; so may a comparison without them."""
    source, made, out = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "c"))
    save_file(experts(), source)
    rules = rules_file(tmp_path)
    with pytest.raises(EmaCkptError, match="these are the inverse"):
        convert(source, out, rules=rules, inverse=True)
    convert(source, made, rules=rules)
    with pytest.raises(EmaCkptError, match=r"need the inverse \(--inverse"):
        convert(made, out, rules=rules)
    problems = verify(made, against=source).problems
    assert [p.code for p in problems if "pass them here too" in p.message] == ["incomplete"]
    consolidate(source, out, match=["layers.*"])
    left_out = verify(out, against=source).problems
    assert [(p.code, "--rules" in p.message) for p in left_out] == [("incomplete", False)]


def test_a_missing_member_is_named(tmp_path: Path) -> None:
    named = experts(members=8)
    del named["layers.1.experts.3.w1.weight"]
    save_file(named, tmp_path / "a.safetensors")
    with pytest.raises(
        EmaCkptError, match=r"1 of 8 members are missing: 'layers\.1\.experts\.3\.w1\.weight'"
    ):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules_file(tmp_path))


def test_an_inverse_that_takes_too_much_is_said(tmp_path: Path) -> None:
    save_file({"a.gamma": torch.ones(2), "b.weight": torch.ones(3)}, tmp_path / "a.safetensors")
    text = "[[rule]]\nfrom = '{n:.*}.gamma'\nto = '{n}.weight'\n"
    result = convert(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules_file(tmp_path, text)
    )
    assert [warning.code for warning in result.warnings if warning.code == "one-way"] == ["one-way"]
    assert "'b.weight'" in next(w.message for w in result.warnings if w.code == "one-way")
    marked = rules_file(tmp_path, f"{text}one_way = true")
    result = convert(tmp_path / "a.safetensors", tmp_path / "c.safetensors", rules=marked)
    assert not [warning for warning in result.warnings if warning.code == "one-way"]


def test_dropped_and_constant_tensors(tmp_path: Path) -> None:
    save_file(experts(), tmp_path / "a.safetensors")
    text = "[[rule]]\ndrop = 'layers.{r:.*}'\n[[rule]]\nconstant = -1.5\nto = 'e.bias'\nlike = 'embed.weight'\ndtype = 'bfloat16'\nshape = [3]\n"
    text = text.replace("to = 'e.bias'\nlike = 'embed.weight'", "to = 'e.bias'")
    result = convert(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules_file(tmp_path, text)
    )
    found = load_file(tmp_path / "b.safetensors")
    assert torch.equal(found.pop("e.bias"), torch.full((3,), -1.5, dtype=torch.bfloat16))
    assert same(found, {"embed.weight": experts()["embed.weight"]})
    dropped = {item.name for item in result.skipped}
    assert dropped == experts().keys() - {"embed.weight"}
    assert all("dropped by rule 1 of" in item.reason for item in result.skipped)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int64"])
def test_the_largest_integer_of_a_type_is_a_constant(tmp_path: Path, dtype: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    most = min(torch.iinfo(getattr(torch, dtype)).max, 2**63 - 1)  # of TOML
    text = f"[[rule]]\nfrom = 'a'\nto = 'a'\n[[rule]]\nconstant = {most}\nto = 'b'\nshape = [3]\ndtype = '{dtype}'\n"
    convert(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules_file(tmp_path, text)
    )
    assert load_file(tmp_path / "b.safetensors")["b"].tolist() == [most] * 3


def exit_code(argv: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return ended.value.code


def test_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(experts(), tmp_path / "a.safetensors")
    call = ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--rules"]
    assert exit_code([*call, str(rules_file(tmp_path)), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        "rules layers.0.experts.0.w2.weight, layers.0.experts.1.w2.weight, layers.0.experts.2.w2.weight -> layers.0.experts.down"
        in out
    )
    assert not (tmp_path / "b.safetensors").exists()
    assert exit_code([*call, str(rules_file(tmp_path)), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rules"]["changes"][0].keys() == {"before", "after"}
    assert exit_code(["convert", call[1], str(tmp_path / "c.safetensors"), "--json"]) == 0
    assert "rules" not in json.loads(capsys.readouterr().out)
    assert exit_code(["verify", call[1], "--rules", str(rules_file(tmp_path))]) == 2
    assert "--rules goes with --against" in capsys.readouterr().err
    assert exit_code(["convert", call[1], str(tmp_path / "c.pt"), "--inverse"]) == 2
    assert "--inverse goes with --rules" in capsys.readouterr().err


@pytest.mark.parametrize("expand_ties", [False, True])
def test_a_dropped_name_is_no_tie_of_what_is_written(tmp_path: Path, *, expand_ties: bool) -> None:
    """A header that records `head.weight` as tied does not bring it back after a rule drops it."""
    save_file(
        {"emb.weight": torch.arange(6.0).reshape(2, 3), "norm": torch.ones(2)},
        tmp_path / "tied.safetensors",
        metadata={"head.weight": "emb.weight"},
    )
    (tmp_path / "drop.toml").write_text("[[rule]]\ndrop = 'head.weight'\n")
    out = tmp_path / "out.safetensors"
    result = convert(
        tmp_path / "tied.safetensors",
        out,
        rules=tmp_path / "drop.toml",
        expand_ties=expand_ties,
    )
    assert result.ties == {}
    assert "head.weight" in [item.name for item in result.skipped]
    convert(out, tmp_path / "back.pt", expand_ties=True)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert set(back) == {"emb.weight", "norm"}


def test_an_optimizer_that_is_not_asked_for_is_not_left_out(tmp_path: Path) -> None:
    source = tmp_path / "run.pt"
    weights = {"w": torch.ones(2)}
    moments = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": weights, "ema": weights, "optimizer": moments}, source)
    (tmp_path / "rename.toml").write_text("[[rule]]\nfrom = 'w'\nto = 'v'\n")
    options = {"rules": tmp_path / "rename.toml", "strict": True}
    convert(source, tmp_path / "ema.safetensors", tree="ema", **options)
    assert set(load_file(tmp_path / "ema.safetensors")) == {"ema.v"}
    with pytest.raises(EmaCkptError, match="optimizer"):
        convert(source, tmp_path / "all.safetensors", **options)


RENAMED = '[[rule]]\nfrom = "layers.{n}.a"\nto = "blocks.{n}.a"\n'


def wrapped(folder: Path, name: str) -> Path:
    """A DCP checkpoint whose weights lie below wrappers; `name` has the place of a number and a letter."""
    named = {name.format(n=n, w=w): torch.randn(2, 3) for n in range(2) for w in "ab"}
    state = {key: {"exp_avg": torch.zeros(2, 3)} for key in named}
    return save_dcp(folder / "run", {"model": named, "ema": named, "optimizer": {"state": state}})


def names_of(path: Path) -> set[str]:
    return {tensor.name for tensor in inspect(path).tensors}


def test_a_wrapper_prefix_that_is_kept_is_on_every_name(tmp_path: Path) -> None:
    run, rules = wrapped(tmp_path, "module.layers.{n}.{w}"), rules_file(tmp_path, RENAMED)
    bare = {"blocks.0.a", "blocks.1.a", "layers.0.b", "layers.1.b"}
    kept = {f"{tree}.module.{name}" for tree in ("model", "ema") for name in bare}
    kept |= {f"optimizer.state.module.{name}.exp_avg" for name in bare}
    result = reshard(run, tmp_path / "resharded", 2, rules=rules)
    assert names_of(tmp_path / "resharded") == kept
    assert result.renamed["ema.module.layers.0.a"] == "ema.module.blocks.0.a"
    assert verify(tmp_path / "resharded", against=run, rules=rules).status == "sound"
    convert(run, tmp_path / "kept.pt", rules=rules, keep_prefixes=True)
    assert names_of(tmp_path / "kept.pt") == kept
    result = consolidate(run, tmp_path / "whole.pt", rules=rules, keep_prefixes=True)
    assert names_of(tmp_path / "whole.pt") == {f"module.{name}" for name in bare}
    assert result.renamed["module.layers.0.a"] == "module.blocks.0.a"
    result = consolidate(run, tmp_path / "stripped.pt", rules=rules)
    assert names_of(tmp_path / "stripped.pt") == bare
    assert result.renamed["module.layers.0.a"] == "blocks.0.a"
    assert result.renamed["module.layers.0.b"] == "layers.0.b"
    assert len(result.renamed) == 4


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("nested", [False, True])
def test_an_average_inside_weights_stays_in_their_dictionary(
    wrapper: str, nested: bool, tmp_path: Path
) -> None:
    """As Lightning has it, of a module that keeps its average in itself."""
    names = {"q.weight": 1.0, "k.weight": 2.0, "v": 3.0, "norm": 4.0}
    weights = {name: torch.full((2,), value) for name, value in names.items()}
    state: dict[str, object] = {f"{wrapper}net.{name}": value for name, value in weights.items()}
    for name, value in weights.items():
        key = f"{wrapper}model_ema.net"
        if nested:
            state[key] = {**weights}
        else:
            state[f"{key}.{name}"] = value + 1
    source = tmp_path / "a.ckpt"
    torch.save({"state_dict": state}, source)
    text = """
    [[rule]]
    from = ["net.q.weight", "net.k.weight"]
    to = "net.qk.weight"
    steps = [{ concatenate = 0, sizes = [1, 1] }]

    [[rule]]
    from = "net.v"
    to = "core.v"
    """
    rules = rules_file(tmp_path, text)
    out = tmp_path / "b.pt"
    convert(source, out, rules=rules)
    found = torch.load(out, weights_only=True)
    assert list(found) == ["state_dict"]
    inner = {name for name in found["state_dict"] if name.startswith("model_ema.")}
    core = {"model_ema.core", "model_ema.net"} if nested else {"model_ema.core.v"}
    assert core <= inner
    checked = verify(out, against=source, rules=rules)
    assert (checked.status, checked.warnings) == ("sound", ())


def test_a_wrapper_inside_of_a_name_cannot_be_kept(tmp_path: Path) -> None:
    run = wrapped(tmp_path, "layers.{n}._checkpoint_wrapped_module.{w}")
    rules = rules_file(tmp_path, RENAMED)
    out = tmp_path / "out"
    for write in (
        lambda: reshard(run, out, 2, rules=rules),
        lambda: convert(run, out, rules=rules, keep_prefixes=True),
        lambda: consolidate(run, out, rules=rules, keep_prefixes=True),
    ):
        with pytest.raises(EmaCkptError, match=r"_checkpoint_wrapped_module\.a") as caught:
            write()
        assert caught.value.code == "unsupported"
        assert not out.exists()
    convert(run, out, rules=rules)
    assert "ema.blocks.1.a" in names_of(out)


def test_rules_apply_to_the_trees_that_are_asked_for(tmp_path: Path) -> None:
    source = tmp_path / "run.pt"
    moments = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"v": torch.ones(2)}, "optimizer": moments}, source)  # fmt: skip
    rules = rules_file(tmp_path, '[[rule]]\ndrop = "w"\n\n[[rule]]\nfrom = "v"\nto = "u"\n')
    out = tmp_path / "out.pt"
    with pytest.raises(EmaCkptError, match="fits no name"):
        convert(source, out, tree="ema", rules=rules)
    for tree in ("optimizer", "optimizer.state", ["ema", "optimizer"]):
        with pytest.raises(EmaCkptError, match="optimizer state is not carried") as caught:
            convert(source, out, tree=tree, rules=rules)
        assert caught.value.code == "unsupported"
    with pytest.raises(EmaCkptError, match="has no tree 'modle'"):
        convert(source, out, tree="modle", rules=rules)
    rules = rules_file(tmp_path, '[[rule]]\nfrom = "v"\nto = "u"\n')
    result = convert(source, out, tree="ema", rules=rules, strict=True)
    assert (names_of(out), result.skipped) == ({"ema.u"}, ())


@pytest.mark.parametrize("rules", [["rules.toml"], 5, b"rules.toml"])
def test_what_is_no_path_is_refused_in_one_line(tmp_path: Path, rules: object) -> None:
    run = training(tmp_path)
    for call in (
        lambda: consolidate(run, tmp_path / "out.pt", rules=rules),
        lambda: restore(run, model=torch.nn.Linear(2, 2), rules=rules),
        lambda: load_rules(rules),
    ):
        with pytest.raises(EmaCkptError, match=f"found {type(rules).__name__}"):
            call()
