"""Define what a recipe is: a class with its traits and its rule.

Settings are checked and plans are made without torch, so this module does not import it, and the
built-in recipes import it when their rule first runs (`lazy`). Recipes of others may import torch
at the top of their file.
"""

# M rows across a product's sum   K elements along it

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from megafp8.specs.traits import Role, Scales, Traits

Tensor = Any  # a torch.Tensor, which this package does not import


class Cast(NamedTuple):
    """Say what is to be quantized: which tensor, for which product, with which scales.

    Attributes:
        role: Which of the linear's tensors it is.
        scales: Which elements share a scale, by the recipe's traits.
        fmt: The format, with `name`, `dtype` (of torch) and `max` (its largest number).
        power_2: Whether scales are powers of two.
        along: Which dim of the tensor itself the product sums over. The matrix that the rule is
            given always has that dim last.
        reduce_max: Takes the maximum of an amax (FP32, overwritten) over the ranks that hold parts
            of the tensor. None where this rank holds all of it, or where the recipe does not
            declare `agrees`.
        draw: It returns random bytes (uint8) of a shape. Those of the shape of the matrix that the
            rule is given belong to its elements: every layout of ranks and a resumed run draw the
            same (`fp8.draws`). Those of another shape depend on the layout. Another step gets
            other bytes.
        values: The dtype (of torch) of the values that a product on a CPU will read, which `in_c`
            may make in the same pass. None: they are not read soon.
    """

    role: Role
    scales: Scales
    fmt: Any
    power_2: bool
    along: Literal["last", "first"]
    reduce_max: Callable[[Tensor], object] | None
    draw: Callable[[tuple[int, ...]], Tensor]
    values: Any = None


class Scaled(NamedTuple):
    """Hold an operand [M, K] in low precision: its values are payload * dequant_scale * outer.

    `payload` has the format's dtype. `dequant_scale` is FP32: [ceil(M / across), ceil(K / along)],
    or 0-d for one scale. `outer` (0-d FP32) is the factor of the whole operand, for scales of two
    levels. `values` are payload * dequant_scale in the dtype that was asked for, if `in_c` has made
    them.
    """

    payload: Tensor
    dequant_scale: Tensor
    outer: Tensor | None = None
    values: Tensor | None = None


class Made(NamedTuple):
    """Hold what `in_triton` returns: operands along the last and the first dim, None if unwanted.

    `sums` are the FP32 sums of each column of the tensor over groups of rows, [P, N], or None. An
    operand that serves both products stands twice.
    """

    last: Scaled | None
    first: Scaled | None
    sums: Tensor | None


class Seen(NamedTuple):
    """Hold what a recipe with a history knows of T tensors, after a microbatch.

    Attributes:
        amax: The largest absolute value of each in the microbatch, over the ranks that share their
            scales [T]; finite and above zero for every tensor whose state is to change.
        history: What `update` has kept of each, [T, fp8_amax_history_len - 1]; zeros at first.
        quant_scale: The scales that the microbatch was cast with [T]; ones at first.
        fmt: The format of these tensors, with `name`, `dtype` (of torch) and `max`.
        settings: The settings of the recipe (`megafp8.fp8.Fp8Recipe`), such as `margin`.
    """

    amax: Tensor
    history: Tensor
    quant_scale: Tensor
    fmt: Any
    settings: Any


