"""Models with experts in the files of transformers: both layouts, and what of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megafp8.checkpoint import huggingface as hf
from megafp8.checkpoint.huggingface_files import WEIGHTS, read_tensors
from megafp8.errors import CheckpointError, UserError
from megafp8.specs import GPTSpec
from megafp8.specs.moe import MoESpec
from megafp8.train.huggingface import import_model
from tests.checkpoint.test_families import EXPERTS, of, spec_of, write_model

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1."
IN_FILES = {
    "mixtral": (f"{LAYER}block_sparse_moe.", ("w1", "w3", "w2")),
    "qwen3_moe": (f"{LAYER}mlp.", ("gate_proj", "up_proj", "down_proj")),
}
"""The module of a layer's experts in files, and the names of gate, up and down."""


def moe_of(spec: GPTSpec) -> MoESpec:
    assert spec.moe is not None
    return spec.moe


def read(folder: Path, spec: GPTSpec) -> Tensors:
    return {tensor.name: tensor.read() for tensor in read_tensors(folder, spec)}


def in_memory(stored: Tensors, family: str, ending: str = "") -> Tensors:
    """The tensors of a file as transformers 5 has them in memory, without our code's mapping."""
    made = dict(stored)
    names = IN_FILES[family][1]
    for layer in range(2):
        module = IN_FILES[family][0].replace("1", str(layer))
        gates, ups, downs = (
            [made.pop(f"{module}experts.{e}.{name}.weight") for e in range(4)] for name in names
        )
        both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        experts = f"model.layers.{layer}.mlp.experts."
        made[f"{experts}gate_up_proj{ending}"] = torch.stack(both)
        made[f"{experts}down_proj{ending}"] = torch.stack(downs)
        made[f"model.layers.{layer}.mlp.gate.weight"] = made.pop(f"{module}gate.weight")
    return made


