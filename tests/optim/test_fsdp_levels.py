"""FP8-LM's levels where FSDP shards the model: rows of tensors, with the scales of the whole ones.

The bounds are those of `test_masters_ranks`. FSDP sums ranks before microbatches and rounds each
microbatch's sum once, as replicas round each of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.fp8.scaled import ScaledTensor, resize_memory
from megafp8.optim import fsdp_masters
from megafp8.optim.fsdp_masters import FsdpMasters
from megafp8.parallel.fsdp import local_of
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.scaled_data import ScatteredGrads
from megafp8.specs import FsdpSpec, ParallelSpec, StorageSpec
from megafp8.train.report.header import state_bytes
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.kit.faults import Fault, unchanged
from tests.kit.runs import on_mesh, on_ranks, train
from tests.kit.tensors import (
    Piece,
    assembled,
    assert_same,
    assert_same_pieces,
    pieces,
    stored_states,
)
from tests.optim import masters_work
from tests.optim.masters_work import FP8
from tests.optim.test_masters import BYTES, LEVELS
from tests.optim.test_masters_ranks import (
    SMALL,
    Found,
    assert_gradients_are_right,
    case,
    together,
)
from tests.ranks import run_ranks
from tests.tiny import gpt_spec

FSDP = ParallelSpec(fsdp=FsdpSpec())
ODD = gpt_spec(hidden_size=28, ffn_hidden_size=52, vocab_size=193)
"""Ranks have other numbers of rows of its embedding, and the rows of a bias end within a word."""


def sharded(level: str, **choices: Any) -> Case:
    return case(level, parallel=FSDP, **choices)


STORED = {"main_grads": "fp32"}
TWO = {
    **{level: sharded(level) for level in LEVELS},
    **{f"{level}, replicas": case(level) for level in LEVELS},
    "exact": sharded("O1", fp8=None, steps=1),
    "exact, four": sharded("O2", fp8=None, steps=1, num_microbatches=4, model=ODD),
    "stored": sharded("O2", fp8=None, steps=1, storage=STORED, model=ODD),
    "stored, replicas": case("O2", fp8=None, steps=1, storage=STORED, model=ODD),
    "O2, clipped": sharded("O2", clip=0.5),
    "O2, spoiled": sharded("O2", spoiled=1),
}


def once(right: Callable[..., None], self: ScaledTensor, more: torch.Tensor, **_: bool) -> None:
    right(self, more, is_first=True)


def swapped(
    right: Callable[..., torch.Tensor], parts: list[ScaledTensor], total: torch.Tensor
) -> torch.Tensor:
    scales = [part.dequant_scale for part in reversed(parts)]
    pairs = zip(parts, scales, strict=True)
    return right([replace(part, dequant_scale=s) for part, s in pairs], total)


@cache
def remembered(right: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return right(*args)


MASTERS = "megafp8.optim.fsdp_masters.FsdpMasters"
BUGS = {
    "ranks do not agree on a master's scale": ("stored", Fault(f"{MASTERS}.agree", unchanged)),
    "microbatches are not added": (
        "exact, four", Fault("megafp8.fp8.scaled.ScaledTensor.add", once)),
    "a rank's scales are those of another": (
        "exact", Fault("megafp8.parallel.scaled_data.add_up", swapped)),
    "weights are gathered from before the update": ("O2", Fault(f"{MASTERS}.rows_of", remembered)),
}  # fmt: skip
WRONG = {bug: replace(TWO[name], faults=(fault,)) for bug, (name, fault) in BUGS.items()}


@pytest.fixture(scope="module")
def trained() -> Found:
    return run_ranks(masters_work.train, 2, {"cases": TWO | WRONG})


@pytest.mark.parametrize("name", ["exact", "exact, four"])
def test_gradients_are_one_process_s_within_rounding(trained: Found, name: str) -> None:
    assert_gradients_are_right(trained, name, TWO[name])


def is_of_linear(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and "layers." in name


def assert_stored_as_whole_tensors(ranks: Found, name: str) -> None:
    """With FP32 gradients, of which two ranks have two addends, an update has the same bits.

    An embedding's gradient has three, in another order; masters of FP32 are not updated by the
    same loop of torch's. Both are off by roundings of FP32.
    """
    for field in ("masters", "moments"):
        ours, whole = together(ranks, name, field), together(ranks, "stored, replicas", field)
        assert ours.keys() == whole.keys()
        for key, tensor in whole.items():
            if is_of_linear(key, tensor):
                assert torch.equal(ours[key], tensor), key
            elif field == "masters":
                torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-4)


def first_scales(case: Case, mesh: Mesh) -> dict[str, float]:
    """The scales of linears' masters before the first step."""
    state = case.build(mesh)
    names = {param: key for key, param in state.model.named_parameters()}
    rows = zip(state.masters.segments, state.masters.stored, strict=True)
    return {
        names[segment.param]: stored.dequant_scale.item()
        for segment, stored in rows
        if segment.param in state.masters.linears
    }


