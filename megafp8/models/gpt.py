"""Define the GPT: embedding, layers, final norm, head and loss."""

# B batch  S sequence  D model width  V vocabulary

from __future__ import annotations

import dataclasses
from itertools import islice

import torch
from torch import nn

from megafp8.models.attention import AttentionContext, KVCache, attention_context
from megafp8.models.block import layer_of
from megafp8.models.parts import Parts, Rounded
from megafp8.specs.parameters import HEAD, WORD


class GPT(nn.Module):
    """Compute a decoder-only transformer, or the consecutive layers that a pipeline stage holds.

    `layers` are indices in the whole model; they name the logical tensors in checkpoints. If input
    and output share their weight, a stage that has the head and not the embedding holds a copy of
    the embedding's weight (a replica).
    """

    def __init__(
        self,
        parts: Parts,
        layers: range | None = None,
        *,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        self.spec, self.parts = parts.spec, parts
        self.has_embedding, self.has_head = has_embedding, has_head
        if has_embedding:
            self.embedding = parts.embedding()
        layers = range(parts.spec.num_layers) if layers is None else layers
        self.layers = nn.ModuleList(layer_of(parts, index) for index in layers)
        if has_head:
            is_post = parts.spec.transformer_block_type == "post_ln"
            self.final_norm = Rounded(parts.dtype) if is_post else parts.norm("final_norm")
            if not parts.spec.share_embeddings_and_output_weights:
                self.head_weight = parts.parameter(HEAD)
            elif not has_embedding:
                self.head_weight = parts.parameter(WORD, replica=1)
            self.head_loss = parts.head_loss()

    def forward(
        self,
        tokens_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        *,
        position_ids_BS: torch.Tensor | None = None,
        cu_seqlens_N1: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the cross entropy over counted targets: an FP32 scalar in nats.

        Tokens [B, S] attend to earlier tokens of the same document. Documents are given by the
        places where they begin (`cu_seqlens_N1`, see `Documents`), or by an id for each token,
        which takes a mask of S x S elements. Positions count from 0 over the sequence unless
        `position_ids_BS` is given.
        """
        self._begin_microbatch(targets_BS)
        x_BSD = self.forward_embedding(tokens_BS, position_ids_BS)
        x_BSD = self.forward_layers(
            x_BSD,
            position_ids_BS=position_ids_BS,
            cu_seqlens_N1=cu_seqlens_N1,
            document_ids_BS=document_ids_BS,
        )
        return self.forward_head(x_BSD, targets_BS)

    def forward_stage(
        self,
        tokens_BS: torch.Tensor,
        x_BSD: torch.Tensor | None,
        targets_BS: torch.Tensor | None,
        *,
        position_ids_BS: torch.Tensor | None = None,
        cu_seqlens_N1: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return what a pipeline stage makes of the output [B, S, D] of the stage before it.

        It is the input of the next stage or, of the stage with the head, the summed loss; without
        targets, the FP32 logits [B, S, V]. The stage with the embedding takes no `x_BSD`.
        """
        if targets_BS is not None:
            self._begin_microbatch(targets_BS)
        if self.has_embedding:
            x_BSD = self.forward_embedding(tokens_BS, position_ids_BS)
        assert x_BSD is not None
        x_BSD = self.forward_layers(
            x_BSD, position_ids_BS=position_ids_BS, cu_seqlens_N1=cu_seqlens_N1, cache=cache
        )
        if not self.has_head:
            return x_BSD
        if targets_BS is not None:
            return self.forward_head(x_BSD, targets_BS)
        return self.head_loss.logits(self.final_norm(x_BSD), self.output_weight)

    def _begin_microbatch(self, targets_BS: torch.Tensor) -> None:
        """Tell the losses that layers add which tokens of the residual stream count."""
        if (added := self.parts.added_losses) is not None:
            is_counted_BS, num_counted = self.parts.own_sequence(targets_BS >= 0), None
            if added.terms and self.parts.routers and torch.is_grad_enabled():
                num_counted = self.parts.sharing.sum(is_counted_BS.sum())
            added.begin_microbatch(is_counted_BS, num_counted)

    def forward_embedding(
        self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the embedded tokens: [B, S] int64 -> [B, S, D]."""
        x_BSD: torch.Tensor = self.embedding(tokens_BS, position_ids_BS)
        return x_BSD

    def forward_layers(
        self,
        x_BSD: torch.Tensor,
        *,
        position_ids_BS: torch.Tensor | None = None,
        cu_seqlens_N1: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return the output of this stage's layers: [B, S, D] -> [B, S, D]."""
        context = attention_context(
            self.parts.context_spec,
            self.parts.local_heads(),
            self.parts.dtype,
            (x_BSD.shape[0], self.parts.sequence_length(x_BSD)),
            x_BSD.device,
            position_ids_BS=position_ids_BS,
            cu_seqlens_N1=cu_seqlens_N1,
            document_ids_BS=document_ids_BS,
            cache=cache,
            num_sharing=self.parts.num_sharing,
        )
        for begin, end, recomputed in self._groups():
            if recomputed == "full":
                x_BSD = self.parts.recomputed(self._run, x_BSD, context, begin, end)
            else:
                group_context = context
                if recomputed == "selective":
                    group_context = dataclasses.replace(context, recompute_attention=True)
                x_BSD = self._run(x_BSD, group_context, begin, end)
        return x_BSD

    def forward_head(self, x_BSD: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Return the summed cross entropy of counted targets, in nats: [B, S, D] -> FP32 scalar."""
        loss: torch.Tensor = self.head_loss(self.final_norm(x_BSD), self.output_weight, targets_BS)
        return loss

    @property
    def output_weight(self) -> nn.Parameter:
        """Return the output head's weight [V, D]: its own, or the embedding's if they are tied."""
        return self.head_weight if hasattr(self, "head_weight") else self.embedding.word

    def hidden(
        self,
        tokens_BS: torch.Tensor,
        cache: KVCache | None = None,
        position_ids_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after the final norm: [B, S] int64 -> [B, S, D]."""
        if cache is not None and cache.length:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) + cache.length
            position_ids_BS = positions.expand_as(tokens_BS)
        x_BSD = self.forward_embedding(tokens_BS, position_ids_BS)
        x_BSD = self.forward_layers(x_BSD, position_ids_BS=position_ids_BS, cache=cache)
        if cache is not None:
            cache.length += tokens_BS.shape[1]
        out: torch.Tensor = self.final_norm(x_BSD)
        return out

    def logits(
        self,
        tokens_BS: torch.Tensor,
        cache: KVCache | None = None,
        *,
        position_ids_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return FP32 logits for generation: [B, S] -> [B, S, V].

        The keys and values of earlier tokens come from `cache`, which is extended by these tokens.
        """
        hidden_BSD = self.hidden(tokens_BS, cache, position_ids_BS)
        return self.head_loss.logits(hidden_BSD, self.output_weight)

    def _groups(self) -> list[tuple[int, int, str | None]]:
        """Return (begin, end, what backward recomputes) for runs of consecutive layers of this
        stage.
        """
        count, spec = len(self.layers), self.spec.recompute
        if spec is None or not (self.training and torch.is_grad_enabled()):
            return [(0, count, None)]
        if spec.method == "block":
            first = min(spec.num_layers, count)
            size = 1
        else:
            first, size = count, spec.num_layers
        groups: list[tuple[int, int, str | None]] = [
            (begin, min(begin + size, first), spec.granularity) for begin in range(0, first, size)
        ]
        return [*groups, (first, count, None)]

    def _run(
        self, x_BSD: torch.Tensor, context: AttentionContext, begin: int, end: int
    ) -> torch.Tensor:
        for layer in islice(self.layers, begin, end):
            x_BSD = layer(x_BSD, context)
        return x_BSD
