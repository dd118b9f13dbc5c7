"""The examples run, and show what their texts say."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from megafp8.config.load import load
from megafp8.data.builtin import PREFIX, build_dataset
from megafp8.data.examples import read_examples
from megafp8.specs.recipes import RECIPES
from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.data.helpers import tiny_corpus, tiny_documents
from tests.te_sources import need_sources
from tests.train.runs import Driver

ROOT = Path(__file__).parents[2]
Table = Callable[[str], list[list[str]]]


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Iterator[Table]:
    """Run a Python example in this process; return the words of the lines that it prints."""
    threads = torch.get_num_threads()

    def run_example(name: str) -> list[list[str]]:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    yield run_example
    torch.set_num_threads(threads)


def run(command: list[str], codes: tuple[int, ...] = (0,)) -> str:
    """Run a command in a folder outside of the repository, and return its standard output.

    `codes` are the exit codes that it may have.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PYTHON"] = sys.executable
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT / "tests"
    )
    assert done.returncode in codes, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def on_tiny_data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return arguments that replace the built-in dataset by a tiny one."""
    folder = tmp_path_factory.mktemp("data")
    build_dataset(tiny_corpus(lambda: tiny_documents(400)), 300, folder)
    return [f"model.data.data_prefix={folder / PREFIX}"]


def forked(driver: Driver, folder: Path, script: str) -> list[str]:
    """Run an example outside of the repository, as a fork of a process that has imported torch."""
    done = driver.run_python(str(ROOT / "examples" / script), cwd=folder, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_transformer_engine_runs_on_a_laptop(driver: Driver, tmp_path: Path) -> None:
    """The example does not run in this process, since loading Transformer Engine changes torch."""
    need_sources(DEFAULT_VERSION)
    first, *lines = forked(driver, tmp_path, "07_transformer_engine_on_a_laptop.py")
    assert first.endswith("its own Python; kernels emulated on the CPU")
    rows = [line.split() for line in lines if line.split()[0] in "123"]
    assert [float(row[1]) > 1 for row in rows] == [False, True, True]
    errors = [float(row[-1].rstrip("%")) for row in rows] + [float(lines[-1].split()[-1][:-1])]
    assert all(0.05 < error < 10 for error in errors)


def test_a_layer_on_transformer_engine_is_tested_without_a_gpu(tmp_path: Path) -> None:
    need_sources(DEFAULT_VERSION)
    folder = ROOT / "examples/11_layer_on_transformer_engine"
    for name in ("layer.py", "test_layer.py"):
        (tmp_path / name).write_text((folder / name).read_text("utf-8"))
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "te_cpu", "test_layer.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout
    [[*_, pytest_line]] = [
        [step["run"] for step in job["steps"] if "run" in step]
        for job in yaml.safe_load((folder / "test.yml").read_text("utf-8"))["jobs"].values()
    ]
    assert pytest_line.startswith("python -m pytest -p te_cpu --te-version ")


def test_primer_differs_from_fp32_by_the_rounding_of_operands_only(table: Table) -> None:
    rows = table("01_primer.py")[2:]
    assert [row[0] for row in rows] == ["output", "grad_input", "grad_weight"]
    for _, from_fp32, from_representable in rows:  # percent of the largest element
        assert float(from_representable.rstrip("%")) <= 0.01
        assert 1 < float(from_fp32.rstrip("%")) < 10


def test_training_in_fp8_follows_bf16(table: Table) -> None:
    rows = [[float(word) for word in row] for row in table("02_train_a_gpt.py")[1:]]
    assert [step for step, _, _ in rows] == [1, 10, 20, 30, 40, 50, 60]
    for _, bf16, fp8 in rows:
        assert fp8 == pytest.approx(bf16, abs=0.05)  # a step moves the loss by up to 0.1
    assert rows[-1][2] < rows[0][2] - 2
    assert [fp8 for _, _, fp8 in rows] != [bf16 for _, bf16, _ in rows]


@pytest.mark.slow
def test_recipes_of_your_own_get_a_verdict_each(on_tiny_data: list[str], tmp_path: Path) -> None:
    """Three steps say little: of each recipe there is a row, whatever its verdict is."""
    source = (ROOT / "examples/09_a_recipe_of_your_own.py").read_text("utf-8")
    script = tmp_path / "own.py"
    script.write_text(source.replace("=120", "=3").replace("=50", "=1"), "utf-8")
    job = ['model.data.splits_string="990,5,5"', *on_tiny_data]
    job += ["--seeds", "1", "--jobs", "3", "--out", str(tmp_path / "out")]
    output = run([sys.executable, str(script), *job], codes=(0, 5, 6))
    rows = [re.split("  +", line) for line in output.splitlines()[-3:]]
    assert [row[0].split(" (")[0] for row in rows] == [
        "configuration", "simulated Int8", "simulated Int2",
    ]  # fmt: skip
    assert all(row[1] in ("same", "better", "worse", "undecided") for row in rows[1:])
    assert (tmp_path / "out" / "report.html").exists()


def test_the_readme_shows_the_rule_of_the_example() -> None:
    page = (ROOT / "README.md").read_text("utf-8").partition("## A recipe of your own")[2]
    shown = page.partition("```python\n")[2].partition("```")[0]
    source = (ROOT / "examples/09_a_recipe_of_your_own.py").read_text("utf-8")
    assert "class Int8(Recipe):" in shown
    assert not set(shown.splitlines()) - set(source.splitlines())


def test_the_trainer_of_transformers_trains_in_fp8(driver: Driver, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    losses, share, moved = forked(driver, tmp_path, "10_transformers_trainer.py")[-3:]
    values = [float(word) for word in losses.split()[2:]]
    assert len(values) == 4 and values == sorted(values, reverse=True) and values[-1] < 2
    assert share.endswith("100%") and moved.startswith("160 microbatches")


def test_scales_come_from_the_amaxes_before(table: Table) -> None:
    rows = table("03_watch_the_scales.py")[1:]
    assert [row[0] for row in rows[::3]] == ["1", "2", "3", "10", "20"]
    for _, tensor, amax, scale, *_ in rows[:3]:
        assert float(scale) == 1
        (following,) = (row for row in rows[3:6] if row[1] == tensor)
        largest = 57344 if tensor.endswith("grad_output") else 448
        assert float(following[3]) == pytest.approx(largest / float(amax), rel=5e-3)


@pytest.mark.slow
def test_two_ranks_train_as_one(on_tiny_data: list[str]) -> None:
    script = str(ROOT / "examples/04_two_tensor_parallel_ranks.py")
    rows = [line.split() for line in run([sys.executable, script, *on_tiny_data]).splitlines()]
    assert [row[0] for row in rows] == ["step", "1", "2", "3", "4", "5"]
    for _, one_rank, two_ranks in rows[1:]:
        assert float(two_ranks) == pytest.approx(float(one_rank), abs=2e-3)


@pytest.mark.slow
def test_layouts_train_as_one_rank(on_tiny_data: list[str]) -> None:
    """Layouts of two ranks have the losses of one; an FP8 pipeline has one process's scales."""
    script = str(ROOT / "examples/06_layouts.py")
    output = run([sys.executable, script, "ranks=2", *on_tiny_data])
    rows = [line.split() for line in output.splitlines()]
    assert rows[0] == ["step", "alone", "cp2", "pp2", "pp2-zbv"]
    assert [row[0] for row in rows[1:]] == ["1", "2", "3", "4", "5"]
    for _, alone, *others in rows[1:]:
        assert [float(loss) for loss in others] == pytest.approx([float(alone)] * 3, abs=2e-3)


