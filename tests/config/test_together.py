"""Test the table of settings that exclude each other: each row refuses, with its own reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.config.checks import check_values
from megafp8.config.load import load
from megafp8.config.rows import Condition, Row, condition_text, is_one_of, refusals
from megafp8.config.schema import all_keys
from megafp8.config.together import RELATED, TOGETHER, findings
from megafp8.specs.recipes import load_recipe

TWO_LEVELS = str(Path(__file__).parents[1] / "own_recipes/four_bits.py")
SIMULATED = str(Path(__file__).parents[1] / "own_recipes/simulated_int8.py")
for own in (TWO_LEVELS, SIMULATED):
    load_recipe(own)
ROWS = [" + ".join(condition_text(*c) for c in {**r.when, **r.excludes}.items()) for r in TOGETHER]
BESIDES = {
    "model.fp8_backend": {"model.fp8": True, "model.fp8_recipe": "tensorwise"},
    "model.fp8_health": {"model.fp8": True},
    "model.fp8_params": {"model.fp8": True},
    "model.reduce_amax": {"model.fp8": True},
    "model.pad_inner_dim": {"model.fp8": True},
    "model.fp8_wgrad": {"model.fp8": True},
    "model.override_linear_precision": {"model.fp8": True},
    "model.precision_schedule": {"model.fp8": True},
    "model.optim.fp8_opt_level": {"model.fp8": True},
}
"""What a key needs to have an effect."""
RECOMPUTE = "model.activations_checkpoint"
PP, STAGES = (f"model.{name}pipeline_model_parallel_size" for name in ("", "virtual_"))
TRAIN = "model.data.train_ds"
CANDIDATES = [
    True, False, None, 0, 1, 2, 16, 32, 0.1, "bf16", "te", "torchao", "delayed", "rowwise",
    "blockwise", "tensorwise", "scales", "full", "block", "hybrid", "InterleavedZeroBubble",
    [True, False, False], "O1", "O3", "auto", "fp8", "elements", "muon", TWO_LEVELS, SIMULATED,
    [{"from": 0.5, "recipe": "high_precision"}],
]  # fmt: skip


def that_holds(key: str, test: Any, values: dict[str, Any]) -> Any:
    """Return a value of a key for which a condition holds."""
    if not isinstance(test, Condition):
        return test
    for value in CANDIDATES:
        valid = all_keys()[key].valid
        if valid is not None and not isinstance(value, type(None)) and not _fits(valid, value):
            continue
        try:
            if test.holds(value, values | {key: value}):
                return value
        except (KeyError, TypeError):
            continue
    raise AssertionError(f"no value for {condition_text(key, test)}")


def _fits(valid: Any, value: Any) -> bool:
    try:
        return bool(valid.accepts(value))
    except TypeError:
        return False


def values_of(row: Row) -> dict[str, Any]:
    values = load()
    for key, test in {**row.when, **row.excludes}.items():
        values |= BESIDES.get(key, {})
        values[key] = that_holds(key, test, values)
    for key, test in {**row.when, **row.excludes}.items():  # said by the row, whatever came besides
        values[key] = that_holds(key, test, values)
    return values


@pytest.mark.parametrize("row", TOGETHER, ids=ROWS)
def test_each_row_refuses_by_the_key_that_it_excludes(row: Row) -> None:
    values = values_of(row)
    (excluded,) = row.excludes
    found = [finding for finding in findings(values) if finding.hint == row.hint]
    assert found and found[0].key == excluded
    assert "{" not in found[0].reason and row.hint[0].isupper() and not row.hint.endswith(".")
    default = load()
    if default[excluded] != values[excluded]:
        without = values | {excluded: default[excluded]}
        assert row.hint not in [finding.hint for finding in findings(without)]


EXAMPLES = [
    "model.num_query_groups=3 model.num_attention_heads=8",
    f"{RECOMPUTE}_method=null {RECOMPUTE}_granularity=full",
    f"{RECOMPUTE}_num_layers=null {RECOMPUTE}_method=block",
    f"{RECOMPUTE}_num_layers=0",
    f"{RECOMPUTE}_num_layers=5 model.num_layers=4",
    f"{RECOMPUTE}_num_layers=1 {RECOMPUTE}_granularity=selective {RECOMPUTE}_method=uniform",
    "model.moe_router_enable_expert_bias=True model.num_moe_experts=4",
    "model.moe_aux_loss_coeff=0.1 model.num_moe_experts=4 "
    "model.moe_router_load_balancing_type=none",
    "model.data.seq_length=512",
    "model.max_position_embeddings=64 model.encoder_seq_length=128",
    "model.tokenizer.type=null model.tokenizer.library=huggingface",
    "model.tokenizer.model=null model.tokenizer.library=tiktoken",
    "model.tokenizer.vocab_file=null model.tokenizer.library=megatron",
    "model.tokenizer.merge_file=null model.tokenizer.library=megatron",
    "model.tokenizer.type=GPT2BPETokenizer model.tokenizer.library=huggingface",
    "model.tokenizer.type=gpt2 model.tokenizer.library=megatron",
    f"{STAGES}=2 {PP}=2 model.pipeline_schedule=GPipe",
    f"{STAGES}=1 {PP}=2 model.pipeline_schedule=ZBVZeroBubble",
    f"{STAGES}=1 {PP}=2 model.pipeline_schedule=Interleaved1F1B",
    "model.tp_only_amax_red=True model.fp8_params=True trainer.devices=2",
    "model.encoder_seq_length=127 model.tensor_model_parallel_size=2 model.sequence_parallel=True",
    "model.fp8_hybrid=False model.fp8=True",
    "model.fp8_params=True model.override_linear_precision=[true,false,false]",
    "model.optim.sched.min_lr=0.1 model.optim.lr=0.01",
    "exp_manager.resume_from_checkpoint=x model.resume_from_checkpoint=y",
    "model.data.data_prefix=null",
    f"{TRAIN}.file_names=a.jsonl",
    f"restore_from_path=null {TRAIN}.file_names=a.jsonl",
    f"model.data.reset_attention_mask=False {TRAIN}.file_names=a {TRAIN}.packed_sequence=True",
    f"model.data.reset_position_ids=False {TRAIN}.file_names=a {TRAIN}.packed_sequence=True",
    f"{TRAIN}.truncation_method=left {TRAIN}.truncation_field=messages",
]
"""Settings that each row of related.yaml refuses, the refused one first."""


@pytest.mark.parametrize(("row", "words"), [*zip(RELATED, EXAMPLES, strict=True)], ids=EXAMPLES)
def test_each_related_row_refuses_its_example(row: Row, words: str) -> None:
    given = {key: yaml.safe_load(text) for key, text in (w.split("=", 1) for w in words.split())}
    (excluded,) = row.excludes
    assert next(iter(given)) == excluded
    (found,) = refusals([row], load() | given)
    assert found.key == excluded and not set("{}") & set(found.reason + found.hint)
    needed = next((key for key in row.when if key in given), None)
    if needed is not None and given[needed] != load()[needed]:
        others = {name: value for name, value in given.items() if name != needed}
        assert not list(refusals([row], load() | others))


def test_texts_name_settings_values_and_what_is_near() -> None:
    rows = (Row({}, {"a": is_one_of(10)}, "{b} and {=b}", "{multiples of b}; {divisors of b}"),)
    assert list(refusals(rows, {"a": 10, "b": 4})) == [("a", "b=4 and 4", "8 or 12; 4")]
    assert not list(refusals(rows, {"a": 10})), "a value that a text names is bad itself"


def test_the_default_job_and_its_fp8_are_not_in_the_table() -> None:
    assert not list(findings(load()))
    assert not check_values(load(["model.fp8=True"]))


def test_a_row_is_left_out_while_a_key_that_it_reads_is_bad() -> None:
    values = values_of(TOGETHER[0])
    for key in {**TOGETHER[0].when, **TOGETHER[0].excludes}:
        assert not [f for f in findings({k: v for k, v in values.items() if k != key})]
