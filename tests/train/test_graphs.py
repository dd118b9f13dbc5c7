"""Recorded microbatches train as others do, read no memory that moves, and wait for nothing."""

from __future__ import annotations

import dataclasses
import gc
import math
import operator
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.config.load import load, load_all
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.errors import UserError
from megafp8.fp8.health import HealthProbe
from megafp8.fp8.scaling import ScaleTable, ScalingState
from megafp8.fp8.weights import StoredFp8
from megafp8.observe.health import HEALTH_FILE, read_health
from megafp8.observe.trackers import CompositeTracker
from megafp8.optim.adamw import STATES
from megafp8.parallel.mesh import Mesh, join, single_rank
from megafp8.specs import Fp8Recipe, HealthSpec, ParallelSpec, RunSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.precision import ModuleRule
from megafp8.specs.run import HealthMode
from megafp8.train import graphs
from megafp8.train.build import build
from megafp8.train.report.fp8 import HealthLog
from megafp8.train.report.header import graphs_of
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, train_step
from megafp8.train.validate import evaluate
from tests.documents import borders_of
from tests.kit.tensors import state_tensors
from tests.ranks import Rank, run_ranks
from tests.tiny import SEQ, gpt_spec, microbatch, optim_spec, run_spec
from tests.train.tape import TapeRecorder, use_tapes

DELAYED = Fp8Recipe(amax_history_len=3)
FP8_PARAMS = Fp8Recipe(amax_history_len=3, params_in_fp8=True)
LLAMA = gpt_spec(
    normalization="rmsnorm",
    activation="swiglu",
    bias=False,
    position_embedding_type="rope",
    share_embeddings_and_output_weights=False,
)
WIDE = gpt_spec(hidden_size=128, ffn_hidden_size=128)
RECOMPUTE = {
    kind: RecomputeSpec(granularity=kind, method="uniform", num_layers=1)  # type: ignore[arg-type]
    for kind in ("full", "selective")
}


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    return use_tapes(monkeypatch.setattr)


def run(captured: bool, mesh: Mesh | None = None, **choices: Any) -> TrainState:
    spec = run_spec(**{"compute": "bf16", **choices})
    train = dataclasses.replace(spec.train, cuda_graph=captured)
    return build(dataclasses.replace(spec, train=train), mesh or single_rank())


