"""Compute the bytes of a rank's step in a dry run: its microbatches run on torch's meta device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megafp8.models.gpt import GPT
from megafp8.ops import torch_private
from megafp8.ops.torch_private import load_dynamo, run_backward
from megafp8.parallel.fsdp import grads_of
from megafp8.plan.memory import StepBytes
from megafp8.plan.pipeline import (
    PassBytes,
    StagePasses,
    Work,
    planned_orders,
    with_receipts,
)
from megafp8.specs import RunSpec
from megafp8.specs.parallel import ONE_STAGE_SCHEDULES
from megafp8.train.live_bytes import LiveBytes
from megafp8.train.state import TrainState

load_dynamo()
"""The first operation on meta would import it, and `torch.fx.wrap` makes the frames of functions
that wait for this import refer to themselves. Their tensors would stay, and be counted."""


def step_bytes(state: TrainState, spec: RunSpec) -> tuple[StepBytes, dict[int, int]]:
    """Run one microbatch forward and backward through each stage of this rank; count the bytes.

    Return them, and what each stage keeps of a microbatch. It is the last one of a step, in which
    gradients are sent: FP32 sums, and under ZeRO-2 the gradients, of the microbatches before it are
    there from its beginning. What arrives of gradients during the backward pass is a part of the
    working memory.
    """
    count = spec.train.num_microbatches(state.mesh.dp.size)
    alive = LiveBytes("meta", state.backend.memory_of, resized=False)
    alive.watch(freed_gradients(state))
    state.sink.begin_step()
    state.masters.begin_step()
    if (added := state.model.parts.added_losses) is not None:
        added.begin_step(state.mesh.device)
    if count > 1:
        for param in state.masters.params:
            state.masters.hold_grad(param)
        for each in state.sink.scaled_sums:
            if each.sums_in_fp32:
                each.in_use()
        state.sink.leave_untouched(())  # gradients are added to sums: where that takes memory, too
    if state.reducer is not None:
        state.reducer.begin_step(1)
    state.scaling.begin_microbatch(0)
    passes: dict[int, StagePasses] = {}
    most = with_gradients = 0
    with device_kernels(state, spec), alive:
        for gpt in stages_of(state).values():
            forward(gpt, spec, state)  # quantizes the weights, which happens once in a step
        made_once = alive.bytes()
        scales = alive.bytes_of(state.backend.scaling_tensors(state.model))
        alive.device = None  # what a library makes once, on the CPU, it has made by now
        for index, gpt in stages_of(state).items():
            alive.begin()
            output = forward(gpt, spec, state)
            kept = alive.bytes() - made_once
            backward(output)
            del output
            if state.pipeline is not None and (take := state.pipeline.stages[0].dw_builder):
                take()()  # computes the weight gradients that zero bubble defers
            passes[index] = passes_of(state, gpt, kept, alive.most - made_once - kept)
            most = max(most, alive.most - made_once)
            with_gradients = max(with_gradients, alive.most_with_watched - made_once)
        state.sink.end_step()
        alive.begin()
        if state.reducer is not None and not spec.optim.storage.is_plain:
            state.reducer.finish()
        at_the_end = alive.most - made_once
        with_gradients = max(with_gradients, alive.most_with_watched - made_once)
    copies = state.backend.weight_copies(state.model)
    step = StepBytes.without_fsdp(order_of(state, spec), passes)
    step = replace(
        step,
        weight_copies=made_once - scales if copies is None else copies,
        arriving_last=at_the_end,
        gradients=max(0, with_gradients - max(most, at_the_end)),
    )
    # Steps that run without graphs need as much beside them.
    step = replace(step, graphs=step.peak if spec.train.cuda_graph else 0)
    return step, {index: each.kept for index, each in passes.items()}


def passes_of(state: TrainState, gpt: GPT, kept: int, more: int) -> StagePasses:
    """Return a stage's passes, and what it gets of other stages: its input, and a gradient."""
    crossing = 0
    if state.pipeline is not None:
        boundary = state.pipeline.stages[0].boundary
        crossing = math.prod(boundary.shape) * boundary.dtype.itemsize
    received, returned = crossing * (not gpt.has_embedding), crossing * (not gpt.has_head)
    return StagePasses.alike(kept=kept, received=received, returned=returned, more=more)


