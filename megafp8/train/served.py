"""Compute with the files of a quantized export as its format defines it, to report the loss.

A linear multiplies the exported numbers with its input in the same format, both times their scales.
Products are summed in FP32 here; a server's tensor cores round their sums a little differently.
Everything else is in BF16, as servers compute it.
"""

# T tokens  K in features  N out features

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from megafp8.checkpoint.huggingface import mapping
from megafp8.checkpoint.huggingface_files import stored_tensors
from megafp8.checkpoint.serving import Format
from megafp8.data.loader import Microbatch
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts, PlainLinear
from megafp8.models.random import RandomStreams
from megafp8.parallel.mesh import single_rank
from megafp8.specs import GPTSpec
from megafp8.specs.layer import LayerLinear
from megafp8.train.step import local_batch


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

    def __init__(self, spec: GPTSpec, fmt: Format, exported: Exported) -> None:
        super().__init__(spec, torch.bfloat16, 0, RandomStreams(0))
        self.fmt, self.exported = fmt, exported

    def linear(self, linear: LayerLinear) -> nn.Module:
        """Return a linear over exported weights, or a plain one where the export has BF16."""
        if linear.name in self.fmt.kept:
            return PlainLinear(self, linear)
        return ServedLinear(linear, self.fmt, self.exported)


class ServedLinear(nn.Module):
    """Multiply rounded inputs with exported weights, each part of the linear by itself."""

    input_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, linear: LayerLinear, fmt: Format, exported: Exported) -> None:
        super().__init__()
        self.fmt, self.num_parts = fmt, len(linear.parts)
        names = [part.name for part in linear.parts]
        for number, name in enumerate(names):
            for last in fmt.tensor_names:
                self.register_buffer(f"{last}{number}", exported.read(f"{name}.{last}"))
        scale = exported.read(f"{names[0]}.{fmt.input_name}") if fmt.input_name else None
        self.register_buffer("input_scale", scale)
        biases = [exported.read(f"{name}.bias") for name in names] if linear.has_bias else None
        self.register_buffer("bias", None if biases is None else torch.cat(biases))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear's output in the dtype of `x`: [..., K] -> [..., N]."""
        x_TK = self.rounded_input(x.float().flatten(0, -2))
        outs = []
        for number in range(self.num_parts):
            own = {last: self.get_buffer(f"{last}{number}") for last in self.fmt.tensor_names}
            outs.append(F.linear(x_TK, self.fmt.decode(own)))
        out_TN = torch.cat(outs, -1)
        if self.bias is not None:
            out_TN += self.bias
        return out_TN.to(x.dtype).reshape(*x.shape[:-1], -1)

    def rounded_input(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return the numbers in FP32 that the input has in the format of the export: [T, K]."""
        return self.fmt.rounded_input(x_TK, self.input_scale)


def served_model(folder: Path, spec: GPTSpec, fmt: Format, device: torch.device) -> GPT:
    """Return the model that computes with the files of a quantized export, for evaluation.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    exported = Exported(folder, spec)
    model = GPT(ServedParts(spec, fmt, exported))
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
