"""Translate Megatron's settings, those of a script or of a file of Megatron Bridge, into keys.

Most rows are data (megatron_flags.yaml). The functions here read what several settings say
together. Formulas are those of Megatron-core 0.20.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from megafp8.config.api import NONE, Refused, all_keys, function_keys, megatron_flags
from megafp8.specs.recipes import DEFAULT_RECIPE, names_where
from megafp8_migrate.ignored import note_of
from megafp8_migrate.megatron_data import DATA_RULES
from megafp8_migrate.megatron_experts import experts, is_of_experts
from megafp8_migrate.megatron_modules import modules
from megafp8_migrate.megatron_schedule import schedule
from megafp8_migrate.megatron_settings import MegatronSettings
from megafp8_migrate.megatron_window import window
from megafp8_migrate.report import Migration, check_written

_SELF_GIVEN = (
    "save",
    "load",
    "tensorboard_dir",
    "wandb_project",
    "wandb_exp_name",
    "wandb_entity",
    "data_cache_path",
)
_YARN = {
    "rotary_scaling_factor": ("model.yarn_rotary_scaling_factor", 1.0),
    "yarn_original_max_position_embeddings": ("model.original_max_position_embeddings", 4096),
    "yarn_beta_fast": ("model.yarn_beta_fast", 32.0),
    "yarn_beta_slow": ("model.yarn_beta_slow", 1.0),
}
"""Our keys of settings that YaRN alone reads, with the defaults of Megatron's parser."""
_OF_MODEL = frozenset(
    """
    normalization swiglu squared_relu openai_gelu bias_gelu_fusion ffn_hidden_size
    group_query_attention num_query_groups window_size window_attn_skip_freq
    position_embedding_type use_rotary_position_embeddings add_position_embedding
    rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    mscale mscale_all_dim yarn_correction_range_round_to_int
    """.split()
)
"""Settings of the model that several rules read together."""
_YARN_SCALES = {"mscale": 1.0, "mscale_all_dim": 0.0}
_YARN_ROUNDS = "yarn_correction_range_round_to_int"
_SHARDING = {"optim_grads_params": "full", "optim_grads": "grad"}


def stands_alone(name: str) -> bool:
    """Whether a rule handles the setting even if its value is not known: a place of files."""
    return name in _SELF_GIVEN


def translate(s: MegatronSettings, m: Migration) -> None:
    """Translate all settings into the migration `m`, and check what was written."""
    for rule in RULES:
        rule(s, m)
    _name_the_silent(s, m)
    for name in s.given:
        if name not in s.taken:
            _by_table(s, name, m)
    if s.source:
        for name, row in megatron_flags().passed.items():
            if row.default is not NONE and not s.has(name) and name not in s.taken:
                m.assume(row.key, row.ours(row.default), s.source)
    check_written(m, keeps=True)
    _require(m)


def translate_model(s: MegatronSettings, m: Migration) -> None:
    """Translate the settings of the model alone into the migration `m`, and check them."""
    for rule in MODEL_RULES:
        rule(s, m)
    for name in s.given:
        if name not in s.taken and is_of_model(name):
            _by_table(s, name, m)
    check_written(m, keeps=True)


def is_of_model(name: str) -> bool:
    """Whether a setting of Megatron's says which function the weights compute."""
    row, group = megatron_flags().passed.get(name), megatron_flags().group(name)
    if is_of_experts(name):
        # How ranks divide experts, and rows without weight that fill tiles, are no part of it.
        return "parallel" not in name and "padding" not in name
    if row is not None:
        return row.key.removeprefix("model.") in function_keys()
    return (isinstance(group, Refused) and group.changes_model) or name in _OF_MODEL


def _name_the_silent(s: MegatronSettings, m: Migration) -> None:
    """Report the settings that a rule has read and of which no line speaks, since they are off."""
    said = "\n".join([*m.translated, *m.inert, *m.undecided])
    for name in s.taken & s.given.keys():
        given = s.given[name]
        if not re.search(rf"(?<![\w.-]){re.escape(given.shown)}(?![\w-])", said):
            m.drop(given.shown, given.said, "it asks for nothing beside the other settings")


