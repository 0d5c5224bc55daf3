"""Codes of quantised weights without the scales that make values of them, told by names alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog, Diagnostic, Tensor
from ema_ckpt.core.text import counted, shown
from ema_ckpt.reading.quantized.quantization_config import files_with_settings
from ema_ckpt.reading.quantized.recognise import (
    are_codes,
    fitting_schemes,
    is_of_a_scheme,
    outside_optimizers,
    weight_name,
)
from ema_ckpt.reading.quantized.schemes import FOREIGN
from ema_ckpt.reading.quantized.torchao import described_in_header


class LoneCodes(NamedTuple):
    """Stored codes, and the names of parts of which one, or all, are missing."""

    name: str
    lacking: tuple[str, ...]
    are_all_needed: bool


def warn_of_lone_codes(catalog: Catalog) -> Iterator[Diagnostic]:
    """Warn of codes whose scales, or other needed parts, are in no file; reads no payload.

    Where files are missing or damaged the scales may be in them, and the problems are told instead.
    """
    found = [] if catalog.problems else list(find_lone_codes(catalog))
    if found:
        remedy = (
            "look for a file that was not copied; numbers of eight bits that were never scaled "
        )
        yield _diagnostic(found, "there is no", f"{remedy}are whole as they are")


def warn_of_split_weights(stored: Catalog, written: Catalog) -> Iterator[Diagnostic]:
    """Warn of codes in `written`, a part of `stored`, whose scales are in `stored` alone."""
    found = list(find_lone_codes(written))
    known = {one.name for one in find_lone_codes(stored)} if found else set()
    names = {tensor.name for tensor in stored.tensors}
    split = []
    for one in found:
        lacking = tuple([name for name in one.lacking if name in names])
        if lacking and one.name not in known:
            split.append(LoneCodes(one.name, lacking, are_all_needed=True))
    if split:
        remedy = "select them too, or write values with --dequantize"
        yield _diagnostic(split, "this leaves out", remedy)


def _diagnostic(found: Sequence[LoneCodes], what: str, remedy: str) -> Diagnostic:
    first = found[0]
    lacking = (" and " if first.are_all_needed else " or ").join(map(repr, first.lacking))
    weights = "a quantised weight lacks its scales"
    if len(found) > 1:
        weights = f"{counted(len(found), 'quantised weight')} lack their scales"
    message = f"{weights}, so that nobody can tell the values: {shown([one.name for one in found])}"
    message += f" ({'for the first ' if len(found) > 1 else ''}{what} {lacking})"
    return Diagnostic("bare-codes", f"{message}; {remedy}")


def find_lone_codes(catalog: Catalog) -> Iterator[LoneCodes]:
    """Yield the codes outside optimizer state that lack a part without which they say nothing."""
    if not any(map(is_of_a_scheme, catalog.tensors)):
        return
    stored = outside_optimizers(catalog)
    has_settings = bool(files_with_settings(catalog))
    described = set[str]()
    for one in described_in_header(catalog.header_text, stored).values():
        parts = [part.name for part in one.parts.values()]
        described.update(parts)
        if one.parts and one.lacking:
            yield LoneCodes(parts[0], one.lacking, are_all_needed=True)
    for tensor in stored.values():
        # Without settings of a quantisation, FP8 under another name is taken for plain numbers.
        may_be_codes = has_settings or tensor.dtype.kind != "low" or _is_weight(tensor.name)
        if may_be_codes and tensor.name not in described and tensor.subclass is None:
            yield from _lacking(tensor, stored)


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] == "weight"


def _lacking(tensor: Tensor, stored: Mapping[str, Tensor]) -> Iterator[LoneCodes]:
    """Yield a tensor if it is codes without scales, or without another part that they need."""
    layer = tensor.name.rpartition(".")[0]
    if any(layer + ending in stored for ending in FOREIGN):
        return
    schemes = fitting_schemes(tensor)
    for scheme in schemes:
        weight = weight_name(scheme, tensor.name)
        if weight + scheme.scale in stored:
            endings = scheme.needed.values()
            needed = tuple([weight + end for end in endings if weight + end not in stored])
            if needed:
                yield LoneCodes(tensor.name, needed, are_all_needed=True)
            return
    if are_codes(tensor, schemes):
        scales = tuple([weight_name(one, tensor.name) + one.scale for one in schemes])
        yield LoneCodes(tensor.name, scales, are_all_needed=False)
