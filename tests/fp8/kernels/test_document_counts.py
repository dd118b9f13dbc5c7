"""What a layer starts on a GPU for documents that do not see each other: packed, and with a mask.

Counted on meta tensors as `layer_counts` counts. A kernel's call counts by its arguments and
results, so a mask counts once, though a kernel reads it for each head.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.models import attention, packed
from megafp8.models.documents import Documents
from megafp8.parallel.collectives import Axis
from megafp8.parallel.context import own_tokens
from tests.fp8.kernels.layer_counts import (
    BATCH,
    GPT,
    HIDDEN,
    META,
    SEQUENCE,
    Tally,
    counting,
    state_of,
)

MASK_ELEMENT = 1  # byte


class Fused(torch.autograd.Function):
    """Counts attention as a fused kernel does it, one launch and three; `more` is read by both."""

    @staticmethod
    def forward(ctx: Any, tally: Tally, more: torch.Tensor, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.tally = tally
        ctx.save_for_backward(more, *qkv)
        out = torch.empty_like(qkv[0])
        tally.add("attention", [more, *qkv, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        more, *qkv = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in qkv)
        ctx.tally.add("attention backward", [grad, more, *qkv, *grads], count=3)
        return None, None, *grads


def count(tally: Tally, **documents: torch.Tensor) -> tuple[int, int, int]:
    """Run a GPT layer's forward and backward pass twice; return the second one's launches, and the
    bytes of activations and of attention."""
    state = state_of(GPT)
    tally.takes_batches = True  # the copy of the borders, for which the host does not wait
    with META:
        for counted in (nullcontext(), tally):
            tally.launches.clear()
            tally.bytes.clear()
            state.sink.begin_step()
            state.scaling.begin_microbatch(0)
            x = torch.empty((BATCH, SEQUENCE, HIDDEN), dtype=torch.bfloat16, requires_grad=True)
            with counted:
                out = state.model.forward_layers(x, **documents)  # type: ignore[operator]
                out.backward(torch.empty_like(out))
    found = tally.bytes
    return sum(tally.launches.values()), found["activations"], found["attention"]


@pytest.mark.parametrize("num_documents", [2, 256])
def test_packed_documents_start_fewer_kernels_than_a_mask(
    num_documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, a layer starts what it starts without documents, and reads the borders beside it. A
    mask is made by passes over S x S elements of each sample, and read in both passes."""
    pytest.importorskip("triton")
    length = SEQUENCE // num_documents
    borders = torch.arange(0, BATCH * SEQUENCE + 1, length, dtype=torch.int32)
    ids = torch.empty((BATCH, SEQUENCE), dtype=torch.int64, device=META)
    with counting(monkeypatch) as tally:

        def by_mask(q: Any, k: Any, v: Any, *, attn_mask: torch.Tensor, **options: Any) -> Any:
            return Fused.apply(tally, attn_mask, q, k, v)

        def varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *rest: Any, **options: Any) -> Any:
            assert cu_q is cu_k and rest == (length, length)
            return Fused.apply(tally, cu_q, q, k, v)

        plain = count(tally)
        monkeypatch.setattr(attention, "uses_varlen", lambda *traits, **options: True)
        monkeypatch.setattr(packed, "varlen_kernel", lambda: varlen)
        in_blocks = count(tally, cu_seqlens_N1=borders)
        monkeypatch.setattr(F, "scaled_dot_product_attention", by_mask)
        masked = count(tally, document_ids_BS=ids)
    scores = BATCH * SEQUENCE**2 * MASK_ELEMENT
    assert in_blocks[:2] == plain[:2]
    assert in_blocks[2] == plain[2] + 2 * borders.numel() * borders.element_size()
    assert masked[0] == plain[0] + 4
    # Which keys are earlier, S x S, is written and read; which tokens have the same document is
    # written and read; both together are written. Each begins with numbers of tokens, in INT64.
    numbers = 2 * ids.nbytes + 3 * SEQUENCE * ids.element_size()
    assert masked[1] == plain[1] + 3 * scores + 2 * scores // BATCH + numbers
    assert masked[2] == plain[2] + 2 * scores


def test_the_host_does_not_wait_for_the_copies_of_what_it_plans() -> None:
    """Without `non_blocking` each would wait for all that the device was given before."""
    waits: list[bool] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "_to_copy" and made.is_meta:
                waits.append(not kwargs.get("non_blocking"))
            return made

    borders = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    with Copies():
        assert Documents(borders, 8, META).firsts_BS.shape == (2, 8)
        x_BS = torch.empty((2, 8), dtype=torch.int64, device=META)
        assert own_tokens(x_BS, Axis("cp", 2), borders=borders.tolist()).shape == (2, 4)
        whole_rows = torch.tensor([0, 8, 16], dtype=torch.int32)
        assert Documents(whole_rows, 8, META).firsts_BS.shape == (2, 8)
    assert waits == [False] * 2, "whole rows are planned on the device: a graph records no copy"
