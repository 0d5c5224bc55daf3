"""The table of schemes: which stored tensors together are one weight, and how its values follow.

A row names the endings of the parts and the types of the codes; its function looks at the shapes
and returns a `Layout`, or raises what does not fit. Sources of the formats: DeepSeek-V3's
`weight_scale_inv` (arXiv:2412.19437, section 3.3), the compressors of compressed-tensors, gpt-oss'
blocks and scales, OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ema_ckpt.core.catalog import Path, Tensor
from ema_ckpt.core.errors import SourceError
from ema_ckpt.reading.quantized.block_sizes import aligned, block_sizes, misfit
from ema_ckpt.reading.quantized.codes import E8M0, packed_integers
from ema_ckpt.reading.quantized.quantization_config import QuantizationConfig

Ints = tuple[int, ...]

_FP8 = frozenset(
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"},
)
_FP4 = "float4_e2m1fn_x2"
_WORD_BITS = 32


class Layout(NamedTuple):
    """How values follow from the parts: (code − zero point) · scale, in float32.

    Attributes:
        shape: of the values, before a transposition.
        codes, scale_codes, zero_codes: how the bytes of the parts are decoded (`codes.py`).
        scale_shape: of the scales, with as many dims as the values.
        block: values along each dim that share a scale and a zero point.
        rounded: type that values are rounded to before any cast, as the scheme's own package does.
        is_grouped: the codes have one dim more, groups and the bytes of each.
        is_transposed: the last two dims change places.
    """

    shape: Ints
    codes: str
    scale_codes: str
    scale_shape: Ints
    block: Ints
    rounded: str = "float32"
    zero_codes: str | None = None
    is_grouped: bool = False
    is_transposed: bool = False

    @property
    def logical_shape(self) -> Ints:
        """Shape of the tensor that results."""
        if not self.is_transposed:
            return self.shape
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])


class QuantizedTensor(NamedTuple):
    """One weight and the stored tensors that hold it, by role; `codes` and `scale` always are.

    Attributes:
        place: the stored name whose place it takes.
    """

    name: str
    path: Path
    scheme: str
    parts: Mapping[str, Tensor]
    layout: Layout
    place: str


class Found(NamedTuple):
    """Parts of a weight by role, and what else is known when its layout is worked out.

    Attributes:
        shape: the numbers in the part `shape`, if there is one.
    """

    parts: Mapping[str, Tensor]
    config: QuantizationConfig
    shape: Ints | None = None


class Scheme(NamedTuple):
    """A row of the table.

    Attributes:
        ending: of the name of the codes; without it, it is the name of the weight.
        dtypes: of the codes. scale: ending of the scales' name, after that of the weight.
        further: endings of parts that may be there, by role. needed: those that must be.
        refused: endings that make the weight one that is not understood, with the reason.
    """

    name: str
    ending: str
    dtypes: frozenset[str]
    scale: str
    layout: Callable[[Found], Layout]
    further: Mapping[str, str] = {}
    needed: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}


def _scale_codes(scale: Tensor) -> str:
    """How scales are decoded: bytes are exponents of two."""
    if scale.dtype.name in (E8M0, "uint8"):
        return E8M0
    if scale.dtype.kind != "float":
        raise SourceError("unsupported", f"scales of {scale.dtype.name}")
    return scale.dtype.name


def _blocks(found: Found, scale: Ints, shape: Ints) -> Ints:
    """Block sizes: groups inside rows, of equal length, or blocks of which the last may be cut."""
    config = found.config
    by_row = len(shape) < 2 or scale[-2] == shape[-2] != 1
    # Configured blocks of one row are groups of a row, of which the last may be cut.
    are_told = config.group is None and config.block is not None and config.block[0] == 1
    if by_row and not are_told:
        groups = None if config.group is None else (config.group,)
        return block_sizes(scale, shape, groups, may_be_cut=False)
    return block_sizes(scale, shape, config.block, may_be_cut=True)


def _zero_codes(found: Found, rows: int, bits: int | None) -> str | None:
    """How zero points are decoded: as their type says, or packed along the rows."""
    zero, scale = found.parts.get("zero_point"), found.parts["scale"]
    if zero is None:
        return None
    if bits is not None and zero.dtype.name == "int32":
        packed = -(-rows * bits // _WORD_BITS)
        if zero.shape != (*scale.shape[:-2], packed, *scale.shape[-1:]):
            raise misfit(zero.shape, scale.shape)
        return packed_integers(bits)
    if zero.shape != scale.shape:
        raise misfit(zero.shape, scale.shape)
    return zero.dtype.name


def _scaled_values(found: Found) -> Layout:
    """Floats of eight bits with scales for blocks; computed in float32."""
    codes, scale = found.parts["codes"], found.parts["scale"]
    scale_shape = aligned(scale.shape, codes.shape)
    return Layout(
        shape=codes.shape,
        codes=codes.dtype.name,
        scale_codes=_scale_codes(scale),
        scale_shape=scale_shape,
        block=_blocks(found, scale_shape, codes.shape),
    )


def _rounded_values(found: Found) -> Layout:
    """Values of eight bits; the result has the type of the scales, as compressed-tensors has it."""
    layout = _scaled_values(found)
    rounded = "bfloat16" if layout.scale_codes == E8M0 else layout.scale_codes
    zero_codes = _zero_codes(found, layout.shape[0] if layout.shape else 1, None)
    return layout._replace(rounded=rounded, zero_codes=zero_codes)


def _packed_values(found: Found) -> Layout:
    """Integers packed into words along the last dim; the shape lies beside them."""
    codes, scale, shape = found.parts["codes"], found.parts["scale"], found.shape
    if shape is None or len(shape) < 2 or shape[:-1] != codes.shape[:-1]:
        values = "unknown shape" if shape is None else f"shape {list(shape)}"
        message = f"words of shape {list(codes.shape)} do not fit values of {values}"
        raise SourceError("unsupported", message)
    bits = _bits(found.config, shape[-1], codes.shape[-1])
    name = packed_integers(bits)
    if name is None:
        raise SourceError("unsupported", f"integers of {bits} bits, which straddle bytes")
    scale_shape = aligned(scale.shape, shape)
    return Layout(
        shape=shape,
        codes=name,
        scale_codes=_scale_codes(scale),
        scale_shape=scale_shape,
        block=_blocks(found, scale_shape, shape),
        rounded=_scale_codes(scale),
        zero_codes=_zero_codes(found, shape[-2], bits),
    )


def _bits(config: QuantizationConfig, length: int, words: int) -> int:
    """Bits of each of `length` integers that take so many words of 32 bits."""
    fitting = [bits for bits in range(1, 9) if -(-length * bits // _WORD_BITS) == words]
    if config.bits in fitting:
        return config.bits
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise SourceError("unsupported", f"{words} words do not hold {length} packed integers")
    message = f"{words} words for {length} integers: {' or '.join(map(str, fitting))} bits each; "
    raise SourceError("unsupported", message + "config.json, beside the weights, would say")


def _packed_floats(found: Found) -> Layout:
    """Floats of four bits, two a byte, in groups: MXFP4 and NVFP4 of compressed-tensors."""
    codes, scale = found.parts["codes"], found.parts["scale"]
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    is_nvfp4 = scale.dtype.name == "float8_e4m3fn"
    has_global = "global_scale" in found.parts
    if has_global != is_nvfp4 or (not is_nvfp4 and _scale_codes(scale) != E8M0):
        kind = f"scales of {scale.dtype.name} with{'' if has_global else 'out'} a global one"
        code = "incomplete" if is_nvfp4 else "unsupported"
        raise SourceError(code, f"floats of four bits have {kind}")
    scale_shape = aligned(scale.shape, shape)
    return Layout(
        shape=shape,
        codes=_FP4,
        scale_codes=scale.dtype.name if is_nvfp4 else E8M0,
        scale_shape=scale_shape,
        block=block_sizes(scale_shape, shape, None, may_be_cut=False),
        rounded="bfloat16",
    )


def _grouped_floats(found: Found) -> Layout:
    """Floats of four bits in groups that have a dim of their own."""
    codes, scale = found.parts["codes"], found.parts["scale"]
    if len(codes.shape) < 2 or scale.shape != codes.shape[:-1]:
        raise misfit(scale.shape, codes.shape)
    group = codes.shape[-1] * 2
    shape = (*codes.shape[:-2], codes.shape[-2] * group)
    if scale.dtype.name not in (E8M0, "uint8"):
        raise SourceError("unsupported", f"scales of {scale.dtype.name} for floats of four bits")
    block = (*(1,) * (len(shape) - 1), group)
    return Layout(shape, _FP4, E8M0, scale.shape, block, is_grouped=True)


def _transposed_experts(found: Found) -> Layout:
    """The same for experts whose weights transformers holds with rows and columns exchanged."""
    layout = _grouped_floats(found)
    if len(layout.shape) != 3:
        message = f"blocks of shape {list(found.parts['codes'].shape)}: expected experts, rows, "
        raise SourceError("unsupported", message + "groups and bytes")
    return layout._replace(is_transposed=True)


_ZERO = {"zero_point": "_zero_point"}
_UNORDERED = {"_g_idx": "its columns are in another order (actorder)"}

SCHEMES = (
    Scheme("fp8", "", _FP8, "_scale_inv", _scaled_values),
    Scheme("float-quantized", "", _FP8, "_scale", _rounded_values, _ZERO),
    Scheme("int-quantized", "", frozenset({"int8"}), "_scale", _rounded_values, _ZERO),
    Scheme(
        "pack-quantized",
        "_packed",
        frozenset({"int32"}),
        "_scale",
        _packed_values,
        _ZERO,
        needed={"shape": "_shape"},
        refused=_UNORDERED,
    ),
    Scheme(
        "fp4-pack-quantized",
        "_packed",
        frozenset({"uint8"}),
        "_scale",
        _packed_floats,
        {"global_scale": "_global_scale"},
        refused={"_zero_point": "it has zero points, which floats of four bits have not"},
    ),
    Scheme("mxfp4", "_blocks", frozenset({"uint8"}), "_scales", _transposed_experts),
    Scheme("mxfp4-blocks", ".blocks", frozenset({"uint8"}), ".scales", _grouped_floats),
)
"""What is recognised by names. torchao's weights are told by their class, see `torchao.py`."""

