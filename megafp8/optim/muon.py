"""Update the matrices of the layers with Muon (Jordan et al. 2024), as `torch.optim.Muon` does.

    M  = M + (1 - momentum) * (G - M)                 the momentum, in FP32
    U  = G + momentum * (M - G)                       with Nesterov; otherwise M
    O  = orthogonalize(U)                             Newton-Schulz iterations, in BF16
    W  = W * (1 - lr * weight_decay) - lr * scale * O

A matrix is a logical tensor of the model: query, key and value are three (Megatron's
`muon_split_qkv`), and the gate and the other half of a gated MLP are two, which Megatron takes for
one. A rank that holds a part of a matrix gathers U in BF16, in which the iterations begin anyway,
and keeps its part of O; so the result depends on the layout only as far as G does. In Megatron's
mode `blockwise` a tensor-parallel rank orthogonalizes and scales its own part alone, which is
another optimizer.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from megafp8.models.init import pieces_of
from megafp8.ops import torch_private
from megafp8.optim.protocol import Optimizer, Step
from megafp8.parallel.collectives import Axis
from megafp8.specs.division import padded_rows
from megafp8.specs.geometry import Piece
from megafp8.specs.optim import MOMENTUM, MuonSpec

UPDATE = torch.bfloat16
"""The dtype in which torch's Muon orthogonalizes."""


class Muon(Optimizer):
    """Update matrices whole; another optimizer updates the other parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows = {self.masters.segments[row].param: row for row in self.rows}
        assert len(self._rows) == len(self.rows), "a matrix has one segment on a rank"
        self._shards = self.masters.shards if self.masters.holds_rows else Axis("shards")

    def describe(self) -> str:
        text = f"Muon for {len(self.params)} weights of linears"
        if self.tp.size > 1:
            gathers = self.spec.muon.tp_mode == "duplicated"
            text += f", {'gathered from tensor-parallel ranks' if gathers else 'by parts of ranks'}"
        return text

    def update(self, step: Step) -> None:
        """Apply the gradients in `masters`; all ranks with parts of the same matrices call it.

        Ranks that have rows of a parameter share the work: each orthogonalizes one of as many
        parameters as there are ranks.
        """
        owned = [p for p in self.params if self._shards.size > 1 or p in self._rows]
        size, rank = self._shards.size, self._shards.rank
        for first in range(0, len(owned), size):
            group = owned[first : first + size]
            own_update: torch.Tensor | None = None
            for index, param in enumerate(group):
                gathered = self._gathered(param)
                if index == rank:
                    own_update = gathered
            if own_update is not None:
                own_update = self._orthogonalized(group[rank], own_update)
            for index, param in enumerate(group):
                result = own_update if index == rank else None
                if result is None:
                    result = torch.empty(param.shape, dtype=UPDATE, device=self.masters.device)
                self._shards.broadcast(result, source=index)
                self._apply(param, result, step.lr)

    def _gathered(self, param: nn.Parameter) -> torch.Tensor:
        """Return U of a parameter, BF16 [rows, columns], of all ranks that have rows of it."""
        num_rows, columns = param.shape
        share = padded_rows(num_rows, self._shards.size)
        own_rows = torch.zeros(share, columns, dtype=UPDATE, device=self.masters.device)
        if (row := self._rows.get(param)) is not None:
            momentum = self.states[row][MOMENTUM].payload
            grad = self.masters.grads[row].view_as(momentum)
            beta = self.spec.muon.momentum
            momentum.lerp_(grad, 1 - beta)
            update = grad.lerp(momentum, beta) if self.spec.muon.nesterov else momentum
            update = update.view(-1, columns)
            own_rows[: len(update)] = update
        return self._shards.gather_rows(own_rows)[:num_rows]

    def _orthogonalized(self, param: nn.Parameter, gathered: torch.Tensor) -> torch.Tensor:
        """Return the update of this tensor-parallel rank's part of a parameter, BF16."""
        parts, rank, out = [gathered], 0, torch.empty_like(gathered)
        if self.spec.muon.tp_mode == "duplicated":  # each rank orthogonalizes the whole matrix
            parts, rank = self.tp.all_gather(gathered.contiguous()), self.tp.rank
        for piece in pieces_of(param):
            dim = _sharded_dim(piece) if len(parts) > 1 else None
            if dim is None:
                whole = gathered[piece.local].contiguous()
                out[piece.local] = torch_private.orthogonalize(whole, self.spec.muon.num_steps)
            else:
                whole = torch.cat([part[piece.local] for part in parts], dim)
                result = torch_private.orthogonalize(whole, self.spec.muon.num_steps)
                out[piece.local] = result.chunk(len(parts), dim)[rank]
        return out

    def _shape_of(self, piece: Piece) -> tuple[int, ...]:
        """Return the shape of the matrix that is orthogonalized for a logical tensor.

        A part that is orthogonalized alone has the scale of its own shape, as in Megatron-core's
        `TensorParallelMuon`: so its elements are as large as those of a whole matrix.
        """
        is_whole = self.spec.muon.tp_mode == "duplicated"
        return piece.global_shape if is_whole else piece.local_box.shape

    def _apply(self, param: nn.Parameter, result: torch.Tensor, lr: float) -> None:
        """Decay the master of this rank's rows of a parameter, and subtract the update."""
        if (row := self._rows.get(param)) is None:
            return
        columns = param.shape[1]
        master = self.masters.masters[row].detach().view(-1, columns)
        first = self.masters.segments[row].begin // columns
        master.mul_(1 - lr * self.spec.weight_decay)
        for piece in pieces_of(param):
            rows = piece.local[0]
            low, high = max(rows.start, first), min(rows.stop, first + len(master))
            if low < high:
                scale = scale_of(self.spec.muon, self._shape_of(piece))
                own_rows = master[low - first : high - first, piece.local[1]]
                own_rows.add_(result[low:high, piece.local[1]], alpha=-lr * scale)


def scale_of(muon: MuonSpec, shape: tuple[int, ...]) -> float:
    """Return the factor of a matrix's update, by its shape [output, input].

    `spectral` times 0.2 is torch's `match_rms_adamw`, and `shape_scaling` its `original`.
    """
    rows, columns = shape
    factors = {
        "spectral": math.sqrt(max(rows, columns)),
        "shape_scaling": math.sqrt(max(1, rows / columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
    }
    return muon.extra_scale_factor * factors[muon.scale_mode]


def _sharded_dim(piece: Piece) -> int | None:
    """Return the dim in which tensor-parallel ranks have parts of a logical tensor, or None."""
    sharded = [d for d, size in enumerate(piece.local_box.shape) if size != piece.global_shape[d]]
    assert len(sharded) <= 1, piece
    return sharded[0] if sharded else None
