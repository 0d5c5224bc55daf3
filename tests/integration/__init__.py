"""Checkpoints that real packages wrote, and every verb on them. Needs the extra `integration`.

Processes that the tests start import this package first, so the repair below reaches them too.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_KEPT: list[Any] = []  # a torch.library.Library takes its definitions along when it is collected


def _declare_missing_operators() -> None:
    """Declare torchvision's two operators that it annotates even if its own library cannot be loaded.

    PyPI's torchvision is built for CUDA. Beside a CPU build of torch its library does not load, and then its
    import fails with `operator torchvision::nms does not exist`. timm, lightning and transformers import it; nothing
    here detects objects.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


_declare_missing_operators()
