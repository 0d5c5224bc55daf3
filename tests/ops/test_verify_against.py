"""verify --against: what a copy may lack, which names it may have, and which it may not."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import ema_ckpt
from ema_ckpt import verify
from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.ops.spare_tensors import Naming
from tests.checkpoints import save_dcp

Found = list[tuple[str, str | None]]


def problems_of(copy: Path, source: Path) -> Found:
    """Compare a copy with its source; return codes and tensors."""
    found = verify(copy, against=source)
    assert (found.status == "damaged") == bool(found.problems)
    return [(problem.code, problem.tensor) for problem in found.problems]


def exchanged(file: Path, one: str, other: str) -> Path:
    state = load_file(file)
    state[one], state[other] = state[other], state[one]
    save_file(state, file.with_name("exchanged.safetensors"))
    return file.with_name("exchanged.safetensors")


def without(file: Path, name: str) -> Path:
    state = load_file(file)
    del state[name]
    save_file(state, file.with_name("without.safetensors"))
    return file.with_name("without.safetensors")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_an_average_that_equals_the_live_weights_may_lack_what_it_does_not_average(
    suffix: str, tmp_path: Path
) -> None:
    weights = {f"{i}.weight": torch.randn(2, 3) for i in range(3)}
    live = weights | {"count": torch.tensor(5), "frozen": torch.ones(3)}
    source = tmp_path / f"a.{suffix}"
    if suffix == "pt":
        torch.save({"model": live, "ema": {k: w.clone() for k, w in weights.items()}}, source)
    else:
        save_file(live | {f"ema.{name}": w.clone() for name, w in weights.items()}, source)
    ema_ckpt.consolidate(source, tmp_path / "b.safetensors")
    assert problems_of(tmp_path / "b.safetensors", source) == []
    lost = without(tmp_path / "b.safetensors", "1.weight")
    assert [code for code, _ in problems_of(lost, source)] == ["incomplete"]


def test_live_weights_in_the_place_of_an_average_go_without_its_counter(tmp_path: Path) -> None:
    averages = {"w": torch.randn(2), "b": torch.randn(2)}
    live = {"steps": torch.tensor(3), "module.w": torch.randn(2), "module.b": torch.randn(2)}
    torch.save({"state_dict": averages, "ema_state_dict": live}, tmp_path / "a.pt")
    out = tmp_path / "b.safetensors"
    ema_ckpt.consolidate(tmp_path / "a.pt", out, "ema_state_dict")
    assert problems_of(out, tmp_path / "a.pt") == []
    wrong = exchanged(out, "w", "b")
    assert problems_of(wrong, tmp_path / "a.pt") == [("checksum", "b"), ("checksum", "w")]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(2, 3, bias=False)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.norm = torch.nn.Linear(2, 2, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("source", ["flat.pt", "nested.pt", "a.safetensors"])
def test_one_name_of_what_the_source_ties_is_enough(source: str, kept: str, tmp_path: Path) -> None:
    """`save_pretrained` leaves out the other, whichever it is, and records nothing."""
    model = Tied()
    if source == "flat.pt":
        torch.save(model.state_dict(), tmp_path / source)
    elif source == "nested.pt":
        teacher = {name: w + 1 for name, w in model.state_dict().items()}
        torch.save({"model": model.state_dict(), "teacher": teacher}, tmp_path / source)
    else:
        save_model(model, str(tmp_path / source))
    state = {name: model.state_dict()[name].clone() for name in (kept, "norm.weight")}
    out = tmp_path / "b.safetensors"
    save_file(state, out)
    assert problems_of(out, tmp_path / source) == []
    both = problems_of(without(out, kept), tmp_path / source)
    assert [code for code, _ in both] == ["incomplete"]
    save_file(state | {kept: state[kept] + 1}, out)
    assert problems_of(out, tmp_path / source)[0] == ("checksum", kept)


def test_a_copy_that_records_a_tie_which_the_source_does_not_have_differs(tmp_path: Path) -> None:
    """The bytes of one of the two are lost."""
    model = Tied()
    save_model(model, str(tmp_path / "b.safetensors"))
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.save(state, tmp_path / "a.pt")
    assert problems_of(tmp_path / "b.safetensors", tmp_path / "a.pt") == []
    (kept,) = load_file(tmp_path / "b.safetensors").keys() & {"embed.weight", "head.weight"}
    (dropped,) = {"embed.weight", "head.weight"} - {kept}
    torch.save(state | {dropped: state[kept] + 1}, tmp_path / "a.pt")
    found = verify(tmp_path / "b.safetensors", against=tmp_path / "a.pt")
    assert [(p.code, p.tensor) for p in found.problems] == [("checksum", dropped)]
    assert f"here tied to {kept!r}" in found.problems[0].message


def test_a_weight_under_a_second_name_that_differs_in_a_wrapper_is_extra(tmp_path: Path) -> None:
    state = {"w": torch.randn(2), "b": torch.randn(2)}
    save_file(state, tmp_path / "a.safetensors")
    save_file(state | {"module.w": state["w"].clone()}, tmp_path / "b.safetensors")
    found = problems_of(tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    assert found == [("index-mismatch", "module.w")]


@pytest.mark.parametrize("layout", ["weights", "shadow_params"])
def test_an_average_under_the_names_that_it_is_stored_by(layout: str, tmp_path: Path) -> None:
    live = {"a": torch.randn(2), "c": torch.randn(2)}
    if layout == "weights":
        average = {"weights": {"a": torch.randn(2), "c": torch.randn(2)}}
        average |= {"num_updates": torch.tensor(7), "config": '{"version": 1}'}
    else:
        average = {"shadow_params": [torch.randn(2), torch.randn(2)], "decay": 0.9}
    torch.save({"model": live, "ema": average}, tmp_path / "a.pt")
    out = tmp_path / "b.safetensors"
    ema_ckpt.convert(tmp_path / "a.pt", out, tree="ema", rename=["ema.="])
    found = verify(out, against=tmp_path / "a.pt")
    assert (found.status, found.warnings) == ("sound", ())
    one, other = [name for name in load_file(out) if name.startswith(layout)]
    wrong = problems_of(exchanged(out, one, other), tmp_path / "a.pt")
    assert wrong == [("checksum", one), ("checksum", other)]


def test_weights_that_were_filled_are_the_live_ones_of_their_names(tmp_path: Path) -> None:
    live = {f"{i}.weight": torch.randn(2) for i in range(4)}
    average = {f"{i}.weight": torch.randn(2) for i in range(2)}
    torch.save({"model": live, "ema": average}, tmp_path / "a.pt")
    out = tmp_path / "b.safetensors"
    ema_ckpt.consolidate(tmp_path / "a.pt", out, fill=True)
    found = verify(out, against=tmp_path / "a.pt")
    assert (found.status, found.warnings) == ("sound", ())
    wrong = problems_of(exchanged(out, "2.weight", "3.weight"), tmp_path / "a.pt")
    assert wrong == [("checksum", "2.weight"), ("checksum", "3.weight")]
    for name in ("1.weight", "3.weight"):
        assert problems_of(without(out, name), tmp_path / "a.pt") == [("incomplete", name)]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_part_of_a_tree_is_told_by_a_warning(suffix: str, tmp_path: Path) -> None:
    state = {f"net.{i}.{k}.w": torch.randn(2) for i in ("enc", "dec") for k in range(3)}
    source = tmp_path / f"a.{suffix}"
    if suffix == "pt":
        torch.save({"state_dict": state}, source)
    else:
        save_file({f"state_dict.{name}": tensor for name, tensor in state.items()}, source)
    out = tmp_path / "b.safetensors"
    ema_ckpt.consolidate(source, out, "state_dict.net.dec")
    found = verify(out, against=source)
    assert (found.status, [w.code for w in found.warnings]) == ("sound", ["left-out"])
    assert "'state_dict.net.enc.0.w'" in found.warnings[0].message
    wrong = problems_of(exchanged(out, "0.w", "2.w"), source)
    assert wrong == [("checksum", "0.w"), ("checksum", "2.w")]
    assert problems_of(without(out, "1.w"), source) == [("incomplete", "1.w")]


def test_a_planner_that_stores_under_other_names(tmp_path: Path) -> None:
    """A torch file has the names of the state dict alone, and so has the record in it."""
    source = tmp_path / "a"
    save_dcp(source, {"model": {"w": torch.randn(2), "b": torch.randn(3)}})
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.planner_data["model.w"] = ("model", "weight")
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    for out in (tmp_path / "b.pt", tmp_path / "b.safetensors", tmp_path / "b"):
        ema_ckpt.convert(source, out)
        found = verify(out, against=source)
        assert (found.status, found.problems) == ("sound", ())
    assert list(torch.load(tmp_path / "b.pt")["model"]) == ["weight", "b"]
    metadata.planner_data["model.w"] = ("model", "\ud800")
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(EmaCkptError):
        ema_ckpt.convert(source, tmp_path / "c.pt")


def test_damage_of_another_tree_of_the_source_is_none_of_the_copy(tmp_path: Path) -> None:
    weights = {f"{i}.weight": torch.randn(2) for i in range(3)}
    average = {name: weight.clone() for name, weight in weights.items()}
    source = tmp_path / "a"
    save_dcp(source, {"model": weights, "ema": average})
    ema_ckpt.consolidate(source, tmp_path / "b.safetensors")
    metadata = pickle.loads((source / ".metadata").read_bytes())
    for index in [i for i in metadata.storage_data if i.fqn == "model.1.weight"]:
        del metadata.storage_data[index]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    assert problems_of(tmp_path / "b.safetensors", source) == []
    save_file({f"model.{k}": w for k, w in weights.items()}, tmp_path / "c.safetensors")
    found = problems_of(tmp_path / "c.safetensors", source)
    assert ("checksum", "model.1.weight") in found
    assert len(found) == 2  # and why the source's is not read


def test_a_further_name_that_the_copy_ties_is_no_other_tensor(tmp_path: Path) -> None:
    """`save_pretrained` keeps one name of a tied weight; the state dict of what it loads has both."""
    model = Tied()
    state = {name: model.state_dict()[name].clone() for name in ("embed.weight", "norm.weight")}
    save_file(state, tmp_path / "a.safetensors")
    copy = tmp_path / "b.pt"
    tied = state | {"head.weight": state["embed.weight"]}
    torch.save(tied, copy)
    assert problems_of(copy, tmp_path / "a.safetensors") == []
    torch.save(tied | {"head.weight": state["embed.weight"].clone()}, copy)
    extra = problems_of(copy, tmp_path / "a.safetensors")
    assert extra == [("index-mismatch", "head.weight")]
    other = state["embed.weight"] + 1
    torch.save(state | {"embed.weight": other, "head.weight": other}, copy)
    assert ("checksum", "embed.weight") in problems_of(copy, tmp_path / "a.safetensors")


def test_of_equal_bytes_those_of_a_tree_that_the_copy_has_are_taken(tmp_path: Path) -> None:
    weights = {"w": torch.randn(3), "b": torch.zeros(3)}
    average = {name: weight.clone() for name, weight in weights.items()}
    average["w"] += 1
    state = {n: {"exp_avg": w + 5 if n == "w" else w.clone()} for n, w in weights.items()}
    torch.save({"model": weights, "ema": average, "optimizer": {"state": state}}, tmp_path / "a.pt")
    out = tmp_path / "b.pt"
    ema_ckpt.convert(
        tmp_path / "a.pt", out, tree=["model", "optimizer"], rename=["optimizer.=adam."]
    )
    assert problems_of(out, tmp_path / "a.pt") == []


def test_of_several_averages_the_one_that_equals_the_weights_is_found(tmp_path: Path) -> None:
    """The weights have a tensor more than it, and the average between them in the file differs."""
    average = {"w": torch.randn(3), "b": torch.randn(2)}
    other = {name: weight + 1 for name, weight in average.items()}
    trees = {"model": average | {"head": torch.randn(4)}, "net_ema": other, "ema": average}
    source, out = tmp_path / "a.pt", tmp_path / "b.safetensors"
    torch.save({tree: {n: w.clone() for n, w in ws.items()} for tree, ws in trees.items()}, source)
    ema_ckpt.consolidate(source, out, tree="ema")
    assert problems_of(out, source) == []


def test_a_dotted_path_under_another_prefix(tmp_path: Path) -> None:
    parts = ("model", "ema", "teacher")
    state = {f"{part}.{i}.w": torch.randn(2) for part in parts for i in range(3)}
    save_file(state, tmp_path / "a.safetensors")
    out = tmp_path / "b.safetensors"
    ema_ckpt.convert(tmp_path / "a.safetensors", out, tree="teacher", rename=["teacher.=net."])
    assert problems_of(out, tmp_path / "a.safetensors") == []
    wrong = problems_of(exchanged(out, "net.0.w", "net.2.w"), tmp_path / "a.safetensors")
    assert wrong == [("checksum", "net.0.w"), ("checksum", "net.2.w")]


def test_each_name_is_looked_at_once_for_each_part_that_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many parts that know one name of many, each took the time of all names."""
    asked = 0
    pair = Naming.pair

    def counting(naming: Naming, names: Iterable[str]) -> dict[str, Tensor]:
        nonlocal asked
        names = list(names)
        asked += len(names)
        return pair(naming, names)

    monkeypatch.setattr(Naming, "pair", counting)
    save_file({f"{i}.w": torch.full((2,), i) for i in range(50)}, tmp_path / "a.safetensors")
    other = {f"{i}.b": torch.ones(3) for i in range(50)}
    save_file(other | {"w": torch.full((2,), 99)}, tmp_path / "b.safetensors")
    assert len(problems_of(tmp_path / "b.safetensors", tmp_path / "a.safetensors")) > 50
    assert asked < 4 * 50


