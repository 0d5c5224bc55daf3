"""Tied weights come out under every name they need, with the average's values (deepspeedai/DeepSpeed#1896)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model

import ema_ckpt
from tests.checkpoints import save_dcp, torch_at


class Tied(torch.nn.Module):
    """A head that shares the embedding, as language models have it, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.mid = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a tied model whose average is not its live weights, and the average in full."""
    torch.manual_seed(0)
    model = Tied()
    ema = ema_ckpt.ShardedEMA(model, decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.update()
    ema_ckpt.save(tmp_path / "run", model=model, ema=ema)
    return tmp_path / "run", ema.full_state_dict()


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "hf"])
@pytest.mark.parametrize("fill", [False, True])
def test_an_average_of_a_tied_model_loads_strictly_and_is_the_average(
    trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, out: str, fill: bool
) -> None:
    source, truth = trained
    written = ema_ckpt.consolidate(source, tmp_path / out, fill=fill)
    # The live head is no remedy: loaded after the shared average it would overwrite it.
    assert written.filled == ()
    assert [warning.code for warning in written.warnings] == []
    path = tmp_path / out / "model.safetensors" if out == "hf" else tmp_path / out
    state = torch.load(path, weights_only=True) if out.endswith(".pt") else load_file(path)
    fresh = Tied()
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(fresh.head.weight, truth["embed.weight"])
    assert all(torch.equal(state[name], value) for name, value in truth.items())
    assert ema_ckpt.verify(path, against=source).status == "sound"


def test_the_opened_average_of_a_tied_model_is_one_tensor_under_two_names(
    trained: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    source, truth = trained
    with ema_ckpt.open(source) as opened:
        state = opened.state_dict("ema")
    assert list(state) == ["embed.weight", "head.weight", "mid.weight", "mid.bias"]
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert all(torch.equal(state[name], value) for name, value in truth.items())


@pytest.mark.parametrize(
    "config",
    [
        "",
        "not JSON",
        json.dumps({"tied": 3}),
        json.dumps({"tied": {"layer.w": "b"}}),
        json.dumps({"tied": {"layer.w": ["b", 3], "gone": ["x"]}}),
        json.dumps(["tied"]),
        "[" * 60_000,
        {"tied": {"layer.w": [["b"]]}},
    ],
)
def test_a_config_that_records_no_tie_adds_no_name(tmp_path: Path, config: object) -> None:
    weights = {"layer.w": torch.ones(2, 3), "b": torch.zeros(2)}
    ema = {"weights": weights, "num_updates": torch.tensor(1), "config": config}
    ema_ckpt.consolidate(torch_at(tmp_path / "run.pt", {"ema": ema}), tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(found) == ["layer.w", "b"]
    assert torch.equal(found["b"], weights["b"])


def test_ties_of_a_torch_file_are_kept_once_and_recorded(tmp_path: Path) -> None:
    model = Tied()
    source = torch_at(tmp_path / "model.pt", model.state_dict())
    once = ema_ckpt.consolidate(source, tmp_path / "once.safetensors")
    both = ema_ckpt.consolidate(source, tmp_path / "both.safetensors", expand_ties=True)
    shared = ema_ckpt.consolidate(source, tmp_path / "shared.pt")
    assert once.ties == {"head.weight": "embed.weight"}
    assert both.nbytes - once.nbytes == 6 * 4 * 4
    assert shared.nbytes == once.nbytes
    with safe_open(tmp_path / "once.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
    fresh = Tied()
    missing, unexpected = load_model(fresh, tmp_path / "once.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(fresh.head.weight, model.head.weight)
    Tied().load_state_dict(load_file(tmp_path / "both.safetensors"), strict=True)
    state = torch.load(tmp_path / "shared.pt", weights_only=True, mmap=True)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    Tied().load_state_dict(state, strict=True)


@pytest.mark.parametrize("once", ["once.safetensors", "hf", "split"])
def test_a_recorded_tie_is_read_back_under_both_names(tmp_path: Path, once: str) -> None:
    model = Tied()
    source, file = torch_at(tmp_path / "model.pt", model.state_dict()), tmp_path / once
    ema_ckpt.consolidate(source, file, max_shard_size=100 if once == "split" else "5GB")
    with ema_ckpt.open(file) as opened:
        state = opened.state_dict()
        assert torch.equal(opened["head.weight"], model.head.weight)
    Tied().load_state_dict(state, strict=True)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert {t.name for t in ema_ckpt.inspect(file).tensors} == model.state_dict().keys()
    for a, b in ((file, source), (source, file)):
        difference = ema_ckpt.diff(a, b)
        assert (difference.identical, difference.only_in_a, difference.only_in_b) == (4, (), ())
    ema_ckpt.convert(file, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert ema_ckpt.consolidate(file, tmp_path / "again.safetensors").ties == {
        "head.weight": "embed.weight"
    }
    assert "head.weight" not in load_file(tmp_path / "again.safetensors")
    assert ema_ckpt.verify(tmp_path / "again.safetensors", against=source).status == "sound"


def test_slices_of_one_buffer_are_two_tensors_written_in_full(tmp_path: Path) -> None:
    buffer = torch.arange(12.0)
    tensors = {
        "low": buffer[:8],
        "high": buffer[4:],
        "turned": buffer.view(3, 4).t(),
        "all": buffer,
    }
    source = torch_at(tmp_path / "slices.pt", tensors)
    for out in ("out.safetensors", "out.pt"):
        assert ema_ckpt.consolidate(source, tmp_path / out).ties == {}
    for found in (
        load_file(tmp_path / "out.safetensors"),
        torch.load(tmp_path / "out.pt", weights_only=True),
    ):
        assert sorted(found) == sorted(tensors)
        assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_a_sharded_checkpoint_writes_every_stored_name(tmp_path: Path) -> None:
    model = Tied()
    source = save_dcp(tmp_path / "run", {"model": model.state_dict()})
    written = ema_ckpt.consolidate(source, tmp_path / "out.safetensors")
    assert written.ties == {}
    Tied().load_state_dict(load_file(tmp_path / "out.safetensors"), strict=True)


def test_a_tie_that_save_model_recorded_is_passed_on_or_written_out(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    source, text = tmp_path / "m.safetensors", {"modelspec.title": "tied"}
    save_model(model, str(source), metadata=text)
    for verb in (ema_ckpt.convert, ema_ckpt.consolidate):
        out = tmp_path / f"{verb.__name__}.safetensors"
        assert verb(source, out).ties == {"b.weight": "a.weight"}
        with safe_open(out, "pt") as file:
            assert file.metadata().items() >= {"b.weight": "a.weight", **text}.items()
        fresh = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        fresh["b"].weight = fresh["a"].weight
        assert load_model(fresh, str(out)) == (set(), [])
        for suffix in ("safetensors", "pt"):
            whole = tmp_path / f"{verb.__name__}-whole.{suffix}"
            verb(source, whole, expand_ties=True)
            found = load_file(whole) if suffix == "safetensors" else torch.load(whole)
            assert found.keys() == model.state_dict().keys()
            assert torch.equal(found["b.weight"], model["a"].weight)
        for suffix in ("", "-whole"):
            out = tmp_path / f"{verb.__name__}{suffix}.safetensors"
            assert ema_ckpt.verify(out, against=source).status == "sound"
    ema_ckpt.convert(source, tmp_path / "dcp", world_size=2, expand_ties=True)
    with ema_ckpt.open(tmp_path / "dcp") as both:
        assert all(torch.equal(both[name], value) for name, value in model.state_dict().items())
    assert ema_ckpt.verify(tmp_path / "dcp").status == "sound"
    assert [item.name for item in ema_ckpt.convert(source, tmp_path / "told").skipped] == [
        "b.weight",
        "__metadata__.modelspec.title",
    ]
    renamed = ema_ckpt.convert(
        source, tmp_path / "renamed.safetensors", rename=["=x."], expand_ties=True
    )
    assert renamed.tensors == 4
    assert [
        item.name
        for item in ema_ckpt.convert(source, tmp_path / "lost.safetensors", rename=["=x."]).skipped
    ] == ["b.weight"]


@pytest.mark.parametrize("text", ["a.weight", "weight"])
def test_text_that_is_no_tie(tmp_path: Path, text: str) -> None:
    save_file(
        {"a.weight": torch.ones(2), "weight": torch.ones(1)},
        tmp_path / "m.safetensors",
        metadata={"layer": text},
    )
    ema_ckpt.convert(tmp_path / "m.safetensors", tmp_path / "m.pt", expand_ties=True)
    assert torch.load(tmp_path / "m.pt").keys() == {"a.weight", "weight"}


def test_text_of_a_header_that_the_target_cannot_hold_is_told(tmp_path: Path) -> None:
    save_file(
        {"w": torch.ones(2)}, tmp_path / "m.safetensors", metadata={"title": "x", "format": "pt"}
    )
    done = ema_ckpt.convert(tmp_path / "m.safetensors", tmp_path / "m.pt")
    assert [item.name for item in done.skipped] == ["__metadata__.title"]
    with pytest.raises(ema_ckpt.EmaCkptError, match="--strict"):
        ema_ckpt.convert(tmp_path / "m.safetensors", tmp_path / "strict.pt", strict=True)


def test_a_tie_that_is_left_out_does_not_come_back(tmp_path: Path) -> None:
    shared = torch.ones(3)
    torch.save({"a.w": shared, "b.w": shared}, tmp_path / "m.pt")
    assert ema_ckpt.convert(tmp_path / "m.pt", tmp_path / "m.safetensors").ties == {"b.w": "a.w"}
    for verb in (ema_ckpt.convert, ema_ckpt.consolidate):
        out = tmp_path / f"{verb.__name__}.safetensors"
        assert verb(tmp_path / "m.safetensors", out, exclude=["b.*"]).ties == {}
        assert [tensor.name for tensor in ema_ckpt.inspect(out).tensors] == ["a.w"]


def test_consolidating_into_a_torch_file_tells_what_it_leaves_out(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    save_model(model, str(tmp_path / "m.safetensors"), metadata={"note": "x"})
    done = ema_ckpt.consolidate(tmp_path / "m.safetensors", tmp_path / "m.pt")
    assert [item.name for item in done.skipped] == ["b.weight", "__metadata__.note"]
