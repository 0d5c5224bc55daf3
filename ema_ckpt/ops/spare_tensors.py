"""The tensors of a source that bear no name of its copy: renamed ones are found among them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from ema_ckpt.core.catalog import Ints, Tensor
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.names import canonical

# Digests of tensors after their cast to a type.
Digests = Callable[[Sequence[Tensor], DType], Iterable[int | None]]


class Naming(NamedTuple):
    """One way to name the source's tensors; `label` is for messages."""

    label: str
    tensors: Mapping[str, Tensor]

    def counterpart(self, name: str) -> Tensor | None:
        """Return the source's tensor of that name, with or without wrapper prefixes."""
        return self.tensors.get(name) or self.tensors.get(canonical(name))

    def moved(self, prefix: str) -> Naming:
        """Put `prefix` in place of what all names begin with."""
        own = common_prefix(self.tensors)
        names = {canonical(name): tensor for name, tensor in self.tensors.items()}
        return Naming(self.label, {prefix + name[len(own) :]: names[name] for name in names})


def common_prefix(names: Iterable[str]) -> str:
    """Return the components that all names begin with, with the dot behind them."""
    plain = [canonical(name) for name in names]
    first, last = min(plain, default=""), max(plain, default="")
    pairs = zip(first, last, strict=False)
    common = "".join([here for here, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return common[: common.rfind(".") + 1]


class Spare:
    """The tensors and tied names that only the source has; those that were renamed are taken out.

    A tensor that a naming lists under several names may have been written under each of them. Of
    equal ones the `likely` ones (ids of tensors) are taken first.
    """

    def __init__(
        self,
        naming: Naming,
        names: Iterable[str],
        digests: Digests,
        likely: Container[int] = frozenset(),
    ) -> None:
        self.named = naming.tensors
        self.digests = digests
        self.taken: set[int] = set()  # ids of tensors
        free: dict[int, set[str]] = {}  # names of each that are not in the copy
        for name, tensor in naming.tensors.items():
            free.setdefault(id(tensor), set()).add(canonical(name))
        for name in names:
            used = naming.counterpart(name)
            if used is not None:
                self.taken.add(id(used))
                free[id(used)].discard(canonical(name))
        self.times = Counter({key: len(left) for key, left in free.items()})
        listed = {id(tensor): tensor for tensor in naming.tensors.values() if free[id(tensor)]}
        self.by_shape: dict[Ints, list[Tensor]] = {}
        for tensor in sorted(
            listed.values(), key=lambda tensor: (id(tensor) in self.taken, id(tensor) not in likely)
        ):
            self.by_shape.setdefault(tensor.shape, []).append(tensor)
        self.by_digest: dict[tuple[Ints, DType, bool], dict[int | None, deque[Tensor]]] = {}

    def may_have(self, tensor: Tensor) -> bool:
        """Whether there is a tensor of that shape, so that a digest tells more."""
        return tensor.shape in self.by_shape

    def take(self, tensor: Tensor, digest: int, *, cast: bool) -> bool:
        """Take out a tensor that has this digest, as it is or cast; return whether there is one."""
        key = tensor.shape, tensor.dtype, cast
        if key not in self.by_digest:
            self.by_digest[key] = self._by_digest(*key)
        equal = self.by_digest[key].get(digest, deque())
        while equal and not self.times[id(equal[0])]:
            equal.popleft()
        if not equal:
            return False
        self.times[id(equal[0])] -= 1
        self.taken.add(id(equal[0]))
        equal.rotate(-1)  # those that were not taken at all come first
        return True

    def _by_digest(self, shape: Ints, dtype: DType, cast: bool) -> dict[int | None, deque[Tensor]]:
        if cast:
            others = [tensor for tensor in self.by_shape[shape] if tensor.dtype != dtype]
            fitting = [t for t in others if t.dtype.is_castable and dtype.is_castable]
        else:
            fitting = [tensor for tensor in self.by_shape[shape] if tensor.dtype == dtype]
        found: dict[int | None, deque[Tensor]] = {}
        for tensor, digest in zip(fitting, self.digests(fitting, dtype), strict=True):
            found.setdefault(digest, deque()).append(tensor)
        return found

    def left(self) -> dict[str, Tensor]:
        """Return those that were not taken, by name."""
        return {name: tensor for name, tensor in self.named.items() if id(tensor) not in self.taken}