@pytest.mark.parametrize("form", ["names", "list", "flat names"])
def test_a_live_weight_fills_no_further_name_of_an_average(form: str, tmp_path: Path) -> None:
    """Averages by `named_parameters()` have one name of a tied weight, the live weights both."""
    weight, norm = torch.randn(3, 2), torch.randn(2, 2)
    live = {"embed.weight": weight, "norm.weight": norm, "head.weight": weight, "rope": norm[0]}
    averages = {"embed.weight": torch.randn(3, 2), "norm.weight": torch.randn(2, 2)}
    source = tmp_path / "a.pt"
    if form == "names":
        torch.save({"model": live, "ema": averages}, source)
    elif form == "list":
        ema = {"decay": 0.9, "optimization_step": 3, "shadow_params": [*averages.values()]}
        torch.save({"model": {k: v for k, v in live.items() if k != "rope"}, "ema": ema}, source)
    else:
        state = {f"model.{name}": value for name, value in live.items()}
        state |= {f"model_ema.{k.replace('.', '')}": value for k, value in averages.items()}
        state["model_ema.num_updates"] = torch.tensor(3)
        torch.save({"state_dict": state}, source)
    out = tmp_path / "b.pt"
    written = ema_ckpt.consolidate(source, out, fill=True)
    assert written.filled == (("rope",) if form != "list" else ())
    found = torch.load(out)
    assert torch.equal(found["head.weight"], averages["embed.weight"])
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert problems_of(out, source) == []
    with ema_ckpt.open(source) as opened:
        assert {*opened.state_dict(written.tree)} == found.keys() - {"rope"}
    untied = {**found, "head.weight": weight}
    save_file({name: value.clone() for name, value in untied.items()}, tmp_path / "c.safetensors")
    assert problems_of(tmp_path / "c.safetensors", source) == [("checksum", "head.weight")]


