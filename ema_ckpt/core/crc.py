"""CRC-32 of byte strings, and of joined ones from the CRC-32s of their parts.

zlib-ng computes it an order of magnitude faster than the zlib of most systems, by carry-less
multiplication.
"""

from zlib_ng.zlib_ng import crc32
from zlib_ng.zlib_ng import crc32_combine as combine_crcs

__all__ = ["combine_crcs", "crc32"]
