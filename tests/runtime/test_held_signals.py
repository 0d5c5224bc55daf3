"""Blocks in which signals wait."""

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest

from ema_ckpt.runtime.held_signals import HeldSignals


class _CameError(Exception):
    pass


@pytest.fixture(autouse=True)
def _former_handlers() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGUSR1)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in former.items():
        signal.signal(number, handler)


def test_a_handler_of_an_event_loop_is_called_once() -> None:
    called: list[str] = []

    async def train() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, called.append, "came")
        with HeldSignals():
            signal.raise_signal(signal.SIGUSR1)
        await asyncio.sleep(0.05)

    asyncio.run(train())
    assert called == ["came"]


def test_an_interrupt_at_any_moment_leaves_the_handlers_installed() -> None:
    def interrupt(number: int, frame: object) -> None:
        _ = number, frame
        raise _CameError

    signal.signal(signal.SIGALRM, interrupt)
    former = {number: signal.getsignal(number) for number in signal.valid_signals()}
    delays = random.Random(0)
    for _ in range(2000):
        try:
            signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-5, 2e-4))
            with HeldSignals():
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
        except _CameError:
            pass
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == former
