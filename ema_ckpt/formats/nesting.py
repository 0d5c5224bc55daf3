"""Flatten nested dicts and lists to leaves with paths, and nest them again.

Paths are those of `torch.distributed.checkpoint` (`_traverse.py`): text for a dict key, a number
for a list index; dicts are always opened, lists if a dict or tensor is in them. Tuples are opened
here if a tensor is in them, as no tensor may get lost. `Nesting` keeps the facts that such a path
lacks: keys that are no text, and tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ema_ckpt.core.catalog import Nesting
from ema_ckpt.core.errors import SourceError, TargetError
from ema_ckpt.formats.pickle.limits import MAX_REPEATED_BYTES, bytes_of
from ema_ckpt.formats.pickle.safe_globals import Global, Opaque, parts_of
from ema_ckpt.formats.pickle.typed_values import TypedText

Path = tuple[str | int, ...]
Parts = Iterable[tuple[str | int, Any]]

MAX_DEPTH = 100
_LONG = 256  # bytes: shorter ones count as leaves
# Names repeat the keys on the way to them, and each takes some bytes of the file itself.
_NAMES_PER_BYTE = 16
_MORE_NAMES = 64 << 20
_BYTES_A_TENSOR = 16  # the least that one takes that is not referred to over and over
_MORE_TENSORS = 1000


def walk(
    root: object, open_container: Callable[[Path, Any], Parts | None], path: Path = ()
) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each leaf below `root`, in stored order.

    `open_container` returns the parts of a container, or None for a leaf.
    """
    parts = open_container(path, root)
    if parts is None:
        yield path, root
    else:
        for part, item in parts:
            yield from walk(item, open_container, (*path, part))


def flatten(
    root: object, is_tensor: Callable[[object], bool], budget: int
) -> tuple[list[tuple[Path, object]], Nesting]:
    """List all leaves below `root` in stored order, and how they nest.

    Args:
        is_tensor: whether a value is a tensor.
        budget: number of containers and leaves allowed, a shared one counted at each reference: a
            few bytes of pickle can refer to more of them than any machine has memory for. As many
            bytes, and 160 MB more, may long texts take that are referred to again.

    Raises:
        SourceError: `unsupported` beyond the budget or a depth of 100, for a key of an odd type
            above a tensor, or for a tensor that no path leads to; `name-collision` for two keys
            that read the same.
    """
    flattener = _Flattener(is_tensor, budget)
    leaves = list(walk(root, flattener.open_container))
    return leaves, Nesting(flattener.keys, frozenset(flattener.tuples))


def _over_and_over(problem: str, most: int) -> SourceError:
    limit = f"written out they take more than {most} bytes, the limit for this file"
    return SourceError("unsupported", f"{problem} over and over; {limit}")


class _Flattener:
    """Opens containers, and collects what their paths lack."""

    def __init__(self, is_tensor: Callable[[object], bool], budget: int) -> None:
        self.keys: dict[Path, object] = {}
        self.tuples: list[Path] = []
        self._is_tensor = is_tensor
        self._budget = budget
        self._is_opened: dict[int, bool] = {}
        self._repeated_budget = self._most_repeated = budget + MAX_REPEATED_BYTES
        self._texts: set[int] = set()  # long ones that were met
        self._names_budget = self._most_names = _NAMES_PER_BYTE * budget + _MORE_NAMES
        self._tensors_budget = budget // _BYTES_A_TENSOR + _MORE_TENSORS

    def open_container(self, path: Path, value: Any) -> Parts | None:
        self._spend(len(path))
        self._spend_name(path)
        if isinstance(value, dict) and value and not self._is_object(value):
            for key in value:
                self._spend_text(key)
            return ((self._text(path, key, value), item) for key, item in value.items())
        if isinstance(value, list | tuple) and self._opens(value):
            if isinstance(value, tuple):
                self.tuples.append(path)
            return enumerate(value)
        self._check_leaf(value)
        return None

    def _is_object(self, value: dict[object, object]) -> bool:
        """Whether text cannot stand for a key, and no tensor is in the dict that needs a name."""
        if all(isinstance(key, str) or _is_plain_key(key) for key in value):
            return False
        return not any(map(self._is_tensor, _inside(value, (list, tuple, dict))))

    def _spend(self, depth: int) -> None:
        """Count one container or leaf."""
        self._budget -= 1
        if self._budget < 0:
            raise SourceError("unsupported", "the same containers are referred to over and over")
        if depth > MAX_DEPTH:
            raise SourceError("unsupported", f"containers are nested more than {MAX_DEPTH} deep")

    def _spend_name(self, path: Path) -> None:
        """Count the characters of the name that a path becomes."""
        self._take_name(sum(len(part) for part in path if isinstance(part, str)))

    def _take_name(self, length: int) -> None:
        self._names_budget -= length
        if self._names_budget < 0:
            raise _over_and_over("the same texts are referred to in names", self._most_names)

    def _spend_text(self, value: object) -> None:
        """Count the bytes of a long text, or of bytes, that was met before."""
        size = bytes_of(value)
        if size < _LONG:
            return
        if id(value) not in self._texts:
            self._texts.add(id(value))
            return
        self._repeated_budget -= size
        if self._repeated_budget < 0:
            raise _over_and_over("the same texts are referred to", self._most_repeated)

    def _text(self, path: Path, key: object, siblings: dict[object, object]) -> str:
        """Convert a key to text that no other key of the dict has."""
        if isinstance(key, str) and not isinstance(key, TypedText):
            return key
        if not _is_plain_key(key):
            raise SourceError("unsupported", f"a dict has a key of type {type(key).__name__}")
        self._take_name(_printed_length(key))
        text = str(key)
        is_sibling = text in siblings and not isinstance(key, TypedText)  # equal to itself
        if is_sibling or (*path, text) in self.keys:
            raise SourceError("name-collision", f"a dict has two keys that read {text!r}")
        self.keys[*path, text] = key
        return text

    def _opens(self, value: list[object] | tuple[object, ...]) -> bool:
        """Whether a tensor is anywhere in `value`, or a dict in a list or in lists in it."""
        if id(value) not in self._is_opened:
            opens = any(map(self._is_tensor, _inside(value, (list, tuple, dict))))
            if not opens and isinstance(value, list):
                opens = any(isinstance(inner, dict) for inner in _inside(value, (list,)))
            self._is_opened[id(value)] = opens
        return self._is_opened[id(value)]

    def _check_leaf(self, value: object) -> None:
        """Count what is in a leaf, as a writer will meet it, and refuse tensors without a path."""
        if self._is_tensor(value):
            self._tensors_budget -= 1
            if self._tensors_budget < 0:
                raise SourceError("unsupported", "the same tensors are referred to over and over")
            return
        pending: list[tuple[object, int]] = [(value, 0)]
        while pending:
            inner, depth = pending.pop()
            self._spend(depth)
            self._spend_text(inner)
            if self._is_tensor(inner):
                raise SourceError("unsupported", "a tensor lies in a set or is the key of a dict")
            if not isinstance(inner, Opaque):
                pending += [(part, depth + 1) for part in parts_of(inner)]


