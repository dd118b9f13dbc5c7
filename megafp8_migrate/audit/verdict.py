"""Compare the runs with and without a flag, and say what the flag does.

Equal settings may train to other bytes, since a framework may sum in another order each time. So a
difference is an answer only between runs that were repeated and were equal on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megafp8_migrate.audit.reads import Reading
from megafp8_migrate.audit.request import Flag, Request

REACHES, REFUSED, NONE, OPEN = "reaches TE", "refused", "no effect", "not decided"
SWITCHES = ("fp8", "fp4", "mixed_precision")
"""The names of flags that switch low precision on."""
BASE = "all flags"
"""The name of the runs that leave nothing out."""
REPEATS = 3
"""How many runs must be equal before their difference from others is an answer."""
_PARTS = ("recipe", "regions", "step")
Ranks = Sequence[Mapping[str, Any]]
"""The records of the ranks of one run."""


@dataclass(frozen=True)
class FlagVerdict:
    """Hold the answer for one flag, where the framework reads it, and what was seen."""

    flag: Flag
    answer: str
    places: tuple[str, ...]
    why: str


@dataclass
class Runs:
    """Hold the results of runs by name and layout, in a list of those that were repeated."""

    found: dict[tuple[str, str], list[Ranks]] = field(default_factory=dict)

    def of(self, name: str, layout: str) -> Ranks:
        """Return the records of the first run of a name."""
        return next(iter(self.found.get((name, layout), ())), ({"failed": "it was not run"},))

    def problem(self, name: str, layout: str) -> tuple[str, str]:
        """Return what stopped a run (refused, lacks, failed) and its text; empty if nothing did."""
        return _problem(self.of(name, layout))

    def agree(self, part: str) -> bool:
        """Whether all runs with the same settings are equal in a part of their records."""
        return all(
            _part(run, part) == _part(runs[0], part) for runs in self.found.values() for run in runs
        )

    def is_repeated(self, name: str, layout: str) -> bool:
        """Whether there are enough runs of a name to compare it with another one."""
        return len(self.found.get((name, layout), ())) >= REPEATS


def _problem(records: Ranks) -> tuple[str, str]:
    for kind in ("refused", "lacks", "failed"):
        for record in records:
            if kind in record:
                said = record[kind]
                if isinstance(said, Mapping):
                    said = f"{said['reason']} ({said['where']})"
                return kind, str(said)
    return ("", "") if all(r.get("is_whole") for r in records) else ("failed", "it stopped")


def _part(records: Ranks, part: str) -> list[Any]:
    if part == "problem":
        return [_problem(records)]
    return [record.get(part) for record in records]


def refusing(flags: Sequence[Flag], request: Request, runs: Runs) -> dict[Flag, str]:
    """Return the flags for which a job is refused, each with the reason.

    They are those that the framework's parser does not know. Otherwise it is the first of those
    without which the job is not refused; the flag that switches FP8 on is not among them, as
    nothing could be said of the others without it.
    """
    problems = {layout: runs.problem(BASE, layout) for layout in request.layouts}
    layouts = [layout for layout, (kind, _) in problems.items() if kind == "refused"]
    if not layouts or not runs.agree("problem"):
        return {}
    why = problems[layouts[0]][1]
    if unknown := unrecognized(flags, why):
        return dict.fromkeys(unknown, why)
    if left_out(request):
        return {}
    guilty = [
        flag
        for flag in flags
        if flag.name not in SWITCHES
        and all(runs.problem(flag.shown, layout)[0] != "refused" for layout in layouts)
    ]
    if not guilty:
        return {}
    together = " together with " + ", ".join(f.shown for f in guilty[1:]) if guilty[1:] else ""
    return {guilty[0]: why + together}


def is_any_refused(runs: Runs) -> bool:
    """Whether the framework has refused the settings of any run."""
    return any(_problem(each[0])[0] == "refused" for each in runs.found.values())


def unrecognized(flags: Sequence[Flag], refusal: str) -> list[Flag]:
    """Return the flags that the framework's parser does not know, by what it says of a job."""
    named = refusal.partition("unrecognized arguments: ")[2].split()
    return [flag for flag in flags if flag.words[0] in named]


def left_out(request: Request) -> str:
    """Return the flags that are in no run, since they name code or depend on the shell."""
    return " ".join(flag.shown for flag in request.flags if flag.why_not)


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


