"""Recipes that settings name as code: who may name them, and what is wrong with them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megafp8.cli import pretrain
from megafp8.cli.main import run_app
from megafp8.config.errors import CombinedConfigError, SettingError
from megafp8.config.load import load, load_all
from megafp8.config.resolve import resolve
from megafp8.config.resume import setting_differences
from megafp8.specs import recipes
from megafp8.specs.recipes import (
    RecipeError,
    find_recipe,
    label_of,
    load_recipe,
    names_code,
    source_of,
)
from megafp8.specs.traits import ROW, TENSOR, Scales, Traits, alike
from scripts.packages import ROOT, sources
from tests import te_sources
from tests.config.helpers import run_spec, the_problem

OWN = Path(__file__).parents[1] / "own_recipes"
BLOCKS = f"{OWN}/blocks_of_32.py:BlocksOf32"
MARK = "import pathlib; pathlib.Path({mark!r}).write_text('ran')\n"
SIMPLE = """
from megafp8.fp8 import ROW, Recipe, Traits, alike

class One(Recipe):
    traits = Traits(input=alike(ROW), weight=alike(ROW), grad_output=alike(ROW), is_simulated=True)
    def cast(self, x_MK, cast):
        return x_MK
"""
HISTORY = (
    SIMPLE.replace("alike(ROW)", "alike(TENSOR, serves_both=True)")
    .replace("ROW", "TENSOR")
    .replace("is_simulated=True", "has_history=True")
)


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """Return a recipe's file that leaves a file `ran` beside it when it is imported."""
    file = tmp_path / "lab.py"
    file.write_text(MARK.format(mark=str(tmp_path / "ran")) + SIMPLE, "utf-8")
    return file


def yaml_with(folder: Path, text: str) -> None:
    (folder / "job.yaml").write_text(f"defaults: [pretrain_gpt, _self_]\n{text}", "utf-8")


@pytest.mark.parametrize(
    "setting",
    [
        "fp8_recipe: {file}",
        "fp8_modules: ['*.fc2:{file}:One']",
        "precision_schedule: [{{from: 3, recipe: '{file}'}}]",
    ],
    ids=["all", "modules", "schedule"],
)
def test_a_file_names_code_only_if_the_command_line_trusts_it(marked: Path, setting: str) -> None:
    folder = marked.parent
    yaml_with(folder, f"model: {{fp8: true, {setting.format(file=marked)}}}\n")
    with pytest.raises(SettingError, match="--trust-recipe") as found:
        load([], folder, "job")
    assert str(marked) in str(found.value) and "job.yaml" in str(found.value)
    assert not (folder / "ran").exists()
    load_all([], folder, "job", trusts_recipes=True)
    assert (folder / "ran").exists()


