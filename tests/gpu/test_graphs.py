"""Updates recorded into CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ema_ckpt.core.errors import StateError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.schedules import Warmup


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 70), nn.Linear(70, 33)).to("cuda", dtype)


def _drift(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.01).add_(0.001)


def _captured(model: nn.Module, ema: ShardedEMA) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _drift(model)
        ema.update()
    return graph


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("options", [
    {},
    {"compensate": True},
    {"nonfinite": "skip"},
    {"dtype": torch.bfloat16, "rounding": "stochastic", "seed": 3},
])  # fmt: skip
def test_replays_equal_eager_updates(every: int, options: dict[str, object]) -> None:
    models = [_model(torch.bfloat16), _model(torch.bfloat16)]
    emas = [ShardedEMA(m, Warmup(0.9999, power=0.75), every=every, **options) for m in models]  # type: ignore[arg-type]
    graph = _captured(models[1], emas[1])
    assert emas[1].num_updates == 0
    for step in range(50):
        if step == 20:  # one bad step in between
            for model in models:
                model[0].weight.data[3, 3] = torch.nan if options.get("nonfinite") else 5.0
        _drift(models[0])
        emas[0].update()
        emas[1].advance()
        graph.replay()
    assert emas[1].num_updates == 50
    assert emas[1].current_decay == emas[0].current_decay
    assert emas[1].nonfinite_events == emas[0].nonfinite_events
    states = [ema.state_dict() for ema in emas]
    for name, want in states[0]["weights"].items():
        assert torch.equal(states[1]["weights"][name], want), name
        assert torch.isfinite(want).all()


def test_a_missing_advance_is_noticed_at_the_next_save() -> None:
    model = _model()
    ema = ShardedEMA(model, 0.9)
    graph = _captured(model, ema)
    for _ in range(3):
        ema.advance()
        graph.replay()
    ema.state_dict()
    graph.replay()
    with pytest.raises(StateError, match=r"replayed 4 times, but advance\(\) was called 3 times"):
        ema.state_dict()
    ema.advance()
    graph.replay()
    assert int(ema.state_dict()["num_updates"]) == 4


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_offload_under_capture_raises() -> None:
    model = _model()
    ema = ShardedEMA(model, 0.9, offload=True)
    ema.update()
    with pytest.raises(StateError, match="offload=False"):
        _captured(model, ema)
    with pytest.raises(StateError, match="none was recorded"):
        ema.advance()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_of_the_optimizer_inside_a_graph_is_refused_beside_offload() -> None:
    model = _model()
    ema = ShardedEMA(model, 0.9, offload=True)
    ema.update()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(StateError, match="inside a CUDA graph beside an offloaded average"),
        torch.cuda.graph(graph),
    ):
        optimizer.step()
    del ema
