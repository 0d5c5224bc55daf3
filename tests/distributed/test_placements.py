"""DTensors of which it is not known where their elements lie: refused at construction and at `save`, never tiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ema_ckpt import ShardedEMA, save
from ema_ckpt.core.errors import EmaCkptError
from tests.distributed.launcher import run
from tests.ema.test_placement import InterleavedShard, RaggedShard

# (placement, rows on rank 0, rows on rank 1) of four rows; none of them is cut like `torch.chunk`.
CUTS: dict[str, tuple[Placement, int, int]] = {
    "partial": (Partial(), 4, 4),
    "ragged": (RaggedShard(3, 1), 3, 1),
    "ragged even": (RaggedShard(2, 2), 2, 2),
    "interleaved": (InterleavedShard(0), 2, 2),
    "uneven": (Shard(0), 3, 1),
    "other dimension": (Shard(1), 2, 2),
}


def _message(call: Any) -> str:
    with pytest.raises(EmaCkptError) as caught:
        call()
    return f"{caught.value.code}: {caught.value}"


def _refused(root: str, kind: str) -> list[str]:
    placement, *rows = CUTS[kind]
    mesh = init_device_mesh("cpu", (2,))
    odd = DTensor.from_local(
        torch.ones(rows[dist.get_rank()], 2), mesh, [placement], run_check=False,
        shape=torch.Size((4, 2)), stride=(2, 1),
    )  # fmt: skip
    model = nn.Linear(2, 4, bias=False)
    good = DTensor.from_local(model.weight.detach(), mesh, [Replicate()], run_check=False)
    model.weight = nn.Parameter(good)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight]["kept"] = odd
    wrong = nn.Linear(2, 4, bias=False)
    # torch 2.15 makes no parameter of placements that it does not know; this one gets them later.
    known = DTensor.from_local(
        odd._local_tensor, mesh, [Shard(0)], run_check=False, shape=odd.shape, stride=odd.stride()
    )
    wrong.weight = nn.Parameter(known)
    wrong.weight._spec = odd._spec
    path = Path(root, kind)
    return [
        _message(lambda: ShardedEMA(wrong)),
        _message(lambda: save(path, model=wrong)),
        _message(lambda: save(path, model=model, optimizer=optimizer)),
        _message(lambda: save(path, model=model, extra={"kept": odd})),
    ]


@pytest.mark.parametrize("kind", CUTS)
def test_an_unknown_cut_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    placement = CUTS[kind][0]
    for messages in run(2, _refused, str(tmp_path), kind):
        for message, name in zip(
            messages,
            ("'weight'", "'weight'", "'optimizer.state.weight.kept'", "'extra.kept'"),
            strict=True,
        ):
            assert message.startswith("unsupported: ")
            assert name in message
            assert "shape= and" not in message
            if type(placement) is Shard:
                assert "as torch.chunk cuts" in message
            else:
                assert type(placement).__name__ in message
    assert not list(tmp_path.iterdir())
