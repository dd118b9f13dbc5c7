"""How many bytes a rank has at a time while FSDP starts, and whose values it starts with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafp8.checkpoint import huggingface, huggingface_files
from megafp8.models.gpt import GPT
from megafp8.models.init import initial_values, values_later
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.optim.masters import Masters
from megafp8.parallel.fsdp import local_of
from megafp8.parallel.mesh import join
from megafp8.plan.memory import rank_memory
from megafp8.specs import Fp8Recipe, FsdpSpec, GPTSpec, ParallelSpec, RunSpec
from megafp8.specs.parameters import logical_shapes
from megafp8.specs.precision import BackendName
from megafp8.specs.te_versions import DEFAULT_VERSION
from megafp8.train import build
from megafp8.train.huggingface import import_model
from megafp8.train.live_bytes import LiveBytes
from megafp8.train.load_model import start_from
from megafp8.train.state_dict import load_checkpoint
from tests.kit.cases import Case
from tests.kit.runs import alone
from tests.optim.sharded_work import continued
from tests.ranks import Rank, run_ranks
from tests.te_sources import need_sources
from tests.tiny import gpt_spec, run_spec

DEEP = gpt_spec(num_layers=8, hidden_size=64, ffn_hidden_size=256)
SHARDED = ParallelSpec(fsdp=FsdpSpec())
CASES = {
    "FP32": Case("fp32", model=DEEP, parallel=SHARDED),
    "BF16, FP8 weights": Case(
        "bf16", Fp8Recipe(amax_history_len=4, params_in_fp8=True), model=DEEP, parallel=SHARDED
    ),
}
OF_TE = {  # which has no gelu
    name: replace(case, model=replace(DEEP, activation="gelu-tanh"), backend="te")
    for name, case in CASES.items()
}


@dataclass(frozen=True)
class Start:
    """What a rank saw: the most bytes at a time, those of its shards in FP32, and what stays."""

    most: int
    shards: int
    kept: int


def start(rank: Rank, cases: dict[str, Case]) -> dict[str, Start]:
    mesh, found = join(ParallelSpec(devices_per_node=rank.size)), {}
    make_masters, most = build.make_masters, 0

    def counted(*args: Any) -> Masters:
        nonlocal most
        masters = make_masters(*args)
        most = live.most  # the optimizer's moments come later
        return masters

    build.make_masters = counted  # this process ends with the test
    for name, case in cases.items():
        with LiveBytes("cpu") as live:
            live.begin()
            state = case.build(mesh)
        weights = state.backend.weights(state.model)
        assert weights and set(weights) <= set(state.masters.params)  # not those before
        kept, own = live.bytes(), [local_of(param.detach()) for param in state.masters.params]
        found[name] = Start(most, sum(part.nbytes for part in own), kept)
    return found


def units(spec: GPTSpec = DEEP) -> list[int]:
    """The bytes of what FSDP gathers at a time, in FP32: those of a layer, or all others."""
    with torch.device("meta"):
        model = GPT(Parts(spec, torch.float32, 0, RandomStreams(0)))
    layers = [sum(param.nbytes for param in layer.parameters()) for layer in model.layers]
    return [*layers, sum(param.nbytes for param in model.parameters()) - sum(layers)]


@pytest.mark.parametrize("cases", [CASES, OF_TE], ids=["native", "te"])
def test_a_rank_never_holds_more_than_its_shards_and_one_layer(cases: dict[str, Case]) -> None:
    """Beside them it has a few scales; a fused weight's parts are drawn where they stay. After the
    start it keeps its shards and their moments, and no weight that was whole."""
    if cases is OF_TE:
        need_sources(DEFAULT_VERSION)
    whole, largest = sum(units()), max(units())
    planned = rank_memory(of_backend(cases["FP32"].backend, 2), 0)
    for results in run_ranks(start, 2, {"cases": cases}):
        for name, found in results.items():
            assert found.kept <= 3 * found.shards + 16 * 1024, name
            assert planned.start == pytest.approx(found.most, rel=0.01), name
            assert found.shards >= whole / 2, name
            assert found.shards < found.most, name
            assert found.most <= found.shards + largest + 16 * 1024, name
            assert found.most < whole, name  # so the bound can fail


GPT2 = huggingface.from_config(
    {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64,
        "vocab_size": 512,
    },
    Path("config.json"),
)  # fmt: skip


def load(rank: Rank, root: Path) -> dict[str, tuple[int, int]]:
    """By what is loaded: the bytes of the state before, and how many more a rank had at a time."""
    mesh, found = join(ParallelSpec(devices_per_node=rank.size)), {}
    for name, case in CASES.items():
        spec = replace(case.parallel, devices_per_node=rank.size)
        for kind in ("continued", "imported"):
            with LiveBytes("cpu") as live:
                state = replace(case, model=GPT2, parallel=spec).build(mesh)
                before = live.bytes()
                live.begin()
                if kind == "continued":
                    load_checkpoint(root / name / "step_00000001", state, print)
                else:
                    spec_of_run = run_spec(model=GPT2)
                    start_from(
                        replace(spec_of_run, restore_from_path=str(root / kind)), state, print, root
                    )
            found[f"{name}, {kind}"] = before, live.most - before
    return found


def test_a_rank_loads_a_checkpoint_into_its_shards(tmp_path: Path) -> None:
    """From one process and from Hugging Face: beside its state a rank has one tensor at a time.

    The tensor lies in a mapped file, of which a rank reads its rows; it counts as a whole here.
    """
    drawn = torch.Generator().manual_seed(3)

    def draw(name: str) -> torch.Tensor:
        return torch.rand(logical_shapes(GPT2)[name], generator=drawn)

    theirs = tmp_path / "theirs"
    huggingface_files.write_folder(theirs, GPT2, draw, dtype=torch.bfloat16, eod_id=3)
    import_model(theirs, tmp_path / "imported")
    ones = {n: replace(c, model=GPT2, steps=1, saves=tmp_path / n) for n, c in CASES.items()}
    alone(continued, ones)
    whole, layer, largest = sum(units(GPT2)), units(GPT2)[0], 4 * 512 * 64  # the word embedding
    for results in run_ranks(load, 2, {"root": tmp_path}):
        for name, (before, more) in results.items():
            assert before >= 3 * whole / 2, name  # shards and moments
            assert 0 < more <= largest + 16 * 1024, name
            assert more < layer < whole / 4, name


def of_backend(backend: BackendName, ranks: int) -> RunSpec:
    spec = run_spec(model=DEEP, parallel=replace(SHARDED, devices_per_node=ranks))
    train = replace(spec.train, global_batch_size=ranks * spec.train.micro_batch_size)
    spec = replace(spec, train=train)
    return replace(spec, precision=replace(spec.precision, backend=backend))


def test_a_plan_counts_the_start() -> None:
    """That of Transformer Engine's layers is that of ours; with many ranks a rank has a small part
    of the model."""
    ours, theirs = (rank_memory(of_backend(name, 64), 0) for name in ("native", "te"))
    assert max(units()) < ours.start == theirs.start < sum(units()) / 4
    assert ours.total == ours.in_step > ours.start
    assert replace(ours, start=2 * ours.in_step).total == 2 * ours.in_step


@pytest.mark.parametrize("threads", [1, 4])
def test_values_drawn_later_are_those_drawn_at_once(threads: int) -> None:
    """Whatever thread draws them, and in whatever order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        at_once = model(torch.bfloat16)
        with values_later():
            later = model(torch.bfloat16)
        assert all(param.is_meta for param in later.parameters())
        drawn = initial_values(later.parameters(), torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    for (name, param), value in zip(at_once.named_parameters(), drawn, strict=True):
        exact: Any = param.initial_master  # type: ignore[attr-defined]
        assert torch.equal(exact, value), name
    ended: list[nn.Parameter] = list(model(torch.float32).parameters())
    assert not any(param.is_meta for param in ended)  # the context has ended


def model(dtype: torch.dtype) -> GPT:
    return GPT(Parts(gpt_spec(), dtype, 3, RandomStreams(0)))
