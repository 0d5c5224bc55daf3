"""Weights that share their parts: their values are tied where the parts were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ema_ckpt.reading.quantized.schemes import QuantizedTensor


def shared_storage(weight: QuantizedTensor) -> tuple[object, ...] | None:
    """Return what is equal for weights whose parts all share memory; None where nothing says so."""
    parts: list[tuple[object, ...]] = []
    for role, part in sorted(weight.parts.items()):
        if part.storage is None:
            return None
        parts.append((role, part.storage, part.shape, part.dtype.name))
    return (weight.layout, *parts)


def ties_of_values(ties: Mapping[str, str], weights: Iterable[QuantizedTensor]) -> dict[str, str]:
    """Return the ties of a checkpoint that has values in place of parts: dropped → kept name.

    A tie of the codes becomes one of the weights, under the name that the scheme gives it; those
    of scales and further parts go with them.
    """
    by_codes: dict[str, QuantizedTensor] = {}
    others = set[str]()
    for weight in weights:
        by_codes[weight.parts["codes"].name] = weight
        others.update(part.name for role, part in weight.parts.items() if role != "codes")
    tied: dict[str, str] = {}
    for dropped, kept in ties.items():
        if kept in by_codes:
            tied[_weight_name(dropped, by_codes[kept])] = by_codes[kept].name
        elif kept not in others:
            tied[dropped] = kept
    return tied


def _weight_name(codes: str, like: QuantizedTensor) -> str:
    """Name of the weight that these codes belong to, named as those of another are."""
    known = like.parts["codes"].name
    if known.startswith(like.name):
        return codes.removesuffix(known.removeprefix(like.name))
    layer, dot, leaf = codes.rpartition(".")  # torchao: `_weight_qdata` holds `weight`
    return layer + dot + leaf.removeprefix("_").removesuffix("_qdata")