def test_first_masters_have_the_scales_of_whole_tensors() -> None:
    cases = {name: TWO[name] for name in ("O2", "O2, replicas")}
    for ours, replicas in zip(*on_ranks(first_scales, cases, 2).values(), strict=True):
        assert ours == replicas
        assert len(set(ours.values())) > 1, "one scale for all would be equal too"


def test_rows_are_stored_with_the_scales_of_whole_tensors(trained: Found) -> None:
    assert_stored_as_whole_tensors(trained, "stored")


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_learn_as_replicas_do(trained: Found, level: str) -> None:
    """The first loss, of the same weights, is the same bit for bit."""
    first, second = trained
    assert first[level].losses == second[level].losses
    assert first[level].norms == pytest.approx(second[level].norms, rel=0)
    replicas = first[f"{level}, replicas"].losses
    assert first[level].losses[0] == replicas[0]
    assert first[level].losses == pytest.approx(replicas, rel=2e-3)


def test_o3_sends_what_o2_computes_with(trained: Found) -> None:
    """FP8 weights of delayed scaling are the bytes that each rank casts at O2."""
    assert trained[0]["O2"].losses == trained[0]["O3"].losses
    two, three = (trained[0][level].traffic for level in ("O2", "O3"))
    wide, narrow = (sum(t[key] for key in t if key[1] == "all_gather") for t in (two, three))
    masters = together(trained, "O2", "masters")
    linears = sum(t.numel() for name, t in masters.items() if is_of_linear(name, t))
    assert wide - narrow == 2 * linears // 2, "half of them, for both passes, a byte less"


def test_clipping(trained: Found) -> None:
    """By the norm of all rows, which multiplies their scales too."""
    first, second = trained
    assert first["O2, clipped"].losses == second["O2, clipped"].losses
    assert first["O2, clipped"].norms[0] == pytest.approx(first["O2"].norms[0], rel=1e-6)
    assert first["O2, clipped"].norms[0] > 0.5
    assert first["O2, clipped"].losses[-1] != first["O2"].losses[-1]


@dataclass
class Grads:
    """A rank's gradients after a step, the bytes of those in FP8, and the norm before clipping."""

    values: torch.Tensor
    payloads: list[torch.Tensor]
    norm: float


def without_scales(right: Callable[..., None], masters: FsdpMasters) -> None:
    """Leave the scales of gradients in FP8 out of what clipping multiplies."""
    right(masters)
    masters.own_grads.pop()


def grads_of_a_step(case: Case, mesh: Mesh) -> list[Grads]:
    """Return what a step without clipping leaves, and one with."""
    found = []
    for limit in (None, 0.5):
        like = replace(case, optim=replace(case.optim, clip_grad_norm=limit))
        state = like.build(mesh)
        norm = train_step(state, like.microbatches(0, mesh)).grad_norm
        grads = state.masters.stored_grads
        in_fp8 = [x.payload.view(torch.uint8) for x in grads if x.fmt.name != "fp32"]
        values = torch.cat([x.values().flatten() for x in grads]).double()
        found.append(Grads(values, in_fp8, norm))
    return found


def assert_clipped(levels: dict[str, list[list[Grads]]]) -> None:
    """All ranks' rows together have the norm 0.5, and are all multiplied by one factor."""
    for level, ranks in levels.items():
        whole, clipped = (torch.cat([rank[i].values for rank in ranks]) for i in range(2))
        norm = whole.norm().item()
        for free, shrunk in ranks:
            assert free.norm == pytest.approx(norm, rel=1e-6) and free.norm == shrunk.norm
            pairs = list(zip(free.payloads, shrunk.payloads, strict=True))
            assert pairs and all(torch.equal(*pair) for pair in pairs), "scales alone change"
        assert norm > 0.5 and clipped.norm().item() == pytest.approx(0.5, rel=1e-5), level
        torch.testing.assert_close(clipped, whole * (0.5 / norm), rtol=1e-5, atol=0)


def test_clipped_gradients_in_fp8_have_the_norm_of_the_limit() -> None:
    assert_clipped(on_ranks(grads_of_a_step, {level: TWO[level] for level in LEVELS}, 2))


def test_scales_that_clipping_leaves_out_are_found() -> None:
    wrong = replace(TWO["O2"], faults=(Fault(f"{MASTERS}.collect_grads", without_scales),))
    found = on_ranks(grads_of_a_step, {"O2": wrong}, 2)
    with pytest.raises(AssertionError):
        assert_clipped(found)


