"""Nested dicts and lists as flat leaves with paths, and back.

Paths are those of `torch.distributed.checkpoint` (`_traverse.py`): text for a dict key, a number
for a place in a list; dicts are always opened, lists if a dict or tensor is in them. Tuples are
opened here if a tensor is in them, as no tensor may get lost. What such a path does not tell (keys
that are no text, tuples) is kept beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ema_ckpt.core.catalog import Nesting
from ema_ckpt.core.errors import SourceError, TargetError
from ema_ckpt.formats.pickle.safe_globals import Opaque, parts_of

Path = tuple[str | int, ...]

_MAX_DEPTH = 100


def flatten(
    root: object, is_tensor: Callable[[object], bool], budget: int
) -> tuple[list[tuple[Path, object]], Nesting]:
    """All leaves below `root`, in stored order.

    Args:
        is_tensor: tells the values that are tensors.
        budget: how many containers and leaves there may be in all, those counted again that are
            stored once and referred to often: a few bytes of pickle can mean more of them than any
            machine holds.

    Raises:
        SourceError: `unsupported` beyond the budget or a depth of 100, for a key of an odd type, or
            for a tensor that no path leads to; `name-collision` for two keys that read the same.
    """
    walk = _Walk(is_tensor, budget)
    walk.visit((), root)
    return walk.leaves, Nesting(walk.keys, frozenset(walk.tuples))


class _Walk:
    """The state of one traversal."""

    def __init__(self, is_tensor: Callable[[object], bool], budget: int) -> None:
        self.is_tensor = is_tensor
        self.budget = budget
        self.leaves: list[tuple[Path, object]] = []
        self.keys: dict[Path, object] = {}
        self.tuples: list[Path] = []
        self._known: dict[tuple[int, bool], bool] = {}

    def visit(self, path: Path, value: object) -> None:
        """Open `value`, or note it as a leaf."""
        self.spend(1)
        if len(path) > _MAX_DEPTH:
            raise SourceError("unsupported", f"containers are nested more than {_MAX_DEPTH} deep")
        if isinstance(value, dict) and value:
            for key, item in value.items():
                self.visit((*path, self._text(path, key, value)), item)
        elif isinstance(value, list | tuple) and self._opens(value):
            if isinstance(value, tuple):
                self.tuples.append(path)
            for index, item in enumerate(value):
                self.visit((*path, index), item)
        else:
            self._weigh(value)
            self.leaves.append((path, value))

    def spend(self, count: int) -> None:
        """Take from the budget."""
        self.budget -= count
        if self.budget < 0:
            raise SourceError("unsupported", "the same containers are referred to over and over")

    def _text(self, path: Path, key: object, siblings: Mapping[object, object]) -> str:
        """A key as text. Whole numbers may be too long for that, and other keys may read the
        same.
        """
        if isinstance(key, str):
            return key
        if not isinstance(key, int | float | tuple | None) or (
            isinstance(key, int) and key.bit_length() > 4096
        ):
            raise SourceError("unsupported", f"a dict has a key of type {type(key).__name__}")
        text = str(key)
        place = (*path, text)
        if text in siblings or place in self.keys:
            raise SourceError("name-collision", f"a dict has two keys that read {text!r}")
        self.keys[place] = key
        return text

    def _opens(self, value: list[object] | tuple[object, ...]) -> bool:
        return self._holds(value, False) or (isinstance(value, list) and self._holds(value, True))

    def _holds(self, value: list[object] | tuple[object, ...], dicts: bool) -> bool:
        """Whether a tensor is anywhere in `value`; with `dicts`, whether a dict is in it or in
        lists in it.
        """
        mark = (id(value), dicts)
        if mark not in self._known:
            self._known[mark] = False  # for a list that contains itself
            self._known[mark] = any(
                isinstance(inner, dict) if dicts else self.is_tensor(inner)
                for inner in _inside(value, dicts)
            )
        return self._known[mark]

    def _weigh(self, value: object) -> None:
        """Count what is in a leaf, as whoever writes it will meet it; tensors in places without a
        path are refused.
        """
        todo: list[tuple[object, int]] = [] if self.is_tensor(value) else [(value, 0)]
        while todo:
            inner, depth = todo.pop()
            self.spend(1)
            if depth > _MAX_DEPTH:
                raise SourceError(
                    "unsupported", f"containers are nested more than {_MAX_DEPTH} deep"
                )
            if self.is_tensor(inner):
                raise SourceError("unsupported", "a tensor lies in a set or is the key of a dict")
            todo += (
                [] if isinstance(inner, Opaque) else [(part, depth + 1) for part in parts_of(inner)]
            )


def _inside(value: object, lists_only: bool) -> Iterable[object]:
    """Everything in a container and the containers in it, each once."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        inner = todo.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield inner
        if isinstance(inner, list) or (isinstance(inner, tuple) and not lists_only):
            todo.extend(inner)
        elif isinstance(inner, dict) and not lists_only:
            todo.extend(inner.values())


def renest(leaves: Iterable[tuple[Path, object]], nesting: Nesting) -> object:
    """The containers whose leaves these are: the inverse of `flatten`.

    A list of which some places are missing becomes a dict from place to value: closing the gaps
    would give what is left the wrong places.

    Raises:
        TargetError: `name-collision` if one path ends where another goes on.
    """
    root: dict[str | int, object] = {}
    for path, value in leaves:
        if not path:
            return value
        node = root
        for depth, part in enumerate(path[:-1], 1):
            below = node.setdefault(part, _Node())
            if not isinstance(below, _Node):
                raise _collision(path[:depth])
            node = below
        if path[-1] in node:
            raise _collision(path)
        node[path[-1]] = value
    return _close((), root, nesting)


class _Node(dict[str | int, object]):
    """A container under construction; leaves may be dicts too."""


def _collision(path: Path) -> TargetError:
    name = ".".join(map(str, path))
    return TargetError(
        "name-collision", f"two entries meet at {name!r}; rename one with --rename", tensor=name
    )


def _close(path: Path, node: dict[str | int, object], nesting: Nesting) -> object:
    parts = {
        part: _close((*path, part), item, nesting) if isinstance(item, _Node) else item
        for part, item in node.items()
    }
    if parts and set(parts) == set(range(len(parts))):
        items = [parts[index] for index in range(len(parts))]
        return tuple(items) if path in nesting.tuples else items
    return {nesting.keys.get((*path, part), part): item for part, item in parts.items()}
