"""Run Transformer Engine's own Python on a CPU: `load` imports it over kernels for CPUs."""
