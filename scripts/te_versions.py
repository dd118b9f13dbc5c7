"""Try every release of Transformer Engine from 2.4 on over the CPU's kernels, and write a table.

python -m scripts.te_versions [VERSION …] [--table FILE]

In a process of its own, each version imports all its modules for PyTorch and runs a linear and a
transformer layer forward and backward, in BF16, by four FP8 recipes and in NVFP4. The outputs and
gradients of the linear must be within the bounds of FP8's roundings of FP64 products, or in NVFP4
of sums of products of operands that are quantized by the version's rule, and differ from BF16's.
Rows of versions that are not named stay as they are. The exit code is 1 if a version fails, or if
PyPI has a release that is not known here.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import te_cpu
from fp8_numerics.nvfp4 import BLOCK, LARGEST, rotated
from megafp8.specs.te_versions import FIRST_WITH_NVFP4, is_before
from te_cpu import nv
from te_cpu.versions import DEFAULT_VERSION, HASHES, OLDEST, release_of
from te_cpu.wheel import PACKAGE

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/reference/te_versions.md"
RECIPES = {
    "BF16": None,
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
WITHOUT_DRAWS = {"nvfp4": {"disable_stochastic_rounding": True}}
"""Settings of recipes for the linear, whose results then follow from its tensors alone."""
ABSENT = "–"
"""The result of a recipe that a version does not have."""
SAME_RULE = tuple(name for name in RECIPES if name != "nvfp4")
"""The recipes whose bits are compared over versions; the rule of NVFP4 is another from 2.14 on."""
TOKENS, IN, OUT = 256, 128, 256
# An element's error in a cast: relative, and absolute below the smallest normal number, for scales
# of 1 and more. BF16 is what products are rounded to, and biases are not used.
E4M3, E5M2, BF16 = (2.0**-4, 2.0**-10), (2.0**-3, 2.0**-17), 2.0**-8
NOT_MODULES = ("transformer_engine.pytorch.setup",)  # builds the package
TEXT = """\
# Versions of Transformer Engine

`python -m scripts.te_versions` (`make nightly ARGS=te-versions`) has written this table: every
release on PyPI from 2.4 on, its own Python over the [kernels on a CPU](backends.md#on-a-cpu). Each
version imported all its modules but `setup`, and ran `Linear` and `TransformerLayer` forward and
backward. "ok" says that the linear's output and both gradients are within the bounds of FP8's
roundings of FP64 products, and that the layer's are finite; a recipe must also differ from BF16.
In `nvfp4` the linear rounds gradients to nearest, and "ok" says that its results are products of
operands in FP4 by the rule of the version (another one from 2.14 on), within the roundings of sums.
It is in 2.8 and later. "Same bits" compares all outputs and gradients of the other recipes with
those of {default}: the kernels are one set for all versions, so a difference would come from a
version's Python. Versions before 2.4 are refused: they keep the gradient quantizers of the MLP
elsewhere. No version was run on a GPU.

| version | modules | BF16 | delayed | tensorwise | blockwise | mxfp8 | nvfp4 | same bits |
|---|---|---|---|---|---|---|---|---|
"""


def main(argv: Sequence[str]) -> int:
    """Try versions and write their rows, beside those of others; return 1 if one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(tried_here(options.versions[0])))
        return 0
    usual = tried(DEFAULT_VERSION)
    rows, wrong = read_rows(options.table), []
    for version in options.versions or HASHES:
        results = usual if version == DEFAULT_VERSION else tried(version)
        rows[version] = row_of(version, results, usual)
        print(rows[version], flush=True)
        write_rows(options.table, rows)  # after each version: a night may be cut short
        wrong += [version] * bool(why_wrong(results))
    unknown = [] if options.versions else released_and_unknown()
    if unknown:
        print(f"not in te_cpu/versions.py: {', '.join(unknown)}")
    return int(bool(unknown or wrong))


