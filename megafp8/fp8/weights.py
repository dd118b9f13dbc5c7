"""Keep a linear's weight between uses, and give it to the three products.

    PlainWeight     the linear computes in high precision
    CachedFp8       the weight is quantized once a step, and the FP8 copy is kept
    RecastFp8       the weight is gathered for each use (FSDP), so it is quantized for each use
    FreshFp8        other code may write the weight at any time, so it is quantized for each use
    StoredFp8       the parameter is the FP8 payload alone; the optimizer has the master weight
    GatheredFp8     FSDP gathers FP8 parts, cast by a scale that ranks have agreed on
    LowPrecisionWeight
                    the parameter is its own master weight, in low precision with a scale (FP8-LM)

A linear gets one of these when it is built. The weight itself is an argument of `operands`, since
FSDP puts another parameter in the module's place while a layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fp8_numerics.cast import Fp8Tensor, quantize
from fp8_numerics.formats import Fp8Format
from fp8_numerics.gemm import Engine
from megafp8.fp8.quantizer import LinearQuantizer, Operands
from megafp8.fp8.scaled import ScaledTensor
from megafp8.ops import torch_private

KEEP_NUMBERS_BELOW = 4096
"""The tokens of a microbatch below which a cached FP8 weight keeps its numbers in a wider format as
well, where FP8 products are emulated. The numbers cost 2 bytes a weight for BF16 products and 4 for
FP32 ones. Below this count, computing them again takes a noticeable part of the products' time;
from it on, activations dominate memory, and products dominate time."""


class WeightForm(Protocol):
    """Keep the weight [O, I] of a linear in some form, and give it to the products."""

    @property
    def is_saved_for_backward(self) -> bool:
        """Whether the backward pass reads the operand that the forward pass made.

        Otherwise the backward pass calls `operands` again, with the weight that is gathered for it.
        """

    def operands(self, weight_OI: torch.Tensor, work: torch.dtype, num_tokens: int) -> Operands:
        """Return `weight_OI`, the module's parameter, as the products of a microbatch read it.

        It is called once in each forward pass, and in each backward pass unless
        `is_saved_for_backward`. `work` is the dtype of the products' results, `num_tokens` the
        microbatch's number of tokens. `Operands.along_last` is for the product `output`,
        `along_first` for `grad_input`.
        """


class GatheredForm(Protocol):
    """Cast the rows of a weight that FSDP gathers as FP8 bytes, and read what it has gathered."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype to which a master is rounded before it is cast."""

    def agree_on_scale(self, amax: torch.Tensor, part: torch.Tensor) -> None:
        """Fix the scale that `amax` of all ranks' parts leads to, until the next call.

        `amax` is 0-d FP32 and may be overwritten. `part` is this rank's part of the weight,
        rounded to the compute dtype.
        """

    def bytes_of(self, part: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight as bytes (uint8); `part` is rounded to the compute dtype."""

    def receive(
        self, payload_PI: torch.Tensor, rows: int, dtype: torch.dtype, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Take gathered bytes, and return what takes the parameter's place, and its memory.

        The weight has the first `rows` rows of the bytes. `out` is what takes the parameter's
        place already, or None at the first call. FSDP frees the memory of the tensors that the
        first call returned until the next gather.
        """


@dataclass(frozen=True)
class PlainWeight:
    """Give a weight to products that run in its own dtype."""

    is_saved_for_backward: bool = True

    def operands(self, weight_OI: torch.Tensor, work: torch.dtype, num_tokens: int) -> Operands:
        """Return the weight itself."""
        return Operands(weight_OI, weight_OI)


class CachedFp8:
    """Quantize a weight once a step; the FP8 copy serves all microbatches."""

    is_saved_for_backward = True

    def __init__(self, quantizer: LinearQuantizer) -> None:
        self._quantizer = quantizer
        self._kept: Operands | None = None
        self._version = -1

    @property
    def kept(self) -> Operands | None:
        """Return the FP8 copy of the newest cast; None before the first."""
        return self._kept

    def keep(self, copy: Operands | None) -> None:
        """Take `copy` as the present FP8 copy: a CUDA graph has cast the weight into it."""
        self._kept, self._version = copy, self._quantizer.state.weights_version

    def operands(self, weight_OI: torch.Tensor, work: torch.dtype, num_tokens: int) -> Operands:
        """Return the FP8 copy, which is made at its first use after `weights_version` changed."""
        version = self._quantizer.state.weights_version
        if self._kept is None or self._version != version:
            self._kept = self._quantizer.operands("weight", self._read(weight_OI))[0]
            self._version = version
        if num_tokens >= KEEP_NUMBERS_BELOW:
            self._kept = _without_numbers(self._kept)
        return self._kept

    def _read(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the values of the module's parameter."""
        return weight_OI.detach()


class RecastFp8:
    """Quantize a weight that is gathered for each use, for this use alone.

    The first use of a step records the amax; later ones repeat its scale and record nothing, so
    that all uses of a step have the same bits.
    """

    is_saved_for_backward = False

    def __init__(self, quantizer: LinearQuantizer) -> None:
        self._quantizer = quantizer
        self._repeat: AbstractContextManager[None] | None = None
        self._version = -1

    def operands(self, weight_OI: torch.Tensor, work: torch.dtype, num_tokens: int) -> Operands:
        """Return the weight quantized for this use."""
        state = self._quantizer.state
        if self._repeat is None or self._version != state.weights_version:
            self._repeat, self._version = state.recomputation(), state.weights_version
            return self._quantizer.operands("weight", weight_OI.detach())[0]
        with self._repeat:
            return self._quantizer.operands("weight", weight_OI.detach())[0]


class FreshFp8:
    """Quantize a weight that others may write at any time (`fp8.convert`), for each use.

    torch counts only some kinds of writes: neither those through `.data` nor those to a flat
    buffer of which the parameter is a view. So no copy outlives the pass that made it, but for the
    backward pass, which reads the copy of its forward pass, and for an evaluation whose caller
    promises that no weight changes. Where nothing is written, the bits are
    those of `CachedFp8`: all uses in the microbatch of a step's first use record the same amax,
    and later microbatches repeat its scale, record nothing, and show the observers nothing.
    """

    def __init__(self, quantizer: LinearQuantizer) -> None:
        self._quantizer = quantizer
        self.is_saved_for_backward = True  # False: the weight is gathered again, with FSDP2
        self.kept: dict[torch.dtype, Operands] | None = None  # of an evaluation that keeps copies
        self._step = -1
        self._first: tuple[object, AbstractContextManager[None]] | None = None

    def operands(self, weight_OI: torch.Tensor, work: torch.dtype, num_tokens: int) -> Operands:
        """Return the weight quantized for this use, or the copy that an evaluation keeps."""
        if self.kept is None:
            return self._quantized(weight_OI, num_tokens)
        if weight_OI.dtype not in self.kept:
            self.kept[weight_OI.dtype] = self._quantized(weight_OI, num_tokens)
        return self.kept[weight_OI.dtype]

    def _quantized(self, weight_OI: torch.Tensor, num_tokens: int) -> Operands:
        """Quantize the weight; microbatches after a step's first repeat its scale, unobserved."""
        state, now = self._quantizer.state, self._quantizer.state.draws.at
        weight_OI = weight_OI.detach()
        if state.recording and self._step != state.num_steps:
            self._step, self._first = state.num_steps, (now, state.recomputation())
        if not state.recording or self._first is None or self._first[0] is now:
            made = self._quantizer.operands("weight", weight_OI)[0]
        else:
            observers, state.observers = state.observers, []
            try:
                with self._first[1]:
                    made = self._quantizer.operands("weight", weight_OI)[0]
            finally:
                state.observers = observers
        return _without_numbers(made) if num_tokens >= KEEP_NUMBERS_BELOW else made


class StoredFp8:
    """Keep the FP8 payload of a weight alone (`fp8_params`), filled from its master weight.

    A master weight is rounded to `compute_dtype` before it is quantized, so that the payload is the
    one that a weight kept in the compute dtype would get (Megatron-LM's `quantize_param_shard`).
    """

    is_saved_for_backward = True

    def __init__(
        self, payload_OI: nn.Parameter, quantizer: LinearQuantizer, compute_dtype: torch.dtype
    ) -> None:
        self.payload_OI, self.compute_dtype = payload_OI, compute_dtype
        self._quantizer = quantizer
        self._remake: Callable[[torch.Tensor, torch.Tensor], Fp8Tensor] | None = None
        self._dequant_scale: torch.Tensor | None = None

    @property
    def dequant_scale(self) -> torch.Tensor | None:
        """Return the scale of the stored payload; None before the first `store`."""
        return self._dequant_scale

    def _set_dequant_scale(self, scale: torch.Tensor) -> None:
        """Keep the scale of a new payload, in the same memory where addresses must not change."""
        if not self._quantizer.state.keeps_addresses:
            self._dequant_scale = scale
        elif self._dequant_scale is None:
            self._dequant_scale = scale.clone()
        else:
            self._dequant_scale.copy_(scale)

    def operands(self, weight_OI: torch.Tensor, work: torch.dtype, num_tokens: int) -> Operands:
        """Return the stored FP8 weight, or its values in `work` while FP8 is switched off."""
        assert self._remake is not None and self._dequant_scale is not None, "nothing is stored yet"
        stored = self._remake(weight_OI.detach(), self._dequant_scale)
        if self._quantizer.state.fp8_enabled:
            return Operands(stored, stored)
        plain_OI = stored.dequantize(work)
        return Operands(plain_OI, plain_OI)

    @torch.no_grad()
    def store(self, master_OI: torch.Tensor) -> None:
        """Quantize the FP32 master weight [O, I] into the parameter.

        Where scales are delayed, its amax is recorded for the next step.
        """
        value = self._quantizer.store(master_OI.to(self.compute_dtype))
        self.payload_OI.data.copy_(value.payload)
        self._remake = value.factory()
        self._set_dequant_scale(value.dequant_scale)

    @torch.no_grad()
    def store_parts(
        self, amax: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Store a master weight of which ranks hold parts.

        `amax` (0-d FP32, may be overwritten) is that of all parts. Each of this rank's `parts` is
        (the part, rounded to the compute dtype; its place in the payload), both of one shape. The
        payload is complete once the ranks' places have been gathered.
        """
        agreed = AgreedScale.of(*self._quantizer.store_scale(amax), self._quantizer.state.engine)
        for part, place in parts:
            stored = agreed.quantized(part)
            place.copy_(stored.payload)
            self._quantizer.observe_part(part, stored)
        self._set_dequant_scale(agreed.dequant_scale)
        self._remake = Fp8Tensor(self.payload_OI.data, agreed.dequant_scale, agreed.fmt).factory()


class GatheredFp8:
    """Multiply a weight as the FP8 bytes that FSDP has gathered, with a scale that ranks agreed on.

    FSDP puts a tensor of the compute dtype in the parameter's place, which autograd needs for its
    shape and dtype. Its numbers are written only if `fills_weight` is set, for linears that read
    them (torchao's); our products read the bytes, which are never cast again.
    """

    is_saved_for_backward = False

    def __init__(
        self,
        quantizer: LinearQuantizer,
        compute_dtype: torch.dtype,
        *,
        fills_weight: bool = False,
    ) -> None:
        self.compute_dtype, self.fills_weight = compute_dtype, fills_weight
        self._quantizer = quantizer
        self._agreed: AgreedScale | None = None
        self._payload_OI: torch.Tensor | None = None

    @property
    def agreed(self) -> AgreedScale:
        """Return the scale of the newest `agree_on_scale`."""
        assert self._agreed is not None, "no scale has been agreed on"
        return self._agreed

    def operands(self, weight_OI: torch.Tensor, work: torch.dtype, num_tokens: int) -> Operands:
        """Return the gathered weight in FP8, or its values in `work` while FP8 is switched off."""
        assert self._payload_OI is not None, "nothing has been gathered yet"
        gathered = Fp8Tensor(self._payload_OI, self.agreed.dequant_scale, self.agreed.fmt)
        if self._quantizer.state.fp8_enabled:
            return Operands(gathered, gathered)
        plain_OI = gathered.dequantize(work)
        return Operands(plain_OI, plain_OI)

    def bytes_of(self, part: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight as FP8 bytes; `part` is rounded to the compute dtype."""
        return self.agreed.quantized(part).payload.view(torch.uint8)

    @torch.no_grad()
    def receive(
        self, payload_PI: torch.Tensor, rows: int, dtype: torch.dtype, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Take gathered bytes, whose memory FSDP fills before each use; see `GatheredForm`."""
        self._payload_OI = payload_PI[:rows].view(self.agreed.fmt.dtype)
        if out is None:
            out = torch.empty(self._payload_OI.shape, dtype=dtype, device=payload_PI.device)
        if self.fills_weight:
            gathered = Fp8Tensor(self._payload_OI, self.agreed.dequant_scale, self.agreed.fmt)
            with torch_private.preserve_version(out):  # as FSDP itself does here
                out.copy_(gathered.dequantize(dtype))
        return out, (out,)

    @torch.no_grad()
    def agree_on_scale(self, amax: torch.Tensor, part: torch.Tensor) -> None:
        """Fix the scale that `amax` of all ranks' parts leads to, until the next call.

        `amax` is 0-d FP32 and may be overwritten. `part` is this rank's part of the weight; the
        observers of FP8 health see it, rounded to the compute dtype.
        """
        state = self._quantizer.state
        self._agreed = AgreedScale.of(*self._quantizer.store_scale(amax), state.engine)
        if state.recording and state.observers:
            part = part.to(self.compute_dtype)
            self._quantizer.observe_part(part, self._agreed.quantized(part))


class LowPrecisionWeight(CachedFp8):
    """Read a weight that is its own master and is stored in low precision; quantize it once a step.

    The values are rounded to `compute_dtype` before they are quantized, as any weight's are.
    """

    def __init__(
        self, stored_OI: ScaledTensor, quantizer: LinearQuantizer, compute_dtype: torch.dtype
    ) -> None:
        super().__init__(quantizer)
        self._stored_OI, self._compute_dtype = stored_OI, compute_dtype

    def _read(self, weight_OI: torch.Tensor) -> torch.Tensor:
        return self._stored_OI.values().to(self._compute_dtype)


class PlainLowPrecisionWeight:
    """Read a weight that is stored in low precision for products in high precision, at each use."""

    is_saved_for_backward = False

    def __init__(self, stored_OI: ScaledTensor, compute_dtype: torch.dtype) -> None:
        self._stored_OI, self._compute_dtype = stored_OI, compute_dtype

    def operands(self, weight_OI: torch.Tensor, work: torch.dtype, num_tokens: int) -> Operands:
        """Return the values in the compute dtype, in a tensor of their own."""
        values_OI = self._stored_OI.values().to(self._compute_dtype)
        return Operands(values_OI, values_OI)


@dataclass(frozen=True)
class AgreedScale:
    """Hold the scale with which every rank casts its part of one weight.

    FSDP casts the parts on one CUDA stream and reads `dequant_scale` on another. Therefore it is
    computed once, together with the scale, and lives as long as this object does.
    """

    quant_scale: torch.Tensor  # 0-d FP32
    dequant_scale: torch.Tensor  # 0-d FP32
    fmt: Fp8Format
    engine: Engine

    @classmethod
    def of(cls, quant_scale: torch.Tensor, fmt: Fp8Format, engine: Engine) -> AgreedScale:
        """Return the agreed scale with the scale that undoes it, for casts by `engine`."""
        return cls(quant_scale, quant_scale.reciprocal(), fmt, engine)

    def quantized(self, part_MN: torch.Tensor) -> Fp8Tensor:
        """Return a part of the weight in FP8, with `dequant_scale` itself, not a copy of it."""
        if self.engine.uses_triton:
            from fp8_numerics.kernels.triton_cast import cast

            payload = cast(part_MN.contiguous(), self.quant_scale, self.fmt).payload
            assert payload is not None
        else:
            payload = quantize(
                part_MN, self.quant_scale, self.fmt, amax=None, grid_dtype=None
            ).payload
        return Fp8Tensor(payload, self.dequant_scale, self.fmt)


def weight_form(
    parameter: nn.Parameter,
    quantizer: LinearQuantizer | None,
    *,
    stored_compute_dtype: torch.dtype | None = None,
    is_gathered: bool = False,
) -> WeightForm:
    """Choose the form for a linear's weight.

    `quantizer` None keeps the linear in high precision. `stored_compute_dtype` asks for a weight
    that is kept (or, with `is_gathered`, crosses ranks) in FP8 alone, and is the dtype in which the
    linear computes. `is_gathered`: FSDP puts the weight together for each use.
    """
    if quantizer is None:
        return PlainWeight(is_saved_for_backward=not is_gathered)
    if stored_compute_dtype is not None:
        if is_gathered:
            return GatheredFp8(quantizer, stored_compute_dtype)
        return StoredFp8(parameter, quantizer, stored_compute_dtype)
    return RecastFp8(quantizer) if is_gathered else CachedFp8(quantizer)


def _without_numbers(weight: Operands) -> Operands:
    """Return the same FP8 operands without their numbers in a wider format.

    One object still serves both products where it did.
    """
    last, first = (o.without_grid() if isinstance(o, Fp8Tensor) else o for o in weight)
    return Operands(last, last if weight.along_first is weight.along_last else first)
