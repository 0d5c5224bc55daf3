"""The average of MosaicML Composer's `EMA` algorithm, which keeps the other weights in a list.

A checkpoint has `state.model`, and in the list `state.algorithms` the state of `EMA`: a dictionary
`ema_model.named_parameters_dict` and `ema_weights_active`. If that is true the two are exchanged:
the model has the averages, which is so in all that Composer saves once the average has begun, and
the dictionary the live weights (composer/algorithms/ema/ema.py of 0.32). Early releases had a
dictionary of algorithms by name, not a list.
"""

from __future__ import annotations

from collections.abc import Sequence

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.names import EMA, LIVE
from ema_ckpt.state_dicts.groups import COMPOSER_WEIGHTS, Group

_WEIGHTS = COMPOSER_WEIGHTS.removesuffix(".")
_MARK = "ema_weights_active"


def separate_algorithms(catalog: Catalog, groups: Sequence[Group]) -> list[Group]:
    """Take the weights of `EMA` out of the algorithms' state, and tell which are the average."""
    result: list[Group] = []
    groups = _join_named(groups)
    by_name = {group.name: group for group in groups}
    for group in groups:
        parent, _, last = group.name.rpartition(".")
        model = by_name.get(f"{parent}.model".lstrip("."))
        parts = None if last != "algorithms" or model is None else _separate(catalog, group, model)
        result += parts or [group]
    return result


def _join_named(groups: Sequence[Group]) -> Sequence[Group]:
    """Put the trees of a dictionary of algorithms together, as those of a list are."""
    owners = [group for group in groups if _MARK in group.objects and ".algorithms." in group.name]
    for owner in owners:
        head, _, name = owner.name.rpartition(".algorithms.")
        joined, others = Group(f"{head}.algorithms", depth=owner.depth - 1), []
        for group in groups:
            if group.name != owner.name and not group.name.startswith(f"{owner.name}."):
                others.append(group)
                continue
            path = f"{name}{group.name[len(owner.name) :]}"
            for inner, item in group.items():
                joined.add(f"{path}.{inner}", item)
        if all(group.name != joined.name for group in others):
            groups = [*others, joined]
    return groups


def _separate(catalog: Catalog, group: Group, model: Group) -> list[Group]:
    """Divide the algorithms' state, and tell the roles of the weights there and of the model.

    Empty if there are none, several, or those of a release that wrote another form.
    """
    rest, weights = group.split(_weights_of)
    if len(weights) != 1:
        return []
    path = weights[0].name[len(group.name) + 1 :]
    mark = rest.objects.get(path.removesuffix(_WEIGHTS) + _MARK)
    if mark is None:
        return []
    _tell_roles(model, weights[0], is_exchanged=catalog.reader.load(mark) is True)
    return [rest, *weights]


def _weights_of(name: str) -> str | None:
    """Return the path of the dictionary of weights that an entry lies in, or None."""
    head, found, _ = name.partition(f"{_WEIGHTS}.")
    return head + _WEIGHTS if found else None


def _tell_roles(model: Group, weights: Group, *, is_exchanged: bool) -> None:
    model.role, weights.role = (EMA, LIVE) if is_exchanged else (LIVE, EMA)
    model.partner, weights.partner = weights.name, model.name
