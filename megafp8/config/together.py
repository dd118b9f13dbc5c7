"""List the settings that exclude each other, as a table.

In each row, `excludes` is refused if all conditions of `when` hold. `unproven` marks pairs that are
refused only because no test proves them right yet; such a row is deleted when a test does. Rules
that depend on sizes are in `checks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megafp8.config.keys import Values
from megafp8.config.rules import Finding
from megafp8.config.values import compute_dtypes, recipes_in, schedule_of, storage_of
from megafp8.specs.parallel import ZERO_BUBBLE_SCHEDULES
from megafp8.specs.precision import RECIPES

UNPROVEN = True
NATIVE = "or use model.fp8_backend=native, which has no such limit"


class Condition(NamedTuple):
    """Define a condition on a setting that is more than equality with one value."""

    text: str  # is written after the key, as `=te or torchao`
    holds: Callable[[Any, Values], bool]  # the arguments are the key's value and all values
    reads: tuple[str, ...] = ()  # the other keys that `holds` reads


class Row(NamedTuple):
    """Describe a combination of settings that is refused.

    Attributes:
        when: Keys with their values or conditions; the row applies if all of them hold.
        excludes: The key that is then refused, with its value or condition.
        reason: Why. `{model.a}` stands for the setting of that key, as `model.a=True`.
        hint: What to do instead.
        unproven: Whether the only reason is that no test proves the combination right.
    """

    when: Mapping[str, Any]
    excludes: Mapping[str, Any]
    reason: str
    hint: str
    unproven: bool = False


def one_of(*values: object) -> Condition:
    """Return the condition that the value is one of several."""
    return Condition(f"={' or '.join(map(str, values))}", lambda value, _: value in values)


def not_(good: object) -> Condition:
    """Return the condition that the value is not `good`."""
    return Condition(f" other than {good}", lambda value, _: value != good)


def above(low: int) -> Condition:
    """Return the condition that the value is above a number."""
    return Condition(f" above {low}", lambda value, _: value > low)


def given() -> Condition:
    """Return the condition that the value is neither False, null nor 0."""
    return Condition(" given", lambda value, _: bool(value))


def some_recipe(*names: str) -> Condition:
    """Return the condition that some linear has one of the recipes."""
    return Condition(
        f"={' or '.join(names)} for some linear",
        lambda _, values: bool(recipes_in(values) & set(names)),
        ("model.fp8_modules",),
    )


def _below_fp32(*parts: str) -> Callable[[Any, Values], bool]:
    return lambda _, values: any(storage_of(values)[part] != "fp32" for part in parts)


FP16 = Condition("=16", lambda _, values: compute_dtypes(values) == (16,))
_DTYPES = ("main_grads", "main_params", "exp_avg", "exp_avg_sq")
_DTYPE_KEYS = tuple(f"model.optim.{part}_dtype" for part in _DTYPES)
FEW_BITS = Condition(
    " above O0, or states below fp32 by keys of their own", _below_fp32(*_DTYPES), _DTYPE_KEYS
)
FP8_GRADS = Condition("=fp8", _below_fp32("main_grads"), ("model.optim.fp8_opt_level",))
FEW_PARAMS = Condition(" below fp32", _below_fp32("main_params"), ("model.optim.fp8_opt_level",))
FP32 = Condition("=32", lambda _, values: compute_dtypes(values) == (32,))
HALF = Condition("=bf16 or 16", lambda _, values: compute_dtypes(values) != (32,))
ZERO_BUBBLE = Condition(
    f"={' or '.join(ZERO_BUBBLE_SCHEDULES)}",
    lambda _, values: schedule_of(values) in ZERO_BUBBLE_SCHEDULES,
    ("model.virtual_pipeline_model_parallel_size",),
)
SEVERAL_SCALES = tuple(name for name in RECIPES if name not in ("delayed", "tensorwise"))

BACKEND, RECIPE, COMPILE = "model.fp8_backend", "model.fp8_recipe", "model.compile"
TP, CP = "model.tensor_model_parallel_size", "model.context_parallel_size"
SP, PP = "model.sequence_parallel", "model.pipeline_model_parallel_size"
FSDP, GATHER = "model.fsdp", "model.enable_fsdp_float8_all_gather"
FP8_ATTENTION = "model.fp8_dot_product_attention"
GRAPH = "model.enable_cuda_graph"
HEALTH, PARAMS = "model.fp8_health", "model.fp8_params"
LEVEL = "model.optim.fp8_opt_level"
OPTIMIZER, PRECISION = "model.optim.name", "trainer.precision"
SAVES = "exp_manager.checkpoint_callback_params"
NO_FSDP = f"or leave {FSDP} out"
ALL_IN_FP8 = (
    "Transformer Engine's layers run all products in FP8; they ignore this setting, or fail in the "
    "first forward pass"
)
NO_GRAPH = f"or leave {GRAPH} out"
DRAWN = (
    "the host seeds torch's generator for each mask of dropout, and a graph would draw one mask "
    "again and again"
)
CAPTURED = "messages between ranks inside a graph have not been shown to be right"
NO_LEVEL = "leave model.optim.fp8_opt_level and the model.optim.*_dtype keys out"
IN_FEW_BITS = "gradients, weights and moments in few bits (FP8-LM) have been built for"
OUTSIDE_FP16 = "weights that were sent in FP8 can be outside FP16's range"

TOGETHER = (
    # --- FP8 -----------------------------------------------------------------------------------
    Row(
        {"model.transformer_engine": False}, {"model.fp8": True},
        "needs model.transformer_engine=True, since FP8 layers are defined as in Transformer "
        "Engine",
        "Set model.transformer_engine=True (the package itself need not be installed), or "
        "model.fp8=False",
    ),
    Row(
        {RECIPE: some_recipe("blockwise")}, {"model.pad_inner_dim": True},
        "blockwise scaling needs sizes that are whole blocks, and does not pad",
        "Leave it out, or use another model.fp8_recipe",
    ),
    # --- Transformer Engine --------------------------------------------------------------------
    Row(
        {"model.transformer_engine": False}, {BACKEND: "te"},
        "{model.transformer_engine} rules Transformer Engine out",
        f"Set model.transformer_engine=True, {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.fp8_interval": not_(1)},
        "Transformer Engine computes new scales at every update",
        f"Use model.fp8_interval=1, {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.pad_inner_dim": True},
        "Transformer Engine's layers do not pad",
        f"Leave it out, or use model.fp8_backend=torchao, {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.ffn_dropout": above(0)},
        "Transformer Engine's layer has no dropout inside the MLP",
        f"Use model.ffn_dropout=0, {NATIVE}",
    ),
    *(
        Row({BACKEND: "te"}, {key: test}, ALL_IN_FP8, f"Leave it out, {NATIVE}")
        for key, test in (("model.fp8_wgrad", False),
                          ("model.override_linear_precision", not_([False, False, False])))
    ),
    Row(
        {BACKEND: "te"}, {COMPILE: not_("off")},
        "Transformer Engine's layers are not compiled: they call its own kernels",
        f"Use model.compile=off. {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.data.reset_attention_mask": True},
        "Transformer Engine's layers attend over whole samples, across the ends of documents",
        f"Leave it out, {NATIVE}",
    ),
    Row(
        {BACKEND: "te", RECIPE: "delayed"}, {HEALTH: "full"},
        "Transformer Engine does not expose its casts, and keeps amaxes and scales for "
        "model.fp8_recipe=delayed only",
        f"Use model.fp8_health=scales, {NATIVE}",
    ),
    Row(
        {BACKEND: "te", RECIPE: not_("delayed")}, {HEALTH: one_of("scales", "full")},
        "Transformer Engine does not expose its casts, and keeps amaxes and scales for "
        "model.fp8_recipe=delayed only; this run has {model.fp8_recipe}",
        f"Use model.fp8_health=auto or off, {NATIVE}",
    ),
    Row(
        {PP: above(1), "model.pipeline_schedule": ZERO_BUBBLE}, {BACKEND: "te"},
        "Transformer Engine's layers compute both gradients at once, and "
        "{model.pipeline_schedule} needs them one after the other",
        "Use model.fp8_backend=native, or model.pipeline_schedule=1F1B",
    ),
    # --- torchao -------------------------------------------------------------------------------
    Row(
        {"model.fp8": False}, {BACKEND: "torchao"},
        "torchao's layers run in FP8 only",
        f"Set model.fp8=True, {NATIVE}",
    ),
    Row(
        {BACKEND: "torchao"}, {PARAMS: True},
        "torchao keeps weights in high precision",
        f"Leave it out, {NATIVE}",
    ),
    Row(
        {BACKEND: "torchao"}, {TP: above(1)},
        "torchao's linears are not tensor-parallel in megafp8",
        f"Use model.tensor_model_parallel_size=1, {NATIVE}",
    ),
    Row(
        {BACKEND: "torchao"}, {SP: True},
        "{model.fp8_backend} is not tensor-parallel",
        f"Use model.fp8_backend=native or te, or leave {SP} out",
    ),
    Row(
        {BACKEND: "torchao", COMPILE: not_("off")}, {HEALTH: one_of("scales", "full")},
        "torchao's casts are inside the compiled graph, where they cannot be measured",
        "Use model.fp8_health=auto or off, or leave model.compile out",
    ),
    Row(
        {PP: above(1), "model.pipeline_schedule": ZERO_BUBBLE}, {BACKEND: "torchao"},
        "torchao's linear computes both gradients at once, and {model.pipeline_schedule} needs "
        "them one after the other",
        "Use model.fp8_backend=native, or model.pipeline_schedule=1F1B",
    ),
    Row(
        {BACKEND: not_("te")}, {"model.te_version": not_(None)},
        "chooses the version of Transformer Engine, which {model.fp8_backend} does not use",
        "Leave it out, or use model.fp8_backend=te",
    ),
    Row(
        {BACKEND: not_("torchao")}, {GATHER: True},
        "applies to torchao's linears, which {model.fp8_backend} does not use",
        "Leave it out; model.fp8_backend=native gathers FP8 with model.fp8_params=True",
    ),
    Row(
        {BACKEND: "torchao", FSDP: False}, {GATHER: True},
        "without model.fsdp=True no weights are gathered",
        "Leave it out",
    ),
    Row(
        {BACKEND: "torchao", FSDP: True, RECIPE: some_recipe("rowwise", "rowwise_with_gw_hp")},
        {GATHER: True},
        "a weight that is gathered from parts has one scale, and {model.fp8_recipe} needs several",
        "Use model.fp8_recipe=tensorwise, or leave it out",
    ),
    Row(
        {BACKEND: "torchao", FSDP: True, PRECISION: FP16}, {GATHER: True},
        OUTSIDE_FP16,
        "Use trainer.precision=bf16, or leave it out",
    ),
    # --- sequence and context parallelism ------------------------------------------------------
    Row(
        {"model.fp8": True, RECIPE: some_recipe(*SEVERAL_SCALES)}, {SP: True},
        "gathers tensors that have one scale each, and {model.fp8_recipe} has several",
        f"Leave {SP} out, or use model.fp8_recipe=delayed or tensorwise",
    ),
    Row(
        {SP: True}, {"model.reduce_amax": False},
        f"each rank would have its own scales, and {SP}=True gathers tensors with a common one",
        "Leave it out (True)",
    ),
    Row(
        {"model.data.reset_attention_mask": True}, {CP: above(1)},
        "keys and values are sent between ranks without the ends of their documents, which "
        "{model.data.reset_attention_mask} needs",
        f"Use {CP}=1, or leave model.data.reset_attention_mask out",
    ),
    Row(
        {"model.position_embedding_type": "alibi"}, {CP: above(1)},
        "{model.position_embedding_type} needs the positions of queries and keys, and keys are "
        "sent between ranks without theirs",
        f"Use model.position_embedding_type=rope, or {CP}=1",
    ),
    Row(
        {FP8_ATTENTION: True}, {RECIPE: not_("delayed")},
        "Transformer Engine has no FP8 attention for blockwise, and for tensorwise it gives the "
        "scores delayed scales, whose rule no setting describes",
        f"Use {RECIPE}=delayed, or leave {FP8_ATTENTION} out",
    ),
    Row(
        {FP8_ATTENTION: True}, {PRECISION: FP32},
        "cuDNN's attention in FP8 hands over tensors in BF16 or FP16",
        f"Use {PRECISION}=bf16, or leave {FP8_ATTENTION} out",
    ),
    Row(
        {"model.position_embedding_type": "rope"}, {"model.fp8_multi_head_attention": True},
        "changes nothing, as Transformer Engine rotates queries and keys in high precision",
        f"Leave it out: {FP8_ATTENTION}=True computes the products of attention in FP8",
    ),
    Row(
        {BACKEND: "te"}, {CP: above(1)},
        "Transformer Engine's context parallelism needs cuDNN's or flash attention, which the "
        "kernels on a CPU do not have, so that nothing has shown it to be right",
        f"Use model.fp8_backend=native, or use {CP}=1",
    ),
    Row(
        {BACKEND: "torchao"}, {CP: above(1)},
        "the layers of {model.fp8_backend} do not support it in megafp8",
        f"Use model.fp8_backend=native, or use {CP}=1",
    ),
    Row(
        {COMPILE: not_("off")}, {CP: above(1)},
        "keys and values are sent inside attention, and torch 2.13 compiles no such messages: they "
        "break each layer into many graphs",
        f"Use model.compile=off, or use {CP}=1",
    ),
    # --- FSDP ----------------------------------------------------------------------------------
    Row(
        {PP: above(1)}, {FSDP: True},
        "each pipeline stage would gather its weights again for every microbatch, which is not "
        "implemented",
        f"Use model.optim.name=distributed_fused_adam with pipelines, {NO_FSDP}",
    ),
    Row(
        {FSDP: True, PRECISION: HALF}, {"model.megatron_amp_O2": False},
        "keeps weights in FP32, and FSDP gathers all weights in one dtype",
        f"Leave it out (True), {NO_FSDP}",
    ),
    Row(
        {FSDP: True, PRECISION: FP16}, {PARAMS: True},
        OUTSIDE_FP16,
        f"Use trainer.precision=bf16, leave it out, {NO_FSDP}",
    ),
    Row(
        {FSDP: True, RECIPE: some_recipe("blockwise")}, {PARAMS: True},
        f"with {FSDP}=True ranks agree on one scale for each weight, and blockwise has many",
        f"Use model.fp8_recipe=delayed or tensorwise, leave it out, {NO_FSDP}",
    ),
    Row(
        {
            OPTIMIZER: "distributed_fused_adam",
            BACKEND: not_("te"),
            RECIPE: some_recipe("blockwise"),
        },
        {PARAMS: True},
        "with {model.optim.name} ranks agree on one scale for each weight, and blockwise has many",
        "Use model.fp8_recipe=delayed or tensorwise, leave it out, or use "
        "model.optim.name=fused_adam or model.fp8_backend=te",
    ),
    Row(
        {FSDP: True}, {OPTIMIZER: "distributed_fused_adam"},
        f"{FSDP}=True shards the optimizer's states already",
        f"Use model.optim.name=fused_adam, {NO_FSDP}",
    ),
    # --- CUDA graphs ---------------------------------------------------------------------------
    *(
        Row({GRAPH: True}, {key: above(0)}, DRAWN, f"Use {key}=0, {NO_GRAPH}")
        for key in ("model.hidden_dropout", "model.attention_dropout", "model.ffn_dropout")
    ),
    Row(
        {GRAPH: True}, {PRECISION: FP16},
        "FP16's loss scale is a number of the host, and a graph would keep the captured one",
        f"Use trainer.precision=bf16, {NO_GRAPH}",
    ),
    Row(
        {GRAPH: True}, {"model.position_embedding_type": "alibi"},
        "each pass copies ALiBi's slopes from the host, which a graph cannot capture",
        f"Use model.position_embedding_type=rope, {NO_GRAPH}",
    ),
    Row(
        {GRAPH: True}, {FSDP: True},
        "FSDP gathers weights into new memory for each use, and a graph reads fixed addresses",
        f"Use model.optim.name=distributed_fused_adam, {NO_GRAPH}",
    ),
    Row(
        {GRAPH: True}, {PP: above(1)},
        "a graph holds both passes of one microbatch, and a pipeline has several in flight",
        f"Use {PP}=1, {NO_GRAPH}",
    ),
    *(
        Row({GRAPH: True}, {key: above(1)}, CAPTURED, f"Use {key}=1, {NO_GRAPH}", UNPROVEN)
        for key in (TP, CP)
    ),
    *(
        Row({GRAPH: True}, {key: test}, f"{what} not been shown to be right in a graph",
            f"{instead}, {NO_GRAPH}", UNPROVEN)
        for key, test, what, instead in (
            (BACKEND, one_of("te", "torchao"), "the layers of {model.fp8_backend} have",
             "Use model.fp8_backend=native"),
            (COMPILE, not_("off"), "layers that torch compiles have", "Use model.compile=off"),
            (LEVEL, FEW_BITS, "sums of gradients in few bits (FP8-LM) have",
             "Leave model.optim.fp8_opt_level and the model.optim.*_dtype keys out"),
        )
    ),
    # --- FP8-LM: gradients, master weights and moments in few bits -----------------------------
    Row(
        {LEVEL: FEW_BITS}, {FSDP: True},
        f"{IN_FEW_BITS} whole tensors, and FSDP shards FP32 ones",
        "Use model.optim.name=distributed_fused_adam, which shards such states (ZeRO-1), with "
        f"model.optim.data_parallel_sharding_strategy=optim_grads gradients too, or {NO_LEVEL}",
    ),
    Row(
        {LEVEL: FEW_BITS}, {BACKEND: "torchao"},
        f"{IN_FEW_BITS} our own linears and Transformer Engine's; those of {{model.fp8_backend}} "
        "have not been shown to be right with it",
        f"Use model.fp8_backend=native or te, or {NO_LEVEL}",
        UNPROVEN,
    ),
    Row(
        {LEVEL: FEW_BITS, BACKEND: "te"}, {"model.ub_tp_comm_overlap": True},
        "{model.ub_tp_comm_overlap} has not been shown to be right with states in few bits",
        f"Leave it out, or {NO_LEVEL}",
        UNPROVEN,
    ),
    Row(
        {"model.optim.main_params_dtype": FEW_PARAMS}, {COMPILE: not_("off")},
        "{model.compile} has not been shown to be right with weights that are stored in few bits",
        "Use model.compile=off, or model.optim.main_params_dtype=fp32",
        UNPROVEN,
    ),
    Row(
        {"model.optim.main_grads_sum_dtype": "fp32"},
        {"model.optim.data_parallel_sharding_strategy": "optim_grads"},
        "sums in FP32 are whole on each rank until a step ends, so that no gradient can be freed",
        "Leave model.optim.main_grads_sum_dtype out (fp8), or use "
        "model.optim.data_parallel_sharding_strategy=optim",
    ),
    Row(
        {"model.optim.moments_scaling": "group"},
        {"model.optim.shard_by": one_of("elements", "auto")},
        "a rank's elements would begin inside a group of a moment, apart from its range",
        "Use model.optim.shard_by=tensors, or model.optim.moments_scaling=tensor",
    ),
    Row(
        {LEVEL: one_of("O1", "O2")}, {PARAMS: True},
        "{model.optim.fp8_opt_level} keeps a linear's weight once, in FP16",
        "Leave it out, or use model.optim.fp8_opt_level=O3, which keeps weights in FP8",
    ),
    Row(
        {RECIPE: some_recipe("rowwise", "rowwise_with_gw_hp")}, {LEVEL: "O3"},
        "O3 keeps weights in FP8 once, and {model.fp8_recipe} quantizes a weight once for each of "
        "its two products",
        "Use model.optim.fp8_opt_level=O2, or model.fp8_recipe=delayed, tensorwise or blockwise",
    ),
    Row(
        {"model.override_linear_precision": Condition(
            " with a product of the weight", lambda value, _: any((value or [])[:2])
        )},
        {LEVEL: "O3"},
        "O3 keeps weights in FP8, and {model.override_linear_precision} asks for products with "
        "weights in high precision",
        "Use model.optim.fp8_opt_level=O2, or leave one of the two out",
    ),
    Row(
        {"model.optim.main_grads_dtype": FP8_GRADS}, {"trainer.gradient_clip_algorithm": "value"},
        "gradients in FP8 are clipped by their scale, which multiplies all elements alike",
        "Use trainer.gradient_clip_algorithm=norm, or model.optim.main_grads_dtype=fp32",
    ),
    # --- a run's length, checkpoints and restarts ----------------------------------------------
    Row(
        {"exp_manager.resume_if_exists": False}, {"trainer.max_restarts": above(0)},
        "a restart continues the run, which {exp_manager.resume_if_exists} rules out",
        "Leave one of the two out",
    ),
    Row(
        {f"{SAVES}.save_top_k": given(), f"{SAVES}.monitor": "val_loss"},
        {"trainer.limit_val_batches": 0},
        f"{{{SAVES}.save_top_k}} ranks checkpoints by the validation loss, and there would be none",
        f"Set {SAVES}.monitor=reduced_train_loss or save_top_k=0, or validate on 1 batch or more",
    ),
    Row(
        {
            "exp_manager.create_checkpoint_callback": True,
            f"{SAVES}.every_n_train_steps": None,
            f"{SAVES}.train_time_interval": None,
        },
        {f"{SAVES}.async_save": True},
        "only periodic checkpoints are written in the background, and there are none",
        f"Set {SAVES}.every_n_train_steps or {SAVES}.train_time_interval, or leave it out",
    ),
)  # fmt: skip


def condition_text(key: str, test: Any) -> str:
    """Return a key and its value or condition as a text: `model.fp8_backend=te`."""
    if isinstance(test, Condition):
        return f"{key}{test.text}"
    return f"{key}={'null' if test is None else test}"


def findings(values: Values) -> Iterator[Finding]:
    """Yield what the table refuses. A row is skipped if a key that it reads is not in `values`."""
    for row in TOGETHER:
        tests = {**row.when, **row.excludes}
        if all(_holds(key, test, values) for key, test in tests.items()):
            (key,) = row.excludes
            reason = re.sub(r"\{([\w.]+)\}", lambda m: f"{m[1]}={values[m[1]]}", row.reason)
            yield Finding(key, reason, row.hint)


def _holds(key: str, test: Any, values: Values) -> bool:
    reads = (key, *test.reads) if isinstance(test, Condition) else (key,)
    if any(path not in values for path in reads):
        return False
    return test.holds(values[key], values) if isinstance(test, Condition) else values[key] == test
