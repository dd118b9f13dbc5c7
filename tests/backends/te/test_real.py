"""Transformer Engine's own Python in processes of its own: `real_*.py` under pytest, and ranks.

Its sources are fetched where they are missing. In CI, missing sources are a failure; elsewhere the
tests are skipped with the command that fetches them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.backends.te import rank_documents, rank_work
from tests.backends.te.rank_work import Found
from tests.backends.te.same_codes import IN_FP32, OF_A_FLIP, OF_A_FLIP_IN_FP4, Bounds
from tests.ranks import run_ranks
from tests.spec import nvfp4
from tests.te_sources import need_sources

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent.relative_to(ROOT)
NVFP4 = "real_nvfp4.py"  # for the versions that have it: from 2.8 on
SCALED_ROWS = "real_scaled_rows.py"  # from 2.17 on
FILES = [path.name for path in sorted(Path(__file__).parent.glob("real_*.py"))]
BEFORE_2_17 = [name for name in FILES if name != SCALED_ROWS]


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (DEFAULT_VERSION, BEFORE_2_17),
        pytest.param(
            "2.4.0", [name for name in BEFORE_2_17 if name != NVFP4], marks=pytest.mark.slow
        ),
        pytest.param("2.8.0", [NVFP4], marks=pytest.mark.slow),
        ("2.17.1", ["real_grouped.py", SCALED_ROWS]),
        pytest.param("2.20.2", FILES, marks=pytest.mark.slow),
    ],
    ids=[DEFAULT_VERSION, "2.4.0", "2.8.0", "2.17.1", "2.20.2"],
)
def test_in_its_own_process(version: str, files: list[str]) -> None:
    """All files of a version in one process, since each would import torch and the version again.

    Warnings are errors there as here, and no test is skipped for another reason than that the
    version lacks what it tests. For scales of NVFP4, 2.20 has another rule than 2.8 and 2.12.
    """
    need_sources(version)
    environment = os.environ | {"MEGAFP8_TESTED_TE": version, "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]  # this is no worker of the outer session
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(FOLDER / name) for name in files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert version != DEFAULT_VERSION or " skipped" not in done.stdout


@pytest.mark.parametrize("tp", [2, 1], ids=["tensor parallel", "replicas"])
def test_two_ranks_train_as_ours_do(tp: int) -> None:
    """FP8 in FP32 over gloo. Delayed scaling, tensor-parallel with and without sequence parallelism
    and as replicas: losses, norms, the first step's scales and histories and the FLOPs that each
    rank has counted are our engine's, with the same codes but for sequence parallelism, where
    Transformer Engine casts other parts. Amaxes are reduced once a direction and microbatch, and
    not at all with `tp_only_amax_red` and one tensor-parallel rank. With `tensorwise`, where
    Transformer Engine leaves each tensor-parallel rank its own amax and ours share one, losses
    differ by less than 1e-3."""
    need_sources(DEFAULT_VERSION)
    ranks = run_ranks(rank_work.train, 2, {"tp": tp, "steps": 2})
    if tp == 1:
        one, other = (by_run["own amaxes"]["te"].tables for by_run in ranks)
        assert not any(torch.equal(one[name], other[name]) for name in one if "history" in name)
    for by_run in ranks:
        tensorwise = by_run.pop("tensorwise", None)
        assert len(by_run) == 2
        for run, found in by_run.items():
            theirs, ours = found["te"], found["native"]
            bounds = OF_A_FLIP if run == "sequence parallel" else IN_FP32
            assert_near(theirs.results, ours.results, bounds, run)
            assert theirs.flops == ours.flops
            assert theirs.maxima == ([] if run == "own amaxes" else [2] * 4)
            assert theirs.tables.keys() == ours.tables.keys()
            for name, table in theirs.tables.items():
                torch.testing.assert_close(
                    table, ours.tables[name], rtol=bounds.tables, atol=1e-30, msg=name
                )
        if tensorwise is not None:
            of_both = (tensorwise[each].results[:1] for each in ("te", "native"))
            assert_near(*of_both, Bounds(1e-3, 1e-2, 0.0), "tensorwise")
    for name, found in ranks[0].items():
        assert found["te"].results == ranks[1][name]["te"].results


def assert_layout_is_right(found: dict[str, Found], group: int, updates: int) -> None:
    """Two steps of a layout: losses, norms, scales and histories as Transformer Engine's in one
    process; the FLOPs that our engine counts in the same layout; the number of MAX over ranks, and
    over how many."""
    theirs, ours, alone = found["te"], found["native"], found["one process"]
    assert theirs.results[0] == pytest.approx(alone.results[0], rel=1e-6)
    assert theirs.results[1] == pytest.approx(alone.results[1], rel=1e-4)
    assert theirs.flops == ours.flops
    assert theirs.maxima == ([group] * updates if group > 1 else [])
    assert theirs.rows.keys() == ours.rows.keys() and theirs.rows
    for name, row in theirs.rows.items():
        torch.testing.assert_close(row, alone.rows[name], rtol=1e-4, atol=1e-9, msg=name)


def assert_losses_are_near(found: dict[str, Found]) -> None:
    """Those of our engine, where roundings to FP8 may fall the other way."""
    for one, other in zip(found["te"].results, found["native"].results, strict=True):
        assert one == pytest.approx(other, rel=5e-3)


def test_two_pipeline_stages_train_as_ours_do() -> None:
    """GPipe, 1F1B and interleaved stages, with recomputation, dropout and rotary positions in the
    last: one region a microbatch and stage, amaxes never leave a stage."""
    need_sources(DEFAULT_VERSION)
    ranks = run_ranks(rank_work.pipelines, 2, {"steps": 2})
    for by_run in ranks:
        for name, found in by_run.items():
            assert_layout_is_right(found, 1, 0)
            if name != "interleaved":  # there, dropout draws other numbers in the two engines
                assert_losses_are_near(found)
    for name, found in ranks[0].items():
        assert found["te"].results == ranks[1][name]["te"].results
        stages = [set(rank[name]["te"].rows) for rank in ranks]
        assert not stages[0] & stages[1] and stages[0] | stages[1] == set(found["one process"].rows)


def test_layouts_of_mxfp8() -> None:
    """Tensor, sequence and pipeline parallelism, replicas, ZeRO-1 and FSDP. Sequence parallelism
    gathers bytes and scales of rows and of columns. Where every rank has whole blocks, steps are
    those of one process and of our engine, but for codes at a tie."""
    need_sources(DEFAULT_VERSION)
    ranks = run_ranks(rank_work.mxfp8, 2, {"steps": 2})
    assert list(ranks[0]) == ["tensor", "sequence", "pipeline", "replicas", "ZeRO-1", "FSDP"]
    for by_layout in ranks:
        for layout, found in by_layout.items():
            for run in ("native", "one process"):
                assert_near(found["te"], found[run], OF_A_FLIP, (layout, run))
    assert {name: found["te"] for name, found in ranks[0].items()} == {
        name: found["te"] for name, found in ranks[1].items()
    }


@pytest.mark.parametrize(
    "layouts",
    [
        ["tensor", "sequence"],
        pytest.param(["pipeline", "replicas", "FSDP"], marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_layouts_of_documents(layouts: list[str]) -> None:
    """Documents that do not see each other, with rotary positions and grouped queries: in FP32 two
    steps are those of one process and of our engine; in FP8 a rounding may fall the other way. With
    sequence parallelism a microbatch is one sample, whose tokens the ranks hold in turn."""
    need_sources(DEFAULT_VERSION)
    given = {"steps": 2, "layouts": layouts}
    ranks = run_ranks(rank_documents.documents, 2, given)
    assert len(ranks[0]) == 2 * len(layouts)
    for (precision, layout), found in ranks[0].items():
        assert found["te"] == ranks[1][precision, layout]["te"]
        rel = 1e-5 if precision == "FP32" else 1e-2
        for run in ("native", "one process"):
            for mine, other in zip(found["te"], found[run], strict=True):
                assert mine == pytest.approx(other, rel=rel), (precision, layout, run)


def assert_near(
    found: list[tuple[float, float]], wanted: list[tuple[float, float]], bounds: Bounds, where: Any
) -> None:
    """Losses and norms of all steps."""
    for (loss, norm), (other, other_norm) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(other, rel=bounds.losses), where
        assert norm == pytest.approx(other_norm, rel=bounds.norms), where


def quantized(matrix: torch.Tensor, *, turned: bool = False, rows: int = 1) -> np.ndarray:
    """The values of rows, or of rotated columns as rows, by the rule of the default version."""
    x = matrix.float().numpy()
    if turned:
        turned_x = torch.from_numpy(nvfp4.rotate(np.ascontiguousarray(x.T))).float()
        x = turned_x.bfloat16().float().numpy()
    return nvfp4.quantize_blocks(x, rows, sixth_first=True).values


def test_gathered_fp4_is_that_of_the_whole_tensor() -> None:
    """With sequence parallelism a column-parallel linear gathers its input, and a row-parallel one
    its output gradient, as rows and as rotated columns by the largest amax of the ranks. What
    other ranks do not see has this rank's own amax. The bound is that of sums in FP32, of the four
    roundings of the factor, and of the one to BF16."""
    need_sources(DEFAULT_VERSION)
    ranks = run_ranks(rank_work.nvfp4_linears, 2, {})
    for kind in ("column", "row"):
        inputs, grads = (torch.cat([rank[kind]["given"][at] for rank in ranks]) for at in (0, 1))
        for rank in ranks:
            own_input, own_grad, weight = rank[kind]["given"]
            out, grad_input, grad_weight = rank[kind]["made"]
            squares = quantized(weight, rows=16)
            if kind == "column":
                cases = [(out, quantized(inputs), squares)]
                x, grad = inputs, own_grad
            else:
                cases = [(grad_input, quantized(grads), np.ascontiguousarray(squares.T))]
                x, grad = own_input, grads
            cases += [(grad_weight, quantized(grad, turned=True), quantized(x, turned=True))]
            for found, left, right in cases:
                exact = left @ right.T
                bound = (left.shape[1] + 4) * 2.0**-24 * (np.abs(left) @ np.abs(right.T))
                bound += 2.0**-8 * np.abs(exact)
                assert (np.abs(found.double().numpy() - exact) <= bound).all(), kind


def test_layouts_of_nvfp4() -> None:
    """In FP32 without the rotation every layout but tensor parallelism is one process, and our
    engine, but for codes at a tie. Tensor-parallel ranks have amaxes of their own in Transformer
    Engine, where ours agree, and there the products of both are in BF16."""
    need_sources(DEFAULT_VERSION)
    ranks = run_ranks(rank_work.nvfp4, 2, {"steps": 1})
    for by_layout in ranks:
        for layout, found in by_layout.items():
            for run in ("native", "one process"):
                assert_near(found["te"], found[run], OF_A_FLIP_IN_FP4, (layout, run))
    assert {name: found["te"] for name, found in ranks[0].items()} == {
        name: found["te"] for name, found in ranks[1].items()
    }


@pytest.mark.slow
def test_all_kinds_of_parallelism_together() -> None:
    """Tensor, sequence, pipeline and data parallelism over 8 ranks, with FP8, recomputation, rotary
    positions and grouped queries: one MAX a direction and microbatch over the stage's 4 ranks."""
    need_sources(DEFAULT_VERSION)
    given = {"steps": 2, "tp": 2, "pp": 2, "sequence_parallel": True}
    for found in run_ranks(rank_work.together, 8, given):
        assert_layout_is_right(found["fp32"], 4, 8)
        assert_losses_are_near(found["fp32"])


