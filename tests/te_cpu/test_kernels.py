"""The kernels that stand in for Transformer Engine's, each against plain torch in FP64.

They need none of Transformer Engine's files. Bounds: FP32 arithmetic inside, so a few times 2**-24
of the largest number of a result.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8_numerics.swizzle import swizzled
from te_cpu import (
    activations,
    attention,
    cuda,
    dropout,
    gemm,
    grouped,
    loading,
    masters,
    multi_tensor,
    mx,
    norms,
    nv,
    quantize,
    rope,
    tensors,
    torch_private,
    updates,
)
from te_cpu.enums import FORMATS, DType, QkvFormat
from te_cpu.errors import MissingKernelError, ProductError, SizeError
from te_cpu.extension import kernels, make_extension
from te_cpu.missing import FromAbsentPackage, ImportPhase, Missing, MissingTriton
from te_cpu.wheel import Sources
from tests.spec import formats, mxfp8
from tests.spec.data import data
from tests.spec.formats import same_codes

FP32 = DType.kFloat32
E4M3 = DType.kFloat8E4M3


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: torch.Tensor, exact: torch.Tensor, *, ulps: float = 16) -> None:
    bound = ulps * 2**-24 * exact.abs().max().item()
    assert (found.double() - exact.double()).abs().max().item() <= bound


def gradients(function: Callable[..., torch.Tensor], grad: torch.Tensor, *inputs: torch.Tensor):
    exact = [x.double().requires_grad_() for x in inputs]
    out = function(*exact)
    return out.detach(), torch.autograd.grad(out, exact, grad.double())


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(kind: str, zero_centered: bool) -> None:
    x, weight, bias = normal(3, 5, 24), normal(24, seed=1), normal(24, seed=2)
    grad, plus = normal(3, 5, 24, seed=3), 1.0 if zero_centered else 0.0
    common = (0, zero_centered)
    if kind == "layernorm":
        out, mean, inverse = norms.layernorm_fwd(x, weight, bias, 1e-5, None, None, FP32, *common)
        found = norms.layernorm_bwd(grad, x, mean, inverse, weight, *common)

        def exact_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (24,), w + plus, b, 1e-5)

        exact, grads = gradients(exact_norm, grad, x, weight, bias)
    else:
        out, mean, inverse = norms.rmsnorm_fwd(x, weight, 1e-5, None, None, FP32, *common)
        assert mean is None
        found = norms.rmsnorm_bwd(grad, x, inverse, weight, *common)
        exact, grads = gradients(lambda x, w: F.rms_norm(x, (24,), w + plus, 1e-5), grad, x, weight)
    assert inverse.shape == (15,)
    assert_near(out, exact)
    for one, other in zip(found, grads, strict=True):
        assert_near(one, other, ulps=64)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_gradient_of_rmsnorm_with_an_addend_is_rounded_once(zero_centered: bool) -> None:
    """In BF16 a second rounding would show; the weight's gradient does not see the addend."""
    x, weight, grad = (normal(6, 24, seed=seed).bfloat16() for seed in range(3))
    gain, add = weight[0], normal(6, 24, seed=3).bfloat16()
    _, _, inverse = norms.rmsnorm_fwd(x, gain, 1e-5, None, None, DType.kBFloat16, 0, zero_centered)
    alone = norms.rmsnorm_bwd(grad.float(), x.float(), inverse, gain.float(), 0, zero_centered)
    dx, of_gain = norms.rmsnorm_bwd_add(grad, x, add, inverse, gain, 0, zero_centered)
    assert torch.equal(dx, (alone[0] + add.float()).bfloat16())
    assert torch.equal(of_gain, alone[1].bfloat16())


@pytest.mark.parametrize("probability", [0.0, 0.25, 0.3])
def test_dropout_has_one_bit_for_each_element(probability: float) -> None:
    """Of 256 values of a byte those below the probability drop; both passes use the same bits."""
    torch.manual_seed(0)
    x, grad = normal(64, 128).half(), normal(64, 128, seed=1).half()
    out, mask = dropout.dropout_fwd(x, probability)
    assert mask.dtype == torch.uint8 and mask.numel() * 8 == x.numel()
    bits = np.unpackbits(mask.numpy(), bitorder="little").astype(bool)
    kept = torch.from_numpy(bits).view(x.shape)
    scale = 1 / (1 - probability)
    assert torch.equal(out, torch.where(kept, x.float() * scale, 0.0).half())
    found = dropout.dropout_bwd(grad, mask, probability, torch.empty_like(grad))
    assert torch.equal(found, torch.where(kept, grad.float() * scale, 0.0).half())
    expected = 1 - math.floor(probability * 256) / 256
    assert abs(kept.double().mean() - expected) < 5 * (0.25 / x.numel()) ** 0.5
    torch.manual_seed(0)
    assert torch.equal(dropout.dropout_fwd(x, probability)[1], mask)


EXACT = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x) ** 2,
    "silu": F.silu,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
SIGMOID = {"glu": torch.sigmoid}  # it is there in its gated form alone


