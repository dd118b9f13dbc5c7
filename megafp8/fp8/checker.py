"""Try to refute the traits of a recipe, by what its quantizers do with small matrices.

A trait that is not refuted is not proved: the matrices are a choice. They spread over more than
2^12 within a block, and have zeros, NaN, infinities, odd and empty shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from megafp8.errors import UserError
from megafp8.fp8 import refute
from megafp8.fp8.probe import Probe
from megafp8.fp8.recipe_settings import checked_recipe
from megafp8.fp8.rule import RuleError
from megafp8.specs.precision import Fp8Recipe
from megafp8.specs.recipe import Recipe
from megafp8.specs.recipes import find_recipe, is_interrupt, label_of, raised
from megafp8.specs.traits import ROLES, Casts, Traits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MESSAGES = "no undeclared message"


COLLECTIVES = tuple(
    name
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
        *("all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"),
        *("broadcast_object_list", "gather", "gather_object", "irecv", "isend", "recv", "reduce"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
    )
    if hasattr(dist, name)
)
ANSWERS = {"is_available": True, "is_initialized": True, "get_rank": 0, "get_world_size": 2}
"""What a rule finds if it asks whether there are other ranks."""


class Refutation(NamedTuple):
    """Say which trait of a recipe is refuted, for which tensor, and by what."""

    trait: str
    where: str
    reason: str


@dataclass(frozen=True)
class CheckReport:
    """Hold what the check of a recipe found; `print` shows it.

    Attributes:
        recipe: The recipe's name.
        refutations: The traits that are refuted, with the first tensor that refutes each.
        held: What was tried to refute without success.
        not_declared: The traits that the recipe does not declare, which were not tried.
        not_tried: The claims that could not be tried, because a refuted one ended the rule.
    """

    recipe: str
    refutations: tuple[Refutation, ...]
    held: tuple[str, ...]
    not_declared: tuple[str, ...]
    not_tried: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was refuted."""
        return not self.refutations

    def __str__(self) -> str:
        """Return the findings as lines of text."""
        count = len({one.trait for one in self.refutations})
        verb = "is" if count == 1 else "are"
        total = "nothing is refuted" if self.ok else f"{count} of its claims {verb} refuted"
        lines = [f"{self.recipe}: {total}"]
        lines += [f"  refuted: {one.trait} ({one.where}): {one.reason}" for one in self.refutations]
        lines += [f"  held: {', '.join(self.held) or 'nothing'}"]
        if self.not_tried:
            lines.append(f"  not tried because of it: {', '.join(self.not_tried)}")
        if self.not_declared:
            lines.append(f"  not declared: {', '.join(self.not_declared)}")
        return "\n".join(lines)


class _Claim(NamedTuple):
    """Hold what can be refuted: its name, how, and whether a tensor's traits claim it."""

    name: str
    refuter: refute.Refuter
    is_claimed: Callable[[Traits, Casts, Fp8Recipe], bool] = lambda traits, casts, settings: True


CLAIMS = (
    _Claim("deterministic", refute.wrong_repeats),  # before a rule has seen extreme numbers
    _Claim("runs", refute.wrong_runs),
    _Claim("any memory layout", refute.wrong_layouts),
    _Claim("input unchanged", refute.wrong_inputs),
    _Claim("values close", refute.wrong_values),
    _Claim("max_saturated", refute.wrong_saturation, lambda t, c, s: not t.is_simulated),
    _Claim("zero stays zero", refute.wrong_zeros),
    _Claim("NaN visible", refute.lost_nans),
    _Claim("infinity visible", refute.lost_infinities),
    _Claim(
        "power_2",
        refute.wrong_scales,
        lambda t, c, s: not t.is_simulated and _has_power_2(t, s),
    ),
    _Claim("serves_both", refute.wrong_both, lambda t, c, s: c.serves_both),
    _Claim("commutes", refute.wrong_parts, lambda t, c, s: t.commutes),
    _Claim("agrees", refute.wrong_agreement, lambda t, c, s: t.agrees),
    _Claim("shares_weight", refute.wrong_shared_weights, lambda t, c, s: t.shares_weight),
    _Claim("is_random", refute.wrong_draws, lambda t, c, s: c.is_random),
    _Claim("rotation", refute.wrong_products, lambda t, c, s: c.rotation is not None),
    _Claim("is_simulated", refute.wrong_simulation, lambda t, c, s: t.is_simulated),
)


