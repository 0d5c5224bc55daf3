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
@pytest.mark.parametrize("nested", [True, False])
def test_a_tree_inside_wrapped_weights(inner: str, nested: bool, tmp_path: Path) -> None:
    """One module was wrapped: its part loses the prefix as the rest does."""
    plain = {name: torch.randn(2) for name in ("net.w", f"{inner}.net.w", "b")}
    state = {f"module.{name}": tensor for name, tensor in plain.items()}
    source = torch_at(tmp_path / "a.pt", {"model": state} if nested else {**state})
    ema_ckpt.convert(source, tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    torch.testing.assert_close(found["model"] if nested else found, plain)
    for old, new in (("b.pt", "c.safetensors"), ("c.safetensors", "d"), ("d", "e.pt")):
        ema_ckpt.convert(tmp_path / old, tmp_path / new)
        checked = ema_ckpt.verify(tmp_path / new, against=source)
        assert (checked.status, checked.warnings) == ("sound", ())
    ema_ckpt.reshard(source, tmp_path / "f", 1)
    with ema_ckpt.open(tmp_path / "f") as kept:
        assert f"{'model.' if nested else ''}module.{inner}.net.w" in kept


def test_a_copy_with_the_prefix_of_an_inner_tree_is_sound(tmp_path: Path) -> None:
    """`convert` wrote such names."""
    state = {name: torch.randn(2) for name in ("module.net.w", "module.model_ema.module.net.w")}
    source = torch_at(tmp_path / "a.pt", {"model": state})
    mixed = dict(zip(("net.w", "module.model_ema.net.w"), state.values(), strict=True))
    checked = ema_ckpt.verify(torch_at(tmp_path / "b.pt", {"model": mixed}), against=source)
    assert (checked.status, checked.warnings) == ("sound", ())


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"module": {"net.w": 1, "model_ema.net.w": 2}, "module.b": 3}, None),
        ({"module": {"module.net.w": 1, "module.ema.net.w": 2}}, ["net.w", "ema.net.w"]),
        ({"model": {"net.w": 1, "module.model_ema.net.w": 2}}, None),
        ({"shadow": {"x.module.ema.module": {"a": 1, "_orig_mod.c": 2}}}, None),
    ],
    ids=["a tree of that name", "wrapped inside it", "weights that are not wrapped", "keys"],
)
def test_the_name_of_a_tree_stays(
    state: dict[str, dict[str, object]], names: list[str] | None, tmp_path: Path
) -> None:
    def filled(value: object) -> object:
        if isinstance(value, dict):
            return {name: filled(inner) for name, inner in value.items()}
        return torch.full((2,), float(str(value)))

    source = torch_at(tmp_path / "a.pt", filled(state))
    ema_ckpt.convert(source, tmp_path / "b.pt")
    tree = next(iter(state))
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert tree in found
    if names is not None:
        assert list(found[tree]) == names
    elif tree != "shadow":
        assert list(found[tree]) == list(state[tree])
    checked = ema_ckpt.verify(tmp_path / "b.pt", against=source)
    assert (checked.status, checked.warnings) == ("sound", ())


def test_empty_keys_beside_wrappers_stay(tmp_path: Path) -> None:
    """`named_modules` calls the module itself `""`."""
    modules = {"": {"module.w": torch.ones(2), "b": torch.zeros(2)}, "module.w": torch.ones(3)}
    dotted = {"module.a.": {"w": torch.ones(4)}, "module.": {"c": torch.ones(5)}}
    source = torch_at(tmp_path / "a.pt", {"model": modules | dotted})
    ema_ckpt.convert(source, tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    assert {name: list(found[name]) for name in ("", "a.")} == {"": ["w", "b", "c"], "a.": ["w"]}
    assert ema_ckpt.verify(tmp_path / "b.pt", against=source).warnings == ()


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
