"""Test the layer in FP8 without a GPU: `python -m pytest -p te_cpu test_layer.py`.

On a machine with a GPU and Transformer Engine the same tests run without `-p te_cpu`.
"""

import pytest
import torch
import transformer_engine.pytorch as te
from layer import GatedMLP
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

HIDDEN, INNER, TOKENS = 64, 128, 32
RECIPES = {"delayed": DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling()}


@pytest.fixture
def layer() -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(HIDDEN, INNER)


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, device="cuda", requires_grad=True)


@pytest.mark.parametrize("name", RECIPES)
def test_fp8_is_near_what_the_same_layer_computes_without_it(name: str, layer: GatedMLP) -> None:
    """Compare them within what roundings explain.

    A number is rounded by 2^-4 of itself at most, and each product rounds both operands. So gate
    and up are off by 2^-3 each, and the last product adds as much: 3/8 of their size.
    """
    x = tokens()
    exact = layer(x) - x
    for _ in range(2):  # the first pass of delayed scaling has scales of 1
        with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[name]):
            found = layer(x) - x
    distance = (found - exact).norm() / exact.norm()
    assert 0 < distance < 3 / 8
    assert 0 < layer.active < 1


@pytest.mark.parametrize("name", RECIPES)
def test_it_learns(name: str, layer: GatedMLP) -> None:
    x, optimizer = tokens(), torch.optim.AdamW(layer.parameters(), lr=1e-2)
    target, losses = x.detach().roll(1, dims=-1), []
    for _ in range(6):
        with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[name]):
            loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_delayed_scaling_has_seen_every_tensor(layer: GatedMLP) -> None:
    x = tokens()
    for _ in range(2):
        with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"]):
            layer(x).sum().backward()
    for linear in (layer.gate_up, layer.down):
        forward = linear.fp8_meta["scaling_fwd"].amax_history
        assert (forward[1:, :2].amax(dim=0) > 0).all()  # the input and the weight
        assert linear.fp8_meta["scaling_bwd"].amax_history[1:, 0].amax() > 0


def test_attention_in_fp8_is_left_to_a_gpu() -> None:
    """Name the kernel of cuDNN's that it needs: by that, `--te-skip-missing` skips other tests."""
    if "CPU" not in torch.cuda.get_device_name():
        pytest.skip("runs the kernel on a GPU")
    q = torch.randn(TOKENS, 1, 4, 16, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="fused_attn_fwd"):
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_dpa=True)):
            te.DotProductAttention(4, 16)(q, q, q)
