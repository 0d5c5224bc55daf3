"""Random rules over random state dicts: what they make equals torch's, and the inverse leads back."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.state_dicts.rules.rule_file import parse_rules
from ema_ckpt.state_dicts.rules.ruled_catalog import RuledCheckpoint, apply_rules
from ema_ckpt.state_dicts.rules.rules import Rules
from ema_ckpt.state_dicts.tree import list_trees
from tests.searches import examples
from tests.state_dicts.rules import reference, stored

Rule = dict[str, Any]


class Maker:
    """Makes rules that fit a state dict of families `f<N>.<layer>.<member>.<part>`, and what they give."""

    def __init__(self, rng: random.Random, first: int = 0) -> None:
        self.rng = rng
        self.values: dict[str, torch.Tensor] = {}
        self.rules: list[Rule] = []
        self.expected: dict[str, torch.Tensor] = {}
        self._elements = first

    def tensor(self, shape: list[int]) -> torch.Tensor:
        numel = 1
        for size in shape:
            numel *= size
        values = torch.arange(self._elements, self._elements + numel, dtype=torch.int32)
        self._elements += numel
        return values.reshape(shape)

    def add(self, family: int) -> None:
        """Add the tensors of one family, its rule, and what torch makes of them."""
        rng = self.rng
        parts, members = rng.randint(1, 3), rng.randint(1, 4)
        ndim = rng.randint(1, 3)
        shape = [rng.randint(1, 4) for _ in range(ndim)]
        sizes = [rng.randint(1, 3) for _ in range(parts)]
        groups = rng.randint(1, 3)
        dim = rng.randrange(ndim)
        stacks = rng.random() < 0.6
        steps = self.steps(shape, parts, dim, sizes, groups, stacks)
        member = ".{m}" if stacks else ""
        sources = [f"f{family}.{{l}}{member}.p{part}" for part in range(parts)]
        joins = any("concatenate" in step for step in steps)
        targets = [f"g{family}.{{l}}.q{part}" for part in range(1 if joins else parts)]
        self.rules.append({"from": sources, "to": targets, "steps": steps})
        for layer in range(rng.randint(1, 2)):
            columns: reference.Columns = [{} for _ in range(parts)]
            for part in range(parts):
                for number in range(members) if stacks else [None]:
                    lengths = list(shape)
                    if joins:
                        lengths[dim] = sizes[part] * groups * shape[dim]
                    value = self.tensor(lengths)
                    place = "" if number is None else f".{number}"
                    self.values[f"f{family}.{layer}{place}.p{part}"] = value
                    columns[part][number] = value
            for step in steps:
                columns = reference.apply_step(step, columns, len(targets))
            for part, column in enumerate(columns):
                self.expected[f"g{family}.{layer}.q{part}"] = column[None]

    def steps(
        self, shape: list[int], parts: int, dim: int, sizes: list[int], groups: int, stacks: bool
    ) -> list[Rule]:
        rng = self.rng
        steps: list[Rule] = []
        ndim = len(shape)
        if parts > 1 and rng.random() < 0.7:
            steps.append({"concatenate": dim, "sizes": sizes, "groups": groups})
        elif parts > 1:
            steps.append({"order": rng.sample(range(parts), parts)})
        if ndim > 1 and rng.random() < 0.6:
            steps.append({"permute": rng.sample(range(ndim), ndim)})
        if stacks:
            steps.insert(
                rng.randint(0, len(steps))
                if not steps or "permute" not in steps[-1]
                else len(steps),
                {"stack": "m", "dim": 0 if "concatenate" in str(steps) else rng.randint(0, ndim)},
            )
            stack_at = next(i for i, step in enumerate(steps) if "stack" in step)
            for step in steps[stack_at + 1 :]:
                if "concatenate" in step:
                    step["concatenate"] += 1
            ndim += 1
        if rng.random() < 0.4:
            steps.append({"unflatten": ndim - 1, "sizes": [1, -1]})
            ndim += 1
        if ndim > 1 and rng.random() < 0.4:
            steps.append({"transpose": [0, ndim - 1]})
        return steps


def ruled(rules: Rules, catalog: Catalog) -> RuledCheckpoint:
    return apply_rules(rules, catalog, list_trees(catalog))


def contents(done: RuledCheckpoint) -> dict[str, torch.Tensor]:
    return {tensor.name: stored.read(done.catalog, tensor) for tensor in done.catalog.tensors}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_rules_and_their_inverse(seed: int, strided: bool) -> None:
    maker = Maker(random.Random(seed))
    for family in range(maker.rng.randint(1, 3)):
        maker.add(family)
    maker.values["other.weight"] = maker.expected["other.weight"] = maker.tensor([3, 2])
    rules = parse_rules({"rule": maker.rules}, "random.toml", {})
    done = ruled(rules, stored.catalog_of(maker.values, maker.rng, strided=strided))
    made = contents(done)
    assert same(made, maker.expected)
    assert not done.warnings
    back = ruled(rules.inverse, stored.catalog_of(made, maker.rng, strided=strided))
    assert same(contents(back), maker.values)
    assert not back.warnings
    again = ruled(
        rules.inverse.inverse, stored.catalog_of(contents(back), maker.rng, strided=False)
    )
    assert same(contents(again), maker.expected)


def maker_of(seed: int, first: int) -> Maker:
    """Rules and a state dict; of one seed the same rules, names and shapes, and values from `first` on."""
    maker = Maker(random.Random(seed), first)
    for family in range(maker.rng.randint(1, 3)):
        maker.add(family)
    maker.values["other.weight"] = maker.expected["other.weight"] = maker.tensor([3, 2])
    return maker


def with_state(
    weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Weights, and beside them an optimizer's moments and step counts."""
    named = dict(weights)
    for name, value in moments.items():
        named[f"optimizer.state.{name}.exp_avg"] = value.double()
        named[f"optimizer.state.{name}.step"] = torch.tensor(7.0)
    return named


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_optimizer_state_goes_with_its_parameters(seed: int, strided: bool) -> None:
    weights, moments = maker_of(seed, 0), maker_of(seed, 10**6)
    rules = parse_rules({"rule": weights.rules}, "random.toml", {})
    before = with_state(weights.values, moments.values)
    done = ruled(rules, stored.catalog_of(before, random.Random(seed), strided=strided))
    made = contents(done)
    assert same(made, with_state(weights.expected, moments.expected))
    assert not done.left_out
    back = ruled(rules.inverse, stored.catalog_of(made, random.Random(seed), strided=strided))
    assert same(contents(back), before)
    assert not back.left_out
