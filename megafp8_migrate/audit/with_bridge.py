"""Train a small GPT with the precision that a file of Megatron Bridge asks for.

Bridge's module of named precisions is run as it is. It sets fields of Megatron-core's
configuration, of the optimizer's and of the data parallelism's, as it does in a job.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megafp8_migrate.audit import with_megatron
from megafp8_migrate.audit.recording import StepRecorder, described

_PRECISION = "megatron.bridge.training.mixed_precision"
_SMALL = {
    "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "kv_channels": 64,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False,
    "attention_backend": None,
}  # fmt: skip
_DTYPES_OF_TORCH = {str(d): d for d in (torch.bfloat16, torch.float16, torch.float32)}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(job: Mapping[str, Any], recorder: StepRecorder) -> Callable[..., None]:
    """Import Megatron-core and Bridge's precisions; return the function that trains one rank."""
    transformer: Any = importlib.import_module("megatron.core.transformer")
    optimizers: Any = importlib.import_module("megatron.core.optimizer")
    distributed: Any = importlib.import_module("megatron.core.distributed")
    importlib.import_module("megatron.core.tensor_parallel")
    precision = _precisions(job["sources"])
    reads = with_megatron.trace_reads(job)

    def train(run: Mapping[str, Any], rank: int, record: dict[str, Any]) -> None:
        record["reads"] = reads
        tree = run["tree"]
        model = {**tree["model"], **_SMALL, "num_layers": run["layers"], **run["layout_fields"]}
        model["attention_backend"] = _backend()
        mixed = _mixed(precision, tree["mixed_precision"])
        dtype = next((_DTYPES[k] for k in _DTYPES if getattr(mixed, k, False)), torch.float32)
        model |= {"params_dtype": dtype, "pipeline_dtype": dtype}
        config = transformer.TransformerConfig(
            **with_megatron.known_fields(transformer.TransformerConfig, model)
        )
        ddp = distributed.DistributedDataParallelConfig(
            **with_megatron.known_fields(
                distributed.DistributedDataParallelConfig, _with_dtypes(tree["ddp"])
            )
        )
        optimizer = optimizers.OptimizerConfig(
            **with_megatron.known_fields(
                optimizers.OptimizerConfig, {**tree["optimizer"], "lr": 1e-3, "optimizer": "adam"}
            )
        )
        if mixed is not None:
            mixed.finalize()
            mixed.setup(config, optimizer, ddp)
        with_megatron.describe_recipe(config, job["fields"], record)
        record["configuration"] = described([config, ddp, optimizer])
        if not run["steps"]:
            record["is_whole"] = True
            return
        about = {"untied": True, "positions": "rope", "transformer_impl": "transformer_engine",
                 "ranks": config.tensor_model_parallel_size}  # fmt: skip
        with_megatron.train_small(config, ddp, optimizer, None, about, recorder, record)

    return train


def _backend() -> Any:
    enums: Any = importlib.import_module("megatron.core.transformer.enums")
    return enums.AttnBackend.unfused


def _mixed(precision: Any, said: Any) -> Any:
    """Return Bridge's configuration for a name or the fields of a section; None for neither."""
    if said is None:
        return None
    if isinstance(said, str):
        return precision.get_mixed_precision_config(said)
    return precision.MixedPrecisionConfig(
        **with_megatron.known_fields(precision.MixedPrecisionConfig, _with_dtypes(said))
    )


def _with_dtypes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields in which torch's dtypes stand for their names, as a saved file has them."""
    return {
        name: _DTYPES_OF_TORCH.get(value, value) if isinstance(value, str) else value
        for name, value in fields.items()
    }


def _precisions(sources: list[str]) -> ModuleType:
    """Import Bridge's precisions without the models of its package, of which it needs two names."""
    folder = next(
        (str(found) for source in sources if (found := Path(source, "megatron/bridge")).is_dir()),
        "",
    )
    for name, inside in (("", ""), (".training", "/training")):
        module = ModuleType(f"megatron.bridge{name}")
        module.__path__ = [folder + inside]
        sys.modules[module.__name__] = module
    models: Any = ModuleType("megatron.bridge.models")
    models.GPTModelProvider = models.T5ModelProvider = object
    sys.modules[models.__name__] = models
    return importlib.import_module(_PRECISION)
