"""Recognise weights stored with scales beside them, in a whole checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Diagnostic, Path, Tensor
from ema_ckpt.core.errors import EmaCkptError, SourceError, about
from ema_ckpt.core.names import OPTIMIZER
from ema_ckpt.reading.box_reader import read_whole
from ema_ckpt.reading.quantized.comfy import DESCRIPTION, LayerFormats
from ema_ckpt.reading.quantized.quantization_config import QuantizationConfig, read_config
from ema_ckpt.reading.quantized.schemes import (
    ACTIVATIONS,
    FOREIGN,
    FOREIGN_BESIDE,
    FURTHER_SCALES,
    SCALED_FP8,
    SCHEMES,
    Found,
    QuantizedTensor,
    Scheme,
)
from ema_ckpt.reading.quantized.torchao import (
    Description,
    described_in_header,
    described_in_subclass,
    weight_of,
)
from ema_ckpt.state_dicts.tree import list_trees

Ints = tuple[int, ...]
_WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
_ENDINGS = (*FOREIGN, *_WEIGHT_SCALES)
_SCALES = tuple([scheme.scale for scheme in SCHEMES])
_MAX_DIMS = 8
_MAX_SIZE = 2**40


class Recognised(NamedTuple):
    """The quantised weights of a checkpoint.

    Attributes:
        tensors: those whose values can be computed.
        refused: why others cannot, by the stored name of their codes.
        companions: what has no meaning without the codes: scales of what layers take and give,
            and descriptions.
        is_known: False if `config.json` names a method that is not understood.
    """

    tensors: tuple[QuantizedTensor, ...] = ()
    refused: Mapping[str, Diagnostic] = {}
    companions: tuple[Tensor, ...] = ()
    is_known: bool = True


def recognise(catalog: Catalog, *, lenient: bool = False) -> Recognised:
    """Recognise quantised weights outside optimizer state; reads `config.json` and shapes.

    Raises:
        SourceError: `unreadable` for a `config.json` that is no JSON object, unless `lenient`.
    """
    if not any(map(is_of_a_scheme, catalog.tensors)):
        return Recognised()
    stored = outside_optimizers(catalog)
    described = described_in_header(catalog.header_text, stored)
    try:
        config = read_config(catalog)
    except SourceError:
        if not lenient:
            raise
        config = QuantizationConfig()
    search = _Search(catalog, stored, config)
    for name, description in described.items():
        search.look_at_description(name, description)
    for tensor in stored.values():
        search.look_at(tensor)
    companions = tuple(search.companions_of(search.tensors))
    return Recognised(tuple(search.tensors), search.refused, companions, config.is_known)


def outside_optimizers(catalog: Catalog) -> dict[str, Tensor]:
    """Return the tensors that are no optimizer's state, by stored name."""
    moments = set[int]()
    for tree in list_trees(catalog):
        if tree.role == OPTIMIZER:
            moments.update(map(id, tree.tensors))
    return {tensor.name: tensor for tensor in catalog.tensors if id(tensor) not in moments}


def is_of_a_scheme(tensor: Tensor) -> bool:
    """Whether a tensor may be a part, so that checkpoints without any are passed over fast."""
    if tensor.dtype.kind == "low" or tensor.subclass is not None:
        return True
    return _is_short_integer(tensor) or tensor.name.endswith(_ENDINGS)


def _is_short_integer(tensor: Tensor) -> bool:
    # Positions and counters, which are of 64 bits, lie in layers that nobody quantised, too.
    return tensor.dtype.kind == "int" and tensor.dtype.itemsize < 8


def coded_layers(tensors: Iterable[Tensor]) -> set[str]:
    """Return where codes may lie: what holds short integers or floats of eight bits, and these."""
    layers = set[str]()
    for tensor in tensors:
        if tensor.dtype.kind == "low" or _is_short_integer(tensor):
            layer, _, leaf = tensor.name.rpartition(".")
            layers.update((tensor.name, layer))
            if leaf.startswith("_"):  # an attribute of what lies in the layer
                layers.add(layer.rpartition(".")[0])
    return layers


def fitting_schemes(tensor: Tensor) -> list[Scheme]:
    """List the schemes whose codes a tensor may be, by its name and type."""
    of_type = [scheme for scheme in SCHEMES if tensor.dtype.name in scheme.dtypes]
    return [scheme for scheme in of_type if tensor.name.endswith(scheme.ending)]


def are_codes(tensor: Tensor, fitting: Sequence[Scheme]) -> bool:
    """Whether a tensor without scales has to be the codes of a weight, by its type or its name."""
    if not fitting or tensor.name.endswith(_SCALES):
        return False
    return tensor.dtype.kind == "low" or _is_weight(fitting[0], tensor.name)