@pytest.mark.parametrize("name", [*EXACT, *GATED, *SIGMOID])
def test_activations(name: str) -> None:
    by_name = {kernel.__name__: kernel for kernel in activations.KERNELS}
    x = normal(4, 6, 16) * 3
    grad = normal(4, 6, 16 if name in EXACT else 8, seed=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        if name in EXACT:
            return EXACT[name](x)
        gate, up = x.chunk(2, -1)
        return (SIGMOID[name] if name in SIGMOID else EXACT[GATED[name]])(gate) * up

    exact, (exact_grad,) = gradients(function, grad, x)
    assert_near(by_name[name](x, None), exact)
    assert_near(by_name[f"d{name}"](grad, x, None), exact_grad)
    if name in EXACT:
        bias, found = by_name[f"dbias_d{name}"](grad, x, None)
        assert_near(found, exact_grad)
        assert_near(bias, exact_grad.sum((0, 1)), ulps=64)


def test_the_clamped_swiglu_by_hand() -> None:
    """A gate above the limit has no gradient, and so has a linear part beyond it on either side."""
    gate, up = [0.5, 2.0, -9.0, 0.5, 0.5], [0.25, 0.25, 0.25, 3.0, -3.0]
    x, grad = torch.tensor([gate + up]), torch.ones(1, 5)
    limit, alpha, offset = 1.0, 1.5, 0.5
    bounded = [min(g, limit) for g in gate]
    sigmoid = [1 / (1 + math.exp(-alpha * g)) for g in bounded]
    linear = [min(max(u, -limit), limit) + offset for u in up]
    found = activations.clamped_swiglu(x, None, limit, alpha, offset)
    wanted = [g * s * u for g, s, u in zip(bounded, sigmoid, linear, strict=True)]
    assert_near(found, torch.tensor([wanted], dtype=torch.float64))
    slope = [s + alpha * g * s * (1 - s) for g, s in zip(bounded, sigmoid, strict=True)]
    of_gate = [d * u * (g <= limit) for d, u, g in zip(slope, linear, gate, strict=True)]
    of_up = [g * s * (abs(u) <= limit) for g, s, u in zip(bounded, sigmoid, up, strict=True)]
    found = activations.clamped_dswiglu(grad, x, None, limit, alpha, offset)
    assert_near(found, torch.tensor([of_gate + of_up], dtype=torch.float64))


@pytest.mark.parametrize("kind", ["", "masked_", "upper_triang_masked_", "aligned_causal_masked_"])
def test_softmaxes(kind: str) -> None:
    by_name = kernels((2, 13))
    scores, grad, scale = normal(2, 3, 8, 8), normal(2, 3, 8, 8, seed=1), 0.3
    masked = torch.ones(8, 8, dtype=torch.bool).triu(1) if kind else torch.zeros(8, 8).bool()
    exact, (exact_grad,) = gradients(
        lambda x: torch.softmax((x * scale).masked_fill(masked, -torch.inf), -1), grad, scores
    )
    more = (masked.expand(2, 1, 8, 8),) if kind == "masked_" else ()
    found = by_name[f"scaled_{kind}softmax_forward"](scores, *more, scale)
    assert_near(found, exact)
    assert_near(by_name[f"scaled_{kind}softmax_backward"](grad, found, scale), exact_grad)


def test_a_query_that_sees_nothing_has_no_shares() -> None:
    """A mask of 1 throughout a row, and more queries than keys; other masks than 1 mask nothing."""
    scores, grad = normal(2, 3, 4, 8), normal(2, 3, 4, 8, seed=1)
    mask = torch.zeros(2, 1, 4, 8, dtype=torch.uint8)
    mask[0, :, 1], mask[1, :, :, ::2], mask[1, :, 3] = 1, 1, 2
    hidden = (mask == 1).expand_as(scores)
    found = attention.scaled_masked_softmax_forward(scores, mask, 0.3)
    exact = torch.softmax((scores.double() * 0.3).masked_fill(hidden, -torch.inf), -1).nan_to_num()
    assert_near(found, exact)
    assert not found[0, :, 1].any() and (found[1, :, 3] > 0).all()
    assert not attention.scaled_softmax_backward(grad, found, 0.3)[0, :, 1].any()
    tall = normal(2, 3, 8, 5)
    hidden = torch.ones(8, 5, dtype=torch.bool).triu(1 - 3)
    exact = torch.softmax((tall.double() * 0.3).masked_fill(hidden, -torch.inf), -1).nan_to_num()
    found = attention.scaled_aligned_causal_masked_softmax_forward(tall, 0.3)
    assert_near(found, exact)
    assert not found[..., :3, :].any() and torch.equal(found[..., 3, 0], torch.ones(2, 3))


def test_masked_scores_count_in_the_sum_of_scores_that_are_as_low() -> None:
    """An aligned causal row of 6 is filled up to 8 numbers of -10000."""
    scores = torch.full((1, 1, 6, 6), -10000.0)
    found = attention.scaled_aligned_causal_masked_softmax_forward(scores, 1.0)
    assert torch.equal(found[0, 0], torch.full((6, 6), 1 / 8).tril())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_score_that_is_not_finite_spoils_its_row_alone(bad: float) -> None:
    scores = normal(1, 1, 8, 8)
    scores[0, 0, 5, 2] = bad
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    for found in (
        attention.scaled_softmax_forward(scores, 0.5),
        attention.scaled_masked_softmax_forward(scores, mask, 0.5),
        attention.scaled_upper_triang_masked_softmax_forward(scores[0], 0.5)[None],
        attention.scaled_aligned_causal_masked_softmax_forward(scores, 0.5),
    ):
        assert found[0, 0, 5, :6].isnan().all() and not found[0, 0, [0, 7]].isnan().any()


@pytest.mark.parametrize("layout", ["NVTE_SBHD", "NVTE_BSHD"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 4])
def test_rotary_positions(layout: str, interleaved: bool, width: int) -> None:
    """A number and its partner are a complex number that is turned; the rest of a head stays."""
    seq, batch, heads, size = 6, 2, 3, 8
    x, grad = normal(seq, batch, heads, size), normal(seq, batch, heads, size, seed=1)
    angles = torch.arange(seq)[:, None] / 10.0 ** torch.arange(width // 2)

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, rest = x[..., :width], x[..., width:]
        pairs = first.unflatten(-1, (-1, 2) if interleaved else (2, -1))
        real, imaginary = pairs.unbind(-1 if interleaved else -2)
        turned = (
            torch.complex(real, imaginary)
            * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None, None]
        )
        pairs = torch.stack((turned.real, turned.imag), -1 if interleaved else -2)
        return torch.cat([pairs.flatten(-2), rest], -1)

    exact, (exact_grad,) = gradients(turn, grad, x)
    both = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    arguments = (both[:, None, None], None, QkvFormat[layout], interleaved, None, 1, 0)
    dims = (0, 1) if layout == "NVTE_SBHD" else (1, 0)
    found = rope.fused_rope_forward(x.movedim((0, 1), dims), *arguments)
    assert_near(found.movedim(dims, (0, 1)), exact)
    found = rope.fused_rope_backward(grad.movedim((0, 1), dims), *arguments)
    assert_near(found.movedim(dims, (0, 1)), exact_grad)


LENGTHS = (3, 1, 5, 1, 2)  # of documents


def test_rotary_positions_of_documents() -> None:
    """Each document is turned as a sample of its own is, from position 0 on; so is its gradient."""
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    x, grad = normal(12, 2, 8), normal(12, 2, 8, seed=1)
    freqs = normal(6, 1, 1, 4, seed=2)
    thd = (freqs, None, QkvFormat["NVTE_THD"], False, borders, 1, 0)
    bshd = (freqs, None, QkvFormat["NVTE_BSHD"], False, None, 1, 0)
    for turn, given in ((rope.fused_rope_forward, x), (rope.fused_rope_backward, grad)):
        alone = [turn(part[None], *bshd)[0] for part in given.split(LENGTHS)]
        assert torch.equal(turn(given, *thd), torch.cat(alone))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("layout", ["NVTE_SBHD", "NVTE_BSHD", "NVTE_THD"])
def test_each_rank_turns_its_two_pieces_as_the_whole_does(layout: str, ranks: int) -> None:
    """Rank r of R has the pieces r and 2 R - 1 - r of each sample, or of each document."""
    form, lengths = QkvFormat[layout], (2 * ranks, 6 * ranks)
    is_thd = layout == "NVTE_THD"
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) if is_thd else None
    dim = 1 if layout == "NVTE_BSHD" else 0
    x = normal(sum(lengths), 2, 8) if is_thd else normal(8 * ranks, 8 * ranks, 2, 8)
    freqs, samples = normal(8 * ranks, 1, 1, 4, seed=2), lengths if is_thd else (8 * ranks,)
    for turn in (rope.fused_rope_forward, rope.fused_rope_backward):
        whole = turn(x, freqs, None, form, False, borders, 1, 0)
        for rank in range(ranks):

            def of_rank(given: torch.Tensor, rank: int = rank) -> torch.Tensor:
                pieces = [sample.chunk(2 * ranks, dim) for sample in given.split(samples, dim)]
                kept = [piece for p in pieces for piece in (p[rank], p[2 * ranks - 1 - rank])]
                return torch.cat(kept, dim)

            found = turn(of_rank(x), freqs, None, form, False, borders, ranks, rank)
            assert torch.equal(found, of_rank(whole))


def test_samples_that_continue_begin_at_their_own_positions() -> None:
    """As in inference; from 2.10 on the backward pass knows them too."""
    x, freqs, begin = normal(3, 2, 2, 8), normal(9, 1, 1, 8), torch.tensor([0, 6])
    more = (QkvFormat["NVTE_SBHD"], True, None, 1, 0)
    for turn in (rope.fused_rope_forward, rope.fused_rope_backward):
        found = turn(x, freqs, begin, *more)
        for sample, first in enumerate(begin.tolist()):
            alone = turn(x[:, sample : sample + 1], freqs[first:], None, *more)
            assert torch.equal(found[:, sample : sample + 1], alone)
        with pytest.raises(SizeError, match="freqs has 8 positions, .* up to 8"):
            turn(x, freqs[:8], begin, *more)
    old = rope.fused_rope_backward_to_2_9(x, freqs, *more)
    assert torch.equal(old, rope.fused_rope_backward(x, freqs, None, *more))
    with pytest.raises(SizeError, match="cp_size=2 needs samples of an even length"):
        rope.fused_rope_forward(x, freqs, None, QkvFormat["NVTE_SBHD"], False, None, 2, 0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["NVTE_SBHD", "NVTE_BSHD"])
def test_queries_keys_and_values_of_one_tensor(layout: str, ranks: int) -> None:
    """Groups of two queries, a key and a value are turned as apart; the gradient goes back."""
    qkv, form = normal(4, 6, 3, 32), QkvFormat[layout]
    q_freqs, k_freqs = (normal(12, 1, 1, 2, seed=s).repeat(1, 1, 1, 2) for s in (0, 1))
    more = (form, False, ranks, ranks - 1)
    query, key, value = rope.fused_qkv_rope_forward(qkv, q_freqs, k_freqs, None, [16, 8, 8], *more)
    apart = (form, False, None, *more[2:])
    given = qkv[..., :16].reshape(4, 6, 6, 8)
    assert torch.equal(query, rope.fused_rope_forward(given, q_freqs, None, *apart))
    assert torch.equal(key, rope.fused_rope_forward(qkv[..., 16:24], k_freqs, None, *apart))
    assert torch.equal(value, qkv[..., 24:])
    parts = (query, key, value)
    back = rope.fused_qkv_rope_backward(*parts, q_freqs, k_freqs, [16, 8, 8], *more)
    assert_near(back, qkv)  # the transpose of a turn is its inverse