@contextmanager
def device_kernels(state: TrainState, spec: RunSpec) -> Iterator[None]:
    """Let the rank's operations make the tensors that its device's kernels make."""
    if spec.parallel.accelerator == "gpu":
        for gpt in stages_of(state).values():
            if gpt.has_head:
                setattr(gpt.head_loss, "loss_of_chunk", _loss_by_kernel)  # noqa: B010
    with MetaKernels(spec.parallel.accelerator), state.backend.without_values(state.model):
        yield


def fsdp_step_bytes(state: TrainState, spec: RunSpec) -> tuple[StepBytes, dict[int, int]]:
    """Run microbatches of a rank whose weights FSDP gathers, and count the bytes as `step_bytes`.

    The first microbatch leaves gradients and what is made once: Transformer Engine's copies of
    weights. The second runs beside the sums of those gradients, as most of a step's microbatches
    do, and the third begins without sums. What is sent and received counts as working memory.
    """
    alive = LiveBytes("meta", state.backend.memory_of)
    state.masters.begin_step()
    with device_kernels(state, spec), alive:
        run_stages(state, spec, alive)
        alive.watch_freed()  # gathered weights
        copies = alive.bytes() - alive.bytes_of(state.backend.scaling_tensors(state.model))
        copies -= alive.bytes_of(grads_of(state.model))
        later = run_stages(state, spec, alive)
        state.masters.begin_step()
        first = run_stages(state, spec, alive)
    sums = {
        index: sum(grad.nbytes for grad in grads_of(gpt)) for index, gpt in stages_of(state).items()
    }
    state.masters.collect_grads()
    stages = {
        index: replace(
            stage_passes,
            sums=sums[index],
            first=first[index].first,
            later=stage_passes.later._replace(sums=sums[index]),
        )
        for index, stage_passes in later.items()
    }
    step = StepBytes.of_passes(order_of(state, spec), stages)
    step = replace(step, weight_copies=copies)
    return step, {index: stage.kept for index, stage in stages.items()}


def order_of(state: TrainState, spec: RunSpec) -> list[Work]:
    """Return this rank's passes of a step in their order, and when its stages receive messages."""
    pipeline, pp = spec.parallel.pipeline, state.mesh.pp
    orders = planned_orders(pipeline, pp.size, spec.train.num_microbatches(state.mesh.dp.size))
    has_receipts = pp.size > 1 and pipeline.schedule not in ONE_STAGE_SCHEDULES
    return (with_receipts(orders) if has_receipts else orders)[pp.rank]


def run_stages(state: TrainState, spec: RunSpec, alive: LiveBytes) -> dict[int, StagePasses]:
    """Run a microbatch through all stages of this rank, then back; count the bytes of each stage.

    In the result the sums that are made belong to `more`.
    """
    passes_of_stage, outputs = {}, {}
    state.sink.begin_step()
    state.scaling.begin_microbatch(0)
    for index, gpt in stages_of(state).items():
        before, others = alive.bytes(), alive.watched()
        alive.begin()
        outputs[index] = forward(gpt, spec, state)
        kept, left = alive.bytes() - before, alive.watched() - others
        gathered = alive.watched_at_most - others
        most = PassBytes(alive.most_with_watched - before - others - kept - gathered, gathered, 0)
        passes = passes_of(state, gpt, kept, 0)
        passes_of_stage[index] = replace(passes, left=left, first=most, later=most)
    for index in reversed(passes_of_stage):
        stage = passes_of_stage[index]
        before, others = alive.bytes(), alive.watched() - stage.left
        alive.begin()
        backward(outputs.pop(index))
        gathered = alive.watched_at_most - others
        of_backward = PassBytes(alive.most_with_watched - before - others - gathered, gathered, 0)
        most = max(of_backward, stage.later, key=sum)
        passes_of_stage[index] = replace(stage, first=most, later=most)
    state.sink.end_step()
    return passes_of_stage


def freed_gradients(state: TrainState) -> list[torch.Tensor]:
    """Return the gradients and sums whose memory comes and goes during a step.

    They are the flat ones of ZeRO-2, and FP32 sums of gradients that are stored in low precision.
    """
    masters = state.masters
    flats = [*masters.plain_flats, *masters.scaled_flats]
    totals = (each.total for each in state.sink.scaled_sums if each.total is not None)
    divided = [(flat.flat, flat.sums) for flat in flats if flat.sums is not None]
    return [*totals, *(tensor for both in divided for tensor in both)]


