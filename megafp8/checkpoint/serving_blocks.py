"""Quantize the weights of a model's linears to MXFP8 and NVFP4 in the forms that servers load.

    mxfp8   E4M3, and for each 32 elements of a row the code of a power of two (E8M0)
    nvfp4   E2M1, two in a byte, for each 16 elements of a row a scale in E4M3, and one FP32 number
            for the whole weight

Numbers and scales are those of the recipes of the same names: a run that was trained in one has the
same bytes in its forward pass. A recipe casts joined parts as one weight, and so does this file:
queries, keys and values share the FP32 number, and gate and up, as servers need that join them.
"""

# N rows, the out features of a weight  K its columns

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.nn import functional as F

from fp8_numerics import mxfp8, nvfp4
from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E2M1, E4M3
from megafp8 import __version__
from megafp8.checkpoint.huggingface import ConversionError
from megafp8.checkpoint.serving import FP32, Read, ignored_modules, single_linears
from megafp8.specs import GPTSpec
from megafp8.specs.layer import LayerLinear

Kind = Literal["mxfp8", "nvfp4"]
Layout = Literal["compressed-tensors", "modelopt"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
MODELOPT_FILE = "hf_quant_config.json"
_BLOCKS = {"mxfp8": mxfp8.BLOCK, "nvfp4": nvfp4.BLOCK}
_SCALE_DTYPES = {"mxfp8": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}
_STRATEGIES = {"mxfp8": "group", "nvfp4": "tensor_group"}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of E2M1 by their codes; a fourth bit is the sign."""


class Blocks(NamedTuple):
    """Hold a weight: numbers [N, K] in FP32, scales [N, K / block] in FP32, and the whole amax."""

    numbers: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor


@dataclass(frozen=True)
class BlockFormat:
    """Describe an export in MXFP8 or NVFP4.

    Attributes:
        kind: The numbers and their scales.
        layout: Whose names the tensors have.
        kept: The linears that stay in BF16, by name, as the run computed them in high precision.
        square: Whether 16 x 16 elements share a scale in NVFP4, as in the recipe, or 1 x 16.
        source: The dtype that weights are rounded to first, as the run did that cast them.
        tp: How many ranks the run divided a weight over: no square goes over their borders.
        input_amaxes: Of NVFP4, the largest magnitude of each linear's input, by the linear's name;
            None leaves inputs in BF16.
    """

    kind: Kind
    layout: Layout = "compressed-tensors"
    kept: frozenset[str] = frozenset()
    square: bool = True
    source: torch.dtype = torch.float32
    tp: int = 1
    input_amaxes: Mapping[str, float] | None = None

    @property
    def scales(self) -> str:
        """Return the name of the format where a report names the scales."""
        return self.kind

    @property
    def input_name(self) -> str | None:
        """Return the last part of the name of an input's scale; None if there is none."""
        if self.input_amaxes is None:
            return None
        return "input_scale" if self.layout == "modelopt" else "input_global_scale"

    def input_scale(self, linear: str) -> torch.Tensor:
        """Return the FP32 number of the input of a linear of this name, as a weight has one."""
        assert self.input_amaxes is not None
        return self._of_whole(torch.tensor(self.input_amaxes[linear]))

    def _of_whole(self, amax: torch.Tensor) -> torch.Tensor:
        if self.layout == "modelopt":
            return nvfp4.outer_of(amax).clone()
        return nvfp4.encoding(amax).reshape(1)

    @property
    def algorithm(self) -> str:
        """Return ModelOpt's name of the format."""
        if self.kind == "mxfp8":
            return "MXFP8"
        return "W4A16_NVFP4" if self.input_amaxes is None else "NVFP4"

    @property
    def block(self) -> int:
        """Return how many elements of a row share a scale."""
        return _BLOCKS[self.kind]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the last parts of the names of a weight's tensors."""
        if self.kind == "mxfp8":
            return "weight", "weight_scale"
        if self.layout == "modelopt":
            return "weight", "weight_scale", "weight_scale_2"
        return "weight_packed", "weight_scale", "weight_global_scale"

    @property
    def has_powers(self) -> bool:
        """Whether scales are powers of two."""
        return self.kind == "mxfp8"

    @property
    def has_inputs(self) -> bool:
        """Whether inputs are quantized."""
        return self.kind == "mxfp8" or self.input_amaxes is not None

    def check(self, spec: GPTSpec) -> None:
        """Raise `ConversionError` if a weight ends within a block, which no layout can say."""
        for linear in single_linears(spec):
            columns = linear.in_features // self._ranks(linear, is_column=False)
            if linear.name not in self.kept and columns % self.block:
                of_rank = f" on each of {self.tp} ranks" if columns < linear.in_features else ""
                raise ConversionError(
                    f"--dtype {self.kind}: {linear.name} has {columns} in features{of_rank}, and "
                    f"{self.block} elements share a scale. Export it with --dtype fp8"
                )

    def _ranks(self, linear: LayerLinear, *, is_column: bool) -> int:
        """Return how many ranks divide the out features (`is_column`) or the in features."""
        is_divided = linear.is_column is is_column and ".experts." not in linear.name
        return self.tp if is_divided else 1

    def quantization_config(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the `quantization_config` of a model's `config.json`."""
        ignored = ignored_modules(spec, self.kept)
        bits = 8 if self.kind == "mxfp8" else 4
        number: dict[str, Any] = {"num_bits": bits, "type": "float", "group_size": self.block}
        if self.layout == "modelopt":
            weights = {**number, "dynamic": False}
            inputs = {"input_activations": weights} if self.has_inputs else {}
            return {
                "quant_method": "modelopt",
                "quant_algo": self.algorithm,
                "config_groups": {"group_0": {**inputs, "weights": weights, "targets": ["Linear"]}},
                "ignore": ignored,
                "producer": {"name": "megafp8", "version": __version__},
            }
        number |= {
            "strategy": _STRATEGIES[self.kind],
            "symmetric": True,
            "scale_dtype": _SCALE_DTYPES[self.kind],
            "zp_dtype": _SCALE_DTYPES[self.kind],
        }
        dynamic = True if self.kind == "mxfp8" else "local"  # blocks under a static number
        form = "mxfp8-quantized" if self.kind == "mxfp8" else "nvfp4-pack-quantized"
        group = {
            "targets": ["Linear"],
            "weights": {**number, "dynamic": False},
            "input_activations": {**number, "dynamic": dynamic} if self.has_inputs else None,
            "output_activations": None,
            "format": form,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }

    def files(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the further files of a folder in JSON, by name: ModelOpt has one."""
        if self.layout != "modelopt":
            return {}
        quantization = {
            "quant_algo": self.algorithm,
            "kv_cache_quant_algo": None,
            "group_size": self.block,
            "exclude_modules": ignored_modules(spec, self.kept),
        }
        producer = {"name": "megafp8", "version": __version__}
        return {MODELOPT_FILE: {"producer": producer, "quantization": quantization}}

    def quantize(self, linear: LayerLinear, read: Read) -> Blocks:
        """Return a linear's weight, all parts joined; `read` returns a tensor by its name."""
        parts = [read(f"{part.name}.weight") for part in linear.parts]
        whole_NK = torch.cat(parts).to(self.source).float()
        amax = whole_NK.abs().amax()
        if self.kind == "mxfp8":
            payload, scales = mxfp8.quantize_rows(whole_NK)
            return Blocks(payload.float(), scales, amax)
        numbers, scales = torch.empty_like(whole_NK), whole_NK[:, :: self.block].clone()
        for rows in self._rows_of_ranks(linear):
            height = nvfp4.BLOCK if self.square else 1
            filled = F.pad(whole_NK[rows], (0, 0, 0, -len(rows) % height))
            made, each = nvfp4.quantize_blocks(filled, height, amax, None)
            numbers[rows] = made[: len(rows)]
            scales[rows] = each.repeat_interleave(height, 0)[: len(rows)]
        return Blocks(numbers, scales, amax)

    def _rows_of_ranks(self, linear: LayerLinear) -> list[torch.Tensor]:
        """Return the rows of the joined weight that each rank has, in their order."""
        ranks, begin = self._ranks(linear, is_column=True), 0
        found: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for part in linear.parts:
            rows = torch.arange(begin, begin + part.out_features)
            for rank, own in enumerate(rows.chunk(ranks)):
                found[rank].append(own)
            begin += part.out_features
        return [torch.cat(own) for own in found]

    def encode(self, shared: Blocks, rows: slice, part_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of a part of a linear, whose `rows` they are, by `tensor_names`."""
        numbers_NK, scales = shared.numbers[rows], shared.scales[rows]
        if self.kind == "mxfp8":
            codes = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
            tensors = [numbers_NK.to(torch.float8_e4m3fn), codes]
        else:
            codes = torch.searchsorted(_E2M1, numbers_NK.abs()).to(torch.uint8)
            codes |= numbers_NK.signbit().to(torch.uint8) << 3
            packed = codes[:, 0::2] | codes[:, 1::2] << 4
            tensors = [packed, scales.to(torch.float8_e4m3fn), self._of_whole(shared.amax)]
        return dict(zip(self.tensor_names, tensors, strict=True))

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the tensors of a part of a linear, by the sizes of its weight."""
        scales = rows * columns // self.block  # of a byte each
        if self.kind == "mxfp8":
            return rows * columns + scales
        return rows * columns // 2 + scales + FP32 * (1 + (self.input_amaxes is not None))

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight [N, K] in FP32 that the tensors of one stand for."""
        payload, scale, *of_whole = (tensors[name] for name in self.tensor_names)
        if self.kind == "mxfp8":
            return self._values(payload.float(), mxfp8.power_of(scale.int()))
        (factor,) = of_whole
        is_inverse = self.layout == "compressed-tensors"
        scales = scale.float() / factor if is_inverse else scale.float() * factor
        return self._values(_numbers(payload), scales)

    def weight_operand(self, tensors: Mapping[str, torch.Tensor]) -> Fp8Tensor:
        """Return the weight [N, K] that the tensors of one stand for, as products read it."""
        payload, scale, *of_whole = (tensors[name] for name in self.tensor_names)
        if self.kind == "mxfp8":
            return self._operand(payload, mxfp8.power_of(scale.int()))
        outer = of_whole[0].reshape(())
        outer = 1 / outer if self.layout == "compressed-tensors" else outer
        return self._operand(_numbers(payload), scale.float(), outer)

    def input_operand(
        self, x_TK: torch.Tensor, scale: torch.Tensor | None
    ) -> torch.Tensor | Fp8Tensor:
        """Return an input [T, K] as a server casts it, or itself where it does not.

        In NVFP4 `scale` is the number that is stored for all inputs of the linear.
        """
        if self.kind == "mxfp8":
            return self._operand(*mxfp8.quantize_rows(x_TK))
        if scale is None:
            return x_TK
        is_inverse = self.layout == "compressed-tensors"
        amax = (nvfp4.LARGEST / scale if is_inverse else scale * nvfp4.LARGEST).reshape(())
        numbers_TK, scales = nvfp4.quantize_blocks(x_TK, 1, amax, None)
        return self._operand(numbers_TK, scales, nvfp4.outer_of(amax))

    def _operand(
        self, numbers_MK: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None = None
    ) -> Fp8Tensor:
        fmt = E4M3 if self.kind == "mxfp8" else E2M1
        payload, block = numbers_MK.to(fmt.dtype), (1, self.block)
        return Fp8Tensor(payload, scale, fmt, block=block, is_exact_in_bf16=True, outer=outer)

    def _values(self, numbers_MK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        tiles = numbers_MK.unflatten(1, (-1, self.block))
        values_MK: torch.Tensor = (tiles * scales[..., None]).flatten(1)
        return values_MK


def _numbers(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of E2M1 in FP32 [N, K] that two in a byte stand for [N, K / 2]."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()
    return _E2M1.to(codes.device)[codes & 7].copysign(7.5 - codes)
