"""The GPU check (`scripts/gpu_check.py`) runs on a CPU with tiny shapes.

Its deadlines are tested too, and the packages that it unpacks on a machine without them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megafp8.specs.recipes import RECIPES
from megafp8.specs.te_versions import DEFAULT_VERSION
from scripts.packages import packages
from tests.limits import HANG_SECONDS
from tests.te_sources import need_sources

ROOT = Path(__file__).parents[2]
BARE = """
import importlib.abc, importlib.machinery, sys

class Bare(importlib.abc.MetaPathFinder):
    '''An interpreter without these packages, but for those in brought folders.'''

    def find_spec(self, name, path=None, target=None):
        if path is not None or name not in ("hydra", "omegaconf", "antlr4"):
            return None
        brought = [entry for entry in sys.path if "megafp8-check-" in entry]
        found = importlib.machinery.PathFinder.find_spec(name, brought)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found

sys.meta_path.insert(0, Bare())
"""


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/gpu_check.py", *arguments]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def outcomes(out: Path) -> dict[str, str]:
    return {line["part"]: line["outcome"] for line in lines(out) if "part" in line}


def wheel_of(distribution: str, folder: Path) -> None:
    """Make a wheel of a package that is installed here, which is an archive of its files."""
    found = importlib.metadata.distribution(distribution)
    with zipfile.ZipFile(folder / f"{distribution}-{found.version}-py3-none-any.whl", "w") as wheel:
        for file in found.files or []:
            is_part = file.suffix != ".pyc" and ".." not in file.parts
            if is_part and file.locate().exists():  # an old pip lists more than it installs
                wheel.write(str(file.locate()), str(file))


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """Return a PYTHONPATH with which Python finds no hydra, omegaconf and antlr4."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BARE)
    return str(folder)


def test_a_bare_machine_gets_a_list_of_what_it_lacks(tmp_path: Path, bare: str) -> None:
    out, none = tmp_path / "out", tmp_path / "none"
    done = check("runs", "--tiny", "--out", str(out), "--wheels", str(none), PYTHONPATH=bare)
    assert done.returncode == 1
    assert "missing: hydra, omegaconf, antlr4" in done.stderr and "wheels none" in done.stderr
    assert "with pip" not in done.stderr, "the wheels bring all of them"
    assert not outcomes(out)


