"""Heads that one launch turns and packs: the bits of `Rotary` and of torch's gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8_numerics.formats import FORMATS
from megafp8.fp8.fused import CastInto
from megafp8.fp8.heads import Heads, split_heads
from megafp8.fp8.kernels.triton_heads import pack_heads
from megafp8.models.positions import rotary
from tests.fp8_numerics.kernels.helpers import assert_payload, codes, floats, hard_matrix
from tests.spec.delayed import amax_of
from tests.tiny import of_heads

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
BATCH, SEQUENCE = 2, 35  # 70 tokens: two tiles, the second one not full


def plainly(qkv: torch.Tensor, heads: Heads, turn: object) -> list[torch.Tensor]:
    """Split and turn with torch's operations."""
    query, key = heads.num_heads * heads.size, heads.num_groups * heads.size
    parts = [
        part.unflatten(-1, (-1, heads.size)).transpose(1, 2)
        for part in qkv.split((query, key, key), dim=-1)
    ]
    if callable(turn):
        parts[:2] = [turn(part) for part in parts[:2]]
    return parts


def same(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bits are equal; NaNs, and zeros of either sign, count as equal."""
    return torch.equal(mine.isnan(), other.isnan()) and torch.equal(
        mine.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
        other.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("groups", "size", "turned", "batched"),
    [(3, 16, 16, False), (1, 20, 20, True), (1, 18, 6, False)],
    ids=["whole heads", "grouped, positions of each row", "a part of each head"],
)
def test_turned_heads_and_their_gradients(
    device: torch.device, groups: int, size: int, turned: int, batched: bool, dtype: torch.dtype
) -> None:
    positions = torch.arange(SEQUENCE, device=device)
    if batched:
        positions = torch.stack((positions, positions.flip(0)))
    turn = rotary(positions, of_heads(turned))
    heads = Heads(BATCH, 3, groups, size, (turn.cos, turn.sin))
    features = (3 + 2 * groups) * size
    grads, found = [], []
    for way in ("triton", "torch"):
        qkv = hard_matrix(BATCH * SEQUENCE, features, dtype).view(BATCH, SEQUENCE, -1)
        qkv = qkv.to(device).requires_grad_()
        parts = split_heads(qkv, heads) if way == "triton" else plainly(qkv, heads, turn)
        of_parts = [
            hard_matrix(part.numel() // size, size, dtype).to(device).view(part.shape)
            for part in parts
        ]
        torch.autograd.backward(list(parts), of_parts)
        assert qkv.grad is not None
        grads.append(qkv.grad)
        found.append(parts)
    for mine, other in zip(*found, strict=True):
        assert mine.shape == other.shape and same(mine.detach(), other.detach())
    assert same(*grads)


@pytest.mark.parametrize("turned", [0, 16])
def test_the_packed_gradient_and_its_cast(device: torch.device, turned: int) -> None:
    """Payloads, amax and sums are those of the gradient that is not cast."""
    turn = rotary(torch.arange(SEQUENCE, device=device), of_heads(16))
    heads = Heads(BATCH, 2, 1, 16, (turn.cos, turn.sin) if turned else None)
    shapes = [(BATCH, SEQUENCE, n, 16) for n in (2, 1, 1)]
    grads = [torch.randn(shape).bfloat16().to(device).transpose(1, 2) for shape in shapes]
    amax, scale = torch.zeros((), device=device), torch.tensor(37.0, device=device)
    into = CastInto(scale, FORMATS["e5m2"], amax, True, True, True, with_sums=True)
    made = heads.cast_grads(grads, into)
    assert made.payload is not None and made.payload_t is not None
    assert made.plain is not None and made.partial_sums is not None
    qkv = torch.zeros(BATCH, SEQUENCE, 64, dtype=torch.bfloat16, device=device).requires_grad_()
    torch.autograd.backward(plainly(qkv, heads, turn if turned else None), grads)
    assert qkv.grad is not None
    assert same(made.plain, qkv.grad.flatten(0, 1))
    assert_payload(made.payload, floats(made.plain), np.float32(37), "e5m2")
    assert np.array_equal(codes(made.payload_t), codes(made.payload).T)
    assert amax.item() == amax_of(floats(made.plain))
    total = made.partial_sums.sum(0)
    torch.testing.assert_close(total.double(), made.plain.double().sum(0), rtol=1e-5, atol=1e-5)


def test_parts_that_the_kernel_cannot_read_are_refused(device: torch.device) -> None:
    part, one = torch.zeros(1, 1, 4, 8, device=device), torch.ones((), device=device)
    with pytest.raises(ValueError, match="part"):
        pack_heads((part, part.bfloat16()), one, FORMATS["e4m3"], turn=None, backward=False)
    with pytest.raises(ValueError, match="part"):
        wrong = part.transpose(-1, -2)
        pack_heads((wrong, wrong), one, FORMATS["e4m3"], turn=None, backward=False)
