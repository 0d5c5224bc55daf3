"""The averages of a model: chosen, allocated, seeded, and fitted to a model that has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ema_ckpt.core.box import whole
from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.core.text import shown
from ema_ckpt.ema.checkpoint.local_shards_tensor import box_of
from ema_ckpt.ema.model.placement import replica_part
from ema_ckpt.ema.model.shards import ModelShards, ModuleLink, Shadow, Shard, TrackedShard
from ema_ckpt.ema.model.tensor_kinds import refuse_unreadable
from ema_ckpt.ema.optimizer_offload.pinned import pinned_zeros
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
    """The averaged tensors, each with the shard it follows, and the other buffers."""

    shadows: tuple[Shadow, ...]
    tracked: tuple[TrackedShard, ...]  # one per shadow
    live_buffers: tuple[TrackedShard, ...]
    module_links: tuple[ModuleLink, ...]  # of the model


def make_averages(model_shards: ModelShards, settings: Settings) -> Averages:
    """Make averages of a model's tensors, seeded with the live values.

    Raises:
        UsageError: a glob matches nothing, no parameter remains, or replicas are to be split and
            none are declared.
        StateError: all parameters are empty, as another framework's placeholders are; one to be
            averaged is a subclass that keeps its values in other tensors, a sparse one, and so on.
    """
    tracked, live_buffers = _select(model_shards, settings)
    for t in tracked:
        refuse_unreadable(t.shard.fqn, t.shard.local)
    if settings.shard_replicas and not any(t.shard.replica for t in tracked):
        raise UsageError(
            "usage",
            "shard_replicas=True, but no wrapper of this model declares replicas: wrap it in DDP,"
            " use an HSDP mesh or a hybrid FSDP strategy, or leave shard_replicas out",
        )
    if all(0 in t.shard.shape for t in tracked):
        raise StateError(
            "usage",
            f"all {len(tracked)} parameters are empty, as placeholders of another framework are",
        )
    shadows = _allocate(tracked, [_part_of(t, settings) for t in tracked], settings)
    for shadow, followed in zip(shadows, tracked, strict=True):
        seed(shadow, followed, settings.source)
    return Averages(tuple(shadows), tuple(tracked), tuple(live_buffers), model_shards.module_links)


def _select(
    model_shards: ModelShards, settings: Settings
) -> tuple[list[TrackedShard], list[TrackedShard]]:
    """Return the tensors to average, and the buffers to save as they are."""
    _refuse_idle_globs(model_shards, settings)
    tracked = [t for t in model_shards.parameters if _is_averaged(t, settings)]
    if not tracked:
        raise UsageError(
            "usage",
            f"0 of {len(model_shards.parameters)} parameters would be averaged: none requires"
            f" gradients or is left by include={settings.include} and exclude={settings.exclude}",
        )
    averaged_buffers, live_buffers = _select_buffers(model_shards, settings)
    return tracked + averaged_buffers, live_buffers


def _select_buffers(
    model_shards: ModelShards, settings: Settings
) -> tuple[list[TrackedShard], list[TrackedShard]]:
    averaged: list[TrackedShard] = []
    live: list[TrackedShard] = []
    if settings.buffers == "skip":
        return averaged, live
    for buffer in model_shards.buffers:
        if _matches(buffer, settings.exclude):
            continue
        if settings.buffers == "average" and buffer.shard.dtype.is_floating_point:
            averaged.append(buffer)
        else:
            live.append(buffer)
    return averaged, live


def _is_averaged(parameter: TrackedShard, settings: Settings) -> bool:
    dtype = parameter.shard.dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return False
    if _matches(parameter, settings.exclude):
        return False
    if settings.include is None:
        return parameter.requires_grad
    return _matches(parameter, settings.include)


def not_followed(model_shards: ModelShards, settings: Settings, averages: Averages) -> list[str]:
    """Name the parameters that would be averaged, were the averages made now, and are not.

    They were frozen when the averages were made, or were added to the model since.
    """
    followed: set[str] = set()
    for tracked in averages.tracked:
        followed.update(tracked.shard.names)
    names = []
    for parameter in model_shards.parameters:
        if followed.isdisjoint(parameter.shard.names) and _is_averaged(parameter, settings):
            names.append(parameter.shard.fqn)
    return names


def _matches(tracked: TrackedShard, patterns: Iterable[str]) -> bool:
    pairs = product(tracked.shard.names, patterns)
    return any(fnmatchcase(name, pattern) for name, pattern in pairs)


def _refuse_idle_globs(model_shards: ModelShards, settings: Settings) -> None:
    options = (
        ("include", settings.include or (), model_shards.parameters),
        ("exclude", settings.exclude, model_shards.tensors),
    )
    for option, patterns, tensors in options:
        for pattern in patterns:
            if not any(_matches(t, (pattern,)) for t in tensors):
                names = [t.shard.fqn for t in tensors]
                raise UsageError("usage", f"{option}={pattern!r} matches none of {shown(names)}")


class _Part(NamedTuple):
    """The elements [start, start + numel) of a local shard that this rank averages."""

    start: int
    numel: int
    is_split: bool  # over replicas


def _part_of(tracked: TrackedShard, settings: Settings) -> _Part:
    """Return this rank's part of its local shard; all replicas split in the same way."""
    local, replica = tracked.shard.local, tracked.shard.replica
    everything = _Part(0, local.numel(), False)
    if settings.shard_replicas is False or replica is None or replica.count == 1:
        return everything
    is_empty = not tracked.shard.shape or not local.numel()
    if is_empty or not local.is_contiguous():
        return everything
    return _Part(*replica_part(tuple(local.shape), replica.count, replica.index), True)