def test_the_ranks_of_a_job_are_told_that_a_file_is_trusted(
    marked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml_with(marked.parent, f"model: {{fp8: true, fp8_recipe: {marked}}}\n")
    monkeypatch.chdir(marked.parent)
    started: list[str] = []
    monkeypatch.setattr(pretrain, "launch", lambda script, argv, *_, **__: started.extend(argv))
    folder = [f"--config-dir={marked.parent}", "--config-name=job"]
    run_app(
        [*folder, "--trust-recipe", "trainer.devices=2", "trainer.accelerator=cpu"],
        pretrain.task,
    )
    assert "--trust-recipe" in started and {*folder} <= {*started}


def test_the_command_line_names_code(marked: Path) -> None:
    load(["model.fp8=True", f"model.fp8_recipe={marked}:One"])
    assert (marked.parent / "ran").exists()
    assert label_of(f"{marked}:One") == "One (lab.py)"


BY_INTERPOLATION = [
    "model.fp8_recipe=${name}",
    "model.fp8_recipe=${oc.select:name}",
    "model.fp8_recipe='${exp_manager.exp_dir}/lab.py'",
    "model.fp8_recipe=${oc.env:A_RECIPE}",
    "model.fp8_modules=['*.fc2:${name}']",
    "model.fp8_modules=${exp_manager.wandb_logger_kwargs.tags}",
    "model.precision_schedule=[{from: 3, recipe: '${name}'}]",
]


@pytest.mark.parametrize("given", BY_INTERPOLATION)
@pytest.mark.parametrize("more", [[], ["-m", "model.seed=1,2"]], ids=["run", "sweep"])
def test_an_interpolation_is_not_a_typed_name(
    marked: Path,
    given: str,
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a YAML file of others says would be code that the command line never named."""
    monkeypatch.chdir(marked.parent)
    monkeypatch.setenv("A_RECIPE", str(marked))
    tags = f"wandb_logger_kwargs: {{project: lab, tags: ['*.fc2:{marked}']}}"
    text = f"exp_manager: {{exp_dir: {marked.parent}, create_wandb_logger: true, {tags}}}\n"
    yaml_with(marked.parent, f"{text}name: {marked}\nmodel: {{fp8: true}}\n")
    command = [f"--config-dir={marked.parent}", "--config-name=job", given, *more]
    assert run_app(command, lambda cfg, info: 0) == 2
    assert not (marked.parent / "ran").exists()
    assert "interpolation or hydra.sweeper): names code to run" in capsys.readouterr().err


def test_a_sweep_over_interpolations_names_no_code(
    marked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(marked.parent)
    yaml_with(marked.parent, f"name: {marked}\nmodel: {{fp8: true}}\n")
    command = [f"--config-dir={marked.parent}", "--config-name=job", "-m"]
    assert run_app([*command, "model.fp8_recipe=${name},delayed"], lambda cfg, info: 0) == 2
    assert not (marked.parent / "ran").exists()


PARAMS = {
    "path": "{{model.fp8_recipe: '{file}\\:One,delayed'}}",
    "module": "{{model.fp8_recipe: 'lab\\:One,delayed'}}",
    "modules": "{{model.fp8_modules: \"['*.fc2:{file}']\"}}",
}


@pytest.mark.parametrize("params", PARAMS)
def test_a_sweeper_of_a_file_names_no_code(
    marked: Path, params: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = marked.parent
    monkeypatch.chdir(folder)
    text = PARAMS[params].format(file=marked)
    yaml_with(folder, f"model: {{fp8: true}}\nhydra: {{sweeper: {{params: {text}}}}}\n")
    command = ["-m", f"--config-dir={folder}", "--config-name=job", "model.seed=1,2"]
    assert run_app(command, lambda cfg, info: 0) == 2
    assert "hydra.sweeper): names code to run" in capsys.readouterr().err
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "given",
    [
        "model.fp8_recipe={file}\\:One,delayed",
        "model.fp8_recipe={file}",
        "model.fp8_modules=['*.fc2:{file}'],['*.fc1:{file}']",
        "model.precision_schedule=[{{from: 3, recipe: '{file}'}}],[{{from: 4, recipe: '{file}'}}]",
    ],
)
def test_the_command_line_of_a_sweep_names_code(
    marked: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(marked.parent)
    command = ["-m", "model.fp8=True", "model.seed=1,2", given.format(file=marked)]
    assert run_app(command, lambda cfg, info: 0) == 0
    assert (marked.parent / "ran").exists()


@pytest.mark.parametrize(
    ("scales", "more", "is_gathered"),
    [
        (TENSOR, {}, False),
        (TENSOR, {"agrees": True}, True),
        (TENSOR, {"has_history": True}, True),
        (ROW, {}, False),
        (ROW, {"agrees": True}, False),
        (ROW, {"commutes": True}, True),
        (ROW, {"agrees_on_columns": True}, True),
        (ROW, {"agrees_on_columns": True, "is_simulated": True}, False),
        (ROW, {"commutes": True, "is_simulated": True}, False),
        (TENSOR, {"agrees": True, "is_simulated": True}, False),
    ],
)
def test_ranks_gather_bytes_only_if_parts_give_the_whole(
    scales: Scales, more: dict[str, Any], is_gathered: bool
) -> None:
    casts = alike(scales)
    assert (
        Traits(input=casts, weight=casts, grad_output=casts, **more).gathers_tokens is is_gathered
    )


def test_a_simulated_weight_is_not_kept_in_fp8() -> None:
    casts = alike(TENSOR, serves_both=True)
    assert Traits(input=casts, weight=casts, grad_output=casts).keeps_weight
    assert not Traits(input=casts, weight=casts, grad_output=casts, is_simulated=True).keeps_weight


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.fp8_params=True"], "model.fp8_params"),
        (["model.fp8_backend=te"], "model.fp8_recipe"),
        (["model.fp8_backend=torchao"], "model.fp8_recipe"),
        (["model.enable_cuda_graph=True", "trainer.accelerator=gpu"], "model.enable_cuda_graph"),
    ],
)
@pytest.mark.parametrize("recipe", [BLOCKS, f"{OWN}/simulated_int8.py:Int8"])
def test_what_a_recipe_does_not_declare_is_refused_by_name(
    recipe: str, settings: list[str], key: str
) -> None:
    assert the_problem("model.fp8=True", f"model.fp8_recipe={recipe}", *settings).key == key


def test_without_fp8_nothing_is_imported(marked: Path) -> None:
    with pytest.raises(SettingError, match="has no effect with model.fp8=False"):
        load([f"model.fp8_recipe={marked}"])
    assert not (marked.parent / "ran").exists()


def test_a_path_may_look_like_a_recipe_without_a_part(tmp_path: Path) -> None:
    file = tmp_path / "nvfp4-no_rotation.py"
    file.write_text(SIMPLE, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        name = "nvfp4-no_rotation.py:One"
        load_recipe(name)
        assert find_recipe(name).traits.is_simulated
        assert source_of(name) is not None


def test_a_name_that_was_not_loaded_is_never_imported(marked: Path) -> None:
    with pytest.raises(RecipeError, match="has not been loaded"):
        find_recipe(str(marked))
    assert not (marked.parent / "ran").exists()


WRONG = {
    "there is no file": ("{folder}/none.py", ""),
    "SyntaxError": ("{file}", "class :"),
    "line 2": ("{file}", "x = 1\nraise ValueError('no')"),
    "must have one recipe": ("{file}", "x = 1"),
    "has no recipe Two; it has One": ("{file}:Two", SIMPLE),
    "declares no traits": ("{file}:One", SIMPLE.replace("traits =", "other =")),
    "has no `cast`": ("{file}:One", SIMPLE.replace("def cast", "def other")),
    "multiple=16 is not a multiple of the blocks of 24": (
        "{file}:One",
        SIMPLE.replace("input=alike(ROW)", "input=alike(blocks(24))").replace(
            "ROW,", "ROW, blocks,"
        ),
    ),
    "needs one scale for each tensor": (
        "{file}:One",
        SIMPLE.replace("is_simulated=True", "has_history=True"),
    ),
    "rounds to FP8, without is_simulated": (
        "{file}:One",
        HISTORY.replace("has_history=True", "has_history=True, is_simulated=True"),
    ),
    "has a `cast` of its own": ("{file}:One", HISTORY),
    "has `update`, and does not declare has_history": (
        "{file}:One",
        SIMPLE + "    def update(self, seen): pass",
    ),
    "has no `scale_of_amax`": (
        "{file}:One",
        SIMPLE.replace("alike(ROW)", "alike(TENSOR, serves_both=True)")
        .replace("ROW", "TENSOR")
        .replace("is_simulated=True", "shares_weight=True"),
    ),
    "ModuleNotFoundError": ("no.such.module:One", ""),
    "line 1 of {file}); megafp8.fp8.kernels.triton_cast is fp8_numerics.kernels.triton_cast now": (
        "{file}",
        "from megafp8.fp8.kernels.triton_cast import cast",
    ),
    "line 1 of {file}); megafp8.te_cpu is te_cpu now": ("{file}", "import megafp8.te_cpu.wheel"),
    "megafp8.fp8.nowhere', line 1 of {file}). ": ("{file}", "import megafp8.fp8.nowhere"),
    "delayd: there is no such recipe. Did you mean delayed? There are ": ("delayd", ""),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_bad_recipe_is_named_with_its_file(tmp_path: Path, words: str) -> None:
    if "te_cpu is" in words and not te_sources.IS_HERE:
        pytest.skip("te_cpu is not in this tree")
    name, source = WRONG[words]
    file = tmp_path / f"lab{len(words)}.py"
    file.write_text(source, "utf-8")
    name = name.format(file=file, folder=tmp_path)
    with pytest.raises((SettingError, CombinedConfigError)) as found:
        load(["model.fp8=True", f"model.fp8_recipe={name}"])
    message = str(found.value)
    assert words.format(file=file) in message and "model.fp8_recipe=" in message and name in message
    if names_code(name):
        assert f"megafp8 recipe check {name}" in message


LEAVES = {
    "SystemExit": "import sys\nsys.exit()",
    "SystemExit: 0": "raise SystemExit(0)",
    "KeyboardInterrupt": "def leave():\n    raise KeyboardInterrupt\nleave()",
    "GeneratorExit": "raise GeneratorExit",
    "Own: no": "class Own(BaseException): pass\nraise Own('no')",
    "SystemExit: 3": "class Early:\n    raise SystemExit(3)",
    "One() cannot be made (SystemExit: 5)": SIMPLE + "    def __init__(self): raise SystemExit(5)",
    "One() cannot be made (KeyboardInterrupt)": (
        SIMPLE + "    def __init__(self): raise KeyboardInterrupt"
    ),
}


@pytest.mark.parametrize("words", LEAVES)
def test_a_recipe_that_leaves_is_an_error_that_names_its_file(tmp_path: Path, words: str) -> None:
    """`sys.exit()` in a file ended a run with code 0, before anything was trained."""
    file = tmp_path / "lab.py"
    file.write_text(LEAVES[words], "utf-8")
    with pytest.raises(SettingError) as found:
        load(["model.fp8=True", f"model.fp8_recipe={file}"])
    assert f"{file} (command line)" in str(found.value) and words in str(found.value)
    if "made" not in words:
        assert re.search(rf", line \d of {file}", str(found.value))


def test_ctrl_c_during_the_import_of_a_recipe_is_no_fault_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "lab.py"
    file.write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n" + SIMPLE, "utf-8")
    with pytest.raises(KeyboardInterrupt):
        load(["model.fp8=True", f"model.fp8_recipe={file}"])


def test_a_recipe_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab_package.py").write_text(SIMPLE, "utf-8")
    about = tmp_path / "lab_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[megafp8.recipes]\nlab_one = lab_package:One\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipes._installed.cache_clear()
    spec = resolve(load(["model.fp8=True", "model.fp8_recipe=lab_one"]), lambda: False)
    assert spec.precision.fp8 is not None and spec.precision.fp8.name == "lab_one"
    assert type(find_recipe("lab_one")).__name__ == "One"
    recipes._installed.cache_clear()


def test_the_file_of_a_recipe_is_known_by_its_bytes() -> None:
    load_recipe(BLOCKS)
    found = source_of(BLOCKS)
    assert found is not None and found[0] == OWN / "blocks_of_32.py" and len(found[1]) == 64
    assert source_of("delayed") is None


def test_settings_of_an_old_run_can_be_compared_without_its_code() -> None:
    new = load(["model.fp8=True", f"model.fp8_recipe={BLOCKS}", "model.ffn_hidden_size=1024"])
    resolved = resolve(new, lambda: False).resolved
    old = {**resolved, "model": {**resolved["model"], "fp8_recipe": "gone.py:Gone"}}  # type: ignore[dict-item]
    assert [(d.key, d.old) for d in setting_differences(old, resolved)] == [
        ("model.fp8_recipe", "gone.py:Gone")
    ]


def test_a_size_that_is_not_whole_blocks_names_the_recipe() -> None:
    given = ["model.fp8=True", f"model.fp8_recipe={BLOCKS}", "model.ffn_hidden_size=1040"]
    with pytest.raises(SettingError, match="multiples of 32") as found:
        load(given)
    assert BLOCKS in str(found.value)


def test_traits_are_read_without_torch() -> None:
    program = "import sys, megafp8.config.load as l; l.load(['model.fp8=True']);"
    program += "from megafp8.specs.recipes import RECIPES, find_recipe;"
    program += "[find_recipe(name).traits for name in RECIPES]; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def names_of_recipes(path: Path) -> set[str]:
    """Return the built-in recipes that a file names as a text of their own."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant)} & {*recipes.RECIPES}


def test_no_package_names_a_recipe() -> None:
    """Beside a recipe's own file, the list of names and a translation of other programs' files."""
    found = {
        path.relative_to(ROOT).as_posix(): names_of_recipes(path)
        for path in sources(ROOT)
        if path.parent.name != "recipes" and names_of_recipes(path)
    }
    for name in ("tensors", "mx", "nv", "grouped"):
        found.pop(f"te_cpu/{name}.py", None)  # `rowwise` is Transformer Engine's orientation
    for name in ("optim/muon", "config/schema/optim", "specs/optim"):
        assert found.pop(f"megafp8/{name}.py", set()) <= {"blockwise"}  # Megatron's mode of Muon
    found.pop("megafp8/plan/published.py", None)  # speeds that others published, by recipe
    for name in ("checkpoint/serving_blocks", "cli/export_quantized"):
        assert found.pop(f"megafp8/{name}.py", set()) <= {"mxfp8", "nvfp4"}  # formats of servers
    found.pop("te_cpu/missing.py", None)  # names of Transformer Engine's folders
    for name in ("accelerate", "megatron_modules"):
        found.pop(f"megafp8_migrate/{name}.py", None)
    assert [*found] == ["megafp8/specs/recipes.py"], found


BOTH = SIMPLE.replace("is_simulated=True", "is_simulated=True, backward_formats={formats}")


def written(folder: Path, *formats: str) -> str:
    """Return the name of a recipe that has these formats of output gradients."""
    file = folder / "formats.py"
    file.write_text(BOTH.format(formats=formats), "utf-8")
    return f"{file}:One"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.fp8_modules", "['layers.1.*:{own}']"),
        ("model.precision_schedule", "[{{from: 0.5, modules: '*.fc2', recipe: '{own}'}}]"),
    ],
)
def test_histories_of_two_formats_are_refused_before_a_run(
    tmp_path: Path, key: str, value: str
) -> None:
    """A phase would end the run in its middle, and a rule one pipeline stage alone."""
    text, file = (OWN / "smoothed.py").read_text("utf-8"), tmp_path / "smoothed.py"
    file.write_text(text.replace('("e5m2", "e4m3")', '("e4m3",)'), "utf-8")
    given = ["model.fp8=True", f"{key}={value.format(own=f'{file}:Smoothed')}"]
    found = the_problem(*given)
    assert found.key == key and "or set model.fp8_e4m3=True" in found.hint
    assert "Smoothed (smoothed.py) has them in e4m3" in found.reason
    assert "delayed has them in e5m2" in found.reason
    run_spec(*given, "model.fp8_e4m3=True")


