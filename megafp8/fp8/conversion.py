"""Turn the linears of a model into FP8 ones, in place, after everything has been checked."""

from __future__ import annotations

import difflib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as _OfAttention
from torch.nn.parameter import is_lazy

from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.census import (
    MOST_NAMES,
    Census,
    Weight,
    by_pattern,
    census_of,
    matches,
    names,
    other_weights,
    patterns_of,
    routers_beside,
)
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
from megafp8.fp8.experts import (
    ExpertLinear,
    Linears,
    bind_experts,
    has_fused_experts,
    linears_of,
    named,
    why_refused,
)
from megafp8.fp8.recipe_settings import checked_recipe, recipe_named
from megafp8.fp8.rows import why_rows_differ
from megafp8.fp8.scaling import Pending, ScalingState, StartReduceMax
from megafp8.fp8.state import Fp8State
from megafp8.fp8.weights import FreshFp8
from megafp8.specs.precision import Fp8Recipe, ModulePrecision, RecipeName
from megafp8.specs.recipe import Recipe
from megafp8.specs.recipes import DEFAULT_RECIPE, HIGH_PRECISION, find_recipe

_LOGGER = logging.getLogger(__name__)
Skip = str | Iterable[str] | Callable[[str, nn.Module], bool]
Fault = tuple[str, str]
"""Why a linear cannot be converted, and what else can be done than to skip it; or an empty text."""


@torch.inference_mode(False)  # the scales and counts that it makes are written later
def convert(
    model: nn.Module,
    recipe: RecipeName | Fp8Recipe | type[Recipe] = DEFAULT_RECIPE,
    *,
    skip: Skip = (),
    amax_group: dist.ProcessGroup | None = None,
) -> Fp8State:
    """Turn the model's linears into FP8 ones, in place, and return the state that they share.

    Every `nn.Linear` and every `Conv1D` of transformers is converted, and each expert's part of
    the fused parameters of transformers' experts, whose routers stay. Each stays the same object
    with the same parameters, so an optimizer, DDP and `state_dict()` see no difference. Nothing is
    changed unless every check passes.

    Args:
        model: Any PyTorch model; a lone `nn.Linear` too.
        recipe: A recipe's name, with the settings of `recipe_named`, a subclass of `Recipe`, or an
            `Fp8Recipe`, whose `modules` rules give single linears another recipe or
            `high_precision`. A name of a file or module is imported.
        skip: What stays as it is: names or patterns (`*`, `?`, `[...]`) of linears, of other
            weights or of modules around them, or a function of (name, module) that returns True
            for those. Every weight but embeddings and those routers is converted or skipped.
        amax_group: The ranks over which delayed scaling takes the maximum of each amax, so that
            replicas share their scales. These ranks call `convert` together. None keeps each
            rank's own.

    Raises:
        Fp8Error: Something cannot be converted as asked, or a weight of two or more dims is
            neither converted nor skipped. The message names the module or option, and has a `skip`
            with which the call works.
    """
    chosen = checked_recipe(recipe)
    linears, experts, refused = _linears(model)
    others = routers_beside(other_weights(model, map(_parameter_of, linears.values())), experts)
    skipped = _skipped(model, linears, experts, others, skip)
    to_convert = {name: module for name, module in linears.items() if name not in skipped}
    if not to_convert:
        raise Fp8Error("skip", "leaves no linear to convert", "Skip fewer of them")
    _check_rules(chosen, to_convert)
    precisions = {name: chosen.precision_of(name) for name in to_convert}
    to_convert = {
        name: to_convert[name] for name in to_convert if precisions[name] != HIGH_PRECISION
    }
    if not to_convert:
        raise Fp8Error(
            "model", "every linear stays in high precision", "Skip fewer of them, or drop FP8"
        )
    largest_first = sorted(others.items(), key=lambda item: -item[1].size)
    uncovered = {n: w for n, w in largest_first if n not in skipped and not w.stays}
    faults, multiples = _faults(model, to_convert, precisions, chosen)
    if faults or uncovered:
        suggest = partial(_suggested, [*faults, *uncovered], linears, others, skipped, skip)
        if faults:
            raise _error_of(faults, suggest)
        raise _uncovered(model, uncovered, refused, suggest)
    _check_fast_path(model, to_convert)
    is_delayed = {name: find_recipe(precisions[name]).traits.has_history for name in to_convert}
    _check_group(amax_group, chosen, reduces=any(is_delayed.values()) and chosen.reduce_amax)
    reduce = None if amax_group is None else _maximum_over(amax_group)
    shared = Shared(ScalingState(chosen, reduce))
    shared.scaling.marks_infinities = True
    own = {name: module for name, module in linears.items() if not isinstance(module, Converted)}
    census = census_of(model, own, others, to_convert, [] if callable(skip) else _patterns(skip))
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
            is_transposed=_is_conv1d(module),
            multiple=multiples[name],
            is_head=name in census.converted_outputs,
        )
    weights = {name: _parameter_of(module) for name, module in to_convert.items()}
    if all(weight.device.type != "meta" for weight in weights.values()):
        shared.follow(weights)
    if amax_group is not None and (reason := why_rows_differ(shared.scaling, amax_group)):
        hint = "Convert the same linears with the same recipe on all ranks of the group"
        raise Fp8Error("amax_group", f"would mix the amaxes of different tensors: {reason}", hint)
    for name, module in to_convert.items():  # nothing from here on refuses anything
        _bind(module, bounds[name])
    for module, linears_of_experts in experts.values():
        if any(isinstance(linear, Converted) for linear in chain(*linears_of_experts)):
            bind_experts(module, linears_of_experts)
    _say_what_is_unusual(census, lambda found: _patterns_of(found, linears, others, skipped))
    return Fp8State(shared, census, model)


