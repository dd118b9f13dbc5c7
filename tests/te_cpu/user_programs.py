"""Tests that a user may have written for a GPU, which the plugin runs without one.

python -m pytest -p te_cpu --noconftest tests/te_cpu/user_programs.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.module.base import FP8GlobalStateManager

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def forget_other_layers() -> Iterator[None]:
    torch.manual_seed(0)
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """This process alone, as torchrun starts it."""
    dist.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def autocast_now() -> list[Any]:
    """What is cast now, on the GPU that there is not, and on the CPU."""
    kinds = ("cuda", "cpu")
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def mixed() -> nn.Module:
    return nn.Sequential(
        te.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), te.LayerNormLinear(32, 32),
        nn.Linear(32, 16),
    ).cuda()  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_means_torchs_own_layers_too(dtype: torch.dtype) -> None:
    """The CPU's autocast gives the same numbers where all layers are torch's."""
    x = torch.randn(16, 32, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        assert mixed()(x).dtype == dtype
    plain = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1))
    with torch.autocast("cpu", dtype=dtype):
        wanted = plain(x)
    with torch.autocast("cuda", dtype=dtype):
        assert torch.equal(plain(x), wanted)
    assert wanted.dtype == dtype and plain(x).dtype == torch.float32


def test_autocast_ends_where_it_does_on_a_gpu() -> None:
    """Nested, switched off inside, as a decorator, left by an error; the default is float16."""
    off = [(False, torch.float16), (False, torch.bfloat16)]
    assert autocast_now() == off
    with torch.autocast("cuda"):
        assert autocast_now() == [(True, torch.float16)] * 2
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert autocast_now() == [(True, torch.bfloat16)] * 2
            with torch.autocast("cuda", enabled=False):
                assert autocast_now() == [(False, torch.bfloat16)] * 2
            assert autocast_now() == [(True, torch.bfloat16)] * 2
        assert autocast_now() == [(True, torch.float16)] * 2

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def fail(now: list[Any]) -> None:
        now += autocast_now()
        raise KeyError("mine")

    for _ in range(2):
        now: list[Any] = []
        with pytest.raises(KeyError, match="mine"):
            fail(now)
        assert now == [(True, torch.bfloat16)] * 2 and autocast_now() == off
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert autocast_now()[1][0] is False
        assert autocast_now()[1] == (True, torch.bfloat16)
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert autocast_now() == [(True, torch.bfloat16)] * 2
    assert autocast_now() == off


def test_autocast_in_compiled_code() -> None:
    before, layer, x = autocast_now(), mixed(), torch.randn(16, 32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.compile(layer, backend="eager")(x).dtype == torch.bfloat16
    assert autocast_now() == before


def test_autocast_does_not_reach_into_kernels() -> None:
    """A layer in FP8 computes what one with BF16 weights of the same values does without it, and a
    sum of gradients in FP32 gets products in FP32."""
    layer = te.LayerNormLinear(32, 32, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.bfloat16())
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    for recipe in (None, recipes.Float8CurrentScaling()):
        found = []
        for enabled in (True, False):
            used = layer if enabled else copy.deepcopy(layer).bfloat16()
            used.weight.main_grad = torch.zeros(32, 32)
            x.grad = None
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
                with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                    y = used(x)
                y.square().sum().backward()
            found.append((y.detach(), x.grad, used.weight.main_grad))
        for cast, plain in zip(*found, strict=True):
            assert torch.equal(cast, plain)


@pytest.mark.parametrize(
    "recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"]
)
def test_a_default_dtype_does_not_reach_into_kernels(recipe: str) -> None:
    """Lightning's plugin makes BF16 the default of a forward pass; a kernel keeps FP32 inside."""
    x, found = torch.randn(32, 128, dtype=torch.bfloat16), []
    layer = te.LayerNormMLP(128, 128, params_dtype=torch.bfloat16)
    for default in (torch.float32, torch.bfloat16):
        mine = copy.deepcopy(layer)
        for _ in range(2):
            torch.set_default_dtype(default)
            try:
                with te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, recipe)()):
                    y = mine(x)
            finally:
                torch.set_default_dtype(torch.float32)
            y.sum().backward()
        FP8GlobalStateManager.reset()
        found.append([y, *(p.grad for p in mine.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [lambda: te.Linear(32, 16), mixed], ids=["te", "mixed"])
def test_checkpoint_recomputes_under_the_same_autocast(
    make: Callable[[], nn.Module], reentrant: bool
) -> None:
    layer, seen = make(), []
    layer.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    found = []
    for recomputed in (False, True):
        layer.zero_grad()
        x = torch.randn(16, 32, generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = checkpoint(layer, x, use_reentrant=reentrant) if recomputed else layer(x)
        y.float().square().sum().backward()
        found.append([y, x.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    assert set(seen) == {torch.bfloat16}
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_scaler_of_gradients_works_with_autocast() -> None:
    layer = nn.Linear(32, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", 2.0**8)
    before = layer.weight.detach().clone()
    with torch.autocast("cuda"):
        loss = layer(torch.randn(4, 32)).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**8 and not torch.equal(layer.weight, before)


def test_a_refused_graph_leaves_torch_compile_as_it_was() -> None:
    layer, x = te.Linear(32, 32), torch.randn(16, 32)
    with pytest.raises(NotImplementedError, match="a CPU has no graphs"):
        te.make_graphed_callables(layer, (x,))
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))


def test_an_index_is_a_device() -> None:
    for layer in (nn.Linear(2, 2), te.Linear(16, 16)):
        for name in (0, torch.cuda.current_device(), "cuda:0"):
            assert layer.to(name) is layer and layer.weight.is_cuda
        assert layer.to(device=0, non_blocking=True) is layer
        assert layer.to(0, torch.bfloat16).weight.dtype == torch.bfloat16
        assert layer.to(dtype=torch.float32, device=0).weight.dtype == torch.float32


def test_a_mesh_of_devices(group: None) -> None:
    for mesh in (init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)), DeviceMesh("cuda", [0])):
        assert mesh.size() == 1 and mesh.get_local_rank() == 0
        assert distribute_tensor(torch.ones(4), mesh).full_tensor().sum() == 4
    model = fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=mesh)
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    assert model[0].weight.grad.full_tensor().eq(2).all()


def test_fsdp_by_index_of_a_device(group: None) -> None:
    for given in ({"device_id": torch.device("cuda", 0)}, {"device_id": 0}, {}):
        model = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=True, **given)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        assert model.weight.grad.eq(2).all()


