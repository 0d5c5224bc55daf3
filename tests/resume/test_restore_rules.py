"""`restore(rules=…)`: a checkpoint of one layout into a model of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ema_ckpt import EmaCkptError, ShardedEMA, load_rules, restore, save

RULES = """
[[rule]]
from = ["blocks.{block}.q.weight", "blocks.{block}.k.weight"]
to = "blocks.{block}.qk.weight"
steps = [{ concatenate = 0, groups = 2 }]

[[rule]]
from = "{name:.*}.proj.weight"
to = "{name}.proj.kernel"
steps = [{ transpose = [0, 1] }]
"""


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = {
            "q": nn.Linear(6, 4, bias=False),
            "k": nn.Linear(6, 4, bias=False),
            "proj": nn.Linear(4, 3),
        }
        self.blocks = nn.ModuleList([nn.ModuleDict(block)])


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(4, 3))
        self.bias = nn.Parameter(torch.zeros(3))


class New(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = {"qk": nn.Linear(6, 8, bias=False), "proj": Projection()}
        self.blocks = nn.ModuleList([nn.ModuleDict(block)])


def expected(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    q, k = named["blocks.0.q.weight"], named["blocks.0.k.weight"]
    return {
        "blocks.0.qk.weight": torch.cat([q[:2], k[:2], q[2:], k[2:]]),
        "blocks.0.proj.kernel": named["blocks.0.proj.weight"].T,
        "blocks.0.proj.bias": named["blocks.0.proj.bias"],
    }


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_weights_averages_and_residuals_get_the_new_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = Old()
    average = ShardedEMA(old, decay=0.7, compensate=True)
    for _ in range(3):
        with torch.no_grad():
            for parameter in old.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update()
    optimizer = torch.optim.AdamW(old.parameters())
    save(tmp_path / "run", model=old, ema=average, optimizer=optimizer)
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)

    new = New()
    other = ShardedEMA(new, decay=0.7, compensate=True)
    report = restore(tmp_path / "run", model=new, ema=other, rules=rules)
    assert_equal(new.state_dict(), expected(old.state_dict()))
    before, after = average.state_dict(), other.state_dict()
    assert_equal(dict(after["weights"]), expected(dict(before["weights"])))
    assert_equal(dict(after["residual"]), expected(dict(before["residual"])))
    assert other.num_updates == 3
    assert report.trees["optimizer"] == "ignored"
    assert not report.missing
    assert not report.unexpected

    # And back.
    save(tmp_path / "new", model=new, ema=other)
    again = Old()
    averaged = ShardedEMA(again, decay=0.7, compensate=True)
    restore(tmp_path / "new", model=again, ema=averaged, rules=load_rules(rules, inverse=True))
    assert_equal(again.state_dict(), old.state_dict())
    assert_equal(dict(averaged.state_dict()["weights"]), dict(before["weights"]))


def test_what_restore_refuses(tmp_path: Path) -> None:
    old = Old()
    save(tmp_path / "run", model=old)
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    new = New()
    before = {name: value.clone() for name, value in new.state_dict().items()}
    with pytest.raises(EmaCkptError, match="optimizer state is not carried through rules"):
        restore(
            tmp_path / "run", model=new, optimizer=torch.optim.SGD(new.parameters()), rules=rules
        )
    rules.write_text("[[rule]]\nfrom = 'nothing'\nto = 'x'")
    with pytest.raises(EmaCkptError, match="fits no name") as found:
        restore(tmp_path / "run", model=new, rules=rules)
    assert found.value.code == "empty-selection"
    with pytest.raises(EmaCkptError, match=r"no such file of rules"):
        restore(tmp_path / "run", model=new, rules=tmp_path / "none.toml")
    assert_equal(new.state_dict(), before)
