"""What a whole step of FP8-LM starts on a GPU beside a step of `delayed`, as `layer_counts` counts.

A model of one layer: embedding, layer, head, sums of gradients, norm, update and write-back.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.data.loader import Microbatch
from megafp8.fp8 import scaled
from megafp8.fp8.kernels import triton_adam
from megafp8.optim import scaled_adam
from megafp8.optim.protocol import Optimizers
from megafp8.parallel import vocab
from megafp8.train import step as train_step_file
from megafp8.train.step import train_step
from tests.copies import Copies
from tests.fp8.kernels.layer_counts import (
    BATCH,
    FP8,
    GPT,
    META,
    SEQUENCE,
    counting,
    state_of,
)
from tests.fp8.kernels.test_layer_counts import Copied, refuse_waits

MICROBATCHES = 2


def counts_of_a_step(*settings: str) -> tuple[int, float, Counter[str]]:
    """Return launches and bytes of a step, and its launches by name; nothing in it may wait.

    The first step makes tensors that stay, so the second one is counted. What Adam's kernels find
    in their tables is counted as their arguments.
    """
    order: list[str] = []
    with pytest.MonkeyPatch.context() as patch, counting(patch) as tally:
        patch.setattr(vocab, "runs_triton", lambda device: True)
        for module in (scaled, scaled_adam):
            patch.setattr(module, "runs_triton", lambda device: True)
            patch.setattr(module, "_triton_reproduces_torch", lambda *_: True)
        patch.setattr(Optimizers, "decides_on_device", Optimizers.skip_on_device)
        adam = triton_adam.adam

        def counted(updates: Any, *rest: Any, **options: Any) -> None:
            for _ in range(2):
                tally.add("tables", [x for each in updates for x in each.tensors], count=0)
            adam(updates, *rest, **options)

        def fused(*lists: Any, **options: Any) -> None:
            given = [tensor for tensors in lists[:4] for tensor in tensors]
            tally.add("_fused_adamw", given)

        def copy_to_host(numbers: torch.Tensor) -> tuple[torch.Tensor, Copied]:
            with tally.unwatched():
                return torch.ones(len(numbers), dtype=torch.float64), Copied(order)

        patch.setattr(triton_adam, "adam", counted)
        patch.setattr(torch, "_fused_adamw_", fused)
        patch.setattr(train_step_file, "copy_to_host", copy_to_host)
        state = state_of((*GPT, *settings, f"model.global_batch_size={MICROBATCHES * BATCH}"))
        tokens = np.zeros((BATCH, SEQUENCE), dtype=np.int64)
        batches = [Microbatch(tokens, tokens)] * MICROBATCHES
        tally.takes_batches = True
        for _ in range(2):
            tally.launches.clear()
            tally.bytes.clear()
            with tally, Copies(META, refuse_waits(order)):
                train_step(state, batches)
        assert order == ["the host waits"] * 2
        return sum(tally.launches.values()), sum(tally.bytes.values()), tally.launches


@pytest.fixture(scope="module")
def of_delayed() -> tuple[int, float]:
    pytest.importorskip("triton")
    launches, num_bytes, _ = counts_of_a_step(*FP8)
    return launches, num_bytes


# Counted, not measured: docs/evidence/performance.md has the figures, in GB.
EXPECTED = {"O1": (251, 31.70), "O2": (248, 31.07), "O3": (260, 32.28)}


@pytest.mark.parametrize("level", EXPECTED)
def test_launches_and_bytes_of_fp8_lm(level: str, of_delayed: tuple[int, float]) -> None:
    launches, num_bytes, names = counts_of_a_step(*FP8, f"model.optim.fp8_opt_level={level}")
    what = f"{launches}, {num_bytes / 1e9}, {of_delayed}; {dict(names)}"
    assert (launches, num_bytes / 1e9) == pytest.approx(EXPECTED[level], abs=0.05), what
    assert of_delayed == pytest.approx((195, 25.82e9), rel=0.002), what
    assert launches <= 260 and num_bytes <= 1.3 * of_delayed[1], what
