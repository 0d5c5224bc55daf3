"""Pickles, read by an interpreter that imports and calls nothing, and written without pickling."""
