"""One training step, in the order things happen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafp8.data.loader import Microbatch
from megafp8.optim.clip import grad_norm
from megafp8.optim.schedules import learning_rate
from megafp8.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """Over the global batch: nats per counted token, norm before clipping."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train_step(state: TrainState, microbatches: Sequence[Microbatch]) -> StepResult:
    """Forward, backward, reduce, clip, update. A step that is not finite updates nothing.

    The loss is summed, not averaged, until all ranks' microbatches are in: one division by the
    number of counted tokens makes it a mean over the global batch's real tokens.
    """
    loss_sum, num_tokens = forward_backward(state, microbatches)
    totals = state.mesh.dp.all_reduce_sum(torch.stack((loss_sum, num_tokens)))
    state.mesh.dp.all_reduce_sum(state.masters.flat_grad)
    loss, count = (totals[0] / totals[1]).item(), int(totals[1].item())
    norm = (grad_norm(state.masters, state.mesh.tp) / totals[1]).item()  # NaN if none counted
    spec = state.optimizer.spec
    result = StepResult(loss, norm, learning_rate(spec, state.step + 1), count)
    if result.is_finite:
        clip = spec.clip_grad_norm or math.inf
        coefficient = min(1.0, clip / (norm + 1e-6))  # the constant of torch's clip_grad_norm_
        state.masters.flat_grad.mul_(coefficient / count)
        state.optimizer.step(state.step + 1)
    return result


def forward_backward(
    state: TrainState, microbatches: Sequence[Microbatch]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulate the gradients of the summed loss; returns (loss sum, counted tokens), in FP64."""
    device, dp = state.mesh.device, state.mesh.dp
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_tokens = torch.zeros((), dtype=torch.float64, device=device)
    state.sink.begin_step()
    for index, microbatch in enumerate(microbatches):
        tokens_BS, targets_BS = to_device(microbatch, device)
        state.streams.begin_microbatch(state.step + 1, index * dp.size + dp.rank)
        state.scaling.begin_microbatch(index)
        loss = state.model(tokens_BS, targets_BS, **document_inputs(microbatch, device))
        state.scaling.end_forward()
        loss.backward()
        state.scaling.end_backward()
        loss_sum += loss.detach()
        num_tokens += (targets_BS >= 0).sum()
    state.sink.end_step()
    return loss_sum, num_tokens


def to_device(microbatch: Microbatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_BS = torch.from_numpy(microbatch.tokens_BS)
    targets_BS = torch.from_numpy(microbatch.targets_BS)
    return tokens_BS.to(device), targets_BS.to(device)


def document_inputs(microbatch: Microbatch, device: torch.device) -> dict[str, torch.Tensor]:
    """What tells a sample's documents apart, as the model's keywords; empty where nothing does."""
    arrays = {
        "position_ids_BS": microbatch.position_ids_BS,
        "document_ids_BS": microbatch.document_ids_BS,
    }
    return {name: torch.from_numpy(a).to(device) for name, a in arrays.items() if a is not None}
