"""Check that each operation that a run needs works on this GPU, and is right.

device    versions, and the speed of a copy and of one BF16 product
products  `torch._scaled_mm` in each layout, number of rows, bias and result, against float64
casts     each recipe's casts of a large tensor, bit for bit against torch's operations; bytes/s
sdpa      which kernels attention starts, forward and backward
layers    a layer of each recipe, forward and backward: finite, and close to BF16

python benchmarks/gpu_runs.py products --results DIR
python benchmarks/gpu_runs.py layers --tiny --results DIR    # check on a CPU that it runs
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from gpu_common import RESULTS, Results, device_and_name, spread, timed

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.cast import spread as spread_scale
from fp8_numerics.gemm import EMULATED, GemmCounter, gemm
from fp8_numerics.scaled_mm import BLOCK, PACKED, Layout, scaled_mm
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.engine import engine_of, unsupported
from megafp8.fp8.quantizer import Role, WantsFp8
from megafp8.fp8.scaling import ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.recipes import RECIPES, find_recipe

Row = dict[str, Any]
FARTHEST = {"e2m1": 0.8}
"""How far a layer's gradient may be from BF16's, relatively; 0.2 for FP8.

The numbers of E2M1 are four times as far apart as those of E4M3, with two bits less. On a CPU, with
16 to 512 tokens of the same width, NVFP4 was 0.31 to 0.37 away, and FP8 0.07 to 0.12."""
PAIRS: tuple[tuple[Layout, Layout], ...] = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("block", "block"),
    ("block", "square"),
    ("square", "block"),
    ("mx", "mx"),
    ("nv", "nv"),
)


def device_rows(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the checks of the device itself, each with its name."""
    yield "versions", versions
    runs, size = (2, 64) if tiny else (20, 8192)
    a = torch.randn(size, size, device=device).bfloat16()
    num_bytes = a.nbytes if tiny else 2**31  # 40 times an H100's second-level cache

    def copy() -> Row:
        source = torch.ones(num_bytes, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        times = spread(timed(lambda: target.copy_(source), device, 2, runs))
        return {**times, "bytes_per_second": 2 * num_bytes / times["median_seconds"]}

    def product() -> Row:
        times = spread(timed(lambda: a @ a, device, 2, runs))
        return {**times, "flops_per_second": 2 * size**3 / times["median_seconds"]}

    yield f"copy of {num_bytes} bytes", copy
    yield f"BF16 product, {size} cubed", product


def versions() -> Row:
    """Return the versions of Python, torch, CUDA and Triton, and the device's properties."""
    found: Row = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "capability": torch.cuda.get_device_capability(),
            "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError as error:
        found["triton"] = str(error)
    return found


def product_rows(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the checks of FP8 products in all forms that the device supports."""
    rows = (1, 33) if tiny else (1, 4, 33, 128, 8192)
    for pair, num_rows, has_bias, dtype in itertools.product(
        PAIRS, rows, (False, True), (torch.bfloat16, torch.float32)
    ):
        if device.type == "cpu" and "tensor" not in pair:
            continue  # torch's CPU product takes scales of tensors, and of rows for some sizes
        if "tensor" not in pair and dtype == torch.float32:
            continue  # products with other scales are needed in BF16 only
        if any(unsupported(device, layout) for layout in pair) and device.type == "cuda":
            continue
        name = f"{'x'.join(pair)} M {num_rows}{' bias' if has_bias else ''} {dtype}"
        yield name, lambda p=pair, m=num_rows, b=has_bias, d=dtype: product_row(device, p, m, b, d)


def product_row(
    device: torch.device, pair: tuple[Layout, Layout], rows: int, has_bias: bool, dtype: torch.dtype
) -> Row:
    """Run one product, and compare it with float64. It raises if torch refuses the product."""
    cols, inner = 256, 512
    generator = torch.Generator(device).manual_seed(rows)
    if pair[0] in PACKED:
        return packed_row(device, pair[0], (rows, cols, inner), has_bias, generator)
    operands, exact = [], []
    for layout, size in zip(pair, (rows, cols), strict=True):
        payload = torch.randn(size, inner, device=device, generator=generator)
        payload = payload.to(torch.float8_e4m3fn)
        blocks = (-(-size // BLOCK), inner // BLOCK)
        shape: tuple[int, ...] = {
            "tensor": (), "row": (size, 1), "block": (size, blocks[1]), "square": blocks
        }[layout]  # fmt: skip
        scale = torch.rand(shape, device=device, generator=generator) + 0.5
        block = {"tensor": None, "row": (1, inner), "block": (1, BLOCK), "square": (BLOCK, BLOCK)}
        operands.append((payload, scale))
        exact.append(payload.double() * spread_scale(scale, payload.shape, block[layout]).double())
    bias = torch.randn(cols, device=device, generator=generator).bfloat16() if has_bias else None
    (a, a_scale), (b, b_scale) = operands
    found = scaled_mm(a, b, a_scale, b_scale, layouts=pair, out_dtype=dtype, bias_N=bias)
    wanted = exact[0] @ exact[1].t() + (0 if bias is None else bias.double())
    error = float((found.double() - wanted).norm() / wanted.norm())
    bound = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    return {"relative_error": error, "is_right": error < bound}


def packed_row(
    device: torch.device,
    layout: Layout,
    sizes: tuple[int, int, int],
    has_bias: bool,
    generator: torch.Generator,
) -> Row:
    """Run one product of operands that a recipe's kernel has packed, with a result in BF16."""
    rows, cols, inner = sizes
    names = {find_recipe(name).traits.packs: name for name in RECIPES}
    state = ScalingState(Fp8Recipe(name=names[layout], backward_format="e4m3"))
    state.to(device)
    quantizer = linear_quantizer(state, "linear")
    assert quantizer is not None
    tensors = [
        torch.randn(size, inner, device=device, generator=generator).bfloat16()
        for size in (rows, cols)
    ]
    bias = torch.randn(cols, device=device, generator=generator).bfloat16() if has_bias else None
    roles: tuple[Role, Role] = ("input", "weight")
    a, b = (
        quantizer.operands(role, x, with_first=False)[0].along_last
        for role, x in zip(roles, tensors, strict=True)
    )
    assert isinstance(a, Fp8Tensor) and isinstance(b, Fp8Tensor)
    counter = GemmCounter()
    found = gemm(
        a, b, work=torch.bfloat16, counter=counter, place="output", transpose_b=True, bias=bias,
        engine=state.engine,
    )  # fmt: skip
    values = [
        x.dequantize(torch.float32).double() * (1 if x.outer is None else x.outer.double())
        for x in (a, b)
    ]
    wanted = values[0] @ values[1].t() + (0 if bias is None else bias.double())
    error = float((found.double() - wanted).norm() / wanted.norm())
    ran = sorted(counter.fp8_backends)
    return {"relative_error": error, "fp8_ran_by": ran, "is_right": error < 2.0**-8}


def cast_rows(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the checks of each recipe's casts of each operand."""
    shape = (64, 128) if tiny else (32768, 4096)  # 256 MB: several times a second-level cache
    roles: tuple[Role, ...] = get_args(Role)
    for recipe, role in itertools.product(RECIPES, roles):
        yield f"{recipe} {role}", lambda n=recipe, r=role: cast_row(device, n, r, shape, tiny)


def cast_row(device: torch.device, name: Any, role: Role, shape: Any, tiny: bool) -> Row:
    """Cast in both orientations by the device's own engine and by torch's operations; compare."""
    by_tensor = name in ("delayed", "tensorwise")
    recipe = Fp8Recipe(
        name=name, backward_format="e5m2" if by_tensor else "e4m3", power_2_scale=not by_tensor
    )
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, device=device, generator=generator).bfloat16()
    found, run = [], lambda: None
    for engine in (EMULATED, engine_of(device)):
        state = ScalingState(recipe)
        quantizer = linear_quantizer(state, "linear")
        assert quantizer is not None
        state.to(device)
        state.engine = engine
        tensor = quantizer.tensors[role]
        run = partial(tensor.rule.operands, tensor, x, WantsFp8(True, True))
        found.append(run()[0])
    same = all(same_tensor(a, b) for a, b in zip(*found, strict=True))
    times = spread(timed(run, device, 2, 2 if tiny else 20))
    moved = find_recipe(name).traits.cost.bytes_of_cast * x.numel()
    rate = {"bytes_per_second": moved / times["median_seconds"]}
    return {**times, **rate, "by_triton": engine_of(device).uses_triton, "is_right": same}


def same_tensor(a: Fp8Tensor | None, b: Fp8Tensor | None) -> bool:
    """Whether payload and scale of two FP8 tensors are the same bits, or both tensors are None."""
    if a is None or b is None:
        return a is b
    a, b = a.plain(), b.plain()
    payloads = (t.payload.contiguous().view(torch.uint8) for t in (a, b))
    shapes = (tuple(t.payload.shape) for t in (a, b))
    scales = (
        spread_scale(t.dequant_scale, t.payload.shape, t.block).expand(s)
        for t, s in zip((a, b), shapes, strict=True)
    )
    same_factor = (a.outer is None) == (b.outer is None) and (
        a.outer is None or torch.equal(a.outer, b.outer)
    )
    return torch.equal(*payloads) and torch.equal(*scales) and same_factor


def sdpa_rows(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the check that names the kernels of attention."""

    def row() -> Row:
        shape = (1, 2, 64, 64) if tiny else (4, 32, 2048, 128)
        q, k, v = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        kernels = {
            event.name for event in profile.events() or [] if "attention" in event.name.lower()
            or (device.type == "cuda" and event.device_type == torch.autograd.DeviceType.CUDA)
        }  # fmt: skip
        return {"kernels": sorted(kernels)}

    yield "attention", row


def layer_rows(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the checks of a layer in each recipe; the first one is the layer in BF16."""
    import gpu_layer

    args = argparse.Namespace(hidden=4096, heads=32, batch=1, seq=2048)
    if tiny:
        args = argparse.Namespace(hidden=128, heads=2, batch=2, seq=64)
    settings = {"bf16": gpu_layer.VARIANTS["bf16"]}
    settings |= {name: (*gpu_layer.FP8, f"model.fp8_recipe={name}") for name in RECIPES}
    base: dict[str, torch.Tensor] = {}

    def row(name: str) -> Row:
        """Run two microbatches, so that the second one has scales from the first."""
        state = gpu_layer.state_of(args, device, settings[name])
        run = gpu_layer.one_run(state, args, device)
        run()
        grad = run()
        if name == "bf16":
            base["grad"] = grad
        assert "grad" in base, "the BF16 layer failed"
        is_finite = bool(torch.isfinite(grad).all())
        error = float((grad.float() - base["grad"].float()).norm() / base["grad"].float().norm())
        backends = sorted(state.counter.fp8_backends)
        numbers = "" if name == "bf16" else find_recipe(name).traits.numbers
        return {
            "relative_difference_to_bf16": error,
            "fp8_ran_by": backends,
            "is_right": is_finite and error < FARTHEST.get(numbers, 0.2),
        }

    for name in settings:
        yield name, lambda n=name: row(n)


PARTS = {
    "device": device_rows,
    "products": product_rows,
    "casts": cast_rows,
    "sdpa": sdpa_rows,
    "layers": layer_rows,
}


def main() -> None:
    """Run the checks of one part, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="check on any device: small shapes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, name = device_and_name()
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device to check (--tiny checks that this program runs)")
    results = Results(args.results, f"runs-{args.part}", name, __doc__.splitlines()[0])
    for key, row in PARTS[args.part](device, args.tiny):
        try:
            found = row()
        except Exception as error:
            results.fail(key, f"{type(error).__name__}: {error}")
            continue
        if not found.get("is_right", True):
            results.fail(key, f"wrong: {found}")
            continue
        results.add(key, found)
        print(f"{key:>40}  {found}", flush=True)
    sys.exit(results.exit_code())


if __name__ == "__main__":
    main()