def test_documents_in_rows_and_back() -> None:
    """A row holds a document and then zeros; the number of tokens may be a tensor."""
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    x = normal(12, 2, 8)
    rows = attention.convert_thd_to_bshd(x, borders, 5, 6)
    expected = torch.zeros(5, 6, 2, 8)
    for row, part in zip(expected, x.split(LENGTHS), strict=True):
        row[: len(part)] = part
    assert torch.equal(rows, expected)
    rows[rows == 0] = torch.nan  # what is behind a document is not read
    for num_tokens in (12, borders[-1]):
        assert torch.equal(attention.convert_bshd_to_thd(rows, borders, num_tokens), x)
    meta = attention.convert_thd_to_bshd(x.to("meta"), borders, 5, 6)
    assert meta.is_meta and meta.shape == rows.shape


@pytest.mark.parametrize("layout", ["NVTE_SBHD", "NVTE_BSHD", "NVTE_THD"])
@pytest.mark.parametrize("pages", [1, 2])
def test_new_keys_and_values_go_behind_the_cached_ones(layout: str, pages: int) -> None:
    """Two samples with 3 and 0 tokens get 2 and 1 more; pages of 4 tokens lie in any order."""
    counts, totals = [2, 1], [5, 1]
    cu_new, cu_cached = (torch.tensor([0, *c]).cumsum(0).int() for c in (counts, totals))
    table = torch.tensor([[1], [2]] if pages == 1 else [[3, 0], [2, 1]])
    size, new_k, new_v = 8 // pages, normal(2, 2, 3, 4), normal(2, 2, 3, 2, seed=1)
    caches = [normal(4, size, 3, width, seed=2) for width in (4, 2)]
    wanted = [cache.clone() for cache in caches]
    for cache, new in zip(wanted, (new_k, new_v), strict=True):
        for sample, (count, total) in enumerate(zip(counts, totals, strict=True)):
            for token in range(count):
                place = total - count + token
                cache[table[sample, place // size], place % size] = new[sample, token]

    def as_given(new: torch.Tensor) -> torch.Tensor:
        if layout == "NVTE_THD":
            return torch.cat([new[0], new[1, :1]])
        return new if layout == "NVTE_BSHD" else new.transpose(0, 1).contiguous()

    attention.copy_to_kv_cache(
        as_given(new_k), as_given(new_v), *caches, table.int(), cu_new, cu_cached,
        QkvFormat[layout], 2, 2, 8, pages, False,
    )  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(caches, wanted, strict=True))


def test_samples_that_stay_are_brought_together_in_the_cache() -> None:
    """Of three samples the first one has ended: those in rows 1 and 2 move to 0 and 1."""
    cache, new = normal(3, 4, 1, 2), normal(2, 1, 1, 2, seed=1)
    borders = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 3, 5]).int()
    wanted = cache.clone()
    wanted[0, :2], wanted[1, :1] = cache[1, :2], cache[2, :1]
    wanted[0, 2], wanted[1, 1] = new[0, 0], new[1, 0]
    rows = torch.tensor([1, 2, 0]).int()
    for given in (rows, rows[:, None]):
        keys, values = cache.clone(), cache.clone()
        attention.copy_to_kv_cache(
            new, new, keys, values, given, *borders, QkvFormat["NVTE_BSHD"], 2, 1, 4, 1, True
        )
        assert torch.equal(keys, wanted) and torch.equal(values, wanted)


@pytest.mark.parametrize("borders", [[0, 4, 11], [1, 4, 12], [0, 5, 12], [0, 13, 12]])
def test_borders_that_are_not_those_of_the_tokens_are_refused(borders: list[int]) -> None:
    """The compiled kernels would read or write other memory."""
    told, freqs = torch.tensor(borders, dtype=torch.int32), torch.zeros(6, 1, 1, 4)
    x = torch.zeros(12, 2, 8)
    for call in (
        lambda: attention.convert_thd_to_bshd(x, told, 2, 6),
        lambda: attention.convert_bshd_to_thd(x.view(2, 6, 2, 8), told, 12),
        lambda: rope.fused_rope_forward(x, freqs, None, QkvFormat["NVTE_THD"], False, told, 1, 0),
    ):
        with pytest.raises(SizeError, match="does not divide 12 tokens into documents of up to 6"):
            call()
    with pytest.raises(SizeError, match="cu_seqlens is missing"):
        rope.fused_rope_forward(x, freqs, None, QkvFormat["NVTE_THD"], False, None, 1, 0)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("has_masters", [False, True])
