"""Run pipeline parallelism: each rank holds some layers; microbatches pass from stage to stage.

`torch.distributed.pipelining` decides the order of work. The shapes of stage inputs and outputs are
declared, not inferred: inference would run the model once more and record amaxes twice. Losses are
summed and gradients are not scaled; the step divides once at its end, over all ranks.
"""

# B batch  S sequence  D model width  V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from megafp8.fp8.scaling import NoScaling, Pending, ScalingState
from megafp8.models.attention import KVCache
from megafp8.models.gpt import GPT
from megafp8.models.loss import beginning_of_backward
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.ops.torch_private import NoMessagesToItself
from megafp8.parallel.collectives import Axis
from megafp8.specs.parallel import (
    ONE_STAGE_SCHEDULES,
    ZERO_BUBBLE_SCHEDULES,
    ParallelSpec,
    PipelineSpec,
)


class Batch(NamedTuple):
    """Holds one microbatch on the device: int64 [B, S] each, target -100 where nothing is counted.

    `documents` holds keyword arguments of the model: `position_ids_BS` and `cu_seqlens_N1` (which
    stays on the CPU) that separate a sample's documents or, with context parallelism,
    `position_ids_BS` of this rank's tokens.
    """

    tokens_BS: torch.Tensor  # noqa: N815 (shape suffix)
    targets_BS: torch.Tensor  # noqa: N815 (shape suffix)
    documents: Mapping[str, torch.Tensor] = {}  # noqa: RUF012


@dataclass(frozen=True)
class Boundary:
    """Describes what crosses between two stages: the residual stream of one microbatch.

    With sequence parallelism each rank passes its own part of the sequence.
    """

    tokens: tuple[int, int]  # B, S: of the microbatch
    shape: tuple[int, int, int]  # B, S/tp with sequence parallelism, D
    dtype: torch.dtype

    def check(self, x_BSD: torch.Tensor) -> None:
        """Raise RuntimeError unless `x_BSD` has the declared shape and dtype.

        Without this check a shorter message would be received into a longer buffer without an
        error.
        """
        found = (tuple(x_BSD.shape), x_BSD.dtype)
        if found != (self.shape, self.dtype):
            raise RuntimeError(
                f"between two stages {self.shape} {self.dtype} is agreed on, not {found}"
            )


