"""Each key of the model's shape changes what a run computes, not only what it says."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from megafp8.models.init import pieces_of
from megafp8.parallel.mesh import single_rank
from megafp8.train.build import build
from megafp8.train.generate import sample
from megafp8.train.step import train_step
from tests.config.helpers import run_spec
from tests.tiny import VOCAB, microbatch

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.encoder_seq_length=16",
    "model.optim.sched.warmup_steps=0",
    "trainer.precision=32",
]
ROPE = "model.position_embedding_type=rope"
SWIGLU = "model.activation=swiglu"
STEEP = ["trainer.precision=16", "model.native_amp_init_scale=1024", "model.num_layers=3",
         "model.init_method_std=0.3"]  # fmt: skip
CHECKPOINT = "model.activations_checkpoint"
LLAMA = [
    "model.normalization=rmsnorm",
    "model.activation=fast-swiglu",
    "model.bias=False",
    ROPE,
    "model.share_embeddings_and_output_weights=False",
    "model.num_query_groups=2",
]


@dataclasses.dataclass(frozen=True)
class Seen:
    """Hold the results of two steps."""

    losses: tuple[float, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    flops: tuple[tuple[tuple[str, str], int], ...]


@cache
def seen(*overrides: str) -> Seen:
    spec = run_spec(*SMALL, *overrides)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=VOCAB))
    state = build(spec, single_rank())
    losses = []
    for step in range(2):
        losses.append(train_step(state, [microbatch(step)]).loss)
        state.step += 1
    pieces = [piece for param in state.model.parameters() for piece in pieces_of(param)]
    shapes = tuple((piece.name, piece.global_shape) for piece in pieces)
    return Seen(tuple(losses), shapes, tuple(sorted(state.counter.flops.items())))


@pytest.mark.parametrize(
    ("before", "key"),
    [
        ([], "model.normalization=rmsnorm"),
        ([], "model.bias=False"),
        ([], "model.activation=geglu"),
        ([], SWIGLU),
        ([], "model.activation=reglu"),
        ([], "model.kv_channels=16"),
        ([], "model.num_query_groups=2"),
        ([], ROPE),
        ([], "model.position_embedding_type=alibi"),
        ([], "model.position_embedding_type=none"),
        ([], "model.share_embeddings_and_output_weights=False"),
        ([], "model.transformer_block_type=post_ln"),
    ],
)
def test_keys_of_the_tensors(before: list[str], key: str) -> None:
    plain, changed = seen(*before), seen(*before, key)
    assert plain.shapes != changed.shapes and plain.losses != changed.losses


@pytest.mark.parametrize(
    ("before", "key"),
    [
        ([], "model.activation=squared-relu"),
        (["model.init_method_std=0.3"], "model.openai_gelu=False"),
        ([ROPE], "model.rotary_percentage=0.5"),
        ([ROPE], "model.rotary_base=100.0"),
        ([ROPE], "model.seq_len_interpolation_factor=2.0"),
        (STEEP, "model.apply_query_key_layer_scaling=True"),
        (["trainer.precision=bf16"], "model.fp32_residual_connection=True"),
        ([], "model.layernorm_epsilon=0.1"),
        ([], "model.use_scaled_init_method=False"),
        ([], "model.hidden_dropout=0.1"),
        ([], "model.attention_dropout=0.1"),
        ([], "model.ffn_dropout=0.1"),
    ],
)
def test_keys_of_the_function(before: list[str], key: str) -> None:
    plain, changed = seen(*before), seen(*before, key)
    assert plain.shapes == changed.shapes and plain.losses != changed.losses


def test_the_order_of_norms_moves_tensors_but_keeps_their_number() -> None:
    plain, post = seen(), seen("model.transformer_block_type=post_ln")
    gone = {"final_norm.weight", "final_norm.bias"}
    assert {name for name, _ in plain.shapes} - {name for name, _ in post.shapes} == gone


@pytest.mark.parametrize(
    "keys",
    [
        [f"{CHECKPOINT}_granularity=selective"],
        [f"{CHECKPOINT}_granularity=full", f"{CHECKPOINT}_method=uniform"],
        [
            f"{CHECKPOINT}_granularity=full",
            f"{CHECKPOINT}_method=block",
            f"{CHECKPOINT}_num_layers=1",
        ],
    ],
)
def test_recomputation_changes_what_runs_and_no_number(keys: list[str]) -> None:
    dropout = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    plain, again = seen(*dropout), seen(*dropout, *keys)
    assert plain.losses == again.losses
    assert dict(plain.flops) != dict(again.flops)
    assert sum(n for _, n in plain.flops) < sum(n for _, n in again.flops)


def test_layers_of_a_block_and_of_a_group_count() -> None:
    def attention(method: str, layers: int) -> int:
        keys = [f"{CHECKPOINT}_granularity=full", f"{CHECKPOINT}_method={method}"]
        found = seen("model.num_layers=4", *keys, f"{CHECKPOINT}_num_layers={layers}")
        return dict(found.flops)["fp32", "attention"]

    assert attention("block", 1) < attention("block", 3) < attention("uniform", 1)
    assert attention("uniform", 1) == attention("uniform", 4), "all of them, once"


def test_llama_in_fp8_learns() -> None:
    spec = run_spec(*SMALL, *LLAMA, "model.fp8=True", "trainer.precision=bf16")
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=VOCAB))
    state = build(spec, single_rank())
    losses = []
    for _ in range(12):
        losses.append(train_step(state, [microbatch(0)]).loss)
        state.step += 1
    assert losses[-1] < losses[0] - 0.3
    assert not any(place == "output" for precision, place in state.counter.flops
                   if precision != "fp8")  # fmt: skip
    names = state.scaling.tables["forward"].names
    assert {"layers.0.attention.qkv.weight", "layers.1.mlp.fc1.weight"} <= set(names)
    assert torch.isfinite(state.masters.own_grads[0]).all()


@pytest.mark.parametrize("length", [8, 24])
def test_a_sample_stays_within_the_positions(length: int) -> None:
    spec = run_spec(*SMALL, f"model.encoder_seq_length={length}")
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=VOCAB))
    state = build(spec, single_rank())
    drawn = sample(state, [1, 2, 3], 30, vocab_size=VOCAB, temperature=1.0, seed=1)
    assert len(drawn) == 30 and set(drawn) <= set(range(VOCAB))