def test_adam(decoupled: bool, has_masters: bool) -> None:
    """Five steps beside torch's Adam and AdamW."""
    start = normal(7, 3)
    exact = torch.nn.Parameter(start.double())
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = cls([exact], lr=0.1, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    dtype = torch.bfloat16 if has_masters else torch.float32
    param, master = start.to(dtype), start.clone()
    moments = torch.zeros_like(start), torch.zeros_like(start)
    for number in range(1, 6):
        grad = normal(7, 3, seed=number)
        exact.grad = grad.double()
        reference.step()
        lists = [[grad], [param], [moments[0]], [moments[1]], *([[master]] if has_masters else [])]
        multi_tensor.multi_tensor_adam(
            65536, torch.zeros(1), lists, 0.1, 0.9, 0.98, 1e-6, number, int(decoupled), 1, 0.1
        )
    assert_near(master if has_masters else param, exact.detach(), ulps=256)
    if has_masters:
        assert torch.equal(param, master.bfloat16())


def test_adam_without_the_correction_of_its_bias() -> None:
    """The first moment is then g / 4 and the second g^2 / 4, so that half the rate is taken."""
    grad, param = normal(7, 3), torch.zeros(7, 3)
    lists = [[grad], [param], [torch.zeros(7, 3)], [torch.zeros(7, 3)]]
    for is_corrected, moved in ((0, 0.05), (1, 0.1)):
        lists[1:] = [[torch.zeros(7, 3)] for _ in range(3)]
        multi_tensor.multi_tensor_adam(
            0, torch.zeros(1), lists, 0.1, 0.75, 0.75, 1e-12, 1, 1, is_corrected, 0.0
        )
        assert_near(lists[1][0], -moved * grad.sign())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("single_output", [False, True])
def test_an_expert_without_rows_has_gradients_of_0(accumulate: bool, single_output: bool) -> None:
    """They are added to what is there where that is asked for; its bias has none to add to."""
    inputs, grads = [normal(rows, 3) for rows in (4, 0)], [normal(rows, 2) for rows in (4, 0)]
    whole, biases = torch.ones(4, 3), [torch.ones(2), torch.ones(2)]
    grouped.te_general_grouped_gemm(
        inputs, False, grads, True, [whole] if single_output else [*whole.split(2)], FP32, [4, 0],
        biases, FP32, single_output, [torch.empty(0)] * 2, True, None, 0, accumulate, True, 0,
    )  # fmt: skip
    assert_near(whole[:2], grads[0].double().t() @ inputs[0].double() + float(accumulate))
    assert torch.equal(whole[2:], torch.full((2, 3), float(accumulate)))
    assert_near(biases[0], grads[0].double().sum(0))
    assert not biases[1].any()


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("version", [(2, 15), (2, 16)])
def test_products_of_grouped_tensors(version: tuple[int, ...], layout: str) -> None:
    """By factors of each expert, on top of what is there; an expert without rows has none."""
    rows, in_size, out_size = (4, 0, 3), 5, 2
    by_rows = [normal(n, in_size if layout == "TN" else out_size, seed=n) for n in rows]
    if layout == "NT":
        other = [normal(n, in_size, seed=9 + n) for n in rows]
        exact = [y.double().t() @ x.double() for x, y in zip(other, by_rows, strict=True)]
    else:
        other = [normal(out_size, in_size, seed=9 + n) for n in rows]
        exact = [
            x.double() @ (w.double().t() if layout == "TN" else w.double())
            for x, w in zip(by_rows, other, strict=True)
        ]
    out = [torch.full(each.shape, 2.0) for each in exact]
    side = "out" if layout == "NT" else "in"
    product = kernels(version)[f"te_general_grouped_gemm_for_discrete_{side}"]
    alpha, beta = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([3.0])
    has_bias = layout == "TN"
    bias = [normal(1, out_size, seed=20 + n) for n in range(3)] if has_bias else None
    factor = normal(sum(rows), seed=30) if has_bias and version >= (2, 16) else None
    factors = [factor] if version >= (2, 16) else []
    found = product(
        other, layout[0] == "T", by_rows, layout[1] == "T", out, bias, *factors, alpha, beta,
        None, None, True, 0,
    )  # fmt: skip
    assert found is out
    begin = 0
    for number, (each, wanted) in enumerate(zip(out, exact, strict=True)):
        wanted = wanted * alpha[number].double() + 6
        if bias is not None:
            own = 1.0 if factor is None else factor[begin : begin + len(each), None].double()
            wanted = wanted + bias[number].double() * own
        begin += len(each)
        if each.numel():
            assert_near(each, wanted)


def test_sums_of_the_rows_of_experts_and_of_rows_with_their_bias() -> None:
    dy, scales, bias = normal(7, 3), normal(7, seed=1), normal(3, 3, seed=2)
    places = torch.tensor([0, 4, 4, 7])
    plain, sums, dots = torch.ones(3, 3), torch.ones(3, 3), torch.ones(7)
    grouped.launch_grouped_dbias(dy, places, plain, None, None, None)
    grouped.launch_grouped_dbias(dy, places, sums, scales, bias, dots)
    parts = dy.double().split([4, 0, 3])
    assert_near(plain, torch.stack([part.sum(0) for part in parts]) + 1)
    scaled = (dy.double() * scales.double()[:, None]).split([4, 0, 3])
    assert_near(sums, torch.stack([part.sum(0) for part in scaled]) + 1)
    own = bias.double().repeat_interleave(torch.tensor([4, 0, 3]), 0)
    assert_near(dots, (dy.double() * own).sum(1) + 1)


def test_a_gpu_cannot_repeat_sums_of_the_rows_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with pytest.raises(ProductError, match="NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        grouped.launch_grouped_dbias(
            normal(1, 3), torch.tensor([0, 1]), torch.zeros(1, 3), None, None, None
        )


def test_adam_of_a_graph_unscales_gradients_and_may_do_nothing() -> None:
    """The learning rate, the step and the scale are tensors; masters as in the other update."""
    start, grad = normal(7, 3), normal(7, 3, seed=1)
    settings = (0.9, 0.98, 1e-6)
    plain = [[grad.clone()], [start.clone()], *([torch.zeros(7, 3)] for _ in range(2))]
    multi_tensor.multi_tensor_adam(0, torch.zeros(1), plain, 0.1, *settings, 3, 1, 1, 0.1)
    captured = [[grad * 4], [start.clone()], *([torch.zeros(7, 3)] for _ in range(2))]
    lr, step, inverse = torch.tensor(0.1), torch.tensor(3), torch.tensor(0.25)
    for flag in (1, 0):
        multi_tensor.multi_tensor_adam_capturable(
            0, torch.tensor([flag]), captured, lr, *settings, step, 1, 1, 0.1, inverse
        )
        assert torch.equal(captured[1][0], start) == bool(flag)
    assert all(
        torch.equal(a[0], b[0]) or (a[0] - b[0]).abs().max() < 1e-7
        for a, b in zip(plain, captured, strict=True)
    )
    assert kernels((2, 12))["multi_tensor_adam_capturable_master"]


@pytest.mark.parametrize("fp8_dtype", [DType.kFloat8E4M3, DType.kFloat8E5M2])
def test_adam_casts_masters_into_fp8(fp8_dtype: DType) -> None:
    """Bytes by the scale that is there; the amax grows, and 1 / scale is written."""
    fmt = FORMATS[fp8_dtype]
    master, grad = normal(8, 4), normal(8, 4, seed=1)
    wanted = [[grad.clone()], [master.clone()], *([torch.zeros(8, 4)] for _ in range(2))]
    settings = (0.1, 0.9, 0.98, 1e-6, 1, 1, 1, 0.1)
    multi_tensor.multi_tensor_adam(0, torch.zeros(1), wanted, *settings)
    param, scale = torch.zeros(8, 4, dtype=torch.uint8), torch.tensor([3.0])
    amax, inverse = torch.tensor([0.125]), torch.zeros(1)
    lists = [[grad], [param], [torch.zeros(8, 4)], [torch.zeros(8, 4)], [master], [scale]]
    multi_tensor.multi_tensor_adam_fp8(
        0, torch.zeros(1), [*lists, [amax], [inverse]], *settings, fp8_dtype
    )
    new = wanted[1][0]
    assert torch.equal(master, new)
    assert torch.equal(
        param.view(fmt.dtype).float(), (new * 3).clamp(-fmt.max, fmt.max).to(fmt.dtype).float()
    )
    assert amax == new.abs().max() and inverse == torch.tensor([3.0]).reciprocal()


def test_masters_in_two_halves_are_updated_as_whole_ones() -> None:
    """The parameter in BF16 and 16 bits more are the master in FP32, bit for bit, in each step."""
    master, moments = normal(9, 5), [torch.zeros(9, 5) for _ in range(4)]
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)
    high = ((bits >> 16) + (low < 0).int()).to(torch.int16)
    param = high.view(torch.bfloat16).clone()
    for step in range(1, 4):
        grad, settings = normal(9, 5, seed=step), (0.1, 0.9, 0.98, 1e-6, step, 1, 1, 0.1)
        whole = [[grad], [master], [moments[0]], [moments[1]]]
        multi_tensor.multi_tensor_adam(0, torch.zeros(1), whole, *settings)
        halves = [[grad], [param], [moments[2]], [moments[3]], [low]]
        multi_tensor.multi_tensor_adam_param_remainder(0, torch.zeros(1), halves, *settings)
        upper = param.view(torch.int16).int() - (low < 0).int()
        assert torch.equal((upper << 16) | (low.int() & 0xFFFF), master.view(torch.int32))
        assert (param.float() - master).abs().max() <= 2**-8 * master.abs().max()


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd(momentum: float, nesterov: bool) -> None:
    """Four steps beside torch's, with gradients that are scaled; a copy in FP16 follows."""
    start = normal(7, 3)
    exact = nn.Parameter(start.double())
    torch_s = torch.optim.SGD(
        [exact], lr=0.1, momentum=momentum, weight_decay=0.1, nesterov=nesterov
    )
    weight, moment, copy = start.clone(), torch.zeros(7, 3), start.half()
    for number in range(4):
        grad = normal(7, 3, seed=number)
        exact.grad = grad.double()
        torch_s.step()
        lists = [[grad * 8], [weight], [moment], [copy]]
        settings = (0.1, momentum, 0.0, 0.1, nesterov, number == 0, False, 0.125)
        for flag in (1, 0):  # nothing happens in the first of the two calls
            multi_tensor.multi_tensor_sgd(0, torch.tensor([flag]), lists, *settings)
    assert_near(weight, exact.detach(), ulps=256)
    assert torch.equal(copy, weight.half())


def test_sgd_of_weights_in_fp16_is_torchs_bit_for_bit() -> None:
    """Torch rounds the momentum before it is used, and the kernel the update: with a learning rate
    that is a power of 2 that is the same."""
    exact = nn.Parameter(normal(64, 64).half())
    reference = torch.optim.SGD([exact], lr=0.25, momentum=0.125)
    weight, moment = exact.detach().clone(), torch.zeros(64, 64).half()
    for number in range(4):
        exact.grad = normal(64, 64, seed=number).half()
        reference.step()
        lists = [[exact.grad.clone()], [weight], [moment]]
        settings = (0.0, 0.125, 0.0, 0.25, False, number == 0, False, 1.0)
        multi_tensor.multi_tensor_sgd(0, torch.zeros(1), lists, *settings)
        assert torch.equal(weight, exact.detach())


def test_sgd_adds_the_decay_after_the_momentum_where_it_is_told_to() -> None:
    weight, moment = torch.tensor([2.0]), torch.tensor([1.0])
    lists = [[torch.tensor([0.5])], [weight], [moment]]
    multi_tensor.multi_tensor_sgd(
        0, torch.zeros(1), lists, 0.25, 0.5, 0.5, 0.1, False, False, True, 2.0
    )
    assert moment == 1.0 * 0.5 + 0.5 * 1.0  # the gradient is scaled to 1
    assert_near(weight, torch.tensor([2 - 0.1 * (1.0 + 0.25 * 2)]).double())


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("inverse", [None, 0.25])
def test_norms_of_lists(bad: float | None, inverse: float | None) -> None:
    """Of all tensors and of each; the tensors stay, and what is not finite is told."""
    tensors, flag = [normal(30, 4), normal(5, seed=1).bfloat16()], torch.zeros(1)
    if bad is not None:
        tensors[1][2] = bad
    before = [x.clone() for x in tensors]
    if inverse is None:
        whole, each = multi_tensor.multi_tensor_l2norm(0, flag, [tensors], True)
        alone, none = multi_tensor.multi_tensor_l2norm(0, flag, [tensors])
    else:
        arguments = (0, flag, [tensors], torch.tensor([inverse]))
        whole, each = multi_tensor.multi_tensor_unscale_l2norm(*arguments, per_tensor=True)
        alone, none = multi_tensor.multi_tensor_unscale_l2norm(*arguments)
    assert flag.item() == (bad is not None) and none.numel() == 0
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(tensors, before, strict=True)
    )
    if bad is None:
        scaled = [x.double() * (inverse or 1.0) for x in tensors]
        assert_near(whole, torch.cat([x.flatten() for x in scaled]).norm().reshape(1))
        assert_near(each, torch.stack([x.norm() for x in scaled]))
    else:
        assert not torch.isfinite(whole) and torch.isfinite(each).tolist() == [True, False]
    assert torch.equal(alone.nan_to_num(), whole.nan_to_num())


