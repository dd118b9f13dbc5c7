"""Transformer Engine's own Python on a CPU.

    import te_cpu
    te = te_cpu.load()  # transformer_engine.pytorch, unmodified

The Python half of Transformer Engine is a small wheel without compiled code. `load` fetches it into
a cache of its own, checks its hash, and imports it over kernels of this package, which stand in for
the compiled extension `transformer_engine_torch` with the arithmetic of an H100. From then on
`device="cuda"` means the CPU in this process; see `cuda.py` for what is patched.
"""

from te_cpu.loading import describe, load
from te_cpu.versions import DEFAULT_VERSION
from te_cpu.wheel import Sources, loaded

__all__ = ["DEFAULT_VERSION", "Sources", "describe", "load", "loaded"]
