"""Show that an FP8 linear differs from an FP32 one only because its operands are rounded.

This is the experiment of Transformer Engine's FP8 primer with our linear and FP32 results: 768 x
768 with bias, input torch.rand(1024, 768), seed 12345. The weight is initialized as
torch.nn.Linear does (Transformer Engine draws from a normal distribution). All scales are 1, as in
the first step of any run.
"""

import torch
import torch.nn.functional as F

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E4M3, E5M2, Fp8Format
from fp8_numerics.gemm import GemmCounter
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.scaling import ScalingState
from megafp8.specs import Fp8Recipe


def representable(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Return `x` rounded to FP8 with scale 1, in FP32."""
    return Fp8Tensor.quantize(x, torch.ones(()), fmt).dequantize(torch.float32)


def results(output, x, weight, grad):
    """Return the output, and the gradients of input and weight, by name."""
    grads = torch.autograd.grad(output, (x, weight), grad)
    return dict(zip(("output", "grad_input", "grad_weight"), (output, *grads), strict=True))


def in_fp32(x, weight, bias, grad):
    """Return the results of a linear in FP32."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    return results(F.linear(x, weight, bias), x, weight, grad)


def differences() -> dict[str, tuple[float, float]]:
    """Return the largest |FP8 - FP32| of each result, in relation to its largest element.

    The FP32 linear gets the original operands first, and then operands rounded to FP8.
    """
    torch.manual_seed(12345)
    weight, bias = (p.detach() for p in torch.nn.Linear(768, 768).parameters())
    x, grad = torch.rand(1024, 768), torch.randn(1024, 768)

    state = ScalingState(Fp8Recipe(amax_history_len=16))
    linear = Linear(
        torch.nn.Parameter(weight.clone()),
        torch.nn.Parameter(bias),
        name="linear",
        quantizer=linear_quantizer(state, "linear"),
        comm=LinearComm(),
        sink=AutogradSink(),
        counter=GemmCounter(),
    )
    x_in = x.clone().requires_grad_()
    state.begin_microbatch(0)
    fp8 = results(linear(x_in), x_in, linear.weight, grad)
    fp32 = in_fp32(x, weight, bias, grad)
    x, weight, grad = representable(x, E4M3), representable(weight, E4M3), representable(grad, E5M2)
    rounded = in_fp32(x, weight, bias, grad)
    return {
        n: tuple(((fp8[n] - o[n]).abs().max() / o[n].abs().max()).item() for o in (fp32, rounded))
        for n in fp8
    }


if __name__ == "__main__":
    print("largest |FP8 - FP32| over the largest |FP32|, in percent")
    print(f"{'operands of FP32:':27} {'as they are':>15} {'representable':>24}")
    for name, (plain, rounded) in differences().items():
        print(f"{name:27} {100 * plain:14.3g}% {100 * rounded:23.2g}%")
