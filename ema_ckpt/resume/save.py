"""`save`: model, averages, optimizer and extra state of all ranks into one checkpoint directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from torch import nn

from ema_ckpt.comm.channel import Channel, leaving_together
from ema_ckpt.comm.collective import run_on_all_ranks
from ema_ckpt.comm.rendezvous import failure_of, meet_and_connect, one_call_at_a_time
from ema_ckpt.core.box import whole
from ema_ckpt.core.errors import TargetError, UsageError
from ema_ckpt.core.text import path_text, shown
from ema_ckpt.ema.checkpoint.agreement import compare_values, find_unproven
from ema_ckpt.ema.checkpoint.listing import GlobalListing, gather_listing
from ema_ckpt.ema.manager import ShardedEMA, managers_by_label, state_of
from ema_ckpt.ema.model.live_tree import buffer_names, live_shards
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.model.shards import ModelShards
from ema_ckpt.ema.optimizers import Optimizers, as_list, state_keepers
from ema_ckpt.ema.swap import warn_of_not_followed, warn_of_stalled
from ema_ckpt.ema.swap_state import refuse_inside
from ema_ckpt.resume.agreed_options import agree_on_options
from ema_ckpt.resume.flatten import Leaf, LocalShards, flatten, refuse_unnamed
from ema_ckpt.resume.optimizer_state import merge_group_parameters, optimizer_tree
from ema_ckpt.resume.replicas import agree_on_averages
from ema_ckpt.resume.save_async import (
    after_background_save,
    run_in_background,
    wait_for_background_save,
)
from ema_ckpt.resume.save_plan import entries_of, plan_save
from ema_ckpt.resume.save_write import write
from ema_ckpt.storage.files import local_path
from ema_ckpt.writing.preflight import look_again, resolve_target, unresolved

_CALL = "save"


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
) -> Path | str: ...


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
) -> Future[Path | str]: ...


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
) -> Path | str | Future[Path | str]:
    """Write a checkpoint directory, completely or not at all; collective.

    It holds those of the trees `model`, `ema`, `optimizer` (in torch's nested form) and `extra`
    that are given, and plain `torch.distributed.checkpoint.load` reads it. A value that several
    ranks hold is written once, by the lowest of them; parameters that no wrapper keeps equal,
    buffers and `extra` are compared, and a warning names those that differ.

    Args:
        path: the directory to make, or an fsspec URL; a missing parent is made.
        ema: one manager, or several by name, which become `ema.<name>`.
        optimizer: one or several.
        extra: by name, what `restore` can read: plain values, tensors, NumPy arrays and scalars,
            paths and times; of an object with `state_dict()`, its state.
        async_save: return once every byte to be written is staged on the host, with a future of the
            path. A second save waits for the first, and so does the end of the process.
        overwrite: replace a checkpoint at `path`; the old one stays until the new one is complete.
        check_replicas: compare values that several ranks hold, and warn by name of those that
            differ.
        timeout: seconds to wait for the other ranks to call `save` too.

    Returns:
        The published directory: a path, or the text of a URL.

    Raises:
        CollectiveError: `rank-failed`: a rank did not come, died, or could not write; no checkpoint
            is published.
        TargetError: `target-exists` and others of the target.
        StateError: inside `swap()`; the ranks' pieces of some tensor do not make it whole; they
            disagree on the number of updates; or they hold different values under one name, and are
            no replicas of each other. `unsupported`: a tensor that `restore` could not bring back:
            a quantised or sparse one, a subclass, or a DTensor with a placement of another package.
        UsageError: `unsupported`: an object that `restore` would refuse, or an optimizer that hides
            its state.
    """
    with (
        one_call_at_a_time(_CALL, "save"),
        leaving_together("save", after_background_save),
    ):
        failure = failure_of(lambda: path_text(path))
        ranks = meet_and_connect(_CALL, "save", timeout, failure, wait_for_background_save)
        options = {
            "async_save": bool(async_save),
            "overwrite": bool(overwrite),
            "check_replicas": bool(check_replicas),
        }
        agree_on_options(options, ranks, _CALL)
        target = _agree_on_target(path, ranks)
        collected = run_on_all_ranks(
            ranks, _CALL, lambda: _collect_state(model, ema, optimizer, extra)
        )
        state = collected.state
        agree_on_averages(managers_by_label(ema, _CALL), ranks, _CALL)
        merge_group_parameters(state.get("optimizer", {}).get("param_groups", []), ranks)
        leaves = run_on_all_ranks(ranks, _CALL, lambda: flatten(state))
        listing = gather_listing(entries_of(leaves), ranks, _CALL)
        _compare_replicas(collected, leaves, listing, ranks, every=check_replicas)
        plan = plan_save(leaves, listing, ranks, _CALL)
        if not async_save:
            return write(target, plan, ranks, _CALL, overwrite=overwrite)
        plan = run_on_all_ranks(ranks, _CALL, plan.on_host)

        def write_later() -> Path | str:
            with leaving_together("save"):
                return write(target, plan, ranks, _CALL, overwrite=overwrite)

        return run_in_background(write_later)


def _agree_on_target(path: str | os.PathLike[str], ranks: Channel) -> Path | str:
    """Resolve the path to write to, the same on all ranks; rank 0 makes its parent."""

    def resolve() -> tuple[str, Path | str]:
        given = path_text(path)
        local = local_path(given)
        if local is None:
            return given, given
        # What rank 0 makes is not looked for elsewhere before it is there.
        return unresolved(local), Path() if ranks.rank else resolve_target(local)

    place, target = run_on_all_ranks(ranks, _CALL, resolve)
    places = sorted(set(ranks.exchange(place)))
    if len(places) > 1:
        raise UsageError("usage", f"save: the ranks name different targets: {shown(places)}")
    if isinstance(target, Path):
        target = Path(ranks.broadcast_json(str(target)))

    def make_parent() -> None:
        if ranks.rank or isinstance(target, str):
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"{target.parent}: cannot be made: {error.strerror}"
            raise TargetError("not-found", message, file=str(target.parent)) from error

    run_on_all_ranks(ranks, _CALL, make_parent)
    if isinstance(target, Path) and ranks.rank:
        look_again(target.parent)
    return target


class _Collected(NamedTuple):
    """The state of a save, and the prefixes under which it has the model's names."""

    state: dict[str, Any]
    weights: Sequence[str]
    shards: ModelShards

    def full_names(self, names: Iterable[str]) -> frozenset[str]:
        """Return names of the model as the trees of live weights and averages have them."""
        listed = list(names)
        return frozenset(f"{tree}.{name}" for tree in self.weights for name in listed)


def _collect_state(
    model: nn.Module,
    ema: ShardedEMA | Mapping[str, ShardedEMA] | None,
    optimizer: Optimizers | None,
    extra: Any,
) -> _Collected:
    refuse_inside(model, "save()")
    shards = scan_model(model)
    state: dict[str, Any] = {"model": live_shards(shards)}
    weights = ["model"]

    def average_state(manager: ShardedEMA) -> dict[str, Any]:
        warn_of_stalled(manager, "save()", 8, fresh=False)
        scan = shards if manager.model is model else None
        warn_of_not_followed(manager, scan or scan_model(manager.model), "save()", 8)
        return state_of(manager, scan, LocalShards.of)

    managers = managers_by_label(ema, _CALL)
    weights += [f"{label}.weights" for label in managers]
    averages = {label: average_state(manager) for label, manager in managers.items()}
    if isinstance(ema, Mapping):
        state["ema"] = {label.removeprefix("ema."): tree for label, tree in averages.items()}
    else:
        state |= averages
    if optimizer is not None:
        state["optimizer"] = optimizer_tree(shards, state_keepers(as_list(optimizer, _CALL)))
    refuse_unnamed(extra, _CALL)
    if extra is not None:
        state["extra"] = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in extra.items()
        }
    return _Collected(state, weights, shards)


