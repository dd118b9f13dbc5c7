"""Run one of Transformer Engine's layers: keyed dropout, weight caching, counted products."""

# B batch  S sequence  T tokens (B x S)  D model width  R rotated width

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fp8_numerics.dtypes import DTYPE_NAMES
from megafp8.backends.te.products import observe_products
from megafp8.backends.te.state import TeRegion
from megafp8.backends.te.stored_weights import ParameterData, StoredWeights
from megafp8.fp8.grad_sink import GradSum
from megafp8.models.attention import AttentionContext
from megafp8.models.documents import Documents
from megafp8.models.positions import rotary
from megafp8.models.random import RandomStreams
from megafp8.parallel.parts import NativeParts
from megafp8.specs.layer import layer_spec
from megafp8.specs.model import twice_seen
from megafp8.specs.precision import GEMMS, PlannedGemms
from megafp8.specs.traits import GemmName

PLACES = 64
"""The longest document counts as a multiple of so many tokens, as Transformer Engine's own count
does: cuDNN prepares its work for each length."""


class TeLayer(nn.Module):
    """Hold one of Transformer Engine's layers, and call it as a layer of our own is called."""

    def __init__(
        self,
        layer: nn.Module,
        parts: NativeParts,
        region: TeRegion,
        index: int,
        *,
        in_fp8: bool,
        packs: bool,
        alibi_slopes: torch.Tensor | None,
    ) -> None:
        """Hold the layer `index`; with `packs` its form is `thd`, of documents in a row."""
        super().__init__()
        self.packs = packs
        self.layer, self.in_fp8, self.alibi_slopes = layer, in_fp8, alibi_slopes
        self.index, self.region, self.counter = index, region, parts.counter
        self.streams, self.sequence_parallel = parts.streams, parts.sequence_parallel
        self.spec, self.tp_size, self.dtype = parts.spec, parts.tp.size, parts.dtype
        self.has_dropout = max(parts.spec.hidden_dropout, parts.spec.attention_dropout) > 0
        self.attention_dtype = DTYPE_NAMES[parts.dtype]  # of its products
        self.products = observe_products(region.names.extension)
        self.gathered: dict[str, Any] = {}  # with FSDP, what casts each of its FP8 weights
        self.sink = parts.sink
        self.weight_paths: tuple[str, ...] = ()  # of its linears
        self.summed_in_products: list[nn.Parameter] = []
        self.begin_products: Callable[[], None] = _do_nothing
        self.stored = StoredWeights({}, parts.dtype)  # the weights that are stored in low precision

    def forward(self, x_BSD: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """Return the layer's output: [B, S, D] -> [B, S, D].

        With sequence parallelism S are this rank's tokens. Attention is causal over whole
        sequences, or within documents.
        """
        context = context or AttentionContext()
        # Settings that lead to either are refused, and generation builds layers of our own.
        unsupported = (context.mask, context.cache, None if self.packs else context.documents)
        if any(value is not None for value in unsupported):
            raise RuntimeError(
                "Transformer Engine's layers got a mask or a cache, and know neither"
            )
        documents = self._documents(x_BSD, context) if self.packs else None
        self.products.counter = self.counter
        x_BSD = self._announce_gradients(x_BSD)
        arguments = self._arguments(context, documents)
        runs_fp8 = self.in_fp8 and self.region.in_fp8
        is_cast = runs_fp8 and arguments["is_first_microbatch"] is False
        values, shape = ParameterData.VALUES, ParameterData.SHAPE
        with (
            self._dropout(x_BSD.device),
            self.region.layer(in_fp8=self.in_fp8),
            self.stored.holding(shape if is_cast else values),
        ):
            out_BSD = self._run(x_BSD, arguments)
        out_BSD = self._await_backward(out_BSD, shape if runs_fp8 else values)
        lengths = [self._seq(x_BSD)] * x_BSD.shape[0] if documents is None else documents.lengths
        window = self.spec.window_of(self.index)
        seen = sum(twice_seen(length, window) for length in lengths)
        self._count_attention(seen, out_BSD, is_recomputed=context.recompute_attention)
        return out_BSD

    @property
    def weights(self) -> list[nn.Parameter]:
        """Return the weights of the layer's linears; FSDP replaces them by its shards."""
        return [self.layer.get_parameter(path) for path in self.weight_paths]

    def _seq(self, x_BSD: torch.Tensor) -> int:
        """Return the tokens of a whole sequence, which tensor-parallel ranks may share."""
        return x_BSD.shape[1] * (self.tp_size if self.sequence_parallel else 1)

    def _documents(self, x_BSD: torch.Tensor, context: AttentionContext) -> Documents:
        """Return the documents of a microbatch: whole rows where the context has none."""
        if context.documents is not None:
            return context.documents
        seq = self._seq(x_BSD)
        borders = range(0, x_BSD.shape[0] * seq + 1, seq)
        return Documents(torch.tensor(borders, dtype=torch.int32, device="cpu"), seq, x_BSD.device)

    def _arguments(self, context: AttentionContext, documents: Documents | None) -> dict[str, Any]:
        """Return what the layer is called with besides the input."""
        is_first = self.region.is_first_microbatch(self.index)
        arguments: dict[str, Any] = {"is_first_microbatch": is_first}
        if documents is not None:
            arguments |= _of_documents(documents)
        if context.rotary is not None:
            angles_SR = context.rotary.angles
            if documents is not None:
                # It counts positions from the first token of each document. Scores depend on
                # differences of positions alone, so they are those of positions that continue.
                angles_SR = self._angles(documents)
            if angles_SR.dim() != 2:  # `backends.check` refuses the settings that lead here
                raise RuntimeError("Transformer Engine's layers got positions that vary by sample")
            # It takes the angles as [S, 1, 1, R], and pairs the features (i, i + R/2) as we do.
            arguments["rotary_pos_emb"] = angles_SR[:, None, None]
        if self.alibi_slopes is not None:
            arguments["core_attention_bias_type"] = "alibi"
            arguments["alibi_slopes"] = self.alibi_slopes
        if context.recompute_attention:
            arguments["checkpoint_core_attention"] = True
        return arguments

    def _angles(self, documents: Documents) -> torch.Tensor:
        """Return the angles [S, R] of the positions from 0 on, of any document of a sample."""
        positions = torch.arange(documents.seq, device=documents.device)
        return rotary(positions, self.spec).angles

    def _run(self, x_BSD: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the layer's output [B, S, D], whichever dims the layer itself has first."""
        if self.packs:
            # The settings refuse several samples with sequence parallelism: ranks' tokens, put
            # behind each other, would not be whole samples.
            out_TD: torch.Tensor = self.layer(x_BSD.flatten(0, 1), **arguments)
            return out_TD.view(x_BSD.shape)
        if not self.sequence_parallel:
            out_BSD: torch.Tensor = self.layer(x_BSD, **arguments)
            return out_BSD
        # The output lies in memory as [S, B, D], so that the next layer's input is not copied.
        x_SBD = x_BSD.transpose(0, 1).contiguous()
        out_SBD: torch.Tensor = self.layer(x_SBD, **arguments)
        return out_SBD.transpose(0, 1)

    @contextmanager
    def _dropout(self, device: torch.device) -> Iterator[None]:
        """Key the random numbers of the layer's dropouts by its place in the run."""
        if self.training and self.has_dropout:
            sharded = self.sequence_parallel
            with self.streams.keyed(f"layers.{self.index}.dropout", device, sharded=sharded):
                yield
        else:
            yield

    def _announce_gradients(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Tell the sink of the weights' gradients when the layer's backward pass is done.

        The products have added them to the sums by then, and autograd gets none. A recomputation
        belongs to a forward pass that has announced them already. The result is the input for the
        layer.
        """
        if not self._has_backward:
            return x_BSD
        # The end of a step zeroes the sums of weights that were not announced.
        assert x_BSD.requires_grad, "the layer's input says when its backward pass is done"
        if x_BSD.is_leaf:  # a pipeline stage receives every step's input in the same tensor,
            x_BSD = x_BSD.view_as(x_BSD)  # which would keep the hooks of earlier steps

        def end_backward(grad: torch.Tensor) -> None:
            for weight in self.summed_in_products:
                self.sink.add(weight, _sum_itself)
            self.stored.hold(ParameterData.STORED_BITS)

        x_BSD.register_hook(end_backward)
        return x_BSD

    def _await_backward(self, out_BSD: torch.Tensor, reads: ParameterData) -> torch.Tensor:
        """Prepare sums and weights when the layer's backward pass begins; return the output.

        `reads` is what its products then read of weights that are stored in low precision.
        """
        if not self._has_backward:
            return out_BSD

        def begin_backward(grad: torch.Tensor) -> None:
            self.begin_products()
            self.stored.hold(reads)

        out_BSD.register_hook(begin_backward)
        return out_BSD.view_as(out_BSD)  # whose hooks, of the next layer, run before this one

    @property
    def _has_backward(self) -> bool:
        """Whether the present forward pass has a backward pass with something to prepare."""
        prepares = bool(self.summed_in_products or self.stored)
        return prepares and not self.region.is_again and torch.is_grad_enabled()

    def planned(self) -> PlannedGemms:
        """Return what the layer's linears will run, as one entry."""
        linears = layer_spec(self.spec, self.index).linears
        flops = 2 * sum(linear.macs for linear in linears) // self.tp_size
        fp8: tuple[GemmName, ...] = GEMMS if self.in_fp8 else ()
        reasons = () if self.in_fp8 else (f"{', '.join(GEMMS)}, chosen by name",)
        return PlannedGemms(f"layers.{self.index}", flops, fp8, reasons)

    def _count_attention(
        self, num_seen: int, out_BSD: torch.Tensor, *, is_recomputed: bool
    ) -> None:
        """Count the FLOPs of causal attention on this rank, forward and backward.

        `num_seen` is twice the scores that queries see. The products of the linears are counted
        where they run, for this layer in its backward pass too.
        """
        causal = 2 * num_seen * self.spec.query_size // self.tp_size
        self.counter.add(self.attention_dtype, "attention", causal)
        if out_BSD.requires_grad:

            def begin_backward(grad: torch.Tensor) -> None:
                self.products.counter = self.counter
                self.region.backward_ran.add(self.index)
                again = (3 if is_recomputed else 2) * causal
                self.counter.add(self.attention_dtype, "attention", again)

            out_BSD.register_hook(begin_backward)


def _of_documents(documents: Documents) -> dict[str, Any]:
    """Return what keeps documents apart; in a dry run the borders alone have values."""
    is_dry = documents.device.type == "meta"
    borders_N1 = documents.cu_seqlens_N1 if is_dry else documents.cu_seqlens_on_device
    longest = min(-(-max(documents.lengths) // PLACES) * PLACES, documents.seq)
    return {
        "cu_seqlens_q": borders_N1,
        "cu_seqlens_kv": borders_N1,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def layers_in(model: nn.Module) -> list[TeLayer]:
    """Return Transformer Engine's layers in a model."""
    return [module for module in model.modules() if isinstance(module, TeLayer)]


def _do_nothing() -> None:
    """Do nothing: autograd, not a product, adds the gradients."""


def _sum_itself(into: GradSum | None) -> torch.Tensor:
    assert into is not None, "products add to FP32 sums alone"
    return into.total


class HeadDropout:
    """Draw the random numbers of attention's dropout under tensor parallelism.

    Each rank holds other heads there, so its numbers must differ from those of other ranks. It is
    what Transformer Engine calls a tracker of random states. After attention the generator is as
    it was before, since the dropout that follows must be the same on all ranks.
    """

    def __init__(self, streams: RandomStreams, site: str, device: torch.device) -> None:
        self.streams, self.site, self.device = streams, site, device

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the position in the run, which keys all draws; a recomputation gets it back."""
        return {"position": torch.tensor(self.streams.position)}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Set the position that `get_states` returned."""
        step, global_index = states["position"].tolist()
        self.streams.begin_microbatch(step, global_index)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw by the site's key within the context, and restore the generator after it."""
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.get_rng_state(self.device) if on_gpu else torch.get_rng_state()
        with self.streams.keyed(self.site, self.device, sharded=True):
            yield
        if on_gpu:
            torch.cuda.set_rng_state(before, self.device)
        else:
            torch.set_rng_state(before)
