"""Saving and restoring a training state: where the EMA side meets the checkpoint side."""
