"""Check that FP8 settings fit the recipe, the sizes and the backend.

What depends on the machine or on a package's version is checked at the start of the run.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

from megafp8.config.checks.model import TP, hidden_step, other_sizes
from megafp8.config.errors import COMMAND_LINE, DEFAULT
from megafp8.config.keys import Values
from megafp8.config.precision_changes import SCHEDULE, parse_schedule
from megafp8.config.precision_spec import settings_recipe
from megafp8.config.rows import NATIVE
from megafp8.config.rules import Finding, Origins, Rules, nearest_multiples
from megafp8.config.values import (
    named_linears,
    parse_modules,
    recipes_in,
    size_multiple,
    without_effect,
)
from megafp8.specs.precision import GEMMS, Fp8Recipe
from megafp8.specs.recipes import RECIPES, find_recipe, label_of, names_where, recipes_where
from megafp8.specs.traits import TENSOR_CORE_MULTIPLE

rule = Rules()

BACKEND = "model.fp8_backend"
HYBRID = "model.fp8_hybrid"
NAMES = (
    "model.num_layers",
    "model.num_moe_experts",
    "model.moe_layer_freq",
    "model.moe_shared_expert_intermediate_size",
)
"""The keys that the names of linears depend on."""

OF_RECIPE = (
    "model.fp8",
    "model.fp8_recipe",
    "model.fp8_modules",
    "model.fp8_backend",
    "model.fp8_wgrad",
    "model.fp8_e4m3",
    HYBRID,
    "model.fp8_power_2_scale",
    "model.fp8_split_accumulator",
    "model.override_linear_precision",
    "model.first_last_layers_bf16",
    "model.num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16",
    "model.fp4_disable_rht",
    "model.fp4_disable_stochastic_rounding",
    "model.fp4_disable_2d_quantization",
)
"""The keys that the recipe of a run follows from."""


def _fp8_size(v: Values, key: str, shares: bool) -> Iterator[Finding]:
    """Check that a width suits FP8 on each rank, where tensor-parallel ranks may share it."""
    multiple, tp = size_multiple(v), v[TP] if shares else 1
    if v["model.fp8"] and v[key] is not None and v[key] % (multiple * tp):
        step = hidden_step(v) if key == "model.hidden_size" else multiple * tp
        shared = f" divided by {TP}={tp}" if tp > 1 else ""
        wider = _other_recipe(v, v[key], tp)
        yield Finding(
            key,
            f"{_products_of(v)} need multiples of {multiple} on each rank; {v[key]}{shared} is not "
            "one",
            f"{other_sizes(v, nearest_multiples(v[key], step))}{wider}{_padded(v)}; or "
            "model.fp8=False",
        )


for _key, _shares in (
    ("model.hidden_size", True),
    ("model.ffn_hidden_size", True),
    ("model.moe_ffn_hidden_size", False),
    ("model.moe_shared_expert_intermediate_size", True),
):
    rule("model.fp8", "model.fp8_recipe", _key, TP)(partial(_fp8_size, key=_key, shares=_shares))


def _products_of(v: Values) -> str:
    """Return the subject of a refusal of a size: it names the recipe if others need less."""
    large = _large(v)
    if not large:
        return "FP8 GEMMs"
    key = "model.fp8_recipe" if v["model.fp8_recipe"] in large else "model.fp8_modules"
    if large[0] in {change.precision for change in parse_schedule(v.get(SCHEDULE))}:
        key = SCHEDULE
    return f"FP8 GEMMs of {large[0]} ({key})"


def _large(v: Values) -> tuple[str, ...]:
    """Return the recipes that need larger multiples than tensor cores do, the largest first."""
    large = recipes_where(recipes_in(v), lambda traits: traits.multiple > TENSOR_CORE_MULTIPLE)
    return tuple(sorted(large, key=lambda name: -find_recipe(name).traits.multiple))


def _other_recipe(v: Values, size: int, ranks: int) -> str:
    """Return the part of a hint that names another recipe, where that accepts the size."""
    large = _large(v)
    if not large or size % (TENSOR_CORE_MULTIPLE * ranks):
        return ""
    small = recipes_where(RECIPES, lambda traits: traits.multiple <= TENSOR_CORE_MULTIPLE)
    return f"; or a recipe of multiples of {TENSOR_CORE_MULTIPLE}: {', '.join(small)}"


def _padded(v: Values) -> str:
    """Return the part of a hint that names padding, where backend and recipes can pad."""
    cannot = v.get(BACKEND) == "te" or recipes_where(recipes_in(v), lambda traits: not traits.pads)
    return "" if cannot else "; or model.pad_inner_dim=True"


@rule("model.fp8", "model.fp8_recipe", "model.micro_batch_size", "model.encoder_seq_length")
def _fp8_tokens(v: Values) -> Iterator[Finding]:
    micro, length = v["model.micro_batch_size"], v["model.encoder_seq_length"]
    multiple = size_multiple(v)
    if v["model.fp8"] and (micro * length) % multiple:
        micro_step = multiple // math.gcd(multiple, length)
        length_step = multiple // math.gcd(multiple, micro)
        yield Finding(
            "model.micro_batch_size",
            f"times model.encoder_seq_length={length} is {micro * length} tokens; "
            f"{_products_of(v)} need a multiple of {multiple}",
            f"Nearest micro batch sizes: {nearest_multiples(micro, micro_step)}; "
            f"or model.encoder_seq_length: {nearest_multiples(length, length_step)}"
            + _other_recipe(v, micro * length, 1),
        )


@rule("model.fp8_params", "model.fp8_recipe", "model.fp8_modules")
def _params_in_fp8_suffice(v: Values) -> Iterator[Finding]:
    if not v["model.fp8_params"]:
        return
    two_copies = recipes_where(recipes_in(v), lambda traits: not traits.keeps_weight)
    if two_copies:
        others = ", ".join(names_where(lambda traits: traits.keeps_weight))
        yield Finding(
            "model.fp8_params",
            f"{two_copies[0]} gives no FP8 bytes of a weight that serve both of its products"
            + _bits_of_copies(two_copies[0]),
            f"Leave it out, or use one of {others}",
        )


def _bits_of_copies(name: str) -> str:
    """Return what the copies of a weight for both products take, where BF16 takes no more."""
    bits = 8 * find_recipe(name).traits.weight_bytes(1024, 1024, GEMMS) / 1024**2
    return f": two copies take {bits:.3g} bits a weight, and BF16 takes 16" if bits >= 16 else ""


@rule("model.fp8_params", "model.reduce_amax", "trainer.devices", "trainer.num_nodes")
def _replicas_share_scales(v: Values) -> Iterator[Finding]:
    ranks = v["trainer.devices"] * v["trainer.num_nodes"]
    if v["model.fp8_params"] and not v["model.reduce_amax"] and ranks > 1:
        yield Finding(
            "model.reduce_amax",
            f"with model.fp8_params=True each of {ranks} ranks would have weights of its own",
            "Leave it out (True), or leave model.fp8_params out",
        )


@rule("model.fp8_wgrad", "model.override_linear_precision", "model.fp8_recipe")
def _products_in_fp8(v: Values) -> Iterator[Finding]:
    high = list(v["model.override_linear_precision"])
    high[2] = high[2] or not v["model.fp8_wgrad"]
    name = v["model.fp8_recipe"]
    keeps_wgrad = bool(
        recipes_where((name,), lambda traits: "grad_weight" in traits.high_precision)
    )
    if keeps_wgrad and high[2]:
        key = "model.fp8_wgrad" if not v["model.fp8_wgrad"] else "model.override_linear_precision"
        yield Finding(
            key,
            f"model.fp8_recipe={name} keeps weight gradients in high precision already",
            "Leave one of the two out",
        )
    elif all(high[:2]) and (high[2] or keeps_wgrad):
        yield Finding(
            "model.override_linear_precision",
            "leaves no product in FP8",
            "Leave one of the three in FP8, or set model.fp8=False",
        )


@rule(
    "model.first_last_layers_bf16",
    "model.num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16",
    "model.num_layers",
)
def _layers_stay_in_fp8(v: Values) -> Iterator[Finding]:
    if not v["model.first_last_layers_bf16"]:
        return
    start, end = (v[f"model.num_layers_at_{place}_in_bf16"] for place in ("start", "end"))
    if start + end >= v["model.num_layers"]:
        yield Finding(
            "model.first_last_layers_bf16",
            f"keeps {start} layers at the start and {end} at the end out of FP8, which are all "
            f"{v['model.num_layers']} layers",
            "Lower model.num_layers_at_start_in_bf16 or model.num_layers_at_end_in_bf16, or set "
            "model.fp8=False",
        )
    elif start + end == 0:
        yield Finding(
            "model.first_last_layers_bf16",
            "model.num_layers_at_start_in_bf16 and model.num_layers_at_end_in_bf16 are both 0",
            "Leave it out, or raise one of the two",
        )


@rule(
    "model.fp8_backend",
    "model.pad_inner_dim",
    "model.fp8_recipe",
    "model.hidden_size",
    "model.ffn_hidden_size",
    "model.encoder_seq_length",
    "model.micro_batch_size",
    "model.tensor_model_parallel_size",
)
def _padding_pads(v: Values) -> Iterator[Finding]:
    if v[BACKEND] == "te":  # whose layers do not pad
        return
    if not v["model.pad_inner_dim"] or recipes_where(recipes_in(v), lambda traits: not traits.pads):
        return
    tp = v["model.tensor_model_parallel_size"]
    tokens = v["model.micro_batch_size"] * v["model.encoder_seq_length"]
    of_experts = filter(None, (v.get("model.moe_ffn_hidden_size"), v.get(NAMES[-1])))
    sizes = [v["model.hidden_size"], v["model.ffn_hidden_size"], *of_experts]
    heads = [v.get("model.kv_channels"), v.get("model.num_query_groups")]
    if all(size % (TENSOR_CORE_MULTIPLE * tp) == 0 for size in sizes):
        if tokens % TENSOR_CORE_MULTIPLE == 0 and heads == [None, None]:
            yield Finding(
                "model.pad_inner_dim",
                f"has no effect, since every size is a multiple of {TENSOR_CORE_MULTIPLE}",
                "Leave it out",
            )


@rule(BACKEND, "model.fp8", "model.fp8_recipe", "model.fp8_modules")
def _torchao_has_the_recipe(v: Values) -> Iterator[Finding]:
    if not v["model.fp8"] or v[BACKEND] != "torchao":
        return
    known = names_where(lambda traits: "torchao" in traits.backends)
    foreign = list(recipes_where(recipes_in(v), lambda traits: "torchao" not in traits.backends))
    if foreign:
        yield Finding(
            "model.fp8_recipe" if foreign == [v["model.fp8_recipe"]] else "model.fp8_modules",
            f"model.fp8_backend=torchao has no {foreign[0]} recipe",
            f"Use one of {', '.join(known)}, {NATIVE}",
        )


@rule("model.fp8", "model.fp8_modules", *NAMES)
def _patterns_match(v: Values) -> Iterator[Finding]:
    """Compare with the names of the whole model: a pipeline stage may have none that match."""
    if not v["model.fp8"] or not v["model.fp8_modules"]:
        return
    names, entries = named_linears(v), v["model.fp8_modules"]
    for place, earlier in without_effect(entries, names).items():
        pattern = entries[place].partition(":")[0]
        if earlier is None:
            yield no_match("model.fp8_modules", pattern, names)
            continue
        again = f"Leave out one of the rules for {pattern}"
        yield Finding(
            "model.fp8_modules",
            f"{entries[place]} decides about no linear, since the first pattern that matches one "
            "decides",
            again if pattern == earlier else f"Write it before {earlier}, or leave it out",
        )


@rule(*OF_RECIPE)
def _rules_have_one_format(v: Values) -> Iterator[Finding]:
    names = (
        v["model.fp8_recipe"],
        *(r.precision for r in parse_modules(v["model.fp8_modules"]) or ()),
    )
    if v["model.fp8"] and len(recipes_where(names, lambda traits: traits.has_history)) > 1:
        yield from one_format("model.fp8_modules", settings_recipe(v))


def one_format(key: str, recipe: Fp8Recipe) -> Iterator[Finding]:
    """Yield that a recipe's histories have several formats of output gradients, if they have."""
    formats = recipe.histories
    if len(set(formats.values())) > 1:
        each = [f"{label_of(name)} has them in {fmt}" for name, fmt in formats.items()]
        both = all("e4m3" in find_recipe(name).traits.backward_formats for name in formats)
        yield Finding(
            key,
            f"histories of scales have one format of output gradients, and {', '.join(each)}",
            f"Use one of these recipes{', or set model.fp8_e4m3=True' if both else ''}",
        )


