"""FP8-LM's ZeRO by elements: equal parts of tensors, with the scales of the whole ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.optim import scaled_adam
from megafp8.optim.scaled_adam import Constants, Tensors, fresh_amaxes, update, update_part
from megafp8.parallel.mesh import single_rank
from megafp8.plan.dryrun import simulated
from megafp8.specs import ParallelSpec
from megafp8.specs.optim import StorageName
from megafp8.specs.parallel import LARGEST_IMBALANCE, imbalance_of, owners_of
from megafp8.specs.rank_shape import division_of, rank_shape
from tests.c_kernels import need_kernels
from tests.kit.cases import Case
from tests.kit.runs import alone
from tests.kit.tensors import assert_same
from tests.optim.masters_work import Trained, going_on, saving, train, train_case
from tests.optim.test_masters import LEVELS
from tests.optim.test_masters_ranks import DEEP, PP, SMALL, SP, Found, case, path_of, together
from tests.ranks import run_ranks
from tests.tiny import gpt_spec, run_spec


def by(like: Case, shard_by: str, *, frees: bool = False) -> Case:
    optim = replace(like.optim, shard_by=shard_by, shards_grads=frees)  # type: ignore[arg-type]
    return replace(like, optim=optim)


def both(name: str, like: Case, *, frees: bool = False) -> dict[str, Case]:
    return {name: like, f"{name}, split": by(like, "elements", frees=frees)}


def assert_same_whole(ranks: Found, one: str, other: str) -> None:
    """The whole tensors of both are equal bit for bit; FP32 norms of parts are rounded apart."""
    for rank in ranks:
        a, b = rank[one], rank[other]
        assert a.losses == b.losses, one
        assert a.norms == pytest.approx(b.norms, rel=1e-6, nan_ok=True), one
        assert_same(a.weights, b.weights)
    for field in ("masters", "moments"):
        assert_same(together(ranks, one, field), together(ranks, other, field))


MANY_WORDS = gpt_spec(vocab_size=768)
TWO = {
    **{key: c for level in LEVELS for key, c in both(level, case(level, zero=True)).items()},
    **both("ZeRO-2", case("O2", zero=True, num_microbatches=4), frees=True),
    **both("summed in FP8", case("O2", zero=True, storage={"reduction": "auto"})),
    "O3, clip": case("O3", zero=True, clip=0.5),
    "O3, clip and split": by(case("O3", zero=True, clip=0.5), "elements"),
    **both("spoiled", case("O3", zero=True, spoiled=1)),
    **both("masters in FP8", case("O1", zero=True, storage={"main_params": "fp8"})),
    "replicas": case("O2"),
    "dithered, split": by(case("O2", zero=True, storage={"stochastic_rounding": True}), "elements"),
    "balanced, auto": by(case("O2", zero=True), "auto"),
    **both("unbalanced", case("O2", zero=True, model=MANY_WORDS)),
    "unbalanced, auto": by(case("O2", zero=True, model=MANY_WORDS), "auto"),
}
SAVED = ("O2, split", "O3, split")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    root = tmp_path_factory.mktemp("checkpoints")
    return root, run_ranks(train, 2, {"cases": saving(TWO, SAVED, root)})


@pytest.mark.parametrize("name", [name for name in TWO if f"{name}, split" in TWO])
def test_elements_train_as_whole_tensors_bit_for_bit(
    trained: tuple[Path, Found], name: str
) -> None:
    assert_same_whole(trained[1], name, f"{name}, split")


def test_clipping_by_the_norm_of_parts(trained: tuple[Path, Found]) -> None:
    """The norm of 1e-7 moves the factor, and so some of the bits; codes at a tie become others."""
    first, second = trained[1]
    assert first["O3, clip and split"].losses == second["O3, clip and split"].losses
    assert first["O3, clip and split"].losses == pytest.approx(first["O3, clip"].losses, rel=1e-3)
    assert first["O3, clip"].losses[-1] != first["O3"].losses[-1], "clipping does something"


def test_each_rank_has_half_of_the_moments(trained: tuple[Path, Found]) -> None:
    """With a large embedding whole tensors do not balance, and `auto` divides elements. The sum is
    3/8 of FP32's bytes at O2."""
    ranks = trained[1]
    params = sum(t.numel() for t in together(ranks, "unbalanced", "masters").values())
    whole, parts = (
        [rank[name].bytes_of_moments for rank in ranks]
        for name in ("unbalanced", "unbalanced, split")
    )
    assert sum(parts) == sum(whole) == 3 * params
    assert max(parts) <= 1.5 * params * 1.1 < max(whole)
    assert parts == [rank["unbalanced, auto"].bytes_of_moments for rank in ranks]
    balanced = [rank["O2"].bytes_of_moments for rank in ranks]
    assert balanced == [rank["balanced, auto"].bytes_of_moments for rank in ranks]
    assert max(balanced) <= sum(balanced) / 2 * (1 + LARGEST_IMBALANCE)