def _by_table(s: MegatronSettings, name: str, m: Migration) -> None:
    shown, value, said = s.given[name].shown, s.given[name].value, s.given[name].said
    passed, group = megatron_flags().passed.get(name), megatron_flags().group(name)
    if passed is not None and value is None:
        m.drop(shown, said, "nothing is given")
    elif passed is not None and passed.is_switch and not isinstance(value, bool):
        m.decide(shown, said, "is not True or False", f"Give {passed.key}")
    elif passed is not None:
        ours = passed.ours(value)
        m.change(shown, said, {passed.key: ours}, note=note_of(passed.key, ours))
    elif isinstance(group, Refused):
        same = group.same_as and value == s.value_or_default(group.same_as)
        if group.passes(value) or same:
            m.drop(shown, said, group.reason)
        else:
            m.decide(shown, said, group.reason, group.hint)
    elif group is not None:
        m.drop(shown, said, group.note)
    else:
        m.decide(
            shown, said, f"is not among the settings of {megatron_flags().version} that are known "
            "here", "Look for a similar key in pretrain_gpt.py --help",
        )  # fmt: skip


def _require(m: Migration) -> None:
    """Let the user decide about keys without a default that nothing has given."""
    said = " ".join(m.undecided)
    for path in ("model.num_layers", "model.hidden_size", "model.num_attention_heads",
                 "model.encoder_seq_length", "trainer.max_steps", "model.micro_batch_size",
                 "model.optim.lr"):  # fmt: skip
        if _written(m, path) is None and path not in said:
            hint = f"Give {all_keys()[path].valid_text}"
            m.decide(path, "???", "is not given", hint)


def _written(m: Migration, path: str) -> Any:
    tree: Any = m.out
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


# --- the model ------------------------------------------------------------------------------------


def _norm(s: MegatronSettings, m: Migration) -> None:
    value = s.get("normalization", "LayerNorm" if s.source else None)
    if value in ("LayerNorm", "RMSNorm"):
        _write(s, m, value, {"model.normalization": value.lower()}, "normalization")
    elif value is not None:
        m.decide(s.label("normalization"), value, "is another norm", "Give LayerNorm or RMSNorm")


def _mlp(s: MegatronSettings, m: Migration) -> None:
    names = ("swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion")
    swiglu, squared, tanh, fused = (s.get(name) for name in names)
    gated = swiglu is True
    if gated:
        m.change(s.label("swiglu"), True, {"model.activation": "fast-swiglu"})
    elif squared:
        m.change(s.label("squared_relu"), True, {"model.activation": "squared-relu"})
    elif s.source or tanh is not None or fused is not None:
        biased = s.given["add_bias_linear"].value if "add_bias_linear" in s.given else True
        is_tanh = bool(tanh) or (biased and fused is not False)
        by = "its kernel for GELU with a bias computes the tanh form"
        why = "" if tanh else by if is_tanh else "without that kernel GELU is the exact form"
        what = {"model.activation": "gelu", "model.openai_gelu": is_tanh}
        m.change(s.label(*(n for n in names[2:] if n in s.given), "bias_gelu_fusion"),
                 "gelu", what, note=why)  # fmt: skip
    for name in names:
        if name in s.given and not s.given[name].value and not (name == names[3] and not gated):
            m.drop(s.given[name].shown, s.given[name].value, "the activation is another one")
    hidden = s.number("hidden_size", m)
    s.taken.discard("hidden_size")
    width = s.get("ffn_hidden_size")
    if width is not None:
        m.change(s.label("ffn_hidden_size"), width, {"model.ffn_hidden_size": width})
    elif isinstance(hidden, int) and s.source and not s.has("ffn_hidden_size"):
        default = int(hidden * 4 * 2 / 3) // 64 * 64 if gated else 4 * hidden
        m.assume("model.ffn_hidden_size", default, s.source)


def _heads(s: MegatronSettings, m: Migration) -> None:
    grouped, groups = s.get("group_query_attention"), s.get("num_query_groups")
    if groups is not None and (grouped or (not s.source and grouped is None)):
        m.change(s.label("num_query_groups"), groups, {"model.num_query_groups": groups})
    elif groups is not None:
        reason = "without --group-query-attention every head has its own keys and values"
        m.drop(s.label("num_query_groups"), groups, reason)
    elif grouped:
        m.change(s.label("group_query_attention"), True, {"model.num_query_groups": 1})


def _positions(s: MegatronSettings, m: Migration) -> None:
    kind = s.get("position_embedding_type", "learned_absolute" if s.source else None)
    rotary, without = s.get("use_rotary_position_embeddings"), s.get("add_position_embedding")
    if rotary:
        kind = "rope"
    if without is False and kind != "rope":
        label = s.label("add_position_embedding")
        m.decide(label, True, "Megatron refuses it without RoPE", "Give position_embedding_type")
    elif kind == "yarn":
        _yarn(s, m)
    elif kind in ("learned_absolute", "rope", "none"):
        _write(s, m, kind, {"model.position_embedding_type": kind}, "position_embedding_type",
               "use_rotary_position_embeddings")  # fmt: skip
    elif kind is not None:
        label = s.label("position_embedding_type")
        m.decide(label, kind, "has no equivalent in megafp8", "Give learned_absolute, rope or none")
    if kind != "yarn":
        _drop_yarn(s, m)


