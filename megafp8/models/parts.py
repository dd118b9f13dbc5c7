"""Define the parts of a GPT in plain torch: one device, one dtype, autograd, no FP8.

`Parts` is the one interface through which precision and parallelism change the model: a subclass
overrides the methods that make the modules, and `GPT` stays as it is. The plain parts are the
reference that tests compare the others with.
"""

# B batch  S sequence  D model width  O out features

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_numerics import bf16
from fp8_numerics.gelu import gelu_tanh
from fp8_numerics.philox import Rows
from megafp8.models.added_loss import AddedLosses
from megafp8.models.attention import AttentionCore, HeadNorms, SplitHeads
from megafp8.models.init import constant, normal, parameter
from megafp8.models.loss import HeadLoss
from megafp8.models.random import RandomStreams
from megafp8.models.router import Exchange, Router, Sharing, router_losses
from megafp8.specs import GPTSpec
from megafp8.specs.layer import LayerLinear
from megafp8.specs.model import GATED, Activation
from megafp8.specs.parameters import POSITION, WORD, parameters_of

Elementwise = Callable[[torch.Tensor], torch.Tensor]
_FUNCTIONS: dict[str, Elementwise] = {
    "gelu": F.gelu,
    "gelu-tanh": gelu_tanh,
    "squared-relu": lambda x: F.relu(x).square(),
    "geglu": F.gelu,
    "geglu-tanh": gelu_tanh,
    "swiglu": F.silu,
    "reglu": F.relu,
}


