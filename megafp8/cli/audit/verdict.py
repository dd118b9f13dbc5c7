"""Compare the runs with and without a flag, and say what the flag does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megafp8.cli.audit.reads import Reading
from megafp8.cli.audit.request import Flag, Request

REACHES, REFUSED, NONE, OPEN = "reaches TE", "refused", "no effect", "not decided"
SWITCHES = ("fp8", "fp4", "mixed_precision")
"""The names of flags that switch low precision on."""
BASE, AGAIN = "all flags", "all flags again"


@dataclass(frozen=True)
class FlagVerdict:
    """Hold the answer for one flag, where the framework reads it, and what was seen."""

    flag: Flag
    answer: str
    places: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Runs:
    """Hold the results of runs by name and layout: a list of the records of both ranks."""

    found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]

    def of(self, name: str, layout: str) -> Sequence[Mapping[str, Any]]:
        """Return the records of a run's ranks."""
        return self.found.get((name, layout), ({"failed": "it was not run"},))

    def problem(self, name: str, layout: str) -> tuple[str, str]:
        """Return what stopped a run (refused, lacks, failed) and its text; empty if nothing did."""
        records = self.of(name, layout)
        for kind in ("refused", "lacks", "failed"):
            for record in records:
                if kind in record:
                    said = record[kind]
                    if isinstance(said, Mapping):
                        said = f"{said['reason']} ({said['where']})"
                    return kind, str(said)
        return ("", "") if all(r.get("is_whole") for r in records) else ("failed", "it stopped")


def refusing(request: Request, runs: Runs) -> list[Flag]:
    """Return the flags without which a job is not refused, if it is refused with all of them.

    The flag that switches FP8 on is not among them: nothing could be said of the others without it.
    """
    layouts = [x for x in request.layouts if runs.problem(BASE, x)[0] == "refused"]
    if not layouts:
        return []
    return unrecognized(request, runs)[:1] or [
        flag
        for flag in request.flags
        if flag.name not in SWITCHES
        and all(runs.problem(flag.shown, layout)[0] != "refused" for layout in layouts)
    ]


def unrecognized(request: Request, runs: Runs) -> list[Flag]:
    """Return the flags that the framework's parser does not know, by the run with all flags."""
    problems = (runs.problem(BASE, layout) for layout in request.layouts)
    said = next((text for kind, text in problems if kind == "refused"), "")
    named = said.partition("unrecognized arguments: ")[2].split()
    return [flag for flag in request.flags if flag.words[0] in named]


def is_steady(request: Request, runs: Runs) -> bool:
    """Whether two runs with the same flags are equal."""
    return not any(next(_differences(runs, AGAIN, layout), "") for layout in request.layouts)


def pairs(flags: Sequence[Flag], request: Request, runs: Runs) -> Iterator[tuple[Flag, Flag]]:
    """Yield flags without which the job is refused, each with another one that is not needed.

    The other one may be what the refusal is about: then the first can be left out beside it.
    """
    kinds = {f: {runs.problem(f.shown, layout)[0] for layout in request.layouts} for f in flags}
    for flag in flags:
        if "refused" in kinds[flag]:
            yield from ((flag, other) for other in flags if kinds[other] == {""})


def both(flag: Flag, other: Flag) -> str:
    """Return the name of the run without two flags."""
    return f"{flag.shown} and {other.shown}"


def _beside(flag: Flag, request: Request, runs: Runs) -> str:
    """Return what differs without a flag where another one is left out, too; or nothing."""
    steady = is_steady(request, runs)
    for other in request.flags:
        for layout in request.layouts:
            name = both(flag, other)
            if (name, layout) in runs.found:
                differences = _differences(runs, name, layout, with_step=steady, base=other.shown)
                if seen := next(differences, ""):
                    return f"{seen} (both without {other.shown}, with which it is needed)"
    return ""


def decide(flag: Flag, request: Request, runs: Runs, readings: Sequence[Reading]) -> FlagVerdict:
    """Return what one flag does.

    Args:
        flag: The flag.
        request: What is audited.
        runs: The runs with all flags, twice, and without each.
        readings: The lines of the framework's code that read the flag.
    """
    places = _places(flag, request, runs, readings)
    answer, why = _answer(flag, request, runs, readings, places)
    return FlagVerdict(flag, answer, places, why)


def _places(
    flag: Flag, request: Request, runs: Runs, readings: Sequence[Reading]
) -> tuple[str, ...]:
    """Return the lines that read a flag; first those that a run has reached."""
    reached: list[str] = []
    for layout in request.layouts:
        for record in (*runs.of(BASE, layout), *runs.of(flag.shown, layout)):
            for place in record.get("reads", {}).get(flag.name, ()):
                reached += [place] if place not in reached else []
    reached.sort(key=lambda place: "_config.py" in place)  # a check of its value comes last
    others = [reading.place for reading in readings if reading.place not in reached]
    others.sort(key=lambda place: "fp8_utils.py" not in place)  # where the recipes are made
    return (*reached, *others)


