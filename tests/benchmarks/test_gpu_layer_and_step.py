"""The GPU benchmarks of a layer and a step run on a CPU with tiny shapes, but do not measure it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{program}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_tiny_layer(tmp_path: Path) -> None:
    variants = ("bf16", "fp8 delayed", "fp8 blockwise")
    done = run("gpu_layer.py", "--tiny", "--results", str(tmp_path), "--variants", *variants)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*_layer-128-128.json")
    rows = json.loads(path.read_text())["rows"]
    assert tuple(rows) == variants
    tokens, hidden = 2 * 64, 128
    linears = 6 * tokens * hidden * hidden * 12
    attention = 12 * 2 * 64 * 64 * hidden  # in full
    for row in rows.values():
        flops = row["flops_per_second_full"] * row["median_seconds"]
        assert flops == pytest.approx(linears + attention)
        assert row["floor_seconds"] < row["median_seconds"]
    assert rows["bf16"]["fp8_ran_by"] == [] and rows["bf16"]["times_bf16"] == 1
    assert rows["fp8 delayed"]["floor_seconds"] < rows["bf16"]["floor_seconds"]
    if not torch.cuda.is_available():
        assert rows["fp8 delayed"]["fp8_ran_by"] == ["emulated"]


@pytest.mark.slow
def test_tiny_steps(tmp_path: Path) -> None:
    variants = ("bf16", "fp8")
    done = run("gpu_step.py", "--tiny", "--results", str(tmp_path), "--variants", *variants)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = tmp_path.glob("*_step-tiny.json")
    rows = json.loads(path.read_text())["rows"]
    row, base = rows["tiny fp8"], rows["tiny bf16"]
    assert row["times_bf16"] == row["tokens_per_second"] / base["tokens_per_second"]
    assert row["memory_over_bf16"] == row["peak_memory_bytes"] / base["peak_memory_bytes"]
    assert row["bf16_share_of_peak"] == base["share_of_bf16_peak_causal"] > 0
    assert row["steps"] == 2 and row["precision"].startswith("FP8 delayed")
    assert row["tokens_per_second"] == pytest.approx(2 * 32 / row["step_seconds"])
    assert row["tflops_full"] > row["tflops_causal"] > 0 and row["last_loss"] > 0


def test_products_of_grouped_queries_and_gates_are_in_the_floor() -> None:
    """Llama-3-8B has Q and projection 4096 x 4096, K and V 1024 x 4096, three of 14336."""
    script = (
        "import sys; sys.path.insert(0, 'benchmarks');"
        "import argparse, gpu_step as g;"
        "spec = g.spec_of('llama-8b-shape', 'bf16', argparse.Namespace(accumulation=1));"
        "print(g.linear_flops_per_token(spec))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    weights = 8 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert float(done.stdout) == 6 * weights, done.stderr


def in_benchmarks(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, 'benchmarks');" + script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_a_variant_that_dies_keeps_the_others_rows(tmp_path: Path) -> None:
    """Any error of a variant is recorded, not only a user's error such as a missing package."""
    script = f"""
import gpu_layer
from megafp8.errors import ConfigError
plain = gpu_layer.measure
def measure(args, device, name, settings):
    if "model.fp8_recipe=tensorwise" in settings:
        raise ModuleNotFoundError("No module named 'a_backend'")
    if "model.fp8_backend=te" in settings:
        raise ConfigError("model.fp8_backend", "te", "it cannot run here", "use another")
    return plain(args, device, name, settings)
gpu_layer.measure = measure
sys.argv[1:] = ["--tiny", "--results", {str(tmp_path)!r}, "--variants", "bf16",
                "te bf16", "fp8 tensorwise", "fp8 delayed"]
gpu_layer.main()
"""
    done = in_benchmarks(script)
    assert done.returncode == 1, done.stderr
    (path,) = tmp_path.glob("*_layer-128-128.json")
    found = json.loads(path.read_text())
    assert list(found["rows"]) == ["bf16", "fp8 delayed"]
    assert "a_backend" in found["failed"]["fp8 tensorwise"]
    assert "model.fp8_backend=te" in found["skipped"]["te bf16"]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    keys = [line["key"] for line in lines]
    assert keys == ["bf16", "te bf16", "fp8 tensorwise", "fp8 delayed"], "as they come"


def test_each_variant_of_a_step_names_its_backend() -> None:
    """The setting `auto` might use Transformer Engine in the rows of our own engine."""
    script = """
import argparse, gpu_step as g
from megafp8.config.load import load
from megafp8.config.resolve import resolve
args = argparse.Namespace(accumulation=1)
for variant in ("bf16", "fp8", "te bf16", "te fp8"):
    spec = resolve(load([*g.settings_of("1.3b", variant, args), "trainer.accelerator=gpu"]),
                   lambda: True)
    print(spec.precision.backend, spec.precision.auto)
"""
    done = in_benchmarks(script)
    assert done.stdout.split("\n")[:4] == 2 * ["native None"] + 2 * ["te None"], done.stderr


def test_transformer_engine_can_run_what_it_is_compared_on() -> None:
    """Transformer Engine has only the tanh form of GELU."""
    script = """
import argparse, gpu_step as g
args = argparse.Namespace(accumulation=1)
print(*{g.spec_of(p, v, args).activation for p in ("125m", "1.3b", "5b") for v in g.VARIANTS
        if not v.startswith(("te", "torchao"))})
"""
    done = in_benchmarks(script)
    assert done.stdout.split() == ["gelu-tanh"], done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("program", ["gpu_layer.py", "gpu_step.py"])
def test_without_a_gpu_nothing_is_measured(program: str, tmp_path: Path) -> None:
    done = run(program, "--results", str(tmp_path))
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())
