"""A converted model under DDP and FSDP2, on two gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fp8 import rank_work
from tests.fp8.models import mlp
from tests.fp8.rank_work import batch
from tests.ranks import run_ranks

OWN = Path(__file__).parents[1] / "own_recipes"


def trained(wrapper: str, reduce: bool) -> list[dict]:
    return run_ranks(rank_work.train, 2, {"wrapper": wrapper, "reduce": reduce})


def test_replicas_share_weights_and_with_a_group_their_scales() -> None:
    one, other = trained("ddp", True)
    assert one["scales"] == other["scales"]
    # The first update saw the amaxes of both halves of the batch.
    amax = batch(0).abs().max()
    assert one["first"]["0.input"] == torch.div(torch.tensor(448.0), amax).item()
    assert one["losses"] != other["losses"]
    for ours, theirs in zip(one["parameters"], other["parameters"], strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(one["parameters"][0], mlp()[0].weight)


def test_a_rank_outside_of_the_group_is_refused() -> None:
    """torch would warn and reduce nothing, so that this rank would keep scales of its own."""
    inside, outside = run_ranks(rank_work.convert_in_a_group_of_one, 2, {})
    assert inside is None
    assert outside.startswith("amax_group: ") and "member of" in outside


@pytest.mark.slow
def test_sharded_weights_train_as_replicas_do() -> None:
    for result, expected in zip(trained("fsdp2", True), trained("ddp", True), strict=True):
        # Updates differ by a rounding, after which codes at a tie may be others.
        assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert result["scales"] == pytest.approx(expected["scales"], rel=2.0**-3)


@pytest.mark.slow
def test_without_a_group_each_rank_has_its_own_scales() -> None:
    one, other = trained("ddp", False)
    assert one["scales"]["0.weight"] == other["scales"]["0.weight"]
    assert one["scales"]["0.input"] != other["scales"]["0.input"]
    for ours, theirs in zip(one["parameters"], other["parameters"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("recipe", ["as_built_in.py:Tensorwise", "four_bits.py"])
def test_a_rank_without_elements_agrees_with_the_others(recipe: str, along: int) -> None:
    """Its rule asks for the same maxima; otherwise the first rank would wait for ever."""
    given = {"recipe": str(OWN / recipe), "along": along}
    one, other = run_ranks(rank_work.quantize_a_part, 2, given)
    assert one == other
