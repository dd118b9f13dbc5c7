"""Test how Accelerate's sections become settings: FSDP, DeepSpeed, Megatron-LM, parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8_migrate import main, migrate
from megafp8_migrate.report import Migration
from tests.config.helpers import run_spec
from tests.megafp8_migrate.test_migrate import LEAVES, keys_of, write


def accelerate(**more: Any) -> Migration:
    """Return the translation of a file with these keys, which is not refused as a whole."""
    return migrate(yaml.safe_dump({"mixed_precision": "bf16", "num_processes": 2, **more}), "x")


@pytest.mark.parametrize(
    ("prefix", "given", "strategy"),
    [
        ("fsdp_sharding_strategy", "FULL_SHARD", "full"),
        ("fsdp_sharding_strategy", 2, "grad"),
        ("fsdp_reshard_after_forward", True, "full"),
        ("fsdp_reshard_after_forward", False, "grad"),
        ("fsdp_reshard_after_forward", "HYBRID_SHARD", "full"),
        ("fsdp_version", 2, "full"),
    ],
)
def test_fsdps_strategies(prefix: str, given: object, strategy: str, tmp_path: Path) -> None:
    m = accelerate(distributed_type="FSDP", fsdp_config={prefix: given})
    assert not m.undecided
    fsdp = run_spec(**write(tmp_path, m)).parallel.fsdp
    assert fsdp is not None and fsdp.strategy == strategy
    assert fsdp.grad_reduce_dtype == "bf16", "Accelerate's FSDP sums in the compute dtype"


def test_fsdps_other_keys(tmp_path: Path) -> None:
    """The keys that `accelerate config` 1.15 writes for FSDP2, with recomputation."""
    section = {
        "fsdp_activation_checkpointing": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block", "fsdp_version": 2,
    }  # fmt: skip
    m = accelerate(distributed_type="FSDP", fsdp_config=section)
    named = keys_of([*m.translated, *m.inert])
    assert not m.undecided and {f"fsdp_config.{key}" for key in section} <= named
    recompute = run_spec(**write(tmp_path, m)).model.recompute
    assert recompute is not None and recompute.granularity == "full"
    offloads = accelerate(distributed_type="FSDP", fsdp_config={"fsdp_offload_params": True})
    assert keys_of(offloads.undecided) == {"fsdp_config.fsdp_offload_params"}
    several = accelerate(
        distributed_type="FSDP", num_machines=2, num_processes=4,
        fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD"},
    )  # fmt: skip
    assert several.out["model"]["fsdp_sharding_strategy"] == "hybrid"
    plain = accelerate(distributed_type="FSDP", fsdp_config={"fsdp_sharding_strategy": "NO_SHARD"})
    assert "fsdp" not in plain.out.get("model", {})


@pytest.mark.parametrize("more", [{}, {"fsdp_config": {}}, {"fsdp_config": None}])
def test_fsdp_without_a_section_has_accelerates_defaults(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """The type alone asks for FSDP: Accelerate shards whole and sums in the compute dtype."""
    m = accelerate(distributed_type="FSDP", **more)
    assert not m.undecided and "distributed_type" in keys_of(m.inert)
    fsdp = run_spec(**write(tmp_path, m)).parallel.fsdp
    assert fsdp is not None and (fsdp.strategy, fsdp.grad_reduce_dtype) == ("full", "bf16")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_another_type_without_its_section_must_be_decided(kind: str) -> None:
    section = {"DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}[kind]
    more: dict[str, Any]
    for more in ({}, {section: {}}, {section: None}):
        m = accelerate(distributed_type=kind, **more)
        assert keys_of(m.undecided) == {"distributed_type"}
        assert f"the file has no {section}" in m.report()


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_processes", None), ("num_processes", "8"), ("num_processes", True),
     ("num_machines", 0), ("num_machines", "2"), ("num_machines", None)],
)  # fmt: skip
def test_numbers_of_ranks_that_are_none_must_be_decided(key: str, value: object) -> None:
    """Without them neither the ranks of a node nor the replicas are known."""
    section = {"dp_replicate_size": 2, "dp_shard_size": 4}
    m = accelerate(
        **{"num_processes": 8, key: value},
        parallelism_config={f"parallelism_config_{name}": size for name, size in section.items()},
        gradient_accumulation_steps=2,
    )
    expected = {key, "num_processes", "parallelism_config.parallelism_config_dp_shard_size"}
    if key == "num_processes":
        expected |= {"gradient_accumulation_steps"}
    assert keys_of(m.undecided) == expected
    assert "trainer" not in m.out or "devices" not in m.out["trainer"]


def test_sizes_that_are_texts_count(tmp_path: Path) -> None:
    """Accelerate passes a section's numbers through the environment, where they are texts."""
    m = accelerate(
        num_processes=4, parallelism_config={"tp_size": "2"}, gradient_accumulation_steps=3
    )
    assert not m.undecided
    spec = run_spec(**write(tmp_path, m))
    assert spec.parallel.tp == 2 and spec.train.num_microbatches(spec.parallel.dp) == 3


