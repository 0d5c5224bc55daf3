"""Options of the writing verbs, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.limits import MIN_BUDGET_NBYTES, default_budget, parse_budget, parse_workers
from ema_ckpt.state_dicts.rules.chosen import chosen_rules
from ema_ckpt.state_dicts.selection import SelectionOptions, options, value_type

if TYPE_CHECKING:
    import os

    from ema_ckpt.state_dicts.rules.rules import Rules

_BLOCK_NBYTES = 1792 << 10
_REMOTE_BLOCK_NBYTES = 8 << 20
_LEAST_BLOCK_NBYTES = 16 << 10


class WriterArgs(TypedDict, total=False):
    """Keyword arguments of every writing verb, named like the command line's options.

    Attributes:
        match, exclude, keep_dtype: globs on names as they are written.
        rename: `OLD=NEW` prefixes, or a mapping.
        dtype: `keep`, `fp32`, `bf16` or `fp16`, for floating-point tensors of live and EMA trees.
        dequantize: `bf16` or `fp32`: write weights that have scales beside them as their values.
        rules: a file of rules for names and layouts, the name of one that comes with the package,
            or what `load_rules` returned. They come before everything else.
        rule_values: numbers that the file leaves open, as `NAME=NUMBER` or a mapping.
        inverse: apply the inverse of the rules.
        threads: maximum number of workers; by default the usable processors, at most 8.
        max_memory: bytes of memory for buffers, a number or `16MiB`.
        dry_run: make every check, write nothing.
        no_verify: do not compare checksums stored in the source.
        no_fsync: skip fsync (faster; not crash-safe).
        overwrite: replace a checkpoint at the target.
        resume: continue a killed run.
        strict: fail if anything would be left out.
        expand_ties: write tied weights under every name.
        keep_prefixes: keep wrapper prefixes of names.
        progress: called with the bytes finished since the last call. If it has a method `expect`,
            that is called first, with the bytes to come.
    """

    match: Sequence[str]
    exclude: Sequence[str]
    rename: Sequence[str] | Mapping[str, str]
    dtype: str
    dequantize: str | None
    keep_dtype: Sequence[str]
    rules: str | os.PathLike[str] | Rules | None
    rule_values: Sequence[str] | Mapping[str, int]
    inverse: bool
    threads: int | None
    max_memory: int | str | None
    dry_run: bool
    no_verify: bool
    no_fsync: bool
    overwrite: bool
    resume: bool
    strict: bool
    expand_ties: bool
    keep_prefixes: bool
    progress: Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a writing verb.

    Attributes:
        budget_nbytes: None means the default for the source.
        forks: whether child processes may write.
    """

    selection: SelectionOptions = field(default_factory=SelectionOptions)
    dequantize: DType | None = None
    rules: Rules | None = None
    threads: int = 2
    budget_nbytes: int | None = None
    dry_run: bool = False
    verify: bool = True
    fsync: bool = True
    overwrite: bool = False
    resume: bool = False
    strict: bool = False
    expand_ties: bool = False
    progress: Callable[[int], None] | None = None
    forks: bool = True

    @classmethod
    def parse(cls, args: WriterArgs) -> WriteOptions:
        """Check the keyword arguments of a writing verb.

        Raises:
            UsageError: `usage` for fewer than one thread, less than 4 MiB of memory, an unknown
                dtype, a malformed rename.
            TypeError: for an unknown argument.
        """
        unknown = args.keys() - WriterArgs.__annotations__.keys()
        if unknown:
            raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
        return cls(
            rules=chosen_rules(
                args.get("rules"), args.get("rule_values", ()), inverse=args.get("inverse", False)
            ),
            threads=parse_workers(args.get("threads")),
            budget_nbytes=parse_budget(args.get("max_memory")),
            dequantize=value_type(args.get("dequantize")),
            selection=options(
                match=args.get("match", ()),
                exclude=args.get("exclude", ()),
                rename=args.get("rename", ()),
                dtype=args.get("dtype", "keep"),
                keep_dtype=args.get("keep_dtype", ()),
                keep_prefixes=args.get("keep_prefixes", False),
            ),
            dry_run=args.get("dry_run", False),
            verify=not args.get("no_verify", False),
            fsync=not args.get("no_fsync", False),
            overwrite=args.get("overwrite", False),
            resume=args.get("resume", False),
            strict=args.get("strict", False),
            expand_ties=args.get("expand_ties", False),
            progress=args.get("progress"),
        )

    def budget(self, remote: bool) -> int:
        """Bytes of buffers in flight."""
        return self.budget_nbytes or default_budget(remote)

    def block_nbytes(self, remote: bool, workers: int) -> int:
        """Bytes of one buffer; each worker needs up to four."""
        share = max(self.budget(remote), MIN_BUDGET_NBYTES) // (4 * workers)
        largest = _REMOTE_BLOCK_NBYTES if remote else _BLOCK_NBYTES
        return max(_LEAST_BLOCK_NBYTES, min(share, largest)) & ~15

    def most_workers(self, remote: bool) -> int:
        """Workers that may run at most: `threads`, if the budget has four buffers for each."""
        return min(self.threads, self.budget(remote) // (4 * _LEAST_BLOCK_NBYTES))

    def kept_nbytes(self, remote: bool, workers: int) -> int:
        """Bytes that one worker keeps of what it has read: all together half of the budget."""
        share = self.budget(remote) // (2 * workers)
        return max(share, self.block_nbytes(remote, workers)) & ~15

    def gathered_nbytes(self, remote: bool, workers: int) -> int:
        """Bytes of one block that takes a little of every row of a file, as transposing does.

        All workers' blocks have five eighths of the budget, beside a buffer for reading and the
        squares that are turned: the more there is, the faster it goes.
        """
        share = self.budget(remote) * 5 // (8 * workers)
        return max(share, self.block_nbytes(remote, workers)) & ~15