class PipelinedGPT(nn.Module):
    """Holds the stages of a GPT that one rank has, in the model's order.

    Outside training steps (validation, sampling) a call passes one microbatch through all ranks.
    """

    def __init__(self, parts: Parts, spec: ParallelSpec, pp: Axis) -> None:
        super().__init__()
        self.spec, self.parts, self.pp = parts.spec, parts, pp
        self.pipeline: PipelineSpec = spec.pipeline
        layers = spec.pipeline.layers(parts.spec.num_layers, spec.pp)
        self.num_stages = len(layers)
        self.indices = spec.pipeline.stages_of(pp.rank, spec.pp)
        self.stages = nn.ModuleList(
            GPT(
                parts,
                layers[index],
                has_embedding=index == 0,
                has_head=index == self.num_stages - 1,
            )
            for index in self.indices
        )
        self._sent: list[Pending] = []  # of the microbatch before
        first, last = self._gpt(0), self._gpt(self.num_stages - 1)
        if (
            first is not None
            and last is not None
            and parts.spec.share_embeddings_and_output_weights
        ):
            last.head_weight = (
                first.embedding.word
            )  # this rank holds both ends, which share one weight

    def _gpt(self, index: int) -> GPT | None:
        """Return the stage `index` if this rank holds it, else None."""
        if index not in self.indices:
            return None
        gpt = self.stages[self.indices.index(index)]
        assert isinstance(gpt, GPT)
        return gpt

    @property
    def last_rank(self) -> int:
        """Return the pipeline rank that holds the head."""
        return self.pipeline.rank_of(self.num_stages - 1, self.pp.size)

    def boundary(self, batch: int, length: int) -> Boundary:
        """Return what crosses between stages for a microbatch of [batch, length] tokens."""
        own = self.parts.own_sequence(torch.empty(batch, length, device="meta"))
        shape = (batch, own.shape[1], self.spec.hidden_size)
        return Boundary((batch, length), shape, self.parts.residual_dtype)

    def tied_copy(self) -> nn.Parameter | None:
        """Return this rank's copy of the tied word embedding that another rank also holds, else
        None.
        """
        if not self.spec.share_embeddings_and_output_weights or self.pp.rank == self.last_rank == 0:
            return None
        first, last = self._gpt(0), self._gpt(self.num_stages - 1)
        if first is not None:
            return first.embedding.word
        return None if last is None else last.output_weight

    def forward(
        self,
        tokens_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        *,
        position_ids_BS: torch.Tensor | None = None,
        cu_seqlens_N1: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the summed loss on the rank that holds the head, 0 on others: FP32 scalar, in
        nats.
        """
        loss = self._pass(tokens_BS, targets_BS, position_ids_BS, cu_seqlens_N1)
        if self._gpt(self.num_stages - 1) is None:
            return torch.zeros((), device=tokens_BS.device)
        return loss

    def logits(
        self,
        tokens_BS: torch.Tensor,
        cache: KVCache | None = None,
        *,
        position_ids_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits on every rank of the pipeline, for generation: [B, S] -> FP32 [B, S, V]."""
        if cache is not None and cache.length:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) + cache.length
            position_ids_BS = positions.expand_as(tokens_BS)
        logits_BSV = self._pass(tokens_BS, None, position_ids_BS, cache=cache)
        if self._gpt(self.num_stages - 1) is None:
            shape = (*tokens_BS.shape, self.spec.vocab_size)
            logits_BSV = torch.empty(shape, device=tokens_BS.device)
        if cache is not None:
            cache.length += tokens_BS.shape[1]
        return self.pp.broadcast(logits_BSV.contiguous(), self.last_rank)

    def _pass(
        self,
        tokens_BS: torch.Tensor,
        targets_BS: torch.Tensor | None,
        position_ids_BS: torch.Tensor | None,
        cu_seqlens_N1: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Pass one microbatch through this rank's stages; return the output of the last of them."""
        boundary = self.boundary(*tokens_BS.shape)
        for sent in self._sent:  # so that no rank runs far ahead
            sent.wait()
        self._sent.clear()
        x_BSD: torch.Tensor | None = None
        for index, gpt in zip(self.indices, self.stages, strict=True):
            assert isinstance(gpt, GPT)
            before, after = self._rank_of(index - 1), self._rank_of(index + 1)
            if index > 0 and before != self.pp.rank:
                empty_BSD = tokens_BS.new_empty(boundary.shape, dtype=boundary.dtype)
                x_BSD = self.pp.receive(empty_BSD, before)
            x_BSD = gpt.forward_stage(
                tokens_BS,
                x_BSD,
                targets_BS,
                position_ids_BS=position_ids_BS,
                cu_seqlens_N1=cu_seqlens_N1,
                cache=cache,
            )
            if index + 1 < self.num_stages and after != self.pp.rank:
                boundary.check(x_BSD)
                self._sent.append(self.pp.start_send(x_BSD.contiguous(), after))
        assert x_BSD is not None
        return x_BSD

    def _rank_of(self, stage: int) -> int:
        return self.pipeline.rank_of(stage % self.num_stages, self.pp.size)


class PipelineRunner:
    """Runs training steps over a `PipelinedGPT` by one of torch's schedules.

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
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens_BS.device)
        for loss in losses:
            total += loss.detach()
        return total

    def planned(self, count: int) -> Mapping[int, Sequence[Any]]:
        """Return torch's order of work of every rank, for schedules with several stages per
        rank.
        """
        schedule = self._schedule(count)
        assert isinstance(schedule, PipelineScheduleMulti)
        order: Mapping[int, Sequence[Any]] = schedule.pipeline_order
        return order

    def _schedule(self, count: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Return the schedule for `count` microbatches; all schedules share the same stages."""
        if count not in self._schedules:
            kind = get_schedule_class(self.name)
            stages = self.stages[0] if self.name in ONE_STAGE_SCHEDULES else self.stages
            self._schedules[count] = kind(
                stages,
                count,
                loss_fn=lambda loss, microbatch: beginning_of_backward(loss),
                scale_grads=False,
            )
        return self._schedules[count]


class _Work(nn.Module):
    """Runs a stage's part of the GPT; `current` is the microbatch, which torch does not pass."""

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


class _Stage(NoMessagesToItself, PipelineStage):
    """Runs one stage with declared shapes, events for each microbatch, and counted messages."""

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