def test_zero_is_the_replicated_optimizer() -> None:
    """FP8 on two replicas, with weights in BF16 and in FP8 alone by each recipe: weights, scales
    and histories of three steps bit for bit; the norm is summed in another order."""
    need_sources(DEFAULT_VERSION)
    for by_run in run_ranks(rank_work.zero, 2, {"steps": 3}):
        assert list(by_run) == ["bf16", "delayed", "tensorwise", "blockwise"]
        for run, found in by_run.items():
            (results, state), (sharded_results, sharded) = found.values()
            assert [loss for loss, _ in results] == [loss for loss, _ in sharded_results], run
            for (_, norm), (_, other) in zip(results, sharded_results, strict=True):
                assert norm == pytest.approx(other, rel=1e-6)
            assert state.keys() == sharded.keys()
            for name, tensor in state.items():
                assert torch.equal(tensor, sharded[name]), (run, name)


def test_fsdp_is_replicas() -> None:
    """Weights that are gathered for each microbatch, by both strategies, beside replicas: the first
    step's loss has the same bits; `full` recomputes layers too. Weights kept in FP8 alone cross
    ranks as bytes, also where no layer is recomputed. Updates differ by a rounding of gradients, so
    that codes at a tie become others: losses, norms and scales of three steps are near."""
    need_sources(DEFAULT_VERSION)
    for found in run_ranks(rank_work.fsdp, 2, {"steps": 3}):
        sharded = [name for name in found if not name.startswith("replicas")]
        assert len(sharded) == 7
        for name in sharded:
            (results, tables), (wanted, state) = found[name], found[f"replicas {name.split()[-1]}"]
            assert results[0][0] == wanted[0][0], name
            assert_near(results, wanted, Bounds(1e-3, 2e-2, 0.0), name)
            for key, tensor in tables.items():
                torch.testing.assert_close(tensor, state[key], rtol=2.0**-2, atol=1e-6)


