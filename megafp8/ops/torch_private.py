"""Keep the private names of torch that training uses, but those of its pipelines, in this file.

A private name may change with any version of torch, so this is the first file to read when a new
version breaks something; `OWN_FILES` of `tests/test_torch_private.py` lists the others. Unless its
docstring says otherwise, each was tried with torch 2.11 and 2.13 to 2.15 on CPUs. The functions
for CUDA have never run. That test runs each one here, and finds private names that others use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionMeta
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
OBJECTS_IN_GRAPHS_FROM = (2, 13)
"""The first version of torch in which objects may be inputs of a graph and of its backward."""

_aten = torch.ops.aten


# Attention that also returns the log-sum-exp of its scores, which the public function does not.
cpu_attention = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = _aten._scaled_dot_product_flash_attention  # CUDA
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward  # CUDA
efficient_attention = _aten._scaled_dot_product_efficient_attention  # CUDA


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return a number of a tensor that each write in place increases."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter]] = attrgetter("_parameters")
"""Return a module's own parameters by name, sooner than the module's attributes of these names."""


# ------------------------------------------------------------------------- tensors and their bytes


def copy_all_(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy each source into its target, with one call for all tensors."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def zero_all_(tensors: Sequence[torch.Tensor]) -> None:
    """Set all tensors to zero, with one call."""
    torch._foreach_zero_(list(tensors))


def orthogonalize(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return the matrix with all singular values near 1, BF16, as `torch.optim.Muon` computes it.

    The Newton-Schulz iteration is Muon's (Jordan et al. 2024), with torch's coefficients. A BF16
    matrix is changed.
    """
    muon = importlib.import_module("torch.optim._muon")
    coefficients = (muon.DEFAULT_A, muon.DEFAULT_B, muon.DEFAULT_C)
    result: torch.Tensor = muon._zeropower_via_newtonschulz(
        matrix, coefficients, num_steps, muon.EPS
    )
    return result


