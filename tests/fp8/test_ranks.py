"""A converted model under DDP and FSDP2, on two gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafp8.fp8 import rows
from tests.fp8 import rank_work
from tests.fp8.models import mlp
from tests.fp8.rank_work import batch
from tests.kit.runs import on_mesh
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


def test_a_group_whose_ranks_convert_other_linears_is_refused() -> None:
    """Their tables would be reduced by place, and row 2 is another tensor on each rank."""
    said = set(run_ranks(rank_work.convert_other_linears, 2, {}))
    assert len(said) == 1, "all ranks refuse it, with the same words"
    (text,) = said
    assert text.startswith("amax_group: would mix the amaxes of different tensors: ")
    assert "row 2 of the forward scales is 2.input on rank 0 and missing on rank 1" in text


RENAMED = {
    "forward": ("layers.1.mlp.fc2.weight", "layers.1.mlp.fc9.weight"),
    "backward": ("layers.0.attention.qkv.grad_output", "layers.0.attention.query.grad_output"),
    "missing": ("layers.1.mlp.fc2.grad_output", ""),
    "turned": ("layers.0.mlp.fc1.input", "layers.0.mlp.fc1.weight"),
}
FOUND = {
    "forward": "row 15 of the forward scales is layers.1.mlp.fc2.weight on rank 0 and "
    "layers.1.mlp.fc9.weight on rank 1",
    "backward": "row 0 of the backward scales is layers.0.attention.qkv.grad_output on rank 0 and "
    "layers.0.attention.query.grad_output on rank 1",
    "missing": "row 7 of the backward scales is layers.1.mlp.fc2.grad_output on rank 0 and missing "
    "on rank 1",
    "turned": "row 4 of the forward scales is layers.0.mlp.fc1.input on rank 0 and "
    "layers.0.mlp.fc1.weight on rank 1",
}


def test_ranks_whose_scales_have_other_rows_do_not_train() -> None:
    """They agree when a run begins and when it changes its recipe, and send no names in a step."""
    for refused in on_mesh(rank_work.build_with_other_rows, 2, renamed=RENAMED):
        for label, texts in refused.items():
            for text in texts:
                assert FOUND[label] in text, label
        assert refused.keys() == FOUND.keys()


def test_a_message_names_eight_ranks_that_differ_and_counts_the_others() -> None:
    row, ranks = (*"abaaaaaaaaa", None), list(range(2, 14))
    assert rows._ranks(row, "b", ranks) == "rank 3"
    assert rows._ranks(row, "a", ranks) == "ranks 2, 4, 5, 6, 7, 8, 9, 10, 2 more"


def test_a_row_has_the_amax_of_the_rank_that_casts_its_tensor() -> None:
    """As experts will: a rank has rows for the tensors of others, and the maximum is their own."""
    for difference, histories, of_nobody in on_mesh(rank_work.share_rows, 2):
        assert difference is None
        assert histories == {"forward": [1.0, 2.0], "backward": [1.0, 2.0]}
        assert of_nobody == "row 2 of the backward scales is expert 9, which no rank casts"


@pytest.mark.slow
def test_sharded_weights_train_as_replicas_do() -> None:
    for result, expected in zip(trained("fsdp2", True), trained("ddp", True), strict=True):
        # Updates differ by a rounding, after which codes at a tie may be others.
        assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert result["scales"] == pytest.approx(expected["scales"], rel=2.0**-3)


def test_fsdp1_has_the_bits_of_gradients_that_are_averaged_by_hand() -> None:
    for (by_hand, *ways), said in run_ranks(rank_work.train_by_fsdp1, 2):
        for losses, parameters, scales in ways:
            assert losses == by_hand[0] and torch.equal(parameters, by_hand[1])
            assert all(torch.equal(scales[key], saved) for key, saved in by_hand[2].items())
        of_view, of_part = said
        assert "no parameter but a Tensor. Make it an nn.Parameter, or convert before" in of_view
        assert "its weight has 1 dims" in of_part and "Convert before the model is" in of_part


@pytest.mark.slow
def test_sharded_experts_train_as_replicas_do() -> None:
    """Their fused parameters are gathered, and both passes of an expert's linear read a slice."""
    given = {"reduce": True, "experts": True}
    sharded, replicas = (
        run_ranks(rank_work.train, 2, given | {"wrapper": wrapper}) for wrapper in ("fsdp2", "ddp")
    )
    for result, expected in zip(sharded, replicas, strict=True):
        assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert result["scales"].keys() == expected["scales"].keys()
        assert sum("experts" in name for name in result["scales"]) == 3 * 2 * 4 * 2
        for one, other in zip(result["parameters"], expected["parameters"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


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