@pytest.mark.parametrize(
    ("version", "casts"), [(DEFAULT_VERSION, 1), pytest.param("2.20.2", 2, marks=pytest.mark.slow)]
)
def test_gathered_weights_are_cast_as_often_as_is_counted(version: str, casts: int) -> None:
    """2.20 casts a weight that FSDP gathers in every microbatch, with the scale of that moment, and
    2.12 once a step as with replicas. So the first loss is that of replicas, bit for bit, with one
    microbatch a step in both versions, and with two in 2.12 up to FP32's rounding alone."""
    need_sources(version)
    for found in run_ranks(rank_work.casts, 2, {"version": version}):
        assert found["FSDP, 1"] == found["replicas, 1"]
        (loss, *counted), (wanted, *of_replicas) = found["FSDP, 2"], found["replicas, 2"]
        assert counted == [casts, casts] and of_replicas == [1, 1]
        assert (loss == pytest.approx(wanted, rel=1e-6)) is (casts == 1)


def test_a_run_continues_in_every_other_layout(tmp_path: Path) -> None:
    """Two pipeline stages save after two steps; tensor parallelism, ZeRO-1, FSDP and stages again
    each load what the last one has saved: the same scales and histories all the way, and the next
    step is that of the run that went on."""
    need_sources(DEFAULT_VERSION)
    work = rank_work.continued
    for loss, found in run_ranks(work, 2, {"root": str(tmp_path)}):
        assert len(found) == 5
        for name, (rows, wanted, next_loss) in found.items():
            assert rows.keys() <= wanted.keys() and rows, name
            for key, row in rows.items():
                assert torch.equal(row, wanted[key]), (name, key)
            assert next_loss == pytest.approx(loss, rel=1e-3), name
        assert found["pp again"][2] == loss


