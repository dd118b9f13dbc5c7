"""The script that runs Transformer Engine's own tests, over a few tests written here."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import te_cpu
from scripts import te_tests
from te_cpu.errors import MissingKernelError
from te_cpu.missing import missing
from tests.te_sources import need_sources

ROOT = Path(__file__).parents[2]
TESTS = """
import os, time
import tensorrt
import pytest, torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex

@pytest.mark.parametrize("size", range(20))
def test_passes(size):
    assert te.Linear(16, 16)(torch.zeros(16, 16, device="cuda")).is_cuda

def test_differs():
    assert torch.ones(1) == 2

def test_lacks():
    tex.some_new_function()

def test_graph():
    torch.cuda.CUDAGraph()

def test_memory():
    before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() > before

def test_package():
    import a_package_that_is_nowhere

def test_of_the_one_who_uses_what_the_file_imports():
    tensorrt.Logger()

def test_says_no():
    pytest.skip("not here")

def test_spins():
    while True:
        pass

def test_breaks():
    raise RuntimeError("planted")

def test_has_the_variables_of_its_own_ci():
    assert os.environ["NVTE_A"] == "1" and os.environ["NVTE_B"].endswith("/b")

def test_ends_the_process():
    os.kill(os.getpid(), 9)
"""


def test_each_test_gets_its_reason_and_a_file_that_does_not_load_counts(tmp_path: Path) -> None:
    """What ends the process or takes too long leaves the others their results."""
    need_sources(te_cpu.DEFAULT_VERSION)
    folder = tmp_path / "tests/pytorch"
    (folder / "distributed").mkdir(parents=True)
    (folder / "test_all.py").write_text(TESTS)
    (folder / "test_unloaded.py").write_text("import a_package_that_is_nowhere\n")
    (folder / "distributed/test_ep.py").write_text("\nif torch.cuda.device_count() < 4: ...\n")
    (tmp_path / "qa/L0_pytorch_unittest").mkdir(parents=True)
    (tmp_path / "qa/L0_pytorch_unittest/test.sh").write_text(
        "NVTE_A=2 python3 -m pytest $TE_PATH/tests/pytorch/debug/test_all.py\n"
        "NVTE_A=1 NVTE_B=$TE_PATH/b python3 -m pytest -x $TE_PATH/tests/pytorch/test_all.py || x\n"
    )
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "scripts.te_tests", str(tmp_path), te_cpu.DEFAULT_VERSION]
    command += ["--results", str(results), "--seconds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    outcomes = {
        test.rpartition("::")[2]: result["outcome"]
        for test, result in found["files"]["test_all.py"]["tests"].items()
    }
    assert {name: what for name, what in outcomes.items() if "passes" not in name} == {
        "test_differs": "value differs",
        "test_lacks": "lacks a kernel",
        "test_graph": "needs hardware",
        "test_memory": "needs hardware",
        "test_package": "needs a package",
        "test_of_the_one_who_uses_what_the_file_imports": "needs a package",
        "test_says_no": "skipped",
        "test_spins": "too slow",
        "test_breaks": "another error",
        "test_has_the_variables_of_its_own_ci": "passed",
        "test_ends_the_process": "another error",
    }
    assert [outcomes[f"test_passes[{size}]"] for size in range(20)] == ["passed"] * 20
    assert found["files"]["test_unloaded.py"]["unloaded"] == "needs a package"
    assert found["left_out"] == {
        "distributed/test_ep.py": "2: if torch.cuda.device_count() < 4: ..."
    }
    page = te_tests.table([results])
    assert "**21 of 130 pass (16%)**. Of a file 100 tests were drawn" in page
    assert f"The newest runs had torch {version('torch')}, " in page
    assert "`test_unloaded.py`: the file does not load: needs a package." in page
    assert "`test_all.py` `test_lacks`: 1 lacks a kernel. `MissingKernelError: " in page
    assert "- `distributed/test_ep.py`, line 2: `if torch.cuda.device_count() < 4: ...`" in page


def test_what_passed_of_the_same_draw_is_kept_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that had failed and for which the time is up again is not forgotten."""
    was = {"a::passed": "passed", "a::no": "skipped", "a::again": "too slow", "a::late": "too slow"}
    kept = {test: {"outcome": outcome, "error": ""} for test, outcome in was.items()}

    def run_here(file: Path, folder: Path, options: argparse.Namespace, lines: Path) -> None:
        plugin = te_tests.Sampled(lines, options)
        assert plugin.done == {"a::passed", "a::no"}
        plugin.say(collected=9)
        plugin.say(test="a::again", outcome="passed")
        os._exit(0)

    monkeypatch.setattr(te_tests, "_run_here", run_here)
    options = argparse.Namespace(sample=100, seed=1, seconds=1, seconds_of_file=1)
    file = tmp_path / "tests/pytorch/test_a.py"
    found = te_tests.run_file(file, tmp_path, options, tmp_path, kept)
    assert found["collected"] == 9
    outcomes = {test: result["outcome"] for test, result in found["tests"].items()}
    assert outcomes == was | {"a::again": "passed"}


def test_the_page_says_what_fails_anywhere_and_how_many_pass_without_the_file_of_onnx() -> None:
    name = "test_torch_compile.py"
    tests = {f"x/{name}::test_autocast_nested_custom": "another error", f"x/{name}::b": "passed"}
    both = {test: {"outcome": what, "error": "KeyError"} for test, what in tests.items()}
    asked = {"sample": 100, "seed": 1, "seconds": 6, "seconds_of_file": 9, "packages": {"a": "1"}}
    unloaded = {"unloaded": "needs a package", "error": "", "tests": {}}
    files = {
        name: {"collected": 2, "tests": both, **asked},
        "test_onnx_export.py": unloaded | asked | {"seconds": 60, "packages": {"a": "2"}},
    }
    page = te_tests.section({"version": "2", "left_out": {}, "all": [*files], "files": files})
    assert "**1 of 102 pass (1%)**, and without `test_onnx_export.py` 1 of 2 (50%). Of a" in page
    assert "A test had 6 to 60 seconds of the processor" in page
    assert "The newest runs had a 1 or 2.\n" in page
    assert "`test_autocast_nested_custom`: 1 fails anywhere. `qfactory` in the test" in page


@pytest.mark.parametrize(
    ("error", "line", "reason"),
    [
        (missing("fused_attn_fwd"), "", "needs hardware"),
        (missing("nvfp4_fused_scale"), "", "lacks a kernel"),
        (AssertionError("Tensor-likes are not close!"), "", "value differs"),
        (AssertionError("This test requires more than one GPU!"), "", "needs hardware"),
        (ZeroDivisionError(), "assert a > 6 * fwd_mem, b / fwd_mem", "needs hardware"),
        (ZeroDivisionError(), "assert a / b", te_tests.ERROR),
        (te_tests.TooSlowError(), "", "too slow"),
    ],
)
def test_a_reason_is_what_the_error_says(error: Exception, line: str, reason: str) -> None:
    assert te_tests.reason_of(error, line) == reason
    outer = RuntimeError("in a backward pass")
    outer.__cause__ = error
    if isinstance(error, MissingKernelError | te_tests.TooSlowError):
        assert te_tests.reason_of(outer) == reason


def test_the_page_has_no_test_without_a_reason_and_explains_values_that_differ() -> None:
    page = te_tests.TABLE.read_text("utf-8")
    failures = [line for line in page.splitlines() if line.startswith("- `test") or "/test" in line]
    assert failures
    for line in failures:
        assert te_tests.ERROR not in line
        assert not re.search(r"value differs\. `\w*(Error|Failed): ", line), "it is not explained"
