"""What all GPU benchmarks share says which card was measured, and in which state."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.limits import HANG_SECONDS

common = pytest.mark.parametrize("benchmark", ["gpu_common"], indirect=True)


@common
@pytest.mark.parametrize(
    ("name", "sheet", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 3.35e12),
        ("NVIDIA H200", "H200 SXM", 4.8e12),
        ("NVIDIA B200", "B200 SXM", 8e12),
        ("cpu", "H200 SXM", 4.8e12),
    ],
)
def test_each_card_has_its_own_peaks(
    benchmark: ModuleType, name: str, sheet: str, bandwidth: float
) -> None:
    assert benchmark.hardware_of(name).name == sheet
    assert benchmark.bytes_per_second(name) == bandwidth
    is_hopper = "B200" not in name
    assert benchmark.peak_flops(name, "bf16") == pytest.approx(989.4e12 if is_hopper else 2.25e15)
    assert benchmark.peak_flops(name, "fp8") == pytest.approx(1978.9e12 if is_hopper else 4.5e15)


@common
def test_a_row_has_the_moment_of_most_power(benchmark: ModuleType) -> None:
    """A field that a card does not have costs that reading, and no other."""
    said = (
        "1980, 2619, 120.5, 41\n1755, 2619, 698.1, 55\n[N/A], 2619, 700.0, 55\n345, 2619, 70, 40\n"
    )
    program = f"import time; print({said!r}, end='', flush=True); time.sleep(3600)"
    sensors = benchmark.Sensors([sys.executable, "-c", program])
    deadline = time.monotonic() + HANG_SECONDS
    while len(sensors._found) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sensors.since_last() == {
        "watts": 698.1, "sm_mhz": 1755, "memory_mhz": 2619, "celsius": 55, "readings": 3,
    }  # fmt: skip
    assert sensors.since_last() == {}


@common
def test_a_card_is_described_once_in_a_file(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "NVIDIA H100 80GB HBM3, 580.159.04, 81559, 700.00, 1980, 2619"
    command = [sys.executable, "-c", f"print({answer!r})"]
    monkeypatch.setattr(benchmark, "smi", lambda *options: command)
    monkeypatch.setenv(benchmark.COMMIT, "0123abc")
    name = "NVIDIA H100 80GB HBM3"
    path = benchmark.write_result(tmp_path, "gemm-1", name, "a product", {"rows": {}})
    written = json.loads(path.read_text())
    assert written["card"]["driver_version"] == "580.159.04"
    assert written["card"]["power.limit"] == "700.00" and written["data_sheet"] == "H100 SXM"
    assert written["commit"] == "0123abc"


@common
def test_a_card_that_says_nothing_stops_no_benchmark(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(benchmark, "smi", lambda *options: ["nvidia-smi"])
    monkeypatch.setattr(benchmark.subprocess, "run", late)
    assert "said nothing" in benchmark.card()["error"]


@common
def test_products_of_a_benchmark_add_up_as_those_of_a_run(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(benchmark, "prepare_process", lambda device, **_: prepared.append(device))
    assert benchmark.device_and_name() == (torch.device("cuda"), "a GPU")
    assert prepared == [torch.device("cuda")]
