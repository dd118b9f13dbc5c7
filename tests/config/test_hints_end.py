"""Following the hints of refusals leads to a job that runs: no two of them lead to each other."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from megafp8.config import together
from megafp8.config.errors import CombinedConfigError, SettingError, raise_if_any
from megafp8.config.load import load, load_all
from megafp8.config.resolve import resolve
from megafp8.config.rows import Row
from megafp8.config.te_layers import findings
from megafp8.config.te_settings import settings_of
from megafp8.specs.recipes import RECIPES
from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.config.test_te_layers import EXAMPLES, TE
from tests.config.test_together import ROWS, values_of

ASSIGNED = re.compile(r"\b([a-z]\w*(?:\.\w+)+)=([\w.\[\]]+?)(?=[\s,;:)]|\.?$)")
STEPS = 4


def problems_of(settings: dict[str, str], gpu: bool) -> list[SettingError]:
    """Return what refuses a job before it runs: the checks, the device, and the backend."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    try:
        loaded = load_all(overrides, gpu_available=lambda: gpu)
        spec = resolve(loaded.values, lambda: gpu)
        if spec.precision.backend == "te":
            values = loaded.values | settings_of(spec)
            found = [SettingError(f.key, values[f.key], f.reason, f.hint) for f in findings(values)]
            raise_if_any(found)
    except CombinedConfigError as error:
        return list(error.problems)
    except SettingError as error:
        return [error]
    return []


def followed(settings: dict[str, str], problem: SettingError) -> Iterator[dict[str, str]]:
    """Yield the settings after each piece of advice that keeps Transformer Engine's layers."""
    if re.search(r"\b[Ll]eave (it|the rules for other recipes) out", problem.hint):
        yield {key: value for key, value in settings.items() if key != problem.key}
    for key in re.findall(r"\bleave (\S+\.\S+) out", problem.hint):
        yield {name: value for name, value in settings.items() if name != key}
    for key, value in ASSIGNED.findall(problem.hint):
        if key != "model.fp8_backend":
            yield settings | {key: value}
    for value in re.findall(r"Use one of (\w+)", problem.hint):
        yield settings | {problem.key: value}


def ends(settings: dict[str, str], gpu: bool, steps: int = STEPS) -> bool:
    """Whether some advice after another leads to a job that nothing refuses."""
    problems = problems_of(settings, gpu)
    if not problems:
        return True
    ways = followed(settings, problems[0]) if steps else ()
    return any(ends(way, gpu, steps - 1) for way in ways if way != settings)


BLOCKWISE = ["model.fp8=True", "model.fp8_recipe=blockwise"]
NAMED = [job for job in EXAMPLES if "high_precision" not in " ".join(job)]
"""All but one, whose hint is an example of a rule."""
JOBS = [*NAMED, BLOCKWISE, [*BLOCKWISE, "model.fp8_split_accumulator=[true,true,true]"]]


