"""Sharded EMA for large-scale training, and a toolkit for the checkpoints it leaves."""

__version__ = "0.1.0"
