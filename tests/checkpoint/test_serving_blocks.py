"""Weights in MXFP8 and NVFP4 in the layouts of compressed-tensors and ModelOpt.

The reader here is written from the two layouts' descriptions; the bytes are those of the slow
specifications of the recipes, for the weights that a run casts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megafp8.checkpoint import huggingface as hf
from megafp8.checkpoint import huggingface_files
from megafp8.checkpoint.serving import single_linears
from megafp8.checkpoint.serving_blocks import KINDS, LAYOUTS, BlockFormat, Kind, Layout
from megafp8.errors import UserError
from megafp8.specs import GPTSpec
from megafp8.specs.layer import LayerLinear
from megafp8.train.served import Exported, ServedLinear, served_model, values_of
from tests.checkpoint.test_serving import (
    BY_BYTE,
    Names,
    masters_of,
    modules_of,
    spec_of,
    write,
)
from tests.spec import mxfp8, nvfp4

ODD = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 4,
       "num_key_value_heads": 1, "head_dim": 24}  # fmt: skip
"""Parts of QKV have 96 and 24 rows, so that squares go over their borders."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "odd": ("qwen2", ODD),
    "tied": ("qwen3", {"tie_word_embeddings": True}), "mixtral": ("mixtral", {}),
    "experts": ("qwen3_moe", {"mlp_only_layers": [0], "moe_intermediate_size": 96}),
}  # fmt: skip
EVERY = list(itertools.product(KINDS, LAYOUTS))


def codes_of(stored: Names, module: str, kind: Kind, layout: Layout) -> NDArray[np.uint8]:
    """The codes of a weight's numbers [N, K]."""
    packed = kind == "nvfp4" and layout == "compressed-tensors"
    content = stored[f"{module}.weight{'_packed' if packed else ''}"]
    assert content.dtype == (torch.float8_e4m3fn if kind == "mxfp8" else torch.uint8)
    codes = content.view(torch.uint8).numpy()
    if kind == "mxfp8":
        return codes
    both = np.empty((codes.shape[0], 2 * codes.shape[1]), np.uint8)
    both[:, 0::2], both[:, 1::2] = codes % 16, codes // 16
    return both


def read_weight(stored: Names, module: str, kind: Kind, layout: Layout) -> NDArray[np.float64]:
    """A weight by the layouts' descriptions, in float64."""
    codes = codes_of(stored, module, kind, layout)
    scale = stored[f"{module}.weight_scale"]
    if kind == "mxfp8":
        assert scale.dtype == torch.uint8
        return BY_BYTE[codes] * np.repeat(2.0 ** (scale.double().numpy() - 127), 32, 1)
    assert scale.dtype == torch.float8_e4m3fn
    of_block = np.repeat(BY_BYTE[scale.view(torch.uint8).numpy()], 16, 1)
    if layout == "modelopt":
        factor = stored[f"{module}.weight_scale_2"]
        assert factor.shape == () and factor.dtype == torch.float32
        return E2M1[codes] * of_block * float(factor)
    factor = stored[f"{module}.weight_global_scale"]
    assert factor.shape == (1,) and factor.dtype == torch.float32
    return E2M1[codes] * of_block / float(factor)