def test_a_skip_is_all_ranks_skip(trained: Found) -> None:
    for rank in trained:
        found = rank["O2, spoiled"]
        assert math.isnan(found.norms[1]) and math.isfinite(found.norms[2])
        assert found.named is not None and found.named.startswith("gradient of layers.0.")


@pytest.mark.parametrize("bug", BUGS)
def test_the_bounds_tell_planted_mistakes(trained: Found, bug: str) -> None:
    name, _ = BUGS[bug]
    ranks = [{**rank, name: rank[bug]} for rank in trained]
    with pytest.raises(AssertionError):
        if name == "stored":
            assert_stored_as_whole_tensors(ranks, name)
        elif name in LEVELS:
            test_two_ranks_learn_as_replicas_do(ranks, name)
        else:
            assert_gradients_are_right(ranks, name, TWO[name])


def without_a_backward_pass(case: Case, mesh: Mesh) -> tuple[bool, int, int]:
    """Whether all gradients are 0, how many are whole on tensor-parallel ranks, and in FP32."""
    state = case.build(mesh)
    train(state, case, 1)
    masters = state.masters
    masters.begin_step()
    masters.collect_grads()
    is_zero = not any(grad.values().any() for grad in masters.stored_grads)
    in_fp32 = [grad for grad in masters.stored_grads if grad.fmt.name == "fp32"]
    return is_zero, len(masters.replicated_grads), len(in_fp32)


def test_a_parameter_without_a_gradient_has_zeros_and_not_the_sum_of_the_step_before() -> None:
    """Without tensor parallelism all gradients are whole; those in FP8 are summed elsewhere."""
    for is_zero, whole, in_fp32 in on_ranks(without_a_backward_pass, {"O2": TWO["O2"]}, 2)["O2"]:
        assert is_zero and whole == in_fp32 > 0


# ---- one sum


SIZES, IN_FP8 = (24, 3, 64, 5), (True, False, True, False)


def given_gradient(rank: int, bad: float | None) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(rank)
    grads = 10.0**-rank * torch.randn(2, sum(SIZES), generator=drawn)
    if bad is not None and rank == 1:
        grads[0, 30] = bad  # of the second one in FP8, of what rank 0 owns
    return grads


def scatter(mesh: Mesh) -> dict[float | None, torch.Tensor]:
    grads = ScatteredGrads(SIZES, IN_FP8, mesh.data)
    sums = {None: torch.empty(sum(SIZES)), math.inf: torch.empty(sum(SIZES))}
    for bad, output in sums.items():
        grads.reduce(output, given_gradient(mesh.data.rank, bad).view(-1))
    return sums


