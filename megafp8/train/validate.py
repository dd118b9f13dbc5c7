"""Validate: compute the loss over batches, without an effect on FP8 scales or weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from megafp8.config.errors import SettingError
from megafp8.data.loader import Microbatch, num_validation_batches, validation_batches
from megafp8.files import note_progress
from megafp8.observe.console import Validation
from megafp8.observe.summary import bits_per_byte
from megafp8.runs.run_data import RunData
from megafp8.specs import RunSpec
from megafp8.train.run import Run
from megafp8.train.state import TrainState
from megafp8.train.step import local_batch


@torch.no_grad()
def evaluate(state: TrainState, batches: Iterable[Microbatch]) -> tuple[float, int]:
    """Return the loss in nats per counted token, and the number of counted tokens.

    Both are over the batches of all data-parallel ranks, which call the function together.
    """
    device = state.mesh.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    state.model.eval()
    with state.scaling.evaluation():
        for batch in batches:
            local = local_batch(batch, state.mesh)
            totals[0] += state.model(local.tokens_BS, local.targets_BS, **local.documents)
            totals[1] += (local.targets_BS >= 0).sum()
    state.model.train()
    state.mesh.pp.all_reduce_sum(totals[0])  # 0 except on the stage with the head
    state.mesh.data.all_reduce_sum(totals)
    return (totals[0] / totals[1]).item(), int(totals[1].item())


def validate(run: Run, *, whole: bool = False, is_last: bool = False) -> float:
    """Validate, log and show the result, and return the loss in nats per token.

    It is over `limit_val_batches` global batches, or over the validation text of a run's end if
    `whole` is set. `is_last` says that it ends the run. A run that is killed after it validates
    again, and the result must not be logged twice.
    """
    began = time.perf_counter()
    dp = run.state.mesh.dp
    batches, total = _batches(run, whole, dp.rank, dp.size)
    val_loss, _ = evaluate(run.state, _shown(run, batches, total))
    bits = bits_per_byte(val_loss, run.bytes_per_token)
    values = {"val_loss": val_loss, "consumed_samples": run.state.consumed_samples}
    line = {"step": run.state.step, **values}
    if run.metrics is None or run.metrics.log(line, unless_last=is_last):
        run.trackers.log(run.state.step, values)
    run.saver.metrics["val_loss"] = val_loss
    seconds = time.perf_counter() - began
    result = Validation(step=run.state.step, val_loss=val_loss, bits_per_byte=bits, seconds=seconds)
    run.console.validation(result)
    return val_loss


def _batches(run: Run, whole: bool, rank: int, ranks: int) -> tuple[Iterator[Microbatch], int]:
    """Return the microbatches of a validation for one of `ranks` ranks, and their number."""
    train = run.spec.train
    limit = None if whole else train.limit_val_batches * train.global_batch_size
    drops_last = run.spec.data.validation_drop_last and not whole
    source = run.data.validation if whole else run.data.periodic_validation
    multiple_of = train.global_batch_size if drops_last else 1
    size = train.micro_batch_size
    rules = run.data.rules
    batches = validation_batches(
        source, size, rank, ranks, limit, multiple_of=multiple_of, rules=rules
    )
    return batches, num_validation_batches(source, size, ranks, limit, multiple_of=multiple_of)


def validated_tokens(run: Run) -> NDArray[np.int64]:
    """Return the tokens that a validation of `limit_val_batches` predicts, over all ranks."""
    batches, _ = _batches(run, False, 0, 1)
    counted = [batch.targets_BS[batch.targets_BS >= 0] for batch in batches]
    return np.concatenate(counted)


def _shown(run: Run, batches: Iterable[Microbatch], total: int) -> Iterator[Microbatch]:
    """Yield the batches, and show how many of them are done, to the launcher too."""
    for done, batch in enumerate(batches):
        run.console.validating(done, total)
        note_progress()
        yield batch


def with_validation_batches(spec: RunSpec, data: RunData) -> RunSpec:
    """Return the spec with the number of global batches that a share of the validation split has.

    A share is rounded down to whole batches, as in Lightning. All of them are 1.0; the validation
    at the end of the run then takes every token.

    Raises:
        SettingError: The share has not one batch.
    """
    train = spec.train
    if train.val_share is None:
        return spec
    size = train.global_batch_size
    multiple_of = size if spec.data.validation_drop_last else 1
    in_all = num_validation_batches(data.periodic_validation, size, 1, multiple_of=multiple_of)
    batches = int(in_all * train.val_share)
    if batches == 0:
        raise SettingError(
            "trainer.limit_val_batches",
            train.val_share,
            f"is less than one of the validation split's {in_all} global batches",
            f"Give at least {math.ceil(1000 / in_all) / 1000}, or a whole number of batches",
        )
    every_token = train.val_share == 1 and data.num_final_tokens == data.num_validation_tokens
    counted = replace(train, limit_val_batches=batches, last_validation_is_whole=every_token)
    return replace(spec, train=counted)


def check_validation(run: Run) -> None:
    """Validate shortly before the first step, so that errors and lack of memory show early."""
    train, mesh = run.spec.train, run.state.mesh
    limit = train.num_sanity_val_steps * train.global_batch_size
    batches = validation_batches(
        run.data.validation,
        train.micro_batch_size,
        mesh.dp.rank,
        mesh.dp.size,
        limit,
        rules=run.data.rules,
    )
    val_loss, num_tokens = evaluate(run.state, batches)
    run.console.event(f"sanity check: val loss {val_loss:.4f} over {num_tokens} tokens")
