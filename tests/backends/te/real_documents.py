"""Documents that do not see each other, by Transformer Engine's `thd` and `padding_causal`.

Its attention is compared with the formula in FP64 of `tests/models/test_documents.py`, whose bounds
follow from the format. Whole models are compared with our layers, with a mask of all scores too.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.data.loader import Microbatch
from megafp8.errors import ConfigError
from megafp8.models.documents import document_ids
from megafp8.models.positions import alibi_slopes
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.te_versions import DOCUMENTS_ON_CPU, is_before
from megafp8.train.build import build, settle_backend
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward
from tests.backends.te.rank_work import LLAMA
from tests.backends.te.real import DELAYED, VERSION, spec_of, te
from tests.backends.te.real import forget_other_models as forget_other_models
from tests.backends.te.real_nemo import assert_near, logical
from tests.backends.te.same_codes import IN_FP32, with_same_codes
from tests.kit.cases import with_documents
from tests.models.test_documents import (
    LENGTHS,
    SIZE,
    Results,
    assert_within,
    borders_of,
    by_head,
    formula,
    inputs,
)
from tests.tiny import SEQ, microbatch

IS_TOO_OLD = is_before(VERSION, DOCUMENTS_ON_CPU)
needs_documents = pytest.mark.skipif(
    IS_TOO_OLD, reason="this version's attention on a CPU does not keep documents apart"
)


def check(
    lengths: list[list[int]], *, groups: int = 4, alibi: bool = False, moved: int | None = None
) -> None:
    """Compare `DotProductAttention` in FP32; the border `moved` is told one token too late."""
    right, batch, seq = borders_of(lengths), len(lengths), sum(lengths[0])
    qkv, grad = inputs(batch, seq, groups, torch.float32)
    told = right.clone()
    if moved is not None:
        told[moved] += 1
    attention = te.DotProductAttention(
        4, SIZE, num_gqa_groups=groups, qkv_format="thd", attn_mask_type="padding_causal"
    )
    longest = int(told.diff().max())
    given: dict[str, Any] = {"cu_seqlens_q": told, "cu_seqlens_kv": told}
    given |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    slopes = torch.tensor(alibi_slopes(4)) if alibi else None
    if slopes is not None:
        given |= {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in qkv)
    out_BSF = attention(q, k, v, **given).view(batch, seq, 4 * SIZE)
    out_BSF.backward(grad)
    found = Results(by_head(out_BSF), *(x.grad for x in qkv))  # type: ignore[arg-type]
    exact = formula(qkv, grad, document_ids(right, seq), slopes=slopes)
    assert_within(found, exact, torch.float32)


@needs_documents
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
def test_attention_within_documents(name: str, alibi: bool) -> None:
    check(LENGTHS[name], alibi=alibi, groups=2)


@needs_documents
@pytest.mark.parametrize("place", range(1, 5))
def test_a_border_that_is_off_by_one_is_found(place: int) -> None:
    with pytest.raises(AssertionError, match="times its bound"):
        check([[70, 90, 20, 30, 46]], moved=place)


def packed_spec(backend: str, fp8: Fp8Recipe | None = None, **changes: Any) -> RunSpec:
    spec = spec_of(backend, fp8, **({"init_method_std": 0.1} | changes))
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, reset_attention_mask=True))


def with_positions(batch: Microbatch, restart: bool) -> Microbatch:
    packed = with_documents(batch)
    return packed if restart else dataclasses.replace(packed, position_ids_BS=None)


def by_mask(state: TrainState) -> None:
    """Give the model the number of each token's document from now on: a mask of all scores."""
    forward = state.model.forward

    def masked(tokens_BS: Any, targets_BS: Any, *, cu_seqlens_N1: Any, **more: Any) -> Any:
        ids_BS = document_ids(cu_seqlens_N1, tokens_BS.shape[1])
        return forward(tokens_BS, targets_BS, document_ids_BS=ids_BS, **more)

    state.model.forward = masked  # type: ignore[method-assign,assignment]


def loss_and_grads(state: TrainState, batch: Microbatch) -> tuple[float, dict[str, torch.Tensor]]:
    loss = forward_backward(state, [batch])[0].item()
    state.masters.collect_grads()
    return loss, logical(state)


