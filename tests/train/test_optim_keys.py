"""Optimizer, schedule and clipping settings change a run, and decide which runs continue."""

from __future__ import annotations

import signal

import pytest
import torch

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.optim.schedules import learning_rate
from megafp8.specs import OptimSpec
from megafp8.train.step import train_step
from tests.tiny import build_run, microbatch
from tests.train.runs import Place

STEPS = 6
SCHED = "model.optim.sched."
HOLD = f"{SCHED}name=PolynomialHoldDecayAnnealing"
NOAM_HOLD = [f"{SCHED}name=NoamHoldAnnealing", f"{SCHED}warmup_steps=2"]
WSD = f"{SCHED}name=WSD"
MUON = "model.optim.name=muon"
SHORT = [f"trainer.max_steps={STEPS}", f"{SCHED}warmup_steps=1"]


def optim(*flags: str) -> OptimSpec:
    return resolve(load([f"trainer.max_steps={STEPS}", *flags]), lambda: False).optim


def train(spec: OptimSpec) -> tuple[list[float], list[torch.Tensor]]:
    """Train six steps; return the learning rates, and the weights afterwards."""
    state = build_run(optim=spec)
    used = []
    for step in range(STEPS):
        used.append(train_step(state, [microbatch(step)]).lr)
        state.step += 1
    return used, [master.detach() for master in state.masters.masters]


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ([], f"{SCHED}name=WarmupAnnealing"),
        ([], f"{SCHED}max_steps=12"),
        ([], f"{SCHED}warmup_ratio=0.5"),
        ([], f"{SCHED}constant_steps=2"),
        ([], f"{SCHED}constant_ratio=0.5"),
        ([HOLD], f"{SCHED}hold_steps=2"),
        ([HOLD], f"{SCHED}hold_ratio=0.4"),
        ([HOLD], f"{SCHED}power=2.0"),
        (NOAM_HOLD, f"{SCHED}decay_rate=2.0"),
        ([f"{SCHED}name=NoamAnnealing"], f"{SCHED}d_model=4"),
        ([WSD], f"{SCHED}wsd_decay_steps=3"),
        ([WSD], f"{SCHED}wsd_decay_ratio=0.5"),
        ([WSD, f"{SCHED}wsd_decay_steps=3"], f"{SCHED}wsd_decay_style=linear"),
        ([], "model.optim.name=adam"),
        ([], "model.optim.name=muon"),
        ([MUON], "model.optim.muon_momentum=0.5"),
        ([MUON], "model.optim.muon_use_nesterov=False"),
        ([MUON], "model.optim.muon_num_ns_steps=2"),
        ([MUON], "model.optim.muon_scale_mode=unit_rms_norm"),
        ([MUON], "model.optim.muon_extra_scale_factor=1"),
        (["trainer.gradient_clip_val=1e-6"], "trainer.gradient_clip_algorithm=value"),
    ],
)
def test_each_key_moves_the_weights_elsewhere(flags: list[str], more: str) -> None:
    decay = "model.optim.weight_decay=0.5"
    before, after = optim(decay, *flags), optim(decay, *flags, more)
    (old_rates, old), (new_rates, new) = train(before), train(after)
    assert new_rates == [learning_rate(after, step) for step in range(1, STEPS + 1)]
    assert (old_rates != new_rates) == more.startswith(SCHED)
    assert not any(map(torch.equal, old, new))


def test_a_run_has_its_schedules_rates(place: Place) -> None:
    flags = [HOLD, f"{SCHED}hold_ratio=0.34", f"{SCHED}power=2.0", *SHORT]
    done = place.run(*flags)
    assert done.code == 0, done.output
    assert "learning rate: PolynomialHoldDecayAnnealing" in done.output
    low, high = 1e-4, 2e-3  # one step of warm-up, two held, three left
    fallen = [low + (high - low) * left**2 for left in (2 / 3, 1 / 3)]
    found = [row["lr"] for row in place.metrics() if "lr" in row]
    assert found == pytest.approx([high / 2, high, high, high, *fallen])


def test_a_prolonged_wsd_run_continues_in_its_stable_phase(place: Place) -> None:
    whole = [WSD, f"{SCHED}warmup_steps=2", f"{SCHED}wsd_decay_steps=0", "trainer.max_steps=4"]
    assert place.run(*whole).code == 0
    longer = [*whole[:2], f"{SCHED}wsd_decay_steps=4", "trainer.max_steps=10"]
    done = place.run(*longer)
    assert done.code == 0 and "learning rate: WSD" in done.output, done.output
    low, high = 1e-4, 2e-3
    fallen = [low + (high - low) * (2 * 0.5**p - 1) for p in (0.25, 0.5, 0.75)]
    found = [row["lr"] for row in place.metrics() if "lr" in row]
    assert found == pytest.approx([0, high / 2, high, high, *[high] * 3, *fallen])


def test_adam_may_not_continue_adamw_and_fused_adam_may(place: Place) -> None:
    done = place.run(*SHORT, fault=["signalled", int(signal.SIGTERM), 3])
    assert done.code == 75, done.output
    assert "optimizer: adamw by torch's fused kernel; learning rate: Cosine" in done.output
    done = place.run(*SHORT, "model.optim.name=adam")
    assert done.code == 2, done.output
    assert "model.optim.name=adam" in done.output and "was made with adamw" in done.output
    assert "Give model.optim.name=adamw to continue it" in done.output
    done = place.run(*SHORT, "model.optim.name=fused_adam")
    assert done.code == 0, done.output
    assert "continuing after step 3 of 6" in done.output
    why = "(Apex's and Transformer Engine's need a GPU)"
    assert f"optimizer: fused_adam by torch's fused kernel {why}" in done.output
