"""Hold the kernels: C for CPUs, compiled on first use, and Triton for GPUs.

Every kernel has a path of torch operations. Casts, amaxes and scales have the same bits on both.
Sums over tokens (the gradient of a bias) add up in another order.
"""
