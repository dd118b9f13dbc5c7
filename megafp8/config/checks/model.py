"""Check that settings of the model's shape, its data and its tokenizer fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from megafp8.config.base_model import STARTS
from megafp8.config.data_values import prefixes_in
from megafp8.config.keys import Values
from megafp8.config.rules import Finding, Rules, nearest_divisors, nearest_multiples
from megafp8.config.values import size_multiple
from megafp8.specs.data import BUILTIN_CORPUS, MOCK_DATA

rule = Rules()

TP = "model.tensor_model_parallel_size"
HIGH = "model.rope_high_freq_factor"
WINDOW, SKIPS = "model.window_size", "model.window_attn_skip_freq"


def other_sizes(v: Values, nearest: str) -> str:
    """Return what a hint proposes for a size of FP8: the nearest ones, unless a model has it."""
    if not _starts_from_a_model(v):
        return f"Nearest values: {nearest}"
    fewer = "fewer tensor-parallel ranks, or " if v[TP] > 1 else ""
    return f"The model that the run starts from has this size: give {fewer}another model.fp8_recipe"


def tp_divides(v: Values, key: str) -> Iterator[Finding]:
    """Check that a size is a multiple of the tensor-parallel ranks, or null."""
    value, tp = v[key], v[TP]
    if value is not None and value % tp:
        others = f"Nearest values: {nearest_multiples(value, tp)}; or"
        if _starts_from_a_model(v):
            others = "The model that the run starts from has this value. Possible are"
        yield Finding(
            key,
            f"is not a multiple of {TP}={tp}",
            f"{others} tensor-parallel sizes: {nearest_divisors(value, tp)}",
        )


for _size in (
    "model.num_query_groups",
    "model.num_attention_heads",
    "model.ffn_hidden_size",
    "model.moe_shared_expert_intermediate_size",
):
    rule(_size, TP)(partial(tp_divides, key=_size))


def _starts_from_a_model(v: Values) -> bool:
    return any(v.get(key) for key in STARTS)


def hidden_step(v: Values) -> int:
    """Return the number that a hidden size is a multiple of, as far as the other keys are known."""
    heads, tp = v.get("model.num_attention_heads", 1), v.get("model.tensor_model_parallel_size", 1)
    if v.get("model.kv_channels"):
        heads = 1  # the width of heads does not depend on the hidden size
    return math.lcm(heads, size_multiple(v) * tp if v.get("model.fp8") else 1)


@rule("model.hidden_size", "model.num_attention_heads", "model.kv_channels")
def _heads_share_hidden(v: Values) -> Iterator[Finding]:
    hidden, heads = v["model.hidden_size"], v["model.num_attention_heads"]
    if v["model.kv_channels"] is None and hidden % heads:
        yield Finding(
            "model.hidden_size",
            f"is not a multiple of model.num_attention_heads={heads}",
            f"Nearest hidden sizes: {nearest_multiples(hidden, hidden_step(v))}; "
            "or set the width of a head with model.kv_channels",
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
    """Check the sizes of QKV's output and of the projection's input on each rank.

    Without `kv_channels` the projection's input is `hidden_size` wide, which `_fp8_hidden` checks.
    """
    heads, tp = v["model.num_attention_heads"], v["model.tensor_model_parallel_size"]
    multiple = size_multiple(v)
    groups = v["model.num_query_groups"] or heads
    if not v["model.fp8"] or heads % groups or groups % tp:
        return  # FP8 is off, or another rule reports the sizes
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
                f"values have {qkv} features there, with heads of {width}",
                f"{other_sizes(v, ' or '.join(map(str, below + above)))}; or model.fp8=False",
            )
        return
    if queries % multiple or qkv % multiple:
        step = math.lcm(*(multiple // math.gcd(multiple, n) for n in
                          (heads // tp, (heads + 2 * groups) // tp)))  # fmt: skip
        yield Finding(
            "model.kv_channels",
            f"FP8 GEMMs need multiples of {multiple} on each rank; {heads // tp} query heads of "
            f"this width have {queries} features, and {qkv} with {groups // tp} groups of keys and "
            "values",
            f"{other_sizes(v, nearest_multiples(width, step))}; or model.fp8=False",
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
            f"rotates {size} of the {width} features of a head, and RoPE rotates pairs of features",
            f"Nearest values: {fits}",
        )


@rule("model.scale_positional_embedding", "model.rope_low_freq_factor", HIGH)
def _frequencies_between(v: Values) -> Iterator[Finding]:
    low = v["model.rope_low_freq_factor"]
    if v["model.scale_positional_embedding"] and v[HIGH] <= low:
        yield Finding(HIGH, f"is not above model.rope_low_freq_factor={low:g}", "Give more")


@rule("model.yarn_rotary_scaling_factor", "model.yarn_beta_fast", "model.yarn_beta_slow")
def _yarn_turns_between(v: Values) -> Iterator[Finding]:
    fast, slow = v["model.yarn_beta_fast"], v["model.yarn_beta_slow"]
    if v["model.yarn_rotary_scaling_factor"] is not None and fast <= slow:
        yield Finding("model.yarn_beta_fast", f"is not above yarn_beta_slow={slow:g}", "Give more")


@rule(WINDOW, SKIPS, "model.num_layers")
def _window_skips_some_layers(v: Values) -> Iterator[Finding]:
    skips, layers = v[SKIPS], v["model.num_layers"]
    if v[WINDOW] is None or skips is None:
        return
    if isinstance(skips, int):
        if not 2 <= skips <= layers:
            which = "no layer has" if skips == 1 else f"all {layers} layers have"
            reason = "is not at least 1" if skips < 1 else f"says that {which} the window"
            yield Finding(SKIPS, reason, f"Give from 2 to {layers}, or leave it out")
    elif len(skips) != layers:
        hint = f"Give {layers} numbers, or every how many layers one has no window"
        yield Finding(SKIPS, f"has {len(skips)} numbers for model.num_layers={layers}", hint)
    elif len(set(skips)) == 1:
        which, key = ("all layers have", SKIPS) if skips[0] else ("no layer has", WINDOW)
        yield Finding(SKIPS, f"says that {which} the window", f"Leave {key} out")


# --- data and tokenizer ---------------------------------------------------------------------------


@rule("model.data.data_prefix")
def _mock_data_stand_alone(v: Values) -> Iterator[Finding]:
    prefixes = prefixes_in(v["model.data.data_prefix"])
    if MOCK_DATA in prefixes and len(prefixes) > 1:
        yield Finding(
            "model.data.data_prefix",
            f"{MOCK_DATA} stands for random tokens, which cannot be mixed with other data",
            f"Give {MOCK_DATA} alone",
        )


@rule("model.tokenizer.library", "model.data.data_prefix")
def _builtin_has_its_tokenizer(v: Values) -> Iterator[Finding]:
    library = v["model.tokenizer.library"]
    if library != "builtin" and BUILTIN_CORPUS in prefixes_in(v["model.data.data_prefix"]):
        yield Finding(
            "model.tokenizer.library",
            "the built-in corpus has a tokenizer of its own",
            "Leave it out, or prepare your own text: megafp8 preprocess",
        )
