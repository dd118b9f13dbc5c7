"""Define the keys below `model` about experts, by Megatron-core's names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from megafp8.config.keys import (
    MAX_EXPERTS,
    MAX_RANKS,
    MAX_WIDTH,
    Need,
    Valid,
    above,
    at_least,
    key,
    needs,
    one_of,
    or_null,
)
from megafp8.config.values import is_layer_frequency, no_loss_type, spell_frequency

NUM_EXPERTS = "model.num_moe_experts"
LOSS, COEFF = "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"
SCORES = "model.moe_router_score_function"
EXPERTS = Need(NUM_EXPERTS, NUM_EXPERTS, lambda values: values[NUM_EXPERTS] is not None)

# Makers of the keys of the group: those of the function, and those of training alone.
expert_key = partial(key, group="experts", needs=EXPERTS, defines_function=True)
training_key = partial(key, group="experts", needs=EXPERTS)


@dataclass
class Experts:
    """Define the keys about experts and their router."""

    num_moe_experts: int | None = key(
        None,
        "Number of experts in each layer that has some; a token visits `moe_router_topk` of them. "
        "`null`: every layer has one MLP.",
        group="experts",
        defines_function=True,
        spec="model.moe.num_experts",
        valid=or_null(at_least(1, MAX_EXPERTS)),
    )
    moe_router_topk: int | None = expert_key(
        2,
        "Number of experts that a token visits: those with the highest scores, and of equal scores "
        "the lower expert. `null`: 2.",
        spec="model.moe.top_k",
        valid=or_null(at_least(1, MAX_EXPERTS)),
        spelling=lambda value: 2 if value is None else value,
    )
    moe_ffn_hidden_size: int | None = expert_key(
        None,
        "Width of an expert's inner layer. `null`: `ffn_hidden_size`, the width in layers without "
        "experts.",
        valid=or_null(at_least(1, MAX_WIDTH)),
    )
    moe_layer_freq: Any = expert_key(
        1,
        "Layers that have experts. A number N: each N-th layer, from the first one on. A list with "
        "a number for each layer: those with 1; the others, with 0, have one MLP. A text such as "
        '`"[0]*3+[1]*58"` stands for its list.',
        valid=Valid(
            'a whole number of at least 1, a list of 0 and 1, or its text as "[0]*3+[1]*58"',
            is_layer_frequency,
        ),
        spelling=spell_frequency,
    )
    moe_router_score_function: str = expert_key(
        "softmax",
        "Function of the router's logits by which experts are chosen and weighted. With `sigmoid` "
        "the weights of the chosen experts are divided by their sum.",
        spec="model.moe.score_function",
        valid=one_of(
            "softmax",
            "sigmoid",
            later=("sqrtsoftplus",),
            suggestion="Use softmax or sigmoid",
        ),
    )
    moe_router_pre_softmax: bool = expert_key(
        False,
        "Weight the chosen experts by the softmax over all experts, so that their weights add up "
        "to less than 1. False: by the softmax over the chosen ones.",
        spec="model.moe.pre_softmax",
        needs=Need(
            SCORES,
            f"{SCORES}=softmax",
            lambda values: values[SCORES] == "softmax",
        ),
    )
    moe_router_topk_scaling_factor: float | None = expert_key(
        None,
        "Number by which the weights of the chosen experts are multiplied. `null`: 1.",
        valid=or_null(above(0)),
        spelling=lambda value: None if value == 1 else value,
    )
    moe_router_enable_expert_bias: bool = expert_key(
        False,
        "Add a bias to the scores by which experts are chosen, and not to their weights. After "
        "each step the bias of an expert with fewer tokens than the mean rises by "
        "`moe_router_bias_update_rate`, and that of one with more falls (arXiv 2408.15664).",
        spec="model.moe.has_expert_bias",
    )
    moe_router_bias_update_rate: float = training_key(
        1e-3,
        "Number by which the bias of an expert changes in a step.",
        spec="model.moe.bias_update_rate",
        valid=at_least(0),
        needs=needs("model.moe_router_enable_expert_bias", True),
    )
    moe_router_load_balancing_type: Any = training_key(
        "aux_loss",
        "Loss that divides tokens evenly among experts: over the tokens of a microbatch "
        "(`aux_loss`), over those of each sequence (`seq_aux_loss`), or `none`.",
        valid=Valid(
            "aux_loss, seq_aux_loss or none",
            lambda value: value in ("aux_loss", "seq_aux_loss", "none"),
            why=no_loss_type,
            values=("aux_loss", "seq_aux_loss", "none"),
        ),
        needs=Need(
            COEFF,
            f"{COEFF} above 0",
            lambda values: values[LOSS] == "none" or (values[COEFF] or 0) > 0,
        ),
    )
    moe_aux_loss_coeff: float | None = training_key(
        0.0,
        "Number that multiplies that loss, which is 1 where experts have equal numbers of tokens "
        "and equal scores. `null` or 0: no such loss.",
        valid=or_null(at_least(0)),
        spelling=lambda value: value or 0.0,
    )
    moe_z_loss_coeff: float | None = training_key(
        None,
        "Number that multiplies the mean over tokens of the squared logsumexp of a router's logits "
        "(arXiv 2202.08906). `null` or 0: no such loss.",
        valid=or_null(at_least(0)),
        spelling=lambda value: value or None,
    )
    expert_model_parallel_size: int = key(
        1,
        "Number of ranks that divide the experts of a layer. They are consecutive ones of a "
        "pipeline stage, among those of data, tensor and context parallelism, and send each "
        "token's row to the rank of its expert and back.",
        nemo=1,
        group="ranks",
        needs=EXPERTS,
        spec="parallel.ep",
        valid=at_least(1, MAX_RANKS),
    )
    moe_shared_expert_intermediate_size: int | None = expert_key(
        None,
        "Width of an MLP that every token visits besides, in each layer that has experts. `null`: "
        "none.",
        spec="model.moe.shared_ffn_hidden_size",
        valid=or_null(at_least(1, MAX_WIDTH)),
    )
