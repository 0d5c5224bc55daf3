"""Whether what a verb is about to read is there: every element, every file, every byte of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.coverage import prove
from ema_ckpt.core.errors import SourceError, shown


def check_sources(catalog: Catalog, tensors: Iterable[Tensor]) -> None:
    """Prove that every tensor is covered, and that every file it needs is there and long enough.

    Raises:
        SourceError: `hole overlap out-of-bounds incomplete missing-file truncated-file`, naming
            tensor and file.
    """
    users: dict[str, list[str]] = {}
    for tensor in tensors:
        for index in prove(tensor):
            held = users.setdefault(tensor.chunks[index].file, [])
            if not held or held[-1] != tensor.name:
                held.append(tensor.name)
    _refuse_missing(catalog, users)
    for file, names in users.items():
        try:
            size = catalog.source.size(file)
        except SourceError as error:
            message = f"{error}; it holds {shown(names)}"
            raise type(error)(error.code, message, tensor=names[0], file=file) from None
        expected = catalog.files.get(file, 0)
        if size < expected:
            message = (
                f"{file}: expected at least {expected} bytes, found {size}: the file is truncated"
            )
            raise SourceError(
                "truncated-file", f"{message}; it holds {shown(names)}", tensor=names[0], file=file
            )


def _refuse_missing(catalog: Catalog, users: Mapping[str, Sequence[str]]) -> None:
    """Name every file that is not there: on several nodes with disks of their own each has a part
    of them.
    """
    missing = [file for file in users if _is_missing(catalog, file)]
    if not missing:
        return
    names = list(dict.fromkeys(name for file in missing for name in users[file]))
    several = (
        f"{catalog.resolved}: {len(missing)} of {len(users)} files are missing: {shown(missing)}"
    )
    what = several if len(missing) > 1 else f"{missing[0]}: no such file in {catalog.resolved}"
    message = f"{what}, with parts of {shown(names)}"
    hint = "copy all files of the checkpoint into one directory (each node may have saved its own)"
    raise SourceError("missing-file", f"{message}; {hint}", tensor=names[0], file=missing[0])


def _is_missing(catalog: Catalog, file: str) -> bool:
    try:
        catalog.source.size(file)
    except SourceError as error:
        return error.code == "missing-file"
    return False
