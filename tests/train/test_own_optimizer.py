"""An optimizer that the package does not know: this file alone describes and implements it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.optim.protocol import Optimizer, Step
from megafp8.optim.schedules import learning_rate
from megafp8.parallel.mesh import single_rank
from megafp8.plan.dryrun import rank_share
from megafp8.plan.hardware import hardware_of
from megafp8.plan.memory import rank_memory
from megafp8.plan.search import layouts
from megafp8.plan.time import step_time
from megafp8.specs import FsdpSpec, OptimSpec, ParallelSpec, StorageSpec
from megafp8.specs.optim import (
    OPTIMIZERS,
    AdamTraits,
    MuonTraits,
    NamedOptimizer,
    OptimizerTraits,
    ParamKind,
    StorageName,
)
from megafp8.train.pretrain import pretrain
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.kit.tensors import stored_states
from tests.parallel import matrix
from tests.parallel.rank_work import run_case
from tests.plan.test_traffic import check, measure
from tests.ranks import Rank, run_ranks
from tests.tiny import build_run, microbatch, optim_spec
from tests.train import faults
from tests.train.runs import JOB


@dataclass(frozen=True)
class Sgd(OptimizerTraits):
    """Describe SGD with momentum, whose momentum may be stored in any format."""

    momentum: float = 0.9
    stored: StorageName = "fp32"
    only_vectors: bool = False

    name = "SGD"
    update_bytes = 32

    def owns(self, optim: OptimSpec, kind: ParamKind) -> bool:
        return kind.is_vector or not self.only_vectors

    def states(self, optim: OptimSpec, kind: ParamKind) -> Mapping[str, StorageName]:
        return {"velocity": self.stored}

    def make(self, *given: Any) -> RankSgd:
        return RankSgd(self, *given)


class RankSgd(Optimizer):
    def describe(self) -> str:
        assert isinstance(self.traits, Sgd)
        return f"plain operations, momentum {self.traits.momentum}"

    def update(self, step: Step) -> None:
        masters, traits = self.masters, self.traits
        assert isinstance(traits, Sgd)
        for row, states in self.states.items():
            master, velocity = masters.masters[row].detach(), states["velocity"]
            decays = self.spec.decays(masters.segments[row].param.dim())
            grad = masters.stored_grads[row].values()
            grad.add_(master, alpha=self.spec.weight_decay if decays else 0.0)
            moved = velocity.values().mul_(traits.momentum).add_(grad)
            master.add_(moved, alpha=-step.lr)
            velocity.store(moved)


SGD = NamedOptimizer((Sgd(),))
ZERO = NamedOptimizer((Sgd(),), shards_states=True)


def sgd_spec(given: NamedOptimizer = SGD, **changes: Any) -> OptimSpec:
    return optim_spec(**{"name": "sgd", "given": given, "lr": 0.05, **changes})


def states(state: TrainState) -> list[torch.Tensor]:
    return [*state.masters.masters, *state.optimizer.all_state_tensors()]


def test_it_has_the_bits_of_torchs() -> None:
    spec = sgd_spec(weight_decay=0.1)
    state = build_run(optim=spec)
    masters = state.masters
    theirs = [torch.nn.Parameter(master.detach().clone()) for master in masters.masters]
    groups = [
        {"params": [p], "weight_decay": 0.1 if spec.decays(s.param.dim()) else 0.0}
        for p, s in zip(theirs, masters.segments, strict=True)
    ]
    torchs = torch.optim.SGD(groups, lr=1.0, momentum=0.9, foreach=False)
    for step in range(3):
        train_step(state, [microbatch(step)])  # leaves the clipped gradients
        for param, grad in zip(theirs, masters.grads, strict=True):
            param.grad = grad.clone()
        for group in torchs.param_groups:
            group["lr"] = learning_rate(spec, step + 1)
        torchs.step()
        state.step += 1
    assert all(torch.equal(a, b) for a, b in zip(masters.masters, theirs, strict=True))
    assert [name for name, _ in state.optimizer.states()] == ["velocity"]
    assert state.optimizer.describe() == "plain operations, momentum 0.9"
    assert not state.optimizer.decides_on_device and not state.optimizer.skip_on_device


def test_each_parameter_belongs_to_the_first_that_owns_it() -> None:
    """Muon takes the matrices of the layers, SGD norms and biases, and AdamW what is left."""
    mixed = NamedOptimizer((MuonTraits(), Sgd(only_vectors=True), AdamTraits()))
    specs = (optim_spec(name=name) for name in ("muon", "adamw"))
    states = [
        build_run(optim=spec) for spec in (optim_spec(given=mixed), sgd_spec(lr=3e-3), *specs)
    ]
    for state in states:
        train_step(state, [microbatch(0)])
    masters, kinds = states[0].masters, set()
    for row, segment in enumerate(masters.segments):
        own, *others = (state.masters.masters[row] for state in states)
        is_linear, is_vector = masters.kind_of(segment.param)
        found = [torch.equal(own, other) for other in others]
        assert found == [is_vector, not is_vector, not (is_linear or is_vector)]
        kinds.add(tuple(found))
    assert len(kinds) == 3
    assert [state.optimizer.describe() for state in states[::2]] == [
        "Muon for 8 weights of linears; SGD for the rest by plain operations, momentum 0.9; "
        "AdamW for the rest by torch's fused kernel",
        "Muon for 8 weights of linears; AdamW for the rest by torch's fused kernel",
    ]


def test_a_state_is_stored_in_the_format_that_the_traits_name() -> None:
    found = {}
    for stored in ("fp32", "fp8"):
        state = build_run(optim=sgd_spec(NamedOptimizer((Sgd(stored=stored),))))
        train_step(state, [microbatch(0)])
        found[stored] = stored_states(state.optimizer, "velocity")
    for exact, rounded in zip(found["fp32"], found["fp8"], strict=True):
        expected = ScaledTensor.of(exact.values(), STORAGE_FORMATS["fp8"])
        assert rounded.payload.dtype == torch.float8_e4m3fn
        assert torch.equal(rounded.values(), expected.values())


SMALL: dict[str, Any] = {"steps": 4, "num_microbatches": 4}  # two for each of two replicas
LAYOUTS = {
    "dp 2": (sgd_spec(), ParallelSpec()),
    "dp 2, ZeRO-1": (sgd_spec(ZERO), ParallelSpec()),
    "dp 2, FSDP full": (sgd_spec(), ParallelSpec(fsdp=FsdpSpec())),
    "pp 2": (sgd_spec(), ParallelSpec(pp=2)),
}
FOUR = {
    "pp 2 x dp 2, ZeRO-1": (sgd_spec(ZERO), ParallelSpec(pp=2)),
    "tp 2 x dp 2, FSDP full": (sgd_spec(), ParallelSpec(tp=2, fsdp=FsdpSpec())),
    "tp 2 x pp 2": (sgd_spec(), ParallelSpec(tp=2, sequence_parallel=True, pp=2)),
}


def cases_of(chosen: Mapping[str, tuple[OptimSpec, ParallelSpec]]) -> dict[str, Case]:
    return {
        name: matrix.case_of("FP32", parallel, optim=optim, **SMALL)
        for name, (optim, parallel) in chosen.items()
    }


def on_two_ranks(chosen: Mapping[str, tuple[OptimSpec, ParallelSpec]]) -> dict[str, Case]:
    return {
        name: replace(case, parallel=replace(case.parallel, devices_per_node=2))
        for name, case in cases_of(chosen).items()
    }


def assert_as_one_process(chosen: Mapping[str, tuple[OptimSpec, ParallelSpec]], size: int) -> None:
    """Within FP32's rounding, which sums of gradients over ranks have in another order."""
    for name, ranks in on_ranks(run_case, cases_of(chosen), size).items():
        one = run_case(matrix.case_of("FP32", optim=sgd_spec(), **SMALL), single_rank())
        line, good = matrix.row(name, "FP32", ranks, one, 1e-4)
        assert good, line


