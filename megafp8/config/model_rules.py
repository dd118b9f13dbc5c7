"""Which settings of the model's shape fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config.fp8_rules import size_multiple
from megafp8.config.rules import Finding, Rules, Values
from megafp8.config.sizes import hidden_step, nearest_divisors, nearest_multiples

rule = Rules()


@rule("model.hidden_size", "model.num_attention_heads", "model.kv_channels")
def _heads_share_hidden(v: Values) -> Iterator[Finding]:
    hidden, heads = v["model.hidden_size"], v["model.num_attention_heads"]
    if v["model.kv_channels"] is None and hidden % heads:
        yield Finding(
            "model.hidden_size",
            f"does not divide into model.num_attention_heads={heads}",
            f"Nearest hidden sizes: {nearest_multiples(hidden, hidden_step(v))}; "
            "or give the heads' width as model.kv_channels",
        )


@rule("model.num_attention_heads", "model.num_query_groups")
def _groups_share_heads(v: Values) -> Iterator[Finding]:
    heads, groups = v["model.num_attention_heads"], v["model.num_query_groups"]
    if groups is not None and heads % groups:
        yield Finding(
            "model.num_query_groups",
            f"does not divide model.num_attention_heads={heads}",
            f"Nearest values: {nearest_divisors(heads, groups)}",
        )


@rule("model.num_query_groups", "model.tensor_model_parallel_size")
def _tp_divides_groups(v: Values) -> Iterator[Finding]:
    groups, tp = v["model.num_query_groups"], v["model.tensor_model_parallel_size"]
    if groups is not None and groups % tp:
        yield Finding(
            "model.num_query_groups",
            f"does not divide over model.tensor_model_parallel_size={tp}",
            f"Nearest values: {nearest_multiples(groups, tp)}; "
            f"or tensor-parallel sizes: {nearest_divisors(groups, tp)}",
        )


@rule(
    "model.fp8",
    "model.fp8_recipe",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.num_query_groups",
    "model.kv_channels",
    "model.tensor_model_parallel_size",
)
def _fp8_heads(v: Values) -> Iterator[Finding]:
    """The projection's input, and QKV's output, on each rank. Without `kv_channels` the queries
    are `hidden_size` wide, which has a rule of its own."""
    heads, tp = v["model.num_attention_heads"], v["model.tensor_model_parallel_size"]
    multiple = size_multiple(v)
    groups = v["model.num_query_groups"] or heads
    if not v["model.fp8"] or heads % groups or groups % tp:
        return  # off, or said already
    if v["model.kv_channels"] is None and v["model.hidden_size"] % heads:
        return
    width = v["model.kv_channels"] or v["model.hidden_size"] // heads
    queries, qkv = heads * width // tp, (heads + 2 * groups) * width // tp
    if v["model.kv_channels"] is None:
        if queries % multiple == 0 and qkv % multiple:
            fits = [
                g
                for g in range(tp, heads + 1, tp)
                if heads % g == 0 and (heads + 2 * g) * width // tp % multiple == 0
            ]
            below, above = [g for g in fits if g < groups][-1:], [g for g in fits if g > groups][:1]
            yield Finding(
                "model.num_query_groups",
                f"FP8 GEMMs need multiples of {multiple} on each rank; queries, keys and "
                f"values of {width} each make {qkv}",
                f"Nearest values: {' or '.join(map(str, below + above))}; or model.fp8=False",
            )
        return
    if queries % multiple or qkv % multiple:
        step = math.lcm(*(multiple // math.gcd(multiple, n) for n in
                          (heads // tp, (heads + 2 * groups) // tp)))  # fmt: skip
        yield Finding(
            "model.kv_channels",
            f"FP8 GEMMs need multiples of {multiple} on each rank; {heads // tp} query heads "
            f"and {groups // tp} groups of this width make {queries} and {qkv}",
            f"Nearest values: {nearest_multiples(width, step)}; or model.fp8=False",
        )


# --- positions, activation, norms ----------------------------------------------------------------


@rule(
    "model.position_embedding_type",
    "model.rotary_percentage",
    "model.seq_len_interpolation_factor",
    "model.rotary_base",
)
def _rotary_needs_rope(v: Values) -> Iterator[Finding]:
    if v["model.position_embedding_type"] == "rope":
        return
    for name, without in (
        ("rotary_percentage", 1.0),
        ("rotary_base", 10000.0),
        ("seq_len_interpolation_factor", None),
    ):
        if v[f"model.{name}"] != without:
            yield Finding(
                f"model.{name}",
                f"means nothing with position_embedding_type={v['model.position_embedding_type']}",
                "Set model.position_embedding_type=rope, or leave it out",
            )


@rule(
    "model.position_embedding_type",
    "model.rotary_percentage",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.kv_channels",
)
def _rotary_width(v: Values) -> Iterator[Finding]:
    if v["model.position_embedding_type"] != "rope":
        return
    width = v["model.kv_channels"] or v["model.hidden_size"] // v["model.num_attention_heads"]
    size = int(width * v["model.rotary_percentage"])
    if size < 2 or size % 2:
        near = [n for n in (size - size % 2, size - size % 2 + 2) if 2 <= n <= width]
        fits = " or ".join(f"{n / width:g}" for n in near) or "none for this width"
        yield Finding(
            "model.rotary_percentage",
            f"turns {size} of the {width} features of a head; they are turned in pairs",
            f"Nearest values: {fits}",
        )


@rule("model.openai_gelu", "model.activation")
def _openai_gelu_needs_gelu(v: Values) -> Iterator[Finding]:
    if v["model.openai_gelu"] and v["model.activation"] != "gelu":
        yield Finding(
            "model.openai_gelu",
            f"means nothing with model.activation={v['model.activation']}",
            "Set model.activation=gelu, or leave it out",
        )


@rule("model.fp32_residual_connection", "model.transformer_block_type")
def _fp32_residual_needs_pre_ln(v: Values) -> Iterator[Finding]:
    if v["model.fp32_residual_connection"] and v["model.transformer_block_type"] == "post_ln":
        yield Finding(
            "model.fp32_residual_connection",
            "with model.transformer_block_type=post_ln the residual stream is what norms give",
            "Set model.transformer_block_type=pre_ln, or leave it out",
        )


# --- recomputation -------------------------------------------------------------------------------


@rule(
    "model.activations_checkpoint_granularity",
    "model.activations_checkpoint_method",
    "model.activations_checkpoint_num_layers",
    "model.num_layers",
)
def _recomputation_fits(v: Values) -> Iterator[Finding]:
    granularity = v["model.activations_checkpoint_granularity"]
    method = v["model.activations_checkpoint_method"]
    count, layers = v["model.activations_checkpoint_num_layers"], v["model.num_layers"]
    if granularity is None:
        for name, value in (("method", method), ("num_layers", count)):
            if value is not None:
                yield Finding(
                    f"model.activations_checkpoint_{name}",
                    "means nothing without model.activations_checkpoint_granularity",
                    "Set model.activations_checkpoint_granularity=selective or full, or leave it "
                    "out",
                )
        return
    if granularity == "full" and method is None:
        yield Finding(
            "model.activations_checkpoint_method",
            "must be given with model.activations_checkpoint_granularity=full",
            "Give uniform (all layers) or block (the first "
            "model.activations_checkpoint_num_layers)",
        )
    if method == "block" and count is None:
        yield Finding(
            "model.activations_checkpoint_num_layers",
            "must be given with model.activations_checkpoint_method=block",
            f"Give from 1 to {layers}",
        )
    if count is not None and count > layers:
        yield Finding(
            "model.activations_checkpoint_num_layers",
            f"is more than model.num_layers={layers}",
            f"Give from 1 to {layers}",
        )
    if granularity == "selective" and method != "block" and count is not None:
        yield Finding(
            "model.activations_checkpoint_num_layers",
            "means nothing where attention is computed again in all layers",
            "Set model.activations_checkpoint_method=block, or leave it out",
        )
