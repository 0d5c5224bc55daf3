"""`restore(rules=…)`: a checkpoint of one layout into a model of another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ema_ckpt import EmaCkptError, ShardedEMA, convert, load_rules, restore, save
from tests.checkpoints import save_dcp

Named = dict[str, torch.Tensor]

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


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = dict(Old().blocks[0].named_children())
        block["out"] = block.pop("proj")
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
    with pytest.raises(EmaCkptError, match=r"rules= takes other names and layouts"):
        restore(tmp_path / "run", model=new)
    rules.write_text("[[rule]]\nfrom = 'nothing'\nto = 'x'")
    with pytest.raises(EmaCkptError, match="fits no name") as found:
        restore(tmp_path / "run", model=new, rules=rules)
    assert found.value.code == "empty-selection"
    with pytest.raises(EmaCkptError, match=r"no such file of rules"):
        restore(tmp_path / "run", model=new, rules=tmp_path / "none.toml")
    assert_equal(new.state_dict(), before)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, grads: list[Named]) -> None:
    """Step with these gradients, as a training run does."""
    parameters = dict(model.named_parameters())
    for named in grads:
        for name, grad in named.items():
            parameters[name].grad = grad.clone()
        optimizer.step()


def gradients(seed: int) -> list[Named]:
    generator = torch.Generator().manual_seed(seed)
    named = dict(Old().named_parameters())
    return [
        {name: torch.randn(p.shape, generator=generator) for name, p in named.items()}
        for _ in range(3)
    ]


def in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    biases = [value for name, value in named.items() if name.endswith("bias")]
    others = [value for name, value in named.items() if not name.endswith("bias")]
    return [{"params": others}, {"params": biases, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": lambda model, lr: torch.optim.AdamW(in_two_groups(model), lr=lr),
    "amsgrad": lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr, amsgrad=True),
    "momentum": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
    "plain": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
}


@pytest.mark.parametrize("form", ["run", "nested", "flattened", "converted"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_in_the_new_layout(kind: str, form: str, tmp_path: Path) -> None:
    """Both layouts are stepped on: every step is one of each element alone, so they stay equal bit for bit."""
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    old, new = Old(), New()
    optimizer = OPTIMIZERS[kind](old, 0.1)
    steps(old, optimizer, gradients(1))
    source = tmp_path / "run"
    if form in ("run", "converted"):
        save(source, model=old, optimizer=optimizer)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
        model_state, state = get_state_dict(old, optimizer, options=options)
        save_dcp(source, {"model": model_state, "optimizer": state})
    stepped = OPTIMIZERS[kind](new, 0.5)
    if form == "converted":
        convert(source, tmp_path / "new.pt", rules=rules, strict=True)
        restore(tmp_path / "new.pt", model=new, optimizer=stepped)
    else:
        restore(source, model=new, optimizer=stepped, rules=rules)
    assert_equal(new.state_dict(), expected(old.state_dict()))
    steps(old, optimizer, gradients(2))
    steps(new, stepped, [expected(named) for named in gradients(2)])
    assert_equal(new.state_dict(), expected(old.state_dict()))

    # And back.
    save(tmp_path / "back", model=new, optimizer=stepped)
    again = Old()
    last = OPTIMIZERS[kind](again, 0.5)
    restore(tmp_path / "back", model=again, optimizer=last, rules=load_rules(rules, inverse=True))
    steps(old, optimizer, gradients(3))
    steps(again, last, gradients(3))
    assert_equal(again.state_dict(), old.state_dict())


def test_parameters_that_differ_in_what_they_have_once_do_not_become_one(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    old, new = Old(), New()
    before = {name: value.clone() for name, value in new.state_dict().items()}
    optimizer = torch.optim.AdamW(old.parameters())
    first, *others = gradients(1)
    steps(old, optimizer, [first])
    queries = "blocks.0.q.weight"
    for parameter in old.parameters():
        parameter.grad = None
    steps(old, optimizer, [{queries: named[queries]} for named in others])
    save(tmp_path / "run", model=old, optimizer=optimizer)
    other = torch.optim.AdamW(new.parameters())
    with pytest.raises(
        EmaCkptError, match=r"'step' in the optimizer differ: float32 3\S* and"
    ) as found:
        restore(tmp_path / "run", model=new, optimizer=other, rules=rules)
    assert found.value.code == "unsupported"
    assert "\n" not in str(found.value)
    assert_equal(new.state_dict(), before)
    restore(tmp_path / "run", model=new, rules=rules)
    assert_equal(new.state_dict(), expected(old.state_dict()))


def test_an_optimizer_by_position_is_not_carried(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    old, new = Old(), New()
    optimizer = torch.optim.AdamW(old.parameters())
    steps(old, optimizer, gradients(1))
    torch.save(
        {"model": old.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt"
    )
    other = torch.optim.AdamW(new.parameters())
    for strict in (True, False):
        with pytest.raises(EmaCkptError, match="stored by position") as found:
            restore(tmp_path / "run.pt", model=new, optimizer=other, rules=rules, strict=strict)
        assert found.value.code == "unsupported"
    save_file(old.state_dict(), tmp_path / "model.safetensors")
    folder = tmp_path / "trainer"
    folder.mkdir()
    save_file(old.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    with pytest.raises(EmaCkptError, match=r"optimizer\.pt is not carried through rules"):
        restore(folder, model=new, optimizer=other, rules=rules)


def test_factored_state_is_refused_or_begun_anew(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    old, new = Old(), New()
    optimizer = torch.optim.Adafactor(old.parameters())
    steps(old, optimizer, gradients(1))
    save(tmp_path / "run", model=old, optimizer=optimizer)
    other = torch.optim.Adafactor(new.parameters())
    with pytest.raises(EmaCkptError, match=r"rules leave out .*row_var.*takes no new layout"):
        restore(tmp_path / "run", model=new, optimizer=other, rules=rules)
    with pytest.warns(UserWarning, match="rules leave out"):
        restore(tmp_path / "run", model=new, optimizer=other, rules=rules, strict=False)
    bias = new.get_parameter("blocks.0.proj.bias")
    carried = optimizer.state[old.get_parameter("blocks.0.proj.bias")]["variance"]
    assert torch.equal(other.state[bias]["variance"], carried)
    assert new.get_parameter("blocks.0.proj.kernel") not in other.state
    steps(new, other, [expected(named) for named in gradients(2)])  # the rest begins anew

    # A rule that only renames takes it along.
    rules.write_text("[[rule]]\nfrom = '{name:.*}.proj.{kind}'\nto = '{name}.out.{kind}'\n")
    renamed = Renamed()
    again = torch.optim.Adafactor(renamed.parameters())
    restore(tmp_path / "run", model=renamed, optimizer=again, rules=rules)
    grads = gradients(2)
    steps(old, optimizer, grads)
    steps(
        renamed, again, [{n.replace(".proj.", ".out."): g for n, g in one.items()} for one in grads]
    )
    for name, value in old.state_dict().items():
        assert torch.equal(renamed.state_dict()[name.replace(".proj.", ".out.")], value), name