@pytest.mark.kill
@pytest.mark.slow
def test_a_killed_run_continues(on_tiny_data: list[str]) -> None:
    output = run(["bash", str(ROOT / "examples/05_continue_a_run.sh"), *on_tiny_data])
    assert "--- killed; the same command again:" in output
    assert re.search(r"continuing from .*/step_000000(05|10|15)", output)
    steps = output.splitlines()[-1].partition("each once:")[2].split()
    assert steps == [str(step) for step in range(1, 21)]


@pytest.mark.parametrize("name", ["recipes", "scaling", "optimizer_levels"])
def test_every_job_of_the_sweeps_is_accepted(name: str) -> None:
    """Each combination of the values in a sweep's commands loads; nothing is trained."""
    script = (ROOT / "examples" / "sweeps" / f"{name}.sh").read_text().replace("\\\n", " ")
    sweeps = [line.split(" -m ")[1] for line in script.splitlines() if " -m " in line]
    num_jobs, recipes = 0, set[str]()
    for sweep in sweeps:
        words = [word for word in sweep.split() if "=" in word]
        choices = [(word.partition("=")[0], word.partition("=")[2].split(",")) for word in words]
        for values in itertools.product(*(options for _, options in choices)):
            cfg = load([f"{k}={v}" for (k, _), v in zip(choices, values, strict=True)])
            recipes |= {cfg["model.fp8_recipe"]} if cfg["model.fp8"] else set()
            num_jobs += 1
    if name == "recipes":
        assert recipes == set(RECIPES), "the sweep has every recipe"
    assert num_jobs == {"recipes": 9, "scaling": 12, "optimizer_levels": 4}[name]


@pytest.mark.slow
def test_signatures_and_summaries_are_examples(tmp_path: Path) -> None:
    """The files are those that fine-tuning reads, and no question is in both."""
    script = str(ROOT / "examples/08_fine_tune_on_signatures.py")
    run([sys.executable, script, "make", str(tmp_path)])
    train, test = (read_examples(str(tmp_path / f"{part}.jsonl")) for part in ("train", "test"))
    assert len(train) > 5 * len(test) > 1000
    found = [{str(example.fields["input"]) for example in part} for part in (train, test)]
    assert not found[0] & found[1]
    assert any(question.startswith("def json.loads(") for question in found[0] | found[1])