def test_bytes_of_parts(trained: tuple[Path, Found]) -> None:
    """A byte an element of the linears there and one back, and of every tensor a few amaxes: of its
    gradient, of master and moments, of the FP8 weight."""
    ranks = trained[1]
    masters = together(ranks, "O3, split", "masters")
    linears = sum(t.numel() for n, t in masters.items() if t.dim() == 2 and n.startswith("layers."))
    rest = sum(t.numel() for t in masters.values()) - linears
    sent, params = ranks[0]["O3, split"].traffic, ranks[0]["replicas"].num_owned
    assert sent["dp", "all_to_all", "uint8"] == linears
    assert 2 * sent["dp", "all_gather", "uint8"] == linears, "whole multiples of 128 elements"
    padded = sent["dp", "all_to_all", "float32"] / 4
    assert rest <= padded <= rest + 128 * params
    assert 2 * sent["dp", "all_gather", "bfloat16"] == 2 * padded
    assert sent["dp", "all_reduce_max", "float32"] == 4 * (8 + 3 * params + 8)
    assert not any(operation == "broadcast" for _, operation, _ in sent)


def test_a_skip_is_all_ranks_skip(trained: tuple[Path, Found]) -> None:
    for rank in trained[1]:
        found = rank["spoiled, split"]
        assert math.isnan(found.norms[1]) and math.isfinite(found.norms[2])
        assert found.named is not None and found.named.startswith("gradient of layers.0.")


def test_dithered_parts_agree_on_weights(trained: tuple[Path, Found]) -> None:
    first, second = (rank["dithered, split"] for rank in trained[1])
    assert first.losses == second.losses == pytest.approx(trained[1][0]["O2"].losses, rel=2e-2)
    assert_same(first.weights, second.weights)


def continued(found: Trained, was: Trained, name: str) -> None:
    assert found.losses == was.losses, name
    assert_same(found.weights, was.weights)


def test_checkpoints_of_parts_continue_in_any_layout(trained: tuple[Path, Found]) -> None:
    """Bit for bit on two ranks in every form; on one rank and on three, another microbatch's order
    of sums, the masters as they were."""
    root, before = trained
    paths = {level: path_of(root, f"{level}, split") for level in ("O2", "O3")}
    cases = {}
    for level, path in paths.items():
        cases[f"{level}, same"] = going_on(TWO[f"{level}, split"], path)
        cases[f"{level}, whole"] = going_on(TWO[level], path)
        cases[f"{level}, replicas"] = going_on(case(level), path)
    cases["to tp"] = going_on(case("O2", parallel=replace(SMALL, tp=2)), paths["O2"])
    ranks = run_ranks(train, 2, {"cases": cases})
    for rank, was in zip(ranks, before, strict=True):
        for name, found in rank.items():
            if name != "to tp":
                continued(found, was[f"{name[:2]}, split, continued"], name)
    expected = before[0]["O2, split, continued"].losses
    assert ranks[0]["to tp"].losses == pytest.approx(expected, rel=2e-2)
    ((one,),) = alone(train_case, {"one": going_on(TWO["O3, split"], paths["O3"])}).values()
    assert one.losses == pytest.approx(before[0]["O3, split, continued"].losses, rel=2e-2)


def test_a_run_at_another_level_converts_parts_with_the_scale_of_the_whole(
    trained: tuple[Path, Found],
) -> None:
    """FP32 moments and masters become FP8 and FP16 ones; parts and whole tensors get equal bits."""
    root, _ = trained
    plain = replace(case("O1", zero=True), optim=replace(TWO["O1"].optim, shard_by="elements"))
    run_ranks(train, 2, {"cases": saving({"O1": plain}, {"O1"}, root / "more")})
    path = path_of(root / "more", "O1")
    cases = {"whole": going_on(TWO["O2"], path), "split": going_on(TWO["O2, split"], path)}
    assert_same_whole(run_ranks(train, 2, {"cases": cases}), "whole", "split")


FORMATS: list[tuple[StorageName, StorageName, StorageName]] = [
    ("fp16", "fp8", "fp16"),
    ("fp16", "fp32", "fp32"),
    ("fp32", "fp8_e5m2", "bf16"),
]


