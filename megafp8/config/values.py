"""Parse values that may be written in more than one way, and return one spelling of each."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megafp8.config.keys import LARGEST, MAX_LAYERS, MAX_POSITIONS
from megafp8.config.precision_changes import SCHEDULE, parse_schedule
from megafp8.specs.layer import linear_names
from megafp8.specs.moe import MoESpec
from megafp8.specs.optim import StorageName
from megafp8.specs.parallel import ScheduleName
from megafp8.specs.precision import ModuleRule
from megafp8.specs.recipes import (
    DEFAULT_RECIPE,
    HIGH_PRECISION,
    find_recipe,
    names_code,
    problem,
    te_class,
)

PRECISIONS: dict[int | str, Literal["bf16", "fp16", "fp32"]] = {
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    32: "fp32",
    "32": "fp32",
    "32-true": "fp32",
    16: "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
}

STATES = ("main_grads", "main_params", "exp_avg", "exp_avg_sq")
"""What can be stored below FP32."""
STATES_OF_LEVEL: dict[str, dict[str, StorageName]] = {
    "O0": {},
    "O1": {"main_grads": "fp8", "main_params": "fp16"},
    "O2": {"main_grads": "fp8", "main_params": "fp16", "exp_avg": "fp8", "exp_avg_sq": "fp16"},
    "O3": {"main_grads": "fp8", "main_params": "fp16", "exp_avg": "fp8", "exp_avg_sq": "fp16"},
}
"""What FP8-LM's levels store below FP32. O3 keeps the linears' weights in FP8 besides."""

LATER_OPTIMIZERS = (
    "megatron_fused_adam", "sgd", "adadelta",
    "adamax", "adagrad", "rmsprop", "rprop", "novograd", "adafactor", "adan", "lamb", "lion",
)  # fmt: skip
"""NeMo's other optimizers, which are not supported."""

WARMUP, CONSTANT, HOLD = ("warmup_steps", "warmup_ratio"), ("constant_steps", "constant_ratio"), (
    "hold_steps", "hold_ratio",
)  # fmt: skip
SCHEDULES: dict[str, tuple[str, ...]] = {
    "CosineAnnealing": (*WARMUP, *CONSTANT),
    "WarmupPolicy": WARMUP,
    "WarmupHoldPolicy": WARMUP,
    "WarmupAnnealing": WARMUP,
    "PolynomialDecayAnnealing": (*WARMUP, "power"),
    "PolynomialHoldDecayAnnealing": (*WARMUP, *HOLD, "power"),
    "SquareAnnealing": WARMUP,
    "SquareRootAnnealing": WARMUP,
    "InverseSquareRootAnnealing": WARMUP,
    "NoamAnnealing": (*WARMUP, "d_model"),
    "NoamHoldAnnealing": (*WARMUP, *HOLD, "decay_rate"),
    "WSD": (*WARMUP, "wsd_decay_steps", "wsd_decay_ratio", "wsd_decay_style"),
}
"""NeMo's schedules and Megatron's WSD, and the keys of `model.optim.sched` that each reads.

All read `min_lr` too.
"""

LATER_SCHEDULES = (
    "T5InverseSquareRootAnnealing", "StepLR", "ExponentialLR", "ReduceLROnPlateau", "CyclicLR",
)  # fmt: skip
"""NeMo's other schedules, which are not supported.

They ignore model.optim.lr, count epochs, depend on the loss, or rise again.
"""

DEFAULT_EXP_DIR = "runs"

NEMO_TOKENIZER_TYPE = "GPT2BPETokenizer"
"""The type that NeMo's files give with every library; it names no tokenizer."""

_CLOCK = re.compile(r"(?:(\d{1,4}):)?(\d{1,4}):([0-5]?\d):([0-5]?\d)", re.ASCII)

MAX_RAMP_SIZES = 100_000
"""The most sizes that a growing batch may have, since each of them is checked."""

LAYERS_NAMED = 10_000
MOST_EXPERTS = 100_000  # of all layers together

MAX_LIST_TEXT = 100_000  # characters of a list of layers

_MAX_NAME_BYTES = 200  # file systems allow 255, and file names are derived from a run's name

GELUS = ("gelu", "geglu")
"""The activations that compute GELU, which has an exact and a tanh form, without `fast-`."""

SIZES = (
    "model.tensor_model_parallel_size",
    "model.context_parallel_size",
    "model.pipeline_model_parallel_size",
)
SIZES_WITHOUT_CONTEXT = (SIZES[0], SIZES[2])
WORLD = ("trainer.devices", "trainer.num_nodes")


