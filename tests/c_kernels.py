"""Skip a test of the C kernels where there is no compiler, and only there."""

from __future__ import annotations

import os
import shutil

import pytest

from megafp8.fp8.kernels.compile import library


def need_kernels() -> None:
    """A machine may have no compiler; one that has it and no kernels is a failure.

    This is looked for here and not read from what the product says.
    """
    found = library()
    if found.lib is None and not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))):
        pytest.skip(found.note)
    assert found.lib is not None, found.note
