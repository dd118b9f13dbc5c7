"""Write checkpoints of small GPTs of Megatron-core's, and read them as Megatron-core does.

    torchrun --nproc-per-node 2 -m te_cpu run megatron_writer.py FOLDER '{"name": {"tp": 2, …}, …}'

Each model is saved by Megatron's own `dist_checkpointing` to FOLDER/NAME. With one rank, the
program also loads each checkpoint of FOLDER into a model of its own in FP32, and writes to
FOLDER/NAME.safetensors its logits. Of a case with `own` the file has the weights that were saved,
since Megatron-core cannot load its own weights in FP8 with torch 2.6 or later. The program knows
nothing of megafp8.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
from torch.distributed.checkpoint import filesystem  # noqa: E402

np.product = np.prod  # Megatron-core up to 0.14 calls what NumPy 2 does not have
filesystem._write_item.__defaults__ = (  # which 0.12 does not name, and torch 2.13 asks for
    filesystem.SerializationFormat.TORCH_SAVE,
)

import megatron.core  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

VERSION = tuple(int(number) for number in megatron.core.__version__.split(".")[:2])
VOCABULARY, TOKENS = 128, 32
OLD_SHARDS = {
    "fully_reshardable": "fully_sharded_model_space",
    "dp_reshardable": "fully_sharded_bucket_space",
}
"""How the optimizer's forms were named before 0.15."""
RANKS = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}  # fmt: skip


def make(case: dict[str, Any], *, reads: bool) -> Any:
    """Return the model of a case on this rank; one that reads is in FP32 and whole."""
    in_bf16 = case.get("bf16", False) and not reads
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    ranks = {} if reads else {name: case[key] for key, name in RANKS.items() if key in case}
    config: dict[str, Any] = dict(case["config"])
    if "activation_func" in config:
        config["activation_func"] = getattr(torch.nn.functional, config["activation_func"])
    if reads:
        config = {name: value for name, value in config.items() if not name.startswith("fp8")}
    made = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, pipeline_dtype=dtype,
        bf16=in_bf16, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        init_method_std=0.2, sequence_parallel=ranks.get("tensor_model_parallel_size", 1) > 1,
        **ranks, **config,
    )  # fmt: skip
    if case.get("local"):
        spec: Any = get_gpt_layer_local_spec(normalization=made.normalization)
    elif made.num_moe_experts:
        spec = get_gpt_decoder_block_spec(made, use_transformer_engine=True)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=made.qk_layernorm)
    model: Any = GPTModel(
        made, spec, vocab_size=VOCABULARY, max_sequence_length=TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=case.get("positions", "rope"),
        share_embeddings_and_output_weights=case.get("tied", False),
    ).cuda()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # else all of them are 0 or 1
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.linspace(0, 0.3, buffer.numel()))
    return made, model.bfloat16() if in_bf16 and not made.fp8 else model


def write(folder: Path, case: dict[str, Any]) -> None:
    """Save a model, after a step of its optimizer if the case has one."""
    made, model = make(case, reads=False)
    for _ in range(case.get("passes", 0)):
        run_forward(model)
    metadata = case.get("metadata", {})
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 7}
    state |= model.sharded_state_dict(metadata=metadata)
    if "optimizer" in case:
        shards = case["optimizer"]
        shards = OLD_SHARDS.get(shards, shards) if VERSION < (0, 15) else shards
        optimizer, _ = optimizer_of(model, made, shards)
        for parameter in model.parameters():
            parameter.main_grad.normal_()
        optimizer.step()
        weights = model.sharded_state_dict(metadata=metadata)
        kinds = {"sharding_type": shards} if shards else {}
        if VERSION >= (0, 13):
            kinds = {"metadata": metadata | {f"distrib_optim_{k}": v for k, v in kinds.items()}}
        state["optimizer"] = optimizer.sharded_state_dict(weights, **kinds)
        state |= weights
    if "arguments" in case:
        state["args"] = Namespace(**case["arguments"], params_dtype=made.params_dtype)
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(state, str(folder))
    if case.get("own"):
        values = {name: value.detach().float() for name, value in model.named_parameters()}
        values |= scaling_of(model) if "passes" in case else {}
        values = {name: value.clone() for name, value in values.items()}
        values |= {"losses": train(model, made, case["trains"])} if "trains" in case else {}
        save_file(values, f"{folder}.safetensors")