def _has_power_2(traits: Traits, settings: Fp8Recipe) -> bool:
    """Whether scales are powers of two, by the traits or by the setting that they leave open."""
    return settings.power_2_scale if traits.power_2_is_choice else traits.power_2_default


def check(recipe: str | type[Recipe]) -> CheckReport:
    """Try to refute each trait of a recipe: a class, or a name as `fp8.convert` takes it.

    A file or module that the name chooses is imported.

    Raises:
        Fp8Error: There is no such recipe, or its traits contradict each other.
    """
    settings = checked_recipe(recipe)
    probes = list(_probes(settings))
    with torch.no_grad(), _without_messages(settings.name) as messages:
        found = [_try(claim, probes) for claim in CLAIMS]
    # A rule that fails altogether says so once for a tensor, and not for each claim.
    refuted = list({one.reason: one for _, one, _ in found if one is not None}.values())
    refuted += [
        Refutation(MESSAGES, "any tensor", f"the rule calls torch.distributed.{name}")
        for name in dict.fromkeys(messages)
    ]
    names = {one.trait for one in refuted}
    held = [one.name for one in found if one.held and one.name not in names]
    return CheckReport(
        label_of(settings.name),
        tuple(refuted),
        (*held, *(() if messages else (MESSAGES,))),
        tuple(one.name for one in found if one.refutation is None and not one.held),
        tuple(one.name for one in found if one.refutation is not None and one.name not in names),
    )


def _probes(settings: Fp8Recipe) -> Iterator[Probe]:
    """Yield a probe for each tensor, dtype, and choice that settings have."""
    traits = find_recipe(settings.name).traits
    powers = (False, True) if traits.power_2_is_choice else (traits.power_2_default,)
    for power_2, role, dtype in product(powers, ROLES, DTYPES):
        formats = traits.backward_formats if role == "grad_output" else traits.backward_formats[:1]
        for fmt in formats:
            yield Probe(replace(settings, power_2_scale=power_2, backward_format=fmt), role, dtype)


class _Tried(NamedTuple):
    """Hold what became of a claim: it held, it is refuted, or no tensor makes it."""

    name: str
    refutation: Refutation | None
    held: bool


def _try(claim: _Claim, probes: list[Probe]) -> _Tried:
    """Look for the first tensor that refutes a claim; a rule can raise anything."""
    tried = [probe for probe in probes if _is_claimed(claim, probe)]
    for probe in tried:
        try:
            reason = next(claim.refuter(probe), None)
        except BaseException as error:
            if is_interrupt(error):
                raise
            text = (str(error) if isinstance(error, UserError) else raised(error)).split("\n")[0]
            trait = error.trait if isinstance(error, RuleError) else "runs"
            return _Tried(claim.name, Refutation(trait, probe.where, text), False)
        if reason is not None:
            return _Tried(claim.name, Refutation(claim.name, probe.where, reason), False)
    return _Tried(claim.name, None, bool(tried))


def _is_claimed(claim: _Claim, probe: Probe) -> bool:
    if claim.refuter is refute.wrong_shared_weights and probe.role != "weight":
        return False
    if claim.refuter is refute.wrong_draws and probe.dtype != torch.float32:
        return False  # many casts, which do not depend on the dtype
    return claim.is_claimed(probe.traits, probe.casts, probe.settings)


# --- messages between ranks -----------------------------------------------------------------------


@contextmanager
def _without_messages(name: str) -> Iterator[list[str]]:
    """Let a rule believe that there are two ranks; yield the names of the messages that it tries.

    No message is sent, and the rule continues with what this rank has. Names that the recipe's file
    has imported from torch.distributed are covered too.
    """
    tried: list[str] = []

    def note(message: str, *args: object, **more: object) -> object:
        tried.append(message)
        return None

    def answer(value: object, *args: object, **more: object) -> object:
        return value

    stands: dict[str, partial[object]] = {one: partial(note, one) for one in COLLECTIVES}
    stands |= {one: partial(answer, value) for one, value in ANSWERS.items() if hasattr(dist, one)}
    source = sys.modules.get(type(find_recipe(name)).__module__, dist)
    with ExitStack() as patches:
        for module, names in ((source, _imported(source, stands)), (dist, stands)):
            for one, stand in names.items():
                patches.enter_context(patch.object(module, one, stand))
        yield tried


def _imported(source: ModuleType, stands: dict[str, partial[object]]) -> dict[str, object]:
    """Return stand-ins for the functions of torch.distributed that a module has imported."""
    return {
        name: stand
        for name, value in vars(source).items()
        for known, stand in stands.items()
        if value is getattr(dist, known)
    }