LAYOUTS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "of files": lambda stored, _: stored,
    "in memory": in_memory,
    "in memory, as weights": lambda stored, family: in_memory(stored, family, ".weight"),
    "of files, in transformers 5's module": lambda stored, _: {
        name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in stored.items()
    },
    "in memory, without the first word": lambda stored, family: {
        name.removeprefix("model."): tensor for name, tensor in in_memory(stored, family).items()
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_read_in_every_layout(family: str, layout: str, tmp_path: Path) -> None:
    spec = spec_of(of(family))
    own = write_model(tmp_path, spec, family)
    stored = load_file(tmp_path / WEIGHTS)
    module, (gate, up, down) = IN_FILES[family]
    for expert in range(4):
        for name, part in {gate: "gate", up: "up", down: "fc2"}.items():
            theirs = stored[f"{module}experts.{expert}.{name}.weight"]
            assert torch.equal(theirs, own[f"layers.1.mlp.experts.{expert}.{part}.weight"])
    assert torch.equal(stored[f"{module}gate.weight"], own["layers.1.mlp.router.weight"])
    save_file(LAYOUTS[layout](stored, family), tmp_path / WEIGHTS)
    found = read(tmp_path, spec)
    assert found.keys() == own.keys() and len(found) == 3 + 2 * (7 + 12 + 2 * spec.qk_layernorm)
    assert all(torch.equal(found[name], own[name]) for name in own)


@pytest.mark.parametrize("layout", ["of files", "in memory"])
@pytest.mark.parametrize("family", EXPERTS)
def test_tensors_that_are_missing_or_too_many_are_named(
    family: str, layout: str, tmp_path: Path
) -> None:
    """Each tensor of the experts in turn; one more expert; and a layer in both layouts."""
    spec = spec_of(of(family))
    write_model(tmp_path, spec, family)
    of_files = load_file(tmp_path / WEIGHTS)
    whole = LAYOUTS[layout](of_files, family)
    names = [name for name in whole if name.startswith(LAYER) and ("expert" in name or
             name.endswith("gate.weight"))]  # fmt: skip
    assert len(names) == (13 if layout == "of files" else 3)
    for name in names:
        save_file({k: v for k, v in whole.items() if k != name}, tmp_path / WEIGHTS)
        with pytest.raises(CheckpointError, match=f"lacks {name}"):
            read_tensors(tmp_path, spec)
    module, (gate, _, _) = IN_FILES[family]
    for extra in (f"{module}experts.4.{gate}.weight", f"{LAYER}mlp.experts.gate_up_proj.weight",
                  f"{module}experts.0.{gate}.weight"):  # fmt: skip
        if extra in whole:
            continue
        save_file(whole | {extra: torch.zeros(24, 32)}, tmp_path / WEIGHTS)
        with pytest.raises(CheckpointError, match="lacks|has .*experts.* does not have"):
            read_tensors(tmp_path, spec)
    damaged = {k: v[:3].clone() if k == names[0] else v for k, v in whole.items()}
    save_file(damaged, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{names[0]} has shape"):
        read_tensors(tmp_path, spec)


def test_a_number_that_is_not_finite_is_named_in_the_joined_tensor(tmp_path: Path) -> None:
    spec = spec_of(of("mixtral"))
    write_model(tmp_path, spec, "mixtral")
    stored = in_memory(load_file(tmp_path / WEIGHTS), "mixtral")
    stored[f"{LAYER}mlp.experts.down_proj"][2, 5, 7] = torch.nan
    save_file(stored, tmp_path / WEIGHTS)
    tensors = {tensor.name: tensor for tensor in read_tensors(tmp_path, spec)}
    assert bool(tensors["layers.1.mlp.experts.1.fc2.weight"].read().isfinite().all())
    with pytest.raises(CheckpointError, match=r"down_proj has NaN or infinite values"):
        tensors["layers.1.mlp.experts.2.fc2.weight"].read()


MADE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "renormalized": ("qwen3_moe", {"norm_topk_prob": True}, {"pre_softmax": False}),
    "as they are": ("qwen3_moe", {"norm_topk_prob": False}, {"pre_softmax": True}),
    "not said": ("qwen3_moe", {}, {"pre_softmax": True, "ffn_hidden_size": 24}),
    "Mixtral": ("mixtral", {}, {"pre_softmax": False, "ffn_hidden_size": 64, "top_k": 2}),
    "three of four": ("mixtral", {"num_experts_per_tok": 3}, {"top_k": 3}),
    "the loss": ("mixtral", {"router_aux_loss_coef": 0.02},
                 {"router_loss": "aux_loss", "router_loss_coeff": 0.02}),
    "the loss by default": ("qwen3_moe", {}, {"router_loss": "aux_loss",
                                              "router_loss_coeff": 0.001}),
    "no loss": ("qwen3_moe", {"router_aux_loss_coef": 0.0},
                {"router_loss": "none", "router_loss_coeff": 0.0}),
    "by another name": ("mixtral", {"num_local_experts": None, "num_experts": 6},
                        {"num_experts": 6}),
    "as transformers 5 writes": ("qwen3_moe", {"num_experts": None, "num_local_experts": 6},
                                 {"num_experts": 6}),
    "by both names": ("qwen3_moe", {"num_local_experts": 4}, {"num_experts": 4}),
    "some layers": ("qwen3_moe", {"mlp_only_layers": [0, 2]}, {"layers": (False, True, False)}),
    "no layers without": ("qwen3_moe", {"mlp_only_layers": None}, {"layers": (True,) * 3}),
    "each second layer": ("qwen3_moe", {"decoder_sparse_step": 2},
                          {"layers": (False, True, False)}),
    "both": ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [1]},
             {"layers": (True, False, True)}),
}  # fmt: skip


def config_of(family: str, more: dict[str, Any]) -> dict[str, Any]:
    config = of(family, num_hidden_layers=3) | more
    return {k: v for k, v in config.items() if v is not None or k == "mlp_only_layers"}


