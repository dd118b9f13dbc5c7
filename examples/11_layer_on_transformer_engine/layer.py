"""Build a layer of one's own on Transformer Engine: a gated MLP that counts open gates.

Nothing here knows that a CPU may run it. `test_layer.py` beside it needs no GPU, and `test.yml` is
a workflow of GitHub's for it.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from torch import nn


class GatedMLP(nn.Module):
    """Computes x + down(silu(gate) * up), with a norm before it; its linears in FP8.

    The buffer `active` is the share of the gate's numbers that were positive in the last forward
    pass.
    """

    active: torch.Tensor

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = te.LayerNormLinear(hidden, 2 * inner, bias=False, device="cuda")
        self.down = te.Linear(inner, hidden, bias=False, device="cuda")
        self.register_buffer("active", torch.zeros((), device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` [tokens, hidden] and what the MLP adds to it."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        self.active = (gate.detach() > 0).float().mean()
        added: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return x + added
