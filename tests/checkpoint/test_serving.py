"""Weights in FP8 in the formats of compressed-tensors and DeepSeek-V3, as others read them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from megafp8.checkpoint import huggingface as hf
from megafp8.checkpoint import huggingface_files, serving
from megafp8.checkpoint.huggingface_files import Quantization
from megafp8.checkpoint.serving import (
    BLOCK,
    SCALES,
    Scales,
    ServingFormat,
    ServingWeights,
    single_linears,
)
from megafp8.checkpoint.serving_blocks import LAYOUTS, BlockFormat
from megafp8.errors import UserError
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import logical_shapes
from megafp8.train.served import Exported, ServedLinear, served_model

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "max_position_embeddings": 64, "vocab_size": 96,
}  # fmt: skip
ODD = {"hidden_size": 96, "intermediate_size": 200, "num_key_value_heads": 1}
SQUARE = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256}
"""All but keys and values are 256 x 256: scales of blocks have one shape in either order."""
EXPERTS: dict[str, dict[str, int]] = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
DENSE_FIRST = {"mlp_only_layers": [0], "moe_intermediate_size": 72, "norm_topk_prob": True}
INPUT_SCALE = 2.0**-6
Names = dict[str, torch.Tensor]


def e4m3_numbers() -> NDArray[np.float64]:
    """The numbers of E4M3 from 0 to 448 by their bytes, as the format's paper defines them."""
    bytes_ = np.arange(127)
    exponent, mantissa = bytes_ >> 3, bytes_ & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


POSITIVE = e4m3_numbers()
BY_BYTE = np.concatenate([POSITIVE, [np.nan], -POSITIVE, [np.nan]])


def numbers(weight: torch.Tensor) -> NDArray[np.float64]:
    """An exported weight's bytes as numbers, without torch's own conversion."""
    assert weight.dtype == torch.float8_e4m3fn
    return BY_BYTE[weight.view(torch.uint8).numpy()]


