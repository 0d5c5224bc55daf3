"""Runs jobs: thread and process pools, page-aligned buffers. Knows nothing of checkpoints."""