def is_scale_of_weight(name: str) -> bool:
    """Whether a name is that of the scales of a layer's `weight`."""
    return name.rpartition(".")[2] in _WEIGHT_SCALES


class _Search:
    """Weights found so far among the stored tensors."""

    def __init__(
        self, catalog: Catalog, stored: Mapping[str, Tensor], config: QuantizationConfig
    ) -> None:
        self.tensors: list[QuantizedTensor] = []
        self.refused: dict[str, Diagnostic] = {}
        self._catalog = catalog
        self._stored = stored
        self._config = config
        self._formats = LayerFormats(catalog, stored)
        self._coded = coded_layers(stored.values())
        self._taken: set[str] = set()
        self._scaled = set[str]()  # layers with floats beside the codes of an unknown method
        if not config.is_known:
            floating = [tensor for tensor in stored.values() if tensor.dtype.is_floating]
            self._scaled.update(tensor.name.rpartition(".")[0] for tensor in floating)

    def look_at(self, tensor: Tensor) -> None:
        """Add the weight that a tensor holds the codes of, or why it is not understood."""
        if tensor.name in self._taken:
            return
        subclass = described_in_subclass(tensor)
        fitting = fitting_schemes(tensor)
        problem = self._formats.problem(tensor.name)
        if problem is not None:
            self._refuse(tensor, "unsupported", problem)
        elif subclass is not None:
            self._add_described(tensor.name, tensor, subclass)
        elif not self._add_scaled(tensor, fitting):
            self._doubt(tensor, fitting)

    def _add_scaled(self, tensor: Tensor, fitting: list[Scheme]) -> bool:
        """Add the weight of the first scheme whose scales are there, if there is one."""
        scales = {weight_name(scheme, tensor.name) + scheme.scale for scheme in fitting}
        several = sorted(scales & self._stored.keys())
        if len(several) > 1:
            problem = f"it has several scales, {' and '.join(map(repr, several))}"
            self._refuse(tensor, "unsupported", f"{problem}, and nothing tells which are meant")
            return True
        for scheme in fitting:
            weight = weight_name(scheme, tensor.name)
            if weight + scheme.scale not in self._stored:
                continue
            try:
                self.tensors.append(self._weight(scheme, weight, tensor))
            except EmaCkptError as error:
                self._refuse(tensor, error.code, f"{scheme.name}: {error}")
            return True
        return False

    def _doubt(self, tensor: Tensor, fitting: list[Scheme]) -> None:
        """Refuse a tensor that is part of something that is not understood, or not whole."""
        name = tensor.name
        foreign = self._foreign_kind(tensor)
        if foreign is not None:
            reason = f"quantised by {foreign}, which is not understood"
            self._refuse(tensor, "unsupported", reason)
        elif is_scale_of_weight(name):
            self._look_for_weight(tensor)
        elif name.endswith(_SCALES):  # of eight bits
            return
        elif are_codes(tensor, fitting):
            scales = [repr(weight_name(one, name) + one.scale) for one in fitting]
            reason = f"its scales are missing: no {' or '.join(scales)}"
            self._refuse(tensor, "incomplete", reason)
        elif tensor.dtype.kind == "low":
            reason = f"{tensor.dtype.name} without a scheme that is understood"
            self._refuse(tensor, "unsupported", reason)
        elif self._may_be_codes(tensor):
            reason = f"quantised by {self._config.method!r}, which is not understood"
            self._refuse(tensor, "unsupported", reason)

    def _foreign_kind(self, tensor: Tensor) -> str | None:
        """Name the scheme that a tensor shows by its name, or by what lies beside a weight."""
        layer, _, leaf = tensor.name.rpartition(".")
        for ending, kind in FOREIGN.items():
            if tensor.name.endswith(ending) and layer in self._coded:
                return kind
        if tensor.name in self._coded and leaf in FOREIGN_BESIDE:
            beside, kind = FOREIGN_BESIDE[leaf]
            if f"{layer}.{beside}" in self._stored:
                return kind
        if leaf != "weight":
            return None
        if tensor.dtype.name == "uint32" and f"{layer}.scales" in self._stored:
            return "MLX"
        is_scaled = tensor.dtype.kind == "low" and layer + SCALED_FP8 in self._stored
        return FOREIGN[SCALED_FP8] if is_scaled else None

    def _may_be_codes(self, tensor: Tensor) -> bool:
        """Whether a method that is not understood may have made these integers."""
        is_scaled = tensor.name.rpartition(".")[0] in self._scaled
        return is_scaled and _is_short_integer(tensor) and tensor.shape != ()

    def _look_for_weight(self, scale: Tensor) -> None:
        """Refuse scales without any tensor that they could be of."""
        weight = scale.name.removesuffix("_inv").removesuffix("_scale")
        forms = [weight + ending for ending in dict.fromkeys(one.ending for one in SCHEMES)]
        if not any(name in self._stored for name in forms):
            self._refuse(scale, "incomplete", f"its weight is missing: no {weight!r}")

    def look_at_description(self, name: str, described: Description) -> None:
        """Add a weight of torchao, by its description in the header."""
        parts = list(described.parts.values())
        self._taken.update(part.name for part in parts)
        if parts:
            codes = described.parts.get("qdata", parts[0])
            self._add_described(name, codes, described)

    def _add_described(self, name: str, tensor: Tensor, described: Description) -> None:
        try:
            if name != tensor.name and name in self._stored:
                raise SourceError("name-collision", f"{name!r} is there as well")
            self.tensors.append(weight_of(name, tensor, described))
        except EmaCkptError as error:
            self._refuse(tensor, error.code, str(error))

    def _weight(self, scheme: Scheme, weight: str, codes: Tensor) -> QuantizedTensor:
        parts = {"codes": codes, "scale": self._stored[weight + scheme.scale]}
        self._refuse_further_parts(scheme, weight)
        for ending in scheme.needed.values():
            if weight + ending not in self._stored:
                raise SourceError("incomplete", f"{weight + ending!r} is missing")
        for role, ending in {**scheme.needed, **scheme.further}.items():
            if weight + ending in self._stored:
                parts[role] = self._stored[weight + ending]
        if weight != codes.name and weight in self._stored:
            raise SourceError("name-collision", f"{weight!r} is there as well")
        for part in parts.values():
            if part.refusal is not None:
                raise SourceError(part.refusal.code, f"{part.name!r}: {part.refusal.message}")
        shape = _integers(self._catalog, parts["shape"]) if "shape" in parts else None
        layout = scheme.layout(Found(parts, self._config, shape))
        path = _weight_path(codes, scheme.ending, weight)
        return QuantizedTensor(weight, path, scheme.name, parts, layout, codes.name)

    def _refuse_further_parts(self, scheme: Scheme, weight: str) -> None:
        """Raise SourceError `unsupported` if something beside a weight changes its values."""
        layer, dot, _ = weight.rpartition(".")
        parts = {weight + ending: reason for ending, reason in scheme.refused.items()}
        parts |= {f"{layer}{dot}{name}": reason for name, reason in FURTHER_SCALES.items()}
        for name, reason in parts.items():
            if name in self._stored:
                raise SourceError("unsupported", f"{reason}: {name!r}")

    def _refuse(self, tensor: Tensor, code: str, reason: str) -> None:
        self.refused[tensor.name] = Diagnostic(code, reason)

    def companions_of(self, tensors: list[QuantizedTensor]) -> Iterator[Tensor]:
        """Yield what tells of the layers of these weights and is none of their parts."""
        layers = dict.fromkeys(tensor.name.rpartition(".")[0] for tensor in tensors)
        for layer in layers:
            for ending in (*ACTIVATIONS, DESCRIPTION):
                tensor = self._stored.get(f"{layer}.{ending}" if layer else ending)
                if tensor is not None:
                    yield tensor