def _say_what_is_unusual(census: Census, skip_of: Callable[[Sequence[str]], list[str]]) -> None:
    """Log which converted linears the sources of the recipes keep in high precision."""
    for kind, found in (
        ("the output layer", census.converted_outputs),
        ("by its name a router or gate", census.routers),
    ):
        if found:
            skip = [*census.skip, *skip_of(found)]
            _LOGGER.warning(
                f"fp8.convert: {names(found)}, {kind}, is converted too, which the sources of "
                f"recipes keep in high precision; skip={skip} leaves it out"
            )


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


Experts = dict[str, tuple[nn.Module, Linears]]
"""Modules of fused experts by name, and the linears of each of their experts."""


def _linears(model: nn.Module) -> tuple[dict[str, nn.Module], Experts, dict[str, str]]:
    """Return every linear, the experts that have some of them, and why other experts have none.

    All are by their first names; converted ones and subclasses are included.
    """
    if not isinstance(model, nn.Module):
        raise Fp8Error("model", f"is a {type(model).__name__}", "Give a torch.nn.Module")
    linears: dict[str, nn.Module] = {}
    experts: Experts = {}
    refused = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Converted) or _is_conv1d(module):
            linears[name or "linear"] = module
        elif has_fused_experts(module):
            if (reason := why_refused(module)) is not None:
                refused[name] = reason
                continue
            experts[name] = module, linears_of(module)
            linears |= named(name, experts[name][1])
    if not linears:
        experts_too = "".join(f", and {_refusal(*each)}" for each in [*refused.items()][:1])
        raise Fp8Error(
            "model",
            f"{type(model).__name__} has neither an nn.Linear nor a transformers Conv1D"
            f"{experts_too}",
            "Convert a model whose products are such modules",
        )
    return linears, experts, refused


def _parameter_of(module: nn.Module) -> torch.Tensor:
    """Return the tensor of a linear's weight; the parameter of all experts for an expert's."""
    weight = module.whole if isinstance(module, ExpertLinear) else getattr(module, "weight", None)
    return cast(torch.Tensor, weight)


def _skipped(
    model: nn.Module,
    linears: dict[str, nn.Module],
    experts: Experts,
    others: dict[str, Weight],
    skip: Skip,
) -> set[str]:
    """Return the linears and other weights that are skipped.

    A function is asked about experts by the module that holds all of them.

    Raises:
        Fp8Error: A pattern has no effect.
    """
    if callable(skip):
        asked = {n: x for n, x in linears.items() if not isinstance(x, ExpertLinear)}
        chosen = {name for name, module in asked.items() if skip(name, module)}
        for name, (module, of_experts) in experts.items():
            chosen |= named(name, of_experts).keys() if skip(name, module) else set()
        for name, weight in others.items():
            owner = name.rpartition(".")[0]
            is_inside = any(matches(name, linear) for linear in chosen)
            if not weight.is_embedding and (is_inside or skip(owner, model.get_submodule(owner))):
                chosen.add(name)
        return chosen
    patterns = _patterns(skip)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise Fp8Error(
            f"skip={skip!r}", "is neither names nor a function", "Use skip='lm_head' or a list"
        )
    chosen = set()
    for pattern in patterns:
        matched = {name for name in linears if matches(name, pattern)}
        matched |= {n for n, w in others.items() if any(matches(each, pattern) for each in w.names)}
        if not matched:
            close = difflib.get_close_matches(pattern, [*linears, *others], n=1)
            raise Fp8Error(
                f"skip={pattern!r}",
                "matches no linear and no other weight",
                f"Did you mean {close[0]!r}?" if close else f"The last is named {[*linears][-1]!r}",
            )
        chosen |= matched
    return chosen


