"""Run Transformer Engine's own Python on a CPU, over kernels for CPUs."""