class Parts:
    """Make a GPT's modules; a subclass overrides methods to change precision or parallelism.

    Every `name` is a logical name, as checkpoints use it. Attributes: `dtype` is what linears
    compute in, `whole_dtype` that of embeddings and norms, `residual_dtype` that of the residual
    stream, and `make_core` constructs the attention core.
    """

    def __init__(
        self, spec: GPTSpec, dtype: torch.dtype, seed: int, streams: RandomStreams
    ) -> None:
        self.spec, self.dtype, self.seed, self.streams = spec, dtype, seed, streams
        self.listed = parameters_of(spec)
        self.num_parts, self.part = 1, 0  # tensor-parallel ranks, and which of them this one is
        self.num_expert_parts = 1  # ranks that divide the experts
        self.whole_dtype = dtype  # the dtype of embeddings and norms
        self.residual_dtype = dtype
        self.make_core: Callable[..., AttentionCore] = AttentionCore
        self.num_sharing = 1  # ranks that have parts of the same sequences in attention
        self.sharing = Sharing()  # those that have parts of the residual stream's tokens
        self.exchange = Exchange()  # with the ranks that divide the experts
        self.split_heads: SplitHeads | None = None  # a faster way than the core's own
        self.added_losses: AddedLosses | None = None  # of the whole model; None without any
        self.routers: list[Router] = []  # of the layers that are made
        if spec.moe is not None:
            self.added_losses = AddedLosses(router_losses(spec.moe))
        if spec.fp32_residual_connection:
            self.residual_dtype = torch.promote_types(dtype, torch.float32)

    def own_layer(self, index: int) -> nn.Module | None:
        """Return the whole layer `index` (from 0) of a backend that brings layers, else None.

        It maps ([B, S, D], attention context) to [B, S, D], as `block.TransformerLayer` does.
        """
        return None

    def embedding(self) -> Embedding:
        """Return the module that embeds tokens: [B, S] int64 -> [B, S, D] in `residual_dtype`."""
        return Embedding(self)

    def parameter(self, name: str, replica: int = 0) -> nn.Parameter:
        """Return this rank's part of a listed parameter, with its initial values.

        Those of linears are in `dtype`, others in `whole_dtype` or, if the list says so, in FP32 or
        FP64. A `replica` above 0 is a copy in another pipeline stage.
        """
        listed = self.listed[name]
        std, size, ep = listed.std, self.num_parts, self.num_expert_parts
        dtype = self.whole_dtype if listed.linear is None else self.dtype
        return parameter(
            listed.local_shape(size),
            listed.pieces(size, self.part, replica, ep=ep),
            constant(listed.value) if std is None else normal(std, self.seed),
            torch.promote_types(dtype, torch.float32) if listed.in_fp32 else dtype,
        )

    def parameter_if_listed(self, name: str) -> nn.Parameter | None:
        """Return a parameter that only some models have, or None."""
        return self.parameter(name) if name in self.listed else None

    def look_up(self, tokens_BS: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Return the rows of `weight_VD` that `tokens_BS` name: [B, S] -> [B, S, D]."""
        return F.embedding(tokens_BS, weight_VD)

    def norm(self, name: str, *, is_stream: bool = False) -> nn.Module:
        """Return the norm `name`: [B, S, D] in `residual_dtype` -> [B, S, D] in `dtype`.

        Where the result `is_stream`, the residual stream itself, it keeps `residual_dtype`. Norms
        of queries and keys work on the features of a head.
        """
        return Norm(self, name, is_stream=is_stream)

    def linear(self, linear: LayerLinear) -> nn.Module:
        """Return one linear of a layer: [B, S, in] -> [B, S, out]."""
        return PlainLinear(self, linear)

    def linear_elsewhere(self, linear: LayerLinear) -> nn.Module:
        """Return what stands here for the linear of an expert that another rank has."""
        return nn.Module()

    def of_experts(
        self,
        linears: Sequence[nn.Module],
        x_NI: torch.Tensor,
        sizes: Sequence[int],
        places: Rows | None,
    ) -> torch.Tensor:
        """Return each expert's linear of its rows, of which there may be none: [N, I] -> [N, O].

        An expert has `sizes` of the rows, one after another. Random draws follow the `places` of
        their tokens and not the rows.
        """
        rows = zip(linears, x_NI.split(list(sizes)), strict=True)
        return torch.cat([linear(x) for linear, x in rows])

    def places_of(
        self, linears: Sequence[str], tokens_R: torch.Tensor, num_tokens: int
    ) -> Rows | None:
        """Return the places of the rows of `tokens_R`, which are some of a microbatch's tokens.

        None says that no cast of the `linears` draws, on whichever rank they are.
        """
        return None

    def router(self, name: str) -> Router:
        """Return the router `name` of a layer with experts."""
        moe, added = self.spec.moe, self.added_losses
        assert moe is not None and added is not None
        weight_ED = self.parameter(f"{name}.weight")
        count_flops, sharing = self.count_router_flops, self.sharing
        self.routers.append(Router(name, weight_ED, moe, added, count_flops, sharing))
        return self.routers[-1]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return what checkpoints have beside parameters, by logical names: biases of routers."""
        biases = ((f"{router.name}.bias", router.bias) for router in self.routers)
        return {name: bias for name, bias in biases if bias is not None}

    def attention_core(self, name: str, index: int) -> nn.Module:
        """Return the core: ([B, S, queries + keys + values], context) -> [B, S, queries]."""
        spec, names = self.spec, [f"{name}.query_norm", f"{name}.key_norm"]
        return self.make_core(
            spec.head_size,
            spec.attention_dropout,
            f"{name}.dropout",
            self.streams,
            self.count_attention_flops,
            queries_per_group=spec.num_attention_heads // spec.num_kv_heads,
            layer=index,
            layer_scaling=index + 1 if spec.apply_query_key_layer_scaling else 1,
            split_heads=self.split_heads,
            norms=HeadNorms(*map(self.norm, names)) if spec.qk_layernorm else None,
            window=spec.window_of(index),
        )

    def local_heads(self) -> slice:
        """Return which query heads this rank holds."""
        share = self.spec.num_attention_heads // self.num_parts
        return slice(self.part * share, (self.part + 1) * share)

    def sequence_length(self, x_BSD: torch.Tensor) -> int:
        """Return the number of tokens of the sequence that `x_BSD` is this rank's part of."""
        return x_BSD.shape[1]

    def own_sequence(self, x_BS: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of [B, S, ...], as the residual stream has them."""
        return x_BS

    def recomputed(self, function: Callable[..., Any], *args: Any) -> torch.Tensor:
        """Return `function(*args)`; backward recomputes its activations instead of keeping them."""
        out: torch.Tensor = checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # dropout's numbers are keyed by site and microbatch
            context_fn=self.recompute_contexts,
        )
        return out

    def recompute_contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return two contexts: one for a forward pass, one for its later recomputation.

        The second context must be made during the forward pass. At the time of recomputation
        another microbatch may be the current one, and dropout must draw the numbers of the first
        pass.
        """
        again = self.streams.at(self.streams.position)
        if self.added_losses is not None:
            again = both_contexts(again, self.added_losses.recomputation())
        return nullcontext(), again

    @property
    def context_spec(self) -> GPTSpec:
        """Return the spec of what all layers share in attention: rotary angles and masks."""
        return self.spec

    def head_loss(self) -> HeadLoss:
        """Return the module that computes logits and their cross entropy; see `HeadLoss`."""
        return HeadLoss()

    def dropout(self, p: float, site: str, *, sharded: bool = False) -> Elementwise:
        """Return dropout with probability `p` at `site`, the name that keys its random numbers.

        `sharded` says that tensor-parallel ranks hold different elements of the tensor. Without
        dropout (`p` is 0) the result is `unchanged`.
        """
        return Dropout(p, site, self.streams, sharded) if p > 0 else unchanged

    def count_attention_flops(self, flops: int) -> None:
        """Count `flops` of attention's products; the plain parts ignore them."""

    def count_router_flops(self, flops: int) -> None:
        """Count `flops` of a router's products; the plain parts ignore them."""


@contextmanager
def both_contexts(
    one: AbstractContextManager[Any], other: AbstractContextManager[Any]
) -> Iterator[None]:
    """Enter two contexts, `one` first."""
    with one, other:
        yield


class Embedding(nn.Module):
    """Add word embeddings and learned positions, if there are any, then apply dropout."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.word = parts.parameter(WORD)
        self.position = parts.parameter_if_listed(POSITION)
        self.residual_dtype = parts.residual_dtype
        self.look_up, self.own_sequence = parts.look_up, parts.own_sequence
        self.dropout = parts.dropout(parts.spec.hidden_dropout, "embedding.dropout")

    def forward(
        self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the embedded tokens: [B, S] int64 -> [B, S, D].

        Positions count from 0 unless `position_ids_BS` is given.
        """
        x_BSD = self.look_up(tokens_BS, self.word)
        if self.position is not None:
            if position_ids_BS is None:
                x_BSD = x_BSD + self.own_sequence(self.position[None, : tokens_BS.shape[1]])
            else:
                x_BSD = x_BSD + F.embedding(self.own_sequence(position_ids_BS), self.position)
        out: torch.Tensor = self.dropout(x_BSD.to(self.residual_dtype))
        return out


class Norm(nn.Module):
    """Apply LayerNorm or RMSNorm over the last dim; the output has the linears' dtype.

    Where the output `is_stream`, the residual stream itself, it has the stream's dtype.

    The last dim is the model width, or the features of a head.
    """

    def __init__(self, parts: Parts, name: str, *, is_stream: bool = False) -> None:
        super().__init__()
        self.epsilon = parts.spec.layernorm_epsilon
        self.dtype = parts.residual_dtype if is_stream else parts.dtype
        self.zero_centered = parts.spec.layernorm_zero_centered_gamma
        self.weight = parts.parameter(f"{name}.weight")
        self.bias = parts.parameter_if_listed(f"{name}.bias")

    def gain(self) -> torch.Tensor:
        """Return what normalized values are multiplied by: [D] in the weight's dtype.

        A zero-centered weight plus 1 is rounded to that dtype, as in Megatron-LM's norm.
        """
        return self.weight + 1 if self.zero_centered else self.weight

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return the normalized `x_BSD` in `dtype`: [B, S, D] -> [B, S, D]."""
        weight, bias = self.gain(), self.bias
        x_BSD = x_BSD.to(torch.promote_types(x_BSD.dtype, weight.dtype))
        dtype = x_BSD.dtype
        weight = weight.to(dtype)  # a copy if the residual stream is FP32
        if bias is None:
            out_BSD = torch.rms_norm(x_BSD, weight.shape, weight, self.epsilon)
        else:
            out_BSD = torch.layer_norm(x_BSD, weight.shape, weight, bias.to(dtype), self.epsilon)
        return out_BSD.to(self.dtype)


class Rounded(nn.Module):
    """Round the residual stream to the linears' dtype, where the head has no norm before it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return `x_BSD` in `dtype`."""
        return x_BSD.to(self.dtype)


class PlainLinear(nn.Module):
    """Compute x @ weight.T + bias; the weight may fuse several logical linears."""

    def __init__(self, parts: Parts, linear: LayerLinear) -> None:
        super().__init__()
        self.weight = parts.parameter(f"{linear.name}.weight")
        self.bias = parts.parameter_if_listed(f"{linear.name}.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear's output: [B, S, in] -> [B, S, out]."""
        return bf16.linear(x, self.weight, self.bias)


class Dropout(nn.Module):
    """Apply dropout whose mask is keyed by step, microbatch and site; see `RandomStreams`."""

    def __init__(self, p: float, site: str, streams: RandomStreams, sharded: bool) -> None:
        super().__init__()
        self.p, self.site, self.streams, self.sharded = p, site, streams, sharded
        # In compiled layers: a function from x to its boolean mask, True where an element is kept.
        self.traced_mask: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`; in training dropped elements are 0 and the others divided by 1 - p."""
        if not self.training or self.p == 0:
            return x
        if self.traced_mask is not None and torch.compiler.is_compiling():
            scale = 1 / (1 - self.p)
            on_cpu = x.device.type == "cpu"  # torch rounds the scale to x's dtype on a CPU
            scaled = x * (torch.full((), scale, dtype=x.dtype) if on_cpu else scale)
            return torch.where(self.traced_mask(x), scaled, 0.0)
        with self.streams.keyed(self.site, x.device, sharded=self.sharded):
            return F.dropout(x, self.p)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """Return `x` itself: dropout with probability 0."""
    return x


def activation(name: Activation) -> Elementwise:
    """Return an activation by its configuration name.

    A plain activation maps [..., F] to [..., F]. A gated one maps [..., 2F] (gate, then up) to
    [..., F], as f(gate) * up (Shazeer, arXiv 2002.05202).
    """
    function = _FUNCTIONS[name]
    if name not in GATED:
        return function

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return gated
