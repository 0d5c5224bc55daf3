"""Updates by itself after the optimizer's step, through hooks of optimizers and their wrappers."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain
from types import FrameType, MethodType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ema_ckpt.core.errors import UsageError
from ema_ckpt.ema.model.scan import is_state_init
from ema_ckpt.ema.optimizers import (
    has_own_step,
    is_optimizer,
    own_attributes,
    parameters_of,
    with_inner,
)

# The code that torch puts around `step`; every class' is the same.
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_SCALER_STEP = torch.amp.GradScaler.step.__code__


class _Followed:
    """One optimizer given to `attach`, with those inside it whose steps are its own."""

    def __init__(self, root: Any, members: Sequence[Any]) -> None:
        self.root = root
        self.members = {id(member): member for member in members}
        # A wrapper's own step counts only if one inside has stepped meanwhile: accelerate's does
        # nothing while gradients accumulate.
        self.wrappers = set()
        for member in members:
            if any(id(inner) in self.members for inner in with_inner(member)[1:]):
                self.wrappers.add(id(member))
        self.steps = 0
        self.has_stepped = False
        self.in_dummy_step = False

    def is_nested(self) -> bool:
        """Return whether these hooks run inside another `step` of the same optimizers.

        A class whose `step` calls its base class' has both hooked; a wrapper calls the one inside.
        """
        # Counted on the stack, since a step may end by raising.
        steps = 0
        for frame in _frames():
            if frame.f_code is _HOOKED or frame.f_code is _WRAPPED:
                steps += id(frame.f_locals.get("self")) in self.members
                if steps > 1:
                    return True
        return False


class Attachment:
    """Hooks: `before_step` at each step, `update` once all optimizers have stepped.

    `averaged` returns the ids of the tensors that an optimizer steps to move what is averaged; None
    where a source gives other tensors.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        averaged: Callable[[], set[int] | None],
        before_step: Callable[[], None],
        update: Callable[[], None],
    ) -> None:
        self._averaged, self._before_step, self._update = averaged, before_step, update
        self._followed = _follow(optimizers, averaged())
        self._waiting = set(self._followed)
        self._skipped: set[_Followed] = set()  # by a loss scaler, since the last update
        self._steps: Counter[_Followed] = Counter()  # since the last update
        self._last: _Followed | None = None  # at whose step the first update fell
        self._updates = self._unfollowed = 0
        self._undo: list[Callable[[], None]] = []
        try:
            for followed in self._followed:
                self._hook(followed)
        except BaseException:
            self.remove()
            raise
        after_any = torch.compiler.disable(self._after_any)  # type: ignore[no-untyped-call]
        self._undo.append(register_optimizer_step_post_hook(after_any).remove)

    def remove(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()

    def unfinished_round(self) -> dict[str, Any] | None:
        """Return which of several optimizers have stepped since the last update, by their place.

        A resumed run goes on from there, so that its updates fall at the same steps.
        """
        if len(self._followed) < 2:
            return None
        places = {one: place for place, one in enumerate(self._followed)}
        return {
            "optimizers": len(self._followed),
            "waiting": sorted(places[one] for one in self._waiting),
            "skipped": sorted(places[one] for one in self._skipped),
            "steps": [self._steps[one] for one in self._followed],
            "last": None if self._last is None else places[self._last],
        }

    def resume(self, saved: Any) -> None:
        """Continue a saved `unfinished_round`, or begin a new one if there is none that fits."""
        self._begin()
        if saved is None or not _is_round(saved, len(self._followed)):
            return
        self._waiting = {self._followed[place] for place in saved["waiting"]}
        self._skipped = {self._followed[place] for place in saved["skipped"]}
        self._steps.update(dict(zip(self._followed, saved["steps"], strict=True)))
        self._last = None if saved["last"] is None else self._followed[saved["last"]]

    def stalled(self) -> str | None:
        """Describe steps that were taken without a single update; None if there are none."""
        steps = max(followed.steps for followed in self._followed)
        if self._updates or (steps < 2 and not self._unfollowed):
            return None
        if self._unfollowed:
            return (
                f"another optimizer stepped averaged parameters {self._unfollowed} times, and the"
                " attached ones made no update: attach the one that steps"
            )
        idle = [type(one.root).__name__ for one in self._waiting]
        return (
            f"attached optimizers stepped {steps} times without an update, since"
            f" {', '.join(sorted(idle))} did not: attach those that step in each iteration"
        )

    def _hook(self, followed: _Followed) -> None:
        def before(optimizer: Any, *_: Any) -> None:
            self._before(followed, optimizer)

        def after(optimizer: Any, *_: Any) -> None:
            self._after(followed, optimizer)

        # Traced into a compiled step the hooks would break its graph in three.
        before = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(after)  # type: ignore[no-untyped-call]
        hooked: set[int] = set()
        for member in followed.members.values():
            if _has_hooks(member):
                # A wrapper may share the dictionary of the one inside.
                if id(member._optimizer_step_pre_hooks) not in hooked:
                    hooked.add(id(member._optimizer_step_pre_hooks))
                    self._undo += [
                        member.register_step_pre_hook(before).remove,
                        member.register_step_post_hook(after).remove,
                    ]
            elif has_own_step(member):
                self._undo.append(_wrap_step(member, before, after))

    def _before(self, followed: _Followed, optimizer: Any) -> None:
        if followed.is_nested():
            return
        self._before_step()
        followed.has_stepped = False
        # Only a fresh optimizer is ever initialised: the stack need not be searched on later steps.
        followed.in_dummy_step = not getattr(optimizer, "state", None) and is_state_init()

    def _after(self, followed: _Followed, optimizer: Any) -> None:
        if not followed.in_dummy_step and id(optimizer) not in followed.wrappers:
            # A scaler makes a fused optimizer skip by this attribute, which exists only meanwhile.
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None and bool(found_inf):
                self._skipped.add(followed)
            else:
                followed.has_stepped = True
        if followed.is_nested():
            return
        if followed.has_stepped:
            followed.has_stepped = False
            self._count(followed)
        elif self._waiting <= self._skipped:
            self._begin()

    def _count(self, followed: _Followed) -> None:
        """Count a step, and update if it is the last one of an iteration."""
        followed.steps += 1
        self._steps[followed] += 1
        self._waiting.discard(followed)
        if self._waiting:
            if self._waiting <= self._skipped | _skipped_by_scaler(self._waiting):
                self._begin()
            return
        # Where the one that steps last has stepped once already, another one was skipped then and
        # made up for it now: the iteration ends with the next step of the last.
        if self._last not in (None, followed) and self._steps[self._last] == 1:
            return
        self._last = self._last or followed
        self._begin()
        self._updates += 1
        self._update()

    def _begin(self) -> None:
        self._waiting = set(self._followed)
        self._skipped.clear()
        self._steps.clear()

    def _after_any(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Notice steps of averaged parameters by an optimizer that is not followed."""
        del args, kwargs
        if self._updates or any(id(optimizer) in one.members for one in self._followed):
            return
        averaged = self._averaged()
        if averaged is None or is_state_init():
            return
        if not averaged.isdisjoint(map(id, parameters_of(optimizer))):
            self._unfollowed += 1


def _is_round(saved: Any, count: int) -> bool:
    """Whether what a checkpoint holds is the round of so many optimizers."""
    if not isinstance(saved, Mapping) or saved.get("optimizers") != count:
        return False
    lists: list[Any] = [saved.get(key) for key in ("steps", "waiting", "skipped")]
    if not all(isinstance(numbers, list) for numbers in lists) or len(lists[0]) != count:
        return False
    last = saved.get("last")
    places = [*lists[1], *lists[2], *([] if last is None else [last])]
    if not all(type(number) is int and number >= 0 for number in (*places, *lists[0])):
        return False
    return max(places, default=0) < count


def _follow(optimizers: Sequence[Any], averaged: set[int] | None) -> list[_Followed]:
    """Find the optimizers inside those given; leave out those that step nothing averaged.

    Raises:
        UsageError: one is no optimizer or cannot be followed, or none steps anything averaged.
    """
    if not optimizers:
        raise UsageError("usage", "attach wants at least one optimizer")
    roots = list({id(root): root for root in optimizers}.values())
    followed, idle = [], []
    for root in roots:
        members = _members_of(root, roots, averaged)
        stepped = set(map(id, chain.from_iterable(map(parameters_of, members))))
        if averaged is None or stepped & averaged:
            followed.append(_Followed(root, members))
        else:
            idle.append(type(root).__name__)
    names = ", ".join(idle)
    if not followed:
        raise UsageError(
            "usage",
            f"attach: {names} steps no parameter that is averaged here: attach the optimizer of"
            " this model, made after its last wrapper (fully_shard, FSDP, .to())",
        )
    if idle:
        warnings.warn(
            f"attach: {names} steps no parameter that is averaged here and is left out",
            stacklevel=4,
        )
    return followed


def _members_of(root: Any, roots: Sequence[Any], averaged: set[int] | None) -> list[Any]:
    """Return the optimizers that step what an optimizer given steps: itself, and those inside."""
    members = with_inner(root, [other for other in roots if other is not root])
    if len(members) == 1 and not is_optimizer(root):
        kind = type(root).__name__
        message = f"attach wants optimizers; found {kind}: give those that step the model"
        raise UsageError("usage", message)
    own = set(map(id, parameters_of(root)))
    if averaged is not None:
        own &= averaged
    if own:
        # One that steps other parameters is a friend, or steps inside the root's step.
        members = [one for one in members if not own.isdisjoint(map(id, parameters_of(one)))]
    _refuse_unfollowable(members)
    return members


def _refuse_unfollowable(members: Sequence[Any]) -> None:
    for member in members:
        can_wrap = bool(own_attributes(member)) if has_own_step(member) else len(members) > 1
        if not can_wrap and not _has_hooks(member):
            raise UsageError(
                "unsupported",
                f"attach: the end of a step of {type(member).__name__} cannot be noticed: attach"
                " the optimizer inside it, or call update() after each step",
            )


def _has_hooks(optimizer: Any) -> bool:
    """Return whether torch runs an optimizer's hooks, as it does after the base class' __init__."""
    has_dict = "_optimizer_step_pre_hooks" in own_attributes(optimizer)
    return has_dict and getattr(type(optimizer).step, "hooked", False)


def _wrap_step(
    optimizer: Any, before: Callable[..., None], after: Callable[..., None]
) -> Callable[[], None]:
    """Run hooks around the `step` of an object that torch runs none for; returns the undoing."""
    attributes = vars(optimizer)
    former = attributes.get("step")
    hooks = [before, after]
    # A method, since a learning rate scheduler takes the function of one for its own wrapper.
    own = attributes["step"] = MethodType(_with_hooks(optimizer.step, hooks), optimizer)

    def undo() -> None:
        hooks.clear()
        if attributes.get("step") is not own:
            return  # somebody has put another wrapper around it
        if former is None:
            del attributes["step"]
        else:
            attributes["step"] = former

    return undo


def _with_hooks(step: Callable[..., Any], hooks: list[Callable[..., None]]) -> Callable[..., Any]:
    @wraps(step)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hooks:  # undone
            return step(*args, **kwargs)
        hooks[0](self)
        result = step(*args, **kwargs)
        hooks[1](self)
        return result

    return wrapped


_WRAPPED = _with_hooks(print, []).__code__


def _skipped_by_scaler(waiting: set[_Followed]) -> set[_Followed]:
    """Return those whose step the loss scaler, inside whose `step` this runs, has left out.

    It marks them as stepped, and no hook of theirs was run.
    """
    scaler = next((f.f_locals["self"] for f in _frames() if f.f_code is _SCALER_STEP), None)
    states = getattr(scaler, "_per_optimizer_states", {})
    # `get`: the states are made at the first question.
    stages = {key: getattr(state.get("stage"), "name", "") for key, state in states.items()}
    skipped = set()
    for one in waiting:
        if "STEPPED" in map(stages.get, one.members):
            skipped.add(one)
    return skipped


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
