"""Run one save at a time in a background thread; the process does not end before it has."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from ema_ckpt.core.display import displayed

_executor: ThreadPoolExecutor | None = None
_pending: _Saving | None = None
_running: Future[None] | None = None
_is_exit_prepared = False


class _Saving(Future[Path | str]):
    """Future of a save that notes whether its result was looked at."""

    looked_at = False

    def result(self, timeout: float | None = None) -> Path | str:
        """Return the published directory once it is there, or raise what prevented it."""
        self.looked_at = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that prevented the save, or None, once it has ended."""
        self.looked_at = True
        return super().exception(timeout)


def run_in_background(work: Callable[[], Path | str]) -> Future[Path | str]:
    """Start `work` in a thread; the interpreter waits for it before it exits."""
    global _executor, _pending, _running
    _prepare_exit()
    if _executor is None:
        _executor = ThreadPoolExecutor(1, thread_name_prefix="ema_ckpt-save")
    saving = _Saving()
    saving.set_running_or_notify_cancel()

    def run() -> None:
        try:
            saving.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised by `result()`
            saving.set_exception(error)

    _running = _executor.submit(run)
    _pending = saving
    return saving


def wait_for_background_save() -> None:
    """Wait for the save in the background, if any; warn of a failure that nobody looked at."""
    global _pending
    saving = _pending
    if saving is None:
        return
    wait([saving])  # an interrupt leaves it to the next call
    _pending = None
    was_looked_at = saving.looked_at
    error = saving.exception()
    if error is not None and not was_looked_at:
        warnings.warn(f"the asynchronous save before this call failed: {error}", stacklevel=3)


def after_background_save(action: Callable[[], object]) -> None:
    """Call `action` when no save runs in the background: at once, or as it ends."""
    if _running is None:
        action()
    else:
        _running.add_done_callback(lambda _: action())


def _prepare_exit() -> None:
    """Have the exit wait for a running save, and tell of its failure, from the first save on."""
    global _is_exit_prepared
    if _is_exit_prepared:
        return
    _is_exit_prepared = True
    # Run after the thread has ended: nobody else would tell that the last save failed.
    atexit.register(_tell_of_failure)
    # `concurrent.futures` joins the thread at exit too, but first forbids new futures, and a store
    # whose host is a name needs them: asyncio looks names up in an executor. These callbacks run in
    # reverse order, so this one, registered after the import of `ThreadPoolExecutor`, comes before.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the exit has begun
            register(_wait_at_exit)


def _wait_at_exit() -> None:
    """Wait for the running save, and for one that was started meanwhile."""
    waited = None
    while _running is not None and _running is not waited:
        waited = _running
        wait([waited])


def _forget_saves_of_parent() -> None:
    """In a forked child: the thread is the parent's, so waiting for its save would never end."""
    global _executor, _pending, _running
    _executor = _pending = _running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_saves_of_parent)


def _tell_of_failure() -> None:
    """Log, as the process ends, the failure of a last save that nobody looked at."""
    saving = _pending
    if saving is None or saving.looked_at or not saving.done():
        return
    error = saving.exception()
    if error is not None:
        what = f"the last asynchronous save failed: {error}"
        logging.getLogger("ema_ckpt").error(displayed(what))
