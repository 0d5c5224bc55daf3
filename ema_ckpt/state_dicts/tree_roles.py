"""Tell the role of each tree: live weights, their average, an optimizer's state, or other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import EMA, LIVE, OTHER, first_components
from ema_ckpt.core.text import shown
from ema_ckpt.state_dicts.composer import separate_algorithms
from ema_ckpt.state_dicts.embedded import group_by_name, separate, without_online_model
from ema_ckpt.state_dicts.groups import Group, Item, group_by_nesting


class ExchangedForm(NamedTuple):
    """A form of checkpoint that keeps the average under the live name, and how it is known.

    Attributes:
        average, live, settings: the trees of the average, of the live weights, and of what
            describes the average.
        marks: the first components of all names in the live tree; empty if its name is the mark.
    """

    average: str
    live: str
    settings: str
    marks: frozenset[str] = frozenset()


EXCHANGED_FORMS = (
    # Lightning's `WeightAveraging`
    ExchangedForm("state_dict", "current_model_state", "averaging_state"),
    # mmengine's `EMAHook`
    ExchangedForm("state_dict", "ema_state_dict", "ema_state_dict", frozenset({"module", "steps"})),
)


def group_entries(catalog: Catalog) -> list[Group]:
    """Group everything in a checkpoint into trees with roles, in stored order.

    Raises:
        SourceError: `name-collision` if two paths join to one dotted name.
    """
    _refuse_collisions(catalog)
    if catalog.nested and any(len(tensor.path) > 1 for tensor in catalog.tensors):
        groups = list(chain.from_iterable(map(separate, group_by_nesting(catalog))))
    else:
        groups = group_by_name(catalog)
    groups = separate_algorithms(catalog, groups)
    groups = _joined(chain.from_iterable(map(without_online_model, groups)))
    _assign_roles(groups)
    return groups


def _joined(groups: Iterable[Group]) -> list[Group]:
    """Put groups of one name together.

    Names at the top may place entries where a dictionary is too: `optimizer.state.w.exp_avg`.
    """
    joined: dict[str, Group] = {}
    for group in groups:
        first = joined.get(group.name)
        if first is None:
            joined[group.name] = group
            continue
        both = replace(first, tensors=dict(first.tensors), objects=dict(first.objects))
        for name, item in group.items():
            both.add(name, item)
        joined[group.name] = both
    return list(joined.values())


def _refuse_collisions(catalog: Catalog) -> None:
    seen: set[str] = set()
    twice = []
    for item in chain[Item](catalog.tensors, catalog.objects):
        if item.name in seen:
            twice.append(item.name)
        seen.add(item.name)
    if twice:
        message = f"{catalog.resolved}: several entries share the name {shown(twice)}; names joined"
        message += " with dots must be unique"
        raise SourceError("name-collision", message, tensor=twice[0])


def _assign_roles(groups: Sequence[Group]) -> None:
    by_name = {group.name: group for group in groups}
    for group in groups:
        group.role = group.known_role
    for group, form in product(groups, EXCHANGED_FORMS):
        _read_exchanged(group, form, by_name)
    for group in groups:
        # `X` beside `X_ema` is what that averages, whatever X is.
        live = by_name.get(group.name.removesuffix("_ema"), group)
        is_averaged = group.role == EMA and live.role is None
        if is_averaged and live.has_weight:
            live.role = LIVE
    _read_averaged_models(groups)
    unnamed = _unnamed_live(groups)
    if unnamed is not None:
        unnamed.role = LIVE
    for group in groups:
        group.role = group.role or OTHER


def _read_exchanged(group: Group, form: ExchangedForm, by_name: Mapping[str, Group]) -> None:
    """Exchange the roles of the average and the live weights if `group` has the form's marks."""
    parent, dot, last = group.name.rpartition(".")
    average = by_name.get(f"{parent}{dot}{form.average}")
    if last != form.live or average is None:
        return
    if form.marks and first_components([*group.tensors, *group.objects]) != form.marks:
        return
    average.role, group.role = EMA, LIVE
    average.partner, group.partner = group.name, average.name
    average.beside = by_name.get(f"{parent}{dot}{form.settings}")


def _read_averaged_models(groups: Sequence[Group]) -> None:
    """Know torch's `AveragedModel` beside live weights; alone it is what a run has for these."""
    if LIVE not in {group.role for group in groups}:
        return
    for group in groups:
        if group.role is None and group.is_averaged_model:
            group.role = EMA


def _unnamed_live(groups: Sequence[Group]) -> Group | None:
    """Find the live weights if no name tells them: the only group without a role that has any."""
    unnamed, shaped = [], []
    roles = set()
    for group in groups:
        roles.add(group.role)
        if group.role is not None or not group.tensors:
            continue
        unnamed.append(group)
        if any(tensor.shape for tensor in group.tensors.values()):
            shaped.append(group)
    if LIVE in roles:
        return None
    # Numbers alone may be all there is; beside an average they are something else.
    candidates = shaped if shaped or EMA in roles else unnamed
    return candidates[0] if len(candidates) == 1 else None
