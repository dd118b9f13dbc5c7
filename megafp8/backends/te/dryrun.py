"""Let Transformer Engine's layers run without values, as a GPU would run them, for a dry run."""

# B batch  S sequence  H heads  D head size

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.backends.te.layer import layers_in
from megafp8.backends.te.names import kernels_on_cpu

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
        with cuda_is_meta():
            yield
    finally:
        for core in cores:
            del core.forward


@contextmanager
def cuda_is_meta() -> Iterator[None]:
    """Let Transformer Engine have on the meta device what it asks for on a CUDA device.

    A tensor without values is freed by giving it the memory of an empty one, which must be on its
    device.
    """

    def give(tensor: torch.Tensor, data: torch.Tensor) -> None:
        _DATA.__set__(tensor, data.to("meta") if tensor.is_meta else data)  # type: ignore[attr-defined]

    tensor: Any = torch.Tensor
    assert "data" not in vars(tensor), "this context is open already"
    tensor.data = property(_DATA.__get__, give)  # type: ignore[attr-defined]
    try:
        with kernels_on_cpu().placing(_on_meta):
            yield
    finally:
        del tensor.data


def _on_meta(device: Any, asking: FrameType) -> Any:
    """Return where a dry run has what is asked for on a device.

    The workspace of 32 MiB stays on the CPU, where a dry run does not count it, and so do the signs
    and the matrix of NVFP4's rotation, since it reads the signs and keeps both for later runs.
    """
    if any(word in asking.f_code.co_name for word in _ON_CPU):
        return "cpu"
    return device if kernels_on_cpu().to_cpu(device) is device else "meta"


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