class Recipe:
    """Define a recipe: a subclass sets `traits`, and implements `cast` (or `update`)."""

    traits: ClassVar[Traits]
    name: str = ""
    """How settings name the recipe; it is set when the recipe is found."""

    @classmethod
    def has_operands(cls) -> bool:
        """Whether the recipe makes operands itself; otherwise they are made by its `cast`."""
        return cls.traits.has_history or cls.operands is not Recipe.operands

    @classmethod
    def has_kernels(cls) -> bool:
        """Whether casts run as Triton kernels on a GPU; a rule of `cast` alone is in torch."""
        return cls.has_operands() or cls.has_casts_in_triton()

    @classmethod
    def has_casts_in_c(cls) -> bool:
        """Whether CPUs run `in_c` instead of `cast`."""
        return cls.in_c is not Recipe.in_c

    @classmethod
    def has_casts_in_triton(cls) -> bool:
        """Whether GPUs run `in_triton` instead of `cast`."""
        return cls.in_triton is not Recipe.in_triton

    @classmethod
    def without(cls, options: frozenset[str]) -> type[Recipe]:
        """Return the recipe without some of the parts that its traits call `options`."""
        raise NotImplementedError(f"{cls.__name__} has no `without`")

    def cast(self, x_MK: Tensor, cast: Cast) -> Scaled | Tensor:
        """Quantize an operand of a product that sums over K.

        Args:
            x_MK: A matrix in FP32, BF16 or FP16, which stays unchanged. It has whole blocks: zeros
                are added where the tensor ends inside one. A tensor that two products read is given
                twice, once transposed, unless one quantization serves both.
            cast: What is asked for.

        Returns:
            Bytes and scales. A recipe that declares `is_simulated` returns values instead: a matrix
            [M, K] in FP32 or in the dtype of `x_MK`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `cast`")

    def in_c(self, x_MN: Tensor, block: tuple[int, int], cast: Cast) -> Scaled | None:
        """Do what `cast` does in C on a CPU, along either dim of a tensor as it lies in memory.

        Args:
            x_MN: The tensor [M, N] itself, whose sizes need not be whole blocks.
            block: The rows and columns of it that share a scale.
            cast: What is asked for.

        Returns:
            Bytes [M, N] and scales, whose products are BF16 numbers; None for a tensor that `cast`
            is to quantize.
        """
        return None

    def in_triton(
        self, x_MN: Tensor, need: Any, asked: tuple[Cast, Cast], *, packed: bool, with_sum: bool
    ) -> Made | None:
        """Do what `cast` does for both products, in Triton kernels.

        Args:
            x_MN: The contiguous tensor [M, N] itself.
            need: For which products it is wanted (`fp8.quantizer.WantsFp8`).
            asked: What is asked for, along the last dim and along the first.
            packed: Whether operands are packed for tensor cores, as the trait `packs` says.
                Otherwise they are as `cast` returns them, in the tensor's own orientation.
            with_sum: Whether the sums of the columns are wanted.

        Returns:
            The operands; None for a tensor that `cast` is to quantize.
        """
        return None

    def update(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """Return the history and the scales of the next microbatch, [T, …] and [T] in FP32.

        It is called for a recipe that declares `has_history`, instead of `cast`: a tensor is
        quantized as `clamp(tensor * quant_scale)`, rounded to nearest. The history may hold any
        state. It and the scales are in checkpoints, and are alike on all ranks that share amaxes.
        A recipe without this method has Transformer Engine's delayed scaling.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `update`")

    def scale_of_amax(self, amax: Tensor, cast: Cast) -> Tensor:
        """Return the scale to quantize a weight with, given its amax alone (both 0-d FP32).

        It is called for weights of which ranks hold parts, if the recipe declares `shares_weight`.
        A part is quantized as `clamp(part * scale)`, rounded to nearest.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `scale_of_amax`")

    # What follows is for recipes whose casts run as kernels. `tensor` says what is quantized: a
    # `fp8.quantizer.TensorQuantizer`, with format, role, engine and the maximum over ranks.

    def operands(self, tensor: Any, x_MN: Tensor, need: Any, *, with_sum: bool = False) -> Any:
        """Return a tensor of a linear as its two products read it, and the sums of its columns.

        A recipe without this method has operands that are made by `cast`, or for `has_history` by
        the casts of `delayed`. A recipe with this method needs no `cast`, but `saved_form`.

        Args:
            tensor: What is quantized.
            x_MN: The tensor [M, N] in FP32, BF16 or FP16, which stays unchanged.
            need: For which products FP8 is wanted (`fp8.quantizer.WantsFp8`).
            with_sum: Whether the sums are wanted.

        Returns:
            `fp8.quantizer.Operands`: the tensor in FP8 for the products in `need`, and as it is for
            the others; and the FP32 sums of each column of `x_MN` itself over groups of rows,
            [P, N], or None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `operands`")

    def saved_form(self, tensor: Any) -> Any:
        """Return the form (`fp8.quantizer.SavedForm`) of the operand that sums along the first dim.

        It is called only for the input, when a layer is compiled: the graph must know what is kept.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `saved_form`")

    def store_scale(self, tensor: Any, amax: Tensor) -> Tensor:
        """Return the scale (0-d FP32) to cast a whole tensor of this amax with.

        `amax` (0-d FP32, may be overwritten) is known before all parts of the tensor are there. It
        is called for weights that ranks hold parts of, if the recipe declares `shares_weight`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no single scale for a tensor")

    def scale_rule(self) -> Callable[..., Tensor]:
        """Return what computes, of amaxes and a format, the factors before a cast (all FP32).

        It has the arguments of `fp8_numerics.scales.scale_of_amax`, Transformer Engine's rule,
        which is that of a recipe without this method.
        """
        from fp8_numerics import scales

        return scales.scale_of_amax

    @property
    def casts_whole(self) -> bool:
        """Whether `operands` gives its tensor to `fp8.quantizer.cast_whole`.

        That looks for infinities by the amax of its cast, so that no pass before has to.
        """
        return False

    def can_fuse(self, tensor: Any) -> bool:
        """Whether a kernel that computes the tensor may cast it too, by `produce`."""
        return False

    def produce(
        self, tensor: Any, make: Any, need: Any, *, with_plain: bool, with_sum: bool = False
    ) -> Any:
        """Return the operands of the tensor that `make` (`fp8.fused.Make`) computes, and all of it.

        `need.last` is set. `with_plain` asks for the tensor in high precision as well, `with_sum`
        for the sums of its columns. It is called only where `can_fuse` is true.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a tensor before its scale")


def lazy(name: str) -> Any:
    """Return a stand-in for a module, which is imported when one of its names is first read."""
    return _Lazy(name)


class _Lazy:
    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        self.__dict__[attribute] = value
        return value
