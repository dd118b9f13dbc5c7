"""The parts of a GPT whose layers are Transformer Engine's `TransformerLayer`."""

# B batch  S sequence  D model width

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megafp8.backends.planned import PlannedGemms
from megafp8.backends.te.products import observe_products
from megafp8.backends.te.state import TeGemm, TeRegion, TeScaling
from megafp8.models.attention import AttentionContext
from megafp8.models.init import pieces_of
from megafp8.models.random import RandomStreams
from megafp8.parallel.parts import NativeParts
from megafp8.specs import Fp8Recipe, GPTSpec
from megafp8.specs.model import Activation, Normalization
from megafp8.specs.precision import GEMMS, HIGH_PRECISION, GemmName

# Transformer Engine's parameters by our logical names, less `layers.N.`. A fused one goes by the
# first of its pieces: query, key and value; gate and up.
PARAMETERS = {
    "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "attention_norm.bias": "self_attention.layernorm_qkv.layer_norm_bias",
    "attention.query.weight": "self_attention.layernorm_qkv.weight",
    "attention.query.bias": "self_attention.layernorm_qkv.bias",
    "attention.projection.weight": "self_attention.proj.weight",
    "attention.projection.bias": "self_attention.proj.bias",
    "mlp_norm.weight": "layernorm_mlp.layer_norm_weight",
    "mlp_norm.bias": "layernorm_mlp.layer_norm_bias",
    "mlp.fc1.weight": "layernorm_mlp.fc1_weight",
    "mlp.fc1.bias": "layernorm_mlp.fc1_bias",
    "mlp.gate.weight": "layernorm_mlp.fc1_weight",
    "mlp.gate.bias": "layernorm_mlp.fc1_bias",
    "mlp.fc2.weight": "layernorm_mlp.fc2_weight",
    "mlp.fc2.bias": "layernorm_mlp.fc2_bias",
}
# (our name, module, which of its GEMMs, how many it has)
LINEARS = (
    ("attention.qkv", "self_attention.layernorm_qkv", 1, 1),
    ("attention.projection", "self_attention.proj", 1, 1),
    ("mlp.fc1", "layernorm_mlp", 1, 2),
    ("mlp.fc2", "layernorm_mlp", 2, 2),
)
ACTIVATIONS: dict[Activation, str] = {
    "gelu-tanh": "gelu",
    "squared-relu": "srelu",
    "swiglu": "swiglu",
    "reglu": "reglu",
}
NORMALIZATIONS: dict[Normalization, str] = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def why_not(spec: GPTSpec, recipe: Fp8Recipe | None) -> str | None:
    """What of a model Transformer Engine's layers do not do as ours would; None: they do."""
    if spec.activation == "gelu":
        return "its GELU is the tanh form: ask for that one (model.openai_gelu=True)"
    if spec.activation not in ACTIVATIONS:
        return f"its {spec.activation} is not ours"
    if spec.position_embedding_type not in ("learned_absolute", "rope", "none"):
        return f"positions by {spec.position_embedding_type} do not reach its layers yet"
    if spec.transformer_block_type != "pre_ln":
        return "its layers are pre-norm"
    if spec.apply_query_key_layer_scaling or spec.fp32_residual_connection:
        return "query-key layer scaling and an FP32 residual stream are not in its layers"
    if spec.recompute is not None:
        return "recomputation does not reach its layers yet"
    if spec.ffn_dropout:
        return "its layers have no dropout inside the MLP"
    if recipe is not None:
        for index in range(spec.num_layers):
            if len({is_high_precision(recipe, name) for name in names_in_layer(index)}) > 1:
                return f"layer {index} is in FP8 in part; it can be so as a whole or not at all"
    return None


def names_in_layer(index: int) -> list[str]:
    return [f"layers.{index}.{name}" for name, *_ in LINEARS]