def _compare_replicas(
    collected: _Collected,
    leaves: Sequence[Leaf],
    listing: GlobalListing,
    ranks: Channel,
    *,
    every: bool,
) -> None:
    """Compare what several ranks hold: what nothing keeps equal, or all of it; collective."""
    if ranks.size == 1:
        return
    parameters = collected.shards.parameters
    unproven = find_unproven(listing, "model.", parameters, ranks)
    names = collected.full_names(unproven.names)
    own = collected.full_names(buffer_names(collected.shards))

    own |= names | _whole_state_of_shards(collected.shards, leaves)
    checksums = [
        (leaf.name, leaf.checksums())
        for leaf in leaves
        if every or leaf.path[0] == "extra" or leaf.name in own
    ]
    compare_values(checksums, unproven, names, ranks, _CALL)


def _whole_state_of_shards(shards: ModelShards, leaves: Sequence[Leaf]) -> frozenset[str]:
    """Return options, small state, and what is whole here though its parameter is not.

    An optimizer has made those from what this rank has alone.
    """
    cut: set[str] = set()
    for tracked in shards.parameters:
        if tracked.shard.boxes != (whole(tracked.shard.shape),):
            cut.update(tracked.shard.names)
    names = set()
    for leaf in leaves:
        if leaf.path[0] != "optimizer" or not leaf.is_whole():
            continue
        if leaf.is_small() or leaf.path[2] in cut:
            names.add(leaf.name)
    return frozenset(names)
