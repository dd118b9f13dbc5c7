"""A step that is not finite, which the optimizer's kernel skips on a GPU without the host."""

from __future__ import annotations

import pytest
import torch

from tests.train.skipped import O2, SKIPPED, check_skipped_step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fp8", SKIPPED, ids=str)
@pytest.mark.parametrize("spoils", ["loss", "gradient"])
def test_a_step_that_the_kernel_skips_changes_nothing_but_scales(fp8: str, spoils: str) -> None:
    check_skipped_step(torch.device("cuda", 0), SKIPPED[fp8], spoils)


@pytest.mark.parametrize("spoils", ["loss", "gradient"])
def test_kernels_over_stored_states_skip_too(spoils: str) -> None:
    check_skipped_step(torch.device("cuda", 0), SKIPPED["delayed"], spoils, O2)
