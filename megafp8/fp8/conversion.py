"""Turn the linears of a model into FP8 ones, in place, after everything has been checked."""

from __future__ import annotations

import difflib
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.converted import (
    DTYPES,
    Bound,
    Converted,
    Fp8Error,
    Shared,
    after_load,
    converted_class,
    is_foreign_tensor,
)
from megafp8.fp8.coverage import coverage_of
from megafp8.fp8.recipe_settings import checked_recipe
from megafp8.fp8.scaling import Pending, ScalingState, StartReduceMax
from megafp8.fp8.state import Fp8State
from megafp8.fp8.weights import FreshFp8
from megafp8.specs.precision import Fp8Recipe, ModulePrecision, RecipeName
from megafp8.specs.recipe import Recipe
from megafp8.specs.recipes import DEFAULT_RECIPE, HIGH_PRECISION, find_recipe

_LOGGER = logging.getLogger(__name__)
Skip = str | Iterable[str] | Callable[[str, nn.Module], bool]


def convert(
    model: nn.Module,
    recipe: RecipeName | Fp8Recipe | type[Recipe] = DEFAULT_RECIPE,
    *,
    skip: Skip = (),
    amax_group: dist.ProcessGroup | None = None,
) -> Fp8State:
    """Turn the model's linears into FP8 ones, in place, and return the state that they share.

    Every `nn.Linear` and every `Conv1D` of transformers is converted. Each stays the same object
    with the same parameters, so an optimizer, DDP and `state_dict()` see no difference. Nothing is
    changed unless every check passes.

    Args:
        model: Any PyTorch model; a lone `nn.Linear` too.
        recipe: A recipe's name, with the settings of `recipe_named`, a subclass of `Recipe`, or an
            `Fp8Recipe`, whose `modules` rules give single linears another recipe or
            `high_precision`. A name of a file or module is imported.
        skip: What stays as it is: names or patterns (`*`, `?`, `[...]`) of linears or of modules
            around them, or a function of (name, module) that returns True for those.
        amax_group: The ranks over which delayed scaling takes the maximum of each amax, so that
            replicas share their scales. None keeps each rank's own.

    Raises:
        Fp8Error: Something cannot be converted as asked. The message names the module or option.
    """
    chosen = checked_recipe(recipe)
    linears = _linears(model)
    to_convert = _without_skipped(linears, skip)
    _check_rules(chosen, to_convert)
    precisions = {name: chosen.precision_of(name) for name in to_convert}
    to_convert = {
        name: to_convert[name] for name in to_convert if precisions[name] != HIGH_PRECISION
    }
    if not to_convert:
        raise Fp8Error(
            "model", "every linear stays in high precision", "Skip fewer of them, or drop FP8"
        )
    multiples = _check_modules(model, to_convert, precisions, chosen)
    is_delayed = {name: find_recipe(precisions[name]).traits.has_history for name in to_convert}
    _check_group(amax_group, chosen, reduces=any(is_delayed.values()) and chosen.reduce_amax)
    reduce = None if amax_group is None else _maximum_over(amax_group)
    shared = Shared(ScalingState(chosen, reduce))
    bounds = {}
    for name, module in to_convert.items():
        quantizer = linear_quantizer(shared.scaling, name)
        assert quantizer is not None
        bounds[name] = Bound(
            name,
            quantizer,
            FreshFp8(quantizer),
            shared,
            is_delayed[name],
            _is_conv1d(module),
            multiples[name],
        )
    weights = {name: module.get_parameter("weight") for name, module in to_convert.items()}
    if all(weight.device.type != "meta" for weight in weights.values()):
        shared.follow(weights)
    # Nothing below refuses anything.
    own = [name for name, module in linears.items() if not isinstance(module, Converted)]
    coverage = coverage_of(model, own, to_convert)
    for name, module in to_convert.items():
        _bind(module, bounds[name])
    if coverage.left_out:
        warnings.warn(
            f"fp8.convert leaves in high precision {coverage.left_out}. It converts nn.Linear and "
            "the Conv1D of transformers",
            stacklevel=2,
        )
    if coverage.output_layers:
        layers = ", ".join(coverage.output_layers)
        _LOGGER.warning(
            f"fp8.convert: {layers}, the output layer, is converted too, which the sources of "
            f"recipes keep in high precision; skip={list(coverage.output_layers)} leaves it out"
        )
    return Fp8State(shared, coverage)


