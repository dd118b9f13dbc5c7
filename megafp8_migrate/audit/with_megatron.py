"""Train a small GPT of Megatron-core's, from its own arguments to its own optimizer.

The functions of `megatron.training` are those that its `pretrain_gpt.py` calls. The sizes of the
model are small; precision, layout and the kind of layers are the user's.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from megafp8_migrate.audit.recording import StepRecorder, described, digest, state_of

TOKENS, SAMPLES, VOCABULARY = 64, 2, 128
STEPS, MICROBATCHES = 2, 2
SIZES = (
    "--hidden-size", "256", "--ffn-hidden-size", "512", "--num-attention-heads", "4",
    "--seq-length", str(TOKENS), "--max-position-embeddings", str(TOKENS),
    "--micro-batch-size", str(SAMPLES), "--global-batch-size", "8", "--train-iters", "10",
    "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer",
    "--vocab-size", str(VOCABULARY), "--hidden-dropout", "0", "--attention-dropout", "0",
    "--attention-backend", "unfused", "--no-gradient-accumulation-fusion",
)  # fmt: skip
"""Flags for Megatron's parser in place of the user's."""


def prepare(job: Mapping[str, Any], recorder: StepRecorder) -> Callable[..., None]:
    """Import Megatron; return the function that trains one rank."""
    arguments = importlib.import_module("megatron.training.arguments")
    utilities = importlib.import_module("megatron.training.argument_utils")
    training = importlib.import_module("megatron.training.training")
    reads = trace_reads(job)

    def train(run: Mapping[str, Any], rank: int, record: dict[str, Any]) -> None:
        record["reads"] = reads
        # `words` are audited flags of the user's command, and those that the small model keeps.
        sys.argv = ["pretrain_gpt.py", *run["words"], *SIZES, "--num-layers", str(run["layers"])]
        args = arguments.parse_args()
        arguments.validate_args(args)
        config = utilities.core_transformer_config_from_args(args)
        describe_recipe(config, job["fields"], record)
        record["configuration"] = described([vars(args), config])
        if not run["steps"]:
            record["is_whole"] = True
            return
        optimizer_config, overrides = training.get_megatron_optimizer_config(args)
        model = {
            "untied": args.untie_embeddings_and_output_weights,
            "positions": args.position_embedding_type,
            "transformer_impl": args.transformer_impl,
            "ranks": args.tensor_model_parallel_size,
        }
        ddp = training.get_megatron_ddp_config(args)
        train_small(config, ddp, optimizer_config, overrides, model, recorder, record)

    return train


def trace_reads(job: Mapping[str, Any]) -> dict[str, list[str]]:
    """Note where Megatron's code reads the audited fields of its configuration."""
    from megafp8_migrate.audit.host import shown

    places_of: dict[str, list[str]] = {}
    cls: Any = importlib.import_module("megatron.core.transformer").TransformerConfig
    names = frozenset(job["fields"])
    plain = cls.__getattribute__

    def traced(self: Any, name: str) -> Any:
        if name in names:
            frame = sys._getframe(1)
            place = shown(frame.f_code.co_filename, frame.f_lineno, dict(job))
            places = places_of.setdefault(name, [])
            if place and place not in places:
                places.append(place)
        return plain(self, name)

    cls.__getattribute__ = traced
    return places_of


def describe_recipe(config: Any, names: Sequence[str], record: dict[str, Any]) -> None:
    """Record the audited fields of a configuration, and the recipe that Megatron makes of it."""
    record["settings"] = {name: described(vars(config).get(name)) for name in names}
    kind = "fp8" if config.fp8 else "fp4" if getattr(config, "fp4", None) else None
    if kind is None:
        record["recipe"] = None
        return
    module = importlib.import_module(f"megatron.core.{kind}_utils")
    record["recipe"] = described(getattr(module, f"get_{kind}_recipe")(config))


def train_small(
    config: Any, ddp_config: Any, optimizer_config: Any, overrides: Any,
    about: Mapping[str, Any], recorder: StepRecorder, record: dict[str, Any],
) -> None:  # fmt: skip
    """Train two steps of two microbatches, and validate; put everything that was seen on record."""
    core = importlib.import_module("megatron.core")
    core.parallel_state.initialize_model_parallel(about["ranks"])
    random: Any = importlib.import_module("megatron.core.tensor_parallel")
    random.model_parallel_cuda_manual_seed(1234)
    model = _wrapped(_model(config, about), config, ddp_config, optimizer_config)
    optimizer = _optimizer(model, optimizer_config, overrides)
    config.grad_scale_func = optimizer.scale_loss
    distributed = importlib.import_module("megatron.core.distributed")
    step = record["step"]
    draw = torch.Generator().manual_seed(7)
    for number in range(STEPS):
        for microbatch in range(MICROBATCHES):
            loss = _loss(model, draw)
            optimizer.scale_loss(loss).backward()
            step[f"output {number}.{microbatch}"] = digest(loss)
        distributed.finalize_model_grads([model])
        step.update({f"{name} {number}": said for name, said in state_of(model).items()})
        step[f"update {number}"] = [repr(value) for value in optimizer.step()[:2]]
        model.zero_grad_buffer()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        step["validation"] = digest(_loss(model, draw))
    step.update({f"{name} at the end": said for name, said in state_of(model).items()})
    finish(recorder, record)


def finish(recorder: StepRecorder, record: dict[str, Any]) -> None:
    """Put the recorder's lists on record."""
    record["regions"] = recorder.recipes
    record["step"] |= {f"message {name}": times for name, times in recorder.messages.items()}
    record["is_whole"] = True


def _model(config: Any, about: Mapping[str, Any]) -> Any:
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    qk_norm = bool(getattr(config, "qk_layernorm", False))
    if about["transformer_impl"] == "local":
        spec = specs.get_gpt_layer_local_spec(qk_layernorm=qk_norm)
    else:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    gpt: Any = importlib.import_module("megatron.core.models.gpt")
    return gpt.GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=TOKENS, parallel_output=True,
        share_embeddings_and_output_weights=not about["untied"],
        position_embedding_type=about["positions"],
    )  # fmt: skip


def _wrapped(model: Any, config: Any, ddp_config: Any, optimizer_config: Any) -> Any:
    """Wrap a model in Megatron's half precision and its data parallelism, as `get_model` does."""
    if config.fp16 or config.bf16:
        module: Any = importlib.import_module("megatron.core.transformer.module")
        model = module.Float16Module(config, model)
    distributed = importlib.import_module("megatron.core.distributed")
    training = sys.modules.get("megatron.training.training")
    if training is not None and hasattr(training, "wrap_model_chunks_with_ddp"):
        [wrapped] = training.wrap_model_chunks_with_ddp(
            [model], config, ddp_config, use_layer_wise_distributed_optimizer=False
        )
        return wrapped
    return distributed.DistributedDataParallel(config, ddp_config, model)


def _optimizer(model: Any, optimizer_config: Any, overrides: Any) -> Any:
    module: Any = importlib.import_module("megatron.core.optimizer")
    more = {} if overrides is None else {"config_overrides": overrides}
    optimizer = module.get_megatron_optimizer(optimizer_config, [model], **more)
    optimizer.reload_model_params()
    return optimizer


def _loss(model: Any, draw: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS + 1), generator=draw)
    positions = torch.arange(TOKENS).expand(SAMPLES, TOKENS)
    losses: torch.Tensor = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return losses.float().mean()


def known_fields(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
