"""Transformer Engine's `GroupedLinear` on a CPU: one linear for each expert, bit for bit."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp8_numerics.swizzle import unswizzled
from megafp8 import fp8
from tests.backends.te.real import autocast, recipes, te

ROWS = (128, 0, 256, 128)
"""The rows of the experts, whole blocks of every recipe; the second one has none."""
WIDTH = 128
RECIPES = {
    "BF16": None,
    "delayed": ("DelayedScaling", {"amax_history_len": 4}),
    "tensorwise": ("Float8CurrentScaling", {}),
    "blockwise": ("Float8BlockScaling", {}),
    "mxfp8": ("MXFP8BlockScaling", {}),
    "nvfp4": ("NVFP4BlockScaling", {"disable_stochastic_rounding": True}),
}


def region(name: str) -> AbstractContextManager[Any]:
    if (found := RECIPES[name]) is None:
        return nullcontext()
    kind, settings = found
    if not hasattr(recipes, kind):
        pytest.skip(f"this version has no {kind}")
    return autocast(getattr(recipes, kind)(**settings))


@pytest.mark.parametrize("name", RECIPES)
def test_a_grouped_linear_is_a_linear_for_each_expert(name: str) -> None:
    """Outputs and all gradients of three steps, whose inputs grow, so that scales change."""
    torch.manual_seed(0)
    group = te.GroupedLinear(len(ROWS), WIDTH, WIDTH, bias=True, params_dtype=torch.bfloat16)
    alone = [te.Linear(WIDTH, WIDTH, bias=True, params_dtype=torch.bfloat16) for _ in ROWS]
    with torch.no_grad():
        for number, linear in enumerate(alone):
            linear.weight.copy_(getattr(group, f"weight{number}"))
            linear.bias.copy_(getattr(group, f"bias{number}").normal_())
    for step in range(1, 4):
        x = (torch.randn(sum(ROWS), WIDTH) * 4.0**step).bfloat16()
        grad = (torch.randn(sum(ROWS), WIDTH) / step).bfloat16()
        whole = x.clone().requires_grad_()
        with region(name):
            out = group(whole, list(ROWS))
        out.backward(grad)
        parts = (x.split(ROWS), grad.split(ROWS), out.split(ROWS), whole.grad.split(ROWS))
        for number, (own, own_grad, own_out, own_dx) in enumerate(zip(*parts, strict=True)):
            weight, bias = (getattr(group, f"{kind}{number}") for kind in ("weight", "bias"))
            if not len(own):
                assert not weight.grad.any() and not bias.grad.any()
                continue
            own = own.clone().requires_grad_()
            with region(name):
                single = alone[number](own)
            single.backward(own_grad)
            assert torch.equal(single, own_out) and torch.equal(own.grad, own_dx)
            assert torch.equal(alone[number].weight.grad, weight.grad) and weight.grad.any()
            assert torch.equal(alone[number].bias.grad, bias.grad)
        for module in (group, *alone):
            module.zero_grad()


def test_our_linears_of_experts_keep_the_histories_of_a_grouped_linear() -> None:
    """Ours get 17 rows, which are filled up there. An expert without rows keeps what it has but for
    its weight, whose history rolls in every step. Weights change from step to step."""
    steps = ((32, 0, 64, 17), (0, 0, 17, 32), (0, 17, 0, 0), (32, 0, 0, 17))
    torch.manual_seed(0)
    group = te.GroupedLinear(4, WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16)
    ours = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    ours.to(torch.bfloat16)
    state = fp8.convert(ours, fp8.Fp8Recipe(amax_history_len=4))
    for step, rows in enumerate(steps):
        filled = [number + -number % 16 for number in rows]
        x = [torch.randn(number, WIDTH).mul(2.0**step).bfloat16() for number in rows]
        grad = [torch.randn(number, WIDTH).div(2.0**step).bfloat16() for number in rows]
        whole_x, whole_grad = (
            torch.cat([F.pad(t, (0, 0, 0, -len(t) % 16)) for t in each]) for each in (x, grad)
        )
        with torch.no_grad():
            for number, linear in enumerate(ours):
                weight = getattr(group, f"weight{number}")
                linear.weight.copy_(weight.mul_(1.25))
        with region("delayed"):
            out = group(whole_x.requires_grad_(), filled)
        out.backward(whole_grad)
        with state.microbatch():
            for linear, own, own_grad in zip(ours, x, grad, strict=True):
                linear(own.requires_grad_()).backward(own_grad)
        with region("delayed"):  # histories of gradients roll when another region begins
            pass
        for role, part, slot, slots in (
            ("input", "fwd", 0, 3), ("weight", "fwd", 1, 3), ("grad_output", "bwd", 0, 2),
        ):  # fmt: skip
            theirs = group.fp8_meta[f"scaling_{part}"]
            for number in range(4):
                at, name = slots * number + slot, f"{number}.{role}"
                own = state.state_dict()[f"{name}/history"]
                assert torch.equal(own, theirs.amax_history[1:, at]), (step, name)
                assert state.scales()[name].quant_scale == theirs.scale[at].item(), (step, name)
            updates = [state.scales()[f"{number}.{role}"].num_updates for number in range(4)]
            used = [sum(number > 0 for number in of) for of in zip(*steps[: step + 1], strict=True)]
            assert updates == ([step + 1] * 4 if role == "weight" else used)


def test_padded_rows_change_nothing() -> None:
    """Fp8Padding fills up the rows of each expert, also of one without any, and is undone."""
    torch.manual_seed(0)
    rows = [5, 0, 150]
    group = te.GroupedLinear(3, 32, 48, bias=False, params_dtype=torch.float32)
    x, grad = torch.randn(155, 32), torch.randn(155, 48)
    plain, padded = (x.clone().requires_grad_() for _ in range(2))
    out = group(plain, rows)
    out.backward(grad)
    weights = [getattr(group, f"weight{number}").grad.clone() for number in range(3)]
    group.zero_grad()
    wide, sizes = te.Fp8Padding(3)(padded, rows)
    assert all(size % 16 == 0 for size in sizes)
    found = te.Fp8Unpadding(3)(group(wide, sizes), rows)
    found.backward(grad)
    torch.testing.assert_close(found, out, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded.grad, plain.grad, rtol=0, atol=1e-5)
    for number, weight in enumerate(weights):
        own = getattr(group, f"weight{number}").grad
        torch.testing.assert_close(own, weight, rtol=0, atol=1e-4)


FUSED = "_is_grouped_tensor_path_supported"  # a method from 2.17 on
STORAGE = "transformer_engine.pytorch.tensor.storage"
HAS_GROUPED_TENSORS = STORAGE in sys.modules and (
    importlib.util.find_spec(f"{STORAGE}.grouped_tensor_storage") is not None
)
if HAS_GROUPED_TENSORS:  # later versions; the default one is to skip no test

    @pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
    def test_a_grouped_tensor_holds_what_each_expert_s_cast_holds(name: str) -> None:
        """Bytes, scales and sums of rows; rows behind the last expert's are nobody's."""
        tex: Any = importlib.import_module("transformer_engine_torch")
        torch.manual_seed(0)
        rows = [128, 0, 256]
        x = torch.randn(sum(rows) + 128, 256).bfloat16()
        if name == "mxfp8":
            quantizer = te.MXFP8Quantizer(tex.DType.kFloat8E4M3)
        else:
            quantizer = te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
        # A tensor that is to be dequantized is brought to "cuda" first, in its own class's code.
        assert torch.equal(torch.clone(quantizer(x).detach()), quantizer(x).dequantize())
        first = torch.tensor(rows)
        grouped, sums = tex.bgrad_group_quantize(x, quantizer, 3, first)
        parts = x[: sum(rows)].split(rows)
        assert torch.equal(sums, torch.stack([part.float().sum(0) for part in parts]).bfloat16())
        values = tex.group_dequantize(grouped, tex.DType.kBFloat16).split_into_quantized_tensors()
        for part, found, value in zip(
            parts, grouped.split_into_quantized_tensors(), values, strict=True
        ):
            if not len(part):
                continue
            alone = quantizer(part)
            for side in ("rowwise", "columnwise"):
                for field in (f"_{side}_data", f"_{side}_scale_inv"):
                    assert torch.equal(getattr(found, field), getattr(alone, field)), field
            assert torch.equal(value, alone.dequantize(dtype=torch.bfloat16))
        plain_parts = grouped.split_into_quantized_tensors()
        quantizer.optimize_for_gemm = True
        tiled = tex.group_quantize(x, quantizer, 3, first)
        for one, other in zip(plain_parts, tiled.split_into_quantized_tensors(), strict=True):
            if not one.shape[0]:
                continue
            assert other._with_gemm_swizzled_scales and not one._with_gemm_swizzled_scales
            for side in ("rowwise", "columnwise"):
                plain, found = (getattr(each, f"_{side}_scale_inv") for each in (one, other))
                plain = plain.t() if name == "mxfp8" and side == "columnwise" else plain
                rows_and_blocks = plain.shape
                assert torch.equal(unswizzled(found.flatten(), *rows_and_blocks), plain)
        from_tiles = tex.group_dequantize(tiled, tex.DType.kBFloat16)
        for one, other in zip(values, from_tiles.split_into_quantized_tensors(), strict=True):
            assert torch.equal(one, other)
        sizes, (ends, begins) = tex.splits_to_offsets_multi(
            first.int(), "cuda", strides=[1, 5], include_leading_zero=[False, True],
            dtypes=[torch.int32, torch.int64],
        )  # fmt: skip
        assert sizes.tolist() == rows and ends.tolist() == [128, 128, 384]
        assert begins.tolist() == [0, 640, 640, 1920] and ends.dtype == torch.int32

    @pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
    def test_products_of_a_grouped_tensor_are_those_of_each_expert(name: str) -> None:
        """Also where the scales of the whole tensor lie in tiles, and those of weights do not."""
        gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
        storage = importlib.import_module(
            "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage"
        ).GroupedTensorStorage
        tex: Any = importlib.import_module("transformer_engine_torch")
        torch.manual_seed(0)
        rows, width = [128, 0, 256], 64
        first, dtype = torch.tensor(rows), torch.bfloat16
        x = torch.randn(sum(rows), WIDTH).to(dtype)
        if name == "mxfp8":
            quantizers = [te.MXFP8Quantizer(tex.DType.kFloat8E4M3) for _ in range(2)]
        else:
            quantizers = [
                te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
                te.NVFP4Quantizer(with_2d_quantization=True),
            ]
        weights = [quantizers[1](torch.randn(width, WIDTH).to(dtype)) for _ in rows]
        alone = [
            gemm.general_gemm(weight, quantizers[0](part), out_dtype=dtype)[0]
            for weight, part in zip(weights, x.split(rows), strict=True)
            if len(part)
        ]
        quantizers[0].optimize_for_gemm = True
        grouped = tex.group_quantize(x, quantizers[0], 3, first)
        out = torch.full((sum(rows), width), torch.nan, dtype=dtype)
        grouped_out = storage(
            shape=(sum(rows), width), dtype=dtype, num_tensors=3, quantizer=None,
            data=out.view(-1), first_dims=first, tensor_offsets=torch.tensor([0, 128, 128]) * width,
        )  # fmt: skip
        gemm.general_grouped_gemm_for_grouped_tensor(weights, grouped, grouped_out, layout="TN")
        assert torch.equal(out, torch.cat(alone))

    @pytest.mark.skipif(not hasattr(te.module.grouped_linear._GroupedLinear, FUSED), reason="2.17")
    def test_a_grouped_linear_by_grouped_products_is_the_same(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        torch.manual_seed(0)
        group = te.GroupedLinear(4, WIDTH, 64, bias=False, params_dtype=torch.bfloat16)
        x, grad = torch.randn(sum(ROWS), WIDTH).bfloat16(), torch.randn(sum(ROWS), 64).bfloat16()
        found = []
        kernel = te.module.grouped_linear.general_grouped_gemm_for_grouped_tensor
        called: list[str] = []

        def counted(*args: Any, layout: str, **kwargs: Any) -> Any:
            called.append(layout)
            return kernel(*args, layout=layout, **kwargs)

        name = "general_grouped_gemm_for_grouped_tensor"
        monkeypatch.setattr(te.module.grouped_linear, name, counted)
        for is_fused in ("0", "1"):
            monkeypatch.setenv("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", is_fused)
            own = x.clone().requires_grad_()
            out = group(own, list(ROWS))
            out.backward(grad)
            found.append([out, own.grad, *(weight.grad for weight in group.parameters())])
            group.zero_grad()
        assert called == ["TN", "NN", "NT"]
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
