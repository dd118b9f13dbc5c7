"""Name the recipe for a GPU, compare all, or try to refute what the traits of a recipe say.

megafp8 recipe for h100
megafp8 recipe table
megafp8 recipe check NAME

`for` names the recipe to begin with, and why. `table` says what each recipe is and which GPUs run
it. `check` runs a rule with small matrices. NAME is a built-in recipe, an installed one,
FILE.py:Class or package.module:Class; the code that it names is run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from megafp8.cli.commands import run_old_name
from megafp8.cli.job import command_parser, reports_errors, show
from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.errors import ExitCode
from megafp8.observe.units import in_columns
from megafp8.specs.gpus import FIRST_WITH_FP8, GPUS, capability_of, ways
from megafp8.specs.recipes import RECIPES, RecipeError, find_recipe, load_recipe
from megafp8.specs.traits import Scales, Traits

ACTIONS = ("for", "table", "check")
_EMULATED = (
    "any recipe on {where}, which has no FP8 tensor cores: it is emulated, with the numbers of a "
    "GPU that has some and at the speed of BF16 at best; take the recipe of the GPU that will train"
)


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print what was tried; return 0 if nothing is refuted, otherwise or after an error 2."""
    parser = command_parser("recipe", __doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="|".join(ACTIONS))
    gpu = actions.add_parser("for", help="name the recipe to begin with on a GPU, and why")
    gpu.add_argument("gpu", metavar="GPU", nargs="+", help="h100, b200, l40s, rtx 4090, cpu, …")
    actions.add_parser("table", help="show what each recipe is and which GPUs run it")
    check = actions.add_parser("check", help="try to refute each trait of a recipe")
    check.add_argument("name", metavar="NAME", help="the recipe's name, file or module")
    options = parser.parse_args(argv)
    if options.action == "for":
        show(f"{recipe_for(' '.join(options.gpu))}\n")
        return int(ExitCode.FINISHED)
    if options.action == "table":
        show(_on_screen(recipe_table()) if sys.stdout.isatty() else recipe_table())
        return int(ExitCode.FINISHED)
    return _check(options.name)


def recipe_for(gpu: str) -> str:
    """Return one line: the recipe to begin with on a GPU, why, and which others run there.

    Raises:
        SettingError: The name is not known.
    """
    capability = capability_of(gpu)
    if gpu.lower() == "cpu":
        return _EMULATED.format(where="a CPU")
    if capability is None:
        hint = "Names are those of NVIDIA's GPUs, such as h100, b200, l40s, rtx4090, a100; or cpu"
        if re.match(r"(amd|mi\d{2,3}|rocm|gaudi|tpu)", gpu.lower()):
            hint = "No kernel is built for it; give an NVIDIA GPU or cpu"
        raise SettingError("GPU", gpu, "is not known", hint, origin=COMMAND_LINE)
    if capability < FIRST_WITH_FP8:
        return _EMULATED.format(where="a GPU before Ada")
    advised = {name: find_recipe(name).traits.advised for name in RECIPES}
    recipe, why = next((n, of[capability]) for n, of in advised.items() if capability in of)
    label = next(name for name, one in GPUS.items() if one == capability)
    others = [name for name in RECIPES if ways(find_recipe(name).traits, capability)]
    others.remove(recipe)
    return (
        f"model.fp8_recipe={recipe} on {label}: {why}. Tensor cores also run {', '.join(others)}. "
        f"Not timed by us: no GPU has run it yet"
    )


def _on_screen(markdown: str) -> str:
    """Return a table of Markdown as two, what a recipe is and where it runs, of 100 columns."""
    rows = [
        [
            re.sub(r"`|FP8 | \(.*\)|, [89]\.\d", "", cell.strip())
            for cell in line.strip("|").split("|")
        ]
        for line in markdown.splitlines()
    ]
    del rows[1]  # Markdown's own
    tables = [row[:3] for row in rows], [[row[0], *row[3:]] for row in rows]
    return "\n\n".join("\n".join(in_columns(table)) for table in tables) + "\n"


def recipe_table() -> str:
    """Return what each built-in recipe is and what runs it on each GPU, as Markdown."""
    head = ("recipe", "numbers", "a scale for", "FP8 gathers", "FP8 weights alone", *GPUS)
    rows = [head, ("---",) * len(head), *map(_row, RECIPES)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str) -> tuple[str, ...]:
    traits = find_recipe(name).traits
    numbers = "E2M1" if traits.numbers == "e2m1" else _formats(traits)
    runs = [", ".join(ways(traits, capability)) or "emulated" for capability in GPUS.values()]
    facts = _shared(traits), _yes(traits.gathers_tokens), _yes(traits.keeps_weight)
    return f"`{name}`", numbers, *facts, *runs


def _formats(traits: Traits) -> str:
    return "E4M3" if traits.is_e4m3 else "E4M3, gradients E5M2"


def _shared(traits: Traits) -> str:
    """Return what shares a scale: `a tensor`, or `1 × 128; weights 128 × 128`."""
    one, weight = _elements(traits.input.last), _elements(traits.weight.last)
    return one if one == weight else f"{one}; weights {weight}"


def _elements(scales: Scales) -> str:
    if scales.is_one:
        return "a tensor"
    text = "a row" if scales.along is None else f"{scales.across} × {scales.along}"
    return f"{text}, and a tensor" if scales.has_outer else text


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _check(name: str) -> int:
    try:
        load_recipe(name)
    except RecipeError as error:
        reason = str(error).removeprefix(f"{name}: ")
        hint = "Correct the name or the file; docs/guide/own_recipe.md describes a recipe"
        raise SettingError("NAME", name, reason, hint, origin=COMMAND_LINE) from error
    from megafp8.fp8.checker import check  # torch takes seconds, and an error above does not

    report = check(name)
    show(f"{report}\n")
    return int(ExitCode.FINISHED if report.ok else ExitCode.USER_ERROR)


if __name__ == "__main__":
    run_old_name("recipe")
