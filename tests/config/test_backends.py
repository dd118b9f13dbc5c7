"""Test which settings `model.fp8_backend` excludes before a run begins, and with which reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megafp8.config.checks import check_values
from megafp8.config.load import load
from megafp8.specs import backends
from tests.config.helpers import load_problems, problems, run_spec, the_problem

FP8 = "model.fp8=True"
TE, TORCHAO = "model.fp8_backend=te", "model.fp8_backend=torchao"
RECIPE = "model.fp8_recipe=tensorwise"
GATHER = "model.enable_fsdp_float8_all_gather=True"


@pytest.mark.parametrize(
    ("overrides", "key", "word"),
    [
        ([TORCHAO], "model.fp8_backend", "in FP8 only"),
        ([TORCHAO, FP8], "model.fp8_recipe", "no delayed recipe"),
        ([TORCHAO, FP8, RECIPE, "model.fp8_params=True"], "model.fp8_params", "high precision"),
        ([TORCHAO, FP8, RECIPE, "model.fp8_modules=['*.fc2:blockwise']",
          "model.hidden_size=256", "model.ffn_hidden_size=1024"],
         "model.fp8_modules", "no blockwise recipe"),
        ([TORCHAO, FP8, RECIPE, "model.tensor_model_parallel_size=2", "trainer.devices=2"],
         "model.tensor_model_parallel_size", "not tensor-parallel"),
        ([TE, "model.transformer_engine=False"], "model.fp8_backend", "rules Transformer"),
        ([TE, FP8, "model.fp8_interval=2"], "model.fp8_interval", "every update"),
        ([TE, FP8, "model.fp8_wgrad=False"], "model.fp8_wgrad", "ignore this setting"),
        ([TE, FP8, RECIPE, "model.override_linear_precision=[true,false,false]"],
         "model.override_linear_precision", "ignore this setting"),
        ([TE, FP8, "model.fp8_recipe=rowwise"], "model.fp8_recipe", "no rowwise recipe"),
        ([TE, FP8, "model.pad_inner_dim=True"], "model.pad_inner_dim", "do not pad"),
        (["model.te_version=2.20.2"], "model.te_version", "fp8_backend=auto"),
        ([TE, "model.compile=block"], "model.compile", "not compiled"),
        ([TE, "model.ffn_dropout=0.1"], "model.ffn_dropout", "inside the MLP"),
        ([TE, FP8, "model.fp8_health=full"], "model.fp8_health", "does not expose its casts"),
        ([TE, FP8, RECIPE, "model.fp8_health=scales"],
         "model.fp8_health", "this run has model.fp8_recipe=tensorwise"),
        ([TORCHAO, FP8, RECIPE, "model.compile=block", "model.fp8_health=full"],
         "model.fp8_health", "compiled graph"),
        ([GATHER], "model.enable_fsdp_float8_all_gather", "torchao's linears"),
        ([GATHER, TORCHAO, FP8, RECIPE],
         "model.enable_fsdp_float8_all_gather", "no weights are gathered"),
        ([GATHER, TORCHAO, FP8, "model.fp8_recipe=rowwise", "model.fsdp=True",
          "trainer.devices=2"],
         "model.enable_fsdp_float8_all_gather", "rowwise needs several"),
        ([GATHER, TORCHAO, FP8, RECIPE, "trainer.precision=16", "model.fsdp=True",
          "trainer.devices=2"],
         "model.enable_fsdp_float8_all_gather", "range"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(overrides: list[str], key: str, word: str) -> None:
    problem = the_problem(*overrides)
    assert problem.key == key and word in problem.reason


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        ([], "native"),
        ([FP8], "native"),
        (["model.fp8_backend=native"], "native"),
        ([FP8, RECIPE, TORCHAO], "torchao"),
    ],
)
def test_who_runs(overrides: list[str], chosen: str) -> None:
    assert run_spec(*overrides).precision.backend == chosen


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], None),
        ([FP8], None),
        ([FP8, RECIPE], None),
        (["model.transformer_engine=False"], "rules Transformer Engine out"),
        (["model.compile=block"], "model.compile=block: Transformer Engine's layers are not"),
        (
            [FP8, "model.fp8_recipe=rowwise"],
            "model.fp8_recipe=rowwise: Transformer Engine has no rowwise recipe",
        ),
        ([FP8, RECIPE, "model.fp8_health=full"], "model.fp8_health=full"),
    ],
)
def test_auto_asks_for_te_on_a_gpu(
    overrides: list[str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules for `te` say whether the settings exclude it; on a CPU it is not asked for."""
    monkeypatch.setattr(backends, "TE_IS_PROVEN_ON_GPUS", True)
    assert run_spec(*overrides).precision.auto is None
    if "model.transformer_engine=False" not in overrides:  # it has no effect on native layers
        assert run_spec(*overrides, "model.fp8_backend=native", gpu=True).precision.auto is None
    precision = run_spec(*overrides, gpu=True).precision
    assert precision.auto is not None and precision.backend == "native"
    if reason is None:
        assert precision.auto.why_not_te is None
    else:
        assert reason in str(precision.auto.why_not_te)


def test_auto_is_native_until_te_is_proven_on_a_gpu() -> None:
    precision = run_spec(FP8, gpu=True).precision
    assert precision.backend == "native" and precision.auto is not None
    assert precision.auto.text.endswith("unproven on GPUs, and model.fp8_backend=te asks for them")
    assert run_spec(FP8, TE, gpu=True).precision.backend == "te"


