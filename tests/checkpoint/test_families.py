"""Models of today's families of transformers, in and out, and what of them is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megafp8.checkpoint import huggingface as hf
from megafp8.checkpoint import huggingface_files
from megafp8.checkpoint.families import FAMILIES
from megafp8.checkpoint.reader import Reader
from megafp8.cli import export, import_hf
from megafp8.errors import UserError
from megafp8.specs import GPTSpec
from megafp8.train.huggingface import import_model
from megafp8.train.load_model import shape_of
from tests.tiny import gpt_spec

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 96,
}  # fmt: skip
DECODERS = [name for name in FAMILIES if name != "gpt2"]


def of(name: str, **more: Any) -> dict[str, Any]:
    window = {"sliding_window": None} if name == "mistral" else {}
    return {"model_type": name, **SIZES, "head_dim": 8, **window, **more}


def spec_of(config: dict[str, Any]) -> GPTSpec:
    return hf.from_config(config, Path("config.json"))


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    },
    "Qwen2.5 0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3 0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mistral 7B v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Mistral 7B v0.3": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 32768,
    },
}  # fmt: skip
"""The form of the configurations as they were published."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_and_written(name: str) -> None:
    spec = spec_of(PUBLISHED[name])
    family = PUBLISHED[name]["model_type"]
    again = hf.to_config(spec, torch.bfloat16, None, family)
    assert spec_of(again) == spec
    assert spec.qk_layernorm == (family == "qwen3") and spec.add_qkv_bias == (family == "qwen2")
    assert spec.scale_positional_embedding == (name == "Llama 3.1 8B")
    assert spec.window_size == ((4095, 0) if name == "Mistral 7B v0.1" else None)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**PUBLISHED[name])
    ours = transformers.AutoConfig.for_model(**again)
    for key in ("rope_parameters", "num_key_value_heads", "hidden_size", "rms_norm_eps"):
        assert getattr(ours, key) == getattr(theirs, key), key


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("quantization_config", {"quant_method": "fp8"}),
        ("auto_map", {"AutoModelForCausalLM": "model.Mine"}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
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
        "truncate": "truncate", "llama3": "high_freq_factor", "yarn": "original_max",
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
    if family != "mistral":
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
    own = {name: torch.randn(hf.logical_shape(spec, name), generator=drawn) for name in names}
    huggingface_files.write_folder(
        folder, spec, own.__getitem__, dtype=torch.float32, eod_id=3, family=family, **options
    )
    return own


IN_AND_OUT = {name: (name, {}) for name in DECODERS}
IN_AND_OUT |= {
    "mistral with a window": ("mistral", WINDOWS["all layers"][1]),
    "qwen2 with windows": ("qwen2", WINDOWS["from a layer on"][1]),
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
    assert shape_of(one).window_size == spec.window_size
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
