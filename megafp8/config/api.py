"""Name what the commands of `megafp8_migrate` use of the configuration, and no more.

They are a package of their own, which imports no other module of `megafp8.config`:
tests/megafp8_migrate/test_files.py holds that.
"""

from __future__ import annotations

from megafp8.config import dialects
from megafp8.config.architecture import function_keys, spec_of_tree
from megafp8.config.checks import check_values
from megafp8.config.checks.precision import HYBRID, why_not_hybrid
from megafp8.config.errors import CombinedConfigError, Origin, SettingError
from megafp8.config.gelu import FUSION, GELU
from megafp8.config.keys import MAX_LAYERS, MAX_VOCABULARY
from megafp8.config.layers import DEFAULT_CONFIG, Layer, conf_dir
from megafp8.config.load import load
from megafp8.config.megatron_flags import NONE, Inert, Refused, megatron_flags
from megafp8.config.megatron_names import REFUSED_PRESETS
from megafp8.config.merged import merge
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import preset_names
from megafp8.config.rules import unmet_need, unused
from megafp8.config.schema import all_keys, schema_tree
from megafp8.config.settings import UNDECIDED, Setting, flatten, put_in, read_value
from megafp8.config.values import is_skip_frequency, layer_list, plain, window_problem

__all__ = [
    "CombinedConfigError",
    "DEFAULT_CONFIG",
    "FUSION",
    "GELU",
    "HYBRID",
    "Inert",
    "Layer",
    "MAX_LAYERS",
    "MAX_VOCABULARY",
    "NONE",
    "Origin",
    "REFUSED_PRESETS",
    "Refused",
    "Setting",
    "SettingError",
    "UNDECIDED",
    "all_keys",
    "check_values",
    "conf_dir",
    "dialects",
    "flatten",
    "function_keys",
    "is_skip_frequency",
    "layer_list",
    "load",
    "megatron_flags",
    "merge",
    "nemo_keys",
    "plain",
    "preset_names",
    "put_in",
    "read_value",
    "schema_tree",
    "spec_of_tree",
    "unmet_need",
    "unused",
    "why_not_hybrid",
    "window_problem",
]
