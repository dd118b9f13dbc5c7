"""Run one training step: forward and backward passes, reduction, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from megafp8.data.loader import Microbatch
from megafp8.models.loss import HeadLoss, backward_of_loss
from megafp8.optim.clipping import grad_norm
from megafp8.optim.schedules import learning_rate
from megafp8.parallel.context import own_positions, own_tokens, tokens_of
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pipeline import Batch, PipelinedGPT
from megafp8.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """Hold the results of a step over the global batch.

    `loss` is in nats per counted token, `grad_norm` is the norm before clipping. The gradients are
    those of the loss and of what layers have added to it (`models.added_loss`).
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    loss_scale: float | None = None  # FP16's loss scale in this step
    scale_falls: bool = False  # not finite because FP16's loss scale is too large; it will fall
    raised: tuple[bool, ...] = ()  # for each flag, whether any rank has raised it
    more: tuple[float, ...] = ()  # this rank's numbers that came to the host with the result
    added: Mapping[str, float] = field(default_factory=dict)  # the terms of layers, for the log
    # the tokens of each expert of each layer; those of layers without experts are zeros
    tokens_of_experts: Sequence[Sequence[float]] = ()

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def no_flags() -> tuple[bool, ...]:
    """Return no flags, for a step after which the ranks need not agree on anything."""
    return ()


def train_step(
    state: TrainState,
    microbatches: Sequence[Microbatch],
    flags: Callable[[], Sequence[bool]] = no_flags,
    more: Callable[[], torch.Tensor] | None = None,
) -> StepResult:
    """Run one step: forward and backward passes, reduction, clipping, update.

    A step whose loss or gradient norm is not finite updates no weight and no moment. FP16's loss
    scale moves in it, and so do FP8's amax histories and scales, which follow each microbatch.
    Where the optimizer's kernel decides this itself (`decides_on_device`), the host starts the copy
    of the results, then the update, and waits for the copy alone: it prepares the next step while
    the device updates. The learning rate follows the step's number, so it needs no answer, and
    FP16's loss scale is changed by the host for the next step only.

    `flags` returns what this rank wants all ranks to know, and `more` FP64 numbers [numbers] of
    this rank's device. Both are called once, after the passes, so that the answers arrive in the
    step's only copy to the host.

    The loss is summed over the microbatches of all ranks. One division by the number of counted
    tokens then makes it a mean over the real tokens of the global batch.
    """
    scaler, grad_scale = state.loss_scale, 1.0
    if scaler is not None:
        # The scale is meant for the mean loss, as in NeMo; the loss here is a sum.
        num_targets = sum(batch.targets_BS.size for batch in microbatches) * state.mesh.dp.size
        grad_scale = scaler.scale / num_targets
        for module in state.model.modules():  # a pipeline stage may have no head
            if isinstance(module, HeadLoss):
                module.grad_scale = grad_scale
    if (added := state.model.parts.added_losses) is not None:
        added.grad_scale = grad_scale
    terms = () if added is None else added.terms
    loss_sum, num_tokens = forward_backward(state, microbatches)
    mesh, beside = state.mesh, None
    mesh.pp.all_reduce_sum(loss_sum)  # 0 except on the stage with the head
    # Sums and counts are reduced, not means: replicas may have counted unequally many tokens.
    totals = torch.stack((loss_sum, num_tokens))
    if added is not None:  # each rank of a stage has other tokens, or all tp ranks the same ones
        sums = added.sums if state.sequence_parallel else added.sums / mesh.tp.size
        totals = torch.cat((totals, sums, counts_of_experts(state).flatten()))
        beside = totals[2:]
    mesh.data.all_reduce_sum(totals)
    reduce_gradients(state)
    # over 0 tokens it becomes NaN
    norm_sum = grad_norm(state.masters, mesh.tp, mesh.pp, beside, mesh.groups)
    mean_loss, mean_norm = totals[0] / totals[1], norm_sum / totals[1] / grad_scale
    optimizer, number = state.optimizer, state.step + 1
    results = torch.stack((mean_loss, mean_norm, totals[1]))
    if beside is not None:
        results = torch.cat((results, beside[: len(terms)] / totals[1], beside[len(terms) :]))
        take_counts(state, beside[len(terms) :])
    if more is not None:
        results = torch.cat((results, more()))
    reading = start_read_back(mesh, results, flags())
    if optimizer.decides_on_device:  # the update is under way before the host waits
        divisor = totals[1] * grad_scale
        optimizer.update_if_finite(number, mean_loss, mean_norm, divisor=divisor)
    (loss, norm, num_counted, *rest), raised = reading.wait()
    counts_end = 0 if beside is None else len(beside)
    count = int(num_counted)
    is_finite = math.isfinite(loss) and math.isfinite(norm)
    result = StepResult(
        loss,
        norm,
        learning_rate(optimizer.spec, number),
        count,
        None if scaler is None else scaler.scale,
        scale_falls=not is_finite and scaler is not None and not scaler.is_at_minimum,
        raised=raised,
        more=tuple(rest[counts_end:]),
        added={term.name: rest[row] / term.num_layers for row, term in enumerate(terms)},
        tokens_of_experts=by_layer(state, rest[len(terms) : counts_end]),
    )
    for router in state.model.parts.routers if is_finite else ():
        router.move_bias()
    if optimizer.decides_on_device:
        if not is_finite:  # the device skipped the update
            optimizer.num_updates -= 1
    elif is_finite:
        optimizer.update(number, norm, divisor=count * grad_scale)
    if scaler is not None:
        scaler.update(overflowed=not is_finite)
    return result