def _yarn(s: MegatronSettings, m: Migration) -> None:
    """Translate positions by YaRN, and the settings that say how."""
    kind = {"model.position_embedding_type": "rope"}
    m.change(s.label("position_embedding_type"), "yarn", kind)
    values = {}
    for name, (key, default) in _YARN.items():
        values[name] = s.number(name, m, default)
        if name in s.given:
            m.change(s.label(name), values[name], {key: values[name]})
        elif s.source and name not in s.unknown:
            m.assume(key, default, s.source)
    scales = [
        s.number(name, m, default if s.source else None) for name, default in _YARN_SCALES.items()
    ]
    names = [name for name in _YARN_SCALES if name in s.given]
    if names and not s.unknown.keys() & {"rotary_scaling_factor", *_YARN_SCALES}:
        size = _yarn_size(values["rotary_scaling_factor"], *scales)
        m.change(s.label(*names), scales, {"model.yarn_attention_factor": size})
    if s.get(_YARN_ROUNDS) is False:
        m.decide(s.label(_YARN_ROUNDS), True, "the ends of YaRN's range are whole numbers here",
                 "Leave it out; the model is then another one")  # fmt: skip


def _drop_yarn(s: MegatronSettings, m: Migration) -> None:
    """Drop YaRN's settings where positions are others."""
    for name in (*_YARN, *_YARN_SCALES, _YARN_ROUNDS):
        if s.get(name) is not None:
            m.drop(s.label(name), s.given[name].said, "positions are not those of YaRN")


def _yarn_size(factor: float, scale: float | None, of_all: float | None) -> float | None:
    """Return Megatron's factor of rotated queries and keys; None for that of the paper."""
    if None in (scale, of_all) or (scale, of_all) == (1.0, 0.0):
        return None
    turns = 0.1 * math.log(max(factor, 1.0))
    return (turns * (scale or 0.0) + 1.0) / (turns * (of_all or 0.0) + 1.0)


# --- precision ------------------------------------------------------------------------------------


def _precision(s: MegatronSettings, m: Migration) -> None:
    bf16, fp16 = s.get("bf16"), s.get("fp16")
    if bf16 or fp16 or s.source:
        value = "bf16" if bf16 else 16 if fp16 else 32
        name = "bf16" if bf16 else "fp16"
        _write(s, m, bool(bf16 or fp16), {"trainer.precision": value}, name)
    if s.get("loss_scale") is not None:
        m.decide(s.label("loss_scale"), s.get("loss_scale"), "FP16's loss scale is dynamic here",
                 "Leave it out")  # fmt: skip
    fp8, fp4, recipe = s.get("fp8"), s.get("fp4"), s.get("fp4_recipe")
    scaling = s.given["fp8_recipe"].value if "fp8_recipe" in s.given else DEFAULT_RECIPE
    one_format = scaling in names_where(lambda traits: traits.is_e4m3)
    if fp8 == "hybrid" and one_format:
        m.decide(s.label("fp8"), fp8, f"asks for gradients in E5M2, and {scaling} has E4M3 for all "
                 "tensors here", "Give model.fp8=e4m3")  # fmt: skip
    elif fp8 in ("hybrid", "e4m3"):
        formats = {"model.fp8": True, "model.fp8_hybrid": fp8 == "hybrid"}
        m.change(s.label("fp8"), fp8, formats | {"model.fp8_e4m3": fp8 == "e4m3"})
    elif fp8:
        m.decide(s.label("fp8"), fp8, "is not a format", "Give hybrid or e4m3")
    of_fp4, *_ = names_where(lambda traits: traits.numbers == "e2m1")
    if fp4 == "e2m1" and recipe in (None, of_fp4):
        label = s.label("fp4", "fp4_recipe")
        m.change(label, fp4, {"model.fp8": True, "model.fp8_recipe": of_fp4})
        s.taken.add("fp8_recipe")
    elif fp4 or (recipe == "custom"):
        m.decide(s.label("fp4"), fp4, "is not supported", f"Give e2m1 with the recipe {of_fp4}")
    elif recipe is not None:
        m.drop(s.label("fp4_recipe"), recipe, "FP4 is off")
    if not fp8 and not fp4:
        _without_fp8(s, m)


