"""Kinds of tensors: those with elements in memory of their own are averaged and read back."""

from __future__ import annotations

import torch
from torch import Tensor

from ema_ckpt.core.dtypes import DTYPE_NAMES
from ema_ckpt.core.errors import StateError

# torchao's weights for training in 8 bits: the full values are in one plain tensor, and only what
# is computed with them is rounded.
_INNER = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "Float8TrainingWeightWrapperTensor": "_data",
    "MXFP8TrainingWeightWrapperTensor": "_data",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
}
_REMEDY = "give what it stands for as plain tensors (dequantize(), to_dense(), materialised)"


def plain_values(tensor: Tensor) -> Tensor:
    """Return a tensor's values, without autograd, out of a class that only marks how to compute."""
    inner = _INNER.get(type(tensor).__name__)
    return (tensor if inner is None else getattr(tensor, inner)).detach()


def refuse_unreadable(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose elements no reader of a checkpoint would bring back.

    Args:
        tensor: as this rank has it; of a DTensor the local one.

    Raises:
        StateError: `unsupported`: a subclass that keeps its values in other tensors, a sparse,
            quantised, nested or `meta` tensor, or an element type without a reader.
    """
    kind = _unreadable_kind(tensor)
    if kind is not None:
        message = f"{name!r} {kind}, which no reader brings back: {_REMEDY}"
        raise StateError("unsupported", message, tensor=name)


def _unreadable_kind(tensor: Tensor) -> str | None:
    kind = type(tensor)
    # Without a dispatch of its own a subclass is a plain tensor with more methods.
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is of the class {kind.__module__}.{kind.__qualname__}"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device, without values"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return None if dtype in DTYPE_NAMES else f"has elements of type {dtype}"


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in host memory as they are meant, in a tensor of torch's class.

    Conjugation and negation that are only marked are carried out.
    """
    return tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()
