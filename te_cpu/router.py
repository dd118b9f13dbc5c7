"""Choose experts for tokens and compute their probabilities, and the loss that balances experts.

Up to 2.12 each step is rounded to the dtype of the logits, and divisions are in FP64. From 2.13 on
all is in FP32, and only results are rounded; scores and what the backward pass takes stay in FP32.
Sums are in the order of the kernels' 32 lanes. What they do with NaN, and where a token has fewer
finite scores than it takes experts, is not imitated.
"""

# T tokens, of all leading dims  E experts  K experts of a token

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from te_cpu.enums import RoutingMapFormat
from te_cpu.errors import SizeError

EPSILON = 1e-20
LANES = 32
RADIX_TOPK = 16
"""From so many experts of a token on, another kernel chooses them since 2.15."""
Release = tuple[int, ...]


def fused_topk_with_score_function_fwd(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: int = 0,
    topk_indices: torch.Tensor | None = None,
    *,
    release: Release,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return probabilities [T, E], the routing map, and what the backward pass takes.

    With `topk_indices` [T, K] the chosen experts are written into it, and it is the map. A bias
    [E] counts in the choice alone.
    """
    _check(logits, topk, score_function, release)
    if expert_bias is not None and score_function == "softmax":
        raise SizeError("fused_topk_with_score_function: expert_bias is not for softmax")
    kept, wide = _dtypes(logits, release)
    scores = intermediate = logits.detach().flatten(0, -2).to(kept)
    if score_function != "softmax":
        scores = _activated(scores, score_function)
        intermediate = scores if score_function == "sigmoid" else intermediate
    elif use_pre_softmax:
        scores = intermediate = _softmax(scores)
    bias = None if expert_bias is None else expert_bias.detach().to(wide)
    biased = scores if bias is None else (scores.to(wide) + bias).to(kept)
    chosen = _chosen(biased, topk, num_groups, group_topk or 0, release)
    picked = biased.gather(1, chosen)
    if bias is not None:
        picked = (picked.to(wide) - bias[chosen]).to(kept)
    if score_function == "softmax" and not use_pre_softmax:
        picked = _softmax(picked)
        intermediate = torch.full_like(scores, -torch.inf).scatter(1, chosen, picked)
    elif score_function != "softmax" and topk > 1:
        picked = (picked.to(wide) / (_sum(picked).to(wide) + EPSILON)).to(kept)
    picked = (_factor(scaling_factor) * picked.to(wide)).to(logits.dtype)
    probs = torch.zeros_like(scores, dtype=logits.dtype).scatter(1, chosen, picked)
    routing_map = _map(chosen, logits, routing_map_format, topk_indices)
    return probs.view(logits.shape), routing_map, intermediate.view(logits.shape)


def fused_topk_with_score_function_bwd(
    routing_map: torch.Tensor,
    intermediate_output: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = 0,
) -> None:
    """Write the gradient of the logits [T, E] into `grad_logits`."""
    wide = torch.float32
    experts = grad_probs.shape[-1]
    if use_dense_indices:
        chosen = routing_map.long().flatten(0, -2)
        empty = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device)
        routed = empty.scatter(1, chosen, True)
    else:
        routed = _unpacked(routing_map.flatten(0, -2), experts, routing_map_format)
    grad_logits.copy_(
        _topk_gradient(
            routed, intermediate_output, grad_probs, topk, use_pre_softmax, scaling_factor,
            score_function, wide,
        ).view(grad_logits.shape)
    )  # fmt: skip


def fused_topk_with_score_function_bwd_to_2_17(
    routing_map: torch.Tensor,
    intermediate_output: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    routing_map_format: int = 0,
) -> None:
    """Write the gradient of the logits; the chosen experts are a map, and no dense indices."""
    fused_topk_with_score_function_bwd(
        routing_map, intermediate_output, grad_probs, grad_logits, topk, use_pre_softmax,
        scaling_factor, score_function, False, routing_map_format,
    )  # fmt: skip


def fused_topk_with_score_function_bwd_to_2_16(
    num_tokens: int,
    num_experts: int,
    routing_map: torch.Tensor,
    intermediate_output: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
) -> None:
    """Write the gradient of the logits; the map has a byte for each expert."""
    fused_topk_with_score_function_bwd(
        routing_map, intermediate_output, grad_probs, grad_logits, topk, use_pre_softmax,
        scaling_factor, score_function, False, 0,
    )  # fmt: skip


def fused_topk_with_score_function_bwd_to_2_12(
    num_tokens: int,
    num_experts: int,
    routing_map: torch.Tensor,
    intermediate_output: torch.Tensor,
    grad_probs: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
) -> torch.Tensor:
    """Return the gradient of the logits [T, E]."""
    return _topk_gradient(
        routing_map, intermediate_output, grad_probs, topk, use_pre_softmax, scaling_factor,
        score_function, torch.float64,
    )  # fmt: skip


def _topk_gradient(
    routed: torch.Tensor,
    intermediate: torch.Tensor,
    grad_probs: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    wide: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of the logits [T, E]; `routed` [T, E] says which experts were chosen."""
    act = intermediate.flatten(0, -2)
    grad = grad_probs.detach().flatten(0, -2).to(wide) * _factor(scaling_factor)
    grad = grad.to(act.dtype).masked_fill(~routed, 0.0)
    if score_function == "softmax":
        grad = _softmax_gradient(grad, act if use_pre_softmax else act.masked_fill(~routed, 0.0))
        return grad
    if topk > 1:
        out = _activated(act, score_function) if score_function == "sqrtsoftplus" else act
        grad = _normalized_gradient(grad, out.masked_fill(~routed, 0.0), wide)
        grad = grad.masked_fill(~routed, 0.0)
    return _activation_gradient(grad, act, score_function, wide)


def fused_score_for_moe_aux_loss_fwd(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: int = 0,
    *,
    release: Release,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores of all experts [T, E], the routing map, and what the backward pass takes.

    Sigmoid's and sqrtsoftplus's scores are divided by their sum, up to 2.13 with several experts
    of a token alone.
    """
    _check(logits, topk, score_function, release)
    kept, wide = _dtypes(logits, release)
    scores = intermediate = logits.detach().flatten(0, -2).to(kept)
    if score_function == "softmax":
        scores = intermediate = _softmax(scores)
    else:
        scores = _activated(scores, score_function)
        intermediate = scores if score_function == "sigmoid" else intermediate
        if topk > 1 or release >= (2, 14):
            scores = (scores.to(wide) / (_sum(scores).to(wide) + EPSILON)).to(kept)
    chosen = _chosen(scores, topk, None, 0, release)
    routing_map = _map(chosen, logits, routing_map_format, None)
    return scores.view(logits.shape), routing_map, intermediate.view(logits.shape)


def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    score_function: str,
    *,
    release: Release,
) -> None:
    """Write the gradient of the logits [T, E] into `grad_logits`."""
    found = _score_gradient(intermediate_output, grad_scores, topk, score_function, release)
    grad_logits.copy_(found.view(grad_logits.shape))


def fused_score_for_moe_aux_loss_bwd_to_2_16(
    num_tokens: int,
    num_experts: int,
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    score_function: str,
    *,
    release: Release,
) -> None:
    """Write the gradient of the logits [T, E] into `grad_logits`."""
    fused_score_for_moe_aux_loss_bwd(
        intermediate_output, grad_scores, grad_logits, topk, score_function, release=release
    )


def fused_score_for_moe_aux_loss_bwd_to_2_12(
    num_tokens: int,
    num_experts: int,
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    topk: int,
    score_function: str,
    *,
    release: Release,
) -> torch.Tensor:
    """Return the gradient of the logits [T, E]."""
    return _score_gradient(intermediate_output, grad_scores, topk, score_function, release)


def _score_gradient(
    intermediate: torch.Tensor,
    grad_scores: torch.Tensor,
    topk: int,
    score_function: str,
    release: Release,
) -> torch.Tensor:
    """Return the gradient of the logits [T, E], in the dtype of `intermediate`.

    Before 2.13 Transformer Engine divides by sums in FP64. From 2.14 on it normalizes the scores of
    a single expert, too.
    """
    act = intermediate.flatten(0, -2)
    wide = torch.float64 if release < (2, 13) else torch.float32
    grad = grad_scores.detach().flatten(0, -2).to(act.dtype)
    if score_function == "softmax":
        return _softmax_gradient(grad, act)
    if topk > 1 or release >= (2, 14):
        out = _activated(act, score_function) if score_function == "sqrtsoftplus" else act
        grad = _normalized_gradient(grad, out, wide)
    return _activation_gradient(grad, act, score_function, wide)


def fused_moe_aux_loss_fwd(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
    *,
    release: Release,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, 0-d, and its coefficient, 0-d FP32.

    `num_cols` may be a multiple of `num_experts`, for sequences that are balanced apart.
    """
    wide = torch.float64 if release < (2, 13) else torch.float32
    total = float(total_num_tokens)
    if topk <= 0 or total <= 0 or num_experts <= 0:
        raise SizeError(
            f"fused_moe_aux_loss: topk={topk}, total_num_tokens={int(total)} and "
            f"num_experts={num_experts} must be above 0"
        )
    factor = torch.tensor(coeff, device=probs.device) * num_experts / topk / total / total
    loss = (probs.detach().to(wide).sum(0) * tokens_per_expert.to(wide)).sum()
    return (loss * factor).to(probs.dtype), factor


def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor,  # noqa: N803  # Transformer Engine's name
    tokens_per_expert: torch.Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: torch.Tensor,
    *,
    release: Release,
) -> torch.Tensor:
    """Return the gradient of `probs` [T, E]: the same for all tokens."""
    wide = torch.float64 if release < (2, 13) else torch.float32
    row = Const_buf.to(wide) * tokens_per_expert.to(wide) * grad_aux_loss.detach().to(wide)
    return row.to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()


def _check(logits: torch.Tensor, topk: int, score_function: str, release: Release) -> None:
    """Raise SizeError where the kernels would refuse."""
    functions = ["softmax", "sigmoid", *(["sqrtsoftplus"] if release >= (2, 13) else [])]
    if score_function not in functions:
        raise SizeError(f"score_function={score_function!r} is none of {', '.join(functions)}")
    if not logits.numel() or not 0 < topk <= logits.shape[-1]:
        raise SizeError(f"there are no {topk} experts for each token in {list(logits.shape)}")


def _dtypes(logits: torch.Tensor, release: Release) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype to which steps are rounded, and that of divisions."""
    is_old = release < (2, 13)
    return (logits.dtype, torch.float64) if is_old else (torch.float32, torch.float32)


def _factor(scaling_factor: float | None) -> float:
    return float(torch.tensor(1.0 if scaling_factor is None else scaling_factor, device="cpu"))


def _activated(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    x = logits.float()
    if score_function == "sigmoid":
        return (1.0 / (1.0 + (-x).exp())).to(logits.dtype)
    return torch.where(x > 20.0, x, x.exp().log1p()).sqrt()


def _activation_gradient(
    grad: torch.Tensor, act: torch.Tensor, score_function: str, wide: torch.dtype
) -> torch.Tensor:
    """`act` is sigmoid's result, and for sqrtsoftplus the logits."""
    if score_function == "sigmoid":
        out = act.to(wide)
        return (grad.to(wide) * out * (1 - out)).to(grad.dtype)
    slope = torch.where(act > 20.0, 1.0, _activated(act, "sigmoid"))
    return grad * (slope / (2.0 * _activated(act, score_function) + EPSILON))


def _softmax(x: torch.Tensor) -> torch.Tensor:
    raised = (x.float() - x.float().amax(-1, keepdim=True)).exp().to(x.dtype)
    return (raised.float() / _sum(raised).float()).to(x.dtype)


def _softmax_gradient(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    product = (grad.float() * out.float()).to(grad.dtype)
    return (out.float() * (grad.float() - _sum(product).float())).to(grad.dtype)


def _normalized_gradient(grad: torch.Tensor, out: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return the gradient of `out` where that was divided by its sum."""
    total = _sum(out).to(wide) + EPSILON
    product = _sum((grad.to(wide) * out.to(wide)).to(grad.dtype)).to(wide)
    return (grad.to(wide) / total - product / (total * total)).to(grad.dtype)


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Return sums [T, 1] in the dtype of `x`, added in the order of Transformer Engine's kernel.

    Each of 32 lanes adds every 32nd number; then half of the lanes add to the others, five times.
    """
    rows = F.pad(x, (0, -x.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    total: torch.Tensor = rows[:, 0]
    for row in rows.unbind(1)[1:]:
        total = total + row
    while total.shape[1] > 1:
        total = total[:, : total.shape[1] // 2] + total[:, total.shape[1] // 2 :]
    return total


def _chosen(
    scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int, release: Release
) -> torch.Tensor:
    """Return the experts of each token, int64 [T, K].

    With groups, those of the `group_topk` groups whose best topk / group_topk experts have the
    largest sums.
    """
    by_number = release >= (2, 15) and topk >= RADIX_TOPK
    if group_topk <= 0:
        return _largest(scores, topk, by_number)
    if not num_groups or topk % group_topk or not group_topk <= num_groups <= scores.shape[1]:
        raise SizeError(f"topk={topk}, num_groups={num_groups} and group_topk={group_topk} differ")
    size = scores.shape[1] // num_groups
    grouped = scores[:, : size * num_groups].unflatten(1, (num_groups, size))
    best = _largest(grouped.flatten(0, 1), topk // group_topk, by_number)
    parts = grouped.flatten(0, 1).gather(1, best).view(len(scores), num_groups, -1)
    total = parts[..., 0]
    for part in parts.unbind(-1)[1:]:
        total = total + part
    groups = _largest(total, group_topk, by_number)
    is_open = torch.zeros_like(total, dtype=torch.bool).scatter(1, groups, True)
    is_open = F.pad(is_open.repeat_interleave(size, 1), (0, scores.shape[1] - size * num_groups))
    return _largest(scores.masked_fill(~is_open, -torch.inf), topk, by_number)


def _largest(x: torch.Tensor, count: int, by_number: bool) -> torch.Tensor:
    """Return the places of the largest numbers [T, count], the largest first.

    Of equal ones the lowest place comes first or, as when 32 lanes compare in pairs, that whose
    lane is the lowest with its bits in reverse order.
    """
    order = torch.arange(x.shape[1], device=x.device)
    if not by_number:
        places = range(x.shape[1])
        lanes = sorted(places, key=lambda place: (f"{place % LANES:05b}"[::-1], place))
        order = torch.tensor(lanes, device=x.device)
    return order[x[:, order].sort(dim=1, descending=True, stable=True).indices[:, :count]]


def _map(
    chosen: torch.Tensor, logits: torch.Tensor, form: int, indices: torch.Tensor | None
) -> torch.Tensor:
    """Return the routing map of the experts that were chosen, with the leading dims of `logits`.

    A bitmap has eight experts in a byte, the first one in its lowest bit.
    """
    if indices is not None:
        return indices.copy_(chosen.view(indices.shape))
    experts = logits.shape[-1]
    routed = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device)
    routed = routed.scatter(1, chosen, True)
    if int(form) == int(RoutingMapFormat["BITMAP_U8"]):
        bits = F.pad(routed.int(), (0, -experts % 8)).unflatten(1, (-1, 8))
        routed = (bits << torch.arange(8, device=bits.device)).sum(-1).to(torch.uint8)
    return routed.view(*logits.shape[:-1], -1)


def _unpacked(routing_map: torch.Tensor, experts: int, form: int) -> torch.Tensor:
    """Return the map [T, E] as booleans."""
    if int(form) != int(RoutingMapFormat["BITMAP_U8"]):
        return routing_map.bool()
    bits = routing_map[..., None].int() >> torch.arange(8, device=routing_map.device)
    return (bits & 1).flatten(1)[:, :experts].bool()


def kernels(release: Release) -> dict[str, Callable[..., Any]]:
    """Return the functions by name, as this release calls them."""
    topk_bwd: Callable[..., Any] = fused_topk_with_score_function_bwd
    score_bwd: Callable[..., Any] = fused_score_for_moe_aux_loss_bwd
    if release < (2, 13):
        topk_bwd = fused_topk_with_score_function_bwd_to_2_12
        score_bwd = fused_score_for_moe_aux_loss_bwd_to_2_12
    elif release < (2, 17):
        topk_bwd = fused_topk_with_score_function_bwd_to_2_16
        score_bwd = fused_score_for_moe_aux_loss_bwd_to_2_16
    elif release < (2, 18):
        topk_bwd = fused_topk_with_score_function_bwd_to_2_17
    told: dict[str, Callable[..., Any]] = {
        "fused_topk_with_score_function_fwd": fused_topk_with_score_function_fwd,
        "fused_score_for_moe_aux_loss_fwd": fused_score_for_moe_aux_loss_fwd,
        "fused_score_for_moe_aux_loss_bwd": score_bwd,
        "fused_moe_aux_loss_fwd": fused_moe_aux_loss_fwd,
        "fused_moe_aux_loss_fwd_graph_safe": fused_moe_aux_loss_fwd,
        "fused_moe_aux_loss_bwd": fused_moe_aux_loss_bwd,
    }
    found: dict[str, Callable[..., Any]] = {
        name: functools.partial(kernel, release=release) for name, kernel in told.items()
    }
    return {**found, "fused_topk_with_score_function_bwd": topk_bwd}