def is_high_precision(recipe: Fp8Recipe, name: str) -> bool:
    return recipe.precision_of(name) == HIGH_PRECISION


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
        super().__init__(*args, scaling=None, sequence_parallel=sequence_parallel, **kwargs)
        self.region, self.te_scaling, self.device = region, te_scaling, device
        self.recipe = recipe

    def layer(self, index: int) -> nn.Module:
        names, recipe = self.region.names, self.recipe
        in_fp8 = recipe is not None and not is_high_precision(recipe, names_in_layer(index)[0])
        weights_in_fp8 = in_fp8 and recipe is not None and recipe.params_in_fp8
        context = names.model_init(self.region.recipe) if weights_in_fp8 else nullcontext()
        with context:
            layer = names.transformer_layer(**self.arguments(index))
        self._adopt(layer, index, super().layer(index))
        if self.te_scaling is not None and in_fp8:
            for name, path, number, num_gemms in LINEARS:
                module = layer.get_submodule(path)
                gemm = TeGemm(f"layers.{index}.{name}", module, number, num_gemms)
                self.te_scaling.register(gemm)
        return TeLayer(layer, self, index, in_fp8=in_fp8)

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
            "num_gqa_groups": spec.num_kv_heads,
            "kv_channels": spec.head_size,
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
            "bias": spec.bias,
            "activation": ACTIVATIONS[spec.activation],
            "normalization": NORMALIZATIONS[spec.normalization],
            "device": self.device,
            # Its linears gather and scatter along the first dim, so parts of sequences lead there.
            "attn_input_format": "sbhd" if self.sequence_parallel else "bshd",
        }

    @torch.no_grad()
    def _adopt(self, layer: nn.Module, index: int, native: nn.Module) -> None:
        """Give Transformer Engine's parameters our initial values, pieces and FP32 masters.

        The masters are our FP32 initialization itself, which is more than what its
        `preserve_high_precision_init_val` would keep.
        """
        ours = {
            PARAMETERS[pieces_of(p)[0].name.removeprefix(f"layers.{index}.")]: p
            for p in native.parameters()
        }
        theirs = {name: p for name, p in layer.named_parameters() if p.numel() > 0}
        if set(ours) != set(theirs):
            odd = sorted(set(ours) ^ set(theirs))
            raise RuntimeError(f"Transformer Engine's layer and ours differ in {odd}")
        for path, source in ours.items():
            target: Any = theirs[path]
            if source.shape != target.shape:
                raise RuntimeError(f"{path} is {target.shape}, ours {source.shape}")
            forget_staged_amax(target)
            target.copy_(source)
            initial = source.initial_master  # type: ignore[attr-defined]
            if initial is None and is_kept_in_fp8(target):
                initial = source.detach().clone()
            target.pieces, target.initial_master = pieces_of(source), initial


def forget_staged_amax(param: torch.Tensor) -> None:
    """Transformer Engine quantizes its own random weights when it makes a layer in FP8; with
    delayed scaling their amax waits for the next update, though they are never used."""
    amax = getattr(getattr(param, "_quantizer", None), "amax", None)
    if amax is not None:
        amax.zero_()


def is_kept_in_fp8(param: torch.Tensor) -> bool:
    """Transformer Engine's FP8 weights are a subclass of the tensor."""
    return type(param) not in (torch.Tensor, nn.Parameter)


