"""Boxes of tensors out of stored chunks, checked on the way."""
