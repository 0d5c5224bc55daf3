"""Saving and restoring a training state: where the EMA side meets the checkpoint side."""

from __future__ import annotations

from ema_ckpt.resume.saving import save

__all__ = ["save"]
