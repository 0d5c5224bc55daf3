"""Byte-level facts of every format, a folder each: its reader and its writer."""