def settled(flag: Flag, flags: Sequence[Flag], request: Request, runs: Runs) -> tuple[str, str]:
    """Return the answer and its reason that runs give without a doubt; two empty texts for none.

    Args:
        flag: The flag.
        flags: All flags of the runs.
        request: What is audited.
        runs: The runs with all flags, without each, and without each of some pairs.
    """
    layouts = request.layouts
    if all(is_same(runs, flag.shown, layout) for layout in layouts):
        lost = _lost(flag, runs.of(BASE, layouts[0])[0])
        return NONE, f"their configuration is the same without it{lost}"
    condition = f" (in a job without {left_out(request)})" if left_out(request) else ""
    for layout in layouts:
        if seen := _seen(runs, flag.shown, layout):
            return REACHES, f"{seen}{condition}"
        is_refused = runs.problem(BASE, layout)[0] == "refused" and runs.agree("problem")
        if is_refused and flag.name in SWITCHES and not condition:
            if not runs.problem(flag.shown, layout)[0]:
                return REFUSED, runs.problem(BASE, layout)[1]
    for other in flags:
        for layout in layouts:
            if (both(flag, other), layout) in runs.found:
                if seen := _seen(runs, both(flag, other), layout, other.shown):
                    needed = f"(both without {other.shown}, with which it is needed)"
                    return REACHES, f"{seen} {needed}{condition}"
    return "", ""


def is_same(runs: Runs, name: str, layout: str) -> bool:
    """Whether the framework's configuration and its recipe are the same as with all flags."""
    if runs.problem(BASE, layout)[0] or runs.problem(name, layout)[0]:
        return False
    return all(
        _part(runs.of(name, layout), part) == _part(runs.of(BASE, layout), part)
        for part in ("configuration", "recipe")
    )


def decide(
    flag: Flag, flags: Sequence[Flag], request: Request, runs: Runs, readings: Sequence[Reading]
) -> FlagVerdict:
    """Return what one flag does, by all runs; `readings` are the lines that read the flag."""
    places = _places(flag, request, runs, readings)
    answer, why = settled(flag, flags, request, runs) if not flag.why_not else ("", "")
    if not answer:
        answer, why = _unsettled(flag, request, runs, readings, places)
    if answer == NONE and not places:
        why = f"their code never reads it; {why}"
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


def _unsettled(
    flag: Flag, request: Request, runs: Runs, readings: Sequence[Reading], places: Sequence[str]
) -> tuple[str, str]:
    """Return that a flag has no effect if two steps show it, and otherwise why nothing is said."""
    if flag.why_not:
        return OPEN, flag.why_not
    if "moe" in flag.name:
        return OPEN, "it is about experts, which the small model does not have"
    for layout in request.layouts:
        with_, without = runs.problem(BASE, layout), runs.problem(flag.shown, layout)
        if with_[0]:
            beside = f" (without {left_out(request)})" if left_out(request) else ""
            return OPEN, f"the job itself{beside} {_told(with_)}"
        if without[0]:
            return OPEN, f"without it the job {_told(without)}"
        if not all(map(runs.agree, _PARTS)) or next(_differences(runs, flag.shown, layout), ""):
            return OPEN, "runs with the same flags differ: the step is not deterministic here"
    if hidden := left_out(request):
        return OPEN, f"{hidden} may decide about it, and is in no run"
    lost = _lost(flag, runs.of(BASE, request.layouts[0])[0])
    return _without_effect(request, readings, places, lost)


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


def _without_effect(
    request: Request, readings: Sequence[Reading], places: Sequence[str], lost: str
) -> tuple[str, str]:
    """Return that a flag has no effect, unless something that was not run may read it."""
    for reading in readings:
        unknown = [name for name in reading.variables if name not in request.environment]
        if unknown:
            return OPEN, (
                f"{', '.join(unknown)} of the environment decides about it ({reading.place}); give "
                f"its value with --env {unknown[0]}=VALUE, a number or a plain word"
            )
    for feature, part in request.features.items():
        near = next((place for place in places if part in place), "")
        if near:
            return OPEN, f"{feature} is not in the small model, and may read it ({near})"
    return NONE, f"recipe and training step are the same without it{lost}"


def _told(problem: tuple[str, str]) -> str:
    verb = {"refused": "is refused", "lacks": "cannot run on a CPU", "failed": "failed"}
    return f"{verb[problem[0]]}: {problem[1]}"


def differs(runs: Runs, name: str, layout: str, base: str = BASE) -> bool:
    """Whether two names of runs differ, so that more runs must show that they always do."""
    return next(_differences(runs, name, layout, base), None) is not None


def _seen(runs: Runs, name: str, layout: str, base: str = BASE) -> str:
    """Return the first difference of two names of runs, which were repeated and are steady."""
    if not (runs.is_repeated(name, layout) and runs.is_repeated(base, layout)):
        return ""
    found = _differences(runs, name, layout, base)
    return next((text for part, text in found if runs.agree(part)), "")


def _differences(runs: Runs, name: str, layout: str, base: str = BASE) -> Iterator[tuple[str, str]]:
    """Yield the parts in which two names of runs differ, with what differs; recipes come first."""
    for with_, without in zip(runs.of(base, layout), runs.of(name, layout), strict=False):
        is_whole = with_.get("is_whole") and without.get("is_whole")
        for part in _PARTS if is_whole else _PARTS[:1]:
            if part in with_ and part in without and with_[part] != without[part]:
                first = _first(with_[part], without[part])
                title = {"recipe": "the recipe", "regions": "regions of FP8"}.get(part)
                yield part, f"{title or f'the step ({layout})'}: {first}"


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