SCALED_FP8 = ".scale_weight"
FOREIGN = {
    ".qweight": "GPTQ or AWQ",
    ".SCB": "bitsandbytes (int8)",
    ".absmax": "bitsandbytes (4 bits)",
    ".weight_format": "bitsandbytes (int8)",
    ".W_q": "HQQ",
    ".weight._scale": "optimum-quanto",
    ".weight_scale_2": "ModelOpt or ComfyUI (NVFP4)",
    SCALED_FP8: "ComfyUI (scaled_fp8)",
}
"""Endings of names of other schemes' parts, which nobody here understands."""

FOREIGN_BESIDE = {
    "weight": ("SCB", FOREIGN[".SCB"]),
    "_data": ("_scale", FOREIGN[".weight._scale"]),
}
"""By the last part of the names of their codes, what lies beside these."""

FURTHER_SCALES = {
    "weight_scale_2": "its scales have scales",
    "pre_quant_scale": "what it takes is scaled, and its columns with it",
}
"""Names beside a weight of what changes its values, and why they cannot be computed."""

ACTIVATIONS = tuple(
    f"{which}{part}"
    for which in ("input", "output")
    for part in ("_scale", "_zero_point", "_global_scale")
)
"""Names, beside a weight, of the scales of what the layer takes and gives."""
