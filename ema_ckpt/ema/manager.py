"""`ShardedEMA`: the moving average of a training model, each rank with that of its own shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema import swap
from ema_ckpt.ema.attach import Attachment
from ema_ckpt.ema.batching import PreparedSteps
from ema_ckpt.ema.checkpoint import state
from ema_ckpt.ema.checkpoint.local_shards_tensor import as_global_tensor
from ema_ckpt.ema.cuda_graphs import Recording
from ema_ckpt.ema.engines.offload import OffloadStep
from ema_ckpt.ema.model.change_detector import ChangeDetector
from ema_ckpt.ema.model.live_tree import live_tree
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.model.shards import ModelShards
from ema_ckpt.ema.plain_mode import PlainMode
from ema_ckpt.ema.schedules import NEVER_MOVES, Constant, Schedule, as_schedule
from ema_ckpt.ema.settings import Settings, Source, UpdateCounter, as_patterns
from ema_ckpt.ema.shadows import Averages, current_buffers, fit, make_averages, seed
from ema_ckpt.ema.swap_state import refuse_inside


class ShardedEMA:
    """A moving average of a model's parameters, of which each rank holds its own shard.

    Works on plain modules, DDP, FSDP1, FSDP2, HSDP, tensor parallelism and mixes, compiled or not.
    Updates run no collective and no host synchronisation.

        ema = ShardedEMA(model, decay=0.9999)
        ...
        optimizer.step(); ema.update()
        with ema.swap(): evaluate(model)

    Args:
        model: the module that is trained, wrapped or not.
        decay: β as a number, or a schedule: `Warmup`, `PowerFunction`, `HalfLife`,
            `HalfLifeFraction`, `Window`.
        every: update the average only at every n-th call, with the product of the decays.
        dtype: of the average.
        compensate: keep a bfloat16 residual beside each float32 average, so that small updates are
            not lost to rounding; complex64 beside complex averages.
        rounding: `"nearest"`, or for bfloat16 averages `"stochastic"`: the random bits depend on
            `seed`, the number of the call and the element, not on the layout.
        offload: keep the average in pinned host memory. With True it is updated in parallel with
            training (see `wait`); with `"sync"` later work on the device waits. No effect without
            CUDA.
        shard_replicas: divide the average over the replicas that a wrapper declares (DDP, HSDP,
            hybrid FSDP). None: do so if there are any.
        buffers: `"copy"` saves the live buffers with the average, `"average"` averages floating
            ones, `"skip"` leaves them out.
        include: globs over canonical names; None takes the parameters that require gradients.
        exclude: globs of names that are then left out, buffers included.
        source: `source(fqn, param)` returns the tensor to average instead of `param`, of its local
            shape, or None. Under FSDP1 with `use_orig_params=False`, `param` is one flat parameter
            for many names; of a tensor of its shape the piece of this name is averaged.
        nonfinite: `"skip"` leaves an element unchanged whose new value would not be finite;
            `"raise"` does so and raises an error at the next call that synchronises.

    Raises:
        UsageError: settings that do not go together, or match nothing.
        StateError: the model cannot be averaged as it is (on `meta`, placeholders of ZeRO stage 3).
    """

    use_distributed_checkpointing = True
    """By this NeMo Automodel's recipes know to save the state through DCP: each rank its shards."""

    _averages: Averages

    def __init__(
        self,
        model: nn.Module,
        decay: float | Schedule = 0.9999,
        every: int = 1,
        dtype: torch.dtype = torch.float32,
        compensate: bool = False,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        offload: bool | Literal["sync"] = False,
        shard_replicas: bool | None = None,
        buffers: Literal["copy", "average", "skip"] = "copy",
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        source: Source | None = None,
        nonfinite: Literal["ignore", "skip", "raise"] = "ignore",
    ) -> None:
        self._settings = Settings(
            as_schedule(decay), every, dtype, compensate, rounding, seed, offload, shard_replicas,
            buffers, as_patterns("include", include), as_patterns("exclude", exclude) or (), source,
            nonfinite,
        )  # fmt: skip
        self._settings.warn_of_lost_updates()
        self._counter = UpdateCounter(self._settings.schedule, every)
        self.model: nn.Module = model
        self._prepared = PreparedSteps(self._settings, self._counter)
        self._events_reported = 0
        self._recording = Recording()
        self._attachment: Attachment | None = None
        self._saved_round: dict[str, Any] | None = None  # loaded, for optimizers attached later
        self._warned_of_two = False
        self._warned_of_decay = self._settings.schedule != Constant(1.0)
        with PlainMode():
            self._set_averages(make_averages(scan_model(model), self._settings))
            if self._on_cuda and not offload:
                # so that the first update may already be one inside a CUDA graph
                self._prepared.prepare(self._averages, self._settle)

    # Averaging

    def update(self, samples: int | None = None) -> None:
        """Count one optimizer step and update the average. No collective, no host synchronisation.

        While a CUDA graph is captured the arithmetic is recorded and nothing is counted: see
        `advance`.

        Args:
            samples: of the global batch, the same on every rank; needed by schedules in samples.
        """
        if self._attachment is not None and not self._warned_of_two:
            self._warned_of_two = True
            warnings.warn(
                "update() by hand beside attach(): steps count twice; call detach(), or leave one"
                " of them out",
                stacklevel=2,
            )
        if not self._warned_of_decay:
            self._warn_of_decay("update()")
        self._update(samples)

    def _warn_of_decay(self, call: str) -> None:
        self._warned_of_decay = True
        warnings.warn(f"{call} with {NEVER_MOVES}", stacklevel=3)

    def _update(self, samples: int | None) -> None:
        refuse_inside(self.model, "update()")
        with PlainMode():
            self._follow()
            if self._on_cuda and torch.cuda.is_current_stream_capturing():
                self._recording.add(self._prepared.steps)
                return
            # An exception of a source is raised before the call is counted.
            is_due = self._counter.is_due()
            steps = self._prepared.prepare(self._averages, self._settle) if is_due else ()
            weight = self._counter.count(samples)
            if weight is not None:
                for step in steps:
                    step(weight)
                if self._settings.offload == "sync":
                    self.wait()

    def advance(self, samples: int | None = None) -> None:
        """Count the next replay of a CUDA graph that recorded `update()`; call it before each.

        Raises:
            StateError: no update was recorded.
        """
        refuse_inside(self.model, "advance()")
        with PlainMode():
            self._recording.require()
            weight = self._counter.count(samples)
            self._recording.advance(0.0 if weight is None else weight)

    def attach(
        self, *optimizers: torch.optim.Optimizer, samples: int | Callable[[], int] | None = None
    ) -> None:
        """Update automatically, once each of `optimizers` has stepped since the last update.

        Steps that a loss scaler skips do not count, nor does the dummy step by which torch creates
        the state of a new optimizer. `samples` is a number, or a function that returns it at each
        update.

        In wrappers and containers the inner optimizers are found; an update runs after the
        outermost step.

        Raises:
            UsageError: no optimizer is given, one that cannot be followed, or none that steps what
                is averaged; or no `samples` to a schedule that counts them.
            StateError: the manager is attached already.
        """
        self._counter.require_samples(samples)
        if self._attachment is not None:
            raise StateError("usage", "this manager is attached already; call detach() first")
        if not self._warned_of_decay:
            self._warn_of_decay("attach()")
        with PlainMode():
            self._follow()

        def averaged() -> set[int] | None:
            if self._settings.source is not None:
                return None
            return {id(tracked.owner) for tracked in self._averages.tracked}

        self._attachment = Attachment(
            optimizers,
            averaged,
            lambda: refuse_inside(self.model, "a step of the attached optimizer"),
            lambda: self._update(samples() if callable(samples) else samples),
        )
        self._attachment.resume(self._saved_round)

    def detach(self) -> None:
        """Undo `attach`."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = self._saved_round = None

    def reset(self) -> None:
        """Start again: with the live parameters, or those of `source`, and the counter at 0."""
        refuse_inside(self.model, "reset()")
        with PlainMode():
            self._follow()
            self._settle()
            for shadow, tracked in zip(self._averages.shadows, self._averages.tracked, strict=True):
                seed(shadow, tracked, self._settings.source)
            self._counter.reset()
        self._saved_round = None

    def rebind(self, model: nn.Module) -> None:
        """Continue with another module of the same parameters: a later wrapper, or a replacement.

        Raises:
            StateError: a parameter is missing there, or has another shape or dtype.
        """
        refuse_inside(self.model, "rebind()")
        with PlainMode():
            self._settle()
            self._set_averages(fit(self._averages, scan_model(model), self._settings))
            self.model = model

    # Using the average

    def swap(self, timeout: float = 300) -> AbstractContextManager[None]:
        """Give the model the averaged weights in a block; then the live ones are back, bit for bit.

        Entry is collective where replicas divide the average (DDP, HSDP), and waits `timeout`
        seconds for the others; exit never is. Inside, `update advance reset rebind copy_to
        state_dict load_state_dict full_state_dict`, `save`, `restore`, steps of an attached
        optimizer and further swaps raise.
        """
        return swap.swapped(self, timeout)

    def copy_to(self, module: nn.Module, timeout: float = 300) -> None:
        """Write the average into the parameters of a module of the same layout, in their dtype.

        Collective where replicas divide the average, as `swap` is. A tied tensor's average goes to
        every parameter that has one of its names.

        Raises:
            StateError: a parameter is missing there, cut in another way, or tied to one that it is
                not tied to here.
        """
        swap.copy_to(self, module, timeout)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `dcp.save`: tensors of global shape that alias the average."""
        return state_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of `state_dict`, restored in place or as whole tensors.

        The settings stay the constructor's. A tied tensor is found under any of its names.

        Raises:
            StateError: names, shapes or pieces do not fit; nothing was changed.
        """
        refuse_inside(self.model, "load_state_dict()")
        with PlainMode():
            self._synchronise()
            state.load(state_dict, self._averages, self._counter)
        self._saved_round = state.parse_config(state_dict.get("config")).get("attached")
        if self._attachment is not None:
            self._attachment.resume(self._saved_round)

    def full_state_dict(
        self, complete: bool = True, timeout: float = 300
    ) -> dict[str, torch.Tensor]:
        """Return whole tensors on rank 0 (`{}` elsewhere), `complete` with the rest of the model.

        Collective. If ranks hold different layers, as stages of a pipeline do, it is their union in
        the order of ranks.

        Raises:
            StateError: `name-collision`: a name has other shapes or values on ranks that are no
                replicas.
        """
        from ema_ckpt.ema.checkpoint.gather import FullState, gather_full

        call = "full_state_dict"

        def read() -> FullState:
            refuse_inside(self.model, f"{call}()")
            model_shards = scan_model(self.model) if complete else None
            weights = state_of(self, model_shards)["weights"]
            swap.warn_of_stalled(self, f"{call}()", 5)
            if model_shards is not None:
                swap.warn_of_not_followed(self, model_shards, f"{call}()", 5)
            averaged: dict[str, Any] = {}
            for shadow in self._averages.shadows:
                fqn = shadow.shard.fqn
                if fqn in weights:
                    averaged.update(dict.fromkeys(shadow.shard.names, weights[fqn]))
            if model_shards is None:
                only = {name: value for name, value in averaged.items() if name in weights}
                return FullState(only, self._averages.tracked)
            live = live_tree(model_shards)
            values = {name: averaged.get(name, value) for name, value in live.items()}
            return FullState(values, model_shards.parameters)

        with PlainMode():
            return gather_full(call, read, timeout)

    def wait(self, host: bool = False) -> None:
        """Make later work in the current stream, and with `host` the caller, wait for updates.

        With `offload=True` parameters are read after `update` has returned. Steps of optimizers and
        all calls of this manager wait by themselves; call this before writing parameters in any
        other way. Without `offload` updates run in the stream of the caller, so that only
        `host=True` has anything to wait for.
        """
        for step in self._prepared.steps or ():
            if not isinstance(step, OffloadStep):
                continue
            step.join()
            if host:
                step.wait()
        if not host:
            return
        for device in {shadow.average.device for shadow in self._averages.shadows}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    # Facts

    @property
    def num_updates(self) -> int:
        """Number of calls so far, independent of `every`."""
        return self._counter.num_updates

    @property
    def samples_seen(self) -> int:
        """Samples so far, as passed to the calls."""
        return self._counter.samples_seen

    @property
    def decay(self) -> float | Schedule:
        """What the constructor was given: a constant decay, or a schedule."""
        schedule = self._settings.schedule
        return schedule.decay if isinstance(schedule, Constant) else schedule

    @property
    def current_decay(self) -> float:
        """The product of decays of the last update; 1.0 before the first."""
        return self._counter.applied

    @property
    def nbytes(self) -> int:
        """Bytes of the average and its residuals on this rank."""
        nbytes = 0
        for shadow in self._averages.shadows:
            nbytes += shadow.average.nbytes
            if shadow.residual is not None:
                nbytes += shadow.residual.nbytes
        return nbytes

    @property
    def nonfinite_events(self) -> int:
        """Updates on this rank that left an element unchanged. Waits for the device."""
        self.wait()
        return sum(int(count) for count in self._prepared.nonfinite_counts.values())

    # Plumbing

    def _synchronise(self) -> None:
        """Follow changes of the model, and raise what was noticed on the device meanwhile.

        Raises:
            StateError: `non-finite`: with `nonfinite="raise"`, new values were not finite since the
                last call.
        """
        self._follow(thorough=True)
        self._settle()
        self._recording.check()
        if self._settings.nonfinite != "raise":
            return
        events = self.nonfinite_events
        if events > self._events_reported:
            since, self._events_reported = events - self._events_reported, events
            raise StateError(
                "non-finite",
                f"new averages were not finite in {since} updates on this rank; those elements were"
                " kept",
            )

    def _follow(self, thorough: bool = False) -> None:
        """Scan the model again if its tensors were exchanged since: `.to()`, a late wrapper.

        With `thorough` also if one has another shape or strides on the same memory, as `.data =
        .data[:n]` gives it.
        """
        detector = self._change_detector
        if not detector.unchanged() or (thorough and not detector.same_layout()):
            self._settle()
            self._set_averages(fit(self._averages, scan_model(self.model), self._settings))

    def _settle(self) -> None:
        # Averages in host memory must come to rest before they are read or freed.
        if self._settings.offload:
            self.wait(host=True)

    def _set_averages(self, averages: Averages) -> None:
        self._averages = averages
        self._on_cuda = any(shadow.shard.local.is_cuda for shadow in averages.shadows)
        self._change_detector = ChangeDetector(averages.tracked, averages.module_links)
        self._prepared.discard()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "usage",
            "a ShardedEMA is no data to pickle or copy: put it at the top of the tree to save, as"
            ' dcp.save({"model": ..., "ema": ema}), or put ema.state_dict() where you want it',
        )

    def __repr__(self) -> str:
        return (
            f"ShardedEMA({len(self._averages.shadows)} tensors, {self.nbytes} bytes on this rank,"
            f" {self._settings.schedule}, {self.num_updates} updates)"
        )


def managers_by_label(
    ema: ShardedEMA | Mapping[str, ShardedEMA | None] | None, call: str
) -> dict[str, ShardedEMA]:
    """Return one manager as `ema`, or those by name as `ema.<name>`; without those that are None.

    Raises:
        UsageError: something among them is no manager.
    """
    labelled: dict[str, Any] = {"ema": ema}
    where = ""
    if isinstance(ema, Mapping):
        labelled = {f"ema.{name}": manager for name, manager in ema.items()}
        where = " in a dict"
    labelled = {label: found for label, found in labelled.items() if found is not None}
    for found in labelled.values():
        if not isinstance(found, ShardedEMA):
            kind = f"{type(found).__name__}{where}"
            raise UsageError(
                "usage",
                f"{call}: ema is a ShardedEMA, or several by name; found {kind}: give the manager"
                " itself, not its state_dict() or a model",
            )
    return labelled


def state_of(
    ema: ShardedEMA,
    model_shards: ModelShards | None = None,
    as_tensor: Callable[..., Any] = as_global_tensor,
) -> dict[str, Any]:
    """Return `ema.state_dict()`; the present scan of its model, if given, saves another one.

    `as_tensor` makes its tensors, as `as_global_tensor` does.
    """
    refuse_inside(ema.model, "state_dict()")
    with PlainMode():
        ema._synchronise()
        if ema._averages.live_buffers:
            # A forward may have exchanged them.
            model_shards = model_shards or scan_model(ema.model)
            buffers = current_buffers(ema._averages, model_shards)
            ema._averages = replace(ema._averages, live_buffers=buffers)
        attached = None if ema._attachment is None else ema._attachment.unfinished_round()
        return state.tree(ema._averages, ema._counter, ema._settings, as_tensor, attached)
