"""FP8-LM's levels where FSDP shards the model: rows of tensors, with the scales of the whole ones.

The bounds are those of `test_masters_ranks`. FSDP sums ranks before microbatches and rounds each
microbatch's sum once, as replicas round each of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.fp8 import scaled
from megafp8.fp8.scaled import ScaledTensor, resize_memory
from megafp8.optim import fsdp_masters
from megafp8.optim.fsdp_masters import FsdpMasters
from megafp8.parallel import scaled_data
from megafp8.parallel.fsdp import local_of
from megafp8.parallel.mesh import join
from megafp8.parallel.scaled_data import ScatteredGrads
from megafp8.specs import FsdpSpec, ParallelSpec
from megafp8.train.report.header import state_bytes
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.state_dict import load_checkpoint
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.kit.tensors import Piece, stored_states
from tests.optim import masters_work
from tests.optim.masters_work import FP8, stored_pieces
from tests.optim.sharded_work import on_ranks
from tests.optim.test_masters import BYTES, LEVELS
from tests.optim.test_masters_ranks import (
    SMALL,
    Found,
    assert_gradients_are_right,
    case,
    same_bits,
    together,
)
from tests.ranks import Rank, run_ranks
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
    "O2, spoiled": sharded("O2"),
}
BUGS = {
    "ranks do not agree on a master's scale": "stored",
    "microbatches are not added": "exact, four",
    "a rank's scales are those of another": "exact",
    "weights are gathered from before the update": "O2",
}


@contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Plant a mistake in this process."""
    with pytest.MonkeyPatch.context() as patch:
        if bug == "ranks do not agree on a master's scale":
            patch.setattr(FsdpMasters, "agree", lambda self, amaxes: amaxes)
        if bug == "microbatches are not added":
            add = ScaledTensor.add
            patch.setattr(
                ScaledTensor, "add", lambda self, more, *, is_first: add(self, more, is_first=True)
            )
        if bug == "a rank's scales are those of another":
            add_up = scaled.add_up

            def swapped(parts: list[ScaledTensor], total: torch.Tensor) -> torch.Tensor:
                scales = [part.dequant_scale for part in reversed(parts)]
                pairs = zip(parts, scales, strict=True)
                return add_up([replace(part, dequant_scale=s) for part, s in pairs], total)

            patch.setattr(scaled_data, "add_up", swapped)
        if bug == "weights are gathered from before the update":
            patch.setattr(FsdpMasters, "rows_of", cache(FsdpMasters.rows_of))
        yield


def train(rank: Rank, bugs: bool = False) -> Found:
    """Train every case, and those of `BUGS` with their mistakes."""
    found = masters_work.train(rank, TWO, spoiled={"O2, spoiled": 1})
    for bug, name in BUGS.items() if bugs else ():
        with planted(bug):
            found |= {bug: masters_work.train(rank, {name: TWO[name]})[name]}
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module")
def trained() -> Found:
    return run_ranks(train, 2, {"bugs": True})


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


def first_scales(rank: Rank) -> dict[str, dict[str, float]]:
    """The scales of linears' masters before the first step."""
    found = {}
    for name in ("O2", "O2, replicas"):
        state = TWO[name].build(join(on_ranks(TWO[name].parallel, rank)))
        names = {param: key for key, param in state.model.named_parameters()}
        rows = zip(state.masters.segments, state.masters.stored, strict=True)
        found[name] = {
            names[segment.param]: stored.dequant_scale.item()
            for segment, stored in rows
            if segment.param in state.masters.linears
        }
    return found


def test_first_masters_have_the_scales_of_whole_tensors() -> None:
    for found in run_ranks(first_scales, 2):
        assert found["O2"] == found["O2, replicas"]
        assert len(set(found["O2"].values())) > 1, "one scale for all would be equal too"


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


def without_scales(masters: FsdpMasters) -> None:
    """Leave the scales of gradients in FP8 out of what clipping multiplies."""
    real_collect(masters)
    masters.own_grads.pop()


real_collect = FsdpMasters.collect_grads


