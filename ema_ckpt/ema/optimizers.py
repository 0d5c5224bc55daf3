"""Optimizers inside wrappers and containers: which object keeps the state, which one steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ema_ckpt.core.errors import UsageError

Optimizers = Optimizer | Iterable[Optimizer]

_MISSING = object()
# What a parameter group of a container has beside options: nothing that an optimizer steps by.
_NO_OPTIONS = {"params", "param_names", "initial_lr"}
# Attributes of an optimizer that hold one entry for each parameter.
_LARGE = {"state", "param_groups"}


def as_list(optimizers: Any, call: str) -> list[Any]:
    """Return one optimizer, several, or those by name, as a list.

    Raises:
        UsageError: something among them is no optimizer.
    """
    if is_optimizer(optimizers) or inner_optimizers(optimizers):
        return [optimizers]
    if isinstance(optimizers, Mapping):
        optimizers = list(optimizers.values())
    is_value = isinstance(optimizers, nn.Module | Tensor | str)
    if is_value or not isinstance(optimizers, Iterable):
        raise _no_optimizer(optimizers, call)
    listed = list(optimizers)
    for one in listed:
        if not is_optimizer(one) and not inner_optimizers(one):
            raise _no_optimizer(one, call)
    return listed


def _no_optimizer(value: object, call: str) -> UsageError:
    message = (
        f"{call}: optimizer is an optimizer, or several of them; found {type(value).__name__}: give"
        " the optimizer itself, not its state_dict() or a model"
    )
    return UsageError("usage", message)


def is_optimizer(value: object) -> bool:
    """Return whether a value is an optimizer, or forwards to one what it does not have itself."""
    try:
        if isinstance(value, Optimizer):
            return True
        if value is None or isinstance(value, type | nn.Module | Tensor | str | int | float):
            return False
        return hasattr(value, "param_groups") and hasattr(value, "step")
    except Exception:  # noqa: BLE001  # whatever a proxy of something that is gone raises
        return False


def inner_optimizers(holder: object) -> list[Any]:
    """Return the optimizers in attributes of an object, also in lists, tuples and dicts there."""
    if isinstance(holder, nn.Module | Tensor | str) or holder is None:
        return []
    found: dict[int, Any] = {}
    values = _attributes(holder)
    if not has_own_step(holder):
        # A method that is only forwarded tells whose it is.
        values = chain(values, [getattr(getattr(holder, "step", None), "__self__", None)])
    for value in values:
        for candidate in _candidates(value):
            if candidate is not holder and is_optimizer(candidate):
                found.setdefault(id(candidate), candidate)
    return list(found.values())


def with_inner(root: Any, others: Sequence[Any] = ()) -> list[Any]:
    """Return an optimizer and all that it holds at any depth, but for `others` and theirs."""
    seen = {id(root): root}
    queue = [root]
    excluded = {id(other) for other in others}
    while queue:
        for inner in inner_optimizers(queue.pop()):
            if id(inner) not in seen and id(inner) not in excluded:
                seen[id(inner)] = inner
                queue.append(inner)
    return list(seen.values())


def state_keepers(optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that keep the state of those given: in place of a container its inner.

    Raises:
        UsageError: `unsupported`: state would be lost, since it is kept where it cannot be found.
    """
    keepers: dict[int, Any] = {}
    for root in optimizers:
        if hasattr(root, "consolidate_state_dict"):
            # ZeroRedundancyOptimizer divides its state over the ranks.
            raise _unsupported(root, "keeps state in optimizers of its own: save it under extra")
        members = with_inner(root, [one for one in optimizers if one is not root])
        for member in members:
            if _keeps_state(member, members):
                keepers[id(member)] = member
    by_state = {id(getattr(one, "state", one)): one for one in keepers.values()}
    for keeper in by_state.values():
        _refuse_without_state(keeper)
    return list(by_state.values())


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the tensors in an optimizer's parameter groups."""
    groups = getattr(optimizer, "param_groups", ())
    return list(chain.from_iterable(group["params"] for group in groups))


def has_own_step(optimizer: object) -> bool:
    """Return whether an object has a `step` itself, and does not only forward the call."""
    return inspect.getattr_static(optimizer, "step", _MISSING) is not _MISSING


def own_attributes(holder: object) -> dict[str, Any]:
    """Return the attributes of an object itself, and not those that `__getattr__` forwards."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:  # an object with slots
        return {}
    return attributes


def _keeps_state(member: Any, members: Sequence[Any]) -> bool:
    """Return whether a member has state or parameters that no other inside it has."""
    inner = []
    for one in with_inner(member)[1:]:
        # One inside may know the container that it is in.
        if one in members and not _lacks_options(one):
            inner.append(one)
    if not inner:
        return True
    state = getattr(member, "state", {})
    if any(state is getattr(one, "state", None) for one in inner):
        return False  # it shows the state of the one inside, as accelerate's does
    if state:
        return True
    if _lacks_options(member):
        return False
    stepped = set(map(id, chain.from_iterable(map(parameters_of, inner))))
    return not stepped.issuperset(map(id, parameters_of(member)))


def _lacks_options(optimizer: Any) -> bool:
    return any(not group.keys() - _NO_OPTIONS for group in optimizer.param_groups)


def _refuse_without_state(optimizer: Any) -> None:
    """Refuse an optimizer that keeps its state in a place of its own, where it is not found."""
    if getattr(optimizer, "state", None):
        return
    hides = _lacks_options(optimizer)
    if not hides and getattr(type(optimizer), "state_dict", None) is not Optimizer.state_dict:
        hides = next(tensors_in(optimizer.state_dict()), None) is not None
    if hides:
        raise _unsupported(
            optimizer,
            "has parameters but neither state nor options of them, as a container of others has,"
            " and these are not among its attributes: give the ones inside, optimizer=[…]",
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield a value if it is a tensor, or those inside dicts, lists and tuples."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def _attributes(holder: object) -> Iterator[Any]:
    for name, value in own_attributes(holder).items():
        if name not in _LARGE:
            yield value
    for kind in type(holder).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(holder, name, None)


def _candidates(value: Any) -> Iterator[Any]:
    """Yield a value, or those in it, through lists, tuples, sets and dicts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _candidates(inner)
    else:
        yield value


def _unsupported(optimizer: object, reason: str) -> UsageError:
    return UsageError("unsupported", f"{type(optimizer).__name__} {reason}")
