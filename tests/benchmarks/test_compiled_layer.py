"""What a compiled layer starts can be counted without a GPU."""

from __future__ import annotations

import pytest

from megafp8.train import compile
from tests.fp8.kernels.layer_counts import FP8, LLAMA


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.skipif(compile.cannot_trace() is not None, reason="this torch cannot trace linears")
def test_inductor_fuses_the_same_around_linears_of_any_recipe() -> None:
    """SwiGLU's three passes of 8 bytes are in it, and at most the plain layer's 216.3 bytes."""
    from tests.fp8.kernels.inductor_counts import fused_by_inductor

    launches, size = fused_by_inductor(LLAMA)
    assert 10 < launches < 49 and 24 < size < 216.3
    assert fused_by_inductor((*FP8, *LLAMA)) == (launches, size)
