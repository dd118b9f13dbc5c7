"""Count the launches and bytes of one layer: plain, fused, and the plain one compiled by torch.

    python -m benchmarks.compiled_layer

No device is used and nothing is timed. The plain and the fused layer run on meta tensors by the
paths of a GPU (tests/fp8/kernels/layer_counts.py). Of the compiled layer, Inductor's
scheduler gives the kernels and the bytes that they read and write (inductor_counts.py beside it).
The linears in it are operations of the graph: what runs within them is counted on meta tensors, and
attention is the same 1 + 3 launches. Bytes are those of passes over activations, for one token and
one unit of the model's width; products and attention's kernels are not in them.
"""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu_common import RESULTS
from megafp8.backends.native_block import FusedLayer
from megafp8.models.block import TransformerLayer
from tests.fp8.kernels.inductor_counts import fused_by_inductor
from tests.fp8.kernels.layer_counts import GPT, LLAMA, RECIPES, counting, second_microbatch

ATTENTION_LAUNCHES = 4
Counts = tuple[int, float]


def counted(settings: tuple[str, ...], *, only_linears: bool = False, fused: bool = True) -> Counts:
    """Return launches and bytes on meta tensors: of a layer, or of its linears alone."""
    with pytest.MonkeyPatch.context() as patch, counting(patch) as tally:
        if not fused:
            patch.setattr(FusedLayer, "forward", TransformerLayer.forward)
        second_microbatch(settings, tally, only_linears=only_linears)
        cost = tally.cost()
    return cost.launches, cost.activations


def main() -> None:
    """Print the table and write it to benchmarks/results."""
    rows: dict[str, dict[str, Counts]] = {}
    for shape, more in {"gpt": GPT, "llama": LLAMA}.items():
        for recipe, settings in RECIPES.items():
            words = (*settings, *more)
            inductor, linears = fused_by_inductor(words), counted(words, only_linears=True)
            launches = inductor[0] + linears[0] + ATTENTION_LAUNCHES
            rows[f"{shape} {recipe}"] = row = {
                "plain": counted(words, fused=False),
                "fused": counted(words),
                "compiled": (launches, inductor[1] + linears[1]),
                "of it by Inductor": inductor,
            }
            cells = (f"{name} {n} launches, {size:.1f} bytes" for name, (n, size) in row.items())
            print(f"{shape} {recipe}: {'; '.join(cells)}", flush=True)
    path = RESULTS / "2026-11-23_compiled-layer_counted.json"
    path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
