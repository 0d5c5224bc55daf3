"""Checkpoints of the package torch_checkpointing: a file for each item and rank."""
