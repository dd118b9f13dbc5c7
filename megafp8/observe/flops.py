"""Count model FLOPs: the arithmetic that training on one token needs, whatever the hardware does.

A GEMM of an [M, K] with a [K, N] matrix costs 2 M K N. The backward pass runs two GEMMs of the
forward one's size, so forward + backward is three times forward. Only matrix products count (norms,
softmax, activations and the optimizer are left out), and recomputed activations do not: that makes
the number comparable between frameworks ("model FLOPs", as opposed to "hardware FLOPs").

Attention may be counted in two ways. `full` counts every one of the S x S scores, as most published
throughput tables do; `causal` counts the half that a causal mask leaves, or the part of it that a
window leaves in layers with one. Reports show both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megafp8.specs import GPTSpec
from megafp8.specs.layer import model_linears, num_experts
from megafp8.specs.model import twice_seen

AttentionCount = Literal["causal", "full"]

# One multiply and one add; the output GEMM, then grad_input and grad_weight.
_FLOPS_PER_MAC = 2
_GEMMS_PER_LINEAR = 3


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Hold the FLOPs per token, forward + backward, of each kind of GEMM."""

    linear: float  # the linears of every layer: the GEMMs that FP8 runs
    head: float  # hidden state times vocabulary: stays in the compute dtype
    attention: float  # the scores, and their product with the values
    router: float = 0.0  # the logits of experts: stay in FP32

    @property
    def total(self) -> float:
        """Return the FLOPs per token of all kinds."""
        return self.linear + self.head + self.attention + self.router


def gemm_flops_per_token(
    spec: GPTSpec, attention: AttentionCount = "causal", *, seq_length: int | None = None
) -> ModelFlops:
    """Return the FLOPs per token of each kind of GEMM, forward + backward.

    `seq_length` is `spec.max_position_embeddings` if it is not given.

    Raises:
        ValueError: The vocabulary is not known yet (`spec.vocab_size` is 0 before the data is
            prepared), or `attention` is neither `causal` nor `full`.
    """
    if spec.vocab_size <= 0:
        raise ValueError(f"vocab_size={spec.vocab_size}: prepare the data before counting FLOPs")
    if attention not in ("causal", "full"):
        raise ValueError(f"attention={attention!r}: count it as 'causal' or 'full'")
    layers = range(spec.num_layers)
    seq = spec.max_position_embeddings if seq_length is None else seq_length
    in_linears = sum(len(linear.products) * linear.macs for linear in model_linears(spec))
    seen = [seq if attention == "full" else _mean_seen(spec, layer, seq) for layer in layers]
    per_mac = _GEMMS_PER_LINEAR * _FLOPS_PER_MAC
    return ModelFlops(
        linear=float(_FLOPS_PER_MAC * in_linears),
        head=float(per_mac * spec.hidden_size * spec.vocab_size),
        attention=float(per_mac * 2 * spec.query_size * sum(seen)),
        router=float(
            per_mac * sum(num_experts(spec, layer) for layer in layers) * spec.hidden_size
        ),
    )


def _mean_seen(spec: GPTSpec, layer: int, seq: int) -> float:
    """Return how many tokens a query sees in the mean, of its own one a half."""
    return twice_seen(seq, spec.window_of(layer)) / 2 / seq


def flops_per_token(
    spec: GPTSpec, attention: AttentionCount = "causal", *, seq_length: int | None = None
) -> float:
    """Return all model FLOPs per token, forward + backward.

    For a model without query groups, gates and heads of a set width this is `L(24 h² + 12 h f) + 6
    V h + {6|12} L h S`.
    """
    return gemm_flops_per_token(spec, attention, seq_length=seq_length).total
