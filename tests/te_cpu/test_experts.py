"""Permutation and routing for mixtures of experts, each against plain loops or FP64."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from te_cpu import permute, router
from te_cpu.errors import SizeError
from te_cpu.extension import kernels
from tests.te_cpu.test_kernels import assert_near, gradients, normal

OLD, NEW = (2, 12), (2, 20)


def routing(tokens: int, experts: int) -> torch.Tensor:
    """A map whose first token and second expert are alone: neither has the other kind."""
    mask = normal(tokens, experts, seed=3) > 0.2
    mask[:1], mask[:, 1:2] = False, False
    return mask.int()


@pytest.mark.parametrize("tokens, experts, topk", [(7, 4, 3), (5, 3, 1), (1, 2, 2)])
@pytest.mark.parametrize("kept", [0, 4])
def test_permutation_by_indices(tokens: int, experts: int, topk: int, kept: int) -> None:
    """Rows are the tokens of expert 0, then of 1; a dropped row has no part in sums."""
    drawn = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randperm(experts, generator=drawn)[:topk] for _ in range(tokens)])
    x, prob, grad = normal(tokens, 8), normal(tokens, topk, seed=1), normal(tokens, 8, seed=2)
    work = [torch.zeros(1)]
    rows, row_of, same = permute.moe_permute_fwd(x, 4, indices.int(), kept, work, 99)
    pairs = sorted(itertools.product(range(tokens), range(topk)), key=lambda p: int(indices[p]))
    pairs = pairs[: kept or None]
    assert same is work and row_of.dtype == torch.int32
    assert torch.equal(rows[: len(pairs)], x[[t for t, _ in pairs]])
    assert rows[len(pairs) :].isnan().all()  # no token is copied there
    wanted = torch.full((topk, tokens), -1)
    for row, (token, k) in enumerate(pairs):
        wanted[k, token] = row
    assert torch.equal(row_of.view(topk, tokens).long(), wanted)
    rows = normal(*rows.shape, seed=4)

    def merged(rows: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(tokens, 8, dtype=rows.dtype)
        for row, (token, k) in enumerate(pairs):
            out[token] = out[token] + rows[row] * prob[token, k]
        return out

    exact, (rows_grad, prob_grad) = gradients(merged, grad, rows, prob)
    assert_near(permute.moe_unpermute_fwd(rows, 4, row_of, prob, tokens, topk), exact)
    found = permute.moe_unpermute_bwd(grad, rows, 4, row_of, prob)
    assert_near(found[0][: len(pairs)], rows_grad[: len(pairs)])
    assert_near(found[1], prob_grad)
    exact, _ = gradients(merged, grad, rows, torch.ones_like(prob))
    assert_near(permute.moe_permute_bwd(rows, 4, row_of, torch.empty(0), tokens, topk), exact)


def test_experts_below_zero_come_last_from_2_16_on() -> None:
    x, indices = normal(3, 4), torch.tensor([[1], [-1], [0]], dtype=torch.int32)
    for version, order in (((2, 15), [1, 2, 0]), ((2, 16), [2, 0, 1])):
        rows, _, _ = kernels(version)["moe_permute_fwd"](x, 4, indices, 0, [], 3)
        assert torch.equal(rows, x[order])


def test_sums_of_rows_by_index_are_in_their_own_dtype() -> None:
    """1 + 2^-8 is 1 in BF16, twice over; the exact sum is not."""
    rows = torch.tensor([[1.0], [2**-8], [2**-8]]).bfloat16().repeat(1, 8)
    found = permute.moe_unpermute_fwd(rows, 6, torch.arange(3), torch.empty(0), 1, 3)
    assert torch.equal(found, torch.ones(1, 8).bfloat16())


@pytest.mark.parametrize(
    "version, is_padded",
    [((2, 5), False), ((2, 11), False), (OLD, False), (OLD, True), (NEW, False), (NEW, True)],
)
@pytest.mark.parametrize("tokens, experts", [(9, 5), (4, 2), (1, 3)])
def test_permutation_by_mask(
    tokens: int, experts: int, version: tuple[int, ...], is_padded: bool
) -> None:
    """Tokens without an expert, experts without a token, and rows up to multiples of 4."""
    named = permute.in_triton(version)
    mask = routing(tokens, experts)
    row_id_map = named["make_row_id_map"](mask, tokens, experts)
    x, probs, scale = normal(tokens, 6), normal(tokens, experts, seed=1), normal(tokens, 5)
    places, pads, row = {}, [], 0
    for expert in range(experts):
        pads.append(row - len(places))
        for token in mask[:, expert].nonzero()[:, 0].tolist():
            places[row] = (token, expert)
            row += 1
        row += -row % 4 if is_padded else 0
    count = row + (0 if is_padded else 2)
    pad = () if version < OLD else (torch.tensor(pads) if is_padded else None,)
    sizes = (tokens, experts)
    rows, scales, row_probs = named["permute_with_mask_map"](
        x, row_id_map, probs, scale, *pad, *sizes, count, 6, 3
    )
    for row in range(count):
        if row in places:
            token, expert = places[row]
            assert torch.equal(rows[row], x[token]) and row_probs[row] == probs[token, expert]
            assert torch.equal(scales[row], scale[token, :3])
        elif is_padded:
            assert not rows[row].any() and not scales[row].any() and row_probs[row] == 0
        else:
            assert rows[row].isnan().all() and scales[row].isnan().all()

    def merged(rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        out = 0 * (rows.sum() + probs.sum()).expand(tokens, 6)
        out = out.clone()
        for row, (token, expert) in places.items():
            out[token] = out[token] + rows[row] * probs[token, expert]
        return out

    rows, grad = normal(count, 6, seed=4), normal(tokens, 6, seed=5)
    exact, (rows_grad, probs_grad) = gradients(merged, grad, rows, probs)
    unpermute = named["unpermute_with_mask_map"]
    found, back = unpermute(rows, row_id_map, probs, row_probs, *pad, *sizes, 6)
    assert_near(found, exact)
    assert torch.equal(back, probs * mask)
    exact, _ = gradients(merged, grad, rows, torch.ones_like(probs))
    assert_near(unpermute(rows, row_id_map, None, None, *pad, *sizes, 6)[0], exact)
    found_rows, found_probs = named["unpermute_with_mask_map_bwd_with_merging_probs"](
        grad, row_id_map, rows, probs, *pad, *sizes, count, 6
    )
    kept = list(places)
    assert_near(found_probs, probs_grad)
    others = [row for row in range(count) if row not in places]
    assert (found_rows[others] == 0 if is_padded else found_rows[others].isnan()).all()
    if places:
        assert_near(found_rows[kept], rows_grad[kept])
        with pytest.raises(SizeError, match="more copies than there are rows"):
            unpermute(rows[: max(kept)], row_id_map, None, None, *pad, *sizes, 6)


def test_the_row_map_is_that_of_transformer_engine_s_own_example() -> None:
    """Its comments follow this one through the kernels; what has no meaning is left out."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
    found = permute.make_row_id_map(mask, 5, 3, release=NEW)
    found = found.masked_fill(found == torch.iinfo(torch.int32).max, -1).tolist()
    r = -1
    assert found == [
        [3, 0, r, 1, 0, r, 2], [5, 1, r, 2, 0, r, 2], [6, r, r, 2, r, r, 1],
        [4, 2, r, 1, 0, r, 2], [r, r, r, r, r, r, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("version, is_zero", [((2, 5), False), ((2, 6), True)])
def test_a_copy_with_probability_0_is_padding_from_2_6_on(
    version: tuple[int, ...], is_zero: bool
) -> None:
    mask, probs = torch.ones(2, 2).int(), torch.tensor([[0.5, 0.0], [torch.nan, 1.0]])
    named, x = permute.in_triton(version), normal(2, 4)
    x[1, 0] = torch.nan
    row_id_map = named["make_row_id_map"](mask, 2, 2)
    rows, _, row_probs = named["permute_with_mask_map"](x, row_id_map, probs, None, 2, 2, 4, 4, 0)
    wanted = x[[0, 1, 0, 1]]
    wanted[2] = 0.0 if is_zero else wanted[2]
    assert torch.equal(rows.nan_to_num(9.0), wanted.nan_to_num(9.0))
    assert torch.equal(row_probs.nan_to_num(9.0), torch.tensor([0.5, 9.0, 0.0, 1.0]))


def test_sums_by_mask_begin_with_the_last_expert() -> None:
    """In FP32 the order shows: (2^24 + 1) + 1 is 2^24, and (1 + 1) + 2^24 is not."""
    rows = torch.tensor([[2.0**24], [1.0], [1.0]])
    for version, exact in (((2, 5), 2.0**24), ((2, 6), 2.0**24 + 2)):
        named = permute.in_triton(version)
        row_id_map = named["make_row_id_map"](torch.ones(1, 3).int(), 1, 3)
        found, _ = named["unpermute_with_mask_map"](rows, row_id_map, None, None, 1, 3, 1)
        assert found.item() == exact


@pytest.mark.parametrize("version", [(2, 5), OLD, NEW])
def test_chunks_in_another_order(version: tuple[int, ...]) -> None:
    """A chunk may be empty; its tokens, their probabilities and gradients go with it."""
    sizes, order = torch.tensor([3, 0, 2, 1]), torch.tensor([2, 0, 3, 1])
    x, probs, named = normal(6, 4), normal(6), permute.in_triton(version)
    chunks = x.split(sizes.tolist())
    wanted = torch.cat([chunks[chunk] for chunk in order.tolist()])
    if version < (2, 6):
        found, places, moved = named["sort_chunks_by_idx"](x, sizes, order, probs, 6, 4, 4)
        back, probs_back = named["sort_chunks_by_map"](found, places, moved, 6, 4)
    else:
        places = named["make_chunk_sort_map"](sizes, order, 6, 4)
        found, moved = named["sort_chunks_by_map"](x, places, probs, 6, 4, is_forward=True)
        back, probs_back = named["sort_chunks_by_map"](found, places, moved, 6, 4, is_forward=False)
    assert torch.equal(found, wanted) and torch.equal(back, x) and torch.equal(probs_back, probs)


def test_tokens_after_all_chunks_keep_their_places_from_2_13_on() -> None:
    sizes, order = torch.tensor([2, 1]), torch.tensor([1, 0])
    found = permute.make_chunk_sort_map(sizes, order, 5, 2, release=(2, 13))
    assert found.tolist() == [1, 2, 0, 3, 4]
    for tokens, release in ((5, OLD), (2, NEW)):
        with pytest.raises(SizeError, match=rf"\[2, 1\] does not divide {tokens} tokens"):
            permute.make_chunk_sort_map(sizes, order, tokens, 2, release=release)


def forward(version: tuple[int, ...], logits: torch.Tensor, topk: int, **given: Any) -> Any:
    settings = {
        "use_pre_softmax": False, "num_groups": None, "group_topk": None, "scaling_factor": None,
        "score_function": "softmax", "expert_bias": None,
    }  # fmt: skip
    return kernels(version)["fused_topk_with_score_function_fwd"](
        logits, topk, **{**settings, **given}
    )


def backward(version: tuple[int, ...], found: Any, grad: torch.Tensor, topk: int, **given: Any):
    """The gradient of the logits, as each version wants it asked for."""
    _, routing_map, intermediate = found
    name = "fused_topk_with_score_function_bwd"
    settings: dict[str, Any] = {"topk": topk, "use_pre_softmax": False, "scaling_factor": None,
                "score_function": "softmax", "num_tokens": len(grad), "use_dense_indices": False,
                "num_experts": grad.shape[-1], "routing_map_format": 0, "routing_map": routing_map,
                "intermediate_output": intermediate, "grad_probs": grad,
                "grad_logits": torch.empty_like(grad)}  # fmt: skip
    settings.update(given)
    function = kernels(version)[name]
    known = {key: settings[key] for key in inspect.signature(function).parameters}
    made = function(**known)
    return settings["grad_logits"] if made is None else made


def activated(x: torch.Tensor, function: str) -> torch.Tensor:
    if function == "sigmoid":
        return x.sigmoid()
    return torch.nn.functional.softplus(x).sqrt()


@pytest.mark.parametrize("version", [(2, 6), OLD, (2, 13), (2, 17), NEW])
@pytest.mark.parametrize("kind", ["softmax", "pre-softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("tokens, experts, topk", [(5, 6, 2), (1, 40, 3), (3, 4, 1), (2, 33, 33)])
def test_probabilities_of_the_chosen_experts(
    tokens: int, experts: int, topk: int, kind: str, version: tuple[int, ...]
) -> None:
    """With a bias in the choice where there may be one, and a factor; also gradients."""
    if kind == "sqrtsoftplus" and version < (2, 13):
        with pytest.raises(SizeError, match="'sqrtsoftplus' is none of softmax, sigmoid$"):
            forward(version, normal(2, 3), 1, score_function=kind)
        return
    logits, grad = normal(tokens, experts), normal(tokens, experts, seed=1)
    function = kind.removeprefix("pre-")
    bias = None if function == "softmax" else normal(experts, seed=2)
    given = {"score_function": function, "use_pre_softmax": kind == "pre-softmax"}
    found = forward(version, logits, topk, **given, scaling_factor=2.5, expert_bias=bias)
    scores = logits if function == "softmax" else activated(logits.double(), function) + bias
    mask = torch.zeros(tokens, experts).scatter(1, scores.topk(topk).indices, 1.0).bool()

    def probabilities(x: torch.Tensor) -> torch.Tensor:
        if kind == "softmax":
            return 2.5 * torch.softmax(x.masked_fill(~mask, -torch.inf), -1)
        if kind == "pre-softmax":
            return 2.5 * torch.softmax(x, -1) * mask
        part = activated(x, function) * mask
        return 2.5 * (part / part.sum(-1, keepdim=True) if topk > 1 else part)

    exact, (exact_grad,) = gradients(probabilities, grad, logits)
    assert torch.equal(found[1], mask) and found[1].dtype == torch.bool
    assert_near(found[0], exact)
    assert_near(backward(version, found, grad, topk, **given, scaling_factor=2.5), exact_grad)


@pytest.mark.parametrize("version", [OLD, NEW])
def test_experts_come_from_the_best_groups(version: tuple[int, ...]) -> None:
    """Four groups of two and one expert that is in none; the two best of a group are added."""
    logits = normal(7, 9)
    logits[:, 8] = 99.0
    found = forward(version, logits, 4, num_groups=4, group_topk=2, score_function="sigmoid")
    for token, scores in enumerate(logits.sigmoid()):
        totals = [float(scores[2 * group : 2 * group + 2].sum()) for group in range(4)]
        best = sorted(range(4), key=lambda group: -totals[group])[:2]
        wanted = sorted(2 * group + member for group in best for member in range(2))
        assert found[1][token].nonzero()[:, 0].tolist() == wanted
    with pytest.raises(SizeError, match="topk=3, num_groups=4 and group_topk=2 differ"):
        forward(version, logits, 3, num_groups=4, group_topk=2)


def test_equal_scores_are_chosen_as_32_lanes_compare_in_pairs() -> None:
    """Lanes with even numbers before odd ones, and so on; since 2.15 not for 16 and more."""
    logits = torch.zeros(1, 64)
    chosen = forward(NEW, logits, 4)[1][0].nonzero()[:, 0].tolist()
    assert chosen == [0, 16, 32, 48]
    chosen = forward((2, 14), logits, 16)[1][0].nonzero()[:, 0].tolist()
    assert chosen == sorted([*range(0, 32, 4), *range(32, 64, 4)])
    assert forward((2, 15), logits, 16)[1][0].nonzero()[:, 0].tolist() == list(range(16))


def test_routing_maps_as_bits_and_as_indices() -> None:
    """Leading dims stay, bit e % 8 of byte e // 8 is expert e, and gradients are the same."""
    logits, grad = normal(2, 3, 11), normal(2, 3, 11, seed=1)
    plain = forward(NEW, logits, 3)
    bits = forward(NEW, logits, 3, routing_map_format=1)
    assert bits[1].shape == (2, 3, 2) and bits[1].dtype == torch.uint8
    for expert in range(11):
        assert torch.equal(bits[1][..., expert // 8] >> (expert % 8) & 1, plain[1][..., expert])
    indices = torch.empty(2, 3, 3, dtype=torch.int16)
    dense = forward(NEW, logits, 3, topk_indices=indices)
    assert dense[1] is indices
    assert torch.equal(plain[1].int(), torch.zeros(2, 3, 11).int().scatter(-1, indices.long(), 1))
    wanted = backward(NEW, plain, grad, 3)
    assert torch.equal(backward(NEW, bits, grad, 3, routing_map_format=1), wanted)
    assert torch.equal(backward(NEW, dense, grad, 3, use_dense_indices=True), wanted)


@pytest.mark.parametrize("version", [OLD, (2, 13), NEW])
def test_where_bf16_is_rounded(version: tuple[int, ...]) -> None:
    """Up to 2.12 after each step; then results alone, and what backward takes is in FP32."""
    logits = normal(6, 40).bfloat16()
    probs, routing_map, intermediate = forward(version, logits, 5, score_function="sigmoid")
    exact = logits.double().sigmoid() * routing_map
    exact = exact / exact.sum(-1, keepdim=True)
    assert probs.dtype == torch.bfloat16
    is_old = version < (2, 13)
    assert intermediate.dtype == (torch.bfloat16 if is_old else torch.float32)
    assert torch.equal(probs, exact.bfloat16()) != is_old
    assert (probs - exact).abs().max() <= 2**-6


@pytest.mark.parametrize("version", [(2, 6), OLD, (2, 13), (2, 14), (2, 17), NEW])
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("topk", [1, 3])
def test_scores_of_all_experts(topk: int, function: str, version: tuple[int, ...]) -> None:
    """Those of sigmoid are divided by their sum, up to 2.13 with several experts alone."""
    if function == "sqrtsoftplus" and version < (2, 13):
        return
    logits, grad = normal(5, 35), normal(5, 35, seed=1)

    def scores(x: torch.Tensor) -> torch.Tensor:
        if function == "softmax":
            return torch.softmax(x, -1)
        out = activated(x, function)
        is_divided = topk > 1 or version >= (2, 14)
        return out / out.sum(-1, keepdim=True) if is_divided else out

    exact, (exact_grad,) = gradients(scores, grad, logits)
    known = kernels(version)
    found, routing_map, intermediate = known["fused_score_for_moe_aux_loss_fwd"](
        logits=logits, topk=topk, score_function=function
    )
    assert_near(found, exact)
    best = exact.topk(topk).indices.sort().values
    assert torch.equal(routing_map.nonzero()[:, 1].view(5, topk), best)
    bwd = known["fused_score_for_moe_aux_loss_bwd"]
    into = torch.empty_like(logits)
    given = {"num_tokens": 5, "num_experts": 35, "intermediate_output": intermediate, "topk": topk,
             "grad_scores": grad, "grad_logits": into, "score_function": function}  # fmt: skip
    made = bwd(**{k: given[k] for k in inspect.signature(bwd).parameters if k != "release"})
    assert_near(into if made is None else made, exact_grad)


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_that_balances_experts(dtype: torch.dtype, version: tuple[int, ...]) -> None:
    """Experts may have no token; several sequences may lie beside each other."""
    probs, tokens = normal(6, 8).abs().to(dtype), torch.tensor([3, 0, 5, 1, 0, 0, 9, 2])
    known = kernels(version)
    sizes = {"num_experts": 4, "num_rows": 6, "num_cols": 8, "topk": 2, "coeff": 0.01}
    for name, total in (("fwd", 24), ("fwd_graph_safe", torch.tensor(24))):
        loss, buffer = known[f"fused_moe_aux_loss_{name}"](
            probs=probs, tokens_per_expert=tokens, total_num_tokens=total, **sizes
        )
        factor = 4 * 0.01 / 2 / 24 / 24
        exact = factor * (probs.double().sum(0) * tokens).sum()
        assert loss.dtype == dtype and loss.shape == ()
        assert abs(loss.double() - exact) <= exact * (2**-20 if dtype == torch.float32 else 2**-8)
    grad = known["fused_moe_aux_loss_bwd"](
        Const_buf=buffer, tokens_per_expert=tokens, num_rows=6, num_cols=8,
        grad_aux_loss=torch.tensor(3.0, dtype=dtype),
    )  # fmt: skip
    wanted = (3.0 * factor * tokens.double()).expand(6, 8)
    assert grad.dtype == dtype
    assert ((grad - wanted).abs() <= wanted * (2**-20 if dtype == torch.float32 else 2**-8)).all()
    with pytest.raises(SizeError, match="total_num_tokens=0"):
        known["fused_moe_aux_loss_fwd"](probs, tokens, 0, **sizes)


def test_the_router_s_sums_are_those_of_32_lanes() -> None:
    """Numbers 0, 32 and 64 are added first: 1 is lost beside 2^24 in its own lane alone."""
    x = torch.zeros(1, 96)
    x[0, 0], x[0, 32], x[0, 1], x[0, 33] = 2.0**24, 1.0, 1.0, 1.0
    assert router._sum(x).item() == 2.0**24 + 2


@pytest.mark.parametrize("logits, topk", [((0, 4), 1), ((3, 4), 5), ((3, 4), 0)])
def test_a_choice_that_cannot_be_is_refused(logits: tuple[int, ...], topk: int) -> None:
    with pytest.raises(SizeError, match=f"there are no {topk} experts for each token"):
        forward(NEW, torch.zeros(logits), topk)
    with pytest.raises(SizeError, match="expert_bias is not for softmax"):
        forward(NEW, torch.zeros(2, 4), 1, expert_bias=torch.zeros(4))
