"""Quantize the weights of a model's linears to FP8 in the formats that servers of models load.

    tensor, channel   compressed-tensors' `float-quantized`, with one scale for each weight or row
    block             DeepSeek-V3's, with one scale for each 128 x 128 elements

A weight is `weight` (E4M3) times its scale, `weight_scale` or `weight_scale_inv` (FP32). A scale is
the largest magnitude over 448, rounded up to a number of BF16, so that a program that keeps scales
in BF16 reads the same weights. vLLM joins queries, keys and values, and gate and up, and gives a
joined weight one scale for each tensor, the largest: they have the same one here, so that nothing
is rounded again. Each expert has its own. In this file `theirs` marks names of transformers.
"""

# N rows, the out features of a weight  K its columns

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch.nn import functional as F

from fp8_numerics import formats
from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.scales import scale_of_amax
from megafp8.checkpoint.huggingface import ConversionError, Mapped, architecture, mapping
from megafp8.specs import GPTSpec
from megafp8.specs.layer import LayerLinear, layer_spec, model_linears
from megafp8.specs.parameters import logical_shapes

Read = Callable[[str], torch.Tensor]
"""Returns one of our tensors by its logical name."""
Scales = Literal["tensor", "channel", "block"]
SCALES: tuple[Scales, ...] = get_args(Scales)
ScaleFmt = Literal["float", "ue8m0"]
BLOCK = 128
ROUTER = ".router.weight"
FP32 = 4  # bytes of a scale
E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
LLAMA_SHAPE = (
    "model.normalization=rmsnorm model.activation=fast-swiglu "
    "model.position_embedding_type=rope model.bias=False"
)
"""The settings that make a Llama of the default job."""
_SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest scale, of weights that are nearly 0: a smaller one would be 0 in some programs."""


class WeightError(NamedTuple):
    """Say how far the FP8 weights of a linear are from the masters: absolute, and by their mean."""

    name: str
    largest: float
    mean: float
    relative: float  # the mean error over the mean magnitude


class Format(Protocol):
    """Say what `ServingWeights` and a served linear ask of a format."""

    @property
    def kept(self) -> frozenset[str]:
        """Return the linears that stay in BF16, by name."""

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the last parts of the names of a weight's tensors."""

    @property
    def input_name(self) -> str | None:
        """Return the last part of the name of an input's scale; None if the server computes it."""

    def input_scale(self, linear: str) -> torch.Tensor:
        """Return the static scale of the input of a linear of this name."""

    def quantize(self, linear: LayerLinear, read: Read) -> Any:
        """Return what the parts of a linear share: amaxes, or the whole weight."""

    def encode(self, shared: Any, rows: slice, part_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of a part of a linear, whose `rows` they are, by `tensor_names`."""

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the tensors of a part of a linear, by the sizes of its weight."""

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight [N, K] in FP32 that the tensors of one stand for."""

    def weight_operand(self, tensors: Mapping[str, torch.Tensor]) -> Fp8Tensor:
        """Return the weight [N, K] that the tensors of one stand for, as products read it."""

    def input_operand(
        self, x_TK: torch.Tensor, scale: torch.Tensor | None
    ) -> torch.Tensor | Fp8Tensor:
        """Return an input [T, K] as a server casts it, or itself where it does not."""


@dataclass(frozen=True)
class ServingFormat:
    """Describe an FP8 export.

    Attributes:
        scales: What has a scale of its own.
        input_scales: The scale of each linear's input, by the linear's name; None if a server
            computes it for each token (with `block`: for each 128 features of a token).
        kept: The linears that stay in BF16, by name, as the run computed them in high precision.
        scale_fmt: Whether scales are any numbers or, as in DeepSeek-V3.1, powers of two in FP32.
        source: With blocks, the dtype that weights are rounded to first, as the run did.
    """

    scales: Scales
    input_scales: Mapping[str, float] | None = None
    kept: frozenset[str] = frozenset()
    scale_fmt: ScaleFmt = "float"
    source: torch.dtype = torch.float32

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the last parts of the names of a weight's tensors."""
        return "weight", self.scale_name

    @property
    def input_name(self) -> str | None:
        """Return the last part of the name of an input's scale; None if the server computes it."""
        return None if self.input_scales is None else "input_scale"

    def input_scale(self, linear: str) -> torch.Tensor:
        """Return the static scale of the input of a linear of this name, [1]."""
        assert self.input_scales is not None
        return torch.tensor([self.input_scales[linear]])

    @property
    def has_powers(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale_fmt == "ue8m0"

    @property
    def scale_name(self) -> str:
        """Return the last part of the name of a weight's scales."""
        return "weight_scale_inv" if self.scales == "block" else "weight_scale"

    def files(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the further files of a folder in JSON, by name: there are none."""
        return {}

    def quantize(self, linear: LayerLinear, read: Read) -> torch.Tensor | None:
        """Return the largest magnitude of all parts of a linear, [1], if they share a scale."""
        if self.scales != "tensor":
            return None
        amaxes = [amax_by(read(f"{part.name}.weight"), "tensor") for part in linear.parts]
        return torch.stack(amaxes).amax(0)

    def encode(
        self, shared: torch.Tensor | None, rows: slice, part_NK: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the E4M3 weight and the scales of a part of a linear."""
        part_NK = part_NK.to(self.source).float()
        scale = self.scale_of(amax_by(part_NK, self.scales) if shared is None else shared)
        return {"weight": encode(part_NK, scale, self.scales), self.scale_name: scale}

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the tensors of a part of a linear, by the sizes of its weight."""
        blocks = math.ceil(rows / BLOCK) * math.ceil(columns / BLOCK)
        scales = {"tensor": 1, "channel": rows, "block": blocks}[self.scales]
        return rows * columns + FP32 * (scales + (self.input_scales is not None))

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scales of weights by their largest magnitudes, of any shape."""
        return power_above(amax) if self.has_powers else scale_of(amax)

    def input_scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scales that a server computes of an input's largest magnitudes."""
        return power_above(amax) if self.has_powers else input_scale_of(amax)

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight [N, K] in FP32 that the tensors of one stand for."""
        return decode(tensors["weight"], tensors[self.scale_name], self.scales)

    def weight_operand(self, tensors: Mapping[str, torch.Tensor]) -> Fp8Tensor:
        """Return the weight [N, K] that the tensors of one stand for, as products read it."""
        payload_NK, scale = tensors["weight"], tensors[self.scale_name]
        if self.scales == "tensor":
            return Fp8Tensor(payload_NK, scale.reshape(()), formats.E4M3)
        square = (BLOCK, BLOCK)
        return in_blocks(
            payload_NK, scale, square if self.scales == "block" else (1, payload_NK.shape[1])
        )

    def input_operand(self, x_TK: torch.Tensor, scale: torch.Tensor | None) -> Fp8Tensor:
        """Return the input [T, K] in E4M3 with its scales."""
        if scale is not None:
            return Fp8Tensor(encode(x_TK, scale, "tensor"), scale.reshape(()), formats.E4M3)
        num_tokens, num_features = x_TK.shape
        width = BLOCK if self.scales == "block" else num_features
        padded = F.pad(x_TK, (0, -num_features % width))
        groups = padded.view(-1, width)
        amax = groups.abs().amax(1, keepdim=True).float()
        scale = self.input_scale_of(amax)
        payload_TK = encode(groups.float(), scale, "channel").view(padded.shape)[:, :num_features]
        return in_blocks(payload_TK.contiguous(), scale.view(num_tokens, -1), (1, width))

    def quantization_config(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the `quantization_config` of a model's `config.json`."""
        ignored = ignored_modules(spec, self.kept)
        if self.scales == "block":
            # vLLM reads one of the last two keys, by its version, and transformers the other one
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                **({"scale_fmt": self.scale_fmt} if self.has_powers else {}),
                "modules_to_not_convert": ignored,
                "ignored_layers": ignored,
            }
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        is_dynamic = self.input_scales is None
        of_inputs = {"strategy": "token" if is_dynamic else "tensor", "dynamic": is_dynamic}
        group = {
            "targets": ["Linear"],
            "weights": {**number, "strategy": self.scales, "dynamic": False},
            "input_activations": {**number, **of_inputs},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }


def in_blocks(payload_MK: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> Fp8Tensor:
    """Return numbers of E4M3 [M, K] with a scale for each block of rows and columns."""
    is_power = not bool((scale.view(torch.int32) & 0x7FFFFF).any())
    return Fp8Tensor(payload_MK, scale, formats.E4M3, block=block, is_exact_in_bf16=is_power)


def single_linears(spec: GPTSpec) -> Iterator[LayerLinear]:
    """Yield the linears of all layers, each expert's by itself."""
    for linear in model_linears(spec):
        yield from map(linear.one, range(linear.experts))


def ignored_modules(spec: GPTSpec, kept: frozenset[str]) -> list[str]:
    """Return the modules of transformers that stay in BF16 beside linears that are `kept` so."""
    names = {
        f"{part.name}.weight"
        for linear in single_linears(spec)
        for part in linear.parts
        if linear.name in kept
    }
    out = [
        entry.theirs.removesuffix(".weight")
        for entry in mapping(spec)
        if entry.ours[0] in names or entry.ours[0].endswith(ROUTER)
    ]
    return ["lm_head", *out]


def planned_bytes(spec: GPTSpec, fmt: Format | None, itemsize: int = 2) -> int:
    """Return the bytes of the tensors of an export, by the sizes of the model alone.

    Args:
        spec: The model.
        fmt: The format of the linears; None for an export that is not quantized.
        itemsize: The bytes of a number of all other tensors.

    Raises:
        ConversionError: No family of transformers can express the model.
    """
    shapes, kept = logical_shapes(spec), frozenset[str]() if fmt is None else fmt.kept
    linears = (linear for linear in single_linears(spec) if linear.name not in kept)
    quantized = {f"{part.name}.weight" for linear in linears for part in linear.parts}
    total = 0
    for entry in mapping(spec):
        shape = entry.shape(shapes[entry.ours[0]])
        if fmt is not None and entry.ours[0] in quantized:
            total += fmt.num_bytes(*shape)
        else:
            total += itemsize * math.prod(shape)
    return total


def check_can_be_fp8(
    spec: GPTSpec, kept: frozenset[str], family: str | None = None, dtype: str = "fp8"
) -> None:
    """Raise `ConversionError` if no FP8 format has a model, or has nothing of it in FP8."""
    if architecture(spec, family) == "gpt2":
        raise ConversionError(
            f"--dtype {dtype}: transformers' GPT-2 keeps its weights as [in, out] in a module that "
            "is no Linear, which these formats do not quantize. Export it with --dtype bfloat16, "
            f"or train a model of Llama's shape: {LLAMA_SHAPE}"
        )
    if all(linear.name in kept for linear in single_linears(spec)):
        raise ConversionError(
            f"--dtype {dtype}: the run computed every linear in high precision (model.fp8_modules, "
            "model.first_last_layers_bf16), so that none is exported in FP8. Give --dtype bfloat16"
        )


def partial_blocks(spec: GPTSpec, kept: frozenset[str]) -> list[str]:
    """Return the linears, of the first layer that has such, whose sides are no multiples of 128.

    Those of experts have no number: all experts of a layer have the same sizes.
    """
    for layer in range(spec.num_layers):
        partial = [
            part.name
            for linear in layer_spec(spec, layer).linears
            for part in linear.parts
            if not kept.issuperset(linear.names)
            and (part.out_features % BLOCK or linear.in_features % BLOCK)
        ]
        if partial:
            return partial
    return []


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the scales for largest magnitudes, of any shape: FP32 numbers that BF16 holds.

    Where all elements are 0 the scale is 1.
    """
    exact = torch.where(amax > 0, (amax / E4M3_MAX).clamp(min=_SMALLEST), 1.0).float()
    bits = exact.contiguous().view(torch.int32)  # BF16 has the upper 16 of them
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)


def input_scale_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the scales that a server computes of an input's largest magnitudes, of any shape."""
    return torch.where(amax > 0, amax / E4M3_MAX, 1.0)


def power_above(amax: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two, in FP32, times which 448 is no less than a magnitude.

    None is below FP32's smallest normal number. They are those of the recipe `blockwise`, and what
    `scale_fmt` `ue8m0` names in DeepSeek-V3.1.
    """
    scale = scale_of_amax(amax.float(), formats.E4M3, power_2=True).reciprocal()
    return scale.clamp_(min=_SMALLEST)


def amax_by(weight_NK: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Return the largest magnitudes of a weight's parts that have a scale, in the scales' shape.

    It is [1], [N, 1], or [N / 128, K / 128] rounded up.
    """
    if scales == "tensor":
        return weight_NK.abs().amax().reshape(1)
    if scales == "channel":
        return weight_NK.abs().amax(1, keepdim=True)
    rows, columns = (math.ceil(size / BLOCK) for size in weight_NK.shape)
    below, beside = rows * BLOCK - weight_NK.shape[0], columns * BLOCK - weight_NK.shape[1]
    padded = F.pad(weight_NK.abs(), (0, beside, 0, below))
    return padded.view(rows, BLOCK, columns, BLOCK).amax((1, 3))


def spread(scale: torch.Tensor, shape: torch.Size, scales: Scales) -> torch.Tensor:
    """Return the scale of each element of a weight of `shape`, in a shape that broadcasts to it."""
    if scales != "block":
        return scale
    rows = scale.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def encode(weight_NK: torch.Tensor, scale: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Return the E4M3 weight [N, K] whose product with its scales is nearest to `weight_NK`."""
    grown = weight_NK / spread(scale, weight_NK.shape, scales)
    return grown.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def decode(weight_NK: torch.Tensor, scale: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Return the weight [N, K] in FP32 that E4M3 numbers and their scales stand for."""
    return weight_NK.float() * spread(scale, weight_NK.shape, scales)


@dataclass
class ServingWeights:
    """Turn a model's tensors into those of an export, and note the error of each weight.

    Attributes:
        spec: The model.
        read: Returns one of our tensors by its logical name.
        fmt: The format.
        errors: The errors of the weights so far, in the order in which they were written.
    """

    spec: GPTSpec
    read: Read
    fmt: Format
    errors: list[WeightError] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find the linear of each weight that becomes FP8."""
        self._linears: dict[str, tuple[LayerLinear, slice]] = {}
        for linear in single_linears(self.spec):
            begin = 0
            for part in linear.parts if linear.name not in self.fmt.kept else ():
                rows = slice(begin, begin + part.out_features)
                self._linears[f"{part.name}.weight"] = linear, rows
                begin = rows.stop
        self._shared: tuple[str, Any] | None = None

    def encode(self, entry: Mapped, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors, by name, that stand for one of transformers' in FP32."""
        if entry.ours[0] not in self._linears:
            return {entry.theirs: tensor.bfloat16()}
        fmt, module = self.fmt, entry.theirs.removesuffix(".weight")
        linear, rows = self._linears[entry.ours[0]]
        if self._shared is None or self._shared[0] != linear.name:  # its parts come one by one
            self._shared = linear.name, fmt.quantize(linear, self.read)
        tensors = fmt.encode(self._shared[1], rows, tensor)
        self.errors.append(_error(module, tensor, fmt.decode(tensors)))
        if fmt.input_name is not None:
            tensors[fmt.input_name] = fmt.input_scale(linear.name)
        return {f"{module}.{name}": found for name, found in tensors.items()}


def _error(name: str, master: torch.Tensor, decoded: torch.Tensor) -> WeightError:
    apart = (master - decoded).abs()
    mean, magnitude = (float(x.mean(dtype=torch.float64)) for x in (apart, master.abs()))
    return WeightError(name, float(apart.amax()), mean, mean / magnitude if magnitude else 0.0)
