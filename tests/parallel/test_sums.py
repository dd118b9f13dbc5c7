"""Gradients of runs in BF16 are added up in FP32: over microbatches, over ranks, and for a step.

Losses and norms hardly tell, since a sum in BF16 is 0.3 % off. Each microbatch's gradient is known
from a step of its own with the same weights.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, GPTSpec, ParallelSpec
from megafp8.specs.precision import BackendName
from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.kit.tensors import Piece, assembled
from tests.parallel.rank_work import Sums, sums_of
from tests.parallel.test_tensor_parallel import LLAMA
from tests.te_sources import need_sources
from tests.tiny import gpt_spec, optim_spec

TENSORWISE = Fp8Recipe(name="tensorwise")
UNTIED = gpt_spec(share_embeddings_and_output_weights=False)
SEQUENCE = ParallelSpec(tp=2, sequence_parallel=True)


def case_of(parallel: ParallelSpec, fp8: Fp8Recipe | None = None, **changes: object) -> Case:
    case = Case("bf16", fp8, UNTIED, num_microbatches=4, parallel=parallel)
    return replace(case, **changes)  # type: ignore[arg-type]


REPLICAS = {
    "replicas": case_of(ParallelSpec()),
    "replicas, FP8": case_of(ParallelSpec(), TENSORWISE),
    "ZeRO-1": case_of(ParallelSpec(), optim=optim_spec(name="distributed_fused_adam")),
    "FSDP": case_of(ParallelSpec(fsdp=FsdpSpec())),
    "FSDP, FP8": case_of(ParallelSpec(fsdp=FsdpSpec()), TENSORWISE),
    "stages": case_of(ParallelSpec(pp=2)),
}
"""Layouts in which each microbatch has the bits of one process."""
CASES = REPLICAS | {
    "FSDP, sums in BF16": case_of(ParallelSpec(fsdp=FsdpSpec(grad_reduce_dtype="bf16"))),
    "replicas, sums in BF16": case_of(ParallelSpec(grad_reduce_dtype="bf16")),
    "tied stages": case_of(ParallelSpec(pp=2), model=gpt_spec()),
    "tensor": case_of(ParallelSpec(tp=2)),
    "tensor, norms of heads": case_of(ParallelSpec(tp=2), model=replace(LLAMA, qk_layernorm=True)),
    "sequence": case_of(SEQUENCE),
    "sequence, FP8": case_of(SEQUENCE, TENSORWISE),
    "context": case_of(ParallelSpec(cp=2)),
}
FP32, BF16 = {"float32"}, {"bfloat16"}
SENT: dict[str, tuple[dict[tuple[str, str], set[str]], dict[tuple[str, str], set[str]]]] = {
    "replicas": ({}, {("dp", "all_reduce_sum"): FP32}),
    "replicas, FP8": ({}, {("dp", "all_reduce_sum"): FP32}),
    "replicas, sums in BF16": ({}, {("dp", "all_reduce_sum"): BF16}),
    "ZeRO-1": ({}, {("dp", "reduce_scatter_sum"): FP32}),
    "FSDP": ({("dp", "reduce_scatter_sum"): FP32}, {}),
    "FSDP, FP8": ({("dp", "reduce_scatter_sum"): FP32}, {}),
    "FSDP, sums in BF16": ({("dp", "reduce_scatter_sum"): BF16}, {}),
    "stages": ({}, {}),
    "tied stages": ({}, {("ends", "all_reduce_sum"): FP32}),
    # In the passes of tensor-parallel ranks these are activations, and the head's FP32 sums.
    "tensor": ({("tp", "all_reduce_sum"): FP32 | BF16}, {}),
    "tensor, norms of heads": (
        {("tp", "all_reduce_sum"): FP32 | BF16},
        {("tp", "all_reduce_sum"): FP32},
    ),
    "sequence": (
        {("tp", "all_reduce_sum"): FP32 | BF16, ("tp", "reduce_scatter_sum"): BF16},
        {("tp", "all_reduce_sum"): FP32},
    ),
    "context": ({}, {("data", "all_reduce_sum"): FP32}),
}
SENT["sequence, FP8"] = SENT["sequence"]
"""The dtypes of a case's sums over ranks while the passes run, and after them."""