def run_forward(model: Any) -> None:
    """Run a forward pass, which writes FP8's histories and scales."""
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS))
    model.set_is_first_microbatch()  # else weights stay in FP8 as they were cast first
    model(tokens, torch.arange(TOKENS).expand(2, TOKENS), None, labels=tokens)


def optimizer_of(model: Any, made: Any, shards: str) -> tuple[Any, Any]:
    """Return Megatron's Adam for a model, and the model wrapped for data parallelism."""
    wrapped = DistributedDataParallel(
        made, DistributedDataParallelConfig(use_distributed_optimizer=bool(shards)), model
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=0.02, adam_eps=0.1, weight_decay=0.0, bf16=made.bf16,
        params_dtype=made.params_dtype, use_distributed_optimizer=bool(shards),
    )  # fmt: skip
    return get_megatron_optimizer(settings, [wrapped]), wrapped


def train(model: Any, made: Any, steps: int) -> torch.Tensor:
    """Train, with moments that begin at zero, and return the losses.

    As with `calculate_per_token_loss`, gradients are divided by the number of tokens at the end.
    With so large an `adam_eps` an update is proportional to its gradient: else one that is nothing
    but rounding would move a weight as far as any other.
    """
    optimizer, wrapped = optimizer_of(model, made, "")
    losses = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        text = torch.randint(0, VOCABULARY, (2, TOKENS + 1), generator=draw)
        model.set_is_first_microbatch()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        positions = torch.arange(TOKENS).expand(2, TOKENS)
        loss = wrapped(text[:, :-1], positions, None, labels=text[:, 1:]).sum()
        loss.backward()
        wrapped.finish_grad_sync()
        wrapped.scale_gradients(1 / (2 * TOKENS))
        optimizer.step()
        losses.append(loss.detach().float() / (2 * TOKENS))
    return torch.stack(losses)


def scaling_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the scales and histories that Transformer Engine's modules hold."""
    return {
        f"{name}.{kind}.{side}": getattr(module.fp8_meta[f"scaling_{side}"], kind).clone()
        for name, module in model.named_modules()
        if "recipe" in getattr(module, "fp8_meta", {}) and "linear" in name
        for kind in ("scale", "amax_history")
        for side in ("fwd", "bwd")
    }


def read(folder: Path, case: dict[str, Any]) -> None:
    """Load a checkpoint into a whole model, and write what it computes and what is in the files."""
    _, model = make(case, reads=True)
    wanted = model.sharded_state_dict(metadata=case.get("metadata", {}))
    wanted = {name: value for name, value in wanted.items() if "_extra_state" not in name}
    for value in wanted.values():  # masters, where the optimizer has them
        begin = case.get("masters", {}).get("experts" if ".experts." in value.key else "others", "")
        value.key = value.key if value.key.endswith("expert_bias") else begin + value.key
    loaded = dist_checkpointing.load(wanted, str(folder))
    model.load_state_dict({k: v for k, v in loaded.items() if k in wanted}, strict=False)
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=draw)
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    mask = torch.ones(TOKENS, TOKENS).triu(1).bool()[None, None] if case.get("local") else None
    with torch.no_grad():
        logits = model.eval()(tokens, positions, mask)
    save_file({"logits": logits.float().contiguous()}, f"{folder}.safetensors")


def main() -> None:
    """Write the models that the command line describes, and read those of all ranks."""
    root, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(minutes=5))
    for name, case in cases.items():
        is_written = (root / name).is_dir()
        if VERSION < (0, 15) and case.get("optimizer"):
            # It cannot read its masters into a model, which in FP32 has the same numbers.
            case = case | {"bf16": False, "masters": {}}
        ranks = [1 if is_written else case.get(key, 1) for key in RANKS]
        parallel_state.initialize_model_parallel(
            ranks[0], ranks[1], expert_model_parallel_size=ranks[2]
        )
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        if not is_written:
            write(root / name, case)
        if dist.get_world_size() == 1 and not case.get("own"):
            read(root / name, case)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
