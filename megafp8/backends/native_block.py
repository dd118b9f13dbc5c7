"""Run a layer of our own backend by chains of kernels (`fp8.chain`), where they can run.

Under `delayed` on a GPU a norm or an activation writes the FP8 input of the linear after it, and
the norm before the MLP adds attention's output to the residual stream. The plain layer
(`models.block`) says what is computed; this one computes it with fewer passes over memory.
"""

# B batch  S sequence  D model width  F features of the input or output of a chain

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megafp8.fp8 import chain
from megafp8.fp8.chain import Link
from megafp8.fp8.fused import KINDS, ActivationProducer, NormProducer
from megafp8.fp8.linear import Linear
from megafp8.models.attention import QKV, AttentionContext, AttentionCore
from megafp8.models.block import MLP, TransformerLayer
from megafp8.models.parts import Dropout, Norm
from megafp8.parallel.parts import NativeParts, heads_of


class FusedParts(NativeParts):
    """Make the parts of `NativeParts`, and layers that run chains, for a device with Triton."""

    def own_layer(self, index: int) -> nn.Module:
        return FusedLayer(self, index)


class FusedLayer(TransformerLayer):
    """Compute what `TransformerLayer` does, by chains where a norm or activation may cast.

    Nothing casts so in high precision, in what torch compiles (it fuses by itself), and where a
    hook wants to see each linear.
    """

    def __init__(self, parts: FusedParts, index: int) -> None:
        super().__init__(parts, index)
        self.dtype = parts.dtype
        self.qkv_link = self._after_norm(self.attention_norm, self.attention.qkv)
        self.fc1_link: Link | None = None
        self.fc2_link: Link | None = None
        if not isinstance(self.mlp, MLP):  # a router reads the norm's output in high precision
            return
        self.fc1_link = self._after_norm(self.mlp_norm, self.mlp.fc1)
        if kind := KINDS.get(parts.spec.activation):  # otherwise the activation has no kernel
            assert isinstance(self.mlp.fc2, Linear)
            self.fc2_link = Link(ActivationProducer(kind), self.mlp.fc2)

    def forward(self, x_BSD: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x_BSD, context)
        x: torch.Tensor = x_BSD
        context = context or AttentionContext()
        if self.is_post:
            x = self.attention_norm(x + self.attention_dropout(self.attention(x, context)))
            inner_BSF = self._mlp.fc1(x.to(self.dtype))
            out_BSD = self._run(self._activation_link(), inner_BSF, self._mlp.contract)
            x = self.mlp_norm(x + self.mlp_dropout(out_BSD))
        else:
            x, attended = self._attend(x, context)
            x, out = self._add_and_run_mlp(x, self.attention_dropout(attended))
            x = x + self.mlp_dropout(out)
        return x

    def _attend(
        self, x_BSD: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream as autograd shall see it, and attention(norm(stream))."""
        link, core = self.qkv_link, self.attention.core
        # The heads would be kept beside the linear's output if backward computed attention again,
        # and no kernel normalizes them.
        is_plain = not context.recompute_attention
        if isinstance(core, AttentionCore) and not core.has_norms and is_plain:
            sizes = core.sizes(link.linear.weight.shape[0])
            heads = heads_of(x_BSD.shape[0], sizes, context.rotary)
            if chain.can_run([link], heads):
                x_TD = x_BSD.flatten(0, -2)
                stream_TD, *parts = chain.run_chain([link], x_TD, self.dtype, consumer=heads)
                return stream_TD.view(x_BSD.shape), self.attention.attend(QKV(*parts), context)
        qkv_BSF = self._run(link, x_BSD, lambda x: self.attention.qkv(self.attention_norm(x)))
        return x_BSD, self.attention.attend(qkv_BSF, context)

    def _add_and_run_mlp(
        self, x_BSD: torch.Tensor, addend_BSD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream x + addend, and mlp(norm(stream))."""
        if self.fc1_link is None:
            stream_BSD = x_BSD + addend_BSD
            return stream_BSD, self.mlp(self.mlp_norm(stream_BSD))
        first, second = self.fc1_link, self._activation_link()
        links = [first] if second is None else [first, second]
        if not chain.can_run(links):
            stream_BSD = x_BSD + addend_BSD
            inner_BSF = self._run(first, stream_BSD, lambda x: self._mlp.fc1(self.mlp_norm(x)))
            return stream_BSD, self._run(second, inner_BSF, self._mlp.contract)
        flat_TD, addend_TD = x_BSD.flatten(0, -2), addend_BSD.flatten(0, -2)
        stream_TD, out_TF = chain.run_chain(links, flat_TD, self.dtype, addend_TX=addend_TD)
        out_BSF = _like(out_TF, x_BSD)
        out_BSD = self._mlp.contract(out_BSF) if second is None else out_BSF
        return stream_TD.view(x_BSD.shape), out_BSD

    def _run(
        self, link: Link | None, x_BSF: torch.Tensor, apart: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return what `link` makes of x, or `apart`, which computes it without a chain."""
        if link is None or not chain.can_run([link]):
            return apart(x_BSF)
        return _like(chain.run_chain([link], x_BSF.flatten(0, -2), self.dtype)[1], x_BSF)

    @property
    def _mlp(self) -> MLP:
        """Return the MLP of a layer without experts."""
        assert isinstance(self.mlp, MLP)
        return self.mlp

    def _after_norm(self, norm: nn.Module, linear: nn.Module) -> Link:
        assert isinstance(norm, Norm) and isinstance(linear, Linear)
        return Link(NormProducer(norm, self.dtype), linear)

    def _activation_link(self) -> Link | None:
        """Return activation and FC2; None without a kernel, or with dropout between them."""
        dropout = self._mlp.dropout
        is_dropped = isinstance(dropout, Dropout) and dropout.training
        return None if is_dropped else self.fc2_link


def _like(out_TO: torch.Tensor, x_BSF: torch.Tensor) -> torch.Tensor:
    """Return the output of a chain as [B, S, O]; sequence parallelism may change the tokens."""
    return out_TO.view(-1, *x_BSF.shape[1:-1], out_TO.shape[-1])
