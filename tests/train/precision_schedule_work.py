"""Train short runs with a schedule of precision, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megafp8.parallel.mesh import Mesh, join, single_rank
from megafp8.specs import RunSpec
from megafp8.train import state_dict
from megafp8.train.build import build
from megafp8.train.phases import begin_phase
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.config.helpers import run_spec
from tests.ranks import Rank
from tests.tiny import SEQ, VOCAB, microbatch

SWITCH, LAST = 3, 6
SIZES = [
    "trainer.accelerator=cpu",
    f"trainer.max_steps={LAST}",
    "model.micro_batch_size=4",
    "model.global_batch_size=8",
    f"model.encoder_seq_length={SEQ}",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=2",
    "model.hidden_dropout=0.1",
    "model.fp8_amax_history_len=8",
]
SCHEDULE = "model.precision_schedule="
FORWARD_HIGH = "model.override_linear_precision=[True,False,False]"
BACKWARD_HIGH = "model.override_linear_precision=[False,True,True]"


def spec_of(*settings: str) -> RunSpec:
    history = [] if any("fp8=False" in s for s in settings) else ["model.fp8=True"]
    sizes = SIZES
    if not any("delayed" in s for s in settings):
        sizes = [s for s in SIZES if "history" not in s]
    spec = run_spec(*sizes, *history, *settings)
    return replace(spec, model=replace(spec.model, vocab_size=VOCAB))


def built(*settings: str, mesh: Mesh | None = None) -> TrainState:
    return build(spec_of(*settings), mesh or single_rank())


def run_steps(state: TrainState, last: int) -> list[float]:
    """Train up to step `last`, and return the losses."""
    losses = []
    while state.step < last:
        begin_phase(state)
        dp = state.mesh.dp
        batches = [microbatch(10 * state.step + n, 4) for n in range(dp.rank, 2, dp.size)]
        losses.append(train_step(state, batches).loss)
        state.step += 1
        state.consumed_samples += 8
    return losses


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    """Return everything that a checkpoint has of a state."""
    return {p.name: p.tensor.detach().clone() for p in state_dict.placements(state)}


def saved(state: TrainState, root: Path) -> Path:
    meta = {"config": state.backend.spec.resolved, "data_fingerprint": "x"}
    return Saver(root, 10, meta).save(state)


def different(one: TrainState, other: TrainState) -> list[str]:
    """Return the tensors of a checkpoint whose bits differ."""
    mine, theirs = tensors_of(one), tensors_of(other)
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


MANY = SCHEDULE + (
    "[{from: 0, modules: '*.qkv', recipe: mxfp8}, {from: 2, products: forward, recipe: bf16}, "
    "{from: 3, recipe: nvfp4}, {from: 0.7, modules: ['*.fc1', '*.fc2'], recipe: bf16}, "
    "{from: 5, recipe: delayed}]"
)


def continue_at_every_step(rank: Rank, settings: list[str], root: str) -> dict[str, list[str]]:
    """Stop and continue a run after each of its steps; return what differs from the whole run.

    The last entry compares the run with another one of the same settings.
    """
    spec = spec_of(*settings, f"trainer.devices={rank.size}")
    mesh = join(spec.parallel)

    def new() -> TrainState:
        return build(spec, mesh)

    whole, stopped, found = new(), new(), {}
    losses = run_steps(whole, LAST)
    for step in range(1, LAST):
        run_steps(stopped, step)
        continued = new()
        state_dict.load_checkpoint(saved(stopped, Path(root)), continued, lambda _: None)
        found[f"loaded {step}"] = different(stopped, continued)
        run_steps(continued, LAST)
        found[f"continued {step}"] = different(whole, continued)
    found["losses"] = [] if run_steps(new(), LAST) == losses else ["losses"]
    found["phases"] = [] if len(whole.phases) > 3 else ["phases"]
    return found