def test_two_ranks_train_as_one_process() -> None:
    assert_as_one_process(LAYOUTS, 2)


@pytest.mark.slow
def test_four_ranks_train_as_one_process() -> None:
    assert_as_one_process(FOUR, 4)


def test_ranks_send_and_hold_what_the_plan_says() -> None:
    cases = on_two_ranks(LAYOUTS)
    for name, ranks in on_ranks(measure, cases, 2).items():
        check(cases[name], ranks)


def test_a_dry_run_holds_what_the_plan_says() -> None:
    """To the byte, for each layout of two ranks."""
    for name, case in on_two_ranks(LAYOUTS).items():
        spec = case.spec()
        plan = rank_memory(spec, 0).held
        assert rank_share(spec, 0).held == plan and plan.moments > 0, name


def test_a_plan_follows_the_description() -> None:
    """The states have half of AdamW's bytes, and a step of the optimizer takes its bytes' time."""
    ours, adamws = (
        matrix.case_of("FP32", optim=optim, **SMALL).spec() for optim in (sgd_spec(), optim_spec())
    )
    assert 2 * rank_memory(ours, 0).held.moments == rank_memory(adamws, 0).held.moments > 0
    gpu = hardware_of("h100", {})
    seconds = [step_time(spec, gpu).optimizer for spec in (ours, adamws)]
    assert seconds[0] / seconds[1] == pytest.approx(Sgd.update_bytes / AdamTraits.update_bytes)
    found = list(layouts(replace(ours, parallel=ParallelSpec(devices_per_node=4))))
    assert {spec.optim.shards_states for spec in found} == {False, True}
    assert {spec.optim.named.optimizers for spec in found} == {(Sgd(),)}


