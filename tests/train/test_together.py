"""Options that work alone also work together.

They are FP8 recipes, architectures, recomputation, documents, FP16, FP32 weights and tensor
parallelism.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, LossScaleSpec, ParallelSpec, RunSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.documents import borders_of
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.parallel.rank_work import run_case
from tests.tiny import SEQ, gpt_spec, microbatch, optim_spec, run_spec

RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
ALL_RECIPES = (*RECIPES, "mxfp8", "nvfp4")
LLAMA = {
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "num_query_groups": 2,
}
WIDE = {"hidden_size": 128, "ffn_hidden_size": 128}  # one block of `blockwise`
WIDE_HALVES = {"hidden_size": 256, "ffn_hidden_size": 256, "kv_channels": 128}  # whole blocks each
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RECOMPUTE = {
    "full": RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    "block": RecomputeSpec(granularity="full", method="block", num_layers=1),
    "selective": RecomputeSpec(granularity="selective", method="uniform", num_layers=1),
}
FP8 = Fp8Recipe(amax_history_len=4)


def with_documents(seed: int) -> dict[str, np.ndarray]:
    """Return a microbatch with a document end after every five tokens, as the settings give it."""
    places = np.tile(np.arange(SEQ), (2, 1))
    return {"position_ids_BS": places % 5, "cu_seqlens_N1": borders_of(places // 5)}


def trained(spec: RunSpec, *, documents: bool = False, steps: int = 3) -> TrainState:
    """Return the state after a few steps."""
    state = build(spec, single_rank())
    for step in range(steps):
        batches = [microbatch(2 * step + index) for index in range(2)]
        if documents:
            batches = [dataclasses.replace(b, **with_documents(step)) for b in batches]
        train_step(state, batches)
        state.step += 1
    return state


def assert_same(one: TrainState, other: TrainState) -> None:
    for mine, theirs in zip(one.masters.masters, other.masters.masters, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("name", ALL_RECIPES)
def test_recomputation_changes_no_weight(name: str, shape: dict, documents: bool) -> None:
    """A second forward pass changes no history and no scale, and draws the same dropout masks."""
    sizes = WIDE if name == "blockwise" else {}
    recipe = Fp8Recipe(amax_history_len=4, name=name)
    model = gpt_spec(**shape, **DROPOUT, **sizes)
    plain = trained(run_spec(compute="bf16", fp8=recipe, model=model), documents=documents)
    start = build(run_spec(compute="bf16", fp8=recipe, model=model), single_rank())
    assert any(
        not torch.equal(a, b)
        for a, b in zip(plain.masters.masters, start.masters.masters, strict=True)
    ), "it trained"
    for recompute in RECOMPUTE.values():
        again = dataclasses.replace(model, recompute=recompute)
        spec = run_spec(compute="bf16", fp8=recipe, model=again)
        assert_same(trained(spec, documents=documents), plain)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_weights_in_fp8_beside_fp32_ones_are_the_same_as_cast_each_time(name: str) -> None:
    """Both kinds of weights are cast from the FP32 numbers if O2 is off."""
    sizes = WIDE if name == "blockwise" else {}
    states = []
    for in_fp8 in (False, True):
        recipe = Fp8Recipe(amax_history_len=4, name=name, params_in_fp8=in_fp8)
        spec = run_spec(compute="bf16", fp8=recipe, model=gpt_spec(**LLAMA, **sizes))
        precision = dataclasses.replace(spec.precision, half_weights=False)
        states.append(trained(dataclasses.replace(spec, precision=precision)))
    assert_same(*states)


@pytest.mark.parametrize("in_fp8", [False, True], ids=["", "fp8_params"])
@pytest.mark.parametrize("name", RECIPES)
def test_fp16_learns_in_every_recipe(name: str, in_fp8: bool) -> None:
    """Scaled gradients overflow at first; when the scale fits, the model learns, also in FP8."""
    if in_fp8 and name.startswith("rowwise"):
        pytest.skip("refused by the configuration")
    sizes = WIDE if name == "blockwise" else {}
    recipe = Fp8Recipe(amax_history_len=4, name=name, params_in_fp8=in_fp8)
    spec = run_spec(compute="fp16", fp8=recipe, model=gpt_spec(**LLAMA, **sizes))
    scale = LossScaleSpec(init_scale=2.0**24, hysteresis=1)
    spec = dataclasses.replace(
        spec, precision=dataclasses.replace(spec.precision, loss_scale=scale)
    )
    state = build(spec, single_rank())
    losses, skipped = [], 0
    for _ in range(30):
        result = train_step(state, [microbatch(0)])
        skipped += result.scale_falls
        state.step += not result.scale_falls
        losses.append(result.loss)
    assert 0 < skipped < 15
    assert losses[-1] < losses[0] - 0.3


RANK_CASES = {
    f"{name} {how}": Case(
        "bf16",
        Fp8Recipe(amax_history_len=4, name=name),
        gpt_spec(
            **LLAMA,
            recompute=RECOMPUTE[how],
            **(WIDE_HALVES if name == "blockwise" else {}),
        ),
        steps=3,
        # The wider model diverges at 3e-3, where the last bit of a weight moves the second loss by
        # 0.2 % and the third norm by 5 %. At 1e-3 such a bit moves them by 0.06 % and 0.7 %.
        optim=optim_spec(lr=1e-3 if name == "blockwise" else 3e-3),
    )
    for name, how in zip(RECIPES, ["full", "selective", "block", "full", "full"], strict=True)
} | {"fp16": Case("fp16", None, gpt_spec(**LLAMA), steps=3)}


def test_two_tensor_parallel_ranks_recompute_in_every_recipe() -> None:
    tp = ParallelSpec(tp=2)
    cases = {name: dataclasses.replace(c, parallel=tp) for name, c in RANK_CASES.items()}
    results = on_ranks(run_case, cases, 2)
    for name, case in RANK_CASES.items():
        plain = dataclasses.replace(case, model=dataclasses.replace(case.model, recompute=None))
        alone = run_case(plain, single_rank())
        for rank in results[name]:
            # The first weights are equal. Roundings to BF16 and FP8 differ, and later weights.
            assert rank.losses == pytest.approx(alone.losses, rel=5e-3), name
            assert rank.norms[0] == pytest.approx(alone.norms[0], rel=1e-2), name
            assert rank.norms == pytest.approx(alone.norms, rel=5e-2), name
