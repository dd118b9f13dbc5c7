"""The parts of a GPT whose layers are Transformer Engine's `TransformerLayer`."""

# B batch  S sequence  D model width

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megafp8.models.init import pieces_of
from megafp8.models.random import RandomStreams
from megafp8.parallel.parts import NativeParts
from megafp8.precision.backends.te_state import TeGemm, TeRegion, TeScaling
from megafp8.specs import Fp8Recipe

# Transformer Engine's parameters by the last part of our logical names: `layers.N.` is before it.
PARAMETERS = {
    "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "attention_norm.bias": "self_attention.layernorm_qkv.layer_norm_bias",
    "attention.query.weight": "self_attention.layernorm_qkv.weight",  # query, key and value
    "attention.query.bias": "self_attention.layernorm_qkv.bias",
    "attention.projection.weight": "self_attention.proj.weight",
    "attention.projection.bias": "self_attention.proj.bias",
    "mlp_norm.weight": "layernorm_mlp.layer_norm_weight",
    "mlp_norm.bias": "layernorm_mlp.layer_norm_bias",
    "mlp.fc1.weight": "layernorm_mlp.fc1_weight",
    "mlp.fc1.bias": "layernorm_mlp.fc1_bias",
    "mlp.fc2.weight": "layernorm_mlp.fc2_weight",
    "mlp.fc2.bias": "layernorm_mlp.fc2_bias",
}
# (our name, module, which of its GEMMs, how many it has)
GEMMS = (
    ("attention.qkv", "self_attention.layernorm_qkv", 1, 1),
    ("attention.projection", "self_attention.proj", 1, 1),
    ("mlp.fc1", "layernorm_mlp", 1, 2),
    ("mlp.fc2", "layernorm_mlp", 2, 2),
)


class TransformerEngineParts(NativeParts):
    """Embedding, final norm and head are ours; weights begin as ours do, by logical name."""

    def __init__(
        self,
        *args: Any,
        region: TeRegion,
        te_scaling: TeScaling | None,
        device: torch.device,
        recipe: Fp8Recipe | None,
        sequence_parallel: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, scaling=None, **kwargs)
        self.region, self.te_scaling, self.device = region, te_scaling, device
        self.params_in_fp8 = recipe is not None and recipe.params_in_fp8
        self.backward_in_fp8 = recipe is not None and not recipe.high_precision_gemms
        self.sequence_parallel = sequence_parallel

    def layer(self, index: int) -> nn.Module:
        names = self.region.names
        context = names.model_init(self.region.recipe) if self.params_in_fp8 else nullcontext()
        with context:
            layer = names.transformer_layer(**self.arguments(index))
        self._adopt(layer, index, super().layer(index))
        if self.te_scaling is not None:
            for name, path, number, num_gemms in GEMMS:
                module = layer.get_submodule(path)
                gemm = TeGemm(f"layers.{index}.{name}", module, number, num_gemms)
                self.te_scaling.register(gemm)
        return TeLayer(layer, self, index)

    def arguments(self, index: int) -> dict[str, Any]:
        """What `TransformerLayer` is made with. Its layers count from 1.

        With `fuse_qkv_params` and without interleaving, the QKV weight's rows are this rank's
        query, key and value in turn, as in ours.
        """
        spec = self.spec
        tracker = HeadDropout(self.streams, f"layers.{index}.attention.dropout", self.device)
        is_parallel = self.tp.size > 1
        return {
            "hidden_size": spec.hidden_size,
            "ffn_hidden_size": spec.ffn_hidden_size,
            "num_attention_heads": spec.num_attention_heads,
            "layernorm_epsilon": spec.layernorm_epsilon,
            "hidden_dropout": spec.hidden_dropout,
            "attention_dropout": spec.attention_dropout,
            "layer_number": index + 1,
            "self_attn_mask_type": "causal",
            "tp_group": self.tp.group if is_parallel else None,
            "tp_size": self.tp.size,
            "params_dtype": self.dtype,
            "get_rng_state_tracker": (lambda: tracker) if is_parallel else None,
            "sequence_parallel": self.sequence_parallel,
            "set_parallel_mode": is_parallel,
            "fuse_qkv_params": True,
            "qkv_weight_interleaved": False,
            "bias": True,
            "activation": "gelu",
            "normalization": "LayerNorm",
            "device": self.device,
            "attn_input_format": "bshd",
        }

    @torch.no_grad()
    def _adopt(self, layer: nn.Module, index: int, native: nn.Module) -> None:
        """Give Transformer Engine's parameters our initial values, pieces and FP32 masters.

        The masters are our FP32 initialization itself, which is more than what its
        `preserve_high_precision_init_val` would keep.
        """
        ours = {pieces_of(p)[0].name.removeprefix(f"layers.{index}."): p
                for p in native.parameters()}  # fmt: skip
        theirs = dict(layer.named_parameters())
        if set(ours) != set(PARAMETERS) or set(theirs) != set(PARAMETERS.values()):
            odd = set(ours) ^ set(PARAMETERS) | set(theirs) ^ set(PARAMETERS.values())
            raise RuntimeError(f"Transformer Engine's layer and ours differ in {sorted(odd)}")
        for name, path in PARAMETERS.items():
            source, target = ours[name], theirs[path]
            assert source.shape == target.shape, f"{path}: {target.shape}, ours {source.shape}"
            target.copy_(source)
            target.pieces = source.pieces  # type: ignore[attr-defined]
            initial = source.initial_master  # type: ignore[attr-defined]
            if initial is None and self.params_in_fp8:
                initial = source.detach().clone()
            target.initial_master = initial  # type: ignore[attr-defined]


