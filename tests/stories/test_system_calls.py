"""System calls that fail, one after the other, under every kind of command; `system_calls.py` says what is right."""

from __future__ import annotations

import subprocess

import pytest

from tests.stories.system_calls import CASES, STRACE, sweep


def can_trace() -> bool:
    """Whether strace is there and may trace: containers often forbid it."""
    words = [str(STRACE), "-f", "--seccomp-bpf", "-o", "/dev/null", "true"]
    return STRACE is not None and not subprocess.run(words, capture_output=True, check=False).returncode  # fmt: skip


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_trace(), reason="strace is not installed, or may not trace: apt-get install strace"),
]  # fmt: skip


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("name", CASES)
def test_calls_fail(name: str, lasting: bool) -> None:
    """All of them: `python -m tests.stories.system_calls`, and the same with `--lasting`."""
    codes, wrong = sweep(name, share=20 if lasting else 8, lasting=lasting)
    assert wrong == []
    assert codes[2] > 1, "faults did end the command"
    assert lasting or codes[0] > 0, "and some it gets over"
