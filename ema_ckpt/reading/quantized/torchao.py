"""Weights of torchao, told by the class that its tensors had.

In safetensors, `flatten_tensor_state_dict` names the parts of `layer.weight` `layer._weight_qdata`
and so on, and describes the class in the header. In a torch file they lie inside the subclass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ema_ckpt.core.catalog import Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import shown
from ema_ckpt.reading.quantized.block_sizes import aligned, block_sizes, misfit
from ema_ckpt.reading.quantized.codes import E8M0
from ema_ckpt.reading.quantized.schemes import Layout, QuantizedTensor

_MODULE = "torchao."
_PLAIN = "Tensor"
_NAMES = "tensor_names"
# What each part is called there, and here.
_ROLES = {"qdata": "codes", "scale": "scale", "zero_point": "zero_point"}
_MAX_DIMS = 8


class Description(NamedTuple):
    """A tensor of torchao: its class, attributes, and parts by torchao's names of them.

    Attributes:
        lacking: stored names of parts that are not there.
    """

    kind: str
    attributes: Mapping[str, object]
    parts: Mapping[str, Tensor]
    lacking: tuple[str, ...] = ()


def described_in_header(
    text: Mapping[str, str], stored: Mapping[str, Tensor]
) -> dict[str, Description]:
    """Read the descriptions in a safetensors header: those of quantised tensors, by name."""
    found: dict[str, Description] = {}
    for name, value in text.items() if _NAMES in text else ():
        document = _parsed(value)
        kind, parts = document.get("_type"), document.get("_tensor_data_names")
        if isinstance(kind, str) and kind != _PLAIN and isinstance(parts, list):
            attributes = document.get("_data")
            fields = attributes if isinstance(attributes, dict) else {}
            found[name] = _with_parts(Description(kind, fields, {}), name, parts, stored)
    return found


def _with_parts(
    described: Description, name: str, parts: Sequence[object], stored: Mapping[str, Tensor]
) -> Description:
    """Add the parts of a tensor, as far as they are stored."""
    layer, dot, leaf = name.rpartition(".")
    present: dict[str, Tensor] = {}
    lacking: list[str] = []
    for part in parts:
        full = f"{layer}{dot}_{leaf}_{part}"
        if full in stored:
            present[str(part)] = stored[full]
        else:
            lacking.append(full)
    return described._replace(parts=present, lacking=tuple(lacking))


def header_keys(text: Mapping[str, str]) -> set[str]:
    """Keys of a safetensors header that describe tensors for torchao."""
    if _NAMES not in text:
        return set()
    return {_NAMES, *(name for name, value in text.items() if "_type" in _parsed(value))}


def described_in_subclass(tensor: Tensor) -> Description | None:
    """Describe a tensor subclass of torchao that a torch file holds."""
    wrapped = tensor.subclass
    if wrapped is None or not wrapped.kind.startswith(_MODULE):
        return None
    attributes = {"dtype": tensor.dtype.name, **wrapped.attributes}
    return Description(wrapped.kind.rpartition(".")[2], attributes, wrapped.parts)


def weight_of(name: str, tensor: Tensor, described: Description) -> QuantizedTensor:
    """The weight that a description tells of, in the place of `tensor`.

    Raises:
        SourceError: `unsupported` for classes and forms that are not understood; `incomplete`.
    """
    if described.lacking:
        raise SourceError("incomplete", f"{shown(described.lacking)} is missing")
    layout_of = _CLASSES.get(described.kind)
    if layout_of is None:
        raise SourceError("unsupported", f"torchao's {described.kind} is not understood")
    odd = sorted(described.parts.keys() - _ROLES.keys())
    if odd:
        raise SourceError("unsupported", f"torchao's {described.kind} with {', '.join(odd)}")
    parts = {_ROLES[name]: part for name, part in described.parts.items()}
    if not {"codes", "scale"} <= parts.keys():
        raise SourceError("incomplete", f"torchao's {described.kind} without qdata or scale")
    layout = layout_of(parts, described.attributes)
    path = tensor.path if tensor.name == name else (*tensor.path[:-1], _last_key(tensor, name))
    return QuantizedTensor(name, path, f"torchao-{described.kind}", parts, layout, tensor.name)


def _last_key(tensor: Tensor, name: str) -> str | int:
    return name if len(tensor.path) == 1 else name.rpartition(".")[2]


# Classes.


def _scaled(parts: Mapping[str, Tensor], attributes: Mapping[str, object]) -> Layout:
    """Codes of eight bits, computed in float32."""
    codes, scale = parts["codes"], parts["scale"]
    if scale.dtype.kind != "float":
        raise SourceError("unsupported", f"scales of {scale.dtype.name}")
    scale_shape = aligned(scale.shape, codes.shape)
    block = _integers(attributes.get("block_size"))
    zero = parts.get("zero_point")
    if zero is not None and zero.shape != scale.shape:
        raise misfit(zero.shape, scale.shape)
    return Layout(
        shape=codes.shape,
        codes=codes.dtype.name,
        scale_codes=scale.dtype.name,
        scale_shape=scale_shape,
        block=block_sizes(scale_shape, codes.shape, block, may_be_cut=False),
        zero_codes=None if zero is None else zero.dtype.name,
    )


def _unpacked(parts: Mapping[str, Tensor], attributes: Mapping[str, object]) -> Layout:
    """Integers of fewer bits, one a byte; torchao computes them in the type of the tensor."""
    dtype = _dtype(attributes.get("dtype"))
    if dtype not in ("float32", "bfloat16", "float16"):
        raise SourceError("unsupported", f"values of {dtype}")
    return _scaled(parts, attributes)._replace(rounded=dtype)


def _micro_scaled(parts: Mapping[str, Tensor], attributes: Mapping[str, object]) -> Layout:
    """Groups with exponents of two for scales."""
    codes, scale = parts["codes"], parts["scale"]
    if attributes.get("is_swizzled_scales") is not False:
        raise SourceError("unsupported", "scales in the order of a kernel (is_swizzled_scales)")
    element = _dtype(attributes.get("elem_dtype"))
    is_packed = element == "float4_e2m1fn_x2"
    if not is_packed and element != codes.dtype.name:
        raise SourceError("unsupported", f"elements of {element} in {codes.dtype.name}")
    if scale.dtype.name not in (E8M0, "uint8") or not codes.shape:
        raise SourceError("unsupported", f"scales of {scale.dtype.name}")
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if is_packed else 1))
    group = attributes.get("block_size")
    configured = (group,) if isinstance(group, int) else None
    scale_shape = aligned(scale.shape, shape)
    block = block_sizes(scale_shape, shape, configured, may_be_cut=False)
    return Layout(shape, element, E8M0, scale_shape, block)


_CLASSES: dict[str, Callable[[Mapping[str, Tensor], Mapping[str, object]], Layout]] = {
    "Float8Tensor": _scaled,
    "Int8Tensor": _scaled,
    "IntxUnpackedToInt8Tensor": _unpacked,
    "MXTensor": _micro_scaled,
}


def _parsed(text: str) -> dict[str, object]:
    if not text.startswith("{"):
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _dtype(value: object) -> str:
    """Name of a torch dtype, as a header or a pickle has it."""
    if isinstance(value, dict):
        value = value.get("_data")
    return str(value if isinstance(value, str) else getattr(value, "name", value))


def _integers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= _MAX_DIMS:
        return None
    if not all(type(size) is int and size > 0 for size in value):
        return None
    return tuple(value)
