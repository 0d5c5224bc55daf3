"""Limit how deep steps are followed into one another, and search no directory twice for the same.

A few links make a directory hold any number of paths: ten directories, each with three links to the
next, hold 3^10. What a directory was found to lack is kept, so that a search takes time linear in
the links, and its depth is limited.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from ema_ckpt.core.errors import SourceError
from ema_ckpt.discovery.location import Location
from ema_ckpt.storage.files import is_url

STEP_LEVELS = 4
PART_LEVELS = 2  # a step's part may be a pair


class TooDeepError(SourceError):
    """Steps or parts lie in one another, deeper than is followed.

    Attributes:
        place: `file` as it can be opened, with the credentials of a URL.
    """

    def __init__(
        self, code: str, message: str, *, tensor: str | None = None, file: str | None = None
    ) -> None:
        super().__init__(code, message, tensor=tensor, file=file)
        self.place = file


@dataclass(frozen=True, slots=True)
class Depth:
    """How many more levels of steps are followed, and what was found to hold no checkpoint."""

    left: int = STEP_LEVELS
    _failed: dict[tuple[str, str, int], SourceError | None] = field(default_factory=dict)

    def below(self, root: str) -> Depth:
        """Return the depth inside the step `root`. Raises TooDeepError beyond the last level."""
        if self.left == 0:
            problem = f"{root}: steps in steps are followed {STEP_LEVELS} levels deep, and this is"
            message = f"{problem} one more; name it, or what is in it, to read it"
            raise TooDeepError("not-a-checkpoint", message, file=root)
        return Depth(self.left - 1, self._failed)

    def search(self, how: str, root: str, locate: Callable[[], Location | None]) -> Location | None:
        """Return what `locate`, a search named `how`, finds in `root`, unless it is known to fail.

        Raises:
            SourceError: as `locate`.
        """
        key = (how, _identity(root), self.left)
        if key not in self._failed:
            try:
                location = locate()
            except SourceError as error:
                self._failed[key] = error
                raise
            if location is not None:
                return location
            self._failed[key] = None
        known = self._failed[key]
        if known is not None:
            raise known
        return None


def _identity(root: str) -> str:
    try:
        return root if is_url(root) else os.path.realpath(root)
    except ValueError:
        return root