def test_codes_of_e8m0_are_the_least_that_are_large_enough() -> None:
    """Of all amaxes in BF16, against exact fractions: 2^(code - 127) >= amax / 448 in FP32."""
    amax = torch.arange(0x7F82, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    code = torch.zeros(len(amax), dtype=torch.uint8)
    multi_tensor.multi_tensor_compute_scale_inv_e8m0(0, None, [[amax], [code]])
    least = (amax.float() * (1 / torch.tensor(448.0))).double()
    power = 2.0 ** (code.double() - 127)
    finite = torch.isfinite(least)
    assert (power[finite] >= least[finite]).all()
    is_needed = finite & (code > 0)
    assert (power[is_needed] / 2 < least[is_needed]).all()
    assert code[-2:].tolist() == [254, 255] and amax[-2].isinf() and amax[-1].isnan()


@pytest.mark.parametrize("version", [(2, 5), (2, 12), (2, 13)])
@pytest.mark.parametrize("cut", [0, 3, 40 * 64 + 31, 96 * 64])
def test_mxfp8_weights_in_two_parts_are_the_whole(
    cut: int, version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amaxes and bytes of both sides, as the cast of the whole matrix has them."""
    monkeypatch.setattr(mx, "version_in_use", lambda: version)
    whole = normal(96, 64).bfloat16()
    whole[:32, :32] = 0.0
    whole[40, 5], whole[80, 60] = torch.inf, 1e-40
    amaxes = []
    for begin, end in ((0, cut), (cut, whole.numel())):
        pair = torch.full((128, 4), -1.0).bfloat16(), torch.full((4, 128), -1.0).bfloat16()
        run = whole.flatten()[begin:end]
        masters.mxfp8_scaling_compute_partial_amax(run, *pair, 96, 64, begin)
        amaxes.append(pair)
    both = [torch.maximum(*sides) for sides in zip(*amaxes, strict=True)]
    codes = [torch.zeros(each.shape, dtype=torch.uint8) for each in both]
    multi_tensor.multi_tensor_compute_scale_inv_e8m0(0, None, [both, codes])
    found = torch.zeros(2, 96 * 64, dtype=torch.uint8)
    for begin, end in ((0, cut), (cut, whole.numel())):
        masters.mxfp8_scaling_partial_cast(
            whole.flatten()[begin:end], *found[:, begin:end], *codes, 96, 64, begin
        )
    for out, code, block in zip(found, codes, (mx.ROW, mx.COLUMN), strict=True):
        payload, wanted = mx.quantize_blocks(whole, block, version)
        assert torch.equal(code[: wanted.shape[0], : wanted.shape[1]], wanted)
        assert same_codes(
            out.view(96, 64).numpy(), payload.contiguous().view(torch.uint8).numpy(), formats.E4M3
        )


def test_rows_of_experts_are_padded_and_unpadded() -> None:
    """Zeros stand behind the rows of each, also of one without rows."""
    x, rows, padded = normal(9, 3), [2, 0, 7], [4, 4, 8]
    wide = torch.full((16, 3), torch.nan)
    grouped.fused_multi_row_padding(x, wide, rows, padded)
    assert torch.equal(wide[:2], x[:2]) and torch.equal(wide[8:15], x[2:])
    assert not wide[2:8].any() and not wide[15:].any()
    back = torch.empty(9, 3)
    grouped.fused_multi_row_unpadding(wide, back, padded, rows)
    assert torch.equal(back, x)
    assert grouped.splits_to_offsets(torch.tensor(rows), 3).tolist() == [0, 6, 6, 27]


def test_histories_and_scales_by_hand() -> None:
    """Five tensors: cast as always, not cast, infinite, overflowing, never yet cast."""
    history = torch.tensor([[9.0, 0, 0, 0, 0], [4, 4, 4, 0, 0], [2, 2, 2, 0, 0], [1, 1, 1, 0, 0]])
    scale = torch.full((5,), 7.0)
    reduced = torch.tensor([8.0, 0, torch.inf, 1e-40, 0])
    updates.fused_amax_and_scale_update_after_reduction(
        reduced, [history], [scale], "max", E4M3, 1.0
    )
    assert history[:, 0].tolist() == [0, 2, 1, 8]
    assert history[:, 1].tolist() == [0, 4, 2, 1]  # stays: slot 0 is what was staged, nothing
    assert history[:, 2].tolist() == [0, 2, 1, torch.inf]
    largest = torch.finfo(torch.float32).max
    assert scale.tolist() == [224 / 8, 7, 7, largest, 7]
    updates.fused_amax_and_scale_update_after_reduction(
        torch.tensor([1.0, 0, 1, 1, 0]), [history], [scale], "most_recent", E4M3, 0.0
    )
    assert scale.tolist() == [448, 7, 448, 448, 7]


class Float8Quantizer:
    """The attributes of Transformer Engine's that a cast reads."""

    def __init__(self, scale: float) -> None:
        self.dtype, self.scale, self.amax = E4M3, torch.tensor([scale]), torch.zeros(1)


def test_a_cast_passes_over_nan_and_saturates() -> None:
    """The amax by `fmaxf`: our own rule makes a NaN infinite, Transformer Engine's kernels do not.
    Zeros, subnormals, infinities and what is too large beside it."""
    x = torch.tensor([0.0, -0.0, 1e-45, 3.0, 1e6, -torch.inf, torch.nan, 2.0**-10])
    out = SimpleNamespace(
        _data=torch.empty(8, dtype=torch.uint8), _transpose=None, _scale_inv=torch.empty(1)
    )
    quantizer = Float8Quantizer(2.0)
    quantize.fill(quantizer, x, out)
    values = out._data.view(torch.float8_e4m3fn).float()
    assert values[:6].tolist() == [0, 0, 0, 6, 448, -448] and values[6].isnan()
    assert values[7] == 2.0**-9 and out._scale_inv == 0.5
    assert quantizer.amax == torch.inf
    quantizer.amax.zero_()
    quantize.fill(quantizer, torch.tensor([torch.nan] + [3.0] * 7), out)
    assert quantizer.amax == 3


@pytest.mark.parametrize(("first", "second"), [("e4m3", "e5m2"), ("e5m2", "e5m2")])
def test_two_tensors_in_e5m2_have_no_product(first: str, second: str) -> None:
    """cuBLAS has none, so a program that asks for it would fail on a GPU."""
    types = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}
    one, other = (
        SimpleNamespace(
            _fp8_dtype=types[name],
            _data=torch.zeros(16, 16, dtype=torch.uint8),
            _transpose=None,
            _scale_inv=torch.ones(1),
        )
        for name in (first, second)
    )
    arguments = (one, True, other, False, None, None, FP32, None, FP32, False, None, False)
    if first == second:
        with pytest.raises(ProductError, match="CUBLAS_STATUS_NOT_SUPPORTED"):
            gemm.generic_gemm(*arguments, None, 0, False, False)
    else:
        assert not gemm.generic_gemm(*arguments, None, 0, False, False)[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_and_what_it_is_added_to_are_rounded_once(dtype: torch.dtype) -> None:
    """257 + 1 is exact in BF16, and 257 is not: it would become 256, and then 257 again."""
    rows = torch.tensor([[16.0, 1.0]], dtype=dtype)
    out = torch.ones(1, 1, dtype=dtype)
    rest = (None, None, None, 0, False, None, False, None, 0, True, False)
    gemm.generic_gemm(rows, True, rows, False, out, *rest)
    assert out.item() == 258
    gemm.generic_gemm(rows, True, rows, False, out, *rest, beta=0.5)
    assert out.item() == 386


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_factor_is_of_the_sum_and_not_of_the_bias(dtype: torch.dtype) -> None:
    rows, bias = torch.tensor([[16.0, 1.0]], dtype=dtype), torch.tensor([3.0], dtype=dtype)
    rest = (None, bias, None, False, None, False, None, 0, False, False)
    out, *_ = gemm.generic_gemm(rows, True, rows, False, None, None, *rest, alpha=0.25)
    assert out.dtype == dtype and out.item() == torch.tensor(257 / 4 + 3).to(dtype).item()


def test_a_function_that_is_missing_is_named_with_what_leads_to_it() -> None:
    extension = make_extension(Sources("2.12.0", None, True))  # type: ignore[arg-type]
    with pytest.raises(MissingKernelError, match=r"fused_attn_fwd.*NVTE_FUSED_ATTN"):
        extension.fused_attn_fwd(1, 2)
    with pytest.raises(MissingKernelError, match=r"score_function_qb_fwd.*by quantiles"):
        extension.fused_topk_with_score_function_qb_fwd()
    with pytest.raises(MissingKernelError, match=r"some_new_function"):
        extension.some_new_function()
    with pytest.raises(MissingKernelError, match=r"thd_second_half.*context parallelism"):
        extension.thd_second_half_lse_correction()
    with pytest.raises(MissingKernelError, match="nvfp4_fused_scale.*NVFP4 weights"):
        extension.nvfp4_fused_scale(torch.zeros(16, 16), None)
    assert (extension.CommOverlap | None) is not None  # an annotation


def test_results_are_tensors_of_their_own() -> None:
    """Programs change them in place, which autograd refuses for views; sums come back as given."""
    extension = make_extension(Sources("2.12.0", None, True))  # type: ignore[arg-type]
    a, b, held = normal(3, 4), normal(5, 4, seed=1), torch.zeros(2, 5, 3)[0]

    def product(out: torch.Tensor | None) -> torch.Tensor:
        rest = (None, False, None, False, None, 0, out is not None, False)
        return extension.generic_gemm(a, True, b, False, out, None, None, None, 0, *rest[1:])[0]

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return product(None)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad

    out = Product.apply(torch.zeros(1, requires_grad=True))
    out += 1.0
    assert_near(out.detach(), b.double() @ a.double().t() + 1)
    assert product(held) is held and held._is_view()


def test_cudnn_is_asked_and_has_no_attention() -> None:
    """Transformer Engine then takes plain torch operations; from 2.20 on it is told why."""
    for version, has_reason in (("2.4.0", False), ("2.19.0", False), ("2.20.2", True)):
        extension = make_extension(Sources(version, None, True))  # type: ignore[arg-type]
        answer = extension.get_fused_attn_backend(True, FP32, max_seqlen=4)
        none = extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend
        assert answer == ((none, "a CPU has no cuDNN") if has_reason else none)


def test_each_version_has_its_own_signatures() -> None:
    old, new = (kernels(version)["fused_rope_backward"] for version in ((2, 9), (2, 10)))
    assert "start_positions" not in inspect.signature(old).parameters
    assert "start_positions" in inspect.signature(new).parameters


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_scaled_copies_and_what_is_not_finite(bad: float | None) -> None:
    sources, flag = [normal(3, 4), normal(5, seed=1)], torch.zeros(1)
    if bad is not None:
        sources[1][2] = bad
    copies = [torch.empty(3, 4), torch.empty(5, dtype=torch.bfloat16)]
    multi_tensor.multi_tensor_scale(0, flag, [sources, copies], 0.3)
    assert flag.item() == (bad is not None)
    for source, copy in zip(sources, copies, strict=True):
        wanted = (source * 0.3).to(copy.dtype)
        torch.testing.assert_close(copy, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cut", [0, 1, 130 * 7 + 3, 130 * 300])
def test_a_weight_in_two_parts_has_the_scales_and_bytes_of_the_whole(cut: int) -> None:
    """By blocks of 128 x 128, whose bounds a part's do not meet, with zeros, subnormals, and an
    infinity, which makes its block's scale 1 and is cast to the largest number."""
    whole = normal(300, 130)
    whole[:128, :128] *= 1e-3
    whole[3, 5], whole[129, 2], whole[0, 129] = 0.0, 1e-40, torch.inf
    amaxes = []
    for begin, end in ((0, cut), (cut, whole.numel())):
        amax = torch.full((3, 4), -1.0)
        part = whole.flatten()[begin:end]
        masters.fp8_block_scaling_compute_partial_amax(part, amax, 300, 130, begin, 128)
        amaxes.append(amax)
    amax, scale, scale_inv = torch.maximum(*amaxes), torch.empty(3, 4), torch.empty(3, 4)
    flag = torch.zeros(1)
    lists = [[amax], [scale], [scale_inv]]
    multi_tensor.multi_tensor_compute_scale_and_scale_inv(0, flag, lists, 448.0, False, 0.0)
    payload = torch.empty(whole.numel(), dtype=torch.uint8)
    for begin, end in ((0, cut), (cut, whole.numel())):
        part, place = whole.flatten()[begin:end], payload[begin:end]
        masters.fp8_block_scaling_partial_cast(part, place, scale, 300, 130, begin, 128, E4M3)
    for row, column in itertools.product(range(3), range(2)):
        block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
        wanted = 448.0 / float(whole[block].abs().max())
        assert float(scale[row, column]) == pytest.approx(wanted or 1.0, rel=1e-7)
        clamped = (whole[block] * scale[row, column]).clamp(-448, 448).to(torch.float8_e4m3fn)
        found = payload.view(300, 130)[block].view(torch.float8_e4m3fn)
        assert torch.equal(found.float(), clamped.float())
    assert torch.equal(scale_inv, scale.reciprocal()) and float(scale[0, 2]) == 1.0


def test_scales_of_amaxes_are_1_where_there_is_none() -> None:
    amax = torch.tensor([0.0, torch.inf, torch.nan, 3.0, 1e-45])
    scale, scale_inv = torch.empty(5), torch.empty(5)
    lists = [[amax], [scale], [scale_inv]]
    multi_tensor.multi_tensor_compute_scale_and_scale_inv(
        0, torch.zeros(1), lists, 448.0, True, 0.0
    )
    assert scale.tolist() == [1.0, 1.0, 1.0, 128.0, 2.0**127]


USES: dict[str, Callable[[Any], object]] = {
    "a call": lambda found: found(print),
    "a call of an attribute": lambda found: found.other(3),
    "an item": lambda found: found[1],
    "a comparison": lambda found: found < 3,
    "a comparison from the right": lambda found: 3 >= found,
    "truth": bool,
    "iteration": list,
    "unpacking": lambda found: (lambda *args: args)(*found),
    "a length": len,
    "an integer": int,
    "membership": lambda found: 3 in found,
    "isinstance": lambda found: isinstance(3, found),
    "issubclass": lambda found: issubclass(int, found),
}


@pytest.mark.parametrize("use", list(USES))
def test_a_placeholder_names_itself_when_it_is_used(use: str) -> None:
    """A package that is not installed, and a function that the extension lacks."""
    phase = ImportPhase()
    absent = FromAbsentPackage("triton.jit", phase)
    assert absent == absent and absent and isinstance(absent(print), FromAbsentPackage)
    phase.is_over = True
    hint = "triton is not installed. Install triton$"
    with pytest.raises(MissingKernelError, match=hint):
        USES[use](absent)
    with pytest.raises(MissingKernelError, match="the package triton"):
        assert absent == 3
    assert FromAbsentPackage("triton.jit", ImportPhase())(print)  # of another import
    with pytest.raises(MissingKernelError, match="init_nvshmem_x.*comes from NVSHMEM"):
        USES[use](Missing("init_nvshmem_x"))
    with pytest.raises(MissingKernelError, match=r"Triton kernel _mhc_fwd\S*: the CPU stand-in"):
        USES[use](MissingTriton("_mhc_fwd"))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), 0, 1, "cpu"])
