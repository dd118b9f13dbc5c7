"""Transformer Engine's layers on a CPU against plain torch in FP64: outputs and all gradients."""

# B batch  S sequence  D model width  H heads  G groups of heads  E head width

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_cpu
from te_cpu.errors import MissingKernelError, VersionError
from tests.backends.te.real import VERSION, autocast, recipes, te
from tests.spec import current, formats

WIDTH, FFN, HEADS, SIZE = 32, 64, 4, 8
ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "reglu": lambda x: torch.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
}


def make_layer(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    given = {
        "num_gqa_groups": HEADS, "kv_channels": SIZE, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "self_attn_mask_type": "causal", "params_dtype": dtype,
        "fuse_qkv_params": True, "qkv_weight_interleaved": False, "attn_input_format": "bshd",
    }  # fmt: skip
    layer = te.TransformerLayer(WIDTH, FFN, HEADS, **(given | changes))
    with torch.no_grad():
        for param in layer.parameters():  # no norm's weight is 1, no bias 0
            param.add_(0.1 * torch.randn_like(param))
    return layer


def exact_layer(
    weights: dict[str, torch.Tensor],
    x_BSD: torch.Tensor,
    *,
    activation: str,
    norm: str,
    num_groups: int,
    angles: torch.Tensor | None,
    alibi: bool,
) -> torch.Tensor:
    """What the layer is documented to compute, written down once more; `angles` [S, pairs]."""

    def normed(x: torch.Tensor, path: str) -> torch.Tensor:
        weight = weights[f"{path}.layer_norm_weight"]
        if norm == "RMSNorm":
            return F.rms_norm(x, (WIDTH,), weight, 1e-5)
        return F.layer_norm(x, (WIDTH,), weight, weights[f"{path}.layer_norm_bias"], 1e-5)

    def linear(x: torch.Tensor, path: str) -> torch.Tensor:
        bias = weights.get(f"{path}bias")
        return F.linear(x, weights[f"{path}weight"], bias)

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.unflatten(-1, (count, SIZE)).transpose(1, 2)

    def turned(x_BHSE: torch.Tensor) -> torch.Tensor:
        if angles is None:
            return x_BHSE
        first, second = x_BHSE.unflatten(-1, (2, -1)).unbind(-2)
        turn = torch.polar(torch.ones_like(angles), angles)
        found = torch.complex(first, second) * turn
        return torch.cat((found.real, found.imag), -1)

    qkv = linear(normed(x_BSD, "self_attention.layernorm_qkv"), "self_attention.layernorm_qkv.")
    sizes = [HEADS * SIZE, num_groups * SIZE, num_groups * SIZE]
    q, k, v = (heads(t, t.shape[-1] // SIZE) for t in qkv.split(sizes, -1))
    q, k = turned(q), turned(k)
    k, v = (t.repeat_interleave(HEADS // num_groups, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / SIZE**0.5
    seq = x_BSD.shape[1]
    if alibi:
        slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1, dtype=torch.float64))
        places = torch.arange(seq, dtype=torch.float64)
        scores = scores + slopes[:, None, None] * (places[None, :] - places[:, None])
    later = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    attended = torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v
    x_BSD = x_BSD + linear(attended.transpose(1, 2).flatten(2), "self_attention.proj.")
    hidden = linear(normed(x_BSD, "layernorm_mlp"), "layernorm_mlp.fc1_")
    return x_BSD + linear(ACTIVATIONS[activation](hidden), "layernorm_mlp.fc2_")


CASES: dict[str, dict[str, Any]] = {
    **{name: {"activation": name} for name in ACTIVATIONS},
    "rmsnorm": {"normalization": "RMSNorm"},
    "groups of heads": {"num_gqa_groups": 2},
    "no bias": {"bias": False},
    "llama": {"num_gqa_groups": 2, "bias": False, "normalization": "RMSNorm",
              "activation": "swiglu", "rope": True},
    "rope": {"rope": True},
    "gelu fused into the product": {"fused_gelu": True},
    "alibi": {"alibi": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _forget_recomputation() -> Iterator[None]:
    """Transformer Engine remembers for the whole process how it recomputed last; in one of the two
    ways it fuses GELU into the product from then on."""
    yield
    te.distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = True


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_layer_computes_what_it_is_documented_to(changes: dict[str, Any]) -> None:
    """FP32: outputs and gradients within 2e-6 of the largest number."""
    changes = dict(changes)
    te.distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = not changes.pop("fused_gelu", False)
    has_rope, alibi = changes.pop("rope", False), changes.pop("alibi", False)
    activation = changes.setdefault("activation", "gelu")
    layer = make_layer(**changes)
    x = torch.randn(2, 32, WIDTH, requires_grad=True)
    grad, more = torch.randn(2, 32, WIDTH), {}
    angles = None
    if has_rope:
        more["rotary_pos_emb"] = te.RotaryPositionEmbedding(SIZE)(32)
        frequencies = 10000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
        angles = torch.arange(32, dtype=torch.float64)[:, None] * frequencies
    if alibi:
        more["core_attention_bias_type"] = "alibi"
    out = layer(x, **more)
    out.backward(grad)
    weights = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    exact_x = x.detach().double().requires_grad_()
    exact = exact_layer(
        weights, exact_x, activation=activation, norm=changes.get("normalization", "LayerNorm"),
        num_groups=changes.get("num_gqa_groups", HEADS), angles=angles, alibi=alibi,
    )  # fmt: skip
    exact.backward(grad.double())
    pairs = {"output": (out.detach(), exact.detach()), "input": (x.grad, exact_x.grad)}
    pairs |= {name: (p.grad, weights[name].grad) for name, p in layer.named_parameters()}
    for name, (found, wanted) in pairs.items():
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize("kind", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_a_layer_in_fp8_is_near_the_exact_one(kind: str) -> None:
    """E4M3 keeps 3 bits: half a unit of the last is 1/16 of a number, and such errors are
    independent, so a sum's relative error is about that of one product of two, 2**-4 * sqrt(2/3).
    The layer stays below twice that, and does not equal the high-precision one."""
    if not hasattr(recipes, kind):
        pytest.skip(f"Transformer Engine {VERSION} has no {kind}")
    layer = make_layer(torch.bfloat16)
    x = torch.randn(4, 32, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        plain = layer(x).float()
    recipe = getattr(recipes, kind)()
    found = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(2):  # delayed scaling's first scales are 1
            with autocast(recipe):
                out = layer(found)
            out.sum().backward()
    part = (plain - x.float()).norm()
    error = (out.detach().float() - plain).norm() / part
    assert 1e-3 < error < 0.11
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_a_linear_in_square_blocks_is_the_specification() -> None:
    """Weights of two blocks of 128 each way, whose scales have one shape in either order: products
    of the specified operands within K * 2**-24 of their magnitudes, and a few roundings more."""
    if not hasattr(recipes, "Float8BlockScaling"):
        pytest.skip(f"Transformer Engine {VERSION} has no Float8BlockScaling")
    torch.manual_seed(0)
    linear = te.Linear(256, 256, bias=False, params_dtype=torch.float32)
    of_blocks = 2.0 ** torch.tensor([[0.0, 7.0], [3.0, -5.0]])
    with torch.no_grad():
        linear.weight.mul_(of_blocks.repeat_interleave(128, 0).repeat_interleave(128, 1))
    x = torch.randn(256, 256) * torch.logspace(-2, 2, 256)
    grad = torch.randn(256, 256) * torch.logspace(-1, 3, 256)[:, None]
    x.requires_grad_()
    with autocast(recipes.Float8BlockScaling()):
        out = linear(x)
    out.backward(grad)

    def values(tensor: torch.Tensor, *groups: tuple[int, int]) -> list[torch.Tensor]:
        array, e4m3 = tensor.detach().numpy(), formats.FORMATS["e4m3"]
        made = (current.quantize_groups(array, group, e4m3, "te", True) for group in groups)
        return [torch.from_numpy(each.values) for each in made]

    (weight,) = values(linear.weight, (128, 128))
    (x_rows, x_columns), (grad_rows, grad_columns) = (
        values(each, (1, 128), (128, 1)) for each in (x, grad)
    )
    for found, left, right in (
        (out, x_rows, weight.t()),
        (x.grad, grad_rows, weight),
        (linear.weight.grad, grad_columns.t(), x_columns),
    ):
        bound = (256 + 8) * 2.0**-24 * (left.abs() @ right.abs())
        assert ((found.double() - left @ right).abs() <= bound).all()


def test_everyone_else_still_learns_the_truth_about_this_machine() -> None:
    """Only Transformer Engine's code is told that there is a GPU."""
    question = "torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda"
    asked = [sys.executable, "-c", f"import torch; print(({question}))"]
    truth = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    here = torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda
    assert str(here) == truth
    x = torch.zeros(3, device="cuda")
    assert x.device.type == "cpu" and not x.is_cuda and x.cuda() is x
    assert torch.nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"
    available = te.is_fp8_available(return_reason=True) if hasattr(te, "is_fp8_available") else None
    assert available is None or available[0] is True


def test_the_loaded_version_is_reported_and_stays() -> None:
    assert te_cpu.load(VERSION) is te
    wanted = f"Transformer Engine {VERSION}, its own Python; kernels emulated on the CPU"
    assert te_cpu.describe() == wanted
    other = "2.20.2" if VERSION != "2.20.2" else "2.12.0"
    with pytest.raises(VersionError, match="is loaded in this process already"):
        te_cpu.load(other)


def test_what_is_missing_is_named_where_it_is_used() -> None:
    import transformer_engine_torch as tex

    with pytest.raises(MissingKernelError, match="packed sequences .* with context parallelism"):
        tex.thd_read_half_tensor(torch.randn(32, 2, 8), torch.tensor([0, 32]), 0)


def test_sizes_that_the_hardware_does_not_take_are_an_error() -> None:
    linear = te.Linear(16, 24, params_dtype=torch.float32)
    with pytest.raises((ValueError, AssertionError), match="16|divisible"):
        with warnings.catch_warnings(), autocast(recipes.DelayedScaling()):
            warnings.simplefilter("ignore", DeprecationWarning)
            linear(torch.randn(32, 16, requires_grad=True)).sum().backward()


def test_a_storage_that_is_no_tensor_has_values() -> None:
    """Those of the tensor that the same cast makes, in each format in blocks of the version."""
    kinds = [("mxfp8_tensor", "MXFP8Quantizer", te.module.base.tex.DType.kFloat8E4M3)]
    if hasattr(te.tensor, "nvfp4_tensor"):
        kinds.append(("nvfp4_tensor", "NVFP4Quantizer", te.module.base.tex.DType.kFloat4E2M1))
    x = torch.randn(32, 64)
    for module, kind, dtype in kinds:
        made_by = getattr(getattr(te.tensor, module), kind)(dtype)
        values = made_by(x).dequantize()
        made_by.internal = True
        plain = made_by(x)
        assert not isinstance(plain, torch.Tensor)
        assert torch.equal(plain.dequantize(dtype=torch.float32), values)


@pytest.mark.parametrize("kind", ["current", "lines", "squares"])
def test_a_single_number_is_a_row_of_one(kind: str) -> None:
    """Of 3 the amax is 3, and so the value is the largest one; both orientations have it."""
    tensor, e4m3 = te.tensor, te.module.base.tex.DType.kFloat8E4M3
    if kind == "current":
        made_by = tensor.float8_tensor.Float8CurrentScalingQuantizer(e4m3, device="cpu")
    else:
        made_by = tensor.float8_blockwise_tensor.Float8BlockQuantizer(
            e4m3, rowwise=True, columnwise=True, force_pow_2_scales=False,
            block_scaling_dim=1 + (kind == "squares"),
        )  # fmt: skip
    made_by.set_usage(rowwise=True, columnwise=True)
    made = made_by(torch.tensor(3.0))
    assert made.shape == () and made.dequantize().item() == 3.0
    columns = made._transpose if kind == "current" else made._columnwise_data
    assert columns.shape == () and columns.view(torch.float8_e4m3fn).float().item() == 448.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_nothing(reentrant: bool) -> None:
    """`te.checkpoint` around a layer in FP8: outputs, gradients and scales bit for bit."""
    found = []
    for is_recomputed in (False, True):
        layer = make_layer()
        for number in range(3):
            x = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(number))
            x.requires_grad_()
            with warnings.catch_warnings(), autocast(recipes.DelayedScaling(amax_history_len=4)):
                warnings.simplefilter("ignore")
                if is_recomputed:
                    out = te.checkpoint(layer, x, use_reentrant=reentrant)
                else:
                    out = layer(x)
            out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
        meta = layer.layernorm_mlp.fp8_meta
        found[-1] += [meta[k].scale for k in ("scaling_fwd", "scaling_bwd")]
        te.module.base.FP8GlobalStateManager.reset()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
