"""Predict how long the runs of a comparison would take on GPUs, by the model of `megafp8 plan`."""

from __future__ import annotations

from megafp8.cli.compare_settings import Comparison, ComparisonBase, Configuration
from megafp8.cli.plan import make_plan, spec_of
from megafp8.cli.plan_text import UNCERTAINTY, Plan, format_seconds
from megafp8.config.precision_changes import SCHEDULE
from megafp8.errors import UserError
from megafp8.plan.hardware import Hardware
from megafp8.plan.phases import specs_of_phases

PREDICTED = "predicted time"


def predicted_times(
    compared: Comparison, source: ComparisonBase, hardware: Hardware, *, is_asked: bool
) -> dict[str, str]:
    """Return the predicted time of each configuration beside the baseline's, by its label.

    Without `is_asked` it is that of configurations whose schedule of precision is not the
    baseline's, and of no others.
    """
    had = compared.base.values[SCHEDULE]
    asked = [other for other in compared.others if is_asked or other.values[SCHEDULE] != had]
    if not asked:
        return {}
    try:
        base = _planned(compared.base, source, hardware)
        others = {other.label: _planned(other, source, hardware) for other in asked}
    except UserError as error:  # such as what needs a GPU of another kind
        return dict.fromkeys((other.label for other in asked), f"not known: {error}")
    return {label: _beside(base, other) for label, other in others.items()}


def _planned(
    configuration: Configuration, source: ComparisonBase, hardware: Hardware
) -> tuple[Plan, str | None]:
    """Return the plan of a configuration, and why its time is not predicted, if it is not."""
    spec = spec_of((*source.options, *configuration.overrides), None).spec
    plans = (make_plan(phase, hardware) for phase in specs_of_phases(spec))
    reasons = (_unpredicted(plan) for plan in plans)
    return make_plan(spec, hardware), next((reason for reason in reasons if reason), None)


def _unpredicted(plan: Plan) -> str | None:
    recipe = plan.spec.precision.fp8
    if recipe is None or recipe.is_unused or plan.unpredicted is None:
        return None
    return ": ".join(plan.unpredicted)


def _beside(base: tuple[Plan, str | None], other: tuple[Plan, str | None]) -> str:
    (of_base, why_base), (of_other, why_other) = base, other
    if why := why_other or why_base:
        return f"none ({why.replace('the figures above', 'the figures of the plan')})"
    old, new = (_seconds(plan) for plan in (of_base, of_other))
    return (
        f"{new / old:.2f} of the baseline's ({format_seconds(new)} and {format_seconds(old)} on "
        f"{of_other.hardware.name}; published ratios are within {UNCERTAINTY:g} times of such)"
    )


def _seconds(plan: Plan) -> float:
    return plan.seconds_of(plan.tokens_of_job)
