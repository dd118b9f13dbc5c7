"""Compile one transformer layer with `torch.compile`; all layers share the result.

Norms, activations, dropout, attention and residual sums are fused around the linears, each of which
is one operation of the graph (train/compiled_ops.py). These operations run eagerly, and
break the graph:

- attention with dropout, whose mask is computed from its position in the model
- attention within documents (`data.reset_attention_mask`), whose blocks differ in each microbatch
- attention within a window (`model.window_size`), which is computed in blocks
- attention that is recomputed in the backward pass
  (`activations_checkpoint_granularity=selective`)
- linears under zero-bubble schedules: the work that they defer would outlive the graph's memory
- linears, attention and dropout, with a torch version that cannot trace them

Only training is compiled; evaluation and generation run eagerly.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8_numerics.caches import why_unsafe
from fp8_numerics.kernels import triton_launch
from megafp8.errors import ConfigError
from megafp8.fp8.grad_sink import DeferringSink, DotGradSink
from megafp8.fp8.linear import Linear
from megafp8.models.attention import AttentionContext, AttentionCore
from megafp8.models.block import TransformerLayer
from megafp8.models.parts import Dropout
from megafp8.ops import torch_private
from megafp8.parallel.parts import linears_of

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", **triton_launch.CACHE}
"""torch's caches of compiled code; its default is a predictable name that any user may make."""


@dataclass
class CompileCounter:
    """Count what was compiled. A layer is one graph, and each break adds one.

    Torch itself limits recompilations: after `torch._dynamo.config.recompile_limit` (8) of them,
    it runs a piece of code eagerly.
    """

    graphs: int = 0
    recompilations: int = 0
    breaks: list[str] = field(default_factory=list)  # reasons for breaks, each kind once

    def stay_eager(self, owner: object, method: str, reason: str) -> None:
        """Make a method of `owner` run eagerly, and note the `reason` for the break."""
        setattr(owner, method, torch.compiler.disable(getattr(owner, method)))
        if reason not in self.breaks:
            self.breaks.append(reason)

    def backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Compile `graph` with Inductor, and count it."""
        self.graphs += 1
        if torch_private.is_recompilation():
            self.recompilations += 1
        return torch_private.inductor(graph, inputs)


def why_not_compilable(device: torch.device) -> str | None:
    """Return why torch cannot compile for `device`, or None if it can."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        compiler_path = shutil.which(compiler) or shutil.which("clang++")
        return None if compiler_path else f"torch needs a C++ compiler and finds no {compiler}"
    reason = triton_launch.unavailable(device)
    return None if reason is None else f"torch needs Triton for GPUs: {reason}"


def cannot_trace() -> str | None:
    """Return why linears and dropout cannot be operations of a graph here, or None if they can."""
    if torch_private.has_objects_in_graphs():
        return None
    needed = ".".join(str(part) for part in torch_private.OBJECTS_IN_GRAPHS_FROM)
    return f"torch {torch.__version__} cannot trace linears, {needed} can: each breaks the graph"


def compile_layers(
    model: nn.Module,
    device: torch.device,
    *,
    is_sharded: bool = False,
    has_documents: bool = False,
) -> CompileCounter:
    """Compile each layer's training pass in place; layers of equal shapes share their graphs.

    `is_sharded` says that FSDP will gather the layers' parameters, outside of the graphs, and reads
    their gradients from `.grad`; `has_documents` says that attention keeps documents apart. The
    scaling state must be on `device` already, since the kernels that cast on that device determine
    the memory layout of FP8 tensors.

    Raises:
        ConfigError: Torch cannot compile here, or the backend has layers of its own.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    reason = why_not_compilable(device) or why_unsafe(CACHES)
    if not layers:
        reason = "the backend brings layers of its own, which are not compiled"
    if reason is not None:
        raise ConfigError("model.compile", "block", reason, "Set model.compile=off")
    counter = CompileCounter()
    untraced = cannot_trace()
    for linear in linears_of(model):
        if isinstance(linear.sink, DeferringSink):
            counter.stay_eager(linear, "forward", "linears: their weight gradients are deferred")
        elif untraced is not None:
            counter.stay_eager(linear, "forward", f"linears: {untraced}")
        else:
            _trace(linear)
            if is_sharded:
                linear.sink = DotGradSink()
    for module in model.modules():
        if isinstance(module, Dropout):
            if untraced is not None:
                counter.stay_eager(module, "forward", f"dropout: {untraced}")
            else:
                _trace(module)
    for parts in {id(layer.parts): layer.parts for layer in layers}.values():
        recompute = parts.spec.recompute
        if recompute is not None and recompute.granularity == "selective":
            counter.stay_eager(parts, "recomputed", "attention: the backward pass recomputes it")
    for layer in layers:
        _compile(layer, counter, untraced, has_documents=has_documents)
    return counter


def _trace(module: Linear | Dropout) -> None:
    from megafp8.train.compiled_ops import trace_linear, trace_mask  # needs a torch that can

    trace_linear(module) if isinstance(module, Linear) else trace_mask(module)


def _compile(
    layer: TransformerLayer, counter: CompileCounter, untraced: str | None, *, has_documents: bool
) -> None:
    """Compile the forward pass of a layer; `untraced` says why its attention is not traced."""
    core = next(module for module in layer.modules() if isinstance(module, AttentionCore))
    has_window = core.window is not None
    is_core_eager = untraced is not None or core.dropout > 0 or has_documents or has_window
    if is_core_eager:
        changing = "its dropout depends on its position"
        if has_documents and not core.dropout:
            changing = "each microbatch has documents of its own"
        elif has_window and not core.dropout:
            changing = "its window is computed in blocks"
        reason = untraced or changing
        counter.stay_eager(core, "forward", f"attention: {reason}")
    parts, eager = layer.parts, layer.forward
    heads = parts.local_heads()
    num_heads = heads.stop - heads.start
    compiled_forward = torch.compile(eager, backend=counter.backend, dynamic=False)

    def forward(x_BSD: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        context = context or AttentionContext()
        if not (layer.training and torch.is_grad_enabled() and x_BSD.requires_grad):
            return eager(x_BSD, context)
        if is_core_eager or context.recompute_attention:  # it counts its own FLOPs
            eager_core_BSD: torch.Tensor = compiled_forward(x_BSD, context)
            return eager_core_BSD
        seq = parts.sequence_length(x_BSD)
        causal_flops = core.count_forward(x_BSD.shape[0], num_heads, seq, seq)
        out_BSD: torch.Tensor = compiled_forward(x_BSD, context)
        core.count_backward(out_BSD, causal_flops)
        return out_BSD

    layer.forward = forward  # type: ignore[method-assign]
