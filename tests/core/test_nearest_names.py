from __future__ import annotations

from ema_ckpt.core.nearest_names import nearest


def test_the_nearest_name_comes_first() -> None:
    assert nearest("emma", ["optimizer", "model", "ema"])[0] == "ema"
    assert nearest("x", []) == []
