"""Noticing, before each update, that a module or the memory behind a shard was exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ema_ckpt.ema.shards import Edge, Held

__all__ = ["Watch"]

# In builds of torch for CUDA: whether tensors still have their addresses, in one call. A call per tensor takes longer
# than all the rest of an update.
_same_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)

_Entry = tuple[dict[str, Any], str, object]  # place, key, and what is to be there


class Watch:
    """Notices `.to()`, `load_state_dict(assign=True)`, a late wrapper.

    Costs about 0.05 µs a tensor, so that it can be asked before each update.
    """

    __slots__ = ("_addresses", "_dtensors", "_indices", "_places", "_pointed", "_seen", "_single", "_whole")

    def __init__(self, held: Iterable[Held], edges: Iterable[Edge]) -> None:
        held = list(held)
        self._whole, whole, rest = _split([*((h.place, h.key, h.seen) for h in held), *edges])
        self._places = ([place for place, _, _ in rest], [key for _, key, _ in rest])
        self._seen = ([seen for _, _, seen in whole], [seen for _, _, seen in rest])
        # Lists compare by identity first, but go on to `==`, which a new tensor of one equal element would pass.
        single = [entry for entry in (*whole, *rest) if isinstance(entry[2], torch.Tensor) and entry[2].numel() <= 1]
        self._single = ([place for place, _, _ in single], [key for _, key, _ in single], [s for _, _, s in single])
        self._pointed = [h.pointed for h in held if h.pointed is not None]
        self._addresses = [tensor.data_ptr() for tensor in self._pointed]
        self._indices = list(range(len(self._pointed)))
        self._dtensors = [(h.seen, h.seen._local_tensor) for h in held if hasattr(h.seen, "_local_tensor")]

    def unchanged(self) -> bool:
        """Whether every shard's `local` is still the live memory."""
        places, keys, seen = self._single
        return (
            all(map(is_, map(dict.get, places, keys), seen))
            and self._same_objects()
            and self._same_memory()
            # Conversions swap the insides of a DTensor and keep the object.
            and all(dtensor._local_tensor is local for dtensor, local in self._dtensors)
        )

    def _same_objects(self) -> bool:
        whole, rest = self._seen
        try:
            return (
                list(chain.from_iterable(map(dict.values, self._whole))) == whole
                and list(map(dict.get, *self._places)) == rest
            )
        except (RuntimeError, TypeError, ValueError):  # from `==` of tensors, which are others then
            return False

    def _same_memory(self) -> bool:
        if _same_addresses is not None and self._pointed:
            return bool(_same_addresses(self._pointed, self._addresses, self._indices))
        return list(map(torch.Tensor.data_ptr, self._pointed)) == self._addresses


def _split(entries: Sequence[_Entry]) -> tuple[list[dict[str, Any]], list[_Entry], list[_Entry]]:
    """Dictionaries of which every value is watched, their entries in order, and the other entries."""
    by_place: dict[int, dict[str, _Entry]] = {}
    for entry in entries:
        by_place.setdefault(id(entry[0]), {})[entry[1]] = entry
    whole: list[dict[str, Any]] = []
    inside: list[_Entry] = []
    rest: list[_Entry] = []
    for watched in by_place.values():
        place = next(iter(watched.values()))[0]
        if watched.keys() == place.keys():
            whole.append(place)
            inside += [watched[key] for key in place]
        else:
            rest += watched.values()
    return whole, inside, rest