def no_match(key: str, pattern: str, names: Sequence[str]) -> Finding:
    """Return what is wrong with a pattern that matches no linear, with similar ones."""
    parts = dict.fromkeys(name.split(".", 2)[2] for name in names)
    ends = list(dict.fromkeys(re.sub(r"(experts)\.\d+", r"\1.*", part) for part in parts))
    short = [name.partition(".")[2] for name in ends]
    known = [*names, *(f"*.{name}" for name in ends), *short, *(f"*.{n}" for n in short)]
    known += [f"*{name}" for name in short]
    close = difflib.get_close_matches(pattern, known, n=3)
    meant = f"Did you mean {' or '.join(close)}? " if close else ""
    return Finding(
        key,
        f"the pattern {pattern} matches no linear",
        f"{meant}The linears are layers.0.attention.qkv to {names[-1]}, with the endings "
        f"{', '.join(ends)}",
    )


@rule("model.fp8", "model.fp8_recipe", "model.fp8_modules", "model.enable_cuda_graph")
def _rules_can_be_captured(v: Values) -> Iterator[Finding]:
    known = recipes_where(recipes_in(v), lambda _: True)
    in_torch = [name for name in known if not find_recipe(name).has_kernels()]
    if v["model.fp8"] and v["model.enable_cuda_graph"] and in_torch:
        yield Finding(
            "model.enable_cuda_graph",
            f"the rule of {in_torch[0]} is in torch operations, and nothing says that a graph can "
            "repeat them",
            "Leave it out, or use a built-in recipe",
        )
    random = [name for name in known if find_recipe(name).traits.is_random]
    if v["model.fp8"] and v["model.enable_cuda_graph"] and random and not in_torch:
        yield Finding(
            "model.enable_cuda_graph",
            f"{random[0]} rounds stochastically, and a graph would draw in every step what was "
            "drawn when it was captured",
            "Leave it out, or set model.fp4_disable_stochastic_rounding=True",
        )


