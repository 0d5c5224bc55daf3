"""Runs jobs: thread and process pools, page-aligned buffers, notices. Knows nothing of
checkpoints.
"""
