"""Find the first tensor that is not finite, after a step whose loss or gradient norm was not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megafp8.data.loader import Microbatch
from megafp8.models.init import pieces_of
from megafp8.parallel.agreement import first_known
from megafp8.train.state import TrainState
from megafp8.train.step import local_batch

WEIGHT = "weight "  # begins the name of a weight that is not finite itself


def first_nonfinite(state: TrainState, microbatches: Sequence[Microbatch]) -> str:
    """Return the name of the first tensor that is not finite, in the order of computation.

    Weights come first, then outputs of modules, then gradients. The forward passes are run again
    for the outputs, without dropout and without an effect on FP8 scales. All ranks call the
    function together; each looks at its own shards, and all get the same answer.
    """
    mesh = state.mesh
    state.masters.reshard()
    params = list(state.model.parameters())
    return (
        first_known(mesh, _first_parameter(state, params))
        or first_known(mesh, _first_output(state, microbatches))
        or first_known(mesh, _first_gradient(state, params))
        or "the loss or the gradient norm alone"
    )


def _first_parameter(state: TrainState, params: Sequence[nn.Parameter]) -> str | None:
    """Return the first of this rank's weights that has a value that is not finite, or None."""
    for param in params:
        values = state.masters.rows_of(param)
        if values.itemsize == 1:  # a weight kept in FP8, whose dtypes torch cannot test
            values = values.float()
        if not torch.isfinite(values).all():
            return f"{WEIGHT}{_name(param)}"
    return None


@torch.no_grad()
def _first_output(state: TrainState, microbatches: Sequence[Microbatch]) -> str | None:
    """Return the first module whose output is not finite when the microbatches run once more."""
    bad_outputs: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if not bad_outputs and isinstance(output, torch.Tensor):
                if not torch.isfinite(output).all():
                    bad_outputs.append(f"output of {name or 'the model'}")

        return hook

    hooks = [m.register_forward_hook(watch(n)) for n, m in state.model.named_modules()]
    state.model.eval()
    try:
        with state.scaling.evaluation():
            for microbatch in microbatches:
                batch = local_batch(microbatch, state.mesh)
                state.model(batch.tokens_BS, batch.targets_BS, **batch.documents)
    finally:
        state.model.train()
        for hook in hooks:
            hook.remove()
    return bad_outputs[0] if bad_outputs else None


def _first_gradient(state: TrainState, params: Sequence[nn.Parameter]) -> str | None:
    """Return the first gradient in the backward pass, which begins with the last modules."""
    for param in reversed(params):
        if not state.masters.is_finite(param):
            return f"gradient of {_name(param)}"
    return None


def _name(param: nn.Parameter) -> str:
    return pieces_of(param)[0].name
