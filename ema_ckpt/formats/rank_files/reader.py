"""Read rank files, one torch file a process, and put them together by what they record.

A `DTensor` or `ShardedTensor` records which box of which tensor a rank has (verl, lmms-engine and
others write dictionaries of these to `model_world_size_W_rank_R.pt`); a list of names and shapes
places flat pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from ema_ckpt.core.catalog import Catalog, Files, Problem, collected, refuse_problems
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.rank_files.merger import Merger, RankFile
from ema_ckpt.formats.rank_files.names import missing_ranks, refuse_missing_ranks
from ema_ckpt.formats.rank_files.zero import model_file
from ema_ckpt.formats.torch_file.lenient import LenientGlobals, check_discarded
from ema_ckpt.formats.torch_file.reader import read_content, read_leaves
from ema_ckpt.formats.torch_file.sharded_tensors import SubclassReader


def open_rankfiles(
    source: Files, names: tuple[str, ...], path: str, resolved: str, *, lenient: bool = False
) -> Catalog:
    """Read the rank files `names` of the directory `source`; payloads are not read.

    Args:
        lenient: list missing ranks and files that cannot be read in `Catalog.problems`, and go on
            with the others.

    Raises:
        SourceError: `incomplete` if ranks are missing, `unsupported` if the files do not say how
            their tensors belong together, and what reading a torch file may raise.
        UnsafeError: `unsafe-pickle` if unpickling a tensor would call anything unlisted.
    """
    problems: list[Problem] = []
    files = _read_files(source, names, resolved, problems)
    if not lenient or not files:
        refuse_problems(problems)
    world_size = max(missing_ranks(names)[0], len(names))
    is_swapped = any(file.content.is_big_endian for file in files)
    merger = Merger(files, resolved, world_size, problems, is_swapped)
    try:
        model = model_file(names, source.listing())
        if model is None:
            merger.add_all()
        elif not problems:  # without all ranks nothing tells where the pieces of the others lie
            merger.add_zero(_read_file(source, model))
    except SourceError as error:
        if not lenient or error.code != "incomplete":
            raise
        problems.append(Problem.of(error))
    if not lenient:
        refuse_problems(problems)
    sizes = {file.name: source.size(file.name) for file in merger.read}
    return merger.catalog(source, path, dict.fromkeys(names, 0) | sizes, files[0].nesting)


def _read_files(
    source: Files, names: Sequence[str], where: str, problems: list[Problem]
) -> list[RankFile]:
    """Read all files that can be read; list ranks without a file, and what is wrong with others."""
    files: list[RankFile] = []
    with collected(problems):
        refuse_missing_ranks(names, where)
    for name in names:
        with collected(problems):
            files.append(_read_file(source, name))
    return files


def _read_file(source: Files, name: str) -> RankFile:
    lenient = LenientGlobals(SubclassReader())
    content = read_content(source, name, lenient)
    leaves, nesting = read_leaves(content)
    check_discarded(lenient.unsafe, [value for _, value in leaves], name)
    return RankFile.of(name, content, dict(leaves), nesting)