RECIPES = {
    "delayed": DELAYED,
    "tensorwise": Fp8Recipe(name="tensorwise"),
    "blockwise": Fp8Recipe(name="blockwise", backward_format="e4m3", power_2_scale=True,
                           fast_accumulation=frozenset()),
    "mxfp8": Fp8Recipe(name="mxfp8", backward_format="e4m3", power_2_scale=True),
}  # fmt: skip
BLOCKS = {"blockwise": 8, "mxfp8": 2}
"""The samples of a microbatch in recipes with blocks of tokens, which are whole."""
MODELS: dict[str, dict[str, Any]] = {
    "learned": {},
    "Llama": LLAMA,
    "positions divided": LLAMA | {"seq_len_interpolation_factor": 2.0},
    "ALiBi": {"position_embedding_type": "alibi"},
    "windows": LLAMA | {"window_size": (3, 0), "window_attn_skip_freq": 2},
    "all again": LLAMA
    | {"recompute": RecomputeSpec(granularity="full", method="uniform", num_layers=1)},
    "attention again": LLAMA
    | {"recompute": RecomputeSpec(granularity="selective", method="uniform", num_layers=1)},
}


@needs_documents
@pytest.mark.parametrize("restart", [True, False], ids=["positions again", "positions go on"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_ours_does(name: str, restart: bool) -> None:
    """FP32, of the same weights: the loss within 1e-6 of our own layers', in blocks and with a mask
    of all scores, and every gradient within 1e-5 of its largest number. FLOPs are counted alike."""
    batch = with_positions(microbatch(0), restart)
    state = build(packed_spec("te", **MODELS[name]), single_rank())
    loss, grads = loss_and_grads(state, batch)
    for masked in (False, True):
        ours = build(packed_spec("native", **MODELS[name]), single_rank())
        if masked:
            by_mask(ours)
        wanted, their_grads = loss_and_grads(ours, batch)
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert_near(grads, their_grads, 1e-5)
        if not masked:
            assert state.counter.flops == ours.counter.flops
    ours = build(packed_spec("native", **MODELS[name]), single_rank())
    whole, _ = loss_and_grads(ours, dataclasses.replace(batch, cu_seqlens_N1=None))
    assert abs(whole - wanted) > 1e-3 * wanted  # documents that see each other


@needs_documents
def test_samples_without_borders_are_whole_documents() -> None:
    """Validation data may have none. So is each sample that is one document."""
    batch = microbatch(0)
    borders = np.arange(0, batch.tokens_BS.size + 1, SEQ, dtype=np.int32)
    found = [
        loss_and_grads(build(packed_spec("te", **LLAMA), single_rank()), given)[0]
        for given in (batch, dataclasses.replace(batch, cu_seqlens_N1=borders))
    ]
    spec = spec_of("te", None, init_method_std=0.1, **LLAMA)
    plain, _ = loss_and_grads(build(spec, single_rank()), batch)
    assert found[0] == found[1] == pytest.approx(plain, rel=1e-6)


@needs_documents
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_recipes_in_fp8(recipe: str) -> None:
    """The first loss in FP32 with products in FP8: within documents nothing else is quantized than
    without, so that it is our engine's: with the same codes within FP32's roundings, and with codes
    of its own in recipes of blocks. Tensors' scales cover tokens of several documents in both."""
    chosen = RECIPES[recipe]
    wide = {"hidden_size": 128, "ffn_hidden_size": 128} if recipe in BLOCKS else {}
    batch = with_documents(microbatch(0, batch=BLOCKS.get(recipe, 2)))
    works = [
        partial(
            loss_and_grads, build(packed_spec(each, chosen, **(LLAMA | wide)), single_rank()), batch
        )
        for each in ("te", "native")
    ]
    if recipe in BLOCKS:
        (theirs, _), (ours, _) = (work() for work in works)
    else:
        (theirs, _), (ours, _) = with_same_codes(*works, IN_FP32)
    assert theirs == pytest.approx(ours, rel=5e-4 if recipe in BLOCKS else IN_FP32.losses)


def test_a_version_that_cannot_is_refused() -> None:
    """And no other: with the version that the table names, a forward pass finds attention for
    documents; before it, Transformer Engine's own code leaves none."""
    spec = packed_spec("te", **LLAMA)
    precision = dataclasses.replace(spec.precision, te_version=VERSION)
    refused = pytest.raises(ConfigError, match=f"apart from {DOCUMENTS_ON_CPU} on")
    with refused if IS_TOO_OLD else nullcontext():
        settle_backend(dataclasses.replace(spec, precision=precision), single_rank())
    state = build(spec, single_rank())
    fails = pytest.raises(Exception, match="No dot product attention")
    with fails if IS_TOO_OLD else nullcontext():
        forward_backward(state, [with_documents(microbatch(0))])