class TeLayer(nn.Module):
    """Runs one of Transformer Engine's layers: keyed dropout, weight caching, counted GEMMs."""

    def __init__(self, layer: nn.Module, parts: TransformerEngineParts, index: int) -> None:
        super().__init__()
        self.layer = layer
        self.index, self.region, self.counter = index, parts.region, parts.counter
        self.streams, self.sequence_parallel = parts.streams, parts.sequence_parallel
        self.spec, self.tp_size = parts.spec, parts.tp.size
        self.has_dropout = max(parts.spec.hidden_dropout, parts.spec.attention_dropout) > 0
        self.count_attention_flops = parts.count_attention_flops
        self.backward_in_fp8 = parts.backward_in_fp8
        self.wide = {torch.float32: "fp32", torch.bfloat16: "bf16"}[parts.dtype]

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        with self._dropout(x_BSD.device):
            out_BSD: torch.Tensor = self.layer(
                x_BSD, is_first_microbatch=self.region.is_first_microbatch
            )
        self._count(x_BSD, out_BSD)
        return out_BSD

    @contextmanager
    def _dropout(self, device: torch.device) -> Iterator[None]:
        if self.training and self.has_dropout:
            sharded = self.sequence_parallel
            with self.streams.keyed(f"layers.{self.index}.dropout", device, sharded=sharded):
                yield
        else:
            yield

    def _count(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> None:
        """The FLOPs of four linears and of causal attention on this rank, by their shapes."""
        spec, tokens = self.spec, x_BSD.shape[0] * x_BSD.shape[1]
        sizes = 4 * spec.hidden_size**2 + 2 * spec.hidden_size * spec.ffn_hidden_size
        flops = 2 * tokens * sizes // self.tp_size
        causal = 2 * tokens * x_BSD.shape[1] * spec.hidden_size // self.tp_size
        in_fp8 = self.region.in_fp8
        backward = "fp8" if in_fp8 and self.backward_in_fp8 else self.wide
        self.counter.add("fp8" if in_fp8 else self.wide, "output", flops)
        self.count_attention_flops(causal)
        if out_BSD.requires_grad:

            def count_backward(grad: torch.Tensor) -> None:
                self.counter.add(backward, "grad_input", flops)
                self.counter.add(backward, "grad_weight", flops)
                self.count_attention_flops(2 * causal)

            out_BSD.register_hook(count_backward)


class HeadDropout:
    """What Transformer Engine calls a tracker of random states: attention's own under tensor
    parallelism, where each rank holds other heads. The generator is then put back, as the
    dropout that follows must be the same on all ranks."""

    def __init__(self, streams: RandomStreams, site: str, device: torch.device) -> None:
        self.streams, self.site, self.device = streams, site, device

    def get_states(self) -> dict[str, torch.Tensor]:
        """None that last: each draw is keyed by its place in the run."""
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None: ...

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.get_rng_state(self.device) if on_gpu else torch.get_rng_state()
        with self.streams.keyed(self.site, self.device, sharded=True):
            yield
        if on_gpu:
            torch.cuda.set_rng_state(before, self.device)
        else:
            torch.set_rng_state(before)
