"""Check a step that the optimizer's kernel skips, on any device."""

from __future__ import annotations

import math
from typing import Any

import torch

from megafp8.fp8.scaling import ScalingState
from megafp8.optim.adamw import STATES
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, StorageSpec
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.kit.tensors import state_tensors
from tests.tiny import microbatch, optim_spec, run_spec

SKIPPED: dict[str, Fp8Recipe | None] = {
    "bf16": None,
    "delayed": Fp8Recipe(amax_history_len=3),
    "fp8_params": Fp8Recipe(amax_history_len=3, params_in_fp8=True),
    "tensorwise": Fp8Recipe(name="tensorwise"),
}


def kept(state: TrainState) -> dict[str, torch.Tensor]:
    """Return copies of masters and moments, and of the weights that are not in FP8."""
    both = enumerate(zip(state.masters.params, state.masters.masters, strict=True))
    tensors: dict[str, torch.Tensor] = {}
    for row, (param, master) in both:
        tensors[f"master {row}"] = master.detach().clone()
        if param.dtype.itemsize > 1:
            tensors[f"weight {row}"] = param.detach().clone()
    for name in STATES:
        moments = enumerate(state_tensors(state.optimizer, name))
        tensors |= {f"{name} {row}": moment.clone() for row, moment in moments}
    return tensors


def in_fp8(state: TrainState) -> list[torch.Tensor]:
    """Return copies of the bytes of the weights in FP8."""
    params = [param for param in state.masters.params if param.dtype.itemsize == 1]
    return [param.detach().view(torch.uint8).clone() for param in params]


O2 = StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16")


def check_skipped_step(
    device: torch.device, fp8: Fp8Recipe | None, spoils: str, storage: StorageSpec | None = None
) -> None:
    """Take two steps, then one whose second microbatch has an infinite `loss` or `gradient`.

    Weights, masters, moments and Adam's count stay. Scales follow the finite amaxes alone, and
    weights in FP8 are stored with the new scales. Training then continues.
    """
    optim = optim_spec(storage=storage or StorageSpec())
    state = build(run_spec(compute="bf16", fp8=fp8, optim=optim), single_rank(device))
    assert state.optimizer.decides_on_device
    for number in range(2):
        assert train_step(state, [microbatch(number), microbatch(number + 10)]).is_finite
        state.step += 1
    before = kept(state)
    tables = state.scaling.tables if isinstance(state.scaling, ScalingState) else {}
    updates = {name: table.num_updates.clone() for name, table in tables.items()}
    num_passes = 0

    def spoil(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal num_passes
        num_passes += 1
        if num_passes != 2:
            return None
        if spoils == "loss":
            return output * math.inf
        output.register_hook(lambda grad: grad * math.inf)
        return None

    handle = state.model.final_norm.register_forward_hook(spoil)
    result = train_step(state, [microbatch(2), microbatch(3)])
    handle.remove()
    state.step += 1
    assert not math.isfinite(result.grad_norm)
    assert math.isfinite(result.loss) == (spoils == "gradient")
    after = kept(state)
    assert [name for name, x in before.items() if not torch.equal(x, after[name])] == []
    assert state.optimizer.num_updates == 2
    for name, table in tables.items():
        assert table.quant_scale.isfinite().all() and table.history.isfinite().all()
        is_backward = name == "backward"
        of_weights = [row.endswith("weight") for row in table.names]
        num_new = (table.num_updates - updates[name]).tolist()
        assert num_new == [1 if is_backward or weight else 2 for weight in of_weights]
        assert table.num_nonfinite.tolist() == [int(is_backward)] * len(table.names)
    stored: Any = in_fp8(state)
    assert bool(stored) == (fp8 is not None and fp8.params_in_fp8)
    state.masters.write_back()
    assert all(torch.equal(x, y) for x, y in zip(stored, in_fp8(state), strict=True))
    assert train_step(state, [microbatch(4), microbatch(5)]).is_finite
    assert state.optimizer.num_updates == 3