@pytest.fixture(scope="module")
def two() -> dict[str, list[Sums]]:
    return on_ranks(sums_of, CASES, 2)


def assert_sum(whole: list[list[Piece]], parts: list[dict[str, torch.Tensor]]) -> None:
    """A product may add to the FP32 sum itself, so that what it adds is not rounded alone: the
    bound is 2^-14 of the largest sum of magnitudes, and a sum in BF16 is up to 2^-9 off."""
    found = assembled(whole)
    assert found.keys() == parts[0].keys()
    for name, tensor in found.items():
        addends = torch.stack([part[name] for part in parts]).double()
        error = (tensor.double() - addends.sum(0)).abs().max().item()
        assert error <= 2.0**-14 * addends.abs().sum(0).max().item(), name


@pytest.mark.parametrize("fp8", [None, TENSORWISE], ids=["BF16", "FP8"])
@pytest.mark.parametrize("model", [gpt_spec(), LLAMA], ids=["gpt", "llama"])
def test_microbatches_are_added_up_in_fp32(model: GPTSpec, fp8: Fp8Recipe | None) -> None:
    """Weights, biases, norms and embeddings, whether a product, a sink or autograd adds them."""
    found = sums_of(case_of(ParallelSpec(), fp8, model=model), single_rank())
    assert_sum([found.whole], [assembled([each]) for each in found.rounds])
    for piece in found.whole:  # the check could tell
        assert not torch.equal(piece.tensor, piece.tensor.bfloat16().float()), piece.name


@pytest.mark.parametrize("backend", ["te", "torchao"])
def test_other_backends_add_up_microbatches_in_fp32(backend: BackendName) -> None:
    """In a process of its own, since one of them patches torch."""
    if backend == "te":
        need_sources(DEFAULT_VERSION)
    else:
        pytest.importorskip("torchao")
    model = gpt_spec(activation="gelu-tanh")
    cases = {
        name: case_of(ParallelSpec(), fp8, model=model, backend=backend)
        for name, fp8 in (("BF16", None), ("FP8", TENSORWISE))
        if fp8 is not None or backend == "te"
    }
    for (sums,) in on_ranks(sums_of, cases, 1).values():
        assert_sum([sums.whole], [assembled([each]) for each in sums.rounds])


@pytest.mark.parametrize("name", CASES)
def test_ranks_add_up_microbatches_in_fp32(two: dict[str, list[Sums]], name: str) -> None:
    """Replicas that are asked for sums in BF16 round theirs once more, which shows; FSDP rounds
    each microbatch's."""
    rounds = zip(*(rank.rounds for rank in two[name]), strict=True)
    parts = [assembled(list(each)) for each in rounds]
    if name == "replicas, sums in BF16":
        with pytest.raises(AssertionError):
            assert_sum([rank.whole for rank in two[name]], parts)
    else:
        assert_sum([rank.whole for rank in two[name]], parts)


@pytest.mark.parametrize("name", REPLICAS)
def test_sums_over_ranks_are_those_of_one_process(two: dict[str, list[Sums]], name: str) -> None:
    """FSDP rounds each rank's gradient of a microbatch to BF16, and then adds them up in FP32."""
    alone = sums_of(replace(REPLICAS[name], parallel=ParallelSpec()), single_rank())
    parts = [assembled([each]) for each in alone.rounds]
    if name.startswith("FSDP"):
        parts = [{key: x.bfloat16().float() for key, x in part.items()} for part in parts]
    assert_sum([rank.whole for rank in two[name]], parts)


@pytest.mark.parametrize("name", CASES)
def test_each_sum_over_ranks_has_its_dtype(two: dict[str, list[Sums]], name: str) -> None:
    for rank in two[name]:
        for sent, expected in zip((rank.of_axes, rank.at_the_end), SENT[name], strict=True):
            found: dict[tuple[str, str], set[str]] = {}
            for axis, operation, dtype in sent:
                if operation.endswith("sum"):
                    found.setdefault((axis, operation), set()).add(dtype)
            assert found == expected, name
