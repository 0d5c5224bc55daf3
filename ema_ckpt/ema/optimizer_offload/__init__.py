"""Optimizer state in pinned host memory."""
