"""Averages that lie only below bookkeeping are told, and can be named."""

from __future__ import annotations

import shlex
import time

import pytest

from ema_ckpt.core.names import canonical
from ema_ckpt.state_dicts.hidden_averages import find_hidden
from ema_ckpt.state_dicts.tree import find_tree, list_trees
from tests.catalogs import INT, T, catalog_of

W = T((2, 3))
B = T((3,))
LIVE = {"a.w": W, "b": B}


@pytest.mark.parametrize(
    ("beside", "path"),
    [
        ({"callbacks": {"EMA": {"ema": LIVE, "decay": 0.9}}}, "callbacks.EMA.ema"),
        (
            {"callbacks": {"EMACallback{'decay': 0.9}": {"ema_weights": LIVE}}},
            "callbacks.EMACallback{'decay': 0.9}.ema_weights",
        ),
        ({"callbacks": {"Mine": {"shadow_params": [W, B]}}}, "callbacks.Mine.shadow_params"),
        ({"callbacks": {"Mine": {"kept": LIVE}}}, "callbacks.Mine.kept"),
        (
            {"callbacks": {"SWA": {"average_model_state": {"n_averaged": INT, "module.a.w": W}}}},
            "callbacks.SWA.average_model_state",
        ),
        ({"extra_state": {"ema": LIVE}}, "extra_state.ema"),
        ({"trainer_state": {"WeightAveraging": LIVE}}, "trainer_state.WeightAveraging"),
        ({"optimizer": {"opt": {"s": W}, "ema": [W, B]}}, "optimizer.ema"),
        ({"averaged_model": LIVE}, "averaged_model"),
        ({"moving_average": {"module.a.w": W}}, "moving_average"),
        ({"kept teacher": LIVE, "epoch": 3}, "kept teacher"),
    ],
)
def test_it_is_warned_of_and_may_be_named(beside: dict, path: str) -> None:
    trees = list_trees(catalog_of({"state_dict": LIVE, **beside}))
    assert "ema" not in [tree.role for tree in trees]
    (warning,) = find_hidden(trees)
    assert warning.code == "left-out"
    assert warning.message.endswith(f"--tree {shlex.quote(path)}")
    named = find_tree(trees, path)
    if "kept" not in path and "averag" not in path.lower():
        assert named.role == "ema"
    names = list(map(canonical, named.weights))
    assert names == [*LIVE][: len(names)]


@pytest.mark.parametrize(
    "beside",
    [
        {"callbacks": {"Metric": {"confusion": W}, "schema": {"x": W}}},
        {"callbacks": {"EMA": {"decay": 0.9, "updates": INT}}},
        {"callbacks": {"EMA": {"ema": LIVE}}, "ema": LIVE},  # a tree of its own: nothing is hidden
        {"optimizer": {"state": {"a.w": {"exp_avg": W, "ema": W}}}},
    ],
)
def test_other_bookkeeping_is_not(beside: dict) -> None:
    assert not list(find_hidden(list_trees(catalog_of({"state_dict": LIVE, **beside}))))


def test_modules_with_names_of_bookkeeping_are_told() -> None:
    """A file of weights alone, without nesting: one that loads it misses what is not written."""
    flat = {"a.w": W, "scaler.w": W, "opt.layers.0.w": W, "rng.state": INT, "loops.x": T(())}
    trees = list_trees(catalog_of(flat))
    said = [warning.message for warning in find_hidden(trees)]
    assert ["'scaler'" in said[0], "'opt'" in said[1], len(said)] == [True, True, 2]
    assert said[0].endswith("--tree scaler; `convert` takes all there is")
    assert not list(find_hidden(trees, ("scaler", "opt.layers")))[1:]


@pytest.mark.parametrize("name", ["state.a.w.exp_avg", "a.w.exp_avg", "param_groups.0.x"])
def test_a_flat_optimizer_is_not(name: str) -> None:
    assert not list(find_hidden(list_trees(catalog_of({"a.w": W, f"optimizer.{name}": W}))))


@pytest.mark.thorough
def test_many_dictionaries_take_no_time() -> None:
    workers = {str(index): {"buffer": {"x": W, "y": B}} for index in range(20_000)}
    tree = {"state_dict": LIVE, "dataloader": {"workers": workers}}
    trees = list_trees(catalog_of(tree))
    started = time.process_time()
    assert not list(find_hidden(trees))
    assert time.process_time() - started < 10
