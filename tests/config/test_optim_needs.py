"""Test what the keys of FP8-LM need: states in low precision, by a level or by own keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.config.load import load_all
from megafp8.specs import StorageSpec
from tests.config.helpers import run_spec, the_problem

OPTIM = "model.optim."
LEVEL = f"{OPTIM}fp8_opt_level"
FILE = """\
defaults: [pretrain_gpt, _self_]
trainer: {{devices: 2}}
model:
  fp8: true
  optim: {{name: distributed_fused_adam, fp8_opt_level: O2, {key}: {value}}}
"""
DETAILS = {
    "data_parallel_sharding_strategy": "optim_grads",
    "shard_by": "elements",
    "low_precision_moments_of": "linears",
    "main_grads_sum_dtype": "fp32",
    "fp8_grad_reduction": "auto",
    "stochastic_rounding": "True",
}
"""A value other than its default for each key that needs states in low precision."""


@pytest.mark.parametrize("key", DETAILS)
@pytest.mark.parametrize("off", ["model.fp8=False", f"{LEVEL}=O0"])
def test_what_a_file_details_is_off_and_listed_where_its_level_is(
    key: str, off: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(FILE.format(key=key, value=DETAILS[key]))
    where = {"config_dir": tmp_path, "config_name": "mine"}
    plain = run_spec("trainer.devices=2", f"{OPTIM}name=distributed_fused_adam").optim
    kept = run_spec(**where).optim
    assert (kept.storage, kept.shards_grads, kept.shard_by) != (
        run_spec("model.fp8=True", f"{LEVEL}=O2").optim.storage, plain.shards_grads, plain.shard_by,
    )  # fmt: skip
    spec = run_spec(off, **where)
    assert spec.optim == plain and spec.optim.storage == StorageSpec()
    loaded = load_all([off], **where)
    assert {setting.key for setting, _ in loaded.unused} >= {OPTIM + key}
    (line,) = loaded.inert_lines()
    assert line.endswith(f"(mine.yaml): has no effect with {off}")


FP8 = ["model.fp8=True"]
ZERO = f"{OPTIM}name=distributed_fused_adam"
MISSING = {
    f"{OPTIM}shard_by=elements": [
        ([], f"{OPTIM}name=adamw", f"Set {ZERO}"),
        ([ZERO], f"{LEVEL}=O0", f"set a level ({LEVEL})"),
        ([ZERO, *FP8, f"{LEVEL}=O2"], "trainer.devices=1", "trainer.devices sets"),
    ],
    f"{OPTIM}fp8_grad_reduction=auto": [
        (["trainer.devices=2"], f"{LEVEL}=O0", f"{OPTIM}main_grads_dtype=fp8 or a level"),
        ([*FP8, f"{LEVEL}=O1"], "trainer.devices=1", "trainer.devices sets"),
        (
            [*FP8, "trainer.devices=2", f"{LEVEL}=O1", f"{OPTIM}main_grads_dtype=fp32"],
            f"{OPTIM}main_grads_dtype=fp32",
            "main_grads_dtype=fp8",
        ),
    ],
}  # fmt: skip
"""For a setting: what is given beside it, the setting in its way, and a part of the hint."""


@pytest.mark.parametrize("setting", MISSING)
@pytest.mark.parametrize("case", range(3))
def test_a_message_names_the_part_that_is_missing(setting: str, case: int) -> None:
    beside, way, hint = MISSING[setting][case]
    problem = the_problem(*beside, setting)
    assert problem.key == setting.partition("=")[0]
    assert problem.reason == f"has no effect with {way}"
    assert hint in problem.hint
