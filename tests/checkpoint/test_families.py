"""Models of today's families of transformers, in and out, and what of them is refused by name."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megafp8.checkpoint import huggingface as hf
from megafp8.checkpoint import huggingface_files
from megafp8.checkpoint.families import FAMILIES
from megafp8.checkpoint.reader import Reader
from megafp8.cli import export, import_hf
from megafp8.errors import CheckpointError, UserError
from megafp8.models.positions import frequencies, yarn_attention_factor
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import logical_shapes
from megafp8.train.huggingface import import_model
from megafp8.train.load_model import shape_of
from tests.tiny import gpt_spec

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 96,
}  # fmt: skip
DECODERS = [name for name in FAMILIES if name != "gpt2"]
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def of(name: str, **more: Any) -> dict[str, Any]:
    window = {"sliding_window": None} if name == "mistral" else {}
    sizes = SIZES | EXPERTS.get(name, {})
    return {"model_type": name, **sizes, "head_dim": 8, **window, **more}


def without_experts(family: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Keys without those about experts, if the family has these."""
    return {k: v for k, v in keys.items() if family not in EXPERTS or "expert" not in k}


def spec_of(config: dict[str, Any]) -> GPTSpec:
    return hf.from_config(config, Path("config.json"))


PUBLISHED = yaml.safe_load((Path(__file__).parent / "published_configs.yaml").read_text())["models"]
SAME = {
    "n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layernorm_epsilon",
    "num_hidden_layers": "num_layers", "hidden_size": "hidden_size", "vocab_size": "vocab_size",
    "intermediate_size": "ffn_hidden_size", "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_kv_heads", "head_dim": "head_size", "rms_norm_eps":
    "layernorm_epsilon", "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
}  # fmt: skip
"""Our fields, by the names of transformers that each family has in part."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_and_written(name: str) -> None:
    """With as many parameters as were published, and as transformers' model has without numbers."""
    row = PUBLISHED[name]
    config = row["config"]
    if "refused" in row:
        with pytest.raises(CheckpointError, match=row["refused"]):
            spec_of(config)
        return
    spec, family = spec_of(config), config["model_type"]
    again = hf.to_config(spec, torch.bfloat16, None, family)
    assert spec_of(again) == spec
    transformers = pytest.importorskip("transformers")
    theirs, written = (
        transformers.AutoConfig.for_model(**copy.deepcopy(c)) for c in (config, again)
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
        model.tie_weights()  # transformers 5.0 leaves two weights there
    names = [name for entry in hf.mapping(spec) for name in entry.ours]
    ours = sum(math.prod(logical_shapes(spec)[name]) for name in names)
    assert ours == sum(param.numel() for param in model.parameters())
    assert ours == row.get("parameters", ours)
    for key, field in SAME.items():
        if family == "gpt2" or not key.startswith(("n_", "layer_norm")):
            value = getattr(theirs, key, None)
            value = getattr(spec, field) if value is None else value  # a width that follows
            assert value == getattr(spec, field) == getattr(written, key, value), key
    if family != "gpt2":
        assert torch.equal(ours_of(spec)[0], theirs_of(config)[0])
        assert theirs.rope_parameters.items() >= written.rope_parameters.items() - {
            ("type", "linear")
        }
        windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
        has_window = name in ("mistralai/Mistral-7B-v0.1", "HuggingFaceH4/zephyr-7b-beta")
        assert set(windows) == {4095 if has_window else None}
        assert spec.qk_layernorm == family.startswith("qwen3")
        assert spec.add_qkv_bias == (family == "qwen2")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_keys_that_transformers_writes_are_known(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)
    written = json.loads(config.to_json_string(use_diff=False))
    assert len(written) > 20
    assert spec_of(written | {"model_type": family}).num_layers == config.num_hidden_layers
    assert len(hf.notes_on(written | {"model_type": family})) == (family in EXPERTS)


NEUTRAL: dict[str, Any] = {
    "_name_or_path": "x", "_num_labels": 1, "activation": "swiglu", "add_cross_attention": False,
    "gradient_checkpointing": False, "is_causal": True, "is_decoder": False, "is_encoder_decoder":
    False, "is_llama_config": True, "max_sequence_length": 2048, "num_experts": 0, "num_labels": 2,
    "partial_rotary_factor": 1.0, "pretraining_tp": 1, "pruned_heads": {}, "quantization_config":
    None, "rope_interleaved": False, "task_specific_params": {"x": {"max_length": 5}},
    "tie_encoder_decoder": False, "transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True,
    "unsloth_version": "2024.9", "use_mrope": False, "attn_logit_softcapping": None,
    "output_router_logits": True, "router_jitter_noise": 0.0, "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
}  # fmt: skip
NOT_NEUTRAL: dict[str, Any] = {
    "add_cross_attention": True, "is_causal": False, "is_encoder_decoder": True, "num_experts": 8,
    "is_llama_config": False, "num_experts_per_tok": 2, "partial_rotary_factor": 0.5,
    "pruned_heads": {"0": [1]}, "rope_interleaved": True, "use_mrope": True, "hidden_activation":
    "gelu", "text_config": {"tie_word_embeddings": True}, "original_max_position_embeddings": 16,
    "router_jitter_noise": 0.01, "qkv_bias": True, "shared_expert_intermediate_size": 64,
    "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "n_shared_experts": 1, "clip_qkv": 8.0,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
        "n_ctx": 64, "vocab_size": 96}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_neutral_keys_are_known_by_key_and_value(family: str) -> None:
    config = GPT2 if family == "gpt2" else of(family)
    eps = {"layer_norm_eps": spec_of(config).layernorm_epsilon}
    assert spec_of(config | without_experts(family, NEUTRAL) | eps) == spec_of(config)
    unknown = {k: v for k, v in NOT_NEUTRAL.items() if family not in EXPERTS or "num_e" not in k}
    for key, value in unknown.items():
        with pytest.raises(CheckpointError, match=rf"{key} is .*{family}|{key} is true"):
            spec_of(config | {key: value})
    for key in ("is_causal", "tie_word_embeddings", "initializer_range"):
        with pytest.raises(CheckpointError, match=f"{key} is null"):
            spec_of(config | {key: None})


def test_all_unknown_keys_are_named_at_once() -> None:
    more = {"use_mrope": True, "attn_logit_softcapping": 50.0, "auto_map": {"AutoModel": "x.Y"}}
    with pytest.raises(CheckpointError) as caught:
        spec_of(of("qwen2", **more))
    assert all(f"{key} is " in str(caught.value) for key in more)
    assert "The code that auto_map names is never run" in str(caught.value)
    both = {"rope_type": "linear", "factor": 2.0, "alpha": 3, "mrope_section": [1, 2]}
    with pytest.raises(CheckpointError, match=r"alpha is 3; mrope_section is \[1, 2\] in"):
        spec_of(of("llama", rope_parameters=both))


@pytest.mark.parametrize(
    ("family", "more", "expected"),
    [
        ("gpt2", {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}, {}),
        ("gpt2", {"hidden_size": 64}, "hidden_size is 64"),
        (
            "gpt2",
            {"num_hidden_layers": 3, "layer_norm_eps": 1e-6},
            "layer_norm_eps is 1e-06; num_h",
        ),
        ("gpt2", {"n_inner": None, "n_ctx": 8}, {"ffn_hidden_size": 128}),
        ("gpt2", {"scale_attn_weights": None}, "scale_attn_weights is null"),
        ("gpt2", {"activation_function": None}, "activation_function is null"),
        ("llama", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("llama", {"head_dim": None}, {"head_size": 8}),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is null"),
        ("llama", {"rope_theta": None}, "rope_theta is null"),
        ("llama", {"head_dim": 3}, "heads have 3 features"),
        ("mistral", {"head_dim": None}, {"head_size": 8}),
        ("qwen2", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("qwen3", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("qwen3", {"head_dim": None}, "head_dim is null"),
        ("qwen3", {"hidden_act": None}, "hidden_act is null"),
    ],
)
def test_what_is_said_twice_or_not_is_read_as_transformers_does(
    family: str, more: dict[str, Any], expected: dict[str, Any] | str
) -> None:
    config = (GPT2 if family == "gpt2" else of(family)) | more
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            spec_of(config)
        return
    spec = spec_of(config)
    assert {name: getattr(spec, name) for name in expected} == expected
    if family != "gpt2":
        theirs = pytest.importorskip("transformers").AutoConfig.for_model(**config)
        assert theirs.num_key_value_heads == spec.num_kv_heads
        assert getattr(theirs, "head_dim", spec.head_size) == spec.head_size


def test_a_key_that_is_missing_stands_for_the_default_of_the_family() -> None:
    """As for a null of 32 heads, which is no number of groups of theirs."""
    wide = {"num_attention_heads": 64, "hidden_size": 512, "head_dim": None}
    for family in ("qwen2", "qwen3", "mistral", "llama"):
        config = of(family, **wide) | ({"head_dim": 8} if family == "qwen3" else {})
        del config["num_key_value_heads"]
        theirs = pytest.importorskip("transformers").AutoConfig.for_model(**config)
        assert spec_of(config).num_kv_heads == theirs.num_key_value_heads
        config["num_key_value_heads"] = None
        assert spec_of(config).num_kv_heads == 64


def test_a_width_that_heads_do_not_divide_is_read_and_written() -> None:
    spec = spec_of(of("qwen3", hidden_size=36, num_attention_heads=8))
    assert hf.architecture(spec) == "qwen3"
    with pytest.raises(hf.ConversionError, match="gpt2 has no such model .n_head is 8"):
        hf.architecture(replace(spec, qk_layernorm=False), "gpt2")


def test_dropout_after_gpt2s_embedding_is_said() -> None:
    assert not hf.notes_on(GPT2 | {"embd_pdrop": 0.1})
    (note,) = hf.notes_on(GPT2 | {"embd_pdrop": 0.25, "resid_pdrop": 0.0})
    assert "embd_pdrop is 0.25" in note and "model.hidden_dropout" in note


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("quantization_config", {"quant_method": "fp8"}),
        ("auto_map", {"AutoModelForCausalLM": "model.Mine"}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 16}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                          "original_max_position_embeddings": 16}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "xielu"),
    ],
)  # fmt: skip
def test_what_no_model_here_has_is_refused_by_name(family: str, key: str, value: Any) -> None:
    names = {
        "longrope": "rope_type", "partial_rotary_factor": "partial_rotary_factor",
        "truncate": "truncate", "llama3": "high_freq_factor",
        "attention_bias": "bias",
    }  # fmt: skip
    wanted = next((name for word, name in names.items() if word in f"{key} {value}"), key)
    with pytest.raises(UserError, match=wanted):
        spec_of(of(family, **{key: value}))
    assert spec_of(of(family)).num_layers == 2
    with pytest.raises(UserError, match="Give the model as it was before"):
        spec_of(of(family, quantization_config={"quant_method": "fp8"}))