def test_what_goes_to_a_cuda_device_stays_on_the_cpu(device: Any) -> None:
    x = torch.ones(2)
    with ExitStack() as undo:
        cuda.install(undo)
        moved = [x.to(device), x.to(device=device), x.to(device, torch.float16), x.cuda()]
        made = [torch.empty(2, device=device), torch.ones_like(x, device=device)]
        made += [x.new_zeros(2, device=device), nn.Linear(2, 2, device=device).weight]
        assert x.to("meta").device.type == torch.empty(2, device="meta").device.type == "meta"
        assert x.to(torch.float16).dtype == x.to(x.half()).dtype == torch.float16
    assert [y.device.type for y in (*moved, *made)] == ["cpu"] * 8
    assert moved[2].dtype == torch.float16


def test_what_files_of_torch_cuda_define_is_replaced_in_them_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs import from `torch.cuda.random` what `torch.cuda` has as well."""
    monkeypatch.setattr(cuda, "_ASKING", [__name__])
    with ExitStack() as undo:
        cuda.install(undo)
        torch.cuda.random.manual_seed(5)
        drawn = torch.rand(2)
        torch.cuda.random.set_rng_state(torch.Generator().manual_seed(5).get_state())
        assert torch.equal(torch.rand(2), drawn)
        assert torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state())
        assert torch.cuda.memory.memory_allocated() == 0
        assert torch.cuda.streams.Event().query()
    assert torch.cuda.random.manual_seed is torch.cuda.manual_seed
    assert torch.cuda.streams.Event is torch.cuda.Event


USED = {
    "a stream in a with": "with cuda.Stream(priority=cuda.Stream.priority_range()[1]) as s: pass",
    "what a stream is": "assert cuda.Stream().device == torch.ones(1, device='cuda').device",
    "a stream of others": "cuda.ExternalStream(0).synchronize()",
    "a device in a with": "with cuda.device(0): assert cuda.device(1).idx == 0",
    "statistics of memory": "assert cuda.memory_stats()['allocated_bytes.all.current'] == 0",
    "memory as text": "assert 'GPU' in cuda.memory_summary() and cuda.memory_snapshot() == []",
    "limits of memory": "cuda.set_per_process_memory_fraction(0.5)",
    "counts of memory": "cuda.reset_accumulated_memory_stats()",
    "marks": "cuda.nvtx.mark('x'); cuda.nvtx.range_end(cuda.nvtx.range_start('x'))",
    "the profiler": "cuda.profiler.start(); cuda.profiler.stop()",
    "the runtime": "cuda.check_error(cuda.cudart().cudaProfilerStart())",
    "a forked generator": """before = torch.get_rng_state()
