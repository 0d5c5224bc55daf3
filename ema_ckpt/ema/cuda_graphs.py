"""Updates inside CUDA graphs: recorded once, replayed with the weight that the host sets."""

from __future__ import annotations

from collections.abc import Sequence

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.engines.cuda import TritonStep
from ema_ckpt.ema.engines.update_batch import Step


class Recording:
    """Steps that graphs have recorded, and the number of replays that the host has counted."""

    def __init__(self) -> None:
        self._steps: list[TritonStep] = []
        self._advances = 0

    def add(self, steps: Sequence[Step] | None) -> None:
        """Record `steps` into the graph that the current stream captures.

        Raises StateError if they are not ready, or do not take their weight from the device.
        """
        if steps is None:
            raise StateError(
                "usage", "update() inside a CUDA graph: call update() once before, as a warm-up"
            )
        recordable = [step for step in steps if isinstance(step, TritonStep)]
        if len(recordable) < len(steps):
            raise StateError(
                "unsupported",
                "update() inside a CUDA graph: it needs Triton, contiguous float32, bfloat16 or"
                " float16 parameters, and the average on the device (offload=False)",
            )
        for step in recordable:
            step.record()
            if not any(step is recorded for recorded in self._steps):
                self._steps.append(step)

    def require(self) -> None:
        """Raise StateError if no step was recorded."""
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
        """Raise StateError, once, if graphs were not replayed as often as the host has counted."""
        for step in self._steps:
            replays, counted = int(step.control.replays), self._advances
            if replays != counted:
                self._advances = replays
                raise StateError(
                    "usage",
                    f"a CUDA graph with update() was replayed {replays} times, but advance() was"
                    f" called {counted} times: call ema.advance() before each replay, or the"
                    " counter and the decay stand still",
                )
