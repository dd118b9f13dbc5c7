"""Find recipes by their names: those of this package, installed ones, and files that a user names.

A name is a built-in recipe's, the entry point of an installed package (group `megafp8.recipes`),
`package.module:Class`, or `path/to/file.py:Class`; the class may be left out where there is one.
The last two run code that the name chooses. Therefore `load_recipe` alone imports them, which is
called where a user has named them; `find_recipe` never does.
"""

from __future__ import annotations

import difflib
import dis
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from megafp8.specs.recipe import Recipe
from megafp8.specs.traits import Traits, contradictions

_MOVED = {
    "megafp8.fp8": "fp8_numerics",
    "megafp8.ops": "fp8_numerics",
    "megafp8.te_cpu": "te_cpu",
}
"""Where modules were of which recipes of users may still have the names."""

HIGH_PRECISION = "high_precision"
RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4")
"""The names of the built-in recipes; the file of each is `megafp8/fp8/recipes/<name>.py`."""
DEFAULT_RECIPE = "delayed"
WITHOUT = "-no_"
"""What stands in a built-in recipe's name before each part that is switched off."""
ENTRY_POINTS = "megafp8.recipes"

_loaded: dict[str, Recipe] = {}
"""The recipes that `load_recipe` has imported, by the names that settings give them."""


class RecipeError(Exception):
    """A recipe that cannot be found or used; the message begins with its name."""


class _NoRecipeError(RecipeError):
    """A name that no recipe has."""