def test_a_format_that_is_asked_for_reaches_other_recipes_in_every_phase(tmp_path: Path) -> None:
    own = written(tmp_path, "e4m3", "e5m2")
    entries = f"[{{from: 0.3, recipe: mxfp8}}, {{from: 0.6, modules: '*.fc2', recipe: '{own}'}}]"
    given = ["model.fp8=True", "model.fp8_recipe=tensorwise", f"model.precision_schedule={entries}"]
    for setting, expected in (("model.fp8_hybrid=True", "e5m2"), ("model.fp8_e4m3=True", "e4m3")):
        phases = run_spec(*given, setting).precision.schedule
        assert [phase.recipe.gradients_in(own) for phase in phases] == [expected] * 3


def test_equal_runs_of_a_recipe_that_names_e4m3_first_have_equal_settings(tmp_path: Path) -> None:
    own = f"model.fp8_recipe={written(tmp_path, 'e4m3', 'e5m2')}"
    both = [run_spec("model.fp8=True", own, *more) for more in ([], ["model.fp8_e4m3=True"])]
    assert both[0].resolved == both[1].resolved
    assert both[0].precision.fp8 == both[1].precision.fp8


def test_e4m3_is_asked_of_the_main_recipe(tmp_path: Path) -> None:
    e5m2 = written(tmp_path, "e5m2")
    given = ["model.fp8=True", "model.fp8_e4m3=True"]
    recipe = run_spec(*given, f"model.fp8_modules=['*.fc2:{e5m2}']").precision.fp8
    assert recipe is not None and recipe.backward_format == "e4m3"
    assert recipe.gradients_in(e5m2) == "e5m2"
    assert the_problem(*given, f"model.fp8_recipe={e5m2}").key == "model.fp8_e4m3"


def test_high_precision_is_offered_where_it_is_accepted() -> None:
    in_a_rule, alone = (
        the_problem("model.fp8=True", setting).reason
        for setting in (
            "model.fp8_modules=['*.fc2:high_precison']",
            "model.fp8_recipe=high_precison",
        )
    )
    assert "no such recipe. Did you mean high_precision? There are delayed, " in in_a_rule
    assert "no such recipe. There are delayed, " in alone and "high_precision" not in alone
