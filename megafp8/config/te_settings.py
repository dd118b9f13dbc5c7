"""Name the settings that a spec stands for, so that the table of `te_layers` can judge the spec."""

from __future__ import annotations

from typing import Any

from megafp8.config.architecture import tree_of_spec
from megafp8.config.precision_changes import SCHEDULE, written
from megafp8.config.values import STATES
from megafp8.specs import Fp8Recipe, GPTSpec, RunSpec, StorageSpec
from megafp8.specs.precision import GEMMS
from megafp8.specs.recipes import find_recipe

_PRECISIONS = {"bf16": "bf16", "fp16": 16, "fp32": 32}


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Return the settings that `te_layers` reads, as they follow from a spec.

    A program may have made the spec itself, so that its `resolved` settings may be empty.
    """
    precision, parallel, attention = spec.precision, spec.parallel, spec.precision.attention_in_fp8
    return {
        **_of_model(spec.model),
        **({"model.fp8": False} if precision.fp8 is None else of_recipe(precision.fp8)),
        SCHEDULE: [written(c) for phase in precision.schedule for c in phase.changes],
        **_of_storage(spec.optim.storage),
        "trainer.precision": _PRECISIONS[precision.compute],
        "model.megatron_amp_O2": precision.half_weights,
        "model.te_version": precision.te_version,
        "model.fp8_dot_product_attention": attention != "none",
        "model.fp8_multi_head_attention": attention == "whole",
        "model.ub_tp_comm_overlap": precision.user_buffers,
        "model.data.reset_attention_mask": spec.data.reset_attention_mask,
        "model.data.reset_position_ids": spec.data.reset_position_ids,
        "model.micro_batch_size": spec.train.micro_batch_size,
        "model.sequence_parallel": parallel.sequence_parallel,
        "model.fsdp": parallel.fsdp is not None,
        "model.compile": spec.train.compile,
        "model.enable_cuda_graph": spec.train.cuda_graph,
        "model.context_parallel_size": parallel.cp,
        "model.pipeline_model_parallel_size": parallel.pp,
        "model.pipeline_schedule": parallel.pipeline.schedule,
        "model.virtual_pipeline_model_parallel_size": parallel.pipeline.stages_per_rank,
    }


def _of_model(spec: GPTSpec) -> dict[str, Any]:
    tree = tree_of_spec(spec) | {
        "apply_query_key_layer_scaling": spec.apply_query_key_layer_scaling,
        "fp32_residual_connection": spec.fp32_residual_connection,
        "ffn_dropout": spec.ffn_dropout,
    }
    return {f"model.{key}": value for key, value in tree.items()}


def of_recipe(recipe: Fp8Recipe) -> dict[str, Any]:
    """Return the settings of an FP8 recipe. Rules about layers are among those about linears."""
    high = recipe.high_precision_gemms
    in_wgrad = high == {"grad_weight"}  # that product alone has a key of its own
    return {
        "model.fp8": True,
        "model.fp8_recipe": recipe.name,
        "model.fp8_interval": recipe.interval,
        "model.fp8_power_2_scale": recipe.power_2_scale,
        "model.fp8_wgrad": not in_wgrad,
        "model.override_linear_precision": [gemm in high and not in_wgrad for gemm in GEMMS],
        "model.fp8_split_accumulator": [gemm not in recipe.fast_accumulation for gemm in GEMMS],
        "model.fp4_disable_rht": find_recipe(recipe.name).traits.input.rotation is None,
        "model.pad_inner_dim": recipe.pad_inner_dim,
        "model.fp8_modules": [f"{rule.pattern}:{rule.precision}" for rule in recipe.modules],
        "model.first_last_layers_bf16": False,
        "model.num_layers_at_start_in_bf16": 0,
        "model.num_layers_at_end_in_bf16": 0,
    }


def _of_storage(storage: StorageSpec) -> dict[str, Any]:
    dtypes = {f"model.optim.{part}_dtype": getattr(storage, part) for part in STATES}
    return {"model.optim.fp8_opt_level": "O0", **dtypes}