for devices in ([0], None, [torch.device("cuda", 1)]):
    with torch.random.fork_rng(devices=devices): torch.rand(1)
assert torch.equal(torch.get_rng_state(), before)""",
    "old types": "assert cuda.FloatTensor([1]).type(cuda.HalfTensor).is_cuda",
    "the accelerator": """accelerator = torch.accelerator
assert accelerator.is_available() and accelerator.current_accelerator().type == "cuda"
assert accelerator.device_count() == 1 and accelerator.current_device_index() == 0
accelerator.synchronize(), accelerator.set_device_index(0)""",
    "sizes": "assert cuda.get_device_properties(0).max_threads_per_multi_processor == 2048",
}


@pytest.mark.parametrize("use", USED)
def test_what_programs_ask_of_a_gpu_is_answered(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these failed with "Torch not compiled with CUDA enabled" or a worse error."""
    monkeypatch.setattr(cuda, "_ASKING", [*cuda._ASKING, "program"])
    with ExitStack() as undo:
        cuda.install(undo)
        exec(USED[use], {"__name__": "program", "torch": torch, "cuda": torch.cuda})


# torch 2.15 warns if another test's file of sparse tensors could not be read in this process.
@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize(
    "place", ["cuda", "cuda:1", torch.device("cuda"), {"cpu": "cuda:0"}, lambda s, _: s.cuda(0)]
)
def test_a_file_that_is_read_to_a_gpu_comes_to_the_cpu(place: Any, tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "x.pt")
    with ExitStack() as undo:
        cuda.install(undo)
        assert torch.load(tmp_path / "x.pt", map_location=place).tolist() == [0, 1, 2]
        meta = torch.load(tmp_path / "x.pt", map_location="meta")
        assert meta.is_meta
    if not callable(place) and not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(tmp_path / "x.pt", map_location=place)


@pytest.mark.parametrize(
    "words",
    [("nccl",), ("cuda:nccl,cpu:gloo",), (None,)],
)
def test_a_group_by_nccl_is_one_by_gloo(words: tuple[Any, ...], tmp_path: Path) -> None:
    with ExitStack() as undo:
        cuda.install(undo)
        where = {"init_method": f"file://{tmp_path / 'store'}", "rank": 0, "world_size": 1}
        torch.distributed.init_process_group(*words, **where, device_id=torch.device("cuda", 0))
        undo.callback(torch.distributed.destroy_process_group)
        group = torch.distributed.new_group([0], backend="NCCL")
        assert torch.distributed.get_backend(group) == "gloo"
        x = torch.ones(2, device="cuda")
        torch.distributed.all_reduce(x)
        torch.distributed.all_reduce(x, group=group)
        assert x.tolist() == [1, 1]
        torch.distributed.barrier(device_ids=[0])
        model = nn.Linear(2, 2, device="cuda")
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0], output_device=0)
        parallel(x).sum().backward()
        assert model.weight.grad is not None


def test_a_default_cuda_device_is_the_cpu_and_another_stays() -> None:
    found = []
    with ExitStack() as undo:
        cuda.install(undo)
        for device in ("cuda", "meta"):
            with torch.device(device):
                found.append(torch.zeros(2).device.type)
                found.append(torch.zeros(2, device="cuda").device.type)
    assert found == ["cpu", "cpu", "meta", "cpu"]


def test_an_index_alone_is_a_device_to_the_packages_of_an_audit() -> None:
    with cuda.IndexIsTheCpu():
        assert torch.device(1).type == "cpu" and torch.device("meta").type == "meta"


OF_TRANSFORMER_ENGINE = """
import torch

class Quantized(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

def type_of(x):
    return x.type()

def together(x):
    with torch.distributed._coalescing_manager(None, async_ops=True) as manager:
        torch.distributed.all_reduce(x, async_op=True)
    manager.wait()

def alone(x):
    return torch.distributed.all_reduce(x, async_op=True)
"""
"""Code that asks as Transformer Engine's does."""


def _as_transformer_engine() -> Any:
    module = ModuleType("transformer_engine.pytorch.asking")
    exec(OF_TRANSFORMER_ENGINE, module.__dict__)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_the_type_of_a_tensor_has_the_name_of_cuda_once(dtype: torch.dtype) -> None:
    """A subclass asks again, from Transformer Engine's own file; others learn the truth."""
    name = torch.empty(1, dtype=dtype).type().removeprefix("torch.")
    asking = _as_transformer_engine()
    with ExitStack() as undo:
        cuda.install(undo)
        x = torch.empty(1, dtype=dtype)
        for tensor in (x, x.as_subclass(asking.Quantized), nn.Parameter(x, requires_grad=False)):
            assert asking.type_of(tensor) == f"torch.cuda.{name}"
        assert x.type() == f"torch.{name}"


def test_messages_that_are_sent_together_have_arrived_when_the_manager_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron sends them in the background; one that is sent alone is waited for by its sender."""
    waits: list[str] = []
    work = SimpleNamespace(wait=lambda: waits.append("waited"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, async_op: work)
    asking = _as_transformer_engine()
    with ExitStack() as undo:
        cuda.install(undo)
        asking.together(torch.ones(1))
        assert waits == ["waited"]
        assert asking.alone(torch.ones(1)) is work and waits == ["waited"]


@pytest.mark.parametrize("owner", [torch, torch.fft, torch.nested, torch.Tensor])
def test_every_function_that_takes_a_device_is_replaced(owner: Any) -> None:
    """torch says in their documentation which they are; up to three more have none."""
    takes = re.compile(r"device=None|device \(:class:`torch.device`|device: ")
    named = {name for name in vars(owner) if name[0] != "_"}
    if owner is torch.Tensor:
        named = {name for name in dir(owner) if name[0] != "_"}
    found = {
        name
        for name in named
        if callable(function := getattr(owner, name))
        and not isinstance(function, type | ModuleType)
        and takes.search(function.__doc__ or "")
    }
    (given,) = (names for each, names in cuda.TAKE_A_DEVICE if each is owner)
    elsewhere = {"cuda", "ipu", "mtia", "xpu", "set_default_device"}
    undocumented = {"empty_quantized", "normal", "scalar_tensor"} if owner is torch else set()
    assert found - elsewhere | undocumented == set(given)


def test_a_dry_run_says_where_tensors_are_made_and_sees_who_asks() -> None:
    asked = []

    def place(device: Any, asking: FrameType) -> Any:
        asked.append((device, asking.f_code.co_name))
        return "meta"

    with ExitStack() as undo:
        cuda.install(undo)
        with cuda.placing(place):
            assert torch.zeros(2, device="cuda").is_meta
        assert not torch.zeros(2, device="cuda").is_meta
    assert asked[0] == ("cuda", sys._getframe().f_code.co_name)


def test_torchs_tracer_is_there_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise graphs would break at `torch.full` and others, also after all is undone."""
    found, before = [], torch.zeros
    monkeypatch.setattr(torch_private, "load_dynamo", lambda: found.append(torch.zeros))
    with ExitStack() as undo:
        cuda.install(undo)
        assert torch.zeros is not before and found == [before]


