"""Make the module that stands in for `transformer_engine_torch`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from fp8_numerics.meta import as_one_kernel
from te_cpu import (
    activations,
    attention,
    dropout,
    gemm,
    grouped,
    masters,
    multi_tensor,
    norms,
    nv,
    permute,
    quantize,
    rope,
    router,
    updates,
)
from te_cpu.enums import enumerations
from te_cpu.missing import Missing
from te_cpu.wheel import Sources


def get_cublasLt_version() -> int:  # noqa: N802  # Transformer Engine's name
    return 130101


def get_cudnn_version() -> int:
    return 91900


def get_num_cublas_streams() -> int:
    return 4


def device_supports_multicast(device_id: int = -1) -> bool:
    return False


def ubuf_built_with_mpi() -> bool:
    return False


class FP8TensorMeta:
    """Scales and histories of a module's tensors, which Python fills in."""

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax_history: torch.Tensor


LIBRARY: tuple[Callable[..., Any], ...] = (
    get_cublasLt_version,
    get_cudnn_version,
    get_num_cublas_streams,
    device_supports_multicast,
    ubuf_built_with_mpi,
)


def kernels(version: tuple[int, ...]) -> dict[str, Callable[..., Any]]:
    """Return all functions by name, as this version calls them."""
    topics = (
        quantize, gemm, grouped, norms, activations, dropout, attention, rope, permute, updates,
        masters, multi_tensor, nv,
    )  # fmt: skip
    found = [kernel for topic in topics for kernel in topic.KERNELS]
    by_name = {kernel.__name__: kernel for kernel in (*found, *LIBRARY)}
    for masked in ("masked_", "upper_triang_masked_", "aligned_causal_masked_"):
        by_name[f"scaled_{masked}softmax_backward"] = attention.scaled_softmax_backward
    by_name["multi_tensor_adam_capturable_master"] = by_name["multi_tensor_adam_capturable"]
    if version < (2, 10):
        by_name["fused_rope_backward"] = rope.fused_rope_backward_to_2_9
    of_grouped = "te_general_grouped_gemm_for_grouped_tensor"
    if version < (2, 16):
        by_name[of_grouped] = grouped.te_general_grouped_gemm_to_2_15
    for discrete in ("in", "out"):
        by_name[f"te_general_grouped_gemm_for_discrete_{discrete}"] = by_name[of_grouped]
    if version < (2, 16):
        by_name["moe_permute_fwd"] = permute.moe_permute_fwd_to_2_15
    if version >= (2, 18):
        by_name["group_quantize"] = grouped.group_quantize_from_2_18
        by_name["bgrad_group_quantize"] = grouped.bgrad_group_quantize_from_2_18
    return {**by_name, **router.kernels(version)}


def make_extension(sources: Sources) -> ModuleType:
    """Return the module, made for `sources`. A name that it lacks is a `Missing`."""
    module = ModuleType("transformer_engine_torch", __doc__)
    version = tuple(int(number) for number in sources.version.split(".")[:2])
    module.__dict__.update(enumerations(version))
    for name, kernel in kernels(version).items():
        module.__dict__[name] = as_compiled(kernel)
    if version < (2, 10):  # it is a number there, and a function later
        module.__dict__["_num_cublas_streams"] = get_num_cublas_streams()
    none: Any = module.__dict__["NVTE_Fused_Attn_Backend"].NVTE_No_Backend
    told = (none, "a CPU has no cuDNN") if version >= (2, 20) else none
    module.__dict__["get_fused_attn_backend"] = lambda *args, **kwargs: told
    module.__dict__["FP8TensorMeta"] = FP8TensorMeta
    module.__dict__["sources"] = sources
    module.__dict__["__getattr__"] = _missing
    return module


def as_compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like a compiled one: autograd and autocast do not see into it.

    Nor does torch's default dtype change what it computes.
    """

    @functools.wraps(kernel)
    def called(*args: Any, **kwargs: Any) -> Any:
        is_cast = torch.is_autocast_enabled("cpu")
        as_given = torch.autocast("cpu", enabled=False) if is_cast else nullcontext()
        default = torch.get_default_dtype()  # BF16 in a forward pass of Lightning's plugin
        torch.set_default_dtype(torch.float32)
        try:
            with torch.no_grad(), as_one_kernel(), as_given:
                found = kernel(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)
        if isinstance(found, list | tuple):
            return type(found)(_without_base(each, args) for each in found)
        return _without_base(found, args)

    return called


def _without_base(found: Any, given: tuple[Any, ...]) -> Any:
    """Return a result that is no view of another tensor, as those of compiled functions are not.

    Autograd refuses to change a view in place that one of its functions has returned.
    """
    is_view = type(found) is torch.Tensor and found._is_view()
    return found.data if is_view and not any(found is each for each in given) else found


def _missing(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)