def counts_of_experts(state: TrainState) -> torch.Tensor:
    """Return the tokens that this rank has sent to each expert in the step, FP64 [layers, experts].

    The layers are those of the whole model, so that ranks of all stages can add up their counts.
    FP64 has whole numbers exactly, in whatever order they are added. A model without experts has
    [0, 0].
    """
    model, shape = state.model.spec, (0, 0)
    if model.moe is not None and model.has_experts:
        shape = len(model.moe.layers), model.moe.num_experts
    counts_LE = torch.zeros(shape, dtype=torch.float64, device=state.mesh.device)
    for router in state.model.parts.routers:
        counts_LE[router.layer] = router.counts
    return counts_LE


def by_layer(state: TrainState, counts: Sequence[float]) -> list[Sequence[float]]:
    """Return what `counts_of_experts` returned, flat numbers here, as the numbers of each layer."""
    moe = state.model.spec.moe
    size = 1 if moe is None else moe.num_experts
    return [counts[begin : begin + size] for begin in range(0, len(counts), size)]


def take_counts(state: TrainState, counts: torch.Tensor) -> None:
    """Give each router the sum over ranks of what `counts_of_experts` returned, here flat."""
    for router in state.model.parts.routers:
        own = slice(router.layer * len(router.counts), (router.layer + 1) * len(router.counts))
        router.counts.copy_(counts[own])


