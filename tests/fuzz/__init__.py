"""Fuzzing of every parser; see run.py."""
