"""Hold the kernels: C for CPUs, compiled on first use, and Triton for GPUs.

Every kernel has a path of torch operations with the same bits.
"""
