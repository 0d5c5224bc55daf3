"""Read rank files, one torch file a process, and put them together by what they record.

A `DTensor` or `ShardedTensor` records which box of which tensor a rank has (verl, lmms-engine and
others write dictionaries of these to `model_world_size_W_rank_R.pt`); a list of names and shapes
places flat pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ema_ckpt.core.catalog import Catalog, Diagnostic, Files, Problem, collected, refuse_problems
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted, shown
from ema_ckpt.formats.rank_files.merger import Merger, RankFile
from ema_ckpt.formats.rank_files.names import is_lone, missing_ranks, refuse_missing_ranks
from ema_ckpt.formats.rank_files.reading import read_ahead, read_file
from ema_ckpt.formats.rank_files.zero import lone_model, model_file, other_model_files

# `deepspeed/runtime/engine.py`, `_get_expert_ckpt_name`; before 0.5.10 without the layer.
_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")


def open_rankfiles(
    source: Files,
    names: tuple[str, ...],
    path: str,
    resolved: str,
    *,
    lenient: bool = False,
    workers: int = 1,
) -> Catalog:
    """Read the rank files `names` of the directory `source`; payloads are not read.

    Args:
        lenient: list missing ranks and files that cannot be read in `Catalog.problems`, and go on
            with the others.
        workers: the largest number of processes that read files.

    Raises:
        SourceError: `incomplete` if ranks are missing, `unsupported` if the files do not say how
            their tensors belong together, and what reading a torch file may raise.
        UnsafeError: `unsafe-pickle` if unpickling a tensor would call anything unlisted.
    """
    problems: list[Problem] = []
    files = _read_files(source, names, resolved, problems, workers)
    if not lenient or not files:
        refuse_problems(problems)
    world_size = max(missing_ranks(names)[0], len(names))
    is_swapped = any(file.content.is_big_endian for file in files)
    merger = Merger(files, resolved, world_size, problems, is_swapped)
    try:
        model = model_file(names, source.listing())
        if model is None:
            merger.warnings += _lost_without_zero(files)
            merger.add_all()
        elif not problems:  # without all ranks nothing tells where the pieces of the others lie
            merger.add_zero(read_file(source, model))
            if lenient:
                _read_others(source, other_model_files(model, len(names)), merger)
    except SourceError as error:
        if not lenient or error.code != "incomplete":
            raise
        problems.append(Problem.of(error))
    if not lenient:
        refuse_problems(problems)
    merger.warnings[:0] = _taken_for_all(names, problems)
    merger.warnings += _experts_beside(source, names)
    sizes = {file.name: source.size(file.name) for file in merger.read}
    return merger.catalog(source, path, dict.fromkeys(names, 0) | sizes, files[0].nesting)


def _lost_without_zero(files: Sequence[RankFile]) -> list[Diagnostic]:
    """Warn of weights in ZeRO's optimizer files, which are not among `files`; refuse empty ones."""
    lost = lone_model(files[0].name, files[0].leaves) if files else ""
    return [Diagnostic("left-out", lost)] if lost else []


def _read_others(source: Files, names: Sequence[str], merger: Merger) -> None:
    """Read files that DeepSpeed does not load without; nothing in them is needed for weights."""
    for name in names:
        with collected(merger.problems):
            merger.beside.append(read_file(source, name))


def _taken_for_all(names: Sequence[str], problems: Sequence[Problem]) -> list[Diagnostic]:
    if problems or not is_lone(names):
        return []
    problem = "has the name of one rank's file, and nothing tells of other ranks' files"
    return [Diagnostic("unchecked", f"{names[0]}: {problem}; it is read as the whole")]


def _experts_beside(source: Files, names: Sequence[str]) -> list[Diagnostic]:
    """Tell of files of DeepSpeed's experts, of which each holds one, beside those that are read."""
    if not any(name.endswith("_model_states.pt") for name in names):
        return []
    found = [name for name in source.listing() if _EXPERT.fullmatch(name) and name not in names]
    if not found:
        return []
    reason = f"{counted(len(found), 'file')} of DeepSpeed's experts beside it"
    return [Diagnostic("left-out", f"{names[0]}: {reason}: not read: {shown(sorted(found))}")]


def _read_files(
    source: Files, names: Sequence[str], where: str, problems: list[Problem], workers: int
) -> list[RankFile]:
    """Read all files that can be read; list ranks without a file, and what is wrong with others."""
    files: list[RankFile] = []
    with collected(problems):
        refuse_missing_ranks(names, where)
    read = read_ahead(source, names, workers)
    for name in names:
        with collected(problems):
            files.append(read.get(name) or read_file(source, name))
    return files
