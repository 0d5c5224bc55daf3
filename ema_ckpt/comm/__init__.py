"""Ranks that talk to each other: meeting, agreeing, failing together."""