class _Kind(NamedTuple):
    """Tensors of one kind may share memory."""

    dtype: torch.dtype
    device: torch.device  # of the shard
    followed_dtype: torch.dtype

    def of_residual(self) -> _Kind:
        # In float16 there are no numbers as small as residuals are.
        return self if self.dtype.is_complex else self._replace(dtype=torch.bfloat16)


def _allocate(
    tracked: Sequence[TrackedShard], parts: Sequence[_Part], settings: Settings
) -> list[Shadow]:
    # torch has no complex type of two bfloat16, and no lerp for that of two float16.
    complex_dtype = torch.complex128 if settings.dtype == torch.float64 else torch.complex64
    shapes, kinds = [], []
    for t, part in zip(tracked, parts, strict=True):
        shapes.append(torch.Size([part.numel]) if part.is_split else t.shard.local.shape)
        dtype = complex_dtype if t.shard.dtype.is_complex else settings.dtype
        kinds.append(_Kind(dtype, t.shard.local.device, t.shard.dtype))
    averages = _zeros(shapes, kinds, settings)
    residuals: Sequence[Tensor | None] = [None] * len(kinds)
    if settings.compensate:
        residuals = _zeros(shapes, [kind.of_residual() for kind in kinds], settings)
    return [
        Shadow(t.shard, part.start, part.numel, average, residual, part.is_split)
        for t, part, average, residual in zip(tracked, parts, averages, residuals, strict=True)
    ]


def _is_offloaded(device: torch.device, settings: Settings) -> bool:
    return bool(settings.offload) and device.type == "cuda"


def _zeros(
    shapes: Sequence[torch.Size], kinds: Sequence[_Kind], settings: Settings
) -> list[Tensor]:
    """Allocate zeros beside the shards, or in one slab of pinned host memory per kind."""
    members: dict[_Kind, list[int]] = {}
    for number, kind in enumerate(kinds):
        members.setdefault(kind, []).append(number)
    zeros: dict[int, Tensor] = {}
    for kind, numbers in members.items():
        kind_shapes = [shapes[number] for number in numbers]
        if _is_offloaded(kind.device, settings):
            tensors = pinned_zeros(kind_shapes, kind.dtype)
        else:
            tensors = _arena_zeros(kind_shapes, kind)
        zeros.update(zip(numbers, tensors, strict=True))
    return [zeros[number] for number in range(len(kinds))]


def _arena_zeros(shapes: Sequence[torch.Size], kind: _Kind) -> list[Tensor]:
    """Allocate zeros of one kind; small ones follow each other in memory."""
    limit = _SMALL_NUMEL if kind.dtype is kind.followed_dtype else _SMALL_NUMEL_MIXED
    zeros: dict[int, Tensor] = {}
    for numbers in _arenas(shapes, limit):
        numels = [shapes[number].numel() for number in numbers]
        arena = torch.zeros(sum(numels), dtype=kind.dtype, device=kind.device)
        for number, part in zip(numbers, torch.split(arena, numels), strict=True):
            zeros[number] = part.view(shapes[number])
    listed = []
    for number, shape in enumerate(shapes):
        zero = zeros.get(number)
        if zero is None:
            zero = torch.zeros(shape, dtype=kind.dtype, device=kind.device)
        listed.append(zero)
    return listed


