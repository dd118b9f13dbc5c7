"""Compute with the files of a quantized export as its format defines it, to report the loss.

A linear multiplies the exported numbers with its input in the same format, both times their scales.
Products are summed in FP32 here; a server's tensor cores round their sums a little differently.
Everything else is in BF16, as servers compute it, but for the router's logits and factors, which
are in FP32; the factors multiply what an expert returns.
"""

# T tokens  K in features  N out features

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.gemm import GemmCounter, Operand, gemm
from megafp8.checkpoint.huggingface import mapping
from megafp8.checkpoint.huggingface_files import stored_tensors
from megafp8.checkpoint.serving import Format
from megafp8.data.loader import Microbatch
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.moe import MoE
from megafp8.models.parts import Parts, PlainLinear
from megafp8.models.random import RandomStreams
from megafp8.parallel.mesh import single_rank
from megafp8.specs import GPTSpec
from megafp8.specs.layer import LayerLinear
from megafp8.train.step import local_batch


def joined(parts: Sequence[Fp8Tensor]) -> Fp8Tensor:
    """Return weights of one format as one: [N, K] of all rows."""
    first, height = parts[0].without_grid(), 1
    payload_NK = torch.cat([part.payload for part in parts])
    if first.block is None:
        if all(torch.equal(part.dequant_scale, first.dequant_scale) for part in parts):
            return replace(first, payload=payload_NK)
        rows = [part.dequant_scale.expand(part.payload.shape[0], 1) for part in parts]
        return replace(
            first, payload=payload_NK, dequant_scale=torch.cat(rows), block=(1, payload_NK.shape[1])
        )
    if not any(part.payload.shape[0] % first.block[0] for part in parts[:-1]):
        height, rows = first.block[0], [part.dequant_scale for part in parts]
    else:  # a block would go over the border of two parts
        rows = [_scales_of_rows(part) for part in parts]
    is_exact = all(part.is_exact_in_bf16 for part in parts)
    return replace(
        first, payload=payload_NK, dequant_scale=torch.cat(rows),
        block=(height, first.block[1]), is_exact_in_bf16=is_exact,
    )  # fmt: skip


def _scales_of_rows(part: Fp8Tensor) -> torch.Tensor:
    assert part.block is not None
    return part.dequant_scale.repeat_interleave(part.block[0], 0)[: part.payload.shape[0]]


def values_of(operand: Operand) -> torch.Tensor:
    """Return the values in FP32 of an operand."""
    if not isinstance(operand, Fp8Tensor):
        return operand.float()
    values = operand.dequantize(torch.float32)
    return values if operand.outer is None else values * operand.outer


def multiply(x: Operand, weight: Operand, bias: torch.Tensor | None, work: torch.dtype) -> Any:
    """Return x @ weight.T + bias as the linears of a run do; mixed operands as values in FP32."""
    if isinstance(x, Fp8Tensor) != isinstance(weight, Fp8Tensor):
        x, weight = values_of(x), values_of(weight)
    if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor):
        x, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
    return gemm(
        x, weight, work=work, counter=GemmCounter(), place="output", transpose_b=True, bias=bias
    ).to(work)