def step(
    state: TrainState,
    batches: list[Microbatch],
    more: Callable[[], torch.Tensor] | None = None,
) -> StepResult:
    """Run a step as the loop does."""
    result = train_step(state, batches, more=more)
    if not result.is_finite:
        state.masters.write_back()
    state.step += 1
    return result


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    """Return all that outlives a step."""
    tensors = {f"weight {i}": p.detach() for i, p in enumerate(state.masters.params)}
    tensors |= {f"gradient {i}": grad for i, grad in enumerate(state.masters.grads)}
    tensors |= {f"master {i}": m.detach() for i, m in enumerate(state.masters.masters)}
    for name in STATES:
        moments = state_tensors(state.optimizer, name)
        tensors |= {f"{name} {i}": moment for i, moment in enumerate(moments)}
    for direction, table in state.scaling.tables.items():
        tensors |= {f"{direction} {name}": t for name, t in table.tensors().items()}
    return tensors


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, of which those of NaNs can be compared too."""
    return x.detach().reshape(-1).view(torch.uint8)


def assert_same(one: TrainState, other: TrainState, *, not_counted: str | None = None) -> None:
    left, right = everything(one), everything(other)
    assert left.keys() == right.keys()
    different = [name for name, x in left.items() if not torch.equal(bits(x), bits(right[name]))]
    assert not different
    flops = (
        {key: count for key, count in counted.items() if key[1] != not_counted}
        for counted in (one.counter.flops, other.counter.flops)
    )
    assert operator.eq(*flops)
    assert one.counter.fp8_backends == other.counter.fp8_backends


def batches_of(number: int, count: int = 2) -> list[Microbatch]:
    return [microbatch(10 * number + index) for index in range(count)]


CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"compute": "fp32"},
    "delayed": {"fp8": DELAYED},
    "delayed, fp8_params": {"fp8": FP8_PARAMS},
    "delayed, llama": {"fp8": DELAYED, "model": LLAMA},
    "delayed, recomputed": {
        "fp8": DELAYED, "model": gpt_spec(recompute=RECOMPUTE["full"]),
    },
    "delayed, attention recomputed": {
        "fp8": DELAYED, "model": gpt_spec(recompute=RECOMPUTE["selective"]),
    },
    "delayed, ALiBi": {
        "fp8": DELAYED, "model": gpt_spec(position_embedding_type="alibi"),
    },
    "tensorwise": {"fp8": Fp8Recipe(name="tensorwise")},
    "tensorwise, fp8_params": {"fp8": Fp8Recipe(name="tensorwise", params_in_fp8=True)},
    "rowwise": {"fp8": Fp8Recipe(name="rowwise")},
    "blockwise": {"fp8": Fp8Recipe(name="blockwise"), "model": WIDE},
    "blockwise, fp8_params": {
        "fp8": Fp8Recipe(name="blockwise", params_in_fp8=True), "model": WIDE,
    },
}  # fmt: skip


SLOW = {"fp32", "tensorwise", "tensorwise, fp8_params", "rowwise", "blockwise"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_recorded_steps_have_the_bits_of_others(case: str, recorder: TapeRecorder) -> None:
    """Six steps of two microbatches. After three, everything of a microbatch is replayed."""
    captured, plain = run(True, **CASES[case]), run(False, **CASES[case])
    for number in range(6):
        assert step(captured, batches_of(number)) == step(plain, batches_of(number))
        assert_same(captured, plain)
    assert recorder.num_records == 2, "a step's first microbatch, and the others"
    assert captured.graphs is not None and captured.graphs.num_replays == 2 * 3
    assert recorder.num_beside == 2 * 3


def both(**choices: Any) -> tuple[TrainState, TrainState]:
    return run(True, **choices), run(False, **choices)


def recordings(state: TrainState) -> int:
    assert state.graphs is not None
    return state.graphs.num_recordings


def test_validation_health_skips_and_other_numbers_of_microbatches_in_between(
    recorder: TapeRecorder,
) -> None:
    """The later microbatches are first recorded after a validation has cast the weights again."""
    captured, plain = both(fp8=DELAYED)
    counts = [1, 1, 1, 1, 1, 3, 2, 1, 3, 3]
    for number, count in enumerate(counts):
        seen = []
        for state in (captured, plain):
            assert isinstance(state.scaling, ScalingState)
            probe = HealthProbe(state.scaling, "scales")
            if number == 7:
                probe.attach()
            factor = math.inf if number == 8 else 1.0
            batches = batches_of(number, count)
            params = state.masters.params
            before = params[0].data[0, 0].clone()
            params[0].data[0, 0] *= factor  # a graph has no hooks: the weight itself is spoilt
            result = step(state, batches)
            params[0].data[0, 0] = before if number == 8 else params[0].data[0, 0]
            seen.append(repr(result))
            if number == 7:
                seen.append(probe.detach())
            seen.append(evaluate(state, batches_of(100)))
        half = len(seen) // 2
        assert seen[:half] == seen[half:]
        assert ("nan" in seen[0]) == (number == 8)
        assert_same(captured, plain)
    assert recorder.num_records == recordings(captured) == 2
    assert captured.graphs is not None
    assert captured.graphs.num_replays == 1 + 1 + 2 + 2 + 3 + 3, "the first later one is not"


def test_documents_are_copied_into_place() -> None:
    """Positions and masks follow the documents of each microbatch."""
    captured, plain = both(fp8=DELAYED, model=LLAMA)
    places = np.tile(np.arange(SEQ), (2, 1))
    for number in range(5):
        length = 3 + number
        more = {
            "position_ids_BS": places % length,
            "cu_seqlens_N1": borders_of(places // length),
        }
        batches = [dataclasses.replace(batch, **more) for batch in batches_of(number)]
        assert step(captured, batches) == step(plain, batches)
    # A recording's mask has all scores of a sample; without one, those of documents are computed.
    assert_same(captured, plain, not_counted="attention")
    assert recordings(captured) == 2


def test_a_microbatch_of_another_shape_runs_without_a_recording() -> None:
    captured, plain = both(fp8=DELAYED)
    for number in range(6):
        batches = [microbatch(number, batch=3 if number == 4 else 2)]
        assert step(captured, batches) == step(plain, batches)
    assert_same(captured, plain)
    assert captured.graphs is not None and captured.graphs.num_replays == 2


@pytest.mark.parametrize("counts", [[2, 2, 2, 1], [2, 2, 2, 2]], ids=["first recorded", "both"])
def test_a_step_whose_first_microbatch_is_not_recorded_replays_nothing(counts: list[int]) -> None:
    """Its casts of the weights are new ones, and recordings would read older ones."""
    captured, plain = both(fp8=DELAYED)
    assert captured.graphs is not None
    for number, count in enumerate(counts):
        assert step(captured, batches_of(number, count)) == step(plain, batches_of(number, count))
    before = captured.graphs.num_replays, captured.graphs.num_recordings
    batches = [microbatch(70, batch=3), microbatch(71)]
    assert step(captured, batches) == step(plain, batches)
    assert_same(captured, plain)
    assert (captured.graphs.num_replays, captured.graphs.num_recordings) == before
    for number in range(80, 83):
        assert step(captured, batches_of(number)) == step(plain, batches_of(number))
    assert_same(captured, plain)
    assert captured.graphs.num_replays == before[0] + 3 * 2


@pytest.mark.parametrize("moves", [False, True], ids=["in place", "moved"])
def test_a_state_that_is_restored(moves: bool, recorder: TapeRecorder) -> None:
    """A rollback writes into the same memory, so recordings stay; otherwise they are made again."""
    captured, plain = both(fp8=DELAYED)
    kept: dict[str, torch.Tensor] = {}
    for number in range(8):
        if number == 5:
            kept = {name: x.detach().clone() for name, x in everything(plain).items()}
        batches = batches_of(number)
        assert step(captured, batches) == step(plain, batches)
    for state in (captured, plain):
        for name, tensor in everything(state).items():
            tensor.copy_(kept[name])
        state.optimizer.set_num_updates(5)
        if moves:
            weight = state.masters.params[2]
            weight.data = weight.data.clone()
    for number in (5, 6):
        batches = batches_of(number)
        assert step(captured, batches) == step(plain, batches)
    assert_same(captured, plain)
    assert recordings(captured) == (4 if moves else 2)
    assert recorder.num_beginnings == int(moves), "a pool of memory is not captured into again"


def test_recordings_that_are_forgotten_leave_nothing_in_their_memory() -> None:
    """Neither a recording nor a cast of a weight that one has made is alive."""
    state = run(True, fp8=DELAYED)
    for number in range(5):
        step(state, batches_of(number))
    assert state.graphs is not None
    recorded = [x for each in state.graphs._recordings.values() for x in tensors_of_casts(each)]
    alive = [weakref.ref(x) for x in recorded]
    assert len(alive) >= 2 * 4 * 2, "of each linear, in both recordings"
    del recorded
    state.masters.params[2].data = state.masters.params[2].data.clone()
    state.graphs.begin_step()
    gc.collect()
    assert [x for x in alive if x() is not None] == []


def tensors_of_casts(recording: graphs._Recording) -> list[torch.Tensor]:
    found = [recording.recorded.result]
    for operands in recording.casts:
        assert operands is not None
        pair = (operands.along_last, operands.along_first)
        found += [x.payload if isinstance(x, Fp8Tensor) else x for x in pair]
    return found


def on_a_rank(rank: Rank, name: str) -> list[int]:
    """Compare the two kinds of runs on one of two replicas; return what was recorded and sent."""
    use_tapes(setattr)
    parallel = ParallelSpec(devices_per_node=rank.size)
    mesh = join(parallel)
    sent = []
    captured, plain = (
        run(kind, mesh, fp8=FP8_PARAMS, parallel=parallel, optim=optim_spec(name=name))
        for kind in (True, False)
    )
    for number in range(6):
        batches = [microbatch(100 * number + 10 * index + rank.index) for index in range(2)]
        for state in (captured, plain):
            before = sum(mesh.traffic.num_bytes.values())
            sent.append((step(state, batches), sum(mesh.traffic.num_bytes.values()) - before))
        assert sent[-1] == sent[-2], f"losses, norms and bytes: {sent[-2:]}"
        assert_same(captured, plain)
    return [recordings(captured), sent[-1][1]]


@pytest.mark.parametrize("name", ["adamw", "distributed_fused_adam"])
def test_replicas_reduce_between_the_replays(name: str) -> None:
    first, second = run_ranks(on_a_rank, 2, {"name": name})
    assert first == second and first[0] == 2 and first[1] > 0


# ---------------------------------------------------------------------------------------- addresses


def addresses(state: TrainState) -> dict[str, int]:
    """Return where everything is that a step's kernels read or write and that outlives a step.

    Besides what recordings read, these are masters and moments. Dropout is refused, so a step reads
    no random numbers.
    """
    assert state.graphs is not None
    tensors = {**everything(state), **dict(state.graphs.lasting())}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "case", ["bf16", "delayed", "delayed, fp8_params", "blockwise, fp8_params"]
)
def test_nothing_that_outlives_a_step_moves(case: str) -> None:
    """In recorded steps, in others, and around validations."""
    state = run(True, **CASES[case])
    before: dict[str, int] = {}
    for number in range(6):
        step(state, batches_of(number))
        evaluate(state, batches_of(50))
        now = addresses(state)
        if number > 0:
            assert [name for name in now if name in before and now[name] != before[name]] == []
        before = now
    assert any(name.endswith("gradient") for name in before)
    assert "microbatch, tokens_BS" in before
    if "fp8" in CASES[case]:
        scales = "weight, scale" if "fp8_params" in case else "forward quant_scale"
        assert any(name.endswith(scales) for name in before)


def a_scale_that_moves(table: ScaleTable, field: str, value: torch.Tensor) -> None:
    setattr(table, field, value)


def a_weights_scale_that_moves(form: StoredFp8, scale: torch.Tensor) -> None:
    form._dequant_scale = scale.clone()


PLANTED: dict[str, tuple[str, type, str, Callable[..., None]]] = {
    "scales": ("delayed", ScaleTable, "_set", a_scale_that_moves),
    "scales of weights in FP8": (
        "delayed, fp8_params", StoredFp8, "_set_dequant_scale", a_weights_scale_that_moves,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_move_is_seen_and_recorded_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The addresses differ, and a run notices it by itself: it replays nothing that has moved."""
    case, kind, method, wrong = PLANTED[what]
    monkeypatch.setattr(kind, method, wrong)
    state = run(True, **CASES[case])
    held, before = [], {}
    for number in range(5):
        step(state, batches_of(number, 1))
        now = addresses(state)
        assert not before or now != before
        before = now
        held += list(everything(state).values())  # so that no memory is given out again
        held += [x for _, x in state.graphs.lasting()]  # type: ignore[union-attr]
    assert recordings(state) == 2, "one in each step after the first three"


