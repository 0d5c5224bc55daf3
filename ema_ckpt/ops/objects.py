"""Objects on their way from one format to another: what can be carried, and what is said of the
rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ema_ckpt.core.catalog import Catalog, Diagnostic, Object
from ema_ckpt.core.errors import UnsafeError, UsageError, counted, shown
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.formats import sidecar as record
from ema_ckpt.formats.pickle.safe_globals import opaque_within, within
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.pickle.writer import is_plain
from ema_ckpt.ops.results import Skipped
from ema_ckpt.state_dicts.selection import KeptObject
from ema_ckpt.state_dicts.ties import dropped_names

_RANK_KEY = re.compile(r"(?:^|[._/-])rank[_-]?\d+(?:$|[._/-])")


@dataclass(slots=True)
class Carried:
    """Objects to be written, those that are left out, and what to tell."""

    objects: list[KeptObject] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)


def plan_objects(catalog: Catalog, objects: Sequence[KeptObject], form: str) -> Carried:
    """Sort objects by whether `form` (`dcp`, `safetensors`, `torch`) can hold them.

    An archive of a DCP source goes to DCP byte for byte, whatever is in it; anything else has to be
    plain.

    Raises:
        UnsafeError: `unsafe-pickle` if unpickling a selected object would run code.
    """
    carried = Carried()
    for held in objects:
        try:
            value = catalog.reader.load(held.source)
        except UnsafeError as error:
            remedy = f"leave it out with --exclude {held.name!r}"
            raise error.about(tensor=held.name, kind="object", remedy=remedy) from None
        opaque = opaque_within(value)
        if form == "dcp" and not held.source.is_inline:
            if opaque is not None:
                carried.warnings.append(
                    Diagnostic("opaque", f"{held.name!r} holds a {opaque}; copied as it is")
                )
            carried.objects.append(held)
        elif _fits(value, form):
            source = replace(held.source, inline=value, is_inline=True)
            carried.objects.append(KeptObject(held.name, held.path, source))
        else:
            what = (
                f"holds a {opaque}"
                if opaque
                else f"is a {type(value).__name__} that {form} cannot hold"
            )
            carried.skipped.append(Skipped(held.name, held.source.file, what))
    return carried


def header_text(catalog: Catalog) -> dict[str, str]:
    """What the header of a safetensors source says beside its tensors, ties and format aside."""
    return {
        key: text
        for key, text in catalog.header_text.items()
        if key != "format" and key not in catalog.ties
    }


def unsupported_metadata(
    catalog: Catalog, entries: Sequence[OutputTensor], form: str
) -> Iterator[Skipped]:
    """What a safetensors header says that the target does not: any text, and names dropped as
    tied.
    """
    dropped, lost = dropped_names(catalog, entries)
    for name in lost if form == "safetensors" else [*dropped, *lost]:
        yield Skipped(name, "", "a name that the source dropped as tied; --expand-ties writes it")
    for key in header_text(catalog) if form != "safetensors" else ():
        yield Skipped(f"__metadata__.{key}", "", "text of a safetensors header")


def unknown_objects(catalog: Catalog, objects: Iterable[Object]) -> list[Skipped]:
    """Objects of a torch file that hold something of an unknown class.

    Raises:
        UnsafeError: `unsafe-pickle` if unpickling one would run code.
    """
    found = []
    for held in objects:
        opaque = opaque_within(catalog.reader.load(held))
        if opaque is not None:
            found.append(Skipped(held.name, held.file, f"holds a {opaque}"))
    return found


def refuse_skipped(skipped: Sequence[Skipped], strict: bool) -> None:
    """With `--strict`, anything left out is an error. Raises UsageError `unsupported`."""
    if strict and skipped:
        names = shown([item.name for item in skipped])
        message = f"--strict: {counted(len(skipped), 'item')} would be left out: {names} ({skipped[0].reason})"
        raise UsageError("unsupported", message, tensor=skipped[0].name)


def rank_keyed(names: Iterable[str]) -> list[Diagnostic]:
    """A warning if names carry a rank: they will not fit another world size by themselves."""
    found = [name for name in names if _RANK_KEY.search(name)]
    return (
        [Diagnostic("rank-keyed", f"kept, though they belong to single ranks: {shown(found)}")]
        if found
        else []
    )


def _fits(value: object, form: str) -> bool:
    if any(isinstance(inner, TensorRef) for inner in within(value)):
        return False  # its storage is a record of the archive that it comes from
    if form in ("torch", "dcp"):
        return is_plain(value)
    try:
        record.encode(value)
    except TypeError:
        return False
    return True