def _arenas(shapes: Sequence[torch.Size], limit: int) -> list[list[int]]:
    """Return the indices of tensors of at most `limit` elements that are to share memory."""
    arenas: list[list[int]] = []
    room = 0
    for number, numel in enumerate(map(torch.Size.numel, shapes)):
        if numel <= limit:
            if not arenas or numel > room:
                arenas.append([])
                room = _ARENA_NUMEL
            arenas[-1].append(number)
            room -= numel
    return arenas


def value_of(tracked: TrackedShard, source: Source | None) -> Tensor:
    """Return the local values to average: the live ones, or those that `source` gives instead.

    Raises StateError if those have another local shape (flat ones aside) or layout.
    """
    shard = tracked.shard
    if source is None or not shard.is_parameter:
        return shard.local
    value = source(shard.fqn, tracked.owner)
    return shard.local if value is None else _local_value(value, tracked)


def _local_value(value: Tensor, tracked: TrackedShard) -> Tensor:
    shard = tracked.shard
    _refuse_foreign_value(value, shard)
    local = value.to_local() if hasattr(value, "to_local") else value
    local, flat = local.detach(), ""
    if tracked.flat_range is not None:
        start, numel = tracked.flat_range
        flat = f" of the flat parameter's shard of {numel} elements"
        if local.numel() == numel:
            local = local.reshape(-1)[start : start + shard.local.numel()]
    has_shape = local.dim() == 1 or local.shape == shard.local.shape
    placements = getattr(value, "placements", None)
    has_placements = placements in (None, getattr(tracked.owner, "placements", None))
    if local.numel() != shard.local.numel() or not has_shape or not has_placements:
        raise StateError(
            "usage",
            f"source gives {shard.fqn!r} a tensor of {tuple(local.shape)}; this rank's shard is"
            f" {tuple(shard.local.shape)}{flat}: return the local shard, or a DTensor laid out as"
            " the parameter",
        )
    return local.reshape(shard.local.shape)


