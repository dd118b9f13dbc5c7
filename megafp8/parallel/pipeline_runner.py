"""Run the steps of a pipeline by the schedules of `torch.distributed.pipelining`.

Only runs with pipelines import this module: torch's schedules import its FSDP, its tracer and
SymPy, which takes as long as all else that a run on one rank imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from megafp8.fp8.draws import Tokens
from megafp8.fp8.grad_sink import DeferringSink
from megafp8.fp8.scaling import NoScaling, ScalingState
from megafp8.models.gpt import GPT
from megafp8.models.loss import beginning_of_backward
from megafp8.models.random import RandomStreams
from megafp8.ops.torch_pipelining import (
    FewSends,
    NoMessagesToItself,
    ReceivesWhenDue,
    few_sends,
)
from megafp8.parallel.pipeline import Batch, Boundary, PipelinedGPT
from megafp8.specs.parallel import KEPT_SENDS, ONE_STAGE_SCHEDULES, ZERO_BUBBLE_SCHEDULES


class PipelineRunner:
    """Run training steps over a `PipelinedGPT` by one of torch's schedules.

    Every microbatch begins and ends on every stage with the events that FP8 scaling and random
    streams need. With 1F1B several microbatches are in flight at once.
    """

    def __init__(
        self,
        model: PipelinedGPT,
        boundary: Boundary,
        *,
        scaling: ScalingState | NoScaling,
        streams: RandomStreams,
        deferring: DeferringSink | None,
        device: torch.device,
    ) -> None:
        assert (deferring is not None) == (model.pipeline.schedule in ZERO_BUBBLE_SCHEDULES)
        self.name = model.pipeline.schedule
        self.stages = [
            _Stage(model, place, boundary, scaling, streams, deferring, device)
            for place in range(len(model.indices))
        ]
        self._schedules: dict[int, PipelineScheduleSingle | PipelineScheduleMulti] = {}
        self._sends: dict[int, FewSends] = {}

    def forward_backward(
        self,
        batches: Sequence[Batch],
        step: int,
        global_indices: Sequence[int],
        tokens: Sequence[Tokens],
    ) -> torch.Tensor:
        """Accumulate the gradients of one step; return the summed loss, FP64, 0 on ranks without
        head.

        `global_indices` number the microbatches over all data-parallel ranks, and `tokens` says
        what this rank has of each.
        """
        count = len(batches)
        for stage in self.stages:
            stage.begin_step(batches, step, global_indices, tokens)
        losses: list[torch.Tensor] = []
        # The stages have the batches already; the schedule only needs the microbatches' numbers.
        self._schedule(count).step(target=torch.arange(count), losses=losses, return_outputs=False)
        if count in self._sends:
            self._sends[count].finish()
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens_BS.device)
        for loss in losses:
            total += loss.detach()
        return total

    def _schedule(self, count: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Return the schedule for `count` microbatches; all schedules share the same stages."""
        if count not in self._schedules:
            kind = get_schedule_class(self.name)
            stages = self.stages[0] if self.name in ONE_STAGE_SCHEDULES else self.stages
            few = few_sends(kind, KEPT_SENDS)
            schedule = self._schedules[count] = kind(
                stages,
                count,
                loss_fn=lambda loss, microbatch: beginning_of_backward(loss),
                scale_grads=False,
                **few,
            )
            if isinstance(schedule, PipelineScheduleMulti) and not few:
                self._sends[count] = FewSends(schedule, KEPT_SENDS)
        return self._schedules[count]


class _Work(nn.Module):
    """Run a stage's part of the GPT; `current` is the microbatch, which torch does not pass."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt
        self.current: Batch | None = None

    def forward(self, x_BSD: torch.Tensor | None = None) -> torch.Tensor:
        assert self.current is not None
        tokens_BS, targets_BS = self.current.tokens_BS, self.current.targets_BS
        documents: Mapping[str, Any] = self.current.documents
        output = self.gpt.forward_stage(tokens_BS, x_BSD, targets_BS, **documents)
        return output.contiguous()  # it is sent, and Transformer Engine's layers keep another order


class _Stage(NoMessagesToItself, ReceivesWhenDue, PipelineStage):
    """Run one stage with declared shapes, events for each microbatch, and counted messages."""

    def __init__(
        self,
        model: PipelinedGPT,
        place: int,
        boundary: Boundary,
        scaling: ScalingState | NoScaling,
        streams: RandomStreams,
        deferring: DeferringSink | None,
        device: torch.device,
    ) -> None:
        gpt = model.stages[place]
        assert isinstance(gpt, GPT)
        x_BSD = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        for tensor in (x_BSD, loss):  # torch 2.11 keeps them, and dry runs count what has memory
            tensor.untyped_storage().resize_(0)
        self.work, self.place, self.boundary = _Work(gpt), place, boundary
        self.scaling, self.streams, self.pp = scaling, streams, model.pp
        super().__init__(
            self.work,
            model.indices[place],
            model.num_stages,
            device,
            input_args=() if gpt.has_embedding else (x_BSD,),
            output_args=(loss if gpt.has_head else x_BSD,),
            group=model.pp.group,
            dw_builder=None if deferring is None else deferring.take,
        )

    def begin_step(
        self,
        batches: Sequence[Batch],
        step: int,
        indices: Sequence[int],
        tokens: Sequence[Tokens],
    ) -> None:
        self.batches, self.step, self.indices, self.tokens = batches, step, indices, tokens
        self.chunks = len(batches)  # another schedule may have changed it

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        batch = self.batches[fwd_chunk_id]
        if tuple(batch.tokens_BS.shape) != self.boundary.tokens:
            raise RuntimeError(
                f"microbatch {fwd_chunk_id} is {tuple(batch.tokens_BS.shape)}, the pipeline was "
                f"made for {self.boundary.tokens}"
            )
        self.work.current = batch
        sample = self.indices[fwd_chunk_id]
        self.streams.begin_microbatch(self.step, sample)
        # Forward passes are numbered over the rank's stages; weights are quantized in number 0.
        number = self.place * len(self.batches) + fwd_chunk_id
        self.scaling.begin_microbatch(number, self.step, self.tokens[fwd_chunk_id])
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.scaling.end_forward()
        if not self.is_last:
            self.boundary.check(output)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.scaling.return_to(self.step, self.tokens[bwd_chunk_id])
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.scaling.end_backward()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            self.pp.traffic.add(self.pp.name, "send", op.tensor)
        return ops
