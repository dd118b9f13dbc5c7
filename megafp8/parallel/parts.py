"""The parts of a GPT with our own linears: FP8 or not, on one rank or tensor-parallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megafp8.models.init import Draw, constant, parameter
from megafp8.models.loss import HeadLoss
from megafp8.models.parts import Parts, Rows
from megafp8.models.random import RandomStreams
from megafp8.parallel.collectives import Axis
from megafp8.parallel.tensor import ColumnParallel, RowParallel, column_pieces, row_pieces
from megafp8.precision.embedding import look_up
from megafp8.precision.gemm import GemmCounter, gemm
from megafp8.precision.grad_sink import GradSink
from megafp8.precision.linear import Linear, LinearComm, LinearScaling, NoComm
from megafp8.precision.scaling import ScalingState
from megafp8.specs import GPTSpec
from megafp8.specs.placement import Piece, whole


class NativeParts(Parts):
    """QKV, projection, FC1 and FC2 go through `precision.linear`; embedding and head stay whole."""

    def __init__(
        self,
        spec: GPTSpec,
        dtype: torch.dtype,
        seed: int,
        streams: RandomStreams,
        *,
        scaling: ScalingState | None,
        tp: Axis,
        sink: GradSink,
        counter: GemmCounter,
        half_weights: bool = True,
    ) -> None:
        super().__init__(spec, dtype, seed, streams)
        self.half_weights = half_weights
        self.scaling, self.tp, self.sink, self.counter = scaling, tp, sink, counter

    def look_up(self, tokens_BS: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        return look_up(tokens_BS, weight_VD, self.sink)

    def whole_parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> nn.Parameter:
        """Embeddings and norms: FP32 without `half_weights`, and with them the residual stream."""
        dtype = self.dtype if self.half_weights else torch.float32
        return parameter(shape, whole(name, shape), draw, dtype)

    def norm(self, name: str) -> nn.Module:
        norm = super().norm(name)
        return norm if self.half_weights else nn.Sequential(norm, Cast(self.dtype))

    def norm_linear(self, norm: str, rows: Sequence[Rows], std: float) -> nn.Module:
        in_features = self.spec.hidden_size
        weights, biases = column_pieces(rows, in_features, self.tp)
        share = sum(part.out_features for part in rows) // self.tp.size
        name = f"{rows[0].name.rpartition('.')[0]}.qkv" if len(rows) > 1 else rows[0].name
        comm = ColumnParallel(self.tp) if self.tp.size > 1 else NoComm()
        linear = self._linear(name, (share, in_features), weights, biases, std, comm)
        return nn.Sequential(self.norm(norm), linear)

    def linear(self, rows: Rows, in_features: int, std: float) -> nn.Module:
        weights, biases = row_pieces(rows, in_features, self.tp)
        shape = (rows.out_features, in_features // self.tp.size)
        comm = RowParallel(self.tp) if self.tp.size > 1 else NoComm()
        return self._linear(rows.name, shape, weights, biases, std, comm)

    def _linear(
        self,
        name: str,
        shape: tuple[int, int],
        weights: list[Piece],
        biases: list[Piece],
        std: float,
        comm: LinearComm,
    ) -> Linear:
        return Linear(
            self.normal_parameter(shape, weights, std),
            parameter(shape[:1], biases, constant(0.0), self.dtype),
            name=name,
            scaling=None if self.scaling is None else LinearScaling.register(self.scaling, name),
            comm=comm,
            sink=self.sink,
            counter=self.counter,
        )

    def head_loss(self) -> HeadLoss:
        def matmul(
            a: torch.Tensor,
            b: torch.Tensor,
            *,
            place: str,
            transpose_a: bool = False,
            transpose_b: bool = False,
        ) -> torch.Tensor:
            return gemm(
                a,
                b if b.dtype == a.dtype else b.to(a.dtype),
                work=a.dtype,
                counter=self.counter,
                place=place,
                transpose_a=transpose_a,
                transpose_b=transpose_b,
            )

        def add_grad_weight(weight: nn.Parameter, grad: torch.Tensor) -> torch.Tensor | None:
            added = self.sink.add(weight, lambda: grad)
            return None if added is None else added.to(weight.dtype)

        return HeadLoss(matmul, add_grad_weight)

    def count_attention_flops(self, flops: int) -> None:
        precision = {
            torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"
        }[self.dtype]  # fmt: skip
        self.counter.add(precision, "attention", flops)


class Cast(nn.Module):
    """To the dtype of GEMMs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def linears_of(model: nn.Module) -> list[Linear]:
    """The model's own linears, in order."""
    return [module for module in model.modules() if isinstance(module, Linear)]
