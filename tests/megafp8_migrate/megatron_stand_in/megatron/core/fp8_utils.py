import importlib
import os

import transformer_engine.common.recipe as recipes

DEBUG = os.getenv("STAND_IN_DEBUG") == "1"


def hidden():
    return os.environ.get("STAND_IN_HIDDEN") == "1"


def get_fp8_recipe(config):
    if config.fp8_quantizer_factory:
        module, _, name = config.fp8_quantizer_factory.rpartition(".")
        getattr(importlib.import_module(module), name)("linear_input")
    margin = config.fp8_margin
    if hidden() and config.fp8_interval != 1:
        margin += config.fp8_interval
    attention = config.fp8_dot_product_attention
    if DEBUG and attention:
        margin += 1
    if config.fp8_param:
        raise ValueError("FP8 weights are not here")
    return recipes.DelayedScaling(
        margin=margin, override_linear_precision=(False, False, not config.fp8_wgrad)
    )
