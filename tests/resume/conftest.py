"""The run that most tests here save."""

from __future__ import annotations

import pytest

from tests.resume.training import Run


@pytest.fixture
def run() -> Run:
    one = Run()
    one.train(0, 3)
    return one
