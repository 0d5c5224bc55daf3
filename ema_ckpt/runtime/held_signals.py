"""A block in which signals wait: what it moves is moved wholly or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class HeldSignals:
    """A block at whose end the signals that came inside are delivered, each once.

    Python runs the handlers of signals between two instructions of the main thread: Ctrl-C raises
    there, and a handler of the program may save a checkpoint. Nothing is held in other threads,
    where no handler runs, nor of signals without a handler in Python.
    """

    def __init__(self) -> None:
        self._former: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[int] = []
        self._holds = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._holds = True
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._former[number] = handler
                    signal.signal(number, self._note)
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *exception: object) -> None:
        self._give_back()
        self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> Any:
        if not self._holds:  # one that came while the handlers are given back
            return self._former[number](number, frame)
        if number not in self._came:
            self._came.append(number)
        return None

    def _give_back(self) -> None:
        """Install the former handlers; where one raises meanwhile, the others are still called."""
        self._holds = False
        for number, handler in self._former.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _deliver(self) -> None:
        while self._came:
            try:
                signal.raise_signal(self._came.pop(0))
            except BaseException:
                self._deliver()
                raise
