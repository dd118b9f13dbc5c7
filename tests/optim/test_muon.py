"""Muon on one rank against torch's own, bit for bit; its settings, states and plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megafp8.models.init import pieces_of
from megafp8.optim.muon import scale_of
from megafp8.optim.schedules import learning_rate
from megafp8.parallel.mesh import single_rank
from megafp8.specs import LossScaleSpec, MuonSpec, OptimSpec
from megafp8.specs.optim import MOMENTUM
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.kit.tensors import state_tensors, stored_states
from tests.tiny import build_run, gpt_spec, microbatch, optim_spec, run_spec

LLAMA = gpt_spec(num_query_groups=2, bias=False, activation="swiglu", normalization="rmsnorm")


def muon_spec(**muon: Any) -> OptimSpec:
    return replace(optim_spec(name="muon", weight_decay=0.1), muon=MuonSpec(**muon))


def matrices(state: TrainState) -> dict[str, tuple[int, torch.nn.Parameter, tuple[slice, ...]]]:
    """The logical matrices of the layers' linears: the row of their master, and where they are."""
    linears = set(state.backend.weights(state.model))
    return {
        piece.name: (row, segment.param, piece.local)
        for row, segment in enumerate(state.masters.segments)
        if segment.param in linears
        for piece in pieces_of(segment.param)
    }


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("model", [gpt_spec(), LLAMA], ids=["gpt", "llama"])
def test_one_rank_has_the_bits_of_torchs_muon(model: Any, nesterov: bool, adjust: str) -> None:
    mode = {"original": ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2)}[adjust]
    spec = muon_spec(nesterov=nesterov, scale_mode=mode[0], extra_scale_factor=mode[1])
    state = build_run(model=model, optim=spec)
    masters, where = state.masters, matrices(state)
    theirs = {
        name: torch.nn.Parameter(masters.masters[row].detach()[local].clone())
        for name, (row, _, local) in where.items()
    }
    torchs = torch.optim.Muon(
        theirs.values(), weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust
    )
    for step in range(4):
        train_step(state, [microbatch(step)])  # leaves the clipped gradients
        for name, (row, _, local) in where.items():
            theirs[name].grad = masters.grads[row][local].clone()
        torchs.param_groups[0]["lr"] = learning_rate(spec, step + 1)
        torchs.step()
        state.step += 1
        for name, (row, _, local) in where.items():
            assert torch.equal(masters.masters[row].detach()[local], theirs[name].detach()), name
    (name,) = (name for name, _ in state.optimizer.states() if name == "momentum_buffer")
    momenta = stored_states(state.optimizer, name)
    assert sum(m.payload.numel() for m in momenta) == sum(p.numel() for p in theirs.values())


def test_the_rest_is_adamws() -> None:
    """What Muon does not update moves as AdamW moves it, from the same gradients."""
    state, other = (build_run(optim=optim_spec(name=name)) for name in ("muon", "adamw"))
    for run in (state, other):
        train_step(run, [microbatch(0)])
    own = {row for row, _, _ in matrices(state).values()}
    assert own and len(own) < len(state.masters.masters)
    for row, (a, b) in enumerate(zip(state.masters.masters, other.masters.masters, strict=True)):
        assert torch.equal(a, b) == (row not in own)


def test_updates_are_orthogonal_and_have_the_stated_size() -> None:
    spec = muon_spec(momentum=0.0, num_steps=30, scale_mode="unit_rms_norm", extra_scale_factor=1.0)
    spec = replace(spec, weight_decay=0.0)
    state = build_run(optim=spec)
    before = [master.detach().clone() for master in state.masters.masters]
    train_step(state, [microbatch(0)])
    for name, (row, _, local) in matrices(state).items():
        moved = (before[row] - state.masters.masters[row].detach())[local]
        values = torch.linalg.svdvals(moved.double()) / learning_rate(spec, 1)
        rows, columns = moved.shape
        values /= (rows / columns) ** 0.5
        # The iteration's fixed interval of singular values is about 0.68 to 1.13 (Jordan et al.);
        # directions that the gradient lacks stay at 0.
        grown = values[values > 0.1]
        assert len(grown) >= min(rows, columns) // 2, name
        assert 0.6 < grown.min() and grown.max() < 1.25, name


def test_a_matrix_without_a_gradient_follows_its_momentum() -> None:
    """Its first update is the decay alone, although the norm of what is orthogonalized is 0."""
    spec = muon_spec()
    state = build_run(optim=spec)
    masters, where = state.masters, matrices(state)
    theirs = {
        name: torch.nn.Parameter(masters.masters[row].detach()[local].clone())
        for name, (row, _, local) in where.items()
    }
    adjust = "match_rms_adamw"
    torchs = torch.optim.Muon(theirs.values(), weight_decay=0.1, adjust_lr_fn=adjust)
    for step, has_gradient in enumerate((False, True, False), start=1):
        if has_gradient:
            train_step(state, [microbatch(step)])
        else:
            for grad in masters.own_grads:
                grad.zero_()
            state.optimizer.step(step)
        for name, (row, _, local) in where.items():
            theirs[name].grad = masters.grads[row][local].clone()
        torchs.param_groups[0]["lr"] = learning_rate(spec, step)
        torchs.step()
        for name, (row, _, local) in where.items():
            found = masters.masters[row].detach()[local]
            assert found.isfinite().all() and torch.equal(found, theirs[name].detach()), name
        state.step = step


def test_an_overflow_moves_no_momentum() -> None:
    spec = run_spec(compute="fp16", optim=muon_spec())
    precision = replace(spec.precision, loss_scale=LossScaleSpec(init_scale=2.0**12))
    state = build(replace(spec, precision=precision), single_rank())
    assert train_step(state, [microbatch(0)]).is_finite and state.loss_scale is not None
    momenta = state_tensors(state.optimizer, MOMENTUM)
    assert all(momentum.isfinite().all() and momentum.any() for momentum in momenta)
    held = [*state.masters.masters, *momenta]
    before = [tensor.detach().clone() for tensor in held]
    state.loss_scale.scale = 2.0**32
    assert not train_step(state, [microbatch(0)]).is_finite
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


@pytest.mark.parametrize(
    ("mode", "expected"), [("spectral", 4.0), ("shape_scaling", 2.0), ("unit_rms_norm", 2.0)]
)
def test_scales_by_hand(mode: Any, expected: float) -> None:
    muon = MuonSpec(scale_mode=mode, extra_scale_factor=0.5)
    assert scale_of(muon, (16, 4)) == 0.5 * expected
    wide = {"spectral": 4.0, "shape_scaling": 1.0, "unit_rms_norm": 0.5}[mode]
    assert scale_of(muon, (4, 16)) == 0.5 * wide
