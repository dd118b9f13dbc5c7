"""The pytest plugin: what tests, their conftest.py and their modules see at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import te_cpu
from tests.te_sources import need_sources

CONFTEST = "import transformer_engine.pytorch\n"
TESTS = '''
import torch

MAJOR = torch.cuda.get_device_properties(0).major
torch.cuda.manual_seed(3)
START = torch.cuda.get_rng_state()
GENERATOR = torch.Generator(device="cuda")
STREAM, EVENT = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)

import transformer_engine.pytorch as te
import transformer_engine_torch as tex


def test_a_gpu_is_answered():
    assert torch.cuda.is_available() and MAJOR == 9 and torch.cuda.device_count() == 1
    assert torch.cuda.memory_reserved() == 0 and torch.cuda.mem_get_info()[0] > 2**30
    torch.cuda.reset_peak_memory_stats(), torch.cuda.init()


def test_generators():
    assert isinstance(GENERATOR, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(1, torch.Generator)
    x = torch.randn(4, device="cuda", generator=GENERATOR.manual_seed(2))
    assert x.is_cuda and torch.equal(x, torch.randn(4, generator=torch.Generator().manual_seed(2)))
    torch.cuda.set_rng_state(START)
    first = torch.rand(3)
    torch.cuda.manual_seed_all(3)
    assert torch.equal(torch.rand(3), first)


def test_autocast_and_pinned_memory():
    x = torch.empty(16, 16, pin_memory=True).pin_memory().cuda(non_blocking=True)
    x.record_stream(STREAM)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = te.Linear(16, 16)(x.zero_())
    assert y.dtype == torch.bfloat16
    assert torch.amp.GradScaler("cuda").is_enabled()


def test_kernel_that_is_missing():
    tex.some_new_function()


def test_attention_in_fp8():
    from transformer_engine.common.recipe import DelayedScaling

    q = torch.zeros(16, 1, 4, 16, device="cuda", dtype=torch.bfloat16)
    with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_dpa=True)):
        te.DotProductAttention(4, 16)(q, q, q)


def test_graph():
    torch.cuda.CUDAGraph()


def test_wrong():
    assert MAJOR == 10
'''  # fmt: skip


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A pytest of its own, with the plugin, over tests that use a GPU at their top."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_layer.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "te_cpu", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(te_cpu.__file__).parents[1])}
    return subprocess.run(
        [*command, "-rs", f"--rootdir={folder}", str(folder)],
        capture_output=True, text=True, cwd=folder, env=environment, check=False,
    )  # fmt: skip


def test_tests_of_gpu_code_run(tmp_path: Path) -> None:
    """Skipped, where that is asked for, are those without a kernel, and no others."""
    need_sources("2.17.1")
    done = run(tmp_path, "--te-version", "2.17.1", "--te-skip-missing")
    assert "Transformer Engine 2.17.1, its own Python" in done.stdout
    assert "1 failed, 3 passed, 3 skipped" in done.stdout, done.stdout
    assert "transformer_engine_torch.some_new_function: the CPU stand-in" in done.stdout
    assert "transformer_engine_torch.fused_attn_fwd: the CPU stand-in" in done.stdout
    assert "torch.cuda.CUDAGraph: a CPU has no graphs of kernels" in done.stdout
    assert "assert 9 == 10" in done.stdout


def test_a_kernel_that_is_missing_fails_its_test(tmp_path: Path) -> None:
    """By default, and in the default version."""
    need_sources(te_cpu.DEFAULT_VERSION)
    done = run(tmp_path)
    assert f"Transformer Engine {te_cpu.DEFAULT_VERSION}, its own Python" in done.stdout
    assert "4 failed, 3 passed" in done.stdout and "MissingKernelError" in done.stdout


def test_a_version_that_cannot_be_had_is_a_usage_error(tmp_path: Path) -> None:
    done = run(tmp_path, "--te-version", "2.3.0")
    assert done.returncode == 4 and "2.3.0 is too old" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
