"""Regional compilation: `torch.compile` of one transformer layer, used by all of them.

Norms, activations, dropout, attention and residual sums are fused around the linears, each of which
is one operation of the graph (precision/compiled_linear.py). What still parts it, and runs eagerly:

- attention with dropout, whose mask is keyed by its place
- attention that backward computes again (`activations_checkpoint_granularity=selective`)
- linears under zero-bubble schedules: what they defer would outlive the graph's memory
- with a torch that cannot trace them, linears, attention and dropout

Only training is compiled; evaluation and generation run eagerly.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megafp8.errors import ConfigError
from megafp8.models.attention import AttentionContext, AttentionCore
from megafp8.models.block import TransformerLayer
from megafp8.models.parts import Dropout
from megafp8.parallel.deferred import DeferringSink
from megafp8.parallel.parts import linears_of
from megafp8.precision import compiled_linear
from megafp8.precision.kernels import triton_launch
from megafp8.precision.linear import Linear


@dataclass
class CompileCounter:
    """What was compiled. A layer is one graph, and one more for each break of it.

    Torch itself bounds recompilations: beyond `torch._dynamo.config.recompile_limit` of one piece
    of code (8) it runs that piece eagerly.
    """

    graphs: int = 0
    recompilations: int = 0
    breaks: list[str] = field(default_factory=list)  # what parts the graphs, each kind once

    def stay_eager(self, owner: object, method: str, what: str) -> None:
        """This object's method is a break of the graph."""
        setattr(owner, method, torch.compiler.disable(getattr(owner, method)))
        if what not in self.breaks:
            self.breaks.append(what)

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

    The scaling state must be on `device`: what casts there decides how bytes lie.

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
    untraced = compiled_linear.unavailable()
    for linear in linears_of(model):
        if isinstance(linear.sink, DeferringSink):
            counter.stay_eager(linear, "forward", "linears: their weight gradients are deferred")
        elif untraced is not None:
            counter.stay_eager(linear, "forward", f"linears: {untraced}")
        else:
            _trace_linear(linear)
    for module in model.modules():
        if isinstance(module, Dropout) and module.p > 0:
            if untraced is not None:
                counter.stay_eager(module, "forward", f"dropout: {untraced}")
            else:
                _trace_dropout(module)
    for parts in {id(layer.parts): layer.parts for layer in layers}.values():
        recompute = parts.spec.recompute
        if recompute is not None and recompute.granularity == "selective":
            counter.stay_eager(parts, "recomputed", "attention: backward computes it again")
    for layer in layers:
        _compile(layer, counter, untraced)
    return counter


def _trace_linear(linear: Linear) -> None:
    from megafp8.precision.compiled_linear_ops import trace_linear

    trace_linear(linear)


def _trace_dropout(dropout: Dropout) -> None:
    from megafp8.models.traced_dropout import traced_mask

    dropout.traced_mask = traced_mask(dropout)


def _compile(layer: TransformerLayer, counter: CompileCounter, untraced: str | None) -> None:
    core = next(module for module in layer.modules() if isinstance(module, AttentionCore))
    is_core_eager = untraced is not None or core.dropout > 0
    if is_core_eager:
        reason = untraced or "its dropout is keyed by its place"
        counter.stay_eager(core, "forward", f"attention: {reason}")
    parts, eager = layer.parts, layer.forward
    heads = parts.local_heads()
    num_heads = heads.stop - heads.start
    compiled_forward = torch.compile(eager, backend=counter.backend, dynamic=False)

    def forward(x_BSD: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        context = context or AttentionContext()
        if not (layer.training and torch.is_grad_enabled() and x_BSD.requires_grad):
            return eager(x_BSD, context)
        if is_core_eager or context.recompute_attention:  # then it counts for itself
            eager_core_BSD: torch.Tensor = compiled_forward(x_BSD, context)
            return eager_core_BSD
        seq = parts.sequence_length(x_BSD)
        causal_flops = core.count_forward(x_BSD.shape[0], num_heads, seq, seq)
        out_BSD: torch.Tensor = compiled_forward(x_BSD, context)
        core.count_backward(out_BSD, causal_flops)
        return out_BSD

    layer.forward = forward  # type: ignore[method-assign]