def nearest(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest number of E4M3, of two that are as near the one with an even byte."""
    size = np.minimum(np.abs(x), 448)
    above = np.clip(np.searchsorted(POSITIVE, size), 1, 126)
    down, up = size - POSITIVE[above - 1], POSITIVE[above] - size
    goes_up = (up < down) | ((up == down) & (above % 2 == 0))
    return np.copysign(POSITIVE[above - ~goes_up], x)


def plain_weight(stored: Names, module: str) -> NDArray[np.float64]:
    """A weight as the formats define it: number times scale, in float64."""
    weight = numbers(stored[f"{module}.weight"])
    blocks = stored.get(f"{module}.weight_scale_inv")
    if blocks is None:
        return weight * stored[f"{module}.weight_scale"].double().numpy()
    grid = blocks.double().numpy()
    assert grid.shape == tuple(math.ceil(size / BLOCK) for size in weight.shape)
    return np.array(
        [
            [value * grid[i // BLOCK, j // BLOCK] for j, value in enumerate(row)]
            for i, row in enumerate(weight)
        ]
    )


def check_weight(stored: Names, module: str, master: NDArray[np.float64]) -> None:
    """Raise unless a weight is as near to the master as its scales allow.

    E4M3 rounds a number by at most 2**-4 of it, or by half of its smallest step, 2**-10. A scale is
    at most 2**-7 above amax / 448 and a weight's own amax is in the part that has the scale, so it
    is exactly 448 or 416 times the scale, or a number between that rounds to one of the two.
    """
    name = "weight_scale_inv" if f"{module}.weight_scale_inv" in stored else "weight_scale"
    scale = stored[f"{module}.{name}"]
    assert scale.dtype == torch.float32 and bool((scale > 0).all())
    least = float(scale.min())
    apart = np.abs(plain_weight(stored, module) - master)
    whole = plain_weight({**stored, f"{module}.weight": full(stored[f"{module}.weight"])}, module)
    bound = np.maximum(np.abs(master) * 2.0**-4, whole / 448 * 2.0**-10) * (1 + 2.0**-20)
    assert (apart <= bound).all(), f"{module}: {(apart / bound).max()} of the bound"
    assert least > 0 and (np.abs(master) <= whole * (1 + 2.0**-20)).all()
    rows = np.abs(master).max()
    assert rows == 0 or whole.max() <= rows * (1 + 2.0**-7), "a scale is larger than its part needs"


def full(weight: torch.Tensor) -> torch.Tensor:
    return torch.full(weight.shape, 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn)


def spec_of(family: str, **more: Any) -> GPTSpec:
    window = {"sliding_window": None} if family == "mistral" else {}
    config = {"model_type": family, **SIZES, **EXPERTS.get(family, {}), **window, **more}
    return hf.from_config(config, Path("config.json"))


def masters_of(spec: GPTSpec) -> Names:
    """Random weights, of which each row has another magnitude."""
    drawn = torch.Generator().manual_seed(3)
    names = [name for entry in hf.mapping(spec) for name in entry.ours]
    made = {}
    for name in names:
        shape = logical_shapes(spec)[name]
        made[name] = torch.randn(shape, generator=drawn) * 0.02
        if len(shape) == 2:
            made[name] *= torch.exp(torch.randn(shape[0], 1, generator=drawn))
        if "norm" in name:
            made[name] += 1
    return made


def write(
    folder: Path, spec: GPTSpec, own: Names, fmt: ServingFormat | BlockFormat, **more: Any
) -> tuple[Names, ServingWeights]:
    weights = ServingWeights(spec, own.__getitem__, fmt)
    huggingface_files.write_folder(
        folder, spec, own.__getitem__, dtype=torch.bfloat16, eod_id=3,
        quantized=Quantization(fmt.quantization_config(spec), weights.encode), **more,
    )  # fmt: skip
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}, weights


def formats(spec: GPTSpec) -> dict[str, ServingFormat]:
    static = {linear.name: INPUT_SCALE for linear in single_linears(spec)}
    made = {s: ServingFormat(s) for s in SCALES}
    powers = ServingFormat("block", scale_fmt="ue8m0", source=torch.bfloat16)
    return {**made, "static": ServingFormat("channel", static), "ue8m0": powers}


def modules_of(spec: GPTSpec) -> dict[str, str]:
    """The modules of transformers that are FP8, with our names of their weights."""
    return {
        entry.theirs.removesuffix(".weight"): entry.ours[0]
        for entry in hf.mapping(spec)
        if entry.theirs.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
    }


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", SQUARE), ("qwen2", ODD), ("qwen3", {"tie_word_embeddings": True}), ("mistral", ODD),
     ("mixtral", ODD), ("qwen3_moe", DENSE_FIRST)],
)  # fmt: skip
def test_bytes_times_scales_are_the_masters(
    scales: Scales, family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Grouped queries, biases, tied embeddings, experts, sides that are no multiples of 128."""
    spec = spec_of(family, **more)
    own = masters_of(spec)
    stored, weights = write(tmp_path, spec, own, ServingFormat(scales))
    modules = modules_of(spec)
    assert [error.name for error in weights.errors] == list(modules)
    for (module, name), error in zip(modules.items(), weights.errors, strict=True):
        master = own[name].double().numpy()
        shared = scales == "tensor" and not module.endswith(("o_proj", "down_proj", "w2"))
        if shared:  # the part may be smaller than its linear's largest
            assert float(stored[f"{module}.weight_scale"]) > 0
        else:
            check_weight(stored, module, master)
        apart = np.abs(plain_weight(stored, module) - master)
        assert error.largest == pytest.approx(apart.max(), rel=1e-5)
        assert error.mean == pytest.approx(apart.mean(), rel=1e-5)
        assert error.relative == pytest.approx(apart.mean() / np.abs(master).mean(), rel=1e-5)
    rest = {entry.theirs: entry.ours[0] for entry in hf.mapping(spec)}
    for theirs, name in rest.items():
        if theirs.removesuffix(".weight") not in modules:
            assert torch.equal(stored[theirs], own[name].bfloat16())
    assert ("lm_head.weight" in stored) == (not spec.share_embeddings_and_output_weights)


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_powers_of_two_are_the_least_that_hold_a_block(family: str, tmp_path: Path) -> None:
    """They are FP32 numbers of the weights in BF16, and the configuration names them."""
    spec = spec_of(family, **ODD)
    own = masters_of(spec)
    stored, _ = write(tmp_path, spec, own, formats(spec)["ue8m0"])
    for module, name in modules_of(spec).items():
        master, scale = own[name].bfloat16(), stored[f"{module}.weight_scale_inv"]
        mantissa, _ = scale.frexp()
        assert scale.dtype == torch.float32 and bool((mantissa == 0.5).all())
        needed = serving.amax_by(master.double(), "block") / 448
        assert bool(((needed <= scale) & (scale < 2 * needed)).all())
        grown = master.double().numpy() / serving.spread(scale, master.shape, "block").numpy()
        assert (numbers(stored[f"{module}.weight"]) == nearest(grown)).all()
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["scale_fmt"] == "ue8m0" and config["weight_block_size"] == [128, 128]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_bytes_on_disk_are_those_that_the_sizes_give(family: str, tmp_path: Path) -> None:
    """Of each form, headers apart; a linear in BF16, biases and sides of no whole block count."""
    spec = spec_of(family, intermediate_size=208, vocab_size=95)
    own = masters_of(spec)
    kept = frozenset(linear.name for linear in single_linears(spec) if ".1.mlp." in linear.name)
    amaxes = {linear.name: 1.0 for linear in single_linears(spec)}
    forms = [replace(form, kept=kept) for form in formats(spec).values()]
    forms += [BlockFormat("nvfp4", layout, kept, input_amaxes=inputs)
              for layout in LAYOUTS for inputs in (None, amaxes)]  # fmt: skip
    forms += [BlockFormat("mxfp8", layout, kept) for layout in LAYOUTS if family != "qwen2"]
    for number, fmt in enumerate(forms):
        stored, _ = write(folder := tmp_path / str(number), spec, own, fmt, max_file_bytes=99_000)
        tensors, headers = huggingface_files.weight_bytes(folder)
        assert tensors == serving.planned_bytes(spec, fmt)
        assert tensors == sum(t.numel() * t.element_size() for t in stored.values())
        files = list(folder.glob("*.safetensors"))
        assert len(files) > 1 and sum(f.stat().st_size for f in files) == tensors + headers
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        huggingface_files.write_folder(folder, spec, own.__getitem__, dtype=dtype, eod_id=3)
        tensors, _ = huggingface_files.weight_bytes(folder)
        assert tensors == serving.planned_bytes(spec, None, dtype.itemsize)


def damage_scale(stored: Names, module: str) -> None:
    stored[next(n for n in stored if n.startswith(f"{module}.weight_scale"))][-1] *= 2


def damage_order(stored: Names, module: str) -> None:
    name = next(n for n in stored if n.startswith(f"{module}.weight_scale"))
    stored[name] = stored[name].flip(0).contiguous()


def damage_turn(stored: Names, module: str) -> None:
    name = next(n for n in stored if n.startswith(f"{module}.weight_scale"))
    stored[name] = stored[name].t().reshape(stored[name].shape).contiguous()


def damage_inverse(stored: Names, module: str) -> None:
    name = next(n for n in stored if n.startswith(f"{module}.weight_scale"))
    stored[name] = 1 / stored[name]


@pytest.mark.parametrize(
    ("damage", "scales"),
    [
        *itertools.product((damage_scale, damage_order, damage_inverse), ("channel", "block")),
        (damage_turn, "block"),
    ],
)
def test_wrong_scales_are_found(
    scales: Scales, damage: Callable[[Names, str], None], tmp_path: Path
) -> None:
    spec = spec_of("llama", **SQUARE)
    own = masters_of(spec)
    stored, _ = write(tmp_path, spec, own, ServingFormat(scales))
    module = "model.layers.0.mlp.gate_proj"
    master = own["layers.0.mlp.gate.weight"].double().numpy()
    check_weight(stored, module, master)
    damage(stored, module)
    with pytest.raises(AssertionError):
        check_weight(stored, module, master)


@pytest.mark.parametrize(
    "shape", [(1, 1), (127, 129), (128, 128), (130, 260), (3, 513), (256, 256)]
)
@pytest.mark.parametrize("scales", SCALES)
def test_shapes_zero_rows_and_tiny_numbers(shape: tuple[int, int], scales: Scales) -> None:
    drawn = torch.Generator().manual_seed(shape[1])
    weight = torch.randn(shape, generator=drawn)
    if shape[0] > 2:
        weight[1] = 0
        weight[2] *= 1e-42  # below the smallest normal number of FP32
    scale = serving.scale_of(serving.amax_by(weight, scales))
    assert torch.equal(scale, scale.bfloat16().float()), "BF16 holds every scale"
    assert bool((scale >= 2.0**-126).all())
    stored = {"m.weight": serving.encode(weight, scale, scales),
              f"m.{ServingFormat(scales).scale_name}": scale}  # fmt: skip
    expected = {"tensor": (1,), "channel": (shape[0], 1),
                "block": tuple(math.ceil(size / 128) for size in shape)}[scales]  # fmt: skip
    assert tuple(scale.shape) == expected
    plain = plain_weight(stored, "m")
    if scales == "channel" and shape[0] > 2:
        assert float(scale[1]) == 1 and not plain[1].any(), "a row of zeros has a scale of 1"
    spread = np.broadcast_to(serving.spread(scale, weight.shape, scales).double().numpy(), shape)
    best = nearest(weight.double().numpy() / spread) * spread
    master = weight.double().numpy()
    # the quotient is rounded to FP32 before E4M3: half a step of FP32 nearer to another number
    slack = np.abs(master) * 2.0**-23
    assert (np.abs(plain - master) <= np.abs(best - master) + slack).all()
    assert torch.equal(
        serving.decode(stored["m.weight"], scale, scales), torch.from_numpy(plain).float()
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
@pytest.mark.parametrize("name", ["layers.1.mlp.fc2.weight", "final_norm.weight"])
def test_weights_that_are_not_finite_are_refused(bad: float, name: str, tmp_path: Path) -> None:
    spec = spec_of("llama")
    own = masters_of(spec)
    own[name].view(-1)[5] = bad
    reason = "a value of magnitude 3.4e.38, and bfloat16" if bad == 3.4e38 else "NaN or infinite"
    with pytest.raises(UserError, match=f"{name}. has {reason}"):
        write(tmp_path / "out", spec, own, ServingFormat("channel"))
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("inputs", [None, INPUT_SCALE])
def test_parts_of_a_joined_linear_share_their_scales(inputs: float | None, tmp_path: Path) -> None:
    """So vLLM's cast of the joined weight with the largest scale changes no byte."""
    spec = spec_of("llama")
    own = masters_of(spec)
    of_linears = {linear.name: INPUT_SCALE for linear in single_linears(spec)}
    fmt = ServingFormat("tensor", None if inputs is None else of_linears)
    stored, _ = write(tmp_path, spec, own, fmt)
    for joined in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        modules = [m for m in modules_of(spec) if m.endswith(joined) and ".1." in m]
        scales = [stored[f"{module}.weight_scale"] for module in modules]
        assert len({float(scale) for scale in scales}) == 1 and scales[0].shape == (1,)
        names = [modules_of(spec)[module] for module in modules]
        largest = max(float(own[name].abs().max()) for name in names)
        assert largest / 448 <= float(scales[0]) <= largest / 448 * (1 + 2.0**-7)
        again = max(scales)
        for module in modules:
            weight = stored[f"{module}.weight"]
            anew = (weight.float() * stored[f"{module}.weight_scale"] / again).to(weight.dtype)
            assert torch.equal(anew.view(torch.uint8), weight.view(torch.uint8))
        if inputs is not None:
            assert {stored[f"{m}.input_scale"].item() for m in modules} == {INPUT_SCALE}
            assert stored[f"{modules[0]}.input_scale"].shape == (1,)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_have_scales_of_their_own_and_routers_have_none(
    family: str, tmp_path: Path
) -> None:
    """Gate and up of one expert share one for tensors. Servers are told which modules are BF16."""
    spec = spec_of(family, num_hidden_layers=1)
    own = masters_of(spec)
    layer, (gate, up, down) = {
        "mixtral": ("model.layers.0.block_sparse_moe", ("w1", "w3", "w2")),
        "qwen3_moe": ("model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj")),
    }[family]
    experts = range(spec.moe.num_experts if spec.moe else 0)
    stored, _ = write(tmp_path / "tensor", spec, own, ServingFormat("tensor"))

    def scales(name: str) -> list[float]:
        return [float(stored[f"{layer}.experts.{e}.{name}.weight_scale"]) for e in experts]

    largest = [
        max(float(own[f"layers.0.mlp.experts.{expert}.{part}.weight"].abs().max())
            for part in ("gate", "up"))
        for expert in experts
    ]  # fmt: skip
    assert scales(gate) == scales(up) and len(set(scales(gate) + scales(down))) > len(experts)
    assert all(big / 448 <= scale <= big / 448 * (1 + 2.0**-7)
               for big, scale in zip(largest, scales(gate), strict=True))  # fmt: skip
    kept = frozenset({"layers.0.mlp.experts.1.fc2"})
    for form in SCALES:
        stored, _ = write(tmp_path / f"{form}-kept", spec, own, ServingFormat(form, kept=kept))
        config = json.loads((tmp_path / f"{form}-kept" / "config.json").read_text())
        key = "modules_to_not_convert" if form == "block" else "ignore"
        ignored = config["quantization_config"][key]
        assert ignored == ["lm_head", f"{layer}.gate", f"{layer}.experts.1.{down}"]
        assert all(stored[f"{name}.weight"].dtype == torch.bfloat16 for name in ignored)
        of_others = [stored[f"{layer}.experts.{e}.{down}.weight"].dtype for e in experts if e != 1]
        assert set(of_others) == {torch.float8_e4m3fn}


def test_experts_of_odd_sizes_are_named_once() -> None:
    spec = spec_of("qwen3_moe", moe_intermediate_size=72, num_hidden_layers=1)
    names = [f"layers.0.mlp.experts.{part}" for part in ("gate", "up", "fc2")]
    assert serving.partial_blocks(spec, frozenset()) == names
    assert serving.partial_blocks(spec, frozenset({"layers.0.mlp.experts.0.fc2"})) == names
    every = frozenset(linear.name for linear in single_linears(spec) if ".fc2" in linear.name)
    assert serving.partial_blocks(spec, every) == names[:2]
    assert not serving.partial_blocks(spec_of("qwen3_moe"), frozenset())
    experts = frozenset(x.name for x in single_linears(spec) if "experts" in x.name)
    serving.check_can_be_fp8(spec, experts)


@pytest.mark.parametrize("scales", ["tensor", "channel"])
def test_compressed_tensors_makes_the_same_bytes(scales: Scales, tmp_path: Path) -> None:
    """The package reads the configuration, and casts and reads weights by it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    spec = spec_of("qwen2", **ODD)
    own = masters_of(spec)
    stored, _ = write(tmp_path, spec, own, ServingFormat(scales))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    assert read.ignore == ["lm_head"] and read.format == "float-quantized"
    (scheme,) = read.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(read.format)
    for module, name in modules_of(spec).items():
        scale = stored[f"{module}.weight_scale"]
        theirs = compressor.compress({"weight": own[name], "weight_scale": scale}, scheme)
        assert torch.equal(
            theirs["weight"].view(torch.uint8), stored[f"{module}.weight"].view(torch.uint8)
        )
        back = compressor.decompress(dict(theirs), scheme)["weight"]
        assert np.array_equal(back.double().numpy(), plain_weight(stored, module).astype("f4"))


def weight_in(model: Any, module: str) -> torch.Tensor:
    """A module's weight in transformers' model, which joins the experts of a layer."""
    before, is_expert, after = module.partition(".experts.")
    if not is_expert:
        return model.get_submodule(module).weight
    number, name = after.split(".")
    experts = model.get_submodule(before.replace("block_sparse_moe", "mlp")).experts
    gate, up = experts.gate_up_proj[int(number)].chunk(2)
    down = experts.down_proj[int(number)]
    found = {"gate_proj": gate, "w1": gate, "up_proj": up, "w3": up, "down_proj": down, "w2": down}
    return found[name]


READ: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, **SQUARE}), ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}), ("mistral", {}), ("mixtral", {}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more", "form"),
    [(family, more, form) for family, more in READ for form in (*SCALES, "static", "ue8m0")
     if form in SCALES or family in {"static": {*dict(READ)} - {*EXPERTS},
                                     "ue8m0": ("qwen3", "mixtral")}[form]],
)  # fmt: skip
def test_transformers_reads_the_same_weights(
    form: str, family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """On a CPU it multiplies in BF16 with weights that it decoded: those of the definition.

    Their logits are the same bits as those of the definition's weights in a plain folder.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    spec = spec_of(family, **more)
    own = masters_of(spec)
    stored, _ = write(tmp_path / "fp8", spec, own, formats(spec)[form], family=family)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=torch.bfloat16
    ).eval()
    assert model.config.model_type == family
    if form == "static":
        assert model.model.layers[0].mlp.down_proj.input_scale == INPUT_SCALE
    for module in model.modules():  # the package would round the inputs, in its own order
        module.quantization_enabled = False
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        logits = model(tokens).logits
    plain = {module: plain_weight(stored, module) for module in modules_of(spec)}
    for module, weight in plain.items():
        theirs = weight_in(model, module)
        assert torch.equal(theirs, torch.from_numpy(weight).float().bfloat16()), module
    exact = dict(own)
    exact.update({name: torch.from_numpy(plain[m]).float() for m, name in modules_of(spec).items()})
    huggingface_files.write_folder(
        tmp_path / "plain", spec, exact.__getitem__, dtype=torch.float32, eod_id=3, family=family
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        expected = reference(tokens).logits
    assert torch.equal(logits, expected)


def relative(x: torch.Tensor, expected: torch.Tensor) -> float:
    return float((x.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("form", "sizes"),
    [*itertools.product(("tensor", "channel", "block", "static"), (ODD,)), ("block", SQUARE)],
)
def test_a_served_linear_is_the_product_of_the_definition(
    form: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """In float64: bytes times scales, times the input in E4M3 times its scales, plus biases."""
    spec = spec_of("qwen2", **sizes)
    own = masters_of(spec)
    fmt = formats(spec)[form]
    stored, _ = write(tmp_path, spec, own, fmt)
    qkv = next(single_linears(spec))
    linear = ServedLinear(qkv, fmt, Exported(tmp_path, spec), torch.device("cpu"))
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, qkv.in_features, generator=drawn).bfloat16()
    x[0, 1] = 0
    x[1, 2] *= 100  # beyond what the static scale holds, which saturates
    x64 = x.double().numpy().reshape(10, -1)
    if fmt.input_scales is not None:
        rounded = nearest(x64 / INPUT_SCALE) * INPUT_SCALE
    else:
        width = BLOCK if form == "block" else x64.shape[1]
        groups = [x64[:, at : at + width] for at in range(0, x64.shape[1], width)]
        rounded = np.concatenate([by_rows(group) for group in groups], 1)
    modules = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    weight = np.concatenate([plain_weight(stored, module) for module in modules])
    bias = np.concatenate([stored[f"{module}.bias"].double().numpy() for module in modules])
    expected = rounded @ weight.T + bias
    out = linear(x).double().numpy().reshape(10, -1)
    # BF16 rounds an output by 2**-9 of it, and an FP32 sum of n terms is wrong by n * 2**-24 of the
    # terms' magnitudes
    terms = np.abs(rounded) @ np.abs(weight).T + np.abs(bias)
    bound = np.abs(expected) * 2.0**-8 + terms * 2.0**-24 * (qkv.in_features + 4)
    assert (np.abs(out - expected) <= bound).all()


def by_rows(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows in E4M3 times their own scales; both divisions are of FP32, as servers have them.

    In float64 other numbers would be at half a step between two of E4M3.
    """
    single = x.astype(np.float32)
    scale = np.abs(single).max(1, keepdims=True) / np.float32(448)
    scale = np.where(scale > 0, scale, np.float32(1))
    return nearest((single / scale).astype(np.float64)) * scale


@pytest.mark.parametrize("form", ["channel", "block", "static"])
@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen3", {}), ("qwen3_moe", {"mlp_only_layers": [0], "num_experts_per_tok": 4})],
)
def test_a_served_model_is_made_of_the_exported_tensors(
    family: str, more: dict[str, Any], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs that are not rounded it is transformers' model, but for what BF16 rounds.

    A scale that is wrong by a factor of two shows. All experts are chosen: BF16 may choose others.
    """
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(ServingFormat, "input_operand", lambda self, x, scale: x)
    spec = spec_of(family, tie_word_embeddings=True, **more)
    own = masters_of(spec)
    fmt = formats(spec)[form]
    stored, _ = write(tmp_path / "fp8", spec, own, fmt)
    exact = own | {
        name: torch.from_numpy(plain_weight(stored, module)).float()
        for module, name in modules_of(spec).items()
    }
    huggingface_files.write_folder(
        tmp_path / "exact", spec, exact.__getitem__, dtype=torch.float32, eod_id=3
    )
    tokens = torch.arange(40).reshape(2, 20)
    plain, rounded = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )

    def apart() -> float:
        served = served_model(tmp_path / "fp8", spec, fmt, torch.device("cpu"))
        return relative(served.logits(tokens), expected)

    with torch.no_grad():
        expected = plain(tokens).logits
        of_bf16 = relative(rounded(tokens).logits, expected)
        assert apart() < 1.5 * of_bf16 < 0.05
        stored[f"model.layers.0.mlp.down_proj.{fmt.scale_name}"] *= 2
        save_file(stored, tmp_path / "fp8" / "model.safetensors")
        assert apart() > 4 * of_bf16


@pytest.mark.parametrize("form", ["channel", "block"])
def test_an_index_names_every_tensor_of_several_files(form: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    spec = spec_of("qwen3")
    own = masters_of(spec)
    one, _ = write(tmp_path / "one", spec, own, formats(spec)[form])
    many, _ = write(tmp_path / "many", spec, own, formats(spec)[form], max_file_bytes=60_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2 and files == {p.name for p in (tmp_path / "many").glob("*.safetensors")}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name].float(), one[name].float())
    assert index["weight_map"].keys() == one.keys() == many.keys()
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for t in one.values()
    )
    read = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
            for name in ("one", "many")]  # fmt: skip
    with torch.no_grad():
        first, second = (model(torch.arange(20)[None]).logits for model in read)
    assert torch.equal(first, second)