def read_rows(table: Path) -> dict[str, str]:
    """Return the rows of an earlier table, by version; none if there is no file."""
    lines = table.read_text().splitlines() if table.exists() else []
    return {line.split(" ")[1]: line for line in lines if re.match(r"\| \d", line)}


def write_rows(table: Path, rows: dict[str, str]) -> None:
    """Write the table of the versions that were tried, in the order of their numbers."""
    text = TEXT.format(default=DEFAULT_VERSION)
    table.write_text(text + "".join(f"{rows[v]}\n" for v in HASHES if v in rows))


def tried(version: str) -> dict[str, str]:
    """Return the results of one version, tried in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "scripts.te_versions", "--one", version]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return {"modules": (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]}
    results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return results


def why_wrong(results: dict[str, str]) -> str:
    """Return the first result that is not as it must be, or an empty string."""
    wrong = (f"{name}: {results.get(name, 'not run')}" for name in RECIPES)
    bad = [text for text in wrong if not text.endswith((": ok", f": {ABSENT}"))]
    if not re.fullmatch(r"\d+", results.get("modules", "")):
        bad.insert(0, f"modules: {results.get('modules')}")
    return next(iter(bad), "")


def row_of(version: str, results: dict[str, str], usual: dict[str, str]) -> str:
    """Return the row of a version; `usual` are the results of the default one."""
    same = [name for name in SAME_RULE if results.get(f"{name} bits") == usual.get(f"{name} bits")]
    bits = "yes" if len(same) == len(SAME_RULE) else f"only {', '.join(same) or 'none'}"
    cells = [version, results.get("modules", ""), *(results.get(name, "–") for name in RECIPES)]
    return f"| {' | '.join(cell.replace('|', '/') for cell in [*cells, bits])} |"


def released_and_unknown() -> list[str]:
    """Return the releases on PyPI from the oldest one on that are not listed; none offline."""
    command = [sys.executable, "-m", "pip", "index", "versions", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = re.search(r"Available versions: (.*)", done.stdout)
    if line is None:
        print("PyPI could not be asked for its releases")
    versions = line[1].split(", ") if line else []
    return [v for v in versions if release_of(v) >= OLDEST and v not in HASHES]


def tried_here(version: str) -> dict[str, str]:
    """Return the results of one version, which this process loads."""
    warnings.simplefilter("ignore")
    te: Any = te_cpu.load(version)
    results = {"modules": imported(te)}
    outputs: dict[str, torch.Tensor] = {}
    for name, cls in RECIPES.items():
        if name == "nvfp4" and is_before(version, FIRST_WITH_NVFP4):
            results[name] = ABSENT
            continue
        digest = hashlib.sha256()
        try:
            found = run_linear(te, cls, **WITHOUT_DRAWS.get(name, {}))
            outputs[name] = found[0]
            results[name] = compared(name, found, outputs["BF16"], version)
            for tensor in (*found, *run_layer(te, cls)):
                if not torch.isfinite(tensor).all():
                    results[name] = "not finite"
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        except Exception as error:  # whatever a version does is its row's result
            results[name] = f"{type(error).__name__}: {str(error)[:120]}"
        results[f"{name} bits"] = digest.hexdigest()
    return results


def imported(te: Any) -> str:
    """Return the number of Transformer Engine's modules, or the first that cannot be imported."""
    modules = pkgutil.walk_packages(te.__path__, "transformer_engine.pytorch.", lambda name: None)
    names = [module.name for module in modules if module.name not in NOT_MODULES]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # an import may raise anything
            return f"{name}: {type(error).__name__}: {str(error)[:120]}"
    return str(len(names))