def norms_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the L2 norm of each tensor, 0-d, with one call for all tensors.

    torch refuses an empty list, which a rank has that owns no such tensor.
    """
    listed = list(tensors)
    return list(torch._foreach_norm(listed)) if listed else []


def fused_adam_(
    params: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    is_decoupled: bool,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Count a step and update FP32 parameters of one device as `torch.optim.Adam(fused=True)` does.

    With `is_decoupled` it is AdamW. Where `found_inf` (0-d FP32) is 1, nothing changes, nor where
    no parameter has a gradient: an empty shard has a parameter that nothing ever updates.
    """
    grads: list[Any] = [param.grad for param in params]
    if not any(grad is not None for grad in grads):
        return
    kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    torch._foreach_add_(steps, 1)
    kernel(
        params, grads, exp_avgs, exp_avg_sqs, [], steps,
        amsgrad=False, maximize=False, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps,
        weight_decay=weight_decay, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def preserve_version(tensor: torch.Tensor) -> Any:
    """Return a context in which writes into `tensor` do not increase `version_of` it."""
    return _unsafe_preserve_version_counter(tensor)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other storage has that is alive."""
    key: int = storage._cdata
    return key


def storage_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return what keeps the storage's key from being another one's, and not its memory alive."""
    return StorageWeakRef(storage)


def local_shard(tensor: Any) -> torch.Tensor:
    """Return the tensor object that a `DTensor` holds, not a view: attributes may be set on it."""
    local: torch.Tensor = tensor._local_tensor
    return local


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` calls hooks of its own after its forward pass."""
    return bool(module._forward_hooks)


# ---------------------------------------------------------------------------------------- autograd


class _CallsBackward(FunctionMeta):
    """Let autograd's engine call `backward` itself; torch calls it through two functions."""

    def __init__(self, *definition: Any) -> None:
        super().__init__(*definition)  # type: ignore[no-untyped-call]
        function: Any = self
        function._backward_cls.apply = function.backward


class DirectFunction(torch.autograd.Function, metaclass=_CallsBackward):
    """Be the first base of an autograd function that neither functorch nor Dynamo meets.

    `apply` is torch's function in C++. The public method, in Python, looks for functorch's tensors
    among the arguments first, by a dozen calls for each linear of a model.
    """

    apply = torch._C._FunctionBase.__dict__["apply"]


functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether code runs inside a transform of `torch.func`: vmap, grad, jvp or another one."""


def run_backward(output: torch.Tensor, grad_output: torch.Tensor) -> None:
    """Run `output.backward(grad_output)` with the caller's function modes still active.

    The public method suspends them, also for what is recomputed inside.
    """
    torch.autograd.graph._engine_run_backward(
        (output,), (grad_output,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


# ------------------------------------------------------------------------------------- compilation


def load_dynamo() -> None:
    """Import the tracer of `torch.compile`, which records which optional packages there are."""
    importlib.import_module("torch._dynamo")


def inductor(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Return `graph` compiled by Inductor, the default backend of `torch.compile`."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


def is_recompilation() -> bool:
    """Whether the piece of code that is compiled now has been compiled before."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return compile_id is not None and bool(compile_id.frame_compile_id)


_OpaqueBase: Any = object
if _RELEASE >= OBJECTS_IN_GRAPHS_FROM:
    try:  # a build from before the release may have its number and not the class
        from torch._library.opaque_object import register_opaque_type as _register_opaque_type
        from torch._opaque_base import OpaqueBase as _OpaqueBase
    except ImportError:
        pass


def has_objects_in_graphs() -> bool:
    """Whether a `GraphInput` may be an input of a graph; tried with torch 2.13."""
    return _OpaqueBase is not object


class GraphInput(_OpaqueBase):  # type: ignore[misc,unused-ignore]
    """Make any object an input of a compiled graph, so that no graph is compiled for its content.

    It needs `has_objects_in_graphs`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


if has_objects_in_graphs():
    _register_opaque_type(GraphInput, typ="reference")

# ------------------------------------------------------------------------------------- distributed


def join_simulated_group(rank: int, world_size: int) -> None:
    """Initialize torch.distributed with its fake backend, which sends nothing and always succeeds.

    The import registers the backend; torch has no public way to do so.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def set_timeout(group: Any, seconds: float) -> None:
    """Set the timeout in seconds of later collectives of a process group; tried with gloo."""
    from torch.distributed import distributed_c10d

    names: Any = distributed_c10d
    # The name is public from torch 2.14 on, which warns about the older one.
    name = "set_timeout" if hasattr(names, "set_timeout") else "_set_pg_timeout"
    getattr(names, name)(timedelta(seconds=seconds), group)


def fsdp_all_gather(before: Callable[[torch.Tensor], None]) -> Any:
    """Return FSDP2's own all-gather, which calls `before` with each tensor that it sends."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    return _calling_first(DefaultAllGather, before)


def fsdp_reduce_scatter(before: Callable[[torch.Tensor], None]) -> Any:
    """Return FSDP2's own reduce-scatter, which calls `before` with each tensor that it sends."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    return _calling_first(DefaultReduceScatter, before)


def fsdp_reduce_scatter_by(reduce: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
    """Return a reduce-scatter for FSDP2 that calls `reduce` with its output and its input.

    Both are flat; FSDP2 has allocated them as for its own, and is on the stream of its own.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    def call(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **named: Any
    ) -> None:
        reduce(output_tensor, input_tensor)

    return type("ReduceScatterBy", (DefaultReduceScatter,), {"__call__": call})()


def fsdp_params(module: Any) -> list[torch.nn.Parameter]:
    """Return the shards of an FSDP2 module in the order in which they lie in its messages."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [param.sharded_param for param in group.fsdp_params]


def fsdp_take_hooks(module: Any) -> None:
    """Let an FSDP2 module see the all-gather hooks of its shards now.

    It looks for them once, before its first gather, and then copies shards that are padded. After
    this call it reads a shard that has hooks through them alone.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        group.lazy_init()


@contextmanager
def fsdp_without_values() -> Iterator[None]:
    """Let FSDP2 shard, gather and reduce parameters on the meta device, inside this context.

    torch looks for the streams of a device type in the module `torch.TYPE`, which meta does not
    have: here it is that of the CPU, whose streams do nothing. FSDP refuses a forward pass of
    parameters on meta, since their values were probably forgotten; here they are left out.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    assert not hasattr(torch, "meta"), "this version of torch has streams for meta"
    streams, current = ModuleType("torch.meta"), _StreamWithEvents()
    vars(streams).update({key: value for key, value in vars(torch.cpu).items() if key[0] != "_"})
    vars(streams).update(current_device=lambda: 0, Stream=_StreamWithEvents)
    vars(streams).update(current_stream=lambda device=None: current)
    group: Any = FSDPParamGroup
    refuse = group._validate_no_meta_params
    vars(torch)["meta"], group._validate_no_meta_params = streams, lambda self: None
    try:
        yield
    finally:
        del vars(torch)["meta"]
        group._validate_no_meta_params = refuse


class _StreamWithEvents(torch.cpu.Stream):
    """A stream that does nothing and returns events, as FSDP expects of all devices but CPUs."""

    stream_id = device_index = device_type = 0  # FSDP of torch 2.15 asks for them

    def record_event(self) -> Any:
        events: Any = torch.cpu
        return events.Event()


def _calling_first(collective: Any, before: Callable[[torch.Tensor], None]) -> Any:
    def call(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **named: Any
    ) -> Any:
        before(input_tensor)
        return collective.__call__(self, output_tensor, input_tensor, *args, **named)

    return type(f"Calling{collective.__name__}", (collective,), {"__call__": call})()


# -------------------------------------------------------------------------------------------- CUDA


def pause_gpu(cycles: int) -> None:
    """Let the current CUDA stream do nothing for about `cycles` of the GPU's clock."""
    torch.cuda._sleep(cycles)


def record_cuda_memory(max_entries: int | None) -> None:
    """Record the last `max_entries` events of CUDA's allocator from now on; None stops that."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_cuda_memory(path: str) -> None:
    """Write the recorded events to `path`, as pytorch.org/memory_viz reads them."""
    torch.cuda.memory._dump_snapshot(path)
