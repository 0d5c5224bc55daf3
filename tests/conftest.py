"""What all tests share: how hypothesis searches, where the committed checkpoints lie, which tests are quick."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No deadline: two busy cores say nothing about the code. CI searches from fixed seeds, so that red means a change.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("quick", settings.get_profile("default"), max_examples=20)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# A module that uses one of these starts processes. Stories go through whole commands, so they take longer as well.
_PROCESSES = re.compile(
    r"\b(subprocess|multiprocessing|os\.fork|launcher|resume_runs|fork_programs|staged_writer"
    r"|tests\.stories)\b"
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@cache
def _is_not_quick(path: Path) -> bool:
    return (
        path.parent.name == "stories"
        or _PROCESSES.search(path.read_text(encoding="utf-8")) is not None
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples in the loop while writing code; make the link that an sdist leaves out.

    A suite that runs in the background of a shell ignores SIGINT, and would hand that down to commands.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    device = Path(__file__).parents[1] / "fixtures" / "nasty" / "path-device" / "__1_0.distcp"
    if not device.is_symlink():
        device.symlink_to("/dev/zero")
    if config.option.markexpr == "quick":
        settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what is not quick in the loop while writing code."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return _is_not_quick(collection_path) or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `quick` what is in no other group, of modules that start no processes and are no stories."""
    for item in items:
        is_other = any(map(item.get_closest_marker, ("slow", "thorough", "integration")))
        if not is_other and not _is_not_quick(item.path):
            item.add_marker("quick")


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """The command line, called in this process, keeps its handlers; they would stay for the tests that follow."""
    kept = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    yield
    for signum, handler in kept.items():
        if signal.getsignal(signum) is not handler:
            signal.signal(signum, handler)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The directory of committed checkpoints."""
    return Path(__file__).parents[1] / "fixtures"
