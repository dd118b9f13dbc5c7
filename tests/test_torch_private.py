"""Each private name of torch does what its wrapper says, and no other file uses one.

Run this file with a new version of torch before anything else.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8_coverage import torch_private as of_coverage
from fp8_numerics import torch_private as of_numerics
from megafp8.ops import torch_private
from te_cpu import torch_private as of_te_cpu
from tests.test_layers import ROOT, source_files

OWN_FILES = (
    "megafp8/ops/torch_private.py",
    "megafp8/ops/torch_pipelining.py",
    "fp8_numerics/torch_private.py",
    "te_cpu/torch_private.py",
    "fp8_coverage/torch_private.py",
)
OF_OTHERS = {
    "*": ("os._exit", "sys._getframe", "sys._current_frames", "*._asdict"),
    # Hydra and OmegaConf
    "megafp8/c*/*.py": ("*._get_node", "*._value", "*._target_", "schema._set_flag"),
    "megafp8/config/settings.py": ("node._dereference_node",),
    "megafp8/config/schema/__init__.py": ("node._metadata",),
    "megafp8/jobs/hydra.py": ("*._target_",),
    # what Transformer Engine's Python keeps in its tensors and quantizers
    "megafp8/backends/te/*": ("[!t]*._*", "tensor._*", "tex._*"),
    "te_cpu/*": ("[!t]*._*", "tensor._*", "tex._*"),
    "megafp8_migrate/audit/with_accelerate.py": ("launch._*",),
    "megafp8/data/*tokenizer*.py": ("self._encoding._*",),
    "megafp8/fp8/experts.py": ("module._apply_gate",),
    "fp8_coverage/engines.py": ("operand._fp8_dtype", "operand._fp4_dtype"),
    "benchmarks/*": ("quantizer(x)._data",),
}
"""Private names of others than torch, by file."""


@cache
def names_of_ours() -> frozenset[str]:
    """Return the private names that our own files define for functions, classes and attributes."""
    found = set()
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
                    found.add(name)
    return frozenset(found)


def private_names(source: str) -> Iterator[str]:
    """Yield what `source` uses that begins with an underscore and that is not ours."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if _is_private(name):
                owner = ast.unparse(value)
                is_ours = owner in ("self", "cls", "super()") or name in names_of_ours()
                if not is_ours or "torch" in owner:
                    yield f"{owner}.{name}"
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    yield from _if_private(f"{module}.{alias.name}")
            case ast.Import(names=names):
                for alias in names:
                    yield from _if_private(alias.name)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).endswith("import_module"):
                    yield from _if_private(name)
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[value, name, *_]):
                attr = str(name.value) if isinstance(name, ast.Constant) else ""
                if _is_private(attr) and attr not in names_of_ours():
                    yield f"{ast.unparse(value)}.{attr}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _if_private(name: str) -> Iterator[str]:
    if name.startswith("torch.") and any(_is_private(part) for part in name.split(".")):
        yield name


def of_torch(path: str, source: str) -> list[str]:
    """Return the private names that may be torch's, in one file."""
    allowed = [name for files, names in OF_OTHERS.items() if fnmatch(path, files) for name in names]
    return [
        name
        for name in private_names(source)
        if name.startswith("torch") or not any(fnmatch(name, one) for one in allowed)
    ]


def test_no_other_file_uses_private_names_of_torch() -> None:
    found = {}
    for file in source_files():
        path = file.relative_to(ROOT).as_posix()
        if path not in OWN_FILES and (names := of_torch(path, file.read_text("utf-8"))):
            found[path] = names
    assert not found, f"use torch through {OWN_FILES}, or name another owner in OF_OTHERS: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "from torch._guards import CompileContext",
        "from torch.autograd.grad_mode import _unsafe_preserve_version_counter",
        "def late():\n    import torch._dynamo",
        "importlib.import_module('torch._inductor.compile_fx')",
        "torch._foreach_norm(x)",
        "a = torch.ops.aten\na._scaled_dot_product_flash_attention(q)",
        "key = storage._cdata",
        "getattr(param, '_local_tensor')",
    ],
)
def test_a_planted_private_name_is_found(source: str) -> None:
    assert len(of_torch("megafp8/models/gpt.py", source)) == 1
    assert of_torch("megafp8/models/gpt.py", "os._exit(1)\nself._own = 1\nlock._descriptor") == []