def test_another_length_of_history_is_refused_by_name() -> None:
    """Transformer Engine writes the forward history into the place of the backward one."""
    layer, x = te.Linear(32, 32), torch.randn(16, 32)

    def step(layer: nn.Module, length: int) -> None:
        with te.fp8_autocast(
            enabled=True, fp8_recipe=recipes.DelayedScaling(amax_history_len=length)
        ):
            y = layer(x)
        y.sum().backward()

    step(layer, 4)
    with pytest.raises(ValueError, match="whose amax_history_len changes. Make a new layer"):
        step(layer, 8)
        step(layer, 8)
    FP8GlobalStateManager.reset()
    step(te.Linear(32, 32), 8)


@pytest.mark.parametrize("settings", [{"fp8_dpa": True}, {"fp8_mha": True}], ids=str)
def test_attention_in_fp8_names_what_it_needs(
    settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time, and what it names makes it run. Other attention has its own errors."""
    q, k, v = (torch.randn(32, 2, 4, 16, dtype=torch.bfloat16) for _ in range(3))
    attention, fp8 = te.DotProductAttention(4, 16), recipes.DelayedScaling(**settings)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="fused_attn_fwd.* NVTE_UnfusedDPA_Emulate"):
            with te.fp8_autocast(enabled=True, fp8_recipe=fp8):
                attention(q, k, v)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(ValueError, match="No dot product attention backend"):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipes.DelayedScaling()):
            te.DotProductAttention(4, 16)(q[:16], k, v)
    monkeypatch.delenv("NVTE_UNFUSED_ATTN")
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8):
        assert te.DotProductAttention(4, 16)(q[:8], k[:8], v[:8]).shape == (8, 2, 64)
