"""Catalog of a checkpoint: what it holds and where the bytes lie, whatever its format.

Format modules read metadata into a `Catalog`; everything else works on catalogs. All of it is
frozen; shapes and boxes are in elements, spans in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from math import prod
from reprlib import repr as brief
from typing import NamedTuple, Protocol, runtime_checkable

from ema_ckpt.core.box import Box
from ema_ckpt.core.display import displayed
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import EmaCkptError, SourceError, UnsafeError

Ints = tuple[int, ...]
Path = tuple[str | int, ...]

_MAX_NBYTES = 2**63


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something a person should know that does not stop the work; `code` is stable."""

    code: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", displayed(self.message))


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage: a stable code, the tensor and file concerned (or None), and a message."""

    code: str
    tensor: str | None
    file: str | None
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", displayed(self.message))

    @classmethod
    def of(cls, error: EmaCkptError) -> Problem:
        """The problem that an error tells of."""
        return cls(error.code, error.tensor, error.file, str(error))


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Add an error of the source to `problems`, and go on after the `with` block."""
    try:
        yield
    except SourceError as error:
        problems.append(Problem.of(error))


def refuse_problems(problems: Sequence[Problem]) -> None:
    """Raise one error that tells of all problems (ten of them in full), if there are any."""
    if not problems:
        return
    first = problems[0]
    message = "; ".join(dict.fromkeys(problem.message for problem in problems[:10]))
    if len(problems) > 10:
        message += f"; and {len(problems) - 10} more"
    kind = UnsafeError if first.code.startswith("unsafe-") else SourceError
    raise kind(first.code, message, tensor=first.tensor, file=first.file)


class Chunk(NamedTuple):
    """One stored box of a tensor, and the span of a file that the metadata gives for it.

    The span may frame the payload (a whole zip for a DCP item); `Reader.payloads` locates the
    payload. `file` is relative to the checkpoint, with `/` between parts.
    """

    offsets: Ints
    sizes: Ints
    file: str
    offset: int
    nbytes: int

    @property
    def box(self) -> Box:
        """Box of the chunk in its tensor."""
        return Box(self.offsets, self.sizes)


class Payload(NamedTuple):
    """The bytes behind one chunk.

    Attributes:
        file, offset, nbytes: the whole storage the chunk's elements lie in, in bytes.
        strides: element strides of the chunk in that storage; None means row-major and contiguous.
        start: element at which the chunk begins in the storage.
        crc: CRC-32 of the storage's bytes as the format records it, or None if it records none.
        is_recorded: whether `crc` comes from a record beside the format's own, made when the
            checkpoint was written.
        own_crc: then the CRC-32 that the format itself records, or None.
    """

    file: str
    offset: int
    nbytes: int
    strides: Ints | None = None
    start: int = 0
    crc: int | None = None
    is_recorded: bool = False
    own_crc: int | None = None


class ItemKind(NamedTuple):
    """What chunks have in common whose archives, written by one program, are of one shape.

    Attributes:
        nbytes: of the archive. dtype: name of the element type. sizes: of the chunk, in elements.
    """

    nbytes: int
    dtype: str
    sizes: Ints


class Subclass(NamedTuple):
    """A tensor subclass that consists of other tensors.

    Attributes:
        kind: module and name of the class. attributes: what it holds beside tensors, by name.
        parts: the tensors inside, by name; no catalog lists them.
    """

    kind: str
    attributes: Mapping[str, object]
    parts: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor.

    Attributes:
        name: full stored dotted name. `path`: the dict keys and list indices behind it.
        chunks: in stored order, empty ones included.
        storage: equal for tensors that share memory, if the source records it (torch files).
        refusal: why no verb can read it, if so; `coverage.prove` raises it. Shape and dtype are
            then what is recorded of them, and no chunk has bytes.
        subclass: what a refused tensor consists of, where that can be read.
    """

    name: str
    path: Path
    shape: Ints
    dtype: DType
    chunks: tuple[Chunk, ...]
    storage: tuple[object, ...] | None = None
    refusal: Diagnostic | None = None
    subclass: Subclass | None = None
    # Set by `coverage.prove`, which several stages call for the same tensor, and by
    # `coverage.between_rows`.
    proven_chunks: tuple[int, ...] | None = field(
        default=None, init=False, compare=False, repr=False
    )
    tallest_chunk: int | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when whole and contiguous."""
        return self.numel * self.dtype.itemsize

    @property
    def first_file(self) -> str | None:
        """File of the first chunk, or None without chunks."""
        return self.chunks[0].file if self.chunks else None


@dataclass(frozen=True, slots=True)
class Object:
    """A stored value that is no tensor: the span of its pickle, or an `inline` value.

    Attributes:
        is_bare: whether an inline value comes from a record or a file that has no checksum.
    """

    name: str
    path: Path
    file: str
    offset: int = 0
    nbytes: int = 0
    inline: object = None
    is_inline: bool = False
    is_bare: bool = False


@dataclass(frozen=True, slots=True)
class Nesting:
    """Container facts that paths of text and numbers cannot tell.

    Attributes:
        keys: dict keys that are no text, by the path that ends in them.
        tuples: paths of containers that are tuples; other numbered containers are lists.
    """

    keys: Mapping[Path, object] = field(default_factory=dict)
    tuples: frozenset[Path] = frozenset()

    def moved(self, paths: Iterable[tuple[Path, Path]]) -> Nesting:
        """Return the facts for new paths, each given behind the one it had."""
        keys: dict[Path, object] = {}
        tuples: set[Path] = set()
        for old, new in paths if self.keys or self.tuples else ():
            # A rename touches the front of a path, a dropped wrapper any part of it.
            shifts = {0, len(new) - len(old)}
            for shift, (index, part) in product(shifts, enumerate(old)):
                there = index + shift
                if not 0 <= there < len(new) or new[there] != part:
                    continue
                if old[: index + 1] in self.keys:
                    keys[new[: there + 1]] = self.keys[old[: index + 1]]
                if old[:index] in self.tuples:
                    tuples.add(new[:there])
        return Nesting(keys, frozenset(tuples))