@pytest.mark.parametrize("kind", ["MULTI_GPU", "NO"])
def test_a_section_that_accelerate_does_not_read(kind: str) -> None:
    sections = {"fsdp_config": {"fsdp_offload_params": True}, "deepspeed_config": {"zero_stage": 3}}
    m = accelerate(distributed_type=kind, **sections)
    assert not m.undecided and "fsdp" not in m.out.get("model", {})
    assert f"distributed_type={kind} does not read it" in m.report()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_stages(stage: int, tmp_path: Path) -> None:
    section = {
        "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "zero3_init_flag": False,
        "offload_optimizer_device": "none", "offload_param_device": "none", "zero_stage": stage,
    }  # fmt: skip
    m = accelerate(distributed_type="DEEPSPEED", deepspeed_config=section)
    assert not m.undecided
    spec = run_spec(**write(tmp_path, m))
    assert spec.optim.shards_states == (stage == 1) and spec.optim.clip_grad_norm == 0.5
    strategy = None if spec.parallel.fsdp is None else spec.parallel.fsdp.strategy
    assert strategy == {0: None, 1: None, 2: "grad", 3: "full"}[stage]
    assert spec.train.num_microbatches(spec.parallel.dp) == 4


def test_deepspeeds_stage_2_with_ms_amp(tmp_path: Path) -> None:
    """A level is refused with FSDP; its own ZeRO-2 is a setting of the optimizer."""
    section, fp8 = {"zero_stage": 2}, {"backend": "MSAMP", "opt_level": "O2"}
    m = accelerate(
        distributed_type="DEEPSPEED", mixed_precision="fp8", num_processes=2,
        deepspeed_config=section, fp8_config=fp8,
    )  # fmt: skip
    assert not m.undecided
    spec = run_spec(**write(tmp_path, m))
    assert spec.optim.shards_grads and spec.parallel.fsdp is None
    assert spec.optim.storage.main_grads == "fp8"


@pytest.mark.parametrize("backend", ["backend", "fp8_backend"])
@pytest.mark.parametrize(("name", "precision"), [("msamp", "fp8"), ("MSAMP", "FP8")])
@pytest.mark.parametrize("section", [{"zero_stage": "2"}, {"gradient_clipping": 1.0}])
def test_ms_amp_is_recognized_in_every_spelling(
    backend: str, name: str, precision: str, section: dict[str, Any]
) -> None:
    m = accelerate(
        distributed_type="DEEPSPEED", mixed_precision=precision, deepspeed_config=section,
        fp8_config={backend: name},
    )  # fmt: skip
    assert not m.undecided and "fsdp" not in m.out["model"]
    assert m.out["model"]["optim"] == {
        "fp8_opt_level": "O2", "name": "distributed_fused_adam",
        "data_parallel_sharding_strategy": "optim_grads",
    }  # fmt: skip


def test_deepspeed_without_a_stage_has_accelerates_default(tmp_path: Path) -> None:
    """Accelerate's DeepSpeedPlugin takes stage 2 where nothing gives one."""
    section = {"gradient_accumulation_steps": "4", "deepspeed_multinode_launcher": "standard"}
    m = accelerate(distributed_type="DEEPSPEED", deepspeed_config=section)
    assert not m.undecided
    assert "deepspeed_config.zero_stage" in keys_of(m.changes)
    assert "deepspeed_config.zero_stage (Accelerate's default)" in m.report()
    spec = run_spec(**write(tmp_path, m))
    assert spec.parallel.fsdp is not None and spec.parallel.fsdp.strategy == "grad"
    assert spec.train.global_batch_size == 4 * 2 * spec.train.micro_batch_size
    plain = accelerate(distributed_type="DEEPSPEED", deepspeed_config=section | {"zero_stage": 0})
    assert "fsdp" not in plain.out["model"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_stage", 4), ("zero_stage", [2]), ("zero_stage", {"a": 1}),
        ("offload_param_device", "cpu"), ("deepspeed_config_file", "ds.json"),
        ("gradient_accumulation_steps", 0), ("zero_stages", 1),
    ],
)  # fmt: skip
def test_what_deepspeed_asks_and_cannot_be_had(key: str, value: object) -> None:
    m = accelerate(distributed_type="DEEPSPEED", deepspeed_config={key: value})
    assert keys_of(m.undecided) == {f"deepspeed_config.{key}"}


