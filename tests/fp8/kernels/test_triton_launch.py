"""What a launch knows of its device: which GPU is the current one, and what it converts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from fp8_numerics.gemm import Engine
from fp8_numerics.kernels import triton_launch
from megafp8 import fp8
from megafp8.fp8 import scaling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_converted_model_launches_on_the_gpu_of_its_input(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU stands for a GPU that is not the current one; backward passes make it so themselves."""
    pytest.importorskip("triton")
    import triton.runtime.interpreter as interpreter

    current: list[torch.Tensor] = []
    launches: list[tuple[str, bool]] = []
    run = interpreter.InterpretedFunction.run

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def launched(kernel: Any, *args: Any, **options: Any) -> Any:
        launches.append((kernel.fn.__name__, bool(current)))
        return run(kernel, *args, **options)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launched)
    monkeypatch.setattr(scaling, "engine_of", lambda device: Engine(uses_triton=True))
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    state = fp8.convert(model, recipe)
    state.scaling.to(torch.device("cpu"))
    x = torch.randn(16, 32)
    with state.microbatch():
        loss = model(x).sum()
        with device_of(x):
            loss.backward()
    with torch.no_grad():
        model(x)
    assert len(launches) >= 6 and not [name for name, is_guarded in launches if not is_guarded]
    assert (recipe == "delayed") == any(name == "_update_kernel" for name, _ in launches)


def test_a_gpu_is_asked_once_what_it_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 18 launches of a layer wants to know it. By Triton 3.6, Ada rounds twice."""
    asked: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return (9, 0) if device.index == 0 else (8, 9)

    triton_launch.casts_in_hardware.cache_clear()
    monkeypatch.setattr(triton_launch, "interpreting", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    first, second = (torch.device("cuda", index) for index in (0, 1))
    for _ in range(3):
        assert triton_launch.casts_in_hardware(first)
        assert not triton_launch.casts_in_hardware(second)
    assert asked == [first, second]
    triton_launch.casts_in_hardware.cache_clear()
