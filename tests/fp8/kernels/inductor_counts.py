"""Count the kernels of a compiled layer as Inductor's scheduler for Triton fuses them, on a CPU.

Nothing is compiled or timed: the layer is traced with 512 tokens and width 512, Inductor lowers and
fuses its forward and backward graphs, and their operations run as torch's own. Operations that
Inductor does not generate (linears, attention) are left out.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx, config
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from fp8_numerics.meta import planning_for
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.ops import torch_private
from megafp8.parallel.mesh import single_rank
from megafp8.train.build import build

TOKENS, WIDTH = 512, 512


def fused_by_inductor(settings: tuple[str, ...]) -> tuple[int, float]:
    """Return Inductor's kernels in a layer, and their bytes for a token and a unit of width."""
    sizes: list[int] = []
    torch._dynamo.reset()  # so that no limit of recompilations counts earlier layers

    def count(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        compile_fx.record_original_output_strides(graph)
        mode = V.set_fake_mode(compile_fx.fake_tensor_prop(graph, inputs))
        lowering = GraphLowering(graph, shape_env=compile_fx.shape_env_from_inputs(inputs))
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), mode:
            lowering.run(*inputs)
            lowering._update_scheduler()
            for node in lowering.scheduler.nodes:
                if isinstance(node, FusedSchedulerNode | SchedulerNode):
                    sizes.append(node.get_read_write_buffers_sizes())
        return make_boxed_func(graph.forward)

    changes = config.patch(fx_graph_cache=False, cpu_backend="triton")
    with pytest.MonkeyPatch.context() as patch, planning_for("cuda"), changes:
        inductor = partial(compile_fx.compile_fx, inner_compile=count)
        patch.setattr(torch_private, "inductor", inductor)
        spec = resolve(load([
            "trainer.accelerator=cpu", "trainer.precision=bf16", "model.compile=block",
            "model.num_layers=1", f"model.hidden_size={WIDTH}",
            f"model.ffn_hidden_size={4 * WIDTH}", f"model.max_position_embeddings={TOKENS}",
            f"model.num_attention_heads={WIDTH // 128}", f"model.encoder_seq_length={TOKENS}",
            "model.micro_batch_size=1", "model.global_batch_size=1", *settings,
        ]), lambda: True)  # fmt: skip
        spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=128))
        state = build(spec, single_rank())
        x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16).requires_grad_()
        state.sink.begin_step()
        state.scaling.begin_microbatch(0)
        out = state.model.forward_layers(x)
        state.scaling.end_forward()
        out.backward(torch.ones_like(out))
        state.scaling.end_backward()
    assert state.compiled is not None and state.compiled.graphs == 1 and not state.compiled.breaks
    return len(sizes), sum(sizes) / (TOKENS * WIDTH)