def _refuse_foreign_value(value: object, shard: Shard) -> None:
    """Refuse what a source gave in place of a tensor beside the parameter."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise StateError("usage", f"source gives {shard.fqn!r} a {kind}: return a tensor, or None")
    if value.device != shard.local.device:
        raise StateError(
            "usage",
            f"source gives {shard.fqn!r} a tensor on {value.device}, and its parameter is on"
            f" {shard.local.device}: return it .to(param.device)",
        )


def seed(shadow: Shadow, tracked: TrackedShard, source: Source | None) -> None:
    """Start an average anew, with the value that it follows."""
    shadow.average.copy_(live_part(shadow, value_of(tracked, source)))
    if shadow.residual is not None:
        shadow.residual.zero_()


def live_part(shadow: Shadow, value: Tensor) -> Tensor:
    """Return the part of a local tensor that the shadow averages, as a view in its shape."""
    if not shadow.is_split:
        return value
    if not value.is_contiguous():
        raise StateError(
            "usage",
            f"{shadow.shard.fqn!r}: its average is divided over replicas, which needs contiguous"
            " memory; bring it into its memory format before making the manager, or pass"
            " shard_replicas=False",
        )
    return value.view(-1)[shadow.start : shadow.start + shadow.numel]


def fit(averages: Averages, model_shards: ModelShards, settings: Settings) -> Averages:
    """Fit averages to a changed model: moved to another device, or cut where they were whole.

    Raises:
        StateError: a tensor is gone or no longer tied, has another shape or dtype, or was cut in
            another way.
    """
    pairs = _followed(averages.shadows, model_shards.by_name())
    if all(_is_cut_alike(s, t) and _may_stay(s, t, settings) for s, t in pairs):
        fitted = [_moved(shadow, t, settings) for shadow, t in pairs]
    else:
        fitted = _recut(pairs, settings)
    tracked = tuple(t for _, t in pairs)
    buffers = current_buffers(averages, model_shards)
    return Averages(tuple(fitted), tracked, buffers, model_shards.module_links)


def _followed(
    shadows: Sequence[Shadow], by_name: Mapping[str, TrackedShard]
) -> list[tuple[Shadow, TrackedShard]]:
    """Return each shadow with its present shard, under the name and aliases it was made with."""
    gone = [shadow.shard.fqn for shadow in shadows if shadow.shard.fqn not in by_name]
    if gone:
        raise StateError(
            "usage",
            f"averaged tensors are no longer in the model: {shown(gone)}; see ema.rebind(model)",
        )
    for shadow in shadows:
        _refuse_untied(shadow, by_name)
    pairs = []
    for shadow in shadows:
        live = by_name[shadow.shard.fqn]
        _refuse_change(shadow, live)
        shard = replace(live.shard, fqn=shadow.shard.fqn, aliases=shadow.shard.aliases)
        pairs.append((shadow, replace(live, shard=shard)))
    return pairs


def current_buffers(averages: Averages, model_shards: ModelShards) -> tuple[TrackedShard, ...]:
    """Return the present buffers that are not averaged: a forward may have exchanged them."""
    present: dict[str, TrackedShard] = {}
    for buffer in model_shards.buffers:
        present.update(dict.fromkeys(buffer.shard.names, buffer))
    fqns = (buffer.shard.fqn for buffer in averages.live_buffers)
    return tuple(present[fqn] for fqn in fqns if fqn in present)


def _refuse_untied(shadow: Shadow, by_name: Mapping[str, TrackedShard]) -> None:
    fqn = shadow.shard.fqn
    others = [name for name in shadow.shard.aliases if name in by_name]
    untied = [name for name in others if by_name[name] is not by_name[fqn]]
    if untied:
        raise StateError(
            "usage",
            f"{fqn!r} and {shown(untied)} were one tensor when the manager was made and are no"
            " longer (load_state_dict(assign=True) unties): tie them again, or make a new manager",
        )


def _refuse_change(shadow: Shadow, tracked: TrackedShard) -> None:
    for attribute in ("shape", "dtype"):
        old, new = getattr(shadow.shard, attribute), getattr(tracked.shard, attribute)
        if old != new:
            raise StateError(
                "usage",
                f"{shadow.shard.fqn!r} changed its {attribute} from {old} to {new} since the"
                " manager was made: make a new one, or change it back",
            )


def _is_cut_alike(shadow: Shadow, tracked: TrackedShard) -> bool:
    same_numel = shadow.shard.local.numel() == tracked.shard.local.numel()
    return same_numel and shadow.shard.boxes == tracked.shard.boxes


def _may_stay(shadow: Shadow, tracked: TrackedShard, settings: Settings) -> bool:
    """Return whether the average need not move into pinned memory, now that the model is there."""
    offloaded = _is_offloaded(tracked.shard.local.device, settings)
    return not offloaded or not shadow.numel or shadow.average.is_pinned()


def _moved(shadow: Shadow, tracked: TrackedShard, settings: Settings) -> Shadow:
    """Return the shadow beside the live shard: on its device, and in its shape."""
    local, residual = tracked.shard.local, shadow.residual
    device = torch.device("cpu") if _is_offloaded(local.device, settings) else local.device
    shape = shadow.average.shape if shadow.is_split else local.shape
    if residual is not None:
        residual = residual.to(device).view(shape)
    average = shadow.average.to(device).view(shape)
    return replace(shadow, shard=tracked.shard, average=average, residual=residual)


def _recut(pairs: Sequence[tuple[Shadow, TrackedShard]], settings: Settings) -> list[Shadow]:
    """Return averages cut as the model is now, from averages that were whole."""
    parts = []
    for shadow, tracked in pairs:
        if _is_cut_alike(shadow, tracked):
            parts.append(_Part(shadow.start, shadow.numel, shadow.is_split))
        elif shadow.boxes == (whole(shadow.shard.shape),):
            parts.append(_part_of(tracked, settings))
        else:
            raise StateError(
                "usage",
                f"{shadow.shard.fqn!r} was cut in another way since the manager was made; an"
                " average can only be cut where it was whole: save and restore it instead",
            )
    shadows = _allocate([tracked for _, tracked in pairs], parts, settings)
    for new, (old, _) in zip(shadows, pairs, strict=True):
        new.average.copy_(_cut(old.average, old, new).view(new.average.shape))
        if new.residual is not None and old.residual is not None:
            new.residual.copy_(_cut(old.residual, old, new).view(new.residual.shape))
    return shadows


def _cut(tensor: Tensor, old: Shadow, new: Shadow) -> Tensor:
    if old.boxes == new.boxes:
        return tensor
    tensor = tensor.view(old.shard.shape)
    pieces = [box_of(tensor, box).reshape(-1) for box in new.boxes]
    return torch.cat(pieces) if pieces else tensor.reshape(-1)[:0]