def _is_plain_key(key: object) -> bool:
    """Whether text can stand for a key that is none: it holds no tensor, and can be printed."""
    if isinstance(key, tuple):
        plain = str | bytes | complex | Global
        return all(isinstance(part, plain) or _is_plain_key(part) for part in key)
    if isinstance(key, int):
        return key.bit_length() <= 4096
    return isinstance(key, float | TypedText | None)


def _printed_length(key: object) -> int:
    """About how many characters a plain key has as text."""
    if isinstance(key, tuple):
        return sum(map(_printed_length, key))
    if isinstance(key, int):
        return key.bit_length() // 3
    if isinstance(key, Global):
        return len(key.module) + len(key.name)
    return len(key) if isinstance(key, str | bytes) else 0


def _inside(value: object, opened: tuple[type, ...]) -> Iterator[object]:
    """Iterate over a container and what is in it and in containers of the types `opened`."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        inner = pending.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield inner
        if isinstance(inner, opened):
            pending.extend(inner.values() if isinstance(inner, dict) else inner)  # type: ignore[arg-type]


class _Node(dict[str | int, Any]):
    """A container under construction; leaves may be dicts too."""


def nest(leaves: Iterable[tuple[Sequence[str | int], Any]]) -> dict[str | int, Any]:
    """Nest leaves by path as dicts in dicts; list indices are int keys.

    Raises:
        TargetError: `name-collision` if one path ends where another goes on.
    """
    root = _Node()
    for path, value in leaves:
        node = root
        for depth, part in enumerate(path[:-1], 1):
            inner = node.setdefault(part, _Node())
            if not isinstance(inner, _Node):
                raise _collision(path[:depth])
            node = inner
        if path[-1] in node:
            raise _collision(path)
        node[path[-1]] = value
    return root


def _collision(path: Sequence[str | int]) -> TargetError:
    name = ".".join(map(str, path))
    message = f"two entries meet at {name!r}; rename one (convert --rename)"
    return TargetError("name-collision", message, tensor=name)


def renest(leaves: Iterable[tuple[Path, object]], nesting: Nesting) -> object:
    """Restore the containers of leaves: the inverse of `flatten`. Raises as `nest`.

    A list of which some items are missing becomes a dict from index to value: closing the gaps
    would give the remaining items wrong indices.
    """
    return _restore((), nest(leaves), nesting)


def _restore(path: Path, node: dict[str | int, Any], nesting: Nesting) -> object:
    parts: dict[str | int, object] = {}
    for part, item in node.items():
        parts[part] = _restore((*path, part), item, nesting) if isinstance(item, _Node) else item
    if parts and parts.keys() == set(range(len(parts))):
        items = [parts[index] for index in range(len(parts))]
        return tuple(items) if path in nesting.tuples else items
    return {nesting.keys.get((*path, part), part): item for part, item in parts.items()}