def cast_and_multiply(
    x: torch.Tensor,
    cast: Callable[[torch.Tensor], Operand],
    weight: Operand,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return a linear's output in the dtype of `x`, [..., K] -> [..., N]; there may be no row."""
    shape = *x.shape[:-1], weight.shape[0]
    if not x.numel():  # an expert that no token has visited
        return x.new_empty(shape)
    out: torch.Tensor = multiply(cast(x.flatten(0, -2)), weight, bias, x.dtype)
    return out.view(shape)


class Exported:
    """Read the tensors of an exported folder by our names."""

    def __init__(self, folder: Path, spec: GPTSpec) -> None:
        self._exported_names = {entry.ours[0]: entry.theirs for entry in mapping(spec)}
        self._read = stored_tensors(folder)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by its logical name, or one that belongs to a weight (`q.input_scale`).

        Raises:
            CheckpointError: The folder cannot be read.
        """
        if name in self._exported_names:
            return self._read(self._exported_names[name])
        # The name of a scale begins as that of its weight.
        module, _, last = name.rpartition(".")
        weight_name = self._exported_names[f"{module}.weight"]
        return self._read(f"{weight_name.removesuffix('weight')}{last}")


class ServedParts(Parts):
    """Make the modules of a model that computes with the files of a quantized export."""

    def __init__(
        self, spec: GPTSpec, fmt: Format, exported: Exported, device: torch.device
    ) -> None:
        super().__init__(spec, torch.bfloat16, 0, RandomStreams(0))
        self.fmt, self.exported, self.device = fmt, exported, device

    def linear(self, linear: LayerLinear) -> nn.Module:
        """Return a linear over exported weights, or a plain one where the export has BF16."""
        if linear.name in self.fmt.kept:
            return PlainLinear(self, linear)
        return ServedLinear(linear, self.fmt, self.exported, self.device)


class ServedLinear(nn.Module):
    """Multiply cast inputs with the exported weight of a linear."""

    def __init__(
        self, linear: LayerLinear, fmt: Format, exported: Exported, device: torch.device
    ) -> None:
        super().__init__()

        def read(last: str) -> list[torch.Tensor]:
            return [exported.read(f"{part.name}.{last}").to(device) for part in linear.parts]

        tensors = zip(*map(read, fmt.tensor_names), strict=True)
        parts = (dict(zip(fmt.tensor_names, own, strict=True)) for own in tensors)
        self.weight = joined([fmt.weight_operand(part) for part in parts])
        self.bias = torch.cat(read("bias")) if linear.has_bias else None
        scale = None if fmt.input_name is None else read(fmt.input_name)[0]
        self.cast = lambda x_TK: fmt.input_operand(x_TK.float(), scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear's output in the dtype of `x`: [..., K] -> [..., N]."""
        return cast_and_multiply(x, self.cast, self.weight, self.bias)


def layers_of_experts(model: nn.Module) -> Iterator[MoE]:
    """Yield the modules of a model that have experts."""
    return (module for module in model.modules() if isinstance(module, MoE))


def served_model(folder: Path, spec: GPTSpec, fmt: Format, device: torch.device) -> GPT:
    """Return the model that computes with the files of a quantized export, for evaluation.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    exported = Exported(folder, spec)
    model = GPT(ServedParts(spec, fmt, exported, device))
    for experts in layers_of_experts(model):
        experts.weighs_output = True
    with torch.no_grad():
        for param in model.parameters():  # quantized linears have buffers, and have read them
            for piece in pieces_of(param):
                param[piece.local].copy_(exported.read(piece.name))
    return model.to(device).eval()


@torch.no_grad()
def input_amaxes(
    model: GPT, batches: Iterable[Microbatch], device: torch.device
) -> dict[str, float]:
    """Return the largest magnitude of the input of each linear of a plain model, by its name."""
    found: dict[str, torch.Tensor] = {}

    def look(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        amax = inputs[0].abs().amax().float()
        found[name] = torch.maximum(found.get(name, amax), amax)

    hooks = [
        module.register_forward_pre_hook(partial(look, name))
        for name, module in model.named_modules()
        if isinstance(module, PlainLinear)
    ]
    mean_loss(model, batches, device)
    for hook in hooks:
        hook.remove()
    return {name: float(amax) for name, amax in found.items()}


@torch.no_grad()
def mean_loss(model: GPT, batches: Iterable[Microbatch], device: torch.device) -> float:
    """Return the model's loss in nats per counted token."""
    mesh, total, count = single_rank(device), 0.0, 0
    for batch in batches:
        local = local_batch(batch, mesh)
        total += float(model(local.tokens_BS, local.targets_BS, **local.documents))
        count += int((local.targets_BS >= 0).sum())
    return total / count if count else math.nan