def grads_of_a_step(rank: Rank, levels: tuple[str, ...], bug: bool) -> dict[str, list[Grads]]:
    """Return for each level what a step without clipping leaves, and one with."""
    found = {}
    for level in levels:
        found[level] = []
        for limit in (None, 0.5):
            like = sharded(level, clip=limit)
            state = like.build(join(on_ranks(FSDP, rank)))
            with pytest.MonkeyPatch.context() as patch:
                if bug:
                    patch.setattr(FsdpMasters, "collect_grads", without_scales)
                norm = train_step(state, like.microbatches(0, state.mesh)).grad_norm
            grads = state.masters.stored_grads
            in_fp8 = [x.payload.view(torch.uint8) for x in grads if x.fmt.name != "fp32"]
            values = torch.cat([x.values().flatten() for x in grads]).double()
            found[level].append(Grads(values, in_fp8, norm))
    return found


def assert_clipped(ranks: list[dict[str, list[Grads]]]) -> None:
    """All ranks' rows together have the norm 0.5, and are all multiplied by one factor."""
    for level in ranks[0]:
        whole, clipped = (torch.cat([x[level][i].values for x in ranks]) for i in range(2))
        norm = whole.norm().item()
        for rank in ranks:
            free, shrunk = rank[level]
            assert free.norm == pytest.approx(norm, rel=1e-6) and free.norm == shrunk.norm
            pairs = list(zip(free.payloads, shrunk.payloads, strict=True))
            assert pairs and all(torch.equal(*pair) for pair in pairs), "scales alone change"
        assert norm > 0.5 and clipped.norm().item() == pytest.approx(0.5, rel=1e-5), level
        torch.testing.assert_close(clipped, whole * (0.5 / norm), rtol=1e-5, atol=0)


def test_clipped_gradients_in_fp8_have_the_norm_of_the_limit() -> None:
    assert_clipped(run_ranks(grads_of_a_step, 2, {"levels": tuple(LEVELS), "bug": False}))


def test_scales_that_clipping_leaves_out_are_found() -> None:
    found = run_ranks(grads_of_a_step, 2, {"levels": ("O2",), "bug": True})
    with pytest.raises(AssertionError):
        assert_clipped(found)


def test_a_skip_is_all_ranks_skip(trained: Found) -> None:
    for rank in trained:
        found = rank["O2, spoiled"]
        assert math.isnan(found.norms[1]) and math.isfinite(found.norms[2])
        assert found.named is not None and found.named.startswith("gradient of layers.0.")


@pytest.mark.parametrize("bug", BUGS)
def test_the_bounds_tell_planted_mistakes(trained: Found, bug: str) -> None:
    name = BUGS[bug]
    ranks = [{**rank, name: rank[bug]} for rank in trained]
    with pytest.raises(AssertionError):
        if name == "stored":
            assert_stored_as_whole_tensors(ranks, name)
        elif name in LEVELS:
            test_two_ranks_learn_as_replicas_do(ranks, name)
        else:
            assert_gradients_are_right(ranks, name, TWO[name])


# ---- one sum


SIZES, IN_FP8 = (24, 3, 64, 5), (True, False, True, False)


def given_gradient(rank: int, bad: float | None) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(rank)
    grads = 10.0**-rank * torch.randn(2, sum(SIZES), generator=drawn)
    if bad is not None and rank == 1:
        grads[0, 30] = bad  # of the second one in FP8, of what rank 0 owns
    return grads


def scatter(rank: Rank) -> dict[float | None, torch.Tensor]:
    grads = ScatteredGrads(SIZES, IN_FP8, join(ParallelSpec(devices_per_node=rank.size)).data)
    sums = {None: torch.empty(sum(SIZES)), math.inf: torch.empty(sum(SIZES))}
    for bad, output in sums.items():
        grads.reduce(output, given_gradient(rank.index, bad).view(-1))
    return sums


def test_a_sum_is_that_of_each_ranks_own_rounding() -> None:
    """Bit for bit; FP32 gradients are not rounded. An infinity makes its whole tensor NaN."""
    ranks = run_ranks(scatter, 2)
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


