"""Weights stored with scales beside them: recognised as one tensor, computed as they are read.

`schemes.py` is the table of what is recognised; a new scheme is a row there.
"""
