"""Find files that could be exchanged without a trace: alike in layout, and no record says whose."""

from __future__ import annotations

from ema_ckpt.analysis.audit import Audit
from ema_ckpt.core.catalog import Catalog, Diagnostic
from ema_ckpt.core.text import shown


def exchangeable_files(audit: Audit) -> list[list[str]]:
    """Return groups of files of a DCP whose items have the same places, shapes and dtypes.

    What this package writes records the CRC-32 of each item with its file, and is not among them.
    """
    groups: dict[tuple[int, int], list[str]] = {}
    if not audit.catalog.item_files:
        return []
    recorded = _recorded_files(audit)
    for file, layout in _layouts(audit.catalog).items():
        size = audit.sizes.get(file)
        if size and file not in recorded:
            groups.setdefault((size, layout), []).append(file)
    return [files for files in groups.values() if len(files) > 1]


def warning_of(files: list[str]) -> Diagnostic:
    """Say that the files of a group may have been exchanged."""
    message = f"{shown(files)}: alike in size and layout, and nothing is recorded of which is which"
    remedy = "if they were exchanged nothing here tells (placement); a manifest does"
    return Diagnostic("unchecked", f"{message}: {remedy}")


def _layouts(catalog: Catalog) -> dict[str, int]:
    """Return for each file a number that is equal where places, shapes and dtypes are."""
    layouts: dict[str, int] = {}
    for tensor in catalog.tensors:
        dtype = tensor.dtype.name
        for chunk in tensor.chunks:
            item = hash((chunk.offset, chunk.nbytes, chunk.sizes, dtype))
            layouts[chunk.file] = layouts.get(chunk.file, 0) + item
    return layouts


def _recorded_files(audit: Audit) -> set[str]:
    """Return the files of which a payload was recorded elsewhere; one of each is looked at."""
    seen: set[str] = set()
    recorded: set[str] = set()
    for tensor in audit.catalog.tensors:
        fresh = []
        for index, chunk in enumerate(tensor.chunks):
            if chunk.file not in seen and 0 not in chunk.sizes:
                seen.add(chunk.file)
                fresh.append(index)
        payloads = audit.located(tensor) if fresh else ()
        found = [payloads[index] for index in fresh if index < len(payloads)]
        recorded.update([one.file for one in found if one is not None and one.is_recorded])
    return recorded
