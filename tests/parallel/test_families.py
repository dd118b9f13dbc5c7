"""A small model of each of today's families trains on tp 2 x pp 2 as it does in one process.

The bounds are those of the matrix: losses in FP8 within three times the spread of one process's
own losses when its embeddings differ by one rounding step, in FP32 losses and first gradients
within 1e-5. Norms of gradients in FP32 are within 3e-4: with norms of queries and keys a rounding
step has moved some of them by 8e-5.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.parallel.mesh import single_rank
from megafp8.specs import ParallelSpec
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.parallel import matrix
from tests.parallel.matrix import case_of, distance, row, spread
from tests.parallel.rank_work import run_case
from tests.parallel.test_tensor_parallel import gradient_errors

MISTRAL = replace(matrix.LLAMA, recompute=None, share_embeddings_and_output_weights=False)
MODELS = {
    "llama 3.1": replace(
        matrix.LLAMA, scale_positional_embedding=True, original_max_position_embeddings=16
    ),
    "qwen2": replace(MISTRAL, add_qkv_bias=True, share_embeddings_and_output_weights=True),
    "qwen3": replace(MISTRAL, qk_layernorm=True, kv_channels=16),
    "qwen3, recomputed": replace(matrix.LLAMA, qk_layernorm=True, kv_channels=16),
    "mistral": MISTRAL,
    "mistral with a window": replace(MISTRAL, window_size=(5, 0)),
    "qwen3 with windows": replace(
        MISTRAL, qk_layernorm=True, kv_channels=16, window_size=(5, 0), window_attn_skip_freq=2
    ),
}
PLAIN = ParallelSpec(tp=2, pp=2)
LAYOUTS = {"tp 2 x pp 2": PLAIN, "tp 2 x pp 2, sp": replace(PLAIN, sequence_parallel=True)}
QUICK = "qwen3 with windows"
STEPS = {QUICK: 8}
"""In place of 20: as many as show that the model learns."""


@pytest.mark.parametrize("precision", ["FP32", "FP8 delayed"])
@pytest.mark.parametrize(
    "family",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_a_family_trains_as_in_one_process(family: str, precision: str) -> None:
    layouts = {"tp 2 x pp 2": PLAIN} if family == QUICK else LAYOUTS
    steps = STEPS.get(family, 20)
    cases: dict[str, Case] = {
        name: replace(case_of(precision, spec, MODELS[family]), steps=steps)
        for name, spec in layouts.items()
    }
    alone = replace(case_of(precision, model=MODELS[family], merged=1), steps=steps)
    one = run_case(alone, single_rank())
    bound = 1e-5 if precision == "FP32" else 3 * spread(alone, one)
    for name in layouts:
        # All ranks of a call are of one layout: `join` makes its groups.
        ranks = on_ranks(run_case, {name: cases[name]}, 4)[name]
        kind = "BF16" if precision == "FP32" else precision  # whose norms are not compared closely
        line, is_good = row(name, kind, ranks, one, bound)
        assert is_good, line
        if precision == "FP32":
            assert max(gradient_errors(ranks, one).values()) <= 1e-5
            assert max(distance(rank.norms, one.norms) for rank in ranks) <= 3e-4
        assert one.losses[-1] < one.losses[0], "there was something to learn"