class RankPrivate(NamedTuple):
    """State of a single rank that belongs to no tree, such as its random number generator's."""

    path: Path
    file: str
    reason: str


class UnknownEntry(NamedTuple):
    """A metadata entry of an unknown class, and a span of its bytes or an empty `file`."""

    name: str
    kind: str
    file: str = ""
    offset: int = 0
    nbytes: int = 0


class Files(Protocol):
    """Files below one directory, read at positions. Names are relative, with `/`."""

    root: str

    def size(self, name: str) -> int:
        """Bytes of a file. Raises SourceError `missing-file` if there is none."""
        ...

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Read exactly `nbytes` bytes. Raises SourceError `truncated-file` if there are fewer."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises SourceError `truncated-file` at the file's end."""
        ...

    def listing(self) -> list[str]:
        """Names directly inside the directory, sorted."""
        ...

    def close(self) -> None:
        """Release what was opened."""
        ...


class Reader(Protocol):
    """What a format offers beyond its metadata."""

    def payloads(self, tensor: Tensor) -> tuple[Payload, ...]:
        """Locate the payload of each of `tensor.chunks`, in their order. Reads headers only."""
        ...

    def load(self, item: Object) -> object:
        """Read an object safely: plain values, `Opaque` placeholders for unknown classes.

        Raises:
            UnsafeError: `unsafe-pickle` if unpickling it would call anything.
        """
        ...


@runtime_checkable
class ItemReader(Protocol):
    """A reader of files in which each chunk is an archive of its own (`Catalog.item_files`)."""

    def recognise(
        self, kind: ItemKind, file: str, offset: int, item: memoryview | None = None
    ) -> Payload | None:
        """Locate the payload of an archive that is like an earlier one; None if it is not.

        Of one that is recognised everything but the payload is whole.

        Args:
            item: the archive's bytes, where they have been read.
        """
        ...

    def refuse_encoded(self, file: str, offset: int) -> None:
        """Raise SourceError `unsupported` if the bytes of an item are no archive as they are."""
        ...


@dataclass(frozen=True, slots=True)
class Catalog:
    """A checkpoint opened: tensors and objects in stored order, and how to get at their bytes.

    Attributes:
        path: what the user named. `resolved`: the checkpoint found there.
        format: `dcp`, `safetensors`, `torch` or `rank-files`.
        nested: whether paths come from real nesting; if not, every path is the name alone and trees
            are told by name.
        files: every data file the metadata names, with the least size it must have.
        archives: those of `files` that are torch archives as a whole, whatever their endings.
        item_files: those in which each chunk's span is a torch archive; `reader` is then an
            `ItemReader`.
        digests: recorded CRC-32 of logical row-major bytes, by full stored tensor name.
        nesting: dict keys and tuples that paths leave open.
        ties: names that the source dropped as tied, each with the name that was kept.
        order: names in the order of the state dict, where `tensors` and `objects` cannot tell it.
        header_text: text beside the tensors in safetensors headers (`__metadata__`), without ties.
        part_roles: roles of the trees of a checkpoint that consists of several, by tree name.
        rank_private: state of single ranks, left out of the trees.
        unknown_entries: metadata entries of unknown classes.
        left_out: places of checkpoints beside this one that were passed over; a warning names each.
        problems: damage that a lenient reader passed over; it is in no other field.
        made_from: the stored tensors behind each one that rules made, by its name.
        made_by: digests of metadata beside the data files, of how values were computed and of those
            rules, or "".
        find_mismatches: reads the metadata again for entries that contradict each other, and
            returns each one's name and what is wrong.
    """

    path: str
    resolved: str
    format: str
    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    source: Files
    reader: Reader
    nested: bool
    world_size: int | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    archives: frozenset[str] = frozenset()
    item_files: frozenset[str] = frozenset()
    digests: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[Diagnostic, ...] = ()
    nesting: Nesting = field(default_factory=Nesting)
    ties: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    header_text: Mapping[str, str] = field(default_factory=dict)
    part_roles: Mapping[str, str] = field(default_factory=dict)
    rank_private: tuple[RankPrivate, ...] = ()
    unknown_entries: tuple[UnknownEntry, ...] = ()
    left_out: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    made_from: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    made_by: str = ""
    find_mismatches: Callable[[], Sequence[tuple[str, str]]] = tuple


def _reaches(shape: Ints, itemsize: int) -> bool:
    """Whether a tensor has 2**63 bytes or more, or would without its dimensions of no elements."""
    if 0 not in shape and len(shape) < 100:
        return prod(shape) * itemsize >= _MAX_NBYTES
    nbytes = 1 if 0 in shape else itemsize
    for size in shape:  # the product of very many takes long
        nbytes *= size or 1
        if nbytes >= _MAX_NBYTES:
            return True
    return False


def check_geometry(name: str, shape: Ints, dtype: DType, file: str) -> None:
    """Refuse shapes that no tensor can have, before anything multiplies or allocates by them.

    Raises:
        SourceError: `out-of-bounds` for negative dimensions, 2**63 bytes and more, or such strides.
    """
    if min(shape, default=0) < 0 or _reaches(shape, dtype.itemsize):
        message = f"{file}: tensor {name!r} has the impossible shape {brief(list(shape))}"
        raise SourceError("out-of-bounds", message, tensor=name, file=file)
