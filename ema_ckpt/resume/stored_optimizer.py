"""Stored optimizer state under names of parameters, whichever form it was saved in.

    {"state": {fqn: {…}}, "param_groups": [{"params": [fqn, …], …}]}  torch's nested form
    {"state": {0: {…}}, "param_groups": [{"params": [0, …], …}]}      an optimizer's state dict
    {"state.<fqn>.exp_avg": …, "param_groups.<fqn>.lr": …}            flattened, as torchtitan's

Any of these may be one of several in a list or a dict (Lightning's `optimizer_states`, composer's
`optimizers`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from ema_ckpt.core.catalog import Object, Tensor
from ema_ckpt.core.text import counted, shown
from ema_ckpt.resume.checkpoint_reader import CheckpointReader, Nested, is_flattened

Entries = dict[str, Any]  # tensors and objects by the name of the state

_HEADS = ("state", "param_groups")


class LiveGroup(NamedTuple):
    """A live parameter group: for each tensor that is stepped, the names of its parameters."""

    tensors: Sequence[Sequence[str]]

    @property
    def names(self) -> list[str]:
        """The names of all its parameters."""
        return list(chain.from_iterable(self.tensors))


@dataclass(eq=False)
class StoredOptimizer:
    """State per parameter, and options per group with the names of its parameters.

    Attributes:
        reader: what its entries are read with.
        missing: what the live groups need and the checkpoint lacks.
        unexpected: options of parameters that the model lacks.
    """

    reader: CheckpointReader
    state: dict[str, Entries] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def name_state(
    reader: CheckpointReader,
    documents: Sequence[Nested],
    live: Sequence[LiveGroup],
    names: Collection[str],
) -> StoredOptimizer:
    """Bring stored states into one, under names.

    Args:
        live: the live groups in order, by which positions are named.
        names: of all parameters of the model.

    Raises:
        SourceError: `index-mismatch` if positions do not fit the live groups, or the parameters of
            a live group have different options there; `unsupported` for positions of flat
            parameters, or for what has not the form of an optimizer's state.
    """
    stored = StoredOptimizer(reader)
    plain = []
    for document in documents:
        if is_flattened(document):
            _add_flattened(stored, document, live, names)
        else:
            plain.append(document)
    groups = [_groups_of(reader, document) for document in plain]
    parameters = [group.get("params", ()) for group in chain.from_iterable(groups)]
    if any(isinstance(name, int) for name in chain.from_iterable(parameters)):
        _name_positions(reader, groups, live)
    for document, saved in zip(plain, groups, strict=True):
        positions: dict[str, str] = {}
        for group in saved:
            positions |= group.pop("named", {})
        for key, entries in _parts_of(reader, document.get("state", {}), "state").items():
            name = positions.get(str(key), str(key))
            stored.state[name] = _parts_of(reader, entries, f"state.{key}")
        stored.groups += saved
    return stored


def _parts_of(reader: CheckpointReader, stored: Any, name: str) -> dict[Any, Any]:
    """Return the parts of a dict; an empty one is stored as an object."""
    if isinstance(stored, Object):
        stored = reader.load(stored)
    if not isinstance(stored, dict) or any(_is_loaded(part) for part in stored.values()):
        raise reader.refusal("unsupported", f"{name} of the optimizer is no dict of its state")
    return stored


def _is_loaded(part: Any) -> bool:
    return not isinstance(part, Tensor | Object | dict)


def _groups_of(reader: CheckpointReader, document: Nested) -> list[dict[str, Any]]:
    stored = document.get("param_groups", {})
    if not isinstance(stored, dict):  # an empty list
        return []
    groups = [reader.load(stored[number]) for number in sorted(stored, key=_by_number)]
    for number, group in enumerate(groups):
        if not _is_group(group):
            message = f"param_groups.{number} of the optimizer is no parameter group"
            raise reader.refusal("unsupported", message)
    return groups


def _by_number(key: str | int) -> tuple[int, str]:
    return (key, "") if isinstance(key, int) else (0, key)


def _is_group(group: Any) -> bool:
    """Whether a value has the form of a parameter group: options by name, and what it steps."""
    if not isinstance(group, dict) or not all(isinstance(name, str) for name in group):
        return False
    parameters = group.get("params", ())
    is_list = isinstance(parameters, list | tuple)
    return is_list and all(isinstance(name, str | int) for name in parameters)


def _name_positions(
    reader: CheckpointReader,
    documents: Sequence[Sequence[dict[str, Any]]],
    live: Sequence[LiveGroup],
) -> None:
    """Name the positions in `params` of every group after the live group in its place."""
    groups = list(chain.from_iterable(documents))
    if len(groups) != len(live):
        message = f"{counted(len(groups), 'parameter group')} there, {len(live)} here"
        raise reader.refusal("index-mismatch", message)
    for number, (group, here) in enumerate(zip(groups, live, strict=True)):
        positions = group.get("params", [])
        if len(positions) != len(here.tensors):
            message = f"parameter group {number} has {counted(len(positions), 'parameter')} there"
            message += f" and {len(here.tensors)} here, and they are stored by position"
            raise reader.refusal("index-mismatch", message)
        flat = next((names for names in here.tensors if len(names) > 1), None)
        if flat is not None:
            message = f"it stores state by position, and one flat parameter holds {shown(flat)}"
            message += " here; wrap with use_orig_params=True"
            raise reader.refusal("unsupported", message)
        group["params"] = here.names
        recorded = group.pop("param_names", None)
        if isinstance(recorded, list) and sorted(map(str, recorded)) == sorted(here.names):
            group["params"] = recorded
        group["named"] = dict(zip(map(str, positions), group["params"], strict=True))


def _add_flattened(
    stored: StoredOptimizer,
    document: Nested,
    live: Sequence[LiveGroup],
    names: Collection[str],
) -> None:
    options: dict[str, dict[str, Any]] = {}
    for head, fqn, key, entry in _split_names(document, names):
        if head == "state":
            stored.state.setdefault(fqn, {})[key] = entry
        else:
            options.setdefault(fqn, {})[key] = entry
    for number, group in enumerate(live):
        stored.groups.append(_common_options(stored, group.names, options, number))
    odd = [name for name in options if name not in names]
    stored.unexpected += [f"optimizer.param_groups.{name}" for name in odd]


def _split_names(
    document: Nested, names: Collection[str]
) -> Iterator[tuple[str, str, str, Tensor | Object]]:
    """Split `state.<fqn>.<key>` where a known name ends, else at the last dot."""
    for name, entry in document.items():
        head, _, rest = str(name).partition(".")
        fqn = rest.rpartition(".")[0]
        while fqn and fqn not in names:
            fqn = fqn.rpartition(".")[0]
        fqn = fqn or rest.rpartition(".")[0]
        if head in _HEADS and fqn:
            yield head, fqn, rest[len(fqn) + 1 :], entry


def _common_options(
    stored: StoredOptimizer,
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    number: int,
) -> dict[str, Any]:
    """Return the options that all parameters of a live group have there."""
    first: dict[str, Any] = {}
    first_name = ""
    for name in names:
        if name not in options:
            stored.missing.append(f"optimizer.param_groups.{name}")
            continue
        values = {key: stored.reader.load(entry) for key, entry in options[name].items()}
        if not first:
            first, first_name = values, name
        elif repr(values) != repr(first):
            message = f"the parameters of group {number} here have different options there:"
            message += f" {name!r} {values}, {first_name!r} {first}"
            raise stored.reader.refusal("index-mismatch", message)
    return {**first, "params": list(names)}
