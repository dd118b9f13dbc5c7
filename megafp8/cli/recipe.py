"""Try to refute what an FP8 recipe's traits say, by what its rule does with small matrices.

python -m megafp8.cli.recipe check NAME

NAME is a built-in recipe, an installed one, FILE.py:Class or package.module:Class. The code that it
names is run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megafp8.cli.job import command_parser, reports_errors, show
from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.errors import ExitCode
from megafp8.specs.recipes import RecipeError, load_recipe


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print what was tried; return 0 if nothing is refuted, otherwise or after an error 2."""
    parser = command_parser("recipe", __doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="check")
    check = actions.add_parser("check", help="try to refute each trait of a recipe")
    check.add_argument("name", metavar="NAME", help="the recipe's name, file or module")
    options = parser.parse_args(argv)
    return _check(options.name)


def _check(name: str) -> int:
    try:
        load_recipe(name)
    except RecipeError as error:
        reason = str(error).removeprefix(f"{name}: ")
        hint = "Correct the name or the file; docs/recipes.md describes a recipe"
        raise SettingError("NAME", name, reason, hint, origin=COMMAND_LINE) from error
    from megafp8.fp8.checker import check  # torch takes seconds, and an error above does not

    report = check(name)
    show(f"{report}\n")
    return int(ExitCode.FINISHED if report.ok else ExitCode.USER_ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