def test_a_sum_is_that_of_each_ranks_own_rounding() -> None:
    """Bit for bit; FP32 gradients are not rounded. An infinity makes its whole tensor NaN."""
    ranks = on_mesh(scatter, 2)
    for (rank, sums), bad in itertools.product(enumerate(ranks), (None, math.inf)):
        found, begin = sums[bad], 0
        for size, is_in_fp8 in zip(SIZES, IN_FP8, strict=True):
            place = slice(begin, begin + size)
            parts = [given_gradient(other, bad)[:, place] for other in range(2)]
            if is_in_fp8:
                parts = [ScaledTensor.of(part, FP8).values() for part in parts]
            expected = parts[0][rank] + parts[1][rank]
            assert torch.equal(found[place].nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
            assert expected.isnan().any() == (bad is not None and size == 64)
            begin += size


# ---- bytes and checkpoints


@dataclass
class Held:
    """What a rank holds between steps, in bytes, and its elements of linears and of the rest."""

    masters: int
    moments: int
    gradients: int
    shards: int  # FSDP's own, of linears
    at_start: int  # the most of linears' masters and FSDP's shards while they were made
    linears: int
    rest: int


@dataclass
class State:
    masters: list[Piece]
    moments: list[Piece]
    losses: list[float]


def state_of(state: TrainState, case: Case, steps: int) -> State:
    moments = [
        piece
        for name in ("exp_avg", "exp_avg_sq")
        for piece in pieces(state, stored_states(state.optimizer, name), f"{name}/")
    ]
    masters = pieces(state, state.masters.stored)
    return State(masters, moments, train(state, replace(case, saves=None), steps).losses)


def held_of(state: TrainState) -> Held:
    masters, held = state.masters, state_bytes(state)
    own = [masters.rows_of(param).numel() * (param in masters.linears) for param in masters.params]
    rest = [
        masters.rows_of(param).numel() * (param not in masters.linears) for param in masters.params
    ]
    shards = [local_of(p.detach()).untyped_storage().nbytes() for p in masters.linears]
    return Held(held.masters, held.moments, held.gradients, sum(shards), 0, sum(own), sum(rest))


@contextmanager
def watched_start() -> Iterator[list[int]]:
    """Note the bytes of linears' masters and of FSDP's shards, whenever one of these is freed."""
    found, store = [0], FsdpMasters._store_linears
    with pytest.MonkeyPatch.context() as patch:

        def watched(masters: FsdpMasters, model: Any) -> None:
            def note(tensor: torch.Tensor, *, has_memory: bool) -> None:
                shards = [local_of(p.detach()).untyped_storage() for p in masters.linears]
                held = sum(storage.nbytes() for storage in shards)
                found.append(held + sum(own.payload.nbytes for own in masters._own.values()))
                resize_memory(tensor, has_memory=has_memory)

            patch.setattr(fsdp_masters, "resize_memory", note)
            store(masters, model)

        patch.setattr(FsdpMasters, "_store_linears", watched)
        yield found


def save(case: Case, mesh: Mesh) -> tuple[State, Held]:
    with watched_start() as noted:
        state = case.build(mesh)
    train(state, case)
    held = replace(held_of(state), at_start=max(noted))
    return state_of(state, case, 2), held


def load(case: Case, mesh: Mesh) -> State:
    return state_of(case.build(mesh), case, case.steps)


LOADED = {
    "FSDP": FSDP,
    "replicas": SMALL,
    "ZeRO, elements": SMALL,
    "tp": replace(SMALL, tp=2),
    "FP32, FSDP": FSDP,
}


def loads(root: Path) -> Iterator[tuple[str, Case]]:
    for level in LEVELS:
        for name, parallel in LOADED.items():
            if level != "O2" and name not in ("FSDP", "replicas"):
                continue
            like = case(level, zero="ZeRO" in name, parallel=parallel)
            optim = replace(like.optim, shard_by="elements")
            if name.startswith("FP32"):
                optim = replace(optim, storage=StorageSpec())
            begins, steps = root / level / "step_00000002", 2 if name == "FSDP" else 0
            yield f"{level} to {name}", replace(like, optim=optim, begins=begins, steps=steps)


def test_bytes_and_checkpoints(tmp_path: Path) -> None:
    """A rank has the table's bytes of its rows: at O3 without the FP8 weight, which is gathered.

    A checkpoint loads bit for bit in every layout, and in FP32 states its values; its own layout
    continues it bit for bit.
    """
    cases = {level: replace(TWO[level], steps=2, saves=tmp_path / level) for level in LEVELS}
    saved = on_ranks(save, cases, 2)
    loaded = on_ranks(load, dict(loads(tmp_path)), 2)
    for level, ranks in saved.items():
        for _, held in ranks:
            assert held.shards == 0 and held.linears > 0
            assert 4 * held.linears < held.at_start < 5 * held.linears, "4 bytes, then 2 of each"
            in_fp32 = 8 if level == "O1" else 3
            assert held.moments == in_fp32 * (held.linears + held.rest)
            assert held.gradients - 4 * held.rest - held.linears == 4 * 8  # and eight scales
            assert held.masters == 2 * held.linears + 4 * held.rest
            of_linears = held.masters + held.moments + held.gradients - (8 + in_fp32) * held.rest
            bytes_each = BYTES[level] - (level == "O3")
            assert of_linears - 4 * 8 == bytes_each * held.linears
        states = [state for state, _ in ranks]
        for name in (name for name in LOADED if f"{level} to {name}" in loaded):
            found = loaded[f"{level} to {name}"]
            for field in ("masters", "moments"):
                before, after = (
                    assembled([getattr(rank, field) for rank in each]) for each in (states, found)
                )
                assert_same(after, before)
            if name == "FSDP":
                for one, other in zip(states, found, strict=True):
                    assert one.losses == other.losses
                    assert_same_pieces(one.masters, other.masters)


HYBRID = ParallelSpec(fsdp=FsdpSpec(strategy="hybrid"), num_nodes=2)
FOUR = {
    "hybrid": case("O2", fp8=None, steps=2, num_microbatches=8, parallel=HYBRID),
    "tp": case("O1", fp8=None, steps=2, num_microbatches=4, parallel=replace(FSDP, tp=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_gradients_of_four_ranks(name: str) -> None:
    """Nodes that are replicas, and tensor-parallel ranks, whose parts have amaxes of their own."""
    ranks = run_ranks(masters_work.train, 4, {"cases": {name: FOUR[name]}})
    assert_gradients_are_right(ranks, name, FOUR[name])
    assert all(rank[name].losses == ranks[0][name].losses for rank in ranks)