def expected_of(
    linear: LayerLinear, own: Names, fmt: BlockFormat
) -> tuple[NDArray[Any], NDArray[Any], np.float32]:
    """Codes, codes of scales and the amax of a joined weight, by the slow specifications.

    Each rank casts what it has: some rows of each part, or some columns.
    """
    ranks = 1 if ".experts." in linear.name else fmt.tp
    parts = [own[f"{part.name}.weight"].to(fmt.source).float().numpy() for part in linear.parts]
    amax = np.float32(max(np.abs(part).max() for part in parts))
    axis = 0 if linear.is_column else 1
    found: list[list[Any]] = [[] for _ in parts]
    for rank in range(ranks):
        pieces = [np.split(part, ranks, axis)[rank] for part in parts]
        whole = np.concatenate(pieces)
        if fmt.kind == "mxfp8":
            made = mxfp8.quantize_rows(whole)
            codes, scales = made.codes, made.scale_codes
        else:
            rows = 16 if fmt.square else 1
            padded = np.pad(whole, ((0, -len(whole) % rows), (0, 0)))
            four = nvfp4.quantize_blocks(padded, rows, amax)
            codes = four.codes[: len(whole)]
            scales = np.repeat(four.scale_codes, rows, 0)[: len(whole)]
        ends = np.cumsum([len(piece) for piece in pieces])[:-1]
        for at, pair in enumerate(zip(np.split(codes, ends), np.split(scales, ends), strict=True)):
            found[at].append(pair)
    joined = [[np.concatenate(kind, axis) for kind in zip(*part, strict=True)] for part in found]
    return (*(np.concatenate([part[n] for part in joined]) for n in (0, 1)), amax)


def check(folder: Path, spec: GPTSpec, own: Names, fmt: BlockFormat) -> None:
    """Raise unless the folder has the bytes of the specifications, and its format reads them."""
    stored, weights = write(folder, spec, own, fmt)
    modules = {ours: theirs for theirs, ours in modules_of(spec).items()}
    assert len(weights.errors) == len(modules)
    for linear in single_linears(spec):
        codes, scales, amax = expected_of(linear, own, fmt)
        begin = 0
        for part in linear.parts:
            rows = slice(begin, begin + part.out_features)
            begin = rows.stop
            module = modules[f"{part.name}.weight"]
            assert np.array_equal(codes_of(stored, module, fmt.kind, fmt.layout), codes[rows])
            stored_scales = stored[f"{module}.weight_scale"].view(torch.uint8).numpy()
            assert np.array_equal(stored_scales, scales[rows])
            if fmt.kind == "nvfp4" and fmt.layout == "modelopt":
                assert stored[f"{module}.weight_scale_2"] == amax / np.float32(2688)
            elif fmt.kind == "nvfp4":
                factor = nvfp4.encoding_scale(amax)
                assert stored[f"{module}.weight_global_scale"] == factor
            value = fmt.decode({n: stored[f"{module}.{n}"] for n in fmt.tensor_names})
            exact = read_weight(stored, module, fmt.kind, fmt.layout)
            assert (np.abs(value.double().numpy() - exact) <= 2.0**-23 * np.abs(exact)).all()
    for entry in hf.mapping(spec):
        if entry.ours[0] not in modules:
            assert torch.equal(stored[entry.theirs], own[entry.ours[0]].bfloat16())
    assert ("lm_head.weight" in stored) is not spec.share_embeddings_and_output_weights


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("kind", "layout"), EVERY)
def test_bytes_are_those_of_the_specification(
    kind: Kind, layout: Layout, name: str, tmp_path: Path
) -> None:
    family, more = MODELS[name]
    spec = spec_of(family, **more)
    check(tmp_path / "fp32", spec, masters_of(spec), BlockFormat(kind, layout))


