"""Test FP8 scales that differ between ranks, loaded by as many ranks in other groups.

Four ranks train as two tensor-parallel ranks times two replicas and save; then the four load the
checkpoint in other layouts. Ranks that reduce their amaxes together must have equal scales.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint.manifest import Manifest, read_manifest, write_manifest
from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.step_directories import step_name
from megafp8.fp8.scaling import ScalingState
from megafp8.parallel.mesh import groups_along, join
from megafp8.specs import Fp8Recipe, ParallelSpec
from megafp8.train import state_dict
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.ranks import Rank, run_ranks

RANKS, STEPS = 4, 2
TENSOR_GROUPS = ParallelSpec(tp=2, tp_only_amax_red=True)
ALONE = ParallelSpec(tp=2)
KINDS = {"groups": (TENSOR_GROUPS, True), "alone": (ALONE, False)}
"""What is saved, by name: the layout, and whether amaxes are reduced at all."""
LOADED = {
    "as saved": ParallelSpec(tp=2),
    "tp 4": ParallelSpec(tp=4),
    "tp 4 with sp": ParallelSpec(tp=4, sequence_parallel=True),
    "dp 4": ParallelSpec(),
    "cp 2": ParallelSpec(cp=2),
    "tp 2 x cp 2": ParallelSpec(tp=2, cp=2),
}
SOURCES = [*KINDS, *(f"{kind}, old" for kind in KINDS)]
OTHERS = [
    (source, name)
    for source in SOURCES
    for name, spec in LOADED.items()
    if name != "as saved"
    # Without a reduction it is refused: ranks gather FP8 bytes, which need one scale.
    and (KINDS[source.removesuffix(", old")][1] or not spec.sequence_parallel)
]
"""The checkpoints and the other layouts that load them."""
DIFFERED = "differed between the ranks that saved them"

Tables = dict[str, torch.Tensor]  # by direction and field


@dataclass
class Loaded:
    """What one rank has after it loaded a checkpoint."""

    tables: Tables
    messages: list[str]
    loss: float  # of the next step


def case_of(spec: ParallelSpec, reduces: bool, num_ranks: int = RANKS) -> Case:
    spec = replace(spec, devices_per_node=num_ranks)
    recipe = Fp8Recipe(amax_history_len=4, reduce_amax=reduces)
    return Case("bf16", recipe, parallel=spec, num_microbatches=4)  # one for each replica at least


def tables_of(state: TrainState) -> Tables:
    assert isinstance(state.scaling, ScalingState)
    tables = state.scaling.tables.items()
    return {f"{d} {f}": t.clone() for d, table in tables for f, t in table.tensors().items()}


def settings_of(spec: ParallelSpec, reduces: bool) -> dict[str, Any]:
    """Return the settings from which an older version's checkpoint tells its layout."""
    model = {
        "tensor_model_parallel_size": spec.tp,
        "reduce_amax": reduces,
        "tp_only_amax_red": spec.tp_only_amax_red,
    }
    return {"trainer": {"devices": RANKS // 2, "num_nodes": 2}, "model": model}


def trained(rank: Rank, folder: str) -> dict[str, Tables]:
    """Train and save each kind; return the tables by kind."""
    torch.set_num_threads(1)
    found = {}
    for kind, (spec, reduces) in KINDS.items():
        case = case_of(spec, reduces)
        state = case.build(join(case.parallel))
        for _ in range(STEPS):
            state_step(case, state)
        if kind == "alone" and rank.index == 1:  # as for an expert that got no token there
            never_cast(state, row=0)
        meta = {"config": settings_of(spec, reduces), "data_fingerprint": ""}
        Saver(Path(folder, kind), 1, meta).save(state)
        found[kind] = tables_of(state)
    return found


def never_cast(state: TrainState, row: int) -> None:
    """Give a row of the forward table its first state, whose scale of 1 is no tensor's."""
    assert isinstance(state.scaling, ScalingState)
    for field, tensor in state.scaling.tables["forward"].tensors().items():
        tensor[row] = float(field == "quant_scale")


def state_step(case: Case, state: TrainState) -> float:
    loss = train_step(state, case.microbatches(state.step, state.mesh)).loss
    state.step += 1
    return loss


def loaded(rank: Rank, jobs: dict[str, tuple[str, ParallelSpec, bool]]) -> dict[str, Loaded]:
    """Load each checkpoint (its folder, the layout, whether amaxes are reduced) and train on."""
    torch.set_num_threads(1)
    found = {}
    for name, (path, spec, reduces) in jobs.items():
        case, messages = case_of(spec, reduces), list[str]()
        state = case.build(join(case.parallel))
        state_dict.load_checkpoint(Path(path), state, messages.append)
        tables = tables_of(state)
        found[name] = Loaded(tables, messages, state_step(case, state))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[dict[str, Tables]]:
    ranks = run_ranks(trained, RANKS, {"folder": str(folder)})
    for kind in KINDS:  # as an older version would have saved it
        path = folder / kind / step_name(STEPS)
        manifest = read_manifest(path)
        old = folder / f"{kind}, old" / step_name(STEPS)
        old.mkdir(parents=True)
        for file in path.glob("*.safetensors"):
            (old / file.name).hardlink_to(file)
        meta = {k: v for k, v in manifest.meta.items() if k != "scaling_layout"}
        write_manifest(old, Manifest(manifest.step, meta, manifest.shards))
    return ranks


@pytest.fixture(scope="module")
def ranks(saved: list[dict[str, Tables]], folder: Path) -> list[dict[str, Loaded]]:
    jobs = {}
    for source, name in [*((source, "as saved") for source in SOURCES), *OTHERS]:
        of, reduces = KINDS[source.removesuffix(", old")]
        spec = replace(LOADED[name], tp_only_amax_red=of.tp_only_amax_red)
        jobs[f"{source}: {name}"] = (str(folder / source / step_name(STEPS)), spec, reduces)
    return run_ranks(loaded, RANKS, {"jobs": jobs})


def are_equal(one: Tables, other: Tables) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[f], other[f]) for f in one)