def test_layers_run_on_a_bare_machine_with_the_wheels(tmp_path: Path, bare: str) -> None:
    """The part that loads a configuration uses hydra from the unpacked wheels only."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("hydra-core", "omegaconf", "antlr4-python3-runtime"):
        wheel_of(name, wheels)
    gpu_check = loaded()
    site = tmp_path / "megafp8-check-site"
    assert len(gpu_check.unpacked(wheels, site)) == 3
    environment = gpu_check.environment_with(site) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += os.pathsep + bare
    assert gpu_check.missing(environment) == []
    checked = gpu_check.Check(tmp_path, environment, True)
    (tmp_path / "logs").mkdir()
    arguments = gpu_check.arguments(["runs", "--tiny", "--out", str(tmp_path)])
    parts = [part for part in gpu_check.parts_of("runs", arguments) if part.name == "layers"]
    checked.stage("runs", parts, float("inf"))
    assert outcomes(tmp_path) == {"layers": "passed"}
    keys = [line["key"] for line in lines(tmp_path) if "row" in line]
    assert keys == ["bf16", *RECIPES]


def test_this_tree_is_checked_and_no_wheel_of_another(tmp_path: Path) -> None:
    """A folder of wheels may have one of a package of this repository, built from another tree."""
    gpu_check, names = loaded(), packages()
    with zipfile.ZipFile(tmp_path / "ours-0.1-py3-none-any.whl", "w") as wheel:
        for name in names:
            wheel.writestr(f"{name}/__init__.py", "raise AssertionError('of another tree')\n")
    site = tmp_path / "site"
    assert gpu_check.unpacked(tmp_path, site)
    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    environment = gpu_check.environment_with(site)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)


def test_a_failing_or_endless_part_stops_no_other(tmp_path: Path) -> None:
    gpu_check = loaded()
    (tmp_path / "logs").mkdir()
    checked = gpu_check.Check(tmp_path, dict(os.environ), False)
    gpu_check.PATIENCE_SECONDS = 5.0
    programs = {
        "endless": (1, "import time; print('begun', flush=True); time.sleep(3600)"),
        "fails": (HANG_SECONDS, "raise SystemExit(3)"),
        "works": (HANG_SECONDS, "print('fine')"),
    }
    parts = [
        gpu_check.Part(name, seconds, (sys.executable, "-c", program))
        for name, (seconds, program) in programs.items()
    ]
    checked.stage("runs", parts, float("inf"))
    checked.stage("late", parts[2:], 0.0)
    found = [(line["part"], line["outcome"]) for line in lines(tmp_path)]
    assert found == [
        ("endless", "failed: stopped after 1 s"),
        ("fails", "failed: exit code 3"),
        ("works", "passed"),
        ("works", "not started: no time was left"),
    ]
    assert checked.failed == ["runs: endless", "runs: fails", "late: works"]


def test_a_part_gets_what_those_before_it_leave_and_no_more_than_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_check, clock = loaded(), [100.0]
    took = {"quick": 5.0, "late": 60.0, "last": 3.0, "none": 1.0}
    given: list[float] = []
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    checked = gpu_check.Check(tmp_path, {}, False)

    def run(stage: str, part: Any, seconds: float) -> None:
        given.append(seconds)
        clock[0] += took[part.name]

    monkeypatch.setattr(checked, "run", run)
    parts = [gpu_check.Part(name, 30, ()) for name in took]
    checked.stage("first", parts, 100.0 + 70)
    assert given == [30, 55, 5]  # the second one took five seconds more than it was given


def test_pytest_that_is_cut_still_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part gets SIGINT, after which pytest writes its results; SIGTERM would leave none.

    This process ignores SIGINT meanwhile, as the background jobs of a shell do. The part's time is
    over once its second test has begun, however long pytest takes to come so far.
    """
    gpu_check = loaded()
    gpu_check.PATIENCE_SECONDS = 300.0
    (tmp_path / "logs").mkdir()
    test, begun, junit = (tmp_path / name for name in ("test_slow.py", "begun", "found.xml"))
    test.write_text(
        "import pathlib, time\n"
        "def test_a(): pass\n"
        f"def test_b(): pathlib.Path({str(begun)!r}).touch(); time.sleep(600)\n"
    )

    class OverOnceBegun(subprocess.Popen[Any]):
        is_over = False

        def wait(self, timeout: float | None = None) -> int:
            if self.is_over:
                return super().wait(timeout)
            while not begun.exists() and self.poll() is None:
                time.sleep(0.02)
            self.is_over = True
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)

    monkeypatch.setattr(subprocess, "Popen", OverOnceBegun)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml")
    part = gpu_check.Part(
        "tests", 45, (*command, str(junit), "--rootdir", str(tmp_path), str(test))
    )
    part = gpu_check.Part(part.name, part.seconds, part.command, junit)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        gpu_check.Check(tmp_path, dict(os.environ), False).stage("right", [part], float("inf"))
    finally:
        signal.signal(signal.SIGINT, before)
    (line,) = lines(tmp_path)
    assert line["outcome"] == "failed: stopped after 45 s" and line["passed"] >= 1


def test_no_test_that_ran_is_a_failure(tmp_path: Path) -> None:
    gpu_check = loaded()
    (tmp_path / "logs").mkdir()
    junit = tmp_path / "found.xml"
    junit.write_text(
        '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="3"/></testsuites>'
    )
    part = gpu_check.Part("tests", 60, (sys.executable, "-c", ""), junit)
    gpu_check.Check(tmp_path, dict(os.environ), False).stage("right", [part], float("inf"))
    (line,) = lines(tmp_path)
    assert line["outcome"] == "failed: no test ran" and line["skipped"] == 3


def test_the_table_names_the_tests_that_failed(tmp_path: Path) -> None:
    """The end of a command's output may be all that comes back from a machine."""
    gpu_check = loaded()
    (tmp_path / "logs").mkdir()
    test, junit = tmp_path / "test_some.py", tmp_path / "found.xml"
    test.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "@pytest.mark.parametrize('name', ['delayed'])\n"
        "def test_wrong(name): assert name == 'other', 'of a cast'\n"
    )
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml")
    part = gpu_check.Part(
        "tests", 240, (*command, str(junit), "--rootdir", str(tmp_path), str(test)), junit
    )
    gpu_check.Check(tmp_path, dict(os.environ), False).stage("right", [part], float("inf"))
    first, second = (tmp_path / "table.txt").read_text().splitlines()
    assert first.endswith("failed: exit code 1, 1 passed, 1 failures")
    assert "test_some::test_wrong[delayed]: AssertionError: of a cast" in second