@pytest.mark.parametrize("names", FORMATS)
@pytest.mark.parametrize("in_c", [True, False])
def test_two_parts_are_updated_as_the_whole(
    names: tuple[StorageName, StorageName, StorageName],
    in_c: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the maximum of the parts' amaxes; with a part's own one the bits are others."""
    if not in_c:
        monkeypatch.setattr(scaled_adam, "_split_kernel_reproduces_torch", lambda: False)
    else:
        need_kernels()
        assert scaled_adam._split_kernel_reproduces_torch()
    start = torch.linspace(0, 1, 5003) ** 3
    cut, constants = 3001, Constants(0.01, (0.9, 0.98), 1e-8, 0.1, False, 1)

    def made() -> Tensors:
        formats = [STORAGE_FORMATS[name] for name in names]
        tensors = [
            ScaledTensor.of(values, fmt)
            for values, fmt in zip(
                (start, 0.1 * start.square(), 0.01 * start.square()), formats, strict=True
            )
        ]
        return Tensors(*tensors, ScaledTensor.of(0.3 * start.square(), STORAGE_FORMATS["fp8"]))

    def parts_of(tensors: Tensors) -> list[Tensors]:
        four = (tensors.param, tensors.exp_avg, tensors.exp_avg_sq, tensors.grad)
        return [
            Tensors(*(ScaledTensor(t.payload[at], t.dequant_scale.clone(), t.fmt) for t in four))
            for at in (slice(0, cut), slice(cut, None))
        ]

    def updated(*, shared: bool) -> list[torch.Tensor]:
        parts = parts_of(made())
        amaxes = torch.zeros(2, 3)
        for part, own in zip(parts, amaxes, strict=True):
            before = [t.payload.clone() for t in part.written]
            fresh_amaxes(part, constants, own)
            assert all(
                torch.equal(b.float(), t.payload.float())
                for b, t in zip(before, part.written, strict=True)
            )
        for part, own in zip(parts, amaxes, strict=True):
            update_part(part, constants, (amaxes.amax(0) if shared else own).clone())
        pairs = zip(*(part.written for part in parts), strict=True)
        return [torch.cat([a.values(), b.values()]) for a, b in pairs]

    whole = made()
    update(whole, constants)
    expected = [stored.values() for stored in whole.written]
    found = updated(shared=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    if names == FORMATS[0]:
        alone = updated(shared=False)
        assert not all(torch.equal(a, b) for a, b in zip(expected, alone, strict=True))


def test_whole_tensors_balance_7b_on_2_ranks_and_not_125m_on_8() -> None:
    """`auto` reads how much more the fullest rank has: 125M's embedding alone is more than a share
    of 8 ranks."""
    for width, layers, ranks, imbalance in ((768, 12, 8, 2.175), (4096, 32, 2, 0.03)):
        held = [0] * ranks
        owners_of([k * width**2 for _ in range(layers) for k in (3, 1, 4, 4)], held)
        owners_of([51200 * width, 2048 * width], held)
        assert imbalance_of(held) == pytest.approx(imbalance, rel=0.05)
        assert (imbalance_of(held) > LARGEST_IMBALANCE) == (ranks == 8)


@pytest.mark.parametrize("in_c", [True, False])
def test_the_start_names_what_updates_parts(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C kernel for whole tensors says nothing of the one for parts."""
    monkeypatch.setattr(scaled_adam, "_kernel_reproduces_torch", lambda: True)
    monkeypatch.setattr(scaled_adam, "_split_kernel_reproduces_torch", lambda: in_c)
    alone = by(case("O2", zero=True, parallel=ParallelSpec()), "elements").build(single_rank())
    name = "our C kernel over stored" if in_c else "torch operations over parts of stored"
    assert alone.optimizer.describe().startswith(f"{name} tensors")


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # torch 2.13's new names
def test_all_stages_decide_alike_in_a_dry_run_too() -> None:
    """The first and the last of three stages have an embedding that whole tensors cannot balance,
    and the one between them has two equal layers."""
    model = gpt_spec(num_layers=4, vocab_size=768)
    layout = replace(SMALL, pp=3, pipeline=replace(PP, layout=(1, 2, 1)), devices_per_node=6)
    like = by(case("O2", zero=True), "auto")
    spec = run_spec(
        compute=like.compute, fp8=like.fp8, model=model, parallel=layout, optim=like.optim
    )
    is_unequal = []
    for stage in range(3):
        params = rank_shape(spec, stage).params
        held = [0, 0]
        owners = division_of(spec, params, "tensors").owners
        for param, owner in zip(params, owners, strict=True):
            held[owner] += param.elements
        is_unequal.append(imbalance_of(held) > LARGEST_IMBALANCE)
        with simulated(spec, 2 * stage) as state:
            assert state.masters.partition.divides, stage
    assert is_unequal == [True, False, True]


PP_TIED = {"model": DEEP, "parallel": replace(SMALL, pp=2, pipeline=PP)}
FOUR: dict[str, Case] = {
    **both("dp", case("O2", zero=True, num_microbatches=4)),
    **both("tp x dp", case("O2", zero=True, num_microbatches=4, parallel=replace(SMALL, tp=2))),
    **both("tp x dp, sequence", case("O3", zero=True, num_microbatches=4, parallel=SP)),
    **both("pp x dp, tied", case("O2", zero=True, num_microbatches=4, **PP_TIED), frees=True),
}


@pytest.mark.slow
def test_elements_in_all_layouts_of_four_ranks(trained: tuple[Path, Found]) -> None:
    """A checkpoint of two ranks is read by four, too."""
    path = path_of(trained[0], "O2, split")
    loads = {"of two": FOUR["dp, split"], "of two, whole": FOUR["dp"]}
    cases = FOUR | {name: going_on(like, path) for name, like in loads.items()}
    ranks = run_ranks(train, 4, {"cases": cases})
    for name in FOUR:
        if f"{name}, split" in FOUR:
            assert_same_whole(ranks, name, f"{name}, split")
    assert_same_whole(ranks, "of two", "of two, whole")
