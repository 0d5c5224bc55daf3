"""Failures of the shared checks show values."""

import pytest

pytest.register_assert_rewrite("tests.integration.proving", "tests.integration.table")
