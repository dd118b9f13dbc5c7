"""Hold the Triton kernels of training: norms, activations, heads, loss, stored states.

Every kernel has a path of torch operations. Norms and activations add up or round in another order,
and agree within the bounds of their tests. The casts are in `fp8_numerics.kernels`.
"""
