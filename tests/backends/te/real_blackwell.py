"""Transformer Engine's recipes of Blackwell on a CPU, against the specification and our own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megafp8 import fp8
from megafp8.specs import Fp8Recipe
from megafp8.specs.model import RecomputeSpec
from te_cpu import mx, quantize
from te_cpu.errors import MissingKernelError, SizeError
from tests.backends.te.real import VERSION, autocast, linears, recipes, run_of, te
from tests.backends.te.same_codes import OF_A_FLIP, run
from tests.spec import mxfp8
from tests.spec.data import data
from tests.spec.formats import E4M3, E5M2, same_codes

NUMBERS = tuple(int(number) for number in VERSION.split(".")[:2])
FACTORS = None if NUMBERS >= (2, 13) else mxfp8.FACTORS_OF_2_12
FACTORS = mxfp8.FACTORS_OF_2_5 if NUMBERS < (2, 6) else FACTORS
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
MXFP8 = Fp8Recipe(name="mxfp8", backward_format="e4m3", power_2_scale=True)
KINDS = ("normal", "wide", "zeros", "subnormal", "tiny", "bits", "edges", "largest", "inf", "nan")
TYPES = te.module.base.tex.DType
FORMATS = {TYPES.kFloat8E4M3: E4M3, TYPES.kFloat8E5M2: E5M2}


def quantizer(fp8_dtype: Any = TYPES.kFloat8E4M3, **usages: bool) -> Any:
    return te.tensor.mxfp8_tensor.MXFP8Quantizer(fp8_dtype, **usages)


def sides_of(tensor: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Bytes and scale bytes [blocks in rows of the tensor] of each side, the padding cut off."""
    found = {}
    for side, down, right in (("rowwise", 1, 32), ("columnwise", 32, 1)):
        if (stored := getattr(tensor, f"_{side}_data")) is not None:
            codes = stored.reshape(-1, stored.shape[-1])
            scales = getattr(tensor, f"_{side}_scale_inv")
            rows, columns = codes.shape
            cut = scales[: rows // down, : columns // right]
            found[side] = codes.numpy(), cut.numpy()
    return found


def assert_specified(tensor: Any, x_MK: torch.Tensor) -> None:
    """What a quantized tensor holds is the specification's, for each side that it has."""
    x, fmt = x_MK.float().reshape(-1, x_MK.shape[-1]).numpy(), FORMATS[tensor._fp8_dtype]
    sides = sides_of(tensor)
    assert sides
    for side, (codes, scales) in sides.items():
        is_turned = side == "columnwise"
        rows = np.ascontiguousarray(x.T) if is_turned else x
        exact = mxfp8.quantize_rows(rows, fmt, factors=FACTORS)
        found = (codes.T, scales.T) if is_turned else (codes, scales)
        assert np.array_equal(found[1], exact.scale_codes), side
        assert same_codes(found[0], exact.codes, fmt), side


@DTYPES
@pytest.mark.parametrize("fp8_dtype", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantizer_makes_the_specification_s_bytes(
    kind: str, fp8_dtype: Any, dtype: torch.dtype
) -> None:
    """Both sides, of this version: before 2.13 the least and the largest scale are another rule."""
    x = torch.from_numpy(data(kind)).to(dtype)
    made = quantizer(fp8_dtype)(x)
    assert_specified(made, x)
    values = made.dequantize(dtype=torch.float32).numpy()
    exact = mxfp8.quantize_rows(x.float().numpy(), FORMATS[fp8_dtype], factors=FACTORS).values
    with np.errstate(over="ignore"):  # the largest numbers times the largest scales
        assert np.array_equal(values, exact.astype(np.float32), equal_nan=True)
    assert made._rowwise_scale_inv.shape == (128, 4)  # padded: 32 rows of 2 blocks
    assert made._columnwise_scale_inv.shape == (4, 128)
    if NUMBERS < (2, 13) and kind == "inf":
        bytes_of_inf = made._rowwise_data[3, 5].item()
        assert (bytes_of_inf == FORMATS[fp8_dtype].nan_code) is (NUMBERS >= (2, 6))


def test_one_side_alone_and_back() -> None:
    x = torch.from_numpy(data("normal"))
    rows = quantizer(columnwise=False)(x)
    assert rows._columnwise_data is None and list(sides_of(rows)) == ["rowwise"]
    exact = mxfp8.quantize_rows(x.numpy()).values
    assert np.array_equal(rows.dequantize().numpy(), exact.astype(np.float32))
    target = quantizer()(torch.zeros(32, 64))
    target.copy_(x)
    assert_specified(target, x)


def test_what_is_not_here_is_named() -> None:
    with pytest.raises(SizeError, match="multiples of 32"):
        quantizer()(torch.ones(16, 64))
    if hasattr(square := quantizer(), "with_2d_quantization"):
        square.with_2d_quantization = True
        with pytest.raises(MissingKernelError, match="32 x 32"):
            square(torch.ones(32, 64))


@DTYPES
def test_a_linear_is_ours_bit_for_bit(dtype: torch.dtype) -> None:
    """The output and the gradients of input and weight."""
    theirs, ours, x, grad = linears(dtype, octaves=6)
    state = fp8.convert(ours, "mxfp8")
    one, other = (x.clone().requires_grad_() for _ in range(2))
    with autocast(recipes.MXFP8BlockScaling()):
        out = theirs(one)
    out.backward(grad)
    with state.microbatch():
        wanted = ours(other)
        wanted.backward(grad)
    assert torch.equal(out, wanted)
    assert torch.equal(one.grad, other.grad)
    assert torch.equal(theirs.weight.grad, ours.weight.grad)


@DTYPES
@pytest.mark.parametrize("backward", FORMATS.values(), ids=["e4m3", "hybrid"])
def test_a_linear_s_products_are_those_of_the_specification(
    backward: Any, dtype: torch.dtype
) -> None:
    """Within the bound of sums in FP32, K * 2**-24 of the products' magnitudes, and one rounding
    to BF16 (2**-8). The output has rows of both operands, the gradient of the input columns of the
    weight, and that of the weight columns of both."""
    theirs, _, x, grad = linears(dtype, octaves=6)
    x, halves = (
        x.requires_grad_(),
        recipes.Format.HYBRID if backward is E5M2 else recipes.Format.E4M3,
    )
    with autocast(recipes.MXFP8BlockScaling(fp8_format=halves)):
        out = theirs(x)
    out.backward(grad)

    def values(tensor: torch.Tensor, *, turned: bool) -> np.ndarray:
        matrix, fmt = tensor.detach().float().numpy(), backward if tensor is grad else E4M3
        rows = np.ascontiguousarray(matrix.T) if turned else matrix
        return mxfp8.quantize_rows(rows, fmt).values

    weight = theirs.weight
    cases = (
        (out, values(x, turned=False), values(weight, turned=False)),
        (x.grad, values(grad, turned=False), values(weight, turned=True)),
        (weight.grad, values(grad, turned=True), values(x, turned=True)),
    )
    for found, left, right in cases:
        exact = left @ right.T
        bound = left.shape[1] * 2.0**-24 * (np.abs(left) @ np.abs(right.T))
        bound += 0 if dtype == torch.float32 else 2.0**-8 * np.abs(exact)
        assert (np.abs(found.detach().double().numpy() - exact) <= bound).all()


@DTYPES
def test_every_cast_of_a_layer_is_specified(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of weights, of norms, of activations and of gradients, in a whole forward and backward
    pass: each hands the kernel a tensor in the layer's dtype."""
    cast, seen = mx.fill, []

    def recorded(quantizer: Any, x: torch.Tensor, out: Any) -> Any:
        assert x.dtype == dtype
        filled = cast(quantizer, x, out)
        assert_specified(filled, x.detach())
        seen.append(tuple(x.shape))
        return filled

    monkeypatch.setattr(quantize.mx, "fill", recorded)
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal",
        params_dtype=dtype, fuse_qkv_params=True, attn_input_format="bshd",
    )  # fmt: skip
    x = torch.randn(2, 16, 64, dtype=dtype).requires_grad_()
    with autocast(recipes.MXFP8BlockScaling()):
        out = layer(x)
    out.backward(torch.randn_like(out))
    weights = [(192, 64), (64, 64), (96, 64), (64, 96)]
    assert sorted(shape for shape in seen if shape in weights and shape != (64, 64)) == sorted(
        shape for shape in weights if shape != (64, 64)
    )
    assert len(seen) == 12  # input, weight and gradient of four linears


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_first_step_is_ours(compute: str, recompute: bool) -> None:
    """In FP32 loss and norm are ours but for codes at a tie; in BF16 activations are rounded at
    other places, and more codes are others."""
    full = {"recompute": RecomputeSpec(granularity="full", method="uniform", num_layers=1)}
    changes = full if recompute else {}
    theirs, ours = (run_of(backend, MXFP8, compute, **changes) for backend in ("te", "native"))
    OF_A_FLIP.check(run(theirs, 1), run(ours, 1))
    assert dict(theirs.counter.flops) == dict(ours.counter.flops)


def test_the_recipe_of_none_is_still_that_of_an_h100() -> None:
    """The kernels of MXFP8 are here, and asking for no recipe chooses as before."""
    assert te.is_mxfp8_available() if hasattr(te, "is_mxfp8_available") else True
    chosen = te.module.base.FP8GlobalStateManager.get_fp8_recipe()
    assert type(chosen).__name__ == "DelayedScaling"
