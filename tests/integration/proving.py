"""What each package's checkpoint goes through: every verb, against the package's own whole state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import ema_ckpt
from tests.integration.table import Row

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Made:
    """A checkpoint that a package wrote.

    `roles`: its trees, all of them. `whole`: the package's own whole state of some of them, names as inside the tree.
    """

    path: Path
    roles: Mapping[str, str]
    whole: Mapping[str, State]
    verdict: str = "sound"
    left_out: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()  # files that its owner needs beside the weights


def assert_same_bits(found: State, expected: State) -> None:
    """Same names, dtypes, shapes and bits; the order may differ."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(other), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def goes_through_all_verbs(row: Row, made: Made, folder: Path) -> None:
    """`inspect`, `consolidate`, `reshard --world-size 3`, `convert` there and back, `diff`, `verify`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_inspected(row, made)
        is_consolidated(row, made, folder)
        is_resharded(row, made, folder)
        is_converted(row, made, folder)
        is_compared(row, made)
        is_verified(row, made, folder)


def is_inspected(row: Row, made: Made) -> None:
    """All trees with their roles, every tensor in one of them, and no warning but of what is left out."""
    seen = ema_ckpt.inspect(made.path)
    assert roles_of(made.path) == dict(made.roles), seen.trees
    assert {tensor.tree for tensor in seen.tensors} <= set(made.roles)
    told = [warning.message for warning in seen.warnings]
    unexpected = [one for one in told if not any(part in one for part in made.left_out)]
    assert not unexpected
    assert all(any(part in one for one in told) for part in made.left_out), told
    roles = [role for role in ("live", "ema", "optimizer", "other") if role in made.roles.values()]
    row.shown("inspect", ", ".join(roles))


def roles_of(path: Path) -> dict[str, str]:
    """The roles of the trees that hold tensors."""
    return {tree.name: tree.role for tree in ema_ckpt.inspect(path).trees if tree.tensors}


def is_consolidated(row: Row, made: Made, folder: Path) -> None:
    for number, (tree, state) in enumerate(made.whole.items()):
        assert_same_bits(whole(made.path, tree, folder / f"whole-{number}.safetensors"), state)
    row.shown("consolidate")


def whole(path: Path, tree: str, out: Path) -> State:
    ema_ckpt.consolidate(path, out, tree=tree)
    return load_file(out)


def is_resharded(row: Row, made: Made, folder: Path) -> None:
    """To three ranks, read back by torch's own loader."""
    out = folder / "on-3"
    written = ema_ckpt.reshard(made.path, out, world_size=3)
    names = {file.path for file in written.files}
    assert {f"__{rank}_0.distcp" for rank in range(3)} <= names
    for name in made.beside:
        source = next(made.path.rglob(name))
        copy = next(out.rglob(name), None)
        skipped = {item.file for item in written.skipped}
        told = str(source.relative_to(made.path)) in skipped
        assert copy is not None or told, f"{name} is neither copied nor told"
        assert copy is None or copy.read_bytes() == source.read_bytes()
    assert ema_ckpt.verify(out, against=made.path).status == "sound"
    loaded = loaded_by_torch(out, folder / "on-3.pt")
    for number, (tree, state) in enumerate(made.whole.items()):
        assert_same_bits(whole(out, tree, folder / f"on-3-{number}.safetensors"), state)
        if made.roles[tree] == "live":
            found = flat(loaded if tree == "" else below(loaded, tree))
            assert_same_bits({name: found[name] for name in state}, state)
    row.shown("reshard")


def loaded_by_torch(checkpoint: Path, file: Path) -> dict[str, Any]:
    """All of a DCP checkpoint, as torch's own `dcp_to_torch_save` puts it together."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, file)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


def below(nested: Mapping[str, Any], path: str) -> Any:
    """What lies under a dotted path; a key may have dots of its own."""
    if path in nested:
        return nested[path]
    key = next(key for key in nested if path.startswith(f"{key}."))
    return below(nested[key], path[len(key) + 1 :])


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """`{dotted name: value}` of dicts and lists in each other."""
    pairs = nested.items() if isinstance(nested, Mapping) else enumerate(nested)
    found: dict[str, Any] = {}
    for key, value in pairs:
        if isinstance(value, (Mapping, list, tuple)):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def is_converted(row: Row, made: Made, folder: Path) -> None:
    """Into another format and back; `verify --against` proves both ways, and the trees come out the same."""
    there, back = {
        "dcp": ("there.safetensors", "back"),
        "rank-files": ("there.safetensors", "back"),
        "safetensors": ("there", "back.safetensors"),
        "torch": ("there", "back.pt"),
    }[ema_ckpt.inspect(made.path).format]
    ema_ckpt.convert(made.path, folder / there)
    ema_ckpt.convert(folder / there, folder / back)
    assert ema_ckpt.verify(folder / back, against=made.path).status == "sound"
    assert roles_of(folder / back) == dict(made.roles)
    for number, (tree, state) in enumerate(made.whole.items()):
        assert_same_bits(whole(folder / back, tree, folder / f"back-{number}.safetensors"), state)
    row.shown("convert")


def is_compared(row: Row, made: Made) -> None:
    """Average against live weights, if it has both: the distance is what torch computes in float64."""
    average = [tree for tree, role in made.roles.items() if role == "ema"]
    live = [tree for tree, role in made.roles.items() if role == "live"]
    if len(average) != 1 or not live or average[0] not in made.whole or live[0] not in made.whole:
        return
    a, b = made.whole[average[0]], made.whole[live[0]]
    found = ema_ckpt.diff(made.path, tree=average[0])
    names = sorted(set(a) & set(b))
    assert (found.tree_a, found.tree_b, found.compared) == (average[0], live[0], len(names))
    apart = sum((a[name].double() - b[name].double()).square().sum() for name in names)
    size = sum(b[name].double().square().sum() for name in names)
    assert found.summary.rel_l2 is not None
    assert abs(found.summary.rel_l2 - float((apart / size).sqrt())) < 1e-9
    row.shown("diff")


def is_verified(row: Row, made: Made, folder: Path) -> None:
    seen = ema_ckpt.verify(made.path)
    assert (seen.status, seen.problems) == (made.verdict, ())
    row.shown("verify", made.verdict)
