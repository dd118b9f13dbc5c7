"""The matrix has a row for each pair of recipe and layout that a job may have, and for no other."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megafp8.config.checks import check_values
from megafp8.config.load import load
from megafp8.config.rules import Finding
from megafp8.specs.recipes import RECIPES, load_recipe
from tests.parallel import matrix
from tests.ranks import ROOT
from tests.tiny import SEQ

RECIPE_OF = {
    name: recipe.name
    for name, (_, recipe) in matrix.PRECISIONS.items()
    if recipe is not None and name not in (*matrix.IN_TE, *matrix.LEVELS)
}
SIMULATED = str(ROOT / "tests" / "own_recipes" / "simulated_int8.py")


@cache
def default_values() -> dict[str, Any]:
    return load()


def findings(layout: str, recipe: str, batch: int, length: int, **others: Any) -> list[Finding]:
    """What refuses a job with the layout, the tokens and the recipe of a row."""
    size, spec = matrix.LAYOUTS[layout]
    pipeline = spec.pipeline
    changes = {
        "trainer.devices": size,
        "model.tensor_model_parallel_size": spec.tp,
        "model.context_parallel_size": spec.cp,
        "model.pipeline_model_parallel_size": spec.pp,
        "model.sequence_parallel": spec.sequence_parallel,
        "model.fsdp": spec.fsdp is not None,
        "model.data.reset_attention_mask": matrix.kind_of(layout) == matrix.PACKED,
        "model.num_layers": 4,
        "model.hidden_size": 512,
        "model.ffn_hidden_size": 512,
        "model.encoder_seq_length": length,
        "model.data.seq_length": length,
        "model.max_position_embeddings": length,
        "model.micro_batch_size": batch,
        "model.global_batch_size": batch * matrix.MICROBATCHES,
        "model.fp8": True,
        "model.fp8_recipe": recipe,
    }
    if spec.pp > 1 and pipeline.schedule != "1F1B":
        changes["model.pipeline_schedule"] = pipeline.schedule
        changes["model.virtual_pipeline_model_parallel_size"] = pipeline.stages_per_rank
    if spec.fsdp is not None and spec.fsdp.strategy != "full":
        changes["model.fsdp_sharding_strategy"] = spec.fsdp.strategy
    if "ZeRO-1" in layout:
        changes["model.optim.name"] = "distributed_fused_adam"
    return list(check_values(default_values() | changes | others))


def test_every_recipe_has_rows() -> None:
    assert sorted(RECIPE_OF.values()) == sorted(RECIPES)


@pytest.mark.parametrize("precision", RECIPE_OF)
def test_a_pair_has_a_row_where_it_is_not_refused(precision: str) -> None:
    """A refusal names a size that cuts the blocks of a rank's tokens, and nothing else."""
    batch, length = matrix.BATCHES.get(precision, 2), SEQ
    if precision not in matrix.BATCHES:  # the matrix has fewer tokens than tensor cores take
        length = 4 * SEQ
    for layout in matrix.LAYOUTS:
        found = findings(layout, RECIPE_OF[precision], batch, length)
        assert bool(found) == (precision not in matrix.precisions_of(layout)), (layout, found)
        for finding in found:
            assert finding.key in ("model.sequence_parallel", "model.context_parallel_size")
            assert "tokens of a microbatch" in finding.reason and finding.hint


@pytest.mark.parametrize("precision", matrix.LEVELS)
def test_levels_have_rows_under_fsdp_where_they_are_not_refused(precision: str) -> None:
    recipe, level = matrix.PRECISIONS[precision][1], matrix.LEVELS[precision]
    assert recipe is not None
    layouts = [name for name in matrix.LAYOUTS if precision in matrix.precisions_of(name)]
    assert len(layouts) > 5 and all(matrix.LAYOUTS[name][1].fsdp is not None for name in layouts)
    for layout in layouts:
        chosen = {"model.optim.fp8_opt_level": level}
        assert not findings(layout, recipe.name, 2, 4 * SEQ, **chosen), layout


@pytest.mark.parametrize("precision", matrix.IN_TE)
def test_transformer_engine_has_a_row_where_it_is_not_refused(precision: str) -> None:
    """A refusal names what Transformer Engine's layers cannot do, in a wider model than the rows'.

    Documents with sequence parallelism run in microbatches of one sample.
    """
    recipe = RECIPE_OF[matrix.IN_TE[precision]]
    for layout in matrix.LAYOUTS:
        te = {"model.fp8_backend": "te", "model.transformer_engine": True}
        found = findings(layout, recipe, 4, 4 * SEQ, **te)
        assert bool(found) == (layout in matrix.NOT_IN_TE), (layout, found)
        assert all(finding.reason and finding.hint for finding in found)


def test_every_row_of_the_page_is_a_pair_and_holds() -> None:
    """Every recipe has rows, and each row is of a layout that runs and within its bound."""
    rows = matrix.rows_of(matrix.PAGE)
    assert {row[1] for row in rows} == matrix.PRECISIONS.keys()
    assert all(row[1] in matrix.precisions_of(row[0]) for row in rows)
    for row in rows:
        losses, bound = float(row[4]), float(row[5])
        assert row[6] == "yes" and losses <= bound, row


def test_parts_that_do_not_join_are_refused_by_name() -> None:
    load_recipe(SIMULATED)
    for layout, (_, spec) in matrix.LAYOUTS.items():
        keys = [finding.key for finding in findings(layout, SIMULATED, 2, 4 * SEQ)]
        assert keys == ["model.sequence_parallel"] * spec.sequence_parallel, layout


def test_every_pair_was_measured_and_holds() -> None:
    assert matrix.missing(matrix.PAGE) == {}
    assert {row[-1] for row in matrix.rows_of(matrix.PAGE)} == {"yes"}
