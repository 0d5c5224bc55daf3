from __future__ import annotations

import time

from ema_ckpt.core.nearest_names import nearest


def test_the_nearest_name_comes_first() -> None:
    assert nearest("emma", ["optimizer", "model", "ema"])[0] == "ema"
    assert nearest("x", []) == []


def test_many_names_take_no_long_time_and_the_nearest_is_found() -> None:
    names = [
        f"model.layers.{i // 1000}.mlp.experts.{i // 4 % 250}.{part}_proj.weight"
        for i in range(0, 100_000, 4)
        for part in ("gate", "up", "down", "extra")
    ]
    start = time.process_time()
    found = nearest("model.layers.97.mlp.experts.31.gate_prj.weight", names)
    assert time.process_time() - start < 3  # 20 seconds if every name is compared by its letters
    assert found[0] == "model.layers.97.mlp.experts.31.gate_proj.weight"
    assert sorted(found) == sorted(names)


def test_long_names_of_one_letter_take_no_long_time() -> None:
    start = time.process_time()
    assert len(nearest("*a" * 40 + "b", ["a" * 5000 + str(i) for i in range(5000)])) == 5000
    assert time.process_time() - start < 10  # hours if all letters are compared