def test_linears_that_stay_in_bf16_are_named(tmp_path: Path) -> None:
    """All parts of a joined linear, as vLLM asks for."""
    spec = spec_of("llama")
    own = masters_of(spec)
    kept = frozenset({"layers.0.attention.qkv", "layers.1.mlp.fc2"})
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    names += ["model.layers.1.mlp.down_proj"]
    for scales in SCALES:
        fmt = ServingFormat(scales, kept=kept)
        stored, _ = write(tmp_path / scales, spec, own, fmt)
        config = json.loads((tmp_path / scales / "config.json").read_text())["quantization_config"]
        key = "modules_to_not_convert" if scales == "block" else "ignore"
        assert config[key] == ["lm_head", *names]
        assert all(stored[f"{name}.weight"].dtype == torch.bfloat16 for name in names)
        assert stored["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
        assert not any(name in stored for name in (f"{n}.{fmt.scale_name}" for n in names))
        served_model(tmp_path / scales, spec, fmt, torch.device("cpu"))


def test_what_no_format_has_is_refused_by_name() -> None:
    everything = frozenset(linear.name for linear in single_linears(spec_of("llama")))
    with pytest.raises(UserError, match="computed every linear in high precision"):
        serving.check_can_be_fp8(spec_of("llama"), everything)
    from tests.config.helpers import run_spec
    from tests.tiny import gpt_spec

    with pytest.raises(UserError, match="GPT-2 keeps its weights") as caught:
        serving.check_can_be_fp8(gpt_spec(), frozenset())
    settings = str(caught.value).partition("Llama's shape: ")[2].split()
    assert len(settings) == 4
    serving.check_can_be_fp8(run_spec(*settings).with_vocabulary(300).model, frozenset())
    serving.check_can_be_fp8(spec_of("llama"), frozenset())


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    spec = spec_of("llama")
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        write(tmp_path, spec, masters_of(spec), ServingFormat("channel"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
