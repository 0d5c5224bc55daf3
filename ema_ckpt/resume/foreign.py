"""Averages of other trainers whose names are positions or lack dots, named by the model they are
restored into.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.state_dicts.ema_layouts import find_averages, name_averages
from ema_ckpt.state_dicts.tree import Tree


def named_by_model(tree: Tree, model: nn.Module, *, ordered: bool) -> Mapping[str, Tensor]:
    """The averaged weights of a tree by name; where the checkpoint cannot name them, the model's
    parameters do.

    diffusers and torch_ema store `shadow_params.N` in the order of `model.parameters()`, LitEma
    names without dots.

    Args:
        ordered: the format keeps the order in which tensors were saved.

    Raises:
        SourceError: `unsupported`: the model's parameters fit neither by shape nor by name.
    """
    if tree.problem is None and any("." in name for name in tree.named):
        return tree.named
    parameters = scan_model(model).parameters
    live = {
        h.shard.fqn: _as_stored(h.shard.fqn, h.shard.shape, str(h.shard.dtype)) for h in parameters
    }
    trained = {h.shard.fqn for h in parameters if h.requires_grad}
    head = f"{tree.name}." if tree.name else ""
    inner = [(tensor.name.removeprefix(head), tensor) for tensor in tree.tensors]
    found = find_averages(tree.name, inner, [item.name.removeprefix(head) for item in tree.objects])
    named = name_averages(tree.name, found, live, trained, ordered=ordered)
    if named.problem is not None:
        raise named.problem
    return named.tensors


def _as_stored(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(name, (name,), shape, by_name(dtype), ())
