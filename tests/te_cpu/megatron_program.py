"""Train small GPTs of Megatron-core's for two steps each, as a program for GPUs does.

    torchrun --nproc-per-node 2 -m te_cpu run megatron_program.py FOLDER '[{"tp": 2, …}, …]'

It knows nothing of te_cpu. Each rank writes what it saw of each model to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # noqa: E402

SAMPLES, TOKENS, VOCABULARY = 2, 32, 128
STEPS, MICROBATCHES = 2, 2
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32",
    "moe_aux_loss_coeff": 0.01,
}  # fmt: skip


def make(tp: int, ep: int, experts: dict[str, Any] | None, more: dict[str, Any]) -> Any:
    """Return a model with its optimizer; master weights are the same in every layout."""
    config = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32,
        tensor_model_parallel_size=tp, sequence_parallel=tp > 1, expert_model_parallel_size=ep,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, fp8_amax_history_len=4,
        fp8_amax_compute_algo="max", finalize_model_grads_func=finalize_model_grads,
        **(EXPERTS | experts if experts is not None else {}), **more,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec(
        config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    model: Any = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=TOKENS).cuda()
    for name, parameter in model.named_parameters():
        if experts is not None and (parameter.dim() > 1 or "router" in name):
            draw = torch.Generator().manual_seed(seed_of(name, config.num_moe_experts // ep))
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=draw))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=torch.float32, bf16=False)
    optimizer = get_megatron_optimizer(settings, [model])
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def seed_of(name: str, local_experts: int) -> int:
    """Return a number of a weight, whatever rank has its expert and in whichever class."""
    found = re.search(r"local_experts\.(\d+)\.|(?<=weight)(\d+)$", name)
    if found is None:
        return zlib.crc32(name.encode())
    first = parallel_state.get_expert_model_parallel_rank() * local_experts
    rest = name[: found.start()] + name[found.end() :]
    return zlib.crc32(f"{rest} {first + int(found[1] or found[2])}".encode())


def train(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the loss of each token, the norm of each step, and the histories at the end."""
    draw = torch.Generator().manual_seed(7)  # all ranks have the same tokens
    losses, norms = [], []

    def forward(samples: Iterator[torch.Tensor], model: Any) -> Any:
        tokens = next(samples).cuda()
        positions = torch.arange(TOKENS, device="cuda").expand(SAMPLES, TOKENS)
        found = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float()
        losses.append(found.flatten().tolist())
        return found, lambda found: (found.mean(), {})

    for _ in range(STEPS):
        shape = (MICROBATCHES, SAMPLES, TOKENS + 1)
        samples = iter(torch.randint(0, VOCABULARY, shape, generator=draw))
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=samples, model=[model],
            num_microbatches=MICROBATCHES, seq_length=TOKENS, micro_batch_size=SAMPLES,
            forward_only=False,
        )  # fmt: skip
        is_whole, norm, _ = optimizer.step()
        assert is_whole
        norms.append(float(norm))
        model.zero_grad_buffer()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "histories": dict(histories(model))}


def histories(model: Any) -> Any:
    """Yield the histories of each linear's tensors, [amaxes, tensors], the newest amax last.

    The last slot of each product, for an output or a gradient that is not cast, is left out.
    """
    for name, module in model.named_modules():
        meta = getattr(module, "fp8_meta", {})
        for direction, slots in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            history = getattr(meta.get(direction), "amax_history", None)
            if history is None or name.endswith("core_attention"):
                continue
            used = [slot for slot in range(history.shape[1]) if slot % slots != slots - 1]
            yield f"{name}/{direction}", history[1:, used].tolist()


def main() -> None:
    """Train each of the models that the command line describes."""
    folder, models = Path(sys.argv[1]), json.loads(sys.argv[2])
    assert torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(minutes=5))
    found = {}
    for name, (tp, ep, experts, more) in models.items():
        parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        found[name] = train(*make(tp, ep, experts, more))
        parallel_state.destroy_model_parallel()
        FP8GlobalStateManager.reset()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
