"""Transformer Engine's NVFP4 with an amax for each row, and with the better of two scales.

For the versions that have both: from 2.17 on.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from te_cpu.errors import SizeError
from tests.backends.te.real import autocast, linears, recipes
from tests.backends.te.real_nvfp4 import IN_SQUARES, ROTATED, matrix_of, quantizer, sides_of
from tests.spec import nvfp4
from tests.spec.data import data


def test_what_a_gpu_refuses_beside_scaled_rows_and_two_scales() -> None:
    x = torch.ones(32, 64, dtype=torch.bfloat16)
    with pytest.raises(SizeError, match="columns are asked for"):
        quantizer(row_scaled_nvfp4=True)(x)
    for settings in (ROTATED, IN_SQUARES, {"stochastic_rounding": True}):
        with pytest.raises(SizeError, match=f"and {next(iter(settings))} is asked for"):
            quantizer(row_scaled_nvfp4=True, columnwise=False, **settings)(x)
    for settings in (ROTATED, {"stochastic_rounding": True}):
        with pytest.raises(SizeError, match=f"and {next(iter(settings))} is asked for"):
            quantizer(nvfp4_use_4over6=True, **settings)(x)


@pytest.mark.parametrize("largest", [448, 256])
def test_scaled_rows_and_the_better_of_two_scales(largest: int) -> None:
    """Bytes, scales and amaxes of the specification on both sides; values in FP64 within the
    roundings of their factor; a tensor that is written again takes what it needs."""
    x = torch.from_numpy(data("wide")).bfloat16()
    made_by = quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=largest, nvfp4_4over6_err_mode="MSE")
    made = made_by(x)
    for side, (codes, scales, amax) in sides_of(made).items():
        exact = nvfp4.four_over_six(matrix_of(side, x, rotates=False), 1, largest, squared=True)
        assert amax == exact.amax and np.array_equal(codes, exact.codes)
        assert np.array_equal(scales, exact.scale_codes)
        if side == "rowwise":
            values = exact.unscaled * float(exact.amax) / (6 * largest)
            found = made.dequantize(dtype=torch.float32).double()
            np.testing.assert_allclose(found, values, rtol=4 * 2.0**-24)
    by_row = quantizer(
        columnwise=False, row_scaled_nvfp4=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=largest
    )
    for rows in (by_row(x), by_row.update_quantized(x, quantizer(columnwise=False)(x))):
        assert rows._row_scaled_nvfp4 and rows._amax_rowwise.shape == (32,)
        assert rows._nvfp4_use_4over6 and rows._nvfp4_e4m3_max == largest
        exact_rows = [
            nvfp4.four_over_six(row, 1, largest) for row in np.split(x.float().numpy(), len(x))
        ]
        assert np.array_equal(rows._amax_rowwise, [row.amax for row in exact_rows])
        factors = [float(row.amax) / (6 * largest) for row in exact_rows]
        values = np.concatenate([row.unscaled for row in exact_rows]) * np.array(factors)[:, None]
        found = rows.dequantize(dtype=torch.float32).double()
        np.testing.assert_allclose(found, values, rtol=4 * 2.0**-24)


def test_a_linear_with_scaled_rows_and_two_scales() -> None:
    """Its output is the product of the values in FP64, within the bound of sums in FP32."""
    recipe = recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True,
        nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights",
        backward_override="high_precision",
    )  # fmt: skip
    theirs, _, x, grad = linears(torch.float32, octaves=2)
    x = x.requires_grad_()
    with autocast(recipe):
        out = theirs(x)
    out.backward(grad)
    rows = x.detach().reshape(-1, x.shape[-1]).numpy()
    parts = [nvfp4.four_over_six(row) for row in np.split(rows, len(rows))]
    left = np.concatenate([part.values for part in parts])
    weight = nvfp4.four_over_six(theirs.weight.detach().numpy(), 16, 256)
    right = weight.unscaled * float(weight.amax) / (6 * 256)
    bound = (left.shape[1] + 8) * 2.0**-24 * (np.abs(left) @ np.abs(right.T))
    found = out.detach().double().reshape(len(left), -1).numpy()
    assert (np.abs(found - left @ right.T) <= bound).all()
    wanted = grad.double() @ theirs.weight.detach().double()
    torch.testing.assert_close(x.grad.double(), wanted, rtol=1e-5, atol=1e-5)