def _patterns(skip: str | Iterable[str]) -> list[str]:
    """Return the patterns that `skip` has; what is neither a text nor a list is one of them."""
    is_one = isinstance(skip, str) or not isinstance(skip, Iterable)
    return [cast(str, skip)] if is_one else list(skip)


def _check_rules(recipe: Fp8Recipe, linears: dict[str, nn.Module]) -> None:
    """Raise `Fp8Error` for a rule whose pattern matches no linear."""
    for rule in recipe.modules:
        if not any(rule.matches(name) for name in linears):
            raise Fp8Error(
                f"recipe.modules pattern {rule.pattern!r}",
                "matches no linear",
                f"The first is named {min(linears)!r}",
            )


def _faults(
    model: nn.Module,
    linears: dict[str, nn.Module],
    precisions: dict[str, ModulePrecision],
    recipe: Fp8Recipe,
) -> tuple[dict[str, Fault], dict[str, int]]:
    """Return why linears cannot be converted, and what the sizes of the others are multiples of."""
    uses: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)].append(name)
    faults = {}
    for name, module in linears.items():
        if (fault := _fault_of(module)) is not None:
            faults[name] = fault
        elif len(alike := uses[id(_parameter_of(module))]) > 1:
            remedy = "Untie it, or convert the model before another module wraps it"
            faults[name] = f"its weight is shared, as {', '.join(alike)}", remedy
    fit = {name: module for name, module in linears.items() if name not in faults}
    unfit, multiples = _unfit(fit, precisions, recipe)
    return faults | unfit, multiples


def _check_fast_path(model: nn.Module, linears: Iterable[str]) -> None:
    """Raise `Fp8Error` for a layer of torch whose evaluation bypasses a converted linear."""
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


def _fault_of(module: nn.Module) -> Fault | None:
    """Return why a linear by itself cannot be converted; None if it can."""
    if isinstance(module, Converted):
        return "is converted to FP8 already", "Convert a model once"
    kind = type(module)
    if isinstance(module, ExpertLinear):
        return _fault_of_weight(module.whole)
    if _is_foreign(module):
        reason = f"is a {kind.__name__}, a subclass of nn.Linear that may compute otherwise"
        return reason, ""
    if "forward" in vars(module):
        reason = "its forward is replaced by an attribute of the instance, so FP8 would never run"
        return reason, "Convert before it is replaced (by hooks of accelerate, or a tracer)"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        reason = f"its weight is no parameter but a {type(weight).__name__}"
        computed = ("weight_", "parametrizations.weight.")
        if not any(name.startswith(computed) for name, _ in module.named_parameters()):
            return reason, "Make it an nn.Parameter, or convert before FSDP shards the model"
        reason += " that is computed from others (by pruning, weight_norm or spectral_norm)"
        undo = "prune.remove, remove_weight_norm, remove_parametrizations …"
        return reason, f"Undo that before ({undo}) and redo it after"
    if not is_lazy(weight) and weight.dim() != 2:  # alike on all ranks, unlike the numbers
        reason = f"its weight has {weight.dim()} dims, as a part that FSDP or DeepSpeed has made"
        return reason, "Convert before the model is sharded, without deepspeed.zero.Init"
    return _fault_of_weight(weight)


def _fault_of_weight(weight: torch.Tensor) -> Fault | None:
    """Return why a weight cannot be cast; None if it can."""
    if is_foreign_tensor(weight):
        reason = f"its weight is a {type(weight).__name__}, which has no numbers to cast"
        return reason, "Convert before the weights are replaced"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}", "Use FP32, BF16 or FP16"
    return None


def _is_foreign(module: nn.Module) -> bool:
    """Return whether the module is of a subclass of nn.Linear that may compute otherwise."""
    if isinstance(module, Converted) or _is_conv1d(module):
        return False
    kind = type(module)
    is_called_as_linear = (kind.forward, kind.__call__) == (nn.Linear.forward, nn.Linear.__call__)
    # nn.MultiheadAttention multiplies by the weight of the second and never calls it.
    return not is_called_as_linear or isinstance(module, nn.LazyLinear | _OfAttention)


