"""Sequence parallelism on gloo ranks against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.parallel.mesh import single_rank
from megafp8.parallel.sequence import by_rank, in_order, side_by_side
from megafp8.specs import Fp8Recipe, ParallelSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.recipes import RECIPES
from tests.config.helpers import load_problems, run_spec
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.parallel.rank_probes import phases
from tests.parallel.rank_work import Outcome, run_case
from tests.parallel.test_tensor_parallel import (
    DROPOUT,
    Outcomes,
    assert_gradients_close,
    assert_losses_close,
    assert_same_tables,
    replicated,
)
from tests.tiny import SEQ, gpt_spec

DELAYED = Fp8Recipe(amax_history_len=4)
TENSORWISE = Fp8Recipe(name="tensorwise")
ALIKE = {
    "fp32": Case(steps=8),
    "gated": Case(
        steps=4,
        model=gpt_spec(
            activation="swiglu", normalization="rmsnorm", position_embedding_type="rope", bias=False
        ),
    ),
    "bf16": Case("bf16", steps=8),
    "delayed": Case("bf16", DELAYED, steps=8),
    "tensorwise": Case("bf16", TENSORWISE, steps=8),
}
DROPPED = {
    "dropout": Case(model=DROPOUT, steps=3),
    "dropout fp8": Case("bf16", DELAYED, DROPOUT, steps=3),
}
RECOMPUTED = {
    f"{granularity} {kind}": replace(
        DROPPED[kind],
        model=replace(
            DROPOUT,
            recompute=RecomputeSpec(granularity=granularity, method="uniform", num_layers=1),
        ),
    )
    for granularity, kind in (("full", "dropout fp8"), ("selective", "dropout fp8"))
}


def of_tp(size: int) -> dict[str, Outcomes]:
    spec = ParallelSpec(tp=size, sequence_parallel=True)
    cases = {
        name: replace(case, parallel=spec) for name, case in (ALIKE | DROPPED | RECOMPUTED).items()
    }
    return on_ranks(run_case, cases, size)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> dict[str, Outcomes]:
    return of_tp(request.param)


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    return {name: run_case(case, single_rank()) for name, case in ALIKE.items()}


@pytest.fixture(scope="module")
def first_losses() -> dict[str, float]:
    """Of every recipe on two ranks, with and without sequence parallelism."""
    model = gpt_spec(num_layers=1, hidden_size=64)
    cases = {}
    for name in RECIPES:
        case = Case("bf16", Fp8Recipe(name=name), model, steps=1, num_microbatches=1)
        case = replace(case, batch={"blockwise": 16, "mxfp8": 4}.get(name, 2))
        for layout in ("tp", "sp"):
            spec = ParallelSpec(tp=2, sequence_parallel=layout == "sp")
            cases[f"{name}, {layout}"] = replace(case, parallel=spec)
    return {name: ranks[0].losses[0] for name, ranks in on_ranks(run_case, cases, 2).items()}


def test_rank_major_order_there_and_back() -> None:
    """What shards lie side by side as is put into the order of the sequence, and back."""
    x_BSF = torch.arange(2 * 8 * 3).view(2, 8, 3)
    shards = torch.cat(x_BSF.chunk(4, dim=1))  # what ranks would gather
    assert torch.equal(in_order(shards, 4), x_BSF)
    assert torch.equal(by_rank(x_BSF, 4), shards)


@pytest.mark.parametrize("case", ALIKE)
def test_equals_one_process(
    ranks: dict[str, Outcomes], alone: dict[str, Outcome], case: str
) -> None:
    """FP32 within 1e-5: losses, first gradients, norms; the rest within 1e-2, as without it."""
    exact = ALIKE[case].compute == "fp32"
    assert_losses_close(ranks[case], alone[case], 1e-5 if exact else 1e-2)
    for rank in ranks[case]:
        assert rank.losses == ranks[case][0].losses and rank.norms == ranks[case][0].norms
        assert rank.validation[0] == pytest.approx(alone[case].validation[0], rel=1e-2)
    if exact:
        assert_gradients_close(ranks[case], alone[case], 1e-5)
        for rank in ranks[case]:
            assert rank.norms == pytest.approx(alone[case].norms, rel=1e-4)
            torch.testing.assert_close(rank.logits, alone[case].logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", ["delayed", "dropout fp8"])
def test_histories_and_scales_are_the_same_on_all_ranks(
    ranks: dict[str, Outcomes], case: str
) -> None:
    assert_same_tables(ranks[case])
    staged = [rank.updates["forward"][0]["staged"] for rank in ranks[case]]
    assert not torch.equal(staged[0], staged[1]), "the ranks did see different amaxes"


@pytest.mark.parametrize("case", ALIKE | DROPPED)
def test_replicated_parameters_stay_bitwise_equal(ranks: dict[str, Outcomes], case: str) -> None:
    first = replicated(ranks[case][0])
    for rank in ranks[case][1:]:
        other = replicated(rank)
        assert first.keys() == other.keys() and len(first) >= 5
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_loss_is_that_of_tensor_parallelism(
    first_losses: dict[str, float], recipe: str
) -> None:
    """Bit for bit: in the forward pass ranks only divide what each of them had whole."""
    assert first_losses[f"{recipe}, sp"] == first_losses[f"{recipe}, tp"]


@pytest.mark.parametrize("case", DROPPED)
def test_dropout_trains(ranks: dict[str, Outcomes], case: str) -> None:
    losses = ranks[case][0].losses
    assert all(rank.losses == losses for rank in ranks[case])
    assert torch.tensor(losses).isfinite().all() and losses[-1] < losses[0] + 0.1


@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputation_changes_no_bit(ranks: dict[str, Outcomes], case: str) -> None:
    """Losses, tables and weights, with dropout; whole layers gather and scatter once more."""
    recomputed, kept = ranks[case], ranks["dropout fp8"]
    for ours, theirs in zip(recomputed, kept, strict=True):
        assert ours.losses == theirs.losses and ours.norms == theirs.norms
        assert_same_tables([ours, theirs])
        for mine, other in zip(ours.weights, theirs.weights, strict=True):
            assert torch.equal(mine.tensor, other.tensor), mine.name
        scatters = "tp", "reduce_scatter_sum", "bfloat16"
        more = ours.traffic[scatters] - theirs.traffic[scatters]
        run = RECOMPUTED[case]
        whole = run.num_microbatches * run.batch * SEQ * run.model.hidden_size * 2
        assert more == (2 * run.model.num_layers * whole if case.startswith("full") else 0)


def layer_bytes(size: int) -> dict[str, dict[str, dict[tuple[str, str, str], float]]]:
    """By case and phase: what a layer hands to its collectives in one microbatch, each rank alike;
    three layers less one, so that the model's ends do not count."""
    spec = ParallelSpec(devices_per_node=size, tp=size, sequence_parallel=True)
    cases = {
        f"{name} {layers}": replace(
            ALIKE[name], num_microbatches=1, model=gpt_spec(num_layers=layers), parallel=spec
        )
        for name in ("bf16", "delayed", "tensorwise")
        for layers in (1, 3)
    }
    ranks = on_ranks(phases, cases, size)
    assert all(rank == same[0] for same in ranks.values() for rank in same)
    found: dict[str, dict[str, dict[tuple[str, str, str], float]]] = {}
    for name in ("bf16", "delayed", "tensorwise"):
        for phase in ("forward", "backward"):
            one, three = (ranks[f"{name} {layers}"][0][phase] for layers in (1, 3))
            per_layer = {key: (n - one.get(key, 0)) / 2 for key, n in three.items()}
            found.setdefault(name, {})[phase] = {key: n for key, n in per_layer.items() if n}
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_of_a_layer(size: int) -> None:
    """In units of s b h 2 bytes (t-1)/t on the wire: forward 4 in BF16, 3 in FP8; backward 6, with
    the inputs gathered again, and 4. Amaxes are apart: 4 bytes a tensor."""
    found = layer_bytes(size)
    unit = ALIKE["bf16"].batch * SEQ * gpt_spec().hidden_size * 2
    for name, expected in {"bf16": (4, 6), "delayed": (3, 4), "tensorwise": (3, 4)}.items():
        for phase, units in zip(("forward", "backward"), expected, strict=True):
            crossed, is_fp8 = found[name][phase], name != "bf16"
            # An all-gather is handed one rank's part, a reduce-scatter the whole; both send
            # (t-1)/t of the whole tensor.
            scattered = crossed.pop(("tp", "reduce_scatter_sum", "bfloat16"))
            gathered = crossed.pop(("tp", "all_gather", "uint8" if is_fp8 else "bfloat16")) * size
            assert (scattered + gathered) / unit == units
            casts = {"forward": 8, "backward": 4}[phase]  # inputs and weights; output gradients
            axis = {"delayed": "amax", "tensorwise": "tp"}.get(name)
            amaxes = {} if axis is None else {(axis, "all_reduce_max", "float32"): 4 * casts}
            assert crossed == amaxes, f"{name} {phase}: nothing else crosses"


