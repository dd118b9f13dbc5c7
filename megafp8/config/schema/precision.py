"""Keys of `model` about precision: FP8, FP16 and who runs the layers."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config.keys import Valid, at_least, between, key, needs, one_of
from megafp8.config.values import compute_dtypes, parse_modules, recipes_in
from megafp8.specs.precision import RECIPES

_CURRENT_RECIPES = [name for name in RECIPES if name != "delayed"]
FP16 = needs("trainer.precision", 16, reads=compute_dtypes)
FP8 = needs("model.fp8", True)
DELAYED = needs("model.fp8_recipe", "delayed", reads=recipes_in)
CURRENT = needs("model.fp8_recipe", *_CURRENT_RECIPES, reads=recipes_in)
FIRST_LAST = needs("model.first_last_layers_bf16", True)
MEASURES = needs("model.fp8_health", "full")


@dataclass
class Precision:
    """Precision of GEMMs, its health, its backend."""

    megatron_amp_O2: bool = key(  # noqa: N815 (NeMo's name)
        True,
        "Embeddings, norms and the residual stream have `trainer.precision` too. Without, they are "
        "FP32 and only GEMMs and attention have it, as under `torch.autocast`.",
        nemo=False,
        kind="model",
    )
    native_amp_init_scale: int = key(
        4294967296,
        "FP16's first loss scale.",
        nemo=4294967296,
        kind="model",
        valid=at_least(1),
        needs=FP16,
    )
    native_amp_growth_interval: int = key(
        1000,
        "Finite steps in a row that double FP16's loss scale.",
        nemo=1000,
        kind="model",
        valid=at_least(1),
        needs=FP16,
    )
    hysteresis: int = key(
        2,
        "Overflows in a row from which on each halves FP16's loss scale.",
        nemo=2,
        kind="model",
        valid=at_least(1),
        needs=FP16,
    )
    transformer_engine: bool = key(
        True,
        "Layers as Transformer Engine defines them; FP8 needs that, and not the package.",
        nemo=False,
        kind="model",
    )
    fp8: bool = key(False, "Run the linear layers of all blocks in FP8.", nemo=False, kind="model")
    fp8_e4m3: bool = key(
        False,
        "E4M3 in forward and backward. Wins over `fp8_hybrid`.",
        nemo=False,
        kind="model",
        needs=FP8,
    )
    fp8_hybrid: bool = key(
        True, "E4M3 in forward, E5M2 for output gradients.", nemo=True, kind="model", needs=FP8
    )
    fp8_margin: int = key(
        0,
        "Scales leave 2**margin of head room.",
        nemo=0,
        kind="model",
        valid=between(-16, 32),
        needs=DELAYED,
    )
    fp8_interval: int = key(
        1,
        "Updates from one recomputation of a scale to the next.",
        nemo=1,
        kind="model",
        valid=between(1, 65536),
        needs=DELAYED,
    )
    fp8_amax_history_len: int = key(
        1024,
        "Updates that an amax stays in the window from which scales come.",
        nemo=1024,
        kind="model",
        valid=between(1, 65536),
        needs=DELAYED,
    )
    fp8_amax_compute_algo: str = key(
        "max",
        "The window's largest amax, or its newest.",
        nemo="max",
        kind="model",
        valid=one_of("max", "most_recent"),
        needs=DELAYED,
    )
    reduce_amax: bool = key(
        True,
        "Scales from the largest amax over all ranks of a pipeline stage.",
        nemo=True,
        kind="model",
        needs=DELAYED,
    )
    tp_only_amax_red: bool = key(
        False,
        "Amaxes are reduced over tensor- and context-parallel ranks; replicas have their own "
        "scales.",
        kind="model",
        needs=needs("model.reduce_amax", True),
    )
    fp8_recipe: str = key(
        "delayed",
        "Where scales come from: earlier amaxes of the tensor (`delayed`), its own amax "
        "(`tensorwise`), those of its rows and columns (`rowwise`; `rowwise_with_gw_hp` keeps "
        "weight gradients in high precision), those of its blocks (`blockwise`).",
        kind="model",
        valid=one_of(
            *RECIPES, later=("mxfp8", "nvfp4", "custom"), suggestion="Blockwise is nearest to mxfp8"
        ),
        needs=FP8,
    )
    fp8_power_2_scale: bool | None = key(
        None,
        "Scales rounded down to powers of two. Null: as the recipe's source has it (`rowwise` and "
        "`blockwise` True, `tensorwise` False).",
        kind="model",
        needs=CURRENT,
    )
    fp8_params: bool = key(
        False,
        "Keep the linears' weights in FP8 alone, beside their FP32 masters.",
        kind="model",
        needs=FP8,
    )
    fp8_wgrad: bool = key(True, "Weight gradients are FP8 products too.", kind="model", needs=FP8)
    override_linear_precision: list[bool] = key(
        [False, False, False],
        "Which products stay in high precision: output, input gradient, weight gradient.",
        kind="model",
        valid=Valid("three of True and False", lambda v: len(v) == 3),
        needs=FP8,
    )
    fp8_split_accumulator: list[bool] = key(
        [False, True, True],
        "Which products add up precisely on FP8 tensor cores: output, input gradient, weight "
        "gradient. Elsewhere all do.",
        kind="model",
        valid=Valid("three of True and False", lambda v: len(v) == 3),
        needs=FP8,
    )
    first_last_layers_bf16: bool = key(
        False, "Keep the first and the last layers out of FP8.", kind="model", needs=FP8
    )
    num_layers_at_start_in_bf16: int = key(
        1,
        "How many at the start, with `first_last_layers_bf16`.",
        kind="model",
        valid=at_least(0),
        needs=FIRST_LAST,
    )
    num_layers_at_end_in_bf16: int = key(
        1,
        "How many at the end, with `first_last_layers_bf16`.",
        kind="model",
        valid=at_least(0),
        needs=FIRST_LAST,
    )
    fp8_modules: list[str] = key(
        [],
        "Choices for linears by name, `PATTERN:CHOICE`, the first that matches: a recipe, or "
        "`high_precision`. An example: `*.mlp.fc2:high_precision`.",
        kind="model",
        valid=Valid("a list of PATTERN:CHOICE", lambda v: parse_modules(v) is not None),
        needs=FP8,
    )
    use_autocast_during_eval: bool = key(
        True, "Validate in FP8 too, with the scales of training.", kind="model", needs=FP8
    )
    fp8_health: str = key(
        "auto",
        "At log steps, of each FP8 tensor: its amax and scale (`scales`), or also what it loses "
        "(`full`: such a step takes about three times as long on a CPU). Into health.jsonl and the "
        "trackers. `auto`: `scales` where the backend shows them.",
        kind="logging",
        valid=one_of("auto", "off", "scales", "full"),
        needs=FP8,
    )
    fp8_health_max_underflow: float = key(
        0.5,
        "Warn of tensors of which a larger share of non-zero values became zero.",
        kind="logging",
        valid=between(0, 1),
        needs=MEASURES,
    )
    fp8_health_max_overflow: float = key(
        0.01,
        "Warn of tensors of which a larger share of values saturated.",
        kind="logging",
        valid=between(0, 1),
        needs=MEASURES,
    )
    fp8_health_min_snr_db: float = key(
        5.0,
        "Warn of tensors whose worst row has less signal to noise, in decibel.",
        kind="logging",
        valid=between(-200, 200),
        needs=MEASURES,
    )
    pad_inner_dim: bool = key(
        False,
        "Allow sizes that are no multiple of what FP8 tensor cores take; there, operands are "
        "padded with zeros.",
        kind="model",
        needs=FP8,
    )
    fp8_backend: str = key(
        "auto",
        "Who runs the layers: `native` is our own, on any device; `te` (Transformer Engine, BF16 "
        "too; on a CPU its own Python over emulated kernels), `torchao`; `auto` is `native`.",
        kind="layout",
        valid=one_of("auto", "native", "te", "torchao"),
    )
    te_version: str | None = key(
        None,
        "With `fp8_backend=te` on a CPU: the version of Transformer Engine whose Python is fetched "
        "and runs; null is 2.12.0. On a GPU the installed one runs.",
        kind="layout",
    )
    enable_fsdp_float8_all_gather: bool = key(
        False,
        "Gather the weights that FSDP shards as FP8 bytes, where torchao's `tensorwise` linears "
        "read them.",
        kind="layout",
    )
    compile: str = key(
        "off",
        "`block`: torch compiles a transformer layer for training, and all layers use it.",
        kind="layout",
        valid=one_of("off", "block"),
    )