def test_weights_that_are_not_read_are_not_taken_for_tied(tmp_path: Path) -> None:
    """All of them have the same place in the catalog: none."""
    unread = {name: torch.eye(3).to_sparse() for name in "ab"}
    source = tmp_path / "a.pt"
    torch.save({"model": {**unread, "n": torch.ones(2)}, "ema": {"a": torch.randn(3, 3)}}, source)
    ema_ckpt.consolidate(source, tmp_path / "b.pt")
    assert [*torch.load(tmp_path / "b.pt")] == ["a"]
    with pytest.raises(EmaCkptError, match=r"'model\.b'") as caught:
        ema_ckpt.consolidate(source, tmp_path / "c.pt", fill=True)
    assert caught.value.code == "unsupported"


def test_weights_are_not_tied_by_a_piece_without_bytes(tmp_path: Path) -> None:
    """Where the first rank has no row of either, both begin at one place of its file."""
    source, row = tmp_path / "a", torch.arange(4.0).view(1, 4)
    source.mkdir()
    ranks = ({"a": row[:0], "b": row[:0]}, {"a": row, "b": row + 1})
    for rank, state in enumerate(ranks, 1):
        named = {f"model.{name}": tensor for name, tensor in state.items()}
        named |= {"model_ema.a": row + 2} if rank == 2 else {}
        info = {name: {"saved_offsets": [0, 0]} for name in named}
        text = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(named, source / f"shard-0000{rank}-model-00001-of-00001.safetensors", text)
    ema_ckpt.consolidate(source, tmp_path / "b.pt", fill=True)
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["a"], row + 2)
    assert torch.equal(found["b"], row + 1)


@pytest.mark.parametrize(("count", "model"), [(1, "model"), (17, "model"), (1, "generator_net")])
def test_ties_of_many_averages_and_of_trees_that_are_paired_with_none(
    count: int, model: str, tmp_path: Path
) -> None:
    weight, norm = torch.randn(3, 2), torch.randn(2, 2)
    state = {model: {"embed.weight": weight, "norm.weight": norm, "head.weight": weight}}
    for number in range(count):
        averages = {"embed.weight": torch.randn(3, 2), "norm.weight": torch.randn(2, 2)}
        state[f"ema_{number}"] = averages
    if model != "model":
        state[model]["rope"] = torch.ones(3)
        state["critic"] = {"norm.weight": norm.clone()}
    torch.save(state, tmp_path / "a.pt")
    options = {"tree": "ema_0", "fill": model, "expand_ties": True}
    ema_ckpt.consolidate(tmp_path / "a.pt", tmp_path / "b.pt", **options)
    found = torch.load(tmp_path / "b.pt")
    assert found.keys() == state[model].keys()
    assert torch.equal(found["head.weight"], state["ema_0"]["embed.weight"])
    assert problems_of(tmp_path / "b.pt", tmp_path / "a.pt") == []