ON_TWO = ("trainer.devices=2", "model.tensor_model_parallel_size=2", "model.sequence_parallel=True")
BLOCKWISE = ("model.fp8=True", "model.fp8_recipe=blockwise")


def test_the_key_reaches_the_layout() -> None:
    assert run_spec(*ON_TWO).parallel.sequence_parallel
    assert run_spec(*ON_TWO, "model.fp8=True").parallel.sequence_parallel


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_accepted(recipe: str) -> None:
    sizes = ["model.hidden_size=256", "model.ffn_hidden_size=256", "model.encoder_seq_length=256"]
    spec = run_spec(*ON_TWO, *sizes, "model.fp8=True", f"model.fp8_recipe={recipe}")
    assert spec.parallel.sequence_parallel


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        (["model.tensor_model_parallel_size=1"], "model.sequence_parallel", "has no effect"),
        (["model.encoder_seq_length=65"], "model.encoder_seq_length", "is not a multiple of"),
        (
            ["model.fp8=True", "model.encoder_seq_length=24", "model.micro_batch_size=1"],
            "model.sequence_parallel",
            "12 tokens",
        ),
        (
            ["model.fp8=True", "model.fp8_recipe=tests/own_recipes/simulated_int8.py"],
            "model.sequence_parallel",
            "does not quantize parts as it quantizes the whole",
        ),
        (
            [*BLOCKWISE, "model.encoder_seq_length=128", "model.micro_batch_size=1"],
            "model.sequence_parallel",
            "64 tokens of a microbatch; FP8 products need a multiple of 128",
        ),
        (
            [*BLOCKWISE, "model.fp8_backend=te"],
            "model.sequence_parallel",
            "gathers the tokens of blockwise",
        ),
        (["model.fp8=True", "model.reduce_amax=False"], "model.reduce_amax", "own scales"),
        (
            ["model.fp8=True", "model.fp8_backend=torchao", "model.fp8_recipe=tensorwise"],
            "model.sequence_parallel",
            "not tensor-parallel",
        ),
    ],
)
def test_refusals(settings: list[str], key: str, message: str) -> None:
    found = load_problems(*ON_TWO, *settings)
    assert [p for p in found if p.key == key and message in str(p)], found


@pytest.mark.parametrize("tokens", [32, 12, 6, 5])
def test_gathered_bytes_are_put_in_order_in_long_words(tokens: int) -> None:
    """A GPU copies one element a thread: 8 bytes where the tokens of a rank allow it."""
    size = next(n for n in (8, 4, 2, 1) if tokens % n == 0)
    blocks_RFT = torch.randint(0, 256, (3, 4, tokens), dtype=torch.uint8)
    copied: list[torch.Tensor] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.overloadpacket.__name__ == "clone":
                copied.append(args[0])
            return func(*args, **(kwargs or {}))

    with Copies():
        found_FT = side_by_side(blocks_RFT)
    assert torch.equal(found_FT, torch.cat(blocks_RFT.unbind(), dim=1))
    assert [x.element_size() for x in copied] == [size]
