"""What an EMA lacks: told against the paired live weights, and filled from no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from tests.checkpoints import save_dcp


def run_at(path: Path, wrapper: str = "") -> Path:
    """A model of two parts; its average lacks `a.bias` and `b.bias`."""
    names = ["a.w", "a.bias", "b.w", "b.bias"]
    live = {f"{wrapper}{name}": torch.full((2,), float(i)) for i, name in enumerate(names)}
    average = {name: torch.full((2,), 10.0) for name in ("a.w", "b.w")}
    tree = {"model": live, "ema": {"weights": average, "num_updates": torch.tensor(3)}}
    return save_dcp(path, {**tree, "spare": {"a.bias": torch.full((2,), 20.0)}})


def written(path: Path) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in torch.load(path, weights_only=True).items()}


@pytest.mark.parametrize("fill", [True, "model", "model.a"])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_part_of_an_ema_is_filled_from_the_same_part(
    tmp_path: Path, wrapper: str, fill: bool | str
) -> None:
    if wrapper and fill == "model.a":
        fill = "model.module.a"
    source = run_at(tmp_path / "run", wrapper)
    done = ema_ckpt.consolidate(source, tmp_path / "out.pt", tree="ema.weights.a", fill=fill)
    assert done.filled == ("bias",)
    assert done.warnings == ()
    assert written(tmp_path / "out.pt") == {"w": [10.0, 10.0], "bias": [1.0, 1.0]}


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_part_of_an_ema_lacks_only_what_that_part_of_the_model_has(
    tmp_path: Path, wrapper: str
) -> None:
    done = ema_ckpt.consolidate(
        run_at(tmp_path / "run", wrapper), tmp_path / "out.pt", tree="ema.weights.a"
    )
    (warning,) = done.warnings
    assert warning.code == "ema-partial"
    assert "lacks 1 tensor that 'model.a' has: bias" in warning.message.replace("'bias'", "bias")
    assert written(tmp_path / "out.pt") == {"w": [10.0, 10.0]}


def test_a_whole_part_is_not_called_partial(tmp_path: Path) -> None:
    live = {"a.w": torch.ones(2), "b.w": torch.ones(2)}
    tree = {"model": live, "ema": {"weights": live, "num_updates": torch.tensor(3)}}
    source = save_dcp(tmp_path / "run", tree)
    for fill in (False, True):
        done = ema_ckpt.consolidate(
            source, tmp_path / f"{fill}.pt", tree="ema.weights.a", fill=fill
        )
        assert (done.warnings, done.filled, done.tensors) == ((), (), 1)


def test_a_list_of_averages_named_by_its_own_path_is_paired_with_the_model(tmp_path: Path) -> None:
    live = {"w": torch.ones(2), "b": torch.zeros(3)}
    tree = {"model": live, "ema": {"shadow_params": list(live.values()), "num_updates": 3}}
    source = save_dcp(tmp_path / "run", tree)
    done = ema_ckpt.consolidate(source, tmp_path / "a.pt", tree="ema.shadow_params", fill=True)
    assert done.warnings == done.filled == ()
    assert written(tmp_path / "a.pt") == {name: value.tolist() for name, value in live.items()}
    assert ema_ckpt.diff(source, tree="ema.shadow_params").identical == 2
    short = save_dcp(
        tmp_path / "short", {"model": live, "ema": {"shadow_params": [live["w"]], "num_updates": 3}}
    )
    with pytest.raises(ema_ckpt.EmaCkptError, match="cannot be paired") as caught:
        ema_ckpt.consolidate(short, tmp_path / "b.pt", tree="ema.shadow_params")
    assert caught.value.code == "unsupported"


def test_what_another_tree_does_not_fill_is_still_told(tmp_path: Path) -> None:
    done = ema_ckpt.consolidate(run_at(tmp_path / "run"), tmp_path / "out.pt", fill="spare")
    assert done.filled == ("a.bias",)
    (warning,) = done.warnings
    assert warning.code == "ema-partial"
    assert "b.bias" in warning.message
    assert "a.bias" not in warning.message
    assert written(tmp_path / "out.pt")["a.bias"] == [20.0, 20.0]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(300, 8, padding_idx=0)
        self.norm, self.other_norm = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rope", torch.arange(8.0))


def tied_run(path: Path, form: str, wrapper: str = "") -> Tied:
    """A tied model and its average by `named_parameters()`, in a form that records no ties."""
    model = Tied()
    live = {f"{wrapper}{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    average = {n: p.detach() + 1 for n, p in model.named_parameters() if "other" not in n}
    if form == "dcp":
        save_dcp(path, {"model": live, "ema": average})
    elif form == "torch":
        torch.save({"model": live, "ema": average}, path)
    else:
        named = {f"model.{name}": tensor for name, tensor in live.items()}
        save_file(named | {f"model_ema.{name}": tensor for name, tensor in average.items()}, path)
    return model


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("form", ["dcp", "safetensors", "torch"])
def test_a_fill_that_may_be_tied_to_an_averaged_weight_is_told_of(
    tmp_path: Path, form: str, wrapper: str
) -> None:
    """Of the embedding the first row is zero; the weights and biases of the norms are constants."""
    source = tmp_path / "run.safetensors"
    model = tied_run(source, form, wrapper)
    done = ema_ckpt.consolidate(source, tmp_path / "out.pt", fill=True)
    assert {*done.filled} == {"other_norm.weight", "other_norm.bias", "head.weight", "rope"}
    (warning,) = done.warnings
    assert warning.code == "ema-partial"
    assert f"'{wrapper}head.weight' may be tied to '{wrapper}embed.weight'" in warning.message
    assert "(--exclude head.weight)" in warning.message
    model.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert not model.embed.weight[0].any()  # the live weight in the average's place

    remedy = {"fill": True, "exclude": ["head.weight"]}
    done = ema_ckpt.consolidate(source, tmp_path / "left.pt", **remedy)
    assert done.warnings == ()
    found = torch.load(tmp_path / "left.pt")
    assert model.load_state_dict(found, strict=False).missing_keys == ["head.weight"]
    assert torch.equal(model.head.weight, found["embed.weight"])
    assert (model.head.weight[0] == 1).all()


def test_a_fill_that_differs_from_all_averaged_weights_is_not_told_of(tmp_path: Path) -> None:
    """Neither are constants, integers, or a live weight that begins like another."""
    one = torch.randn(64, 64)
    other = one.clone()
    other[-1, -1] += 1
    live = {"a": one, "b": other, "c": torch.zeros(9), "d": torch.zeros(9), "e": torch.arange(3)}
    live |= {"f": live["e"].clone()}
    average = {"a": one + 1, "c": torch.ones(9), "e": torch.arange(3)}
    source = save_dcp(tmp_path / "run", {"model": live, "ema": average})
    done = ema_ckpt.consolidate(source, tmp_path / "out.pt", fill=True)
    assert done.filled == ("b", "d", "f")
    assert done.warnings == ()


def test_live_weights_that_are_not_written_need_not_be_readable(tmp_path: Path) -> None:
    tied_run(tmp_path / "run.pt", "torch")
    state = torch.load(tmp_path / "run.pt")
    state["model"]["embed.weight"] = state["model"]["embed.weight"].to_sparse()
    torch.save(state, tmp_path / "run.pt")
    done = ema_ckpt.consolidate(tmp_path / "run.pt", tmp_path / "out.pt", fill=True)
    assert "head.weight" in done.filled
    assert done.warnings == ()
