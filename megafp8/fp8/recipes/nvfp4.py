"""Define `nvfp4`: FP4 with a scale in E4M3 for 16 elements, and one FP32 factor a tensor (TE)."""

# M rows across a product's sum   K elements along it

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megafp8.specs.recipe import Cast, Made, Recipe, Scaled, lazy
from megafp8.specs.traits import Casts, Cost, Scales, Traits

if TYPE_CHECKING:
    import torch

    from fp8_numerics import nvfp4 as arithmetic
    from fp8_numerics.philox import Counters
else:  # settings are checked without torch
    arithmetic = lazy("fp8_numerics.nvfp4")

BLOCK = 16
ROTATION = "hadamard"
_LINE, _SQUARE = Scales(1, BLOCK, has_outer=True), Scales(BLOCK, BLOCK, has_outer=True)


class Nvfp4(Recipe):
    """Input and gradient have blocks of a line, and are rotated for the weight's gradient.

    The rule is that of Transformer Engine's `NVFP4BlockScaling` from version 2.14 on
    (common/cast/nvfp4/core_nvfp4.cuh). Two points differ: ranks that hold parts of a tensor agree
    on its amax, where Transformer Engine's use their own; and a NaN makes the factor of its tensor
    infinite, so that it cannot be lost.
    """

    traits = Traits(
        help="those of 16 elements, in E4M3, and the tensor's own amax",
        input=Casts(_LINE, _LINE, rotation=ROTATION),
        weight=Casts(_SQUARE, _SQUARE, serves_both=True),
        grad_output=Casts(_LINE, _LINE, is_random=True, rotation=ROTATION),
        numbers="e2m1",
        options=("rht", "sr", "2d"),
        agrees=True,
        packs="nv",
        commutes=True,
        power_2="never",
        multiple=BLOCK,
        max_saturated=0.1,
        cost=Cost(
            launches=(83, 97), reads_twice=True, sums_columns=True, bytes_written=1 + 2 / BLOCK
        ),
        backends={"te": "NVFP4BlockScaling"},
    )

    @classmethod
    def without(cls, options: frozenset[str]) -> type[Recipe]:
        """Return the recipe without rotation (`rht`), random rounding (`sr`) or squares (`2d`)."""
        input, weight, grad = cls.traits.input, cls.traits.weight, cls.traits.grad_output
        if "rht" in options:
            input, grad = replace(input, rotation=None), replace(grad, rotation=None)
        if "sr" in options:
            grad = replace(grad, is_random=False)
        if "2d" in options:
            weight = Casts(_LINE, _LINE)
        traits = replace(cls.traits, input=input, weight=weight, grad_output=grad)
        return type(cls.__name__, (cls,), {"traits": traits})

    def in_c(self, x_MN: torch.Tensor, block: tuple[int, int], cast: Cast) -> Scaled | None:
        """Quantize blocks as `cast` does; None where a size is not whole blocks.

        Rows that are rotated are filled up to whole blocks, and the result has those too.
        """
        from fp8_numerics.block_casts import nvfp4, rotate_columns
        from fp8_numerics.cast import amax_of

        casts, amax = self.traits.casts[cast.role], None
        if cast.along == "first" and casts.rotation is not None:
            x_MN, amax = rotate_columns(x_MN, arithmetic.signs())
        m, n = x_MN.shape
        if m % block[0] or n % block[1]:
            return None
        if amax is None or (amax.is_cpu and not amax):  # a zero has the sign that torch gives it
            amax = amax_of(x_MN)
        if cast.reduce_max is not None:
            cast.reduce_max(amax)
        byte = None
        if casts.is_random:  # the bytes belong to the elements as the rule sees them
            is_turned = cast.along == "first"
            byte = cast.draw((n, m) if is_turned else (m, n))
            byte = byte.t().contiguous() if is_turned else byte
        made = nvfp4(x_MN, block, amax, byte, cast.values)
        return Scaled(made.payload, made.scale, made.outer, made.values)

    def in_triton(
        self,
        x_MN: torch.Tensor,
        need: Any,
        asked: tuple[Cast, Cast],
        *,
        packed: bool,
        with_sum: bool,
    ) -> Made | None:
        """Quantize for both products after one read for amaxes; None where blocks are not whole.

        Rows that are not whole blocks are taken where no block goes across them, and also where the
        last one may end early: neither a rotation nor two numbers in a byte can be cut off.
        """
        from fp8_numerics.kernels import triton_fp4

        casts = self.traits.casts[asked[0].role]
        is_cut = packed or casts.rotation is not None or casts.last == _SQUARE
        if x_MN.shape[1] % BLOCK or (x_MN.shape[0] % BLOCK and need.first and is_cut):
            return None
        counters = None
        if casts.is_random:
            pairs = zip(asked, need, strict=True)
            found = [_counters(each) for each, is_wanted in pairs if is_wanted]
            if found[0] is None or found[-1] is None:
                return None
            counters = found[0], found[-1]
        is_square = casts.last == _SQUARE
        signs = arithmetic.SIGN_BITS if casts.rotation is not None and need.first else None
        amaxes, sums = triton_fp4.amaxes_fp4(x_MN, signs=signs, with_sums=with_sum)
        if (reduce_max := asked[0].reduce_max) is not None:
            for amax in amaxes[: 1 if signs is None else 2]:
                reduce_max(amax)
        serves_both = is_square and not packed
        (rows, columns, _), outer = triton_fp4.cast_fp4(
            x_MN, amaxes, signs=signs, square=is_square, packed=packed, counters=counters,
            with_rows=need.last or serves_both, with_columns=need.first and not serves_both,
        )  # fmt: skip
        of_rows = None if rows is None else Scaled(*rows, outer[0])
        of_columns = None if columns is None else Scaled(*columns, outer[1])
        return Made(of_rows, of_rows if serves_both else of_columns, sums)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        casts = self.traits.casts[cast.role]
        if cast.along == "first" and casts.rotation is not None:
            x_MK = arithmetic.rotated(x_MK)
        x_MK = x_MK.float()  # a rotation is rounded to BF16 before, as in Transformer Engine
        # The MAX over ranks treats NaN by the order of ranks, and infinities alike on all.
        amax = x_MK.abs().amax().nan_to_num_(nan=float("inf"), posinf=float("inf"))
        if cast.reduce_max is not None:
            cast.reduce_max(amax)
        byte = cast.draw(tuple(x_MK.shape)) if casts.is_random else None
        payload, scale = arithmetic.quantize_blocks(x_MK, cast.scales.across or 1, amax, byte)
        return Scaled(payload.to(cast.fmt.dtype), scale, arithmetic.outer_of(amax))


def _counters(cast: Cast) -> Counters | None:
    from megafp8.fp8.draws import Draw

    assert isinstance(cast.draw, Draw), "only linears cast in Triton"
    return cast.draw.counters()
