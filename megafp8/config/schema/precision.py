"""Define the keys below `model` about precision: FP8, FP16 and the backend of the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megafp8.config.keys import (
    Need,
    Valid,
    Values,
    at_least,
    between,
    both_needs,
    key,
    needs,
    one_of,
    or_null,
)
from megafp8.config.precision_changes import schedule_problem, spell_schedule
from megafp8.config.values import (
    SIZES,
    compute_dtypes,
    modules_problem,
    ranks_beside,
    recipes_in,
)
from megafp8.specs.precision import MARGINS, UPDATES
from megafp8.specs.recipes import (
    DEFAULT_RECIPE,
    RECIPES,
    find_recipe,
    names_code,
    names_where,
    problem,
    recipes_where,
)
from megafp8.specs.traits import Traits

FP16 = needs("trainer.precision", 16, reads=compute_dtypes)
HALF = needs("trainer.precision", "bf16", 16, reads=compute_dtypes)

ON_GPUS = needs("trainer.accelerator", "gpu", "auto")
FP8 = needs("model.fp8", True)
AMAX_RANKS = Need(
    "trainer.devices",
    "several ranks in a pipeline stage",
    lambda v: ranks_beside(v, "model.pipeline_model_parallel_size") != 1,
    "Leave it out; one rank has one set of scales, and trainer.devices sets the number of ranks",
)
REPLICAS = Need(
    "trainer.devices",
    "several replicas",
    lambda v: ranks_beside(v, *SIZES) != 1,
    "Leave it out; there is one replica, and more trainer.devices make more replicas",
)
IN_TE_OR_FALSE = "Set model.fp8_backend=te on a GPU, or leave it out (False)"
IN_TE_S_FP8 = both_needs(
    FP8,
    both_needs(
        needs("model.fp8_backend", "te", hint=IN_TE_OR_FALSE),
        needs("trainer.accelerator", "gpu", "auto", hint=IN_TE_OR_FALSE),
    ),
)
FIRST_LAST = needs("model.first_last_layers_bf16", True)
MEASURES = needs("model.fp8_health", "full")

# Makers of the keys of a group, with what most of these keys have in common.
fp16_key = partial(key, group="precision", needs=FP16)
backends_key = partial(key, group="backends")
fp8_key = partial(key, group="fp8", needs=FP8)
health_key = partial(key, group="health", needs=MEASURES)


def _has_te_layers(v: Values) -> bool:
    backend, device = v.get("model.fp8_backend", "auto"), v.get("trainer.accelerator")
    return v["model.fp8"] or backend == "te" or (backend == "auto" and device != "cpu")


TE_LAYERS = Need("model.fp8", "model.fp8=True", _has_te_layers)


def _needs_recipe(holds: Callable[[Traits], bool]) -> Need:
    """Return the need for a linear whose recipe has a trait; the text names the built-in ones."""
    need = needs("model.fp8_recipe", *names_where(holds))
    return replace(need, holds=lambda v: bool(recipes_where(recipes_in(v), holds)))


def _explained() -> str:
    """Return what the scales of each built-in recipe follow from."""
    return ", ".join(f"{find_recipe(name).traits.help} (`{name}`)" for name in RECIPES)


def _quoted(holds: Callable[[Traits], bool]) -> str:
    """Return the names of built-in recipes with a trait: `a`, `b` and `c`."""
    return " and ".join(", ".join(f"`{name}`" for name in names_where(holds)).rsplit(", ", 1))


WITH_HISTORY = _needs_recipe(lambda traits: traits.has_history)
delayed_key = partial(key, group="delayed_scaling", needs=WITH_HISTORY)
CURRENT = _needs_recipe(lambda traits: traits.power_2_is_choice)


def _is_judged(v: Values) -> bool:
    in_tables = recipes_where(recipes_in(v), lambda traits: traits.has_history)
    health = v.get("model.fp8_health")
    return bool(v.get("model.fp8")) and (health == "full" or (health != "off" and bool(in_tables)))


JUDGED = Need("model.fp8_health", "model.fp8_health=full", _is_judged)


@dataclass
class Precision:
    """Define the keys about FP8, FP16, FP8 health and the backend."""

    megatron_amp_O2: bool = fp16_key(  # noqa: N815 (NeMo's name)
        True,
        "Compute embeddings, norms and the residual stream in `trainer.precision` too. False: they "
        "are in FP32, and only GEMMs and attention are in `trainer.precision`, as with "
        "`torch.autocast`.",
        nemo=False,
        spec="precision.half_weights",
        needs=HALF,
    )
    native_amp_init_scale: int = fp16_key(
        4294967296,
        "First loss scale of FP16.",
        nemo=4294967296,
        valid=at_least(1),
    )
    native_amp_growth_interval: int = fp16_key(
        1000,
        "Number of consecutive finite steps after which FP16's loss scale is doubled.",
        nemo=1000,
        spec="precision.loss_scale.growth_interval",
        valid=at_least(1),
    )
    hysteresis: int = fp16_key(
        2,
        "Number of consecutive overflows at which FP16's loss scale is halved; every further one "
        "halves it again.",
        nemo=2,
        spec="precision.loss_scale.hysteresis",
        valid=at_least(1),
    )
    transformer_engine: bool = backends_key(
        True,
        "Use layers as Transformer Engine defines them, which FP8 needs. The package is not "
        "needed: `fp8_backend` chooses what runs them.",
        nemo=False,
        needs=TE_LAYERS,
    )
    fp8: bool = key(
        False,
        "Run the linear layers of all blocks in FP8. Megatron's `hybrid` and `e4m3` stand for "
        "`True` and the format.",
        nemo=False,
        group="fp8",
        valid=Valid(
            "True or False, or Megatron's hybrid or e4m3",
            lambda _: True,
            values=(True, False, "hybrid", "e4m3"),
        ),
    )
    fp8_e4m3: bool | None = fp8_key(
        None,
        "Use E4M3 for all tensors; takes precedence over `fp8_hybrid`, which decides otherwise.",
        nemo=False,
    )
    fp8_hybrid: bool | None = fp8_key(
        None,
        "Use E4M3 for inputs and weights, and E5M2 for output gradients. `null`: as the recipe "
        f"does, which are {_quoted(lambda traits: not traits.is_e4m3)}; with the other recipes "
        "`True` is refused.",
        nemo=True,
    )
    fp8_margin: int = delayed_key(
        0,
        "Divide delayed scales by 2**margin, so that amaxes may grow by that factor.",
        nemo=0,
        spec="precision.fp8.margin",
        valid=between(*MARGINS),
    )
    fp8_interval: int = delayed_key(
        1,
        "Updates of the amax history (one for each microbatch) from one new scale to the next.",
        nemo=1,
        spec="precision.fp8.interval",
        valid=between(*UPDATES),
    )
    fp8_amax_history_len: int = delayed_key(
        1024,
        "Length of the amax history from which a delayed scale is computed, in updates.",
        nemo=1024,
        spec="precision.fp8.amax_history_len",
        valid=between(*UPDATES),
        needs=needs("model.fp8_amax_compute_algo", "max"),
    )
    fp8_amax_compute_algo: str = delayed_key(
        "max",
        "The amax that a delayed scale is computed from: the largest in the history (`max`), or "
        "the newest (`most_recent`).",
        nemo="max",
        spec="precision.fp8.amax_compute_algo",
        valid=one_of("max", "most_recent"),
    )
    reduce_amax: bool = delayed_key(
        True,
        "Compute delayed scales from the largest amax over all ranks of a pipeline stage. False: "
        "each rank has its own scales.",
        nemo=True,
        spec="precision.fp8.reduce_amax",
        needs=both_needs(WITH_HISTORY, AMAX_RANKS),
    )
    tp_only_amax_red: bool = delayed_key(
        False,
        "Reduce amaxes over tensor- and context-parallel ranks only, so that each replica has its "
        "own scales.",
        spec="parallel.tp_only_amax_red",
        needs=both_needs(needs("model.reduce_amax", True), REPLICAS),
    )
    fp8_recipe: str = fp8_key(
        DEFAULT_RECIPE,
        f"What scales are computed from: {_explained()}. A recipe of your own is named by its file "
        "or module.",
        valid=Valid(
            f"{', '.join(RECIPES)}, or a recipe of your own: path/to/file.py:Class or "
            "package.module:Class",
            lambda v: names_code(v) or problem(v) is None,
            later=("custom",),
            suggestion="A recipe of your own is named by its file (docs/guide/own_recipe.md)",
            why=problem,
            values=RECIPES,
        ),
    )
    fp4_disable_rht: bool = fp8_key(
        False,
        "Do not rotate the operands of weight gradients (random Hadamard transform).",
        needs=_needs_recipe(lambda traits: "rht" in traits.options),
    )
    fp4_disable_stochastic_rounding: bool = fp8_key(
        False,
        "Round output gradients to nearest.",
        needs=_needs_recipe(lambda traits: "sr" in traits.options),
    )
    fp4_disable_2d_quantization: bool = fp8_key(
        False,
        "Let 1 x 16 elements of a weight share a scale along each product's sum, and not 16 x 16.",
        needs=_needs_recipe(lambda traits: "2d" in traits.options),
    )
    fp8_power_2_scale: bool | None = fp8_key(
        None,
        "Round scales down to powers of two. `null`: True for "
        f"{_quoted(lambda traits: traits.power_2 == 'on')}, False for "
        f"{_quoted(lambda traits: traits.power_2 == 'off')}, as in the libraries that define these "
        "recipes.",
        needs=CURRENT,
    )
    fp8_params: bool = fp8_key(
        False,
        "Keep the weights of linears in FP8 only, with FP32 master weights in the optimizer: with "
        f"{_quoted(lambda traits: traits.keeps_weight)}.",
        spec="precision.fp8.params_in_fp8",
    )
    fp8_wgrad: bool = fp8_key(True, "Compute weight gradients with FP8 products.")
    override_linear_precision: list[bool] = fp8_key(
        [False, False, False],
        "Which products stay in high precision: `[output, input gradient, weight gradient]`.",
        valid=Valid("three of True and False", lambda v: len(v) == 3),
    )
    fp8_split_accumulator: list[bool] | None = fp8_key(
        None,
        "Which products accumulate precisely on FP8 tensor cores, which can be slower: `[output, "
        "input gradient, weight gradient]`. On other hardware all products do. `null`: `[False, "
        "True, True]`, and all three with Transformer Engine's `blockwise`, which has no choice.",
        valid=or_null(Valid("three of True and False", lambda v: len(v) == 3)),
        needs=both_needs(FP8, ON_GPUS),
    )
    first_last_layers_bf16: bool = fp8_key(
        False,
        "Keep the first and the last layers in `trainer.precision`.",
    )
    num_layers_at_start_in_bf16: int = fp8_key(
        1,
        "Number of first layers that `first_last_layers_bf16` keeps out of FP8.",
        valid=at_least(0),
        needs=FIRST_LAST,
    )
    num_layers_at_end_in_bf16: int = fp8_key(
        1,
        "Number of last layers that `first_last_layers_bf16` keeps out of FP8.",
        valid=at_least(0),
        needs=FIRST_LAST,
    )
    fp8_modules: list[str] = fp8_key(
        [],
        "Rules `PATTERN:CHOICE` that give linears, by name, another recipe or `high_precision`; "
        "the first matching rule applies. Linears are named `layers.N.attention.qkv`, "
        "`.attention.projection`, `.mlp.fc1` and `.mlp.fc2`, and with experts `.mlp.experts.E.fc1` "
        "and `.mlp.shared.fc1`; a rule that decides about none is refused. Output gradients have "
        "the format of `fp8_e4m3` and `fp8_hybrid` if the recipe has it, and otherwise the "
        "recipe's own. Example: `*.mlp.fc2:high_precision`.",
        valid=Valid(
            "a list of PATTERN:CHOICE", lambda v: modules_problem(v) is None, why=modules_problem
        ),
    )
    precision_schedule: Any = fp8_key(
        [],
        "Changes of precision within a run, as a list of `{from: START, recipe: NAME}`. START "
        "counts finished steps (`800`), or is a fraction of the run (`0.85`). NAME is a recipe, "
        "`bf16` or `high_precision`. Optional are `modules`, a pattern as in `fp8_modules` or a "
        "list of them (otherwise all linears in FP8), and `products`, some of `output`, "
        "`grad_input`, `grad_weight`, `forward` and `backward` (otherwise all). Later entries win. "
        "A run that continues keeps the steps that its fractions had, and may have other entries "
        "from its step on.",
        kind="policy",
        valid=Valid(
            "a list of {from, modules, products, recipe}",
            lambda v: schedule_problem(v) is None,
            why=schedule_problem,
        ),
        spelling=spell_schedule,
    )
    use_autocast_during_eval: bool = fp8_key(
        True,
        "Validate in FP8, with the scales of training. False: validate in `trainer.precision`.",
        spec="precision.fp8.fp8_in_evaluation",
    )
    fp8_health: str = health_key(
        "auto",
        "What is recorded of each FP8 tensor at log steps, in health.jsonl and the trackers: its "
        "amax and scale (`scales`), also underflow, overflow and signal-to-noise ratio (`full`), "
        "or nothing (`off`). `auto`: `scales` if the backend exposes them, on a CPU `full` once in "
        "100 steps. Forward and backward pass of a step with `full` take about 1.5 times as long "
        "on a CPU.",
        valid=one_of("auto", "off", "scales", "full"),
        needs=FP8,
    )
    fp8_health_max_underflow: float = health_key(
        0.5,
        "Largest fraction of a tensor's non-zero values that may become zero in the cast without a "
        "warning.",
        spec="observe.health.max_underflow",
        valid=between(0, 1),
    )
    fp8_health_max_overflow: float = health_key(
        0.01,
        "Largest fraction of a tensor's values that may saturate in the cast without a warning.",
        spec="observe.health.max_overflow",
        valid=between(0, 1),
    )
    fp8_health_min_snr_db: float = health_key(
        5.0,
        "Smallest signal-to-noise ratio of a tensor in its products without a warning, in "
        "decibels.",
        spec="observe.health.min_snr_db",
        valid=between(-200, 200),
    )
    fp8_accuracy_check: str = health_key(
        "off",
        "`warn`: say where FP8 costs accuracy by a fixed criterion, for which linears, and with "
        "which `model.precision_schedule` the run could be continued without these. With "
        "`fp8_health=full` it compares the norm of each weight's gradient with the noise of its "
        "casts (arXiv 2505.19115); with `scales` it has the amaxes and scales of `delayed` alone. "
        "It never changes a run.",
        spec="observe.health.accuracy_check",
        valid=one_of("off", "warn"),
        needs=JUDGED,
    )
    pad_inner_dim: bool = fp8_key(
        False,
        "Allow sizes that are not multiples of 16, which FP8 tensor cores need; operands are then "
        "padded with zeros.",
        spec="precision.fp8.pad_inner_dim",
    )
    fp8_backend: str = backends_key(
        "auto",
        "Backend that runs the layers. `native`: our own, on any device. `te`: Transformer Engine, "
        "with BF16 too; on a CPU its Python code runs with emulated kernels. `torchao`: torchao's "
        "linears. `auto`: `native`, until Transformer Engine's layers are proven on a GPU.",
        valid=one_of("auto", "native", "te", "torchao"),
    )
    te_version: str | None = backends_key(
        None,
        "With `fp8_backend=te` on a CPU: the version of Transformer Engine whose Python code is "
        "downloaded and runs. `null`: 2.12.0. On a GPU the installed version runs.",
        spec="precision.te_version",
    )
    ub_tp_comm_overlap: bool = backends_key(
        False,
        "On a GPU, let Transformer Engine overlap the messages of sequence parallelism with "
        "products, through its user buffers. This has not run on a GPU yet.",
        nemo=False,
        spec="precision.user_buffers",
        needs=both_needs(
            needs("model.fp8_backend", "te"),
            both_needs(needs("model.sequence_parallel", True), ON_GPUS),
        ),
    )
    fp8_dot_product_attention: bool = backends_key(
        False,
        "On a GPU, let Transformer Engine compute the products of attention in FP8 "
        "(`fp8_dpa` of its recipe), with cuDNN. This has not run on a GPU yet.",
        kind="model",
        needs=IN_TE_S_FP8,
        never_idle=True,
    )
    fp8_multi_head_attention: bool = backends_key(
        False,
        "On a GPU, let Transformer Engine's QKV linear and output projection exchange FP8 tensors "
        "with attention (`fp8_mha` of its recipe). This has not run on a GPU yet.",
        kind="model",
        needs=both_needs(IN_TE_S_FP8, needs("model.fp8_dot_product_attention", True)),
        never_idle=True,
    )
    enable_fsdp_float8_all_gather: bool = key(
        False,
        "Gather the weights that FSDP shards as FP8 bytes, for torchao's `tensorwise` linears.",
        group="fsdp",
        spec="parallel.fsdp.torchao_in_fp8",
    )
    compile: str = key(
        "off",
        "What torch.compile compiles for training: nothing (`off`), or the transformer layer "
        "(`block`).",
        group="memory",
        spec="train.compile",
        valid=one_of("off", "block"),
    )
    enable_cuda_graph: bool = key(
        False,
        "On a GPU, capture the forward and backward pass of a microbatch as a CUDA graph, so that "
        "the host starts it at once. Logged steps that measure FP8 health run without it, except "
        "with `delayed` and `scales`, which are read from the tables. It takes the memory of a "
        "microbatch's activations and FP8 weights a second time. Unproven: it has not run on a "
        "GPU.",
        group="memory",
        spec="train.cuda_graph",
        needs=ON_GPUS,
    )
