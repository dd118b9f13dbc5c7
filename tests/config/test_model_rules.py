"""Test rules about the model's shape: what they refuse, under which key, and with which hint."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.config.architecture import spec_of_tree, tree_of_spec
from megafp8.config.checks import rule_findings
from megafp8.specs.model import RecomputeSpec
from tests.config.helpers import load_problems, run_spec, the_problem

ROPE = "model.position_embedding_type=rope"
GRANULARITY = "model.activations_checkpoint_granularity"
METHOD = "model.activations_checkpoint_method"
LAYERS = "model.activations_checkpoint_num_layers"


@pytest.mark.parametrize(
    ("overrides", "key", "offer"),
    [
        (["model.num_query_groups=3"], "model.num_query_groups", "Nearest values: 2 or 4"),
        (
            ["model.num_query_groups=1", "trainer.devices=2", "model.tensor_model_parallel_size=2"],
            "model.num_query_groups",
            "Nearest values: 2; or tensor-parallel sizes: 1",
        ),
        (["model.hidden_size=255"], "model.hidden_size", "Nearest hidden sizes: 252 or 256"),
        (
            ["model.fp8=True", "model.num_attention_heads=32", "model.num_query_groups=4",
             "model.kv_channels=5"],
            "model.kv_channels", "Nearest values: 4 or 6",
        ),
        (
            ["model.fp8=True", "model.num_attention_heads=64", "model.num_query_groups=1"],
            "model.num_query_groups", "Nearest values: 2",
        ),
        (["model.rotary_percentage=0.5"], "model.rotary_percentage", "=rope, or leave it out"),
        (["model.rotary_base=5e5"], "model.rotary_base", "=rope, or leave it out"),
        (
            ["model.seq_len_interpolation_factor=2"],
            "model.seq_len_interpolation_factor",
            "=rope, or leave it out",
        ),
        (
            [ROPE, "model.kv_channels=16", "model.rotary_percentage=0.2"],
            "model.rotary_percentage", "Nearest values: 0.125 or 0.25",
        ),
        (
            ["model.openai_gelu=True", "model.activation=swiglu"],
            "model.openai_gelu",
            "Set model.activation=gelu",
        ),
        ([f"{METHOD}=uniform"], METHOD, "granularity=selective or full"),
        ([f"{LAYERS}=1"], LAYERS, "granularity=selective or full"),
        ([f"{GRANULARITY}=full"], METHOD, "Give uniform"),
        ([f"{GRANULARITY}=full", f"{METHOD}=block"], LAYERS, "Give from 1 to 4"),
        ([f"{GRANULARITY}=full", f"{METHOD}=block", f"{LAYERS}=5"], LAYERS, "Give from 1 to 4"),
        ([f"{GRANULARITY}=selective", f"{LAYERS}=2"], LAYERS, "method=block"),
        (["model.normalization=groupnorm"], "model.normalization", "The default is layernorm"),
        (["model.transformer_block_type=normformer"], "model.transformer_block_type", "post_ln"),
        (["model.position_embedding_type=kerple"], "model.position_embedding_type", "rope"),
        (["model.activation=mish"], "model.activation", "default is gelu"),
    ],
)  # fmt: skip
def test_refused(overrides: list[str], key: str, offer: str) -> None:
    problem = the_problem(*overrides)
    assert problem.key == key and offer in problem.hint


@settings(max_examples=200, deadline=None)
@given(
    heads=st.integers(1, 24),
    groups=st.integers(1, 24),
    width=st.integers(1, 80),
    tp=st.sampled_from([1, 2, 4]),
)
def test_what_passes_fits_fp8(heads: int, groups: int, width: int, tp: int) -> None:
    """With `kv_channels` given, FP8 is refused exactly if a rank's size is not a multiple of 16."""
    values = {
        "model.fp8": True,
        "model.fp8_recipe": "delayed",
        "model.hidden_size": 64,
        "model.num_attention_heads": heads,
        "model.num_query_groups": groups,
        "model.kv_channels": width,
        "model.tensor_model_parallel_size": tp,
    }
    found = list(rule_findings(values))
    shares = [heads * width / tp, (heads + 2 * groups) * width / tp]
    fits = heads % groups == 0 and groups % tp == 0 and all(n % 16 == 0 for n in shares)
    assert fits == (not found)
    for finding in found:
        if finding.key == "model.kv_channels":
            near = finding.hint.partition(": ")[2].partition(";")[0].split(" or ")
            for offer in near:
                again = values | {"model.kv_channels": int(offer)}
                assert not list(rule_findings(again))