def parse_interval_seconds(value: object) -> float | None:
    """Return the seconds in `90`, `"90"`, `"HH:MM:SS"` or `"DD:HH:MM:SS"`; None for any other."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and (clock := _CLOCK.fullmatch(value.strip())):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return _finite(value)


def is_interval(value: object) -> bool:
    """Whether `value` is null, or more than 0 seconds as a number or "HH:MM:SS"."""
    seconds = parse_interval_seconds(value)
    return value is None or (seconds is not None and seconds > 0)


def parse_splits(value: object) -> tuple[float, ...] | None:
    """Return the three numbers of `"900,50,50"` or `[900, 50, 50]`; None if there are none.

    What is left out is 0, and a slash may stand for a comma, as in Megatron and NeMo.
    """
    parts = re.split("[,/]", value) if isinstance(value, str) else value
    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    numbers = [_finite(part) for part in parts]
    if None in numbers or not 1 <= len(numbers) <= 3:
        return None
    return tuple([*(n for n in numbers if n is not None), 0.0, 0.0][:3])


def are_shares(value: object) -> bool:
    """Whether `value` is a list of finite numbers above 0, of which no sum overflows."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all((_finite(item) or 0) > 0 and float(item) <= 2**53 for item in value)


def is_rampup(value: object) -> bool:
    """Whether `value` is [start, increment, samples]."""
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return False
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    return whole and all(0 < v <= 2**53 for v in value)


def is_window(value: object) -> bool:
    """Whether `value` is [W, 0], a window of W earlier tokens."""
    return window_problem(value) is None


def window_problem(value: object) -> str | None:
    """Return why a window of [earlier, later] tokens is none that causal attention has."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return "is not [W, 0]: two numbers, of earlier and of later tokens"
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return "is not [W, 0] with a whole number W"
    earlier, later = value
    if later != 0:
        return "asks for later tokens, which no query sees in a causal model: [W, 0] has none"
    if earlier == -1:
        return "asks for no window: null, the default, does so"
    return None if 0 <= earlier <= MAX_POSITIONS else f"has no W from 0 to {MAX_POSITIONS}"


def is_skip_frequency(value: object) -> bool:
    """Whether `value` says which layers have no window: a number, or 0 or 1 for each layer."""
    if isinstance(value, (list, tuple)):
        return all(type(v) is int and v in (0, 1) for v in value)
    return type(value) is int


def layer_list(text: str) -> Any:
    """Return the number or the list in a text such as `([1]*3+[0])*8`; None if there is none.

    Megatron evaluates such a text. Here sums and repetitions of lists of whole numbers are read,
    and no code is run.
    """
    if len(text) > MAX_LIST_TEXT:
        return None
    try:
        return _read_list(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read_list(node: ast.expr) -> Any:
    """Return the value of a number, a list of numbers, or a sum or a multiple of lists.

    Raises:
        ValueError: The text is anything else, or its list is longer than models have layers.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_read_list(item) for item in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _read_list(node.left), _read_list(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, int):
            left, right = right, left
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right <= MAX_LAYERS:
                return left * right
    raise ValueError("is no list")


def spell_frequency(value: Any) -> Any:
    """Return `moe_layer_freq` as a number or a list, where a text may stand for either."""
    read = layer_list(value) if isinstance(value, str) else value
    read = list(read) if isinstance(read, (list, tuple)) else read
    return 1 if isinstance(read, list) and read and all(read) else read


def is_layer_frequency(value: object) -> bool:
    """Whether `value` says which layers have experts: each N-th, or 0 or 1 for each layer."""
    read = layer_list(value) if isinstance(value, str) else value
    if isinstance(read, (list, tuple)):
        return bool(read) and all(type(v) is int and v in (0, 1) for v in read)
    return type(read) is int and 1 <= read <= LARGEST


