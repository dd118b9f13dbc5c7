"""Skip a test of the C kernels where there is no compiler, and only there."""

from __future__ import annotations

import pytest

from megafp8.precision.kernels.compile import library


def need_kernels() -> None:
    """A machine may have no compiler; one that has it and no kernels is a failure."""
    if library().lib is None and "no C compiler" in library().note:
        pytest.skip(library().note)
    assert library().lib is not None, library().note