def test_without_sources_a_run_ends_with_the_command(tmp_path: Path) -> None:
    """No cache and no index: one error, exit code 2, and no traceback."""
    environment = os.environ | {
        "MEGAFP8_TE_SOURCES": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }
    command = [sys.executable, "pretrain_gpt.py", "model.fp8=True", "model.fp8_backend=te"]
    command += ["model.openai_gelu=True", "trainer.accelerator=cpu"]
    command += [f"exp_manager.explicit_log_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"pip download --no-deps -d {tmp_path / 'cache' / DEFAULT_VERSION}" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [["model.tensor_model_parallel_size=2", "model.sequence_parallel=True"],
     ["model.pipeline_model_parallel_size=2"],
     ["model.optim.name=distributed_fused_adam"]],
    ids=["tp 2", "pp 2", "ZeRO-1"],
)  # fmt: skip
def test_two_ranks_continue_around_changes_of_precision(tmp_path: Path, layout: list[str]) -> None:
    need_sources(DEFAULT_VERSION)
    schedule = (
        "model.precision_schedule=[{from: 0, recipe: bf16}, {from: 1, recipe: tensorwise}, "
        "{from: 3, recipe: mxfp8}, {from: 5, recipe: bf16}]"
    )
    settings = ["model.fp8_backend=te", "model.fp8_recipe=tensorwise", schedule, *layout]
    arguments = {"settings": settings, "root": str(tmp_path)}
    for found in run_ranks(rank_work.continue_around_changes, 2, arguments):
        assert {what: names for what, names in found.items() if names} == {}
