"""`ShardedEMA`: the moving average of a training model, each rank holding the average of its own
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema import attach, swap
from ema_ckpt.ema.batching import batches_of
from ema_ckpt.ema.checkpoint import state
from ema_ckpt.ema.cuda_graphs import Recording
from ema_ckpt.ema.engines.lists import Step
from ema_ckpt.ema.engines.offload import OffloadStep
from ema_ckpt.ema.engines.select import prepare
from ema_ckpt.ema.model.change_detector import ChangeDetector
from ema_ckpt.ema.model.scan import scan_model
from ema_ckpt.ema.modes import PlainMode
from ema_ckpt.ema.schedules import Schedule, as_schedule
from ema_ckpt.ema.settings import Counter, Settings, Source, globs
from ema_ckpt.ema.shadows import Averages, choose, current_buffers, fit, make, seed, value_of


class ShardedEMA:
    """A moving average of a model's parameters that costs each rank the size of its own shard.

    Works on plain modules, DDP, FSDP1, FSDP2, HSDP, tensor parallelism and mixes, compiled or not.
    Updates run no collective and no host synchronisation.

        ema = ShardedEMA(model, decay=0.9999)
        ...
        optimizer.step(); ema.update()
        with ema.swap(): evaluate(model)

    Args:
        model: the module that is trained, wrapped or not.
        decay: β as a number, or a schedule: `Warmup`, `PowerFunction`, `HalfLife`.
        every: move the average only at each `every`-th call, by the product of the decays.
        dtype: of the average.
        compensate: carry a bfloat16 residual beside each float32 average, so that no update rounds
            away; complex64 beside complex averages.
        rounding: `"nearest"`, or for bfloat16 averages `"stochastic"`: the bits drawn depend on
            `seed`, the number of the call and the element, not on how the model is cut.
        offload: keep the average in pinned host memory; True lets it move while training goes on
            (`wait` says what that asks for), `"sync"` makes later work on the device wait. Without
            CUDA it changes nothing.
        shard_replicas: divide the average over the replicas that a wrapper declares (DDP, HSDP,
            hybrid FSDP). None does so where there are any.
        buffers: `"copy"` saves the live buffers with the average, `"average"` averages floating
            ones, `"skip"` leaves them out.
        include: globs over canonical names; None takes the parameters that require gradients.
        exclude: globs of what is left out after that, buffers too.
        source: `source(fqn, param)` gives the tensor to average instead of `param`, of its local
            shape, or None. FSDP1 without original parameters has one flat `param` for many names:
            of a tensor in its local shape this name's piece is averaged.
        nonfinite: `"skip"` keeps the average of an element whose new value would not be finite,
            `"raise"` does so and raises at the next call that synchronises.

    Raises:
        UsageError: settings that do not go together, or match nothing.
        StateError: the model cannot be averaged as it is (on `meta`, placeholders of ZeRO stage 3).
    """

    averages: Averages

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
        self.settings = Settings(
            as_schedule(decay), every, dtype, compensate, rounding, seed, offload, shard_replicas, buffers,
            globs(include), globs(exclude) or (), source, nonfinite,
        )  # fmt: skip
        self.settings.warn_of_lost_updates()
        self.counter = Counter(self.settings.schedule, every)
        self.model = model
        self._events: dict[torch.device, torch.Tensor] = {}
        self._events_reported = 0
        self._recording = Recording()
        self._attachment: attach.Attachment | None = None
        with PlainMode():
            found = scan_model(model)
            chosen, live_buffers = choose(found, self.settings)
            slots = make(chosen, self.settings)
            self._take(
                Averages(tuple(slots), tuple(chosen), tuple(live_buffers), found.module_links)
            )
            if self._on_cuda and not offload:
                # so that the first update may already be one inside a CUDA graph
                self._ready_steps()

    # Averaging

    def update(self, samples: int | None = None) -> None:
        """Count one step of the optimizer and move the average. No collective, no host
        synchronisation.

        While a CUDA graph is captured the arithmetic is recorded and nothing is counted: see
            `advance`.

        Args:
            samples: of the global batch, the same on every rank; needed by schedules in samples.
        """
        swap.refuse_inside(self.model, "update()")
        with PlainMode():
            self.follow()
            if self._on_cuda and torch.cuda.is_current_stream_capturing():
                self._recording.add(self._steps)
                return
            # What a source raises, it raises before the call is counted.
            steps = self._ready_steps() if self.counter.is_due() else ()
            weight = self.counter.count(samples)
            if weight is not None:
                for step in steps:
                    step(weight)
                if self.settings.offload == "sync":
                    self.wait()

    def advance(self, samples: int | None = None) -> None:
        """Count the next replay of a CUDA graph that recorded `update()`: call it before each
        replay.

        Raises:
            StateError: no update was recorded.
        """
        swap.refuse_inside(self.model, "advance()")
        with PlainMode():
            self._recording.require()
            weight = self.counter.count(samples)
            self._recording.advance(0.0 if weight is None else weight)

    def attach(
        self, *optimizers: torch.optim.Optimizer, samples: int | Callable[[], int] | None = None
    ) -> None:
        """Update by itself, once each of `optimizers` has stepped since the last update.

        Steps that a loss scaler skips do not count, nor does the dummy step by which torch makes
        the state of a fresh optimizer. `samples` is a number, or a function that gives it at each
        update.

        Raises:
            UsageError: no optimizer is given, or no `samples` to a schedule that counts them.
            StateError: the manager is attached already.
        """
        self.counter.require(samples)
        if self._attachment is not None:
            raise StateError("usage", "this manager is attached already; call detach() first")
        self._attachment = attach.Attachment(self, optimizers, samples)

    def detach(self) -> None:
        """Undo `attach`."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    def reset(self) -> None:
        """Start again: the average is the live parameters, or what `source` gives for them, the
        counter 0.
        """
        swap.refuse_inside(self.model, "reset()")
        with PlainMode():
            self.follow()
            self._settle()
            for slot, held in zip(self.averages.shadows, self.averages.tracked, strict=True):
                seed(slot, held, self.settings.source)
            self.counter.reset()

    def rebind(self, model: nn.Module) -> None:
        """Go on with another module that has the same parameters: a wrapper made later, or a
        replacement.

        Raises:
            StateError: a parameter is missing there, or has another shape or dtype.
        """
        swap.refuse_inside(self.model, "rebind()")
        with PlainMode():
            self._settle()
            self._take(fit(self.averages, scan_model(model), self.settings))
            self.model = model

    # Using the average

    def swap(self, timeout: float = 300) -> AbstractContextManager[None]:
        """A block in which the model has the averaged weights; afterwards the live ones are back,
        bit for bit.

        Entry is collective where replicas divide the average (DDP, HSDP), and waits `timeout`
        seconds for the others; exit never is. Inside, `update advance reset rebind copy_to
        state_dict load_state_dict full_state_dict`, `save`, `restore`, steps of an attached
        optimizer and further swaps raise.
        """
        return swap.swapped(self, timeout)

    def copy_to(self, module: nn.Module, timeout: float = 300) -> None:
        """Write the average into the parameters of a module cut like this one, rounded to their
        dtype.

        Collective where replicas divide the average, as `swap` is. A tied tensor's average goes to
        every parameter that has one of its names.

        Raises:
            StateError: a parameter is missing there, cut in another way, or tied to one that it is
                not tied to here.
        """
        swap.copy_to(self, module, timeout)

    def state_dict(self) -> dict[str, Any]:
        """The state: tensors of global shape that alias the average, for
        `torch.distributed.checkpoint`.
        """
        swap.refuse_inside(self.model, "state_dict()")
        with PlainMode():
            self.synchronise()
            if self.averages.live_buffers:
                self.averages = replace(
                    self.averages,
                    live_buffers=current_buffers(self.averages, scan_model(self.model)),
                )
            return state.tree(self.averages, self.counter, self.settings)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, loaded in place or as whole tensors. The settings stay
        the constructor's.

        A tied tensor is found under any of its names.

        Raises:
            StateError: names, shapes or pieces do not fit; nothing was changed.
        """
        swap.refuse_inside(self.model, "load_state_dict()")
        with PlainMode():
            self.synchronise()
            state.load(state_dict, self.averages, self.counter)

    def full_state_dict(
        self, complete: bool = True, timeout: float = 300
    ) -> dict[str, torch.Tensor]:
        """On rank 0 whole tensors: the average, and with `complete` the rest from the live model;
        elsewhere `{}`.

        Collective.
        """
        from ema_ckpt.ema.checkpoint.gather import gather_full

        with PlainMode():
            return gather_full(self, complete, timeout)

    def wait(self, host: bool = False) -> None:
        """Make later work in the current stream, and with `host` the caller, wait for what `update`
        began.

        With `offload=True` parameters are read after `update` has returned. Steps of optimizers and
        all calls of this manager wait by themselves; call this before writing parameters in any
        other way. Without `offload` updates run in the stream of the caller, so that only
        `host=True` has anything to wait for.
        """
        for step in self._steps or ():
            if isinstance(step, OffloadStep):
                step.join()
                if host:
                    step.wait()
        if host:
            for device in {
                slot.average.device for slot in self.averages.shadows if slot.average.is_cuda
            }:
                torch.cuda.synchronize(device)

    # Facts

    @property
    def num_updates(self) -> int:
        """Calls so far, whatever `every` is."""
        return self.counter.num_updates

    @property
    def samples_seen(self) -> int:
        """Samples so far, as passed to the calls."""
        return self.counter.samples_seen

    @property
    def current_decay(self) -> float:
        """The product of decays by which the average last moved; 1.0 before it first did."""
        return self.counter.applied

    @property
    def nbytes(self) -> int:
        """Bytes of the average and its residuals on this rank."""
        tensors = [
            t
            for slot in self.averages.shadows
            for t in (slot.average, slot.residual)
            if t is not None
        ]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def nonfinite_events(self) -> int:
        """Updates in which this rank kept an element because its new value was not finite. Waits
        for the device.
        """
        self.wait()
        return sum(int(events) for events in self._events.values())

    # Plumbing

    def synchronise(self) -> None:
        """Follow changes of the model and raise what was found on the device meanwhile.

        Raises:
            StateError: `non-finite`: with `nonfinite="raise"`, new values were not finite since the
                last call.
        """
        self.follow(thorough=True)
        self._settle()
        self._recording.check()
        if (
            self.settings.nonfinite == "raise"
            and (events := self.nonfinite_events) > self._events_reported
        ):
            since, self._events_reported = events - self._events_reported, events
            raise StateError(
                "non-finite",
                f"new averages were not finite in {since} updates on this rank; those elements were kept",
            )

    def _settle(self) -> None:
        """Let host memory come to rest, if that is where averages are."""
        if self.settings.offload:
            self.wait(host=True)

    def _take(self, averages: Averages) -> None:
        """Work with `averages` from now on."""
        self.averages = averages
        self._on_cuda = any(slot.shard.local.is_cuda for slot in averages.shadows)
        self._watch = ChangeDetector(averages.tracked, averages.module_links)
        self._steps: list[Step] | None = None
        self._sources: list[torch.Tensor] = []

    def follow(self, thorough: bool = False) -> None:
        """Find the live shards anew if the model's tensors were exchanged since: `.to()`, a late
        wrapper.

        With `thorough` also if one has another shape or strides on the same memory, as `.data =
        .data[:n]` gives it.
        """
        if not self._watch.unchanged() or (thorough and not self._watch.same_layout()):
            self._settle()
            self._take(fit(self.averages, scan_model(self.model), self.settings))

    def _ready_steps(self) -> list[Step]:
        """The engines' steps over cached lists, made anew where a list changed."""
        if self.settings.source is None:
            values = self._sources or [slot.shard.local for slot in self.averages.shadows]
        else:
            values = [value_of(held, self.settings.source) for held in self.averages.tracked]
        if self._steps is None or not _same_memory(values, self._sources):
            lists = batches_of(
                self.averages.shadows, values, self.settings, self._event_counts(values), self._call
            )
            self._settle()
            self._steps, self._sources = [prepare(each) for each in lists], values
        return self._steps

    def _event_counts(self, values: list[torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """Where each device counts updates that kept an element; empty if they take values as they
        come.
        """
        if self.settings.nonfinite != "ignore":
            for device in {value.device for value in values} - self._events.keys():
                self._events[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._events

    def _call(self) -> int:
        return self.counter.num_updates

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "usage",
            "a ShardedEMA is no data to pickle or copy: put it at the top of the tree to save, as"
            ' dcp.save({"model": ..., "ema": ema}), or put ema.state_dict() where you want it',
        )

    def __repr__(self) -> str:
        return (
            f"ShardedEMA({len(self.averages.shadows)} tensors, {self.nbytes} bytes on this rank,"
            f" {self.settings.schedule}, {self.num_updates} updates)"
        )


def _same_memory(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return a is b or (
        len(a) == len(b)
        and all(x is y or x.data_ptr() == y.data_ptr() for x, y in zip(a, b, strict=True))
    )
