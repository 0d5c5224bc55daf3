"""A run goes on bit for bit from a directory that `reshard` or `convert` made of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

import ema_ckpt
from tests.distributed.launcher import run
from tests.distributed.test_resume_layouts import restore_all, save_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_resumes_from_resharded_and_converted_checkpoints(tmp_path: Path) -> None:
    run(4, save_all, str(tmp_path), ["fsdp2", "fsdp2-tp-2x2-uneven"], timeout=120)
    pairs = []
    for name in ("fsdp2", "fsdp2-tp-2x2-uneven"):
        source = tmp_path / f"{name}.w4"
        ema_ckpt.reshard(source, tmp_path / f"{name}.three", 3)
        ema_ckpt.convert(source, tmp_path / f"{name}.safetensors")
        ema_ckpt.convert(
            tmp_path / f"{name}.safetensors", tmp_path / f"{name}.back", to="dcp", world_size=5
        )
        pairs += [(name, str(tmp_path / f"{name}.{end}")) for end in ("three", "back")]
    run(3, restore_all, [("fsdp2", path) for name, path in pairs if name == "fsdp2"], timeout=120)
    run(4, restore_all, pairs, timeout=120)
