"""Which settings fit together. Pure: no device, no file, no torch.

Rules of FP8 recipes are in `fp8_rules`, those of layouts in `parallel_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from megafp8.config import (
    backends,
    checkpoint_rules,
    context_rules,
    fp8_rules,
    fsdp_rules,
    model_rules,
    optim_rules,
    parallel_rules,
    profile_rules,
    sequence_rules,
    start_rules,
)
from megafp8.config.dependents import without_effect
from megafp8.config.fp8_rules import size_multiple
from megafp8.config.keys import Key
from megafp8.config.overrides import Setting, setting_problem
from megafp8.config.problems import COMMAND_LINE, DEFAULT, PRESET, SettingError, raise_if_any
from megafp8.config.rules import Finding, Origins, Rules, Values
from megafp8.config.schema import all_keys
from megafp8.config.sizes import hidden_step, nearest_divisors, nearest_multiples
from megafp8.config.validate_data import (
    TOKENIZER_KEYS,
    builtin_has_its_tokenizer,
    tokenizer_is_named,
)

rule = Rules()

FP8_DETAILS = (
    "model.fp8_e4m3",
    "model.fp8_hybrid",
    "model.fp8_margin",
    "model.fp8_interval",
    "model.fp8_amax_history_len",
    "model.fp8_amax_compute_algo",
    "model.reduce_amax",
    "model.tp_only_amax_red",
    "model.fp8_recipe",
    "model.fp8_power_2_scale",
    "model.fp8_params",
    "model.fp8_wgrad",
    "model.override_linear_precision",
    "model.fp8_split_accumulator",
    "model.first_last_layers_bf16",
    "model.num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16",
    "model.fp8_modules",
    "model.use_autocast_during_eval",
    "model.fp8_health",
    *fp8_rules.HEALTH_LIMITS,
    "model.pad_inner_dim",
)
"""What means nothing unless `model.fp8` is on."""

CHECKPOINT_DETAILS = (
    "exp_manager.checkpoint_callback_params.every_n_train_steps",
    "exp_manager.checkpoint_callback_params.train_time_interval",
    "exp_manager.checkpoint_callback_params.save_top_k",
    "exp_manager.checkpoint_callback_params.async_save",
)
"""What means nothing unless checkpoints are written."""


def validate(cfg: DictConfig, origins: Origins | None = None) -> None:
    """Raise all that is wrong with a composed tree.

    With `origins` (who set which key) also what contradicts itself, as FP8 details without FP8.
    """
    values, problems = read_values(cfg, origins)
    raise_if_any(problems + check_values(values, origins))


def read_values(
    cfg: DictConfig, origins: Origins | None = None
) -> tuple[dict[str, Any], list[SettingError]]:
    """Every key with its interpolations resolved, and the keys that cannot be read."""
    values: dict[str, Any] = {}
    problems: list[SettingError] = []
    for path, key in all_keys().items():
        try:
            values[path] = read_value(cfg, path)
            # An interpolation may bring another key's type along where the schema allows several.
            problem = setting_problem(Setting(path, values[path], _origin(path, origins)))
            if problem is not None:
                problems.append(problem)
                del values[path]
        except MissingMandatoryValue:
            problems.append(_missing(key, origins))
        except (OmegaConfBaseException, ValueError, OverflowError, RecursionError) as error:
            problems.append(_unreadable(key, error, origins))
    return values, problems


def read_value(cfg: DictConfig, path: str) -> Any:
    """One value as plain Python, interpolations resolved; raises where it cannot be read."""
    value = OmegaConf.select(cfg, path, throw_on_missing=True)
    return OmegaConf.to_container(value, resolve=True) if _is_node(value) else value


def check_values(values: Values, origins: Origins | None = None) -> list[SettingError]:
    """Ranges of single keys, then rules over several; keys not in `values` are left out."""
    findings: list[Finding] = []
    good = dict(values)
    for path, value in values.items():
        finding = _range_finding(all_keys()[path], value)
        if finding is not None:
            findings.append(finding)
            del good[path]
    modules = (
        model_rules,
        parallel_rules,
        sequence_rules,
        context_rules,
        fsdp_rules,
        fp8_rules,
        optim_rules,
        profile_rules,
        checkpoint_rules,
        backends,
        start_rules,
    )
    for rules in (rule, *(module.rule for module in modules)):
        findings += rules.findings(good)
    if origins is not None:
        findings += _contradictions(good, origins)
    return [
        SettingError(f.key, values[f.key], f.reason, f.way_out, origin=_origin(f.key, origins))
        for f in findings
    ]


# --- rules over several keys -------------------------------------------------------------------


@rule("model.num_attention_heads", "model.tensor_model_parallel_size")
def _tp_divides_heads(v: Values) -> Iterator[Finding]:
    yield from _tp_divides(v, "model.num_attention_heads")


@rule("model.ffn_hidden_size", "model.tensor_model_parallel_size")
def _tp_divides_ffn(v: Values) -> Iterator[Finding]:
    yield from _tp_divides(v, "model.ffn_hidden_size")


@rule("model.make_vocab_size_divisible_by", "model.tensor_model_parallel_size")
def _tp_divides_vocab(v: Values) -> Iterator[Finding]:
    yield from _tp_divides(v, "model.make_vocab_size_divisible_by")


def _tp_divides(v: Values, key: str) -> Iterator[Finding]:
    value, tp = v[key], v["model.tensor_model_parallel_size"]
    if value % tp:
        yield Finding(
            key,
            f"does not divide over model.tensor_model_parallel_size={tp}",
            f"Nearest values: {nearest_multiples(value, tp)}; "
            f"or tensor-parallel sizes: {nearest_divisors(value, tp)}",
        )


@rule("model.encoder_seq_length", "model.data.seq_length")
def _samples_fill_sequences(v: Values) -> Iterator[Finding]:
    length = v["model.encoder_seq_length"]
    if v["model.data.seq_length"] != length:
        yield Finding(
            "model.data.seq_length",
            f"differs from model.encoder_seq_length={length}",
            f"Leave it out, or give {length}",
        )


@rule("model.encoder_seq_length", "model.max_position_embeddings")
def _positions_suffice(v: Values) -> Iterator[Finding]:
    length = v["model.encoder_seq_length"]
    if length > v["model.max_position_embeddings"]:
        yield Finding(
            "model.max_position_embeddings",
            f"is less than model.encoder_seq_length={length}",
            f"Give at least {length}, or leave it out",
        )


@rule(*TOKENIZER_KEYS)
def _tokenizer_is_named(v: Values) -> Iterator[Finding]:
    yield from (Finding(*found) for found in tokenizer_is_named(v))


@rule("model.tokenizer.library", "model.data.data_prefix")
def _builtin_has_its_tokenizer(v: Values) -> Iterator[Finding]:
    yield from (Finding(*found) for found in builtin_has_its_tokenizer(v))


# --- FP8 ---------------------------------------------------------------------------------------


@rule("model.fp8", "model.transformer_engine")
def _fp8_needs_te(v: Values) -> Iterator[Finding]:
    if v["model.fp8"] and not v["model.transformer_engine"]:
        yield Finding(
            "model.fp8",
            "needs model.transformer_engine=True, whose semantics FP8 layers have",
            "Set model.transformer_engine=True (the package itself need not be installed), "
            "or model.fp8=False",
        )


@rule("model.fp8", "model.fp8_e4m3", "model.fp8_hybrid")
def _fp8_has_format(v: Values) -> Iterator[Finding]:
    if v["model.fp8"] and not (v["model.fp8_e4m3"] or v["model.fp8_hybrid"]):
        yield Finding(
            "model.fp8_hybrid",
            "model.fp8_e4m3 is False too, so there is no format",
            "Set model.fp8_hybrid=True (E4M3 forward, E5M2 backward) or model.fp8_e4m3=True",
        )


@rule("model.fp8", "model.fp8_recipe", "model.hidden_size", "model.tensor_model_parallel_size")
def _fp8_hidden(v: Values) -> Iterator[Finding]:
    yield from _fp8_size(v, "model.hidden_size", hidden_step(v))


@rule("model.fp8", "model.fp8_recipe", "model.ffn_hidden_size", "model.tensor_model_parallel_size")
def _fp8_ffn(v: Values) -> Iterator[Finding]:
    step = size_multiple(v) * v["model.tensor_model_parallel_size"]
    yield from _fp8_size(v, "model.ffn_hidden_size", step)


def _fp8_size(v: Values, key: str, step: int) -> Iterator[Finding]:
    tp = v["model.tensor_model_parallel_size"]
    multiple = size_multiple(v)
    if v["model.fp8"] and v[key] % (multiple * tp):
        share = f" over model.tensor_model_parallel_size={tp}" if tp > 1 else ""
        yield Finding(
            key,
            f"FP8 GEMMs need multiples of {multiple} on each rank; {v[key]}{share} is none",
            f"Nearest values: {nearest_multiples(v[key], step)}; or model.fp8=False",
        )


@rule("model.fp8", "model.fp8_recipe", "model.micro_batch_size", "model.encoder_seq_length")
def _fp8_tokens(v: Values) -> Iterator[Finding]:
    micro, length = v["model.micro_batch_size"], v["model.encoder_seq_length"]
    multiple = size_multiple(v)
    if v["model.fp8"] and (micro * length) % multiple:
        micro_step = multiple // math.gcd(multiple, length)
        length_step = multiple // math.gcd(multiple, micro)
        yield Finding(
            "model.micro_batch_size",
            f"times model.encoder_seq_length={length} makes {micro * length} tokens; FP8 GEMMs "
            f"need multiples of {multiple}",
            f"Nearest micro batch sizes: {nearest_multiples(micro, micro_step)}; "
            f"or model.encoder_seq_length: {nearest_multiples(length, length_step)}",
        )


# --- settings that contradict each other by who set them -----------------------------------------


def _contradictions(v: Values, origins: Origins) -> Iterator[Finding]:
    """What was asked for and would be ignored. A weaker origin gives way to a stronger silently."""
    keys = all_keys()
    if v.get("model.fp8") is False:
        for key in FP8_DETAILS:
            asked = key in v and v[key] != keys[key].default
            if asked and _strength(key, origins) >= _strength("model.fp8", origins):
                yield Finding(
                    key, "means nothing without FP8", "Set model.fp8=True, or leave it out"
                )
    for key, switch in optim_rules.unread_keys(v).items():
        asked = key in v and v[key] != keys[key].default
        if asked and _strength(key, origins) >= _strength(switch, origins):
            yield Finding(
                key, f"means nothing with {switch}={v[switch]}", "Leave one of the two out"
            )
    yield from fp8_rules.contradictions(v, origins)
    if v.get("model.fp8_e4m3") and v.get("model.fp8_hybrid"):
        if origins.get("model.fp8_hybrid") == COMMAND_LINE:
            yield Finding(
                "model.fp8_hybrid",
                "model.fp8_e4m3=True as well: they are two formats",
                "Set one of the two to False",
            )
    if v.get("exp_manager.create_checkpoint_callback") is False:
        switch = "exp_manager.create_checkpoint_callback"
        for key in CHECKPOINT_DETAILS:
            asked = key in v and v[key] != keys[key].default
            if asked and _strength(key, origins) >= _strength(switch, origins):
                yield Finding(key, f"means nothing with {switch}=False", "Leave one of the two out")
    for detail, feature in without_effect(v):
        if _strength(detail, origins) >= _strength(feature.key, origins):
            off = f"means nothing with {feature.key}={feature.off}"
            yield Finding(detail, off, f"{feature.way_out}, or leave it out")
    if v.get("exp_manager.explicit_log_dir") is not None:
        log_dir, exp_dir = "exp_manager.explicit_log_dir", "exp_manager.exp_dir"
        if exp_dir in origins and _strength(exp_dir, origins) >= _strength(log_dir, origins):
            yield Finding(
                exp_dir,
                f"{log_dir}={v[log_dir]} says already where the run goes",
                "Leave one of the two out",
            )


def _strength(key: str, origins: Origins) -> int:
    if key not in origins:
        return 0
    if origins[key].startswith(PRESET):
        return 2
    return 3 if origins[key] == COMMAND_LINE else 1


# --- helpers -----------------------------------------------------------------------------------


def _range_finding(key: Key, value: Any) -> Finding | None:
    valid = key.valid
    if valid is None or valid.accepts(value):
        return None
    if value in valid.later:
        return Finding(key.path, "is not supported", valid.suggestion)
    usual = f"NeMo's default is {key.nemo}" if key.required else f"The default is {key.default}"
    return Finding(key.path, f"must be {valid.text}", usual)


def _missing(key: Key, origins: Origins | None) -> SettingError:
    way_out = f"Give {key.valid_text}, or begin the YAML with `defaults: [pretrain_gpt, _self_]`"
    return SettingError(
        key.path, "???", "must be given", way_out, origin=_origin(key.path, origins)
    )


def _unreadable(key: Key, error: Exception, origins: Origins | None) -> SettingError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    way_out = f"Give {key.valid_text}"
    return SettingError(key.path, None, reason, way_out, origin=_origin(key.path, origins))


def _origin(key: str, origins: Origins | None) -> str:
    return "" if origins is None else origins.get(key, DEFAULT)


def _is_node(value: Any) -> bool:
    return bool(OmegaConf.is_config(value))
