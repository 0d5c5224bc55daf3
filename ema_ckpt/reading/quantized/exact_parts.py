"""Names of the parts of quantised weights, whose numbers mean other values if they are rounded."""

from __future__ import annotations

import re

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.reading.quantized.recognise import (
    Recognised,
    coded_layers,
    is_scale_of_weight,
    recognise,
)

# What other schemes have beside their codes, too: scales of scales, tables of codes, zero points.
_PART = re.compile("scale|zero|_shift|biases|absmax|quant_map|code|SCB")
_OF_CACHE = re.compile("[kqv]_scale")


def exact_parts(catalog: Catalog, *, dequantized: bool = False) -> frozenset[str]:
    """Return the stored names of scales, zero points and whatever else belongs to codes.

    Of weights that are not understood these are told by their names, beside the codes; of a method
    that is not understood they are all that lies there, and a level below, but biases.

    Args:
        dequantized: those that stay where the weights that are understood become values.
    """
    found = recognise(catalog, lenient=True)
    layers = {_layer(name) for name in found.refused}
    names = set[str]()
    if not dequantized:
        names.update(_understood(found))
        layers.update(_layer(weight.place) for weight in found.tensors)
    scaled = {_layer(tensor.name) for tensor in catalog.tensors if is_scale_of_weight(tensor.name)}
    layers |= scaled & coded_layers(catalog.tensors)
    # Scales of activations lie beside a weight whose parts are a level below.
    layers |= {_layer(layer) for layer in layers if layer.endswith(".weight")}
    for tensor in catalog.tensors if layers else ():
        leaf = tensor.name.rpartition(".")[2]
        if _OF_CACHE.fullmatch(leaf) or _is_beside(tensor.name, layers, found.is_known):
            names.add(tensor.name)
    return frozenset(names)


def understood_parts(catalog: Catalog) -> set[str]:
    """Return the stored names of all parts of weights whose values can be computed."""
    return _understood(recognise(catalog, lenient=True))


def _is_beside(name: str, layers: set[str], is_known: bool) -> bool:
    """Whether a tensor beside codes belongs to them: by its name, or by any if none is known."""
    layer, leaf = _layer(name), name.rpartition(".")[2]
    if is_known:
        return layer in layers and _PART.search(leaf) is not None
    # A level below too, but not below the root: that would be the whole model.
    return leaf != "bias" and (layer in layers or (_layer(layer) or layer) in layers)


def _understood(found: Recognised) -> set[str]:
    parts = {part.name for weight in found.tensors for part in weight.parts.values()}
    return parts.union(part.name for part in found.companions)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