def in_fp8(te: Any, cls: str | None, **settings: bool) -> AbstractContextManager[Any]:
    """Return the FP8 region of a recipe, by the name that the version has for it."""
    te.module.base.FP8GlobalStateManager.reset()
    if cls is None:
        return nullcontext()
    recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), cls)(**settings)
    if hasattr(te, "autocast"):
        region: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=recipe)
    else:
        region = te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    return region


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input, weight and output gradient in BF16."""
    draw = torch.Generator().manual_seed(7)
    shapes = ((TOKENS, IN), (OUT, IN), (TOKENS, OUT))
    x, w, g = (torch.randn(shape, generator=draw).to(torch.bfloat16) for shape in shapes)
    return x, w, g


def run_linear(
    te: Any, cls: str | None, **settings: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output of a linear, and the gradients of its input and weight."""
    x, weight, grad = operands()
    linear = te.Linear(IN, OUT, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(weight)
    x.requires_grad_()
    with in_fp8(te, cls, **settings):
        out = linear(x)
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad, linear.weight.grad


def run_layer(te: Any, cls: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a transformer layer and the gradient of its input."""
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        IN, OUT, 4, self_attn_mask_type="causal", hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(TOKENS // 2, 2, IN, dtype=torch.bfloat16, requires_grad=True)
    with in_fp8(te, cls):
        out = layer(x)
    out.float().square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def compared(
    name: str,
    found: Sequence[torch.Tensor],
    in_bf16: torch.Tensor,
    version: str = DEFAULT_VERSION,
) -> str:
    """Return "ok", or which result of a linear is outside its bound of the exact product."""
    names = ("output", "input gradient", "weight gradient")
    products = in_nvfp4(version) if name == "nvfp4" else in_fp64(name)
    for result, what, (exact, bound) in zip(found, names, products, strict=True):
        if not bool(((result.double() - exact).abs() <= bound).all()):
            return f"{what} outside its bound"
    if name != "BF16" and torch.equal(found[0], in_bf16):
        return "as in BF16"
    return "ok"


def in_fp64(name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each product of a linear in FP64, and how far casts to FP8 and BF16 may move it."""
    x, w, g = (operand.double() for operand in operands())
    backward = E4M3 if name in ("blockwise", "mxfp8") else E5M2  # the recipes' own formats
    for left, right, of_left in ((x, w.t(), E4M3), (g, w, backward), (g.t(), x, backward)):
        bound = BF16 * (left.abs() @ right.abs())
        if name != "BF16":
            bound = bound + rounding(left, right, of_left) * (1 + BF16)
        yield left @ right, bound


def in_nvfp4(version: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each product of operands that are in FP4 by a version's rule, and its bound.

    The sum may be off by K * 2^-24 of the magnitudes, the factors of both operands by four
    roundings, and the result is rounded to BF16.
    """
    x, w, g = operands()
    both = ((x, w, BLOCK, False), (g, w.t(), BLOCK, False), (g.t(), x.t(), 1, True))
    for left, right, rows, rotates in both:
        a = fp4_values(left, version, rotates=rotates)
        b = fp4_values(right, version, rows=rows, rotates=rotates)
        exact = a @ b.t()
        yield exact, (a.shape[1] + 4) * 2.0**-24 * (a.abs() @ b.abs().t()) + BF16 * exact.abs()


def fp4_values(
    x_MK: torch.Tensor, version: str, *, rows: int = 1, rotates: bool = False
) -> torch.Tensor:
    """Return the values of x in NVFP4 with blocks of `rows` x 16, in FP64."""
    x_MK = (rotated(x_MK) if rotates else x_MK).float()
    amax = x_MK.abs().amax()
    number, scale = nv.quantize_rows(x_MK.contiguous(), rows, amax, None, release_of(version))
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(BLOCK, 1)
    return number.double() * wide.double() * (amax.double() / LARGEST)


def rounding(left: torch.Tensor, right: torch.Tensor, of_left: tuple[float, float]) -> torch.Tensor:
    """Return by how much a product may move when both operands are cast; the right one is E4M3."""
    off_left = of_left[0] * left.abs() + of_left[1]
    off_right = E4M3[0] * right.abs() + E4M3[1]
    return off_left @ right.abs() + left.abs() @ off_right + off_left @ off_right


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