def why_not_hybrid(v: Values) -> str | None:
    """Return why `fp8_hybrid=True` has no effect; None if it has one, or is not given.

    Files of NeMo have both formats at times, and NeMo takes E4M3, too.
    """
    if v.get("model.fp8") and v.get(HYBRID) and v.get("model.fp8_e4m3"):
        return "model.fp8_e4m3=True comes before it, as in NeMo: output gradients are in E4M3 too"
    return None


def format_notes(v: Values, origins: Origins) -> Iterator[str]:
    """Yield a line about a format that has no effect, where another one is given, too."""
    if (reason := why_not_hybrid(v)) is not None:
        yield f"no effect: {HYBRID}=True ({origins.get(HYBRID, DEFAULT)}): {reason}"


def formats_ruled_out(v: Values, origins: Origins) -> Iterator[Finding]:
    """Yield `fp8_e4m3` or `fp8_hybrid` where a recipe rules it out, or both on the command line."""
    name = v.get("model.fp8_recipe")
    if v.get("model.fp8") and v.get("model.fp8_e4m3") and name is not None:
        for main in recipes_where((name,), lambda t: "e4m3" not in t.backward_formats):
            yield Finding(
                "model.fp8_e4m3",
                f"{label_of(main)} has output gradients in E5M2 alone",
                "Leave it out (null), or give the recipe both in its backward_formats",
            )
    if not v.get("model.fp8") or not v.get("model.fp8_hybrid"):
        return
    if name is not None and recipes_where((name,), lambda traits: traits.is_e4m3):
        others = " or ".join(names_where(lambda traits: not traits.is_e4m3))
        yield Finding(
            "model.fp8_hybrid",
            f"model.fp8_recipe={name} uses E4M3 for all tensors, and no E5M2 for output gradients",
            f"Leave it out (null), or use model.fp8_recipe={others}",
        )
    elif v.get("model.fp8_e4m3") and origins.get("model.fp8_hybrid") == COMMAND_LINE:
        yield Finding(
            "model.fp8_hybrid",
            "model.fp8_e4m3=True asks for another format",
            "Set one of the two to False",
        )
