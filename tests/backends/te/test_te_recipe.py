"""Recipe objects for Transformer Engine: against the fields of its real classes, which swallow
what they do not know; and against the classes themselves where their sources are at hand."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megafp8.backends.te import recipe as te_recipe
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import ModuleRule
from te_cpu import wheel
from tests.backends.te.recipe_signatures import VERSIONS, MMParams, QParams, recipe_classes
from tests.te_sources import need_sources

ROOT = Path(__file__).parents[3]
DELAYED = Fp8Recipe(
    margin=2, amax_history_len=7, amax_compute_algo="most_recent", reduce_amax=False,
    backward_format="e4m3",
)  # fmt: skip
TENSORWISE = Fp8Recipe(
    name="tensorwise", power_2_scale=True, fast_accumulation=frozenset({"grad_weight"})
)
BLOCKWISE = Fp8Recipe(name="blockwise", backward_format="e4m3", fast_accumulation=frozenset())


@pytest.mark.parametrize("version", VERSIONS)
def test_delayed(version: str) -> None:
    made = te_recipe.make_te_recipe(DELAYED, classes := recipe_classes(version))
    assert type(made).__name__ == "DelayedScaling"
    assert made.margin == 2 and made.amax_history_len == 7 and not made.reduce_amax
    assert made.amax_compute_algo == "most_recent" and made.fp8_format is classes.Format.E4M3
    hybrid = te_recipe.make_te_recipe(Fp8Recipe(), classes)
    assert hybrid.fp8_format is classes.Format.HYBRID and hybrid.amax_history_len == 1024


@pytest.mark.parametrize("version", VERSIONS)
def test_tensorwise(version: str) -> None:
    """Power-of-two scales reach what modules read, `fp8_quant_*`; accumulation per GEMM."""
    made = te_recipe.make_te_recipe(TENSORWISE, recipe_classes(version))
    assert type(made).__name__ == "Float8CurrentScaling"
    for name in te_recipe.QUANTIZERS:
        assert getattr(made, name) == QParams(power_2_scale=True)
    assert made.fp8_gemm_fprop == made.fp8_gemm_dgrad == MMParams(use_split_accumulator=True)
    assert made.fp8_gemm_wgrad == MMParams(use_split_accumulator=False)


def test_blockwise_and_what_a_version_lacks() -> None:
    made = te_recipe.make_te_recipe(BLOCKWISE, recipe_classes("2.12.0"))
    assert type(made).__name__ == "Float8BlockScaling"
    assert not made.fp8_quant_fwd_inp.power_2_scale and made.use_f32_scales
    classes = recipe_classes("2.4.0")
    del classes.Float8BlockScaling
    with pytest.raises(ValueError, match="Float8BlockScaling"):
        te_recipe.make_te_recipe(BLOCKWISE, classes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"name": "rowwise"}, "rowwise"),
        ({"interval": 2}, "every update"),
        ({"high_precision_gemms": frozenset({"grad_weight"})}, "all products in FP8"),
        ({"name": "tensorwise", "high_precision_gemms": frozenset({"grad_input", "grad_weight"})},
         "all products in FP8"),
        ({"fast_accumulation": frozenset()}, "the two backward products alone"),
        ({"name": "blockwise"}, "precisely in all products"),
        ({"pad_inner_dim": True}, "pad"),
        ({"modules": (ModuleRule("*.fc1", "tensorwise"),)}, "under one recipe"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        te_recipe.make_te_recipe(
            dataclasses.replace(Fp8Recipe(), **changes), recipe_classes("2.20.2")
        )


def test_an_argument_that_is_swallowed_is_found() -> None:
    classes = recipe_classes("2.12.0")

    def forgetful(self: Any, **given: Any) -> None:
        self.__dict__.update(given | {"margin": 0})

    classes.DelayedScaling.__init__ = forgetful
    with pytest.raises(ValueError, match="did not take margin=2"):
        te_recipe.make_te_recipe(DELAYED, classes)


PROGRAM = """
import os
os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its build's own switch: no CUDA library is loaded
import transformer_engine.common.recipe as real
from tests.backends.te import test_te_recipe as t

made = t.te_recipe.make_te_recipe(t.DELAYED, real)
assert repr(made).startswith(("recipe_type=DelayedScaling", "margin=2")), made
assert (made.margin, made.amax_history_len, made.reduce_amax) == (2, 7, False)
assert made.amax_compute_algo == "most_recent" and made.fp8_format is real.Format.E4M3
assert isinstance(made, real.DelayedScaling) and isinstance(made, real.Recipe)
current = t.te_recipe.make_te_recipe(t.TENSORWISE, real)
assert current.fp8_quant_bwd_grad.power_2_scale and current.float8_current_scaling()
assert not current.fp8_gemm_wgrad.use_split_accumulator
assert not real.Float8CurrentScaling().fp8_quant_bwd_grad.power_2_scale  # the class is untouched
real.Float8CurrentScaling(margin=3, fp8_fromat=1)  # swallowed: why we check ourselves
if hasattr(real, "Float8BlockScaling"):
    block = t.te_recipe.make_te_recipe(t.BLOCKWISE, real)
    assert not block.fp8_quant_fwd_inp.power_2_scale and block.float8_block_scaling()
if "backward_override" in real.Float8CurrentScaling.__dataclass_fields__:
    assert current.backward_override is None, "the environment's override must not leak in"
print("ok")
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_real_classes(version: str) -> None:
    """In a process of its own: importing the package changes this one."""
    if version != wheel.DEFAULT_VERSION and not wheel.is_cached(version):
        pytest.skip(f"not in the cache: run `python -m te_cpu {version}`")
    need_sources(version)
    path = os.pathsep.join((str(wheel.sources(version).folder), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "NVTE_BACKWARD_OVERRIDE": "high_precision",
                   "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "0"}  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr
