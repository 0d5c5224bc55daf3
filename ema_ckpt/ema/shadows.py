"""Choosing what is averaged, and the memory of the averages: made, seeded, and fitted to a changed
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from ema_ckpt.core.box import Box, whole
from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.model.placement import replica_part
from ema_ckpt.ema.model.shards import ModelShards, ModuleLink, Shadow, TrackedShard
from ema_ckpt.ema.offload.pinned import pinned_zeros
from ema_ckpt.ema.settings import Settings, Source

# Averages of so many elements at most share memory, so that one operation moves many of them; for
# larger ones the gathering would cost more than the calls it saves. Measured on CPU: where the
# dtypes differ it pays for longer.
_SMALL_NUMEL, _SMALL_NUMEL_MIXED = 1 << 10, 1 << 12
# Below the size from which torch divides an operation among threads (its GRAIN_SIZE): waiting for
# them would cost more than they help.
_ARENA_NUMEL = (1 << 15) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Averages:
    """The averaged tensors, each with what it follows, and the buffers that are not averaged."""

    shadows: tuple[Shadow, ...]
    tracked: tuple[TrackedShard, ...]  # one per shadow
    live_buffers: tuple[TrackedShard, ...]
    module_links: tuple[ModuleLink, ...]  # of the model


def choose(
    census: ModelShards, settings: Settings
) -> tuple[list[TrackedShard], list[TrackedShard]]:
    """What is averaged, and the buffers that are not but belong to the average's state.

    Raises:
        UsageError: a glob matches nothing, or no parameter remains.
    """
    parameters = [
        h for h in census.parameters if h.shard.dtype.is_floating_point or h.shard.dtype.is_complex
    ]
    buffers = list(census.buffers) if settings.buffers != "skip" else []
    _refuse_idle_globs(settings, census)
    if settings.include is None:
        chosen = [h for h in parameters if h.requires_grad]
    else:
        chosen = [h for h in parameters if _matches(h, settings.include)]
    chosen = [h for h in chosen if not _matches(h, settings.exclude)]
    buffers = [h for h in buffers if not _matches(h, settings.exclude)]
    if not chosen:
        raise UsageError(
            "usage",
            f"0 of {len(census.parameters)} parameters would be averaged: none requires gradients or is left by"
            f" include={settings.include} and exclude={settings.exclude}",
        )
    averaged = [
        h for h in buffers if settings.buffers == "average" and h.shard.dtype.is_floating_point
    ]
    names = {h.shard.fqn for h in averaged}
    return chosen + averaged, [h for h in buffers if h.shard.fqn not in names]


def _matches(held: TrackedShard, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in held.shard.names)


def _refuse_idle_globs(settings: Settings, census: ModelShards) -> None:
    everything = [*census.parameters, *census.buffers]
    for option, patterns, among in (
        ("include", settings.include or (), census.parameters),
        ("exclude", settings.exclude, everything),
    ):
        for pattern in patterns:
            if not any(_matches(h, (pattern,)) for h in among):
                names = [h.shard.fqn for h in among]
                raise UsageError("usage", f"{option}={pattern!r} matches none of {shown(names)}")


def make(held: Sequence[TrackedShard], settings: Settings) -> list[Shadow]:
    """Averages for `held`, seeded with the live values.

    Raises:
        StateError: all of it is empty, as another framework's placeholders are.
        UsageError: replicas are to be split and none are declared.
    """
    if settings.shard_replicas and not any(h.shard.replica for h in held):
        raise UsageError(
            "usage",
            "shard_replicas=True, but no wrapper of this model declares replicas: wrap it in DDP, use an HSDP mesh or"
            " a hybrid FSDP strategy, or leave shard_replicas out",
        )
    if all(0 in h.shard.shape for h in held):
        raise StateError(
            "usage",
            f"all {len(held)} parameters are empty, as placeholders of another framework are",
        )
    parts = [_part_of(h, settings) for h in held]
    slots = _allocate(held, parts, settings)
    for slot, h in zip(slots, held, strict=True):
        seed(slot, h, settings.source)
    return slots


_Part = tuple[
    int, int, bool
]  # start, numel, and whether that is this replica's share of a split shard


def _part_of(held: TrackedShard, settings: Settings) -> _Part:
    """What this rank averages of its local shard; the same way of splitting on all replicas."""
    shard = held.shard
    splittable = bool(shard.shape) and shard.local.numel() > 0 and shard.local.is_contiguous()
    if (
        settings.shard_replicas is False
        or shard.replica is None
        or shard.replica.count == 1
        or not splittable
    ):
        return 0, shard.local.numel(), False
    return *replica_part(tuple(shard.local.shape), shard.replica.count, shard.replica.index), True


def _allocate(
    held: Sequence[TrackedShard], parts: Sequence[_Part], settings: Settings
) -> list[Shadow]:
    shards = [h.shard for h in held]
    # torch has no complex type of two bfloat16, and no lerp for that of two float16.
    pairs = torch.complex128 if settings.dtype == torch.float64 else torch.complex64
    dtypes = [pairs if s.dtype.is_complex else settings.dtype for s in shards]
    devices = [s.local.device for s in shards]
    shapes = [
        torch.Size([n]) if split else s.local.shape
        for s, (_, n, split) in zip(shards, parts, strict=True)
    ]
    shadows = _zeros(
        shapes, list(zip(dtypes, devices, (s.dtype for s in shards), strict=True)), settings
    )
    residuals: Sequence[torch.Tensor | None] = [None] * len(shards)
    if settings.compensate:
        # In float16 there are no numbers as small as residuals are.
        rests = [dtype if dtype.is_complex else torch.bfloat16 for dtype in dtypes]
        kinds = list(zip(rests, devices, (s.dtype for s in shards), strict=True))
        residuals = _zeros(shapes, kinds, settings)
    return [
        Shadow(shard, start, numel, shadow, residual, split)
        for shard, (start, numel, split), shadow, residual in zip(
            shards, parts, shadows, residuals, strict=True
        )
    ]


_Kind = tuple[
    torch.dtype, torch.device, torch.dtype
]  # of the average, its device, and of what it follows


def _is_offloaded(device: torch.device, settings: Settings) -> bool:
    """Whether averages of what is on `device` are kept in pinned host memory."""
    return bool(settings.offload) and device.type == "cuda"


def _zeros(
    shapes: Sequence[torch.Size], kinds: Sequence[_Kind], settings: Settings
) -> list[torch.Tensor]:
    """Zeros of each shape where averages live: beside what they follow, or in one slab of host
    memory per kind.
    """
    away = [i for i, kind in enumerate(kinds) if _is_offloaded(kind[1], settings)]
    here = [i for i in range(len(kinds)) if i not in set(away)]
    made = dict(
        zip(here, _arenas([shapes[i] for i in here], [kinds[i] for i in here]), strict=True)
    )
    for kind in dict.fromkeys(kinds[i] for i in away):
        members = [i for i in away if kinds[i] == kind]
        made.update(zip(members, pinned_zeros([shapes[i] for i in members], kind[0]), strict=True))
    return [made[i] for i in range(len(kinds))]


def _arenas(shapes: Sequence[torch.Size], kinds: Sequence[_Kind]) -> list[torch.Tensor]:
    """Zeros of each shape; small ones of one kind follow each other in memory."""
    numels = [shape.numel() for shape in shapes]
    made: dict[int, torch.Tensor] = {}
    for kind in dict.fromkeys(kinds):
        members = [i for i, other in enumerate(kinds) if other == kind]
        small = _SMALL_NUMEL if kind[0] is kind[2] else _SMALL_NUMEL_MIXED
        for run in _filled([i for i in members if numels[i] <= small], numels):
            arena = torch.zeros(sum(numels[i] for i in run), dtype=kind[0], device=kind[1])
            pieces = torch.split(arena, [numels[i] for i in run])
            made.update((i, piece.view(shapes[i])) for i, piece in zip(run, pieces, strict=True))
        for i in members:
            if i not in made:
                made[i] = torch.zeros(shapes[i], dtype=kind[0], device=kind[1])
    return [made[i] for i in range(len(shapes))]


def _filled(indices: Sequence[int], numels: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    used = 0
    for i in indices:
        if used + numels[i] > _ARENA_NUMEL:
            runs.append([])
            used = 0
        runs[-1].append(i)
        used += numels[i]
    return [run for run in runs if run]


def value_of(held: TrackedShard, source: Source | None) -> torch.Tensor:
    """The local values to average: the live ones, or what `source` gives in their place.

    Raises:
        StateError: the source's tensor has another local shape (flat ones aside) or lies in another
            way.
    """
    shard = held.shard
    value = None if source is None or not shard.is_parameter else source(shard.fqn, held.owner)
    if value is None:
        return shard.local
    local = value.to_local() if hasattr(value, "to_local") else value
    local = local.detach()
    if held.flat_range is not None and local.numel() == held.flat_range[1]:
        local = local.reshape(-1)[held.flat_range[0] : held.flat_range[0] + shard.local.numel()]
    fits = local.numel() == shard.local.numel() and (
        local.dim() == 1 or local.shape == shard.local.shape
    )
    if not fits or _placements(value) not in (None, _placements(held.owner)):
        whole = (
            ""
            if held.flat_range is None
            else f" of the flat parameter's shard of {held.flat_range[1]} elements"
        )
        raise StateError(
            "usage",
            f"source gives {shard.fqn!r} a tensor of {tuple(local.shape)}; this rank's shard is"
            f" {tuple(shard.local.shape)}{whole}: return the local shard, or a DTensor laid out as the parameter",
        )
    return local.reshape(shard.local.shape)


def _placements(value: object) -> object:
    return getattr(value, "placements", None)


def seed(slot: Shadow, held: TrackedShard, source: Source | None) -> None:
    """Begin an average anew, with the value that it follows."""
    slot.average.copy_(live_part(slot, value_of(held, source)))
    if slot.residual is not None:
        slot.residual.zero_()


def live_part(slot: Shadow, value: torch.Tensor) -> torch.Tensor:
    """The part of a local tensor that the slot averages, as a view in the shadow's shape.

    Raises:
        StateError: replicas divide it, and it is not contiguous.
    """
    if not slot.is_split:
        return value
    if not value.is_contiguous():
        raise StateError(
            "usage",
            f"{slot.shard.fqn!r}: its average is divided over replicas, which needs contiguous memory; bring it into"
            " its memory format before making the manager, or pass shard_replicas=False",
        )
    return value.view(-1)[slot.start : slot.start + slot.numel]


def fit(averages: Averages, census: ModelShards, settings: Settings) -> Averages:
    """The same averages beside the model as it is now: moved to another device, or cut where they
    were whole.

    Raises:
        StateError: a tensor is gone or no longer tied, has another shape or dtype, or was cut in
            another way.
    """
    found = {name: h for h in (*census.parameters, *census.buffers) for name in h.shard.names}
    gone = [slot.shard.fqn for slot in averages.shadows if slot.shard.fqn not in found]
    if gone:
        raise StateError(
            "usage",
            f"averaged tensors are no longer in the model: {shown(gone)}; see ema.rebind(model)",
        )
    _refuse_untied(averages.shadows, found)
    held = [_renamed(found[slot.shard.fqn], slot) for slot in averages.shadows]
    for slot, h in zip(averages.shadows, held, strict=True):
        _refuse_change(slot, h)
    if all(
        _same_cut(slot, h) and _stays(slot, h, settings)
        for slot, h in zip(averages.shadows, held, strict=True)
    ):
        slots = [
            _relinked(slot, h, settings) for slot, h in zip(averages.shadows, held, strict=True)
        ]
    else:
        slots = _narrowed(averages.shadows, held, settings)
    return Averages(
        tuple(slots), tuple(held), current_buffers(averages, census), census.module_links
    )


def current_buffers(averages: Averages, census: ModelShards) -> tuple[TrackedShard, ...]:
    """The buffers that are not averaged as they are now: a forward may put new tensors in their
    places.
    """
    found = {name: h for h in census.buffers for name in h.shard.names}
    return tuple(found[h.shard.fqn] for h in averages.live_buffers if h.shard.fqn in found)


def _renamed(held: TrackedShard, slot: Shadow) -> TrackedShard:
    """`held` under the name and aliases that the average was made with."""
    shard = replace(held.shard, fqn=slot.shard.fqn, aliases=slot.shard.aliases)
    return replace(held, shard=shard)


def _refuse_untied(slots: Iterable[Shadow], found: Mapping[str, TrackedShard]) -> None:
    for slot in slots:
        apart = [
            n for n in slot.shard.aliases if n in found and found[n] is not found[slot.shard.fqn]
        ]
        if apart:
            raise StateError(
                "usage",
                f"{slot.shard.fqn!r} and {shown(apart)} were one tensor when the manager was made and are no longer"
                " (load_state_dict(assign=True) unties): tie them again, or make a new manager",
            )


def _refuse_change(slot: Shadow, held: TrackedShard) -> None:
    old, new = slot.shard, held.shard
    for what, was, now in (("shape", old.shape, new.shape), ("dtype", old.dtype, new.dtype)):
        if was != now:
            raise StateError(
                "usage",
                f"{old.fqn!r} changed its {what} from {was} to {now} since the manager was made: make a new one, or"
                " change it back",
            )


def _same_cut(slot: Shadow, held: TrackedShard) -> bool:
    return (
        slot.shard.boxes == held.shard.boxes
        and slot.shard.local.numel() == held.shard.local.numel()
    )


def _stays(slot: Shadow, held: TrackedShard, settings: Settings) -> bool:
    """Whether the average need not be moved into pinned memory now that the model is on a
    device.
    """
    return (
        not _is_offloaded(held.shard.local.device, settings)
        or not slot.numel
        or slot.average.is_pinned()
    )


def _relinked(slot: Shadow, held: TrackedShard, settings: Settings) -> Shadow:
    local = held.shard.local
    home = torch.device("cpu") if _is_offloaded(local.device, settings) else local.device
    shape = slot.average.shape if slot.is_split else local.shape
    rest = None if slot.residual is None else slot.residual.to(home).view(shape)
    return replace(slot, shard=held.shard, average=slot.average.to(home).view(shape), residual=rest)


def _narrowed(
    old: Sequence[Shadow], held: Sequence[TrackedShard], settings: Settings
) -> list[Shadow]:
    """Averages cut as the model is now, from averages that were whole."""
    for slot, h in zip(old, held, strict=True):
        if not _same_cut(slot, h) and slot.boxes != (whole(slot.shard.shape),):
            raise StateError(
                "usage",
                f"{slot.shard.fqn!r} was cut in another way since the manager was made; an average can only be cut"
                " where it was whole: save and restore it instead",
            )
    parts = [
        (s.start, s.numel, s.is_split) if _same_cut(s, h) else _part_of(h, settings)
        for s, h in zip(old, held, strict=True)
    ]
    slots = _allocate(held, parts, settings)
    for new, before in zip(slots, old, strict=True):
        new.average.copy_(_cut(before.average, before, new).view(new.average.shape))
        if new.residual is not None and before.residual is not None:
            new.residual.copy_(_cut(before.residual, before, new).view(new.residual.shape))
    return slots


def _cut(tensor: torch.Tensor, before: Shadow, new: Shadow) -> torch.Tensor:
    if before.boxes == new.boxes:
        return tensor
    tensor = tensor.view(before.shard.shape)
    pieces = [tensor[_slices(box)].reshape(-1) for box in new.boxes]
    return torch.cat(pieces) if pieces else tensor.reshape(-1)[:0]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
