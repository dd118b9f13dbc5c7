"""Run pipeline parallelism: each rank holds some layers; microbatches pass from stage to stage.

`torch.distributed.pipelining` decides the order of work. The shapes of stage inputs and outputs are
declared, not inferred: inference would run the model once more and record amaxes twice. Losses are
summed and gradients are not scaled; the step divides once at its end, over all ranks.
"""

# B batch  S sequence  D model width  V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megafp8.fp8.scaling import Pending
from megafp8.models.attention import KVCache
from megafp8.models.gpt import GPT
from megafp8.models.parts import Parts
from megafp8.parallel.collectives import Axis
from megafp8.specs.parallel import (
    ParallelSpec,
    PipelineSpec,
)


class Batch(NamedTuple):
    """Hold one microbatch on the device: int64 [B, S] each, target -100 where nothing is counted.

    `documents` holds keyword arguments of the model: `position_ids_BS` and `cu_seqlens_N1` (which
    stays on the CPU) that separate a sample's documents or, with context parallelism,
    `position_ids_BS` of this rank's tokens.
    """

    tokens_BS: torch.Tensor  # noqa: N815 (shape suffix)
    targets_BS: torch.Tensor  # noqa: N815 (shape suffix)
    documents: Mapping[str, torch.Tensor] = {}  # noqa: RUF012


@dataclass(frozen=True)
class Boundary:
    """Describe what crosses between two stages: the residual stream of one microbatch.

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
        actual = (tuple(x_BSD.shape), x_BSD.dtype)
        if actual != (self.shape, self.dtype):
            raise RuntimeError(
                f"between two stages {self.shape} {self.dtype} is agreed on, not {actual}"
            )


class PipelinedGPT(nn.Module):
    """Hold the stages of a GPT that one rank has, in the model's order.

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
        # A rank that holds both ends needs no copy of the weight that they share.
        if first is not None and last is not None:
            if parts.spec.share_embeddings_and_output_weights:
                last.head_weight = first.embedding.word

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
        own_tokens_BS = self.parts.own_sequence(torch.empty(batch, length, device="meta"))
        shape = (batch, own_tokens_BS.shape[1], self.spec.hidden_size)
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
        if cache is not None and cache.length:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) + cache.length
            position_ids_BS = positions.expand_as(tokens_BS)
        logits_BSV = self._pass(tokens_BS, None, position_ids_BS, cache=cache)
        if self._gpt(self.num_stages - 1) is None:
            shape = (*tokens_BS.shape, self.spec.vocab_size)
            logits_BSV = torch.empty(shape, device=tokens_BS.device)
        if cache is not None:
            cache.length += tokens_BS.shape[1]
        # The last stage alone has computed them; every rank continues with the same next token.
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
