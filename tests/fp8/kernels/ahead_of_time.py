"""Compile Triton's kernels for a GPU that is not there, and say what the compiler made of them.

Each kernel is started by its own Python wrapper with real CPU tensors, so that argument order,
dtypes, constants, alignment and divisibility are those of a real call; a driver that only names a
target turns each launch into a compilation. ptxas, nvdisasm come with Triton's wheel.

It must run in a process of its own: the tests' process runs kernels in Triton's interpreter.

    python -m tests.fp8.kernels.ahead_of_time 90 256x2048:layernorm,gelu 33x50
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.compiled import FOLDER, KEPT, drop_old, facts_of
from tests.fp8.kernels import occupancy
from tests.fp8.kernels.occupancy import SHARED_LIMIT, resident_warps

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh")
_ARITHMETIC = r"\b((?:cvt|div|rcp|sqrt|rsqrt|fma)\.[\w.]+|\w+(?:\.\w+)*\.ftz\.[\w.]+)"
_SCALAR = re.compile(r"\b((?:LDG|STG)(?:\.\w+)*\.[US](?:8|16)(?:\.\w+)*)")


class _NamesATarget(DriverBase):
    """Triton's driver of a machine with no GPU: it can say for what to compile."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass


class Compilations:
    """Collects each distinct binary under the call that asked for it first."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.binaries: dict[str, tuple[str, bool, str, Any]] = {}
        self.call, self.is_odd = "", False
        driver.set_active(_NamesATarget(capability))
        in_truth = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            compiled = in_truth(kernel, *args, grid=grid, warmup=True, **options)
            name = kernel._fn_name.split(".")[-1]
            self.binaries.setdefault(compiled.hash, (self.call, self.is_odd, name, compiled))
            return compiled

        JITFunction.run = run  # type: ignore[method-assign]
        from fp8_numerics.kernels import triton_blocks, triton_current, triton_fp4, triton_tile
        from megafp8.fp8.kernels import triton_adam, triton_loss, triton_norm, triton_sums

        modules = (triton_adam, triton_blocks, triton_current, triton_fp4)
        for module in (*modules, triton_loss, triton_norm, triton_sums, triton_tile):
            # what the target does, not this machine
            module.casts_in_hardware = lambda device: capability >= 90  # type: ignore[attr-defined]

    def rows(self) -> Iterator[dict[str, Any]]:
        for call, is_odd, name, compiled in self.binaries.values():
            row = {"call": call, "is_odd": is_odd, "kernel": name}
            yield {**row, **known_facts(compiled, self.capability)}


def known_facts(compiled: Any, capability: int) -> dict[str, Any]:
    """Return the facts of a binary, which the tools are asked for once: each takes 0.1 s."""
    metadata = (triton.__version__, capability, compiled.metadata.num_warps)
    decided_by = (
        *(path.read_bytes() for path in (Path(__file__), Path(occupancy.__file__))),
        repr((*metadata, compiled.metadata.shared)).encode(),
        compiled.asm["ptx"].encode(),
        compiled.asm["cubin"],
    )
    found: dict[str, Any] = facts_of(decided_by, lambda: facts(compiled, capability))
    return found


def facts(compiled: Any, capability: int) -> dict[str, Any]:
    """Return registers, spills, shared memory, scalar accesses, conversions of one binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    num_warps = compiled.metadata.num_warps
    row = {
        "num_warps": num_warps,
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_LIMIT[capability],
        "scalar": dict(Counter(_SCALAR.findall(sass))),
        "fences": len(re.findall(r"\b(?:MEMBAR|CCTL)\b", sass)),
        "wide": len(re.findall(r"\b(?:LDG|STG)[\w.]*\.128\b", sass)),
        "arithmetic": dict(Counter(re.findall(_ARITHMETIC, compiled.asm["ptx"]))),
    }
    row["resident_warps"] = resident_warps(num_warps, row["registers"], row["shared"], capability)
    return row


