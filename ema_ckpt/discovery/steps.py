"""Steps of a run: which is the newest complete one, and which newer ones are not complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

from ema_ckpt.core.errors import AccessError, EmaCkptError, SourceError, UsageError
from ema_ckpt.core.names import EMA, LIVE
from ema_ckpt.core.text import counted
from ema_ckpt.discovery.completeness import check_complete, may_be_written
from ema_ckpt.discovery.depth import TooDeepError
from ema_ckpt.discovery.location import LeftOut, Location, ambiguous, join_located
from ema_ckpt.discovery.recognise import files_in, list_directory, locate_file, locate_pattern
from ema_ckpt.discovery.step_names import is_plain_step, label_of, step_order
from ema_ckpt.storage.directories import Folder, base_name, is_folder, join, parent_of

LocateFolder = Callable[[str], Location | None]
_ByOrder = dict[tuple[int, int], dict[str, list[str]]]


@dataclass(slots=True)
class Steps:
    """The steps in a directory.

    Attributes:
        names: of all steps, and of the averages beside them.
        newest: name and location of the newest complete one.
        broken: newer ones, or ones as new, that are not complete.
        hollow: directories with names of newer steps that hold other things than a checkpoint.
        too_deep: the error for the first of these that lies too deep to be followed, if one does.
    """

    folder: Folder
    names: set[str] = field(default_factory=set)
    count: int = 0
    newest: tuple[str, Location] | None = None
    broken: list[LeftOut] = field(default_factory=list)
    hollow: list[LeftOut] = field(default_factory=list)
    too_deep: TooDeepError | None = None

    def described_broken(self) -> str:
        """Name each broken step and what it lacks."""
        return "; ".join(f"{base_name(step.path)}: {step.error}" for step in self.broken[:10])

    def none_complete(self, remedy: str = "") -> SourceError:
        """Return the error for a directory whose steps are all broken."""
        root, several = self.folder.root, counted(len(self.broken), "step")
        problem = f"none of its {several} is complete ({self.described_broken()})"
        return SourceError("incomplete", f"{root}: {problem}{remedy}", file=root)


def find_steps(folder: Folder, locate_folder: LocateFolder) -> Steps:
    """Find the newest complete step in a directory.

    Args:
        locate_folder: locates the checkpoint that the directory of a step holds; None if it holds
            none.

    Raises:
        UsageError: `ambiguous-path` if two complete steps are equally new, unless the name of only
            one begins as a step's: `epoch_3.pth` beside `best_epoch_3.pth`.
    """
    by_order, steps = _by_order(folder), Steps(folder)
    for names in by_order.values():
        steps.count += len(names)
        steps.names.update(chain.from_iterable(names.values()))
    for _, name, location in _complete_ones(steps, by_order, locate_folder):
        steps.newest = name, location
        break
    return steps


def steps_between(
    folder: Folder, locate_folder: LocateFolder, first: int, last: float
) -> tuple[Iterator[tuple[int, str]], Steps]:
    """Find the complete steps with numbers from `first` to `last` in a directory.

    Returns:
        Number and path of each, the newest first, and the notes on those that are not complete,
        which are there once the iterator has come to them.

    Raises:
        UsageError: `ambiguous-path` if two complete steps are equally new.
    """
    steps = Steps(folder)
    by_order = {o: names for o, names in _by_order(folder).items() if first <= o[0] <= last}
    found = _complete_ones(steps, by_order, locate_folder)
    newest_first = ((number, join(folder.root, name)) for number, name, _ in found)
    # Of two versions of a step the later counts.
    return (next(same) for _, same in groupby(newest_first, itemgetter(0))), steps


def _complete_ones(
    steps: Steps, by_order: _ByOrder, locate_folder: LocateFolder
) -> Iterator[tuple[int, str, Location]]:
    """Yield number, name and location of complete steps, the newest first; note the others."""
    for order in sorted(by_order, reverse=True):
        complete: dict[str, Location] = {}
        for name in by_order[order]:
            location = _examine(steps, name, locate_folder)
            if location is not None:
                complete[name] = location
        if not complete:
            continue
        names = list(complete)
        if len(names) > 1:  # of equally new ones the only one with a plain name
            names = list(filter(is_plain_step, names))
        if len(names) != 1:
            raise ambiguous(steps.folder.root, [join(steps.folder.root, name) for name in complete])
        steps.names -= by_order[order].keys() - {*names}
        yield order[0], names[0], complete[names[0]]


class _Entry(NamedTuple):
    """Something in a directory that may be a step: its name, files, and the name without ending."""

    name: str
    members: tuple[str, ...]
    label: str


def _entries(folder: Folder) -> list[_Entry]:
    entries = [_Entry(name, (name,), label_of(name)) for name in folder.folders]
    for _, location in files_in(folder):
        names = location.names
        entries.append(_Entry(base_name(location.resolved), names, label_of(names[0])))
    return entries


def _average_of(entry: _Entry, entries: Iterable[_Entry]) -> _Entry | None:
    return next((other for other in entries if other.label == f"{entry.label}_ema"), None)


def _by_order(folder: Folder) -> _ByOrder:
    """Group the steps by number and version: the entries that each consists of, by its name."""
    entries = _entries(folder)
    steps: _ByOrder = {}
    for entry in entries:
        order = step_order(entry.members[0])
        if order is None:
            continue
        members = list(entry.members)
        average = _average_of(entry, entries)
        if average is not None:
            members += average.members
        steps.setdefault(order, {})[entry.name] = members
    return steps


def _examine(steps: Steps, name: str, locate_folder: LocateFolder) -> Location | None:
    """Locate a step if it is complete; else note what it is."""
    path = join(steps.folder.root, name)
    try:
        location = locate_step(path, locate_folder)
        if location is not None:
            return check_complete(location)
        folder = list_directory(path)
        if folder.folders or folder.files:
            steps.hollow.append(LeftOut(path, "it holds no checkpoint", is_weights=False))
            return None
        raise SourceError("incomplete", "the directory is empty")
    except UsageError:
        raise
    except TooDeepError as error:
        steps.too_deep = steps.too_deep or error
        steps.hollow.append(LeftOut(path, str(error), is_weights=False))
    except EmaCkptError as error:
        if is_folder(path) is None and "*" not in name:
            return None  # it was removed meanwhile, as retention jobs do
        if isinstance(error, AccessError):
            raise
        is_fresh = may_be_written(path, error)
        state = f"newer, and not complete: {error}"
        why = f"{state}; it may still be written" if is_fresh else state
        steps.broken.append(LeftOut(path, why, error=error, is_fresh=is_fresh))
    return None


def locate_step(path: str, locate_folder: LocateFolder) -> Location | None:
    """Locate a step, together with the average under its name: `step_500` with `step_500_ema`."""
    location = _locate_one(path, locate_folder)
    if location is None:
        return None
    root, name = parent_of(path), base_name(path)
    try:
        entries = _entries(list_directory(root))
    except AccessError:  # a step may be readable in a directory that may not be listed
        return location
    entry = next((entry for entry in entries if entry.name == name), None)
    average = None if entry is None else _average_of(entry, entries)
    if entry is None or average is None:
        return location
    averaged = _locate_one(join(root, average.name), locate_folder)
    if averaged is None:
        return location
    return join_located(root, path, [(entry.label, location, LIVE), (average.label, averaged, EMA)])


def _locate_one(path: str, locate_folder: LocateFolder) -> Location | None:
    if is_folder(path):
        return locate_folder(path)
    return locate_pattern(path) or locate_file(path)


def steps_beside(path: str) -> list[str]:
    """List the steps that lie where the step `path` does not, the newest first."""
    parent = parent_of(path)
    if step_order(base_name(path)) is None or not is_folder(parent):
        return []
    listed = _by_order(list_directory(parent))
    newest_first = [listed[order] for order in sorted(listed, reverse=True)]
    return list(chain.from_iterable(newest_first))
