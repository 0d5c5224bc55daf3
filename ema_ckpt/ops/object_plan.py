"""Objects, header text and files beside a checkpoint: what an output holds, what is skipped."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ema_ckpt.core.catalog import Catalog, Diagnostic
from ema_ckpt.core.errors import AccessError, UnsafeError, UsageError, about
from ema_ckpt.core.text import counted, shown
from ema_ckpt.core.write_plan import OutputObject, OutputTensor
from ema_ckpt.discovery.step_names import step_number
from ema_ckpt.formats.pickle.safe_globals import opaque_within, within
from ema_ckpt.formats.torch_file.lenient import called_with_tensors, unsafe_within
from ema_ckpt.ops.files_beside import is_needed
from ema_ckpt.ops.results.write import Skipped
from ema_ckpt.state_dicts.ties import dropped_names
from ema_ckpt.storage.directories import base_name, join, list_folder

# A model's weights in a second form, as Hugging Face repositories have them, are no other state.
_STATE_FILES = re.compile(
    r"trainer_state.*|(?!pytorch_model).*\.(pt|pth|bin|ckpt|pkl|pickle|npz|distcp)"
)
_OWN_FILES = re.compile(
    r"\.metadata|__\d+\.metadata|__\d+_\d+\.distcp|ema_ckpt\.json|.*\.safetensors(\.index\.json)?"
)
# Weights in a second form have a warning of their own, if they are a checkpoint at all; a trainer's
# state is `skipped`, and of no use to weights alone.
_TOLD_ELSEWHERE = re.compile(
    rf"\..*|{_STATE_FILES.pattern}|pytorch_model.*\.bin|.*\.index\b.*\.json"
)
_BESIDE_MODELS = ("safetensors", "torch")  # formats of model directories
_RANK_KEY = re.compile(r"(?:^|[._/-])rank[_-]?\d+(?:$|[._/-])")


@dataclass(slots=True)
class ObjectPlan:
    """Objects to write, objects that are skipped, and warnings about both."""

    kept: list[OutputObject] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)


def plan_objects(catalog: Catalog, objects: Sequence[OutputObject], form: str) -> ObjectPlan:
    """Sort objects by whether `form` (`dcp`, `safetensors`, `torch`) can hold them.

    An archive of a DCP source goes to DCP byte for byte, whatever is in it; anything else has to be
    plain.

    Raises:
        UnsafeError: `unsafe-pickle` if unpickling a selected object would run code.
    """
    plan = ObjectPlan()
    for item in objects:
        try:
            value = catalog.reader.load(item.source)
        except UnsafeError as error:
            remedy = f"leave it out with --exclude {item.name!r}"
            raise about(error, tensor=item.name, kind="object", remedy=remedy) from None
        opaque = opaque_within(value)
        if form == "dcp" and not item.source.is_inline:
            plan.kept.append(item)
            if opaque is not None:
                message = f"{item.name!r} holds a {opaque}; copied as it is"
                plan.warnings.append(Diagnostic("opaque", message))
        elif _fits(value, form):
            plan.kept.append(
                item._replace(source=replace(item.source, inline=value, is_inline=True))
            )
        else:
            reason = f"holds a {opaque}" if opaque else _misfit(value, form)
            plan.skipped.append(Skipped(item.name, item.source.file, reason))
    plan.warnings += _warn_of_paths(plan.kept)
    return plan


def _misfit(value: object, form: str) -> str:
    """Say what in `value`, which has no unknown class in it, `form` cannot hold."""
    from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef

    for inner in within(value):
        if isinstance(inner, StorageRef | TensorRef):
            kind = "storage without a tensor" if isinstance(inner, StorageRef) else "tensor"
            return f"holds a {kind}, which {form} cannot hold as an object"
    return f"is a {type(value).__name__} that {form} cannot hold"


def _warn_of_paths(kept: Sequence[OutputObject]) -> Iterator[Diagnostic]:
    """Name the objects with paths of `pathlib`: no writer but a copy keeps what they are."""
    from ema_ckpt.formats.pickle.typed_values import PathText

    names = []
    for item in kept:
        source = item.source
        if source.is_inline and any(isinstance(v, PathText) for v in within(source.inline)):
            names.append(item.name)
    if names:
        message = f"written as text, though the source has a path of pathlib there: {shown(names)}"
        yield Diagnostic("opaque", message)


def _fits(value: object, form: str) -> bool:
    from ema_ckpt.formats import sidecar
    from ema_ckpt.formats.pickle.tensors import TensorRef
    from ema_ckpt.formats.pickle.writer import is_plain

    if any(isinstance(inner, TensorRef) for inner in within(value)):
        return False  # its storage is a record of the archive that it comes from
    if form in ("torch", "dcp"):
        return is_plain(value)
    try:
        sidecar.encode(value)
    except TypeError:
        return False
    return True


def unknown_objects(catalog: Catalog) -> list[Skipped]:
    """List objects of a torch file or of rank files that hold something of an unknown class.

    Raises:
        UnsafeError: `unsafe-pickle` if unpickling one would run code.
    """
    unknown: list[Skipped] = []
    if catalog.format not in ("torch", "rank-files"):
        return unknown
    for item in catalog.objects:
        # What an unlisted function would make of tensors is in no tree, and nothing is called.
        called = called_with_tensors(item.inline) if unsafe_within(item.inline) is None else None
        if called is not None:
            unknown.append(Skipped(item.name, item.file, called))
            continue
        opaque = opaque_within(catalog.reader.load(item))
        if opaque is not None:
            unknown.append(Skipped(item.name, item.file, f"holds a {opaque}"))
    return unknown


def header_text(catalog: Catalog) -> dict[str, str]:
    """Return the text of a safetensors header, without its format."""
    return {key: text for key, text in catalog.header_text.items() if key != "format"}


def unsupported_metadata(
    catalog: Catalog, tensors: Sequence[OutputTensor], form: str
) -> Iterator[Skipped]:
    """List names dropped as tied and header text of the source that `form` cannot record."""
    dropped, lost = dropped_names(catalog, tensors)
    for name in lost if form == "safetensors" else [*dropped, *lost]:
        yield Skipped(name, "", "a name that the source dropped as tied; --expand-ties writes it")
    if form != "safetensors":
        for key in header_text(catalog):
            yield Skipped(f"__metadata__.{key}", "", "text of a safetensors header")


def left_out(
    catalog: Catalog, tensors: Sequence[OutputTensor], form: str, copied: Container[str] = ()
) -> Iterator[Skipped]:
    """List all that is neither tensor, object nor `copied` file and that `form` does not record."""
    entries = [(entry.name, entry.kind, entry.file) for entry in catalog.unknown_entries]
    for name, kind, file in dict.fromkeys(entries):
        yield Skipped(name, file, f"is a {kind}, unknown to ema_ckpt")
    yield from unsupported_metadata(catalog, tensors, form)
    for path, file, reason in catalog.rank_private:
        yield Skipped(".".join(map(str, path)), file, reason)
    if not _has_folder(catalog):
        return
    own = {*catalog.files, *(file.partition("/")[0] for file in catalog.files)}
    for file in _state_beside(catalog):
        name = base_name(file)
        is_hidden = name.startswith(".") or _OWN_FILES.fullmatch(name) is not None
        if is_hidden or file in own or file in copied:
            continue
        yield Skipped(file, file, "beside the checkpoint, not part of it")


def _has_folder(catalog: Catalog) -> bool:
    """Check whether the folder belongs to the checkpoint: not if it is a file named, or a step."""
    resolved = catalog.resolved.rstrip("/")
    if resolved in (catalog.source.root.rstrip("/"), catalog.path.rstrip("/")):
        return resolved == catalog.source.root.rstrip("/")
    return step_number(base_name(resolved)) is None


def _state_beside(catalog: Catalog) -> list[str]:
    """List folders and files in the checkpoint's directory, and in its parts', that may hold state.

    Of a DCP that is every file; elsewhere a tokenizer or a README is no state.
    """
    root = list_folder(catalog.source.root)
    folders = [name for name in root.folders if _holds_weights(join(root.root, name))]
    files = _files_in_folders(catalog)
    if catalog.format == "dcp":
        return folders + files
    for file in files:
        name = base_name(file)
        if _STATE_FILES.fullmatch(name) or is_needed(name):
            folders.append(file)
    return folders


def warn_of_files(
    catalog: Catalog, copied: Container[str], skipped: Iterable[Skipped]
) -> Iterator[Diagnostic]:
    """Name the files beside the weights of a model, as its tokenizer, that nothing else tells of.

    They are not part of a checkpoint: nothing is skipped of it where they stay behind.
    """
    if catalog.format not in _BESIDE_MODELS or not _has_folder(catalog):
        return
    told = {item.file for item in skipped} | {base_name(path) for path in catalog.left_out}
    names = []
    for file in _files_in_folders(catalog):
        name = base_name(file)
        is_own = _OWN_FILES.fullmatch(name) or _TOLD_ELSEWHERE.fullmatch(name)
        if not is_own and file not in catalog.files and file not in copied and file not in told:
            names.append(file)
    if names:
        remedy = "copy what the model needs (config, tokenizer) to the target"
        message = f"{catalog.resolved}: not copied, beside the weights: {shown(names)}; {remedy}"
        yield Diagnostic("left-out", message)


def _files_in_folders(catalog: Catalog) -> list[str]:
    """List the files in a checkpoint's directory, and in its parts'."""
    root = catalog.source.root
    files = list(list_folder(root).files)
    parts = dict.fromkeys(file.rpartition("/")[0] for file in catalog.files)
    for part in filter(None, parts):
        files += [f"{part}/{name}" for name in list_folder(join(root, part)).files]
    return files


def _holds_weights(folder: str) -> bool:
    """Check whether a folder beside a checkpoint has state of its own and is not another step."""
    if step_number(folder.rpartition("/")[2]) is not None:
        return False
    try:
        files = list_folder(folder).files
    except AccessError:  # a folder that cannot be listed is reported, not passed over
        return True
    return any(_STATE_FILES.fullmatch(name) or _OWN_FILES.fullmatch(name) for name in files)


def refuse_skipped(skipped: Sequence[Skipped], strict: bool) -> None:
    """Raise UsageError `unsupported` if `strict` and anything is skipped."""
    if strict and skipped:
        names = f"{shown([item.name for item in skipped])} ({skipped[0].reason})"
        message = f"--strict: {counted(len(skipped), 'item')} would be left out: {names}"
        raise UsageError("unsupported", message, tensor=skipped[0].name)


def refuse_left_out(catalog: Catalog, strict: bool) -> None:
    """Raise UsageError `usage` if `strict` and a checkpoint beside this one is passed over."""
    if strict and catalog.left_out:
        several = counted(len(catalog.left_out), "checkpoint")
        problem = f"{several} beside it would be left out: {shown(catalog.left_out)}"
        remedy = "name the one to read"
        raise UsageError("usage", f"--strict: {catalog.resolved}: {problem}; {remedy}")


def rank_keyed(names: Iterable[str]) -> Iterator[Diagnostic]:
    """Warn of names that carry a rank, as they will not fit another world size by themselves."""
    matching = [name for name in names if _RANK_KEY.search(name)]
    if matching:
        message = f"kept, though they belong to single ranks: {shown(matching)}"
        yield Diagnostic("rank-keyed", message)
