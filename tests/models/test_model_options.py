"""Walk all options of the model: which of them define the function of its weights, and who knows.

An option whose value changes what a model computes of the same weights in exact arithmetic, or
which weights it has, must be marked in the schema. From the mark follows that weights of another
function are refused, that fine-tuning takes the option, and that an export keeps or refuses it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.backends.te.parts import PARAMETERS
from megafp8.checkpoint.huggingface import ConversionError, architecture, from_config, to_config
from megafp8.config.architecture import (
    function_differences,
    function_keys,
    spec_of_tree,
    tree_of_spec,
)
from megafp8.config.base_model import FILES, with_base
from megafp8.config.errors import COMMAND_LINE, DEFAULT
from megafp8.config.keys import keys_of
from megafp8.config.layers import Layer
from megafp8.config.schema.model import Architecture
from megafp8.config.settings import Setting
from megafp8.errors import ConfigError
from megafp8.files import write_json_atomically
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.specs import GPTSpec
from megafp8.specs.rank_shape import rank_shape
from megafp8.train.load_model import MAY_DIFFER, check_fits
from tests.config.helpers import run_spec
from tests.models.test_options import randomized

VOCAB = 96
BASE = ["trainer.precision=16", "model.num_layers=3", "model.hidden_size=32",
        "model.ffn_hidden_size=64", "model.num_attention_heads=4", "model.encoder_seq_length=16",
        "model.max_position_embeddings=16"]  # fmt: skip
ROPE = ["model.position_embedding_type=rope"]
SCALED = [*ROPE, "model.scale_positional_embedding=True", "model.kv_channels=16"]
SCALED.append("model.original_max_position_embeddings=64")
YARN = [*ROPE, "model.yarn_rotary_scaling_factor=4", "model.kv_channels=32"]
YARN.append("model.original_max_position_embeddings=512")

# Another value of each option, and the settings with which it has an effect.
OTHER: dict[str, tuple[object, list[str]]] = {
    "encoder_seq_length": (8, []),
    "max_position_embeddings": (32, []),
    "num_layers": (2, []),
    "hidden_size": (64, []),
    "ffn_hidden_size": (128, []),
    "num_attention_heads": (2, []),
    "kv_channels": (16, []),
    "num_query_groups": (2, []),
    "init_method_std": (0.05, []),
    "use_scaled_init_method": (False, []),
    "hidden_dropout": (0.2, []),
    "attention_dropout": (0.2, []),
    "ffn_dropout": (0.2, []),
    "normalization": ("rmsnorm", []),
    "layernorm_zero_centered_gamma": (True, []),
    "layernorm_epsilon": (0.1, []),
    "bias": (False, []),
    "add_qkv_bias": (True, ["model.bias=False"]),
    "qk_layernorm": (True, []),
    "window_size": ([4, 0], []),
    "window_attn_skip_freq": (2, ["model.window_size=[4,0]"]),
    "activation": ("squared-relu", ["model.openai_gelu=False"]),
    "openai_gelu": (False, []),
    "transformer_block_type": ("post_ln", []),
    "position_embedding_type": ("alibi", []),
    "rotary_percentage": (0.5, ROPE),
    "rotary_base": (500.0, ROPE),
    "seq_len_interpolation_factor": (2.0, ROPE),
    "scale_positional_embedding": (True, ROPE),
    "rope_scaling_factor": (2.0, SCALED),
    "rope_low_freq_factor": (2.0, SCALED),
    "rope_high_freq_factor": (8.0, SCALED),
    "yarn_rotary_scaling_factor": (2.0, ROPE),
    "yarn_beta_fast": (8.0, YARN),
    "yarn_beta_slow": (4.0, YARN),
    "yarn_attention_factor": (2.0, YARN),
    "original_max_position_embeddings": (256, SCALED),
    "share_embeddings_and_output_weights": (False, []),
    "apply_query_key_layer_scaling": (True, []),
    "fp32_residual_connection": (True, []),
    "make_vocab_size_divisible_by": (64, []),
    "override_vocab_size": (512, []),
}
# Those of experts are walked in tests/config/test_moe.py and tests/checkpoint/test_expert_files.py.
MARKED = set(function_keys()) & keys_of(Architecture).keys()


def specs_of(name: str) -> tuple[GPTSpec, GPTSpec]:
    """The model without and with an option, through the whole configuration."""
    value, more = OTHER[name]
    found = []
    for given in ([], [f"model.{name}={value}"]):
        spec = run_spec(*BASE, *more, *given).model
        found.append(dataclasses.replace(spec, vocab_size=VOCAB))
    return found[0], found[1]


def weights_of(model: GPT) -> dict[str, torch.Tensor]:
    return {
        piece.name: param.detach()[piece.local]
        for param in model.parameters()
        for piece in pieces_of(param)
    }


def test_every_option_is_walked() -> None:
    assert OTHER.keys() == keys_of(Architecture).keys()


@pytest.mark.parametrize("name", OTHER)
def test_the_mark_says_what_the_model_computes(name: str) -> None:
    """In FP64, of the same weights, without dropout."""
    models = [randomized(GPT(Parts(s, torch.float64, 7, RandomStreams(7)))) for s in specs_of(name)]
    plain, changed = (weights_of(model.eval()) for model in models)
    differs = {n: w.shape for n, w in plain.items()} != {n: w.shape for n, w in changed.items()}
    if not differs:
        with torch.no_grad():
            for piece, weight in plain.items():
                changed[piece].copy_(weight)
            tokens = torch.arange(16)[None] * 5 % VOCAB
            one, other = (model.logits(tokens) for model in models)
        difference = ((one - other).abs().max() / one.abs().max()).item()
        assert difference < 1e-12 or difference > 1e-6
        differs = difference > 1e-6
    assert differs == (name in MARKED)


@pytest.mark.parametrize("name", OTHER)
def test_the_plan_counts_its_parameters(name: str) -> None:
    value, more = OTHER[name]
    spec = run_spec(*BASE, *more, f"model.{name}={value}")
    model = dataclasses.replace(spec.model, vocab_size=VOCAB)
    counted = rank_shape(dataclasses.replace(spec, model=model), 0).params
    weights = weights_of(GPT(Parts(model, torch.float64, 7, RandomStreams(7))))
    assert sum(param.elements for param in counted) == sum(w.numel() for w in weights.values())


@pytest.mark.parametrize("name", OTHER)
def test_transformer_engine_has_its_parameters_or_refuses_it(name: str) -> None:
    """A new parameter needs a name in its layers, or a row of `config/te_layers.py`."""
    value, more = OTHER[name]
    given = ["trainer.precision=bf16", "model.fp8=True", *BASE[1:], *more, f"model.{name}={value}"]
    try:
        spec = run_spec(*given, "model.fp8_backend=te").model
    except ConfigError as error:
        keys = [name, *(each.partition("=")[0] for each in more)]
        assert any(key in str(error) for key in keys)
        return
    spec = dataclasses.replace(spec, vocab_size=VOCAB)
    model = GPT(Parts(spec, torch.float64, 7, RandomStreams(7)))
    names = [pieces_of(param)[0].name for param in model.parameters()]
    of_layers = {name.split(".", 2)[2] for name in names if name.startswith("layers.")}
    assert len(of_layers) >= 6 and of_layers <= PARAMETERS.keys()


@pytest.mark.parametrize("name", OTHER)
def test_weights_of_another_function_are_refused(name: str) -> None:
    plain, changed = specs_of(name)
    stored: Any = SimpleNamespace(
        meta={"config": {"model": tree_of_spec(plain)}},
        path="there",
        global_shape=lambda name: (VOCAB, plain.hidden_size),
    )
    if name not in MARKED:
        assert function_differences(changed, plain) == {} == function_differences(plain, changed)
        assert check_fits(changed, stored) == []
        return
    first, *others = function_differences(changed, plain)
    assert first == name and set(others) <= {"kv_channels", "num_query_groups"}  # these follow
    if name in MAY_DIFFER:
        assert len(check_fits(changed, stored)) == 1
        return
    with pytest.raises(ConfigError) as caught:
        check_fits(changed, stored)
    assert caught.value.key == f"model.{name}" and f"Set model.{name}=" in caught.value.hint


@pytest.mark.parametrize("name", sorted(MARKED))
def test_a_tree_keeps_it_and_fine_tuning_takes_it(name: str, tmp_path: Path) -> None:
    plain, changed = specs_of(name)
    tree = tree_of_spec(changed)
    assert function_differences(spec_of_tree(tree, VOCAB), changed) == {}
    write_json_atomically(tmp_path / "manifest.json", {"meta": {"config": {"model": tree}}})
    given = {FILES: "mine.jsonl", "restore_from_path": str(tmp_path)}
    asked = [Setting(key, value, COMMAND_LINE) for key, value in given.items()]
    layers = with_base([Layer(DEFAULT, ()), Layer(COMMAND_LINE, tuple(asked))], lambda path: None)
    taken = {setting.key: setting.value for setting in layers[1].settings}
    assert taken[f"model.{name}"] == tree[name] != tree_of_spec(plain)[name]


def test_a_model_of_transformers_is_to_be_imported_first(tmp_path: Path) -> None:
    for made, said in (("", "has no checkpoint"), ("config.json", "megafp8 import")):
        if made:
            (tmp_path / made).write_text("{}")
        given = {FILES: "mine.jsonl", "restore_from_path": str(tmp_path)}
        asked = [Setting(key, value, COMMAND_LINE) for key, value in given.items()]
        with pytest.raises(ConfigError, match=said):
            with_base([Layer(DEFAULT, ()), Layer(COMMAND_LINE, tuple(asked))], lambda path: None)


@pytest.mark.parametrize("name", sorted(MARKED))
def test_an_export_keeps_it_or_is_refused(name: str) -> None:
    for spec in specs_of(name):
        try:
            architecture(spec)
        except ConversionError as error:
            wrong = (name, "position_embedding_type=rope", "bias=False")  # the last two: the base
            assert any(each in str(error) for each in wrong)
            continue
        config = to_config(spec, torch.float32, None)
        assert function_differences(from_config(config, Path("config.json")), spec) == {}