def layers_with_experts(value: Any, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts, from a valid `moe_layer_freq`.

    With a number N, layer i (from 0) has some if i mod N is 0, as in Megatron. A list has its own
    length, whatever the number of layers.
    """
    read = layer_list(value) if isinstance(value, str) else value
    if isinstance(read, int):
        return tuple(layer % read == 0 for layer in range(num_layers))
    return tuple(bool(number) for number in read)


def no_loss_type(value: object) -> str | None:
    """Return why a value is no `moe_router_load_balancing_type`, where Megatron has the value."""
    if isinstance(value, (list, tuple)):
        return "asks for several losses, and a router has one; write its name alone"
    if value in ("global_aux_loss", "sinkhorn", "quantile_balancing"):
        return "is not supported: a router has aux_loss, seq_aux_loss or none"
    return None


def steps_or_ratio(steps: int | None, ratio: float | None, max_steps: int) -> int | None:
    """Return a number of steps that is given as `steps` or as a fraction `ratio` of the run.

    A fraction is rounded down, as in NeMo. Returns None if neither is given.
    """
    return steps if ratio is None else int(ratio * max_steps)


def warmup_steps(given: int | None, max_steps: int) -> int:
    """Return `model.optim.sched.warmup_steps`, or a tenth of the run if it is null."""
    return max_steps // 10 if given is None else given


def schedule_steps(values: Mapping[str, Any]) -> int:
    """Return the number of steps of the learning rate's schedule."""
    steps: int = values["model.optim.sched.max_steps"] or values["trainer.max_steps"]
    return steps


def wsd_decay_steps(given: int | None, max_steps: int) -> int:
    """Return `model.optim.sched.wsd_decay_steps`, or a fifth of the run if it is null."""
    return max_steps // 5 if given is None else given


def parse_modules(value: object) -> tuple[ModuleRule, ...] | None:
    """Return the rules in `["*.fc2:high_precision"]`; None if an entry is not PATTERN:CHOICE."""
    if not isinstance(value, (list, tuple)):
        return None
    rules = []
    for text in value:  # the name of a recipe may have a colon, a pattern never has one
        pattern, _, choice = str(text).partition(":")
        if not pattern or not choice:
            return None
        rules.append(ModuleRule(pattern, choice))
    return tuple(rules)


def modules_problem(value: object) -> str | None:
    """Return why a value of `fp8_modules` is not valid, or None if it is.

    Names of code are left out; `own_recipes` imports these.
    """
    rules = parse_modules(value)
    if rules is None:
        return "must be a list of PATTERN:CHOICE"
    named = {rule.precision for rule in rules if not names_code(rule.precision)}
    reasons = (problem(name, (HIGH_PRECISION,)) for name in sorted(named - {HIGH_PRECISION}))
    return next((reason for reason in reasons if reason is not None), None)


def named_linears(values: Mapping[str, Any]) -> list[str]:
    """Return the names of all linears of a model, those of experts too.

    None are returned for more layers or experts than are accepted, whose names would fill the
    memory, or if the list of layers with experts does not fit; other rules report these.
    """
    layers, experts = values["model.num_layers"], values.get("model.num_moe_experts")
    if layers > LAYERS_NAMED:
        return []
    if experts is None:
        return linear_names(range(layers))
    has_experts = layers_with_experts(values.get("model.moe_layer_freq", 1), layers)
    if len(has_experts) != layers or experts * sum(has_experts) > MOST_EXPERTS:
        return []
    shared = values.get("model.moe_shared_expert_intermediate_size")
    moe = MoESpec(  # names depend neither on the experts of a token nor on a width
        num_experts=experts, top_k=1, ffn_hidden_size=1, layers=has_experts,
        shared_ffn_hidden_size=shared,
    )  # fmt: skip
    return linear_names(range(layers), moe)


def without_effect(value: object, names: Sequence[str]) -> dict[int, str | None]:
    """Return the places of the entries of `fp8_modules` that decide about none of the linears.

    Each has the earlier pattern that decides about one which its own matches, or None where its
    own matches no linear. None are returned where no names are known.
    """
    found: dict[int, str | None] = {}
    undecided, decided = list(names), dict[str, str]()
    for place, rule in enumerate(parse_modules(value) or () if names else ()):
        taken = [name for name in undecided if rule.matches(name)]
        if not taken:
            found[place] = next((by for name, by in decided.items() if rule.matches(name)), None)
            continue
        decided |= dict.fromkeys(taken, rule.pattern)
        undecided = [name for name in undecided if name not in decided]
    return found


def in_effect(rules: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the entries of `fp8_modules` that decide about one of the linears."""
    idle = without_effect(rules, names)
    return [rule for place, rule in enumerate(rules) if place not in idle]


def parse_layout(value: object) -> tuple[int, ...] | None:
    """Return the whole numbers of `"4,4,3,5"`, each at least 1; None for other values."""
    if isinstance(value, int) and value > 2**53:
        return None
    parts = [part.strip() for part in str(value).split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        return None
    layers = tuple(int(part) for part in parts)
    return layers if min(layers) > 0 else None


def shortest_number(number: float) -> str:
    """Return the shortest spelling of a number: `50`, not `50.0`."""
    return str(int(number)) if number == int(number) else repr(number)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def plain(value: object) -> str:
    """Return a value as a user writes it: `null`, `True`, `10`."""
    return "null" if value is None else str(value)


def why_no_name(name: str) -> str | None:
    """Return why a text cannot be a run's name, which is that of a directory; None if it can."""
    if not name.strip():
        return "is empty"
    if set(name) & set("/\\\0") or name.startswith("."):
        return "contains '/', '\\' or NUL, or starts with '.'"
    if not name.isprintable():
        return "contains control characters"
    if len(name.encode("utf-8", "surrogateescape")) > _MAX_NAME_BYTES:
        return f"is longer than {_MAX_NAME_BYTES} bytes"
    return None


# --- one spelling of a valid value, for a run's resolved settings ---------------------------------


def spell_precision(value: int | str) -> int | str:
    """Return bf16, 16 or 32 for any spelling of a dtype."""
    spellings: dict[str, int | str] = {"bf16": "bf16", "fp16": 16, "fp32": 32}
    return spellings[PRECISIONS[value]]


def spell_splits(value: object) -> str:
    """Return `900,50,50` for any spelling of the sizes of splits."""
    splits = parse_splits(value)
    assert splits is not None, value
    return ",".join(shortest_number(number) for number in splits)


def spell_activation(name: str) -> str:
    """Return the name without NeMo's `fast-`.

    In NeMo, `fast-` asks for one product instead of two; megafp8 always computes one.
    """
    return name.removeprefix("fast-")


def spell_tokenizer_type(value: str | None) -> str | None:
    """Return None for NeMo's default, which names no tokenizer."""
    return None if value == NEMO_TOKENIZER_TYPE else value


def spell_exp_dir(value: str | None) -> str:
    """Return the directory, or the default one for None."""
    return value or DEFAULT_EXP_DIR


# --- what several settings say together -----------------------------------------------------------


def compute_dtypes(values: Mapping[str, Any]) -> tuple[int | str]:
    """Return the dtype of products, bf16, 16 or 32, in a tuple, as `needs(reads=...)` takes it."""
    return (spell_precision(values["trainer.precision"]),)


def storage_of(values: Mapping[str, Any]) -> dict[str, StorageName]:
    """Return in which format gradients, master weights and both moments are stored.

    A level has no effect with model.fp8=False, and then counts as O0.
    """
    level = values.get("model.optim.fp8_opt_level", "") if values.get("model.fp8", True) else ""
    of_level = STATES_OF_LEVEL.get(level, {})
    return {
        part: values.get(f"model.optim.{part}_dtype") or of_level.get(part, "fp32")
        for part in STATES
    }


def recipes_in(values: Mapping[str, Any]) -> set[str]:
    """Return the recipes that some linear may have at some step."""
    rules = parse_modules(values.get("model.fp8_modules", [])) or ()
    chosen = {rule.precision for rule in rules}
    chosen |= {change.precision for change in parse_schedule(values.get(SCHEDULE, []))}
    return {values.get("model.fp8_recipe", DEFAULT_RECIPE), *(chosen - {HIGH_PRECISION})}


def split_accumulator(values: Mapping[str, Any]) -> list[bool]:
    """Return which products accumulate precisely; null is what the backend does by itself.

    Transformer Engine's `blockwise` adds up precisely in all products, and everything else in the
    two backward ones.
    """
    given = values.get("model.fp8_split_accumulator")
    if given is not None:
        return list(given)
    of_te = None
    if values.get("model.fp8_backend") == "te":
        of_te = te_class(str(values.get("model.fp8_recipe")))
    return [of_te == "Float8BlockScaling", True, True]


def layers_in_bf16(num_layers: int, is_on: bool, start: int, end: int) -> list[int]:
    """Return the layers that `first_last_layers_bf16`, if it is on, keeps out of FP8."""
    if not is_on:
        return []
    first, last = min(start, num_layers), max(0, num_layers - end)
    return sorted({*range(first), *range(last, num_layers)})


def size_multiple(values: Mapping[str, Any]) -> int:
    """Return the number that sizes of FP8 products are multiples of; 1 if sizes are padded."""
    known = (name for name in recipes_in(values) if problem(name) is None)
    traits = [find_recipe(name).traits for name in known]
    padded = bool(values.get("model.pad_inner_dim"))
    return math.lcm(*(1 if padded and t.pads else t.multiple for t in traits))


def ranks_beside(v: Mapping[str, Any], *sizes: str) -> int | None:
    """Return the ranks of the world divided by some parallel sizes.

    None if a key is missing or the world cannot be divided so, which other rules report.
    """
    if any(key not in v for key in (*WORLD, *sizes)):
        return None
    ranks, size = world_size(v), math.prod(v[key] for key in sizes)
    return None if ranks % size else ranks // size


def schedule_of(v: Mapping[str, Any]) -> ScheduleName:
    """Return the pipeline's schedule: `model.pipeline_schedule`, or what null stands for."""
    asked: ScheduleName | None = v["model.pipeline_schedule"]
    stages = v["model.virtual_pipeline_model_parallel_size"] or 1
    return asked or ("1F1B" if stages == 1 else "Interleaved1F1B")


def model_ranks(v: Mapping[str, Any]) -> int:
    """Return the number of ranks of one replica, which work on the same samples."""
    return math.prod(v[key] for key in SIZES)


def world_size(v: Mapping[str, Any]) -> int:
    """Return the number of ranks on all nodes."""
    ranks: int = v["trainer.devices"] * v["trainer.num_nodes"]
    return ranks