def find_recipe(name: str) -> Recipe:
    """Return a recipe that is built in, installed or loaded.

    Raises:
        RecipeError: There is none of this name.
        TypeError: The name is not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not the name of a recipe")
    if _is_built_in(name):
        return _built_in(name)
    if name in _loaded:
        return _loaded[name]
    if names_code(name):
        raise RecipeError(f"{name}: names code, which has not been loaded")
    return _installed(name)


def traits_of(precision: str) -> Traits | None:
    """Return the traits of a recipe, or None for high precision."""
    return None if precision == HIGH_PRECISION else find_recipe(precision).traits


def te_class(name: str) -> str | None:
    """Return the class that Transformer Engine has for a recipe, or None."""
    return None if problem(name) is not None else find_recipe(name).traits.backends.get("te")


def names_code(name: object) -> bool:
    """Whether a name says where code is, as a module or a file."""
    return isinstance(name, str) and any(sign in name for sign in "./:\\")


def label_of(name: str) -> str:
    """Return a short name for headers: where a name is a path, that of the class and its file."""
    if name == HIGH_PRECISION or not names_code(name):
        return name
    recipe = type(find_recipe(name))
    source = getattr(sys.modules.get(recipe.__module__), "__file__", None)
    return recipe.__name__ if source is None else f"{recipe.__name__} ({Path(source).name})"


def problem(name: object, beside: Sequence[str] = ()) -> str | None:
    """Return why a value does not name a recipe that can be found, or None if it does.

    `beside` are words that mean something else in its place.
    """
    if not isinstance(name, str):
        return f"{name!r}: is no text; write a recipe's name"
    try:
        find_recipe(name)
    except _NoRecipeError:
        return _no_such_recipe(name, beside)
    except RecipeError as error:
        return str(error)
    return None


def names_where(holds: Callable[[Traits], bool]) -> tuple[str, ...]:
    """Return the built-in recipes whose traits meet a condition, for hints."""
    return tuple(name for name in RECIPES if holds(find_recipe(name).traits))


def recipes_where(names: Iterable[str], holds: Callable[[Traits], bool]) -> tuple[str, ...]:
    """Return those of the recipes `names` whose traits meet a condition, sorted.

    Names that cannot be found are left out: they are an error of their own.
    """
    known = (name for name in set(names) if name != HIGH_PRECISION and problem(name) is None)
    return tuple(sorted(name for name in known if holds(find_recipe(name).traits)))


# --- importing code -------------------------------------------------------------------------------


def load_recipe(name: str) -> Recipe:
    """Import the code that a name chooses, and return the recipe; a second call imports nothing.

    Call it only with a name that the user has given: on the command line, in a trusted file, or as
    an argument in Python.

    Raises:
        RecipeError: The code cannot be imported, has no such class, or its traits are wrong.
    """
    if names_code(name) and name not in _loaded:
        target, _, wanted = name.rpartition(":") if ":" in name else (name, "", "")
        module = _from_file(name, target) if target.endswith(".py") else _imported(name, target)
        _loaded[name] = _made(name, _class_in(name, module, wanted))
    return find_recipe(name)


def register_recipe(recipe: type[Recipe]) -> str:
    """Add a recipe that is defined in Python, as in a notebook, and return the name that it gets.

    Raises:
        RecipeError: Its traits are wrong.
    """
    name = f"{recipe.__module__}:{recipe.__qualname__}"
    _loaded[name] = _made(name, recipe)
    return name


def source_of(name: str) -> tuple[Path, str] | None:
    """Return the file of a recipe that is not built in, and the SHA-256 of its bytes.

    None stands for a built-in recipe, and for a class that no file holds.
    """
    if _is_built_in(name):
        return None
    source = getattr(sys.modules.get(type(find_recipe(name)).__module__), "__file__", None)
    if source is None:
        return None
    return Path(source), hashlib.sha256(Path(source).read_bytes()).hexdigest()


@cache  # linears ask for their recipe by its name, many thousand times in a search of layouts
def _is_built_in(name: str) -> bool:
    return name.partition(WITHOUT)[0] in RECIPES and not names_code(name)


@cache
def _built_in(name: str) -> Recipe:
    base, *without = name.split(WITHOUT)
    cls = _class_in(base, importlib.import_module(f"megafp8.fp8.recipes.{base}"), "")
    known = cls.traits.options
    if unknown := [option for option in without if option not in known]:
        parts = f"can switch off {', '.join(known)}" if known else "has no parts to switch off"
        raise RecipeError(f"{name}: {base} {parts}, and not {unknown[0]!r}")
    return _made(name, cls.without(frozenset(without)) if without else cls)


def switched_off(name: str, options: Iterable[str]) -> str:
    """Return the name of a recipe without those of some parts that it has."""
    traits = traits_of(name)
    known = () if traits is None else traits.options
    off = name.split(WITHOUT)[1:]
    return name + "".join(f"{WITHOUT}{o}" for o in options if o in known and o not in off)


@cache
def _installed(name: str) -> Recipe:
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in points:
        raise _NoRecipeError(_no_such_recipe(name))
    value = points[name].value
    target, _, wanted = value.partition(":")
    return _made(name, _class_in(name, _imported(name, target), wanted))


def _no_such_recipe(name: str, beside: Sequence[str] = ()) -> str:
    choices = (*RECIPES, *beside)
    close = difflib.get_close_matches(name, choices, n=1)
    meant = f"Did you mean {close[0]}? " if close else ""
    known = f"There are {', '.join(choices)}, and code such as FILE.py:CLASS"
    return f"{name}: there is no such recipe. {meant}{known}"


def _imported(name: str, target: str) -> ModuleType:
    if "" not in sys.path:  # as with `python -m`: the folder of a script is there instead
        sys.path.append("")
    return _running(name, lambda: importlib.import_module(target), Path(target))


def _from_file(name: str, target: str) -> ModuleType:
    try:
        path = Path(target).expanduser().resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # no permission, links in a circle, no such user
        raise RecipeError(f"{name}: {error}") from error
    if not is_file:
        raise RecipeError(f"{name}: there is no file {path}")
    key = hashlib.sha256(bytes(path)).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"megafp8_recipe_{path.stem}_{key}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module

    def run() -> ModuleType:
        spec.loader.exec_module(module)  # type: ignore[union-attr]  # asserted above
        return module

    return _running(name, run, path)


def _running(name: str, imports: Callable[[], ModuleType], path: Path) -> ModuleType:
    """Run another's code, which can raise anything; name the line of it that failed."""
    try:
        return imports()
    except BaseException as error:  # `sys.exit()` too, which would end the run as if it were done
        if is_interrupt(error):
            raise
        lines = traceback.extract_tb(error.__traceback__)
        own = [line for line in lines if Path(line.filename).name == path.name]
        place = f", line {own[-1].lineno} of {path}" if own else ""
        if isinstance(error, SyntaxError):
            place = f", line {error.lineno} of {error.filename}"
        now = _new_place(error)
        raise RecipeError(f"{name}: cannot be imported ({raised(error)}{place}){now}") from error