def _answer(
    flag: Flag, request: Request, runs: Runs, readings: Sequence[Reading], places: Sequence[str]
) -> tuple[str, str]:
    if flag.why_not:
        return OPEN, flag.why_not
    if "moe" in flag.name:
        return OPEN, "it is about experts, which the small model does not have"
    unclear = ""
    for layout in request.layouts:
        agree = not next(_differences(runs, AGAIN, layout), "")
        seen = next(_differences(runs, flag.shown, layout, with_step=agree), "")
        if seen:
            return REACHES, seen
        with_, without = runs.problem(BASE, layout), runs.problem(flag.shown, layout)
        if with_[0] == "refused" and flag.name in SWITCHES and not without[0]:
            return REFUSED, with_[1]
        if with_[0]:
            unclear = unclear or f"the job itself {_told(with_)}"
        elif without[0]:
            unclear = unclear or f"without it the job {_told(without)}"
        elif not agree:
            unclear = unclear or "two runs with the same flags differ"
    if seen := _beside(flag, request, runs):
        return REACHES, seen
    if unclear:
        return OPEN, unclear
    lost = _lost(flag, runs.of(BASE, request.layouts[0])[0])
    is_default = _is_default(flag, request, runs)
    return _without_effect(request, readings, places, is_default, lost)


def _lost(flag: Flag, record: Mapping[str, Any]) -> str:
    """Return that the recipe has another value than the framework's own settings, or nothing."""
    wanted = (record.get("settings") or {}).get(flag.name)
    recipe = record.get("recipe") or {}
    while isinstance(recipe, list) and recipe:  # the arguments of a region
        recipe = recipe[-1]
    recipe = recipe.get("fp8_recipe", recipe) if isinstance(recipe, Mapping) else {}
    name = flag.name if flag.name in recipe else flag.name.removeprefix("fp8_")
    if wanted is None or name not in recipe or str(recipe[name]).endswith(str(wanted)):
        return ""
    return f", whose recipe has {name} {recipe[name]} and not {wanted}"


def _is_default(flag: Flag, request: Request, runs: Runs) -> bool:
    """Whether the framework's configuration has the same value without a flag."""
    settings = [
        runs.of(name, request.layouts[0])[0].get("settings") or {} for name in (BASE, flag.shown)
    ]
    return all(flag.name in one for one in settings) and (
        settings[0][flag.name] == settings[1][flag.name]
    )


def _without_effect(
    request: Request, readings: Sequence[Reading], places: Sequence[str], is_default: bool,
    lost: str,
) -> tuple[str, str]:  # fmt: skip
    """Return that a flag has no effect, unless something that was not run may read it."""
    said = "recipe and training step are the same without it"
    if is_default:
        return NONE, f"their configuration has the same value without it, and {said}{lost}"
    for reading in readings:
        unknown = [name for name in reading.variables if name not in request.environment]
        if unknown:
            return OPEN, (
                f"{', '.join(unknown)} of the environment decides about it ({reading.place}); give "
                f"its value with --env {unknown[0]}=VALUE"
            )
    for feature, part in request.features.items():
        near = next((place for place in places if part in place), "")
        if near:
            return OPEN, f"{feature} is not in the small model, and may read it ({near})"
    return NONE, f"{said if places else f'their code never reads it; {said}'}{lost}"


def _told(problem: tuple[str, str]) -> str:
    verb = {"refused": "is refused", "lacks": "cannot run on a CPU", "failed": "failed"}
    return f"{verb[problem[0]]}: {problem[1]}"


def _differences(
    runs: Runs, name: str, layout: str, *, with_step: bool = True, base: str = BASE
) -> Iterator[str]:
    """Yield what differs between a run and the one with all flags; recipes come first.

    The step says nothing about a flag where two runs with the same flags do not agree on it.
    """
    for with_, without in zip(runs.of(base, layout), runs.of(name, layout), strict=False):
        if "recipe" in with_ and "recipe" in without and with_["recipe"] != without["recipe"]:
            yield f"the recipe: {_first(with_['recipe'], without['recipe'])}"
        if not (with_.get("is_whole") and without.get("is_whole")):
            continue
        if with_["regions"] != without["regions"]:
            yield f"regions of FP8: {_first(with_['regions'], without['regions'])}"
        if with_step and with_["step"] != without["step"]:
            yield f"the step ({layout}): {_first(with_['step'], without['step'])}"


def _first(with_: Any, without: Any, path: str = "") -> str:
    """Return the first place in which two records differ, with both values."""
    if isinstance(with_, Mapping) and isinstance(without, Mapping):
        keys = [k for k in (*with_, *(k for k in without if k not in with_))
                if with_.get(k) != without.get(k)]  # fmt: skip
        if keys:
            inner = path if keys[0] in ("fp8_recipe", "recipe") else f"{path} {keys[0]}".strip()
            return _first(with_.get(keys[0]), without.get(keys[0]), inner)
    if isinstance(with_, list) and isinstance(without, list):
        if len(with_) != len(without):
            return f"{path} {len(with_)}, without it {len(without)}".strip()
        for one, other in zip(with_, without, strict=True):
            if one != other:
                return _first(one, other, path)
    return f"{path} {_short(with_)}, without it {_short(without)}".strip()


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("class", "a group of settings"))
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
