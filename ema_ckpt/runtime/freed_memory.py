"""Memory that was freed, given back to the system."""

from __future__ import annotations


def give_back() -> None:
    """Give back what the C library keeps of freed arrays, where it has a call for that (glibc).

    Between arrays of a few hundred kilobytes that live and die together it keeps hundreds of
    megabytes, which Python's own objects cannot use.
    """
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
