"""What does not go together: a table. Where all of `when` holds, `excludes` is refused.

`unproven` marks what nobody has shown to be right yet: a gap of the tests, not of the mathematics.
Such a row goes when a test proves the pair. What depends on sizes is in `checks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megafp8.config.keys import Values
from megafp8.config.rules import Finding
from megafp8.config.values import compute_dtypes, recipes_in, schedule_of
from megafp8.specs.parallel import ZERO_BUBBLE_SCHEDULES
from megafp8.specs.precision import RECIPES

UNPROVEN = True

NATIVE = "model.fp8_backend=native is our own engine, on any device"


class Condition(NamedTuple):
    """A condition on a setting that is not equality with one value."""

    text: str  # follows the key, as `=te or torchao`
    holds: Callable[[Any, Values], bool]  # of the key's own value and all values
    reads: tuple[str, ...] = ()  # further keys


class Row(NamedTuple):
    """One pair that is refused.

    Attributes:
        when: Keys with the values, or tests, that all hold.
        excludes: The key that is then refused, with its value or test.
        reason: Why. `{model.a}` stands for the setting of that key, as `model.a=True`.
        hint: What to do instead.
        unproven: Whether the only reason is that nobody has shown the pair to be right.
    """

    when: Mapping[str, Any]
    excludes: Mapping[str, Any]
    reason: str
    hint: str
    unproven: bool = False


def one_of(*values: object) -> Condition:
    """Return whether the value is one of several."""
    return Condition(f"={' or '.join(map(str, values))}", lambda value, _: value in values)


def not_(good: object) -> Condition:
    """Return whether the value is any other than one."""
    return Condition(f" other than {good}", lambda value, _: value != good)


def above(low: int) -> Condition:
    """Return whether the value is above a number."""
    return Condition(f" above {low}", lambda value, _: value > low)


def given() -> Condition:
    """Return whether the value is on, or anything but null and 0."""
    return Condition(" given", lambda value, _: bool(value))


def some_recipe(*names: str) -> Condition:
    """Return whether some linear runs under one of the recipes."""
    return Condition(
        f"={' or '.join(names)} for some linear",
        lambda _, values: bool(recipes_in(values) & set(names)),
        ("model.fp8_modules",),
    )


def _fp16(_: Any, values: Values) -> bool:
    return compute_dtypes(values) == (16,)


FP16 = Condition("=16", _fp16)
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
HEALTH, PARAMS = "model.fp8_health", "model.fp8_params"
OPTIMIZER, PRECISION = "model.optim.name", "trainer.precision"
SAVES = "exp_manager.checkpoint_callback_params"
NO_FSDP = f"or leave {FSDP} out"
ALL_IN_FP8 = (
    "Transformer Engine's layers run all products in FP8: they would ignore it, or refuse it at "
    "their first forward"
)
OUTSIDE_FP16 = "weights that have crossed in FP8 do not all fit into FP16's range"

TOGETHER = (
    # --- FP8 -----------------------------------------------------------------------------------
    Row(
        {"model.transformer_engine": False}, {"model.fp8": True},
        "needs model.transformer_engine=True, whose semantics FP8 layers have",
        "Set model.transformer_engine=True (the package itself need not be installed), or "
        "model.fp8=False",
    ),
    Row(
        {RECIPE: some_recipe("blockwise")}, {"model.pad_inner_dim": True},
        "blockwise scales need whole blocks",
        "Leave it out, or use another model.fp8_recipe",
    ),
    # --- Transformer Engine --------------------------------------------------------------------
    Row(
        {"model.transformer_engine": False}, {BACKEND: "te"},
        "{model.transformer_engine} says that it is not wanted",
        f"Set model.transformer_engine=True. {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.fp8_interval": not_(1)},
        "Transformer Engine makes scales anew at every update",
        f"Use model.fp8_interval=1. {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.pad_inner_dim": True},
        "Transformer Engine's layers do not pad",
        f"Leave it out, or use model.fp8_backend=torchao. {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.ffn_dropout": above(0)},
        "Transformer Engine's layer has no dropout inside the MLP",
        f"Use model.ffn_dropout=0. {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.fp8_wgrad": False},
        ALL_IN_FP8,
        f"Leave it out. {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.override_linear_precision": not_([False, False, False])},
        ALL_IN_FP8,
        f"Leave it out. {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {"model.data.reset_attention_mask": True},
        "Transformer Engine's layers attend over whole samples, across the ends of documents",
        f"Leave it out. {NATIVE}",
    ),
    Row(
        {BACKEND: "te", RECIPE: "delayed"}, {HEALTH: "full"},
        "Transformer Engine does not show its casts, and keeps amaxes and scales of "
        "model.fp8_recipe=delayed alone",
        f"Use model.fp8_health=scales. {NATIVE}",
    ),
    Row(
        {BACKEND: "te", RECIPE: not_("delayed")}, {HEALTH: one_of("scales", "full")},
        "Transformer Engine does not show its casts, and keeps amaxes and scales of "
        "model.fp8_recipe=delayed alone (here {model.fp8_recipe})",
        f"Use model.fp8_health=auto or off. {NATIVE}",
    ),
    Row(
        {BACKEND: "te"}, {OPTIMIZER: "distributed_fused_adam"},
        "Transformer Engine's weights have not been shown to be right in flat buffers",
        "Use model.optim.name=fused_adam, or model.fp8_backend=native",
        UNPROVEN,
    ),
    Row(
        {PP: above(1)}, {BACKEND: "te"},
        "Transformer Engine's FP8 state has not been shown to be right on pipeline stages",
        "Use model.fp8_backend=native, or model.pipeline_model_parallel_size=1",
        UNPROVEN,
    ),
    Row(
        {BACKEND: "te"}, {FSDP: True},
        "{model.fp8_backend} has layers that have not been shown to be right with gathered weights",
        f"Use model.fp8_backend=native or torchao, {NO_FSDP}",
        UNPROVEN,
    ),
    # --- torchao -------------------------------------------------------------------------------
    Row(
        {"model.fp8": False}, {BACKEND: "torchao"},
        "torchao runs FP8 alone",
        f"Set model.fp8=True. {NATIVE}",
    ),
    Row(
        {BACKEND: "torchao"}, {PARAMS: True},
        "torchao keeps weights in high precision",
        f"Leave it out. {NATIVE}",
    ),
    Row(
        {BACKEND: "torchao"}, {TP: above(1)},
        "torchao's linears are not tensor-parallel here",
        f"Use model.tensor_model_parallel_size=1. {NATIVE}",
    ),
    Row(
        {BACKEND: "torchao"}, {SP: True},
        "{model.fp8_backend} is not tensor-parallel",
        f"Use model.fp8_backend=native or te, or leave {SP} out",
    ),
    Row(
        {BACKEND: "torchao", COMPILE: not_("off")}, {HEALTH: one_of("scales", "full")},
        "torchao's casts are inside the compiled graph, where they are not seen",
        "Use model.fp8_health=auto or off, or leave model.compile out",
    ),
    Row(
        {PP: above(1), "model.pipeline_schedule": ZERO_BUBBLE}, {BACKEND: "torchao"},
        "torchao's linear computes both gradients at once, which {model.pipeline_schedule} does "
        "not",
        "Use model.fp8_backend=native, or model.pipeline_schedule=1F1B",
    ),
    Row(
        {BACKEND: not_("te")}, {"model.te_version": not_(None)},
        "says which Transformer Engine runs on a CPU, and {model.fp8_backend}",
        "Leave it out, or use model.fp8_backend=te",
    ),
    Row(
        {BACKEND: not_("torchao")}, {GATHER: True},
        "is torchao's, and {model.fp8_backend}",
        "Leave it out; model.fp8_backend=native gathers FP8 with model.fp8_params=True",
    ),
    Row(
        {BACKEND: "torchao", FSDP: False}, {GATHER: True},
        "without model.fsdp=True nothing is gathered",
        "Leave it out",
    ),
    Row(
        {BACKEND: "torchao", FSDP: True, RECIPE: some_recipe("rowwise", "rowwise_with_gw_hp")},
        {GATHER: True},
        "one scale serves a weight that is put together from parts; {model.fp8_recipe} has several",
        "Use model.fp8_recipe=tensorwise, or leave it out",
    ),
    Row(
        {BACKEND: "torchao", FSDP: True, PRECISION: FP16}, {GATHER: True},
        OUTSIDE_FP16,
        "Use trainer.precision=bf16, or leave it out",
    ),
    # --- sequence and context parallelism ------------------------------------------------------
    Row(
        {COMPILE: not_("off")}, {SP: True},
        "{model.compile} has not been shown to be right with it",
        f"Use model.compile=off, or leave {SP} out",
        UNPROVEN,
    ),
    Row(
        {"model.fp8": True, RECIPE: some_recipe(*SEVERAL_SCALES)}, {SP: True},
        "gathers tensors with one scale each, which {model.fp8_recipe} does not have",
        f"Leave {SP} out, or use model.fp8_recipe=delayed or tensorwise",
    ),
    Row(
        {SP: True}, {"model.reduce_amax": False},
        f"leaves each rank its own scales, and {SP}=True gathers with one",
        "Leave it out (True)",
    ),
    Row(
        {"model.data.reset_attention_mask": True}, {CP: above(1)},
        "keys and values go from rank to rank without their documents, and "
        "{model.data.reset_attention_mask} keeps documents apart",
        f"Use {CP}=1, or leave model.data.reset_attention_mask out",
    ),
    Row(
        {"model.position_embedding_type": "alibi"}, {CP: above(1)},
        "{model.position_embedding_type} adds to scores what depends on both places, and blocks "
        "of keys come without theirs",
        f"Use model.position_embedding_type=rope, or {CP}=1",
    ),
    Row(
        {BACKEND: one_of("te", "torchao")}, {CP: above(1)},
        "{model.fp8_backend} has not been wired to it",
        f"Use model.fp8_backend=native, or use {CP}=1",
    ),
    Row(
        {COMPILE: not_("off")}, {CP: above(1)},
        "{model.compile} has not been shown to be right with messages inside attention",
        f"Use model.compile=off, or use {CP}=1",
        UNPROVEN,
    ),
    # --- FSDP ----------------------------------------------------------------------------------
    Row(
        {PP: above(1)}, {FSDP: True},
        "pipeline stages would gather their weights for every microbatch; that is not built",
        f"Use model.optim.name=distributed_fused_adam with pipelines, {NO_FSDP}",
    ),
    Row(
        {COMPILE: not_("off")}, {FSDP: True},
        "{model.compile} has not been shown to be right with it",
        f"Use model.compile=off, {NO_FSDP}",
        UNPROVEN,
    ),
    Row(
        {FSDP: True, PRECISION: HALF}, {"model.megatron_amp_O2": False},
        "keeps weights in FP32, and FSDP gathers them in one dtype",
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
        {OPTIMIZER: "distributed_fused_adam", RECIPE: some_recipe("blockwise")}, {PARAMS: True},
        "with {model.optim.name} ranks agree on one scale for each weight, and blockwise has many",
        "Use model.fp8_recipe=delayed or tensorwise, leave it out, or use "
        "model.optim.name=fused_adam",
    ),
    Row(
        {FSDP: True}, {OPTIMIZER: "distributed_fused_adam"},
        f"{FSDP}=True shares the optimizer's states out already",
        f"Use model.optim.name=fused_adam, {NO_FSDP}",
    ),
    Row(
        {FSDP: True}, {"model.optim.grad_sync_dtype": not_("fp32")},
        "FSDP sums the gradients",
        "Use model.fsdp_grad_reduce_dtype",
    ),
    # --- a run's length, checkpoints and restarts ----------------------------------------------
    Row(
        {"exp_manager.resume_if_exists": False}, {"trainer.max_restarts": above(0)},
        "a restart continues the run, and {exp_manager.resume_if_exists} never does",
        "Leave one of the two out",
    ),
    Row(
        {f"{SAVES}.save_top_k": given(), f"{SAVES}.monitor": "val_loss"},
        {"trainer.limit_val_batches": 0},
        f"{{{SAVES}.save_top_k}} keeps the best by the validation loss, and there would be none",
        f"Set {SAVES}.monitor=reduced_train_loss or save_top_k=0, or validate",
    ),
    Row(
        {
            "exp_manager.create_checkpoint_callback": True,
            f"{SAVES}.every_n_train_steps": None,
            f"{SAVES}.train_time_interval": None,
        },
        {f"{SAVES}.async_save": True},
        "only periodic checkpoints are written beside training, and there are none",
        f"Set {SAVES}.every_n_train_steps or {SAVES}.train_time_interval, or leave it out",
    ),
)  # fmt: skip


def condition_text(key: str, test: Any) -> str:
    """Return a condition as the documentation has it: `model.fp8_backend=te`."""
    if isinstance(test, Condition):
        return f"{key}{test.text}"
    return f"{key}={'null' if test is None else test}"


def findings(values: Values) -> Iterator[Finding]:
    """Yield what the table refuses. A row is left out while a key that it reads is bad."""
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
