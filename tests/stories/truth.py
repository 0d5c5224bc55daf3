"""What is in the fixtures (`fixtures/expected.json`), and what torch and safetensors find in a file or directory.

The truth was taken from the tensors in memory when they were saved, never by reading a file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.stories.commands import FIXTURES

EXPECTED = json.loads((FIXTURES / "expected.json").read_text())

# Refused by name, as the table of fixtures/README.md says.
REFUSED = {
    *("odd/safetensors-serialization-w2", "odd/zstd-w2"),
    *("odd/lazy-bits", "odd/lazy-bits.pt"),
}
_TORCH_ONLY = ("complex32", "complex128")
TIES = {"torch/tied.pt": {"head.weight": "embed.weight"}}
# Names that a foreign file only records as tied; they are written out where that is asked for.
RECORDED = {"safetensors/tied-save-model.safetensors": {"head.weight": "embed.weight"}}
_SETTINGS = {"decay", "num_updates", "samples_seen", "config"}
_FLAT_TREES = {"safetensors/net-and-ema.safetensors"}

# Shape, dtype, sha256 of the row-major little-endian bytes.
Fact = tuple[list[int], str, str]


def _fact(entry: dict) -> Fact:
    return entry["shape"], entry["dtype"], entry["sha256"]


def whole(fixture: str) -> dict[str, Fact]:
    """Every tensor of a fixture under its full name."""
    return {name: _fact(entry) for name, entry in EXPECTED[fixture]["tensors"].items()}


def paths(fixture: str) -> dict[str, tuple[str | int, ...]]:
    """The keys under which each tensor was saved."""
    return {name: tuple(entry["path"]) for name, entry in EXPECTED[fixture]["tensors"].items()}


def trees(fixture: str) -> dict[str, dict[str, Fact]]:
    """The weights that `consolidate` writes of each tree, by the nesting recorded when it was saved."""
    found: dict[str, dict[str, Fact]] = {}
    for name, path in paths(fixture).items():
        keys = name.split(".", 1) if fixture in _FLAT_TREES else [str(key) for key in path]
        tree, inside = (keys[0], keys[1:]) if len(keys) > 1 else ("", keys)
        found.setdefault(tree, {})[".".join(inside)] = whole(fixture)[name]
    return {tree: _weights(tree, tensors) for tree, tensors in found.items() if tree != "optimizer"}


def _weights(tree: str, tensors: dict[str, Fact]) -> dict[str, Fact]:
    """An average is written under the plain names of its weights: without its settings."""
    if not tree.endswith("ema"):
        return tensors
    if any(name.startswith("weights.") for name in tensors):
        return {
            name.removeprefix("weights."): fact
            for name, fact in tensors.items()
            if name not in _SETTINGS
        }
    return tensors


def fits_safetensors(tensors: dict[str, Fact]) -> bool:
    """Whether safetensors has a type for each of these tensors."""
    return not any(dtype in _TORCH_ONLY for _, dtype, _ in tensors.values())


def fact_of(tensor: torch.Tensor) -> Fact:
    """What the truth says of a tensor, taken from the tensor."""
    plain = tensor.detach().contiguous()
    raw = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())
    return (
        list(plain.shape),
        str(plain.dtype).removeprefix("torch."),
        hashlib.sha256(raw).hexdigest(),
    )


def facts_of(tensors: dict) -> dict:
    """The facts of each tensor of a flat state dict."""
    return {name: fact_of(tensor) for name, tensor in tensors.items()}


def load(out: Path) -> dict:
    """A checkpoint, read by torch or safetensors."""
    if out.suffix == ".pt":
        return torch.load(out, weights_only=True, mmap=True)
    if out.suffix == ".safetensors":
        return load_file(out)
    return _load_dcp(out) if (out / ".metadata").exists() else load_shards(out)


def load_shards(out: Path) -> dict[str, torch.Tensor]:
    """A Hugging Face directory, by way of its shards; the index has to say the same."""
    held = {shard.name: load_file(shard) for shard in sorted(out.glob("*.safetensors"))}
    loaded = {name: tensor for tensors in held.values() for name, tensor in tensors.items()}
    index_file = out / "model.safetensors.index.json"
    if index_file.exists():
        index = json.loads(index_file.read_text())
        assert index["weight_map"] == {
            name: shard for shard, tensors in held.items() for name in tensors
        }
        assert index["metadata"]["total_size"] == sum(
            t.numel() * t.element_size() for t in loaded.values()
        )
    else:
        assert list(held) == ["model.safetensors"]
    return loaded


def _load_dcp(out: Path) -> dict[str, torch.Tensor]:
    from torch.distributed import checkpoint as dcp

    kept = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in kept.items()
        if hasattr(entry, "properties")
    }
    dcp.load(state, checkpoint_id=out, no_dist=True)
    return state


def leaves(
    value: object, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    """The tensors of a nested state dict, with the keys that lead to them: of dicts as text, of lists as numbers."""
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        items = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield (*path, key), item
        else:
            yield from leaves(item, (*path, key))


def shape_of(value: object) -> object:
    """What safetensors can hold of a state dict, in a form that `==` compares: tensors as facts, types kept."""
    if isinstance(value, torch.Tensor):
        return fact_of(value)
    if isinstance(value, dict):
        kept = {
            key: item
            for key, item in value.items()
            if not str(getattr(item, "dtype", "")).endswith(_TORCH_ONLY)
        }
        return {"dict": {repr(key): shape_of(item) for key, item in kept.items()}}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [shape_of(item) for item in value])
    return repr(value)
