"""Regional compilation: `torch.compile` of one transformer layer, used by all of them.

Norms, activations and residual sums between the linears are fused. What holds Python state stays
eager, each a break of the graph: the linears (their casts and products are kernels already),
attention's core (which counts), dropout (keyed by its place), and what backward computes again.
Only training is compiled; evaluation and generation run eagerly.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megafp8.errors import ConfigError
from megafp8.models.attention import AttentionContext, AttentionCore
from megafp8.models.block import TransformerLayer
from megafp8.models.parts import Dropout
from megafp8.parallel.parts import linears_of
from megafp8.precision.kernels import triton_launch


@dataclass
class CompileCounter:
    """What was compiled. A layer is several graphs, parted by the breaks.

    Torch itself bounds recompilations: beyond `torch._dynamo.config.recompile_limit` of one piece
    of code (8) it runs that piece eagerly.
    """

    graphs: int = 0
    recompilations: int = 0

    def backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Inductor, counted."""
        from torch._guards import CompileContext
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        compile_id = CompileContext.current_compile_id()
        if compile_id is not None and compile_id.frame_compile_id:
            self.recompilations += 1
        return compile_fx(graph, inputs)


def unavailable(device: torch.device) -> str | None:
    """Why torch cannot compile for `device`; None if it can."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        found = shutil.which(compiler) or shutil.which("clang++")
        return None if found else f"torch compiles for CPUs with a C++ compiler, {compiler} is none"
    reason = triton_launch.unavailable(device)
    return None if reason is None else f"torch compiles for GPUs with Triton: {reason}"


def compile_layers(model: nn.Module, device: torch.device) -> CompileCounter:
    """Compile each layer's training pass in place; layers of equal shapes share their graphs.

    Raises:
        ConfigError: Torch cannot compile here, or the layers are not ours.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    reason = unavailable(device)
    if not layers:
        reason = "the backend brings layers of its own, which are not compiled"
    if reason is not None:
        raise ConfigError("model.compile", "block", reason, "Set model.compile=off")
    counter = CompileCounter()
    for linear in linears_of(model):
        _stay_eager(linear, "forward")
    for module in model.modules():
        if isinstance(module, AttentionCore) or (isinstance(module, Dropout) and module.p > 0):
            _stay_eager(module, "forward")
    for parts in {id(layer.parts): layer.parts for layer in layers}.values():
        _stay_eager(parts, "recomputed")
    for layer in layers:
        _compile(layer, counter)
    return counter


def _stay_eager(owner: object, method: str) -> None:
    """This object's method is a break of the graph."""
    setattr(owner, method, torch.compiler.disable(getattr(owner, method)))


def _compile(layer: nn.Module, counter: CompileCounter) -> None:
    eager = layer.forward
    compiled = torch.compile(eager, backend=counter.backend, dynamic=False)

    def forward(x_BSD: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        is_training = layer.training and torch.is_grad_enabled()
        out_BSD: torch.Tensor = (compiled if is_training else eager)(x_BSD, context)
        return out_BSD

    layer.forward = forward