SLIDING, FULL = "sliding_attention", "full_attention"
USED = {"use_sliding_window": True, "sliding_window": 16}
WINDOWS: dict[str, tuple[str, dict[str, Any], list[int | None]]] = {
    "all layers": ("mistral", {"sliding_window": 16}, [15, 15]),
    "its own token alone": ("mistral", {"sliding_window": 1}, [0, 0]),
    "none": ("mistral", {"sliding_window": None}, [None, None]),
    "from a layer on": ("qwen2", USED | {"max_window_layers": 1}, [None, 15]),
    "from layer 0 on": ("qwen3", USED | {"max_window_layers": 0}, [15, 15]),
    "behind the last layer": ("qwen2", USED | {"max_window_layers": 2}, [None, None]),
    "by layer": ("qwen3", USED | {"layer_types": [SLIDING, FULL]}, [15, None]),
    "experts, all layers": ("mixtral", {"sliding_window": 16}, [15, 15]),
    "experts, all layers by key": ("qwen3_moe", USED | {"max_window_layers": 0}, [15, 15]),
    "experts, unused": ("qwen3_moe", {"sliding_window": 16, "max_window_layers": 1}, [None, None]),
    "unused": ("qwen3", USED | {"use_sliding_window": False}, [None, None]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_read_and_written(name: str) -> None:
    """A window of transformers counts the own token; ours has those before it."""
    family, more, windows = WINDOWS[name]
    spec = spec_of(of(family, **more))
    assert [spec.window_of(layer) for layer in range(2)] == windows
    again = hf.to_config(spec, torch.float32, None, family)
    assert spec_of(again) == spec
    transformers = pytest.importorskip("transformers")
    theirs, ours = (transformers.AutoConfig.for_model(**c) for c in (of(family, **more), again))
    assert theirs.sliding_window == ours.sliding_window or windows == [None, None]
    if family in ("qwen2", "qwen3"):
        kinds = [FULL if window is None else SLIDING for window in windows]
        assert ours.layer_types == theirs.layer_types == kinds


@pytest.mark.parametrize(
    ("family", "more", "name"),
    [
        ("llama", {"sliding_window": 16}, "sliding_window is 16"),
        ("llama", {"layer_types": [FULL, SLIDING]}, "layer_types is"),
        ("mistral", {"sliding_window": 16, "layer_types": [FULL, FULL]}, "layer_types is"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"sliding_window": 2.5}, "sliding_window"),
        ("qwen2", USED, "max_window_layers is miss"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_window is miss"),
        ("qwen2", USED | {"sliding_window": None, "max_window_layers": 1}, "sliding_window is nul"),
        ("qwen3", USED | {"layer_types": [SLIDING]}, "layer_types is"),
        ("qwen3", USED | {"layer_types": [SLIDING, "chunked_attention"]}, "layer_types is"),
        ("qwen3", USED | {"layer_types": [SLIDING, [FULL]]}, "layer_types is"),
        ("qwen3", {"layer_types": [SLIDING, FULL], "sliding_window": 16}, "layer_types is"),
        ("qwen3_moe", USED | {"max_window_layers": 1}, "max_window_layers is 1"),
        ("qwen3_moe", USED | {"sliding_window": None}, "sliding_window is null"),
        ("qwen3_moe", {"use_sliding_window": True}, "sliding_window is missing"),
        ("qwen3_moe", USED | {"layer_types": [SLIDING, FULL]}, "layer_types is"),
        ("mixtral", {"sliding_window": 16, "layer_types": [FULL, FULL]}, "layer_types is"),
        ("gemma", {}, 'model_type is "gemma"'),
    ],
)  # fmt: skip
def test_windows_that_no_model_here_has_are_refused_by_name(
    family: str, more: dict[str, Any], name: str
) -> None:
    with pytest.raises(UserError, match=name):
        spec_of(of(family, **more))


def test_a_mistral_says_whether_it_has_a_window() -> None:
    config = of("mistral")
    assert spec_of(config | {"sliding_window": 64}).window_of(0) == 63
    del config["sliding_window"]
    with pytest.raises(UserError, match="sliding_window is missing"):
        spec_of(config)


def test_windows_of_some_layers_need_a_family_that_names_layers() -> None:
    spec = spec_of(of("mistral", sliding_window=16))
    assert hf.architecture(spec) == "mistral"
    with pytest.raises(hf.ConversionError, match=r"mistral has no window_size=\[15, 0\]"):
        hf.architecture(replace(spec, window_attn_skip_freq=2))


ORIGINAL = {"original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any] | None] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "linear by its old name": {"type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "beta_fast": None, **ORIGINAL},
    "yarn of the whole length": {"rope_type": "yarn", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, **ORIGINAL},
    "linear, with a base": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
    "a base alone": {"rope_theta": 50.0},
    "all of it": {"rope_type": "default", "partial_rotary_factor": 1.0},
    "null": None,
    "empty": {},
}  # fmt: skip
NO_ROPE: dict[str, dict[str, Any]] = {
    'rope_type is "x"': {"rope_type": "x"},
    'rope_type is "dynamic"': {"rope_type": "dynamic", "factor": 2.0},
    "rope_type is null": {"rope_type": None, "type": "linear", "factor": 2.0},
    "factor is null": {"rope_type": "yarn", "factor": None, **ORIGINAL},
    "factor is 2.0 in rope_scaling, whose rope_type is default": {"factor": 2.0},
    'rope_type is "linear", and type is "yarn"': {
        "rope_type": "linear", "type": "yarn", "factor": 2.0, **ORIGINAL,
    },
    "rope_theta is null": {"rope_type": "linear", "factor": 2.0, "rope_theta": None},
    "full_attention is": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
}  # fmt: skip


def theirs_of(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """The frequencies of transformers' rotary positions, and the factor of cosines and sines."""
    transformers = pytest.importorskip("transformers")
    family = config["model_type"]
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rotary = getattr(models, f"{family.title().replace('_', '')}RotaryEmbedding")
    made = rotary(transformers.AutoConfig.for_model(**copy.deepcopy(config)))
    return made.inv_freq, made.attention_scaling


def ours_of(spec: GPTSpec) -> tuple[torch.Tensor, float]:
    plain = frequencies(spec, torch.device("cpu"))
    return plain / (spec.seq_len_interpolation_factor or 1.0), yarn_attention_factor(spec)


@pytest.mark.parametrize("theta", [None, 10000.0, 700.0])
@pytest.mark.parametrize("family", DECODERS)
def test_two_sections_of_positions_are_read_as_transformers_does(
    family: str, theta: float | None
) -> None:
    """transformers 5 takes `rope_scaling` if it says anything; a base that is lost is refused."""
    wanted: list[tuple[str, str]] = []
    read: list[tuple[str, str]] = []
    for old, new in itertools.product(ROPES, ROPES):
        config = of(family, rope_scaling=ROPES[old], rope_parameters=ROPES[new])
        config |= {} if theta is None else {"rope_theta": theta}
        one, other = (dict(ROPES[name] or {}) for name in (old, new))
        base = (one or other).get("rope_theta", theta or (1e6 if family == "mixtral" else 10000.0))
        if {config.get("rope_theta", base), other.get("rope_theta", base)} == {base}:
            wanted.append((old, new))
        try:
            spec = spec_of(config)
        except CheckpointError as error:
            assert "rope_theta is" in str(error)
            continue
        read.append((old, new))
        (found, factor), (expected, theirs) = ours_of(spec), theirs_of(config)
        assert torch.equal(found, expected) and factor == theirs, (old, new)
        differ = ours_of(spec_of(of(family, rope_theta=base, rope_scaling=ROPES[new])))
        if one and other and not torch.equal(differ[0], found):
            assert "transformers reads rope_scaling" in hf.notes_on(config)[0]
    assert read == wanted and len(read) > 50


@pytest.mark.parametrize("reason", NO_ROPE)
@pytest.mark.parametrize("family", DECODERS)
def test_positions_that_transformers_has_not_are_refused_by_name(family: str, reason: str) -> None:
    """Also where the other section has some that are known, which transformers does not read."""
    known = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        spec_of(of(family, rope_scaling=NO_ROPE[reason], rope_parameters=known))
    with pytest.raises(CheckpointError, match=re.escape(reason.replace("scaling", "parameters"))):
        spec_of(of(family, rope_scaling=None, rope_parameters=NO_ROPE[reason]))
    for section in NO_ROPE.values():
        config = of(family, rope_scaling=known, rope_parameters=section)
        if section.get("rope_theta", 1) is not None:
            assert spec_of(config).seq_len_interpolation_factor == 2.0 and hf.notes_on(config)


def test_what_transformers_4_does_not_read_is_said() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    assert not hf.notes_on(of("llama", rope_parameters={**linear, "rope_theta": 1e6}))
    assert not hf.notes_on(of("llama", rope_scaling=linear, rope_theta=1e6))
    (note,) = hf.notes_on(of("llama", rope_parameters=linear, rope_theta=1e6))
    assert "transformers 4 reads rope_scaling alone" in note
    (note,) = hf.notes_on(of("llama", rope_scaling={**linear, "rope_theta": 1e6}))
    assert "else takes 10000" in note


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
@pytest.mark.parametrize("family", DECODERS)
def test_an_export_says_its_positions_once(family: str, kind: str) -> None:
    """transformers 4 and 5 read the same, and an edit of the one place is seen by all."""
    transformers = pytest.importorskip("transformers")
    section = ROPES[kind]
    spec = spec_of(of(family, rope_scaling=section, rope_theta=700.0))
    config = hf.to_config(spec, torch.float32, None, family)
    assert "rope_parameters" not in config and spec_of(config) == spec
    by_4 = {"rope_type": "default", **(config["rope_scaling"] or {})}
    by_4["rope_type"] = by_4.pop("type", by_4["rope_type"])
    by_5 = transformers.AutoConfig.for_model(**copy.deepcopy(config)).rope_parameters
    by_5 = {key: value for key, value in by_5.items() if key != "type"}
    assert by_5 == by_4 | {"rope_theta": config["rope_theta"]}
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["factor"] *= 2
    config["rope_theta"] = 800.0
    edited = spec_of(config)
    assert edited != spec and torch.equal(ours_of(edited)[0], theirs_of(config)[0])
    config["rope_parameters"] = {"rope_type": "linear", "factor": 9.0}
    assert hf.notes_on(config) and torch.equal(ours_of(spec_of(config))[0], theirs_of(config)[0])


def test_scores_of_yarn_by_two_scales() -> None:
    """As DeepSeek's models give them: the ratio of the two, as transformers computes it."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16, "rope_theta": 10000.0}  # fmt: skip
    config = of("llama", rope_parameters=rope)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](transformers.AutoConfig.for_model(**config), None)
    assert spec_of(config).yarn_attention_factor == factor != 1


def write_model(folder: Path, spec: GPTSpec, family: str, **options: Any) -> dict[str, Any]:
    """A model of random weights, and these by logical name."""
    drawn = torch.Generator().manual_seed(3)
    names = [name for entry in hf.mapping(spec) for name in entry.ours]
    own = {name: torch.randn(logical_shapes(spec)[name], generator=drawn) for name in names}
    huggingface_files.write_folder(
        folder, spec, own.__getitem__, dtype=torch.float32, eod_id=3, family=family, **options
    )
    return own


IN_AND_OUT = {name: (name, {}) for name in DECODERS}
IN_AND_OUT |= {
    "mistral with a window": ("mistral", WINDOWS["all layers"][1]),
    "qwen2 with windows": ("qwen2", WINDOWS["from a layer on"][1]),
    "qwen3_moe with a dense layer": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
}


@pytest.mark.parametrize("name", IN_AND_OUT)
def test_in_out_and_in_again_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Several files, a list of ends, a chat template and a configuration of generation."""
    family, more = IN_AND_OUT[name]
    spec = spec_of(of(family, **more))
    first = tmp_path / "first"
    kept = {"eos_token_id": [3, 5], "temperature": 0.7, "do_sample": True, "top_k": 20}
    write_model(first, spec, family, max_file_bytes=10_000, generation=kept)
    (first / "chat_template.jinja").write_text("{{ messages }}")
    ours, second, again = (tmp_path / name for name in ("ours", "second", "again"))
    assert import_hf.main([str(first), str(ours)]) == 0
    assert export.main([str(ours), str(second), "--family", family]) == 0
    import_model(second, again)
    assert json.loads((second / "config.json").read_text())["model_type"] == family
    assert (second / "chat_template.jinja").read_text() == "{{ messages }}"
    generation = json.loads((second / "generation_config.json").read_text())
    assert generation.items() >= kept.items()
    one, other = (Reader(next((folder / "checkpoints").iterdir())) for folder in (ours, again))
    assert shape_of(one) == shape_of(other)
    assert shape_of(one).window_size == spec.window_size and shape_of(one).moe == spec.moe
    assert set(one.names()) == set(other.names())
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.names())
    files = [load_file(path) for path in sorted(first.glob("*.safetensors"))]
    assert len(files) > 1
    theirs = {name: tensor for file in files for name, tensor in file.items()}
    exported = {k: v for path in second.glob("*.safetensors") for k, v in load_file(path).items()}
    assert theirs.keys() == exported.keys()
    assert all(torch.equal(theirs[name], exported[name]) for name in theirs)


def test_another_family_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    spec = gpt_spec(normalization="rmsnorm", activation="swiglu", position_embedding_type="rope",
                    bias=False, qk_layernorm=True)  # fmt: skip
    assert hf.architecture(spec) == "qwen3"
    with pytest.raises(hf.ConversionError, match="llama has no qk_layernorm=True"):
        hf.architecture(spec, "llama")