def test_what_was_saved_differs_between_ranks(saved: list[dict[str, Tables]], folder: Path) -> None:
    """Without this, the other tests would show nothing."""
    for one, other in ((0, 2), (1, 3), (0, 3)):
        assert not are_equal(saved[one]["groups"], saved[other]["groups"])
    assert are_equal(saved[0]["groups"], saved[1]["groups"]), "one group"
    assert not are_equal(saved[0]["alone"], saved[1]["alone"])
    meta = {kind: Reader(folder / kind / step_name(STEPS)).meta for kind in KINDS}
    assert meta["groups"]["scaling_layout"] == {"tp": 2, "cp": 1, "dp": 2, "amax": 2}
    assert meta["alone"]["scaling_layout"] == {"tp": 2, "cp": 1, "dp": 2, "amax": 1}
    for kind in KINDS:
        manifest = json.loads(
            (folder / f"{kind}, old/{step_name(STEPS)}/manifest.json").read_text()
        )
        assert "scaling_layout" not in manifest["meta"]


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_layout_has_every_ranks_own_scales(
    saved: list[dict[str, Tables]], ranks: list[dict[str, Loaded]], source: str
) -> None:
    """Bit for bit, and without a message."""
    kind = source.removesuffix(", old")
    for before, after in zip(saved, ranks, strict=True):
        now = after[f"{source}: as saved"]
        assert now.messages == [] and are_equal(now.tables, before[kind])


@pytest.mark.parametrize(("source", "name"), OTHERS)
def test_another_layout_has_one_scale_in_each_group(
    saved: list[dict[str, Tables]], ranks: list[dict[str, Loaded]], source: str, name: str
) -> None:
    """All ranks have the larger amax and the smaller scale of what the four ranks had.

    The scale of a tensor that a rank has never cast does not count.
    """
    kind = source.removesuffix(", old")
    legs = [rank[f"{source}: {name}"] for rank in ranks]
    for leg in legs:
        (message,) = leg.messages
        assert DIFFERED in message
        assert leg.loss == legs[0].loss and math.isfinite(leg.loss), "it trains on"
    spec = LOADED[name]
    sizes = {"tp": spec.tp, "cp": spec.cp, "dp": RANKS // spec.tp // spec.cp, "pp": 1}
    for group in groups_along(sizes, ("tp", "cp")):
        assert all(are_equal(legs[rank].tables, legs[group[0]].tables) for rank in group)
    for field, now in legs[0].tables.items():
        rows = torch.stack([rank[kind][field] for rank in saved])
        merged = rows.amax(0)
        if field.endswith("quant_scale"):
            counts = field.replace("quant_scale", "num_updates")
            known = torch.stack([rank[kind][counts] for rank in saved]) > 0
            merged = rows.where(known, torch.inf).amin(0)
            assert known.all() == (kind != "alone" or "forward" not in field)
        assert torch.equal(now, merged), field


def trained_and_loaded(rank: Rank, folder: str) -> tuple[bool, Loaded]:
    """Train as two tensor-parallel ranks, save, and continue as four with sequence parallelism.

    Return whether this rank had the scales of the rank after the next, and what it has then.
    """
    torch.set_num_threads(1)
    case = case_of(TENSOR_GROUPS, True, rank.size)
    state, messages = case.build(join(case.parallel)), list[str]()
    state_step(case, state)
    Saver(Path(folder), 1, {"config": {}, "data_fingerprint": ""}).save(state)
    own = tables_of(state)["forward history"]
    whole = [torch.zeros_like(own) for _ in range(rank.size)]
    torch.distributed.all_gather(whole, own)
    four = case_of(replace(TENSOR_GROUPS, tp=4, sequence_parallel=True), True, rank.size)
    state = four.build(join(four.parallel))
    state_dict.load_checkpoint(Path(folder, step_name(1)), state, messages.append)
    tables = tables_of(state)
    same = torch.equal(own, whole[rank.index ^ 2])
    return same, Loaded(tables, messages, state_step(four, state))


def test_eight_ranks_in_other_tensor_parallel_groups(tmp_path: Path) -> None:
    """The ranks of a new group come from two replicas, whose scales differed."""
    found = run_ranks(trained_and_loaded, 8, {"folder": str(tmp_path)})
    assert not any(same for same, _ in found)
    legs = [leg for _, leg in found]
    assert all(len(leg.messages) == 1 and DIFFERED in leg.messages[0] for leg in legs)
    for group in ((0, 1, 2, 3), (4, 5, 6, 7)):
        assert all(are_equal(legs[rank].tables, legs[group[0]].tables) for rank in group)
    assert len({leg.loss for leg in legs}) == 1