@pytest.mark.parametrize("changed", [{"tp": 2}, {"square": False}, {"source": torch.bfloat16}])
@pytest.mark.parametrize("name", ["odd", "experts"])
def test_the_rule_is_the_runs_own(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    """Squares are those of each rank's rows; a run in BF16 casts numbers of BF16."""
    family, more = MODELS[name]
    spec = spec_of(family, **more)
    own, plain = masters_of(spec), BlockFormat("nvfp4", source=torch.bfloat16)
    check(tmp_path / "own", spec, own, replace(plain, **changed))
    if changed != {"source": torch.bfloat16} and name == "odd":
        other, _ = write(tmp_path / "plain", spec, own, plain)
        key = "model.layers.0.self_attn.k_proj.weight_packed"
        stored, _ = write(tmp_path / "again", spec, own, replace(plain, **changed))
        assert not torch.equal(stored[key], other[key])


def floor(stored: Names, module: str) -> None:
    stored[f"{module}.weight_scale"] -= 1


def turn(stored: Names, module: str) -> None:
    for name in ("weight", "weight_scale"):
        old = stored[f"{module}.{name}"]
        stored[f"{module}.{name}"] = old.t().reshape(old.shape).contiguous()


@pytest.mark.parametrize("fault", [floor, turn])
def test_a_planted_fault_is_found(fault: Callable[[Names, str], None], tmp_path: Path) -> None:
    spec = spec_of("llama")
    own = masters_of(spec)
    stored, _ = write(tmp_path, spec, own, BlockFormat("mxfp8"))
    module = "model.layers.0.mlp.gate_proj"
    master = own["layers.0.mlp.gate.weight"].numpy()

    def apart() -> float:
        gap = np.abs(read_weight(stored, module, "mxfp8", "compressed-tensors") - master)
        return float((gap > np.abs(master) * 2.0**-4 + np.abs(master).max() * 2.0**-16).mean())

    assert apart() == 0
    fault(stored, module)
    assert apart() > 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_compressed_tensors_reads_them(kind: Kind, name: str, tmp_path: Path) -> None:
    """The package knows the configuration, and its own reader returns the same numbers."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    family, more = MODELS[name]
    spec = spec_of(family, **more)
    fmt = BlockFormat(kind)
    stored, _ = write(tmp_path, spec, masters_of(spec), fmt)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    (scheme,) = read.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(read.format)
    assert compressor.can_compress(torch.nn.Linear, scheme)
    assert set(compressor.compression_param_names(scheme)) == set(fmt.tensor_names)
    for module in modules_of(spec):
        tensors = {last: stored[f"{module}.{last}"] for last in fmt.tensor_names}
        theirs = compressor.decompress(tensors, scheme)["weight"].double().numpy()
        exact = read_weight(stored, module, kind, "compressed-tensors")
        step = 0.0 if kind == "mxfp8" else 2.0**-8  # it returns numbers of BF16
        assert (np.abs(theirs - exact) <= step * np.abs(exact)).all()


@pytest.mark.parametrize("name", ["llama", "odd", "tied"])
def test_transformers_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    """Of dense models: its reader of experts has no scales of blocks."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    family, more = MODELS[name]
    spec = spec_of(family, **more)
    stored, _ = write(tmp_path, spec, masters_of(spec), BlockFormat("mxfp8"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        model(torch.arange(8)[None])
    for module in modules_of(spec):
        exact = read_weight(stored, module, "mxfp8", "compressed-tensors")
        weight = model.get_submodule(module).weight
        assert torch.equal(weight, torch.from_numpy(exact).to(weight.dtype)), module


@pytest.mark.parametrize("name", ["llama", "odd", "tied"])
def test_transformers_computes_with_the_same_weights_in_nvfp4(name: str, tmp_path: Path) -> None:
    """It unpacks a weight when it is used. Logits are those of the numbers in a plain folder."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    family, more = MODELS[name]
    spec = spec_of(family, **more)
    own = masters_of(spec)
    stored, _ = write(tmp_path / "nvfp4", spec, own, BlockFormat("nvfp4"), family=family)
    for module, ours in modules_of(spec).items():
        exact = read_weight(stored, module, "nvfp4", "compressed-tensors")
        own[ours] = torch.from_numpy(exact).float()
    huggingface_files.write_folder(
        tmp_path / "plain", spec, own.__getitem__, dtype=torch.float32, eod_id=3, family=family
    )
    logits = []
    for folder in ("nvfp4", "plain"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.bfloat16
        )
        with torch.no_grad():
            logits.append(model(torch.arange(40).reshape(2, 20)).logits.float())
    assert torch.equal(*logits)


@pytest.mark.parametrize(("kind", "layout"), EVERY)
def test_a_served_model_computes_with_the_files(kind: Kind, layout: Layout, tmp_path: Path) -> None:
    """Of its logits, those with the same weights in the other layout differ by the factor alone."""
    spec = spec_of("qwen3_moe", num_experts_per_tok=4)
    own, logits = masters_of(spec), []
    for each in (layout, LAYOUTS[1 - LAYOUTS.index(layout)]):
        fmt = BlockFormat(kind, each)
        write(tmp_path / each, spec, own, fmt)
        with torch.no_grad():
            served = served_model(tmp_path / each, spec, fmt, torch.device("cpu"))
            logits.append(served.logits(torch.arange(40).reshape(2, 20)))
    one, other = logits
    assert one.std() > 0.1 and (one - other).abs().max() <= 2.0**-5 * one.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_in_nvfp4_have_one_number_for_a_linear(layout: Layout, tmp_path: Path) -> None:
    """A served linear rounds its input as the specification does; parts of QKV have one number."""
    spec = spec_of("qwen2")
    amaxes = {linear.name: 3.5 for linear in single_linears(spec)}
    fmt = BlockFormat("nvfp4", layout, input_amaxes=amaxes)
    stored, _ = write(tmp_path, spec, masters_of(spec), fmt)
    name = "input_scale" if layout == "modelopt" else "input_global_scale"
    modules = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    found = {float(stored[f"{module}.{name}"]) for module in modules}
    assert found == {float(np.float32(3.5) / 2688 if layout == "modelopt" else 2688 / 3.5)}
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4
    assert config.get("quant_algo", "NVFP4") == "NVFP4"
    if layout == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.quantization import QuantizationConfig

        (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
        assert scheme.input_activations.dynamic == "local"
    exported, cpu = Exported(tmp_path, spec), torch.device("cpu")
    linear = ServedLinear(next(single_linears(spec)), fmt, exported, cpu)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(2))
    x[3] *= 100  # beyond the largest magnitude, which saturates
    rounded = values_of(linear.cast(x)).double().numpy()
    expected = nvfp4.quantize_blocks(x.numpy(), 1, np.float32(3.5)).values
    assert (np.abs(rounded - expected) <= 2.0**-22 * np.abs(expected)).all()
    assert np.abs(rounded[3]).max() == pytest.approx(3.5, rel=1e-6)


def test_modelopts_file_has_the_same_settings(tmp_path: Path) -> None:
    spec = spec_of("qwen3_moe")
    for kind, algorithm in (("mxfp8", "MXFP8"), ("nvfp4", "W4A16_NVFP4")):
        fmt = BlockFormat(kind, "modelopt", frozenset({"layers.0.mlp.experts.1.fc2"}))
        write(tmp_path / kind, spec, masters_of(spec), fmt)
        config = json.loads((tmp_path / kind / "config.json").read_text())["quantization_config"]
        (own,) = fmt.files(spec).values()
        assert config["quant_algo"] == own["quantization"]["quant_algo"] == algorithm
        assert config["ignore"] == own["quantization"]["exclude_modules"]
        assert "model.layers.0.mlp.experts.1.down_proj" in config["ignore"]
        assert "input_activations" in config["config_groups"]["group_0"] or kind == "nvfp4"


def test_partial_blocks_are_refused_by_name() -> None:
    spec = spec_of("llama", intermediate_size=208)
    with pytest.raises(UserError, match=r"mxfp8: layers\.0\.mlp\.fc2 has 208 in features, and 32"):
        BlockFormat("mxfp8").check(spec)
    BlockFormat("nvfp4").check(spec)
    with pytest.raises(UserError, match="has 104 in features on each of 2 ranks"):
        BlockFormat("nvfp4", tp=2).check(spec)
    kept = frozenset(linear.name for linear in single_linears(spec) if "fc2" in linear.name)
    BlockFormat("mxfp8", kept=kept).check(spec)


def test_a_weight_of_zeros_and_the_smallest_scales(tmp_path: Path) -> None:
    spec = spec_of("llama")
    own = masters_of(spec)
    own["layers.0.mlp.fc2.weight"].zero_()
    own["layers.1.mlp.fc2.weight"][:16] *= 1e-42
    for kind, layout in EVERY:
        check(tmp_path / f"{kind} {layout}", spec, own, BlockFormat(kind, layout))