def stores_of(model: nn.Module) -> dict[nn.Parameter, Callable[[torch.Tensor], None]]:
    """How masters get into weights that Transformer Engine keeps in FP8: by its own `copy_`.

    They are rounded to the compute dtype before, as ours are.
    """
    layers = [module for module in model.modules() if isinstance(module, TeLayer)]

    def store(param: nn.Parameter, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
        def into_fp8(master: torch.Tensor) -> None:
            param.copy_(master.to(dtype))

        return into_fp8

    return {
        param: store(param, layer.dtype)
        for layer in layers
        for param in layer.parameters()
        if is_kept_in_fp8(param)
    }


class TeLayer(nn.Module):
    """Runs one of Transformer Engine's layers: keyed dropout, weight caching, counted GEMMs."""

    def __init__(
        self, layer: nn.Module, parts: TransformerEngineParts, index: int, *, in_fp8: bool
    ) -> None:
        super().__init__()
        self.layer, self.in_fp8 = layer, in_fp8
        self.index, self.region, self.counter = index, parts.region, parts.counter
        self.streams, self.sequence_parallel = parts.streams, parts.sequence_parallel
        self.spec, self.tp_size, self.dtype = parts.spec, parts.tp.size, parts.dtype
        self.has_dropout = max(parts.spec.hidden_dropout, parts.spec.attention_dropout) > 0
        self.count_attention_flops = parts.count_attention_flops
        self.products = observe_products(parts.region.names.extension)

    def forward(self, x_BSD: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """[B, S, D] -> [B, S, D], of S/tp tokens with sequence parallelism. It knows causal
        attention over whole sequences alone."""
        # Settings that lead to either are refused, and generation builds layers of our own.
        if context is not None and (context.mask is not None or context.cache is not None):
            raise RuntimeError(
                "Transformer Engine's layers got a mask or a cache, and know neither"
            )
        self.products.counter = self.counter
        with self._dropout(x_BSD.device), self.region.layer(in_fp8=self.in_fp8):
            out_BSD = self._run(x_BSD, rotary_arguments(context))
        self._count_attention(x_BSD, out_BSD)
        return out_BSD

    def _run(self, x_BSD: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        is_first = self.region.is_first_microbatch
        if not self.sequence_parallel:
            out_BSD: torch.Tensor = self.layer(x_BSD, is_first_microbatch=is_first, **more)
            return out_BSD
        x_SBD = x_BSD.transpose(0, 1).contiguous()
        out_SBD: torch.Tensor = self.layer(x_SBD, is_first_microbatch=is_first, **more)
        return out_SBD.transpose(0, 1).contiguous()

    @contextmanager
    def _dropout(self, device: torch.device) -> Iterator[None]:
        if self.training and self.has_dropout:
            sharded = self.sequence_parallel
            with self.streams.keyed(f"layers.{self.index}.dropout", device, sharded=sharded):
                yield
        else:
            yield

    def planned(self) -> PlannedGemms:
        """Its four linears together."""
        spec = self.spec
        width, ffn = spec.hidden_size, spec.ffn_hidden_size
        attention = width * (2 * spec.query_size + 2 * spec.kv_size)
        mlp = width * ffn * (3 if spec.is_gated else 2)
        flops = 2 * (attention + mlp) // self.tp_size
        fp8: tuple[GemmName, ...] = GEMMS if self.in_fp8 else ()
        return PlannedGemms(f"layers.{self.index}", flops, fp8, "chosen by name")

    def _count_attention(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> None:
        """The FLOPs of causal attention on this rank, by its shapes; those of the linears are
        counted where they run, for this layer in its backward pass too."""
        seq = x_BSD.shape[1] * (self.tp_size if self.sequence_parallel else 1)
        causal = 2 * x_BSD.shape[0] * seq * seq * self.spec.query_size // self.tp_size
        self.count_attention_flops(causal)
        if out_BSD.requires_grad:

            def begin_backward(grad: torch.Tensor) -> None:
                self.products.counter = self.counter
                self.count_attention_flops(2 * causal)

            out_BSD.register_hook(begin_backward)


def rotary_arguments(context: AttentionContext | None) -> dict[str, torch.Tensor]:
    """Our angles as Transformer Engine takes them, [S, 1, 1, R]: it pairs (i, i + R/2) as we do.

    It knows one position for each place in a sequence; `backends.check` refuses others.
    """
    if context is None or context.rotary is None:
        return {}
    angles_SR = context.rotary.angles
    if angles_SR.dim() != 2:
        raise RuntimeError("Transformer Engine's layers got positions that differ by sample")
    return {"rotary_pos_emb": angles_SR[:, None, None]}


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
