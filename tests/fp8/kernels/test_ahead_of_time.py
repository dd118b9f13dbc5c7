"""What Triton's compiler makes of each kernel for a GPU, on a machine without one.

The tool is `ahead_of_time.py`; it compiles the kernels at the shapes of the presets' layers, for
each distinct binary once. Compiled, not run: it says nothing about speed or about a GPU's results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fp8.kernels.occupancy import resident_warps

ROOT = Path(__file__).parents[3]
ODD = "33x50:swiglu"  # nothing is a multiple of 16
E4M3, E5M2 = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"
BF16 = {"cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32"}
WIDER = "cvt.rn.f16x2.e4m3x2"  # FP16 has every number of E4M3, so that nothing is rounded
HALF = {"cvt.rn.f16x2.f32", "cvt.rn.f16.f32", WIDER}
MEAN = {"cvt.rn.f32.s32", "div.full.f32", "sqrt.approx.ftz.f32", "sqrt.approx.f32"}

# The roundings that a kernel may compile to. FP8 casts and scales are bit for bit the
# specification's: the device's own conversion, true divisions (div.rn). What `tl.sigmoid` and the
# means of a norm divide by (div.full: within 2 units of the last place) is held to the bounds of
# test_triton_gated.py, test_triton_activation.py and test_triton_norm.py before it is rounded.
ROUNDINGS: dict[str, set[str]] = {
    "_update_kernel": {"div.rn.f32"},
    "_cast_kernel": {E4M3, E5M2, *BF16},
    "_heads_kernel": {E5M2, "div.s32", *BF16},  # a token's sequence is a quotient of integers
    "_loss_kernel": {"div.full.f32", *BF16},
    "_transpose_kernel": set(),
    "_tensor_amax_kernel": set(),
    "_line_amax_kernel": set(),
    "_scale_kernel": {"div.rn.f32", "div.rn.f64", "cvt.rn.f32.f64"},
    "_line_cast_kernel": {E4M3},
    "_block_cast_kernel": {E4M3, "div.rn.f32"},
    "_mx_kernel": {E4M3},
    "_amax_kernel": {"cvt.rn.f32.f64", *BF16},  # the rotation
    "_fp4_kernel": {
        E4M3,
        "div.rn.f32",
        "cvt.rn.f32.f64",
        "cvt.rn.f32.u32",
        "cvt.rn.f32.s32",
        *BF16,
    },
    "_normalize_kernel": {E4M3, *BF16},
    "_statistics_kernel": MEAN | BF16,
    "_backward_kernel": MEAN | BF16,
    "_row_means_kernel": MEAN,
    "_tile_backward_kernel": BF16,
}
ADAM = ("_adam_kernel", "_adam_again_kernel")
RANDOM = {"cvt.rn.f32.s32", "cvt.rn.f32.u32"}  # random numbers and steps, which are exact
ROUNDINGS |= dict.fromkeys(ADAM, {"div.rn.f32", "sqrt.rn.f32", E4M3, *HALF, *BF16, *RANDOM})
SUMS = ("_amax_of_sum_kernel", "_write_sum_kernel")
ROUNDINGS |= {
    "_amax_of_sum_kernel": {WIDER},
    "_write_sum_kernel": {"div.rn.f32", E4M3, E5M2, *HALF},
}
ROUNDINGS["_squares_kernel"] = {WIDER}
BY_SIGMOID = ("swiglu", "gelu_tanh", "geglu_tanh")
CASTS = {"_cast_kernel", "_line_cast_kernel", "_normalize_kernel", "_heads_kernel"}
FP8_CASTS = {*CASTS, "_block_cast_kernel", "_mx_kernel"}
WARPS = {**dict.fromkeys((*CASTS, *ADAM, *SUMS), 24), "_block_cast_kernel": 8}
WARPS |= {"_mx_kernel": 16, "_fp4_kernel": 16, "_amax_kernel": 24}
NO_FTZ = (*ADAM, *SUMS, "_squares_kernel", "_mx_kernel", "_amax_kernel", "_fp4_kernel")
"""Kernels that lose no subnormal."""

# Kernels that read or write 1 or 2 bytes at a time at shapes of presets, and why.
SCALAR = {
    "_loss_kernel": "one logit a token, that of its target",
    "_mx_kernel": "a scale of 32 elements, by the order of its tile",
    "_fp4_kernel": "a scale of 16 elements, by the order of its tile",
}


@cache
def compiled(capability: int, *cases: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.fp8.kernels.ahead_of_time", str(capability)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([*command, *cases], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout)
    # scripts/tritons.py asks for another version than the one of this environment
    assert made["triton"] == os.environ.get("MEGAFP8_TESTS_TRITON", made["triton"])
    rows: list[dict[str, Any]] = made["binaries"]
    return rows


def case_of(preset: str) -> str:
    """Return the case of a preset's width, norm and activation."""
    keys: dict[str, Any] = {"normalization": "layernorm", "activation": "gelu"}
    keys |= yaml.safe_load((ROOT / f"conf/model/{preset}.yaml").read_text())
    activation = keys["activation"].removeprefix("fast-").replace("-", "_")
    if activation == "gelu" and keys.get("openai_gelu", False):
        activation = "gelu_tanh"
    return f"256x{keys['hidden_size']}:{keys['normalization']},{activation}"