def _without_fp8(s: MegatronSettings, m: Migration) -> None:
    """Drop settings of FP8 where nothing asks for it, as Megatron ignores them."""
    for name, row in megatron_flags().passed.items():
        if "fp8" in row.key or "_in_bf16" in row.key or "first_last" in row.key:
            s.taken.add(name)
            if name in s.given:
                m.drop(s.given[name].shown, s.given[name].said, "FP8 is off")


def _gradients(s: MegatronSettings, m: Migration) -> None:
    """Translate the dtype in which replicas sum gradients."""
    in_bf16 = s.get("grad_reduce_in_bf16") or (
        s.get("grad_reduce_in_fp32") is False and bool(s.get("bf16"))
    )
    s.get("accumulate_allreduce_grads_in_fp32")
    label = s.label(*[n for n in ("grad_reduce_in_bf16", "grad_reduce_in_fp32") if n in s.given]
                    or ["grad_reduce_in_bf16"])  # fmt: skip
    if in_bf16 and _sharding(s) is not None:
        m.change(label, True, {"model.fsdp_grad_reduce_dtype": "bf16"})
    elif in_bf16:
        m.change(label, True, {"model.optim.grad_sync_dtype": "bf16"},
                 note="gradients of microbatches are summed in FP32")  # fmt: skip
    for name in ("grad_reduce_in_fp32", "accumulate_allreduce_grads_in_fp32"):
        if name in s.given and not in_bf16:
            m.drop(s.given[name].shown, s.given[name].value, "gradients are summed in FP32")


def _states(s: MegatronSettings, m: Migration) -> None:
    aware = s.get("use_precision_aware_optimizer")
    if "use_precision_aware_optimizer" in s.given:
        reason = "states are stored as their dtypes say"
        m.drop(s.label("use_precision_aware_optimizer"), aware, reason)
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        value = s.get(name)
        short = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
        value = short.get(str(value), value)
        if value is None:
            continue
        if aware and value != "fp32":
            m.change(s.label(name), value, {f"model.optim.{name}": value})
        else:
            m.drop(s.label(name), value, "the optimizer's states are in FP32")


# --- ranks and the optimizer ----------------------------------------------------------------------


def _sharding(s: MegatronSettings) -> str | None:
    """Return FSDP's strategy here, or None without FSDP."""
    if s.get("use_torch_fsdp2"):
        return "full"
    if not s.get("use_megatron_fsdp"):
        return None
    return _SHARDING.get(str(s.get("data_parallel_sharding_strategy", "optim_grads_params")))


def _optimizer(s: MegatronSettings, m: Migration) -> None:
    name = s.get("optimizer", "adam")
    s.taken |= {"muon_coefficient_type", "muon_tp_mode", "use_layer_wise_distributed_optimizer"}
    if name in ("muon", "dist_muon"):
        _muon(s, m, str(name))
    elif name != "adam":
        m.decide(s.label("optimizer"), name, "is not supported", "Give adam or muon")
    strategy, sharded = _sharding(s), s.get("use_distributed_optimizer")
    zero_1 = s.get("data_parallel_sharding_strategy") == "optim" and s.get("use_megatron_fsdp")
    if strategy is not None:
        settings = {"model.fsdp": True, "model.fsdp_sharding_strategy": strategy,
                    "model.optim.name": "adamw"}  # fmt: skip
        names = ("use_megatron_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy")
        m.change(s.label(*(n for n in names if n in s.given)), True, settings)
        if sharded:
            m.drop(s.label("use_distributed_optimizer"), True, "FSDP shards the states")
    elif name in ("muon", "dist_muon"):
        pass
    elif sharded or zero_1:
        m.change(s.label("use_distributed_optimizer"), True,
                 {"model.optim.name": "distributed_fused_adam"})  # fmt: skip
    elif s.source or "optimizer" in s.given:
        m.change(s.label("optimizer"), name, {"model.optim.name": "adamw"},
                 note="weight decay is decoupled, as in Megatron's Adam")  # fmt: skip
    unused = "data_parallel_sharding_strategy"
    if unused in s.given and strategy is None and not zero_1:
        m.drop(s.label(unused), s.get(unused), "Megatron's own FSDP is off")
    betas = [s.number("adam_beta1", m, 0.9), s.number("adam_beta2", m, 0.999)]
    if "adam_beta1" in s.given or "adam_beta2" in s.given:
        label = s.label("adam_beta1", "adam_beta2")
        m.change(label, betas, {"model.optim.betas": betas})
    elif s.source:
        m.assume("model.optim.betas", betas, s.source)


def _muon(s: MegatronSettings, m: Migration, name: str) -> None:
    sharding = ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
    shards = [n for n in sharding if s.get(n)]
    ours = "dist_muon" if shards or name == "dist_muon" else "muon"
    m.change(s.label("optimizer", *shards), name, {"model.optim.name": ours},
             note="the gate and the other half of a gated MLP are two matrices here")  # fmt: skip
    kind = s.get("muon_coefficient_type", "quintic" if s.source else "simple")
    if kind != "simple":
        m.decide(s.label("muon_coefficient_type"), kind, "has other coefficients in each step of "
                 "Muon's iteration, and steps here have those of simple",
                 "Decide whether these may be used")  # fmt: skip
    mode = s.get("muon_tp_mode", "duplicated" if s.source else None)
    if mode == "distributed":
        key = "model.optim.muon_tp_mode"
        m.change(s.label("muon_tp_mode"), mode, {key: "duplicated"}, note="the result is the same")
    elif mode is not None:
        _write(s, m, mode, {"model.optim.muon_tp_mode": mode}, "muon_tp_mode")


def _sequence_parallel(s: MegatronSettings, m: Migration) -> None:
    if s.get("sequence_parallel"):
        ranks = s.number("tensor_model_parallel_size", m, 1)
        s.taken.discard("tensor_model_parallel_size")
        if ranks == 1 and "tensor_model_parallel_size" not in s.unknown:
            m.drop(s.label("sequence_parallel"), True, "one tensor-parallel rank has all tokens")
        else:
            m.change(s.label("sequence_parallel"), True, {"model.sequence_parallel": True})


def _stages(s: MegatronSettings, m: Migration) -> None:
    layers = s.get("num_layers_per_virtual_pipeline_stage")
    if layers is None:
        return
    whole = s.number("num_layers", m), s.number("pipeline_model_parallel_size", m, 1)
    s.taken -= {"num_layers", "pipeline_model_parallel_size"}
    label = s.label("num_layers_per_virtual_pipeline_stage")
    if not all(isinstance(number, int) and number > 0 for number in (layers, *whole)):
        m.decide(label, layers, "does not give a number of stages", "Give num_layers")
    elif whole[0] % (whole[1] * layers):
        m.decide(label, layers, f"does not divide the {whole[0]} layers", "Give a divisor")
    elif (stages := whole[0] // (whole[1] * layers)) > 1:
        m.change(label, layers, {"model.virtual_pipeline_model_parallel_size": stages})
    else:
        m.drop(label, layers, "each rank has one stage")


def _recomputation(s: MegatronSettings, m: Migration) -> None:
    key = "model.activations_checkpoint_granularity"
    modules, kind = s.get("recompute_modules"), s.get("recompute_granularity")
    if s.get("recompute_activations"):
        m.change(s.label("recompute_activations"), True, {key: "selective"})
    elif kind is not None:
        m.change(s.label("recompute_granularity"), kind, {key: kind})
    listed = [modules] if isinstance(modules, str) else modules
    if listed and listed != ["core_attn"]:
        m.decide(
            s.label("recompute_modules"), modules, "recomputes other parts than attention's core",
            f"Leave it out, or use {key}=full for whole layers",
        )  # fmt: skip
    elif listed:
        m.drop(s.label("recompute_modules"), modules, "selective recomputes attention's core")


def _batches(s: MegatronSettings, m: Migration) -> None:
    ramp = s.get("rampup_batch_size")
    if ramp is not None:
        m.change(s.label("rampup_batch_size"), ramp, {"model.rampup_batch_size": ramp})
    minutes = s.get("exit_duration_in_mins")
    if minutes is not None:
        if type(minutes) is int:
            minutes_each, hours = minutes % 60, minutes // 60
            clock = f"{hours // 24:02}:{hours % 24:02}:{minutes_each:02}:00"
            m.change(s.label("exit_duration_in_mins"), minutes, {"trainer.max_time": clock})
        else:
            m.decide(s.label("exit_duration_in_mins"), minutes, "is not a number", "Give minutes")


def _write(s: MegatronSettings, m: Migration, value: Any, new: dict[str, Any], *names: str) -> None:
    """Write settings as changed, or as assumed if none of the names was given."""
    if any(name in s.given for name in names):
        m.change(s.label(*names), value, new)
    elif not any(name in s.unknown for name in names):
        for key, item in new.items():
            m.assume(key, item, s.source)


MODEL_RULES: tuple[Callable[[MegatronSettings, Migration], None], ...] = (
    _norm, _mlp, experts, _heads, window, _positions,
)  # fmt: skip
RULES: tuple[Callable[[MegatronSettings, Migration], None], ...] = (
    *MODEL_RULES, _precision, modules, _optimizer, _gradients,
    _states, _sequence_parallel, _stages, _recomputation, _batches, schedule, *DATA_RULES,
)  # fmt: skip