def test_torch_compile_traces_what_makes_tensors_on_a_device() -> None:
    """In one graph, where nothing may look at frames."""
    with ExitStack() as undo:
        cuda.install(undo)
        compiled = torch.compile(
            lambda x: x + torch.ones(2, device=x.device), backend="eager", fullgraph=True
        )
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_torch_compile_answers_those_who_ask_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two modules that ask the same, the one that is Transformer Engine's has a GPU."""
    code = """
import torch
def has_a_gpu(x):
    return torch.cuda.is_available(), torch.cuda.get_device_capability() if x.is_cuda else None
"""
    modules: list[Any] = [ModuleType("transformer_engine_of_a_test"), ModuleType("another")]
    for module in modules:
        exec(code, module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)  # torch's tracer looks there

    def both(x: torch.Tensor) -> Any:
        return x + 1, *(module.has_a_gpu(x) for module in modules)

    with ExitStack() as undo:
        cuda.install(undo)
        wanted = both(torch.ones(2))[1:]
        assert wanted[0] == (True, (9, 0))
        if not torch.cuda.is_available():
            assert wanted[1] == (False, None)
        assert torch.compile(both, backend="eager", fullgraph=True)(torch.ones(2))[1:] == wanted


def test_torch_compile_traces_the_checks_for_blackwell() -> None:
    """They pass, and the recipe where none is given stays that of an H100."""
    check = loading._passed_but_by_default(lambda: (False, "an H100"))

    def get_default_fp8_recipe() -> tuple[bool, str]:
        return check()

    def both(x: torch.Tensor) -> Any:
        return x + 1, check(), get_default_fp8_recipe()

    wanted = [(True, ""), (False, "an H100")]
    assert list(both(torch.ones(2))[1:]) == wanted
    found = torch.compile(both, backend="eager", fullgraph=True)(torch.ones(2))
    assert list(found[1:]) == wanted


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("is_square", [False, True])
def test_scales_that_fill_up_a_row_are_cut_off(is_square: bool, by_column: bool) -> None:
    """Rows of scales are stored in multiples of 4: those of a matrix [200, 130] by its blocks."""
    shape = [130, 200] if by_column else [200, 130]
    lengths = [-(-size // 128) for size in shape]
    stored = (lengths[0] if is_square else lengths[1], 4 if is_square else -(-shape[0] // 4) * 4)
    side = "columnwise" if by_column else "rowwise"
    data = torch.zeros(shape, dtype=torch.uint8)
    stand_in = SimpleNamespace(
        **{"_fp8_dtype": E4M3, "_is_2D_scaled": is_square, f"_{side}_data": data},
        **{f"_{side}_scale_inv": torch.ones(stored)},
    )
    found = tensors.operand(stand_in, by_column=by_column)
    wanted = lengths if is_square else [shape[0], lengths[1]]
    assert list(found.payload.shape) == [200, 130]
    assert list(found.dequant_scale.shape) == (wanted[::-1] if by_column else wanted)


@pytest.mark.parametrize("kind", ["normal", "subnormal", "bits", "inf", "nan"])
@pytest.mark.parametrize("version", [(2, 5), (2, 6), (2, 12), (2, 13), (2, 20)])
def test_mxfp8_without_a_compiler(
    kind: str, version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch operations make the specification's bytes of rows and columns, by each version."""
    monkeypatch.setattr(mx.block_casts, "runs_in_c", lambda x: False)
    of_2_12 = mxfp8.FACTORS_OF_2_12 if version < (2, 13) else None
    factors = mxfp8.FACTORS_OF_2_5 if version == (2, 5) else of_2_12
    x = data(kind)
    for block, matrix in ((mx.ROW, x), (mx.COLUMN, np.ascontiguousarray(x.T))):
        payload, code = mx.quantize_blocks(torch.from_numpy(x), block, version)
        payload, code = (t if block == mx.ROW else t.t() for t in (payload, code))
        exact = mxfp8.quantize_rows(matrix, factors=factors)
        assert np.array_equal(code.numpy(), exact.scale_codes)
        found = payload.contiguous().view(torch.uint8).numpy()
        assert same_codes(found, exact.codes, formats.E4M3)


def test_mxfp8_is_written_where_there_is_memory() -> None:
    """A side has the bytes and codes of the cast, and one without memory is left out."""
    x = torch.from_numpy(data("normal", (64, 96)))
    quantizer = SimpleNamespace(dtype=DType.kFloat8E4M3)
    made = SimpleNamespace(_columnwise_data=None, _columnwise_scale_inv=None)
    made._rowwise_data = torch.zeros(64, 96, dtype=torch.uint8)
    made._rowwise_scale_inv = torch.full((128, 4), 9, dtype=torch.uint8)
    assert mx.fill(quantizer, x, made) is made
    payload, code = mx.quantize_blocks(x, mx.ROW, mx.version_in_use())
    assert torch.equal(made._rowwise_data, payload.view(torch.uint8))
    assert torch.equal(made._rowwise_scale_inv[:64, :3], code)
    assert not made._rowwise_scale_inv[64:].any() and not made._rowwise_scale_inv[:, 3:].any()


@pytest.mark.parametrize(
    ("kind", "version", "is_tiled"),
    [("MXFP8", (2, 12), True), ("NVFP4", (2, 16), False), ("NVFP4", (2, 17), True)],
)
def test_a_cast_leaves_scales_in_tiles_where_that_is_asked_for(
    kind: str, version: tuple[int, ...], is_tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product reads the same; a cast into the same tensor without tiles has rows again."""
    monkeypatch.setattr(tensors, "version_in_use", lambda: version)
    x = torch.from_numpy(data("normal", (96, 160)))
    quantizer: Any = type(f"{kind}Quantizer", (SimpleNamespace,), {})(
        dtype=E4M3, optimize_for_gemm=False, rowwise_usage=True, columnwise_usage=True,
        with_rht=False, stochastic_rounding=False, with_2d_quantization=False,
        with_amax_reduction=False,
    )  # fmt: skip
    module = mx if kind == "MXFP8" else nv
    made = module.arguments(quantizer, [96, 160], torch.device("cpu"))
    out: Any = type(f"{kind}Tensor", (SimpleNamespace,), {})(
        **{f"_{name}": value for name, value in made.items()}
    )
    sides = [(module.operand, by_column) for by_column in (False, True)]
    scales = ("_rowwise_scale_inv", "_columnwise_scale_inv")
    found = []
    for optimize_for_gemm in (False, True, False):
        quantizer.optimize_for_gemm = optimize_for_gemm
        quantize.fill(quantizer, x, out)
        assert out._with_gemm_swizzled_scales is (optimize_for_gemm and is_tiled)
        found.append([getattr(out, name).clone() for name in scales])
        read = [operand(out, by_column=by_column).dequant_scale for operand, by_column in sides]
        found[-1] += [each.contiguous() for each in read]
    for rows, _, again in zip(*found, strict=True):
        assert torch.equal(rows, again)
    assert not is_tiled or [torch.equal(*pair) for pair in zip(*found[:2], strict=True)] == [
        False, False, True, True,
    ]  # fmt: skip
    if is_tiled:  # those of NVFP4's columns lie as its rows do
        turned = found[0][1].t() if kind == "MXFP8" else found[0][1]
        for rows, tiles in ((found[0][0], found[1][0]), (turned, found[1][1])):
            assert torch.equal(swizzled(rows), tiles.flatten())


@pytest.mark.parametrize(
    ("m", "k", "version", "is_tiled"),
    [
        (64, 128, (2, 17), True),
        (64, 144, (2, 17), False),
        (48, 128, (2, 17), False),
        (64, 128, (2, 16), False),
    ],
)
def test_which_nvfp4_begins_in_tiles(
    m: int, k: int, version: tuple[int, ...], is_tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what one kernel of a GPU rotates, casts and writes."""
    monkeypatch.setattr(nv, "version_in_use", lambda: version)
    quantizer = SimpleNamespace(
        dtype=E4M3, optimize_for_gemm=True, rowwise_usage=True, columnwise_usage=True, with_rht=True
    )
    made = nv.arguments(quantizer, [m, k], torch.device("cpu"))
    assert made["with_gemm_swizzled_scales"] is is_tiled


def test_types_have_the_numbers_of_transformer_engine_s_header() -> None:
    """Those of `NVTEDType` in `transformer_engine.h`, without int16, int64 and E8M0."""
    assert {member.name: member.value for member in DType} == {
        "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6,
        "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10,
    }  # fmt: skip