@pytest.mark.parametrize("overrides", [[TE], [TE, FP8], [TE, FP8, RECIPE]])
def test_transformer_engine_is_for_bf16_too_and_for_cpus(overrides: list[str]) -> None:
    for where in ([], ["trainer.accelerator=cpu"]):
        assert run_spec(*overrides, *where).precision.backend == "te"
    assert run_spec(*overrides, gpu=True).precision.backend == "te"


def test_its_version_is_chosen_on_a_cpu_alone() -> None:
    version = "model.te_version=2.20.2"
    assert run_spec(TE, version).precision.te_version == "2.20.2"
    (problem,) = problems(lambda: run_spec(TE, version, gpu=True))
    assert problem.key == "model.te_version" and "installed" in problem.reason


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("high", list(itertools.product(("false", "true"), repeat=3)), ids=",".join)
def test_te_leaves_no_product_in_high_precision(recipe: str, high: tuple[str, ...]) -> None:
    """Transformer Engine's recipes have `backward_override`, but its MLP fails with it."""
    given = [TE, FP8, f"model.fp8_recipe={recipe}", "model.hidden_size=256",
             "model.ffn_hidden_size=1024"]  # fmt: skip
    override = f"model.override_linear_precision=[{','.join(high)}]"
    if high == ("false",) * 3:
        load([*given, override])
        return
    refused = load_problems(*given, override)
    assert {problem.key for problem in refused} == {"model.override_linear_precision"}
    assert any("ignore this setting" in problem.reason for problem in refused)


def test_te_tells_documents_apart() -> None:
    """Rotary positions begin again only with documents that do not see each other."""
    mask, positions = "model.data.reset_attention_mask=True", "model.data.reset_position_ids=True"
    rope = "model.position_embedding_type=rope"
    for given in ((mask,), (positions,), (mask, positions), (mask, positions, rope)):
        load([TE, *given])
    problem = the_problem(TE, rope, positions)
    assert problem.key == "model.data.reset_position_ids" and "see each other" in problem.reason
    assert "native" in problem.hint


# --- sizes ---------------------------------------------------------------------------------------

SIZES = {
    "model.hidden_size": (80, 112, 128, 136),
    "model.ffn_hidden_size": (48, 72, 200, 256),
    "model.num_query_groups": ("null", 1, 2),
    "model.kv_channels": ("null", 12, 20),
    "model.encoder_seq_length": (12, 16),
    "model.micro_batch_size": (1, 2),
    "model.tensor_model_parallel_size": (1, 2, 4),
    "model.sequence_parallel": (False, True),
}


def te_refuses(sizes: dict[str, Any]) -> bool:
    """Whether Transformer Engine would fail with these sizes, as written in its sources.

    `assert_dim_for_fp8_exec` asks of each rank's weights and activations that the last dimension is
    a multiple of 16, and the product of the others a multiple of 8. On Hopper all products are
    [M, K] x [N, K] with K a multiple of 16, and cuBLAS needs the same of the result's rows. In the
    product for a weight gradient, K is the number of tokens.
    """
    hidden, ffn, groups, width, length, micro, tp, shares = (sizes[key] for key in SIZES)
    heads = 4
    groups, width = (heads if groups == "null" else groups), hidden // heads if (
        width == "null") else width  # fmt: skip
    tokens = micro * length
    qkv, queries = (heads + 2 * groups) * width // tp, heads * width // tp
    weights = [(qkv, hidden), (hidden, queries), (ffn // tp, hidden), (hidden, ffn // tp)]
    local = tokens // (tp if shares else 1)
    asserted = any(rows % 8 or cols % 16 for rows, cols in weights) or tokens % 8 or local % 8
    return bool(asserted or any(rows % 16 for rows, _ in weights) or tokens % 16)


def test_sizes_that_te_does_not_take_are_refused_before_a_run() -> None:
    """If Transformer Engine would fail, the error names a key and a size that fits."""
    refused, others = 0, load([FP8, "model.num_attention_heads=4"])
    for values in itertools.product(*SIZES.values()):
        sizes = dict(zip(SIZES, values, strict=True))
        tp, groups = (sizes[f"model.{key}"] for key in ("tensor_model_parallel_size",
                                                        "num_query_groups"))  # fmt: skip
        if (sizes["model.sequence_parallel"] and tp == 1) or (groups != "null" and groups % tp):
            continue  # refused for another reason
        if not te_refuses(sizes):
            continue
        refused += 1
        read = {key: None if value == "null" else value for key, value in sizes.items()}
        found = [
            p
            for p in check_values(others | {"model.fp8_backend": "te"} | read)
            if "FP8" in p.reason
        ]
        assert found, sizes
        assert all(p.key in SIZES and p.hint for p in found), sizes
    assert refused > 500


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("model.ffn_hidden_size", 72, "64 or 80"),
        ("model.ffn_hidden_size", 40, "32 or 48"),
        ("model.ffn_hidden_size", 200, "192 or 208"),
        ("model.hidden_size", 136, "128 or 144"),
        ("model.kv_channels", 10, "8 or 12"),
        ("model.micro_batch_size", 1, "2"),
    ],
)
def test_the_nearest_sizes_are_named(key: str, value: int, nearest: str) -> None:
    given = ["model.hidden_size=128", "model.ffn_hidden_size=256", "model.num_attention_heads=4",
             "model.encoder_seq_length=24" if key == "model.micro_batch_size" else
             "model.encoder_seq_length=32"]  # fmt: skip
    (problem,) = (p for p in load_problems(TE, FP8, *given, f"{key}={value}") if p.key == key)
    assert nearest in problem.hint, str(problem)
