"""List the settings that exclude each other, as a table.

In each row, `excludes` is refused if all conditions of `when` hold. `unproven` marks pairs that are
refused only because no test proves them right yet; such a row is deleted when a test does. Rules
that depend on sizes are in `checks`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.keys import Values
from megafp8.config.precision_changes import SCHEDULE
from megafp8.config.rows import (
    CURRENT,
    FP8_GRADS,
    FP16,
    GATHERED,
    HALF,
    HISTORY,
    LOW_PARAMS,
    LOW_PRECISION,
    NATIVE,
    NOT_GATHERED,
    ONE_WEIGHT,
    OWN_WEIGHT,
    SCALES_OF_PARTS,
    SHARED_WEIGHT,
    TWO_LEVELS,
    TWO_WEIGHTS,
    UNTRIED_GATHER,
    WHOLE_BLOCKS,
    ZERO_BUBBLE,
    Condition,
    Row,
    given,
    is_above,
    is_one_of,
    its_recipe,
    not_,
    refusals,
    some_recipe,
)
from megafp8.config.rules import Finding
from megafp8.config.values import MUON

UNPROVEN = True


BACKEND, RECIPE, COMPILE = "model.fp8_backend", "model.fp8_recipe", "model.compile"
TP, CP = "model.tensor_model_parallel_size", "model.context_parallel_size"
SP, PP = "model.sequence_parallel", "model.pipeline_model_parallel_size"
FSDP, GATHER = "model.fsdp", "model.enable_fsdp_float8_all_gather"
GRAPH = "model.enable_cuda_graph"
HEALTH, PARAMS = "model.fp8_health", "model.fp8_params"
LEVEL = "model.optim.fp8_opt_level"
OPTIMIZER, PRECISION = "model.optim.name", "trainer.precision"
SCALED, YARN = "model.scale_positional_embedding", "model.yarn_rotary_scaling_factor"
SAVES = "exp_manager.checkpoint_callback_params"
NO_FSDP = f"or leave {FSDP} out"
NO_GRAPH = f"or leave {GRAPH} out"
DRAWN = (
    "the host seeds torch's generator for each mask of dropout, and a graph would draw one mask "
    "again and again"
)
CAPTURED = "messages between ranks inside a graph have not been shown to be right"
NO_LEVEL = "leave model.optim.fp8_opt_level and the model.optim.*_dtype keys out"
IN_LOW_PRECISION = "gradients, weights and moments in low precision (FP8-LM) have been built for"
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
        {RECIPE: some_recipe(WHOLE_BLOCKS)}, {"model.pad_inner_dim": True},
        "{recipe} scaling needs sizes that are whole blocks, and does not pad",
        "Leave it out, or use another model.fp8_recipe",
    ),
    # --- Transformer Engine --------------------------------------------------------------------
    Row(
        {"model.transformer_engine": False}, {BACKEND: "te"},
        "{model.transformer_engine} rules Transformer Engine out",
        f"Set model.transformer_engine=True, {NATIVE}",
    ),
    Row(
        {BACKEND: "te", RECIPE: its_recipe(HISTORY)}, {HEALTH: "full"},
        "Transformer Engine does not expose its casts, and keeps amaxes and scales for "
        "model.fp8_recipe=delayed only",
        f"Use model.fp8_health=scales, {NATIVE}",
    ),
    Row(
        {BACKEND: "te", RECIPE: its_recipe(CURRENT)}, {HEALTH: is_one_of("scales", "full")},
        "Transformer Engine does not expose its casts, and keeps amaxes and scales for "
        "model.fp8_recipe=delayed only; this run has {model.fp8_recipe}",
        f"Use model.fp8_health=auto or off, {NATIVE}",
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
        {BACKEND: "torchao"}, {TP: is_above(1)},
        "torchao's linears are not tensor-parallel in megafp8",
        f"Use model.tensor_model_parallel_size=1, {NATIVE}",
    ),
    Row(
        {BACKEND: "torchao"}, {SP: True},
        "{model.fp8_backend} is not tensor-parallel",
        f"Use model.fp8_backend=native or te, or leave {SP} out",
    ),
    Row(
        {BACKEND: "torchao", COMPILE: not_("off")}, {HEALTH: is_one_of("scales", "full")},
        "torchao's casts are inside the compiled graph, where they cannot be measured",
        "Use model.fp8_health=auto or off, or leave model.compile out",
    ),
    Row(
        {PP: is_above(1), "model.pipeline_schedule": ZERO_BUBBLE}, {BACKEND: "torchao"},
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
        {BACKEND: "torchao", FSDP: True, RECIPE: some_recipe(SCALES_OF_PARTS)},
        {GATHER: True},
        "a weight that is gathered from parts has one scale, and {model.fp8_recipe} needs several",
        "Use model.fp8_recipe=tensorwise, or leave it out",
    ),
    Row(
        {BACKEND: "torchao", FSDP: True, PRECISION: FP16}, {GATHER: True},
        OUTSIDE_FP16,
        "Use trainer.precision=bf16, or leave it out",
    ),
    Row(
        {COMPILE: "block", "model.fp8": True}, {RECIPE: some_recipe(TWO_LEVELS)},
        "{recipe} has scales of two levels, which a compiled layer does not keep for backward",
        "Set model.compile=off, or use another recipe",
        UNPROVEN,
    ),
    # --- a schedule of precision ---------------------------------------------------------------
    Row(
        {BACKEND: "torchao"}, {SCHEDULE: given()},
        "torchao's linears are built once for one recipe, and cannot change it within a run",
        f"Leave it out, {NATIVE}",
    ),
    Row(
        {GRAPH: True}, {SCHEDULE: given()},
        "a graph repeats the casts and products that were captured, and has not been captured "
        "again within a run",
        f"Leave it out, {NO_GRAPH}",
        UNPROVEN,
    ),
    Row(
        {COMPILE: not_("off")}, {SCHEDULE: given()},
        "layers that torch has compiled have not been shown to be right after a change of recipe",
        "Use model.compile=off, or leave it out",
        UNPROVEN,
    ),
    Row(
        {LEVEL: "O3"}, {SCHEDULE: given()},
        "O3 keeps weights in FP8 alone, and they are not made again for another recipe",
        "Use model.optim.fp8_opt_level=O2, or leave it out",
        UNPROVEN,
    ),
    Row(
        {PARAMS: True}, {SCHEDULE: given()},
        "weights that are kept in FP8 alone are not made again for another recipe",
        f"Leave {PARAMS} out, or leave it out",
        UNPROVEN,
    ),
    *(
        Row(
            {key: test}, {"model.fp8_accuracy_check": "warn"},
            f"the check names a {SCHEDULE} to continue with, which this run cannot have: {{{key}}}",
            "Leave one of the two out",
        )
        for key, test in (
            (BACKEND, is_one_of("te", "torchao")),
            (GRAPH, True),
            (COMPILE, not_("off")),
            (LEVEL, "O3"),
            (PARAMS, True),
        )
    ),
    # --- sequence and context parallelism ------------------------------------------------------
    Row(
        {"model.fp8": True, RECIPE: some_recipe(NOT_GATHERED)}, {SP: True},
        "gathers quantized tokens, and {recipe} does not quantize parts as it quantizes the whole",
        f"Leave {SP} out, or use model.fp8_recipe={GATHERED.hint}",
    ),
    Row(
        {BACKEND: "te", RECIPE: its_recipe(UNTRIED_GATHER)}, {SP: True},
        "Transformer Engine gathers the tokens of {recipe} in ways that have not been shown to be "
        "right here",
        f"Leave {SP} out, {NATIVE}",
        UNPROVEN,
    ),
    Row(
        {SP: True}, {"model.reduce_amax": False},
        f"each rank would have its own scales, and {SP}=True gathers tensors with a common one",
        "Leave it out (True)",
    ),
    Row(
        {"model.position_embedding_type": "alibi"}, {CP: is_above(1)},
        "{model.position_embedding_type} needs the positions of queries and keys, and keys are "
        "sent between ranks without theirs",
        f"Use model.position_embedding_type=rope, or {CP}=1",
    ),
    Row(
        {BACKEND: "torchao"}, {CP: is_above(1)},
        "the layers of {model.fp8_backend} do not support it in megafp8",
        f"Use model.fp8_backend=native, or use {CP}=1",
    ),
    Row(
        {COMPILE: not_("off")}, {CP: is_above(1)},
        "keys and values are sent inside attention, and torch 2.13 compiles no such messages: they "
        "break each layer into many graphs",
        f"Use model.compile=off, or use {CP}=1",
    ),
    # --- FSDP ----------------------------------------------------------------------------------
    Row(
        {PP: is_above(1), "model.pipeline_schedule": ZERO_BUBBLE}, {FSDP: True},
        "FSDP reduces the gradients of weights within the backward pass, and "
        "{model.pipeline_schedule} computes them later",
        f"Use model.pipeline_schedule=1F1B or Interleaved1F1B, {NO_FSDP}",
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
        {FSDP: True, RECIPE: some_recipe(OWN_WEIGHT)}, {PARAMS: True},
        f"with {FSDP}=True ranks agree on one scale for each weight, and {{recipe}} has many",
        f"Use model.fp8_recipe={SHARED_WEIGHT.hint}, leave it out, {NO_FSDP}",
    ),
    Row(
        {
            OPTIMIZER: "distributed_fused_adam",
            BACKEND: not_("te"),
            RECIPE: some_recipe(OWN_WEIGHT),
        },
        {PARAMS: True},
        "with {model.optim.name} ranks agree on one scale for each weight, and {recipe} has many",
        f"Use model.fp8_recipe={SHARED_WEIGHT.hint}, leave it out, or use "
        "model.optim.name=fused_adam or model.fp8_backend=te",
    ),
    *(
        Row(
            {FSDP: True}, {OPTIMIZER: sharded},
            f"{FSDP}=True shards the optimizer's states already",
            f"Use model.optim.name={whole}, {NO_FSDP}",
        )
        for sharded, whole in (("distributed_fused_adam", "fused_adam"), ("dist_muon", "muon"))
    ),
    # --- Muon ----------------------------------------------------------------------------------
    Row(
        {OPTIMIZER: is_one_of(*MUON)}, {LEVEL: LOW_PRECISION},
        "Muon's momentum, gradients and masters are in FP32",
        f"Use model.optim.name=fused_adam or distributed_fused_adam, or {NO_LEVEL}",
    ),
    Row(
        {OPTIMIZER: "dist_muon"}, {PARAMS: True},
        "weights that are kept in FP8 alone and sent whole by their owners have not been shown to "
        "be right",
        "Leave it out, or use model.optim.name=muon",
        UNPROVEN,
    ),
    # --- CUDA graphs ---------------------------------------------------------------------------
    *(
        Row({GRAPH: True}, {key: is_above(0)}, DRAWN, f"Use {key}=0, {NO_GRAPH}")
        for key in ("model.hidden_dropout", "model.attention_dropout", "model.ffn_dropout")
    ),
    Row(
        {GRAPH: True}, {PRECISION: FP16},
        "FP16's loss scale is a number of the host, and a graph would keep the captured one",
        f"Use trainer.precision=bf16, {NO_GRAPH}",
    ),
    Row(
        {GRAPH: True}, {FSDP: True},
        "FSDP gathers weights into new memory for each use, and a graph reads fixed addresses",
        f"Use model.optim.name=distributed_fused_adam, {NO_GRAPH}",
    ),
    Row(
        {GRAPH: True}, {PP: is_above(1)},
        "a graph holds both passes of one microbatch, and a pipeline has several in flight",
        f"Use {PP}=1, {NO_GRAPH}",
    ),
    *(
        Row({GRAPH: True}, {key: is_above(1)}, CAPTURED, f"Use {key}=1, {NO_GRAPH}", UNPROVEN)
        for key in (TP, CP)
    ),
    *(
        Row({GRAPH: True}, {key: test}, f"{what} not been shown to be right in a graph",
            f"{instead}, {NO_GRAPH}", UNPROVEN)
        for key, test, what, instead in (
            (BACKEND, "torchao", "the layers of {model.fp8_backend} have",
             "Use model.fp8_backend=native"),
            (COMPILE, not_("off"), "layers that torch compiles have", "Use model.compile=off"),
            (LEVEL, LOW_PRECISION, "sums of gradients in low precision (FP8-LM) have",
             "Leave model.optim.fp8_opt_level and the model.optim.*_dtype keys out"),
        )
    ),
    # --- FP8-LM: gradients, master weights and moments in low precision ------------------------
    Row(
        {FSDP: True, LEVEL: LOW_PRECISION}, {BACKEND: "te"},
        f"{IN_LOW_PRECISION} weights that FSDP gathers with our own linears; those of "
        "{model.fp8_backend} have not been shown to be right with it",
        f"Use model.fp8_backend=native, or model.optim.name=distributed_fused_adam in place of "
        f"{FSDP}, or {NO_LEVEL}",
        UNPROVEN,
    ),
    Row(
        {FSDP: True, PRECISION: FP16}, {LEVEL: "O3"},
        OUTSIDE_FP16,
        f"Use trainer.precision=bf16, model.optim.fp8_opt_level=O2, {NO_FSDP}",
    ),
    Row(
        {FSDP: True, RECIPE: some_recipe(OWN_WEIGHT)}, {LEVEL: "O3"},
        f"with {FSDP}=True ranks agree on one scale for each weight, and {{recipe}} has many",
        f"Use model.fp8_recipe={SHARED_WEIGHT.hint}, model.optim.fp8_opt_level=O2, {NO_FSDP}",
    ),
    Row(
        {FSDP: True}, {"model.optim.fp8_grad_reduction": is_one_of("auto", "pre", "post")},
        "FSDP sums the gradients of each microbatch: a scale that ranks share would need one more "
        "message before each of these sums, which would send no fewer bytes and round more often",
        f"Leave it out (fp32), {NO_FSDP}",
    ),
    Row(
        {FSDP: True}, {"model.optim.main_grads_sum_dtype": "fp32"},
        "FSDP's gradients are freed once they were added to sums in FP8; FP32 sums stay for a step",
        "Leave it out (fp8), or use model.optim.main_grads_dtype=fp32, which keeps FP32 sums and "
        "sends FP32",
    ),
    Row(
        {FSDP: True, "model.optim.main_grads_dtype": FP8_GRADS},
        {"model.fsdp_grad_reduce_dtype": not_(32)},
        "gradients that are sent in FP8 are summed in FP32",
        "Leave it out (32), or use model.optim.main_grads_dtype=fp32",
    ),
    Row(
        {LEVEL: LOW_PRECISION}, {BACKEND: "torchao"},
        f"{IN_LOW_PRECISION} our own linears and Transformer Engine's; those of "
        "{model.fp8_backend} have not been shown to be right with it",
        f"Use model.fp8_backend=native or te, or {NO_LEVEL}",
        UNPROVEN,
    ),
    Row(
        {"model.optim.main_params_dtype": LOW_PARAMS}, {COMPILE: not_("off")},
        "{model.compile} has not been shown to be right with weights stored in low precision",
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
        {LEVEL: is_one_of("O1", "O2")}, {PARAMS: True},
        "{model.optim.fp8_opt_level} keeps a linear's weight once, in FP16",
        "Leave it out, or use model.optim.fp8_opt_level=O3, which keeps weights in FP8",
    ),
    *(
        Row(
            {FSDP: fsdp, RECIPE: some_recipe(TWO_WEIGHTS)}, {LEVEL: "O3"},
            "O3 keeps weights as FP8 bytes that serve both products, which {recipe} does not give",
            f"Use model.optim.fp8_opt_level=O2, or model.fp8_recipe={kind.hint}",
        )
        for fsdp, kind in ((False, ONE_WEIGHT), (True, SHARED_WEIGHT))
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
    # --- the model -----------------------------------------------------------------------------
    *(
        Row(
            {one: given()}, {other: given()},
            "a model scales its rotary positions in one way, and {" + one + "} is another",
            "Leave one of the two out",
        )
        for one, other in (
            ("model.seq_len_interpolation_factor", SCALED),
            ("model.seq_len_interpolation_factor", YARN),
            (SCALED, YARN),
        )
    ),
    # --- a run's length, checkpoints and restarts ----------------------------------------------
    Row(
        {"exp_manager.resume_if_exists": False}, {"trainer.max_restarts": is_above(0)},
        "a restart continues the run, which {exp_manager.resume_if_exists} rules out",
        "Leave one of the two out",
    ),
    Row(
        {f"{SAVES}.save_top_k": is_above(0), f"{SAVES}.monitor": "val_loss"},
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


def findings(values: Values) -> Iterator[Finding]:
    """Yield what the table refuses, and what Transformer Engine cannot do where it is asked for."""
    yield from refusals(TOGETHER, values)
    if values.get(BACKEND) == "te":
        from megafp8.config import te_layers  # other runs need nothing of it

        yield from te_layers.findings(values)