def _new_place(error: BaseException) -> str:
    """Say where a module is now that one of this package was once, or nothing."""
    old = (isinstance(error, ModuleNotFoundError) and error.name) or ""
    for place, package in _MOVED.items():
        new = package + old.removeprefix(place)
        if f"{old}.".startswith(f"{place}.") and importlib.util.find_spec(new) is not None:
            return f"; {old} is {new} now"
    return ""


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is Ctrl-C, and not a `raise KeyboardInterrupt` of the code that ran.

    Python raises a signal's exception between two instructions, and never at that of `raise`.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not isinstance(error, KeyboardInterrupt) or trace is None:
        return isinstance(error, KeyboardInterrupt)
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] != dis.opmap["RAISE_VARARGS"]


def raised(error: BaseException) -> str:
    """Return the class of an exception, and its text if it has one."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def _class_in(name: str, module: ModuleType, wanted: str) -> type[Recipe]:
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Recipe)
        and value.__module__ == module.__name__
    }
    source = getattr(module, "__file__", module.__name__)
    if wanted and wanted not in classes:
        listed = ", ".join(classes) or "none"
        raise RecipeError(f"{name}: {source} has no recipe {wanted}; it has {listed}")
    if not wanted and len(classes) != 1:
        listed = ", ".join(classes) or "none: a recipe is a subclass of megafp8.fp8.Recipe"
        raise RecipeError(f"{name}: {source} must have one recipe, or name it; it has {listed}")
    return classes[wanted] if wanted else next(iter(classes.values()))


def _made(name: str, cls: type[Recipe]) -> Recipe:
    traits = getattr(cls, "traits", None)
    if not isinstance(traits, Traits):
        raise RecipeError(f"{name}: {cls.__name__} declares no traits (`traits = Traits(...)`)")
    if wrong := contradictions(traits):
        raise RecipeError(f"{name}: the traits of {cls.__name__} are wrong: {'; '.join(wrong)}")
    if cls.cast is Recipe.cast and not cls.has_operands():
        raise RecipeError(f"{name}: {cls.__name__} has no `cast`, which is a recipe's rule")
    _check_rule(name, cls, traits)
    try:
        made = cls()
    except BaseException as error:  # another's code can raise anything
        if is_interrupt(error):
            raise
        raise RecipeError(f"{name}: {cls.__name__}() cannot be made ({raised(error)})") from error
    made.name = name
    return made


def _check_rule(name: str, cls: type[Recipe], traits: Traits) -> None:
    """Refuse what a recipe declares and a rule of `cast` alone cannot do."""
    if cls.update is not Recipe.update and not traits.has_history:
        raise RecipeError(f"{name}: {cls.__name__} has `update`, and does not declare has_history")
    if traits.has_history and cls.cast is not Recipe.cast:
        raise RecipeError(
            f"{name}: {cls.__name__} declares has_history, whose scales follow from `update` and "
            "are known before the tensor, and has a `cast` of its own. Leave one of them out"
        )
    if not cls.has_operands() and traits.agrees_on_columns:
        raise RecipeError(
            f"{name}: {cls.__name__} declares agrees_on_columns, which a rule of `cast` cannot "
            "do, since it does not learn which ranks have the other tokens"
        )
    if (
        not cls.has_operands()
        and traits.shares_weight
        and cls.scale_of_amax is Recipe.scale_of_amax
    ):
        raise RecipeError(
            f"{name}: {cls.__name__} declares shares_weight and has no `scale_of_amax`"
        )
