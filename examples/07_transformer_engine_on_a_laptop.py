"""Run Transformer Engine's own layers in FP8 on a CPU, as its quickstart does on a GPU.

Its Python code is the real one, which is downloaded once (740 KB). Its kernels are emulated with
the arithmetic of an H100. After `te_cpu.load()`, `transformer_engine` is imported as usual, and
`device="cuda"` means the CPU.
"""

import warnings

import torch

import te_cpu

te = te_cpu.load()

from transformer_engine.common.recipe import DelayedScaling, Format  # noqa: E402


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| relative to |b|."""
    return ((a - b).norm() / b.norm()).item()


def main() -> None:
    """Run a linear and a layer, and print how much FP8 changes their outputs."""
    warnings.simplefilter("ignore", DeprecationWarning)  # about its own names
    print(te_cpu.describe())
    torch.manual_seed(12345)
    in_features, out_features, tokens = 768, 3072, 256

    linear = te.Linear(in_features, out_features, bias=True)
    x = torch.randn(tokens, in_features, device="cuda")
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    exact = linear(x).detach()
    print("te.Linear, delayed scaling: the first scales are 1, later ones fit the numbers")
    print(f"{'step':>4} {'input scale':>12} {'weight scale':>13} {'output differs by':>18}")
    for step in range(1, 4):
        scales = linear.fp8_meta["scaling_fwd"].scale.tolist() if step > 1 else [1.0, 1.0]
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            out = linear(x)
        out.sum().backward()
        print(f"{step:>4} {scales[0]:>12.4g} {scales[1]:>13.4g} {distance(out, exact):>17.2%}")

    layer = te.TransformerLayer(256, 1024, 8, self_attn_mask_type="causal", activation="swiglu")
    layer.eval()
    x = torch.randn(32, 4, 256, device="cuda")
    exact = layer(x).detach()
    for _ in range(2):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            out = layer(x)
        out.sum().backward()
    print(f"te.TransformerLayer: output differs by {distance(out, exact):.2%}")


if __name__ == "__main__":
    main()
