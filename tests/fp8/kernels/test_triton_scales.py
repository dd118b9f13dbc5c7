"""All scales of a table in one launch: `ScaleTable.update`, bit for bit, over whole sequences."""

from __future__ import annotations

import pytest
import torch

from fp8_numerics.formats import FORMATS
from megafp8.fp8.kernels.triton_scales import update_scales
from megafp8.fp8.scaling import ScaleTable
from megafp8.specs import Fp8Recipe

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy


@pytest.mark.parametrize(
    ("name", "interval", "margin"), [("e4m3", 1, 0), ("e5m2", 3, 2)], ids=["plain", "spaced"]
)
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5, 1300])
def test_a_sequence_of_updates(
    device: torch.device, name: str, algo: str, length: int, interval: int, margin: int
) -> None:
    recipe = Fp8Recipe(
        amax_history_len=length,
        amax_compute_algo="max" if algo == "max" else "most_recent",
        interval=interval,
        margin=margin,
    )
    expected, table = (ScaleTable(recipe, FORMATS[name]) for _ in range(2))
    for tensor in "abcdef":
        expected.register(tensor)
        table.register(tensor)
    table.to(device)
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        staged = torch.rand(6, generator=generator) * 10 ** torch.randn(6, generator=generator)
        staged[step % 6] = [0.0, torch.inf, torch.nan, 1e-45][step % 4]
        expected.amax.copy_(staged)
        table.amax.copy_(staged)
        expected.update(None)
        before = table.quant_scale.clone()
        quant_scale, dequant_scale = update_scales(
            **table.tensors(), recipe=recipe, fmt=FORMATS[name]
        )
        assert torch.equal(table.quant_scale, before), "the old scales are a snapshot"
        assert torch.equal(dequant_scale, quant_scale.reciprocal())
        table.quant_scale = quant_scale
        for field, tensor in expected.tensors().items():
            assert torch.equal(table.tensors()[field].cpu(), tensor), (step, field)
    assert (expected.num_nonfinite > 0).any() and (expected.quant_scale != 1).any()


def test_an_empty_table(device: torch.device) -> None:
    """A pipeline stage may have no linear in FP8: no kernel is started, and there is no scale."""
    table = ScaleTable(Fp8Recipe(), FORMATS["e4m3"])
    found = update_scales(**table.tensors(), recipe=table.recipe, fmt=table.fmt)
    assert [scale.shape for scale in found] == [(0,), (0,)]
