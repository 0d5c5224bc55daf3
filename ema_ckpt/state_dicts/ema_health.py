"""What the metadata tells of an average: whether it ever moved, and whether it fits its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ema_ckpt.core.catalog import Catalog, Diagnostic, Object
from ema_ckpt.core.errors import AccessError, EmaCkptError, SourceError, UsageError
from ema_ckpt.core.names import EMA, canonical
from ema_ckpt.core.text import counted
from ema_ckpt.state_dicts.ema_config import EmaConfig, is_count, read_ema_config
from ema_ckpt.state_dicts.ema_weights import POSITIONS
from ema_ckpt.state_dicts.tree import Tree, live_of, of_role

_SHOWN = 10


def check_averages(catalog: Catalog, trees: Sequence[Tree]) -> Iterator[Diagnostic]:
    """Warn of every EMA that never moved, is still a copy, or does not fit its live tree."""
    by_name = {tree.name: tree for tree in trees}
    for tree in of_role(trees, EMA):
        # Whoever reads the settings for their own sake reports what is wrong with them.
        with suppress(SourceError, UsageError):
            yield from find_stalled(catalog, tree)
            yield from find_copy(catalog, tree)
        partner = by_name.get(tree.partner or "")
        live = live_of(trees if partner is None else [partner], tree)
        if live is not None:
            yield from find_misfits(tree, live)


def find_stalled(catalog: Catalog, tree: Tree) -> Iterator[Diagnostic]:
    """Warn of an EMA that never moved: no update, fewer than its `every`, or a decay of 1."""
    config = known_config(catalog, tree)
    updates, every = config.num_updates, _every(config)
    if updates and config.schedule == {"kind": "constant", "decay": 1.0}:
        message = f"EMA {tree.name!r} does not move: its decay is 1; give one below 1 to average"
        yield Diagnostic("ema-stalled", message)
        return
    if updates is None or _moved_at(config):
        return
    why = "was never updated (num_updates is 0)"
    remedy = "call update() after each optimizer step"
    if updates:
        why = f"never moved: {counted(updates, 'update')}, and it moves at each {every:,}th"
        remedy = "train on, or save it with a smaller `every`"
    message = f"EMA {tree.name!r} {why}: it is still the weights it began with; {remedy}"
    yield Diagnostic("ema-stalled", message)


def find_copy(catalog: Catalog, tree: Tree) -> Iterator[Diagnostic]:
    """Warn of an EMA that moved, but by its schedule only copied the live weights so far."""
    why = copied_because(catalog, tree)
    if why is not None:
        message = f"EMA {tree.name!r} is still a copy of the live weights: {why}"
        yield Diagnostic("ema-stalled", message)


def copied_because(catalog: Catalog, tree: Tree) -> str | None:
    """Say why the last move of an EMA copied the live weights; None if it averaged, or never moved.

    A move multiplies the decays of the calls since the one before: it copies if one of them is 0.
    """
    config = known_config(catalog, tree)
    moved_at = _moved_at(config)
    if not moved_at:
        return None
    first = max(1, moved_at - _every(config) + 1)
    start = _copies_until(catalog, tree, config)
    if start is None or first > start:
        return None
    updates = counted(config.num_updates or 0, "update")
    if window := _window_of(config):
        return f"its window of {window:,} began at update {start:,}, and it has had {updates}"
    return f"its decay is 0 up to update {start:,}, and it has had {updates}"


def _copies_until(catalog: Catalog, tree: Tree, config: EmaConfig) -> int | None:
    """Return the last call whose decay is 0 by the schedule; None if none is, or it is unknown."""
    schedule = config.schedule if isinstance(config.schedule, Mapping) else {}
    kind = schedule.get("kind")
    if kind == "power-function":
        return 1
    if kind == "warmup" and not schedule.get("min_decay"):
        return _whole(schedule.get("start", 0), 0) + 1
    window = _window_of(config)
    if window:
        moved_at = _moved_at(config)
        return moved_at - (moved_at - 1) % window
    if tree.layout == POSITIONS:  # diffusers' EMAModel
        start = _entry(catalog, tree, "update_after_step")
        if is_count(start):
            return start + 1
    return None


def _window_of(config: EmaConfig) -> int:
    """Return the number of updates of a window; 0 if the schedule has none."""
    schedule = config.schedule
    if not isinstance(schedule, Mapping) or schedule.get("kind") != "window":
        return 0
    return max(0, _whole(schedule.get("n"), 0))


def _entry(catalog: Catalog, tree: Tree, name: str) -> object:
    """Return a plain value stored in a tree, or None; pickled ones are not opened."""
    for item in (*tree.settings.values(), *tree.objects):
        is_called_so = item.path[-1:] == (name,)
        if is_called_so and isinstance(item, Object) and item.is_inline:
            return catalog.reader.load(item)
    return None


def known_config(catalog: Catalog, tree: Tree) -> EmaConfig:
    """Read the settings of an EMA; of those that cannot be read safely, nothing is known."""
    try:
        return read_ema_config(catalog, tree)
    except AccessError:
        raise
    except EmaCkptError:
        return read_ema_config(catalog, tree, open_objects=False)


def _every(config: EmaConfig) -> int:
    return max(1, _whole(config.raw.get("every"), 1))


def _moved_at(config: EmaConfig) -> int:
    """Return the call at which an EMA last moved; 0 if it never did, or its counter is unknown."""
    updates = config.num_updates
    if not updates:
        return 0
    counter = config.raw.get("counter")
    moved_at = counter.get("moved_at") if isinstance(counter, Mapping) else None
    moved_at = config.raw.get("counter.moved_at", moved_at)  # a configuration saved as a dict
    return _whole(moved_at, updates - updates % _every(config))


def _whole(value: object, default: int) -> int:
    return value if is_count(value) else default


def find_misfits(ema: Tree, live: Tree) -> Iterator[Diagnostic]:
    """Warn of averages whose shape is not that of their live weight; empty ones among them."""
    if ema.problem is not None or live.problem is not None:
        return
    shapes = {canonical(name): tensor.shape for name, tensor in live.weights.items()}
    common = 0
    misfits = []
    for name, tensor in ema.weights.items():
        shape = shapes.get(canonical(name))
        if shape is None:
            continue
        common += 1
        if shape != tensor.shape:
            misfits.append(f"{name!r} {list(tensor.shape)}, live {list(shape)}")
    if not misfits:
        return
    rest = f" and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else ""
    share = f"{len(misfits)} of {counted(common, 'common name')}"
    message = (
        f"EMA {ema.name!r} does not fit {live.name!r}: {share} with another shape: "
        f"{'; '.join(misfits[:_SHOWN])}{rest}; is this the EMA of another model, or was it saved "
        "before its weights were there?"
    )
    yield Diagnostic("ema-unrelated", message)
