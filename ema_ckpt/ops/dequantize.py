"""Quantised weights in the verbs: described, compared and written as the values they stand for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError, UsageError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.ops.results.quantized import QuantizedEntry, described
from ema_ckpt.storage.files import is_url

if TYPE_CHECKING:
    from ema_ckpt.ops.results.write import Skipped
    from ema_ckpt.reading.quantized.recognise import Recognised
    from ema_ckpt.reading.quantized.schemes import QuantizedTensor
    from ema_ckpt.state_dicts.selection import Selection, SelectionOptions
    from ema_ckpt.writing.options import WriteOptions

_COMPANION = "tells of a quantised layer, whose weight is written as plain values"


class Dequantized(NamedTuple):
    """A checkpoint with the values of its quantised weights in place of their parts.

    Attributes:
        weights: those that were quantised. skipped: what has no meaning without them.
        has_config: whether the model's `config.json` says that it is quantised.
        is_quantized: whether there is any quantised weight, even one that is not understood.
        refused: why weights are left as they are stored, by the name of their codes.
    """

    catalog: Catalog
    weights: tuple[QuantizedTensor, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    has_config: bool = False
    is_quantized: bool = False
    refused: Mapping[str, Diagnostic] = {}

    def entries(
        self, written: Iterable[Tensor], made_from: Mapping[str, Sequence[Tensor]]
    ) -> tuple[QuantizedEntry, ...] | None:
        """Describe the weights that are written, or that rules made others of; None if none is."""
        names = set[str]()
        for tensor in written:
            names.update(source.name for source in made_from.get(tensor.name, (tensor,)))
        return described([weight for weight in self.weights if weight.name in names])

    @property
    def named_files(self) -> tuple[str, ...]:
        """Files beside the weights that `warnings` tells of."""
        from ema_ckpt.reading.quantized.quantization_config import CONFIG_FILE

        return (CONFIG_FILE,) if self.has_config else ()

    def warnings(self, copied: Collection[str] = ()) -> Iterator[Diagnostic]:
        """Say what became of the settings of the quantisation; `copied` are files beside."""
        if not self.has_config:
            return
        from ema_ckpt.reading.quantized.quantization_config import CONFIG_FILE

        if CONFIG_FILE in copied:
            message = f"{CONFIG_FILE} is written without its quantization_config, which is no "
            message += "longer true of these weights"
        else:
            message = f"{CONFIG_FILE} of the source has a quantization_config and is not copied: "
            message += "if you put it beside these weights, leave quantization_config out"
        yield Diagnostic("quantization-config", message)


def dequantize(catalog: Catalog, options: WriteOptions, *, required: bool = True) -> Dequantized:
    """Replace quantised weights by their values, if the options ask for it.

    A weight that is not understood stays under the name of its codes, and refuses to be read.

    Raises:
        UsageError: `empty-selection` if none is quantised, unless it is not `required`.
        SourceError: `unsupported` for a method that nobody here understands, by its name.
    """
    if options.dequantize is None:
        return Dequantized(catalog)
    from ema_ckpt.ops.results.write import Skipped
    from ema_ckpt.reading.quantized.dequantized import with_values
    from ema_ckpt.reading.quantized.quantization_config import (
        CONFIG_FILE,
        read_config,
        without_quantization,
    )
    from ema_ckpt.reading.quantized.recognise import recognise

    config = read_config(catalog)
    if not config.is_known:
        message = f"{catalog.resolved}: quantised by {config.method!r}, which is not understood; "
        raise SourceError("unsupported", message + "without --dequantize it is copied as it is")
    found = recognise(catalog)
    if not found.tensors and not found.refused:
        if required:
            refuse_unquantized(catalog, options)
        return Dequantized(catalog)
    edited = without_quantization(catalog)
    refused = tuple([_refused(tensor, found) for tensor in catalog.tensors])
    is_remote = is_url(catalog.source.root)
    changed = with_values(
        _without(replace(catalog, tensors=refused), found.companions),
        found.tensors,
        options.dequantize,
        verify=options.verify,
        kept_nbytes=options.kept_nbytes(is_remote, options.most_workers(is_remote)),
        replaced={} if edited is None else {CONFIG_FILE: edited},
    )
    made_by = catalog.made_by + _made_by(found.tensors, options.dequantize.name)
    changed = replace(changed, made_by=made_by)
    skipped = [Skipped.tensor(tensor, tensor.name, _COMPANION) for tensor in found.companions]
    return Dequantized(changed, found.tensors, tuple(skipped), edited is not None, True)


def _made_by(weights: Sequence[QuantizedTensor], values: str) -> str:
    """Digest of how values are computed: an interrupted run that computed others starts anew."""
    import hashlib

    lines = [values]
    for weight in weights:
        parts = {role: part.name for role, part in sorted(weight.parts.items())}
        lines.append(f"{weight.name} {weight.scheme} {tuple(weight.layout)} {parts}")
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def with_exact_parts(
    chosen: SelectionOptions, stored: Catalog, options: WriteOptions, ruled: Catalog
) -> SelectionOptions:
    """Return the selection of a verb, which casts no part of a quantised weight of `stored`.

    Args:
        ruled: what rules made of it: what is made of a part is one.
    """
    if chosen.dtype is None:
        return chosen
    from ema_ckpt.reading.quantized.exact_parts import exact_parts

    parts = exact_parts(stored, dequantized=options.dequantize is not None)
    made = ruled.made_from
    names = {name for name in parts if name not in made} if parts else set()
    for name, sources in made.items() if parts else ():
        if any(source.name in parts for source in sources):
            names.add(name)
    return chosen._replace(exact=frozenset(names))


def exact_warnings(selection: Selection) -> Iterator[Diagnostic]:
    """Say what keeps its type, though `--dtype` asks for another: parts of quantised weights."""
    if not selection.exact:
        if selection.low:
            count = counted(len(selection.low), "tensor")
            message = f"--dtype does not cast {count} of eight bits or fewer, which are codes of"
            message += f" scaled formats as a rule: {shown(selection.low)}"
            yield Diagnostic("low-kept", message)
        return
    parts = f"{counted(len(selection.exact), 'part')} of quantised weights"
    message = f"--dtype does not cast {parts}, as rounded scales would change the weights: "
    remedy = "--dequantize writes weights of known schemes as plain values"
    yield Diagnostic("scales-kept", f"{message}{shown(selection.exact)}; {remedy}")


def split_warnings(
    stored: Catalog, selection: Selection, options: WriteOptions, ruled: Catalog
) -> Iterator[Diagnostic]:
    """Warn of quantised weights of `stored` whose codes are written without their scales.

    Args:
        ruled: what rules made of it.
    """
    if options.dequantize is not None:
        return
    written, made_from = set[str](), ruled.made_from
    for entry in selection.entries:
        sources = made_from.get(entry.source.name, (entry.source,))
        written.update(source.name for source in sources)
    left = [tensor for tensor in stored.tensors if tensor.name not in written]
    if left:
        from ema_ckpt.reading.quantized.lone_codes import warn_of_split_weights

        yield from warn_of_split_weights(stored, _without(stored, left))


def refuse_unquantized(catalog: Catalog, options: WriteOptions) -> None:
    """Raise UsageError `empty-selection` if `--dequantize` is given: it has nothing to do."""
    if options.dequantize is not None:
        message = f"--dequantize: {catalog.resolved} has no quantised weight"
        raise UsageError("empty-selection", message)


def _without(catalog: Catalog, left_out: Iterable[Tensor]) -> Catalog:
    """Return a checkpoint without some of its tensors."""
    gone = {tensor.name for tensor in left_out}
    return replace(
        catalog,
        tensors=tuple([tensor for tensor in catalog.tensors if tensor.name not in gone]),
        order=tuple([name for name in catalog.order if name not in gone]),
    )


def _refused(tensor: Tensor, found: Recognised) -> Tensor:
    refusal = found.refused.get(tensor.name)
    if refusal is None:
        return tensor
    remedy = "leave it out with --exclude, or copy it as it is, without --dequantize"
    return replace(tensor, refusal=replace(refusal, message=f"{refusal.message}; {remedy}"))


def with_real_values(catalog: Catalog) -> Dequantized:
    """Replace those quantised weights that are understood by their values in float32."""
    from ema_ckpt.reading.quantized.dequantized import with_values
    from ema_ckpt.reading.quantized.recognise import recognise

    found = recognise(catalog, lenient=True)
    if not found.tensors:
        return Dequantized(catalog, refused=found.refused)
    changed = with_values(_without(catalog, found.companions), found.tensors, by_name("float32"))
    return Dequantized(changed, found.tensors, refused=found.refused)


def as_written(origin: Catalog, result: Catalog) -> Catalog:
    """Return the checkpoint that `result` was made from, dequantised if `result` is.

    A copy has the codes of all weights, or at least some codes of a type that is used for nothing
    else.
    """
    values = with_real_values(origin)
    types = {weight.parts["codes"].dtype for weight in values.weights}
    kept = [tensor.dtype.kind for tensor in result.tensors if tensor.dtype in types]
    return origin if "low" in kept or len(kept) >= len(values.weights) else values.catalog