@pytest.mark.parametrize("name", MADE)
def test_keys_are_read_and_written_as_transformers_does(name: str) -> None:
    family, more, expected = MADE[name]
    config = config_of(family, more)
    spec = spec_of(config)
    moe = moe_of(spec)
    assert {field: getattr(moe, field) for field in expected} == expected
    again = hf.to_config(spec, torch.float32, None)
    assert again["model_type"] == family and spec_of(again) == spec
    transformers = pytest.importorskip("transformers")
    for keys in (config, again):
        theirs = transformers.AutoConfig.for_model(**keys)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(theirs)
        layers = [layer.mlp for layer in model.model.layers]
        assert tuple(hasattr(mlp, "experts") for mlp in layers) == moe.layers
        block = next(mlp for mlp in layers if hasattr(mlp, "experts"))
        wanted = (moe.num_experts, 2 * moe.ffn_hidden_size, 32)
        assert block.experts.gate_up_proj.shape == wanted
        assert block.gate.top_k == moe.top_k
        assert getattr(block.gate, "norm_topk_prob", True) == (not moe.pre_softmax)
        assert theirs.router_aux_loss_coef == moe.router_loss_coeff


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
        ("mixtral", {"num_experts": 8}, "num_experts is 8"),
        ("mixtral", {"num_experts": 0}, "num_experts is 0"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ("mixtral", {"num_experts_per_tok": True}, "num_experts_per_tok is true"),
        ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise is 0.01"),
        ("mixtral", {"router_aux_loss_coef": -1}, "router_aux_loss_coef is -1"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("mixtral", {"use_qk_norm": True}, "use_qk_norm is true"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts is 0"),
        ("qwen3_moe", {"num_local_experts": 3}, "num_local_experts is 3"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob is"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, r"mlp_only_layers is \[0, 1, 2\]"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, r"mlp_only_layers is \[true\]"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, "decoder_sparse_step is 4"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm is false"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is true"),
    ],
)
def test_what_no_model_here_has_is_refused_by_name(
    family: str, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        spec_of(config_of(family, more))


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("mixtral", {"score_function": "sigmoid"}, ["sigmoid"]),
        ("mixtral", {"score_function": "sigmoid", "has_expert_bias": True}, ["sigmoid", "bias"]),
        ("mixtral", {"scaling_factor": 2.5}, ["scaling_factor=2.5"]),
        ("mixtral", {"shared_ffn_hidden_size": 64}, ["shared_.*=64"]),
        ("mixtral", {"pre_softmax": True}, ["pre_softmax=True"]),
        ("mixtral", {"layers": (True, False)}, ["layer"]),
        ("qwen3_moe", {"shared_ffn_hidden_size": 48}, ["shared_.*=48"]),
        ("qwen3_moe", {"scaling_factor": 0.5}, ["scaling_factor=0.5"]),
    ],
)
def test_an_export_names_the_part_that_no_family_has(
    family: str, changes: dict[str, Any], parts: list[str]
) -> None:
    spec = spec_of(of(family))
    other = replace(spec, moe=replace(moe_of(spec), **changes))
    for asked in (None, family):
        with pytest.raises(hf.ConversionError) as caught:
            hf.to_config(other, torch.float32, None, asked)
        message = str(caught.value)
        assert "llama" not in message and "gpt2" not in message, "of families without experts"
        for part in parts:
            with pytest.raises(UserError, match=f"{family} has no .*{part}"):
                hf.architecture(other, asked)


def test_families_with_and_without_experts_are_not_each_others() -> None:
    """Also where one is asked for; and the loss of training and a width of no layer may differ."""
    spec = spec_of(of("mixtral"))
    moe = moe_of(spec)
    dense = replace(spec, moe=None)
    assert hf.architecture(spec) == "mixtral" and hf.architecture(dense) == "llama"
    with pytest.raises(hf.ConversionError, match="mistral has no .*4"):
        hf.architecture(spec, "mistral")
    with pytest.raises(hf.ConversionError, match="mixtral has no num_moe_experts=None. Export"):
        hf.architecture(dense, "mixtral")
    with pytest.raises(hf.ConversionError, match="qwen3_moe has no qk_layernorm=False"):
        hf.architecture(spec, "qwen3_moe")
    trained = replace(moe, router_loss="seq_aux_loss", router_loss_coeff=0.1, z_loss_coeff=0.01)
    keys = hf.to_config(replace(spec, moe=trained, ffn_hidden_size=999), torch.float32, None)
    assert keys["router_aux_loss_coef"] == 0.1 and keys["intermediate_size"] == 64


def test_the_loss_of_the_router_is_said() -> None:
    assert not hf.notes_on(of("mixtral", router_aux_loss_coef=0.0))
    (note,) = hf.notes_on(of("mixtral", router_aux_loss_coef=0.02))
    assert "router_aux_loss_coef is 0.02" in note and " 0.02 would be about as" in note
    some = of("qwen3_moe", num_hidden_layers=5, mlp_only_layers=[0], num_experts_per_tok=3)
    (note,) = hf.notes_on(some | {"router_aux_loss_coef": 0.01})
    assert " 0.0075 would be about as strong" in note


def test_an_import_keeps_the_loss_of_the_router(tmp_path: Path) -> None:
    """In the settings with which the model is trained further."""
    spec = spec_of(of("mixtral", router_aux_loss_coef=0.02))
    write_model(tmp_path / "theirs", spec, "mixtral")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    settings = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text())["model"]
    assert settings["moe_aux_loss_coeff"] == 0.02 and settings["num_moe_experts"] == 4
