"""What all tests share: how hypothesis searches, and where the committed checkpoints lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No deadline: two busy cores say nothing about the code. CI searches from fixed seeds, so that red means a change.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The directory of committed checkpoints."""
    return Path(__file__).parents[1] / "fixtures"
