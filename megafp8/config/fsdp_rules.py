"""Rules across keys of FSDP."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.parallel_rules import SIZES, model_ranks
from megafp8.config.rules import Finding, Rules, Values
from megafp8.config.schema import all_keys
from megafp8.config.values import PRECISIONS

rule = Rules()

KEY = "model.fsdp"
STRATEGY = "model.fsdp_sharding_strategy"
REDUCE_DTYPE = "model.fsdp_grad_reduce_dtype"
_CHUNK = "model.grad_allreduce_chunk_size_mb"
_LEAVE = f"or leave {KEY} out"


@rule(KEY, STRATEGY, REDUCE_DTYPE)
def _no_fsdp_no_details(v: Values) -> Iterator[Finding]:
    for key, default in ((STRATEGY, "full"), (REDUCE_DTYPE, 32)):
        is_default = v[key] == default or PRECISIONS.get(v[key]) == PRECISIONS.get(default, "")
        if not v[KEY] and not is_default:
            yield Finding(key, f"means nothing without {KEY}=True", "Set it, or leave this out")


@rule(KEY, STRATEGY, "trainer.devices", "trainer.num_nodes", *SIZES)
def _replicas_share(v: Values) -> Iterator[Finding]:
    nodes, devices, size = v["trainer.num_nodes"], v["trainer.devices"], model_ranks(v)
    if not v[KEY] or devices * nodes % size:
        return
    if devices * nodes == size:
        yield Finding(
            KEY,
            "there is one replica, and nobody to share parameters with",
            f"Use more trainer.devices, {_LEAVE}",
        )
    elif v[STRATEGY] == "hybrid" and (nodes == 1 or devices == size):
        other = "one node: hybrid is full there" if nodes == 1 else "one replica on each node"
        yield Finding(STRATEGY, f"there is {other}", f"Use {STRATEGY}=full")
    elif v[STRATEGY] == "hybrid" and devices % size:
        yield Finding(
            STRATEGY,
            f"replicas of {size} ranks do not fit into nodes of {devices}",
            f"Use {STRATEGY}=full",
        )


@rule(KEY, "model.pipeline_model_parallel_size")
def _stages_are_not_sharded(v: Values) -> Iterator[Finding]:
    if v[KEY] and v["model.pipeline_model_parallel_size"] > 1:
        yield Finding(
            KEY,
            "pipeline stages would gather their weights for every microbatch; that is not built",
            f"Use model.optim.name=distributed_fused_adam with pipelines, {_LEAVE}",
        )


rule.excludes(
    KEY,
    "model.fp8_backend",
    ("native", "torchao", "auto"),
    "has layers that have not been shown to be right with gathered weights",
    f"leave {KEY} out",
)
rule.excludes(
    KEY,
    "model.compile",
    ("off",),
    "has not been shown to be right with it",
    f"leave {KEY} out",
)


@rule(KEY, "model.megatron_amp_O2", "trainer.precision")
def _weights_have_one_dtype(v: Values) -> Iterator[Finding]:
    is_half = PRECISIONS[v["trainer.precision"]] != "fp32"
    if v[KEY] and is_half and not v["model.megatron_amp_O2"]:
        yield Finding(
            "model.megatron_amp_O2",
            "False keeps weights in FP32, and FSDP gathers them in one dtype",
            f"Leave it out (True), {_LEAVE}",
        )


@rule(KEY, "model.fp8", "model.fp8_params", "trainer.precision")
def _fp8_bytes_are_put_down_exactly(v: Values) -> Iterator[Finding]:
    is_fp16 = PRECISIONS[v["trainer.precision"]] == "fp16"
    if v[KEY] and v["model.fp8"] and v["model.fp8_params"] and is_fp16:
        yield Finding(
            "model.fp8_params",
            "weights that have crossed in FP8 do not all fit into FP16's range",
            f"Use trainer.precision=bf16, leave it out, {_LEAVE}",
        )


@rule(
    KEY,
    "model.optim.name",
    "model.optim.grad_sync_dtype",
    _CHUNK,
)
def _fsdp_shards_states(v: Values) -> Iterator[Finding]:
    if v[KEY] and v["model.optim.name"] == "distributed_fused_adam":
        yield Finding(
            "model.optim.name",
            f"{KEY}=True shares the optimizer's states out already",
            f"Use model.optim.name=fused_adam, {_LEAVE}",
        )
    if v[KEY] and v[_CHUNK] != all_keys()[_CHUNK].default:
        yield Finding(
            _CHUNK,
            "FSDP sums the gradients of a block at once",
            "Leave it out",
        )
    if v[KEY] and v["model.optim.grad_sync_dtype"] != "fp32":
        yield Finding(
            "model.optim.grad_sync_dtype", "FSDP sums the gradients", f"Use {REDUCE_DTYPE}"
        )