SETTINGS = [
    *JOB,
    "trainer.max_steps=6",
    "trainer.val_check_interval=6",
    "trainer.devices=2",
    "exp_manager.name=job",
    "exp_manager.resume_if_exists=True",
    "model.optim.sched.warmup_steps=0",
]


def trained(rank: Rank, folder: str, data: str, killed_at: int | None, more: list[str]) -> int:
    """Do what the command line does, but for the optimizer, which is handed over as an object."""
    os.chdir(folder)
    given = {word.partition("=")[0]: word for word in (*SETTINGS, f"model.data.data_prefix={data}")}
    given |= {word.partition("=")[0]: word for word in more}
    spec = resolve(load(list(given.values())), lambda: False)
    optim = replace(spec.optim, name="sgd", given=SGD if spec.parallel.fsdp else ZERO)
    if killed_at is not None and rank.index == 1:
        faults.signalled(int(signal.SIGKILL), killed_at)
    return pretrain(replace(spec, optim=optim), is_sweep=False, command=["pretrain"])


SLOWER = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("FSDP", "pipeline")]


@pytest.mark.parametrize("layout", ["ZeRO-1", *SLOWER])
def test_a_killed_run_continues_bit_for_bit(layout: str, dataset: Path, tmp_path: Path) -> None:
    more = {
        "ZeRO-1": [],
        "FSDP": ["model.fsdp=True"],
        "pipeline": ["model.pipeline_model_parallel_size=2"],
    }[layout]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    words = {"data": str(dataset), "more": more}
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        run_ranks(trained, 2, {**words, "folder": str(tmp_path / "killed"), "killed_at": 5})
    for name in ("whole", "killed"):
        run_ranks(trained, 2, {**words, "folder": str(tmp_path / name), "killed_at": None})
    whole, killed = (
        sorted((tmp_path / name / "runs/job/checkpoints/step_00000006").glob("*.safetensors"))
        for name in ("whole", "killed")
    )
    assert len(whole) == len(killed) == 2
    for one, other in zip(whole, killed, strict=True):
        assert one.read_bytes() == other.read_bytes() and b"optimizer/velocity/" in one.read_bytes()
    said = (tmp_path / "killed/runs/job/console.log").read_text()
    assert said.count("optimizer: sgd by plain operations, momentum 0.9; learning rate: ") == 2
    assert "continuing from" in said and "step_00000004" in said


def sources() -> Iterator[tuple[str, str]]:
    root = Path(__file__).parents[2] / "megafp8"
    for path in root.rglob("*.py"):
        yield path.relative_to(root).as_posix(), path.read_text("utf-8")


RULES = re.compile(
    r"optim\.name\s*(==|in\b|!=)|megafp8\.optim\.(adamw|stored_adam|scaled_adam|muon)\b"
)


def test_nothing_outside_asks_which_optimizer_runs() -> None:
    found = {
        path: match.group()
        for path, text in sources()
        if not path.startswith(("optim/", "specs/optim.py")) and (match := RULES.search(text))
    }
    assert found == {}
    assert RULES.search("if spec.optim.name == 'muon'") and RULES.search("megafp8.optim.muon")


def test_low_precision_states_are_an_implementation_of_their_own() -> None:
    """Under FP8-LM's levels StoredAdam owns what has a tensor below FP32, and AdamW the rest."""
    o1 = StorageSpec(main_grads="fp8", main_params="fp16")
    found = {}
    for name, storage in {
        "O0": StorageSpec(),
        "O1": o1,
        "O2": replace(o1, exp_avg="fp8", exp_avg_sq="fp16"),
        "moments of linears": StorageSpec(exp_avg="bf16", linears_only=True),
    }.items():
        optimizers = build_run(optim=optim_spec(storage=storage)).optimizer.optimizers
        found[name] = [type(optimizer).__name__ for optimizer in optimizers]
    mixed = ["StoredAdam", "AdamW"]
    expected = {"O0": ["AdamW"], "O1": mixed, "O2": ["StoredAdam"], "moments of linears": mixed}
    assert found == expected


def test_names_that_shard_and_names_that_do_not_lead_to_each_other() -> None:
    for name, named in OPTIMIZERS.items():
        if named.shards_states:
            assert not OPTIMIZERS[named.unsharded].shards_states and not named.sharded, name
        elif named.sharded:
            assert OPTIMIZERS[named.sharded].shards_states, name
        assert not OPTIMIZERS.get(named.same_as, named).same_as or named.same_as == "", name
