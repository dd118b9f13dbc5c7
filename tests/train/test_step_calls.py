"""A whole training step calls few Python functions: a very small model is bound by them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fp8_numerics
import megafp8
from megafp8.ops import attention
from megafp8.specs import Fp8Recipe
from megafp8.train.step import train_step
from tests.c_kernels import need_kernels
from tests.tiny import build_run, gpt_spec, microbatch

PACKAGES = tuple(str(Path(str(each.__file__)).parent) for each in (megafp8, fp8_numerics))
COUNTED = (*PACKAGES, "<string>", str(Path(torch.nn.modules.__file__).parent / "module.py"))
"""The files whose calls are counted: ours, the constructors that dataclasses and named tuples
generate, and what a call of a module and a look-up of its parts need."""
MEASURED = {"fp32": 901, "delayed": 1747}
"""Calls of a step with one microbatch of a model of four layers, with Python 3.11; 3.12 calls no
function for a list's comprehension."""


def calls_of_a_step(fp8: Fp8Recipe | None) -> Counter[str]:
    """Count the calls of a third step by file and function."""
    state = build_run(model=gpt_spec(num_layers=4), fp8=fp8)
    found: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(COUNTED):
            found[f"{code.co_filename}:{code.co_qualname}"] += 1

    for number in range(3):
        sys.setprofile(look if number == 2 else None)
        try:
            train_step(state, [microbatch(number)])
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize("recipe", MEASURED)
def test_a_step_stays_short(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_kernels()
    monkeypatch.setattr(attention, "_MAY_CALL_ONEDNN", False)  # as on a CPU with AVX2
    found = calls_of_a_step(None if recipe == "fp32" else Fp8Recipe(name=recipe))
    most = 1.05 * MEASURED[recipe]  # so that a tenth more is too many
    assert found.total() <= most, (found.total(), found.most_common(20))
