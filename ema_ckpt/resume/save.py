"""`save`: model, averages, optimizer and extra state of all ranks into one checkpoint directory."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from ema_ckpt.comm.channel import Channel, open_channel
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.comm.rendezvous import meet
from ema_ckpt.core.box import whole
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import TargetError, UsageError, shown
from ema_ckpt.ema.model.live import buffer_names, live_shards
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.swap import refuse_inside
from ema_ckpt.resume.flatten import Leaf, Pieces, flatten
from ema_ckpt.resume.optimizer_state import Optimizers, optimizer_tree
from ema_ckpt.resume.save_async import run_in_background, settle
from ema_ckpt.resume.save_plan import Plan, plan
from ema_ckpt.resume.save_write import write
from ema_ckpt.resume.tensor_source import load_plain
from ema_ckpt.writing.preflight import resolve_target

if TYPE_CHECKING:
    from ema_ckpt.ema.manager import ShardedEMA

_CALL = "save"
_SMALL_NUMEL = 4096


@overload
def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    ema: ShardedEMA | Mapping[str, ShardedEMA] | None = None,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    async_save: Literal[False] = False,
    overwrite: bool = False,
    check_replicas: bool = False,
    timeout: float = 300,
) -> Path: ...


@overload
def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    ema: ShardedEMA | Mapping[str, ShardedEMA] | None = None,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    async_save: Literal[True],
    overwrite: bool = False,
    check_replicas: bool = False,
    timeout: float = 300,
) -> Future[Path]: ...


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    ema: ShardedEMA | Mapping[str, ShardedEMA] | None = None,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    async_save: bool = False,
    overwrite: bool = False,
    check_replicas: bool = False,
    timeout: float = 300,
) -> Path | Future[Path]:
    """Write a checkpoint directory that is complete or not there; collective.

    It holds the trees `model`, `ema`, `optimizer` (in torch's nested form) and `extra`, as far as
    they are given, and plain `torch.distributed.checkpoint.load` reads it. What several ranks hold
    is written once; of buffers, in which ranks may differ, the lowest rank's.

    Args:
        path: the directory to make; its parent is made if it is missing.
        ema: one manager, or several by name, which become `ema.<name>`.
        optimizer: one or several.
        extra: anything picklable by name; of objects with `state_dict()` that is taken. A warning
            names what `restore` will refuse: it unpickles plain values, tensors, NumPy's arrays and
            scalars, paths and times.
        async_save: return once every byte to be written is staged on the host, with a future of the
            path. A second save waits for the first, and so does the end of the process.
        overwrite: replace a checkpoint at `path`; the old one stays until the new one is complete.
        check_replicas: compare what is held by several ranks, and warn by name of what differs.
        timeout: seconds to wait for the other ranks to call `save` too.

    Returns:
        The published directory.

    Raises:
        CollectiveError: `rank-failed`: a rank did not come, died, or could not write; no checkpoint
            is published.
        TargetError: `target-exists` and others of the target.
        StateError: inside `swap()`; or the ranks' pieces of some tensor do not make it whole.
    """
    meet(_CALL, timeout)
    settle()
    ours = open_channel("save")
    target = _agreed_target(path, ours)
    state = run_on_all_ranks(ours, _CALL, lambda: _state(model, ema, optimizer, extra))
    _join_groups(state.get("optimizer", {}).get("param_groups", []), ours)
    leaves = run_on_all_ranks(ours, _CALL, lambda: flatten(state))
    if not ours.rank:
        _warn_of_unreadable(leaves)
    loose = _buffer_names(model, ema) | {leaf.name for leaf in leaves if leaf.path[0] == "extra"}
    _warn_of_drift(
        [leaf for leaf in leaves if check_replicas or leaf.name in loose or _is_small(leaf)], ours
    )
    planned = plan(leaves, loose, ours, _CALL)
    if not async_save:
        return write(target, planned, ours, _CALL, overwrite=overwrite)
    planned = run_on_all_ranks(ours, _CALL, lambda: _on_host(planned))
    return run_in_background(lambda: write(target, planned, ours, _CALL, overwrite=overwrite))


def _agreed_target(path: str | os.PathLike[str], ours: Channel) -> Path:
    """The place to write to, the same on all ranks; rank 0 makes its parent."""
    target = run_on_all_ranks(ours, _CALL, lambda: resolve_target(path))
    asked = sorted(set(ours.exchange(str(target))))
    if len(asked) > 1:
        raise UsageError("usage", f"save: the ranks name different targets: {shown(asked)}")
    run_on_all_ranks(ours, _CALL, lambda: None if ours.rank else _make(target.parent))
    return target


def _make(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError(
            "not-found", f"{parent}: cannot be made: {error.strerror}", file=str(parent)
        ) from error


def _state(
    model: nn.Module,
    ema: ShardedEMA | Mapping[str, ShardedEMA] | None,
    optimizer: Optimizers | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    refuse_inside(model, "save()")
    state: dict[str, Any] = {"model": live_shards(scan_model(model))}
    if isinstance(ema, Mapping):
        state["ema"] = {name: manager.state_dict() for name, manager in ema.items()}
    elif ema is not None:
        state["ema"] = ema.state_dict()
    if optimizer is not None:
        state["optimizer"] = optimizer_tree(model, optimizer)
    if extra is not None:
        state["extra"] = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in extra.items()
        }
    return state


def _join_groups(groups: Sequence[dict[str, Any]], ours: Channel) -> None:
    """Name in each parameter group what any rank has in it: ranks differ in that as the stages of a
    pipeline do.
    """
    everyone = ours.exchange_if_different([group["params"] for group in groups])
    for index, group in enumerate(groups if everyone else ()):
        listed = [name for lists in everyone if index < len(lists) for name in lists[index]]
        group["params"] = list(dict.fromkeys(listed))


def _buffer_names(
    model: nn.Module, ema: ShardedEMA | Mapping[str, ShardedEMA] | None
) -> frozenset[str]:
    """Full names of buffers wherever they are saved."""
    trees = ["model"]
    if isinstance(ema, Mapping):
        trees += [f"ema.{name}.weights" for name in ema]
    elif ema is not None:
        trees.append("ema.weights")
    names = buffer_names(scan_model(model))
    return frozenset(f"{tree}.{name}" for tree in trees for name in names)


def _warn_of_drift(leaves: Sequence[Leaf], ours: Channel) -> None:
    """Compare, by CRC-32, what several ranks hold; rank 0 warns by name of what differs."""
    if ours.size == 1:
        return
    mine = [[leaf.name, _marks(leaf)] for leaf in leaves]
    if not ours.exchange_if_different(hashlib.sha256(json.dumps(mine).encode()).hexdigest()):
        return
    found: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for data in ours.gather(json.dumps(mine).encode()):
        for name, held in json.loads(data):
            for offsets, crc in held:
                found.setdefault((name, tuple(offsets)), set()).add(crc)
    differing = sorted({name for (name, _), crcs in found.items() if len(crcs) > 1})
    if differing:
        warnings.warn(
            f"replicas-differ: ranks hold different values of {shown(differing)}; one rank's are saved, of buffers and"
            " extra the lowest one's. What each has of its own goes into extra under names that tell the rank",
            stacklevel=3,
        )


def _is_small(leaf: Leaf) -> bool:
    """Whether this is optimizer state, or an option, that a rank has whole: one per layer, say, and
    not per weight.
    """
    if leaf.path[0] != "optimizer":
        return False
    held = leaf.value.held if isinstance(leaf.value, Pieces) else ()
    return isinstance(leaf.value, bytes) or all(
        box.numel <= _SMALL_NUMEL and box == whole(leaf.value.shape) for box, _ in held
    )


def _warn_of_unreadable(leaves: Sequence[Leaf]) -> None:
    """Warn of objects under `extra` that `restore` will refuse, since they are no plain values."""
    for leaf in leaves:
        if leaf.path[0] != "extra" or not isinstance(leaf.value, bytes):
            continue
        try:
            load_plain(leaf.value)
        except Exception:  # noqa: BLE001  # torch has no class of its own for it
            warnings.warn(
                f"unsafe-pickle: {leaf.name!r} holds more than plain values: it is saved, but restore() refuses it"
                " unless torch.serialization.add_safe_globals() lists its classes; pass its state_dict() instead",
                stacklevel=3,
            )


def _marks(leaf: Leaf) -> list[tuple[tuple[int, ...], int]]:
    """Offsets and CRC-32 of each piece; of an object its mark."""
    if isinstance(leaf.value, Pieces):
        return [(box.offsets, _crc(view)) for box, view in leaf.value.held]
    return [((), leaf.mark)]


def _crc(view: torch.Tensor) -> int:
    data: Any = view.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return crc32(data)


def _on_host(planned: Plan) -> Plan:
    """The plan with a copy of every tensor, so that training may go on."""
    items = tuple(
        item
        if isinstance(item.data, bytes)
        else replace(item, data=item.data.detach().to("cpu", copy=True))
        for item in planned.items
    )
    return replace(planned, items=items)