def _unfit(
    linears: dict[str, nn.Module], precisions: dict[str, ModulePrecision], recipe: Fp8Recipe
) -> tuple[dict[str, Fault], dict[str, int]]:
    """Return which linears have sizes that do not fit, and what the sizes are multiples of.

    Raises:
        Fp8Error: Sizes of this recipe are not padded, although the recipe's settings ask for it.
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
    sizes = {name: cast(torch.Tensor, module.weight).shape for name, module in linears.items()}
    unfit = [n for n in linears if any(size == 0 or size % multiples[n] for size in sizes[n])]
    more = f"; the sizes of {len(unfit) - 1} more do not fit" if len(unfit) > 1 else ""
    pads = all(find_recipe(precisions[n]).traits.pads for n in unfit)
    is_named = recipe == recipe_named(recipe.name)
    given = f"fp8.recipe_named({recipe.name!r})" if is_named else "recipe"
    padded = f"dataclasses.replace({given}, pad_inner_dim=True)"
    remedy = f"Use {padded if pads else 'another recipe'}, or other sizes"
    return {
        name: (
            f"its weight is {' x '.join(map(str, sizes[name]))}, and {precisions[name]} takes "
            f"multiples of {multiples[name]}{more}",
            remedy,
        )
        for name in unfit
    }, multiples


def _error_of(faults: dict[str, Fault], suggest: Callable[[], str]) -> Fp8Error:
    """Return the error that names the first fault; its hint has a `skip` for all of them."""
    name, (reason, remedy) = next(iter(faults.items()))
    skip = suggest()
    if skip and remedy.startswith("Use "):
        hint = f"Use {skip}, {remedy.removeprefix('Use ')}"
    elif skip:
        hint = f"{remedy}, or use {skip}" if remedy else f"Use {skip}"
    else:
        hint = remedy or "The model has no other linear to convert"
    return Fp8Error(name, reason, hint)


def _uncovered(
    model: nn.Module,
    weights: dict[str, Weight],
    refused: dict[str, str],
    suggest: Callable[[], str],
) -> Fp8Error:
    """Return the error that names the weights that are neither converted nor skipped.

    Experts among them have their reasons in `refused`.
    """
    total = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    listed = [
        f"{pattern} ({weights[alike[0]].shape}) with "
        f"{sum(weights[name].size for name in alike) / max(1, total):.1%}"
        for pattern, alike in by_pattern(weights).items()
    ]
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    of_experts = {n: refused[n] for n in refused if any(matches(each, n) for each in weights)}
    for pattern, alike in by_pattern(of_experts).items():
        more += f". And {_refusal(pattern, refused[alike[0]])}"
    lazy = any(not weight.size for weight in weights.values())
    return Fp8Error(
        next(iter(by_pattern(weights))),
        "would stay in high precision: fp8.convert converts nn.Linear, and Conv1D and fused "
        "experts of transformers. Neither converted nor skipped, with their shares of the model's "
        f"parameters, are {', '.join(listed[:MOST_NAMES])}{more}",
        f"{'Run the model once, so that lazy weights have sizes. ' if lazy else ''}To leave what "
        f"was named in high precision, use {suggest()}",
    )


def _refusal(name: str, reason: str) -> str:
    return f"the experts of {name or 'the model'} are not converted: {reason}"


def _suggested(
    chosen: Sequence[str],
    linears: dict[str, nn.Module],
    others: dict[str, Weight],
    skipped: set[str],
    skip: Skip,
) -> str:
    """Return a `skip` that also leaves out the chosen ones; empty if it would leave no linear."""
    if linears.keys() <= {*chosen, *skipped}:
        return ""
    found = _patterns_of(chosen, linears, others, skipped)
    if callable(skip):
        return f"a skip that also returns True for {', '.join(found)}"
    patterns = [*_patterns(skip), *found]
    return f"skip={patterns[0] if len(patterns) == 1 else patterns!r}"


def _patterns_of(
    chosen: Sequence[str],
    linears: dict[str, nn.Module],
    others: dict[str, Weight],
    skipped: set[str],
) -> list[str]:
    """Return patterns that match the chosen linears and weights, and none but skipped ones too.

    A weight that is no linear's, and the only linear of `nn.MultiheadAttention`, is named by the
    module around it.
    """
    units = [*linears, *(name for name, weight in others.items() if not weight.stays)]
    inner = {n for n, x in linears.items() if type(x).__name__ == "NonDynamicallyQuantizableLinear"}
    around = {name for name in chosen if name not in linears or name in inner}
    return patterns_of(chosen, units, {*chosen, *skipped}, around)


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