def weight_name(scheme: Scheme, codes: str) -> str:
    """Name of the weight whose codes have that name."""
    return codes.removesuffix(scheme.ending) if scheme.ending else codes


def _is_weight(scheme: Scheme, name: str) -> bool:
    """Whether codes without scales are a weight by their name: `weight`, or a form of it."""
    return weight_name(scheme, name).rpartition(".")[2] == "weight"


def _weight_path(codes: Tensor, ending: str, weight: str) -> Path:
    """Path of the weight: that of the codes, with another last key."""
    if len(codes.path) == 1:
        return (weight,)
    last = codes.path[-1]
    if ending and isinstance(last, str):
        if last == ending.removeprefix("."):  # a key of its own
            return codes.path[:-1]
        return (*codes.path[:-1], last.removesuffix(ending))
    return codes.path


def _integers(catalog: Catalog, tensor: Tensor) -> Ints:
    """Read the few integers of a tensor that holds a shape."""
    import numpy as np

    is_shape = tensor.dtype.kind == "int" and len(tensor.shape) == 1
    if not is_shape or not 0 < tensor.numel <= _MAX_DIMS:
        message = f"{tensor.name!r} is {tensor.dtype.name} {list(tensor.shape)}, not a shape"
        raise SourceError("unsupported", message)
    try:
        data = read_whole(catalog, tensor)
    except SourceError as error:
        raise about(error, tensor=tensor.name) from None
    sizes = np.frombuffer(data, tensor.dtype.numpy).tolist()
    if not all(0 <= size < _MAX_SIZE for size in sizes):
        raise SourceError("unsupported", f"{tensor.name!r} holds {sizes}, not a shape")
    return tuple(sizes)
