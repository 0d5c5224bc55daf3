"""Names that wrappers leave behind are taken out, listed, and never make two tensors one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import save_dcp, torch_at


def _net() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )


def _prefixed(*prefixes: str) -> dict[str, torch.Tensor]:
    head = "".join(f"{prefix}." for prefix in prefixes)
    return {f"{head}{name}": value for name, value in _net().state_dict().items()}


WRAPPED = {
    "data parallel": _prefixed("module"),
    "compiled": _prefixed("_orig_mod"),
    "compiled, then data parallel": _prefixed("module", "_orig_mod"),
    "data parallel, then compiled": _prefixed("_orig_mod", "module"),
    "fully sharded": _prefixed("_fsdp_wrapped_module"),
    "all at once": _prefixed(
        "_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"
    ),
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("nested", [False, True])
def test_every_order_of_wrapping_gives_the_models_own_names(
    tmp_path: Path, kind: str, nested: bool
) -> None:
    """huggingface/pytorch-image-models#2003, sming256/OpenTAD#44."""
    state = WRAPPED[kind]
    sources = [torch_at(tmp_path / "run.pt", {"model": state} if nested else state)]
    sources.append(save_dcp(tmp_path / "run", {"model": state} if nested else {**state}))
    for index, source in enumerate(sources):
        out = tmp_path / f"{index}.pt"
        written = ema_ckpt.consolidate(source, out)
        found = torch.load(out, weights_only=True)
        _net().load_state_dict(found, strict=True)
        assert all(torch.equal(found[name], value) for name, value in _net().state_dict().items())
        assert dict(written.renamed) == dict(zip(state, _net().state_dict(), strict=True))


def test_a_prefix_in_the_middle_of_a_name(tmp_path: Path) -> None:
    net = _net()
    wrapped = torch.nn.Sequential(checkpoint_wrapper(net[0]), net[1])
    wrapped.append(torch.compile(net[2], backend="eager"))  # type: ignore[arg-type]
    state = dict(wrapped.named_parameters()) | dict(wrapped.named_buffers())
    assert any("_checkpoint_wrapped_module" in name for name in state)
    assert any("_orig_mod" in name for name in state)
    source = torch_at(tmp_path / "run.pt", {name: value.detach() for name, value in state.items()})
    written = ema_ckpt.consolidate(source, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    _net().load_state_dict(found, strict=True)
    assert set(written.renamed) == {
        name for name in state if "_orig_mod" in name or "_wrapped" in name
    }


@pytest.mark.parametrize("inner", ["ema", "model_ema"])
def test_a_tree_inside_wrapped_weights(inner: str, tmp_path: Path) -> None:
    """Its own name keeps the prefix, in the file as in the record of it."""
    state = {f"module.{name}": torch.randn(2) for name in ("net.w", f"{inner}.net.w", "b")}
    nested = {"a": torch.ones(2), "_orig_mod.c": torch.zeros(2)}
    torch_at(tmp_path / "a.pt", {"model": state, "shadow": {f"x.module.{inner}.module": nested}})
    ema_ckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert ema_ckpt.verify(tmp_path / "b.pt", against=tmp_path / "a.pt").status == "sound"
    with ema_ckpt.open(tmp_path / "b.pt") as found:
        assert f"model.module.{inner}.net.w" in found
    ema_ckpt.convert(tmp_path / "b.pt", tmp_path / "c.safetensors")
    assert ema_ckpt.verify(tmp_path / "c.safetensors", against=tmp_path / "a.pt").problems == ()


def test_prefixes_can_be_kept(tmp_path: Path) -> None:
    state = WRAPPED["data parallel"]
    written = ema_ckpt.consolidate(
        torch_at(tmp_path / "run.pt", state), tmp_path / "out.pt", keep_prefixes=True
    )
    assert dict(written.renamed) == {}
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == list(state)


def test_names_that_only_look_like_a_prefix_stay(tmp_path: Path) -> None:
    state = {
        "my_module.w": torch.ones(1),
        "modules.0.w": torch.ones(2),
        "x.module_a.w": torch.ones(3),
    }
    written = ema_ckpt.consolidate(torch_at(tmp_path / "run.pt", state), tmp_path / "out.pt")
    assert dict(written.renamed) == {}
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == list(state)


def test_two_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    state = {"module.w": torch.ones(2), "w": torch.zeros(2)}
    with pytest.raises(
        EmaCkptError, match=r"'module\.w' and 'w' would both be written as 'w'"
    ) as caught:
        ema_ckpt.consolidate(torch_at(tmp_path / "run.pt", state), tmp_path / "out.pt")
    assert caught.value.code == "name-collision"
    ema_ckpt.consolidate(tmp_path / "run.pt", tmp_path / "out.pt", keep_prefixes=True)
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == list(state)


def test_an_average_and_a_wrapped_live_tree_are_paired(tmp_path: Path) -> None:
    """facebookresearch/d2go#578: the average is named by one call, the model by another."""
    average = {
        name: value * 2 for name, value in _net().state_dict().items() if value.is_floating_point()
    }
    tree = {
        "model": WRAPPED["all at once"],
        "ema": {"weights": average, "num_updates": torch.tensor(4)},
    }
    source = save_dcp(tmp_path / "run", tree)
    written = ema_ckpt.consolidate(source, tmp_path / "out.pt", fill=True)
    assert written.filled == ("1.num_batches_tracked",)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    _net().load_state_dict(found, strict=True)
    assert all(torch.equal(found[name], value) for name, value in average.items())
