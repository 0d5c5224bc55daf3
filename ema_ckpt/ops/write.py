"""Writing, the same for every writing verb: plan the output, stage it, publish it, report it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ema_ckpt import __version__
from ema_ckpt.comm.launched import CommandGroup, current_group
from ema_ckpt.core.catalog import Catalog, Diagnostic, Nesting, Object
from ema_ckpt.core.errors import CollectiveError, SourceError, TargetError, UsageError
from ema_ckpt.core.limits import check_ranks
from ema_ckpt.core.names import TORCH_SUFFIXES
from ema_ckpt.core.text import counted, format_size, path_text
from ema_ckpt.core.write_plan import OutputObject, OutputTensor, WritePlan, keep_first
from ema_ckpt.ops.files_beside import copy_files
from ema_ckpt.ops.object_plan import header_text, refuse_left_out
from ema_ckpt.ops.results.further_fields import with_fields
from ema_ckpt.ops.results.quantized import QuantizedEntry
from ema_ckpt.ops.results.write import AppliedRules, FileEntry, Skipped, WriteResult
from ema_ckpt.reading.unchanged import FileStates, unchanged
from ema_ckpt.state_dicts.ties import dropped_names
from ema_ckpt.storage.files import local_path
from ema_ckpt.storage.stamp import Stamp
from ema_ckpt.writing.destination import Destination, LocalDestination, WriteRequest
from ema_ckpt.writing.engine import run
from ema_ckpt.writing.journal import Journal
from ema_ckpt.writing.options import WriteOptions
from ema_ckpt.writing.output_files import OutputFiles
from ema_ckpt.writing.preflight import look_again, resolve_target
from ema_ckpt.writing.run_state import Outcome

# Without --resume a run this short is done anew rather than continued. Deleting a journal that has
# reached the disk costs tenths of a second where the file system discards freed blocks at once and
# the disk is busy.
_JOURNAL_AFTER_SECONDS = 10.0
_FOREIGN_SUFFIXES = (".npz", ".h5", ".onnx", ".gguf", ".zip")
_MAX_SHARD_NBYTES = 5 * 10**9  # of one file, where the user gives no other size
_BASENAME = "model"


@dataclass(frozen=True, slots=True)
class Output:
    """Destination of a write, its form (`dcp`, `safetensors` or `pt`), and sizes of that form."""

    destination: Destination
    form: str
    world_size: int | None = None
    max_shard_nbytes: int = _MAX_SHARD_NBYTES
    basename: str = _BASENAME

    @property
    def is_directory(self) -> bool:
        """Whether the destination becomes a directory."""
        return self.form != "pt" and self.destination.suffix != ".safetensors"

    @property
    def keeps_foreign(self) -> bool:
        """Whether foreign files stay; a Hugging Face directory also holds a tokenizer, a config."""
        return self.is_directory and self.form == "safetensors"

    @property
    def generation(self) -> int:
        """Number in the names of data files, where those of an old checkpoint lie beside them."""
        return self.destination.generation if self.is_directory else 0

    @property
    def has_index(self) -> bool | None:
        """Whether a Hugging Face directory has an index; None: if it has several shards."""
        return None if self.destination.is_local else True

    @property
    def format(self) -> str:
        """Name of the form in results."""
        return "torch" if self.form == "pt" else self.form


def destination_of(out: str | os.PathLike[str]) -> Destination:
    """Return the destination that a path or an fsspec URL names.

    Raises:
        UsageError: `usage` for `/`, the current directory, mount points, buckets as a whole, and
            HTTP.
    """
    text = path_text(out)
    path = local_path(text)
    if path is None:
        from ema_ckpt.writing.object_destination import ObjectDestination

        return ObjectDestination(text)
    resolve_target(path)  # before a Path takes a slash from a URL
    return LocalDestination(Path(path))


def output_form(destination: Destination, to: str | None, default: str) -> str:
    """Return the form to write: `to`, else the one of the destination's suffix, else `default`.

    Raises:
        UsageError: `usage` for an unknown form, one that contradicts the suffix, or without `to`
            the suffix of a format that nobody here writes.
    """
    implied = None
    if destination.suffix in TORCH_SUFFIXES:
        implied = "pt"
    elif destination.suffix == ".safetensors":
        implied = "safetensors"
    if to is None:
        if destination.suffix.lower() in _FOREIGN_SUFFIXES:
            known = "write .safetensors, .pt, or any other name for a directory"
            reason = f"{destination.suffix} is the ending of a format that is not written here"
            message = f"{destination.name}: {reason}; {known}, or name the format with --to"
            raise UsageError("usage", message)
        return implied or default
    if to not in ("dcp", "safetensors", "pt"):
        raise UsageError("usage", f"--to {to}: expected dcp, safetensors or pt")
    if implied not in (None, to):
        message = f"--to {to}: {destination.name} has the ending of a {implied} file"
        raise UsageError("usage", message)
    if (to, implied) == ("pt", None):
        message = f"--to pt: {destination.name} needs the ending .pt, .pth, .bin or .ckpt"
        raise UsageError("usage", message)
    return to


def plan_for(
    output: Output,
    catalog: Catalog,
    tensors: Sequence[OutputTensor],
    *,
    objects: Sequence[OutputObject] = (),
    split: Sequence[bool] = (),
    nesting: Nesting | None = None,
    expand_ties: bool = False,
) -> tuple[WritePlan, dict[str, str]]:
    """Lay out `tensors` of `catalog` in the form of `output`.

    Args:
        split: for DCP, which of `tensors` are cut into rows.
        nesting: containers of the paths; None for flat names.

    Returns:
        The plan, and the ties that it records: dropped name → kept name.
    """
    if output.form == "dcp":
        from ema_ckpt.formats.dcp import writer as dcp_writer

        # Without a number, as many as the source has, as far as anybody can have had so many.
        highest = f"{catalog.resolved}: give --world-size; by the names of its files it has"
        ranks = output.world_size or check_ranks(catalog.world_size or 1, highest)
        return dcp_writer.lay_out(
            tensors,
            objects,
            split,
            ranks,
            catalog.source,
            catalog.order,
            nesting,
            output.generation,
        ), {}
    inline = [
        Object(item.name, item.path, item.source.file, inline=item.source.inline, is_inline=True)
        for item in objects
    ]
    order = _written_order(catalog, tensors, objects)
    if output.form == "pt":
        from ema_ckpt.formats.torch_file import writer as torch_writer

        return torch_writer.lay_out(
            tensors, nesting=nesting, objects=inline, expand_ties=expand_ties, order=order
        ), {}
    from ema_ckpt.formats.safetensors import writer as safetensors_writer

    ties: dict[str, str] = {}
    kept = list(tensors)
    if not expand_ties:
        kept, ties = keep_first(tensors)
    dropped, _ = dropped_names(catalog, tensors)
    text = header_text(catalog) | dropped
    paths = {tensor.name: tensor.path for tensor in tensors if tensor.name in ties}
    plan = safetensors_writer.lay_out(
        kept,
        text,
        max_shard_nbytes=output.max_shard_nbytes if output.is_directory else None,
        basename=output.basename,
        generation=output.generation,
        has_index=output.has_index,
        nesting=nesting,
        objects=inline,
        ties=ties,
        tied_paths=paths,
        order=order if nesting is not None else (),
    )
    return plan, ties | dropped


def _written_order(
    catalog: Catalog, tensors: Sequence[OutputTensor], objects: Sequence[OutputObject]
) -> list[str]:
    """Return the names to write in the order of the state dict, as far as the source knows it."""
    place = {name: index for index, name in enumerate(catalog.order)}
    items: list[OutputTensor | OutputObject] = [*tensors, *objects]
    items.sort(key=lambda item: place.get(item.source.name, len(place)))
    return [item.name for item in items]


@dataclass(slots=True)
class PlannedWrite:
    """A planned write, and what its result reports.

    Attributes:
        source: what the user named. resolved: the places that were read, if they are several.
        copied: files of the source that go into the destination as they are, with their sizes.
        read_paths: further places it reads.
    """

    catalog: Catalog
    output: Output
    plan: WritePlan
    tensors: Sequence[OutputTensor]
    started: float
    source: str
    resolved: tuple[str, ...] = ()
    tree: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    rules: AppliedRules | None = None
    filled: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    copied: Mapping[str, int] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    warnings: list[Diagnostic] = field(default_factory=list)
    read_paths: Sequence[str] = ()
    dequantized: tuple[QuantizedEntry, ...] | None = None

    @property
    def sources(self) -> list[str]:
        """Places that are read, which the destination may not touch."""
        read = [self.catalog.resolved, *self.read_paths]
        return [*(local_path(place) or place for place in read), *_linked_files(self.catalog)]

    @property
    def files(self) -> dict[str, int]:
        """Every file that is written or copied, with its size."""
        return {**self.plan.files, **self.copied}


def _linked_files(catalog: Catalog) -> Iterator[str]:
    """Yield paths of files that a checkpoint has through symbolic links: they lie elsewhere."""
    root = local_path(catalog.source.root)
    if root is None:
        return
    for file in catalog.files:
        path = os.path.join(root, file)
        if os.path.islink(path) or ("/" in file and os.path.islink(os.path.dirname(path))):
            yield path


def finish(job: PlannedWrite, options: WriteOptions) -> WriteResult:
    """Write a planned output, or with `dry_run` only check it, and report it.

    Raises:
        EmaCkptError: with the `code` of what is wrong; then nothing was written.
    """
    refuse_left_out(job.catalog, options.strict)
    _refuse_vain_options(job.output, job.plan)
    _agree_on_target(job.output.destination)
    if options.dry_run:
        job.warnings += job.output.destination.check(_request(job, options))
    else:
        _write(job, options)
    job.warnings += _end_together(is_written=not options.dry_run)
    result = WriteResult(
        source=job.source,
        resolved=job.resolved or job.catalog.resolved,
        target=str(job.output.destination),
        tree=job.tree,
        format=job.output.format,
        files=tuple(
            FileEntry(name or job.output.destination.name, nbytes)
            for name, nbytes in job.files.items()
        ),
        tensors=len(job.tensors),
        nbytes=sum(item.nbytes for item in job.plan.items),
        seconds=time.perf_counter() - job.started,
        renamed=dict(job.renamed),
        filled=job.filled,
        ties=job.ties,
        skipped=tuple(job.skipped),
        warnings=(*job.warnings, *job.plan.warnings),
        dry_run=options.dry_run,
    )
    return with_fields(result, rules=job.rules, dequantized=job.dequantized)


def _refuse_vain_options(output: Output, plan: WritePlan) -> None:
    """Refuse options of a safetensors directory that another output would not heed.

    Raises:
        UsageError: `usage`: another basename, or a size of shards that a file is larger than.
    """
    if output.is_directory and output.form == "safetensors":
        return
    what = "a DCP directory" if output.form == "dcp" else "one file"
    remedy = f"goes with a safetensors directory, and {output.destination} is to be {what}"
    if output.basename != _BASENAME:
        raise UsageError("usage", f"--basename {output.basename}: {remedy}")
    limit, largest = output.max_shard_nbytes, max(plan.files.values(), default=0)
    if limit != _MAX_SHARD_NBYTES and largest > limit:
        sizes = f"{format_size(limit)}: a file would have {format_size(largest)}"
        raise UsageError("usage", f"--max-shard-size {sizes}; it {remedy}")


def refuse_emptiness(tensors: Sequence[OutputTensor], dropped: Sequence[Skipped]) -> None:
    """Refuse to write no tensor where all were dropped.

    Raises:
        UsageError: `empty-selection`.
    """
    if dropped and not tensors:
        reason = f"{dropped[0].name!r}: {dropped[0].reason}"
        message = f"no tensor is left to write; {counted(len(dropped), 'entry', 'entries')} skipped"
        raise UsageError("empty-selection", f"{message}, such as {reason}")


def _agree_on_target(destination: Destination) -> None:
    """Check that all processes of a command write to one place, as each of them resolves it.

    Raises:
        UsageError: `usage`: they name different ones; `unsupported` for a URL.
    """
    group = current_group()
    if group is None:
        return
    if not destination.is_local:
        message = f"--distributed: {destination}: all processes have to share a file system"
        raise UsageError("unsupported", f"{message}; write to a URL from one process")
    targets = group.exchange("name the target", str(resolve_target(str(destination))))
    for rank, target in enumerate(targets):
        if target != targets[0]:
            named = f"rank 0: {targets[0]}; rank {rank}: {target}"
            raise UsageError(
                "usage", f"--distributed: the processes name different targets: {named}"
            )


def _end_together(*, is_written: bool) -> Iterator[Diagnostic]:
    """Wait until all processes of a command are done, before the first one prints a verdict.

    What becomes of another one once the first has put the target in place changes nothing in it.

    Raises:
        CollectiveError: `rank-failed`.
    """
    group = current_group()
    if group is None:
        return
    try:
        group.end()
    except CollectiveError as error:
        if group.rank or not is_written:
            raise
        yield Diagnostic("rank-failed", f"{error}; that was after the target was in place")


def _request(job: PlannedWrite, options: WriteOptions, **more: Any) -> WriteRequest:
    return WriteRequest(
        job.files,
        job.plan.marker,
        job.output.is_directory,
        options,
        job.sources,
        job.output.keeps_foreign,
        tuple(job.copied),
        **more,
    )


def _write(job: PlannedWrite, options: WriteOptions) -> None:
    # Of the files as they were opened: one that is replaced from then on is another source, to a
    # run that is continued and to other processes.
    states = FileStates.opened(job.catalog)
    identity = identity_of(job, {file: states.stamps[file] for file in sorted(job.catalog.files)})
    group = current_group()
    destination = job.output.destination
    if group is not None and group.rank:
        _write_share(job, options, identity, states, group)
        return
    after = _JOURNAL_AFTER_SECONDS if group is None else 0.0
    request = _request(job, options, identity=identity, journal_after=after)
    with destination.open(request) as draft:
        if group is not None:
            cut = options.threads, options.budget_nbytes
            group.exchange("begin to write", (identity, str(draft.path), cut))
            group.exchange("the journal is open")
        with unchanged(job.catalog, states):
            outcome = run(job.catalog, job.plan, draft.outputs, draft.options, draft.journal, group)
            copy_files(job.catalog, job.copied, draft.outputs)
    job.warnings += [*draft.warnings, *_overflows(job.plan, outcome)]


def _write_share(
    job: PlannedWrite,
    options: WriteOptions,
    identity: Mapping[str, str],
    states: FileStates,
    group: CommandGroup,
) -> None:
    """Write this process' share into the staging directory of the first process."""
    (expected, stage_path, cut), *_ = group.exchange("begin to write", (identity, None, None))
    if identity["source"] == expected["source"] and identity != expected:
        reason = "the processes plan different outputs; give all the same arguments and source"
        raise UsageError("usage", f"--distributed: {reason}")
    if identity != expected:
        hint = "is it on a file system that all share?"
        message = f"{job.catalog.resolved}: not the same to all processes ({hint})"
        raise SourceError("source-changed", message)
    root = Path(stage_path)
    look_again(root.parent.parent)
    if not root.parent.exists():
        hint = "all must share the file system"
        message = f"{root.parent}: made by the first process, not there for this one; {hint}"
        raise TargetError("not-found", message, file=stage_path)
    # All ranks cut the plan into the same jobs.
    options = replace(options, threads=cut[0], budget_nbytes=cut[1])
    with contextlib.closing(Journal(root.parent, root, identity)) as journal:
        # No line is written before every process has read what an interrupted run left.
        group.exchange("the journal is open")
        try:
            with contextlib.closing(OutputFiles(root, job.files)) as outputs:
                run(job.catalog, job.plan, outputs, options, journal, group)
        except SourceError:
            # As in the first process, to which this is the failure of another one: the journal does
            # not say which ranges come from what was found to be wrong, and it may be a change.
            journal.discard()
            states.refuse_changes(suspicious=True)
            raise


