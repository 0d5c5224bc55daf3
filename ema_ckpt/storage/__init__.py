"""Bytes in files and directories, on a disk or behind a URL."""
