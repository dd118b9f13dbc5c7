"""The tree of settings under NeMo's names: the one place where a key is named and explained.

What is `???` (`MISSING`) shapes the job: a YAML must give it (`conf/pretrain_gpt.yaml` does).
`nemo=` is the default in NeMo's `megatron_gpt_config.yaml`; keys of our own leave it out.
"""

from __future__ import annotations

from megafp8.config.schema.exp_manager import ExpManager
from megafp8.config.schema.model import Model
from megafp8.config.schema.optim import Sched
from megafp8.config.schema.profile import NsysProfile
from megafp8.config.schema.trainer import Trainer
from megafp8.config.schema.tree import Config, all_keys, all_sections, schema_tree

__all__ = [
    "Config",
    "ExpManager",
    "Model",
    "NsysProfile",
    "Sched",
    "Trainer",
    "all_keys",
    "all_sections",
    "schema_tree",
]
