"""Build a linear's quantizers from the recipe."""

from __future__ import annotations

from collections.abc import Callable

from megafp8.precision.formats import FORMATS, Fp8Format
from megafp8.precision.quantizer import LinearQuantizer
from megafp8.precision.recipes.base import Role, TensorQuantizer
from megafp8.precision.recipes.blockwise import BlockwiseQuantizer
from megafp8.precision.recipes.delayed import DelayedQuantizer
from megafp8.precision.recipes.rowwise import RowwiseQuantizer
from megafp8.precision.recipes.tensorwise import TensorwiseQuantizer
from megafp8.precision.scaling import ReduceMax, ScalingState
from megafp8.specs.precision import HIGH_PRECISION, RecipeName

ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")


def whole(role: Role) -> ReduceMax | None:
    """Return None: every tensor is whole on this rank, so no maximum over ranks is needed."""
    return None


def linear_quantizer(
    state: ScalingState, name: str, reduce_max: Callable[[Role], ReduceMax | None] = whole
) -> LinearQuantizer | None:
    """Return the quantizers of the linear `name`, or None if it stays in high precision.

    `reduce_max(role)` returns the maximum over the ranks that hold parts of that tensor, or None.
    """
    recipe = state.recipe
    precision = recipe.precision_of(name)
    if precision == HIGH_PRECISION:
        return None
    tensors = {role: _tensor_quantizer(state, precision, name, role, reduce_max) for role in ROLES}
    high_precision = recipe.high_precision_gemms
    if precision == "rowwise_with_gw_hp":
        high_precision = high_precision | {"grad_weight"}
    return LinearQuantizer(name, state, tensors, high_precision)


def _tensor_quantizer(
    state: ScalingState,
    precision: RecipeName,
    name: str,
    role: Role,
    reduce_max: Callable[[Role], ReduceMax | None],
) -> TensorQuantizer:
    fmt = _format(state, role)
    power_2 = state.recipe.power_2_scale
    match precision:
        case "delayed":
            table = state.backward if role == "grad_output" else state.forward
            return DelayedQuantizer(state, table.register(f"{name}.{role}"))
        case "tensorwise":
            return TensorwiseQuantizer(state, fmt, power_2, reduce_max(role))
        case "rowwise" | "rowwise_with_gw_hp":
            is_whole = precision == "rowwise_with_gw_hp" and role == "weight"
            return RowwiseQuantizer(state, fmt, power_2, tensorwise_first=is_whole)
        case "blockwise":
            return BlockwiseQuantizer(state, fmt, power_2, is_square=role == "weight")


def _format(state: ScalingState, role: Role) -> Fp8Format:
    recipe = state.recipe
    name = recipe.backward_format if role == "grad_output" else recipe.forward_format
    return FORMATS[name]
