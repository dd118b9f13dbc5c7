"""Transformer Engine's own Python on a CPU.

    import te_cpu
    te = te_cpu.load()  # transformer_engine.pytorch, unmodified

The Python half of Transformer Engine is a small wheel without compiled code. `load` fetches it into
a cache of its own, checks its hash, and imports it over kernels of this package, which stand in for
the compiled extension `transformer_engine_torch` with the arithmetic of an H100. From then on
`device="cuda"` means the CPU in this process; see `cuda.py` for what is patched.

    pytest -p te_cpu --te-version 2.12.0

does so before any test module is imported; see `pytest_plugin.py`.
"""

from te_cpu.loading import describe, lacking, load
from te_cpu.versions import DEFAULT_VERSION
from te_cpu.wheel import Sources, loaded

# `pytest -p te_cpu` registers this package, and by this name its plugin.
pytest_plugins = "te_cpu.pytest_plugin"

__all__ = ["DEFAULT_VERSION", "Sources", "describe", "lacking", "load", "loaded"]
