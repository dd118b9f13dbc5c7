"""Let Transformer Engine's layers run without values, as a GPU would run them, for a dry run."""

# B batch  S sequence  H heads  D head size

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from megafp8.backends.te.layer import layers_in
from megafp8.te_cpu.cuda import asking_frame, to_cpu

_DATA = torch.Tensor.data
_ON_CPU = ("workspace", "sign_vector", "hadamard_matrix", "rht_matrix")
"""What the names of Transformer Engine's functions have whose tensors keep their values."""


def scaling_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors in which Transformer Engine's quantizers keep scales and amaxes.

    With delayed scaling they are views of the modules' scales and histories.
    """
    for layer in layers_in(model):
        for module in layer.modules():
            for quantizers in getattr(module, "quantizers", {}).values():
                for quantizer in quantizers:
                    for name in ("scale", "amax"):
                        tensor = getattr(quantizer, name, None)
                        if isinstance(tensor, torch.Tensor):
                            yield tensor


@contextmanager
def without_values(model: nn.Module, *, on_gpu: bool) -> Iterator[None]:
    """Let the layers run on the meta device inside the context, as they would on a GPU or CPU.

    Without a GPU Transformer Engine computes attention from products and softmax. On one it takes
    flash attention or cuDNN's, which keep queries, keys, values, the output and one number a row.
    """
    cores: list[Any] = []
    for layer in layers_in(model) if on_gpu else ():
        attention: Any = layer.layer.get_submodule("self_attention.core_attention")
        cores.append(attention.unfused_attention)
        cores[-1].forward = _one_operation(layer.spec.attention_dropout)
    try:
        with CudaIsMeta():
            yield
    finally:
        for core in cores:
            del core.forward


class CudaIsMeta(TorchFunctionMode):
    """Puts what Transformer Engine asks for on a CUDA device onto the meta device.

    Its workspace of 32 MiB stays on the CPU, where a dry run does not count it, and so do the signs
    and the matrix of NVFP4's rotation, since it reads the signs and keeps both for later runs. A
    tensor without values is freed by giving it the memory of an empty one, which must be on its
    device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is _DATA and len(args) == 2 and args[0].is_meta:
            args = (args[0], args[1].to("meta"))
        caller = asking_frame(sys._getframe(1)) if "device" in kwargs else None
        if caller is not None and any(word in caller.f_code.co_name for word in _ON_CPU):
            kwargs = {**kwargs, "device": "cpu"}
        elif (device := kwargs.get("device")) is not None and to_cpu(device) is not device:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _one_operation(dropout: float) -> Callable[..., torch.Tensor]:
    """Return what takes the place of the forward pass of Transformer Engine's own attention."""

    def forward(
        alibi_cache: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        qkv_layout: str,
        cu_seqlens_q: torch.Tensor,
        **unused: object,
    ) -> torch.Tensor:
        whole = query.shape
        if qkv_layout.startswith("thd"):  # a dry run's documents are whole samples
            batch, qkv_layout = len(cu_seqlens_q) - 1, "bshd"
            query, key, value = (x.unflatten(0, (batch, -1)) for x in (query, key, value))
        dims = (1, 2, 0, 3) if qkv_layout.startswith("sb") else (0, 2, 1, 3)
        q_BHSD, k_BHSD, v_BHSD = (x.permute(dims) for x in (query, key, value))
        out_BHSD = F.scaled_dot_product_attention(
            q_BHSD,
            k_BHSD,
            v_BHSD,
            attn_mask=None,
            dropout_p=dropout,
            is_causal=True,
            scale=None,
            enable_gqa=query.shape[-2] != key.shape[-2],
        )
        inverse = (2, 0, 1, 3) if qkv_layout.startswith("sb") else (0, 2, 1, 3)
        return out_BHSD.permute(inverse).reshape(whole).flatten(-2)

    return forward