def _tool(name: str, *args: str) -> str:
    done = subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True)
    return done.stdout


def call_all(found: Compilations, rows: int, cols: int, parts: tuple[str, ...]) -> None:
    """Call every wrapper with a [rows, cols] matrix of BF16 as the layers of a model do."""
    x = torch.zeros(rows, cols, dtype=torch.bfloat16)
    shape, found.is_odd = f"[{rows}, {cols}]", rows % 16 > 0 or cols % 16 > 0

    def say(what: str) -> None:
        found.call = f"{what} {shape}"

    _call_casts(say, x)
    _call_blocks(say, x, packed=found.capability >= 100)
    _call_heads(say, x)
    for kind in ACTIVATIONS:
        if kind in parts:
            _call_activation(say, x, kind)
    for norm in NORMS:
        if norm in parts:
            _call_norm(say, x, norm == "layernorm")


def _scalars() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a scale and an amax as they lie in a table: with no alignment of 16 bytes."""
    return torch.ones(8)[5], torch.zeros(8)[5]


def _call_casts(say: Any, x: torch.Tensor) -> None:
    from fp8_numerics.formats import E4M3, E5M2
    from fp8_numerics.kernels import triton_cast as casts
    from fp8_numerics.kernels import triton_current as current
    from megafp8.fp8.kernels import triton_loss as loss

    scale, amax = _scalars()
    say("cast of an input")
    casts.cast(x, scale, E4M3, amax=amax, with_columns=True)
    say("cast of an output gradient with the bias gradient")
    casts.cast(x, scale, E5M2, amax=amax, with_columns=True, with_sums=True)
    say("transpose")
    casts.transpose_payload(torch.zeros(x.shape, dtype=E4M3.dtype))
    say("tensorwise")
    current.scales_of(current.amax_of_matrix(x), E4M3, power_2=True)
    say("loss")
    targets = torch.zeros(x.shape[0], dtype=torch.int64)
    sums = loss.to_gradient(x, targets, -100)
    loss.to_gradient(x, targets, -(1 << 62), sums=sums)
    loss.token_sums(x, targets)
    say("rowwise")
    current.cast_rowwise(x, E4M3, power_2=True, with_columns=True)
    say("blocks")
    current.cast_blocks(x, E4M3, power_2=True, with_columns=True)
    say("square blocks")
    current.cast_square_blocks(x, E4M3, power_2=True, with_columns=True)


def _call_blocks(say: Any, x: torch.Tensor, *, packed: bool) -> None:
    """Cast for MXFP8 and, where blocks are whole, for NVFP4, in the form that the GPU reads."""
    from fp8_numerics.kernels.triton_blocks import cast_mx
    from fp8_numerics.kernels.triton_fp4 import amaxes_fp4, cast_fp4
    from fp8_numerics.nvfp4 import SIGN_BITS
    from fp8_numerics.philox import Counters, Rows

    rows, cols = x.shape
    say("blocks of 32")
    cast_mx(x, packed=packed, with_columns=True)
    say("blocks of 32 with the bias gradient")
    cast_mx(x, packed=packed, with_columns=True, with_sums=True)
    if rows % 16 or cols % 16:
        return
    say("FP4 with the bias gradient")
    amaxes, _ = amaxes_fp4(x, signs=SIGN_BITS, with_sums=True)
    places = Rows(*(torch.zeros(rows, dtype=torch.int64) for _ in range(2)))
    counters = Counters((1, 1 << 31), places, torch.zeros(cols // 16, dtype=torch.int64))
    for name, drawn in (("", None), (", stochastic", (counters, counters))):
        say(f"FP4{name}")
        cast_fp4(
            x, amaxes, signs=SIGN_BITS, square=False, packed=packed, counters=drawn,
            with_columns=True,
        )  # fmt: skip
    say("FP4 of a weight")
    amaxes_fp4(x, signs=None)
    cast_fp4(x, amaxes, signs=None, square=True, packed=packed, with_columns=packed)


def _call_heads(say: Any, x: torch.Tensor) -> None:
    """Split [rows, cols] into heads of 128, or of 10 where that is no divisor."""
    from fp8_numerics.formats import E5M2
    from megafp8.fp8.fused import CastInto
    from megafp8.fp8.heads import Heads
    from megafp8.models.positions import rotary
    from tests.tiny import of_heads

    scale, amax = _scalars()
    rows, cols = x.shape
    size = 128 if cols % 128 == 0 else 10
    num_heads = cols // size
    turn = rotary(torch.arange(rows), of_heads(size))
    for name, angles in (("heads", None), ("turned heads", (turn.cos, turn.sin))):
        heads = Heads(1, num_heads, num_heads, size, angles)
        say(name)
        parts = heads.parts(torch.zeros(rows, 3 * cols, dtype=x.dtype))
        grads = [torch.zeros_like(part.transpose(1, 2)).transpose(1, 2) for part in parts]
        say(f"{name}, gradient cast")
        into = CastInto(scale, E5M2, amax, True, True, False, with_sums=True)
        heads.cast_grads(grads, into)


def _call_activation(say: Any, x: torch.Tensor, kind: Any) -> None:
    from fp8_numerics.formats import E4M3, E5M2
    from fp8_numerics.kernels.triton_cast import GATED, cast

    scale, amax = _scalars()
    width = 2 * x.shape[1] if kind in GATED else x.shape[1]
    made_of = torch.zeros(x.shape[0], width, dtype=x.dtype)
    say(kind)
    cast(made_of, scale, E4M3, activation=kind, amax=amax, with_columns=True)
    say(f"{kind} backward")
    cast(made_of, scale, E4M3, activation=kind, grad_MN=x, with_rows=False, with_plain=True)
    say(f"{kind} gradient cast")
    cast(
        made_of,
        scale,
        E5M2,
        activation=kind,
        grad_MN=x,
        amax=amax,
        with_columns=True,
        with_sums=True,
    )


def _call_norm(say: Any, x: torch.Tensor, is_layernorm: bool) -> None:
    from fp8_numerics.formats import E4M3
    from megafp8.fp8.kernels.triton_norm import norm_backward, norm_cast

    scale, amax = _scalars()
    weight = torch.ones(x.shape[1], dtype=x.dtype)
    name, bias = ("layernorm", weight) if is_layernorm else ("rmsnorm", None)
    say(name)
    for addend in (None, x):
        made = norm_cast(
            x, weight, bias, 1e-5, scale, E4M3,
            out_dtype=x.dtype, addend_MD=addend, amax=amax, with_columns=True,
        )  # fmt: skip
    say(f"{name} backward")
    norm_backward(x, x, weight, made.statistics, x)


def call_blocks(found: Compilations) -> None:
    """Cast a matrix in blocks, and nothing else."""

    def say(what: str) -> None:
        found.call = what

    _call_blocks(say, torch.zeros(256, 4096, dtype=torch.bfloat16), packed=found.capability >= 100)


def call_updates(found: Compilations) -> None:
    """Roll the amax histories of `delayed` as recipes configure them."""
    from fp8_numerics.formats import E4M3
    from megafp8.fp8.kernels.triton_scales import update_scales
    from megafp8.fp8.scaling import ScaleTable
    from megafp8.specs import Fp8Recipe

    for length, algorithm in ((1024, "max"), (1, "most_recent")):
        found.call = f"scale update, history {length}, {algorithm}"
        recipe = Fp8Recipe(name="delayed", amax_history_len=length, amax_compute_algo=algorithm)
        table = ScaleTable(recipe, E4M3)
        for index in range(24):
            table.register(f"tensor {index}")
        update_scales(**table.tensors(), recipe=recipe, fmt=E4M3)


ADAM = (  # formats of parameter, moments and gradient; stochastic rounding; Adam with L2
    (("fp16", "fp32", "fp32", "fp8"), False, False),  # O1
    (("fp16", "fp8", "fp16", "fp8"), False, False),  # O2, O3
    (("fp16", "fp8", "fp16", "fp8"), True, True),
    (("fp32", "fp8", "fp16", "fp32"), False, False),  # embeddings, norms and biases at O2 and O3
)
MORE_ADAM = (  # parts that are switched alone
    (("bf16", "fp8", "fp16", "fp8"), True, False),
    (("fp8", "fp8", "fp16", "fp8"), False, True),
    (("fp16", "fp8", "fp8_e5m2", "fp8"), True, False),
    (("fp32", "bf16", "bf16", "fp32"), False, False),
)


def call_adam(found: Compilations, *, all_kinds: bool) -> None:
    """Update a weight of 512 x 512 by Adam; with `all_kinds` also one of an odd size."""
    from megafp8.fp8.scaled import Dither, ScaledTensor
    from megafp8.fp8.stored_formats import STORAGE_FORMATS
    from megafp8.optim.scaled_adam import NO_DITHERS, Constants, Tensors, update_triton

    shapes = ((512, 512), (33, 50)) if all_kinds else ((512, 512),)
    for names, stochastic, is_l2 in (*ADAM, *MORE_ADAM) if all_kinds else ADAM:
        for shape in shapes:
            found.is_odd = shape[1] % 16 > 0
            name, rounding = "Adam" if is_l2 else "AdamW", ", stochastic" if stochastic else ""
            found.call = f"{name} over {' '.join(names)}{rounding} {list(shape)}"
            tensors = [ScaledTensor.zeros(shape, STORAGE_FORMATS[kind]) for kind in names]
            dithers = (Dither(1), Dither(2), Dither(3)) if stochastic else NO_DITHERS
            constants = Constants(0.01, (0.9, 0.95), 1e-8, 0.1, is_l2, 1)
            update_triton(Tensors(*tensors), constants, dithers)


def call_sums(found: Compilations, *, all_kinds: bool) -> None:
    """Add products to a gradient of 512 x 512, and sum its squares."""
    from megafp8.fp8.kernels.triton_sums import sums_of_squares
    from megafp8.fp8.scaled import ScaledTensor, add_by_triton
    from megafp8.fp8.stored_formats import STORAGE_FORMATS

    found.is_odd = False
    for name in ("fp8", "fp8_e5m2", "fp16") if all_kinds else ("fp8",):
        stored = ScaledTensor.zeros((512, 512), STORAGE_FORMATS[name])
        for dtype in (torch.float32, torch.bfloat16) if all_kinds else (torch.float32,):
            for is_first in (True, False):
                found.call = f"{'first ' if is_first else ''}sum of {dtype} in {name}"
                add_by_triton(stored, torch.ones(512, 512, dtype=dtype), is_first=is_first)
        found.call = f"squares of {name}"
        sums_of_squares([stored])


def main(capability: str, *cases: str) -> None:
    """Print one JSON object with Triton's version and a row for each binary.

    A case is ROWSxCOLS:PART,PART, or `adam` or `all_adam` for the optimizer over stored tensors, or
    `blocks` for the casts of MXFP8 and NVFP4 alone.
    """
    found = Compilations(int(capability))
    if cases != ("blocks",):
        call_updates(found)
    for case in cases:
        if case == "blocks":
            call_blocks(found)
            continue
        if case in ("adam", "all_adam"):
            call_adam(found, all_kinds=case == "all_adam")
            call_sums(found, all_kinds=case == "all_adam")
            continue
        shape, _, parts = case.partition(":")
        rows, cols = map(int, shape.split("x"))
        call_all(found, rows, cols, tuple(parts.split(",")) if parts else (*NORMS, *ACTIVATIONS))
    drop_old(FOLDER / "facts", KEPT["facts"])
    json.dump({"triton": triton.__version__, "binaries": list(found.rows())}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
