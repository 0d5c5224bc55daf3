"""Options of one output that another would not heed are refused, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ema_ckpt
from ema_ckpt import EmaCkptError

PLAIN = Path(__file__).parents[2] / "fixtures/safetensors/net-and-ema.safetensors"


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("m.safetensors", {"max_shard_size": 100}, "--max-shard-size 100 B: a file would have"),
        ("m.pt", {"max_shard_size": 100}, "--max-shard-size 100 B: a file would have"),
        ("m.safetensors", {"basename": "weights"}, "--basename weights: goes with a safetensors"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_consolidate_to_one_file(
    out: str, options: dict[str, Any], message: str, dry_run: bool, tmp_path: Path
) -> None:
    with pytest.raises(EmaCkptError, match=message) as caught:
        ema_ckpt.consolidate(PLAIN, tmp_path / out, dry_run=dry_run, **options)
    assert caught.value.code == "usage"
    assert not any(tmp_path.iterdir())


def test_convert_to_dcp_has_no_shards_of_a_size(tmp_path: Path) -> None:
    with pytest.raises(EmaCkptError, match="is to be a DCP directory") as caught:
        ema_ckpt.convert(PLAIN, tmp_path / "out", max_shard_size=100)
    assert caught.value.code == "usage"
    assert not any(tmp_path.iterdir())


def test_one_file_below_the_size_is_written(tmp_path: Path) -> None:
    ema_ckpt.consolidate(PLAIN, tmp_path / "m.safetensors", max_shard_size="1GB")
    assert ema_ckpt.verify(tmp_path / "m.safetensors").status == "sound"


DROP_ALL = "[[rule]]\ndrop = '{name:.*}'\n"


@pytest.mark.parametrize("verb", ["consolidate", "convert"])
def test_rules_that_drop_everything(verb: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(DROP_ALL)
    out = tmp_path / "out.safetensors"
    with pytest.raises(EmaCkptError, match="no tensor is left to write") as caught:
        getattr(ema_ckpt, verb)(PLAIN, out, rules=rules)
    assert caught.value.code == "empty-selection"
    assert not out.exists()


def test_types_that_the_target_lacks_alone(tmp_path: Path) -> None:
    torch.save({"z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "z.pt")
    with pytest.raises(EmaCkptError, match="no tensor is left to write") as caught:
        ema_ckpt.convert(tmp_path / "z.pt", tmp_path / "z.safetensors")
    assert caught.value.code == "empty-selection"


def test_checkpoint_of_values_alone_is_written(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "e.pt")
    written = ema_ckpt.convert(tmp_path / "e.pt", tmp_path / "out")
    assert written.tensors == 0
