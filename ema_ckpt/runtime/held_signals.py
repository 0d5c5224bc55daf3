"""A block in which signals wait: what it moves is moved wholly or not at all."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class HeldSignals:
    """A block at whose end the handlers of the signals that came inside are called, each once.

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
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self._give_back()
        finally:
            try:
                self._deliver()
            finally:  # where an interrupt came before the first was called
                self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> Any:
        if not self._holds:  # one that came while the handlers are given back
            return self._former[number](number, frame)
        if number not in self._came:
            self._came.append(number)
        return None

    def _give_back(self) -> None:
        """Install the former handlers: all of them, also where one raises meanwhile."""
        try:
            self._holds = False
            for number, handler in self._former.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
        except BaseException:
            self._give_back()
            raise

    def _deliver(self) -> None:
        """Call the handlers of what came.

        A signal is not raised anew: what is told of signals as they come, asyncio's loop for one,
        would take it for two.
        """
        while self._came:
            number = self._came[0]
            handler = signal.getsignal(number)
            try:
                self._came.pop(0)
                if callable(handler):
                    handler(number, inspect.currentframe())
                else:
                    signal.raise_signal(number)
            except BaseException:
                self._deliver()
                raise
