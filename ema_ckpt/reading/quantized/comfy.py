"""How ComfyUI says that a layer is quantised: in a tensor beside its weight, or in the header.

`<layer>.comfy_quant` holds the bytes of a JSON object, as `{"format": "float8_e4m3fn"}`; the text
`_quantization_metadata` of a safetensors header has such an object for each layer, under `layers`.
Names and shapes do not tell the formats apart: the same tensors may be rotated, or their scales lie
in the order of a kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.core.text import shown
from ema_ckpt.reading.box_reader import read_whole

DESCRIPTION = "comfy_quant"
HEADER_KEY = "_quantization_metadata"
# Those whose values are code times scale, in the order of the rows.
_PLAIN_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_blockwise")
# What says nothing of the values, or nothing without another key.
_NEUTRAL = frozenset(
    "format group_size full_precision_matrix_mult orig_dtype orig_shape convrot_groupsize".split()
)
_MAX_NBYTES = 1 << 16


class LayerFormats:
    """The formats of the layers of a checkpoint, as far as ComfyUI has noted them."""

    def __init__(self, catalog: Catalog, stored: Mapping[str, Tensor]) -> None:
        self._catalog = catalog
        self._stored = stored
        self._in_header = _layers(catalog.header_text.get(HEADER_KEY, "{}"))

    def problem(self, weight: str) -> str | None:
        """Return why the values of a weight are not understood; None if nothing says so."""
        layer, dot, leaf = weight.rpartition(".")
        if leaf != "weight":
            return None
        beside = self._stored.get(f"{layer}{dot}{DESCRIPTION}")
        if beside is not None:
            return _problem_of(self._read(beside))
        # The names there may lack what a whole model puts before them.
        while layer:
            if layer in self._in_header:
                return _problem_of(self._in_header[layer])
            layer = layer.partition(".")[2]
        return None

    def _read(self, tensor: Tensor) -> object:
        if tensor.dtype.itemsize != 1 or tensor.nbytes > _MAX_NBYTES:
            return None
        try:
            return _parsed(bytes(read_whole(self._catalog, tensor)))
        except EmaCkptError:
            return None


def _layers(text: str) -> Mapping[str, object]:
    document = _parsed(text)
    layers = document.get("layers") if isinstance(document, dict) else None
    return layers if isinstance(layers, dict) else {}


def _parsed(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _problem_of(document: object) -> str | None:
    if not isinstance(document, dict):
        return f"quantised by ComfyUI, and its {DESCRIPTION} is no JSON object"
    kind = document.get("format")
    if kind not in _PLAIN_FORMATS:
        return f"quantised by ComfyUI as {kind!r}, which is not understood"
    odd = sorted(key for key, value in document.items() if value and key not in _NEUTRAL)
    if odd:
        return f"quantised by ComfyUI as {kind!r} with {shown(odd)}, which is not understood"
    return None