def test_unknown_stages_are_refused(tmp_path: Path) -> None:
    done = check("runs", "rihgt", "--out", str(tmp_path))
    assert done.returncode == 2 and "unknown stage rihgt" in done.stderr


@pytest.mark.parametrize("option", ["--out", "--archive"])
def test_a_place_that_cannot_be_written_is_named_before_a_part_runs(
    tmp_path: Path, option: str
) -> None:
    done = check("--out", str(tmp_path), "--tiny", "--only", "device", option, "/dev/null/results")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: the results cannot be written: ")
    assert "/dev/null" in done.stderr and "Traceback" not in done.stderr


def test_the_limits_of_parts_fit_into_a_command(tmp_path: Path) -> None:
    gpu_check = loaded()
    arguments = gpu_check.arguments(["--out", str(tmp_path)])
    assert arguments.stages == ["first"]
    for stage in gpu_check.STAGES:
        total = sum(part.seconds for part in gpu_check.parts_of(stage, arguments))
        limit = gpu_check.LIMITS.get(stage, gpu_check.STAGE_SECONDS)
        assert total <= limit or stage == "again", stage
        assert limit + gpu_check.PATIENCE_SECONDS < 600
    starts = 2 * 120  # seconds
    assert sum(gpu_check.LIMITS.values()) + 2 * gpu_check.PATIENCE_SECONDS + starts < 900


def test_the_second_command_repeats_what_did_not_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part whose end is not in the file did not pass: the machine went, or its time was over."""
    gpu_check, old = loaded(), tmp_path / "old.jsonl"
    outcomes = {"device": "passed", "layers": "failed: exit code 1", "tests": "passed",
                "profile": "not started: …"}  # fmt: skip
    rows = [{"stage": "first", "part": k, "outcome": v} for k, v in outcomes.items()]

    def after(*lines: object, cut: str = "") -> Any:
        old.write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
        words = ["again", "--out", str(tmp_path), "--after", str(old)]
        try:
            return gpu_check.arguments(words).only
        except SystemExit:
            return capsys.readouterr().err

    began = {"began": "", "stages": ["first"], "only": None}
    left = ["products", "layers", "kernels", "command", "steps", "profile", "repeats", "more steps"]
    assert after(began, {"header": {}}, *rows, cut='{"stage": "fi') == left
    assert after(began, *rows, began | {"only": ["tests", "layers"]}, rows[2]) == ["layers"]
    assert "all parts passed" in after(began | {"only": ["tests"]}, *rows)
    assert "these are results of runs" in after(began | {"stages": ["runs"]})
    assert "no command began" in after([], 1, rows[1])
    old.unlink()
    words = ["again", "--out", str(tmp_path)]
    for more in ([], ["--after", str(old)], ["--only", "tests", "--after", str(old)]):
        with pytest.raises(SystemExit):
            gpu_check.arguments([*words, *more])
    assert f"--after {old}: [Errno 2]" in capsys.readouterr().err
    assert gpu_check.arguments([*words, "--only", "tests"]).only == ["tests"]


def test_what_is_needed_is_what_the_project_depends_on() -> None:
    """A machine with torch alone lacks packages that no wheel brings; it hears so at once."""
    gpu_check = loaded()
    needed = gpu_check.needed()
    assert {"torch", "numpy", "yaml", "safetensors", "tokenizers", "rich", "hydra"} < set(needed)
    assert all(importlib.util.find_spec(name) for name in needed)
    text = gpu_check.how_to_get(["hydra", "tokenizers"], Path(".wheels"))
    assert "downloads hydra;" in text and "Install tokenizers with pip" in text


def test_memory_checks_report_no_calls_that_fail_harmlessly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch and Triton ask CUDA for what may be missing; by default the sanitizer counts that."""
    module = loaded()
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    parts = module.right_parts(argparse.Namespace(tiny=True, out=tmp_path, workers=0))
    (command,) = [part.command for part in parts if part.name == "memory checks of casts"]
    assert command[:5] == (
        "/usr/bin/compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no",
    )  # fmt: skip


