"""Updates inside CUDA graphs: recorded once, replayed with the weight that the host sets before
each replay.
"""

from __future__ import annotations

from collections.abc import Sequence

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.engines.cuda import TritonStep
from ema_ckpt.ema.engines.lists import Step


class Recording:
    """The steps that graphs have recorded, and how often the host has counted a replay."""

    def __init__(self) -> None:
        self._steps: list[TritonStep] = []
        self._advances = 0

    def add(self, steps: Sequence[Step] | None) -> None:
        """Record `steps` into the graph that the current stream captures.

        Raises:
            StateError: they are not ready, or no engine of theirs takes its weight from the device.
        """
        if steps is None:
            raise StateError(
                "usage", "update() inside a CUDA graph: call update() once before, as a warm-up"
            )
        ready = [step for step in steps if isinstance(step, TritonStep)]
        if len(ready) < len(steps):
            raise StateError(
                "unsupported",
                "update() inside a CUDA graph: it needs Triton, contiguous float32, bfloat16 or float16 parameters,"
                " and the average on the device (offload=False)",
            )
        for step in ready:
            step.record()
        self._steps += [step for step in ready if not any(step is known for known in self._steps)]

    def require(self) -> None:
        """Raise if there is nothing to replay.

        Raises:
            StateError: nothing was recorded.
        """
        if not self._steps:
            raise StateError(
                "usage", "advance() is for updates inside a CUDA graph, and none was recorded yet"
            )

    def advance(self, weight: float) -> None:
        """Set the weight of the next replay, and count it."""
        self._advances += 1
        for step in self._steps:
            step.set(weight)

    def check(self) -> None:
        """Raise, once, if graphs were replayed more or less often than the host has counted. Waits
        for the device.

        Raises:
            StateError: they were.
        """
        replays = next(
            (n for step in self._steps if (n := int(step.control.replays)) != self._advances), None
        )
        if replays is not None:
            counted, self._advances = self._advances, replays
            raise StateError(
                "usage",
                f"a CUDA graph with update() was replayed {replays} times, but advance() was called {counted} times:"
                " call ema.advance() before each replay, or the counter and the decay stand still",
            )
