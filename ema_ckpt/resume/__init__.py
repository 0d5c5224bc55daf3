"""Saving and restoring a training state: where the EMA side meets the checkpoint side."""

from __future__ import annotations

from ema_ckpt.resume.newest import latest
from ema_ckpt.resume.report import RestoreReport
from ema_ckpt.resume.restoring import restore
from ema_ckpt.resume.rng import rng_state
from ema_ckpt.resume.saving import save

__all__ = ["RestoreReport", "latest", "restore", "rng_state", "save"]