@pytest.mark.parametrize(
    "warning",
    [
        # in the first backward pass of a process that begins with a product
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the "
        "primary context... (Triggered internally at CublasHandlePool.cpp:370.)",
        # at the first kernel of Triton 3.9
        "TRITON_DEFAULT_FP_FUSION is unset: defaulting to FP fusion ENABLED for backward",
    ],
)
def test_warnings_of_every_gpu_are_no_errors_of_a_test(warning: str) -> None:
    warnings.warn(warning, UserWarning, stacklevel=1)


def test_all_tests_that_need_a_gpu_are_run() -> None:
    """Every file with a test marked `gpu` is among the tests of the stage `right`."""
    marked = "(?m)mark[.]gpu\\b|^@gpu\\b"
    files = [path for path in (ROOT / "tests").rglob("*.py") if re.search(marked, path.read_text())]
    assert len(files) > 8
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        assert name.startswith(loaded().GPU_TESTS), name


def test_the_header_says_what_is_emulated_and_what_is_not_there() -> None:
    gpu_check = loaded()
    found = {"device": "NVIDIA H200", "gpus": 8, "driver": "580.65", "torch": "2.13.0+cu130"}
    found |= {"cuda": "13.0", "python": "3.12.3", "no_transformer_engine": None}
    found["emulated"] = {"mxfp8": "no tiles", "nvfp4": "no tiles", "mine": "no rows"}
    found["card"] = {"power.limit": "700.00", "clocks.max.sm": "1980"}
    first, of_card, *others = gpu_check.header_text(found).splitlines()
    assert of_card == "power.limit 700.00; clocks.max.sm 1980"
    assert first == (
        "8 x NVIDIA H200, driver 580.65, PyTorch 2.13.0+cu130, CUDA 13.0, Python 3.12.3"
    )
    assert others[0] == "emulated here, at the speed of other products: mxfp8, nvfp4 (no tiles)"
    assert "mine (no rows)" in others[1] and "`ranks`" in others[2] and len(others) == 3
    assert gpu_check.stages_of(["all"], found)[-1] == "te"
    found["no_transformer_engine"] = "it is not installed"
    assert "no Transformer Engine: it is not installed" in gpu_check.header_text(found)
    assert gpu_check.stages_of(["all"], found) == ["runs", "right", "fast", "trains"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU emulates fewer recipes")
def test_a_cpu_emulates_every_recipe() -> None:
    gpu_check = loaded()
    found = gpu_check.header(gpu_check.environment_with(ROOT))
    assert found["device"] == "cpu" and list(found["emulated"]) == list(RECIPES)


def test_the_table_is_there_after_each_part(tmp_path: Path) -> None:
    """A session on a GPU can end at any time; what was found until then is in the table."""
    gpu_check = loaded()
    (tmp_path / "logs").mkdir()
    checked = gpu_check.Check(tmp_path, dict(os.environ), False)
    written = [
        {"key": "bf16", "row": {"tokens_per_second": 1234.5, "times_bf16": 1.0}},
        {"key": "M 1", "row": {"relative_error": 0.1}},
        {"key": "M 2", "row": {"relative_error": 0.1}},
        {"key": "te fp8", "skipped": "it is not installed"},
        {"key": "fp8", "failed": "RuntimeError: no such kernel"},
    ]
    program = f"import json; file = open({str(tmp_path / 'results.jsonl')!r}, 'a')\n"
    program += f"for line in {written!r}: print(json.dumps(line), file=file)\n"
    part = gpu_check.Part("steps", 60, (sys.executable, "-c", program + "raise SystemExit(1)"))
    checked.stage("first", [part], float("inf"))
    table = (tmp_path / "table.txt").read_text().splitlines()
    assert table[0].startswith("first: steps") and table[0].endswith("failed: exit code 1")
    assert [line.split() for line in table[1:3]] == [
        "bf16 1234 tokens/s, 1.00 x bf16".split(),
        "te fp8 skipped: it is not installed".split(),
    ]
    assert "no such kernel" in table[3] and table[4].strip() == "2 more rows are right"
    checked.note(began="later")
    checked.stage("first", [gpu_check.Part("device", 60, (sys.executable, "-c", ""))], float("inf"))
    assert (tmp_path / "table.txt").read_text().startswith("first: device")


def test_a_row_says_in_which_state_the_card_was() -> None:
    card = {"watts": 698.1, "sm_mhz": 1755.0, "memory_mhz": 2619.0, "celsius": 55.0}
    row = {"tokens_per_second": 1234.5, "memory_over_plan": 0.98, "card": card}
    assert loaded().figures_of(row) == ("1234 tokens/s, 0.980 x planned memory, 698 W at 1755 MHz")
    assert loaded().figures_of({"card": card, "relative_error": 0.1}) == ""


def test_parts_are_chosen_by_name_and_kept_in_one_file(tmp_path: Path) -> None:
    """A session on a GPU may bring back few files, and repeats what was mended alone."""
    done = check("first", "--only", "device", "product", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "no part is called product: use device, products" in done.stderr
    kept, given = tmp_path / "all.tar.gz", ("--commit", "0123abc", "--out", str(tmp_path / "out"))
    done = check("first", "--tiny", "--only", "device", "--archive", str(kept), *given)
    assert done.returncode == 0, done.stdout
    assert outcomes(tmp_path / "out") == {"device": "passed"}
    with tarfile.open(kept) as archive:
        names = archive.getnames()
        (result,) = [name for name in names if name.endswith("_runs-device.json")]
        file = archive.extractfile(result)
        assert file is not None and json.load(file)["commit"] == "0123abc"
    assert {"out/results.jsonl", "out/table.txt", "out/logs/first-device.txt"} < set(names)


def test_a_job_of_ones_own_needs_its_file(tmp_path: Path) -> None:
    for words in (["own"], ["first", "--config", "job.yaml"]):
        done = check(*words, "--out", str(tmp_path))
        assert done.returncode == 2 and "--config names the file of the stage" in done.stderr


SLOW = pytest.mark.slow


@pytest.mark.timeout(2400)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        pytest.param(
            "first",
            [
                "device",
                "products",
                "layers",
                "kernels",
                "tests",
                "command",
                "steps",
                "profile",
                "repeats",
                "more steps",
            ],
            marks=SLOW,
        ),
        pytest.param("ranks", ["reference", *loaded().LAYOUTS], marks=SLOW),
        pytest.param("runs", ["device", "products", "casts", "sdpa", "layers"], marks=SLOW),
        ("right", ["tests"]),
        pytest.param("fast", ["products", "layer 8192 tokens", "steps of 1.3b"], marks=SLOW),
        pytest.param("trains", ["losses", "continues", "repeats"], marks=SLOW),
    ],
)
def test_a_stage_at_tiny_shapes(stage: str, parts: list[str], tmp_path: Path) -> None:
    done = check(stage, "--tiny", "--workers", "0", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    assert outcomes(tmp_path) == dict.fromkeys(parts, "passed")
    assert {line["stage"] for line in lines(tmp_path) if "stage" in line} == {stage}
    assert not [line for line in lines(tmp_path) if "failed" in line and line["failed"]]
    assert all(f"{stage}: {part}" in done.stdout for part in parts)


@SLOW
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
def test_a_job_of_ones_own_at_tiny_shapes(tmp_path: Path) -> None:
    """A YAML file with a batch of its own is found to have run as it says."""
    job = tmp_path / "my_job.yaml"
    sizes = "num_layers: 1, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 2, "
    sizes += "encoder_seq_length: 32, max_position_embeddings: 32, tokenizer: {vocab_size: 512}"
    model = f"model: {{fp8: true, fp8_recipe: mxfp8, {sizes}}}\n"
    job.write_text(f"defaults: [pretrain_gpt, _self_]\n{model}")
    done = check("own", "--config", str(job), "--tiny", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout[-4000:]
    (row,) = (line["row"] for line in lines(tmp_path / "out") if "row" in line)
    assert row["precision"].startswith("FP8 mxfp8") and len(row["losses"]) == 20


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
def test_transformer_engines_stage_at_tiny_shapes(tmp_path: Path) -> None:
    """The optional fifth stage runs with Transformer Engine's own Python code on this CPU."""
    need_sources(DEFAULT_VERSION)
    done = check("te", "--tiny", "--workers", "0", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    assert outcomes(tmp_path) == dict.fromkeys(("tests", "layer", "steps", "trace"), "passed")
    rows = {line["key"]: line["row"] for line in lines(tmp_path) if "row" in line}
    assert rows["fp8 delayed"]["fp8_ran_by"] == ["emulated"]
    assert rows["te bf16"]["fp8_ran_by"] == []
    assert rows["te fp8 delayed"]["fp8_ran_by"] == ["another backend"]
    assert set(rows["tiny te fp8"]["fp8_share_by_kernel"]) == {"te emulated"}
    assert "replays bit for bit" in (tmp_path / "logs" / "te-trace.txt").read_text()