def test_megatrons_section(tmp_path: Path) -> None:
    section = {
        "gradient_clipping": 0.7, "num_micro_batches": 2, "pp_degree": 2, "tp_degree": 2,
        "recompute_activations": True, "sequence_parallelism": True,
        "use_distributed_optimizer": True,
    }  # fmt: skip
    section = {f"megatron_lm_{key}": value for key, value in section.items()}
    m = accelerate(distributed_type="MEGATRON_LM", num_processes=8, megatron_lm_config=section)
    assert not m.undecided
    spec = run_spec(**write(tmp_path, m))
    parallel = spec.parallel
    assert (parallel.tp, parallel.pp, parallel.dp) == (2, 2, 2) and parallel.sequence_parallel
    assert spec.optim.shards_states and spec.optim.clip_grad_norm == 0.7
    assert spec.model.recompute is not None and spec.model.recompute.granularity == "selective"
    assert spec.train.num_microbatches(parallel.dp) == 2


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [({"tp_size": 2}, None), ({"dp_shard_size": 4}, "full"),
     ({"dp_replicate_size": 2, "dp_shard_size": 4}, "hybrid")],
)  # fmt: skip
def test_parallel_sizes(sizes: dict[str, int], strategy: str | None, tmp_path: Path) -> None:
    section = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    ranks = 8 if "dp_replicate_size" in sizes else 4
    m = accelerate(
        num_processes=ranks, num_machines=ranks // 4, parallelism_config=section,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    assert not m.undecided
    spec = run_spec(**write(tmp_path, m))
    assert spec.parallel.tp == sizes.get("tp_size", 1)
    fsdp = None if spec.parallel.fsdp is None else spec.parallel.fsdp.strategy
    assert fsdp == strategy


def test_regional_compilation(tmp_path: Path) -> None:
    section = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune",
               "dynamo_use_regional_compilation": True}  # fmt: skip
    m = accelerate(dynamo_config=section)
    assert not m.undecided and run_spec(**write(tmp_path, m)).train.compile == "block"
    assert keys_of(m.inert) >= {"dynamo_config.dynamo_mode"}
    off = accelerate(dynamo_config={"dynamo_backend": "NO", "dynamo_use_dynamic": True})
    assert not off.undecided and "compile" not in off.out.get("model", {})
    other = accelerate(dynamo_config={"dynamo_backend": "TENSORRT"})
    assert keys_of(other.undecided) == {"dynamo_config.dynamo_backend"}


def test_ms_amp_on_several_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8-LM's levels run on replicas; under FSDP, which they cannot have, the user chooses."""
    file = tmp_path / "acc.yaml"
    ranks = "mixed_precision: fp8\nnum_processes: 2\nfp8_config: {backend: MSAMP}\n"
    file.write_text(ranks)
    assert main([str(file)]) == 0
    assert "model.optim.fp8_opt_level=O2" in capsys.readouterr().out
    file.write_text(f"{ranks}distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2}}\n")
    assert main([str(file), "-o", str(tmp_path / "fsdp.yaml")]) == 2
    out = capsys.readouterr().out
    assert not out.startswith("must be decided: nothing")
    assert "model.optim.fp8_opt_level=O2" in out


ACCELERATES = st.sampled_from(
    ["distributed_type", "num_processes", "num_machines", "gradient_accumulation_steps", "gpu_ids",
     "use_cpu", "fsdp_config", "deepspeed_config", "megatron_lm_config", "dynamo_config",
     "parallelism_config", "fp8_config", "backend", "zero_stage", "gradient_clipping", "version",
     "sharding_strategy", "offload_params", "tp_degree", "num_micro_batches", "tp_size",
     "dp_replicate_size", "dp_shard_size", "mode"]
)  # fmt: skip
VALUES_OF_ACCELERATE = st.recursive(
    st.one_of(st.sampled_from(["FSDP", "DEEPSPEED", "8", 0, 1, 2, 4]), LEAVES),
    lambda inner: st.one_of(
        st.dictionaries(ACCELERATES, inner, max_size=4), st.lists(inner, max_size=2)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.dictionaries(ACCELERATES, VALUES_OF_ACCELERATE, max_size=5))
def test_any_file_of_accelerate_names_each_of_its_keys(tree: dict[str, Any]) -> None:
    m = migrate(yaml.safe_dump({"mixed_precision": "bf16", **tree}), "x.yaml")
    assert isinstance(yaml.safe_load(m.text("x.yaml")), dict)
    sections = {key for key, value in tree.items() if key.endswith("_config") and value}
    named = keys_of([*m.undecided, *m.translated, *m.inert])
    assert set(tree) - sections <= named | {"fp8_config"}