def test_attention_with_its_log_sum_exp() -> None:
    q, k, v = (torch.randn(2, 3, 4, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    grad = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected.backward(grad)
    with torch.no_grad():
        out, lse = torch_private.cpu_attention(q, k, v, 0.0, True, attn_mask=None, scale=None)
        grads = torch_private.cpu_attention_backward(
            grad, q, k, v, out, lse, 0.0, True, attn_mask=None, scale=None
        )
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    for found, leaf in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize(
    "attend", [torch_private.flash_attention, torch_private.flash_attention_backward,
               torch_private.efficient_attention]
)  # fmt: skip
def test_the_attention_kernels_of_gpus_are_operations_of_torch(attend: Any) -> None:
    assert "scale" in {argument.name for argument in attend.default._schema.arguments}


def test_many_tensors_at_once() -> None:
    targets = [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)]
    torch_private.copy_all_(targets, (torch.arange(3.0), torch.ones(2)), non_blocking=True)
    assert targets[0].tolist() == [0, 1, 2] and targets[1].tolist() == [1, 1]
    assert [norm.item() for norm in torch_private.norms_of([torch.tensor([3.0, 4.0])])] == [5.0]


def test_hooks_of_a_module_are_seen() -> None:
    module = torch.nn.Linear(2, 2)
    assert not torch_private.has_forward_hooks(module)
    hook = module.register_forward_hook(lambda *_: None)
    assert torch_private.has_forward_hooks(module)
    hook.remove()
    assert not torch_private.has_forward_hooks(module)


def test_the_product_of_tensor_cores_takes_scales_and_an_output_dtype() -> None:
    a, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    result = of_numerics.scaled_mm(
        a, a.t(), scale_a=scale, scale_b=scale, out_dtype=torch.float32, use_fast_accum=False
    )
    assert torch.equal(result, torch.full((16, 16), 4.0))


def test_parameters_are_the_module_s_own() -> None:
    linear = torch.nn.Linear(2, 3, bias=False)
    assert torch_private.parameters_of(linear).get("weight") is linear.weight
    linear.weight = weight = torch.nn.Parameter(torch.zeros(3, 2))
    assert torch_private.parameters_of(linear)["weight"] is weight
    assert torch_private.parameters_of(linear).get("bias") is None


def test_versions_and_storages() -> None:
    x = torch.zeros(3)
    before = torch_private.version_of(x)
    with torch_private.preserve_version(x):
        x.add_(1)
    assert torch_private.version_of(x) == before
    x.add_(1)
    assert torch_private.version_of(x) == before + 1
    keys = {torch_private.storage_key(y.untyped_storage()) for y in (x, x[1:], torch.zeros(3))}
    assert len(keys) == 2


class Seen(torch.overrides.TorchFunctionMode):
    """Notes whether the recomputation of a function sees this mode."""

    names: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_backward_keeps_function_modes() -> None:
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()

    counts = []
    for run in (torch_private.run_backward, lambda out, grad: out.backward(grad)):
        x = torch.ones(2, requires_grad=True)
        with Seen() as seen:
            out = loss_of(x)
            run(out, torch.ones(()))
        assert torch.equal(x.grad, torch.ones(2).cos())
        counts.append(seen.names.count("sin"))
    assert counts == [2, 1]


class Doubled(torch.autograd.Function):
    """Doubles a tensor, and its gradient fourfold, so that the function's own backward is seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 4 * grads[0]


class DirectlyDoubled(torch_private.DirectFunction, Doubled):
    """The same by torch's function in C++."""


def test_a_direct_function_does_the_same() -> None:
    results = []
    for function in (Doubled, DirectlyDoubled):
        x = torch.arange(3.0).requires_grad_()
        out = function.apply(x)
        out.backward(torch.ones(3))
        assert x.grad is not None
        results.append((out.detach(), x.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(results[1][1], torch.full((3,), 4.0))


class Bytes(torch.Tensor):
    """A tensor without storage."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_private_functions_can_be_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "_make_wrapper_subclass", torch.Tensor._make_wrapper_subclass)
    coalescing = torch.distributed._coalescing_manager
    monkeypatch.setattr(torch.distributed, "_coalescing_manager", coalescing)
    called = []

    def noted(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: (called.append(name), run(*args, **kwargs))[1]

        return wrap

    of_te_cpu.wrap_make_wrapper_subclass(noted("subclass"))
    undo = of_te_cpu.wrap_coalescing_manager(noted("together"))
    torch.distributed._coalescing_manager()  # a context, which is not entered
    undo()
    assert called == ["together"] and torch.distributed._coalescing_manager is coalescing
    called.clear()
    made = torch.Tensor._make_wrapper_subclass(Bytes, (2, 3), dtype=torch.float32)
    assert called == ["subclass"] and made.shape == (2, 3)
    undo = of_te_cpu.wrap_default_device(lambda device: "meta")
    with torch.device("cpu"):
        assert torch.zeros(2).is_meta
    undo()
    with torch.device("cpu"):
        assert not torch.zeros(2).is_meta


def test_a_group_of_gloo_gets_another_timeout() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
        torch_private.set_timeout(group, 7.0)
        gloo = group._get_backend(torch.device("cpu"))
        assert gloo.options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_a_simulated_group_and_the_collectives_of_fsdp() -> None:
    torch_private.join_simulated_group(rank=1, world_size=4)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        sent: list[torch.Size] = []
        gather = torch_private.fsdp_all_gather(lambda x: sent.append(x.shape))
        reduce = torch_private.fsdp_reduce_scatter(lambda x: sent.append(x.shape))
        whole, part = torch.zeros(8), torch.zeros(2)
        gather(output_tensor=whole, input_tensor=part, group=dist.group.WORLD)
        reduce(output_tensor=part, input_tensor=whole, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
        assert sent == [(2,), (8,)]
        from torch.distributed.tensor import distribute_tensor

        mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
        shard = distribute_tensor(torch.zeros(8), mesh, src_data_rank=None)
        assert torch_private.local_shard(shard) is torch_private.local_shard(shard)
    finally:
        dist.destroy_process_group()


def test_the_shards_of_an_fsdp_module() -> None:
    """Their order in a message, one's hooks in place of its padded memory, and another sum."""
    torch_private.join_simulated_group(rank=1, world_size=4)
    try:
        mesh, linear = dist.device_mesh.init_device_mesh("cpu", (4,)), nn.Linear(2, 6)
        given: list[torch.Tensor] = []
        reduce = torch_private.fsdp_reduce_scatter_by(
            lambda out, whole: given.append(whole.clone())
        )
        module: Any = fully_shard(linear, mesh=mesh)
        module.set_custom_reduce_scatter(reduce)
        weight, bias = torch_private.fsdp_params(module)
        assert weight is linear.weight and bias is linear.bias
        local: Any = torch_private.local_shard(weight)
        local.fsdp_pre_all_gather = lambda mesh: ((torch.ones(2, 2),), None)
        local.fsdp_post_all_gather = lambda gathered, *_, out=None: (gathered[0], ())
        torch_private.fsdp_take_hooks(module)
        local.untyped_storage().resize_(0)
        linear(torch.ones(1, 2)).sum().backward()
        (whole,) = given
        assert whole.numel() == 4 * (2 * 2 + 2), "rows are padded to a multiple of the ranks"
        assert torch.equal(whole.view(4, 6)[:3], torch.ones(3, 6)) and not whole.view(4, 6)[3].any()
    finally:
        dist.destroy_process_group()


def test_fsdp_shards_and_gathers_without_values() -> None:
    """The rank holds half of the weight, gathers all of it, and has half of the gradient."""
    from torch.distributed.fsdp import fully_shard

    torch_private.join_simulated_group(rank=1, world_size=2)
    try:
        with torch_private.fsdp_without_values():
            layer = nn.Linear(8, 4, bias=False, device="meta")
            mesh = dist.device_mesh.DeviceMesh.from_group(dist.group.WORLD, "meta")
            fully_shard(layer, mesh=mesh)
            assert torch_private.local_shard(layer.weight).shape == (2, 8)
            out = layer(torch.empty(3, 8, device="meta"))
            torch_private.run_backward(out, torch.empty_like(out))
            assert torch_private.local_shard(layer.weight.grad).shape == (2, 8)
        assert not hasattr(torch, "meta")
    finally:
        dist.destroy_process_group()


def test_transforms_of_functions_are_seen_inside_alone() -> None:
    seen = []

    def see(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.functorch_is_active())
        return x.sum()

    x = torch.ones(2, 3)
    see(x)
    torch.func.vmap(see)(x)
    torch.func.grad(see)(x)
    see(x)
    assert seen == [False, True, True, False]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_object_of_a_storage_ends_with_the_storage(device: str) -> None:
    """`LiveBytes` is told of the end by a weak reference; torch keeps the object until then."""
    tensor, ended = torch.zeros(4, device=device), []
    ref = weakref.ref(tensor.untyped_storage(), ended.append)
    view = (tensor.requires_grad_() * 1)[1:].view(-1).grad_fn
    assert not ended and ref() is tensor.untyped_storage() and view is not None
    part = tensor.detach()[2:]
    del tensor, view
    assert not ended
    del part
    assert ended


def test_a_torch_of_that_number_without_the_class_has_no_objects_in_graphs() -> None:
    """NVIDIA's images have builds from before a release, under its number."""
    code = (
        "import sys, torch\n"
        "torch.__version__ = '2.13.0a0+1234.nv26.06'\n"
        "sys.modules['torch._opaque_base'] = None\n"
        "from megafp8.ops import torch_private\n"
        "assert not torch_private.has_objects_in_graphs()\n"
        "assert torch_private.GraphInput(1).value == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.skipif(
    not torch_private.has_objects_in_graphs(), reason="this torch takes no objects into graphs"
)
def test_objects_are_inputs_of_graphs_and_compilations_are_told_apart() -> None:
    @torch.library.custom_op("megafp8_test::times", mutates_args=())
    def times(x: torch.Tensor, handle: torch_private.GraphInput) -> torch.Tensor:
        return x * handle.value

    @times.register_fake
    def _(x: torch.Tensor, handle: torch_private.GraphInput) -> torch.Tensor:
        return torch.empty_like(x)

    class Times(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.handle = torch_private.GraphInput(factor)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.megafp8_test.times(x + 1, self.handle)

    again = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        again.append(torch_private.is_recompilation())
        return graph.forward

    torch._dynamo.reset()
    function = torch.compile(lambda module, x: module(x), backend=backend, dynamic=False)
    assert function(Times(2.0), torch.ones(2)).tolist() == [4, 4]
    assert function(Times(3.0), torch.ones(2)).tolist() == [6, 6]
    assert again == [False]
    function(Times(3.0), torch.ones(3))
    assert again == [False, True]


def test_a_backward_pass_is_told_from_a_forward_pass() -> None:
    """Also where a hook of a tensor runs in it."""
    seen = []
    y = torch.ones(2, requires_grad=True).sin()
    y.register_hook(lambda grad: seen.append(of_coverage.backward_pass()))
    assert of_coverage.backward_pass() == -1
    y.sum().backward()
    assert len(seen) == 1 and seen[0] >= 0 and of_coverage.backward_pass() == -1
