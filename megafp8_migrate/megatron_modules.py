"""Translate Megatron's file of precisions by patterns (`te_precision_config_file`) into our rules.

Megatron gives a linear the recipe of the first enabled matcher whose pattern fits the path of its
module, as `decoder.layers.0.mlp.linear_fc1`. Here the linears of all layers are looked up, and each
gets a rule, or a kind of linear gets one if it has the same recipe in all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from megafp8.config.api import MAX_LAYERS
from megafp8.foreign import ForeignFileError, parse_yaml
from megafp8.specs.recipes import names_where
from megafp8_migrate.megatron_settings import MegatronSettings
from megafp8_migrate.report import Migration

NAME, KEY = "te_precision_config_file", "model.fp8_modules"
LINEARS = {
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.projection",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
}
"""Megatron's linears of a layer, and ours."""
_HINT = f'Write its patterns as {KEY}, for example ["layers.0.*:high_precision"]'
_OFF: dict[str, Any] = {
    "custom_recipe_factory": None, "override_quantized_autocast": True, "tp_only_amax_red": False,
    "override_nonquantized_autocast": False, "fp8_param": False, "fp4_param": False,
}  # fmt: skip
"""The fields of a recipe that must have their defaults."""


def modules(s: MegatronSettings, m: Migration) -> None:
    """Translate the file that the script names, if it lies beside the script."""
    name = s.get(NAME)
    if name is None:
        return
    try:
        rules = _rules(s, str(name))
    except ValueError as error:
        m.decide(s.label(NAME), name, str(error), _HINT)
        return
    m.change(s.label(NAME), name, {KEY: rules}, note="for the linears of each layer")


def _rules(s: MegatronSettings, name: str) -> list[str]:
    """Return our rules.

    Raises:
        ValueError: The file cannot be read, or asks for something else; the text says what.
    """
    text = s.beside(name)
    if text is None:
        raise ValueError("is a file that is not beside the script")
    try:
        tree = parse_yaml(text)
    except ForeignFileError as error:
        raise ValueError(str(error)) from error
    layers = s.value_or_default("num_layers")
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise ValueError("gives recipes to layers, whose number is not known")
    if not ("fp8" in s.given or "fp4" in s.given):
        raise ValueError("gives recipes to linears of a job without FP8")
    if "first_last_layers_bf16" in s.given:
        raise ValueError(
            "gives recipes beside first and last layers in BF16, which keep BF16 there"
        )
    matchers = list(_matchers(tree))
    stages = s.value_or_default("pipeline_model_parallel_size")
    rules = []
    for theirs, ours in LINEARS.items():
        paths = [f"decoder.layers.{layer}.{theirs}" for layer in range(layers)]
        chosen = [next((c for p, c in matchers if fnmatchcase(path, p)), None) for path in paths]
        recipes = [None if c is None else _recipe(tree, c, s.given) for c in chosen]
        if len(set(recipes)) == 1:
            rules += [f"*.{ours}:{recipes[0]}"] if recipes[0] else []
        elif stages != 1:
            raise ValueError("gives recipes to single layers, which have other numbers in stages")
        else:
            rules += [f"layers.{n}.{ours}:{recipe}" for n, recipe in enumerate(recipes) if recipe]
    return rules


def _matchers(tree: Any) -> list[tuple[str, str]]:
    """Return the pattern and the configuration's name of each enabled matcher, in order."""
    matchers = tree.get("matchers") if isinstance(tree, Mapping) else None
    if not isinstance(matchers, Mapping) or not all(
        isinstance(v, Mapping) for v in matchers.values()
    ):
        raise ValueError("has no matchers")
    enabled = [matcher for matcher in matchers.values() if matcher.get("enabled", False)]
    for matcher in enabled:
        if matcher.get("type") != "glob" or not isinstance(matcher.get("pattern"), str):
            raise ValueError(f"has a matcher of the type {matcher.get('type')}")
    return [(matcher["pattern"], str(matcher.get("config"))) for matcher in enabled]


def _recipe(tree: Mapping[str, Any], name: str, given: Mapping[str, Any]) -> str:
    """Return our name of the recipe that a configuration asks for."""
    configs = tree.get("configs")
    config = configs.get(name) if isinstance(configs, Mapping) else None
    training = config.get("training_recipe") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(training, Mapping):
        raise ValueError(f"has no training_recipe for {name}")
    if config.get("evaluation_recipe", training) != training:
        raise ValueError(f"asks for another recipe in validation ({name})")
    fields = dict(training)
    fp8 = fields.pop("fp8_quantization_recipe", None)
    fp4 = fields.pop("fp4_quantization_recipe", None)
    format_ = fields.pop("fp8_format", "e4m3")
    for field, value in fields.items():
        if field not in _OFF or value != _OFF[field]:
            raise ValueError(f"asks for {field}={value} ({name}), which linears do not have here")
    if fp8 is None and fp4 is None:
        return "high_precision"
    one_format = names_where(lambda traits: traits.is_e4m3)
    wanted = given["fp8"].value if "fp8" in given else "e4m3"
    known = {"tensorwise", "blockwise", "mxfp8", "nvfp4"}
    recipe = str(fp8 or fp4)
    if recipe not in known or (fp8 and fp4):
        raise ValueError(f"asks for the recipe {recipe} ({name}), which it cannot give")
    if format_ != ("e4m3" if recipe in one_format else wanted):
        raise ValueError(f"asks for the format {format_} ({name}), and the job for {wanted}")
    return recipe