def _overflows(plan: WritePlan, outcome: Outcome | None) -> Iterator[Diagnostic]:
    if outcome is None or not outcome.overflow:
        return
    # Workers end in any order; the warnings come in the order of the tensors.
    for name in dict.fromkeys(item.output.name for item in plan.items):
        if name in outcome.overflow:
            values = counted(outcome.overflow[name], "finite value")
            message = f"{values} of {name!r} became infinite in the cast; keep its dtype"
            yield Diagnostic("overflow", message)


# Identity of a run.


def identity_of(job: PlannedWrite, stamps: Mapping[str, Stamp]) -> dict[str, str]:
    """Digests of source and plan; an interrupted run is continued only if both are the same.

    So is the version of this package: another one may compute other values.
    """
    source, plan = hashlib.sha256(), hashlib.sha256()
    for file, stamp in stamps.items():
        # A target made of two sources would look sound, so that any change of a file counts here,
        # of its permissions too.
        state = f"{stamp.written} {stamp.changed_ns}"
        source.update(f"{file}\0{state}\0".encode("utf-8", "surrogatepass"))
    plan.update(job.catalog.made_by.encode())
    for item in job.plan.items:
        tensor = item.output
        names = f"{tensor.name}\0{tensor.source.name}\0{tensor.dtype.name}"
        line = f"{names}\0{item.file}\0{item.offset}\0{item.box}\n"
        plan.update(line.encode("utf-8", "surrogatepass"))
    return {
        "source": source.hexdigest(),
        "plan": plan.hexdigest(),
        "version of ema_ckpt": __version__,
    }
