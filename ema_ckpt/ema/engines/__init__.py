"""Ways to move an average: on the CPU, by torch._foreach, by Triton kernels, from pinned host
memory.
"""
