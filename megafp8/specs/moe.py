"""Describe the experts of a model: which layers have them, and how a router chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScoreFunction = Literal["softmax", "sigmoid"]
RouterLoss = Literal["none", "aux_loss", "seq_aux_loss"]


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Describe a mixture of experts by Megatron-core's settings of the same meaning.

    A token visits the `top_k` experts of `num_experts` with the highest scores; of equal scores the
    lower expert wins. Each expert is an MLP of width `ffn_hidden_size` with the model's activation.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    layers: tuple[bool, ...]  # for each layer of the model: whether it has experts
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = False  # whether softmax is over all experts, or else over the chosen ones
    scaling_factor: float = 1.0  # multiplies the weights of the chosen experts
    has_expert_bias: bool = False  # whether a bias that follows the counts helps to choose
    bias_update_rate: float = 1e-3
    router_loss: RouterLoss = "none"  # the loss that balances the experts' tokens
    router_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0  # of the squared logsumexp of a router's logits
    shared_ffn_hidden_size: int | None = None  # of the MLP that every token visits too; None: none