def forward_backward(
    state: TrainState, microbatches: Sequence[Microbatch]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulate the gradients of the summed loss; return the loss sum and the counted tokens.

    Both are 0-d FP64 tensors on the device, of this rank's microbatches.
    """
    device, dp = state.mesh.device, state.mesh.dp
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_tokens = torch.zeros((), dtype=torch.float64, device=device)
    global_indices = [index * dp.size + dp.rank for index in range(len(microbatches))]
    tokens = [
        tokens_of(batch.tokens_BS.shape, index, state.mesh.cp, borders=batch.cu_seqlens_N1)
        for index, batch in zip(global_indices, microbatches, strict=True)
    ]
    state.sink.begin_step()
    state.masters.begin_step()
    if (added := state.model.parts.added_losses) is not None:
        added.begin_step(device)
    for router in state.model.parts.routers:
        router.begin_step()
    if state.reducer is not None:
        state.reducer.begin_step(len(microbatches))
    if state.pipeline is not None:
        batches = [local_batch(microbatch, state.mesh) for microbatch in microbatches]
        loss_sum += state.pipeline.forward_backward(batches, state.step + 1, global_indices, tokens)
        num_tokens += sum((batch.targets_BS >= 0).sum() for batch in batches)
        state.sink.end_step()
        return loss_sum, num_tokens
    if state.graphs is not None:
        state.graphs.begin_step()
    for index, microbatch in enumerate(microbatches):
        batch = local_batch(microbatch, state.mesh)
        state.streams.begin_microbatch(state.step + 1, global_indices[index])
        state.scaling.begin_microbatch(index, state.step + 1, tokens[index])
        if state.graphs is not None:
            loss = state.graphs.run(batch, is_first=index == 0)
            state.scaling.end_forward()
        else:
            loss = state.model(batch.tokens_BS, batch.targets_BS, **batch.documents)
            state.scaling.end_forward()
            backward_of_loss(loss)
        state.scaling.end_backward()
        loss_sum += loss.detach()
        num_tokens += (batch.targets_BS >= 0).sum()
    state.sink.end_step()
    return loss_sum, num_tokens


class ReadBack:
    """Hold FP64 numbers [numbers] on their way to the host, and the flags of the ranks.

    A GPU copies the numbers behind what it was given before, into page-locked memory, and signals
    it by an event. So the host can start more work, and wait without waiting for that work.
    """

    def __init__(self, numbers: torch.Tensor, num_travelling: int, flags: Sequence[bool]) -> None:
        """Start the copy; of the numbers the last `num_travelling` are flags of all ranks."""
        self._num_travelling, self._flags = num_travelling, tuple(flags)
        self._numbers, self._copied = numbers, None
        if numbers.device.type != "cpu":
            self._numbers, self._copied = copy_to_host(numbers)

    def wait(self) -> tuple[list[float], tuple[bool, ...]]:
        """Wait for the copy; return the numbers, and for each flag whether any rank raises it."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers = self._numbers.tolist()
        count = len(numbers) - self._num_travelling
        return numbers[:count], (*map(bool, numbers[count:]), *self._flags)


def copy_to_host(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Start to copy numbers from the GPU to page-locked memory; the event says when they are there.

    The GPU copies behind all that it was given before. No GPU has run this yet.
    """
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def start_read_back(mesh: Mesh, numbers: torch.Tensor, flags: Sequence[bool]) -> ReadBack:
    """Start the copy of FP64 `numbers` [numbers] to the host, and of the flags of all ranks.

    One copy from the device brings all of them.
    """
    if not flags or mesh.world.size == 1:
        return ReadBack(numbers, 0, flags)
    raised = torch.tensor(flags, dtype=torch.float32).to(mesh.device, non_blocking=True)
    # Joined to the numbers on the device: a second copy to the host would make it wait twice.
    numbers = torch.cat((numbers, mesh.world.all_reduce_max(raised).double()))
    return ReadBack(numbers, len(flags), ())


def reduce_gradients(state: TrainState) -> None:
    """Sum the gradients over the ranks that have parts of them.

    All gradients are summed over replicas, those of unsharded parameters over the parts of a
    sequence, those of the norms of heads over the ranks that have heads, and those of a tied
    embedding over the stages that have a copy.
    """
    if state.reducer is not None:
        state.reducer.finish()
    state.masters.collect_grads()
    if state.sequence_parallel:  # a rank has seen only its part of the sequence
        for grad in state.masters.replicated_grads:
            state.mesh.tp.all_reduce_sum(grad)
    elif state.mesh.tp.size > 1 and (grads := state.masters.grads_of_heads):
        total = torch.cat([grad.flatten() for grad in grads])  # small ones: one message for all
        state.mesh.tp.all_reduce_sum(total)
        for grad, whole in zip(grads, total.split([g.numel() for g in grads]), strict=True):
            grad.copy_(whole.view_as(grad))
    if isinstance(state.model, PipelinedGPT) and (tied := state.model.tied_copy()) is not None:
        # The first stage's gradient is that of the lookup, and the last one's that of the head.
        for grad in state.masters.grads_of(tied):
            state.mesh.ends.all_reduce_sum(grad)


def local_batch(microbatch: Microbatch, mesh: Mesh) -> Batch:
    """Return the part of a microbatch that this rank computes, on its device.

    The copy from page-locked memory does not wait for the device. Ranks that share sequences
    (context parallelism) have the same microbatch; each takes its own tokens, of each document if
    documents are kept apart, and their positions.
    """

    borders = microbatch.cu_seqlens_N1

    def own(array: NDArray[np.integer]) -> torch.Tensor:
        whole_BS = torch.from_numpy(array).to(mesh.device, non_blocking=True)
        return own_tokens(whole_BS, mesh.cp, borders=borders)

    documents = {}
    if borders is not None:
        documents["cu_seqlens_N1"] = torch.from_numpy(borders)
    if microbatch.position_ids_BS is not None:
        documents["position_ids_BS"] = own(microbatch.position_ids_BS)
    elif mesh.cp.size > 1:
        shape = microbatch.tokens_BS.shape
        documents["position_ids_BS"] = own_positions(shape, mesh.cp, mesh.device, borders=borders)
    return Batch(own(microbatch.tokens_BS), own(microbatch.targets_BS), documents)
