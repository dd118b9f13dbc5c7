"""Zero-centered norms in BF16 against float64, within a bound that follows from their roundings.

The gain 1 + weight is rounded to BF16 once, by at most U of it. Sums run in FP32, and each result
is rounded to BF16, by at most U of what is rounded. On a CPU, torch's LayerNorm keeps the mean and
the inverse of the standard deviation in BF16 for its backward pass, which errs by at most U of
each. It adds the tokens' gradients of weight and bias in BF16, where each addition errs by at most
U of the sum so far.
"""

# T tokens   D model width

from __future__ import annotations

import pytest
import torch

from megafp8.models.parts import Norm, Parts
from megafp8.models.random import RandomStreams
from tests.tiny import gpt_spec

U = 2.0**-8
"""The largest relative error of rounding to BF16, which has 8 significant bits."""
TOKENS = 12


def norm_of(kind: str, width: int) -> Norm:
    spec = gpt_spec(
        hidden_size=width, num_attention_heads=1, normalization=kind,
        layernorm_zero_centered_gamma=True,
    )  # fmt: skip
    return Norm(Parts(spec, torch.bfloat16, 1234, RandomStreams(1234)), "final_norm")


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("width", [32, 33, 257])
def test_outputs_and_gradients_are_within_the_roundings(kind: str, width: int) -> None:
    torch.manual_seed(width)
    norm = norm_of(kind, width)
    weight_D = torch.randn(width).bfloat16()
    weight_D[:5] = torch.tensor([0.0, 2.0**-9, -1.0, -1.0 + 2.0**-8, 200.0])
    bias_D = torch.randn(width).bfloat16() if kind == "layernorm" else None
    with torch.no_grad():
        norm.weight.copy_(weight_D)
        if bias_D is not None:
            assert norm.bias is not None
            norm.bias.copy_(bias_D)
    x_TD = torch.randn(TOKENS, width).bfloat16().requires_grad_()
    grad_TD = torch.randn(TOKENS, width).bfloat16()
    out_TD = norm(x_TD)
    out_TD.backward(grad_TD)

    x, w, dy = x_TD.detach().double(), weight_D.double(), grad_TD.double()
    b = torch.zeros(width).double() if bias_D is None else bias_D.double()
    gain = 1 + w
    centered = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    rstd = (centered.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
    n = centered * rstd
    sums = (width + TOKENS + 16) * 2.0**-24  # of the FP32 sums, of numbers of this size

    product, exact = n * gain, n * gain + b
    # |fl(n g (1 + d) + b) - (n g + b)| for |d| <= U, where fl is one rounding
    bound = U * product.abs() * (1 + U) + U * exact.abs() + sums * (product.abs() + b.abs())
    errors = {"output": (out_TD.double() - exact, bound)}

    # (x - mean (1 + d)) rstd (1 + d) - n, for |d| <= U, and the same relative error of rstd itself
    kept = U if kind == "layernorm" else 0.0
    mean = x.mean(-1, keepdim=True)
    off_n = kept * (n.abs() + (1 + U) * (mean * rstd).abs())
    g = dy * gain
    inner = g - n * (g * n).mean(-1, keepdim=True)
    size = g.abs() + n.abs() * (g * n).abs().mean(-1, keepdim=True)
    off = off_n * (g * n).abs().mean(-1, keepdim=True)
    off = off + (n.abs() + off_n) * (g.abs() * off_n).mean(-1, keepdim=True)
    if kind == "layernorm":
        inner = inner - g.mean(-1, keepdim=True)
        size = size + g.abs().mean(-1, keepdim=True)
    dx, before = rstd * inner, rstd * (U * size + kept * size + off) * (1 + U) ** 2
    assert x_TD.grad is not None and norm.weight.grad is not None
    allowed_dx = before + U * (dx.abs() + before) + sums * rstd * size
    errors["input"] = (x_TD.grad.double() - dx, allowed_dx)
    dw, before = (dy * n).sum(0), (dy.abs() * off_n).sum(0)
    added = TOKENS * kept * (1 + U) ** TOKENS  # of the sum of magnitudes
    before = before + (added + sums) * ((dy * n).abs().sum(0) + before)
    allowed_dw = before + U * (dw.abs() + before)
    errors["weight"] = (norm.weight.grad.double() - dw, allowed_dw)
    if bias_D is not None:
        assert norm.bias is not None and norm.bias.grad is not None
        db = dy.sum(0)
        errors["bias"] = (
            norm.bias.grad.double() - db,
            U * db.abs() + (added + sums) * dy.abs().sum(0),
        )
    for name, (error, allowed) in errors.items():
        share = error.abs() / allowed.clamp(min=1e-300)
        assert share.max().item() <= 1, name
        if name in (
            "output",
            "input",
        ):  # a bound that is too wide would not notice a gain of 7 bits
            assert share.max().item() > 0.4, name
