"""The kernels of training run as those of fp8_numerics do: see the file that is imported."""

from tests.fp8_numerics.kernels.conftest import collect_ignore_glob, device

__all__ = ["collect_ignore_glob", "device"]