def state_of(state: TrainState, like: Case, steps: int) -> State:
    names = ("exp_avg", "exp_avg_sq")
    moments = [
        p
        for name in names
        for p in stored_pieces(state, stored_states(state.optimizer, name), f"{name}/")
    ]
    masters, losses = stored_pieces(state, state.masters.stored), []
    for _ in range(steps):
        losses.append(train_step(state, like.microbatches(state.step, state.mesh)).loss)
        state.step += 1
    return State(masters, moments, losses)


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


def save(rank: Rank, root: Path) -> Saved:
    found = {}
    for level in LEVELS:
        spec = on_ranks(FSDP, rank)
        with watched_start() as noted:
            state = sharded(level).build(join(spec))
        state_of(state, sharded(level), 2)
        Saver(root / level, keep=1, meta={}).save(state)
        held = replace(held_of(state), at_start=max(noted))
        found[level] = state_of(state, sharded(level), 2), held
    return found


Saved = dict[str, tuple[State, Held]]
LOADED = {
    "FSDP": FSDP,
    "replicas": SMALL,
    "ZeRO, elements": SMALL,
    "tp": replace(SMALL, tp=2),
    "FP32, FSDP": FSDP,
}


def load(rank: Rank, root: Path) -> dict[str, State]:
    found = {}
    for level in LEVELS:
        for name, parallel in LOADED.items():
            if level != "O2" and name not in ("FSDP", "replicas"):
                continue
            spec = on_ranks(parallel, rank)
            like = case(level, zero="ZeRO" in name, parallel=spec)
            like = replace(like, optim=replace(like.optim, shard_by="elements"))
            if name.startswith("FP32"):
                like = replace(like, optim=replace(like.optim, storage=type(LEVELS["O1"])()))
            state = like.build(join(spec))
            load_checkpoint(root / level / "step_00000002", state, lambda line: None)
            found[f"{level} to {name}"] = state_of(state, like, 2 if name == "FSDP" else 0)
    return found


def save_and_load(rank: Rank, root: Path) -> tuple[Saved, dict[str, State]]:
    return save(rank, root), load(rank, root)


def joined(ranks: list[Any], field: str) -> dict[str, torch.Tensor]:
    return together([{"it": rank} for rank in ranks], "it", field)


def test_bytes_and_checkpoints(tmp_path: Path) -> None:
    """A rank has the table's bytes of its rows: at O3 without the FP8 weight, which is gathered.

    A checkpoint loads bit for bit in every layout, and in FP32 states its values; its own layout
    continues it bit for bit.
    """
    both = run_ranks(save_and_load, 2, {"root": tmp_path})
    ranks, loaded = [saved for saved, _ in both], [found for _, found in both]
    for level in LEVELS:
        for rank in ranks:
            held = rank[level][1]
            assert held.shards == 0 and held.linears > 0
            assert 4 * held.linears < held.at_start < 5 * held.linears, "4 bytes, then 2 of each"
            in_fp32 = 8 if level == "O1" else 3
            assert held.moments == in_fp32 * (held.linears + held.rest)
            assert held.gradients - 4 * held.rest - held.linears == 4 * 8  # and eight scales
            assert held.masters == 2 * held.linears + 4 * held.rest
            of_linears = held.masters + held.moments + held.gradients - (8 + in_fp32) * held.rest
            bytes_each = BYTES[level] - (level == "O3")
            assert of_linears - 4 * 8 == bytes_each * held.linears
        states = [rank[level][0] for rank in ranks]
        for name in (name for name in LOADED if f"{level} to {name}" in loaded[0]):
            found = [rank[f"{level} to {name}"] for rank in loaded]
            for field in ("masters", "moments"):
                before, after = joined(states, field), joined(found, field)
                assert before.keys() == after.keys()
                for key, tensor in before.items():
                    assert torch.equal(after[key], tensor), (level, name, key)
            if name == "FSDP":
                for one, other in zip(states, found, strict=True):
                    assert one.losses == other.losses
                    same_bits(one.masters, other.masters)


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
