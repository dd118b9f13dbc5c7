"""What `model.fp8_backend` may be asked for: rules between it and the other keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megafp8.config.problems import SettingError, raise_if_any
from megafp8.specs.precision import BackendName

KEY = "model.fp8_backend"
NATIVE = "Use model.fp8_backend=native (our own engine, on any device)"

Finding = tuple[str, str, str]  # key, reason, way out


def backend(asked: str) -> BackendName:
    """`auto` is our own engine: it runs every recipe on every device."""
    names: dict[str, BackendName] = {"te": "te", "torchao": "torchao"}
    return names.get(asked, "native")


def refuse_backend(values: Mapping[str, Any]) -> None:
    """Raise what the asked backend cannot do, all at once. `trainer.accelerator` is resolved."""
    problems = [
        SettingError(key, values[key], reason, way_out) for key, reason, way_out in findings(values)
    ]
    raise_if_any(problems)


def findings(v: Mapping[str, Any]) -> Iterator[Finding]:
    asked = v[KEY]
    if asked == "te":
        yield from _te(v)
    elif asked == "torchao":
        yield from _torchao(v)
    if asked != "torchao" and v["model.fp8_pad_inner_dim"]:
        yield (
            "model.fp8_pad_inner_dim",
            f"is torchao's, and model.fp8_backend={asked}",
            "Use model.fp8_backend=torchao, or leave it out",
        )
    if v["model.fp8_fsdp_all_gather"]:
        yield "model.fp8_fsdp_all_gather", "needs FSDP, which is not supported yet", "Leave it out"


def _te(v: Mapping[str, Any]) -> Iterator[Finding]:
    if v["trainer.accelerator"] == "cpu":
        yield KEY, "Transformer Engine runs on NVIDIA GPUs alone, and this run is on a CPU", NATIVE
    if not v["model.transformer_engine"]:
        yield (
            KEY,
            "model.transformer_engine=False asks for no Transformer Engine",
            "Set model.transformer_engine=True",
        )
    if v["model.ffn_dropout"]:
        yield (
            "model.ffn_dropout",
            "Transformer Engine's layer has no dropout inside the MLP",
            f"Use model.ffn_dropout=0. {NATIVE}",
        )
    if v["model.fp8"] and v["model.fp8_interval"] != 1:
        yield (
            "model.fp8_interval",
            "Transformer Engine makes scales anew at every update",
            f"Use model.fp8_interval=1. {NATIVE}",
        )


def _torchao(v: Mapping[str, Any]) -> Iterator[Finding]:
    if not v["model.fp8"]:
        yield KEY, "torchao runs FP8 alone", "Set model.fp8=True, or use native or auto"
    elif (recipe := v.get("model.fp8_recipe", "delayed")) in ("delayed", "blockwise"):
        yield (
            KEY,
            f"torchao has no {recipe} recipe",
            "Use model.fp8_recipe=tensorwise, rowwise or rowwise_with_gw_hp. " + NATIVE,
        )
    if (tp := v["model.tensor_model_parallel_size"]) > 1:
        yield (
            "model.tensor_model_parallel_size",
            f"torchao's linears are not tensor-parallel here, and {tp} ranks share each",
            f"Use model.tensor_model_parallel_size=1. {NATIVE}",
        )