@pytest.mark.parametrize("gpu", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_hints_lead_to_a_job_on_transformer_engine_s_layers(job: list[str], gpu: bool) -> None:
    words = [*job, TE]
    assert ends({key: value for key, _, value in (word.partition("=") for word in words)}, gpu)


RUN = {"model.fp8": "True", "model.fp8_recipe": "tensorwise", "model.fp8_backend": "te"}
SCHEDULE = "model.precision_schedule"


def refusal_of(entry: str, recipe: str = "tensorwise") -> str:
    """Return the hint about a schedule of one entry, or no text where nothing refuses the job."""
    job = RUN | {"model.fp8_recipe": recipe, SCHEDULE: f"[{{from: 0.5, {entry}}}]"}
    problems = problems_of(job, gpu=True)
    return problems[0].hint if problems else ""


@pytest.mark.parametrize("field", ["modules: '*.fc2'", "products: forward"])
def test_transformer_engine_takes_a_schedule_without_the_field_that_it_refuses(field: str) -> None:
    assert f"Leave `{field.partition(':')[0]}` out" in refusal_of(f"{field}, recipe: bf16")
    assert not refusal_of("recipe: bf16")


@pytest.mark.parametrize("refused", ["rowwise", "delayed"])
def test_transformer_engine_takes_each_recipe_that_a_hint_about_a_schedule_names(
    refused: str,
) -> None:
    words = set(re.findall(r"\w+", refusal_of(f"recipe: {refused}").partition("in the entries")[0]))
    named = words & {*RECIPES, "bf16"}
    assert named == {"tensorwise", "blockwise", "mxfp8", "nvfp4", "bf16"}
    for own in named - {"bf16"}:
        for other in named - {own}:
            assert not refusal_of(f"recipe: {other}", own)


@pytest.mark.parametrize("fsdp", [False, True], ids=["without FSDP", "with FSDP"])
def test_level_o3_takes_each_recipe_that_its_refusal_names(fsdp: bool) -> None:
    sharded = {"model.fsdp": "True", "trainer.devices": "2"} if fsdp else {}
    level = {"model.fp8": "True", "model.optim.fp8_opt_level": "O3", "trainer.precision": "bf16"}
    job = sharded | level | {"model.micro_batch_size": "2", "model.global_batch_size": "8"}
    (problem,) = problems_of(job | {"model.fp8_recipe": "mxfp8"}, gpu=True)
    named = set(re.findall(r"\w+", problem.hint)) & {*RECIPES}
    assert named == {"delayed", "tensorwise"} | (set() if fsdp else {"blockwise"})
    for recipe in named:
        assert not problems_of(job | {"model.fp8_recipe": recipe}, gpu=True)


# --- the table of settings that exclude each other ------------------------------------------------


@cache
def default_values() -> dict[str, Any]:
    return load()


def refused(values: dict[str, Any]) -> dict[str, str]:
    """Return the hints of both tables about some settings, by the key that each refuses."""
    return {found.key: found.hint for found in together.findings(values)}


def advised(values: dict[str, Any], key: str, hint: str) -> Iterator[dict[str, Any]]:
    """Yield the settings after each piece of advice."""
    default = default_values()
    left = re.findall(r"\b[Ll]eave (?:the )?(\S+\.[\w*]+)", hint)
    left += [key] if re.search(r"\b[Ll]eave (it|one of the two|the rules)\b", hint) else []
    left += re.findall(r"and the (\S+\.\S+) keys out", hint)
    names = [name for pattern in left for name in fnmatch.filter(default, pattern)]
    if names:
        yield values | {name: default[name] for name in names}
    for name, value in ASSIGNED.findall(hint):
        others = re.findall(
            rf"{re.escape(f'{name}={value}')}(?:,? or|,) (?!leave|use|or|which)(\w+)\b(?!\.)", hint
        )
        for one in [value, *others]:
            words = {"off": "off", "none": "none"}  # are no words of YAML's for False and null here
            yield values | {name: words.get(one, yaml.safe_load(one))}


def is_sound(values: dict[str, Any], steps: int = STEPS) -> bool:
    """Whether some advice after another leads to settings that neither table refuses."""
    found = refused(values)
    if not found:
        return True
    key, hint = next(iter(found.items()))
    ways = advised(values, key, hint) if steps else ()
    return any(is_sound(way, steps - 1) for way in ways if way != values)


@pytest.mark.parametrize("row", together.TOGETHER, ids=ROWS)
def test_each_hint_leads_to_settings_that_are_accepted(row: Row) -> None:
    """One piece of a row's advice removes its refusal, and each leads on to sound settings."""
    values = values_of(row)
    if values["model.te_version"] is not None:
        values["model.te_version"] = DEFAULT_VERSION
    (key,) = row.excludes
    ways = list(advised(values, key, row.hint))
    assert any(row.hint not in refused(way).values() for way in ways)
    for way in ways:
        assert is_sound(way), row.hint