def _check_group(group: object, recipe: Fp8Recipe, *, reduces: bool) -> None:
    """Raise `Fp8Error` for a group over which no amax would be reduced."""
    if group is None:
        return
    if not reduces:
        raise Fp8Error(
            "amax_group",
            f"recipe {recipe.name} with reduce_amax={recipe.reduce_amax} reduces no amaxes",
            "Leave it out, or use recipe='delayed' with reduce_amax=True",
        )
    if not isinstance(group, dist.ProcessGroup):
        raise Fp8Error(
            "amax_group",
            f"{group!r} is no process group that this rank is a member of",
            "Give each rank a group that it belongs to, or leave it out",
        )


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether the module is transformers' Conv1D, a linear that keeps [I, O] weights."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    """Return every linear by its first name, converted ones and subclasses included."""
    if not isinstance(model, nn.Module):
        raise Fp8Error("model", f"is a {type(model).__name__}", "Give a torch.nn.Module")
    linears = {
        name or "linear": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Converted) or _is_conv1d(module)
    }
    if not linears:
        raise Fp8Error(
            "model",
            f"{type(model).__name__} has neither an nn.Linear nor a transformers Conv1D",
            "Convert a model whose products are such modules",
        )
    return linears


def _without_skipped(linears: dict[str, nn.Module], skip: Skip) -> dict[str, nn.Module]:
    """Return the linears that are not skipped; raise `Fp8Error` for a pattern without effect."""
    remaining = dict(linears)
    if callable(skip):
        remaining = {name: module for name, module in linears.items() if not skip(name, module)}
        skip = ()
    patterns = [skip] if isinstance(skip, str) or not isinstance(skip, Iterable) else list(skip)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise Fp8Error(
            f"skip={skip!r}", "is neither names nor a function", "Use skip='lm_head' or a list"
        )
    for pattern in patterns:
        matched = [name for name in linears if _matches(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, linears, n=1)
            raise Fp8Error(
                f"skip={pattern!r}",
                "matches no linear",
                f"Did you mean {close[0]!r}?" if close else f"The first is named {min(linears)!r}",
            )
        for name in matched:
            remaining.pop(name, None)
    if not remaining:
        raise Fp8Error("skip", "leaves no linear to convert", "Skip fewer of them")
    return remaining


def _matches(name: str, pattern: str) -> bool:
    """Return whether `pattern` fits the name of a linear, or of a module around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _check_rules(recipe: Fp8Recipe, linears: dict[str, nn.Module]) -> None:
    """Raise `Fp8Error` for a rule whose pattern matches no linear."""
    for rule in recipe.modules:
        if not any(rule.matches(name) for name in linears):
            raise Fp8Error(
                f"recipe.modules pattern {rule.pattern!r}",
                "matches no linear",
                f"The first is named {min(linears)!r}",
            )


def _check_modules(
    model: nn.Module,
    linears: dict[str, nn.Module],
    precisions: dict[str, ModulePrecision],
    recipe: Fp8Recipe,
) -> dict[str, int]:
    """Return the number that the sizes of each linear are multiples of.

    Raises:
        Fp8Error: A linear cannot be converted. The message names the first one, and the hint is
            about all that have the same fault.
    """
    uses: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)].append(name)
    for name, module in linears.items():
        if isinstance(module, Converted):
            hint = f"Convert a model once, or use skip={name!r}"
            raise Fp8Error(name, "is converted to FP8 already", hint)
        if (fault := _fault_of(module)) is not None:
            alike = [
                n for n in linears if (other := _fault_of(linears[n])) and other[1] == fault[1]
            ]
            skip = f"se skip={_skip_of(alike, linears)!r}"
            hint = f"{fault[1]}, or u{skip}" if fault[1] else f"U{skip}"
            hint = fault[1] if fault[1] and len(alike) == len(linears) else hint
            raise Fp8Error(name, fault[0], hint)
        weight = module.get_parameter("weight")
        if len(uses[id(weight)]) > 1:
            names = ", ".join(uses[id(weight)])
            raise Fp8Error(
                name, f"its weight is shared, as {names}", f"Untie it, or use skip={name!r}"
            )
    multiples = _check_sizes(linears, precisions, recipe)
    if torch.backends.mha.get_fastpath_enabled():
        for name, module in model.named_modules():
            if isinstance(module, nn.TransformerEncoderLayer) and any(
                linear.startswith(f"{name}." if name else "") for linear in linears
            ):
                raise Fp8Error(
                    name or "model",
                    "evaluation of an nn.TransformerEncoderLayer bypasses its linears",
                    "Call torch.backends.mha.set_fastpath_enabled(False) before",
                )
    return multiples


def _fault_of(module: nn.Module) -> tuple[str, str] | None:
    """Return why a linear cannot be converted by itself: it computes otherwise, or has no weight.

    The second text says what else can be done than to skip the linear, if anything.
    """
    kind = type(module)
    if _is_foreign(module):
        reason = f"is a {kind.__name__}, a subclass of nn.Linear that may compute otherwise"
        return reason, ""
    if "forward" in vars(module):
        reason = "its forward is replaced by an attribute of the instance, so FP8 would never run"
        return reason, "Convert before it is replaced (by hooks of accelerate, or a tracer)"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        reason = f"its weight is no parameter but a {type(weight).__name__}"
        if not any(name.startswith("weight_") for name, _ in module.named_parameters()):
            return reason, "Make it an nn.Parameter"
        reason += " that is computed from others (by pruning, weight_norm or spectral_norm)"
        return reason, "Undo that before (prune.remove, remove_weight_norm …) and redo it after"
    if is_foreign_tensor(weight):
        reason = f"its weight is a {type(weight).__name__}, which has no numbers to cast"
        return reason, "Convert before the weights are replaced"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}", "Use FP32, BF16 or FP16"
    return None


def _is_foreign(module: nn.Module) -> bool:
    """Return whether the module is of a subclass of nn.Linear that may compute otherwise."""
    is_known = type(module) is nn.Linear or isinstance(module, Converted)
    return not is_known and not _is_conv1d(module)


def _skip_of(chosen: Sequence[str], linears: dict[str, nn.Module]) -> str | list[str]:
    """Return the value of `skip` that leaves out the chosen linears, and nothing else."""
    found: dict[str, None] = {}
    for name in chosen:
        parts = name.split(".")
        if type(linears[name]).__name__ == "NonDynamicallyQuantizableLinear" and len(parts) > 1:
            parts = parts[:-1]  # nn.MultiheadAttention, which has no other linear
        pattern = f"*.{parts[-1]}"
        matched = [other for other in linears if _matches(other, pattern)]
        is_exact = name in matched and set(matched) <= set(chosen)
        found[pattern if is_exact and len(matched) > 1 else ".".join(parts)] = None
    patterns = list(found)
    return patterns[0] if len(patterns) == 1 else patterns


def _check_sizes(
    linears: dict[str, nn.Module], precisions: dict[str, ModulePrecision], recipe: Fp8Recipe
) -> dict[str, int]:
    """Return the number that the sizes of each linear are multiples of, or raise `Fp8Error`.

    The error names the first linear of an unfit size, and its hint is about all of them.
    """
    multiples: dict[str, int] = {}
    for name in linears:
        traits = find_recipe(precisions[name]).traits
        if not traits.pads and recipe.pad_inner_dim:
            raise Fp8Error(
                "recipe.pad_inner_dim=True",
                f"{precisions[name]} scales need whole blocks of {traits.multiple}",
                "Leave it out, or use another recipe",
            )
        multiples[name] = 1 if recipe.pad_inner_dim else traits.multiple
    sizes = {
        name: tuple(cast(torch.Tensor, module.weight).shape) for name, module in linears.items()
    }
    unfit = [n for n in linears if any(size == 0 or size % multiples[n] for size in sizes[n])]
    if not unfit:
        return multiples
    name, others = unfit[0], len(unfit) - 1
    more = f"; the sizes of {others} more do not fit" if others else ""
    skip = "" if len(unfit) == len(linears) else f"skip={_skip_of(unfit, linears)!r}, "
    pads = all(find_recipe(precisions[n]).traits.pads for n in unfit)
    raise Fp8Error(
        name,
        f"its weight is {' x '.join(map(str, sizes[name]))}, and {precisions[name]} takes "
        f"multiples of {multiples[name]}{more}",
        f"Use {skip}{'Fp8Recipe(pad_inner_dim=True)' if pads else 'another recipe'}, or other "
        "sizes",
    )


def _bind(module: nn.Module, bound: Bound) -> None:
    """Turn one module into a converted one."""
    module.__class__ = converted_class(type(module))
    assert isinstance(module, Converted)
    module.fp8 = bound
    module.register_load_state_dict_post_hook(after_load)  # type: ignore[no-untyped-call]
    bound.shared.linears[bound.name] = module


def _maximum_over(group: dist.ProcessGroup) -> StartReduceMax:
    """Return what starts a maximum over the ranks of a group, in place."""

    def start(amaxes: torch.Tensor) -> Pending:
        work = dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None, "a member's reduction returns its work"
        return Pending(amaxes, (work,))

    return start