PRESETS = sorted(
    path.stem for path in (ROOT / "conf/model").glob("*.yaml") if path.stem != "default"
)
TWO = (case_of("gpt3_1.3b"), case_of("llama3_8b"))
ON_HOPPER = (*TWO, ODD, "adam")
ALL = (*map(case_of, PRESETS), "256x16384:layernorm,rmsnorm", "256x4096:gelu,gelu_tanh,geglu")


def check(rows: list[dict[str, Any]], *, is_odd: bool, hardware: bool = True) -> None:
    for row in rows:
        call, kernel = row["call"], row["kernel"]
        what = f"{kernel} of {call}: {row}"
        roundings = {
            name
            for name in row["arithmetic"]
            if name.startswith(("div.", "rcp.", "sqrt.", "rsqrt.", "cvt.rn"))
        }
        if hardware:
            allowed = ROUNDINGS[kernel] | (
                {"div.full.f32"} if call.startswith(BY_SIGMOID) else set()
            )
            if call.startswith("cast of"):  # the tensor itself, which is not rounded to BF16
                allowed -= BF16
            assert roundings <= allowed, what
            in_e4m3 = kernel in ("_mx_kernel", "_block_cast_kernel")
            if kernel in FP8_CASTS and "backward" not in call and "turned heads [" not in call:
                wanted = E5M2 if "gradient" in call and not in_e4m3 else E4M3
                assert {E4M3, E5M2} & roundings == {wanted}, what
        if kernel in NO_FTZ:
            assert not any(".ftz" in name for name in row["arithmetic"]), what
        if kernel in (*ADAM, *SUMS):  # each operation is rounded by itself
            assert not any("fma." in name for name in row["arithmetic"]), what
        assert row["shared"] <= row["shared_limit"], what
        assert not row["fences"], f"an amax is raised without waiting: {what}"
        if is_odd:
            continue
        # a conversion with integers takes registers: one word may be stored and loaded again
        assert row["spills"] <= (0 if hardware else 2), what
        assert not row["scalar"] or kernel in SCALAR, what
        assert row["resident_warps"] >= WARPS.get(kernel, 0), what


def check_all(rows: list[dict[str, Any]], *, hardware: bool = True) -> None:
    odd = [row for row in rows if row["is_odd"]]
    even = [row for row in rows if not row["is_odd"]]
    assert odd and even
    check(odd, is_odd=True, hardware=hardware)
    check(even, is_odd=False, hardware=hardware)


@pytest.mark.parametrize("capability", [90, 100])
def test_casts_in_blocks(capability: int) -> None:
    """Packed for Blackwell; plain on Hopper, whose products are emulated.

    Hopper's are among what the presets compile, in a process that the next test needs too.
    """
    kernels = {"_mx_kernel", "_amax_kernel", "_fp4_kernel"}
    rows = compiled(100, "blocks") if capability == 100 else compiled(90, *ON_HOPPER)
    rows = [row for row in rows if row["kernel"] in kernels and not row["is_odd"]]
    check(rows, is_odd=False)
    assert kernels == {row["kernel"] for row in rows}
    stored = {
        row["kernel"] for row in rows if any(name.startswith("LDG") for name in row["scalar"])
    }
    assert not stored, "no matrix is read byte by byte"


def test_two_presets_and_an_odd_shape_on_hopper() -> None:
    rows = compiled(90, *ON_HOPPER)
    check_all(rows)
    missing = ROUNDINGS.keys() - {row["kernel"] for row in rows}
    assert missing == {"_row_means_kernel", "_tile_backward_kernel"}, "those of rows above 8192"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_every_preset(capability: int) -> None:
    rows = compiled(capability, *ALL, "33x50", "all_adam")
    check_all(rows)
    assert {row["kernel"] for row in rows} == ROUNDINGS.keys()


@pytest.mark.slow
def test_ampere_which_rounds_to_fp8_with_integers() -> None:
    rows = compiled(80, *TWO, ODD, "all_adam")
    roundings = {name for row in rows for name in row["arithmetic"]}
    assert not {E4M3, E5M2} & roundings
    for row in rows:
        assert row["shared"] <= row["shared_limit"], row
    check_all([row for row in rows if row["kernel"] in ADAM], hardware=False)


def test_resident_warps_follow_the_limits_of_an_sm() -> None:
    """The CUDA C++ programming guide's occupancy rules, by hand."""
    assert resident_warps(4, 182, 16384, 90) == 8  # 184 x 128 registers a block: two blocks
    assert resident_warps(8, 64, 16384, 90) == 32
    assert resident_warps(8, 32, 100 * 1024, 90) == 16  # shared memory: two blocks
    assert resident_warps(1, 16, 0, 90) == 32  # 32 blocks
