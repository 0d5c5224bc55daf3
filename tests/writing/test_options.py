"""Options of the writing verbs: checked once, in one frozen value."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ema_ckpt.core.errors import UsageError
from ema_ckpt.writing.options import WriteOptions, WriterArgs


def test_options_are_those_of_the_command_line() -> None:
    options = WriteOptions.parse({"threads": 3, "max_memory": "8MiB", "no_fsync": True})
    assert (options.threads, options.budget_nbytes, options.fsync) == (3, 8 << 20, False)
    assert WriteOptions.parse({"match": "a*"}).selection.match == ("a*",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.threads = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"threads": 0}, "--threads 0: expected 1 or more"),
        ({"max_memory": "1MiB"}, "--max-memory 1MiB: expected 4MiB or more"),
        ({"dtype": "int8"}, "fp32, bf16 or fp16"),
        ({"rename": ["x"]}, "="),
    ],
)
def test_options_that_cannot_be(args: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        WriteOptions.parse(args)
    assert caught.value.code == "usage"


def test_unknown_options_are_no_options() -> None:
    with pytest.raises(TypeError, match="colour"):
        WriteOptions.parse({"colour": "blue"})  # type: ignore[typeddict-unknown-key]
    assert "progress" in WriterArgs.__annotations__


@pytest.mark.parametrize(
    ("threads", "budget", "remote", "nbytes"),
    [
        (1, 4 << 20, False, 1 << 20),
        (8, 16 << 20, False, 512 << 10),
        (1, None, False, 1792 << 10),
        (8, None, True, 8 << 20),
        (1000, 4 << 20, False, 16 << 10),
    ],
)
def test_four_buffers_for_each_worker_fit_the_budget(
    threads: int, budget: int | None, remote: bool, nbytes: int
) -> None:
    options = WriteOptions(threads=threads, budget_nbytes=budget)
    assert options.block_nbytes(remote, threads) == nbytes