def test_heads_of_their_own_width_need_not_share_hidden() -> None:
    assert load_problems("model.num_attention_heads=3")
    spec = run_spec("model.num_attention_heads=3", "model.kv_channels=48").model
    assert (spec.head_size, spec.query_size, spec.kv_size) == (48, 144, 144)


def test_fast_activations_are_the_plain_ones() -> None:
    fast, plain = run_spec("model.activation=fast-swiglu"), run_spec("model.activation=swiglu")
    assert fast.resolved == plain.resolved and fast.model.is_gated
    assert run_spec("model.openai_gelu=True").model.activation == "gelu-tanh"


def test_recomputation() -> None:
    assert run_spec().model.recompute is None
    selective = run_spec(f"{GRANULARITY}=selective").model.recompute
    assert selective == RecomputeSpec(granularity="selective", method="uniform", num_layers=1)
    block = run_spec(f"{GRANULARITY}=full", f"{METHOD}=block", f"{LAYERS}=3").model.recompute
    assert block == RecomputeSpec(granularity="full", method="block", num_layers=3)


@pytest.mark.parametrize(
    "overrides",
    [[], ["model=llama3_8b"], ["model.openai_gelu=True"], [ROPE, "model.rotary_percentage=0.25"]],
)
def test_a_shape_is_read_back_from_a_tree(overrides: list[str]) -> None:
    run = run_spec(*overrides)
    model = run.resolved["model"]
    assert isinstance(model, dict)
    assert spec_of_tree(model, 0) == run.model
    again = spec_of_tree(tree_of_spec(run.model), 0)
    assert tree_of_spec(again) == tree_of_spec(run.model)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.kv_channels=32", "model.num_attention_heads=4", "model.hidden_size=256",
          "model.ffn_hidden_size=256"], "model.kv_channels"),
        (["model.num_query_groups=2", "model.num_attention_heads=8", "model.hidden_size=256",
          "model.ffn_hidden_size=256"], "model.num_query_groups"),
        (["model.ffn_hidden_size=384"], "model.ffn_hidden_size"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["", "restore_from_path=x", "model.resume_from_checkpoint=x"])
def test_a_hint_leaves_the_sizes_of_a_given_model(
    settings: list[str], key: str, start: str
) -> None:
    """A run that starts from a model cannot take another width, as the nearest value would be."""
    two = ["trainer.devices=2", "model.tensor_model_parallel_size=2"]
    words = [
        *settings,
        *two,
        "model.fp8=True",
        "model.fp8_recipe=blockwise",
        *([start] * bool(start)),
    ]
    problem = the_problem(*words)
    assert problem.key == key
    assert ("Nearest values" in problem.hint) == (not start)
    if start:
        assert "The model that the run starts from has this size" in problem.hint
        assert "fewer tensor-parallel ranks, or another model.fp8_recipe" in problem.hint


@pytest.mark.parametrize(
    "sizes",
    [["model.num_query_groups=1"], ["model.override_vocab_size=257"],
     ["model.make_vocab_size_divisible_by=1"]],
)  # fmt: skip
def test_a_given_model_that_ranks_do_not_divide_asks_for_other_ranks(sizes: list[str]) -> None:
    two = ["trainer.devices=2", "model.tensor_model_parallel_size=2"]
    assert "or tensor-parallel sizes: 1" in the_problem(*sizes, *two).hint
    problem = the_problem(*sizes, *two, "restore_from_path=x")
    assert "The model that the run starts from has this value. Possible are" in problem.hint
    assert "tensor-parallel sizes: 1" in problem.hint and "Nearest" not in problem.hint