def _loss_by_kernel(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, with_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tensors of `HeadLoss.loss_of_chunk` on a GPU: the gradient is over the logits."""
    return logits_CV.new_zeros((), dtype=torch.float32), logits_CV if with_grad else None


def stages_of(state: TrainState) -> dict[int, GPT]:
    """Return the GPTs on this rank by the number of their stage."""
    if isinstance(state.model, GPT):
        return {0: state.model}
    stages = [gpt for gpt in state.model.stages if isinstance(gpt, GPT)]
    return dict(zip(state.model.indices, stages, strict=True))


def forward(gpt: GPT, spec: RunSpec, state: TrainState) -> torch.Tensor:
    """Run a microbatch of zeros through one stage.

    Return the residual stream [B, S, D], or the loss on the stage with the head.
    """
    device = state.mesh.device
    shape = (spec.train.micro_batch_size, spec.data.seq_length // spec.parallel.cp)
    tokens_BS = torch.zeros(shape, dtype=torch.int64, device=device)
    x_BSD = None
    if not gpt.has_embedding:
        ranks = spec.parallel.tp if spec.parallel.sequence_parallel else 1
        wide = (shape[0], shape[1] // ranks, spec.model.hidden_size)
        dtype = gpt.parts.residual_dtype
        x_BSD = torch.zeros(wide, dtype=dtype, device=device, requires_grad=True)
    borders = None
    if spec.data.reset_attention_mask:  # whole samples: no document has more scores
        seq = spec.data.seq_length
        borders = torch.arange(0, shape[0] * seq + 1, seq, dtype=torch.int32, device="cpu")
    return gpt.forward_stage(tokens_BS, x_BSD, tokens_BS, cu_seqlens_N1=borders)


def backward(output: torch.Tensor) -> None:
    """Run the backward pass from `output`.

    `Tensor.backward` would suspend `MetaKernels`, which recomputation in the backward pass needs.
    """
    gradient = torch.empty_like(output).detach()
    run_backward(output, gradient)


class _FusedRmsNorm(torch.autograd.Function):
    """Make and keep the tensors of CUDA's fused RMSNorm: its input and one FP32 number a row.

    On the meta device torch takes the operation apart, which would keep two FP32 copies.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, rows, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


_REPLACED = frozenset([F.scaled_dot_product_attention, F.dropout, torch.rms_norm])


class MetaKernels(TorchFunctionMode):
    """Run attention and dropout on the meta device as the kernels of the real device would.

    They then keep the same tensors for the backward pass. Without this context, torch computes
    both from basic operations on the meta device, and keeps every attention score.
    """

    def __init__(self, accelerator: str) -> None:
        super().__init__()
        self.on_gpu = accelerator == "gpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Asking a tensor for its device is a call of this kind too: most calls need not ask.
        is_replaced = func in _REPLACED and args and isinstance(args[0], torch.Tensor)
        if is_replaced and args[0].is_meta:
            if func is F.scaled_dot_product_attention:
                return self._attend(*args, **kwargs)
            if func is F.dropout and self.on_gpu:
                p = args[1] if len(args) > 1 else kwargs["p"]
                return torch.native_dropout(args[0], p, True)[0]
            if func is torch.rms_norm and self.on_gpu:
                x, _, weight = args[:3]
                return _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        dropout_p: float,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """Call the attention kernel that the real device would use.

        The rules for GPUs are those of torch's documentation: flash attention needs half precision
        and no mask, and the memory-efficient kernel supports no groups of heads.
        """
        is_half = q.dtype in (torch.bfloat16, torch.float16)
        if self.on_gpu and is_half and attn_mask is None:
            out, *_ = torch_private.flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
        elif self.on_gpu and not enable_gqa:
            out, *_ = torch_private.efficient_attention(
                q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
            )
        elif not self.on_gpu and dropout_p == 0:
            out, *_ = torch_private.cpu_attention(
                q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        else:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        assert isinstance(out, torch.Tensor)
        return out