@pytest.mark.parametrize("what", PLANTED)
def test_a_recording_that_reads_other_memory_trains_otherwise(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each planted bug changes losses where the run does not look at addresses."""
    case, kind, method, wrong = PLANTED[what]

    def losses(state: TrainState) -> list[float]:
        return [step(state, batches_of(number, 1)).loss for number in range(7)]

    expected = losses(run(False, **CASES[case]))
    monkeypatch.setattr(kind, method, wrong)
    monkeypatch.setattr(graphs.MicrobatchGraphs, "_now", lambda self: {})
    found = losses(run(True, **CASES[case]))
    assert found[:4] == expected[:4] and found != expected


# ----------------------------------------------------------------------------------------- settings


def test_a_run_on_a_cpu_refuses_it() -> None:
    """An accelerator that is found to be a CPU refuses as one that is given."""
    for more in ([], ["trainer.accelerator=cpu"]):
        with pytest.raises(UserError, match=r"enable_cuda_graph"):
            load_all(["model.enable_cuda_graph=True", *more], gpu_available=lambda: False)
    spec = resolve(load(["model.enable_cuda_graph=True"]), lambda: True)
    assert spec.train.cuda_graph


def test_the_header_says_that_it_is_unproven_and_which_steps_run_without_graphs() -> None:
    state = run(True)
    (line,) = graphs_of(spec_of(DELAYED), state)
    assert "after 3 steps" in line and "unproven" in line and "logged" not in line
    (line,) = graphs_of(spec_of(TENSORWISE, every=10), state)
    assert "after 3 steps, not in the logged steps (every 10 steps)" in line
    assert graphs_of(spec_of(DELAYED), run(False)) == []


# ------------------------------------------------------------------------------------------- health

TENSORWISE = Fp8Recipe(name="tensorwise")
MIXED = dataclasses.replace(DELAYED, modules=(ModuleRule("layers.0.*", "tensorwise"),))
HIGH = dataclasses.replace(DELAYED, modules=(ModuleRule("layers.0.*", "high_precision"),))


def spec_of(fp8: Fp8Recipe | None, every: int = 1, mode: HealthMode = "scales") -> RunSpec:
    spec = run_spec(compute="bf16", fp8=fp8)
    train = dataclasses.replace(spec.train, cuda_graph=True, log_every_n_steps=every)
    observe = dataclasses.replace(spec.observe, health=HealthSpec(mode=mode))
    return dataclasses.replace(spec, train=train, observe=observe)


@pytest.mark.parametrize("fp8", [DELAYED, HIGH], ids=["delayed", "partly in BF16"])
def test_logged_steps_replay_where_tables_have_the_health(fp8: Fp8Recipe, tmp_path: Path) -> None:
    """The numbers are those of steps without graphs; every step is logged."""
    records = []
    for captured in (True, False):
        state = run(captured, fp8=fp8)
        name = "captured" if captured else "plain"
        (tmp_path / name).mkdir()
        log = HealthLog(state, HealthSpec(mode="scales"), tmp_path / name, 0, lambda text: None)
        for number in range(5):
            numbers = log.begin()
            result = step(state, batches_of(number), more=numbers)
            log.end(number + 1, CompositeTracker([]), result.more)
        log.close()
        if captured:
            assert state.graphs is not None and state.graphs.num_replays == 2 * 2
        records.append(read_health(tmp_path / name / HEALTH_FILE))
    found, expected = records
    assert found == expected and all(len(record.tensors) >= 4 * 3 for record in found)


def test_a_run_whose_graphs_would_never_replay_is_refused() -> None:
    """The settings refuse it, so that plan and dry run do too."""
    given = ["model.fp8=True", "model.enable_cuda_graph=True", "trainer.log_every_n_steps=1"]
    rule = "model.fp8_modules=['layers.0.*:{}']"
    mixed, high = rule.format("tensorwise"), rule.format("high_precision")
    for more in ("model.fp8_recipe=tensorwise", mixed, "model.fp8_health=full"):
        with pytest.raises(UserError, match=r"log_every_n_steps=1 .* Set trainer.log_every"):
            resolve(load([*given, more]), lambda: True)
        for least in ("trainer.log_every_n_steps=2", "model.fp8_health=off"):
            others = [text for text in (*given, more) if "health" not in text or "off" not in least]
            resolve(load([*others, least]), lambda: True)
    for other in ("model.fp8=False", "model.fp8_recipe=delayed", high):
        resolve(load([*given, other]), lambda: True)
