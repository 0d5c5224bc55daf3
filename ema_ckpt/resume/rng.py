"""Random number generators of each rank, as an object to pass under `extra`."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ema_ckpt.core.text import format_ranks


class RngState:
    """State of this rank's generators: Python's, NumPy's if it is loaded, torch's on host and CUDA.

    Every rank's are kept apart under `rank_N`. With another world size, ranks without a saved state
    keep theirs.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the present state of the generators."""
        version, numbers, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "state": torch.tensor(numbers), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, position, has_gauss, cached = numpy.random.get_state()
            keys = torch.from_numpy(keys.astype("int64"))
            state["numpy"] = {"kind": kind, "keys": keys, "rest": [position, has_gauss, cached]}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return {_rank_key(): state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generators to what this rank saved; nothing if it has saved nothing."""
        state = state_dict.get(_rank_key())
        if state is None:
            return
        python = state["python"]
        random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            saved = state["numpy"]
            keys = saved["keys"].numpy().astype("uint32")
            numpy.random.set_state((saved["kind"], keys, *saved["rest"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])

    def __repr__(self) -> str:
        return f"<RngState of {_rank_key()}>"

    def compare(self, name: str, saved: Iterable[object]) -> tuple[list[str], list[str]]:
        """Return saved states that no rank of this run takes, and what to warn of."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        ranks = {int(str(key).removeprefix("rank_")) for key in saved}
        dropped = sorted(ranks.difference(range(world_size)))
        absent = sorted(set(range(world_size)) - ranks)
        warnings = []
        if dropped:
            reason = "is dropped: there is no such rank now"
            warnings.append(f"rank-keyed: extra.{name} of {format_ranks(dropped)} {reason}")
        if absent:
            reason = "whose generators stay as they are"
            holds = f"extra.{name} holds nothing for {format_ranks(absent)}"
            warnings.append(f"rank-keyed: {holds}, {reason}")
        return [f"extra.{name}.rank_{rank}" for rank in dropped], warnings


def rng_state() -> RngState:
    """Make an object that saves and restores the random number generators of every rank.

    Pass it as `extra={"rng": rng_state()}` to `save` and `restore`.
    """
    return RngState()


def _rank_key() -> str:
    return f"rank_{dist.get_rank() if dist.is_initialized() else 0}"
