"""CRC-32 of byte strings, and of joined ones from the CRC-32s of their parts.

zlib-ng computes it an order of magnitude faster than the zlib of most systems, by carry-less
multiplication.
"""

from zlib_ng import zlib_ng

crc32 = zlib_ng.crc32
combine_crcs = zlib_ng.crc32_combine
